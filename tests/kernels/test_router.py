"""The router kernel: its thread programs on numpy against an oracle, its limits, its registers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import int4_inline, router, xla
from tests.kernels import harness, simt_numpy

FACTOR = 2.5
X_TD = jnp.zeros((2, 256), jnp.bfloat16)


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch, request):
    if "aot" not in request.keywords:
        monkeypatch.setattr(router, "_launch", simt_numpy.launch)


def make(tokens: int, experts: int, load: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(23)
    logit = rng.standard_normal((tokens, experts)).astype(np.float32)
    bias = (0.1 * rng.standard_normal(experts)).astype(np.float32)
    if load == "one":  # an expert that every token chooses
        bias[experts // 2] = 2.0
    if load == "ties":
        logit, bias = np.round(logit), np.zeros_like(bias)
    if load == "low":  # every score is far below zero once the bias is on
        bias -= 4.0
    return logit, bias


def oracle(logit, bias, choices: int) -> tuple[np.ndarray, np.ndarray]:
    """In f64; a stable sort gives ties to the lower expert."""
    logit, bias = np.asarray(logit), np.asarray(bias)
    score = 0.5 * (1.0 + np.tanh(logit.astype(np.float64) / 2))
    expert = np.argsort(-(score + bias), axis=1, kind="stable")[:, :choices]
    weight = np.take_along_axis(score, expert, 1)
    return expert, FACTOR * weight / weight.sum(1, keepdims=True)


CASES = [
    (1, 96, 8, 8, "uniform"),
    (3, 70, 5, 8, "uniform"),  # experts that do not fill the lanes
    (21, 384, 8, 8, "one"),
    (61, 256, 8, 16, "ties"),
    (67, 33, 8, 16, "low"),  # more slots than one block of threads has
    (301, 40, 7, 32, "one"),
]


def choose(logit, bias, choices: int, **options) -> list[np.ndarray]:
    out = router.choose(jnp.asarray(logit), jnp.asarray(bias), choices=choices, factor=FACTOR, **options)
    return [np.asarray(a) for a in out]


@pytest.mark.parametrize(("tokens", "experts", "choices", "block", "load"), CASES)
def test_choose_and_route_any_load_matches_the_oracle(tokens, experts, choices, block, load):
    logit, bias = make(tokens, experts, load)
    x = jax.random.normal(jax.random.key(5), (tokens, 256)).astype(jnp.bfloat16)
    expert, weight, prepared = router.choose_and_route(
        jnp.asarray(logit), jnp.asarray(bias), x, 2, choices=choices, factor=FACTOR, tokens=block
    )
    expert, weight = np.asarray(expert), np.asarray(weight)
    want_expert, want_weight = oracle(logit, bias, choices)
    np.testing.assert_array_equal(expert, want_expert)
    # f32: a sigmoid errs by a few 2^-24, the sum of 8 by 8 x 2^-24, of values up to 2.5
    np.testing.assert_allclose(weight, want_weight, atol=FACTOR * 16 * 2**-24)
    if tokens == 1:
        assert prepared is None
        return
    np.testing.assert_array_equal(prepared.x_TD, int4_inline.permute_k(x))
    routing = jax.tree.map(np.asarray, prepared.routing)
    slots = expert.ravel()
    order = np.argsort(slots, kind="stable")
    np.testing.assert_array_equal(routing.token, order // choices)
    np.testing.assert_array_equal(routing.position.ravel()[order], np.arange(slots.size))
    count = np.bincount(slots, minlength=experts)
    first = np.cumsum(count) - count
    blocks = [
        (e + 2 * experts, first[e] + done, min(block, count[e] - done))
        for e in range(experts)
        for done in range(0, count[e], block)
    ]
    assert routing.block[3, 0] == len(blocks)
    np.testing.assert_array_equal(routing.block[:3, : len(blocks)].T, blocks)


@pytest.mark.parametrize(("tokens", "experts", "choices", "block", "load"), CASES)
def test_xla_choose_any_load_matches_the_oracle(tokens, experts, choices, block, load):
    logit, bias = make(tokens, experts, load)
    expert, weight = xla.choose(jnp.asarray(logit), jnp.asarray(bias), choices=choices, factor=FACTOR)
    want_expert, want_weight = oracle(logit, bias, choices)
    np.testing.assert_array_equal(expert, want_expert)
    np.testing.assert_allclose(weight, want_weight, atol=FACTOR * 16 * 2**-24)


MUTATIONS = {
    "no bias": lambda logit, bias: (logit, 0 * bias),
    "bias in the weights": lambda logit, bias: (
        np.log(1 / (1 / (1 + np.exp(-logit)) + bias) - 1) * -1,
        0 * bias,
    ),
    "next token": lambda logit, bias: (np.roll(logit, 1, 0), bias),
    "shifted expert": lambda logit, bias: (np.roll(logit, 1, 1), bias),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_choose_mutated_input_differs(name):
    logit, bias = make(7, 48, "uniform")
    bias = np.abs(bias) * 0.1
    changed = [np.asarray(a, np.float32) for a in MUTATIONS[name](logit, bias)]
    expert, weight = choose(*changed, 6)
    want_expert, want_weight = oracle(logit, bias, 6)
    assert (expert != want_expert).any() or np.abs(weight - want_weight).max() > 1e-3


def test_choose_without_normalising_returns_the_sigmoids_times_the_factor():
    logit, bias = make(3, 40, "uniform")
    expert, weight = choose(logit, bias, 4, normalise=False)
    score = 1 / (1 + np.exp(-np.take_along_axis(logit, expert, 1).astype(np.float64)))
    np.testing.assert_allclose(weight, FACTOR * score, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_choose_non_finite_logits_choose_distinct_experts_in_range(bad):
    logit, bias = make(5, 70, "uniform")
    logit[1, 68], logit[2, 3:], logit[3] = bad, bad, bad
    expert, weight = choose(logit, bias, 8)
    assert (expert < 70).all()
    assert all(len(set(row)) == 8 for row in expert)
    assert np.isfinite(weight[[0, 4]]).all()
    if np.isnan(bad):
        assert np.isnan(weight[1:4]).all()


@pytest.mark.parametrize("choices", [0, 33, 41])
def test_choose_more_choices_than_lanes_or_experts_raises(choices):
    with pytest.raises(ValueError, match=f"choices={choices}"):
        choose(np.zeros((2, 40), np.float32), np.zeros(40, np.float32), choices)


def test_route_more_experts_than_threads_raises():
    with pytest.raises(NotImplementedError, match="513 experts"):
        router.route(jnp.zeros((2, 8), jnp.int32), X_TD, 0, num_experts=513, tokens=8)


def test_route_tokens_of_another_width_raises():
    with pytest.raises(ValueError, match=r"bfloat16\[2, 192\]"):
        router.route(jnp.zeros((2, 8), jnp.int32), X_TD[:, :192], 0, num_experts=51, tokens=8)


@pytest.mark.aot
@harness.needs_ptxas
@pytest.mark.parametrize(("tokens", "kernels"), [(1, 1), (8, 1), (64, 2), (1024, 2)])
@pytest.mark.parametrize("experts", [256, 384])
def test_choose_and_route_compiles_to_few_kernels_without_spills(tokens, kernels, experts):
    shapes = (
        jax.ShapeDtypeStruct((tokens, experts), jnp.float32),
        jax.ShapeDtypeStruct((experts,), jnp.float32),
        jax.ShapeDtypeStruct((tokens, 6144), jnp.bfloat16),
    )
    run = functools.partial(router.choose_and_route, layer=2, choices=8, factor=FACTOR, tokens=8)
    compiled = harness.compile_h200(run, *shapes)
    assert [spilled for _, spilled in compiled.kernels] == [0] * kernels
