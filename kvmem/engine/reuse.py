"""The host's books of the prefill pool: what requests hold, what the prefix tree holds, what may be reused.

Pages that decode made (an answer, in decode's format and weights) are not what prefill would have made of the
same tokens. What a later turn's prefill does with them is a policy, each with its cost:

``recompute``  computes the answer's tokens again: exact; costs prefill tokens (``recomputed_tokens``).
``widen``      converts decode's whole pages to prefill's format when the answer ends: saves that work; costs
               a copy (``widened_pages``) and gives the next turn values of decode's precision.
``refuse``     reuses nothing at all for a prompt that goes on from an answer, so that no context is of mixed
               origin; costs the whole prompt (``refused_tokens``).
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from kvmem.engine.prefix import Node, PrefixTree
from kvmem.engine.request import EngineConfig, Request
from kvmem.engine.scheduler import Sequence


@dataclasses.dataclass
class Tenure:
    """What a request holds in the prefill pool: ``pages`` in all; the tree owns those of ``path``."""

    pages: int
    path: list[Node]

    @property
    def reused(self) -> list[tuple[int, int]]:
        """(page, generation) of each page that the tree holds."""
        return [(node.page, node.generation) for node in self.path]


class PrefillBooks:
    """Counts and names pages, moves none. ``free`` is what the device has once ``drops`` are carried out."""

    def __init__(self, config: EngineConfig, salt: str):
        self.config = config
        self.free = config.prefill_pages - 1
        self.drops: list[int] = []
        self.counters: collections.Counter[str] = collections.Counter()
        self.tree = PrefixTree(config.page_size, salt)
        self._answers = PrefixTree(config.page_size, salt)  # tokens only: whole pages that hold answers
        self._tenures: dict[Sequence, Tenure] = {}

    def reusable(self, request: Request) -> list[Node]:
        """The cached pages that a request may use under the reuse policy."""
        if not self.config.prefix_cache:
            return []
        path = self.tree.match(request.prompt_tokens, request.tenant)
        if self.config.reuse == "refuse" and self._answered(request) > len(path):
            return []
        return path

    def _answered(self, request: Request) -> int:
        """Leading whole pages of the prompt that are an earlier prompt with its answer."""
        return len(self._answers.match(request.prompt_tokens, request.tenant))

    def take(self, sequence: Sequence) -> int | None:
        """Reserves pages for a whole prompt; see Scheduler. Evicts what that needs."""
        path = self.reusable(sequence.request)
        total = -(-sequence.prompt_length // self.config.page_size)
        self.tree.lock(path)
        if not self.reserve(total - len(path)):
            self.tree.unlock(path)
            return None
        self._tenures[sequence] = Tenure(total, path)
        lost = self._answered(sequence.request) - len(path)
        if lost > 0:
            kind = "refused_tokens" if self.config.reuse == "refuse" else "recomputed_tokens"
            self.counters[kind] += lost * self.config.page_size
        return len(path) * self.config.page_size

    def reserve(self, count: int) -> bool:
        """Takes ``count`` pages out of ``free``, evicting as needed; if there are not, False and nothing."""
        if count > self.free + self.tree.evictable:
            return False
        evicted = self.tree.evict(count - self.free) if count > self.free else []
        self.drops += evicted
        self.free += len(evicted) - count
        self.counters["evicted_pages"] += len(evicted)
        return True

    def tenure(self, sequence: Sequence) -> Tenure:
        """What an admitted sequence holds."""
        return self._tenures[sequence]

    def wants(self, sequence: Sequence) -> bool:
        """Whether the tree lacks whole pages of the sequence's finished prompt."""
        whole = sequence.prompt_length // self.config.page_size
        return self.config.prefix_cache and whole > len(self._tenures[sequence].path)

    def register(self, sequence: Sequence, pages: list[tuple[int, int]]) -> list[int]:
        """Gives the whole pages of a finished prompt to the tree; returns those that must be retained."""
        request = sequence.request
        taken = self.tree.insert(request.prompt_tokens, pages, request.tenant)
        self.tree.lock(taken)
        self._tenures[sequence].path += taken
        return [node.page for node in taken]

    def give_back(self, sequence: Sequence) -> bool:
        """Ends a tenure; False if there is none. What the tree holds stays."""
        tenure = self._tenures.pop(sequence, None)
        if tenure is None:
            return False
        self.tree.unlock(tenure.path)
        self.free += tenure.pages - len(tenure.path)
        return True

    def answered(self, request: Request, tokens: tuple[int, ...]) -> None:
        """Notes which whole pages of a conversation hold answer tokens, for the reuse policy."""
        if not self.config.prefix_cache:
            return
        self._answers.insert(
            tokens, [(0, 0)] * (len(tokens) // self.config.page_size), request.tenant, "decode"
        )
        if len(self._answers) > 4 * self.config.prefill_pages:
            self._answers.evict(len(self._answers) // 2)

    def to_widen(self, request: Request, tokens: tuple[int, ...]) -> tuple[int, int]:
        """(first, count) of an ended request's whole logical pages that the tree lacks and has room for."""
        if not self.config.prefix_cache or self.config.reuse != "widen":
            return 0, 0
        # ``match`` leaves one token to compute: with one more, every whole page can match.
        first = len(self.tree.match((*tokens, 0), request.tenant))
        count = len(tokens) // self.config.page_size - first
        return (first, count) if count > 0 and self.reserve(count) else (0, 0)

    def widened(
        self, request: Request, tokens: tuple[int, ...], first: int, count: int, pages: list[tuple[int, int]]
    ) -> list[int]:
        """Registers widened pages from logical page ``first`` on; returns those that must be retained.

        ``count`` were reserved. None is registered where widening failed (no ``pages``): a later turn misses.
        """
        before = self.tree.match((*tokens, 0), request.tenant)[:first]
        held = [(node.page, node.generation) for node in before]
        taken = self.tree.insert(tokens, held + pages, request.tenant, "decode")
        self.counters["widened_pages"] += len(taken)
        self.free += count - len(taken)
        return [node.page for node in taken]

    def forget_lost(self, generation_P: np.ndarray) -> None:
        """Forgets pages whose generation is no longer the registered one, and drops what hung below them."""
        self.drops += self.tree.invalidate(lambda page: int(generation_P[page]))
