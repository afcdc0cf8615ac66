"""README.md of a bundle, from run_manifest.json. For people: it is hashed, and nothing parses it.

Names come from machines and settings of strangers: Markdown is escaped in prose, and shell words are quoted in commands.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tunix_rt.runs.checksums import is_weights

Stated = Mapping[str, Any]
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~$&])")
_QUANTIZED = re.compile(r"(?i)(?:^|[-_.])(i?q[1-8](?:_[a-z0-9]+)*|mxfp4|nvfp4)(?=[-_.]|$)")
"""As GGUF files are named after their quantization: Q4_K_M."""
_RANDOM = """**RANDOM WEIGHTS: this run is no evidence of learning.** Architecture and size are the real ones, so it shows that \
the device computes, what that costs and how fast it is. Its loss and its answers say nothing about the model."""
_BY_HAND = r"""cd src/tunix_rt && find . -type f ! -path '*/.*' ! -path '*/__pycache__/*' ! -path './packaged/*' -printf '%P\n' \
    | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum"""
_LEVELS = """At L1 the bundle agrees with itself. That the weights give these answers is shown from L2 on, that training gives \
these losses from L3 on. Which device computed is the run's own statement, unless it is replayed on one like it."""


def readme_text(manifest: Stated, external: Collection[str] = ()) -> str:
    """The page. `external` are the keys of `inputs` that do not ship with tunix-rt."""
    on_gpu = manifest["device"] == "cuda"
    parts = [
        f"# {_safe(manifest['model'])} trained on {_device(manifest)}",
        f"{manifest['steps_completed']} optimizer steps on `device={manifest['device']}`, completed. tunix-rt generated this "
        "page from `run_manifest.json`; no figure was typed by hand.",
        *([_RANDOM] if manifest["weights"] == "random" else []),
        *("## The run", *_run(manifest)),
        *("## Results", *_results(manifest)),
        *("## Environment and speed", _table(_environment(manifest)), _speed(manifest)),
        *(["## Did training run on the GPU?", "\n".join(_checklist(manifest))] if on_gpu else []),
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


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    first, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (first, ("---",) * len(first), *others))


def _device(manifest: Stated) -> str:
    hardware = manifest["hardware"]
    several = f"{hardware['count']} x " if hardware.get("count", 1) > 1 else ""
    return "the CPU" if manifest["device"] == "cpu" else several + _safe(hardware["name"])


def _bytes(size: int) -> str:
    return f"{size:,} bytes ({size / 2**30:.1f} GiB)"


def _train(manifest: Stated, config: str, output: str) -> str:
    random = " --weights random" if manifest["weights"] == "random" else ""
    return f"tunix-rt train {config} --output {output}{random}"


# --- what ran, and what came of it ------------------------------------------------------------------------------------


def _run(manifest: Stated) -> Iterator[str]:
    model, dataset = _safe(manifest["model"]), _safe(manifest["dataset"])
    yield f"Model {model} ({manifest['weights']} weights), dataset {dataset}, settings in `config.yaml`:"
    yield _block(_train(manifest, "config.yaml", "RUN"))
    resumed = f" The run was resumed after step {manifest['resumed_from']}." if manifest["resumed_from"] else ""
    commit = f"commit {_code(manifest['commit'])}, found by" if "commit" in manifest else "known by"
    yield f"Source: {commit} the hash of the package's files that the run recorded before its first step.{resumed}"


def _results(manifest: Stated) -> Iterator[str]:
    yield _table(_results_rows(manifest.get("scores", {}), manifest.get("heldout_loss")))
    origin = manifest["inputs"]["base_model"].get("converted_from", "").partition(" sha256:")[0]
    if form := _QUANTIZED.search(origin.removesuffix(".gguf")):
        of = f"The base model was converted from a quantized file ({_safe(form[1])}): its weights are rounded"
        yield f"{of}, so neither column speaks for the published model."


def _results_rows(scores: Stated, heldout: Stated | None) -> Iterator[tuple[str, ...]]:
    yield "", "before training", "after training"
    for name, title in (("correct", "correct answers"), ("well_formed", "answers in the requested format")):
        sides = (scores.get(when) for when in ("before", "after"))
        yield title, *(f"{side[name]} of {side['items']}" if side else "not evaluated" for side in sides)
    if heldout:
        yield (
            "held-out loss",
            *(f"{end['loss']:.4f} (step {end['step']})" for end in (heldout["first"], heldout["last"])),
        )


