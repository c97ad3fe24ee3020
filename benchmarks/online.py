"""Ways to learn on the device, compared: losses, ranks, a shift of tasks, a change of target.

    python benchmarks/online.py BUNDLE --target NAME --train TRAIN --test TEST -o FOLDER

TRAIN and TEST are files of `task_prompts.py`, of either split. The target's answers are recorded
once; then every setting learns from those to TRAIN, in their order, as `omnidraft-npu run` does.
The measure is teacher-forced acceptance on those to TEST, which needs no pass of the target: see
`teacher_forced.py` for what it leaves out. It is given for three draft modes at once: `direct`
(tokens of one piece), `cache` (also those that came before in the stream) and `full`.
Draft lengths of 1 to 8 are counted over the same tokens; `auto` goes by measured times, so
`omnidraft-npu bench --learn --draft-length 4,auto` compares it.

FOLDER keeps recordings, and figures of every setting as it ends, so a run that is broken off goes
on with the setting it was in. `online.json` and `online.png` lie there at the end. A rank below
that of a bundle is learned in its graph with the rest of the tensors zero, which stay so; for one
above give another bundle of the same models.
"""

import argparse
import dataclasses
import functools
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from online_plot import plot
from recorded_answers import Recorded, record
from teacher_forced import HeldOut, measure

from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.files import write_json
from omnidraft_npu.machine import describe_machine
from omnidraft_npu.prompts import read_prompts
from omnidraft_npu.runtime.adapter_store import BASE
from omnidraft_npu.runtime.answer_keeper import Maker, answer_keeper, maker_of
from omnidraft_npu.runtime.learner_adapter import Floats, open_adapter
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.learner_judge import Judge
from omnidraft_npu.runtime.learner_opening import open_learner
from omnidraft_npu.runtime.lora_trainer import Loss, new_adapter
from omnidraft_npu.runtime.opened_pair import OpenedPair, open_pair


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to learn."""

    loss: Loss = "overlap"
    rank: int | None = None
    """None for the bundle's own."""
    is_shift: bool = False
    """Whether the tasks come one after the other, not mixed."""
    follows: bool = False
    """Whether it begins with what `overlap` learned for the first target."""


SETTINGS = {
    "overlap": Setting(),
    "near": Setting(loss="near"),
    "trie": Setting(loss="trie"),
    "paper": Setting(loss="paper"),
    "rank-8": Setting(rank=8),
    "rank-16": Setting(rank=16),
    "rank-32": Setting(rank=32),
    "shift": Setting(is_shift=True),
    "change": Setting(follows=True),
}


