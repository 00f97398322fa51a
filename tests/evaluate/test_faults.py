"""Every fault class, planted in a running engine: what each detector must see, and what it must not touch."""

import dataclasses
import functools

import pytest

from experiments.detection_matrix import engine_config, make_requests
from kvmem import models
from kvmem.engine.engine import Engine
from kvmem.engine.request import PhaseFormat
from kvmem.evaluate import faults
from kvmem.models import params

MODEL = models.get_config("kimi_tiny_parity")
REQUESTS = make_requests(3, 4, MODEL.vocab_size, seed=5, new_tokens=9)


@functools.cache
def _weights():
    weights = params.init_params(MODEL, "f32", 0)
    return {"prefill": weights, "decode": weights}


def _engine(detector: str) -> Engine:
    """Plain weights compile fastest; the decode cache has values, scales and rope."""
    config = engine_config("kimi", 4, detector)
    forms = {"prefill": PhaseFormat("f32", "bf16_576"), "decode": PhaseFormat("f32", "fp8_656")}
    return Engine(MODEL, _weights(), dataclasses.replace(config, **forms))


@functools.cache
def _clean(detector: str) -> dict[str, tuple[int, ...]]:
    return faults.clean_tokens(_engine(detector), REQUESTS)


DETECTORS = [
    "tags_digest",
    pytest.param("tags", marks=pytest.mark.slow),
    pytest.param("off", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("fault", faults.CLASSES, ids=lambda fault: fault.name)
def test_trial_of_each_fault_class_is_seen_as_stated_and_hurts_nobody_else(fault, detector):
    outcome = faults.trial(_engine(detector), REQUESTS, fault, 7, _clean(detector))
    if fault.needs == "scale_Y":  # fp8_656 has a scale per token instead
        assert not outcome.injected
        return
    assert outcome.injected
    if fault.seen[detector] is not None:
        assert outcome.detected == fault.seen[detector]
    if detector != "off" and fault.seen[detector]:
        assert outcome.collateral == 0  # E6: the others are bit-identical
        assert not outcome.changed  # no token of the damaged step was published


@pytest.mark.parametrize("detector", ["tags_digest", "off"])
@pytest.mark.slow
def test_E14_clean_tokens_do_not_depend_on_the_detector(detector):
    assert _clean(detector) == _clean("tags")


def test_trial_with_the_same_seed_gives_the_same_outcome():
    fault = faults.BY_NAME["A1_freed_while_read"]
    outcomes = {
        faults.trial(_engine("tags_digest"), REQUESTS, fault, 3, _clean("tags_digest")) for _ in range(2)
    }
    assert len(outcomes) == 1


def test_classes_cover_every_level_and_state_what_tags_do_not_see():
    levels = {fault.level for fault in faults.CLASSES}
    assert levels == {"table", "generation", "free list", "transfer", "page bytes", "scale"}
    unseen = {fault.name for fault in faults.CLASSES if fault.seen["tags"] is False}
    assert {name for name in unseen if name.startswith("E10")} == {
        "E10_flipped_bit",
        "E10_tokens_permuted_in_page",
        "E10_scale_of_a_token",
    }
    assert all(fault.seen["tags_digest"] for fault in faults.CLASSES)
