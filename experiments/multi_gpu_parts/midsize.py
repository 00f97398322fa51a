"""A mid-size decode step on n ranks: one program, its collectives counted and timed."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from experiments.multi_gpu_parts.common import (
    ON_CPU,
    WHOLE,
    Findings,
    compile_all,
    fill_params,
    int4_specs,
    mapped,
    midsize,
    on_gpu,
    options,
    profile,
    seconds,
)
from kvmem.cache import integrity, pages, tags
from kvmem.cache.integrity import IntegrityReport
from kvmem.engine import step
from kvmem.engine.step import PoolState, StepConfig
from kvmem.models import decoder, sharded
from kvmem.models.config import ModelConfig
from kvmem.sharding.mesh import AXIS, make_mesh

RAN, TOKEN = step.Outcome._fields.index("ran"), step.Outcome._fields.index("token")
PAGE_SIZE = 64
PROFILED = 5  # steps
KERNELS = 40  # of a step, the longest, go into the notes


def collectives(jaxpr: Any, times: int = 1) -> Iterator[tuple[str, int, int]]:
    """(scope, bytes, calls) of each collective in a program, loops multiplied out."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(("psum", "pmin", "pmax", "all_gather", "ppermute")):
            scope = str(eqn.source_info.name_stack).rsplit("/", 1)[-1] or "none"
            nbytes = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
            yield scope, nbytes, times
        inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple) else (value,):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from collectives(sub, inner)


def mid_step(config: Mapping[str, Any], out: Findings, part: str = "step") -> None:
    """The engine's decode step on n ranks: time, collectives by scope and size, and the status reduction.

    ``config[part].variants`` are triples of implementation, reduction and compiler options. Of a model with
    all its layers and experts on 8 GPUs the fastest variant is also reported as the rate that claims ask for.
    """
    c, ranks = config[part], config["ranks"]
    model, mesh = midsize(c), make_mesh(ranks)
    specs = int4_specs(model)
    entries = sharded.partition_specs(specs, ranks)
    whole = NamedSharding(mesh, WHOLE)
    columns = columns_of(c)
    states = {rows: jax.device_put(filled(model, c, rows), whole) for rows in c["rows"]}
    weights = fill_params(specs, mesh, config["seed"], out)
    jobs: dict[Any, Any] = {}
    settings: dict[Any, dict[str, Any]] = {}
    decodes: dict[Any, Any] = {}
    for implementation, reduction, names in c["variants"]:
        for rows, state in states.items():
            plan = StepConfig(
                model=model,
                rows=rows,
                columns=columns,
                axis=AXIS,
                implementation=implementation,
                reduction=reduction,
            )
            if plan not in decodes:
                decodes[plan] = step.compile_step("decode", plan, mesh, entries)
            key = rows, "_".join(filter(None, (implementation, reduction, *names.split("+"))))
            jobs[key] = (decodes[plan], (weights, state, jax.device_put(jnp.ones(rows, bool), whole)))
            settings[key] = options(names)
    first, variant = next(iter(jobs))
    decode, args = jobs[first, variant]
    _count(out, f"{part}.n{ranks}.rows{first}", decode.trace(*args).jaxpr)
    tokens, took_s, traced = {}, {}, {}
    for (rows, variant), program in compile_all(jobs, settings).items():
        label = f"{part}.n{ranks}.rows{rows}.{variant}"
        if isinstance(program, Exception):
            out.missing(f"{label}.us", f"{type(program).__name__}: {program}".splitlines()[0][:300])
            continue
        _, state, run_B = jobs[rows, variant][1]
        state = jax.tree.map(jnp.copy, state)  # a step takes its state by donation
        holder, seen = [state], []  # type: ignore[var-annotated]

        def steps(
            count: int = c["steps"],
            program: Any = program,
            holder: list = holder,
            seen: list = seen,
            run_B: Any = run_B,
        ) -> Any:
            for _ in range(count):
                holder[0], report = program(weights, holder[0], run_B)
            seen.append(report.outcome)
            return report.outcome

        try:
            with out.turn():
                median_s, spread_s = seconds(steps, c["repeats"])
                took_s[rows, variant] = median_s / c["steps"]
                last = np.asarray(seen[-1])
                tokens[rows, variant] = [np.asarray(outcome)[TOKEN] for outcome in seen]
                out.metric(f"{label}.alive", int(last[RAN].sum()))
                if on_gpu():
                    out.metric(f"{label}.us", median_s / c["steps"] * 1e6)
                    out.metric(f"{label}.spread_us", spread_s / c["steps"] * 1e6)
                    traced[label] = functools.partial(steps, PROFILED)
                else:
                    out.missing(f"{label}.us", ON_CPU)
        except Exception as error:  # one variant of many
            out.missing(f"{label}.us", f"{type(error).__name__}: {error}".splitlines()[0][:300])
    for rows in c["rows"] if on_gpu() and ranks == 8 and not c["layers"] else ():
        arm = "fp8" if model.family == "kimi" else "w_int4"
        fastest_s = min(value for (of, _), value in took_s.items() if of == rows)
        out.metric(f"decode.{c['model']}.{arm}.c{rows}.tok_s", rows / fastest_s)
    for (rows, variant), found in tokens.items():
        other = re.sub("^mosaic_mosaic(_norm)?", "mosaic_nccl", variant).removesuffix("_whole")
        if other != variant and (rows, other) in tokens:
            pairs = zip(tokens[rows, other], found, strict=True)
            same = np.mean([np.mean(one == nccl) for nccl, one in pairs])
            out.metric(f"{part}.n{ranks}.rows{rows}.{variant}.tokens_as_nccl", float(same))
    for rows in c["rows"] if on_gpu() else ():
        with out.turn():
            time_agreement(out, f"{part}.n{ranks}.rows{rows}.status_reduction", mesh, rows, c["repeats"])
    for label, run in traced.items():  # last: what hangs here costs no other number
        try:
            with out.turn():
                _profile(out, label, run)
        except Exception as error:  # one variant of many
            out.missing(f"{label}.busy_us", f"{type(error).__name__}: {error}".splitlines()[0][:300])


