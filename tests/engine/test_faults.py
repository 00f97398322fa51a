"""What goes wrong around the device: transfers, checks that do not run, drift, signals, bad requests."""

import dataclasses
import signal

import jax
import jax.numpy as jnp
import pytest

from kvmem.cache import integrity, pages
from kvmem.engine import fingerprint, step
from kvmem.engine.errors import (
    FingerprintMismatch,
    PromptTooLong,
    QueueFull,
    RequestError,
    StepInterrupted,
    TransferFailed,
)
from kvmem.engine.request import EngineConfig, PhaseFormat, Request, SamplingParams, default_formats
from tests.engine.conftest import F32, FIXED, SMALL, some_requests


def run_all(engine, requests):
    for request in requests:
        engine.submit(request)
    results = {}
    while not engine.idle:
        results |= {e.request_id: e.result for e in engine.step() if e.result is not None}
    return results


def first_only(change):
    """A transfer fault that hits the first order and lets later ones pass."""
    hits = []

    def fault(order):
        hits.append(order)
        return change(order) if len(hits) == 1 else order

    return fault


def dies(order):
    raise TransferFailed("the prefill pool died in the middle of the transfer")


ORDERS = {
    "dies": dies,
    "page does not arrive": lambda o: dataclasses.replace(o, arrived_A=o.arrived_A.at[1].set(False)),
    "source generation": lambda o: dataclasses.replace(
        o, source_generation_A=o.source_generation_A.at[0].add(jnp.uint32(1))
    ),
    "destination page": lambda o: dataclasses.replace(o, destination_A=o.destination_A.at[0].set(26)),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_transfer_fault_fails_one_request_and_frees_both_sides(make_engine, solo, kind):
    engine = make_engine(prefix_cache=False)
    engine.inject(first_only(ORDERS[kind]), "transfer")
    requests = some_requests(4, seed=12)
    results = run_all(engine, requests)
    failed = [name for name, result in results.items() if not result.ok]
    assert [results[name].finish_reason for name in failed] == ["error"]
    assert len(results[failed[0]].tokens) == 1  # the first token was prefill's, read before the transfer
    for request in requests:
        if request.request_id not in failed:
            assert results[request.request_id].tokens == solo(request)
    assert [(i.kind, i.request_id) for i in engine.incidents] == [("transfer", failed[0])]
    for pool, total in (("prefill", SMALL.prefill_pages), ("decode", SMALL.decode_pages)):
        assert pages.violations(engine.state(pool).pages) == []
        assert engine.pools.counts(pool)["free"] == total - 1


def test_transfer_fault_with_a_retry_budget_answers_in_full(make_engine, solo):
    engine = make_engine(prefix_cache=False, retry_budget=1, retry_budget_per_1000=1000)
    engine.inject(first_only(dies), "transfer")
    requests = some_requests(3, seed=13)
    results = run_all(engine, requests)
    assert [results[r.request_id].tokens for r in requests] == [solo(r) for r in requests]
    assert sum(r.retries for r in results.values()) == 1
    assert engine.counters["tokens"] == sum(
        len(r.tokens) for r in results.values()
    )  # nothing published twice


def test_E9_retry_budget_stops_a_storm(make_engine):
    engine = make_engine(prefix_cache=False, retry_budget=3, retry_budget_per_1000=500)
    engine.inject(dies, "transfer")  # every transfer fails
    results = run_all(engine, some_requests(4, seed=14))
    assert {r.finish_reason for r in results.values()} == {"error"}
    assert engine.counters["retries"] == 2  # 500 per 1000 of 4 requests


@pytest.mark.parametrize("detector", ["off", "tags_digest"])
def test_E14_detectors_give_the_same_tokens(make_engine, solo, detector):
    requests = some_requests(4, seed=15)
    engine = make_engine(integrity=detector)
    assert [r.tokens for r in engine.run(requests)] == [solo(r) for r in requests]
    assert (engine.counters["page_checks"] > 0) == (detector != "off")
    assert engine.counters["integrity"] == engine.counters["drift"] == 0


def test_digest_flipped_bit_in_a_live_page_is_seen_even_by_sampling_and_tags_alone_do_not(make_engine):
    outcome = {}
    for detector in ("tags", "tags_digest"):
        engine = make_engine(integrity=detector, digest_pages=1)  # the page's turn comes within nine steps
        for request in some_requests(2, seed=16):
            engine.submit(dataclasses.replace(request, max_new_tokens=13))
        while engine.row_of("q1")[0] != "decode" or len(engine.scheduler.live["q1"].tokens) < 2:
            engine.step()
        row = engine.row_of("q1")[1]

        def flip(state, row=row):
            bits = state.kv.values.at[0, state.pages.table_BM[row, 0], 0, 3].multiply(-1.0)
            return dataclasses.replace(state, kv=dataclasses.replace(state.kv, values=bits))

        engine.inject(flip)
        results = {}
        while not engine.idle:
            results |= {e.request_id: e.result for e in engine.step() if e.result is not None}
        outcome[detector] = results["q1"].finish_reason
        assert results["q0"].finish_reason == "length"
    assert outcome == {"tags": "length", "tags_digest": "integrity"}


def test_E1_E7_check_that_did_not_run_fails_every_row_and_publishes_nothing(make_engine, monkeypatch):
    engine = make_engine()
    state = jax.tree.map(jnp.copy, engine.state("prefill"))
    state = dataclasses.replace(state, cause_B=jnp.zeros_like(state.cause_B))
    config = engine.pools.step_config("prefill", 2, 9)
    monkeypatch.setattr(step, "guard", lambda config, state, mask_B: None)
    written = []

    def forward(params, state, tokens_BT, num_new_B, length_B, config):
        written.append(num_new_B.tolist())
        return jnp.zeros((2, 97)), state.kv

    monkeypatch.setattr(step, "_forward", forward)
    _, report = step._prefill({}, state, jnp.ones((2, 8), jnp.int32), jnp.array([3, 5]), config=config)
    outcome = step.read(report)
    assert written == [[0, 0]]
    assert outcome.ran == [False, False]
    assert outcome.cause == [step.Cause.INTEGRITY] * 2
    assert report.check is None


def test_fingerprints_of_pools_that_differ_are_refused_at_start_by_name(kimi, weights):
    config = dataclasses.replace(SMALL)
    base = fingerprint.of_pool(kimi, weights, F32, config)
    changes = {
        "model": "other",
        "page_size": 8,
        "sampling": "other",
        "cache_policy": "off",
        "numerics": "naive",
        "ranks": 4,
        "software": "jax 0",
        "weights": "bf16",
        "parameters": "0",
        "cache": "fp8_576",
        "index": "index_132",
        "scale": 2.0,
    }
    assert set(changes) == {field.name for field in dataclasses.fields(base)}
    for name, value in changes.items():
        with pytest.raises(
            FingerprintMismatch, match=f"hand-over: fingerprints differ in {name}: "
        ) as caught:
            fingerprint.require_equal("hand-over", base, dataclasses.replace(base, **{name: value}))
        assert list(caught.value.fields) == [name]


def test_fingerprint_tells_parameters_apart(kimi, weights):
    changed = {**weights, "final_norm": weights["final_norm"].at[0].add(1.0)}
    assert fingerprint.parameters_digest(weights) != fingerprint.parameters_digest(changed)


def test_hand_over_after_drift_refuses_the_request_and_names_the_field(make_engine):
    engine = make_engine()
    (request,) = some_requests(1, seed=17)
    prefill = engine.pools.fingerprints["prefill"]
    engine.pools.fingerprints["prefill"] = dataclasses.replace(prefill, parameters="swapped")
    results = run_all(engine, [request])
    assert results["q0"].finish_reason == "error"
    assert "parameters: 'swapped' here" in results["q0"].error
    assert engine.pools.counts("decode")["free"] == SMALL.decode_pages - 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_in_mid_step_leaves_results_so_far_and_a_state_that_goes_on(make_engine, solo, number):
    engine = make_engine()
    requests = some_requests(3, seed=18)
    for request in requests:
        engine.submit(request)

    def interrupt(signum, frame):
        raise KeyboardInterrupt(signum)

    before = signal.signal(number, interrupt)
    try:
        engine.inject(lambda state: (signal.raise_signal(number), state)[1], "prefill")
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finally:
        signal.signal(number, before)
    results = {}
    while not engine.idle:
        results |= {e.request_id: e.result for e in engine.step() if e.result is not None}
    assert [results[r.request_id].tokens for r in requests] == [solo(r) for r in requests]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_in_a_half_done_step_keeps_results_and_refuses_further_steps(make_engine, solo, number):
    engine = make_engine(prefix_cache=False)
    requests = some_requests(4, seed=19)
    transfers = []

    def interrupt(signum, frame):
        raise KeyboardInterrupt(signum)

    def fault(order):
        transfers.append(order)
        if len(transfers) == 4:  # planned and booked, not launched
            signal.raise_signal(number)
        return order

    engine.inject(fault, "transfer")
    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all(engine, requests)
    finally:
        signal.signal(number, before)
    with pytest.raises(StepInterrupted, match="make a new engine"):
        engine.step()
    for result in engine.results:
        assert result.tokens == solo(next(r for r in requests if r.request_id == result.request_id))
    for name, sequence in engine.scheduler.live.items():
        expected = solo(next(r for r in requests if r.request_id == name))
        assert tuple(sequence.tokens) == expected[: len(sequence.tokens)]
    for pool in ("prefill", "decode"):  # the interrupted transfer's pins were taken back
        assert int(engine.state(pool).pages.pins_P.sum()) == 0
        assert pages.violations(engine.state(pool).pages) == []


@pytest.mark.parametrize("tokens", [(1, 2.0), ("1",), (None,)])
def test_submit_token_ids_that_are_no_integers_are_refused(make_engine, tokens):
    request = Request("a", (1, 2), 3)
    object.__setattr__(request, "prompt_tokens", tokens)  # the type checker of tests would stop it earlier
    engine = make_engine()
    with pytest.raises(RequestError, match="token ids must be integers"):
        engine.submit(request)
    assert engine.idle


@pytest.mark.parametrize(
    ("request_", "error", "rule"),
    [
        (Request("a", (), 3), RequestError, "prompt is empty"),
        (Request("a", (1, 97), 3), RequestError, "token ids 1..97 outside .0, 97."),
        (Request("a", (1, -1), 3), RequestError, "outside"),
        (Request("a", (1,), 0), RequestError, "max_new_tokens=0"),
        (Request("", (1,), 3), RequestError, "non-empty string"),
        (Request("a", (1,), 3, deadline_s=-1.0), RequestError, "deadline_s=-1.0"),
        (Request("a", (1,), 3, SamplingParams(top_p=0.0)), RequestError, "top_p=0.0"),
        (Request("a", (1,), 3, SamplingParams(stop_strings=("x",))), RequestError, "need a detokenizer"),
        (Request("a", (1,) * 30, 7), PromptTooLong, "= 37 tokens exceed"),
    ],
)
def test_submit_bad_request_is_refused_and_nothing_is_queued(make_engine, request_, error, rule):
    engine = make_engine()
    with pytest.raises(error, match=rule):
        engine.submit(request_)
    assert engine.idle


def test_submit_full_queue_is_refused(make_engine):
    engine = make_engine(queue_limit=2)
    requests = some_requests(3)
    engine.submit(requests[0])
    engine.submit(requests[1])
    with pytest.raises(QueueFull, match="queue_limit=2"):
        engine.submit(requests[2])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"decode_pages": 1}, "decode_pages=1: page 0 is padding"),
        ({"integrity": "crc"}, "integrity='crc' is none of"),
        ({"digest_pages": 0}, "digest_pages=0 must be at least 1"),
        ({"reuse": "copy"}, "reuse='copy' is none of"),
        ({"row_buckets": (5,)}, "row_buckets=.5. must lie in .1, 5."),
    ],
)
def test_engine_config_impossible_value_names_the_rule(change, rule):
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(SMALL, **change)


