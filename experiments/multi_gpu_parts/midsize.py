"""A mid-size decode step on n ranks: one program, its collectives counted and timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
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
    mapped,
    midsize,
    on_gpu,
    seconds,
)
from kvmem.cache import integrity, pages, tags
from kvmem.cache.integrity import IntegrityReport
from kvmem.engine import step
from kvmem.engine.step import PoolState, StepConfig
from kvmem.models import decoder, sharded
from kvmem.models import params as model_params
from kvmem.models.attention import Implementation
from kvmem.models.config import ModelConfig
from kvmem.models.layers import Reduction
from kvmem.sharding.mesh import AXIS, make_mesh

RAN, TOKEN = step.Outcome._fields.index("ran"), step.Outcome._fields.index("token")
PAGE_SIZE = 64
VARIANTS: tuple[tuple[Implementation, Reduction], ...] = (
    ("xla", "nccl"),
    ("mosaic", "nccl"),
    ("mosaic", "mosaic"),
)


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


def mid_step(config: Mapping[str, Any], out: Findings) -> None:
    """The engine's decode step on n ranks: time, collectives by scope and size, and the status reduction.

    Measured in plain JAX with NCCL's all-reduce and, on GPUs, with the INT4 kernel and either all-reduce.
    """
    c, ranks = config["step"], config["ranks"]
    model, mesh = midsize(c), make_mesh(ranks)
    specs = model_params.param_specs(model, "int4_group")
    entries = sharded.partition_specs(specs, ranks)
    whole = NamedSharding(mesh, WHOLE)
    columns = -(-(c["context"] + (c["repeats"] + 2) * c["steps"]) // PAGE_SIZE)
    states = {rows: jax.device_put(_filled(model, rows, c["context"], columns), whole) for rows in c["rows"]}
    weights = fill_params(model, mesh, config["seed"], out)
    jobs: dict[Any, Any] = {}
    for rows, state in states.items():
        for implementation, reduction in VARIANTS if on_gpu() else VARIANTS[:1]:
            plan = StepConfig(
                model=model,
                rows=rows,
                columns=columns,
                axis=AXIS,
                implementation=implementation,
                reduction=reduction,
            )
            decode: Any = step.compile_step("decode", plan, mesh, entries)
            jobs[rows, f"{implementation}_{reduction}"] = (
                decode,
                (weights, state, jax.device_put(jnp.ones(rows, bool), whole)),
            )
    first = c["rows"][0]
    decode, args = jobs[first, "xla_nccl"]
    _count(out, f"step.n{ranks}.rows{first}", decode.trace(*args).jaxpr)
    tokens = {}
    for (rows, variant), program in compile_all(jobs).items():
        label = f"step.n{ranks}.rows{rows}.{variant}"
        if isinstance(program, Exception):
            out.missing(f"{label}.us", f"{type(program).__name__}: {program}".splitlines()[0][:300])
            continue
        _, state, run_B = jobs[rows, variant][1]
        state = jax.tree.map(jnp.copy, state)  # a step takes its state by donation
        holder, seen = [state], []  # type: ignore[var-annotated]

        def steps(
            program: Any = program, holder: list = holder, seen: list = seen, run_B: Any = run_B
        ) -> Any:
            for _ in range(c["steps"]):
                holder[0], report = program(weights, holder[0], run_B)
            seen.append(report.outcome)
            return report.outcome

        with out.turn():
            median_s, spread_s = seconds(steps, c["repeats"])
            last = np.asarray(seen[-1])
            tokens[rows, variant] = [np.asarray(outcome)[TOKEN] for outcome in seen]
        out.metric(f"{label}.alive", int(last[RAN].sum()))
        if on_gpu():
            out.metric(f"{label}.us", median_s / c["steps"] * 1e6)
            out.metric(f"{label}.spread_us", spread_s / c["steps"] * 1e6)
        else:
            out.missing(f"{label}.us", ON_CPU)
    for rows in c["rows"]:
        if {(rows, "mosaic_nccl"), (rows, "mosaic_mosaic")} <= set(tokens):
            pairs = zip(tokens[rows, "mosaic_nccl"], tokens[rows, "mosaic_mosaic"], strict=True)
            same = np.mean([np.mean(one == other) for one, other in pairs])
            out.metric(f"step.n{ranks}.rows{rows}.mosaic_mosaic.tokens_as_nccl", float(same))
        if on_gpu():
            with out.turn():
                agree_s = time_agreement(mesh, rows, c["repeats"])
            out.metric(f"step.n{ranks}.rows{rows}.status_reduction.us", agree_s * 1e6)


def _filled(model: ModelConfig, rows: int, context: int, columns: int) -> PoolState:
    """An FP8 decode pool whose rows hold ``context`` tokens of zeros each, and may run."""
    empty = step.init(
        decoder.cache_shape(model),
        cache="fp8_576",
        index=None,
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


def time_agreement(mesh: Mesh, rows: int, repeats: int, calls: int = 200) -> float:
    """Seconds of one ``integrity.agree`` of ``rows`` rows."""
    count = jnp.zeros(rows, jnp.int32)
    unsigned = jnp.zeros(rows, jnp.uint32)
    fine = IntegrityReport(
        jnp.ones(rows, bool), count, count, count, count, unsigned, unsigned, jnp.zeros((), jnp.int32)
    )

    def body(report: IntegrityReport) -> IntegrityReport:
        return lax.fori_loop(0, calls, lambda _, carry: integrity.agree(carry, AXIS), report)

    program = mapped(mesh, body, (WHOLE,))
    return seconds(lambda: program(fine), repeats)[0] / calls
