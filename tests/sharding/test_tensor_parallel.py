"""One rank and eight ranks: the same tokens and logits, counted collectives, golden shardings."""

import collections
import json

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
def test_sharded_forward_eight_ranks_equal_one(name, weights):
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


def test_sharded_forward_by_the_kernel_replaces_the_sums_of_the_layers():
    tiny = get_config("kimi_tiny_tp8")
    config = tiny.__class__(**{**vars(tiny), "hidden_size": 512})
    specs = params.param_specs(config, "int4_group")
    jaxpr = trace(config, specs, rows=4, new=1, reduction="mosaic")
    found = count_collectives(jaxpr)
    assert found == {"embedding_sum": 1, "logits_gather": 1}
    assert str(jaxpr).count("skip_device_barrier=True") == 4  # two sums in the dense layer, two in the loop
    with pytest.raises(NotImplementedError, match=r"128 elements of float32: must be a multiple of 512"):
        trace(tiny, params.param_specs(tiny, "int4_group"), rows=2, new=1, reduction="mosaic")


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
