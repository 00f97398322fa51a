"""The engine over meshes: a step is one SPMD program, all ranks drop the same row, and each phase may have
devices of its own.
"""

import dataclasses

import jax
import numpy as np
import pytest

from kvmem import models
from kvmem.cache import pages
from kvmem.engine import step
from kvmem.engine.engine import Engine
from kvmem.engine.request import PhaseFormat, Request
from kvmem.models import params, sharded
from kvmem.sharding.mesh import make_mesh
from tests.engine.conftest import FIXED, SMALL, some_requests

MODEL = "kimi_tiny_tp8"
# Both conversions happen: BF16 to FP8 with scales at the hand-over, and back where an answer is widened.
CONFIG = dataclasses.replace(
    SMALL,
    prefill=PhaseFormat("f32", "bf16_576"),
    decode=PhaseFormat("f32", "fp8_656"),
    integrity="tags_digest",
    reuse="widen",
)


@pytest.fixture(scope="module")
def make():
    """Builds an engine of the same weights over the meshes of its phases."""
    model = models.get_config(MODEL)
    specs = params.param_specs(model, "f32")
    whole = params.init_params(model, "f32", 3)

    def build(prefill=None, decode=None, config=CONFIG) -> Engine:
        meshes = {"prefill": prefill, "decode": decode}
        placed, split = {}, {}
        for phase, mesh in meshes.items():
            placed[phase] = whole if mesh is None else sharded.place_params(whole, specs, mesh)
            split[phase] = None if mesh is None else sharded.partition_specs(specs, mesh.size)
        return Engine(model, placed, config, meshes, param_specs=split)

    return build


@pytest.fixture(scope="module")
def single(make):
    return make()


@pytest.fixture(scope="module")
def apart(make):
    return make(make_mesh(2, jax.devices()[:2]), make_mesh(4, jax.devices()[2:6]))


def on_one_rank(array: jax.Array, rank: int, changed: np.ndarray) -> jax.Array:
    """A replicated array whose copy on one rank is another."""
    copies = [
        jax.device_put(changed if i == rank else np.asarray(array), shard.device)
        for i, shard in enumerate(array.addressable_shards)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)


def test_engine_with_a_mesh_per_phase_answers_as_on_one_device(single, apart):
    requests = [dataclasses.replace(r, request_id=f"a{i}") for i, r in enumerate(some_requests(7, seed=21))]
    expected = [r.tokens for r in single.run(requests)]
    assert [r.tokens for r in apart.run(requests)] == expected
    places = {pool: apart.state(pool).kv.values.devices() for pool in ("prefill", "decode")}
    assert (len(places["prefill"]), len(places["decode"])) == (2, 4)
    assert not places["prefill"] & places["decode"]
    assert apart.counters["transfers"] == len(requests)
    assert apart.counters["drift"] == apart.counters["integrity"] == len(apart.transfers) == 0
    for pool in ("prefill", "decode"):
        assert pages.violations(jax.device_get(apart.state(pool).pages)) == []
    assert apart.pools.counts("decode")["free"] == CONFIG.decode_pages - 1


def test_engine_with_a_mesh_per_phase_widens_answers_across_them(single, apart):
    turn = Request("first", tuple(range(30, 41)), 10, FIXED)
    answers = []
    for engine in (single, apart):
        (first,) = engine.run([turn])
        prompt = (*turn.prompt_tokens, *first.tokens, 7, 8)
        (second,) = engine.run([Request("second", prompt, 8, FIXED)])
        assert second.cached_tokens == 20  # 11 + 9 fed tokens: 5 whole pages, of which prefill made 2
        answers.append((first.tokens, second.tokens))
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (None, 2), (2, None)])
def test_engine_with_one_mesh_or_a_mesh_for_one_phase_answers_as_on_one_device(make, single, prefill, decode):
    engine = make(*(None if ranks is None else make_mesh(ranks) for ranks in (prefill, decode)))
    requests = [dataclasses.replace(r, request_id=f"b{i}") for i, r in enumerate(some_requests(5, seed=22))]
    assert [r.tokens for r in engine.run(requests)] == [r.tokens for r in single.run(requests)]
    assert engine.pools.apart == (prefill != decode)


