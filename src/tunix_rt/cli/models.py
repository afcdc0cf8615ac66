"""`tunix-rt models`: which model families are supported, and how. Loads neither torch nor jax."""

from typing import Any

import click

from tunix_rt.cli.views import text

TRACED = "any other causal language model of transformers, without remote code"
REFUSED = "models with remote code, encoder-decoder models, pickled weights (*.bin, *.pt)"


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(as_json: bool) -> None:
    """List the model families with an exact plan, their presets and engines, and what is traced or refused.

    \b
    exact    memory by formula, without torch; fast kernels; packed rows
    traced   memory by a trace of one step in PyTorch; what the loaded model is shown to support
    """
    families = _families()
    if as_json:
        text.show_json({"exact": families, "traced": TRACED, "refused": REFUSED})
        return
    rows = [
        [one["model_type"], ", ".join(one["engines"]), f"{preset['name']} ({_size(preset['parameters'])})"]
        for one in families
        for preset in one["presets"] or [{"name": "no preset", "parameters": 0}]
    ]
    shown: list[list[str]] = []
    for row in rows:
        repeated = bool(shown) and row[0] == next(one[0] for one in reversed(shown) if one[0])
        shown.append(["", "", row[2]] if repeated else row)
    text.show_table(["model_type", "engines", "presets"], shown, whole=["model_type"])
    click.echo(f"\nexact: the families above\ntraced, on torch: {TRACED}\nrefused: {REFUSED}")


def _families() -> list[dict[str, Any]]:
    from tunix_rt.models.families import FAMILIES
    from tunix_rt.models.resolve import PRESET_OF, preset_names, resolve_architecture
    from tunix_rt.plan.shape import shape_of

    presets: dict[str, list[dict[str, Any]]] = {}
    for name in preset_names():
        shape = shape_of(resolve_architecture(name).config)
        hub_ids = sorted(hub_id for hub_id, preset in PRESET_OF.items() if preset == name)
        presets.setdefault(shape.model_type, []).append(
            {"name": name, "parameters": shape.parameters, "hub_ids": hub_ids, "layers": shape.layers}
        )
    return [
        {
            "model_type": family.model_type,
            "class": family.class_name,
            "engines": list(family.engines),
            "presets": sorted(presets.get(family.model_type, []), key=lambda preset: preset["parameters"]),
        }
        for family in FAMILIES.values()
    ]


def _size(parameters: int) -> str:
    if not parameters:
        return "any size"
    return f"{parameters / 1e9:.1f}B" if parameters >= 999.5e6 else f"{parameters / 1e6:.0f}M"
