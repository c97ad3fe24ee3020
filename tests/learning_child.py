"""A process that forks learners and kills them; started as `learning_child.py BUNDLE`.

Each line on stdin is a JSON list of how the next learner is killed and the number of its first
example: `["call", n, first]` right at its nth call that changes a file, `["time", seconds,
first]` from outside, `["count", rounds, first]` not at all. The learner acknowledges what it has
written on stdout, and `end` follows with the status of the process, or the number of calls.
With `["answers", 0, first]` it learns from answers of its own to prompts numbered from `first`
on, says its process id first, and is killed by whoever started all this.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import onnxruntime  # noqa: F401  # before the forks, or each would wait for it
from learned_state import TARGET, LearnedState

from omnidraft_npu.state_folder import learning

CHANGES = {
    "chmod",
    "close",
    "export_adapter",
    "flock",
    "fsync",
    "mkdir",
    "open",
    "replace",
    "unlink",
    "write",
}


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class CallCounter:
    """Counts calls that change a file, before and after each; kills at the last."""

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self.last = last

    def __call__(self, frame: object, event: str, argument: object) -> None:
        if event not in ("c_call", "c_return"):
            return
        if getattr(argument, "__name__", "") not in CHANGES:
            return
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def learn(state: LearnedState, first: int, rounds: int) -> None:
    with learning(state.bundle, TARGET):
        for number in range(first, first + rounds):
            state.append(number)
            say("example", number)
            version = state.add_version()
            say("version", version)
            state.store.use(version)
            say("use", version)


def learn_from_answers(bundle: Path, first: int) -> None:
    from omnidraft_npu.config import DecodeConfig
    from omnidraft_npu.runtime.adamw import AdamWConfig
    from omnidraft_npu.runtime.answer_keeper import answer_keeper
    from omnidraft_npu.runtime.learner_config import LearnerConfig
    from omnidraft_npu.runtime.learner_opening import open_learner
    from omnidraft_npu.runtime.opened_pair import open_pair
    from omnidraft_npu.runtime.session import Session

    optimizer = AdamWConfig(learning_rate=0.01, warmup_steps=2)
    config = LearnerConfig(batch=2, passes=2, held_out_every=3, optimizer=optimizer)
    pair = open_pair(bundle, threads=1, proposer="model")
    session = Session(pair)
    with open_learner(pair, config, threads=1) as learner:
        session.observer = answer_keeper(pair, config)
        say("process", os.getpid())
        for number in range(first, first + 10**6):
            session.reset()
            prompt = session.encode(f"number {number} and", raw=True)
            for _ in session.generate(prompt, DecodeConfig(max_new_tokens=24)):
                pass
            say("example", number)
            lesson = learner.step()
            if lesson is not None:
                say("use", lesson.version)


def main() -> None:
    state = LearnedState(bundle=Path(sys.argv[1]))
    for line in sys.stdin:
        how, amount, first = json.loads(line)
        counter = CallCounter(amount if how == "call" else None)
        child = os.fork()
        if child == 0:
            if how == "answers":
                learn_from_answers(state.bundle, first)
            if how != "time":
                sys.setprofile(counter)
            learn(state, first, amount if how == "count" else 10**6)
            sys.setprofile(None)
            say("end", counter.count)
            os._exit(0)
        if how == "time":
            time.sleep(amount)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if status:
            say("end", -os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
