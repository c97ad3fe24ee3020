"""Fixtures for all tests."""

import shutil
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="session")
def learning_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose drafter can learn, see `learning_bundle`; nothing may be written to it."""
    from learning_bundle import write_learning_bundle

    return write_learning_bundle(tmp_path_factory.mktemp("learning"))


@pytest.fixture
def learning_copy(learning_original: Path, tmp_path: Path) -> Path:
    """The same, to learn in."""
    return shutil.copytree(learning_original, tmp_path / "bundle")
