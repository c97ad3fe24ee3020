"""What lies under `state/` stays there, is its user's alone, and goes when it is to go."""

import os
import socket
import stat

import numpy as np
import pytest
from click.testing import CliRunner
from learned_state import numbered_example
from ngram_rows import make_entries

from omnidraft_npu.bridge.ngram_file import NgramStore, PairKey
from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.files import atomic_path, write_json
from omnidraft_npu.locks import exclusive
from omnidraft_npu.replay import ReplayBuffer
from omnidraft_npu.runtime.adapter_files import AdapterKey
from omnidraft_npu.runtime.adapter_store import AdapterStore
from omnidraft_npu.state_folder import adapters_path, learning, ngrams_path, replay_path

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs links and permissions of POSIX")

PLACES = (
    "state",
    "state/adapters",
    "state/adapters/target",
    "state/adapters/same",
    "state/adapters/target/v0001.json",
    "state/adapters/target/v0001.onnx_adapter",
    "state/adapters/target/current.json",
    "state/adapters/target/.v0001.json.0a0a.tmp",
    "state/replay",
    "state/replay/target",
    "state/replay/target/00000001-0123456789abcdef.safetensors",
    "state/replay/target/training.safetensors",
    "state/ngrams",
    "state/ngrams/target.safetensors",
    "state/ngrams/target.lock",
    "state/target.learning.lock",
)


def place_link(path, docs):
    path.symlink_to(docs)


def place_dangling_link(path, docs):
    path.symlink_to(docs / "nowhere")


def place_pipe(path, docs):
    os.mkfifo(path)


def place_socket(path, docs):
    with socket.socket(socket.AF_UNIX) as one:
        directory = os.open(path.parent, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.close(directory)


def invoke(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)))


def run(bundle, *arguments):
    options = ["--max-new-tokens", "8", "--raw", "--threads", "1"]
    return invoke("run", "-b", bundle, *options, "the small drafter", *arguments)


