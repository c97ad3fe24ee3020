"""Progress on stderr where it is no terminal."""

from types import SimpleNamespace

import pytest

from omnidraft_npu.commands import progress


@pytest.mark.parametrize(("first", "seconds"), [(0, 6), (1, 10)])
def test_the_first_part_of_a_stage_counts_in_its_time(monkeypatch, capsys, first, seconds):
    """`bench` of one prompt said `1 done in 0.0 s`, since it tells only what is done."""
    clock = iter([0.0, 3.0, 7.0, 13.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with progress.stage_progress() as report:
        report("target alone", 1, 1)
        report("draft length 4", first, 2)
        report("draft length 4", 2, 2)
    assert capsys.readouterr().err.splitlines() == [
        "target alone: 1 done in 3.0 s",
        f"draft length 4: 2 done in {seconds}.0 s",
    ]
