"""The INT4 experts of one rank of TP = 8 on a GPU, beside the best rival: microseconds, bytes, error."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench_timing
from kvmem import record
from kvmem.models import get_config
from kvmem.models.config import ModelConfig
from pallas_kernels import int4_moe

RANKS = 8
NAMES = {"kimi": "kimi_k2.6", "glm": "glm_5.2"}
# Marlin MoE built for sm_90, graph-timed on an H200 at these rank shapes, g32, uniform routing: microseconds.
MARLIN_US = {
    "kimi": {1: 34.3, 8: 94.4, 16: 153.5, 32: 237.3, 64: 353.8, 256: 509.7, 1024: 854.7},
    "glm": {1: 30.5, 8: 86.5, 16: 125.8, 32: 185.1, 64: 245.0, 256: 319.2, 1024: 628.0},
}
# Six roundings to bf16, each 1.6e-3 in the mean square, and half as much again for the worst row
# (tests/kernels/test_int4_moe.py). The same roundings, emulated on inputs like these: 4.0e-3, and 4.6e-3 in
# the worst of 24 rows.
TOLERANCE = 6e-3


def weights(model: ModelConfig, group: int, layers: int, seed: int) -> tuple[jax.Array, ...]:
    """Random INT4 experts of a rank, [Y, E, 2F, D] and [Y, E, D, F], with scales that keep values near 1."""
    e, d, f = model.num_experts, model.hidden_size, model.expert_ffn_size // RANKS

    @functools.partial(jax.jit, static_argnums=(1,))
    def ints(key, shape):
        # Symmetric: a mean would push all tokens in one direction, and with it to the same experts.
        return jax.random.randint(key, shape, -7, 8, dtype=jnp.int8).astype(jnp.int4)

    @functools.partial(jax.jit, static_argnums=(1,))
    def scales(key, shape):
        fan = shape[-1] * group
        return (jax.random.uniform(key, shape, minval=0.5, maxval=1.5) / (4.6 * fan**0.5)).astype(
            jnp.bfloat16
        )

    def stack(make, key, *shape):
        return jnp.stack([make(k, shape) for k in jax.random.split(key, layers)])

    keys = jax.random.split(jax.random.key(seed), 4)
    return (
        stack(ints, keys[0], e, 2 * f, d),
        stack(scales, keys[1], e, 2 * f, d // group),
        stack(ints, keys[2], e, d, f),
        stack(scales, keys[3], e, d, f // group),
    )


def batch(
    model: ModelConfig, tokens: int, seed: int, load: str = "uniform"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens with drawn, distinct experts and router weights.

    ``load``: "uniform"; "zipf", the n-th expert drawn in proportion to n^-1.5, so that most get nothing;
    "one", an expert that every token has, the others uniform.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    x_TD = jax.random.normal(keys[0], (tokens, model.hidden_size)).astype(jnp.bfloat16)
    score_TE = jax.random.gumbel(keys[1], (tokens, model.num_experts))
    if load == "zipf":
        score_TE -= 1.5 * jnp.log(jnp.arange(1.0, model.num_experts + 1.0))[None, :]
    elif load == "one":
        score_TE = score_TE.at[:, 1].set(jnp.inf)
    elif load != "uniform":
        raise ValueError(f"load={load!r}: uniform, zipf or one")
    expert_TK = jax.lax.top_k(score_TE, model.experts_per_token)[1].astype(jnp.int32)
    return x_TD, expert_TK, jax.nn.softmax(jax.random.normal(keys[2], expert_TK.shape), axis=1)


@functools.partial(jax.jit, static_argnames=("group",))
def oracle(x_TD, expert_TK, weight_TK, w_up, s_up, w_down, s_down, *, group: int) -> jax.Array:
    """[T, D] f32 of layer 0, one token at a time, dequantised without rounding."""

    def dense(w, s):
        return (w.astype(jnp.float32).reshape(*s.shape, group) * s.astype(jnp.float32)[..., None]).reshape(
            w.shape
        )

    def one(token):
        x_D, expert_K, weight_K = token
        precise = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        both = precise("kfd,d->kf", dense(w_up[0, expert_K], s_up[0, expert_K]), x_D.astype(jnp.float32))
        gate, up = jnp.split(both, 2, axis=1)
        out = precise("kdf,kf->kd", dense(w_down[0, expert_K], s_down[0, expert_K]), jax.nn.silu(gate) * up)
        return jnp.sum(out * weight_K[:, None], axis=0)

    return jax.lax.map(one, (x_TD, expert_TK, weight_TK))


def worst_row_error(out, want) -> float:
    out, want = np.asarray(out, np.float64), np.asarray(want, np.float64)
    return float((np.linalg.norm(out - want, axis=1) / np.linalg.norm(want, axis=1)).max())


class Cell(NamedTuple):
    """What is ready to be timed: ``program(inputs, stacks)`` goes through all of ``inputs``."""

    inputs: list[tuple[jax.Array, jax.Array, jax.Array]]
    program: Callable
    want: jax.Array


def prepare(model: ModelConfig, group: int, tokens: int, load: str, stacks: tuple, seed: int) -> Cell:
    """Inputs, the compiled program, and what the oracle makes of the first tokens of the first input."""
    repetitions = max(2, min(12, 400 // tokens))
    inputs = [batch(model, tokens, seed + i, load) for i in range(repetitions)]
    kernel = jax.jit(functools.partial(int4_moe.int4_moe, group=group))

    @jax.jit
    def program(inputs, stacks):
        return [kernel(*each, *stacks, jnp.int32(0)) for each in inputs]

    some = min(tokens, 64)
    want = oracle(*(a[:some] for a in inputs[0]), *stacks, group=group)
    return Cell(inputs, program.lower(inputs, stacks).compile(), want)


def run(
    name: str,
    group: int,
    batches: Sequence[int],
    recorder: record.Recorder,
    seed: int = 0,
    *,
    loads: Sequence[tuple[int, str]] = (),
    deadline: float = math.inf,
    compilers: int = 8,
) -> list[str]:
    """Measure one model at one group size and record ``int4_moe.<name>.g<group>.m<tokens>.*``; table rows.

    ``batches`` are loaded uniformly; ``loads`` adds (tokens, load) of ``batch``, whose metrics have the
    load's name after the tokens. What ``deadline`` (on time.monotonic) leaves no time for is absent. As many
    threads as ``compilers`` prepare, first the uniform batches, then the others; meanwhile nothing is timed.

    Raises:
        RuntimeError: after the last of them, if some failed or their results are wrong; these are absent.
    """
    rows: list[str] = []
    failures: list[str] = []
    stacks: tuple = ()
    for cells in ([(tokens, "uniform") for tokens in batches], list(loads)):
        ready = {}
        if time.monotonic() <= deadline:
            stacks = stacks or weights(get_config(NAMES[name]), group, 1, seed)
            with concurrent.futures.ThreadPoolExecutor(compilers) as threads:
                for cell in cells:
                    ready[cell] = threads.submit(prepare, get_config(NAMES[name]), group, *cell, stacks, seed)
        for tokens, load in cells:
            key = f"int4_moe.{name}.g{group}.m{tokens}" + ("" if load == "uniform" else f".{load}")
            if time.monotonic() > deadline:
                recorder.absent(f"{key}.us", "the time of this run was used up")
                continue
            try:
                rows.append(_measure(key, name, group, ready.pop((tokens, load)).result(), stacks, recorder))
            except Exception as error:
                failures.append(f"{key}: {type(error).__name__}: {error}"[:300])
                recorder.absent(f"{key}.us", failures[-1])
                print(failures[-1], flush=True)
    if failures:
        raise RuntimeError("; ".join(failures))
    return rows


def _measure(key: str, name: str, group: int, cell: Cell, stacks: tuple, recorder: record.Recorder) -> str:
    model, (tokens, choices) = get_config(NAMES[name]), cell.inputs[0][1].shape
    out = cell.program(cell.inputs, stacks)[0][: cell.want.shape[0]]
    error = worst_row_error(out.astype(jnp.float32), cell.want)
    if not error < TOLERANCE:
        raise RuntimeError(f"error {error:.2e}, tolerance {TOLERANCE}")
    timing = bench_timing.measure(functools.partial(cell.program, cell.inputs, stacks), len(cell.inputs))
    distinct = float(np.mean([len(np.unique(np.asarray(each[1]))) for each in cell.inputs]))
    f = model.expert_ffn_size // RANKS
    moved, flops = int4_moe.cost(distinct, tokens * choices, d=model.hidden_size, f=f, group=group)
    gbps = moved / timing.us / 1e3
    recorder.metric(f"{key}.us", timing.us)
    recorder.metric(f"{key}.err", error)
    recorder.metric(f"{key}.spread", timing.spread)
    recorder.metric(f"{key}.wall_us", timing.wall_us)
    recorder.metric(f"{key}.launches", timing.launches)
    recorder.metric(f"{key}.distinct_experts", distinct)
    recorder.metric(f"{key}.gbps", gbps)
    recorder.metric(f"{key}.tflops", flops / timing.us / 1e6)
    recorder.metric(f"{key}.ceiling_share", gbps / bench_timing.PEAK_GBPS)
    rival = MARLIN_US[name].get(tokens) if key == f"int4_moe.{name}.g32.m{tokens}" else None
    if rival:
        recorder.metric(f"{key}.marlin_us", rival)
    row = (
        f"{key:32s} {timing.us:8.1f} us {gbps:6.0f} GB/s  err {error:.1e} launches {timing.launches:4.1f}"
        + (f"  marlin {rival:6.1f} ({rival / timing.us:.2f}x)" if rival else "")
    )
    print(row, flush=True)
    return row
