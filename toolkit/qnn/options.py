"""Names and values of the QNN provider's options.

The provider takes no notice of a name or a value that it does not know: a misspelt option
would leave everything as it was. So every option is checked here first.
"""

import difflib
import re
from collections.abc import Mapping

from ..errors import ConfigError

_SWITCH = ("0", "1")
_MODES = (
    "default",
    "burst",
    "sustained_high_performance",
    "high_performance",
    "balanced",
    "low_balanced",
    "high_power_saver",
    "power_saver",
    "low_power_saver",
    "extreme_power_saver",
)
_NUMBER = re.compile(r"\d+")
_NUMBERS = re.compile(r"[1-9]\d*(,[1-9]\d*)*")
_ANYTHING = re.compile(r".+")

OPTIONS: dict[str, tuple[str, ...] | re.Pattern[str]] = {
    "backend_path": _ANYTHING,
    "soc_model": _NUMBERS,
    "htp_arch": ("68", "69", "73", "75", "79", "81", "85"),
    "device_id": _NUMBER,
    "vtcm_mb": _NUMBER,
    "htp_performance_mode": _MODES,
    "htp_graph_finalization_optimization_mode": ("0", "1", "2", "3"),
    "qnn_context_priority": ("low", "normal", "normal_high", "high"),
    "rpc_control_latency": _NUMBER,
    "enable_htp_fp16_precision": _SWITCH,
    "enable_htp_fp16_clamp_overflow": _SWITCH,
    "htp_bf16_enable": _SWITCH,
    "enable_htp_prepare_only": _SWITCH,
    "enable_htp_spill_fill_buffer": _SWITCH,
    "enable_htp_shared_memory_allocator": _SWITCH,
    "enable_block_quant_weight_optimization": _SWITCH,
    "extended_udma": _SWITCH,
    "htp_share_resource_optimization": ("1",),
    "offload_graph_io_quantization": _SWITCH,
    "skip_qnn_version_check": _SWITCH,
    "profiling_level": ("off", "basic", "detailed", "optrace"),
    "profiling_file_path": _ANYTHING,
    "dump_json_qnn_graph": _SWITCH,
    "json_qnn_graph_dir": _ANYTHING,
    "enable_framework_op_trace": _SWITCH,
    "framework_op_trace_dir": _ANYTHING,
}
"""Options of the HTP backend by name: the values there are, or how one is written."""


def check_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options, once every name and value is one that the provider acts on.

    Raises:
        ConfigError: a name or a value that the provider would pass over without a word, or
            no `soc_model`, without which it takes an old chip that it cannot name.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "leave it out"
            raise ConfigError(
                f"there is no QNN option {name!r}, and QNN would ignore it silently: {hint}"
            )
        allowed = OPTIONS[name]
        if isinstance(allowed, tuple):
            if value not in allowed:
                raise ConfigError(
                    f"QNN option {name} is {value!r}, which QNN would ignore silently: "
                    f"use one of {', '.join(allowed)}"
                )
        elif not allowed.fullmatch(value):
            kind = "some text" if allowed is _ANYTHING else "a number"
            raise ConfigError(f"QNN option {name} is {value!r}: it must be {kind}")
    if "soc_model" not in options:
        raise ConfigError(
            "soc_model is missing among the QNN options: without it QNN takes an unknown chip of "
            "the v68 kind; name the chip"
        )
    return dict(options)
