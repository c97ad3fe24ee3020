"""The bundle that `run` makes where none is named."""

import sys

import pytest

from omnidraft_npu.commands import default_pair
from omnidraft_npu.errors import CheckpointError


def test_a_missing_package_is_told_before_anything_is_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr(default_pair, "fetch_model", lambda name, **_: fetched.append(name))
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(CheckpointError, match=r"pip install 'omnidraft-npu\[export\]'"):
        default_pair.default_bundle(None, accept_terms=True)
    assert not fetched
