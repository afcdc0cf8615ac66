"""On a real GPU: a run takes no more than its limit, and each phase is measured by itself."""

import gc
import json
import re
import subprocess
import sys

import pytest
import torch

from tests.conftest import write_small_model
from tests.program import ROOT, environment
from tunix_rt.config.settings import Training
from tunix_rt.engines.torch import loop as torch_backend
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.memory import CUDA_CONTEXT_BYTES

pytestmark = pytest.mark.gpu
GIB = 2**30


@pytest.fixture(autouse=True)
def the_whole_device_is_given_back():
    yield
    gc.collect()  # what the frames of a failed allocation still hold
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def loaded(tmp_path, **training):
    source = resolve_model(str(write_small_model("gpt2", tmp_path / "model")), revision="main", weights="random")
    return torch_backend.load(source, device="cuda", training=Training(**training))


LIMITED = """
import json, sys, torch
from tunix_rt.config.settings import Training
from tunix_rt.engines.torch import loop
from tunix_rt.models.resolve import resolve_model

folder, limit, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
source = resolve_model(folder, revision="main", weights="random")
engine = loop.load(source, device="cuda", training=Training(memory_limit_gib=limit))
facts = {"limit": engine.limit_bytes, "free": loop.free_bytes(engine)}
fits = torch.empty(size, dtype=torch.uint8, device="cuda")
try:
    torch.empty(size, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    facts["refusal"] = str(error)
print(json.dumps(facts))
"""


def test_the_allocator_is_held_to_the_limit(tmp_path):
    """In a process of its own: the limit counts what a process holds, and other tests leave memory in its allocator."""
    limit_gib, size = 1.0, 300 << 20  # one tensor fits below the limit less the context, two do not
    folder = write_small_model("gpt2", tmp_path / "model")
    command = [sys.executable, "-c", LIMITED, str(folder), str(limit_gib), str(size)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["limit"] == GIB - CUDA_CONTEXT_BYTES
    assert facts["free"] <= facts["limit"]
    # The allocator names its limit ("... MiB allowed"). A GPU that is full has another message.
    assert f"{facts['limit'] / 2**20:.2f} MiB allowed" in facts["refusal"]


def test_a_model_that_the_limit_leaves_no_room_for_is_named_with_what_was_taken():
    """In a process of its own: what others left in the allocator's cache is room too."""
    program = (
        "from tunix_rt.engines.torch import loop; from tunix_rt.config.settings import Training; "
        "from tunix_rt.models.resolve import resolve_model; "
        "loop.load(resolve_model('gpt2', weights='random'), device='cuda', training=Training(memory_limit_gib=0.7))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "DoesNotFitError" in done.stderr
    assert re.search(r"out of memory while it is loaded on cuda beside the 0\.\d\d GiB taken", done.stderr)


def test_each_phase_begins_anew_and_the_process_keeps_its_highest(tmp_path):
    engine = loaded(tmp_path)
    engine.take_peak()
    before = torch.cuda.memory_allocated()
    torch.empty(2**28, dtype=torch.uint8, device="cuda")
    first = engine.take_peak()
    torch.empty(2**27, dtype=torch.uint8, device="cuda")
    second = engine.take_peak()
    assert (first.used_bytes - before, second.used_bytes - before) == (2**28, 2**27)
    assert first.alone and first.reserved_bytes >= first.used_bytes
    assert engine.peak_bytes() >= first.used_bytes > second.used_bytes
