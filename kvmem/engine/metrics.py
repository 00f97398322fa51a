"""What a run measured: latencies, throughput, goodput, counters, incidents; as a mapping and as Prometheus
text.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence

from kvmem.engine.request import FINISH_REASONS, Real, RequestResult

GIB = 2**30
QUANTILES = (50, 95, 99)


@dataclasses.dataclass(frozen=True)
class Incident:
    """Something that went wrong, with what is needed to look into it.

    Attributes:
      time_s: on the engine's clock.
      kind: ``integrity``, ``check_not_run``, ``nonfinite_logits``, ``transfer`` or ``fingerprint``.
      request_id: the request that it hit, or empty.
      where: ``prefill``, ``decode``, ``transfer`` or ``retract``.
      detail: of an integrity mismatch: cause, logical page, expected and found page and generation.
      fingerprint: digest of the pool's configuration, to tell a change of model, format or software.
    """

    time_s: Real
    kind: str
    request_id: str
    where: str
    detail: Mapping[str, object]
    fingerprint: str = ""


def percentile(values: Sequence[Real], q: Real) -> Real:
    """The q-th percentile with linear interpolation. Raises ValueError if there are no values."""
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ttft_s(result: RequestResult) -> Real | None:
    """Seconds from arrival to the first published token; None without one."""
    return None if result.first_token_s is None else result.first_token_s - result.arrival_s


def tpot_s(result: RequestResult) -> Real | None:
    """Seconds per token after the first; None for answers of fewer than two tokens."""
    if result.first_token_s is None or len(result.tokens) < 2:
        return None
    return (result.finished_s - result.first_token_s) / (len(result.tokens) - 1)


def queue_s(result: RequestResult) -> Real | None:
    """Seconds from arrival to the start of prefill; None if it never started."""
    return None if result.admitted_s is None else result.admitted_s - result.arrival_s


@dataclasses.dataclass(frozen=True)
class LatencyBound:
    """The service level that goodput counts against."""

    ttft_s: Real
    tpot_s: Real

    def holds(self, result: RequestResult) -> bool:
        """Whether a request ended well and inside the bound; a one-token answer has no time per token to
        miss.
        """
        first, each = ttft_s(result), tpot_s(result)
        return (
            result.ok and first is not None and first <= self.ttft_s and (each is None or each <= self.tpot_s)
        )


def summarise(
    results: Sequence[RequestResult],
    *,
    bound: LatencyBound | None = None,
    memory_bytes: int | None = None,
    quality_equal: bool | None = None,
) -> dict[str, Real]:
    """Figures of a run, by flat name. What cannot be computed is absent.

    Args:
      results: of every request, in any order.
      bound: for ``goodput_*`` and ``useful_tok_s_per_gib``.
      memory_bytes: weights and pools of the deployment.
      quality_equal: whether the format passed the quality equivalence test. ``useful_tok_s_per_gib`` counts
        tokens only if it did, so it is absent unless this is True.
    """
    out: dict[str, Real] = {"requests": len(results)}
    reasons: collections.Counter[str] = collections.Counter(result.finish_reason for result in results)
    out |= {f"finished.{reason}": reasons.get(reason, 0) for reason in FINISH_REASONS}
    if not results:
        return out
    out["task_success"] = sum(result.ok for result in results) / len(results)
    out["timeout_rate"] = reasons.get("deadline", 0) / len(results)
    out["retries"] = sum(result.retries for result in results)
    out["retractions"] = sum(result.retractions for result in results)
    for name, measure in (("ttft_s", ttft_s), ("tpot_s", tpot_s), ("queue_s", queue_s)):
        values = [value for value in map(measure, results) if value is not None]
        if values:
            out |= {f"{name}.p{q}": percentile(values, q) for q in QUANTILES}
            out[f"{name}.mean"] = sum(values) / len(values)
    prompt = sum(result.prompt_tokens for result in results if result.admitted_s is not None)
    if prompt:
        out["prefix_hit_rate"] = sum(result.cached_tokens for result in results) / prompt
    span = max(r.finished_s for r in results) - min(r.arrival_s for r in results)
    if span > 0:
        out["span_s"] = span
        out["throughput_tok_s"] = sum(len(result.tokens) for result in results) / span
        out["throughput_req_s"] = sum(result.ok for result in results) / span
        out["prompt_tok_s"] = prompt / span
        if bound is not None:
            good = [result for result in results if bound.holds(result)]
            out["goodput_req_s"] = len(good) / span
            out["goodput_tok_s"] = sum(len(result.tokens) for result in good) / span
            if memory_bytes and quality_equal:
                out["useful_tok_s_per_gib"] = out["goodput_tok_s"] / (memory_bytes / GIB)
    return out


def to_jsonl(results: Iterable[RequestResult]) -> str:
    """One JSON object a line for each request, with its latencies; tokens are counted, not listed."""
    lines = []
    for result in results:
        row = dataclasses.asdict(result)
        row["tokens"] = len(result.tokens)
        del row["logprobs"]
        row |= {"ttft_s": ttft_s(result), "tpot_s": tpot_s(result), "queue_s": queue_s(result)}
        lines.append(json.dumps(row, sort_keys=True, allow_nan=False) + "\n")
    return "".join(lines)


def to_prometheus(metrics: Mapping[str, Real], prefix: str = "kvmem") -> str:
    """Metrics as Prometheus text. ``a.b`` becomes ``a{kind="b"}``, and ``a.p95`` ``a{quantile="0.95"}``."""
    families: dict[str, list[str]] = collections.defaultdict(list)
    for name, value in metrics.items():
        head, _, label = name.partition(".")
        family = f"{prefix}_{''.join(c if c.isalnum() else '_' for c in head)}"
        if label.startswith("p") and label[1:].isdigit():
            label = f'{{quantile="{int(label[1:]) / 100:g}"}}'
        elif label:
            escaped = label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            label = f'{{kind="{escaped}"}}'
        number = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN" if value != value else repr(value))
        families[family].append(f"{family}{label} {number}")
    lines = []
    for family, samples in families.items():
        lines += [f"# TYPE {family} gauge", *samples]
    return "".join(line + "\n" for line in lines)
