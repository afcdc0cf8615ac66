"""`/plan`: whether a run fits a device, before anything is loaded. The answer is the value of `tunix-rt plan --json`."""

import shlex
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

from tunix_rt.accelerators import nodes
from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.config.load import OLD_NAMES, SETTINGS, load_config, setting_named
from tunix_rt.config.optimizers import OPTIMIZERS
from tunix_rt.config.settings import RunConfig
from tunix_rt.dashboard import models
from tunix_rt.dashboard.pages.plan_view import PlanView, view_of
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.data.sources import named
from tunix_rt.doctor.facts import Facts
from tunix_rt.doctor.probe import gather_facts
from tunix_rt.errors import ConfigError, TunixError
from tunix_rt.models.resolve import ModelSource, preset_names
from tunix_rt.plan.answer import (
    Answer,
    PlanTarget,
    answer,
    catalogue,
    catalogue_kinds,
    refuse_engine,
    refuse_unrunnable,
)
from tunix_rt.plan.report import Outlook
from tunix_rt.plan.target import all_targets, target_named
from tunix_rt.train.plan_inputs import target_of_facts

FACTS_SECONDS = 20.0
"""How long the facts of this computer are reused: with a GPU, finding them starts an engine."""
MOST_SETTINGS, LONGEST_SETTING, LONGEST_DEVICE = 64, 500, 64
KINDS = {"NVIDIA GPUs": "cuda", "TPUs, JAX engine": "tpu"}
YES_OR_NO = ("true", "false")
GROUPS: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "Batch": {
        "training.per_device_train_batch_size": ("batch size", ()),
        "training.gradient_accumulation_steps": ("gradient accumulation", ()),
        "data.max_length": ("max_length, tokens", ()),
        "data.packing": ("packing", YES_OR_NO),
    },
    "Precision and optimizer": {
        "training.dtype": ("dtype", CAPABILITIES["torch"].dtypes),
        "training.master_dtype": ("master_dtype", ("float32", "bfloat16")),
        "training.optim": ("optimizer", tuple(OPTIMIZERS)),
        "training.optim_in_backward": ("optim_in_backward", YES_OR_NO),
    },
    "Memory": {
        "training.gradient_checkpointing": ("gradient_checkpointing", ("false", "0.75", "0.5", "0.25", "true")),
        "training.lora_rank": ("lora_rank", ()),
        "training.memory_limit_gib": ("memory_limit_gib", ()),
    },
    "Run": {
        "training.backend": ("backend", tuple(CAPABILITIES)),
        "data.dataset": ("dataset", ()),
        "training.num_train_epochs": ("epochs", ()),
        "training.max_steps": ("max_steps", ()),
    },
}
"""Fieldset -> setting -> its label, and its values where it has few. Every other setting is a line of the text field."""
FIELDS = frozenset(name for group in GROUPS.values() for name in group)
OWN = ("model", "config", "on", "set", "devices")
"""Names of an address that are no settings. Any other is one, and refused by its name where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the address asks for. `settings` are by name, as text; None is a line without `=`."""

    model: str = ""
    pasted: str = ""
    on: str = ""
    """A device of the catalogue or a size; empty is this computer."""
    settings: Mapping[str, str | None] = field(default_factory=dict)
    with_catalogue: bool = False
    """`devices=all`: the answer for every device takes longer, and is a part of its own."""

    @classmethod
    def parse(cls, query: Query) -> "Choice":
        settings: dict[str, str | None] = {
            _canonical(name): value.strip()
            for name, value in query.pairs
            if name not in OWN and (value.strip() or name not in SETTINGS)
        }
        for line in (line for text in query.all("set") for line in text.splitlines() if line.strip()):
            name, equals, value = line.partition("=")
            settings[_canonical(name.strip())] = value.strip() if equals else None
        return cls(
            model=query.get("model").strip(), pasted=query.get("config").strip(), on=query.get("on").strip(),
            settings=settings, with_catalogue=query.get("devices") == "all",
        )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        """As values of `--set`."""
        return [name if value is None else f"{name}={value}" for name, value in self.settings.items()]

    def overrides(self) -> list[str]:
        """`lines`, or a ConfigError for too many."""
        lines = self.lines
        longest = max(map(len, lines), default=0)
        if len(lines) > MOST_SETTINGS or longest > LONGEST_SETTING:
            problem = f"{len(lines)} settings, the longest of {longest:,} characters"
            raise ConfigError(problem, fix=f"at most {MOST_SETTINGS}, of {LONGEST_SETTING} characters each")
        return lines

    def address(
        self, *, on: str | None = None, settings: Mapping[str, object] | None = None, everywhere: bool = False
    ) -> str:
        """After the `?`, with another device, with some settings changed, or with every device."""
        changed = {name: _text(value) for name, value in (settings or {}).items()}
        pairs = [("model", self.model), ("config", self.pasted), ("on", self.on if on is None else on)]
        for name, value in {**self.settings, **changed}.items():
            pairs.append(
                (name, value or "") if name in FIELDS else ("set", name if value is None else f"{name}={value}")
            )
        pairs.append(("devices", "all" if everywhere or self.with_catalogue else ""))
        return urlencode([(name, value) for name, value in pairs if value])

    def command(self, model: str) -> str:
        """The same on the command line."""
        words = ["tunix-rt", "plan", "--model", "FOLDER" if self.pasted else model]
        words += ["--on", self.on] if self.on else []
        return shlex.join(words + [word for line in self.lines for word in ("--set", line)])


def _canonical(name: str) -> str:
    """The setting that `name` is a spelling of; an unknown one as it is."""
    return name if name in SETTINGS else OLD_NAMES.get(name) or setting_named(name) or name


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- the form ---------------------------------------------------------------------------------------------------------

