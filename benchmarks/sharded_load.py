"""Peak host memory of a rank while it loads its rows of a model.

    python -m benchmarks.sharded_load [--layers 24] [--ranks 2 4 8] [--model DIR] [--to benchmarks/results/sharded_load.json]

The model is a Llama with bfloat16 weights in files of 1 GB. Each case is a process of its own that builds the model on the meta
device, shards it by FSDP2 as rank R of W in a fake process group, and fills its rows; then it compares every row with the file.
Measured is the rise of the peak of resident memory, which counts mapped files, from after the imports until the rows are filled.
"""

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tunix_rt.models.safetensors import model_files, read_header

RESULTS = Path(__file__).parent / "results"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
FILE_BYTES = 10**9


def write_model(folder: Path, layers: int) -> int:
    """Write the model with random numbers; its bytes."""
    import torch
    import transformers

    from tunix_rt.engines.torch.model_files import write_weights

    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    drawn, shapes = torch.Generator().manual_seed(0), dict(model.named_parameters())

    def whole(name: str) -> torch.Tensor:
        return torch.empty(shapes[name].shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=drawn)

    write_weights(folder, model, whole, dtype=None, file_bytes=FILE_BYTES)
    return sum(one.nbytes for one in shapes.values())


def load_rows(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """What rank `rank` of `world` needs to load its rows."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tunix_rt.engines.memory_meter import RiseMeter
    from tunix_rt.engines.torch.compile import layers_of
    from tunix_rt.engines.torch.sharded_load import fill_model, meta_model
    from tunix_rt.engines.torch.sharding import Sharding
    from tunix_rt.engines.torch.tensor_files import read_rows
    from tunix_rt.models.safetensors import model_files, stored_tensors
    from tunix_rt.ranks import World

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    config, source = transformers.AutoConfig.from_pretrained(folder), SimpleNamespace(name="llama", folder=folder)
    options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    meta_model(source, config, options)  # what the first model of a process imports is not of its weights
    meter = RiseMeter()
    model = meta_model(source, config, options)
    here = World(rank=rank, size=world)
    sharding = Sharding(model, layers_of(model), world=here, device=torch.device("cpu"), replicas=1)
    fill_model(model, source, sharding, key_mapping=None)
    peak = meter.peak_bytes()
    stored = stored_tensors(model_files(folder))
    for name, weight in sharding.weights.items():
        expected = torch.empty_like(weight)
        read_rows(stored[name], expected, first=sharding.part(name).first)
        assert torch.equal(weight, expected), name
    own = sum(weight.nbytes for weight in sharding.weights.values())
    return {"ranks": world, "rank": rank, "own_bytes": own, "peak_bytes": peak}


def measured(act: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `act(*arguments)` returns in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(act, arguments)


def cases(worlds: list[int]) -> list[tuple[int, int]]:
    """First and last rank of each number of ranks: the last has the fewest rows."""
    return [(rank, world) for world in worlds for rank in (0, world - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--model", type=Path, help="of an earlier run, instead of a new one")
    parser.add_argument("--to", type=Path, default=RESULTS / "sharded_load.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tunix-rt-sharded-load-") as name:
        folder = args.model or Path(name)
        if args.model is None:
            write_model(folder, args.layers)
        found = [measured(load_rows, folder, rank, world) for rank, world in cases(args.ranks)]
        size = sum(
            tensor.end - tensor.begin for file in model_files(folder) for tensor in read_header(file)[0].values()
        )
    for case in found:
        share = size / case["ranks"]
        print(
            f"{case['ranks']} ranks, rank {case['rank']}: 1/W {share / 2**30:.3f} GiB, peak {case['peak_bytes'] / 2**30:.3f} GiB"
        )
    args.to.write_text(json.dumps({"model_bytes": size, "by_rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
