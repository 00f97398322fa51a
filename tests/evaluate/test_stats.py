"""Known values come from the literature, from closed forms, or from simulation with a stated error."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from kvmem.evaluate import stats


def test_wilson_of_a_textbook_case_matches_its_closed_form():
    z = 1.959963984540054
    p, n = 81 / 263, 263  # Newcombe 1998, table I: 0.2553 to 0.3662
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = stats.wilson(81, 263)
    assert (low, high) == pytest.approx(
        ((centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n))
    )
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_wilson_without_any_success_is_no_empty_interval():
    low, high = stats.wilson(0, 29)  # Newcombe 1998, table I: 0 to 0.1170
    assert low == pytest.approx(0.0, abs=1e-12)
    assert round(high, 4) == 0.1170


def test_rate_upper_bound_without_events_is_the_rule_of_three():
    assert stats.rate_upper_bound(0, 3_000_000_000) == pytest.approx(-math.log(0.05) / 3e9)
    # With events: the bound is where that few or fewer have 5 % probability.
    bound = stats.rate_upper_bound(2, 50)
    assert sum(math.comb(50, k) * bound**k * (1 - bound) ** (50 - k) for k in range(3)) == pytest.approx(0.05)
    assert stats.rate_upper_bound(7, 7) == 1.0


def test_unpaired_z_of_the_published_mmlu_pro_scores_is_minus_1_9():
    z = stats.unpaired_z(9661, 12_032, 9540, 12_032)
    assert z == pytest.approx(-1.94, abs=0.01)
    assert stats.two_sided_p(z) == pytest.approx(0.052, abs=0.001)


def test_unpaired_z_squared_is_the_chi_square_of_the_table():
    table = [[31, 7], [43, 23]]
    z = stats.unpaired_z(31, 38, 43, 66)
    assert z < 0
    assert z**2 == pytest.approx(scipy_stats.chi2_contingency(table, correction=False).statistic)


@pytest.mark.parametrize(("gained", "lost"), [(0, 6), (3, 11), (12, 12)])
def test_mcnemar_of_few_pairs_is_the_binomial_tail(gained, lost):
    n = gained + lost
    tail = 2 * sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    assert stats.mcnemar(gained, lost) == (pytest.approx(min(tail, 1.0)), n, True)


def test_mcnemar_of_many_pairs_is_the_corrected_chi_square():
    p, discordant, exact = stats.mcnemar(59, 86)  # (27 - 1)^2 / 145 = 4.66: p 0.0308
    assert (round(p, 4), discordant, exact) == (0.0308, 145, False)


def test_mcnemar_at_the_seam_changes_little():
    # Both forms at 25 pairs: the correction was made for this, 0.043 against 0.046.
    exact = scipy_stats.binomtest(7, 25).pvalue
    assert stats.mcnemar(7, 18).p == pytest.approx(exact, rel=0.1)


def test_mcnemar_scores_counts_the_pairs_that_differ():
    right_a = np.array([1, 1, 1, 0, 0, 1, 0], bool)
    right_b = np.array([1, 0, 0, 1, 0, 0, 0], bool)
    assert stats.mcnemar_scores(right_a, right_b) == stats.mcnemar(gained=1, lost=3)


@pytest.mark.parametrize(("net", "total"), [(11, 1319), (120, 12_032), (6, 47)])
def test_most_discordant_significant_is_the_last_significant_count(net, total):
    most = stats.most_discordant_significant(net, total)
    lost = (most - net) // 2
    assert stats.mcnemar(net + lost, lost).p < 0.05
    assert stats.mcnemar(net + lost + 1, lost + 1).p >= 0.05


def test_most_discordant_significant_of_mmlu_pro_is_about_a_third():
    assert stats.most_discordant_significant(-120, 12_032) / 12_032 == pytest.approx(0.307, abs=0.001)


@pytest.mark.parametrize("net", [0, 2, 5])
def test_most_discordant_significant_of_few_items_is_none(net):
    assert stats.most_discordant_significant(net, 1319) is None


@pytest.mark.parametrize(("total", "points"), [(1319, 1.7), (12_032, 0.57)])
def test_minimum_detectable_difference_matches_the_rule_of_2_8(total, points):
    found = 100 * stats.minimum_detectable_difference(0.05, total)
    assert found == pytest.approx(280 * math.sqrt(0.05 / total), rel=1e-3)
    assert found == pytest.approx(points, rel=0.02)


def test_samples_needed_inverts_the_detectable_difference():
    n = stats.samples_needed(0.01, 0.07)
    assert stats.minimum_detectable_difference(0.07, n) <= 0.01
    assert stats.minimum_detectable_difference(0.07, n - 1) > 0.01


def test_minimum_detectable_difference_is_found_with_its_power():
    n, share, draw = 2000, 0.1, np.random.default_rng(3)
    difference = stats.minimum_detectable_difference(share, n)
    chances = [(share + difference) / 2, (share - difference) / 2, 1 - share]
    found = [
        stats.mcnemar(int(g), int(lost)).p < 0.05 for g, lost, _ in draw.multinomial(n, chances, size=600)
    ]
    # 0.80 less the continuity correction's loss; four standard errors of 600 trials are 0.065.
    assert np.mean(found) == pytest.approx(0.79, abs=0.065)


def test_paired_bootstrap_without_clusters_agrees_with_the_normal_interval():
    differences = np.random.default_rng(5).normal(0.3, 2.0, size=900)
    mean, low, high = stats.paired_bootstrap(differences, seed=7, replicates=4000)
    half = 1.96 * differences.std() / math.sqrt(900)
    assert mean == pytest.approx(differences.mean())
    # A quantile of 4,000 replicates has a standard error of about 3 % of the half-width.
    assert (low, high) == (pytest.approx(mean - half, abs=half / 8), pytest.approx(mean + half, abs=half / 8))


def test_paired_bootstrap_of_copied_examples_is_wider_with_clusters():
    base = np.random.default_rng(5).normal(size=60)
    copied, clusters = np.repeat(base, 9), np.repeat(np.arange(60), 9)
    alone = stats.paired_bootstrap(base, seed=7, replicates=2000)
    naive = stats.paired_bootstrap(copied, seed=7, replicates=2000)
    clustered = stats.paired_bootstrap(copied, clusters, seed=7, replicates=2000)
    assert clustered == pytest.approx(alone)  # nine copies hold no more than one
    assert naive.high - naive.low < 0.5 * (alone.high - alone.low)


def test_tost_without_clusters_is_two_t_tests():
    differences = np.random.default_rng(11).normal(0.02, 0.3, size=200)
    found = stats.tost(differences, 0.1)
    low = scipy_stats.ttest_1samp(differences, -0.1, alternative="greater").pvalue
    high = scipy_stats.ttest_1samp(differences, 0.1, alternative="less").pvalue
    assert found.p == pytest.approx(max(low, high))
    assert found.equivalent == (found.low > -0.1 and found.high < 0.1)


def test_tost_holds_its_level_at_the_margin_and_finds_equivalence_inside():
    draw = np.random.default_rng(13)
    at_margin = [stats.tost(draw.normal(0.2, 1.0, size=150), 0.2).equivalent for _ in range(400)]
    inside = [stats.tost(draw.normal(0.0, 0.1, size=150), 0.2).equivalent for _ in range(20)]
    assert np.mean(at_margin) < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 400)
    assert all(inside)


def test_tost_of_copied_examples_needs_their_clusters():
    base = np.random.default_rng(17).normal(0.0, 1.0, size=40)
    copied, clusters = np.repeat(base, 25), np.repeat(np.arange(40), 25)
    assert stats.tost(copied, 0.2, clusters).p == pytest.approx(stats.tost(base, 0.2).p)
    assert stats.tost(copied, 0.2).p < stats.tost(base, 0.2).p


@pytest.mark.parametrize(("value", "equivalent"), [(0.1, True), (0.3, False)])
def test_tost_of_equal_differences_compares_them_with_the_margin(value, equivalent):
    assert stats.tost(np.full(7, value), 0.2).equivalent is equivalent


def test_holm_of_a_textbook_case_is_stepwise_and_monotone():
    adjusted = stats.holm(np.array([0.01, 0.04, 0.03, 0.005]))
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm(np.array([0.9, 0.8])) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: stats.wilson(5, 4), "5 of 4"),
        (lambda: stats.wilson(1, 4, confidence=95.0), "confidence = 95"),
        (lambda: stats.unpaired_z(4, 4, 7, 7), "no scale"),
        (lambda: stats.mcnemar(-1, 4), "gained = -1"),
        (lambda: stats.minimum_detectable_difference(0.0, 9), "discordant_share"),
        (lambda: stats.samples_needed(0.0, 0.1), "difference = 0.0"),
        (lambda: stats.paired_bootstrap(np.array([1.0]), seed=1), "1 differences"),
        (lambda: stats.paired_bootstrap(np.array([1.0, np.nan]), seed=1), "finite"),
        (lambda: stats.tost(np.array([1.0, 2.0]), -0.1), "margin = -0.1"),
        (lambda: stats.tost(np.array([1.0, 2.0]), 0.1, np.array([3, 3])), "one cluster"),
        (lambda: stats.holm(np.array([0.2, 1.2])), "p values"),
    ],
)
def test_functions_given_values_outside_their_domain_raise(call, rule):
    with pytest.raises(ValueError, match=rule):
        call()
