"""Visits every state of the page machine, up to the renaming of pages and requests, nearest first.

Generations enter a visited state only as "still the current one" or "not any more", which is all that a check
can tell, and references that can never be honoured again are not told apart; so the search is finite. States
of equal code behave alike (a test compares their successors).
"""

import collections
import copy
import dataclasses
import itertools

from experiments.page_model import BUGS, Launched, Machine, Moving, Ref


def encode(machine: Machine) -> tuple:
    """Returns the state up to the names of pages and requests, and up to what can no longer matter.

    A step or a delivery that is bound to be refused, because its slot or one of its pages has moved on, is
    the same whatever it names: a generation never comes back.
    """
    moving, work = machine.transfer, machine.work
    if moving and moving.epoch != machine.epoch[moving.request] and "late_completion" not in machine.bugs:
        moving = None
    if work and not _can_land(machine, work):
        work = None
    groups: dict[tuple, list[int]] = {}
    for r, phase in enumerate(machine.phase):
        refs = machine.promised[r]
        mine = [fact is not None and fact[0] == r for fact in (moving, work, machine.stolen)]
        groups.setdefault((phase, len(refs[0]), len(refs[1]), *mine), []).append(r)
    orders: list[list[int]] = [[]]
    for key in sorted(groups):
        # Idle requests hold nothing: any order of them reads the same.
        ways = [groups[key]] if key[0] == "idle" else itertools.permutations(groups[key])
        orders = [[*order, *way] for order in orders for way in ways]
    return min(_encode_in(machine, order, moving, work) for order in orders)


def _can_land(machine: Machine, work: Launched) -> bool:
    looked_at = not {"no_generation", "no_check"} & machine.bugs
    if looked_at and not machine.pools[work.pool].fresh(work.refs):
        return False
    return work.epoch == machine.epoch[work.request] or "no_epoch" in machine.bugs


def _encode_in(machine: Machine, order: list[int], moving: Moving | None, work: Launched | None) -> tuple:
    """One way to write the state; ``moving`` and ``work`` are None if nothing can come of them any more."""
    names: list[dict[int, int]] = [{0: 0}, {0: 0}]

    def name(number: int, refs: list[Ref]) -> tuple:
        pool, known = machine.pools[number], names[number]
        return tuple(
            [(known.setdefault(page, len(known)), pool.gens[page] == generation) for page, generation in refs]
        )

    rows = tuple(
        [
            (
                machine.phase[r],
                name(0, machine.promised[r][0]),
                name(1, machine.promised[r][1]),
                name(0, machine.pools[0].promise(r)),
                name(1, machine.pools[1].promise(r)),
                machine.stolen[1:] if machine.stolen and machine.stolen[0] == r else (),
            )
            for r in order
        ]
    )
    chain = name(0, machine.chain)
    transfer: tuple = ()
    if moving:
        ends: tuple = (name(0, moving.source), name(1, moving.destination))
        transfer = (order.index(moving.request), moving.epoch == machine.epoch[moving.request], *ends)
        transfer = (*transfer, moving.leased)
    elif machine.transfer:  # it will be refused; only its pins still matter
        pinned = (
            (machine.transfer.source, machine.transfer.destination) if machine.transfer.leased else ([], [])
        )
        ends = tuple(tuple(sorted((page, False) for page, _ in name(n, pinned[n]))) for n in (0, 1))
        transfer = (0, False, *ends, machine.transfer.leased)
    launched: tuple = ()
    if work:
        same = work.epoch == machine.epoch[work.request]
        launched = (order.index(work.request), same, work.pool, name(work.pool, work.refs))
    elif machine.work:
        launched = (0, False, 0, ((0, False),))
    pools = []
    for pool, known in zip(machine.pools, names):
        facts = [
            (pool.refs[p], pool.pins[p], pool.gens[p] % 2, pool.free.count(p)) for p in range(len(pool.refs))
        ]
        others = sorted([facts[page] for page in range(len(facts)) if page not in known])
        pools.append((*[facts[page] for page in known], *others))
    return (rows, chain, transfer, launched, tuple(pools), machine.robbed)


