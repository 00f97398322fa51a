"""One decode layer of one rank of TP = 8 on a GPU, in kernels; norms, a few products and many rows in XLA.

All-reduces are left out (one rank). Sixteen layers run in one program, as a step would; their experts and
dense weights are four distinct layers used in turn, together many times the L2. Weights are random. The
indexer of GLM is left out: at a context of 2,048 it selects every token, and three of four layers have none.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import bench_moe, bench_timing
from kvmem import record
from kvmem.models import get_config
from kvmem.models.config import ModelConfig
from pallas_kernels import int4_moe, mla_decode, mla_prologue, router, skinny_matmul

LAYERS, DISTINCT, PAGE = 16, 4, 64
GROUP = 32
EPSILON = 1e-5
FEW = 16  # rows up to which skinny_matmul beats XLA's products
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
        layer["kv_norm"] = jnp.ones((latent,), jnp.bfloat16)
        out.append(layer)
    return out


@functools.lru_cache(maxsize=2)  # both models fit on the GPU; a launcher that alternates would make them anew
def all_weights(model: ModelConfig, seed: int) -> tuple:
    return bench_moe.weights(model, GROUP, DISTINCT, seed), dense_weights(model, seed + 1)


def _project(x, w, *add, norm: bool = False, gated: bool = False):
    """``x[:, g, :K] @ w[g].T`` for w [groups * O, K], or SwiGLU of it, plus ``add``: bf16 [B, groups * O]."""
    rows, groups, _ = x.shape
    # One row's product with few matrix rows is faster as XLA's reduction: 3.8 against 4.7 us.
    if rows <= FEW and not (gated and rows == 1):
        epsilon = EPSILON if norm else None
        return skinny_matmul.skinny_matmul(x, w[None], 0, *add, epsilon=epsilon, gated=gated)
    x = x[..., : w.shape[1]]
    if groups > 1:
        each = w.reshape(groups, -1, w.shape[1])
        return jnp.einsum("bgk,gok->bgo", x, each).reshape(rows, -1)
    y = (_normed_matmul if norm else _matmul)(x[:, 0], w)
    if gated:
        gate, up = jnp.split(y, 2, axis=1)
        y = jax.nn.silu(gate) * up
    return sum(add, y.astype(w.dtype))


def _matmul(x, w):
    if x.shape[0] == 1:  # XLA streams weights faster as a reduction than as a matrix product
        return jnp.sum(x.astype(jnp.float32) * w.astype(jnp.float32), axis=1)[None]
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _norm(x):
    x = x.astype(jnp.float32)
    return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)).astype(jnp.bfloat16)


def _normed_matmul(x, w):
    """RMSNorm, then the product: the row's factor commutes with it, which saves a pass over x."""
    x32 = x.astype(jnp.float32)
    return _matmul(x, w) * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + EPSILON)


class Places(NamedTuple):
    """Where a step's tokens stand: what every layer shares."""

    table: jax.Array
    length: jax.Array
    page: jax.Array
    offset: jax.Array
    turns: tuple[jax.Array, jax.Array]
    schedule: mla_decode.Schedule


