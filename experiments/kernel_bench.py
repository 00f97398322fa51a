"""Kernels on one GPU, measured beside rivals and floors. See configs/kernel_bench.py.

The contracts of all operations come first, on this GPU; what breaks its contract is not timed. A part that
fails does not stop the others: its numbers are absent, and the record says why and is "failed".
"""

from __future__ import annotations

import functools
import itertools
import os
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments import bench_timing, launch
from kvmem import record

_START = time.monotonic()


def _late(config: ConfigDict, part: str) -> bool:
    return time.monotonic() - _START > config.deadline_s[part]


def _contract(operations: set[str], recorder: record.Recorder) -> set[str]:
    """Reruns the contracts on this GPU; returns the operations that broke theirs."""
    from experiments import bench_contract

    broken = bench_contract.run(recorder, operations)
    recorder.write("interrupted")
    print(f"contracts took until {time.monotonic() - _START:.0f} s; broken: {sorted(broken)}", flush=True)
    return broken


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
        for heads, rows, mean in config.mla_ragged_shapes:
            jobs.append(bench_mla.Job(layout, heads, rows, mean, ragged=True))
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
            loads = config.moe_loads if group == 32 else ()
            deadline = _START + config.deadline_s["moe"]
            bench_moe.run(model, group, tokens, recorder, config.seed, loads=loads, deadline=deadline)


def _layer(config: ConfigDict, recorder: record.Recorder) -> None:
    from experiments import bench_layer

    deadline = _START + config.deadline_s["layer"]
    failures = []
    for model, fmt in itertools.product(config.layer_models, config.layer_formats):
        batches = tuple(config.layer_batches)
        try:
            bench_layer.run(model, (fmt,), batches, recorder, deadline=deadline, seed=config.seed)
        except RuntimeError as error:
            failures.append(str(error))
        print(f"layer {model} {fmt}: until {time.monotonic() - _START:.0f} s", flush=True)
    if failures:
        raise RuntimeError("; ".join(failures))


class Part(NamedTuple):
    """What a part measures, and the operations whose contract has to hold for it to be worth measuring.

    ``also``: further operations whose contract is rerun; each of their measurements checks its own result.
    """

    run: Callable[[ConfigDict, record.Recorder], None]
    operations: tuple[str, ...]
    also: tuple[str, ...] = ()


PARTS = {
    "layer": Part(_layer, ("mla_prologue", "skinny_matmul", "mla_decode", "router", "int4_moe")),
    "mla": Part(functools.partial(_mla, ("bf16", "fp8_flat"), "mla"), ("mla_decode",), ("mla_decode_wide",)),
    "moe": Part(_moe, ("router", "int4_moe")),
    "mla_656": Part(functools.partial(_mla, ("fp8_656",), "mla_656"), ("mla_decode",), ("mla_decode_wide",)),
}


def body(config: ConfigDict, recorder: record.Recorder) -> None:
    if jax.default_backend() != "gpu":
        raise NotImplementedError(
            f"backend {jax.default_backend()}: kernel_bench times Mosaic kernels on an H200"
        )
    recorder.seeds["inputs"] = config.seed
    recorder.weights = f"synthetic:{config.seed}"
    needed = {operation for part in config.parts for operation in PARTS[part].operations + PARTS[part].also}
    broken = _contract(needed, recorder)
    _copy(config, recorder)
    failed = ["contract"] * bool(broken)
    for part in config.parts:
        try:
            if wrong := broken.intersection(PARTS[part].operations):
                raise RuntimeError(f"the contract does not hold for {sorted(wrong)}")
            PARTS[part].run(config, recorder)
        except Exception as error:
            traceback.print_exc()
            recorder.absent(part, f"{type(error).__name__}: {error}"[:500])
            failed.append(part)
        recorder.write("interrupted")
    if failed:
        raise RuntimeError(f"parts that failed: {failed}; the record says why")


if __name__ == "__main__":
    launch.run(body)
