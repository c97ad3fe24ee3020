"""From a bundle to text: ids, then text with statistics, over the rounds."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from omnidraft_npu.config import DecodeConfig, DeviceConfig
from omnidraft_npu.draft_length import DraftLength
from omnidraft_npu.errors import PromptError
from omnidraft_npu.generation_defaults import GenerationDefaults
from omnidraft_npu.speculative import Proposer, generate
from omnidraft_npu.statistics import DecodeStats
from omnidraft_npu.text.detokenizer import StreamDecoder

from .learner_recorder import Answer, LawRecorder
from .model import ConversationLM
from .observed_lm import ObservedLM
from .opened_pair import DEFAULT_DEVICES, DraftMode, OpenedPair, ProposerName, open_pair

logger = logging.getLogger(__name__)

_SHRINKING = 4
"""How many times as long a text may be as what a tokenizer's normaliser makes of it."""

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one round added to a response."""

    text: str
    """Whole characters only: the bytes of an incomplete one wait for the next round."""
    token_ids: tuple[int, ...]
    """Target ids; a stop token is among them, though not in the text."""
    finish_reason: FinishReason | None
    """Why the response ends here, None before its last round."""
    stats: DecodeStats
    """Of the response so far; the same object in every round."""


class AnswerObserver(Protocol):
    """Is told of every response that was written to its end."""

    def observe(self, answer: Answer) -> bool:
        """Take an answer; whether it was kept."""
        ...


class Session:
    """One conversation: what the target and the drafter have cached of it stays between turns."""

    def __init__(self, pair: OpenedPair, *, target: ConversationLM | None = None) -> None:
        """Begin a conversation with models that others may use at the same time.

        Args:
            pair: The models.
            target: Runs the target in place of one made here; an observed one, for example.
        """
        self.pair = pair
        self._is_observed = target is not None
        self._target = target or pair.target.graph.begin()
        self._ngrams = pair.new_ngrams()
        adapter = pair.adapter.adapter
        self._version = adapter.version
        self._proposer: Proposer | None = pair.new_proposer(self._ngrams)
        self.observer: AnswerObserver | None = None
        """Told of every response from now on, with what the target said before each token."""
        self.draft_length = DraftLength(head=adapter.head)
        """What was learned of times and acceptance, for responses that adapt the draft length."""

    @property
    def target_name(self) -> str:
        """The target's name in the bundle."""
        return self.pair.target.entry.name

    @property
    def has_chat_template(self) -> bool:
        """Whether a prompt can be a user's turn; without one only `raw` prompts are encoded."""
        return self.pair.target.tokenizer.has_chat_template

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """How the target's maker wants it sampled; `generate` takes what it is given."""
        return self.pair.target.defaults

    @property
    def target_provider(self) -> str:
        """The execution provider that runs the target."""
        return self.pair.target.graph.provider

    @property
    def draft_provider(self) -> str | None:
        """The execution provider that runs the drafter; None without one."""
        return None if self.pair.drafter is None else self.pair.drafter.graph.provider

    def encode(self, prompt: str, *, raw: bool = False, parse_special: bool = False) -> list[int]:
        """Target ids of a prompt: one user turn of the chat template, or with `raw` the bare text.

        A prompt that spells a control token is text in a user turn, unless `parse_special` is
        set; in a bare text it is that token.

        Raises:
            PromptError: the prompt is empty, too long for any context or not UTF-8, or there is
                no chat template.
        """
        self._check_size(prompt)
        tokenizer = self.pair.target.tokenizer
        if raw:
            token_ids = tokenizer.encode(prompt, add_special=True)
        else:
            message = {"role": "user", "content": prompt}
            token_ids = tokenizer.encode_chat([message], parse_special=parse_special)
        if not token_ids:
            raise PromptError("the prompt is empty and this model has no first token: give text")
        return token_ids

    def _check_size(self, prompt: str) -> None:
        """Refuse a prompt that no tokenizer could fit into the context, before one tries for long.

        Raises:
            PromptError: so many of the longest tokens do not hold its bytes.
        """
        context_length = self.pair.target.entry.context_length
        if len(prompt) <= context_length:
            return
        num_bytes = len(prompt.encode(errors="surrogatepass"))
        longest = int(self.pair.target.vocabulary.lengths.max())
        if num_bytes > _SHRINKING * longest * context_length:
            raise PromptError(
                f"the prompt has {num_bytes:,} bytes, too many for the context of "
                f"{context_length:,} tokens: shorten it"
            )

    def generate(self, prompt_ids: Sequence[int], config: DecodeConfig) -> Iterator[Delta]:
        """Yield the response round by round; the last delta has a `finish_reason`.

        The target keeps the longest prefix that it has cached of an earlier turn.

        Args:
            prompt_ids: Target ids of the whole conversation so far.
            config: Limits; the model's own stop tokens join those given.

        Raises:
            PromptError: the prompt leaves no room in the context.
        """
        if self.make_room(len(prompt_ids)):
            logger.warning("target on the CPU: %s", self.pair.target.why_cpu)
        self._take_adapter()
        target, entry = self._target, self.pair.target.entry
        if len(prompt_ids) >= target.context_length:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds "
                f"{target.context_length}: shorten it, or {self.pair.target.graph.more_room}"
            )
        stops = config.stop_token_ids | set(entry.eos_token_ids)
        config = dataclasses.replace(config, stop_token_ids=stops)
        target.rewind(_common_prefix(target.token_ids, prompt_ids))
        stats = DecodeStats(
            self.pair.target.vocabulary,
            target_provider=self.target_provider,
            draft_provider=self.draft_provider,
            has_near_ties=self.pair.target.graph.has_near_ties,
        )
        control = self.draft_length if config.adapts_draft_length else None
        observer = self.observer
        observed = None if observer is None else ObservedLM(target)
        recorder = LawRecorder(prompt_ids)
        rounds = generate(self._proposer, observed or target, prompt_ids, config, control)
        text = StreamDecoder(self.pair.target.tokenizer, is_continuation=True)
        length = len(prompt_ids)
        with contextlib.ExitStack() as ending:
            ending.callback(self._save_ngrams)
            for one in stats.follow(rounds, length - 1 - target.length):
                token_ids = one.verdict.token_ids
                if observed is not None:
                    recorder.add(token_ids, observed.logits)
                length += len(token_ids)
                reason: FinishReason | None = None
                if one.verdict.is_stopped:
                    reason = "stop"
                elif length >= target.context_length:
                    reason = "context"
                elif length - len(prompt_ids) >= config.max_new_tokens:
                    reason = "length"
                shown = text.push(token_ids[:-1] if one.verdict.is_stopped else token_ids)
                yield Delta(
                    text=shown if reason is None else shown + text.finish(),
                    token_ids=token_ids,
                    finish_reason=reason,
                    stats=stats,
                )
        answer = recorder.answer()
        if observer is not None and answer is not None and observer.observe(answer):
            self.pair.past.add(answer.laws.token_ids.tolist())

    def make_room(self, num_tokens: int) -> bool:
        """Move the target to the CPU if `auto` chose an NPU whose graphs hold no such prompt.

        What was cached is computed anew there. A model given to the constructor stays.

        Returns:
            Whether it moved; `pair.notice` then says why.
        """
        pair = self.pair if self._is_observed else self.pair.with_room(num_tokens)
        if pair is self.pair:
            return False
        self.pair, self._target = pair, pair.target.graph.begin()
        return True

    def reset(self) -> None:
        """Forget the conversation."""
        self._target.reset()
        if self._proposer is not None:
            self._proposer.begin(())

    def _take_adapter(self) -> None:
        """Draft with the adapter in use now; nothing cached with another one is used."""
        adapter = self.pair.adapter.adapter
        if adapter.version != self._version:
            self._version = adapter.version
            self._proposer = self.pair.new_proposer(self._ngrams)
            self.draft_length.head = adapter.head

    def _save_ngrams(self) -> None:
        learned = self.pair.learned
        if self._ngrams is not None and learned is not None and learned.is_saved:
            learned.store.save(self._ngrams.take_fresh())


