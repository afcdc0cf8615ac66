"""The real bundles, made once for all tests."""

from tests.forging.bases import (
    cpu_bundle,
    cpu_run,
    gpu_bundle,
    judged_once,
    rollout_run,
    source_repo,
    tiny_bundle,
    tiny_replayable,
    tiny_repo,
    tiny_run,
)

__all__ = [
    "cpu_bundle", "cpu_run", "gpu_bundle", "judged_once", "rollout_run", "source_repo", "tiny_bundle", "tiny_replayable",
    "tiny_repo", "tiny_run",
]  # fmt: skip
