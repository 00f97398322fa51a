"""Pages between the two pools: the device programs of a hand-over and of widening.

    offer (source: check, pin) -> receive (destination: give pages, pin, write the order)
    on one mesh:    deliver -> unpin both
    on two meshes:  ship (convert) -> unpin source -> device_put -> land -> unpin destination

A pool's state never leaves its own mesh; between meshes only orders and shipments travel, as arrays. What can
fail on the device leaves the destination row dead with its cause; no program waits for another.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, UInt32

from kvmem.cache import integrity, pages, store, tags, transfer
from kvmem.cache.integrity import IntegrityReport
from kvmem.cache.pages import PADDING_PAGE
from kvmem.cache.store import PageBlock
from kvmem.cache.transfer import Order, Shipment
from kvmem.engine import rows
from kvmem.engine.request import PhaseFormat
from kvmem.engine.rows import RowStart
from kvmem.engine.step import Cause, PoolState, StepConfig, guard


@typing.no_type_check
@struct.dataclass
class Offer:
    """What a source row has to give: pages that are pinned now, none if the row failed its check.

    Attributes:
      page_M, generation_M: the first ``count`` entries name the row's pages.
      tokens: that they hold.
      intact: whether the row passed its check.
    """

    page_M: Int[Array, "M"]
    generation_M: UInt32[Array, "M"]
    count: Int[Array, ""]
    tokens: Int[Array, ""]
    intact: Bool[Array, ""]


@typing.no_type_check
@struct.dataclass
class Receipt:
    """What the destination has pinned for an offer: ``count`` pages, and the row's epoch at that time."""

    page_M: Int[Array, "M"]
    count: Int[Array, ""]
    epoch: UInt32[Array, ""]


@functools.partial(jax.jit, donate_argnums=0, static_argnames="config")
def offer(
    source: PoolState, row: Int[Array, ""], *, config: StepConfig
) -> tuple[PoolState, Offer, IntegrityReport | None]:
    """Checks a source row and pins its pages."""
    alive_B = rows.one_row(source, row) & (source.cause_B == Cause.OK)
    check = guard(config, source, alive_B)
    intact = integrity.alive(check, alive_B)[row]
    tokens = jnp.where(intact, source.pages.length_B[row], 0)
    count = pages.pages_of(tokens, source.pages.page_size)
    source, page_M = _pin_row(source, row, count)
    return source, Offer(page_M, source.expectation.generation_BM[row], count, tokens, intact), check


@functools.partial(jax.jit, donate_argnums=0)
def receive(destination: PoolState, row: Int[Array, ""], offered: Offer) -> tuple[PoolState, Order, Receipt]:
    """Gives a destination row pages for an offer and pins them. An order of 0 pages: no room or offer."""
    mask_B = rows.one_row(destination, row)
    page_state, ok_B = pages.append(destination.pages, jnp.where(mask_B, offered.tokens, 0))
    ok = offered.intact & ok_B[row]
    destination = dataclasses.replace(
        destination,
        pages=page_state,
        expectation=tags.extend(destination.expectation, page_state, mask_B & ok),
    )
    count = jnp.where(ok, offered.count, 0)
    destination, page_M = _pin_row(destination, row, count)
    order = Order(
        source_A=offered.page_M,
        source_generation_A=offered.generation_M,
        destination_A=page_M,
        destination_generation_A=destination.expectation.generation_BM[row],
        arrived_A=jnp.arange(page_M.shape[0]) < count,
        count=count,
        tokens=offered.tokens,
    )
    return destination, order, Receipt(page_M, count, destination.pages.epoch_B[row])


def _pin_row(
    state: PoolState, row: Int[Array, ""], count: Int[Array, ""]
) -> tuple[PoolState, Int[Array, "M"]]:
    mask_M = jnp.arange(state.pages.table_BM.shape[1]) < count
    page_M = jnp.where(mask_M, state.expectation.page_BM[row], PADDING_PAGE)
    page_state, _ = pages.pin(state.pages, page_M, page_M > PADDING_PAGE)
    return dataclasses.replace(state, pages=page_state), page_M


@functools.partial(jax.jit, donate_argnums=0)
def unpin(state: PoolState, page_M: Int[Array, "M"], count: Int[Array, ""]) -> PoolState:
    """Takes the pins of an offer or of a receipt, exactly once for each."""
    page_state, _ = pages.unpin(state.pages, page_M, jnp.arange(page_M.shape[0]) < count)
    return dataclasses.replace(state, pages=page_state)


@functools.partial(jax.jit, donate_argnums=1)
def deliver(
    source: PoolState,
    destination: PoolState,
    order: Order,
    first: RowStart,
    intact: Bool[Array, ""],
    origin: UInt32[Array, ""],
) -> PoolState:
    """Converts the order's pages inside one mesh and starts the row, dead if anything is amiss."""
    kv, page_state, digests, status = transfer.deliver(
        order,
        source.pages,
        source.kv,
        destination.pages,
        destination.kv,
        origin,
        source_digests=source.digests,
        destination_digests=destination.digests,
    )
    destination = dataclasses.replace(destination, pages=page_state, kv=kv, digests=digests)
    return rows.begin(destination, first, _cause(status, order, intact))


