"""The models of a conversation: a target, and what drafts for it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from omnidraft_npu.bridge.following import ByteBridge, IdentityBridge
from omnidraft_npu.bridge.ngram_cache import NgramCache
from omnidraft_npu.bridge.ngram_file import NgramStore, PairKey
from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import Spellings, direct_spellings
from omnidraft_npu.bridge.text_walk import TextWalk
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.bridge.walk import PlainWalk, TrieWalk
from omnidraft_npu.bundle import Bundle, open_bundle
from omnidraft_npu.cached_drafting import CachedDrafter
from omnidraft_npu.cascade import Cascade
from omnidraft_npu.config import Device, DeviceConfig
from omnidraft_npu.documents import read_document
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.errors import StateError
from omnidraft_npu.generation_defaults import (
    GENERATION_CONFIG,
    GenerationDefaults,
    generation_defaults,
)
from omnidraft_npu.lookup import PromptLookup
from omnidraft_npu.manifest import ModelEntry
from omnidraft_npu.manifest_checks import spelling_path
from omnidraft_npu.past_answers import PastAnswers
from omnidraft_npu.proposal import Rule
from omnidraft_npu.speculative import Proposer
from omnidraft_npu.state_folder import check_state, ngrams_path
from omnidraft_npu.text.tokenizer import Tokenizer

from .devices import OpenedGraphs, open_model_graphs
from .learner_adapter import Adapter, AdapterInUse, open_adapter
from .model import Model
from .past_recall import recall_past, replay_of

DEFAULT_DEVICES = DeviceConfig()

ProposerName = Literal["cascade", "model", "lookup"]
DraftMode = Literal["auto", "full", "text", "cache", "direct", "paper"]


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model of a bundle with its tokenizer; immutable, shared by every conversation."""

    entry: ModelEntry
    graph: Model
    precision: str
    """Of the graphs that were opened."""
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """How its maker wants it sampled; of a target only."""
    why_cpu: str | None = None
    """Why it runs on the CPU where `auto` looked for an NPU."""
    roomier: Callable[[], OpenedGraphs] | None = None
    """Opens a graph that holds more tokens, where `auto` chose an NPU whose graphs hold few."""


@dataclass(frozen=True, kw_only=True)
class LearnedSpellings:
    """What every conversation's own n-gram cache starts from, and where it is saved."""

    direct: Spellings
    store: NgramStore
    is_recalled: bool = True
    """Whether it starts from what is saved, or from `direct` alone."""
    is_saved: bool = True
    """Whether what the target is seen to need is saved."""


