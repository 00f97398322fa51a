"""Which thread block attends to which pages of which row: a pure function of the rows' lengths."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

PAGE = 64
MAX_COLUMNS = 64  # query columns of one block
NARROW = (
    16  # up to so many columns ``mla_decode`` puts on wgmma's N side; ``mla_wide`` takes 64 on its M side
)


class Schedule(NamedTuple):
    """Items of work, ``item_I3`` (row, first page, end page), and where those of a block and a row begin."""

    item_I3: Int[Array, "I 3"]
    block_first: Int[Array, "blocks+1"]
    row_first: Int[Array, "rows+1"]


def column_groups(tokens: int, heads: int) -> tuple[int, int]:
    """(groups, columns of a group): the query columns of a row, padded to 8, 16 or groups of MAX_COLUMNS."""
    columns = tokens * heads
    if columns <= NARROW:
        return 1, -(-columns // 8) * 8
    return -(-columns // MAX_COLUMNS), MAX_COLUMNS


def make_schedule(
    length_B: Int[Array, "B"],
    *,
    max_pages: int,
    groups: int = 1,
    blocks: int = 132,
    batch_invariant: bool = False,
) -> Schedule:
    """Cuts the pages of all rows into items. A pure function of the lengths.

    Args:
      length_B: tokens to attend to, as ``mla_decode`` takes them.
      max_pages: M, the width of the page table.
      groups: column groups of a row (``column_groups``); each is a row of its own here.
      blocks: thread blocks that share the work.
      batch_invariant: cut a row at fixed multiples of pages, whatever else the batch holds.
    """
    pages_R = jnp.repeat(-(-length_B // PAGE), groups)
    rows = pages_R.shape[0]
    stop_R = jnp.cumsum(pages_R)
    start_R = stop_R - pages_R
    split = max(32, -(-max_pages // 64))
    per_block = jnp.maximum(-(-stop_R[-1] // blocks), 1)
    if batch_invariant:
        count_R = -(-pages_R // split)
        items = rows * -(-max_pages // split)
    else:
        count_R = jnp.where(pages_R > 0, (stop_R - 1) // per_block - start_R // per_block + 1, 0)
        items = rows + blocks
    item_stop_R = jnp.cumsum(count_R)
    item_start_R = item_stop_R - count_R
    item_I = jnp.arange(items, dtype=jnp.int32)
    row_I = jnp.sum(item_I[:, None] >= item_stop_R[None, :], axis=1, dtype=jnp.int32)
    row_I = jnp.minimum(row_I, rows - 1)
    nth_I = item_I - item_start_R[row_I]
    if batch_invariant:
        begin_I = nth_I * split
        end_I = jnp.minimum(begin_I + split, pages_R[row_I])
        block_I = item_I * blocks // jnp.maximum(item_stop_R[-1], 1)
    else:
        block_I = start_R[row_I] // per_block + nth_I
        begin_I = jnp.maximum(start_R[row_I], block_I * per_block) - start_R[row_I]
        end_I = jnp.minimum(stop_R[row_I], (block_I + 1) * per_block) - start_R[row_I]
    block_I = jnp.where(item_I < item_stop_R[-1], block_I, blocks)
    each = jnp.arange(blocks + 1, dtype=jnp.int32)
    return Schedule(
        item_I3=jnp.stack([row_I, begin_I, end_I], axis=1),
        block_first=jnp.sum(block_I[None, :] < each[:, None], axis=1, dtype=jnp.int32),
        row_first=jnp.concatenate([item_start_R, item_stop_R[-1:]]),
    )
