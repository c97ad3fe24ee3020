"""AdamW in numpy: what changes an adapter on a device without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ConfigError

Floats = npt.NDArray[np.float32]
Tensors = Mapping[str, Floats]


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """How far a step goes.

    Source:
        OmniDraft, arXiv:2507.02659, Tables 7-10, for the rate and the betas.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    """Of all gradients together; larger ones are scaled down to it."""
    warmup_steps: int = 0
    """Steps over which the rate rises from near 0; constant afterwards."""
    averaging: float = 0.0
    """Of the average over the steps, how much stays at each; 0 for none: the latest step alone."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(
                f"learning_rate is {self.learning_rate}, must be above 0: use 1e-4, say"
            )
        if not 0 <= self.averaging < 1:
            raise ConfigError(
                f"averaging is {self.averaging}, must be at least 0 and below 1: use 0.97, say"
            )
        if not self.max_norm > 0:
            raise ConfigError(f"max_norm is {self.max_norm}, must be above 0: use 1, say")


class AdamW:
    """The optimiser's state for one set of tensors.

    Source:
        Loshchilov and Hutter 2019, arXiv:1711.05101, Algorithm 2; the average is Polyak and
        Juditsky's (1992), with weights that fall with age.
    """

    def __init__(self, tensors: Tensors, config: AdamWConfig) -> None:
        """Begin with moments of zero.

        Args:
            tensors: What is changed, by name; they are copied.
            config: How far a step goes.
        """
        self.config = config
        self.num_steps = 0
        self.tensors = {name: np.array(tensor, np.float32) for name, tensor in tensors.items()}
        self.average = {name: tensor.copy() for name, tensor in self.tensors.items()}
        """What to use: it has less of the noise of single steps."""
        self._first = {name: np.zeros_like(t) for name, t in self.tensors.items()}
        self._second = {name: np.zeros_like(t) for name, t in self.tensors.items()}

    def state(self) -> dict[str, Floats]:
        """All that changes from step to step, to go on from with `restore`; no copies."""
        steps = np.array([self.num_steps], np.float32)
        parts = {"": self.tensors, ".average": self.average}
        parts |= {".first": self._first, ".second": self._second}
        named = {f"{n}{end}": t for end, part in parts.items() for n, t in part.items()}
        return named | {"steps": steps}

    def restore(self, state: Tensors) -> None:
        """Go on from what `state` gave for tensors of the same shapes.

        Raises:
            ValueError: it is of other tensors.
        """
        own = self.state()
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in own.items()}:
            raise ValueError("the optimiser's state is of other tensors")
        for name, tensor in own.items():
            np.copyto(tensor, state[name])
        self.num_steps = int(state["steps"][0])

    def step(self, gradients: Tensors) -> float | None:
        """Change the tensors against their gradients.

        Returns:
            The norm of all gradients together before it was cut; None where one of them is no
            number, when nothing was changed.
        """
        square = sum(float(np.vdot(g, g)) for g in gradients.values())
        if not math.isfinite(square):
            return None
        config, norm = self.config, math.sqrt(square)
        cut = min(1.0, config.max_norm / (norm + 1e-6))
        self.num_steps += 1
        rate = config.learning_rate * min(1.0, self.num_steps / (config.warmup_steps + 1))
        bias1 = 1 - config.beta1**self.num_steps
        bias2 = 1 - config.beta2**self.num_steps
        # Of few steps the average is over fewer: what training began with must not linger.
        stays = min(config.averaging, self.num_steps / (self.num_steps + 10))
        for name, tensor in self.tensors.items():
            gradient = gradients[name] * np.float32(cut)
            first, second = self._first[name], self._second[name]
            first += np.float32(1 - config.beta1) * (gradient - first)
            second += np.float32(1 - config.beta2) * (gradient * gradient - second)
            root = np.sqrt(second / np.float32(bias2)) + np.float32(config.epsilon)
            tensor *= np.float32(1 - rate * config.weight_decay)
            tensor -= np.float32(rate / bias1) * first / root
            average = self.average[name]
            average *= np.float32(stays)
            average += np.float32(1 - stays) * tensor
        return norm
