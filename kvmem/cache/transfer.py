"""Prefill pool to decode pool: one explicit conversion, under a lease, with proof of what is moved.

A transfer holds four promises. Its pages on both sides are pinned: nobody is given a page that is still read
or written, whatever happens to the requests. Its lease is bounded: a lost peer does not pin pages for ever,
and what completes after that is ignored. The order names page *and generation* on both sides, and request,
slot epoch and layout travel with the data: metadata of another request, or a source that was given back
meanwhile, is refused before anything is written. And bytes are never reinterpreted: a BF16 page becomes an
FP8 page by the same ``write_latent`` that decode itself uses, which is the only scale rule there is.

``Board`` is the host's record of leases (no arrays, the clock is passed in); ``deliver`` the device's part.
"""

import dataclasses
import enum
import typing
import zlib
from collections.abc import Sequence

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from kvmem.cache import pages, store, tags
from kvmem.cache.pages import PADDING_PAGE, PageState
from kvmem.cache.store import CacheShape, KVStore


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """How the bytes of a pool were made; two pools may exchange raw pages only if theirs are equal."""

    layout: str
    index_layout: str
    shape: CacheShape
    page_size: int
    weights: str
    scale: tuple[float, ...] = ()

    def differences(self, other: "Fingerprint") -> list[str]:
        """Returns a line for each field that differs."""
        return [
            f"{field.name}: {getattr(self, field.name)} is not {getattr(other, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]


def fingerprint(kv: KVStore, weights: str) -> Fingerprint:
    """Returns the fingerprint of a pool whose tokens are computed with ``weights`` (a name or a hash)."""
    scale = () if kv.scale_Y is None else tuple(float(s) for s in kv.scale_Y)
    return Fingerprint(kv.layout, kv.index_layout, kv.shape, kv.page_size, weights, scale)


def origin_code(phase: str, made_by: Fingerprint) -> int:
    """Returns the u32 that ``PageState.origin_P`` holds for pages made in ``phase`` ("prefill", "decode").

    Pages of prefill and of decode never have the same code; 0 is "unknown" and is never returned.
    """
    return zlib.crc32(f"{phase}:{made_by}".encode()) or 1


def of_origin(state: PageState, page_A: Int[Array, "A"], origin: UInt32[Array, ""]) -> Bool[Array, "A"]:
    """Returns whether each page is in range, owned, and made by ``origin``."""
    in_range_A = (page_A > PADDING_PAGE) & (page_A < state.num_pages)
    page_A = jnp.where(in_range_A, page_A, PADDING_PAGE)
    return in_range_A & (state.references_P[page_A] > 0) & (state.origin_P[page_A] == origin)


class Status(enum.IntEnum):
    """What became of a delivery; anything but OK has written nothing but the padding page."""

    OK = 0
    SOURCE = 1  # a source page is out of range, unpinned, or not of the generation in the order
    DESTINATION = 2  # the same for a destination page
    INCOMPLETE = 3  # a page did not arrive
    CONTENT = 4  # a source page's digest is not the one taken when it was sealed


@typing.no_type_check
@struct.dataclass
class Order:
    """Which pages move where. Entries from ``count`` on are padding.

    ``tokens`` is what the request holds in these pages, ``arrived_A`` which pages' bytes have come.
    """

    source_A: Int[Array, "A"]
    source_generation_A: UInt32[Array, "A"]
    destination_A: Int[Array, "A"]
    destination_generation_A: UInt32[Array, "A"]
    arrived_A: Bool[Array, "A"]
    count: Int[Array, ""]
    tokens: Int[Array, ""]


def convert_pages(
    source_kv: KVStore,
    destination_kv: KVStore,
    source_A: Int[Array, "A"],
    destination_A: Int[Array, "A"],
    count: Int[Array, ""],
    tokens: Int[Array, ""] | None = None,
) -> KVStore:
    """Rewrites the first ``count`` pages in the destination's layout; the others go to the padding page.

    With ``tokens`` only the first so many positions of these pages are converted (and counted): what a former
    owner left behind them stays behind.

    Every layer is dequantised to f32 and stored by the destination's own write, so that saturation and
    non-finite values are counted there. A part whose layout is the same on both sides and carries its scales
    with it (fp8_656, index_132) or has none (bf16, f32) is copied bit for bit.

    Raises:
      ValueError: the pools are of different shapes or page sizes.
    """
    if (source_kv.shape, source_kv.page_size) != (destination_kv.shape, destination_kv.page_size):
        raise ValueError(
            f"a pool of {source_kv.shape} with pages of {source_kv.page_size} tokens cannot be converted to "
            f"{destination_kv.shape} with pages of {destination_kv.page_size}"
        )
    destination_A = jnp.where(jnp.arange(destination_A.shape[0]) < count, destination_A, PADDING_PAGE)
    page_size = source_kv.page_size
    page_AZ = jnp.broadcast_to(destination_A[:, None], (destination_A.shape[0], page_size))
    offset_AZ = jnp.broadcast_to(jnp.arange(page_size, dtype=jnp.int32)[None, :], page_AZ.shape)
    if tokens is not None:
        position_AZ = jnp.arange(page_AZ.size, dtype=jnp.int32).reshape(page_AZ.shape)
        page_AZ = jnp.where(position_AZ < tokens, page_AZ, PADDING_PAGE)
    table_A1 = source_A[:, None]

    def latent_layer(layer: Int[Array, ""], kv: KVStore) -> KVStore:
        token_AZC = store.gather_latent(source_kv, layer, table_A1, jnp.float32, _whole(table_A1, page_size))
        return store.write_latent(kv, layer, page_AZ, offset_AZ, token_AZC)

    def index_layer(layer: Int[Array, ""], kv: KVStore) -> KVStore:
        key_AZI = store.gather_index(source_kv, layer, table_A1, jnp.float32, _whole(table_A1, page_size))
        return store.write_index(kv, layer, page_AZ, offset_AZ, key_AZI)

    raw = []
    if source_kv.layout == destination_kv.layout != "fp8_576":
        raw += ["values", "scales", "rope"]
    else:
        destination_kv = lax.fori_loop(0, source_kv.shape.num_layers, latent_layer, destination_kv)
    if source_kv.index_layout == destination_kv.index_layout:
        raw += ["index_values", "index_scales"]
    elif source_kv.shape.num_index_layers:
        destination_kv = lax.fori_loop(0, source_kv.shape.num_index_layers, index_layer, destination_kv)
    return _copy_raw(source_kv, destination_kv, source_A, destination_A, raw)


def deliver(
    order: Order,
    source: PageState,
    source_kv: KVStore,
    destination: PageState,
    destination_kv: KVStore,
    origin: UInt32[Array, ""],
    *,
    source_digests: tags.DigestTable | None = None,
    destination_digests: tags.DigestTable | None = None,
) -> tuple[KVStore, PageState, tags.DigestTable | None, Int[Array, ""]]:
    """Checks an order against both pools as they are now, and converts only if all of it holds.

    Range first, then generation and pin, on both sides; then that every page arrived; then, with digests,
    that the source's bytes are those that were sealed. The destination's digests are taken over its own
    stored bytes after the conversion, and its pages are stamped with ``origin``.

    Returns:
      The destination's store, page state and digests, and a scalar ``Status``.
    """
    given_A, tokens_A = _given(order), _tokens(order, source.page_size)
    source_ok = jnp.all(_still(source, order.source_A, order.source_generation_A) | ~given_A)
    destination_ok = jnp.all(
        _still(destination, order.destination_A, order.destination_generation_A) | ~given_A
    )
    arrived = jnp.all(order.arrived_A | ~given_A)
    content_ok = jnp.asarray(True)
    if source_digests is not None:
        content_ok = _sealed(order, source, source_kv, source_digests)
    status = jnp.select(
        [~source_ok, ~destination_ok, ~arrived, ~content_ok],
        [jnp.int32(s) for s in (Status.SOURCE, Status.DESTINATION, Status.INCOMPLETE, Status.CONTENT)],
        jnp.int32(Status.OK),
    )
    count = jnp.where(status == Status.OK, order.count, 0)
    moved_A = jnp.arange(order.source_A.shape[0]) < count
    destination_kv = convert_pages(
        source_kv, destination_kv, order.source_A, order.destination_A, count, order.tokens
    )
    destination = pages.stamp(destination, order.destination_A, moved_A, origin)
    if destination_digests is not None:
        destination_digests = tags.seal(
            destination_digests, destination_kv, order.destination_A, tokens_A, moved_A
        )
    return destination_kv, destination, destination_digests, status


@typing.no_type_check
@struct.dataclass
class Shipment:
    """What ``ship`` sends for ``land``.

    Attributes:
      block: bytes of the order's source pages; of the padding page where the check failed.
      status: a ``Status``: what the sender found.
      saturated, nonfinite: values that conversion at the sender clipped, and NaN or infinities that it met.
    """

    block: store.PageBlock
    status: Int[Array, ""]
    saturated: Int[Array, ""]
    nonfinite: Int[Array, ""]


def ship(
    order: Order,
    source: PageState,
    source_kv: KVStore,
    *,
    into: KVStore | None = None,
    source_digests: tags.DigestTable | None = None,
) -> Shipment:
    """The sender's half of ``deliver`` when the pools are on different devices.

    Checks the order against the source pool as it is now and takes the pages' bytes out: as they are or, with
    ``into``, in the destination's format. ``into`` is an empty pool of the destination's fingerprint with the
    padding page and a page for each entry of the order.
    """
    given_A, content_ok = _given(order), jnp.asarray(True)
    source_ok = jnp.all(_still(source, order.source_A, order.source_generation_A) | ~given_A)
    if source_digests is not None:
        content_ok = _sealed(order, source, source_kv, source_digests)
    status = jnp.select(
        [~source_ok, ~content_ok], [jnp.int32(Status.SOURCE), jnp.int32(Status.CONTENT)], jnp.int32(Status.OK)
    )
    page_A = jnp.where(given_A & (status == Status.OK), order.source_A, PADDING_PAGE)
    if into is None:
        none = jnp.zeros((), jnp.int32)
        return Shipment(store.export_pages(source_kv, page_A), status, none, none)
    staged_A = 1 + jnp.arange(page_A.shape[0], dtype=jnp.int32)
    count = jnp.where(status == Status.OK, order.count, 0)
    staged = convert_pages(source_kv, into, page_A, staged_A, count, order.tokens)
    return Shipment(store.export_pages(staged, staged_A), status, staged.saturated, staged.nonfinite)


def land(
    order: Order,
    shipment: Shipment,
    destination: PageState,
    destination_kv: KVStore,
    origin: UInt32[Array, ""],
    *,
    through: KVStore | None = None,
    destination_digests: tags.DigestTable | None = None,
) -> tuple[KVStore, PageState, tags.DigestTable | None, Int[Array, ""]]:
    """The receiver's half of ``deliver``: what ``ship`` sent enters the destination pool.

    With ``through`` (an empty pool of the source's fingerprint, sized as ``ship``'s ``into``) it is converted
    here. What was refused, or did not arrive whole, writes nothing but the padding page.

    Returns:
      As ``deliver``.
    """
    given_A = _given(order)
    destination_ok = jnp.all(
        _still(destination, order.destination_A, order.destination_generation_A) | ~given_A
    )
    arrived = jnp.all(order.arrived_A | ~given_A)
    status = jnp.select(
        [shipment.status != Status.OK, ~destination_ok, ~arrived],
        [shipment.status, jnp.int32(Status.DESTINATION), jnp.int32(Status.INCOMPLETE)],
        jnp.int32(Status.OK),
    )
    moved_A = given_A & (status == Status.OK)
    if through is None:
        target_A = jnp.where(moved_A, order.destination_A, PADDING_PAGE)
        destination_kv = dataclasses.replace(
            store.import_pages(destination_kv, target_A, shipment.block),
            saturated=destination_kv.saturated + shipment.saturated,
            nonfinite=destination_kv.nonfinite + shipment.nonfinite,
        )
    else:
        staged_A = 1 + jnp.arange(given_A.shape[0], dtype=jnp.int32)
        staged = store.import_pages(through, staged_A, shipment.block)
        count = jnp.where(status == Status.OK, order.count, 0)
        destination_kv = convert_pages(
            staged, destination_kv, staged_A, order.destination_A, count, order.tokens
        )
    destination = pages.stamp(destination, order.destination_A, moved_A, origin)
    if destination_digests is not None:
        destination_digests = tags.seal(
            destination_digests,
            destination_kv,
            order.destination_A,
            _tokens(order, destination.page_size),
            moved_A,
        )
    return destination_kv, destination, destination_digests, status


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Who a transfer is for; travels with the data and is compared when it arrives."""

    request_id: str
    epoch: int
    tokens: int
    source: tuple[tuple[int, int], ...]
    fingerprint: Fingerprint


@dataclasses.dataclass(frozen=True)
class Lease:
    """Pages that are pinned until the transfer is done, cancelled, or ``deadline_s`` has passed."""

    number: int
    manifest: Manifest
    destination: tuple[tuple[int, int], ...]
    deadline_s: float


class Refusal(enum.Enum):
    """Why an arrival was not accepted."""

    LATE = "the lease is over: completed, cancelled or expired"
    IDENTITY = "the data is of another request, epoch or length"
    SOURCE = "the data was read from other pages or generations"
    FINGERPRINT = "the data was made in another layout or with other weights"


class Board:
    """Leases of one pair of pools. Whoever ends a lease gets it back, to unpin its pages exactly once."""

    def __init__(self, source: Fingerprint, *, lease_s: float, most: int = 1024):
        if lease_s <= 0 or most < 1:
            raise ValueError(f"lease_s is {lease_s} and most is {most}; both must be positive")
        self._source = source
        self._lease_s = lease_s
        self._most = most
        self._leases: dict[int, Lease] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, manifest: Manifest, destination: Sequence[tuple[int, int]], now_s: float) -> Lease | None:
        """Opens a lease on pages that the caller has just pinned; None if too many are open.

        Raises:
          ValueError: the manifest is of another kind of pool, or the page counts differ.
        """
        differing = self._source.differences(manifest.fingerprint)
        if differing:
            raise ValueError(
                f"request {manifest.request_id}: pool fingerprints differ: {'; '.join(differing)}"
            )
        if len(manifest.source) != len(destination):
            raise ValueError(
                f"request {manifest.request_id}: {len(manifest.source)} source pages for "
                f"{len(destination)} destination pages"
            )
        if len(self._leases) >= self._most:
            return None
        lease = Lease(self._next, manifest, tuple(destination), now_s + self._lease_s)
        self._leases[lease.number] = lease
        self._next += 1
        return lease

    def arrive(self, number: int, manifest: Manifest, now_s: float) -> Lease | Refusal:
        """Judges data that arrives for a lease. A refusal leaves the lease open (or gone, if it was late)."""
        lease = self._leases.get(number)
        if lease is None or now_s > lease.deadline_s:
            return Refusal.LATE
        theirs, ours = manifest, lease.manifest
        if (theirs.request_id, theirs.epoch, theirs.tokens) != (ours.request_id, ours.epoch, ours.tokens):
            return Refusal.IDENTITY
        if theirs.source != ours.source:
            return Refusal.SOURCE
        if theirs.fingerprint != ours.fingerprint:
            return Refusal.FINGERPRINT
        return lease

    def end(self, number: int) -> Lease | None:
        """Closes a lease (done or cancelled); None if it is closed already. The caller unpins its pages."""
        return self._leases.pop(number, None)

    def expire(self, now_s: float) -> list[Lease]:
        """Closes every lease whose time is over; the caller unpins their pages and fails their requests."""
        late = [lease for lease in self._leases.values() if now_s > lease.deadline_s]
        for lease in late:
            del self._leases[lease.number]
        return late


def _still(state: PageState, page_A: Int[Array, "A"], generation_A: UInt32[Array, "A"]) -> Bool[Array, "A"]:
    """Range first: whether each page is pinned and of the generation that the order names."""
    in_range_A = (page_A > PADDING_PAGE) & (page_A < state.num_pages)
    page_A = jnp.where(in_range_A, page_A, PADDING_PAGE)
    return in_range_A & (state.pins_P[page_A] > 0) & (state.generation_P[page_A] == generation_A)


def _given(order: Order) -> Bool[Array, "A"]:
    return jnp.arange(order.source_A.shape[0]) < order.count


def _tokens(order: Order, page_size: int) -> Int[Array, "A"]:
    return jnp.clip(order.tokens - jnp.arange(order.source_A.shape[0]) * page_size, 0, page_size)


def _sealed(
    order: Order, source: PageState, source_kv: KVStore, digests: tags.DigestTable
) -> Bool[Array, ""]:
    """Whether every source page still has the digest that was taken when it was sealed."""
    page_A = jnp.clip(order.source_A, 0, source.num_pages - 1)
    sealed_A = digests.tokens_P[page_A]
    found_A2 = tags.page_digest(source_kv, page_A, sealed_A)
    same_A = jnp.all(found_A2 == digests.digest_P2[page_A], axis=1)
    same_A &= sealed_A >= _tokens(order, source.page_size)
    return jnp.all(same_A | ~_given(order))


def _whole(table_A1: Int[Array, "A 1"], page_size: int) -> Int[Array, "A"]:
    """Every position counts as live: a NaN in the source must reach the write, which counts it."""
    return jnp.full(table_A1.shape[0], page_size, jnp.int32)


def _copy_raw(
    source_kv: KVStore,
    destination_kv: KVStore,
    source_A: Int[Array, "A"],
    destination_A: Int[Array, "A"],
    names: list[str],
) -> KVStore:
    target_A = jnp.where(destination_A > PADDING_PAGE, destination_A, destination_kv.num_pages)
    copied = {
        name: getattr(destination_kv, name)
        .at[:, target_A]
        .set(pool.at[:, source_A].get(mode="clip"), mode="drop")
        for name in names
        if (pool := getattr(source_kv, name)) is not None
    }
    return dataclasses.replace(destination_kv, **copied)
