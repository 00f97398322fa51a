"""What the parts share: findings on disk, compilation in threads, timing, mid-size models."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from experiments import bench_timing
from kvmem import record
from kvmem.models import get_config, sharded
from kvmem.models import params as model_params
from kvmem.models.config import ModelConfig
from kvmem.sharding.mesh import AXIS

WHOLE, SPLIT = PartitionSpec(), PartitionSpec(AXIS)
ON_CPU = "needs GPUs: these are fake CPU devices"


class Findings:
    """What one part reports, on disk after every line, and its turn on the devices."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._waited_s = 0.0
        self.metrics: dict[str, record.Number] = {}
        self.absent: dict[str, str] = {}
        self.notes: dict[str, Any] = {
            "devices": [str(d) for d in jax.devices()],
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }
        self._write()

    def metric(self, name: str, value: Any) -> None:
        """Reports one finite number."""
        self.metrics[name] = record.finite(name, value)
        print(name, self.metrics[name], flush=True)
        self._write()

    def missing(self, name: str, why: str) -> None:
        """Reports that a number could not be had."""
        self.absent[name] = why
        print(f"{name}: absent: {why}", flush=True)
        self._write()

    def note(self, name: str, value: Any) -> None:
        """Reports a fact that is no number."""
        self.notes[name] = value
        self._write()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the devices: parts that run at once compile together and run one after the other."""
        asked = time.monotonic()
        with (self._path.parent / "turn.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._waited_s += time.monotonic() - asked
            self.note("waited_s", round(self._waited_s, 1))
            yield

    def _write(self) -> None:
        found = {"metrics": self.metrics, "absent": self.absent, "notes": self.notes}
        record.write_atomic(self._path, record.dumps(found))


def on_gpu() -> bool:
    """Whether the devices are real."""
    return jax.devices()[0].platform == "gpu"


_GRAPH = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
# Compiler options of variants, by name; several are joined by "+".
_OPTIONS: dict[str, dict[str, Any]] = {
    # Collectives in CUDA graphs; loops and branches too.
    "graph": {"xla_gpu_enable_command_buffer": f"{_GRAPH},COLLECTIVES"},
    "whole": {"xla_gpu_enable_command_buffer": f"{_GRAPH},COLLECTIVES,WHILE,CONDITIONAL"},
    # Matrix products as XLA chooses by itself, which the step's own options forbid.
    "triton": {"xla_gpu_enable_triton_gemm": True, "xla_gpu_dot_merger_threshold_mb": 32},
    "oneshot": {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True},
}


def options(names: str) -> dict[str, Any]:
    """Compiler options by their name, or by several joined by "+"; none for ""."""
    return {key: value for name in filter(None, names.split("+")) for key, value in _OPTIONS[name].items()}


def compile_all(
    jobs: Mapping[Any, tuple[Any, tuple]], settings: Mapping[Any, dict[str, Any]] | None = None
) -> dict[Any, Any]:
    """Compiles ``name -> (jitted function, its arguments)``: tracing in turn, XLA in threads beside it.

    ``settings`` are compiler options by name; jobs of one function are traced once. A job that fails has its
    exception as its value.
    """

    def attempt(work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except Exception as error:  # one job of many: reported by whoever wants it
            return error

    lowered: dict[int, Any] = {}
    done: dict[Any, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for name, (function, args) in jobs.items():
            if id(function) not in lowered:
                lowered[id(function)] = attempt(function.lower, *args)
            item = lowered[id(function)]
            compiles = hasattr(item, "compile")
            done[name] = pool.submit(attempt, item.compile, (settings or {}).get(name)) if compiles else item
    return {
        name: value.result() if isinstance(value, concurrent.futures.Future) else value
        for name, value in done.items()
    }


def seconds(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median and spread (largest minus smallest) of the seconds of ``run``, after one that is not counted."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - started)
    return statistics.median(taken), max(taken) - min(taken)


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the profiler saw of a program that makes ``calls`` calls, on the GPUs' own clocks.

    Attributes:
      us: of a call, from the start of the first kernel to the end of the last, median over runs and GPUs.
      kernel_us: mean duration of a kernel that was asked for.
      launches: kernels and copies a call.
      busy_us: sum of the durations of all of them a call.
      kernels: mean microseconds a call of each kernel, by name, the longest first.
    """

    us: float
    kernel_us: float
    launches: float
    busy_us: float
    kernels: dict[str, float]


