"""Adapter versions: added whole, chosen, rolled back, and safe against damage and crashes."""

import json

import numpy as np
import onnxruntime as ort
import pytest

from omnidraft_npu.errors import BundleError
from omnidraft_npu.lora import lora_name
from omnidraft_npu.runtime.adapter_files import AdapterKey, read_adapter, write_adapter
from omnidraft_npu.runtime.adapter_store import BASE, AdapterStore

KEY = AdapterKey(drafter_sha256="d" * 64, target_tokenizer_sha256="t" * 64, rank=2)


A = lora_name(0, "q_proj", "A")


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return {
        lora_name(0, "q_proj", "A"): rng.normal(size=(8, 2)).astype(np.float32),
        lora_name(0, "q_proj", "B"): rng.normal(size=(2, 8)).astype(np.float32),
    }


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "adapters" / "target", KEY)


def test_a_version_comes_back_bit_for_bit_with_what_is_known_of_it(store):
    given = tensors()
    added = store.add(given, parent=BASE, num_examples=8, acceptance_before=0.25)
    again = AdapterStore(store.folder, KEY)
    assert again.records() == [added]
    assert (added.version, added.parent, added.num_examples) == (1, BASE, 8)
    read = again.load(1)
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        np.testing.assert_array_equal(read[name], tensor)


def test_onnxruntime_itself_reads_what_is_written(store):
    store.add(tensors(), parent=BASE)
    parameters = ort.AdapterFormat.read_adapter(str(store.path(1))).get_parameters()
    assert parameters.keys() == tensors().keys()


def test_the_base_is_in_use_until_a_version_is_chosen(store):
    assert (store.current, store.load(BASE)) == (BASE, {})
    store.add(tensors(), parent=BASE)
    assert store.current == BASE
    store.use(1)
    assert AdapterStore(store.folder, KEY).current == 1


def test_going_back_keeps_the_newer_version(store):
    store.add(tensors(0), parent=BASE)
    store.add(tensors(1), parent=1)
    store.use(2)
    store.use(store.record(2).parent)
    assert store.current == 1
    assert [record.version for record in store.records()] == [1, 2]
    assert store.add(tensors(2), parent=1).version == 3


@pytest.mark.parametrize("damage", ["adapter", "record", "gone"])
def test_a_damaged_version_is_said_and_the_one_before_it_used(store, caplog, damage):
    store.add(tensors(0), parent=BASE)
    store.add(tensors(1), parent=1)
    store.use(2)
    if damage == "adapter":
        data = bytearray(store.path(2).read_bytes())
        data[-3] ^= 1
        store.path(2).write_bytes(data)
    elif damage == "record":
        (store.folder / "v0002.json").write_text("{")
    else:
        store.path(2).unlink()
    assert store.current == 1
    assert "v0002" in caplog.text
    with pytest.raises(BundleError, match="v0002"):
        store.load(2)


def test_a_version_whose_record_was_not_written_yet_is_not_there(store):
    store.add(tensors(0), parent=BASE)
    store.add(tensors(1), parent=1)
    (store.folder / "v0002.json").unlink()
    assert [record.version for record in store.records()] == [1]
    assert store.add(tensors(2), parent=1).version == 2
    assert store.load(2)[A].sum() == tensors(2)[A].sum()


def test_an_unreadable_choice_is_said_and_the_newest_version_that_helps_used(store, caplog):
    store.add(tensors(), parent=BASE)
    store.add(tensors(1), parent=1, acceptance_before=0.5, acceptance_after=0.4)
    (store.folder / "current.json").write_text("[]")
    assert store.current == 1
    assert "current.json" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [("drafter_sha256", "x" * 64), ("target_tokenizer_sha256", "x"), ("rank", 8)],
)
def test_an_adapter_for_something_else_is_refused_by_name(store, caplog, field, value):
    store.add(tensors(), parent=BASE)
    store.use(1)
    other = AdapterStore(store.folder, AdapterKey(**{**vars(KEY), field: value}))
    words = f"another {field.removesuffix('_sha256').replace('_', ' ')} "
    with pytest.raises(BundleError, match=words):
        other.use(1)
    assert other.current == BASE
    assert words in caplog.text
    assert store.current == 1


def test_versions_for_another_rank_are_said_once_and_new_ones_go_on_beside_them(store, caplog):
    """Each told to roll back, though there was none to roll back to."""
    for parent in range(3):
        store.add(tensors(), parent=parent)
    store.use(3)
    wider = AdapterStore(store.folder, AdapterKey(**{**vars(KEY), "rank": 4}))
    assert wider.current == BASE
    (told,) = caplog.messages
    assert told == (
        "adapter v0003 was made for another rank (2, here 4): "
        "the drafter is used as it was exported until it has learned again"
    )
    given = {n: np.ones(tuple(4 if k == 2 else k for k in t.shape)) for n, t in tensors().items()}
    wider.use(wider.add(given, parent=wider.current).version)
    caplog.clear()
    assert wider.current == 4
    assert not caplog.messages
    assert store.current == BASE
    assert caplog.messages[0].endswith("or until you roll back to v0003, which fits")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drafter_sha256": "x" * 64}, "another drafter"),
        ({"target_tokenizer_sha256": "x"}, "another target tokenizer"),
    ],
)
def test_a_file_says_what_it_was_made_for(tmp_path, change, words):
    write_adapter(tmp_path / "x.onnx_adapter", tensors(), AdapterKey(**{**vars(KEY), **change}))
    with pytest.raises(BundleError, match=words):
        read_adapter(tmp_path / "x.onnx_adapter", KEY)


