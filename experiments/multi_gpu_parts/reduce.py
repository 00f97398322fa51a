"""All-reduce of decode sizes: NCCL, XLA's own kernel and Mosaic, checked over thousands of calls, timed.

A way to reduce is timed on the host's clock and on the GPUs', from the start of the first kernel of a chain
of calls to the end of the last; the Mosaic kernel also with many exchanges inside one launch.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from experiments.multi_gpu_parts.common import (
    ON_CPU,
    SPLIT,
    WHOLE,
    Findings,
    compile_all,
    mapped,
    on_gpu,
    options,
    profile,
    seconds,
)
from kvmem.models import layers
from kvmem.sharding.mesh import AXIS, make_mesh
from pallas_kernels import allreduce as kernel

Reduce = Callable[[jax.Array], jax.Array]
NORM_CALLS = 50  # unrolled in the loop that is timed
EXCHANGES = 200  # inside one launch


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to reduce: by what, the name of its kernel ("" for several), and XLA's options for it."""

    by: str
    kernel: str = ""
    options: str = ""


WAYS = {
    "nccl": Way("nccl"),  # XLA's all-reduce, which is NCCL's or a kernel of XLA's own: the trace says which
    "nccl_graph": Way("nccl", "", "graph"),
    "xla_oneshot": Way("nccl", "", "oneshot"),
    "nccl_norm": Way("nccl"),
    "mosaic": Way("mosaic", "_sum_body"),
    "mosaic_exchange": Way("mosaic", "_sum_body"),
    "mosaic_norm": Way("mosaic", "_norm_body"),
}
EVERY_SIZE = ("nccl", "mosaic")


def reducer(by: str, rows: int, width: int, exchanges: int = 1) -> Reduce:
    """An all-reduce of bf16 [rows, width] for use inside shard_map; "mosaic" opens its workspace here."""
    if by == "nccl":
        return lambda x_TD: lax.psum(x_TD, AXIS)
    if by == "mosaic":
        space = kernel.open_workspace(AXIS, *kernel.tiling(rows * width, jnp.bfloat16), jnp.bfloat16)
        return lambda x_TD: kernel.all_reduce(x_TD, AXIS, workspace=space, exchanges=exchanges)
    raise ValueError(f"all-reduce by {by!r}: one of nccl, mosaic")


def message(base: jax.Array, call: jax.Array) -> jax.Array:
    """What a rank sends in a call: integers of -8 to 8 that change with every call; their sums are exact."""
    return ((base + call) % 17 - 8).astype(jnp.bfloat16)


def count_wrong(reduce: Reduce, base_NTD: jax.Array, calls: int) -> jax.Array:
    """How many of ``calls`` all-reduces gave another sum than a rank computes alone, any element counting.

    ``base_NTD`` i32 holds the bases of all ranks, the same everywhere. A sum of a former call, of too few
    ranks, or of another place is off in almost every element.
    """
    me = lax.axis_index(AXIS)

    def call(i: jax.Array, wrong: jax.Array) -> jax.Array:
        got_TD = reduce(message(base_NTD[me], i)).astype(jnp.float32)
        expected_TD = jnp.sum(message(base_NTD, i).astype(jnp.float32), axis=0)
        return wrong + jnp.any(got_TD != expected_TD).astype(jnp.int32)

    return lax.fori_loop(0, calls, call, jnp.zeros((), jnp.int32))


