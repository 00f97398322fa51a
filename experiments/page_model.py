"""The page machine in plain Python, small enough that every state it can reach can be visited.

``Pool`` repeats the operations of ``kvmem.cache.pages`` on lists; tests tie the two together, operation by
operation. ``Machine`` adds what surrounds them: requests that prefill, move and decode, a prefix chain, one
transfer under a lease, one step that was launched and lands later, and one fault: a page that is freed
behind its request's back. ``Machine.broken`` names the invariants that a state breaks.

``BUGS`` are planted mistakes, each of which has to break an invariant somewhere; those in ``REDUNDANT`` do
not, because a second line of defence makes them harmless.
"""

from collections.abc import Iterator
from typing import NamedTuple

BUGS = {
    "overallocation": "a row that needs a page when none is free gets the last page of the pool",
    "refusal_takes_pages": "a row that is refused still keeps the pages it could get",
    "release_keeps_generation": "the generation does not change when a page is released",
    "allocation_keeps_generation": "the generation does not change when a page is allocated",
    "release_frees_shared": "releasing a row frees its pages even if others still read them",
    "release_frees_pinned": "releasing a row frees pages that a transfer has pinned",
    "release_keeps_row": "releasing a row leaves its page table as it was",
    "release_twice": "an aborted request gives its pages back twice",
    "unpin_leaks": "the last unpin of a page without owner does not free it",
    "no_pins": "a transfer does not pin its pages",
    "late_completion": "a transfer that completes after its lease is still written",
    "no_check": "a request is served without the check of its pages",
    "no_generation": "a step that was launched earlier lands without a second look at the generations",
    "no_epoch": "a step that was launched for the slot's former request is accepted",
    "abort_trusts_table": "an abort gives back what the table names, not what the request was promised",
    "share_unfinished": "the prefix chain takes a page that is still being written",
    "share_in_flight": "the prefix chain takes a page into which a launched step has yet to write",
    "evict_frees_shared": "evicting a prefix page frees it although a row reads it",
}

# A launched step always holds a page of its own, whose generation ends with its request.
REDUNDANT = ("no_epoch",)

Ref = tuple[int, int]  # page, generation


class Moving(NamedTuple):
    """The transfer that is on its way; ``leased`` until it ends or its time is over."""

    request: int
    epoch: int
    source: list[Ref]
    destination: list[Ref]
    leased: bool


class Launched(NamedTuple):
    """A step that was launched: what its request was promised then."""

    request: int
    epoch: int
    pool: int
    refs: list[Ref]


