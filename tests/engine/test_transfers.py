"""Transfers that do not arrive in time: bounded leases, pins taken back once, late completions ignored."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from kvmem.cache import pages, transfer
from kvmem.engine import handover
from kvmem.engine.engine import Engine
from kvmem.engine.scheduler import Phase
from kvmem.engine.transfers import Late
from tests.engine.conftest import SMALL, some_requests

LEASE_S = 5.0
NAMED = "outlasted its lease of 5.0 s"


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def late_engine(kimi, weights):
    """An engine on a clock of its own, and a fault that delays the first transfer by so many seconds."""

    def make(after_s: float, **changes) -> tuple[Engine, Clock]:
        clock = Clock()
        config = dataclasses.replace(SMALL, prefix_cache=False, lease_s=LEASE_S, **changes)
        engine = Engine(kimi, {"prefill": weights, "decode": weights}, config, clock=clock)
        first: list[transfer.Order] = []

        def fault(order):
            first.append(order)
            return Late(order, after_s) if len(first) == 1 else order

        engine.inject(fault, "transfer")
        return engine, clock

    return make


def run(engine, clock, requests, seconds_a_step=0.5, until=lambda: False):
    """Steps on the test's clock to the end, or until something holds; pages add up after every step."""
    results = {}
    for request in requests:
        engine.submit(request)
    while not (engine.idle or until()):
        clock.time += seconds_a_step
        results |= {e.request_id: e.result for e in engine.step() if e.result is not None}
        for pool in ("prefill", "decode"):
            assert pages.violations(jax.device_get(engine.state(pool).pages)) == []
    return results


def assert_empty(engine) -> None:
    for pool, total in (("prefill", SMALL.prefill_pages), ("decode", SMALL.decode_pages)):
        state = jax.device_get(engine.state(pool).pages)
        assert int(state.pins_P.sum()) == 0
        assert int(state.free_count) == total - 1
    assert len(engine.transfers) == 0


def moving(engine) -> list[str]:
    return [s.request.request_id for s in engine.scheduler.rows(Phase.MOVING)]


def test_transfer_that_is_late_within_its_lease_decodes_later_and_answers_in_full(late_engine, solo):
    engine, clock = late_engine(3.0)
    requests = some_requests(4, seed=31)
    waited = []
    results = run(engine, clock, requests, until=lambda: waited.extend(moving(engine)))
    results |= run(engine, clock, [])
    assert len(waited) >= 5  # half a second a step
    assert len(set(waited)) == 1
    assert {name: r.tokens for name, r in results.items()} == {r.request_id: solo(r) for r in requests}
    assert engine.counters["transfers"] == 4
    assert engine.counters["drift"] == engine.transfers.late == 0
    assert_empty(engine)


@pytest.mark.parametrize("after_s", [8.0, math.inf], ids=["late", "lost"])
def test_B2_transfer_beyond_its_lease_fails_one_request_and_a_late_completion_is_counted(
    late_engine, solo, after_s
):
    engine, clock = late_engine(after_s)
    requests = some_requests(5, seed=32)
    results = run(engine, clock, requests)
    (failed,) = (name for name, result in results.items() if not result.ok)
    assert results[failed].finish_reason == "error"
    assert NAMED in results[failed].error
    assert 0 < results[failed].finished_s - 0.5 <= LEASE_S + 4.0
    for request in requests:
        if request.request_id != failed:
            assert results[request.request_id].tokens == solo(request)
    assert [(i.kind, i.request_id) for i in engine.incidents] == [("transfer", failed)]
    assert engine.metrics()["aborts.transfer"] == 1
    assert_empty(engine)
    clock.time += after_s if after_s < math.inf else 1e6
    engine.step()
    assert engine.transfers.late == (after_s < math.inf)
    assert_empty(engine)


def test_transfer_beyond_its_lease_with_a_retry_budget_answers_in_full(late_engine, solo):
    engine, clock = late_engine(math.inf, retry_budget=1, retry_budget_per_1000=1000)
    requests = some_requests(3, seed=33)
    results = run(engine, clock, requests)
    assert [results[r.request_id].tokens for r in requests] == [solo(r) for r in requests]
    assert sum(r.retries for r in results.values()) == 1
    assert_empty(engine)


def test_cancel_while_a_transfer_is_under_way_unpins_once_and_ignores_what_arrives(late_engine, solo):
    engine, clock = late_engine(2.0)
    requests = some_requests(3, seed=34)
    run(engine, clock, requests, until=lambda: bool(moving(engine)))
    (victim,) = moving(engine)
    assert engine.row_of(victim)[0] == "decode"
    assert engine.pools.counts("decode")["owned"] > 0
    engine.cancel(victim)
    results = run(engine, clock, [])
    assert results.pop(victim).finish_reason == "cancelled"
    assert all(results[r.request_id].tokens == solo(r) for r in requests if r.request_id in results)
    clock.time += 2.0
    engine.step()
    assert engine.transfers.late == 1
    assert_empty(engine)


def _row_reused_before_the_late_arrival(engine, clock):
    """The first transfer lapses, its row and pages go to another request, then the bytes arrive."""
    requests = [dataclasses.replace(r, max_new_tokens=9) for r in some_requests(6, seed=35)]
    results = run(engine, clock, requests[:1], seconds_a_step=2.0)
    assert NAMED in results["q0"].error
    results = run(engine, clock, requests[1:], seconds_a_step=0.3)
    assert len(results) == 5
    return {r.request_id: r for r in requests[1:]}, results


def test_B1_late_write_of_a_lapsed_transfer_does_not_touch_the_rows_next_owner(late_engine, solo):
    engine, clock = late_engine(8.5)
    requests, results = _row_reused_before_the_late_arrival(engine, clock)
    assert {name: r.tokens for name, r in results.items()} == {n: solo(r) for n, r in requests.items()}
    assert engine.transfers.late == 1


def _accept_everything(board, number, manifest, now_s):
    return transfer.Lease(number, manifest, (), math.inf)


def test_B1_late_write_that_the_board_lets_through_is_refused_on_the_device(late_engine, solo, monkeypatch):
    monkeypatch.setattr(transfer.Board, "arrive", _accept_everything)
    engine, clock = late_engine(8.5)
    requests, results = _row_reused_before_the_late_arrival(engine, clock)
    assert engine.transfers.late == 0
    assert {name: r.tokens for name, r in results.items()} == {n: solo(r) for n, r in requests.items()}


def test_B1_without_board_and_pins_the_late_write_changes_an_answer(late_engine, solo, monkeypatch):
    """The mutation: that the tests above can fail, and that tags alone would not see this write."""
    monkeypatch.setattr(transfer.Board, "arrive", _accept_everything)
    monkeypatch.setattr(transfer, "_still", lambda state, page_A, generation_A: jnp.bool_(True))
    handover.land.clear_cache()
    try:
        engine, clock = late_engine(8.5)
        requests, results = _row_reused_before_the_late_arrival(engine, clock)
    finally:
        handover.land.clear_cache()
    wrong = [name for name, r in results.items() if r.tokens != solo(requests[name])]
    assert wrong
    assert engine.counters["integrity"] == 0
