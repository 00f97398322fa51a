"""The engine over a mesh: the whole step is one SPMD program, and all ranks drop the same row."""

import dataclasses

import jax
import numpy as np
import pytest

from kvmem import models
from kvmem.engine.engine import Engine
from kvmem.models import params, sharded
from kvmem.sharding.mesh import make_mesh
from tests.engine.conftest import SMALL, some_requests

TP = 2


@pytest.fixture(scope="module")
def engines():
    config = models.get_config("kimi_tiny_tp8")
    specs = params.param_specs(config, "f32")
    whole = params.init_params(config, "f32", 3)
    mesh = make_mesh(TP)
    placed = sharded.place_params(whole, specs, mesh)
    split = sharded.partition_specs(specs, TP)
    single = Engine(config, {"prefill": whole, "decode": whole}, SMALL)
    meshed = Engine(
        config,
        {"prefill": placed, "decode": placed},
        SMALL,
        mesh,
        param_specs={"prefill": split, "decode": split},
    )
    return single, meshed


def on_one_rank(array: jax.Array, rank: int, changed: np.ndarray) -> jax.Array:
    """A replicated array whose copy on one rank is another."""
    copies = [
        jax.device_put(changed if i == rank else np.asarray(array), shard.device)
        for i, shard in enumerate(array.addressable_shards)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)


def test_mesh_engine_equals_single_device_and_ranks_agree_on_a_fault(engines):
    single, meshed = engines
    requests = [dataclasses.replace(r, max_new_tokens=9) for r in some_requests(4, seed=20)]
    expected = {r.request_id: r.tokens for r in single.run(requests)}
    # Sums over ranks round differently: the tokens agree because no two best logits are that close here.
    assert {r.request_id: r.tokens for r in meshed.run(requests)} == expected

    for request in requests:
        meshed.submit(dataclasses.replace(request, arrival_s=meshed.now()))
    while any(meshed.row_of(r.request_id)[0] != "decode" for r in requests[:2]):
        meshed.step()
    victim = meshed.row_of("q1")[1]

    def fault(state):
        table_BM = np.asarray(state.pages.table_BM).copy()
        table_BM[victim, 0] = 26
        table_BM = on_one_rank(state.pages.table_BM, 1, table_BM)
        return dataclasses.replace(state, pages=dataclasses.replace(state.pages, table_BM=table_BM))

    meshed.inject(fault)
    results = {}
    while not meshed.idle:
        results |= {e.request_id: e.result for e in meshed.step() if e.result is not None}
    assert results.pop("q1").finish_reason == "integrity"
    assert {name: r.tokens for name, r in results.items()} == {k: v for k, v in expected.items() if k != "q1"}
    copies = [np.asarray(shard.data) for shard in meshed.state("decode").cause_B.addressable_shards]
    assert len(copies) == TP
    np.testing.assert_array_equal(copies[0], copies[1])
