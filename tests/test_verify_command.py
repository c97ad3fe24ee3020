"""`omnidraft-npu verify`: passes a working runtime, and finds each kind of broken one."""

import contextlib
import itertools
import json

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_bundle import write_bundle

from omnidraft_npu.cli import cli
from omnidraft_npu.proposal import Proposal
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM
from omnidraft_npu.runtime.observed_lm import ObservedLM

PROMPTS = ("ab ba", "b", "a a b a a b", "cab", "bba")
TWO = ("--per-task", "2")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("verify"), eos=())


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "task": "t"}) + "\n" for p in PROMPTS))
    return path


def verify(bundle, prompts, *arguments):
    fixed = ["verify", "-b", str(bundle), "--prompts", str(prompts), "--max-new-tokens", "24"]
    return CliRunner().invoke(cli, [*fixed, *arguments])


def document(result):
    return json.loads(result.stdout)


@pytest.mark.parametrize("target", ["other", "same"])
def test_a_working_bundle_passes_for_every_draft_length(bundle, prompts, target):
    result = verify(bundle, prompts, "--target", target, "--draft-tokens", "1,3,8", "--json")
    assert result.exit_code == 0, result.output
    found = document(result)
    assert found["schema_version"] == 1
    assert found["outcome"] == "equal"
    assert [row["prompt"] for row in found["prompts"]] == list(PROMPTS)
    assert all(row["num_tokens"] == 24 and not row["differences"] for row in found["prompts"])


def test_the_report_for_people_ends_with_counts(bundle, prompts):
    result = verify(bundle, prompts, "--raw")
    assert result.exit_code == 0
    assert result.stdout.strip() == (
        "5 prompts, 120 tokens: 5 equal, 0 parted at a near-tie, 0 wrong"
    )


def test_progress_goes_token_by_token_and_to_stderr_only(bundle, prompts, monkeypatch):
    """With the built-in prompts on the simulator the first prompt took minutes without a word."""
    told = []

    @contextlib.contextmanager
    def progress():
        yield lambda *said: told.append(said)

    monkeypatch.setattr("omnidraft_npu.commands.verify.stage_progress", progress)
    arguments = ("--draft-tokens", "1,4", "--temperature", "0", "--temperature", "1")
    verify(bundle, prompts, *arguments, "--samples", "2")

    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == [
        "contexts that the target sees",
        "tokens decoded greedily",
        "rounds sampled at temperature 1",
    ]
    for stage in stages:
        done = [done for name, done, _ in told if name == stage]
        (total,) = {total for name, _, total in told if name == stage}
        assert (done[0], done[-1], done) == (0, total, sorted(done))
    assert total == 10
    tokens = [done for name, done, _ in told if name == "tokens decoded greedily"]
    assert tokens[-1] == 24 * len(PROMPTS) * 3
    assert max(b - a for a, b in itertools.pairwise(tokens)) <= 5


def test_a_finished_stage_is_a_line_on_stderr(bundle, prompts):
    result = verify(bundle, prompts, "--raw")
    assert "tokens decoded greedily: 240 done in" in result.stderr
    assert "done in" not in result.stdout


def test_a_rewind_off_by_one_is_a_bug(bundle, prompts, monkeypatch):
    rewind = ObservedLM.rewind
    monkeypatch.setattr(
        ObservedLM,
        "rewind",
        lambda self, length: rewind(self, min(length + (length > 0), self.length)),
    )
    result = verify(bundle, prompts, "--json")
    assert result.exit_code == 3
    assert document(result)["outcome"] == "bug"


def test_a_wrongly_accepted_draft_is_named(bundle, prompts, monkeypatch):
    """Every second drafted token is swapped for another after the target has agreed."""
    from omnidraft_npu import speculative

    verify_round = speculative.verify

    def accept_wrongly(proposal, *arguments, **options):
        verdict = verify_round(proposal, *arguments, **options)
        if verdict.num_accepted > 1:
            tokens = list(verdict.token_ids)
            tokens[1] = tokens[1] + 1 if tokens[1] < 20 else tokens[1] - 1
            object.__setattr__(verdict, "token_ids", tuple(tokens))
        return verdict

    monkeypatch.setattr(speculative, "verify", accept_wrongly)
    arguments = ("--target", "same", "--tie-tolerance", "0")
    result = verify(bundle, prompts, *arguments, "--json")
    assert result.exit_code == 3, result.output
    first = document(result)["prompts"][0]
    (difference,) = first["differences"]
    assert first["outcome"] == "bug"
    assert difference["position"] == 1
    assert abs(difference["plain_token"] - difference["drafted_token"]) == 1
    assert 0 < difference["logit_gap"] <= difference["logit_range"]
    shown = verify(bundle, prompts, *arguments)
    assert shown.exit_code == 3
    assert f"({difference['plain_token']}), drafted" in shown.stdout
    assert "token 2: plain" in shown.stdout
    assert "5 wrong" in shown.stdout


