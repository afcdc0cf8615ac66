"""One side of `benchmarks.parity`, in a process of its own: `python -m benchmarks.parity_sides SIDE measure|exchange FOLDER ...`.

    transformers   its model, torch's AdamW, each example in a row of its own
    ours           our JAX model and step, examples packed
    tunix          google-tunix's loader, model, loss and PeftTrainer, each example in a row of its own
    adapter        google-tunix's model in our step (`model.implementation: tunix`), examples packed

A FOLDER has `model`, `asked.json` and `inputs.npz`. `measure` writes SIDE.npz (logits, losses), `saved-SIDE`, the model as it
was read, and `trained-SIDE`, the model after the last step. `exchange` reads every `trained-*` and writes the loss of each.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

IGNORED = -100
LAST = 64
"""Tokens at the end of the long text whose logits are compared."""


def step_inputs(inputs: Mapping[str, Any], laid: str, step: int) -> dict[str, Any]:
    return {name: inputs[f"{laid} {name}"][step] for name in ("ids", "labels", "positions")}


class Transformers:
    laid = "alone"

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        import torch
        import transformers

        self.asked, self.torch = asked, torch
        kinds = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kinds).train()

    def logits(self, ids: Any) -> Any:
        with self.torch.no_grad():
            return self.model(input_ids=self.torch.from_numpy(ids), use_cache=False).logits[:, -LAST:].numpy()

    def _loss(self, batch: Mapping[str, Any]) -> Any:
        ids, labels = (self.torch.from_numpy(batch[name]).long() for name in ("ids", "labels"))
        logits = self.model(input_ids=ids, use_cache=False).logits
        flat = (logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return self.torch.nn.functional.cross_entropy(*flat, ignore_index=IGNORED)

    def loss(self, batch: Mapping[str, Any]) -> float:
        with self.torch.no_grad():
            return float(self._loss(batch))

    def train(self, batches: list[dict[str, Any]]) -> list[float]:
        parameters, decay = list(self.model.parameters()), self.asked["weight_decay"]
        groups = [
            {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": decay},
            {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
        ]
        asked = self.asked
        optimizer = self.torch.optim.AdamW(groups, lr=asked["rate"], betas=asked["betas"], eps=asked["epsilon"])
        found = []
        for batch in batches:
            loss = self._loss(batch)
            loss.backward()
            self.torch.nn.utils.clip_grad_norm_(parameters, asked["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class Ours:
    """Our step, with our model or, as `adapter`, with Tunix's."""

    laid = "packed"

    def __init__(self, folder: Path, asked: Mapping[str, Any], implementation: str = "auto") -> None:
        from tunix_rt.engines.jax import model as jax_models
        from tunix_rt.engines.jax import tunix as jax_tunix
        from tunix_rt.engines.jax.architecture import architecture_of
        from tunix_rt.engines.jax.weights import load_weights
        from tunix_rt.models.resolve import resolve_model

        self.asked, self.implementation = asked, implementation
        self.source = resolve_model(str(folder))
        self.architecture = architecture_of(self.source.config)
        self.params: Any = load_weights(self.source, self.architecture, dtype="float32")
        self.model: Any = jax_tunix if implementation == "tunix" else jax_models

    def logits(self, ids: Any) -> Any:
        import jax

        from tunix_rt.engines.jax.chunked_loss import head_logits
        from tunix_rt.engines.jax.model import lm_head_weight

        def asked_for(params: Any) -> Any:
            places = np.arange(ids.shape[1], dtype=np.int32)[None]
            states = self.model.forward(
                params, ids, places, np.zeros_like(ids), self.architecture, compute="float32"
            )[:, -LAST:]  # fmt: skip
            return head_logits(
                states, lm_head_weight(params), compute="float32", softcap=self.architecture.logit_cap
            )  # fmt: skip

        return np.asarray(jax.jit(asked_for)(self.params))

    def _batch(self, batch: Mapping[str, Any]) -> tuple[Any, int]:
        from tunix_rt.data.packing import MicroBatch
        from tunix_rt.engines.jax.model import batch_of

        laid = batch_of(MicroBatch(**batch))
        return laid, int(laid.weights.sum())

    def loss(self, batch: Mapping[str, Any]) -> float:
        import jax

        laid, targets = self._batch(batch)
        summed = partial(self.model.summed_loss, architecture=self.architecture, compute="float32")
        return float(jax.jit(summed)(self.params, laid)) / targets

    def train(self, batches: list[dict[str, Any]]) -> list[float]:
        import jax

        from tunix_rt.engines.jax import optim as jax_optim
        from tunix_rt.engines.jax.step import State, StepPlan, numbers, take_step

        asked = self.asked
        optim = jax_optim.Optim(
            kind="adamw", beta1=asked["betas"][0], beta2=asked["betas"][1], epsilon=asked["epsilon"],
            weight_decay=asked["weight_decay"], stochastic=False,
        )  # fmt: skip
        plan = StepPlan(
            architecture=self.architecture, compute="float32", weights="float32", remat="none", chunk=64, optim=optim,
            max_grad_norm=asked["max_grad_norm"], attention="exact", accumulation=1, seed=0,
            implementation=self.implementation,
        )  # fmt: skip
        step, found = jax.jit(partial(take_step, plan), donate_argnums=0), []
        state = State(jax.tree.map(jax.numpy.asarray, self.params), jax_optim.init(self.params, optim))
        for number, batch in enumerate(batches, start=1):
            laid, targets = self._batch(batch)
            one = jax.tree.map(lambda array: array[None], laid)
            state, loss, _ = step(state, one, **numbers(plan, step=number, rate=asked["rate"], target_tokens=targets))
            found.append(float(loss))
        self.params = state.params
        return found

    def save(self, folder: Path) -> None:
        from benchmarks.jax_models import save_weights

        save_weights(self.params, self.architecture, folder, config=self.source.config)


