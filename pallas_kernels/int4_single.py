"""INT4 experts of a single token, everything in one launch (Mosaic GPU); see ``int4_moe`` for the operation.

With one token the GPU waits, it does not compute: for the launch, for the first bytes, for the exchange of
the hidden activation. So there is no pipeline. Each of 128 blocks of threads asks at once for all the weights
that it will ever need, 200 KB in shared memory: 16 gate and 16 up rows of one expert, and D / 128 rows of the
down matrices of all eight. Everything after that waits only for its own bytes.

wgmma's N side, eight columns, is free to hold eight parts of K: column 2g is the first half and column 2g + 1
the second half of each 256 columns of warpgroup g's quarter of D. Warps 0-1 and 2-3 of a warpgroup hold the
same 32 rows at those two halves; the sums of a row's eight parts are added up in a fixed order. In the second
product columns are experts, of which a warpgroup has two. Router weights are applied in f32, before the one
rounding of the result. x gets the order of ``int4_inline.permute_k`` on its way to shared memory.
"""

# mypy: disable-error-code="abstract"
# (the transforms are declared as protocols with empty bodies)
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from pallas_kernels import int4_inline as inline
from pallas_kernels import simt
from pallas_kernels.common import LOG2E, require, smem_tiles

CHOICES, BLOCKS, WARPGROUPS, FEATURES = 8, 128, 4, 256
PART = 16  # features of a block of threads: CHOICES * FEATURES / BLOCKS
CHUNK = 256  # columns of a copy of weights
X_TILES = smem_tiles(64, 128)
W_TILES = smem_tiles(CHUNK, 128)
THREADS = 128 * WARPGROUPS
PARTS = 2 * WARPGROUPS  # of K


