"""Hand-over: prefill on one device, decode on the next, converted at either end; lost and late pages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.multi_gpu_parts.common import (
    ON_CPU,
    Findings,
    fill_params,
    int4_specs,
    midsize,
    on_gpu,
    seconds,
)
from kvmem.cache import pages, store, transfer
from kvmem.models import decoder
from kvmem.models.config import ModelConfig

IN_FLIGHT = 8  # hand-overs launched together where throughput is measured


def handover(config: Mapping[str, Any], out: Findings) -> None:
    """Pages of a prompt move to another device, converted at either end; then lost and late ones.

    Times are of the whole way, from the pinned source pages to the destination pool that holds them.
    """
    c = config["handover"]
    here, there = jax.devices()[:2]
    model, size, tokens = midsize(c), c["page_size"], c["tokens"]
    count = -(-tokens // size)
    shape = decoder.cache_shape(model)

    def pool(layout: str, num_pages: int) -> store.KVStore:
        return store.init(shape, layout, num_pages=num_pages, page_size=size, scale=0.05)

    source, destination, order = _pools(count, size, tokens)
    source_kv, destination_kv = pool("bf16_576", count + 3), pool("fp8_576", count + 5)
    origin = jnp.uint32(transfer.origin_code("prefill", transfer.fingerprint(source_kv, "int4_group")))
    into = jax.device_put(pool("fp8_576", count + 1), here)
    through = jax.device_put(pool("bf16_576", count + 1), there)
    at_here = jax.device_put((order, source), here)
    at_there = jax.device_put((destination, destination_kv, origin), there)
    order_there = jax.device_put(order, there)
    ship = jax.jit(lambda order, state, kv, into: transfer.ship(order, state, kv, into=into))
    land = jax.jit(
        lambda order, sent, state, kv, origin, through: transfer.land(
            order, sent, state, kv, origin, through=through
        )
    )
    deliver = jax.jit(transfer.deliver)
    ends = {"sender": (into, None), "receiver": (None, through)}
    for its_into, its_through in ends.values():  # compile before the devices are ours
        moved = jax.device_put(ship(*at_here, jax.device_put(source_kv, here), its_into), there)
        jax.block_until_ready(land(order_there, moved, *at_there, its_through))
    prefill = _prefill(
        model, c, source.table_BM[:1], lambda: jax.device_put(source_kv, here), config["seed"], out
    )
    with out.turn():
        prefill_s, _ = seconds(prefill, max(2, c["repeats"] // 5))
        source_kv = prefill()[1]
        whole = jax.device_put((destination, destination_kv, origin), here)
        expected = np.asarray(deliver(*at_here, source_kv, *whole)[0].values)[:, 1:]
        for end, (its_into, its_through) in ends.items():
            label = f"handover.{end}"
            sent = jax.block_until_ready(ship(*at_here, source_kv, its_into))

            def move(its_into: Any = its_into, its_through: Any = its_through) -> Any:
                moved = jax.device_put(ship(*at_here, source_kv, its_into), there)
                return land(order_there, moved, *at_there, its_through)

            got, _, _, status = move()
            out.metric(f"{label}.status_ok", int(int(status) == transfer.Status.OK))
            same = np.array_equal(np.asarray(got.values)[:, 1:], expected)
            out.metric(f"{label}.equals_one_device", int(same))
            nbytes = sum(x.nbytes for x in jax.tree.leaves(sent.block))
            out.metric(f"{label}.bytes_per_token", nbytes / (count * size))
            if on_gpu():
                alone_s, spread_s = seconds(move, c["repeats"])
                many_s, _ = seconds(functools.partial(_several, move), c["repeats"])
                ship_s, _ = seconds(functools.partial(ship, *at_here, source_kv, its_into), c["repeats"])
                wire_s, _ = seconds(functools.partial(jax.device_put, sent, there), c["repeats"])
                out.metric(f"{label}.gbps", nbytes * IN_FLIGHT / many_s / 1e9)
                out.metric(f"{label}.wire_gbps", nbytes / wire_s / 1e9)
                out.metric(f"{label}.ship_us", ship_s * 1e6)
                out.metric(f"{label}.alone_us", alone_s * 1e6)
                out.metric(f"{label}.spread_us", spread_s * 1e6)
                out.metric(f"{label}.us_per_token", alone_s / tokens * 1e6)
                out.metric(f"{label}.share_of_ttft", alone_s / (prefill_s + alone_s))
            else:
                out.missing(f"{label}.gbps", ON_CPU)
            _refusals(
                label, out, source_kv, at_there, order_there, jax.device_put(sent, there), land, its_through
            )
    if on_gpu():
        best = min(out.metrics[f"handover.{end}.us_per_token"] for end in ends)
        out.metric("handover.prefill_ms", prefill_s * 1e3)
        out.metric("handover.us_per_token", best)
    else:
        out.missing("handover.us_per_token", ON_CPU)


def _several(move: Callable[[], Any]) -> list[Any]:
    return [move() for _ in range(IN_FLIGHT)]


def _pools(count: int, size: int, tokens: int) -> tuple[pages.PageState, pages.PageState, transfer.Order]:
    """A source pool with the prompt in row 0, a destination with room in row 1, pinned; and the order."""
    source, _ = pages.append(pages.init(count + 3, 2, count, size), jnp.asarray([tokens, 0], jnp.int32))
    destination, _ = pages.append(
        pages.init(count + 5, 2, count, size), jnp.asarray([size, tokens], jnp.int32)
    )
    row_A = jnp.ones(count, bool)
    source, _ = pages.pin(source, source.table_BM[0], row_A)
    destination, _ = pages.pin(destination, destination.table_BM[1], row_A)
    order = transfer.Order(
        source_A=source.table_BM[0],
        source_generation_A=source.generation_P[source.table_BM[0]],
        destination_A=destination.table_BM[1],
        destination_generation_A=destination.generation_P[destination.table_BM[1]],
        arrived_A=row_A,
        count=jnp.int32(count),
        tokens=jnp.int32(tokens),
    )
    return source, destination, order


def _prefill(
    model: ModelConfig,
    c: Mapping[str, Any],
    table_1M: jax.Array,
    empty: Callable[[], store.KVStore],
    seed: int,
    out: Findings,
) -> Callable[[], tuple[jax.Array, store.KVStore]]:
    """A function that prefills a random prompt in chunks on the first device: what a hand-over adds to."""
    weights = fill_params(int4_specs(model), None, seed, out)
    chunks = -(-c["tokens"] // c["chunk"])
    prompt = np.random.default_rng(seed).integers(0, model.vocab_size, chunks * c["chunk"]).astype(np.int32)
    batches = []
    for at in range(0, c["tokens"], c["chunk"]):
        new = jnp.asarray([min(c["chunk"], c["tokens"] - at)], jnp.int32)
        tokens_1T = jnp.asarray(prompt[None, at : at + c["chunk"]])
        batches.append(decoder.StepBatch(tokens_1T, new, jnp.asarray([at], jnp.int32), table_1M))
    forward = jax.jit(lambda tree, kv, batch: decoder.forward(tree, model, kv, batch), donate_argnums=1)
    program = forward.lower(weights, empty(), batches[0]).compile()

    def prefill() -> tuple[jax.Array, store.KVStore]:
        kv = jax.tree.map(jnp.copy, empty())  # donated
        for batch in batches:
            logits_BW, kv = program(weights, kv, batch)
        return logits_BW, kv

    return prefill


def _refusals(
    label: str,
    out: Findings,
    source_kv: store.KVStore,
    at_there: tuple,
    order: transfer.Order,
    sent: transfer.Shipment,
    land: Callable,
    through: store.KVStore | None,
) -> None:
    """A page that is lost, and a shipment that comes after its lease: nothing of either is written."""
    destination, kv, origin = at_there
    before = np.asarray(kv.values)[:, 1:]
    lost = dataclasses.replace(order, arrived_A=order.arrived_A.at[1].set(False))
    after, _, _, status = land(lost, sent, destination, kv, origin, through)
    refused = int(status) == transfer.Status.INCOMPLETE
    out.metric(
        f"{label}.lost_refused", int(refused and np.array_equal(np.asarray(after.values)[:, 1:], before))
    )

    made_by = transfer.fingerprint(source_kv, "int4_group")
    named = tuple(zip(np.asarray(order.source_A).tolist(), np.asarray(order.source_generation_A).tolist()))
    manifest = transfer.Manifest("request", 1, int(order.tokens), named, made_by)
    board = transfer.Board(made_by, lease_s=1.0)
    lease = board.begin(manifest, named, now_s=0.0)
    assert lease is not None
    in_time = board.arrive(lease.number, manifest, now_s=0.5) is lease
    ended = board.expire(now_s=2.0)
    late = board.arrive(lease.number, manifest, now_s=2.0) is transfer.Refusal.LATE
    # The lease over, its pages are unpinned and go to someone else; the bytes come nevertheless.
    state, _ = pages.unpin(destination, order.destination_A, order.arrived_A)
    state, _ = pages.release(state, jax.device_put(jnp.asarray([False, True]), kv.values.device))
    again_B = jnp.asarray([0, int(order.tokens)], jnp.int32)
    state, _ = pages.append(state, jax.device_put(again_B, kv.values.device))
    state, _ = pages.pin(state, state.table_BM[1], order.arrived_A)
    after, _, _, status = land(order, sent, state, kv, origin, through)
    untouched = np.array_equal(np.asarray(after.values)[:, 1:], before)
    refused = int(status) == transfer.Status.DESTINATION
    out.metric(f"{label}.late_refused", int(in_time and late and ended == [lease] and refused and untouched))
