"""The adapter that a pair's drafter is fed, which learning replaces between requests."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnidraft_npu.acceptance_head import AcceptanceHead
from omnidraft_npu.bundle import Bundle
from omnidraft_npu.errors import BundleError
from omnidraft_npu.manifest import ModelEntry
from omnidraft_npu.state_folder import adapters_path

from .adapter_files import HEAD_PREFIX, AdapterKey, Tensors
from .adapter_store import BASE, AdapterStore
from .lora_inputs import check_head, fit_lora

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter:
    """One version, never changed."""

    version: int = BASE
    lora: Tensors
    """By graph input; empty for the drafter as it was exported."""
    head: AcceptanceHead | None = None
    """None where none was learned."""

    @classmethod
    def of(cls, version: int, tensors: Tensors) -> "Adapter":
        """The version that these tensors are.

        Raises:
            BundleError: its acceptance head is none.
        """
        lora = {n: t for n, t in tensors.items() if not n.startswith(HEAD_PREFIX)}
        return cls(version=version, lora=lora, head=AcceptanceHead.from_tensors(tensors))

    @property
    def tensors(self) -> Tensors:
        """All of them, as they are stored."""
        return self.lora if self.head is None else {**self.lora, **self.head.tensors}


class AdapterInUse:
    """What conversations feed their drafter from their next request on; safe between threads."""

    def __init__(self, store: AdapterStore | None = None) -> None:
        """Begin with the drafter as it was exported; `store` has its versions, if it can."""
        self.store = store
        self.adapter = Adapter.of(BASE, {})

    def load(self, inputs: Mapping[str, tuple[int, ...]]) -> None:
        """Take the version in use; one that cannot be used is said, and left alone.

        Args:
            inputs: Shapes of the LoRA inputs of the graph that will draft.
        """
        if self.store is None:
            return
        try:
            version = self.store.current
            adapter = Adapter.of(version, self.store.load(version))
            fit_lora(inputs, adapter.lora)
            if adapter.head is not None:
                check_head(adapter.head.tensors, inputs)
        except BundleError as error:
            logger.warning("the drafter is used as it was exported: %s", error)
            return
        self.adapter = adapter


def open_adapter(bundle: Bundle, target: ModelEntry) -> AdapterInUse:
    """The adapters of a target in a bundle; none is loaded yet."""
    graph = bundle.manifest.drafter.graphs.get("cpu")
    if graph is None or not graph.lora_rank:
        return AdapterInUse()
    key = AdapterKey.of(bundle, target)
    return AdapterInUse(AdapterStore(adapters_path(bundle.state_root, target.name), key))
