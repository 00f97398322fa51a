"""The scheduler alone, driven by a simulated clock and a toy device that answers every launch at once."""

import dataclasses

import pytest

from kvmem.engine.errors import PromptTooLong, QueueFull, RequestError
from kvmem.engine.request import EngineConfig, PhaseFormat, Request
from kvmem.engine.scheduler import Phase, Scheduler

FORMAT = PhaseFormat("bf16", "f32_576")
CONFIG = EngineConfig(
    max_rows=3,
    prefill_pages=40,
    decode_pages=13,
    max_pages_per_row=10,
    prefill=FORMAT,
    decode=FORMAT,
    page_size=4,
    prefill_chunk=8,
    queue_limit=9,
    max_bypass=2,
)


def request(name: str, prompt: int, answer: int, **rest) -> Request:
    return Request(name, tuple(range(1, prompt + 1)), answer, **rest)


class Toy:
    """Runs plans: a launched token is read one step later, as the engine reads them."""

    def __init__(self, config: EngineConfig = CONFIG, max_context: int = 10_000):
        self.free = config.prefill_pages - 1
        self.held: dict[str, int] = {}
        self.scheduler = Scheduler(config, max_context, self.take)
        self.config = config
        self.unread: list[tuple[object, int]] = []
        self.finished: dict[str, int] = {}
        self.log: list[str] = []
        self.clock = 0.0

    def take(self, sequence):
        pages = -(-sequence.prompt_length // self.config.page_size)
        if pages > self.free:
            return None
        self.free -= pages
        self.held[sequence.request.request_id] = pages
        return 0

    def give(self, sequence):
        self.free += self.held.pop(sequence.request.request_id, 0)

    def step(self):
        self.clock += 1.0
        plan = self.scheduler.plan(self.clock)
        for sequence, reason in plan.expire:
            self.log.append(f"{reason} {sequence.request.request_id}")
            self.give(sequence)
        self.log += [f"retract {s.request.request_id}" for s in plan.retract]
        self.log += [f"resume {s.request.request_id}" for s in plan.resume]
        for sequence in plan.transfer:
            self.give(sequence)
        now, self.unread = self.unread, []
        for chunk in plan.prefill:
            assert 0 < chunk.count <= self.config.prefill_chunk
            if chunk.last:
                self.unread.append((chunk.sequence, chunk.sequence.attempt))
        self.unread += [(s, s.attempt) for s in plan.decode]
        rows = [s.decode_row for s in plan.decode]
        assert len(set(rows)) == len(rows)
        assert self.scheduler.decode_free >= 0
        for sequence, attempt in now:
            if sequence.phase is Phase.DONE or sequence.attempt != attempt:
                continue
            sequence.tokens.append(7)
            if len(sequence.tokens) == sequence.request.max_new_tokens:
                self.scheduler.finish(sequence)
                self.give(sequence)
                self.finished[sequence.request.request_id] = len(sequence.tokens)
            elif sequence.phase is Phase.PREFILLED:
                self.scheduler.prefilled(sequence)
        return plan

    def run(self, limit: int = 500):
        while not self.scheduler.idle:
            limit -= 1
            assert limit, f"stuck: {self.log[-5:]}"
            self.step()


def test_run_mixed_requests_finishes_all_and_returns_every_page():
    toy = Toy()
    wanted = {f"q{i}": (3 + 5 * i, 2 + i) for i in range(6)}
    for name, (prompt, answer) in wanted.items():
        toy.scheduler.submit(request(name, prompt, answer))
    toy.run()
    assert toy.finished == {name: answer for name, (_, answer) in wanted.items()}
    assert toy.scheduler.decode_free == CONFIG.decode_pages - 1
    assert toy.free == CONFIG.prefill_pages - 1


def test_plan_under_memory_pressure_retracts_the_youngest_and_resumes_it():
    toy = Toy()
    toy.scheduler.expected.share = 0.01  # admission expects short answers and is wrong
    for i in range(3):
        toy.scheduler.submit(request(f"q{i}", 9, 19))
    toy.run()
    assert toy.finished == {"q0": 19, "q1": 19, "q2": 19}
    assert "retract q2" in toy.log
    assert "resume q2" in toy.log
    assert "retract q0" not in toy.log


def test_plan_retraction_raises_the_expected_length():
    toy = Toy()
    toy.scheduler.expected.share = 0.01
    for i in range(3):
        toy.scheduler.submit(request(f"q{i}", 9, 19))
    while "retract q2" not in toy.log:
        before = toy.scheduler.expected.share
        toy.step()
    assert toy.scheduler.expected.share >= before + 0.099


def test_chunks_end_at_multiples_of_the_chunk_size_whatever_was_cached():
    toy = Toy()
    toy.scheduler.take = lambda sequence: 4
    toy.scheduler.submit(request("q", 21, 2))
    spans = []
    while not toy.scheduler.idle:
        spans += [(c.start, c.count, c.last) for c in toy.step().prefill]
    assert spans == [(4, 4, False), (8, 8, False), (16, 5, True)]


def test_admission_long_prompts_leave_a_row_to_short_ones():
    config = dataclasses.replace(CONFIG, prefill_chunk=2, prefill_pages=60)
    toy = Toy(config)
    for name, prompt in (("long0", 30), ("long1", 31), ("short", 3)):
        toy.scheduler.submit(request(name, prompt, 1))
    plan = toy.step()
    assert [s.request.request_id for s in plan.admit] == ["long0", "short"]
    toy.run()
    assert set(toy.finished) == {"long0", "long1", "short"}


def test_admission_overtakes_a_blocked_head_at_most_max_bypass_times():
    config = dataclasses.replace(CONFIG, prefill_pages=11, prefill_rows=2, queue_limit=99)
    toy = Toy(config)
    toy.scheduler.submit(request("first", 12, 5))
    toy.scheduler.submit(request("big", 36, 2))  # 9 of 10 pages: blocked while anything else is in
    for i in range(12):
        toy.scheduler.submit(request(f"small{i}", 5, 2))
    order = []
    while not toy.scheduler.idle:
        order += [s.request.request_id for s in toy.step().admit]
    assert order.index("big") <= 2 + CONFIG.max_bypass + 1
    assert len(order) == 14


@pytest.mark.parametrize(
    ("prompt", "answer", "context", "rule"),
    [(30, 30, 10_000, "page-table row"), (5, 8, 12, "context window"), (200, 1, 10_000, "decode pool")],
)
def test_submit_too_long_raises_prompt_too_long(prompt, answer, context, rule):
    toy = Toy(max_context=context)
    with pytest.raises(PromptTooLong, match=rule):
        toy.scheduler.submit(request("q", prompt, answer))
    assert toy.scheduler.idle


def test_submit_full_queue_raises_and_keeps_its_length():
    toy = Toy()
    for i in range(CONFIG.queue_limit):
        toy.scheduler.submit(request(f"q{i}", 3, 2))
    with pytest.raises(QueueFull, match="queue_limit=9"):
        toy.scheduler.submit(request("one more", 3, 2))
    assert toy.scheduler.queue_depth == CONFIG.queue_limit


def test_submit_live_id_raises():
    toy = Toy()
    toy.scheduler.submit(request("q", 3, 2))
    with pytest.raises(RequestError, match="'q' is already in use"):
        toy.scheduler.submit(request("q", 4, 2))


@pytest.mark.parametrize("steps", range(1, 9))
def test_cancel_in_any_phase_frees_rows_and_pages(steps):
    toy = Toy()
    toy.scheduler.submit(request("q", 20, 9))
    for _ in range(steps):
        toy.step()
    assert toy.scheduler.cancel("q")
    toy.run()
    assert toy.log == ["cancelled q"]
    assert toy.scheduler.decode_free == CONFIG.decode_pages - 1
    assert toy.free == CONFIG.prefill_pages - 1
    assert not toy.scheduler.cancel("q")


def test_plan_past_the_deadline_expires_the_request_only():
    toy = Toy()
    toy.scheduler.submit(request("late", 20, 20, deadline_s=4.0))
    toy.scheduler.submit(request("fine", 6, 5))
    toy.run()
    assert toy.log == ["deadline late"]
    assert toy.finished == {"fine": 5}


def test_retry_spends_the_budgets_and_then_refuses():
    config = dataclasses.replace(CONFIG, retry_budget=2, retry_budget_per_1000=1000)
    scheduler = Toy(config).scheduler
    sequences = [scheduler.submit(request(f"q{i}", 3, 2)) for i in range(3)]
    granted = [scheduler.retry(sequences[0]) for _ in range(3)]
    assert granted == [True, True, False]
    assert scheduler.retry(sequences[1])
    assert not scheduler.retry(sequences[2])  # 3 submitted, 3 retries spent
    assert [s.attempt for s in sequences] == [2, 1, 0]