@functools.partial(jax.jit, static_argnames=("columns", "form"))
def ship(source: PoolState, order: Order, *, columns: int, form: PhaseFormat) -> Shipment:
    """Converts the order's pages to the destination's format, to be sent to another mesh.

    The sender converts, since the destination's format is the smaller one. The order has at most ``columns``
    pages.
    """
    empty = _empty(source, form, columns)
    return transfer.ship(
        _narrow(order, columns), source.pages, source.kv, into=empty, source_digests=source.digests
    )


@functools.partial(jax.jit, donate_argnums=0, static_argnames="columns")
def land(
    destination: PoolState,
    order: Order,
    shipment: Shipment,
    first: RowStart,
    intact: Bool[Array, ""],
    epoch: UInt32[Array, ""],
    origin: UInt32[Array, ""],
    *,
    columns: int,
) -> PoolState:
    """Stores what was shipped and starts the row, dead if anything is amiss.

    If the row was given back meanwhile (its epoch is another) whoever has it now is left alone.
    """
    kv, page_state, digests, status = transfer.land(
        _narrow(order, columns),
        shipment,
        destination.pages,
        destination.kv,
        origin,
        destination_digests=destination.digests,
    )
    num_rows = destination.cause_B.shape[0]
    row = jnp.where(page_state.epoch_B[first.row] == epoch, first.row, num_rows)
    destination = dataclasses.replace(destination, pages=page_state, kv=kv, digests=digests)
    return rows.begin(destination, dataclasses.replace(first, row=row), _cause(status, order, intact))


def _cause(status: Int[Array, ""], order: Order, intact: Bool[Array, ""]) -> Int[Array, ""]:
    ok = (status == transfer.Status.OK) & (order.count > 0)
    return jnp.where(ok, Cause.OK, jnp.where(intact, Cause.TRANSFER, Cause.INTEGRITY)).astype(jnp.int32)


def _narrow(order: Order, columns: int) -> Order:
    return Order(**{name: value[:columns] if value.ndim else value for name, value in vars(order).items()})


def _empty(like: PoolState, form: PhaseFormat, columns: int) -> store.KVStore:
    """A small pool in another phase's format: the padding page and ``columns`` pages."""
    return store.init(
        like.kv.shape,
        form.cache,
        *(() if form.index is None else (form.index,)),
        num_pages=1 + columns,
        page_size=like.kv.page_size,
        scale=form.scale,
    )


# Decode to prefill: an answer's pages, widened for a later turn


@functools.partial(jax.jit, static_argnames=("columns", "config"))
def widen_out(
    decode: PoolState, row: ArrayLike, first: Int[Array, ""], *, columns: int, config: StepConfig
) -> tuple[PageBlock, Bool[Array, ""]]:
    """Checks a decode row and reads its pages from logical page ``first`` on, and whether it passed."""
    alive_B = rows.one_row(decode, row) & (decode.cause_B == Cause.OK)
    ok = integrity.alive(guard(config, decode, alive_B), alive_B)[row]
    page_M = jnp.roll(decode.pages.table_BM[row], -first)
    return store.export_pages(decode.kv, jnp.where(ok, page_M, PADDING_PAGE)[:columns]), ok


@functools.partial(jax.jit, donate_argnums=0, static_argnames="form")
def widen_in(
    prefill: PoolState,
    spare: ArrayLike,
    block: PageBlock,
    ok: Bool[Array, ""],
    count: Int[Array, ""],
    origin: UInt32[Array, ""],
    *,
    form: PhaseFormat,
) -> tuple[PoolState, tuple[Int[Array, "M"], UInt32[Array, "M"], Bool[Array, ""]]]:
    """Converts ``count`` pages, of decode's format ``form``, into pages of a spare prefill row.

    Returns:
      The prefill state; the new pages, their generations, and whether all of it happened: not if the decode
      row failed its check or the prefill pool has too few pages.
    """
    mask_B = rows.one_row(prefill, spare)
    page_state, ok_B = pages.allocate(prefill.pages, jnp.where(mask_B & ok, count, 0))
    ok &= ok_B[spare]
    count = jnp.where(ok, count, 0)
    columns = block.pools["values"].shape[1]
    page_M = page_state.table_BM[spare]
    given_M = jnp.arange(page_M.shape[0]) < count
    staged_A = 1 + jnp.arange(columns, dtype=jnp.int32)
    staged = store.import_pages(_empty(prefill, form, columns), staged_A, block)
    kv = transfer.convert_pages(staged, prefill.kv, staged_A, page_M[:columns], count)
    digests = prefill.digests
    if digests is not None:
        whole_M = jnp.full(page_M.shape[0], prefill.pages.page_size, jnp.int32)
        digests = tags.seal(digests, kv, page_M, whole_M, given_M)
    state = dataclasses.replace(
        prefill,
        pages=pages.stamp(page_state, page_M, given_M, origin),
        kv=kv,
        expectation=tags.extend(prefill.expectation, page_state, mask_B & ok),
        digests=digests,
    )
    return state, (page_M, page_state.generation_P[page_M], ok)
