"""Markdown and plain-text tables out of records' metrics and claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

HEADER = ("claim", "published", "ours", "unit", "how", "status")


def number(value: float | None) -> str:
    """Returns a number as tables show it: five significant digits, thousands set apart, null as a dash."""
    if value is None:
        return "–"
    if float(value).is_integer() or abs(value) >= 100_000:
        return f"{value:,.0f}"
    return f"{value:.2g}" if abs(value) < 1e-4 else f"{value:,.5g}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; a cell's own bars are escaped."""
    lines = [list(header), ["---"] * len(header)]
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table for a terminal, columns padded to their widest cell."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([padded[0], "-" * sum(widths, 2 * len(widths) - 2), *padded[1:]])


def claim_cells(row: dict[str, Any]) -> list[str]:
    """Returns a claim as cells under ``HEADER``."""
    return [row["id"], number(row["published"]), number(row["ours"]), row["unit"], row["how"], row["status"]]


def tally(rows: Sequence[dict[str, Any]]) -> str:
    """Returns one line that counts claims by status."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    return f"{len(rows)} claims: " + ", ".join(f"{n} {status}" for status, n in counts.items())


def settled(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the Markdown table of the claims that have an answer, then the open ones by reason."""
    answered = [row for row in rows if row["ours"] is not None]
    lines = [markdown((*HEADER, "note"), [[*claim_cells(row), row["why"]] for row in answered])]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["ours"] is None:
            reasons.setdefault(row["why"].split(";")[0], []).append(
                f"{row['id']} ({number(row['published'])})"
            )
    lines += [f"Open, {why}: {', '.join(ids)}." for why, ids in reasons.items()]
    return "\n\n".join(lines)
