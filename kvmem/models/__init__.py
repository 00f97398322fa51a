"""Kimi K2.6 and GLM 5.2 as pure functions over pytrees of declared parameters."""

from collections.abc import Callable

from kvmem.models import glm5, kimi_k2
from kvmem.models.config import ModelConfig
from kvmem.models.hf_config import checkpoint_format, from_hf, to_hf

_CONFIGS: dict[str, Callable[[], ModelConfig]] = {
    "kimi_k2.6": kimi_k2.config,
    "glm_5.2": glm5.config,
    "kimi_tiny_parity": kimi_k2.tiny_parity,
    "kimi_tiny_tp8": kimi_k2.tiny_tp8,
    "glm_tiny_parity": glm5.tiny_parity,
    "glm_tiny_tp8": glm5.tiny_tp8,
}


def get_config(name: str) -> ModelConfig:
    """The named model's config; ValueError naming the known ones otherwise."""
    if name not in _CONFIGS:
        raise ValueError(f"model {name!r} is unknown; known models are {sorted(_CONFIGS)}")
    return _CONFIGS[name]()


__all__ = ["ModelConfig", "checkpoint_format", "from_hf", "get_config", "to_hf"]
