"""One-shot all-reduce of small messages over NVLink, alone or fused with the residual add and RMSNorm.

At decode sizes (14 to 896 KiB) an all-reduce is all latency, so it is done in one exchange. Every rank stores
its message into a slot of its own in the memory of each peer, raises a flag there, waits for the flags of the
others, and adds the slots up in f32. Every rank adds in the same order (rank 0 first), so all ranks hold the
same bits, which replicated state needs; a ring or a tree does not promise that in bf16.

Block i of a rank talks to block i of its peers only: no grid-wide barrier, and any number of blocks is free
of deadlock. A block's stores precede its flags (a release fence at system scope behind a warpgroup barrier);
every thread that saw the flags (acquire, system scope) may load the slots.

No stale read, in two ways:

- Alone, the slots are memory of the call, which XLA uses for something else before and after. XLA's barrier
  over all ranks runs before the kernel: nobody stores into a peer that is still busy with earlier work, and
  every flag is zero before the first is raised. A kernel ends after its peers' flags, which follow their
  stores, so nothing is stored into a rank after its kernel has ended.
- With a ``Workspace``, opened once in a program behind that barrier, later calls need none. Flags only count
  up and each block knows how many calls it has seen, so a flag of one call never passes for another's. Slots
  are double: a peer that stores for call e + 2 has seen this rank's flag for call e + 1, which this rank
  raised after its call e had ended, with those slots read.

No hang: waits are bounded (``Config.spins`` polls). A rank that gives up returns NaN, which the engine's
check for finite logits turns into a failed step, and raises no flag in that workspace again, so that its
peers give up too instead of adding what was meant for another call.

Plain loads and stores to peer addresses; NVLink multicast (multimem) is not used. The addresses come from
XLA's collective metadata: one process that holds all devices of the mesh, in order; no NVSHMEM. To be called
inside ``jax.shard_map(..., check_vma=False)`` over a mesh of one axis.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

WARPGROUP = 128  # threads of a block
MAX_RANKS = 32  # of XLA's barrier


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs.

    Attributes:
      blocks: the most blocks the plain variant spreads a message over; the fused one uses a block for a row.
      spins: polls of a flag before a rank gives up; one takes about a microsecond.
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
      slots: [2, rank, tile, width]. flags: i32 [rank, tile], how often each rank has stored.
      calls: i32 [tile], how often each block has run; -1 after it gave up.
    """

    slots: Any
    flags: Any
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
        slots=jax.new_ref(jnp.zeros((2, ranks, tiles, width), dtype)),
        flags=jax.new_ref(jnp.zeros((ranks, tiles), jnp.int32)),
        calls=jax.new_ref(jnp.zeros((tiles,), jnp.int32)),
    )
    if ranks > 1:
        # Behind XLA's barrier: when it has run, the flags of all ranks are zero and may be raised.
        plgpu.kernel(
            functools.partial(_open_body, axis=axis),
            out_type=jax.ShapeDtypeStruct((WARPGROUP,), jnp.int32),
            kernel_name="all_reduce_open",
        )(space.slots, space.flags, space.calls)
    return space


