"""The check in front of every read and write of cached pages: one batched operation, a report, no exception.

``check`` compares the page table with what each request was promised, in this order: page ids against the
pool (JAX clamps an out-of-range gather, so a bad id could read a valid tag), then epoch, owner and position,
then the generation. It runs on the same immutable arrays that the step then reads, so nothing can change in
between. ``check_content`` adds the digests. ``agree`` makes all ranks of a tensor-parallel group drop the
same rows.

It fails closed: a row for which the check did not run is not ok. Detector ``off`` is a tracker without device
operations: the rows that run are returned as they came.
"""

import dataclasses
import enum
import typing

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from kvmem.cache.pages import PADDING_PAGE, Expectation, PageState
from kvmem.cache.store import KVStore
from kvmem.cache.tags import DigestTable, page_digest

DETECTORS = ("off", "tags", "tags_digest")


@dataclasses.dataclass(frozen=True)
class Coverage:
    """One line of the coverage statement: what a detector says about ``name``, and what shows it."""

    area: str
    name: str
    tags: str
    digest: str
    shown_by: str


_YES, _NO = "yes", "no"
_MATRIX = "experiments.detection_matrix"
COVERAGE: tuple[Coverage, ...] = (
    Coverage("model", "Kimi (dense MLA attention)", _YES, _YES, _MATRIX),
    Coverage("model", "GLM (sparse attention, index keys)", _YES, _YES, _MATRIX),
    Coverage("operation", "decode: reads and the write", _YES, _YES, _MATRIX),
    Coverage("operation", "prefill over cached pages, chunk by chunk", _YES, _YES, _MATRIX),
    Coverage("operation", "verification of draft tokens", _YES, _YES, "tests/engine/test_verify.py"),
    Coverage(
        "operation", "transfer from prefill to decode", "always on", _YES, "tests/cache/test_transfer.py"
    ),
    Coverage("operation", "retraction and resume", _YES, _YES, "tests/cache/test_tags.py"),
    Coverage(
        "operation",
        "release and abort (free what is still owned)",
        "always on",
        "always on",
        "tests/cache/test_machine.py",
    ),
    Coverage("format", "f32_576, bf16_576, fp8_576, fp8_656", _YES, _YES, "tests/cache/test_tags.py"),
    Coverage("format", "index_f32, index_bf16, index_132", _YES, _YES, "tests/cache/test_tags.py"),
    Coverage("hardware", "CPU, one device", _YES, _YES, _MATRIX),
    Coverage("hardware", "8-device mesh: ranks agree", _YES, _YES, "tests/cache/test_integrity.py"),
    Coverage("hardware", "two H200s: ranks agree", _YES, "not measured", "experiments.multi_gpu"),
    Coverage("hardware", "H200: clean rows, tables of full size", _YES, _YES, "experiments.check_cost"),
    Coverage(
        "fault", "page freed, reused, of another owner, in wrong order, out of range", _YES, _YES, _MATRIX
    ),
    Coverage("fault", "flipped bit in a live page", _NO, _YES, _MATRIX),
    Coverage("fault", "tokens permuted inside a page", _NO, _YES, _MATRIX),
    Coverage("fault", "wrong scale", _NO, _YES, _MATRIX),
    Coverage("fault", "late write into a live page", _NO, _YES, _MATRIX),
    Coverage(
        "fault",
        "reference count of a shared page too low",
        "when the last one goes",
        "when the last one goes",
        "tests/cache/test_integrity.py",
    ),
    Coverage(
        "fault", "wrong value computed, then stored and sealed", _NO, _NO, "none: nothing to compare with"
    ),
    Coverage("fault", "table and expectation changed alike", _NO, _NO, "none: nothing to compare with"),
    Coverage("fault", "damage to weights, activations or logits", _NO, _NO, "none: not cache state"),
    Coverage(
        "fault", "an adversary who can write device memory", _NO, _NO, "none: a checksum, not a signature"
    ),
)


def coverage(detector: str = "tags_digest") -> dict[str, dict[str, str]]:
    """Returns what ``detector`` covers, by area and name: for the record of a pool or of a run.

    Raises:
      ValueError: an unknown detector.
    """
    if detector not in DETECTORS:
        raise ValueError(f"integrity detector {detector!r} is not one of {DETECTORS}")
    stated: dict[str, dict[str, str]] = {}
    for line in COVERAGE:
        said = {"off": _NO, "tags": line.tags, "tags_digest": line.digest}[detector]
        stated.setdefault(line.area, {})[line.name] = "always on" if line.tags == "always on" else said
    return stated


