"""Our quantizers of super-blocks, read by the dequantizer of `gguf`."""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf` (scripts/setup --dev installs it)")

from tunix_rt.engines.gguf_reload import BOUNDS, UNIT  # noqa: E402
from tunix_rt.engines.k_quants import K_QUANTS, quantize  # noqa: E402

MEAN_ERROR = {"Q4_K": 0.073, "Q5_K": 0.037, "Q6_K": 0.0182}
"""Root mean square error of normal weights over that of the weights; llama.cpp's own quantizer has 0.071, 0.036 and 0.018."""


def read(values, kind):
    return gguf.quants.dequantize(quantize(values, kind), kind).reshape(values.shape)


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_normal_weights_are_read_back_with_the_error_of_the_type(kind):
    values = np.random.default_rng(0).normal(scale=0.02, size=(48, 1024)).astype(np.float32)
    error = read(values, kind) - values
    assert np.sqrt((error**2).mean() / (values**2).mean()) < MEAN_ERROR[kind.name]
    block, share, _ = BOUNDS[kind]
    largest = np.abs(values).reshape(-1, block).max(axis=1)
    assert (np.abs(error).reshape(-1, block).max(axis=1) <= share * largest).all()


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_rows_that_are_no_noise_are_read_back_as_well(kind):
    """Zeros, one value, an outlier, a ramp with every code, only negative, tiny and large weights."""
    rows = np.zeros((7, 256), dtype=np.float32)
    rows[1] = 0.5
    rows[2, 17] = 30
    rows[3] = np.arange(256) / 16
    rows[4] = -np.arange(1, 257) / 100
    rows[5] = np.linspace(-1e-7, 1e-7, 256)
    rows[6] = np.linspace(-6e4, 5e4, 256)
    error = np.abs(read(rows, kind) - rows).max(axis=1)
    _, share, multiples = BOUNDS[kind]
    assert np.isfinite(error).all() and error[0] == 0
    assert (error <= share * np.abs(rows).max(axis=1) + multiples * UNIT).all(), error


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_rows_keep_their_place_beyond_one_pass(kind, monkeypatch):
    values = np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32)
    whole = quantize(values, kind)
    assert whole.shape == (6, 2 * gguf.GGML_QUANT_SIZES[kind][1])
    monkeypatch.setattr("tunix_rt.engines.k_quants.BLOCKS_AT_ONCE", 5)
    assert (quantize(values, kind) == whole).all()
    assert all((quantize(values[row : row + 1], kind) == whole[row]).all() for row in range(6))
