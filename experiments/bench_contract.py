"""The kernels' contracts on the real path of a GPU, before anything is timed: hostile inputs against oracles.

The tests run the same cases in the interpreter, which replaces register code by array code; only here do the
instructions that will be timed compute. Each case records ``contract.<operation>.<case>.err``; an operation
whose cases all hold records ``contract.<operation>.passed``.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Collection, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench_mla, bench_moe
from kvmem import record
from pallas_kernels import int4_inline, int4_moe, mla_prologue, ref, router, skinny_matmul
from pallas_kernels.mla_decode import LAYOUTS, Pool

PROLOGUE = (("bf16", 1), ("bf16", 5), ("fp8_flat", 1), ("fp8_flat", 11), ("fp8_656", 5), ("fp8_656", 72))
# Instructions of the GPU round a reciprocal root and a fused product otherwise than the oracle: a last bit in
# f32, which moves a rounding to bf16 or e4m3 once in thousands of values.
MOVED = 2e-3
LOADS = ("uniform", "one", "zipf")
MOE_TOKENS = (1, 9, 70)
ROUTER_TOKENS = (1, 9, 21, 70)  # a token, one block of threads, a launch each, several blocks
# tokens, groups, columns, first, rows, k, epsilon, gated
PRODUCTS = (
    (1, 1, 7168, 0, 2112, 7168, 1e-5, False),
    (8, 1, 2112, 0, 1536, 1536, 1e-5, False),
    (3, 8, 512, 0, 1024, 512, None, False),
    (13, 1, 1048, 24, 48, 1024, 1e-5, False),
    (32, 1, 256, 0, 64, 256, None, False),
    (9, 1, 7168, 0, 512, 7168, None, True),
)


def prologue(layout: str, tokens: int) -> float:
    """The share of stored values that differ from the oracle's, none by more than one step."""
    case = ref.mla_prologue_case(layout, tokens, 8, 128)
    want_query, want_pool, want_lost = ref.mla_prologue(case, layout)
    names = ("values", "scales", "rope")
    device = jax.tree.map(jnp.asarray, case)
    turn = mla_prologue.turns(*(jnp.asarray(f(case["angle"]), jnp.float32) for f in (np.cos, np.sin)))
    kernel = functools.partial(
        mla_prologue.mla_prologue, layout=layout, epsilon=ref.PROLOGUE_EPSILON, first=ref.PROLOGUE_FIRST,
        scale=ref.PROLOGUE_SCALE if layout == "fp8_flat" else None,
    )  # fmt: skip
    query, pool, lost = jax.jit(kernel)(
        *(device[name] for name in ("q", "compressed", "norm", "w_uk", "weights_layer")),
        Pool(*(device["pool"].get(name) for name in names)), device["layer"], device["page"],
        device["offset"], turn,
    )  # fmt: skip
    moved = 0.0
    for name, want in want_pool.items():
        got = np.asarray(getattr(pool, name))
        if got.dtype == np.float32:
            apart = np.abs(got - want) > 2.0**-22 * np.abs(want)
            steps = np.where(apart, 2, 0)
        else:
            steps = np.abs(got.astype(np.int64) - want.astype(np.int64))
        if steps.max() > 1:
            raise RuntimeError(f"{name} differs by {steps.max()} steps at {np.argwhere(steps > 1)[0]}")
        written = (tokens if tokens < 4 else tokens - 2) * want.shape[-1]
        moved = max(moved, steps.sum() / written)
    if moved > MOVED:
        raise RuntimeError(f"{moved:.1e} of the stored values differ")
    if (got_lost := np.asarray(lost).sum(axis=0).tolist()) != want_lost.tolist():
        raise RuntimeError(f"counted {got_lost} lost values, {want_lost.tolist()} were")
    error = bench_mla.worst_row_error(np.asarray(query, np.float32), want_query)
    if not error < 2.0**-8:  # one rounding to bf16
        raise RuntimeError(f"the query is off by {error:.1e}")
    return float(moved)


