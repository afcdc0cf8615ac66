"""README.md of a bundle, from run_manifest.json. For people: it is hashed, and nothing parses it.

Names come from machines and settings of strangers: Markdown is escaped in prose, and shell arguments are quoted in commands.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.runs.checksums import is_weights

Stated = Mapping[str, Any]
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~$&])")
_QUANTIZED = re.compile(r"(?i)(?:^|[-_.])(i?q[1-8](?:_[a-z0-9]+)*|mxfp4|nvfp4)(?=[-_.]|$)")
"""As GGUF files are named after their quantization: Q4_K_M."""
_RANDOM = """**RANDOM WEIGHTS: this run is no evidence of learning.** Architecture and size are the real ones, so it shows that \
the device computes, what that costs and how fast it is. Its loss and its answers are no measure of the pretrained model."""
_BY_HAND = r"""cd src/tunix_rt && find . -type f ! -path '*/.*' ! -path '*/__pycache__/*' ! -path './packaged/*' -printf '%P\n' \
    | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum"""
LEVEL_FLAGS = {
    "": "L1: everything that follows from the recorded facts, computed again",
    " --require L2": "L2: all answers, generated again from the final model",
    " --require L3": "L3: segments of the run and its end, trained again",
    " --require L4": "L4: the whole run, trained again",
}
_MEANING = """At L1 the bundle agrees with itself. L2 shows that the weights give these answers, L3 and L4 that training gives \
these losses. Which device computed is the run's own statement, unless the run is replayed on such a device."""
_FLAGS = {
    "base_model": "--model MODEL", "dataset": "--data DATA", "evalset": "--data EVALSET", "tokenizer_sha256": "--tokenizer DIR",
}  # fmt: skip
_TITLES = {
    "torch": "PyTorch", "jax": "JAX", "cuda": "CUDA of the PyTorch wheel", "capability": "compute capability",
    "driver": "driver", "driver_cuda": "CUDA version of the driver",
}  # fmt: skip


def readme_text(manifest: Stated, external: Collection[str] = ()) -> str:
    """The page. `external` are the keys of `inputs` that do not ship with tunix-rt."""
    parts = [
        f"# {_safe(manifest['model'])} trained on {_device(manifest)}",
        f"{manifest['steps_completed']} optimizer steps on `device={manifest['device']}`, completed. tunix-rt generated this "
        "page from `run_manifest.json`; no figure was typed by hand.",
        *([_RANDOM] if manifest["weights"] == "random" else []),
        *("## The run", *_run(manifest)),
        *("## Results", *_results(manifest)),
        *("## Environment and speed", _table(_environment(manifest)), _speed(manifest)),
        *(["## Did training run on the GPU?", _checklist(manifest)] if manifest["device"] == "cuda" else []),
        *("## Not in this folder", *_left_out(manifest["left_out"])),
        *("## Reproduce", *_reproduce(manifest, external)),
        *("## Verify", *_verify(manifest, external)),
    ]
    return "\n\n".join(parts) + "\n"