Options = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
"""Groups of (value, label)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    name: str
    label: str
    value: str
    default: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPage:
    """The form as the address has it, and the answer or what is wrong."""

    choice: Choice
    models: Options
    devices: Options
    groups: tuple[tuple[str, tuple[FormField, ...]], ...]
    others: str
    """Settings without a field, a line each."""
    most_pasted: int
    problem: str = ""
    fix: str = ""
    view: PlanView | None = None
    answer: Answer | None = None


def page(site: Site, query: Query, run_id: str = "") -> Page:
    choice, status = Choice.parse(query), 200
    values = _form(site, choice)
    try:
        if choice.model or choice.pasted:
            found, everywhere = plan(site, choice)
            view = view_of(found, everywhere, choice.address, command=choice.command(found.model))
            values |= {"answer": found, "view": view}
        elif choice.settings:
            settings_of(choice)  # refuses what is none
    except TunixError as error:
        values |= {"problem": error.problem, "fix": error.fix}
        status = 400
    return Page(template="plan.html", title="Will it fit?", values=PlanPage(**values), status=status)


def _form(site: Site, choice: Choice) -> dict[str, Any]:
    runs = tuple((one.id, one.name) for one in models.runs_with(site, "config.json"))
    known: Options = (
        ("Presets", tuple((name, name) for name in preset_names())),
        ("Shipped models", tuple((name, name) for name in models.shipped_models())),
        ("Runs", runs),
    )
    several = ("Several GPUs, sharded", tuple((node.id, node.name) for node in nodes()))
    targets = (*((label, tuple(_devices(kind))) for label, kind in KINDS.items()), several)
    if choice.on and choice.on not in {name for _, options in targets for name, _ in options}:
        targets = (*targets, ("Chosen", ((choice.on, choice.on),)))
    rest = [line for line in choice.lines if line.partition("=")[0] not in FIELDS]
    groups = tuple((legend, tuple(_fields(group, choice))) for legend, group in GROUPS.items())
    return {
        "choice": choice, "models": known, "devices": targets, "groups": groups, "others": "\n".join(rest),
        "most_pasted": models.MOST_PASTED,
    }  # fmt: skip


def _devices(kind: str) -> Iterator[tuple[str, str]]:
    return (
        (one.name, f"{one.name}, {one.memory_bytes / 2**30:.0f} GiB") for one in all_targets() if one.device == kind
    )


def _fields(group: Mapping[str, tuple[str, tuple[str, ...]]], choice: Choice) -> Iterator[FormField]:
    for name, (label, choices) in group.items():
        section, leaf = name.split(".")
        default = getattr(getattr(_DEFAULTS, section), leaf)
        value, known = choice.settings.get(name) or "", tuple(named("datasets")) if name == "data.dataset" else choices
        if known and value and value not in known:
            known = (*known, value)
        yield FormField(
            name=name, label=label, value=value, default="not set" if default is None else _text(default), choices=known
        )


_DEFAULTS = RunConfig()


# --- the answer -------------------------------------------------------------------------------------------------------


def plan(site: Site, choice: Choice) -> tuple[Answer, list[Outlook]]:
    """The answer for the chosen device, and the outlook for every device of the catalogue where it is asked for."""
    settings = settings_of(choice)
    source = _source(site, choice)
    target = _target(site, choice.on, settings)
    shape = models.shape_for(source, settings.training)
    found = (answer if target.here else _answer)(settings, target, model=source.name, shape=shape)
    return found, _everywhere(settings, shape, catalogue_kinds(settings), brief=True) if choice.with_catalogue else []


_answer = lru_cache(maxsize=8)(answer)  # asking for the catalogue leaves it as it is
_everywhere = lru_cache(maxsize=8)(catalogue)  # choosing another device leaves that as it is


def settings_of(choice: Choice) -> RunConfig:
    """The settings of a run. A name in them that leads to a file or to the hub is refused, unless this dashboard lists it."""
    flags = {"model.model_name_or_path": models.PASTED if choice.pasted else choice.model or None}
    settings = load_config(None, overrides=choice.overrides(), flags=flags)
    refuse_unrunnable(settings)
    model, data = settings.model, settings.data
    given = {
        "model.revision": model.revision != "main",
        "model.tokenizer_name_or_path": model.tokenizer_name_or_path,
        "data.validation": data.validation,
        "evaluation.evalset": settings.evaluation.evalset,
        "data.dataset": not set(data.names) <= named("datasets").keys(),
    }
    for name, is_given in given.items():
        if is_given:
            problem = f"{name}: a page takes the names that it lists, no path and no hub id"
            raise ConfigError(problem, fix="leave it out, or use the command line: tunix-rt plan")
    return settings


def _source(site: Site, choice: Choice) -> ModelSource:
    return models.source_of_text(choice.pasted) if choice.pasted else models.source_named(site, choice.model)


def _target(site: Site, name: str, settings: RunConfig) -> PlanTarget:
    if not name:
        return target_of_facts(_facts(site), settings)
    if len(name) > LONGEST_DEVICE:
        raise ConfigError(f"a device name of {len(name):,} characters", fix="choose a device of the list")
    target = target_named(name)
    refuse_engine(target, settings)
    return PlanTarget(target=target)


_LOOKING = threading.Lock()


def _facts(site: Site) -> Facts:
    """The facts of this computer, found at most `FACTS_SECONDS` ago."""
    with _LOOKING:
        if "plan" not in site.cache or time.monotonic() - site.cache["plan"][0] > FACTS_SECONDS:
            site.cache["plan"] = time.monotonic(), gather_facts()
        found: Facts = site.cache["plan"][1]
        return found
