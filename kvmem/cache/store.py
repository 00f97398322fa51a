"""The stored bytes of a paged cache: raw bits in one stacked pool, written by scatter, read by gather.

Layouts, in bytes per token and layer at the published widths (latent 512, rope 64, index 128):

========= ===================================================== ==========================
layout    arrays                                                bytes
========= ===================================================== ==========================
f32_576   ``values`` f32 [Y, P, Z, L+R]                         2,304 (parity only)
bf16_576  ``values`` u16 [Y, P, Z, L+R]                         1,152
fp8_576   ``values`` u8 [Y, P, Z, L+R], ``scale_Y`` f32 [Y]     576: one explicit scale a layer
fp8_656   ``values`` u8 [Y, P, Z, L], ``scales`` f32 [Y, P, Z,  656: 512 + 4 tiles x 4 + 64 x 2
          L/128], ``rope`` u16 [Y, P, Z, R]
index_f32 ``index_values`` f32 [Y, P, Z, I]                     512 (parity only)
index_bf16 ``index_values`` u16 [Y, P, Z, I]                    256
index_132 ``index_values`` u8, ``index_scales`` f32 [Y, P, Z]   132: 128 + 4
========= ===================================================== ==========================

Names tell the published widths; tiny models use the same layouts with their own. Narrow types are kept as
raw bits and bitcast after the gather, because XLA on a CPU converts a whole e4m3 or bf16 pool for one
scatter. The pools are never sliced by layer: every access is ``pool[layer, page]``.

What is written is finite: values beyond the range of the layout saturate and are counted, NaN and infinity
are stored as 0 and counted. Writes to the padding page store zeros, so that page 0 is all zeros for ever. A
page outside the pool is dropped on writing and clamped on reading; ``integrity.check`` has to come first.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from kvmem.cache.pages import PADDING_PAGE
from kvmem.formats import fp8

LAYOUTS = ("f32_576", "bf16_576", "fp8_576", "fp8_656")
INDEX_LAYOUTS = ("index_f32", "index_bf16", "index_132")


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Widths of a model's cache: layers, index layers (0 without an indexer), L, R, I, and the scale tile."""

    num_layers: int
    num_index_layers: int
    latent: int
    rope: int
    index_dim: int
    tile: int = 128

    @property
    def width(self) -> int:
        """C, the width of one cached token."""
        return self.latent + self.rope

    @property
    def num_tiles(self) -> int:
        """Scales of one token in fp8_656."""
        return self.latent // min(self.tile, self.latent)


