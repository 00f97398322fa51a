"""The scheduler: which rows prefill, decode, wait or retract. Host only; it imports no JAX.

``plan`` decides one step from integers alone (free pages, lengths, arrival order, the time it is given) and
has already booked its decisions when it returns; whoever runs the plan reports back with ``prefilled``,
``token`` and ``finish``. The engine runs plans on devices, ``simulate`` on a cost model with a simulated
clock.

Rules. Requests are served in arrival order; a smaller request may overtake one that does not fit, at most
``max_bypass`` times. A prompt is prefilled in chunks that end at multiples of the chunk size. All but one of
the prefill rows may hold long prompts. A request enters the decode pool if its pages, as far as its expected
length, fit beside the expected growth of those running. If decode runs out of pages, the youngest request is
retracted; the oldest never is, so some request always finishes. Nothing enters decode while a retracted
request waits.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import heapq
import operator
from collections.abc import Callable

from kvmem.engine.errors import PromptTooLong, QueueFull, RequestError
from kvmem.engine.request import EngineConfig, Real, Request


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"  # some of its prompt is not launched yet
    PREFILLED = "prefilled"  # all of its prompt is launched, the first token is not read yet
    READY = "ready"  # its first token is published, it waits for decode pages
    MOVING = "moving"  # its decode pages are taken, their bytes are on the way
    DECODE = "decode"
    RETRACTED = "retracted"  # its decode pages are on the host
    DONE = "done"


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way through the engine. Lengths are in tokens and count what is launched, not what is
    read.

    Attributes:
      order: arrival number; lower is served first.
      attempt: grows with every retry; late results of an earlier attempt are dropped.
      computed: prompt tokens in the prefill pool, the reused ones included.
      length: tokens in the decode pool.
      launched: answer tokens asked of the device.
      tokens: answer tokens read and published.
      replay: tokens published by earlier attempts, which this attempt must repeat before it publishes more.
    """

    request: Request
    order: int
    phase: Phase = Phase.WAITING
    attempt: int = 0
    prefill_row: int = -1
    decode_row: int = -1
    cached: int = 0
    computed: int = 0
    length: int = 0
    launched: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Real] = dataclasses.field(default_factory=list)
    replay: int = 0
    position: int = 0  # answer tokens read by this attempt
    bypassed: int = 0
    retractions: int = 0
    cancelled: bool = False
    admitted_s: Real | None = None
    first_token_s: Real | None = None
    token_s: list[Real] = dataclasses.field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def exhausted(self) -> bool:
        """Whether every answer token it may have is already launched."""
        return self.launched >= self.request.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Prompt tokens [start, start + count) of a sequence, for one prefill step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def last(self) -> bool:
        return self.start + self.count == self.sequence.prompt_length


@dataclasses.dataclass
class Plan:
    """One step, in the order in which it is to be carried out."""

    expire: list[tuple[Sequence, str]] = dataclasses.field(default_factory=list)
    retract: list[Sequence] = dataclasses.field(default_factory=list)
    resume: list[Sequence] = dataclasses.field(default_factory=list)
    transfer: list[Sequence] = dataclasses.field(default_factory=list)
    admit: list[Sequence] = dataclasses.field(default_factory=list)
    prefill: list[Chunk] = dataclasses.field(default_factory=list)
    decode: list[Sequence] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in dataclasses.fields(self))


class ExpectedLength:
    """How long answers get, as a share of ``max_new_tokens``: a running mean of finished ones, raised by
    retractions.
    """

    def __init__(self, share: Real = 0.5, weight: Real = 0.05):
        self.share = share
        self.weight = weight

    def finished(self, sequence: Sequence) -> None:
        share = len(sequence.tokens) / sequence.request.max_new_tokens
        self.share += self.weight * (share - self.share)

    def retracted(self) -> None:
        self.share = min(1.0, self.share + 0.1)

    def remaining(self, sequence: Sequence) -> int:
        """Expected answer tokens still to come, at least 1 and at most what the request allows."""
        left = sequence.request.max_new_tokens - sequence.launched
        return max(1, min(left, round(self.share * sequence.request.max_new_tokens) - sequence.launched))


