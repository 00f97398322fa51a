"""Fault class x detector x model x page size: what is detected, what is missed, who else is hurt.

    python -m experiments.detection_matrix --config=configs/detection_matrix.py[:quick] --workdir=DIR

This is the fault-injection kit for outsiders: every class of ``kvmem.evaluate.faults`` is planted in a
running engine, ``trials`` times with different seeds. A trial serves the same requests as a clean run and
compares every token. ``<fault>.<model>.p<page>.<detector>.<detected|missed|collateral>`` count trials
(collateral: other requests that were stopped or changed, expected with the detector off). ``.steps`` is the
mean number of engine steps from injection to incident, ``.wrong`` counts trials in which a request that was
hit published a changed token. Then the same detectors watch clean runs:
``clean.<detector>.<operations|page_checks|false_positives>``. All models are tiny and run on a CPU; weights
are random.
"""

import dataclasses
import io
import multiprocessing
import statistics
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments import clean_pages, launch
from kvmem import models
from kvmem.cache import integrity
from kvmem.cache.integrity import DETECTORS
from kvmem.engine.engine import Engine
from kvmem.engine.request import EngineConfig, Request, SamplingParams, default_formats
from kvmem.evaluate import faults, stats
from kvmem.evaluate.faults import FaultClass, Outcome
from kvmem.models import params
from kvmem.record import Recorder

PROMPT_PAGES = 3  # a prompt fills three pages and begins a fourth, so that prefill takes several chunks


def engine_config(family: str, page_size: int, detector: str) -> EngineConfig:
    """The engine of a cell: published formats of the family, room for every request of a trial."""
    formats = default_formats(family)
    return EngineConfig(
        max_rows=4,
        prefill_pages=4 * (PROMPT_PAGES + 1) + 6,
        decode_pages=4 * (PROMPT_PAGES + 4) + 3,
        max_pages_per_row=PROMPT_PAGES + 5,
        prefill=formats["prefill"],
        decode=formats["decode"],
        page_size=page_size,
        prefill_rows=2,
        prefill_chunk=page_size,
        integrity=detector,
        prefix_cache=False,
    )


