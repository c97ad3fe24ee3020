"""What is fuzzed: files of a bundle, of its state, of checkpoints, and what users type.

A site knows its files as they should be, damages one of them, and calls what reads it. Hashes are
made again after the damage, so that the content is reached. Everything is put back afterwards.
"""

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result
from synthetic_metadata import metadata_of

from omnidraft_npu.cli import cli
from omnidraft_npu.errors import OmniDraftError

from .mutations import NUMBERS, WORDS, Mutator

EXIT_CODES = {0, 1, 2, 3, 4, 5, 130}


class WrongError(AssertionError):
    """The program did something else than to succeed, or to fail in one line."""


def call(function: Callable[[], object]) -> str:
    """Call a reader: `ok`, or the class of the error that it may raise."""
    try:
        function()
    except OmniDraftError as error:
        if not str(error):
            raise WrongError("an error without words") from error
        return type(error).__name__
    return "ok"


def command(*arguments: str, stdin: bytes | None = None) -> str:
    """Run a command line: `ok`, or its exit code."""
    return check_result(CliRunner().invoke(cli, list(arguments), input=stdin))


def check_result(result: Result) -> str:
    """Refuse a traceback, several lines of error, or what a terminal would obey."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in EXIT_CODES:
        raise WrongError(f"exit code {result.exit_code}")
    lines = result.stderr.splitlines()
    errors = [i for i, line in enumerate(lines) if line.startswith("Error:")]
    if result.exit_code in (1, 2, 4, 5) and errors != [len(lines) - 1]:
        raise WrongError(f"exit code {result.exit_code} with {result.stderr[:600]!r}")
    for text in (result.stderr, result.stdout):
        if bad := [c for c in text if not c.isprintable() and c != "\n"]:
            raise WrongError(f"{bad[0]!r} in the output {text[:300]!r}")
    if max(map(len, lines), default=0) > 4000:
        raise WrongError(f"a line of {max(map(len, lines))} characters")
    return "ok" if result.exit_code == 0 else f"exit {result.exit_code}"


@contextlib.contextmanager
def replaced(path: Path, data: bytes) -> Iterator[None]:
    """Other bytes in a file, for the block."""
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(data)
    try:
        yield
    finally:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(before)


def damaged(mutator: Mutator, path: Path, data: bytes) -> bytes:
    """Damage that fits what a file is."""
    if path.suffix in (".json", ".jsonl"):
        try:
            return mutator.json(json.loads(data))
        except ValueError:
            return mutator.bytes(data)
    if path.suffix == ".safetensors":
        return mutator.safetensors(data)
    return mutator.bytes(data)


class BundleSite:
    """Files of a bundle whose hashes are right whatever they hold."""

    def __init__(self, root: Path, original: Path) -> None:
        self.bundle = shutil.copytree(original, root / "bundle")
        self.manifest = json.loads((self.bundle / "manifest.json").read_text())
        small = [p for p in sorted(self.bundle.rglob("*")) if p.is_file()]
        self.files = {p: p.read_bytes() for p in small if p.suffix == ".json"}
        self.spelling = next(self.bundle.glob("spellings/*/*.safetensors"))

    def manifest_bytes(self, path: Path, data: bytes) -> bytes:
        """The manifest in which a file has this content."""
        document = json.loads(json.dumps(self.manifest))
        relative = path.relative_to(self.bundle).as_posix()
        digest = hashlib.sha256(data).hexdigest()
        document["files"][relative] = {"size": len(data), "sha256": digest}
        return json.dumps(document).encode()

    @contextlib.contextmanager
    def with_file(self, path: Path, data: bytes) -> Iterator[None]:
        manifest = self.bundle / "manifest.json"
        with contextlib.ExitStack() as stack:
            if path != manifest:
                stack.enter_context(replaced(manifest, self.manifest_bytes(path, data)))
            stack.enter_context(replaced(path, data))
            yield

    def run(self, *more: str, stdin: bytes | None = None) -> str:
        run = ("run", "-b", str(self.bundle), "--max-new-tokens", "2", "--json", "--no-learn")
        return command(*run, *more, stdin=stdin)

    def manifests(self, mutator: Mutator) -> str:
        from omnidraft_npu.bundle import open_bundle

        path = self.bundle / "manifest.json"
        with self.with_file(path, mutator.json(self.manifest)):
            if mutator.chance(0.1):
                return command("inspect", str(self.bundle), *mutator.one([[], ["--json"]]))
            return call(lambda: open_bundle(self.bundle))

    def documents(self, mutator: Mutator) -> str:
        """Any JSON file of the bundle, read as a command reads it."""
        path = mutator.one(list(self.files))
        data = damaged(mutator, path, self.files[path])
        with self.with_file(path, data):
            target = ["--target", path.parent.name] if path.parts[-3] == "targets" else []
            return self.run("hi", *target)

    def tokenizers(self, mutator: Mutator) -> str:
        """A model's tokenizer by itself: text to ids and back, bytes of every id."""
        from omnidraft_npu.bridge.pieces import PieceEncoder
        from omnidraft_npu.bridge.vocabulary import Vocabulary
        from omnidraft_npu.text.tokenizer import Tokenizer

        names = ("tokenizer.json", "tokenizer_config.json")
        path = mutator.one([p for p in self.files if p.name in names])

        def read() -> None:
            tokenizer = Tokenizer.from_folder(path.parent)
            ids = tokenizer.encode("a small 雪 drafter", add_special=True)
            tokenizer.decode(ids)
            if tokenizer.has_chat_template:
                tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
            vocabulary = Vocabulary.from_tokenizer_json(
                tokenizer.json, size=300, eos_token_ids=(2,), bos_token_id=1
            )
            PieceEncoder(tokenizer.json, vocabulary, tokenizer.model).encode(b"a small drafter")

        with replaced(path, damaged(mutator, path, self.files[path])):
            return call(read)

    def spellings(self, mutator: Mutator) -> str:
        """The trie: opened and walked as a drafter would."""
        from omnidraft_npu.bridge.trie import SpellingTrie
        from omnidraft_npu.bridge.walk import TrieWalk
        from omnidraft_npu.examples import trie_paths

        metadata = json.loads(self.spelling.read_bytes()[8:].split(b"}", 1)[0] + b"}}")
        marks = metadata["__metadata__"]

        def read() -> None:
            trie = SpellingTrie.load(
                self.spelling,
                drafter_sha256=marks["drafter_tokenizer_sha256"],
                target_sha256=marks["target_tokenizer_sha256"],
            )
            trie.check_sizes(num_pieces=280, num_targets=310)
            walk = TrieWalk(trie, 280)
            for _ in range(20):
                if walk.step(mutator.rng.normal(size=280).astype(np.float32)) is None:
                    break
            walk.finish()
            trie_paths(trie)

        with replaced(self.spelling, mutator.safetensors(self.spelling.read_bytes())):
            return call(read)

    def graphs(self, mutator: Mutator) -> str:
        """A decoder that takes or gives other things than the manifest says."""
        import onnx

        path = mutator.one(sorted(self.bundle.glob("*/cpu/model.onnx")))
        path = mutator.one([path, *sorted(self.bundle.glob("targets/*/cpu/model.onnx"))])
        model = onnx.load(path, load_external_data=False)
        for _ in range(int(mutator.rng.choice([1, 1, 2]))):
            _edit_graph(mutator, model.graph)
        with self.with_file(path, model.SerializeToString()):
            target = ["--target", path.parent.parent.name] if "targets" in path.parts else []
            return self.run("hi", *target)

    def options(self, mutator: Mutator) -> str:
        """What users type: values of options, names, prompts."""
        values = [*WORDS, "0", "-0", "1e-40", "1e38", "inf", "nan", "2147483648", "1e5", "٣", "0x1"]
        name, value = mutator.one(OPTIONS), mutator.one(values).replace("\0", "")
        if name == "--threads" and value == "1e5":
            value = "-5"
        temperature = mutator.one(["0", "0", "1", "1e-40", "1e38"])
        return self.run("hi", "--temperature", temperature, name, value)

    def names(self, mutator: Mutator) -> str:
        """Arguments that name a bundle, a file or a thing in it."""
        # No system can hand a NUL to a program as a part of an argument.
        word, bundle = mutator.one(WORDS).replace("\0", ""), str(self.bundle)
        return command(
            *mutator.one(
                [
                    ("inspect", word),
                    ("adapters", "list", word),
                    ("adapters", "list", bundle, "--target", word),
                    ("adapters", "rollback", bundle, word),
                    ("adapters", "import", bundle, word),
                    ("adapters", "export", bundle, word),
                    ("cache", "list", bundle, "--target", word),
                    ("cache", word, bundle),
                    ("run", "-b", word, "hi"),
                    ("run", "-b", bundle, "--no-learn", "-f", word),
                    ("verify", word),
                    ("bench", "-b", word),
                    ("export", "--drafter", word, "--target", word, "-o", word),
                    (word, "--help"),
                ]
            )
        )

    def prompts(self, mutator: Mutator) -> str:
        """Prompts from stdin and from files."""
        from omnidraft_npu.prompts import read_prompts

        rows = [{"prompt": "a b", "task": "t"}, {"prompt": "二"}]
        if mutator.chance(0.1):
            data = mutator.bytes(mutator.text("two 雪 words\n").encode("utf-8", "surrogatepass"))
            return self.run(stdin=data[:20_000])
        lines = [
            mutator.json(row) if mutator.chance(0.6) else json.dumps(row).encode() for row in rows
        ]
        path = self.bundle.parent / mutator.one(["p.jsonl", "p.txt"])
        with replaced(path, b"\n".join(lines)):
            return call(lambda: read_prompts(path))

    def templates(self, mutator: Mutator) -> str:
        """Chat templates: put together from parts that parse, that do not, and that never end."""
        from omnidraft_npu.text.tokenizer import Tokenizer

        parts = [str(mutator.one(TEMPLATE_PARTS)) for _ in range(int(mutator.rng.integers(1, 5)))]
        template = "".join(parts)
        if mutator.chance(0.3):
            template = mutator.text(template)
        path = next(p for p in self.files if p.name == "tokenizer_config.json")
        config = json.loads(self.files[path]) | {"chat_template": template}

        def render() -> None:
            tokenizer = Tokenizer.from_folder(path.parent)
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])

        with replaced(path, json.dumps(config).encode("utf-8", "surrogatepass")):
            return call(render)


