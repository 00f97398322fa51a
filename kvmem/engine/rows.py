"""Operations on a pool between steps: rows come, go, move out and back.

Each is one small jitted program of fixed shapes that takes the state (donated) and returns it. What can fail
on the device leaves the row dead with its cause, which the next step reports; no operation waits for the
device.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, UInt32

from kvmem.cache import integrity, pages, store, tags
from kvmem.cache.integrity import IntegrityReport
from kvmem.cache.pages import PADDING_PAGE
from kvmem.cache.store import PageBlock
from kvmem.engine import sampling
from kvmem.engine.request import SamplingParams
from kvmem.engine.sampling import SamplerRows
from kvmem.engine.step import Cause, PoolState, StepConfig, guard


@typing.no_type_check
@struct.dataclass
class RowStart:
    """A row's first values: its index, last token and sampling parameters (scalars of the host)."""

    row: ArrayLike
    token: ArrayLike
    temperature: ArrayLike
    top_k: ArrayLike
    top_p: ArrayLike
    min_p: ArrayLike
    seed: ArrayLike


def start(row: int, token: int, params: SamplingParams) -> RowStart:
    """The start of a request's row, as host scalars of the right dtypes."""
    temperature, top_k, top_p, min_p, seed = sampling.one_row(params)
    return RowStart(
        row=np.int32(row),
        token=np.int32(token),
        temperature=np.float32(temperature),
        top_k=np.int32(top_k),
        top_p=np.float32(top_p),
        min_p=np.float32(min_p),
        seed=np.uint32(seed),
    )


def one_row(state: PoolState, row: ArrayLike) -> Bool[Array, "B"]:
    """The mask of one row."""
    return jnp.arange(state.cause_B.shape[0]) == row


def begin(state: PoolState, first: RowStart, cause: Int[Array, ""]) -> PoolState:
    """Gives a row its first values and its cause."""
    s, at = state.sampler, first.row
    sampler = SamplerRows(
        temperature_B=s.temperature_B.at[at].set(first.temperature),
        top_k_B=s.top_k_B.at[at].set(first.top_k),
        top_p_B=s.top_p_B.at[at].set(first.top_p),
        min_p_B=s.min_p_B.at[at].set(first.min_p),
        seed_B=s.seed_B.at[at].set(first.seed),
    )
    return dataclasses.replace(
        state,
        sampler=sampler,
        token_B=state.token_B.at[at].set(first.token),
        cause_B=state.cause_B.at[at].set(cause),
    )


@functools.partial(jax.jit, donate_argnums=0)
def admit(
    state: PoolState,
    first: RowStart,
    page_M: Int[Array, "M"],
    generation_M: UInt32[Array, "M"],
    count: Int[Array, ""],
    pages_total: Int[Array, ""],
) -> PoolState:
    """Puts a request into an empty row: ``count`` reused pages, then new ones up to ``pages_total``.

    The reused pages are expected at the generations that the prefix tree registered. If one is no longer
    that, or the pool cannot give the rest, the row starts dead with its cause.
    """
    page_state, shared = pages.share(
        state.pages, first.row, page_M, count, count * state.pages.page_size, generation_M
    )
    mask_B = one_row(state, first.row)
    want_B = jnp.where(mask_B & shared, pages_total - count, 0)
    page_state, ok_B = pages.allocate(page_state, want_B)
    expectation = tags.extend(state.expectation, page_state, mask_B & shared)
    cause = jnp.where(shared, jnp.where(ok_B[first.row], Cause.OK, Cause.NO_PAGES), Cause.STALE_PREFIX)
    state = dataclasses.replace(state, pages=page_state, expectation=expectation)
    return begin(state, first, cause.astype(jnp.int32))


@functools.partial(jax.jit, donate_argnums=0)
def retain(state: PoolState, page_A: Int[Array, "A"]) -> PoolState:
    """Adds the prefix tree's hold to pages; padding is ignored, pages without an owner are counted."""
    page_state, ok_A = pages.retain(state.pages, page_A, page_A > PADDING_PAGE)
    return _count_refused(dataclasses.replace(state, pages=page_state), page_A, ok_A)


