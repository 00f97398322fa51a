"""Paged MLA decode for many query columns: 64 of them (heads times query tokens) on wgmma's M side.

Warpgroups of a block, each with one task, a page of 64 tokens at a time:

- *pages*: brings pages into a ring of two, as 16-bit values [64, 576]: BF16 by TMA, FP8 through registers
  (``fp8_pages``), so that a page is converted once;
- *scores*: S = Q K.T with both operands in shared memory, softmax (rows are heads, so a row's maximum is a
  shuffle among four threads), weights to shared memory, and the factor by which the maximum rescales;
- *latents*, two of them: rescale and add P V, each for half of the latents: 128 accumulator registers.

So the scores of a page are multiplied while the latents of the page before are. A page stays from its arrival
to the end of its P V.

FP8 works in f16, where e4m3 is exact and weights are rounded by 2**-12. In ``fp8_656`` latents are rounded by
2**-12, too, for their scales (``fp8_pages``); a power of two per token is left, which multiplies scores and
weights.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fp8_pages, fragments
from pallas_kernels.common import LOG2E, require, smem_tiles
from pallas_kernels.mla_merge import LATENT, NEVER
from pallas_kernels.mla_schedule import MAX_COLUMNS, PAGE, Schedule

ROPE = 64
HALF = LATENT // 2
LATENTS = 128  # N of one instruction: with 256 the compiler finds 128 registers of launch too few
SLOTS = 2  # pages in shared memory
# By so many powers of two a maximum may grow before what was summed is rescaled. 0 in BF16: where the largest
# weight is 1, it is not rounded.
SLACK = {"bf16": 0.0, "fp8_flat": 3.0, "fp8_656": 3.0}
ALPHA, UNIT = SLOTS, SLOTS + 1  # rows of "vectors", after the token scales of each page
_B16 = smem_tiles(64, 128)
# Registers of a thread by task; 128 threads each share 65,536.
REGISTERS = {"bf16": (144, 160, 48), "fp8_flat": (80, 160, 112), "fp8_656": (112, 160, 80)}


@dataclasses.dataclass(frozen=True)
class _Block:
    """The kernel of one thread block: ``gmem`` and ``smem`` hold its refs by name."""

    layout: str
    groups: int
    tokens: int
    heads: int
    softmax_scale: float
    sim: bool
    gmem: dict
    smem: dict

    @property
    def fp8(self) -> bool:
        return self.layout != "bf16"

    @property
    def scaled(self) -> bool:
        return self.layout == "fp8_656"

    def run(self) -> None:
        block = lax.axis_index("block")
        warpgroup = lax.axis_index("warpgroup")
        begin, end = self.gmem["block_first"][block], self.gmem["block_first"][block + 1]
        scores, latents, pages = REGISTERS[self.layout]

        @pl.when(warpgroup == 0)
        def _():
            plgpu.set_max_registers(scores, action="increase" if scores > 128 else "decrease")
            steps = self._each_item(begin, end, self._score)
            pl.when(steps > 0)(lambda: plgpu.barrier_wait(self.smem["p_free"]))

        for half in range(2):

            @pl.when(warpgroup == 1 + half)
            def _(half=half):
                plgpu.set_max_registers(latents, action="increase")
                self._each_item(begin, end, lambda *item: self._add_latents(half, *item))

        @pl.when(warpgroup == 3)
        def _():
            plgpu.set_max_registers(pages, action="decrease")
            steps = self._each_item(begin, end, self._produce)

            def drain(step, _):
                plgpu.barrier_wait(self.smem["free"].at[lax.rem(step, SLOTS)])

            lax.fori_loop(jnp.maximum(steps - SLOTS, 0), steps, drain, None)

    def _each_item(self, begin, end, body):
        """Calls ``body`` (item, row, first page, pages, pages of the block so far); returns the pages."""
        item = self.gmem["item_I3"]

        def per_item(i, step):
            row, first, pages = item[i, 0], item[i, 1], item[i, 2] - item[i, 1]
            body(i, row, first, pages, step)
            return step + pages

        return lax.fori_loop(begin, end, per_item, jnp.int32(0))

    def _produce(self, i, row, first, pages, step) -> None:
        gmem, smem = self.gmem, self.smem
        batch_row = row // self.groups
        layer = gmem["layer"][0]

        def wait(step):
            slot = lax.rem(step, SLOTS)

            @pl.when(step >= SLOTS)
            def _():
                plgpu.barrier_wait(smem["free"].at[slot])

            return slot

        if not self.fp8:

            def copy(k, _):
                slot = wait(step + k)
                source = gmem["values"].at[layer, gmem["table_BM"][batch_row, first + k]]
                plgpu.copy_gmem_to_smem(source, smem["values"].at[slot], smem["full"].at[slot])

            lax.fori_loop(0, pages, copy, None)
            return

        names = ("values", "rope", "scales") if self.scaled else ("values",)
        pool = tuple(gmem[name] for name in names)
        length = gmem["length_B"][batch_row]
        layer_pages = pool[0].shape[1]

        def index(k):
            return layer * layer_pages + gmem["table_BM"][batch_row, first + jnp.minimum(k, pages - 1)]

        def convert(k, ahead):
            fetched, this, following = ahead
            after = index(k + 2)
            slot = wait(step + k)
            valid = length - (first + k) * PAGE
            if self.sim:
                self._convert_sim(slot, this, valid)
            else:
                fp8_pages.prefetch(pool, after)
                page = tuple(
                    smem[name].at[slot] for name in (*names[:2], "vectors")[: 3 if self.scaled else 1]
                )
                fetched = fp8_pages.convert(fetched, pool, this, following, valid, page, _B16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem["full"].at[slot])
            return fetched, following, after

        this, following = index(0), index(1)
        if self.sim:
            fetched = jnp.int32(0)
        else:
            fetched = fp8_pages.fetch(pool, this)
            fp8_pages.prefetch(pool, following)
        lax.fori_loop(0, pages, convert, (fetched, this, following))

    def _convert_sim(self, slot, index, valid) -> None:
        gmem, smem = self.gmem, self.smem
        pages = gmem["values"].shape[1]
        layer, page = index // pages, lax.rem(index, pages)
        width = gmem["values"].shape[3]

        def inside(shape):
            return lax.broadcasted_iota(jnp.int32, shape, 0) < valid

        values = gmem["values"][layer, page].astype(jnp.float32)
        values = jnp.where(inside((PAGE, width)), values, jnp.zeros_like(values))
        if self.scaled:
            scales = gmem["scales"][layer, page]
            scales = jnp.where(inside(scales.shape), scales, 0.0)
            power = jnp.ceil(jnp.maximum(jnp.log2(scales.max(axis=1)), fp8_pages.MIN_POWER))
            smem["vectors"][slot] = jnp.exp2(power)
            values = values * jnp.repeat(scales * jnp.exp2(-power)[:, None], 128, axis=1)
            rope = gmem["rope"][layer, page].astype(jnp.float32) * jnp.exp2(-power)[:, None]
            smem["rope"][slot] = jnp.where(inside(rope.shape), rope, 0.0).astype(jnp.bfloat16)
        smem["values"][slot] = values.astype(jnp.float16)

    def _load_queries(self, row) -> None:
        smem = self.smem
        q = self.gmem["q"].at[row]
        if not self.fp8:
            plgpu.copy_gmem_to_smem(q, smem["q"], smem["q_full"])
            plgpu.barrier_wait(smem["q_full"])
            return
        rest = smem["q_rope"] if self.scaled else None
        if self.sim:
            scaled = q[...].astype(jnp.float32) * 64
            width = smem["q"].shape[1]
            smem["q"][...] = scaled[:, :width].astype(jnp.float16)
            smem["vectors"][UNIT] = jnp.full((MAX_COLUMNS,), 1 / 64, jnp.float32)
            if rest is not None:
                rest[...] = scaled[:, width:].astype(jnp.bfloat16)
        else:
            unit = smem["vectors"].at[UNIT]
            fragments.stage_queries(q, smem["q"], unit, _B16, permuted=False, rest_smem=rest)
        plgpu.commit_smem()

    def _score(self, i, row, first, pages, step) -> None:
        """Writes the weights of each page and how they rescale what came before; then maximum and total."""
        gmem, smem = self.gmem, self.smem
        shape = (MAX_COLUMNS, PAGE)
        batch_row = row // self.groups
        length, before = gmem["length_B"][batch_row], gmem["before_B"][batch_row]
        self._load_queries(row)
        unit: float | jax.Array = self.softmax_scale * LOG2E
        if self.fp8:
            unit_N = plgpu.load(smem["vectors"].at[UNIT], layout=fragments.ROWS, optimized=False)
            unit = unit_N * (unit * gmem["scale"][0])
        limit, least = length, length
        if self.tokens > 1:
            least = jnp.minimum(length, before + 1)
            column = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=fragments.WGMMA)
            column = column + lax.rem(row, self.groups) * MAX_COLUMNS
            limit = jnp.minimum(length, before + 1 + column // self.heads)

        def per_page(k, carry):
            peak, total = carry
            nth = step + k
            slot = lax.rem(nth, SLOTS)
            start = (first + k) * PAGE
            plgpu.barrier_wait(smem["full"].at[slot])
            scores, token = self._scores(slot)

            def mask(scores, start=start):
                position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=fragments.WGMMA) + start
                return jnp.where(position < limit, scores, -jnp.inf)

            scores = lax.cond(least < start + PAGE, mask, lambda scores: scores, scores)
            if token is None:
                page_peak = scores.max(axis=1) * unit
            else:
                scores = scores * lax.broadcast_in_dim(unit, shape, (0,))
                page_peak = (scores + jnp.log2(token)).max(axis=1)
            # Weights reach 2**12 in f16, where small ones keep more bits, and 2**SLACK more before sums are
            # rescaled.
            page_peak = page_peak - (12.0 if self.fp8 else 0.0)
            new_peak = jnp.where(page_peak > peak + SLACK[self.layout], page_peak, peak)
            alpha = jnp.exp2(peak - new_peak)
            if token is None:
                scores = scores * (lax.broadcast_in_dim(unit, shape, (0,)) if self.fp8 else unit)
            p = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, shape, (0,)))
            total = total * alpha + p.sum(axis=1)

            @pl.when(nth > 0)
            def _():
                plgpu.barrier_wait(smem["p_free"])

            smem["p"][...] = (p if token is None else p * token).astype(smem["p"].dtype)
            smem["vectors"].at[ALPHA][...] = alpha
            if not self.fp8:

                @pl.when(length - start < PAGE)
                def _():
                    plgpu.commit_smem()  # every warp has its scores
                    self._zero_tail(smem["values"].at[slot], length - start)

            plgpu.commit_smem()
            plgpu.barrier_arrive(smem["p_full"])
            return new_peak, total

        peak = plgpu.layout_cast(jnp.full((MAX_COLUMNS,), NEVER, jnp.float32), fragments.ROWS)
        total = plgpu.layout_cast(jnp.zeros((MAX_COLUMNS,), jnp.float32), fragments.ROWS)
        peak, total = lax.fori_loop(0, pages, per_page, (peak, total))
        gmem["peak"].at[:, i][...] = peak
        gmem["total"].at[:, i][...] = total

    def _scores(self, slot):
        """(scores of a page, what weighs its tokens or None), both (64, 64)."""
        smem = self.smem
        shape = (MAX_COLUMNS, PAGE)

        def multiply(acc):
            plgpu.wgmma(acc, smem["q"], smem["values"].at[slot].T)
            if self.scaled:
                plgpu.wgmma(acc, smem["q_rope"], smem["rope"].at[slot].T)
            return acc[...]

        scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
        if not self.scaled:
            return scores, None
        token = plgpu.load(smem["vectors"].at[slot], layout=fragments.COLUMNS, optimized=False)
        token = lax.broadcast_in_dim(token, shape, (1,))
        return scores * token, token

    def _zero_tail(self, values, valid) -> None:
        """Zeroes the page's tokens beyond the row: K is V, what they hold may be NaN, and 0 x NaN is NaN."""
        if self.sim:
            token = lax.broadcasted_iota(jnp.int32, (PAGE, LATENT), 0)
            x = values[:, :LATENT]
            values[:, :LATENT] = jnp.where(token < valid, x, jnp.zeros_like(x))
        else:
            fragments.zero_rows(values, valid, LATENT, _B16)

    def _add_latents(self, half, i, row, first, pages, step) -> None:
        smem = self.smem
        shape = (MAX_COLUMNS, LATENTS)
        starts = [HALF * half + LATENTS * n for n in range(HALF // LATENTS)]

        def per_page(k, accs):
            slot = lax.rem(step + k, SLOTS)
            plgpu.barrier_wait(smem["full"].at[slot])
            plgpu.barrier_wait(smem["p_full"])
            alpha = plgpu.load(smem["vectors"].at[ALPHA], layout=fragments.ROWS, optimized=False)
            if self.sim:
                accs = tuple(acc * lax.broadcast_in_dim(alpha, shape, (0,)) for acc in accs)
            else:
                accs = fragments.rescale_rows(accs, alpha)

            def multiply(refs):
                for ref, start in zip(refs, starts, strict=True):
                    plgpu.wgmma(ref, smem["p"], smem["values"].at[slot, :, pl.ds(start, LATENTS)])

            if self.sim:

                def product(*refs):
                    multiply(refs)
                    return tuple(ref[...] for ref in refs)

                sums = pl.run_scoped(product, *(plgpu.ACC(shape, jnp.float32) for _ in accs))
                accs = tuple(acc + more for acc, more in zip(accs, sums, strict=True))
            else:
                accs = pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc in accs))
            plgpu.barrier_arrive(smem["p_free"])
            plgpu.barrier_arrive(smem["free"].at[slot])
            return accs

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), fragments.WGMMA)
        accs = lax.fori_loop(0, pages, per_page, (zeros,) * len(starts))
        for acc, start in zip(accs, starts, strict=True):
            self.gmem["part"].at[i, :, pl.ds(start, LATENTS)][...] = acc


