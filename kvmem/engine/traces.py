"""Loaders: published serving traces and files of prompts. A bad row is an error that names file and line."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import io
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvmem.engine.errors import EngineError, RequestError
from kvmem.engine.request import Real, Request, SamplingParams

BLOCK_TOKENS = 512
SCHEMAS = ("mooncake", "azure", "burstgpt")


class TraceError(EngineError, ValueError):
    """A row of a trace or a prompt file that breaks its schema; the message begins with file:line."""


@dataclasses.dataclass(frozen=True)
class TraceRow:
    """One request of a trace: lengths, not tokens.

    Attributes:
      arrival_s: seconds after the trace's first request.
      input_tokens: length of the prompt.
      output_tokens: length of the answer.
      blocks: ids of the prompt's 512-token blocks; equal ids mean equal tokens. Empty if the trace has none.
      session: a conversation's id, or None.
    """

    arrival_s: Real
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: str | None = None


def _open(path: pathlib.Path) -> io.TextIOBase:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _count(row: dict[str, Any], name: str, least: int) -> int:
    value = row.get(name)
    _require(value is not None and str(value).strip() != "", f"{name} is missing")
    _require(not isinstance(value, bool | float), f"{name}={value!r} is not an integer")
    number = int(value)  # type: ignore[arg-type]
    _require(number >= least, f"{name}={number} must be at least {least}")
    return number


def _mooncake_row(row: dict[str, Any]) -> TraceRow:
    unknown = set(row) - {"timestamp", "input_length", "output_length", "hash_ids"}
    _require(not unknown, f"unknown fields {sorted(unknown)}")
    length = _count(row, "input_length", 1)
    blocks = row.get("hash_ids")
    _require(isinstance(blocks, list), "hash_ids must be a list")
    assert isinstance(blocks, list)
    _require(all(type(block) is int for block in blocks), "hash_ids must hold integers")
    expected = -(-length // BLOCK_TOKENS)
    _require(
        len(blocks) == expected,
        f"{len(blocks)} hash_ids for {length} tokens; {BLOCK_TOKENS}-token blocks make {expected}",
    )
    milliseconds = _count(row, "timestamp", 0)
    return TraceRow(milliseconds / 1e3, length, _count(row, "output_length", 0), tuple(blocks))


def _azure_row(row: dict[str, Any]) -> TraceRow:
    stamp = str(row["TIMESTAMP"])
    whole, _, fraction = stamp.partition(".")
    parsed = datetime.datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=datetime.UTC)
    seconds = parsed.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    return TraceRow(seconds, _count(row, "ContextTokens", 1), _count(row, "GeneratedTokens", 0))


def _burstgpt_row(row: dict[str, Any]) -> TraceRow:
    prompt, answer = _count(row, "Request tokens", 1), _count(row, "Response tokens", 0)
    total = _count(row, "Total tokens", 1)
    _require(prompt + answer == total, f"Total tokens={total} is not {prompt} + {answer}")
    session = (row.get("Session ID") or "").strip() or None
    return TraceRow(float(row["Timestamp"]), prompt, answer, session=session)


_COLUMNS: dict[str, tuple[Callable[[dict[str, Any]], TraceRow], tuple[str, ...]]] = {
    "azure": (_azure_row, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    "burstgpt": (
        _burstgpt_row,
        (
            "Timestamp",
            "Session ID",
            "Elapsed time",
            "Model",
            "Request tokens",
            "Response tokens",
            "Total tokens",
            "Log Type",
        ),
    ),
}


def _json_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def load_trace(path: pathlib.Path | str, schema: str, limit: int | None = None) -> list[TraceRow]:
    """Reads a trace (plain or .gz), in the order of the file, with arrivals counted from its first request.

    Args:
      path: the file.
      schema: ``mooncake`` (JSONL: timestamp in ms, input_length, output_length, hash_ids), ``azure`` (CSV:
        TIMESTAMP, ContextTokens, GeneratedTokens) or ``burstgpt`` (CSV: Timestamp, Session ID, Elapsed time,
        Model, Request tokens, Response tokens, Total tokens, Log Type).
      limit: rows to read, or None for all.

    Raises:
      TraceError: a row is malformed or arrives before the one above it, or the file holds no row.
      ValueError: the schema is unknown.
    """
    if schema not in SCHEMAS:
        raise ValueError(f"unknown trace schema {schema!r}; known: {', '.join(SCHEMAS)}")
    path = pathlib.Path(path)
    rows: list[TraceRow] = []
    for number, parse in _parsers(path, schema):
        if limit is not None and len(rows) >= limit:
            break
        try:
            row = parse()
            _require(not rows or row.arrival_s >= rows[-1].arrival_s, "arrives before the row above it")
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        rows.append(row)
    if not rows:
        raise TraceError(f"{path}:1: no rows")
    start = rows[0].arrival_s
    return [dataclasses.replace(row, arrival_s=row.arrival_s - start) for row in rows]


def _parsers(path: pathlib.Path, schema: str) -> Iterator[tuple[int, Callable[[], TraceRow]]]:
    if schema == "mooncake":
        for number, line in _json_lines(path):
            yield number, lambda line=line: _mooncake_row(_mapping(line))  # type: ignore[misc]
        return
    parse, columns = _COLUMNS[schema]
    with _open(path) as lines:
        reader = csv.DictReader(lines, strict=True)
        header = tuple(reader.fieldnames or ())
        if header != columns:
            raise TraceError(f"{path}:1: columns {list(header)} are not {list(columns)}")
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise TraceError(f"{path}:{reader.line_num}: {error}") from error
            yield reader.line_num, lambda row=row: parse(_complete(row))  # type: ignore[misc]


def _mapping(line: str) -> dict[str, Any]:
    value = json.loads(line)
    _require(isinstance(value, dict), "a row must be a JSON object")
    return value


def _complete(row: dict[Any, Any]) -> dict[str, Any]:
    _require(None not in row, "more fields than columns")
    missing = [name for name, value in row.items() if value is None]
    _require(not missing, f"fewer fields than columns: {missing} missing")
    return row


_PROMPT_FIELDS = {field.name for field in dataclasses.fields(Request)} | {"prompt"}


def load_prompts(
    path: pathlib.Path | str,
    *,
    max_new_tokens: int,
    vocab_size: int,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> list[Request]:
    """Reads requests from JSONL: ``prompt`` (text) or ``prompt_tokens`` (ids), other fields as in
    ``Request``.

    Args:
      path: the file, plain or .gz.
      max_new_tokens: for rows that name none.
      vocab_size: of the model that is to answer.
      encode: text to token ids; without it a text prompt is an error.

    Raises:
      TraceError: a row is malformed, has an unknown field or repeats a request_id, or the file holds no row.
    """
    path = pathlib.Path(path)
    requests: dict[str, Request] = {}
    for number, line in _json_lines(path):
        try:
            request = _prompt_row(_mapping(line), f"{path.stem}-{number}", max_new_tokens, encode)
            request.validate(vocab_size)
            _require(request.request_id not in requests, f"request_id {request.request_id!r} is not unique")
        except (ValueError, TypeError, RequestError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        requests[request.request_id] = request
    if not requests:
        raise TraceError(f"{path}:1: no rows")
    return list(requests.values())


def _prompt_row(
    row: dict[str, Any], name: str, max_new_tokens: int, encode: Callable[[str], Sequence[int]] | None
) -> Request:
    unknown = sorted(set(row) - _PROMPT_FIELDS)
    _require(not unknown, f"unknown fields {unknown}; known: {sorted(_PROMPT_FIELDS)}")
    _require(("prompt" in row) != ("prompt_tokens" in row), "give one of prompt and prompt_tokens")
    if "prompt" in row:
        _require(encode is not None, "a text prompt needs a tokenizer")
        assert encode is not None
        tokens = tuple(encode(row["prompt"]))
    else:
        tokens = tuple(row["prompt_tokens"])
        _require(all(type(token) is int for token in tokens), "prompt_tokens must be integers")
    rest = {k: v for k, v in row.items() if k not in {"prompt", "prompt_tokens", "sampling"}}
    sampling = SamplingParams.from_mapping(row.get("sampling", {}))
    return Request(
        **{"request_id": name, "max_new_tokens": max_new_tokens, **rest},
        prompt_tokens=tokens,
        sampling=sampling,
    )
