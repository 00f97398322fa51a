"""Kimi K2.6: what differs from GLM is YaRN, one dense layer, no indexer, no MTP layer, INT4 experts."""

from __future__ import annotations

from kvmem.models.config import ModelConfig, RopeConfig, VisionConfig, YarnConfig, validate

_YARN = YarnConfig(factor=64.0, original_context=4096)


def config() -> ModelConfig:
    """The published model (config.json of K2.5 and of the K2.6 NVFP4 build; the architecture is the same)."""
    return validate(
        ModelConfig(
            name="kimi_k2.6",
            family="kimi",
            vocab_size=163840,
            hidden_size=7168,
            num_layers=61,
            num_dense_layers=1,
            num_heads=64,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            dense_ffn_size=18432,
            expert_ffn_size=2048,
            num_experts=384,
            num_shared_experts=1,
            experts_per_token=8,
            rope=RopeConfig(theta=50000.0, yarn=_YARN),
            routed_scaling_factor=2.827,
            max_context=262144,
            vision=VisionConfig(
                hidden_size=1152,
                num_layers=27,
                ffn_size=4304,
                patch_size=14,
                position_height=64,
                position_width=64,
                merge=(2, 2),
            ),
            bos_id=163584,
            eos_ids=(163586,),
            pad_id=163839,
        )
    )


def tiny_parity() -> ModelConfig:
    """The smallest model with every feature, as transformers' DeepseekV3; two expert groups, one kept."""
    return validate(
        ModelConfig(
            name="kimi_tiny_parity",
            family="kimi",
            vocab_size=97,
            hidden_size=64,
            num_layers=3,
            num_dense_layers=1,
            num_heads=4,
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            dense_ffn_size=96,
            expert_ffn_size=32,
            num_experts=8,
            num_shared_experts=1,
            experts_per_token=3,
            n_group=2,
            topk_group=1,
            rope=RopeConfig(theta=50000.0, yarn=_YARN),
            routed_scaling_factor=2.827,
            max_context=4096,
            bos_id=0,
            eos_ids=(1,),
            fp8_block=(32, 32),
        )
    )


def tiny_tp8() -> ModelConfig:
    """Heads, expert width, vocabulary and scale groups divide over eight ranks; has a vision tower."""
    return validate(
        ModelConfig(
            name="kimi_tiny_tp8",
            family="kimi",
            vocab_size=160,
            hidden_size=64,
            num_layers=4,
            num_dense_layers=1,
            num_heads=16,
            q_lora_rank=48,
            kv_lora_rank=256,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            dense_ffn_size=512,
            expert_ffn_size=256,
            num_experts=12,
            num_shared_experts=1,
            experts_per_token=4,
            rope=RopeConfig(theta=50000.0, yarn=_YARN),
            routed_scaling_factor=2.827,
            max_context=8192,
            vision=VisionConfig(
                hidden_size=24,
                num_layers=2,
                ffn_size=40,
                patch_size=6,
                position_height=5,
                position_width=7,
                merge=(2, 2),
            ),
            bos_id=156,
            eos_ids=(158,),
            pad_id=159,
            fp8_block=(32, 32),
        )
    )
