"""Memory and threads that run out are one line, whoever notices it: exit code 1, never a trace."""

import errno
import os
import subprocess
import sys
import threading

import onnxruntime as ort
import pytest
from click.testing import CliRunner
from tiny_bundle import write_bundle

from omnidraft_npu import memory
from omnidraft_npu.cli import cli
from omnidraft_npu.commands import inspect
from omnidraft_npu.config import DeviceConfig
from omnidraft_npu.errors import ConfigError, PromptError, ResourceError
from omnidraft_npu.machine import usable_threads
from omnidraft_npu.runtime.providers import open_cpu_session
from omnidraft_npu.runtime.session import open_session
from omnidraft_npu.system_errors import limit_reached

MODULE = [sys.executable, "-m", "omnidraft_npu"]
MEMORY_ERRORS = [
    MemoryError(),
    MemoryError("Unable to allocate 3.00 MiB for an array with shape (1, 3, 4096, 64)"),
    RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"),
    RuntimeError("bad allocation"),
    ImportError("libx.so: failed to map segment from shared object"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError(errno.ENOMEM, "Cannot allocate memory", "some/file"),
    ValueError("DefaultCPUAllocator: can't allocate memory: out of memory"),
]
THREAD_ERRORS = [
    RuntimeError("can't start new thread"),
    RuntimeError("PosixThread pthread_create failed, error code: 11 error msg: Resource"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", sys.executable),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("resources"))


def line_of(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(inspect, "open_bundle", fail)
    done = CliRunner().invoke(cli, ["inspect", "x"])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=repr)
def test_every_error_of_memory_is_one_line_with_what_was_wanted_and_what_helps(monkeypatch, error):
    line = line_of(monkeypatch, error)
    assert line.startswith("Error: memory ran out")
    assert "--precision int4" in line
    if isinstance(error, MemoryError):
        assert str(error) in line


@pytest.mark.parametrize("error", THREAD_ERRORS, ids=repr)
def test_every_error_of_threads_is_one_line_and_no_interruption(monkeypatch, error):
    line = line_of(monkeypatch, error)
    assert "may start no more threads" in line
    assert "--threads 1" in line


def test_openblas_interrupting_its_own_process_is_told_as_a_lack_of_threads(monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert "may start no more threads" in line_of(monkeypatch, KeyboardInterrupt())


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), OSError(5, "no")])
def test_other_errors_are_not_taken_for_a_lack_of_memory_or_threads(error):
    assert limit_reached(error) is None


@pytest.mark.parametrize("error", [MEMORY_ERRORS[2], THREAD_ERRORS[1]], ids=["memory", "threads"])
def test_a_graph_that_gets_no_memory_or_thread_is_not_called_damaged(bundle, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ort, "InferenceSession", fail)
    with pytest.raises(ResourceError):
        open_cpu_session(next(bundle.rglob("*.onnx")))


ROOMS = {
    "_machine_room": lambda _: 1000,
    "_group_room": lambda: 1000,
    "_address_room": lambda: 1000,
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_model_that_cannot_fit_is_refused_before_it_is_opened(bundle, monkeypatch, room):
    monkeypatch.setattr(memory, room, ROOMS[room])
    monkeypatch.setattr(ort, "InferenceSession", None)
    with pytest.raises(ResourceError) as told:
        open_session(bundle, devices=DeviceConfig(draft_device="cpu", target_device="cpu"))
    assert "opening other takes about" in str(told.value)
    assert "0.0 MB is free" in str(told.value)
    assert "--precision int4" in str(told.value)


def test_the_cache_of_a_long_context_counts_against_the_addresses_only(bundle, monkeypatch):
    # Room for the graph, and not for what a conversation takes; it is touched as it fills.
    monkeypatch.setattr(memory, "_address_room", lambda: 60 * 2**20)
    with pytest.raises(ResourceError, match="a smaller --context-length"):
        open_session(bundle)
    monkeypatch.setattr(memory, "_address_room", lambda: None)
    monkeypatch.setattr(memory, "_machine_room", lambda _: 30 * 2**20)
    open_session(bundle)


def test_the_room_of_a_container_is_its_limit_less_what_it_cannot_drop(tmp_path):
    def write(limit, used, files):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {files}\nactive_file 9\n")

    write(1000, 700, 100)
    assert memory._group_room(tmp_path) == 400
    write(1000, 1200, 100)
    assert memory._group_room(tmp_path) == 0
    write("max", 700, 100)
    assert memory._group_room(tmp_path) is None
    assert memory._group_room(tmp_path / "none") is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [160, 200, 230, 260, 300, 340])
def test_a_process_that_may_have_little_memory_ends_with_one_line(bundle, megabytes):
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20))

    command = [*MODULE, "run", "-b", str(bundle), "--raw", "--max-new-tokens", "3", "abc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    if done.returncode == 0:
        return  # It is enough.
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_threads_are_bounded_by_the_processors_with_one_line(caplog, bundle):
    most = os.cpu_count() or 1
    assert usable_threads(None) is None
    assert usable_threads(1) == 1
    assert not caplog.records
    for threads in (20_000, 2**31, 2**63):
        caplog.clear()
        assert usable_threads(threads) == most
        (record,) = caplog.records
        assert str(threads) in record.getMessage()
    for threads in (0, -1):
        with pytest.raises(ConfigError, match=f"threads is {threads}, must be at least 1"):
            usable_threads(threads)
    open_cpu_session(next(bundle.rglob("*.onnx")), threads=2**40)


@pytest.mark.parametrize("command", ["run", "bench", "verify"])
def test_threads_below_one_are_refused_by_every_command_before_anything_is_opened(command):
    done = CliRunner().invoke(cli, [command, "-b", "nothing", "--threads", "0"])
    assert done.exit_code == 2
    assert "threads is 0, must be at least 1" in done.stderr


def test_a_prompt_that_no_context_holds_is_refused_before_it_is_tokenised(bundle, monkeypatch):
    session = open_session(bundle)
    tokenizer = type(session.pair.target.tokenizer)
    monkeypatch.setattr(tokenizer, "encode", None)
    for prompt in ("\0" * 5_000_000, "é" * 5_000_000, "\ud800" * 5_000_000):
        with pytest.raises(PromptError, match="bytes, too many for the context of 96 tokens"):
            session.encode(prompt)
