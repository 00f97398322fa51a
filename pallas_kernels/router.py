"""The router behind its product: experts, weights and the slots' order by expert, in one launch (Mosaic GPU).

A warp takes a token: its lanes hold the token's scores as sortable u32 words, and K times over the largest
is found with two warp reductions (value, then lowest index). Sorting slots by expert is counting: each warp
counts its 32 slots by ``match``, a thread per expert adds the counts up over warps and, with a scan, over
experts. No comparison of pairs, no sort, and the order does not depend on timing.

Up to 16 tokens one block does both; more take a launch each, of as many blocks as they need. Further blocks
of the launch that sorts put the tokens into the order of K in which the experts' kernel reads them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import int4_inline, moe_route, simt
from pallas_kernels.common import LOG2E, require

THREADS = 512  # of a block that sorts, one a slot; and one an expert
WARPS = THREADS // simt.WARP
FUSED_TOKENS = WARPS  # a warp has one token in a block that does everything


class Prepared(NamedTuple):
    """What the experts' kernel reads of its tokens: slots by expert, x in the order of ``permute_k``."""

    routing: moe_route.Routing
    x_TD: jax.Array


def select(
    t, token, logit_TE, bias_E, expert_TK, weight_TK, slot_expert=None, *,
    experts: int, choices: int, factor: float, normalise: bool,
) -> None:  # fmt: skip
    """Thread program: the choices of one token, by one warp. Shared memory ``slot_expert`` gets a copy.

    The rounds are a loop: code that runs once is bound by the fetching of its instructions.
    """
    lane = t.thread % simt.WARP
    index, key = [], []
    for first in range(0, experts, simt.WARP):
        at = lane + first
        inside = None if first + simt.WARP <= experts else at < experts
        bits = t.bits(
            _sigmoid(t, t.load(logit_TE, token * experts + at, inside)) + t.load(bias_E, at, inside)
        )
        word = t.select((bits >> 31) == 1, ~bits, bits | 0x80000000)  # ordered as the floats are, NaN on top
        key.append(word if inside is None else t.select(inside, word, t.u32(0)))
        index.append(at)

    def take_best(k, carry):
        *words, own = carry
        top = t.warp_max(functools.reduce(t.max, words))
        found = t.u32(experts)
        for at, word in zip(reversed(index), reversed(words), strict=True):
            found = t.select(word == top, at, found)
        found = t.warp_min(found)
        rest = [t.select(at == found, t.u32(0), word) for at, word in zip(index, words, strict=True)]
        return [*rest, t.select(lane == k, found, own)]

    own_expert = t.repeat(choices, take_best, [*key, t.u32(0)])[-1]
    mine = lane < choices
    weight = _sigmoid(t, t.load(logit_TE, token * experts + own_expert))
    if normalise:
        total, distance = t.select(mine, weight, t.f32(0.0)), simt.WARP // 2
        while distance:
            total = total + t.from_lane(total, lane ^ distance)
            distance //= 2
        weight = weight * t.reciprocal(total + 1e-20)
    with t.when(mine):
        slot = token * choices + lane
        t.store(expert_TK, slot, own_expert)
        t.store(weight_TK, slot, weight * factor)
        if slot_expert is not None:
            t.store(slot_expert, slot, own_expert)


def _sigmoid(t, logit):
    return t.reciprocal(t.exp2(logit * -LOG2E) + 1.0)


def _prefix(t, word, warp_total, first: int):
    """(sum over the threads before this one, sum over the block), through WARPS words of shared memory."""
    lane, warp = t.thread % simt.WARP, t.thread // simt.WARP
    inclusive, distance = word, 1
    while distance < simt.WARP:
        has = lane >= distance
        below = t.from_lane(inclusive, t.select(has, lane - distance, lane))
        inclusive = inclusive + t.select(has, below, t.u32(0))
        distance *= 2
    with t.when(lane == simt.WARP - 1):
        t.store(warp_total, warp + first, inclusive)
    t.barrier()
    before, total = inclusive - word, t.u32(0)
    for w in range(WARPS):
        other = t.load(warp_total, t.u32(first + w))
        before = before + t.select(warp > w, other, t.u32(0))
        total = total + other
    return before, total


