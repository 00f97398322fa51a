"""What a request was promised (page and generation), and an optional digest of what a page holds.

A tag is two uint32: the physical page and its generation. The request's side is ``Expectation``, recorded
when pages are handed out and never derived from the table again; the pool's side is the page id itself and
``PageState.generation_P``. Tags are compared exactly. A counter cannot collide: a stale tag of the same page
is told apart until the 2^31st reallocation, where the page is retired. A *random* value in place of the
generation would pass with odds 2^-32, and in place of both words with 2^-64.

The digest is for what a tag cannot see: changed bytes in a page that is still yours. It is taken over the
stored bytes (values, scales, rope, index keys, and the layer's scale), each salted with where it stands
(array, layer, offset in the page, column), in two lanes of 32 bits. One changed token changes its page's
digest with certainty if its lane sums change, which every single flipped bit does (keys are odd); other
changes pass with odds 2^-64. It is a checksum against faults, not a signature against an adversary.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from kvmem.cache.pages import PADDING_PAGE, Expectation, PageState
from kvmem.cache.store import POOLS, KVStore

__all__ = [
    "TAG_BYTES",
    "DigestTable",
    "Expectation",
    "clear",
    "empty",
    "empty_digests",
    "extend",
    "page_digest",
    "restore",
    "seal",
    "seal_rows",
]

TAG_BYTES = 8


def empty(num_rows: int, max_pages: int) -> Expectation:
    """Returns the expectation of rows to which nothing has been promised."""
    return Expectation(
        page_BM=jnp.full((num_rows, max_pages), PADDING_PAGE, jnp.int32),
        generation_BM=jnp.zeros((num_rows, max_pages), jnp.uint32),
        used_B=jnp.zeros(num_rows, jnp.int32),
        epoch_B=jnp.zeros(num_rows, jnp.uint32),
    )


@jax.jit
def extend(expectation: Expectation, state: PageState, mask_B: Bool[Array, "B"]) -> Expectation:
    """Records the pages that masked rows have received since; what was recorded before stays as it was.

    Called right after ``append``, ``allocate`` or ``share``, on the state they returned. A row to which
    nothing was promised yet also takes the row's epoch.
    """
    column_1M = jnp.arange(expectation.page_BM.shape[1])[None, :]
    new_BM = (
        (column_1M >= expectation.used_B[:, None]) & (column_1M < state.used_B[:, None]) & mask_B[:, None]
    )
    fresh_B = mask_B & (expectation.used_B == 0)
    return Expectation(
        page_BM=jnp.where(new_BM, state.table_BM, expectation.page_BM),
        generation_BM=jnp.where(new_BM, state.generation_P[state.table_BM], expectation.generation_BM),
        used_B=jnp.where(mask_B, jnp.maximum(expectation.used_B, state.used_B), expectation.used_B),
        epoch_B=jnp.where(fresh_B, state.epoch_B, expectation.epoch_B),
    )


@jax.jit
def clear(expectation: Expectation, mask_B: Bool[Array, "B"]) -> Expectation:
    """Forgets masked rows; called with the release that gives them back, after it."""
    return Expectation(
        page_BM=jnp.where(mask_B[:, None], PADDING_PAGE, expectation.page_BM),
        generation_BM=jnp.where(mask_B[:, None], jnp.uint32(0), expectation.generation_BM),
        used_B=jnp.where(mask_B, 0, expectation.used_B),
        epoch_B=expectation.epoch_B,
    )


@typing.no_type_check
@struct.dataclass
class DigestTable:
    """The digest of each page's first ``tokens_P`` tokens; 0 tokens: nothing is sealed."""

    digest_P2: UInt32[Array, "P 2"]
    tokens_P: Int[Array, "P"]


def empty_digests(num_pages: int) -> DigestTable:
    """Returns a table in which no page is sealed."""
    return DigestTable(
        digest_P2=jnp.zeros((num_pages, 2), jnp.uint32), tokens_P=jnp.zeros(num_pages, jnp.int32)
    )


@jax.jit
def page_digest(kv: KVStore, page_A: Int[Array, "A"], tokens_A: Int[Array, "A"]) -> UInt32[Array, "A 2"]:
    """Returns the digest of the first ``tokens_A`` tokens of each page, over all layers and arrays."""
    live_AZ = jnp.arange(kv.page_size)[None, :] < tokens_A[:, None]
    total_A2 = jnp.zeros((page_A.shape[0], 2), jnp.uint32)
    for number, name in enumerate(POOLS):
        pool = getattr(kv, name)
        if pool is None:
            continue
        scale_Y = kv.scale_Y if name == "values" else None

        def add_layer(
            layer: Int[Array, ""],
            total_A2: UInt32[Array, "A 2"],
            pool: Array = pool,
            number: int = number,
            scale_Y: Array | None = scale_Y,
        ) -> UInt32[Array, "A 2"]:
            word_AZW = _words(pool.at[layer, page_A].get(mode="clip", wrap_negative_indices=False))
            salt = _mix(layer.astype(jnp.uint32) + jnp.uint32(number * 4099 + 1))
            if scale_Y is not None:
                salt ^= _mix(lax.bitcast_convert_type(scale_Y[layer], jnp.uint32))
            return total_A2 + _sum_tokens(word_AZW, live_AZ, salt, number)

        total_A2 = lax.fori_loop(0, pool.shape[0], add_layer, total_A2)
    return total_A2