def make_requests(count: int, page_size: int, vocab_size: int, seed: int, new_tokens: int) -> list[Request]:
    """Requests of different lengths and contents, just over three pages each."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            f"r{i}",
            tuple(rng.integers(1, vocab_size - 10, PROMPT_PAGES * page_size + 1 + i % page_size).tolist()),
            new_tokens,
            SamplingParams(ignore_eos=True),
        )
        for i in range(count)
    ]


def body(config: ConfigDict, recorder: Recorder) -> None:
    recorder.seeds |= {"faults": config.seed, "requests": config.seed + 1, "clean": config.seed + 2}
    recorder.notes["integrity_coverage"] = integrity.coverage()
    recorder.weights = dict.fromkeys(config.models, f"synthetic:{config.weights_seed}")
    unknown = sorted(set(config.faults) - set(faults.BY_NAME))
    if unknown:
        raise ValueError(f"faults {unknown} are not among {sorted(faults.BY_NAME)}")
    chosen = [fault for fault in faults.CLASSES if not config.faults or fault.name in config.faults]
    sections = [(name, page) for name in config.models for page in config.page_sizes]
    wrong: list[str] = []
    tables = []
    settings = config.to_dict()
    with futures.ProcessPoolExecutor(config.processes, multiprocessing.get_context("spawn")) as workers:
        cells = {
            (name, page, detector): workers.submit(run_cell, settings, name, page, detector)
            for name, page in sections
            for detector in DETECTORS
        }
        for name, page in sections:
            outcomes = {
                d: recorder.stage(f"{name}.p{page}.{d}", cells[name, page, d].result)
                for d in launch.progress(DETECTORS, f"{name} p{page}")
            }
            tables.append(_section(config, recorder, chosen, f"{name}.p{page}", outcomes, wrong))
    if config.clean_operations:
        tables.append(_clean(config, recorder))
    text = "\n\n".join(tables) + "\n"
    recorder.file("detection_matrix.md", text)
    if sections:
        recorder.file("detection_matrix.png", figure(recorder.metrics))
    print(text)
    if wrong:
        raise RuntimeError(f"detectors did not do what is claimed of them: {wrong}")


def run_cell(settings: dict[str, Any], name: str, page: int, detector: str) -> dict[str, list[dict]]:
    """Plants every chosen fault in an engine with one model, page size and detector; outcomes by fault."""
    model = models.get_config(name)
    weights: dict[str, Any] = {
        phase: params.init_params(model, form.weights, settings["weights_seed"])
        for phase, form in default_formats(model.family).items()
    }
    count, tokens = settings["requests"], settings["new_tokens"]
    requests = make_requests(count, page, model.vocab_size, settings["seed"] + 1, tokens)
    shape = engine_config(model.family, page, detector)
    clean = faults.clean_tokens(Engine(model, weights, shape), requests)
    found: dict[str, list[dict]] = {}
    for number, fault in enumerate(faults.CLASSES):
        if settings["faults"] and fault.name not in settings["faults"]:
            continue
        seeds = [settings["seed"] + 1000 * number + turn for turn in range(settings["trials"])]
        outcomes = [faults.trial(Engine(model, weights, shape), requests, fault, s, clean) for s in seeds]
        found[fault.name] = [dataclasses.asdict(outcome) for outcome in outcomes if outcome.injected]
    return found


def _section(
    config: ConfigDict,
    recorder: Recorder,
    chosen: list[FaultClass],
    where: str,
    found: dict[str, dict[str, list[dict]]],
    wrong: list[str],
) -> str:
    """Records all faults and detectors with one model and page size, and holds them to what is claimed."""
    lines = [
        f"### {where}, {config.trials} trials a cell",
        "",
        "| fault | level | " + " | ".join(DETECTORS) + " |",
        "|---|---|" + "---|" * len(DETECTORS),
    ]
    for fault in chosen:
        cells = []
        for detector in DETECTORS:
            key = f"{fault.name}.{where}.{detector}"
            outcomes = [Outcome(**outcome) for outcome in found[detector][fault.name]]
            cells.append(_record(recorder, key, outcomes, fault))
            seen, claimed = sum(outcome.detected for outcome in outcomes), fault.seen[detector]
            if outcomes and claimed is not None and seen != claimed * len(outcomes):
                wrong.append(f"{key}: {seen} of {len(outcomes)} detected")
            if detector != "off" and claimed and any(outcome.collateral for outcome in outcomes):
                wrong.append(f"{key}: collateral damage")
        lines.append(f"| {fault.name} | {fault.level} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _record(recorder: Recorder, key: str, outcomes: list[Outcome], fault: FaultClass) -> str:
    """Records a cell and returns its text: detected of trials with its interval, and what was missed."""
    if not outcomes:
        recorder.absent(f"{key}.detected", f"the cache format has no {fault.needs}")
        return "does not exist here"
    total, seen = len(outcomes), sum(outcome.detected for outcome in outcomes)
    interval = stats.wilson(seen, total)
    collateral = sum(outcome.collateral for outcome in outcomes)
    changed = sum(outcome.changed for outcome in outcomes)
    numbers: dict[str, Any] = {
        "detected": seen,
        "missed": total - seen,
        "collateral": collateral,
        "wrong": changed,
        "detected_low": interval.low,
        "detected_high": interval.high,
    }
    steps = [outcome.steps for outcome in outcomes if outcome.steps is not None]
    if steps:
        numbers["steps"] = statistics.mean(steps)
    for what, number in numbers.items():
        recorder.metric(f"{key}.{what}", number)
    text = f"{seen}/{total} [{100 * interval.low:.0f}, {100 * interval.high:.0f}] %"
    text += f", step {statistics.mean(steps):.1f}" if steps else ""
    text += f", {changed} wrong" if changed else ""
    return text + (f", {collateral} others hurt" if collateral else "")


def figure(metrics: Mapping[str, float | int]) -> bytes:
    """Draws the share of trials in which each fault was detected, over all models and page sizes, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts: dict[tuple[str, str], list[float]] = {}
    for name, value in metrics.items():
        fault, *_, detector, what = name.split(".")
        if fault in faults.BY_NAME and what in ("detected", "missed"):
            counts.setdefault((fault, detector), [0, 0])[what == "missed"] += value
    names = [fault.name for fault in faults.CLASSES if (fault.name, "tags") in counts]
    share = [[counts[name, d][0] / sum(counts[name, d]) for d in DETECTORS] for name in names]
    drawing = Figure(figsize=(6, 0.26 * len(names) + 1), layout="constrained")
    axes = drawing.add_subplot()
    axes.imshow(share, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(DETECTORS)), DETECTORS)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for row, name in enumerate(names):
        for column, detector in enumerate(DETECTORS):
            seen, missed = counts[name, detector]
            text = f"{seen:.0f}/{seen + missed:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.set_title("trials in which the fault was detected (tiny models, CPU)", fontsize=9)
    buffer = io.BytesIO()
    FigureCanvasAgg(drawing).print_png(buffer)
    return buffer.getvalue()


