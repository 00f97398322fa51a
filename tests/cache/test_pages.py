"""Page ownership: literal tables for each operation; ``test_machine`` covers random sequences of them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import pages


def _pool(num_pages: int = 7, num_rows: int = 3, max_pages: int = 4, page_size: int = 5) -> pages.PageState:
    return pages.init(num_pages, num_rows, max_pages, page_size)


def _i32(*values: int) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


def _mask(*values: int) -> jnp.ndarray:
    return jnp.asarray(values, bool)


def _unchanged(before: pages.PageState, after: pages.PageState) -> bool:
    return all(
        np.array_equal(getattr(before, field.name), getattr(after, field.name))
        for field in dataclasses.fields(before)
    )


def test_append_more_than_the_pool_refuses_the_row_and_no_page_gets_two_owners():
    state, ok_B = pages.append(_pool(), _i32(11, 15, 4))  # 3 + 3 of 6 pages; the third row's page is missing
    assert ok_B.tolist() == [True, True, False]
    owners = [page for row in range(3) for page in state.table_BM[row, : int(state.used_B[row])].tolist()]
    assert sorted(owners) == [1, 2, 3, 4, 5, 6]
    again, ok_B = pages.append(state, _i32(5, 1, 1))
    assert ok_B.tolist() == [False, False, False]
    assert _unchanged(state, again)
    assert pages.violations(again) == []


def test_append_refused_row_takes_nothing_and_a_later_smaller_row_is_served():
    state, ok_B = pages.append(_pool(num_pages=4), _i32(20, 7, 3))
    assert ok_B.tolist() == [False, True, True]
    assert state.table_BM.tolist() == [[0, 0, 0, 0], [1, 2, 0, 0], [3, 0, 0, 0]]
    assert state.length_B.tolist() == [0, 7, 3]


def test_append_longer_than_the_row_or_negative_is_refused():
    state = _pool(num_pages=9, max_pages=2)
    after, ok_B = pages.append(state, _i32(11, -1, 10))
    assert ok_B.tolist() == [False, False, True]
    assert after.length_B.tolist() == [0, 0, 10]


@pytest.mark.parametrize("kind", ["shared", "pinned"])
def test_append_into_a_tail_that_somebody_else_reads_is_refused(kind):
    state, _ = pages.append(_pool(), _i32(8, 3, 0))
    tail = state.table_BM[0, 1:2]
    hold = pages.retain if kind == "shared" else pages.pin
    state, ok_A = hold(state, tail, _mask(1))
    assert ok_A.tolist() == [True]
    after, ok_B = pages.append(state, _i32(1, 1, 0))
    assert ok_B.tolist() == [False, True, True]
    assert after.length_B.tolist() == [8, 4, 0]


def test_generation_changes_at_allocation_and_at_release():
    state, _ = pages.append(_pool(), _i32(5, 0, 0))
    assert state.generation_P.tolist() == [0, 1, 0, 0, 0, 0, 0]
    state, freed_P = pages.release(state, _mask(1, 0, 0))
    assert state.generation_P.tolist() == [0, 2, 0, 0, 0, 0, 0]
    assert np.flatnonzero(freed_P).tolist() == [1]
    assert state.epoch_B.tolist() == [1, 0, 0]


def test_generation_that_is_used_up_retires_the_page_instead_of_wrapping():
    state = _pool(num_pages=3)
    near_P = jnp.full(3, pages.LAST_GENERATION - np.uint32(2), jnp.uint32)
    state, _ = pages.append(dataclasses.replace(state, generation_P=near_P), _i32(5, 0, 0))
    state, _ = pages.release(state, _mask(1, 0, 0))
    assert int(state.generation_P[1]) == int(pages.LAST_GENERATION)
    assert int(pages.counts(state).retired) == 1
    assert pages.violations(state) == []
    state, ok_B = pages.append(state, _i32(5, 5, 0))
    assert ok_B.tolist() == [True, False, True]
    assert state.table_BM[0].tolist() == [2, 0, 0, 0]


def test_allocate_reserves_pages_that_append_then_fills():
    state, ok_B = pages.allocate(_pool(), _i32(2, 0, 5))
    assert ok_B.tolist() == [True, True, False]
    assert (state.used_B.tolist(), state.length_B.tolist()) == ([2, 0, 0], [0, 0, 0])
    state, _ = pages.append(state, _i32(7, 0, 0))
    assert state.used_B.tolist() == [2, 0, 0]


def test_share_counts_the_page_and_the_last_release_frees_it():
    state, _ = pages.append(_pool(), _i32(10, 0, 0))
    prefix_M = state.table_BM[0]
    state, ok = pages.share(state, jnp.int32(1), prefix_M, jnp.int32(2), jnp.int32(10))
    assert bool(ok)
    assert int(pages.counts(state).shared) == 2
    state, freed_P = pages.release(state, _mask(1, 0, 0))
    assert not np.any(freed_P)
    assert state.generation_P[1:3].tolist() == [1, 1]
    state, freed_P = pages.release(state, _mask(0, 1, 0))
    assert np.flatnonzero(freed_P).tolist() == [1, 2]
    assert pages.violations(state) == []


@pytest.mark.parametrize(
    ("row", "page_M", "count", "tokens"),
    [
        pytest.param(1, (1, 2, 0, 0), 2, 9, id="A6_A15_unfinished_page"),
        pytest.param(1, (1, 1, 0, 0), 2, 10, id="same_page_twice"),
        pytest.param(1, (1, 5, 0, 0), 2, 10, id="free_page"),
        pytest.param(1, (1, 0, 0, 0), 2, 10, id="padding_page"),
        pytest.param(1, (1, 7, 0, 0), 2, 10, id="page_past_the_pool"),
        pytest.param(1, (1, -1, 0, 0), 2, 10, id="negative_page"),
        pytest.param(0, (1, 2, 0, 0), 2, 10, id="row_in_use"),
        pytest.param(3, (1, 2, 0, 0), 2, 10, id="row_past_the_end"),
    ],
)
def test_share_of_pages_that_may_not_be_shared_changes_nothing(row, page_M, count, tokens):
    state, _ = pages.append(_pool(), _i32(10, 0, 0))
    after, ok = pages.share(state, jnp.int32(row), _i32(*page_M), jnp.int32(count), jnp.int32(tokens))
    assert not bool(ok)
    assert _unchanged(state, after)


def test_share_of_an_older_generation_is_refused():
    state, _ = pages.append(_pool(), _i32(10, 0, 0))
    stale_M = state.generation_P[state.table_BM[0]] + jnp.asarray([0, 2, 0, 0], jnp.uint32)
    _, ok = pages.share(state, jnp.int32(1), state.table_BM[0], jnp.int32(2), jnp.int32(10), stale_M)
    assert not bool(ok)


def test_A7_A8_drop_twice_or_unowned_is_refused_entry_by_entry():
    state, _ = pages.append(_pool(), _i32(5, 0, 0))
    after, ok_A = pages.drop(state, _i32(1, 1, 2, 0, -1, 7), _mask(1, 1, 1, 1, 1, 1))
    assert ok_A.tolist() == [True, False, False, False, False, False]
    assert after.references_P.tolist() == [0] * 7


def test_A3_pin_keeps_a_released_page_from_its_next_owner_until_unpin():
    state, _ = pages.append(_pool(num_pages=3), _i32(5, 0, 0))
    state, ok_A = pages.pin(state, _i32(1, 2), _mask(1, 1))
    assert ok_A.tolist() == [True, False]  # page 2 is free: nobody can pin it
    state, freed_P = pages.release(state, _mask(1, 0, 0))
    assert not np.any(freed_P)
    assert int(pages.counts(state).pinned) == 1
    _, ok_B = pages.append(state, _i32(6, 0, 0))
    assert ok_B.tolist() == [False, True, True]
    state, ok_A = pages.unpin(state, _i32(1, 1), _mask(1, 1))
    assert ok_A.tolist() == [True, False]
    assert int(pages.counts(state).free) == 2
    assert pages.violations(state) == []


def test_release_with_expectation_leaves_pages_of_a_newer_generation_to_their_owner():
    state, _ = pages.append(_pool(), _i32(10, 0, 0))
    held = pages.Expectation(
        page_BM=state.table_BM,
        generation_BM=state.generation_P[state.table_BM],
        used_B=state.used_B,
        epoch_B=state.epoch_B,
    )
    state, _ = pages.drop(state, _i32(1), _mask(1))  # page 1 is freed behind row 0's back
    state, _ = pages.append(state, _i32(0, 5, 0))
    assert state.table_BM[1, 0] == 1
    state, freed_P = pages.release(state, _mask(1, 0, 0), held)
    assert np.flatnonzero(freed_P).tolist() == [2]
    assert int(state.references_P[1]) == 1
    trusting, _ = pages.release(state, _mask(1, 0, 0))
    assert pages.violations(state) == pages.violations(trusting) == []


def test_truncate_shortens_only_and_keeps_the_pages():
    state, _ = pages.append(_pool(), _i32(8, 6, 0))
    state, ok_B = pages.truncate(state, _i32(5, 7, 0), _mask(1, 1, 0))
    assert ok_B.tolist() == [True, False, False]
    assert (state.length_B.tolist(), state.used_B.tolist()) == ([5, 6, 0], [2, 2, 0])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param({"table_BM": (0, 0, 3)}, "references", id="table_names_an_unowned_page"),
        pytest.param({"table_BM": (0, 3, 2)}, "past its", id="stale_tail"),
        pytest.param({"table_BM": (0, 1, 7)}, "outside the pool", id="page_past_the_pool"),
        pytest.param({"table_BM": (0, 1, 1)}, "twice", id="page_twice"),
        pytest.param({"length_B": (0, 11)}, "tokens", id="length_past_the_pages"),
        pytest.param({"free_P": (0, 1)}, "free stack", id="owned_page_on_the_free_stack"),
        pytest.param({"generation_P": (1, 2)}, "generation", id="generation_even_while_owned"),
        pytest.param({"references_P": (5, 1)}, "generation", id="reference_of_a_free_page"),
    ],
)
def test_violations_of_a_broken_state_names_the_invariant(change, found):
    state, _ = pages.append(_pool(), _i32(10, 0, 0))
    ((name, (*at, value)),) = change.items()
    array = getattr(state, name)
    broken = dataclasses.replace(state, **{name: array.at[tuple(at)].set(value)})
    assert any(found in line for line in pages.violations(broken))


@pytest.mark.parametrize("size", ["num_pages", "num_rows", "max_pages", "page_size"])
def test_init_with_an_impossible_size_names_it(size):
    with pytest.raises(ValueError, match=f"{size} is 0"):
        pages.init(**{"num_pages": 7, "num_rows": 3, "max_pages": 4, "page_size": 5, size: 0})


def test_A7_retract_and_resume_in_a_pool_of_six_pages_returns_the_free_count_to_its_start():
    state, _ = pages.append(_pool(), _i32(12, 3, 0))
    start, held_M = int(state.free_count), state.table_BM[0]
    for _ in range(3):
        state, _ = pages.release(state, _mask(1, 0, 0))
        state, ok_B = pages.append(state, _i32(12, 0, 0))
        assert ok_B.tolist() == [True] * 3
        assert (int(state.free_count), pages.violations(state)) == (start, [])
    state, _ = pages.release(state, _mask(1, 0, 0))
    _, ok_A = pages.drop(state, held_M, held_M > 0)
    assert not np.any(ok_A)  # freed already
