"""Rules about several GPUs and several processes: what they must have in common, and how they reach each other.

Some causes only show in the log of a run, whose known lines are a fact (`tunix-rt doctor --log FILE`)."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tunix_rt.doctor.facts import Ask, Check, Facts, check, failed, passed, skipped, visible_gpus, warned
from tunix_rt.errors import InputError
from tunix_rt.models.secrets import redacted

GIB = 2**30
LEAST_SHM_BYTES = 2**29
"""Below this a warning: NCCL takes about 10 MB of /dev/shm for each connection between GPUs, and docker gives 64 MB."""
LONGEST_LINE = 400
SIGNS: Mapping[str, str] = {
    "mixed-versions": r"Mismatched NCCL version|has other software than|rank \d+ on \S+ has versions",
    "mixed-drivers": r"has NVIDIA driver \S+, process 0",
    "gpu-duplicate": r"Duplicate GPU detected|local rank \d+: \S+ has \d+ visible GPU",
    "shm-small": r"Error while creating shared memory segment|(?:failed to extend|posix_fallocate).*(?:/dev/shm|No space)",
    "wrong-interface": r"no socket interface found|family \d+ is neither AF_INET|Unable to find (?:address|interface) for|"
    r"(?:socketStartConnect|Call to connect).*(?:No route to host|refused|timed out)",
    "port-taken": r"EADDRINUSE|[Aa]ddress already in use|MASTER_PORT: \S+ is in use",
    "process-lost": r"process \d+ \(.*\) has ended|rank \d+(?: on \S+ \(pid \d+\))? (?:was lost|has ended)|"
    r"connection (?:to the other|between the) ranks broke|Connection closed by (?:remote )?peer|exitcode\s*: -9|"
    r"Signal 9 \(SIGKILL\)",
    "process-hangs": r"a process hangs: |has been silent for|has shown no sign of life for|has not joined the others for|"
    r"has come no further for|has not answered for|Watchdog caught collective operation timeout",
}
"""Cause -> what a log has of it, the cause of others first."""
PORT = "choose another MASTER_PORT; with torchrun, which keeps it for itself, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def known_lines(path: Path) -> tuple[str, ...]:
    """The first line of each sign in a log."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return known_of(file)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", fix="name the log of a run") from error


def known_of(lines: Iterable[str]) -> tuple[str, ...]:
    found: dict[str, str] = {}
    for line in lines:
        for cause, sign in SIGNS.items():
            if cause not in found and re.search(sign, line):
                found[cause] = redacted(line.strip()[:LONGEST_LINE])
    return tuple(dict.fromkeys(found.values()))


def _logged(facts: Facts, cause: str) -> str:
    return next((line for line in facts.log if re.search(SIGNS[cause], line)), "")


def _several(facts: Facts, ask: Ask) -> bool:
    size = facts.environment.get("WORLD_SIZE", "1")
    return bool(facts.log) or (size.isdecimal() and int(size) > 1) or (ask.device != "cpu" and _gpus(facts) > 1)


def _gpus(facts: Facts) -> int:
    return len(visible_gpus(facts))


@check("mixed-versions", needs=_several)
def versions_agree(facts: Facts, ask: Ask) -> Check:
    if line := _logged(facts, "mixed-versions"):
        why = "the processes of the run have different software"
        return failed(line, why, "install the same versions on every host; `tunix-rt doctor` on each lists them")
    return passed("no sign of other versions")


@check("mixed-drivers", needs=_several)
def drivers_agree(facts: Facts, ask: Ask) -> Check:
    if line := _logged(facts, "mixed-drivers"):
        return failed(line, "the hosts have different NVIDIA drivers", "install the same driver on every host")
    return passed("no sign of other drivers")


@check("mixed-gpus", needs=_several)
def gpus_are_alike(facts: Facts, ask: Ask) -> Check:
    kinds = {(gpu.name, gpu.total_bytes): gpu for gpu in visible_gpus(facts)}
    saw = ", ".join(f"GPU {gpu.index}: {gpu.name}" for gpu in kinds.values())
    if len(kinds) < 2:
        return passed(saw or "no GPU")
    return warned(
        saw, "the GPUs differ: the smallest sets what fits, the slowest the speed, and NCCL may not connect them",
        "select GPUs of one kind with CUDA_VISIBLE_DEVICES",
    )  # fmt: skip


