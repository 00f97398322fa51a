"""Random churn in pools that are always nearly full: every answer is the solo answer, or a named abort."""

import dataclasses
import math
import random

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

from kvmem.cache import pages
from kvmem.engine.engine import Engine
from kvmem.engine.transfers import Late
from tests.engine.churn import Prompts, churn
from tests.engine.conftest import SMALL


def assert_answers(done, solo) -> None:
    """Every finished request has its solo answer; one that was stopped has a beginning of it."""
    for request, result in done.values():
        expected = solo(request)
        assert result.tokens == expected[: len(result.tokens)], result
        if result.ok:
            assert len(result.tokens) == request.max_new_tokens, result


def soak(make_engine, solo, count: int, check_each: int) -> None:
    engine = make_engine(queue_limit=12)
    engine.warm_up()
    done = churn(engine, count, seed=0, check_each=check_each)
    assert engine.recompilations == 0
    assert len(done) == count
    assert_answers(done, solo)
    found = engine.metrics()
    assert found["integrity.mismatches"] == found["integrity.not_run"] == found["accounting_drift"] == 0
    # The churn is worth its name: all of these happened, and often.
    for name, share in (("retractions", 0.1), ("evicted_pages", 0.1), ("transfers", 0.5)):
        assert found[name] > share * count, name
    assert found["prefix_hit_rate"] > 0.3
    assert sum(result.finish_reason == "cancelled" for _, result in done.values()) > 0.02 * count
    assert found["decode_pages.free"] == engine.config.decode_pages - 1
    assert found["prefill_pages.free"] + found["prefix_pages"] == engine.config.prefill_pages - 1


def test_B8_churn_every_answer_equals_solo_and_pages_are_conserved(make_engine, solo):
    soak(make_engine, solo, count=150, check_each=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_churn_soak_of_2200_requests_equals_solo(make_engine, solo):
    soak(make_engine, solo, count=2200, check_each=1)


FAULTS = ("other", "beyond", "negative", "swap", "freed", "epoch")


def strike(kind: str, row: int, other: int):
    """A fault on ``row`` of a decode pool, as a function of its state."""

    def fault(state):
        table_BM = state.pages.table_BM
        if kind == "other":
            table_BM = table_BM.at[row, 0].set(table_BM[other, 0])
        elif kind == "beyond":
            table_BM = table_BM.at[row, 0].set(state.pages.num_pages)
        elif kind == "negative":
            table_BM = table_BM.at[row, 0].set(-1)
        elif kind == "swap":
            table_BM = table_BM.at[row, :2].set(table_BM[row, 1::-1])
        elif kind == "freed":
            page_state, ok = pages.drop(state.pages, table_BM[row, :1], jnp.array([True]))
            assert bool(ok[0])
            return dataclasses.replace(state, pages=page_state)
        else:
            epoch_B = state.pages.epoch_B.at[row].add(jnp.uint32(1))
            return dataclasses.replace(state, pages=dataclasses.replace(state.pages, epoch_B=epoch_B))
        return dataclasses.replace(state, pages=dataclasses.replace(state.pages, table_BM=table_BM))

    return fault


def faulty_soak(make_engine, solo, count: int) -> None:
    engine = make_engine(queue_limit=12)
    rng = random.Random(1)
    hit: dict[str, str] = {}

    def every_step(step: int) -> None:
        rows = [
            s
            for s in engine.scheduler.live.values()
            if engine.row_of(s.request.request_id)[0] == "decode"
            and s.length >= 2 * engine.config.page_size
            and not s.exhausted
            and s.request.request_id not in hit
        ]
        if step % 11 == 0 and len(rows) > 1:
            victim, other = rng.sample(rows, 2)
            kind = FAULTS[len(hit) % len(FAULTS)]
            hit[victim.request.request_id] = kind
            engine.inject(strike(kind, victim.decode_row, other.decode_row))

    done = churn(engine, count, seed=2, every_step=every_step, check_each=10**9, cancels=0.0)
    assert len(hit) >= len(FAULTS)
    assert_answers(done, solo)
    for name, (_, result) in done.items():
        assert result.finish_reason == ("integrity" if name in hit else "length"), (
            name,
            hit.get(name),
            result,
        )
    assert engine.counters["integrity"] == len(hit)
    assert {i.request_id for i in engine.incidents} == set(hit)
    state = jax.device_get(engine.state("decode").pages)
    assert pages.violations(state) == []
    assert int(state.free_count) == engine.config.decode_pages - 1


def test_churn_with_faults_aborts_exactly_the_hit_requests(make_engine, solo):
    faulty_soak(make_engine, solo, count=90)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_churn_soak_of_2000_requests_with_faults_aborts_exactly_the_hit(make_engine, solo):
    faulty_soak(make_engine, solo, count=2000)


def test_churn_with_late_transfers_fails_exactly_those_beyond_their_lease(kimi, weights, solo):
    now = [0.0]
    config = dataclasses.replace(SMALL, queue_limit=12, lease_s=6.0)
    engine = Engine(kimi, {"prefill": weights, "decode": weights}, config, clock=lambda: now[0])
    rng = random.Random(3)
    delays: list[float] = []

    def fault(order):
        delays.append(rng.choice([0.0, 0.0, 0.0, 1.0, 3.0, 5.0, 9.0, math.inf]))
        return Late(order, delays[-1]) if delays[-1] else order

    def every_step(step: int) -> None:
        now[0] = float(step)

    engine.inject(fault, "transfer")
    done = churn(engine, 110, seed=4, every_step=every_step, cancels=0.0)
    assert_answers(done, solo)
    failed = [result for _, result in done.values() if not result.ok]
    assert len(failed) == sum(delay > config.lease_s for delay in delays) > 10
    assert all("outlasted its lease" in result.error for result in failed)
    assert 0 < engine.transfers.late <= delays.count(9.0)
    assert engine.counters["retractions"] > 10
    assert engine.counters["drift"] == engine.counters["integrity"] == len(engine.transfers) == 0
    assert engine.pools.counts("decode")["free"] == SMALL.decode_pages - 1


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 39)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("hopeful"), st.sampled_from([5, 50, 100])),
    ),
    min_size=5,
    max_size=40,
)


@hypothesis.settings(max_examples=12, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(operations=OPERATIONS)
def test_engine_any_sequence_of_operations_conserves_pages_and_answers(make_engine, solo, operations):
    engine = make_engine()
    made = Prompts(random.Random(7), engine.config.max_tokens_per_row)
    requests, done = {}, {}

    def step() -> None:
        for event in engine.step():
            if event.result is not None:
                done[event.request_id] = (requests[event.request_id], event.result)
        for pool in ("prefill", "decode"):
            assert pages.violations(jax.device_get(engine.state(pool).pages)) == []

    for operation, value in operations:
        if operation == "submit":
            prompt, answer = made.made[value]
            request = dataclasses.replace(
                made.request(f"h{len(requests)}"), prompt_tokens=prompt, max_new_tokens=answer
            )
            requests[request.request_id] = request
            engine.submit(request)
        elif operation == "cancel":
            engine.cancel(f"h{value}")
        elif operation == "hopeful":
            engine.scheduler.expected.share = value / 100
        else:
            for _ in range(value):
                step()
    while not engine.idle:
        step()
    assert done.keys() == requests.keys()
    assert_answers(done, solo)
    assert engine.counters["drift"] == engine.counters["integrity"] == 0
    assert engine.pools.counts("decode")["free"] == engine.config.decode_pages - 1
