"""A pull that is killed at any moment loses nothing, and the next one leaves nothing of it."""

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from omnidraft_npu.store.builtin_models import BuiltinModel, Wheel

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds children through /proc"
)
CHILD = Path(__file__).parents[1] / "pull_child.py"
PART = bytes(range(256)) * 4096


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty store, beside the description of a model of two wheels of 1 MB."""
    wheels = []
    (tmp_path / "wheels").mkdir()
    for package in ("slow_part0", "slow_part1"):
        path = tmp_path / "wheels" / f"{package}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(f"{package}/data", PART)
            info = f"{package}-1.0.dist-info"
            metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
            file.writestr(f"{info}/METADATA", metadata)
            tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            file.writestr(f"{info}/WHEEL", tags)
            file.writestr(f"{info}/RECORD", "")
        data = path.read_bytes()
        wheels.append(
            Wheel(
                project=package.replace("_", "-"),
                version="1.0",
                sha256=hashlib.sha256(data).hexdigest(),
                size=len(data),
                member=f"{package}/data",
            )
        )
    model = BuiltinModel(
        name="tiny",
        summary="",
        file="tiny.gguf",
        wheels=tuple(wheels),
        sha256=hashlib.sha256(PART * 2).hexdigest(),
        size=2 * len(PART),
        licence="none",
    )
    (tmp_path / "model.json").write_text(json.dumps(dataclasses.asdict(model)))
    return tmp_path / "home"


def start(home: Path) -> "subprocess.Popen[bytes]":
    settings = {
        "OMNIDRAFT_HOME": str(home),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(home.parent / "wheels"),
        "PIP_CONFIG_FILE": os.devnull,
    }
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(home.parent / "model.json")],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def pull_whole(home: Path) -> None:
    """A pull that is left alone; of all that was before it, only the model may be left."""
    process = start(home)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    model = home / "models" / "builtin" / "tiny" / "tiny.gguf"
    assert model.read_bytes() == PART * 2
    record = home / "records" / "builtin" / "tiny.json"
    files = {path for path in home.rglob("*") if not path.is_dir()}
    assert files <= {model, record}
    assert [path.name for path in (home / "models").iterdir()] == ["builtin"]


def children(home: Path) -> list[int]:
    """Processes that were started to write into this store."""
    wanted, found = os.fsencode(f"TMPDIR={home}"), []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def check_kills(home: Path, number: int, seed: int) -> None:
    begin = time.monotonic()
    pull_whole(home)
    duration = time.monotonic() - begin
    rng = random.Random(seed)
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    model = home / "models" / "builtin" / "tiny" / "tiny.gguf"
    ended_early = 0
    for i in range(number):
        model.unlink(missing_ok=True)
        process = start(home)
        time.sleep(rng.uniform(0, duration))
        process.send_signal(signals[i % len(signals)])
        process.communicate(timeout=60)
        ended_early += process.returncode != 0
        # A file is there whole, or not at all.
        assert not model.exists() or model.read_bytes() == PART * 2
        deadline = time.monotonic() + 20
        while children(home):
            assert time.monotonic() < deadline, "pip outlived the command that started it"
            time.sleep(0.05)
    assert ended_early > number // 4
    pull_whole(home)


def test_a_few_kills_leave_nothing_behind(home: Path) -> None:
    """Each killed pull left up to 170 MB for a day, and SIGTERM left its pip at work."""
    check_kills(home, 4, seed=1)


@pytest.mark.slow
def test_many_kills_leave_nothing_behind(home: Path) -> None:
    check_kills(home, 45, seed=2)
