"""The drafter that ships with the package."""

import json

import pytest

from omnidraft_npu.bridge.vocabulary import END_ROLES, Vocabulary
from omnidraft_npu.drafters import DEFAULT_DRAFTER, packaged_drafter
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.store.local import resolve_model


@pytest.fixture(scope="module")
def folder():
    return resolve_model(DEFAULT_DRAFTER)


def test_it_is_found_by_its_name_alone(folder):
    assert packaged_drafter(DEFAULT_DRAFTER) == folder
    assert packaged_drafter("drafters") is None


def test_it_is_small_and_has_the_promised_context(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12_000_000
    assert open_checkpoint(folder).config.context_length == 2048


def test_it_spells_every_byte_and_knows_how_an_answer_ends(folder):
    files = open_checkpoint(folder).tokenizer()
    vocabulary = Vocabulary.from_tokenizer_json(
        json.loads(files.tokenizer_json), eos_token_ids=files.eos_token_ids
    )
    assert len({vocabulary.token_bytes(i) for i in range(vocabulary.size)} & ONE_BYTE) == 256
    assert vocabulary.special_ids(*END_ROLES)


ONE_BYTE = {bytes([byte]) for byte in range(256)}
