"""Slots (token, chosen expert) sorted by expert and cut into blocks: what that is, and in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class Routing(NamedTuple):
    """Blocks of slots. Arrays are i32.

    Attributes:
        token: [T * K] token of each slot, slots sorted by expert.
        block: [4, blocks] the expert (counted over all layers), first slot and number of slots of each block;
            ``block[3, 0]`` is how many blocks there are. What else the array holds means nothing.
        position: [T, K] sorted position of a token's k-th choice.
    """

    token: jax.Array
    block: jax.Array
    position: jax.Array


def num_blocks(slots: int, num_experts: int, tokens: int) -> int:
    """Most blocks that any routing of ``slots`` slots can make."""
    return min(slots, num_experts + slots // tokens)


def single(expert_TK: Int32[Array, "T K"]) -> Routing:
    """One token: the kernel counts its slots itself, ``block`` is only their experts."""
    slot = jnp.arange(expert_TK.shape[1], dtype=jnp.int32)
    return Routing(jnp.zeros_like(slot), expert_TK[0], slot[None])


def route(expert_TK: Int32[Array, "T K"], layer: Array | int, *, num_experts: int, tokens: int) -> Routing:
    """Reductions over pairs of slots: for a few hundred of them."""
    rows, choices = expert_TK.shape
    blocks = num_blocks(rows * choices, num_experts, tokens)
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
    owner = expert + jnp.asarray(layer, jnp.int32) * num_experts
    fields = jnp.stack([owner, position, size, jnp.ones_like(size)])
    last = (jnp.arange(4) == 3)[:, None, None]  # every block's column counts all of them
    picked = jnp.where(last, leads[None, None, :], chosen[None])
    block = jnp.sum(jnp.where(picked, fields[:, None, :], 0), axis=2, dtype=jnp.int32)
    at = position[None, :] == slot[:, None]
    token = jnp.sum(jnp.where(at, slot[None, :] // choices, 0), axis=1, dtype=jnp.int32)
    return Routing(token, block, position.reshape(rows, choices))
