"""Products of a few tokens: indexing in the interpreter, refusals, lowering and registers.

The register code has no interpreter: ``experiments/bench_contract.py`` proves its numbers on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import skinny_matmul
from pallas_kernels.skinny_matmul import Config
from tests.kernels import harness


def case(tokens, groups, columns, rows, k):
    rng = np.random.default_rng(k)
    x = jnp.asarray(2 * rng.standard_normal((tokens, groups, columns)), jnp.bfloat16)
    return x, jnp.asarray(rng.standard_normal((3, rows, k)), jnp.bfloat16), jnp.int32(2)


def expected(x, w, layer, *, first, epsilon, gated=False):
    """[T, out] f64: group by group, row by row."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)[int(layer)]
    tokens, groups, _ = x.shape
    rows, k = w.shape
    out = np.zeros((tokens, rows))
    for t, row in np.ndindex(tokens, rows):
        own = x[t, row // (rows // groups), first : first + k]
        factor = 1.0 if epsilon is None else 1 / np.sqrt(np.mean(own**2) + epsilon)
        out[t, row] = own @ w[row] * factor
    if gated:
        gate, up = np.split(out, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up
    return out


@functools.cache
def run(groups, first, epsilon, gated=False, half=8):
    arguments = case(3, groups, 272, 64, 256)
    options = {"epsilon": epsilon, "first": first, "gated": gated, "config": Config(half=half)}
    call = functools.partial(skinny_matmul.skinny_matmul, **options, sim=True)
    return arguments, harness.interpret(call, *arguments)


def error(out, want) -> float:
    return np.abs(np.asarray(out, np.float64) - want).max() / np.abs(want).max()


def test_skinny_matmul_adds_before_it_rounds():
    arguments, out = run(1, 0, None, False, 8)
    big = jnp.full(out.shape, 2.0**12, jnp.bfloat16)
    call = functools.partial(skinny_matmul.skinny_matmul, sim=True)
    got = harness.interpret(call, *arguments, big, -big + 16)
    want = expected(*arguments, first=0, epsilon=None) + 16
    assert error(got, want) < 2.0**-8
    assert error(out, want) > 0.1


@pytest.mark.parametrize(
    ("groups", "first", "epsilon", "gated", "half"),
    [(1, 16, 1e-5, False, 8), (2, 0, None, False, 8), (1, 8, 1e-5, True, 4), (1, 0, None, False, 2)],
)
def test_skinny_matmul_any_shape_matches_oracle(groups, first, epsilon, gated, half):
    arguments, out = run(groups, first, epsilon, gated, half)
    assert out.dtype == jnp.bfloat16
    # One rounding to bf16; sums of 256 in f32.
    assert error(out, expected(*arguments, first=first, epsilon=epsilon, gated=gated)) < 2.0**-8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, w, y: ((x[:, ::-1], w, y), {}),
        lambda x, w, y: ((x, w, y - 1), {}),
        lambda x, w, y: ((jnp.roll(x, 1, axis=0), w, y), {}),
        lambda x, w, y: ((x, jnp.roll(w, 16, axis=1), y), {}),
        lambda x, w, y: ((x, w, y), {"first": 8}),
        lambda x, w, y: ((x, w, y), {"epsilon": 1e-5}),
        lambda x, w, y: ((x, jnp.roll(w, 4, axis=1), y), {}),
    ],
    ids=["groups exchanged", "other layer", "shifted tokens", "shifted blocks", "first", "norm", "rows"],
)
def test_skinny_matmul_mutated_input_fails_the_contract(wrong):
    arguments, out = run(2, 0, None)
    changed, options = wrong(*arguments)
    assert error(out, expected(*changed, **{"first": 0, "epsilon": None} | options)) > 0.1


@pytest.mark.parametrize(
    ("shape", "options", "kind", "match"),
    [
        ((33, 1, 256, 64, 256), {}, NotImplementedError, "33 tokens: must be 1 to 32"),
        ((3, 1, 256, 42, 256), {}, NotImplementedError, "42 rows in 1 groups"),
        ((3, 4, 256, 40, 256), {}, NotImplementedError, "40 rows in 4 groups"),
        ((3, 2, 256, 64, 256), {"gated": True}, NotImplementedError, "gated with 2 groups"),
        ((3, 1, 256, 64, 192), {}, NotImplementedError, "k=192"),
        ((3, 1, 256, 64, 256), {"first": 8}, ValueError, "first=8: x has 256 columns, w needs 256"),
        ((3, 1, 256, 64, 256), {"config": Config(warps=6)}, ValueError, "warps=6"),
        ((3, 1, 256, 64, 256), {"out_dtype": jnp.float16}, ValueError, "out_dtype"),
    ],
)
def test_skinny_matmul_wrong_argument_is_refused(shape, options, kind, match):
    with pytest.raises(kind, match=match):
        skinny_matmul.skinny_matmul(*case(*shape), **options)


# tokens, groups, columns, rows, k, epsilon, gated: Kimi's products on one rank of eight.
SHAPES = {
    "qkv_a": (8, 1, 7168, 2112, 7168, 1e-5, False),
    "q_b": (1, 1, 2112, 1536, 1536, 1e-5, False),
    "w_uv": (16, 8, 512, 1024, 512, None, False),
    "o": (8, 1, 1024, 7168, 1024, None, False),
    "shared_up": (8, 1, 7168, 512, 7168, None, True),
}


def compiled_call(name):
    tokens, groups, columns, rows, k, epsilon, gated = SHAPES[name]
    x = jax.ShapeDtypeStruct((tokens, groups, columns), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((3, rows, k), jnp.bfloat16)
    call = functools.partial(skinny_matmul.skinny_matmul, epsilon=epsilon, gated=gated)
    return call, x, w, jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.parametrize(
    ("rows", "k", "warps", "half"),
    [
        (2112, 7168, 16, 8),
        (1536, 1536, 16, 8),
        (7168, 1024, 8, 8),
        (512, 7168, 16, 2),
        (7168, 256, 4, 8),
        (2624, 6144, 8, 8),
        (6144, 2048, 4, 8),
        (1024, 512, 4, 4),
    ],
)
def test_choose_config_of_the_models_products(rows, k, warps, half):
    config = skinny_matmul.choose_config(rows, k)
    assert (config.warps, config.half) == (warps, half)


@pytest.mark.parametrize("name", ["q_b", "w_uv"])
def test_skinny_matmul_lowers(name):
    assert "mosaic_gpu" in harness.lower(*compiled_call(name)).as_text()


@pytest.mark.aot
@harness.needs_ptxas
@pytest.mark.parametrize("name", SHAPES)
def test_skinny_matmul_compiled_keeps_its_registers_and_copies_no_stack(name):
    call, x, w, layer = compiled_call(name)
    compiled = harness.compile_h200(call, x, w, layer)
    assert compiled.spills == 0
    harness.assert_no_copy(compiled.hlo, w.shape)
