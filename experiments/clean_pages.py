"""Clean runs of the page machine on the device: long random churn in which every check must pass.

``operations`` mixes append, share, fork, release, retract, cancel and transfer over two small pools, and
checks both after each. ``full_pool`` keeps a pool of the published size full, gives one row back and serves
it again between checks, and checks every page each time.
"""

import dataclasses
import functools
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from kvmem import models
from kvmem.cache import integrity, pages, store, tags, transfer
from kvmem.cache.pages import PageState
from kvmem.engine import step as engine_step
from kvmem.models import decoder, params, sharded

ROWS, COLUMNS, PAGES, PAGE_SIZE = 4, 6, 17, 4
SHAPE = store.CacheShape(num_layers=2, num_index_layers=0, latent=8, rope=4, index_dim=4, tile=4)
KINDS = ("append", "share", "fork", "cancel", "retract", "transfer")


@dataclasses.dataclass(frozen=True)
class CleanRun:
    """Operations that were asked for, (row, page) checks made, and rows that a check stopped."""

    operations: int
    page_checks: int
    false_positives: int


def operations(detector: str, count: int, seed: int) -> CleanRun:
    """Runs ``count`` random operations on two pools, each followed by a check of every live row of both."""
    chunk = 500
    run = jax.jit(functools.partial(_churn, detector, chunk))
    carry = _start(detector)
    checks = stopped = done = 0
    key = jax.random.key(seed)
    while done < count:
        carry, (made, failed) = run(carry, jax.random.fold_in(key, done))
        checks, stopped, done = checks + int(made), stopped + int(failed), done + chunk
    broken = [line for side in carry for line in pages.violations(side["state"])]
    if broken:
        raise RuntimeError(f"a clean run broke invariants: {broken}")
    return CleanRun(done, checks, stopped)


