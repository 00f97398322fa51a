"""The one-shot all-reduce: it lowers and compiles for 2 and 8 H200s, refuses, and its protocol holds.

The GPU interpreter knows no semaphores and no remote refs, so what it would prove is proved here on a model:
every interleaving of the ranks' loads, stores and flags is explored. Numbers of the real kernel are checked
against the oracle by ``experiments/multi_gpu.py``, over thousands of calls.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_kernels import allreduce
from tests.kernels import harness

AXIS = "tp"
ROWS, WIDTH = 3, 2048
DTYPES = [jnp.bfloat16, jnp.float32]
WHOLE, SPLIT = PartitionSpec(), PartitionSpec(AXIS)


def _loop(x_1TD, residual_TD, weight_YD, *, fused, shared):
    """Ten calls in a loop, each on what the last returned; with a workspace if ``shared``."""
    x_TD = x_1TD[0]
    shape = x_TD.shape if fused else allreduce.tiling(x_TD.size, x_TD.dtype)
    space = allreduce.open_workspace(AXIS, *shape, x_TD.dtype) if shared else None

    def call(i, carry):
        x_TD, residual_TD = carry
        if not fused:
            return allreduce.all_reduce(x_TD, AXIS, workspace=space) * x_TD.dtype.type(0.5), residual_TD
        hidden_TD, normed_TD = allreduce.all_reduce_add_norm(
            x_TD, residual_TD, weight_YD, i % 3, AXIS, epsilon=1e-5, workspace=space
        )
        return normed_TD.astype(x_TD.dtype), hidden_TD

    return lax.fori_loop(0, 10, call, (x_TD, residual_TD))


def _mapped(mesh, **options):
    return jax.shard_map(
        functools.partial(_loop, **options),
        mesh=mesh,
        in_specs=(SPLIT, WHOLE, WHOLE),
        out_specs=(WHOLE, WHOLE),
        check_vma=False,
    )


def _avals(ranks, dtype):
    struct = jax.ShapeDtypeStruct
    return (
        struct((ranks, ROWS, WIDTH), dtype),
        struct((ROWS, WIDTH), jnp.bfloat16),
        struct((3, WIDTH), jnp.bfloat16),
    )


def _abstract_mesh(ranks):
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return AbstractMesh((ranks,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=device)


def _trace(function, *avals, ranks=2):
    """Traces ``function`` on each of ``ranks`` ranks, all arguments whole."""
    mesh = _abstract_mesh(ranks)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(WHOLE,) * len(avals), out_specs=WHOLE, check_vma=False
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(mapped).trace(*avals)


@pytest.mark.parametrize("shared", [False, True], ids=["barrier", "workspace"])
@pytest.mark.parametrize("fused", [False, True], ids=["sum", "norm"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_all_reduce_lowers_for_any_number_of_ranks(ranks, fused, shared):
    mesh = _abstract_mesh(ranks)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(_mapped(mesh, fused=fused, shared=shared)).trace(*_avals(ranks, jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
    # The opening asks XLA for the peers' addresses, behind its barrier; a sum is a kernel like any other.
    assert sorted("uses_xla_collective_metadata = true" in call for call in calls) == [False, True]
    assert all("skip_device_barrier = false" in call for call in calls)


@pytest.mark.aot
@harness.needs_ptxas
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f32"])
@pytest.mark.parametrize("fused", [False, True], ids=["sum", "norm"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_all_reduce_compiles_without_spills_and_shares_one_workspace(ranks, fused, dtype):
    function = _mapped(harness._h200_mesh(ranks), fused=fused, shared=True)
    specs = [SPLIT, WHOLE, WHOLE]
    compiled = harness.compile_h200(function, *_avals(ranks, dtype), devices=ranks, in_specs=specs)
    assert compiled.spills == 0
    assert len(compiled.kernels) == 2  # the opening and the sum
    tiles, width = (ROWS, WIDTH) if fused else allreduce.tiling(ROWS * WIDTH, dtype)
    words = 2 * width * jnp.dtype(dtype).itemsize // 4
    # After a copy of the slots behind the opening, peers would store into the old ones.
    for dims in (f"2,{ranks},{tiles},{words}", f"{ranks + 1},2"):
        made = re.findall(rf"= \w+\[{dims}\]\S* ([\w-]+)\(", compiled.hlo)
        assert set(made) <= {"fusion", "get-tuple-element", "broadcast"}, made
        assert made.count("fusion") == 1  # the zeros


@pytest.mark.aot
@harness.needs_ptxas
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f32"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_all_reduce_of_decode_sizes_compiles_without_spills(ranks, dtype):
    for rows in (1, 64):
        for fused in (False, True):
            function = _mapped(harness._h200_mesh(ranks), fused=fused, shared=False)
            struct = jax.ShapeDtypeStruct
            avals = (struct((ranks, rows, 7168), dtype), struct((rows, 7168), jnp.bfloat16))
            avals = (*avals, struct((3, 7168), jnp.bfloat16))
            specs = [SPLIT, WHOLE, WHOLE]
            assert harness.compile_h200(function, *avals, devices=ranks, in_specs=specs).spills == 0


def test_all_reduce_single_rank_returns_its_argument():
    x = jnp.arange(1024, dtype=jnp.float32)
    jaxpr = _trace(lambda x: allreduce.all_reduce(x, AXIS), x, ranks=1).jaxpr
    assert "mpmd_map" not in str(jaxpr)
    assert "mpmd_map" in str(_trace(lambda x: allreduce.all_reduce(x, AXIS), x, ranks=2).jaxpr)


@pytest.mark.parametrize(("size", "dtype", "expected"), [
    (7168, jnp.bfloat16, (7, 1024)),
    (7168, jnp.float32, (14, 512)),
    (64 * 7168, jnp.bfloat16, (112, 4096)),
    (64 * 6144, jnp.float32, (96, 4096)),
])  # fmt: skip
def test_tiling_decode_sizes_fill_blocks(size, dtype, expected):
    assert allreduce.tiling(size, dtype) == expected


def _norm(x, residual, weight, **options):
    return allreduce.all_reduce_add_norm(x, residual, weight, 1, AXIS, **{"epsilon": 1e-5, **options})


BF16 = functools.partial(jnp.zeros, dtype=jnp.bfloat16)


@pytest.mark.parametrize(("function", "arguments", "error", "message"), [
    (lambda x: allreduce.all_reduce(x, AXIS), [jnp.zeros(1024, jnp.float16)], ValueError, r"x is float16"),
    (lambda x: allreduce.all_reduce(x, AXIS), [BF16((0, 7))], ValueError, r"nothing to sum"),
    (lambda x: allreduce.all_reduce(x, AXIS), [BF16(1032)], NotImplementedError, r"1032 .*multiple of 1024"),
    (_norm, [BF16((3, 1024)), BF16((2, 1024)), BF16((2, 1024))], ValueError, r"residual \(2, 1024\)"),
    (_norm, [BF16((3, 1024)), BF16((3, 1024)), jnp.zeros((2, 1024))], ValueError, r"weight is float32"),
    (_norm, [BF16((3, 640)), BF16((3, 640)), BF16((2, 640))], NotImplementedError, r"D=640: .*of 1024"),
    (functools.partial(_norm, epsilon=0.0), [BF16((3, 1024)), BF16((3, 1024)), BF16((2, 1024))],
     ValueError, r"epsilon=0.0: must be positive"),
])  # fmt: skip
def test_all_reduce_wrong_argument_names_value_and_rule(function, arguments, error, message):
    with pytest.raises(error, match=message):
        _trace(function, *arguments)


def test_all_reduce_workspace_that_does_not_fit_raises():
    def small(x):
        return allreduce.all_reduce(x, AXIS, workspace=allreduce.open_workspace(AXIS, 2, 1024, x.dtype))

    with pytest.raises(
        ValueError, match=r"workspace for 2 ranks, 2 tiles of 2048 bytes: 2 ranks with 3 tiles"
    ):
        _trace(small, BF16((3, 1024)))


def test_all_reduce_more_ranks_than_the_barrier_takes_raises():
    with pytest.raises(ValueError, match=r"has 33 ranks: at most 32"):
        _trace(lambda x: allreduce.all_reduce(x, AXIS), BF16(1024), ranks=33)


@pytest.mark.parametrize("options", [{"blocks": 0}, {"spins": -2}])
def test_config_not_positive_raises(options):
    with pytest.raises(ValueError, match=r"both must be positive"):
        allreduce.Config(**options)


# The protocol of one thread of a block, as a model. For each call e every rank stores e into its slot at each
# peer, then takes from each of its own slots the word of call e, once it is there (or gives up).


def explore(ranks, calls, *, slots=2, numbered=True, may_give_up=False):
    """States reached, the wrong reads found and whether all of it ends, in any interleaving.

    ``slots`` and ``numbered`` are mutations: how many slots calls take turns with, and whether a word is
    taken only if it carries this call's number.
    """
    peers = {me: [(me + step) % ranks for step in range(1, ranks)] for me in range(ranks)}
    blank = (
        tuple((0, 0, True) for _ in range(ranks)),  # of each rank: position in its call, call, still sending
        tuple(None for _ in range(ranks * slots * ranks)),  # slot [rank, parity, source]: the call stored
    )

    def moves(state):
        programs, memory = state
        for me, (at, call, alive) in enumerate(programs):
            if call == calls:
                continue
            receives, which = divmod(at, ranks - 1)
            peer = peers[me][which]
            new_memory, wrong = memory, None
            last = at + 1 == 2 * (ranks - 1)
            after = (0, call + 1, alive) if last else (at + 1, call, alive)
            if not receives and alive:
                where = (peer * slots + call % slots) * ranks + me
                new_memory = (*memory[:where], call, *memory[where + 1 :])
            elif receives:
                found = memory[(me * slots + call % slots) * ranks + peer]
                if not alive or found is None or (numbered and found != call):
                    if alive and not may_give_up:
                        continue
                    after = (0, call + 1, False)  # NaN: nothing is read
                elif found != call:
                    wrong = (me, peer, call, found)
            yield (*programs[:me], after, *programs[me + 1 :]), new_memory, wrong

    seen, wrong, todo = {blank}, set(), [blank]
    while todo:
        for programs, memory, bad in moves(todo.pop()):
            wrong |= {bad} - {None}
            state = (programs, memory)
            if state not in seen:
                seen.add(state)
                todo.append(state)
    done = any(all(call == calls for _, call, _ in programs) for programs, _ in seen)
    stuck = [s for s in seen if not any(True for _ in moves(s)) and any(call < calls for _, call, _ in s[0])]
    return len(seen), wrong, done and not stuck


@pytest.mark.parametrize(("ranks", "calls", "may_give_up"), [(2, 5, False), (2, 5, True), (3, 3, False)])
def test_protocol_every_interleaving_reads_its_own_call_and_ends(ranks, calls, may_give_up):
    states, wrong, ends = explore(ranks, calls, may_give_up=may_give_up)
    assert states > 30
    assert not wrong
    assert ends


def test_protocol_one_slot_loses_a_word_that_is_waited_for():
    _, wrong, ends = explore(2, 3, slots=1)
    assert not wrong
    assert not ends


def test_protocol_unnumbered_words_are_stale():
    _, wrong, _ = explore(2, 3, numbered=False)
    assert wrong
