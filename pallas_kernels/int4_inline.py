"""Register-level pieces of the INT4 kernels, for which Pallas has no words.

A wgmma takes its A operand (64 rows of weights) from registers: in every 16 columns the four lanes of a row
hold columns {2t, 2t+1, 2t+8, 2t+9}. K-minor INT4 gives a lane 32 consecutive columns in one 16-byte read
instead, all of one scale when groups have 32 or more, and pairs come out of a 32-bit word cheapest as
(nibble i, nibble i + 4): one shift and one lop3. Instead of moving values between lanes, the kernels let
the *order of K inside each run of 128* be what the registers hold, and store the other operand in the same
order (:func:`permute_k`): a sum over K does not care.
"""

# mypy: disable-error-code="abstract"
# (the transforms are declared as protocols with empty bodies)
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

COLUMNS = 32  # columns of an accumulator that pass through shared memory at a time

# (w >> 4i) & 0x000F000F ^ 0x43084308 is the bf16 pair (136 + q_i, 136 + q_{i+4}) of signed nibbles q.
_DEQUANTIZE = """{
.reg .b32 a<4>, m;
mov.b32 m, 0x43084308;
shr.u32 a1, $4, 4;
shr.u32 a2, $4, 8;
shr.u32 a3, $4, 12;
lop3.b32 a0, $4, 0x000F000F, m, 0x6a;
lop3.b32 a1, a1, 0x000F000F, m, 0x6a;
lop3.b32 a2, a2, 0x000F000F, m, 0x6a;
lop3.b32 a3, a3, 0x000F000F, m, 0x6a;
sub.bf16x2 a0, a0, m;
sub.bf16x2 a1, a1, m;
sub.bf16x2 a2, a2, m;
sub.bf16x2 a3, a3, m;
mul.bf16x2 $0, a0, $5;
mul.bf16x2 $1, a1, $5;
mul.bf16x2 $2, a2, $5;
mul.bf16x2 $3, a3, $5;
}"""


