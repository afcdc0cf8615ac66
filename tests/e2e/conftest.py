"""The real bundles, made once for all tests."""

from tests.contract.conftest import *  # noqa: F403
