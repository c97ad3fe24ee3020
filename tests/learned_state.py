"""What a learner writes for a target, recognisable when it is read again."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.distillation import PieceLaws
from omnidraft_npu.replay import Example, ReplayBuffer
from omnidraft_npu.runtime.adapter_files import AdapterKey
from omnidraft_npu.runtime.adapter_store import AdapterStore
from omnidraft_npu.state_folder import adapters_path, replay_path

TARGET = "target"
KEY = AdapterKey(drafter_sha256="d" * 64, target_tokenizer_sha256="t" * 64, rank=2)
NAME = "lora.layers.0.q_proj.A"


@dataclass(frozen=True, kw_only=True)
class LearnedState:
    """The adapters and examples of one target of a bundle that has nothing else."""

    bundle: Path

    @property
    def store(self) -> AdapterStore:
        return AdapterStore(adapters_path(self.bundle, TARGET), KEY)

    @property
    def buffer(self) -> ReplayBuffer:
        return ReplayBuffer(folder=replay_path(self.bundle, TARGET), pair="a-b")

    def add_version(self) -> int:
        """Add a version that holds its own number, on top of the one in use."""
        parent = self.store.current
        number = max([0, *self.store._chosen(), *self.store._numbers()]) + 1
        added = self.store.add(version_tensors(number), parent=parent)
        assert added.version == number
        return number

    def append(self, number: int) -> None:
        """Keep an example that holds a number."""
        self.buffer.append(numbered_example(number))

    def numbers(self) -> list[int]:
        """Of the examples that are there, whole."""
        examples = list(self.buffer.examples())
        for example in examples:
            assert set(example.pieces.tolist()) == {int(example.pieces[0])}
        return [int(example.pieces[0]) for example in examples]

    def current(self) -> int:
        """The version in use, checked to be the one that was written."""
        version = self.store.current
        if version:
            assert_version(self.store.load(version), version)
        return version

    def leftovers(self) -> list[Path]:
        """Temporary files."""
        return list((self.bundle / "state").rglob(".*.tmp"))


def version_tensors(number: int) -> dict[str, npt.NDArray[np.float32]]:
    return {NAME: np.full((64, 2), number, np.float32)}


def assert_version(tensors: dict[str, npt.NDArray[np.float32]], number: int) -> None:
    assert tensors.keys() == {NAME}
    np.testing.assert_array_equal(tensors[NAME], np.full((64, 2), number))


def numbered_example(number: int) -> Example:
    laws = PieceLaws(ids=np.full((9, 4), 5, np.int32), probs=np.full((9, 4), 0.25, np.float32))
    return Example(
        pieces=np.full(12, number, np.int32),
        laws=laws,
        tokens=np.arange(9, dtype=np.int32),
        is_drafted=np.ones(9, np.bool_),
        is_direct=np.ones(9, np.bool_),
    )
