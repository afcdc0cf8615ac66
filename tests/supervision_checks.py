"""What the model is taught, as checks that a test applies to the real functions and to copies with one defect put in.

Each check raises AssertionError when the supervision is wrong, and says which promise was broken.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from tunix_rt.data.pack import IGNORED, batch_of_step, collate, make_rows
from tunix_rt.data.registry import find_dataset, read_traces
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.trace import Trace


def shipped_traces(count: int | None = None) -> list[Trace]:
    return read_traces(find_dataset("dev-reasoning-v2"))[:count]


def labels_of(rendering: ModuleType, trace: Trace, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids and labels of one trace as the loop receives them: rendered, put into a row, collated."""
    [row] = make_rows([rendering.render(trace, tokenizer)], max_length=512, packing=False)
    batch = collate([row], pad_id=tokenizer.pad_id)
    return batch.ids[0].tolist(), batch.labels[0].tolist()


def check_the_question_is_masked(rendering: ModuleType, tokenizer: Tokenizer, traces: list[Trace]) -> None:
    """No token of BOS or question is a target, and every token after them is."""
    for trace in traces:
        ids, labels = labels_of(rendering, trace, tokenizer)
        question = [tokenizer.inner.token_to_id("<bos>"), *tokenizer.encode(f"{trace.prompt}\n")]
        assert ids[: len(question)] == question, "the row does not begin with BOS and the question"
        assert set(labels[: len(question)]) == {IGNORED}, f"the question is trained on: {trace.prompt!r}"
        assert IGNORED not in labels[len(question) :], "part of the completion is masked"


def check_the_completion_is_taught(rendering: ModuleType, tokenizer: Tokenizer, traces: list[Trace]) -> None:
    """Read as text, the targets are reasoning and answer in their tags: nothing more, nothing less."""
    for trace in traces:
        _, labels = labels_of(rendering, trace, tokenizer)
        targets = [label for label in labels if label != IGNORED]
        steps = "\n".join(step.content for step in trace.steps)
        wanted = f"<reasoning>{steps}</reasoning><answer>{trace.final_answer}</answer>"
        assert tokenizer.decode(targets) == wanted, f"the targets spell {tokenizer.decode(targets)!r}"
        for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
            assert tokenizer.inner.token_to_id(tag) in targets, f"{tag} is no target"


def check_the_end_is_taught(rendering: ModuleType, tokenizer: Tokenizer, traces: list[Trace]) -> None:
    """The last token of every example is end-of-sequence, it is a target, and it stands nowhere else."""
    end = tokenizer.inner.token_to_id("<eos>")
    for trace in traces:
        ids, labels = labels_of(rendering, trace, tokenizer)
        assert ids[-1] == end, "the example does not end with end-of-sequence"
        assert labels[-1] == end, "end-of-sequence is no target: the model would never learn to stop"
        assert ids.count(end) == 1, "end-of-sequence stands inside the example"


def check_a_step_trains_on_the_mean_over_all_its_targets(engine_of: ModuleType, folder: Path) -> None:
    """The gradient norm and the loss of a step cut into unequal micro-batches equal those of one whole batch.

    A mean of micro-batch means weighs a token of a short micro-batch more; the loss it reports may even look right.
    """
    import torch

    from tunix_rt.config import Training
    from tunix_rt.data.render import render_all
    from tunix_rt.data.tokenizer import load_tokenizer
    from tunix_rt.models import resolve_model

    examples = render_all(shipped_traces(8), load_tokenizer(folder), max_length=128).examples
    rows = make_rows(examples, max_length=128, packing=False)
    batches = partial(batch_of_step, rows, micro_batch_size=2, accumulation=4, seed=5, pad_id=0)
    parts = [micro.targets for micro in batches(1).micro_batches]
    assert len(set(parts)) > 1, "the micro-batches are equal, so this check could not fail"

    load = partial(engine_of.load, resolve_model(str(folder), weights="random"), device="cpu", dtype="float64", seed=3)
    reference = load()
    reference.model.train()
    whole = collate(rows, pad_id=0)
    loss = engine_of.summed_loss(reference.model, *engine_of._on_device(whole, reference.device)) / whole.targets
    loss.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in reference.model.parameters()])).item()

    engine, training = load(), Training(max_grad_norm=0.0)
    optimizer = engine_of.make_optimizer(engine, training)
    step = next(engine_of.optimizer_steps(engine, optimizer, batches, training, first=1, total=1))
    np.testing.assert_allclose(step.loss, loss.item(), rtol=1e-10, err_msg="the loss is not the mean over all targets")
    np.testing.assert_allclose(step.grad_norm, norm, rtol=1e-9, err_msg="the gradient is not that of the mean loss")


def with_defect(module: ModuleType, right: str, wrong: str) -> ModuleType:
    """A copy of `module` in which the one place that reads `right` reads `wrong`."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{module.__name__} has {source.count(right)} places that read {right!r}"
    name = f"{module.__name__.rpartition('.')[2]}_with_a_defect"
    copy = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))
    sys.modules[name] = copy  # dataclasses look their module up by name
    try:
        exec(compile(source.replace(right, wrong), f"<{name}>", "exec"), copy.__dict__)
    finally:
        del sys.modules[name]
    return copy
