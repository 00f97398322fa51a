"""Statistics of paired evaluations: intervals, tests, equivalence, and what a sample size can resolve.

Two formats answer the same examples, so differences are taken per example, and examples of one document are
one cluster. Rates are shares in [0, 1], not per cent. Every function raises ValueError for input outside its
domain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats as scipy_stats

EXACT_BELOW = 25  # discordant pairs; from there on McNemar's statistic is chi-square to within its use


class Interval(NamedTuple):
    low: float
    high: float


class McNemar(NamedTuple):
    """Result of McNemar's test. ``p`` is two-sided; ``discordant`` counts the pairs that differ."""

    p: float
    discordant: int
    exact: bool


class Estimate(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


class Equivalence(NamedTuple):
    """Result of two one-sided tests. ``p`` is the larger of the two; the interval is 1 - 2 alpha wide."""

    p: float
    equivalent: bool
    mean: float
    low: float
    high: float


def _share(name: str, value: float) -> float:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} = {value}: must lie between 0 and 1")
    return value


def _counts(successes: int, total: int) -> None:
    if total <= 0 or not 0 <= successes <= total:
        raise ValueError(f"{successes} of {total}: successes lie between 0 and a positive total")


def _quantile(probability: float) -> float:
    return float(scipy_stats.norm.ppf(probability))


def wilson(successes: int, total: int, confidence: float = 0.95) -> Interval:
    """Returns Wilson's score interval of a rate (Wilson 1927); it never leaves [0, 1] and is never empty."""
    _counts(successes, total)
    test = scipy_stats.binomtest(successes, total)
    found = test.proportion_ci(_share("confidence", confidence), method="wilson")
    return Interval(float(found.low), float(found.high))


def rate_upper_bound(events: int, trials: int, confidence: float = 0.95) -> float:
    """Returns the one-sided exact upper bound of a rate (Clopper and Pearson 1934): about 3 / n for none."""
    _counts(events, trials)
    _share("confidence", confidence)
    if events == trials:
        return 1.0
    return float(scipy_stats.beta.ppf(confidence, events + 1, trials - events))


def unpaired_z(successes_a: int, total_a: int, successes_b: int, total_b: int) -> float:
    """Returns the pooled two-proportion z of rate b minus rate a: all that two bare scores allow."""
    _counts(successes_a, total_a)
    _counts(successes_b, total_b)
    pooled = (successes_a + successes_b) / (total_a + total_b)
    if pooled in (0.0, 1.0):
        raise ValueError(f"all {total_a + total_b} outcomes are the same: z has no scale")
    error = math.sqrt(pooled * (1 - pooled) * (1 / total_a + 1 / total_b))
    return (successes_b / total_b - successes_a / total_a) / error


def two_sided_p(z: float) -> float:
    """Returns the two-sided p value of a standard normal z."""
    return float(2 * scipy_stats.norm.sf(abs(z)))


def mcnemar(gained: int, lost: int) -> McNemar:
    """Tests whether as many answers became right as became wrong (McNemar 1947).

    Exact binomial below 25 discordant pairs, chi-square with continuity correction from there on.
    """
    if gained < 0 or lost < 0:
        raise ValueError(f"gained = {gained}, lost = {lost}: counts are not negative")
    discordant = gained + lost
    if discordant < EXACT_BELOW:
        p = scipy_stats.binomtest(gained, discordant).pvalue if discordant else 1.0
        return McNemar(float(p), discordant, True)
    statistic = max(abs(gained - lost) - 1, 0) ** 2 / discordant
    return McNemar(float(scipy_stats.chi2.sf(statistic, 1)), discordant, False)


def mcnemar_scores(right_a: Bool[np.ndarray, " examples"], right_b: Bool[np.ndarray, " examples"]) -> McNemar:
    """Returns McNemar's test of per-example scores; b gained where it is right and a is not."""
    return mcnemar(int(np.sum(right_b & ~right_a)), int(np.sum(right_a & ~right_b)))


def most_discordant_significant(net: int, total: int, alpha: float = 0.05) -> int | None:
    """Returns the most discordant pairs at which a net difference is still significant by McNemar's test.

    For two published scores that differ by ``net`` items of ``total``, whose pairs are not published: the
    difference is significant if and only if at most that many answers changed. None if it never is.
    """
    net = abs(net)
    _counts(net, total)
    _share("alpha", alpha)

    def significant(lost: int) -> bool:  # falls with the number of answers lost, each of them regained too
        return mcnemar(net + lost, lost).p < alpha

    if not net or not significant(0):
        return None
    low, high = 0, (total - net) // 2
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if significant(middle) else (low, middle - 1)
    return net + 2 * low


