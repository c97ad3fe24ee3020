"""`omnidraft-npu cache` on a tiny bundle that has learned something."""

import json
import shutil

import pytest
from click.testing import CliRunner
from ngram_rows import make_entries
from tiny_bundle import write_bundle

from omnidraft_npu.bridge.ngram_file import PairKey, read_entries, write_entries
from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.commands import cache
from omnidraft_npu.state_folder import ngrams_path
from omnidraft_npu.text.tokenizer import Tokenizer

ROWS = ((30, [5, 4], 1), (31, [4, 4, 4], 2), (32, [3, 5], 7))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle"), eos=())


@pytest.fixture
def bundle(made, tmp_path):
    return shutil.copytree(made, tmp_path / "bundle")


def key_of(bundle, target="other"):
    manifest = open_bundle(bundle).manifest
    return PairKey(
        drafter_sha256=manifest.drafter.tokenizer_sha256,
        target_sha256=manifest.targets[target].tokenizer_sha256,
    )


def write(bundle, *rows, key=None):
    path = ngrams_path(bundle, "other")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_entries(path, make_entries(*rows), key or key_of(bundle))
    return path


def run(*arguments):
    return CliRunner().invoke(cli, ["cache", *map(str, arguments)])


def test_show_gives_counts_and_the_most_used_merges(bundle):
    write(bundle, *ROWS)
    shown = json.loads(run("show", bundle, "--json", "--top", "2").stdout)
    most_used = shown.pop("most_used")
    assert shown == {
        "schema_version": 1,
        "target": "other",
        "entries": 3,
        "bytes": 3 * 12 + 4 * 7,
        "budget_bytes": 1_000_000,
        "uses": 10,
        "hits": 7,
    }
    target, drafter = (
        Tokenizer.from_folder(bundle / folder) for folder in ("targets/other", "drafter")
    )
    assert [(m["token_id"], m["piece_ids"], m["uses"]) for m in most_used] == [
        (32, [3, 5], 7),
        (31, [4, 4, 4], 2),
    ]
    assert most_used[0]["token"].encode() == target.token_bytes(32)
    assert [p.encode() for p in most_used[0]["pieces"]] == [drafter.token_bytes(i) for i in (3, 5)]

    text = run("show", bundle)
    assert text.exit_code == 0
    assert "other: 3 entries, 64 of 1,000,000 bytes; 7 hits" in text.stdout
    pieces = " + ".join(f"'{p}'" for p in most_used[0]["pieces"])
    assert f"       7  '{most_used[0]['token']}' = {pieces}" in text.stdout.splitlines()


def test_bytes_that_are_no_text_are_shown_as_escapes():
    assert cache._text("é".encode()[:1]) == "\\xc3"


def test_a_bundle_that_learned_nothing_says_how_to_learn(bundle):
    shown = run("show", bundle)
    assert shown.exit_code == 0
    assert "nothing learned for other yet" in shown.stdout
    assert "--draft-mode cache" in shown.stdout
    assert json.loads(run("show", bundle, "--target", "same", "--json").stdout)["entries"] == 0


def test_merge_adds_uses_from_bundles_and_files(bundle, tmp_path):
    second = shutil.copytree(bundle, tmp_path / "second")
    third = write(second, (33, [4, 5], 3))
    shutil.move(third, tmp_path / "third")
    write(second, (30, [5, 4], 9))
    path = write(bundle, *ROWS)
    result = run("merge", bundle, second, tmp_path / "third")
    assert result.exit_code == 0, result.output
    assert "4 entries, 3 before" in result.stderr
    assert [(i, uses) for i, _, uses in read_entries(path)[0]] == [
        (31, 2),
        (33, 3),
        (32, 7),
        (30, 10),
    ]


def test_merge_takes_nothing_if_one_is_for_other_tokenizers(bundle, tmp_path):
    second, third = (shutil.copytree(bundle, tmp_path / name) for name in ("second", "third"))
    write(second, (30, [5, 4], 9))
    write(third, (30, [5, 4], 9), key=PairKey(drafter_sha256="f" * 64, target_sha256="0" * 64))
    path = write(bundle, *ROWS)
    before = path.read_bytes()
    result = run("merge", bundle, second, third)
    assert result.exit_code == 5
    assert "Error: " in result.stderr
    assert "other tokenizers (drafter ffffffffffff" in result.stderr
    assert path.read_bytes() == before


def test_prune_keeps_the_most_used(bundle):
    path = write(bundle, *ROWS)
    result = run("prune", bundle, "--max-bytes", "44")
    assert result.exit_code == 0, result.output
    assert "kept 2 of 3 entries, 44 bytes" in result.stderr
    assert [i for i, _, _ in read_entries(path)[0]] == [31, 32]
    assert run("prune", bundle, "--max-bytes", "0").exit_code == 0
    assert len(read_entries(path)[0]) == 0


@pytest.mark.parametrize("command", [["show"], ["prune", "--max-bytes", "9"], ["merge"]])
def test_a_damaged_cache_is_one_line_and_is_left_alone(bundle, tmp_path, command):
    path = write(bundle, *ROWS)
    path.write_bytes(path.read_bytes()[:50])
    other = shutil.copytree(bundle, tmp_path / "other")
    write(other, *ROWS)
    name, *options = command
    result = run(name, bundle, *options, *([other] if name == "merge" else []))
    assert result.exit_code == 5
    assert len(result.stderr.strip().splitlines()) == 1
    assert "other.safetensors is not an n-gram cache" in result.stderr
    assert path.stat().st_size == 50


def test_prune_keeps_the_budget_of_the_cache_unless_told_otherwise(bundle):
    budget = 1_000_000
    rows = [(i, [4, 5], 1 + i) for i in range(3, budget // 20 + 4)]  # 20 bytes each, one too many
    path = write(bundle, *rows)
    result = run("prune", bundle)
    assert result.exit_code == 0, result.output
    assert f"kept {budget // 20:,} of {budget // 20 + 1:,} entries" in result.stderr
    assert len(read_entries(path)[0]) == budget // 20


def test_merge_tells_what_does_not_exist(bundle, tmp_path):
    second = shutil.copytree(bundle, tmp_path / "second")  # has learned nothing
    for missing in (tmp_path / "missing", second):
        result = run("merge", bundle, missing)
        assert result.exit_code == 5
        assert str(missing) in result.stderr
        assert "does not exist or is not a file" in result.stderr
        assert "move it away" not in result.stderr


def test_bad_arguments_are_one_line(bundle, tmp_path):
    assert run("show", bundle, "--top", "-1").exit_code == 2
    assert json.loads(run("show", bundle, "--top", "0", "--json").stdout)["most_used"] == []
    assert run("prune", bundle, "--max-bytes", "-1").exit_code == 2
    assert run("show", bundle, "--target", "nobody").exit_code == 2
    assert run("show", tmp_path).exit_code == 5
    assert run("merge", bundle, tmp_path / "missing").exit_code == 5
    assert run("merge", bundle).exit_code == 2
