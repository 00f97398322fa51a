"""The engine: the one object that changes. It carries out the scheduler's plans on two pools.

A step of the engine plans, launches, and then reads what the step *before* returned: the host is one step
ahead, the device never waits for it, and yet no token is published before the status of its own step was
read. A row that fails is dead on the device at once (``PoolState.cause_B``), so the step already launched
drops it too.

Fault injection: ``inject(fn, pool)`` hands ``fn`` the state of a pool (``"prefill"`` or ``"decode"``, a
``step.PoolState``) before the next launch and takes its return value in exchange; with ``"transfer"``, ``fn``
gets each ``transfer.Order`` before its bytes move, and may change it, delay it (``transfers.Late``) or raise
TransferFailed.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from kvmem.cache import integrity
from kvmem.cache.integrity import IntegrityReport, Kind
from kvmem.engine import fingerprint, metrics, rows, step, workload
from kvmem.engine.errors import FingerprintMismatch, RequestError, StepInterrupted, TransferFailed
from kvmem.engine.fingerprint import PoolFingerprint
from kvmem.engine.metrics import Incident
from kvmem.engine.pools import POOLS, CompileCounter, DevicePools, Fault, Pool
from kvmem.engine.request import EngineConfig, Event, FinishReason, Real, Request, RequestResult
from kvmem.engine.reuse import PrefillBooks
from kvmem.engine.router import Load
from kvmem.engine.scheduler import Chunk, Phase, Plan, Scheduler
from kvmem.engine.scheduler import Sequence as Row
from kvmem.engine.step import Cause, PoolState, StepReport
from kvmem.engine.transfers import Transfers
from kvmem.models.config import ModelConfig


@dataclasses.dataclass
class _Flight:
    """A launched step whose report is not read yet. ``free`` is what the host expects the pool to have
    left.
    """

    pool: Pool
    report: StepReport
    rows: list[tuple[Row, int, int, bool]]  # sequence, its attempt, its row, whether a token comes out
    free: int | None


class Engine:
    """Serves requests with one prefill pool and one decode pool.

    Args:
      model: the model's configuration.
      params: parameters by phase, as ``EngineConfig.prefill.weights`` and ``.decode.weights`` hold them.
      config: sizes, formats and policies.
      meshes: by phase, each of one axis ``tp`` or None for the first device; the two may be of different
        devices and sizes. ``param_specs`` then gives the partition specs by phase.
      detokenize: token ids to text; needed for stop strings.
      clock: seconds; the engine counts from its start.
      salt: of the prefix tree.

    Raises:
      FingerprintMismatch: the pools differ where phases must agree.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Mapping[str, Any],
        config: EngineConfig,
        meshes: Mapping[str, Mesh | None] | None = None,
        *,
        param_specs: Mapping[str, Any] | None = None,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        clock: Callable[[], Real] = time.perf_counter,
        salt: str = "",
    ):
        self.model = model
        self.config = config
        self.pools = DevicePools(model, params, config, meshes, param_specs)
        self.transfers = Transfers(self.pools, config)
        self.books = PrefillBooks(config, salt)
        self.scheduler = Scheduler(config, model.max_context, lambda sequence: self.books.take(sequence))
        self.incidents: list[Incident] = []
        self.results: list[RequestResult] = []
        self.counters: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._salt = salt
        self._detokenize = detokenize
        self._clock = clock
        self._start = clock()
        self._skipped = 0.0
        self._agreed = dict(self.pools.fingerprints)
        self._end_ids = frozenset(model.eos_ids)
        self._flights: list[_Flight] = []
        self._moved: dict[Row, rows.RowBytes] = {}
        self._interrupted = False
        self._distrust = False  # the host's page counts may be wrong: ask the device before the next launch
        self._releases: dict[Pool, set[int]] = {"prefill": set(), "decode": set()}
        self._faults: dict[str, list[Fault]] = collections.defaultdict(list)
        self._compiles = CompileCounter()
        self._compiles_warm = 0

    # The outside

    def submit(self, request: Request) -> None:
        """Queues a request. Raises RequestError, PromptTooLong or QueueFull; nothing is queued then."""
        request.validate(self.model.vocab_size)
        if request.sampling.stop_strings and self._detokenize is None:
            raise RequestError(f"request {request.request_id!r}: stop strings need a detokenizer")
        self.scheduler.submit(request)

    def cancel(self, request_id: str) -> bool:
        """Ends a live request at the next step; False if there is none of that name."""
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Event]:
        """Plans and launches one step, reads the one before, and returns what happened to requests.

        Raises:
          StepInterrupted: an exception, such as that of a signal, has left an earlier step half done.
        """
        if self._interrupted:
            raise StepInterrupted("a step was interrupted after it was planned; make a new engine to go on")
        begun, busy = time.perf_counter(), time.thread_time()
        events: list[Event] = []
        self._strike()
        self._interrupted = True
        self._arrivals(events)
        plan = self.scheduler.plan(self.now())
        planned, launching = time.perf_counter(), time.thread_time()
        launched = self._carry_out(plan, events)
        self.seconds["host_launch"] += time.thread_time() - launching
        self.seconds["plan"] += planned - begun
        self.seconds["launch"] += time.perf_counter() - planned
        if self.config.overlap:
            unread, self._flights = self._flights, launched
        else:
            unread, self._flights = launched, []
        for flight in unread:
            self._collect(flight, events)
        for sequence in plan.retract:
            self._settle(sequence, events)
        self._flush_releases()
        if self._distrust:
            self._resync()
        self._interrupted = False
        self.counters["steps"] += 1
        self.seconds["total"] += time.perf_counter() - begun
        self.seconds["host"] += time.thread_time() - busy
        return events

    def run(self, requests: Iterable[Request]) -> list[RequestResult]:
        """Serves all requests, each from its arrival on, and returns the results in the order of the
        requests.
        """
        start = self.now()
        requests = [dataclasses.replace(r, arrival_s=start + r.arrival_s) for r in requests]
        results = {r.request_id: r for r in workload.drive(self, workload.OpenLoop(requests))}
        return [results[request.request_id] for request in requests]

    def inject(self, fault: Fault, pool: str = "decode") -> None:
        """Applies ``fault`` to the named state once, before the next launch, or to every ``"transfer"``.

        ``fault`` receives and returns a PoolState, or an Order for ``"transfer"``. For tests and experiments.
        """
        if pool not in (*POOLS, "transfer"):
            raise ValueError(f"unknown pool {pool!r}; known: prefill, decode, transfer")
        self._faults[pool].append(fault)

    def row_of(self, request_id: str) -> tuple[str, int]:
        """The pool and row in which a request is now: ("", -1) if in none."""
        sequence = self.scheduler.live.get(request_id)
        if sequence is not None and sequence.phase in (Phase.MOVING, Phase.DECODE):
            return "decode", sequence.decode_row
        if sequence is not None and sequence.phase in (Phase.PREFILL, Phase.PREFILLED, Phase.READY):
            return "prefill", sequence.prefill_row
        return "", -1

    def state(self, pool: Pool) -> PoolState:
        """The device state of a pool, to look at; the next step consumes its buffers."""
        return self.pools.states[pool]

    def now(self) -> Real:
        """Seconds since the engine started, idle time that ``wait`` skipped included."""
        return self._clock() - self._start + self._skipped

    def wait(self, until_s: Real) -> None:
        """Called when idle: skips the clock forward instead of sleeping, so that replays take no idle
        time.
        """
        self._skipped += max(0.0, until_s - self.now())

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._flights

    def load(self) -> Load:
        """For the router."""
        return Load.of(self.scheduler)

    @property
    def fingerprints(self) -> Mapping[str, PoolFingerprint]:
        """What each pool is made of."""
        return self.pools.fingerprints

    def cached(self, request: Request) -> int:
        """Prompt tokens that the prefix cache holds now."""
        return len(self.books.reusable(request)) * self.config.page_size

    @property
    def integrity_coverage(self) -> dict[str, dict[str, dict[str, str]]]:
        """What each pool's detector covers, for the record of a run: see docs/integrity.md."""
        return {pool: integrity.coverage(self.config.integrity) for pool in POOLS}

    @property
    def memory_bytes(self) -> int:
        """Weights and pools. Leaves that both phases share are counted once."""
        return self.pools.nbytes

    @property
    def recompilations(self) -> int:
        """Programs compiled in this process since ``warm_up``; all of them if it was not called."""
        return self._compiles.count - self._compiles_warm

    def metrics(self, bound: metrics.LatencyBound | None = None, **rest: Any) -> dict[str, Real]:
        """Flat name -> number; ``metrics.to_prometheus`` renders it. See ``metrics.summarise`` for
        ``rest``.
        """
        out = metrics.summarise(self.results, bound=bound, memory_bytes=self.memory_bytes, **rest)
        steps = max(1, self.counters["steps"])
        out |= {
            "recompilations_after_warmup": self.recompilations,
            "integrity.mismatches": self.counters["integrity"],
            "integrity.not_run": self.counters["check_not_run"],
            "integrity.page_checks": self.counters["page_checks"],
            "refused_holds": self.counters["refused"],
            "accounting_drift": self.counters["drift"],
            "steps": self.counters["steps"],
            "host_ms_per_step": 1e3 * self.seconds["host"] / steps,
            "host_launch_ms_per_step": 1e3 * self.seconds["host_launch"] / steps,
            "step_ms.total": 1e3 * self.seconds["total"] / steps,
        }
        parts = {k: v for k, v in self.seconds.items() if k not in ("host", "host_launch", "total")}
        out |= {f"step_ms.{name}": 1e3 * seconds / steps for name, seconds in parts.items()}
        out |= {f"aborts.{c.name.lower()}": self.counters[f"abort.{c.name}"] for c in Cause if c}
        out |= {
            f"mismatches.{k}": self.counters[f"mismatch.{k}"] for k in (k.name.lower() for k in Kind if k)
        }
        out |= {f"phase.{p.value}": len(self.scheduler.rows(p)) for p in Phase if p is not Phase.DONE}
        out |= {f"prefill_pages.{k}": v for k, v in self.pools.counts("prefill").items()}
        out |= {f"decode_pages.{k}": v for k, v in self.pools.counts("decode").items()}
        out |= {"prefix_pages": len(self.books.tree), "transfers": self.counters["transfers"]}
        out |= {"transfers_open": len(self.transfers), "transfers_late": self.transfers.late}
        reuse = ("evicted_pages", "widened_pages", "recomputed_tokens", "refused_tokens")
        out |= {name: self.books.counters[name] for name in reuse}
        return out

    def warm_up(self) -> None:
        """Compiles every program that serving needs, on throw-away values; ``recompilations`` counts from
        here.
        """
        if not self.idle:
            raise RuntimeError("warm_up needs an idle engine")
        self.pools.warm_up()
        self.books = PrefillBooks(self.config, self._salt)
        self._compiles_warm = self._compiles.count
        self._start, self._skipped = self._clock(), 0.0

    # Launching

    def _strike(self) -> None:
        for pool in POOLS:
            faults, self._faults[pool] = self._faults[pool], []
            for fault in faults:
                self.pools.states[pool] = fault(self.pools.states[pool])

    def _carry_out(self, plan: Plan, events: list[Event]) -> list[_Flight]:
        for sequence, reason in plan.expire:
            self._vacate(sequence)
            self._end(sequence, "cancelled" if reason == "cancelled" else "deadline", reason, events)
        self._flush_releases()
        for sequence in plan.retract:
            self._moved[sequence] = self.pools.move_out(sequence.decode_row)
            sequence.decode_row = -1
            self.counters["retractions"] += 1
        for sequence in plan.resume:
            token = sequence.tokens[sequence.position - 1]
            sampling = sequence.request.sampling
            self.pools.move_in(sequence.decode_row, token, sampling, self._moved.pop(sequence))
        for sequence in plan.transfer:
            self._transfer(sequence, events)
        self._flush_releases()
        self._flush_drops()
        for sequence in plan.admit:
            tenure = self.books.tenure(sequence)
            sampling = sequence.request.sampling
            self.pools.admit(sequence.prefill_row, sampling, tenure.reused, tenure.pages)
        launched = []
        if plan.prefill:
            launched.append(self._launch_prefill(plan.prefill))
        decode = [s for s in plan.decode if s.phase is Phase.DECODE]
        if decode:
            launched.append(self._launch_decode(decode))
        return launched

    def _launch_prefill(self, chunks: list[Chunk]) -> _Flight:
        work = [
            (c.sequence.prefill_row, c.sequence.request.prompt_tokens[c.start : c.start + c.count])
            for c in chunks
        ]
        report = self.pools.prefill(work, max(c.start + c.count for c in chunks))
        self.counters["prefill_tokens"] += sum(c.count for c in chunks)
        entries = [(c.sequence, c.sequence.attempt, c.sequence.prefill_row, c.last) for c in chunks]
        return _Flight("prefill", report, entries, None if self._distrust else self.books.free)

    def _launch_decode(self, sequences: list[Row]) -> _Flight:
        report = self.pools.decode([s.decode_row for s in sequences], max(s.length for s in sequences))
        self.counters["decode_rows"] += len(sequences)
        entries = [(s, s.attempt, s.decode_row, True) for s in sequences]
        return _Flight("decode", report, entries, None if self._distrust else self.scheduler.decode_free)

    def _arrivals(self, events: list[Event]) -> None:
        """Lets requests decode whose bytes have arrived, and fails those whose lease is over."""
        for sequence, why in self.transfers.poll(self.now()):
            if why:
                self._fail(sequence, "transfer", Cause.TRANSFER, None, events, why)
            else:
                self.scheduler.landed(sequence)
                self.counters["transfers"] += 1

    def _transfer(self, sequence: Row, events: list[Event]) -> None:
        """Begins to move a prefilled request into its decode row. What fails here fails this request only."""
        begun = time.perf_counter()
        try:
            fingerprint.require_equal(
                "hand-over to decode", self.pools.fingerprints["prefill"], self._agreed["prefill"]
            )
            done = self.transfers.begin(sequence, self.now(), self._faults["transfer"])
            self._release_prefill(sequence)
            if done:
                self.counters["transfers"] += 1
            else:
                self.scheduler.moving(sequence)
        except (TransferFailed, FingerprintMismatch) as error:
            self._fail(sequence, "transfer", Cause.TRANSFER, None, events, str(error))
        self.seconds["transfer"] += time.perf_counter() - begun

    def _release_prefill(self, sequence: Row) -> None:
        """Gives a prefill row back; pages that the tree holds stay."""
        if self.books.give_back(sequence):
            self._releases["prefill"].add(sequence.prefill_row)

    def _vacate(self, sequence: Row) -> None:
        """Gives back whatever a sequence held; called after the scheduler has let it go."""
        self._release_prefill(sequence)
        self.transfers.abandon(sequence)
        self._moved.pop(sequence, None)
        if sequence.decode_row >= 0:
            self._releases["decode"].add(sequence.decode_row)
            sequence.decode_row = -1

    def _flush_releases(self) -> None:
        for pool, waiting in self._releases.items():
            if waiting:
                self.pools.release(pool, waiting)
                waiting.clear()

    def _flush_drops(self) -> None:
        self.pools.hold("drop", self.books.drops)
        self.books.drops = []

    # Reading

    def _collect(self, flight: _Flight, events: list[Event]) -> None:
        """Reads one step's report: publishes tokens of rows that passed, fails the others."""
        begun = time.perf_counter()
        report = flight.report
        outcome = step.read(report)
        read = time.perf_counter()
        self.seconds["device_wait"] += read - begun
        now = self.now()
        self.counters["page_checks"] += outcome.page_checks
        self.counters["refused"] += outcome.refused
        drifted = outcome.refused > 0 or (flight.free is not None and outcome.free != flight.free)
        failed = []
        for sequence, attempt, row, last in flight.rows:
            if sequence.phase is Phase.DONE or sequence.attempt != attempt:
                continue
            if not outcome.ran[row]:
                failed.append((sequence, row))
            elif last:
                if flight.pool == "prefill":
                    self._finished_prefill(sequence, row, report)
                self._publish(sequence, outcome.token[row], outcome.logprob[row], now, events)
        for sequence, row in failed:
            self._fail(sequence, flight.pool, Cause(outcome.cause[row]), (report.check, row), events)
        if drifted and not self._distrust:
            self.counters["drift"] += 1
            self._distrust = True
        self.seconds["publish"] += time.perf_counter() - read

    def _finished_prefill(self, sequence: Row, row: int, report: StepReport) -> None:
        """Registers the whole pages of a finished prompt with the prefix tree."""
        if not self.books.wants(sequence):
            return
        assert report.promised is not None
        whole = sequence.prompt_length // self.config.page_size
        page_BM, generation_BM = jax.device_get((report.promised.page_BM, report.promised.generation_BM))
        pages = list(zip(page_BM[row, :whole].tolist(), generation_BM[row, :whole].tolist(), strict=True))
        self.pools.hold("retain", self.books.register(sequence, pages))

    def _answered(self, sequence: Row) -> None:
        """An answer has ended well: what the prefix cache does with its pages is the reuse policy's."""
        request = sequence.request
        # The last token was never fed, so the decode pool holds one less.
        tokens = (*request.prompt_tokens, *sequence.tokens[:-1])
        if sequence.phase is Phase.DECODE:
            first, count = self.books.to_widen(request, tokens)
            if count:
                self._flush_drops()
                pages = self.pools.widen(sequence.decode_row, first, count)
                self.pools.hold("retain", self.books.widened(request, tokens, first, count, pages))
                self.pools.release("prefill", [self.config.prefill_rows])
        self.books.answered(request, tokens)

    def _publish(self, sequence: Row, token: int, logprob: float, now: Real, events: list[Event]) -> None:
        """Publishes a token whose step was read and found good, and ends the request if it is its last."""
        sequence.position += 1
        if sequence.position <= sequence.replay:
            if sequence.tokens[sequence.position - 1] != token:
                self.scheduler.finish(sequence)
                self._vacate(sequence)
                why = f"the retry's token {sequence.position} is not the one already published"
                self._end(sequence, "error", why, events)
                return
        else:
            sequence.tokens.append(token)
            if sequence.request.sampling.logprobs:
                sequence.logprobs.append(logprob)
            sequence.first_token_s = now if sequence.first_token_s is None else sequence.first_token_s
            events.append(Event("token", sequence.request.request_id, token=token))
            self.counters["tokens"] += 1
        reason = self._stopped(sequence, token)
        if reason is not None:
            self._answered(sequence)
            self.scheduler.finish(sequence)
            self._vacate(sequence)
            self._end(sequence, reason, "", events)
        elif sequence.phase is Phase.PREFILLED:
            self.scheduler.prefilled(sequence)

    def _stopped(self, sequence: Row, token: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        if sequence.position < sequence.replay:
            return None
        if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self._end_ids):
            return "stop"
        if sampling.stop_strings and self._detokenize is not None:
            # A token can add as little as one byte, so this many tokens hold any stop string that ends here.
            window = 4 * max(map(len, sampling.stop_strings)) + 4
            text = self._detokenize(sequence.tokens[-window:])
            if any(stop in text for stop in sampling.stop_strings):
                return "stop"
        return "length" if sequence.position >= sequence.request.max_new_tokens else None

    def _fail(
        self,
        sequence: Row,
        where: str,
        cause: Cause,
        evidence: tuple[IntegrityReport | None, int] | None,
        events: list[Event],
        why: str = "",
    ) -> None:
        """Aborts one request: counts it, records an incident, frees what it still owns, retries if
        allowed.
        """
        kind = {Cause.NONFINITE: "nonfinite_logits", Cause.TRANSFER: "transfer"}.get(cause, "integrity")
        detail: dict[str, object] = {"cause": cause.name.lower(), "step": self.counters["steps"]}
        if evidence is not None:
            check, row = evidence
            if check is None:
                kind = "check_not_run"
            elif cause is Cause.INTEGRITY:
                found = integrity.finding(check, row)
                self.counters[f"mismatch.{found.get('kind')}"] += 1
                detail |= found
        self._distrust = True
        self.counters[kind] += 1
        self.counters[f"abort.{cause.name}"] += 1
        why = why or f"{kind} in {where}: {', '.join(f'{k}={v}' for k, v in detail.items())}"
        digest = self.pools.fingerprints["prefill" if where == "prefill" else "decode"].digest
        request_id = sequence.request.request_id
        self.incidents.append(Incident(self.now(), kind, request_id, where, detail | {"why": why}, digest))
        if kind != "nonfinite_logits" and self.scheduler.retry(sequence):
            self.counters["retries"] += 1
            self._vacate(sequence)
            return
        self.scheduler.finish(sequence)
        self._vacate(sequence)
        self._end(sequence, "integrity" if kind in ("integrity", "check_not_run") else "error", why, events)

    def _settle(self, sequence: Row, events: list[Event]) -> None:
        """Brings a retracted row's bytes to the host, if they were intact when they were read."""
        moved = self._moved.get(sequence)
        if moved is None:
            return
        try:
            self._moved[sequence] = moved = jax.device_get(moved)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            why = f"its bytes did not reach the host: {error}"
            self._fail(sequence, "retract", Cause.TRANSFER, None, events, why)
            return
        if not moved.ok:
            self._fail(sequence, "retract", Cause.INTEGRITY, (moved.check, int(moved.row)), events)

    def _end(self, sequence: Row, reason: FinishReason, error: str, events: list[Event]) -> None:
        request = sequence.request
        result = RequestResult(
            request_id=request.request_id,
            tokens=tuple(sequence.tokens),
            finish_reason=reason,
            prompt_tokens=sequence.prompt_length,
            cached_tokens=sequence.cached,
            logprobs=tuple(sequence.logprobs),
            error=error,
            arrival_s=request.arrival_s,
            admitted_s=sequence.admitted_s,
            first_token_s=sequence.first_token_s,
            finished_s=self.now(),
            retractions=sequence.retractions,
            retries=sequence.attempt,
            session=request.session,
        )
        self.results.append(result)
        events.append(Event("finished", request.request_id, result=result))

    def _resync(self) -> None:
        """Takes over the device's page counts and forgets prefix pages that are no longer what was
        registered.

        After a failure the device is right and the host may not be. Waits for the device; failures are rare.
        """
        self.books.forget_lost(self.pools.generations("prefill"))
        self._flush_drops()
        self.books.free = self.pools.free("prefill")
        self.scheduler.sync_decode_free(self.pools.free("decode"))
        for flight in self._flights:
            flight.free = None
        self._distrust = False
