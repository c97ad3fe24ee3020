"""AdamW in numpy against torch's."""

import numpy as np
import pytest

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.runtime.adamw import AdamW, AdamWConfig


def tensors(rng):
    return {
        "a": rng.normal(size=(5, 3)).astype(np.float32),
        "b": rng.normal(size=(3, 7)).astype(np.float32),
    }


def test_many_steps_are_those_of_torch(rng):
    import torch

    start = tensors(rng)
    ours = AdamW(start, AdamWConfig(learning_rate=0.02, weight_decay=0.1, max_norm=2.0))
    theirs = {name: torch.nn.Parameter(torch.from_numpy(t.copy())) for name, t in start.items()}
    optimizer = torch.optim.AdamW(theirs.values(), lr=0.02, betas=(0.9, 0.999), weight_decay=0.1)
    for _ in range(40):
        gradients = tensors(rng)
        for name, parameter in theirs.items():
            parameter.grad = torch.from_numpy(gradients[name].copy())
        expected = torch.nn.utils.clip_grad_norm_(theirs.values(), 2.0)
        optimizer.step()
        assert ours.step(gradients) == pytest.approx(float(expected), rel=1e-5)
    for name, parameter in theirs.items():
        np.testing.assert_allclose(ours.tensors[name], parameter.detach().numpy(), atol=2e-6)


def test_what_is_used_is_the_average_of_the_latest_steps(rng):
    optimizer = AdamW(tensors(rng), AdamWConfig(learning_rate=0.5, averaging=0.8))
    expected = optimizer.tensors["a"].astype(np.float64)
    for number in range(1, 60):
        optimizer.step(tensors(rng))
        stays = min(0.8, number / (number + 10))
        expected = stays * expected + (1 - stays) * optimizer.tensors["a"]
    np.testing.assert_allclose(optimizer.average["a"], expected, rtol=1e-4)
    assert np.abs(optimizer.average["a"] - optimizer.tensors["a"]).max() > 0.1


def test_without_averaging_the_latest_step_alone_is_used(rng):
    optimizer = AdamW(tensors(rng), AdamWConfig(learning_rate=0.5))
    for _ in range(3):
        optimizer.step(tensors(rng))
    np.testing.assert_array_equal(optimizer.average["b"], optimizer.tensors["b"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_no_number_changes_nothing(rng, bad):
    optimizer = AdamW(tensors(rng), AdamWConfig())
    optimizer.step(tensors(rng))
    before = {name: tensor.copy() for name, tensor in optimizer.tensors.items()}
    gradients = tensors(rng)
    gradients["b"][1, 2] = bad
    assert optimizer.step(gradients) is None
    assert optimizer.num_steps == 1
    for name, tensor in before.items():
        np.testing.assert_array_equal(optimizer.tensors[name], tensor)


def test_the_rate_rises_over_the_first_steps(rng):
    start, gradients = tensors(rng), tensors(rng)
    steps = []
    for warmup_steps in (0, 3):
        optimizer = AdamW(start, AdamWConfig(learning_rate=0.01, warmup_steps=warmup_steps))
        optimizer.step(gradients)
        steps.append(np.abs(optimizer.tensors["a"] - start["a"]).max())
    assert steps[1] == pytest.approx(steps[0] / 4, rel=1e-3)


def test_what_is_changed_is_a_copy(rng):
    start = tensors(rng)
    kept = {name: tensor.copy() for name, tensor in start.items()}
    AdamW(start, AdamWConfig()).step(tensors(rng))
    for name, tensor in kept.items():
        np.testing.assert_array_equal(start[name], tensor)


@pytest.mark.parametrize("settings", [{"learning_rate": 0.0}, {"max_norm": -1.0}])
def test_a_setting_that_cannot_be_is_named(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        AdamWConfig(**settings)
