"""The only reader of records: what committed runs measured, and the tables that the README takes from them.

    python -m experiments.aggregate                           fills in the README's tables
    python -m experiments.aggregate --check                   says whether they are what the records give
    python -m experiments.aggregate --adopt=DIR/record.json   commits a run's record first

A committed record is ``experiments/results/<launcher>/<name>.json``. Of several that hold a metric the newest
one counts.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
from absl import app, flags

from experiments import claims, result_tables, tables
from experiments.claims import Found, How
from kvmem import models, record
from kvmem.evaluate import stats

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"

# A rank slice has no collectives: each costs this much instead, an XLA and NCCL all-reduce of 14 to 448 KiB
# between two H200s over NVLink inside one program, until eight have been measured (``_all_reduce``). A step
# has two per layer, embedding, logits and status.
ALL_REDUCE_US = 22.0
MODELS = {"kimi": "kimi_k2.6", "glm": "glm_5.2"}


class Committed(NamedTuple):
    kind: str
    path: str  # relative to the repository
    record: dict[str, Any]

    @property
    def how(self) -> How:
        gpus = sum(d["count"] for d in self.record["devices"] if d["platform"] in ("gpu", "cuda"))
        by_count: dict[int, How] = {0: "CPU mesh", 1: "rank slice on one H200", 8: "8 GPUs"}
        return by_count.get(gpus, "some GPUs")

    @property
    def note(self) -> str:
        """What lowers the record's worth, or empty."""
        dirty = "uncommitted changes" if self.record["git"]["dirty"] else ""
        failed = "the run failed in another part" if self.record["status"] == "failed" else ""
        return "; ".join(text for text in (dirty, failed) if text)


def committed(root: pathlib.Path = RESULTS) -> list[Committed]:
    """Returns the committed records, oldest first, but those of runs that were stopped.

    A run that failed in one part holds what its other parts measured, and says so in ``Committed.note``.
    """
    found = []
    for path in sorted(root.glob("*/*.json")):
        content = record.read(path)
        if content["status"] != "interrupted":
            name = path.relative_to(root.parents[1]) if root.is_relative_to(ROOT) else path
            found.append(Committed(path.parent.name, str(name), content))
    return sorted(found, key=lambda c: c.record["created_utc"])


def read(path: pathlib.Path | str) -> dict[str, Any]:
    """Returns any record, committed or of a run just made."""
    return record.read(path)


def claims_frame(content: dict[str, Any]) -> pd.DataFrame:
    """Returns a record's claims, indexed by id, with the section that each stands in."""
    sections = {claim.id: claim.section for claim in claims.load()}
    frame = pd.DataFrame(content["claims"]).set_index("id")
    return frame.assign(section=[sections.get(id, "?") for id in frame.index])


def metrics_frame(content: dict[str, Any]) -> pd.DataFrame:
    """Returns a record's metrics as one column, ``value``, indexed by name."""
    return pd.DataFrame({"value": pd.Series(content["metrics"], dtype=float)})


def newest(kind: str, root: pathlib.Path = RESULTS) -> Committed:
    """Returns the newest committed record of a launcher; none raises ValueError."""
    found = [item for item in committed(root) if item.kind == kind]
    if not found:
        raise ValueError(f"there is no record of {kind} under {root}")
    return found[-1]


def measured(root: pathlib.Path = RESULTS) -> dict[str, Found]:
    """Returns every committed metric, and what follows from them under the names that claims ask for."""
    found: dict[str, Found] = {}
    for item in committed(root):
        if item.kind == "reproduce":
            continue  # a report holds what others measured
        found |= {k: Found(v, item.how, item.path, item.note) for k, v in item.record["metrics"].items()}
    derived = _layers(found) | _overhead(found) | _false_positives(found)
    return derived | found  # a measured rate outweighs a derived one


