import dataclasses

import jax
import numpy as np
import pytest

from kvmem.checkpoint import hf, store
from kvmem.models import get_config, params
from kvmem.sharding import mesh, rules
from tests.checkpoint.conftest import CASES

RANKS = 8
LOADS = [("kimi_int4", "int4_group"), ("glm_fp8", "fp8_block"), ("glm_fp8", "int4_group")]


@pytest.mark.parametrize(("layout", "weights"), LOADS)
def test_load_over_eight_ranks_has_the_same_bits_in_the_declared_layout(checkpoints, layout, weights):
    tp = mesh.make_mesh(RANKS)
    config, whole, _ = hf.load(checkpoints[layout], weights, config=get_config(CASES[layout]))
    _, split, _ = hf.load(checkpoints[layout], weights, mesh=tp, config=config)
    split_somewhere = 0
    for path, spec in params.leaves(params.param_specs(config, weights)):
        a, b = whole, split
        for key in path:
            a, b = a[key], b[key]
        for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
            expected = jax.sharding.NamedSharding(tp, rules.partition(spec, RANKS))
            assert other.sharding.is_equivalent_to(expected, other.ndim)
            split_somewhere += other.addressable_shards[0].data.size * RANKS == other.size
    assert split_somewhere >= 8


def test_D5_load_group_larger_than_a_rank_holds_names_k_shards_and_group(checkpoints):
    config = dataclasses.replace(get_config("glm_tiny_tp8"), int4_group=64)
    with pytest.raises(ValueError, match=r"moe\.down: K=256 over 8 shards is 32 .* group of 64"):
        hf.load(checkpoints["glm_fp8"], "int4_group", mesh=mesh.make_mesh(RANKS), config=config)


def test_restore_onto_a_mesh_is_split_as_declared(checkpoints, tmp_path):
    config, whole, _ = hf.load(checkpoints["kimi_int4"], "int4_group", config=get_config("kimi_tiny_tp8"))
    store.save(tmp_path / "x", config, "int4_group", whole)
    _, _, split = store.restore(tmp_path / "x", mesh=mesh.make_mesh(RANKS))
    data = split["moe"]["down"].data
    assert data.addressable_shards[0].data.shape[-1] * RANKS == data.shape[-1]
    assert np.asarray(data).tobytes() == np.asarray(whole["moe"]["down"].data).tobytes()