@functools.partial(jax.jit, donate_argnums=0)
def drop(state: PoolState, page_A: Int[Array, "A"]) -> PoolState:
    """Takes the prefix tree's hold from pages; padding is ignored, pages without an owner are counted."""
    page_state, ok_A = pages.drop(state.pages, page_A, page_A > PADDING_PAGE)
    return _count_refused(dataclasses.replace(state, pages=page_state), page_A, ok_A)


def _count_refused(state: PoolState, page_A: Int[Array, "A"], ok_A: Bool[Array, "A"]) -> PoolState:
    refused = jnp.sum((page_A > PADDING_PAGE) & ~ok_A, dtype=jnp.int32)
    return dataclasses.replace(state, refused=state.refused + refused)


@functools.partial(jax.jit, donate_argnums=0)
def release(state: PoolState, mask_B: Bool[Array, "B"]) -> PoolState:
    """Empties rows. Pages whose generation is no longer the promised one belong to others and stay theirs."""
    page_state, _ = pages.release(state.pages, mask_B, state.expectation)
    return dataclasses.replace(
        state,
        pages=page_state,
        expectation=tags.clear(state.expectation, mask_B),
        cause_B=jnp.where(mask_B, jnp.int32(Cause.EMPTY), state.cause_B),
    )


@typing.no_type_check
@struct.dataclass
class RowBytes:
    """A row moved out of its pool: the stored bytes of its pages, bit for bit.

    ``ok`` is false, and the bytes must not be used, if the check failed before they were read.
    """

    block: PageBlock
    length: Int[Array, ""]
    digest_M2: UInt32[Array, "M 2"] | None
    tokens_M: Int[Array, "M"] | None
    origin_M: UInt32[Array, "M"]
    ok: Bool[Array, ""]
    check: IntegrityReport | None
    row: Int[Array, ""]


@functools.partial(jax.jit, donate_argnums=0, static_argnames="config")
def move_out(state: PoolState, row: Int[Array, ""], *, config: StepConfig) -> tuple[PoolState, RowBytes]:
    """Checks a row, reads its pages' bytes and gives the pages back."""
    mask_B = one_row(state, row)
    check = guard(config, state, mask_B & (state.cause_B == Cause.OK))
    ok = integrity.alive(check, mask_B & (state.cause_B == Cause.OK))[row]
    page_M = jnp.where(ok, state.pages.table_BM[row], PADDING_PAGE)
    digests = state.digests
    moved = RowBytes(
        block=store.export_pages(state.kv, page_M),
        length=state.pages.length_B[row],
        digest_M2=None if digests is None else digests.digest_P2[page_M],
        tokens_M=None if digests is None else digests.tokens_P[page_M],
        origin_M=state.pages.origin_P[page_M],
        ok=ok,
        check=check,
        row=row,
    )
    return release(state, mask_B), moved


@functools.partial(jax.jit, donate_argnums=0)
def move_in(state: PoolState, first: RowStart, moved: RowBytes) -> PoolState:
    """Puts moved-out bytes into fresh pages of an empty row; the row starts dead if the pool cannot hold
    it.
    """
    mask_B = one_row(state, first.row)
    page_state, ok_B = pages.append(state.pages, jnp.where(mask_B, moved.length, 0))
    ok = ok_B[first.row] & moved.ok
    expectation = tags.extend(state.expectation, page_state, mask_B & ok)
    page_M = jnp.where(ok, page_state.table_BM[first.row], PADDING_PAGE)
    kv = store.import_pages(state.kv, page_M, moved.block)
    origin_P = page_state.origin_P.at[jnp.where(page_M > PADDING_PAGE, page_M, page_state.num_pages)].set(
        moved.origin_M, mode="drop"
    )
    digests = state.digests
    if digests is not None:
        digests = tags.restore(digests, page_M, moved.digest_M2, moved.tokens_M, page_M > PADDING_PAGE)
    state = dataclasses.replace(
        state,
        pages=dataclasses.replace(page_state, origin_P=origin_P),
        kv=kv,
        expectation=expectation,
        digests=digests,
    )
    return begin(state, first, jnp.where(ok, Cause.OK, Cause.NO_PAGES).astype(jnp.int32))
