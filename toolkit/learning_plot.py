"""A picture of what a drafter learns; matplotlib comes with the extra `plots`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import atomic_path
from .plots import FAINT, INK, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BEFORE, _AFTER = "#9fb4c0", "#1f6f8b"


def plot_learning(document: dict[str, Any], path: Path) -> None:
    """Write a PNG of the curve over the stream, and of every task before and after.

    Args:
        document: What `bench --learn --json` prints.
        path: Where to; replaced if it exists.
    """
    from matplotlib.figure import Figure

    found = document["learning"]
    figure = Figure(figsize=(10.0, 7.0), layout="constrained")
    grid = figure.add_gridspec(2, 2)
    _draw_curve(figure.add_subplot(grid[0, :]), found)
    for place, metric, scale, label, form in (
        (grid[1, 0], "conditional_acceptance", 100, "tested draft tokens\naccepted (%)", "%.0f"),
        (grid[1, 1], "speedup", 1, "decode speed over\nthe target alone (×)", "%.2f"),
    ):
        axes = figure.add_subplot(place)
        _draw_tasks(axes, found["tasks"], metric, scale=scale, form=form)
        axes.set_ylabel(label)
    figure.suptitle(
        f"{title_of(document['environment'])}, draft length {found['draft_tokens']}", color=INK
    )
    handles = figure.axes[1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _draw_curve(axes: "Axes", found: dict[str, Any]) -> None:
    known = [w for w in found["windows"] if w["conditional_acceptance"] is not None]
    axes.plot(
        [w["last"] for w in known],
        [100 * w["conditional_acceptance"] for w in known],
        color=_AFTER,
        marker="o",
    )
    for lesson in found["lessons"]:
        if lesson["outcome"] == "kept":
            axes.axvline(lesson["after_prompts"], color=FAINT, zorder=0)
    axes.set_xlabel("prompts of the stream (lines: a new adapter is in use)")
    axes.set_ylabel("tested draft tokens\naccepted (%)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_tasks(
    axes: "Axes", tasks: dict[str, Any], metric: str, *, scale: float, form: str
) -> None:
    for offset, when, color in ((-0.2, "before", _BEFORE), (0.2, "after", _AFTER)):
        values = [scale * ((row[when] or {}).get(metric) or 0.0) for row in tasks.values()]
        places = [x + offset for x in range(len(tasks))]
        bars = axes.bar(places, values, 0.38, label=when, color=color)
        axes.bar_label(bars, fmt=form, fontsize=8, padding=2, color=INK)
    axes.set_xticks(range(len(tasks)), list(tasks))
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
