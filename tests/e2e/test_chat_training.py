"""A model trained on chats is used as people use one: by plain transformers, from its folder alone."""

import json

import pytest

from tests.conftest import write_small_model
from tests.program import in_process
from tests.supervision_checks import write_chat_tokenizer

QUESTION, ANSWER = "What is 3 + 4?", "It is 7."


@pytest.fixture(scope="module")
def final_model(tmp_path_factory):
    """The folder of a small model that has learned one answer with Gemma's template, which its tokenizer lacks."""
    folder = tmp_path_factory.mktemp("chat")
    model = write_chat_tokenizer(write_small_model("gemma3", folder / "model"))
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    records = [{"messages": turns} for _ in range(8)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {
        "model.model_name_or_path": model, "model.weights": "random", "data.dataset": folder / "chats.jsonl",
        "data.chat_template": "gemma", "data.max_length": 64, "data.packing": "false", "evaluation.enabled": "false",
        "training.max_steps": 30, "training.save_steps": 30, "training.eval_steps": 30, "training.learning_rate": 0.01,
    }  # fmt: skip
    chosen = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = in_process("train", "smoke_tiny", "--output", folder / "run", "--device", "cpu", *chosen)
    assert done.returncode == 0, done.stderr
    return folder / "run" / "final_model"


def test_a_model_trained_on_chats_stops_at_the_end_of_its_turn_by_itself(final_model):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(final_model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(final_model)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    [answered] = model.generate(**asked, max_new_tokens=40, do_sample=False)
    said = tokenizer.decode(answered[asked["input_ids"].shape[1] :])
    assert said == f"{ANSWER}<end_of_turn>"
