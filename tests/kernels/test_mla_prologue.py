"""What precedes attention: the kernel in the interpreter and kvmem's own functions, against one oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import store
from kvmem.models import layers
from pallas_kernels import mla_prologue, ref, xla
from pallas_kernels.mla_decode import Pool
from tests.kernels import harness

STORES = {"bf16": "bf16_576", "fp8_flat": "fp8_576", "fp8_656": "fp8_656"}
NAMES = ("values", "scales", "rope")


def arguments(case: dict) -> tuple:
    # The oracle's cosines: XLA's differ in the last bit, which moves a rounding to bf16 now and then.
    cos, sin = (jnp.asarray(f(case["angle"]), jnp.float32) for f in (np.cos, np.sin))
    case = jax.tree.map(jnp.asarray, case)
    pool = Pool(*(case["pool"].get(name) for name in NAMES))
    names = ("q", "compressed", "norm", "w_uk", "weights_layer")
    where = (case["layer"], case["page"], case["offset"], mla_prologue.turns(cos, sin))
    return (*(case[name] for name in names), pool, *where)


def options(layout: str) -> dict:
    scale = ref.PROLOGUE_SCALE if layout == "fp8_flat" else None
    return {
        "layout": layout,
        "epsilon": ref.PROLOGUE_EPSILON,
        "scale": scale,
        "first": ref.PROLOGUE_FIRST,
    }


@functools.cache
def run(layout: str, tokens: int, heads: int, nope: int, implementation: str = "interpreter"):
    case = ref.mla_prologue_case(layout, tokens, heads, nope)
    if implementation == "xla":
        # Not compiled: XLA would divide by the scale as a product with its inverse.
        return case, xla.mla_prologue(*arguments(case), **options(layout))
    call = functools.partial(mla_prologue.mla_prologue, **options(layout), sim=True)
    return case, harness.interpret(call, *arguments(case))


def check_pool(pool, want_pool, moved: int = 0) -> None:
    """Equal bits, but for ``moved`` values of the next code: XLA may fuse a rotation's product and sum."""
    for name, want in want_pool.items():
        got = np.asarray(getattr(pool, name))
        apart = np.abs(got.astype(np.float64) - want.astype(np.float64))
        assert np.count_nonzero(apart) <= moved, name
        assert apart.max() <= 1, name


def check(query, pool, lost, want_query, want_pool, want_lost) -> None:
    """Stored bits, counters and the rotary part are equal; sums differ by their order and one rounding."""
    check_pool(pool, want_pool, moved=len(query) // 20)
    assert np.asarray(lost).sum(axis=0).tolist() == list(want_lost)
    out = np.asarray(query, np.float64)
    np.testing.assert_allclose(out[..., 512:], want_query[..., 512:], rtol=2.0**-7 if len(query) > 20 else 0)
    size = np.abs(want_query[..., :512]).max()
    np.testing.assert_allclose(
        out[..., :512], want_query[..., :512], rtol=2.0**-8, atol=2.0**-18 * size, err_msg="absorbed"
    )


SHAPES = [
    pytest.param("fp8_flat", 1, 1, 64, id="fp8_flat-b1"),
    pytest.param("bf16", 5, 1, 128, id="bf16-b5"),
    pytest.param("fp8_656", 8, 1, 64, id="fp8_656-b8"),
    pytest.param("fp8_flat", 11, 2, 192, id="fp8_flat-b11-padded", marks=pytest.mark.slow),
    pytest.param("fp8_656", 72, 1, 64, id="fp8_656-b72-two-tiles", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "tokens", "heads", "nope"), SHAPES)
def test_mla_prologue_any_batch_matches_oracle(layout, tokens, heads, nope):
    case, out = run(layout, tokens, heads, nope)
    check(*out, *ref.mla_prologue(case, layout))


@pytest.mark.parametrize("layout", STORES)
def test_mla_prologue_in_plain_jax_matches_oracle(layout):
    case, out = run(layout, 7, 2, 64, "xla")
    check(*out, *ref.mla_prologue(case, layout))


@pytest.mark.parametrize("layout", STORES)
def test_mla_prologue_oracle_equals_the_model_and_its_store(layout):
    case = ref.mla_prologue_case(layout, 7, 2, 64)
    _, want_pool, want_lost = ref.mla_prologue(case, layout)
    shape = store.CacheShape(num_layers=2, num_index_layers=0, latent=512, rope=64, index_dim=0)
    kv = store.init(
        shape, STORES[layout], num_pages=ref.PROLOGUE_PAGES, page_size=64, scale=ref.PROLOGUE_SCALE
    )
    kv = dataclasses.replace(kv, **{name: jnp.asarray(array) for name, array in case["pool"].items()})
    token = jnp.asarray(case["compressed"])[..., ref.PROLOGUE_FIRST :]
    norm = jnp.asarray(case["norm"][case["weights_layer"]])
    latent = layers.rmsnorm(token[..., :512], norm, ref.PROLOGUE_EPSILON)
    # The case draws angles freely: at position 1 they are the frequencies, token by token.
    one = jnp.ones((1, 1), jnp.int32)
    key = [layers.rotate(token[n : n + 1, :, 512:576], one, case["angle"][n, 0]) for n in range(7)]
    entry = jnp.concatenate([latent, jnp.concatenate(key)], axis=-1)
    kv = store.write_latent(kv, case["layer"], jnp.asarray(case["page"]), jnp.asarray(case["offset"]), entry)
    check_pool(kv, want_pool)
    assert [int(kv.saturated), int(kv.nonfinite)] == want_lost.tolist()
    assert min(want_lost) > 0 or layout != "fp8_flat"


def test_rotation_positions_equals_the_layers_own():
    rng = np.random.default_rng(3)
    position_BT = jnp.asarray(rng.integers(0, 5000, (5, 2)), jnp.int32)
    frequencies = (10.0 ** -np.linspace(0, 4, 32)).astype(np.float32)
    x = jnp.asarray(rng.standard_normal((5, 2, 64)), jnp.float32)
    cos, sin = mla_prologue.rotation(position_BT, jnp.asarray(frequencies))
    swapped = x.reshape(5, 2, 32, 2)[..., ::-1].reshape(x.shape)
    np.testing.assert_array_equal(x * cos + swapped * sin, layers.rotate(x, position_BT, frequencies))


MUTATIONS = {
    "other_layer": {"layer": 0},
    "other_weights": {"weights_layer": 1},
    "shifted_offset": {"offset": lambda offset: (offset + 1) % 64},
    "exchanged_pages": {"page": lambda page: np.roll(page, 1, axis=0)},
    "written_padding": {"page": lambda page: np.where(page == 0, 1, page)},
    "turned_back": {"angle": lambda angle: -angle},
    "shifted_columns": {"compressed": lambda x: np.roll(x, 1, axis=-1)},
    "latents_unscaled": {"norm": lambda norm: np.ones_like(norm)},
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mla_prologue_mutated_input_fails_the_contract(mutation):
    case, out = run("bf16", 5, 1, 128)
    changes = MUTATIONS[mutation]
    wrong = {name: value(case[name]) if callable(value) else value for name, value in changes.items()}
    with pytest.raises(AssertionError):
        check(*out, *ref.mla_prologue(case | wrong, "bf16"))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"layout": "fp8", "scale": None}, ValueError, "layout='fp8'"),
        ({"scale": None}, ValueError, "only fp8_flat has one"),
        ({"layout": "bf16", "scale": None}, NotImplementedError, r"pool\.values is"),
        ({"first": 40}, ValueError, "first=40: columns up to 616 of compressed, which has 608"),
        ({"q": jnp.zeros((5, 1, 2, 100), jnp.bfloat16)}, NotImplementedError, "nope width 36"),
        ({"q": jnp.zeros((5, 1, 2, 128), jnp.float32)}, NotImplementedError, "q is float32"),
        ({"page": jnp.zeros((5, 1), jnp.int16)}, ValueError, r"page is .*int16"),
    ],
)
def test_mla_prologue_wrong_argument_is_refused(changes, error, match):
    values = list(arguments(ref.mla_prologue_case("fp8_flat", 5, 2, 64)))
    for name, position in (("q", 0), ("page", 7)):
        if name in changes:
            values[position] = changes[name]
    keywords = options("fp8_flat") | {k: v for k, v in changes.items() if k not in ("q", "page")}
    with pytest.raises(error, match=match):
        mla_prologue.mla_prologue(*values, **keywords)


