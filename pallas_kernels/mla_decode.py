"""Paged MLA decode attention for Hopper: one kernel over the pages of all rows, one that merges its parts.

**Work.** The pages of all rows form one list, cut into as many equal runs as there are blocks. A run may
cross rows; each (row, range of pages) in it is an *item*. ``make_schedule`` computes the items from the
lengths alone: it is the same for every layer of a step, so compute it once and pass it. In
``batch_invariant`` mode a row is cut at fixed multiples of ``split_pages`` whatever the batch holds, so its
result does not depend on the others.

**Block.** One producer warpgroup copies pages by table (TMA, a ring of ``stages``) and prepares queries; the
consumers attend, taking turns at pages. Heads (times query tokens) are the *columns*, on wgmma's N side, so
that eight heads are not padded to 64 rows; tokens (scores) and latents (output) are on the M side. More than
16 columns go to ``mla_wide``.

**FP8.** An e4m3 page is read from shared memory twice, each time straight into wgmma's register operand with
the hardware conversion to f16: once with tokens along M for the scores, once transposed with latents along M
for the output (``fragments``). 8-bit wgmma needs neither: it cannot transpose V, and its short accumulation
of K Q costs 3e-3 in the result. Exact f16 operands leave 2e-4. In ``fp8_656`` the four scales of a token
multiply the four partial scores, and the weights of the output, never the values.

**Parts.** A consumer writes its unnormalised sum, its running maximum (log2 units) and its sum of weights per
item; the merge kernel combines the parts of a row, divides, and returns the log-sum-exp.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import fragments, mla_wide
from pallas_kernels.common import LOG2E, require, smem_tiles, tuned
from pallas_kernels.mla_merge import LATENT, NEVER, merge
from pallas_kernels.mla_schedule import NARROW, PAGE, Schedule, column_groups, make_schedule

ROPE = 64
GROUPS, GROUP = 4, 128  # scales of a token in fp8_656, and the latents of each
LAYOUTS = ("bf16", "fp8_flat", "fp8_656")
_E4M3 = smem_tiles(64, 64)
_B16 = smem_tiles(64, 128)
_B16_HALF = smem_tiles(32, 64)


class Pool(NamedTuple):
    """A stacked cache pool as raw bits.

    ``values``: "bf16" uint16 [Y, P, 64, 576]; "fp8_flat" uint8 [Y, P, 64, 576]; "fp8_656" uint8 [Y, P, 64,
    512], with ``scales`` f32 [Y, P, 64, 4] and ``rope`` uint16 (bf16) [Y, P, 64, 64].
    """

    values: Array
    scales: Array | None = None
    rope: Array | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles. ``tuned/h200.json`` holds the measured choices, ``tuned_config`` picks one by shape.

    More than 16 columns (``mla_wide``) use ``blocks`` and ``merge_*`` only.
    """

    blocks: int = 132
    consumers: int = 2
    stages: int = 4
    q_slots: int = 2  # queries in shared memory: the next item's are prepared ahead
    words: int = 1  # 32-bit words of a token that a thread loads at once; 1 in fp8_656
    token_part: int = 64  # tokens of one register operand of V
    merge_block: int = 16  # parts that the merge holds in shared memory (0: wide, few parts, held nowhere),
    merge_rows: int = 8  # copied so many at a time,
    merge_columns: int = 256  # latents of one merge block,
    merge_heads: int = 1  # for so many columns


