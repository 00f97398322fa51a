"""Clean churn: operations happen, checks are made, nobody is accused; a fault in between would be seen."""

import pytest

from experiments import clean_pages
from kvmem.cache import integrity


@pytest.mark.parametrize("detector", ["tags", pytest.param("tags_digest", marks=pytest.mark.slow)])
def test_E8_clean_operations_accuse_nobody(detector):
    run = clean_pages.operations(detector, 1_000, seed=3)
    assert run.operations == 1_000
    assert run.page_checks > 5_000
    assert run.false_positives == 0


@pytest.mark.slow
def test_E8_a_hundred_thousand_clean_operations_accuse_nobody():
    run = clean_pages.operations("tags", 100_000, seed=4)
    assert (run.operations, run.false_positives) == (100_000, 0)


def test_full_pool_checks_every_page_each_time():
    run = clean_pages.full_pool(500, 98, rows=6)
    assert (run.operations, run.page_checks, run.false_positives) == (1_000, 500 * 97, 0)


def test_full_pool_with_a_release_that_forgets_the_expectation_is_seen(monkeypatch):
    """The mutation: pages are given back and handed out again, and the promise is not renewed."""
    monkeypatch.setattr(clean_pages.tags, "clear", lambda expectation, mask_B: expectation)
    assert clean_pages.full_pool(500, 98, rows=6).false_positives > 0


def test_check_cost_of_off_is_no_more_than_handing_the_mask_on():
    """``alive`` of the mask with itself is the one operation; tags add more."""
    off, tags = (clean_pages.check_cost(d, 98, rows=6, repeats=5) for d in ("off", "tags"))
    assert off.device_operations <= 1
    assert tags.device_operations > off.device_operations


PROGRAM = """HloModule jit_run

%fused (p: s32[3]) -> s32[3] {
  %p = s32[3]{0} parameter(0)
  ROOT %n = s32[3]{0} negate(%p)
}

ENTRY %main (a: s32[3]) -> (s32[3], s32[]) {
  %a = s32[3]{0} parameter(0)
  %c = s32[] constant(3)
  %f = s32[3]{0} fusion(%a), kind=kLoop, calls=%fused
  %w = (s32[3]{0}, (s32[], pred[]), /*index=5*/s32[]) while(%f), condition=%x, body=%y
  %g = s32[3]{0} get-tuple-element(%w), index=0
  %b = s32[3]{0} copy(%g)
  ROOT %t = (s32[3]{0}, s32[]) tuple(%b, %c)
}
"""


def test_device_operations_are_what_the_entry_runs():
    assert clean_pages.device_operations(PROGRAM) == 3  # fusion, while, copy


@pytest.mark.slow
def test_step_operations_grow_with_what_the_detector_compares():
    counts = [clean_pages.step_operations(detector) for detector in integrity.DETECTORS]
    assert counts == sorted(set(counts))
