"""Pictures of measurements; matplotlib comes with the extra `plots`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .extras import install_hint
from .files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT = "#22303c", "#d5dbe0"
_LIGHT, _DARK = 0.30, 0.95
"""Ends of the colour scale that draft lengths are taken from."""


def require_matplotlib() -> None:
    """Fail early, before anything is measured.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib, which is not installed here: {install_hint('plots')}"
        ) from error


def title_of(environment: dict[str, Any]) -> str:
    """What was measured, in a line; from a document of `bench`."""
    target, drafter = environment["target"], environment["drafter"]
    kind = {"cascade": " and prompt lookup draft", "model": " drafts"}
    who = "prompt lookup drafts"
    if drafter is not None:
        who = drafter["name"] + kind[environment["proposer"]]
    temperature = environment["temperature"]
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    where = environment["target_provider"]
    if (other := environment["draft_provider"]) not in (None, where):
        where += f", drafter on {other}"
    return f"{who} for {target['name']}, {target['precision']}, {how}, on {where}"


def plot_bench(document: dict[str, Any], path: Path) -> None:
    """Write a PNG of acceptance and speed-up by task and draft length.

    Args:
        document: What `bench --json` prints.
        path: Where to; replaced if it exists.
    """
    from matplotlib.figure import Figure

    summary = document["summary"]
    width = max(7.0, 1.6 + 0.5 * len(summary) * (len(summary["all"]["by_draft_tokens"]) + 1.2))
    figure = Figure(figsize=(min(width, 14.0), 6.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    _draw_bars(top, summary, "conditional_acceptance", scale=100, digits=0)
    top.set_ylabel("tested draft tokens\naccepted (%)")
    top.set_ylim(0, 108)
    _draw_bars(bottom, summary, "speedup", scale=1, digits=2)
    bottom.set_ylabel("decode speed over\nthe target alone (×)")
    bottom.axhline(1.0, color=INK, linewidth=1, linestyle="--", zorder=3)
    bottom.margins(y=0.15)
    figure.suptitle(title_of(document["environment"]), color=INK)
    figure.legend(
        *top.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=8,
        title="draft tokens a round",
        frameon=False,
    )
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _draw_bars(
    axes: "Axes", summary: dict[str, Any], metric: str, *, scale: float, digits: int
) -> None:
    """A group of bars for each task, a bar for each draft length."""
    from matplotlib import colormaps

    lengths = list(summary["all"]["by_draft_tokens"])
    width = 0.8 / len(lengths)
    for i, k in enumerate(lengths):
        shade = _LIGHT + (_DARK - _LIGHT) * (i + 1) / len(lengths)
        values = [row["by_draft_tokens"][k][metric] or 0.0 for row in summary.values()]
        bars = axes.bar(
            [x + (i - (len(lengths) - 1) / 2) * width for x in range(len(summary))],
            [scale * value for value in values],
            0.92 * width,
            label=k,
            color=colormaps["YlGnBu"](shade),
            zorder=2,
        )
        labels = axes.bar_label(bars, fmt=f"%.{digits}f", fontsize=8, padding=2, color=INK)
        for label in labels:
            label.set(zorder=4, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})
    axes.set_xticks(range(len(summary)), list(summary))
    axes.grid(axis="y", color=FAINT, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=True, length=0)
