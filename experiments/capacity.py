"""What both models weigh and how many tokens fit beside them, from the declared parameters.

    python -m experiments.capacity --config=configs/capacity.py --workdir=DIR

Writes metrics under fixed names, ``capacity.png`` (the memory map of a GPU) and a table to standard output.
"""

from __future__ import annotations

import dataclasses
import io

from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments import launch
from kvmem import models, planner, record
from kvmem.models import params
from kvmem.models.config import ModelConfig
from kvmem.planner import FORMATS, GIB, Layout


@dataclasses.dataclass(frozen=True)
class Bar:
    """One GPU of a deployment, in bytes; ``tokens`` fill what the weights leave of the budget."""

    label: str
    weights: str
    split: int
    replicated: int
    cache: int
    tokens: int


def main(config: ConfigDict, run: record.Recorder) -> None:
    """Writes every metric and the figure for the models of ``config``."""
    if not 0 < config.memory_fraction <= 1 or config.page_size < 1:
        raise ValueError(
            f"memory_fraction={config.memory_fraction} must be in (0, 1], "
            f"page_size={config.page_size} at least 1"
        )
    bars: list[Bar] = []
    for name in config.models:
        model = models.get_config(name)
        unknown = set(config.weights) - {label for known in FORMATS.values() for label in known}
        if unknown:
            raise ValueError(f"weights {sorted(unknown)} are unknown; known are {FORMATS}")
        _whole(model, config, run)
        for data_parallel in (False, True):
            bars += _ranks(model, config, Layout(config.tp, data_parallel), run)
        _floors(model, config, run)
    gpu_gib = config.gpu_mib / 1024
    run.metric("memory_fraction", config.memory_fraction)
    run.metric("gpu_gib", gpu_gib)
    drawn = [bar for bar in bars if bar.weights in config.figure_weights]
    run.file("capacity.png", memory_map(drawn, config.memory_fraction * gpu_gib, gpu_gib))
    print(f"{'one GPU of ' + str(config.tp):<50} {'split':>8} {'whole':>8} {'cache GiB':>10} {'tokens':>11}")
    for bar in bars:
        sizes = f"{bar.split / GIB:8.2f} {bar.replicated / GIB:8.2f} {bar.cache / GIB:10.2f}"
        print(f"{bar.label:<50} {sizes} {bar.tokens:11,}")


def _whole(model: ModelConfig, config: ConfigDict, run: record.Recorder) -> None:
    """Parameters, checkpoint bytes and cache bytes per token."""
    name, kimi = model.name, model.family == "kimi"
    run.metric(f"{name}.params", params.checkpoint_totals(model, "bf16").elements)
    for label in _labels(model, config):
        checkpoint = "checkpoint_bytes" if kimi and label == "int4_g32" else f"{label}_bytes"
        run.metric(f"{name}.{checkpoint}", planner.checkpoint_bytes(model, label))
    for cache in config.caches:
        run.metric(f"{name}.kv_bytes_per_token.{cache}", planner.kv_bytes_per_token(model, cache))
        if model.mtp_layers:
            with_mtp = planner.kv_bytes_per_token(model, cache, mtp=True)
            run.metric(f"{name}_mtp.kv_bytes_per_token.{cache}", with_mtp)
        break_even = planner.sharded_cache_break_even(model, cache)
        run.metric(f"{name}.dp_attention.break_even_tokens.{cache}", break_even)


def _ranks(model: ModelConfig, config: ConfigDict, layout: Layout, run: record.Recorder) -> list[Bar]:
    """Bytes of a rank and tokens per GPU of every weight and cache format; what does not fit is absent."""
    bars = []
    mark = ".dp_attention" if layout.data_parallel_attention else ""
    for label in _labels(model, config):
        rank = planner.checkpoint_rank_bytes(model, label, layout)
        run.metric(f"{model.name}.{label}{mark}.bytes_per_rank", rank.total)
        for cache in config.caches:
            metric = f"{model.name}.{label}.{cache}{mark}.tokens_per_gpu"
            try:
                tokens = planner.tokens_per_gpu(
                    model,
                    label,
                    cache,
                    layout,
                    memory_fraction=config.memory_fraction,
                    gpu_gib=config.gpu_mib / 1024,
                    page_size=config.page_size,
                )
            except ValueError as error:
                run.absent(metric, str(error))
                continue
            run.metric(metric, tokens)
            used = tokens * planner.kv_bytes_per_token(model, cache)
            title = f"{model.name} {label}, {cache} cache{', dp attention' if mark else ''}"
            bars.append(Bar(title, label, rank.split, rank.replicated, used, tokens))
    return bars


def _floors(model: ModelConfig, config: ConfigDict, run: record.Recorder) -> None:
    """Memory-bound decode floors of the formats that are served, in tokens/s of the whole deployment."""
    served: list[tuple[params.Weights, str]] = [("int4_group", "bf16"), ("int4_group", "fp8_flat")]
    if model.family == "glm":
        served = [("fp8_block", "fp8_656"), ("int4_group", "fp8_656")]
    for weights, cache in served:
        for rows in config.floor_rows:
            floor = planner.decode_floor(model, weights, cache, rows, config.floor_context, Layout(config.tp))
            metric = f"{model.name}.{weights}.{cache}.floor_tok_s.rows{rows}"
            run.metric(metric, rows / floor.seconds)


def _labels(model: ModelConfig, config: ConfigDict) -> list[str]:
    return [label for label in config.weights if label in FORMATS[model.family]]


def memory_map(bars: list[Bar], budget_gib: float, gpu_gib: float) -> bytes:
    """A PNG of one GPU's memory for each deployment: split weights, whole weights, cache."""
    figure = Figure(figsize=(9, 1.0 + 0.28 * len(bars)))
    axes = figure.subplots()
    labels = [bar.label for bar in bars][::-1]
    left = [0.0] * len(bars)
    for part, color in (("split", "0.55"), ("replicated", "0.8"), ("cache", "tab:blue")):
        sizes = [getattr(bar, part) / GIB for bar in bars][::-1]
        names = {"split": "weights, split", "replicated": "weights, whole on every rank", "cache": "cache"}
        axes.barh(labels, sizes, left=left, color=color, label=names[part])
        left = [a + b for a, b in zip(left, sizes)]
    for at, bar in enumerate(bars[::-1]):
        ranks = " x ranks" if "dp attention" in bar.label else ""
        axes.annotate(f" {bar.tokens / 1e6:.2f} M tokens{ranks}", (left[at], at), va="center", fontsize=7)
    axes.axvline(budget_gib, color="tab:red", linewidth=1, label=f"budget {budget_gib:.1f} GiB")
    axes.axvline(gpu_gib, color="black", linewidth=1, label=f"GPU {gpu_gib:.2f} GiB")
    axes.set_xlabel("GiB per GPU", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=5)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None})
    return out.getvalue()


if __name__ == "__main__":
    launch.run(main)
