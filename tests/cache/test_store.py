"""Stored formats: bytes, round trips, saturation, and that padding and stale bytes are harmless."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import store

SHAPE = store.CacheShape(num_layers=3, num_index_layers=2, latent=8, rope=6, index_dim=10, tile=4)
KIMI = store.CacheShape(num_layers=61, num_index_layers=0, latent=512, rope=64, index_dim=128)
GLM = store.CacheShape(num_layers=78, num_index_layers=21, latent=512, rope=64, index_dim=128)
PAGES, PAGE_SIZE = 7, 5
# Half a unit in the last place, relative: e4m3 has 3 mantissa bits, bf16 7, f32 is stored as it is.
ROUNDING = {"f32_576": 0.0, "bf16_576": 2**-8, "fp8_576": 2**-4, "fp8_656": 2**-4}
ROUNDING |= {"index_f32": 0.0, "index_bf16": 2**-8, "index_132": 2**-4}
# Below the smallest normal e4m3 (2^-6) steps are 2^-9: half a step, times the largest scale that occurs.
UNDERFLOW = 2**-10


def _pool(layout="bf16_576", index_layout="index_bf16", scale=1.0):
    return store.init(SHAPE, layout, index_layout, num_pages=PAGES, page_size=PAGE_SIZE, scale=scale)


# Row 0 writes tokens 0..5 over pages 4 and 2; row 1 writes 4 tokens to page 3; its last two are padding.
PAGE_BT = jnp.asarray([[4, 4, 4, 4, 4, 2], [3, 3, 3, 3, 0, 0]], jnp.int32)
OFFSET_BT = jnp.asarray([[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 0, 0]], jnp.int32)
TABLE_BM = jnp.asarray([[4, 2, 0], [3, 0, 0]], jnp.int32)
LENGTH_B = jnp.asarray([6, 4], jnp.int32)


def _tokens(width: int, seed: int = 5) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, 6, width))


def test_bytes_per_token_of_the_published_models_is_exact():
    assert store.bytes_per_token(KIMI, "bf16_576", "index_132") == 70_272
    assert store.bytes_per_token(KIMI, "fp8_576", "index_132") == 35_136
    assert store.bytes_per_token(KIMI, "fp8_656", "index_132") == 40_016
    assert store.bytes_per_token(GLM, "fp8_656", "index_132") == 53_940
    mtp = dataclasses.replace(GLM, num_layers=79, num_index_layers=22)
    assert store.bytes_per_token(mtp, "fp8_656", "index_132") == 54_728


@pytest.mark.parametrize("index_layout", store.INDEX_LAYOUTS)
@pytest.mark.parametrize("layout", store.LAYOUTS)
def test_bytes_per_token_equals_the_bytes_of_the_arrays(layout, index_layout):
    kv = _pool(layout, index_layout)
    held = sum(pool.nbytes for name in store.POOLS if (pool := getattr(kv, name)) is not None)
    assert held == PAGES * PAGE_SIZE * store.bytes_per_token(SHAPE, layout, index_layout)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("layout", store.LAYOUTS)
def test_gather_latent_returns_what_was_written_in_logical_order(layout, scale):
    latent_BTC = _tokens(SHAPE.width)
    kv = jax.jit(store.write_latent)(_pool(layout, scale=scale), jnp.int32(1), PAGE_BT, OFFSET_BT, latent_BTC)
    got_BSC = store.gather_latent(kv, jnp.int32(1), TABLE_BM, jnp.float32, LENGTH_B)
    bound = np.abs(latent_BTC) * ROUNDING[layout] + (UNDERFLOW if "fp8" in layout else 0)
    assert np.all(np.abs(got_BSC[0, :6] - latent_BTC[0]) <= bound[0])
    assert np.all(np.abs(got_BSC[1, :4] - latent_BTC[1, :4]) <= bound[1, :4])
    assert not np.any(got_BSC[0, 6:])
    assert not np.any(got_BSC[1, 4:])
    for other in (0, 2):
        assert not np.any(store.gather_latent(kv, other, TABLE_BM, jnp.float32))
    assert (int(kv.saturated), int(kv.nonfinite)) == (0, 0)


@pytest.mark.parametrize("index_layout", store.INDEX_LAYOUTS)
def test_gather_index_returns_what_was_written(index_layout):
    key_BTI = _tokens(SHAPE.index_dim)
    kv = store.write_index(_pool("f32_576", index_layout), 1, PAGE_BT, OFFSET_BT, key_BTI)
    got_BSI = store.gather_index(kv, 1, TABLE_BM, jnp.float32, LENGTH_B)
    bound = np.abs(key_BTI) * ROUNDING[index_layout] + (UNDERFLOW if index_layout == "index_132" else 0)
    assert np.all(np.abs(got_BSI[0, :6] - key_BTI[0]) <= bound[0])
    assert not np.any(store.gather_index(kv, 0, TABLE_BM, jnp.float32))


def test_write_latent_of_fp8_656_keeps_the_rope_part_in_bf16():
    latent_BTC = _tokens(SHAPE.width)
    kv = store.write_latent(_pool("fp8_656"), 0, PAGE_BT, OFFSET_BT, latent_BTC)
    got_BSC = store.gather_latent(kv, 0, TABLE_BM, jnp.float32)
    rope_BTR = latent_BTC[..., SHAPE.latent :].astype(jnp.bfloat16).astype(jnp.float32)
    assert np.array_equal(got_BSC[0, :6, SHAPE.latent :], rope_BTR[0])


@pytest.mark.parametrize("layout", store.LAYOUTS)
def test_C1_write_latent_saturates_and_counts_and_never_stores_nan(layout):
    latent_BTC = _tokens(SHAPE.width).at[0, 1, 0].set(jnp.inf).at[0, 2, 3].set(jnp.nan)
    latent_BTC = latent_BTC.at[0, 3, -1].set(-jnp.inf).at[1, 5, 0].set(jnp.nan)  # the last one is padding
    kv = store.write_latent(_pool(layout), 0, PAGE_BT, OFFSET_BT, latent_BTC)
    assert int(kv.nonfinite) == 3
    got_BSC = store.gather_latent(kv, 0, TABLE_BM, jnp.float32, LENGTH_B)
    assert np.all(np.isfinite(got_BSC))
    assert float(got_BSC[0, 2, 3]) == 0.0
    large = {"f32_576": 0, "bf16_576": 1, "fp8_576": 1, "fp8_656": 0}  # fp8_656 scales its tiles to fit
    value = 3.4e38 if layout == "bf16_576" else 464.5
    kv = store.write_latent(_pool(layout), 0, PAGE_BT, OFFSET_BT, _tokens(SHAPE.width).at[0, 0, 0].set(value))
    assert int(kv.saturated) == large[layout]
    stored = float(store.gather_latent(kv, 0, TABLE_BM, jnp.float32)[0, 0, 0])
    assert np.isfinite(stored)
    assert abs(stored - value) <= 0.04 * value


def test_C1_unclamped_cast_would_store_nan():
    assert np.isnan(np.asarray(jnp.float32(465.0).astype(jnp.float8_e4m3fn).astype(jnp.float32)))


def test_C2_scale_is_used_per_layer_and_a_dropped_one_is_seen():
    latent_BTC = 3e3 * _tokens(SHAPE.width)
    kv = store.write_latent(_pool("fp8_576", scale=(1.0, 32.0, 1.0)), 1, PAGE_BT, OFFSET_BT, latent_BTC)
    got_BSC = store.gather_latent(kv, 1, TABLE_BM, jnp.float32)
    bound = np.abs(latent_BTC[0]) * ROUNDING["fp8_576"] + 32 * UNDERFLOW
    assert np.all(np.abs(got_BSC[0, :6] - latent_BTC[0]) <= bound)
    dropped = dataclasses.replace(kv, scale_Y=jnp.ones(3))
    wrong_BSC = store.gather_latent(dropped, 1, TABLE_BM, jnp.float32)
    assert not np.all(np.abs(wrong_BSC[0, :6] - latent_BTC[0]) <= bound)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_C2_scale_that_is_no_scale_is_refused(scale):
    with pytest.raises(ValueError, match="scale is"):
        _pool("fp8_576", scale=scale)


def test_C4_two_scales_for_one_latent_row_are_refused():
    assert store.shared_scale(0.5, 0.5) == 0.5
    with pytest.raises(ValueError, match=r"k_scale 0\.5 and v_scale 0\.25"):
        store.shared_scale(0.5, 0.25)


def test_C5_scale_of_a_bf16_cache_is_ignored():
    written = [
        store.write_latent(_pool("bf16_576", scale=s), 0, PAGE_BT, OFFSET_BT, _tokens(SHAPE.width))
        for s in (1.0, 7.0)
    ]
    assert written[0].scale_Y is None
    assert np.array_equal(written[0].values, written[1].values)


def _poisoned(kv: store.KVStore) -> store.KVStore:
    """Every byte 0x7f (an e4m3 NaN) or the NaN of the wider types."""
    fill = {"uint8": 0x7F, "uint16": 0x7FC0, "float32": jnp.nan}
    pools = {
        name: jnp.full_like(pool, fill[str(pool.dtype)])
        for name in store.POOLS
        if (pool := getattr(kv, name)) is not None
    }
    return dataclasses.replace(kv, **pools)


@pytest.mark.parametrize("length_B", [None, LENGTH_B], ids=["without_length", "with_length"])
@pytest.mark.parametrize(
    ("layout", "index_layout"), list(zip(store.LAYOUTS, (*store.INDEX_LAYOUTS, "index_132")))
)
def test_C8_C9_nan_left_in_pages_reads_as_zero_behind_the_new_owners_tokens(layout, index_layout, length_B):
    def run(kv):
        kv = store.write_latent(kv, 1, PAGE_BT, OFFSET_BT, _tokens(SHAPE.width))
        kv = store.write_index(kv, 1, PAGE_BT, OFFSET_BT, _tokens(SHAPE.index_dim))
        return (
            store.gather_latent(kv, 1, TABLE_BM, jnp.float32, length_B),
            store.gather_index(kv, 1, TABLE_BM, jnp.float32, length_B),
        )

    clean, poisoned = run(_pool(layout, index_layout)), run(_poisoned(_pool(layout, index_layout)))
    for a, b in zip(clean, poisoned):
        assert np.array_equal(a, b)


def test_C8_without_the_cut_at_the_length_the_tail_is_nan(monkeypatch):
    monkeypatch.setattr(store, "_harmless_tail", lambda x, _: x.reshape(x.shape[0], -1, x.shape[-1]))
    kv = store.write_latent(_poisoned(_pool("fp8_576")), 1, PAGE_BT, OFFSET_BT, _tokens(SHAPE.width))
    assert np.isnan(store.gather_latent(kv, 1, TABLE_BM, jnp.float32, LENGTH_B)).any()


def test_C8_raw_bytes_of_the_poisoned_tail_are_nan():
    kv = _poisoned(_pool("fp8_576"))
    raw = kv.values[1, 3].astype(jnp.uint8)
    assert np.all(np.isnan(jax.lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(jnp.float32)))


def test_gather_latent_keeps_nan_of_a_live_position_visible():
    kv = store.write_latent(_pool("fp8_576"), 1, PAGE_BT, OFFSET_BT, _tokens(SHAPE.width))
    kv = dataclasses.replace(kv, values=kv.values.at[1, 4, 2, 3].set(0x7F))
    assert np.isnan(store.gather_latent(kv, 1, TABLE_BM, jnp.float32, LENGTH_B)[0, 2, 3])


@pytest.mark.parametrize("layout", store.LAYOUTS)
def test_A10_write_to_the_padding_page_stores_zeros(layout):
    kv = store.write_latent(_pool(layout), 2, jnp.zeros_like(PAGE_BT), OFFSET_BT, _tokens(SHAPE.width))
    kv = store.write_index(kv, 1, jnp.zeros_like(PAGE_BT), OFFSET_BT, _tokens(SHAPE.index_dim))
    for name in store.POOLS:
        assert getattr(kv, name) is None or not np.any(getattr(kv, name))


def test_A10_without_blanking_the_padding_page_would_hold_tokens(monkeypatch):
    monkeypatch.setattr(store, "_blank_padding", lambda page_BT, x_BTW: x_BTW)
    kv = store.write_latent(_pool(), 2, jnp.zeros_like(PAGE_BT), OFFSET_BT, _tokens(SHAPE.width))
    assert np.any(kv.values[:, 0])


@pytest.mark.parametrize("page", [PAGES, PAGES + 3, -1])
def test_A14_write_outside_the_pool_is_dropped(page):
    before = store.write_latent(_pool("fp8_656"), 0, PAGE_BT, OFFSET_BT, _tokens(SHAPE.width))
    outside = jnp.full_like(PAGE_BT, page)
    after = store.write_latent(before, 0, outside, OFFSET_BT, _tokens(SHAPE.width, seed=6))
    for name in ("values", "scales", "rope"):
        assert np.array_equal(getattr(before, name), getattr(after, name))


@pytest.mark.parametrize("layout", store.LAYOUTS)
def test_A7_import_pages_restores_exported_bytes_exactly(layout):
    kv = store.write_latent(_pool(layout), 1, PAGE_BT, OFFSET_BT, _tokens(SHAPE.width))
    kv = store.write_index(kv, 0, PAGE_BT, OFFSET_BT, _tokens(SHAPE.index_dim))
    block = store.export_pages(kv, jnp.asarray([4, 2, 0], jnp.int32))
    back = store.import_pages(_pool(layout), jnp.asarray([1, 6, 0], jnp.int32), block)
    moved_BM = jnp.asarray([[1, 6, 0], [5, 0, 0]], jnp.int32)
    for gather in (store.gather_latent, store.gather_index):
        layer = 1 if gather is store.gather_latent else 0
        assert np.array_equal(
            gather(kv, layer, TABLE_BM, jnp.float32)[0], gather(back, layer, moved_BM, jnp.float32)[0]
        )


def test_A19_B9_raw_pages_of_another_layout_cannot_be_imported():
    block = store.export_pages(_pool("bf16_576"), jnp.asarray([1], jnp.int32))
    with pytest.raises(ValueError, match="convert them"):
        store.import_pages(_pool("fp8_576"), jnp.asarray([1], jnp.int32), block)
    same_shape = store.init(SHAPE, "bf16_576", "index_bf16", num_pages=PAGES, page_size=4)
    with pytest.raises(ValueError, match="cannot be put into pages"):
        store.import_pages(same_shape, jnp.asarray([1], jnp.int32), block)


def test_A19_a_layout_guessed_from_the_shape_would_give_other_values():
    """bf16_576 and fp8_576 have arrays of one shape: what tells them apart is the label that travels."""
    kv = store.write_latent(_pool("bf16_576"), 0, PAGE_BT, OFFSET_BT, _tokens(SHAPE.width))
    moved_A = jnp.asarray([4, 2], jnp.int32)
    guessed = dataclasses.replace(store.export_pages(kv, moved_A), layout="fp8_576")
    low = {name: pool.astype(jnp.uint8) for name, pool in guessed.pools.items() if name == "values"}
    back = store.import_pages(_pool("fp8_576"), moved_A, dataclasses.replace(guessed, pools=low))
    right, wrong = (store.gather_latent(pool, 0, TABLE_BM, jnp.float32)[0, :6] for pool in (kv, back))
    assert np.abs(right - wrong).max() > 1


def test_copy_pages_copies_all_layers_and_leaves_others():
    kv = store.write_latent(_pool("fp8_656"), 1, PAGE_BT, OFFSET_BT, _tokens(SHAPE.width))
    after = store.copy_pages(kv, jnp.asarray([4], jnp.int32), jnp.asarray([6], jnp.int32))
    assert np.array_equal(after.values[:, 6], kv.values[:, 4])
    assert np.array_equal(after.values[:, :6], kv.values[:, :6])


def test_init_with_unknown_layout_or_size_names_it():
    with pytest.raises(ValueError, match="'fp4' is not one of"):
        _pool("fp4")
    with pytest.raises(ValueError, match="'index_4' is not one of"):
        _pool(index_layout="index_4")
    with pytest.raises(ValueError, match="page_size is 0"):
        store.init(SHAPE, "f32_576", "index_f32", num_pages=PAGES, page_size=0)
    with pytest.raises(ValueError, match="not a multiple of the scale tile"):
        store.init(dataclasses.replace(SHAPE, tile=3), "fp8_656", "index_f32", num_pages=7, page_size=5)


def test_write_latent_compiled_on_cpu_does_not_convert_the_pool():
    kv = _pool("fp8_576")
    text = (
        jax.jit(store.write_latent, donate_argnums=0)
        .lower(kv, jnp.int32(1), PAGE_BT, OFFSET_BT, _tokens(SHAPE.width))
        .compile()
        .as_text()
    )
    whole = ",".join(str(n) for n in kv.values.shape)
    converts = [line for line in text.splitlines() if "convert(" in line and f"[{whole}]" in line]
    assert converts == []