def coverage_table() -> str:
    """Returns the coverage statement as the Markdown table that docs/integrity.md holds."""
    rows = [f"| {c.area} | {c.name} | {c.tags} | {c.digest} | {c.shown_by} |" for c in COVERAGE]
    return "\n".join(["| area | what | tags | tags + digest | shown by |", "|---|---|---|---|---|", *rows])


class Kind(enum.IntEnum):
    """Why a row failed; the first that applies at the first logical page that fails."""

    OK = 0
    UNCHECKED = 1  # the check did not run for the row
    EPOCH = 2  # the row was given back since
    RANGE = 3  # a page id outside the pool, or the padding page, in a live column
    COUNT = 4  # another number of pages than promised, or a column past them that is not the padding page
    MAPPING = 5  # another page than promised: another owner's, or the right pages in the wrong order
    GENERATION = 6  # the page was freed, or freed and allocated again
    CONTENT = 7  # the bytes changed, or were never sealed


@typing.no_type_check
@struct.dataclass
class IntegrityReport:
    """What the check found for each row. With detector ``off`` only ``ok_B`` is there, the rest is None.

    Attributes:
      ok_B: the row was checked and matches: it may read, write and publish.
      kind_B: a ``Kind``. logical_B: the first failing logical page, -1 if none or if the whole row failed.
      expected_page_B, found_page_B, expected_generation_B, found_generation_B: at that page; else 0.
      page_checks: scalar, how many (row, page) pairs were compared.
    """

    ok_B: Bool[Array, "B"]
    kind_B: Int[Array, "B"] = None  # type: ignore[assignment]
    logical_B: Int[Array, "B"] = None  # type: ignore[assignment]
    expected_page_B: Int[Array, "B"] = None  # type: ignore[assignment]
    found_page_B: Int[Array, "B"] = None  # type: ignore[assignment]
    expected_generation_B: UInt32[Array, "B"] = None  # type: ignore[assignment]
    found_generation_B: UInt32[Array, "B"] = None  # type: ignore[assignment]
    page_checks: Int[Array, ""] = None  # type: ignore[assignment]


def unchecked(row_mask_B: Bool[Array, "B"]) -> IntegrityReport:
    """The no-op tracker: every row that runs passes; adds no device operation."""
    return IntegrityReport(ok_B=row_mask_B)


def check(state: PageState, expectation: Expectation, row_mask_B: Bool[Array, "B"]) -> IntegrityReport:
    """Compares the table and the pool's generations with what each masked row was promised."""
    column_1M = jnp.arange(state.table_BM.shape[1])[None, :]
    promised_BM = column_1M < expectation.used_B[:, None]
    in_range_BM = (state.table_BM > PADDING_PAGE) & (state.table_BM < state.num_pages)
    page_BM = jnp.where(in_range_BM, state.table_BM, PADDING_PAGE)
    found_generation_BM = state.generation_P[page_BM]
    kind_BM = jnp.select(
        [
            promised_BM & ~in_range_BM,
            ~promised_BM & (state.table_BM != PADDING_PAGE),
            promised_BM & (page_BM != expectation.page_BM),
            promised_BM & (found_generation_BM != expectation.generation_BM),
        ],
        [jnp.int32(k) for k in (Kind.RANGE, Kind.COUNT, Kind.MAPPING, Kind.GENERATION)],
        jnp.int32(Kind.OK),
    )
    report = _first(kind_BM, expectation, state.table_BM, found_generation_BM)
    count_ok_B = (state.used_B == expectation.used_B) & (state.length_B >= 0)
    count_ok_B &= state.length_B <= state.used_B * state.page_size
    report = _override(report, ~count_ok_B & (report.kind_B == Kind.OK), Kind.COUNT)
    report = _override(report, state.epoch_B != expectation.epoch_B, Kind.EPOCH)
    report = _override(report, ~row_mask_B, Kind.UNCHECKED)
    checks = jnp.sum(jnp.where(row_mask_B, expectation.used_B, 0))
    return dataclasses.replace(report, ok_B=report.kind_B == Kind.OK, page_checks=checks)


