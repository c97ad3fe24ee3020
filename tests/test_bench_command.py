"""`omnidraft-npu bench`: names, identities and honest comparisons."""

import builtins
import copy
import json
import math
import statistics
import struct
from importlib.util import find_spec

import pytest
from click.testing import CliRunner
from tiny_bundle import write_bundle

from omnidraft_npu.cli import cli

ROWS = [
    {"prompt": "ab ba", "task": "letters"},
    {"prompt": "b", "task": "letters"},
    {"prompt": "a a b a a b", "task": "words"},
]
METRICS = """rounds proposed accepted acceptance_rate conditional_acceptance
    mean_acceptance_length bytes_per_target_forward speedup ttft_s prefill_tokens_per_s
    decode_tokens_per_s draft_share verify_share bridge_share round_s_p50 round_s_p95
    peak_rss_bytes draft_provider target_provider"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bench"), eos=())


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def bench(bundle, prompts, *arguments):
    fixed = ["bench", "-b", str(bundle), "--prompts", str(prompts), "--max-new-tokens", "12"]
    return CliRunner().invoke(cli, [*fixed, *arguments])


def measured(bundle, prompts, *arguments):
    result = bench(bundle, prompts, "--draft-tokens", "2", "--repeats", "1", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def document(bundle, prompts):
    result = bench(bundle, prompts, "--draft-tokens", "1,3", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_rows_and_summaries_have_every_metric(document):
    assert set(document) == {"schema_version", "environment", "rows", "summary"}
    assert document["schema_version"] == 1
    assert set(document["summary"]) == {"letters", "words", "all"}
    for metrics in (*document["rows"], *document["summary"].values()):
        assert set(METRICS.split()) <= set(metrics)
        assert all(metrics[name] is not None for name in METRICS.split())
    for row in document["rows"]:
        assert row["is_equal"] is True
        assert row["num_tokens"] == 12
        assert row["target_alone"]["decode_tokens_per_s"] > 0
    assert [(row["draft_tokens"], row["prompt"]) for row in document["rows"]] == [
        (k, row["prompt"]) for k in (1, 3) for row in ROWS
    ]


def test_the_environment_says_what_was_measured_where(document):
    environment = document["environment"]
    assert environment["draft_tokens"] == [1, 3]
    assert environment["repeats"] == 3
    assert environment["target"]["name"] == "other"
    assert environment["target"]["precision"] == environment["drafter"]["precision"] == "fp32"
    assert environment["target_provider"] == "CPUExecutionProvider"
    for name in ("omnidraft_npu", "onnxruntime", "numpy", "python", "cpu", "num_cpus"):
        assert environment[name]


def test_metrics_fit_together(document):
    everything = [
        *document["rows"],
        *(m for s in document["summary"].values() for m in s["by_draft_tokens"].values()),
    ]
    for row in everything:
        assert row["accepted"] <= row["proposed"]
        assert row["acceptance_rate"] == row["accepted"] / row["proposed"]
        assert row["mean_acceptance_length"] == 1 + row["accepted"] / row["rounds"]
        # Nothing stops a response here, so every round ends with a token of the target's own.
        assert row["num_tokens"] == row["accepted"] + row["rounds"]
        shares = row["draft_share"] + row["verify_share"] + row["bridge_share"]
        assert shares == pytest.approx(1)
        assert row["round_s_p50"] <= row["round_s_p95"]


def test_summaries_add_up_their_prompts(document):
    for task, group in document["summary"].items():
        for k, metrics in group["by_draft_tokens"].items():
            rows = [
                row
                for row in document["rows"]
                if task in (row["task"], "all") and row["draft_tokens"] == int(k)
            ]
            for name in ("rounds", "proposed", "accepted", "num_tokens"):
                assert metrics[name] == sum(row[name] for row in rows)
            speedups = [row["speedup"] for row in rows]
            assert metrics["speedup"] == pytest.approx(statistics.geometric_mean(speedups))
            seconds = sum(row["num_tokens"] / row["decode_tokens_per_s"] for row in rows)
            rate = metrics["num_tokens"] / seconds
            assert metrics["decode_tokens_per_s"] == pytest.approx(rate)
            assert metrics["percentiles"]["speedup"]["p50"] == pytest.approx(
                statistics.median(speedups)
            )
    best = document["summary"]["all"]["draft_tokens"]
    lengths = document["summary"]["all"]["by_draft_tokens"]
    assert lengths[str(best)]["speedup"] == max(m["speedup"] for m in lengths.values())
    assert document["summary"]["words"]["speedup"] == pytest.approx(
        document["summary"]["words"]["by_draft_tokens"][str(best)]["speedup"]
    )


def test_the_speedup_is_over_the_target_alone_in_the_same_run(document):
    for row in document["rows"]:
        alone = row["target_alone"]["decode_tokens_per_s"]
        assert row["speedup"] == pytest.approx(row["decode_tokens_per_s"] / alone)
        assert math.isfinite(row["speedup"])


@pytest.mark.parametrize("mode", ["auto", "full", "text", "direct", "cache", "paper"])
def test_every_mode_can_be_measured(bundle, prompts, mode):
    found = measured(bundle, prompts, "--proposer", "model", "--draft-mode", mode)
    assert found["environment"]["draft_mode"] == mode
    assert found["environment"]["proposer"] == "model"
    assert found["summary"]["all"]["is_equal"] is True
    assert set(found["summary"]["all"]["by_proposer"]) == {"model"}


def test_lookup_is_measured_without_a_drafter(bundle, prompts):
    found = measured(bundle, prompts, "--proposer", "lookup")
    assert found["environment"]["drafter"] is None
    assert found["environment"]["draft_provider"] is None
    assert found["summary"]["all"]["draft_share"] == 0


def test_sampled_texts_are_not_compared(bundle, prompts):
    found = measured(bundle, prompts, "--temperature", "0.7", "--top-k", "5", "--seed", "3")
    assert found["environment"]["temperature"] == 0.7
    assert found["environment"]["top_k"] == 5
    assert [row["is_equal"] for row in found["rows"]] == [None] * 3
    assert found["summary"]["all"]["is_equal"] is None


def test_the_target_is_measured_before_the_drafter_is_opened(bundle, prompts, monkeypatch):
    from omnidraft_npu.runtime import bench as module

    events = []
    open_session, decode = module.open_session, module.decode_prompt

    def opened(*arguments, **options):
        session = open_session(*arguments, **options)
        events.append("open with drafter" if session.pair.drafter else "open alone")
        return session

    def decoded(session, prompt, config):
        events.append("decode")
        return decode(session, prompt, config)

    monkeypatch.setattr(module, "open_session", opened)
    monkeypatch.setattr(module, "decode_prompt", decoded)
    assert bench(bundle, prompts, "--draft-tokens", "2", "--repeats", "2").exit_code == 0
    setting = ["decode"] * (1 + 2 * len(ROWS))
    assert events == ["open alone", *setting, "open with drafter", *setting]


def test_rows_are_those_of_the_run_of_median_speed():
    from omnidraft_npu.runtime.bench import Measurement, Run

    class Stats:
        num_tokens = 10

        def __init__(self, decode_s):
            self.decode_s = decode_s

    def median(*seconds):
        runs = tuple(Run(token_ids=(), stats=Stats(s)) for s in seconds)
        return Measurement(runs=runs, peak_rss_bytes=None).median.stats.decode_s

    assert median(3.0, 1.0, 2.0) == 2.0
    assert median(1.0, 2.0, 9.0, 3.0) == 3.0
    assert median(5.0) == 5.0


def test_every_response_starts_from_an_empty_cache(bundle):
    """A prompt that stayed cached from the repeat before would need no prefill."""
    from omnidraft_npu.config import DecodeConfig
    from omnidraft_npu.runtime.bench import decode_prompt
    from omnidraft_npu.runtime.session import open_session

    session = open_session(bundle)
    prompt = session.encode("a a b a a b")
    runs = [decode_prompt(session, prompt, DecodeConfig(max_new_tokens=4)) for _ in range(2)]
    assert [run.stats.num_prefilled for run in runs] == [len(prompt) - 1] * 2


def test_texts_that_differ_are_told(bundle, prompts, monkeypatch):
    from omnidraft_npu.runtime import bench as module

    decode = module.decode_prompt

    def decoded(session, prompt, config):
        run = decode(session, prompt, config)
        if session.pair.drafter and len(prompt) == min_length:
            return module.Run(token_ids=(*run.token_ids[:-1], 3), stats=run.stats)
        return run

    from omnidraft_npu.runtime.session import open_session

    session = open_session(bundle)
    min_length = min(len(session.encode(row["prompt"])) for row in ROWS)
    monkeypatch.setattr(module, "decode_prompt", decoded)
    result = bench(bundle, prompts, "--draft-tokens", "2", "--repeats", "1", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [row["is_equal"] for row in found["rows"]] == [True, False, True]
    assert [found["summary"][t]["is_equal"] for t in ("letters", "words")] == [False, True]
    assert "1 of 3 texts differ" in result.stderr


def test_people_get_a_table_and_a_picture(bundle, prompts, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    arguments = ("--draft-tokens", "1,2", "--repeats", "1", "--plot", str(picture))
    result = bench(bundle, prompts, *arguments)
    assert result.exit_code == 0, result.output
    for word in ("letters", "words", "all", "speed-up", "bridge", "x"):
        assert word in result.stdout
    assert "target alone" in result.stderr
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 800 <= width <= 3000
    assert 600 <= height <= 2000
    assert len(data) > 10_000


def test_the_table_shows_tokens_over_rounds(document, capsys):
    """A stop token can cut a round short."""
    from omnidraft_npu.commands.bench_output import print_table

    shown = copy.deepcopy(document)
    for group in shown["summary"].values():
        for row in group["by_draft_tokens"].values():
            row |= {"num_tokens": 46, "rounds": 2, "accepted": 46, "mean_acceptance_length": 24.0}
    print_table(shown)
    table = capsys.readouterr().out
    assert "23.00" in table
    assert "24.00" not in table


def test_a_missing_matplotlib_is_told_before_anything_is_measured(bundle, prompts, monkeypatch):
    import_module = builtins.__import__

    def without_matplotlib(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return import_module(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    result = bench(bundle, prompts, "--plot", "x.png")
    assert result.exit_code == 2
    assert result.stderr.strip() == (
        "Error: --plot needs matplotlib, which is not installed here: "
        "in the clone of omnidraft-npu, pip install '.[plots]'"
    )


@pytest.mark.parametrize("name", ["missing/x.png", "x" * 250 + ".png"])
def test_a_picture_that_cannot_be_written_is_told_before_anything_is_measured(
    bundle, prompts, tmp_path, monkeypatch, name
):
    from omnidraft_npu.runtime import bench as measuring

    pytest.importorskip("matplotlib")
    monkeypatch.setattr(measuring, "measure", None)
    result = bench(bundle, prompts, "--plot", str(tmp_path / name))
    assert result.exit_code in (1, 2)
    (line,) = result.stderr.splitlines()
    assert "cannot be used" in line or "does not exist" in line
    assert list(tmp_path.iterdir()) == []


def test_an_adapted_length_is_measured_next_to_fixed_ones(bundle, prompts):
    options = ["--draft-length", "auto,2", "--repeats", "1"]
    found = json.loads(bench(bundle, prompts, *options, "--json").stdout)
    assert found["environment"]["draft_tokens"] == [2, "auto"]
    assert all(row["is_equal"] for row in found["rows"])
    lengths = found["summary"]["all"]["by_draft_tokens"]
    assert list(lengths) == ["2", "auto"]
    assert set(lengths["2"]["stops"]) <= {"budget", "end", "context", "nothing"}
    assert sum(lengths["auto"]["stops"].values()) > 0
    table = bench(bundle, prompts, *options).stdout
    assert " auto " in table
    assert "drafts" in table


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--draft-length", "2,often"], ["2,often"], 2),
        (["--draft-tokens", "2,0"], ["0 is not a draft length"], 2),
        (["--draft-tokens", "two"], ["'two'"], 2),
        (["--repeats", "0"], ["repeats"], 2),
        (["--max-new-tokens", "0"], ["max_new_tokens is 0"], 2),
        (["--target", "nobody"], ["nobody"], 2),
        (["--prompts", "no-such-file.jsonl"], ["no-such-file.jsonl"], 1),
        pytest.param(
            ["--plot", "no/such/folder/x.png"],
            ["folder", "no/such/folder/x.png"],
            2,
            marks=pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib"),
        ),
    ],
)
def test_bad_input_is_one_line(bundle, prompts, arguments, words, code):
    result = bench(bundle, prompts, *arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    for word in words:
        assert word in last


def test_a_bad_row_names_its_line(bundle, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    result = bench(bundle, tmp_path / "bad.jsonl")
    assert result.exit_code == 1
    assert "bad.jsonl, line 2 lacks 'prompt'" in result.stderr


def test_the_builtin_prompts_are_used_where_no_file_is_given(bundle):
    command = ["bench", "-b", str(bundle), "--raw", "--per-task", "1", "--max-new-tokens", "2"]
    options = ["--draft-tokens", "1", "--repeats", "1", "--json"]
    result = CliRunner().invoke(cli, [*command, *options])
    assert result.exit_code == 0, result.output
    tasks = [row["task"] for row in json.loads(result.stdout)["rows"]]
    assert tasks == ["chat", "maths", "code", "summarising"]


def test_a_prompt_too_long_is_told_before_any_is_measured(bundle, tmp_path, monkeypatch):
    from omnidraft_npu.runtime import bench as module

    monkeypatch.setattr(module, "decode_prompt", None)
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "ab " * 200}) + "\n"
    )
    result = bench(bundle, tmp_path / "long.jsonl")
    assert result.exit_code == 1
    assert "prompt 2 has" in result.stderr
    assert "context holds 96" in result.stderr