@check("gpu-duplicate", needs=_several)
def each_process_has_its_gpu(facts: Facts, ask: Ask) -> Check:
    if line := _logged(facts, "gpu-duplicate"):
        fix = "start no more processes on a host than it has GPUs, and no mask of its own for each"
        return failed(line, "two processes of the run use one GPU, which NCCL refuses", fix)
    return passed("no sign of a GPU used twice")


@check("nccl-missing", engine="torch", needs=_several)
def nccl_is_there(facts: Facts, ask: Ask) -> Check:
    if facts.torch is None or facts.torch.nccl is None or _gpus(facts) < 2:
        return skipped("torch was not started, or on one GPU")
    if facts.torch.nccl:
        return passed(f"NCCL {facts.torch.nccl}")
    return warned(
        f"torch {facts.torch.version} has no NCCL", "training uses one of the GPUs only",
        "create an environment with a wheel that has it: tunix-rt env create --device cuda",
    )  # fmt: skip


@check("shm-small", needs=_several)
def shared_memory_is_enough(facts: Facts, ask: Ask) -> Check:
    fix = "give a container 1 GiB of shared memory; in Kubernetes mount an emptyDir with medium: Memory at /dev/shm"
    if line := _logged(facts, "shm-small"):
        return failed(line, "/dev/shm is full: NCCL connects the GPUs of a host through it", fix)
    size = facts.host.shm_bytes
    if size is None or size >= LEAST_SHM_BYTES or _gpus(facts) < 2:
        return passed("not known" if size is None else f"/dev/shm: {size / GIB:.2f} GiB")
    return warned(f"/dev/shm has {size / 2**20:.0f} MiB", "NCCL may not connect the GPUs of this host", fix)


@check("wrong-interface", needs=_several)
def interfaces_exist(facts: Facts, ask: Ask) -> Check:
    up = [one.name for one in facts.interfaces if one.up and not one.loopback]
    fix = f"name one that all hosts share, or unset the variable; up here: {', '.join(up) or 'none'}"
    usable = [one.name for one in facts.interfaces if one.up]
    for variable, exists in (("NCCL_SOCKET_IFNAME", _matching), ("GLOO_SOCKET_IFNAME", _listed)):
        named = facts.environment.get(variable, "")
        if named and facts.interfaces and not exists(named, usable):
            return failed(f"{variable}={named}", f"{variable} names no network interface of this host", fix)
    if line := _logged(facts, "wrong-interface"):
        fix = f"set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface of the cluster network; {fix}"
        return failed(line, "a process cannot reach another one through the network interface it uses", fix)
    return passed(", ".join(up) or "not known")


def _matching(named: str, names: list[str]) -> list[str]:
    """As NCCL reads its variable: prefixes; `=` for whole names, `^` for all others."""
    exact, excluded = "=" in named[:2], named.startswith("^")
    listed = named.lstrip("^=").split(",")
    held = [name for name in names if any(name == one if exact else name.startswith(one) for one in listed)]
    return [name for name in names if name not in held] if excluded else held


def _listed(named: str, names: list[str]) -> bool:
    """As gloo reads its variable: the whole name of every interface."""
    return set(named.split(",")) <= set(names)


@check("port-taken", needs=_several)
def port_is_free(facts: Facts, ask: Ask) -> Check:
    if line := _logged(facts, "port-taken"):
        return failed(line, "another program listens on the port of the run", PORT)
    return passed("no sign of a port in use")


@check("process-lost", needs=_several)
def processes_live(facts: Facts, ask: Ask) -> Check:
    if line := _logged(facts, "process-lost"):
        return failed(
            line, "a process of the run ended, and the others with it",
            "the log of that process has the cause; signal 9 without one is a lack of memory of the host, or the scheduler. "
            "Run the same command with --resume",
        )  # fmt: skip
    return passed("no sign of a lost process")


@check("process-hangs", needs=_several)
def processes_arrive(facts: Facts, ask: Ask) -> Check:
    if line := _logged(facts, "process-hangs"):
        return failed(
            line, "a process did not reach a computation in which the others waited",
            "look at the process that is named, or at the one whose log stopped first: py-spy dump --pid PID. "
            "Run the same command with --resume",
        )  # fmt: skip
    return passed("no sign of a hung process")


PROCESS_CHECKS = (
    versions_agree, drivers_agree, gpus_are_alike, each_process_has_its_gpu, nccl_is_there, shared_memory_is_enough,
    interfaces_exist, port_is_free, processes_live, processes_arrive,
)  # fmt: skip
