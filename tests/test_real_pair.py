"""The two real models: equal to transformers, and drafted text equal to plain text."""

import functools
from pathlib import Path

import numpy as np
import pytest
from prompts import PROMPTS
from real_models import real_model
from sampled_rounds import first_tokens

from omnidraft_npu.bridge.following import ByteBridge
from omnidraft_npu.chi_square import chi_square
from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.quantize.export import ExportRequest, export_bundle
from omnidraft_npu.quantize.model_request import model_request
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM
from omnidraft_npu.runtime.session import Session, open_session

FILES = {"smollm2": "smollm2.gguf", "gemma3": "gemma3-270m.gguf"}
NEW_TOKENS = 24
NUM_SAMPLED_ROUNDS = 100_000


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Opened bundles by drafter, target and precision, each exported once."""
    root = tmp_path_factory.mktemp("bundles")
    made: dict[tuple[str, str, str], Path] = {}

    def get(drafter: str, target: str, precision: str) -> Path:
        key = (drafter, target, precision)
        if key not in made:
            requests = [
                model_request(
                    str(real_model(FILES[name])), precision=precision, context_length=1024
                )
                for name in (drafter, target)
            ]
            output = root / "-".join(key)
            export_bundle(
                ExportRequest(drafter=requests[0], targets=(requests[1],)),
                output,
                progress=lambda *_: None,
            )
            made[key] = output
        return made[key]

    return get


def decode(session: Session, prompt: str, **limits: int) -> tuple[list[int], object]:
    """Response ids and statistics, from a conversation that is forgotten first."""
    session.reset()
    return decode_next(session, session.encode(prompt, raw=True), **limits)


def decode_next(session, prompt_ids, *, max_draft_tokens=4, max_new_tokens=NEW_TOKENS):
    config = DecodeConfig(max_new_tokens=max_new_tokens, max_draft_tokens=max_draft_tokens)
    token_ids, stats = [], None
    for delta in session.generate(prompt_ids, config):
        token_ids += delta.token_ids
        stats = delta.stats
    return token_ids, stats


@pytest.mark.parametrize("name", list(FILES))
def test_greedy_tokens_equal_those_of_transformers(bundles, name):
    """Teacher-forced: transformers' argmax at every place of our text is the token we wrote."""
    import torch
    from transformers import AutoModelForCausalLM

    path = real_model(FILES[name])
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    session = open_session(bundles("smollm2", name, "fp32"), use_drafter=False)
    for prompt in PROMPTS[:20]:
        prompt_ids = session.encode(prompt, raw=True)
        token_ids, _ = decode(session, prompt, max_new_tokens=16)
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt_ids, *token_ids]])).logits[0].numpy()
        expected = logits[len(prompt_ids) - 1 : -1].argmax(axis=-1)
        np.testing.assert_array_equal(token_ids, expected, err_msg=repr(prompt))


def check_pair(bundle: Path, draft_lengths) -> None:
    """Drafted ids equal plain ids for every prompt, with the given draft lengths of each."""
    plain = open_session(bundle, use_drafter=False)
    drafted = open_session(bundle)
    accepted = 0
    for i, prompt in enumerate(PROMPTS):
        expected, _ = decode(plain, prompt)
        for k in draft_lengths(i):
            token_ids, stats = decode(drafted, prompt, max_draft_tokens=k)
            assert token_ids == expected, (prompt, k)
            accepted += stats.accepted
    assert accepted > len(PROMPTS), "drafts are hardly ever accepted"


@pytest.mark.parametrize(("drafter", "target"), [("smollm2", "gemma3"), ("gemma3", "smollm2")])
def test_drafted_text_equals_plain_text(bundles, drafter, target):
    """Quantised too, since a token's logits have the same bits alone and among drafts."""
    check_pair(bundles(drafter, target, "int8"), lambda i: [i % 8 + 1])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize(("drafter", "target"), [("smollm2", "gemma3"), ("gemma3", "smollm2")])
def test_drafted_text_equals_plain_text_for_every_draft_length(bundles, drafter, target, precision):
    check_pair(bundles(drafter, target, precision), lambda _: range(1, 9))


def test_a_model_that_drafts_for_itself_is_always_right(bundles):
    session = open_session(bundles("smollm2", "smollm2", "fp32"), proposer="model")
    for prompt in PROMPTS[:6]:
        _, stats = decode(session, prompt)
        assert stats.proposed > 0
        assert stats.accepted == stats.tested


def test_prompts_of_falling_length_give_what_a_fresh_conversation_gives(bundles):
    bundle = bundles("smollm2", "gemma3", "int8")
    session = open_session(bundle)
    prompts = sorted(PROMPTS[:12], key=len, reverse=True)
    for prompt in prompts:
        ids, _ = decode_next(session, session.encode(prompt, raw=True))
        assert ids == decode(Session(session.pair), prompt)[0]


def test_a_second_turn_gives_what_the_whole_text_at_once_gives(bundles):
    session = open_session(bundles("gemma3", "smollm2", "int8"))
    first = session.encode("Name a river.", raw=True)
    answer, _ = decode_next(session, first)
    whole = [*first, *answer, *session.encode(" And another one:", raw=True)]
    continued, _ = decode_next(session, whole)
    assert continued == decode_next(Session(session.pair), whole)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt", ["The largest river in Africa is", "def mean(values):\n    return "]
)
def test_first_tokens_of_sampled_rounds_follow_the_law_of_the_target(bundles, prompt):
    """100,000 rounds with the logits that both models really give after a prompt."""
    session = open_session(bundles("smollm2", "gemma3", "int8"), proposer="model")
    pair = session.pair
    prompt_ids = session.encode(prompt, raw=True)
    target = OnnxCausalLM(pair.target.graph)
    target.prefill(prompt_ids[:-1])
    row = target.score(prompt_ids[-1:])[0].copy()
    bridge = ByteBridge(pair.encoder, pair.target.vocabulary)
    bridge.begin(prompt_ids)
    *before, last = bridge.pieces
    drafter = OnnxCausalLM(pair.drafter.graph, is_exact=False)
    drafter.prefill(before)

    @functools.lru_cache(maxsize=1000)
    def logits_after(pieces: tuple[int, ...]) -> np.ndarray:
        drafter.rewind(len(before))
        return drafter.score([last, *pieces])[-1].copy()

    counts, law, accepted = first_tokens(
        pair.trie,
        lambda pieces: logits_after(tuple(pieces)),
        row,
        num_pieces=drafter.vocab_size,
        num_rounds=NUM_SAMPLED_ROUNDS,
        sampling=SamplingConfig(temperature=1.0),
    )
    assert chi_square(counts, law).p_value > 1e-6
    assert accepted > 0.1
