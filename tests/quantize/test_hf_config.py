"""`config.json` of transformers 4 and 5 against what the models are known to compute."""

from typing import Any

import pytest
from tiny_models import ARCHITECTURES, tiny_model

from omnidraft_npu.errors import CheckpointError
from omnidraft_npu.quantize.architecture import Llama3Scaling, RopeConfig
from omnidraft_npu.quantize.checkpoints.hf_config import decoder_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
QWEN = LLAMA | {"architectures": None, "model_type": "qwen2", "num_key_value_heads": 8}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
}


def read(document: dict[str, Any], **fields: Any):
    return decoder_config(document | fields, "config.json")


def test_a_silent_old_llama_gets_the_defaults_of_transformers():
    config = read(LLAMA)

    assert config.architecture == "llama"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 128)
    assert config.rope == RopeConfig(base=10_000.0)
    assert config.norm_eps == 1e-6
    assert config.attention_scale == 128**-0.5
    assert config.layer_types == ("full",) * 4
    assert not (config.has_tied_head or config.has_qkv_bias or config.has_mlp_bias)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shapes_are_those_of_the_model_that_transformers_makes(architecture):
    model = tiny_model(architecture, tie_word_embeddings=False)
    shapes = read(model.config.to_dict()).tensor_shapes()

    ours = sorted(shapes.values())
    theirs = sorted(tuple(p.shape) for p in model.parameters())
    assert ours == theirs


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        ),
    ],
)
def test_rotary_fields_of_transformers_4_and_5_mean_the_same(old, new):
    assert read(LLAMA, **old) == read(LLAMA, **new)
    assert read(LLAMA, **old) != read(LLAMA)


def test_llama_3_scaling_is_read():
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192
    )

    old = read(LLAMA, rope_theta=5e5, rope_scaling=scaling)
    assert old.rope == RopeConfig(base=5e5, llama3=expected)
    assert read(LLAMA, rope_parameters=scaling | {"rope_theta": 5e5}) == old


def test_mistral_slides_unless_its_window_is_null():
    mistral = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}

    assert read(mistral, sliding_window=None).layer_types == ("full",) * 4
    assert read(mistral, sliding_window=None).sliding_window is None
    assert read(mistral).layer_types == ("sliding",) * 4
    assert read(mistral).sliding_window == 4096


def test_qwen2_slides_from_a_layer_on_where_it_is_told_to():
    window = {"sliding_window": 64, "max_window_layers": 3}
    sliding = read(QWEN, use_sliding_window=True, **window)

    assert sliding.layer_types == ("full", "full", "full", "sliding")
    assert sliding.sliding_window == 64
    assert sliding.has_qkv_bias and not sliding.has_output_bias
    assert read(QWEN, use_sliding_window=False, **window).layer_types == ("full",) * 4
    stated = ["sliding_attention", "full_attention"] * 2
    assert read(QWEN, use_sliding_window=True, layer_types=stated, **window).layer_types == (
        "sliding",
        "full",
        "sliding",
        "full",
    )


def test_qwen3_has_its_own_head_size_and_query_key_norms():
    config = read(QWEN, model_type="qwen3")

    assert config.head_dim == 128
    assert config.has_qk_norm and not config.has_qkv_bias
    assert read(QWEN, model_type="qwen3", head_dim=64).attention_scale == 0.125


def test_a_gemma_of_transformers_4_equals_one_of_5():
    old = read(
        GEMMA,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
        sliding_window=512,
    )
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    new = read(
        GEMMA,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=kinds[:8],
        sliding_window=512,
    )

    assert old == new
    assert old.rope == RopeConfig(base=1e6, linear_factor=8.0)
    assert old.local_rope == RopeConfig(base=1e4)
    assert old.embedding_scale == 640**0.5
    assert old.activation == "gelu_tanh"
    assert old.has_tied_head and old.has_sandwich_norms and old.has_qk_norm


def test_the_sparse_text_part_of_a_multimodal_gemma_is_completed():
    text = GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024}
    config = read({"model_type": "gemma3", "text_config": text, "vision_config": {}})

    assert config.architecture == "gemma3_text"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.num_logits == 262_208
    assert config.context_length == 131_072
    assert config.attention_scale == 1 / 16
    assert config.layer_types == ("sliding",) * 5 + ("full",) + ("sliding",) * 2