def _clean(config: ConfigDict, recorder: Recorder) -> str:
    """Clean runs: nothing is planted, so every stopped row is a false positive."""
    lines = [
        "### Clean runs",
        "",
        "| detector | operations | page checks | false positives | 95 % bound per check |",
    ]
    lines.append("|---|---|---|---|---|")
    for detector in DETECTORS:
        run = clean_pages.operations(detector, config.clean_operations, config.seed + 2)
        if detector == "tags":
            full = clean_pages.full_pool(
                config.full_pool_checks,
                config.full_pool_pages,
                progress=lambda turns: launch.progress(turns, "full pool"),
            )
            run = dataclasses.replace(
                run,
                operations=run.operations + full.operations,
                page_checks=run.page_checks + full.page_checks,
                false_positives=run.false_positives + full.false_positives,
            )
        for field in ("operations", "page_checks", "false_positives"):
            recorder.metric(f"clean.{detector}.{field}", getattr(run, field))
        bound = "none made"
        if run.page_checks:
            upper = stats.rate_upper_bound(run.false_positives, run.page_checks)
            recorder.metric(f"clean.{detector}.false_positive_rate_upper", upper)
            bound = f"{upper:.2e}"
        lines.append(
            f"| {detector} | {run.operations:,} | {run.page_checks:,} | {run.false_positives} | {bound} |"
        )
    for detector in ("off", "tags"):
        cost = clean_pages.check_cost(detector, config.full_pool_pages)
        recorder.metric(f"cost.{detector}.device_operations", cost.device_operations)
        recorder.metric(f"cost.{detector}.check_us", cost.microseconds)
        lines += [
            "",
            f"Detector {detector}: {cost.device_operations} device operations, {cost.microseconds:.0f} us on "
            f"this CPU for one check of {config.full_pool_pages - 1:,} pages.",
        ]
    plain = clean_pages.step_operations("off")
    for detector in DETECTORS[1:]:
        added = clean_pages.step_operations(detector) - plain
        recorder.metric(f"cost.{detector}.added_step_operations", added)
        lines.append(f"A decode step of {plain} device operations gets {added} more with {detector}.")
    lines += [
        "",
        "A stale tag differs in an exact 32-bit counter and cannot collide before the page is retired; a "
        "random value in place of the generation would pass with odds 2^-32, of the whole tag with 2^-64; "
        "random damage to bytes passes the digest with odds 2^-64.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    launch.run(body)