def attend(
    inputs: dict[str, jax.Array],
    schedule: Schedule,
    *,
    layout: str,
    blocks: int,
    groups: int,
    tokens: int,
    heads: int,
    softmax_scale: float,
    sim: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The parts of every item of ``schedule``: (sums [I, 64, 512], maxima [64, I + 128], totals), all f32.

    ``inputs``: ``q`` bf16 [rows * groups, 64, 576]; the pool's ``values``, and ``scales`` and ``rope`` in
    fp8_656, as numbers; ``layer`` and ``scale`` (positive) of one element; ``length_B``, ``before_B``,
    ``table_BM``. Raises NotImplementedError unless ``softmax_scale`` is positive.
    """
    require(softmax_scale > 0, f"softmax_scale={softmax_scale}: must be positive", NotImplementedError)
    inputs = inputs | {"item_I3": schedule.item_I3, "block_first": schedule.block_first}
    items = schedule.item_I3.shape[0]
    f32 = jnp.float32
    outputs = {
        "part": jax.ShapeDtypeStruct((items, MAX_COLUMNS, LATENT), f32),
        "peak": jax.ShapeDtypeStruct((MAX_COLUMNS, items + 128), f32),  # the merge reads 128 at a time
        "total": jax.ShapeDtypeStruct((MAX_COLUMNS, items + 128), f32),
    }
    compute = jnp.bfloat16 if layout == "bf16" else jnp.float16
    width = inputs["values"].shape[3]
    scratch: dict = {
        "q": plgpu.SMEM((MAX_COLUMNS, width), compute, transforms=_B16),
        "values": plgpu.SMEM((SLOTS, PAGE, width), compute, transforms=_B16),
        "p": plgpu.SMEM((MAX_COLUMNS, PAGE), compute, transforms=_B16),
        "vectors": plgpu.SMEM((SLOTS + 2, 64), f32),  # one array: each costs a whole KiB
    }
    if layout == "fp8_656":
        scratch["q_rope"] = plgpu.SMEM((MAX_COLUMNS, ROPE), jnp.bfloat16, transforms=_B16)
        scratch["rope"] = plgpu.SMEM((SLOTS, PAGE, ROPE), jnp.bfloat16, transforms=_B16)
    scratch |= {
        "full": plgpu.Barrier(num_barriers=SLOTS),
        "free": plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
        "p_full": plgpu.Barrier(),
        "p_free": plgpu.Barrier(num_arrivals=2),
    }
    if layout == "bf16":
        scratch["q_full"] = plgpu.Barrier()
    names = [*inputs, *outputs]

    def body(*refs):
        gmem = dict(zip(names, refs[: len(names)], strict=True))
        smem = dict(zip(scratch, refs[len(names) :], strict=True))
        _Block(layout, groups, tokens, heads, softmax_scale, sim, gmem, smem).run()

    return plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=4,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=2048 if sim else 0, unsafe_no_auto_barriers=True
        ),
    )(*inputs.values())
