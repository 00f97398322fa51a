"""Seeded injectors: every fault class of the integrity page, planted at the level where it happens.

A fault takes the state of one pool of a running engine (or a transfer's order) and returns it damaged, aimed
at one request; ``trial`` runs an engine with one fault in it and says what became of every request. What each
detector is expected to see is part of the class, and tests hold it to that: also where the honest answer is
that tags see nothing.

    engine.inject(faults.BY_NAME["A1_freed_while_read"].aim(row, other, seed), "decode")
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvmem.cache import pages, store, transfer
from kvmem.engine.engine import Engine
from kvmem.engine.request import Request
from kvmem.engine.step import PoolState

Apply = Callable[[Any, int, int, np.random.Generator], Any]

# The faults that the tests hold the system to, by case: docs/integrity.md says which test, and what trips it.
CASES: dict[str, str] = {
    "A1": "A page is freed while its row still reads it, and another request gets it",
    "A2": "A page is freed while its row still reads it, and nobody takes it",
    "A3": "A page is freed while a copy still reads it",
    "A4": "De-duplication frees copies before their row is remapped",
    "A6": "Pages of an unfinished prefill are seen by another request",
    "A7": "Retraction and resume lose pages, change bytes, or free twice",
    "A8": "A stale side mapping frees somebody else's pages",
    "A9": "Columns past the used ones of a row name pages",
    "A10": "Padded rows write to a page of somebody",
    "A12": "Late work for a slot's former request arrives",
    "A14": "A page id outside the pool reads a clamped tag",
    "A15": "A chunked prefill is killed, and its pages are reused",
    "A18": "A store to an outer tier failed, and is a hit later",
    "A19": "A layout is guessed from the shape",
    "B1": "A late write of an aborted transfer lands in pages of another request",
    "B2": "A lost peer pins pages for ever",
    "B3": "The source frees its pages before they are read",
    "B5": "Metadata of another request arrives",
    "B7": "A page fails to arrive",
    "B8": "Hundreds of short disaggregated requests",
    "B9": "A BF16 page is pushed raw into an FP8 pool",
    "C1": "A cast to e4m3 stores NaN",
    "C2": "A calibrated scale is dropped",
    "C4": "K and V of one latent row have two scales",
    "C5": "A scale comes with a BF16 cache",
    "C8": "NaN bytes in the unwritten tail of a page",
    "C9": "NaN left by a page's former owner",
    "C10": "A batch with a row of length 0",
    "C11": "Decode and prefill read one FP8 pool differently",
    "C12": "Tokens move without their scales",
    "D2": "Scales of the second product are not cut with its columns",
    "D3": "Act-order, or a scale of a foreign dtype",
    "D5": "A group is larger than the shard",
    "D6": "Odd shapes and padding",
    "D8": "Every value -8..7 packs and unpacks",
    "D9": "A group of zeros; a scale that is missing or not finite",
    "D10": "An expert that the router never picks",
    "D11": "Large activations overflow",
    "D12": "E, N and K are confused where they are equal",
    "D14": "One expert gets every token, another none",
    "E1": "An exception inside the check",
    "E2": "An abort frees a page that has a new owner",
    "E4": "A shared prefix is accused, or not after its reuse",
    "E6": "One corrupted row changes its neighbours",
    "E7": "A step runs without its check",
    "E8": "Clean operations are accused",
    "E9": "A hot fault makes a storm of retries",
    "E10": "What tags do not see",
    "E13": "An allocation comes between check and read",
    "E14": "The tracker changes tokens",
}


@dataclasses.dataclass(frozen=True)
class FaultClass:
    """One way in which things go wrong.

    Attributes:
      name: case id and short name.
      level: where it happens: table, generation, free list, transfer, page bytes, scale.
      pool: whose state ``apply`` takes: "prefill", "decode", or "transfer" for an Order.
      seen: whether each detector must stop the request; None where it may: with the detector off some faults
        still meet a refusal later (nobody appends to, pins or moves a page that nobody owns).
      apply: ``(state, row, other, rng) -> state``: ``row`` is hit, ``other`` is a bystander.
      everyone: the fault hits every running row, not one.
      needs: a store array that the format must have for this fault to exist.
    """

    name: str
    level: str
    pool: str
    seen: Mapping[str, bool | None]
    apply: Apply
    everyone: bool = False
    needs: str | None = None

    def aim(self, row: int, other: int, seed: int) -> Callable[[Any], Any]:
        """Returns the fault as ``Engine.inject`` wants it."""
        return lambda state: self.apply(state, row, other, np.random.default_rng(seed))


_TAGS = {"off": False, "tags": True, "tags_digest": True}
_LATER = {"off": None, "tags": True, "tags_digest": True}
_DIGEST = {"off": False, "tags": False, "tags_digest": True}
_ALWAYS = {"off": True, "tags": True, "tags_digest": True}


def _set(state: PoolState, name: str, at: Any, value: Any) -> PoolState:
    array = getattr(state.pages, name)
    edited = array.at[at].set(jnp.asarray(value, array.dtype))
    return dataclasses.replace(state, pages=dataclasses.replace(state.pages, **{name: edited}))


def _logical(state: PoolState, row: int, rng: np.random.Generator) -> int:
    """A page that the row has written in full or in part."""
    return int(rng.integers(_written(state, row)))


def _written(state: PoolState, row: int) -> int:
    return -(-int(state.pages.length_B[row]) // state.pages.page_size)


def _drop(state: PoolState, row: int, logical: Sequence[int]) -> PoolState:
    page_A = state.pages.table_BM[row, jnp.asarray(logical)]
    page_state, _ = pages.drop(state.pages, page_A, jnp.ones(len(logical), bool))
    return dataclasses.replace(state, pages=page_state)


def _give(state: PoolState, row: int, count: int) -> PoolState:
    """The bystander takes pages, as its next append would: those freed last come first."""
    rows = jnp.arange(state.pages.used_B.shape[0])
    page_state, _ = pages.allocate(state.pages, jnp.where(rows == row, count, 0))
    return dataclasses.replace(state, pages=page_state)


def _overwrite(state: PoolState, page: int, source: int) -> PoolState:
    """Copies the bytes of another page over a page, as a write meant for it would."""
    at, of = (jnp.asarray([p], jnp.int32) for p in (page, source))
    return dataclasses.replace(state, kv=store.copy_pages(state.kv, of, at))


def _freed_while_read(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    logical = int(rng.integers(max(1, _written(state, row) - 1)))
    page = int(state.pages.table_BM[row, logical])
    state = _give(_drop(state, row, [logical]), other, 1)
    return _overwrite(state, page, int(state.pages.table_BM[other, 0]))  # its new owner writes it


def _tail_freed_while_read(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    """The freed tail becomes the bystander's next page, so the row's next token would land in it."""
    tail = _written(state, row) - 1
    page = int(state.pages.table_BM[row, tail])
    state = _give(_drop(state, row, [tail]), other, 1)
    return _overwrite(state, page, int(state.pages.table_BM[other, 0]))


def _freed_not_reused(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    return _drop(state, row, [_logical(state, row, rng)])


def _deduplicated(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    """The row's finished pages are freed as copies, and its table is not remapped; another takes them."""
    whole = max(1, int(state.pages.length_B[row]) // state.pages.page_size)
    freed = [int(page) for page in state.pages.table_BM[row, :whole]]
    state = _give(_drop(state, row, range(whole)), other, 1)
    return _overwrite(state, max(freed), int(state.pages.table_BM[other, 0]))


def _on_free_list(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    """An owned page is pushed on the free stack: the next allocation gives it a second owner."""
    page = state.pages.table_BM[row, _logical(state, row, rng)]
    state = _set(state, "free_P", int(state.pages.free_count), page)
    state = _give(_set(state, "free_count", (), state.pages.free_count + 1), other, 1)
    return _overwrite(state, int(page), int(state.pages.table_BM[other, 0]))


def _table(value: Callable[[PoolState, int, np.random.Generator], Any]) -> Apply:
    def apply(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
        return _set(state, "table_BM", (row, _logical(state, row, rng)), value(state, other, rng))

    return apply


def _another_page(state: PoolState, other: int, rng: np.random.Generator) -> int:
    return int(state.pages.table_BM[other, _logical(state, other, rng)])


def _wrong_order(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    first, second = rng.permutation(max(2, _written(state, row)))[:2].tolist()
    table_M = state.pages.table_BM[row]
    swapped = table_M.at[first].set(table_M[second]).at[second].set(table_M[first])
    return _set(state, "table_BM", row, swapped)


def _stale_tail(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    """The last column, which a row of this length does not use, names a page of the slot's former request."""
    return _set(state, "table_BM", (row, -1), _another_page(state, other, rng))


def _slot_reused(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    return _set(state, "epoch_B", row, state.pages.epoch_B[row] + jnp.uint32(1))


def _generation(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    page = state.pages.table_BM[row, _logical(state, row, rng)]
    return _set(state, "generation_P", page, state.pages.generation_P[page] + jnp.uint32(2))


def _order(**edits: Callable[[transfer.Order], Any]) -> Apply:
    def apply(order: transfer.Order, row: int, other: int, rng: np.random.Generator) -> transfer.Order:
        return dataclasses.replace(order, **{name: edit(order) for name, edit in edits.items()})

    return apply


def _live_token(state: PoolState, row: int, rng: np.random.Generator) -> tuple[int, int]:
    """Page and offset of a token that the row has written."""
    position = int(rng.integers(int(state.pages.length_B[row])))
    page = int(state.pages.table_BM[row, position // state.pages.page_size])
    return page, position % state.pages.page_size


def _edit_pool(state: PoolState, name: str, edited: Any) -> PoolState:
    return dataclasses.replace(state, kv=dataclasses.replace(state.kv, **{name: edited}))


def _flip(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    """One bit, the highest that does not make a NaN on its own, so that tokens can change at all."""
    page, offset = _live_token(state, row, rng)
    pool = state.kv.values
    at = (int(rng.integers(pool.shape[0])), page, offset, int(rng.integers(pool.shape[3])))
    if pool.dtype == jnp.float32:
        return _edit_pool(state, "values", pool.at[at].multiply(-1.0))
    sign = jnp.asarray(1 << (8 * pool.dtype.itemsize - 1), pool.dtype)
    return _edit_pool(state, "values", pool.at[at].set(pool[at] ^ sign))


def _nan_byte(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    page, offset = _live_token(state, row, rng)
    pool = state.kv.values
    nan = {1: 0x7F, 2: 0x7FC0, 4: jnp.nan}[pool.dtype.itemsize]
    return _edit_pool(state, "values", pool.at[:, page, offset, :].set(jnp.asarray(nan, pool.dtype)))


def _permuted(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    """Two tokens of a page change places, in every array."""
    length, size = int(state.pages.length_B[row]), state.pages.page_size
    page = int(state.pages.table_BM[row, 0])
    first, second = rng.permutation(min(length, size))[:2].tolist()
    kv = state.kv
    for name in store.POOLS:
        pool = getattr(kv, name)
        if pool is not None:
            swapped = pool.at[:, page, first].set(pool[:, page, second])
            swapped = swapped.at[:, page, second].set(pool[:, page, first])
            kv = dataclasses.replace(kv, **{name: swapped})
    return dataclasses.replace(state, kv=kv)


def _scale_of_a_token(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    page, offset = _live_token(state, row, rng)
    scales = state.kv.scales
    assert scales is not None
    return _edit_pool(state, "scales", scales.at[:, page, offset].multiply(2.0))


def _scale_dropped(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    scale_Y = state.kv.scale_Y
    assert scale_Y is not None
    return _edit_pool(state, "scale_Y", scale_Y * 4.0)


def _late_write(state: PoolState, row: int, other: int, rng: np.random.Generator) -> PoolState:
    """Bytes of an aborted transfer land in a page that the row owns now."""
    page = int(state.pages.table_BM[row, 0])
    return _overwrite(state, page, int(state.pages.table_BM[other, 0]))


def _past_pool(state: PoolState, other: int, rng: np.random.Generator) -> int:
    return state.pages.num_pages + int(rng.integers(5))


CLASSES: tuple[FaultClass, ...] = (
    FaultClass("A1_freed_while_read", "free list", "decode", _TAGS, _freed_while_read),
    FaultClass("A1_tail_freed_while_read", "free list", "decode", _TAGS, _tail_freed_while_read),
    FaultClass("A2_freed_not_reused", "free list", "decode", _LATER, _freed_not_reused),
    FaultClass("A2_freed_during_prefill", "free list", "prefill", _LATER, _freed_not_reused),
    FaultClass("A4_deduplicated_without_remap", "free list", "decode", _TAGS, _deduplicated),
    FaultClass("A7_owned_page_on_free_list", "free list", "decode", _TAGS, _on_free_list),
    FaultClass("A9_stale_tail_column", "table", "decode", _TAGS, _stale_tail),
    FaultClass("A10_padding_page_in_row", "table", "decode", _LATER, _table(lambda s, o, r: 0)),
    FaultClass("A12_slot_reused", "table", "decode", _TAGS, _slot_reused),
    FaultClass("A14_page_past_the_pool", "table", "decode", _LATER, _table(_past_pool)),
    FaultClass("A14_negative_page", "table", "decode", _LATER, _table(lambda s, o, r: -1)),
    FaultClass("A14_negative_page_in_prefill", "table", "prefill", _LATER, _table(lambda s, o, r: -1)),
    FaultClass("G2_generation_moved_on", "generation", "decode", _TAGS, _generation),
    FaultClass("G3_page_of_another_request", "table", "decode", _TAGS, _table(_another_page)),
    FaultClass("G3_pages_in_wrong_order", "table", "decode", _TAGS, _wrong_order),
    FaultClass("B1_late_write_into_live_page", "page bytes", "decode", _DIGEST, _late_write),
    FaultClass(
        "B3_source_generation_moved_on",
        "transfer",
        "transfer",
        _ALWAYS,
        _order(source_generation_A=lambda o: o.source_generation_A + jnp.uint32(2)),
    ),
    FaultClass(
        "B5_pages_of_another_request",
        "transfer",
        "transfer",
        _ALWAYS,
        _order(source_A=lambda o: o.source_A + 1),
    ),
    FaultClass(
        "B7_page_did_not_arrive",
        "transfer",
        "transfer",
        _ALWAYS,
        _order(arrived_A=lambda o: o.arrived_A.at[0].set(False)),
    ),
    FaultClass(
        "A14_destination_past_the_pool",
        "transfer",
        "transfer",
        _ALWAYS,
        _order(destination_A=lambda o: o.destination_A + 10_000),
    ),
    FaultClass("C9_nan_in_a_live_token", "page bytes", "decode", _ALWAYS, _nan_byte),
    FaultClass("E10_flipped_bit", "page bytes", "decode", _DIGEST, _flip),
    FaultClass("E10_tokens_permuted_in_page", "page bytes", "decode", _DIGEST, _permuted),
    FaultClass("E10_scale_of_a_token", "scale", "decode", _DIGEST, _scale_of_a_token, needs="scales"),
    FaultClass("C2_scale_of_the_pool", "scale", "decode", _DIGEST, _scale_dropped, True, "scale_Y"),
)
BY_NAME: dict[str, FaultClass] = {fault.name: fault for fault in CLASSES}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a run with one fault in it.

    Attributes:
      injected: the fault was planted (a request was in the right place before all ended).
      detected: every request that was hit was stopped, with an incident that names it.
      steps: engine steps from the injection to the first incident, if detected.
      changed: a request that was hit published a token other than in the clean run.
      collateral: other requests that were stopped or whose tokens changed.
    """

    injected: bool
    detected: bool = False
    steps: int | None = None
    changed: bool = False
    collateral: int = 0


def clean_tokens(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    """Returns every request's tokens in a run without a fault.

    Raises:
      RuntimeError: a request did not end well, which makes everything measured against it void.
    """
    results = _serve(engine, requests)
    bad = {r: result.finish_reason for r, result in results.items() if not result.ok}
    if bad:
        raise RuntimeError(f"requests of a clean run ended with {bad}")
    return {r: result.tokens for r, result in results.items()}


def trial(
    engine: Engine,
    requests: Sequence[Request],
    fault: FaultClass,
    seed: int,
    clean: Mapping[str, tuple[int, ...]],
) -> Outcome:
    """Serves ``requests`` in a fresh engine, plants ``fault`` once, and compares with the clean run.

    Everything random (which request, when, which page) comes from ``seed``.
    """
    rng = np.random.default_rng(seed)
    hit: list[str] = []
    planted = -1
    delay = 0 if fault.pool == "prefill" else int(rng.integers(1, 4))
    if fault.pool == "transfer":
        turn = int(rng.integers(len(requests)))
        orders: list[int] = []

        def strike(order: Any) -> Any:
            nonlocal planted
            moving = [r for r in engine.scheduler.live.values() if r.decode_row >= 0 and r.prefill_row >= 0]
            orders.append(len(moving))
            if len(orders) - 1 != turn:
                return order
            planted = engine.counters["steps"]
            return fault.apply(order, 0, 0, rng)

        engine.inject(strike, "transfer")
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        if fault.pool != "transfer" and planted < 0:
            placed = _placed(engine, fault.pool, fault.needs)
            if placed and delay > 0:
                delay -= 1
            elif placed:
                victim, row, other = placed[int(rng.integers(len(placed)))]
                hit = [name for name, _, _ in placed] if fault.everyone else [victim]
                planted = engine.counters["steps"]
                engine.inject(fault.aim(row, other, int(rng.integers(2**31))), fault.pool)
        engine.step()
    results = {result.request_id: result for result in engine.results}
    if planted < 0:
        return Outcome(injected=False)
    named = [incident for incident in engine.incidents if incident.request_id in results]
    if fault.pool == "transfer":
        # The order does not say whose it is; whoever is stopped was hit, and it must be exactly one.
        hit = sorted({incident.request_id for incident in named})[:1]
    stopped = {incident.request_id for incident in named}
    detected = bool(hit) and all(name in stopped and not results[name].ok for name in hit)
    after = [int(str(incident.detail["step"])) - planted for incident in named if incident.request_id in hit]
    return Outcome(
        injected=True,
        detected=detected,
        steps=min(after) if detected else None,
        changed=any(results[n].tokens != clean[n][: len(results[n].tokens)] for n in hit),
        collateral=sum(results[n].tokens != clean[n] for n in clean if n not in hit),
    )


def _placed(engine: Engine, pool: str, needs: str | None) -> list[tuple[str, int, int]]:
    """Requests that are in ``pool`` with two written pages and work left, each with a bystander's row."""
    state = engine.state("prefill" if pool == "prefill" else "decode")
    if needs is not None and getattr(state.kv, needs) is None:
        return []
    rows = []
    for name, sequence in engine.scheduler.live.items():
        where, row = engine.row_of(name)
        if where != pool:
            continue
        if pool == "prefill":
            enough = sequence.prompt_length > sequence.computed
        else:
            enough = sequence.request.max_new_tokens - sequence.position > 3
        if enough and _written(state, row) >= 2:
            rows.append((name, row))
    if pool == "prefill":
        return [(name, row, row) for name, row in rows]
    return [(name, row, rows[i - 1][1]) for i, (name, row) in enumerate(rows)] if len(rows) > 1 else []


def _serve(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    return {result.request_id: result for result in engine.results}
