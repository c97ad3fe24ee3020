"""Reading one tensor from a file: every encoding, in blocks, with little memory."""

import tracemalloc

import numpy as np
import pytest

from omnidraft_npu.errors import CheckpointError
from omnidraft_npu.quantize.checkpoints.stored_tensor import (
    BLOCK_ENCODINGS,
    StoredTensor,
    have_equal_values,
    stored_bytes,
)

# More than two of the blocks that are read at a time, the last one not full.
LONG = (2 * 1024 + 3, 1024)


def random_blocks(rng: np.random.Generator, size: int) -> np.ndarray:
    """Bytes whose every pair is a finite, not too small float16: scales are anywhere in a block."""
    return rng.integers(0x20, 0x40, size, dtype=np.uint8)


@pytest.mark.parametrize("encoding", BLOCK_ENCODINGS)
def test_blocks_decode_as_the_gguf_package_decodes_them_whole(tmp_path, rng, encoding):
    from gguf import GGMLQuantizationType, quants

    raw = random_blocks(rng, stored_bytes(LONG, encoding))
    path = tmp_path / "tensor"
    path.write_bytes(b"before" + raw.tobytes() + b"after")
    stored = StoredTensor(name="t", path=path, offset=6, shape=LONG, encoding=encoding)

    whole = quants.dequantize(raw.reshape(LONG[0], -1), GGMLQuantizationType[encoding])

    np.testing.assert_array_equal(stored.read(), whole)


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_floats_keep_their_value(tmp_path, encoding):
    import torch

    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[encoding]
    values = torch.randn(LONG, generator=torch.Generator().manual_seed(1)).to(dtype)
    path = tmp_path / "tensor"
    path.write_bytes(values.view(torch.uint8).numpy().tobytes())
    stored = StoredTensor(name="t", path=path, offset=0, shape=LONG, encoding=encoding)

    np.testing.assert_array_equal(stored.read(), values.float().numpy())


@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q8_0", "Q4_K"])
def test_reading_needs_the_result_and_a_few_mb(tmp_path, encoding):
    shape = (8 * 1024, 4096)
    path = tmp_path / "tensor"
    with path.open("wb") as file:
        file.truncate(stored_bytes(shape, encoding))
    stored = StoredTensor(name="t", path=path, offset=0, shape=shape, encoding=encoding)
    stored.read()

    tracemalloc.start()
    try:
        result = stored.read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert result.nbytes <= peak < result.nbytes + 30e6


@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "holds NaN"), (-np.inf, "holds an infinite value")]
)
def test_a_value_that_is_not_finite_is_refused_wherever_it_lies(tmp_path, value, said):
    path = tmp_path / "tensor"
    for place in (0, -1):
        values = np.zeros(LONG, np.float32)
        values.flat[place] = value
        path.write_bytes(values.tobytes())
        stored = StoredTensor(name="up", path=path, offset=0, shape=LONG, encoding="F32")

        with pytest.raises(CheckpointError, match=f"tensor up {said}"):
            stored.read()


def test_a_file_that_shrank_or_vanished_since_it_was_opened_is_an_error(tmp_path):
    path = tmp_path / "tensor"
    path.write_bytes(bytes(4 * 7))
    stored = StoredTensor(name="up", path=path, offset=0, shape=(2, 4), encoding="F32")

    with pytest.raises(CheckpointError, match="ends inside tensor up"):
        stored.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read tensor up: No such file"):
        stored.read()


def test_tensors_are_compared_byte_for_byte(tmp_path, rng):
    values = rng.normal(size=LONG).astype(np.float32)
    path = tmp_path / "tensors"
    other = values.copy()
    other[-1, -1] += 1
    path.write_bytes(values.tobytes() + values.tobytes() + other.tobytes())
    first, second, third = (
        StoredTensor(name="t", path=path, offset=i * values.nbytes, shape=LONG, encoding="F32")
        for i in range(3)
    )

    assert have_equal_values(first, second)
    assert not have_equal_values(first, third)