def rank(
    t, slot_expert, layer, token_slots, block_4N, position_slots, warp_count, table, warp_total, *,
    slots: int, choices: int, experts: int, tokens: int, blocks: int,
) -> None:  # fmt: skip
    """Thread program: order slots by expert, a thread a slot; every block of threads counts all slots.

    Shared memory: ``warp_count`` [WARPS, E]; ``table`` [4, E], slots of other blocks, then of all of them,
    slots of earlier blocks, first slot, first block of slots; ``warp_total`` [2, WARPS].
    """
    lane, warp = t.thread % simt.WARP, t.thread // simt.WARP
    own = t.block * THREADS + t.thread
    real, owner = own < slots, t.thread < experts  # a thread a slot, a thread an expert
    expert = t.load(slot_expert, own, real)
    with t.when(owner):
        for w in range(WARPS):
            t.store(warp_count, t.thread + w * experts, t.u32(0))
        t.store(table, t.thread, t.u32(0))
        t.store(table, t.thread + experts, t.u32(0))
    t.barrier()
    same = t.matching(t.select(real, expert, t.u32(experts)))
    below = t.count_ones(same & ((t.u32(1) << lane) - 1))
    with t.when(real & (below == 0)):
        t.store(warp_count, warp * experts + expert, t.count_ones(same))
    if slots > THREADS:

        def count(i, _):
            slot = i * THREADS + t.thread
            other = t.load(slot_expert, slot, slot < slots)
            with t.when((i != t.block) & (slot < slots)):
                t.increment(table, other)
            with t.when(i < t.block):
                t.increment(table, other + experts)
            return []

        t.repeat(-(-slots // THREADS), count)
    t.barrier()
    before = t.load(table, t.thread + experts, owner)
    here = t.u32(0)
    for w in range(WARPS):
        at = t.thread + w * experts
        counted = t.load(warp_count, at, owner)
        with t.when(owner):
            t.store(warp_count, at, before + here)
        here = here + counted
    size = t.load(table, t.thread, owner) + here
    first, _ = _prefix(t, size, warp_total, 0)
    first_block, all_blocks = _prefix(t, (size + (tokens - 1)) // tokens, warp_total, WARPS)
    with t.when(owner):
        for row, value in ((0, size), (2, first), (3, first_block)):
            t.store(table, t.thread + row * experts, value)
    t.barrier()
    nth = t.load(warp_count, warp * experts + expert, real) + below
    size, first, first_block = (t.load(table, expert + row * experts, real) for row in (0, 2, 3))
    position = first + nth
    with t.when(real):
        t.store(position_slots, own, position)
        t.store(token_slots, position, own // choices)
    with t.when(real & (nth % tokens == 0)):
        block = first_block + nth // tokens
        t.store(block_4N, block, expert + t.load(layer, t.u32(0)) * experts)
        t.store(block_4N, block + blocks, position)
        t.store(block_4N, block + 2 * blocks, t.min(size - nth, t.u32(tokens)))
    with t.when(own == 0):
        t.store(block_4N, t.u32(3 * blocks), all_blocks)


def permute(t, block, x_TD, out_TD, *, size: int) -> None:
    """Thread program: ``int4_inline.permute_k`` of ``size`` bf16, 16 bytes a thread."""
    piece = block * THREADS + t.thread
    with t.when(piece < size // 8):
        within = piece % 16
        words = int4_inline.permuted_words(t, t.load_words(x_TD, piece * 4, 4))
        first = (piece - within) * 4 + within % 4 * 16 + within // 4
        for i, word in enumerate(words):
            t.store_word(out_TD, first + 4 * i, word)


def _choose_program(t, logit, bias, expert, weight, *, rows: int, **static) -> None:
    warp = t.block * 4 + t.thread // simt.WARP
    with t.when(warp < rows):
        select(t, warp, logit, bias, expert, weight, **static)


def _both_program(
    t, logit, bias, layer, x, expert, weight, token, block, position, permuted, slot_expert, *scratch,
    rows: int, size: int, choice: dict, order: dict,
) -> None:  # fmt: skip
    def one(i, _):
        which = i * WARPS + t.thread // simt.WARP
        with t.when(which < rows):
            select(t, which, logit, bias, expert, weight, slot_expert, **choice)
        return []

    with t.when(t.block == 0):
        t.repeat(-(-rows // WARPS), one)
        t.barrier()
        rank(t, slot_expert, layer, token, block, position, *scratch, **order)
    with t.when(t.block > 0):
        permute(t, t.block - 1, x, permuted, size=size)


def _route_program(
    t, expert, layer, x, token, block, position, permuted, *scratch, blocks: int, size: int, order: dict
) -> None:
    with t.when(t.block < blocks):
        rank(t, expert, layer, token, block, position, *scratch, **order)
    with t.when(t.block >= blocks):
        permute(t, t.block - blocks, x, permuted, size=size)


def _launch(
    program, inputs, outputs, scratch=(), *, blocks: int, threads: int, name: str
) -> tuple[jax.Array, ...]:
    def body(*refs):
        simt.run(program, *refs)

    return plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=[plgpu.SMEM(shape, jnp.int32) for shape in scratch],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads // 128,
        thread_name="warpgroup",
        kernel_name=name,
    )(*inputs)


def _order_arguments(rows: int, choices: int, experts: int, tokens: int, x_TD):
    message = f"{experts} experts: the kernel sorts by up to {THREADS}"
    require(experts <= THREADS, message, NotImplementedError)
    found = f"x_TD is {x_TD.dtype}{list(x_TD.shape)}, not bfloat16[{rows}, a multiple of 128]"
    require(x_TD.dtype == jnp.bfloat16 and x_TD.shape[0] == rows and x_TD.shape[1] % 128 == 0, found)
    slots = rows * choices
    blocks = moe_route.num_blocks(slots, experts, tokens)
    static = {"slots": slots, "choices": choices, "experts": experts, "tokens": tokens, "blocks": blocks}
    shapes = [(slots,), (4, blocks), (rows, choices)]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    outputs.append(jax.ShapeDtypeStruct(x_TD.shape, jnp.bfloat16))
    return static, outputs, [(WARPS * experts,), (4 * experts,), (2 * WARPS,)]


def _blocks(work: int) -> int:
    return -(-work // THREADS)


def route(
    expert_TK: Int32[Array, "T K"], x_TD: BFloat16[Array, "T D"], layer: Array | int, *,
    num_experts: int, tokens: int,
) -> Prepared:  # fmt: skip
    """``moe_route.route`` and ``int4_inline.permute_k`` as one kernel; experts in [0, num_experts).

    Raises:
      ValueError: tokens of another shape or dtype.
      NotImplementedError: more experts than a block has threads.
    """
    rows, choices = expert_TK.shape
    order, outputs, scratch = _order_arguments(rows, choices, num_experts, tokens, x_TD)
    inputs = (expert_TK, jnp.asarray(layer, jnp.int32).reshape(1), x_TD)
    blocks = _blocks(rows * choices)
    program = functools.partial(_route_program, blocks=blocks, size=x_TD.size, order=order)
    blocks += _blocks(x_TD.size // 8)
    *routing, permuted = _launch(
        program, inputs, outputs, scratch, blocks=blocks, threads=THREADS, name="moe_route"
    )
    return Prepared(moe_route.Routing(*routing), permuted)


def choose(
    logit_TE: Float32[Array, "T E"], bias_E: Float32[Array, " E"], *,
    choices: int, factor: float, normalise: bool = True,
) -> tuple[Int32[Array, "T K"], Float32[Array, "T K"]]:  # fmt: skip
    """Each token's experts, the ``choices`` largest of sigmoid(logit) + bias, and their weights.

    Ties go to the lower expert. Weights are the unbiased sigmoids, divided by their sum + 1e-20 if
    ``normalise``, times ``factor``. The sigmoid differs from XLA's by a few units of the last place, so
    scores that close may change places. NaN counts as the largest score: its token's experts are K different
    ones in range, and with ``normalise`` all its weights are NaN.

    Raises:
      ValueError: shapes, dtypes or a number of choices that contradict each other.
    """
    static = _check(logit_TE, bias_E, choices, factor, normalise)
    rows = logit_TE.shape[0]
    program = functools.partial(_choose_program, rows=rows, **static)
    outputs = [jax.ShapeDtypeStruct((rows, choices), dtype) for dtype in (jnp.int32, jnp.float32)]
    inputs = (logit_TE, bias_E)
    expert_TK, weight_TK = _launch(program, inputs, outputs, blocks=-(-rows // 4), threads=128, name="router")
    return expert_TK, weight_TK


def choose_and_route(
    logit_TE: Float32[Array, "T E"], bias_E: Float32[Array, " E"], x_TD: BFloat16[Array, "T D"],
    layer: Array | int, *, choices: int, factor: float, tokens: int, normalise: bool = True,
) -> tuple[Int32[Array, "T K"], Float32[Array, "T K"], Prepared | None]:  # fmt: skip
    """``choose``, then ``route`` into blocks of ``tokens`` slots: one launch for few tokens, else two.

    Nothing is prepared for a single token.
    """
    rows, experts = logit_TE.shape
    if rows == 1 or rows > FUSED_TOKENS or rows * choices > THREADS:
        expert_TK, weight_TK = choose(logit_TE, bias_E, choices=choices, factor=factor, normalise=normalise)
        if rows == 1:
            return expert_TK, weight_TK, None
        return expert_TK, weight_TK, route(expert_TK, x_TD, layer, num_experts=experts, tokens=tokens)
    choice = _check(logit_TE, bias_E, choices, factor, normalise)
    order, outputs, scratch = _order_arguments(rows, choices, experts, tokens, x_TD)
    program = functools.partial(_both_program, rows=rows, size=x_TD.size, choice=choice, order=order)
    chosen = [jax.ShapeDtypeStruct((rows, choices), dtype) for dtype in (jnp.int32, jnp.float32)]
    inputs = (logit_TE, bias_E, jnp.asarray(layer, jnp.int32).reshape(1), x_TD)
    expert_TK, weight_TK, *routing, permuted = _launch(
        program, inputs, [*chosen, *outputs], [(THREADS,), *scratch],
        blocks=1 + _blocks(x_TD.size // 8), threads=THREADS, name="router_and_route",
    )  # fmt: skip
    return expert_TK, weight_TK, Prepared(moe_route.Routing(*routing), permuted)


def _check(logit_TE, bias_E, choices: int, factor: float, normalise: bool) -> dict:
    rows, experts = logit_TE.shape
    for name, array, shape in (("logit_TE", logit_TE, (rows, experts)), ("bias_E", bias_E, (experts,))):
        found = f"{name} is {array.dtype}{list(array.shape)}, not float32{list(shape)}"
        require(array.dtype == jnp.float32 and array.shape == shape, found)
    most = min(experts, simt.WARP)
    require(0 < choices <= most, f"choices={choices}: from 1 to {most}, a lane each")
    return {"experts": experts, "choices": choices, "factor": factor, "normalise": normalise}
