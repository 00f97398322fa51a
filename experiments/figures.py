"""The report's figures, as PNG bytes. Plain: one message each, units on the axes, no styling."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure

from experiments import forensics

GREY, BLUE, RED = "0.6", "tab:blue", "tab:red"


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    with matplotlib.rc_context({"savefig.dpi": 120}):
        figure.savefig(out, format="png", bbox_inches="tight", metadata={"Software": None})
    return out.getvalue()


def capacity(bars: Mapping[str, tuple[float, float]], budget_gib: float, gpu_gib: float) -> bytes:
    """Memory of one GPU: ``bars`` maps a label to GiB of weights and GiB of cache."""
    figure = Figure(figsize=(7, 0.6 + 0.5 * len(bars)))
    axes = figure.subplots()
    labels = list(bars)[::-1]
    weights = [bars[label][0] for label in labels]
    axes.barh(labels, weights, color=GREY, label="weights of a rank")
    axes.barh(labels, [bars[label][1] for label in labels], left=weights, color=BLUE, label="cache")
    axes.axvline(budget_gib, color=RED, linewidth=1, label=f"budget {budget_gib:g} GiB")
    axes.axvline(gpu_gib, color="black", linewidth=1, label=f"H200 {gpu_gib:.1f} GiB")
    axes.set_xlabel("GiB per GPU, tensor parallelism 8")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return _png(figure)


def scores() -> bytes:
    """Published score differences beside the smallest difference that one run of that size can resolve."""
    rows = forensics.scores()
    figure = Figure(figsize=(7, 0.6 + 0.35 * len(rows)))
    axes = figure.subplots()
    metrics = forensics.score_metrics()
    for at, row in enumerate(rows[::-1]):
        mdd = metrics[f"forensics.{row.suite}.mdd_points"]
        axes.barh(at, 2 * mdd, left=-mdd, color=GREY, height=0.7)
        axes.plot(row.percent[1] - row.percent[0], at, "o", color=BLUE)
    axes.set_xlim(-2, 2)
    axes.set_yticks(range(len(rows)), [f"{row.model} {row.suite}" for row in rows[::-1]])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(
        "smaller format minus reference, points (grey: not detectable, 80 % power, 5 % discordant)"
    )
    return _png(figure)


def by_concurrency(
    series: Mapping[str, Mapping[int, Sequence[float]]], ylabel: str, title: str, zero: bool = False
) -> bytes:
    """Median and spread over repeats by concurrent requests; ``series`` maps a label to samples by load."""
    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    for label, samples in series.items():
        loads = sorted(samples)
        ordered = [sorted(samples[c]) for c in loads]
        median = [row[len(row) // 2] for row in ordered]
        line = axes.plot(loads, median, "o-", label=label)[0]
        axes.fill_between(
            loads, [r[0] for r in ordered], [r[-1] for r in ordered], color=line.get_color(), alpha=0.2
        )
    if zero:
        axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(c) for c in loads])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel(ylabel)
    axes.set_title(title, fontsize="small")
    axes.legend(fontsize="small")
    return _png(figure)
