import json
import re

import pytest

from kvmem.engine import metrics
from kvmem.engine.request import RequestResult

RESULTS = [
    RequestResult(
        "a", (1,) * 5, "length", 40, 16, arrival_s=1.0, admitted_s=1.5, first_token_s=2.0, finished_s=4.0
    ),
    RequestResult(
        "b", (1,) * 3, "stop", 20, 0, arrival_s=2.0, admitted_s=2.0, first_token_s=5.0, finished_s=6.0
    ),
    RequestResult(
        "c", (), "integrity", 30, 0, arrival_s=3.0, admitted_s=3.0, finished_s=11.0, error="page 4"
    ),
]


def test_summarise_literal_run_gives_hand_computed_figures():
    bound = metrics.LatencyBound(ttft_s=2.0, tpot_s=1.0)
    got = metrics.summarise(RESULTS, bound=bound, memory_bytes=2 * metrics.GIB, quality_equal=True)
    expected = {
        "ttft_s.p50": 2.0,  # 1 and 3
        "tpot_s.p50": 0.5,  # 2/4 and 1/2
        "throughput_tok_s": 0.8,  # 8 tokens from 1 s to 11 s
        "prefix_hit_rate": 16 / 90,
        "goodput_tok_s": 0.5,  # only a: b took 3 s to its first token
        "useful_tok_s_per_gib": 0.25,
        "task_success": 2 / 3,
        "finished.integrity": 1,
        "finished.cancelled": 0,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)


def test_summarise_without_quality_test_has_no_useful_rate():
    bound = metrics.LatencyBound(2.0, 1.0)
    assert "useful_tok_s_per_gib" not in metrics.summarise(RESULTS, bound=bound, memory_bytes=5)
    assert "useful_tok_s_per_gib" not in metrics.summarise(
        RESULTS, bound=bound, memory_bytes=5, quality_equal=False
    )


def test_summarise_nothing_finished_leaves_latencies_absent():
    got = metrics.summarise(RESULTS[2:])
    assert "ttft_s.p50" not in got
    assert metrics.summarise([])["requests"] == 0


@pytest.mark.parametrize(("q", "value"), [(0, 1.0), (50, 3.0), (90, 7.4), (100, 9.0)])
def test_percentile_interpolates_linearly(q, value):
    assert metrics.percentile([9.0, 1.0, 3.0, 5.0, 2.0], q) == pytest.approx(value)


def test_percentile_of_nothing_raises():
    with pytest.raises(ValueError, match="no values"):
        metrics.percentile([], 50)


def test_to_jsonl_one_object_a_line_without_token_text():
    rows = [json.loads(line) for line in metrics.to_jsonl(RESULTS).splitlines()]
    assert [row["request_id"] for row in rows] == ["a", "b", "c"]
    assert (rows[0]["tokens"], rows[0]["ttft_s"], rows[2]["ttft_s"]) == (5, 1.0, None)


SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'(\{(?P<label>[a-z]+)="(?P<value>(?:[^"\\\n]|\\.)*)"\})? (?P<number>\S+)'
)


def test_to_prometheus_parses_and_keeps_every_value():
    got = {"ttft_s.p95": 0.25, "ttft_s.p50": 0.125, "pages.free": 7, "host_ms_per_step": 0.5, 'odd."x\n': 1.0}
    text = metrics.to_prometheus(got)
    parsed, typed = {}, set()
    for line in text.splitlines():
        if line.startswith("#"):
            typed.add(line.split()[2])
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match["name"] in typed
        parsed[match["name"], match["label"], match["value"]] = float(match["number"])
    assert parsed == {
        ("kvmem_ttft_s", "quantile", "0.95"): 0.25,
        ("kvmem_ttft_s", "quantile", "0.5"): 0.125,
        ("kvmem_pages", "kind", "free"): 7.0,
        ("kvmem_host_ms_per_step", None, None): 0.5,
        ("kvmem_odd", "kind", '\\"x\\n'): 1.0,
    }
    assert text.endswith("\n")