@typing.no_type_check
@struct.dataclass
class KVStore:
    """The pools of one phase, see the module docstring; arrays that a layout does not have are None.

    ``saturated`` and ``nonfinite`` (i32) count values for real pages that were clipped, or replaced by 0.
    """

    values: Array
    scales: Float[Array, "Y P Z G"] | None
    rope: Array | None
    scale_Y: Float[Array, "Y"] | None
    index_values: Array | None
    index_scales: Float[Array, "Y P Z"] | None
    saturated: Int[Array, ""]
    nonfinite: Int[Array, ""]
    shape: CacheShape = struct.field(pytree_node=False)
    layout: str = struct.field(pytree_node=False)
    index_layout: str = struct.field(pytree_node=False)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the padding page included."""
        return self.values.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.values.shape[2]


@typing.no_type_check
@struct.dataclass
class PageBlock:
    """Raw bytes of some pages, taken out of a pool; its type says which layout they are in.

    ``pools`` maps the name of a KVStore array to its pages, [Y, A, ...].
    """

    pools: dict[str, Array]
    shape: CacheShape = struct.field(pytree_node=False)
    layout: str = struct.field(pytree_node=False)
    index_layout: str = struct.field(pytree_node=False)


POOLS = ("values", "scales", "rope", "index_values", "index_scales")


def init(
    shape: CacheShape,
    layout: str,
    index_layout: str = "index_f32",
    *,
    num_pages: int,
    page_size: int,
    scale: float | Sequence[float] = 1.0,
) -> KVStore:
    """Returns a pool of zeros.

    Args:
      scale: of fp8_576: real = stored * scale, for all layers or one per layer. Other layouts carry their own
        scales or none and ignore it.

    Raises:
      ValueError: unknown layout, impossible size, or a scale that is not positive and finite.
    """
    _known(layout, index_layout)
    for name, value in (("num_pages", num_pages), ("page_size", page_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if layout == "fp8_656" and shape.latent % min(shape.tile, shape.latent):
        raise ValueError(f"latent width {shape.latent} is not a multiple of the scale tile {shape.tile}")
    scale_Y = np.broadcast_to(np.asarray(scale, np.float32), (shape.num_layers,))
    if not (np.all(np.isfinite(scale_Y)) and np.all(scale_Y > 0)):
        raise ValueError(f"scale is {scale}; a scale must be positive and finite")
    dtype = {"f32_576": jnp.float32, "bf16_576": jnp.uint16}.get(layout, jnp.uint8)
    index_dtype = {"index_f32": jnp.float32, "index_bf16": jnp.uint16}.get(index_layout, jnp.uint8)
    tiled = layout == "fp8_656"
    pages = (shape.num_layers, num_pages, page_size)
    index_pages = (shape.num_index_layers, num_pages, page_size)
    return KVStore(
        values=jnp.zeros((*pages, shape.latent if tiled else shape.width), dtype),
        scales=jnp.zeros((*pages, shape.num_tiles), jnp.float32) if tiled else None,
        rope=jnp.zeros((*pages, shape.rope), jnp.uint16) if tiled else None,
        scale_Y=jnp.asarray(scale_Y) if layout == "fp8_576" else None,
        index_values=jnp.zeros((*index_pages, shape.index_dim), index_dtype)
        if shape.num_index_layers
        else None,
        index_scales=jnp.zeros(index_pages, jnp.float32)
        if shape.num_index_layers and index_layout == "index_132"
        else None,
        saturated=jnp.zeros((), jnp.int32),
        nonfinite=jnp.zeros((), jnp.int32),
        shape=shape,
        layout=layout,
        index_layout=index_layout,
    )


def bytes_per_token(shape: CacheShape, layout: str, index_layout: str) -> int:
    """Returns the bytes of one cached token over all layers, index keys included."""
    _known(layout, index_layout)
    latent = {
        "f32_576": 4 * shape.width,
        "bf16_576": 2 * shape.width,
        "fp8_576": shape.width,
        "fp8_656": shape.latent + 4 * shape.num_tiles + 2 * shape.rope,
    }[layout]
    index = {
        "index_f32": 4 * shape.index_dim,
        "index_bf16": 2 * shape.index_dim,
        "index_132": shape.index_dim + 4,
    }[index_layout]
    return shape.num_layers * latent + shape.num_index_layers * index


def shared_scale(k_scale: float, v_scale: float) -> float:
    """Returns the one scale of a latent row. In MLA the latent is both K and V.

    Raises:
      ValueError: a checkpoint that names two different scales for it.
    """
    if k_scale != v_scale:
        raise ValueError(
            f"k_scale {k_scale} and v_scale {v_scale}: a latent row is K and V, it has one scale"
        )
    return k_scale


def write_latent(
    kv: KVStore,
    layer: int | Int[Array, ""],
    page_BT: Int[Array, "B T"],
    offset_BT: Int[Array, "B T"],
    latent_BTC: Float[Array, "B T C"],
) -> KVStore:
    """Stores the latent and rope part of new tokens at ``[layer, page, offset]``.

    Returns:
      The store. Tokens whose page is the padding page are stored there as zeros and counted nowhere.
    """
    latent_BTC = _blank_padding(page_BT, latent_BTC)
    at = (layer, page_BT, offset_BT)
    if kv.layout == "fp8_576":
        assert kv.scale_Y is not None
        stored = fp8.quantize(latent_BTC, kv.scale_Y[layer])
        return _counted(
            dataclasses.replace(kv, values=_scatter(kv.values, at, stored.bits)),
            stored.saturated,
            stored.nonfinite,
        )
    if kv.layout == "fp8_656":
        width = kv.shape.latent
        stored, scale_BTG = fp8.quantize_tiles(latent_BTC[..., :width], min(kv.shape.tile, width))
        scale_BTG = _blank_padding(page_BT, scale_BTG)
        rope_BTR, saturated, nonfinite = _to_bits(latent_BTC[..., width:], jnp.bfloat16)
        written = dataclasses.replace(
            kv,
            values=_scatter(kv.values, at, stored.bits),
            scales=_scatter(kv.scales, at, scale_BTG),
            rope=_scatter(kv.rope, at, rope_BTR),
        )
        return _counted(written, stored.saturated + saturated, stored.nonfinite + nonfinite)
    bits, saturated, nonfinite = _to_bits(latent_BTC, _FLOAT[kv.layout])
    return _counted(dataclasses.replace(kv, values=_scatter(kv.values, at, bits)), saturated, nonfinite)


def write_index(
    kv: KVStore,
    index_layer: int | Int[Array, ""],
    page_BT: Int[Array, "B T"],
    offset_BT: Int[Array, "B T"],
    key_BTI: Float[Array, "B T I"],
) -> KVStore:
    """Stores the indexer's keys of new tokens; ``index_layer`` counts the layers that have an indexer.

    index_132 has one f32 scale a token, amax / 448 (the plain rule, not the power-of-two one).
    """
    key_BTI = _blank_padding(page_BT, key_BTI)
    at = (index_layer, page_BT, offset_BT)
    if kv.index_layout == "index_132":
        stored, scale_BT1 = fp8.quantize_tiles(key_BTI, kv.shape.index_dim)
        scale_BT = _blank_padding(page_BT, scale_BT1)[..., 0]
        written = dataclasses.replace(
            kv,
            index_values=_scatter(kv.index_values, at, stored.bits),
            index_scales=_scatter(kv.index_scales, at, scale_BT),
        )
        return _counted(written, stored.saturated, stored.nonfinite)
    bits, saturated, nonfinite = _to_bits(key_BTI, _FLOAT[kv.index_layout])
    return _counted(
        dataclasses.replace(kv, index_values=_scatter(kv.index_values, at, bits)), saturated, nonfinite
    )


def gather_latent(
    kv: KVStore,
    layer: int | Int[Array, ""],
    table_BM: Int[Array, "B M"],
    dtype: jax.typing.DTypeLike,
    length_B: Int[Array, "B"] | None = None,
) -> Float[Array, "B S C"]:
    """Returns the cached tokens of each row, S = M * Z positions in logical order, as ``dtype``.

    With ``length_B`` positions past it read as zeros, whatever a former owner of the page left there, and a
    NaN in a live position stays one (the request then fails, as it should). Without it every stored NaN or
    infinity reads as zero: in MLA K is V, so a masked score alone would not do, 0 x NaN is NaN.
    """
    if kv.layout == "fp8_576":
        assert kv.scale_Y is not None
        real_BMZC = fp8.dequantize(_pages(kv.values, layer, table_BM), kv.scale_Y[layer], dtype)
    elif kv.layout == "fp8_656":
        latent_BMZL = fp8.dequantize_tiles(
            _pages(kv.values, layer, table_BM), _pages(kv.scales, layer, table_BM), dtype
        )
        rope_BMZR = lax.bitcast_convert_type(_pages(kv.rope, layer, table_BM), jnp.bfloat16).astype(dtype)
        real_BMZC = jnp.concatenate([latent_BMZL, rope_BMZR], axis=-1)
    else:
        bits_BMZC = _pages(kv.values, layer, table_BM)
        real_BMZC = lax.bitcast_convert_type(bits_BMZC, _FLOAT[kv.layout]).astype(dtype)
    return _harmless_tail(real_BMZC, length_B)


def gather_index(
    kv: KVStore,
    index_layer: int | Int[Array, ""],
    table_BM: Int[Array, "B M"],
    dtype: jax.typing.DTypeLike,
    length_B: Int[Array, "B"] | None = None,
) -> Float[Array, "B S I"]:
    """Returns the cached index keys of each row, like ``gather_latent``."""
    bits_BMZI = _pages(kv.index_values, index_layer, table_BM)
    if kv.index_layout == "index_132":
        scale_BMZ1 = _pages(kv.index_scales, index_layer, table_BM)[..., None]
        real_BMZI = fp8.dequantize(bits_BMZI, scale_BMZ1, dtype)
    else:
        real_BMZI = lax.bitcast_convert_type(bits_BMZI, _FLOAT[kv.index_layout]).astype(dtype)
    return _harmless_tail(real_BMZI, length_B)


def export_pages(kv: KVStore, page_A: Int[Array, "A"]) -> PageBlock:
    """Returns the raw bytes of pages (for retraction); ``import_pages`` restores them bit for bit."""
    pools = {
        name: pool.at[:, page_A].get(mode="clip") for name in POOLS if (pool := getattr(kv, name)) is not None
    }
    return PageBlock(pools=pools, shape=kv.shape, layout=kv.layout, index_layout=kv.index_layout)


def import_pages(kv: KVStore, page_A: Int[Array, "A"], block: PageBlock) -> KVStore:
    """Puts raw bytes into pages of the same layout. Entries that name the padding page are dropped.

    Raises:
      ValueError: the block is of another layout, shape or page size: such bytes have to be converted.
    """
    mine = (kv.shape, kv.layout, kv.index_layout)
    theirs = (block.shape, block.layout, block.index_layout)
    if mine != theirs:
        raise ValueError(f"raw pages of {theirs} cannot be put into a pool of {mine}; convert them")
    target_A = jnp.where(page_A > PADDING_PAGE, page_A, kv.num_pages)
    written = {}
    for name, pages in block.pools.items():
        pool = getattr(kv, name)
        if pool.shape[2:] != pages.shape[2:]:
            raise ValueError(f"pages of {pages.shape[2:]} cannot be put into pages of {pool.shape[2:]}")
        written[name] = pool.at[:, target_A].set(pages, mode="drop")
    return dataclasses.replace(kv, **written)


def copy_pages(kv: KVStore, source_A: Int[Array, "A"], target_A: Int[Array, "A"]) -> KVStore:
    """Copies raw pages inside a pool (the unfinished tail of a fork)."""
    return import_pages(kv, target_A, export_pages(kv, source_A))


_FLOAT = {
    "f32_576": jnp.float32,
    "bf16_576": jnp.bfloat16,
    "index_f32": jnp.float32,
    "index_bf16": jnp.bfloat16,
}


def _known(layout: str, index_layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"cache layout {layout!r} is not one of {LAYOUTS}")
    if index_layout not in INDEX_LAYOUTS:
        raise ValueError(f"index layout {index_layout!r} is not one of {INDEX_LAYOUTS}")


def _to_bits(x: Float[Array, "*A W"], dtype: typing.Any) -> tuple[Array, Int[Array, ""], Int[Array, ""]]:
    """Casts to ``dtype`` as raw bits (f32 stays f32): saturating, NaN and infinity to 0, both counted."""
    most = float(jnp.finfo(dtype).max)
    real = x.astype(jnp.float32)
    finite = jnp.isfinite(real)
    clipped = jnp.clip(jnp.where(finite, real, 0.0), -most, most)
    cast = clipped.astype(dtype)
    bits = cast if dtype == jnp.float32 else lax.bitcast_convert_type(cast, jnp.uint16)
    saturated = jnp.sum(finite & (clipped != real), dtype=jnp.int32)
    return bits, saturated, jnp.sum(~finite, dtype=jnp.int32)


def _blank_padding(page_BT: Int[Array, "B T"], x_BTW: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
    return jnp.where((page_BT == PADDING_PAGE)[..., None], jnp.zeros((), x_BTW.dtype), x_BTW)


def _counted(kv: KVStore, saturated: Int[Array, ""], nonfinite: Int[Array, ""]) -> KVStore:
    return dataclasses.replace(kv, saturated=kv.saturated + saturated, nonfinite=kv.nonfinite + nonfinite)


def _scatter(pool: Array | None, at: tuple, update: Array) -> Array:
    assert pool is not None
    return pool.at[at].set(update, mode="drop", wrap_negative_indices=False)


def _pages(pool: Array | None, layer: int | Int[Array, ""], table_BM: Int[Array, "B M"]) -> Array:
    assert pool is not None
    return pool.at[layer, table_BM].get(mode="clip", wrap_negative_indices=False)


def _harmless_tail(
    real_BMZC: Float[Array, "B M Z C"], length_B: Int[Array, "B"] | None
) -> Float[Array, "B S C"]:
    rows, pages, page_size, width = real_BMZC.shape
    real_BSC = real_BMZC.reshape(rows, math.prod((pages, page_size)), width)
    if length_B is None:
        keep_BSC = jnp.isfinite(real_BSC)
    else:
        keep_BSC = (jnp.arange(pages * page_size)[None, :] < length_B[:, None])[..., None]
    return jnp.where(keep_BSC, real_BSC, jnp.zeros((), real_BSC.dtype))
