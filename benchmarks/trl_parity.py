"""TRL's SFTTrainer and a converted configuration of the same arguments, on the same weights and records in float32 on the CPU.

    python -m benchmarks.trl_parity [--trl PYTHON] [CASE ...]     writes benchmarks/results/trl_parity.json; exit 1 past a limit

TRL is in an environment of its own, `.venv-trl` unless `--trl` names its Python:

    python -m venv .venv-trl && .venv-trl/bin/pip install -c constraints.txt torch transformers peft trl==1.16.0

Each side is a process; they exchange files only. A case that the result file has for the same code and versions is not
measured again. One step takes every record, so that the order of records, which each trainer draws for itself, does not
matter. Compared are: token ids and loss mask of every example, tokens and target tokens of every step, the learning rate of
every step, and the loss of every step.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "trl_parity.json"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
VERSION = "1.16.0"
"""Of TRL."""
LIMIT = 1e-4
"""Largest difference of the first loss."""
RATE_LIMIT = 1e-12
"""Largest relative difference of a learning rate: both compute in float64."""
RECORDS, STEPS = 24, 8
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
)
"""The shipped model has no chat template; TRL takes the mask of assistant turns from `generation`."""
COMMON: dict[str, Any] = {
    "model_name_or_path": "model", "dataset_name": "data.jsonl", "output_dir": "out", "max_length": 256,
    "max_steps": STEPS, "learning_rate": 1e-4, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    "per_device_train_batch_size": 6, "gradient_accumulation_steps": 4, "report_to": "none", "save_strategy": "no",
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "assistant turns": ("messages", {"assistant_only_loss": True, "lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "whole conversations": ("messages", {"completion_only_loss": False, "warmup_steps": 3, "weight_decay": 0.1}),
    "prompt and completion": ("prompt_completion", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}),
    "texts": ("text", {"lr_scheduler_type": "linear", "max_grad_norm": 0.5}),
    "texts, packed": ("text", {
        "packing": True, "lr_scheduler_type": "cosine", "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1}),
    "texts, truncated": ("text", {"max_length": 32, "adam_beta2": 0.95}),
    "LoRA": ("messages", {
        "assistant_only_loss": True, "use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"], "lr_scheduler_type": "linear", "warmup_steps": 2}),
}  # fmt: skip
"""Name -> format of the records, and the arguments beside the common ones."""
ONLY_FIRST = ("LoRA",)
"""Adapters are drawn by each trainer: the losses after the first step differ."""


# --- inputs -----------------------------------------------------------------------------------------------------------


def prepare(folder: Path, name: str) -> dict[str, Any]:
    """The files of a case in `folder`; returns the arguments of `trl sft`."""
    kind, own = CASES[name]
    shutil.copytree(ROOT / "models" / "tiny-gemma3", folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    lines = (ROOT / "datasets" / "dev-reasoning-v2" / "dataset.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record(kind, json.loads(line)) for line in lines[:RECORDS]]
    text = "".join(json.dumps(one) + "\n" for one in records)
    (folder / "data.jsonl").write_text(text, encoding="utf-8")
    arguments = COMMON | own
    (folder / "sft.yaml").write_text(json.dumps(arguments, indent=1), encoding="utf-8")  # JSON is YAML
    return arguments


def record(kind: str, trace: Mapping[str, Any]) -> dict[str, Any]:
    """A trace as one record of `kind`. Conversations have two assistant turns."""
    question, answer = trace["prompt"], trace["final_answer"]
    steps = " ".join(step["content"] for step in trace["steps"])
    turns = [("user", question), ("assistant", steps), ("user", "So?"), ("assistant", answer)]
    messages = [{"role": role, "content": text} for role, text in turns]
    if kind == "prompt_completion":
        return {"prompt": messages[:1], "completion": messages[1:2]}
    return {"messages": messages} if kind == "messages" else {"text": f"{question} {steps} {answer}"}


# --- the two sides ----------------------------------------------------------------------------------------------------


def ours(folder: Path) -> dict[str, Any]:
    """What `tunix-rt train sft.yaml` trains on, and its metrics."""
    from tunix_rt.config.dialects.conversion import convert
    from tunix_rt.config.load import build_config
    from tunix_rt.data.prepare import ModelFacts
    from tunix_rt.data.prepare import prepare as prepare_data
    from tunix_rt.data.tokenizer import load_tokenizer

    command = [sys.executable, "-m", "tunix_rt", "train", "sft.yaml", "--output", "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    nested = convert((folder / "sft.yaml").read_text()).nested()
    nested["data"]["dataset"] = str(folder / "data.jsonl")
    facts = ModelFacts(vocabulary=1024, positions=512, model_type="gemma3_text")
    rows = prepare_data(build_config(nested, "sft.yaml"), load_tokenizer(folder / "model"), facts, lambda *_: None).rows
    return {
        "examples": sorted(example for row in rows for example in split(row.ids, row.trained, row.positions)),
        "losses": [float.fromhex(step["loss_hex"]) for step in steps],
        "rates": [step["lr"] for step in steps],
        "tokens": [step["tokens"] for step in steps],
        "targets": [step["target_tokens"] for step in steps],
    }


def split(ids: Any, trained: Any, positions: Any) -> list[list[list[int]]]:
    """The examples of a row as [ids, mask]. The first token of each is no target: nothing precedes it."""
    found: list[list[list[int]]] = []
    for token, target, position in zip(ids, trained, positions, strict=True):
        if position == 0:
            found.append([[], []])
        found[-1][0].append(int(token))
        found[-1][1].append(int(bool(target) and position > 0))
    return found


def theirs(folder: Path) -> None:
    """Writes what SFTTrainer trained on, and its curves, to `theirs.json`. Runs in the environment of TRL."""
    import torch
    import transformers
    import trl

    import datasets

    arguments = json.loads((folder / "sft.yaml").read_text())
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    script, config, model = parser.parse_args_and_config(args=["--config", str(folder / "sft.yaml")])
    config.model_init_kwargs = {"dtype": "float32"}
    seen: dict[str, Any] = {"examples": [], "losses": [0.0], "rates": [], "tokens": [0], "targets": [0]}

    class Recorded(trl.SFTTrainer):  # type: ignore[misc, name-defined, unused-ignore]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            for ids, labels, mask, positions in rows_of(inputs):
                kept = [place for place, one in enumerate(mask) if one]
                row = ([values[place] for place in kept] for values in (ids, labels, positions))
                for example in split_labels(*row):
                    seen["tokens"][-1] += len(example[0])
                    seen["targets"][-1] += sum(example[1])
                    if len(seen["rates"]) == 0:
                        seen["examples"].append(example)
            loss = super().training_step(model, inputs, *rest, **named)
            seen["losses"][-1] += float(loss)
            return loss

    class Rates(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **named: Any) -> None:
            seen["rates"].append(float(optimizer.param_groups[0]["lr"]))
            for name in ("losses", "tokens", "targets"):
                seen[name].append(0)

    torch.manual_seed(0)
    trainer = Recorded(
        model=arguments["model_name_or_path"],
        args=config,
        train_dataset=datasets.load_dataset("json", data_files=script.dataset_name, split="train"),
        peft_config=trl.get_peft_config(model),
        callbacks=[Rates()],
    )
    trainer.train()
    done = {name: values[:-1] if name in ("losses", "tokens", "targets") else values for name, values in seen.items()}
    versions = {one.__name__: one.__version__ for one in (trl, transformers, torch, datasets)}
    (folder / "theirs.json").write_text(json.dumps(done | {"versions": versions}))


def rows_of(inputs: Mapping[str, Any]) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Ids, labels, attention mask and positions of every row."""
    ids, labels = inputs["input_ids"].tolist(), inputs["labels"].tolist()
    masks = inputs["attention_mask"].tolist() if "attention_mask" in inputs else [[1] * len(row) for row in ids]
    known = "position_ids" in inputs
    positions = inputs["position_ids"].tolist() if known else [list(range(len(row))) for row in ids]
    return list(zip(ids, labels, masks, positions, strict=True))