def test_a_file_of_another_tool_that_says_nothing_is_read(tmp_path):
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    value = ort.OrtValue.ortvalue_from_numpy(tensors()[A])
    adapter.set_parameters({A: value})
    adapter.export_adapter(str(tmp_path / "x.onnx_adapter"))
    np.testing.assert_array_equal(read_adapter(tmp_path / "x.onnx_adapter", KEY)[A], tensors()[A])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_neither_kept_nor_read(store, value):
    bad = tensors()
    bad[A][0, 0] = value
    with pytest.raises(BundleError, match="no numbers"):
        store.add(bad, parent=BASE)
    assert not store.folder.exists()
    write_adapter(store.folder.parent.parent / "x.onnx_adapter", bad, KEY)
    with pytest.raises(BundleError, match="no numbers"):
        read_adapter(store.folder.parent.parent / "x.onnx_adapter", KEY)


def test_the_acceptance_head_rides_in_the_same_file(store):
    head = {
        "head.in.weight": np.ones((8, 64), np.float32),
        "head.out.bias": np.full(1, -0.5, np.float32),
    }
    store.add(tensors() | head, parent=BASE)
    read = store.load(1)
    assert read.keys() == tensors().keys() | head.keys()
    np.testing.assert_array_equal(read["head.out.bias"], [-0.5])


def test_what_is_in_use_falls_back_to_an_ancestor_not_to_a_sibling(store):
    """Version 3 was tried and rolled back: it must not come back where 4 is damaged."""
    for seed, parent in ((0, BASE), (1, 1), (2, 2), (3, 2)):
        store.add(tensors(seed), parent=parent)
    store.use(4)
    store.path(4).write_bytes(b"")
    assert store.current == 2
    store.path(2).unlink()
    assert store.current == 1


def test_the_oldest_versions_go_where_the_bytes_would_not_suffice(store):
    size = store.path(store.add(tensors(), parent=BASE).version).stat().st_size
    small = AdapterStore(store.folder, KEY, max_bytes=4 * size)
    small.use(1)
    for seed in range(1, 7):
        small.add(tensors(seed), parent=1)
    assert [record.version for record in small.records()] == [1, 5, 6, 7]
    assert len(list(store.folder.glob("*.onnx_adapter"))) == 4
    assert small.current == 1


def test_forgetting_leaves_nothing(store):
    store.add(tensors(), parent=BASE)
    store.use(1)
    (store.folder / ".v0002.onnx_adapter.x.tmp").write_bytes(b"half")
    assert store.forget() == 1
    assert not list(store.folder.iterdir())
    assert store.current == BASE


def test_a_version_that_is_not_there_names_those_that_are(store):
    store.add(tensors(), parent=BASE)
    with pytest.raises(BundleError, match=r"v0007.*v0001"):
        store.load(7)


def test_a_newer_record_is_passed_over(store, caplog):
    store.add(tensors(), parent=BASE)
    path = store.folder / "v0001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"novelty": 1}))
    assert store.records() == []
    assert "another version wrote it" in caplog.text


@pytest.mark.parametrize("name", ["current.json", "v0002.json"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "7",
        "{}",
        '{"version": null}',
        '{"version": "two"}',
        '{"version": 1e999}',
        '{"version": -2}',
        '{"version": 2, "ancestors": 1}',
        '{"version": 2, "ancestors": ["x"]}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_document_that_is_none_of_ours_is_said_and_something_whole_used(
    store, caplog, name, text
):
    store.add(tensors(0), parent=BASE)
    store.add(tensors(1), parent=1)
    store.use(2)
    (store.folder / name).write_bytes(text.encode(errors="surrogateescape"))
    current = store.current
    assert current in ((2, BASE) if name == "current.json" else (1,))
    assert caplog.records
    store.load(current)
    assert store.add(tensors(2), parent=current).version == 3
    store.use(3)
    assert store.current == 3


def test_a_bit_that_flips_anywhere_in_a_version_makes_it_one_that_is_not_used(store, rng):
    store.add(tensors(0), parent=BASE)
    store.use(1)
    data = store.path(1).read_bytes()
    for at in rng.choice(len(data), 40, replace=False):
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(8))
        store.path(1).write_bytes(damaged)
        assert store.current == BASE
    store.path(1).write_bytes(data)
    assert store.current == 1


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path, rng):
    write_adapter(tmp_path / "x.onnx_adapter", tensors(), KEY)
    data = (tmp_path / "x.onnx_adapter").read_bytes()
    for length in rng.integers(0, len(data), 20):
        (tmp_path / "y.onnx_adapter").write_bytes(data[:length])
        with pytest.raises(BundleError, match="can be read"):
            read_adapter(tmp_path / "y.onnx_adapter", KEY)
