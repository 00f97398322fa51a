"""What stands between the projections and attention in a decode step, as one Hopper kernel.

Per new token: RMSNorm of the latent, rotation of the key, quantisation and the write into the paged pool; per
token and head: the product of the query with ``w_uk`` (absorption) and its rotation, written side by side as
``mla_decode`` reads them. In plain JAX these are six to ten launches that move next to nothing.

**Blocks.** One block a token norms, rotates and stores; another rotates its queries. One block for each head
and 64 or 32 latents absorbs: latents on wgmma's M side, tokens on N; below eight tokens a product and a sum
in registers. Code that runs once costs 5 to 9 cycles an instruction to fetch: blocks are many and short.

The pool is updated in place: it goes in as mutable references (``jax.new_ref``), which compile to aliased
operands. Values are those of ``kvmem``'s ``rmsnorm``, ``rotate``
and ``write_latent``, rounded at the same places: an e4m3 value is ``clip(x / scale, +-448)`` rounded to even,
NaN and infinity are stored as 0, both are counted; a token whose page is the padding page 0, or outside of
the pool, is neither stored nor counted.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import fragments
from pallas_kernels.common import require, smem_tiles
from pallas_kernels.mla_decode import GROUP, GROUPS, LATENT, LAYOUTS, PAGE, ROPE, Pool

E4M3_MAX, BF16_MAX = 448.0, float(jnp.finfo(jnp.bfloat16).max)
PADDING_PAGE = 0
TILE = 64  # most latents and most tokens of one absorbing block
_B16 = smem_tiles(64, 128)
_NOT_FINITE = 1 << 16  # what a value that is not finite adds to a count of clipped ones
_pairs = functools.partial(plgpu.load, layout=fragments.PAIRS, optimized=False)
_lanes = functools.partial(plgpu.load, layout=plgpu.Layout.WG_STRIDED((GROUP,), vec_size=1), optimized=False)


def rotation(
    position_BT: Int[Array, "B T"], frequencies: Float[Array, "pairs"]
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """``turns`` of the positions, the same for all layers of a step.

    ``frequencies``: f32, radians per position of each pair of columns (2i, 2i + 1).
    """
    angle = position_BT.astype(jnp.float32)[..., None] * frequencies[None, None]
    return turns(jnp.cos(angle), jnp.sin(angle))


def turns(cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and signed sines of every column: ``x * cos + (x with pairs exchanged) * sin`` rotates x."""
    shape = (*cos.shape[:-1], 2 * cos.shape[-1])
    return (
        jnp.stack([cos, cos], axis=-1).reshape(shape),
        jnp.stack([-sin, sin], axis=-1).reshape(shape),
    )


