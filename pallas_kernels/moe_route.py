"""Sort the slots (token, chosen expert) of a batch by expert and cut them into blocks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

PAIRS = 8192  # slots up to which comparing all pairs beats a sort (20 against 38 us)


class Routing(NamedTuple):
    """Blocks of slots. Arrays are i32.

    Attributes:
        token: [T * K] token of each slot, slots sorted by expert.
        block: [4, blocks] the expert (counted over all layers), first slot and number of slots of each
            block; the last row repeats how many blocks there are. Columns past that number mean nothing.
        position: [T, K] sorted position of a token's k-th choice.
    """

    token: jax.Array
    block: jax.Array
    position: jax.Array


def num_blocks(slots: int, num_experts: int, tokens: int) -> int:
    """Most blocks that any routing of ``slots`` slots can make."""
    return min(slots, num_experts + slots // tokens)


def route(expert_TK: Int32[Array, "T K"], layer: Array | int, *, num_experts: int, tokens: int) -> Routing:
    """Sort slots by expert and cut them into blocks; up to thousands of slots with reductions only."""
    rows, choices = expert_TK.shape
    slots = rows * choices
    layer = jnp.asarray(layer, jnp.int32)
    blocks = num_blocks(slots, num_experts, tokens)
    build = _route_by_slot if slots <= 1024 else _route_by_expert
    token, position, block = build(expert_TK, layer * num_experts, blocks, num_experts, tokens)
    return Routing(token, block, position.reshape(rows, choices))


def single(expert_TK) -> Routing:
    """One token: the kernel counts its slots itself, ``block`` is only their experts."""
    slot = jnp.arange(expert_TK.shape[1], dtype=jnp.int32)
    return Routing(jnp.zeros_like(slot), expert_TK[0], slot[None])


def _route_by_slot(expert_TK, first_expert, blocks, num_experts, tokens):
    """Reductions over pairs of slots only: the fewest launches."""
    expert = expert_TK.reshape(-1)
    slot = jnp.arange(expert.size, dtype=jnp.int32)
    same = expert[None, :] == expert[:, None]
    before = same & (slot[None, :] < slot[:, None])
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    position = jnp.sum((expert[None, :] < expert[:, None]) | before, axis=1, dtype=jnp.int32)
    size = jnp.minimum(jnp.sum(same, axis=1, dtype=jnp.int32) - rank, tokens)
    leads = rank % tokens == 0
    block = jnp.sum(leads[None, :] & (position[None, :] < position[:, None]), axis=1, dtype=jnp.int32)
    chosen = leads[None, :] & (block[None, :] == jnp.arange(blocks, dtype=jnp.int32)[:, None])
    fields = jnp.stack([expert + first_expert, position, size, jnp.ones_like(size)])
    last = (jnp.arange(4) == 3)[:, None, None]  # every block's column counts all of them
    picked = jnp.where(last, leads[None, None, :], chosen[None])
    block = jnp.sum(jnp.where(picked, fields[:, None, :], 0), axis=2, dtype=jnp.int32)
    at = position[None, :] == slot[:, None]
    token = jnp.sum(jnp.where(at, slot[None, :] // expert_TK.shape[1], 0), axis=1, dtype=jnp.int32)
    return token, position, block


def _route_by_expert(expert_TK, first_expert, blocks, num_experts, tokens):
    """Reductions over (experts, slots), and over pairs of slots until a sort is faster: for many slots."""
    choices = expert_TK.shape[1]
    expert = expert_TK.reshape(-1)
    slot = jnp.arange(expert.size, dtype=jnp.int32)
    which = jnp.arange(num_experts, dtype=jnp.int32)
    count_E = jnp.sum(expert[None, :] == which[:, None], axis=1, dtype=jnp.int32)
    before = which[None, :] < which[:, None]
    first_E = jnp.sum(jnp.where(before, count_E[None, :], 0), axis=1, dtype=jnp.int32)
    blocks_E = (count_E + (tokens - 1)) // tokens
    block_E = jnp.sum(jnp.where(before, blocks_E[None, :], 0), axis=1, dtype=jnp.int32)
    if expert.size <= PAIRS:
        earlier = (expert[None, :] == expert[:, None]) & (slot[None, :] < slot[:, None])
        position = first_E[expert] + jnp.sum(earlier, axis=1, dtype=jnp.int32)
        token = jnp.zeros_like(slot).at[position].set(slot // choices, unique_indices=True)
    else:
        _, order = lax.sort((expert, slot), num_keys=1, is_stable=True)
        position = jnp.zeros_like(slot).at[order].set(slot, unique_indices=True)
        token = order // choices
    index = jnp.arange(blocks, dtype=jnp.int32)
    owner = jnp.sum(block_E[None, :] <= index[:, None], axis=1, dtype=jnp.int32) - 1
    done = (index - block_E[owner]) * tokens
    size = jnp.clip(count_E[owner] - done, 0, tokens)
    count = jnp.broadcast_to(block_E[-1] + blocks_E[-1], (blocks,))
    return token, position, jnp.stack([owner + first_expert, first_E[owner] + done, size, count])
