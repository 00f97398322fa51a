"""ModelConfig and the translation of published config.json files."""

import copy
import dataclasses

import pytest

from kvmem.models import checkpoint_format, from_hf, get_config, params, to_hf
from kvmem.models.config import full_indexer_layers, validate

NAMES = ["kimi_k2.6", "glm_5.2", "kimi_tiny_parity", "kimi_tiny_tp8", "glm_tiny_parity", "glm_tiny_tp8"]

# What the published files say, in their own spelling, without fields that do not reach the model.
GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3,
    "head_dim": 192, "hidden_act": "silu", "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32,
    "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 3, "index_topk": 2048,
    "index_topk_freq": 4, "index_topk_pattern": None, "indexer_rope_interleave": True,
    "indexer_types": ["full"] * 2 + ["full", "shared", "shared", "shared"] * 19,
    "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "moe_router_dtype": "float32", "n_group": 1,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "q_lora_rank": 2048, "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "use_cache": True, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"], "bos_token_id": 163584, "dtype": "bfloat16",
    "eos_token_id": 163586, "media_placeholder_token_id": 163605, "model_type": "kimi_k25",
    "pad_token_id": 163839, "tie_word_embeddings": False, "use_unified_vision_chunk": True,
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "bos_token_id": 163584,
        "eos_token_id": 163586, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 262144, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pad_token_id": 163839, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "input_activations": None, "output_activations": None, "targets": ["Linear"],
                    "weights": {
                        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                        "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
                        "symmetric": True, "type": "int",
                    },
                }
            },
            "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": None,
            "quant_method": "compressed-tensors", "quantization_status": "compressed",
        },
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "vision_config": {
        "init_pos_emb_height": 64, "init_pos_emb_time": 4, "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": 1152,
        "mm_projector_type": "patchmerger", "patch_size": 14, "text_hidden_size": 7168,
        "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
    },
}  # fmt: skip


@pytest.mark.parametrize(("hf", "name"), [(KIMI, "kimi_k2.6"), (GLM, "glm_5.2")], ids=["kimi", "glm"])
def test_from_hf_published_file_gives_declared_config(hf, name):
    assert from_hf(hf) == get_config(name)


@pytest.mark.parametrize(("hf", "kind"), [(KIMI, "kimi_int4"), (GLM, "glm_bf16")], ids=["kimi", "glm"])
def test_checkpoint_format_published_file_is_recognised(hf, kind):
    assert checkpoint_format(hf) == kind


@pytest.mark.parametrize("name", NAMES)
def test_to_hf_round_trips_every_format(name):
    config = get_config(name)
    for kind in params.CHECKPOINTS[config.family]:
        if kind == "nvfp4":
            continue
        hf = to_hf(config, kind)
        assert checkpoint_format(hf) == ("glm_bf16" if (config.family, kind) == ("glm", "bf16") else kind)
        quantised = {"int4_group": config.int4_group} if "int4" in kind else {}
        quantised |= {"fp8_block": config.fp8_block} if "fp8" in kind else {}
        default = {"int4_group": 32, "fp8_block": (128, 128)} | quantised
        assert from_hf(hf, name) == dataclasses.replace(config, **default)


def test_to_hf_glm_fp8_lists_unconverted_modules():
    hf = to_hf(get_config("glm_5.2"), "glm_fp8")
    assert len(hf["quantization_config"]["modules_to_not_convert"]) == 541