def open_session(
    bundle_path: Path,
    *,
    target: str | None = None,
    threads: int | None = None,
    use_drafter: bool = True,
    proposer: ProposerName = "cascade",
    draft_mode: DraftMode = "auto",
    devices: DeviceConfig = DEFAULT_DEVICES,
    state: Path | None = None,
    recalls: bool = True,
    keeps: bool = True,
) -> Session:
    """A conversation with a target of a bundle, and the bundle's drafter at its side.

    Args:
        bundle_path: The exported directory.
        target: Name of the target; None for the bundle's default.
        threads: Threads of one operator; None for one a physical core.
        use_drafter: Whether anything drafts at all.
        proposer: `model`, the bundle's drafter; `lookup`, what followed earlier in the
            context, for which the drafter is not opened; or `cascade`, both.
        draft_mode: How the drafter's pieces become target tokens: `direct`, one by one;
            `cache`, also those runs that the target was seen to need; `full`, all runs;
            `text`, any pieces, cut by the target's tokenizer; `auto`, as `text` when greedy
            and as `full` when sampling; `paper`, all runs, verified by the paper's rule,
            which only greedy decoding makes exact.
        devices: Where they run.
        state: Existing folder with the `state/` to use; None for the bundle's own.
        recalls: Whether to draft with what earlier runs left there: an adapter, kept answers,
            learned spellings. Without it sampled text depends on nothing but the seed.
        keeps: Whether anything of this conversation may be added to it. Without both, nothing
            that earlier runs left is looked at.

    Raises:
        DeviceError: the NPU was insisted on and cannot be had.
        BundleError: the bundle is damaged, or a part of it does not match.
        ConfigError: there is no such target, or `threads` is below 1.
        TokenizerError: a tokenizer of a kind whose bytes are not known.
    """
    pair = open_pair(
        bundle_path,
        target=target,
        threads=threads,
        use_drafter=use_drafter,
        proposer=proposer,
        draft_mode=draft_mode,
        devices=devices,
        state=state,
        recalls=recalls,
        keeps=keeps,
    )
    return Session(pair)


def _common_prefix(cached: Sequence[int] | np.ndarray, prompt_ids: Sequence[int]) -> int:
    """Leading ids that are equal; the prompt's last one is left out, it is scored anew."""
    n = min(len(cached), len(prompt_ids) - 1)
    differ = np.flatnonzero(np.asarray(cached[:n]) != np.asarray(prompt_ids[:n]))
    return int(differ[0]) if len(differ) else n
