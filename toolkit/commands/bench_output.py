"""The document of `bench`, and what is shown of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import StoreError
from ..printing import echo

if TYPE_CHECKING:
    from omnidraft_npu.runtime.bench import BenchResult
    from omnidraft_npu.runtime.opened_pair import OpenedModel

    from ..prompts import TaskPrompt


def document_of(
    result: "BenchResult", prompts: "list[TaskPrompt]", settings: dict[str, Any]
) -> dict[str, Any]:
    """What `--json` prints.

    Args:
        result: What was measured.
        prompts: Of the result, in its order.
        settings: Of the command, for `environment`; with `temperature`.
    """
    from omnidraft_npu.runtime.bench_report import rows_of, summary_of

    from ..machine import describe_machine

    pair = result.session.pair
    rows = rows_of(result, prompts, is_greedy=settings["temperature"] == 0)
    environment = {
        **describe_machine(),
        "target": _describe_model(pair.target),
        "drafter": None if pair.drafter is None else _describe_model(pair.drafter),
        "target_provider": result.session.target_provider,
        "draft_provider": result.session.draft_provider,
        "placement": pair.placement,
        **settings,
    }
    return {
        "schema_version": 1,
        "environment": environment,
        "rows": rows,
        "summary": summary_of(result, prompts, rows),
    }


def _describe_model(model: "OpenedModel") -> dict[str, Any]:
    entry = model.entry
    return {
        "name": entry.name,
        "source": entry.source,
        "architecture": entry.architecture,
        "precision": model.precision,
    }


def print_table(document: dict[str, Any]) -> None:
    """Every task and draft length of a document of `bench`."""
    from rich.table import Table

    from ..plots import title_of
    from .tables import table_console

    table = Table(title=title_of(document["environment"]))
    for name in ("task", "k", "drafts", "accepted", "of tested", "tokens a round", "bytes a round"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for name in ("tok/s alone", "tok/s", "speed-up", "draft", "verify", "bridge", "ttft"):
        table.add_column(name, justify="right")
    for task, group in document["summary"].items():
        alone = group["target_alone"]["decode_tokens_per_s"]
        for k, row in group["by_draft_tokens"].items():
            table.add_row(
                task,
                k,
                f"{row['mean_draft_length']:.1f}",
                _percent(row["acceptance_rate"]),
                _percent(row["conditional_acceptance"]),
                f"{row['num_tokens'] / row['rounds']:.2f}",
                f"{row['bytes_per_target_forward']:.1f}",
                f"{alone:.1f}",
                f"{row['decode_tokens_per_s']:.1f}",
                f"{row['speedup']:.2f}x",
                *(_percent(row[f"{part}_share"]) for part in ("draft", "verify")),
                _percent(row["bridge_share"], 1),
                f"{1000 * row['ttft_s']:.0f} ms",
            )
        table.add_section()
    table_console().print(table)


def _percent(part: float | None, digits: int = 0) -> str:
    return "–" if part is None else f"{100 * part:.{digits}f} %"


def tell_differences(document: dict[str, Any]) -> None:
    """Say on stderr how many texts are not the target's own."""
    learning = document.get("learning", {})
    again = [learning.get(when) or {"rows": []} for when in ("before", "after")]
    rows = [row for found in (document, *again) for row in found["rows"]]
    wrong = [row for row in rows if row["is_equal"] is False]
    if wrong:
        echo(
            f"{len(wrong)} of {len(rows)} texts differ from the target's own: "
            "run `omnidraft-npu verify` on these prompts",
            err=True,
        )


def write_plot(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `bench`, and say where.

    Raises:
        StoreError: the file cannot be written.
    """
    from ..learning_plot import plot_learning
    from ..plots import plot_bench

    try:
        (plot_learning if "learning" in document else plot_bench)(document, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    echo(f"wrote {path}", err=True)