def _environment(manifest: Stated) -> Iterator[tuple[str, ...]]:
    hardware, speeds, host = manifest["hardware"], manifest["tokens_per_second"], manifest["hardware"]["host"]
    names = {"torch": "PyTorch", "jax": "JAX", "cuda": "CUDA of the PyTorch wheel"}
    yield "", ""
    yield from ((names.get(name, _safe(name)), _safe(version)) for name, version in manifest["versions"].items())
    if manifest["device"] != "cpu":
        yield "GPU" if manifest["device"] == "cuda" else "device", _device(manifest)
        yield "device memory", _bytes(hardware["memory_bytes"])
    known = {"capability": "compute capability", "driver": "driver", "driver_cuda": "CUDA version of the driver"}
    yield from ((title, _safe(hardware[name])) for name, title in known.items() if name in hardware)
    yield "CPU", f"{_safe(host['cpu'])}, {host['cpu_cores']} cores"
    yield "host memory", _bytes(host["memory_bytes"])
    yield "peak memory of the steps", _bytes(manifest["peak_bytes"])
    yield "final loss", repr(manifest["final_loss"])
    yield f"tokens/s on {_device(manifest)}", f"{speeds['device']:,.1f}"
    if "cpu" in speeds:
        on = manifest["cpu_run"]["host"]
        yield f"tokens/s of the same configuration on the CPU ({_safe(on['cpu'])})", f"{speeds['cpu']:,.1f}"
        yield "GPU against CPU", f"{speeds['ratio']:.2f} times"


def _speed(manifest: Stated) -> str:
    speeds = manifest["tokens_per_second"]
    first = f"{speeds['device_with_first_step']:,.1f} tokens/s"
    first += f", on the CPU {speeds['cpu_with_first_step']:,.1f}" if "cpu" in speeds else ""
    alone = " There is no CPU run to compare with." if manifest["device"] != "cpu" and "cpu" not in speeds else ""
    return (
        "Speed is all tokens over all seconds of the steps after the first, which also warms up; with the first it is "
        f"{first} (`metrics.jsonl`). A single run is a confirmation, not a benchmark.{alone}"
    )


def _checklist(manifest: Stated) -> Iterator[str]:
    """The definition of done of the milestone: each point, and the file that shows it."""
    hardware, peak, with_jax = manifest["hardware"], manifest["gpu_memory"], manifest["backend"] == "jax"
    seen = "`jax.devices()[0].platform` was `gpu`" if with_jax else "`torch.cuda.is_available()` returned `True`"
    yield f"- [x] {seen}: `cuda_check.txt`."
    expected = "as" if "RTX 5090" in hardware["name"] else "an RTX 5090 was"
    gpu = f"{_safe(hardware['name'])}, compute capability {_safe(hardware['capability'])} ({expected} expected)"
    yield f"- [x] The GPU was explicitly detected: {gpu}: `doctor.json`, `cuda_check.txt`, `env_info.txt`."
    yield "- [x] Training ran on `device=cuda`: `result.json`, `processes.json`, `training_log.txt`."
    yield "- [x] The compute capability is supported: the kernel self-test passed on the device: `doctor.json`."
    under = (
        f"under process id {peak['pid']}"
        if peak["by"] == "nvml"
        else "(of the whole device: NVML hides process ids here)"
    )
    largest = f"{_bytes(peak['used_bytes'])} at step {peak['step']}, the largest of {peak['samples']} samples"
    yield f"- [x] GPU memory was allocated {under}: {largest}: `result.json`, `nvidia_smi.txt`."
    yield "- [x] The evidence is saved: the files in this folder, hashed in `SHA256SUMS`."
    placed = "parameters and optimizer state" if with_jax else "parameters, optimizer state and loss"
    ends = "are on the device, and fails otherwise; this run completed: `result.json`."
    yield f"- [x] No silent CPU fallback: after its first step the engine asserts that {placed} {ends}"


# --- what a reader needs ----------------------------------------------------------------------------------------------


