"""What is missing is installed from the clone: the package is on no index."""

import ast
import re
import tomllib
from pathlib import Path

from omnidraft_npu.extras import install_hint

ROOT = Path(__file__).parents[2]
FOLDERS = ("toolkit", "quantize", "runtime")


def test_no_message_names_the_package_as_if_an_index_had_it():
    files = [
        *(
            path
            for folder in ("toolkit", "quantize", "runtime")
            for path in (ROOT / folder).rglob("*.py")
        ),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
    ]
    pattern = re.compile(r"pip install[^\n]*omnidraft-npu(\[|'|\"|`|$)")
    assert [str(path) for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []


def test_every_extra_that_a_message_names_is_one():
    assert install_hint("export", "optimum").endswith("pip install '.[export,optimum]'")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [
        ast.literal_eval(argument)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "install_hint"
        for argument in call.args
    ]
    assert named
    assert set(named) <= set(known)
