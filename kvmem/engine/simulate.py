"""The engine without a device: the same scheduler, prefix tree and router on a simulated clock.

For questions of policy at sizes that no CPU can serve: traces of thousands of long prompts over several
replicas. A step takes as long as the cost model says; the two pools of a replica run side by side, so it is
the longer of prefill and decode. Page counts are exact, tokens are not computed. Figures from here are
labelled as simulated.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from kvmem.engine.fingerprint import PoolFingerprint
from kvmem.engine.prefix import Node, PrefixTree
from kvmem.engine.request import EngineConfig, Event, FinishReason, Real, Request, RequestResult
from kvmem.engine.router import Load
from kvmem.engine.scheduler import Phase, Scheduler
from kvmem.engine.scheduler import Sequence as Row


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds of device time.

    Attributes:
      decode_s: a decode step of one row. row_s: each further row. prefill_s: each prompt token.
      token_scale: real tokens that one simulated token stands for; multiplies everything.
    """

    decode_s: Real = 8.0e-3
    row_s: Real = 0.34e-3
    prefill_s: Real = 1 / 10160
    token_scale: Real = 1

    def step_s(self, prefill_tokens: int, decode_rows: int) -> float:
        decode = self.decode_s + self.row_s * (decode_rows - 1) if decode_rows else 0.0
        return float(self.token_scale * max(decode, self.prefill_s * prefill_tokens))


# Linear through published points: Kimi's FP8 decode, 125 tokens/s for 1 row and 2,192 for 64, and the prefill
# rate of GLM's FP8 weights (Kimi's was not published).
PUBLISHED = CostModel()


class SimulatedEngine:
    """One replica: prefill pool, decode pool, prefix cache; see Engine, whose interface it has."""

    def __init__(self, config: EngineConfig, cost: CostModel = PUBLISHED, max_context: int = 2**31):
        self.config = config
        self.cost = cost
        self.time = 0.0
        self.scheduler = Scheduler(config, max_context, self._take)
        self.tree = PrefixTree(config.page_size)
        self.results: list[RequestResult] = []
        self.counters: collections.Counter[str] = collections.Counter()
        self._free = list(range(1, config.prefill_pages))
        self._held: dict[Row, tuple[list[Node], list[int]]] = {}

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    def now(self) -> Real:
        return self.time

    def wait(self, until_s: Real) -> None:
        self.time = max(self.time, float(until_s))

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def load(self) -> Load:
        return Load.of(self.scheduler)

    @property
    def fingerprints(self) -> Mapping[str, PoolFingerprint]:
        """None: nothing here changes an answer."""
        return {}

    def cached(self, request: Request) -> int:
        return len(self.tree.match(request.prompt_tokens, request.tenant)) * self.config.page_size

    def _take(self, sequence: Row) -> int | None:
        request = sequence.request
        path = self.tree.match(request.prompt_tokens, request.tenant) if self.config.prefix_cache else []
        new = -(-sequence.prompt_length // self.config.page_size) - len(path)
        self.tree.lock(path)
        if new > len(self._free) + self.tree.evictable:
            self.tree.unlock(path)
            return None
        if new > len(self._free):
            evicted = self.tree.evict(new - len(self._free))
            self.counters["evicted_pages"] += len(evicted)
            self._free += evicted
        own, self._free = self._free[len(self._free) - new :], self._free[: len(self._free) - new]
        self._held[sequence] = (path, own)
        return len(path) * self.config.page_size

    def _give_back(self, sequence: Row) -> None:
        path, own = self._held.pop(sequence, ([], []))
        self.tree.unlock(path)
        self._free += own

    def step(self) -> list[Event]:
        """One step of both pools; its tokens are published at its end."""
        events: list[Event] = []
        plan = self.scheduler.plan(self.time)
        for sequence, reason in plan.expire:
            self._end(sequence, "cancelled" if reason == "cancelled" else "deadline", events)
        for sequence in plan.transfer:
            self._give_back(sequence)
        self.counters["retractions"] += len(plan.retract)
        tokens = sum(chunk.count for chunk in plan.prefill)
        self.counters["prefill_tokens"] += tokens
        self.counters["steps"] += 1
        self.time += self.cost.step_s(tokens, len(plan.decode))
        for chunk in plan.prefill:
            if chunk.last:
                self._register(chunk.sequence)
                self._publish(chunk.sequence, events)
        for sequence in plan.decode:
            self._publish(sequence, events)
        return events

    def _register(self, sequence: Row) -> None:
        """Gives the whole pages of a finished prompt to the prefix tree."""
        path, own = self._held[sequence]
        whole = sequence.prompt_length // self.config.page_size
        if self.config.prefix_cache and whole > len(path):
            pages = [*(node.page for node in path), *own][:whole]
            taken = self.tree.insert(
                sequence.request.prompt_tokens, [(p, 1) for p in pages], sequence.request.tenant
            )
            self.tree.lock(taken)
            kept = {node.page for node in taken}
            self._held[sequence] = ([*path, *taken], [page for page in own if page not in kept])

    def _publish(self, sequence: Row, events: list[Event]) -> None:
        sequence.position += 1
        sequence.tokens.append(0)
        if sequence.first_token_s is None:
            sequence.first_token_s = self.time
        if sequence.position >= sequence.request.max_new_tokens:
            self.scheduler.finish(sequence)
            self._end(sequence, "length", events)
        elif sequence.phase is Phase.PREFILLED:
            self.scheduler.prefilled(sequence)

    def _end(self, sequence: Row, reason: FinishReason, events: list[Event]) -> None:
        self._give_back(sequence)
        request = sequence.request
        result = RequestResult(
            request_id=request.request_id,
            tokens=tuple(sequence.tokens),
            finish_reason=reason,
            prompt_tokens=sequence.prompt_length,
            cached_tokens=sequence.cached,
            arrival_s=request.arrival_s,
            admitted_s=sequence.admitted_s,
            first_token_s=sequence.first_token_s,
            finished_s=self.time,
            retractions=sequence.retractions,
            session=request.session,
        )
        self.results.append(result)
        events.append(Event("finished", request.request_id, result=result))


def spread(placements: Sequence[int]) -> float:
    """The busiest replica's share over the mean: 1 is even."""
    return max(placements) / (sum(placements) / len(placements)) if sum(placements) else 1.0
