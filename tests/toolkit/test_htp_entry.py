"""The NPU flavour in a manifest: read back, checked, shown, and absent from old bundles."""

import json
import re

import pytest
from click.testing import CliRunner
from tiny_bundle import write_bundle

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.errors import BundleError
from omnidraft_npu.files import sha256_of
from omnidraft_npu.manifest import HtpEntry

ENTRY = HtpEntry(
    precision="w8a16",
    context_length=64,
    graphs={"1": "drafter/htp/length_1.onnx", "8": "drafter/htp/length_8.onnx"},
    compiled={"x-elite": {"8": "drafter/htp/x-elite/length_8_ctx.onnx"}},
    qnn_version="2.51.0",
    calibration="built-in prompts",
    report={"relative_error": 0.016, "top_1_agreement": 1},
    is_accurate=False,
)


@pytest.fixture
def bundle(tmp_path):
    root = write_bundle(tmp_path / "bundle")
    document = json.loads((root / "manifest.json").read_text())
    document["drafter"]["htp"] = json.loads(json.dumps(ENTRY.__dict__))
    for path in (*ENTRY.graphs.values(), *ENTRY.compiled["x-elite"].values()):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"graph")
        document["files"][path] = {"size": 5, "sha256": sha256_of(root / path)}
    (root / "manifest.json").write_text(json.dumps(document))
    return root


def edit(bundle, change):
    path = bundle / "manifest.json"
    document = json.loads(path.read_text())
    change(document["drafter"]["htp"], document)
    path.write_text(json.dumps(document))


def test_the_entry_survives_the_way_to_disk_and_back(bundle):
    assert open_bundle(bundle, verify=True).manifest.drafter.htp == ENTRY


def test_a_bundle_from_before_there_was_an_npu_flavour_still_opens(bundle):
    edit(bundle, lambda _, document: document["drafter"].pop("htp"))
    assert open_bundle(bundle).manifest.drafter.htp is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, _: h["graphs"].update({"1": "../x"}), "htp names '../x', a path outside"),
        (lambda h, _: h["compiled"]["x-elite"].update({"8": "/x"}), "htp names '/x', a path"),
        (lambda h, _: h["graphs"].update({"zero": "a"}), "has the length 'zero'"),
        (lambda h, _: h["graphs"].update({"0": "a"}), "has the length '0'"),
        (lambda h, _: h["graphs"].update({"08": "a"}), "has the length '08'"),
        (lambda h, _: h.update(graphs={}, compiled={}), "htp.graphs is empty"),
        (lambda h, _: h.update(context_length=0), "htp.context_length is 0"),
        (lambda h, _: h["compiled"].update({"x9": {}}), "chip 'x9', which this tool does not"),
        (lambda h, _: h["compiled"].update({"888": {"4": "a"}}), "length '4', which its graphs"),
        (lambda h, _: h["report"].update(relative_error="much"), "relative_error is 'much'"),
        (lambda h, _: h.update(colour="red"), "unknown key 'colour'"),
        (
            lambda h, _: h.update(parts=[{"num_layers": 1, "graphs": {"1": "a"}}]),
            "htp has graphs of its own beside its parts",
        ),
        (
            lambda h, _: h.update(
                graphs={}, compiled={}, parts=[{"num_layers": 1, "graphs": {"1": "/a"}}]
            ),
            "htp names '/a', a path outside",
        ),
        (
            lambda h, _: h.update(
                graphs={},
                compiled={},
                parts=[{"num_layers": 1, "graphs": {n: "a"}} for n in ("1", "8")],
            ),
            "htp.parts[1].graphs has other lengths",
        ),
        (lambda h, _: h.pop("precision"), "lacks 'precision'"),
        (lambda h, d: d["files"].pop(h["graphs"]["8"]), "no file 'drafter/htp/length_8.onnx'"),
        (
            lambda h, d: d["files"].pop(h["compiled"]["x-elite"]["8"]),
            "no file 'drafter/htp/x-elite/length_8_ctx.onnx'",
        ),
    ],
)
def test_an_entry_that_does_not_fit_is_named(bundle, change, message):
    edit(bundle, change)
    with pytest.raises(BundleError, match=re.escape(message)):
        open_bundle(bundle)


def test_a_changed_binary_is_named(bundle):
    path = ENTRY.compiled["x-elite"]["8"]
    (bundle / path).write_bytes(b"other")
    with pytest.raises(BundleError, match=f"{path} is not the file that was exported"):
        open_bundle(bundle)


def test_inspect_shows_lengths_chips_and_what_the_recipe_costs(bundle):
    shown = CliRunner().invoke(cli, ["inspect", str(bundle)])
    assert shown.exit_code == 0, shown.output
    for words in (
        "htp w8a16",
        "w8a16 graphs of 1, 8 tokens",
        "compiled for x-elite by QNN 2.51.0",
        "calibrated on built-in prompts",
        "relative error of the logits 0.016",
        "NOT accurate",
    ):
        assert words in shown.stdout