OPTIONS = (
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repetition-penalty",
    "--seed",
    "--threads",
    "--draft-length",
    "--draft-tokens",
    "--max-new-tokens",
    "--draft-mode",
    "--proposer",
    "--target",
    "--draft-device",
    "--target-device",
    "--soc",
)

TEMPLATE_PARTS = (
    "{{ bos_token }}",
    "{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}",
    "{% if tools is not none %}T{% endif %}",
    "{% if add_generation_prompt %}A:{% endif %}",
    "{{ messages | tojson(indent=2) }}",
    "{{ raise_exception('no \x1b[31m system') }}",
    "{% generation %}x{% endgeneration %}",
    "{% break %}",
    "{% continue %}",
    "{% for i in range(3) %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ " + "(" * 150 + "1" + ")" * 150 + " }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 ** 9 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ messages[5].content }}",
    "{{ nothing.at.all }}",
    "{{ 1 / 0 }}",
    "{{ 'a' + 1 }}",
    "{{ ''.__class__.__mro__ }}",
    "{% set f = '{0.__globals__}' | attr('format') %}{{ f(raise_exception) }}",
    "{{ strftime_now('%Y') }}",
    "{{ namespace(a=1).a }}",
    "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x + m.content %}"
    "{% endfor %}{{ n.x }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{{ messages | map(attribute='content') | join('x' * 100000) }}",
    "{{ 'x' | center(10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ [1] * 10 ** 9 }}",
    "{{ range(10 ** 9) | list }}",
    "{{ ([0] * 100000) | batch(1) | list | length }}",
    "{{ lipsum(n=100000) }}",
    "{{ cycler('a').next() }}",
    "\x00",
    "{%",
    "{{",
    "{% endfor %}",
)


