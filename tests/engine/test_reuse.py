"""Later turns of a conversation under each reuse policy, and the prefix cache under tenants and faults."""

import dataclasses

import jax.numpy as jnp
import pytest

from kvmem.cache import pages
from kvmem.engine.request import Request
from tests.engine.conftest import FIXED, some_requests

FIRST = Request("t0", tuple(range(3, 14)), 14, FIXED)  # 11 + 14 tokens: decode ends with 6 whole pages of 4


def second_turn(result, name="t1") -> Request:
    return Request(name, (*FIRST.prompt_tokens, *result.tokens, 90, 91), 5, FIXED)


def two_turns(engine):
    (first,) = engine.run([FIRST])
    (second,) = engine.run([second_turn(first)])
    return first, second


@pytest.mark.parametrize(("policy", "cached"), [("recompute", 8), ("widen", 24), ("refuse", 0)])
def test_second_turn_reuses_what_the_policy_allows(make_engine, solo, policy, cached):
    engine = make_engine(reuse=policy)
    first, second = two_turns(engine)
    assert second.cached_tokens == cached
    # In f32 a page made by decode holds the values that prefill would make, so every policy answers alike.
    assert second.tokens == solo(second_turn(first))
    found = engine.metrics()
    costs = {name: found[name] for name in ("widened_pages", "recomputed_tokens", "refused_tokens")}
    expected = {
        "recompute": {"widened_pages": 0, "recomputed_tokens": 16, "refused_tokens": 0},
        # 4 after the first turn; 1 after the second, whose 31 tokens fill 7 pages, 6 of them in its prompt.
        "widen": {"widened_pages": 5, "recomputed_tokens": 0, "refused_tokens": 0},
        "refuse": {"widened_pages": 0, "recomputed_tokens": 0, "refused_tokens": 24},
    }
    assert costs == expected[policy]
    assert found["accounting_drift"] == 0
    assert pages.violations(engine.state("prefill").pages) == []


def test_widen_pages_carry_decode_as_their_origin(make_engine):
    engine = make_engine(reuse="widen")
    (first,) = engine.run([FIRST])
    path = engine.books.tree.match((*FIRST.prompt_tokens, *first.tokens))
    assert [node.origin for node in path] == ["prefill"] * 2 + ["decode"] * 4
    origin_P = engine.state("prefill").pages.origin_P
    made_by = [int(origin_P[node.page]) for node in path]
    assert made_by[:2] == [engine.pools.origin["prefill"]] * 2
    assert made_by[2:] == [engine.pools.origin["decode"]] * 4


def test_prefix_other_tenant_shares_nothing(make_engine):
    engine = make_engine()
    ours = some_requests(2, seed=8)
    theirs = [dataclasses.replace(r, tenant="other", request_id=f"o{i}") for i, r in enumerate(ours)]
    engine.run(ours[:1])
    assert engine.run(theirs[:1])[0].cached_tokens == 0
    assert engine.run(ours[1:])[0].cached_tokens == 8
    assert engine.run(theirs[1:])[0].cached_tokens == 8


def test_A6_A15_cancelled_prefill_leaves_no_pages_behind(make_engine):
    engine = make_engine()
    long = Request("long", tuple(range(1, 29)), 3, FIXED)
    engine.submit(long)
    engine.step()
    engine.step()  # two of four chunks are launched
    engine.cancel("long")
    while not engine.idle:
        engine.step()
    assert len(engine.books.tree) == 0
    assert engine.run([dataclasses.replace(long, request_id="again")])[0].cached_tokens == 0


def test_prefix_page_lost_since_it_was_registered_aborts_one_request_and_is_forgotten(make_engine, solo):
    engine = make_engine()
    first, second = some_requests(2, seed=9)
    engine.run([first])
    (node, *_) = engine.books.tree.match(second.prompt_tokens)

    def lose(state):
        page_state, ok = pages.drop(state.pages, jnp.array([node.page]), jnp.array([True]))
        assert bool(ok[0])
        return dataclasses.replace(state, pages=page_state)

    engine.inject(lose, "prefill")
    (aborted,) = engine.run([second])
    assert (aborted.finish_reason, aborted.tokens) == ("integrity", ())
    assert "stale_prefix" in aborted.error
    (again,) = engine.run([dataclasses.replace(second, request_id="again")])
    assert (again.tokens, again.cached_tokens) == (solo(second), 0)
    assert pages.violations(engine.state("prefill").pages) == []
    free = engine.pools.counts("prefill")["free"]
    assert free + len(engine.books.tree) == engine.config.prefill_pages - 1


def test_prefix_retry_after_a_lost_page_answers_in_full(make_engine, solo):
    engine = make_engine(retry_budget=1, retry_budget_per_1000=1000)
    first, second = some_requests(2, seed=9)
    engine.run([first])
    (node, *_) = engine.books.tree.match(second.prompt_tokens)

    def lose(state):
        page_state, _ = pages.drop(state.pages, jnp.array([node.page]), jnp.array([True]))
        return dataclasses.replace(state, pages=page_state)

    engine.inject(lose, "prefill")
    (result,) = engine.run([second])
    assert (result.tokens, result.retries, result.finish_reason) == (solo(second), 1, "length")
    assert engine.metrics()["integrity.mismatches"] == 1
