"""Register-level pieces that Pallas cannot express: loads, stores and reductions written for one warpgroup.

Each is an ``inline_mgpu`` block, which the GPU interpreter cannot run; a kernel's ``sim`` switch replaces it
by plain array code there. Thread ``t`` of a warpgroup is warp ``w = t // 32``, group ``g = t % 32 // 4`` and
place ``j = t % 4`` of its group, as in the PTX tables of wgmma fragments.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

WGMMA = plgpu.Layout.WGMMA
COLUMNS = WGMMA.reduce(0)  # one value per column of a WGMMA array
ROWS = WGMMA.reduce(1)  # one value per row
# 64 values: a lane holds a pair of neighbours, every warp all of them.
PAIRS = plgpu.Layout.TILED(
    fragmented_array.Tiling(((64,), (2,))),
    warp_dims=(fragmented_array.Replicated(4),),
    lane_dims=(-2,),
    vector_dim=-1,
)


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _lane() -> tuple[ir.Value, ir.Value, ir.Value]:
    """(warp of the warpgroup, group, place) of this thread."""
    thread = arith.remui(utils.thread_idx(), _i32(128))
    lane = arith.remui(thread, _i32(32))
    return arith.divui(thread, _i32(32)), arith.divui(lane, _i32(4)), arith.remui(lane, _i32(4))


def _sum(*terms: ir.Value) -> ir.Value:
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def _times(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, _i32(factor))


def _offset(pointer: ir.Value, byte_offset: ir.Value) -> ir.Value:
    return utils.getelementptr(pointer, [byte_offset], ir.IntegerType.get_signless(8))


def reduce_columns(op: str, x_MN: jax.Array, scratch_smem, transforms=(), *, busy: bool) -> jax.Array:
    """Reduces a WGMMA array of 64 rows along them ("max" or "add") through the warpgroup's own scratch.

    The reduction of Pallas goes through one scratch of the whole block, which concurrent warpgroups
    overwrite. ``scratch_smem``: room for 4 * N f32 at its start, not shared with another warpgroup.
    ``busy``: the scratch may still be read by a slower warp, so a barrier comes first. The warpgroup passes
    another barrier before it writes the scratch again.
    """
    columns = x_MN.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct((columns,), x_MN.dtype, layout=COLUMNS),
    )
    def reduce(_, x, scratch):
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        combine = {"max": arith.maximumf, "add": arith.addf}[op]
        warp, group, place = _lane()
        pointer = _offset(utils.memref_ptr(scratch), _times(place, 8))
        own = _offset(pointer, _times(warp, 4 * columns))
        if busy:
            utils.warpgroup_barrier()
        for tile, halves in enumerate(x.registers.reshape(columns // 8, 2)):
            value = combine(*halves)
            for distance in (4, 8, 16):
                value = combine(value, utils.shfl_bfly(value, distance))
            with utils.when(arith.cmpi(arith.CmpIPredicate.eq, group, _i32(0))):
                llvm.store(value, _offset(own, _i32(32 * tile)), alignment=8)
        utils.warpgroup_barrier()
        layout = COLUMNS.to_mgpu()
        out = np.empty(layout.registers_shape((columns,)), dtype=object)
        flat = out.reshape(-1)
        for tile in range(columns // 8):
            parts = [
                llvm.load(pair, _offset(pointer, _i32(4 * columns * w + 32 * tile)), alignment=8)
                for w in range(4)
            ]
            flat[tile] = combine(combine(parts[0], parts[1]), combine(parts[2], parts[3]))
        return mgpu.FragmentedArray(_registers=flat.reshape(out.shape), _layout=layout, _is_signed=None)

    return reduce(x_MN, scratch_smem)


def row_of_latent(column: int, words: int) -> int:
    """Row of the transposed array of ``load_transposed_e4m3`` that holds latent ``column`` of its block."""
    per_group = 4 * words
    within, warp_group = column % per_group, column // per_group
    warp, group = warp_group // 8, warp_group % 8
    return (within // 2) * 64 + warp * 16 + (within % 2) * 8 + group


def load_transposed_e4m3(page_smem, block: int, words: int, tokens: slice, transforms) -> jax.Array:
    """Loads ``128 * words`` latents of a 64-token e4m3 page as the f16 A operand of V.T @ P, tokens along K.

    8-bit wgmma cannot transpose, so V.T is built in registers: 32-bit loads take 4 latents of a token, a
    byte permute pairs the tokens, and the hardware conversion makes the pair an f16x2 fragment register. Row
    order is free in the M dimension, so a thread keeps the latents it loads: ``row_of_latent`` gives the
    order. Pairs of rows are read in an order that depends on the place, which makes the loads free of bank
    conflicts. ``page_smem``: (64, W) e4m3, tiling (8, 64), swizzle 64. ``tokens``: which of them, in
    multiples of 16. Returns (128 * words, tokens) f16, layout WGMMA.
    """
    rows = 128 * words
    first_tile, count = tokens.start // 8, (tokens.stop - tokens.start) // 8
    tiles_per_row = page_smem.shape[-1] // 64

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms),),
        return_type=plgpu.ShapeDtypeStruct((rows, 8 * count), jnp.float16, layout=WGMMA),
    )
    def load(_, page):
        i32 = ir.IntegerType.get_signless(32)
        f16x2 = ir.VectorType.get((2,), ir.F16Type.get())
        vector_type = ir.VectorType.get((words,), i32)
        pointer = utils.memref_ptr(page)
        warp, group, place = _lane()
        odd = arith.remui(place, _i32(2))
        # Byte column of this thread inside the block, then tile, 16-byte chunk and rest of it.
        column = _sum(_times(warp, 32 * words), _times(group, 4 * words))
        tile, chunk = arith.divui(column, _i32(64)), arith.remui(arith.divui(column, _i32(16)), _i32(4))
        rest = arith.remui(column, _i32(16))
        swizzled = _times(arith.xori(chunk, place), 16)
        base = _sum(_times(tile, 512), swizzled, rest, _times(place, 128))
        first = _offset(pointer, arith.addi(base, _times(odd, 64)))
        second = _offset(pointer, arith.addi(base, _times(arith.subi(_i32(1), odd), 64)))
        is_odd = arith.cmpi(arith.CmpIPredicate.eq, odd, _i32(1))
        low = arith.select(is_odd, _i32(0x1504), _i32(0x5140))
        high = arith.select(is_odd, _i32(0x3726), _i32(0x7362))
        out = np.empty(plgpu.Layout.WGMMA.to_mgpu().registers_shape((rows, 8 * count)), dtype=object)
        flat = out.reshape(2 * words, count, 2)  # (M tile, 8-token tile, row g or g + 8)
        for token_tile in range(count):
            start = ((first_tile + token_tile) * tiles_per_row + block * 2 * words) * 512
            loads = []
            for thread_pointer in (first, second):
                address = _offset(thread_pointer, _i32(start))
                loads.append(llvm.load(vector_type, address, alignment=4 * words))
            for word in range(words):
                a, b = (llvm.extractelement(load, _i32(word)) for load in loads)
                for half, selector in enumerate((low, high)):
                    lower, upper = utils.inline_ptx(
                        "{ .reg .b32 pairs; .reg .b16 lo, hi; prmt.b32 pairs, $2, $3, $4;"
                        " mov.b32 {lo, hi}, pairs;"
                        " cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
                        a,
                        b,
                        selector,
                        result_types=(i32, i32),
                    )
                    flat[2 * word + half, token_tile, 0] = utils.bitcast(lower, f16x2)
                    flat[2 * word + half, token_tile, 1] = utils.bitcast(upper, f16x2)
        return mgpu.FragmentedArray(
            _registers=flat.reshape(out.shape), _layout=plgpu.Layout.WGMMA.to_mgpu(), _is_signed=None
        )

    return load(page_smem)


def permuted_column(column: int) -> int:
    """Where ``stage_queries`` puts a column within its 64: the K order of ``load_page_e4m3``."""
    place, step, within = column // 16, column % 16 // 4, column % 4
    return 16 * step + 8 * (within // 2) + 2 * place + within % 2


def load_page_e4m3(page_smem, tile: int, transforms) -> jax.Array:
    """Loads 64 columns of a 64-token e4m3 page as the f16 A operand of K @ Q.T, tokens along M.

    A thread takes 16 consecutive bytes of a token, which makes the K order that of ``permuted_column``.
    ``page_smem``: (64, W) e4m3, tiling (8, 64), swizzle 64. Returns (64, 64) f16, layout WGMMA.
    """
    tiles_per_row = page_smem.shape[-1] // 64

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms),),
        return_type=plgpu.ShapeDtypeStruct((64, 64), jnp.float16, layout=WGMMA),
    )
    def load(_, page):
        i32 = ir.IntegerType.get_signless(32)
        f16x2 = ir.VectorType.get((2,), ir.F16Type.get())
        warp, group, place = _lane()
        swizzled = arith.xori(place, arith.divui(group, _i32(2)))
        start = _sum(_times(warp, 1024 * tiles_per_row), _times(group, 64), _times(swizzled, 16))
        pointer = _offset(utils.memref_ptr(page), start)
        out = np.empty(WGMMA.to_mgpu().registers_shape((64, 64)), dtype=object)
        flat = out.reshape(8, 2)  # (8-column tile, row g or g + 8)
        for half in range(2):
            address = _offset(pointer, _i32(512 * (half * tiles_per_row + tile)))
            loaded = llvm.load(ir.VectorType.get((4,), i32), address, alignment=16)
            for word in range(4):
                lower, upper = utils.inline_ptx(
                    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2;"
                    " cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
                    llvm.extractelement(loaded, _i32(word)),
                    result_types=(i32, i32),
                )
                flat[2 * word, half] = utils.bitcast(lower, f16x2)
                flat[2 * word + 1, half] = utils.bitcast(upper, f16x2)
        return mgpu.FragmentedArray(
            _registers=flat.reshape(out.shape), _layout=WGMMA.to_mgpu(), _is_signed=None
        )

    return load(page_smem)


def stage_queries(q_gmem, q_smem, unit_smem, transforms, *, permuted: bool, rest_smem=None) -> None:
    """Writes the leading columns of bf16 queries to shared memory as f16, in the order of
    ``permuted_column`` if ``permuted``, and the 64 after them to ``rest_smem`` as bf16.

    A power of two per query brings its largest element into [128, 256), so that f16 holds its 8 significant
    bits exactly down to 2**-21 of the largest. ``q_gmem``: (N, C) bf16, N a multiple of 8. ``q_smem``: (N,
    columns) f16, tiling (8, 64), swizzle 128; ``rest_smem`` (N, 64) bf16 alike, multiplied by the same power.
    ``unit_smem``: (N,) f32, what the queries are to be multiplied by.
    """
    columns = q_smem.shape[-1]
    rests = () if rest_smem is None else (rest_smem,)
    tiled = plgpu.RefType(transforms)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tiled, plgpu.RefType(), *(tiled for _ in rests)))
    def stage(_, q, out, unit, *rests):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair = ir.VectorType.get((2,), i32)
        rows, width = q.type.shape
        chunks = columns // 64
        thread = arith.remui(utils.thread_idx(), _i32(128))
        sub_row, i = arith.divui(thread, _i32(16)), arith.remui(thread, _i32(16))
        place, step = arith.divui(i, _i32(4)), arith.remui(i, _i32(4))
        source = _offset(utils.memref_ptr(q), _sum(_times(sub_row, 2 * width), _times(i, 8)))
        targets: list[ir.Value] = []
        rest_targets: list[ir.Value] = []
        for half in range(2):
            orders = {
                True: (_sum(_times(step, 2), _i32(half)), _times(place, 4)),
                False: (
                    arith.divui(i, _i32(2)),
                    _sum(_times(arith.remui(i, _i32(2)), 8), _i32(4 * half)),
                ),
            }
            for ref, order, pointers in (
                (out, permuted, targets),
                *((r, False, rest_targets) for r in rests),
            ):
                chunk, rest = orders[order]
                within = _sum(_times(sub_row, 128), _times(arith.xori(chunk, sub_row), 16), rest)
                pointers.append(_offset(utils.memref_ptr(ref), within))
        unit_pointer = _offset(utils.memref_ptr(unit), _times(sub_row, 4))

        def shift(x, n):
            return arith.shli(x, _i32(n))

        def as_f32(x):
            return utils.bitcast(x, f32)

        def scaled(word, factor, kind):
            bits = (shift(word, 16), arith.andi(word, _i32(-65536)))
            low, high = (arith.mulf(as_f32(x), factor) for x in bits)
            return utils.inline_ptx(f"cvt.rn.{kind}.f32 $0, $2, $1;", low, high, result_types=i32)

        def load(block, k):
            return llvm.load(pair, _offset(source, _i32(block * 16 * width + 128 * k)), alignment=8)

        ahead = 1 if permuted else 2  # blocks whose loads are on their way, where there are registers
        blocks = range(rows // 8)
        loads = {b: [load(b, k) for k in range(chunks + len(rests))] for b in blocks[: ahead - 1]}
        for block in blocks:
            for b in blocks[block + ahead - 1 : block + ahead]:
                loads[b] = [load(b, k) for k in range(chunks + len(rests))]
            raw = [[llvm.extractelement(x, _i32(half)) for half in range(2)] for x in loads.pop(block)]
            peak = _i32(0)
            for word in itertools.chain.from_iterable(raw[:chunks]):
                for x in (word, arith.shrui(word, _i32(16))):
                    peak = arith.maxsi(peak, arith.andi(x, _i32(0x7FFF)))
            for distance in (1, 2, 4, 8):
                peak = arith.maxsi(peak, utils.shfl_bfly(peak, distance))
            exponent = arith.maxsi(arith.shrui(peak, _i32(7)), _i32(10))
            factor = as_f32(shift(arith.subi(_i32(261), exponent), 23))
            with utils.when(arith.cmpi(arith.CmpIPredicate.eq, i, _i32(0))):
                llvm.store(
                    as_f32(shift(arith.subi(exponent, _i32(7)), 23)), _offset(unit_pointer, _i32(32 * block))
                )
            for k in range(chunks):
                for word, target in zip(raw[k], targets, strict=True):
                    packed = scaled(word, factor, "f16x2")
                    llvm.store(packed, _offset(target, _i32(1024 * (block * chunks + k))), alignment=4)
            for half, target in enumerate(rest_targets):
                packed = scaled(raw[chunks][half], factor, "bf16x2")
                llvm.store(packed, _offset(target, _i32(1024 * block)), alignment=4)

    stage(q_gmem, q_smem, unit_smem, *rests)


def rescale_rows(accs: tuple[jax.Array, ...], factor: jax.Array) -> tuple[jax.Array, ...]:
    """Multiplies the rows of WGMMA arrays by ``factor``; a warp whose factors are all 1 skips it."""

    @plgpu.inline_mgpu(
        arg_types=(*(WGMMA for _ in accs), ROWS),
        return_type=tuple(plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=WGMMA) for acc in accs),
    )
    def rescale(_, *args):
        *accs, factor = args
        i1 = ir.IntegerType.get_signless(1)
        one = utils.c(1.0, ir.F32Type.get())
        low, high = (llvm.extractelement(r, _i32(0)) for r in factor.registers.reshape(2))
        changed = arith.ori(*(arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in (low, high)))
        anyone = utils.inline_ptx(
            "{ .reg .pred p, q; setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff;"
            " selp.u32 $0, 1, 0, q; }",
            arith.extui(ir.IntegerType.get_signless(32), changed),
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        registers = [r for acc in accs for r in acc.registers.flat]
        halves = [h for acc in accs for h in np.arange(acc.registers.size) % 2]
        kind = registers[0].type
        branch = scf.IfOp(  # type: ignore[call-arg]
            arith.trunci(i1, anyone), [kind] * len(registers), has_else=True
        )
        with ir.InsertionPoint(branch.then_block):
            factors = [vector.broadcast(kind, x) for x in (low, high)]
            scf.yield_([arith.mulf(r, factors[h]) for r, h in zip(registers, halves, strict=True)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(registers)
        out, start = [], 0
        for acc in accs:
            own = np.empty(acc.registers.shape, dtype=object)
            own.reshape(-1)[:] = list(branch.results)[start : start + own.size]
            start += own.size
            out.append(mgpu.FragmentedArray(_registers=own, _layout=acc.layout, _is_signed=None))
        return tuple(out)

    return rescale(*accs, factor)


def load_scales(scales_smem) -> tuple[jax.Array, ...]:
    """Loads the (64, 4) f32 scales of a page as four arrays over tokens, layout WGMMA.reduce(1)."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=tuple(plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=ROWS) for _ in range(4)),
    )
    def load(_, scales):
        f32 = ir.F32Type.get()
        warp, group, _ = _lane()
        pointer = _offset(utils.memref_ptr(scales), _sum(_times(warp, 256), _times(group, 16)))
        layout = ROWS.to_mgpu()
        shape = layout.registers_shape((64,))
        halves = [
            llvm.load(ir.VectorType.get((4,), f32), _offset(pointer, _i32(128 * half)), alignment=16)
            for half in range(2)
        ]
        one = ir.VectorType.get((1,), f32)
        out = []
        for k in range(4):
            registers = np.empty(2, dtype=object)
            for half in range(2):
                registers[half] = vector.broadcast(one, llvm.extractelement(halves[half], _i32(k)))
            out.append(
                mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=None)
            )
        return tuple(out)

    return load(scales_smem)


