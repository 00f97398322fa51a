"""Turns the planner's bytes into the quantities the published account states: GiB, tokens, break-evens.

Bytes come from the declared parameters and the cache layouts and from nowhere else; published numbers enter
only where a claim is about them (the tokens of a published capacity, a published prefill rate).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from experiments import claims
from kvmem import models
from kvmem.cache import store
from kvmem.models import decoder, params
from kvmem.models.config import CheckpointFormat, ModelConfig

GIB = 2.0**30
TP = 8
GPU_GIB = 143_771 / 1024  # an H200 reports 143,771 MiB
# The one free parameter: what a GPU gives to weights and cache. It is a Kimi rank's weights plus 686,000 BF16
# tokens, to one decimal; that the FP8 and GLM capacities follow from the same figure is the finding.
BUDGET_GIB = 116.7
E4M3_PEAK = 1979e12  # dense FLOP/s of one H200
PREFILL_CONTEXT = 8192  # tokens; the account's own prompt length in its overhead runs


def metrics() -> dict[str, float]:
    """Returns all of it by metric name, the planner's own included."""
    found = planned()
    kimi, glm = models.get_config("kimi_k2.6"), models.get_config("glm_5.2")
    return found | _gib(found) | _capacity(found) | _ratios(found, glm) | _sharded_cache(found, kimi)


def planned() -> dict[str, float]:
    """Returns parameters, checkpoint bytes, bytes of a rank, and cache bytes per token of both models."""
    kimi, glm = models.get_config("kimi_k2.6"), models.get_config("glm_5.2")
    int4 = {g: dataclasses.replace(glm, int4_group=g) for g in (32, 64, 128)}
    out: dict[str, float] = {
        "kimi_k2.6.params": params.checkpoint_totals(kimi, "bf16").elements,
        "kimi_k2.6.checkpoint_bytes": params.checkpoint_totals(kimi, "kimi_int4").nbytes,
        "kimi_k2.6.int4_g32.bytes_per_rank": _rank_bytes(kimi, "kimi_int4"),
        "glm_5.2.params": params.checkpoint_totals(glm, "glm_bf16").elements,
        "glm_5.2.bf16_bytes": params.checkpoint_totals(glm, "glm_bf16").nbytes,
        "glm_5.2.fp8_bytes": params.checkpoint_totals(glm, "glm_fp8").nbytes,
        "glm_5.2.fp8.bytes_per_rank": _rank_bytes(glm, "glm_fp8"),
        "glm_5.2.int4_g32.bytes_per_rank": _rank_bytes(glm, "glm_int4"),
    }
    for group, config in int4.items():
        out[f"glm_5.2.int4_g{group}_bytes"] = params.checkpoint_totals(config, "glm_int4").nbytes
    shapes = {c.name: decoder.cache_shape(c) for c in (kimi, glm)}
    main = shapes["glm_5.2"]
    shapes["glm_5.2_mtp"] = dataclasses.replace(
        main, num_layers=main.num_layers + 1, num_index_layers=main.num_index_layers + 1
    )
    for name, shape in shapes.items():
        for cache, layout in {"bf16": "bf16_576", "fp8_flat": "fp8_576", "fp8_656": "fp8_656"}.items():
            out[f"{name}.kv_bytes_per_token.{cache}"] = store.bytes_per_token(shape, layout, "index_132")
    return out


def _rank_bytes(config: ModelConfig, checkpoint: CheckpointFormat) -> float:
    """Bytes of a checkpoint's tensors on one rank: split ones over all, the rest on each."""
    specs = params.leaves(params.param_specs(config, "bf16", checkpoint))
    split = {name for _, spec in specs if any(spec.axes) for name in params.source_names(spec)}
    found = 0.0
    for tensor in params.checkpoint_tensors(config, checkpoint):
        stem, dot, _ = tensor.name.rpartition(".weight")
        found += tensor.nbytes / (TP if stem + dot in split else 1)
    return found


def _gib(found: Mapping[str, float]) -> dict[str, float]:
    """Bytes in GiB, whole and over eight GPUs."""
    out = {"h200_gib": GPU_GIB, "kimi_k2.6.checkpoint_gib": found["kimi_k2.6.checkpoint_bytes"] / GIB}
    for form in ("fp8", "int4_g32", "int4_g64", "int4_g128"):
        out[f"glm_5.2.{form}_gib"] = found[f"glm_5.2.{form}_bytes"] / GIB
        out[f"glm_5.2.{form}_gib_over_8"] = out[f"glm_5.2.{form}_gib"] / TP
    for form in ("fp8", "int4_g32"):
        out[f"glm_5.2.{form}.rank_gib"] = found[f"glm_5.2.{form}.bytes_per_rank"] / GIB
    return out | {"kimi_k2.6.rank_gib": found["kimi_k2.6.int4_g32.bytes_per_rank"] / GIB}


