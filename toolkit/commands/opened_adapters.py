"""What the `adapters` commands work on, and how they show it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle import Bundle, open_bundle
from ..errors import BundleError, StateError
from ..files import bytes_of
from ..manifest import ModelEntry
from ..printing import echo_json
from ..state_folder import adapters_path, check_state, replay_path

if TYPE_CHECKING:
    from omnidraft_npu.runtime.adapter_record import AdapterRecord
    from omnidraft_npu.runtime.adapter_store import AdapterStore


@dataclass(frozen=True, kw_only=True)
class OpenedAdapters:
    """A target of a bundle, and the versions that were learned for it."""

    bundle: Bundle
    target: ModelEntry
    store: "AdapterStore"

    @classmethod
    def of(cls, path: Path, target: str | None) -> "OpenedAdapters":
        """Open a bundle; raises `BundleError` or `ConfigError` for what is not there."""
        from omnidraft_npu.runtime.adapter_files import AdapterKey
        from omnidraft_npu.runtime.adapter_store import AdapterStore

        bundle = open_bundle(path)
        entry = bundle.target(target)
        check_state(path, [entry.name])
        store = AdapterStore(adapters_path(path, entry.name), AdapterKey.of(bundle, entry))
        return cls(bundle=bundle, target=entry, store=store)

    def number(self, version: int | None) -> int:
        """The version that was named, or the one in use; never that without an adapter."""
        if version == 0:
            raise BundleError(
                "0 is the drafter without an adapter: name a version that `omnidraft-npu adapters "
                "list` shows"
            )
        found = self.store.current if version is None else version
        if not found:
            raise BundleError(
                f"no adapter is in use for {self.target.name}: name one that `omnidraft-npu "
                "adapters list` shows, or learn one with `omnidraft-npu run`"
            )
        return found

    def facts(self, record: "AdapterRecord") -> dict[str, Any]:
        """A version for the JSON document."""
        kept = asdict(record)
        del kept["format_version"]
        path = self.store.path(record.version)
        return kept | {
            "in_use": record.version == self.store.current,
            "bytes": bytes_of(path),
            "path": str(path),
        }

    def replay_facts(self) -> dict[str, Any]:
        """Number and bytes of the stored examples."""
        from ..replay import ReplayBuffer

        kept = ReplayBuffer(folder=replay_path(self.bundle.root, self.target.name), pair="")
        return {"examples": len(kept), "bytes": kept.num_bytes}

    def is_training(self) -> bool:
        """Whether updates were made that are no version yet, since they do not draft better yet."""
        from omnidraft_npu.runtime.learner_state import read_training, training_path

        path = training_path(replay_path(self.bundle.root, self.target.name))
        return read_training(path, self.store.key)[0].num_updates > 0

    def learner_facts(self) -> dict[str, Any] | None:
        """What learning in the background did last, for the JSON document; None for nothing."""
        from omnidraft_npu.runtime.learner_report import is_learning, read_report

        report = read_report(self.bundle, self.target)
        if report is None:
            return None
        facts = asdict(report)
        del facts["format_version"]
        return {"is_at_work": is_learning(self.bundle, self.target), **facts}

    def unwritable(self, error: OSError) -> StateError:
        """What to say where a version cannot be written."""
        return StateError(
            f"cannot write to {self.store.folder} ({error.strerror}): free some space, or make it "
            "writable"
        )


def learner_lines(facts: dict[str, Any] | None) -> list[str]:
    """What `OpenedAdapters.learner_facts` gives, as lines."""
    if facts is None:
        return []
    if facts["is_at_work"]:
        state = f"learning in the background since {facts['started']}, process {facts['process']}"
    elif facts["ended"] is None:
        state = f"learning in the background began {facts['started']} and was killed"
    else:
        state = f"learning in the background ended {facts['ended']}"
    lines = [state, *facts["updates"], *facts["warnings"]]
    return lines if facts["error"] is None else [*lines, f"it failed: {facts['error']}"]


def print_json(document: dict[str, Any]) -> None:
    """The document on stdout, with its `schema_version`."""
    echo_json({"schema_version": 1, **document})


def print_table(adapters: list[dict[str, Any]]) -> None:
    """One row a version, of the facts that `OpenedAdapters.facts` gives."""
    from .tables import make_table, table_console

    columns = ("version", "parent", "examples", "updates", "acceptance", "size", "origin")
    table = make_table(columns, long=("origin",))
    for one in adapters:
        before, after = one["acceptance_before"], one["acceptance_after"]
        measured = [f"{rate:.3f}" if rate is not None else "?" for rate in (before, after)]
        table.add_row(
            f"v{one['version']:04}{' in use' if one['in_use'] else ''}",
            f"v{one['parent']:04}" if one["parent"] else "none",
            f"{one['num_examples']:,}",
            f"{one['num_updates']:,}",
            " to ".join(measured) if after is not None else "",
            f"{one['bytes']:,}",
            one["origin"],
        )
    table_console().print(table)
