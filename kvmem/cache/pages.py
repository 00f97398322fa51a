"""Page ownership as one immutable value: ``(state, request) -> (state, status)``, jitted, nothing hidden.

A page is in exactly one of these states, and ``counts`` adds up to all pages but the padding page:

====== ============== ==========================================================================
state  references     meaning
====== ============== ==========================================================================
free   0              on the free stack
owned  1              one row, or one hold of the prefix tree
shared 2 and more     rows and holds that read the same finished page
pinned 0, pins > 0    its owner is gone, a transfer still reads or writes it: not yet allocatable
retired 0             its generation counter is used up; never allocated again
====== ============== ==========================================================================

A page's generation grows by one when it is allocated and by one when its last reference goes, so it is odd
exactly while somebody owns the page, and a freed page fails the check even before it has a new owner.
Page 0 is the padding page: never allocatable, always zeros, the target of writes that must not happen.

A request that cannot be satisfied returns ``ok = False`` for its row and changes nothing of that row. Rows
are served in order; a refused row takes no page, so that a later, smaller row may still be served.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, UInt32

PADDING_PAGE = 0
# Even, so a page that carries it is not owned; one more allocation and release would wrap to 0.
LAST_GENERATION = np.uint32(0xFFFFFFFE)


@typing.no_type_check
@struct.dataclass
class PageState:
    """Who owns which page of one pool.

    Attributes:
      table_BM: physical page of each logical page of a row; the padding page from ``used_B`` on.
      used_B: pages of a row. length_B: tokens of a row, at most ``used_B * page_size``.
      epoch_B: how often the row has been given back; late work that carries an older epoch is rejected.
      generation_P: odd while owned, see the module docstring.
      references_P: rows and prefix-tree holds of a page. pins_P: transfers that read or write it now.
      origin_P: code of who made the page's bytes (phase, weights, format), see ``transfer.origin_code``.
      free_P: the free stack, its top at ``free_count - 1``; zeros above. free_count: scalar.
      pool_origin: scalar u32, the origin stamped on pages that ``append`` makes or extends.
      page_size: tokens of a page.
    """

    table_BM: Int[Array, "B M"]
    used_B: Int[Array, "B"]
    length_B: Int[Array, "B"]
    epoch_B: UInt32[Array, "B"]
    generation_P: UInt32[Array, "P"]
    references_P: Int[Array, "P"]
    pins_P: Int[Array, "P"]
    origin_P: UInt32[Array, "P"]
    free_P: Int[Array, "P"]
    free_count: Int[Array, ""]
    pool_origin: UInt32[Array, ""]
    page_size: int = struct.field(pytree_node=False)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the padding page included."""
        return self.generation_P.shape[0]


@typing.no_type_check
@struct.dataclass
class Expectation:
    """What each row's request was promised: kept apart from the table, so that the two can disagree.

    Owner and position are bound here, not in the tag of the (possibly shared) page: ``page_BM[b, m]`` and
    ``generation_BM[b, m]`` name the physical page and its generation for logical page m of row b.
    """

    page_BM: Int[Array, "B M"]
    generation_BM: UInt32[Array, "B M"]
    used_B: Int[Array, "B"]
    epoch_B: UInt32[Array, "B"]


@typing.no_type_check
@struct.dataclass
class PageCounts:
    """Pages by state, scalars; they add up to the pool without its padding page."""

    free: Int[Array, ""]
    owned: Int[Array, ""]
    shared: Int[Array, ""]
    pinned: Int[Array, ""]
    retired: Int[Array, ""]


