"""How many bits a model's weights have."""

from typing import Literal

Precision = Literal["fp32", "int8", "int4"]
