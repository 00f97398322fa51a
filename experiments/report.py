"""Renders ``report.md`` of the main job: claims, forensics, capacity, and what the tiny models showed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import forensics, tables
from experiments.claims import Claim

TINY = "tiny model on CPU, shape check"
HEAD = """# Published beside rerun

Command `{command}`, commit `{sha}`{dirty}, weights {weights}.

{tally}. `matches` and `differs` are for what arithmetic settles; `measured` sets a number from other hardware
beside the published one and claims no more; `estimated` puts measured parts together with stated costs for
what was not run; `contradicted` is what the account's own numbers do not bear out.
"""
FORENSICS = """## The published scores, as counts

Nothing measured: one published run a format, each score read as a whole count of the full public set (an
assumption; every small-suite score is exactly one such count). `needs` is McNemar's test turned round: the
difference is significant at 5 % unless more than that share of the answers changed; a dash means that no
pattern of answers makes it significant. `detectable` is the smallest difference that one paired run finds
with 80 % power if 5 % of the answers change, `items to settle` how many items this very difference needs.

![differences and what is detectable](forensics.png)
"""
SHAPES = """## Shape checks ({label})

Neither figure says anything about an H200. They show that the sweep runs, how throughput moves with load, and
how the check's cost is computed: paired runs, detector off and on in alternating order, {repeats} pairs each.

![throughput](throughput.png)

![cost of the check](overhead.png)
"""
FAULT = """## One stale page mapping (tiny models on CPU)

In mid-decode one entry of a request's page table is pointed at a page of another request, as a lost free or a
late remap would leave it. Off: what that request would have answered, read out of somebody else's cache.
"""


def render(
    rows: Sequence[dict[str, Any]],
    claims: Sequence[Claim],
    served: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> str:
    """Returns the report.

    Args:
      rows: settled claims, in the order of ``claims``.
      claims: the published ones.
      served: model -> what serving it gave, as ``experiments.demo`` returns it.
      facts: ``command``, ``sha``, ``dirty``, ``weights`` and ``repeats`` of the run.
    """
    dirty = " with uncommitted changes" if facts["dirty"] else ""
    weights = facts["weights"]
    if not isinstance(weights, str):
        weights = ", ".join(f"{name} {value}" for name, value in weights.items())
    parts = [HEAD.format(**{**facts, "dirty": dirty, "weights": weights}, tally=tables.tally(rows))]
    for section, group in itertools.groupby(zip(claims, rows), key=lambda pair: pair[0].section):
        parts.append(f"## {section}\n\n{tables.settled([row for _, row in group])}\n")
    parts += [FORENSICS, forensic_table(), "\n![memory of one GPU](capacity.png)\n"]
    if served:
        parts += [FAULT]
        parts += [f"### {model}\n\n{fault_table(found['fault'])}\n" for model, found in served.items()]
        parts += [SHAPES.format(label=TINY, repeats=facts["repeats"])]
    return "\n".join(parts)


def forensic_table() -> str:
    """Returns the Markdown table of what each published pair of scores implies."""
    metrics = forensics.score_metrics()
    lines = []
    for row in forensics.scores():
        name = f"forensics.{row.model}.{row.suite}"
        needs = metrics.get(f"{name}.flips_needed_pct")
        lines.append(
            [
                row.model,
                row.suite,
                f"{row.total:,}",
                *(f"{p:.2f} = {low:,}" + (f"–{high:,}" if high > low else "") for p, (low, high) in
                  zip(row.percent, row.counts)),
                f"{metrics[f'{name}.items']:+.0f}",
                f"{metrics[f'{name}.z']:+.2f}",
                "–" if needs is None else f"≤ {needs:.1f} %",
                f"{metrics[f'forensics.{row.suite}.mdd_points']:.2f}",
                f"{metrics[f'{name}.items_to_settle']:,}",
            ]
        )  # fmt: skip
    header = ["model", "suite", "n", "reference", "smaller", "items", "z (unpaired)", "needs", "detectable"]
    return tables.markdown([*header, "items to settle"], lines)


def fault_table(fault: Mapping[str, Any]) -> str:
    """Returns the Markdown table of the fault run beside the clean one, and a sentence on the cause."""
    what = f"{fault['what'][0].upper()}{fault['what'][1:]}."
    if not fault["rows"]:
        return what
    header = ["request", "clean", "with the check", "tokens", "check off"]
    lines = [
        [row["request"], row["clean"], row["tags"], row["tags_tokens"], row["off_tokens"]]
        for row in fault["rows"]
    ]
    answers = [[run, " ".join(map(str, tokens))] for run, tokens in fault["victim"].items()]
    victim = tables.markdown(["run", "the victim's answer, token ids"], answers)
    return f"{what}\n\n{tables.markdown(header, lines)}\n\n{victim}"
