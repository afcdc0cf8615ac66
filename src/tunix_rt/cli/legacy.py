"""The command lines of the founding documents, flag for flag. Frozen: nothing is added here."""

import argparse
from pathlib import Path
from typing import Any


def main(backend: str, argv: list[str] | None = None) -> int:
    """Parse the old flags, run the pipeline, return the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Train from a configuration (see: tunix-rt train)."
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--dataset")
    parser.add_argument("--device")
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--smoke_config", help="settings laid over --config; only when given")
    parser.add_argument("--smoke_steps", type=int, help="like --max_steps; only when given")
    options = parser.parse_args(argv)
    from tunix_rt.cli.main import report
    from tunix_rt.cli.train import run_and_show
    from tunix_rt.errors import TunixError

    try:
        run_and_show(_config(options, backend), options.output, as_json=False)
    except TunixError as error:
        report(error)
        return error.exit_code
    return 0


def _config(options: argparse.Namespace, backend: str) -> Any:
    from tunix_rt.config import find_config, load_config, modernise, read_yaml
    from tunix_rt.errors import ConfigError

    if options.max_steps and options.smoke_steps and options.max_steps != options.smoke_steps:
        raise ConfigError("--max_steps and --smoke_steps differ", fix="give one of them")
    flags: dict[str, Any] = {}
    if options.smoke_config:
        smoke = find_config(options.smoke_config)
        for section, settings in modernise(read_yaml(smoke), str(smoke)).items():
            flags |= {f"{section}.{name}": value for name, value in settings.items()}
    given = {
        "data.dataset": options.dataset,
        "training.device": options.device,
        "training.max_steps": options.smoke_steps or options.max_steps,
        "training.backend": backend,
    }
    flags |= {name: value for name, value in given.items() if value is not None}
    return load_config(find_config(options.config), flags=flags)
