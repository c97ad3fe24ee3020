"""The LoRA branch of a projection, the same in every flavour of graph."""

from collections.abc import Collection

import numpy as np

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.lora import DEFAULT_RANK, MODULES, lora_name

from .architecture import DecoderConfig
from .graph_writer import GraphWriter


def check_lora(rank: int, modules: Collection[str]) -> None:
    """Raise `ConfigError` where no graph can have LoRA inputs like these."""
    if rank < 0:
        raise ConfigError(f"lora_rank is {rank}, must not be negative: use 0 for no LoRA inputs")
    if unknown := set(modules) - set(MODULES):
        raise ConfigError(
            f"lora_modules has {', '.join(sorted(unknown))}: choose from {', '.join(MODULES)}"
        )


def check_lora_rank(name: str, rank: int, config: DecoderConfig) -> None:
    """Pass if some projection of a model has room for adapters of this rank.

    Raises:
        ConfigError: none has; the product of two factors has no higher rank than the matrix.
    """
    shapes = config.tensor_shapes()
    most = max(min(shapes[f"layers.0.{module}"]) for module in MODULES)
    if rank > most:
        raise ConfigError(
            f"lora_rank is {rank:,}, and no matrix of {name} has a rank above {most:,}: use "
            f"--lora-rank {min(DEFAULT_RANK, most)}"
        )


class LoraBranches:
    """Adds ``(x @ A) @ B`` to the projections that have LoRA inputs."""

    def __init__(
        self, graph: GraphWriter, config: DecoderConfig, *, rank: int, modules: Collection[str]
    ) -> None:
        self._graph = graph
        self._shapes = config.tensor_shapes()
        self._rank = rank
        self._modules = modules if rank else ()

    def has(self, *modules: str) -> bool:
        """Whether any of `modules` is adapted."""
        return not set(modules).isdisjoint(self._modules)

    def add(self, projected: str, x: str, layer: int, module: str) -> str:
        """The adapted projection of `x`, or `projected` itself where there is no branch."""
        if not self.has(module):
            return projected
        graph, at = self._graph, f"layers.{layer}.{module}"
        out, in_features = self._shapes[at]
        a = graph.input(lora_name(layer, module, "A"), np.float32, [in_features, self._rank])
        b = graph.input(lora_name(layer, module, "B"), np.float32, [self._rank, out])
        low = graph.node("MatMul", [x, a], f"{at}.lora_low")
        delta = graph.node("MatMul", [low, b], f"{at}.lora")
        return graph.node("Add", [projected, delta], f"{at}.adapted")
