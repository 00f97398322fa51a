"""Multi-head latent attention (MLA) over the paged cache, in the naive and in the absorbed form.

A token caches one latent c (width L, after its norm) and one rotary key p (width R, after rotation) that all
heads share. Naive: keys ``c W_uk`` and values ``c W_uv`` are expanded per head. Absorbed: ``W_uk`` moves into
the query and ``W_uv`` behind the average, so that the cache is read as it is stored. (DeepSeek-V2,
arXiv 2405.04434, section 2.1; modeling_deepseek_v3 and modeling_glm_moe_dsa of transformers.)
"""

import dataclasses
import typing
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvmem.cache import store
from kvmem.cache.pages import PADDING_PAGE
from kvmem.models import layers
from kvmem.models.config import ModelConfig
from pallas_kernels import mla_decode, mla_prologue, mla_schedule

Form = Literal["absorbed", "naive"]
# "xla": plain JAX, any device and page size. "mosaic": Hopper kernels for cached attention and INT4 experts.
# "mosaic_experts": the experts' kernel only, where attention has none (prefill chunks, sparse attention).
Implementation = Literal["xla", "mosaic", "mosaic_experts"]
IMPLEMENTATIONS = ("xla", "mosaic", "mosaic_experts")
KERNEL_LAYOUTS = {"bf16_576": "bf16", "fp8_576": "fp8_flat", "fp8_656": "fp8_656"}


@typing.no_type_check
@struct.dataclass
class Placement:
    """Where the tokens of a step stand: derived from a StepBatch once, used by every layer.

    ``position_BT`` counts from 0; ``page_BT`` and ``offset_BT`` say where a token is stored (the padding page
    for tokens that are not real); ``total_B`` is the row's length after the step.
    """

    position_BT: Int[Array, "B T"]
    page_BT: Int[Array, "B T"]
    offset_BT: Int[Array, "B T"]
    table_BM: Int[Array, "B M"]
    num_new_B: Int[Array, "B"]
    total_B: Int[Array, "B"]


def place(
    num_new_B: Int[Array, "B"],
    length_B: Int[Array, "B"],
    table_BM: Int[Array, "B M"],
    steps: int,
    page_size: int,
) -> Placement:
    """Places ``steps`` tokens a row after its cached ones; past ``num_new_B`` or the table is padding."""
    step_1T = jnp.arange(steps, dtype=jnp.int32)[None, :]
    position_BT = length_B[:, None] + step_1T
    logical_BT = position_BT // page_size
    real_BT = (step_1T < num_new_B[:, None]) & (logical_BT < table_BM.shape[1])
    page_BT = jnp.take_along_axis(table_BM, logical_BT, axis=1, mode="clip")
    return Placement(
        position_BT=position_BT,
        page_BT=jnp.where(real_BT, page_BT, PADDING_PAGE),
        offset_BT=position_BT % page_size,
        table_BM=table_BM,
        num_new_B=num_new_B,
        total_B=length_B + num_new_B,
    )


def visible(at: Placement, context: int) -> Bool[Array, "B T S"]:
    """Which of ``context`` cached positions each new token may see: its own and those before it."""
    return jnp.arange(context, dtype=jnp.int32)[None, None, :] <= at.position_BT[:, :, None]


def project(
    weights: dict,
    config: ModelConfig,
    at: Placement,
    normed_BTD: Float[Array, "B T D"],
    frequencies: np.ndarray,
) -> tuple[Float[Array, "B T Q"], Float[Array, "B T H N"], Float[Array, "B T H R"], Float[Array, "B T C"]]:
    """Query residual, query without and with position per (local) head, and the token's new cache entry."""
    latent_width = config.kv_lora_rank
    residual_BTQ = layers.rmsnorm(
        layers.linear(normed_BTD, weights["q_a"]), weights["q_a_norm"], config.lora_norm_eps
    )
    query_BTHA = rearrange(
        layers.linear(residual_BTQ, weights["q_b"]), "B T (H A) -> B T H A", A=config.qk_head_dim
    )
    nope_BTHN = query_BTHA[..., : config.qk_nope_head_dim]
    rope_BTHR = layers.rotate(query_BTHA[..., config.qk_nope_head_dim :], at.position_BT, frequencies)
    compressed_BTC = layers.linear(normed_BTD, weights["kv_a"])
    latent_BTL = layers.rmsnorm(
        compressed_BTC[..., :latent_width], weights["kv_a_norm"], config.lora_norm_eps
    )
    key_BTR = layers.rotate(compressed_BTC[..., latent_width:], at.position_BT, frequencies)
    return residual_BTQ, nope_BTHN, rope_BTHR, jnp.concatenate([latent_BTL, key_BTR], axis=-1)


