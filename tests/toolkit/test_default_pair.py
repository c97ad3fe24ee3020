"""The bundle that `run` makes where none is named."""

import shutil
import sys

import pytest
from tiny_bundle import write_bundle

from omnidraft_npu.commands import default_pair
from omnidraft_npu.errors import CheckpointError, StoreError


def test_a_missing_package_is_told_before_anything_is_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr(default_pair, "fetch_model", lambda name, **_: fetched.append(name))
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(CheckpointError, match=r"pip install 'omnidraft-npu\[export\]'"):
        default_pair.default_bundle(None, accept_terms=True)
    assert not fetched


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Targets that a default bundle was made for; a tiny bundle stands in for each."""
    targets = []

    def make(bundle, target, accept_terms):
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir()
        write_bundle(bundle, eos=())
        targets.append(target)

    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr(default_pair, "_make", make)
    return targets


@pytest.fixture
def drafter(tmp_path, monkeypatch):
    """The weights of a drafter that stands in for the shipped one."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    monkeypatch.setattr(default_pair, "packaged_drafter", lambda name: folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"one")
    return weights


def test_a_default_bundle_is_made_once_for_each_target(made, drafter):
    bundles = [
        default_pair.default_bundle(target, accept_terms=False)
        for target in (None, "smollm2-135m", "gemma3-270m", None)
    ]
    assert made == ["smollm2-135m", "gemma3-270m"]
    assert bundles[0] == bundles[1] == bundles[3] != bundles[2]


def test_another_drafter_makes_another_bundle(made, drafter):
    before = default_pair.default_bundle(None, accept_terms=False)
    drafter.write_bytes(b"two")
    assert default_pair.default_bundle(None, accept_terms=False) != before
    assert made == ["smollm2-135m"] * 2


def test_an_installation_without_its_drafter_says_so(made, monkeypatch):
    monkeypatch.setattr(default_pair, "packaged_drafter", lambda name: None)
    with pytest.raises(StoreError, match="lacks the drafter omnidraft-tiny"):
        default_pair.default_bundle(None, accept_terms=False)
    assert not made
