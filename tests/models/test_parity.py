"""Our logits against transformers' (committed goldens, or fresh seeds under ``make parity``), in f32.

Bound: 2e-5 of the largest logit. Both sides compute in f32 and sum in different orders over at most 96 terms
and 8 layers; what is seen is 2e-6.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import store
from kvmem.checkpoint import hf
from kvmem.models import config as config_module
from kvmem.models import decoder, layers, moe
from tests.parity import reference

CASES = reference.CASES
FAMILIES = ("kimi", "glm")
STATIC = ("config", "attention", "all_logits")
# Compiling is nearly all of the time, and unoptimised code computes the same.
QUICK = {"xla_backend_optimization_level": 0}
forward = jax.jit(decoder.forward, static_argnames=STATIC, compiler_options=QUICK)


@functools.cache
def load(case):
    """Config, f32 parameters read by the project's own loader, and the reference, of one case."""
    stored = reference.read(case)
    config, params, report = hf.load(stored.directory, "f32")
    assert not report.unused
    # One name for all cases of a family, so that they share a compilation.
    return dataclasses.replace(config, name=config.family), params, stored


def tables(rows, tokens, page_size):
    """Page tables of rows of up to ``tokens`` tokens: every row has its own pages, in descending order."""
    pages = -(-tokens // page_size)
    return jnp.arange(rows * pages, 0, -1, dtype=jnp.int32).reshape(rows, pages)


def empty_cache(config, table_BM, page_size):
    return store.init(
        decoder.cache_shape(config), "f32_576", num_pages=table_BM.size + 1, page_size=page_size
    )


def prefill(step, case, page_size=4, config=None, **options):
    """All prompts of a case as one mixed batch; logits of each prompt, [T, W]."""
    own, params, stored = load(case)
    config = config or own
    longest = max(len(t) for t in stored.tokens)
    tokens_BT = np.stack([np.pad(t, (0, longest - len(t)), constant_values=7) for t in stored.tokens])
    table_BM = tables(len(stored.tokens), longest, page_size)
    batch = decoder.StepBatch(
        tokens_BT=jnp.asarray(tokens_BT, jnp.int32),
        num_new_B=jnp.asarray([len(t) for t in stored.tokens], jnp.int32),
        length_B=jnp.zeros(len(stored.tokens), jnp.int32),
        table_BM=table_BM,
    )
    kv = empty_cache(config, table_BM, page_size)
    logits_BTW, kv = step(params, config, kv, batch, all_logits=True, **options)
    assert int(kv.nonfinite) == int(kv.saturated) == 0
    return [np.asarray(row)[: len(t)] for row, t in zip(logits_BTW, stored.tokens)]


def difference(ours, theirs):
    """Largest difference as a share of the largest logit, over all prompts."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


def assert_same(ours, theirs):
    assert difference(ours, theirs) < reference.TOLERANCE
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_forward_mixed_prefill_equals_transformers(case):
    assert_same(prefill(forward, case), load(case)[2].logits)


@pytest.mark.parametrize("case", FAMILIES)
def test_forward_naive_equals_transformers_and_absorbed(case):
    naive = prefill(forward, case, attention="naive")
    assert_same(naive, load(case)[2].logits)
    assert_same(naive, prefill(forward, case, attention="absorbed"))


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("case", FAMILIES)
def test_forward_token_by_token_decode_equals_transformers(case, page_size):
    config, params, stored = load(case)
    lengths = np.array([len(t) for t in stored.tokens])
    table_BM = tables(len(lengths), lengths.max(), page_size)
    kv = empty_cache(config, table_BM, page_size)
    ours = [[] for _ in lengths]
    for t in range(lengths.max()):
        alive = t < lengths  # a finished row stays in the batch as a dead row
        token_B1 = np.array([[tokens[t] if t < len(tokens) else 5] for tokens in stored.tokens], np.int32)
        batch = decoder.StepBatch(
            tokens_BT=jnp.asarray(token_B1),
            num_new_B=jnp.asarray(alive, jnp.int32),
            length_B=jnp.asarray(np.minimum(t, lengths), jnp.int32),
            table_BM=table_BM,
        )
        logits_BW, kv = forward(params, config, kv, batch)
        for row in np.flatnonzero(alive):
            ours[row].append(np.asarray(logits_BW[row]))
    assert_same([np.stack(row) for row in ours], stored.logits)


@pytest.mark.parametrize("case", FAMILIES)
def test_forward_chunked_prefill_equals_transformers(case):
    # Rows advance by different amounts in the same step: the chunk is 16, prompts end inside chunks.
    config, params, stored = load(case)
    chunk, page_size = 16, 4
    lengths = np.array([len(t) for t in stored.tokens])
    table_BM = tables(len(lengths), lengths.max(), page_size)
    kv = empty_cache(config, table_BM, page_size)
    ours = [[] for _ in lengths]
    for start in range(0, lengths.max(), chunk):
        num_new = np.clip(lengths - start, 0, chunk)
        tokens_BT = np.full((len(lengths), chunk), 3, np.int32)
        for row, tokens in enumerate(stored.tokens):
            tokens_BT[row, : num_new[row]] = tokens[start : start + chunk]
        batch = decoder.StepBatch(
            tokens_BT=jnp.asarray(tokens_BT),
            num_new_B=jnp.asarray(num_new, jnp.int32),
            length_B=jnp.asarray(np.minimum(start, lengths), jnp.int32),
            table_BM=table_BM,
        )
        logits_BTW, kv = forward(params, config, kv, batch, all_logits=True)
        for row, count in enumerate(num_new):
            ours[row].append(np.asarray(logits_BTW[row, :count]))
    assert_same([np.concatenate(row) for row in ours], stored.logits)


def half_split(x, position_BT, frequencies):
    """Rotates pairs (i, i + R/2) instead of (2i, 2i + 1)."""
    half = x.shape[-1] // 2
    shuffled = jnp.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)
    turned = INTERLEAVED(shuffled, position_BT, frequencies)
    return jnp.concatenate([turned[..., 0::2], turned[..., 1::2]], axis=-1)


def biased_weights(weights, config, x_TD):
    """Takes the mixing weights from the biased sigmoids."""
    expert_TK, _ = ROUTE(weights, config, x_TD)
    logit_TE = layers.einsum("TD,ED->TE", x_TD, weights["router"])
    biased_TE = jax.nn.sigmoid(logit_TE) + weights["router_bias"][None]
    weight_TK = jnp.take_along_axis(biased_TE, expert_TK, axis=1)
    return expert_TK, weight_TK / weight_TK.sum(1, keepdims=True) * config.routed_scaling_factor


def stale_selection(params, config, at, kind, stand, hidden, kv, allowed, **options):
    """Lets the layers above full layer 6 use the selection of layer 2."""
    hidden, kv, own = DECODER_LAYER(params, config, at, kind, stand, hidden, kv, allowed, **options)
    return hidden, kv, jnp.where(kind.full_indexer & (stand.cache == 6), allowed, own)


INTERLEAVED, ROUTE, DECODER_LAYER = layers.rotate, moe.route, decoder.decoder_layer
PATCHES = {
    "missing_mscale_squared": (
        "kimi",
        config_module.ModelConfig,
        "softmax_scale",
        property(lambda config: config.qk_head_dim**-0.5),
    ),
    "half_split_rope_kimi": ("kimi", layers, "rotate", half_split),
    "half_split_rope_glm": ("glm", layers, "rotate", half_split),
    "bias_in_weights": ("glm", moe, "route", biased_weights),
    "index_shared_from_wrong_layer": ("glm", decoder, "decoder_layer", stale_selection),
}
CONFIGS = {
    "low_rank_epsilon_1e-5_kimi": ("kimi_epsilon", {"lora_norm_eps": 1e-5}),
    "low_rank_epsilon_1e-5_glm": ("glm_epsilon", {"lora_norm_eps": 1e-5}),
    "group_routing_ignored": ("kimi", {"n_group": 1, "topk_group": 1}),
}


@pytest.mark.parametrize(("case", "target", "name", "wrong"), PATCHES.values(), ids=list(PATCHES))
def test_forward_wrong_function_fails_parity(monkeypatch, case, target, name, wrong):
    monkeypatch.setattr(target, name, wrong)
    mutated = jax.jit(
        lambda *args, **options: decoder.forward(*args, **options),
        static_argnums=1,
        static_argnames=STATIC,
        compiler_options=QUICK,
    )
    assert difference(prefill(mutated, case), load(case)[2].logits) > 3 * reference.TOLERANCE


@pytest.mark.parametrize(("case", "change"), CONFIGS.values(), ids=list(CONFIGS))
def test_forward_wrong_config_fails_parity(case, change):
    wrong = dataclasses.replace(load(case)[0], **change)
    assert difference(prefill(forward, case, config=wrong), load(case)[2].logits) > 3 * reference.TOLERANCE