def attend(
    weights: dict,
    config: ModelConfig,
    kv: store.KVStore,
    layer: int | Int[Array, ""],
    at: Placement,
    nope_BTHN: Float[Array, "B T H N"],
    rope_BTHR: Float[Array, "B T H R"],
    allowed_BTS: Bool[Array, "B T S"],
    form: Form,
) -> Float[Array, "B T A"]:
    """Attention output of the local heads before the output projection, A = H * V, heads outermost.

    Reads the cache of ``layer`` through the pages; ``allowed_BTS`` is false where a token must not look.
    """
    dtype = nope_BTHN.dtype
    cached_BSC = store.gather_latent(kv, layer, at.table_BM, dtype, at.total_B)
    latent_BSL, key_BSR = jnp.split(cached_BSC, [config.kv_lora_rank], axis=-1)
    if form == "naive":
        key_BSHN = layers.einsum("BSL,HNL->BSHN", latent_BSL, weights["w_uk"]).astype(dtype)
        value_BSHV = layers.einsum("BSL,HVL->BSHV", latent_BSL, weights["w_uv"]).astype(dtype)
        score_BTHS = layers.einsum("BTHN,BSHN->BTHS", nope_BTHN, key_BSHN)
        score_BTHS += layers.einsum("BTHR,BSR->BTHS", rope_BTHR, key_BSR)
        share_BTHS = _softmax(score_BTHS, allowed_BTS, config.softmax_scale).astype(dtype)
        out_BTHV = layers.einsum("BTHS,BSHV->BTHV", share_BTHS, value_BSHV).astype(dtype)
        return rearrange(out_BTHV, "B T H V -> B T (H V)")
    query_BTHC = absorb(weights, nope_BTHN, rope_BTHR)
    score_BTHS = layers.einsum("BTHC,BSC->BTHS", query_BTHC, cached_BSC)
    share_BTHS = _softmax(score_BTHS, allowed_BTS, config.softmax_scale).astype(dtype)
    mean_BTHL = layers.einsum("BTHS,BSL->BTHL", share_BTHS, latent_BSL).astype(dtype)
    return expand(weights, mean_BTHL)


@typing.no_type_check
@struct.dataclass
class KernelStep:
    """What the attention kernels of all layers of a step share.

    ``schedule`` says how the pages are cut; ``turn`` is ``mla_prologue.rotation`` of the positions.
    """

    schedule: mla_schedule.Schedule
    turn: tuple[Float[Array, "B T R"], Float[Array, "B T R"]]


def kernel_step(config: ModelConfig, kv: store.KVStore, at: Placement, heads: int, form: Form) -> KernelStep:
    """What the attention kernels of this step share, made once.

    Raises:
      NotImplementedError: what has no kernel: the naive form, an f32 cache, sparse attention.
    """
    if form != "absorbed" or kv.layout not in KERNEL_LAYOUTS:
        raise NotImplementedError(f"no attention kernel for form={form!r} over a cache {kv.layout!r}")
    if config.indexer and at.table_BM.shape[1] * kv.page_size > config.indexer.topk:
        raise NotImplementedError(
            f"no kernel for sparse attention: tables of {at.table_BM.shape[1]} pages hold more than "
            f"topk={config.indexer.topk} tokens; use implementation='mosaic_experts'"
        )
    rows, steps = at.position_BT.shape
    groups, columns = mla_schedule.column_groups(steps, heads)
    schedule = mla_schedule.make_schedule(
        _kernel_lengths(at),
        max_pages=at.table_BM.shape[1],
        groups=groups,
        blocks=mla_decode.tuned_config(KERNEL_LAYOUTS[kv.layout], columns, rows).blocks,
    )
    frequencies = layers.rope_frequencies(config.rope, config.qk_rope_head_dim)
    return KernelStep(schedule, mla_prologue.rotation(at.position_BT, jnp.asarray(frequencies)))


