"""Reads ``claims.md``: every published number, the metric that answers it, and how near is near enough."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

TABLE = pathlib.Path(__file__).with_name("claims.md")
How = Literal[
    "arithmetic", "CPU mesh", "rank slice on one H200", "some GPUs", "8 GPUs", "proxy model", "not yet"
]
Status = Literal["matches", "differs", "contradicted", "measured", "estimated", "open"]
COLUMNS = ["id", "published", "within", "unit", "metric", "open", "note"]


class Found(NamedTuple):
    """A metric, how it was obtained, and the record it was read from (None: the run that asks).

    ``estimated``: measured parts were put together with stated costs for what was not run.
    """

    value: float
    how: How
    record: str | None = None
    note: str = ""
    estimated: bool = False


@dataclasses.dataclass(frozen=True)
class Claim:
    """One published number.

    Attributes:
      id: a name of its own.
      section: heading of the table it stands in.
      published: the number; None where the account names a quantity and gives no number.
      within: the largest difference that still counts as the same number; None if contradicted: the account
        states it, and its own numbers do not bear it out.
      unit: of ``published`` and of the metric.
      metric: name of the metric that answers it.
      open: why there is no answer while no record holds the metric.
      note: what a reader must know about the comparison.
    """

    id: str
    section: str
    published: float | None
    within: float | None
    unit: str
    metric: str
    open: str
    note: str

    def settle(self, found: Found | None) -> dict[str, Any]:
        """Returns the row of a record's ``claims``.

        Only arithmetic can match or differ: a measurement on other hardware, or what was put together from
        measured parts, is set beside the published number (``measured``, ``estimated``) and no more is said.
        """
        row: dict[str, Any] = {"id": self.id, "published": self.published, "ours": None, "unit": self.unit}
        if found is None:
            why = "; ".join(text for text in (self.open, self.note) if text)
            return row | {"how": "not yet", "status": "open", "why": why, "record": None}
        status: Status = "estimated" if found.estimated else "measured"
        if found.how == "arithmetic" and self.published is not None:
            near = self.within is not None and abs(found.value - self.published) <= self.within
            status = "matches" if near else "contradicted" if self.within is None else "differs"
        why = "; ".join(text for text in (self.note, found.note) if text)
        return row | {
            "ours": found.value,
            "how": found.how,
            "status": status,
            "why": why,
            "record": found.record,
        }


def settle(claims: Iterable[Claim], found: Mapping[str, Found]) -> list[dict[str, Any]]:
    """Returns the rows of all claims, each with the metric found for it or the reason why there is none."""
    return [claim.settle(found.get(claim.metric)) for claim in claims]


@functools.cache
def load(path: pathlib.Path = TABLE) -> tuple[Claim, ...]:
    """Returns the claims in order. A malformed row raises ValueError naming the line and the rule."""
    reasons: dict[str, str] = {}
    claims: dict[str, Claim] = {}
    section = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells == COLUMNS or not set(line) - set("|-"):
            continue
        if not section:
            reasons[cells[0]] = cells[1]
            continue
        if len(cells) != len(COLUMNS) or cells[5] not in reasons or cells[0] in claims:
            raise ValueError(
                f"{path}:{number}: a claim has a new id, {COLUMNS} and a known reason, got {cells}"
            )
        id, published, within, unit, metric, reason, note = cells
        try:
            value = None if published == "-" else float(published)
            width = None if within == "contradicted" else float(within)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: published and within are numbers: {error}") from error
        claims[id] = Claim(id, section, value, width, unit, metric, reasons[reason], note)
    return tuple(claims.values())


def published(prefix: str) -> dict[str, float]:
    """Returns the published numbers whose ids begin with ``prefix`` and a dot, by the rest of the id.

    No such claim raises ValueError.
    """
    head = f"{prefix}."
    found = {c.id.removeprefix(head): c.published for c in load() if c.id.startswith(head)}
    if not found:
        raise ValueError(f"{prefix}: no published claim begins so")
    return {name: value for name, value in found.items() if value is not None}
