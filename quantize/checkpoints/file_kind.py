"""What a file really is that lies in the place of a model's file: a failed download mostly."""

from pathlib import Path

from omnidraft_npu.errors import CheckpointError, OmniDraftError

_AGAIN = "get the file itself again"
_UNPACK = "unpack it and give what is in it"
_MODEL = "give a Hugging Face folder with safetensors, or a GGUF file"
_WHOLE = "give the folder that it lies in"
_PICKLED = "convert it to safetensors (save_pretrained of transformers does), in its folder"

# First bytes, what they are the beginning of, and what to do.
_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer in place of the file",
        "run `git lfs pull` where it was cloned, or download the file",
    ),
    (b"\x1f\x8b", "a gzip archive", _UNPACK),
    (b"BZh", "a bzip2 archive", _UNPACK),
    (b"\xfd7zXZ\x00", "an xz archive", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"\x89PNG", "an image (PNG)", _AGAIN),
    (b"\xff\xd8\xff", "an image (JPEG)", _AGAIN),
    (b"GIF8", "an image (GIF)", _AGAIN),
    (b"%PDF", "a PDF document", _AGAIN),
    (b"\x7fELF", "a program or library (ELF)", _MODEL),
    (b"MZ", "a program or library (Windows)", _MODEL),
    (b"\x89HDF", "an HDF5 file", _MODEL),
    (b"\x93NUMPY", "a NumPy array", _MODEL),
    (b"\x08\x08\x12\x07pytorch", "an ONNX graph", _MODEL),
    *(
        (
            magic,
            "a GGML file from before GGUF",
            "convert it with a current llama.cpp, or get a GGUF",
        )
        for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")
    ),
    *(
        (bytes([0x80, protocol]), "pickled Python, which can run code", _PICKLED)
        for protocol in range(2, 6)
    ),
)
_BYTES_READ = 1024


def foreign_kind(path: Path, suffix: str) -> str | None:
    """What the file is and what to do about it, None for one that may be what is wanted.

    Args:
        path: the file.
        suffix: how the names of files end that belong in its place.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_BYTES_READ)
    if not head:
        return f"is empty: {_AGAIN}"
    # Before the rest: the length it begins with can look like anything.
    if head[8:9] == b"{" and not head[5:8].strip(b"\0"):
        return None if suffix == ".safetensors" else f"is a safetensors file: {_WHOLE}"
    for beginning, kind, advice in _BEGINNINGS:
        if head.startswith(beginning):
            return f"is {kind}: {advice}"
    if head.startswith(b"PK\x03\x04"):
        if b"data.pkl" in head or path.suffix in (".bin", ".pt", ".pth"):
            return f"is a pickled PyTorch file, which can run code: {_PICKLED}"
        return f"is a ZIP archive: {_UNPACK}"
    if head[257:262] == b"ustar":
        return f"is a tar archive: {_UNPACK}"
    if head.startswith(b"GGUF") and suffix != ".gguf":
        return "is a GGUF file: give it by its own path, ending in .gguf"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return f"is a web page (HTML): {_AGAIN}, not the page that offers it"
    if text.startswith(b"<?xml"):
        return f"is an XML document, perhaps a server's refusal: {_AGAIN}"
    if text.startswith((b"{", b"[")) and suffix not in (".json", ".jinja"):
        return f"is a JSON document, no model: {_WHOLE}"
    return None


def refuse_foreign(
    path: Path,
    shown: str,
    *,
    suffix: str | None = None,
    error_type: type[OmniDraftError] = CheckpointError,
) -> None:
    """Pass unless a file is plainly something else than a file of a model in this place.

    Args:
        path: the file; one that is not there passes.
        shown: what to call it.
        suffix: as for `foreign_kind`; None for the file's own.
        error_type: what is raised.

    Raises:
        CheckpointError: or `error_type`; it is, or cannot be read.
    """
    try:
        kind = foreign_kind(path, suffix or path.suffix) if path.is_file() else None
    except OSError as error:
        raise error_type(f"cannot read {shown}: {error.strerror}") from error
    if kind is not None:
        raise error_type(f"{shown} {kind}")