@dataclasses.dataclass(frozen=True)
class _Static:
    layout: str
    tokens: int
    heads: int
    nope: int
    first: int  # column of the input at which the latent begins
    pages: int
    epsilon: float
    weights_layer: int | None  # None: an argument of the kernel
    sim: bool

    @property
    def columns(self) -> int:
        """Tokens of one absorbing block."""
        return min(self.tokens, TILE)

    @property
    def tiles(self) -> int:
        return self.tokens // self.columns

    @property
    def latents(self) -> int:
        """Latents of one absorbing block; fewer where they are summed up without wgmma."""
        return TILE if self.tokens % 8 == 0 else TILE // 2

    @property
    def absorbing(self) -> int:
        """Absorbing blocks."""
        return self.heads * (LATENT // self.latents) * self.tiles


@dataclasses.dataclass(frozen=True)
class _Block:
    """One thread block; ``gmem`` and ``smem`` hold its refs by name."""

    static: _Static
    gmem: dict
    smem: dict

    def run(self) -> None:
        block, tokens = lax.axis_index("block"), self.static.tokens

        @pl.when(block < tokens)
        def _():
            self._cache(block)

        @pl.when((block >= tokens) & (block < 2 * tokens))
        def _():
            self._rotate(block - tokens)

        @pl.when(block >= 2 * tokens)
        def _():
            nth = block - 2 * tokens
            chunks = LATENT // self.static.latents
            chunk, rest = lax.rem(nth, chunks), nth // chunks
            absorb = self._multiply if self.static.tokens % 8 == 0 else self._sum
            absorb(lax.rem(rest, self.static.heads), chunk, rest // self.static.heads)

    def _turn(self, n) -> Callable:
        """The rotation by token ``n``'s position, f32 to bf16."""
        cos, sin = (_pairs(self.gmem[name].at[n]) for name in ("cos", "sin"))

        def turn(x):
            x = x.astype(jnp.float32)
            return (x * cos + self._swap(x) * sin).astype(jnp.bfloat16)

        return turn

    def _rotate(self, n) -> None:
        """Rotates the queries of token ``n``."""
        static, gmem = self.static, self.gmem
        turn = self._turn(n)
        for head in range(static.heads):
            q = _pairs(gmem["q"].at[n, head, pl.ds(static.nope, ROPE)])
            gmem["query"].at[n, head, pl.ds(LATENT, ROPE)][...] = turn(q)

    def _cache(self, n) -> None:
        """Norms, rotates and stores the entry of token ``n``."""
        static, gmem = self.static, self.gmem
        page, offset = gmem["page"][n], gmem["offset"][n]
        raw = [
            _lanes(gmem["compressed"].at[n, pl.ds(static.first + GROUP * g, GROUP)]).astype(jnp.float32)
            for g in range(GROUPS)
        ]
        key = self._turn(n)(_pairs(gmem["compressed"].at[n, pl.ds(static.first + LATENT, ROPE)]))
        square = functools.reduce(jnp.add, (x * x for x in raw))
        factor = lax.rsqrt(jnp.sum(square) * (1.0 / LATENT) + static.epsilon)
        latent = []
        for g, x in enumerate(raw):
            weight = _lanes(gmem["norm"].at[self._layer(), pl.ds(GROUP * g, GROUP)])
            normal = (x * factor).astype(jnp.bfloat16).astype(jnp.float32)
            latent.append((normal * weight.astype(jnp.float32)).astype(jnp.bfloat16).astype(jnp.float32))

        real = (page > PADDING_PAGE) & (page < static.pages)

        def count(lost):
            gmem["lost"][n, 0] = lost & (_NOT_FINITE - 1)
            gmem["lost"][n, 1] = lost >> 16

        @pl.when(real)
        def _():
            count(self._store((gmem["layer"][0], page, offset), latent, key.astype(jnp.float32)))

        @pl.when(jnp.logical_not(real))
        def _():
            count(jnp.int32(0))

    def _swap(self, x):
        if self.static.sim:
            return x.reshape(-1, 2)[:, ::-1].reshape(x.shape)
        return fragments.swap_pairs(x)

    def _store(self, at, latent, key):
        """Writes one token's entry; returns the values clipped + ``_NOT_FINITE`` * the values not finite."""
        layout, gmem = self.static.layout, self.gmem

        def put(x, ref, scale, most, narrow, bits):
            finite = jnp.abs(x) <= jnp.finfo(jnp.float32).max
            real = jnp.where(finite, x, 0.0)
            scaled = real if scale is None else real / scale
            clipped = jnp.clip(scaled, -most, most)
            ref[...] = lax.bitcast_convert_type(clipped.astype(narrow), bits)
            return jnp.where(clipped == scaled, 0, 1) + jnp.where(finite, 0, _NOT_FINITE)

        b16 = (None, BF16_MAX, jnp.bfloat16, jnp.uint16)
        values = gmem["values"].at[at]
        scale = gmem["scale"][0] if layout == "fp8_flat" else None
        flat = b16 if layout == "bf16" else (scale, E4M3_MAX, jnp.float8_e4m3fn, jnp.uint8)
        lost = []
        for g, x in enumerate(latent):
            if layout == "fp8_656":
                finite = jnp.abs(x) <= jnp.finfo(jnp.float32).max
                # XLA divides by a constant as a product with its inverse: the same scale, to the bit.
                scale = jnp.max(jnp.where(finite, jnp.abs(x), 0.0)) * (1 / E4M3_MAX)
                scale = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, 1.0)
                gmem["scales"].at[at][g] = scale
            lost.append(put(x, values.at[pl.ds(GROUP * g, GROUP)], scale, *flat[1:]))
        if layout == "fp8_656":
            key_lost = put(key, gmem["rope"].at[at], *b16)
        else:
            key_lost = put(key, values.at[pl.ds(LATENT, ROPE)], *flat)
        return jnp.sum(functools.reduce(jnp.add, lost)) + jnp.sum(key_lost)  # a reduction is 80 instructions

    def _layer(self):
        which = self.static.weights_layer
        return self.gmem["weights_layer"][0] if which is None else which

    def _weights(self, head, chunk):
        latents = self.static.latents
        return self.gmem["w_uk"].at[self._layer(), head, :, pl.ds(latents * chunk, latents)]

    def _multiply(self, head, chunk, tile) -> None:
        static, smem = self.static, self.smem
        tokens = pl.ds(tile * static.columns, static.columns)
        plgpu.copy_gmem_to_smem(self._weights(head, chunk), smem["w"], smem["full"])
        plgpu.copy_gmem_to_smem(
            self.gmem["q"].at[tokens, head, pl.ds(0, static.nope)], smem["q"], smem["full"]
        )
        plgpu.barrier_wait(smem["full"])

        def product(acc):
            plgpu.wgmma(acc, smem["w"].T, smem["q"].T)
            return acc[...]

        out = pl.run_scoped(product, plgpu.ACC((TILE, static.columns), jnp.float32))
        smem["out"].T[...] = out.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["out"], self.gmem["query"].at[tokens, head, pl.ds(TILE * chunk, TILE)])
        plgpu.wait_smem_to_gmem(0)

    def _sum(self, head, chunk, tile) -> None:
        del tile
        static = self.static
        w = plgpu.load(self._weights(head, chunk), layout=fragments.WGMMA, optimized=False)
        w = w.astype(jnp.float32)
        for n in range(static.tokens):
            q = self.gmem["q"].at[n, head, pl.ds(0, static.nope)]
            q = plgpu.load(q, layout=fragments.ROWS, optimized=False).astype(jnp.float32)
            out = jnp.sum(w * lax.broadcast_in_dim(q, w.shape, (0,)), axis=0)
            self.gmem["query"].at[n, head, pl.ds(static.latents * chunk, static.latents)][...] = out.astype(
                jnp.bfloat16
            )


