"""Requests, sampling parameters, results and the engine's configuration: plain frozen data, checked once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kvmem.engine.errors import RequestError

Real = float | int
Weights = Literal["f32", "bf16", "fp8_block", "int4_group"]
Form = Literal["absorbed", "naive"]
Implementation = Literal["xla", "mosaic"]
FinishReason = Literal["stop", "length", "integrity", "cancelled", "deadline", "error", "refused"]
FINISH_REASONS: tuple[str, ...] = ("stop", "length", "integrity", "cancelled", "deadline", "error", "refused")
SUCCESS: frozenset[str] = frozenset({"stop", "length"})
DETECTORS = ("off", "tags", "tags_digest")
REUSE_POLICIES = ("recompute", "widen", "refuse")


def _rule(holds: bool, what: str) -> None:
    if not holds:
        raise RequestError(what)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. ``temperature=0`` is greedy and ignores the filters.

    Attributes:
      temperature: divides the logits; 0 takes the largest logit (the lowest id on a tie).
      top_k: keep the k largest logits; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches ``top_p``.
      min_p: keep tokens at least ``min_p`` times as likely as the most likely one.
      seed: of this request alone; token i is drawn with ``fold_in(key(seed), i)``, whatever else runs.
      logprobs: report the log-probability of each chosen token under the unfiltered, unscaled distribution.
      stop_token_ids: end the answer (the token is kept), in addition to the model's own end tokens.
      stop_strings: end the answer when its text contains one; needs an engine with a detokenizer.
      ignore_eos: run to ``max_new_tokens``, as fixed-length benchmarks do.
    """

    temperature: Real = 0.0
    top_k: int = 0
    top_p: Real = 1.0
    min_p: Real = 0.0
    seed: int = 0
    logprobs: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters from outside. Raises RequestError on an unknown option or a bad value."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        _rule(not unknown, f"unknown sampling options {unknown}; known: {sorted(known)}")
        lists = {k: tuple(options[k]) for k in ("stop_token_ids", "stop_strings") if k in options}
        sampling = cls(**{**options, **lists})
        sampling.validate()
        return sampling

    def validate(self) -> None:
        """Raises RequestError naming the first value outside its range."""
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            _rule(isinstance(value, int | float) and math.isfinite(value), f"{name}={value!r} must be finite")
        _rule(self.temperature >= 0, f"temperature={self.temperature} must be >= 0")
        _rule(
            isinstance(self.top_k, int) and self.top_k >= 0, f"top_k={self.top_k!r} must be an integer >= 0"
        )
        _rule(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]")
        _rule(0 <= self.min_p <= 1, f"min_p={self.min_p} must be in [0, 1]")
        _rule(isinstance(self.seed, int) and 0 <= self.seed < 2**32, f"seed={self.seed!r} must fit 32 bits")
        _rule(all(self.stop_strings), "an empty stop string would stop every answer")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to answer it.

    Attributes:
      request_id: unique while the request lives.
      prompt_tokens: token ids, at least one.
      max_new_tokens: at least 1.
      arrival_s: seconds after the start of the run; an open-loop replay submits it then.
      session: turns of one conversation share it; the router keeps them together.
      tenant: prefix pages are shared within one tenant only.
      deadline_s: seconds after arrival at which the request is abandoned, or None.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    arrival_s: Real = 0.0
    session: str | None = None
    tenant: str = ""
    deadline_s: Real | None = None

    def validate(self, vocab_size: int) -> None:
        """Raises RequestError if any field is outside its range for a vocabulary of ``vocab_size``."""
        where = f"request {self.request_id!r}"
        _rule(
            isinstance(self.request_id, str) and bool(self.request_id),
            "request_id must be a non-empty string",
        )
        _rule(len(self.prompt_tokens) > 0, f"{where}: the prompt is empty")
        _rule(
            all(isinstance(token, int) for token in self.prompt_tokens),
            f"{where}: token ids must be integers",
        )
        low, high = min(self.prompt_tokens), max(self.prompt_tokens)
        _rule(low >= 0 and high < vocab_size, f"{where}: token ids {low}..{high} outside [0, {vocab_size})")
        _rule(
            isinstance(self.max_new_tokens, int) and self.max_new_tokens >= 1,
            f"{where}: max_new_tokens={self.max_new_tokens!r} must be an integer >= 1",
        )
        _rule(
            math.isfinite(self.arrival_s) and self.arrival_s >= 0, f"{where}: arrival_s={self.arrival_s} < 0"
        )
        _rule(
            self.deadline_s is None or self.deadline_s > 0,
            f"{where}: deadline_s={self.deadline_s} must be > 0",
        )
        self.sampling.validate()


@dataclasses.dataclass(frozen=True)
class RequestResult:
    """What became of a request. Times are seconds on the engine's clock; None if it never got that far.

    Attributes:
      tokens: every published token, in order; what was published before a failure stays here.
      finish_reason: one of FINISH_REASONS.
      cached_tokens: prompt tokens whose cache entries were reused instead of computed.
      logprobs: of each token if asked for, else empty.
      error: what went wrong, in words; empty if nothing did.
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[Real, ...] = ()
    error: str = ""
    arrival_s: Real = 0.0
    admitted_s: Real | None = None
    first_token_s: Real | None = None
    finished_s: Real = 0.0
    retractions: int = 0
    retries: int = 0
    replica: int = 0
    session: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the request ended with a whole answer."""
        return self.finish_reason in SUCCESS


