"""Routed experts with INT4 weights: gate-up, SwiGLU, down, weighted sum (Mosaic GPU).

Slots (token, chosen expert) are sorted by expert and cut into blocks of at most N slots of one expert. Two
persistent kernels walk (block, tile of weight rows) items: ``gate_up`` gathers a block's tokens and writes
silu(gate) * up of the block, ``down`` writes one row of output per slot; a last XLA fusion weights and sums
a token's rows. In both, a producer warpgroup streams tiles of INT4 weights and scales through shared
memory, and every other warpgroup turns 64 rows of them into bf16 in registers, where they are the A operand
of wgmma; tokens are its N side, so that a block of 8 costs 8 columns, not 64. The row of a slot depends on
nothing but its token and its expert: the result of a token has the same bits whatever else is in the batch.

Both products reorder K inside runs of 128 (:func:`pallas_kernels.int4_inline.permute_k`).
"""

# mypy: disable-error-code="abstract"
# (the transforms are declared as protocols with empty bodies)
from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int4, Int32

from pallas_kernels import int4_inline as inline

MAX_BLOCK = 128  # tokens of a block
SMEM_BYTES = 232_448
_PRODUCER_REGISTERS = 40
_LAG = 2  # gathers in flight before their barrier is told


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of one product: warpgroups along weight rows (64 each), along K, stages of the pipeline."""

    warpgroups_m: int = 4
    warpgroups_k: int = 1
    stages: int = 5


@dataclasses.dataclass(frozen=True)
class Config:
    """``tokens``: slots of a block (N). ``early_down``: the second kernel starts while the first drains."""

    tokens: int = 8
    gate_up: Tiles = Tiles()
    down: Tiles = Tiles()
    ctas: int = 132
    early_down: bool = False


class Routing(NamedTuple):
    """Blocks of slots. Arrays are i32.

    Attributes:
        token: [T * K] token of each slot, slots sorted by expert.
        block: [4, blocks] the expert (counted over all layers), first slot and number of slots of each
            block; the last row repeats how many blocks there are. Columns past that number mean nothing.
        position: [T, K] sorted position of a token's k-th choice.
    """

    token: jax.Array
    block: jax.Array
    position: jax.Array


def num_blocks(slots: int, num_experts: int, tokens: int) -> int:
    """Most blocks that any routing of ``slots`` slots can make."""
    return min(slots, num_experts + slots // tokens)


def route(expert_TK: Int32[Array, "T K"], layer: Array | int, *, num_experts: int, tokens: int) -> Routing:
    """Sort slots by expert and cut them into blocks, without a sort: a few reductions over (slots, slots)."""
    rows, choices = expert_TK.shape
    slots = rows * choices
    layer = jnp.asarray(layer, jnp.int32)
    slot = jnp.arange(slots, dtype=jnp.int32)
    if rows == 1:
        one = jnp.ones_like(slot)
        block = jnp.stack([expert_TK[0] + layer * num_experts, slot, one, slots * one])
        return Routing(jnp.zeros_like(slot), block, slot[None])
    expert = expert_TK.reshape(slots)
    blocks = num_blocks(slots, num_experts, tokens)
    same = expert[None, :] == expert[:, None]
    rank = jnp.sum(same & (slot[None, :] < slot[:, None]), axis=1, dtype=jnp.int32)
    build = _route_by_slot if slots <= 1024 else _route_by_expert
    token, position, fields, count = build(expert, slot, rank, same, blocks, num_experts, tokens, choices)
    owner, first, size = fields
    block = jnp.stack([owner + layer * num_experts, first, size, jnp.broadcast_to(count, (blocks,))])
    return Routing(token, block, position.reshape(rows, choices))


def _route_by_slot(expert, slot, rank, same, blocks, num_experts, tokens, choices):
    """Reductions over pairs of slots only: the fewest launches."""
    earlier = (expert[None, :] < expert[:, None]) | (same & (slot[None, :] < slot[:, None]))
    position = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    size = jnp.minimum(jnp.sum(same, axis=1, dtype=jnp.int32) - rank, tokens)
    leads = rank % tokens == 0
    block = jnp.sum(leads[None, :] & (position[None, :] < position[:, None]), axis=1, dtype=jnp.int32)
    chosen = leads[None, :] & (block[None, :] == jnp.arange(blocks, dtype=jnp.int32)[:, None])
    fields = jnp.stack([expert, position, size])
    fields = jnp.sum(jnp.where(chosen[None], fields[:, None, :], 0), axis=2, dtype=jnp.int32)
    at = position[None, :] == slot[:, None]
    token = jnp.sum(jnp.where(at, slot[None, :] // choices, 0), axis=1, dtype=jnp.int32)
    return token, position, fields, jnp.sum(leads, dtype=jnp.int32)


def _route_by_expert(expert, slot, rank, same, blocks, num_experts, tokens, choices):
    """Reductions over (experts, slots): for many slots."""
    which = jnp.arange(num_experts, dtype=jnp.int32)
    count_E = jnp.sum(expert[None, :] == which[:, None], axis=1, dtype=jnp.int32)
    before = which[None, :] < which[:, None]
    first_E = jnp.sum(jnp.where(before, count_E[None, :], 0), axis=1, dtype=jnp.int32)
    blocks_E = (count_E + (tokens - 1)) // tokens
    block_E = jnp.sum(jnp.where(before, blocks_E[None, :], 0), axis=1, dtype=jnp.int32)
    position = first_E[expert] + rank
    token = jnp.zeros_like(slot).at[position].set(slot // choices, unique_indices=True)
    index = jnp.arange(blocks, dtype=jnp.int32)
    owner = jnp.sum(block_E[None, :] <= index[:, None], axis=1, dtype=jnp.int32) - 1
    done = (index - block_E[owner]) * tokens
    size = jnp.clip(count_E[owner] - done, 0, tokens)
    return token, position, (owner, first_E[owner] + done, size), block_E[-1] + blocks_E[-1]


class _Product(NamedTuple):
    """Static description of one grouped product, x [rows, K] times w [experts, outs, K]."""

    swiglu: bool  # gate and up, tokens gathered, else plain rows with x already in blocks
    tokens: int
    outs: int
    k: int
    group: int
    tiles: Tiles
    ctas: int
    early: bool
    sim: bool

    @property
    def chunk(self) -> int:
        """K of a warpgroup's step."""
        return 256 if self.k % 256 == 0 else 128

    @property
    def steps(self) -> int:
        return self.k // (self.chunk * self.tiles.warpgroups_k)

    @property
    def workers(self) -> int:
        return self.tiles.warpgroups_m * self.tiles.warpgroups_k

    @property
    def rows(self) -> int:
        """Weight rows of an item: half gate and half up, or one run."""
        return 64 * self.tiles.warpgroups_m

    @property
    def item_tiles(self) -> int:
        return self.outs // self.rows

    @property
    def row_groups(self) -> int:
        return self.k // self.group

    @property
    def boxed(self) -> bool:
        """Whether scales come as boxes of 8 groups; else as whole rows, which then are 1, 2 or 4 groups."""
        return self.row_groups % 8 == 0

    @property
    def columns(self) -> int:
        """Accumulator columns that pass through shared memory at a time."""
        return min(self.tokens, inline.COLUMNS)

    @property
    def copies(self) -> int:
        """Copies of a stage, the gather counted as one."""
        if self.swiglu:
            return 4 * self.tiles.warpgroups_k + 1
        return self.tiles.warpgroups_k * (2 + (1 if self.boxed else self.tiles.warpgroups_m))

    @property
    def parts(self) -> tuple[int, int]:
        """Runs of weight rows of an item and rows of a run."""
        return (2, self.rows // 2) if self.swiglu else (1, self.rows)

    def scratch(self) -> dict:
        gm, gk, stages = dataclasses.astuple(self.tiles)
        chunk, staged = self.chunk, 64 * (self.columns + 1)
        scales = (*self.parts, 8) if self.boxed else (gm, 64 * self.row_groups)
        scratch = {
            "x_smem": _swizzled((stages, gk, self.tokens, chunk), jnp.bfloat16, 128),
            "w_smem": _swizzled((stages, gk, *self.parts, chunk), jnp.int4, chunk // 2),
            "scale_smem": plgpu.SMEM((stages, gk, *scales), jnp.bfloat16),
            "staged_smem": plgpu.SMEM((gm, gk * staged), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=self.copies, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=self.workers, num_barriers=stages),
        }
        if gk > 1:
            scratch["partial"] = plgpu.Barrier(num_arrivals=gk, num_barriers=gm)
            scratch["summed"] = plgpu.Barrier(num_arrivals=gk, num_barriers=gm)
        return scratch

    def smem_bytes(self) -> int:
        gm, gk, stages = dataclasses.astuple(self.tiles)
        scales = self.rows * 8 if self.boxed else gm * 64 * self.row_groups
        stage = gk * (2 * self.tokens * self.chunk + self.rows * self.chunk // 2 + 2 * scales)
        return stages * stage + 4 * gm * gk * 64 * (self.columns + 1)


def _swizzled(shape: tuple[int, ...], dtype, swizzle: int):
    tile = plgpu.TilingTransform(
        (8, swizzle * 8 // jnp.iinfo(jnp.int4).bits if dtype == jnp.int4 else swizzle // 2)
    )
    return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))


def _grouped(p: _Product, x, token, block, w, scale, out_rows: int) -> jax.Array:
    """The product of every block: [blocks * N, F] bf16 in permuted order, or [slots, D] bf16."""
    gm, gk, stages = dataclasses.astuple(p.tiles)
    n, chunk, steps, workers = p.tokens, p.chunk, p.steps, p.workers
    half = p.outs // 2
    row_stride = 8 if p.boxed else p.row_groups
    div, rem = (lambda a, b: lax.div(a, jnp.int32(b))), (lambda a, b: lax.rem(a, jnp.int32(b)))

    def body(x_gmem, token_gmem, block_gmem, w_gmem, scale_gmem, out_gmem, *, x_smem, w_smem, scale_smem,
    staged_smem,
             full, free, partial=None, summed=None):  # fmt: skip
        cta, worker = lax.axis_index("cta"), lax.axis_index("worker")
        items = block_gmem[3, 0] * p.item_tiles
        mine = jnp.maximum(div(items - cta + (p.ctas - 1), p.ctas), 0)
        total = mine * steps

        def place(nth):
            item = cta + nth * p.ctas
            return div(item, p.item_tiles), rem(item, p.item_tiles)

        def load_weights(expert, m, c, ks, g0, slot):
            done = full.at[slot]
            count, rows = p.parts
            for part in range(count):
                first = pl.multiple_of(part * half + m * rows, rows)
                src = pl.ds(first, rows)
                plgpu.copy_gmem_to_smem(w_gmem.at[expert, src, ks], w_smem.at[slot, c, part], done)
                if p.boxed:
                    source = scale_gmem.at[expert, src, pl.ds(g0, 8)]
                    plgpu.copy_gmem_to_smem(source, scale_smem.at[slot, c, part], done)
            if not p.boxed:
                size = 64 * p.row_groups
                for r in range(gm):
                    first = pl.multiple_of((m * gm + r) * size, size)
                    plgpu.copy_gmem_to_smem(
                        scale_gmem.at[expert, pl.ds(first, size)], scale_smem.at[slot, c, r], done
                    )

        @pl.when(worker == workers)
        def _produce():
            if p.early and p.swiglu:
                plgpu.griddepcontrol_launch_dependents()
            if not p.sim:
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def step(i, _):
                nth, k = div(i, steps), rem(i, steps)
                b, m = place(nth)
                slot = rem(i, stages)

                pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for c in range(gk):
                    k0 = pl.multiple_of((k * gk + c) * chunk, chunk)
                    g0 = pl.multiple_of(div(k0, p.group * 8) * 8, 8)
                    load_weights(block_gmem[0, b], m, c, pl.ds(k0, chunk), g0, slot)
                    x_to = x_smem.at[slot, c]
                    if p.swiglu:
                        gather = _sim_gather_rows if p.sim else inline.gather_rows
                        gather(x_gmem, token_gmem, x_to, block_gmem[1, b], block_gmem[2, b], k0)
                        continue
                    if p.early:  # weights do not depend on the first kernel, its output does

                        @pl.when(i == 0)
                        def _():
                            plgpu.griddepcontrol_wait()

                    first = pl.multiple_of(b * n, n)
                    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(first, n), pl.ds(k0, chunk)], x_to, full.at[slot])
                if p.swiglu:

                    @pl.when(i >= _LAG)
                    def _():
                        wait_gather(_LAG * gk)
                        plgpu.barrier_arrive(full.at[rem(i - _LAG, stages)])

            def wait_gather(pending):
                if p.sim:
                    plgpu.commit_smem()
                else:
                    inline.wait_gather(pending)

            def each(first, function):
                def guarded(i, _):
                    pl.when(i >= 0)(lambda: function(rem(i, stages)))

                lax.fori_loop(first, total, guarded, None)

            lax.fori_loop(0, total, step, None)
            if p.swiglu:
                wait_gather(0)
                each(total - _LAG, lambda slot: plgpu.barrier_arrive(full.at[slot]))
            each(total - stages, lambda slot: plgpu.barrier_wait(free.at[slot]))

        @pl.when(worker < workers)
        def _multiply():
            if not p.sim:
                plgpu.set_max_registers(_worker_registers(workers), action="increase")
            r, c = rem(worker, gm), div(worker, gm)

            def enter(nth, k):
                i = nth * steps + k
                slot = rem(i, stages)
                plgpu.barrier_wait(full.at[slot])
                first_group = rem(div((k * gk + c) * chunk, p.group), row_stride)
                scales = scale_smem.at[slot, c]
                warp_rows = (r * 32, half_rows + r * 32) if p.swiglu else (r * 64, r * 64 + 32)
                return slot, scales, warp_rows, first_group

            half_rows = p.rows // 2

            def accumulate(nth):
                def product(acc):
                    def step(k, _):
                        slot, scales, warp_rows, first_group = enter(nth, k)
                        weights = inline.dequantize(
                            w_smem.at[slot, c],
                            scales,
                            warp_rows,
                            first_group,
                            group=p.group,
                            row_stride=row_stride,
                        )
                        for j, part in enumerate(weights):
                            plgpu.wgmma(acc, part, x_smem.at[slot, c, :, pl.ds(64 * j, 64)].T)
                            if n > 16:  # else a chunk's weights and the accumulator do not fit in registers
                                plgpu.wgmma_wait(1)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[slot])

                    lax.fori_loop(0, steps, step, None)
                    return acc[...]

                return pl.run_scoped(product, plgpu.ACC((64, n), jnp.float32))

            def sim_accumulate(nth):
                def step(k, acc):
                    slot, scales, warp_rows, first_group = enter(nth, k)
                    w = w_smem[slot, c].reshape(p.rows, chunk).astype(jnp.bfloat16)
                    s = scales[...].reshape(p.rows, row_stride)
                    s = lax.dynamic_slice(s, (jnp.int32(0), first_group), (p.rows, chunk // p.group))
                    w = w * jnp.repeat(s, p.group, axis=1)
                    w = jnp.concatenate([lax.dynamic_slice_in_dim(w, first, 32) for first in warp_rows])
                    x = x_smem[slot, c]
                    plgpu.commit_smem()  # the detector wants a fence between these reads and the next copy
                    plgpu.barrier_arrive(free.at[slot])
                    dims = (((1,), (1,)), ((), ()))
                    return acc + lax.dot_general(
                        inline.permute_k(w), x, dims, preferred_element_type=jnp.float32
                    )

                return lax.fori_loop(0, steps, step, jnp.zeros((64, n), jnp.float32))

            def together(barrier):
                """Meet the warpgroups that share this one's rows."""
                if gk > 1:
                    plgpu.barrier_arrive(barrier.at[r])
                    plgpu.barrier_wait(barrier.at[r])

            def item(nth, _):
                b, m = place(nth)
                acc = (sim_accumulate if p.sim else accumulate)(nth)
                tile = m * gm + r
                store = _sim_store if p.sim else _store
                store(p, acc, staged_smem.at[r], out_gmem, block_gmem, b, tile, c, partial, summed, together)

            lax.fori_loop(0, mine, item, None)

    shape = (block.shape[1] * n, half) if p.swiglu else (out_rows, p.outs)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        scratch_types=p.scratch(),
        grid=(p.ctas,),
        grid_names=("cta",),
        num_threads=workers + 1,
        thread_name="worker",
        kernel_name="int4_moe_gate_up" if p.swiglu else "int4_moe_down",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not p.sim),
    )(x, token, block, w, scale)