def check_content(
    report: IntegrityReport,
    digests: DigestTable,
    kv: KVStore,
    state: PageState,
    expectation: Expectation,
    *,
    written_B: Int[Array, "B"] | None = None,
    pages_per_row: int | None = None,
    step: Int[Array, ""] | None = None,
) -> IntegrityReport:
    """Adds the digest comparison for rows that ``report`` still holds ok.

    Args:
      written_B: tokens of each row that are stored already, where the row has grown for tokens that this
        step will write; ``length_B`` if None.
      pages_per_row: None checks every page of a row. A number checks that many, chosen in turn by ``step``,
      and
        always the page that is written next, so that sealing it again cannot bless a change.

    A page of which fewer tokens are sealed than the row holds fails: bytes of unknown making are not read.
    """
    rows, max_pages = state.table_BM.shape
    written_B = state.length_B if written_B is None else written_B
    if pages_per_row is None:
        logical_BA = jnp.broadcast_to(jnp.arange(max_pages, dtype=jnp.int32)[None, :], (rows, max_pages))
    else:
        if step is None:
            raise ValueError(f"pages_per_row is {pages_per_row}: sampling needs the step number")
        turn_1A = (step * pages_per_row + jnp.arange(pages_per_row, dtype=jnp.int32))[None, :]
        sampled_BA = turn_1A % jnp.maximum(state.used_B, 1)[:, None]
        tail_B1 = jnp.clip(written_B // state.page_size, 0, max_pages - 1)[:, None]
        logical_BA = jnp.concatenate([sampled_BA, tail_B1], axis=1)
    page_BA = jnp.take_along_axis(state.table_BM, logical_BA, axis=1)
    held_BA = jnp.clip(written_B[:, None] - logical_BA * state.page_size, 0, state.page_size)
    wanted_BA = report.ok_B[:, None] & (held_BA > 0)
    page_BA = jnp.where(wanted_BA, page_BA, PADDING_PAGE)
    sealed_BA = digests.tokens_P[page_BA]
    found_BA2 = page_digest(kv, page_BA.reshape(-1), sealed_BA.reshape(-1)).reshape(*page_BA.shape, 2)
    same_BA = jnp.all(found_BA2 == digests.digest_P2[page_BA], axis=2) & (sealed_BA >= held_BA)
    bad_BA = wanted_BA & ~same_BA
    first_B = jnp.min(jnp.where(bad_BA, logical_BA, max_pages), axis=1)
    failed_B = first_B < max_pages
    return _at(report, failed_B, Kind.CONTENT, jnp.minimum(first_B, max_pages - 1), expectation, state)


def guard(
    detector: str,
    state: PageState,
    expectation: Expectation,
    row_mask_B: Bool[Array, "B"],
    *,
    kv: KVStore | None = None,
    digests: DigestTable | None = None,
    written_B: Int[Array, "B"] | None = None,
    pages_per_row: int | None = None,
    step: Int[Array, ""] | None = None,
    axis: str | None = None,
) -> IntegrityReport:
    """Runs the configured detector on the arrays that the step is about to read; see ``DETECTORS``.

    Raises:
      ValueError: an unknown detector, or ``tags_digest`` without bytes and digests.
    """
    if detector == "off":
        return unchecked(row_mask_B)
    if detector not in DETECTORS:
        raise ValueError(f"integrity detector {detector!r} is not one of {DETECTORS}")
    with jax.named_scope("integrity"):
        report = check(state, expectation, row_mask_B)
        if detector == "tags_digest":
            if kv is None or digests is None:
                raise ValueError("detector tags_digest needs the stored bytes and their digests")
            report = check_content(
                report,
                digests,
                kv,
                state,
                expectation,
                written_B=written_B,
                pages_per_row=pages_per_row,
                step=step,
            )
        return report if axis is None else agree(report, axis)


def alive(report: IntegrityReport | None, row_mask_B: Bool[Array, "B"]) -> Bool[Array, "B"]:
    """Returns the rows that may read, write and publish: none at all if there is no report (fail closed)."""
    if report is None:
        return jnp.zeros_like(row_mask_B)
    return report.ok_B & row_mask_B


def agree(report: IntegrityReport, axis: str) -> IntegrityReport:
    """Makes all ranks of ``axis`` report the same: a row is ok if it is ok on every rank.

    A failed row carries the finding of the lowest rank that failed it. Costs one all-gather of seven integers
    a row: as seven reductions of an array each it took 107 us a step on two H200s.
    """
    if report.kind_B is None:
        return report
    names = [field.name for field in dataclasses.fields(report) if field.name not in ("ok_B", "page_checks")]
    findings = [getattr(report, name) for name in names]
    mine_FB = jnp.stack([_as_i32(array) for array in (report.ok_B, *findings)])
    every_NFB = lax.all_gather(mine_FB, axis, to="invarying")
    first_B = jnp.argmin(every_NFB[:, 0], axis=0)  # the lowest rank that failed the row, 0 if none did
    spoken_FB = jnp.take_along_axis(every_NFB, first_B[None, None, :], axis=0)[0]
    agreed = {
        name: _from_i32(spoken_FB[at + 1], array.dtype)
        for at, (name, array) in enumerate(zip(names, findings))
    }
    return dataclasses.replace(report, ok_B=_from_i32(spoken_FB[0], jnp.bool_), **agreed)


def _as_i32(array: Array) -> Int[Array, "B"]:
    """The bits of an unsigned array, the value of any other."""
    if array.dtype == jnp.uint32:
        return lax.bitcast_convert_type(array, jnp.int32)
    return array.astype(jnp.int32)


def _from_i32(array_B: Int[Array, "B"], dtype: jax.typing.DTypeLike) -> Array:
    """The inverse of ``_as_i32``."""
    if dtype == jnp.uint32:
        return lax.bitcast_convert_type(array_B, jnp.uint32)
    return array_B.astype(dtype)


def finding(report: IntegrityReport, row: int) -> dict[str, str | int]:
    """Reads back what the check found for one row: its ``Kind`` in words, then the fields at that page.

    Empty with detector ``off``, which finds nothing.
    """
    if report.kind_B is None:
        return {}
    host = jax.device_get(report)
    return {
        "kind": Kind(int(host.kind_B[row])).name.lower(),
        "logical_page": int(host.logical_B[row]),
        "expected_page": int(host.expected_page_B[row]),
        "found_page": int(host.found_page_B[row]),
        "expected_generation": int(host.expected_generation_B[row]),
        "found_generation": int(host.found_generation_B[row]),
    }


def _first(
    kind_BM: Int[Array, "B M"],
    expectation: Expectation,
    table_BM: Int[Array, "B M"],
    found_generation_BM: UInt32[Array, "B M"],
) -> IntegrityReport:
    """Picks each row's first failing logical page."""
    logical_B = jnp.argmax(kind_BM != Kind.OK, axis=1).astype(jnp.int32)
    failed_B = jnp.any(kind_BM != Kind.OK, axis=1)

    def pick(array_BM: Array) -> Array:
        value_B = jnp.take_along_axis(array_BM, logical_B[:, None], axis=1)[:, 0]
        return jnp.where(failed_B, value_B, jnp.zeros((), array_BM.dtype))

    return IntegrityReport(
        ok_B=~failed_B,
        kind_B=pick(kind_BM),
        logical_B=jnp.where(failed_B, logical_B, -1),
        expected_page_B=pick(expectation.page_BM),
        found_page_B=pick(table_BM),
        expected_generation_B=pick(expectation.generation_BM),
        found_generation_B=pick(found_generation_BM),
    )


def _override(report: IntegrityReport, failed_B: Bool[Array, "B"], kind: Kind) -> IntegrityReport:
    """Marks whole rows as failed, without a page to point at."""

    def blank(field_B: Array) -> Array:
        return jnp.where(failed_B, jnp.zeros((), field_B.dtype), field_B)

    return dataclasses.replace(
        report,
        ok_B=report.ok_B & ~failed_B,
        kind_B=jnp.where(failed_B, jnp.int32(kind), report.kind_B),
        logical_B=jnp.where(failed_B, -1, report.logical_B),
        expected_page_B=blank(report.expected_page_B),
        found_page_B=blank(report.found_page_B),
        expected_generation_B=blank(report.expected_generation_B),
        found_generation_B=blank(report.found_generation_B),
    )


def _at(
    report: IntegrityReport,
    failed_B: Bool[Array, "B"],
    kind: Kind,
    logical_B: Int[Array, "B"],
    expectation: Expectation,
    state: PageState,
) -> IntegrityReport:
    """Marks rows as failed at a logical page."""

    def put(field_B: Array, array_BM: Array) -> Array:
        return jnp.where(failed_B, jnp.take_along_axis(array_BM, logical_B[:, None], axis=1)[:, 0], field_B)

    return dataclasses.replace(
        report,
        ok_B=report.ok_B & ~failed_B,
        kind_B=jnp.where(failed_B, jnp.int32(kind), report.kind_B),
        logical_B=jnp.where(failed_B, logical_B, report.logical_B),
        expected_page_B=put(report.expected_page_B, expectation.page_BM),
        found_page_B=put(report.found_page_B, state.table_BM),
        expected_generation_B=put(report.expected_generation_B, expectation.generation_BM),
        found_generation_B=put(
            report.found_generation_B, state.generation_P.at[state.table_BM].get(mode="clip")
        ),
    )
