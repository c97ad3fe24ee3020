"""Distillation away from the CPU: on the `meta` device, where every stray tensor is an error."""

import pytest
import torch
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.distillation import processes
from omnidraft_npu.quantize.distillation.examples import Batch
from omnidraft_npu.quantize.distillation.llama import Llama
from omnidraft_npu.quantize.distillation.loss import batch_logits, law_loss
from omnidraft_npu.quantize.distillation.starting import drafter_config
from omnidraft_npu.quantize.distillation.teacher_head import TeacherHead
from omnidraft_npu.quantize.distillation.teacher_model import TeacherModel

META = torch.device("meta")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "target", vocab_size=300)
    return open_checkpoint(folder)


def test_the_teacher_keeps_to_its_device(target):
    model = TeacherModel(target, META, torch.bfloat16)
    caches = model.new_caches(3, 20)
    ids = torch.zeros(3, dtype=torch.long, device=META)
    model.read(ids, caches, 1)
    states = model.step(ids, ids + 4, 4, caches)
    head = TeacherHead(torch.zeros(300, states.shape[1], device=META), torch.bfloat16)
    for found in (states, *head.law(states)):
        assert found.device == META
    caches.keep([0, 2])
    assert caches.keys[0].shape[0] == 2


def test_the_loss_and_its_gradients_keep_to_their_device(target):
    config = drafter_config(
        target.config, num_layers=2, intermediate_size=48, vocab_size=280, context_length=64
    )
    model = Llama(config).to(META)
    logits = batch_logits(model, small_batch(), META)
    loss = law_loss(
        logits, torch.zeros(2, 4, dtype=torch.long, device=META), torch.zeros(2, 4, device=META)
    )
    loss.backward()
    assert loss.device == META
    assert all(p.grad is not None and p.grad.device == META for p in model.parameters())


def small_batch():
    import numpy as np

    from omnidraft_npu.distillation import PieceLaws

    laws = PieceLaws(ids=np.zeros((2, 4), np.int32), probs=np.zeros((2, 4), np.float32))
    return Batch(pieces=np.zeros((1, 5), np.int64), positions=np.array([2, 3], np.int64), laws=laws)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(processes.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 2)
    for name, value in {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=r"there are 2 GPUs .* --nproc-per-node 2"),
        processes.joined_processes(),
    ):
        pass


def test_products_are_in_bfloat16_on_gpus_and_where_the_cpu_can(monkeypatch):
    backend = processes.torch.backends.cpu
    for capability, dtype in {"AVX512": torch.bfloat16, "AVX2": torch.float32}.items():
        monkeypatch.setattr(backend, "get_cpu_capability", lambda name=capability: name)
        assert processes.Processes(0, 1, torch.device("cpu")).dtype == dtype
        assert processes.Processes(0, 1, torch.device("cuda", 0)).dtype == torch.bfloat16
