"""Checkpoints from the model hub, through the `huggingface_hub` package."""

import shutil
import sys
from pathlib import Path

from ..errors import DamagedModelError, StoreError
from ..extras import install_hint
from .contents import StoredFile, check_hub_hash, record_folder

# What a checkpoint needs: no other weight formats, no code, no folders of other exports.
_WANTED = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
_UNWANTED = ["*/*"]


def download_from_hub(hub_id: str, partial: Path) -> dict[str, StoredFile]:
    """The checkpoint `hub_id` in the folder `partial`, whole; what its files hold.

    What is there already is taken over, so an interrupted download goes on where it was.

    Raises:
        StoreError: the package is not installed, the hub cannot be reached, does not have the
            model or asks for a login, or what it has is no checkpoint.
        OSError: the folder cannot be written.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise StoreError(
            f"{hub_id} is on the model hub, which needs the package huggingface-hub: "
            f"{install_hint('export')}"
        ) from error
    lost_connection: tuple[type[Exception], ...] = (
        errors.LocalEntryNotFoundError,
        *_transport_errors(),
    )
    try:
        snapshot_download(
            hub_id, local_dir=partial, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except errors.HFValidationError as error:
        raise StoreError(
            f"{hub_id} is no name that the hub can have: give organisation/model as on its page"
        ) from error
    except errors.GatedRepoError as error:
        raise StoreError(
            f"{hub_id} must be asked for: accept its terms on its page on the hub, log in with "
            "hf auth login, then pull it again"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise StoreError(
            f"the hub has no model {hub_id}, or it is private: check the spelling, or log in with "
            "hf auth login"
        ) from error
    except errors.HfHubHTTPError as error:
        raise StoreError(f"the hub refused {hub_id}: {error}. Try again later") from error
    except lost_connection as error:
        raise StoreError(
            f"{hub_id} could not be fetched: the hub cannot be reached ({type(error).__name__}). "
            "Check the network, then run the same command again: it goes on where it was"
        ) from error
    if not (partial / "config.json").is_file():
        shutil.rmtree(partial, ignore_errors=True)
        raise StoreError(
            f"{hub_id} has no config.json, so it is no checkpoint that can be read: for GGUF "
            "files, download one and give its path"
        )
    try:
        for name, etag in _etags(partial).items():
            if (partial / name).is_file():
                check_hub_hash(partial / name, etag)
        files = record_folder(partial)
    except DamagedModelError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StoreError(
            f"{hub_id} did not arrive whole, or is not whole on the hub: {error}. Pull it again"
        ) from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    return files


def _etags(folder: Path) -> dict[str, str]:
    """The hub's etag of each file, which `huggingface_hub` keeps as the second of three lines."""
    etags = {}
    for path in (folder / ".cache" / "huggingface" / "download").glob("*.metadata"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if len(lines) > 1:
            etags[path.name.removesuffix(".metadata")] = lines[1].strip()
    return etags


def _transport_errors() -> tuple[type[Exception], ...]:
    """What a lost connection raises; the hub's package has used two HTTP libraries."""
    names = (("httpx", "TransportError"), ("requests", "RequestException"))
    libraries = [(sys.modules[library], name) for library, name in names if library in sys.modules]
    found = (getattr(library, name) for library, name in libraries)
    return (ConnectionError, TimeoutError, *found)
