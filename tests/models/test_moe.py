"""Router and experts against loops in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.formats import qtensor
from kvmem.models import get_config, moe

CONFIG = get_config("kimi_tiny_parity")  # 8 experts in 2 groups, 1 kept, 3 a token
TOKENS = 37
RANDOM = np.random.default_rng(11)
X_TD = RANDOM.standard_normal((TOKENS, 64)).astype(np.float32)
ROUTER_ED = (RANDOM.standard_normal((8, 64)) / 8).astype(np.float32)
BIAS_E = (0.5 * RANDOM.standard_normal(8)).astype(np.float32)
WEIGHTS = {"router": jnp.asarray(ROUTER_ED), "router_bias": jnp.asarray(BIAS_E)}


def reference_route(config):
    """Selection by biased sigmoids, best group by its two best, weights unbiased and normalised."""
    rows = []
    for x in X_TD.astype(np.float64):
        affinity = 1 / (1 + np.exp(-ROUTER_ED.astype(np.float64) @ x))
        biased = affinity + BIAS_E
        groups = np.split(np.arange(8), config.n_group)
        ranked = sorted(groups, key=lambda g: -np.sort(biased[g])[-2:].sum())
        allowed = np.concatenate(ranked[: config.topk_group])
        chosen = allowed[np.argsort(-biased[allowed])][: config.experts_per_token]
        rows.append({e: affinity[e] / affinity[chosen].sum() * config.routed_scaling_factor for e in chosen})
    return rows


@pytest.mark.parametrize("groups", [(2, 1), (1, 1), (4, 2)])
def test_route_selects_and_weighs_as_the_reference(groups):
    config = dataclasses.replace(CONFIG, n_group=groups[0], topk_group=groups[1])
    expert_TK, weight_TK = moe.route(WEIGHTS, config, jnp.asarray(X_TD))
    for row, (experts, weights) in enumerate(zip(np.asarray(expert_TK), np.asarray(weight_TK))):
        expected = reference_route(config)[row]
        assert set(experts) == set(expected)
        np.testing.assert_allclose(weights, [expected[e] for e in experts], rtol=1e-5)


def test_route_bias_moves_selection_but_not_weights():
    favour = {**WEIGHTS, "router_bias": WEIGHTS["router_bias"].at[5].set(9.0)}
    config = dataclasses.replace(CONFIG, n_group=1, topk_group=1)
    expert_TK, weight_TK = moe.route(favour, config, jnp.asarray(X_TD))
    assert bool(jnp.all(jnp.any(expert_TK == 5, axis=1)))
    np.testing.assert_allclose(weight_TK.sum(1), config.routed_scaling_factor, rtol=1e-5)


def reference_experts(expert_TK, weight_TK, gate_up, down):
    out = np.zeros((TOKENS, 64))
    for t in range(TOKENS):
        for e, w in zip(expert_TK[t], weight_TK[t]):
            gate, up = gate_up[e, 0] @ X_TD[t], gate_up[e, 1] @ X_TD[t]
            out[t] += w * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("storage", ["plain", "int4_group", "fp8_block"])
def test_experts_equal_a_loop_over_chosen_experts(storage):
    gate_up = jnp.asarray(RANDOM.standard_normal((8, 2, 32, 64)) / 8, jnp.float32)
    down = jnp.asarray(RANDOM.standard_normal((8, 64, 32)) / 6, jnp.float32)
    if storage != "plain":
        group = (1, 32) if storage == "int4_group" else (32, 32)
        gate_up, down = (qtensor.quantize(w, storage, group) for w in (gate_up, down))
    expert_TK, weight_TK = moe.route(WEIGHTS, CONFIG, jnp.asarray(X_TD))
    ours = jax.jit(moe.experts)(jnp.asarray(X_TD), expert_TK, weight_TK, gate_up, down)
    plain = [w if storage == "plain" else w.dequantize(jnp.float32) for w in (gate_up, down)]
    expected = reference_experts(*map(np.asarray, (expert_TK, weight_TK, *plain)))
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


def test_kernel_experts_other_formats_are_refused():
    bf16 = jnp.zeros((3, 8, 2, 32, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="reads INT4"):
        moe.kernel_experts(WEIGHTS, CONFIG, jnp.asarray(X_TD), bf16, bf16, 0)


@pytest.mark.parametrize("cut", ["with_their_columns", "mutation_from_the_next_rank"])
def test_D2_scales_of_the_second_product_are_cut_with_their_columns(cut):
    """Ranks hold columns of ``down`` and the scales of these; their parts add up to the whole product."""
    ranks, group = 4, (1, 16)
    gate_up = jnp.asarray(RANDOM.standard_normal((8, 2, 128, 64)) / 8, jnp.float32)
    down = jnp.asarray(RANDOM.standard_normal((8, 64, 128)) * RANDOM.uniform(0.1, 2.0, 128) / 11, jnp.float32)
    gate_up, down = (qtensor.quantize(w, "int4_group", group) for w in (gate_up, down))
    expert_TK, weight_TK = moe.route(WEIGHTS, CONFIG, jnp.asarray(X_TD))
    run = jax.jit(moe.experts)
    whole = np.asarray(run(jnp.asarray(X_TD), expert_TK, weight_TK, gate_up, down))
    parts = []
    for rank in range(ranks):
        scale = rank if cut == "with_their_columns" else (rank + 1) % ranks
        rows, columns = slice(32 * rank, 32 * (rank + 1)), slice(2 * scale, 2 * (scale + 1))
        mine = dataclasses.replace(gate_up, data=gate_up.data[:, :, rows], scale=gate_up.scale[:, :, rows])
        second = dataclasses.replace(down, data=down.data[..., rows], scale=down.scale[..., columns])
        parts.append(np.asarray(run(jnp.asarray(X_TD), expert_TK, weight_TK, mine, second)))
    error = np.abs(np.sum(parts, axis=0) - whole).max() / np.abs(whole).max()
    # f32 sums of 128 terms in another order: 128 x 2^-24.
    assert (error < 2e-5) == (cut == "with_their_columns")


def test_kernel_experts_selection_of_groups_is_refused():
    gate_up, down = (
        qtensor.quantize(jnp.ones(shape, jnp.float32), "int4_group", (1, 32))
        for shape in ((2, 8, 2, 32, 64), (2, 8, 64, 32))
    )
    with pytest.raises(NotImplementedError, match="topk_group=1 of n_group=2"):
        moe.kernel_experts(WEIGHTS, CONFIG, jnp.asarray(X_TD, jnp.bfloat16), gate_up, down, 0)
