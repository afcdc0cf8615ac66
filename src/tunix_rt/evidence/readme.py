"""The README of a bundle: what `bundle.json` says, in sentences. Pure; every figure comes from there."""

from collections.abc import Iterator, Mapping
from typing import Any

from tunix_rt.evidence.bringing import bring_words, quantised
from tunix_rt.evidence.claims import OLDER_SCHEMA, SCHEMA
from tunix_rt.evidence.hashes import is_weights

GIB = 2**30


def readme_text(says: Mapping[str, Any]) -> str:
    parts = [
        f"# {says['model']} trained on {_where(says)}",
        _opening(says),
        *([_RANDOM] if says["weights"] == "random" else []),
        "## What ran\n\n" + _what_ran(says),
        *(["## What came of it\n\n" + result] if (result := _result(says)) else []),
        *(["## With what\n\n" + "\n".join(_table(says))] if result else ["\n".join(_table(says))]),
        _speed_words(says),
        *(["## Was it really the GPU?\n\n" + "\n".join(_checklist(says))] if says["device"] == "cuda" else []),
        "## What is not here\n\n" + _left_out(says),
        "## Make it again\n\n" + _again(says),
        "## Check it\n\n" + _check(says),
    ]
    return "\n\n".join(parts) + "\n"


_RANDOM = (
    "**THE WEIGHTS WERE RANDOM. This run is no evidence of learning.** Architecture and size are the real ones, so it shows "
    "that the device computes, what it costs and how fast it is. Its loss and its answers say nothing about the model."
)


def _where(says: Mapping[str, Any]) -> str:
    return str(says["gpu"]["name"] if says["device"] == "cuda" else "the CPU")


def _opening(says: Mapping[str, Any]) -> str:
    ran = f"{says['steps_completed']} optimizer steps on `device={says['device']}`, completed"
    written = f"{ran}. Written by tunix-rt from the files in this folder; no figure was typed by hand."
    return written if says["schema"] == OLDER_SCHEMA else f"{written} {_MANIFEST}"


_MANIFEST = "`run_manifest.json` says it for programs, with the settings; it names those left open, and holds no null."


def _what_ran(says: Mapping[str, Any]) -> str:
    continued = f" It was continued after step {says['resumed_from']}." if says["resumed_from"] else ""
    return (
        f"The model {says['model']} ({says['weights']} weights) on the dataset {says['dataset']}, by the settings in "
        f"`config.yaml`:\n\n```bash\n{_train(says, 'config.yaml', 'RUN')}\n```\n\n"
        f"Source: commit `{says['commit']}`. It was found from the hash of the package's files that the run wrote down "
        f"before its first step, not from the state of a working tree.{continued}"
    )


def _train(says: Mapping[str, Any], config: str, output: str) -> str:
    command = f"tunix-rt train {config} --output {output}"
    return f"{command} --weights random" if says["weights"] == "random" else command


# --- the result -------------------------------------------------------------------------------------------------------


def _result(says: Mapping[str, Any]) -> str:
    """What training changed, for whoever reads no further. Empty for bundles of older schemas, which have no such facts."""
    scores, heldout = says.get("scores", {}), says.get("heldout_loss")
    if says["schema"] != SCHEMA or not (scores or heldout):
        return ""
    lines = ["| | before training | after |", "|---|---|---|"] if scores or heldout else []
    if scores:
        sides = [scores.get(when) for when in ("before", "after")]
        lines.append("| answers that are right | " + " | ".join(map(_right, sides)) + " |")
        lines.append("| answers in the form that was asked for | " + " | ".join(map(_formed, sides)) + " |")
    if heldout:
        losses = [f"{heldout[name]['loss']:.4f} (step {heldout[name]['step']})" for name in ("first", "last")]
        lines.append("| loss on held-out data | " + " | ".join(losses) + " |")
    words = (
        "The figures follow from the answers in `eval/`, which `verify` judges again, and from `eval/heldout.jsonl`."
    )
    return "\n".join(lines) + "\n\n" + words + _quantised(says)


def _right(side: Mapping[str, Any] | None) -> str:
    return f"{side['correct']} of {side['items']} ({100 * side['accuracy']:.1f} %)" if side else "not asked"


def _formed(side: Mapping[str, Any] | None) -> str:
    return f"{side['well_formed']} of {side['items']}" if side else "not asked"


def _quantised(says: Mapping[str, Any]) -> str:
    for thing in says.get("to_bring", []):
        if form := quantised(thing):
            return (
                f"\n\nThe base model was converted from a quantised file ({form}): its weights are rounded ones, not those "
                "that were published, so neither column speaks for the published model."
            )
    return ""


# --- figures ----------------------------------------------------------------------------------------------------------


