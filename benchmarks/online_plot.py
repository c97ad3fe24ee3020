"""A picture of what `online.py` found."""

from pathlib import Path
from typing import Any

_FAINT = "#d5dbe0"


def plot(document: dict[str, Any], path: Path) -> None:
    """Write a PNG: acceptance over the prompts learned from, a row for each target.

    Args:
        document: Of `online.py`.
        path: Where to.
    """
    from matplotlib.figure import Figure

    targets = list(dict.fromkeys(one["target"] for one in document["settings"]))
    figure = Figure(figsize=(11.0, 3.6 * len(targets) + 0.6), layout="constrained")
    axes = figure.subplots(len(targets), 2, squeeze=False)
    for row, target in zip(axes, targets, strict=True):
        for cell, kind in zip(row, ("greedy", "sampled"), strict=True):
            for one in document["settings"]:
                if one["target"] == target:
                    places = [point["prompts"] for point in one["curve"]]
                    values = [100 * p["tasks"]["all"]["full"][kind] for p in one["curve"]]
                    cell.plot(places, values, marker="o", markersize=3, label=one["setting"])
            cell.set_title(f"{target}, {kind}", fontsize=10)
            cell.set_xlabel("prompts learned from")
            cell.set_ylabel("acceptance (%)")
            cell.grid(color=_FAINT)
    figure.suptitle("teacher-forced acceptance on held-out answers")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    figure.savefig(path, dpi=150)
