"""The check: what it must see, in which order, for whom, and what it must leave alone."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from kvmem.cache import integrity, pages, tags
from kvmem.cache.integrity import Kind

ROWS, MAX_PAGES, PAGES, PAGE_SIZE = 3, 4, 11, 5


def _mask(*values: int) -> jax.Array:
    return jnp.asarray(values, bool)


def _i32(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


EVERY = _mask(1, 1, 1)


def _served(*tokens: int) -> tuple[pages.PageState, tags.Expectation]:
    """Rows that hold ``tokens`` each, and what they were promised."""
    state, _ = pages.append(pages.init(PAGES, ROWS, MAX_PAGES, PAGE_SIZE), _i32(*tokens))
    return state, tags.extend(tags.empty(ROWS, MAX_PAGES), state, EVERY)


def _found(report: integrity.IntegrityReport, row: int) -> tuple[str, int]:
    return Kind(int(report.kind_B[row])).name, int(report.logical_B[row])


def test_check_of_a_served_pool_is_ok_and_counts_its_pages():
    report = jax.jit(integrity.check)(*_served(12, 5, 7), EVERY)
    assert report.ok_B.tolist() == [True] * 3
    assert report.kind_B.tolist() == [Kind.OK] * 3
    assert int(report.page_checks) == 3 + 1 + 2


def _edit(state: pages.PageState, name: str, at, value) -> pages.PageState:
    return dataclasses.replace(state, **{name: getattr(state, name).at[at].set(value)})


def _free_behind_the_back(state: pages.PageState, row: int, logical: int) -> pages.PageState:
    state, ok_A = pages.drop(state, state.table_BM[row, logical][None], _mask(1))
    assert bool(ok_A[0])
    return state


@pytest.mark.parametrize(
    ("fault", "kind", "logical"),
    [
        pytest.param(lambda s: _free_behind_the_back(s, 0, 1), "GENERATION", 1, id="A2_freed_not_reused"),
        pytest.param(
            lambda s: pages.append(_free_behind_the_back(s, 0, 1), _i32(0, 6, 0))[0],
            "GENERATION",
            1,
            id="A1_freed_and_reused",
        ),
        pytest.param(
            lambda s: pages.append(_free_behind_the_back(s, 0, 2), _i32(0, 6, 0))[0],
            "GENERATION",
            2,
            id="A1_tail_freed_and_reused",
        ),
        pytest.param(lambda s: _edit(s, "table_BM", (0, 1), PAGES), "RANGE", 1, id="A14_page_past_the_pool"),
        pytest.param(lambda s: _edit(s, "table_BM", (0, 2), -1), "RANGE", 2, id="A14_negative_page"),
        pytest.param(lambda s: _edit(s, "table_BM", (0, 0), 0), "RANGE", 0, id="A10_padding_page_in_use"),
        pytest.param(
            lambda s: _edit(s, "table_BM", (0, 1), s.table_BM[1, 0]),
            "MAPPING",
            1,
            id="owner_live_page_of_another",
        ),
        pytest.param(
            lambda s: _edit(s, "table_BM", (0, slice(0, 2)), s.table_BM[0, 1::-1]),
            "MAPPING",
            0,
            id="position_right_pages_in_wrong_order",
        ),
        pytest.param(lambda s: _edit(s, "table_BM", (0, 3), 9), "COUNT", 3, id="A9_stale_tail_column"),
        pytest.param(lambda s: _edit(s, "used_B", 0, 2), "COUNT", -1, id="A9_fewer_pages_than_promised"),
        pytest.param(lambda s: _edit(s, "length_B", 0, 16), "COUNT", -1, id="length_past_the_pages"),
        pytest.param(lambda s: _edit(s, "epoch_B", 0, 1), "EPOCH", -1, id="A12_slot_given_back"),
        pytest.param(lambda s: _edit(s, "generation_P", 1, 7), "GENERATION", 0, id="generation_word_changed"),
    ],
)
def test_check_of_a_fault_stops_its_row_only(fault, kind, logical):
    state, expectation = _served(12, 5, 7)
    state = fault(state)
    if state.used_B[1] > 1:  # the fault gave row 1 a page, as it was asked for
        expectation = tags.extend(expectation, state, _mask(0, 1, 0))
    report = integrity.check(state, expectation, EVERY)
    assert report.ok_B.tolist() == [False, True, True]
    assert _found(report, 0) == (kind, logical)
    assert integrity.finding(report, 0)["kind"] == kind.lower()


def test_A14_gather_that_is_clamped_reads_a_valid_tag_which_is_why_range_comes_first():
    state, expectation = _served(12, 5, 7)
    last = PAGES - 1
    state = _edit(_edit(state, "table_BM", (0, 0), PAGES), "generation_P", last, 1)
    clamped = state.generation_P.at[state.table_BM[0, 0]].get(mode="clip")
    assert clamped == expectation.generation_BM[0, 0]
    assert _found(integrity.check(state, expectation, EVERY), 0) == ("RANGE", 0)


@pytest.mark.parametrize("remapped", [True, False], ids=["remapped", "mutation_without_remap"])
def test_A4_deduplicated_copies_are_freed_only_after_the_row_reads_the_other_ones(remapped):
    state, expectation = _served(10, 10, 7)
    copies_A, kept_M, second = state.table_BM[1, :2], state.table_BM[0], _mask(0, 1, 0)
    if remapped:
        state, _ = pages.release(state, second, expectation)
        state, ok = pages.share(state, jnp.int32(1), kept_M, jnp.int32(2), jnp.int32(10))
        assert bool(ok)
        expectation = tags.extend(tags.clear(expectation, second), state, second)
    else:
        state, _ = pages.drop(state, copies_A, _mask(1, 1))
    assert integrity.check(state, expectation, EVERY).ok_B.tolist() == [True, remapped, True]


def test_check_reports_what_was_expected_and_what_was_found():
    state, expectation = _served(12, 5, 7)
    state = pages.append(_free_behind_the_back(state, 0, 1), _i32(0, 6, 0))[0]
    assert integrity.finding(integrity.check(state, expectation, _mask(1, 0, 1)), 0) == {
        "kind": "generation",
        "logical_page": 1,
        "expected_page": 2,
        "found_page": 2,
        "expected_generation": 1,
        "found_generation": 3,
    }


def test_E4_shared_prefix_is_no_false_positive_while_shared_and_a_mismatch_after_reuse():
    state, expectation = _served(10, 0, 7)
    state, ok = pages.share(state, jnp.int32(1), state.table_BM[0], jnp.int32(2), jnp.int32(10))
    assert bool(ok)
    expectation = tags.extend(expectation, state, _mask(0, 1, 0))
    assert integrity.check(state, expectation, EVERY).ok_B.tolist() == [True] * 3
    state, _ = pages.release(state, _mask(1, 0, 0), expectation)
    expectation = tags.clear(expectation, _mask(1, 0, 0))
    assert integrity.check(state, expectation, _mask(0, 1, 1)).ok_B.tolist() == [False, True, True]
    stale = expectation  # row 1 is given back, its pages are taken by row 0, and row 1's work still arrives
    state, _ = pages.release(state, _mask(0, 1, 0), expectation)
    state, _ = pages.append(state, _i32(10, 0, 0))
    late = dataclasses.replace(
        state, table_BM=state.table_BM.at[1].set(stale.page_BM[1]), used_B=_i32(2, 2, 2)
    )
    late = dataclasses.replace(late, epoch_B=stale.epoch_B)
    assert _found(integrity.check(late, stale, EVERY), 1) == ("GENERATION", 0)


def test_E2_abort_leaves_the_page_to_its_new_owner():
    state, expectation = _served(12, 5, 7)
    state = pages.append(_free_behind_the_back(state, 0, 1), _i32(0, 6, 0))[0]
    expectation = tags.extend(expectation, state, _mask(0, 1, 0))
    report = integrity.check(state, expectation, EVERY)
    state, freed_P = pages.release(state, ~report.ok_B, expectation)
    assert np.flatnonzero(freed_P).tolist() == [1, 3]
    assert state.references_P[2] == 1
    assert pages.violations(state) == []
    assert integrity.check(state, expectation, _mask(0, 1, 1)).ok_B.tolist() == [False, True, True]


def test_E7_missing_report_stops_every_row_and_an_unchecked_row_is_not_ok():
    state, expectation = _served(12, 5, 7)
    assert integrity.alive(None, EVERY).tolist() == [False] * 3
    report = integrity.check(state, expectation, _mask(1, 0, 1))
    assert integrity.alive(report, EVERY).tolist() == [True, False, True]
    assert _found(report, 1) == ("UNCHECKED", -1)


def test_guard_with_an_unknown_detector_or_without_digests_says_so():
    state, expectation = _served(12, 5, 7)
    with pytest.raises(ValueError, match="'tagz' is not one of"):
        integrity.guard("tagz", state, expectation, EVERY)
    with pytest.raises(ValueError, match="needs the stored bytes"):
        integrity.guard("tags_digest", state, expectation, EVERY)


def _step(detector, state, expectation, row_mask_B, pool):
    """A stand-in for a decode step: alive rows read their pages."""
    if detector is None:
        ok_B = row_mask_B
    else:
        report = integrity.guard(detector, state, expectation, row_mask_B)
        ok_B = integrity.alive(report, row_mask_B) if detector != "off" else report.ok_B
    read_BM = pool[jnp.clip(state.table_BM, 0, PAGES - 1)]
    return jnp.where(ok_B, jnp.sum(read_BM, axis=1), 0.0)


def _operations(detector) -> list[str]:
    state, expectation = _served(12, 5, 7)
    lowered = jax.jit(_step, static_argnums=0).lower(detector, state, expectation, EVERY, jnp.ones(PAGES))
    return re.findall(r"^ +(?:ROOT )?%\S+ = \S+ ([a-z-]+)\(", lowered.compile().as_text(), re.MULTILINE)


def test_guard_off_adds_no_device_operation_and_tags_does():
    without, off, on = _operations(None), _operations("off"), _operations("tags")
    assert off == without != []
    assert len(on) > len(off)


def test_E13_step_reads_the_arrays_that_were_checked_whatever_is_allocated_meanwhile():
    state, expectation = _served(12, 5, 7)
    pool = jnp.arange(PAGES, dtype=jnp.float32)
    report = integrity.check(state, expectation, EVERY)
    later, _ = pages.release(state, EVERY)  # "between" check and read another thread frees and reallocates
    later, _ = pages.append(later, _i32(1, 15, 15))
    read = _step(None, state, expectation, report.ok_B, pool)
    assert np.array_equal(read, _step("tags", state, expectation, EVERY, pool))
    assert integrity.check(later, expectation, EVERY).ok_B.tolist() == [False] * 3


def _on_eight_ranks(states: pages.PageState, expectation: tags.Expectation, axis: str | None):
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("tp",))

    def check(states, expectation):
        state = jax.tree.map(lambda array: array[0], states)
        report = integrity.guard("tags", state, expectation, EVERY, axis=axis)
        return jax.tree.map(lambda field: field[None], report)

    mapped = jax.shard_map(
        check, mesh=mesh, in_specs=(Spec("tp"), Spec()), out_specs=Spec("tp"), check_vma=False
    )
    return jax.jit(mapped)(states, expectation)


@pytest.mark.parametrize("axis", ["tp", None], ids=["agreed", "mutation_without_agreement"])
def test_agree_drops_the_same_row_on_every_rank(axis):
    state, expectation = _served(12, 5, 7)
    states = jax.tree.map(lambda array: jnp.stack([array] * 8), state)
    states = dataclasses.replace(states, table_BM=states.table_BM.at[5, 1, 0].set(9).at[6, 1, 0].set(-3))
    report = _on_eight_ranks(states, expectation, axis)
    same = bool(np.all(report.ok_B == report.ok_B[:1]))
    assert same == (axis == "tp")
    if axis:
        assert report.ok_B[0].tolist() == [True, False, True]
        assert report.kind_B[:, 1].tolist() == [Kind.MAPPING] * 8
        assert report.found_page_B[:, 1].tolist() == [9] * 8  # rank 5's finding, the lowest that failed
        assert report.logical_B[:, 0].tolist() == [-1] * 8


def test_agree_of_a_no_op_report_is_the_report():
    report = integrity.unchecked(EVERY)
    assert integrity.agree(report, "tp") is report
    assert integrity.finding(report, 0) == {}


def test_extend_never_rewrites_what_was_promised():
    state, expectation = _served(12, 5, 7)
    swapped = _edit(state, "table_BM", (0, 0), 9)
    swapped, _ = pages.append(swapped, _i32(5, 0, 0))
    extended = tags.extend(expectation, swapped, EVERY)
    assert extended.page_BM[0].tolist() == [1, 2, 3, 7]
    assert _found(integrity.check(swapped, extended, EVERY), 0) == ("MAPPING", 0)


def test_clear_then_extend_takes_the_rows_new_epoch():
    state, expectation = _served(12, 5, 7)
    state, _ = pages.release(state, _mask(1, 0, 0), expectation)
    expectation = tags.clear(expectation, _mask(1, 0, 0))
    state, _ = pages.append(state, _i32(6, 0, 0))
    expectation = tags.extend(expectation, state, _mask(1, 0, 0))
    assert integrity.check(state, expectation, EVERY).ok_B.tolist() == [True] * 3
    assert expectation.epoch_B.tolist() == [1, 0, 0]
