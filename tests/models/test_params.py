"""Parameter declarations: published counts and byte totals, names, formats, init."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.formats.qtensor import QTensor
from kvmem.models import get_config, params

TINY = ["kimi_tiny_parity", "kimi_tiny_tp8", "glm_tiny_parity", "glm_tiny_tp8"]


@functools.cache
def tensors(name: str, checkpoint: str) -> tuple[params.CheckpointTensor, ...]:
    return tuple(params.checkpoint_tensors(get_config(name), checkpoint))


@pytest.mark.parametrize(
    ("name", "checkpoint", "count"),
    [("kimi_k2.6", "bf16", 1_026_879_376_368), ("glm_5.2", "glm_bf16", 753_329_940_480)],
    ids=["kimi", "glm"],
)
def test_checkpoint_totals_full_size_hold_published_parameter_count(name, checkpoint, count):
    assert params.checkpoint_totals(get_config(name), checkpoint).elements == count


@pytest.mark.parametrize(
    ("name", "checkpoint", "nbytes"),
    [
        ("kimi_k2.6", "kimi_int4", 595_148_192_736),
        ("glm_5.2", "glm_bf16", 1_506_659_919_872),
        ("glm_5.2", "glm_fp8", 755_617_140_416),
    ],
    ids=["kimi_int4", "glm_bf16", "glm_fp8"],
)
def test_checkpoint_totals_full_size_hold_published_bytes(name, checkpoint, nbytes):
    assert params.checkpoint_totals(get_config(name), checkpoint).nbytes == nbytes


@pytest.mark.parametrize(("group", "gib"), [(32, 419.94), (64, 398.56), (128, 387.87)])
def test_checkpoint_totals_glm_int4_give_derived_gib(group, gib):
    config = dataclasses.replace(get_config("glm_5.2"), int4_group=group)
    assert round(params.checkpoint_totals(config, "glm_int4").nbytes / 2**30, 2) == gib


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [("kimi_k2.6", "kimi_int4"), ("glm_5.2", "glm_fp8"), ("glm_tiny_tp8", "nvfp4"), ("kimi_tiny_tp8", "f32")],
)
def test_checkpoint_totals_equal_the_listing(name, checkpoint):
    listing = tensors(name, checkpoint)
    expected = (len(listing), sum(t.size for t in listing), sum(t.nbytes for t in listing))
    assert params.checkpoint_totals(get_config(name), checkpoint) == expected


def test_checkpoint_tensors_kimi_int4_match_published_listing():
    listing = tensors("kimi_k2.6", "kimi_int4")
    by_name = {t.name: (t.shape, t.dtype) for t in listing}
    at = "language_model.model.layers.60.mlp."
    assert len(listing) == len(by_name) == 208_550
    assert sum(t.size for t in listing) == 170_738_182_128
    assert by_name[at + "experts.383.down_proj.weight_packed"] == ((7168, 256), "I32")
    assert by_name[at + "experts.0.up_proj.weight_scale"] == ((2048, 224), "BF16")
    assert by_name[at + "experts.7.gate_proj.weight_shape"] == ((2,), "I32")
    assert by_name[at + "gate.e_score_correction_bias"] == ((384,), "F32")
    assert by_name["language_model.lm_head.weight"] == ((163840, 7168), "BF16")
    assert by_name["vision_tower.encoder.blocks.26.wqkv.weight"] == ((3456, 1152), "BF16")
    assert sum(t.size for t in listing if t.kind == "vision") == 471_143_920


def test_checkpoint_tensors_glm_fp8_match_published_rules():
    by_name = {t.name: (t.shape, t.dtype) for t in tensors("glm_5.2", "glm_fp8")}
    at = "model.layers.78."
    assert by_name[at + "self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == ((5, 48), "F32")
    assert by_name[at + "self_attn.kv_b_proj.weight"] == ((28672, 512), "F8_E4M3")
    assert by_name[at + "self_attn.indexer.weights_proj.weight"] == ((32, 6144), "BF16")
    assert by_name[at + "eh_proj.weight"] == ((6144, 12288), "BF16")
    assert at + "eh_proj.weight_scale_inv" not in by_name
    assert "model.layers.6.self_attn.indexer.wk.weight_scale_inv" in by_name
    assert "model.layers.7.self_attn.indexer.wk.weight" not in by_name
    assert not any(name.startswith("language_model.") for name in by_name)


def test_checkpoint_tensors_without_mtp_hold_transformers_count():
    config = dataclasses.replace(get_config("glm_5.2"), mtp_layers=0)
    assert params.checkpoint_totals(config, "glm_bf16").elements == 743_377_019_904


def test_unconverted_modules_glm_are_the_541_published_names():
    names = params.unconverted_modules(get_config("glm_5.2"))
    assert len(names) == len(set(names)) == 541
    assert "model.layers.78.self_attn.indexers_proj" in names
    assert "model.layers.3.mlp.gate.e_score_correction_bias" in names
    assert not any("q_b_proj" in name or "weights_proj" in name for name in names)


@pytest.mark.parametrize("name", TINY)
def test_param_specs_every_format_declares_same_parameters(name):
    config = get_config(name)
    reference = {path: spec.shape for path, spec in params.leaves(params.param_specs(config, "f32"))}
    for weights in params.WEIGHTS[config.family]:
        shapes = {path: spec.shape for path, spec in params.leaves(params.param_specs(config, weights))}
        assert shapes == reference
        for path, spec in params.leaves(params.param_specs(config, weights)):
            assert len(spec.axes) == len(spec.shape), path


@pytest.mark.parametrize("name", TINY)
def test_param_specs_sources_cover_device_elements(name):
    # Every checkpoint element lands in exactly one parameter; kv_b_proj is the only tensor with two.
    config = get_config(name)
    listing = params.checkpoint_tensors(config, "bf16")
    device = sum(spec.size for _, spec in params.leaves(params.param_specs(config, "bf16")))
    assert sum(t.size for t in listing if t.kind != "vision") == device


def test_param_specs_unknown_format_raises():
    with pytest.raises(ValueError, match=r"fp8_block.*kimi_tiny_tp8 supports"):
        params.param_specs(get_config("kimi_tiny_tp8"), "fp8_block")
    with pytest.raises(ValueError, match=r"kimi_int4.*glm_tiny_tp8 supports"):
        params.param_specs(get_config("glm_tiny_tp8"), "bf16", "kimi_int4")


def test_checkpoint_tensors_group_not_dividing_width_raises():
    config = dataclasses.replace(get_config("kimi_tiny_tp8"), int4_group=48)
    with pytest.raises(ValueError, match="K=64 must be a multiple of 8 and of the group 48"):
        params.checkpoint_tensors(config, "kimi_int4")


@pytest.mark.parametrize("weights", ["f32", "bf16", "fp8_block", "int4_group"])
def test_init_params_holds_declared_storage(weights):
    config = get_config("glm_tiny_tp8")
    specs, tree = params.param_specs(config, weights), params.init_params(config, weights, seed=3)

    def check(spec, leaf):
        assert leaf.shape == spec.shape
        if spec.storage == "plain":
            assert leaf.dtype == (jnp.float32 if spec.dtype == "f32" else jnp.bfloat16)
        else:
            assert isinstance(leaf, QTensor)
            assert leaf.storage == spec.storage
            assert leaf.scale.shape == spec.scale_shape
        return spec.storage

    stored = params.map_specs(check, specs, tree)
    assert stored["moe"]["gate_up"] == (weights if weights in ("fp8_block", "int4_group") else "plain")
    assert stored["attention"]["q_b"] == ("fp8_block" if weights == "fp8_block" else "plain")
    assert stored["attention"]["w_uk"] == stored["moe"]["router"] == stored["mtp"]["eh_proj"] == "plain"


def test_init_params_same_seed_same_values_across_formats():
    config = get_config("kimi_tiny_parity")
    plain = params.init_params(config, "f32", seed=5)
    packed = params.init_params(config, "int4_group", seed=5)
    other = params.init_params(config, "f32", seed=6)
    exact, rounded = plain["moe"]["down"], packed["moe"]["down"].dequantize(jnp.float32)
    # Rounding to nearest with step absmax / 7.5: +absmax is 7.5 steps and clamps to 7, so half a step at
    # most, and the bf16 scale is off by up to 2^-8 of 8 steps.
    step = jnp.abs(exact).max(axis=-1, keepdims=True) / 7.5
    assert float((jnp.abs(exact - rounded) / step).max()) < 0.5 + 8 * 2**-8
    assert not np.array_equal(plain["lm_head"], other["lm_head"])
    leaves = jax.tree.leaves(plain)
    assert len({float(leaf.ravel()[0]) for leaf in leaves}) == len(leaves)
