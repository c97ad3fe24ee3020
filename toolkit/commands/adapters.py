"""`omnidraft-npu adapters`: what was learned on this device, version by version."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..bundle import open_bundle
from ..errors import ConfigError, StateError
from ..forgetting import erase_learned, find_learned
from ..manifest import MANIFEST
from ..printing import echo
from ..state_folder import check_links, learned_targets, learning
from .decoding_options import bundle_argument
from .opened_adapters import OpenedAdapters, learner_lines, print_json, print_table

_target = click.option("--target", help="Which target of the bundle [default: the first].")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def _number(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A version's number, which may be written as the tables show it: `3` or `v0003`."""
    if value is None:
        return None
    digits = value.removeprefix("v")
    if not digits.isdecimal():
        raise click.BadParameter(f"{value!r} is no version: give its number, as `list` shows it")
    return int(digits)


_version = click.argument("version", callback=_number, required=False)


@click.group(name="adapters")
def command() -> None:
    """Show, move or erase what the drafter has learned for a target."""


@command.command(name="list")
@bundle_argument
@_target
@_json
def list_(bundle: Path, target: str | None, as_json: bool) -> None:
    """List the adapters that were learned for a target of BUNDLE.

    BUNDLE is a folder, or what `run --target` was given, for the bundle that it made.

    \b
    Examples:
      omnidraft-npu adapters list bundle
      omnidraft-npu adapters list bundle --target gemma3-270m --json
    """
    opened = OpenedAdapters.of(bundle, target)
    adapters = [opened.facts(record) for record in opened.store.records()]
    replay = opened.replay_facts()
    if as_json:
        facts = {"target": opened.target.name, "current": opened.store.current}
        facts["is_training"] = opened.is_training()
        facts["learner"] = opened.learner_facts()
        print_json({**facts, "adapters": adapters, "replay": replay})
        return
    if adapters:
        print_table(adapters)
    else:
        echo(f"no adapter for {opened.target.name} yet")
    echo(f"{replay['examples']:,} examples to learn from, {replay['bytes']:,} bytes")
    if opened.is_training():
        echo("one adapter is under training: a version as soon as it drafts better")
    for line in learner_lines(opened.learner_facts()):
        echo(line)
    others = learned_targets(bundle) - set(opened.bundle.manifest.targets)
    if left := find_learned(bundle, others).target_names:
        echo(
            f"an earlier export learned for {', '.join(left)}, which this bundle does not have: "
            "`omnidraft-npu adapters forget` erases it"
        )


@command.command()
@bundle_argument
@_version
@_target
@_json
def show(bundle: Path, version: int | None, target: str | None, as_json: bool) -> None:
    """Show one adapter of BUNDLE: VERSION, or the one in use.

    \b
    Examples:
      omnidraft-npu adapters show bundle
      omnidraft-npu adapters show bundle 3 --json
    """
    from omnidraft_npu.runtime.adapter_files import read_adapter

    opened = OpenedAdapters.of(bundle, target)
    record = opened.store.record(opened.number(version))
    tensors = read_adapter(opened.store.path(record.version), record.key)
    shapes = {name: list(tensor.shape) for name, tensor in sorted(tensors.items())}
    facts = opened.facts(record) | {"target": opened.target.name, "tensors": shapes}
    if as_json:
        print_json(facts)
        return
    print_table([facts])
    key, has_head = record.key, any(name.startswith("head.") for name in shapes)
    echo(
        f"for {opened.target.name} (tokenizer {key.target_tokenizer_sha256[:12]}) and drafter "
        f"{opened.bundle.manifest.drafter.name} (weights {key.drafter_sha256[:12]})"
    )
    if misfit := opened.store.misfit(record):
        echo(f"of no use here: {misfit}")
    echo(
        f"{len(shapes)} tensors of rank {key.rank}, "
        f"{'with' if has_head else 'without'} an acceptance head: {facts['path']}"
    )


