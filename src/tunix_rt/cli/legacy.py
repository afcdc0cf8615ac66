"""The command lines of the founding documents, flag for flag; and the flags that our own words of refusal advise.

Whoever is told to add `--resume` must be able to. Nothing else is added here.
"""

import argparse
from pathlib import Path
from typing import Any

SCRIPTS = {"torch": "training_pt/train.py", "jax": "training/run_train_jax.py"}
"""Each engine's script. A script runs its own engine and no other."""


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Train from a configuration (see: tunix-rt train)."
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--dataset", "--data")
    parser.add_argument("--device")
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--smoke_config", help="settings laid over --config; only when given")
    parser.add_argument("--smoke_steps", type=int, help="like --max_steps; only when given")
    parser.add_argument("--model", help="hub id, local folder, or a shipped model")
    parser.add_argument("--weights", help="pretrained or random")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="continue the run in the output folder")
    return parser.parse_args(argv)


def main(backend: str, argv: list[str] | None = None) -> int:
    """Parse the old flags, run the pipeline, return the exit code."""
    options = options_of(argv)
    from tunix_rt.cli.main import report
    from tunix_rt.cli.train import run_and_show
    from tunix_rt.errors import TunixError

    try:
        run_and_show(config_of(options, backend), options.output, as_json=False)
    except TunixError as error:
        report(error)
        return error.exit_code
    return 0


def config_of(options: argparse.Namespace, backend: str) -> Any:
    """The settled configuration on the script's own engine; one that names the other engine is refused, not turned over."""
    from tunix_rt.config.load import find_config, load_config
    from tunix_rt.config.names import modernise
    from tunix_rt.config.yaml import read_yaml
    from tunix_rt.errors import ConfigError

    steps = [number for number in (options.smoke_steps, options.max_steps) if number is not None]
    if len(set(steps)) > 1:
        raise ConfigError("--max_steps and --smoke_steps differ", fix="give one of them")
    flags: dict[str, Any] = {}
    if options.smoke_config:
        smoke = find_config(options.smoke_config)
        for section, settings in modernise(read_yaml(smoke), str(smoke)).items():
            flags |= {f"{section}.{name}": value for name, value in settings.items()}
    given = {
        "model.model_name_or_path": options.model,
        "model.weights": options.weights,
        "data.dataset": options.dataset,
        "training.device": options.device,
        "training.max_steps": steps[0] if steps else None,
        "training.resume_from_checkpoint": "auto" if options.resume else None,
    }
    flags |= {name: value for name, value in given.items() if value is not None}
    config = load_config(find_config(options.config), overrides=tuple(options.overrides), flags=flags)
    if "backend" in config.training.model_fields_set and config.training.backend != backend:
        asked = config.training.backend
        raise ConfigError(
            f"training.backend: {asked} is asked for, and {SCRIPTS[backend]} runs the {backend} engine alone",
            fix=f"run python {SCRIPTS[asked]} with the same flags, or take training.backend out of the configuration",
        )
    return config.model_copy(update={"training": config.training.model_copy(update={"backend": backend})})