def zero_rows(page_smem, first_row: jax.Array, columns: int, transforms) -> None:
    """Writes zeros over rows ``first_row`` and later of a 64-row page, in its leading ``columns``.

    Swizzling moves 16-byte chunks within a row of a tile only, so whole tile rows need no unswizzling.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT(())))
    def zero(_, page, first):
        i32 = ir.IntegerType.get_signless(32)
        _, tiles, _, width = page.type.shape
        tile_row_bytes = width * utils.bytewidth(page.type.element_type)
        thread = arith.remui(utils.thread_idx(), _i32(128))
        row, half = arith.divui(thread, _i32(2)), arith.remui(thread, _i32(2))
        covered = columns // width // 2
        start = _sum(
            _times(arith.divui(row, _i32(8)), tiles * 8 * tile_row_bytes),
            _times(half, covered * 8 * tile_row_bytes),
            _times(arith.remui(row, _i32(8)), tile_row_bytes),
        )
        pointer = _offset(utils.memref_ptr(page), start)
        zeros = llvm.mlir_zero(ir.VectorType.get((4,), i32))
        with utils.when(arith.cmpi(arith.CmpIPredicate.sge, row, first.registers.item())):
            for tile in range(covered):
                for chunk in range(tile_row_bytes // 16):
                    at = _offset(pointer, _i32(tile * 8 * tile_row_bytes + 16 * chunk))
                    llvm.store(zeros, at, alignment=16)

    zero(page_smem, first_row)


def store_transposed(x_MN: jax.Array, out_gmem, *, words: int | None) -> None:
    """Stores a WGMMA accumulator transposed, (N, M), to global memory in the order of the latents.

    ``words`` as in ``load_transposed_e4m3`` when the rows are in its order, None when they are in plain
    order.
    """

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def store(_, x, out):
        f32 = ir.F32Type.get()
        pointer = utils.memref_ptr(out)
        warp, group, place = _lane()
        rows, columns = x.shape
        row_stride = ir.MemRefType(out.type).get_strides_and_offset()[0][0]
        flat = x.registers.reshape(rows // 64, columns // 8, 2)

        def element(tile, column_tile, half, i):
            return llvm.extractelement(flat[tile, column_tile, half], _i32(i))

        if words is None:
            latent = _sum(_times(warp, 16), group)
        else:
            latent = _sum(_times(warp, 32 * words), _times(group, 4 * words))
        own = _offset(pointer, _sum(_times(place, 8 * row_stride), _times(latent, 4)))
        for column_tile in range(columns // 8):
            for i in range(2):
                row_offset = 4 * row_stride * (column_tile * 8 + i)
                if words is None:
                    for tile in range(rows // 64):
                        for half in range(2):
                            address = _offset(own, _i32(row_offset + 4 * (tile * 64 + half * 8)))
                            llvm.store(element(tile, column_tile, half, i), address)
                    continue
                for block in range(rows // (128 * words)):
                    for word in range(words):
                        values = llvm.mlir_undef(ir.VectorType.get((4,), f32))
                        for k in range(4):
                            tile = block * 2 * words + 2 * word + k // 2
                            values = llvm.insertelement(values, element(tile, column_tile, k % 2, i), _i32(k))
                        address = _offset(own, _i32(row_offset + 512 * words * block + 16 * word))
                        llvm.store(values, address, alignment=16)

    store(x_MN, out_gmem)


def swap_pairs(x_R: jax.Array) -> jax.Array:
    """Exchanges elements 2i and 2i + 1 of an array of 64 in layout ``PAIRS``."""

    @plgpu.inline_mgpu(
        arg_types=(PAIRS,),
        return_type=plgpu.ShapeDtypeStruct(x_R.shape, x_R.dtype, layout=PAIRS),
    )
    def swap(_, x):
        out = np.empty_like(x.registers)
        for index, register in np.ndenumerate(x.registers):
            out[index] = vector.shuffle(register, register, [1, 0])
        return mgpu.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=x.is_signed)

    return swap(x_R)
