import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.engine import sampling
from kvmem.engine.errors import RequestError
from kvmem.engine.request import SamplingParams

W = 11
sample = jax.jit(sampling.sample)


def rows(*params: SamplingParams) -> sampling.SamplerRows:
    columns = zip(*(sampling.one_row(p) for p in params), strict=True)
    fields = dataclasses.fields(sampling.SamplerRows)
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.uint32)
    return sampling.SamplerRows(
        **{f.name: jnp.asarray(c, d) for f, c, d in zip(fields, columns, dtypes, strict=True)}
    )


def logits(count: int, seed: int = 0) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(seed).normal(0, 2, (count, W)), jnp.float32)


def allowed(logit_W: np.ndarray, params: SamplingParams) -> set[int]:
    """The filters in plain Python: k, then p over what k left, then min-p."""
    order = sorted(range(W), key=lambda i: -logit_W[i])
    keep = order[: params.top_k or W]
    weights = {i: np.exp(np.float64(logit_W[i]) / params.temperature) for i in keep}
    total, before, nucleus = sum(weights.values()), 0.0, []
    for i in keep:
        if before < params.top_p * total:
            nucleus.append(i)
        before += weights[i]
    return {i for i in nucleus if weights[i] >= params.min_p * weights[order[0]]}


PARAMS = [
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(temperature=1.5, top_k=5, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("params", PARAMS, ids=["temperature", "top_k", "top_p", "min_p", "all"])
def test_sample_many_draws_match_the_filtered_softmax(params):
    n = 4000
    logit_W = np.asarray(logits(1, seed=3))[0]
    one = rows(params)
    many = jax.tree.map(lambda x: jnp.repeat(x, n), one)
    token = np.asarray(sample(jnp.tile(logit_W, (n, 1)), many, jnp.arange(n)).token_B)
    keep = allowed(logit_W, params)
    assert set(token.tolist()) <= keep
    weights = np.array([np.exp(logit_W[i] / params.temperature) if i in keep else 0.0 for i in range(W)])
    expected = weights / weights.sum()
    counts = np.bincount(token, minlength=W) / n
    # Five standard deviations of a binomial share over 4,000 draws: at most 5 * 0.5 / sqrt(4000) = 0.040.
    assert np.abs(counts - expected).max() < 0.040


def test_sample_greedy_takes_the_largest_and_the_lowest_id_on_a_tie():
    logit_BW = jnp.zeros((2, W)).at[0, 4].set(3.0).at[1, 6].set(2.0).at[1, 9].set(2.0)
    out = sample(logit_BW, sampling.init(2), jnp.array([5, 6]))
    assert out.token_B.tolist() == [4, 6]


def test_sample_token_depends_on_seed_and_position_not_on_row_or_company():
    params = [SamplingParams(temperature=1.0, seed=s) for s in (7, 8, 9)]
    logit_W = logits(1, seed=5)[0]
    alone = [int(sample(logit_W[None], rows(params[0]), jnp.array([p])).token_B[0]) for p in range(40)]
    in_company = []
    for p in range(40):
        batch = jnp.stack([logits(1, seed=p)[0], logit_W, logit_W])
        out = sample(batch, rows(params[1], params[2], params[0]), jnp.array([3, p, p]))
        in_company.append(int(out.token_B[2]))
    assert in_company == alone
    assert len(set(alone)) > 3


def test_sample_logprob_is_of_the_unscaled_unfiltered_distribution():
    logit_BW = logits(3)
    params = [SamplingParams(), SamplingParams(temperature=0.4, top_k=2), SamplingParams(temperature=3.0)]
    out = sample(logit_BW, rows(*params), jnp.array([1, 2, 3]))
    x = np.asarray(logit_BW, np.float64)
    expected = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    got = expected[np.arange(3), np.asarray(out.token_B)]
    np.testing.assert_allclose(np.asarray(out.logprob_B), got, rtol=0, atol=1e-5)  # f32 over 11 terms


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_nonfinite_row_is_flagged_and_others_keep_their_tokens(bad, temperature):
    params = rows(*[SamplingParams(temperature=temperature, seed=s) for s in (1, 2, 3)])
    clean = logits(3)
    out = sample(clean.at[1, 5].set(bad), params, jnp.array([4, 5, 6]))
    reference = sample(clean, params, jnp.array([4, 5, 6]))
    assert out.finite_B.tolist() == [True, False, True]
    assert out.token_B[1] == 0
    assert out.token_B[jnp.array([0, 2])].tolist() == reference.token_B[jnp.array([0, 2])].tolist()
    assert bool(jnp.all(jnp.isfinite(out.logprob_B)))


def test_sample_minus_infinity_masks_a_token_but_not_a_row():
    logit_BW = logits(2).at[0, :].set(-jnp.inf).at[1, 3].set(-jnp.inf)
    out = sample(logit_BW, sampling.init(2), jnp.array([0, 0]))
    assert out.finite_B.tolist() == [False, True]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be >= 0"),
        ({"temperature": float("nan")}, "must be finite"),
        ({"top_p": 0.0}, "top_p=0.0 must be in"),
        ({"min_p": 1.5}, "min_p=1.5 must be in"),
        ({"top_k": -1}, "top_k=-1 must be"),
        ({"seed": 2**32}, "must fit 32 bits"),
        ({"stop_strings": [""]}, "empty stop string"),
        ({"best_of": 3}, "unknown sampling options .'best_of'."),
    ],
)
def test_from_mapping_bad_option_names_value_and_rule(options, rule):
    with pytest.raises(RequestError, match=rule):
        SamplingParams.from_mapping(options)