def decode(state: tuple, max_pages: int, bugs: frozenset[str]) -> Machine:
    """Returns a machine in that state; a reference that is out of date gets an impossible generation."""
    rows, chain, transfer, work, pools, robbed = state
    machine = Machine(len(pools[0]) - 1, len(rows), max_pages, bugs)
    for pool, facts in zip(machine.pools, pools):
        pool.refs, pool.pins, pool.gens, free = (list(column) for column in zip(*facts))
        pool.free = [page for page in range(len(facts) - 1, 0, -1) for _ in range(free[page])]

    def refs(number: int, named: tuple) -> list[Ref]:
        gens = machine.pools[number].gens
        return [(page, gens[page] if fresh else -1) for page, fresh in named]

    machine.robbed = robbed
    for request, (phase, prefill, decoding, table, decode_table, stolen) in enumerate(rows):
        if stolen:
            machine.stolen = (request, *stolen)
        machine.phase[request] = phase
        machine.promised[request] = [refs(0, prefill), refs(1, decoding)]
        machine.pools[0].rows[request] = [page for page, _ in table]
        machine.pools[1].rows[request] = [page for page, _ in decode_table]
    machine.chain = refs(0, chain)
    if transfer:
        request, same, source, destination, leased = transfer
        machine.transfer = Moving(request, 0 if same else -1, refs(0, source), refs(1, destination), leased)
    if work:
        request, same, number, named = work
        machine.work = Launched(request, 0 if same else -1, number, refs(number, named))
    return machine


@dataclasses.dataclass
class Explored:
    """What a search found: its size, and the shortest way to a broken state, if there is one."""

    states: int = 0
    transitions: int = 0
    refusals: int = 0
    depth: int = 0
    counterexample: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)


def explore(
    num_pages: int, num_requests: int, max_pages: int, bug: str | None = None, limit: int | None = None
) -> Explored:
    """Visits every reachable state, nearest first; stops at the first that breaks an invariant.

    Args:
      num_pages: allocatable pages of each of the two pools. max_pages: pages of a row.
      limit: gives up with a ValueError after that many states.

    Raises:
      ValueError: an unknown bug, or more states than ``limit``.
    """
    if bug is not None and bug not in BUGS:
        raise ValueError(f"bug {bug!r} is not one of {sorted(BUGS)}")
    bugs = frozenset([bug] if bug else [])
    found = Explored()
    start = encode(Machine(num_pages, num_requests, max_pages, bugs))
    came: dict[tuple, tuple | None] = {start: None}
    queue = collections.deque([(start, 0)])
    while queue:
        state, depth = queue.popleft()
        found.states += 1
        found.depth = depth
        if limit is not None and found.states > limit:
            raise ValueError(f"more than {limit} states; choose fewer pages, requests or pages per row")
        for name, request in list(decode(state, max_pages, bugs).actions()):
            machine = decode(state, max_pages, bugs)
            found.transitions += 1
            found.refusals += not machine.act(name, request)
            after = encode(machine)
            if after in came and not machine.wrong:
                continue
            found.broken = machine.broken()
            if found.broken:
                machine = Machine(num_pages, num_requests, max_pages, bugs)
                found.counterexample = _replay(machine, [*_path(came, state)[1:], None])
                return found
            came[after] = state
            queue.append((after, depth + 1))
    return found


def _path(came: dict[tuple, tuple | None], state: tuple) -> list[tuple]:
    steps: list[tuple] = []
    at: tuple | None = state
    while at is not None:
        steps.append(at)
        at = came[at]
    return steps[::-1]


def _replay(machine: Machine, goals: list[tuple | None]) -> list[str]:
    """Finds the actions that lead through the given states (None: a broken one), under constant names."""
    steps = []
    for goal in goals:
        for name, request in list(machine.actions()):
            tried = copy.deepcopy(machine)
            tried.act(name, request)
            if bool(tried.broken()) if goal is None else encode(tried) == goal:
                machine = tried
                steps.append(name if request < 0 else f"{name}({'ABCDEFGH'[request]})")
                break
    return steps
