"""Serves workloads with the engine and records latency, throughput, host time, routing and prefix tables.

See configs/serve_trace.py for the commands. Files beside the record: requests.jsonl (one line a request),
metrics.prom, report.md (the tables), incidents.json.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments import launch
from kvmem import models
from kvmem.checkpoint import hf
from kvmem.engine import metrics, workload
from kvmem.engine.engine import Engine
from kvmem.engine.request import EngineConfig, PhaseFormat, Real, Request, default_formats
from kvmem.engine.router import POLICIES, BusyClock, Router, SideBySide
from kvmem.engine.scheduler import Phase
from kvmem.engine.simulate import CostModel, SimulatedEngine, spread
from kvmem.engine.traces import TraceRow, load_prompts, load_trace
from kvmem.models import hf_config
from kvmem.models import params as model_params
from kvmem.models.config import ModelConfig
from kvmem.record import Recorder, dumps

TRACE_FILES = {
    "mooncake_conversation": ("mooncake_conversation_head4000.jsonl.gz", "mooncake"),
    "azure_code": ("azure2023_code.csv.gz", "azure"),
    "azure_conversation": ("azure2023_conv.csv.gz", "azure"),
}
HEAD = ("ttft_s.p50", "ttft_s.p95", "tpot_s.p50", "tpot_s.p95", "throughput_tok_s", "prefix_hit_rate")
SIMULATED = (*HEAD, "goodput_req_s")


def body(config: ConfigDict, recorder: Recorder) -> None:
    """One run: see configs/serve_trace.py."""
    recorder.seeds = {"weights": config.seed, "workload": config.seed}
    model, weights, label = _weights(config)
    recorder.weights = label
    tables: dict[str, str] = {}
    _record_host_time(config, model, weights, recorder)
    if config.host.alone:
        return

    engine = _engine(config, model, weights)
    engine.warm_up()
    requests, source = _requests(config, model)
    results = workload.drive(engine, workload.OpenLoop(requests))
    bound = metrics.LatencyBound(config.bound.ttft_s, config.bound.tpot_s)
    open_loop = engine.metrics(bound, quality_equal=config.quality_equal)
    for name in sorted(open_loop):
        recorder.metric(name, open_loop[name])
    if not config.quality_equal:
        why = f"no quality equivalence test was passed by these formats with weights {label}"
        recorder.absent("useful_tok_s_per_gib", why)
    recorder.notes["trace"] = source
    recorder.notes["integrity_coverage"] = engine.integrity_coverage
    recorder.file("requests.jsonl", metrics.to_jsonl(results))
    recorder.file("metrics.prom", metrics.to_prometheus(open_loop))
    recorder.file("incidents.json", dumps([dataclasses.asdict(i) for i in engine.incidents]))
    tables[f"Open loop, {source}"] = _table({"replay": open_loop}, HEAD, "run")
    tables["Step time, ms of wall time"] = _breakdown(open_loop)

    closed = _closed_loops(config, engine, model)
    tables["Closed loop (fixed concurrency)"] = _table(closed, HEAD, "concurrency")
    sessions = _sessions(config, engine, model)
    tables["Sessions"] = _table(sessions, HEAD, "kind")
    for group, rows in (("closed_loop", closed), ("sessions", sessions)):
        for row, found in rows.items():
            for name in HEAD:
                if name in found:
                    recorder.metric(f"{group}.{row}.{name}", found[name])

    ratios = _invariance(config, model, weights)
    for name, q in (("p50", 50), ("min", 0), ("max", 100)):
        recorder.metric(f"batch_invariant.slowdown.{name}", metrics.percentile(ratios, q))

    policies = _engine_policies(config, model, weights)
    tables[f"Routing policies, agent sessions over {config.fleet.replicas} engines, processor seconds"] = (
        _table(policies, (*HEAD, "spread", "moved"), "policy")
    )
    for policy, values in policies.items():
        for name in ("ttft_s.p95", "prefix_hit_rate", "throughput_tok_s", "spread", "moved"):
            recorder.metric(f"fleet.{policy}.{name}", values[name])

    for trace in config.routing.traces:
        trace_rows, source = _trace(config, trace, config.routing.count)
        routed = _routing(config, trace_rows)
        tables[f"Routing policies, simulated clock, {source}"] = _table(
            routed, (*SIMULATED, "spread"), "policy"
        )
        found = {"routing": routed}
        if workload.block_hit_rate(trace_rows) > 0:  # a trace without shared prefixes has nothing to reuse
            found["prefix"] = _prefix(config, trace_rows)
            tables[f"Prefix cache, simulated clock, {source}"] = _table(
                found["prefix"], (*SIMULATED, "prefill_tokens", "evicted_pages"), "prefix cache"
            )
        for group, by_row in found.items():
            for row, values in by_row.items():
                for name in ("ttft_s.p95", "prefix_hit_rate", "throughput_tok_s"):
                    if name in values:
                        recorder.metric(f"{group}.{trace}.{row}.{name}", values[name])
    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items())
    recorder.file("report.md", f"# serve_trace: {model.name} on a CPU\n\n{text}\n")
    print(text)


# What is served


def _weights(config: ConfigDict) -> tuple[ModelConfig, dict[str, Any], str]:
    if config.checkpoint:
        directory = pathlib.Path(config.checkpoint)
        model = hf_config.from_hf(json.loads((directory / "config.json").read_text()))
        formats = default_formats(model.family)
        loaded = {kind: hf.load(directory, kind)[1] for kind in {form.weights for form in formats.values()}}
        weights = {phase: loaded[form.weights] for phase, form in formats.items()}
        return model, weights, f"checkpoint:{directory.name}"
    model = models.get_config(config.model)
    formats = default_formats(model.family)
    kinds = {form.weights for form in formats.values()}
    made = {kind: model_params.init_params(model, kind, config.seed) for kind in kinds}
    weights = {phase: made[form.weights] for phase, form in formats.items()}
    return model, weights, f"synthetic:{config.seed}"


def _engine(
    config: ConfigDict,
    model: ModelConfig,
    weights: Mapping[str, Any],
    clock: Callable[[], Real] = time.perf_counter,
    **changes: Any,
) -> Engine:
    formats = default_formats(model.family)
    sizes = {**config.engine.to_dict(), "integrity": config.integrity, **formats, **changes}
    return Engine(model, weights, EngineConfig(**sizes), clock=clock)


def _trace(config: ConfigDict, name: str, count: int) -> tuple[list[TraceRow], str]:
    """The real trace if its file is there, else one made to its statistics; and which of the two it is."""
    if name not in workload.PRESETS:
        raise ValueError(f"unknown trace {name!r}; known: {', '.join(workload.PRESETS)}")
    if config.data and name in TRACE_FILES:
        file, schema = TRACE_FILES[name]
        path = launch.ROOT / config.data / file
        if path.is_file():
            return load_trace(path, schema, count), f"{name} (the published trace, first {count})"
    rows = workload.generate(workload.PRESETS[name], count, config.seed)
    return rows, f"{name} (generated, {count})"


def _requests(config: ConfigDict, model: ModelConfig) -> tuple[list[Request], str]:
    if config.requests:
        path = pathlib.Path(config.requests)
        return load_prompts(path, max_new_tokens=32, vocab_size=model.vocab_size), path.name
    rows, source = _trace(config, config.replay.trace, config.replay.count)
    requests = _fit(config, model, rows, config.replay.time_scale)
    return requests, f"{source}, lengths / {config.replay.shrink}"


def _fit(
    config: ConfigDict, model: ModelConfig, rows: Sequence[TraceRow], time_scale: float
) -> list[Request]:
    """Requests of a trace at lengths that the tiny model's engine holds."""
    limit = config.engine.max_pages_per_row * config.engine.page_size
    return workload.to_requests(
        rows,
        vocab_size=model.vocab_size,
        max_prompt=limit * 3 // 4,
        max_new_tokens=limit // 4,
        shrink=config.replay.shrink,
        time_scale=time_scale,
    )


