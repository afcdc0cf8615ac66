"""The pages about the doctor that code decides: one for each cause with real output, the wheels, the accelerators."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from docs.cluster_pages import nodes_table
from docs.doctor_causes import CAUSES, Cause
from docs.markdown import WRITTEN, table
from tunix_rt.accelerators import Accelerator, accelerators
from tunix_rt.cli.doctor import verdict_lines
from tunix_rt.doctor import wheels
from tunix_rt.doctor.checks import CAUSES as CAUSES_OF_KIND
from tunix_rt.doctor.checks import KIND_OF, judge
from tunix_rt.doctor.facts import Ask, Facts, facts_from_json
from tunix_rt.doctor.selection import choose_device
from tunix_rt.errors import HardwareError

FACTS = Path(__file__).parents[1] / "tests" / "facts"
FOLDER = Path("docs/doctor")
KIND_WORDS = {
    "hardware": "the device is missing, or cannot do what the run needs",
    "driver": "NVIDIA's driver or its kernel module",
    "wheel": "the installed build of torch or jax",
    "masked": "the device is present and hidden",
    "container": "the options of the container, or its state",
    "permissions": "the device is present and this user cannot open it",
    "environment": "packages or variables of this environment",
    "busy": "another process holds the device or its memory",
    "storage": "the disk",
    "processes": "what the GPUs and processes of a run have in common, and how they reach each other",
}


def pages() -> dict[Path, str]:
    """Path below the root -> the text it should hold now."""
    return {
        FOLDER / "README.md": index_page(),
        **{FOLDER / f"{code}.md": cause_page(code, cause) for code, cause in CAUSES.items()},
        Path("docs/reference/wheels.md"): wheels_page(),
        Path("docs/reference/accelerators.md"): accelerators_page(),
    }


# --- causes ----------------------------------------------------------------------------------------------------------


def index_page() -> str:
    rows = [(f"[{code}]({code}.md)", KIND_OF[code], cause.title) for code, cause in CAUSES.items()]
    return _page(
        "# What the doctor finds",
        WRITTEN,
        "`tunix-rt doctor` gathers facts and checks them for each cause, in this order. A cause hides the ones below it: "
        "without a driver a wheel cannot be checked. The first check that fails is the cause to repair first; the others "
        "follow after `then:`.",
        table(("cause", "kind", "title"), rows),
        "## Kinds",
        "Every cause is of one of ten kinds; `tunix-rt doctor --json` gives it as `kind`.",
        table(("kind", "what has to change"), [(kind, KIND_WORDS[kind]) for kind in CAUSES_OF_KIND]),
        "One more cause, `not-proven`, does not come from facts: the kernel self-test failed. "
        "[The device contract](../concepts/the-device-contract.md) lists what it runs.",
        "The examples on the pages are real output for the computers in `tests/facts`. See also "
        "[the guide](../guides/gpu-environment.md) and [the decision](../decisions/0014-facts-then-judgement.md).",
    )


def cause_page(code: str, cause: Cause) -> str:
    parts = [
        f"# {cause.title}",
        WRITTEN,
        f"Cause `{code}`, of the kind [{KIND_OF[code]}](README.md#kinds): {KIND_WORDS[KIND_OF[code]]}.",
        "## Symptom",
        cause.symptom,
        "## Explanation",
        cause.why,
        "## Fix",
        f"{cause.remedy} `tunix-rt doctor` prints the exact command for your computer.",
    ]
    if example := example_of(code):
        parts += [
            "## Output of the doctor",
            f"{example.about} ({example.origin()})",
            f"```text\n{example.output()}\n```",
        ]
    if cause.sources:
        parts += ["## Sources", "\n".join(f"- {source}" for source in cause.sources)]
    return _page(*parts, f"[All causes](README.md), in their order. {_neighbours(code)}")


def _neighbours(code: str) -> str:
    """The causes that are checked just before and just after."""
    codes = list(CAUSES)
    place = codes.index(code)
    before = f"Before it: [{codes[place - 1]}]({codes[place - 1]}.md)." if place else "The first."
    after = f" After it: [{codes[place + 1]}]({codes[place + 1]}.md)." if place + 1 < len(codes) else " The last."
    return before + after


# --- examples --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One computer of tests/facts, and what a run requests there."""

    name: str
    about: str
    source: str
    ask: Ask
    facts: Facts
    expected: str | None

    def output(self) -> str:
        """What `tunix-rt doctor --facts FILE` prints, without the facts at its end."""
        try:
            choice = choose_device(self.ask, self.facts)
        except HardwareError:
            choice = None
        return "\n".join(verdict_lines(judge(self.facts, self.ask), choice, self.ask.device))

    def origin(self) -> str:
        link = self.source.removeprefix("https://")
        return f"`tests/facts/{self.name}`" + (f", after {link}" if link != self.source else "")

    def warns_of(self) -> set[str]:
        return {check.cause for check in judge(self.facts, self.ask) if check.verdict == "warn"}


