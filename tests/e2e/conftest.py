"""The real bundles, made once for all tests."""

from tests.forging.bases import tiny_bundle, tiny_replayable, tiny_repo, tiny_run

__all__ = ["tiny_bundle", "tiny_replayable", "tiny_repo", "tiny_run"]
