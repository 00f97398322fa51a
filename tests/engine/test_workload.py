import dataclasses
import gzip
import json
import math
import pathlib

import numpy as np
import pytest

from kvmem.engine import workload
from kvmem.engine.errors import QueueFull
from kvmem.engine.request import Event, Request, RequestResult
from kvmem.engine.traces import TraceError, TraceRow, load_prompts, load_trace

DATA = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def mooncake(timestamp=0, length=700, answer=5, blocks=(1, 2)) -> str:
    row = {"timestamp": timestamp, "input_length": length, "output_length": answer, "hash_ids": list(blocks)}
    return json.dumps(row) + "\n"


def test_load_trace_mooncake_reads_seconds_lengths_and_blocks(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress((mooncake(2000) + mooncake(3500, 512, 9, [4])).encode()))
    assert load_trace(path, "mooncake") == [TraceRow(0.0, 700, 5, (1, 2)), TraceRow(1.5, 512, 9, (4,))]


def test_load_trace_azure_reads_fractions_of_seconds(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    first, second = load_trace(path, "azure")
    assert (first.input_tokens, first.output_tokens, second.output_tokens) == (374, 44, 109)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_load_trace_burstgpt_reads_sessions(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(BURST + "5,7,1.5,GPT-4,472,18,490,Conversation log\n45,,2,ChatGPT,20,30,50,API log\n")
    assert load_trace(path, "burstgpt") == [TraceRow(0, 472, 18, (), "7"), TraceRow(40, 20, 30)]


@pytest.mark.parametrize(
    ("schema", "text", "line", "rule"),
    [
        ("mooncake", mooncake() + mooncake(length=0), 2, "input_length=0 must be at least 1"),
        ("mooncake", mooncake() + "\n" + mooncake(blocks=[1]), 3, "1 hash_ids for 700 tokens"),
        ("mooncake", mooncake(9) + mooncake(3), 2, "arrives before"),
        ("mooncake", "{not json\n", 1, "Expecting property name"),
        ("mooncake", "[]\n", 1, "must be a JSON object"),
        ("mooncake", "\n", 1, "no rows"),
        ("azure", AZURE + "2023-11-16 18:15:46,10\n", 2, "fewer fields"),
        ("azure", AZURE + "2023-11-16 18:15:46,10,3,4\n", 2, "more fields"),
        ("azure", AZURE + "yesterday,10,3\n", 2, "does not match format"),
        ("azure", AZURE + "2023-11-16 18:15:46,ten,3\n", 2, "invalid literal"),
        ("azure", "a,b\n1,2\n", 1, "columns"),
        ("burstgpt", BURST + "5,7,1,GPT-4,10,3,14,API log\n", 2, "Total tokens=14 is not 10 [+] 3"),
    ],
)
def test_load_trace_malformed_row_names_file_and_line(tmp_path, schema, text, line, rule):
    path = tmp_path / "bad.trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=rule) as caught:
        load_trace(path, schema)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_load_trace_unknown_schema_lists_the_known(tmp_path):
    with pytest.raises(ValueError, match="unknown trace schema 'vllm'; known: mooncake, azure, burstgpt"):
        load_trace(tmp_path, "vllm")


def test_load_prompts_reads_text_ids_and_sampling(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "ab"}, {"prompt_tokens": [3, 4, 5], "max_new_tokens": 2, "sampling": {"top_k": 7}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = load_prompts(path, max_new_tokens=6, vocab_size=200, encode=lambda text: text.encode())
    assert (first.prompt_tokens, first.max_new_tokens, first.request_id) == ((97, 98), 6, "p-1")
    assert (second.prompt_tokens, second.max_new_tokens, second.sampling.top_k) == ((3, 4, 5), 2, 7)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt_tokens": [3], "colour": 1}, "unknown fields .'colour'."),
        ({"prompt_tokens": [3], "sampling": {"beam": 4}}, "unknown sampling options .'beam'."),
        ({"prompt_tokens": []}, "prompt is empty"),
        ({"prompt_tokens": [200]}, "outside"),
        ({"prompt": "x"}, "needs a tokenizer"),
        ({}, "give one of"),
    ],
)
def test_load_prompts_bad_row_names_file_and_line(tmp_path, row, rule):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(TraceError, match=rule) as caught:
        load_prompts(path, max_new_tokens=6, vocab_size=200)
    assert str(caught.value).startswith(f"{path}:1: ")


@pytest.mark.parametrize("name", sorted(workload.PRESETS))
def test_generate_preset_meets_its_statistics(name):
    shape = workload.PRESETS[name]
    rows = workload.generate(shape, 6000, seed=4)
    lengths = np.array([row.input_tokens for row in rows])
    # The median of n log-normal draws has a relative error of about 1.25 sigma / sqrt(n): 2 % for sigma 1.27.
    assert np.median(lengths) == pytest.approx(shape.prompt.median, rel=0.08)
    answers = np.array([row.output_tokens for row in rows])
    assert np.median(answers) == pytest.approx(shape.answer.median, rel=0.08)
    # A mean of n gaps with this cv: cv / sqrt(n), 17 % for the burstiest.
    rate = len(rows) / rows[-1].arrival_s
    assert rate == pytest.approx(shape.rate, rel=4 * shape.cv / math.sqrt(len(rows)) + 0.01)
    if not shape.batch_s:
        gaps = np.diff([row.arrival_s for row in rows])
        assert gaps.std() / gaps.mean() == pytest.approx(shape.cv, rel=0.35)
    assert workload.block_hit_rate(rows) == pytest.approx(shape.hit_rate, abs=0.01)


def test_generate_equal_seed_repeats_and_other_seed_differs():
    shape = workload.PRESETS["mooncake_conversation"]
    assert workload.generate(shape, 50, seed=1) == workload.generate(shape, 50, seed=1)
    assert workload.generate(shape, 50, seed=1) != workload.generate(shape, 50, seed=2)


@pytest.mark.skipif(not DATA.is_dir(), reason="the trace files are not here")
@pytest.mark.parametrize(
    ("preset", "file", "schema"),
    [
        ("mooncake_conversation", "mooncake_conversation_head4000.jsonl.gz", "mooncake"),
        ("azure_code", "azure2023_code.csv.gz", "azure"),
        ("azure_conversation", "azure2023_conv.csv.gz", "azure"),
    ],
)
def test_generate_against_the_real_trace_agrees(preset, file, schema):
    real = load_trace(DATA / file, schema)
    made = workload.generate(workload.PRESETS[preset], len(real), seed=0)
    for field, tolerance in (("input_tokens", 0.15), ("output_tokens", 0.15)):
        ours, theirs = (np.median([getattr(row, field) for row in rows]) for rows in (made, real))
        assert ours == pytest.approx(theirs, rel=tolerance), field
    if schema == "mooncake":  # the file is the head of the trace, whose cache is still filling
        assert workload.block_hit_rate(made) == pytest.approx(workload.block_hit_rate(real), abs=0.08)


def test_to_requests_equal_blocks_give_equal_tokens_at_any_shrink():
    rows = [TraceRow(0, 1536, 64, (0, 1, 2)), TraceRow(1, 1024, 640, (0, 1)), TraceRow(2, 1024, 1, (3, 1))]
    first, second, third = workload.to_requests(
        rows, vocab_size=97, max_prompt=80, max_new_tokens=20, shrink=16
    )
    assert [len(r.prompt_tokens) for r in (first, second, third)] == [80, 64, 64]
    assert [r.max_new_tokens for r in (first, second, third)] == [4, 20, 1]
    assert first.prompt_tokens[:64] == second.prompt_tokens
    assert third.prompt_tokens[32:] == second.prompt_tokens[32:]
    assert third.prompt_tokens[:32] != second.prompt_tokens[:32]
    assert max(first.prompt_tokens) < 97


class Echo:
    """A server that answers a request ``latency`` seconds after it came, on a clock of its own."""

    def __init__(self, latency=2.0, limit=99):
        self.time, self.latency, self.limit = 0.0, latency, limit
        self.live: list[tuple[float, Request]] = []
        self.peak = 0
        self.prompts: list[tuple[float, tuple[int, ...]]] = []

    def submit(self, request):
        if len(self.live) >= self.limit:
            raise QueueFull("full")
        self.live.append((self.time + self.latency, request))
        self.prompts.append((self.time, request.prompt_tokens))
        self.peak = max(self.peak, len(self.live))

    def step(self):
        self.time += 0.5
        done = [r for end, r in self.live if end <= self.time]
        self.live = [(end, r) for end, r in self.live if end > self.time]
        return [
            Event(
                "finished",
                r.request_id,
                result=RequestResult(r.request_id, (8,) * r.max_new_tokens, "length"),
            )
            for r in done
        ]

    def now(self):
        return self.time

    def wait(self, until_s):
        self.time = max(self.time, until_s)

    @property
    def idle(self):
        return not self.live


def some(count: int) -> list[Request]:
    return [Request(f"q{i}", (1, 2, 3), 4, arrival_s=3.0 * i) for i in range(count)]


def test_closed_loop_keeps_the_concurrency_and_runs_everything():
    server = Echo()
    results = workload.drive(server, workload.ClosedLoop(some(7), 3))
    assert (len(results), server.peak) == (7, 3)


def test_open_loop_submits_at_arrival():
    server = Echo(latency=1.0)
    results = workload.drive(server, workload.OpenLoop(some(5)))
    assert [time for time, _ in server.prompts] == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert len(results) == 5


def test_drive_full_queue_ends_a_request_as_refused_and_goes_on():
    requests = [dataclasses.replace(r, arrival_s=0.0) for r in some(5)]
    results = workload.drive(Echo(limit=2), workload.OpenLoop(requests))
    assert sorted(r.finish_reason for r in results) == ["length"] * 2 + ["refused"] * 3


def test_sessions_prompt_grows_by_answer_and_new_tokens_after_the_delay():
    turns = (workload.Turn((1, 2), 3, 0.0), workload.Turn((5,), 2, 4.0))
    server = Echo(latency=1.0)
    workload.drive(server, workload.Sessions([workload.Script("s", 2.0, turns)]))
    assert server.prompts == [(2.0, (1, 2)), (7.0, (1, 2, 8, 8, 8, 5))]


@pytest.mark.parametrize("kind", sorted(workload.SESSIONS))
def test_scripts_stay_inside_the_token_limit(kind):
    shape = workload.SESSIONS[kind]
    made = workload.scripts(shape, count=20, seed=2, vocab_size=50, max_tokens=4000, rate=0.5)
    totals = [sum(len(turn.tokens) + turn.max_new_tokens for turn in script.turns) for script in made]
    assert max(totals) <= 4000
    assert min(len(script.turns) for script in made) >= 1
    assert len({script.session for script in made}) == 20
