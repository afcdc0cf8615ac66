"""Whether the processes of a run agree: the same configuration, software and kind of device on every host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunix_rt.errors import ConfigError, HardwareError, TunixError

SAME_SOFTWARE = "install the same versions on every host; `tunix-rt doctor` on each lists them"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What a process reports about itself and its host before a run."""

    rank: int
    host: str
    pid: int
    config_sha256: str
    device: str
    kind: str
    """Names of its devices."""
    count: int
    driver: str | None
    versions: Mapping[str, str]
    """Of Python and the packages that compute."""

    @property
    def name(self) -> str:
        return f"process {self.rank} ({self.host})"


def refuse_disagreement(reports: Sequence[HostReport]) -> None:
    """An error for the first process that differs from the first one. Different results, or a hang, would be its only sign."""
    first = reports[0]
    for one in reports[1:]:
        for differs in (_config, _versions, _driver, _devices):
            if (error := differs(first, one)) is not None:
                raise error


def _config(first: HostReport, one: HostReport) -> TunixError | None:
    if one.config_sha256 == first.config_sha256:
        return None
    return ConfigError(
        f"{one.name} has another configuration than {first.name}",
        fix="start the same command with the same configuration file in every process",
    )


def _versions(first: HostReport, one: HostReport) -> TunixError | None:
    names = sorted(first.versions.keys() | one.versions.keys())
    missing = "not installed"
    differing = [
        f"{name} {one.versions.get(name, missing)} instead of {first.versions.get(name, missing)}"
        for name in names
        if one.versions.get(name) != first.versions.get(name)
    ]
    if not differing:
        return None
    problem = f"{one.name} has other software than {first.name}: {', '.join(differing)}"
    return HardwareError(problem, fix=SAME_SOFTWARE, cause="mixed-versions")


def _driver(first: HostReport, one: HostReport) -> TunixError | None:
    if one.driver == first.driver:
        return None
    problem = f"{one.name} has NVIDIA driver {one.driver}, {first.name} has {first.driver}"
    return HardwareError(problem, fix="install the same driver on every host", cause="mixed-drivers")


def _devices(first: HostReport, one: HostReport) -> TunixError | None:
    theirs, ours = (f"{report.count} x {report.kind} ({report.device})" for report in (one, first))
    if theirs == ours:
        return None
    return HardwareError(
        f"{one.name} has {theirs}, {first.name} has {ours}",
        fix="use hosts with the same devices, or the same number of them on each with CUDA_VISIBLE_DEVICES",
        cause="mixed-gpus",
    )