@command.command()
@bundle_argument
@click.argument("output", type=click.Path(path_type=Path))
@_target
@click.option("--version", callback=_number, help="Which [default: the one in use].")
@click.option("--base-model", help="What PEFT loads it on [default: the drafter's source].")
@click.option(
    "--with-drafter",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Also write the drafter that ships, as transformers loads it.",
)
@click.option("--force", is_flag=True, help="Replace what is there.")
@_json
def export(
    bundle: Path,
    output: Path,
    target: str | None,
    version: int | None,
    base_model: str | None,
    with_drafter: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write an adapter of BUNDLE to OUTPUT: a folder for PEFT, or an `.onnx_adapter` file.

    PEFT loads the folder on top of the model that the drafter was exported from. Its acceptance
    head, which PEFT does not know, lies in a file of its own there.

    \b
    Examples:
      omnidraft-npu adapters export bundle adapter-for-peft
      omnidraft-npu adapters export bundle learned.onnx_adapter --version 3
      omnidraft-npu adapters export bundle for-peft --with-drafter drafter-for-peft
    """
    from omnidraft_npu.runtime.adapter_exchange import export_adapter, is_adapter_file

    if with_drafter is not None and is_adapter_file(output):
        raise ConfigError(f"{output} is no folder for PEFT: leave out --with-drafter")
    if with_drafter is not None and with_drafter.resolve() == output.resolve():
        # transformers applies an adapter that lies in a folder: that would not be the drafter.
        raise ConfigError(f"{output} cannot hold the drafter too: give --with-drafter another")
    opened = OpenedAdapters.of(bundle, target)
    number = opened.number(version)
    tensors = opened.store.load(number)
    for place in filter(None, (output, with_drafter)):
        with _writing(place):
            _check_place(place, opened.bundle.root, force=force)
    if with_drafter is not None:
        with _writing(with_drafter):
            _write_drafter(opened, with_drafter)
        base_model = base_model or str(with_drafter.resolve())
    with _writing(output):
        export_adapter(output, tensors, opened.bundle, opened.store.key, base_model=base_model)
    if as_json:
        drafter = None if with_drafter is None else str(with_drafter)
        print_json(
            {
                "target": opened.target.name,
                "version": number,
                "path": str(output),
                "drafter": drafter,
            }
        )
        return
    echo(f"wrote {output}: version {number} for {opened.target.name}", err=True)


@command.command(name="import")
@bundle_argument
@click.argument("source", type=click.Path(path_type=Path))
@_target
@_json
def import_(bundle: Path, source: Path, target: str | None, as_json: bool) -> None:
    """Add SOURCE to BUNDLE as a new version, and use it: a PEFT folder or `.onnx_adapter` file.

    \b
    Examples:
      omnidraft-npu adapters import bundle adapter-for-peft
      omnidraft-npu adapters import bundle learned.onnx_adapter --target gemma3-270m
    """
    from omnidraft_npu.runtime.adapter_exchange import import_adapter

    opened = OpenedAdapters.of(bundle, target)
    found = import_adapter(source, opened.bundle, opened.store.key)
    with learning(bundle, opened.target.name):
        try:
            record = opened.store.add(
                found.tensors, parent=opened.store.current, origin=found.origin
            )
            opened.store.use(record.version)
        except OSError as error:
            raise opened.unwritable(error) from error
    if as_json:
        facts = {"current": record.version, "base_model": found.base_model or None}
        facts |= {"num_new_tensors": found.num_new, "has_head": found.has_head}
        print_json({"target": opened.target.name, **facts})
        return
    echo(f"version {record.version} is in use for {opened.target.name}", err=True)
    if found.base_model:
        echo(
            f"it says that it was trained on {found.base_model[:200]!r}, this drafter came from "
            f"{opened.bundle.manifest.drafter.source}: if they are not the same model, roll back",
            err=True,
        )
    if found.num_new:
        echo(f"{found.num_new} tensors that it lacks start anew", err=True)
    if not found.has_head:
        echo("it brings no acceptance head", err=True)


@command.command()
@bundle_argument
@_version
@_target
@_json
def rollback(bundle: Path, version: int | None, target: str | None, as_json: bool) -> None:
    """Use an older adapter of BUNDLE: VERSION, or the one that the present goes on from.

    0 is the drafter without any. Newer versions stay, and can be gone back to.

    \b
    Examples:
      omnidraft-npu adapters rollback bundle
      omnidraft-npu adapters rollback bundle 3
      omnidraft-npu adapters rollback bundle 0
    """
    opened = OpenedAdapters.of(bundle, target)
    with learning(bundle, opened.target.name):
        if version is None:
            version = opened.store.record(opened.number(None)).parent
        before = opened.store.current
        try:
            opened.store.use(version)
        except OSError as error:
            raise opened.unwritable(error) from error
    if as_json:
        print_json({"target": opened.target.name, "current": version, "before": before})
        return
    now = f"version {version}" if version else "no adapter"
    then = f"version {before}" if before else "none"
    echo(f"{now} is in use for {opened.target.name}, before it was {then}", err=True)


@command.command()
@bundle_argument
@click.option("--target", help="Which target of the bundle [default: all].")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@_json
def forget(bundle: Path, target: str | None, yes: bool, as_json: bool) -> None:
    """Erase all that BUNDLE has learned: adapters, training examples and n-gram caches.

    With --target, only what was learned for that target. Files of others in `state/` stay.

    \b
    Examples:
      omnidraft-npu adapters forget bundle --yes
      omnidraft-npu adapters forget bundle --target gemma3-270m --yes
    """
    opened = open_bundle(bundle)
    check_links(bundle)
    names = learned_targets(bundle) | set(opened.manifest.targets)
    if target is not None:
        # What was learned for a target that a later export left out can be erased too.
        names = {target} if target in names else {opened.target(target).name}
    found = find_learned(bundle, names)
    if not yes and found.files:
        _ask(f"Erase {found}, {found.num_bytes:,} bytes?")
    erased, num_bytes = erase_learned(bundle, names)
    if as_json:
        counts = {name: len(getattr(erased, name)) for name in ("adapters", "examples", "caches")}
        print_json({"targets": list(erased.target_names), **counts, "bytes": num_bytes})
        return
    echo(f"erased {erased}, {num_bytes:,} bytes", err=True)


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    """Say of which place it is that the block cannot write there."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"cannot write {place} ({error.strerror}): choose another place"
        ) from error


def _check_place(place: Path, bundle: Path, *, force: bool) -> None:
    """Let nothing be written over, or among the files of a bundle."""
    if place.resolve().is_relative_to(bundle.resolve()) or (place / MANIFEST).exists():
        raise ConfigError(f"{place} is a bundle or lies in one: name a place of its own")
    is_free = not place.exists() or (place.is_dir() and not any(place.iterdir()))
    if not is_free and not force:
        raise ConfigError(f"{place} exists: name another, or replace it with --force")


def _ask(question: str) -> None:
    try:
        is_wanted = click.confirm(question, err=True)
    except click.Abort as error:
        if sys.stdin.isatty():
            raise
        raise ConfigError("nobody answers here whether to erase: add --yes") from error
    if not is_wanted:
        raise StateError("nothing was erased")


def _write_drafter(opened: OpenedAdapters, folder: Path) -> None:
    from ..drafters import packaged_drafter
    from ..drafters.float_folder import write_float_drafter

    source = opened.bundle.manifest.drafter.source
    packaged = packaged_drafter(source)
    if packaged is None:
        raise ConfigError(
            f"the drafter came from {source}, which does not ship with the package: leave out "
            "--with-drafter, and load the adapter on that model"
        )
    write_float_drafter(packaged, folder)