def test_a_near_tie_is_reported_and_fails_only_if_strict(bundle, prompts, monkeypatch):
    """Rows scored with others see their two highest logits swapped where they nearly tie."""
    score = ObservedLM.score

    def rounded(self, token_ids):
        rows = score(self, token_ids)
        order = np.argsort(rows, axis=-1)
        for row, (second, first) in zip(rows, order[:, -2:], strict=True):
            row[second] = row[first] - 1e-4
            if len(token_ids) > 1:
                row[second] += 2e-4
        return rows

    monkeypatch.setattr(ObservedLM, "score", rounded)
    result = verify(bundle, prompts, "--json")
    assert result.exit_code == 0, result.output
    found = document(result)
    assert found["outcome"] == "near-tie"
    gaps = [d["logit_gap"] for row in found["prompts"] for d in row["differences"]]
    assert gaps
    np.testing.assert_allclose(gaps, 1e-4, rtol=0.2)
    assert "near-tie" in verify(bundle, prompts).stdout
    assert verify(bundle, prompts, "--strict").exit_code == 3
    assert verify(bundle, prompts, "--tie-tolerance", "1e-7").exit_code == 3


@pytest.mark.parametrize("cut_plain", [False, True])
def test_a_response_that_ends_too_early_or_too_late_is_a_bug(
    bundle, prompts, monkeypatch, cut_plain
):
    from omnidraft_npu.runtime import session

    generate = session.generate

    def cut(proposer, *arguments):
        rounds = list(generate(proposer, *arguments))
        yield from rounds[:-1] if (proposer is None) == cut_plain else rounds

    monkeypatch.setattr(session, "generate", cut)
    result = verify(bundle, prompts)
    assert result.exit_code == 3
    ended = "plain" if cut_plain else "drafted"
    assert f"{ended} nothing" in result.stdout
    assert ": bug, one response ended" in result.stdout


def test_a_target_that_ignores_its_prompt_is_caught(bundle, prompts, monkeypatch):
    score = OnnxCausalLM.score

    def constant(self, token_ids):
        rows = score(self, token_ids)
        rows[:] = np.arange(rows.shape[1])
        return rows

    monkeypatch.setattr(OnnxCausalLM, "score", constant)
    result = verify(bundle, prompts)
    assert result.exit_code == 3
    assert "same logits whatever the prompt" in result.stdout
    assert "5 equal" in result.stdout


def test_a_target_that_forgets_its_cache_is_caught(bundle, prompts, monkeypatch):
    score = OnnxCausalLM.score

    def forgetful(self, token_ids):
        rows = score(self, token_ids)
        for row, token_id in zip(rows, token_ids, strict=True):
            row[:] = np.random.default_rng(token_id).normal(size=len(row))
        return rows

    monkeypatch.setattr(OnnxCausalLM, "score", forgetful)
    result = verify(bundle, prompts, "--json")
    assert result.exit_code == 3
    assert "last token only" in document(result)["blindness"]


