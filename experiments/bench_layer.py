"""One decode layer of one rank of TP = 8 on a GPU: attention over the paged cache, experts, the rest in XLA.

All-reduces are left out (one rank). Sixteen layers run in one program, as a step would; their experts and
dense weights are four distinct layers used in turn, together many times the L2. Weights are random. The
indexer of GLM is left out: at a context of 2,048 it selects every token, and three of four layers have none.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from experiments import bench_moe, bench_timing
from kvmem import record
from kvmem.models import get_config
from kvmem.models.config import ModelConfig
from pallas_kernels import int4_moe, mla_decode

LAYERS, DISTINCT, PAGE = 16, 4, 64
GROUP = 32
LAYOUTS = {"bf16": "bf16", "fp8": "fp8_flat"}
NAIVE_US = {("kimi", "fp8", 1): 120.0, ("kimi", "fp8", 8): 169.0}  # a first version of this layer, pipelined


def dense_weights(model: ModelConfig, seed: int) -> list[dict[str, jax.Array]]:
    d, q, latent, rope = model.hidden_size, model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim
    h, f = model.num_heads // bench_moe.RANKS, model.expert_ffn_size // bench_moe.RANKS
    nope, v, e = model.qk_nope_head_dim, model.v_head_dim, model.num_experts
    shapes = {
        "qkv_a": (q + latent + rope, d),
        "q_b": (h * (nope + rope), q),
        "w_uk": (h, nope, latent),
        "w_uv": (h, v, latent),
        "o": (d, h * v),
        "router": (e, d),
        "shared_up": (2 * f, d),
        "shared_down": (d, f),
    }

    @functools.partial(jax.jit, static_argnums=(1,))
    def normal(key, shape):
        return (jax.random.normal(key, shape) / shape[-1] ** 0.5).astype(jnp.bfloat16)

    out = []
    for key in jax.random.split(jax.random.key(seed), DISTINCT):
        keys = jax.random.split(key, len(shapes))
        layer = {name: normal(k, shape) for k, (name, shape) in zip(keys, shapes.items())}
        layer["router"] = layer["router"].astype(jnp.float32)
        layer["bias"] = jnp.zeros((e,), jnp.float32)
        out.append(layer)
    return out


@functools.lru_cache(maxsize=2)  # both models fit on the GPU; a launcher that alternates would make them anew
def all_weights(model: ModelConfig, seed: int) -> tuple:
    return bench_moe.weights(model, GROUP, DISTINCT, seed), dense_weights(model, seed + 1)


def _matmul(x, w):
    if x.shape[0] == 1:  # XLA streams weights faster as a reduction than as a matrix product
        return jnp.sum(x.astype(jnp.float32) * w.astype(jnp.float32), axis=1)[None]
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _norm(x):
    x = x.astype(jnp.float32)
    return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)


def _normed_matmul(x, w):
    """RMSNorm, then the product: the row's factor commutes with it, which saves a pass over x."""
    x32 = x.astype(jnp.float32)
    return _matmul(x, w) * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-5)


