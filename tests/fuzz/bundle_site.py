"""A bundle of right hashes and wrong content, and what users type about it."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .mutations import WORDS, Mutator
from .outcomes import call, command, damaged, replaced

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
