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
import statistics
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
    wrong: list[str] = []
    tables = [
        _cell(config, recorder, chosen, name, page, wrong)
        for name in config.models
        for page in config.page_sizes
    ]
    if config.clean_operations:
        tables.append(_clean(config, recorder))
    text = "\n\n".join(tables) + "\n"
    recorder.file("detection_matrix.md", text)
    print(text)
    if wrong:
        raise RuntimeError(f"detectors did not do what is claimed of them: {wrong}")


def _cell(
    config: ConfigDict, recorder: Recorder, chosen: list[FaultClass], name: str, page: int, wrong: list[str]
) -> str:
    """All faults and detectors with one model and page size."""
    model = models.get_config(name)
    formats = default_formats(model.family)
    weights: dict[str, Any] = {
        phase: params.init_params(model, form.weights, config.weights_seed) for phase, form in formats.items()
    }
    requests = make_requests(config.requests, page, model.vocab_size, config.seed + 1, config.new_tokens)
    lines = [
        f"### {name}, pages of {page} tokens, {config.trials} trials a cell",
        "",
        "| fault | level | " + " | ".join(DETECTORS) + " |",
        "|---|---|" + "---|" * len(DETECTORS),
    ]
    cells: dict[tuple[str, str], str] = {}
    for detector in DETECTORS:
        shape = engine_config(model.family, page, detector)
        clean = faults.clean_tokens(Engine(model, weights, shape), requests)
        for number, fault in enumerate(launch.progress(chosen, f"{name} p{page} {detector}")):
            seeds = [config.seed + 1000 * number + t for t in range(config.trials)]
            outcomes = [
                faults.trial(Engine(model, weights, shape), requests, fault, seed, clean) for seed in seeds
            ]
            outcomes = [outcome for outcome in outcomes if outcome.injected]
            key = f"{fault.name}.{name}.p{page}.{detector}"
            cells[fault.name, detector] = _record(recorder, key, outcomes, fault)
            seen = sum(outcome.detected for outcome in outcomes)
            claimed = fault.seen[detector]
            if outcomes and claimed is not None and seen != claimed * len(outcomes):
                wrong.append(f"{key}: {seen} of {len(outcomes)} detected")
            if detector != "off" and claimed and any(o.collateral for o in outcomes):
                wrong.append(f"{key}: collateral damage")
    lines += [
        f"| {fault.name} | {fault.level} | " + " | ".join(cells[fault.name, d] for d in DETECTORS) + " |"
        for fault in chosen
    ]
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
    lines += [
        "",
        "A stale tag differs in an exact 32-bit counter and cannot collide before the page is retired; a "
        "random value in place of the generation would pass with odds 2^-32, of the whole tag with 2^-64; "
        "random damage to bytes passes the digest with odds 2^-64.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    launch.run(body)
