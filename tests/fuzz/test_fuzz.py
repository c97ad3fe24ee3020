"""Damaged documents and odd input: success or one line, whatever the damage.

A case is a number: it decides what is damaged and how. `python tests/fuzz/test_fuzz.py 1234`
repeats the case 1234 with its traceback, `python tests/fuzz/test_fuzz.py 1000 5000` runs the cases
from 1000 to 4999 and prints a summary; `--site ggufs` keeps to one kind. CI runs the first
`NUM_CASES`, `-m slow` runs `NUM_SLOW_CASES`.
"""

import argparse
import collections
import faulthandler
import gc
import logging
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.bundle_site import BundleSite
from fuzz.checkpoint_site import CheckpointSite
from fuzz.mutations import Mutator
from fuzz.state_site import StateSite

from omnidraft_npu.prompt_text import MAX_BYTES

resource = pytest.importorskip("resource", reason="limits of time and memory need POSIX")

SEED = 2026
NUM_CASES = 1000
NUM_SLOW_CASES = 100_000
MAX_SECONDS = 20
_SHARES = {
    "manifests": 12,
    "documents": 6,
    "tokenizers": 14,
    "spellings": 12,
    "graphs": 3,
    "options": 3,
    "names": 3,
    "prompts": 6,
    "templates": 5,
    "state": 12,
    "examples": 4,
    "imports": 8,
    "folders": 10,
    "ggufs": 10,
    "sentencepieces": 5,
    "exports": 1,
}
"""How often each kind is drawn."""


class _HangError(BaseException):
    """A case took longer than `MAX_SECONDS`."""


@dataclass
class Summary:
    """What came of some cases."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    """By kind and outcome."""
    faults: dict[int, str] = field(default_factory=dict)
    """Traceback of every case that failed, by its number."""
    slowest: tuple[float, int] = (0.0, -1)

    def __str__(self) -> str:
        kinds: dict[str, collections.Counter[str]] = {}
        for (kind, outcome), count in self.outcomes.items():
            kinds.setdefault(kind, collections.Counter())[outcome] += count
        lines = [f"{kind}: {dict(found.most_common())}" for kind, found in sorted(kinds.items())]
        total, (seconds, number) = sum(self.outcomes.values()), self.slowest
        lines.append(
            f"{total} cases, {len(self.faults)} faults, slowest {seconds:.1f} s (case {number})"
        )
        return "\n".join(lines)


class Fuzzer:
    """All sites in one folder; cases leave them as they were."""

    def __init__(self, root: Path, bundle: Path, checkpoint: Path) -> None:
        one, two = BundleSite(root, bundle), StateSite(root, bundle)
        three = CheckpointSite(root, checkpoint)
        self.kinds: dict[str, Callable[[Mutator], str]] = {
            name: getattr(next(s for s in (one, two, three) if hasattr(type(s), name)), name)
            for name in _SHARES
        }
        self._shares = np.array(list(_SHARES.values()), float) / sum(_SHARES.values())
        # Damage may take twice what a run takes that succeeds, and as much of an endless file as
        # is read before it is refused.
        assert one.run("hi") == "ok"
        peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._max_kib = 2 * peak + MAX_BYTES // 2**10

    def case(self, number: int, kind: str | None = None) -> tuple[str, str]:
        """Run one case: its kind and what came of it.

        Raises:
            Exception: whatever the program should not have let through.
        """
        rng = np.random.default_rng((SEED, number))
        drawn = kind or str(rng.choice(list(_SHARES), p=self._shares))
        outcome = self.kinds[drawn](Mutator(rng))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak > self._max_kib:
            before, self._max_kib = self._max_kib, peak
            raise MemoryError(f"{peak / 2**10:.0f} MiB, where {before / 2**10:.0f} is the limit")
        return drawn, outcome

    def run(self, numbers: range, kind: str | None = None, every: int = 0) -> Summary:
        """Run cases, each with a limit of time; `every` so many, print how it goes."""
        summary = Summary()
        signal.signal(signal.SIGALRM, _hang)
        logging.disable()
        for number in numbers:
            started = time.perf_counter()
            signal.alarm(MAX_SECONDS)
            # A library in C that does not return ends all; its stack names the case.
            faulthandler.dump_traceback_later(3 * MAX_SECONDS, exit=True)
            try:
                drawn, outcome = self.case(number, kind)
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:  # noqa: BLE001  # the finding
                drawn, outcome = kind or "?", type(error).__name__
                summary.faults[number] = traceback.format_exc()
                if every:
                    print(f"FAULT case {number}: {_last_lines(summary.faults[number])}", flush=True)
            finally:
                signal.alarm(0)
                faulthandler.cancel_dump_traceback_later()
            seconds = time.perf_counter() - started
            summary.slowest = max(summary.slowest, (seconds, number))
            summary.outcomes[drawn, outcome] += 1
            if every and (number + 1) % every == 0:
                gc.collect()
                count = sum(summary.outcomes.values())
                print(f"{number + 1}: {count} cases, {len(summary.faults)} faults", flush=True)
        return summary


def _hang(number: int, frame: FrameType | None) -> None:
    raise _HangError(f"it takes over {MAX_SECONDS} s")


def _last_lines(text: str) -> str:
    lines = text.strip().splitlines()
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return f"{lines[-1][:300]} at {places[-1] if places else '?'}"


@pytest.fixture(scope="module")
def fuzzer(learning_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    root = tmp_path_factory.mktemp("fuzz")
    yield Fuzzer(root, learning_original, learning_original.parent / "target")
    logging.disable(logging.NOTSET)


def test_damage_of_any_kind_is_success_or_one_line(fuzzer: Fuzzer) -> None:
    summary = fuzzer.run(range(NUM_CASES))
    assert not summary.faults, "\n".join(f"case {n}: {t}" for n, t in summary.faults.items())
    assert {kind for kind, _ in summary.outcomes} == set(_SHARES)


@pytest.mark.slow
def test_much_damage_of_any_kind_is_success_or_one_line(fuzzer: Fuzzer) -> None:
    summary = fuzzer.run(range(NUM_SLOW_CASES), every=1000)
    print(summary)
    assert not summary.faults, "\n".join(f"case {n}: {t}" for n, t in summary.faults.items())


def _main() -> None:
    from learning_bundle import write_learning_bundle

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, nargs="?")
    parser.add_argument("--site", choices=list(_SHARES))
    parser.add_argument("--models", type=Path, help="keep the tiny models here between runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = given.models or Path(folder) / "models"
        bundle = models / "bundle"
        if not bundle.exists():
            models.mkdir(parents=True, exist_ok=True)
            write_learning_bundle(models)
        fuzzer = Fuzzer(Path(folder), bundle, models / "target")
        if given.end is None:
            print(fuzzer.case(given.first, given.site))
            return
        summary = fuzzer.run(range(given.first, given.end), given.site, every=500)
        print(summary)
        sys.exit(bool(summary.faults))


if __name__ == "__main__":
    _main()
