"""The INT4 kernel for one token: copies in the interpreter, thread programs on numpy, registers."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import int4_inline, int4_moe, int4_single
from tests.kernels import harness, simt_numpy
from tests.kernels.test_int4_moe import Case, make, rank_shapes

BF16 = ml_dtypes.bfloat16
STRIDE = 67  # blocks 0 and 67: two experts, two parts of them


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def interpreted(plan, phase: int, inputs: dict, width: int) -> np.ndarray:
    def kernel(*arrays):
        outputs = {{1: "hidden", 2: "out"}[phase]: jax.ShapeDtypeStruct((4, width), jnp.float32)}
        return int4_single._call(plan, (phase,), dict(zip(inputs, arrays, strict=True)), outputs)[0]

    return np.asarray(harness.interpret(kernel, *inputs.values()), np.float64).sum(0)


def dense(w, s, group: int) -> np.ndarray:
    return np.asarray(w, np.float64) * np.repeat(np.asarray(s, np.float64), group, axis=-1)


@pytest.mark.parametrize("group", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_int4_single_blocks_read_their_own_weights(group):
    args = make(Case(1, 9, 1024, 256, 8, group=group))
    x, expert, weight = (np.asarray(a, np.float64)[0] for a in args[:3])
    experts = expert.astype(int)
    plan = int4_single._Plan(1024, group, 9, sim=True, stride=STRIDE)
    inputs = int4_single._inputs(plan, *args)

    # A weight times its scale is rounded to bf16 (2^-9 of it at most); sums in f32. The sum of products with
    # independent errors stays within 2^-9 of its root sum of squares, which the largest sums exceed.
    def check(found, products, w, s):
        """``products`` of the right weights are found, those of stale scales or of another layer are not."""
        want = products(dense(w[1], s[1], group)[experts])
        most = 2**-8 * np.abs(want).max()
        assert np.abs(found - want).max() < most
        for wrong in (dense(w[1], np.roll(s[1], 1, -1), group), dense(w[0], s[0], group)):
            assert np.abs(found - products(wrong[experts])).max() > 5 * most

    def up(w_EFD):
        parts = np.einsum("kfd,d->kf", w_EFD, x).reshape(8, 2, 16, 16).swapaxes(1, 2)
        return parts.reshape(128, 2, 16)[::STRIDE]

    def down(w_EDF):
        return np.einsum("k,kdf,kf->d", weight, w_EDF, hidden.astype(np.float64)).reshape(128, 8)[::STRIDE]

    check(interpreted(plan, 1, inputs, 128 * 32).reshape(128, 2, 16)[::STRIDE], up, *args[3:5])
    hidden = np.random.default_rng(0).standard_normal((8, 256)).astype(BF16)
    rows = interpreted(plan, 2, inputs | {"hidden": jnp.asarray(hidden)}, 1024).reshape(128, 8)[::STRIDE]
    check(rows, down, *args[5:7])


def unswizzled(memory: simt_numpy.Memory) -> np.ndarray:
    """[tiles, 8, 64] of shared memory in tiles of 8 rows of 128 bytes, whose 16-byte pieces are swizzled."""
    pieces = memory.array.reshape(-1, 8, 8, 8)
    row = np.arange(8)
    return pieces[:, row[:, None], row[:, None] ^ row[None, :]].reshape(-1, 8, 64)


def test_stage_x_rows_are_the_halves_of_a_quarters_chunks_in_wgmma_order(rng):
    x = rng.standard_normal((1, 3072)).astype(BF16)
    staged = simt_numpy.Memory(np.zeros((6, 8, 64), BF16), True)
    program = functools.partial(int4_single.stage_x, chunks=3)
    program(simt_numpy.Machine(0, 512), simt_numpy.Memory(x, False), staged)
    want = np.asarray(int4_inline.permute_k(jnp.asarray(x, jnp.float32))).reshape(
        4, 3, 2, 2, 64
    )  # g, chunk, half, tile
    got = unswizzled(staged).reshape(3, 2, 4, 2, 64).astype(np.float32)  # chunk, tile, g, half
    np.testing.assert_array_equal(got, np.transpose(want, (1, 3, 0, 2, 4)))


def test_stage_hidden_rows_are_experts_in_wgmma_order(rng):
    hidden = rng.standard_normal((8, 256)).astype(BF16)
    staged = simt_numpy.Memory(np.zeros((4, 8, 64), BF16), True)
    int4_single.stage_hidden(simt_numpy.Machine(0, 512), simt_numpy.Memory(hidden, False), staged)
    want = np.asarray(int4_inline.permute_k(jnp.asarray(hidden, jnp.float32))).reshape(8, 4, 64)
    np.testing.assert_array_equal(unswizzled(staged).astype(np.float32), np.swapaxes(want, 0, 1))


def fragments(acc: np.ndarray) -> list[np.ndarray]:
    """The accumulator words [thread] of four warpgroups' [64, 8], by the tables of int4_inline."""
    thread = np.arange(512)
    lane = thread % 32
    row = 16 * (thread % 128 // 32) + lane // 8 + 4 * (lane // 4 % 2)
    return [acc[thread // 128, row + 8 * half, 2 * (lane % 4) + j] for half in range(2) for j in range(2)]


def machine(block: int, shared: simt_numpy.Memory) -> simt_numpy.Machine:
    made = simt_numpy.Machine(block, 512)
    made.memories = [shared]
    return made


def test_finish_hidden_adds_the_parts_of_k_and_gates(rng):
    acc = rng.standard_normal((4, 64, 8)).astype(np.float32)
    hidden = simt_numpy.Memory(np.zeros((8, 256), BF16), False)
    sums = simt_numpy.Memory(np.full(256, np.nan, np.float32), True)
    int4_single.finish_hidden(machine(5, sums), fragments(acc), sums, hidden)
    total = sum(acc[g, :32, 2 * g].astype(np.float64) + acc[g, 32:, 2 * g + 1] for g in range(4))
    want = np.zeros(2048)
    want[5 * 16 : 6 * 16] = total[:16] / (1 + np.exp(-total[:16])) * total[16:]
    # one rounding to bf16, at most 2^-8 of the value; f32 sums of values near 1 err by less than 1e-6
    np.testing.assert_allclose(hidden.array.astype(np.float64), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("rows", [48, 56])
def test_finish_rows_weighs_each_experts_own_column(rng, rows):
    first, second = rng.standard_normal((2, 4, 64, 8)).astype(np.float32)
    weight = rng.uniform(0.1, 1.0, 8).astype(np.float32)
    first[:, 60:], second[:, 60:] = np.nan, np.nan  # what a block has no rows for
    out = simt_numpy.Memory(np.zeros(rows * 128, BF16), False)
    sums = simt_numpy.Memory(np.full(256, np.nan, np.float32), True)
    program = functools.partial(int4_single.finish_rows, rows=rows)
    args = (fragments(first), fragments(second), simt_numpy.Memory(weight, False), sums, out)
    program(machine(7, sums), *args)
    total = sum(
        first[g, :, 2 * g] * weight[2 * g] + second[g, :, 2 * g + 1] * weight[2 * g + 1] for g in range(4)
    )
    want = np.zeros(rows * 128)
    want[7 * rows : 8 * rows] = total[:rows]
    np.testing.assert_allclose(out.array.astype(np.float64), want, rtol=2**-8, atol=1e-6)


@pytest.mark.aot
@harness.needs_ptxas
@pytest.mark.parametrize(("model", "group"), [("kimi", 32), ("glm", 32), ("kimi", 128), ("glm", 64)])
def test_int4_moe_one_token_is_one_kernel_without_spills_or_copies(model, group):
    shapes = rank_shapes(model, 1, group)
    compiled = harness.compile_h200(functools.partial(int4_moe.int4_moe, group=group), *shapes)
    assert [spilled for _, spilled in compiled.kernels] == [0]
    assert not compiled.serialized
    assert "combine" not in compiled.hlo
    for stack in shapes[3:7]:
        harness.assert_no_copy(compiled.hlo, stack.shape)
