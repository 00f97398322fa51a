"""Serves one tiny model through the engine: checkpoint on disk -> two phases -> answers, rates, one fault.

Everything here runs on a small random model on CPU. Its times are shape checks and never stand beside a
published number; its tokens are exact, and the fault table is about tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from ml_collections import ConfigDict

from experiments import request_file
from kvmem import models
from kvmem.cache.pages import PADDING_PAGE
from kvmem.checkpoint import fixture, hf
from kvmem.engine import request as requests
from kvmem.engine import workload
from kvmem.engine.engine import Engine
from kvmem.engine.request import EngineConfig, Request, RequestResult
from kvmem.engine.scheduler import Scheduler
from kvmem.engine.step import PoolState
from kvmem.models.config import CheckpointFormat, ModelConfig
from kvmem.models.params import Weights
from kvmem.models.text import tokenizer

PUBLISHED_FORMAT: dict[str, CheckpointFormat] = {"kimi": "kimi_int4", "glm": "glm_fp8"}
DETECTORS = ("off", "tags")
SHRINK = 16  # of the trace's lengths: prompts of about a thousand tokens become about sixty


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model as its two phases hold it, and what the loader said."""

    path: pathlib.Path
    config: ModelConfig
    phases: Mapping[str, Any]
    formats: Mapping[str, requests.PhaseFormat]
    weights: str
    lines: Sequence[str]


def load(model: str, settings: ConfigDict, directory: pathlib.Path) -> Loaded:
    """Loads a checkpoint in the weight format of each phase; writes a random one first if none is named."""
    config = models.get_config(model)
    named = settings.checkpoints[config.family]
    path = pathlib.Path(named) if named else directory / "checkpoints" / model
    if not named and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fixture.write(path, config, settings.seed, PUBLISHED_FORMAT[config.family])
    formats = requests.default_formats(config.family)
    held: dict[str, Any] = {}
    lines: list[str] = []
    for form in formats.values():
        if form.weights not in held:  # Kimi's phases share one copy
            config, held[form.weights], report = hf.load(path, cast(Weights, form.weights))
            lines += [f"{form.weights}: {line}" for line in report.lines()]
    weights = f"sha256:{_digest(path)}" if named else f"synthetic:{settings.seed}"
    phases = {phase: held[form.weights] for phase, form in formats.items()}
    return Loaded(path, config, phases, formats, weights, lines)


