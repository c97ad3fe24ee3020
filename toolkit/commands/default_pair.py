"""The bundle that `run` makes and uses when none is named."""

from pathlib import Path

import click

from ..bundle import open_bundle
from ..errors import BundleError, ConfigError
from ..store.builtin_models import find_builtin
from ..store.local import store_folder
from .pull import fetch_model

# target -> drafter; the first target is the default one.
DEFAULT_PAIRS = {"gemma3-270m": "smollm2-135m", "smollm2-135m": "gemma3-270m"}


def default_bundle(target: str | None, *, accept_terms: bool) -> Path:
    """The default bundle of a target: found in the local store, or fetched and exported once.

    Raises:
        ConfigError: there is no default pair for `target`.
        StoreError, ExportError: a model cannot be fetched or exported.
    """
    target = target or next(iter(DEFAULT_PAIRS))
    builtin = find_builtin(target)
    target = builtin.name if builtin is not None else target
    if target not in DEFAULT_PAIRS:
        raise ConfigError(
            f"there is no default pair for target {target!r}, there is one for "
            f"{' and '.join(DEFAULT_PAIRS)}: use one of these, or --bundle"
        )
    bundle = store_folder() / "bundles" / target
    if bundle.exists():
        try:
            open_bundle(bundle)
        except BundleError as error:
            click.echo(f"{error}; making it again", err=True)
        else:
            return bundle
    drafter = DEFAULT_PAIRS[target]
    for name in (target, drafter):
        fetch_model(name, accept_terms=accept_terms)

    from omnidraft_npu.quantize.export import ExportRequest, export_bundle
    from omnidraft_npu.quantize.model_stage import model_request

    from .progress import stage_progress

    bundle.parent.mkdir(parents=True, exist_ok=True)
    request = ExportRequest(
        drafter=model_request(drafter, precision="int8", context_length=4096),
        targets=(model_request(target, precision="int8", context_length=4096),),
    )
    with stage_progress() as report:
        export_bundle(request, bundle, force=True, progress=report)
    return bundle
