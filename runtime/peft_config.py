"""`adapter_config.json` of a PEFT folder: what of it the graphs can have."""

import json
from pathlib import Path
from typing import Any

from omnidraft_npu.errors import BundleError

CONFIG = "adapter_config.json"

_FOREIGN = {
    "use_dora": "DoRA's magnitudes",
    "modules_to_save": "whole modules",
    "rank_pattern": "different ranks",
    "alpha_pattern": "different scales",
    "layer_replication": "repeated layers",
    "fan_in_fan_out": "turned weights",
    "alora_invocation_tokens": "adapters for a part of the text",
    "use_qalora": "pooled inputs",
}
"""Settings that need what the graphs do not have."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to start that leave an adapter for other weights than the original model's."""


_MAX_ALPHA = 1e9
"""What is larger overflows float32 as it scales B."""


def read_peft_config(folder: Path) -> dict[str, Any]:
    """What the config says, where an adapter of its kind can be imported.

    Raises:
        BundleError: it is missing, damaged or of another kind of adapter; names the setting.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(
            f"{path} cannot be read ({error}): give a folder that PEFT's save_pretrained wrote"
        ) from error
    if isinstance(config, dict) and config.get("peft_type", "LORA") != "LORA":
        raise BundleError(f"{path} is for {config['peft_type']}, only LORA can be imported")
    needed = ("r", "lora_alpha", "peft_type")
    if not isinstance(config, dict) or any(key not in config for key in needed):
        raise BundleError(
            f"{path} does not set all of {', '.join(needed)}: give a folder that PEFT's "
            "save_pretrained wrote"
        )
    rank, alpha = config["r"], config["lora_alpha"]
    if not isinstance(rank, int) or rank < 1:
        raise BundleError(f"{path} has r {rank!r}, which is no rank: it is 1 or more")
    if not isinstance(alpha, int | float) or not abs(alpha) < _MAX_ALPHA:
        raise BundleError(f"{path} has lora_alpha {str(alpha)[:40]}, which is no number of use")
    for key, what in _FOREIGN.items():
        if config.get(key):
            raise BundleError(f"{path} sets {key}: {what} cannot be imported")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise BundleError(
            f"{path} has init_lora_weights {start}, which changes the drafter's own weights: save "
            "it with path_initial_model_for_weight_conversion, which makes it a plain adapter"
        )
    if config.get("bias", "none") != "none":
        raise BundleError(f"{path} trains biases ({config['bias']}), which cannot be imported")
    return dict(config)
