"""The host's copy of page ownership: the device's deterministic choices, repeated in numpy.

For admission and the radix tree. The device is authoritative; the host runs every operation here first, knows
the page ids and generations that the device is about to choose without waiting for it, and compares both
whenever it reads status back. Unlike the device it raises on what can only be a bug of the host: freeing
twice, or freeing what nobody owns.
"""

from collections.abc import Sequence

import jax
import numpy as np

from kvmem.cache.pages import LAST_GENERATION, PADDING_PAGE, PageState

_STATE = (
    "table_BM",
    "used_B",
    "length_B",
    "epoch_B",
    "generation_P",
    "references_P",
    "pins_P",
    "free_P",
    "free_count",
)


class PageMirror:
    """Pages, rows and generations of one pool, as ``PageState`` has them; see there for the rules."""

    def __init__(self, num_pages: int, num_rows: int, max_pages: int, page_size: int):
        self.page_size = page_size
        self.table_BM = np.full((num_rows, max_pages), PADDING_PAGE, np.int32)
        self.used_B = np.zeros(num_rows, np.int32)
        self.length_B = np.zeros(num_rows, np.int32)
        self.epoch_B = np.zeros(num_rows, np.uint32)
        self.generation_P = np.zeros(num_pages, np.uint32)
        self.references_P = np.zeros(num_pages, np.int32)
        self.pins_P = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def free_count(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def free_P(self) -> np.ndarray:
        """The free stack as the device holds it: its top at ``free_count - 1``, zeros above."""
        stack = np.zeros_like(self.references_P)
        stack[: len(self._free)] = self._free
        return stack

    def row(self, row: int) -> list[int]:
        """Physical pages of a row, in logical order."""
        return self.table_BM[row, : self.used_B[row]].tolist()

    def pages_needed(self, row: int, tokens: int) -> int:
        """How many free pages ``append`` of that many tokens to the row would take."""
        return max(0, self._pages_of(int(self.length_B[row]) + tokens) - int(self.used_B[row]))

    def append(self, tokens_B: Sequence[int] | np.ndarray) -> np.ndarray:
        """As ``pages.append``; returns ok_B."""
        ok_B = np.ones(len(self.used_B), bool)
        granted = []
        # All rows are judged on the state before the call, and served in order.
        for row, tokens in enumerate(np.asarray(tokens_B).tolist()):
            length = int(self.length_B[row]) + tokens
            fits = tokens >= 0 and length <= self.table_BM.shape[1] * self.page_size
            if not fits or (tokens and not self._writable(row, length)):
                ok_B[row] = False
            else:
                granted.append((row, self._pages_of(length), length if tokens else None))
        for row, want, length in granted:
            ok_B[row] = self._grow(row, want)
            if ok_B[row] and length is not None:
                self.length_B[row] = length
        return ok_B

    def allocate(self, pages_B: Sequence[int] | np.ndarray) -> np.ndarray:
        """As ``pages.allocate``; returns ok_B."""
        return np.array(
            [
                count >= 0
                and self.used_B[row] + count <= self.table_BM.shape[1]
                and self._grow(row, int(self.used_B[row]) + count)
                for row, count in enumerate(np.asarray(pages_B).tolist())
            ]
        )

    def share(self, row: int, pages: Sequence[int], tokens: int) -> bool:
        """As ``pages.share`` with ``count = len(pages)``; returns ok."""
        if (
            not 0 <= row < len(self.used_B)
            or self.used_B[row]
            or tokens != len(pages) * self.page_size
            or len(pages) > self.table_BM.shape[1]
            or len(set(pages)) != len(pages)
            or not all(self.owned(page) for page in pages)
        ):
            return False
        self.table_BM[row, : len(pages)] = pages
        self.used_B[row] = len(pages)
        self.length_B[row] = tokens
        self.references_P[list(pages)] += 1
        return True

    def owned(self, page: int) -> bool:
        """Whether the id is in the pool and somebody owns it."""
        return PADDING_PAGE < page < len(self.references_P) and bool(self.references_P[page] > 0)

    def retain(self, pages: Sequence[int]) -> None:
        """Adds a hold to each page.

        Raises:
          ValueError: a page that nobody owns.
        """
        for page in pages:
            if not self.owned(page):
                raise ValueError(f"page {page} has no owner; only an owned page can be held")
        np.add.at(self.references_P, list(pages), 1)

    def drop(self, pages: Sequence[int]) -> list[int]:
        """Takes a reference from each page; returns the pages that became free, in order of their ids.

        Raises:
          ValueError: a page freed twice, or that nobody owns. Nothing is changed then.
        """
        taken = np.zeros_like(self.references_P)
        for page in pages:
            if not self.owned(page) or taken[page] == self.references_P[page]:
                raise ValueError(f"page {page} has no reference left; it cannot be freed (again)")
            taken[page] += 1
        return self._unreference(taken)

    def release(
        self, rows: Sequence[int], promised: dict[int, Sequence[tuple[int, int]]] | None = None
    ) -> list[int]:
        """As ``pages.release``: ``promised`` maps a row to its expected (page, generation) pairs."""
        taken = np.zeros_like(self.references_P)
        for row in rows:
            if promised is None:
                pages = self.row(row)
            else:
                pages = [
                    page
                    for page, generation in promised[row]
                    if self.owned(page) and self.generation_P[page] == generation
                ]
            np.add.at(taken, pages, 1)
            self.table_BM[row] = PADDING_PAGE
            self.used_B[row] = self.length_B[row] = 0
            self.epoch_B[row] += np.uint32(1)
        return self._unreference(np.minimum(taken, self.references_P))

    def truncate(self, row: int, length: int) -> bool:
        """As ``pages.truncate`` of one row; returns ok."""
        if not 0 <= length <= self.length_B[row]:
            return False
        self.length_B[row] = length
        return True

    def pin(self, pages: Sequence[int]) -> None:
        """Pins each page for a transfer.

        Raises:
          ValueError: a page that nobody owns.
        """
        for page in pages:
            if not self.owned(page):
                raise ValueError(f"page {page} has no owner; only an owned page can be pinned")
        np.add.at(self.pins_P, list(pages), 1)

    def unpin(self, pages: Sequence[int]) -> list[int]:
        """Takes a pin from each page; returns the pages that became free, in order of their ids.

        Raises:
          ValueError: a page that is not pinned (that often). Nothing is changed then.
        """
        taken = np.zeros_like(self.pins_P)
        np.add.at(taken, list(pages), 1)
        if np.any(taken > self.pins_P):
            raise ValueError(f"of pages {list(pages)} one is not pinned that often")
        self.pins_P -= taken
        return self._push((taken > 0) & (self.pins_P == 0) & (self.references_P == 0))

    def differences(self, state: PageState) -> list[str]:
        """Returns the names of the arrays in which the device's state differs; empty if it is the same."""
        theirs = jax.device_get({name: getattr(state, name) for name in _STATE})
        return [name for name in _STATE if not np.array_equal(getattr(self, name), theirs[name])]

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _writable(self, row: int, length: int) -> bool:
        first, last = int(self.length_B[row]) // self.page_size, self._pages_of(length)
        written = self.table_BM[row, first : min(last, int(self.used_B[row]))]
        return bool(np.all(self.references_P[written] == 1) and np.all(self.pins_P[written] == 0))

    def _grow(self, row: int, want: int) -> bool:
        used = int(self.used_B[row])
        need = max(0, want - used)
        if need > len(self._free):
            return False
        for column in range(used, used + need):
            page = self._free.pop()
            self.table_BM[row, column] = page
            self.generation_P[page] += np.uint32(1)
            self.references_P[page] = 1
        self.used_B[row] = used + need
        return True

    def _unreference(self, taken_P: np.ndarray) -> list[int]:
        before_P = self.references_P.copy()
        self.references_P -= taken_P
        ended_P = (before_P > 0) & (self.references_P == 0)
        self.generation_P += ended_P.astype(np.uint32)
        return self._push(ended_P & (self.pins_P == 0))

    def _push(self, freed_P: np.ndarray) -> list[int]:
        freed = np.flatnonzero(freed_P & (self.generation_P < LAST_GENERATION)).tolist()
        self._free.extend(freed)
        return freed
