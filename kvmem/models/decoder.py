"""The forward pass of both models: one function for prefill, decode and several draft tokens.

Layers that repeat run in one ``lax.fori_loop`` over stacked weights with a traced layer index; the cache
pools are carried through and never sliced. Under tensor parallelism the same function runs inside
``jax.shard_map`` on local shards: local head count and widths come from the arrays' shapes, and the
collectives are explicit (see ``collectives``).
"""

import dataclasses
import functools
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvmem.cache import store
from kvmem.models import attention, indexer, layers, moe
from kvmem.models.attention import Form, Implementation, Placement
from kvmem.models.config import ModelConfig
from kvmem.models.params import Params


@typing.no_type_check
@struct.dataclass
class StepBatch:
    """The tokens of one step. Token t of row b has position ``length_B[b] + t``, real if t < num_new_B[b].

    ``length_B`` counts the tokens cached before the step; ``table_BM`` holds the row's physical pages. A dead
    row has ``num_new_B = 0``: it writes to the padding page only, and its logits mean nothing.
    """

    tokens_BT: Int[Array, "B T"]
    num_new_B: Int[Array, "B"]
    length_B: Int[Array, "B"]
    table_BM: Int[Array, "B M"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What differs between layers: a dense or MoE feed-forward, an own indexer or not."""

    dense: bool
    full_indexer: bool


class Stand(NamedTuple):
    """Where a layer's weights stand in their stacks, and its entries in the cache pools."""

    attention: int | Int[Array, ""]
    mlp: int | Int[Array, ""]
    indexer: int | Int[Array, ""]
    cache: int | Int[Array, ""]
    index_cache: int | Int[Array, ""]


class Stream(NamedTuple):
    """The residual stream between sublayers, and its RMSNorm as the sublayer above reads it."""

    hidden_BTD: Float[Array, "B T D"]
    normed_BTD: Float[Array, "B T D"]


@dataclasses.dataclass(frozen=True)
class Loop:
    """``times`` repetitions of the layer kinds in ``body``, from layer ``first`` on."""

    first: int
    times: int
    body: tuple[Kind, ...]


@functools.lru_cache
def schedule(config: ModelConfig) -> tuple[Loop, ...]:
    """The layers as few loops: Kimi K2.6 is 1 + 60, GLM 5.2 is 3 + 18 x (3 shared, 1 full) + 3."""
    kinds = [Kind(i < config.num_dense_layers, config.is_full_indexer(i)) for i in range(config.num_layers)]
    loops = []
    at = 0
    while at < len(kinds):
        covered, period = 1, 1
        for candidate in range(1, (len(kinds) - at) // 2 + 1):
            body = kinds[at : at + candidate]
            times = 1
            while kinds[at + times * candidate : at + (times + 1) * candidate] == body:
                times += 1
            if times > 1 and times * candidate > covered:
                covered, period = times * candidate, candidate
        loops.append(Loop(at, covered // period, tuple(kinds[at : at + period])))
        at += covered
    return tuple(loops)


def cache_shape(config: ModelConfig, *, mtp: bool = False) -> store.CacheShape:
    """The cache that the model needs; with ``mtp`` one more layer and index layer for each MTP layer."""
    extra = config.mtp_layers if mtp else 0
    return store.CacheShape(
        num_layers=config.num_layers + extra,
        num_index_layers=config.num_index_layers + extra if config.indexer else 0,
        latent=config.kv_lora_rank,
        rope=config.qk_rope_head_dim,
        index_dim=config.indexer.head_dim if config.indexer else 0,
    )


def collectives(config: ModelConfig) -> dict[str, int]:
    """How often each collective runs in one forward pass over a mesh axis."""
    return {
        "embedding_sum": 1,
        "attention_sum": config.num_layers,
        "mlp_sum": config.num_layers,
        "logits_gather": 1,
    }


def forward(
    params: Params,
    config: ModelConfig,
    kv: store.KVStore,
    batch: StepBatch,
    *,
    attention: Form = "absorbed",
    implementation: Implementation = "xla",
    axis: str | None = None,
    reduction: layers.Reduction = "nccl",
    all_logits: bool = False,
) -> tuple[Float[Array, "..."], store.KVStore]:
    """One step: caches the new tokens and returns next-token logits.

    Every layer writes its new tokens to the cache first and reads them back through the pages, so prefill
    sees its own tokens as stored. Same function for prefill (T = chunk) and decode (T = 1).

    Args:
      attention: the form of MLA; both give the same result up to rounding.
      implementation: "xla" (any page size, any device), "mosaic" (Hopper kernels) or "mosaic_experts".
      axis: mesh axis of tensor parallelism, inside ``jax.shard_map``; None on a single rank.
      reduction: what sums the layers' parts over the axis: "nccl", "mosaic" (the one-shot kernel) or
        "mosaic_norm" (that kernel with residual add and norm). The kernels need GPUs and ``check_vma=False``;
        embeddings and logits are NCCL's in any case.
      all_logits: f32 [B, T, W] for every token instead of [B, W] for each row's last real one.
    """
    hidden_BTD, kv = backbone(
        params,
        config,
        kv,
        batch,
        form=attention,
        implementation=implementation,
        axis=axis,
        reduction=reduction,
    )
    if not all_logits:
        last_B = jnp.maximum(batch.num_new_B - 1, 0)
        hidden_BTD = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)
    logits_BTW = head(params, hidden_BTD, axis)
    return (logits_BTW if all_logits else logits_BTW[:, 0]), kv


def backbone(
    params: Params,
    config: ModelConfig,
    kv: store.KVStore,
    batch: StepBatch,
    *,
    form: Form = "absorbed",
    implementation: Implementation = "xla",
    axis: str | None = None,
    reduction: layers.Reduction = "nccl",
) -> tuple[Float[Array, "B T D"], store.KVStore]:
    """The hidden state after the last layer and the final norm, and the cache with the new tokens."""
    if implementation not in attention.IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: must be one of {attention.IMPLEMENTATIONS}")
    at = attention.place(
        batch.num_new_B, batch.length_B, batch.table_BM, batch.tokens_BT.shape[1], kv.page_size
    )
    hidden_BTD = embed(params, batch.tokens_BT, axis)
    allowed_BTS = attention.visible(at, batch.table_BM.shape[1] * kv.page_size)
    heads = params["attention"]["w_uk"].shape[1]  # of this rank
    shared = attention.kernel_step(config, kv, at, heads, form) if implementation == "mosaic" else None
    norm_YD = jnp.concatenate([params["attention"]["input_norm"], params["final_norm"][None]])
    step = functools.partial(
        decoder_layer,
        params,
        config,
        at,
        form=form,
        implementation=implementation,
        join=layers.joiner(axis, reduction, hidden_BTD.shape, config.rms_norm_eps),
        norm_YD=norm_YD,
        shared=shared,
    )
    stream = Stream(hidden_BTD, layers.rmsnorm(hidden_BTD, norm_YD[0], config.rms_norm_eps))
    index_layer = 0
    for loop in schedule(config):
        full = sum(kind.full_indexer for kind in loop.body)

        def run(i, carry, loop=loop, full=full, index_layer=index_layer):
            layer, at_index = loop.first + i * len(loop.body), index_layer + i * full
            for kind in loop.body:
                mlp = layer if kind.dense else layer - config.num_dense_layers
                stand = Stand(layer, mlp, at_index, layer, at_index)
                carry = step(kind, stand, *carry)
                layer, at_index = layer + 1, at_index + int(kind.full_indexer)
            return carry

        carry = (stream, kv, allowed_BTS)
        stream, kv, allowed_BTS = (
            lax.fori_loop(0, loop.times, run, carry) if loop.times > 1 else run(0, carry)
        )
        index_layer += full * loop.times
    return stream.normed_BTD, kv


def decoder_layer(
    params: Params,
    config: ModelConfig,
    at: Placement,
    kind: Kind,
    stand: Stand,
    stream: Stream,
    kv: store.KVStore,
    allowed_BTS: Bool[Array, "B T S"],
    *,
    norm_YD: Float[Array, "Y D"],
    form: Form,
    implementation: Implementation,
    join: layers.Join,
    shared: attention.KernelStep | None = None,
) -> tuple[Stream, store.KVStore, Bool[Array, "B T S"]]:
    """One layer, from the weight stacks in ``params``.

    ``norm_YD`` holds the input norms of all layers and the final norm: a layer takes the stream normed with
    its own and leaves it normed with the next. ``join`` is ``layers.joiner``'s. ``allowed_BTS`` is what the
    layer below attended to: a layer without an own indexer uses it again.
    ``shared`` is for the attention kernels; None attends in plain JAX.
    """
    weights = layers.layer_of(params["attention"], stand.attention)
    frequencies = layers.rope_frequencies(config.rope, config.qk_rope_head_dim)
    hidden_BTD, normed_BTD = stream
    with jax.named_scope("attention"):
        if shared is None:
            residual_BTQ, nope_BTHN, rope_BTHR, entry_BTC = attention.project(
                weights, config, at, normed_BTD, frequencies
            )
            kv = store.write_latent(kv, stand.cache, at.page_BT, at.offset_BT, entry_BTC)
        else:
            residual_BTQ, query_BTHC, kv = attention.kernel_project(
                params["attention"], config, kv, stand.attention, stand.cache, at, normed_BTD, shared
            )
        if kind.full_indexer:
            with jax.named_scope("indexer"):
                own = layers.layer_of(params["indexer"], stand.indexer)
                key_BTI = indexer.keys(own, config, at, normed_BTD, frequencies)
                kv = store.write_index(kv, stand.index_cache, at.page_BT, at.offset_BT, key_BTI)
                allowed_BTS = indexer.select(
                    own, config, kv, stand.index_cache, at, normed_BTD, residual_BTQ, frequencies
                )
        if shared is None:
            out_BTA = attention.attend(
                weights, config, kv, stand.cache, at, nope_BTHN, rope_BTHR, allowed_BTS, form
            )
        else:
            out_BTA = attention.kernel_attend(weights, config, kv, stand.cache, at, query_BTHC, shared)
        with jax.named_scope("attention_sum"):
            out_BTD = layers.partial_linear(out_BTA, weights["o"])
            hidden_BTD, normed_BTD = join(
                out_BTD, hidden_BTD, params["attention"]["post_norm"], stand.attention
            )
    with jax.named_scope("mlp"):
        if kind.dense:
            out_BTD = moe.swiglu(normed_BTD, layers.layer_of(params["dense"], stand.mlp))
        else:
            out_BTD = _mixture(params["moe"], config, stand.mlp, normed_BTD, implementation)
        with jax.named_scope("mlp_sum"):
            stream = Stream(*join(out_BTD, hidden_BTD, norm_YD, stand.attention + 1))
    return stream, kv, allowed_BTS


def _mixture(
    stack: Params,
    config: ModelConfig,
    layer: int | Int[Array, ""],
    normed_BTD: Float[Array, "B T D"],
    implementation: Implementation,
) -> Float[Array, "B T D"]:
    x_TD = rearrange(normed_BTD, "B T D -> (B T) D")
    small = layers.layer_of({k: stack[k] for k in ("router", "router_bias", "shared")}, layer)
    if implementation == "xla":
        with jax.named_scope("router"):
            expert_TK, weight_TK = moe.route(small, config, x_TD)
        with jax.named_scope("experts"):
            big = layers.layer_of({k: stack[k] for k in ("gate_up", "down")}, layer)
            routed_TD = moe.experts(x_TD, expert_TK, weight_TK, big["gate_up"], big["down"])
    else:
        with jax.named_scope("experts"):
            routed_TD = moe.kernel_experts(small, config, x_TD, stack["gate_up"], stack["down"], layer)
    with jax.named_scope("shared_expert"):
        shared_TD = moe.swiglu(x_TD, small["shared"])
    return rearrange(routed_TD + shared_TD, "(B T) D -> B T D", B=normed_BTD.shape[0])


def embed(params: Params, tokens_BT: Int[Array, "B T"], axis: str | None) -> Float[Array, "B T D"]:
    """Token embeddings; over a mesh axis each rank looks up its part of the vocabulary; the sum is exact."""
    table_WD = params["embed"]
    if axis is None:
        return table_WD.at[tokens_BT].get(mode="clip")
    local_BT = tokens_BT - lax.axis_index(axis) * table_WD.shape[0]
    mine_BT = (local_BT >= 0) & (local_BT < table_WD.shape[0])
    found_BTD = table_WD.at[local_BT].get(mode="clip", wrap_negative_indices=False)
    own_BTD = jnp.where(mine_BT[..., None], found_BTD, jnp.zeros((), found_BTD.dtype))
    with jax.named_scope("embedding_sum"):
        return layers.reduce_sum(own_BTD, axis)


def head(params: Params, hidden_BTD: Float[Array, "B T D"], axis: str | None) -> Float[Array, "B T W"]:
    """Logits in f32 over the whole vocabulary, gathered over the mesh axis."""
    with jax.named_scope("head"):
        logits_BTW = layers.partial_linear(hidden_BTD, params["lm_head"])
        if axis is None:
            return logits_BTW
        with jax.named_scope("logits_gather"):
            return lax.all_gather(logits_BTW, axis, axis=2, tiled=True, to="invarying")
