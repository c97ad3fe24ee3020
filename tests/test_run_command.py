"""`omnidraft-npu run` as scripts and people use it, on a tiny bundle."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.cli import cli


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A llama drafter, a gemma target without and a qwen target with a chat template."""
    root = tmp_path_factory.mktemp("run")
    drafter = write_checkpoint(root / "drafter", vocab_size=280)
    target = write_checkpoint(
        root / "target", "gemma3_text", vocab_size=310, num_logits=320, seed=1, seed_text="verify"
    )
    chat = write_checkpoint(root / "chat", "qwen2", vocab_size=290, seed=2, seed_text="chat")
    template = "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    path = chat / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    output = root / "bundle"
    models = ["--drafter", str(drafter), "--target", str(target), "--target", str(chat)]
    options = ["-o", str(output), "--precision", "fp32", "--context-length", "128"]
    made = CliRunner().invoke(cli, ["export", *models, *options])
    assert made.exit_code == 0, made.output
    return output


def run(bundle, *arguments, stdin=None):
    return CliRunner().invoke(
        cli, ["run", "-b", str(bundle), "--max-new-tokens", "24", *arguments], input=stdin
    )


def document(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_drafting_changes_the_cost_and_not_the_text(bundle):
    plain = document(run(bundle, "the small drafter", "--no-draft", "--json"))
    for k in range(1, 9):
        drafted = document(run(bundle, "the small drafter", "--json", "--draft-tokens", str(k)))
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["text"] == plain["text"]
        assert drafted["stats"]["proposed"] > 0
    assert plain["stats"]["proposed"] == 0
    assert plain["stats"]["draft_provider"] is None


@pytest.mark.parametrize("proposer", ["cascade", "model", "lookup"])
def test_an_adapted_draft_length_leaves_greedy_text_alone_and_says_why_drafts_ended(
    bundle, proposer
):
    plain = document(run(bundle, "the small drafter", "--no-draft", "--json"))
    options = ["--json", "--draft-length", "auto", "--proposer", proposer]
    drafted = document(run(bundle, "the small drafter", *options))
    assert drafted["token_ids"] == plain["token_ids"]
    stats = drafted["stats"]
    assert stats["draft_length"] == "auto"
    assert 0 < sum(stats["stops"].values()) <= stats["rounds"]
    if proposer == "model":
        assert stats["stops"]["trial"] == 2  # rounds without drafts, to measure them
    assert stats["mean_draft_length"] == stats["proposed"] / stats["rounds"]


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ([], "auto"),
        (["--seed", "1"], "auto"),
        (["--temperature", "1"], "auto"),
        (["--temperature", "1", "--seed", "1"], 4),
        (["--temperature", "1", "--seed", "1", "--draft-length", "auto"], 4),
        (["--temperature", "1", "--seed", "1", "--draft-length", "2"], 2),
        (["--draft-length", "3"], 3),
    ],
)
def test_the_draft_length_is_adapted_unless_a_seed_fixes_the_text(bundle, options, length):
    assert document(run(bundle, "two", "--json", *options))["stats"]["draft_length"] == length


@pytest.mark.parametrize("mode", ["auto", "full", "text", "direct", "cache", "paper"])
def test_sampled_text_is_fixed_by_its_seed(bundle, mode):
    options = ["--json", "--temperature", "1.5", "--draft-mode", mode, "--proposer", "model"]
    warm = ["the small drafter", *options]
    texts = [document(run(bundle, *warm, "--seed", str(seed))) for seed in (4, 4, 5)]
    ids = [one["token_ids"] for one in texts]
    assert texts[0]["stats"]["draft_mode"] == mode
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]


def test_sampling_in_paper_mode_is_called_approximate_once(bundle):
    sampled = run(bundle, "two", "--draft-mode", "paper", "--temperature", "1")
    assert sampled.stderr.count("approximate") == 1
    assert "approximate" not in run(bundle, "two", "--draft-mode", "paper").stderr
    assert "approximate" not in run(bundle, "two", "--temperature", "1").stderr


