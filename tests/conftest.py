"""Fixtures for all tests."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

# How long an example takes says more about what else the machine does.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")

HOST_ONLY = {"accelerate", "matplotlib", "onnxscript", "peft", "torch", "transformers"}
"""Packages that `.ci/arm64` does not install."""


@contextlib.contextmanager
def _skips_without_torch() -> Iterator[None]:
    """Skip what needs torch where there is none on purpose, as under `.ci/arm64`."""
    try:
        yield
    except ModuleNotFoundError as error:
        is_missing = (error.name or "").partition(".")[0] in HOST_ONLY
        if "OMNIDRAFT_TEST_TORCH" not in os.environ or not is_missing:
            raise
        pytest.skip(f"needs {error.name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _skips_without_torch():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _skips_without_torch():
        return (yield)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="session", autouse=True)
def exact_rules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what is found of passing test graphs out of the user's store."""
    from omnidraft_npu.runtime import exact_search

    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_search, "store_folder", lambda: folder)
        yield


@pytest.fixture(scope="session")
def learning_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose drafter can learn, see `learning_bundle`; nothing may be written to it."""
    from learning_bundle import write_learning_bundle

    return write_learning_bundle(tmp_path_factory.mktemp("learning"))


@pytest.fixture
def learning_copy(learning_original: Path, tmp_path: Path) -> Path:
    """The same, to learn in."""
    return shutil.copytree(learning_original, tmp_path / "bundle")