def test_default_formats_are_the_published_ones():
    assert default_formats("kimi")["decode"] == PhaseFormat("int4_group", "fp8_576")
    assert default_formats("glm")["prefill"] == PhaseFormat("fp8_block", "bf16_576", "index_132")
    with pytest.raises(ValueError, match="unknown model family 'llama'"):
        default_formats("llama")


def test_stop_tokens_and_strings_end_an_answer(make_engine, kimi, weights, solo):
    from kvmem.engine.engine import Engine

    request = Request("a", (5, 6, 7, 8), 12, FIXED)
    tokens = solo(request)
    engine = Engine(
        kimi,
        {"prefill": weights, "decode": weights},
        SMALL,
        detokenize=lambda ids: "".join(f"<{i}>" for i in ids),
    )
    stops = SamplingParams(ignore_eos=True, stop_token_ids=(tokens[4],))
    (by_token,) = engine.run([dataclasses.replace(request, sampling=stops)])
    cut = tokens.index(tokens[4]) + 1
    assert (by_token.tokens, by_token.finish_reason) == (tokens[:cut], "stop")
    text = f"<{tokens[2]}><{tokens[3]}>"
    stops = SamplingParams(ignore_eos=True, stop_strings=(text,))
    (by_text,) = engine.run([dataclasses.replace(request, sampling=stops)])
    assert (by_text.tokens, by_text.finish_reason) == (tokens[:4], "stop")


def test_detectors_known_to_requests_are_those_of_the_cache():
    from kvmem.engine.request import DETECTORS

    assert DETECTORS == integrity.DETECTORS
    assert EngineConfig.__dataclass_fields__["integrity"].default == "tags"
