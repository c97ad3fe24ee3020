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
