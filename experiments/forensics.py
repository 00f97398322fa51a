"""What arithmetic alone says about the published numbers: ratios of throughput, and scores as whole counts.

Nothing here is measured. Every score is assumed to be of the full public set, one run, graded right or wrong.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from experiments import claims
from kvmem.evaluate import stats

# Items of the full public test sets.
ITEMS = {"gsm8k": 1319, "gsm8k_flexible": 1319, "mmlu": 14_042, "mmlu_pro": 12_032, "arc_challenge": 1172}
INTERNAL_ITEMS = 63
MODELS = {"kimi_k2.6": ("kimi", "kv_bf16", "kv_fp8"), "glm_5.2": ("glm", "w_fp8", "w_int4")}
DISCORDANT_SHARE = 0.05  # assumed share of answers that a change of format flips


class Scores(NamedTuple):
    """One suite scored in two formats, read as whole counts.

    Attributes:
      model, suite: which.
      total: items of the full set.
      percent: the published scores, reference format first.
      counts: for each score, the least and the most items right that round to it.
    """

    model: str
    suite: str
    total: int
    percent: tuple[float, float]
    counts: tuple[tuple[int, int], tuple[int, int]]

    @property
    def nearest(self) -> tuple[int, int]:
        """Items right in each format: the count whose share is nearest to the score."""
        reference, smaller = (round(p * self.total / 100) for p in self.percent)
        return reference, smaller


def whole_counts(percent: float, total: int, digits: int = 2) -> tuple[int, int]:
    """Returns the least and the most whole counts of ``total`` whose percentage rounds to ``percent``.

    The least exceeds the most if there is none: then the score is not of ``total`` items graded 0 or 1.
    """
    half = 0.5 * 10.0**-digits
    slack = 1e-9  # a count exactly on the rounding edge may go either way
    low = math.ceil((percent - half - slack) * total / 100)
    high = math.floor((percent + half + slack) * total / 100)
    return low, high


def scores() -> list[Scores]:
    """Returns every published pair of scores of a public suite."""
    found = []
    for model, (short, *arms) in MODELS.items():
        for suite, total in ITEMS.items():
            if suite == "gsm8k_flexible" and short == "kimi":
                continue  # one GSM8K score is given for Kimi, two for GLM
            row = claims.published(f"{short}.{suite}")
            reference, smaller = (row[arm] for arm in arms)
            counts = (whole_counts(reference, total), whole_counts(smaller, total))
            found.append(Scores(model, suite, total, (reference, smaller), counts))
    return found


def score_metrics() -> dict[str, float]:
    """Returns, by metric name, what the published scores imply under the assumption above.

    For each model and suite: ``items`` (change in answers right), ``z`` and ``p`` (unpaired), and where the
    change could be significant by McNemar's test ``flips_needed_pct``: it is, unless more answers changed.
    """
    found: dict[str, float] = {}
    for row in scores():
        name = f"forensics.{row.model}.{row.suite}"
        reference, smaller = row.nearest
        found[f"{name}.items"] = smaller - reference
        found[f"{name}.z"] = stats.unpaired_z(reference, row.total, smaller, row.total)
        found[f"{name}.p"] = stats.two_sided_p(found[f"{name}.z"])
        most = stats.most_discordant_significant(smaller - reference, row.total)
        if most is not None:
            found[f"{name}.flips_needed_pct"] = 100 * most / row.total
        difference = abs(smaller - reference) / row.total
        found[f"{name}.items_to_settle"] = stats.samples_needed(difference, DISCORDANT_SHARE)
    for suite, total in ITEMS.items():
        share = stats.minimum_detectable_difference(DISCORDANT_SHARE, total)
        found[f"forensics.{suite}.mdd_points"] = 100 * share
    differences = [abs(s.percent[1] - s.percent[0]) for s in scores() if s.model == "glm_5.2"]
    found["forensics.glm_5.2.largest_points"] = round(max(differences), 2)
    for model, (short, *arms) in MODELS.items():
        right = int(claims.published(f"{short}.internal")[arms[0]])
        low, high = stats.wilson(right, INTERNAL_ITEMS)
        found[f"forensics.{model}.internal.low_pct"] = 100 * low
        found[f"forensics.{model}.internal.high_pct"] = 100 * high
    return found


def rate_metrics() -> dict[str, float]:
    """Returns, by metric name, the ratios of the published throughputs and capacities."""
    bf16, fp8 = claims.published("kimi.decode.bf16"), claims.published("kimi.decode.fp8")
    w_fp8, w_int4 = claims.published("glm.decode.w_fp8"), claims.published("glm.decode.w_int4")
    prefill, capacity = claims.published("glm.prefill"), claims.published("kimi.capacity")
    kimi, glm = "published.kimi_k2.6", "published.glm_5.2"
    found = {f"{kimi}.fp8_over_bf16.{c}": fp8[c] / bf16[c] for c in fp8 if c in bf16}
    found |= {f"{glm}.int4_gain_pct.{c}": 100 * (w_int4[c] / w_fp8[c] - 1) for c in w_fp8}
    most = max(fp8, key=lambda c: int(c[1:]))
    found[f"{kimi}.fp8_gain_pct"] = 100 * (fp8[most] / max(bf16.values()) - 1)
    found[f"{kimi}.cost_pct"] = 100 * (max(bf16.values()) / fp8[most] - 1)
    found |= {f"{kimi}.peak_tokens.{kv}": tokens / int(most[1:]) for kv, tokens in capacity.items()}
    found[f"{glm}.prefill_int4_over_fp8"] = prefill["w_int4"] / prefill["w_fp8"]
    return found
