"""Merges the parts of paged MLA decode: what several blocks found about different pages of one row."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import LOG2E, require

LATENT = 512
DIRECT = 4  # parts whose loads are on their way together in the merge without shared memory
NEVER = -1e30  # a finite -inf for running maxima


def _body(
    part_gmem,
    peak_gmem,
    total_gmem,
    first_gmem,
    scale_gmem,
    out_gmem,
    lse_gmem,
    part_smem,
    weight_smem,
    barriers,
    *,
    config,
    parts: int,
):
    """Merges the parts of ``merge_heads`` columns of a row, for ``merge_columns`` latents."""
    row, group, chunk = lax.axis_index("row"), lax.axis_index("group"), lax.axis_index("chunk")
    copy, width, size, heads = config.merge_rows, config.merge_columns, config.merge_block, config.merge_heads
    first = first_gmem[row] * parts
    count = first_gmem[row + 1] * parts - first
    blocks = (count + size - 1) // size
    columns = [group * heads + n for n in range(heads)]
    lanes = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
    latents = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

    def per_copy(k, body):
        lax.fori_loop(0, (jnp.minimum(count - k * size, size) + copy - 1) // copy, body, None)

    def start(k):
        def body(n, _):
            parts_at = pl.ds(first + k * size + n * copy, copy)
            own = (pl.ds(group * heads, heads), pl.ds(chunk * width, width))
            target = part_smem.at[pl.ds(n * copy, copy)]
            plgpu.copy_gmem_to_smem(part_gmem.at[parts_at, *own], target, barriers.at[n])

        per_copy(k, body)

    def load(ref, k, column):
        """128 parts' maxima or totals; one column's lie together where there are many columns."""
        lie_together = ref.shape[0] == part_gmem.shape[1]
        parts_at = pl.ds(first + k * size, 128)
        at = ref.at[column, parts_at] if lie_together else ref.at[parts_at, column]
        return plgpu.load(at, layout=lanes, optimized=False)

    def peaks(k, column):
        index = plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=lanes) + k * size
        peak = load(peak_gmem, k, column)
        return jnp.where((index < count) & (index < (k + 1) * size), peak, NEVER)

    def highest(k, tops):
        return tuple(jnp.maximum(top, jnp.max(peaks(k, column))) for top, column in zip(tops, columns))

    start(0)
    tops = lax.fori_loop(0, blocks, highest, (jnp.float32(NEVER),) * heads)

    def per_block(k, carry):
        accs, totals = carry
        after = []
        for n, (column, top, total) in enumerate(zip(columns, tops, totals)):
            peak = peaks(k, column)
            live = peak > NEVER
            weight = jnp.where(live, jnp.exp2(peak - top), 0.0)
            part_total = load(total_gmem, k, column)
            after.append(total + jnp.sum(jnp.where(live, weight * part_total, 0.0)))
            weight_smem.at[n][...] = weight
        plgpu.commit_smem()

        def wait(n, _):
            plgpu.barrier_wait(barriers.at[n])

        per_copy(k, wait)

        def add(s, accs):
            return tuple(
                acc + weight_smem[n, s] * plgpu.load(part_smem.at[s, n], layout=latents)
                for n, acc in enumerate(accs)
            )

        accs = lax.fori_loop(0, jnp.minimum(count - k * size, size), add, accs)
        plgpu.commit_smem()

        @pl.when(k + 1 < blocks)
        def _():
            start(k + 1)

        return accs, tuple(after)

    zeros = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), latents)
    accs, totals = lax.fori_loop(0, blocks, per_block, ((zeros,) * heads, (jnp.float32(0),) * heads))
    for acc, total, column in zip(accs, totals, columns):
        inverse = jnp.where(total > 0, scale_gmem[0] / total, 0.0)
        out_gmem[row, column, pl.ds(chunk * width, width)] = (acc * inverse).astype(out_gmem.dtype)

    @pl.when(chunk == 0)
    def _():
        for top, total, column in zip(tops, totals, columns):
            lse_gmem[row, column] = jnp.where(total > 0, (top + jnp.log2(total)) / LOG2E, -jnp.inf)


def _direct_body(part_gmem, peak_gmem, total_gmem, first_gmem, scale_gmem, out_gmem, lse_gmem, *, parts: int):
    """Merges the few parts of a row and column, ``DIRECT`` at a time, without shared memory."""
    row, column = lax.axis_index("row"), lax.axis_index("column")
    first = first_gmem[row] * parts
    count = first_gmem[row + 1] * parts - first
    latents = plgpu.Layout.WG_STRIDED((LATENT,), vec_size=LATENT // 128)

    def some(k, carry):
        acc, top, total = carry
        nth = [k * DIRECT + n for n in range(DIRECT)]
        at = [first + jnp.minimum(n, count - 1) for n in nth]
        part = [plgpu.load(part_gmem.at[i, column], layout=latents) for i in at]
        peak = [jnp.where(n < count, peak_gmem[column, i], NEVER) for n, i in zip(nth, at)]
        part_total = [total_gmem[column, i] for i in at]
        new_top = functools.reduce(jnp.maximum, peak, top)
        factor = jnp.exp2(top - new_top)
        acc, total = acc * factor, total * factor
        for p, t, x in zip(peak, part_total, part):
            weight = jnp.exp2(p - new_top)
            weight = jnp.where(p > NEVER, weight, 0.0)
            total = total + jnp.where(p > NEVER, weight * t, 0.0)
            acc = acc + x * weight
        return acc, new_top, total

    zeros = plgpu.layout_cast(jnp.zeros((LATENT,), jnp.float32), latents)
    blocks = (count + DIRECT - 1) // DIRECT
    acc, top, total = lax.fori_loop(0, blocks, some, (zeros, jnp.float32(NEVER), jnp.float32(0)))
    inverse = jnp.where(total > 0, scale_gmem[0] / total, 0.0)
    out_gmem.at[row, column][...] = (acc * inverse).astype(out_gmem.dtype)
    lse_gmem[row, column] = jnp.where(total > 0, (top + jnp.log2(total)) / LOG2E, -jnp.inf)


def merge(part, peak, total, row_first, scale, *, config, parts: int, out_dtype):
    rows, columns = row_first.shape[0] - 1, part.shape[1]
    out_type = (
        jax.ShapeDtypeStruct((rows, columns, LATENT), out_dtype),
        jax.ShapeDtypeStruct((rows, columns), jnp.float32),
    )
    if not config.merge_block:
        require(peak.shape[0] == columns, "merge_block=0 needs a column's maxima together")
        return plgpu.kernel(
            functools.partial(_direct_body, parts=parts),
            out_type=out_type,
            grid=(rows, columns),
            grid_names=("row", "column"),
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(part, peak, total, row_first, scale)
    return plgpu.kernel(
        functools.partial(_body, config=config, parts=parts),
        out_type=out_type,
        grid=(rows, columns // config.merge_heads, LATENT // config.merge_columns),
        grid_names=("row", "group", "chunk"),
        scratch_types=[
            plgpu.SMEM((config.merge_block, config.merge_heads, config.merge_columns), jnp.float32),
            plgpu.SMEM((config.merge_heads, 128), jnp.float32),
            plgpu.Barrier(num_barriers=config.merge_block // config.merge_rows),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(part, peak, total, row_first, scale)
