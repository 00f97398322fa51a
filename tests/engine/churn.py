"""Random traffic for the churn tests: shared prefixes and cancels in pools that are nearly full."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import jax

from kvmem.cache import pages
from kvmem.engine.engine import Engine
from kvmem.engine.errors import QueueFull
from kvmem.engine.request import Request, RequestResult, SamplingParams

FIXED = SamplingParams(ignore_eos=True)


@dataclasses.dataclass
class Prompts:
    """A small set of prompts and answers, so that solo answers can be kept; prefixes branch."""

    rng: random.Random
    longest: int
    stems: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    made: list[tuple[tuple[int, ...], int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.stems = [tuple(self.rng.randrange(1, 97) for _ in range(n)) for n in (5, 8, 13, 17)]
        for _ in range(40):
            stem = self.rng.choice(self.stems)
            tail = tuple(self.rng.randrange(1, 97) for _ in range(self.rng.randrange(1, 9)))
            prompt = (stem + tail)[: self.longest - 2]
            self.made.append((prompt, self.rng.randrange(1, self.longest - len(prompt) + 1)))

    def request(self, name: str, deadline_s: float | None = None) -> Request:
        prompt, answer = self.rng.choice(self.made)
        return Request(name, prompt, answer, FIXED, deadline_s=deadline_s)


def churn(
    engine: Engine,
    count: int,
    seed: int,
    *,
    every_step: Callable[[int], None] | None = None,
    check_each: int = 1,
    cancels: float = 0.03,
) -> dict[str, tuple[Request, RequestResult]]:
    """Submits ``count`` requests as the queue takes them, cancels some at any point, and runs to the end.

    After every ``check_each``-th step the page invariants are read back and must hold: free + owned +
    shared + pinned is the pool, and no page has two owners.
    """
    rng = random.Random(seed)
    prompts = Prompts(random.Random(seed + 1), engine.config.max_tokens_per_row)
    requests: dict[str, Request] = {}
    done: dict[str, tuple[Request, RequestResult]] = {}
    submitted = steps = 0
    while submitted < count or not engine.idle:
        while submitted < count and rng.random() < 0.6:
            request = prompts.request(f"c{submitted}")
            request = dataclasses.replace(request, arrival_s=engine.now())
            try:
                engine.submit(request)
            except QueueFull:
                break
            requests[request.request_id] = request
            submitted += 1
        if requests and rng.random() < cancels:
            engine.cancel(rng.choice(list(requests)))
        engine.scheduler.expected.share = 0.05  # admission is always too hopeful: rows must be retracted
        if every_step is not None:
            every_step(steps)
        for event in engine.step():
            if event.result is not None:
                done[event.request_id] = (requests.pop(event.request_id), event.result)
        steps += 1
        if steps % check_each == 0:
            for pool in ("prefill", "decode"):
                broken = pages.violations(jax.device_get(engine.state(pool).pages))
                assert broken == [], (pool, steps, broken)
    return done
