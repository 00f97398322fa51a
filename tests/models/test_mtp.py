"""The MTP layer: wiring against a one-layer model that computes the same, and reuse of its selection."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import store
from kvmem.models import decoder, get_config, mtp, params
from kvmem.models.decoder import StepBatch

CONFIG = get_config("glm_tiny_tp8")
ROWS, STEPS, PAGES, PAGE_SIZE = 2, 13, 4, 4
TABLE_BM = jnp.arange(ROWS * PAGES, 0, -1, dtype=jnp.int32).reshape(ROWS, PAGES)
# Compiling is nearly all of the time, and unoptimised code computes the same.
QUICK = {"xla_backend_optimization_level": 0}
TOLERANCE = 2e-5  # f32, the same operations in the same order but for stacking


def cache(config, *, mtp):
    shape = decoder.cache_shape(config, mtp=mtp)
    return store.init(shape, "f32_576", num_pages=ROWS * PAGES + 1, page_size=PAGE_SIZE)


def batch(tokens_BT, num_new, length):
    return StepBatch(
        jnp.asarray(tokens_BT, jnp.int32),
        jnp.asarray(num_new, jnp.int32),
        jnp.asarray(length, jnp.int32),
        TABLE_BM,
    )


@pytest.fixture(scope="module")
def case():
    tree = params.init_params(CONFIG, "f32", seed=8)
    random = np.random.default_rng(3)
    tokens_BT = random.integers(0, CONFIG.vocab_size, (ROWS, STEPS))
    hidden_BTD = jnp.asarray(random.standard_normal((ROWS, STEPS, CONFIG.hidden_size)), jnp.float32)
    step = jax.jit(lambda *args: mtp.draft(args[0], CONFIG, *args[1:]), compiler_options=QUICK)
    logits, hidden, kv, selection = step(
        tree, cache(CONFIG, mtp=True), batch(tokens_BT, [13, 11], [0, 0]), hidden_BTD
    )
    return tree, tokens_BT, hidden_BTD, step, (logits, hidden, kv, selection)


def test_draft_equals_one_layer_model_fed_with_z(case):
    tree, tokens_BT, hidden_BTD, _, (logits_BTW, *_) = case
    own = jax.tree.map(np.asarray, tree["mtp"])

    def rms(x, weight):
        return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)

    embedded = np.asarray(tree["embed"])[tokens_BT]
    z_BTD = (
        np.concatenate(
            [rms(embedded, own["embed_norm"][0]), rms(np.asarray(hidden_BTD), own["hidden_norm"][0])], -1
        )
        @ own["eh_proj"][0].T
    )
    # A model of this one layer whose vocabulary is the z vectors themselves.
    indexer = dataclasses.replace(CONFIG.indexer, full_layers=(0,))
    config = dataclasses.replace(CONFIG, num_layers=1, num_dense_layers=0, mtp_layers=0, indexer=indexer)
    model = {key: tree["mtp"][key] for key in ("attention", "moe", "indexer")} | {
        "embed": jnp.asarray(z_BTD.reshape(-1, CONFIG.hidden_size), jnp.float32),
        "final_norm": tree["mtp"]["head_norm"][0],
        "lm_head": tree["lm_head"],
    }
    ids_BT = np.arange(ROWS * STEPS).reshape(ROWS, STEPS)
    forward = jax.jit(
        lambda *args: decoder.forward(args[0], config, *args[1:], all_logits=True), compiler_options=QUICK
    )
    expected, _ = forward(model, cache(config, mtp=False), batch(ids_BT, [13, 11], [0, 0]))
    for row, count in enumerate([13, 11]):
        ours, theirs = np.asarray(logits_BTW[row, :count]), np.asarray(expected[row, :count])
        assert np.abs(ours - theirs).max() < TOLERANCE * np.abs(theirs).max()


def test_draft_writes_only_its_own_cache_layer(case):
    kv = case[-1][2]
    assert float(jnp.abs(kv.values[: CONFIG.num_layers]).max()) == 0
    assert float(jnp.abs(kv.index_values[: CONFIG.num_index_layers]).max()) == 0
    assert float(jnp.abs(kv.values[CONFIG.num_layers, 1:]).max()) > 0


def test_draft_reused_selection_adds_only_the_own_position(case):
    tree, _, _, step, (_, hidden_BTD, kv, selection_BTS) = case
    last = np.array([12, 10])
    chosen_B1S = jnp.asarray(np.asarray(selection_BTS)[np.arange(ROWS), last][:, None])
    hidden_B1D = jnp.asarray(np.asarray(hidden_BTD)[np.arange(ROWS), last][:, None])
    _, _, _, again_B1S = step(tree, kv, batch([[5], [9]], [1, 1], last + 1), hidden_B1D, chosen_B1S)
    expected = np.asarray(chosen_B1S).copy()
    expected[np.arange(ROWS), 0, last + 1] = True
    np.testing.assert_array_equal(again_B1S, expected)
    assert expected.sum() == np.asarray(chosen_B1S).sum() + ROWS


def test_draft_without_mtp_layer_raises(case):
    tree, tokens_BT, hidden_BTD, *_ = case
    work = batch(tokens_BT, [13, 11], [0, 0])
    with pytest.raises(ValueError, match=r"kimi_tiny_tp8: mtp_layers=0"):
        mtp.draft(tree, get_config("kimi_tiny_tp8"), cache(CONFIG, mtp=True), work, hidden_BTD)
    with pytest.raises(ValueError, match=r"a cache of 8 layers has no room"):
        mtp.draft(tree, CONFIG, cache(CONFIG, mtp=False), work, hidden_BTD)
