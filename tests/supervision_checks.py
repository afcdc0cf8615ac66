"""What the model is taught, as checks that a test applies to the real functions and to copies with one defect put in.

Each check raises AssertionError when the supervision is wrong, and says which promise was broken.
"""

import importlib.util
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import tokenizers

from tests.conftest import SHIPPED
from tests.samples import read_samples
from tunix_rt.data.packing import IGNORED, batch_of_step, collate, make_rows
from tunix_rt.data.records import Sample, Turn
from tunix_rt.data.render import Style
from tunix_rt.data.sources import find_dataset
from tunix_rt.data.template import choose_template
from tunix_rt.data.tokenizer import Tokenizer

MARKERS = ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")


def shipped_samples(count: int | None = None) -> list[Sample]:
    return [sample for _, sample in itertools.islice(read_samples(find_dataset("dev-reasoning-v2")), count)]


def chat(*texts: str, system: str | None = None) -> Sample:
    """A conversation in which the user begins and the turns alternate."""
    told = (Turn(role="system", text=system),) if system is not None else ()
    roles = itertools.cycle(("user", "assistant"))
    return Sample(turns=(*told, *(Turn(role=role, text=text) for role, text in zip(roles, texts, strict=False))))


def style(tokenizer: Tokenizer, template: str = "plain", **settings) -> Style:
    return Style(template=choose_template(template, tokenizer), **settings)


def write_chat_tokenizer(folder: Path, *, template: str | None = None, **settings) -> Path:
    """The shipped tokenizer with the control tokens of ChatML and Gemma, and perhaps a chat template of its own."""
    inner = tokenizers.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    inner.add_special_tokens(list(MARKERS))
    inner.save(str(folder / "tokenizer.json"))
    known = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    own = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(known | own | settings))
    return folder


def labels_of(rendering: ModuleType, sample: Sample, tokenizer: Tokenizer, style: Style) -> tuple[list[int], list[int]]:
    """Ids and labels of one sample as the loop receives them: rendered, put into a row, collated."""
    [row] = make_rows([rendering.render(sample, tokenizer, style)], max_length=512, packing=False)
    batch = collate([row], pad_id=tokenizer.pad_id)
    return batch.ids[0].tolist(), batch.labels[0].tolist()


# --- plain: a question, and what is to be said ------------------------------------------------------------------------


def check_the_question_is_masked(rendering: ModuleType, tokenizer: Tokenizer, samples: list[Sample]) -> None:
    """No token of BOS or question is a target, and every token after them is."""
    for sample in samples:
        ids, labels = labels_of(rendering, sample, tokenizer, style(tokenizer))
        question = [tokenizer.inner.token_to_id("<bos>"), *tokenizer.encode(f"{sample.question}\n")]
        assert ids[: len(question)] == question, "the row does not begin with BOS and the question"
        assert set(labels[: len(question)]) == {IGNORED}, f"the question is trained on: {sample.question!r}"
        assert IGNORED not in labels[len(question) :], "part of the completion is masked"


def check_the_completion_is_taught(rendering: ModuleType, tokenizer: Tokenizer, samples: list[Sample]) -> None:
    """Read as text, the targets are reasoning and answer in their tags: nothing more, nothing less."""
    for sample in samples:
        _, labels = labels_of(rendering, sample, tokenizer, style(tokenizer))
        targets = [label for label in labels if label != IGNORED]
        steps = "\n".join(sample.steps)
        wanted = f"<reasoning>{steps}</reasoning><answer>{sample.answer}</answer>"
        assert tokenizer.decode(targets) == wanted, f"the targets spell {tokenizer.decode(targets)!r}"
        for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
            assert tokenizer.inner.token_to_id(tag) in targets, f"{tag} is no target"


