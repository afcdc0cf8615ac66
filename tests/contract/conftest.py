"""The real bundles, made once for all tests."""

from tests.forging.bases import judged_once, tiny_bundle, tiny_replayable, tiny_repo, tiny_run

__all__ = ["judged_once", "tiny_bundle", "tiny_replayable", "tiny_repo", "tiny_run"]