def full_pool(
    checks: int,
    num_pages: int,
    *,
    rows: int = 64,
    progress: Callable[[Iterable[int]], Iterable[int]] = lambda items: items,
) -> CleanRun:
    """Checks a full pool ``checks`` times; before each, one row is given back and served again."""
    columns = -(-(num_pages - 1) // rows)
    state = pages.init(num_pages, rows, columns, 64)
    size_B = jnp.minimum(columns, jnp.maximum(0, num_pages - 1 - columns * jnp.arange(rows))) * 64
    state, ok_B = pages.append(state, size_B.astype(jnp.int32))
    if not bool(jnp.all(ok_B)):
        raise RuntimeError("the pool does not hold its own pages")
    every_B = jnp.ones(rows, bool)
    carry = (state, tags.extend(tags.empty(rows, columns), state, every_B))
    chunk = 500

    @jax.jit
    def run(carry: Any, start: Int[Array, ""]) -> Any:
        def step(carry: Any, turn: Int[Array, ""]) -> Any:
            state, expectation = carry
            mask_B = jnp.arange(rows) == turn % rows
            state, _ = pages.release(state, mask_B, expectation)
            state, _ = pages.append(state, jnp.where(mask_B, size_B, 0).astype(jnp.int32))
            expectation = tags.extend(tags.clear(expectation, mask_B), state, mask_B)
            report = integrity.check(state, expectation, every_B)
            return (state, expectation), (report.page_checks, jnp.sum(~report.ok_B))

        carry, (made, failed) = lax.scan(step, carry, start + jnp.arange(chunk))
        return carry, (made, jnp.sum(failed))

    total = stopped = done = 0
    for start in progress(range(0, checks, chunk)):
        carry, (made, failed) = run(carry, jnp.int32(start))
        total += int(np.asarray(made, np.int64).sum())  # a chunk's sum may exceed 32 bits
        stopped, done = stopped + int(failed), done + chunk
    if broken := pages.violations(carry[0]):
        raise RuntimeError(f"a clean run broke invariants: {broken}")
    return CleanRun(2 * done, total, stopped)


@dataclasses.dataclass(frozen=True)
class CheckCost:
    """What one check adds to a step: instructions of the compiled program, microseconds on this CPU."""

    device_operations: int
    microseconds: float


def check_cost(detector: str, num_pages: int, *, rows: int = 64, repeats: int = 200) -> CheckCost:
    """Compiles the check of a pool of ``num_pages`` pages by itself, counts and times it (median).

    ``tags_digest`` is priced by ``check_content``'s own reads of the pages and is not meant here.
    """
    columns = -(-(num_pages - 1) // rows)
    state = pages.init(num_pages, rows, columns, 64)
    expectation = tags.extend(tags.empty(rows, columns), state, jnp.ones(rows, bool))

    def run(state: PageState, expectation: pages.Expectation, mask_B: Bool[Array, "B"]) -> Bool[Array, "B"]:
        return integrity.alive(integrity.guard(detector, state, expectation, mask_B), mask_B)

    mask_B = jnp.ones(rows, bool)
    compiled = jax.jit(run).lower(state, expectation, mask_B).compile()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(state, expectation, mask_B))
        seconds.append(time.perf_counter() - begun)
    return CheckCost(device_operations(str(compiled.as_text())), 1e6 * statistics.median(seconds))


def device_operations(program: str) -> int:
    """Counts what the entry of a compiled program runs: its instructions but those that only name values."""
    entry = program.split("\nENTRY ")[1].split("\n}")[0]
    kinds = re.findall(r"^ +(?:ROOT )?%?\S+ = .*? ([a-z][\w-]*)\(", entry, re.MULTILINE)
    return sum(kind not in _NAMES_ONLY for kind in kinds)


_NAMES_ONLY = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def step_operations(detector: str, *, rows: int = 4, page_size: int = 64) -> int:
    """Compiles the engine's decode step of a tiny Kimi with a detector and counts its device operations."""
    model, columns = models.get_config("kimi_tiny_parity"), 8
    state = jax.eval_shape(
        functools.partial(
            engine_step.init,
            decoder.cache_shape(model),
            cache="fp8_576",
            index=None,
            scale=1.0,
            num_pages=rows * columns + 1,
            num_rows=rows,
            max_pages=columns,
            page_size=page_size,
            detector=detector,
        )
    )
    weights = sharded.abstract_params(params.param_specs(model, "int4_group"))
    config = engine_step.StepConfig(model, rows, columns, detector)
    decode: Any = engine_step.compile_step("decode", config)
    compiled = decode.lower(weights, state, jax.ShapeDtypeStruct((rows,), bool)).compile()
    return device_operations(compiled.as_text())


def _start(detector: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prefill side (bf16) and the decode side (fp8 with scales), empty."""

    def side(layout: str) -> dict[str, Any]:
        digest = detector == "tags_digest"
        return {
            "state": pages.init(PAGES, ROWS, COLUMNS, PAGE_SIZE),
            "expectation": tags.empty(ROWS, COLUMNS),
            "kv": store.init(SHAPE, layout, num_pages=PAGES, page_size=PAGE_SIZE) if digest else None,
            "digests": tags.empty_digests(PAGES) if digest else None,
        }

    return side("bf16_576"), side("fp8_656")


def _churn(detector: str, count: int, carry: Any, key: Array) -> Any:
    def step(carry: Any, key: Array) -> Any:
        kind_key, row_key, size_key, value_key = jax.random.split(key, 4)
        row = jax.random.randint(row_key, (), 0, ROWS)
        size = jax.random.randint(size_key, (), 1, 2 * PAGE_SIZE)
        kind = jax.random.randint(kind_key, (), 0, len(KINDS))
        branches = [functools.partial(_OPERATIONS[name], value_key) for name in KINDS]
        carry = lax.switch(kind, branches, carry, row, size)
        made, failed = jnp.int32(0), jnp.int32(0)
        for side in carry:
            live_B = side["state"].used_B > 0
            report = integrity.guard(
                detector,
                side["state"],
                side["expectation"],
                live_B,
                kv=side["kv"],
                digests=side["digests"],
            )
            made += jnp.int32(0) if report.page_checks is None else report.page_checks
            failed += jnp.sum(live_B & ~report.ok_B)
        return carry, (made, failed)

    carry, (made, failed) = lax.scan(step, carry, jax.random.split(key, count))
    return carry, (jnp.sum(made), jnp.sum(failed))


def _one(row: Int[Array, ""]) -> Bool[Array, "B"]:
    return jnp.arange(ROWS) == row


def _grow(side: dict[str, Any], key: Array, row: Int[Array, ""], tokens: Int[Array, ""]) -> dict[str, Any]:
    """Appends tokens to a row and writes and seals their bytes."""
    start_B = side["state"].length_B
    state, _ = pages.append(side["state"], jnp.where(_one(row), tokens, 0).astype(jnp.int32))
    side = side | {"state": state, "expectation": tags.extend(side["expectation"], state, _one(row))}
    if side["kv"] is None:
        return side
    most = COLUMNS * PAGE_SIZE
    position_T = start_B[row] + jnp.arange(most)
    page_T = state.table_BM[row, jnp.minimum(position_T // PAGE_SIZE, COLUMNS - 1)]
    page_1T = jnp.where(position_T < state.length_B[row], page_T, pages.PADDING_PAGE)[None]
    kv = side["kv"]
    for layer in range(SHAPE.num_layers):
        token_1TC = jax.random.normal(jax.random.fold_in(key, layer), (1, most, SHAPE.width))
        kv = store.write_latent(kv, layer, page_1T, (position_T % PAGE_SIZE)[None], token_1TC)
    digests = tags.seal_rows(side["digests"], kv, state, start_B, _one(row), new_tokens=most)
    return side | {"kv": kv, "digests": digests}


def _free(side: dict[str, Any], row: Int[Array, ""]) -> dict[str, Any]:
    state, _ = pages.release(side["state"], _one(row), side["expectation"])
    return side | {"state": state, "expectation": tags.clear(side["expectation"], _one(row))}


def _append(key: Array, carry: Any, row: Int[Array, ""], size: Int[Array, ""]) -> Any:
    prefill, decode = carry
    return _grow(prefill, key, row, size), _grow(decode, key, (row + 1) % ROWS, size)


def _share(key: Array, carry: Any, row: Int[Array, ""], size: Int[Array, ""]) -> Any:
    """A new request reuses the whole pages of its neighbour's prompt."""
    prefill, decode = carry
    state, target = prefill["state"], (row + 1) % ROWS
    count = state.length_B[row] // PAGE_SIZE
    generation_M = state.generation_P[state.table_BM[row]]
    state, _ = pages.share(state, target, state.table_BM[row], count, count * PAGE_SIZE, generation_M)
    expectation = tags.extend(prefill["expectation"], state, _one(target) & (prefill["state"].used_B == 0))
    return prefill | {"state": state, "expectation": expectation}, decode


def _fork(key: Array, carry: Any, row: Int[Array, ""], size: Int[Array, ""]) -> Any:
    """Shares, then goes on by itself."""
    prefill, decode = _share(key, carry, row, size)
    return _grow(prefill, key, (row + 1) % ROWS, size), decode


def _cancel(key: Array, carry: Any, row: Int[Array, ""], size: Int[Array, ""]) -> Any:
    prefill, decode = carry
    return _free(prefill, row), _free(decode, (row + size) % ROWS)


def _retract(key: Array, carry: Any, row: Int[Array, ""], size: Int[Array, ""]) -> Any:
    """A decode row's bytes move out, its pages are given back, and it comes back into others."""
    prefill, side = carry
    page_M, length = side["state"].table_BM[row], side["state"].length_B[row]
    kv, digests = side["kv"], side["digests"]
    block = None if kv is None else store.export_pages(kv, page_M)
    saved = None if digests is None else (digests.digest_P2[page_M], digests.tokens_P[page_M])
    side = _free(side, row)
    state, _ = pages.append(side["state"], jnp.where(_one(row), length, 0).astype(jnp.int32))
    side = side | {"state": state, "expectation": tags.extend(side["expectation"], state, _one(row))}
    if block is not None and saved is not None:
        back_M = state.table_BM[row]
        digests = tags.restore(digests, back_M, *saved, back_M > pages.PADDING_PAGE)
        side = side | {"kv": store.import_pages(kv, back_M, block), "digests": digests}
    return prefill, side


def _transfer(key: Array, carry: Any, row: Int[Array, ""], size: Int[Array, ""]) -> Any:
    """A prefilled row moves to an empty decode row: pin, convert, unpin, release."""
    source, target = carry
    free_B = target["state"].used_B == 0
    to = jnp.argmax(free_B)
    tokens = jnp.where(free_B[to], source["state"].length_B[row], 0)
    before: PageState = target["state"]
    state, ok_B = pages.append(before, jnp.where(_one(to), tokens, 0).astype(jnp.int32))
    moved = ok_B[to] & (tokens > 0)
    expectation = tags.extend(target["expectation"], state, _one(to) & moved)
    count = jnp.where(moved, pages.pages_of(tokens, PAGE_SIZE), 0)
    given_M = jnp.arange(COLUMNS) < count
    from_M, to_M = source["state"].table_BM[row], state.table_BM[to]
    source_state, _ = pages.pin(source["state"], from_M, given_M)
    state, _ = pages.pin(state, to_M, given_M)
    digests = target["digests"]
    kv = target["kv"]
    if kv is not None:
        order = transfer.Order(
            from_M,
            source_state.generation_P[from_M],
            to_M,
            state.generation_P[to_M],
            given_M,
            count,
            jnp.where(moved, tokens, 0),
        )
        kv, state, digests, _ = transfer.deliver(
            order,
            source_state,
            source["kv"],
            state,
            kv,
            jnp.uint32(1),
            source_digests=source["digests"],
            destination_digests=digests,
        )
    source_state, _ = pages.unpin(source_state, from_M, given_M)
    state, _ = pages.unpin(state, to_M, given_M)
    gone_B = _one(row) & moved
    source_state, _ = pages.release(source_state, gone_B, source["expectation"])
    source = source | {"state": source_state, "expectation": tags.clear(source["expectation"], gone_B)}
    return source, target | {"state": state, "expectation": expectation, "kv": kv, "digests": digests}


_OPERATIONS = {
    "append": _append,
    "share": _share,
    "fork": _fork,
    "cancel": _cancel,
    "retract": _retract,
    "transfer": _transfer,
}
