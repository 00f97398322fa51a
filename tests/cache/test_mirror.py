"""The host's mirror where it differs from the device: it raises on what can only be a bug of the host."""

import jax.numpy as jnp
import pytest

from kvmem.cache import pages
from kvmem.cache.mirror import PageMirror


def _mirror() -> PageMirror:
    """Six pages; row 0 holds three, row 1 one."""
    mirror = PageMirror(num_pages=7, num_rows=2, max_pages=4, page_size=5)
    assert mirror.append([12, 3]).all()
    return mirror


def test_A7_retract_and_resume_returns_the_free_count_to_its_start_and_freeing_twice_raises():
    mirror = _mirror()
    start = mirror.free_count
    held = mirror.row(0)
    mirror.release([0])
    assert mirror.append([12, 0]).all()
    assert mirror.free_count == start
    mirror.drop(held[:1])
    with pytest.raises(ValueError, match=f"page {held[0]} has no reference left"):
        mirror.drop(held[:1])
    assert mirror.free_count == start + 1


def test_A7_the_same_page_twice_in_one_call_raises_and_changes_nothing():
    mirror = _mirror()
    page = mirror.row(1)[0]
    with pytest.raises(ValueError, match="no reference left"):
        mirror.drop([page, page])
    assert mirror.owned(page)


@pytest.mark.parametrize("page", [5, 0, -1, 7], ids=["free", "padding", "negative", "past_the_pool"])
def test_A8_a_stale_side_mapping_cannot_free_hold_or_pin_what_nobody_owns(page):
    mirror = _mirror()
    for operation in (mirror.drop, mirror.retain, mirror.pin):
        with pytest.raises(ValueError, match=f"page {page} has no"):
            operation([page])


def test_A3_unpin_of_a_page_that_is_not_pinned_that_often_raises():
    mirror = _mirror()
    page = mirror.row(1)[0]
    mirror.pin([page])
    with pytest.raises(ValueError, match="not pinned that often"):
        mirror.unpin([page, page])
    assert mirror.release([1]) == []
    assert mirror.unpin([page]) == [page]


def test_pages_needed_is_what_append_takes():
    mirror = _mirror()
    before = mirror.free_count
    needed = mirror.pages_needed(0, 7)
    assert mirror.append([7, 0]).all()
    assert before - mirror.free_count == needed == 1


def test_differences_names_the_array_that_differs():
    mirror = _mirror()
    state, _ = pages.append(pages.init(7, 2, 4, 5), jnp.asarray([12, 3], jnp.int32))
    assert mirror.differences(state) == []
    mirror.truncate(0, 9)
    assert mirror.differences(state) == ["length_B"]
    mirror.generation_P[2] += 2
    assert mirror.differences(state) == ["length_B", "generation_P"]
