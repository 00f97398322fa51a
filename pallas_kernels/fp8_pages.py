"""FP8 pages from global memory through registers into 16-bit pages in shared memory, by one warpgroup.

``fetch`` starts loading a page; ``convert`` stores what was loaded, always has AHEAD loads of 16 bytes a
thread on their way, and goes on to those of the next page, so that no latency shows. A thread takes 16
consecutive bytes of a token: eight threads' stores of 16 bytes then fall into different banks of the swizzled
page.

An e4m3 value is exact in f16. In the scaled layout a power of two per token stays apart, the next above its
largest scale: values are multiplied by the ratio of their own scale to it, at most 1, so that no scale leaves
the range of f16, and the rotary part, in bf16, is divided by it, which is exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

MIN_POWER = -60
AHEAD = 8
CHUNKS = 36  # 16-byte chunks of a token's 576 values
STEPS = 9  # loads of the block after which the same columns follow, 32 tokens later
_SCALAR = plgpu.Layout.WG_SPLAT(())


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _vec4() -> ir.Type:
    return ir.VectorType.get((4,), ir.IntegerType.get_signless(32))


def _registers() -> plgpu.ShapeDtypeStruct:
    shape = (512 * AHEAD,)
    return plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WG_STRIDED(shape, vec_size=4))


def _thread() -> tuple[ir.Value, ir.Value, ir.Value]:
    """(warp, row of 8, place of 4) of this thread."""
    thread = arith.remui(utils.thread_idx(), _i32(128))
    lane = arith.remui(thread, _i32(32))
    return arith.divui(thread, _i32(32)), arith.divui(lane, _i32(4)), arith.remui(lane, _i32(4))


def _token(half: int) -> ir.Value:
    warp, row, _ = _thread()
    return arith.addi(arith.addi(arith.muli(warp, _i32(8)), row), _i32(32 * half))


def _page_address(ref: ir.Value, index: ir.Value) -> ir.Value:
    """Address of page ``index`` of a [Y, P, 64, W] array, 64 bits wide throughout."""
    i64 = ir.IntegerType.get_signless(64)
    kind = ir.MemRefType(ref.type)
    page_bytes = kind.shape[2] * kind.shape[3] * utils.bytewidth(kind.element_type)
    offset = arith.muli(arith.extui(i64, index), utils.c(page_bytes, i64))
    return arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(ref)), offset)


def _load(address: ir.Value, offset: int) -> ir.Value:
    words = utils.inline_ptx(
        f"ld.global.nc.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];",
        address,
        result_types=(ir.IntegerType.get_signless(32),) * 4,
        has_side_effects=True,
    )
    return _pack(words)


def _pack(words) -> ir.Value:
    vector = llvm.mlir_undef(_vec4())
    for k, word in enumerate(words):
        vector = llvm.insertelement(vector, word, _i32(k))
    return vector


def _words(vector: ir.Value) -> list[ir.Value]:
    return [llvm.extractelement(vector, _i32(k)) for k in range(4)]


def _loads(refs: list[ir.Value], index: ir.Value) -> list:
    """Functions that load this thread's vectors of a page, in the order of their use.

    Scaled: half by half the scales, the rotary part, the values. Otherwise what lies together: 512 bytes a
    warp.
    """
    thread, i64 = arith.remui(utils.thread_idx(), _i32(128)), ir.IntegerType.get_signless(64)
    if len(refs) == 1:
        start = arith.extui(i64, arith.muli(thread, _i32(16)))
        address = arith.addi(_page_address(refs[0], index), start)
        return [functools.partial(_load, address, 2048 * step) for step in range(2 * STEPS)]
    _, _, place = _thread()
    loads = []
    for half in range(2):
        addresses = []
        for ref, step in zip(refs, (16, 32, 0), strict=False):
            kind = ir.MemRefType(ref.type)
            stride = kind.shape[3] * utils.bytewidth(kind.element_type)
            start = arith.addi(arith.muli(_token(half), _i32(stride)), arith.muli(place, _i32(step)))
            start = arith.extui(i64, start)
            addresses.append(arith.addi(_page_address(ref, index), start))
        order = [(2, 0), (1, 0), (1, 16)] if len(refs) > 1 else []
        order += [(0, 64 * tile) for tile in range(ir.MemRefType(refs[0].type).shape[3] // 64)]
        loads += [functools.partial(_load, addresses[array], offset) for array, offset in order]
    return loads


def prefetch(pool: tuple, index: jax.Array) -> None:
    """Asks for a page to be brought into the L2."""

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType() for _ in pool), _SCALAR))
    def ask(_, *args):
        *refs, page = args
        elected = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        for ref in refs:
            kind = ir.MemRefType(ref.type)
            size = kind.shape[2] * kind.shape[3] * utils.bytewidth(kind.element_type)
            utils.inline_ptx(
                "cp.async.bulk.prefetch.L2.global [$0], $1;",
                _page_address(ref, page.registers.item()),
                _i32(size),
                predicate=elected,
                has_side_effects=True,
            )

    ask(*pool, index)


def fetch(pool: tuple, index: jax.Array) -> jax.Array:
    """Starts loading page ``index`` = layer * P + page of the arrays of ``pool``.

    ``pool``: (values [Y, P, 64, W] e4m3,) or (values, rope bf16 [Y, P, 64, 64], scales f32 [Y, P, 64, 4]).
    """

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType() for _ in pool), _SCALAR), return_type=_registers())
    def load(_, *args):
        *refs, page = args
        vectors = np.empty((AHEAD,), dtype=object)
        for k, one in enumerate(_loads(refs, page.registers.item())[:AHEAD]):
            vectors[k] = one()
        layout = _registers().layout.to_mgpu()
        return mgpu.FragmentedArray(_registers=vectors, _layout=layout, _is_signed=True)

    return load(*pool, index)


def _half_words(word: ir.Value, ratio: tuple | None) -> tuple[ir.Value, ...]:
    """Four e4m3 as two f16x2, times ``ratio``: two f16x2, the second what rounding took from the first."""
    i32 = ir.IntegerType.get_signless(32)
    if ratio is None:
        return utils.inline_ptx(
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
            word,
            result_types=(i32, i32),
        )
    return utils.inline_ptx(
        "{ .reg .b16 lo, hi; .reg .b32 a, b; mov.b32 {lo, hi}, $2;"
        " cvt.rn.f16x2.e4m3x2 a, lo; cvt.rn.f16x2.e4m3x2 b, hi; .reg .b32 c, d;"
        " mul.rn.f16x2 c, a, $4; mul.rn.f16x2 d, b, $4;"
        " fma.rn.f16x2 $0, a, $3, c; fma.rn.f16x2 $1, b, $3, d; }",
        word,
        *ratio,
        result_types=(i32, i32),
    )


def convert(
    fetched: jax.Array,
    pool: tuple,
    index: jax.Array,
    next_index: jax.Array,
    valid: jax.Array,
    page_smem: tuple,
    transforms,
) -> jax.Array:
    """Writes a page as 16-bit values; tokens ``valid`` and later become zeros, whatever the pool holds.

    ``fetched`` is what ``fetch`` of this page gave, the result what ``fetch`` of ``next_index`` would give.
    ``page_smem``: (values f16 (64, W), tiling (8, 64), swizzle 128), and in the scaled layout rope bf16 (64,
    64), tiled alike, and a power of two per token, f32 (64,), which both are still to be multiplied by. It is
    at least 2**MIN_POWER: smaller scales make values that f16 takes for 0.
    """
    scaled = len(pool) > 1
    tiles = pool[0].shape[3] // 64
    kinds = [plgpu.RefType(transforms), plgpu.RefType(transforms), plgpu.RefType()][: len(page_smem)]

    @plgpu.inline_mgpu(
        arg_types=(_registers().layout, *(plgpu.RefType() for _ in pool), *(_SCALAR,) * 3, *kinds),
        return_type=_registers(),
    )
    def store(_, first, *args):
        refs, (page, next_page, valid) = args[: len(pool)], args[len(pool) : len(pool) + 3]
        outs = args[len(pool) + 3 :]
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        warp, row, place = _thread()
        pointers = [utils.memref_ptr(out) for out in outs]

        def offset(pointer, amount):
            return utils.getelementptr(pointer, [amount], ir.IntegerType.get_signless(8))

        targets: dict = {}
        for out, per_row in ((0, 1024 * tiles), (1, 1024))[: 2 if scaled else 1]:
            for k in range(2):
                chunk = arith.xori(arith.addi(arith.muli(place, _i32(2)), _i32(k)), row)
                within = arith.addi(arith.muli(row, _i32(128)), arith.muli(chunk, _i32(16)))
                within = arith.addi(arith.muli(warp, _i32(per_row)), within)
                targets[out, k] = per_row, offset(pointers[out], within)

        def put(out: int, half: int, tile: int, k: int, words) -> None:
            per_row, target = targets[out, k]
            llvm.store(_pack(words), offset(target, _i32(4 * half * per_row + 1024 * tile)), alignment=16)

        def times_bf16(word, factor):
            return utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", word, factor, result_types=i32)

        loads = _loads(list(refs), page.registers.item())
        page_loads = len(loads)
        loads += _loads(list(refs), next_page.registers.item())[:AHEAD]
        vectors = list(first.registers)

        taken = iter(range(page_loads))

        def following(inside):
            """The next vector's words, zero beyond the row; starts another load."""
            n = next(taken)
            words = [arith.select(inside, word, _i32(0)) for word in _words(vectors[n])]
            vectors.append(loads[n + AHEAD]())
            return words

        def store_scaled() -> None:
            for half in range(2):
                token = _token(half)
                inside = arith.cmpi(arith.CmpIPredicate.slt, token, valid.registers.item())
                scales = [utils.bitcast(word, f32) for word in following(inside)]
                bits = _i32((127 + MIN_POWER) << 23)
                for scale in scales:  # not negative, so in the order of their bits
                    bits = arith.maxsi(bits, utils.bitcast(scale, i32))
                bits = arith.andi(arith.addi(bits, _i32(0x7FFFFF)), _i32(0x7F800000))
                inverse_bits = arith.subi(_i32(254 << 23), bits)
                inverse, power = utils.bitcast(inverse_bits, f32), utils.bitcast(bits, f32)
                inverse_pair = arith.ori(inverse_bits, arith.shrui(inverse_bits, _i32(16)))
                ratios = [
                    utils.inline_ptx(
                        "{ .reg .f32 near, rest; .reg .b16 head;"
                        " cvt.rn.f16.f32 head, $2; mov.b32 $0, {head, head};"
                        " cvt.f32.f16 near, head; sub.f32 rest, $2, near;"
                        " cvt.rn.f16x2.f32 $1, rest, rest; }",
                        arith.mulf(scale, inverse),
                        result_types=(i32, i32),
                    )
                    for scale in scales
                ]
                with utils.when(arith.cmpi(arith.CmpIPredicate.eq, place, _i32(0))):
                    llvm.store(power, offset(pointers[2], arith.muli(token, _i32(4))), alignment=4)
                for k in range(2):
                    put(1, half, 0, k, [times_bf16(word, inverse_pair) for word in following(inside)])
                for tile in range(tiles):
                    words = following(inside)
                    for k in range(2):
                        pairs = [_half_words(word, ratios[tile // 2]) for word in words[2 * k : 2 * k + 2]]
                        put(0, half, tile, k, [x for pair in pairs for x in pair])

        def here(op: str, x, bits: int):
            """``x op bits``, computed in this place: hoisted out of the loop it would take a register."""
            return utils.inline_ptx(f"{op}.b32 $0, $1, {bits};", x, result_types=i32, has_side_effects=True)

        def store_plain() -> None:
            thread = arith.remui(utils.thread_idx(), _i32(128))
            left = arith.subi(arith.muli(valid.registers.item(), _i32(CHUNKS)), thread)
            for step in range(2 * STEPS):
                chunk = arith.addi(thread, _i32(128 * (step % STEPS)))
                token, column = arith.divui(chunk, _i32(CHUNKS)), arith.remui(chunk, _i32(CHUNKS))
                tile, spot = arith.divui(column, _i32(4)), arith.remui(column, _i32(4))
                row = arith.remui(token, _i32(8))
                tile_at = arith.addi(arith.muli(arith.divui(token, _i32(8)), _i32(tiles)), tile)
                row_at = arith.addi(arith.muli(tile_at, _i32(1024)), arith.muli(row, _i32(128)))
                # In odd tiles the second half goes first: eight threads may span two tiles.
                odd = arith.remui(tile_at, _i32(2))
                first = arith.xori(arith.addi(arith.muli(spot, _i32(2)), odd), row)
                first_at = arith.addi(row_at, arith.muli(first, _i32(16)))
                inside = arith.cmpi(arith.CmpIPredicate.sgt, left, _i32(128 * step))
                words = following(inside)
                swap = arith.cmpi(arith.CmpIPredicate.ne, here("and", first_at, 1024), _i32(0))
                for k, at in enumerate((first_at, here("xor", first_at, 16))):
                    half = [arith.select(swap, words[2 - 2 * k + n], words[2 * k + n]) for n in range(2)]
                    target = offset(offset(pointers[0], at), _i32(step // STEPS * 4 * 1024 * tiles))
                    pairs = [_half_words(word, None) for word in half]
                    llvm.store(_pack([x for pair in pairs for x in pair]), target, alignment=16)

        if scaled:
            store_scaled()
        else:
            store_plain()
        ahead = np.empty((AHEAD,), dtype=object)
        ahead[:] = vectors[page_loads:]
        layout = _registers().layout.to_mgpu()
        return mgpu.FragmentedArray(_registers=ahead, _layout=layout, _is_signed=True)

    return store(fetched, *pool, index, next_index, valid, *page_smem)
