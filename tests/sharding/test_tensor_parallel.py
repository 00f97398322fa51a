"""One rank and eight ranks: the same tokens and logits, counted collectives, golden shardings."""

import collections
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kvmem.cache import store
from kvmem.models import decoder, get_config, layers, params, sharded
from kvmem.sharding import mesh
from tests.sharding import golden

# Storage that the ranks must cut at scale groups; activations are f32, so that only orders of sums differ.
CASES = [("kimi_tiny_tp8", "int4_group"), ("glm_tiny_tp8", "fp8_block")]
TOLERANCE = 2e-5  # of the largest logit: f32 sums over at most 512 terms and 8 layers, 3e-6 seen


def setup(name, weights, seed=4):
    config = get_config(name)
    specs = params.map_specs(_f32, params.param_specs(config, weights))
    tree = params.map_specs(_widen, specs, params.init_params(config, weights, seed))
    return config, specs, tree


def _f32(spec):
    return spec if spec.group else spec.__class__(**{**vars(spec), "dtype": "f32"})


def _widen(spec, leaf):
    return leaf if spec.group else leaf.astype(jnp.float32)


def steps(config, step, tree, place):
    """Three rows prefilled in chunks of 5, then greedy decode, in one compiled shape; logits of each step."""
    rows, chunk, pages, page_size = 3, 5, 7, 4
    table_BM = place(jnp.arange(rows * pages, 0, -1, dtype=jnp.int32).reshape(rows, pages))
    kv = place(
        store.init(decoder.cache_shape(config), "f32_576", num_pages=rows * pages + 1, page_size=page_size)
    )
    prompts = np.random.default_rng(9).integers(0, config.vocab_size, (rows, 15)).astype(np.int32)
    lengths, length, seen = np.array([15, 11, 13], np.int32), np.zeros(rows, np.int32), []
    for at in range(0, 30, chunk):
        tokens_BT = np.zeros((rows, chunk), np.int32)
        if at < 15:
            num_new = np.clip(lengths - at, 0, chunk)
            tokens_BT = prompts[:, at : at + chunk]
        else:
            num_new = np.ones(rows, np.int32)
            tokens_BT[:, 0] = seen[-1].argmax(-1)
        batch = decoder.StepBatch(*place(tuple(map(jnp.asarray, (tokens_BT, num_new, length)))), table_BM)
        logits_BW, kv = step(tree, kv, batch)
        seen.append(np.asarray(logits_BW))
        length = length + num_new
    return np.stack(seen)


@pytest.mark.parametrize(("name", "weights"), CASES, ids=["kimi", "glm"])
def test_D2_sharded_forward_eight_ranks_equal_one(name, weights):
    config, specs, tree = setup(name, weights)
    one = steps(config, jax.jit(lambda p, kv, b: decoder.forward(p, config, kv, b)), tree, lambda x: x)
    tp = mesh.make_mesh(8)
    whole = NamedSharding(tp, PartitionSpec())
    step = sharded.sharded_forward(config, specs, tp)
    eight = steps(config, step, sharded.place_params(tree, specs, tp), lambda x: jax.device_put(x, whole))
    assert np.abs(one - eight).max() < TOLERANCE * np.abs(one).max()
    np.testing.assert_array_equal(one.argmax(-1), eight.argmax(-1))
    # The same tree with two ranks' heads exchanged is another model: the comparison can fail.
    swapped = jax.tree.map(lambda x: x, tree)
    swapped["attention"]["w_uk"] = jnp.roll(tree["attention"]["w_uk"], 2, axis=1)
    other = steps(config, step, sharded.place_params(swapped, specs, tp), lambda x: jax.device_put(x, whole))
    assert np.abs(one - other).max() > 100 * TOLERANCE * np.abs(one).max()


def trace(config, specs, rows=2, new=3, pages=5, page_size=4, **options):
    """The jaxpr of one sharded step, from abstract values."""
    tp = mesh.make_mesh(8)
    kv = jax.eval_shape(
        lambda: store.init(
            decoder.cache_shape(config), "bf16_576", "index_132", num_pages=11, page_size=page_size
        )
    )
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    batch = decoder.StepBatch(ints(rows, new), ints(rows), ints(rows), ints(rows, pages))
    step = sharded.sharded_forward(config, specs, tp, **options)
    return step.trace(sharded.abstract_params(specs, tp), kv, batch).jaxpr


def count_collectives(jaxpr, times=1):
    """(scope, primitive) of each collective, times the trip counts of the loops around it."""
    found = collections.Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith(("psum", "all_gather", "all_to_all", "ppermute", "reduce_scatter")):
            found[str(eqn.source_info.name_stack).rsplit("/", 1)[-1]] += times
        inner = times * eqn.params.get("length", 1) if name == "scan" else times
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple) else (value,):
                if hasattr(sub, "jaxpr"):
                    sub = sub.jaxpr
                if hasattr(sub, "eqns"):
                    found += count_collectives(sub, inner)
    return found


@pytest.mark.parametrize(
    ("name", "weights"), [*CASES, ("kimi_k2.6", "int4_group"), ("glm_5.2", "int4_group")]
)
def test_sharded_forward_runs_exactly_the_declared_collectives(name, weights):
    config = get_config(name)
    found = count_collectives(trace(config, params.param_specs(config, weights)))
    assert found == decoder.collectives(config)
    assert found["attention_sum"] + found["mlp_sum"] == 2 * config.num_layers


