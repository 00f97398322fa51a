"""The matrix's bookkeeping: what is recorded, and that a detector that breaks its claim is named."""

import dataclasses

import pytest

from configs import detection_matrix as config_file
from experiments import detection_matrix
from kvmem import record
from kvmem.cache.integrity import DETECTORS
from kvmem.evaluate import faults
from kvmem.evaluate.faults import Outcome

TRIALS = 3


def _recorder(tmp_path):
    return record.recording(record.run_directory(tmp_path / "run"), command="test", config={})


def _found(changed: dict[tuple[str, str], Outcome] | None = None) -> dict:
    """Outcomes as the workers return them: all as claimed, but for ``changed`` (fault, detector)."""
    return {
        detector: {
            fault.name: [
                dataclasses.asdict(
                    (changed or {}).get((fault.name, detector))
                    or Outcome(True, bool(fault.seen[detector]), 1 if fault.seen[detector] else None)
                )
            ]
            * TRIALS
            for fault in faults.CLASSES
        }
        for detector in DETECTORS
    }


def _section(tmp_path, found) -> tuple[str, list[str], dict]:
    wrong: list[str] = []
    config = config_file.get_config("quick")
    with _recorder(tmp_path) as recorder:
        text = detection_matrix._section(config, recorder, list(faults.CLASSES), "m.p4", found, wrong)
    return text, wrong, record.read(recorder.path)["metrics"]


def test_section_of_outcomes_as_claimed_records_every_cell_and_names_nothing(tmp_path):
    text, wrong, metrics = _section(tmp_path, _found())
    assert wrong == []
    assert metrics["A1_freed_while_read.m.p4.tags.detected"] == TRIALS
    assert metrics["A1_freed_while_read.m.p4.off.missed"] == TRIALS
    assert metrics["E10_flipped_bit.m.p4.tags.missed"] == TRIALS
    assert metrics["E10_flipped_bit.m.p4.tags_digest.steps"] == 1
    assert "3/3 [44, 100] %, step 1.0" in text  # Wilson's interval of 3 of 3
    assert detection_matrix.figure(metrics).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("cell", "outcome"),
    [
        pytest.param(("A1_freed_while_read", "tags"), Outcome(True, False), id="missed_what_it_must_see"),
        pytest.param(("E10_flipped_bit", "tags"), Outcome(True, True, 1), id="saw_what_it_cannot_see"),
        pytest.param(
            ("A14_negative_page", "tags_digest"), Outcome(True, True, 1, False, 2), id="collateral_damage"
        ),
    ],
)
def test_section_of_an_outcome_that_is_not_as_claimed_names_the_cell(tmp_path, cell, outcome):
    _, wrong, _ = _section(tmp_path, _found({cell: outcome}))
    assert [line.split(":")[0] for line in wrong] == [f"{cell[0]}.m.p4.{cell[1]}"]


def test_section_of_a_fault_that_the_format_cannot_have_is_absent_not_zero(tmp_path):
    found = _found()
    for detector in DETECTORS:
        found[detector]["C2_scale_of_the_pool"] = []
    text, wrong, metrics = _section(tmp_path, found)
    assert wrong == []
    assert not any(name.startswith("C2_") for name in metrics)
    assert "does not exist here" in text


def test_body_with_an_unknown_fault_or_argument_says_which(tmp_path):
    config = config_file.get_config("quick")
    config.faults = ("A1_typo",)
    with pytest.raises(ValueError, match="'A1_typo'"), _recorder(tmp_path) as recorder:
        detection_matrix.body(config, recorder)
    with pytest.raises(ValueError, match="'fast' is not one of"):
        config_file.get_config("fast")
