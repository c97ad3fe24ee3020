"""The target's law is Hugging Face's, option by option, and knows its context."""

import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from markov_model import MarkovModel

from omnidraft_npu.bridge.following import IdentityBridge
from omnidraft_npu.bridge.walk import PlainWalk
from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.lookup import PromptLookup
from omnidraft_npu.sampling import TargetLaw, near_law, to_weights, token_law
from omnidraft_npu.speculative import generate
from omnidraft_npu.token_law import sample

OPTIONS = [
    {},
    {"top_k": 7},
    {"top_k": 4000},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"top_k": 50, "top_p": 0.7, "min_p": 0.05, "repetition_penalty": 1.2},
]


def reference(logits, context, temperature, *, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1):
    """Hugging Face's processors in the order in which its `generate` applies them."""
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers").generation.logits_process
    chain = [processors.RepetitionPenaltyLogitsProcessor(float(repetition_penalty))]
    chain.append(processors.TemperatureLogitsWarper(temperature))
    if top_k:
        chain.append(processors.TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(processors.TopPLogitsWarper(top_p))
    if min_p:
        chain.append(processors.MinPLogitsWarper(min_p))
    scores, ids = torch.tensor(logits[None]), torch.tensor([context])
    for processor in chain:
        scores = processor(ids, scores)
    return torch.softmax(scores[0].double(), -1).numpy()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("vocab", "spread"), [(60, 2.0), (5000, 1.0), (5000, 6.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rows_have_the_law_of_hugging_face(rng, options, vocab, spread, temperature):
    logits = (rng.normal(size=(4, vocab)) * spread).astype(np.float32)
    context, drafts = rng.integers(0, vocab, 30).tolist(), rng.integers(0, vocab, 3).tolist()
    law = TargetLaw(SamplingConfig(temperature=temperature, **options), context[:20])
    law.observe(context[20:])
    rows = law.rows(logits, drafts)
    for i in range(4):
        weights = rows.weights(i).astype(np.float64)
        expected = reference(logits[i], context + drafts[:i], temperature, **options)
        np.testing.assert_allclose(weights / weights.sum(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [1, 2, 4]),  # equal to the second
        ({"top_p": 0.5}, [1, 2]),  # of equal ones the lowest ids
        ({"top_p": 1e-9}, [1]),
        ({"top_k": 1, "top_p": 0.1}, [1]),
        ({"min_p": 1.0}, [1, 2, 4]),
    ],
)
def test_ties_go_to_the_lowest_ids(options, kept):
    logits = np.array([[-9, 3, 3, -9, 3]], np.float32)
    law = TargetLaw(SamplingConfig(temperature=1.0, **options), ())
    weights = law.rows(logits, ()).weights(0)
    assert np.flatnonzero(weights).tolist() == kept
    assert law.rows(logits, ()).choice(0) == 1


LAWS = {
    "flat": lambda rng, size: rng.normal(size=size),
    "equal": lambda rng, size: np.zeros(size),
    "a few values": lambda rng, size: np.round(rng.normal(size=size)),
    "by falling id": lambda rng, size: np.sort(3 * rng.normal(size=size))[::-1],
    "a few likely ones": lambda rng, size: rng.normal(size=size) + 12 * (rng.random(size) < 1e-3),
    "few left": lambda rng, size: np.where(rng.random(size) < 1e-3, 0, -np.inf),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 1 - 1e-9])
def test_top_p_of_large_vocabularies_is_what_sorting_gives(rng, law, top_p):
    logits = LAWS[law](rng, 40_001).astype(np.float32)
    weights = np.exp(logits - logits.max())
    falling = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[falling], dtype=np.float64)
    num_kept = int((sums < top_p * sums[-1]).sum()) + 1
    found = token_law(logits, SamplingConfig(temperature=1.0, top_p=top_p))
    kept = set(np.flatnonzero(found.dense).tolist())
    expected = set(falling[:num_kept].tolist())
    # Sums in float32 are off by a millionth.
    assert abs(weights[list(kept)].sum() - weights[list(expected)].sum()) < 3e-6 * sums[-1]
    dropped = set(range(len(weights))) - kept
    assert weights[list(kept)].min() >= max(weights[list(dropped)], default=0)
    if law == "equal":
        assert kept == set(range(len(kept)))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("shift", [0.0, -500.0, 500.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 50},
        {"top_k": 9000},
        {"top_k": 100_000},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
def test_laws_of_few_likely_tokens_are_those_of_looking_at_all(
    rng, law, temperature, shift, options
):
    logits = LAWS[law](rng, 40_001).astype(np.float32) + np.float32(shift)
    config = SamplingConfig(temperature=temperature, **options)
    found, expected = token_law(logits, config), to_weights(logits, config)
    assert (found.ids is None) == (not options)
    np.testing.assert_array_equal(found.dense > 0, expected > 0)
    scale = found.total / expected.sum(dtype=np.float64)
    np.testing.assert_allclose(found.dense, expected * scale, rtol=1e-4, atol=0)


def test_rows_and_drafts_must_belong_together():
    law = TargetLaw(SamplingConfig(), ())
    with pytest.raises(ValueError, match="2 drafts need 3 rows of logits, got 2"):
        law.rows(np.zeros((2, 4), np.float32), (1, 2))


@pytest.mark.parametrize("size", [1, 5, 3000, 5000])
def test_samples_are_drawn_by_weight_and_never_of_none(rng, size):
    weights = rng.random(size).astype(np.float32) ** 4
    weights[rng.random(size) < 0.5] = 0
    weights[size // 2] = weights.sum() / 2 + 1
    drawn = np.bincount([sample(weights, rng) for _ in range(4000)], minlength=size)
    assert not drawn[weights == 0].any()
    share = weights[size // 2] / weights.sum()
    assert abs(drawn[size // 2] / 4000 - share) < 5 * np.sqrt(share * (1 - share) / 4000) + 1e-9


class _Highest:
    """The largest number that a generator gives."""

    def random(self):
        return 1 - 2**-53


@pytest.mark.parametrize("size", [4, 5000])
def test_the_end_of_the_range_is_not_left(size):
    weights = np.zeros(size, np.float32)
    weights[:3] = [0.1, 0.7, 0.2]
    assert sample(weights, _Highest()) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"temperature": -0.1},
            r"temperature is -0.1, must be 0 or more, and finite: use --temperature",
        ),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1, must not be negative: use --top-k 0"),
        ({"top_p": 0.0}, "top_p is 0.0, must be above 0 and at most 1: use --top-p 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1, must be from 0 to 1: use --min-p 0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, must be from 0.001 to 1000: use"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40, must be from 0.001 to"),
        ({"repetition_penalty": 1e38}, "repetition_penalty is 1e\\+38, must be from 0.001 to"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan, must be from"),
        ({"seed": -1}, "seed is -1, must not be negative"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**options)


def decode(proposer, target, prompt, k, **options):
    target.rewind(0)
    config = DecodeConfig(max_new_tokens=40, max_draft_tokens=k, sampling=SamplingConfig(**options))
    rounds = list(generate(proposer, target, prompt, config))
    return [i for r in rounds for i in r.verdict.token_ids], rounds


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 8))
def test_greedy_drafted_text_equals_plain_text_under_a_repetition_penalty(seed, k):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(20, 20))
    target = MarkovModel(table, history=2)
    drafter = MarkovModel(table + 0.3 * rng.normal(size=(20, 20)), history=2)
    prompt = rng.integers(0, 20, 5).tolist()
    plain, _ = decode(None, target, prompt, k, repetition_penalty=1.5)
    without, _ = decode(None, target, prompt, k)
    assume(plain != without)
    model = ModelDrafter(drafter, IdentityBridge(20), PlainWalk(20))
    for proposer in (model, PromptLookup(min_ngram=1)):
        drafted, _ = decode(proposer, target, prompt, k, repetition_penalty=1.5)
        assert drafted == plain


LEAVING_OUT = [
    {},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 1e-300},
    {"min_p": 5e-324},
    {"min_p": 1.0},
]
WAYS = {
    "to_weights": to_weights,
    "near_law": lambda logits, config: near_law(logits, config).dense,
    "token_law": lambda logits, config: token_law(logits, config).dense,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("law", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("options", LEAVING_OUT, ids=str)
@pytest.mark.parametrize("offset", [0.0, -1e4, 1e4])
def test_the_law_of_an_extreme_temperature_is_its_limit(rng, law, options, offset):
    """Below 2.9e-39 all was NaN: the inverse of the temperature is past single precision."""
    logits = (10 * rng.standard_normal(300) + offset).astype(np.float32)
    logits[[3, 5]] = -np.inf
    likeliest = np.zeros(300)
    likeliest[logits.argmax()] = 1
    for temperature in (5e-324, 1e-300, 2.9e-39, 1e-30, 1e-9):
        weights = law(logits, SamplingConfig(temperature=temperature, **options))
        np.testing.assert_array_equal(weights / weights.sum(), likeliest)
    if not options:
        for temperature in (1e20, 1e38, 1e300):
            weights = law(logits, SamplingConfig(temperature=temperature))
            np.testing.assert_allclose(weights, np.isfinite(logits), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 4])
def test_text_drawn_at_a_temperature_near_0_is_the_greedy_text(rng, k):
    table = rng.normal(size=(20, 20))
    target, drafter = MarkovModel(table), MarkovModel(table + rng.normal(size=(20, 20)))
    proposer = ModelDrafter(drafter, IdentityBridge(20), PlainWalk(20))
    greedy, _ = decode(None, target, [3], k)
    for temperature in (1e-40, 5e-324):
        drawn, _ = decode(proposer, target, [3], k, temperature=temperature, seed=1)
        assert drawn == greedy


def test_a_seed_fixes_the_text_and_no_seed_does_not(rng):
    table = rng.normal(size=(20, 20))
    target, drafter = MarkovModel(table), MarkovModel(table + rng.normal(size=(20, 20)))
    proposer = ModelDrafter(drafter, IdentityBridge(20), PlainWalk(20))
    texts = [decode(proposer, target, [3], 4, temperature=1.0, seed=s)[0] for s in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    assert (
        decode(proposer, target, [3], 4, temperature=1.0)[0]
        != decode(proposer, target, [3], 4, temperature=1.0)[0]
    )


def test_greedy_decoding_draws_no_random_number(rng, monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", None)
    table = rng.normal(size=(20, 20))
    decode(
        ModelDrafter(MarkovModel(table), IdentityBridge(20), PlainWalk(20)),
        MarkovModel(table),
        [3],
        4,
        top_k=3,
        top_p=0.5,
        seed=1,
    )


def test_a_drafter_equal_to_the_target_is_hardly_ever_rejected(rng):
    table = rng.normal(size=(20, 20))
    proposer = ModelDrafter(MarkovModel(table, history=2), IdentityBridge(20), PlainWalk(20))
    target = MarkovModel(table, history=2)
    _, rounds = decode(proposer, target, [3], 4, temperature=1.0, seed=0)
    assert all(r.verdict.num_accepted == r.num_proposed for r in rounds)


@pytest.mark.slow
def test_nine_rows_of_a_large_vocabulary_take_two_milliseconds(rng):
    logits = rng.normal(size=(9, 152_000)).astype(np.float32)
    law = TargetLaw(SamplingConfig(temperature=0.8), ())
    times = []
    for _ in range(30):
        start = time.perf_counter()
        rows = law.rows(logits, range(8))
        for i in range(9):
            rows.weights(i)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.002
