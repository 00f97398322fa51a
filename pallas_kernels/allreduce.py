"""One-shot all-reduce of small messages over NVLink, alone or fused with the residual add and RMSNorm.

At decode sizes (14 to 896 KiB) an all-reduce is all latency, so it is done in one exchange. Every rank stores
its message into a slot of its own in the memory of each peer, waits for those of the others in its own slots,
and adds them up in f32. Every rank adds in the same order (rank 0 first), so all ranks hold the same bits,
which replicated state needs; a ring or a tree does not promise that in bf16.

Every 8 bytes stored carry 4 of the message and the number of the call (the "LL" protocol of NCCL), so the
data is its own flag: no fence, no second store, no barrier; an exchange takes as long as one store to a peer.
It doubles the bytes, which only counts well above decode sizes. Thread t of block i reads what thread t of
block i of each peer stored, so any number of blocks is free of deadlock.

- No stale read: calls are numbered from 1 up and a word is taken only if it carries this call's number.
- No lost word: slots are double. A peer that stores for call e + 2 has read this rank's words of call e + 1,
  which the same thread stored after it had read its words of call e.
- No hang: waits are bounded (``Config.spins`` polls). A thread that gives up returns NaN, which the engine's
  check for finite logits turns into a failed step, and its block sends no more in that workspace, so that its
  peers give up too.

Peer addresses come from XLA's collective metadata (one process that holds all devices of the mesh, in order;
no NVSHMEM). XLA gathers those anew whenever a program with such a kernel starts: a rendezvous of the ranks'
host threads and a wait for the stream, for each kernel of the program. So only ``open_workspace`` uses them,
once in a program, behind XLA's barrier over all ranks: it writes the peers' addresses into the workspace. The
calls are ordinary kernels, which command buffers may hold. If XLA ever copied the slots, peers would store
into the old ones: a call that finds its slots elsewhere than the opening did returns NaN and sends nothing.

Plain loads and stores to peer addresses; NVLink multicast (multimem) is not used. To be called inside
``jax.shard_map(..., check_vma=False)`` over a mesh of one axis.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

WARPGROUP = 128  # threads of a block
MAX_RANKS = 32  # of XLA's barrier
WORD = 16  # bytes of a store: two pairs of 4 bytes of the message and the number of the call
POLLED = 16  # words that a thread has in flight while it waits


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs.

    Attributes:
      blocks: the most blocks the plain variant spreads a message over; the fused one uses a block for a row.
      spins: polls of its words before a thread gives up; one takes about a microsecond.
    """

    blocks: int = 112
    spins: int = 1 << 22

    def __post_init__(self):
        if self.blocks < 1 or self.spins < 1:
            raise ValueError(f"blocks={self.blocks}, spins={self.spins}: both must be positive")


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Refs to memory that all calls of one program share: see ``open_workspace``.

    Attributes:
      slots: i32 [2, rank, tile, words]: what each rank stored, by parity of the call.
      peers: i32 [rank + 1, 2], addresses: entry s is this rank's place in the slots of the peer s ranks on,
        the last one the start of its own slots.
      calls: i32 [tile], how often each block has run; -1 after it gave up.
    """

    slots: Any
    peers: Any
    calls: Any


def tiling(size: int, dtype: jax.typing.DTypeLike, config: Config = Config()) -> tuple[int, int]:
    """Blocks and elements a block of the plain variant for a message of ``size`` elements.

    Raises:
      NotImplementedError: a size that whole warpgroups cannot store.
    """
    unit = WARPGROUP * _vector(dtype)
    if size % unit:
        raise NotImplementedError(f"{size} elements of {jnp.dtype(dtype)}: must be a multiple of {unit}")
    units = size // unit
    per_block = next(c for c in range(1, units + 1) if units % c == 0 and units // c <= config.blocks)
    return units // per_block, per_block * unit


def open_workspace(axis: str, tiles: int, width: int, dtype: jax.typing.DTypeLike) -> Workspace:
    """Memory for calls of up to ``tiles`` blocks of ``width`` elements, to be opened once in a program.

    The calls may be in loops: the refs are closed over, as any ``jax.Ref``.
    """
    ranks = _check_ranks(axis)
    space = Workspace(
        slots=jax.new_ref(jnp.zeros((2, ranks, tiles, 2 * _words(width, dtype)), jnp.int32)),
        peers=jax.new_ref(jnp.zeros((ranks + 1, 2), jnp.int32)),
        calls=jax.new_ref(jnp.zeros((tiles,), jnp.int32)),
    )
    if ranks > 1:
        # Behind XLA's barrier: when it has run, the slots of all ranks are zero and may be stored to.
        plgpu.kernel(
            functools.partial(_open_body, axis=axis, ranks=ranks),
            out_type=(),
            kernel_name="all_reduce_open",
        )(space.slots, space.peers, space.calls)
    return space


def all_reduce(
    x: jax.Array,
    axis: str,
    *,
    workspace: Workspace | None = None,
    config: Config = Config(),
    exchanges: int = 1,
) -> jax.Array:
    """The sum of ``x`` over the ranks of mesh axis ``axis``, the same bits on every rank.

    Args:
      x: bf16 or f32, any shape; see ``tiling`` for sizes.
      axis: the only axis of the mesh, of up to 32 ranks; with one rank, x comes back.
      workspace: large enough for x; None opens one for this call.
      exchanges: how often the one kernel exchanges x, to time an exchange without its launch.

    Returns:
      As x: summed in f32, rounded once. NaN where a peer did not come within ``config.spins`` polls.

    Raises:
      ValueError: another dtype, too many ranks, a workspace that does not fit.
      NotImplementedError: a size that whole warpgroups cannot store.
    """
    ranks = _check(x, axis)
    tiles, width = tiling(x.size, x.dtype, config)
    if ranks == 1:
        return x
    tile_x = x.reshape(tiles, width)
    out = jax.ShapeDtypeStruct(tile_x.shape, x.dtype)
    (y,) = _launch(_sum_body, (tile_x,), (out,), axis, ranks, workspace, config, exchanges)
    return y.reshape(x.shape)


def all_reduce_add_norm(
    x_TD: jax.Array,
    residual_TD: jax.Array,
    weight_YD: jax.Array,
    layer: int | jax.Array,
    axis: str,
    *,
    epsilon: float,
    workspace: Workspace | None = None,
    config: Config = Config(),
) -> tuple[jax.Array, jax.Array]:
    """``hidden = residual + sum over ranks of x``, and its RMSNorm with weight ``weight_YD[layer]``:
    ``weight * hidden / sqrt(mean(hidden^2) + epsilon)``.

    Rounds where separate layers do: the sum to bf16 before it is added, the hidden state after, and the
    normalised value before the weight multiplies.

    Args:
      x_TD: bf16 or f32, this rank's part. D a multiple of 1024.
      residual_TD: bf16, the same on every rank.
      weight_YD: bf16, a stack of which the kernel reads one row: a slice of it, XLA would put into one fusion
        with this call, and move the workspace.
      workspace: as in ``all_reduce``, with a tile for each row and the width of one.

    Returns:
      hidden and normed, both bf16 [T, D]; NaN in rows for which a peer did not come in time.

    Raises:
      ValueError: a wrong dtype or shape, a non-positive epsilon, and as ``all_reduce``.
      NotImplementedError: a D that whole warpgroups cannot store; one rank.
    """
    ranks = _check(x_TD, axis)
    if x_TD.ndim != 2 or residual_TD.shape != x_TD.shape or weight_YD.shape[1:] != x_TD.shape[1:]:
        raise ValueError(
            f"x {x_TD.shape}, residual {residual_TD.shape}, weight {weight_YD.shape}: "
            "must be [T, D], [T, D] and [Y, D]"
        )
    for name, array in (("residual", residual_TD), ("weight", weight_YD)):
        if array.dtype != jnp.bfloat16:
            raise ValueError(f"{name} is {array.dtype}: must be bfloat16")
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon}: must be positive")
    if x_TD.shape[1] % (WARPGROUP * 8):
        raise NotImplementedError(f"D={x_TD.shape[1]}: must be a multiple of {WARPGROUP * 8}")
    if ranks == 1:
        raise NotImplementedError(f"axis {axis!r} has one rank: there is no sum to fuse the norm with")
    out = jax.ShapeDtypeStruct(x_TD.shape, jnp.bfloat16)
    body = functools.partial(_norm_body, epsilon=epsilon)
    inputs = (x_TD, residual_TD, weight_YD, jnp.asarray(layer, jnp.int32).reshape(1))
    hidden_TD, normed_TD = _launch(body, inputs, (out, out), axis, ranks, workspace, config, 1)
    return hidden_TD, normed_TD


def _check_ranks(axis: str) -> int:
    ranks = lax.axis_size(axis)
    if ranks > MAX_RANKS:
        raise ValueError(f"axis {axis!r} has {ranks} ranks: at most {MAX_RANKS}")
    return ranks


def _check(x: jax.Array, axis: str) -> int:
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x is {x.dtype}: must be bfloat16 or float32")
    if x.size == 0:
        raise ValueError(f"x has shape {x.shape}: there is nothing to sum")
    return _check_ranks(axis)


def _vector(dtype: jax.typing.DTypeLike) -> int:
    """Elements of a 16-byte store."""
    return 16 // jnp.dtype(dtype).itemsize


def _words(width: int, dtype: jax.typing.DTypeLike) -> int:
    """Words of four bytes that ``width`` elements fill."""
    return width * jnp.dtype(dtype).itemsize // 4


def _launch(
    body, inputs, outputs, axis: str, ranks: int, workspace: Workspace | None, config: Config, exchanges: int
):
    """Runs ``body`` with a block for each row of ``inputs[0]``, and returns its outputs."""
    (tiles, width), dtype = inputs[0].shape, inputs[0].dtype
    space = workspace or open_workspace(axis, tiles, width, dtype)
    _, held, rows, words = space.slots.shape
    if held != ranks or rows < tiles or words < 2 * _words(width, dtype):
        raise ValueError(
            f"workspace for {held} ranks, {rows} tiles of {2 * words} bytes: {ranks} ranks with {tiles} "
            f"tiles of {width} {dtype} do not fit"
        )
    return plgpu.kernel(
        functools.partial(_block, body, len(inputs), ranks=ranks, config=config, exchanges=exchanges),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name=body.func.__name__ if isinstance(body, functools.partial) else body.__name__,
        out_type=tuple(outputs),
    )(*inputs, space.slots, space.peers, space.calls)


def _open_body(slots_gmem, peers_gmem, calls_gmem, *, axis: str, ranks: int):
    me = lax.axis_index(axis)
    for step in range(ranks):
        peer = lax.rem(me + step, jnp.int32(ranks))
        _keep_address(peers_gmem.at[step], plgpu.remote_ref(slots_gmem, peer).at[0, me])
    _keep_address(peers_gmem.at[ranks], slots_gmem)
    calls_gmem[0] = jnp.int32(0)


def _keep_address(entry_gmem, ref):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def keep(ctx, entry, ref):
        del ctx
        address = llvm.ptrtoint(_int(64), mgpu.utils.memref_ptr(ref))
        llvm.store(address, mgpu.utils.memref_ptr(entry), alignment=8)

    keep(entry_gmem, ref)


def _block(body, num_inputs: int, *refs, ranks: int, config: Config, exchanges: int):
    """One block: ``body(sum, tile, load, *inputs, *outputs)``, where ``sum`` is f32, of this tile of x."""
    inputs, (slots_gmem, peers_gmem, calls_gmem, *outputs) = refs[:num_inputs], refs[num_inputs:]
    tile = lax.axis_index("tile")
    x_gmem = inputs[0]
    width = x_gmem.shape[1]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=_vector(x_gmem.dtype))
    load = functools.partial(plgpu.load, layout=layout, optimized=False)
    mine = load(x_gmem.at[tile])
    first = calls_gmem[tile]

    def exchange(call):
        return _exchange(mine, slots_gmem, peers_gmem, tile, call, layout, ranks, config.spins)

    total, here = exchange(first)
    if exchanges > 1:

        def again(i, carry):
            call = lax.select(carry[1] > 0, first + i, jnp.int32(-1))
            return exchange(call)

        total, here = lax.fori_loop(1, exchanges, again, (total, here))
    _count(calls_gmem.at[tile], first + exchanges, here)
    total += lax.select(here > 0, jnp.float32(0), jnp.float32(math.nan))
    body(total, tile, load, *inputs, *outputs)


def _sum_body(total, tile, load, x_gmem, y_gmem):
    del load, x_gmem
    y_gmem[tile] = total.astype(y_gmem.dtype)


def _norm_body(
    total,
    tile,
    load,
    x_gmem,
    residual_gmem,
    weight_gmem,
    layer_gmem,
    hidden_gmem,
    normed_gmem,
    *,
    epsilon: float,
):
    rounded = total.astype(jnp.bfloat16).astype(jnp.float32)
    hidden = (load(residual_gmem.at[tile]).astype(jnp.float32) + rounded).astype(jnp.bfloat16)
    hidden_gmem[tile] = hidden
    real = hidden.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(real * real) * (1.0 / x_gmem.shape[1]) + epsilon)
    normal = (real * scale).astype(jnp.bfloat16).astype(jnp.float32)
    normed_gmem[tile] = (normal * load(weight_gmem.at[layer_gmem[0]]).astype(jnp.float32)).astype(
        jnp.bfloat16
    )


def _int(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def _c(value: int, bits: int = 32) -> ir.Value:
    return mgpu.utils.c(value, _int(bits))


def _exchange(
    mine, slots_gmem, peers_gmem, tile, call, layout, ranks: int, spins: int
) -> tuple[jax.Array, jax.Array]:
    """Sends ``mine`` to all peers; returns the f32 sum of what all sent in this call, and 1 if all came or 0.

    Each thread sends and receives for itself. With ``call`` < 0, or slots that are not where they were
    opened, it sends nothing and waits for nothing.
    """
    _, _, tiles, row_words = slots_gmem.shape
    row, vec = 4 * row_words, _vector(mine.dtype)
    splat = plgpu.Layout.WG_SPLAT(())
    total = plgpu.ShapeDtypeStruct(mine.shape, jnp.float32, layout=layout)
    flag = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(), plgpu.RefType(), splat, splat), return_type=(total, flag)
    )
    def run(ctx, mine, slots, peers, tile, call):
        del ctx
        tile, call = tile.registers.item(), call.registers.item()
        epoch = arith.addi(call, _c(1))
        own = llvm.ptrtoint(_int(64), mgpu.utils.memref_ptr(slots))
        addresses = mgpu.utils.memref_ptr(peers)

        # In assembly, so that they are under way before the branch below, whose condition needs the last.
        places = [
            llvm.inline_asm(
                _int(64),
                [addresses],
                f"ld.global.b64 $0, [$1+{8 * entry}];",
                "=l,l",
                has_side_effects=True,
            )
            for entry in range(ranks + 1)
        ]
        usable = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, call, _c(0)),
            arith.cmpi(arith.CmpIPredicate.eq, own, places[ranks]),
        )
        thread = arith.remui(mgpu.utils.thread_idx(), _c(WARPGROUP))
        parity = arith.remui(call, _c(2))
        at = arith.addi(arith.muli(parity, _c(ranks * tiles)), tile)
        offset = arith.muli(arith.extui(_int(64), at), _c(row, 64))
        offset = arith.addi(offset, arith.extui(_int(64), arith.muli(thread, _c(WORD))))
        count = 2 * len(mine.registers.flat)  # words of a thread

        with mgpu.utils.when(usable):
            four = ir.VectorType.get((4,), _int(32))
            quads = [mgpu.utils.bitcast(register, four) for register in mine.registers.flat]
            for step in [*range(1, ranks), 0]:  # each rank starts with another peer; its own slot comes last
                base = arith.addi(places[step], offset)
                for k in range(count):
                    low, high = (
                        llvm.extractelement(quads[k // 2], _c(2 * (k % 2) + side)) for side in (0, 1)
                    )
                    llvm.inline_asm(
                        ir.Type.parse("!llvm.void"),
                        [base, low, epoch, high],
                        f"st.volatile.global.v4.u32 [$0+{k * WARPGROUP * WORD}], {{$1, $2, $3, $2}};",
                        "l,r,r,r",
                        has_side_effects=True,
                    )

        limit = arith.select(usable, _c(spins), _c(0))
        base = arith.addi(own, offset)
        words = [rank * tiles * row + k * WARPGROUP * WORD for rank in range(ranks) for k in range(count)]
        kind, wide = (ir.VectorType.get((vec,), of) for of in (mine.mlir_dtype, ir.F32Type.get()))
        sums = np.full(mine.registers.shape, None, dtype=object)
        came = arith.extui(_int(32), usable)
        for start in range(0, len(words), POLLED):
            data, all_came = _poll(base, words[start : start + POLLED], epoch, limit)
            came = _now(arith.andi(came, all_came))
            for i in range(0, len(data), 4):
                value = _vector_of(data[i : i + 4], kind)
                value = value if kind == wide else arith.extf(wide, value)
                at = (start + i // 2) % count // 2
                value = value if sums.flat[at] is None else arith.addf(sums.flat[at], value)
                sums.flat[at] = _now(value)
        total = mgpu.FragmentedArray(_registers=sums, _layout=mine.layout, _is_signed=None)
        return total, mgpu.FragmentedArray.splat(came, (), is_signed=True)

    return run(mine, slots_gmem, peers_gmem, tile, call)


def _poll(
    base: ir.Value, offsets: list[int], epoch: ir.Value, limit: ir.Value
) -> tuple[list[ir.Value], ir.Value]:
    """Reads the words at ``offsets`` until each carries ``epoch``, ``limit`` + 1 times at most.

    Returns their data, two i32 of each, and 1 if all carried it, else 0.
    """
    i32 = _int(32)
    loop = scf.WhileOp([i32] * (2 + 2 * len(offsets)), [_c(0)])
    before = loop.before.blocks.append(i32)
    with ir.InsertionPoint(before):
        four = llvm.StructType.get_literal([i32] * 4)
        read = [
            llvm.inline_asm(
                four,
                [base],
                f"ld.volatile.global.v4.u32 {{$0, $1, $2, $3}}, [$4+{offset}];",
                "=r,=r,=r,=r,l",
                has_side_effects=True,
            )
            for offset in offsets
        ]
        fields = [[llvm.extractvalue(i32, value, [i]) for i in range(4)] for value in read]
        off = _c(0)
        for _, one, _, other in fields:
            off = arith.ori(off, arith.ori(arith.xori(one, epoch), arith.xori(other, epoch)))
        came = arith.cmpi(arith.CmpIPredicate.eq, off, _c(0))
        (spun,) = before.arguments
        more = arith.cmpi(arith.CmpIPredicate.ult, spun, limit)
        missing = arith.andi(arith.xori(came, _c(1, 1)), more)
        data = [value for field in fields for value in (field[0], field[2])]
        scf.condition(missing, [arith.addi(spun, _c(1)), arith.extui(i32, came), *data])
    after = loop.after.blocks.append(*[i32] * (2 + 2 * len(offsets)))
    with ir.InsertionPoint(after):
        scf.yield_([after.arguments[0]])
    results = list(loop.results)
    return results[2:], results[1]


def _now(value: ir.Value) -> ir.Value:
    """The value itself, computed here: LLVM would put a sum off, with its terms in registers until then."""
    if isinstance(value.type, ir.VectorType):
        for i in range(value.type.shape[0]):
            value = llvm.insertelement(value, _now(llvm.extractelement(value, _c(i))), _c(i))
        return value
    kind = "f" if isinstance(value.type, ir.F32Type) else "r"
    return llvm.inline_asm(value.type, [value], "mov.b32 $0, $1;", f"={kind},{kind}", has_side_effects=True)


def _vector_of(words: list[ir.Value], kind: ir.Type) -> ir.Value:
    vector = llvm.mlir_undef(ir.VectorType.get((len(words),), _int(32)))
    for i, word in enumerate(words):
        vector = llvm.insertelement(vector, word, _c(i))
    return mgpu.utils.bitcast(vector, kind)


def _count(calls, value: jax.Array, here: jax.Array) -> None:
    """Sets the block's count of calls to ``value``, or to -1 if a thread gave up."""
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat))
    def run(ctx, ref, value, here):
        del ctx
        place = mgpu.utils.memref_ptr(ref)
        mgpu.utils.warpgroup_barrier()  # all threads have read the count
        llvm.store(value.registers.item(), place, alignment=4)
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, here.registers.item(), _c(0))):
            llvm.store(_c(-1), place, alignment=4)

    run(calls, value, here)
