"""What `distill` says while it works."""

import itertools
from types import SimpleNamespace

import pytest

from omnidraft_npu.commands import distill


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the command believes to have passed."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(distill, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


@pytest.fixture
def lines(clock):
    return distill._Lines()


def test_the_time_left_follows_the_pace_since_the_first_item(lines, clock, capsys):
    """Bug: loading the target counted too, and a run of 6 minutes began with 146 min left."""
    lines.stage("text", 500, 2500)
    clock.seconds += 100
    for _ in range(60):
        clock.seconds += 1
        lines.stage("text", 500 + 10 * int(clock.seconds - 1100), 2500)
    first, *later = capsys.readouterr().err.splitlines()
    assert first == "text: 500 of 2,500 tokens"
    assert "left" not in later[0]
    assert later[1] == "text: 560 of 2,500 tokens, 10 a second, 3 min left"
    assert later[-1].endswith("10 a second, 2 min left")


def test_lines_come_at_once_then_more_rarely_and_at_the_end(lines, clock, capsys):
    shown = []
    for second in range(3000):
        lines.stage("text", second, 3000)
        if capsys.readouterr().err:
            shown.append(second)
        clock.seconds += 1
    gaps = [b - a for a, b in itertools.pairwise(shown)]
    assert shown[0] == 0
    assert gaps[0] == 5
    assert gaps[-1] == 60
    assert gaps == sorted(gaps)
    lines.stage("text", 3000, 3000)
    lines.stage("text", 3000, 3000)
    assert capsys.readouterr().err == "text: 3,000 of 3,000 tokens\n"


def test_acceptance_is_shown_by_task_as_soon_as_it_is_measured(lines, clock, capsys):
    progress = SimpleNamespace(step=1, seen_pieces=3000, curve=[])
    lines.training(progress, 7.25, 90.0)
    clock.seconds += 1
    progress.step, progress.curve = 2, [{"step": 2, "loss": 7.0, "chat": 0.25, "maths": 0.5}]
    lines.training(progress, 7.0, 89.0)
    lines.training(progress, 7.0, 88.0)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "training: step 1, 3,000 pieces, loss 7.250, 90 s left"
    assert second.endswith("held-out acceptance chat 0.25, maths 0.50, 89 s left")
