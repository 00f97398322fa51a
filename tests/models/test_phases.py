"""Decode and prefill over the same FP8 pages: two forms of attention on one set of stored bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import store
from kvmem.models import attention, decoder, get_config

CONFIG = get_config("kimi_tiny_parity")
PAGE_SIZE, CACHED, NEW = 4, 13, 5
TABLE_BM = jnp.asarray([[2, 6, 1, 5, 3], [4, 8, 7, 9, 10]], jnp.int32)
# Of the largest output. f32: sums of up to 32 + 18 terms in another order, each 2^-24, scores below 8. bf16:
# queries, keys, weights, values and means are rounded once each, by 2^-9 in the mean; scores carry two of
# these, times scores below 4.
BOUND = {"f32": 2e-5, "bf16": 2.0**-5}


RANDOM = np.random.default_rng(7)
HEADS, ROWS = CONFIG.num_heads, TABLE_BM.shape[0]
WEIGHTS = {
    "w_uk": RANDOM.standard_normal((HEADS, CONFIG.qk_nope_head_dim, CONFIG.kv_lora_rank)),
    "w_uv": RANDOM.standard_normal((HEADS, CONFIG.v_head_dim, CONFIG.kv_lora_rank)),
}
NOPE_BTHN = RANDOM.standard_normal((ROWS, NEW, HEADS, CONFIG.qk_nope_head_dim))
ROPE_BTHR = RANDOM.standard_normal((ROWS, NEW, HEADS, CONFIG.qk_rope_head_dim))
LATENT_BTC = RANDOM.standard_normal((ROWS, CACHED + NEW, CONFIG.cache_width))


@functools.cache
def _filled(layout: str) -> store.KVStore:
    kv = store.init(decoder.cache_shape(CONFIG), layout, num_pages=11, page_size=PAGE_SIZE, scale=0.02)
    position_T = jnp.arange(CACHED + NEW)
    page_BT = TABLE_BM[:, position_T // PAGE_SIZE]
    offset_BT = jnp.broadcast_to(position_T % PAGE_SIZE, page_BT.shape)
    return jax.jit(store.write_latent)(kv, 1, page_BT, offset_BT, jnp.asarray(LATENT_BTC, jnp.float32))


@functools.partial(jax.jit, static_argnames="form")
def _attend(kv, first, weights, nope_BTHN, rope_BTHR, *, form):
    """Attention output of the queries, which stand at positions ``first`` on."""
    count = nope_BTHN.shape[1]
    new_B, length_B = jnp.full(ROWS, count, jnp.int32), jnp.full(ROWS, first, jnp.int32)
    at = attention.place(new_B, length_B, TABLE_BM, count, PAGE_SIZE)
    allowed_BTS = attention.visible(at, TABLE_BM.shape[1] * PAGE_SIZE)
    return attention.attend(weights, CONFIG, kv, 1, at, nope_BTHN, rope_BTHR, allowed_BTS, form)


@pytest.mark.parametrize("scale", [1.0, 1.25], ids=["same_scale", "mutation_decode_reads_another_scale"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout", ["fp8_576", "fp8_656"])
def test_C11_decode_and_prefill_over_one_fp8_pool_differ_by_rounding_only(layout, dtype, scale):
    real = {"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype]
    weights = {name: jnp.asarray(w * CONFIG.kv_lora_rank**-0.5, real) for name, w in WEIGHTS.items()}
    nope, rope = jnp.asarray(NOPE_BTHN, real), jnp.asarray(ROPE_BTHR, real)
    kv = _filled(layout)
    prefill_BTA = np.asarray(_attend(kv, CACHED, weights, nope, rope, form="naive"), np.float64)
    name = "scale_Y" if layout == "fp8_576" else "scales"
    read = dataclasses.replace(kv, **{name: getattr(kv, name) * scale})
    steps = [
        _attend(read, CACHED + t, weights, nope[:, t : t + 1], rope[:, t : t + 1], form="absorbed")
        for t in range(NEW)
    ]
    decode_BTA = np.asarray(jnp.concatenate(steps, axis=1), np.float64)
    error = np.abs(decode_BTA - prefill_BTA).max() / np.abs(prefill_BTA).max()
    assert (error < BOUND[dtype]) == (scale == 1.0), error
