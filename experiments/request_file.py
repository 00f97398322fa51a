"""Requests from a JSONL file.

One JSON object a line: ``prompt`` (text) or ``tokens`` (ids), and optionally ``id``, ``max_new_tokens``,
``arrival_s``, ``session``, ``tenant``, ``deadline_s`` and ``sampling`` (options of ``SamplingParams``).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

from kvmem.engine.request import Request, SamplingParams

FIELDS = {
    "prompt",
    "tokens",
    "id",
    "max_new_tokens",
    "arrival_s",
    "session",
    "tenant",
    "deadline_s",
    "sampling",
}


def read(
    path: pathlib.Path | str, encode: Callable[[str], list[int]], vocab_size: int, max_new_tokens: int
) -> list[Request]:
    """Returns the requests of a file, in order.

    ``max_new_tokens`` is for rows that give none. A malformed row raises ValueError naming the file, the line
    and the rule; so does a file without rows and an id given twice.
    """
    found: dict[str, Request] = {}
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = _request(json.loads(line), number, encode, max_new_tokens)
            request.validate(vocab_size)
            if request.request_id in found:
                raise ValueError(f"id {request.request_id!r} is there twice")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        found[request.request_id] = request
    if not found:
        raise ValueError(f"{path}: there is no request in it")
    return list(found.values())


def _request(row: Any, number: int, encode: Callable[[str], list[int]], max_new_tokens: int) -> Request:
    if not isinstance(row, dict):
        raise ValueError(f"a request is a JSON object, found {type(row).__name__}")
    if unknown := sorted(set(row) - FIELDS):
        raise ValueError(f"unknown fields {unknown}; known: {sorted(FIELDS)}")
    if ("prompt" in row) == ("tokens" in row):
        raise ValueError("a request has either a prompt or tokens")
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise ValueError(f"prompt {row['prompt']!r} must be text")
    tokens = encode(row["prompt"]) if "prompt" in row else row["tokens"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError("tokens must be a list of integers")
    rest = {name: row[name] for name in ("arrival_s", "session", "tenant", "deadline_s") if name in row}
    return Request(
        request_id=str(row.get("id", f"line{number}")),
        prompt_tokens=tuple(tokens),
        max_new_tokens=row.get("max_new_tokens", max_new_tokens),
        sampling=SamplingParams.from_mapping(row.get("sampling", {})),
        **rest,
    )
