"""The kernels' operations in plain JAX: the CPU path, and the baseline that a kernel must beat."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int, Int4


def int4_moe(
    x_TD: Float[Array, "T D"],
    expert_TK: Int[Array, "T K"],
    weight_TK: Float[Array, "T K"],
    w_gate_up: Int4[Array, "Y E F2 D"],
    s_gate_up: BFloat16[Array, "Y E F2 G"],
    w_down: Int4[Array, "Y E D F"],
    s_down: BFloat16[Array, "Y E D H"],
    layer: Array | int,
    *,
    group: int,
) -> Float[Array, "T D"]:
    """Routed INT4 experts (see ``int4_moe.int4_moe``): every expert on every token, weights of 0 select.

    A scan over the experts keeps one of them dequantised at a time. Sums in f32; the hidden activation, the
    router weight and the result are rounded to x's dtype.
    """

    def take(stack: Array) -> Array:
        return lax.dynamic_index_in_dim(stack, jnp.asarray(layer, jnp.int32), keepdims=False)

    def dequantize(w: Array, s: Array) -> Array:
        split = w.astype(jnp.float32).reshape(*s.shape, group) * s.astype(jnp.float32)[..., None]
        return split.reshape(w.shape)

    def step(total_TD, expert):
        index, w_up, s_up, w_out, s_out = expert
        both_TF2 = jnp.einsum("TD,FD->TF", x_TD.astype(jnp.float32), dequantize(w_up, s_up))
        gate_TF, up_TF = jnp.split(both_TF2, 2, axis=1)
        hidden_TF = (jax.nn.silu(gate_TF) * up_TF).astype(x_TD.dtype).astype(jnp.float32)
        out_TD = jnp.einsum("TF,DF->TD", hidden_TF, dequantize(w_out, s_out))
        share_T = jnp.sum(jnp.where(expert_TK == index, weight_TK, 0.0), axis=1)
        return total_TD + out_TD * share_T[:, None], None

    experts = jnp.arange(w_gate_up.shape[1], dtype=jnp.int32)
    stacks = (take(w_gate_up), take(s_gate_up), take(w_down), take(s_down))
    total_TD, _ = lax.scan(step, jnp.zeros(x_TD.shape, jnp.float32), (experts, *stacks))
    return total_TD.astype(x_TD.dtype)
