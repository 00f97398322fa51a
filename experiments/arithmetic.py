"""Turns the planner's bytes into the quantities the published account states: GiB, tokens, break-evens.

Bytes come from the declared parameters and the cache layouts and from nowhere else; published numbers enter
only where a claim is about them (the tokens of a published capacity, a published prefill rate).
"""

from __future__ import annotations

from collections.abc import Mapping

from experiments import claims
from kvmem import models, planner
from kvmem.models import params

GIB = 2.0**30
TP = 8
GPU_GIB = 143_771 / 1024  # an H200 reports 143,771 MiB
# The one free parameter: what a GPU gives to weights and cache. It is a Kimi rank's weights plus 686,000 BF16
# tokens, to one decimal; that the FP8 and GLM capacities follow from the same figure is the finding.
BUDGET_GIB = 116.7
CACHES = ("bf16", "fp8_flat", "fp8_656")
WEIGHTS = {
    "kimi": ("bf16", "int4_g32"),
    "glm": ("bf16", "fp8", "int4_g32", "int4_g64", "int4_g128"),
}
E4M3_PEAK = 1979e12  # dense FLOP/s of one H200
PREFILL_CONTEXT = 8192  # tokens; the account's own prompt length in its overhead runs


def metrics() -> dict[str, float]:
    """Returns all of it by metric name, the planner's own included."""
    found = planned()
    return found | _gib(found) | _capacity(found) | _ratios(found)


def planned() -> dict[str, float]:
    """Returns parameters, checkpoint bytes, bytes of a rank, and cache bytes per token of both models."""
    out: dict[str, float] = {}
    for config in (models.get_config("kimi_k2.6"), models.get_config("glm_5.2")):
        name = config.name
        out[f"{name}.params"] = params.checkpoint_totals(config, "bf16").elements
        for label in WEIGHTS[config.family]:
            out[f"{name}.{label}_bytes"] = planner.checkpoint_bytes(config, label)
            out[f"{name}.{label}.bytes_per_rank"] = planner.checkpoint_rank_bytes(config, label).total
        for cache in CACHES:
            out[f"{name}.kv_bytes_per_token.{cache}"] = planner.kv_bytes_per_token(config, cache)
            if config.mtp_layers:
                with_mtp = planner.kv_bytes_per_token(config, cache, mtp=True)
                out[f"{name}_mtp.kv_bytes_per_token.{cache}"] = with_mtp
            break_even = planner.sharded_cache_break_even(config, cache)
            out[f"{name}.sharded_cache_break_even.{cache}"] = break_even
    return out | {"kimi_k2.6.checkpoint_bytes": out["kimi_k2.6.int4_g32_bytes"]}


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


def _ratios(found: Mapping[str, float]) -> dict[str, float]:
    """What INT4 saves, what FP8 saves, and the share of peak that the published prefill rate is."""
    kv = "kimi_k2.6.kv_bytes_per_token"
    flops = planner.prefill_flops(models.get_config("glm_5.2"), PREFILL_CONTEXT)
    reached = claims.published("glm.prefill")["w_fp8"] * flops
    return {
        "glm_5.2.int4_saved_pct": 100 * (1 - found["glm_5.2.int4_g32_bytes"] / found["glm_5.2.fp8_bytes"]),
        "kimi_k2.6.kv_bf16_over_fp8": found[f"{kv}.bf16"] / found[f"{kv}.fp8_flat"],
        "kimi_k2.6.max_context": models.get_config("kimi_k2.6").max_context,
        "published.glm_5.2.prefill_peak_pct.gpus8": 100 * reached / (TP * E4M3_PEAK),
        "published.glm_5.2.prefill_peak_pct.gpus1": 100 * reached / E4M3_PEAK,
    }


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
