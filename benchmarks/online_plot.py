"""A picture of what `online.py` found, of one run or of several.

python benchmarks/online_plot.py FOLDER/online.json ... -o learning.png
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FAINT = "#d5dbe0"


def main() -> None:
    """Draw the runs that were named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="JSON")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    found = [json.loads(path.read_text(encoding="utf-8")) for path in options.runs]
    plot([one for document in found for one in document["settings"]], options.output)


def plot(settings: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG: acceptance over the prompts learned from, a row for each target.

    Of a target with one setting every task has its line; of one with several every setting has,
    over all tasks.

    Args:
        settings: Of `online.py`.
        path: Where to.
    """
    from matplotlib.figure import Figure

    targets = list(dict.fromkeys(one["target"] for one in settings))
    figure = Figure(figsize=(11.0, 3.6 * len(targets)), layout="constrained")
    axes = figure.subplots(len(targets), 2, squeeze=False)
    for row, target in zip(axes, targets, strict=True):
        of_target = [one for one in settings if one["target"] == target]
        for cell, kind in zip(row, ("greedy", "sampled"), strict=True):
            for name, places, values in _lines(of_target, kind):
                cell.plot(places, values, marker="o", markersize=3, label=name)
            cell.set_title(f"{target}, {kind}", fontsize=10)
            cell.set_xlabel("prompts learned from")
            cell.set_ylabel("acceptance (%)")
            cell.grid(color=_FAINT)
        row[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.suptitle("teacher-forced acceptance on held-out answers")
    figure.savefig(path, dpi=150)


def _lines(settings: list[dict[str, Any]], kind: str) -> Iterator[tuple[str, list[int], list[Any]]]:
    """Name, prompts and percentages of every line of one target."""
    for one in settings:
        places = [point["prompts"] for point in one["curve"]]
        tasks = one["curve"][0]["tasks"]
        for task in [name for name in tasks if name != "all"] if len(settings) == 1 else ["all"]:
            values = [100 * point["tasks"][task]["full"][kind] for point in one["curve"]]
            yield task if len(settings) == 1 else one["setting"], places, values


if __name__ == "__main__":
    main()
