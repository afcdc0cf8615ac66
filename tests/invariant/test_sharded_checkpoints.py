"""What several ranks write, each in files of its own, comes back to the bit on any number of ranks, and to other readers."""

import hashlib
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from tests.forging.ranks import on_ranks
from tests.invariant.test_ranks import ROWS_PER_STEP, TOLERANCES, uneven_rows
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import batch_of_step
from tunix_rt.engines.checkpoint import MODEL
from tunix_rt.export.adapter import _write_weights
from tunix_rt.models.safetensors import part_files

KINDS = {
    "adamw": {"dtype": "float32"},
    "adamw_8bit": {"dtype": "bfloat16", "master_dtype": "bfloat16", "optim": "adamw_8bit"},
    "adafactor": {"dtype": "float16", "optim": "adafactor"},
    "adapters": {"dtype": "bfloat16", "lora_rank": 3},
}


def trained(model, settings, *, steps):
    from tunix_rt.engines.torch import loop
    from tunix_rt.models.resolve import resolve_model

    training = Training(**{"learning_rate": 1e-3, "seed": 3, "compile": False} | settings)
    engine = loop.load(resolve_model(model), device="cpu", training=training)
    optimizer = loop.make_optimizer(engine, training)
    walk(engine, optimizer, training, first=1, total=steps)
    return engine, optimizer, training


def walk(engine, optimizer, training, *, first, total):
    from tunix_rt.engines.torch import loop

    batch_of = partial(batch_of_step, uneven_rows(), micro_batch_size=ROWS_PER_STEP, accumulation=1, seed=5, pad_id=0)
    steps = loop.optimizer_steps(engine, optimizer, batch_of, training, first=first, total=total)
    return [step.loss for step in steps]


def whole_state(engine, optimizer):
    """SHA-256 of every tensor, gathered by rank 0."""
    live = {**engine.weights, **optimizer.tensors()}
    parts = {name: optimizer.part_of(one) for name, one in engine.weights.items()} | optimizer.parts()
    if engine.sharding is not None:
        live = {name: engine.sharding.gathered(one, parts[name]) for name, one in live.items()}
    found = {name: one.detach() for name, one in live.items() if one is not None}
    if engine.loss_scale is not None and found:
        found |= engine.loss_scale.tensors()
    return {name: hashlib.sha256(one.view(-1).view(torch.uint8).numpy()).hexdigest() for name, one in found.items()}


def train_and_write(model, folder, settings):
    """Train, write twice, by a snapshot and directly, and go on. Rank 0 has the whole state."""
    from tunix_rt.engines.torch import save

    engine, optimizer, training = trained(model, settings, steps=3)
    written = save.write_direct(engine, optimizer, folder / "direct")
    assert save.snapshot(engine, optimizer).write(folder / "snapshot") == written
    state, size = whole_state(engine, optimizer), save.snapshot_bytes(engine, optimizer)
    return state, size, walk(engine, optimizer, training, first=4, total=6)


def restore_and_write(model, source, folder, settings):
    from tunix_rt.engines.torch import save

    engine, optimizer, training = trained(model, settings, steps=0)
    save.restore_state(engine, optimizer, source, step=3)
    save.write_direct(engine, optimizer, folder)
    save.save(engine, folder.with_suffix(".final"), tokenizer_folder=Path(model), stop_ids=[1])
    return whole_state(engine, optimizer), walk(engine, optimizer, training, first=4, total=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Pretrained weights, which ranks read by rows."""
    from tests.conftest import write_small_model

    folder = write_small_model("gemma3", tmp_path_factory.mktemp("model"))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "kind", ["adafactor", "adapters", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("adamw", "adamw_8bit"))]
)
def test_a_state_goes_from_two_ranks_to_four_to_one_to_two_bit_for_bit(tmp_path, model, kind):
    for name in ("direct", "snapshot", "4", "1", "2"):
        (tmp_path / name).mkdir()
    (state, size, expected), (of_second, *_) = on_ranks(2, train_and_write, str(model), tmp_path, KINDS[kind])
    assert state and not of_second
    came = tmp_path / "direct"
    for world in (4, 1, 2):
        place = tmp_path / str(world)
        replicas = 2 if world == 4 and kind == "adamw" else 1
        settings = KINDS[kind] | {"data_replicas": replicas}
        found, losses = on_ranks(world, restore_and_write, str(model), came, place, settings)[0]
        assert found == state
        assert losses == (expected if world == 2 else pytest.approx(expected, rel=TOLERANCES[settings["dtype"]]))
        assert len(list(place.iterdir())) == 2 * world // replicas
        came = place
    assert (files := contents(came)) == contents(tmp_path / "direct")
    assert contents(tmp_path / "4.final") == contents(tmp_path / "1.final") == contents(tmp_path / "2.final")
    assert 0 < sum(map(len, files.values())) - size < 64 * 1024  # the headers
    read_by_dcp(came, tmp_path / "1")
    if kind == "adapters":
        folders = [tmp_path / world for world in ("2", "1")]
        split, whole = (_write_weights(part_files(one, MODEL), one.with_suffix(".adapter")) for one in folders)
        assert split == whole and len(whole) == 28


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_by_dcp(parts, whole):
    """torch.distributed.checkpoint reads the files of ranks as what one rank writes."""
    expected = load_file(whole / "model.safetensors") | load_file(whole / "optimizer.safetensors")
    found = {name: torch.zeros_like(one) for name, one in expected.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(parts)), no_dist=True)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