def _safe(text: Any) -> str:
    """One line in which nothing is Markdown or HTML."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))


def _code(text: Any) -> str:
    """An inline code span: a backtick would end it, a bar a table cell."""
    return f"`{re.sub('[`|]', '?', ' '.join(str(text).split()))}`"


def _block(*lines: str) -> str:
    return "```bash\n" + "\n".join(lines) + "\n```"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    first, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (first, ("---",) * len(first), *others))


def _device(manifest: Stated) -> str:
    hardware = manifest["hardware"]
    several = f"{hardware['count']} x " if hardware.get("count", 1) > 1 else ""
    return "the CPU" if manifest["device"] == "cpu" else several + _safe(hardware["name"])


def _bytes(size: int) -> str:
    return f"{size:,} bytes ({size / 2**30:.1f} GiB)"


# --- what ran, and what came of it ------------------------------------------------------------------------------------


def _run(manifest: Stated) -> Iterator[str]:
    model, dataset = _safe(manifest["model"]), _safe(manifest["dataset"])
    resumed = f" It was resumed after step {manifest['resumed_from']}." if manifest["resumed_from"] else ""
    yield f"Model {model} ({manifest['weights']} weights), dataset {dataset}, settings in `config.yaml`.{resumed}"
    commit = f"commit {_code(manifest['commit'])}, found by" if "commit" in manifest else "known by"
    yield f"Source: {commit} the hash of the package's files that the run recorded before its first step."


def _results(manifest: Stated) -> Iterator[str]:
    sides = [manifest.get("scores", {}).get(when) for when in ("before", "after")]
    rows = {"": ["before training", "after training"]}
    for title, key in {"correct answers": "correct", "answers in the requested format": "well_formed"}.items():
        rows[title] = [f"{side[key]} of {side['items']}" if side else "not evaluated" for side in sides]
    if ends := manifest.get("heldout_loss"):
        rows["held-out loss"] = [f"{ends[at]['loss']:.4f} (step {ends[at]['step']})" for at in ("first", "last")]
    yield _table((title, *cells) for title, cells in rows.items())
    origin = manifest["inputs"]["base_model"].get("converted_from", "").partition(" sha256:")[0]
    if form := _QUANTIZED.search(origin.removesuffix(".gguf")):
        rounded = f"The base model was converted from a quantized file ({_safe(form[1])}), so its weights are rounded"
        yield f"{rounded}: neither column is a result of the published model."


def _environment(manifest: Stated) -> Iterator[tuple[str, str]]:
    hardware, speeds, host = manifest["hardware"], manifest["tokens_per_second"], manifest["hardware"]["host"]
    yield "fact", "value"
    yield from ((_TITLES.get(name, _safe(name)), _safe(version)) for name, version in manifest["versions"].items())
    if manifest["device"] != "cpu":
        yield "GPU" if manifest["device"] == "cuda" else "device", _device(manifest)
        yield "device memory", _bytes(hardware["memory_bytes"])
    yield from ((_TITLES[name], _safe(value)) for name, value in hardware.items() if name in _TITLES)
    yield "CPU", f"{_safe(host['cpu'])}, {host['cpu_cores']} cores"
    yield "host memory", _bytes(host["memory_bytes"])
    yield "peak memory of the steps", _bytes(manifest["peak_bytes"])
    yield "final loss", repr(manifest["final_loss"])
    yield f"tokens/s on {_device(manifest)}", f"{speeds['device']:,.1f}"
    if "cpu" in speeds:
        cpu = _safe(manifest["cpu_run"]["host"]["cpu"])
        yield f"tokens/s of the same configuration on the CPU ({cpu})", f"{speeds['cpu']:,.1f}"
        yield "GPU against CPU", f"{speeds['ratio']:.2f} times"


def _speed(manifest: Stated) -> str:
    speeds = manifest["tokens_per_second"]
    cpu = f", on the CPU {speeds['cpu_with_first_step']:,.1f}" if "cpu" in speeds else ""
    alone = " There is no CPU run to compare with." if manifest["device"] != "cpu" and not cpu else ""
    return (
        "Speed is all tokens over all seconds of the steps after the first, which also warms up. With the first step it is "
        f"{speeds['device_with_first_step']:,.1f} tokens/s{cpu} (`metrics.jsonl`). A single run is a confirmation, not a "
        f"benchmark.{alone}"
    )


def _checklist(manifest: Stated) -> str:
    """The definition of done of the milestone: each point, and the file that shows it."""
    hardware, peak, jax = manifest["hardware"], manifest["gpu_memory"], manifest["backend"] == "jax"
    seen = "`jax.devices()[0].platform` was `gpu`" if jax else "`torch.cuda.is_available()` returned `True`"
    expected = "as" if "RTX 5090" in hardware["name"] else "an RTX 5090 was"
    gpu = f"{_safe(hardware['name'])}, compute capability {_safe(hardware['capability'])} ({expected} expected)"
    under = f"under process id {peak['pid']}" if peak["by"] == "nvml" else "(whole device: NVML hides process ids)"
    largest = f"{_bytes(peak['used_bytes'])} at step {peak['step']}, the largest of {peak['samples']} samples"
    ahead = " (JAX reserves memory ahead of its use)" if jax else ""
    placed = "parameters and optimizer state" if jax else "parameters, optimizer state and loss"
    points = (
        f"{seen}: `cuda_check.txt`",
        f"The GPU was explicitly detected: {gpu}: `doctor.json`, `cuda_check.txt`, `env_info.txt`",
        "Training ran on `device=cuda`: `result.json`, `processes.json`, `training_log.txt`",
        "The compute capability is supported: the kernel self-test passed on the device: `doctor.json`",
        f"GPU memory was allocated {under}: {largest}{ahead}: `result.json`, `nvidia_smi.txt`",
        "The evidence is saved: the files in this folder, hashed in `SHA256SUMS`",
        f"No silent CPU fallback: after its first step the engine asserts that {placed} are on the device, and fails "
        "otherwise; this run completed: `result.json`",
    )
    return "\n".join(f"- [x] {point}." for point in points)


# --- what a reader needs ----------------------------------------------------------------------------------------------


def _left_out(left_out: Mapping[str, str]) -> Iterator[str]:
    weights = [f"- {_code(name)} sha256 `{left_out[name]}`" for name in sorted(left_out) if is_weights(name)]
    yield "\n".join(["Weights, by hash:\n", *weights]) if weights else "No weights are left out."
    if others := len(left_out) - len(weights):
        yield f"Smaller files of the run, by hash in `left_out` of `run_manifest.json`: {others}."


def _external(inputs: Stated, external: Collection[str]) -> Iterator[str]:
    if "base_model" in external:
        model = inputs["base_model"]
        origin = f", converted from {_code(model['converted_from'])} to" if "converted_from" in model else ""
        yield f"- base model {_code(model['name'])}, revision {_code(model['revision'])}{origin}:"
        yield from (f"  - {_code(name)} sha256 `{digest}`" for name, digest in sorted(model["files"].items()))
    if "tokenizer_sha256" in external:
        yield f"- tokenizer, hash by tunix-rt `{inputs['tokenizer_sha256']}`; the run saved a copy in its `final_model/`"
    for key in ("dataset", "evalset"):
        if key in external:
            yield f"- {key} {_code(inputs[key]['name'])} sha256 `{inputs[key]['sha256']}`"


def _reproduce(manifest: Stated, external: Collection[str]) -> Iterator[str]:
    """The first block is tested by running it in the folder of the bundle."""
    if external:
        yield "These inputs do not ship with tunix-rt. Place them in a copy of this folder under the names in `config.yaml`:"
        yield "\n".join(_external(manifest["inputs"], external))
    yield f"In {'that copy' if external else 'this folder'}, with tunix-rt installed at the commit above:"
    yield _block("tunix-rt train config.yaml --output ../reproduced")
    yield "To install it, in a clone of the repository:"
    yield _block(f"git checkout {shlex.quote(manifest.get('commit', 'COMMIT'))}", *_install(manifest))
    yield "To make a bundle of the new run:"
    cpu = ["tunix-rt train cpu/config.yaml --output ../reproduced_cpu"] if "cpu_run" in manifest else []
    compared = manifest["device"] == "cuda" and CAPABILITIES[manifest["backend"]].cpu_baseline
    flag = " --cpu-run ../reproduced_cpu" if cpu else " --without-cpu-run" if compared else ""
    yield _block(*cpu, f"tunix-rt evidence collect ../reproduced --to ../NEW_BUNDLE{flag}")
    yield "On another device or with other versions the losses agree closely, not bit by bit."


def _install(manifest: Stated) -> Iterator[str]:
    """JAX gets its CUDA libraries from an extra of its own, named as in `jax-cuda13-plugin`."""
    versions = manifest["versions"]
    yield f'pip install -e ".[{CAPABILITIES[manifest["backend"]].extra}]"'
    for cuda in sorted({match[1] for name in versions if (match := re.fullmatch(r"jax-(cuda\d+)-\w+", name))}):
        yield "pip install " + shlex.quote(f"jax[{cuda}]=={versions['jax']}")


def _verify(manifest: Stated, external: Collection[str]) -> Iterator[str]:
    given = [flag for key, flag in _FLAGS.items() if key in external]
    verify, seconds = " ".join(["tunix-rt evidence verify . --repository CLONE", *given]), manifest["seconds"]
    yield _block(*(f"# {shows}\n{verify}{level}" for level, shows in LEVEL_FLAGS.items()))
    yield (
        "`CLONE` is a clone of the repository, in which the commit is looked up. L2 needs the final model: `--weights DIR` if it "
        f"is not in this folder. The run took {seconds['run']:,.0f} s, its training steps {seconds['steps']:,.0f} s of them. On "
        "such a device L4 takes about as long, and so does L3 if this folder has no checkpoint to start from."
    )
    yield _MEANING
    yield "The hashes alone, without tunix-rt:"
    yield _block("sha256sum -c SHA256SUMS")
    yield "The source by hand, in a clone at the commit above:"
    yield _block(_BY_HAND, f"# {manifest['source_sha256']}")