def profile(run: Callable[[], Any], calls: int, name: str = "", runs: int = 3) -> Profile:
    """Profiles a compiled program; the span is of the kernels whose names hold ``name``, if any do.

    XLA launches kernels one by one while it is profiled, unless the program was compiled with
    ``xla_enable_command_buffers_during_profiling``.
    """
    jax.block_until_ready(run())
    spans, lengths, total = [], [], 0
    kernels: dict[str, float] = {}
    devices = bench_timing.traces(run, runs)
    for found in devices.values():
        events = sorted(found, key=lambda event: event[1])
        named = [event for event in events if name in event[0]] or events
        spans += [
            (max(e[2] for e in one) - one[0][1]) / calls / 1e3 for one in bench_timing.split(named, runs)
        ]
        lengths += [(end - start) / 1e3 for _, start, end in named]
        total += len(events)
        for kernel, start, end in events:
            kernels[kernel] = kernels.get(kernel, 0.0) + (end - start) / 1e3
    if not spans:
        raise RuntimeError("the profiler saw no kernel")
    share = calls * runs * len(devices)
    longest = sorted(kernels.items(), key=lambda item: -item[1])
    return Profile(
        us=statistics.median(spans),
        kernel_us=statistics.fmean(lengths),
        launches=total / share,
        busy_us=sum(kernels.values()) / share,
        kernels={kernel[:80]: round(us / share, 3) for kernel, us in longest},
    )


def mapped(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any = WHOLE) -> Any:
    """``function`` on every rank, jitted."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def midsize(c: Mapping[str, Any]) -> ModelConfig:
    """The model with its real widths, and few layers and experts; all of them where ``c["layers"]`` is 0."""
    base = dataclasses.replace(get_config(c["model"]), vision=None)
    if not c["layers"]:
        return base
    return dataclasses.replace(base, num_layers=c["layers"], num_dense_layers=1, num_experts=c["experts"])


def int4_specs(model: ModelConfig) -> model_params.Specs:
    """Parameters with INT4 experts, without the MTP layer."""
    specs = model_params.param_specs(model, "int4_group")
    specs.pop("mtp", None)
    return specs


def fill_params(specs: model_params.Specs, mesh: Mesh | None, seed: int, out: Findings) -> Any:
    """INT4 parameters of plausible size, made on the devices from a hash of each position."""
    flat, tree = jax.tree.flatten(sharded.abstract_params(specs, mesh))

    def one(i: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        position = lax.iota(jnp.uint32, int(np.prod(leaf.shape))).reshape(leaf.shape)
        mixed = (position ^ (position >> 15)) * jnp.uint32(2654435761) + jnp.uint32(seed * 977 + i)
        if leaf.dtype == jnp.int4:
            # -7 to 7: with a mean, every token would be pushed the same way, to the same few experts.
            return (((mixed >> 16) * 15 >> 16).astype(jnp.int8) - jnp.int8(7)).astype(jnp.int4)
        unit = (mixed >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - 1.0  # in [-1, 1)
        if len(leaf.shape) < 2 or leaf.shape[-1] < 2:
            return (1.0 + 0.1 * unit).astype(leaf.dtype)
        return (unit * jnp.float32((3.0 / leaf.shape[-1]) ** 0.5)).astype(leaf.dtype)

    def everything() -> list[jax.Array]:
        return [one(i, leaf) for i, leaf in enumerate(flat)]

    shardings = [leaf.sharding for leaf in flat] if mesh is not None else None
    program = jax.jit(everything, out_shardings=shardings).lower().compile()
    with out.turn():
        return jax.tree.unflatten(tree, jax.block_until_ready(program()))
