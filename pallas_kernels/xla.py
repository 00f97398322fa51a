"""The kernels' operations in plain JAX: the CPU path, and the baseline that a kernel must beat."""

import typing

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


def choose(
    logit_TE: Float[Array, "T E"], bias_E: Float[Array, "E"], *,
    choices: int, factor: float, normalise: bool = True,
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:  # fmt: skip
    """What ``router.choose`` computes."""
    score_TE = jax.nn.sigmoid(logit_TE)
    expert_TK = lax.top_k(score_TE + bias_E[None, :], choices)[1]
    weight_TK = jnp.take_along_axis(score_TE, expert_TK, axis=1)
    if normalise:
        weight_TK = weight_TK / (jnp.sum(weight_TK, axis=1, keepdims=True) + 1e-20)
    return expert_TK, weight_TK * factor


def int4_moe_of_logits(
    x_TD, logit_TE, bias_E, *stacks_and_layer, choices: int, factor: float, normalise: bool = True, group: int
) -> Float[Array, "T D"]:
    """``int4_moe`` with the experts and weights of ``choose``; see ``int4_moe.int4_moe_of_logits``."""
    chosen = choose(logit_TE, bias_E, choices=choices, factor=factor, normalise=normalise)
    return int4_moe(x_TD, *chosen, *stacks_and_layer, group=group)


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


def mla_prologue(
    q: Float[Array, "B T H A"],
    compressed: Float[Array, "B T columns"],
    norm: Float[Array, "Y L"],
    w_uk: Float[Array, "Y H N L"],
    weights_layer: Array | int,
    pool,
    layer: Array | int,
    page: Int[Array, "B T"],
    offset: Int[Array, "B T"],
    turn: tuple[Float[Array, "B T R"], Float[Array, "B T R"]],
    *,
    layout: str,
    epsilon: float,
    scale=None,
    first: int = 0,
) -> tuple[Float[Array, "B T H C"], typing.Any, Int[Array, "tokens 2"]]:
    """What ``pallas_kernels.mla_prologue.mla_prologue`` computes, for any widths, with a scatter."""
    latent_width, tokens = norm.shape[1], page.size
    nope = w_uk.shape[2]
    f32, bf16 = jnp.float32, jnp.bfloat16

    def rotate(x, cos, sin):
        real = x.astype(f32)
        swapped = real.reshape(*real.shape[:-1], -1, 2)[..., ::-1].reshape(real.shape)
        return (real * cos + swapped * sin).astype(x.dtype)

    def store(x, inverse_scale, most, narrow, bits):
        finite = jnp.isfinite(x)
        scaled = jnp.where(finite, x, 0.0) / inverse_scale
        clipped = jnp.clip(scaled, -most, most)
        losses = (jnp.sum(lossy, axis=(2, 3), dtype=jnp.int32) for lossy in (clipped != scaled, ~finite))
        stored = lax.bitcast_convert_type(clipped.astype(narrow), bits)
        return stored.reshape(*stored.shape[:2], -1), jnp.stack([each.reshape(tokens) for each in losses], 1)

    raw = compressed[..., first : first + latent_width].astype(f32)
    normal = (raw * lax.rsqrt(jnp.mean(raw * raw, axis=-1, keepdims=True) + epsilon)).astype(bf16)
    latent = (normal * jnp.broadcast_to(norm[weights_layer], normal.shape)).astype(f32)
    key = rotate(compressed[..., first + latent_width : first + latent_width + turn[0].shape[-1]], *turn)
    key = key.astype(f32)[:, :, None]
    latent = latent[:, :, None]
    in_bf16 = (1.0, float(jnp.finfo(bf16).max), bf16, jnp.uint16)
    in_e4m3 = (448.0, jnp.float8_e4m3fn, jnp.uint8)
    writes = {}
    if layout == "fp8_656":
        tiles = latent.reshape(*page.shape, -1, 128)
        amax = jnp.max(jnp.where(jnp.isfinite(tiles), jnp.abs(tiles), 0.0), axis=-1)
        scales = amax / 448.0
        writes["scales"] = jnp.where(scales >= jnp.finfo(f32).tiny, scales, 1.0)
        writes["values"], lost = store(tiles, writes["scales"][..., None], *in_e4m3)
        writes["rope"], lost_key = store(key, *in_bf16)
        lost = lost + lost_key
    else:
        how = in_bf16 if layout == "bf16" else (jnp.asarray(scale, f32), *in_e4m3)
        writes["values"], lost = store(jnp.concatenate([latent, key], axis=-1), *how)
    real = (page > 0) & (page < pool.values.shape[1])
    at = (layer, jnp.where(real, page, pool.values.shape[1]), offset)
    new = {name: getattr(pool, name).at[at].set(value, mode="drop") for name, value in writes.items()}
    absorbed = jnp.einsum(
        "BTHN,HNL->BTHL",
        q[..., :nope].astype(f32),
        w_uk[weights_layer].astype(f32),
        precision=lax.Precision.HIGHEST,
    )
    rotary = rotate(q[..., nope:], *(each[:, :, None] for each in turn))
    query = jnp.concatenate([absorbed.astype(q.dtype), rotary], axis=-1)
    return query, pool._replace(**new), jnp.where(real.reshape(tokens, 1), lost, 0)
