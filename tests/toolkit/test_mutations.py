"""The proof of exactness can fail: each of these bugs changes the law that it computes."""

import inspect
import textwrap
from types import ModuleType

import numpy as np
import pytest
from toy_drafting import PickyProposer, ToyPair, conversation_distance, distance

from omnidraft_npu import speculative, verification
from omnidraft_npu.bridge.roots import PieceLaw, Roots
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.walk import TrieWalk
from omnidraft_npu.proposal import ROOT


def rewrite(monkeypatch, module: ModuleType, name: str, old: str, new: str) -> None:
    """Replace a function of a module by itself with one place of its source changed."""
    source = textwrap.dedent(inspect.getsource(getattr(module, name)))
    assert source.count(old) == 1, f"{name} has no single {old!r}"
    namespace: dict[str, object] = {}
    exec(source.replace(old, new), vars(module), namespace)
    monkeypatch.setattr(module, name, namespace[name])


def is_exact(mode: str = "full", k: int = 2) -> bool:
    return all(distance(ToyPair(seed), mode, k) == 0 for seed in range(8))


def test_without_a_bug_the_law_is_exact():
    assert is_exact()
    assert conversation_distance(ToyPair(0)) == 0


def test_a_doubled_acceptance_ratio_is_noticed(monkeypatch):
    rewrite(monkeypatch, verification, "walked_token", "< branch_mass", "< 2 * branch_mass")
    assert not is_exact()


@pytest.mark.parametrize("mode", ["full", "plain"])
def test_a_draft_that_is_left_out_for_what_it_is_is_noticed(mode):
    """An adapted draft length must not look at the piece whose drawing it decides on."""
    distances = [distance(ToyPair(seed), mode, 2, wrap=PickyProposer) for seed in range(6)]
    assert any(distances)


@pytest.mark.parametrize("mode", ["point", "text"])
def test_a_doubled_acceptance_ratio_of_certain_tokens_is_noticed(monkeypatch, mode):
    rewrite(monkeypatch, verification, "_other_or_same", "< weight:", "< 2 * weight:")
    assert not is_exact(mode)


@pytest.mark.parametrize("mode", ["full", "plain"])
def test_a_correction_from_the_whole_law_is_noticed(monkeypatch, mode):
    monkeypatch.setattr(verification, "residual", lambda target, draft: target)
    assert not is_exact(mode, k=1)


@pytest.mark.parametrize("mode", ["point", "text"])
def test_a_correction_of_a_certain_token_from_the_whole_law_is_noticed(monkeypatch, mode):
    rewrite(monkeypatch, verification, "_other_or_same", "draw_other(token_id, rng)", "draw(rng)")
    assert not is_exact(mode)


def test_draws_that_spare_the_sums_and_keep_every_token_are_noticed(monkeypatch):
    rewrite(monkeypatch, verification, "_thinned", "< visit.prob(branch) * law.total", "< 0")
    pairs = [ToyPair(seed) for seed in range(8)]
    assert any(distance(pair, "full", 1, num_tokens=1, max_thinned=1) > 0 for pair in pairs)


def test_mass_of_the_children_left_in_the_law_after_stop_is_noticed(monkeypatch):
    def unsound(sound):
        def of_all(law, node, *branch):
            if node == ROOT:
                law = PieceLaw(law._roots, law._law, law._children[:0], can_stop=True)
            return sound(law, node, *branch)

        return of_all

    monkeypatch.setattr(PieceLaw, "prob", unsound(PieceLaw.prob))
    monkeypatch.setattr(PieceLaw, "probs", unsound(PieceLaw.probs))
    assert not is_exact()


def test_mass_of_pieces_that_lead_nowhere_left_in_the_law_is_noticed(monkeypatch):
    monkeypatch.setattr(Roots, "starting_mass", lambda roots, law: law.total)
    pairs = [ToyPair(seed) for seed in range(8)]
    assert any(distance(pair, "full", 1, num_tokens=1, max_drawn=1) > 0 for pair in pairs)


def test_pieces_that_stand_for_others_left_out_of_the_law_are_noticed(monkeypatch):
    monkeypatch.setattr(
        Roots, "mass", lambda roots, law, branch: law.weight(roots.pieces.item(branch))
    )
    assert not is_exact()


def test_group_sums_that_are_assigned_are_noticed(monkeypatch):
    def assigned(trie, node, weights):
        _, nodes = trie.children(node)
        masses = [weights[trie.subtree_tokens(int(child))[-1]] for child in nodes]
        return np.array([*masses, None], object)[:-1]

    monkeypatch.setattr(SpellingTrie, "_child_masses", assigned)
    assert not is_exact()


def test_a_rewind_that_drops_one_token_too_many_is_noticed(monkeypatch):
    rewrite(
        monkeypatch,
        speculative,
        "generate",
        "target.rewind(length - 1)",
        "target.rewind(length - 2)",
    )
    assert any(conversation_distance(ToyPair(seed)) > 0 for seed in range(3))


def test_a_dropped_run_is_noticed(monkeypatch):
    """Where the budget ends inside the trie, the pieces drawn so far must still be verified."""
    monkeypatch.setattr(TrieWalk, "visits", property(lambda walk: walk._closed))
    assert not is_exact(k=1)