def kernel_project(
    stack: dict,
    config: ModelConfig,
    kv: store.KVStore,
    layer: int | Int[Array, ""],
    cache_layer: int | Int[Array, ""],
    at: Placement,
    normed_BTD: Float[Array, "B T D"],
    shared: KernelStep,
) -> tuple[Float[Array, "B T Q"], Float[Array, "B T H C"], store.KVStore]:
    """``project``, the cache write and ``absorb`` with what follows the projections as one Mosaic kernel.

    ``stack`` holds the weights of all layers, of which ``layer`` is used. Returns the query residual, the
    absorbed query and the store with the new tokens, as ``store.write_latent`` leaves it.
    """
    weights = layers.layer_of({name: stack[name] for name in ("q_a", "q_a_norm", "q_b", "kv_a")}, layer)
    residual_BTQ = layers.rmsnorm(
        layers.linear(normed_BTD, weights["q_a"]), weights["q_a_norm"], config.lora_norm_eps
    )
    query_BTHC, pool, lost = mla_prologue.mla_prologue(
        rearrange(layers.linear(residual_BTQ, weights["q_b"]), "B T (H A) -> B T H A", A=config.qk_head_dim),
        layers.linear(normed_BTD, weights["kv_a"]),
        stack["kv_a_norm"],
        stack["w_uk"],
        layer,
        mla_decode.Pool(kv.values, kv.scales, kv.rope),
        cache_layer,
        at.page_BT,
        at.offset_BT,
        shared.turn,
        layout=KERNEL_LAYOUTS[kv.layout],
        epsilon=config.lora_norm_eps,
        scale=None if kv.scale_Y is None else kv.scale_Y[cache_layer],
    )
    saturated, nonfinite = jnp.sum(lost, axis=0)
    kv = dataclasses.replace(
        kv,
        values=pool.values,
        scales=pool.scales,
        rope=pool.rope,
        saturated=kv.saturated + saturated,
        nonfinite=kv.nonfinite + nonfinite,
    )
    return residual_BTQ, query_BTHC, kv


def kernel_attend(
    weights: dict,
    config: ModelConfig,
    kv: store.KVStore,
    layer: int | Int[Array, ""],
    at: Placement,
    query_BTHC: Float[Array, "B T H C"],
    shared: KernelStep,
) -> Float[Array, "B T A"]:
    """``attend`` as the Mosaic kernel, which reads the pool's raw bits in place, page by page."""
    mean_BTHL, _ = mla_decode.mla_decode(
        query_BTHC,
        mla_decode.Pool(kv.values, kv.scales, kv.rope),
        layer,
        at.table_BM,
        _kernel_lengths(at),
        softmax_scale=config.softmax_scale,
        layout=KERNEL_LAYOUTS[kv.layout],
        scale=None if kv.scale_Y is None else kv.scale_Y[layer],
        num_new_B=at.num_new_B,
        schedule=shared.schedule,
        out_dtype=query_BTHC.dtype,
    )
    return expand(weights, mean_BTHL)


def _kernel_lengths(at: Placement) -> Int[Array, "B"]:
    # A dead row has nothing to attend to, whatever its length.
    return jnp.where(at.num_new_B > 0, at.total_B, 0)


def absorb(
    weights: dict, nope_BTHN: Float[Array, "B T H N"], rope_BTHR: Float[Array, "B T H R"]
) -> Float[Array, "B T H C"]:
    """The query that is multiplied with cache entries as stored: ``[q W_uk ; q_rope]``."""
    latent_BTHL = layers.einsum("BTHN,HNL->BTHL", nope_BTHN, weights["w_uk"]).astype(nope_BTHN.dtype)
    return jnp.concatenate([latent_BTHL, rope_BTHR], axis=-1)


def expand(weights: dict, mean_BTHL: Float[Array, "B T H L"]) -> Float[Array, "B T A"]:
    """Values per head from the averaged latent, ``u W_uv``, heads outermost."""
    out_BTHV = layers.einsum("BTHL,HVL->BTHV", mean_BTHL, weights["w_uv"]).astype(mean_BTHL.dtype)
    return rearrange(out_BTHV, "B T H V -> B T (H V)")


def _softmax(
    score_BTHS: Float[Array, "B T H S"], allowed_BTS: Bool[Array, "B T S"], scale: float
) -> Float[Array, "B T H S"]:
    # A finite floor, not -inf: a padding row may see nothing, and must not turn into NaN.
    allowed_BTHS = jnp.broadcast_to(allowed_BTS[:, :, None, :], score_BTHS.shape)
    masked_BTHS = jnp.where(allowed_BTHS, score_BTHS * scale, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(masked_BTHS, axis=-1)
