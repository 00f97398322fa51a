"""Random sequences of page operations: the device and a plain Python model agree after each."""

import collections

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from experiments.page_model import Pool
from kvmem.cache import integrity, pages, tags

ROWS, COLUMNS, PAGES, PAGE_SIZE = 3, 4, 8, 5
rows = st.integers(0, ROWS - 1)


def _one(row: int) -> jax.Array:
    return jnp.arange(ROWS) == row


def _ids(page_list) -> tuple[jax.Array, jax.Array]:
    """A padded list of pages and its mask: one shape, one compilation."""
    page_A = np.zeros(COLUMNS, np.int32)
    page_A[: len(page_list)] = page_list
    return jnp.asarray(page_A), jnp.arange(COLUMNS) < len(page_list)


class Ops:
    """The device operations; a mutation replaces one."""

    append = staticmethod(pages.append)
    allocate = staticmethod(pages.allocate)
    share = staticmethod(pages.share)
    retain = staticmethod(pages.retain)
    drop = staticmethod(pages.drop)
    release = staticmethod(pages.release)
    pin = staticmethod(pages.pin)
    unpin = staticmethod(pages.unpin)


class PageMachine(RuleBasedStateMachine):
    """One pool as the device has it, and as lists of pages."""

    ops = Ops

    def __init__(self):
        super().__init__()
        self.state = pages.init(PAGES, ROWS, COLUMNS, PAGE_SIZE)
        self.expectation = tags.empty(ROWS, COLUMNS)
        self.model = Pool(PAGES, ROWS, COLUMNS)
        self.lengths = [0] * ROWS
        self.holds: list[int] = []
        self.pinned: list[list[int]] = []

    def _extend(self, row: int) -> None:
        self.expectation = tags.extend(self.expectation, self.state, _one(row))

    def _append(self, row: int, tokens: int) -> bool:
        first, last = self.lengths[row] // PAGE_SIZE, -(-(self.lengths[row] + tokens) // PAGE_SIZE)
        need = last - len(self.model.rows[row])
        touched = self.model.rows[row][first:last]
        writable = all(self.model.refs[p] == 1 and not self.model.pins[p] for p in touched)
        expected = writable and self.model.grow(row, max(0, need))
        self.lengths[row] += tokens if expected else 0
        tokens_B = np.where(np.arange(ROWS) == row, tokens, 0).astype(np.int32)
        self.state, ok_B = self.ops.append(self.state, jnp.asarray(tokens_B))
        assert bool(ok_B[row]) == expected
        self._extend(row)
        return expected

    @rule(row=rows, tokens=st.integers(1, 2 * PAGE_SIZE + 1))
    def append(self, row, tokens):
        self._append(row, tokens)

    @rule(row=rows, count=st.integers(1, 2))
    def allocate(self, row, count):
        """Reserves pages, which later tokens fill."""
        expected = self.model.grow(row, count)
        pages_B = jnp.asarray(np.where(np.arange(ROWS) == row, count, 0).astype(np.int32))
        self.state, ok_B = self.ops.allocate(self.state, pages_B)
        assert bool(ok_B[row]) == expected
        self._extend(row)

    @rule(row=rows, donor=rows, count=st.integers(1, COLUMNS), more=st.integers(0, PAGE_SIZE))
    def share_or_fork(self, row, donor, count, more):
        """A row takes a donor's first pages; with ``more`` it goes on by itself (a fork)."""
        count = min(count, self.lengths[donor] // PAGE_SIZE)  # the host never offers an unfinished page
        page_list = self.model.rows[donor][:count]
        if not page_list:
            return
        expected = self.model.share(row, page_list)
        page_M, _ = _ids(page_list)
        generation_M = self.state.generation_P[page_M]
        self.state, ok = self.ops.share(
            self.state, jnp.int32(row), page_M, jnp.int32(count), jnp.int32(count * PAGE_SIZE), generation_M
        )
        assert bool(ok) == expected
        if expected:
            self.lengths[row] = count * PAGE_SIZE
            self._extend(row)
            if more:
                self._append(row, more)

    def _release(self, row: int) -> None:
        promised = self.model.promise(row)
        self.model.release(row, promised)
        self.lengths[row] = 0
        self.state, _ = self.ops.release(self.state, _one(row), self.expectation)
        self.expectation = tags.clear(self.expectation, _one(row))

    @rule(row=rows)
    def cancel(self, row):
        self._release(row)

    @rule(row=rows)
    def retract_and_resume(self, row):
        """A row moves out and comes back with the same length, in whatever pages are free."""
        length = self.lengths[row]
        self._release(row)
        if length:
            self._append(row, length)

    @precondition(lambda self: any(self.lengths))
    @rule(row=rows)
    def hold_prefix(self, row):
        page_list = self.model.rows[row][: self.lengths[row] // PAGE_SIZE]
        for page in page_list:
            assert self.model.retain(page)
        self.holds += page_list
        self.state, ok_A = self.ops.retain(self.state, *_ids(page_list))
        assert int(jnp.sum(ok_A)) == len(page_list)

    @precondition(lambda self: self.holds)
    @rule(count=st.integers(1, COLUMNS))
    def evict(self, count):
        page_list, self.holds = self.holds[:count], self.holds[count:]
        # As one call of the device: pages that lose their last reference in it are freed in order of ids.
        for page in sorted(page_list):
            assert self.model.drop(page)
        self.state, ok_A = self.ops.drop(self.state, *_ids(page_list))
        assert int(jnp.sum(ok_A)) == len(page_list)

    @rule(page=st.sampled_from([-1, 0, 3, PAGES, PAGES + 5]))
    def drop_what_nobody_owns(self, page):
        if 0 < page < PAGES and self.model.refs[page]:
            return
        before = self.state
        self.state, ok_A = self.ops.drop(self.state, *_ids([page]))
        assert not bool(jnp.any(ok_A))
        assert np.array_equal(before.references_P, self.state.references_P)

    @rule(row=rows)
    def begin_transfer(self, row):
        page_list = list(self.model.rows[row])
        if not page_list or len(self.pinned) > 1:
            return
        for page in page_list:
            self.model.pin(page)
        self.pinned.append(page_list)
        self.state, ok_A = self.ops.pin(self.state, *_ids(page_list))
        assert int(jnp.sum(ok_A)) == len(page_list)

    @precondition(lambda self: self.pinned)
    @rule()
    def end_transfer(self):
        page_list = self.pinned.pop(0)
        for page in sorted(page_list):
            assert self.model.unpin(page)
        self.state, ok_A = self.ops.unpin(self.state, *_ids(page_list))
        assert int(jnp.sum(ok_A)) == len(page_list)

    @precondition(lambda self: any(self.lengths))
    @rule(row=rows, heir=rows)
    def steal_and_abort(self, row, heir):
        """A page is freed behind the row's back, and another row may get it.

        The check stops this row only, and its abort frees what it still owns.
        """
        mine = [p for p in self.model.rows[row] if self.model.refs[p] == 1 and not self.model.pins[p]]
        if not mine:
            return
        promised = self.model.promise(row)
        self.model.drop(mine[0])
        self.state, _ = self.ops.drop(self.state, *_ids(mine[:1]))
        if heir != row:
            self._append(heir, PAGE_SIZE)
        live_B = jnp.asarray([bool(r) for r in self.model.rows])
        report = _check(self.state, self.expectation, live_B)
        assert report.ok_B.tolist() == [bool(r) and i != row for i, r in enumerate(self.model.rows)]
        self.model.release(row, promised)
        self.lengths[row] = 0
        self.state, _ = self.ops.release(self.state, ~report.ok_B & live_B, self.expectation)
        self.expectation = tags.clear(self.expectation, _one(row))

    @invariant()
    def both_agree(self):
        state, model = self.state, self.model
        assert [state.table_BM[r, : int(state.used_B[r])].tolist() for r in range(ROWS)] == model.rows
        assert state.references_P.tolist() == model.refs
        assert state.pins_P.tolist() == model.pins
        assert state.generation_P.tolist() == model.gens
        assert state.free_P[: int(state.free_count)].tolist() == model.free
        assert state.length_B.tolist() == self.lengths

    @invariant()
    def pages_are_conserved_and_nobody_is_accused(self):
        assert pages.violations(self.state) == []
        held = collections.Counter(p for row in self.model.rows for p in row) + collections.Counter(
            self.holds
        )
        assert all(held[p] == n for p, n in enumerate(self.model.refs))
        live_B = jnp.asarray([bool(r) for r in self.model.rows])
        assert _check(self.state, self.expectation, live_B).ok_B.tolist() == live_B.tolist()


_check = jax.jit(integrity.check)


def _settings(examples: int, steps: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )


def test_page_operations_jitted_agree_with_a_plain_model_after_every_step():
    run_state_machine_as_test(PageMachine, settings=_settings(16, 22))


def test_page_operations_eager_agree_with_a_plain_model_after_every_step():
    with jax.disable_jit():
        run_state_machine_as_test(PageMachine, settings=_settings(1, 6))


def _replace(state, **changes):
    return jax.tree.map(lambda x: x, state).replace(**changes)


def _release_that_keeps_generations(state, mask_B, expectation=None):
    after, freed_P = pages.release(state, mask_B, expectation)
    return _replace(after, generation_P=state.generation_P), freed_P


def _release_that_frees_pinned(state, mask_B, expectation=None):
    unpinned = _replace(state, pins_P=jnp.zeros_like(state.pins_P))
    after, freed_P = pages.release(unpinned, mask_B, expectation)
    return _replace(after, pins_P=state.pins_P), freed_P


def _release_that_trusts_the_table(state, mask_B, expectation=None):
    return pages.release(state, mask_B)


def _allocate_that_takes_what_it_refuses(state, pages_B):
    after, ok_B = pages.allocate(state, pages_B)
    partly, _ = pages.allocate(state, jnp.minimum(pages_B, 1))
    return (after if bool(jnp.all(ok_B)) else partly), ok_B


def _append_that_overallocates(state, tokens_B):
    after, ok_B = pages.append(state, tokens_B)
    return after, ok_B | (tokens_B > 0)


def _unpin_that_leaks(state, page_A, mask_A):
    after, ok_A = pages.unpin(state, page_A, mask_A)
    return _replace(after, free_P=state.free_P, free_count=state.free_count), ok_A


def _drop_that_frees_shared(state, page_A, mask_A):
    state, ok_A = pages.drop(state, page_A, mask_A)
    return pages.drop(state, page_A, mask_A)[0], ok_A


def _share_that_does_not_count(state, *args):
    after, ok = pages.share(state, *args)
    return _replace(after, references_P=state.references_P), ok


@pytest.mark.parametrize(
    ("operation", "mutant"),
    [
        pytest.param("release", _release_that_keeps_generations, id="A1_A2_generation_kept_at_release"),
        pytest.param("release", _release_that_frees_pinned, id="A3_pinned_page_freed"),
        pytest.param("release", _release_that_trusts_the_table, id="E2_abort_trusts_the_table"),
        pytest.param("append", _append_that_overallocates, id="refusal_reported_as_success"),
        pytest.param("allocate", _allocate_that_takes_what_it_refuses, id="refused_row_takes_pages"),
        pytest.param("unpin", _unpin_that_leaks, id="B2_unpin_leaks"),
        pytest.param("drop", _drop_that_frees_shared, id="A7_freed_twice"),
        pytest.param("share", _share_that_does_not_count, id="E4_share_not_counted"),
    ],
)
def test_page_machine_with_a_mutated_operation_fails(operation, mutant):
    ops = type("Mutated", (Ops,), {operation: staticmethod(mutant)})
    machine = type("MutatedMachine", (PageMachine,), {"ops": ops})
    quick = hypothesis.settings(_settings(60, 20), phases=[hypothesis.Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)