_ORDER = operator.attrgetter("order")
Take = Callable[[Sequence], int | None]


class Scheduler:
    """Continuous batching over a prefill pool and a decode pool.

    Args:
      config: sizes and policies.
      max_context: the model's context window in tokens.
      take: reserves prefill pages for a whole prompt, reused ones included. Returns the prompt tokens that
        the prefix cache serves, or None, with nothing reserved, if the rest does not fit.
    """

    def __init__(self, config: EngineConfig, max_context: int, take: Take):
        self.config = config
        self.max_context = max_context
        self.take = take
        self.expected = ExpectedLength()
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.retracted: list[Sequence] = []
        self.live: dict[str, Sequence] = {}
        self.submitted = 0
        self.retries = 0
        self._prefill: dict[int, Sequence] = {}
        self._decode: dict[int, Sequence] = {}
        self._free_prefill_rows = list(range(config.prefill_rows))
        self._free_decode_rows = list(range(config.max_rows))
        self._decode_pages_used = 0
        self._since_prefill = 0

    # Queue

    def submit(self, request: Request) -> Sequence:
        """Queues a valid request. Raises PromptTooLong, QueueFull, or RequestError for an id that is in
        use.
        """
        total = len(request.prompt_tokens) + request.max_new_tokens
        limits = {
            "context window": self.max_context,
            "decode pool or page-table row": self.config.max_tokens_per_row,
        }
        for name, limit in limits.items():
            if total > limit:
                raise PromptTooLong(
                    f"request {request.request_id!r}: prompt {len(request.prompt_tokens)} + "
                    f"max_new_tokens {request.max_new_tokens} = {total} tokens exceed the {name} of {limit}"
                )
        if len(request.prompt_tokens) > self.config.max_prompt_tokens:
            raise PromptTooLong(
                f"request {request.request_id!r}: prompt of {len(request.prompt_tokens)} tokens exceeds the "
                f"prefill pool of {self.config.max_prompt_tokens}"
            )
        if request.request_id in self.live:
            raise RequestError(f"request_id {request.request_id!r} is already in use")
        if len(self.waiting) >= self.config.queue_limit:
            raise QueueFull(
                f"{len(self.waiting)} requests wait, queue_limit={self.config.queue_limit}: "
                f"{request.request_id!r} is refused"
            )
        sequence = Sequence(request, self.submitted)
        self.submitted += 1
        self.live[request.request_id] = sequence
        self.waiting.append(sequence)
        return sequence

    def cancel(self, request_id: str) -> bool:
        """Marks a live request; the next plan expires it. False if no such request lives."""
        sequence = self.live.get(request_id)
        if sequence is not None:
            sequence.cancelled = True
        return sequence is not None

    @property
    def idle(self) -> bool:
        return not self.live

    @property
    def queue_depth(self) -> int:
        return len(self.waiting)

    @property
    def decode_free(self) -> int:
        """Free pages of the decode pool."""
        return self.config.decode_pages - 1 - self._decode_pages_used

    def sync_decode_free(self, free: int) -> None:
        """Takes over the decode pool's free pages as the device counts them, after a failure."""
        self._decode_pages_used = self.config.decode_pages - 1 - free

    def rows(self, phase: Phase) -> list[Sequence]:
        """Sequences in a phase, in arrival order."""
        return sorted((s for s in self.live.values() if s.phase is phase), key=_ORDER)

    # One step

    def plan(self, now: Real) -> Plan:
        """Decides one step at ``now`` seconds, on whatever clock drives the engine."""
        plan = Plan()
        self._expire(plan, now)
        launch = self._decode_rows(plan)
        self._enter_decode(plan, launch)
        self._admit(plan, now)
        self._prefill_chunks(plan, decoding=bool(launch))
        self._decode_pages_used += sum(map(self._needs_page, launch))
        for sequence in launch:
            sequence.length += 1
            sequence.launched += 1
        plan.decode = launch
        return plan

    def _expire(self, plan: Plan, now: Real) -> None:
        for sequence in self.live.values():
            deadline = sequence.request.deadline_s
            if sequence.cancelled:
                plan.expire.append((sequence, "cancelled"))
            elif deadline is not None and now > sequence.request.arrival_s + deadline:
                plan.expire.append((sequence, "deadline"))
        for sequence, _ in plan.expire:
            self.finish(sequence)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def _needs_page(self, sequence: Sequence) -> bool:
        return sequence.length % self.config.page_size == 0

    def _decode_rows(self, plan: Plan) -> list[Sequence]:
        """Rows that decode now, oldest first; retracts the youngest while their next tokens do not fit."""
        running = (s for s in self._decode.values() if s.phase is Phase.DECODE and not s.exhausted)
        launch = sorted(running, key=_ORDER)
        needed = sum(map(self._needs_page, launch))
        while needed > self.decode_free and len(launch) > 1:
            victim = launch.pop()
            needed -= self._needs_page(victim)
            self._leave_decode(victim)
            victim.phase = Phase.RETRACTED
            victim.retractions += 1
            self.retracted.append(victim)
            plan.retract.append(victim)
            self.expected.retracted()
        if needed > self.decode_free:  # rows that wait to be read hold the rest: skip a beat
            launch = [s for s in launch if not self._needs_page(s)]
        return launch

    def _enter_decode(self, plan: Plan, launch: list[Sequence]) -> None:
        """Resumes retracted rows, then takes in prefilled ones; both join this step's decode."""
        ready = [] if self.retracted else self.rows(Phase.READY)
        if not (self.retracted or ready):
            return
        arriving = [s for s in self._decode.values() if s.phase is Phase.MOVING]
        growth = sum(self._growth(s) for s in (*launch, *arriving))
        self.retracted.sort(key=_ORDER)
        while self.retracted and self.retracted[0] not in plan.retract:
            sequence = self.retracted[0]
            if not self._fits_decode(sequence, sequence.length, growth, empty=not self._decode):
                break
            self.retracted.pop(0)
            growth += self._join_decode(sequence, sequence.length)
            plan.resume.append(sequence)
            launch.append(sequence)
        if self.retracted:
            return
        for sequence in ready:
            if not self._fits_decode(sequence, sequence.prompt_length, growth, empty=not self._decode):
                sequence.bypassed += 1
                if sequence.bypassed > self.config.max_bypass:
                    break
                continue
            growth += self._join_decode(sequence, sequence.prompt_length)
            self._leave_prefill(sequence)
            plan.transfer.append(sequence)
            launch.append(sequence)

    def _growth(self, sequence: Sequence) -> int:
        """Pages that a decoding row is expected to add."""
        return self._pages(sequence.length + self.expected.remaining(sequence)) - self._pages(sequence.length)

    def _fits_decode(self, sequence: Sequence, length: int, growth: int, *, empty: bool) -> bool:
        if not self._free_decode_rows:
            return False
        if empty:
            return self._pages(length + 1) <= self.decode_free
        return self._pages(length + self.expected.remaining(sequence)) + growth <= self.decode_free

    def _join_decode(self, sequence: Sequence, length: int) -> int:
        sequence.decode_row = heapq.heappop(self._free_decode_rows)
        sequence.phase = Phase.DECODE
        sequence.length = length
        self._decode[sequence.decode_row] = sequence
        self._decode_pages_used += self._pages(length)
        return self._growth(sequence)

    def _leave_decode(self, sequence: Sequence) -> None:
        self._decode_pages_used -= self._pages(sequence.length)
        del self._decode[sequence.decode_row]
        heapq.heappush(self._free_decode_rows, sequence.decode_row)

    def _leave_prefill(self, sequence: Sequence) -> None:
        del self._prefill[sequence.prefill_row]
        heapq.heappush(self._free_prefill_rows, sequence.prefill_row)

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.prompt_length > 8 * self.config.prefill_chunk

    def _admit(self, plan: Plan, now: Real) -> None:
        """Gives free prefill rows to waiting requests whose prompt pages fit."""
        long_rows = sum(map(self._is_long, self._prefill.values()))
        long_limit = max(1, self.config.prefill_rows - 1)
        passed: list[Sequence] = []
        while self.waiting and self._free_prefill_rows:
            sequence = self.waiting.popleft()
            if self._is_long(sequence) and long_rows >= long_limit:
                passed.append(sequence)  # waits for a long row, not for pages: no bypass is counted
                continue
            cached = self.take(sequence)
            if cached is None:
                passed.append(sequence)
                sequence.bypassed += 1
                if sequence.bypassed > self.config.max_bypass:
                    break
                continue
            sequence.cached = sequence.computed = cached
            long_rows += self._is_long(sequence)
            sequence.prefill_row = heapq.heappop(self._free_prefill_rows)
            sequence.phase = Phase.PREFILL
            sequence.admitted_s = now if sequence.admitted_s is None else sequence.admitted_s
            self._prefill[sequence.prefill_row] = sequence
            plan.admit.append(sequence)
        self.waiting.extendleft(reversed(passed))

    def _prefill_chunks(self, plan: Plan, *, decoding: bool) -> None:
        self._since_prefill += 1
        rows = [s for s in self._prefill.values() if s.phase is Phase.PREFILL]
        if rows and not (decoding and self._since_prefill < self.config.decode_steps_per_prefill):
            self._since_prefill = 0
            plan.prefill = [self._chunk(sequence) for sequence in rows]

    def _chunk(self, sequence: Sequence) -> Chunk:
        """Books the next chunk of a prompt; it ends at a multiple of the chunk size or at the prompt's
        end.
        """
        size = self.config.prefill_chunk
        start = sequence.computed
        end = min((start // size + 1) * size, sequence.prompt_length)
        sequence.computed = end
        if end == sequence.prompt_length:
            sequence.phase = Phase.PREFILLED
            sequence.launched = 1
        return Chunk(sequence, start, end - start)

    # Reports

    def prefilled(self, sequence: Sequence) -> None:
        """The first token was read and published: the sequence waits for decode."""
        sequence.phase = Phase.READY
        sequence.bypassed = 0

    def moving(self, sequence: Sequence) -> None:
        """A transfer of this plan is on its way: the sequence does not decode in this step after all."""
        sequence.phase = Phase.MOVING
        sequence.length -= 1
        sequence.launched -= 1
        self._decode_pages_used -= self._needs_page(sequence)

    def landed(self, sequence: Sequence) -> None:
        """What was on its way has arrived: the sequence decodes from the next step on."""
        sequence.phase = Phase.DECODE

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever its phase. Its rows are free for the next plan."""
        self._remove(sequence)
        del self.live[sequence.request.request_id]
        if sequence.tokens:
            self.expected.finished(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase in (Phase.PREFILL, Phase.PREFILLED, Phase.READY):
            self._leave_prefill(sequence)
        elif sequence.phase in (Phase.MOVING, Phase.DECODE):
            self._leave_decode(sequence)
        elif sequence.phase is Phase.RETRACTED:
            self.retracted.remove(sequence)
        sequence.phase = Phase.DONE

    def retry(self, sequence: Sequence) -> bool:
        """Queues a failed sequence again from its prompt if both retry budgets allow; False if not."""
        allowed = -(-self.submitted * self.config.retry_budget_per_1000 // 1000)
        if sequence.attempt >= self.config.retry_budget or self.retries >= allowed:
            return False
        self._remove(sequence)
        self.retries += 1
        sequence.attempt += 1
        sequence.replay = len(sequence.tokens)
        sequence.cached = sequence.computed = sequence.length = sequence.launched = sequence.position = 0
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)
        return True