def abstract(layout: str, rows: int):
    """Arguments at serving size: eight heads of Kimi, a pool of more than 2**31 elements."""
    array, i32, bf16 = jax.ShapeDtypeStruct, jnp.int32, jnp.bfloat16
    pages = (2, 70_001, 64)
    pool = {
        "bf16": Pool(array((*pages, 576), jnp.uint16)),
        "fp8_flat": Pool(array((*pages, 576), jnp.uint8)),
        "fp8_656": Pool(
            array((*pages, 512), jnp.uint8), array((*pages, 4), jnp.float32), array((*pages, 64), jnp.uint16)
        ),
    }[layout]
    turn = array((rows, 1, 64), jnp.float32)
    return (
        array((rows, 1, 8, 192), bf16), array((rows, 1, 2112), bf16), array((3, 512), bf16),
        array((3, 8, 128, 512), bf16), array((), i32), pool, array((), i32), array((rows, 1), i32),
        array((rows, 1), i32), (turn, turn),
    )  # fmt: skip


def layers_of(layout: str, number: int):
    """The state passes through so many calls, as through the layers of a step."""

    def call(q, compressed, norm, w_uk, weights_layer, pool, layer, *rest):
        out = []
        for step in range(number):
            query, pool, lost = mla_prologue.mla_prologue(
                q, compressed, norm, w_uk, weights_layer, pool, layer + step, *rest,
                **options(layout) | {"first": 1536},
            )  # fmt: skip
            out += [query, lost]
        return out, pool

    return call


@pytest.mark.parametrize(("layout", "rows"), [("fp8_656", 1), ("fp8_flat", 12)])
def test_mla_prologue_lowers(layout, rows):
    assert "mosaic_gpu" in harness.lower(layers_of(layout, 1), *abstract(layout, rows)).as_text()


@pytest.mark.aot
@harness.needs_ptxas
@pytest.mark.parametrize(("layout", "rows"), [("bf16", 1), ("fp8_flat", 64), ("fp8_656", 8)])
def test_mla_prologue_compiled_updates_the_pool_in_place(layout, rows):
    arguments = abstract(layout, rows)
    compiled = harness.compile_h200(layers_of(layout, 3), *arguments, donate=(5,))
    assert compiled.spills == 0
    for array in jax.tree.leaves(arguments[5]):
        harness.assert_no_copy(compiled.hlo, array.shape)