def test_one_prompt_of_one_token_is_enough_to_see_blindness(bundle, tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text("a")
    assert verify(bundle, tmp_path / "one.txt", "--raw").exit_code == 0
    score = OnnxCausalLM.score
    monkeypatch.setattr(OnnxCausalLM, "score", lambda self, ids: np.zeros_like(score(self, ids)))
    assert "whatever the prompt" in verify(bundle, tmp_path / "one.txt", "--raw").stdout


def test_logits_that_are_nan_are_a_bug(bundle, prompts, monkeypatch):
    score = OnnxCausalLM.score

    def broken(self, token_ids):
        rows = score(self, token_ids)
        rows[-1, 5] = np.nan
        return rows

    monkeypatch.setattr(OnnxCausalLM, "score", broken)
    result = verify(bundle, prompts)
    assert result.exit_code == 3
    assert "NaN" in result.stdout


def test_the_drafter_is_really_used(bundle, prompts, monkeypatch):
    from omnidraft_npu.drafting import ModelDrafter

    asked = []

    def propose(self, max_draft_tokens, *_):
        asked.append(max_draft_tokens)
        return Proposal.EMPTY

    monkeypatch.setattr(ModelDrafter, "propose", propose)
    assert verify(bundle, prompts, "--draft-tokens", "2,5").exit_code == 0
    assert {2, 5} <= set(asked)


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--draft-tokens", "0"], ["draft length"], 2),
        (["--draft-tokens", "1;2"], ["1;2"], 2),
        (["--tie-tolerance", "2"], ["tie_tolerance is 2"], 2),
        (["--max-new-tokens", "0"], ["max_new_tokens"], 2),
        (["--target", "nobody"], ["nobody"], 2),
        (["--prompts", "no-such-file"], ["no-such-file"], 1),
    ],
)
def test_bad_input_is_one_line(bundle, prompts, arguments, words, code):
    result = verify(bundle, prompts, *arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    for word in words:
        assert word in last


@pytest.mark.parametrize("mode", ["full", "text", "direct", "cache"])
def test_samples_of_a_lossless_mode_follow_the_law(bundle, prompts, mode):
    arguments = ("--temperature", "0.4", "--samples", "300", "--draft-mode", mode, "--json")
    result = verify(bundle, prompts, *TWO, *arguments)
    assert result.exit_code == 0, result.output
    found = document(result)
    (sampling,) = found["sampling"]
    assert sampling["temperature"] == 0.4
    assert sampling["threshold"] == 1e-3 / 2
    assert found["prompts"] == []
    for row in sampling["prompts"]:
        assert row["num_samples"] == 300
        assert row["first"]["num_degrees"] > 3
        assert row["p_value"] >= sampling["threshold"]


def test_second_tokens_are_tested_where_drafts_are_accepted(bundle, prompts):
    arguments = ("--target", "same", "--proposer", "model", "--temperature", "0.3", "--json")
    found = document(verify(bundle, prompts, *TWO, *arguments, "--samples", "400"))
    rows = found["sampling"][0]["prompts"]
    assert any(row["second"]["num_degrees"] > 3 for row in rows)
    assert found["outcome"] == "equal"


def test_a_wrong_law_of_the_second_token_is_caught(bundle, prompts, monkeypatch):
    """From the second place of a round on, the law is another temperature's."""
    from omnidraft_npu import verification
    from omnidraft_npu.token_law import TokenLaw

    decide = verification._decide
    monkeypatch.setattr(
        verification,
        "_decide",
        lambda p, i, law, rng: decide(p, i, TokenLaw(law.dense**0.6) if i else law, rng),
    )
    arguments = ("--target", "same", "--proposer", "model", "--temperature", "0.3")
    result = verify(bundle, prompts, *TWO, *arguments, "--samples", "400", "--json")
    assert result.exit_code == 3
    rows = document(result)["sampling"][0]["prompts"]
    assert min(row["second"]["p_value"] for row in rows) < 1e-6
    assert min(row["first"]["p_value"] for row in rows) > 1e-3


def test_the_papers_rule_is_caught_when_sampling_and_not_when_greedy(bundle, prompts):
    arguments = ("--proposer", "model", "--draft-mode", "paper", "--samples", "1000")
    assert verify(bundle, prompts, *TWO, *arguments).exit_code == 0
    result = verify(bundle, prompts, *TWO, *arguments, "--temperature", "0", "--temperature", "1")
    assert result.exit_code == 3
    assert "samples do not follow the target's law, p = " in result.stdout
    assert "2 equal, 0 parted" in result.stdout


def test_drafts_accepted_too_often_are_caught(bundle, prompts, monkeypatch):
    """The ratio of the target's to the drafter's probability counts double."""
    from omnidraft_npu import verification

    class Doubled:
        def __init__(self, rng):
            self.rng = rng

        def random(self):
            return self.rng.random() / 2

    decide = verification._decide
    monkeypatch.setattr(verification, "_decide", lambda p, i, w, rng: decide(p, i, w, Doubled(rng)))
    result = verify(bundle, prompts, *TWO, "--temperature", "1", "--samples", "400")
    assert result.exit_code == 3
    assert "wrong" in result.stdout


def test_a_token_that_top_k_rules_out_is_caught(bundle, prompts, monkeypatch):
    from omnidraft_npu import sampling

    arguments = ("--temperature", "1", "--top-k", "3", "--samples", "60")
    assert verify(bundle, prompts, *TWO, *arguments).exit_code == 0
    rows = sampling.TargetRows

    def without_top_k(config, logits, draft_ids, seen):
        if len(draft_ids):
            object.__setattr__(config, "top_k", 0)
        return rows(config, logits, draft_ids, seen)

    monkeypatch.setattr(sampling, "TargetRows", without_top_k)
    result = verify(bundle, prompts, *TWO, *arguments, "--json")
    assert result.exit_code == 3
    row = document(result)["sampling"][0]["prompts"][0]
    assert row["p_value"] == 0
    assert row["first"]["statistic"] is None


def test_a_machine_on_which_no_passes_are_exact_is_named(bundle, prompts, monkeypatch):
    from omnidraft_npu.runtime import exact_search
    from omnidraft_npu.runtime.exact_passes import NOT_EXACT

    assert document(verify(bundle, prompts, *TWO, "--raw", "--json"))["exactness"] is None
    monkeypatch.setattr(exact_search, "recall_or_find_rule", lambda model, path: NOT_EXACT)
    found = document(verify(bundle, prompts, *TWO, "--raw", "--json"))
    assert found["exactness"] == "exact but for near-ties"
    lines = verify(bundle, prompts, *TWO, "--raw").stdout.splitlines()
    assert lines[-1] == "drafted text is exact but for near-ties on this machine"