@dataclass(frozen=True, kw_only=True)
class OpenedPair:
    """A target, and what drafts for it."""

    target: OpenedModel
    drafter: OpenedModel | None
    encoder: PieceEncoder | None = None
    """None where there is no drafter, or the two tokenizers are equal."""
    trie: SpellingTrie | None = None
    """None where there is no encoder, spellings are learned, or all drafts are text."""
    learned: LearnedSpellings | None = None
    """In draft mode `cache`."""
    target_encoder: PieceEncoder | None = None
    """In draft modes `text` and, for greedy rounds, `auto`."""
    proposer: ProposerName | None = "cascade"
    """What drafts, nothing for None; only `lookup` does without a drafter."""
    rule: Rule = "lossless"
    """How what the drafter proposes is verified."""
    adapter: AdapterInUse = field(default_factory=AdapterInUse)
    """What new proposers feed the drafter."""
    past: PastAnswers = field(default_factory=PastAnswers)
    """What a cascade looks up besides the text at hand; empty where nothing is learned."""
    bundle: Bundle | None = None
    """Where they are from; None for models that did not come from a bundle."""
    state_problem: str | None = None
    """Why they decode without what was learned, and keep nothing; None where they do not."""

    @property
    def notice(self) -> str | None:
        """One line on the models for which the CPU had to do, and why; None for none."""
        by_reason: dict[str, list[str]] = {}
        for role, model in (("target", self.target), ("drafter", self.drafter)):
            if model is not None and model.why_cpu is not None:
                by_reason.setdefault(model.why_cpu, []).append(role)
        lines = (
            f"{' and '.join(roles)} on the CPU: {reason}" for reason, roles in by_reason.items()
        )
        return "; ".join(lines) or None

    @property
    def placement(self) -> dict[str, dict[str, dict[str, int]]]:
        """For the target and the drafter, which provider runs how many nodes of each graph."""
        models = {"target": self.target, "drafter": self.drafter}
        return {role: m.graph.placement for role, m in models.items() if m is not None}

    def with_room(self, num_tokens: int) -> "OpenedPair":
        """This pair, or one with a roomier target where that is what a prompt needs."""
        target = self.target
        if target.roomier is None or num_tokens < target.graph.context_length:
            return self
        return replace(self, target=_with_graphs(target, target.roomier()))

    def with_adapter(self, adapter: Adapter) -> "OpenedPair":
        """This pair with this adapter for good."""
        fixed = AdapterInUse()
        fixed.adapter = adapter
        return replace(self, adapter=fixed)

    def without_past(self) -> "OpenedPair":
        """This pair without answers of before, which conversations with it do not add to."""
        return replace(self, past=PastAnswers())

    def new_ngrams(self) -> NgramCache | None:
        """What learned spellings start from; None where none are learned."""
        if self.drafter is None or self.encoder is None or self.learned is None:
            return None
        cache = NgramCache(self.encoder, self.target.vocabulary, self.learned.direct)
        if self.learned.is_recalled:
            cache.add(self.learned.store.load())
        return cache

    def new_proposer(self, ngrams: NgramCache | None = None) -> Proposer | None:
        """A proposer that follows no context yet; None where there is nothing to draft with.

        Args:
            ngrams: What `new_ngrams` gave, for this proposer alone.
        """
        if self.proposer == "lookup":
            return PromptLookup()
        if self.drafter is None or self.proposer is None:
            return None
        drafter = self._new_drafter(self.drafter, ngrams)
        if self.proposer == "model":
            return drafter
        return Cascade(PromptLookup(), drafter, self.past)

    def _new_drafter(self, opened: OpenedModel, ngrams: NgramCache | None) -> ModelDrafter:
        num_pieces = opened.graph.vocab_size
        lm = opened.graph.begin(is_exact=False)
        lm.set_lora(self.adapter.adapter.lora)
        ends = frozenset(self.target.entry.eos_token_ids)
        if self.encoder is None:
            plain = PlainWalk(min(num_pieces, self.target.graph.vocab_size))
            return ModelDrafter(lm, IdentityBridge(num_pieces), plain, end_token_ids=ends)
        bridge = ByteBridge(self.encoder, self.target.vocabulary)
        if ngrams is not None:
            return CachedDrafter(lm, bridge, ngrams, num_pieces=num_pieces, end_token_ids=ends)
        spelled = None if self.trie is None else TrieWalk(self.trie, num_pieces)
        text = None
        if self.target_encoder is not None:
            text = TextWalk(opened.vocabulary, self.target_encoder)
        walk = spelled or text
        assert walk is not None, "without learned spellings there are others, or text"
        return ModelDrafter(lm, bridge, walk, greedy_walk=text, end_token_ids=ends, rule=self.rule)


