import pytest

from experiments import claims, forensics
from experiments.claims import Found


def _claim(id):
    return next(claim for claim in claims.load() if claim.id == id)


def test_load_gives_every_section_and_names_every_claim_once():
    found = claims.load()
    assert {claim.section[0] for claim in found} == set("12345")
    assert len({claim.id for claim in found}) == len(found) >= 80
    assert [c.id for c in found if c.within is None] == ["glm.gain.c1.stated", "glm.largest_difference"]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("| a | 1 | 0 | % | m | why | |\n| a | 2 | 0 | % | m | why | |", ":6: a claim has a new id"),
        ("| a | 1 | 0 | % | m | because | |", "a known reason"),
        ("| a | one | 0 | % | m | why | |", "published and within are numbers"),
        ("| a | 1 | 0 | % | m | why |", "a claim has"),
    ],
    ids=["twice", "reason", "number", "columns"],
)
def test_load_of_a_malformed_row_names_line_and_rule(tmp_path, row, rule):
    path = tmp_path / "claims.md"
    path.write_text(f"| open | reason |\n|---|---|\n| why | x |\n## 1\n{row}\n")
    with pytest.raises(ValueError, match=rule):
        claims.load(path)


@pytest.mark.parametrize(
    ("value", "how", "status"),
    [
        (554.27, "arithmetic", "matches"),
        (554.2749, "arithmetic", "matches"),
        (554.276, "arithmetic", "differs"),
        (554.27, "rank slice on one H200", "measured"),
    ],
)
def test_settle_of_a_number_compares_arithmetic_only(value, how, status):
    row = _claim("memory.kimi.checkpoint_gib").settle(Found(value, how))
    assert (row["ours"], row["how"], row["status"]) == (value, how, status)


def test_settle_of_a_number_that_the_account_contradicts_says_so():
    assert _claim("glm.gain.c1.stated").settle(Found(53.3, "arithmetic"))["status"] == "contradicted"


def test_settle_without_a_metric_is_null_with_a_reason_and_never_zero():
    rows = claims.settle(claims.load(), {})
    assert len(rows) == len(claims.load())
    assert all(row["ours"] is None and row["status"] == "open" and row["why"] for row in rows)


def test_published_of_an_unknown_prefix_is_refused():
    with pytest.raises(ValueError, match="no published claim begins so"):
        claims.published("kimi.decode.fp4")


def test_every_forensic_claim_matches_or_is_contradicted():
    metrics = forensics.score_metrics() | forensics.rate_metrics()
    found = {name: Found(value, "arithmetic") for name, value in metrics.items()}
    rows = [r for c, r in zip(claims.load(), claims.settle(claims.load(), found)) if c.metric in metrics]
    assert len(rows) >= 23
    assert {r["id"] for r in rows if r["status"] == "contradicted"} == {
        "glm.gain.c1.stated",
        "glm.largest_difference",
    }
    assert [r for r in rows if r["status"] not in ("matches", "contradicted")] == []


def test_scores_of_the_small_suites_are_all_whole_counts_and_unambiguous():
    small = [s for s in forensics.scores() if s.total < 2000]
    assert len(small) == 5
    assert all(low == high for s in small for low, high in s.counts)


def test_whole_counts_of_another_set_size_finds_none():
    # 94.24 % is 1,243 of 1,319; of 1,000 items only 94.2 or 94.3 % exist.
    assert forensics.whole_counts(94.24, 1319) == (1243, 1243)
    low, high = forensics.whole_counts(94.24, 1000)
    assert low > high


def test_score_metrics_find_no_published_difference_that_small_suites_settle():
    metrics = forensics.score_metrics()
    assert metrics["forensics.kimi_k2.6.gsm8k.items_to_settle"] > 100 * 1319
    assert "forensics.kimi_k2.6.gsm8k.flips_needed_pct" not in metrics
    assert metrics["forensics.glm_5.2.gsm8k.flips_needed_pct"] < 2.5