class Tunix:
    laid = "alone"

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        from benchmarks.jax_models import open_in_tunix
        from tunix_rt.engines.jax.architecture import architecture_of

        self.asked, self.config = asked, json.loads((folder / "config.json").read_text())
        self.architecture = architecture_of(self.config)
        self.model = open_in_tunix(folder, self.architecture, dtype="float32")

    def _input(self, ids: Any, mask: Any) -> dict[str, Any]:
        rows, tokens = ids.shape
        causal = np.tril(np.ones((tokens, tokens), bool))
        return {
            "input_tokens": ids, "input_mask": mask,
            "positions": np.broadcast_to(np.arange(tokens, dtype=np.int32), ids.shape),
            "attention_mask": np.broadcast_to(causal, (rows, tokens, tokens)),
        }  # fmt: skip

    def logits(self, ids: Any) -> Any:
        from flax import nnx

        given = self._input(ids, ids > 0)
        order = [given[name] for name in ("input_tokens", "positions", "attention_mask")]
        called = nnx.jit(lambda model, ids, positions, mask: model(ids, positions, None, mask)[0][:, -LAST:])
        return np.asarray(called(self.model, *order))

    def loss(self, batch: Mapping[str, Any]) -> float:
        """That of the first step of a PeftTrainer."""
        return self.train([dict(batch)])[0]

    def train(self, batches: list[dict[str, Any]]) -> list[float]:
        import jax
        import optax
        from tunix.sft import hooks, peft_trainer

        asked, found = self.asked, []
        rule = optax.chain(
            optax.clip_by_global_norm(asked["max_grad_norm"]),
            optax.scale_by_adam(*asked["betas"], eps=asked["epsilon"]),
            optax.add_decayed_weights(
                asked["weight_decay"], mask=lambda params: jax.tree.map(lambda one: one.ndim > 1, params)
            ),
            optax.scale(-asked["rate"]),
        )

        class Losses(hooks.TrainingHooks):
            def on_train_start(self, *given: Any, **named: Any) -> None: ...
            def on_train_end(self, *given: Any, **named: Any) -> None: ...
            def on_train_step_start(self, *given: Any, **named: Any) -> None: ...
            def on_train_step_end(self, trainer: Any, step: int, loss: Any, *given: Any, **named: Any) -> None:
                found.append(float(loss))

            def on_eval_step_start(self, *given: Any, **named: Any) -> None: ...
            def on_eval_step_end(self, *given: Any, **named: Any) -> None: ...

        config = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=len(batches))
        trainer = peft_trainer.PeftTrainer(self.model, rule, config)
        trainer.with_training_hooks(Losses())
        trainer.with_gen_model_input_fn(lambda given: given)
        trainer.train([self._input(one["ids"], one["labels"] != IGNORED) for one in batches])
        return found

    def save(self, folder: Path) -> None:
        from benchmarks.jax_models import params_of, save_weights

        save_weights(params_of(self.model, self.architecture), self.architecture, folder, config=self.config)


SIDES: dict[str, Any] = {
    "transformers": Transformers, "ours": Ours, "tunix": Tunix, "adapter": partial(Ours, implementation="tunix"),
}  # fmt: skip
LAID = {"transformers": "alone", "ours": "packed", "tunix": "alone", "adapter": "packed"}


def measure(name: str, folder: Path) -> None:
    asked, inputs = json.loads((folder / "asked.json").read_text()), np.load(folder / "inputs.npz")
    side = SIDES[name](folder / "model", asked)
    found = {"short": side.logits(inputs["short"]), "long": side.logits(inputs["long"])}
    side.save(folder / f"saved-{name}")
    found["losses"] = np.asarray(side.train([step_inputs(inputs, side.laid, step) for step in range(asked["steps"])]))
    side.save(folder / f"trained-{name}")
    np.savez(folder / f"{name}.npz", **found)


def exchange(name: str, folder: Path) -> None:
    """The loss of the first batch, by the weights that each side trained."""
    asked, inputs = json.loads((folder / "asked.json").read_text()), np.load(folder / "inputs.npz")
    batch = step_inputs(inputs, LAID[name], 0)
    found = {path.name: SIDES[name](path, asked).loss(batch) for path in trained(folder)}
    (folder / f"exchanged-{name}.json").write_text(json.dumps(found))


def trained(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("trained-*"))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for place in sys.argv[3:]:
        {"measure": measure, "exchange": exchange}[sys.argv[2]](sys.argv[1], Path(place))
