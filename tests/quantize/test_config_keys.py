"""Every key of a `config.json` is decided on, by the classes of the installed transformers."""

import dataclasses
import json
import logging

import pytest
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.errors import CheckpointError
from omnidraft_npu.quantize.checkpoints.config_keys import decided_keys
from omnidraft_npu.quantize.checkpoints.hf_config import DEFAULTS, decoder_config
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.model_request import model_request
from omnidraft_npu.quantize.model_stage import prepare_model

SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# What `PreTrainedConfig.__post_init__` takes beside the fields of its classes.
LEGACY = [
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "sliding_window_pattern",
    "original_max_position_embeddings",
    "name_or_path",
    "torch_dtype",
    "num_labels",
    "output_attentions",
    "attn_implementation",
    "experts_implementation",
    "per_layer_config",
    "tie_last_hidden_states",
]


def read(family, **fields):
    return decoder_config(SHAPE | {"model_type": family} | fields, "config.json")


def class_of(family):
    from transformers import AutoConfig

    return type(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", DEFAULTS)
def test_every_key_that_transformers_reads_is_decided_on(family):
    from transformers import GenerationConfig

    own = {field.name for field in dataclasses.fields(class_of(family))}
    written = {name for name in class_of(family)().to_dict() if not name.startswith("_")}
    generation = GenerationConfig._get_default_generation_params()

    assert own | written | {*generation, *LEGACY} <= decided_keys(family)


def test_every_key_of_the_multimodal_gemma_is_decided_on():
    own = {field.name for field in dataclasses.fields(class_of("gemma3"))}

    assert own <= decided_keys("gemma3_text")


@pytest.mark.parametrize("family", DEFAULTS)
def test_what_a_file_leaves_out_is_what_transformers_assumes(family):
    theirs = class_of(family)()

    for name, value in DEFAULTS[family].items():
        # Without `use_sliding_window` the class forgets the window.
        if not (name == "sliding_window" and family.startswith("qwen")):
            assert getattr(theirs, name) == value, name


@pytest.mark.parametrize("family", DEFAULTS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.0625),
        ("logits_scaling", 8.0),
        ("embedding_multiplier", 12.0),
        ("scale_emb", 12),
        ("residual_multiplier", 0.22),
        ("scale_depth", 1.4),
        ("attention_multiplier", 0.015625),
        ("qk_norm", True),
        ("clip_qkv", 8.0),
        ("no_rope_layers", [1, 0]),
        ("use_bidirectional_attention", True),
        ("is_causal", False),
        ("is_encoder_decoder", True),
        ("add_cross_attention", True),
        ("pruned_heads", {"0": [1]}),
        ("per_layer_config", {"0": {"head_dim": 8}}),
        ("num_local_experts", 8),
        ("attention_chunk_size", 8192),
        ("rope_interleave", True),
        ("rotary_pct", 0.5),
        ("kv_lora_rank", 512),
        ("quantization", {"bits": 4}),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(family, key, value):
    with pytest.raises(CheckpointError) as caught:
        read(family, **{key: value})
    assert f"config.json: {key} is {value!r}" in str(caught.value)


@pytest.mark.parametrize(
    "neutral",
    [
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"logit_scale": 1.0, "embedding_multiplier": 1, "residual_multiplier": 1.0},
        {"qk_norm": False, "clip_qkv": None, "no_rope_layers": [], "pruned_heads": {}},
        {"num_experts": 0, "is_causal": True, "rope_interleave": False, "quantization_config": {}},
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(neutral):
    assert read("llama", **neutral) == read("llama")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_keys_of_other_supported_families_are_refused_too(family):
    for key, value in (("query_pre_attn_scalar", 256), ("sliding_window_pattern", 6)):
        with pytest.raises(CheckpointError, match=f"{key} is {value}"):
            read(family, **{key: value})


def test_keys_that_nobody_knows_are_warned_of_once_and_by_name(caplog):
    read("llama", unsloth_version="2026", mlp_bias=None, _name_or_path="x", attention_dropout=0.1)
    assert [record.getMessage() for record in caplog.records] == [
        "config.json: not used for a llama model, by transformers either: unsloth_version"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        read("llama", **{f"key{i}": 5 for i in range(9)})
    assert caplog.records[0].getMessage().endswith("key4, key5 and 3 more")


def test_what_is_advised_is_something_the_user_can_do(tmp_path):
    """The other exporter makes no drafters, and `distill` has none."""
    write_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    for change in ({"model_type": "gpt2"}, {"logit_scale": 0.5}):
        path.write_text(json.dumps(document | change))
        for other_way, advice in ((None, "try --exporter optimum"), ("cook it", "cook it")):
            with pytest.raises(CheckpointError) as caught:
                open_checkpoint(tmp_path, other_way=other_way)
            assert str(caught.value).endswith(f"; {advice}")
    request = model_request(str(tmp_path), precision="fp32", context_length=64)
    with pytest.raises(CheckpointError, match="; choose another drafter"):
        prepare_model(request, is_drafter=True)
