"""What was answered before is drafted from, in this process and in later ones, until forgotten."""

import json
import shutil
from collections import Counter

import pytest
from click.testing import CliRunner

from omnidraft_npu.cli import cli
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.past_answers import PastAnswers
from omnidraft_npu.runtime.answer_keeper import answer_keeper
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.past_recall import recall_past, replay_of
from omnidraft_npu.runtime.session import Session

PROMPTS = [f"the {word} drafter verifies {n}" for word in ("small", "large") for n in range(3)]


@pytest.fixture
def bundle(learning_copy):
    return learning_copy


def opened(bundle, target="target", **options):
    return open_pair(bundle, target=target, threads=1, **options)


def answer(session, prompt):
    session.reset()
    config = DecodeConfig(max_new_tokens=24)
    deltas = list(session.generate(session.encode(prompt, raw=True), config))
    return [i for delta in deltas for i in delta.token_ids], deltas[-1].stats


def answer_all(pair):
    """With answers kept."""
    session = Session(pair)
    session.observer = answer_keeper(pair, LearnerConfig())
    return [answer(session, prompt) for prompt in PROMPTS]


def accepted_of_past(found):
    counts = Counter()
    for _, stats in found:
        counts.update(stats.by_proposer.get("past", {}))
    return counts["accepted"]


@pytest.mark.parametrize("target", ["target", "same"])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_an_answer_that_was_given_before_is_drafted_from_it(bundle, target, is_reopened):
    pair = opened(bundle, target)
    first = answer_all(pair)
    again = answer_all(opened(bundle, target) if is_reopened else pair)
    assert [ids for ids, _ in again] == [ids for ids, _ in first]
    assert accepted_of_past(again) > accepted_of_past(first)
    assert sum(stats.rounds for _, stats in again) < sum(stats.rounds for _, stats in first)


@pytest.mark.parametrize(("target", "share"), [("target", 0.4), ("same", 0.8)])
def test_what_is_recalled_is_what_was_written(bundle, target, share):
    """All but where a random model cuts its text unlike its own tokenizer."""
    pair = opened(bundle, target)
    found = answer_all(pair)
    again = opened(bundle, target).past
    foretold = 0
    for ids, _ in found:
        for i in range(6, len(ids)):
            known = again.after(ids[:i], 1)
            foretold += known is not None and known.token_ids == (ids[i],)
    assert foretold > share * sum(len(ids) - 6 for ids, _ in found)
    assert len(opened(bundle, "same" if target == "target" else "target").past) == 0


def test_an_answer_that_is_not_kept_is_not_drafted_from(bundle):
    pair = opened(bundle)
    session = Session(pair)
    for prompt in PROMPTS:
        answer(session, prompt)
    assert len(pair.past) == 0
    answer_all(opened(bundle, proposer="model"))
    assert len(opened(bundle, proposer="model").past) == 0
    assert len(opened(bundle).past) > 0


def test_what_is_forgotten_is_not_drafted_from_any_more(bundle):
    answer_all(opened(bundle))
    forgotten = CliRunner().invoke(cli, ["adapters", "forget", str(bundle), "--yes"])
    assert forgotten.exit_code == 0, forgotten.output
    assert len(opened(bundle).past) == 0


def test_answers_of_another_pair_and_damaged_ones_are_passed_over(bundle, caplog):
    answer_all(opened(bundle))
    whole = opened(bundle)
    files = sorted(replay_of(whole.bundle, whole.target.entry).folder.glob("0*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:-7])
    shutil.copytree(files[0].parent, files[0].parent.with_name("same"))
    assert 0 < len(opened(bundle).past) < len(whole.past)
    assert "passed over" in caplog.text
    assert len(opened(bundle, "same").past) == 0


def test_a_state_that_cannot_be_read_is_said_and_drafting_goes_on(bundle, caplog, monkeypatch):
    pair = opened(bundle)
    buffer = replay_of(pair.bundle, pair.target.entry)

    def fail(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(buffer), "_files", fail)
    assert len(recall_past(buffer)) == 0
    assert "Permission denied" in caplog.text
    assert isinstance(recall_past(None), PastAnswers)


def test_a_measurement_is_not_flattered_by_kept_answers_to_its_prompts(bundle, tmp_path):
    first = answer_all(opened(bundle))
    assert accepted_of_past(answer_all(opened(bundle))) > accepted_of_past(first)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": one, "task": "t"}) + "\n" for one in PROMPTS))
    arguments = ["--prompts", str(prompts), "--raw", "--threads", "1", "--repeats", "1"]
    lengths = ["--draft-length", "4", "--max-new-tokens", "24"]
    result = CliRunner().invoke(cli, ["bench", "-b", str(bundle), *arguments, *lengths, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == len(PROMPTS)
    assert not any(row["by_proposer"].get("past") for row in rows)
