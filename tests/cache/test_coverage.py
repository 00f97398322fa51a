"""The coverage statement of the docs is the one of the code, and names only what exists."""

import importlib.util
import pathlib
import re

import pytest

from kvmem.cache import integrity, store

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


def test_docs_name_tests_that_exist():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", DOCS.read_text()):
        assert f"def {name}(" in tests
