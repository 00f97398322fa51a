import pytest
from ml_collections import ConfigDict

from configs import serve_trace as configs
from experiments import serve_trace
from kvmem.engine import workload
from kvmem.engine.router import POLICIES


@pytest.fixture(scope="module")
def config() -> ConfigDict:
    config = configs.get_config("quick")
    config.data = ""
    config.routing.count = 60
    config.routing.replicas = 3
    return config


@pytest.fixture(scope="module")
def rows(config):
    return serve_trace._trace(config, "mooncake_conversation", config.routing.count)[0]


def test_simulated_prefix_cache_computes_what_it_does_not_reuse(config, rows):
    off = serve_trace._simulated(config, rows, "round_robin", prefix_cache=False)
    on = serve_trace._simulated(config, rows, "round_robin")
    assert off["prefix_hit_rate"] == 0
    assert 0 < on["prefix_hit_rate"] < workload.block_hit_rate(rows)  # three caches see a third each
    assert on["prefill_tokens"] == pytest.approx(off["prefill_tokens"] * (1 - on["prefix_hit_rate"]))
    assert on["ttft_s.p50"] < off["ttft_s.p50"]


def test_simulated_policies_finish_every_request_and_differ(config, rows):
    found = {policy: serve_trace._simulated(config, rows, policy) for policy in POLICIES}
    assert {values["task_success"] for values in found.values()} == {1.0}
    assert found["round_robin"]["spread"] == 1.0
    assert found["weighed"]["prefix_hit_rate"] > found["round_robin"]["prefix_hit_rate"]
    assert found["weighed"]["ttft_s.p95"] < found["random"]["ttft_s.p95"]


def test_simulated_same_seed_repeats(config, rows):
    first, second = (serve_trace._simulated(config, rows, "weighed") for _ in range(2))
    assert first == second


def test_trace_unknown_name_lists_the_known(config):
    with pytest.raises(ValueError, match="unknown trace 'burst'; known: azure_code"):
        serve_trace._trace(config, "burst", 5)


def test_trace_without_the_file_is_generated_and_says_so(config):
    rows, source = serve_trace._trace(config, "azure_code", 7)
    assert len(rows) == 7
    assert "generated" in source


def test_get_config_unknown_argument_lists_the_known():
    with pytest.raises(ValueError, match="unknown argument 'fast'"):
        configs.get_config("fast")


def test_table_leaves_absent_figures_empty():
    text = serve_trace._table({"a": {"x": 1.0, "y": 12345.678}, "b": {"x": 0.5}}, ("x", "y"), "row")
    assert text.splitlines()[2:] == ["| a | 1 | 1.235e+04 |", "| b | 0.5 |  |"]


@pytest.mark.slow  # compiles the INT4 model's engine
def test_engine_policies_serve_every_request_and_keep_sessions_where_their_prefix_is(config):
    config.fleet.sessions = 3
    config.fleet.replicas = 2
    model, weights, _ = serve_trace._weights(config)
    found = serve_trace._engine_policies(config, model, weights)
    assert set(found) == set(POLICIES)
    assert {values["task_success"] for values in found.values()} == {1.0}
    assert found["weighed"]["prefix_hit_rate"] > found["round_robin"]["prefix_hit_rate"]
    assert found["weighed"]["moved"] < found["round_robin"]["moved"]
    assert min(values["ttft_s.p50"] for values in found.values()) > 0
