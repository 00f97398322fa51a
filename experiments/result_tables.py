"""The README's tables of measured records: kernels, one layer, faults by detector, serving."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from experiments import tables

Metrics = Mapping[str, float]


def _named(metrics: Metrics, pattern: str) -> dict[tuple[str, ...], float]:
    """Returns the metrics whose whole name matches, by their groups."""
    found = {name: re.fullmatch(pattern, name) for name in metrics}
    return {match.groups(): metrics[name] for name, match in found.items() if match}


def _sorted(keys: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """In order of their numbers, with words behind numbers."""
    return sorted(keys, key=lambda key: [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in key])


def _pivot(
    header: Sequence[str], values: Mapping[tuple[str, ...], float], columns: Sequence[str], digits: int = 1
) -> str:
    """Rows by all groups but the first, which is the column; what was not measured is a dash."""
    rows = []
    for key in _sorted({key[1:] for key in values}):
        cells = [values.get((column, *key)) for column in columns]
        rows.append([*key, *("–" if v is None else f"{v:,.{digits}f}" for v in cells)])
    return tables.markdown([*header, *columns], rows)


def kernels(metrics: Metrics) -> str:
    """Microseconds of each kernel at each shape beside the rival's, and of one decode layer on one rank.

    ``rival`` is the fastest of FlashMLA, FlashAttention-3 and FlashInfer in BF16, vLLM's FlashMLA build in
    FP8, and Marlin for the experts, each measured on an H200; ``floor`` is bytes over the best stream seen.
    """
    parts = []
    shape = r"\.h(\d+)\.b(\d+)\.l?(\d+|ragged)"
    mla = _named(metrics, rf"mla_decode\.(bf16|fp8_flat|fp8_656){shape}\.us")
    if mla:
        rivals = _named(metrics, rf"mla_decode\.(bf16|fp8_flat|fp8_656){shape}\.rival_us")
        both = mla | {(f"{key[0]} rival", *key[1:]): value for key, value in rivals.items()}
        columns = ("bf16", "bf16 rival", "fp8_flat", "fp8_flat rival", "fp8_656")
        table = _pivot(("heads", "batch", "context"), both, columns)
        parts.append(f"MLA decode over 64-token pages, us:\n\n{table}")
    moe = _named(metrics, r"int4_moe\.(kimi|glm)\.g(\d+)\.m(\d+)\.us")
    if moe:
        rivals = _named(metrics, r"int4_moe\.(kimi|glm)\.g(\d+)\.m(\d+)\.marlin_us")
        both = moe | {(f"{key[0]} Marlin", *key[1:]): value for key, value in rivals.items()}
        table = _pivot(("group", "tokens"), both, ("kimi", "kimi Marlin", "glm", "glm Marlin"))
        parts.append(f"Routed experts in INT4, one rank of eight, us:\n\n{table}")
    layer = _named(metrics, r"layer\.(kimi|glm)\.(bf16|fp8)\.b(\d+)\.(us|launches|floor_us)")
    if layer:
        by: dict[tuple[str, ...], float]
        by = {(f"{cache} {what}", model, rows): v for (model, cache, rows, what), v in layer.items()}
        wanted = tuple(
            f"{cache} {what}" for cache in ("bf16", "fp8") for what in ("us", "launches", "floor_us")
        )
        table = _pivot(("model", "batch"), by, wanted)
        parts.append(f"One decode layer on one rank, context 2,048, no collectives:\n\n{table}")
    return "\n\n".join(parts)


def faults(metrics: Metrics) -> str:
    """Trials in which a planted fault was detected, over all models and page sizes, and the clean runs."""
    name = r"(\w+)\.(\w+)\.p(\d+)\.(off|tags|tags_digest)\.(detected|missed|collateral|wrong)"
    counts: dict[tuple[str, str, str], int] = {}
    for (fault, _, _, detector, what), value in _named(metrics, name).items():
        counts[fault, detector, what] = counts.get((fault, detector, what), 0) + int(value)
    detectors = ("off", "tags", "tags_digest")
    rows = []
    for fault in sorted({key[0] for key in counts}):
        cells = []
        for detector in detectors:
            seen, missed, hurt, wrong = (
                counts.get((fault, detector, what), 0)
                for what in ("detected", "missed", "collateral", "wrong")
            )
            cell = f"{seen}/{seen + missed}" if seen + missed else "–"
            cell += f", {wrong} wrong" if wrong else ""
            cells.append(cell + (f", {hurt} others hurt" if hurt else ""))
        rows.append([fault, *cells])
    parts = [tables.markdown(["fault", *detectors], rows)] if rows else []
    clean = _named(metrics, r"clean\.(\w+)\.(operations|page_checks|false_positives)")
    lines = [
        f"{detector}: {clean[detector, 'false_positives']:,.0f} false positives in "
        f"{clean[detector, 'operations']:,.0f} clean operations and "
        f"{clean[detector, 'page_checks']:,.0f} page checks."
        for detector in detectors
        if (detector, "page_checks") in clean
    ]
    lines += [
        f"{detector} adds {metrics[added]:,.0f} device operations to a compiled decode step."
        for detector in detectors
        if (added := f"cost.{detector}.added_step_operations") in metrics
    ]
    if (alone := metrics.get("cost.tags.check_us")) is not None:
        lines.append(f"One check of the full pool takes {alone:,.0f} us on this CPU.")
    return "\n\n".join([*parts, " ".join(lines)])


def check_cost(metrics: Metrics) -> str:
    """Microseconds of the check alone, and of a decode step without it and with each detector."""
    parts = []
    alone = _named(metrics, r"integrity\.check\.(\w+)\.b(\d+)\.(us|launches|device_operations)")
    if alone:
        by: dict[tuple[str, ...], float]
        by = {(what, detector, rows): value for (detector, rows, what), value in alone.items()}
        table = _pivot(("detector", "rows"), by, ("us", "launches", "device_operations"))
        parts.append(f"The check alone, a table of 4,096 columns over 21,406 pages:\n\n{table}")
    steps = _named(metrics, r"integrity\.step\.(\w+)\.b(\d+)\.l(\d+)\.us")
    if steps:
        by = {(f"{detector}, us", rows, context): us for (detector, rows, context), us in steps.items()}
        added = _named(metrics, r"integrity\.overhead\.(\w+)\.b(\d+)\.l(\d+)\.percent")
        by |= {
            (f"{detector}, %", rows, context): percent for (detector, rows, context), percent in added.items()
        }
        columns = ("off, us", "tags, us", "tags, %", "tags_digest, us", "tags_digest, %")
        layers = metrics.get("integrity.step.layers", 0)
        table = _pivot(("batch", "context"), by, columns, digits=2)
        parts.append(f"The engine's decode step of one rank, {layers:.0f} layers:\n\n{table}")
    return "\n\n".join(parts)


def several_gpus(metrics: Metrics) -> str:
    """All-reduce by message size and way, and whether tokens and dropped rows agree between ranks."""
    parts = []
    calls = _named(metrics, r"allreduce\.(n\d+)\.(\d+)\.(\w+)\.us")
    if calls:
        by: dict[tuple[str, ...], float]
        by = {(way, ranks[1:], kib): value for (ranks, kib, way), value in calls.items()}
        table = _pivot(("GPUs", "KiB"), by, sorted({key[0] for key in by}))
        parts.append(f"All-reduce inside one program, us on the GPUs' clocks:\n\n{table}")
    walls = _named(metrics, r"allreduce\.(n\d+)\.(\d+)\.(\w+)\.wall_us")
    if walls:
        by = {(way, ranks[1:], kib): value for (ranks, kib, way), value in walls.items()}
        table = _pivot(("GPUs", "KiB"), by, sorted({key[0] for key in by}))
        parts.append(f"The same, us on the host's clock:\n\n{table}")
    steps = _named(metrics, r"step\.n(\d+)\.rows(\d+)\.(\w+)\.(us|busy_us|launches)")
    steps = {key: value for key, value in steps.items() if key[2] != "status_reduction"}
    if steps:
        by = {(key[3], *key[:3]): value for key, value in steps.items()}
        table = _pivot(("GPUs", "rows", "variant"), by, ("us", "busy_us", "launches"), digits=0)
        parts.append(
            "Decode step of four layers of Kimi's widths: wall time, time of its kernels alone, and how many:"
            f"\n\n{table}"
        )
    facts = _named(
        metrics,
        r"(tp\d+\.\w+\.tokens_equal|rank_agreement\.same_step|handover\.us_per_token"
        r"|step\.n\d+\.rows\d+\.status_reduction\.us)",
    )
    parts += [f"`{name}` {tables.number(value)}." for (name,), value in facts.items()]
    return "\n\n".join(parts)


_LATENCY = ("ttft_s.p50", "ttft_s.p95", "tpot_s.p50", "tpot_s.p95", "throughput_tok_s", "prefix_hit_rate")
_ROUTED = ("ttft_s.p95", "throughput_tok_s", "prefix_hit_rate")


def _grid(header: Sequence[str], values: Mapping[tuple[str, ...], float], columns: Sequence[str]) -> str:
    """As ``_pivot``, rows in the order in which they were recorded, numbers to five digits."""
    rows = [
        [*key, *(tables.number(values.get((*key, column))) for column in columns)]
        for key in dict.fromkeys(key[:-1] for key in values)
    ]
    return tables.markdown([*header, *columns], rows)


def serving(metrics: Metrics) -> str:
    """Latencies of the tiny model on a CPU; routing and prefix reuse, simulated and over engines."""
    parts = []
    names = "|".join(map(re.escape, _LATENCY))
    served: dict[tuple[str, ...], float]
    served = {("replay", column): metrics[column] for column in _LATENCY if column in metrics}
    for group, label in (("closed_loop", "{} in flight"), ("sessions", "{} sessions")):
        for (row, column), value in _named(metrics, rf"{group}\.(\w+)\.({names})").items():
            served[label.format(row), column] = value
    if served:
        table = _grid(("load",), served, _LATENCY)
        parts.append(f"The tiny Kimi on a CPU, a check of the engine's shape, no figure of a GPU:\n\n{table}")
    names = "|".join(map(re.escape, _ROUTED))
    routed = _named(metrics, rf"routing\.(\w+)\.(\w+)\.({names})")
    if routed:
        table = _grid(("trace", "policy"), routed, _ROUTED)
        parts.append(f"Routing, four simulated replicas, published rates, real prompt lengths:\n\n{table}")
    fleet = _named(metrics, rf"fleet\.(\w+)\.({names}|moved)")
    if fleet:
        table = _grid(("policy",), fleet, (*_ROUTED, "moved"))
        what = "Routing of agent sessions over three engines of the tiny model, in processor seconds"
        parts.append(f"{what}; `moved` counts turns that left their session's replica:\n\n{table}")
    reused = _named(metrics, rf"prefix\.(\w+)\.(\w+)\.({names})")
    if reused:
        table = _grid(("trace", "prefix cache"), reused, _ROUTED)
        parts.append(f"Prefix cache off, on, with a quarter of and four times the prefill pages:\n\n{table}")
    facts = [
        "recompilations_after_warmup",
        "integrity.mismatches",
        "host_ms_per_step.rows64",
        "batch_invariant.slowdown.p50",
    ]
    parts.append(" ".join(f"`{name}` {tables.number(metrics[name])}." for name in facts if name in metrics))
    return "\n\n".join(parts)