def _edit_graph(mutator: Mutator, graph: Any) -> None:
    """Another name, type or shape of an input or an output, or none."""
    values = mutator.one([graph.input, graph.output])
    at = int(mutator.rng.integers(len(values)))
    value = values[at]
    kind = int(mutator.rng.integers(5))
    if kind == 0:
        value.name = mutator.one(["x", "\x1b[31m", "logits", "input_ids", value.name + "."])
    elif kind == 1:
        value.type.tensor_type.elem_type = mutator.one([1, 6, 7, 10, 9])
    elif kind == 2:
        dims = value.type.tensor_type.shape.dim
        if len(dims):
            dim = dims[int(mutator.rng.integers(len(dims)))]
            if mutator.chance(0.5):
                dim.dim_value = mutator.one([0, 1, 3, 64, 2**31, 2**40])
            else:
                dim.dim_param = mutator.one(["n", "\x1b", "batch"])
    elif kind == 3:
        del values[at]
    else:
        dims = value.type.tensor_type.shape.dim
        dims.add().dim_value = 1


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


class CheckpointSite:
    """A Hugging Face folder and a GGUF file, opened as `export` does before its work."""

    def __init__(self, root: Path, original: Path) -> None:
        self.folder = shutil.copytree(original, root / "checkpoint")
        special = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "pad_token": "<pad>"}
        (self.folder / "special_tokens_map.json").write_text(json.dumps(special))
        (self.folder / "chat_template.jinja").write_text(TEMPLATE_PARTS[1])
        self.files = {p: p.read_bytes() for p in sorted(self.folder.iterdir()) if p.is_file()}
        folder = root / "sentencepiece"
        folder.mkdir()
        documents = {"added_tokens.json": {"<x>": 300}, "special_tokens_map.json": special}
        config = json.loads((self.folder / "tokenizer_config.json").read_text())
        config["added_tokens_decoder"] = {"2": {"content": "</s>", "special": True}}
        for name, content in (documents | {"tokenizer_config.json": config}).items():
            (folder / name).write_text(json.dumps(content))
        (folder / "tokenizer.model").write_bytes(sentencepiece_model())
        self.pieces = {p: p.read_bytes() for p in sorted(folder.iterdir())}
        document = json.loads((self.folder / "tokenizer.json").read_text())
        self.fields = metadata_of(document, pre="gpt-2")
        self.gguf = write_small_gguf(root / "model.gguf", self.fields, GGUF_NUMBERS)

    def folders(self, mutator: Mutator) -> str:
        path = mutator.one(list(self.files))
        with replaced(path, damaged(mutator, path, self.files[path])):
            return call(lambda: read_checkpoint(self.folder))

    def exports(self, mutator: Mutator) -> str:
        """The whole way into a bundle, for what is found after the checkpoint was opened."""
        path = mutator.one([p for p in self.files if p.suffix != ".safetensors"])
        folder, output = str(self.folder), self.folder.parent / "exported"
        model = ["--drafter", folder, "--target", folder, "--lora-rank", "0", "-o", str(output)]
        try:
            with replaced(path, damaged(mutator, path, self.files[path])):
                return command("export", *model, "--precision", "fp32", "--context-length", "64")
        finally:
            for left in output.parent.glob("*exported*"):
                shutil.rmtree(left)

    def sentencepieces(self, mutator: Mutator) -> str:
        """A `tokenizer.model` and the documents beside it, in place of a `tokenizer.json`."""
        from omnidraft_npu.quantize.tokenization.hf_tokenizer import read_tokenizer

        path = mutator.one(list(self.pieces))
        with replaced(path, damaged(mutator, path, self.pieces[path])):
            return call(lambda: read_tokenizer(path.parent))

    def ggufs(self, mutator: Mutator) -> str:
        if mutator.chance(0.4):
            fields, numbers = self.metadata(mutator)
            path = write_small_gguf(self.gguf.with_name("other.gguf"), fields, numbers)
            return call(lambda: read_checkpoint(path))
        data = self.gguf.read_bytes()
        with replaced(self.gguf, mutator.bytes(data, head=mutator.one([64, 600, 20_000]))):
            return call(lambda: read_checkpoint(self.gguf))

    def metadata(self, mutator: Mutator) -> tuple[dict[str, Any], dict[str, int]]:
        """Fields of a GGUF of which some have other values of the same type."""
        fields, numbers = dict(self.fields), dict(GGUF_NUMBERS)
        for _ in range(int(mutator.rng.choice([1, 1, 2]))):
            if mutator.chance(0.4):
                key = mutator.one([*numbers, "tokenizer.ggml.unknown_token_id", "llama.x"])
                numbers[key] = mutator.one(NUMBERS) & 0xFFFFFFFF
                continue
            key = mutator.one([k for k in fields if fields[k]])
            value = fields[key]
            if mutator.chance(0.1):
                del fields[key]
            elif isinstance(value, str):
                fields[key] = mutator.text(value)
            else:
                fields[key] = value = list(value)
                at = int(mutator.rng.integers(len(value)))
                other = (
                    mutator.one(WORDS) if isinstance(value[0], str) else mutator.one([-1, 0, 99])
                )
                kind = int(mutator.rng.integers(4))
                if kind == 0:
                    del value[at:]
                elif kind == 1:
                    value.append(value[at])
                else:
                    value[at] = other
        return {k: v for k, v in fields.items() if len(v)}, numbers


