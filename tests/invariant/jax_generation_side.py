"""The JAX side of test_jax_generation.py, in a process of its own: `python -m tests.invariant.jax_generation_side FILE`.

FILE lists what is asked: for each question a model, prompts, how they are answered, and a way of `WAYS`. The answers are
written beside it, to found.json. Nothing of jax is imported with this module, so the tests may have its constants.
"""

import functools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

DEVICES = 8
CLOSING = "</answer>"


def tagged(ids):
    return "".join(CLOSING if token % 7 == 3 else "." for token in ids)


@functools.cache
def engine_of(folder, cut, mixed):
    """On one device, or cut over all; with products of bfloat16 of float32 weights where `mixed`."""
    import jax

    from tunix_rt.engines.jax.load import load_for_inference
    from tunix_rt.engines.jax.mesh import make_mesh, parameter_shardings
    from tunix_rt.models.resolve import resolve_model

    engine = load_for_inference(resolve_model(str(folder)), device="cpu", dtype="float32")
    if mixed:
        engine = replace(engine, recipe=replace(engine.recipe, compute="bfloat16"))
    if cut:
        assert len(engine.params["embedding"].sharding.device_set) == DEVICES
        assert not engine.params["embedding"].sharding.is_fully_replicated
        return engine
    mesh = make_mesh(jax.devices()[:1])
    return replace(engine, mesh=mesh, params=jax.device_put(engine.params, parameter_shardings(mesh, engine.params)))


def short_of(engine, prompts, answers):
    """By how much, as a share of the largest logit, a token of an answer is less likely than another by the model that
    is trained: of whole rows, without a cache. The largest such share."""
    import jax
    import numpy as np

    from tunix_rt.engines.jax.chunked_loss import head_logits
    from tunix_rt.engines.jax.model import forward, lm_head_weight

    @jax.jit
    def logits_of(params, ids, places):
        architecture, compute = engine.architecture, engine.compute
        states = forward(params, ids, places, np.zeros((1, 64), np.int32), architecture, compute=compute)
        return head_logits(states, lm_head_weight(params), compute=compute, softcap=architecture.logit_cap)[0]

    worst = 0.0
    for index, prompt in enumerate(prompts):
        answer = answers[index].ids
        ids = np.zeros((1, 64), np.int32)
        ids[0, : len(prompt) + len(answer)] = [*prompt, *answer]
        places = np.arange(64, dtype=np.int32)[None]
        logits = np.asarray(logits_of(engine.params, ids, places))
        for place, token in enumerate(answer, start=len(prompt) - 1):
            worst = max(worst, float((logits[place].max() - logits[place, token]) / abs(logits[place]).max()))
    return worst


def answers_of(question):
    """Answers by number, and what else was found on the way to them."""
    from tunix_rt.engines.decoding import Decoding
    from tunix_rt.engines.jax import generate as jax_generate
    from tunix_rt.errors import TunixError

    engine = engine_of(question["model"], question.get("cut", False), question.get("mixed", False))
    heard, real = {}, jax_generate._read
    before = jax_generate._more_tokens._cache_size() + real._cache_size()

    def hears(index, ids):
        heard.setdefault(index, []).append(ids)
        return len(ids) == question.get("ends")

    if "memory_for" in question:
        jax_generate._read = lambda *given: scarce(real, question["memory_for"], given)
    try:
        answers = dict(
            jax_generate.generate(
                engine,
                question["prompts"],
                decoding=Decoding(**question["decoding"]),
                stop_ids=question["stop_ids"],
                pad_id=0,
                decode=tagged,
                batch_size_at=lambda length: question["rows"],
                logprobs=question.get("logprobs", False),
                on_tokens=hears if question.get("heard") else None,
            )
        )
    except TunixError as error:
        return {"error": str(error)}
    finally:
        jax_generate._read = real
    found = {"answers": [asdict(answers[index]) for index in range(len(answers))]}
    found["programs"] = jax_generate._more_tokens._cache_size() + real._cache_size() - before
    found["heard"] = [heard.get(index) for index in range(len(answers))]
    if question.get("short_of"):
        found["short_of"] = short_of(engine, question["prompts"], answers)
    return found


def scarce(real, rows, given):
    import jax

    if len(given[2].begins) > rows:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123456 bytes.")
    return real(*given)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    asked = json.loads(place.read_text())
    (place.parent / "found.json").write_text(json.dumps({name: answers_of(one) for name, one in asked.items()}))
