"""What a bundle has learned, and adapters from elsewhere."""

import contextlib
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from .mutations import Mutator
from .outcomes import call, command, damaged, replaced


class StateSite:
    """What a bundle has learned, and adapters from elsewhere."""

    def __init__(self, root: Path, original: Path) -> None:
        from learned_state import numbered_example

        from omnidraft_npu.bridge.ngram_entries import NgramEntries
        from omnidraft_npu.bridge.ngram_file import PairKey, write_entries
        from omnidraft_npu.bundle import open_bundle
        from omnidraft_npu.runtime.adapter_exchange import lora_shapes
        from omnidraft_npu.runtime.adapter_files import AdapterKey
        from omnidraft_npu.runtime.adapter_store import AdapterStore
        from omnidraft_npu.runtime.learner_state import Progress, training_path, write_training
        from omnidraft_npu.runtime.lora_trainer import new_adapter
        from omnidraft_npu.runtime.past_recall import replay_of
        from omnidraft_npu.runtime.peft_files import write_peft
        from omnidraft_npu.state_folder import adapters_path, ngrams_path

        self.root = shutil.copytree(original, root / "state_bundle")
        self.bundle = open_bundle(self.root)
        self.target = self.bundle.target(None)
        self.key = AdapterKey.of(self.bundle, self.target)
        self.shapes = lora_shapes(self.bundle)
        tensors = new_adapter(self.shapes)
        self.store = AdapterStore(adapters_path(self.root, self.target.name), self.key)
        for parent in (0, 1):
            self.store.use(self.store.add(tensors, parent=parent).version)
        self.buffer = replay_of(self.bundle, self.target)
        self.buffer.append(numbered_example(7))
        self.training = training_path(self.buffer.folder)
        write_training(self.training, Progress(newest=1), tensors, self.key)
        self.ngrams = ngrams_path(self.root, self.target.name)
        self.ngrams.parent.mkdir(parents=True)
        self.pair = PairKey(
            drafter_sha256=self.bundle.manifest.drafter.tokenizer_sha256,
            target_sha256=self.target.tokenizer_sha256,
        )
        entries = NgramEntries(
            token_ids=np.array([300, 305], np.int32),
            offsets=np.array([0, 2, 5], np.int32),
            pieces=np.array([10, 11, 12, 13, 14], np.int32),
            uses=np.array([1, 2], np.int32),
        )
        write_entries(self.ngrams, entries, self.pair)
        self.peft = root / "peft"
        write_peft(self.peft, tensors, key=self.key, drafter="d")
        self.files = {p: p.read_bytes() for p in (self.root / "state").rglob("*") if p.is_file()}

    def state(self, mutator: Mutator) -> str:
        from omnidraft_npu.bridge.ngram_file import NgramStore
        from omnidraft_npu.runtime.adapter_store import AdapterStore
        from omnidraft_npu.runtime.learner_state import read_training

        path = mutator.one([p for p in self.files if p.suffix != ".lock"])
        data = damaged(mutator, path, self.files[path])
        with contextlib.ExitStack() as stack:
            if path.suffix == ".onnx_adapter":
                record = path.with_suffix(".json")
                document = json.loads(self.files[record])
                document["sha256"] = hashlib.sha256(data).hexdigest()
                stack.enter_context(replaced(record, json.dumps(document).encode()))
            stack.enter_context(replaced(path, data))
            if mutator.chance(0.05):
                shown = mutator.one([("adapters", "list"), ("cache", "list")])
                return command(*shown, str(self.root))

            def read() -> None:
                store = AdapterStore(self.store.folder, self.key)
                store.records()
                store.load(store.current)
                read_training(self.training, self.key)
                NgramStore(path=self.ngrams, key=self.pair).load()
                list(self.buffer.examples())

            return call(read)

    def examples(self, mutator: Mutator) -> str:
        """Examples whose hash is right and whose numbers are not."""
        from safetensors.numpy import load, save

        from omnidraft_npu import replay
        from omnidraft_npu.bridge.pieces import PieceEncoder
        from omnidraft_npu.runtime.past_recall import recall_past

        path = next(p for p in self.files if p.parent == self.buffer.folder and p.name[0] == "0")
        arrays = load(self.files[path])
        name = mutator.one(sorted(arrays))
        arrays[name] = damaged_array(mutator, arrays[name])
        metadata = {
            "format_version": "1",
            "pair": self.buffer.pair,
            "sha256": replay._digest(arrays),
        }
        tokenizers = [self.tokenizer(m.folder) for m in (self.bundle.manifest.drafter, self.target)]
        vocabularies = [(tokenizer, vocabulary_of(tokenizer)) for tokenizer in tokenizers]
        drafter, target = vocabularies
        encoder = PieceEncoder(target[0].json, target[1], target[0].model)
        with replaced(path, save(arrays, metadata)):
            return call(lambda: recall_past(self.buffer, drafter[1], encoder))

    def tokenizer(self, folder: str) -> Any:
        from omnidraft_npu.text.tokenizer import Tokenizer

        return Tokenizer.from_folder(self.root / folder)

    def imports(self, mutator: Mutator) -> str:
        """PEFT folders, and `.onnx_adapter` files."""
        from omnidraft_npu.runtime.adapter_exchange import import_adapter

        if mutator.chance(0.2):
            path = self.root.parent / "given.onnx_adapter"
            original = self.store.path(1).read_bytes()
            with replaced(path, mutator.bytes(original)):
                return call(lambda: import_adapter(path, self.bundle, self.key))
        path = mutator.one(sorted(self.peft.iterdir()))
        with replaced(path, damaged(mutator, path, path.read_bytes())):
            if mutator.chance(0.03):
                return command("adapters", "import", str(self.root), str(self.peft))
            return call(lambda: import_adapter(self.peft, self.bundle, self.key))


def vocabulary_of(tokenizer: Any) -> Any:
    from omnidraft_npu.bridge.vocabulary import Vocabulary

    return Vocabulary.from_tokenizer_json(tokenizer.json, eos_token_ids=(2,), bos_token_id=1)


def damaged_array(mutator: Mutator, array: Any) -> Any:
    """Other values, another type, or another shape."""
    kind = int(mutator.rng.integers(4))
    if kind == 0:
        types = [np.int32, np.int64, np.float32, np.float16, np.uint8, np.bool_]
        return array.astype(mutator.one(types))
    if kind == 1:
        return mutator.one([array[:0], array[..., None], array[:-1], array.reshape(-1)]).copy()
    array = array.copy()
    at = int(mutator.rng.integers(array.size))
    numbers = [-1, 299, 2**31 - 1, -(2**31)] if array.dtype == np.int32 else [np.nan, -1, np.inf, 9]
    with np.errstate(all="ignore"):
        array.flat[at] = mutator.one(numbers)
    return array
