"""The coverage statement of the docs is the one of the code, and names only what exists."""

import importlib.util
import pathlib
import re

import pytest

from experiments.page_model import BUGS
from kvmem.cache import integrity, store
from kvmem.evaluate import faults

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "integrity.md"


def test_coverage_table_in_the_docs_is_the_codes():
    found = re.search(r"<!-- coverage -->\n(.*?)\n<!-- /coverage -->", DOCS.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == integrity.coverage_table()


def test_coverage_names_every_format_and_only_evidence_that_exists():
    formats = {name for c in integrity.COVERAGE if c.area == "format" for name in c.name.split(", ")}
    assert formats == {*store.LAYOUTS, *store.INDEX_LAYOUTS}
    for line in integrity.COVERAGE:
        if line.shown_by.startswith("tests/"):
            assert (ROOT / line.shown_by).is_file()
        elif line.shown_by.startswith("experiments."):
            assert importlib.util.find_spec(line.shown_by) is not None
        else:
            assert "yes" not in (line.tags, line.digest)


def test_coverage_of_each_detector_says_more_than_the_one_before():
    counts = [
        sum(said != "no" for area in integrity.coverage(d).values() for said in area.values())
        for d in integrity.DETECTORS
    ]
    assert counts == sorted(counts)
    assert len(set(counts)) == 3
    with pytest.raises(ValueError, match="'tagz' is not one of"):
        integrity.coverage("tagz")


TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


def _exists(test: str) -> bool:
    """Whether a test of this name, or name[id], is in the sources: the id as written or as a fault class."""
    name, _, case = test.rstrip("]").partition("[")
    sources = [text for text in TESTS.values() if f"def {name}(" in text]
    known = {*faults.BY_NAME, *BUGS}
    return bool(sources) and (not case or case in known or any(f'"{case}"' in text for text in sources))


def test_docs_name_tests_that_exist():
    named = re.findall(r"`(test_\w+(?:\[\w+\])?)`", DOCS.read_text())
    assert [test for test in named if not _exists(test)] == []
    assert not _exists("test_docs_name_tests_that_exist[A1_typo]")


def _table(text: str) -> dict[str, list[str]]:
    """The cells of each case's row in the docs, by case."""
    found = re.search(r"<!-- cases -->\n(.*?)<!-- /cases -->", text, re.DOTALL)
    assert found is not None
    rows = [line.strip("| ").split(" | ") for line in found[1].splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def _uncovered(table: dict[str, list[str]]) -> list[str]:
    """Cases without a row, without a test that carries them in its name, or without what trips it."""
    wrong = [case for case in faults.CASES if case not in table]
    for case, (what, tests, tripped_by) in table.items():
        named = re.findall(r"`(test_\w+(?:\[\w+\])?)`", tests)
        carried = any(re.search(rf"[_\[]{case}_", test) and _exists(test) for test in named)
        if what != faults.CASES.get(case) or not carried or not tripped_by.strip():
            wrong.append(case)
    return wrong


def test_every_case_has_a_test_that_carries_it_and_something_that_trips_it():
    table = _table(DOCS.read_text())
    assert list(table) == list(faults.CASES)
    assert _uncovered(table) == []
    for case in ("A18", "E6"):  # the mutations: a case is forgotten, or its test loses the name
        assert _uncovered({k: v for k, v in table.items() if k != case}) == [case]
        renamed = [table[case][0], table[case][1].replace(f"_{case}_", "_"), table[case][2]]
        assert _uncovered(table | {case: renamed}) == [case]