def read_checkpoint(path: Path) -> None:
    """What is read of a checkpoint before any graph is made, and one tensor."""
    from omnidraft_npu.bridge.vocabulary import Vocabulary
    from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    files = checkpoint.tokenizer()
    Vocabulary.from_tokenizer_json(
        json.loads(files.tokenizer_json),
        size=checkpoint.config.num_logits,
        eos_token_ids=files.eos_token_ids,
        bos_token_id=files.bos_token_id,
    )
    checkpoint.tensor("final_norm") if "final_norm" in checkpoint.config.tensor_shapes() else None


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


def sentencepiece_model() -> bytes:
    """A small `tokenizer.model`."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the small drafter and the large target"] * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


GGUF_NUMBERS = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def write_small_gguf(path: Path, fields: dict[str, Any], numbers: dict[str, int]) -> Path:
    """A llama of one layer with a tokenizer in its metadata."""
    from gguf import GGUFWriter

    rows, width, rng = 310, 32, np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, number in numbers.items():
        writer.add_uint32(key, number)
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    shapes = {
        "token_embd": (rows, width),
        "output_norm": (width,),
        "output": (rows, width),
        "blk.0.attn_norm": (width,),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (width // 2, width),
        "blk.0.attn_v": (width // 2, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_norm": (width,),
        "blk.0.ffn_gate": (48, width),
        "blk.0.ffn_up": (48, width),
        "blk.0.ffn_down": (width, 48),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
