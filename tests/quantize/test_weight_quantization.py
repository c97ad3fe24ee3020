import numpy as np
import onnxruntime as ort
import pytest

from omnidraft_npu.quantize.graph_writer import MICROSOFT, new_graph
from omnidraft_npu.quantize.weight_quantization import BLOCK, quantize_blocks

SHAPES = [(5, 64), (7, 96), (3, 40), (4, 20)]


def random_weight(rng, shape):
    return (rng.normal(size=shape) + 0.3 * rng.normal(size=(shape[0], 1))).astype(np.float32)


def root_mean_square(x):
    return np.sqrt((x**2).mean())


def run_node(folder, op, data, quantized, order, **attributes):
    """The one-node graph of `op` on `data` and a quantised weight, through onnxruntime."""
    packed = quantized.packed
    with new_graph(folder, opset=21) as graph:
        graph.input("data", data.dtype, data.shape)
        graph.tensor("packed", packed if order[0] == "data" else packed.reshape(len(packed), -1))
        graph.tensor("scales", quantized.scales)
        graph.tensor("zeros", quantized.zero_points)
        inputs = [*order, "scales", "zeros"]
        graph.node(op, inputs, "y", domain=MICROSOFT, bits=quantized.bits, **attributes)
        graph.output("y", np.float32, [None] * 2)
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"data": data})[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.006), (4, 0.09)])
def test_the_error_is_a_small_part_of_the_weight(rng, shape, bits, bound):
    weight = random_weight(rng, shape)
    rounded = quantize_blocks(weight, bits).dequantize()

    assert rounded.shape == shape
    assert root_mean_square(rounded - weight) < bound * root_mean_square(weight)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("accuracy_level", [1, 4])
def test_onnxruntime_multiplies_by_the_dequantised_weight(
    rng, tmp_path, shape, bits, accuracy_level
):
    """Packing, the padding of the last block and zero points, as the kernel reads them."""
    quantized = quantize_blocks(random_weight(rng, shape), bits)
    x = rng.normal(size=(3, shape[1])).astype(np.float32)
    attributes = {"K": shape[1], "N": shape[0], "accuracy_level": accuracy_level}

    product = run_node(
        tmp_path, "MatMulNBits", x, quantized, ["data", "packed"], block_size=BLOCK, **attributes
    )
    tolerance = {1: 1e-4, 4: 0.02 * np.abs(product).max()}[accuracy_level]
    np.testing.assert_allclose(product, x @ quantized.dequantize().T, atol=tolerance)


@pytest.mark.parametrize("shape", [(5, 64), (7, 96)])
@pytest.mark.parametrize("bits", [8, 4])
def test_onnxruntime_gathers_rows_of_the_dequantised_weight(rng, tmp_path, shape, bits):
    quantized = quantize_blocks(random_weight(rng, shape), bits)
    ids = np.array([2, 0, 2], np.int64)
    attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": BLOCK}

    order = ["packed", "data"]
    rows = run_node(tmp_path, "GatherBlockQuantized", ids, quantized, order, **attributes)
    np.testing.assert_allclose(rows, quantized.dequantize()[ids], atol=1e-6)


@pytest.mark.parametrize(("bits", "extremes"), [(8, (-127, 127)), (4, (-8, 7))])
@pytest.mark.parametrize("sign", [-1, 1])
def test_sources_of_as_many_bits_come_back_exactly(rng, bits, extremes, sign):
    """Q8_0 and Q4_0: levels around zero, of which the largest magnitude is in use."""
    levels = rng.integers(extremes[0], extremes[1] + 1, (6, BLOCK))
    levels[:, 5] = extremes[0]
    scales = sign * rng.random((6, 1)).astype(np.float16)
    weight = (levels * scales).astype(np.float32)

    np.testing.assert_allclose(quantize_blocks(weight, bits).dequantize(), weight, rtol=1e-6)


def test_8_bits_keep_a_q4_1_source_better_than_its_plain_range(rng):
    """Q4_1 is ``d * q + m``: 15 equal steps, which 255 levels can hit all at once."""
    levels = rng.integers(0, 16, (50, BLOCK))
    levels[:, :2] = 0, 15
    weight = (levels * 0.1 - rng.uniform(0.3, 1.2, (50, 1))).astype(np.float32)
    plain_scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    plain = np.rint(weight / plain_scale) * plain_scale

    error = root_mean_square(quantize_blocks(weight, 8).dequantize() - weight)
    assert error < 0.5 * root_mean_square(plain - weight)


def test_4_bits_lose_less_than_rounding_to_the_plain_range(rng):
    weight = random_weight(rng, (40, 96))
    blocks = weight.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 7
    plain = (np.rint(blocks / scale) * scale).reshape(weight.shape)

    error = root_mean_square(quantize_blocks(weight, 4).dequantize() - weight)
    assert error < 0.8 * root_mean_square(plain - weight)


def test_importance_moves_the_error_to_where_it_costs_less(rng):
    weight = random_weight(rng, (40, 96))
    importance = np.where(np.arange(96) % 8 == 0, 100.0, 1.0).astype(np.float32)

    def cost(rounded):
        return ((rounded.dequantize() - weight) ** 2 * importance).sum()

    weighted = quantize_blocks(weight, 4, importance=importance)
    assert cost(weighted) < 0.7 * cost(quantize_blocks(weight, 4))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("importance", [None, np.zeros(64, np.float32)])
def test_zeros_stay_zeros(bits, importance):
    weight = np.zeros((3, 64), np.float32)
    weight[1, :40] = np.arange(40)
    rounded = quantize_blocks(weight, bits, importance=importance).dequantize()

    assert np.isfinite(rounded).all()
    assert not rounded[weight == 0].any()
    assert rounded[1].any()


def test_pieces_of_a_large_weight_are_rounded_like_the_whole(rng, monkeypatch):
    weight = random_weight(rng, (37, 64))
    whole = quantize_blocks(weight, 4)
    monkeypatch.setattr("omnidraft_npu.quantize.weight_quantization._ROWS_AT_ONCE_ELEMENTS", 5 * 64)
    pieces = quantize_blocks(weight, 4)

    np.testing.assert_array_equal(pieces.packed, whole.packed)
    np.testing.assert_array_equal(pieces.zero_points, whole.zero_points)
