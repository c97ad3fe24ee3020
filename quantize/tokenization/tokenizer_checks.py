"""Whether a tokenizer can be used with its model: ids have rows, the chat template runs."""

import json
import logging
from dataclasses import replace
from typing import Any

from omnidraft_npu.errors import TokenizerError
from omnidraft_npu.text.chat_template import template_problem
from omnidraft_npu.text.tokenizer_config import chat_templates, special_tokens

from ..architecture import DecoderConfig
from ..checkpoints.checkpoint import TokenizerFiles

logger = logging.getLogger(__name__)


def fitted_to_model(files: TokenizerFiles, config: DecoderConfig, source: str) -> TokenizerFiles:
    """The tokenizer, without the one id that Gemma's has beyond its model.

    That id stands for an image; text that spells it is then tokenised like any other text.

    Args:
        files: a tokenizer that `tokenizers` can read.
        config: the model it should belong to.
        source: what to call the checkpoint in an error.

    Raises:
        TokenizerError: it gives ids the model has no rows for, it has less than half as many ids
            as the model has rows, or a special id is not one of its tokens.
    """
    document = json.loads(files.tokenizer_json)
    rows = config.num_logits
    ids = token_ids(document)
    beyond = sorted(i for i in ids if i >= rows)
    if len(beyond) == 1 and config.architecture == "gemma3_text":
        added = document["added_tokens"]
        document["added_tokens"] = [token for token in added if token["id"] < rows]
        files = replace(files, tokenizer_json=json.dumps(document, ensure_ascii=False))
        ids = token_ids(document)
        beyond = sorted(i for i in ids if i >= rows)
    if beyond or 2 * len(ids) < rows:
        raise TokenizerError(
            f"{source}: the tokenizer has {len(ids)} ids up to {max(ids, default=0)}, the model "
            f"has {rows} rows: they do not belong together; use the model's own tokenizer"
        )
    special = dict.fromkeys(("end", i) for i in files.eos_token_ids)
    if files.bos_token_id is not None:
        special[("begin", files.bos_token_id)] = None
    for role, token_id in special:
        if token_id not in ids:
            raise TokenizerError(
                f"{source}: special id {token_id}, said to {role} a sequence, is not one of the "
                f"tokenizer's {len(ids)} ids: tokenizer and configuration do not belong together"
            )
    return files


def check_usable(files: TokenizerFiles, source: str) -> None:
    """Pass if the chat templates run; warn where nothing is known that ends a response.

    Raises:
        TokenizerError: a template cannot be compiled, or renders no message of a user.
    """
    special = special_tokens(files.tokenizer_config)
    for name, template in chat_templates(files.tokenizer_config).items():
        problem = template_problem(template, special) if name == "default" else None
        if problem is not None:
            raise TokenizerError(
                f"{source}: the chat template {problem}. Correct it (in chat_template.jinja or "
                "tokenizer_config.json), or take it out to export the model without one"
            )
    if not files.eos_token_ids:
        logger.warning(
            "%s: no token is known that ends a response (eos_token_id of generation_config.json, "
            "eos_token of tokenizer_config.json): every answer goes on to --max-new-tokens",
            source,
        )


def token_ids(document: dict[str, Any]) -> set[int]:
    """Every id of a `tokenizers` document."""
    vocabulary = document["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return {*ids, *(token["id"] for token in document.get("added_tokens", []))}
