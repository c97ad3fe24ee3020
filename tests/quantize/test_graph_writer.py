import numpy as np
import onnxruntime as ort
import pytest

from omnidraft_npu.errors import ExportError
from omnidraft_npu.quantize.graph_writer import new_graph
from omnidraft_npu.quantize.tensor_file import ALIGNMENT, EXTERNAL_BYTES

BIG = np.arange(EXTERNAL_BYTES, dtype=np.float32).reshape(8, -1)


def run(folder, **feeds):
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def add_product(graph, weight="weight"):
    x = graph.input("x", np.float32, ["rows", 8])
    graph.node("MatMul", [x, weight], "y")
    graph.output("y", np.float32, ["rows", BIG.shape[1]])


def test_large_tensors_lie_in_the_data_file_and_small_ones_do_not(tmp_path):
    with new_graph(tmp_path, opset=21) as graph:
        graph.tensor("small", np.zeros(4, np.float32))
        graph.tensor("first", BIG + 1)
        graph.tensor("weight", BIG)
        add_product(graph)

    data = (tmp_path / "model.onnx.data").read_bytes()
    assert len(data) == -(-BIG.nbytes // ALIGNMENT) * ALIGNMENT + BIG.nbytes
    assert (tmp_path / "model.onnx").stat().st_size < 1000
    x = np.eye(8, dtype=np.float32)
    np.testing.assert_array_equal(run(tmp_path, x=x)[0], BIG)


def test_a_tensor_is_on_disk_as_soon_as_it_was_added(tmp_path):
    """Memory must not grow with the model."""
    with new_graph(tmp_path, opset=21) as graph:
        weight = np.ones((1 << 16, 64), np.float32)
        graph.tensor("weight", weight)
        assert (tmp_path / "model.onnx.data").stat().st_size >= weight.nbytes
        add_product(graph, weight=graph.tensor("other", BIG))


def test_a_view_costs_no_bytes_and_reads_the_same_values(tmp_path):
    with new_graph(tmp_path, opset=21) as graph:
        graph.tensor("flat", BIG.reshape(-1))
        size = (tmp_path / "model.onnx.data").stat().st_size
        add_product(graph, weight=graph.view("weight", "flat", BIG.shape))

    assert (tmp_path / "model.onnx.data").stat().st_size == max(size, BIG.nbytes)
    np.testing.assert_array_equal(run(tmp_path, x=np.eye(8, dtype=np.float32))[0], BIG)


def test_a_view_of_another_size_is_refused(tmp_path):
    with (
        pytest.raises(ValueError, match="cannot be seen"),
        new_graph(tmp_path, opset=21) as graph,
    ):
        graph.view("weight", graph.tensor("flat", BIG), [3, 3])


def test_an_optional_input_has_its_default_where_it_is_not_fed(tmp_path):
    with new_graph(tmp_path, opset=21) as graph:
        x = graph.input("x", np.int64, [1])
        shift = graph.optional_input("shift", np.array([5]))
        graph.output(graph.node("Add", [x, shift], "y"), np.int64, [1])

    assert run(tmp_path, x=np.array([1]))[0] == [6]
    assert run(tmp_path, x=np.array([1]), shift=np.array([7]))[0] == [8]


@pytest.mark.parametrize("add", ["tensor", "input"])
def test_a_name_given_twice_is_refused(tmp_path, add):
    arguments = [BIG] if add == "tensor" else [np.float32, [1]]
    with (
        pytest.raises(ValueError, match="already has a value 'x'"),
        new_graph(tmp_path, opset=21) as graph,
    ):
        graph.input("x", np.float32, [1])
        getattr(graph, add)("x", *arguments)


def test_a_node_that_reads_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="reads 'z'"), new_graph(tmp_path, opset=21) as graph:
        graph.node("Relu", ["z"], "y")


def test_an_error_leaves_no_files(tmp_path):
    with pytest.raises(RuntimeError), new_graph(tmp_path, opset=21) as graph:
        graph.tensor("weight", BIG)
        raise RuntimeError("the checkpoint ends here")
    assert list(tmp_path.iterdir()) == []


def refuse(*_):
    raise OSError(28, "No space left on device")


def test_a_disk_too_full_for_the_graph_is_one_line_and_leaves_no_files(tmp_path, monkeypatch):
    message = r"cannot write .*model\.onnx: No space left on device.*-o"
    with pytest.raises(ExportError, match=message), new_graph(tmp_path, opset=21):
        monkeypatch.setattr("pathlib.Path.write_bytes", refuse)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_full_for_a_tensor_is_one_line_and_leaves_no_files(tmp_path, monkeypatch):
    message = r"cannot write .*model\.onnx\.data: No space left on device.*-o"
    with pytest.raises(ExportError, match=message), new_graph(tmp_path, opset=21) as graph:
        monkeypatch.setattr(graph._file, "_data", FullDisk(graph._file._data))
        graph.tensor("weight", BIG)
    assert list(tmp_path.iterdir()) == []


class FullDisk:
    """A data file on a disk that takes no more."""

    write = staticmethod(refuse)

    def __init__(self, file):
        self.tell, self.close = file.tell, file.close


def test_a_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ExportError, match="cannot write"),
        new_graph(tmp_path / "file", opset=21),
    ):
        pass