@functools.cache
def examples() -> tuple[Example, ...]:
    found = []
    for path in sorted(FACTS.glob("*.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        found.append(
            Example(
                name=path.name,
                about=raw["about"],
                source=raw["source"],
                ask=Ask(**raw["ask"]),
                facts=facts_from_json(raw["facts"], source=path.name),
                expected=raw["expected"].get("cause"),
            )
        )
    return tuple(found)


def example_of(code: str) -> Example | None:
    """The first computer that fails by this cause, preferably with a named device; else one with a warning."""
    failing = sorted((one for one in examples() if one.expected == code), key=lambda one: one.ask.device == "auto")
    warned = (example for example in examples() if example.expected is None and code in example.warns_of())
    return next(iter(failing), None) or next(warned, None)


def index_block() -> str:
    """A link to the page of every cause, for docs/index.md."""
    return "The causes: " + ",\n".join(f"[{code}](doctor/{code}.md)" for code in CAUSES) + "."


# --- wheels and accelerators -----------------------------------------------------------------------------------------

TRIED = (
    ((6, 0), "P100"), ((7, 0), "V100"), ((7, 5), "T4, RTX 20"), ((8, 0), "A100"), ((8, 6), "RTX 30, A10"),
    ((8, 9), "RTX 40, L4"), ((9, 0), "H100, H200"), ((10, 0), "B200"), ((12, 0), "RTX 50, RTX PRO 6000"),
)  # fmt: skip
BRANCHES = ("525.60.13", "550.54.15", "570.26", "580.65.06", "595.45.04")


def wheels_page() -> str:
    listed = [
        (
            f"`{wheel.requirement}`",
            wheel.cuda,
            " ".join(arch.removeprefix("sm_") for arch in wheel.architectures),
            ", ".join(wheel.platforms),
            wheel.driver_from,
            wheel.source,
        )
        for wheel in wheels.WHEELS
    ]
    floors = [
        (f"CUDA {major}", *(wheels.DRIVER_FLOOR[system][major] for system in ("Linux", "Linux aarch64", "Windows")))
        for major in wheels.DRIVER_FLOOR["Linux"]
    ]
    chosen = [
        (f"{one[0]}.{one[1]}", names, *(_chosen(one, driver, "Linux", "x86_64") for driver in BRANCHES))
        for one, names in TRIED
    ]
    return _page(
        "# torch wheels and drivers",
        WRITTEN,
        f"The table of `src/tunix_rt/doctor/wheels.py`, held against its sources on {wheels.TABLE_DATE}. `tunix-rt doctor`, "
        "`tunix-rt env create` and `scripts/setup` choose by it. What it is made from, and what could not be checked: "
        "[0016](../decisions/0016-wheel-table.md).",
        "## Wheels",
        f"Best first. A tag such as `+cu130` is a folder of `{wheels.INDEX_BASE}`; without one it is the registry's build. "
        f"torch {wheels.TESTED_TORCH} is what tunix-rt is tested with, {wheels.OLDEST_TORCH} the oldest it takes.",
        table(("wheel", "CUDA", "sm", "platforms", "driver from", "source"), listed),
        "Code runs on a GPU of the same major number and a minor number not below its own: an RTX 40 (8.9) runs sm_86. "
        "Integrated GPUs are exceptions; `fits` in the same file has them. What counts in the end is the list that the "
        "installed torch gives, and [kernels that were run](../concepts/the-device-contract.md).",
        "## Which one is taken",
        "On Linux x86_64, by compute capability and driver:",
        table(("capability", "such as", *(f"driver {driver}" for driver in BRANCHES)), chosen),
        "## Drivers",
        "The oldest driver that runs programs of a CUDA major (docs.nvidia.com/deploy/cuda-compatibility):",
        table(("", "Linux x86_64", "Linux aarch64", "Windows and WSL"), floors),
        f"A GPU of compute capability {wheels.BLACKWELL[0]}.{wheels.BLACKWELL[1]} or above needs driver "
        f"{wheels.BLACKWELL_DRIVER} by itself. Driver branches above {wheels.LAST_BRANCH_BELOW_7_5} no longer drive GPUs "
        "below 7.5.",
    )


def _chosen(capability: wheels.Capability, driver: str, system: str, machine: str) -> str:
    found = wheels.fitting_wheels([capability], driver, system, machine)
    return found[0].requirement.removeprefix("torch==") if found else "none"


def accelerators_page() -> str:
    known = accelerators()
    sources: dict[str, list[str]] = {}
    for one in known:
        sources.setdefault(one.source, []).append(one.name)
    return _page(
        "# Accelerators",
        WRITTEN,
        f"{len(known)} GPUs and TPUs from `src/tunix_rt/accelerators/accelerators.csv`. Memory is what a program can see, a "
        "little below the data sheet; bandwidth and TFLOP/s are published peaks, dense, with float32 accumulation. An empty "
        "cell is not published, or the device has no such units. The table only says how near a measurement comes to the "
        "peak: whether a run fits is decided by the memory that the device itself reports.",
        table(
            ("name", "architecture", "compute capability", "memory GiB", "GB/s", "bfloat16 TFLOP/s", "float32 TFLOP/s"),
            [_figures(one) for one in known],
        ),
        "## Nodes",
        "Several GPUs that reach each other without the network, from `src/tunix_rt/accelerators/nodes.csv`; bandwidths are "
        "published, in one direction. `tunix-rt plan --on 8xh100` plans for one.",
        nodes_table(),
        "## Sources",
        table(("devices", "source"), [(", ".join(names), source) for source, names in sources.items()]),
    )


def _figures(one: Accelerator) -> tuple[str, ...]:
    capability = f"{one.capability[0]}.{one.capability[1]}" if one.capability else ""
    figures = (one.memory_gib, one.bandwidth_gb_s, one.bf16_tflops, one.fp32_tflops)
    return (one.name, one.architecture, capability, *("" if figure is None else f"{figure:g}" for figure in figures))


def _page(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"