def _validate(q, compressed, norm, w_uk, pool: Pool, where: dict, layout: str, first: int):
    require(layout in LAYOUTS, f"layout={layout!r}: must be one of {LAYOUTS}")
    rows, steps, heads, width = q.shape
    nope = width - ROPE
    require(nope > 0 and nope % 64 == 0, f"nope width {nope}: must be a multiple of 64", NotImplementedError)
    for name, array, shape in (
        ("q", q, q.shape),
        ("compressed", compressed, (rows, steps, compressed.shape[-1])),
        ("norm", norm, (norm.shape[0], LATENT)),
        ("w_uk", w_uk, (norm.shape[0], heads, nope, LATENT)),
    ):
        require(array.shape == shape, f"{name} has shape {array.shape}: must be {shape}", NotImplementedError)
        require(
            array.dtype == jnp.bfloat16, f"{name} is {array.dtype}: must be bfloat16", NotImplementedError
        )
    end = first + LATENT + ROPE
    require(
        first >= 0 and end <= compressed.shape[-1],
        f"first={first}: columns up to {end} of compressed, which has {compressed.shape[-1]}",
    )
    for name, array in where.items():
        dtype, last = (jnp.int32, ()) if name in ("page", "offset") else (jnp.float32, (ROPE,))
        got, want = (array.shape, array.dtype), ((rows, steps, *last), jnp.dtype(dtype))
        require(got == want, f"{name} is {got}: must be {want}")
    scaled = layout == "fp8_656"
    widths = {"values": (LATENT if scaled else LATENT + ROPE, jnp.uint16 if layout == "bf16" else jnp.uint8)}
    if scaled:
        widths |= {"scales": (GROUPS, jnp.float32), "rope": (ROPE, jnp.uint16)}
    for name, array in pool._asdict().items():
        require((array is not None) == (name in widths), f"pool.{name}: layout {layout} has {sorted(widths)}")
        if array is not None:
            got, want = (array.shape[2:], array.dtype), ((PAGE, widths[name][0]), widths[name][1])
            require(got == want, f"pool.{name} is {got}: layout {layout} needs {want}", NotImplementedError)


