"""The router: which replica serves a request. Host only; replicas are engines or simulators.

``weighed`` scores each replica by what the request would cost there: its uncached prompt tokens, the prefill
work already queued, the expected answer under the current decode load, and a penalty that grows as free
memory runs out. Sessions stay with their replica unless another is better by more than ``affinity`` tokens,
or theirs is full.
Baselines: ``round_robin``, ``random``, ``least_queue``, ``prefix``.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from kvmem.engine import fingerprint
from kvmem.engine.errors import QueueFull
from kvmem.engine.fingerprint import PoolFingerprint
from kvmem.engine.request import Event, Real, Request
from kvmem.engine.scheduler import Phase, Scheduler

POLICIES = ("weighed", "round_robin", "random", "least_queue", "prefix")


@dataclasses.dataclass(frozen=True)
class Load:
    """What a replica tells the router.

    Attributes:
      queue_depth: requests not yet admitted.
      queued_tokens: prompt tokens not yet computed.
      running: requests that decode.
      free_tokens: free decode cache, in tokens.
      total_tokens: all decode cache, in tokens.
    """

    queue_depth: int
    queued_tokens: int
    running: int
    free_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> Load:
        """The load of the replica, an engine or a simulator, that this scheduler plans."""
        live = scheduler.live.values()
        config = scheduler.config
        return cls(
            queue_depth=scheduler.queue_depth,
            queued_tokens=sum(s.prompt_length - s.computed for s in live if s.phase is not Phase.DECODE),
            running=sum(s.phase is Phase.DECODE for s in live),
            free_tokens=scheduler.decode_free * config.page_size,
            total_tokens=(config.decode_pages - 1) * config.page_size,
        )


@runtime_checkable
class Replica(Protocol):
    """An engine behind the router."""

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[Event]: ...

    def cancel(self, request_id: str) -> bool: ...

    def load(self) -> Load: ...

    def cached(self, request: Request) -> int:
        """Prompt tokens that this replica would not have to compute."""

    @property
    def fingerprints(self) -> Mapping[str, PoolFingerprint]:
        """What each of its pools is made of; replicas behind one router must agree."""

    def now(self) -> Real: ...

    def wait(self, until_s: Real) -> None: ...

    @property
    def idle(self) -> bool: ...


class Router:
    """Chooses a replica for each request.

    Args:
      policy: one of POLICIES.
      affinity: prompt tokens by which another replica must be better before a session moves.
      seed: of the ``random`` policy.
    """

    def __init__(self, policy: str = "weighed", *, affinity: int = 2048, seed: int = 0):
        if policy not in POLICIES:
            raise ValueError(f"unknown routing policy {policy!r}; known: {', '.join(POLICIES)}")
        self.policy = policy
        self.affinity = affinity
        self.moved = 0
        self._turn = 0
        self._rng = random.Random(seed)
        self._home: dict[str, int] = {}

    def order(self, request: Request, replicas: Sequence[Replica]) -> list[int]:
        """Replicas to try, the best first."""
        count = len(replicas)
        if self.policy == "round_robin":
            self._turn += 1
            return [(self._turn - 1 + i) % count for i in range(count)]
        if self.policy == "random":
            return self._rng.sample(range(count), count)
        costs = [self._cost(request, replica) for replica in replicas]
        home = self._home.get(request.session) if request.session is not None else None
        if self.policy == "weighed" and home is not None and home < count:
            costs[home] -= self.affinity
        return sorted(range(count), key=lambda i: (costs[i], i))

    def _cost(self, request: Request, replica: Replica) -> Real:
        """Tokens of work before and beside this request, in units of prefilled tokens."""
        load = replica.load()
        if self.policy == "least_queue":
            return load.queued_tokens + load.running
        cached = replica.cached(request)
        if self.policy == "prefix":
            return -cached + 1e-6 * load.queued_tokens
        prompt = len(request.prompt_tokens)
        need = prompt + request.max_new_tokens
        shortage = max(0, need - load.free_tokens)
        crowding = load.running * request.max_new_tokens / 64
        return prompt - cached + load.queued_tokens + crowding + 4.0 * shortage

    def placed(self, request: Request, replica: int) -> None:
        """Remembers where a session's request went."""
        if request.session is not None:
            self.moved += self._home.get(request.session, replica) != replica
            self._home[request.session] = replica


