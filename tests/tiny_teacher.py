"""The teacher of distillation on tiny checkpoints."""

import torch

from omnidraft_npu.quantize.distillation.teacher import Question, Teacher


def teacher_of(checkpoint, *, ends=(2,), num_tokens=300, dtype=torch.bfloat16):
    return Teacher(
        checkpoint, end_ids=ends, num_tokens=num_tokens, device=torch.device("cpu"), dtype=dtype
    )


def question(text, ids, *, temperature=0.0, seed=0):
    return Question(task="words", prompt=text, ids=tuple(ids), temperature=temperature, seed=seed)
