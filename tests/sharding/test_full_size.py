"""One full-size step of each model compiled for eight H200s without a GPU: arguments, temporaries, copies."""

import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kvmem import planner
from kvmem.cache import store
from kvmem.models import decoder, get_config, params, sharded
from tests.kernels import harness

pytestmark = pytest.mark.slow
ROWS, COLUMNS, PAGE_SIZE = 64, 128, 64
# Temporaries allowed, in bytes. XLA: one layer's dequantised experts. Kernel: the rows' gathered cache, of
# 64 x 8,192 x 576 in bf16 0.6 GB. Either way far below a pool or a weight stack.
CASES = {
    "kimi_decode_xla": ("kimi_k2.6", "fp8_576", "fp8_flat", "xla", 12e9),
    "glm_decode_xla": ("glm_5.2", "fp8_656", "fp8_656", "xla", 12e9),
    "kimi_decode_kernels": ("kimi_k2.6", "fp8_576", "fp8_flat", "mosaic", 0.2e9),
    "kimi_decode_experts_kernel": ("kimi_k2.6", "fp8_576", "fp8_flat", "mosaic_experts", 1e9),
}


def arguments(name, weights, layout, rows, steps, pages, mesh):
    """Abstract arguments of a sharded step: parameters without the MTP layer, cache, batch."""
    config = get_config(name)
    specs = params.param_specs(config, weights)
    specs.pop("mtp", None)
    whole = NamedSharding(mesh, PartitionSpec())

    def on_mesh(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

    kv = jax.eval_shape(
        lambda: store.init(
            decoder.cache_shape(config), layout, "index_132", num_pages=pages, page_size=PAGE_SIZE
        )
    )
    ints = [(rows, steps), (rows,), (rows,), (rows, COLUMNS)]
    batch = decoder.StepBatch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ints))
    kv, batch = jax.tree.map(on_mesh, (kv, batch))
    return config, specs, (sharded.abstract_params(specs, mesh), kv, batch)


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs the aot extra: jax-cuda13-plugin, ptxas",
)
@pytest.mark.parametrize(
    ("name", "layout", "cache", "implementation", "most_temporaries"), CASES.values(), ids=list(CASES)
)
def test_full_size_decode_arguments_equal_planner(
    name, layout, cache, implementation, most_temporaries, capsys
):
    weights, steps = "int4_group", 1
    mesh = harness._h200_mesh(8)
    config = get_config(name)
    tokens = planner.tokens_per_gpu(config, "int4_g32", cache, memory_fraction=0.7)
    pages = tokens // PAGE_SIZE + 1
    config, specs, args = arguments(name, weights, layout, ROWS, steps, pages, mesh)
    with jax.set_mesh(mesh):
        step = sharded.sharded_forward(config, specs, mesh, implementation=implementation)
        compiled = step.trace(*args).lower(lowering_platforms=("cuda",)).compile()
    memory = compiled.memory_analysis()
    weight_bytes = planner.device_rank_bytes(config, weights, mtp=False).total
    scale_bytes = 4 * config.num_layers if layout == "fp8_576" else 0
    pool = pages * PAGE_SIZE * planner.kv_bytes_per_token(config, cache) + scale_bytes + 2 * 4  # two counters
    batch = 4 * ROWS * (steps + 1 + 1 + COLUMNS)
    assert memory.argument_size_in_bytes == weight_bytes + pool + batch
    # The cache is updated in place; what else comes out are the logits.
    assert memory.alias_size_in_bytes == pool
    assert memory.output_size_in_bytes - pool == pytest.approx(4 * ROWS * config.vocab_size, abs=4096)
    assert memory.temp_size_in_bytes < most_temporaries
    reduces = compiled.as_text().count(" all-reduce(") + compiled.as_text().count(" all-reduce-start(")
    bodies = sum(len(loop.body) for loop in decoder.schedule(config))
    assert reduces == 1 + 2 * bodies
    with capsys.disabled():
        sizes = {"weights": weight_bytes, "pool": pool, "temporaries": memory.temp_size_in_bytes}
        gib = {key: round(value / 2**30, 2) for key, value in sizes.items()}
        print(f"\n{name} {implementation}: {json.dumps(gib)} GiB a rank")


def test_cuda12_extra_resolves_and_the_step_lowers():
    wanted = f"jax[cuda12]=={jax.__version__}"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run([*command, "--report", "-", wanted], capture_output=True, text=True, timeout=400)
    if "ConnectionError" in done.stderr or "No matching distribution" in done.stderr:
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr
    names = {item["metadata"]["name"].replace("_", "-") for item in json.loads(done.stdout)["install"]}
    assert {"jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cublas-cu12"} <= names
    mesh = jax.sharding.Mesh(jax.devices()[:8], ("tp",))
    config, specs, args = arguments("kimi_k2.6", "int4_group", "fp8_576", ROWS, 1, 100, mesh)
    lowered = sharded.sharded_forward(config, specs, mesh).trace(*args).lower(lowering_platforms=("cuda",))
    assert "stablehlo.all_reduce" in lowered.as_text()