def _left_out(left_out: Mapping[str, str]) -> Iterator[str]:
    weights = [name for name in sorted(left_out) if is_weights(name)]
    yield "Weights, by hash:" if weights else "No weights are left out."
    yield from ["\n".join(f"- {_code(name)} sha256 `{left_out[name]}`" for name in weights)] if weights else []
    if others := len(left_out) - len(weights):
        yield f"{others} smaller files of the run: `left_out` in `run_manifest.json`."


def _external(inputs: Stated, external: Collection[str]) -> Iterator[str]:
    if "base_model" in external:
        model = inputs["base_model"]
        origin = f", converted from {_code(model['converted_from'])}" if "converted_from" in model else ""
        yield f"- base model {_code(model['name'])}, revision {_code(model['revision'])}{origin}:"
        yield from (f"  - {_code(name)} sha256 `{digest}`" for name, digest in sorted(model["files"].items()))
    if "tokenizer_sha256" in external:
        yield f"- tokenizer, hash by tunix-rt `{inputs['tokenizer_sha256']}`: the run saved it in `final_model/`"
    for key in ("dataset", "evalset"):
        if key in external:
            yield f"- {key} {_code(inputs[key]['name'])} sha256 `{inputs[key]['sha256']}`"


def _reproduce(manifest: Stated, external: Collection[str]) -> Iterator[str]:
    """The first block is tested by running it in the folder of the bundle."""
    if external:
        yield "These inputs do not ship with tunix-rt. Place them in a copy of this folder under the names in `config.yaml`:"
        yield "\n".join(_external(manifest["inputs"], external))
    yield f"In {'that copy' if external else 'this folder'}, with tunix-rt installed at the commit above:"
    yield _block(_train(manifest, "config.yaml", "../reproduced"))
    yield "To install it, in a clone of the repository:"
    yield _block(f"git checkout {shlex.quote(manifest.get('commit', 'COMMIT'))}", *_install(manifest))
    yield "To make a bundle of the new run:"
    collect, cpu = "tunix-rt evidence collect ../reproduced --to ../NEW_BUNDLE", []
    if "cpu_run" in manifest:
        collect += " --cpu-run ../reproduced_cpu"
        cpu = [_train(manifest, "cpu/config.yaml", "../reproduced_cpu")]
    elif manifest["device"] == "cuda" and manifest["backend"] == "torch":
        collect += " --without-cpu-run"
    yield _block(*cpu, collect)
    yield "On another device or with other versions the losses agree closely, not bit by bit."


def _install(manifest: Stated) -> Iterator[str]:
    """JAX gets its CUDA libraries from an extra of its own, named as in `jax-cuda13-plugin`."""
    versions = manifest["versions"]
    yield f'pip install -e ".[{"jax" if manifest["backend"] == "jax" else "training"}]"'
    for cuda in sorted({match[1] for name in versions if (match := re.fullmatch(r"jax-(cuda\d+)-\w+", name))}):
        yield "pip install " + shlex.quote(f"jax[{cuda}]=={versions['jax']}")


def _verify(manifest: Stated, external: Collection[str]) -> Iterator[str]:
    flags = {"base_model": "--model MODEL", "dataset": "--data DATA", "evalset": "--data EVALSET"}
    given = [flag for key, flag in (flags | {"tokenizer_sha256": "--tokenizer DIR"}).items() if key in external]
    verify = " ".join(["tunix-rt evidence verify . --repository CLONE", *given])
    yield _block(
        f"{verify}   # L1: everything that follows from recorded facts, computed again",
        f"{verify} --require L2   # some of the answers, generated again from the final model",
        f"{verify} --require L3   # segments of the run and its end, trained again",
        f"{verify} --require L4   # the whole run",
    )
    took = f"The run took {manifest['seconds']['run']:,.0f} s, its steps {manifest['seconds']['steps']:,.0f} s of them"
    yield (
        "`CLONE` is a clone of the repository, in which the commit is looked up. L2 needs the final model: `--weights DIR` if it "
        f"is not here. {took}; L4 takes about as long on such a device, and L3 where there is no checkpoint to start from."
    )
    yield "The hashes alone, without tunix-rt:"
    yield _block("sha256sum -c SHA256SUMS")
    yield "The source by hand, in a clone at the commit above:"
    yield _block(_BY_HAND, f"# {manifest['source_sha256']}")
    yield _LEVELS
