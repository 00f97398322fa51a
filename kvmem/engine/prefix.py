"""The prefix cache: a radix tree over whole pages of tokens. Host only.

A node is one page: the tokens in it, the physical page and its generation. Children are found by a hash of
(parent's hash, tokens) and accepted only if the tokens are equal. The root's hash is salted with the tenant,
so no tenant can find, or time, another's prompts. Only whole pages of finished prefills enter. A node that a
running request uses is locked and never evicted; of the rest, the leaf used longest ago goes first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

Origin = Literal["prefill", "decode"]
TokenHash = Callable[[int, tuple[int, ...]], int]


def hash_tokens(parent: int, tokens: tuple[int, ...]) -> int:
    """Hash of a page's tokens in their context. Python's own: fast, and collisions only cost a comparison."""
    return hash((parent, tokens))


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One page of cached prompt.

    Attributes:
      key: hash of the whole path down to this page.
      generation: the page's generation when it was registered; a request that reuses the page expects this
        one.
      origin: which phase computed the page's contents.
      locks: running requests that read this page.
    """

    key: int
    tokens: tuple[int, ...]
    page: int
    generation: int
    origin: Origin
    parent: Node | None
    locks: int = 0
    used: int = 0
    children: dict[int, Node] = dataclasses.field(default_factory=dict)


class PrefixTree:
    """Pages that later prompts may share. The tree decides; whoever owns the pool retains and drops pages.

    Args:
      page_size: tokens of a page.
      salt: keeps hashes apart between engines.
      token_hash: replaceable so that a test can make hashes collide.
    """

    def __init__(self, page_size: int, salt: str = "", token_hash: TokenHash = hash_tokens):
        self.page_size = page_size
        self._salt = salt
        self._hash = token_hash
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._nodes = 0
        self._unlocked = 0
        self._leaves: list[tuple[int, int, Node]] = []  # candidates for eviction; stale entries are skipped
        self._ticket = itertools.count()
        self.hit_tokens = 0
        self.asked_tokens = 0

    def __len__(self) -> int:
        """Pages held."""
        return self._nodes

    @property
    def evictable(self) -> int:
        """Pages that eviction could give back now. A locked node's ancestors are locked too."""
        return self._unlocked

    def _root(self, tenant: str) -> Node:
        if tenant not in self._roots:
            digest = hashlib.blake2b(f"{self._salt}\0{tenant}".encode(), digest_size=8).digest()
            self._roots[tenant] = Node(int.from_bytes(digest), (), -1, 0, "prefill", None)
        return self._roots[tenant]

    def _pages(self, tokens: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
        for start in range(0, count * self.page_size, self.page_size):
            yield tokens[start : start + self.page_size]

    def match(
        self,
        tokens: tuple[int, ...],
        tenant: str = "",
        origins: frozenset[str] = frozenset({"prefill", "decode"}),
    ) -> list[Node]:
        """Nodes of the longest cached prefix, in order. At least one prompt token is left to compute."""
        if tenant not in self._roots:
            return []
        node, path = self._roots[tenant], []
        for page in self._pages(tokens, (len(tokens) - 1) // self.page_size):
            child = node.children.get(self._hash(node.key, page))
            if child is None or child.tokens != page or child.origin not in origins:
                break
            path.append(child)
            node = child
        return path

    def lock(self, path: Iterable[Node]) -> None:
        """Keeps the nodes while a request reads them."""
        self._clock += 1
        for node in path:
            self._unlocked -= node.locks == 0
            node.locks += 1
            node.used = self._clock

    def unlock(self, path: Iterable[Node]) -> None:
        """Gives up one lock of each node. Raises ValueError if a node is not locked."""
        for node in path:
            if node.locks < 1:
                raise ValueError(f"page {node.page} is unlocked more often than it was locked")
            node.locks -= 1
            if node.locks == 0 and self._held(node):
                self._unlocked += 1
                self._offer(node)

    def _offer(self, node: Node) -> None:
        """Enters a node among the candidates for eviction if it is one."""
        if node.parent is not None and not node.children and not node.locks:
            heapq.heappush(self._leaves, (node.used, next(self._ticket), node))

    def _held(self, node: Node) -> bool:
        return node.parent is not None and node.parent.children.get(node.key) is node

    def insert(
        self,
        tokens: tuple[int, ...],
        pages: list[tuple[int, int]],
        tenant: str = "",
        origin: Origin = "prefill",
    ) -> list[Node]:
        """Registers whole pages of a finished prompt.

        Args:
          tokens: at least ``len(pages) * page_size`` token ids.
          pages: (physical page, generation) of each logical page.

        Returns:
          The nodes of pages that the tree took and that must be retained; what it already held is not among
          them.
        """
        self._clock += 1
        node = self._root(tenant)
        taken: list[Node] = []
        for tokens_of_page, (page, generation) in zip(self._pages(tokens, len(pages)), pages, strict=True):
            key = self._hash(node.key, tokens_of_page)
            child = node.children.get(key)
            if child is None:
                child = Node(key, tokens_of_page, page, generation, origin, node)
                node.children[key] = child
                taken.append(child)
                self._nodes += 1
                self._unlocked += 1
            elif child.tokens != tokens_of_page:
                break  # a hash collision: the first comer stays
            child.used = self._clock
            node = child
        self._offer(node)
        return taken

    def evict(self, count: int) -> list[int]:
        """Removes up to ``count`` unlocked pages, leaves first, the longest unused first; returns them to
        drop.
        """
        dropped: list[int] = []
        while self._leaves and len(dropped) < count:
            used, _, node = heapq.heappop(self._leaves)
            if node.used != used or node.children or node.locks or not self._held(node):
                continue  # stale: used again, grown, locked or gone since it was offered
            self._unlink(node)
            dropped.append(node.page)
            assert node.parent is not None
            self._offer(node.parent)
        return dropped

    def invalidate(self, generation_of: Callable[[int], int]) -> list[int]:
        """Forgets pages whose generation is no longer the registered one, with all that hangs below them.

        Returns:
          The pages below a lost one that the tree still owned and that must be dropped. A lost page itself
          belongs to someone else and is not among them.
        """
        owned: list[int] = []
        for root in self._roots.values():
            stack = [(child, False) for child in root.children.values()]
            while stack:
                node, below_lost = stack.pop()
                intact = generation_of(node.page) == node.generation
                lost = below_lost or not intact
                stack += [(child, lost) for child in node.children.values()]
                if lost:
                    if intact:
                        owned.append(node.page)
                    self._unlink(node)
        return owned

    def _unlink(self, node: Node) -> None:
        if node.parent is not None and node.parent.children.pop(node.key, None) is node:
            self._nodes -= 1
            self._unlocked -= node.locks == 0

    def _walk(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @property
    def pages(self) -> set[int]:
        """Every page that the tree holds."""
        return {node.page for node in self._walk()}
