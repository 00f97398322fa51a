import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvmem.formats import int4, nvfp4

BACKENDS = [np.asarray, jnp.asarray]
IDS = ["numpy", "jax"]


def reference_pack(q: np.ndarray) -> np.ndarray:
    """compressed-tensors: offset to unsigned, pad with 0, eight nibbles low first."""
    rows, cols = q.shape
    packed = np.zeros((rows, -(-cols // 8)), np.uint32)
    for o in range(rows):
        for k in range(cols):
            packed[o, k // 8] |= np.uint32(int(q[o, k]) + 8) << np.uint32(4 * (k % 8))
    return packed.view(np.int32)


@pytest.mark.parametrize("as_array", BACKENDS, ids=IDS)
def test_D8_pack_int32_every_value_in_every_lane_is_bit_exact(as_array):
    # Row r holds the value r - 8 in lane r % 8 and others elsewhere: every value visits every lane over rows.
    q = np.array([[(r + 3 * k) % 16 - 8 for k in range(48)] for r in range(16)]).astype(ml_dtypes.int4)
    packed = int4.pack_int32(as_array(q))
    np.testing.assert_array_equal(packed, reference_pack(q.astype(np.int8)))
    np.testing.assert_array_equal(np.asarray(int4.unpack_int32(packed)), q)
    assert int4.unpack_int32(packed).dtype == ml_dtypes.int4


def test_D8_pack_int32_swapped_nibbles_would_be_seen():
    q = np.arange(-8, 8).reshape(2, 8).astype(ml_dtypes.int4)
    swapped = q.reshape(2, 4, 2)[..., ::-1].reshape(2, 8)
    assert (int4.pack_int32(swapped) != reference_pack(q.astype(np.int8))).all()


@given(hnp.arrays(np.int8, st.tuples(st.integers(2, 4), st.integers(1, 29)), elements=st.integers(-8, 7)))
def test_D6_unpack_int32_any_width_is_exact_after_unpadding(q):
    packed = int4.pack_int32(q.astype(ml_dtypes.int4))
    np.testing.assert_array_equal(packed, reference_pack(q))
    np.testing.assert_array_equal(int4.unpack_int32(packed, q.shape[-1]).astype(np.int8), q)


@pytest.mark.parametrize("width", [7, 24, 27])
def test_unpack_int32_on_device_agrees_with_the_host(width):
    q = np.random.default_rng(width).integers(-8, 8, (5, width)).astype(ml_dtypes.int4)
    packed = int4.pack_int32(jnp.asarray(q))
    np.testing.assert_array_equal(packed, int4.pack_int32(q))
    np.testing.assert_array_equal(np.asarray(int4.unpack_int32(packed, width)), q)


def test_unpack_int32_wrong_width_is_refused():
    with pytest.raises(ValueError, match="25 INT4 values need 4 int32 words, the array has 3"):
        int4.unpack_int32(np.zeros((2, 3), np.int32), 25)


@pytest.mark.parametrize("rule", list(int4.RULES))
@given(x=hnp.arrays(np.float32, (3, 48), elements=st.floats(-100, 100, width=32)))
def test_quantize_groups_any_weight_is_within_the_stated_error(rule, x):
    q, scale = int4.quantize_groups(jnp.asarray(x), 16, rule)
    back = np.asarray(int4.dequantize_groups(q, scale, jnp.float32))
    steps = np.repeat(np.asarray(scale, np.float32), 16, axis=-1)
    # Half a step, or, for the largest positive value, divisor - 7 steps; the bf16 scale is off by 2^-9 of
    # itself, which the largest value feels at most 8 times; f32 rounding is far below.
    bound = steps * (max(0.5, int4.RULES[rule] - 7) + 8 * 2**-8)
    assert (np.abs(back - x) <= bound).all()
    assert np.isfinite(np.asarray(scale, np.float32)).all()


def test_quantize_groups_values_on_the_grid_are_exact():
    # absmax/8 of a group that reaches -8 steps gives the step itself, so quantising again changes nothing.
    rng = np.random.default_rng(0)
    grid = rng.integers(-8, 8, (3, 5, 32))
    grid[..., ::16] = -8
    w = jnp.asarray(grid * 0.25, jnp.float32)
    q, scale = int4.quantize_groups(w, 16, "absmax/8")
    np.testing.assert_array_equal(np.asarray(scale, np.float32), 0.25)
    np.testing.assert_array_equal(np.asarray(q).astype(np.int8), grid)
    # The mutation: scales shifted by one group.
    w = w * jnp.asarray([[[1.0] * 16 + [4.0] * 16]])
    q, scale = int4.quantize_groups(w, 16, "absmax/8")
    shifted = int4.dequantize_groups(q, jnp.roll(scale, 1, -1), jnp.float32)
    assert not np.array_equal(shifted, w)
    np.testing.assert_array_equal(int4.dequantize_groups(q, scale, jnp.float32), w)


def test_D9_quantize_groups_zero_and_tiny_groups_have_finite_scales_and_zeros():
    w = jnp.concatenate([jnp.zeros((3, 16)), jnp.full((3, 16), 1e-39), jnp.full((3, 16), 7.5)], axis=-1)
    q, scale = int4.quantize_groups(w, 16)
    np.testing.assert_array_equal(np.asarray(scale, np.float32), [[1.0, 1.0, 1.0]] * 3)
    np.testing.assert_array_equal(np.asarray(q).astype(np.int8)[:, :32], 0)
    np.testing.assert_array_equal(np.asarray(q).astype(np.int8)[:, 32:], 7)


def test_quantize_groups_group_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="K = 40 is not a multiple of the group 16"):
        int4.quantize_groups(jnp.ones((3, 40)), 16)


def test_quantize_groups_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="absmax/6"):
        int4.quantize_groups(jnp.ones((3, 32)), 16, "absmax/6")


def test_dequantize_groups_rows_that_differ_are_refused():
    with pytest.raises(ValueError, match="rows differ"):
        int4.dequantize_groups(jnp.zeros((3, 32), jnp.int4), jnp.ones((4, 2), jnp.bfloat16), jnp.float32)


def test_nvfp4_values_on_the_grid_are_exact_and_the_error_is_bounded():
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    w = np.concatenate([grid, -grid])[None] * np.array([[448.0], [2.0], [0.5]], np.float32)
    stored = nvfp4.quantize(jnp.asarray(w))
    np.testing.assert_array_equal(nvfp4.dequantize(*stored, jnp.float32), w)

    rng = np.random.default_rng(1)
    w = rng.normal(size=(5, 48)).astype(np.float32)
    values, group_scale, tensor_scale = nvfp4.quantize(jnp.asarray(w))
    back = np.asarray(nvfp4.dequantize(values, group_scale, tensor_scale, jnp.float32))
    amax = np.abs(w.reshape(5, 3, 16)).max(-1, keepdims=True)
    # The widest e2m1 gap is 2 of 6: half of it is amax / 6; the e4m3 group scale is off by up to 2^-4, which
    # moves the largest value by as much when it clips.
    assert (np.abs(back - w).reshape(5, 3, 16) <= amax * (1 / 6 * (1 + 2**-4) + 2**-4)).all()


def test_nvfp4_all_zero_group_is_zero():
    w = jnp.concatenate([jnp.zeros((2, 16)), jnp.ones((2, 16))], axis=-1)
    back = nvfp4.dequantize(*nvfp4.quantize(w), jnp.float32)
    assert np.isfinite(np.asarray(back)).all()
    np.testing.assert_array_equal(back[:, :16], 0.0)


def test_nvfp4_width_not_a_multiple_is_refused():
    with pytest.raises(ValueError, match="K = 40"):
        nvfp4.quantize(jnp.ones((2, 40)))