class Pool:
    """One pool: page 0 is padding, ``free`` is a stack, rows are lists of pages."""

    def __init__(self, num_pages: int, num_rows: int, max_pages: int, bugs: frozenset[str] = frozenset()):
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.refs = [0] * num_pages
        self.pins = [0] * num_pages
        self.gens = [0] * num_pages
        self.free = list(range(num_pages - 1, 0, -1))
        self.max_pages = max_pages
        self.bugs = bugs

    def promise(self, row: int) -> list[Ref]:
        """The row's pages with their generations as of now."""
        return [(page, self.gens[page]) for page in self.rows[row]]

    def fresh(self, refs: list[Ref]) -> bool:
        """The check: whether each page still has the generation that was promised."""
        return all(self.gens[page] == generation for page, generation in refs)

    def grow(self, row: int, count: int) -> bool:
        """Gives the row ``count`` more pages, or nothing."""
        if len(self.rows[row]) + count > self.max_pages:
            return False
        if count > len(self.free):
            if "overallocation" in self.bugs:
                self.rows[row].append(len(self.refs) - 1)
                return True
            if "refusal_takes_pages" in self.bugs:
                self.grow(row, len(self.free))
            return False
        for _ in range(count):
            page = self.free.pop()
            self.rows[row].append(page)
            self.refs[page] = 1
            self.gens[page] += "allocation_keeps_generation" not in self.bugs
        return True

    def share(self, row: int, pages: list[int]) -> bool:
        """Gives the empty row pages that somebody owns."""
        if self.rows[row] or len(set(pages)) != len(pages) or len(pages) > self.max_pages:
            return False
        if not all(0 < page < len(self.refs) and self.refs[page] for page in pages):
            return False
        self.rows[row] = list(pages)
        for page in pages:
            self.refs[page] += 1
        return True

    def retain(self, page: int) -> bool:
        """Adds a hold to an owned page."""
        if not (0 < page < len(self.refs) and self.refs[page]):
            return False
        self.refs[page] += 1
        return True

    def drop(self, page: int) -> bool:
        """Takes a reference; the last one ends the page's generation and frees it unless it is pinned."""
        if not (0 < page < len(self.refs) and self.refs[page]):
            return False
        self._unreference([page], "evict_frees_shared" in self.bugs)
        return True

    def release(self, row: int, promised: list[Ref] | None = None) -> None:
        """Gives the row back: of its promises (or of its table) what is still of that generation."""
        refs = self.promise(row) if promised is None else promised
        mine = [page for page, generation in refs if self.refs[page] and self.gens[page] == generation]
        self._unreference(mine, "release_frees_shared" in self.bugs)
        if "release_twice" in self.bugs:
            self._unreference([page for page in mine if self.refs[page]], False)
        if "release_keeps_row" not in self.bugs:
            self.rows[row] = []

    def pin(self, page: int) -> bool:
        """Pins an owned page."""
        if not (0 < page < len(self.refs) and self.refs[page]):
            return False
        self.pins[page] += 1
        return True

    def unpin(self, page: int) -> bool:
        """Takes a pin; a page without references and pins becomes free."""
        if not (0 < page < len(self.pins) and self.pins[page]):
            return False
        self.pins[page] -= 1
        if not self.pins[page] and not self.refs[page] and "unpin_leaks" not in self.bugs:
            self.free.append(page)
        return True

    def _unreference(self, pages: list[int], free_shared: bool) -> None:
        freed = []
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] and not free_shared:
                continue
            self.gens[page] += "release_keeps_generation" not in self.bugs
            if not self.pins[page] or "release_frees_pinned" in self.bugs:
                freed.append(page)
        self.free += sorted(freed)