def split_labels(ids: Sequence[int], labels: Sequence[int], positions: Sequence[int]) -> list[list[list[int]]]:
    return split(ids, [label != -100 for label in labels], positions)


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(name: str, mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a case."""
    losses = list(zip(mine["losses"], other["losses"], strict=True))
    rates = list(zip(mine["rates"], other["rates"], strict=True))
    return {
        "examples": len(mine["examples"]),
        "same_ids": [one[0] for one in mine["examples"]] == [one[0] for one in sorted(other["examples"])],
        "same_masks": mine["examples"] == sorted(other["examples"]),
        "tokens": [mine["tokens"][0], other["tokens"][0]],
        "targets": [mine["targets"][0], other["targets"][0]],
        "same_counts": all(mine[key] == other[key] for key in ("tokens", "targets")),
        "rates": rates,
        "rate_difference": max(abs(a - b) / max(abs(b), 1e-30) if a != b else 0.0 for a, b in rates),
        "losses": losses,
        "first_loss_difference": abs(losses[0][0] - losses[0][1]),
        "largest_loss_difference": None if name in ONLY_FIRST else max(abs(a - b) for a, b in losses),
    }


def holds(case: Mapping[str, Any]) -> bool:
    same = case["same_ids"] and case["same_masks"] and case["same_counts"] and len(case["losses"]) == STEPS
    return bool(same and case["rate_difference"] <= RATE_LIMIT and case["first_loss_difference"] <= LIMIT)


def measure(name: str, python: Path) -> dict[str, Any]:
    """Both sides of a case, in a folder of their own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        arguments = prepare(folder, name)
        command = [str(python), str(Path(__file__).resolve()), "--side", str(folder)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: TRL failed\n{done.stderr[-3000:]}")
        other = json.loads((folder / "theirs.json").read_text())
        return {"arguments": arguments, "versions": other["versions"], **compare(name, ours(folder), other)}


def version_of(python: Path) -> str | None:
    """The version of TRL that `python` imports; None if it has none."""
    find = "import importlib.metadata as m; print(m.version('trl'))"
    try:
        done = subprocess.run([str(python), "-c", find], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def code_sha256() -> str:
    """Of this script, and of what decides the tokens: a result of other code is measured again."""
    digest = hashlib.sha256()
    folders = ("config/dialects", "data")
    files = [path for name in folders for path in sorted((ROOT / "src" / "tunix_rt" / name).glob("*.py"))]
    for path in (Path(__file__).resolve(), *files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--trl", type=Path, default=TRL_PYTHON, help="Python of the environment that has TRL")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        theirs(given.side)
        return 0
    if unknown := set(given.cases) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    if (found := version_of(given.trl)) != VERSION:
        parser.error(f"{given.trl}: {'no TRL' if found is None else f'TRL {found}'}; {VERSION} is needed: see --help")
    recorded = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    code = code_sha256()
    cases = recorded["cases"] if recorded.get("code") == code else {}
    for name in given.cases or CASES:
        if name not in cases:
            cases[name] = measure(name, given.trl)
            RESULTS.write_text(json.dumps({"trl": VERSION, "code": code, "cases": cases}, indent=1) + "\n")
        one = cases[name]
        print(
            f"{name}: {'same' if holds(one) else 'DIFFERENT'}; {one['examples']} examples, tokens {one['tokens']}, "
            f"targets {one['targets']}, masks {one['same_masks']}, lr {one['rate_difference']:.1e}, "
            f"loss of step 1 {one['first_loss_difference']:.1e}, largest {one['largest_loss_difference']}",
            flush=True,
        )
    return 0 if all(map(holds, cases.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
