"""`adapter_config.json` of a PEFT folder: what of it the graphs can have."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from omnidraft_npu.documents import (
    Size,
    convert_document,
    read_document,
    shown_text,
    shown_value,
)
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


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """What the graphs need to know of an adapter."""

    r: Size
    lora_alpha: Annotated[float, Meta(gt=-1e9, lt=1e9)]
    """What is larger overflows float32 as it scales B."""
    use_rslora: bool | None = None
    base_model_name_or_path: str | None = None

    @property
    def scale(self) -> float:
        """What ``A @ B`` is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_peft_config(folder: Path) -> PeftConfig:
    """What the config says, where an adapter of its kind can be imported.

    Raises:
        BundleError: it is missing, damaged or of another kind of adapter; names the setting.
    """
    path = folder / CONFIG
    advice = "give a folder that PEFT's save_pretrained wrote"
    settings = read_document(path, dict[str, Any], error=BundleError, advice=advice)
    if settings.get("peft_type", "LORA") != "LORA":
        kind = shown_text(str(settings["peft_type"]))
        raise BundleError(f"{path} is for {kind}, only LORA can be imported")
    needed = ("r", "lora_alpha", "peft_type")
    if any(key not in settings for key in needed):
        raise BundleError(f"{path} does not set all of {', '.join(needed)}: {advice}")
    config = convert_document(settings, PeftConfig, str(path), advice=advice)
    for key, what in _FOREIGN.items():
        if settings.get(key):
            raise BundleError(f"{path} sets {key}: {what} cannot be imported")
    start = str(settings.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise BundleError(
            f"{path} has init_lora_weights {shown_text(start)}, which changes the drafter's own "
            "weights: save it with path_initial_model_for_weight_conversion, which makes it a "
            "plain adapter"
        )
    if (bias := settings.get("bias", "none")) != "none":
        raise BundleError(f"{path} trains biases ({shown_value(bias)}), which cannot be imported")
    return config
