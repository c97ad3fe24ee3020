"""`omnidraft-npu devices`: the chips of the table, for people and for programs."""

import json

from click.testing import CliRunner

from omnidraft_npu.chips.table import all_chips
from omnidraft_npu.cli import cli


def devices(*arguments):
    result = CliRunner().invoke(cli, ["devices", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_chip_has_a_line_with_what_it_can_be_compiled_for():
    lines = {line.split()[0]: line for line in devices().splitlines() if line.strip()}
    for chip in all_chips():
        assert f" {chip.soc_model} " in lines[chip.key]
    assert "too old: CPU only" in lines["855"]
    assert "SC8380XP v73 8 MB" in lines["x-elite"]
    assert "not by this QNN" in lines["qcs6490"]


def test_verbose_adds_the_sources_and_the_disagreements():
    short, long = devices(), devices("--verbose")
    assert long.startswith(short)
    assert "AI Hub Models 0.65" in long
    assert "olive-recipes pass 87" in long
    assert "olive-recipes" not in short
    assert "8-elite (ai-hub-models): sm8750, 8elite, qcs8750, q8750, Samsung Galaxy S25," in long


def test_json_has_every_field():
    document = json.loads(devices("--json"))
    assert document["schema_version"] == 1
    rows = {row["key"]: row for row in document["chips"]}
    assert rows["x-elite"]["soc_model"] == 60
    assert rows["x-elite"]["simulated"] == {"name": "SC8380XP", "arch": 73, "vtcm_mb": 8}
    assert rows["855"]["is_too_old"] is True
    assert rows["8-elite"]["source"] in document["sources"]