def test_options_of_sampling_reach_the_target(bundle):
    """With one token to draw from, sampled text is greedy text."""
    greedy = document(run(bundle, "the large target", "--json"))["token_ids"]
    hot = ["the large target", "--json", "--temperature", "5", "--seed", "1"]
    for option in (["--top-k", "1"], ["--top-p", "1e-9"], ["--min-p", "1"]):
        assert document(run(bundle, *hot, *option))["token_ids"] == greedy
    assert document(run(bundle, *hot))["token_ids"] != greedy
    penalised = document(run(bundle, "the large target", "--json", "--repetition-penalty", "9"))
    assert penalised["token_ids"] != greedy


def test_json_has_the_names_that_scripts_rely_on(bundle):
    result = document(run(bundle, "two", "--json"))
    assert set(result) == {"schema_version", "text", "token_ids", "finish_reason", "stats"}
    assert result["finish_reason"] in ("stop", "length", "context")
    names = """rounds proposed accepted acceptance_rate conditional_acceptance
        mean_acceptance_length bytes_per_target_forward speedup ttft_s prefill_tokens_per_s
        decode_tokens_per_s draft_share verify_share bridge_share round_s_p50 round_s_p95
        peak_rss_bytes draft_provider target_provider"""
    assert set(names.split()) <= set(result["stats"])
    stats = result["stats"]
    assert stats["accepted"] <= stats["proposed"]
    assert stats["mean_acceptance_length"] == 1 + stats["accepted"] / stats["rounds"]
    assert stats["target_provider"] == "CPUExecutionProvider"


def test_text_is_the_only_thing_on_stdout(bundle):
    shown = run(bundle, "the large target")
    expected = document(run(bundle, "the large target", "--json"))["text"]
    assert shown.exit_code == 0
    assert shown.stdout == expected + "\n"
    assert "tok/s" in shown.stderr
    assert "no chat template" in shown.stderr


def test_the_prompt_may_come_from_an_argument_a_file_or_stdin(bundle, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("größer 雪 🙂\n\tif".encode())
    text = (tmp_path / "prompt.txt").read_text(encoding="utf-8")
    results = [
        document(run(bundle, text, "--json")),
        document(run(bundle, "-f", str(tmp_path / "prompt.txt"), "--json")),
        document(run(bundle, "--json", stdin=text.encode())),
        document(run(bundle, "-", "--json", stdin=text.encode())),
    ]
    assert all(r["token_ids"] == results[0]["token_ids"] for r in results)


def test_a_prompt_is_the_same_from_a_file_and_from_stdin_less_one_line_end(bundle, tmp_path):
    path = tmp_path / "prompt.txt"

    def ids(*arguments, stdin=None):
        return document(run(bundle, *arguments, "--json", stdin=stdin))["token_ids"]

    def both(data):
        path.write_bytes(data)
        from_file = ids("-f", str(path))
        assert ids(stdin=data) == from_file
        return from_file

    plain, ended = ids("two"), ids("two\n")
    assert plain != ended
    assert both(b"two") == both(b"two\n") == both(b"two\r\n") == plain
    assert both(b"two\n\n") == ended
    assert "stdin is empty" in run(bundle, stdin=b"\n").stderr
    path.write_bytes(b"\n")
    assert "prompt.txt is empty" in run(bundle, "-f", str(path)).stderr


def test_a_byte_order_mark_is_not_part_of_a_prompt(bundle, tmp_path, monkeypatch):
    from omnidraft_npu.runtime.session import Session

    prompts = []
    encode = Session.encode

    def encoded(self, text, **options):
        prompts.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Session, "encode", encoded)
    marked = b"\xef\xbb\xbftwo"
    (tmp_path / "prompt.txt").write_bytes(marked)
    for result in (run(bundle, stdin=marked), run(bundle, "-f", str(tmp_path / "prompt.txt"))):
        assert result.exit_code == 0, result.output
    assert prompts == ["two", "two"]
    bad = run(bundle, stdin=b"\xef\xbb\xbfab\xff")
    assert "is 0xff" in bad.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX locales")