def place(model: ModelConfig, table, length) -> Places:
    position = length - 1
    page = jnp.take_along_axis(table, (position // PAGE)[:, None], axis=1, mode="promise_in_bounds")
    half = model.qk_rope_head_dim // 2
    frequencies = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    groups, _ = mla_decode.column_groups(1, model.num_heads // bench_moe.RANKS)
    return Places(
        table,
        length,
        page,
        (position % PAGE)[:, None],
        mla_prologue.rotation(position[:, None], frequencies),
        mla_decode.make_schedule(length, max_pages=table.shape[1], groups=groups),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers
def layer_step(model: ModelConfig, layout: str, y, x, values, w, stacks, places: Places):
    """One layer: the new residual stream, the cache with this step's token written, the experts chosen."""
    q_rank, rows = model.q_lora_rank, x.shape[0]
    scale = 1.0 if layout == "fp8_flat" else None
    with jax.named_scope("attention"):
        a = _project(x[:, None], w["qkv_a"], norm=True)
        q = _project(a[:, None], w["q_b"], norm=True)
        query, pool, _ = mla_prologue.mla_prologue(
            q.reshape(rows, 1, -1, model.qk_head_dim), a[:, None], w["kv_norm"][None], w["w_uk"][None], 0,
            mla_decode.Pool(values), y, places.page, places.offset, places.turns,
            layout=layout, epsilon=EPSILON, scale=scale, first=q_rank,
        )  # fmt: skip
        out, _ = mla_decode.mla_decode(
            query, pool, y, places.table, places.length, softmax_scale=model.softmax_scale,
            layout=layout, scale=scale, schedule=places.schedule, out_dtype=jnp.bfloat16,
        )  # fmt: skip
        out = _project(out[:, 0], w["w_uv"].reshape(-1, model.kv_lora_rank))
        x = _project(out[:, None], w["o"], x)
    with jax.named_scope("experts"):
        normed = _norm(x)
        logits = _matmul(normed.astype(jnp.float32), w["router"])
        w_up, s_up, w_down, s_down = stacks
        tiles = int4_moe.choose_config(rows * model.experts_per_token, x.shape[1], w_down.shape[-1])
        expert, weight, prepared = router.choose_and_route(
            logits, w["bias"], normed, y % DISTINCT, tokens=tiles.tokens,
            choices=model.experts_per_token, factor=model.routed_scaling_factor,
        )  # fmt: skip
        routed = int4_moe.int4_moe(
            normed, expert, weight, w_up, s_up, w_down, s_down, y % DISTINCT, group=GROUP, prepared=prepared
        )
        hidden = _project(normed[:, None], w["shared_up"], gated=True)
        x = _project(hidden[:, None], w["shared_down"], x, routed)
        return x, pool.values, expert


def step(model: ModelConfig, layout: str, x, values, dense, stacks, table, length):
    """Sixteen layers in one program: the residual stream, the cache, and the experts of each layer."""
    places = place(model, table, length)
    chosen = []
    for y in range(LAYERS):
        w = dense[y % DISTINCT]
        x, values, expert = layer_step(model, layout, jnp.int32(y), x, values, w, stacks, places)
        chosen.append(expert)
    return x, values, chosen


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


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: a model, a cache format and a batch, every row at ``context`` tokens."""

    name: str
    fmt: str
    batch: int
    context: int = 2048

    @property
    def key(self) -> str:
        return f"layer.{self.name}.{self.fmt}.b{self.batch}"

    @property
    def model(self) -> ModelConfig:
        return get_config(bench_moe.NAMES[self.name])

    @property
    def cache(self) -> jax.ShapeDtypeStruct:
        pages = self.batch * self.context // PAGE + 1
        dtype = jnp.uint16 if self.fmt == "bf16" else jnp.uint8
        return jax.ShapeDtypeStruct((LAYERS, pages, PAGE, self.model.cache_width), dtype)

    def compile(self, stacks: tuple, dense: list) -> Callable:
        array, rows = jax.ShapeDtypeStruct, self.batch
        x = array((rows, self.model.hidden_size), jnp.bfloat16)
        table, length = array((rows, self.context // PAGE), jnp.int32), array((rows,), jnp.int32)
        program = jax.jit(functools.partial(step, self.model, LAYOUTS[self.fmt]), donate_argnums=(1,))
        return program.lower(x, self.cache, dense, stacks, table, length).compile()

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Tokens, a cache of other tokens, a table of pages in random order, lengths."""
        keys = jax.random.split(jax.random.key(seed), 3)
        pages = self.context // PAGE
        order = jax.random.permutation(keys[0], self.batch * pages) + 1
        cached = jax.random.normal(keys[1], self.cache.shape[1:])
        narrow = cached.astype(jnp.bfloat16 if self.fmt == "bf16" else jnp.float8_e4m3fn)
        bits = lax.bitcast_convert_type(narrow, self.cache.dtype)
        x = jax.random.normal(keys[2], (self.batch, self.model.hidden_size)).astype(jnp.bfloat16)
        return (
            x,
            jnp.array(jnp.broadcast_to(bits[None], self.cache.shape)),
            order.reshape(self.batch, pages).astype(jnp.int32),
            jnp.full((self.batch,), self.context, jnp.int32),
        )


def distinct_experts(chosen: Sequence[jax.Array], model: ModelConfig) -> float:
    """Distinct experts a layer, mean over layers.

    Raises:
      RuntimeError: tokens agree on experts more than under uniform routing: the layer would be too fast.
    """
    distinct = float(np.mean([len(np.unique(np.asarray(each))) for each in chosen]))
    e, k = model.num_experts, model.experts_per_token
    uniform = e * (1.0 - (1.0 - k / e) ** chosen[0].shape[0])
    if distinct < 0.9 * uniform:
        raise RuntimeError(f"{distinct:.1f} distinct experts a layer; uniform routing has {uniform:.1f}")
    return distinct


def run(
    name: str, formats: Sequence[str], batches: Sequence[int], recorder: record.Recorder, *,
    deadline: float = math.inf, seed: int = 0, compilers: int = 4,
) -> list[str]:  # fmt: skip
    """Measure and record ``layer.<name>.<format>.b<batch>.us``, ``.launches``, ``.bytes``; table rows.

    Programs compile ahead of all measurements in ``compilers`` threads: a busy host would hold up launches.
    Cells that ``deadline`` (on time.monotonic) leaves no time for are absent, and those that fail, with why.

    Raises:
      RuntimeError: after all others were measured, with the cells that failed.
    """
    cells = [Cell(name, fmt, batch) for fmt, batch in itertools.product(formats, batches)]
    if time.monotonic() > deadline:  # before minutes of compilation, too
        for cell in cells:
            recorder.absent(f"{cell.key}.us", "the time of this run was used up")
        return []
    stacks, dense = all_weights(get_config(bench_moe.NAMES[name]), seed)
    with concurrent.futures.ThreadPoolExecutor(compilers) as threads:
        programs = {cell: threads.submit(cell.compile, stacks, dense) for cell in cells}
    rows, failures = [], []
    for cell in cells:
        if time.monotonic() > deadline:
            recorder.absent(f"{cell.key}.us", "the time of this run was used up")
            continue
        try:
            rows.append(_measure(cell, programs.pop(cell).result(), stacks, dense, recorder, seed))
        except Exception as error:
            failures.append(f"{cell.key}: {type(error).__name__}: {error}"[:300])
            recorder.absent(f"{cell.key}.us", failures[-1])
            print(failures[-1], flush=True)
    if failures:
        raise RuntimeError("; ".join(failures))
    return rows


def _measure(cell: Cell, program: Callable, stacks, dense, recorder: record.Recorder, seed: int) -> str:
    x, values, table, length = cell.inputs(seed + 2)
    state = {"values": values}
    del values  # donated

    def once():
        out, state["values"], chosen = program(x, state["values"], dense, stacks, table, length)
        return out, chosen

    out, chosen = once()
    if not np.isfinite(np.asarray(out, np.float32)).all():
        raise RuntimeError(f"{cell.key}: the residual stream is not finite")
    distinct = distinct_experts(chosen, cell.model)
    timing = bench_timing.measure(once, LAYERS)
    moved = layer_bytes(cell.model, LAYOUTS[cell.fmt], cell.batch, cell.context, distinct)
    floor = moved / bench_timing.PEAK_GBPS / 1e3
    measured = {
        "us": timing.us,
        "launches": timing.launches,
        "wall_us": timing.wall_us,
        "spread": timing.spread,
        "bytes": moved,
        "floor_us": floor,
        "distinct_experts": distinct,
    }
    if naive := NAIVE_US.get((cell.name, cell.fmt, cell.batch)):
        measured["naive_us"] = naive
    for metric, value in measured.items():
        recorder.metric(f"{cell.key}.{metric}", value)
    row = (
        f"{cell.key:24s} {timing.us:7.1f} us  {timing.launches:5.1f} launches  wall {timing.wall_us:7.1f}"
        f"  floor {floor:6.1f}  experts {distinct:5.1f}"
    )
    print(row, flush=True)
    for kernel, us in sorted(timing.kernels.items(), key=lambda item: -item[1])[:24]:
        print(f"    {kernel[:70]:70s} {us:7.2f}", flush=True)
    return row
