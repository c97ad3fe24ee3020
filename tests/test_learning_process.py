"""Learning in a process of its own, started by `omnidraft-npu run` at a terminal."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from background_runs import finish, finish_both, keep_answers, report_of, start_run, wait_for
from click.testing import CliRunner

from omnidraft_npu.activity import at_work
from omnidraft_npu.cli import cli
from omnidraft_npu.state_folder import only_learner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def bundle(learning_copy, home):
    """With as many answers as make a lesson but for one, and one that is held out."""
    keep_answers(learning_copy, 8)
    return learning_copy


def list_of(bundle):
    listed = CliRunner().invoke(cli, ["adapters", "list", str(bundle), "--json"])
    assert listed.exit_code == 0, listed.output
    return json.loads(listed.stdout)["learner"]


def is_alive(process):
    """Whether it is more than a zombie, which is for others to reap."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_learning_outlives_the_command_and_pauses_while_another_is_at_work(bundle, home):
    """It holds no pipe of ours, has the lowest priority, and reports what came of it."""
    assert list_of(bundle) is None
    with at_work():
        _, shown = finish_both(*start_run(bundle, home))
        assert "learning from 8 answers in the background" in shown
        process = wait_for(lambda: report_of(bundle))["process"]
        time.sleep(1.0)
        assert (report_of(bundle)["updates"], report_of(bundle)["ended"]) == ([], None)
        assert list_of(bundle)["is_at_work"]
        assert os.getpriority(os.PRIO_PROCESS, process) == 19
        assert os.getsid(process) == process
        streams = [Path(f"/proc/{process}/fd/{i}").readlink() for i in range(3)]
        assert streams == [Path("/dev/null")] * 3
        assert Path(f"/proc/{process}/cwd").resolve() == Path(sys.prefix).resolve()
        arguments = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        assert arguments[1:4] == ["-P", "-m", "omnidraft_npu.commands.learning_process"]
    report = wait_for(lambda: report_of(bundle)["ended"] and report_of(bundle))
    assert "learned from 8 answers" in report["updates"][0]
    assert report["error"] is None
    wait_for(lambda: not is_alive(process))
    learner = list_of(bundle)
    assert (learner["is_at_work"], learner["updates"]) == (False, report["updates"])
    shown = CliRunner().invoke(cli, ["adapters", "list", str(bundle)]).stdout
    assert "learning in the background ended" in shown
    assert "learned from 8 answers" in shown


def test_a_learner_that_is_asked_to_end_ends_soon_and_loses_nothing(bundle, home):
    with at_work():
        finish(*start_run(bundle, home))
        process = wait_for(lambda: report_of(bundle))["process"]
        os.kill(process, signal.SIGTERM)
        wait_for(lambda: not is_alive(process), seconds=20)
    report = report_of(bundle)
    assert report["ended"]
    assert (report["error"], report["updates"]) == (None, [])
    with only_learner(bundle, "target"):
        pass
    finish(*start_run(bundle, home))
    report = wait_for(lambda: report_of(bundle)["updates"] and report_of(bundle))
    assert "learned from 8 answers" in report["updates"][0]
    wait_for(lambda: not is_alive(report["process"]))


def test_why_learning_failed_is_reported(bundle, home):
    """The graph was damaged after the bundle was opened, so only a lesson notices."""
    graph = bundle / "drafter" / "cpu" / "lora_step.onnx"
    with at_work():
        finish(*start_run(bundle, home))
        wait_for(lambda: report_of(bundle))
        whole = graph.read_bytes()
        graph.write_bytes(b"no graph")
    report = wait_for(lambda: report_of(bundle)["ended"] and report_of(bundle))
    assert "lora_step.onnx" in report["error"]
    graph.write_bytes(whole)
    shown = CliRunner().invoke(cli, ["adapters", "list", str(bundle)]).stdout
    assert "it failed: " in shown
    finish(*start_run(bundle, home))
    time.sleep(1.0)
    assert report_of(bundle) == report, "a failure was repeated at once"
    wait_for(lambda: not is_alive(report["process"]))


def test_a_closed_stderr_is_no_terminal(bundle, home):
    command = [sys.executable, "-m", "omnidraft_npu", "run", "-b", str(bundle), "--raw", "two"]
    line = f"{shlex.join(command)} --max-new-tokens 24 2>&-"
    done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0
    assert done.stdout
    assert report_of(bundle) == {}


@pytest.mark.parametrize("options", [["--json"], ["--no-learn"], []], ids=str)
def test_nothing_is_started_for_scripts(bundle, home, options):
    """With --json and --no-learn not at a terminal either."""
    finish(*start_run(bundle, home, *options, is_terminal=bool(options)))
    time.sleep(1.0)
    assert report_of(bundle) == {}