def init(num_pages: int, num_rows: int, max_pages: int, page_size: int, *, origin: int = 0) -> PageState:
    """Returns a pool of ``num_pages`` pages (page 0 is padding) with ``num_rows`` empty rows.

    Raises:
      ValueError: a size that is not positive, or a pool without an allocatable page.
    """
    for name, value, least in (
        ("num_pages", num_pages, 2),
        ("num_rows", num_rows, 1),
        ("max_pages", max_pages, 1),
        ("page_size", page_size, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    free = np.zeros(num_pages, np.int32)
    free[: num_pages - 1] = np.arange(num_pages - 1, 0, -1)
    return PageState(
        table_BM=jnp.full((num_rows, max_pages), PADDING_PAGE, jnp.int32),
        used_B=jnp.zeros(num_rows, jnp.int32),
        length_B=jnp.zeros(num_rows, jnp.int32),
        epoch_B=jnp.zeros(num_rows, jnp.uint32),
        generation_P=jnp.zeros(num_pages, jnp.uint32),
        references_P=jnp.zeros(num_pages, jnp.int32),
        pins_P=jnp.zeros(num_pages, jnp.int32),
        origin_P=jnp.zeros(num_pages, jnp.uint32),
        free_P=jnp.asarray(free),
        free_count=jnp.asarray(num_pages - 1, jnp.int32),
        pool_origin=jnp.asarray(origin, jnp.uint32),
        page_size=page_size,
    )


@jax.jit
def append(state: PageState, tokens_B: Int[Array, "B"]) -> tuple[PageState, Bool[Array, "B"]]:
    """Grows each row by ``tokens_B`` tokens, allocating pages as needed.

    A row is refused if its tokens do not fit ``M * page_size``, if too few pages are free, or if the page
    that it would write into is shared or pinned: bytes that somebody else reads are never written.

    Returns:
      The new state and ``ok_B``; rows that ask for 0 tokens are ok.
    """
    num_pages = state.num_pages
    length_B = state.length_B + tokens_B
    fits_B = (tokens_B >= 0) & (length_B <= state.table_BM.shape[1] * state.page_size)
    first_B = state.length_B // state.page_size
    touched_BM = _columns(state) >= first_B[:, None]
    touched_BM &= _columns(state) < jnp.minimum(state.used_B, pages_of(length_B, state.page_size))[:, None]
    page_BM = jnp.clip(state.table_BM, 0, num_pages - 1)
    exclusive_BM = (state.references_P[page_BM] == 1) & (state.pins_P[page_BM] == 0)
    writable_B = jnp.all(exclusive_BM | ~touched_BM, axis=1) | (tokens_B == 0)
    state, ok_B = _grow(state, pages_of(length_B, state.page_size), fits_B & writable_B)
    grown_B = ok_B & (tokens_B > 0)
    length_B = jnp.where(grown_B, length_B, state.length_B)
    written_BM = (_columns(state) >= first_B[:, None]) & grown_B[:, None]
    written_BM &= _columns(state) < pages_of(length_B, state.page_size)[:, None]
    target_BM = jnp.where(written_BM, state.table_BM, num_pages)
    origin_P = state.origin_P.at[target_BM].set(state.pool_origin, mode="drop")
    return dataclasses.replace(state, length_B=length_B, origin_P=origin_P), ok_B


@jax.jit
def allocate(state: PageState, pages_B: Int[Array, "B"]) -> tuple[PageState, Bool[Array, "B"]]:
    """Reserves ``pages_B`` more pages for each row without changing its length.

    Returns:
      The new state and ``ok_B``: False, and the row unchanged, if the pages are not there.
    """
    want_B = state.used_B + pages_B
    return _grow(state, want_B, (pages_B >= 0) & (want_B <= state.table_BM.shape[1]))


@jax.jit
def share(
    state: PageState,
    row: Int[Array, ""],
    page_M: Int[Array, "M"],
    count: Int[Array, ""],
    tokens: Int[Array, ""],
    generation_M: UInt32[Array, "M"] | None = None,
) -> tuple[PageState, Bool[Array, ""]]:
    """Gives the empty row ``row`` the first ``count`` pages of ``page_M`` as its prefix of ``tokens`` tokens.

    Only whole finished pages are shared: ``tokens`` must be ``count * page_size``. Every page must be owned
    now and, if ``generation_M`` is given, still be of that generation.

    Returns:
      The new state and a scalar ok: False, and nothing changed, if any of this does not hold.
    """
    given_M = jnp.arange(page_M.shape[0]) < count
    ok_M, page_M = _owned(state, page_M)
    if generation_M is not None:
        ok_M &= state.generation_P[page_M] == generation_M
    target_M = jnp.where(given_M, page_M, state.num_pages)
    twice_P = jnp.zeros_like(state.references_P).at[target_M].add(1, mode="drop")
    ok = jnp.all(ok_M | ~given_M) & jnp.all(twice_P <= 1) & (tokens == count * state.page_size)
    ok &= (count >= 0) & (count <= page_M.shape[0]) & (row >= 0) & (row < state.used_B.shape[0])
    ok &= state.used_B[jnp.clip(row, 0, state.used_B.shape[0] - 1)] == 0
    at = jnp.where(ok, row, state.used_B.shape[0])
    return dataclasses.replace(
        state,
        table_BM=state.table_BM.at[at].set(jnp.where(given_M, page_M, PADDING_PAGE), mode="drop"),
        used_B=state.used_B.at[at].set(count, mode="drop"),
        length_B=state.length_B.at[at].set(tokens, mode="drop"),
        references_P=state.references_P + jnp.where(ok, twice_P, 0),
    ), ok


@jax.jit
def retain(
    state: PageState, page_A: Int[Array, "A"], mask_A: Bool[Array, "A"]
) -> tuple[PageState, Bool[Array, "A"]]:
    """Adds a hold (of the prefix tree) to each masked page that somebody owns.

    Returns:
      The new state and ``ok_A``: False for a page that is unowned, padding or out of range.
    """
    owned_A, page_A = _owned(state, page_A)
    ok_A = owned_A & mask_A
    target_A = jnp.where(ok_A, page_A, state.num_pages)
    references_P = state.references_P.at[target_A].add(1, mode="drop")
    return dataclasses.replace(state, references_P=references_P), ok_A


@jax.jit
def drop(
    state: PageState, page_A: Int[Array, "A"], mask_A: Bool[Array, "A"]
) -> tuple[PageState, Bool[Array, "A"]]:
    """Takes one reference from each masked page; the last one frees it (unless it is pinned).

    Returns:
      The new state and ``ok_A``: False for a page that has no reference left to give (freed twice, never
      owned, padding, out of range); such an entry changes nothing.
    """
    ok_A, count_P = _take(state.references_P, page_A, mask_A)
    state, _ = _unreference(state, count_P)
    return state, ok_A


@jax.jit
def release(
    state: PageState, mask_B: Bool[Array, "B"], expectation: Expectation | None = None
) -> tuple[PageState, Bool[Array, "P"]]:
    """Gives the masked rows back: their pages lose a reference, the rows become empty, their epochs grow.

    With ``expectation`` (an abort, and any release that does not trust the table) exactly those pages are
    given up whose generation is still the one the request was promised; all others belong to somebody else
    and stay theirs. Without it the table is believed.

    Returns:
      The new state and ``freed_P``: the pages that became free by this.
    """
    columns_BM = _columns(state)
    if expectation is None:
        page_BM, given_BM = state.table_BM, columns_BM < state.used_B[:, None]
    else:
        page_BM, given_BM = expectation.page_BM, columns_BM < expectation.used_B[:, None]
        clipped_BM = jnp.clip(page_BM, 0, state.num_pages - 1)
        given_BM &= state.generation_P[clipped_BM] == expectation.generation_BM
    given_BM &= mask_B[:, None] & (page_BM > PADDING_PAGE) & (page_BM < state.num_pages)
    target_BM = jnp.where(given_BM, page_BM, state.num_pages)
    count_P = jnp.zeros_like(state.references_P).at[target_BM].add(1, mode="drop")
    state, freed_P = _unreference(state, jnp.minimum(count_P, state.references_P))
    return dataclasses.replace(
        state,
        table_BM=jnp.where(mask_B[:, None], PADDING_PAGE, state.table_BM),
        used_B=jnp.where(mask_B, 0, state.used_B),
        length_B=jnp.where(mask_B, 0, state.length_B),
        epoch_B=state.epoch_B + mask_B.astype(jnp.uint32),
    ), freed_P


@jax.jit
def truncate(
    state: PageState, length_B: Int[Array, "B"], mask_B: Bool[Array, "B"]
) -> tuple[PageState, Bool[Array, "B"]]:
    """Cuts masked rows back to ``length_B`` tokens (rejected draft tokens); they keep their pages.

    Returns:
      The new state and ``ok_B``: False, and the row unchanged, if that would not shorten it to 0 or more.
    """
    ok_B = mask_B & (length_B >= 0) & (length_B <= state.length_B)
    return dataclasses.replace(state, length_B=jnp.where(ok_B, length_B, state.length_B)), ok_B


@jax.jit
def pin(
    state: PageState, page_A: Int[Array, "A"], mask_A: Bool[Array, "A"]
) -> tuple[PageState, Bool[Array, "A"]]:
    """Pins masked pages for a transfer: they cannot become free before ``unpin``, whoever releases them.

    Returns:
      The new state and ``ok_A``: False for a page that nobody owns.
    """
    owned_A, page_A = _owned(state, page_A)
    ok_A = owned_A & mask_A
    target_A = jnp.where(ok_A, page_A, state.num_pages)
    return dataclasses.replace(state, pins_P=state.pins_P.at[target_A].add(1, mode="drop")), ok_A


@jax.jit
def unpin(
    state: PageState, page_A: Int[Array, "A"], mask_A: Bool[Array, "A"]
) -> tuple[PageState, Bool[Array, "A"]]:
    """Takes one pin from each masked page; a page without references and pins becomes free.

    Returns:
      The new state and ``ok_A``: False for a page that is not pinned.
    """
    ok_A, count_P = _take(state.pins_P, page_A, mask_A)
    pins_P = state.pins_P - count_P
    freed_P = (count_P > 0) & (pins_P == 0) & (state.references_P == 0)
    return _push(dataclasses.replace(state, pins_P=pins_P), freed_P), ok_A


@jax.jit
def stamp(
    state: PageState, page_A: Int[Array, "A"], mask_A: Bool[Array, "A"], origin: UInt32[Array, ""]
) -> PageState:
    """Records who made the bytes of the masked pages (a transfer, a resumed request)."""
    target_A = jnp.where(mask_A & (page_A > PADDING_PAGE), page_A, state.num_pages)
    return dataclasses.replace(state, origin_P=state.origin_P.at[target_A].set(origin, mode="drop"))


@jax.jit
def counts(state: PageState) -> PageCounts:
    """Returns the number of pages in each state."""
    real_P = jnp.arange(state.num_pages) != PADDING_PAGE
    idle_P = real_P & (state.references_P == 0)
    retired_P = idle_P & (state.pins_P == 0) & (state.generation_P >= LAST_GENERATION)
    return PageCounts(
        free=state.free_count,
        owned=jnp.sum(real_P & (state.references_P == 1)),
        shared=jnp.sum(real_P & (state.references_P > 1)),
        pinned=jnp.sum(idle_P & (state.pins_P > 0)),
        retired=jnp.sum(retired_P),
    )


def pages_of(tokens: Int[Array, "..."], page_size: int) -> Int[Array, "..."]:
    """Returns how many pages hold that many tokens."""
    return (tokens + (page_size - 1)) // page_size


def violations(state: PageState) -> list[str]:
    """Returns the broken invariants of a state, read back to the host; empty for every reachable state.

    Used by tests, by ``experiments.explore_pages`` and by the engine's debug mode; not by a serving step.
    """
    table, used, length, generation, references, pins, free = (
        np.asarray(array).astype(np.int64)
        for array in (
            state.table_BM,
            state.used_B,
            state.length_B,
            state.generation_P,
            state.references_P,
            state.pins_P,
            state.free_P[: int(state.free_count)],
        )
    )
    held = np.zeros_like(references)
    broken = []
    for row, pages in enumerate(table):
        live = pages[: used[row]]
        if np.any(pages[used[row] :] != PADDING_PAGE):
            broken.append(f"row {row}: a column past its {used[row]} pages is not the padding page")
        if np.any((live <= PADDING_PAGE) | (live >= len(references))):
            broken.append(f"row {row}: holds the padding page or a page outside the pool: {live.tolist()}")
        elif len(set(live.tolist())) != len(live):
            broken.append(f"row {row}: holds a page twice: {live.tolist()}")
        else:
            held[live] += 1
        if not 0 <= length[row] <= used[row] * state.page_size:
            broken.append(f"row {row}: {length[row]} tokens in {used[row]} pages")
    if len(set(free.tolist())) != len(free) or PADDING_PAGE in free:
        broken.append(f"the free stack holds a page twice or the padding page: {free.tolist()}")
    if np.any(references < held) or np.any(pins < 0):
        broken.append(f"more rows than references, or negative pins: {references.tolist()}, {pins.tolist()}")
    if np.any((references > 0) != (generation % 2 == 1)):
        broken.append("a generation is odd without an owner, or even with one")
    idle = (references == 0) & (pins == 0) & (generation < LAST_GENERATION)
    idle[PADDING_PAGE] = False
    if set(np.flatnonzero(idle).tolist()) != set(free.tolist()):
        broken.append(f"free stack {sorted(free.tolist())}, idle pages {np.flatnonzero(idle).tolist()}")
    if sum(int(count) for count in jax.tree.leaves(counts(state))) != state.num_pages - 1:
        broken.append("the pages by state do not add up to the pool")
    return broken


def _columns(state: PageState) -> Int[Array, "1 M"]:
    return jnp.arange(state.table_BM.shape[1])[None, :]


def _owned(state: PageState, page_A: Int[Array, "A"]) -> tuple[Bool[Array, "A"], Int[Array, "A"]]:
    """Range first: whether somebody owns each page, and the ids made safe to gather with."""
    in_range_A = (page_A > PADDING_PAGE) & (page_A < state.num_pages)
    page_A = jnp.where(in_range_A, page_A, PADDING_PAGE)
    return in_range_A & (state.references_P[page_A] > 0), page_A


def _take(
    held_P: Int[Array, "P"], page_A: Int[Array, "A"], mask_A: Bool[Array, "A"]
) -> tuple[Bool[Array, "A"], Int[Array, "P"]]:
    """Serves entries in order: each takes one of what its page has. Returns who got one, and the sums."""
    num_pages = held_P.shape[0]
    in_range_A = mask_A & (page_A > PADDING_PAGE) & (page_A < num_pages)
    page_A = jnp.where(in_range_A, page_A, num_pages)
    same_AA = page_A[:, None] == page_A[None, :]
    earlier_A = jnp.sum(jnp.tril(same_AA, -1), axis=1)
    ok_A = in_range_A & (earlier_A < held_P[jnp.where(in_range_A, page_A, PADDING_PAGE)])
    target_A = jnp.where(ok_A, page_A, num_pages)
    return ok_A, jnp.zeros_like(held_P).at[target_A].add(1, mode="drop")


def _grow(
    state: PageState, want_B: Int[Array, "B"], allowed_B: Bool[Array, "B"]
) -> tuple[PageState, Bool[Array, "B"]]:
    """Brings allowed rows to ``want_B`` pages, in row order, from the top of the free stack."""
    num_pages = state.num_pages
    need_B = jnp.maximum(want_B - state.used_B, 0)

    def serve(
        free: Int[Array, ""], row: tuple[Int[Array, ""], Bool[Array, ""]]
    ) -> tuple[Int[Array, ""], tuple[Bool[Array, ""], Int[Array, ""]]]:
        need, allowed = row
        ok = allowed & (need <= free)
        return free - jnp.where(ok, need, 0), (ok, free)

    free_count, (ok_B, free_B) = jax.lax.scan(serve, state.free_count, (need_B, allowed_B))
    take_B = jnp.where(ok_B, need_B, 0)
    rank_BM = _columns(state) - state.used_B[:, None]
    new_BM = (rank_BM >= 0) & (rank_BM < take_B[:, None])
    slot_BM = jnp.where(new_BM, free_B[:, None] - 1 - rank_BM, 0)
    table_BM = jnp.where(new_BM, state.free_P[slot_BM], state.table_BM)
    target_BM = jnp.where(new_BM, table_BM, num_pages)
    return dataclasses.replace(
        state,
        table_BM=table_BM,
        used_B=state.used_B + take_B,
        generation_P=state.generation_P.at[target_BM].add(jnp.uint32(1), mode="drop"),
        references_P=state.references_P.at[target_BM].set(1, mode="drop"),
        origin_P=state.origin_P.at[target_BM].set(state.pool_origin, mode="drop"),
        free_P=jnp.where(jnp.arange(num_pages) < free_count, state.free_P, 0),
        free_count=free_count,
    ), ok_B


def _unreference(state: PageState, count_P: Int[Array, "P"]) -> tuple[PageState, Bool[Array, "P"]]:
    """Takes ``count_P`` references; who loses the last one changes generation, and is free if unpinned."""
    references_P = state.references_P - count_P
    ended_P = (state.references_P > 0) & (references_P == 0)
    freed_P = ended_P & (state.pins_P == 0)
    generation_P = state.generation_P + ended_P.astype(jnp.uint32)
    state = dataclasses.replace(state, references_P=references_P, generation_P=generation_P)
    return _push(state, freed_P), freed_P


def _push(state: PageState, freed_P: Bool[Array, "P"]) -> PageState:
    """Puts freed pages on the stack in order of their ids, except those whose generations are used up."""
    freed_P &= state.generation_P < LAST_GENERATION
    rank_P = jnp.cumsum(freed_P) - 1
    slot_P = jnp.where(freed_P, state.free_count + rank_P, state.num_pages)
    page_P = jnp.arange(state.num_pages, dtype=state.free_P.dtype)
    return dataclasses.replace(
        state,
        free_P=state.free_P.at[slot_P].set(page_P, mode="drop"),
        free_count=state.free_count + jnp.sum(freed_P),
    )
