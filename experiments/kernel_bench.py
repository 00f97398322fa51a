"""Kernels on one GPU, measured beside rivals and floors. See configs/kernel_bench.py.

A part that fails does not stop the others: its numbers are absent, and the record says why and is "failed".
"""

from __future__ import annotations

import functools
import itertools
import os
import time
import traceback
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments import bench_timing, launch
from kvmem import record

_START = time.monotonic()


def _late(config: ConfigDict, part: str) -> bool:
    return time.monotonic() - _START > config.deadline_s[part]


def _copy(config: ConfigDict, recorder: record.Recorder) -> None:
    """``copy.gbps``: bytes read and written by a device-to-device copy."""
    x = jnp.arange(config.copy_bytes // 4, dtype=jnp.float32)
    increment = jax.jit(lambda x: x + 1.0)
    timing = bench_timing.measure(lambda: increment(x), 1)
    recorder.metric("copy.gbps", 2 * x.nbytes / timing.us / 1e3)
    print(f"copy: {recorder.metrics['copy.gbps']:.0f} GB/s read and written", flush=True)


def _mla(layouts: tuple[str, ...], part: str, config: ConfigDict, recorder: record.Recorder) -> None:
    from experiments import bench_mla

    jobs = []
    for layout in layouts:
        jobs += [bench_mla.Job(layout, *shape) for shape in (*config.mla_shapes, *config.mla_wide_shapes)]
        for variant in config.mla_variants if layout == "fp8_flat" else ():
            tiles = tuple(zip(variant[::2], variant[1::2], strict=True))
            jobs.append(bench_mla.Job(layout, 8, 64, 8192, tiles))
    late = functools.partial(_late, config, part)
    bench_mla.run(jobs, recorder, pages=config.pool_pages, seed=config.seed, late=late)


def _moe(config: ConfigDict, recorder: record.Recorder) -> None:
    from experiments import bench_moe

    for group in config.moe_groups:
        for model in config.moe_models:
            tokens = config.moe_tokens if group == 32 else config.moe_tokens[:5]
            if _late(config, "moe"):
                recorder.absent(f"int4_moe.{model}.g{group}", "the run's deadline")
                continue
            bench_moe.run(model, group, tokens, recorder, config.seed)


def _layer(config: ConfigDict, recorder: record.Recorder) -> None:
    from experiments import bench_layer

    pairs = [config.layer_batches[i : i + 2] for i in range(0, len(config.layer_batches), 2)]
    for batches, fmt, model in itertools.product(pairs, config.layer_formats, config.layer_models):
        if _late(config, "layer"):
            recorder.absent(f"layer.{model}.{fmt}.b{batches}", "the run's deadline")
            continue
        bench_layer.run(model, (fmt,), tuple(batches), recorder, seed=config.seed)


PARTS: dict[str, Callable[[ConfigDict, record.Recorder], None]] = {
    "mla": functools.partial(_mla, ("bf16", "fp8_flat"), "mla"),
    "moe": _moe,
    "layer": _layer,
    "mla_656": functools.partial(_mla, ("fp8_656",), "mla_656"),
}


def body(config: ConfigDict, recorder: record.Recorder) -> None:
    if jax.default_backend() != "gpu":
        raise NotImplementedError(
            f"backend {jax.default_backend()}: kernel_bench times Mosaic kernels on an H200"
        )
    recorder.seeds["inputs"] = config.seed
    recorder.weights = f"synthetic:{config.seed}"
    _copy(config, recorder)
    failed = []
    for part in config.parts:
        try:
            PARTS[part](config, recorder)
        except Exception as error:
            traceback.print_exc()
            recorder.absent(part, f"{type(error).__name__}: {error}"[:500])
            failed.append(part)
        recorder.write("interrupted")
    if failed:
        raise RuntimeError(f"parts that failed: {failed}; the record says why")


if __name__ == "__main__":
    launch.run(body)