def mla_prologue(
    q: Float[Array, "B T H A"],
    compressed: Float[Array, "B T columns"],
    norm: Float[Array, "Y L"],
    w_uk: Float[Array, "Y H N L"],
    weights_layer: Int[Array, ""] | int,
    pool: Pool,
    layer: Int[Array, ""] | int,
    page: Int[Array, "B T"],
    offset: Int[Array, "B T"],
    turn: tuple[Float[Array, "B T R"], Float[Array, "B T R"]],
    *,
    layout: str,
    epsilon: float,
    scale: Float[Array, ""] | float | None = None,
    first: int = 0,
    sim: bool = False,
) -> tuple[Float[Array, "B T H C"], Pool, Int[Array, "tokens 2"]]:
    """Caches new tokens and returns their absorbed queries.

    Args:
      q: queries as projected, N columns without position first, then the rotary ones. N a multiple of 64.
      compressed: the projection that holds latent and rotary key from column ``first`` on.
      norm, w_uk: stacked weights, of which ``weights_layer`` is used; a plain int saves a dependent load.
      pool: raw bits, see ``mla_decode.Pool``; donated or not used again, else the program copies it.
      layer: index into the pool.
      page, offset: where a token is stored. Page 0 is the padding page, which stays as it is.
      turn: ``rotation`` of the positions.
      layout: one of ``mla_decode.LAYOUTS``.
      epsilon: of the norm.
      scale: "fp8_flat" only: stored = real / scale.
      sim: run on array code that the GPU interpreter supports; for tests.

    Returns:
      (query [B, T, H, 576] bf16: the latent part, then the rotary part; the pool; i32 [B * T, 2]: values of
      each token that were clipped, and values that were not finite).

    Raises:
      ValueError: an argument contradicts another. NotImplementedError: a width or dtype of no kernel here.
    """
    require((scale is not None) == (layout == "fp8_flat"), f"scale={scale}: only fp8_flat has one")
    where = {"page": page, "offset": offset, "turn[0]": turn[0], "turn[1]": turn[1]}
    _validate(q, compressed, norm, w_uk, pool, where, layout, first)
    rows, steps, heads, width = q.shape
    count = rows * steps
    unit = 1 if count < 8 else 8 if count <= TILE else TILE
    padding = -count % unit
    static = _Static(
        layout=layout, tokens=count + padding, heads=heads, nope=width - ROPE, first=first,
        pages=pool.values.shape[1], epsilon=epsilon, sim=sim,
        weights_layer=weights_layer if isinstance(weights_layer, int) else None,
    )  # fmt: skip

    def flat(array):
        """[B, T, ...] as [tokens, ...]; tokens that fill up a tile are of the padding page."""
        array = array.reshape(count, *array.shape[2:])
        return jnp.pad(array, ((0, padding), *((0, 0),) * (array.ndim - 1))) if padding else array

    inputs = {
        "q": flat(q),
        "compressed": flat(compressed),
        "norm": norm,
        "w_uk": w_uk,
        "page": flat(page),
        "offset": flat(offset),
        "cos": flat(turn[0]),
        "sin": flat(turn[1]),
        "layer": jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)),
    }
    if not isinstance(weights_layer, int):
        inputs["weights_layer"] = jnp.reshape(weights_layer, (1,))
    if scale is not None:
        inputs["scale"] = jnp.reshape(jnp.asarray(scale, jnp.float32), (1,))
    refs = {name: jax.new_ref(array) for name, array in pool._asdict().items() if array is not None}
    scratch: dict = {}
    if static.tokens % 8 == 0:
        scratch = {
            "w": plgpu.SMEM((static.nope, TILE), jnp.bfloat16, transforms=_B16),
            "q": plgpu.SMEM((static.columns, static.nope), jnp.bfloat16, transforms=_B16),
            "out": plgpu.SMEM((static.columns, TILE), jnp.bfloat16, transforms=_B16),
            "full": plgpu.Barrier(num_arrivals=2),
        }
    names = [*inputs, *refs, "query", "lost"]

    def body(*arguments):
        gmem = dict(zip(names, arguments[: len(names)], strict=True))
        _Block(static, gmem, dict(zip(scratch, arguments[len(names) :], strict=True))).run()

    blocks = 2 * static.tokens + static.absorbing
    query, lost = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((static.tokens, heads, LATENT + ROPE), jnp.bfloat16),
            jax.ShapeDtypeStruct((static.tokens, 2), jnp.int32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=2048),
        kernel_name="mla_prologue",
    )(*inputs.values(), *refs.values())
    query = query[:count].reshape(rows, steps, heads, LATENT + ROPE)
    return query, Pool(**{name: jax.freeze(ref) for name, ref in refs.items()}), lost[:count]
