"""GLM 5.2: what differs from Kimi is the sparse-attention indexer with IndexShare, three dense layers, plain
RoPE, a value width unlike the key width, an FP8 checkpoint, and one MTP layer."""

from __future__ import annotations

from kvmem.models.config import IndexerConfig, ModelConfig, RopeConfig, full_indexer_layers, validate

_ROPE = RopeConfig(theta=8_000_000.0)


def config() -> ModelConfig:
    """The published model (its config.json)."""
    return validate(
        ModelConfig(
            name="glm_5.2",
            family="glm",
            vocab_size=154880,
            hidden_size=6144,
            num_layers=78,
            num_dense_layers=3,
            num_heads=64,
            q_lora_rank=2048,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            dense_ffn_size=12288,
            expert_ffn_size=2048,
            num_experts=256,
            num_shared_experts=1,
            experts_per_token=8,
            rope=_ROPE,
            routed_scaling_factor=2.5,
            max_context=1_048_576,
            indexer=IndexerConfig(
                num_heads=32, head_dim=128, topk=2048, full_layers=full_indexer_layers(78, freq=4, offset=3)
            ),
            mtp_layers=1,
            eos_ids=(154820, 154827, 154829),
            pad_id=154820,
        )
    )


def tiny_parity() -> ModelConfig:
    """Eight layers, indexers F F F S S S F S, top-k 8; transformers has no MTP layer, so neither has this."""
    return validate(
        ModelConfig(
            name="glm_tiny_parity",
            family="glm",
            vocab_size=97,
            hidden_size=64,
            num_layers=8,
            num_dense_layers=3,
            num_heads=4,
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=20,
            dense_ffn_size=96,
            expert_ffn_size=32,
            num_experts=8,
            num_shared_experts=1,
            experts_per_token=3,
            rope=_ROPE,
            routed_scaling_factor=2.5,
            max_context=202752,
            indexer=IndexerConfig(
                num_heads=32, head_dim=16, topk=8, full_layers=full_indexer_layers(8, freq=4, offset=3)
            ),
            bos_id=0,
            eos_ids=(1,),
            fp8_block=(32, 32),
        )
    )


def tiny_tp8() -> ModelConfig:
    """Divides over eight ranks. As in the full model an FP8 block of ``kv_b_proj`` straddles heads (56 rows a
    head, blocks of 32) and ``kv_a_proj`` ends in a partial block (264 rows)."""
    return validate(
        ModelConfig(
            name="glm_tiny_tp8",
            family="glm",
            vocab_size=160,
            hidden_size=64,
            num_layers=8,
            num_dense_layers=3,
            num_heads=16,
            q_lora_rank=48,
            kv_lora_rank=256,
            qk_nope_head_dim=24,
            qk_rope_head_dim=8,
            v_head_dim=32,
            dense_ffn_size=512,
            expert_ffn_size=256,
            num_experts=10,
            num_shared_experts=1,
            experts_per_token=3,
            rope=_ROPE,
            routed_scaling_factor=2.5,
            max_context=8192,
            indexer=IndexerConfig(
                num_heads=32, head_dim=16, topk=8, full_layers=full_indexer_layers(8, freq=4, offset=3)
            ),
            mtp_layers=1,
            eos_ids=(154, 155, 156),
            pad_id=154,
            fp8_block=(32, 32),
        )
    )