def _layers(found: dict[str, Found]) -> dict[str, Found]:
    """Returns decode rates and format ratios from the layer benchmark of ``kernel_bench``."""
    derived: dict[str, Found] = {}
    for short, model in MODELS.items():
        layers = models.get_config(model).num_layers
        for name, layer in found.items():
            match = re.fullmatch(rf"layer\.{short}\.(bf16|fp8)\.b(\d+)\.us", name)
            if not match or layer.how != "rank slice on one H200":
                continue
            cache, rows = match[1], int(match[2])
            each_us, whence = _all_reduce(found, rows * models.get_config(model).hidden_size)
            step_us = layers * layer.value + (2 * layers + 3) * each_us
            note = (
                f"{layers} x the layer's time + {2 * layers + 3} all-reduces of {each_us:.3g} us{whence}; "
                "context 2,048; embedding, head, sampling and indexer left out"
            )
            arm = cache if short == "kimi" else "w_int4"
            if short == "kimi" or cache == "fp8":  # GLM's INT4 rows ran on an 8-bit cache
                name = f"decode.{model}.{arm}.c{rows}.tok_s"
                derived[name] = Found(1e6 * rows / step_us, layer.how, layer.record, note, estimated=True)
            other = found.get(f"layer.{short}.bf16.b{rows}.us")
            if cache == "fp8" and other and other.record == layer.record:
                ratio = f"layer.{model}.fp8_over_bf16.c{rows}"
                note = "rates of one layer on one rank, no collectives, context 2,048"
                derived[ratio] = Found(other.value / layer.value, layer.how, layer.record, note)
    return derived


def _overhead(found: dict[str, Found]) -> dict[str, Found]:
    """Returns what the check costs a decode step of Kimi K2.6, from ``check_cost``: one rank, all layers.

    The published figures are of whole deployments at concurrency 1 to 8 and prompts of 8,192 tokens.
    """
    model = models.get_config(MODELS["kimi"])
    check, layers = (found.get(f"integrity.{name}") for name in ("check.tags.b64.us", "step.layers"))
    added: dict[int, float] = {}
    for name, step in found.items():
        match = re.fullmatch(r"integrity\.step\.off\.b(\d+)\.l8192\.us", name)
        if match and check and layers and check.record == layers.record == step.record:
            rows, sums = int(match[1]), 2 * model.num_layers + 3
            each_us, _ = _all_reduce(found, rows * model.hidden_size)
            added[rows] = 100 * check.value / (step.value * model.num_layers / layers.value + sums * each_us)
    few = [percent for rows, percent in added.items() if rows <= 8]
    if not few or check is None:
        return {}
    note = (
        f"the check alone, {check.value:.3g} us, over a decode step of {model.num_layers} layers on one rank "
        f"with its all-reduces, context 8,192; prefill and the host are left out"
    )
    figures = {
        "throughput_pct.max": -min(few),
        "throughput_pct.min": -max(few),
        "latency_p95_pct.min": min(few),
        "latency_p95_pct.max": max(few),
        "upper_bound_pct": max(added.values()),
    }
    return {
        f"integrity.{name}": Found(value, check.how, check.record, note, estimated=True)
        for name, value in figures.items()
    }


def _all_reduce(found: dict[str, Found], elements: int) -> tuple[float, str]:
    """Returns what an all-reduce of f32 ``elements`` over eight ranks costs, in us, and where that is from.

    A figure of fewer GPUs is not taken: with eight, a rank waits for seven others.
    """
    sizes = {
        int(match[1]): item
        for name, item in found.items()
        if (match := re.fullmatch(r"allreduce\.n8\.(\d+)\.nccl\.us", name))
    }
    if not sizes:
        return ALL_REDUCE_US, ""
    kib = min(sizes, key=lambda size: abs(size - 4 * elements / 1024))
    return sizes[kib].value, f" ({kib} KiB over NCCL, as measured on eight)"


def _false_positives(found: dict[str, Found]) -> dict[str, Found]:
    checks, wrong = (found.get(f"clean.tags.{name}") for name in ("page_checks", "false_positives"))
    if checks is None or wrong is None:
        return {}
    bound = stats.rate_upper_bound(int(wrong.value), int(checks.value))
    note = f"{wrong.value:,.0f} false positives in {checks.value:,.0f} page checks"
    return {"integrity.false_positive_bound": Found(bound, checks.how, checks.record, note)}