def main() -> None:
    """Record, learn in every way, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--target", action="append", required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="default: all")
    parser.add_argument("--max-new-tokens", type=int, default=112)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--raw", action="store_true", help="without a chat template")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--every", type=int, default=32, help="prompts between two measurements")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    sampling = SamplingConfig(temperature=options.temperature, seed=0)
    config = DecodeConfig(max_new_tokens=options.max_new_tokens, sampling=sampling)
    recorder = functools.partial(record, config=config, raw=options.raw, threads=options.threads)
    results: list[dict[str, Any]] = []
    for target in options.target:
        for name in options.setting or SETTINGS:
            setting = SETTINGS[name]
            bundle = _bundle_for(setting, options.bundles)
            if bundle is None or (setting.follows and target == options.target[0]):
                continue
            path = options.output / f"{target}-{name}.json"
            if not path.is_file():
                states = options.output / "state"
                shutil.rmtree(states / f"{target}-{name}", ignore_errors=True)
                pair = open_pair(bundle, target=target, threads=options.threads)
                first = options.target[0]
                learned = states / f"{first}-overlap"
                start = _learned(bundle, first, learned) if setting.follows else {}
                train, test = (
                    recorder(options.output / "answers" / target, bundle, target, prompts)
                    for prompts in (read_prompts(options.train), read_prompts(options.test))
                )
                print(f"{target}, {name}", file=sys.stderr)
                found = learn(
                    _in_state(pair, states / f"{target}-{name}"),
                    setting,
                    train,
                    test,
                    start=start,
                    every=options.every,
                    threads=options.threads,
                )
                write_json(path, {"target": target, "setting": name, **found})
            results.append(json.loads(path.read_text(encoding="utf-8")))
    arguments = {name: str(value) for name, value in vars(options).items()}
    environment = {**describe_machine(), **arguments, "measure": "teacher-forced acceptance"}
    document = {"schema_version": 1, "environment": environment, "settings": results}
    write_json(options.output / "online.json", document)
    plot(results, options.output / "online.png")
    for one in results:
        print(summary(one))


def learn(
    pair: OpenedPair,
    setting: Setting,
    train: Sequence[Recorded],
    test: Sequence[Recorded],
    *,
    start: dict[str, Floats],
    every: int,
    threads: int | None,
) -> dict[str, Any]:
    """The curve of one setting, its lessons and times.

    Args:
        pair: The models, with a state of this setting's own.
        setting: How.
        train: Learned from.
        test: Measured with.
        start: Adapter to begin with; empty for none.
        every: Answers between two measurements.
        threads: Threads of one operator of the training graph.
    """
    bundle, drafter, store = pair.bundle, pair.drafter, pair.adapter.store
    assert bundle is not None
    assert drafter is not None
    assert drafter.entry.training is not None
    assert store is not None
    maker, judge = maker_of(pair, bundle, drafter), Judge(drafter.graph)
    held_out = list(_held_out(maker, test))
    curve: list[dict[str, Any]] = []
    lessons: list[dict[str, Any]] = []
    seen: set[int] = set()
    stream = in_order(train, is_shift=setting.is_shift)
    started, learning_s = time.perf_counter(), 0.0

    def look(done: int) -> None:
        adapter = pair.adapter.adapter
        tasks = measure(judge, dict(adapter.lora), held_out, seen)
        curve.append({"prompts": done, "version": adapter.version, "tasks": tasks})
        left = (time.perf_counter() - started) / max(done, 1) * (len(stream) - done)
        line = f"{done} of {len(stream)}, greedy {tasks['all']['full']['greedy']:.3f}"
        print(f"{line}, {left / 60:.0f} min left" if done else line, file=sys.stderr)

    config = LearnerConfig(loss=setting.loss)
    keeper = answer_keeper(pair, config)
    with open_learner(pair, config, threads=threads) as learner:
        begin = start or narrow_start(drafter.graph.lora_inputs, setting.rank)
        if begin:
            store.use(store.add(begin, parent=BASE).version)
            pair.adapter.load(drafter.graph.lora_inputs)
        look(0)
        for done, one in enumerate(stream, start=1):
            seen |= _of_several_pieces(maker, one)
            keeper.observe(one.answer)
            before = time.perf_counter()
            lesson = learner.step()
            learning_s += time.perf_counter() - before
            if lesson is not None:
                lessons.append({"prompts": done, **dataclasses.asdict(lesson)})
            if done % every == 0 or done == len(stream):
                look(done)
    return {
        "options": dataclasses.asdict(setting),
        "rank": setting.rank or drafter.entry.training.lora_rank,
        "num_train": len(stream),
        "num_test": len(held_out),
        "learning_s": learning_s,
        "curve": curve,
        "lessons": lessons,
    }


def summary(one: dict[str, Any]) -> str:
    """A line: greedy and sampled acceptance of every task before and after, mode `full`."""
    first, last = one["curve"][0]["tasks"], one["curve"][-1]["tasks"]
    parts = [
        f"{task} {kind} {first[task]['full'][kind]:.3f} -> {last[task]['full'][kind]:.3f}"
        for task in first
        for kind in ("greedy", "sampled")
    ]
    what = f"{one['target']}, {one['setting']}, rank {one['rank']}, {one['num_train']} prompts"
    return f"{what} in {one['learning_s']:.0f} s of learning: {'; '.join(parts)}"


def _in_state(pair: OpenedPair, state: Path) -> OpenedPair:
    assert pair.bundle is not None
    assert pair.drafter is not None
    state.mkdir(parents=True, exist_ok=True)
    bundle = dataclasses.replace(pair.bundle, elsewhere=state)
    adapter = open_adapter(bundle, pair.target.entry)
    adapter.load(pair.drafter.graph.lora_inputs)
    return dataclasses.replace(pair, bundle=bundle, adapter=adapter)


def in_order(train: Sequence[Recorded], *, is_shift: bool) -> list[Recorded]:
    """Tasks in turn, or one after the other as they first come."""
    tasks = list(dict.fromkeys(one.task for one in train))
    by_task = {task: [one for one in train if one.task == task] for task in tasks}
    if is_shift:
        return [one for task in tasks for one in by_task[task]]
    longest = max(map(len, by_task.values()))
    return [one[i] for i in range(longest) for one in by_task.values() if i < len(one)]


def narrow_start(inputs: Mapping[str, tuple[int, ...]], rank: int | None) -> dict[str, Floats]:
    """An adapter that changes nothing and is zero beyond a rank, which learning keeps so.

    Args:
        inputs: Shapes of the graph's LoRA inputs.
        rank: At most the graph's; None for no adapter.
    """
    if rank is None:
        return {}
    tensors = new_adapter(inputs)
    for name, tensor in tensors.items():
        if name.endswith(".A"):
            tensor[:, rank:] = 0
    return tensors


def _held_out(maker: Maker, test: Sequence[Recorded]) -> Iterator[HeldOut]:
    for one in test:
        example = maker.make(one.answer.prompt_ids, one.answer.laws)
        if example is not None:
            yield HeldOut(task=one.task, example=example, token_ids=one.answer.laws.token_ids)


def _of_several_pieces(maker: Maker, one: Recorded) -> set[int]:
    """The tokens of an answer that are no single piece."""
    example = maker.make(one.answer.prompt_ids, one.answer.laws)
    if example is None:
        return set()
    return set(one.answer.laws.token_ids[example.tokens[~example.is_direct]].tolist())


def _bundle_for(setting: Setting, bundles: Sequence[Path]) -> Path | None:
    """The first one whose drafter has the rank, or more."""
    if setting.rank is None:
        return bundles[0]
    for bundle in bundles:
        manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
        if manifest["drafter"]["training"]["lora_rank"] >= setting.rank:
            return bundle
    print(f"rank {setting.rank} is left out: no bundle has it", file=sys.stderr)
    return None


def _learned(bundle: Path, target: str, state: Path) -> dict[str, Floats]:
    pair = _in_state(open_pair(bundle, target=target), state)
    return dict(pair.adapter.adapter.tensors)


if __name__ == "__main__":
    main()