def tuned_config(layout: str, columns: int, rows: int) -> Config:
    """The measured tiles for so many query columns and rows; a pure function of its arguments."""
    narrow = "n8" if columns <= 8 else "n16" if columns <= 16 else "wide"
    batch = "b1" if rows == 1 else "few" if rows < 16 else "many"
    return Config(**tuned("mla_decode")[f"{layout}.{narrow}.{batch}"])


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a kernel is compiled for."""

    config: Config
    layout: str
    columns: int
    tokens: int
    heads: int
    softmax_scale: float
    sim: bool

    @property
    def fp8(self) -> bool:
        return self.layout != "bf16"

    @property
    def scaled(self) -> bool:
        return self.layout == "fp8_656"


def _scratch(static: _Static) -> dict:
    config, columns = static.config, static.columns
    narrow = jnp.float8_e4m3fn if static.fp8 else jnp.bfloat16
    compute = jnp.float16 if static.fp8 else jnp.bfloat16
    width = LATENT + (0 if static.scaled else ROPE)
    half_parts = static.fp8 and config.token_part == 32
    copies = 3 if static.scaled else 1
    scratch = {
        "values": plgpu.SMEM((config.stages, PAGE, width), narrow, transforms=_E4M3 if static.fp8 else _B16),
        "q": plgpu.SMEM((config.q_slots, columns, width), compute, transforms=_B16),
        "p": plgpu.SMEM(
            (config.consumers, columns * (GROUPS if static.scaled else 1), PAGE),
            compute,
            transforms=_B16_HALF if half_parts else _B16,
        ),
        "full": plgpu.Barrier(num_barriers=config.stages, num_arrivals=copies),
        "free": plgpu.Barrier(num_barriers=config.stages, num_arrivals=1),
        "q_full": plgpu.Barrier(num_barriers=config.q_slots),
        "q_free": plgpu.Barrier(num_barriers=config.q_slots, num_arrivals=config.consumers),
    }
    if static.fp8:
        scratch["unit"] = plgpu.SMEM((config.q_slots, columns), jnp.float32)
        scratch["exchange"] = plgpu.SMEM((config.consumers, 4 * columns), jnp.float32)
    if static.scaled:
        scratch["scales"] = plgpu.SMEM((config.stages, PAGE, GROUPS), jnp.float32)
        scratch["rope"] = plgpu.SMEM((config.stages, PAGE, ROPE), jnp.bfloat16, transforms=_B16)
        scratch["q_rope"] = plgpu.SMEM((config.q_slots, columns, ROPE), jnp.bfloat16, transforms=_B16)
        scratch["q_rope_full"] = plgpu.Barrier(num_barriers=config.q_slots)
    if static.fp8 and static.sim:
        scratch["k"] = plgpu.SMEM((config.consumers, PAGE, width), jnp.float16, transforms=_B16)
    return scratch


@dataclasses.dataclass(frozen=True)
class _Block:
    """The kernel of one thread block: ``gmem`` and ``smem`` hold its refs by name."""

    static: _Static
    gmem: dict
    smem: dict

    def run(self) -> None:
        config = self.static.config
        block = lax.axis_index("block")
        warpgroup = lax.axis_index("warpgroup")
        begin, end = self.gmem["block_first"][block], self.gmem["block_first"][block + 1]
        registers = {1: (), 2: (56, 224) if self.static.fp8 else (40, 232), 3: (40, 152)}[config.consumers]

        @pl.when(warpgroup == config.consumers)
        def _():
            if registers:
                plgpu.set_max_registers(registers[0], action="decrease")
            self._produce(begin, end)

        @pl.when(warpgroup < config.consumers)
        def _():
            if registers:
                plgpu.set_max_registers(registers[1], action="increase")
            lax.fori_loop(begin, end, functools.partial(self._consume, warpgroup, begin), jnp.int32(0))

    def _item(self, i):
        item = self.gmem["item_I3"]
        return item[i, 0], item[i, 1], item[i, 2]

    def _produce(self, begin, end) -> None:
        """Copies the pages of the items in order, and prepares their queries."""
        config, smem = self.static.config, self.smem
        slots = config.stages

        def per_item(i, step):
            row, page_begin, page_end = self._item(i)

            def per_page(nth_page, step):
                slot = lax.rem(step, slots)
                page = self.gmem["table_BM"][row, nth_page]

                @pl.when(step >= slots)
                def _():
                    plgpu.barrier_wait(smem["free"].at[slot])

                names = ("values", "scales", "rope") if self.static.scaled else ("values",)
                for name in names:
                    source = self.gmem[name].at[self.gmem["layer"][0], page]
                    plgpu.copy_gmem_to_smem(source, smem[name].at[slot], smem["full"].at[slot])
                return step + 1

            # A block's first pages come before its first queries, whose preparation they overlap.
            ahead = jnp.where(i == begin, jnp.minimum(page_begin + slots, page_end), page_begin)
            step = lax.fori_loop(page_begin, ahead, per_page, step)
            self._load_queries(row, i - begin)
            return lax.fori_loop(ahead, page_end, per_page, step)

        steps = lax.fori_loop(begin, end, per_item, jnp.int32(0))
        # Every arrival is waited for before the block ends.
        items, q_slots = end - begin, config.q_slots

        def drain(ring, slots, k, _):
            plgpu.barrier_wait(smem[ring].at[lax.rem(k, slots)])

        lax.fori_loop(
            jnp.maximum(items - q_slots, 0), items, functools.partial(drain, "q_free", q_slots), None
        )
        lax.fori_loop(jnp.maximum(steps - slots, 0), steps, functools.partial(drain, "free", slots), None)

    def _load_queries(self, row, nth) -> None:
        static, smem = self.static, self.smem
        slot = lax.rem(nth, static.config.q_slots)
        full = smem["q_full"].at[slot]

        @pl.when(nth >= static.config.q_slots)
        def _():
            plgpu.barrier_wait(smem["q_free"].at[slot])

        source = self.gmem["q"].at[row]
        if not static.fp8:
            plgpu.copy_gmem_to_smem(source, smem["q"].at[slot], full)
            return
        if static.scaled:
            rope = source.at[:, pl.ds(LATENT, ROPE)]
            plgpu.copy_gmem_to_smem(rope, smem["q_rope"].at[slot], smem["q_rope_full"].at[slot])
        if static.sim:
            width = smem["q"].shape[-1]
            q_f32 = source[:, :width].astype(jnp.float32)
            smem["q"][slot] = (q_f32 * 64).astype(jnp.float16)
            smem["unit"][slot] = jnp.full((static.columns,), 1 / 64, jnp.float32)
        else:
            unit = smem["unit"].at[slot]
            fragments.stage_queries(source, smem["q"].at[slot], unit, _B16, permuted=True)
        plgpu.commit_smem()
        plgpu.barrier_arrive(full)

    def _consume(self, warpgroup, begin, i, step):
        """Attends to one item and writes its part; ``step`` counts the pages of the block so far."""
        static, smem, gmem = self.static, self.smem, self.gmem
        config = static.config
        row, page_begin, page_end = self._item(i)
        q_slot = lax.rem(i - begin, config.q_slots)
        plgpu.barrier_wait(smem["q_full"].at[q_slot])
        if static.scaled:
            plgpu.barrier_wait(smem["q_rope_full"].at[q_slot])
        acc, peak, weights = self._attend(warpgroup, row, page_begin, page_end, step, q_slot)
        plgpu.barrier_arrive(smem["q_free"].at[q_slot])
        at = i * config.consumers + warpgroup
        part = gmem["part"].at[at]
        if static.sim:
            part[...] = jnp.concatenate(acc).T
            total = weights.sum(axis=0)
        else:
            words = config.words if static.fp8 else None
            for b, block in enumerate(acc):
                rows = block.shape[0]
                fragments.store_transposed(block, part.at[:, pl.ds(b * rows, rows)], words=words)
            scratch = smem["p"].at[warpgroup]
            transforms = _B16_HALF if static.fp8 and config.token_part == 32 else _B16
            total = fragments.reduce_columns("add", weights, scratch, transforms, busy=True)
        gmem["peak"].at[at][...] = peak
        gmem["total"].at[at][...] = total
        return step + page_end - page_begin

    def _attend(self, warpgroup, row, page_begin, page_end, step, q_slot):
        """Returns (blocks of the unnormalised output [latents, columns], maximum [columns], weights)."""
        static, smem, gmem = self.static, self.smem, self.gmem
        columns, stride = static.columns, static.config.consumers
        shape = (PAGE, columns)
        length, before = gmem["length_B"][row], gmem["before_B"][row]
        unit: float | jax.Array = static.softmax_scale * LOG2E
        if static.fp8:
            unit_N = plgpu.load(smem["unit"].at[q_slot], layout=fragments.COLUMNS, optimized=False)
            unit = lax.broadcast_in_dim(unit_N * (unit * gmem["scale"][0]), shape, (1,))
        limit = length
        if static.tokens > 1:
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=fragments.WGMMA)
            limit = jnp.minimum(length, before + 1 + column // static.heads)
        lead = lax.rem(warpgroup + stride * (step // stride + 1) - step, stride)
        count = (page_end - page_begin - lead + stride - 1) // stride

        def per_page(k, carry):
            acc, peak, weights = carry
            nth = lead + k * stride
            slot = lax.rem(step + nth, static.config.stages)
            start = (page_begin + nth) * PAGE
            values = smem["values"].at[slot]
            plgpu.barrier_wait(smem["full"].at[slot])
            scales = self._scales(slot, length - start) if static.scaled else ()
            scores = self._scores(warpgroup, slot, q_slot, scales, unit)
            position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=fragments.WGMMA) + start
            scores = jnp.where(position < limit, scores, -jnp.inf)

            @pl.when(length - start < PAGE)
            def _():
                self._zero_tail(values, length - start)

            new_peak = jnp.maximum(peak, self._page_peak(warpgroup, slot, scores, scales))
            alpha = jnp.exp2(peak - new_peak)
            p = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, shape, (1,)))
            weights = weights * lax.broadcast_in_dim(alpha, shape, (1,)) + p
            p_smem = smem["p"].at[warpgroup]
            if static.scaled:
                for g, scale in enumerate(scales):
                    scaled_p = p * lax.broadcast_in_dim(scale, shape, (0,))
                    p_smem.at[pl.ds(g * columns, columns)].T[...] = scaled_p.astype(p_smem.dtype)
            else:
                p_smem.T[...] = p.astype(p_smem.dtype)
            plgpu.commit_smem()
            acc = tuple(block * lax.broadcast_in_dim(alpha, block.shape, (1,)) for block in acc)
            acc = self._output(acc, warpgroup, values, smem["free"].at[slot])
            return acc, new_peak, weights

        def cast(x):
            return plgpu.layout_cast(x, fragments.WGMMA)

        rows = LATENT
        if static.fp8:
            rows = GROUP if static.scaled else LATENT if static.sim else GROUP * static.config.words
        acc = tuple(cast(jnp.zeros((rows, columns), jnp.float32)) for _ in range(LATENT // rows))
        peak = plgpu.layout_cast(jnp.full((columns,), NEVER, jnp.float32), fragments.COLUMNS)
        weights = cast(jnp.zeros(shape, jnp.float32))
        return lax.fori_loop(0, count, per_page, (acc, peak, weights))

    def _scales(self, slot, valid):
        """The four scales of each token of the page, 0 beyond the row."""
        ref = self.smem["scales"].at[slot]
        if self.static.sim:
            scales = tuple(ref[:, g] for g in range(GROUPS))
            token = lax.broadcasted_iota(jnp.int32, (PAGE,), 0)
        else:
            scales = fragments.load_scales(ref)
            token = plgpu.broadcasted_iota(jnp.int32, (PAGE,), 0, layout=fragments.ROWS)
        return tuple(jnp.where(token < valid, scale, 0.0) for scale in scales)

    def _scores(self, warpgroup, slot, q_slot, scales, unit):
        """Scaled scores of a page in log2 units, [tokens, columns]."""
        static, smem = self.static, self.smem
        shape = (PAGE, static.columns)
        page, q = smem["values"].at[slot], smem["q"].at[q_slot]
        acc = plgpu.ACC(shape, jnp.float32)
        if not static.fp8:
            return self._product(lambda ref: plgpu.wgmma(ref, page, q.T), acc) * unit
        if static.sim:
            k = smem["k"].at[warpgroup]
            k[...] = page[...].astype(jnp.float16)
            plgpu.commit_smem()
        tiles = range(page.shape[-1] // 64)

        def multiply(ref, tiles):
            for tile in tiles:
                at = pl.ds(64 * tile, 64)
                a = k.at[:, at] if static.sim else fragments.load_page_e4m3(page, tile, _E4M3)
                plgpu.wgmma(ref, a, q.at[:, at].T)
                plgpu.wgmma_wait(1)  # the operands of two products stay in registers

        if not static.scaled:
            return self._product(lambda ref: multiply(ref, tiles), acc) * unit
        scores = jnp.zeros(shape, jnp.float32)
        scores = plgpu.layout_cast(scores, fragments.WGMMA)
        for g, scale in enumerate(scales):
            part = self._product(lambda ref, g=g: multiply(ref, (2 * g, 2 * g + 1)), acc)
            scores = scores + part * lax.broadcast_in_dim(scale, shape, (0,))
        rope, q_rope = smem["rope"].at[slot], smem["q_rope"].at[q_slot]
        rotary = self._product(lambda ref: plgpu.wgmma(ref, rope, q_rope.T), acc)
        return scores * unit + rotary * (static.softmax_scale * LOG2E)

    @staticmethod
    def _product(body: Callable, *accumulators):
        def run(*refs):
            body(*refs)
            return refs[0][...]

        return pl.run_scoped(run, *accumulators)

    def _page_peak(self, warpgroup, slot, scores, scales):
        """The page's contribution to the running maximum, [columns].

        Weights reach 2**12 in f16, where small ones keep more bits. In fp8_656 the largest scale of a token
        counts as part of its weight, so that scaled weights stay in the range of f16 whatever the scales.
        """
        static = self.static
        if static.scaled:
            largest = jnp.maximum(functools.reduce(jnp.maximum, scales), 1e-30)
            scores = scores + lax.broadcast_in_dim(jnp.log2(largest), scores.shape, (0,))
        if static.sim:
            peak = scores.max(axis=0)
        elif "exchange" in self.smem:
            peak = fragments.reduce_columns("max", scores, self.smem["exchange"].at[warpgroup], busy=False)
        else:  # there is no room but in the page's rotary columns, which nobody reads any more
            rotary = self.smem["values"].at[slot, :, pl.ds(LATENT, ROPE)]
            peak = fragments.reduce_columns("max", scores, rotary, _B16, busy=True)
        return peak - 12.0 if static.fp8 else peak

    def _zero_tail(self, values, valid) -> None:
        """Zeroes the page's tokens beyond the row: K is V, what they hold may be NaN, and 0 x NaN is NaN."""
        if self.static.sim:
            token = lax.broadcasted_iota(jnp.int32, (PAGE, LATENT), 0)
            x = values[:, :LATENT]
            values[:, :LATENT] = jnp.where(token < valid, x, jnp.zeros_like(x))
        else:
            fragments.zero_rows(values, valid, LATENT, _E4M3 if self.static.fp8 else _B16)
        plgpu.commit_smem()

    def _output(self, acc, warpgroup, values, free):
        """Adds the page's weighted latents to the blocks of the output, and gives the page back."""
        static = self.static
        p_smem = self.smem["p"].at[warpgroup]

        def weights(b):
            return p_smem.at[pl.ds(b * static.columns, static.columns)] if static.scaled else p_smem

        if static.sim:
            latents = values
            if static.fp8:
                latents = self.smem["k"].at[warpgroup]
                latents[:, :LATENT] = values[:, :LATENT].astype(jnp.float16)
                plgpu.commit_smem()
            out = []
            for b, block in enumerate(acc):
                rows = block.shape[0]
                v = latents.at[:, pl.ds(b * rows, rows)]

                def product(ref, v=v, b=b):
                    return plgpu.wgmma(ref, v.T, weights(b).T)

                out.append(block + self._product(product, plgpu.ACC(block.shape, jnp.float32)))
            plgpu.barrier_arrive(free)
            return tuple(out)

        def add(acc_refs):
            if not static.fp8:
                plgpu.wgmma(acc_refs[0], values.at[:, pl.ds(0, LATENT)].T, p_smem.T)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free)
                return
            size = static.config.token_part
            for b, acc_ref in enumerate(acc_refs):
                for start in range(0, PAGE, size):
                    v = fragments.load_transposed_e4m3(
                        values, b, static.config.words, slice(start, start + size), _E4M3
                    )
                    plgpu.wgmma(acc_ref, v, weights(b).at[:, pl.ds(start, size)].T)
                    plgpu.wgmma_wait(1)  # the operands of two products stay in registers
            plgpu.barrier_arrive(free)  # all of the page is in registers
            plgpu.wgmma_wait(0)

        return pl.run_state(add)(tuple(plgpu.ACC.init(block) for block in acc))


