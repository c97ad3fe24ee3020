"""Measurements as one JSON document: a row for each prompt and draft length, and summaries."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from omnidraft_npu.prompts import RESERVED_TASK, TaskPrompt
from omnidraft_npu.statistics import DecodeStats

from .bench import BenchResult, Measurement

_ALONE = (
    "ttft_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "bytes_per_target_forward",
    "round_s_p50",
    "round_s_p95",
    "peak_rss_bytes",
)
"""Metrics that mean something without a drafter."""
_SPREAD = (
    "acceptance_rate",
    "conditional_acceptance",
    "mean_acceptance_length",
    "bytes_per_target_forward",
    "speedup",
    "ttft_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
)
"""Metrics whose percentiles over prompts are given."""


def rows_of(
    result: BenchResult, prompts: Sequence[TaskPrompt], *, is_greedy: bool
) -> list[dict[str, Any]]:
    """A row for each draft length and prompt.

    Counts and decode times are those of the run of median speed, so that they fit together;
    `ttft_s` and `prefill_tokens_per_s` are medians over the repeats, and the percentiles
    of a round are over the rounds of all of them. Sampled texts are not compared.
    """
    rows = []
    for k, measurements in result.drafted.items():
        for i, (prompt, one) in enumerate(zip(prompts, measurements, strict=True)):
            alone = result.alone[i]
            speedup = one.median.tokens_per_s / alone.median.tokens_per_s
            rows.append(
                {
                    "prompt": prompt.prompt,
                    "task": prompt.task,
                    "draft_tokens": k,
                    "num_tokens": one.median.stats.num_tokens,
                    "is_equal": is_equal(alone, one) if is_greedy else None,
                    **_metrics([one], speedup=speedup),
                    "target_alone": _only_alone(_metrics([alone])),
                }
            )
    return rows


def is_equal(alone: Measurement, drafted: Measurement) -> bool:
    """Whether every response, with drafts and without, has the same tokens."""
    return len({run.token_ids for run in (*alone.runs, *drafted.runs)}) == 1


def summary_of(
    result: BenchResult, prompts: Sequence[TaskPrompt], rows: Sequence[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Metrics of every task, and of all: those of the fastest draft length, then every length's.

    Counts and times are summed over prompts; the speed-up is the geometric mean over them.
    """
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    everywhere = _by_length(result, range(len(prompts)), rows)
    best = max(everywhere, key=lambda k: everywhere[k]["speedup"])
    summary = {}
    for task in (*tasks, RESERVED_TASK):
        chosen = [i for i, p in enumerate(prompts) if task in (p.task, RESERVED_TASK)]
        lengths = _by_length(result, chosen, rows)
        summary[task] = {
            "draft_tokens": best,
            "num_prompts": len(chosen),
            **lengths[best],
            "target_alone": _only_alone(_metrics([result.alone[i] for i in chosen])),
            "by_draft_tokens": {str(k): metrics for k, metrics in lengths.items()},
        }
    return summary


def _by_length(
    result: BenchResult, chosen: Sequence[int], rows: Sequence[dict[str, Any]]
) -> dict[int | str, dict[str, Any]]:
    lengths = {}
    for number, (k, measurements) in enumerate(result.drafted.items()):
        own = [rows[number * len(measurements) + i] for i in chosen]
        speedup = math.exp(statistics.fmean(math.log(row["speedup"]) for row in own))
        equal = [row["is_equal"] for row in own]
        lengths[k] = {
            "num_tokens": sum(row["num_tokens"] for row in own),
            "is_equal": None if None in equal else all(equal),
            **_metrics([measurements[i] for i in chosen], speedup=speedup),
            "percentiles": {name: _percentiles(row[name] for row in own) for name in _SPREAD},
        }
    return lengths


def _metrics(
    measurements: Sequence[Measurement], *, speedup: float | None = None
) -> dict[str, Any]:
    """Of several prompts under one setting."""
    medians = DecodeStats.sum(one.median.stats for one in measurements)
    everything = DecodeStats.sum(run.stats for one in measurements for run in one.runs).to_json()
    first = [[run.stats.to_json() for run in one.runs] for one in measurements]
    over_repeats = {
        name: _mean(_median(run[name] for run in runs) for runs in first)
        for name in ("ttft_s", "prefill_tokens_per_s")
    }
    return {
        **medians.to_json(speedup=speedup),
        **over_repeats,
        "round_s_p50": everything["round_s_p50"],
        "round_s_p95": everything["round_s_p95"],
        "peak_rss_bytes": measurements[-1].peak_rss_bytes,
    }


def _only_alone(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: metrics[name] for name in _ALONE}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _percentiles(values: Iterable[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    if not known:
        return {"p50": None, "p95": None}
    p50, p95 = np.percentile(known, (50, 95)).tolist()
    return {"p50": p50, "p95": p95}
