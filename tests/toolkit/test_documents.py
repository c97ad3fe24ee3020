"""Documents from outside become checked types, or one line."""

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from omnidraft_npu.documents import (
    MAX_DEPTH,
    Size,
    TokenId,
    convert_document,
    parse_document,
    read_document,
)
from omnidraft_npu.errors import BundleError, CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: Size
    anything: Any = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    ids: tuple[TokenId, ...] = ()
    scale: float = 1.0
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None
    named: dict[str, Inner] = field(default_factory=dict)

    def __post_init__(self):
        if self.kind == "b" and self.inner is None:
            raise ConfigError("kind 'b' needs inner")


def test_a_document_that_fits_has_exactly_the_annotated_types():
    text = '\ufeff{"ids": [1, 2], "scale": 3, "inner": {"size": 4}, "named": {"x": {"size": 1}}}'
    assert parse_document(text.encode(), Outer, "f", is_closed=True) == Outer(
        ids=(1, 2), scale=3.0, inner=Inner(size=4), named={"x": Inner(size=1)}
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "f is a list, must be an object"),
        ('{"ids": [0, -1]}', "f: ids[1] is -1, must be an integer >= 0"),
        ('{"ids": [0, true]}', "f: ids[1] is True, must be an integer"),
        ('{"ids": [2.0]}', "f: ids[0] is 2.0, must be an integer"),
        ('{"ids": 5}', "f: ids is 5, must be a list"),
        (f'{{"ids": [{"9" * 50}]}}', f"f: ids[0] is {'9' * 50}, must be an integer <= 2147483647"),
        ('{"scale": "1"}', "f: scale is '1', must be a number"),
        ('{"scale": {}}', "f: scale is an object, must be a number"),
        ('{"scale": 1e999}', "f holds a number that is out of range"),
        ('{"scale": NaN}', "f is not JSON"),
        ('{"kind": "\\u001b[31m"}', "f: kind is '\\x1b[31m', which is not known"),
        ('{"kind": "b"}', "f: kind 'b' needs inner"),
        ('{"inner": {}}', "f: inner lacks 'size'"),
        ('{"inner": 1}', "f: inner is 1, must be an object or null"),
        (
            '{"named": {"a": {"size": 1}, "x.y": {"size": 0}, "z": {"size": 0}}}',
            "f: named.x.y.size is 0, must be an integer >= 1",
        ),
        ('{"inner": {"size": 1, "other": 2}}', "f: inner has the unknown key 'other'"),
        ('{"other": 2}', "f has the unknown key 'other'"),
        ('{"inner": {"size": 1, "anything": "\\ud800"}}', "f is not JSON"),
        ("", "f is not JSON"),
        ("{", "f is not JSON"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_key_and_what_was_expected(text, reason):
    with pytest.raises(BundleError) as caught:
        parse_document(text, Outer, "f", is_closed=True)
    assert reason in str(caught.value)
    assert str(caught.value).endswith(": export the bundle again")
    assert str(caught.value).isprintable()


def test_a_format_of_others_may_have_more_keys():
    assert parse_document(b'{"new": {"size": "?"}, "scale": 2}', Outer, "f") == Outer(scale=2.0)


@pytest.mark.parametrize("data", [b'{"kind": "\xff"}', "{}".encode("utf-16"), b"\xed\xa0\x80"])
def test_bytes_that_are_not_utf8_are_refused(data):
    with pytest.raises(CheckpointError, match=r"^f is not (UTF-8|JSON) \(.*: get it again$"):
        parse_document(data, Outer, "f", error=CheckpointError, advice="get it again")


@pytest.mark.parametrize("opening", ["[", '{"inner":', '{"inner": {"anything": '])
@pytest.mark.parametrize("is_closed", [True, False])
def test_deep_nesting_is_refused_wherever_it_is(opening, is_closed):
    for text in (opening * 100_000, '{"inner": {"size": 1, "anything": ' + "[" * 200 + "]" * 200):
        with pytest.raises(BundleError) as caught:
            parse_document(text, Outer, "f", is_closed=is_closed)
        assert len(str(caught.value)) < 150
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(BundleError, match="over 100 levels"):
        convert_document(deep, Outer, "f")
    with pytest.raises(BundleError, match="over 100 levels"):
        parse_document(json.dumps({"inner": {"size": 1, "anything": deep}}), Outer, "f")


def test_numbers_of_a_million_digits_are_quick():
    begun = time.perf_counter()
    for digits in ("1" * 1_000_000, "0." + "1" * 1_000_000, "1e" + "9" * 1_000_000):
        with pytest.raises(BundleError):
            parse_document(f'{{"ids": [{digits}]}}', Outer, "f")
    assert time.perf_counter() - begun < 1


def test_a_repeated_word_is_short_and_printable():
    with pytest.raises(BundleError) as caught:
        parse_document(json.dumps({"kind": "x\x1b\n\u202e" * 10_000}), Outer, "f")
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_files_that_cannot_be_a_document_are_refused_before_they_are_read(tmp_path):
    with pytest.raises(BundleError, match="it does not exist"):
        read_document(tmp_path / "none.json", Outer)
    with pytest.raises(BundleError, match="not a regular file"):
        read_document(tmp_path, Outer)
    with pytest.raises(BundleError, match="cannot be read"):
        read_document(tmp_path / ("x" * 300), Outer)
    with pytest.raises(BundleError, match="not the name of a file"):
        read_document(tmp_path / "x\0", Outer)
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(BundleError, match="may have"):
        read_document(big, Outer)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(BundleError, match="not a regular file"):
            read_document(tmp_path / "pipe", Outer)
