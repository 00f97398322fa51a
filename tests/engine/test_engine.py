"""The engine on a small Kimi in f32: answers, isolation, conservation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.cache import pages
from kvmem.engine import metrics, workload
from kvmem.engine.request import SamplingParams
from kvmem.engine.router import Cluster, Router, SideBySide
from tests.engine.conftest import SMALL, some_requests


def assert_conserved(engine) -> None:
    """No page is lost or owned twice, and the host's count is the device's."""
    for pool in ("prefill", "decode"):
        assert pages.violations(engine.state(pool).pages) == []
        counts = engine.pools.counts(pool)
        total = SMALL.prefill_pages if pool == "prefill" else SMALL.decode_pages
        assert sum(counts.values()) == total - 1
    assert engine.counters["drift"] == 0


def test_run_batched_requests_equals_each_alone(make_engine, solo):
    engine = make_engine()
    requests = some_requests(9)
    results = engine.run(requests)
    assert [r.tokens for r in results] == [solo(r) for r in requests]
    assert sum(r.cached_tokens for r in results) > 0
    assert_conserved(engine)
    assert engine.pools.counts("decode")["free"] == SMALL.decode_pages - 1


def test_run_without_overlap_gives_the_same_tokens(make_engine, solo):
    requests = some_requests(4, seed=1)
    results = make_engine(overlap=False).run(requests)
    assert [r.tokens for r in results] == [solo(r) for r in requests]


def test_run_after_warm_up_compiles_nothing(make_engine):
    engine = make_engine()
    engine.warm_up()
    engine.run(some_requests(6, seed=2))
    assert engine.recompilations == 0


def test_E6_inject_stale_mapping_aborts_one_request_and_leaves_the_others_identical(make_engine, solo):
    engine = make_engine()
    requests = [dataclasses.replace(r, max_new_tokens=9) for r in some_requests(4, seed=3)]
    for request in requests:
        engine.submit(request)
    while sum(len(s.tokens) > 2 for s in engine.scheduler.live.values()) < 4:
        engine.step()
    victim, other = (engine.row_of(f"q{i}")[1] for i in (1, 2))

    def steal(state):
        table_BM = state.pages.table_BM.at[victim, 0].set(state.pages.table_BM[other, 0])
        return dataclasses.replace(state, pages=dataclasses.replace(state.pages, table_BM=table_BM))

    published = len(engine.scheduler.live["q1"].tokens)
    engine.inject(steal)
    results = {}
    while not engine.idle:
        for event in engine.step():
            if event.result is not None:
                results[event.request_id] = event.result
    aborted = results.pop("q1")
    assert aborted.finish_reason == "integrity"
    assert "mapping" in aborted.error
    # Only what was launched, and checked, before the fault may still come out: the step in flight.
    assert published <= len(aborted.tokens) <= published + 1
    assert aborted.tokens == solo(requests[1])[: len(aborted.tokens)]
    for request in requests:
        if request.request_id != "q1":
            assert results[request.request_id].tokens == solo(request)
    assert [i.kind for i in engine.incidents] == ["integrity"]
    found = engine.metrics()
    assert found["integrity.mismatches"] == found["mismatches.mapping"] == found["aborts.integrity"] == 1
    assert found["integrity.page_checks"] > 5 * found["steps"]
    text = metrics.to_prometheus(found)
    assert 'kvmem_mismatches{kind="mapping"} 1\n' in text
    assert 'kvmem_mismatches{kind="generation"} 0\n' in text
    assert engine.pools.counts("decode")["free"] == SMALL.decode_pages - 1


def test_inject_nan_logits_fails_one_request_by_name(make_engine, solo):
    engine = make_engine()
    requests = some_requests(3, seed=4)
    for request in requests:
        engine.submit(request)
    while any(len(s.tokens) < 1 for s in engine.scheduler.live.values()):
        engine.step()
    row = engine.row_of("q0")[1]

    def poison(state):
        page = int(np.asarray(state.pages.table_BM)[row, 0])
        values = state.kv.values.at[:, page].set(jnp.full((), jnp.nan, state.kv.values.dtype))
        return dataclasses.replace(state, kv=dataclasses.replace(state.kv, values=values))

    engine.inject(poison)
    results = {}
    while not engine.idle:
        results |= {e.request_id: e.result for e in engine.step() if e.result is not None}
    assert results["q0"].finish_reason == "error"
    assert "nonfinite" in results["q0"].error
    for request in requests[1:]:
        assert results[request.request_id].tokens == solo(request)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampling_does_not_depend_on_the_batch(make_engine, solo, temperature):
    sampling = SamplingParams(temperature=temperature, top_k=20, seed=11, ignore_eos=True, logprobs=True)
    requests = some_requests(5, seed=5, sampling=sampling)
    results = make_engine().run(requests)
    assert [r.tokens for r in results] == [solo(r) for r in requests]
    assert all(len(r.logprobs) == len(r.tokens) and max(r.logprobs) <= 0 for r in results)


@pytest.mark.parametrize("kind", [Cluster, SideBySide])
def test_cluster_of_engines_answers_as_one_and_keeps_sessions_together(make_engine, solo, kind):
    engines = [make_engine(), make_engine()]
    cluster = kind(engines, Router("weighed"))
    requests = [dataclasses.replace(r, session=f"s{i % 2}") for i, r in enumerate(some_requests(6, seed=6))]
    results = {r.request_id: r for r in workload.drive(cluster, workload.OpenLoop(requests))}
    for request in requests:
        assert results[request.request_id].tokens == solo(request)
    homes: dict[str, set[int]] = {}
    for request in requests:
        homes.setdefault(request.session, set()).add(results[request.request_id].replica)
    assert all(len(home) == 1 for home in homes.values())


@pytest.mark.slow
def test_batch_invariant_outputs_are_bit_identical_at_any_batch(make_engine):
    sampling = SamplingParams(ignore_eos=True, logprobs=True)
    requests = some_requests(5, seed=7, sampling=sampling)
    together = make_engine(batch_invariant=True).run(requests)
    for request, result in zip(requests, together, strict=True):
        # Another row, other company, another bucket: not a bit may differ.
        (alone,) = make_engine(batch_invariant=True, row_buckets=(1,), prefix_cache=False).run([request])
        assert alone.tokens == result.tokens
        assert alone.logprobs == result.logprobs