def _source(item: Committed) -> str:
    sha, note = item.record["git"]["sha"][:12], f" ({item.note})" if item.note else ""
    kinds = ", ".join(f"{d['count']} x {d['kind']}" for d in item.record["devices"])
    return f"From `{item.path}`: commit {sha}{note}, {kinds}, {item.how}."


def _claims_table(items: list[Committed]) -> str:
    rows = items[-1].record["claims"]
    return f"{tables.tally(rows)}.\n\n{tables.settled(rows)}"


class Table(NamedTuple):
    """What may stand between markers: of which launcher, how it is rendered, from which of its records."""

    kind: str
    render: Callable[[list[Committed]], str]
    every: bool = False  # parts of one result, run one by one; else the newest alone


def _metrics(items: list[Committed]) -> dict[str, Any]:
    return {name: value for item in items for name, value in item.record["metrics"].items()}


def _counting(items: list[Committed]) -> list[Committed]:
    """Returns the records that hold the newest value of some metric; the others are superseded."""
    newest = {name: item.path for item in items for name in item.record["metrics"]}
    return [item for item in items if item.path in newest.values()]


TABLES: dict[str, Table] = {
    "claims": Table("reproduce", _claims_table),
    "kernels": Table("kernel_bench", lambda items: result_tables.kernels(_metrics(items)), every=True),
    "check": Table("check_cost", lambda items: result_tables.check_cost(_metrics(items)), every=True),
    "faults": Table("detection_matrix", lambda items: result_tables.faults(_metrics(items)), every=True),
    "serving": Table("serve_trace", lambda items: result_tables.serving(_metrics(items)), every=True),
    "gpus": Table("multi_gpu", lambda items: result_tables.several_gpus(_metrics(items)), every=True),
}


def fill(text: str, root: pathlib.Path = RESULTS) -> str:
    """Returns a text with everything between ``<!-- table:NAME -->`` and ``<!-- end -->`` made anew.

    An unknown table, or one without a record, raises ValueError.
    """

    def table(match: re.Match[str]) -> str:
        if match[1] not in TABLES:
            raise ValueError(f"table {match[1]!r}: one of {sorted(TABLES)}")
        kind, render, every = TABLES[match[1]]
        items = [newest(kind, root)]
        if every:
            items = _counting([item for item in committed(root) if item.kind == kind])
        sources = " ".join(map(_source, items))
        return f"<!-- table:{match[1]} -->\n{sources}\n\n{render(items)}\n<!-- end -->"

    return re.sub(r"<!-- table:(\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def adopt(path: pathlib.Path | str, root: pathlib.Path = RESULTS) -> pathlib.Path:
    """Copies a run's record to where committed records stand, under its date and commit; returns the path.

    A run that did not end well or had uncommitted changes raises ValueError.
    """
    content = record.read(path)
    if content["status"] != "ok" or content["git"]["dirty"]:
        state = f"status {content['status']}, dirty {content['git']['dirty']}"
        raise ValueError(
            f"{path}: only a run that ended well on a clean commit is committed; this has {state}"
        )
    match = re.search(r"-m experiments\.(\w+)", content["command"])
    if match is None:
        raise ValueError(f"{path}: {content['command']!r} names no launcher of experiments")
    stamp = re.sub(r"[-:]|\+.*", "", content["created_utc"])
    target = root / match[1] / f"{stamp}-{content['git']['sha'][:7]}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    return record.write_atomic(target, record.dumps(content))


def _main(argv: list[str]) -> None:
    options = flags.FLAGS
    readme = pathlib.Path(options.readme)
    try:
        if options.adopt:
            print(adopt(options.adopt).relative_to(ROOT))
        before = readme.read_text()
        after = fill(before)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if options.check and before != after:
        sys.exit(f"error: {readme} is not what the records give: run python -m experiments.aggregate")
    if before != after:
        record.write_atomic(readme, after)


if __name__ == "__main__":
    flags.DEFINE_string("readme", str(ROOT / "README.md"), "The file whose tables are filled in.")
    flags.DEFINE_bool("check", False, "Change nothing; fail if the tables are out of date.")
    flags.DEFINE_string("adopt", None, "A run's record.json to commit first.")
    app.run(_main)