@jax.jit
def seal(
    digests: DigestTable,
    kv: KVStore,
    page_A: Int[Array, "A"],
    tokens_A: Int[Array, "A"],
    mask_A: Bool[Array, "A"],
) -> DigestTable:
    """Takes the digest of masked pages as they are now; called right after the write or the conversion."""
    return restore(digests, page_A, page_digest(kv, page_A, tokens_A), tokens_A, mask_A)


@jax.jit
def restore(
    digests: DigestTable,
    page_A: Int[Array, "A"],
    digest_A2: UInt32[Array, "A 2"],
    tokens_A: Int[Array, "A"],
    mask_A: Bool[Array, "A"],
) -> DigestTable:
    """Records digests taken earlier for bytes that travelled (a resumed row): damage on the way shows."""
    num_pages = digests.tokens_P.shape[0]
    target_A = jnp.where(mask_A & (page_A > PADDING_PAGE), page_A, num_pages)
    return DigestTable(
        digest_P2=digests.digest_P2.at[target_A].set(digest_A2, mode="drop"),
        tokens_P=digests.tokens_P.at[target_A].set(tokens_A, mode="drop"),
    )


def seal_rows(
    digests: DigestTable,
    kv: KVStore,
    state: PageState,
    start_B: Int[Array, "B"],
    mask_B: Bool[Array, "B"],
    *,
    new_tokens: int,
) -> DigestTable:
    """Seals the pages into which masked rows wrote positions ``start_B`` to ``length_B``.

    Sound only if the same step checked these pages before it wrote: the arrays cannot change in between.

    Args:
      new_tokens: the most tokens that a row wrote (static); it bounds the pages that are read.
    """
    page_size = state.page_size
    count = min(-(-(new_tokens - 1) // page_size) + 1, state.table_BM.shape[1])
    logical_BA = start_B[:, None] // page_size + jnp.arange(count)[None, :]
    tokens_BA = jnp.clip(state.length_B[:, None] - logical_BA * page_size, 0, page_size)
    mask_BA = mask_B[:, None] & (tokens_BA > 0) & (state.length_B > start_B)[:, None]
    page_BA = jnp.take_along_axis(
        state.table_BM, jnp.minimum(logical_BA, state.table_BM.shape[1] - 1), axis=1
    )
    page_BA = jnp.where(mask_BA, page_BA, PADDING_PAGE)
    return seal(digests, kv, page_BA.reshape(-1), tokens_BA.reshape(-1), mask_BA.reshape(-1))


def _words(page_AZ: Array) -> UInt32[Array, "A Z W"]:
    """Raw storage as uint32, one word a stored element."""
    if page_AZ.dtype == jnp.float32:
        page_AZ = lax.bitcast_convert_type(page_AZ, jnp.uint32)
    return page_AZ.astype(jnp.uint32).reshape(*page_AZ.shape[:2], -1)


def _sum_tokens(
    word_AZW: UInt32[Array, "A Z W"], live_AZ: Bool[Array, "A Z"], salt: UInt32[Array, ""], number: int
) -> UInt32[Array, "A 2"]:
    width, page_size = word_AZW.shape[2], word_AZW.shape[1]
    column_W = jnp.arange(width, dtype=jnp.uint32)
    offset_Z = jnp.arange(page_size, dtype=jnp.uint32)
    lanes = []
    for lane in (1, 2):
        key_W = _mix(column_W * jnp.uint32(2) + jnp.uint32(number * 65_537 + lane * 16_777_259)) | jnp.uint32(
            1
        )
        salt_Z = _mix(offset_Z + salt * jnp.uint32(2 * lane + 1))
        token_AZ = _mix(jnp.sum(word_AZW * key_W[None, None], axis=2, dtype=jnp.uint32) + salt_Z[None])
        lanes.append(jnp.sum(jnp.where(live_AZ, token_AZ, jnp.uint32(0)), axis=1, dtype=jnp.uint32))
    return jnp.stack(lanes, axis=1)


def _mix(x: UInt32[Array, "*A"]) -> UInt32[Array, "*A"]:
    """The finaliser of MurmurHash3: a bijection of 32-bit words; every input bit moves every output bit."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
