"""The projection: its formula, its published inputs, and that it never passes for a measurement."""

import pytest

from omnidraft_npu.chips.figures import figures_of, figures_source, require_figures
from omnidraft_npu.chips.table import all_chips, find_chip
from omnidraft_npu.cost_model import ChipSpeed, chip_speed, project
from omnidraft_npu.errors import ConfigError

X_ELITE = find_chip("x-elite")


def projected(acceptance=0.7, target_b=8.0, drafter_b=0.1, chip=X_ELITE, **options):
    return project(
        chip,
        acceptance_by_position=[acceptance] * 3,
        acceptance_after=acceptance,
        target_b=target_b,
        drafter_b=drafter_b,
        context_length=4096,
        **options,
    )


def speed(**options):
    fields = {"overhead_ms": 10.0, "ms_per_b": 5.0, "prefill_cost": 2.0}
    given = {"device": "d", "runtime": "r", "context_length": 1, "num_models": 3, "smallest_b": 1.0}
    return ChipSpeed(**given, **fields | options)


def test_a_pass_costs_what_is_published_at_both_ends_and_a_line_between():
    assert speed().verify_cost(1) == 1
    assert speed().verify_cost(128) == 2
    assert speed().verify_cost(8) == pytest.approx(1.055, abs=1e-3)
    assert speed().verify_cost(32) == pytest.approx(1.244, abs=1e-3)
    assert speed().one_token_ms(2) == 20


def test_the_best_draft_length_is_the_best_of_all():
    """Against the formula, written out for every k."""
    found = projected(acceptance=0.7)
    for row in found.lengths:
        for best, draft_ms in (
            (row.best, found.draft_step_ms),
            (row.best_without_overhead, found.draft_step_without_overhead_ms),
        ):
            speedups = {
                k: sum(0.7**i for i in range(k + 1))
                / (row.verify_cost + k * draft_ms / found.target_step_ms)
                for k in range(1, row.verify_length)
            }
            assert best.speedup == pytest.approx(max(speedups.values()))
            assert speedups[best.draft_tokens] == pytest.approx(best.speedup)


def test_a_draft_is_never_longer_than_its_verify_graph_takes():
    """Drafting next to a target this large costs nothing, so the longest draft is the best."""
    for row in projected(acceptance=0.99, target_b=1000.0).lengths:
        assert row.best.draft_tokens == row.best_without_overhead.draft_tokens
        assert row.best.draft_tokens == row.verify_length - 1


def test_positions_that_were_not_measured_use_the_stated_acceptance():
    found = project(
        X_ELITE,
        acceptance_by_position=[1.0],
        acceptance_after=0.0,
        target_b=8,
        drafter_b=0.01,
        context_length=4096,
    )
    assert {row.best.draft_tokens for row in found.lengths} == {1}
    assert found.lengths[0].best.mean_acceptance_length == 2


def test_a_longer_verify_graph_pays_only_where_enough_is_accepted():
    def gains(acceptance):
        by_length = {row.verify_length: row for row in projected(acceptance).lengths}
        short, long = by_length[8].best_without_overhead, by_length[32].best_without_overhead
        return long.speedup / short.speedup

    assert gains(0.5) < 1 < gains(0.95)
    assert projected(0.5).longer_gain == (projected(0.5).lengths[0], 0)
    longest, gain = projected(0.95).longer_gain
    assert longest.verify_length == 32
    assert gain == pytest.approx(gains(0.95) - 1)


def test_the_figures_of_the_x_elite_are_those_published():
    """A one-token and a 128-token pass of Llama 3.1 8B on its NPU: 100.4 and 206.6 ms."""
    rows = [f for f in figures_of(X_ELITE) if f.model == "llama_v3_1_8b_instruct"]
    assert (100.4, 206.6) in {(f.one_token_ms, f.ttft_min_ms) for f in rows}
    found = chip_speed(X_ELITE, 4096)
    assert found.one_token_ms(8) == pytest.approx(100, rel=0.1)
    assert 1.6 < found.prefill_cost < 2.3
    assert found.smallest_b < 1
    assert "AI Hub Models 0.65" in figures_source()


def test_every_chip_with_figures_can_be_projected_for_and_none_speeds_up_without_cost():
    chips = [chip for chip in all_chips() if figures_of(chip)]
    assert {"x-elite", "x2-elite", "8-elite", "8-elite-gen-5"} <= {chip.key for chip in chips}
    for chip in chips:
        for row in projected(chip=chip).lengths:
            assert 0 < row.best.speedup <= row.best_without_overhead.speedup
            assert row.best_without_overhead.speedup < 1 / (1 - 0.7)


def test_figures_of_the_nearest_context_length_are_taken():
    assert chip_speed(X_ELITE, 100_000).context_length == 4096
    assert chip_speed(X_ELITE, 1).context_length == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_b": 0.0}, "target's size is 0.0"),
        ({"drafter_b": -1.0}, "drafter's size is -1.0"),
        ({"drafter_b": float("nan")}, "drafter's size is nan"),
        ({"chip": find_chip("8-gen-3")}, "8 Gen 3: project for one of .*x-elite"),
    ],
)
def test_what_cannot_be_projected_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        projected(**options)


def test_a_projection_needs_acceptance():
    with pytest.raises(ConfigError, match="nothing was drafted"):
        project(
            X_ELITE,
            acceptance_by_position=[],
            acceptance_after=0.5,
            target_b=8,
            drafter_b=1,
            context_length=512,
        )


def test_the_record_says_that_it_is_a_projection_and_shows_every_input():
    record = projected().to_json()
    assert record["is_projection"] is True
    for name in ("chip", "acceptance_by_position", "acceptance_after", "target_b", "drafter_b"):
        assert record[name]
    assert record["speed"]["device"] == "Snapdragon X Elite CRD"


def test_chips_without_figures_list_those_with():
    with pytest.raises(ConfigError, match="x2-elite"):
        require_figures(find_chip("888"))