def permute_k(x: jax.Array) -> jax.Array:
    """Reorder each run of 128 of the last axis as the registers hold it: (t, w, j, i) -> (w, i, t, j)."""
    split = x.reshape(*x.shape[:-1], x.shape[-1] // 128, 4, 4, 2, 4)
    lead = tuple(range(x.ndim))
    return jnp.transpose(split, (*lead, x.ndim + 1, x.ndim + 3, x.ndim, x.ndim + 2)).reshape(x.shape)


def permuted_words(t, words: list) -> list:
    """Of a thread program: 8 consecutive bf16, number 4t + w of a run of 128, as its words 16w + 4i + t."""
    return [t.pick_bytes(words[i // 2], words[2 + i // 2], 0x7632 if i % 2 else 0x5410) for i in range(4)]


def _i32(value: int) -> ir.Value:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def _add(a: ir.Value, b: ir.Value | int) -> ir.Value:
    return arith.addi(a, _i32(b) if isinstance(b, int) else b)


def _mul(a: ir.Value, b: int) -> ir.Value:
    return arith.muli(a, _i32(b))


def _lane() -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """(thread of the warpgroup, its warp, its row in a run of 8, its place t in a row).

    Row q of a fragment holds row (q / 2) + 4 * (q % 2) of the tile, so that the eight lanes which a 16-byte
    read of shared memory serves at once meet all its banks.
    """
    thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
    lane = arith.remui(thread, _i32(32))
    q = arith.divui(lane, _i32(4))
    row = _add(arith.divui(q, _i32(2)), _mul(arith.remui(q, _i32(2)), 4))
    return thread, arith.divui(thread, _i32(32)), row, arith.remui(lane, _i32(4))


def _at(ref: ir.Value, offset: ir.Value, dtype: ir.Type) -> ir.Value:
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], dtype)


def dequantize(
    w_smem,
    scale_smem,
    warp_rows,
    first_group: jax.Array,
    *,
    group: int,
    row_stride: int,
    split_columns: bool = False,
) -> tuple[jax.Array, ...]:
    """A warpgroup's 64 rows of INT4 times their scales, as A operands.

    Args:
        w_smem: [..., rows, chunk] int4, K-minor, tiled (8, chunk) with the swizzle of chunk / 2 bytes.
        scale_smem: bf16 scales in shared memory, ``row_stride`` elements a row, the rows in the order of
            w_smem.
        warp_rows: first row of warps 0-1 and of warps 2-3 in w_smem, two i32.
        first_group: the first group of this chunk inside a row of scale_smem.
        group: columns that share a scale: 32, 64 or 128.
        split_columns: warps 0-1 take the first half of the columns, warps 2-3 the second; chunk is 256.

    Returns:
        Arrays [64, 64] bf16, chunk / 64 of them or half as many if columns are split, each product rounded to
        bf16, columns in the order of :func:`permute_k`.
    """
    chunk = w_smem.shape[-1]
    count = chunk // 128 if split_columns else chunk // 64
    swizzle = chunk // 2
    part = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    tiled = plgpu.RefType((plgpu.TilingTransform((8, chunk)), plgpu.SwizzleTransform(swizzle)))
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(tiled, plgpu.RefType(), splat, splat, splat), return_type=(part,) * count)
    def run(ctx, w_ref, scale_ref, low_rows, high_rows, first):
        del ctx
        i8, i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
        _, warp, row8, t = _lane()
        upper = arith.cmpi(arith.CmpIPredicate.uge, warp, _i32(2))
        first_row = arith.select(upper, high_rows.registers.item(), low_rows.registers.item())
        first_row = _add(_add(first_row, _mul(arith.remui(warp, _i32(2)), 16)), row8)
        w_base = mgpu.utils.memref_ptr(w_ref)
        atom = swizzle // 16  # 16-byte pieces of a row
        turn = row8 if atom == 8 else arith.divui(row8, _i32(2))
        words: dict[tuple[int, int], list[ir.Value]] = {}
        scales: dict[tuple[int, int], ir.Value] = {}
        for half in range(2):
            row = _add(first_row, 8 * half)
            for block in range(count // 2):
                column = arith.extui(i32, upper) if split_columns else _i32(block)
                piece = arith.xori(_add(t, _mul(column, 4)), turn)
                offset = _add(_mul(row, swizzle), _mul(piece, 16))
                ptr = mgpu.utils.getelementptr(w_base, [offset], i8)
                vector = llvm.load(ir.VectorType.get((4,), i32), ptr, alignment=16)
                words[half, block] = [llvm.extractelement(vector, _i32(i)) for i in range(4)]
                mine = _add(arith.divui(t, _i32(group // 32)), _mul(column, 128 // group))
                offset = _add(_mul(row, row_stride), _add(first.registers.item(), mine))
                scale = llvm.load(i16, _at(scale_ref, offset, ir.BF16Type.get()), alignment=2)
                scale = arith.extui(i32, scale)
                scales[half, block] = mgpu.utils.prmt(scale, scale, _i32(0x1010))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        four = llvm.StructType.get_literal([i32] * 4)
        out = []
        for c in range(count):
            block = c // 2
            registers = np.empty((8, 2), dtype=object)
            for w in range(2):
                for half in range(2):
                    operands = [words[half, block][2 * (c % 2) + w], scales[half, block]]
                    result = llvm.inline_asm(four, operands, _DEQUANTIZE, "=r,=r,=r,=r,r,r")
                    for i in range(4):
                        value = llvm.extractvalue(i32, result, [i])
                        registers[4 * w + i, half] = mgpu.utils.bitcast(value, pair)
            layout = mgpu.WGMMA_LAYOUT
            registers = registers.reshape(layout.registers_shape((64, 64)))
            out.append(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
        return tuple(out)

    return run(w_smem, scale_smem, *warp_rows, first_group)


def _each_piece(count: int, per_row: int, rows, body: Callable[[ir.Value, ir.Value], None], first: int = 0):
    """``body(n, piece)`` for the pieces of ``count`` rows, a thread a piece, while first + n < ``rows``."""
    thread, *_ = _lane()
    for step in range(count * per_row // 128):
        index = _add(thread, 128 * step)
        n, piece = arith.divui(index, _i32(per_row)), arith.remui(index, _i32(per_row))
        inside = arith.cmpi(arith.CmpIPredicate.slt, _add(n, first), rows.registers.item())
        with mgpu.utils.when(inside):
            body(n, piece)


def _swizzled(n: ir.Value, piece: ir.Value, chunk: int) -> ir.Value:
    """Byte offset of 16-byte piece ``piece`` of row n: tiles of (8, 64) bf16 with the 128-byte swizzle."""
    in_tile = arith.remui(n, _i32(8))
    tile = _add(_mul(arith.divui(n, _i32(8)), chunk // 64), arith.divui(piece, _i32(8)))
    turned = arith.xori(arith.remui(piece, _i32(8)), in_tile)
    return _add(_add(_mul(tile, 1024), _mul(in_tile, 128)), _mul(turned, 16))


def load_tokens(token_gmem, token_smem, first_slot: jax.Array, rows: jax.Array) -> None:
    """token_smem[n] = token_gmem[first_slot + n] for n < rows, of at most 128."""
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), splat, splat))
    def run(ctx, token_ref, out_ref, first_slot, rows):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        thread, *_ = _lane()
        _barrier()
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, thread, rows.registers.item())):
            token = llvm.load(
                i32, _at(token_ref, _add(first_slot.registers.item(), thread), i32), alignment=4
            )
            llvm.store(token, _at(out_ref, thread, i32), alignment=4)
        _barrier()

    run(token_gmem, token_smem, first_slot, rows)


def gather_rows(x_gmem, token_smem, x_smem, rows: jax.Array, first_column: jax.Array) -> None:
    """Start copying x_gmem[token_smem[n], first_column:] into row n of x_smem for n < rows.

    x_smem is [N, chunk] bf16, tiled (8, 64) with the 128-byte swizzle. Rows from ``rows`` on keep what they
    held. The copies of one call form one group for :func:`wait_gather`.
    """
    n_total, chunk = x_smem.shape
    width = x_gmem.shape[1]
    splat = plgpu.Layout.WG_SPLAT(())
    tiled = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), tiled, splat, splat))
    def run(ctx, x_ref, token_ref, out_ref, rows, first_column):
        del ctx
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(out_ref))

        def copy(n, piece):
            token = llvm.load(i32, _at(token_ref, n, i32), alignment=4)
            column = _add(first_column.registers.item(), _mul(piece, 8))
            source = llvm.ptrtoint(i64, _gmem(x_ref, token, width, column))
            target = _add(base, _swizzled(n, piece, chunk))
            text = "cp.async.cg.shared.global [$0], [$1], 16;"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), [target, source], text, "r,l", has_side_effects=True)

        _each_piece(n_total, chunk // 8, rows, copy)
        _statement("cp.async.commit_group;")

    run(x_gmem, token_smem, x_smem, rows, first_column)


def wait_gather(pending: int) -> None:
    """Wait until at most ``pending`` groups of :func:`gather_rows` are in flight; wgmma may read the rest."""

    @plgpu.inline_mgpu()
    def run(ctx):
        del ctx
        _statement(f"cp.async.wait_group {pending};")
        _statement("fence.proxy.async.shared::cta;")

    run()


def _statement(text: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)


def put_columns(acc: jax.Array, stage_smem, first: int, count: int) -> None:
    """Store columns first .. first + count of a [64, N] accumulator: stage_smem[row * (count + 1) + n]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def run(ctx, acc, stage_ref):
        del ctx
        f32 = ir.F32Type.get()
        _, warp, row8, t = _lane()
        row, column = _add(_mul(warp, 16), row8), _mul(t, 2)
        registers = acc.registers.reshape(acc.shape[1] // 8, 2)
        base = _add(_mul(row, count + 1), column)
        for c in range(count // 8):
            for half in range(2):
                value = registers[first // 8 + c, half]
                for j in range(2):
                    offset = _add(base, 8 * half * (count + 1) + 8 * c + j)
                    llvm.store(llvm.extractelement(value, _i32(j)), _at(stage_ref, offset, f32), alignment=4)

    run(acc, stage_smem)


def _staged(stage_ref, row: ir.Value, column: ir.Value, count: int) -> ir.Value:
    f32 = ir.F32Type.get()
    return llvm.load(f32, _at(stage_ref, _add(_mul(row, count + 1), column), f32), alignment=4)


def _pack(low: ir.Value, high: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")


def _silu(x: ir.Value) -> ir.Value:
    text = """{
    .reg .f32 e;
    mul.f32 e, $1, 0fBFB8AA3B;
    ex2.approx.f32 e, e;
    add.f32 e, e, 0f3F800000;
    rcp.approx.f32 e, e;
    mul.f32 $0, $1, e;
    }"""
    return llvm.inline_asm(ir.F32Type.get(), [x], text, "=f,f")


def _barrier() -> None:
    mgpu.utils.warpgroup_barrier()


def _gmem(ref: ir.Value, row: ir.Value, width: int, column: ir.Value, dtype=None) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.muli(arith.extui(i64, row), mgpu.utils.c(width, i64))
    return _at(ref, arith.addi(offset, arith.extui(i64, column)), dtype or ir.BF16Type.get())


def fence_async() -> None:
    """Order plain accesses and those of the copy engine, to global memory too."""

    @plgpu.inline_mgpu()
    def run(ctx):
        del ctx
        _statement("fence.proxy.async;")

    run()


def store_swiglu(
    stage_smem,
    out_gmem,
    first_row: jax.Array,
    rows: jax.Array,
    first_column: jax.Array,
    *,
    first: int,
    count: int,
) -> None:
    """silu(gate) * up of a staged tile (32 gate rows, then 32 up rows) to rows of out_gmem, rounded to bf16.

    Column n of the tile is row first_row + first + n. ``first_column`` is the tile's first feature, a
    multiple of 32; out_gmem's rows hold features in the order of :func:`permute_k`. Rows from ``rows`` on are
    left alone.
    """
    width = out_gmem.shape[1]
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), splat, splat, splat))
    def run(ctx, stage_ref, out_ref, first_row, rows, first_column):
        del ctx
        _barrier()
        tile = first_column.registers.item()
        block = _mul(arith.divui(tile, _i32(128)), 128)
        t = arith.divui(arith.remui(tile, _i32(128)), _i32(32))

        def store(n, pair):  # w * 4 + i
            feature = _add(_mul(arith.divui(pair, _i32(4)), 8), arith.remui(pair, _i32(4)))
            value = []
            for j in range(2):
                gate = _staged(stage_ref, _add(feature, 4 * j), n, count)
                up = _staged(stage_ref, _add(feature, 4 * j + 32), n, count)
                value.append(arith.mulf(_silu(gate), up))
            row = _add(first_row.registers.item(), _add(n, first))
            column = _add(_add(block, _mul(t, 2)), _mul(pair, 8))
            llvm.store(_pack(*value), _gmem(out_ref, row, width, column), alignment=4)

        _each_piece(count, 16, rows, store, first)
        _barrier()

    run(stage_smem, out_gmem, first_row, rows, first_column)


def store_partial(
    stage_smem, out_gmem, first_row: jax.Array, rows: jax.Array, first_column: jax.Array, *, count: int
) -> None:
    """A staged tile in f32: gates to columns first_column + m, ups to half the width further."""
    width = out_gmem.shape[1]
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), splat, splat, splat))
    def run(ctx, stage_ref, out_ref, first_row, rows, first_column):
        del ctx
        _barrier()

        def store(n, m):
            column = _add(arith.remui(m, _i32(32)), _mul(arith.divui(m, _i32(32)), width // 2))
            column = _add(column, first_column.registers.item())
            ptr = _gmem(out_ref, _add(first_row.registers.item(), n), width, column, ir.F32Type.get())
            llvm.store(_staged(stage_ref, m, n, count), ptr, alignment=4)

        _each_piece(count, 64, rows, store)
        _barrier()

    run(stage_smem, out_gmem, first_row, rows, first_column)


def gather_swiglu(
    partial_gmem, x_smem, first_row: jax.Array, rows: jax.Array, first_column: jax.Array, *, splits: int
) -> None:
    """Rows n < rows of x_smem become silu(gate) * up of ``splits`` partial sums (:func:`store_partial`).

    partial_gmem is [splits * R, 2F] f32; x_smem [N, chunk] bf16, tiled (8, 64) with the 128-byte swizzle,
    holds the features from first_column on in the order of :func:`permute_k`.
    """
    n_total, chunk = x_smem.shape
    split_rows, width = partial_gmem.shape[0] // splits, partial_gmem.shape[1]
    splat = plgpu.Layout.WG_SPLAT(())
    tiled = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tiled, splat, splat, splat))
    def run(ctx, partial_ref, out_ref, first_row, rows, first_column):
        del ctx
        i8, f32 = ir.IntegerType.get_signless(8), ir.F32Type.get()
        base = mgpu.utils.memref_ptr(out_ref)

        def gather(n, pair):
            # slots 2 * pair and 2 * pair + 1 hold features 32t + 8w + i and that + 4 of a run of 128
            in_run = arith.remui(pair, _i32(64))
            t, wi = arith.remui(in_run, _i32(4)), arith.divui(in_run, _i32(4))
            feature = _add(_mul(t, 32), _add(_mul(arith.divui(wi, _i32(4)), 8), arith.remui(wi, _i32(4))))
            feature = _add(feature, _mul(arith.divui(pair, _i32(64)), 128))
            feature = _add(feature, first_column.registers.item())
            value = []
            for j in range(2):
                total = []
                for half in range(2):
                    column = _add(feature, 4 * j + half * (width // 2))
                    parts = []
                    for split in range(splits):
                        row = _add(_add(first_row.registers.item(), n), split * split_rows)
                        ptr = _gmem(partial_ref, row, width, column, f32)
                        parts.append(llvm.load(f32, ptr, alignment=4))
                    total.append(functools.reduce(arith.addf, parts))
                value.append(arith.mulf(_silu(total[0]), total[1]))
            offset = _swizzled(n, arith.divui(pair, _i32(4)), chunk)
            offset = _add(offset, _mul(arith.remui(pair, _i32(4)), 4))
            llvm.store(_pack(*value), mgpu.utils.getelementptr(base, [offset], i8), alignment=4)

        _each_piece(n_total, chunk // 2, rows, gather)
        _statement("fence.proxy.async.shared::cta;")

    run(partial_gmem, x_smem, first_row, rows, first_column)


def store_rows(
    stage_smem,
    out_gmem,
    first_row: jax.Array,
    rows: jax.Array,
    first_column: jax.Array,
    *,
    first: int,
    count: int,
):
    """out_gmem[first_row + n, first_column + m] = staged[m, n - first] for n < min(rows, first + count)."""
    width = out_gmem.shape[1]
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), splat, splat, splat))
    def run(ctx, stage_ref, out_ref, first_row, rows, first_column):
        del ctx
        _barrier()

        def store(n, pair):
            value = [_staged(stage_ref, _add(_mul(pair, 2), j), n, count) for j in range(2)]
            row = _add(first_row.registers.item(), _add(n, first))
            column = _add(first_column.registers.item(), _mul(pair, 2))
            llvm.store(_pack(*value), _gmem(out_ref, row, width, column), alignment=4)

        _each_piece(count, 32, rows, store, first)
        _barrier()

    run(stage_smem, out_gmem, first_row, rows, first_column)