def _worker_registers(workers: int) -> int:
    """What the launch's pool leaves each worker: asking for more would wait for ever."""
    pool = 65_536 // (128 * (workers + 1)) // 8 * 8 * (workers + 1)
    return min(240, (pool - _PRODUCER_REGISTERS) // workers // 8 * 8)


def _store(p: _Product, acc, staged, out_gmem, block_gmem, b, tile, c, partial, summed, together) -> None:
    size = 64 * (p.columns + 1)
    for first in range(0, p.tokens, p.columns):
        if not p.swiglu:
            inline.put_columns(acc, staged, first, p.columns)
            inline.store_rows(
                staged, out_gmem, block_gmem[1, b], block_gmem[2, b], tile * 64, first=first, count=p.columns
            )
            continue
        inline.put_columns(acc, staged.at[pl.ds(c * size, size)], first, p.columns)
        together(partial)
        store = functools.partial(
            inline.store_swiglu, staged, out_gmem, b * p.tokens + first, tile * 32,
            parts=p.tiles.warpgroups_k, count=p.columns,
        )  # fmt: skip
        if p.tiles.warpgroups_k == 1:
            store()
        else:
            pl.when(c == 0)(store)
        together(summed)


def _sim_gather_rows(x_gmem, token_gmem, x_smem, first_slot, rows, first_column) -> None:
    for n in range(x_smem.shape[0]):

        @pl.when(n < rows)
        def _(n=n):
            x_smem[n, :] = x_gmem[token_gmem[first_slot + n], pl.ds(first_column, x_smem.shape[1])]


def _sim_store(p: _Product, acc, staged, out_gmem, block_gmem, b, tile, c, partial, summed, together) -> None:
    """What :func:`_store` does, in array code for the interpreter; features keep their order."""
    if not p.swiglu:
        for n in range(p.tokens):

            @pl.when(n < block_gmem[2, b])
            def _(n=n):
                out_gmem[block_gmem[1, b] + n, pl.ds(tile * 64, 64)] = acc[:, n].astype(jnp.bfloat16)

        return
    gk, size = p.tiles.warpgroups_k, 64 * p.tokens
    if gk > 1:
        staged[pl.ds(c * size, size)] = acc.reshape(size)
    together(partial)

    @pl.when(c == 0)
    def _():
        total = acc if gk == 1 else staged[pl.ds(0, gk * size)].reshape(gk, 64, p.tokens).sum(0)
        hidden = (jax.nn.silu(total[:32]) * total[32:]).T.astype(jnp.bfloat16)
        out_gmem[pl.ds(b * p.tokens, p.tokens), pl.ds(tile * 32, 32)] = hidden

    together(summed)


@functools.cache
def _tuned() -> list[dict]:
    path = pathlib.Path(__file__).parent / "tuned" / "h200.json"
    return json.loads(path.read_text())["int4_moe"]


def choose_config(slots: int, num_experts: int) -> Config:
    """Tiles for a batch of T * K slots: the first row of tuned/h200.json whose bound on slots holds."""
    for row in _tuned():
        if row["max_slots"] is None or slots <= row["max_slots"]:
            gate_up, down = Tiles(**row["gate_up"]), Tiles(**row["down"])
            return Config(row["tokens"], gate_up, down, early_down=row["early_down"])
    raise ValueError(f"tuned/h200.json has no row for {slots} slots")


def cost(expert_rows: int, slots: int, *, d: int, f: int, group: int) -> tuple[int, int]:
    """(bytes, FLOPs) that ``slots`` slots over ``expert_rows`` distinct experts must move and do."""
    weights = expert_rows * 3 * f * d
    moved = weights // 2 + 2 * weights // group + 2 * slots * (2 * d + 2 * f)
    return moved, 2 * slots * 3 * f * d


def int4_moe(
    x_TD: BFloat16[Array, "T D"],
    expert_TK: Int32[Array, "T K"],
    weight_TK: Float32[Array, "T K"],
    w_gate_up: Int4[Array, "Y E F2 D"],
    s_gate_up: BFloat16[Array, "Y E F2 G"],
    w_down: Int4[Array, "Y E D F"],
    s_down: BFloat16[Array, "Y E D H"],
    layer: Array | int,
    *,
    group: int,
    config: Config | None = None,
    sim: bool = False,
) -> BFloat16[Array, "T D"]:
    """Weighted sum of a token's K experts, each down(silu(gate(x)) * up(x)).

    Args:
        x_TD: tokens, T from 1 to 4,096 or more.
        expert_TK: experts of each token, in [0, E), distinct in a row.
        weight_TK: router weights.
        w_gate_up: gate rows, then up rows, K-minor; every layer of the stack.
        s_gate_up: their scales, ``group`` columns share one.
        w_down, s_down: likewise.
        layer: which layer of the stack, a traced i32 or an int.
        group: 32, 64 or 128.
        config: tiles; by default from tuned/h200.json.
        sim: array code in place of register-level code, for the GPU interpreter.

    Returns:
        [T, D] bf16. Products are accumulated in f32; a weight times its scale, the hidden activation, an
        expert's output and the result are each rounded to bf16 once.

    Raises:
        ValueError: shapes, dtypes or tiles that contradict each other.
        NotImplementedError: what the kernel does not support.
    """
    layers, experts, two_f, d = w_gate_up.shape
    f, (rows, choices) = two_f // 2, expert_TK.shape
    config = config or choose_config(rows * choices, experts)
    _check(x_TD, expert_TK, weight_TK, w_gate_up, s_gate_up, w_down, s_down, group, config)
    product = functools.partial(
        _Product, tokens=config.tokens, group=group, ctas=config.ctas, early=config.early_down, sim=sim
    )
    first = product(swiglu=True, outs=two_f, k=d, tiles=config.gate_up)
    second = product(swiglu=False, outs=d, k=f, tiles=config.down)
    _check_tiles(first)
    _check_tiles(second)
    with jax.named_scope("route"):
        routing = route(expert_TK, layer, num_experts=experts, tokens=config.tokens)
    stack = layers * experts
    w_up, s_up = w_gate_up.reshape(stack, two_f, d), s_gate_up.reshape(stack, two_f, d // group)
    shape = (stack, d, f // group) if second.boxed else (stack, d * (f // group))
    with jax.named_scope("gate_up"):
        hidden = _grouped(first, inline.permute_k(x_TD), routing.token, routing.block, w_up, s_up, 0)
    if sim:
        hidden = inline.permute_k(hidden)
    with jax.named_scope("down"):
        out = _grouped(
            second, hidden, routing.token, routing.block, w_down.reshape(stack, d, f), s_down.reshape(shape),
            rows * choices,
        )  # fmt: skip
    with jax.named_scope("combine"):
        picked = out[routing.position].astype(jnp.float32)
        return jnp.sum(picked * weight_TK[:, :, None], axis=1).astype(jnp.bfloat16)


def _check(
    x_TD, expert_TK, weight_TK, w_gate_up, s_gate_up, w_down, s_down, group: int, config: Config
) -> None:
    layers, experts, two_f, d = w_gate_up.shape
    f = two_f // 2
    if group not in (32, 64, 128):
        raise NotImplementedError(f"group {group}: the kernel has scales of 32, 64 or 128 columns")
    if two_f % 2 or d % 128 or f % 128:
        raise NotImplementedError(f"D={d}, F={f}: the kernel works on multiples of 128")
    for name, array, dtype, shape in (
        ("x_TD", x_TD, jnp.bfloat16, (x_TD.shape[0], d)),
        ("expert_TK", expert_TK, jnp.int32, (x_TD.shape[0], expert_TK.shape[1])),
        ("weight_TK", weight_TK, jnp.float32, expert_TK.shape),
        ("w_gate_up", w_gate_up, jnp.int4, (layers, experts, two_f, d)),
        ("s_gate_up", s_gate_up, jnp.bfloat16, (layers, experts, two_f, d // group)),
        ("w_down", w_down, jnp.int4, (layers, experts, d, f)),
        ("s_down", s_down, jnp.bfloat16, (layers, experts, d, f // group)),
    ):
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}, not {jnp.dtype(dtype)}{list(shape)}"
            )
    if d // group % 8:
        raise NotImplementedError(f"D={d}, group {group}: rows of D / group scales must be multiples of 8")
    if f // group % 8 and f // group > 4:
        raise NotImplementedError(
            f"F={f}, group {group}: rows of F / group scales are 1, 2, 4 or multiples of 8"
        )
    if not 0 < expert_TK.shape[1] <= experts:
        raise ValueError(f"{expert_TK.shape[1]} experts a token of {experts}")
    n = config.tokens
    if n % 8 or not 8 <= n <= MAX_BLOCK or (n > inline.COLUMNS and n % inline.COLUMNS):
        raise ValueError(f"blocks of {n} tokens: a multiple of 8 up to 32, or 64, 96 or 128")


def _check_tiles(p: _Product) -> None:
    name = "gate_up" if p.swiglu else "down"
    gm, gk, stages = dataclasses.astuple(p.tiles)
    if p.outs % p.rows:
        raise ValueError(f"{name}: {p.outs} rows do not divide into items of {p.rows} (warpgroups_m={gm})")
    if p.k % (p.chunk * gk):
        raise ValueError(f"{name}: K={p.k} does not divide into steps of {p.chunk * gk} (warpgroups_k={gk})")
    if gk > 1 and (not p.swiglu or p.tokens > inline.COLUMNS):
        raise ValueError(
            f"{name}: warpgroups_k={gk} needs the gate-up product and blocks of 32 tokens or fewer"
        )
    if stages <= _LAG:
        raise ValueError(f"{name}: {stages} stages, more than {_LAG} are needed")
    if p.workers > 7:
        raise ValueError(f"{name}: {p.workers} warpgroups, 7 is the most")
    if p.smem_bytes() > SMEM_BYTES - 1024:
        raise ValueError(f"{name}: {p.smem_bytes()} bytes of shared memory, {SMEM_BYTES - 1024} is the most")


__all__ = ["Config", "Routing", "Tiles", "choose_config", "cost", "int4_moe", "num_blocks", "route"]