def minimum_detectable_difference(
    discordant_share: float, total: int, power: float = 0.8, alpha: float = 0.05
) -> float:
    """Returns the smallest true difference of two paired rates that is found with the given power.

    (z_alpha/2 + z_power) sqrt(discordant share / n), 2.8 sqrt(...) for the defaults: the normal approximation
    of McNemar's test under a small difference (Connor 1987).
    """
    _share("discordant_share", discordant_share)
    _counts(0, total)
    scale = _quantile(1 - _share("alpha", alpha) / 2) + _quantile(_share("power", power))
    return scale * math.sqrt(discordant_share / total)


def samples_needed(
    difference: float, discordant_share: float, power: float = 0.8, alpha: float = 0.05
) -> int:
    """Returns how many paired examples settle a difference: the inverse of the function above."""
    _share("difference", abs(difference))
    return math.ceil((minimum_detectable_difference(discordant_share, 1, power, alpha) / difference) ** 2)


def _cluster_sums(
    differences: Float[np.ndarray, " examples"], clusters: Int[np.ndarray, " examples"] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum and the size of each cluster; without clusters each example is its own."""
    if len(differences) < 2 or not np.all(np.isfinite(differences)):
        raise ValueError(f"{len(differences)} differences: two or more, all finite, are needed")
    if clusters is None:
        return differences, np.ones(len(differences))
    _, label = np.unique(clusters, return_inverse=True)
    if label.max() == 0:
        raise ValueError("all examples are of one cluster: its mean has no error")
    return np.bincount(label, weights=differences), np.bincount(label).astype(np.float64)


def paired_bootstrap(
    differences: Float[np.ndarray, " examples"],
    clusters: Int[np.ndarray, " examples"] | None = None,
    *,
    seed: int,
    replicates: int = 10_000,
    confidence: float = 0.95,
) -> Estimate:
    """Returns the mean per-example difference and its percentile interval, resampling whole clusters."""
    _share("confidence", confidence)
    sums, sizes = _cluster_sums(differences, clusters)
    draw = np.random.default_rng(seed)
    count = len(sums)
    means = np.empty(replicates)
    for at in range(replicates):  # one row at a time: a matrix of all would be gigabytes
        index = draw.integers(count, size=count)
        means[at] = sums[index].sum() / sizes[index].sum()
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(sums.sum() / sizes.sum()), float(low), float(high))


def tost(
    differences: Float[np.ndarray, " examples"],
    margin: float,
    clusters: Int[np.ndarray, " examples"] | None = None,
    *,
    alpha: float = 0.05,
) -> Equivalence:
    """Tests whether the mean difference lies within +-margin: two one-sided t tests (Schuirmann 1987).

    The standard error is clustered. Differences that are all equal have none: they are equivalent if inside.
    """
    if not margin > 0:
        raise ValueError(f"margin = {margin}: an equivalence margin is positive")
    _share("alpha", alpha)
    sums, sizes = _cluster_sums(differences, clusters)
    count = len(sums)
    mean = sums.sum() / sizes.sum()
    residuals = sums - mean * sizes
    error = math.sqrt(count / (count - 1) * float(np.sum(residuals**2))) / sizes.sum()
    if error == 0.0:
        inside = abs(mean) < margin
        return Equivalence(float(not inside), bool(inside), float(mean), float(mean), float(mean))
    p = max(scipy_stats.t.sf((mean + side * margin) * side / error, count - 1) for side in (1, -1))
    half = scipy_stats.t.ppf(1 - alpha, count - 1) * error
    return Equivalence(float(p), bool(p < alpha), float(mean), float(mean - half), float(mean + half))


def holm(p_values: Float[np.ndarray, " tests"]) -> Float[np.ndarray, " tests"]:
    """Returns Holm's adjusted p values (Holm 1979), in the order given: they bound the family's error."""
    if p_values.size == 0 or not np.all((p_values >= 0) & (p_values <= 1)):
        raise ValueError(f"p values {p_values}: one or more, each between 0 and 1")
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(p_values[order] * factors), 1.0)
    return adjusted