def commands(bundle):
    yield "adapters", "list", bundle
    yield "adapters", "forget", bundle, "--yes"
    yield "adapters", "rollback", bundle, "0"
    yield "cache", "show", bundle
    yield "cache", "prune", bundle


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def docs(tmp_path):
    """Files of the user's, whose names are like ours."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in ("thesis.txt", ".thesis.tmp", ".v0001.json.ab.tmp", "v0001.json", "target.lock"):
        (folder / name).write_text("years of work")
    (folder / "00000001-0123456789abcdef.safetensors").write_text("years of work")
    return folder


@pytest.mark.parametrize("put", [place_link, place_dangling_link, place_pipe, place_socket])
def test_nothing_is_read_written_or_erased_where_a_link_or_pipe_lies(learning_copy, docs, put):
    """`adapters forget` erased every file of the folder that a link led to."""
    before = contents(docs)
    for place in PLACES:
        path = learning_copy / place
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, docs)
        for command in commands(learning_copy):
            result = invoke(*command)
            assert result.exit_code == 1, result.output
            (line,) = result.stderr.strip().splitlines()
            what = "a link" if path.is_symlink() else "neither a folder nor a regular file"
            assert f"{path} is {what}" in line
            assert line.endswith("until it is removed")
        assert contents(docs) == before
        assert path.is_symlink() or not path.is_file()
        path.unlink()


@pytest.mark.parametrize("put", [place_link, place_pipe])
@pytest.mark.parametrize("place", PLACES[:11:5])
def test_an_answer_comes_without_a_state_that_leads_elsewhere(learning_copy, docs, place, put):
    plain = run(learning_copy, "--no-learn")
    path = learning_copy / place
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, docs)
    before = contents(docs)
    for mode in ("auto", "cache"):
        found = run(learning_copy, "--draft-mode", mode)
        assert found.exit_code == 0, found.output
        assert found.stdout == plain.stdout
        assert found.stderr.count(str(path)) == 1
    assert invoke("inspect", learning_copy).exit_code == 0
    assert "state" not in run(learning_copy, "--no-learn").stderr
    assert contents(docs) == before


def test_a_pipe_is_found_however_deep_it_lies(learning_copy):
    folders = [learning_copy / "state"]
    for _ in range(1200):
        folders.append(folders[-1] / "a")
    for folder in folders:
        folder.mkdir()
    os.mkfifo(folders[-1] / "pipe")
    result = invoke("adapters", "list", learning_copy)
    (folders[-1] / "pipe").unlink()
    assert invoke("adapters", "list", learning_copy).exit_code == 0
    for folder in reversed(folders):
        folder.rmdir()
    assert result.exit_code == 1
    assert "is neither a folder nor a regular file" in result.stderr


def test_a_bundle_that_is_reached_by_a_link_is_used_as_ever(learning_copy, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(learning_copy)
    assert run(link).exit_code == 0
    assert list(replay_path(learning_copy, "target").iterdir())
    assert "1 examples" in invoke("adapters", "forget", link, "--yes").stderr
    assert not (learning_copy / "state").exists()


@pytest.mark.parametrize("place", [PLACES[i] for i in (0, 2, 8, 12)])
def test_a_file_where_a_folder_belongs_is_named_and_forget_erases_it(learning_copy, place):
    path = learning_copy / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way")
    found = run(learning_copy)
    assert found.exit_code == 0
    assert found.stderr.count(f"cannot write to {path}, a file where a folder belongs") == 1
    assert invoke("adapters", "list", learning_copy).exit_code == 1
    assert "10 bytes" in invoke("adapters", "forget", learning_copy, "--yes").stderr
    assert not (learning_copy / "state").exists()
    assert run(learning_copy).exit_code == 0
    assert list(replay_path(learning_copy, "target").iterdir())


def test_a_state_that_may_not_be_read_never_stops_an_answer(learning_copy, monkeypatch):
    """Root may read anything, so the system is made to refuse."""
    plain = run(learning_copy, "--no-learn")
    run(learning_copy)
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("replay"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = run(learning_copy)
    assert (found.exit_code, found.stdout) == (0, plain.stdout)
    assert found.stderr.count("Permission denied") == 1
    assert "Permission" not in run(learning_copy, "--no-learn").stderr


def learn_in_all_ways(bundle):
    for mode in ("auto", "cache"):
        assert run(bundle, "--draft-mode", mode).exit_code == 0
    other = open_bundle(bundle).manifest.targets
    key = PairKey(drafter_sha256="d" * 64, target_sha256="e" * 64)
    for name in (*other, "removed-2.5"):
        with learning(bundle, name):
            ReplayBuffer(folder=replay_path(bundle, name), pair="a-b").append(numbered_example(3))
        NgramStore(path=ngrams_path(bundle, name), key=key).save(make_entries((7, [1, 2], 1)))


def test_without_learning_nothing_is_written_and_nothing_of_it_is_read(learning_copy):
    """`--draft-mode cache` saved what it had learned all the same."""
    for mode in ("auto", "cache", "full", "direct"):
        assert run(learning_copy, "--no-learn", "--draft-mode", mode).exit_code == 0
    assert not (learning_copy / "state").exists()
    plain = run(learning_copy, "--no-learn").stdout
    learn_in_all_ways(learning_copy)
    before = contents(learning_copy / "state")
    times = {p: p.stat().st_mtime_ns for p in (learning_copy / "state").rglob("*")}
    for mode in ("auto", "cache"):
        assert run(learning_copy, "--no-learn", "--draft-mode", mode).stdout == plain
    assert contents(learning_copy / "state") == before
    assert {p: p.stat().st_mtime_ns for p in (learning_copy / "state").rglob("*")} == times


def test_forget_erases_what_every_target_has_learned_and_counts_its_bytes(learning_copy):
    learn_in_all_ways(learning_copy)
    state = learning_copy / "state"
    left = state / "ngrams" / ".same.safetensors.0a0a.tmp"
    left.write_bytes(b"half")
    (state / "ngrams" / "same.unreadable-1.safetensors").write_bytes(b"damaged")
    found = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
    result = invoke("adapters", "forget", learning_copy, "--yes")
    assert result.exit_code == 0, result.output
    assert f"{found:,} bytes" in result.stderr
    assert "for removed-2.5, same, target," in result.stderr
    assert not state.exists()


def test_forget_leaves_files_that_are_not_ours(learning_copy):
    learn_in_all_ways(learning_copy)
    state = learning_copy / "state"
    foreign = [
        state / name
        for name in (
            "notes.txt",
            "replay/target/notes.txt",
            "replay/target/.notes.tmp",
            "adapters/mine/photo.jpg",
            "ngrams/list.csv",
            "ngrams/.list.csv.swp",
        )
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    assert run(learning_copy).exit_code == 0
    assert invoke("adapters", "forget", learning_copy, "--yes").exit_code == 0
    assert sorted(p for p in state.rglob("*") if p.is_file()) == sorted(foreign)


def test_forget_of_one_target_leaves_the_others(learning_copy):
    learn_in_all_ways(learning_copy)
    assert invoke("adapters", "forget", learning_copy, "--target", "same", "--yes").exit_code == 0
    left = {
        p.relative_to(learning_copy / "state").as_posix() for p in learning_copy.rglob("state/*/*")
    }
    assert {name for name in left if "same" in name} == set()
    assert {"replay/target", "ngrams/target.safetensors", "replay/removed-2.5"} <= left
    removed = invoke("adapters", "forget", learning_copy, "--target", "removed-2.5", "--yes")
    assert removed.exit_code == 0
    assert not (learning_copy / "state" / "ngrams" / "removed-2.5.safetensors").exists()
    unknown = invoke("adapters", "forget", learning_copy, "--target", "nobody", "--yes")
    assert unknown.exit_code == 2
    assert "no target 'nobody'" in unknown.stderr


@pytest.fixture
def umask():
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


def modes(folder):
    """Permissions of a folder and everything in it, by kind."""
    found = {"files": set(), "folders": set()}
    for path in (folder, *folder.rglob("*")):
        kind = "folders" if path.is_dir() else "files"
        found[kind].add(stat.S_IMODE(path.stat().st_mode))
    return found


PRIVATE = {"files": {0o600}, "folders": {0o700}}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_what_is_learned_is_its_users_alone_whatever_the_umask(learning_copy, mask, umask):
    """Files were 0644 with any umask, and prompts can be decoded from them."""
    umask(mask)
    learn_in_all_ways(learning_copy)
    learn_adapter(learning_copy)
    assert modes(learning_copy / "state") == PRIVATE


def learn_adapter(bundle):
    store = adapter_store(bundle)
    with learning(bundle, "target"):
        store.add({"lora.layers.0.q_proj.A": np.ones((4, 2), np.float32)}, parent=0)
        write_json(store.folder / "current.json", {"version": 1}, private=True)


def adapter_store(bundle):
    opened = open_bundle(bundle)
    return AdapterStore(adapters_path(bundle, "target"), AdapterKey.of(opened, opened.target(None)))


def test_what_an_earlier_version_left_readable_is_closed_when_more_is_learned(learning_copy, umask):
    umask(0)
    learn_in_all_ways(learning_copy)
    learn_adapter(learning_copy)
    state = learning_copy / "state"
    for path in (state, *state.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)
    learn_in_all_ways(learning_copy)
    assert modes(state) == PRIVATE


def test_a_lock_of_the_state_is_its_users_alone(learning_copy, umask):
    umask(0)
    with learning(learning_copy, "target"):
        assert modes(learning_copy / "state") == PRIVATE


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_everything_else_keeps_the_umask(tmp_path, mask, umask):
    umask(mask)
    with atomic_path(tmp_path / "file") as path:
        path.write_text("x")
    write_json(tmp_path / "document", {})
    with exclusive(tmp_path / "lock", lambda: None):
        found = {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert found == {0o666 & ~mask}


@pytest.mark.parametrize("put", [place_link, place_dangling_link, place_pipe])
def test_a_lock_that_is_no_regular_file_is_refused(tmp_path, docs, put):
    """A version of filelock emptied what a linked lock led to (CVE-2025-68146)."""
    put(tmp_path / "lock", docs / "thesis.txt")
    with (
        pytest.raises(OSError, match="not a regular file"),
        exclusive(tmp_path / "lock", lambda: 0),
    ):
        pytest.fail("it is held")
    assert (docs / "thesis.txt").read_text() == "years of work"


def test_a_lock_that_another_took_the_place_of_is_left_alone(tmp_path):
    lock = tmp_path / "lock"
    with exclusive(lock, lambda: None):
        lock.rename(tmp_path / "moved")
        lock.write_text("another's")
    assert lock.read_text() == "another's"