def _table(says: Mapping[str, Any]) -> Iterator[str]:
    yield "| | |\n|---|---|"
    for name, value in _figures(says):
        yield f"| {name} | {value} |"


def _figures(says: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    speeds = says["tokens_per_second"]
    yield from _versions(says)
    if says["device"] == "cuda":
        gpu = says["gpu"]
        yield "driver", gpu["driver"]
        yield "CUDA the driver reports", gpu["driver_cuda"]
        yield "GPU", gpu["name"] if gpu.get("count", 1) == 1 else f"{gpu['count']} x {gpu['name']}"
        yield "compute capability", gpu["compute_capability"]
        yield "memory of the GPU", _bytes(gpu["memory_bytes"])
    yield "CPU", f"{says['host']['cpu']}, {says['host']['cpu_cores']} cores"
    yield "memory of the host", _bytes(says["host"]["memory_bytes"])
    yield "steps", str(says["steps_completed"])
    yield "final loss", repr(says["final_loss"])
    yield f"tokens/s on {_where(says)}", _speed(speeds["device"])
    if "cpu" in speeds:
        host = says["cpu_run"]["host"]
        engine = f"{_engine(says)} {says['cpu_run'][says['backend']]}"
        on = f"{host['cpu']}, {host['cpu_cores']} cores, {engine}"
        yield f"tokens/s of the same configuration on the CPU ({on})", _speed(speeds["cpu"])
        yield "GPU against CPU", f"{speeds['ratio']:.2f} times"


def _engine(says: Mapping[str, Any]) -> str:
    return "JAX" if says["backend"] == "jax" else "PyTorch"


def _versions(says: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if says["backend"] == "jax":
        yield "JAX", says["jax"]
        yield "jaxlib", says["jaxlib"]
        for name, version in sorted(says.get("cuda_plugin", {}).items()):
            yield f"CUDA plugin `{name}`", version
        return
    yield "PyTorch", says["torch"]
    if says["device"] == "cuda":
        yield "CUDA of the PyTorch wheel", says["cuda"]


def _bytes(size: int) -> str:
    return f"{size:,} bytes ({size / GIB:.1f} GiB)"


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.1f}"


def _speed_words(says: Mapping[str, Any]) -> str:
    speeds = says["tokens_per_second"]
    with_first = f"{_speed(speeds['device_with_first_step'])} tokens/s"
    files = "`metrics.jsonl`"
    if "cpu" in speeds:
        with_first = f"{_speed(speeds['device_with_first_step'])} tokens/s on the GPU and "
        with_first += f"{_speed(speeds['cpu_with_first_step'])} on the CPU"
        files = "`metrics.jsonl` and `cpu/metrics.jsonl`"
    return (
        "Speeds are all tokens over all seconds of the steps after the first, which also warms up; with it they are "
        f"{with_first}. They come from {files}. {_runs(says)}: a confirmation, not a benchmark."
    )


def _runs(says: Mapping[str, Any]) -> str:
    if says["device"] == "cuda" and "cpu_run" not in says:
        return "No run on the CPU was given to hold them against, so there is no ratio. One run"
    return "One run each"


# --- the definition of done -------------------------------------------------------------------------------------------


def _checklist(says: Mapping[str, Any]) -> Iterator[str]:
    gpu, memory, with_jax = says["gpu"], says["gpu_memory"], says["backend"] == "jax"
    seen = "`jax.devices()[0].platform` was `gpu`" if with_jax else "`torch.cuda.is_available()` returned `True`"
    yield f"- [x] {seen}: `cuda_check.txt`."
    expected = "as the milestone expected"
    if "RTX 5090" not in gpu["name"]:
        expected = "the milestone expected an RTX 5090, this is the GPU that was there"
    yield (
        f"- [x] The GPU was explicitly detected: {gpu['name']}, compute capability {gpu['compute_capability']} "
        f"({expected}): `doctor.json`, `cuda_check.txt`, `env_info.txt`."
    )
    yield "- [x] Training ran on `device=cuda`: `training_log.txt`, the lines with `Using device: cuda` and `device=cuda`."
    yield f"- [x] {_JAX_HAS_CODE if with_jax else _TORCH_HAS_CODE}"
    yield f"- [x] {_memory_words(memory)}{_JAX_TAKES if with_jax else ''}"
    yield "- [x] The evidence is saved: the files in this folder, hashed in `SHA256SUMS`."
    yield f"- [x] No silent CPU fallback. {_fallback_words(says)}"


_TORCH_HAS_CODE = (
    "No warnings about unsupported compute capability: PyTorch gave none of those it has, in `training_log.txt` "
    "or `cuda_check.txt`."
)
_JAX_HAS_CODE = (
    "The compute capability is supported: the doctor judged that JAX's CUDA plugin has code for it (the check "
    "`jax-plugin-lacks-architecture` passed: `doctor.json`), and the kernels of the proof ran: `cuda_check.txt`."
)
_JAX_TAKES = (
    " JAX by default takes its share of the memory when it starts: this is what it held, not what the steps needed of it "
    "(`peak_bytes` in `metrics.jsonl`)."
)


def _memory_words(memory: Mapping[str, Any]) -> str:
    at = f"at step {memory['step']}"
    if memory["by"] == "nvml":
        return (
            f"GPU memory was allocated under our process id: {_bytes(memory['used_bytes'])} for process {memory['pid']} "
            f"{at}, the most of {memory['samples']} samples that NVML gave while it trained: `result.json` (`gpu_memory`), "
            "`nvidia_smi.txt`."
        )
    return (
        f"GPU memory was allocated during training: {_bytes(memory['used_bytes'])} {at}, the most of {memory['samples']} "
        "samples. NVML hides process ids on this machine, so this is the memory in use on the whole device, "
        f"not that of our process ({memory['pid']}) alone: `result.json` (`gpu_memory`), `nvidia_smi.txt`."
    )


def _fallback_words(says: Mapping[str, Any]) -> str:
    names = ", ".join(says["proof"])
    where = "parameters, optimizer state and loss live on the device"
    by = "`_assert_on_device` in `src/tunix_rt/backends/torch_backend.py`"
    if says["backend"] == "jax":
        where = "parameters and optimizer state live on the device"
        by = "`_assert_on_devices` in `src/tunix_rt/backends/jax_backend.py`"
    return (
        f"After its first step the engine asserts that {where}, and ends "
        f"the run if one does not ({by} at this commit); this "
        f"run completed (`result.json`). Before training, {len(says['proof'])} proofs ran on the device and passed: "
        f"{names} (`doctor.json`)."
    )


# --- the rest ---------------------------------------------------------------------------------------------------------


def _left_out(says: Mapping[str, Any]) -> str:
    left_out: Mapping[str, str] = says["left_out"]
    weights = [name for name in sorted(left_out) if is_weights(name)]
    if not left_out:
        return "Nothing: checkpoints and weights are in the bundle."
    traces = [name for name in left_out if name.startswith("profile/")]
    others = len(left_out) - len(weights) - len(traces)
    lines = ["Weights are not in the bundle; their hashes are (`run-SHA256SUMS`, `left_out` in `bundle.json`):", ""]
    if not weights:
        lines = ["Not all that the run left; the hashes of the rest are in `left_out` of `bundle.json`."]
    lines += [f"- `{name}` sha256 `{left_out[name]}`" for name in weights]
    if others:
        lines += ["", f"Nor are {others} other files of `checkpoints/`, `final_model/` and `tensorboard/`."]
    if traces:
        lines += ["", "Nor is the trace of the steps that were recorded (`profile/trace.json.gz`)."]
    return "\n".join(lines)


def _again(says: Mapping[str, Any]) -> str:
    """The first block is run by a test, as it stands, in the folder of the bundle."""
    if says["schema"] != SCHEMA:
        return _again_before(says)
    checkout = [f"git checkout {says['commit']}", *_install(says)]
    collect = "tunix-rt evidence collect ../reproduced --to ../NEW_BUNDLE"
    if "cpu_run" in says:
        collect += " --cpu-run ../reproduced_cpu"
    elif says["device"] == "cuda" and says["backend"] != "jax":
        collect += " --without-cpu-run"
    cpu = [_train(says, "cpu/config.yaml", "../reproduced_cpu")] if "cpu_run" in says else []
    return "\n".join(
        [
            *_bring(says),
            f"In {'that copy' if 'to_bring' in says else 'this folder'}, with tunix-rt installed at the commit above:\n",
            f"```bash\n{_train(says, 'config.yaml', '../reproduced')}\n```\n",
            "To have it so, in a clone of the repository:\n",
            _block(*checkout),
            "\nAnd to make a bundle of it, which has a speed of its own:\n",
            _block(*cpu, collect),
            f"\nOn another device, driver or {_engine(says)} the losses agree closely, not to the last bit.",
        ]
    )


def _block(*lines: str) -> str:
    return "```bash\n" + "\n".join(lines) + "\n```"


def _again_before(says: Mapping[str, Any]) -> str:
    """As bundles of older schemas have it, which must verify to the letter."""
    lines = [f"git checkout {says['commit']}", *_install(says), _train(says, "BUNDLE/config.yaml", "RUN")]
    if "cpu_run" in says:
        lines.append(_train(says, "BUNDLE/cpu/config.yaml", "CPU_RUN"))
        lines.append("tunix-rt evidence collect RUN --cpu-run CPU_RUN --output NEW_BUNDLE")
    else:
        lines.append("tunix-rt evidence collect RUN --output NEW_BUNDLE")
    words = (
        f"`BUNDLE` is this folder. On another device, driver or {_engine(says)} the losses agree closely, "
        "not to the last bit."
    )
    return "```bash\n" + "\n".join(lines) + "\n```\n\n" + words


def _install(says: Mapping[str, Any]) -> Iterator[str]:
    """With JAX, which has its CUDA libraries from an extra of its own, named as in `jax-cuda13-plugin`."""
    if says["backend"] != "jax":
        yield 'pip install -e ".[training]"'
        return
    yield 'pip install -e ".[jax]"'
    cuda = {name.split("-")[1] for name in says.get("cuda_plugin", {})}
    yield from (f'pip install "jax[{one}]=={says["jax"]}"' for one in sorted(cuda))


def _check(says: Mapping[str, Any]) -> str:
    return _check_now(says) if says["schema"] == SCHEMA else _check_before(says)


def _bring(says: Mapping[str, Any]) -> list[str]:
    """What does not come with tunix-rt, as a list by hash; nothing where all of it does."""
    things = says.get("to_bring", [])
    if not things:
        return []
    listed = "\n".join(f"- {bring_words(thing)}" for thing in things)
    return [
        f"First bring what does not come with tunix-rt, into a copy of this folder (in the bundle itself it would be a "
        f"finding), by these names:\n\n{listed}\n"
    ]


def _replaying(says: Mapping[str, Any]) -> str:
    """What a replay needs, and how long it takes."""
    whats = [thing["what"] for thing in says.get("to_bring", [])]
    said = "A replay needs nothing but this folder and tunix-rt. "
    if whats:
        brought = ", ".join(f"the {what}" for what in whats)
        model = "; `MODEL` is the base model, a folder or a file" if "base model" in whats else ""
        said = (
            f"L2 to L4 need what is to be brought ({brought}: the list above). Data and tokenizer lie by their names in the "
            f"folder where `verify` is called, which must not be this one: `BUNDLE` names this one{model}. "
        )
    if seconds := says.get("seconds"):
        said += (
            f"The run took {seconds['run']:,.0f} s, {seconds['steps']:,.0f} s of them in its steps. L4 takes about as long on "
            "such a device, and longer on a slower one; so does L3 where the bundle has no checkpoint to begin at, but for "
            "the answers. "
        )
    return said


def _check_now(says: Mapping[str, Any]) -> str:
    whats = [thing["what"] for thing in says.get("to_bring", [])]
    here, model = "BUNDLE" if whats else ".", " --model MODEL" * ("base model" in whats)
    commands = _block(
        "tunix-rt evidence verify . --repository CLONE   # L1: everything that follows from something else, computed again",
        f"tunix-rt evidence verify {here} --repository CLONE --weights FINAL_MODEL   # L2: some of the answers, generated again",
        f"tunix-rt evidence verify {here} --repository CLONE --require L3{model}   # L3: stretches of the run, taken again",
        f"tunix-rt evidence verify {here} --repository CLONE --require L4{model}   # L4: all of it",
    )
    return (
        f"{commands}\n\n`CLONE` is a clone of the repository, in which the commit is looked up again; without it, it is not, "
        "and what is computed again is computed by the source that is installed. "
        "`FINAL_MODEL` are the weights that this run ended with, by the hashes above. "
        f"{_replaying(says)}"
        "The hashes alone, without tunix-rt:\n\n"
        f"{_block('sha256sum -c SHA256SUMS')}\n\n"
        "The source of the run, by hand, at the commit above:\n\n"
        "```bash\ncd src/tunix_rt && find . -name '*.py' -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum\n"
        f"# {says['source_sha256']}\n```\n\n"
        "At level L1 the bundle agrees with itself: batches, learning rates, scores and clocks follow from one another. That "
        "the model gave these losses and answers is shown from L2 on. Which device computed is the run's own word, "
        "unless it is replayed on such a one. What each level means and does not mean is in `docs/reference/bundle.md`."
    )


def _check_before(says: Mapping[str, Any]) -> str:
    return (
        "```bash\ntunix-rt evidence verify . --repository CLONE   # hashes, steps, bundle.json and this page computed again\n"
        "sha256sum -c SHA256SUMS                         # the hashes alone, without tunix-rt\n```\n\n"
        "`CLONE` is a clone of the repository, in which the commit is looked up again; without it, it is not.\n\n"
        "The source of the run, by hand, at the commit above:\n\n"
        "```bash\ncd src/tunix_rt && find . -name '*.py' -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum\n"
        f"# {says['source_sha256']}\n```\n\n"
        "`verify` shows that the bundle agrees with itself; nothing is replayed. Copied files are as the run wrote them: "
        "what it could not find out is null in `doctor.json`, and so is a setting left open in `config.yaml`. "
        "`bundle.json` and this page hold no null."
    )