def _validate(q_BTHC, pool: Pool, table_BM, length_B, num_new_B, layout: str) -> None:
    require(layout in LAYOUTS, f"layout={layout!r}: must be one of {LAYOUTS}")
    rows, _, _, width = q_BTHC.shape
    require(q_BTHC.dtype == jnp.bfloat16, f"q_BTHC is {q_BTHC.dtype}: must be bfloat16")
    require(width == LATENT + ROPE, f"q_BTHC has width {width}: must be {LATENT + ROPE}", NotImplementedError)
    require(pool.values.ndim == 4, f"pool.values has shape {pool.values.shape}: must be [Y, P, Z, W]")
    layers, pages, page = pool.values.shape[:3]
    require(page == PAGE, f"page size {page}: this kernel supports {PAGE}", NotImplementedError)
    scaled = layout == "fp8_656"
    expected = {"values": (LATENT if scaled else width, jnp.uint16 if layout == "bf16" else jnp.uint8)}
    if scaled:
        expected |= {"scales": (GROUPS, jnp.float32), "rope": (ROPE, jnp.uint16)}
    for name, array in pool._asdict().items():
        require(
            (array is not None) == (name in expected), f"pool.{name}: layout {layout} has {sorted(expected)}"
        )
        if array is not None:
            last, dtype = expected[name]
            shape = (layers, pages, page, last)
            got = (array.shape, array.dtype)
            require(got == (shape, dtype), f"pool.{name} is {got}: layout {layout} needs {(shape, dtype)}")
    for name, array in (("table_BM", table_BM), ("length_B", length_B), ("num_new_B", num_new_B)):
        if array is not None:
            require(array.dtype == jnp.int32, f"{name} is {array.dtype}: must be int32")
            require(array.shape[0] == rows, f"{name} has {array.shape[0]} rows: q_BTHC has {rows}")


