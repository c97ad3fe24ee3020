"""Adapter versions: added whole, chosen, rolled back, and safe against damage and crashes."""

import json

import numpy as np
import onnxruntime as ort
import pytest

from omnidraft_npu.errors import BundleError
from omnidraft_npu.lora import lora_name
from omnidraft_npu.runtime.adapter_store import BASE, AdapterKey, AdapterStore

KEY = AdapterKey(drafter_sha256="d" * 64, target_tokenizer_sha256="t" * 64, rank=2)


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
    assert store.add(tensors(2), parent=1).version == 3


def test_an_unreadable_choice_is_said_and_the_newest_version_used(store, caplog):
    store.add(tensors(), parent=BASE)
    (store.folder / "current.json").write_text("[]")
    assert store.current == 1
    assert "current.json" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [("drafter_sha256", "x" * 64), ("target_tokenizer_sha256", "x"), ("rank", 8)],
)
def test_an_adapter_for_something_else_is_refused_by_name(store, field, value):
    store.add(tensors(), parent=BASE)
    other = AdapterStore(store.folder, AdapterKey(**{**vars(KEY), field: value}))
    with pytest.raises(BundleError, match=field):
        other.use(1)
    assert store.current == BASE


def test_values_that_are_no_numbers_are_never_used(store):
    bad = tensors()
    bad[lora_name(0, "q_proj", "A")][0, 0] = np.nan
    store.add(bad, parent=BASE)
    with pytest.raises(BundleError, match="no numbers"):
        store.use(1)


def test_a_full_disk_leaves_all_as_it_was(store, monkeypatch):
    store.add(tensors(), parent=BASE)
    store.use(1)

    def fail(path, _):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("omnidraft_npu.runtime.adapter_store.write_adapter", fail)
    with pytest.raises(OSError, match="No space"):
        store.add(tensors(1), parent=1)
    assert store.current == 1
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "current.json",
        "v0001.json",
        "v0001.onnx_adapter",
    ]


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
    assert "novelty" in caplog.text