def _capacity(found: Mapping[str, float]) -> dict[str, float]:
    """Tokens at the budget, and the bytes of published capacities."""
    kimi, glm = "kimi_k2.6", "glm_5.2"
    room = {
        kimi: BUDGET_GIB * GIB - found[f"{kimi}.int4_g32.bytes_per_rank"],
        glm: BUDGET_GIB * GIB - found[f"{glm}.int4_g32.bytes_per_rank"],
    }
    kv = {name: value for name, value in found.items() if ".kv_bytes_per_token." in name}
    out: dict[str, float] = {}
    for model, cache in (
        (kimi, "bf16"),
        (kimi, "fp8_flat"),
        (kimi, "fp8_656"),
        (glm, "fp8_656"),
        (glm, "bf16"),
    ):
        out[f"{model}.{cache}.tokens_at_budget"] = room[model] // kv[f"{model}.kv_bytes_per_token.{cache}"]
    published = claims.published("kimi.capacity")["bf16"]
    pool = published * kv[f"{kimi}.kv_bytes_per_token.bf16"]
    out[f"{kimi}.bf16.kv_gib"] = pool / GIB
    out[f"{kimi}.fp8_656.tokens_in_bf16_pool"] = pool // kv[f"{kimi}.kv_bytes_per_token.fp8_656"]
    out[f"{kimi}.total_gib"] = (pool + found[f"{kimi}.int4_g32.bytes_per_rank"]) / GIB
    pool = claims.published("glm")["capacity"] * kv[f"{glm}.kv_bytes_per_token.fp8_656"]
    out[f"{glm}.fp8_656.kv_gib"] = pool / GIB
    out[f"{glm}.total_gib"] = (pool + found[f"{glm}.int4_g32.bytes_per_rank"]) / GIB
    return out


def _ratios(found: Mapping[str, float], glm: ModelConfig) -> dict[str, float]:
    """What INT4 saves, what FP8 saves, and the share of peak that the published prefill rate is."""
    kv = "kimi_k2.6.kv_bytes_per_token"
    reached = claims.published("glm.prefill")["w_fp8"] * prefill_flops(glm, PREFILL_CONTEXT)
    return {
        "glm_5.2.int4_saved_pct": 100 * (1 - found["glm_5.2.int4_g32_bytes"] / found["glm_5.2.fp8_bytes"]),
        "kimi_k2.6.kv_bf16_over_fp8": found[f"{kv}.bf16"] / found[f"{kv}.fp8_flat"],
        "kimi_k2.6.max_context": models.get_config("kimi_k2.6").max_context,
        "published.glm_5.2.prefill_peak_pct.gpus8": 100 * reached / (TP * E4M3_PEAK),
        "published.glm_5.2.prefill_peak_pct.gpus1": 100 * reached / E4M3_PEAK,
    }


def _sharded_cache(found: Mapping[str, float], config: ModelConfig) -> dict[str, float]:
    """Tokens in flight above which a cache sharded over ranks makes a step read less.

    Each rank then reads all attention weights instead of 1/8 of those split by heads, and 1/8 of the cache
    instead of all of it: both change by 7/8, so it is bytes against bytes.
    """
    specs = params.param_specs(config, "bf16")["attention"]
    split = sum(2 * spec.size for _, spec in params.leaves(specs) if "heads" in spec.axes)
    return {
        f"{config.name}.sharded_cache_break_even.{cache}": split
        / found[f"{config.name}.kv_bytes_per_token.{cache}"]
        for cache in ("bf16", "fp8_flat")
    }


def prefill_flops(config: ModelConfig, context: int) -> float:
    """Returns FLOPs per prompt token of a prompt of ``context`` tokens, two per multiply-add.

    All layers but the MTP one; of the experts those a token is sent to; absorbed attention over the tokens
    that the indexer selects, and the indexer's own scores over all earlier ones.
    """
    weights = 0.0
    for path, spec in params.leaves(params.param_specs(config, "bf16")):
        if path[0] in ("mtp", "embed"):
            continue
        routed = path[:2] in (("moe", "gate_up"), ("moe", "down"))
        weights += spec.size * (config.experts_per_token / config.num_experts if routed else 1)
    seen = context / 2
    selected = seen
    scores = 0.0
    if config.indexer:
        top = min(config.indexer.topk, context)
        selected = (top * top / 2 + (context - top) * top) / context
        scores = config.num_index_layers * config.indexer.num_heads * config.indexer.head_dim * seen
    attention = config.num_layers * config.num_heads * selected * (config.cache_width + config.kv_lora_rank)
    return 2 * (weights + attention + scores)


def memory_map(found: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Returns, by label, the GiB of weights and of cache on one GPU for the published capacities."""
    kimi = found["kimi_k2.6.rank_gib"]
    fp8 = claims.published("kimi.capacity")["fp8"] * found["kimi_k2.6.kv_bytes_per_token.fp8_flat"] / GIB
    glm = found["glm_5.2.int4_g32.rank_gib"]
    bf16 = claims.published("glm")["capacity"] * found["glm_5.2.kv_bytes_per_token.bf16"] / GIB
    return {
        "Kimi, BF16 cache, 686 K": (kimi, found["kimi_k2.6.bf16.kv_gib"]),
        "Kimi, FP8 cache, 1.37 M": (kimi, fp8),
        "GLM INT4, 656-byte cache, 1.18 M": (glm, found["glm_5.2.fp8_656.kv_gib"]),
        "GLM INT4, BF16 cache, 1.18 M": (glm, bf16),
    }
