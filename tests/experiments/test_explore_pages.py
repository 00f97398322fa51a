"""The exhaustive search: nothing breaks, every planted mistake does, and equal codes behave alike."""

import copy
import random

import pytest

from experiments.explore import decode, encode, explore
from experiments.page_model import BUGS, REDUNDANT, Machine

SIZE = (3, 2, 2)


def test_explore_of_the_small_machine_finds_no_broken_state():
    found = explore(*SIZE)
    assert found.broken == []
    # Pinned: a change of the machine or of the code of a state shows here.
    assert (found.states, found.transitions) == (2399, 20717)


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in REDUNDANT])
def test_explore_with_a_planted_mistake_finds_the_shortest_way_to_a_broken_state(bug):
    found = explore(3, 3, 3, bug)
    assert found.broken
    machine = Machine(3, 3, 3, frozenset([bug]))
    for step in found.counterexample:  # the sequence can be replayed by hand, and only its last step breaks
        assert machine.broken() == []
        name, _, request = step.rstrip(")").partition("(")
        machine.act(name, "ABC".index(request) if request else -1)
    assert machine.broken() != []


@pytest.mark.parametrize("bug", REDUNDANT)
def test_explore_with_a_redundant_defence_removed_finds_nothing(bug):
    assert explore(*SIZE, bug).broken == []


def _walk(seed: int, steps: int) -> Machine:
    rng = random.Random(seed)
    machine = Machine(4, 3, 3)
    for _ in range(steps):
        machine.act(*rng.choice(list(machine.actions())))
    return machine


@pytest.mark.parametrize("steps", [5, 20, 60])
def test_decode_of_a_code_gives_a_state_with_the_same_successors(steps):
    for seed in range(12):
        real = _walk(seed, steps)
        code = encode(real)
        twin = decode(code, 3, frozenset())
        assert encode(twin) == code
        assert _successors(real) == _successors(twin)


def _successors(machine: Machine) -> set[tuple]:
    codes = set()
    for action in list(machine.actions()):
        again = copy.deepcopy(machine)
        again.act(*action)
        codes.add(encode(again))
    return codes


def test_explore_with_an_unknown_bug_or_too_many_states_says_so():
    with pytest.raises(ValueError, match="'typo' is not one of"):
        explore(*SIZE, "typo")
    with pytest.raises(ValueError, match="more than 50 states"):
        explore(*SIZE, limit=50)
