"""Index scores and selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.models import indexer

RANDOM = np.random.default_rng(17)


def random(*shape):
    return jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)


def test_scores_chunked_equal_whole_and_reference(monkeypatch):
    query, weight, key = random(2, 3, 5, 16), random(2, 3, 5), random(2, 24, 16)
    whole = indexer.scores(query, weight, key)
    monkeypatch.setattr(indexer, "MAX_SCORE_ELEMENTS", 2 * 3 * 5 * 7)  # 24 is halved to 6
    chunked = jax.jit(lambda *a: indexer.scores(*a))(query, weight, key)
    q, w, k = (np.asarray(a, np.float64) for a in (query, weight, key))
    expected = np.einsum("btj,btjs->bts", w, np.maximum(np.einsum("btji,bsi->btjs", q, k) / 4, 0))
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    np.testing.assert_allclose(chunked, expected, atol=1e-5)


def test_top_keeps_best_visible_positions():
    score = random(2, 3, 11)
    limit = np.array([[4, 7, 10], [0, 2, 9]])
    visible = jnp.arange(11)[None, None, :] <= jnp.asarray(limit)[:, :, None]
    chosen = np.asarray(indexer.top(score, visible, 4))
    for b, t in np.ndindex(2, 3):
        seen = np.asarray(score)[b, t, : limit[b, t] + 1]
        assert set(np.flatnonzero(chosen[b, t])) == set(np.argsort(-seen)[:4])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_top_ties_go_to_the_lowest_position(zero):
    # Exact zeros of either sign are what relu leaves; a later +0.0 must not beat an earlier -0.0.
    score = jnp.full((1, 2, 9), 0.0).at[:, :, :6].set(zero).at[:, :, 7].set(1.0).at[:, :, 8].set(-2.0)
    visible = jnp.ones((1, 2, 9), bool)
    assert np.flatnonzero(indexer.top(score, visible, 4)[0, 1]).tolist() == [0, 1, 2, 7]


def test_top_short_context_is_dense():
    visible = jnp.asarray(RANDOM.integers(0, 2, (2, 3, 7)), bool)
    np.testing.assert_array_equal(indexer.top(random(2, 3, 7), visible, 7), visible)
