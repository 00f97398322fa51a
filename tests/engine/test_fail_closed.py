"""What is not known to be good is not served: a check that raises, bytes never stored, stale holds."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from kvmem.cache import integrity, pages
from kvmem.engine import rows
from kvmem.engine.pools import DevicePools
from kvmem.engine.request import Request
from tests.engine.conftest import FIXED, some_requests

FIRST = Request("t0", tuple(range(3, 14)), 14, FIXED)  # 11 + 14 tokens: decode ends with 6 whole pages of 4


def second_turn(result) -> Request:
    return Request("t1", (*FIRST.prompt_tokens, *result.tokens, 90, 91), 5, FIXED)


def finish(engine, requests=(), *, hopeful=False) -> dict:
    """Serves to the end; ``hopeful`` admits too many rows, so that some are retracted."""
    results = {}
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        if hopeful:
            engine.scheduler.expected.share = 0.05
        results |= {e.request_id: e.result for e in engine.step() if e.result is not None}
    return results


def test_E1_exception_in_the_check_aborts_its_requests_and_keeps_the_engine_alive(
    make_engine, solo, monkeypatch, caplog
):
    requests = some_requests(4, seed=41)
    broken = make_engine(page_buckets=(7,))  # programs of its own
    with monkeypatch.context() as patch:
        patch.setattr(integrity, "check", lambda *_: 1 / 0)
        results = finish(broken, requests)
    assert {(r.finish_reason, r.tokens) for r in results.values()} == {("integrity", ())}
    assert broken.metrics()["integrity.not_run"] == len(requests)
    assert {i.kind for i in broken.incidents} == {"check_not_run"}
    assert "ZeroDivisionError" in caplog.text
    assert broken.pools.counts("prefill")["free"] == broken.config.prefill_pages - 1
    engine = make_engine()  # the mutation undone: the same requests are answered
    assert [r.tokens for r in engine.run(requests)] == [solo(r) for r in requests]


def _before_the_last_token(engine) -> int:
    """Runs FIRST until only its last token is unread; returns its decode row."""
    engine.submit(FIRST)
    while len(engine.scheduler.live["t0"].tokens) < FIRST.max_new_tokens - 1:
        engine.step()
    return engine.row_of("t0")[1]


def test_A18_store_that_failed_is_a_miss_later(make_engine, solo):
    engine = make_engine(reuse="widen")
    row = _before_the_last_token(engine)

    def swap(state):
        table_BM = state.pages.table_BM.at[row, :2].set(state.pages.table_BM[row, 1::-1])
        return dataclasses.replace(state, pages=dataclasses.replace(state.pages, table_BM=table_BM))

    engine.inject(swap)  # the answer is complete, but its pages fail the check in front of their storing
    first = finish(engine)["t0"]
    assert first.tokens == solo(FIRST)
    assert engine.metrics()["widened_pages"] == 0
    (second,) = engine.run([second_turn(first)])
    assert (second.tokens, second.cached_tokens) == (solo(second_turn(first)), 8)
    assert engine.metrics()["accounting_drift"] == 0
    assert pages.violations(engine.state("prefill").pages) == []


def test_A18_store_that_claims_success_and_stored_nothing_is_no_hit(make_engine, monkeypatch):
    """The mutation: pages that were never written are registered; the generations give them away."""
    engine = make_engine(reuse="widen")
    _before_the_last_token(engine)
    claimed = [(page, 0) for page in range(20, 24)]
    monkeypatch.setattr(DevicePools, "widen", lambda *_: claimed)
    first = finish(engine)["t0"]
    monkeypatch.undo()
    assert first.ok
    assert engine.metrics()["refused_holds"] == 0  # not read yet: it travels with the next step
    (second,) = engine.run([second_turn(first)])
    assert (second.finish_reason, second.tokens) == ("integrity", ())
    assert "stale_prefix" in second.error
    assert engine.metrics()["refused_holds"] == len(claimed)


@pytest.mark.parametrize("budget", [0, 1], ids=["no_budget", "retried"])
def test_A18_retracted_bytes_that_never_reached_the_host_are_not_resumed(
    make_engine, solo, monkeypatch, budget
):
    engine = make_engine(prefix_cache=False, retry_budget=budget, retry_budget_per_1000=1000)
    real, lost = jax.device_get, []

    def get(tree):
        if isinstance(tree, rows.RowBytes) and not lost:
            lost.append(tree)
            raise MemoryError("no room on the host")
        return real(tree)

    monkeypatch.setattr(jax, "device_get", get)
    requests = [dataclasses.replace(r, max_new_tokens=12) for r in some_requests(6, seed=42)]
    results = finish(engine, requests, hopeful=True)
    assert engine.counters["retractions"] > len(lost) == 1
    failed = [name for name, result in results.items() if not result.ok]
    assert len(failed) == 1 - budget
    assert all("no room on the host" in results[name].error for name in failed)
    for request in requests:
        if request.request_id not in failed:
            assert results[request.request_id].tokens == solo(request)
    assert engine.pools.counts("decode")["free"] == engine.config.decode_pages - 1


def test_A8_stale_side_mapping_frees_nothing_and_is_counted(make_engine, solo):
    engine = make_engine()
    requests = some_requests(3, seed=43)
    engine.run(requests[:1])
    held = engine.books.tree.pages
    unowned = next(page for page in range(1, 31) if page not in held)
    before = jax.device_get(engine.state("prefill").pages.generation_P)
    engine.books.drops += [unowned, unowned]
    engine.pools.hold("drop", engine.books.drops)
    engine.books.drops = []
    after = engine.state("prefill").pages
    assert jnp.array_equal(before, after.generation_P)
    assert pages.violations(after) == []
    later = engine.run(requests[1:])
    assert [r.tokens for r in later] == [solo(r) for r in requests[1:]]
    found = engine.metrics()
    assert (found["refused_holds"], found["accounting_drift"]) == (2, 1)
