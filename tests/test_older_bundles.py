"""A bundle and its state written by version ee7766e: today's commands read all of it.

`golden/bundle_ee7766e.zip` holds an int8 drafter and target of random weights, ten answers,
two adapters and two learned segmentations; the JSON file beside it holds what that version
printed.
"""

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from omnidraft_npu.cli import cli

GOLDEN = Path(__file__).parent / "golden" / "bundle_ee7766e.zip"
EXPECTED = json.loads(GOLDEN.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.fixture
def bundle(tmp_path):
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(tmp_path / "bundle")
    return tmp_path / "bundle"


def printed(*arguments):
    result = CliRunner().invoke(cli, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("options", [(), ("--no-draft",), ("--draft-mode", "cache")])
def test_the_text_of_an_older_bundle_stays_the_same(bundle, options):
    limits = ("--max-new-tokens", "16", "--raw", "--threads", "1", "--json")
    answer = printed("run", "-b", bundle, *limits, *options, EXPECTED["prompt"])
    assert answer["token_ids"] == EXPECTED["token_ids"]
    assert answer["text"] == EXPECTED["text"]


def test_adapters_and_answers_of_an_older_state_are_listed(bundle):
    document = printed("adapters", "list", bundle, "--json")
    expected = EXPECTED["adapters_list"]
    shown = [
        {key: adapter.get(key) for key in before}
        for before, adapter in zip(expected["adapters"], document["adapters"], strict=True)
    ]
    assert shown == expected["adapters"]
    assert document["current"] == expected["current"] == 2
    assert document["replay"]["examples"] == expected["replay"]["examples"] == 10


def test_segmentations_learned_by_an_older_version_are_shown(bundle):
    assert printed("cache", "show", bundle, "--json") == EXPECTED["cache_show"]


def test_an_older_adapter_still_drafts(bundle):
    """The stored adapter changes which tokens are drafted, not the text."""
    from omnidraft_npu.runtime.opened_pair import open_pair

    assert open_pair(bundle).adapter.adapter.version == 2


def test_an_older_target_has_exact_passes_of_two_rows_or_more(bundle):
    """It lacks the input that adds rows to attention alone, so whole passes get them."""
    from omnidraft_npu.runtime.opened_pair import open_pair

    rule = open_pair(bundle, threads=1).target.graph.exact_rule
    assert rule.holds and rule.whole_pass and rule.min_rows == 2


def test_a_default_pair_of_an_older_version_is_made_again_for_exact_passes(bundle):
    from omnidraft_npu.bundle import open_bundle
    from omnidraft_npu.commands.default_pair import _has_exact_target

    opened = open_bundle(bundle)
    assert not _has_exact_target(opened)
    for target in opened.manifest.targets.values():
        with (bundle / target.graphs["cpu"].path).open("ab") as graph:
            graph.write(b"attention_rows")
    assert _has_exact_target(opened)
