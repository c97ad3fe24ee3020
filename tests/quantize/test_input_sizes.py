import numpy as np
import pytest
from tiny_models import ARCHITECTURES, tiny_model

from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.input_sizes import RandomTokens

READERS = {
    "qkv": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate_up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sizes_are_those_transformers_sees_on_the_same_tokens(tmp_path, architecture):
    import torch

    model = tiny_model(architecture)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    tokens = RandomTokens(config, checkpoint.tensor("embed_tokens"))
    seen = {}

    def keep(module, inputs):
        seen[module] = (inputs[0] ** 2).mean(dim=(0, 1)).numpy()

    for module in model.modules():
        module.register_forward_pre_hook(keep) if isinstance(module, torch.nn.Linear) else None
    with torch.no_grad():
        model(torch.from_numpy(tokens.ids))

    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        names = [name for name in config.tensor_shapes() if name.startswith(prefix)]
        layer = {name.removeprefix(prefix): checkpoint.tensor(name) for name in names}
        for name, sizes in tokens.layer(i, layer).items():
            expected = seen[model.model.layers[i].get_submodule(READERS[name])]
            np.testing.assert_allclose(sizes, expected, rtol=1e-3)
    sizes = tokens.head(checkpoint.tensor("final_norm"))
    np.testing.assert_allclose(sizes, seen[model.lm_head], rtol=1e-3)
