"""Merges the parts of paged MLA decode: what several blocks found about different pages of one row."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import LOG2E

LATENT = 512
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
    """Merges the parts of one row and column, for ``merge_columns`` latents."""
    row, column, chunk = lax.axis_index("row"), lax.axis_index("column"), lax.axis_index("chunk")
    copy, width, size = config.merge_rows, config.merge_columns, config.merge_block
    first = first_gmem[row] * parts
    count = first_gmem[row + 1] * parts - first
    blocks = (count + size - 1) // size
    lanes = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
    latents = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

    def per_copy(k, body):
        lax.fori_loop(0, (jnp.minimum(count - k * size, size) + copy - 1) // copy, body, None)

    def start(k):
        def body(n, _):
            source = part_gmem.at[
                pl.ds(first + k * size + n * copy, copy), column, pl.ds(chunk * width, width)
            ]
            plgpu.copy_gmem_to_smem(source, part_smem.at[pl.ds(n * copy, copy)], barriers.at[n])

        per_copy(k, body)

    def peaks(k):
        index = plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=lanes) + k * size
        peak = plgpu.load(peak_gmem.at[pl.ds(first + k * size, 128), column], layout=lanes, optimized=False)
        return jnp.where((index < count) & (index < (k + 1) * size), peak, NEVER)

    start(0)
    top = lax.fori_loop(0, blocks, lambda k, top: jnp.maximum(top, jnp.max(peaks(k))), jnp.float32(NEVER))

    def per_block(k, carry):
        acc, total = carry
        peak = peaks(k)
        live = peak > NEVER
        weight = jnp.where(live, jnp.exp2(peak - top), 0.0)
        part_total = plgpu.load(
            total_gmem.at[pl.ds(first + k * size, 128), column], layout=lanes, optimized=False
        )
        total = total + jnp.sum(jnp.where(live, weight * part_total, 0.0))
        weight_smem[...] = weight
        plgpu.commit_smem()

        def wait(n, _):
            plgpu.barrier_wait(barriers.at[n])

        per_copy(k, wait)

        def add(s, acc):
            return acc + weight_smem[s] * plgpu.load(part_smem.at[s], layout=latents)

        acc = lax.fori_loop(0, jnp.minimum(count - k * size, size), add, acc)
        plgpu.commit_smem()

        @pl.when(k + 1 < blocks)
        def _():
            start(k + 1)

        return acc, total

    acc = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), latents)
    acc, total = lax.fori_loop(0, blocks, per_block, (acc, jnp.float32(0)))
    inverse = jnp.where(total > 0, scale_gmem[0] / total, 0.0)
    out_gmem[row, column, pl.ds(chunk * width, width)] = (acc * inverse).astype(out_gmem.dtype)

    @pl.when(chunk == 0)
    def _():
        lse_gmem[row, column] = jnp.where(total > 0, (top + jnp.log2(total)) / LOG2E, -jnp.inf)


def merge(part, peak, total, row_first, scale, *, config, parts: int, out_dtype):
    rows, columns = row_first.shape[0] - 1, part.shape[1]
    return plgpu.kernel(
        functools.partial(_body, config=config, parts=parts),
        out_type=(
            jax.ShapeDtypeStruct((rows, columns, LATENT), out_dtype),
            jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        ),
        grid=(rows, columns, LATENT // config.merge_columns),
        grid_names=("row", "column", "chunk"),
        scratch_types=[
            plgpu.SMEM((config.merge_block, config.merge_columns), jnp.float32),
            plgpu.SMEM((128,), jnp.float32),
            plgpu.Barrier(num_barriers=config.merge_block // config.merge_rows),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(part, peak, total, row_first, scale)
