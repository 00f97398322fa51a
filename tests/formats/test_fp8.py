import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvmem.formats import fp8

NAN_BITS = {0x7F, 0xFF}


def test_quantize_values_beyond_464_saturates_and_counts():
    x = jnp.asarray([448.0, 449.0, 464.5, 1e30, -1e30, -448.0, 3.0], jnp.float32)
    values = fp8.quantize(x, 1.0)
    np.testing.assert_array_equal(
        fp8.dequantize(values.bits, 1.0, jnp.float32), [448, 448, 448, 448, -448, -448, 3]
    )
    assert int(values.saturated) == 4
    assert int(values.nonfinite) == 0


def test_quantize_plain_cast_is_the_fault_that_saturation_prevents():
    # The mutation: without the clip, everything above 464 becomes NaN.
    assert np.isnan(np.asarray(jnp.asarray([465.0]).astype(jnp.float8_e4m3fn), np.float32)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_quantize_nonfinite_input_is_stored_as_zero_and_counted(dtype):
    x = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 2.0], dtype)
    values = fp8.quantize(x, 1.0)
    np.testing.assert_array_equal(values.bits[:3], [0, 0, 0])
    assert int(values.nonfinite) == 3
    assert int(values.saturated) == 0


def test_quantize_under_jit_never_stores_a_nan_pattern():
    bits = jnp.arange(65536, dtype=jnp.uint16)
    every_bf16 = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    stored = jax.jit(fp8.quantize)(every_bf16, jnp.float32(0.25))
    assert not NAN_BITS & set(np.asarray(stored.bits).tolist())
    finite = np.isfinite(np.asarray(every_bf16, np.float32))
    assert int(stored.nonfinite) == np.sum(~finite)
    assert int(stored.saturated) == np.sum(np.abs(np.asarray(every_bf16, np.float32)[finite]) > 448 * 0.25)


def test_quantize_every_finite_code_round_trips_bit_exactly():
    codes = np.array([b for b in range(256) if b not in NAN_BITS], np.uint8)
    real = fp8.dequantize(jnp.asarray(codes), 0.5, jnp.float32)
    np.testing.assert_array_equal(fp8.quantize(real, 0.5).bits, codes)


@given(
    hnp.arrays(np.float32, (3, 24), elements=st.floats(-1e4, 1e4, width=32)),
    st.floats(0.0078125, 64.0, width=32),
)
def test_quantize_any_values_match_ml_dtypes_after_clipping(x, scale):
    stored = np.clip(x / np.float32(scale), -448, 448)
    expected = stored.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(fp8.quantize(jnp.asarray(x), scale).bits, expected)


@given(hnp.arrays(np.float32, (3, 32), elements=st.floats(-1e4, 1e4, width=32)))
def test_quantize_tiles_error_is_within_half_a_step(x):
    values, scale = fp8.quantize_tiles(jnp.asarray(x), tile=16)
    back = np.asarray(fp8.dequantize_tiles(values.bits, scale, jnp.float32))
    # e4m3 has 3 mantissa bits: half a step is 2^-4 of the value, and 2^-10 scales among the subnormals.
    # One f32 rounding of the quotient and one of the product add 2^-23 of the value.
    bound = np.abs(x) * (2**-4 + 2**-22) + np.repeat(np.asarray(scale), 16, axis=-1) * 2**-10
    assert (np.abs(back - x) <= bound).all()
    assert int(values.saturated) == 0 or np.abs(x).max() > 0


def test_quantize_tiles_all_zero_tile_has_scale_one_and_zeros():
    x = jnp.concatenate([jnp.zeros((3, 16)), jnp.full((3, 16), 7.0)], axis=-1)
    values, scale = fp8.quantize_tiles(x, tile=16)
    np.testing.assert_array_equal(scale, np.tile(np.float32([1.0, 7.0 / 448.0]), (3, 1)))
    np.testing.assert_array_equal(values.bits[:, :16], 0)


def test_quantize_tiles_tiny_tile_is_zero_and_finite():
    values, scale = fp8.quantize_tiles(jnp.full((3, 16), 1e-37), tile=16)
    assert np.isfinite(np.asarray(scale)).all()
    np.testing.assert_array_equal(fp8.dequantize_tiles(values.bits, scale, jnp.float32), 0.0)


def test_quantize_tiles_nan_in_one_tile_leaves_its_neighbours_exact():
    x = np.full((2, 32), 14.0, np.float32)
    x[0, 3] = np.nan
    values, scale = fp8.quantize_tiles(jnp.asarray(x), tile=16)
    back = np.asarray(fp8.dequantize_tiles(values.bits, scale, jnp.float32))
    x[0, 3] = 0.0
    np.testing.assert_array_equal(back, x)
    assert int(values.nonfinite) == 1


def test_quantize_tiles_width_not_a_multiple_is_refused():
    with pytest.raises(ValueError, match="width 40 is not a multiple of the tile 16"):
        fp8.quantize_tiles(jnp.ones((2, 40)), tile=16)


@pytest.mark.parametrize(("rows", "cols"), [(64, 96), (80, 70), (5, 33)], ids=["whole", "edge", "less"])
def test_D6_quantize_blocks_odd_shapes_are_exact_after_unpadding(rows, cols):
    # Each block's values are multiples of its scale that e4m3 holds exactly, so the round trip is exact.
    rng = np.random.default_rng(rows)
    w = rng.integers(-16, 16, (3, rows, cols)).astype(np.float32) * 28.0 / 448.0
    w[:, ::32, ::32] = 28.0  # the largest of each block: amax / 448 = 1 / 16
    values, scale = fp8.quantize_blocks(jnp.asarray(w), (32, 32))
    assert values.shape == w.shape
    assert scale.shape == (3, -(-rows // 32), -(-cols // 32))
    np.testing.assert_array_equal(fp8.dequantize_blocks(values, scale, (32, 32), jnp.float32), w)


def test_dequantize_blocks_matches_a_loop_over_blocks():
    rng = np.random.default_rng(3)
    w = rng.normal(size=(70, 40)).astype(np.float32)
    values, scale = (np.asarray(a) for a in fp8.quantize_blocks(jnp.asarray(w), (32, 16)))
    expected = np.array(
        [[float(values[o, k]) * scale[o // 32, k // 16] for k in range(40)] for o in range(70)], np.float32
    )
    back = fp8.dequantize_blocks(jnp.asarray(values), jnp.asarray(scale), (32, 16), jnp.float32)
    np.testing.assert_array_equal(back, expected)
    # The mutation: scales of the wrong block row.
    wrong = fp8.dequantize_blocks(
        jnp.asarray(values), jnp.asarray(np.roll(scale, 1, 0)), (32, 16), jnp.float32
    )
    assert (np.asarray(wrong) != expected).mean() > 0.5


def test_dequantize_blocks_wrong_scale_shape_is_refused():
    values, scale = fp8.quantize_blocks(jnp.ones((64, 96)), (32, 32))
    with pytest.raises(ValueError, match=r"need \(2, 3\)"):
        fp8.dequantize_blocks(values, scale.T, (32, 32), jnp.float32)
