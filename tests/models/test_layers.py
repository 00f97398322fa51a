"""Norms, rotary embedding and linear maps against independent numpy in f64."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.formats import qtensor
from kvmem.models import get_config, layers

RANDOM = np.random.default_rng(5)


def test_rope_frequencies_kimi_match_published_values():
    f = layers.rope_frequencies(get_config("kimi_k2.6").rope, 64)
    published = {
        0: 1,
        8: 6.6874e-2,
        9: 4.37767e-2,
        14: 4.46585e-3,
        19: 1.58375e-4,
        20: 1.80702e-5,
        31: 4.38221e-7,
    }
    assert f.shape == (32,)
    for pair, value in published.items():
        assert f[pair] == pytest.approx(value, rel=2e-5), pair


def test_rope_frequencies_glm_are_plain():
    f = layers.rope_frequencies(get_config("glm_5.2").rope, 64)
    np.testing.assert_allclose(f, 8e6 ** (-np.arange(0, 64, 2) / 64), rtol=1e-6)


def test_rope_frequencies_unequal_mscales_raise():
    rope = get_config("kimi_k2.6").rope
    rope = dataclasses.replace(rope, yarn=dataclasses.replace(rope.yarn, mscale_all_dim=0.5))
    with pytest.raises(ValueError, match=r"mscale=1\.0, mscale_all_dim=0\.5"):
        layers.rope_frequencies(rope, 64)


def test_rotate_turns_interleaved_pairs():
    x = RANDOM.standard_normal((2, 3, 5, 8)).astype(np.float32)
    position = np.array([[0, 7, 11], [2, 900, 5]], np.int32)
    f = layers.rope_frequencies(get_config("glm_tiny_tp8").rope, 8)
    expected = np.empty_like(x)
    for b, t, h, i in np.ndindex(2, 3, 5, 4):
        angle = float(position[b, t]) * float(f[i])
        a, c = x[b, t, h, 2 * i], x[b, t, h, 2 * i + 1]
        expected[b, t, h, 2 * i] = a * math.cos(angle) - c * math.sin(angle)
        expected[b, t, h, 2 * i + 1] = c * math.cos(angle) + a * math.sin(angle)
    # f32 angles up to 900 are off by 900 * 2^-24.
    np.testing.assert_allclose(layers.rotate(jnp.asarray(x), jnp.asarray(position), f), expected, atol=3e-4)


def test_rotate_dot_product_depends_on_distance_only():
    f = layers.rope_frequencies(get_config("kimi_tiny_tp8").rope, 8)
    q, k = (jnp.asarray(RANDOM.standard_normal((1, 1, 8)), jnp.float32) for _ in range(2))

    def dot(at_q, at_k):
        turned = [layers.rotate(x, jnp.array([[at]]), f) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert dot(9, 4) == pytest.approx(dot(105, 100), abs=1e-5)
    assert dot(9, 4) != pytest.approx(dot(9, 5), abs=1e-3)


def test_rmsnorm_rounds_before_the_weight_multiplies():
    x = jnp.asarray(RANDOM.standard_normal((7, 96)), jnp.bfloat16)
    weight = jnp.asarray(1 + 0.3 * RANDOM.standard_normal(96), jnp.bfloat16)
    real = np.asarray(x, np.float64)
    normal = (real / np.sqrt((real**2).mean(-1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)
    expected = (normal.astype(np.float32) * np.asarray(weight, np.float32)).astype(jnp.bfloat16)
    ours = np.asarray(layers.rmsnorm(x, weight, 1e-5))
    assert (ours == expected).mean() > 0.99  # f32 against f64 may round a value at a tie the other way
    late = (
        normal.astype(np.float32) * 0 + real / np.sqrt((real**2).mean(-1, keepdims=True) + 1e-5)
    ) * np.asarray(weight, np.float32)
    assert (
        late.astype(jnp.bfloat16) == expected
    ).mean() < 0.9  # one rounding instead of two is another result


def test_layernorm_subtracts_the_mean_and_adds_the_bias():
    x = RANDOM.standard_normal((5, 16)) + 3
    weight, bias = RANDOM.standard_normal((2, 16))
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * weight + bias
    ours = layers.layernorm(*(jnp.asarray(a, jnp.float32) for a in (x, weight, bias)))
    np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize(("storage", "group"), [("int4_group", (1, 32)), ("fp8_block", (32, 32))])
def test_linear_quantised_weight_equals_its_dequantised_product(storage, group):
    x = jnp.asarray(RANDOM.standard_normal((3, 5, 96)), jnp.float32)
    weight = qtensor.quantize(jnp.asarray(RANDOM.standard_normal((40, 96)), jnp.float32), storage, group)
    expected = np.asarray(x, np.float64) @ np.asarray(weight.dequantize(jnp.float32), np.float64).T
    np.testing.assert_allclose(layers.linear(x, weight), expected, atol=1e-4)


def test_einsum_bf16_accumulates_in_f32():
    # 1 + 4096 times 2^-9: in a bf16 accumulator every later term is lost and the sum stays near 1.
    x = jnp.asarray([[1.0] + [2.0**-9] * 4096], jnp.bfloat16)
    assert float(layers.einsum("TD,OD->TO", x, jnp.ones((1, 4097), jnp.bfloat16))[0, 0]) == 9.0
