"""Which tensor of a directory is which declared one; what is missing, different, foreign, or left over."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from kvmem.checkpoint.directory import CheckpointDirectory
from kvmem.models import params
from kvmem.models.config import CheckpointFormat, ModelConfig
from kvmem.models.params import CheckpointTensor

PREFIX = "language_model."
# Marks of quantisation schemes whose values would be wrong if they were read as symmetric groups in order.
FOREIGN = {
    "_g_idx": "act-order (a permuted input axis)",
    "_zero_point": "asymmetric INT4 (zero points)",
    ".qweight": "GPTQ or AWQ packing",
    ".qzeros": "GPTQ or AWQ packing",
}


def reconcile(found: ModelConfig, given: ModelConfig | None, checkpoint: str) -> ModelConfig:
    """``given`` where config.json is silent; ValueError naming every other field in which the two differ."""
    if given is None:
        return found
    free = {"name", "lora_norm_eps"}
    free |= set() if checkpoint.endswith("_fp8") else {"fp8_block"}
    free |= set() if checkpoint.endswith("_int4") else {"int4_group"}
    different = [
        f"{field.name} is {getattr(found, field.name)!r}, must be {getattr(given, field.name)!r}"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in free and getattr(found, field.name) != getattr(given, field.name)
    ]
    if different:
        raise ValueError(f"config.json is not of {given.name}: {'; '.join(different)}")
    return given


def match(
    files: CheckpointDirectory, config: ModelConfig, checkpoint: CheckpointFormat
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Finds every declared tensor under its spelling in the files: (declared -> found, vision, unused)."""
    spelled: dict[str, str] = {}
    for actual in files.tensors:
        plain = actual.removeprefix(PREFIX)
        if plain in spelled:
            raise ValueError(f"{files.path}: both {spelled[plain]} and {actual} are there")
        spelled[plain] = actual
    alias = {
        base: base.replace(*spec.source.alias)
        for _, spec in params.leaves(params.param_specs(config, "bf16", checkpoint))
        if spec.source.alias
        for base in params.source_names(spec)
    }
    found: dict[str, str] = {}
    missing: list[str] = []
    vision: list[str] = []
    wrong: list[str] = []
    for tensor in params.checkpoint_tensors(config, checkpoint):
        names = (n.removeprefix(PREFIX) for n in (tensor.name, alias.get(tensor.name, tensor.name)))
        name = next((spelled[n] for n in names if n in spelled), None)
        if tensor.kind == "vision":
            vision += [name] if name else []
        elif name is None:
            missing.append(tensor.name)
        else:
            found[tensor.name] = name
            wrong += _differences(files, name, tensor)
    unused = tuple(sorted(set(files.tensors) - set(found.values()) - set(vision)))
    for left in unused:
        for mark, scheme in FOREIGN.items():
            if left.endswith(mark):
                raise ValueError(f"{files.path}: {left}: {scheme} is not supported")
    if missing:
        raise ValueError(
            f"{files.path}: {len(missing)} tensors that config.json asks for are missing: {few(missing)}"
            + (f"; not used: {few(unused)}" if unused else "")
        )
    if wrong:
        raise ValueError(f"{files.path}: {few(wrong)}")
    return found, tuple(vision), unused


def _differences(files: CheckpointDirectory, name: str, tensor: CheckpointTensor) -> list[str]:
    info = files.tensors[name]
    if info.dtype != tensor.dtype:
        return [f"{name} has dtype {info.dtype}, must be {tensor.dtype}"]
    if info.shape != tensor.shape:
        return [f"{name} has shape {list(info.shape)}, must be {list(tensor.shape)}"]
    return []


def few(items: Iterable[str], limit: int = 4) -> str:
    items = list(items)
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


_CACHE_SCALE = re.compile(r"\.(layers\.\d+)\.self_attn\.(?:.+\.)?(?:k|v|kv)_scale$")


def cache_scale(files: CheckpointDirectory, unused: tuple[str, ...]) -> tuple[float | None, tuple[str, ...]]:
    """(the one calibrated cache scale or None, the names it was read from)."""
    values: dict[str, float] = {}
    for name in unused:
        if _CACHE_SCALE.search(name):
            scale = files.read(name).astype(np.float32)
            if scale.size != 1 or not np.isfinite(scale).all() or scale.item() <= 0:
                raise ValueError(f"{name}: a cache scale must be one positive number, got {scale.tolist()}")
            values[name] = scale.item()
    if len(set(values.values())) > 1:
        listed = few(f"{name} = {scale}" for name, scale in values.items())
        raise ValueError(
            f"{files.path}: cache scales differ ({listed}): K and V are one row in latent attention, and all "
            "layers one pool, so there is one scale"
        )
    return next(iter(values.values()), None), tuple(values)