class Machine:
    """Requests over two pools. Every action is one method that returns whether it could be taken."""

    def __init__(self, num_pages: int, num_requests: int, max_pages: int, bugs: frozenset[str] = frozenset()):
        self.pools = [Pool(num_pages + 1, num_requests, max_pages, bugs) for _ in range(2)]
        self.phase = ["idle"] * num_requests
        self.epoch = [0] * num_requests
        self.promised: list[list[list[Ref]]] = [[[], []] for _ in range(num_requests)]
        self.chain: list[Ref] = []
        self.transfer: Moving | None = None
        self.work: Launched | None = None
        # The request whose page was freed behind its back, the pool, and which of its pages; once in a run.
        self.stolen: tuple[int, int, int] | None = None
        self.robbed = False
        self.bugs = bugs
        self.wrong: list[str] = []

    def actions(self) -> Iterator[tuple[str, int]]:
        """Names every action that may be tried in this state, with the request it concerns (or -1)."""
        for request, phase in enumerate(self.phase):
            if phase == "idle":
                yield "start", request
                yield "resume", request
                if self.chain:
                    yield "start_shared", request
            else:
                yield "abort", request
            if not self.robbed and phase != "idle":
                yield "steal_first", request
                yield "steal_last", request
            if phase in ("prefill", "decode"):
                yield "append", request
                if self.work is None:
                    yield "launch", request
            if phase == "prefill":
                if self.transfer is None:
                    yield "begin", request
                yield "hold", request
        if self.chain:
            yield "evict", -1
        if self.work:
            yield "land", -1
        if self.transfer:
            yield ("arrive", -1) if self.transfer.leased else ("late", -1)
            if self.transfer.leased:
                yield "expire", -1

    def act(self, name: str, request: int) -> bool:
        """Takes an action; False if it was refused."""
        return getattr(self, f"_{name}")(request) if request >= 0 else getattr(self, f"_{name}")()

    def _place(self, request: int, pool: int, phase: str, shared: list[int], count: int) -> bool:
        home = self.pools[pool]
        if shared and not home.share(request, shared):
            return False
        if not home.grow(request, count):
            home.release(request)
            return False
        self.phase[request] = phase
        self.promised[request][pool] = home.promise(request)
        return True

    def _start(self, request: int) -> bool:
        return self._place(request, 0, "prefill", [], 1)

    def _start_shared(self, request: int) -> bool:
        return self._place(request, 0, "prefill", [page for page, _ in self.chain], 1)

    def _resume(self, request: int) -> bool:
        """A request that was retracted comes back: two pages at once, or none."""
        return self._place(request, 1, "decode", [], 2)

    def _home(self, request: int) -> int:
        return int(self.phase[request] == "decode")

    def _checked(self, request: int) -> bool:
        """What precedes everything that is done for a request: the check, and its abort if that fails."""
        pool = self._home(request)
        if "no_check" in self.bugs or self.pools[pool].fresh(self.promised[request][pool]):
            return True
        self._abort(request)
        return False

    def _steal_first(self, request: int) -> bool:
        return self._steal(request, 0)

    def _steal_last(self, request: int) -> bool:
        return self._steal(request, len(self.promised[request][self._home(request)]) - 1)

    def _steal(self, request: int, position: int) -> bool:
        """The fault: a page that only this request owns is freed, and its row still names it."""
        pool = self._home(request)
        page = self.promised[request][pool][position][0]
        if self.pools[pool].refs[page] != 1:
            return False
        self.pools[pool].drop(page)
        self.stolen, self.robbed = (request, pool, position), True
        return True

    def _append(self, request: int) -> bool:
        pool = self._home(request)
        if not self._checked(request) or not self.pools[pool].grow(request, 1):
            return False
        recorded = len(self.promised[request][pool])
        self.promised[request][pool] += self.pools[pool].promise(request)[recorded:]
        return True

    def _abort(self, request: int) -> bool:
        """Abort, cancel, finish and retract are the same to the pages."""
        for pool in (0, 1):
            if self.promised[request][pool]:
                trusted = "abort_trusts_table" in self.bugs
                self.pools[pool].release(request, None if trusted else self.promised[request][pool])
                self.promised[request][pool] = []
        if self.stolen and self.stolen[0] == request:
            self.stolen = None
        self.phase[request] = "idle"
        self.epoch[request] += 1
        return True

    def _hold(self, request: int) -> bool:
        """The prefix chain takes the request's next finished page.

        Its last page is still being written, and so is that of a step that was launched and has not landed.
        """
        if not self._checked(request):
            return False
        refs, depth = self.promised[request][0], len(self.chain)
        finished = len(refs) if "share_unfinished" in self.bugs else len(refs) - 1
        if (
            self.work
            and self.work[:2] == (request, self.epoch[request])
            and "share_in_flight" not in self.bugs
        ):
            finished = min(finished, len(self.work.refs) - 1)
        if refs[:depth] != self.chain or depth >= finished or not self.pools[0].retain(refs[depth][0]):
            return False
        self.chain = [*self.chain, refs[depth]]
        return True

    def _evict(self) -> bool:
        self.pools[0].drop(self.chain[-1][0])
        self.chain = self.chain[:-1]
        return True

    def _launch(self, request: int) -> bool:
        if not self._checked(request):
            return False
        pool = self._home(request)
        self.work = Launched(request, self.epoch[request], pool, list(self.promised[request][pool]))
        return True

    def _land(self) -> bool:
        """A launched step reads all its pages and writes the last, if it still may."""
        assert self.work is not None
        request, epoch, pool, refs = self.work
        self.work = None
        if epoch != self.epoch[request] and "no_epoch" not in self.bugs:
            return False
        if not self.pools[pool].fresh(refs) and not {"no_generation", "no_check"} & self.bugs:
            return False
        if epoch != self.epoch[request]:
            self.wrong.append("a step of the slot's former request was published")
        pages = [page for page, _ in refs]
        robbed = self.stolen and self.stolen[:2] == (request, pool) and self.stolen[2] < len(pages)
        if self.pools[pool].rows[request][: len(pages)] != pages or robbed:
            self.wrong.append("a step read pages that its request does not hold")
        elif self.pools[pool].refs[pages[-1]] != 1:
            self.wrong.append("a step wrote into a page that others read")
        return True

    def _begin(self, request: int) -> bool:
        if not self._checked(request):
            return False
        source = list(self.promised[request][0])
        if not self.pools[1].grow(request, len(source)):
            return False
        destination = self.pools[1].promise(request)
        self.promised[request][1] = destination
        if "no_pins" not in self.bugs:
            for pool, refs in ((0, source), (1, destination)):
                for page, _ in refs:
                    self.pools[pool].pin(page)
        self.phase[request] = "moving"
        self.transfer = Moving(request, self.epoch[request], source, list(destination), True)
        return True

    def _arrive(self) -> bool:
        """The data comes in time: delivered if the order still holds; the lease ends either way."""
        assert self.transfer is not None
        request, epoch, source, destination, _ = self.transfer
        holds = epoch == self.epoch[request] and all(
            pool.fresh(refs) and ("no_pins" in self.bugs or all(pool.pins[page] for page, _ in refs))
            for pool, refs in zip(self.pools, (source, destination))
        )
        if holds:
            self._write_destination(request, destination)
        self._unpin()
        self.transfer = None
        if not holds and epoch == self.epoch[request]:
            self._abort(request)
        if holds:
            self.pools[0].release(request, self.promised[request][0])
            self.promised[request][0] = []
            self.phase[request] = "decode"
        return holds

    def _expire(self) -> bool:
        assert self.transfer is not None
        request, epoch, source, destination, _ = self.transfer
        self._unpin()
        self.transfer = Moving(request, epoch, source, destination, False)
        if epoch == self.epoch[request]:
            self._abort(request)
        return True

    def _late(self) -> bool:
        """The data comes after the lease: ignored."""
        assert self.transfer is not None
        request, _, _, destination, _ = self.transfer
        self.transfer = None
        if "late_completion" in self.bugs:
            self._write_destination(request, destination)
            return True
        return False

    def _write_destination(self, request: int, destination: list[Ref]) -> None:
        pool = self.pools[1]
        if pool.rows[request][: len(destination)] != [page for page, _ in destination] or any(
            pool.refs[page] != 1 for page, _ in destination
        ):
            self.wrong.append("a transfer wrote into pages that its request does not own")

    def _unpin(self) -> None:
        assert self.transfer is not None
        for pool, refs in zip(self.pools, (self.transfer.source, self.transfer.destination)):
            for page, _ in refs:
                pool.unpin(page)

    def broken(self) -> list[str]:
        """Returns the invariants that this state, or the action that led to it, breaks."""
        found = list(self.wrong)
        for number, pool in enumerate(self.pools):
            held = [0] * len(pool.refs)
            for request, row in enumerate(pool.rows):
                for position, page in enumerate(row):
                    held[page] += self.stolen != (request, number, position)
            if number == 0:
                for page, _ in self.chain:
                    held[page] += 1
            if held != pool.refs:
                found.append("references are not what rows and prefix chain hold")
            pinned = [0] * len(pool.pins)
            if self.transfer and self.transfer.leased:
                for page, _ in (self.transfer.source, self.transfer.destination)[number]:
                    pinned[page] += 1
            if pinned != pool.pins:
                found.append("pins are not what the open transfer names")
            idle = [page for page in range(1, len(pool.refs)) if not pool.refs[page] and not pool.pins[page]]
            if sorted(pool.free) != idle:
                found.append("the free pages are not exactly those without references and pins")
            if any((pool.gens[page] % 2 == 1) != (pool.refs[page] > 0) for page in range(1, len(pool.refs))):
                found.append("a generation does not tell whether the page is owned")
            for request, (promised, row) in enumerate(zip(self.promised, pool.rows)):
                refs = promised[number]
                if [page for page, _ in refs] != row:
                    found.append("a row's table is not what its request was promised")
                if self.stolen and self.stolen[0] == request:
                    continue
                if not pool.fresh(refs):
                    found.append("a request that did nothing wrong fails the check")
                if refs and self.phase[request] != "moving" and pool.refs[refs[-1][0]] != 1:
                    found.append("the page that a request writes next is read by others")
        if not self.pools[0].fresh(self.chain):
            found.append("the prefix chain names a page that is not its own any more")
        return found