def check_the_end_is_taught(rendering: ModuleType, tokenizer: Tokenizer, samples: list[Sample]) -> None:
    """The last token of every example is end-of-sequence, it is a target, and it stands nowhere else."""
    end = tokenizer.inner.token_to_id("<eos>")
    for sample in samples:
        ids, labels = labels_of(rendering, sample, tokenizer, style(tokenizer))
        assert ids[-1] == end, "the example does not end with end-of-sequence"
        assert labels[-1] == end, "end-of-sequence is no target: the model would never learn to stop"
        assert ids.count(end) == 1, "end-of-sequence stands inside the example"


# --- a chat template -------------------------------------------------------------------------------------------------

CONVERSATIONS = [
    chat("What is 3 + 4?", "7"),
    chat("Wie groß ist 日本?", "é 😀", "And\n\n now?  ", "So  groß: ½\n", system="Be brief."),
    chat("one", "two", "three", "four", "five", "six"),
]


def check_every_turn_is_taught(rendering: ModuleType, tokenizer: Tokenizer, samples: list[Sample]) -> None:
    """Cut where the mask changes, the row spells prompt, answer and end, prompt, answer and end, rest: in ChatML."""
    chatml = style(tokenizer, "chatml", system_instruction="Think first.")
    end = tokenizer.inner.token_to_id("<|im_end|>")
    for sample in [*samples, *CONVERSATIONS]:
        ids, labels = labels_of(rendering, sample, tokenizer, chatml)
        masked = [label == IGNORED for label in labels]
        pieces = [list(part) for _, part in itertools.groupby(range(len(ids)), key=masked.__getitem__)]
        spelled = [tokenizer.inner.decode([ids[i] for i in part], skip_special_tokens=False) for part in pieces]
        assert spelled == _pieces_of(sample), f"the row is cut into {spelled}"
        assert all(ids[part[-1]] == end for part in pieces[1::2]), "a turn does not end in its control token"


def _pieces_of(sample: Sample) -> list[str]:
    """The conversation in ChatML, written by hand: what is masked and what is trained, in turn."""
    said = f"<reasoning>{chr(10).join(sample.steps)}</reasoning><answer>{sample.answer}</answer>"
    turns = [(turn.role, turn.text) for turn in sample.turns] + [("assistant", said)] * bool(sample.steps)
    system = ["Think first."]
    if turns[0][0] == "system":
        system.append(turns.pop(0)[1])
    pieces = [
        f"<bos><|im_start|>system\n{chr(10).join(system[:1] + [''] * (len(system) - 1) + system[1:])}<|im_end|>\n"
    ]
    for role, text in turns:
        pieces[-1] += f"<|im_start|>{role}\n"
        if role == "assistant":
            pieces += [f"{text}<|im_end|>", "\n"]
        else:
            pieces[-1] += f"{text}<|im_end|>\n"
    return pieces


# --- the loss --------------------------------------------------------------------------------------------------------


def check_a_step_trains_on_the_mean_over_all_its_targets(engine_of: ModuleType, folder: Path) -> None:
    """The gradient norm and the loss of a step cut into unequal micro-batches equal those of one whole batch.

    A mean of micro-batch means weighs a token of a short micro-batch more; the loss it reports may even look right.
    """
    import torch

    from tunix_rt.config.settings import Training
    from tunix_rt.data.render import render_batch
    from tunix_rt.data.tokenizer import load_tokenizer
    from tunix_rt.models.resolve import resolve_model

    tokenizer = load_tokenizer(folder)
    rows = make_rows(render_batch(shipped_samples(8), tokenizer, style(tokenizer)), max_length=128, packing=False)
    batches = partial(batch_of_step, rows, micro_batch_size=2, accumulation=4, seed=5, pad_id=0)
    parts = [micro.targets for micro in batches(1).micro_batches]
    assert len(set(parts)) > 1, "the micro-batches are equal, so this check could not fail"

    source = resolve_model(str(folder), weights="random")
    load = partial(engine_of.load, source, device="cpu", training=Training(dtype="float64", seed=3))
    reference = load()
    reference.model.train()
    whole = collate(rows, pad_id=0)
    loss = engine_of.summed_loss(reference, whole, scale=1 / whole.targets)
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
