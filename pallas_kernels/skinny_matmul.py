"""Products of a few tokens with a wide matrix, at the speed of memory: ``y = norm(x) @ W.T`` for decode.

At one to sixteen tokens a projection is its weights' bytes. XLA reaches 2 to 3.5 TB/s there, and adds a
launch for the norm before the product and one for the rounding after it. Here a block takes 16 rows of W, its
warps share K, and each lane loads 16 bytes of a row at a time straight into the A operand of
``mma.m16n8k16``; the tokens are the 8 columns of B, loaded the same way. Both have K in the same order, so
any order will do. RMSNorm is a factor of the finished sum, from the very values that a lane multiplies.

Weights are read once, without a ring in shared memory: ``Config.depth`` steps a warp are in flight in
registers.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm
from jaxlib.mlir.dialects import math as mlir_math
from jaxtyping import Array, Float, Int

from pallas_kernels.common import require
from pallas_kernels.fragments import _i32, _offset, _sum, _times

HALF = 8  # rows of half an A operand
STEP = 32  # of K that a warp multiplies at a time
TOKENS = 32  # at most
_PART = 2 * HALF * 8 + 8  # f32 that a warp leaves for eight tokens: sums, and sums of squares


@dataclasses.dataclass(frozen=True)
class Config:
    """``warps`` of a block share K; ``depth`` steps of each are in flight.

    ``half``: rows of W in each half of a block, up to 8. Fewer make more blocks, for a W of few rows; the
    instructions stay those of 8.
    """

    warps: int = 4
    depth: int = 4
    half: int = HALF


def choose_config(rows: int, k: int) -> Config:
    """Up to 16 warps of three steps or more each, such that all blocks run at once. A pure function."""
    half = next((half for half in (HALF, 4) if rows // (2 * half) >= 96), 2)
    blocks = rows // (2 * half)
    for warps in (16, 8, 4):
        steps, rest = divmod(k, warps * STEP)
        resident = 132 * (512 if steps >= 7 else 1024)  # threads: of 112 registers, or of 64
        if not rest and steps >= 3 and 32 * warps * blocks <= resident:
            return Config(warps=warps, half=half)
    return Config(half=half)


def _multiply(
    x_gmem, low_gmem, high_gmem, add_gmem, out_gmem, parts_smem, config: Config, *, tokens: int, stride: int,
    epsilon: float | None, gated: bool,
):  # fmt: skip
    """One block: two runs of rows of W, all tokens. ``stride``: elements from one token of x to the next."""
    tiles = -(-tokens // 8)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (5 + len(add_gmem)))
    def multiply(_, x, w, high_w, out, parts, *addends):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        k = w.type.shape[1]
        steps = k // (config.warps * STEP)
        row_bytes = 2 * ir.MemRefType(w.type).get_strides_and_offset()[0][0]
        thread = utils.thread_idx()
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        group, place = arith.divui(lane, _i32(4)), arith.remui(lane, _i32(4))
        along_k = _sum(_times(warp, 2 * STEP * steps), _times(place, 16))
        # Groups beyond the rows read the first ones' again, at no cost in bytes; nobody reads their sums.
        own_row = _times(arith.remui(group, _i32(config.half)), row_bytes)
        w_low, w_high = (_offset(utils.memref_ptr(ref), _sum(own_row, along_k)) for ref in (w, high_w))
        # A token that is not there reads the last one's, and is not written.
        token_rows = [arith.minui(_sum(group, _i32(8 * t)), _i32(tokens - 1)) for t in range(tiles)]
        x_pointers = [
            _offset(utils.memref_ptr(x), _sum(_times(row, 2 * stride), along_k)) for row in token_rows
        ]
        zero = utils.c(0.0, f32)
        acc = [[zero] * 4 for _ in range(tiles)]
        squares = [[zero] * 4 for _ in range(tiles)]  # products of tokens with tokens, of which the diagonal

        def mma(total, a, b):
            return list(
                utils.inline_ptx(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3},"
                    " {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                    *a, *b, *total, result_types=(f32,) * 4, convergent=True,
                )
            )  # fmt: skip

        def load(pointer, step, hint=""):
            return utils.inline_ptx(
                f"ld.global{hint}.v4.u32 {{$0, $1, $2, $3}}, [$4];",
                _offset(pointer, _i32(2 * STEP * step)),
                result_types=(i32,) * 4,
            )

        def fetch(step):
            hint = ".nc.L1::no_allocate.L2::128B"
            return load(w_low, step, hint), load(w_high, step, hint), [load(p, step) for p in x_pointers]

        ring = [fetch(step) for step in range(min(config.depth, steps))]
        for step in range(steps):
            low, high, xs = ring[step % config.depth]
            for t, words in enumerate(xs):
                for i in (0, 2):
                    b = words[i : i + 2]
                    acc[t] = mma(acc[t], (low[i], high[i], low[i + 1], high[i + 1]), b)
                    if epsilon is not None:
                        squares[t] = mma(squares[t], (b[0], _i32(0), b[1], _i32(0)), b)
            if step + config.depth < steps:
                ring[step % config.depth] = fetch(step + config.depth)

        # Per warp and tile of tokens: 16 x 8 sums as [row][token], then 8 sums of squares.
        size = _PART
        own = _offset(utils.memref_ptr(parts), _times(warp, 4 * size * tiles))
        for t in range(tiles):
            at = _offset(own, _sum(_times(group, 32), _times(place, 8), _i32(4 * size * t)))
            for i, value in enumerate(acc[t]):
                llvm.store(value, _offset(at, _i32(256 * (i // 2) + 4 * (i % 2))))
            if epsilon is not None:
                odd = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(group, _i32(2)), _i32(1))
                own_square = arith.select(odd, squares[t][1], squares[t][0])
                holds = arith.cmpi(arith.CmpIPredicate.eq, place, arith.divui(group, _i32(2)))
                with utils.when(holds):
                    llvm.store(own_square, _offset(own, _sum(_times(group, 4), _i32(4 * (size * t + 128)))))
        gpu.barrier()
        # A sum over warps is shared by ``split`` neighbouring threads, each with four parts of it.
        rows, split = config.half * (1 if gated else 2), config.warps // 4
        nth, output = arith.remui(thread, _i32(split)), arith.divui(thread, _i32(split))
        row, first = arith.remui(output, _i32(rows)), arith.divui(output, _i32(rows))
        out_type = ir.MemRefType(out.type).element_type
        out_stride = ir.MemRefType(out.type).get_strides_and_offset()[0][0]
        # A row's place among the 16 of the operand.
        place_in_a = arith.addi(
            arith.remui(row, _i32(config.half)), _times(arith.divui(row, _i32(config.half)), HALF)
        )
        own_parts = _offset(utils.memref_ptr(parts), _times(nth, 16 * size * tiles))

        def add(pointer):
            total = llvm.load(f32, pointer)
            for each in range(1, 4):
                total = arith.addf(total, llvm.load(f32, _offset(pointer, _i32(4 * size * tiles * each))))
            for distance in (1, 2)[: split.bit_length() - 1]:
                total = arith.addf(total, utils.shfl_bfly(total, distance))
            return total

        for begin in range(0, tokens, 128 // rows):
            token = _sum(first, _i32(begin))
            real = arith.cmpi(arith.CmpIPredicate.ult, token, _i32(tokens))
            read = arith.minui(token, _i32(tokens - 1))
            base = _offset(own_parts, _times(arith.divui(read, _i32(8)), 4 * size))
            within = arith.remui(read, _i32(8))
            at = _offset(base, _sum(_times(place_in_a, 32), _times(within, 4)))
            values = [add(at)] + ([add(_offset(at, _i32(32 * HALF)))] if gated else [])
            if epsilon is not None:
                square = add(_offset(base, _sum(_times(within, 4), _i32(64 * HALF))))
            with utils.when(arith.andi(real, arith.cmpi(arith.CmpIPredicate.eq, nth, _i32(0)))):
                if epsilon is not None:
                    mean = arith.mulf(square, utils.c(1.0 / k, f32))
                    factor = mlir_math.rsqrt(arith.addf(mean, utils.c(epsilon, f32)))
                    values = [arith.mulf(value, factor) for value in values]
                value = values[0]
                if gated:
                    one = utils.c(1.0, f32)
                    sigmoid = arith.divf(one, arith.addf(one, mlir_math.exp(arith.negf(value))))
                    value = arith.mulf(arith.mulf(value, sigmoid), values[1])
                size_out = utils.bytewidth(out_type)
                offset = _sum(_times(token, size_out * out_stride), _times(row, size_out))
                for addend in addends:
                    other = llvm.load(out_type, _offset(utils.memref_ptr(addend), offset))
                    value = arith.addf(value, other if out_type == f32 else arith.extf(f32, other))
                if out_type != f32:
                    value = arith.truncf(out_type, value)
                llvm.store(value, _offset(utils.memref_ptr(out), offset))

    multiply(x_gmem, low_gmem, high_gmem, out_gmem, parts_smem, *add_gmem)


def skinny_matmul(
    x: Float[Array, "T groups columns"],
    w: Float[Array, "Y out k"],
    layer: Int[Array, ""] | int,
    *add: Float[Array, "T features"],
    epsilon: float | None = None,
    first: int = 0,
    gated: bool = False,
    config: Config | None = None,
    out_dtype=jnp.bfloat16,
    sim: bool = False,
) -> Float[Array, "T features"]:
    """``x[:, g, first : first + k] @ w[layer].T``, summed in f32 and rounded once to ``out_dtype``.

    Args:
      x: up to 32 tokens. The rows of a matrix fall into as many equal groups as x has, each with its own x.
      w: stacked matrices, K-minor; ``out`` a multiple of a block's rows a group, k of 128.
      layer: which of them, may be traced; a plain int saves a dependent load.
      add: arrays of the result's shape and type that are added to it, before it is rounded.
      epsilon: divide by ``sqrt(mean(x^2) + epsilon)``, or None.
      first: column of x that meets the first of w, a multiple of 8.
      gated: SwiGLU: the rows are those of a gate, then as many of ``up``; the result is silu(gate) * up.
      config: tiles; ``choose_config`` when None.
      out_dtype: bf16 or f32.
      sim: run on array code that the GPU interpreter supports; for tests.

    Raises:
      ValueError: an argument contradicts another. NotImplementedError: more tokens, other widths or dtypes.
    """
    tokens, groups, columns = x.shape
    _, rows, k = w.shape
    for name, dtype in (("x", x.dtype), ("w", w.dtype)):
        require(dtype == jnp.bfloat16, f"{name} is {dtype}: must be bfloat16", NotImplementedError)
    require(out_dtype in (jnp.bfloat16, jnp.float32), f"out_dtype={out_dtype}: must be bfloat16 or float32")
    require(1 <= tokens <= TOKENS, f"{tokens} tokens: must be 1 to {TOKENS}", NotImplementedError)
    require(
        k % (4 * STEP) == 0 and columns % 8 == 0 and first % 8 == 0,
        f"k={k}, x of {columns} columns, first={first}: must be multiples of {4 * STEP}, 8 and 8",
        NotImplementedError,
    )
    require(0 <= first <= columns - k, f"first={first}: x has {columns} columns, w needs {k}")
    config = config or choose_config(rows, k)
    require(
        config.warps in (4, 8, 16) and k % (config.warps * STEP) == 0 and config.depth > 0,
        f"{config}: 4, 8 or 16 warps must divide k={k} into steps of {STEP}",
    )

    block_rows = 2 * config.half
    require(
        config.half in (2, 4, HALF) and rows % (block_rows * groups) == 0,
        f"{rows} rows in {groups} groups: must be a multiple of {block_rows} each",
        NotImplementedError,
    )
    require(not gated or groups == 1, f"gated with {groups} groups: must be 1", NotImplementedError)
    features = rows // 2 if gated else rows
    for each in add:
        got, want = (each.shape, each.dtype), ((tokens, features), jnp.dtype(out_dtype))
        require(got == want, f"an array to add is {got}: must be {want}")

    inputs = {"x": x, "w": w} | ({} if isinstance(layer, int) else {"layer": jnp.reshape(layer, (1,))})

    def body(*refs):
        x_gmem, w_gmem, *rest = refs
        which = layer if isinstance(layer, int) else rest.pop(0)[0]
        *add_gmem, out_gmem, parts_smem = rest
        block = lax.axis_index("block")
        x_gmem = x_gmem.at[:, block // (rows // block_rows // groups), pl.ds(first, k)]
        step = config.half if gated else block_rows
        low = block * step
        high = low + (features if gated else config.half)
        low_gmem, high_gmem = (w_gmem.at[which, pl.ds(at, config.half)] for at in (low, high))
        out_gmem, *add_gmem = (ref.at[:, pl.ds(low, step)] for ref in (out_gmem, *add_gmem))
        if not sim:
            _multiply(
                x_gmem, low_gmem, high_gmem, add_gmem, out_gmem, parts_smem, config,
                tokens=tokens, stride=groups * columns, epsilon=epsilon, gated=gated,
            )  # fmt: skip
            return
        x_Tk = x_gmem[...].astype(jnp.float32)
        factor_T1 = jnp.ones((tokens, 1), jnp.float32)
        if epsilon is not None:
            factor_T1 = lax.rsqrt(jnp.sum(x_Tk * x_Tk, axis=1, keepdims=True) / k + epsilon)
        low_To, high_To = (
            jnp.sum(x_Tk[:, None, :] * ref[...].astype(jnp.float32)[None], axis=2) * factor_T1
            for ref in (low_gmem, high_gmem)
        )
        y_To = jax.nn.silu(low_To) * high_To if gated else jnp.concatenate([low_To, high_To], axis=1)
        for ref in add_gmem:
            y_To = y_To + ref[...].astype(jnp.float32)
        out_gmem[...] = y_To.astype(out_dtype)

    parts = config.warps * -(-tokens // 8) * _PART
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, features), out_dtype),
        grid=(rows // block_rows,),
        grid_names=("block",),
        num_threads=1 if sim else config.warps // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((parts,), jnp.float32)],
        kernel_name=f"skinny_matmul_{rows}x{k}",
    )(*inputs.values(), *add)
