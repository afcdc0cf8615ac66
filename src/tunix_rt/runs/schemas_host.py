"""Shapes of the files about the computer of a run, who took its steps, and what it costs there, predicted and measured."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tunix_rt.doctor.facts import Check
from tunix_rt.doctor.facts import Facts as Computer
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.doctor.selftest import CheckResult
from tunix_rt.engines.step_time import DenseMatmul, Part
from tunix_rt.plan.fit import Fit
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.runs import fields as f

# --- doctor.json, processes.json, extensions.json ---------------------------------------------------------------------


class Engaged(f.Facts, extra="allow"):
    """The engine and the device as the child process of the self-test saw them."""

    name: f.Maybe[f.Name] = None
    capability: f.Maybe[tuple[f.Count, f.Count]] = None
    uuid: f.Maybe[f.Text] = None


class Proof(f.Facts):
    """The kernels of a run against float64, in a child process."""

    backend: f.Engine
    device: f.Device
    dtype: f.Name
    head_size: f.Positive
    results: Annotated[f.Many[CheckResult], Field(max_length=64)]
    about: Engaged
    pid: f.Count
    seconds: f.Amount
    problem: str | None
    ok: bool


class Doctor(f.Facts):
    """`doctor.json`. A refused run has no choice; only an accelerator has a self-test (`proof`)."""

    facts: Computer
    checks: Annotated[f.Many[Check], Field(max_length=256)]
    choice: f.Maybe[DeviceChoice] = None
    proof: f.Maybe[Proof] = None


class MachineGpu(f.Facts):
    name: f.Name
    capability: f.Version
    driver: f.Maybe[f.Version] = None
    cuda: f.Maybe[f.Version] = None
    cudnn: f.Maybe[f.Version] = None


class Machine(f.Facts):
    """What decides the bits of a step beside its inputs."""

    backend: f.Engine
    device: f.Device
    cpu: f.Name
    cpu_flags_sha256: f.Digest
    cpu_capability: f.Name
    python: f.Version
    threads: f.Positive
    versions: f.Versions
    deterministic: bool
    devices: f.Positive
    gpu: f.Maybe[MachineGpu] = None


class Rank(f.Facts):
    """A process of a run on several ranks, with its most memory at the end, or when the run began."""

    rank: f.Count
    host: f.Name
    pid: f.Count
    peak_bytes: f.Count
    uuid: f.Maybe[f.Text] = None
    gpu: f.Maybe[MachineGpu] = None


class Process(f.Facts):
    pid: f.Count
    started: f.Moment
    first_step: f.Positive
    machine: Machine
    ranks: Annotated[f.Maybe[f.Many[Rank]], Field(max_length=65_536)] = None
    """Every process, where there were several; this one is rank 0."""


class Processes(f.Facts):
    """`processes.json`: the process of a step is the last one that began at it or before."""

    schema_: Literal["tunix-rt/processes/1"] = Field(alias="schema")
    processes: Annotated[f.Many[Process], Field(max_length=10_000)]


class Extension(f.Facts):
    after_step: f.Positive
    max_steps: f.Positive


class Extensions(f.Facts):
    """`extensions.json`: how often a complete run was extended. Later steps have the learning rate of the new total."""

    schema_: Literal["tunix-rt/extensions/1"] = Field(alias="schema")
    extensions: Annotated[f.Many[Extension], Field(min_length=1, max_length=100)]


# --- plan.json, memory.json, profile/profile.json ---------------------------------------------------------------------


class Footprint(f.Facts):
    """`available_bytes` of an attempt that was predicted not to fit."""

    predicted_bytes: f.Count
    measured_bytes: f.Maybe[f.Count] = None
    available_bytes: f.Maybe[f.Count] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory(MemoryPlan):
    eval_rows: f.Positive
    """A replay evaluates in batches of this size."""
    generation_rows: f.Count = 0


class Plan(f.Facts):
    schema_: Literal["tunix-rt/plan/1"] = Field(alias="schema")
    peak_bytes: f.Count
    peak_bytes_at_max_length: f.Count
    longest_row_tokens: f.Positive
    memory: PlannedMemory
    fit: Fit
    disk_bytes: f.Count
    fitting: f.Maybe[f.Figures] = None
    memory_limit_bytes: f.Maybe[f.Count] = None
    oom_attempt: f.Maybe[Footprint] = None


class MemoryReport(f.Facts):
    """`memory.json`. `measured_bytes_before` is the peak of steps of earlier processes."""

    schema_: Literal["tunix-rt/memory/2"] = Field(alias="schema")
    status: f.Status
    predicted_bytes: f.Count
    predicted_parts: MemoryPlan
    measured_bytes: f.Count
    measured_as: f.Text
    error: float
    phases: dict[f.Name, dict[f.Name, float]]
    measured_bytes_before: f.Maybe[f.Count] = None
    reserved_bytes: f.Maybe[f.Count] = None
    nvml_bytes: f.Maybe[f.Count] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePart(Part):
    tflops: float | None = None


class Profile(f.Facts):
    schema_: Literal["tunix-rt/profile/1"] = Field(alias="schema")
    first_step: f.Positive
    steps: f.Positive
    steps_before: f.Count
    measured_on: f.Text
    step_milliseconds: f.Amount
    parts: tuple[ProfilePart, ...]
    tokens: f.Amount
    flops: dict[f.Name, f.Amount]
    tflops: f.Amount
    executed_tflops: f.Amount
    dense_product: f.Maybe[DenseMatmul] = None
    share_of_dense_product: f.Maybe[f.Amount] = None
    unrecorded_step_milliseconds: f.Maybe[f.Amount] = None


# --- the device in run_manifest.json --------------------------------------------------------------------------------------


class HostFacts(f.Facts):
    cpu: f.Name
    cpu_cores: f.Count
    memory_bytes: f.Count


class Hardware(f.Facts):
    """The device. One that is no GPU has no capability, driver or uuid; a CPU is not counted."""

    name: f.Name
    memory_bytes: f.Count
    capability: f.Maybe[f.Version] = None
    driver: f.Maybe[f.Version] = None
    driver_cuda: f.Maybe[f.Version] = None
    count: f.Maybe[f.Positive] = None
    uuid: f.Maybe[f.Text] = None
    host: HostFacts
