import itertools
import json
import shutil

import onnxruntime
import pytest
from tiny_bundle import CONTEXT, write_bundle

from omnidraft_npu.bridge.ngram_file import read_entries
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.errors import BundleError, ConfigError, PromptError
from omnidraft_npu.files import sha256_of
from omnidraft_npu.runtime.session import Session, open_session
from omnidraft_npu.state_folder import ngrams_path

PROMPTS = ("a", "abc cab b", "ccc aab  bca cab abcabc ba", " c")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Nothing ends a response, so that lengths are known."""
    return write_bundle(tmp_path_factory.mktemp("bundle"), eos=())


def ids_of(deltas):
    return [i for delta in deltas for i in delta.token_ids]


def answer(session, prompt_ids, **settings):
    return list(session.generate(prompt_ids, DecodeConfig(**{"max_new_tokens": 24} | settings)))


@pytest.mark.parametrize("target", ["other", "same"])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_drafter_changes_nothing_but_the_rounds(bundle, target, k):
    drafted = open_session(bundle, target=target, threads=1)
    plain = open_session(bundle, target=target, threads=1, use_drafter=False)
    for prompt in PROMPTS:
        prompt_ids = plain.encode(prompt, raw=True)
        expected = answer(plain, prompt_ids)
        deltas = answer(drafted, prompt_ids, max_draft_tokens=k)
        assert ids_of(deltas) == ids_of(expected)
        assert "".join(d.text for d in deltas) == "".join(d.text for d in expected)
        assert len(expected) == 24


def test_a_target_that_drafts_for_itself_accepts_everything(bundle):
    session = open_session(bundle, target="same", threads=1, proposer="model")
    deltas = answer(session, session.encode("abc"), max_draft_tokens=5)
    stats = deltas[-1].stats
    assert stats.accepted == stats.proposed > 0
    assert [len(delta.token_ids) for delta in deltas] == [6, 6, 6, 6]


def test_a_drafter_of_another_vocabulary_has_its_tokens_accepted(bundle):
    """Random models rarely agree; without this, a bridge that offers nothing would pass."""
    session = open_session(bundle, target="other", threads=1)
    stats = [answer(session, session.encode(prompt))[-1].stats for prompt in PROMPTS]
    assert sum(s.proposed for s in stats) > 40
    assert sum(s.accepted for s in stats) > 0


def test_the_text_is_the_bytes_of_the_ids(bundle):
    session = open_session(bundle, threads=1)
    deltas = answer(session, session.encode("abc"))
    vocabulary = session.pair.target.vocabulary
    assert "".join(d.text for d in deltas).encode() == b"".join(
        map(vocabulary.token_bytes, ids_of(deltas))
    )


def test_a_response_says_why_it_ends_and_only_in_the_last_delta(bundle, tmp_path):
    session = open_session(bundle, threads=1, use_drafter=False)
    prompt_ids = session.encode("abc")
    by_length = answer(session, prompt_ids, max_new_tokens=7)
    by_context = answer(session, prompt_ids, max_new_tokens=10_000)
    tokens = ids_of(by_context)
    stop = next(i for n, i in enumerate(tokens) if n > 3 and i not in tokens[:n])
    ending = open_session(write_bundle(tmp_path / "b", eos=(stop,)), threads=1)
    by_stop = answer(ending, prompt_ids, max_new_tokens=10_000)

    assert [d.finish_reason for d in by_length] == [None] * 6 + ["length"]
    assert len(prompt_ids) + len(tokens) == CONTEXT
    assert by_context[-1].finish_reason == "context"
    assert by_stop[-1].finish_reason == "stop"
    assert all(delta.finish_reason is None for delta in by_stop[:-1])
    assert ids_of(by_stop) == tokens[: tokens.index(stop) + 1]
    vocabulary = ending.pair.target.vocabulary
    shown = b"".join(map(vocabulary.token_bytes, tokens[: tokens.index(stop)]))
    assert "".join(d.text for d in by_stop).encode() == shown


@pytest.mark.parametrize("target", ["other", "same"])
def test_a_later_turn_prefills_only_what_is_new_and_answers_as_a_fresh_session(bundle, target):
    session = open_session(bundle, target=target, threads=1)
    turn = session.encode("abc cab")
    for _ in range(3):
        response = ids_of(answer(session, turn, max_new_tokens=12))
        turn = [*turn, *response, *session.encode(" ba", raw=True)[1:]]
        follow_up = answer(session, turn, max_new_tokens=8)
        fresh = answer(Session(session.pair), turn, max_new_tokens=8)

        assert ids_of(follow_up) == ids_of(fresh)
        assert follow_up[-1].stats.num_prefilled < 5 < fresh[-1].stats.num_prefilled


def test_falling_prompts_and_reset_answer_as_a_fresh_session(bundle):
    session = open_session(bundle, threads=1)
    for prompt in sorted(PROMPTS, key=len, reverse=True) * 2:
        prompt_ids = session.encode(prompt)
        expected = ids_of(answer(Session(session.pair), prompt_ids))
        assert ids_of(answer(session, prompt_ids)) == expected
        session.reset()
        again = answer(session, prompt_ids)
        assert ids_of(again) == expected
        assert again[-1].stats.num_prefilled == len(prompt_ids) - 1


def test_two_conversations_share_sessions_and_nothing_else(bundle, monkeypatch):
    first = open_session(bundle, threads=1)
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    second = Session(first.pair)
    config = DecodeConfig(max_new_tokens=20)
    prompts = [first.encode(p) for p in PROMPTS[1:3]]
    expected = [answer(Session(first.pair), p, max_new_tokens=20) for p in prompts]
    streams = [s.generate(p, config) for s, p in zip((first, second), prompts, strict=True)]
    pairs = list(itertools.zip_longest(*streams))  # a round of each in turn
    got = [ids_of(filter(None, deltas)) for deltas in zip(*pairs, strict=True)]
    assert got == [ids_of(e) for e in expected]
    assert [e[-1].stats.accepted for e in expected] == [
        answer(Session(first.pair), p, max_new_tokens=20)[-1].stats.accepted for p in prompts
    ]


def test_an_abandoned_response_leaves_a_usable_session(bundle):
    session = open_session(bundle, threads=1)
    prompt_ids = session.encode("abc cab")
    expected = ids_of(answer(Session(session.pair), prompt_ids))
    stream = session.generate(session.encode("cc"), DecodeConfig())
    next(stream)
    stream.close()
    assert ids_of(answer(session, prompt_ids)) == expected


def test_a_prompt_gets_the_chat_template_unless_raw(bundle):
    session = open_session(bundle, threads=1)
    tokenizer = session.pair.target.tokenizer
    assert session.has_chat_template
    assert session.encode("c", raw=True) == tokenizer.encode("c", add_special=True)
    assert session.encode("c") == tokenizer.encode("<s>a c b", add_special=False)
    assert session.encode("c").count(1) == session.encode("c", raw=True).count(1) == 1


def test_a_control_token_in_a_prompt_is_text_unless_it_is_parsed(bundle):
    session = open_session(bundle, threads=1)
    special = session.pair.target.tokenizer.special_ids
    end = session.encode("</s>", parse_special=True)
    assert sum(i in special for i in end) == 2
    assert sum(i in special for i in session.encode("</s>")) == 1
    assert sum(i in special for i in session.encode("</s>", raw=True)) == 2


def test_the_bytes_of_half_a_character_wait(bundle, monkeypatch):
    session = open_session(bundle, threads=1, use_drafter=False)
    prompt_ids = session.encode("abc")
    parts = ["€".encode()[:2], "€".encode()[2:], b"x", "é".encode()[:1]]
    spelled = dict(zip(ids_of(answer(session, prompt_ids)), itertools.cycle(parts), strict=False))
    monkeypatch.setattr(type(session.pair.target.tokenizer), "token_bytes", lambda _, i: spelled[i])
    deltas = answer(session, prompt_ids)
    data = [spelled[i] for i in ids_of(deltas)]
    assert "".join(d.text for d in deltas) == b"".join(data).decode(errors="replace")
    assert deltas[0].text == ""


def test_providers_are_named(bundle):
    session = open_session(bundle, threads=1)
    assert session.target_provider == session.draft_provider == "CPUExecutionProvider"
    alone = open_session(bundle, target="same", threads=1, use_drafter=False)
    assert (session.target_name, alone.target_name) == ("other", "same")
    assert alone.draft_provider is None
    stats = answer(alone, alone.encode("a"))[-1].stats.to_json()
    assert (stats["target_provider"], stats["draft_provider"]) == ("CPUExecutionProvider", None)


def test_a_prompt_that_fills_the_context_is_one_line(bundle):
    session = open_session(bundle, threads=1)
    prompt_ids = [1] + [5] * (CONTEXT - 1)
    with pytest.raises(PromptError, match=f"{CONTEXT} tokens and the context holds {CONTEXT}"):
        answer(session, prompt_ids)
    (last,) = answer(session, prompt_ids[:-1])
    assert (len(last.token_ids), last.finish_reason) == (1, "context")


def test_what_is_not_in_the_bundle_is_one_line(bundle, tmp_path):
    with pytest.raises(ConfigError, match="no target 'third', it has other, same"):
        open_session(bundle, target="third")
    with pytest.raises(BundleError, match="is not a bundle"):
        open_session(tmp_path)


@pytest.mark.parametrize("draft_mode", ["auto", "full", "text", "cache", "direct", "paper"])
@pytest.mark.parametrize("proposer", ["cascade", "model", "lookup"])
def test_no_way_of_drafting_changes_the_text(bundle, tmp_path, proposer, draft_mode):
    root = shutil.copytree(bundle, tmp_path / "bundle")
    plain = open_session(root, threads=1, use_drafter=False)
    options = {"proposer": proposer, "draft_mode": draft_mode}
    drafted = open_session(root, threads=1, **options)
    sources = set()
    for prompt in PROMPTS:
        prompt_ids = plain.encode(prompt, raw=True)
        deltas = answer(drafted, prompt_ids)
        assert ids_of(deltas) == ids_of(answer(plain, prompt_ids))
        sources |= set(deltas[-1].stats.by_proposer)
    assert sources == {"cascade": {"lookup", "model"}}.get(proposer, {proposer})
    assert (root / "state").exists() == (draft_mode == "cache" and proposer != "lookup")


def test_lookup_does_not_open_the_drafter(bundle, tmp_path):
    root = shutil.copytree(bundle, tmp_path / "bundle")
    for path in (root / "drafter" / "cpu").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    manifest = json.loads((root / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        entry["sha256"] = sha256_of(root / name)
    (root / "manifest.json").write_text(json.dumps(manifest))
    session = open_session(root, threads=1, proposer="lookup")
    stats = answer(session, session.encode("abc abc abc"))[-1].stats
    assert set(stats.by_proposer) == {"lookup"}
    assert stats.to_json()["draft_provider"] is None
    with pytest.raises(Exception, match=r"(?i)protobuf|model"):
        open_session(root, threads=1, proposer="model")


def test_what_one_conversation_learned_the_next_one_knows(bundle, tmp_path):
    root = shutil.copytree(bundle, tmp_path / "bundle")
    first = open_session(root, threads=1, draft_mode="cache")
    prompt_ids = first.encode("abc cab")
    tokens = ids_of(answer(first, prompt_ids))
    learned = {i: uses for i, _, uses in first._ngrams.entries()}
    assert learned
    assert all(tokens.count(i) == uses for i, uses in learned.items())
    second = Session(first.pair)
    assert {i: uses for i, _, uses in second._ngrams.entries()} == learned
    answer(second, prompt_ids)
    saved, _ = read_entries(ngrams_path(root, "other"))
    assert {i: uses for i, _, uses in saved} == {i: 2 * uses for i, uses in learned.items()}


def test_an_abandoned_response_saves_what_it_learned(bundle, tmp_path):
    root = shutil.copytree(bundle, tmp_path / "bundle")
    session = open_session(root, threads=1, draft_mode="cache")
    stream = session.generate(session.encode("abc cab"), DecodeConfig(max_new_tokens=24))
    for _ in range(12):
        next(stream)
    stream.close()
    saved, _ = read_entries(ngrams_path(root, "other"))
    assert list(saved) == list(session._ngrams.entries())


@pytest.mark.parametrize("draft_mode", ["full", "cache"])
@pytest.mark.parametrize("proposer", ["cascade", "lookup"])
def test_acceptance_of_a_conversation_is_the_same_alone_and_interleaved(
    bundle, tmp_path, proposer, draft_mode
):
    """llama.cpp #27852: n-grams of one request spoilt another's acceptance."""
    root = shutil.copytree(bundle, tmp_path / "bundle")
    first = open_session(root, threads=1, proposer=proposer, draft_mode=draft_mode)
    pair = first.pair
    prompts = [first.encode(p) for p in PROMPTS[1:3]]
    alone = []
    for prompt_ids in prompts:
        shutil.rmtree(root / "state", ignore_errors=True)
        alone.append([d.stats.accepted for d in answer(Session(pair), prompt_ids)][-1])
    shutil.rmtree(root / "state", ignore_errors=True)
    sessions = [Session(pair), Session(pair)]
    config = DecodeConfig(max_new_tokens=24)
    streams = [s.generate(p, config) for s, p in zip(sessions, prompts, strict=True)]
    last = [None, None]
    for deltas in itertools.zip_longest(*streams):
        last = [delta or before for delta, before in zip(deltas, last, strict=True)]
    assert [delta.stats.accepted for delta in last] == alone


def test_a_damaged_cache_of_spellings_does_not_stop_decoding(bundle, tmp_path, caplog):
    root = shutil.copytree(bundle, tmp_path / "bundle")
    path = ngrams_path(root, "other")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a cache")
    session = open_session(root, threads=1, draft_mode="cache")
    prompt_ids = session.encode("abc")
    plain = open_session(root, threads=1, use_drafter=False)
    assert ids_of(answer(session, prompt_ids)) == ids_of(answer(plain, prompt_ids))
    assert str(path) in caplog.text
    assert path.with_name("other.unreadable-1.safetensors").read_bytes() == b"not a cache"
    assert len(read_entries(path)[0]) > 0
