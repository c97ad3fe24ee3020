"""A Hugging Face folder, a GGUF file and a SentencePiece model, as `export` reads them."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from synthetic_metadata import metadata_of

from .bundle_site import TEMPLATE_PARTS
from .mutations import NUMBERS, WORDS, Mutator
from .outcomes import call, command, damaged, replaced

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
