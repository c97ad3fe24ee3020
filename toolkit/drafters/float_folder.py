"""A drafter's folder in the form that transformers and PEFT load: weights in floats.

`distill` writes matrices as int8 rows and their scales, `weight` and `weight_scale`, which
`export` reads and transformers would take for the weights themselves.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from ..errors import CheckpointError
from ..files import write_json, write_safetensors

DRAFTER_MARK = "omnidraft_npu.drafter"
"""What names the drafter in the metadata of files made from it or for it."""

_SCALE = "_scale"


def write_float_drafter(source: Path, folder: Path) -> None:
    """Write `source` with float32 weights to `folder`, which is made if absent.

    Raises:
        CheckpointError: `source` is no folder of a drafter.
        OSError: `folder` cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        stored = load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{source} is no folder of a drafter ({error})") from error
    weights = {}
    for name, values in stored.items():
        if name.endswith(_SCALE):
            continue
        scale = stored.get(name + _SCALE)
        floats = values.astype(np.float32)
        weights[name] = floats if scale is None else floats * scale.astype(np.float32)[:, None]
    folder.mkdir(parents=True, exist_ok=True)
    marks = {"format": "pt", DRAFTER_MARK: source.name}
    write_safetensors(folder / "model.safetensors", weights, marks)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    write_json(folder / "config.json", config | {"torch_dtype": "float32"})