def all_reduce(
    x: jax.Array, axis: str, *, workspace: Workspace | None = None, config: Config = Config()
) -> jax.Array:
    """The sum of ``x`` over the ranks of mesh axis ``axis``, the same bits on every rank.

    Args:
      x: bf16 or f32, any shape; see ``tiling`` for sizes.
      axis: the only axis of the mesh, of up to 32 ranks; with one rank, x comes back.
      workspace: saves XLA's barrier before the kernel; of x's dtype, and large enough.

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
    (y,) = _launch(_sum_body, (tile_x,), (out,), axis, ranks, workspace, config)
    return y.reshape(x.shape)


def all_reduce_add_norm(
    x_TD: jax.Array,
    residual_TD: jax.Array,
    weight_D: jax.Array,
    axis: str,
    *,
    epsilon: float,
    workspace: Workspace | None = None,
    config: Config = Config(),
) -> tuple[jax.Array, jax.Array]:
    """``hidden = residual + sum over ranks of x`` and ``weight * hidden / sqrt(mean(hidden^2) + epsilon)``.

    Rounds where separate layers do: the sum to bf16 before it is added, the hidden state after, and the
    normalised value before the weight multiplies.

    Args:
      x_TD: bf16 or f32, this rank's part. D a multiple of 1024.
      residual_TD: bf16, the same on every rank. weight_D: bf16.
      workspace: as in ``all_reduce``, with a tile for each row.

    Returns:
      hidden and normed, both bf16 [T, D]; NaN in rows for which a peer did not come in time.

    Raises:
      ValueError: a wrong dtype or shape, a non-positive epsilon, and as ``all_reduce``.
      NotImplementedError: a D that whole warpgroups cannot store.
    """
    ranks = _check(x_TD, axis)
    if x_TD.ndim != 2 or residual_TD.shape != x_TD.shape or weight_D.shape != x_TD.shape[1:]:
        raise ValueError(
            f"x {x_TD.shape}, residual {residual_TD.shape}, weight {weight_D.shape}: "
            "must be [T, D], [T, D] and [D]"
        )
    for name, array in (("residual", residual_TD), ("weight", weight_D)):
        if array.dtype != jnp.bfloat16:
            raise ValueError(f"{name} is {array.dtype}: must be bfloat16")
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon}: must be positive")
    if x_TD.shape[1] % (WARPGROUP * 8):
        raise NotImplementedError(f"D={x_TD.shape[1]}: must be a multiple of {WARPGROUP * 8}")
    out = jax.ShapeDtypeStruct(x_TD.shape, jnp.bfloat16)
    body = functools.partial(_norm_body, epsilon=epsilon)
    hidden_TD, normed_TD = _launch(
        body, (x_TD, residual_TD, weight_D), (out, out), axis, ranks, workspace, config
    )
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


def _launch(body, inputs, outputs, axis: str, ranks: int, workspace: Workspace | None, config: Config):
    """Runs ``body`` with a block for each row of ``inputs[0]``, and returns its outputs."""
    (tiles, width), dtype = inputs[0].shape, inputs[0].dtype
    run = functools.partial(
        plgpu.kernel,
        functools.partial(
            _block, body, len(inputs), axis=axis, ranks=ranks, shared=workspace is not None, config=config
        ),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name=body.func.__name__ if isinstance(body, functools.partial) else body.__name__,
    )
    if workspace is None:
        flags = jax.new_ref(jnp.zeros((ranks, tiles), jnp.int32))
        slots = jax.ShapeDtypeStruct((1, ranks, tiles, width), dtype)
        return run(out_type=(*outputs, slots))(*inputs, flags)[:-1]
    slots = workspace.slots
    if slots.dtype != dtype or slots.shape[1] != ranks or slots.shape[2] < tiles or slots.shape[3] < width:
        raise ValueError(
            f"workspace is {slots.dtype} {slots.shape}: {ranks} ranks with {tiles} tiles of {width} {dtype} "
            "do not fit"
        )
    params = plgpu.CompilerParams(skip_device_barrier=True)
    refs = (workspace.flags, workspace.slots, workspace.calls)
    return run(out_type=tuple(outputs), compiler_params=params)(*inputs, *refs)


def _open_body(slots_gmem, flags_gmem, calls_gmem, out_gmem, *, axis: str):
    del slots_gmem, flags_gmem
    out_gmem[...] = jnp.full((WARPGROUP,), lax.axis_index(axis), jnp.int32)  # makes it a kernel of all ranks
    calls_gmem[0] = jnp.int32(0)


def _block(body, num_inputs: int, *refs, axis: str, ranks: int, shared: bool, config: Config):
    """One block: ``body(sum_of, *inputs, *outputs)``, where ``sum_of(tile of x)`` is the exchange."""
    inputs, rest = refs[:num_inputs], refs[num_inputs:]
    if shared:
        flags_gmem, slots_gmem, calls_gmem, *outputs = rest
    else:
        flags_gmem, *outputs, slots_gmem = rest
        calls_gmem = None
    tile = lax.axis_index("tile")
    x_gmem = inputs[0]
    width = x_gmem.shape[1]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=_vector(x_gmem.dtype))
    load = functools.partial(plgpu.load, layout=layout, optimized=False)
    mine = load(x_gmem.at[tile])
    me = lax.axis_index(axis)
    call = jnp.int32(0) if calls_gmem is None else calls_gmem[tile]
    parity = lax.rem(call, jnp.int32(2)) if shared else 0

    def slot(ref, rank):
        return ref.at[parity, rank, tile, pl.ds(0, width)]

    peers = [lax.rem(me + step, jnp.int32(ranks)) for step in range(1, ranks)]

    @pl.when(call >= 0)
    def _send():
        slot(slots_gmem, me)[...] = mine  # read back below by the thread that stored it
        for peer in peers:  # each rank starts with another peer, so that no link is hit by all at once
            slot(plgpu.remote_ref(slots_gmem, peer), me)[...] = mine
        _raise_flags(*(plgpu.remote_ref(flags_gmem, peer).at[me, tile] for peer in peers))

    here = call >= 0
    for peer in peers:
        here &= _wait(flags_gmem.at[peer, tile], call + 1, config.spins)
    total = load(slot(slots_gmem, 0)).astype(jnp.float32)
    for rank in range(1, ranks):
        total += load(slot(slots_gmem, rank)).astype(jnp.float32)
    if calls_gmem is not None:
        calls_gmem[tile] = lax.select(here, call + 1, jnp.int32(-1))
    total += lax.select(here, jnp.float32(0), jnp.float32(math.nan))
    body(total, tile, load, *inputs, *outputs)


def _sum_body(total, tile, load, x_gmem, y_gmem):
    del load, x_gmem
    y_gmem[tile] = total.astype(y_gmem.dtype)


def _norm_body(
    total, tile, load, x_gmem, residual_gmem, weight_gmem, hidden_gmem, normed_gmem, *, epsilon: float
):
    rounded = total.astype(jnp.bfloat16).astype(jnp.float32)
    hidden = (load(residual_gmem.at[tile]).astype(jnp.float32) + rounded).astype(jnp.bfloat16)
    hidden_gmem[tile] = hidden
    real = hidden.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(real * real) * (1.0 / x_gmem.shape[1]) + epsilon)
    normal = (real * scale).astype(jnp.bfloat16).astype(jnp.float32)
    normed_gmem[tile] = (normal * load(weight_gmem).astype(jnp.float32)).astype(jnp.bfloat16)


def _raise_flags(*flags):
    """Adds one to each flag, after all stores of the block."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(flags))
    def raise_all(ctx, *refs):
        del ctx
        mgpu.utils.warpgroup_barrier()
        first = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        mgpu.utils.fence_release_sys()
        for ref in refs:
            mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(1, predicate=first, relaxed=True)

    raise_all(*flags)


def _wait(flag, value: jax.Array, spins: int) -> jax.Array:
    """Whether ``flag`` reached ``value`` within ``spins`` polls. Each thread polls, and acquires."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def read(ctx, ref):
        del ctx
        found = llvm.inline_asm(
            ir.IntegerType.get_signless(32),
            [mgpu.utils.memref_ptr(ref)],
            "ld.acquire.sys.global.u32 $0, [$1];",
            "=r,l",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    def missing(state):
        found, spun = state
        return (found < value) & (spun < spins)

    found, _ = lax.while_loop(missing, lambda state: (read(flag), state[1] + 1), (jnp.int32(0), jnp.int32(0)))
    return found >= value
