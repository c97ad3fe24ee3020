"""What is learned on the CPU drafts on the NPU, here its simulator, from the next request on."""

import json
from dataclasses import replace

import pytest
from learning_bundle import RANK, write_learning_bundle
from simulated_htp import X_ELITE, has_simulator

from omnidraft_npu.bundle import MANIFEST
from omnidraft_npu.config import DecodeConfig, DeviceConfig
from omnidraft_npu.files import sha256_of
from omnidraft_npu.manifest import FileEntry, HtpEntry, Manifest
from omnidraft_npu.qnn.provider import QNN_PROVIDER
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.htp.decoder_graph import HtpGraphOptions, build_htp_decoder
from omnidraft_npu.runtime import devices
from omnidraft_npu.runtime.adamw import AdamWConfig
from omnidraft_npu.runtime.answer_keeper import answer_keeper
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.learner_opening import open_learner
from omnidraft_npu.runtime.session import open_session

pytestmark = pytest.mark.skipif(not has_simulator(), reason="the simulator is for x86_64 Linux")

LENGTHS, CONTEXT = (1, 16), 64
CONFIG = LearnerConfig(
    loss="trie",
    batch=2,
    passes=20,
    num_anchors=0,
    held_out_every=3,
    min_judged=1,
    optimizer=AdamWConfig(learning_rate=0.02, warmup_steps=2),
)
PROMPTS = ["the large drafter 0", "the small drafter", "the large drafter 1"]


@pytest.fixture
def bundle(tmp_path):
    """The drafter of a bundle that learns has graphs for the NPU too, with LoRA inputs."""
    root = write_learning_bundle(tmp_path)
    manifest = Manifest.from_json(json.loads((root / MANIFEST).read_text()))
    checkpoint = open_checkpoint(tmp_path / "drafter")
    options = HtpGraphOptions(
        lengths=LENGTHS, context_length=CONTEXT, lora_rank=RANK, has_hidden_states=True
    )
    paths = build_htp_decoder(
        checkpoint.config, checkpoint.tensor, root / "drafter" / "htp", options
    )
    htp = HtpEntry(
        precision="fp16",
        context_length=CONTEXT,
        graphs={str(n): path.relative_to(root).as_posix() for n, path in paths.items()},
        lora_rank=RANK,
        has_hidden_states=True,
    )
    made = {
        path.relative_to(root).as_posix(): FileEntry(
            size=path.stat().st_size, sha256=sha256_of(path)
        )
        for path in (root / "drafter" / "htp").iterdir()
    }
    manifest = replace(
        manifest,
        drafter=replace(manifest.drafter, htp=htp),
        files=dict(sorted({**manifest.files, **made}.items())),
    )
    (root / MANIFEST).write_text(json.dumps(manifest.to_json()))
    return root


@pytest.fixture
def opened(monkeypatch):
    """Graphs that QNN was given to prepare."""
    paths = []
    prepare = devices.open_qnn_session

    def counted(path, **options):
        paths.append(path)
        return prepare(path, **options)

    monkeypatch.setattr(devices, "open_qnn_session", counted)
    return paths


def open_on(bundle, device):
    where = DeviceConfig(draft_device=device, target_device="cpu", simulate=True)
    return open_session(bundle, threads=1, proposer="model", devices=where)


def answer(session, prompt, max_new_tokens=16):
    """The tokens, and how many drafts were accepted."""
    session.reset()
    config = DecodeConfig(max_new_tokens=max_new_tokens, max_draft_tokens=3)
    deltas = list(session.generate(session.encode(prompt, raw=True), config))
    return [i for delta in deltas for i in delta.token_ids], deltas[-1].stats.accepted


def test_what_is_learned_drafts_on_the_npu_from_the_next_request_on(bundle, opened, monkeypatch):
    """Trained on the CPU, judged by the graphs that draft; no graph is prepared again.

    Answers to learn from come from drafts on the CPU, the simulator is slow.
    """
    monkeypatch.setattr("omnidraft_npu.runtime.learner.judged", lambda *_: "kept")
    before = {path: sha256_of(path) for path in bundle.rglob("*") if path.is_file()}
    on_npu, on_cpu = open_on(bundle, "npu"), open_on(bundle, "cpu")
    assert on_npu.draft_provider == f"{QNN_PROVIDER} (simulated HTP, soc {X_ELITE})"
    text, accepted = answer(on_npu, PROMPTS[-1], 8)
    on_cpu.observer = answer_keeper(on_cpu.pair, CONFIG)
    for prompt in PROMPTS:
        answer(on_cpu, prompt)
    with open_learner(on_npu.pair, CONFIG, threads=1) as learner:
        lesson = learner.step()
    assert lesson.after.num_tokens == 16
    assert lesson.after.mean > lesson.before.mean
    again, more = answer(on_npu, PROMPTS[-1], 8)
    assert again == text
    assert more > accepted
    assert len(opened) == len(LENGTHS)
    assert {path: sha256_of(path) for path in before} == before
    assert open_on(bundle, "npu").pair.adapter.adapter.version == lesson.version == 1