class Cluster:
    """Replicas behind one router, with the interface of a single one.

    All must be made of the same: a request must not be answered differently for where it went. That is
    compared here and again whenever a replica is given a request. Engines are warmed up before they come in.

    Raises:
      FingerprintMismatch: a replica's pool differs from the first one's, with the fields that do.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router):
        if not replicas:
            raise ValueError("a cluster needs at least one replica")
        self.replicas = list(replicas)
        self.router = router
        self.placements: collections.Counter[int] = collections.Counter()
        self._where: dict[str, int] = {}
        self._agreed = dict(self.replicas[0].fingerprints)
        for index in range(len(self.replicas)):
            self._require_agreement("start", index)
        self.wait(self.now())  # their clocks started apart

    def _require_agreement(self, when: str, index: int) -> None:
        for pool, theirs in self.replicas[index].fingerprints.items():
            fingerprint.require_equal(f"{when}, {pool} pool of replica {index}", theirs, self._agreed[pool])

    def submit(self, request: Request) -> None:
        """Gives the request to the best replica with room.

        Raises QueueFull if no queue has any, and FingerprintMismatch if the best has drifted.
        """
        last: QueueFull | None = None
        for index in self.router.order(request, self.replicas):
            self._require_agreement("hand-over", index)
            try:
                self._give(index, request)
            except QueueFull as error:
                last = error
                continue
            self.router.placed(request, index)
            self.placements[index] += 1
            self._where[request.request_id] = index
            return
        assert last is not None
        raise QueueFull(
            f"every one of {len(self.replicas)} replicas is full; the last said: {last}"
        ) from last

    def _give(self, index: int, request: Request) -> None:
        self.replicas[index].submit(request)

    def cancel(self, request_id: str) -> bool:
        index = self._where.get(request_id)
        return index is not None and self.replicas[index].cancel(request_id)

    def step(self) -> list[Event]:
        """One step of every replica that has work. A result names its replica."""
        return [
            event
            for i, replica in enumerate(self.replicas)
            if not replica.idle
            for event in self._step_one(i)
        ]

    def _step_one(self, index: int) -> list[Event]:
        events = self.replicas[index].step()
        for at, event in enumerate(events):
            if event.result is not None:
                self._where.pop(event.request_id, None)
                result = dataclasses.replace(event.result, replica=index)
                events[at] = event._replace(result=result)
        return events

    def now(self) -> Real:
        return max(replica.now() for replica in self.replicas)

    def wait(self, until_s: Real) -> None:
        for replica in self.replicas:
            replica.wait(until_s)

    @property
    def idle(self) -> bool:
        return all(replica.idle for replica in self.replicas)


class BusyClock:
    """Processor seconds of this process inside ``with clock:``: an engine's time is that of its own steps.

    All threads count, the device's on a CPU too; other processes do not.
    """

    def __init__(self) -> None:
        self._spent = 0.0
        self._since: float | None = None

    def __call__(self) -> Real:
        return self._spent + (0.0 if self._since is None else time.process_time() - self._since)

    def __enter__(self) -> None:
        self._since = time.process_time()

    def __exit__(self, *raised: object) -> None:
        self._spent, self._since = self(), None


class SideBySide(Cluster):
    """Replicas whose clocks run apart, as machines' would: the one furthest behind moves next.

    For simulators, and for engines that take turns in one process: ``clocks`` are then theirs.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, clocks: Sequence[BusyClock] = ()):
        super().__init__(replicas, router)
        self._clocks = list(clocks) or [BusyClock() for _ in replicas]

    def _behind(self) -> int | None:
        busy = [(r.now(), i) for i, r in enumerate(self.replicas) if not r.idle]
        return min(busy)[1] if busy else None

    def _give(self, index: int, request: Request) -> None:
        replica = self.replicas[index]
        if replica.idle:  # it has been waiting until now
            replica.wait(request.arrival_s)
        super()._give(index, request)

    def now(self) -> Real:
        behind = self._behind()
        return max(r.now() for r in self.replicas) if behind is None else self.replicas[behind].now()

    def step(self) -> list[Event]:
        behind = self._behind()
        if behind is None:
            return []
        with self._clocks[behind]:
            return self._step_one(behind)
