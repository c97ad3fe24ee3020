"""The acceptance head: its formula, its gradients, and what it says after training."""

import numpy as np
import pytest

from omnidraft_npu.acceptance_head import (
    NAMES,
    REJECTION_WEIGHT,
    WIDTH,
    AcceptanceHead,
    head_shapes,
)
from omnidraft_npu.errors import BundleError
from omnidraft_npu.runtime.head_trainer import train_head

HIDDEN = 12


@pytest.fixture
def head(rng):
    shapes = head_shapes(HIDDEN)
    return AcceptanceHead(
        tensors={n: rng.normal(0, 0.3, s).astype(np.float32) for n, s in shapes.items()}
    )


def test_the_head_is_a_layer_of_silu_and_a_sum(head, rng):
    hidden = rng.normal(size=HIDDEN).astype(np.float32)
    into, bias, out, last = (head.tensors[name] for name in NAMES)
    inner = np.array([hidden @ into[:, i] + bias[i] for i in range(WIDTH)])
    expected = (inner / (1 + np.exp(-inner))) @ out + last
    assert head.logits(hidden) == pytest.approx(expected[0], rel=1e-5)
    assert head.logits(hidden[None]).shape == (1,)


def test_probabilities_take_back_the_weight_of_rejections(head, rng):
    """Rejections counted 6 times make the odds of the weighted loss's best answer 6 times less."""
    hidden = rng.normal(size=(5, HIDDEN)).astype(np.float32)
    odds = np.exp(head.logits(hidden)) * REJECTION_WEIGHT
    np.testing.assert_allclose(head.probabilities(hidden), odds / (1 + odds), rtol=1e-5)


def test_gradients_are_those_of_finite_differences(head, rng):
    hidden = rng.normal(size=(7, HIDDEN)).astype(np.float32)
    labels = rng.random(7).astype(np.float32)
    loss, gradients = head.loss_and_gradients(hidden, labels)
    logits = head.logits(hidden).astype(np.float64)
    said = 1 / (1 + np.exp(-logits))
    cross = -labels * np.log(said) - 6 * (1 - labels) * np.log(1 - said)
    assert loss == pytest.approx(cross.mean(), rel=1e-5)
    exact = {n: t.astype(np.float64) for n, t in head.tensors.items()}
    for name, tensor in exact.items():
        assert gradients[name].shape == tensor.shape
        for at in [tuple(rng.integers(0, n) for n in tensor.shape) for _ in range(4)]:
            losses = []
            for step in (1e-5, -1e-5):
                moved = tensor.copy()
                moved[at] += step
                changed = AcceptanceHead(tensors={**exact, name: moved})
                losses.append(changed.loss_and_gradients(hidden.astype(np.float64), labels)[0])
            slope = (losses[0] - losses[1]) / 2e-5
            assert gradients[name][at] == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_a_trained_head_expects_as_many_acceptances_as_there_are(rng):
    """Also group by group of what it says, though its loss counts rejections 6 times."""
    hidden = rng.normal(size=(6000, HIDDEN)).astype(np.float32)
    truth = 1 / (1 + np.exp(-1.5 * hidden[:, 0] - hidden[:, 1] * hidden[:, 2]))
    accepted = (rng.random(6000) < truth).astype(np.float32)
    head = AcceptanceHead.fresh(HIDDEN, rng)
    np.testing.assert_allclose(head.probabilities(hidden), 0.5, rtol=1e-6)
    trained = train_head(head, hidden[:5000], accepted[:5000], rng)
    said, found = trained.probabilities(hidden[5000:]), accepted[5000:]
    assert said.mean() == pytest.approx(found.mean(), abs=0.04)
    for low, high in ((0.0, 0.35), (0.35, 0.65), (0.65, 1.0)):
        group = (said >= low) & (said < high)
        assert said[group].mean() == pytest.approx(found[group].mean(), abs=0.08)
    assert np.abs(said - truth[5000:]).mean() < 0.12
    np.testing.assert_allclose(head.probabilities(hidden), 0.5, rtol=1e-6)  # it is another one


def test_soft_labels_teach_the_same_as_many_draws(rng):
    hidden = rng.normal(size=(3000, HIDDEN)).astype(np.float32)
    truth = (1 / (1 + np.exp(-2 * hidden[:, 0]))).astype(np.float32)
    trained = train_head(AcceptanceHead.fresh(HIDDEN, rng), hidden, truth, rng)
    assert np.abs(trained.probabilities(hidden) - truth).mean() < 0.05


def test_training_is_determined_by_its_seed(rng):
    hidden = rng.normal(size=(300, HIDDEN)).astype(np.float32)
    labels = (hidden[:, 0] > 0).astype(np.float32)
    start = AcceptanceHead.fresh(HIDDEN, rng)
    first, second = (
        train_head(start, hidden, labels, np.random.default_rng(1)).tensors for _ in range(2)
    )
    for name in NAMES:
        np.testing.assert_array_equal(first[name], second[name])


def test_a_head_is_found_among_the_tensors_of_an_adapter(head):
    lora = {"lora.layers.0.q_proj.A": np.zeros((3, 2), np.float32)}
    assert AcceptanceHead.from_tensors(lora) is None
    found = AcceptanceHead.from_tensors({**lora, **head.tensors})
    assert found.tensors.keys() == set(NAMES)
    assert found.hidden_size == HIDDEN


@pytest.mark.parametrize("broken", ["missing", "shape", "other"])
def test_a_damaged_head_is_said(head, broken):
    tensors = dict(head.tensors)
    if broken == "missing":
        del tensors["head.out.bias"]
    elif broken == "shape":
        tensors["head.in.bias"] = np.zeros(3, np.float32)
    else:
        tensors["head.more"] = np.zeros(1, np.float32)
    with pytest.raises(BundleError, match="acceptance head"):
        AcceptanceHead.from_tensors(tensors)
