"""Routed experts with INT4 weights: gate-up, SwiGLU, down, weighted sum (Mosaic GPU).

Slots (token, chosen expert) are sorted by expert and cut into blocks of at most N slots of one expert. One
persistent kernel walks items of two kinds, first (block, tile of gate and up rows), then (block, tile of
down rows); a last XLA fusion weights and sums a token's rows. A producer warpgroup streams tiles of INT4
weights and scales through shared memory, and every other warpgroup turns 64 rows of them into bf16 in
registers, where they are the A operand of wgmma; tokens are its N side, so that a block of 8 costs 8 columns,
not 64. Weights depend on no other block of threads: while the producer waits for the hidden activation of a
block (a semaphore counts its finished tiles), the down weights already fill the pipeline.

The row of a slot depends on nothing but its token and its expert: the result of a token has the same bits
whatever else is in the batch. Few slots do not fill the GPU with items; ``k_splits`` then cuts K of the first
product, and the partial sums are added, in a fixed order, by whoever reads them.

Both products reorder K inside runs of 128 (:func:`pallas_kernels.int4_inline.permute_k`).
"""

# mypy: disable-error-code="abstract"
# (the transforms are declared as protocols with empty bodies)
from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int4, Int32

from pallas_kernels import int4_inline as inline
from pallas_kernels import int4_single, moe_route, router
from pallas_kernels.common import tuned

