"""One process or several under `torchrun`, on CUDA where there is some."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from omnidraft_npu.errors import ConfigError


class Processes:
    """This process among those that train together."""

    def __init__(self, rank: int, count: int, device: torch.device) -> None:
        self.rank, self.count, self.device = rank, count, device
        self.dtype = _dtype(device)
        """Type of products: bfloat16 where the processor has instructions for it."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and tells of progress."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over the processes."""
        return DistributedDataParallel(module) if self.count > 1 else module

    def first(self, value: float) -> float:
        """The value that the first process has, for all."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared.item())

    def agree(self, value: bool) -> bool:
        """Whether the first process says so."""
        return bool(self.first(float(value)))

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """The processes that `torchrun` started, or this one alone; gloo on CPUs, nccl on GPUs.

    Raises:
        ConfigError: there are fewer GPUs than processes on this machine.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    has_cuda = torch.cuda.is_available()
    if has_cuda and local >= torch.cuda.device_count():
        raise ConfigError(
            f"there are {torch.cuda.device_count()} GPUs and this is process {local + 1} on this "
            f"machine: use torchrun --nproc-per-node {torch.cuda.device_count()}"
        )
    device = torch.device("cuda", local) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    if count == 1:
        yield Processes(0, 1, device)
        return
    # The others wait while the first one measures, or one has a longer shard than they.
    backend = "nccl" if has_cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=2))
    try:
        yield Processes(rank, count, device)
    finally:
        dist.destroy_process_group()


def _dtype(device: torch.device) -> torch.dtype:
    has_bfloat16 = device.type == "cuda" or "AVX512" in torch.backends.cpu.get_cpu_capability()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def products_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Matrix products of float32 values computed in `dtype` within the block."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)