def _attend_narrow(
    inputs: dict[str, Array], schedule: Schedule, static: _Static
) -> tuple[Array, Array, Array]:
    """The parts of each consumer and item: (sums, maxima, totals); ``inputs`` as in ``mla_wide.attend``."""
    config, columns = static.config, static.columns
    require(
        config.stages % config.consumers == 0,
        f"stages={config.stages}: must be a multiple of consumers={config.consumers}, who take turns",
    )
    inputs = inputs | {"item_I3": schedule.item_I3, "block_first": schedule.block_first}
    slots = schedule.item_I3.shape[0] * config.consumers
    outputs = {
        "part": jax.ShapeDtypeStruct((slots, columns, LATENT), jnp.float32),
        "peak": jax.ShapeDtypeStruct((slots + 128, columns), jnp.float32),  # the merge reads 128 at a time
        "total": jax.ShapeDtypeStruct((slots + 128, columns), jnp.float32),
    }
    scratch = _scratch(static)
    names = [*inputs, *outputs]

    def body(*refs):
        gmem = dict(zip(names, refs[: len(names)], strict=True))
        _Block(static, gmem, dict(zip(scratch, refs[len(names) :], strict=True))).run()

    return plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=2048 if static.sim else 0
        ),
    )(*inputs.values())