def test_an_argument_in_utf_8_is_read_in_every_locale(bundle):
    command = [sys.executable, "-m", "omnidraft_npu", "run", "-b", str(bundle), "--json"]
    limit = ["--max-new-tokens", "2"]
    found = [
        subprocess.run(
            [*command, *limit, prompt],
            env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=60,
        )
        for prompt in ("日本語", b"caf\xe9")
    ]
    expected = document(run(bundle, "日本語", "--json", *limit))["token_ids"]
    assert found[0].returncode == 0, found[0].stderr
    assert json.loads(found[0].stdout)["token_ids"] == expected
    assert found[1].returncode == 1
    assert "PROMPT is not UTF-8 text (byte 3 is 0xe9)" in found[1].stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_a_closed_stdin_holds_no_prompt(bundle, prompt):
    command = [sys.executable, "-m", "omnidraft_npu", "run", "-b", str(bundle), *prompt]
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: there is no prompt")


def test_a_control_token_in_a_prompt_is_that_token_where_it_is_asked_for(bundle):
    parsed = run(bundle, "<eos>", "--target", "chat", "--parse-special", "--json")
    templated = run(bundle, "<bos>user: <eos>\n", "--target", "chat", "--raw", "--json")
    assert document(parsed)["token_ids"] == document(templated)["token_ids"]


def test_the_chat_template_is_used_unless_raw(bundle):
    chat = document(run(bundle, "two", "--target", "chat", "--json"))
    raw = document(run(bundle, "two", "--target", "chat", "--raw", "--json"))
    templated = document(run(bundle, "<bos>user: two\n", "--target", "chat", "--raw", "--json"))
    assert chat["token_ids"] == templated["token_ids"]
    assert chat["token_ids"] != raw["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "words", "code"),
    [
        (["x", "--draft-length", "0"], None, ["draft_length is 0", "--no-draft"], 2),
        (["x", "--draft-tokens", "-3"], None, ["draft_length is -3"], 2),
        (["x", "--draft-length", "some"], None, ["'some'", "auto"], 2),
        (["x", "--max-new-tokens", "0"], None, ["max_new_tokens is 0"], 2),
        (["x", "--temperature", "-1"], None, ["temperature is -1"], 2),
        (["x", "--top-p", "0"], None, ["top_p is 0", "--top-p 1"], 2),
        (["x", "--threads", "0"], None, ["threads"], 2),
        (["x", "--target", "nobody"], None, ["nobody", "target", "chat"], 2),
        ([""], None, ["empty"], 1),
        ([], b"", ["stdin is empty"], 1),
        ([], b"caf\xe9", ["not UTF-8", "0xe9"], 1),
        (["x", "-f", "y"], None, ["PROMPT", "--prompt-file"], 2),
        (["-f", "no-such-file"], None, ["no-such-file"], 1),
        (["word " * 500], None, ["128", "--context-length"], 1),
    ],
)
def test_bad_input_is_one_line(bundle, arguments, stdin, words, code):
    result = run(bundle, *arguments, stdin=stdin)
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    for word in words:
        assert word in last


def test_a_damaged_bundle_is_exit_code_5(bundle, tmp_path):
    result = run(tmp_path, "x")
    assert result.exit_code == 5
    assert "not a bundle" in result.stderr


def test_run_loads_no_torch(bundle):
    code = (
        "import sys\nfrom omnidraft_npu.cli import cli\n"
        f"try:\n    cli(['run', '-b', {str(bundle)!r}, '--max-new-tokens', '2', 'two'])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print('LOADED', sorted({'torch', 'onnx', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.splitlines()[-1] == "LOADED []"
