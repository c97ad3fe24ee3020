"""`omnidraft-npu cache`: the spellings that draft mode `cache` has learned."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..bridge.ngram_cache import DEFAULT_MAX_BYTES
from ..bridge.ngram_entries import NgramEntries
from ..bridge.ngram_file import NgramStore, PairKey, read_entries
from ..bundle import Bundle, open_bundle
from ..errors import BundleError, ConfigError
from ..manifest import ModelEntry
from ..printing import echo, echo_json
from ..state_folder import check_state, ngrams_path
from .decoding_options import bundle_argument

_target = click.option("--target", help="Which target of the bundle [default: the first].")


@click.group(name="cache")
def command() -> None:
    """Show, join or shrink the spellings that draft mode `cache` has learned."""


@dataclass(frozen=True, kw_only=True)
class _Opened:
    bundle: Bundle
    target: ModelEntry
    store: NgramStore

    @classmethod
    def of(cls, path: Path, target: str | None) -> "_Opened":
        bundle = open_bundle(path)
        entry = bundle.target(target)
        key = PairKey(
            drafter_sha256=bundle.manifest.drafter.tokenizer_sha256,
            target_sha256=entry.tokenizer_sha256,
        )
        check_state(path, [entry.name])
        store = NgramStore(path=ngrams_path(path, entry.name), key=key)
        return cls(bundle=bundle, target=entry, store=store)

    def change(self, change: Callable[[NgramEntries], NgramEntries]) -> tuple[int, NgramEntries]:
        """Save what `change` makes of the entries; their number before, and those after."""
        try:
            with self.store.locked():
                before = self.store.read()
                self.store.replace(change(before))
                return len(before), self.store.read()
        except OSError as error:
            raise BundleError(
                f"cannot write to {self.store.path.parent} ({error.strerror}): make it writable"
            ) from error


@command.command()
@bundle_argument
@_target
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="How many merges to show.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(bundle: Path, target: str | None, top: int, as_json: bool) -> None:
    """Show what was learned for a target of BUNDLE.

    \b
    Examples:
      omnidraft-npu cache show bundle
      omnidraft-npu cache show bundle --target gemma3-270m --top 50 --json
    """
    opened = _Opened.of(bundle, target)
    entries = opened.store.read()
    merges = _most_used(opened, entries, top)
    uses = int(entries.uses.sum())
    facts = {
        "target": opened.target.name,
        "entries": len(entries),
        "bytes": entries.nbytes,
        "budget_bytes": opened.store.max_bytes,
        "uses": uses,
        "hits": uses - len(entries),
    }
    if as_json:
        document = {"schema_version": 1, **facts, "most_used": merges}
        echo_json(document)
        return
    if not len(entries):
        echo(
            f"nothing learned for {opened.target.name} yet: decode with `omnidraft-npu run "
            "--draft-mode cache`"
        )
        return
    echo(
        f"{opened.target.name}: {len(entries):,} entries, {entries.nbytes:,} of "
        f"{opened.store.max_bytes:,} bytes; {facts['hits']:,} hits, "
        f"{uses:,} uses with the first of each"
    )
    for one in merges:
        pieces = " + ".join(f"'{piece}'" for piece in one["pieces"])
        echo(f"{one['uses']:>8,}  '{one['token']}' = {pieces}")


@command.command()
@bundle_argument
@click.argument("others", nargs=-1, required=True, type=click.Path(path_type=Path))
@_target
def merge(bundle: Path, others: tuple[Path, ...], target: str | None) -> None:
    """Add what OTHERS, bundles or cache files, have learned to a target of BUNDLE.

    Uses are added. Only caches of the same two tokenizers are taken; on any other, nothing
    changes.

    \b
    Examples:
      omnidraft-npu cache merge bundle other-bundle
      omnidraft-npu cache merge bundle gemma3-270m.safetensors
    """
    opened = _Opened.of(bundle, target)
    added = []
    for other in others:
        path = other
        if other.is_dir():
            check_state(other, [opened.target.name])
            path = ngrams_path(other, opened.target.name)
        if not path.is_file():
            raise BundleError(
                f"{path} does not exist or is not a file: name a cache file, or a bundle that has "
                f"learned something for {opened.target.name}"
            )
        entries, key = read_entries(path)
        if key != opened.store.key:
            raise BundleError(
                f"{path} was learned with other tokenizers ({key}; here {opened.store.key}): "
                "leave it out"
            )
        added.append(entries)
    before, after = opened.change(lambda saved: functools.reduce(NgramEntries.merged, added, saved))
    echo(f"{len(after):,} entries, {before:,} before", err=True)


@command.command()
@bundle_argument
@click.option(
    "--max-bytes",
    default=DEFAULT_MAX_BYTES,
    show_default=True,
    help="Most bytes of entries to keep.",
)
@_target
def prune(bundle: Path, max_bytes: int, target: str | None) -> None:
    """Drop the least used entries of a target of BUNDLE.

    \b
    Examples:
      omnidraft-npu cache prune bundle --max-bytes 100000
    """
    if max_bytes < 0:
        raise ConfigError(f"max_bytes is {max_bytes}, must not be negative: use --max-bytes 0")
    opened = _Opened.of(bundle, target)
    before, kept = opened.change(lambda saved: saved.pruned(max_bytes))
    echo(f"kept {len(kept):,} of {before:,} entries, {kept.nbytes:,} bytes", err=True)


def _most_used(opened: _Opened, entries: NgramEntries, top: int) -> list[dict[str, Any]]:
    """The last entries first, with the text of tokens and pieces."""
    from ..text.tokenizer import Tokenizer

    shown = list(entries)[: -top - 1 : -1]
    if not shown:
        return []
    models = (opened.target, opened.bundle.manifest.drafter)
    target, drafter = (Tokenizer.from_folder(opened.bundle.path(m.folder)) for m in models)
    return [
        {
            "token_id": token_id,
            "token": _text(target.token_bytes(token_id)),
            "piece_ids": pieces,
            "pieces": [_text(drafter.token_bytes(piece)) for piece in pieces],
            "uses": uses,
        }
        for token_id, pieces, uses in shown
    ]


def _text(data: bytes) -> str:
    """Bytes for people: text, with escapes for what is no text."""
    return data.decode(errors="backslashreplace")
