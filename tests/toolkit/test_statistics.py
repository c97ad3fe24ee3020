"""The metrics obey their definitions."""

import json
import time

import numpy as np
import pytest
from markov_model import MarkovModel
from toy_vocabularies import toy_encoder

from omnidraft_npu.bridge.following import IdentityBridge
from omnidraft_npu.bridge.walk import PlainWalk
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.speculative import Round, generate
from omnidraft_npu.statistics import DecodeStats
from omnidraft_npu.verification import Verdict

NAMES = [
    "rounds",
    "proposed",
    "accepted",
    "acceptance_rate",
    "conditional_acceptance",
    "mean_acceptance_length",
    "mean_draft_length",
    "bytes_per_target_forward",
    "speedup",
    "ttft_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "draft_share",
    "verify_share",
    "bridge_share",
    "round_s_p50",
    "round_s_p95",
    "peak_rss_bytes",
    "draft_provider",
    "target_provider",
    "by_proposer",
    "stops",
    "notice",
]


def one_round(
    token_ids, num_proposed, num_accepted, num_tested, seconds=1.0, source="model", stop=None
):
    return Round(
        verdict=Verdict(token_ids=token_ids, num_accepted=num_accepted, num_tested=num_tested),
        num_proposed=num_proposed,
        draft_model_s=0.25 * seconds,
        verify_s=0.6 * seconds,
        total_s=seconds,
        source=source,
        stop=stop,
    )


@pytest.fixture
def target(rng):
    return toy_encoder(rng, 10).vocabulary


def test_metrics_of_known_rounds(target):
    stats = DecodeStats(target, target_provider="cpu", draft_provider="npu")
    stats.record(one_round((3, 4, 5), 4, 2, 3))
    stats.record(one_round((6,), 4, 0, 1, seconds=2.0))
    stats.record(one_round((7, 8, 2), 2, 2, 2))
    shown = stats.to_json(speedup=1.5)
    expected = {
        "rounds": 3,
        "proposed": 10,
        "accepted": 4,
        "acceptance_rate": 0.4,
        "conditional_acceptance": 4 / 6,
        "mean_acceptance_length": 1 + 4 / 3,
        "bytes_per_target_forward": target.lengths[[3, 4, 5, 6, 7, 8]].sum() / 3,
        "speedup": 1.5,
        "decode_tokens_per_s": 7 / 4,
        "draft_share": 0.25,
        "verify_share": 0.6,
        "bridge_share": 0.15,
        "round_s_p50": 1.0,
        "draft_provider": "npu",
        "target_provider": "cpu",
    }
    assert {name: shown[name] for name in expected} == pytest.approx(expected)
    assert stats.acceptance_by_position == (2 / 3, 1.0, 0.0)


def test_names_are_exactly_those_that_scripts_rely_on(target):
    shown = DecodeStats(target, target_provider="cpu").to_json()
    assert list(shown) == NAMES
    json.dumps(shown)


def test_nothing_decoded_gives_no_numbers(target):
    stats = DecodeStats(target, target_provider="cpu")
    shown = stats.to_json()
    assert shown["rounds"] == shown["proposed"] == shown["accepted"] == 0
    counts = {"rounds", "proposed", "accepted", "by_proposer", "stops"}
    numbers = set(NAMES) - counts - {"peak_rss_bytes", "target_provider"}
    assert all(shown[name] is None for name in numbers)
    assert stats.summary() == "no tokens decoded"


def test_why_drafts_ended_is_counted_and_that_they_were_off_is_said(target):
    stats = DecodeStats(target, target_provider="cpu", draft_provider="cpu")
    stats.record(one_round((3, 4, 5), 4, 2, 3, stop="budget"))
    stats.record(one_round((6,), 1, 0, 1, stop="cost"))
    stats.record(one_round((6,), 0, 0, 0))
    assert stats.stops == {"budget": 1, "cost": 1}
    assert stats.notice is None
    assert stats.to_json()["mean_draft_length"] == pytest.approx(5 / 3)
    other = DecodeStats(target, target_provider="cpu", draft_provider="cpu")
    other.record(one_round((6,), 0, 0, 0, stop="off"))
    both = DecodeStats.sum([stats, other])
    assert both.to_json()["stops"] == {"budget": 1, "cost": 1, "off": 1}
    assert both.notice.startswith("drafting was off in 1 of 4 rounds")
    assert stats.stops == {"budget": 1, "cost": 1}  # a sum leaves its parts alone


@pytest.mark.parametrize("k", [1, 3, 8])
def test_identities_hold_for_real_rounds(target, rng, k):
    table = rng.normal(size=(target.size,) * 2)
    noisy = table + 0.5 * rng.normal(size=table.shape)
    proposer = ModelDrafter(MarkovModel(noisy), IdentityBridge(target.size), PlainWalk(target.size))
    stats = DecodeStats(target, target_provider="cpu", draft_provider="cpu")
    config = DecodeConfig(max_new_tokens=60, max_draft_tokens=k)
    rounds = list(stats.follow(generate(proposer, MarkovModel(table), [4, 5, 6], config), 2))
    shown = stats.to_json()

    assert stats.num_tokens == 60 == stats.accepted + stats.rounds
    assert shown["accepted"] == sum(r.verdict.num_accepted for r in rounds)
    assert shown["accepted"] <= stats.tested <= shown["proposed"] <= k * shown["rounds"]
    assert shown["mean_acceptance_length"] == pytest.approx(60 / shown["rounds"])
    assert shown["draft_share"] + shown["verify_share"] + shown["bridge_share"] == pytest.approx(1)
    assert shown["round_s_p50"] <= shown["round_s_p95"]
    assert shown["ttft_s"] >= rounds[0].total_s
    assert shown["prefill_tokens_per_s"] > 0
    assert shown["peak_rss_bytes"] > 1e6
    num_asked = sum(r.num_proposed > 0 for r in rounds)
    assert shown["stops"] == {"budget": num_asked}
    assert shown["mean_draft_length"] == pytest.approx(stats.proposed / shown["rounds"])
    assert f"{stats.accepted} of {stats.proposed} draft tokens accepted" in stats.summary()


