"""Free text as a draft: real vocabularies, cut as the target's tokenizer cuts them."""

import numpy as np
import pytest
from markov_model import MarkovModel
from scripted_model import ScriptedModel
from shared_files import encoder, vocabulary
from toy_vocabularies import toy_document, toy_encoder

from omnidraft_npu.bridge.following import ByteBridge
from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import full_spellings
from omnidraft_npu.bridge.text_walk import TextWalk
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.vocabulary import END_ROLES, Role, Vocabulary
from omnidraft_npu.bridge.walk import TrieWalk
from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.sampling import Draw
from omnidraft_npu.speculative import generate

PAIRS = [("smollm2", "gemma3"), ("llama2", "qwen3"), ("qwen3", "llama2"), ("gemma3", "smollm2")]
SCRIPT = (
    "def mean(values):\n    if not values:\n        return 0.0\n\n\treturn sum(values)\n\n\n"
    "日本語のテキストには空白がありません。今天的天气很好，\n  👩\u200d👩\u200d👧 caf\u00e9 😀"
    "\u00a0x 3.14159 26535\r\n"
    "     12 + 1234567 = 1234579;   x\n" + "-" * 40 + "\n        deep\n"
).encode()


def end_of(name):
    return vocabulary(name).special_ids(*END_ROLES)[0]


def drafter_of(model, drafter, target):
    bridge = ByteBridge(drafter, target.vocabulary)
    ends = frozenset(target.vocabulary.special_ids(*END_ROLES))
    walk = TextWalk(drafter.vocabulary, target)
    return ModelDrafter(model, bridge, walk, end_token_ids=ends)


def decode(proposer, target, prompt, k, stop, **options):
    target.rewind(0)
    config = DecodeConfig(
        max_new_tokens=1000, max_draft_tokens=k, stop_token_ids=frozenset({stop}), **options
    )
    rounds = list(generate(proposer, target, prompt, config))
    return [i for one in rounds for i in one.verdict.token_ids], rounds


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize(("drafter", "target"), PAIRS)
def test_the_target_writes_its_own_text_and_accepts_nearly_all_of_the_same(drafter, target, k):
    """Line breaks, indentation, scripts without spaces, emoji and digits."""
    model = ScriptedModel(encoder(drafter), SCRIPT, end_of(drafter))
    target_model = ScriptedModel(encoder(target), SCRIPT, end_of(target))
    prompt, rest = target_model.token_ids[:3], target_model.token_ids[3:]
    proposer = drafter_of(model, encoder(drafter), encoder(target))
    written, rounds = decode(proposer, target_model, prompt, k, end_of(target))
    assert written == [*rest, end_of(target)]
    assert all(one.num_proposed <= k for one in rounds)
    tested = sum(one.verdict.num_tested for one in rounds)
    accepted = sum(one.verdict.num_accepted for one in rounds)
    # What a round's end cut short is wrong: at most its last token.
    assert tested - accepted <= len(rounds)
    assert accepted > (0.6 if k == 1 else 0.78) * tested


def test_a_special_piece_ends_the_draft_with_the_token_of_its_role_if_there_is_one():
    smollm, gemma = vocabulary("smollm2"), vocabulary("gemma3")
    walk = TextWalk(smollm, encoder("gemma3"))
    (end_of_turn,) = gemma.special_ids(Role.END_OF_TURN)
    (other, *_), hello = smollm.special_ids(Role.OTHER), smollm.by_bytes[b"hello"]
    for last, token_ids in ((other, []), (end_of("smollm2"), [end_of_turn])):
        walk.begin()
        assert walk.step(one_hot(smollm.size, hello)) == hello
        assert walk.step(one_hot(smollm.size, last)) is None
        assert walk.finish()
        assert walk.token_ids == [gemma.by_bytes[b"hello"], *token_ids]
    walk.begin()
    walk.step(one_hot(smollm.size, other))
    assert not walk.finish()


def one_hot(size, at):
    logits = np.zeros(size, np.float32)
    logits[at] = 1.0
    return logits


def test_the_greedy_walk_drafts_greedy_rounds_only(rng):
    drafter, target = toy_encoder(rng, 20), toy_encoder(rng, 20)
    trie = SpellingTrie.build(full_spellings(drafter, target.vocabulary), target.vocabulary.size)
    size = drafter.vocabulary.size
    proposer = ModelDrafter(
        MarkovModel(rng.normal(size=(size, size))),
        ByteBridge(drafter, target.vocabulary),
        TrieWalk(trie, size),
        greedy_walk=TextWalk(drafter.vocabulary, target),
    )
    proposer.begin([1, 5, 6])
    assert proposer.propose(4).trie is None
    draw = Draw(sampling=SamplingConfig(temperature=1.0), rng=rng)
    assert proposer.propose(4, draw).trie is trie


def test_sampling_ends_the_round_where_logits_are_not_numbers(rng):
    walk = TextWalk(toy_encoder(rng, 5).vocabulary, toy_encoder(rng, 5))
    draw = Draw(sampling=SamplingConfig(temperature=1.0), rng=rng)
    assert walk.step(np.full(12, np.nan, np.float32), draw) is None
    assert not walk.finish()


def test_tokens_that_a_piece_has_too_many_of_are_left_out():
    """Four letters in one piece, and a target without tokens of several letters."""
    document = toy_document(np.random.default_rng(0), 0)
    document["model"]["vocab"] |= {"ab": 7, "abab": 8}
    document["model"]["merges"] = [["a", "b"], ["ab", "ab"]]
    vocab = Vocabulary.from_tokenizer_json(document, eos_token_ids=(2,), bos_token_id=1)
    target = toy_encoder(np.random.default_rng(0), 0)
    proposer = drafter_of(
        MarkovModel(np.tile(one_hot(9, 8), (9, 1))), PieceEncoder(document, vocab), target
    )
    a, b = (target.vocabulary.by_bytes[data] for data in (b"a", b"b"))
    proposer.begin([1, a, b, a, b])
    assert [proposer.propose(k).token_ids for k in (1, 2, 6)] == [(a,), (a, b), (a, b) * 3]
