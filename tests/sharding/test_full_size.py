"""One full-size step of each model compiled for eight H200s without a GPU: arguments, temporaries, copies.

Also the mid-size decode step that several GPUs run, in each variant: what runs on two is compiled for eight.
"""

import collections
import importlib.util
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import multi_gpu
from experiments.multi_gpu_parts import common, midsize
from kvmem import planner
from kvmem.cache import store
from kvmem.engine import step as engine_step
from kvmem.models import decoder, get_config, params, sharded
from kvmem.sharding.mesh import AXIS
from tests.kernels import harness

pytestmark = pytest.mark.slow
ROWS, COLUMNS, PAGE_SIZE = 64, 128, 64
# Temporaries allowed, in bytes. XLA: one layer's dequantised experts. Kernel: the rows' gathered cache, of
# 64 x 8,192 x 576 in bf16 0.6 GB. Either way far below a pool or a weight stack.
CASES = {
    "kimi_decode_xla": ("kimi_k2.6", "fp8_576", "fp8_flat", "xla", "nccl", 12e9),
    "glm_decode_xla": ("glm_5.2", "fp8_656", "fp8_656", "xla", "nccl", 12e9),
    "kimi_decode_kernels": ("kimi_k2.6", "fp8_576", "fp8_flat", "mosaic", "nccl", 0.2e9),
    "kimi_decode_experts_kernel": ("kimi_k2.6", "fp8_576", "fp8_flat", "mosaic_experts", "nccl", 1e9),
    "kimi_decode_one_shot": ("kimi_k2.6", "fp8_576", "fp8_flat", "mosaic", "mosaic", 0.3e9),
    "kimi_decode_fused_norm": ("kimi_k2.6", "fp8_576", "fp8_flat", "mosaic", "mosaic_norm", 0.3e9),
    "glm_decode_fused_norm": ("glm_5.2", "fp8_656", "fp8_656", "mosaic_experts", "mosaic_norm", 12e9),
}
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs the aot extra: jax-cuda13-plugin, ptxas",
)


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


def assert_slots_stay(hlo, ranks, rows, width):
    """Asserts that nothing but a kernel makes the all-reduce's slots again after their zeros.

    A copy of them, or a fusion that holds a kernel and them, would leave the peers storing into the old ones.
    """
    dims = f"s32[2,{ranks},{rows},{width}]"
    made = [line for line in hlo.splitlines() if dims in line.partition("=")[2].partition("(%")[0]]
    makers = [re.search(r"[)}] ([\w-]+)\(", line) for line in made]
    ops = collections.Counter(maker.group(1) for maker in makers if maker)
    assert ops["custom-call"] > 1
    assert not set(ops) - {
        "parameter",
        "get-tuple-element",
        "custom-call",
        "while",
        "tuple",
        "broadcast",
        "fusion",
    }
    assert ops["fusion"] <= 1  # the zeros
    assert not any("kind=kCustom" in line for line in made)


@needs_cuda
@pytest.mark.parametrize(
    ("name", "layout", "cache", "implementation", "reduction", "most_temporaries"),
    CASES.values(),
    ids=list(CASES),
)
def test_full_size_decode_arguments_equal_planner(
    name, layout, cache, implementation, reduction, most_temporaries, capsys
):
    weights, steps = "int4_group", 1
    mesh = harness._h200_mesh(8)
    config = get_config(name)
    tokens = planner.tokens_per_gpu(config, "int4_g32", cache, memory_fraction=0.7)
    pages = tokens // PAGE_SIZE + 1
    config, specs, args = arguments(name, weights, layout, ROWS, steps, pages, mesh)
    with jax.set_mesh(mesh):
        step = sharded.sharded_forward(
            config, specs, mesh, implementation=implementation, reduction=reduction
        )
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
    hlo = compiled.as_text()
    reduces = hlo.count(" all-reduce(") + hlo.count(" all-reduce-start(")
    bodies = sum(len(loop.body) for loop in decoder.schedule(config))
    assert reduces == 1 + (2 * bodies if reduction == "nccl" else 0)
    if reduction == "mosaic_norm":
        assert_slots_stay(hlo, 8, ROWS, 2 * config.hidden_size)
    with capsys.disabled():
        sizes = {"weights": weight_bytes, "pool": pool, "temporaries": memory.temp_size_in_bytes}
        gib = {key: round(value / 2**30, 2) for key, value in sizes.items()}
        print(f"\n{name} {implementation} {reduction}: {json.dumps(gib)} GiB a rank")


def _steps_of_eight():
    """(part, implementation, reduction, options) of every step program that eight GPUs would run."""
    config = multi_gpu.get_config("eight")
    return [
        (part, *variant) for part in ("step", "full_kimi", "full_glm") for variant in config[part].variants
    ]


@needs_cuda
@pytest.mark.parametrize(
    ("part", "implementation", "reduction", "options"),
    _steps_of_eight(),
    ids=["-".join(filter(None, case)) for case in _steps_of_eight()],
)
def test_engine_step_compiles_for_eight(part, implementation, reduction, options):
    config = multi_gpu.get_config("eight").to_dict()
    settings, ranks = config[part], config["ranks"]
    rows = settings["rows"][-1]
    model, mesh = common.midsize(settings), harness._h200_mesh(ranks)
    specs = common.int4_specs(model)
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.eval_shape(lambda: midsize.filled(model, settings, rows))
    state, run_B = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        (state, jax.ShapeDtypeStruct((rows,), bool)),
    )
    plan = engine_step.StepConfig(
        model=model,
        rows=rows,
        columns=midsize.columns_of(settings),
        axis=AXIS,
        implementation=implementation,
        reduction=reduction,
    )
    decode = engine_step.compile_step("decode", plan, mesh, sharded.partition_specs(specs, ranks))
    with jax.set_mesh(mesh):
        lowered = decode.lower(sharded.abstract_params(specs, mesh), state, run_B)
        compiled = lowered.compile(compiler_options=common.options(options))
    memory = compiled.memory_analysis()
    pool = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.kv))
    assert memory.alias_size_in_bytes >= pool  # updated in place
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 130e9  # of a GPU's 150
    if reduction == "mosaic_norm":
        assert_slots_stay(compiled.as_text(), ranks, rows, 2 * model.hidden_size)


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
