"""A process that forks others and kills them; started as `killed_child.py BUNDLE`.

Each line on stdin is a JSON list: what the next process does, its arguments, and at which of its
calls that change files it is killed; 0 for none. On stdout follows `end`, with the signal that
ended it or 0, and the number of its calls.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import onnxruntime  # noqa: F401  # before the forks, or each would wait for it
from learned_state import LearnedState
from learning_child import CHANGES, CallCounter, say

from omnidraft_npu.cli import cli
from omnidraft_npu.commands import adapters, cache, opened_adapters  # noqa: F401
from omnidraft_npu.errors import StateError
from omnidraft_npu.locks import exclusive
from omnidraft_npu.quantize import export as _export  # noqa: F401
from omnidraft_npu.quantize.placing import check_output, put_in_place
from omnidraft_npu.replacement import partial_path
from omnidraft_npu.runtime import adapter_exchange  # noqa: F401
from omnidraft_npu.state_folder import export_lock, learning

CHANGES |= {"remove", "rename", "rmdir", "link"}


def wait() -> None:
    """Another export holds the lock: that of a process which opens the bundle."""


def replace(bundle: Path, new: str) -> None:
    """The end of `export --force`, with a new bundle that was made elsewhere."""
    with exclusive(export_lock(bundle), wait):
        check_output(bundle, force=True)
        shutil.rmtree(partial_path(bundle), ignore_errors=True)
        shutil.copytree(new, partial_path(bundle))
        sys.setprofile(COUNTER)
        put_in_place(partial_path(bundle), bundle)


def command(bundle: Path, *arguments: str) -> None:
    sys.setprofile(COUNTER)
    cli.main([*arguments[:2], str(bundle), *arguments[2:]], standalone_mode=False)


def learn(bundle: Path, first: str) -> None:
    """Keep answers and versions for ever, and acknowledge each."""
    state = LearnedState(bundle=bundle)
    number = int(first)
    while True:
        try:
            with learning(bundle, "target"):
                state.append(number)
                say("example", number)
                if number % 5 == 0 and number < 100:
                    say("version", state.add_version())
            number += 1
        except StateError:
            pass
        time.sleep(0.1)  # as rarely as people ask; the others poll


ACTIONS = {"replace": replace, "command": command, "learn": learn}
COUNTER = CallCounter(None)


def main() -> None:
    bundle = Path(sys.argv[1])
    for line in sys.stdin:
        what, arguments, call = json.loads(line)
        COUNTER.last = call or None
        child = os.fork()
        if child == 0:
            sys.stdin = Path(os.devnull).open()  # noqa: SIM115  # the command line sets it up
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                ACTIONS[what](bundle, *arguments)
                sys.setprofile(None)
                say("end", 0, COUNTER.count)
            except BaseException as error:  # noqa: BLE001  # whoever started this reports it
                say("failed", repr(error))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            say("end", -os.waitstatus_to_exitcode(status), call)


if __name__ == "__main__":
    main()