def _profile(out: Findings, label: str, steps: Callable[[], Any]) -> None:
    """Kernels of a step launched one by one, as XLA does under the profiler: what the GPU alone has to do."""
    seen = profile(steps, PROFILED, runs=1)
    out.metric(f"{label}.launches", seen.launches)
    out.metric(f"{label}.busy_us", seen.busy_us)
    out.metric(f"{label}.traced_us", seen.us)
    out.note(f"{label}.kernels", dict(list(seen.kernels.items())[:KERNELS]))


def columns_of(c: Mapping[str, Any]) -> int:
    """Pages of a row: for its context and every step that is run."""
    return -(-(c["context"] + (c["repeats"] + 2) * c["steps"]) // PAGE_SIZE)


def filled(model: ModelConfig, c: Mapping[str, Any], rows: int) -> PoolState:
    """An FP8 decode pool whose rows hold ``c["context"]`` tokens of zeros each, and may run."""
    columns, context = columns_of(c), c["context"]
    empty = step.init(
        decoder.cache_shape(model),
        cache=c["cache"],
        index="index_132" if model.indexer else None,
        scale=0.05,
        num_pages=rows * columns + 1,
        num_rows=rows,
        max_pages=columns,
        page_size=PAGE_SIZE,
        detector="tags",
    )
    page_state, _ = pages.append(empty.pages, jnp.full(rows, context, jnp.int32))
    expectation = tags.extend(empty.expectation, page_state, jnp.ones(rows, bool))
    alive_B = jnp.zeros(rows, jnp.int32)
    return dataclasses.replace(empty, pages=page_state, expectation=expectation, cause_B=alive_B)


def _count(out: Findings, label: str, jaxpr: Any) -> None:
    found: dict[str, list[int]] = {}
    for scope, nbytes, calls in collectives(jaxpr):
        total = found.setdefault(scope, [0, 0])
        total[0] += calls
        total[1] = max(total[1], nbytes)
    for scope, (calls, nbytes) in sorted(found.items()):
        out.metric(f"{label}.collectives.{scope}.calls", calls)
        out.metric(f"{label}.collectives.{scope}.bytes", nbytes)


def time_agreement(
    out: Findings, label: str, mesh: Mesh, rows: int, repeats: int, loops: int = 10, unrolled: int = 20
) -> None:
    """Times ``integrity.agree`` of ``rows`` rows, on the host's clock and on the GPUs'."""
    count = jnp.zeros(rows, jnp.int32)
    unsigned = jnp.zeros(rows, jnp.uint32)
    fine = IntegrityReport(
        jnp.ones(rows, bool), count, count, count, count, unsigned, unsigned, jnp.zeros((), jnp.int32)
    )

    def several(_: jax.Array, report: IntegrityReport) -> IntegrityReport:
        for _unrolled in range(unrolled):  # an iteration of XLA's loop has a cost of its own
            report = integrity.agree(report, AXIS)
        return report

    program = mapped(mesh, lambda report: lax.fori_loop(0, loops, several, report), (WHOLE,))
    out.metric(f"{label}.wall_us", seconds(lambda: program(fine), repeats)[0] / (loops * unrolled) * 1e6)
    out.metric(f"{label}.us", profile(lambda: program(fine), loops * unrolled).us)
