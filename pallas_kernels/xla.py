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


def _gather_latents(pool, layer, table_BM, dtype, scale) -> Float[Array, "B S C"]:
    """The pages of each row, in order, dequantised to ``dtype``."""
    rows = table_BM.shape[0]

    def pages(array, stored):
        gathered = array[layer, table_BM]
        if stored is not None:
            gathered = lax.bitcast_convert_type(gathered, stored)
        return gathered.reshape(rows, -1, array.shape[-1])

    if pool.values.dtype == jnp.uint16:
        return pages(pool.values, jnp.bfloat16).astype(dtype)
    latent_BSC = pages(pool.values, jnp.float8_e4m3fn).astype(dtype)
    if pool.scales is None:
        return latent_BSC * jnp.asarray(1.0 if scale is None else scale, dtype)
    scales_BSC = jnp.repeat(pages(pool.scales, None).astype(dtype), 128, axis=-1)
    return jnp.concatenate([latent_BSC * scales_BSC, pages(pool.rope, jnp.bfloat16).astype(dtype)], axis=-1)


def mla_decode(
    q_BTHC: Float[Array, "B T H C"],
    pool,
    layer: Int[Array, ""] | int,
    table_BM: Int[Array, "B M"],
    length_B: Int[Array, "B"],
    *,
    softmax_scale: float,
    layout: str,
    scale=None,
    num_new_B: Int[Array, "B"] | None = None,
    out_dtype=jnp.float32,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H"]]:
    """What ``pallas_kernels.mla_decode.mla_decode`` computes, for any page size, gathering every page in f32.

    ``layout`` only has to agree with the arrays of ``pool``. Raises ValueError where it does not.
    """
    arrays = {"bf16": (jnp.uint16, False), "fp8_flat": (jnp.uint8, False), "fp8_656": (jnp.uint8, True)}
    if arrays.get(layout) != (pool.values.dtype, pool.scales is not None):
        raise ValueError(f"layout={layout!r} does not describe a pool of {pool.values.dtype} values")
    tokens = q_BTHC.shape[1]
    latent_BSC = _gather_latents(pool, layer, table_BM, jnp.float32, scale)
    position_S = jnp.arange(latent_BSC.shape[1], dtype=jnp.int32)
    # K is V: what lies beyond a row may be NaN, and 0 x NaN is NaN.
    latent_BSC = jnp.where((position_S[None, :] < length_B[:, None])[..., None], latent_BSC, 0.0)
    before_B = length_B - (tokens if num_new_B is None else num_new_B)
    seen_BT = jnp.minimum(
        length_B[:, None], before_B[:, None] + 1 + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    )
    score_BTHS = jnp.einsum(
        "BTHC,BSC->BTHS", q_BTHC.astype(jnp.float32), latent_BSC, precision=lax.Precision.HIGHEST
    )
    visible_BTS = position_S[None, None, :] < seen_BT[:, :, None]
    score_BTHS = jnp.where(visible_BTS[:, :, None, :], score_BTHS * softmax_scale, -jnp.inf)
    lse_BTH = jax.nn.logsumexp(score_BTHS, axis=-1)
    weight_BTHS = jnp.exp(score_BTHS - jnp.where(jnp.isfinite(lse_BTH), lse_BTH, 0.0)[..., None])
    out_BTHL = jnp.einsum(
        "BTHS,BSL->BTHL", weight_BTHS, latent_BSC[..., :512], precision=lax.Precision.HIGHEST
    )
    return out_BTHL.astype(out_dtype), lse_BTH
