"""Workloads: a parametric trace generator, tokens for traces, sessions, and the drivers that feed a server.

A driver says which requests are due and hears what finished. ``ClosedLoop`` keeps a fixed number in flight,
as the published tables do; ``OpenLoop`` submits at the arrival times; ``Sessions`` sends each turn after the
answer to the one before it plus a delay. ``drive`` runs any of them against an engine, a cluster or the
simulator.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from kvmem.engine.errors import QueueFull
from kvmem.engine.request import Event, Real, Request, RequestResult, SamplingParams
from kvmem.engine.traces import BLOCK_TOKENS, TraceRow

FIXED_LENGTH = SamplingParams(ignore_eos=True)
_Z90, _Z99 = 1.2815515655446004, 2.3263478740408408  # standard normal quantiles


@dataclasses.dataclass(frozen=True)
class LogNormal:
    """Lengths by their median and sigma of the logarithm."""

    median: Real
    sigma: Real

    @classmethod
    def from_quantile(cls, median: Real, value: Real, z: Real = _Z90) -> LogNormal:
        """Fitted to the median and to another quantile at standard normal deviate ``z``."""
        return cls(median, math.log(value / median) / z)

    def sample(self, rng: np.random.Generator, count: int, scale: Real = 1.0) -> np.ndarray:
        """``count`` integers, at least 1, with the median multiplied by ``scale``."""
        drawn = rng.lognormal(math.log(self.median * scale), self.sigma, count)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class TraceShape:
    """What the generator is fitted to.

    Attributes:
      rate: requests per second.
      cv: coefficient of variation of the Gamma-distributed inter-arrival times; 1 is Poisson.
      prompt, answer: lengths in tokens.
      hit_rate: share of prompt blocks seen before, with a cache that never evicts.
      batch_s: if positive, arrivals are rounded up to this grid, as in traces recorded in batches.
    """

    rate: Real
    cv: Real
    prompt: LogNormal
    answer: LogNormal
    hit_rate: Real = 0.0
    batch_s: Real = 0.0


PRESETS: dict[str, TraceShape] = {
    "azure_code": TraceShape(
        2.57, 13.2, LogNormal.from_quantile(1469, 5188), LogNormal.from_quantile(13, 251, _Z99)
    ),
    "azure_conversation": TraceShape(
        5.53, 1.09, LogNormal.from_quantile(1020, 2734), LogNormal.from_quantile(129, 424)
    ),
    "mooncake_conversation": TraceShape(
        3.40,
        1.0,
        LogNormal.from_quantile(6909, 27367),
        LogNormal.from_quantile(350, 1119, _Z99),
        hit_rate=0.366,
        batch_s=3.0,
    ),
    # Only means are known of this trace; a sigma of 1 and 0.5 is assumed for prompts and answers.
    "mooncake_synthetic": TraceShape(
        3.91,
        1.0,
        LogNormal(15325 / math.exp(0.5), 1.0),
        LogNormal(149 / math.exp(0.125), 0.5),
        hit_rate=0.64,
    ),
}


def generate(shape: TraceShape, count: int, seed: int, scale: Real = 1.0) -> list[TraceRow]:
    """A trace of ``count`` requests.

    Gamma inter-arrivals, log-normal lengths, and prefixes copied from earlier requests: each request, with a
    probability found by bisection to meet ``hit_rate``, starts with as many blocks of one earlier request as
    fit.

    Args:
      shape: what to be like.
      count: requests.
      seed: of numpy's generator; equal seeds give equal traces.
      scale: multiplies all lengths (and so shrinks prompts for small models).
    """
    rng = np.random.default_rng(seed)
    k = 1.0 / shape.cv**2
    gaps = rng.gamma(k, 1.0 / (shape.rate * k), count)
    arrivals = np.cumsum(gaps) - gaps[0]
    if shape.batch_s > 0:
        arrivals = np.ceil(arrivals / shape.batch_s) * shape.batch_s
    inputs = shape.prompt.sample(rng, count, scale)
    outputs = shape.answer.sample(rng, count, scale)
    lengths = -(-inputs // BLOCK_TOKENS)
    candidates = (rng.random((4, count)) * np.arange(count)).astype(np.int64)
    parents = candidates[np.argmax(lengths[candidates], axis=0), np.arange(count)]
    draws = rng.random(count)
    share = _share_for(shape.hit_rate, lengths, parents, draws)
    blocks: list[tuple[int, ...]] = []
    fresh = itertools.count()
    for i, length in enumerate(lengths.tolist()):
        prefix = blocks[parents[i]][:length] if i and draws[i] < share else ()
        blocks.append((*prefix, *itertools.islice(fresh, length - len(prefix))))
    rows = zip(arrivals.tolist(), inputs.tolist(), outputs.tolist(), blocks, strict=True)
    return [TraceRow(*row) for row in rows]


def _share_for(hit_rate: Real, lengths: np.ndarray, parents: np.ndarray, draws: np.ndarray) -> Real:
    """The probability of copying a prefix at which ``hit_rate`` of all blocks are copies, or 1 if none is
    enough.
    """
    copied = np.minimum(lengths, lengths[parents])
    copied[0] = 0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if copied[draws < middle].sum() < hit_rate * lengths.sum():
            low = middle
        else:
            high = middle
    return high


def block_hit_rate(rows: Iterable[TraceRow]) -> Real:
    """Share of prompt blocks that an earlier request had, with a cache that never evicts; nan without
    blocks.
    """
    seen: set[int] = set()
    hits = total = 0
    for row in rows:
        hits += sum(block in seen for block in row.blocks)
        total += len(row.blocks)
        seen.update(row.blocks)
    return hits / total if total else math.nan


def tokens_of(
    row: TraceRow, vocab_size: int, unique: int, *, block_tokens: int = BLOCK_TOKENS
) -> tuple[int, ...]:
    """Token ids for a row: equal block ids give equal tokens; a row without blocks gets tokens of its own."""
    if not row.blocks:
        rng = np.random.default_rng((1, unique))
        return tuple(rng.integers(1, vocab_size, row.input_tokens).tolist())
    parts = [np.random.default_rng((2, b)).integers(1, vocab_size, block_tokens) for b in row.blocks]
    return tuple(np.concatenate(parts)[: row.input_tokens].tolist())


def to_requests(
    rows: Sequence[TraceRow],
    *,
    vocab_size: int,
    max_prompt: int,
    max_new_tokens: int,
    shrink: int = 1,
    time_scale: Real = 1.0,
    sampling: SamplingParams = FIXED_LENGTH,
) -> list[Request]:
    """Requests that an engine can run.

    Args:
      rows: a trace.
      vocab_size: token ids are drawn from [1, vocab_size).
      max_prompt, max_new_tokens: longer prompts and answers are cut to these, in tokens after shrinking.
      shrink: divides lengths and the block size, so that a long-context trace keeps its prefix structure on a
        small model.
      time_scale: multiplies arrival times.
      sampling: of every request.
    """
    block = max(1, BLOCK_TOKENS // shrink)
    requests = []
    for i, row in enumerate(rows):
        length = max(1, min(max_prompt, row.input_tokens // shrink))
        small = dataclasses.replace(row, input_tokens=length, blocks=row.blocks[: -(-length // block)])
        answer = max(1, min(max_new_tokens, row.output_tokens // shrink))
        requests.append(
            Request(
                f"r{i:05d}",
                tokens_of(small, vocab_size, i, block_tokens=block),
                answer,
                sampling,
                arrival_s=row.arrival_s * time_scale,
                session=row.session,
            )
        )
    return requests


# Sessions


@dataclasses.dataclass(frozen=True)
class SessionShape:
    """A kind of conversation. Lengths are tokens, delays seconds between an answer and the next turn."""

    first: LogNormal
    turn: LogNormal
    answer: LogNormal
    delay: LogNormal
    turns: tuple[int, int]


# Assumed shapes, stated here and nowhere measured: an agent's prompt grows by tool results for 10-60 turns, a
# chat is short with long thinking pauses.
SESSIONS: dict[str, SessionShape] = {
    "agent": SessionShape(
        LogNormal(6000, 0.5), LogNormal(700, 1.0), LogNormal(180, 0.8), LogNormal(2, 0.8), (10, 60)
    ),
    "chat": SessionShape(
        LogNormal(300, 0.8), LogNormal(60, 0.8), LogNormal(220, 0.7), LogNormal(15, 0.7), (1, 8)
    ),
}


@dataclasses.dataclass(frozen=True)
class Turn:
    """New prompt tokens, the answer's length, and seconds to wait after the answer before it."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    delay_s: Real