BAD_GLM = {
    "unknown": ({"attn_sink": 4}, "unknown fields.*attn_sink"),
    "heads": ({"num_key_value_heads": 8}, "num_key_value_heads=8 contradicts"),
    "qk_head_dim": ({"qk_head_dim": 192}, "qk_head_dim=192 contradicts"),
    "indexer_types": ({"indexer_types": ["full"] * 78}, "index_topk_freq=4.*contradict"),
    "indexer_count": ({"indexer_types": ["full"] * 3}, "needs 78"),
    "dense": ({"first_k_dense_replace": 2}, "mlp_layer_types=.*contradicts first_k_dense_replace"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu' contradicts"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings=True contradicts"),
    "rope_twice": ({"rope_theta": 1e6}, "rope_theta=1000000.0.*contradict"),
    "rope_type": ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1}}, "rope_type='ntk'"),
    "rope_field": ({"rope_parameters": {"rope_theta": 1, "alpha": 2}}, "unknown fields.*alpha"),
    "integer": ({"hidden_size": 61.5}, "hidden_size=61.5 must be an integer"),
    "groups": ({"n_group": 3}, "n_group=3 must divide"),
    "model_type": ({"model_type": "llama"}, "model_type='llama'"),
    "first_shared": (
        {"indexer_types": ["shared"] * 78, "index_topk_freq": None},
        "layer 0 has no layer below",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_GLM.values(), ids=list(BAD_GLM))
def test_from_hf_bad_field_raises_naming_it(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf({**GLM, **change})


def test_from_hf_missing_field_raises_naming_it():
    with pytest.raises(ValueError, match="'q_lora_rank' is missing"):
        from_hf({k: v for k, v in GLM.items() if k != "q_lora_rank"})


BAD_KIMI = {
    "outer_unknown": (("audio_config",), {"x": 2}, "unknown fields.*audio_config"),
    "text_unknown": (("text_config", "sliding_window"), 4096, "text_config: unknown fields.*sliding_window"),
    "vision_unknown": (("vision_config", "fps"), 2, "vision_config: unknown fields.*fps"),
    "eos": (("eos_token_id",), 163585, "eos_token_id=163585 contradicts text_config"),
    "width": (("vision_config", "text_hidden_size"), 4096, "text_hidden_size=4096 contradicts"),
    "format": (("text_config", "quantization_config", "format"), "dense", "format='dense' contradicts"),
    "kv": (("text_config", "quantization_config", "kv_cache_scheme"), {"num_bits": 8}, "kv_cache_scheme"),
    "method": (("text_config", "quantization_config", "quant_method"), "gptq", "quant_method='gptq'"),
}


@pytest.mark.parametrize(("path", "value", "message"), BAD_KIMI.values(), ids=list(BAD_KIMI))
def test_from_hf_bad_nested_field_raises_naming_it(path, value, message):
    hf = copy.deepcopy(KIMI)
    target = hf
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        from_hf(hf)


def test_from_hf_fp8_list_contradicting_layout_raises():
    hf = to_hf(get_config("glm_tiny_tp8"), "glm_fp8")
    hf["quantization_config"]["modules_to_not_convert"].append("model.layers.0.self_attn.q_b_proj")
    with pytest.raises(ValueError, match=r"q_b_proj.*contradicts"):
        from_hf(hf)


def test_full_indexer_layers_published_rule_gives_21_layers():
    layers = full_indexer_layers(78, freq=4, offset=3)
    assert layers == (0, 1, 2, *range(6, 78, 4))
    assert len(layers) == 21


def test_softmax_scale_full_models_match_published_values():
    assert get_config("kimi_k2.6").softmax_scale == pytest.approx(0.1446796, abs=5e-8)
    assert get_config("glm_5.2").softmax_scale == 0.0625


def test_validate_impossible_sizes_raise():
    config = get_config("kimi_tiny_parity")
    with pytest.raises(ValueError, match="experts_per_token=5: only 4 experts"):
        validate(dataclasses.replace(config, experts_per_token=5))
    with pytest.raises(ValueError, match="qk_rope_head_dim=7"):
        validate(dataclasses.replace(config, qk_rope_head_dim=7))


def test_get_config_unknown_name_lists_known():
    with pytest.raises(ValueError, match=r"'kimi_k3' is unknown.*glm_5\.2"):
        get_config("kimi_k3")