def test_sharded_forward_missing_reduction_is_refused_at_trace_time(monkeypatch):
    config = get_config("kimi_tiny_tp8")
    monkeypatch.setattr(layers, "reduce_sum", lambda x, axis: x)
    with pytest.raises(ValueError, match=r"tp"):
        trace(config, params.param_specs(config, "int4_group"))


@pytest.mark.parametrize(("reduction", "kernel"), [("mosaic", "_sum_body"), ("mosaic_norm", "_norm_body")])
def test_sharded_forward_by_the_kernel_replaces_the_sums_of_the_layers(reduction, kernel):
    tiny = get_config("kimi_tiny_tp8")
    config = tiny.__class__(**{**vars(tiny), "hidden_size": 1024})
    specs = params.param_specs(config, "int4_group")
    jaxpr = trace(config, specs, rows=4, new=1, reduction=reduction)
    found = count_collectives(jaxpr)
    assert found == {"embedding_sum": 1, "logits_gather": 1}
    names = re.findall(r"name=(all_reduce_open|_sum_body|_norm_body)\b", str(jaxpr))
    # Two sums in the dense layer, two in the loop; one opening for all of them.
    assert sorted(names) == [*[kernel] * 4, "all_reduce_open"]
    with pytest.raises(NotImplementedError, match=r"must be a multiple of (512|1024)"):
        trace(tiny, params.param_specs(tiny, "int4_group"), rows=2, new=1, reduction=reduction)


def decode_logits(reduction):
    """Logits of one decode step of two rows of a tiny Kimi in f32, all norms different, on two ranks."""
    config, specs, tree = setup("kimi_tiny_tp8", "int4_group")
    tp = mesh.make_mesh(2)
    for at, (of, name) in enumerate(
        [(tree["attention"], "input_norm"), (tree["attention"], "post_norm"), (tree, "final_norm")]
    ):
        noise = jax.random.normal(jax.random.key(at), of[name].shape, of[name].dtype)
        of[name] += noise / 2
    kv = store.init(decoder.cache_shape(config), "f32_576", num_pages=5, page_size=4)
    table_BM = jnp.arange(1, 5, dtype=jnp.int32).reshape(2, 2)
    one_B = jnp.ones(2, jnp.int32)
    whole = NamedSharding(tp, PartitionSpec())
    kv, batch = jax.device_put((kv, decoder.StepBatch(one_B[:, None] * 7, one_B, one_B * 0, table_BM)), whole)
    args = sharded.place_params(tree, specs, tp), kv, batch
    step = sharded.sharded_forward(config, specs, tp, reduction=reduction)
    compiled = step.lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})
    return np.asarray(compiled(*args)[0])


def test_sharded_forward_fused_norm_gives_the_same_logits(monkeypatch):
    # The kernel needs GPUs; what it computes stands in for it, so this shows which norm follows which sum.
    def fused(part_TD, hidden_TD, norm_YD, layer, axis, *, epsilon, workspace, off=0):
        assert workspace == "opened"
        hidden_TD = hidden_TD + jax.lax.psum(part_TD, axis).astype(hidden_TD.dtype)
        return hidden_TD, layers.rmsnorm(hidden_TD, norm_YD[jnp.maximum(layer - off, 0)], epsilon)

    plain = decode_logits("nccl")
    monkeypatch.setattr(layers.allreduce, "open_workspace", lambda *_: "opened")
    monkeypatch.setattr(layers.allreduce, "all_reduce_add_norm", fused)
    assert np.abs(decode_logits("mosaic_norm") - plain).max() < TOLERANCE * np.abs(plain).max()
    monkeypatch.setattr(layers.allreduce, "all_reduce_add_norm", functools.partial(fused, off=1))
    assert np.abs(decode_logits("mosaic_norm") - plain).max() > 0.1 * np.abs(plain).max()


@pytest.mark.parametrize(("name", "weights"), golden.CASES)
def test_partition_specs_equal_golden(name, weights):
    assert golden.table(name, weights) == json.loads(golden.path(name, weights).read_text())


def test_partition_specs_group_not_dividing_shard_names_parameter():
    config = get_config("kimi_tiny_tp8")
    specs = params.param_specs(config.__class__(**{**vars(config), "int4_group": 64}), "int4_group")
    message = r"moe.down: K=256 over 8 shards is 32 a rank, which the int4_group group of 64 does not divide"
    with pytest.raises(ValueError, match=message):
        sharded.partition_specs(specs, 8)


def test_partition_specs_heads_not_dividing_raises():
    specs = params.param_specs(get_config("glm_tiny_parity"), "bf16")
    with pytest.raises(ValueError, match=r"does not divide over 8 shards"):
        sharded.partition_specs(specs, 8)


def test_abstract_params_match_initialised_params():
    config = get_config("glm_tiny_tp8")
    abstract = sharded.abstract_params(params.param_specs(config, "fp8_block"))
    concrete = params.init_params(config, "fp8_block", seed=2)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), concrete)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == shapes


def test_rank_bytes_equal_placed_arrays():
    config = get_config("kimi_tiny_tp8")
    specs = params.param_specs(config, "int4_group")
    placed = sharded.place_params(params.init_params(config, "int4_group", seed=2), specs, mesh.make_mesh(8))
    held = 0
    for leaf in jax.tree.leaves(placed):
        shard = leaf.addressable_shards[3].data
        held += shard.size // 2 if leaf.dtype == jnp.int4 else shard.nbytes
    sizes = sharded.rank_bytes(specs, 8)
    assert sum(sizes["split"].values()) + sum(sizes["replicated"].values()) == held
    assert "attention.kv_a" in sizes["replicated"]
    assert "moe.down" in sizes["split"]