def open_pair(
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
) -> OpenedPair:
    """The models of a bundle that a conversation needs; see `open_session`."""
    bundle = replace(open_bundle(bundle_path), elsewhere=state)
    has_drafter = use_drafter and proposer != "lookup"
    settings = {"devices": devices, "threads": threads, "takes_turns": has_drafter}
    opened = _open_model(bundle, bundle.target(target), devices.target_device, **settings)
    opened = replace(opened, defaults=_generation_defaults(bundle, opened.entry))
    if not use_drafter:
        return OpenedPair(target=opened, drafter=None, proposer=None)
    if not has_drafter:
        return OpenedPair(target=opened, drafter=None, proposer=proposer)
    drafter = open_drafter(bundle, devices=devices, threads=threads)
    state_problem = _state_problem(bundle, opened.entry) if recalls or keeps else None
    if state_problem is not None:
        recalls = keeps = False
    adapter = open_adapter(bundle, opened.entry) if recalls or keeps else AdapterInUse()
    if recalls:
        adapter.load(drafter.graph.lora_inputs)
    hashes = {
        "drafter_sha256": drafter.entry.tokenizer_sha256,
        "target_sha256": opened.entry.tokenizer_sha256,
    }
    has_past = recalls and proposer == "cascade" and drafter.entry.training is not None
    buffer = replay_of(bundle, opened.entry) if has_past else None
    if hashes["drafter_sha256"] == hashes["target_sha256"]:
        return OpenedPair(
            target=opened,
            drafter=drafter,
            proposer=proposer,
            adapter=adapter,
            past=recall_past(buffer),
            bundle=bundle,
            state_problem=state_problem,
        )
    encoder = _encoder(drafter)
    # A target of many tokens takes a second to make one.
    has_text = draft_mode in ("auto", "text")
    target_encoder = _encoder(opened) if has_text or buffer is not None else None
    trie, learned = None, None
    if draft_mode in ("auto", "full", "paper"):
        trie = SpellingTrie.load(bundle.path(spelling_path(opened.entry)), **hashes)
        trie.check_sizes(num_pieces=drafter.graph.vocab_size, num_targets=opened.entry.vocab_size)
    elif draft_mode in ("cache", "direct"):
        direct = direct_spellings(drafter.vocabulary, opened.vocabulary)
        if draft_mode == "direct":
            trie = SpellingTrie.build(direct, opened.entry.vocab_size)
        else:
            store = NgramStore(
                path=ngrams_path(bundle.state_root, opened.entry.name), key=PairKey(**hashes)
            )
            learned = LearnedSpellings(
                direct=direct, store=store, is_recalled=recalls, is_saved=keeps
            )
    return OpenedPair(
        target=opened,
        drafter=drafter,
        encoder=encoder,
        trie=trie,
        learned=learned,
        target_encoder=target_encoder if has_text else None,
        proposer=proposer,
        rule="paper" if draft_mode == "paper" else "lossless",
        adapter=adapter,
        past=recall_past(buffer, drafter.vocabulary, target_encoder),
        bundle=bundle,
        state_problem=state_problem,
    )


def _generation_defaults(bundle: Bundle, target: ModelEntry) -> GenerationDefaults:
    relative = f"{target.folder}/{GENERATION_CONFIG}"
    if relative not in bundle.manifest.files:
        return GenerationDefaults()
    path = bundle.path(relative)
    return generation_defaults(read_document(path, dict[str, Any]), str(path))


def open_drafter(
    bundle: Bundle, *, devices: DeviceConfig = DEFAULT_DEVICES, threads: int | None = None
) -> OpenedModel:
    """The drafter of a bundle; see `open_session`."""
    entry, settings = bundle.manifest.drafter, {"devices": devices, "threads": threads}
    return _open_model(bundle, entry, devices.draft_device, takes_turns=True, **settings)


def _state_problem(bundle: Bundle, target: ModelEntry) -> str | None:
    """Why what was learned can be neither used nor added to, which never stops an answer."""
    try:
        check_state(bundle.state_root, [target.name])
    except StateError as error:
        return str(error)
    return None


def _with_graphs(model: OpenedModel, opened: OpenedGraphs) -> OpenedModel:
    return replace(
        model,
        graph=opened.graph,
        precision=opened.precision,
        why_cpu=opened.why_cpu,
        roomier=opened.roomier,
    )


def _encoder(model: OpenedModel) -> PieceEncoder:
    return PieceEncoder(model.tokenizer.json, model.vocabulary, model.tokenizer.model)


def _open_model(bundle: Bundle, entry: ModelEntry, device: Device, **settings: Any) -> OpenedModel:
    """A model with the tokenizer in its folder; `settings` are those of `open_model_graphs`."""
    opened = open_model_graphs(bundle, entry, device, **settings)
    tokenizer = Tokenizer.from_folder(bundle.path(entry.folder))
    return OpenedModel(
        entry=entry,
        graph=opened.graph,
        precision=opened.precision,
        why_cpu=opened.why_cpu,
        roomier=opened.roomier,
        tokenizer=tokenizer,
        vocabulary=Vocabulary.from_tokenizer_json(
            tokenizer.json,
            size=entry.vocab_size,
            eos_token_ids=entry.eos_token_ids,
            bos_token_id=entry.bos_token_id,
        ),
    )
