"""How the decoder calls the kernels, with their plain JAX counterparts in their place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import store
from kvmem.models import decoder, get_config, params
from pallas_kernels import int4_moe, mla_decode, mla_prologue, xla

# The kernels' widths (latent 512, rope 64, page 64), two layers of them.
KIMI = dataclasses.replace(
    get_config("kimi_tiny_tp8"), num_layers=2, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=24
)
LENGTHS, NEW = [70, 0, 101], [2, 0, 3]  # the second row is dead
QUICK = {"xla_backend_optimization_level": 0}


def step(tree, kv, num_new, length, columns, implementation, config):
    """One step of up to ``columns`` random tokens a row; logits and cache."""
    table_BM = jnp.asarray([[3, 5], [0, 0], [2, 7]], jnp.int32)
    tokens_BT = np.random.default_rng(columns).integers(0, config.vocab_size, (3, columns))
    integers = [jnp.asarray(x, jnp.int32) for x in (tokens_BT, num_new, length)]
    forward = jax.jit(
        lambda tree, kv, batch: decoder.forward(tree, config, kv, batch, implementation=implementation),
        compiler_options=QUICK,
    )
    return forward(tree, kv, decoder.StepBatch(*integers, table_BM))


@functools.cache
def prefilled(layout, config):
    """Parameters, a cache filled in plain JAX, and the plain logits of the next step."""
    tree = params.init_params(config, "int4_group", seed=6)
    kv = store.init(decoder.cache_shape(config), layout, num_pages=8, page_size=64, scale=0.125)
    _, kv = step(tree, kv, LENGTHS, [0, 0, 0], 101, "xla", config)
    plain_BW, _ = step(tree, kv, NEW, LENGTHS, 3, "xla", config)
    return tree, kv, np.asarray(plain_BW)[[0, 2]]


def difference(layout="fp8_576", config=KIMI):
    """Largest difference of the kernels' logits from the plain ones, as a share of the largest logit."""
    tree, kv, plain_BW = prefilled(layout, config)
    out_BW, _ = step(tree, kv, NEW, LENGTHS, 3, "mosaic", config)
    return np.abs(np.asarray(out_BW)[[0, 2]] - plain_BW).max() / np.abs(plain_BW).max()


def replace_kernels(monkeypatch, **overrides):
    """Puts plain JAX in the kernels' place; ``overrides`` replace arguments of the attention (mutations)."""

    def attention(*args, schedule, **options):
        assert schedule.item_I3.shape[1] == 3
        return xla.mla_decode(*args, **{**options, **overrides})

    monkeypatch.setattr(mla_decode, "mla_decode", attention)
    monkeypatch.setattr(mla_prologue, "mla_prologue", xla.mla_prologue)
    monkeypatch.setattr(int4_moe, "int4_moe_of_logits", xla.int4_moe_of_logits)


@pytest.mark.parametrize("layout", ["fp8_576", "fp8_656"])
def test_forward_mosaic_equals_xla(monkeypatch, layout):
    replace_kernels(monkeypatch)
    # Both round activations to bf16 but not at the same places: a few units of 2^-8 over two layers.
    assert difference(layout) < 0.03


@pytest.mark.parametrize("wrong", [{"scale": 1.0}, {"num_new_B": None}], ids=["scale", "positions"])
def test_forward_mosaic_wrong_argument_differs(monkeypatch, wrong):
    replace_kernels(monkeypatch, **wrong)
    assert difference() > 0.06


def test_forward_mosaic_unsupported_is_refused():
    tree = params.init_params(KIMI, "int4_group", seed=6)
    kv = store.init(decoder.cache_shape(KIMI), "f32_576", num_pages=8, page_size=64)
    with pytest.raises(NotImplementedError, match=r"form='absorbed' over a cache 'f32_576'"):
        step(tree, kv, NEW, LENGTHS, 3, "mosaic", KIMI)
    kv = store.init(decoder.cache_shape(KIMI), "bf16_576", num_pages=8, page_size=64)
    with pytest.raises(NotImplementedError, match="nope width 24: must be a multiple of 64"):
        step(tree, kv, NEW, LENGTHS, 3, "mosaic", KIMI)
    glm = get_config("glm_tiny_tp8")
    tree = params.init_params(glm, "int4_group", seed=6)
    kv = store.init(decoder.cache_shape(glm), "fp8_656", "index_132", num_pages=8, page_size=64)
    with pytest.raises(NotImplementedError, match=r"no kernel for sparse attention: tables of 2 pages"):
        step(tree, kv, NEW, LENGTHS, 3, "mosaic", glm)