def supported(rows: int, choices: int, d: int, f: int) -> bool:
    """Whether the shapes are those of this kernel: one token, a rank of TP = 8 of either model."""
    return rows == 1 and choices == CHOICES and f == FEATURES and d % (4 * CHUNK) == 0 and d <= 7168


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static sizes of a call. ``sim``, for the interpreter, runs every ``stride``-th block only."""

    d: int
    group: int
    experts: int
    sim: bool = False
    stride: int = 1

    @property
    def chunks(self) -> int:
        """Copies of a warpgroup's quarter of D."""
        return self.d // (WARPGROUPS * CHUNK)

    @property
    def rows(self) -> int:
        """Rows of the result that a block of threads makes."""
        return self.d // BLOCKS

    @property
    def scale_parts(self) -> int:
        """Copies of 16 rows of scales, side by side: quarters if the copy engine takes such short rows."""
        return WARPGROUPS if self.d // self.group % 32 == 0 else 1

    @property
    def down_groups(self) -> int:
        return FEATURES // self.group

    def scratch(self) -> dict:
        extra = CHOICES + 1  # warps read 64 rows of an expert, whose last ones mean nothing
        return {
            "x_smem": plgpu.SMEM((2 * self.chunks, 8, 64), jnp.bfloat16, transforms=X_TILES),
            "hidden_smem": plgpu.SMEM((FEATURES // 64, 8, 64), jnp.bfloat16, transforms=X_TILES),
            "up_smem": plgpu.SMEM((4 * self.chunks, 2 * PART, CHUNK), jnp.int4, transforms=W_TILES),
            "down_smem": plgpu.SMEM((extra, self.rows, CHUNK), jnp.int4, transforms=W_TILES),
            "up_scale_smem": plgpu.SMEM(
                (self.scale_parts, 2 * PART, self.d // self.group // self.scale_parts), jnp.bfloat16
            ),
            "down_scale_smem": plgpu.SMEM((extra, self.rows // 8, 8 * self.down_groups), jnp.bfloat16),
            "sums_smem": plgpu.SMEM((PARTS * 2 * PART,), jnp.float32),
            "rows_smem": plgpu.SMEM((WARPGROUPS * 64,), jnp.float32),
            "up_full": plgpu.Barrier(num_arrivals=2, num_barriers=4 * self.chunks),
            "scale_full": plgpu.Barrier(num_arrivals=2, num_barriers=self.scale_parts),
            "down_full": plgpu.Barrier(num_arrivals=2, num_barriers=CHOICES),
        }


def _spread(t, words, target, row, first_tile, within) -> None:
    """Store 8 consecutive bf16, number ``within`` of a run of 128, as wgmma wants them: two tiles a run."""
    quad, w = within // 4, within % 4
    base = (first_tile + w // 2) * 256 + row * 32
    for i, pair in enumerate(inline.permuted_words(t, words)):
        t.store_word(target, base + (((w % 2) * 4 + i) ^ row) * 4 + quad, pair)


def stage_x(t, x_gmem, x_smem, *, chunks: int) -> None:
    """Thread program: a warpgroup's quarter of x, into rows 2g and 2g + 1 of x_smem."""
    warpgroup, thread, count = t.thread // 128, t.thread % 128, 32 * chunks
    steps = [thread + first for first in range(0, count, 128)]
    pieces = [t.min(piece, t.u32(count - 1)) for piece in steps]
    words = [t.load_words(x_gmem, (warpgroup * count + piece) * 4, 4) for piece in pieces]
    for step, piece, each in zip(steps, pieces, words, strict=True):
        with t.when(step < count):
            half = piece % 32 // 16
            _spread(t, each, x_smem, warpgroup * 2 + half, piece // 32 * 2, piece % 16)
    t.to_wgmma()
    t.warpgroup_barrier()


def stage_hidden(t, hidden_gmem, hidden_smem) -> None:
    """Thread program: the hidden activation of a warpgroup's two experts, a row of hidden_smem each."""
    warpgroup, thread = t.thread // 128, t.thread % 128
    with t.when(thread < 64):
        words = t.load_words(hidden_gmem, (warpgroup * 64 + thread) * 4, 4)
        expert = warpgroup * 2 + thread // 32
        _spread(t, words, hidden_smem, expert, thread % 32 // 16 * 2, thread % 16)
    t.to_wgmma()
    t.warpgroup_barrier()


def _fragment(t):
    """(warpgroup, warp in it, row in a run of 8, place) of this thread; see ``int4_inline``."""
    lane = t.thread % simt.WARP
    q = lane // 4
    return t.thread // 128, t.thread % 128 // simt.WARP, q // 2 + q % 2 * 4, lane % 4


def finish_hidden(t, acc, sums_smem, hidden_gmem) -> None:
    """Thread program: add up the parts of K, then 16 features of silu(gate) * up to global memory."""
    warpgroup, warp, row8, place = _fragment(t)
    with t.when(place == warpgroup):  # who holds columns 2g and 2g + 1
        for half in range(2):
            row = warp % 2 * 16 + row8 + 8 * half
            mine = t.select(warp < 2, acc[2 * half], acc[2 * half + 1])
            t.store(sums_smem, (warpgroup * 2 + warp // 2) * (2 * PART) + row, mine)
    t.barrier()
    with t.when(t.thread < PART // 2):
        value = []
        for j in range(2):
            feature = t.thread * 2 + j
            gate, up = t.f32(0.0), t.f32(0.0)
            for part in range(PARTS):
                gate = gate + t.load(sums_smem, feature + part * 2 * PART)
                up = up + t.load(sums_smem, feature + part * 2 * PART + PART)
            value.append(gate * t.reciprocal(t.exp2(gate * -LOG2E) + 1.0) * up)
        t.store_word(hidden_gmem, t.block * (PART // 2) + t.thread, t.pack(*value))
    with t.when(t.thread < simt.WARP):
        t.warp_barrier()


def finish_rows(t, first, second, weight_gmem, rows_smem, out_gmem, *, rows: int) -> None:
    """Thread program: weigh and add up the experts' rows; ``first`` and ``second`` are a warpgroup's two."""
    warpgroup, warp, row8, place = _fragment(t)
    with t.when(place == warpgroup):  # column 2g belongs to the first of them
        weight = [t.load(weight_gmem, warpgroup * 2 + j) for j in range(2)]
        for half in range(2):
            row = warp * 16 + row8 + 8 * half
            value = first[2 * half] * weight[0] + second[2 * half + 1] * weight[1]
            t.store(rows_smem, warpgroup * 64 + row, value)
    t.barrier()
    with t.when(t.thread < rows // 2):
        value = []
        for j in range(2):
            total = t.f32(0.0)
            for part in range(WARPGROUPS):
                total = total + t.load(rows_smem, t.thread * 2 + (part * 64 + j))
            value.append(total)
        t.store_word(out_gmem, t.block * (rows // 2) + t.thread, t.pack(*value))


def _kernel(p: _Plan, refs: dict, phases: tuple[int, ...]) -> None:
    block, warpgroup = lax.axis_index("block") * p.stride, lax.axis_index("warpgroup")
    ready: Any = None if p.sim else pl.get_global(plgpu.SemaphoreType.REGULAR((WARPGROUPS,)))
    blocks_per_expert = FEATURES // PART
    choice, part = lax.div(block, blocks_per_expert), lax.rem(block, blocks_per_expert)
    first_expert = refs["layer"][0] * p.experts
    up_smem, down_smem = refs["up_smem"], refs["down_smem"]

    if 1 in phases:
        expert = refs["expert"][choice] + first_expert
        rows = [pl.ds(first + part * PART, PART) for first in (0, FEATURES)]
        halves = [pl.ds(half * PART, PART) for half in range(2)]
        width = p.d // p.group // p.scale_parts

        def copy_scales():
            at = warpgroup if p.scale_parts > 1 else jnp.int32(0)
            columns = pl.ds(pl.multiple_of(at * width, 8), width)
            for source, target in zip(rows, halves, strict=True):
                plgpu.copy_gmem_to_smem(
                    refs["s_up"].at[expert, source, columns],
                    refs["up_scale_smem"].at[at, target],
                    refs["scale_full"].at[at],
                )

        pl.when(warpgroup < p.scale_parts)(copy_scales)
        for i in range(p.chunks):
            chunk = warpgroup * p.chunks + i
            columns = pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)
            for source, target in zip(rows, halves, strict=True):
                plgpu.copy_gmem_to_smem(
                    refs["w_up"].at[expert, source, columns],
                    up_smem.at[chunk, target],
                    refs["up_full"].at[chunk],
                )
    if 2 in phases:
        weight_rows = pl.ds(pl.multiple_of(p.rows * block, 8), p.rows)
        scale_rows = pl.ds(p.rows // 8 * block, p.rows // 8)
        for j in range(2):
            which = warpgroup * 2 + j
            expert, done = refs["expert"][which] + first_expert, refs["down_full"].at[which]
            plgpu.copy_gmem_to_smem(refs["w_down"].at[expert, weight_rows], down_smem.at[which], done)
            scales = refs["s_down"].at[expert, scale_rows]
            plgpu.copy_gmem_to_smem(scales, refs["down_scale_smem"].at[which], done)
    if 1 in phases:
        acc = _first_product(p, refs, warpgroup)
        if p.sim:
            _sim_store_parts(refs["hidden"], acc[:32] + acc[32:], warpgroup, block * (2 * PART))
        else:
            simt.run(finish_hidden, acc, refs["sums_smem"], refs["hidden"])

            @pl.when(warpgroup == 0)
            def _():
                plgpu.semaphore_signal(ready.at[lax.div(choice, 2)], 1, memory_scope="gpu")

    if 2 in phases:
        if not p.sim:
            plgpu.semaphore_wait(
                ready.at[warpgroup], 2 * blocks_per_expert, decrement=False, memory_scope="gpu"
            )
        accs = _second_product(p, refs, warpgroup)
        if p.sim:
            weight = [refs["weight"][0, warpgroup * 2 + j] for j in range(2)]
            mine = accs[0] * weight[0] + accs[1] * weight[1]
            _sim_store_parts(refs["out"], mine, warpgroup, block * p.rows)
        else:
            simt.run(
                functools.partial(finish_rows, rows=p.rows),
                *accs, refs["weight"], refs["rows_smem"], refs["out"],
            )  # fmt: skip


def _first_product(p: _Plan, refs: dict, warpgroup) -> jax.Array:
    """[64, 8] f32: 32 rows at columns 0-127 of each chunk, the same rows at 128-255; by parts of K."""
    x_smem = refs["x_smem"]
    if p.sim:
        quarter = refs["x"][0, pl.ds(warpgroup * p.chunks * CHUNK, p.chunks * CHUNK)]
        x = quarter.reshape(p.chunks, 2, 128).astype(jnp.float32)
    else:
        simt.run(functools.partial(stage_x, chunks=p.chunks), refs["x"], x_smem, tiled={1: X_TILES})
    part = warpgroup if p.scale_parts > 1 else jnp.int32(0)
    plgpu.barrier_wait(refs["scale_full"].at[part])
    scales = refs["up_scale_smem"].at[part]
    width = p.d // p.group // p.scale_parts
    quarter_first = jnp.int32(0) if p.scale_parts > 1 else warpgroup * (p.chunks * CHUNK // p.group)

    def step(i, acc):
        chunk = warpgroup * p.chunks + i
        plgpu.barrier_wait(refs["up_full"].at[chunk])
        first = quarter_first + i * (CHUNK // p.group)
        if p.sim:
            s = lax.dynamic_slice(scales[...], (0, first), (2 * PART, CHUNK // p.group))
            w = refs["up_smem"][chunk].astype(jnp.float32) * jnp.repeat(
                s.astype(jnp.float32), p.group, axis=1
            )
            w = w.astype(jnp.bfloat16).astype(jnp.float32)
            halves = [w[:, h * 128 : (h + 1) * 128] @ x[i, h] for h in range(2)]
            return acc + jnp.concatenate(halves)
        zero = jnp.int32(0)
        weights = inline.dequantize(
            refs["up_smem"].at[chunk], scales, (zero, zero), first,
            group=p.group, row_stride=width, split_columns=True,
        )  # fmt: skip
        for j, each in enumerate(weights):
            plgpu.wgmma(acc, each, x_smem.at[i * 2 + j].T)
        plgpu.wgmma_wait(0)
        return None

    if p.sim:
        acc = jnp.zeros((64,), jnp.float32)
        for i in range(p.chunks):
            acc = step(i, acc)
        return acc

    def run(acc):
        lax.fori_loop(0, p.chunks, lambda i, _: step(i, acc), None)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((64, 8), jnp.float32))


def _second_product(p: _Plan, refs: dict, warpgroup) -> list[jax.Array]:
    """[64, 8] f32 for each of a warpgroup's experts; only the expert's own column means something."""
    hidden_smem = refs["hidden_smem"]
    if not p.sim:
        simt.run(stage_hidden, refs["hidden"], hidden_smem, tiled={1: X_TILES})
    accs = []
    for j in range(2):
        which = warpgroup * 2 + j
        plgpu.barrier_wait(refs["down_full"].at[which])
        w_smem, scales = refs["down_smem"].at[which], refs["down_scale_smem"].at[which]
        if p.sim:
            s = scales[...].reshape(p.rows, p.down_groups).astype(jnp.float32)
            w = w_smem[...].astype(jnp.float32) * jnp.repeat(s, p.group, axis=1)
            accs.append(
                w.astype(jnp.bfloat16).astype(jnp.float32) @ refs["hidden"][which].astype(jnp.float32)
            )
            continue

        def run(acc, w_smem=w_smem, scales=scales):
            rows = (jnp.int32(0), jnp.int32(32))
            weights = inline.dequantize(
                w_smem, scales, rows, jnp.int32(0), group=p.group, row_stride=p.down_groups
            )
            for i, each in enumerate(weights):
                plgpu.wgmma(acc, each, hidden_smem.at[i].T)
            plgpu.wgmma_wait(0)
            return acc[...]

        accs.append(pl.run_scoped(run, plgpu.ACC((64, 8), jnp.float32)))
    return accs


# The same in array code, for the interpreter; K keeps its order.


def _sim_store_parts(target_gmem, mine, warpgroup, first) -> None:
    """A warpgroup's part of some sums, to be added up outside."""
    target_gmem[warpgroup, pl.ds(first, mine.shape[0])] = mine


def _call(p: _Plan, phases: tuple[int, ...], inputs: dict, outputs: dict) -> tuple[jax.Array, ...]:
    def body(*refs, **scratch):
        _kernel(p, dict(zip([*inputs, *outputs], refs, strict=True)) | scratch, phases)

    return plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=p.scratch(),
        grid=(-(-BLOCKS // p.stride),),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="int4_single",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not p.sim),
    )(*inputs.values())


def _inputs(
    p: _Plan, x_TD, expert_TK, weight_TK, w_gate_up, s_gate_up, w_down, s_down, layer: Array | int
) -> dict:
    stack = w_gate_up.shape[0] * p.experts
    return {
        "x": x_TD,
        "expert": expert_TK.reshape(CHOICES),
        "weight": weight_TK,
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "w_up": w_gate_up.reshape(stack, 2 * FEATURES, p.d),
        "s_up": s_gate_up.reshape(stack, 2 * FEATURES, p.d // p.group),
        "w_down": w_down.reshape(stack, p.d, FEATURES),
        "s_down": s_down.reshape(stack, p.d // 8, 8 * p.down_groups),
    }


def int4_single(
    x_TD, expert_TK, weight_TK, w_gate_up, s_gate_up, w_down, s_down, layer: Array | int, *, group: int
) -> BFloat16[Array, "T D"]:
    """``int4_moe.int4_moe`` where ``supported``; its arguments have been checked there.

    Raises:
        NotImplementedError: a GPU with fewer multiprocessors than the kernel has blocks, which wait for each
            other.
    """
    places = getattr(jax.devices()[0], "core_count", BLOCKS) if jax.default_backend() == "gpu" else BLOCKS
    require(places >= BLOCKS, f"{BLOCKS} blocks on {places} multiprocessors", NotImplementedError)
    p = _Plan(x_TD.shape[1], group, w_gate_up.shape[1])
    outputs = {
        "hidden": jax.ShapeDtypeStruct((CHOICES, FEATURES), jnp.bfloat16),
        "out": jax.ShapeDtypeStruct(x_TD.shape, jnp.bfloat16),
    }
    inputs = _inputs(p, x_TD, expert_TK, weight_TK, w_gate_up, s_gate_up, w_down, s_down, layer)
    with jax.named_scope("int4_single"):
        return _call(p, (1, 2), inputs, outputs)[1]
