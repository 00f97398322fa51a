"""ModelConfig, and its translation from and to a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Family = Literal["kimi", "glm"]
CheckpointFormat = Literal["f32", "bf16", "kimi_int4", "glm_bf16", "glm_fp8", "glm_int4", "nvfp4"]


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv 2309.00071) as DeepSeek-V3 configures it."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over interleaved pairs; ``theta`` is the base."""

    theta: float
    yarn: YarnConfig | None = None


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """GLM's sparse-attention indexer (DSA) with IndexShare (arXiv 2603.12201).

    ``full_layers`` own an indexer; every other layer reuses the selection of the nearest full layer below.
    """

    num_heads: int
    head_dim: int
    topk: int
    full_layers: tuple[int, ...]
    share_for_mtp: bool = True


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Kimi's MoonViT tower and projector: declared and counted, never run."""

    hidden_size: int
    num_layers: int
    ffn_size: int
    patch_size: int
    position_height: int
    position_width: int
    merge: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that is not an array. Sizes are counts, over all ranks.

    Attributes:
      lora_norm_eps: epsilon of the norms inside the low-rank projections (``q_a``, ``kv_a``). transformers
        and the models' own code use 1e-6 (a class default); SGLang and vLLM pass ``rms_norm_eps``. The
        published config.json does not say, so it is a field.
      mtp_layers: multi-token-prediction layers after the main stack (GLM: layer 78).
      fp8_block: rows and columns of a weight that share one scale in an FP8 checkpoint.
      int4_group: input-axis weights of a row that share one scale in an INT4 checkpoint.
    """

    name: str
    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    dense_ffn_size: int
    expert_ffn_size: int
    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    rope: RopeConfig
    routed_scaling_factor: float
    max_context: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-5
    lora_norm_eps: float = 1e-6
    indexer: IndexerConfig | None = None
    mtp_layers: int = 0
    vision: VisionConfig | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    fp8_block: tuple[int, int] = (128, 128)
    int4_group: int = 32

    @property
    def cache_width(self) -> int:
        """Values of one cached token and layer: latent and rotary part (C = L + R)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key in the naive form (N + R)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(N + R)^-0.5, times YaRN's mscale squared: 0.1446796 for Kimi K2.6, 0.0625 for GLM 5.2."""
        yarn = self.rope.yarn
        mscale = yarn_mscale(yarn.factor, yarn.mscale_all_dim) if yarn else 1.0
        return self.qk_head_dim**-0.5 * mscale**2

    @property
    def tensor_prefix(self) -> str:
        """What precedes ``model.`` and ``lm_head`` in tensor names: Kimi's vision wrapper adds one."""
        return "language_model." if self.vision else ""

    @property
    def num_index_layers(self) -> int:
        """Layers of the main stack that own an indexer and cache index keys."""
        return len(self.indexer.full_layers) if self.indexer else 0

    def is_full_indexer(self, layer: int) -> bool:
        """Whether ``layer`` owns an indexer; the MTP layer does, a model without indexer has none."""
        return self.indexer is not None and (layer in self.indexer.full_layers or layer >= self.num_layers)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, 0.1 mscale ln(factor) + 1 (DeepSeek-V3's ``yarn_get_mscale``)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def validate(config: ModelConfig) -> ModelConfig:
    """Return ``config`` unchanged, or raise ValueError naming the value and the rule it breaks."""
    c = config
    positive = (
        "vocab_size hidden_size num_layers num_heads q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim "
        "dense_ffn_size expert_ffn_size num_experts num_shared_experts experts_per_token n_group topk_group "
        "max_context int4_group"
    )
    for name in positive.split():
        if getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)}: must be at least 1")
    if c.qk_rope_head_dim < 2 or c.qk_rope_head_dim % 2:
        raise ValueError(
            f"qk_rope_head_dim={c.qk_rope_head_dim}: rotary pairs need an even width of at least 2"
        )
    if not 0 <= c.num_dense_layers < c.num_layers:
        raise ValueError(f"num_dense_layers={c.num_dense_layers}: must be in [0, num_layers={c.num_layers})")
    if c.num_experts % c.n_group:
        raise ValueError(f"num_experts={c.num_experts}: n_group={c.n_group} must divide it")
    if c.topk_group > c.n_group:
        raise ValueError(f"topk_group={c.topk_group}: at most n_group={c.n_group}")
    selectable = c.num_experts // c.n_group * c.topk_group
    if c.experts_per_token > selectable:
        raise ValueError(
            f"experts_per_token={c.experts_per_token}: only {selectable} experts are in kept groups"
        )
    if c.indexer:
        if not c.indexer.full_layers or c.indexer.full_layers[0] != 0:
            raise ValueError(f"full_layers={c.indexer.full_layers}: layer 0 has no layer below to share with")
        if c.indexer.head_dim < c.qk_rope_head_dim:
            raise ValueError(
                f"index head_dim={c.indexer.head_dim}: at least qk_rope_head_dim={c.qk_rope_head_dim}"
            )
    return c


def full_indexer_layers(num_layers: int, freq: int, offset: int) -> tuple[int, ...]:
    """Layers with an own indexer by GLM's rule: full iff ``max(i - offset + 1, 0) % freq == 0``."""
    return tuple(i for i in range(num_layers) if max(i - offset + 1, 0) % freq == 0)