def mla_decode(
    q_BTHC: Float[Array, "B T H C"],
    pool: Pool,
    layer: Int[Array, ""] | int,
    table_BM: Int[Array, "B M"],
    length_B: Int[Array, "B"],
    *,
    softmax_scale: float,
    layout: str,
    scale: Float[Array, ""] | float | None = None,
    num_new_B: Int[Array, "B"] | None = None,
    batch_invariant: bool = False,
    config: Config | None = None,
    schedule: Schedule | None = None,
    out_dtype=jnp.float32,
    sim: bool = False,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """Attention of absorbed queries over the latent cache, one or a few query tokens per row.

    Query token t of row b is at position ``length_B[b] - num_new_B[b] + t`` and attends to it and all
    before, but never beyond ``length_B``. A row of length 0 gives zeros and a log-sum-exp of -inf. Bytes
    beyond a row's length and pages outside its table are never used, whatever they hold; entries of
    ``table_BM`` that the length needs must be pages of the pool.

    Args:
      q_BTHC: bf16 queries, latent part (absorbed) first, then the rotary part.
      pool: raw bits, see ``Pool``. The compiled program reads them in place.
      layer: index into the stacked pool, may be traced.
      table_BM: i32 physical page of each logical page. Up to 2**24 pages a pool: page and layer are separate
        coordinates of the copy, so that pools beyond 2**31 elements are safe.
      length_B: i32 tokens cached of each row, those of this step included.
      softmax_scale: multiplies the scores.
      layout: one of ``LAYOUTS``.
      scale: "fp8_flat" only: what a stored value is multiplied by.
      num_new_B: i32 query tokens of each row; T when None.
      batch_invariant: a row's bits do not depend on the other rows (``make_schedule``).
      config: tiles; ``tuned_config`` when None.
      schedule: ``make_schedule`` of these lengths, when several layers share it.
      sim: run on array code that the GPU interpreter supports; for tests.

    Returns:
      (output [B, T, H, 512] in ``out_dtype``, natural log-sum-exp [B, T, H] f32).

    Raises:
      ValueError: an argument contradicts another. NotImplementedError: page size or widths of no kernel here.
    """
    _validate(q_BTHC, pool, table_BM, length_B, num_new_B, layout)
    require(scale is None or layout == "fp8_flat", f"scale: layout {layout} has none")
    rows, tokens, heads, width = q_BTHC.shape
    groups, columns = column_groups(tokens, heads)
    config = config or tuned_config(layout, columns, rows)
    if schedule is None:
        schedule = make_schedule(
            length_B,
            max_pages=table_BM.shape[1],
            groups=groups,
            blocks=config.blocks,
            batch_invariant=batch_invariant,
        )
    q = q_BTHC.reshape(rows, tokens * heads, width)
    if (padding := groups * columns - tokens * heads) > 0:
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0)))
    scale_1 = jnp.reshape(jnp.asarray(1.0 if scale is None else scale, jnp.float32), (1,))
    narrow = jnp.bfloat16 if layout == "bf16" else jnp.float8_e4m3fn
    inputs = {
        "q": q.reshape(rows * groups, columns, width),
        "values": lax.bitcast_convert_type(pool.values, narrow),
        "layer": jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)),
        "scale": scale_1,
        "length_B": length_B,
        "before_B": length_B if tokens == 1 else length_B - (tokens if num_new_B is None else num_new_B),
        "table_BM": table_BM,
    }
    if layout == "fp8_656":
        inputs["scales"] = pool.scales  # type: ignore[assignment]
        inputs["rope"] = lax.bitcast_convert_type(pool.rope, jnp.bfloat16)  # type: ignore[arg-type]
    if columns > NARROW:
        parts = 1
        part, peak, total = mla_wide.attend(
            inputs,
            schedule,
            layout=layout,
            blocks=config.blocks,
            groups=groups,
            tokens=tokens,
            heads=heads,
            softmax_scale=softmax_scale,
            sim=sim,
        )
    else:
        parts = config.consumers
        static = _Static(config, layout, columns, tokens, heads, softmax_scale, sim)
        part, peak, total = _attend_narrow(inputs, schedule, static)
    out, lse = merge(
        part, peak, total, schedule.row_first, scale_1, config=config, parts=parts, out_dtype=out_dtype
    )
    out = out.reshape(rows, groups * columns, LATENT)[:, : tokens * heads]
    lse = lse.reshape(rows, groups * columns)[:, : tokens * heads]
    return out.reshape(rows, tokens, heads, LATENT), lse.reshape(rows, tokens, heads)