@pytest.mark.parametrize(
    ("document", "fields", "message"),
    [
        (LLAMA, {"model_type": "mixtral"}, "model_type 'mixtral' is not supported; supported are"),
        (LLAMA, {"model_type": None}, "model_type None"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "not a causal language"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'"),
        (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        (QWEN, {"rope_scaling": {"type": "default", "mrope_section": [1]}}, "rope_type"),
        (LLAMA, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.25}}, r"factor is 0\.25"),
        (LLAMA, {"head_dim": 7}, r"head size \(rotary needs an even one\) is not supported; try"),
        (LLAMA, {"num_local_experts": 8}, "mixture of experts"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        (QWEN, {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (QWEN, {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is False"),
        (QWEN, {"use_mrope": True}, "multimodal rotary"),
        (GEMMA, {"final_logit_softcapping": 1.0}, "softcapping of logits"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "softcapping of attention"),
        (GEMMA, {"use_bidirectional_attention": True}, "not causal"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        (GEMMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "gemma3"),
        (GEMMA, {"rope_scaling": {"type": "linear", "factor": 8.0}}, "only some versions"),
        (LLAMA, {"rope_parameters": {"full_attention": {}}}, "for each kind of layer"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(document, fields, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(document, **fields)
    assert "optimum" in str(caught.value) or "generates text" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing, it should be a whole number"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', it should be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"num_key_value_heads": 5}, "32 attention heads cannot share 5"),
        ({"num_attention_heads": 5}, "4096 is not a multiple of 5 heads"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": 4}, "layer_types is 4"),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types is"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"architectures": 5}, "architectures 5"),
        ({"hidden_act": ["relu"]}, r"hidden_act is \['relu'\]"),
        ({"hidden_size": 2**31}, "at most 2147483647"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*above zero"),
        (
            {"rope_theta": 1e-9, "rope_scaling": {"type": "linear", "factor": 1e-36}},
            r"rope_theta 1e-09 and factor 1e-36 give rotary frequencies that are not finite",
        ),
        ({"rope_theta": 1e300}, r"rope_theta is 1e\+300"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value(fields, message):
    with pytest.raises(CheckpointError, match=message):
        read(LLAMA, **fields)


def test_rotary_parameters_of_a_kind_of_layer_are_an_object():
    with pytest.raises(CheckpointError, match="full_attention is 'x', it should be an object"):
        read(GEMMA, rope_parameters={"full_attention": "x"})


def test_the_original_length_beside_rotary_parameters_goes_first():
    """Phi writes it there, and transformers gives it priority; nothing else shows the mistake."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }

    def read_length(**fields):
        return read(LLAMA, **fields).rope.llama3.original_context_length

    assert read_length(rope_scaling=scaling) == 64
    assert read_length(rope_scaling=scaling, original_max_position_embeddings=512) == 512
    assert read_length(rope_parameters=scaling, original_max_position_embeddings=512) == 512
    del scaling["original_max_position_embeddings"]
    assert read_length(rope_scaling=scaling) == 4096


def test_rope_scaling_replaces_rope_parameters_as_in_transformers():
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}

    both = read(LLAMA, rope_parameters=parameters, rope_scaling={"type": "linear", "factor": 3.0})
    assert both.rope == RopeConfig(base=1e4, linear_factor=3.0)
    assert read(LLAMA, rope_parameters=parameters, rope_scaling={}).rope.base == 5e5


def test_linear_scaling_stretches_the_context_but_for_gemma3():
    """Vicuna 16k has 4,096 positions and a factor of 4; Gemma 3 4B has 131,072 and 8."""
    linear = {"rope_type": "linear", "factor": 4.0}

    assert read(LLAMA, rope_scaling=linear).context_length == 16384
    assert read(LLAMA, rope_scaling=linear | {"factor": 0.5}).context_length == 4096
    assert read(GEMMA, rope_scaling=linear).context_length == 131072


def test_the_head_of_a_multimodal_gemma_is_tied_by_the_outer_field():
    document = {"model_type": "gemma3", "text_config": GEMMA | {"tie_word_embeddings": False}}

    assert read(document).has_tied_head
    assert not read(document, tie_word_embeddings=False).has_tied_head


def test_more_layers_than_tensors_are_refused_before_any_is_looked_at():
    with pytest.raises(CheckpointError, match=r"_layers is 2147483647, but .* 39 tensors"):
        decoder_config(LLAMA | {"num_hidden_layers": 2**31 - 1}, "config.json", num_tensors=39)


def test_quantised_weights_are_refused_with_the_checkpoint_to_use():
    with pytest.raises(CheckpointError) as caught:
        read(LLAMA, quantization_config={"bits": 4})
    assert str(caught.value) == (
        "config.json: quantization_config is {'bits': 4}: a checkpoint that is already quantised "
        "is not supported; use the original one"
    )


def test_heads_that_no_model_has_are_refused_before_tables_are_made_for_them():
    """A head of 2**31 took half a minute and 40 GB, then the tensors did not fit."""
    document = {"model_type": "llama", "hidden_size": 2**31 - 2, "num_attention_heads": 1}
    with pytest.raises(CheckpointError, match="heads of 2147483646"):
        decoder_config(document, "config.json")