def test_ranks_agree_on_a_fault_of_one_of_them(single, apart):
    requests = [dataclasses.replace(r, max_new_tokens=9) for r in some_requests(4, seed=20)]
    expected = {r.request_id: r.tokens for r in single.run(requests)}
    # Sums over ranks round differently: the tokens agree because no two best logits are that close here.
    assert {r.request_id: r.tokens for r in apart.run(requests)} == expected

    for request in requests:
        apart.submit(dataclasses.replace(request, arrival_s=apart.now()))
    while any(apart.row_of(r.request_id)[0] != "decode" for r in requests[:2]):
        apart.step()
    victim = apart.row_of("q1")[1]

    def fault(state):
        table_BM = np.asarray(state.pages.table_BM).copy()
        table_BM[victim, 0] = 26
        table_BM = on_one_rank(state.pages.table_BM, 1, table_BM)
        return dataclasses.replace(state, pages=dataclasses.replace(state.pages, table_BM=table_BM))

    apart.inject(fault)
    results = {}
    while not apart.idle:
        results |= {e.request_id: e.result for e in apart.step() if e.result is not None}
    assert results.pop("q1").finish_reason == "integrity"
    assert {name: r.tokens for name, r in results.items()} == {k: v for k, v in expected.items() if k != "q1"}
    copies = [np.asarray(shard.data) for shard in apart.state("decode").cause_B.addressable_shards]
    assert len(copies) == 4
    for copy in copies[1:]:
        np.testing.assert_array_equal(copies[0], copy)


def test_engine_meshes_of_one_phase_only_are_refused(make):
    model = models.get_config(MODEL)
    with pytest.raises(ValueError, match="one each is needed"):
        Engine(model, {}, CONFIG, {"prefill": None})
    with pytest.raises(ValueError, match="needs param_specs"):
        Engine(model, {}, CONFIG, {"prefill": make_mesh(2), "decode": None})


def test_engine_with_a_mesh_per_phase_in_several_processes_is_refused(make, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="a mesh for each phase in 2 processes"):
        make(make_mesh(2, jax.devices()[:2]), None)


@pytest.mark.parametrize(("phase", "platform", "ranks", "rows", "width", "expected"), [
    ("decode", "gpu", 2, 16, 7168, "mosaic"),  # as measured
    ("decode", "gpu", 2, 17, 7168, "nccl"),
    ("decode", "gpu", 8, 2, 7168, "mosaic"),  # seven peers, a seventh of the message
    ("decode", "gpu", 8, 3, 7168, "nccl"),
    ("decode", "gpu", 2, 3, 128, "nccl"),  # not whole warpgroups
    ("decode", "gpu", 1, 1, 7168, "nccl"),
    ("decode", "cpu", 2, 1, 7168, "nccl"),
    ("prefill", "gpu", 2, 1, 7168, "nccl"),
])  # fmt: skip
def test_fastest_reduction_is_the_kernel_up_to_what_was_measured(
    phase, platform, ranks, rows, width, expected
):
    assert step.fastest_reduction(phase, platform, ranks, rows, width) == expected


def test_engine_settles_on_a_reduction_for_each_step(make, monkeypatch):
    asked = []
    monkeypatch.setattr(step, "fastest_reduction", lambda *of: asked.append(of) or "nccl")
    width = models.get_config(MODEL).hidden_size
    pools = make(make_mesh(8), make_mesh(8)).pools
    assert pools.step_config("decode", 2, 3).reduction == "nccl"
    assert asked[-1] == ("decode", "cpu", 8, 2, width)
    pools = make(make_mesh(8), make_mesh(8), dataclasses.replace(CONFIG, batch_invariant=True)).pools
    pools.step_config("decode", 2, 3)
    assert asked[-1] == ("decode", "cpu", 1, 2, width)
    pools = make(make_mesh(8), make_mesh(8), dataclasses.replace(CONFIG, reduction="mosaic")).pools
    assert pools.step_config("prefill", 2, 3).reduction == "mosaic"