class Event(NamedTuple):
    """Something that a step did for one request: a published token, or its end."""

    kind: Literal["token", "finished"]
    request_id: str
    token: int | None = None
    result: RequestResult | None = None


@dataclasses.dataclass(frozen=True)
class PhaseFormat:
    """How one phase holds weights and cache: names known to kvmem.models.params and kvmem.cache.store."""

    weights: Weights
    cache: str
    index: str | None = None
    scale: Real = 1.0


def default_formats(family: str) -> dict[str, PhaseFormat]:
    """The published formats of a model family, by phase (claims.md sections 1 and 2)."""
    if family == "kimi":
        return {
            "prefill": PhaseFormat("int4_group", "bf16_576"),
            "decode": PhaseFormat("int4_group", "fp8_576"),
        }
    if family == "glm":
        return {
            "prefill": PhaseFormat("fp8_block", "bf16_576", "index_132"),
            "decode": PhaseFormat("int4_group", "fp8_656", "index_132"),
        }
    raise ValueError(f"unknown model family {family!r}; known: kimi, glm")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of one engine (one prefill pool and one decode pool).

    Attributes:
      max_rows: decode rows, which is the highest concurrency.
      prefill_rows: prompts prefilled side by side; with more than one, a long prompt cannot block short ones.
      prefill_pages, decode_pages: pages of each pool, of which page 0 is padding.
      max_pages_per_row: columns of a page-table row; bounds prompt plus answer.
      prefill_chunk: tokens of a row in one prefill step. Chunks end at its multiples, whatever was reused.
      decode_steps_per_prefill: decode steps between two prefill steps while both have work.
      integrity: one of DETECTORS.
      digest_pages: with ``tags_digest``, how many pages of a row a step compares, in turn, beside the one
        that it writes next; None compares all. What leaves a pool is compared whole.
      batch_invariant: run rows one at a time inside the step, so outputs do not depend on the batch.
      row_buckets: decode row counts to compile besides ``max_rows``; a step uses the smallest that holds its
        rows.
      page_buckets: table widths to compile besides ``max_pages_per_row``.
      queue_limit: waiting requests beyond which ``submit`` raises QueueFull.
      max_bypass: how often a request at the head of the queue may be overtaken by smaller ones.
      retry_budget: retries after an integrity abort, for each request and ...
      retry_budget_per_1000: ... for each thousand requests, so that a hot fault makes no retry storm.
      lease_s: seconds on the engine's clock that a transfer into the decode pool may take.
      prefix_cache: keep finished prompt pages in a radix tree.
      reuse: what a later prefill does with pages that decode made, one of REUSE_POLICIES.
      overlap: launch step n+1 before reading step n.
    """

    max_rows: int
    prefill_pages: int
    decode_pages: int
    max_pages_per_row: int
    prefill: PhaseFormat
    decode: PhaseFormat
    page_size: int = 64
    prefill_rows: int = 2
    prefill_chunk: int = 64
    decode_steps_per_prefill: int = 1
    integrity: str = "tags"
    digest_pages: int | None = None
    batch_invariant: bool = False
    row_buckets: tuple[int, ...] = ()
    page_buckets: tuple[int, ...] = ()
    queue_limit: int = 4096
    max_bypass: int = 16
    retry_budget: int = 0
    retry_budget_per_1000: int = 10
    lease_s: Real = 30.0
    prefix_cache: bool = True
    reuse: str = "recompute"
    overlap: bool = True
    attention: Form = "absorbed"
    implementation: Implementation = "xla"
    reduction: Literal["auto", "nccl", "mosaic", "mosaic_norm"] = "auto"

    def __post_init__(self) -> None:
        for name in (
            "max_rows",
            "prefill_rows",
            "page_size",
            "max_pages_per_row",
            "prefill_chunk",
            "queue_limit",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("prefill_pages", "decode_pages"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)}: page 0 is padding, so a pool has at least 2")
        if self.integrity not in DETECTORS:
            raise ValueError(f"integrity={self.integrity!r} is none of {DETECTORS}")
        if self.digest_pages is not None and self.digest_pages < 1:
            raise ValueError(f"digest_pages={self.digest_pages} must be at least 1, or None for all")
        if self.reuse not in REUSE_POLICIES:
            raise ValueError(f"reuse={self.reuse!r} is none of {REUSE_POLICIES}")
        for name, limit in (("row_buckets", self.max_rows), ("page_buckets", self.max_pages_per_row)):
            bad = [size for size in getattr(self, name) if not 1 <= size < limit]
            if bad:
                raise ValueError(f"{name}={bad} must lie in [1, {limit})")

    @property
    def prefill_slots(self) -> int:
        """Rows of the prefill pool: one more, which never prefills, if decode's pages are widened into it."""
        return self.prefill_rows + (self.reuse == "widen")

    @property
    def max_tokens_per_row(self) -> int:
        """Longest prompt plus answer that any pool and any page-table row can hold, in tokens."""
        pages = min(self.max_pages_per_row, self.decode_pages - 1)
        return pages * self.page_size

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that the prefill pool can hold, in tokens."""
        return min(self.max_pages_per_row, self.prefill_pages - 1) * self.page_size


def bucket(size: int, buckets: Sequence[int], largest: int) -> int:
    """The smallest of ``buckets`` and ``largest`` that holds ``size``. Raises ValueError if none does."""
    for candidate in sorted((*buckets, largest)):
        if size <= candidate:
            return candidate
    raise ValueError(f"{size} exceeds the largest bucket {largest}")