# What is measured


def _closed_loops(config: ConfigDict, engine: Engine, model: ModelConfig) -> dict[str, dict[str, Any]]:
    found = {}
    rng = np.random.default_rng(config.seed)
    for concurrency in config.closed_loop.concurrency:
        requests = [
            Request(
                f"closed{concurrency}.{i}",
                tuple(rng.integers(1, model.vocab_size, config.closed_loop.prompt).tolist()),
                config.closed_loop.answer,
                workload.FIXED_LENGTH,
            )
            for i in range(config.closed_loop.count)
        ]
        driver = workload.ClosedLoop(launch.progress(requests, f"concurrency {concurrency}"), concurrency)
        found[str(concurrency)] = metrics.summarise(workload.drive(engine, driver))
    return found


def _scripts(
    config: ConfigDict, model: ModelConfig, kind: str, count: int, **timing: float
) -> list[workload.Script]:
    return workload.scripts(
        workload.SESSIONS[kind],
        count=count,
        seed=config.seed,
        vocab_size=model.vocab_size,
        max_tokens=config.engine.max_pages_per_row * config.engine.page_size,
        scale=config.sessions.scale,
        name=f"{kind}-",
        **timing,
    )


def _sessions(config: ConfigDict, engine: Engine, model: ModelConfig) -> dict[str, dict[str, Any]]:
    found = {}
    for kind in ("agent", "chat"):
        scripts = _scripts(config, model, kind, config.sessions[kind], time_scale=0.01)
        started = engine.now()
        moved = [dataclasses.replace(s, start_s=started + s.start_s) for s in scripts]
        found[kind] = metrics.summarise(workload.drive(engine, workload.Sessions(moved)))
    return found


