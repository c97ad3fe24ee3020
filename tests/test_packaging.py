"""The shape of the project: what is shipped, what imports what, what loads what."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "toolkit": "omnidraft_npu",
    "quantize": "omnidraft_npu.quantize",
    "runtime": "omnidraft_npu.runtime",
    "calib_data": "omnidraft_npu.calib_data",
}
# Wheels for win_arm64, Linux aarch64 and x86_64 on Python 3.11 to 3.13 were found for each
# (pure Python counts). A new base dependency is added here after the same check.
HAS_WHEELS_EVERYWHERE = {
    "click",
    "filelock",
    "jinja2",
    "msgspec",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-qnn",
    "rich",
    "safetensors",
    "tokenizers",
}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def imported_modules(path: Path, package: str) -> list[tuple[str, bool]]:
    """Absolute names a file imports, each with whether that happens at import time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types(block)
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            prefix = ".".join(base) + "." if node.level else ""
            names = [prefix + (node.module or "")]
        else:
            continue
        found += [(name, node not in lazy) for name in names]
    return found


def _is_for_types(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:`, which never runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def modules():
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).parent.parts
            yield folder, path, ".".join((package, *inner))


def test_every_package_folder_is_shipped():
    shipped = set(project()["tool"]["setuptools"]["packages"])
    found = {package for _, path, package in modules() if path.name == "__init__.py"}
    assert shipped == found


def test_quantize_and_runtime_never_import_each_other():
    for folder, path, package in modules():
        names = [name for name, _ in imported_modules(path, package)]
        other = {"quantize": "omnidraft_npu.runtime", "runtime": "omnidraft_npu.quantize"}
        if folder in other:
            assert not [n for n in names if n.startswith(other[folder])], path


def test_the_core_imports_neither_quantize_nor_runtime():
    for folder, path, package in modules():
        if folder == "toolkit" and package != "omnidraft_npu.commands":
            for name, _ in imported_modules(path, package):
                assert not name.startswith(("omnidraft_npu.quantize", "omnidraft_npu.runtime")), (
                    f"{path} imports {name}"
                )


def test_no_module_of_the_device_imports_torch():
    for folder, path, package in modules():
        if folder in ("toolkit", "runtime"):
            names = [name for name, _ in imported_modules(path, package)]
            assert not [n for n in names if n.split(".")[0] in ("torch", "transformers")], path


def test_commands_are_cheap_to_list():
    """Nothing heavy is imported when a module of the command line is."""
    heavy = {"numpy", "onnx", "onnxruntime", "tokenizers", "rich", "jinja2", "safetensors", "gguf"}
    for path in sorted((ROOT / "toolkit" / "commands").glob("*.py")):
        for name, at_import in imported_modules(path, "omnidraft_npu.commands"):
            assert not (at_import and name.split(".")[0] in heavy), f"{path} imports {name}"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["export", "--help"]])
def test_help_loads_no_heavy_module(arguments):
    code = (
        "import sys\nfrom omnidraft_npu.cli import cli\n"
        f"try:\n    cli({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'transformers', 'tokenizers', 'rich', 'numpy'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.splitlines()[-1] == "LOADED []"


def test_base_dependencies_have_wheels_for_every_platform():
    names = {d.split(">=")[0].split(";")[0].strip() for d in project()["project"]["dependencies"]}
    assert names == HAS_WHEELS_EVERYWHERE


def test_ci_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