def chain(reduce: Reduce, x_TD: jax.Array, ranks: int, calls: int) -> jax.Array:
    """``calls`` all-reduces, each of what the last gave, with one small kernel in between every few dozen.

    The values grow by ``ranks`` a call: from 2^-100 they stay finite for 200 doublings, then start again. The
    calls in between are unrolled: an iteration of XLA's loop costs the host about 16 us, whatever is in it.
    """
    inner = calls_between_starts(ranks)
    start_TD = x_TD * jnp.bfloat16(2.0**-100)

    def outer(_: jax.Array, last_TD: jax.Array) -> jax.Array:
        fresh_TD = start_TD + jnp.bfloat16(0) * last_TD
        for _unrolled in range(inner):
            fresh_TD = reduce(fresh_TD)
        return fresh_TD

    return lax.fori_loop(0, -(-calls // inner), outer, start_TD)


def chained_calls(ranks: int, calls: int) -> int:
    """How many calls ``chain`` makes."""
    return calls_between_starts(ranks) * -(-calls // calls_between_starts(ranks))


def calls_between_starts(ranks: int) -> int:
    """How often ``chain`` calls before it starts again: 100 doublings at most."""
    return 100 // max(1, ranks.bit_length() - 1)


def norm_step(by: str, rows: int, width: int) -> Callable:
    """Sum, residual add and RMSNorm: one kernel ("mosaic") or NCCL and XLA ("nccl")."""
    if by == "mosaic":
        space = kernel.open_workspace(AXIS, rows, width, jnp.bfloat16)
        return lambda x_TD, hidden_TD, weight_D: kernel.all_reduce_add_norm(
            x_TD, hidden_TD, weight_D[None], 0, AXIS, epsilon=1e-5, workspace=space
        )

    def separate(x_TD: jax.Array, hidden_TD: jax.Array, weight_D: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden_TD = hidden_TD + lax.psum(x_TD, AXIS)
        return hidden_TD, layers.rmsnorm(hidden_TD, weight_D, 1e-5)

    return separate


def norm_chain(by: str, x_TD: jax.Array, weight_D: jax.Array, calls: int) -> jax.Array:
    """At least ``calls`` fused steps, each on the normed output of the last; ``x_TD`` is the residual."""
    run = norm_step(by, *x_TD.shape)

    def several(_: jax.Array, normed_TD: jax.Array) -> jax.Array:
        for _unrolled in range(NORM_CALLS):
            normed_TD = run(normed_TD, x_TD, weight_D)[1]
        return normed_TD

    return lax.fori_loop(0, -(-calls // NORM_CALLS), several, x_TD)


def norm_error(by: str, base_NTD: jax.Array, weight_D: jax.Array, calls: int) -> jax.Array:
    """Largest error of ``norm_step``'s normed output, in bf16 steps (2^-8) of the expected value.

    Hidden values are integers, exact in bf16: another one counts as infinite error.
    """
    me = lax.axis_index(AXIS)
    run = norm_step(by, *base_NTD.shape[1:])

    def call(i: jax.Array, worst: jax.Array) -> jax.Array:
        residual_TD = message(base_NTD[0] + 5, i)
        hidden_TD, normed_TD = run(message(base_NTD[me], i), residual_TD, weight_D)
        parts_NTD = message(base_NTD, i).astype(jnp.float32)
        exact_TD = residual_TD.astype(jnp.float32) + jnp.sum(parts_NTD, axis=0)
        scale_T1 = lax.rsqrt(jnp.mean(exact_TD * exact_TD, axis=1, keepdims=True) + 1e-5)
        want_TD = exact_TD * scale_T1 * jnp.broadcast_to(weight_D, exact_TD.shape).astype(jnp.float32)
        error_TD = jnp.abs(normed_TD.astype(jnp.float32) - want_TD) / (jnp.abs(want_TD) + 1e-30) * 256
        exact = jnp.all(hidden_TD.astype(jnp.float32) == exact_TD)
        return jnp.maximum(worst, jnp.where(exact, jnp.max(error_TD), jnp.inf))

    return lax.fori_loop(0, calls, call, jnp.zeros((), jnp.float32))


def allreduce(config: Mapping[str, Any], out: Findings, hows: Sequence[str]) -> None:
    """Correctness over thousands of calls and the time of one, by size, for some ways to reduce."""
    c, ranks = config["allreduce"], config["ranks"]
    if not on_gpu() and any(WAYS[how].by == "mosaic" for how in hows):
        for kib in c["kib"]:
            out.missing(f"allreduce.n{ranks}.{kib}.mosaic.us", ON_CPU)
        return
    mesh = make_mesh(ranks)
    jobs = {
        (kib, how, kind): job
        for how in hows
        for kib in (c["kib"] if how in EVERY_SIZE else c["few_kib"])
        for kind, job in _jobs(config, mesh, kib, how).items()
    }
    compiled = compile_all(jobs, {key: _options(*key[1:]) for key in jobs})
    for task in (_check, _time, _trace):  # the trace last: with it a collective was once seen to hang
        for (kib, how, kind), program in compiled.items():
            if kind != ("check" if task is _check else "time") or (
                task is _trace and kib not in c["traced_kib"]
            ):
                continue
            name = f"allreduce.n{ranks}.{kib}.{how}"
            missing = f"{name}.{ {_check: 'wrong', _time: 'wall_us', _trace: 'us'}[task] }"
            if isinstance(program, Exception):
                out.missing(missing, f"{type(program).__name__}: {program}".splitlines()[0][:300])
                continue
            run = functools.partial(program, *jobs[kib, how, kind][1])
            with out.turn():
                try:
                    task(out, name, how, run, c, ranks)
                except Exception as error:  # one cell of many
                    out.missing(missing, f"{type(error).__name__}: {error}".splitlines()[0][:300])


def _options(how: str, kind: str) -> dict[str, Any]:
    if not on_gpu():
        return {}
    # CUDA graphs also under the profiler: a call is timed as it runs.
    timed = {"xla_enable_command_buffers_during_profiling": True} if kind == "time" else {}
    return {**options(WAYS[how].options), **timed}


def _jobs(config: Mapping[str, Any], mesh: Mesh, kib: int, how: str) -> dict[str, tuple[Any, tuple]]:
    """The checking and the timed program of one size and one way."""
    c, ranks, by = config["allreduce"], config["ranks"], WAYS[how].by
    rows, width = kib * 512 // c["width"], c["width"]
    rng = np.random.default_rng([config["seed"], kib])
    base_NTD = jnp.asarray(rng.integers(0, 17, (ranks, rows, width)), jnp.int32)
    x_NTD = jnp.asarray(rng.standard_normal((ranks, rows, width)), jnp.bfloat16)
    weight_D = jnp.asarray(1 + 0.1 * rng.standard_normal(width), jnp.bfloat16)
    base_NTD, weight_D = jax.device_put((base_NTD, weight_D), NamedSharding(mesh, WHOLE))
    x_NTD = jax.device_put(x_NTD, NamedSharding(mesh, SPLIT))
    if how.endswith("_norm"):

        def check_norm(base_NTD: jax.Array, weight_D: jax.Array) -> jax.Array:
            return norm_error(by, base_NTD, weight_D, c["check_calls"])[None]

        def time_norm(x_1TD: jax.Array, weight_D: jax.Array) -> jax.Array:
            return norm_chain(by, x_1TD[0], weight_D, c["time_calls"])

        return {
            "check": (mapped(mesh, check_norm, (WHOLE, WHOLE), SPLIT), (base_NTD, weight_D)),
            "time": (mapped(mesh, time_norm, (SPLIT, WHOLE)), (x_NTD, weight_D)),
        }

    exchanges = EXCHANGES if how == "mosaic_exchange" else 1

    def check(base_NTD: jax.Array) -> jax.Array:
        return count_wrong(reducer(by, rows, width, exchanges), base_NTD, c["check_calls"] // exchanges)[None]

    def timed(x_1TD: jax.Array) -> jax.Array:
        return chain(reducer(by, rows, width, exchanges), x_1TD[0], ranks, c["time_calls"] // exchanges)

    return {
        "check": (mapped(mesh, check, (WHOLE,), SPLIT), (base_NTD,)),
        "time": (mapped(mesh, timed, (SPLIT,)), (x_NTD,)),
    }


def _check(
    out: Findings, name: str, how: str, run: Callable[[], Any], c: Mapping[str, Any], ranks: int
) -> None:
    worst = float(np.asarray(run()).max())
    if name.endswith("_norm"):
        out.metric(f"{name}.worst_bf16_steps", min(worst, 1e9))
    else:
        out.metric(f"{name}.wrong", int(worst))
    out.metric(f"{name}.calls", c["check_calls"])


def _calls(how: str, c: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """Calls of a timed program, and exchanges of each."""
    exchanges = EXCHANGES if how == "mosaic_exchange" else 1
    if how.endswith("_norm"):
        return NORM_CALLS * -(-c["time_calls"] // NORM_CALLS), 1
    return chained_calls(ranks, c["time_calls"] // exchanges), exchanges


def _time(
    out: Findings, name: str, how: str, run: Callable[[], Any], c: Mapping[str, Any], ranks: int
) -> None:
    if not on_gpu():
        jax.block_until_ready(run())
        return out.missing(f"{name}.wall_us", ON_CPU)
    calls, exchanges = _calls(how, c, ranks)
    median_s, spread_s = seconds(run, c["repeats"])
    out.metric(f"{name}.wall_us", median_s / calls / exchanges * 1e6)
    return out.metric(f"{name}.wall_spread_us", spread_s / calls / exchanges * 1e6)


def _trace(
    out: Findings, name: str, how: str, run: Callable[[], Any], c: Mapping[str, Any], ranks: int
) -> None:
    if not on_gpu():
        return out.missing(f"{name}.us", ON_CPU)
    calls, exchanges = _calls(how, c, ranks)
    seen = profile(run, calls, WAYS[how].kernel)
    # Of many exchanges in a launch the kernel's own time counts, of calls also the way from one to the next.
    out.metric(f"{name}.us", seen.kernel_us / exchanges if exchanges > 1 else seen.us)
    out.metric(f"{name}.kernel_us", seen.kernel_us / exchanges)
    out.metric(f"{name}.launches", seen.launches)
    kernels: dict[str, float] = {}
    for title, us in seen.kernels.items():  # XLA numbers its kernels
        plain = re.sub(r"\d+", "#", title)
        kernels[plain] = round(kernels.get(plain, 0.0) + us, 3)
    return out.note(f"{name}.kernels", dict(list(kernels.items())[:4]))
