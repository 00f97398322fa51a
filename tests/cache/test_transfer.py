"""Prefill pool to decode pool: conversion, orders that do not hold, leases that end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import pages, store, tags, transfer
from kvmem.cache.transfer import Status

SHAPE = store.CacheShape(num_layers=3, num_index_layers=2, latent=8, rope=6, index_dim=10, tile=4)
PAGES, PAGE_SIZE, TOKENS = 9, 5, 13
ORIGIN = jnp.uint32(77)
_write_latent, _write_index = jax.jit(store.write_latent), jax.jit(store.write_index)


@functools.cache
def _source(layout: str = "bf16_576", index_layout: str = "index_132"):
    """A prefill pool whose row 0 holds 13 tokens in pages 1-3, sealed and pinned."""
    state, _ = pages.append(pages.init(PAGES, 2, 4, PAGE_SIZE), jnp.asarray([TOKENS, 0], jnp.int32))
    kv = store.init(SHAPE, layout, index_layout, num_pages=PAGES, page_size=PAGE_SIZE)
    position_1T = jnp.arange(TOKENS)[None, :]
    page_1T = state.table_BM[:1, :3].repeat(PAGE_SIZE, axis=1)[:, :TOKENS]
    for layer in range(SHAPE.num_layers):
        token_1TC = jax.random.normal(jax.random.key(layer), (1, TOKENS, SHAPE.width))
        kv = _write_latent(kv, layer, page_1T, position_1T % PAGE_SIZE, token_1TC)
    for layer in range(SHAPE.num_index_layers):
        key_1TI = jax.random.normal(jax.random.key(50 + layer), (1, TOKENS, SHAPE.index_dim))
        kv = _write_index(kv, layer, page_1T, position_1T % PAGE_SIZE, key_1TI)
    digests = tags.seal_rows(
        tags.empty_digests(PAGES),
        kv,
        state,
        jnp.zeros(2, jnp.int32),
        jnp.asarray([1, 0], bool),
        new_tokens=TOKENS,
    )
    state, _ = pages.pin(state, state.table_BM[0, :3], jnp.ones(3, bool))
    return state, kv, digests


@functools.cache
def _destination(layout: str = "fp8_576", index_layout: str = "index_132"):
    """A decode pool whose row 1 has been given three pages, pinned; row 0 holds one page."""
    state, _ = pages.append(pages.init(PAGES + 2, 2, 4, PAGE_SIZE), jnp.asarray([4, TOKENS], jnp.int32))
    state, _ = pages.pin(state, state.table_BM[1, :3], jnp.ones(3, bool))
    kv = store.init(SHAPE, layout, index_layout, num_pages=PAGES + 2, page_size=PAGE_SIZE, scale=0.25)
    return state, kv


def _order(source: pages.PageState, destination: pages.PageState) -> transfer.Order:
    from_A, to_A = source.table_BM[0], destination.table_BM[1]
    return transfer.Order(
        source_A=from_A,
        source_generation_A=source.generation_P[from_A],
        destination_A=to_A,
        destination_generation_A=destination.generation_P[to_A],
        arrived_A=jnp.asarray([1, 1, 1, 0], bool),
        count=jnp.int32(3),
        tokens=jnp.int32(TOKENS),
    )


@pytest.mark.parametrize(
    ("made", "to"),
    [
        ("f32_576", "f32_576"),
        ("bf16_576", "fp8_576"),
        ("bf16_576", "fp8_656"),
        ("fp8_656", "bf16_576"),
        ("fp8_656", "fp8_656"),
    ],
)
def test_B9_deliver_stores_what_decode_itself_would_have_stored(made, to):
    (source, source_kv, digests), (destination, kv) = _source(made), _destination(to)
    kv, destination, sealed, status = jax.jit(transfer.deliver)(
        _order(source, destination),
        source,
        source_kv,
        destination,
        kv,
        ORIGIN,
        source_digests=digests,
        destination_digests=tags.empty_digests(PAGES + 2),
    )
    assert int(status) == Status.OK
    assert destination.origin_P[destination.table_BM[1, :3]].tolist() == [77] * 3
    expected = _destination(to)[1]
    page_1T = destination.table_BM[1:, :3].repeat(PAGE_SIZE, axis=1)[:, :TOKENS]
    offset_1T = jnp.arange(TOKENS)[None, :] % PAGE_SIZE
    for layer in range(SHAPE.num_layers):
        token_1SC = store.gather_latent(source_kv, layer, source.table_BM[:1, :3], jnp.float32)
        expected = _write_latent(expected, layer, page_1T, offset_1T, token_1SC[:, :TOKENS])
    if made == to:  # raw: the source's bytes, whatever a second quantisation would have made of them
        for name in ("values", "scales", "rope"):
            moved, origin = getattr(kv, name), getattr(source_kv, name)
            assert origin is None or np.array_equal(moved[:, 2:5], origin[:, 1:4])
    else:
        for name in ("values", "scales", "rope"):
            assert getattr(kv, name) is None or np.array_equal(getattr(kv, name), getattr(expected, name))
    for name in ("index_values", "index_scales"):
        assert np.array_equal(getattr(kv, name)[:, 2:5], getattr(source_kv, name)[:, 1:4])
    assert np.array_equal(
        tags.page_digest(kv, destination.table_BM[1, :3], sealed.tokens_P[destination.table_BM[1, :3]]),
        sealed.digest_P2[destination.table_BM[1, :3]],
    )
    assert sealed.tokens_P.tolist() == [0, 0, 5, 5, 3, 0, 0, 0, 0, 0, 0]


def _source_released(args):
    order, source, *rest = args
    source, _ = pages.release(source, jnp.asarray([1, 0], bool))
    return (order, source, *rest)


def _source_reused(args):
    order, source, *rest = _source_released(args)
    source, _ = pages.unpin(source, order.source_A[:3], jnp.ones(3, bool))
    source, _ = pages.append(source, jnp.asarray([0, 20], jnp.int32))
    source, _ = pages.pin(source, order.source_A[:3], jnp.ones(3, bool))
    return (order, source, *rest)


def _destination_reused(args):
    order, source, kv, destination, *rest = args
    destination, _ = pages.release(destination, jnp.asarray([0, 1], bool))
    destination, _ = pages.unpin(destination, order.destination_A[:3], jnp.ones(3, bool))
    destination, _ = pages.append(destination, jnp.asarray([15, 0], jnp.int32))
    return (order, source, kv, destination, *rest)


def _change_order(**changes):
    return lambda args: (dataclasses.replace(args[0], **changes), *args[1:])


def _flip_source(args):
    order, source, kv, *rest = args
    return (order, source, dataclasses.replace(kv, values=kv.values.at[2, 2, 4, 1].add(1)), *rest)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        pytest.param(_source_released, Status.SOURCE, id="B3_source_freed_before_the_read"),
        pytest.param(_source_reused, Status.SOURCE, id="B3_source_freed_and_reused"),
        pytest.param(_destination_reused, Status.DESTINATION, id="B1_destination_owned_by_another_request"),
        pytest.param(
            _change_order(arrived_A=jnp.asarray([1, 0, 1, 1], bool)),
            Status.INCOMPLETE,
            id="B7_page_2_of_3_missing",
        ),
        pytest.param(
            _change_order(source_A=jnp.asarray([1, PAGES, 3, 0], jnp.int32)),
            Status.SOURCE,
            id="A14_page_past_the_pool",
        ),
        pytest.param(
            _change_order(destination_A=jnp.asarray([2, -1, 4, 0], jnp.int32)),
            Status.DESTINATION,
            id="A14_negative_page",
        ),
        pytest.param(_flip_source, Status.CONTENT, id="B7_source_bytes_changed"),
    ],
)
def test_deliver_of_an_order_that_does_not_hold_writes_nothing(fault, status):
    (source, source_kv, digests), (destination, kv) = _source(), _destination()
    args = fault((_order(source, destination), source, source_kv, destination, kv, ORIGIN))
    after, state, sealed, got = jax.jit(transfer.deliver)(
        *args, source_digests=digests, destination_digests=tags.empty_digests(PAGES + 2)
    )
    assert int(got) == status
    for name in store.POOLS:
        assert getattr(kv, name) is None or np.array_equal(getattr(after, name), getattr(kv, name))
    assert np.array_equal(state.origin_P, args[3].origin_P)
    assert not np.any(sealed.tokens_P)


def test_B1_B3_deliver_that_does_not_look_at_generations_moves_reused_pages(monkeypatch):
    """The mutation: pages have been given to another request, and bytes are moved all the same."""
    monkeypatch.setattr(transfer, "_still", lambda state, page_A, generation_A: jnp.ones(page_A.shape, bool))
    (source, source_kv, _), (destination, kv) = _source(), _destination()
    for fault in (_source_reused, _destination_reused):
        args = fault((_order(source, destination), source, source_kv, destination, kv, ORIGIN))
        after, _, _, status = transfer.deliver(*args)
        assert int(status) == Status.OK
        assert not np.array_equal(after.values, kv.values)


@functools.partial(jax.jit, static_argnames="convert_at")
def _ship_and_land(order, source, source_kv, destination, kv, origin, digests, empty, convert_at):
    """Both halves of a hand-over across devices, converted at the sender or at the receiver."""
    new = functools.partial(store.init, SHAPE, num_pages=1 + order.source_A.shape[0], page_size=PAGE_SIZE)
    into = new(kv.layout, kv.index_layout, scale=0.25) if convert_at == "sender" else None
    through = new(source_kv.layout, source_kv.index_layout) if convert_at == "receiver" else None
    sent = transfer.ship(order, source, source_kv, into=into, source_digests=digests)
    return transfer.land(order, sent, destination, kv, origin, through=through, destination_digests=empty)


@pytest.mark.parametrize("convert_at", ["sender", "receiver"])
def test_ship_and_land_give_what_deliver_gives_and_refuse_what_it_refuses(convert_at):
    (source, source_kv, digests), (destination, kv) = _source(), _destination()
    large = np.float32(300.0).astype("bfloat16").view(np.uint16)  # 300 / 0.25 > 448
    loud_kv = dataclasses.replace(source_kv, values=source_kv.values.at[0, 1, 2, 3].set(large))
    empty = tags.empty_digests(PAGES + 2)
    holds = (_order(source, destination), source, loud_kv, destination, kv, ORIGIN)
    expected = jax.jit(transfer.deliver)(*holds, destination_digests=empty)
    got = _ship_and_land(*holds, None, empty, convert_at=convert_at)
    assert int(got[0].saturated) == 1
    moved_A, rest = (
        destination.table_BM[1, :3],
        [name for name in store.POOLS if getattr(kv, name) is not None],
    )
    for name in rest:
        pool, reference = getattr(got[0], name), getattr(expected[0], name)
        np.testing.assert_array_equal(pool[:, moved_A], reference[:, moved_A])
        np.testing.assert_array_equal(
            pool[:, [1, *range(5, PAGES + 2)]], getattr(kv, name)[:, [1, 5, 6, 7, 8, 9, 10]]
        )
    jax.tree.map(np.testing.assert_array_equal, got[1:], expected[1:])
    faults = [
        (_source_released, Status.SOURCE),
        (_destination_reused, Status.DESTINATION),
        (_change_order(arrived_A=jnp.asarray([1, 0, 1, 1], bool)), Status.INCOMPLETE),
        (_flip_source, Status.CONTENT),
    ]
    for fault, status in faults:
        args = fault((_order(source, destination), source, source_kv, destination, kv, ORIGIN))
        after, state, sealed, found = _ship_and_land(*args, digests, empty, convert_at=convert_at)
        assert int(found) == status
        for name in rest:
            np.testing.assert_array_equal(getattr(after, name)[:, 1:], getattr(kv, name)[:, 1:])
        np.testing.assert_array_equal(state.origin_P, args[3].origin_P)
        assert not np.any(sealed.tokens_P)


def test_B7_changed_source_bytes_without_digests_are_not_seen():
    (source, source_kv, _), (destination, kv) = _source(), _destination()
    args = _flip_source((_order(source, destination), source, source_kv, destination, kv, ORIGIN))
    assert int(jax.jit(transfer.deliver)(*args)[-1]) == Status.OK


def test_A3_B1_pinned_pages_of_an_aborted_transfer_are_nobodys_until_the_lease_ends():
    destination, _ = _destination()
    moved_A = destination.table_BM[1, :3]
    destination, freed_P = pages.release(destination, jnp.asarray([0, 1], bool))
    assert not np.any(freed_P)
    full, ok_B = pages.append(destination, jnp.asarray([0, 5 * PAGE_SIZE], jnp.int32))
    assert not bool(ok_B[1])  # 10 pages, 1 owned, 3 pinned; and a row has 4 columns
    full, _ = pages.append(destination, jnp.asarray([16, 20], jnp.int32))
    assert not set(full.table_BM.reshape(-1).tolist()) & set(moved_A.tolist())
    late, _ = pages.unpin(destination, moved_A, jnp.ones(3, bool))
    assert int(pages.counts(late).pinned) == 0
    assert pages.violations(late) == []


def test_convert_pages_counts_what_the_smaller_format_cannot_hold_and_skips_the_stale_tail():
    (source, source_kv, _), (destination, kv) = _source(), _destination()
    large = np.float32(300.0).astype("bfloat16").view(np.uint16)
    nan = np.float32(np.nan).astype("bfloat16").view(np.uint16)
    values = source_kv.values.at[0, 1, 2, 3].set(large).at[1, 2, 0, 0].set(nan)  # 300 / 0.25 > 448
    values = values.at[:, 3, 3:].set(nan)  # behind the 13th token
    got = transfer.convert_pages(
        dataclasses.replace(source_kv, values=values),
        kv,
        source.table_BM[0],
        destination.table_BM[1],
        jnp.int32(3),
        jnp.int32(TOKENS),
    )
    assert (int(got.saturated), int(got.nonfinite)) == (1, 1)
    latent_1SC = store.gather_latent(got, 0, destination.table_BM[1:], jnp.float32)
    assert float(latent_1SC[0, 2, 3]) == 448 * 0.25


def test_convert_pages_between_pools_of_another_page_size_or_shape_says_so():
    (_, source_kv, _), _ = _source(), _destination()
    other = store.init(SHAPE, "fp8_576", "index_132", num_pages=PAGES, page_size=4)
    with pytest.raises(ValueError, match=r"with pages of 5 tokens cannot be converted .* pages of 4"):
        transfer.convert_pages(source_kv, other, jnp.zeros(2, int), jnp.zeros(2, int), jnp.int32(2))


def _print(layout="bf16_576", weights="fp8_block", **changes) -> transfer.Fingerprint:
    made = store.init(SHAPE, layout, "index_132", num_pages=3, page_size=PAGE_SIZE, scale=0.5)
    return dataclasses.replace(transfer.fingerprint(made, weights), **changes)


def _manifest(**changes) -> transfer.Manifest:
    base = transfer.Manifest("r1", 4, TOKENS, ((1, 1), (2, 1), (3, 1)), _print())
    return dataclasses.replace(base, **changes)


def _board() -> tuple[transfer.Board, transfer.Lease]:
    board = transfer.Board(_print(), lease_s=2.0, most=3)
    lease = board.begin(_manifest(), ((2, 1), (3, 1), (4, 1)), now_s=10.0)
    assert lease is not None
    return board, lease


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        pytest.param({"request_id": "r2"}, "IDENTITY", id="B5_another_request"),
        pytest.param({"epoch": 5}, "IDENTITY", id="A12_another_epoch_of_the_slot"),
        pytest.param({"tokens": 12}, "IDENTITY", id="B5_another_length"),
        pytest.param({"source": ((1, 3), (2, 1), (3, 1))}, "SOURCE", id="B3_source_generation_moved_on"),
        pytest.param(
            {"fingerprint": _print("fp8_656")}, "FINGERPRINT", id="A19_another_layout_of_equal_shape"
        ),
        pytest.param({"fingerprint": _print(weights="int4")}, "FINGERPRINT", id="A19_other_weights"),
    ],
)
def test_arrive_with_metadata_that_is_not_the_leases_is_refused(changes, refusal):
    board, lease = _board()
    assert board.arrive(lease.number, _manifest(**changes), 11.0) is transfer.Refusal[refusal]
    assert board.arrive(lease.number, _manifest(), 11.0) is lease


def test_B2_lease_is_bounded_and_a_late_completion_is_ignored():
    board, lease = _board()
    assert board.expire(12.0) == []
    assert board.arrive(lease.number, _manifest(), 12.5) is transfer.Refusal.LATE
    assert board.expire(12.5) == [lease]
    assert board.expire(13.0) == []
    assert board.arrive(lease.number, _manifest(), 11.0) is transfer.Refusal.LATE
    assert board.end(lease.number) is None


def test_end_gives_the_lease_back_once():
    board, lease = _board()
    assert board.end(lease.number) is lease
    assert board.end(lease.number) is None
    assert len(board) == 0


def test_begin_refuses_drift_wrong_counts_and_a_full_board():
    board, _ = _board()
    with pytest.raises(ValueError, match=r"layout: bf16_576 is not fp8_656"):
        board.begin(_manifest(fingerprint=_print("fp8_656")), ((2, 1),) * 3, 0.0)
    with pytest.raises(ValueError, match="3 source pages for 2"):
        board.begin(_manifest(), ((2, 1), (3, 1)), 0.0)
    more = [board.begin(_manifest(), ((2, 1),) * 3, 0.0) for _ in range(3)]
    assert [lease is None for lease in more] == [False, False, True]
    with pytest.raises(ValueError, match="lease_s is"):
        transfer.Board(_print(), lease_s=0.0)


@pytest.mark.parametrize("field", ["layout", "index_layout", "shape", "page_size", "weights", "scale"])
def test_A19_fingerprint_differs_in_each_field_and_names_it(field):
    other = {
        "layout": "fp8_656",
        "index_layout": "index_f32",
        "shape": dataclasses.replace(SHAPE, rope=4),
        "page_size": 64,
        "weights": "bf16",
        "scale": (0.5, 1.0),
    }[field]
    mine, theirs = _print(), _print(**{field: other}) if field != "layout" else _print(layout=other)
    lines = mine.differences(theirs)
    assert [line.split(":")[0] for line in lines] == [field]
    assert transfer.origin_code("prefill", mine) != transfer.origin_code("prefill", theirs)


def test_of_origin_never_takes_a_decode_page_for_a_prefill_page():
    prefill, decode = (transfer.origin_code(phase, _print()) for phase in ("prefill", "decode"))
    state, _ = pages.append(
        pages.init(PAGES, 2, 4, PAGE_SIZE, origin=decode), jnp.asarray([10, 5], jnp.int32)
    )
    page_A = jnp.asarray([1, 2, 3, 4, -1, 0], jnp.int32)
    assert transfer.of_origin(state, page_A, jnp.uint32(decode)).tolist() == [True, True, True] + [False] * 3
    assert not np.any(transfer.of_origin(state, page_A, jnp.uint32(prefill)))
    stamped = pages.stamp(state, page_A, jnp.asarray([1, 0, 0, 0, 0, 0], bool), jnp.uint32(prefill))
    assert transfer.of_origin(stamped, page_A, jnp.uint32(prefill)).tolist() == [True] + [False] * 5
    # Decode appends to a page that prefill began: it is decode's from then on.
    state, _ = pages.append(pages.init(PAGES, 2, 4, PAGE_SIZE, origin=decode), jnp.asarray([3, 0], jnp.int32))
    state = pages.stamp(state, page_A[:1], jnp.ones(1, bool), jnp.uint32(prefill))
    state, _ = pages.append(state, jnp.asarray([1, 0], jnp.int32))
    assert int(state.origin_P[1]) == decode