def _digest(path: pathlib.Path) -> str:
    """Names a checkpoint by its config, index and shard sizes; hashing terabytes would outlast the run."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*")):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        if file.suffix == ".json":
            digest.update(file.read_bytes())
    return digest.hexdigest()


def draw(loaded: Loaded, settings: ConfigDict) -> list[Request]:
    """Returns the requests of ``settings.requests``, or as many of the generator as ``settings.count``."""
    vocab = loaded.config.vocab_size
    if settings.requests:
        encode = tokenizer.load(loaded.path, loaded.config).encode
        return request_file.read(settings.requests, encode, vocab, settings.max_new_tokens)
    if settings.preset not in workload.PRESETS:
        raise ValueError(f"preset {settings.preset!r}: one of {sorted(workload.PRESETS)}")
    rows = workload.generate(workload.PRESETS[settings.preset], settings.count, settings.seed)
    return workload.to_requests(
        rows,
        vocab_size=vocab,
        max_prompt=settings.max_prompt,
        max_new_tokens=settings.max_new_tokens,
        shrink=SHRINK,
    )


def engine_config(
    loaded: Loaded, settings: ConfigDict, drawn: Sequence[Request], detector: str
) -> EngineConfig:
    """Returns the engine's sizes for these requests. One that cannot be served raises ValueError naming it.

    Nothing is shared between requests, so that runs repeat.
    """
    longest = max(len(request.prompt_tokens) + request.max_new_tokens for request in drawn)
    columns = -(-longest // max(settings.page_size, 1))
    config = EngineConfig(
        max_rows=settings.rows,
        prefill_pages=settings.pages,
        decode_pages=settings.pages,
        max_pages_per_row=min(columns, settings.pages),
        prefill=loaded.formats["prefill"],
        decode=loaded.formats["decode"],
        page_size=settings.page_size,
        prefill_chunk=4 * settings.page_size,
        integrity=detector,
        prefix_cache=False,
        implementation=settings.implementation,
    )
    gate = Scheduler(config, loaded.config.max_context, lambda sequence: None)
    for request in drawn:  # refused here rather than after minutes of compiling
        gate.submit(request)
    return config


def serve(
    model: str,
    settings: ConfigDict,
    directory: pathlib.Path,
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, label: items,
) -> dict[str, Any]:
    """Loads, serves and breaks one model; returns JSON values.

    ``rates`` holds output tokens/s by detector, then load, in the order of the repeats, of which each took
    both detectors in turn. ``fault`` is that of ``stale_mapping``, ``metrics`` is flat.
    """
    loaded = load(model, settings, directory)
    drawn = draw(loaded, settings)
    engines: dict[str, Engine] = {}
    for detector in DETECTORS:
        config = engine_config(loaded, settings, drawn, detector)
        engines[detector] = Engine(loaded.config, loaded.phases, config)
        engines[detector].warm_up()
    rates: dict[str, dict[str, list[float]]] = {
        d: {str(c): [] for c in settings.concurrency} for d in DETECTORS
    }
    for repeat in progress(range(settings.repeats), model):
        for load_ in settings.concurrency:
            for detector in DETECTORS[:: 1 if repeat % 2 else -1]:
                rates[detector][str(load_)].append(_rate(engines[detector], drawn, load_))
    fault = stale_mapping(engines, drawn)
    found: dict[str, float] = {
        "requests": len(drawn),
        "prompt_tokens": sum(len(request.prompt_tokens) for request in drawn),
        "recompilations": engines[DETECTORS[-1]].recompilations,
        "memory_bytes": engines["tags"].memory_bytes,
    }
    if fault["rows"]:
        found["fault.aborted"] = fault["aborted"]
        found["fault.others_changed"] = fault["others_changed"]
        found["fault.tokens_wrong_with_check_off"] = fault["wrong_off"]
    for detector, by in rates.items():
        found |= {f"shape_check.{detector}.c{c}.tok_s": sorted(r)[len(r) // 2] for c, r in by.items()}
    return {
        "weights": loaded.weights,
        "loader": list(loaded.lines),
        "rates": rates,
        "fault": fault,
        "metrics": found,
        "summary": f"{len(drawn)} requests served; {fault['what']}",
    }


def _rate(served: Engine, drawn: Sequence[Request], concurrency: int) -> float:
    """Output tokens per second of a closed loop. A request that fails raises ValueError."""
    begun = time.perf_counter()
    results = workload.drive(served, workload.ClosedLoop(drawn, concurrency))
    seconds = time.perf_counter() - begun
    for result in results:
        if not result.ok:
            raise ValueError(f"request {result.request_id} ended with {result.finish_reason}: {result.error}")
    return sum(len(result.tokens) for result in results) / seconds


def by_load(rates: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[int, Sequence[float]]]:
    """Returns rates with loads as numbers again; JSON has text keys only."""
    return {detector: {int(c): row for c, row in by.items()} for detector, by in rates.items()}


def overhead_pct(rates: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[int, list[float]]:
    """Returns the change of throughput with the check, per cent, of each pair of runs, by load."""
    pairs = {int(c): zip(off, rates["tags"][c], strict=True) for c, off in rates["off"].items()}
    return {c: [100 * (on / off - 1) for off, on in row] for c, row in pairs.items()}


@dataclasses.dataclass
class _StaleMapping:
    """Points the victim's first page at the donor's, once both decode, as a lost remap would leave it."""

    victim: str
    donor: str
    after: int  # published tokens of the victim
    page: int | None = None

    def __call__(self, served: Engine, published: int) -> None:
        (pool, row), (other_pool, other) = served.row_of(self.victim), served.row_of(self.donor)
        if self.page is not None or published < self.after or (pool, other_pool) != ("decode", "decode"):
            return
        self.page = int(served.state("decode").pages.table_BM[other, 0])
        assert self.page != PADDING_PAGE
        served.inject(lambda state: _remap(state, row, self.page))


def _remap(state: PoolState, row: int, page: int | None) -> PoolState:
    table_BM = state.pages.table_BM.at[row, 0].set(page)
    return dataclasses.replace(state, pages=dataclasses.replace(state.pages, table_BM=table_BM))


def _answers(
    served: Engine, drawn: Sequence[Request], fault: _StaleMapping | None = None
) -> dict[str, RequestResult]:
    """Serves all requests at once; ``fault`` is asked before each step."""
    found: dict[str, RequestResult] = {}
    published = 0
    for request in drawn:
        served.submit(request)
    while not served.idle:
        if fault is not None:
            fault(served, published)
        for event in served.step():
            published += fault is not None and event.kind == "token" and event.request_id == fault.victim
            if event.result is not None:
                found[event.request_id] = event.result
    return found


def stale_mapping(engines: Mapping[str, Engine], drawn: Sequence[Request]) -> dict[str, Any]:
    """Serves the requests clean, with one stale mapping, and with that and the check off; compares tokens.

    Victim and donor are the two neighbours with the longest answers among the first ``max_rows`` requests,
    so that both decode at once. The result says what happened, whatever it was.
    """
    together = list(drawn[: engines["tags"].config.max_rows])
    if len(together) < 2:
        return {"what": "not run: a stale mapping needs a second request to read from", "rows": []}
    pairs = itertools.pairwise(together)
    pair = max(pairs, key=lambda two: min(request.max_new_tokens for request in two))
    victim, donor = (request.request_id for request in pair)
    clean = _answers(engines["tags"], together)
    seen, unseen = (_StaleMapping(victim, donor, after=3) for _ in range(2))
    checked = _answers(engines["tags"], together, seen)
    unchecked = _answers(engines["off"], together, unseen)
    if seen.page is None or unseen.page is None:
        raise ValueError(
            f"{victim} and {donor} never decoded together: the stale mapping needs longer answers"
        )
    incident = engines["tags"].incidents[-1].detail if engines["tags"].incidents else {}
    rows = []
    for request in together:
        name = request.request_id
        before, on, off = clean[name], checked[name], unchecked[name]
        rows.append(
            {
                "request": f"{name} (victim)"
                if name == victim
                else f"{name} (donor)"
                if name == donor
                else name,
                "clean": f"{before.finish_reason}, {len(before.tokens)} tokens",
                "tags": on.finish_reason,
                "tags_tokens": "identical" if on.tokens == before.tokens else _prefix(on, before),
                "off_tokens": "identical" if off.tokens == before.tokens else f"{_wrong(off, before)} wrong",
            }
        )
    others = [r.request_id for r in together if r.request_id != victim]
    found = {
        "aborted": int(checked[victim].finish_reason == "integrity"),
        "others_changed": sum(checked[name].tokens != clean[name].tokens for name in others),
        "wrong_off": _wrong(unchecked[victim], clean[victim]),
        "kind": incident.get("kind", ""),
    }
    published = unchecked[victim]
    what = (
        f"one stale mapping (first page of {victim} pointed at page {seen.page} of {donor}): with the check "
        f"{victim} ended with {checked[victim].finish_reason!r}, cause {found['kind']!r}, and "
        f"{found['others_changed']} of {len(others)} other answers changed; with the check off "
        f"{found['wrong_off']} of {len(published.tokens)} tokens of {victim} were wrong and published"
    )
    tokens = {"clean": clean[victim].tokens, "with the check": checked[victim].tokens}
    return {**found, "what": what, "rows": rows, "victim": tokens | {"check off": published.tokens}}


def _wrong(found: RequestResult, clean: RequestResult) -> int:
    return sum(a != b for a, b in zip(found.tokens, clean.tokens))


def _prefix(found: RequestResult, clean: RequestResult) -> str:
    whole = clean.tokens[: len(found.tokens)] == found.tokens
    return f"first {len(found.tokens)}, {'identical' if whole else 'CHANGED'}"
