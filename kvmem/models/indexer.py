"""GLM's sparse-attention indexer (DSA): which cached tokens a token attends to.

``score[t, s] = sum_j w[t, j] relu(q[t, j] . k[s] / sqrt(I))`` with w from the hidden state and q from the
query residual of MLA; the ``topk`` best positions are kept (DeepSeek-V3.2; modeling_glm_moe_dsa of
transformers). Ties go to the lowest position. Head weights and scores are f32: rounding w to bf16 reorders
the selection. Hadamard rotation is orthogonal, so it is left out.
"""

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvmem.cache import store
from kvmem.models import layers
from kvmem.models.attention import Placement, visible
from kvmem.models.config import ModelConfig

# Scores per head are made for so many elements [B, T, J, S] at a time at most (256 MiB of f32).
MAX_SCORE_ELEMENTS = 1 << 26


def keys(
    weights: dict,
    config: ModelConfig,
    at: Placement,
    normed_BTD: Float[Array, "B T D"],
    frequencies: np.ndarray,
) -> Float[Array, "B T I"]:
    """The index key that each new token caches: layer-normed, its first R values rotated."""
    key_BTI = layers.layernorm(
        layers.linear(normed_BTD, weights["wk"]), weights["k_norm"], weights["k_norm_bias"]
    )
    return _rotate_first(key_BTI, at, config.qk_rope_head_dim, frequencies)


def select(
    weights: dict,
    config: ModelConfig,
    kv: store.KVStore,
    index_layer: int | Int[Array, ""],
    at: Placement,
    normed_BTD: Float[Array, "B T D"],
    residual_BTQ: Float[Array, "B T Q"],
    frequencies: np.ndarray,
) -> Bool[Array, "B T S"]:
    """True at the ``topk`` visible cached positions with the best scores, at all where there are fewer."""
    assert config.indexer is not None
    heads, width = config.indexer.num_heads, config.indexer.head_dim
    query_BTJI = rearrange(layers.linear(residual_BTQ, weights["wq_b"]), "B T (J I) -> B T J I", I=width)
    query_BTJI = _rotate_first(query_BTJI, at, config.qk_rope_head_dim, frequencies)
    weight_BTJ = layers.einsum(
        "BTD,JD->BTJ", normed_BTD.astype(jnp.float32), weights["weights"].astype(jnp.float32)
    )
    key_BSI = store.gather_index(kv, index_layer, at.table_BM, query_BTJI.dtype, at.total_B)
    score_BTS = scores(query_BTJI, weight_BTJ * heads**-0.5, key_BSI)
    return top(score_BTS, visible(at, key_BSI.shape[1]), config.indexer.topk)


def scores(
    query_BTJI: Float[Array, "B T J I"], weight_BTJ: Float[Array, "B T J"], key_BSI: Float[Array, "B S I"]
) -> Float[Array, "B T S"]:
    """Index scores in f32, made in chunks of the context when all heads' scores at once would be large."""
    _, context, width = key_BSI.shape
    chunk = context
    while chunk % 2 == 0 and query_BTJI.size // width * chunk > MAX_SCORE_ELEMENTS:
        chunk //= 2

    def score(key_BUI: Float[Array, "B U I"]) -> Float[Array, "B T U"]:
        dot_BTJU = layers.einsum("BTJI,BUI->BTJU", query_BTJI, key_BUI) * width**-0.5
        return layers.einsum("BTJ,BTJU->BTU", weight_BTJ, jnp.maximum(dot_BTJU, 0.0))

    if chunk == context:
        return score(key_BSI)
    chunks = rearrange(key_BSI, "B (A U) I -> A B U I", U=chunk)
    return rearrange(lax.map(score, chunks), "A B T U -> B T (A U)")


def top(
    score_BTS: Float[Array, "B T S"], visible_BTS: Bool[Array, "B T S"], topk: int
) -> Bool[Array, "B T S"]:
    """A mask of the ``topk`` best visible positions; of equal scores the lowest positions win."""
    if score_BTS.shape[-1] <= topk:
        return visible_BTS
    # -0.0 (a negative weight times relu's 0) must tie with 0.0, and top_k orders them.
    score_BTS = jnp.where(score_BTS == 0.0, 0.0, score_BTS)
    best_BTX = lax.top_k(jnp.where(visible_BTS, score_BTS, -jnp.inf), topk)[1]
    rows, steps, _ = score_BTS.shape
    row_B11, step_1T1 = jnp.arange(rows)[:, None, None], jnp.arange(steps)[None, :, None]
    row_BTX, step_BTX = jnp.broadcast_to(row_B11, best_BTX.shape), jnp.broadcast_to(step_1T1, best_BTX.shape)
    chosen_BTS = jnp.zeros(score_BTS.shape, bool).at[row_BTX, step_BTX, best_BTX].set(True)
    return chosen_BTS & visible_BTS


def _rotate_first(
    x: Float[Array, "B T *J I"], at: Placement, width: int, frequencies: np.ndarray
) -> Float[Array, "B T *J I"]:
    turned = layers.rotate(x[..., :width], at.position_BT, frequencies)
    return jnp.concatenate([turned, x[..., width:]], axis=-1)
