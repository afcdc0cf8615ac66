"""The command lines of the founding documents, flag for flag; and the flags that our own words of refusal advise.

Whoever is told to add `--resume` must be able to. Nothing else is added here.
"""

import argparse
from pathlib import Path
from typing import Any


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
    from tunix_rt.config import find_config, load_config, modernise
    from tunix_rt.errors import ConfigError
    from tunix_rt.strict_yaml import read_yaml

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
        "training.backend": backend,
        "training.resume_from_checkpoint": "auto" if options.resume else None,
    }
    flags |= {name: value for name, value in given.items() if value is not None}
    return load_config(find_config(options.config), overrides=tuple(options.overrides), flags=flags)
