"""Mixture of experts: sigmoid router with a selection-only bias, routed experts, shared expert.

(DeepSeek-V3, arXiv 2412.19437, section 2.1.2; the ``noaux_tc`` top-k of both published models.)
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from kvmem.formats.qtensor import QTensor
from kvmem.models import layers
from kvmem.models.config import ModelConfig
from pallas_kernels import int4_moe


def swiglu(x: Float[Array, "... D"], weights: dict) -> Float[Array, "... D"]:
    """``(silu(x W_gate) * x W_up) W_down`` of the local part of the width, f32, to be summed over ranks."""
    gate_up_OD = rearrange(layers.plain(weights["gate_up"], x.dtype), "c F D -> (c F) D")
    both = rearrange(layers.linear(x, gate_up_OD), "... (c F) -> ... c F", c=2)
    return layers.partial_linear(_gated(both), weights["down"])


def _gated(both: Float[Array, "... 2 F"]) -> Float[Array, "... F"]:
    return jax.nn.silu(both[..., 0, :]) * both[..., 1, :]


def router_logits(weights: dict, x_TD: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """The router's product, in f32."""
    return layers.einsum("TD,ED->TE", x_TD.astype(jnp.float32), weights["router"].astype(jnp.float32))


def route(
    weights: dict, config: ModelConfig, x_TD: Float[Array, "T D"]
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Experts of each token and their weights (f32, scaled by ``routed_scaling_factor``).

    All in f32. The bias takes part in selection only, of groups (by the sum of their two best) and of
    experts; the weights are the unbiased sigmoids, normalised to sum 1.
    """
    affinity_TE = jax.nn.sigmoid(router_logits(weights, x_TD))
    biased_TE = affinity_TE + jnp.broadcast_to(weights["router_bias"], affinity_TE.shape)
    if config.topk_group < config.n_group:
        biased_TE = _keep_groups(biased_TE, config)
    expert_TK = lax.top_k(biased_TE, config.experts_per_token)[1]
    weight_TK = jnp.take_along_axis(affinity_TE, expert_TK, axis=1)
    if config.norm_topk_prob:
        weight_TK = weight_TK / (jnp.sum(weight_TK, axis=1, keepdims=True) + 1e-20)
    return expert_TK, weight_TK * config.routed_scaling_factor


def _keep_groups(biased_TE: Float[Array, "T E"], config: ModelConfig) -> Float[Array, "T E"]:
    grouped_TgA = rearrange(biased_TE, "T (group A) -> T group A", group=config.n_group)
    best_Tg2 = lax.top_k(grouped_TgA, min(2, grouped_TgA.shape[-1]))[0]
    kept_Tk = lax.top_k(jnp.sum(best_Tg2, axis=-1), config.topk_group)[1]
    keep_Tg = jnp.any(jax.nn.one_hot(kept_Tk, config.n_group, dtype=bool), axis=1)
    keep_TgA = jnp.broadcast_to(keep_Tg[..., None], grouped_TgA.shape)
    return rearrange(jnp.where(keep_TgA, grouped_TgA, -jnp.inf), "T group A -> T (group A)")


def kernel_experts(
    weights: dict,
    config: ModelConfig,
    x_TD: Float[Array, "T D"],
    gate_up: Array | QTensor,
    down: Array | QTensor,
    layer: int | Int[Array, ""],
) -> Float[Array, "T D"]:
    """``route`` and ``experts`` as Mosaic kernels, from the stacks [Y, E, 2, F, D] and [Y, E, D, F].

    Raises:
      NotImplementedError: experts that are not held as INT4, activations that are not bf16, a router that
        selects groups first, or as the kernels.
    """
    if not isinstance(gate_up, QTensor) or not isinstance(down, QTensor) or gate_up.storage != "int4_group":
        raise NotImplementedError("the experts' kernel reads INT4 weights; use implementation='xla'")
    if x_TD.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the experts' kernel takes bf16 activations, not {x_TD.dtype}")
    if config.topk_group < config.n_group:
        raise NotImplementedError(
            f"the router's kernel selects no groups first: topk_group={config.topk_group} of "
            f"n_group={config.n_group}; use implementation='xla'"
        )
    merged = "Y E gate_up F D -> Y E (gate_up F) D"
    out_TD = int4_moe.int4_moe_of_logits(
        x_TD,
        router_logits(weights, x_TD),
        weights["router_bias"].astype(jnp.float32),
        rearrange(gate_up.data, merged),
        rearrange(gate_up.scale, merged),
        down.data,
        down.scale,
        layer,
        choices=config.experts_per_token,
        factor=config.routed_scaling_factor,
        normalise=config.norm_topk_prob,
        group=gate_up.group[1],
    )
    return out_TD.astype(jnp.float32)


def experts(
    x_TD: Float[Array, "T D"],
    expert_TK: Int[Array, "T K"],
    weight_TK: Float[Array, "T K"],
    gate_up: Array | QTensor,
    down: Array | QTensor,
) -> Float[Array, "T D"]:
    """Weighted sum of each token's experts over the local part of their width, f32, in plain JAX.

    Every expert runs on every token and the weights select: no sort and no capacity, so a token's result does
    not depend on its neighbours. That costs E / K times the arithmetic; the kernel does not pay it.
    ``gate_up`` is [E, 2, F, D] and ``down`` [E, D, F].
    """
    num_experts = gate_up.shape[0]
    chosen_TKE = jax.nn.one_hot(expert_TK, num_experts, dtype=jnp.float32)
    weight_TE = layers.einsum("TK,TKE->TE", weight_TK, chosen_TKE)
    both_TEcF = layers.einsum("TD,EcFD->TEcF", x_TD, layers.plain(gate_up, x_TD.dtype)).astype(x_TD.dtype)
    hidden_TEF = _gated(both_TEcF)
    out_TED = layers.einsum("TEF,EDF->TED", hidden_TEF, layers.plain(down, x_TD.dtype))
    return layers.einsum("TE,TED->TD", weight_TE, out_TED)
