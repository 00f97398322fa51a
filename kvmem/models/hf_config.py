"""Hugging Face ``config.json`` -> ModelConfig and back; nothing is ignored silently.

Every field of the file is read, required to have the one value that the code implements, or listed here as
known and without effect on the text model. Anything else is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvmem.models.config import (
    CheckpointFormat,
    IndexerConfig,
    ModelConfig,
    RopeConfig,
    VisionConfig,
    YarnConfig,
    full_indexer_layers,
    validate,
)
from kvmem.models.params import unconverted_modules

# Python-side bookkeeping, training-only values and generation defaults: no effect on the forward pass.
IGNORED: Final = frozenset(
    """
    _name_or_path _attn_implementation add_cross_attention architectures attention_dropout auto_map
    aux_loss_alpha bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    ignore_index initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length
    media_placeholder_token_id min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id seq_aux suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_cache use_unified_vision_chunk video_placeholder
    """.split()  # noqa: SIM905
)
# head_dim is 192 in GLM 5.2's file, 64 in GLM 5's, the rotary width in what transformers writes: never used.
IGNORED_GLM: Final = frozenset({"head_dim"})
IGNORED_VISION: Final = frozenset(
    """
    _attn_implementation init_pos_emb_time merge_type mm_projector_type model_type pos_emb_type
    projector_hidden_act projector_ln_eps video_attn_type vt_num_attention_heads
    """.split()  # noqa: SIM905
)
# What the forward pass implements; another value is refused, an absent field has this value.
REQUIRED: Final[Mapping[str, Any]] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "ep_size": 1,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "index_topk_pattern": None,
}
# Linear layers that GLM's FP8 checkpoint holds as blocks; its config.json lists everything else.
FP8_LINEARS: Final = frozenset(
    "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj gate_proj up_proj down_proj wq_b wk".split()  # noqa: SIM905
)
KIMI_TYPES: Final = ("kimi_k2", "deepseek_v3")
_ABSENT: Final = object()


class _Fields:
    """The fields of one JSON object, each to be taken once; ``finish`` raises on what is left."""

    def __init__(self, fields: Mapping[str, Any], where: str):
        self.left = dict(fields)
        self.where = where

    def take(self, name: str, default: Any = _ABSENT) -> Any:
        value = self.left.pop(name, default)
        if value is _ABSENT:
            raise ValueError(f"{self.where}: field {name!r} is missing")
        return value

    def integer(self, name: str, default: Any = _ABSENT) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.where}: {name}={value!r} must be an integer")
        return value

    def agree(self, name: str, expected: Any, rule: str) -> None:
        """A redundant field: absent, or equal to what another field says."""
        value = self.left.pop(name, expected)
        if value != expected:
            raise ValueError(f"{self.where}: {name}={value!r} contradicts {rule}, which gives {expected!r}")

    def finish(self, ignored: frozenset[str] = frozenset()) -> None:
        unknown = sorted(set(self.left) - ignored)
        if unknown:
            raise ValueError(
                f"{self.where}: unknown fields {unknown}; known and ignored are {sorted(ignored)}"
            )


def from_hf(hf: Mapping[str, Any], name: str | None = None) -> ModelConfig:
    """Parse a published ``config.json``: Kimi K2.5/K2.6 (nested ``text_config``), GLM 5.2, or text alone.

    Raises:
      ValueError: a field is missing, unknown, of an unsupported value, or contradicts another.
    """
    model_type = hf.get("model_type")
    if model_type == "kimi_k25":
        return _from_kimi_nested(hf, name)
    if model_type in KIMI_TYPES or model_type == "glm_moe_dsa":
        return _from_text(hf, "config.json", name)
    raise ValueError(f"model_type={model_type!r}: supported are {('kimi_k25', *KIMI_TYPES, 'glm_moe_dsa')}")


def _from_kimi_nested(hf: Mapping[str, Any], name: str | None) -> ModelConfig:
    outer = _Fields(hf, "config.json")
    outer.take("model_type")
    text = dict(outer.take("text_config"))
    for shared in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
        "quantization_config",
    ):
        value = outer.take(shared, _ABSENT) if shared in outer.left else _ABSENT
        if value is _ABSENT:
            continue
        if text.setdefault(shared, value) != value:
            raise ValueError(
                f"config.json: {shared}={value!r} contradicts text_config.{shared}={text[shared]!r}"
            )
    vision = _vision(outer.take("vision_config"), text.get("hidden_size"))
    outer.finish(IGNORED)
    return _from_text(text, "text_config", name, vision=vision)


def _vision(hf: Mapping[str, Any], hidden_size: int | None) -> VisionConfig:
    f = _Fields(hf, "vision_config")
    width = f.integer("vt_hidden_size")
    f.agree("mm_hidden_size", width, "vt_hidden_size")
    f.agree("text_hidden_size", hidden_size, "text_config.hidden_size")
    merge_height, merge_width = f.take("merge_kernel_size")
    config = VisionConfig(
        hidden_size=width,
        num_layers=f.integer("vt_num_hidden_layers"),
        ffn_size=f.integer("vt_intermediate_size"),
        patch_size=f.integer("patch_size"),
        position_height=f.integer("init_pos_emb_height"),
        position_width=f.integer("init_pos_emb_width"),
        merge=(merge_height, merge_width),
    )
    f.finish(IGNORED_VISION)
    return config


def _rope(f: _Fields) -> RopeConfig:
    """Read the new ``rope_parameters`` or the old ``rope_theta`` and ``rope_scaling``; both must agree."""
    new, theta, old = (
        f.take("rope_parameters", None),
        f.take("rope_theta", None),
        f.take("rope_scaling", None),
    )
    if new is None:
        if theta is None:
            raise ValueError(f"{f.where}: rope_theta or rope_parameters.rope_theta is missing")
        new = {**(old or {}), "rope_theta": theta}
    elif old is not None or (theta is not None and theta != new.get("rope_theta")):
        raise ValueError(
            f"{f.where}: rope_theta={theta!r}, rope_scaling={old!r} contradict rope_parameters={new!r}"
        )
    r = _Fields(new, f"{f.where}.rope_parameters")
    kind = r.take("rope_type", None)
    kind = r.take("type", None) or kind or "default"
    base = float(r.take("rope_theta"))
    yarn = None
    if kind == "yarn":
        yarn = YarnConfig(
            factor=float(r.take("factor")),
            original_context=r.integer("original_max_position_embeddings"),
            beta_fast=float(r.take("beta_fast", 32)),
            beta_slow=float(r.take("beta_slow", 1)),
            mscale=float(r.take("mscale", 1)),
            mscale_all_dim=float(r.take("mscale_all_dim", 0)),
        )
    elif kind != "default":
        raise ValueError(f"{r.where}: rope_type={kind!r} must be 'default' or 'yarn'")
    r.finish()
    return RopeConfig(theta=base, yarn=yarn)


def _indexer(f: _Fields, num_layers: int) -> IndexerConfig:
    freq, offset = f.take("index_topk_freq", None), f.take("index_skip_topk_offset", None)
    types = f.take("indexer_types", None)
    rule = full_indexer_layers(num_layers, freq, offset or 0) if freq else None
    if types is None:
        full = rule or tuple(range(num_layers))
    else:
        if len(types) != num_layers or set(types) - {"full", "shared"}:
            raise ValueError(
                f"{f.where}: indexer_types needs {num_layers} of 'full' or 'shared', got {types!r}"
            )
        full = tuple(i for i, kind in enumerate(types) if kind == "full")
        if rule is not None and full != rule:
            raise ValueError(
                f"{f.where}: indexer_types has full layers {full}; "
                f"index_topk_freq={freq}, index_skip_topk_offset={offset} contradict with {rule}"
            )
    return IndexerConfig(
        num_heads=f.integer("index_n_heads"),
        head_dim=f.integer("index_head_dim"),
        topk=f.integer("index_topk"),
        full_layers=full,
        share_for_mtp=bool(f.take("index_share_for_mtp_iteration", True)),
    )


def _from_text(
    hf: Mapping[str, Any],
    where: str,
    name: str | None,
    *,
    vision: VisionConfig | None = None,
) -> ModelConfig:
    f = _Fields(hf, where)
    glm = f.take("model_type") == "glm_moe_dsa"
    for field, value in REQUIRED.items():
        f.agree(field, value, "the implemented forward pass")
    num_layers, heads = f.integer("num_hidden_layers"), f.integer("num_attention_heads")
    nope, rope_dim = f.integer("qk_nope_head_dim"), f.integer("qk_rope_head_dim")
    dense = f.integer("first_k_dense_replace")
    f.agree("num_key_value_heads", heads, "num_attention_heads (MLA has no grouped heads)")
    f.agree("qk_head_dim", nope + rope_dim, "qk_nope_head_dim + qk_rope_head_dim")
    f.agree("mlp_layer_types", ["dense"] * dense + ["sparse"] * (num_layers - dense), "first_k_dense_replace")
    if glm:
        f.agree("layer_types", ["indexed_attention"] * num_layers, "num_hidden_layers")
    else:
        f.agree("head_dim", rope_dim, "qk_rope_head_dim")
    quantization = f.take("quantization_config", None)
    eos = f.take("eos_token_id", ())
    config = ModelConfig(
        name=name or ("glm_5.2" if glm else "kimi_k2.6"),
        family="glm" if glm else "kimi",
        vocab_size=f.integer("vocab_size"),
        hidden_size=f.integer("hidden_size"),
        num_layers=num_layers,
        num_dense_layers=dense,
        num_heads=heads,
        q_lora_rank=f.integer("q_lora_rank"),
        kv_lora_rank=f.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=f.integer("v_head_dim"),
        dense_ffn_size=f.integer("intermediate_size"),
        expert_ffn_size=f.integer("moe_intermediate_size"),
        num_experts=f.integer("n_routed_experts"),
        num_shared_experts=f.integer("n_shared_experts"),
        experts_per_token=f.integer("num_experts_per_tok"),
        n_group=f.integer("n_group"),
        topk_group=f.integer("topk_group"),
        norm_topk_prob=bool(f.take("norm_topk_prob")),
        routed_scaling_factor=float(f.take("routed_scaling_factor")),
        rms_norm_eps=float(f.take("rms_norm_eps")),
        lora_norm_eps=float(f.take("lora_norm_eps", 1e-6)),
        rope=_rope(f),
        indexer=_indexer(f, num_layers) if glm else None,
        mtp_layers=f.integer("num_nextn_predict_layers", 0),
        max_context=f.integer("max_position_embeddings"),
        vision=vision,
        bos_id=f.take("bos_token_id", None),
        eos_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        pad_id=f.take("pad_token_id", None),
        **_quantization_fields(quantization),
    )
    f.finish(IGNORED | IGNORED_GLM if glm else IGNORED)
    return validate(config)


def _quantization_fields(quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    kind = _quantization_kind(quantization)
    if quantization is not None and kind == "kimi_int4":
        return {"int4_group": quantization["config_groups"]["group_0"]["weights"]["group_size"]}
    if quantization is not None and kind == "glm_fp8":
        for module in quantization.get("modules_to_not_convert") or ():
            if module.rsplit(".", 1)[-1] in FP8_LINEARS:
                raise ValueError(
                    f"modules_to_not_convert: {module!r} contradicts the FP8 layout, which converts it"
                )
        rows, columns = quantization["weight_block_size"]
        return {"fp8_block": (rows, columns)}
    return {}


def _quantization_kind(quantization: Mapping[str, Any] | None) -> CheckpointFormat:
    """Which checkpoint format a ``quantization_config`` is; anything but the known schemes is an error."""
    if quantization is None:
        return "bf16"
    f = _Fields(quantization, "quantization_config")
    method = f.take("quant_method")
    if method == "compressed-tensors":
        f.agree("format", "pack-quantized", "the supported packing")
        f.agree("kv_cache_scheme", None, "the serving configuration, which sets the cache format")
        groups = f.take("config_groups")
        if list(groups) != ["group_0"]:
            raise ValueError(f"quantization_config: config_groups={sorted(groups)} must be one 'group_0'")
        group = _Fields(groups["group_0"], "quantization_config.group_0")
        group.agree("targets", ["Linear"], "the supported scheme")
        group.agree("input_activations", None, "weight-only quantisation")
        group.agree("output_activations", None, "weight-only quantisation")
        w = _Fields(group.take("weights"), "quantization_config.group_0.weights")
        w.integer("group_size")
        scheme = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "dynamic": False}
        for field, value in {**scheme, "actorder": None, "block_structure": None}.items():
            w.agree(field, value, "the supported INT4 scheme")
        w.finish(frozenset({"observer", "observer_kwargs"}))
        group.finish(frozenset({"format"}))
        f.finish(frozenset({"ignore", "quantization_status", "version", "global_compression_ratio"}))
        return "kimi_int4"
    if method == "fp8":
        f.agree("fmt", "e4m3", "the supported FP8 format")
        f.agree("activation_scheme", "dynamic", "the supported FP8 scheme")
        block = f.take("weight_block_size")
        if len(block) != 2 or min(block) < 1:
            raise ValueError(f"quantization_config: weight_block_size={block!r} must be two positive sizes")
        f.finish(frozenset({"modules_to_not_convert"}))
        return "glm_fp8"
    if method == "modelopt":
        f.agree("quant_algo", "NVFP4", "the known modelopt scheme")
        f.finish(frozenset({"config_groups", "ignore", "kv_cache_scheme", "producer"}))
        return "nvfp4"
    raise ValueError(f"quant_method={method!r}: supported are 'compressed-tensors', 'fp8', 'modelopt'")


def checkpoint_format(hf: Mapping[str, Any]) -> CheckpointFormat:
    """How the tensors beside this ``config.json`` are stored: its quantisation scheme, else its dtype.

    Returns "nvfp4" for modelopt files: counted by the planner, refused by the loader.
    """
    text = hf.get("text_config", {})
    kind = _quantization_kind(hf.get("quantization_config") or text.get("quantization_config"))
    glm = hf.get("model_type") == "glm_moe_dsa"
    if kind == "kimi_int4":
        return "glm_int4" if glm else "kimi_int4"
    if kind == "glm_fp8" and not glm:
        raise ValueError("quant_method='fp8': only GLM has an FP8 checkpoint layout here")
    if kind != "bf16":
        return kind
    dtype = hf.get("dtype") or hf.get("torch_dtype") or text.get("dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype={dtype!r}: checkpoints are bfloat16 or float32")
    if dtype == "float32":
        return "f32"
    return "glm_bf16" if glm else "bf16"


def to_hf(config: ModelConfig, checkpoint: CheckpointFormat) -> dict[str, Any]:
    """A fixture's file: ``from_hf(to_hf(c, f), c.name) == c`` and ``checkpoint_format`` gives f."""
    c, glm = config, config.family == "glm"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope.theta}
    if c.rope.yarn:
        y = c.rope.yarn
        rope |= {
            "rope_type": "yarn",
            "factor": y.factor,
            "original_max_position_embeddings": y.original_context,
            "beta_fast": y.beta_fast,
            "beta_slow": y.beta_slow,
            "mscale": y.mscale,
            "mscale_all_dim": y.mscale_all_dim,
        }
    text: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM" if glm else "DeepseekV3ForCausalLM"],
        "model_type": "glm_moe_dsa" if glm else "kimi_k2",
        "dtype": "float32" if checkpoint == "f32" else "bfloat16",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "first_k_dense_replace": c.num_dense_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "intermediate_size": c.dense_ffn_size,
        "moe_intermediate_size": c.expert_ffn_size,
        "n_routed_experts": c.num_experts,
        "n_shared_experts": c.num_shared_experts,
        "num_experts_per_tok": c.experts_per_token,
        "n_group": c.n_group,
        "topk_group": c.topk_group,
        "norm_topk_prob": c.norm_topk_prob,
        "routed_scaling_factor": c.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": c.max_context,
        "num_nextn_predict_layers": c.mtp_layers,
        "tie_word_embeddings": False,
        "bos_token_id": c.bos_id,
        "eos_token_id": list(c.eos_ids),
        "pad_token_id": c.pad_id,
    }
    if c.lora_norm_eps != 1e-6:
        text["lora_norm_eps"] = c.lora_norm_eps
    if c.indexer:
        text |= {
            "index_n_heads": c.indexer.num_heads,
            "index_head_dim": c.indexer.head_dim,
            "index_topk": c.indexer.topk,
            "indexer_types": ["full" if c.is_full_indexer(i) else "shared" for i in range(c.num_layers)],
            "index_share_for_mtp_iteration": c.indexer.share_for_mtp,
        }
    if (quantization := _quantization_to_hf(c, checkpoint)) is not None:
        text["quantization_config"] = quantization
    if c.vision is None:
        return text
    v = c.vision
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": text["dtype"],
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {
            "vt_hidden_size": v.hidden_size,
            "vt_num_hidden_layers": v.num_layers,
            "vt_intermediate_size": v.ffn_size,
            "patch_size": v.patch_size,
            "init_pos_emb_height": v.position_height,
            "init_pos_emb_width": v.position_width,
            "merge_kernel_size": list(v.merge),
            "text_hidden_size": c.hidden_size,
        },
    }


def _quantization_to_hf(config: ModelConfig, checkpoint: CheckpointFormat) -> dict[str, Any] | None:
    if checkpoint in ("kimi_int4", "glm_int4"):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "dynamic": False}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {**weights, "group_size": config.int4_group}}
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
        }
    if checkpoint == "glm_fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(config.fp8_block),
            "modules_to_not_convert": unconverted_modules(config),
        }
    if checkpoint in ("f32", "bf16", "glm_bf16"):
        return None
    raise NotImplementedError(f"checkpoint={checkpoint!r}: no config.json is written for it")
