"""The content digest: what it sees, what it does not, and that it is a function of the stored bytes only."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import integrity, pages, store, tags
from kvmem.cache.integrity import Kind

SHAPE = store.CacheShape(num_layers=3, num_index_layers=2, latent=8, rope=6, index_dim=10, tile=4)
ROWS, MAX_PAGES, PAGES, PAGE_SIZE = 3, 4, 11, 5
LENGTHS = (12, 5, 7)
EVERY = jnp.ones(ROWS, bool)
_write_latent, _write_index = jax.jit(store.write_latent), jax.jit(store.write_index)
_guard = jax.jit(integrity.guard, static_argnums=0, static_argnames="pages_per_row")
FORMATS = [
    ("f32_576", "index_f32"),
    ("bf16_576", "index_bf16"),
    ("fp8_576", "index_132"),
    ("fp8_656", "index_132"),
]


@functools.cache
def _filled(layout: str, index_layout: str):
    """Three rows with random tokens, everything sealed."""
    state, _ = pages.append(pages.init(PAGES, ROWS, MAX_PAGES, PAGE_SIZE), jnp.asarray(LENGTHS, jnp.int32))
    expectation = tags.extend(tags.empty(ROWS, MAX_PAGES), state, EVERY)
    kv = store.init(SHAPE, layout, index_layout, num_pages=PAGES, page_size=PAGE_SIZE, scale=0.5)
    kv = _write(kv, state, jnp.zeros(ROWS, jnp.int32), count=max(LENGTHS), seed=3)
    digests = tags.seal_rows(
        tags.empty_digests(PAGES), kv, state, jnp.zeros(ROWS, jnp.int32), EVERY, new_tokens=max(LENGTHS)
    )
    return state, expectation, kv, digests


def _write(kv, state, start_B, count, seed):
    position_BT = start_B[:, None] + jnp.arange(count)[None, :]
    page_BT = jnp.take_along_axis(state.table_BM, position_BT // PAGE_SIZE, axis=1, mode="clip")
    page_BT = jnp.where(position_BT < state.length_B[:, None], page_BT, pages.PADDING_PAGE)
    key = jax.random.key(seed)
    for layer in range(SHAPE.num_layers):
        token_BTC = jax.random.normal(jax.random.fold_in(key, layer), (ROWS, count, SHAPE.width))
        kv = _write_latent(kv, layer, page_BT, position_BT % PAGE_SIZE, token_BTC)
    for layer in range(SHAPE.num_index_layers):
        key_BTI = jax.random.normal(jax.random.fold_in(key, 100 + layer), (ROWS, count, SHAPE.index_dim))
        kv = _write_index(kv, layer, page_BT, position_BT % PAGE_SIZE, key_BTI)
    return kv


def _checked(state, expectation, kv, digests, **kwargs) -> integrity.IntegrityReport:
    return _guard("tags_digest", state, expectation, EVERY, kv=kv, digests=digests, **kwargs)


@pytest.mark.parametrize(("layout", "index_layout"), FORMATS)
def test_guard_of_sealed_pages_is_ok_in_every_format(layout, index_layout):
    assert _checked(*_filled(layout, index_layout)).ok_B.tolist() == [True] * 3


def _flip(kv: store.KVStore, name: str, at: tuple, bit: int) -> store.KVStore:
    pool = np.array(getattr(kv, name))
    raw = pool.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[pool.dtype.itemsize])
    raw[at] ^= raw.dtype.type(1 << bit)
    return dataclasses.replace(kv, **{name: jnp.asarray(pool)})


def _pools_of(layout, index_layout):
    kv = store.init(SHAPE, layout, index_layout, num_pages=2, page_size=2)
    return [name for name in store.POOLS if getattr(kv, name) is not None]


@pytest.mark.parametrize(
    ("layout", "index_layout", "name"),
    [(a, b, name) for a, b in FORMATS for name in _pools_of(a, b)],
)
def test_E10_any_flipped_bit_is_unseen_by_tags_and_seen_by_the_digest(layout, index_layout, name):
    state, expectation, kv, digests = _filled(layout, index_layout)
    pool = getattr(kv, name)
    page = int(state.table_BM[0, 1])
    rng = np.random.default_rng(11)
    for bit in range(8 * pool.dtype.itemsize):
        at = (rng.integers(pool.shape[0]), page, rng.integers(PAGE_SIZE))
        at += tuple(rng.integers(n) for n in pool.shape[3:])
        broken = _flip(kv, name, at, bit)
        assert _guard("tags", state, expectation, EVERY).ok_B.tolist() == [True] * 3
        report = _checked(state, expectation, broken, digests)
        assert report.ok_B.tolist() == [False, True, True]
        assert (int(report.kind_B[0]), int(report.logical_B[0])) == (Kind.CONTENT, 1)


@pytest.mark.parametrize(("layout", "index_layout"), FORMATS)
def test_E10_tokens_swapped_within_a_page_are_unseen_by_tags_and_seen_by_the_digest(layout, index_layout):
    state, expectation, kv, digests = _filled(layout, index_layout)
    page = int(state.table_BM[2, 0])
    order = jnp.asarray([0, 3, 2, 1, 4])
    moved = {
        name: pool.at[:, page].set(pool[:, page][:, order])
        for name in store.POOLS
        if (pool := getattr(kv, name)) is not None
    }
    report = _checked(state, expectation, dataclasses.replace(kv, **moved), digests)
    assert report.ok_B.tolist() == [True, True, False]


def test_E10_scale_of_a_layer_changed_is_seen_by_the_digest_only():
    state, expectation, kv, digests = _filled("fp8_576", "index_132")
    wrong = dataclasses.replace(kv, scale_Y=kv.scale_Y.at[1].set(1.0))
    assert _guard("tags", state, expectation, EVERY).ok_B.tolist() == [True] * 3
    assert _checked(state, expectation, wrong, digests).ok_B.tolist() == [False] * 3


def test_C12_scales_moved_without_their_tokens_are_seen_by_the_digest():
    state, expectation, kv, digests = _filled("fp8_656", "index_132")
    page = int(state.table_BM[0, 0])
    order = jnp.asarray([1, 0, 2, 3, 4])
    half_moved = dataclasses.replace(kv, values=kv.values.at[:, page].set(kv.values[:, page][:, order]))
    assert _checked(state, expectation, half_moved, digests).ok_B.tolist() == [False, True, True]
    swapped = dataclasses.replace(half_moved, scales=kv.scales.at[:, page].set(kv.scales[:, page][:, order]))
    table_BM = state.table_BM[:1]
    good = store.gather_latent(kv, 0, table_BM, jnp.float32)[0, jnp.asarray([1, 0])]
    half = store.gather_latent(half_moved, 0, table_BM, jnp.float32)[0, :2]
    whole = store.gather_latent(swapped, 0, table_BM, jnp.float32)[0, :2]
    latent = slice(0, SHAPE.latent)
    assert np.array_equal(whole[:, latent], good[:, latent])
    assert not np.array_equal(half[:, latent], good[:, latent])


def test_digest_ignores_bytes_behind_the_live_tokens():
    state, expectation, kv, digests = _filled("bf16_576", "index_bf16")
    tail = int(state.table_BM[0, 2])  # 12 tokens: 2 of 5 live
    dirty = dataclasses.replace(kv, values=kv.values.at[:, tail, 2:].set(0x7FC0))
    assert _checked(state, expectation, dirty, digests).ok_B.tolist() == [True] * 3


def test_page_of_which_too_few_tokens_are_sealed_fails_closed():
    state, expectation, kv, digests = _filled("bf16_576", "index_bf16")
    state, _ = pages.append(state, jnp.asarray([1, 0, 0], jnp.int32))
    expectation = tags.extend(expectation, state, EVERY)
    assert _checked(state, expectation, kv, digests).ok_B.tolist() == [False, True, True]
    written_B = jnp.asarray(LENGTHS, jnp.int32)  # the new token is about to be written: not yet expected
    assert _checked(state, expectation, kv, digests, written_B=written_B).ok_B.tolist() == [True] * 3


def test_seal_rows_after_each_step_keeps_up_with_appends_and_rejected_drafts():
    state, expectation, kv, digests = _filled("fp8_656", "index_132")
    for step, (grow, back) in enumerate([((1, 1, 1), None), ((4, 3, 4), (0, 2, 3)), ((2, 1, 1), None)]):
        start_B = state.length_B
        state, ok_B = pages.append(state, jnp.asarray(grow, jnp.int32))
        assert bool(jnp.all(ok_B))
        expectation = tags.extend(expectation, state, EVERY)
        kv = _write(kv, state, start_B, count=4, seed=20 + step)
        digests = tags.seal_rows(digests, kv, state, start_B, EVERY, new_tokens=4)
        if back:
            state, _ = pages.truncate(state, state.length_B - jnp.asarray(back, jnp.int32), EVERY)
        assert _checked(state, expectation, kv, digests).ok_B.tolist() == [True] * 3


def test_sampled_check_always_covers_the_page_that_is_written_next_and_the_others_in_turn():
    state, expectation, kv, digests = _filled("bf16_576", "index_bf16")
    sample = {"pages_per_row": 1}
    for logical, seen in ((2, [True, True, True]), (1, [False, True, False]), (0, [True, False, True])):
        page = int(state.table_BM[0, logical])
        broken = dataclasses.replace(kv, values=kv.values.at[1, page, 0, 0].add(1))
        got = [
            not bool(_checked(state, expectation, broken, digests, step=jnp.int32(step), **sample).ok_B[0])
            for step in (0, 1, 2)
        ]
        if logical == 2:
            assert got == seen
        else:
            assert got == [step % 3 == logical for step in (0, 1, 2)]
    with pytest.raises(ValueError, match="needs the step number"):
        _checked(state, expectation, kv, digests, **sample)


def test_A7_restore_shows_damage_done_to_exported_bytes():
    state, expectation, kv, digests = _filled("fp8_656", "index_132")
    page_A = state.table_BM[0, :3]
    block = store.export_pages(kv, page_A)
    saved, tokens_A = digests.digest_P2[page_A], digests.tokens_P[page_A]
    state, _ = pages.release(state, jnp.asarray([1, 0, 0], bool), expectation)
    expectation = tags.clear(expectation, jnp.asarray([1, 0, 0], bool))
    state, _ = pages.append(state, jnp.asarray([12, 0, 0], jnp.int32))
    expectation = tags.extend(expectation, state, jnp.asarray([1, 0, 0], bool))
    back_A = state.table_BM[0, :3]
    digests = tags.restore(digests, back_A, saved, tokens_A, jnp.ones(3, bool))
    assert (
        _checked(state, expectation, store.import_pages(kv, back_A, block), digests).ok_B.tolist()
        == [True] * 3
    )
    damaged = dataclasses.replace(
        block, pools=block.pools | {"rope": block.pools["rope"].at[0, 1, 2, 3].add(1)}
    )
    assert not _checked(state, expectation, store.import_pages(kv, back_A, damaged), digests).ok_B[0]


def test_page_digest_of_equal_bytes_in_another_page_is_equal_and_of_another_layer_is_not():
    _, _, kv, _ = _filled("fp8_576", "index_132")
    kv = store.copy_pages(kv, jnp.asarray([1], jnp.int32), jnp.asarray([9], jnp.int32))
    whole = jnp.full(2, PAGE_SIZE, jnp.int32)
    digest_A2 = tags.page_digest(kv, jnp.asarray([1, 9], jnp.int32), whole)
    assert np.array_equal(digest_A2[0], digest_A2[1])
    turned = dataclasses.replace(kv, values=jnp.roll(kv.values, 1, axis=0))
    assert not np.array_equal(tags.page_digest(turned, jnp.asarray([1, 9], jnp.int32), whole), digest_A2)