def _engine_policies(
    config: ConfigDict, model: ModelConfig, weights: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Agent sessions over engines behind each policy.

    The engines take turns in this process; the clock of each is the processor time of its own steps, so that
    they count as machines side by side, whatever else this machine does.
    """
    fleet = config.fleet
    clocks = [BusyClock() for _ in range(fleet.replicas)]
    engines = [_engine(config, model, weights, clock=clock) for clock in clocks]
    scripts = _scripts(config, model, "agent", fleet.sessions, rate=fleet.rate, time_scale=0.01)
    found = {}
    for policy in POLICIES:
        for engine in engines:
            engine.warm_up()  # and so an empty prefix cache
        router = Router(policy, affinity=2048 // config.replay.shrink, seed=config.seed)
        cluster = SideBySide(engines, router, clocks)
        found[policy] = metrics.summarise(workload.drive(cluster, workload.Sessions(scripts)))
        found[policy]["spread"] = spread([cluster.placements[i] for i in range(fleet.replicas)])
        found[policy]["moved"] = router.moved
    return found


def _record_host_time(
    config: ConfigDict, model: ModelConfig, weights: Mapping[str, Any], recorder: Recorder
) -> None:
    """Processor time of the host thread in a decode step of ``config.host.rows`` rows, in ms: the median of
    several runs of steps, the least, and how much of the median JAX spends in launching the step.
    """
    found = _host_ms(config, model, weights)
    whole, launch_ms = zip(*found, strict=True)
    name = f"host_ms_per_step.rows{config.host.rows}"
    recorder.metric(name, metrics.percentile(whole, 50))
    recorder.metric(f"{name}.min", min(whole))
    recorder.metric(f"{name}.launch", metrics.percentile(launch_ms, 50))
    print(f"{name}: {metrics.percentile(whole, 50):.3f}, least of {len(whole)} runs {min(whole):.3f}")


def _host_ms(config: ConfigDict, model: ModelConfig, weights: Mapping[str, Any]) -> list[tuple[float, float]]:
    rows, steps = config.host.rows, config.host.steps
    engine = _engine(
        config,
        model,
        weights,
        max_rows=rows,
        prefill_rows=8,
        prefill_pages=257,
        decode_pages=1 + rows * 8,
        max_pages_per_row=8,
        page_size=64,
    )
    engine.warm_up()
    rng = np.random.default_rng(config.seed)
    for i in range(rows):
        prompt = tuple(rng.integers(1, model.vocab_size, 20).tolist())
        engine.submit(Request(f"host{i}", prompt, 8 * 64 - 20, workload.FIXED_LENGTH))
    while len(engine.scheduler.rows(Phase.DECODE)) < rows:
        engine.step()
    found = []
    for _ in range(config.host.repeats):
        before = dict(engine.seconds)
        for _ in range(steps):
            engine.step()
        whole, launch_s = (engine.seconds[part] - before[part] for part in ("host", "host_launch"))
        found.append((1e3 * whole / steps, 1e3 * launch_s / steps))
    return found


def _invariance(config: ConfigDict, model: ModelConfig, weights: Mapping[str, Any]) -> list[float]:
    """Processor time of the same closed loop with batch invariance over that without, for each repeat."""
    rng = np.random.default_rng(config.seed)
    prompts = [tuple(rng.integers(1, model.vocab_size, 48).tolist()) for _ in range(config.invariant.count)]
    engines = [
        _engine(config, model, weights, batch_invariant=value, prefix_cache=False) for value in (False, True)
    ]
    for engine in engines:
        engine.warm_up()

    def seconds(engine: Engine, repeat: int) -> float:
        requests = [Request(f"r{repeat}.{i}", p, 16, workload.FIXED_LENGTH) for i, p in enumerate(prompts)]
        begun = time.process_time()
        workload.drive(engine, workload.ClosedLoop(requests, engine.config.max_rows))
        return time.process_time() - begun

    ratios = []
    for repeat in range(config.invariant.repeats):
        plain, invariant = (seconds(engine, repeat) for engine in engines)
        ratios.append(invariant / plain)
    return ratios


# Simulated tables


def _simulated(config: ConfigDict, rows: Sequence[TraceRow], policy: str, **changes: Any) -> dict[str, Any]:
    """One replay of a trace over simulated replicas, lengths and time in real tokens and seconds."""
    shrink, routing = config.routing.shrink, config.routing
    form = PhaseFormat("bf16", "bf16_576")
    sizes = {
        "max_rows": 64,
        "prefill_pages": routing.prefill_pages,
        "decode_pages": routing.decode_pages,
        "max_pages_per_row": 4096,
        "page_size": 64 // shrink,
        "prefill_chunk": 512 // shrink,
        "prefill_rows": 4,
        "queue_limit": 10**6,
        "prefill": form,
        "decode": form,
    }
    engine_config = EngineConfig(**{**sizes, **changes})
    replicas = [
        SimulatedEngine(engine_config, CostModel(token_scale=shrink)) for _ in range(routing.replicas)
    ]
    cluster = SideBySide(replicas, Router(policy, affinity=2048 // shrink, seed=config.seed))
    requests = workload.to_requests(
        rows, vocab_size=2**31 - 1, max_prompt=2**17 // shrink, max_new_tokens=4096 // shrink, shrink=shrink
    )
    results = workload.drive(cluster, workload.OpenLoop(requests))
    bound = metrics.LatencyBound(ttft_s=10.0, tpot_s=0.1 * shrink)
    found: dict[str, Any] = metrics.summarise(results, bound=bound)
    for name in ("tpot_s.p50", "tpot_s.p95"):
        found[name] /= shrink
    for name in ("throughput_tok_s", "goodput_tok_s"):
        found[name] *= shrink
    found["spread"] = spread([cluster.placements[i] for i in range(routing.replicas)])
    found["prefill_tokens"] = shrink * sum(replica.counters["prefill_tokens"] for replica in replicas)
    found["evicted_pages"] = sum(replica.counters["evicted_pages"] for replica in replicas)
    return found


def _routing(config: ConfigDict, rows: Sequence[TraceRow]) -> dict[str, dict[str, Any]]:
    return {policy: _simulated(config, rows, policy) for policy in POLICIES}


def _prefix(config: ConfigDict, rows: Sequence[TraceRow]) -> dict[str, dict[str, Any]]:
    """Without a prefix cache, with it, and with it in a quarter of and four times the prefill pages."""
    pages = config.routing.prefill_pages
    return {
        "off": _simulated(config, rows, "weighed", prefix_cache=False),
        "on": _simulated(config, rows, "weighed"),
        "quarter": _simulated(config, rows, "weighed", prefill_pages=pages // 4),
        "fourfold": _simulated(config, rows, "weighed", prefill_pages=4 * pages),
    }


# Tables


def _table(rows: Mapping[str, Mapping[str, Any]], columns: Sequence[str], first: str) -> str:
    lines = [f"| {first} | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for name, values in rows.items():
        cells = [f"{values[c]:.4g}" if c in values else "" for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _breakdown(found: Mapping[str, Any]) -> str:
    parts = {k.removeprefix("step_ms."): v for k, v in found.items() if k.startswith("step_ms.")}
    parts["host (processor time)"] = found["host_ms_per_step"]
    return "| part | ms per step |\n|---|---:|\n" + "\n".join(f"| {k} | {v:.3f} |" for k, v in parts.items())


if __name__ == "__main__":
    launch.run(body)
