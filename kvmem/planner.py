"""Bytes, tokens and floors from a model config: the memory and roofline model.

Everything follows from the declared parameters (``models.params``) and the cache layouts (``cache.store``);
there is no second table of sizes. Units are bytes, tokens, seconds and FLOPs.
"""

import dataclasses
import math
from typing import Final, Literal

from kvmem.cache import store
from kvmem.models import decoder, params
from kvmem.models.config import CheckpointFormat, ModelConfig
from kvmem.models.params import Weights
from kvmem.models.sharded import partition_specs, rank_bytes

GIB: Final = 2**30
H200_GIB: Final = 143_771 / 1024  # what the driver reports: 143,771 MiB
H200_BYTES_PER_S: Final = 4.3e12  # best read-only stream measured; 4.8e12 is the data sheet's

Cache = Literal["bf16", "fp8_flat", "fp8_656"]
CACHES: Final[dict[str, str]] = {"bf16": "bf16_576", "fp8_flat": "fp8_576", "fp8_656": "fp8_656"}
INDEX_LAYOUT: Final = "index_132"
# Weight formats by label: the checkpoint format whose bytes they are, and its group.
FORMATS: Final[dict[str, dict[str, tuple[CheckpointFormat, int]]]] = {
    "kimi": {"bf16": ("bf16", 32), "int4_g32": ("kimi_int4", 32), "nvfp4": ("nvfp4", 32)},
    "glm": {
        "bf16": ("glm_bf16", 32),
        "fp8": ("glm_fp8", 32),
        "int4_g32": ("glm_int4", 32),
        "int4_g64": ("glm_int4", 64),
        "int4_g128": ("glm_int4", 128),
        "nvfp4": ("nvfp4", 32),
    },
}
# The device format whose sharding rules a checkpoint format must satisfy.
DEVICE_WEIGHTS: Final[dict[CheckpointFormat, Weights]] = {
    "bf16": "bf16",
    "glm_bf16": "bf16",
    "glm_fp8": "fp8_block",
    "kimi_int4": "int4_group",
    "glm_int4": "int4_group",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a deployment of ``ranks`` GPUs divides a model.

    With ``data_parallel_attention`` each request lives on one rank: the cache is sharded over the ranks (it
    is replicated otherwise, MLA having one latent head) and the attention weights, split by heads otherwise,
    are whole on every rank.
    """

    ranks: int = 8
    data_parallel_attention: bool = False


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Checkpoint bytes that one rank holds: its part of what is split, and what every rank has whole."""

    split: int
    replicated: int

    @property
    def total(self) -> int:
        return self.split + self.replicated


def checkpoint_bytes(config: ModelConfig, label: str) -> int:
    """Bytes of the whole checkpoint in weight format ``label`` (see FORMATS)."""
    config, checkpoint = _formatted(config, label)
    return params.checkpoint_totals(config, checkpoint).nbytes


def checkpoint_rank_bytes(config: ModelConfig, label: str, layout: Layout = Layout()) -> RankMemory:
    """The checkpoint's bytes on one rank, vision and MTP tensors included, as published figures count them.

    What the served program holds differs in details: see ``device_rank_bytes``.

    Raises:
      ValueError: an unknown format, or a scale group that does not divide a rank's part.
    """
    config, checkpoint = _formatted(config, label)
    if checkpoint in DEVICE_WEIGHTS:
        partition_specs(params.param_specs(config, DEVICE_WEIGHTS[checkpoint]), layout.ranks)
    split = replicated = 0
    for _, spec, totals in params.checkpoint_parts(config, checkpoint):
        if spec is not None and _is_split(spec.axes, layout):
            split += totals.nbytes // layout.ranks
        else:
            replicated += totals.nbytes
    return RankMemory(split, replicated)


def device_rank_bytes(
    config: ModelConfig, weights: Weights, ranks: int = 8, *, mtp: bool = True
) -> RankMemory:
    """Bytes of the parameter arrays on one rank: what a compiled step takes as arguments.

    Against ``checkpoint_rank_bytes``: no vision tensors, no ``weight_shape``, and ``kv_b_proj`` in bf16 even
    where the checkpoint has it in FP8. ``mtp=False`` leaves the MTP layer out, as a step without drafting.
    """
    specs = params.param_specs(config, weights)
    if not mtp:
        specs.pop("mtp", None)
    sizes = rank_bytes(specs, ranks)
    return RankMemory(sum(sizes["split"].values()), sum(sizes["replicated"].values()))


def kv_bytes_per_token(config: ModelConfig, cache: str, *, mtp: bool = False) -> int:
    """Bytes of one cached token over all layers, GLM's index keys (132 bytes a full layer) included."""
    if cache not in CACHES:
        raise ValueError(f"cache={cache!r}: known are {sorted(CACHES)}")
    return store.bytes_per_token(decoder.cache_shape(config, mtp=mtp), CACHES[cache], INDEX_LAYOUT)


def tokens_per_gpu(
    config: ModelConfig,
    label: str,
    cache: str,
    layout: Layout = Layout(),
    *,
    memory_fraction: float,
    gpu_gib: float = H200_GIB,
    page_size: int = 64,
) -> int:
    """Cached tokens that fit on one GPU beside the weights, in whole pages, the padding page not counted.

    With a replicated cache this is the capacity of the deployment; with data-parallel attention the
    deployment holds ``layout.ranks`` times as many.

    Raises:
      ValueError: a fraction outside (0, 1], or weights that leave no room for a page.
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction={memory_fraction}: must be in (0, 1]")
    room = memory_fraction * gpu_gib * GIB - checkpoint_rank_bytes(config, label, layout).total
    pages = math.floor(room / (page_size * kv_bytes_per_token(config, cache)))
    if pages < 2:
        held = memory_fraction * gpu_gib - room / GIB
        raise ValueError(
            f"{config.name} {label}: weights of {held:.1f} GiB a rank leave no room for cache in "
            f"{memory_fraction:g} of {gpu_gib:.2f} GiB"
        )
    return (pages - 1) * page_size


@dataclasses.dataclass(frozen=True)
class DecodeFloor:
    """Bytes that one rank must read in one decode step, and the time that takes at a given bandwidth."""

    dense_bytes: int
    expert_bytes: int
    cache_bytes: int
    seconds: float


def decode_floor(
    config: ModelConfig,
    weights: Weights,
    cache: str,
    rows: int,
    context: int,
    layout: Layout = Layout(),
    *,
    bytes_per_s: float = H200_BYTES_PER_S,
) -> DecodeFloor:
    """The memory-bound floor of a decode step of ``rows`` requests at ``context`` cached tokens each.

    Counts every weight read once (of routed experts the expected number of distinct ones under uniform
    routing), and the cache read once: of GLM the selected tokens on every layer, all index keys on full ones.
    Activations, collectives and launches are not counted.
    """
    specs = params.param_specs(config, weights)
    specs.pop("mtp", None)
    specs.pop("embed")
    sizes = rank_bytes(specs, layout.ranks)
    held = {**sizes["split"], **sizes["replicated"]}
    experts = held.pop("moe.gate_up") + held.pop("moe.down")
    if layout.data_parallel_attention:
        held |= {k: n * layout.ranks for k, n in sizes["split"].items() if k.startswith("attention.")}
    touched = 1 - (1 - config.experts_per_token / config.num_experts) ** rows
    shape = decoder.cache_shape(config)
    latent = store.bytes_per_token(
        dataclasses.replace(shape, num_index_layers=0), CACHES[cache], INDEX_LAYOUT
    )
    index = kv_bytes_per_token(config, cache) - latent
    selected = min(context, config.indexer.topk) if config.indexer else context
    read = rows * (selected * latent + context * index)
    read = read // layout.ranks if layout.data_parallel_attention else read
    dense, expert = sum(held.values()), round(experts * touched)
    return DecodeFloor(dense, expert, read, (dense + expert + read) / bytes_per_s)


def prefill_flops(config: ModelConfig, context: int) -> float:
    """FLOPs per prompt token of a prompt of ``context`` tokens, two per multiply-add, over all ranks.

    All layers but the MTP one; of the experts those a token is sent to; absorbed attention over the tokens
    that the indexer selects, and the indexer's own scores over all earlier ones.
    """
    weights = 0.0
    for path, spec in params.leaves(params.param_specs(config, "bf16")):
        if path[0] in ("mtp", "embed"):
            continue
        routed = path in (("moe", "gate_up"), ("moe", "down"))
        weights += spec.size * (config.experts_per_token / config.num_experts if routed else 1)
    seen = selected = context / 2
    scores = 0.0
    if config.indexer:
        top = min(config.indexer.topk, context)
        selected = (top * top / 2 + (context - top) * top) / context
        scores = config.num_index_layers * config.indexer.num_heads * config.indexer.head_dim * seen
    attention = config.num_layers * config.num_heads * selected * (config.cache_width + config.kv_lora_rank)
    return 2 * (weights + attention + scores)


def sharded_cache_break_even(config: ModelConfig, cache: str) -> float:
    """Tokens in flight above which data-parallel attention reads less per step and rank.

    It reads all attention weights instead of 1/ranks of those split by heads, and 1/ranks of the cache
    instead of all: both change by the same factor, so it is bytes against bytes at any number of ranks.
    """
    specs = params.param_specs(config, "bf16")["attention"]
    split = sum(2 * spec.size for _, spec in params.leaves(specs) if "heads" in spec.axes)
    return split / kv_bytes_per_token(config, cache)


def _formatted(config: ModelConfig, label: str) -> tuple[ModelConfig, CheckpointFormat]:
    known = FORMATS[config.family]
    if label not in known:
        raise ValueError(f"weights={label!r}: {config.name} has {sorted(known)}")
    checkpoint, group = known[label]
    return dataclasses.replace(config, int4_group=group), checkpoint


def _is_split(axes: tuple[str | None, ...], layout: Layout) -> bool:
    split = {axis for axis in axes if axis is not None}
    return bool(split - {"heads"} if layout.data_parallel_attention else split)
