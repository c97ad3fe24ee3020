"""Fixtures for the tests of graphs."""

import pytest
from reference_models import reference_model


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A reference model by variant and overrides, made once."""
    made = {}

    def get(variant, **overrides):
        key = (variant, *overrides.items())
        if key not in made:
            made[key] = reference_model(tmp_path_factory.mktemp(variant), variant, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="module")
def one_thread():
    """Torch on one thread: tiny products take longer on several, by far so on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