MAX_BLOCK = 128  # tokens of a block
SMEM_BYTES = 232_448
_PRODUCER_REGISTERS = 40
_LAG = 2  # gathers in flight before their barrier is told


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles.

    Attributes:
        tokens: slots of a block (N).
        warpgroups: warpgroups that multiply, 64 rows of weights each.
        stages: stages of the pipeline.
        k_splits: parts of K of the first product, more than one for the smallest batches only.
        chunk: K of a step, 256 or 128; 128 also where D or F is no multiple of 256.
        ctas: blocks of threads; all of them must fit on the GPU at once.
    """

    tokens: int = 8
    warpgroups: int = 4
    stages: int = 5
    k_splits: int = 1
    chunk: int = 256
    ctas: int = 132


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static sizes of a call."""

    config: Config
    d: int
    f: int
    group: int
    experts: int
    blocks: int
    slots: int
    single: bool = False  # one token: its slots are the blocks
    sim: bool = False

    @property
    def chunk(self) -> int:
        """K of a step."""
        return self.config.chunk if self.d % 256 == 0 and self.f % 256 == 0 else 128

    @property
    def rows(self) -> int:
        """Weight rows of an item."""
        return 64 * self.config.warpgroups

    @property
    def up_tiles(self) -> int:
        return 2 * self.f // self.rows

    @property
    def down_tiles(self) -> int:
        return self.d // self.rows

    @property
    def up_steps(self) -> int:
        return self.d // (self.chunk * self.config.k_splits)

    @property
    def down_steps(self) -> int:
        return self.f // self.chunk

    @property
    def down_groups(self) -> int:
        return self.f // self.group

    @property
    def boxed(self) -> bool:
        """Whether down's scales come as boxes of 8 groups; else as whole rows of 1, 2 or 4 groups."""
        return self.down_groups % 8 == 0

    @property
    def columns(self) -> int:
        """Accumulator columns that pass through shared memory at a time."""
        return min(self.config.tokens, inline.COLUMNS)

    @property
    def arrivals(self) -> int:
        """Copies that fill a stage: two of weights, two of scales or one a warpgroup, one of activations."""
        return 5 if self.boxed else max(5, 3 + self.config.warpgroups)

    @property
    def hidden(self) -> jax.ShapeDtypeStruct:
        rows = self.blocks * self.config.tokens
        if self.config.k_splits > 1:
            return jax.ShapeDtypeStruct((self.config.k_splits * rows, 2 * self.f), jnp.float32)
        return jax.ShapeDtypeStruct((rows, self.f), jnp.bfloat16)

    @property
    def out(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.slots, self.d), jnp.bfloat16)

    def scratch(self) -> dict:
        c = self.config
        scratch = {
            "x_smem": _swizzled((c.stages, c.tokens, self.chunk), jnp.bfloat16, 128, 64),
            "w_smem": _swizzled((c.stages, self.rows, self.chunk), jnp.int4, self.chunk // 2, self.chunk),
            "scale_smem": plgpu.SMEM((c.stages, self.rows, 8), jnp.bfloat16),
            "staged_smem": plgpu.SMEM((c.warpgroups, 64 * (self.columns + 1)), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=self.arrivals, num_barriers=c.stages),
            "free": plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages),
            "token_smem": plgpu.SMEM((max(c.tokens, 32),), jnp.int32),
        }
        if not self.boxed:
            scratch["flat_smem"] = plgpu.SMEM((c.stages, self.rows * self.down_groups), jnp.bfloat16)
        return scratch

    def smem_bytes(self) -> int:
        c = self.config
        stage = 2 * c.tokens * self.chunk + self.rows * (self.chunk // 2 + 16)
        flat = 0 if self.boxed else 2 * self.rows * self.down_groups
        return c.stages * (stage + flat) + 4 * c.warpgroups * 64 * (self.columns + 1)


def _swizzled(shape: tuple[int, ...], dtype, swizzle: int, columns: int):
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _div(a, b: int):
    return lax.div(a, jnp.int32(b))


def _rem(a, b: int):
    return lax.rem(a, jnp.int32(b))


def _loop(first, last, function) -> None:
    def step(i, carry):
        function(i)
        return carry

    lax.fori_loop(first, last, step, None)


def _kernel(p: _Plan, refs: dict, phases: tuple[int, ...]) -> None:
    """What one block of threads does. Phase 1 makes the hidden activation, phase 2 reads it."""
    c, n, chunk, stages = p.config, p.config.tokens, p.chunk, p.config.stages
    block_gmem, hidden_gmem = refs["block"], refs["hidden"]
    x_smem, w_smem, scale_smem = refs["x_smem"], refs["w_smem"], refs["scale_smem"]
    full, free = refs["full"], refs["free"]
    fused = phases == (1, 2)
    ready = pl.get_global(plgpu.SemaphoreType.REGULAR((p.blocks,))) if fused else None
    cta, worker = lax.axis_index("cta"), lax.axis_index("worker")
    count = jnp.int32(p.blocks) if p.single else block_gmem[3, 0]
    up_items, down_items = count * (p.up_tiles * c.k_splits), count * p.down_tiles
    # Who has an item less of the first kind gets ``ahead`` more of the second, as many as take the same time,
    # of blocks that are ready by then; the others are dealt out in turns.
    rounds = _div(up_items, c.ctas)
    fuller = up_items - rounds * c.ctas
    idler = c.ctas - fuller
    ready_items = jnp.minimum(_div(rounds * c.ctas, p.up_tiles * c.k_splits) * p.down_tiles, down_items)
    ahead = jnp.minimum(p.up_steps // p.down_steps, lax.div(ready_items, idler))
    ahead = jnp.where(fuller > 0, ahead, 0)
    turned = _rem(cta + idler, c.ctas)
    first_mine = jnp.where(cta >= fuller, ahead, 0)
    dealt = ahead * idler
    up_mine = _div(up_items - cta + (c.ctas - 1), c.ctas) if 1 in phases else jnp.int32(0)
    down_mine = first_mine + jnp.maximum(_div(down_items - dealt - turned + (c.ctas - 1), c.ctas), 0)
    down_mine = down_mine if 2 in phases else jnp.int32(0)
    base, total = up_mine * p.up_steps, up_mine * p.up_steps + down_mine * p.down_steps
    half = p.rows // 2

    def expert_of(b):
        return block_gmem[b] + refs["layer"][0] * p.experts if p.single else block_gmem[0, b]

    def slots_of(b):
        """(first slot, slots) of a block."""
        return (b, jnp.int32(1)) if p.single else (block_gmem[1, b], block_gmem[2, b])

    def up_item(nth):
        item = cta + nth * c.ctas
        return (
            _div(item, p.up_tiles * c.k_splits),
            _rem(_div(item, c.k_splits), p.up_tiles),
            _rem(item, c.k_splits),
        )

    def down_item(nth):
        in_turns = dealt + (nth - first_mine) * c.ctas + turned
        item = jnp.where(nth < first_mine, nth * idler + turned, in_turns)
        return _div(item, p.down_tiles), _rem(item, p.down_tiles)

    def produce():
        if not p.sim:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        def take(i):
            slot = _rem(i, stages)
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            return slot

        def pad(slot, arrivals):
            for _ in range(p.arrivals - arrivals):
                plgpu.barrier_arrive(full.at[slot])

        def halves(w_gmem, scale_gmem, expert, first_rows, k0, slot):
            ks, done = pl.ds(k0, chunk), full.at[slot]
            groups = pl.ds(pl.multiple_of(_div(k0, p.group * 8) * 8, 8), 8)
            for i, first in enumerate(first_rows):
                source, target = pl.ds(pl.multiple_of(first, half), half), pl.ds(i * half, half)
                plgpu.copy_gmem_to_smem(w_gmem.at[expert, source, ks], w_smem.at[slot, target], done)
                if scale_gmem is not None:
                    scales = scale_gmem.at[expert, source, groups]
                    plgpu.copy_gmem_to_smem(scales, scale_smem.at[slot, target], done)

        def wait_gather(pending):
            if p.sim:
                plgpu.commit_smem()
            else:
                inline.wait_gather(pending)

        def up(nth):
            b, m, split = up_item(nth)
            expert, (first, size) = expert_of(b), slots_of(b)
            if not p.sim:
                inline.load_tokens(refs["token"], refs["token_smem"], first, size)

            def step(k):
                i = nth * p.up_steps + k
                slot = take(i)
                k0 = pl.multiple_of((split * p.up_steps + k) * chunk, chunk)
                halves(refs["w_up"], refs["s_up"], expert, (m * half, p.f + m * half), k0, slot)
                pad(slot, 5)
                if p.sim:
                    _sim_gather_rows(refs["x"], refs["token"], x_smem.at[slot], first, size, k0)
                else:
                    inline.gather_rows(refs["x"], refs["token_smem"], x_smem.at[slot], size, k0)

                @pl.when(i >= _LAG)
                def _():
                    wait_gather(_LAG)
                    plgpu.barrier_arrive(full.at[_rem(i - _LAG, stages)])

            _loop(0, p.up_steps, step)

        def down_expert(i):
            return expert_of(jnp.minimum(down_item(_div(i, p.down_steps))[0], p.blocks - 1))

        def down_weights(i, expert):
            nth, k = _div(i, p.down_steps), _rem(i, p.down_steps)
            _, m = down_item(nth)
            slot = take(base + i)
            first, k0 = m * p.rows, pl.multiple_of(k * chunk, chunk)
            scale_gmem = refs["s_down"] if p.boxed else None
            halves(refs["w_down"], scale_gmem, expert, (first, first + half), k0, slot)
            if p.boxed:
                pad(slot, 5)
                return
            size = 64 * p.down_groups
            for r in range(c.warpgroups):
                source = pl.ds(pl.multiple_of(first * p.down_groups + r * size, size), size)
                target = refs["flat_smem"].at[slot, pl.ds(r * size, size)]
                plgpu.copy_gmem_to_smem(refs["s_down"].at[expert, source], target, full.at[slot])
            pad(slot, 3 + c.warpgroups)

        def down_hidden(i):
            nth, k = _div(i, p.down_steps), _rem(i, p.down_steps)
            b, _ = down_item(nth)
            slot = _rem(base + i, stages)
            if ready is not None:
                tiles = p.up_tiles * c.k_splits * c.warpgroups
                plgpu.semaphore_wait(ready.at[b], tiles, decrement=False, memory_scope="gpu")
                inline.fence_async()
            first, k0 = pl.multiple_of(b * n, n), pl.multiple_of(k * chunk, chunk)
            if c.k_splits == 1:
                source = hidden_gmem.at[pl.ds(first, n), pl.ds(k0, chunk)]
                plgpu.copy_gmem_to_smem(source, x_smem.at[slot], full.at[slot])
                return
            gather = _sim_gather_swiglu if p.sim else inline.gather_swiglu
            gather(hidden_gmem, x_smem.at[slot], first, slots_of(b)[1], k0, splits=c.k_splits)
            plgpu.barrier_arrive(full.at[slot])

        def each_last(steps, last, function):
            _loop(last - steps, last, lambda i: pl.when(i >= 0)(lambda: function(_rem(i, stages))))

        if 1 in phases:
            _loop(0, up_mine, up)
            wait_gather(0)
            each_last(_LAG, base, lambda slot: plgpu.barrier_arrive(full.at[slot]))
        if 2 in phases:
            lead = stages - 2  # weights run ahead of what waits for other blocks of threads

            def down_step(i, expert):
                following = down_expert(i + lead + 1)  # a step early, so that nobody waits for it
                pl.when(i >= 0)(lambda: down_hidden(i))
                pl.when(i + lead < total - base)(lambda: down_weights(i + lead, expert))
                return following

            lax.fori_loop(-lead, total - base, down_step, down_expert(jnp.int32(0)))
        each_last(stages, total, lambda slot: plgpu.barrier_wait(free.at[slot]))

    def multiply():
        if not p.sim:
            plgpu.set_max_registers(_worker_registers(c.warpgroups), action="increase")
        staged = refs["staged_smem"].at[worker]

        def product(first_step, steps, warp_rows, scales_of, row_stride, first_chunk):
            """[64, N] f32: this warpgroup's rows of an item times the block's columns."""

            def enter(k):
                slot = _rem(first_step + k, stages)
                plgpu.barrier_wait(full.at[slot])
                return slot, scales_of(slot), _rem(_div((first_chunk + k) * chunk, p.group), row_stride)

            def step(k, acc):
                slot, scales, group = enter(k)
                weights = inline.dequantize(
                    w_smem.at[slot], scales, warp_rows, group, group=p.group, row_stride=row_stride
                )
                for j, part in enumerate(weights):
                    plgpu.wgmma(acc, part, x_smem.at[slot, :, pl.ds(64 * j, 64)].T)
                    if n > 16:  # else a chunk's weights and the accumulator do not fit in registers
                        plgpu.wgmma_wait(1 if n <= 32 else 0)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            def sim_step(k, acc):
                slot, scales, group = enter(k)
                s = scales[...].reshape(p.rows, row_stride)
                s = lax.dynamic_slice(s, (jnp.int32(0), group), (p.rows, chunk // p.group))
                w = w_smem[slot].astype(jnp.bfloat16) * jnp.repeat(s, p.group, axis=1)
                w = jnp.concatenate([lax.dynamic_slice_in_dim(w, first, 32) for first in warp_rows])
                x = x_smem[slot]
                plgpu.commit_smem()  # the detector wants a fence between these reads and the next copy
                plgpu.barrier_arrive(free.at[slot])
                contract = (((1,), (1,)), ((), ()))
                return acc + lax.dot_general(
                    inline.permute_k(w), x, contract, preferred_element_type=jnp.float32
                )

            if p.sim:
                return lax.fori_loop(0, steps, sim_step, jnp.zeros((64, n), jnp.float32))

            def run(acc):
                _loop(0, steps, lambda k: step(k, acc))
                return acc[...]

            return pl.run_scoped(run, plgpu.ACC((64, n), jnp.float32))

        def up(nth):
            b, m, split = up_item(nth)
            rows = (worker * 32, half + worker * 32)
            first_chunk, (_, size) = split * p.up_steps, slots_of(b)
            acc = product(
                nth * p.up_steps, p.up_steps, rows, lambda slot: scale_smem.at[slot], 8, first_chunk
            )
            first_row = (split * p.blocks + b) * n
            store = _sim_store_up if p.sim else _store_up
            store(p, acc, staged, hidden_gmem, first_row, size, m * half + worker * 32)
            if ready is not None:
                inline.fence_async()
                plgpu.semaphore_signal(ready.at[b], 1, memory_scope="gpu")

        def down(nth):
            b, m = down_item(nth)
            rows = (worker * 64, worker * 64 + 32)
            scales, stride = (scale_smem, 8) if p.boxed else (refs["flat_smem"], p.down_groups)
            first_step, (first, size) = base + nth * p.down_steps, slots_of(b)
            acc = product(first_step, p.down_steps, rows, lambda slot: scales.at[slot], stride, 0)
            store = _sim_store_down if p.sim else _store_down
            store(p, acc, staged, refs["out"], first, size, m * p.rows + worker * 64)

        if 1 in phases:
            _loop(0, up_mine, up)
        if 2 in phases:
            _loop(0, down_mine, down)

    pl.when(worker == c.warpgroups)(produce)
    pl.when(worker < c.warpgroups)(multiply)


def _call(p: _Plan, phases: tuple[int, ...], inputs: dict, outputs: dict) -> tuple[jax.Array, ...]:
    def body(*refs, **scratch):
        _kernel(p, dict(zip([*inputs, *outputs], refs, strict=True)) | scratch, phases)

    return plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=p.scratch(),
        grid=(p.config.ctas,),
        grid_names=("cta",),
        num_threads=p.config.warpgroups + 1,
        thread_name="worker",
        kernel_name="int4_moe",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not p.sim),
    )(*inputs.values())


def _worker_registers(workers: int) -> int:
    """What the launch's pool leaves each worker: asking for more would wait for ever."""
    pool = 65_536 // (128 * (workers + 1)) // 8 * 8 * (workers + 1)
    return min(240, (pool - _PRODUCER_REGISTERS) // workers // 8 * 8)


def _store_up(p: _Plan, acc, staged, hidden_gmem, first_row, rows, first_feature) -> None:
    for first in range(0, p.config.tokens, p.columns):
        inline.put_columns(acc, staged, first, p.columns)
        where = (staged, hidden_gmem, first_row, rows, first_feature)
        if p.config.k_splits > 1:
            inline.store_partial(*where, count=p.columns)
        else:
            inline.store_swiglu(*where, first=first, count=p.columns)


def _store_down(p: _Plan, acc, staged, out_gmem, first_row, rows, first_column) -> None:
    for first in range(0, p.config.tokens, p.columns):
        inline.put_columns(acc, staged, first, p.columns)
        inline.store_rows(staged, out_gmem, first_row, rows, first_column, first=first, count=p.columns)


# The same in array code, for the interpreter. Features keep their order between the two phases.


def _sim_gather_rows(x_gmem, token_gmem, x_smem, first_slot, rows, first_column) -> None:
    for n in range(x_smem.shape[0]):

        @pl.when(n < rows)
        def _(n=n):
            x_smem[n, :] = x_gmem[token_gmem[first_slot + n], pl.ds(first_column, x_smem.shape[1])]


def _sim_gather_swiglu(partial_gmem, x_smem, first_row, rows, first_column, *, splits) -> None:
    n, chunk = x_smem.shape
    split_rows, f = partial_gmem.shape[0] // splits, partial_gmem.shape[1] // 2
    at = [pl.ds(split * split_rows + first_row, n) for split in range(splits)]
    gate = sum(partial_gmem[rows, pl.ds(first_column, chunk)] for rows in at)
    up = sum(partial_gmem[rows, pl.ds(f + first_column, chunk)] for rows in at)
    x_smem[...] = inline.permute_k((jax.nn.silu(gate) * up).astype(jnp.bfloat16))
    plgpu.commit_smem()


def _sim_store_up(p: _Plan, acc, staged, hidden_gmem, first_row, rows, first_feature) -> None:
    gate, up = acc[:32].T, acc[32:].T
    to = pl.ds(first_row, p.config.tokens)
    if p.config.k_splits > 1:
        hidden_gmem[to, pl.ds(first_feature, 32)] = gate
        hidden_gmem[to, pl.ds(p.f + first_feature, 32)] = up
    else:
        hidden_gmem[to, pl.ds(first_feature, 32)] = (jax.nn.silu(gate) * up).astype(jnp.bfloat16)


def _sim_store_down(p: _Plan, acc, staged, out_gmem, first_row, rows, first_column) -> None:
    for n in range(p.config.tokens):

        @pl.when(n < rows)
        def _(n=n):
            out_gmem[first_row + n, pl.ds(first_column, 64)] = acc[:, n].astype(jnp.bfloat16)


def choose_config(slots: int, d: int, f: int) -> Config:
    """Tiles for a batch of T * K slots: the first row of tuned/h200.json whose bound on slots holds.

    ``k_splits`` of 0 there means: as many parts of K as fill the blocks of threads with one item each.
    """
    for row in tuned("int4_moe"):
        if row["max_slots"] is None or slots <= row["max_slots"]:
            config = Config(**{key: value for key, value in row.items() if key != "max_slots"})
            if config.k_splits:
                return config
            plan = _Plan(dataclasses.replace(config, k_splits=1), d, f, 32, slots, slots, slots)
            fits = config.ctas // max(1, slots * plan.up_tiles)
            splits = max(
                s for s in range(1, plan.up_steps + 1) if plan.up_steps % s == 0 and s <= max(1, fits)
            )
            return dataclasses.replace(config, k_splits=splits)
    raise ValueError(f"tuned/h200.json has no row for {slots} slots")


def cost(expert_rows: float, slots: int, *, d: int, f: int, group: int) -> tuple[float, int]:
    """(bytes, FLOPs) that ``slots`` slots over ``expert_rows`` distinct experts must move and do."""
    weights = expert_rows * 3 * f * d
    moved = weights / 2 + 2 * weights / group + 2 * slots * (2 * d + 2 * f)
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
    prepared: router.Prepared | None = None,
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
        config: tiles; by default from tuned/h200.json, or the kernel for one token (``int4_single``).
        prepared: ``router.route`` of ``expert_TK`` and ``x_TD`` into blocks of ``config.tokens``, if done.
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
    single = config is None and not sim and int4_single.supported(rows, choices, d, f)
    config = config or choose_config(rows * choices, d, f)
    arguments = (x_TD, expert_TK, weight_TK, w_gate_up, s_gate_up, w_down, s_down)
    _check(*arguments, group, config)
    if single:
        return int4_single.int4_single(*arguments, layer, group=group)
    blocks = moe_route.num_blocks(rows * choices, experts, config.tokens)
    single = rows == 1
    p = _Plan(config, d, f, group, experts, blocks, rows * choices, single, sim)
    _check_plan(p)
    with jax.named_scope("route"):
        layer = jnp.asarray(layer, jnp.int32)
        if single or sim:
            route = functools.partial(moe_route.route, num_experts=experts, tokens=config.tokens)
            routing = moe_route.single(expert_TK) if single else route(expert_TK, layer)
            prepared = router.Prepared(routing, inline.permute_k(x_TD))
        elif prepared is None:
            prepared = router.route(expert_TK, x_TD, layer, num_experts=experts, tokens=config.tokens)
    stack = layers * experts
    down_scales = (stack, d, p.down_groups) if p.boxed else (stack, d * p.down_groups)
    inputs = {
        "x": prepared.x_TD,
        "token": prepared.routing.token,
        "block": prepared.routing.block,
        "layer": layer.reshape(1),
        "w_up": w_gate_up.reshape(stack, two_f, d),
        "s_up": s_gate_up.reshape(stack, two_f, d // group),
        "w_down": w_down.reshape(stack, d, f),
        "s_down": s_down.reshape(down_scales),
    }
    with jax.named_scope("int4_moe"):
        if sim:  # the interpreter has no semaphores: two launches
            (hidden,) = _call(p, (1,), inputs, {"hidden": p.hidden})
            hidden = hidden if config.k_splits > 1 else inline.permute_k(hidden)
            (out,) = _call(p, (2,), inputs | {"hidden": hidden}, {"out": p.out})
        else:
            _, out = _call(p, (1, 2), inputs, {"hidden": p.hidden, "out": p.out})
    with jax.named_scope("combine"):
        picked = out[prepared.routing.position].astype(jnp.float32)
        return jnp.sum(picked * weight_TK[:, :, None], axis=1).astype(jnp.bfloat16)


def int4_moe_of_logits(
    x_TD: BFloat16[Array, "T D"],
    logit_TE: Float32[Array, "T E"],
    bias_E: Float32[Array, " E"],
    w_gate_up: Int4[Array, "Y E F2 D"],
    s_gate_up: BFloat16[Array, "Y E F2 G"],
    w_down: Int4[Array, "Y E D F"],
    s_down: BFloat16[Array, "Y E D H"],
    layer: Array | int,
    *,
    choices: int,
    factor: float,
    normalise: bool = True,
    group: int,
) -> BFloat16[Array, "T D"]:
    """``int4_moe`` behind the router's product: ``router.choose`` gives the experts and their weights."""
    rows, d = x_TD.shape
    config = choose_config(rows * choices, d, w_gate_up.shape[2] // 2)
    with jax.named_scope("router"):
        expert_TK, weight_TK, prepared = router.choose_and_route(
            logit_TE, bias_E, x_TD, layer,
            choices=choices, factor=factor, normalise=normalise, tokens=config.tokens,
        )  # fmt: skip
    return int4_moe(
        x_TD,
        expert_TK,
        weight_TK,
        w_gate_up,
        s_gate_up,
        w_down,
        s_down,
        layer,
        group=group,
        prepared=prepared,
    )


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


def _check_plan(p: _Plan) -> None:
    c = p.config
    if c.chunk not in (128, 256):
        raise ValueError(f"chunk={c.chunk}: 128 or 256 columns a step")
    if not 1 <= c.warpgroups <= 4:
        raise ValueError(f"{c.warpgroups} warpgroups, 1 to 4 are possible")
    for name, outs in (("2F", 2 * p.f), ("D", p.d)):
        if outs % p.rows:
            raise ValueError(f"{name}={outs} does not divide into items of {p.rows} rows")
    if c.k_splits < 1 or p.d % (p.chunk * c.k_splits):
        raise ValueError(f"D={p.d} does not divide into {c.k_splits} parts of steps of {p.chunk}")
    if c.k_splits > 1 and c.tokens > inline.COLUMNS:
        raise ValueError(f"k_splits={c.k_splits} needs blocks of {inline.COLUMNS} tokens or fewer")
    if (
        not p.sim and jax.default_backend() == "gpu"
    ):  # a block that waits for one without a place waits for ever
        places = getattr(jax.devices()[0], "core_count", c.ctas)
        if c.ctas > places:
            raise NotImplementedError(f"ctas={c.ctas}: this GPU has {places} multiprocessors, one block each")
    if c.stages <= _LAG:
        raise ValueError(f"{c.stages} stages, more than {_LAG} are needed")
    if p.smem_bytes() > SMEM_BYTES - 1024:
        raise ValueError(f"{p.smem_bytes()} bytes of shared memory, {SMEM_BYTES - 1024} is the most")


__all__ = ["Config", "choose_config", "cost", "int4_moe", "int4_moe_of_logits"]
