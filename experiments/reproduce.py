"""The main job: serves a small Kimi and a small GLM and reports every published claim beside ours.

    python -m experiments.reproduce --config=configs/reproduce.py:quick --workdir=DIR

What arithmetic can settle is computed here; what was measured elsewhere is read from committed records; the
rest stays open, with the reason. The tiny models prove that the path works and how its figures are made.
"""

from __future__ import annotations

import functools
from typing import Any

from ml_collections import ConfigDict

from experiments import aggregate, arithmetic, claims, demo, figures, forensics, launch, report, tables
from experiments.claims import Found
from kvmem import record
from kvmem.cache import integrity


def metrics() -> dict[str, float]:
    """Returns everything that follows from configs and published numbers alone, by metric name."""
    return arithmetic.metrics() | forensics.score_metrics() | forensics.rate_metrics()


def main(config: ConfigDict, run: record.Recorder) -> None:
    """Runs the job; see the module."""
    run.seeds["weights_and_requests"] = config.seed
    if config.models:
        run.notes["integrity_coverage"] = {name: integrity.coverage(name) for name in demo.DETECTORS}
    served: dict[str, Any] = {}
    weights: dict[str, str] = {}
    for model in config.models:
        served[model] = run.stage(model, functools.partial(_serve, model, config, run))
        weights[model] = served[model]["weights"]
        for name, value in served[model]["metrics"].items():
            run.metric(f"tiny.{model}.{name}", value)
    run.weights = weights or "none"
    computed = metrics()
    found = aggregate.measured() | {name: Found(value, "arithmetic") for name, value in computed.items()}
    for name, value in computed.items():
        run.metric(name, value)
    rows = claims.settle(claims.load(), found)
    for row in rows:
        run.claim(**row)
    memory = arithmetic.memory_map(computed)
    run.file("capacity.png", figures.capacity(memory, arithmetic.BUDGET_GIB, arithmetic.GPU_GIB))
    _report(rows, served, config, run)
    print(tables.plain(tables.HEADER, [tables.claim_cells(row) for row in rows]))
    for model, result in served.items():
        print(f"\n{model} ({report.TINY}): {result['summary']}")
    print(f"\n{tables.tally(rows)}. Report: {run.directory / 'report.md'}")


def _serve(model: str, config: ConfigDict, run: record.Recorder) -> dict[str, Any]:
    return demo.serve(model, config, run.directory, launch.progress)


def _report(
    rows: list[dict[str, Any]], served: dict[str, Any], config: ConfigDict, run: record.Recorder
) -> None:
    run.file("forensics.png", figures.scores())
    if served:
        rates = {f"{m}, check {d}": r for m, s in served.items() for d, r in demo.by_load(s["rates"]).items()}
        run.file("throughput.png", figures.by_concurrency(rates, "output tokens/s", report.TINY))
        costs = {model: demo.overhead_pct(result["rates"]) for model, result in served.items()}
        title = f"throughput with the check, {report.TINY}"
        run.file("overhead.png", figures.by_concurrency(costs, "change, %", title, zero=True))
    facts = {**run.git, "command": run.command, "weights": run.weights, "repeats": config.repeats}
    run.file("report.md", report.render(rows, claims.load(), served, facts))


if __name__ == "__main__":
    launch.run(main)