@dataclasses.dataclass(frozen=True)
class Script:
    """One session: when it starts and its turns."""

    session: str
    start_s: Real
    turns: tuple[Turn, ...]


def scripts(
    shape: SessionShape,
    *,
    count: int,
    seed: int,
    vocab_size: int,
    max_tokens: int,
    rate: Real = 1.0,
    scale: Real = 1.0,
    time_scale: Real = 1.0,
    name: str = "s",
) -> list[Script]:
    """``count`` sessions with Poisson starts.

    Args:
      shape: the kind of session.
      count: sessions.
      seed: of numpy's generator.
      vocab_size: token ids are drawn from [1, vocab_size).
      max_tokens: a session ends before its prompt and answer would exceed this.
      rate: session starts per second.
      scale: multiplies lengths.
      time_scale: multiplies starts and delays.
      name: prefix of session ids.
    """
    rng = np.random.default_rng(seed)
    result = []
    starts = np.cumsum(rng.exponential(1.0 / rate, count)) * time_scale
    for i in range(count):
        turns: list[Turn] = []
        total = 0
        for t in range(int(rng.integers(shape.turns[0], shape.turns[1] + 1))):
            new = int((shape.turn if t else shape.first).sample(rng, 1, scale)[0])
            answer = int(shape.answer.sample(rng, 1, scale)[0])
            if total + new + answer > max_tokens:
                if turns:
                    break
                new, answer = max(1, max_tokens // 2), max(1, max_tokens // 4)
            delay = float(rng.lognormal(math.log(shape.delay.median), shape.delay.sigma)) * time_scale
            turns.append(Turn(tuple(rng.integers(1, vocab_size, new).tolist()), answer, delay if t else 0.0))
            total += new + answer
        result.append(Script(f"{name}{i}", float(starts[i]), tuple(turns)))
    return result


# Drivers


@runtime_checkable
class Driver(Protocol):
    """Feeds a server."""

    def due(self, now: Real) -> list[Request]:
        """Requests to submit now."""

    def finished(self, result: RequestResult, now: Real) -> None:
        """A submitted request ended."""

    def next_s(self) -> Real | None:
        """When the next request will be due if nothing finishes first; None if never."""


class ClosedLoop:
    """Keeps ``concurrency`` requests in flight until all have run. Arrival is the moment of submission."""

    def __init__(self, requests: Iterable[Request], concurrency: int):
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency} must be at least 1")
        self._requests = iter(requests)
        self._room = concurrency

    def due(self, now: Real) -> list[Request]:
        batch = list(itertools.islice(self._requests, self._room))
        self._room -= len(batch)
        return [dataclasses.replace(request, arrival_s=now) for request in batch]

    def finished(self, result: RequestResult, now: Real) -> None:
        del result, now
        self._room += 1

    def next_s(self) -> Real | None:
        return None


