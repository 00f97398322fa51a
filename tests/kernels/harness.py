"""Check Mosaic GPU kernels on a machine without a GPU, in three tiers.

- ``lower``: the whole Pallas -> MLIR lowering for sm_90. Catches shapes, dtypes, layouts, wgmma rules, shared
  memory. Needs only the CPU jaxlib.
- ``interpret``: runs the kernel on the CPU with barriers, copies and warpgroups simulated. Catches numerics,
  indexing and races (a missing commit, a copy over a buffer in use), but not a missing wait after a copy.
- ``compile_h200``: XLA and ptxas for sm_90a. Catches ptxas errors and register spills, and shows the
  optimised HLO (``assert_no_copy``). Needs the ``aot`` extra.

Only an H200 proves the numbers of the real path: ``experiments/kernel_bench.py`` reruns the contract there.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator

import jax
import jax.sharding
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

needs_ptxas = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs the aot extra: jax-cuda13-plugin and ptxas",
)

_ABSTRACT_H200 = jax.sharding.AbstractMesh(
    (),
    (),
    abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
)

_H200_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""


def _abstract(args) -> list:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), list(args))


def lower(function: Callable, *args):
    """Lowers ``function`` for CUDA; ``args`` are arrays or shape structs. Raises what the lowering raises."""
    with jax.sharding.use_abstract_mesh(_ABSTRACT_H200):
        return jax.jit(function).trace(*_abstract(args)).lower(lowering_platforms=("cuda",))


def interpret(function: Callable, *args):
    """Runs ``function`` with its kernels in the GPU interpreter; a race is an AssertionError."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as state

    try:
        with (
            jax.sharding.use_abstract_mesh(_ABSTRACT_H200),
            plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        ):
            out = jax.block_until_ready(jax.jit(function)(*args))
        races = state.get_races()
        assert not (races and races.races_found), "the race detector found a race"
        return out
    except BaseException:
        state.reset_gpu_interpret_mode_state()  # otherwise every later test of the process fails
        raise


@functools.cache
def _h200_mesh(devices: int) -> jax.sharding.Mesh:
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{devices}", target_config=_H200_TARGET
    )
    return topologies.make_mesh(topology, (devices,), ("tp",))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """``kernels``: each Mosaic kernel's (registers, spilled bytes). ``hlo``: the optimised HLO."""

    hlo: str
    kernels: tuple[tuple[int, int], ...]
    log: str

    @property
    def serialized(self) -> bool:
        """Whether ptxas gave up overlapping some wgmma (its notes C7510 to C7514)."""
        return "wgmma.mma_async instructions are serialized" in self.log

    @property
    def spills(self) -> int:
        return sum(spilled for _, spilled in self.kernels)


def compile_h200(function: Callable, *args, devices: int = 1, in_specs=None, donate=()) -> Compiled:
    """Compiles ``function`` for ``devices`` H200s; ``in_specs`` are PartitionSpecs over the axis "tp"."""
    mesh = _h200_mesh(devices)
    avals = _abstract(args)
    specs = in_specs or jax.tree.map(lambda _: jax.sharding.PartitionSpec(), avals)
    avals = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(mesh, s)),
        avals,
        specs,
    )
    with jax.set_mesh(mesh), _captured_stdout() as captured:
        compiled = jax.jit(function, donate_argnums=donate).lower(*avals).compile()
    log = captured[0]
    spills = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    kernels = tuple((int(r), int(s) + int(ld)) for r, (s, ld) in zip(registers, spills, strict=True))
    assert kernels, f"ptxas reported no kernel: {log[:2000]}"
    return Compiled(compiled.as_text(), kernels, log)


@contextlib.contextmanager
def _captured_stdout() -> Iterator[list[str]]:
    """What native code prints to file descriptor 1 (ptxas' report) while the block runs."""
    captured = [""]
    before = os.environ.get("MOSAIC_GPU_DUMP_PTXAS")
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 1)
        try:
            yield captured
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)
            sink.seek(0)
            captured[0] = sink.read().decode(errors="replace")
            if before is None:
                del os.environ["MOSAIC_GPU_DUMP_PTXAS"]
            else:
                os.environ["MOSAIC_GPU_DUMP_PTXAS"] = before


def assert_no_copy(hlo: str, shape: tuple[int, ...]) -> None:
    """Asserts that only a parameter, a bitcast or a tuple access of ``hlo`` makes an array of this shape.

    ``shape`` is that of a whole pool or weight stack: a copy, convert or fusion of it would dwarf the kernel.
    """
    dims = ",".join(map(str, shape))
    made = re.findall(rf"= \w+\[{re.escape(dims)}\]\S* ([\w-]+)\(", hlo)
    assert set(made) <= {"parameter", "bitcast", "get-tuple-element"}, (
        f"{dims} is made by {sorted(set(made))}"
    )