def _rope(x, angle):
    """Interleaved rotation of the last axis, f32 inside."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    shape = (angle.shape[0], *(1,) * (pairs.ndim - 3), angle.shape[1])
    cos, sin = (
        jnp.broadcast_to(cos.reshape(shape), pairs.shape[:-1]),
        jnp.broadcast_to(sin.reshape(shape), pairs.shape[:-1]),
    )
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape).astype(jnp.bfloat16)


def choose(logits_TE, bias_E, choices: int, factor: float):
    """Sigmoid router; the top ``choices`` by rank, ties to the lower expert: reductions and no sort."""
    affinity = jax.nn.sigmoid(logits_TE)
    score = affinity + bias_E[None, :]
    which = jnp.arange(score.shape[1], dtype=jnp.int32)
    tie = (which[None, :] < which[:, None])[None]
    above = (score[:, None, :] > score[:, :, None]) | ((score[:, None, :] == score[:, :, None]) & tie)
    rank = jnp.sum(above, axis=2, dtype=jnp.int32)
    at = rank[:, None, :] == jnp.arange(choices, dtype=jnp.int32)[None, :, None]
    expert = jnp.sum(jnp.where(at, which[None, None, :], 0), axis=2, dtype=jnp.int32)
    weight = jnp.sum(jnp.where(at, affinity[:, None, :], 0.0), axis=2)
    return expert, weight / jnp.sum(weight, axis=1, keepdims=True) * factor


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers
def layer_step(model: ModelConfig, layout: str, y, x, values, w, stacks, table, length, angle, schedule):
    """One layer: the new residual stream and the cache with this step's token written."""
    q_rank, latent = model.q_lora_rank, model.kv_lora_rank
    nope, rope, rows = model.qk_nope_head_dim, model.qk_rope_head_dim, x.shape[0]
    with jax.named_scope("attention"):
        a = _normed_matmul(x, w["qkv_a"]).astype(jnp.bfloat16)
        q = _normed_matmul(a[:, :q_rank], w["q_b"]).astype(jnp.bfloat16).reshape(rows, -1, nope + rope)
        q_latent = jnp.einsum("bhn,hnl->bhl", q[..., :nope], w["w_uk"])
        q_latent = lax.optimization_barrier(q_latent)  # else one slow loop with the concatenation
        query = jnp.concatenate([q_latent, _rope(q[..., nope:], angle)], axis=-1)[:, None]
        parts = [_norm(a[:, q_rank : q_rank + latent]), _rope(a[:, q_rank + latent :], angle)]
        cached = jnp.concatenate(parts, axis=1)
        if layout == "bf16":
            bits = lax.bitcast_convert_type(cached, jnp.uint16)
        else:
            clipped = jnp.clip(cached.astype(jnp.float32), -448.0, 448.0)
            bits = lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8)
        position = length - 1
        inside = "promise_in_bounds"  # without it XLA adds launches that check
        page = jnp.take_along_axis(table, (position // PAGE)[:, None], axis=1, mode=inside)[:, 0]
        if rows == 1:
            values = lax.dynamic_update_slice(values, bits[None, None], (y, page[0], position[0] % PAGE, 0))
        else:
            values = values.at[y, page, position % PAGE].set(bits, mode=inside)
        scale = 1.0 if layout == "fp8_flat" else None
        out, _ = mla_decode.mla_decode(
            query, mla_decode.Pool(values), y, table, length, softmax_scale=model.softmax_scale,
            layout=layout, scale=scale, schedule=schedule, out_dtype=jnp.bfloat16,
        )  # fmt: skip
        out = jnp.einsum("bhl,hvl->bhv", out[:, 0], w["w_uv"]).reshape(rows, -1)
        x = x + _matmul(out, w["o"]).astype(jnp.bfloat16)
    with jax.named_scope("experts"):
        normed = _norm(x)
        logits = _matmul(normed.astype(jnp.float32), w["router"])
        expert, weight = choose(logits, w["bias"], model.experts_per_token, model.routed_scaling_factor)
        w_up, s_up, w_down, s_down = stacks
        routed = int4_moe.int4_moe(
            normed, expert, weight, w_up, s_up, w_down, s_down, y % DISTINCT, group=GROUP
        )
        gate, up = jnp.split(_matmul(normed, w["shared_up"]), 2, axis=1)
        shared = _matmul((jax.nn.silu(gate) * up).astype(jnp.bfloat16), w["shared_down"]).astype(jnp.bfloat16)
        return x + routed + shared, values


def step(model: ModelConfig, layout: str, x, values, dense, stacks, table, length, angle):
    """Sixteen layers in one program."""
    heads = model.num_heads // bench_moe.RANKS
    groups, _ = mla_decode.column_groups(1, heads)
    schedule = mla_decode.make_schedule(length, max_pages=table.shape[1], groups=groups)
    for y in range(LAYERS):
        x, values = layer_step(
            model,
            layout,
            jnp.int32(y),
            x,
            values,
            dense[y % DISTINCT],
            stacks,
            table,
            length,
            angle,
            schedule,
        )
    return x, values


def layer_bytes(model: ModelConfig, layout: str, batch: int, context: int, distinct: float) -> float:
    """Bytes that a layer must read: dense weights, the cache, the distinct experts."""
    f = model.expert_ffn_size // bench_moe.RANKS
    h, d = model.num_heads // bench_moe.RANKS, model.hidden_size
    q, latent, rope = model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim
    dense = d * (q + latent + rope) + h * (model.qk_nope_head_dim + rope) * q + d * h * model.v_head_dim
    dense += h * latent * (model.qk_nope_head_dim + model.v_head_dim) + 3 * f * d
    cache = batch * context * model.cache_width * (2 if layout == "bf16" else 1)
    experts, _ = int4_moe.cost(distinct, 0, d=d, f=f, group=GROUP)
    return 2 * dense + 4 * d * model.num_experts + cache + experts


def run(
    name: str, formats: Sequence[str], batches: Sequence[int], recorder: record.Recorder, *,
    context: int = 2048, deadline: float = math.inf, seed: int = 0,
) -> list[str]:  # fmt: skip
    """Measure and record ``layer.<name>.<format>.b<batch>.us``, ``.launches``, ``.bytes``; table rows."""
    model = get_config(bench_moe.NAMES[name])
    stacks, dense = all_weights(model, seed)
    rows = []
    for fmt in formats:
        layout = LAYOUTS[fmt]
        dtype = jnp.uint16 if layout == "bf16" else jnp.uint8
        for batch in batches:
            key = f"layer.{name}.{fmt}.b{batch}"
            if time.monotonic() > deadline:
                recorder.absent(f"{key}.us", "the time of this run was used up")
                continue
            pages = context // PAGE
            order = jax.random.permutation(jax.random.key(seed + 2), batch * pages) + 1
            table = order.reshape(batch, pages).astype(jnp.int32)
            cached = jax.random.normal(jax.random.key(seed + 3), (batch * pages + 1, PAGE, model.cache_width))
            narrow = cached.astype(jnp.bfloat16 if layout == "bf16" else jnp.float8_e4m3fn)
            bits = lax.bitcast_convert_type(narrow, dtype)
            values = jnp.array(jnp.broadcast_to(bits[None], (LAYERS, *bits.shape)))
            length = jnp.full((batch,), context, jnp.int32)
            half = model.qk_rope_head_dim // 2
            angle = length[:, None] * (1e4 ** (-jnp.arange(half) / half))[None, :]
            x = jax.random.normal(jax.random.key(seed + 4), (batch, model.hidden_size)).astype(jnp.bfloat16)
            program = jax.jit(functools.partial(step, model, layout), donate_argnums=(1,))
            state = {"values": values}
            del values

            def once(program=program, state=state, x=x, table=table, length=length, angle=angle):
                out, state["values"] = program(x, state["values"], dense, stacks, table, length, angle)
                return out

            timing = bench_timing.measure(once, LAYERS)
            e, k = model.num_experts, model.experts_per_token
            distinct = e * (1.0 - (1.0 - k / e) ** batch)
            moved = layer_bytes(model, layout, batch, context, distinct)
            recorder.metric(f"{key}.us", timing.us)
            recorder.metric(f"{key}.launches", timing.launches)
            recorder.metric(f"{key}.wall_us", timing.wall_us)
            recorder.metric(f"{key}.spread", timing.spread)
            recorder.metric(f"{key}.bytes", moved)
            recorder.metric(f"{key}.floor_us", moved / bench_timing.PEAK_GBPS / 1e3)
            if (name, fmt, batch) in NAIVE_US:
                recorder.metric(f"{key}.naive_us", NAIVE_US[name, fmt, batch])
            rows.append(
                f"{key:24s} {timing.us:7.1f} us  {timing.launches:5.1f} launches  wall {timing.wall_us:7.1f}"
                f"  floor {moved / bench_timing.PEAK_GBPS / 1e3:6.1f}"
            )
            print(rows[-1], flush=True)
            top = sorted(timing.kernels.items(), key=lambda item: -item[1])[:24]
            for kernel, us in top:
                print(f"    {kernel[:70]:70s} {us:7.2f}", flush=True)
            state.clear()
    return rows