def product(
    tokens: int, groups: int, columns: int, first: int, rows: int, k: int, epsilon: float | None, gated: bool
) -> float:
    """The worst error of a token's row of the few-token product, in f64 against the same bf16 inputs."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, groups, columns)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((2, rows, k)) / k**0.5, jnp.bfloat16)
    kernel = jax.jit(
        functools.partial(skinny_matmul.skinny_matmul, epsilon=epsilon, first=first, gated=gated)
    )
    x_64, w_64 = np.asarray(x, np.float64)[:, :, first : first + k], np.asarray(w, np.float64)[1]
    want = np.einsum("tgk,gok->tgo", x_64, w_64.reshape(groups, -1, k)).reshape(tokens, rows)
    if epsilon is not None:
        want /= np.sqrt(np.mean(x_64[:, 0] ** 2, axis=1, keepdims=True) + epsilon)
    add = jnp.asarray(rng.standard_normal((tokens, rows // 2 if gated else rows)), jnp.bfloat16)
    if gated:
        gate, up = np.split(want, 2, axis=1)
        want = gate / (1 + np.exp(-gate)) * up
    want = want + np.asarray(add, np.float64)
    error = bench_mla.worst_row_error(np.asarray(kernel(x, w, jnp.int32(1), add), np.float32), want)
    if not error < 2.0**-8:  # one rounding to bf16 of sums in f32
        raise RuntimeError(f"error {error:.1e}")
    return error


def experts(tokens: int, load: str, choices: int = 3) -> float:
    """The worst error of a token through few experts at the kernel's rank width, under any load."""
    rng = np.random.default_rng(tokens)
    e, d, f, group = max(7, choices + 1), 1024, 256, 32
    score = rng.random((tokens, e))
    if load == "zipf":
        score = rng.gumbel(size=score.shape) - 1.5 * np.log(np.arange(1, e + 1))
    if load == "one":  # one expert gets every token, another none
        score[:, 1], score[:, 0] = 9.0, -9.0

    def ints(*shape):
        return jnp.asarray(rng.integers(-8, 8, shape), jnp.int4)

    def scales(*shape, fan):
        return jnp.asarray(rng.uniform(0.5, 1.5, shape) / (4.6 * fan**0.5), jnp.bfloat16)

    arguments = (
        jnp.asarray(rng.standard_normal((tokens, d)), jnp.bfloat16),
        jnp.asarray(np.argsort(-score, axis=1)[:, :choices], jnp.int32),
        jnp.asarray(rng.dirichlet(np.ones(choices), tokens) * 2.5, jnp.float32),
        ints(2, e, 2 * f, d),
        scales(2, e, 2 * f, d // group, fan=d),
        ints(2, e, d, f),
        scales(2, e, d, f // group, fan=f),
        jnp.int32(1),
    )
    out = jax.jit(functools.partial(int4_moe.int4_moe, group=group))(*arguments)
    error = bench_moe.worst_row_error(out.astype(jnp.float32), ref.int4_moe(*arguments, group=group))
    if not error < 6e-3:  # tests/kernels/test_int4_moe.py derives it
        raise RuntimeError(f"error {error:.1e}")
    return error


def router_of_tokens(tokens: int, load: str) -> float:
    """The worst error of a router weight; experts, their order and the tokens' K order are exact."""
    rng = np.random.default_rng(tokens)
    e, choices, factor, block = 96, 8, 2.5, 8
    logit, bias = rng.standard_normal((tokens, e)), 0.1 * rng.standard_normal(e)
    if load == "one":  # one expert that every token chooses
        bias[e // 2] = 2.0
    if load == "ties":
        logit, bias = np.round(logit), np.zeros(e)
    logit, bias = (a.astype(np.float32).astype(np.float64) for a in (logit, bias))
    x = jnp.asarray(rng.standard_normal((tokens, 256)), jnp.bfloat16)
    kernel = functools.partial(router.choose_and_route, choices=choices, factor=factor, tokens=block)
    expert, weight, prepared = jax.jit(kernel)(
        jnp.asarray(logit, jnp.float32), jnp.asarray(bias, jnp.float32), x, jnp.int32(2)
    )
    score = 1 / (1 + np.exp(-logit))
    want = np.argsort(-(score + bias), axis=1, kind="stable")[:, :choices]
    if (np.asarray(expert) != want).any():
        raise RuntimeError(f"token {np.argwhere(np.asarray(expert) != want)[0, 0]} chose other experts")
    if prepared is not None:
        order = np.argsort(want.ravel(), kind="stable")
        count = np.bincount(want.ravel(), minlength=e)
        routing = jax.tree.map(np.asarray, prepared.routing)
        columns = routing.block[:3, : routing.block[3, 0]].T.tolist()
        first = np.cumsum(count) - count
        if columns != [
            [expert + 2 * e, first[expert] + done, min(block, count[expert] - done)]
            for expert in range(e)
            for done in range(0, count[expert], block)
        ]:
            raise RuntimeError("blocks are cut otherwise")
        if (routing.token != order // choices).any() or (
            routing.position.ravel()[order] != np.arange(order.size)
        ).any():
            raise RuntimeError("slots are ordered otherwise")
        if (np.asarray(prepared.x_TD) != np.asarray(int4_inline.permute_k(x))).any():
            raise RuntimeError("tokens are permuted otherwise")
    picked = np.take_along_axis(score, want, 1)
    error = np.abs(np.asarray(weight) - factor * picked / picked.sum(1, keepdims=True)).max()
    if not error < factor * 16 * 2.0**-24:  # tests/kernels/test_router.py derives it
        raise RuntimeError(f"error {error:.1e}")
    return float(error)


def cases() -> Iterator[tuple[str, str, Callable[[], float]]]:
    """(operation, case, what returns its error or raises)."""
    for layout in LAYOUTS:
        for tokens, heads in bench_mla.CONTRACT_COLUMNS:
            operation = "mla_decode" if tokens * heads <= 16 else "mla_decode_wide"  # kernels of their own
            case = functools.partial(bench_mla.contract, layout, tokens, heads)
            yield operation, f"{layout}.t{tokens}.h{heads}", case
    yield "mla_decode", "beyond_32_bits", bench_mla.contract_beyond_32_bits
    for layout, tokens in PROLOGUE:
        yield "mla_prologue", f"{layout}.m{tokens}", functools.partial(prologue, layout, tokens)
    for load in LOADS:
        for tokens in MOE_TOKENS:
            yield "int4_moe", f"{load}.m{tokens}", functools.partial(experts, tokens, load)
    yield "int4_moe", "eight.m1", functools.partial(experts, 1, "uniform", 8)  # the kernel for one token
    for load in ("uniform", "one", "ties"):
        for tokens in ROUTER_TOKENS:
            case = functools.partial(router_of_tokens, tokens, load)
            yield "router", f"{load}.m{tokens}", case
    for arguments in PRODUCTS:
        tokens, groups, _, _, rows, k, *_ = arguments
        name = f"m{tokens}.g{groups}.o{rows}.k{k}"
        yield "skinny_matmul", name, functools.partial(product, *arguments)


def run(recorder: record.Recorder, operations: Collection[str], threads: int = 8) -> set[str]:
    """Runs and records the cases of these operations; returns the operations of which one fails."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        results = [(op, name, pool.submit(case)) for op, name, case in cases() if op in operations]
    broken: set[str] = set()
    for operation, name, result in results:
        key = f"contract.{operation}.{name}"
        try:
            recorder.metric(f"{key}.err", result.result())
        except Exception as error:
            broken.add(operation)
            recorder.absent(key, f"{type(error).__name__}: {error}"[:300])
            print(f"{key}: {error}"[:300], flush=True)
    for operation in sorted(operations):
        recorder.metric(f"contract.{operation}.passed", float(operation not in broken))
    return broken