class OpenLoop:
    """Submits each request at its arrival time."""

    def __init__(self, requests: Iterable[Request]):
        self._requests = sorted(requests, key=lambda r: r.arrival_s)
        self._next = 0

    def due(self, now: Real) -> list[Request]:
        start = self._next
        while self._next < len(self._requests) and self._requests[self._next].arrival_s <= now:
            self._next += 1
        return self._requests[start : self._next]

    def finished(self, result: RequestResult, now: Real) -> None:
        del result, now

    def next_s(self) -> Real | None:
        return self._requests[self._next].arrival_s if self._next < len(self._requests) else None


class Sessions:
    """Runs scripts: a turn's prompt is the whole conversation so far, the server's own answers included."""

    def __init__(self, sessions: Iterable[Script], sampling: SamplingParams = FIXED_LENGTH):
        self._sampling = sampling
        self._scripts: dict[str, Script] = {}
        self._history: dict[str, tuple[int, ...]] = {}
        self._due: list[tuple[Real, str, int]] = []
        for script in sessions:
            self._scripts[script.session] = script
            heapq.heappush(self._due, (script.start_s, script.session, 0))

    def due(self, now: Real) -> list[Request]:
        ready = []
        while self._due and self._due[0][0] <= now:
            due_s, session, turn = heapq.heappop(self._due)
            script = self._scripts[session].turns[turn]
            prompt = (*self._history.get(session, ()), *script.tokens)
            self._history[session] = prompt
            request = Request(
                f"{session}.{turn}", prompt, script.max_new_tokens, self._sampling, due_s, session
            )
            ready.append(request)
        return ready

    def finished(self, result: RequestResult, now: Real) -> None:
        session, _, turn = result.request_id.rpartition(".")
        turns = self._scripts[session].turns
        if not result.ok or int(turn) + 1 >= len(turns):
            return
        self._history[session] += result.tokens
        heapq.heappush(self._due, (now + turns[int(turn) + 1].delay_s, session, int(turn) + 1))

    def next_s(self) -> Real | None:
        return self._due[0][0] if self._due else None


@runtime_checkable
class Server(Protocol):
    """What a driver can feed: an Engine, a Cluster of them, or the simulator."""

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[Event]: ...

    def now(self) -> Real: ...

    def wait(self, until_s: Real) -> None: ...

    @property
    def idle(self) -> bool: ...


def drive(server: Server, driver: Driver) -> list[RequestResult]:
    """Runs a driver to its end and returns the results in the order in which requests ended.

    A request that a full queue refuses ends as ``refused``; other refusals propagate.
    """
    results: list[RequestResult] = []

    def ended(result: RequestResult) -> None:
        results.append(result)
        driver.finished(result, server.now())

    while True:
        due = driver.due(server.now())
        for request in due:
            try:
                server.submit(request)
            except QueueFull as error:
                now = server.now()
                ended(
                    RequestResult(
                        request.request_id,
                        (),
                        "refused",
                        prompt_tokens=len(request.prompt_tokens),
                        error=str(error),
                        arrival_s=request.arrival_s,
                        finished_s=now,
                        session=request.session,
                    )
                )
        if server.idle:
            upcoming = driver.next_s()
            if not due and upcoming is None:
                return results
            if not due and upcoming is not None:
                server.wait(upcoming)
            continue
        for event in server.step():
            if event.result is not None:
                ended(event.result)