def test_tokens_a_round_for_people_are_tokens_over_rounds(target):
    """A stop token among the drafts leaves no room for the target's own token."""
    stats = DecodeStats(target, target_provider="cpu", draft_provider="cpu")
    stats.record(one_round((3,) * 23, 23, 23, 23))
    assert stats.to_json()["mean_acceptance_length"] == 24.0
    assert "23 tokens, 23.0 tok/s, 23.00 tokens a round (" in stats.summary()


def test_several_responses_add_up(target, rng):
    table = rng.normal(size=(target.size,) * 2)
    stats = DecodeStats(target, target_provider="cpu")
    for _ in range(2):
        list(stats.follow(generate(None, MarkovModel(table), [4], DecodeConfig()), 0))
    assert stats.num_tokens == stats.rounds == 2 * 128
    assert stats.to_json()["mean_acceptance_length"] == 1.0
    assert stats.to_json()["acceptance_rate"] is None
    assert "without drafting" in stats.summary()


def test_what_comes_before_the_first_round_is_prefill(target):
    def rounds():
        time.sleep(0.05)
        yield one_round((3,), 0, 0, 0, seconds=0.02)

    stats = DecodeStats(target, target_provider="cpu")
    list(stats.follow(rounds(), 7))
    assert stats.prefill_s == pytest.approx(stats.first_token_s - 0.02)
    assert stats.to_json()["prefill_tokens_per_s"] == pytest.approx(7 / stats.prefill_s)
    assert stats.to_json()["ttft_s"] >= 0.05


def test_a_response_without_rounds_is_no_response(target):
    stats = DecodeStats(target, target_provider="cpu")
    assert list(stats.follow(iter([]), 3)) == []
    assert stats.to_json()["ttft_s"] is None
    assert np.isclose(stats.prefill_s, 0.0)


def test_who_proposed_what_was_accepted_is_told_apart(target):
    stats = DecodeStats(target, target_provider="cpu", draft_provider="npu")
    for one in (
        one_round((3, 4, 5), 4, 2, 3),
        one_round((3,), 0, 0, 0),  # proposed nothing: nobody's round
        one_round((3, 4), 4, 1, 2, source="lookup"),
        one_round((3,), 2, 0, 1, source="lookup"),
    ):
        stats.record(one)
    total = DecodeStats.sum([stats, stats])
    assert stats.to_json()["by_proposer"] == {
        "lookup": {"rounds": 2, "proposed": 6, "accepted": 1},
        "model": {"rounds": 1, "proposed": 4, "accepted": 2},
    }
    assert total.by_proposer["lookup"] == {"rounds": 4, "proposed": 12, "accepted": 2}
    assert stats.by_proposer["lookup"]["rounds"] == 2
    assert "3 of 10 draft tokens accepted, 1 of 6 by lookup, 2 of 4 by model" in stats.summary()


def test_lookup_alone_is_drafting_without_a_drafter(target):
    stats = DecodeStats(target, target_provider="cpu")
    stats.record(one_round((3, 4), 4, 1, 2, source="lookup"))
    assert "1 of 4 draft tokens accepted)" in stats.summary()
    assert "no drafter, target on cpu" in stats.summary()


def test_a_sum_is_what_one_would_have_counted_and_leaves_its_parts_alone(target):
    rounds = [
        one_round((3, 4, 5), 3, 2, 3, seconds=2.0),
        one_round((6,), 4, 0, 1, seconds=0.5, source="lookup"),
        one_round((7, 8, 3, 4, 5), 4, 4, 4),
    ]
    whole, *parts = (DecodeStats(target, target_provider="cpu") for _ in range(3))
    for stats, chosen in ((whole, rounds), (parts[0], rounds[:1]), (parts[1], rounds[1:])):
        assert len(list(stats.follow(iter(chosen), 7))) == len(chosen)
    whole.num_responses, whole.num_prefilled = 2, 14
    before = parts[0].to_json()
    total = DecodeStats.sum(parts)
    timed = {"ttft_s", "prefill_tokens_per_s", "peak_rss_bytes"}
    for name, value in whole.to_json().items():
        if name not in timed:
            approximate = pytest.approx(value) if isinstance(value, float) else value
            assert total.to_json()[name] == approximate, name
    assert total.num_responses == 2
    assert total.num_prefilled == 14
    assert total.acceptance_by_position == whole.acceptance_by_position == (2 / 3, 1.0, 0.5, 1.0)
    assert parts[0].to_json() == before | {"peak_rss_bytes": parts[0].to_json()["peak_rss_bytes"]}
    assert parts[0].acceptance_by_position == (1.0, 1.0, 0.0)


def test_a_machine_without_exact_passes_is_named_in_the_notice(target):
    assert DecodeStats(target, target_provider="cpu").notice is None
    stats = DecodeStats(target, target_provider="cpu", has_near_ties=True)
    assert stats.notice == "drafted text is exact but for near-ties on this machine"
