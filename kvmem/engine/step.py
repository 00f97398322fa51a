"""One step of a pool as one jitted program. State in, state out.

    grow the rows -> record what they were given -> check the tags -> mask rows -> forward -> sample -> report

Prefill feeds a chunk of the prompt, decode the last token, verify the last token and guesses of those after.
The check reads the very arrays that attention then reads, and it precedes the cache write: a row that fails
has no new tokens, so its write goes to the padding page. ``cause_B`` carries each row's first failure on the
device, so a step that is already launched drops the row too, before the host has heard of it.
"""

import dataclasses
import enum
import functools
import logging
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvmem.cache import integrity, pages, store, tags
from kvmem.cache.integrity import IntegrityReport
from kvmem.cache.pages import PADDING_PAGE, Expectation, PageState
from kvmem.cache.store import KVStore
from kvmem.cache.tags import DigestTable
from kvmem.engine import sampling
from kvmem.engine.sampling import SamplerRows
from kvmem.models import decoder
from kvmem.models.attention import Form, Implementation
from kvmem.models.config import ModelConfig
from kvmem.models.decoder import StepBatch
from kvmem.models.layers import Reduction

Params = typing.Any
Phase = typing.Literal["prefill", "decode", "verify"]


class Cause(enum.IntEnum):
    """Why a row may not run; OK is alive."""

    OK = 0
    INTEGRITY = 1
    NONFINITE = 2  # its logits held NaN or +inf
    NO_PAGES = 3  # none left, or the page to write is shared: the scheduler's accounting is wrong
    STALE_PREFIX = 4  # a reused page was no longer the one that the prefix tree had registered
    TRANSFER = 5  # its pages did not arrive whole in the decode pool
    EMPTY = 6  # nobody is in the row


@typing.no_type_check
@struct.dataclass
class PoolState:
    """Everything of one pool that changes: donated to each operation and returned.

    Attributes:
      pages: who owns which page. kv: the stored bytes. expectation: what each row was promised.
      digests: of sealed pages with detector ``tags_digest``, else None.
      cause_B: a Cause; a row runs only while it is OK.
      token_B: the last token of each row, which the next decode step feeds.
      sampler: sampling parameters of each row.
      step: steps taken.
      refused: holds of the prefix tree, given or taken since the last step, on pages that nobody owned.
    """

    pages: PageState
    kv: KVStore
    expectation: Expectation
    digests: DigestTable | None
    cause_B: Int[Array, "B"]
    token_B: Int[Array, "B"]
    sampler: SamplerRows
    step: Int[Array, ""]
    refused: Int[Array, ""]


@typing.no_type_check
@struct.dataclass
class StepReport:
    """What the host reads of a step: small arrays only.

    Attributes:
      outcome: one array, so that reading it is one copy; see ``Outcome``.
      check: what the check found, or None if it did not run, which fails every row.
      promised: of a prefill step, the pages of each row and their generations, for the prefix tree.
    """

    outcome: Int[Array, "7 B"]
    check: IntegrityReport | None
    promised: Expectation | None


class Outcome(typing.NamedTuple):
    """A step's outcome on the host.

    Attributes:
      ran: rows that were asked for, passed the check and produced a token. token, logprob: that token.
      cause: of each row after the step, a Cause.
      free: free pages of the pool after the step. page_checks: pages of rows that the step compared.
      refused: as in PoolState.
    """

    ran: list[bool]
    token: list[int]
    logprob: list[float]
    cause: list[int]
    free: int
    page_checks: int
    refused: int


def read(report: StepReport) -> Outcome:
    """Waits for a step and reads its outcome."""
    outcome = np.asarray(report.outcome)
    ran, token, logprob, cause, *scalars = outcome
    return Outcome(
        ran.astype(bool).tolist(),
        token.tolist(),
        logprob.view(np.float32).tolist(),
        cause.tolist(),
        *(int(scalar_B[0]) for scalar_B in scalars),
    )


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a step program is compiled for: static and hashable.

    Attributes:
      rows, columns: the first rows of the pool and the first table columns that the forward pass sees.
      detector: one of ``integrity.DETECTORS``.
      digest_pages: pages of a row whose digest is compared, in turn, beside the one written next; None: all.
      batch_invariant: run the forward pass of one row after the other.
      axis: mesh axis of tensor parallelism, or None on a single device.
      reduction: what sums over it, see ``decoder.forward``.
    """

    model: ModelConfig
    rows: int
    columns: int
    detector: str = "tags"
    digest_pages: int | None = None
    batch_invariant: bool = False
    attention: Form = "absorbed"
    implementation: Implementation = "xla"
    axis: str | None = None
    reduction: Reduction = "nccl"


def fastest_reduction(phase: Phase, platform: str, ranks: int, rows: int, width: int) -> Reduction:
    """The reduction measured to be the fastest: the one-shot kernel for small sums of decode on GPUs.

    Each rank stores its f32 parts twice over to every other one: up to as many bytes as won on two H200s.
    """
    stored = 2 * (ranks - 1) * 4 * rows * width
    fits = 0 < stored <= _MOST_STORED and rows * width % _STORED_WHOLE == 0
    return "mosaic" if phase == "decode" and platform == "gpu" and fits else "nccl"


def init(
    shape: store.CacheShape,
    *,
    cache: str,
    index: str | None,
    scale: float,
    num_pages: int,
    num_rows: int,
    max_pages: int,
    page_size: int,
    detector: str,
    origin: int = 0,
) -> PoolState:
    """An empty pool."""
    kv = store.init(
        shape,
        cache,
        *(() if index is None else (index,)),
        num_pages=num_pages,
        page_size=page_size,
        scale=scale,
    )
    return PoolState(
        pages=pages.init(num_pages, num_rows, max_pages, page_size, origin=origin),
        kv=kv,
        expectation=tags.empty(num_rows, max_pages),
        digests=tags.empty_digests(num_pages) if detector == "tags_digest" else None,
        cause_B=jnp.full(num_rows, int(Cause.EMPTY), jnp.int32),
        token_B=jnp.zeros(num_rows, jnp.int32),
        sampler=sampling.init(num_rows),
        step=jnp.zeros((), jnp.int32),
        refused=jnp.zeros((), jnp.int32),
    )


def guard(config: StepConfig, state: PoolState, mask_B: Bool[Array, "B"]) -> IntegrityReport | None:
    """Runs the configured detector over the masked rows; None, which fails them all, if it raises."""
    try:
        return integrity.guard(
            config.detector,
            state.pages,
            state.expectation,
            mask_B,
            kv=state.kv,
            digests=state.digests,
            pages_per_row=config.digest_pages,
            step=state.step,
            axis=config.axis,
        )
    except Exception:  # whatever it is, requests without a check must not be served
        logging.getLogger(__name__).exception("the integrity check raised: every row of the step fails")
        return None


@dataclasses.dataclass(frozen=True)
class _Checked:
    """Rows that were grown and checked: which were asked for, are intact, and have room for their tokens."""

    state: PoolState
    check: IntegrityReport | None
    start_B: Int[Array, "B"]
    asked_B: Bool[Array, "B"]
    intact_B: Bool[Array, "B"]
    run_B: Bool[Array, "B"]

    @property
    def page_checks(self) -> Int[Array, ""] | int:
        """Pages of rows that were compared; 0 where the check did not run or is off."""
        return 0 if self.check is None or self.check.page_checks is None else self.check.page_checks

    def causes(self, finite_B: Bool[Array, "B"]) -> Int[Array, "B"]:
        """The cause of each row after the step."""
        failures = {Cause.INTEGRITY: ~self.intact_B, Cause.NO_PAGES: ~self.run_B, Cause.NONFINITE: ~finite_B}
        return jnp.select(
            [~self.asked_B, *failures.values()],
            [self.state.cause_B, *(jnp.int32(cause) for cause in failures)],
            self.state.cause_B,
        )


def _check_rows(state: PoolState, num_new_B: Int[Array, "B"], config: StepConfig) -> _Checked:
    """Grows the rows with ``num_new_B > 0`` and checks them, before anything of theirs is read or written."""
    asked_B = (num_new_B > 0) & (state.cause_B == Cause.OK)
    start_B = state.pages.length_B
    page_state, room_B = pages.append(state.pages, jnp.where(asked_B, num_new_B, 0))
    expectation = tags.extend(state.expectation, page_state, asked_B & room_B)
    # Contents are checked as far as they are written: up to the length before this step.
    cached = dataclasses.replace(page_state, length_B=start_B)
    check = guard(config, dataclasses.replace(state, pages=cached, expectation=expectation), asked_B)
    intact_B = integrity.alive(check, asked_B)
    grown = dataclasses.replace(state, pages=page_state, expectation=expectation)
    return _Checked(grown, check, start_B, asked_B, intact_B, intact_B & room_B)


def _step(
    params: Params,
    state: PoolState,
    tokens_BT: Int[Array, "B T"],
    num_new_B: Int[Array, "B"],
    *,
    config: StepConfig,
) -> tuple[PoolState, StepReport]:
    """Runs rows with ``num_new_B > 0``; the token after each row's last new one is sampled."""
    rows = _check_rows(state, num_new_B, config)
    state, run_B = rows.state, rows.run_B
    logits_BW, kv = _forward(params, state, tokens_BT, jnp.where(run_B, num_new_B, 0), rows.start_B, config)
    sampled = sampling.sample(logits_BW, state.sampler, rows.start_B + num_new_B)
    digests = state.digests
    if digests is not None:
        new_tokens = tokens_BT.shape[1]
        digests = tags.seal_rows(digests, kv, state.pages, rows.start_B, run_B, new_tokens=new_tokens)
    good_B = run_B & sampled.finite_B
    cause_B = rows.causes(sampled.finite_B)
    token_B = jnp.where(good_B, sampled.token_B, state.token_B)
    outcome = jnp.stack(
        [
            good_B.astype(jnp.int32),
            token_B,
            jax.lax.bitcast_convert_type(sampled.logprob_B, jnp.int32),
            cause_B,
            jnp.full_like(cause_B, state.pages.free_count),
            jnp.full_like(cause_B, rows.page_checks),
            jnp.full_like(cause_B, state.refused),
        ]
    )
    report = StepReport(outcome=outcome, check=rows.check, promised=None)
    state = dataclasses.replace(
        state,
        kv=kv,
        digests=digests,
        cause_B=cause_B,
        token_B=token_B,
        step=state.step + 1,
        refused=jnp.zeros_like(state.refused),
    )
    return state, report


def _forward(
    params: Params,
    state: PoolState,
    tokens_BT: Int[Array, "B T"],
    num_new_B: Int[Array, "B"],
    length_B: Int[Array, "B"],
    config: StepConfig,
    *,
    all_logits: bool = False,
) -> tuple[Float[Array, "B ..."], KVStore]:
    """The forward pass over the bucket's rows and columns; rows outside it get logits of 0.

    The logits are [B, W] of each row's last token, or [B, T, W].
    """
    table_BM = jnp.where((num_new_B > 0)[:, None], state.pages.table_BM, PADDING_PAGE)
    rows = slice(0, config.rows)
    batch = StepBatch(tokens_BT[rows], num_new_B[rows], length_B[rows], table_BM[rows, : config.columns])
    forward = functools.partial(
        decoder.forward,
        attention=config.attention,
        implementation=config.implementation,
        axis=config.axis,
        reduction=config.reduction,
        all_logits=all_logits,
    )
    if config.batch_invariant:

        def one_row(kv: KVStore, row: StepBatch) -> tuple[KVStore, Array]:
            logits, kv = forward(params, config.model, kv, jax.tree.map(lambda leaf: leaf[None], row))
            return kv, logits[0]

        kv, logits = jax.lax.scan(one_row, state.kv, batch)
    else:
        logits, kv = forward(params, config.model, state.kv, batch)
    missing = tokens_BT.shape[0] - config.rows
    return jnp.pad(logits, ((0, missing), *((0, 0),) * (logits.ndim - 1))), kv


def _prefill(
    params: Params,
    state: PoolState,
    tokens_BT: Int[Array, "B T"],
    num_new_B: Int[Array, "B"],
    *,
    config: StepConfig,
) -> tuple[PoolState, StepReport]:
    state, report = _step(params, state, tokens_BT, num_new_B, config=config)
    return state, dataclasses.replace(report, promised=state.expectation)


def _decode(
    params: Params, state: PoolState, run_B: Bool[Array, "B"], *, config: StepConfig
) -> tuple[PoolState, StepReport]:
    return _step(params, state, state.token_B[:, None], run_B.astype(jnp.int32), config=config)


@typing.no_type_check
@struct.dataclass
class VerifyReport:
    """What the host reads of a verify step.

    Attributes:
      token_BT, logprob_BT: each row's new tokens, of which the first ``count_B`` hold.
      count_B: accepted drafts and the token after them; 0 for a row that did not run or failed.
      cause_B: of each row after the step, a Cause.
      free: free pages of the pool after the step.
      check: as in StepReport.
    """

    token_BT: Int[Array, "B T"]
    logprob_BT: Float[Array, "B T"]
    count_B: Int[Array, "B"]
    cause_B: Int[Array, "B"]
    free: Int[Array, ""]
    check: IntegrityReport | None


def _verify(
    params: Params,
    state: PoolState,
    draft_BU: Int[Array, "B U"],
    run_B: Bool[Array, "B"],
    num_draft_B: Int[Array, "B"],
    *,
    config: StepConfig,
) -> tuple[PoolState, VerifyReport]:
    """Feeds each row its last token and ``num_draft_B`` guesses of those after it; keeps what decode says.

    The token of a position is drawn as decode draws it, from its own logits and the row's key folded with the
    position; a guess holds while it and all before it are the tokens drawn. The rest is cut off: its cache
    entries lie behind the row's length, where nothing reads, and the next step writes over them.
    """
    tokens_BT = jnp.concatenate([state.token_B[:, None], draft_BU], axis=1)
    num_new_B = jnp.where(run_B, 1 + jnp.clip(num_draft_B, 0, draft_BU.shape[1]), 0)
    rows = _check_rows(state, num_new_B, config)
    state, start_B = rows.state, rows.start_B
    fed_B = jnp.where(rows.run_B, num_new_B, 0)
    logits_BTW, kv = _forward(params, state, tokens_BT, fed_B, start_B, config, all_logits=True)
    steps_T = jnp.arange(tokens_BT.shape[1])
    draw = jax.vmap(sampling.sample, in_axes=(1, None, 1), out_axes=1)
    drawn = draw(logits_BTW, state.sampler, start_B[:, None] + 1 + steps_T[None, :])
    right_BU = (draft_BU == drawn.token_B[:, :-1]) & (steps_T[None, 1:] < num_new_B[:, None])
    count_B = 1 + jnp.sum(jnp.cumprod(right_BU.astype(jnp.int32), axis=1), axis=1)
    held_BT = steps_T[None, :] < count_B[:, None]
    finite_B = jnp.all(drawn.finite_B | ~held_BT, axis=1)
    good_B = rows.run_B & finite_B
    page_state, _ = pages.truncate(state.pages, start_B + jnp.where(good_B, count_B, 0), rows.run_B)
    digests = state.digests
    if digests is not None:
        digests = tags.seal_rows(digests, kv, page_state, start_B, good_B, new_tokens=tokens_BT.shape[1])
    last_B = jnp.take_along_axis(drawn.token_B, count_B[:, None] - 1, axis=1)[:, 0]
    cause_B = rows.causes(finite_B)
    report = VerifyReport(
        token_BT=drawn.token_B,
        logprob_BT=drawn.logprob_B,
        count_B=jnp.where(good_B, count_B, 0),
        cause_B=cause_B,
        free=page_state.free_count,
        check=rows.check,
    )
    state = dataclasses.replace(
        state,
        pages=page_state,
        kv=kv,
        digests=digests,
        cause_B=cause_B,
        token_B=jnp.where(good_B, last_B, state.token_B),
        step=state.step + 1,
    )
    return state, report


_MOST_STORED = 896 * 1024  # 16 rows of 7,168 f32, on two H200s
_STORED_WHOLE = 512  # elements that a warpgroup of the kernel stores

StepFunction = Callable[..., tuple[PoolState, typing.Any]]
_BODIES: dict[str, tuple[StepFunction, int]] = {
    "prefill": (_prefill, 3),
    "decode": (_decode, 2),
    "verify": (_verify, 4),
}


def compile_step(
    phase: Phase,
    config: StepConfig,
    mesh: Mesh | None = None,
    param_specs: typing.Any = None,
) -> StepFunction:
    """The jitted step of a phase.

    ``prefill(params, state, tokens_BT, num_new_B)`` and ``decode(params, state, run_B)`` return the state and
    a StepReport, ``verify(params, state, draft_BU, run_B, num_draft_B)`` the state and a VerifyReport; the
    state passed in is donated. With a mesh the whole step is one SPMD program over the axis
    ``tp``: parameters as ``param_specs`` says, everything else on every rank.
    """
    if mesh is None:
        return _jit_once(phase, config)
    body, inputs = _BODIES[phase]
    return _jit(
        phase,
        jax.shard_map(
            functools.partial(body, config=config),
            mesh=mesh,
            in_specs=(param_specs, *(PartitionSpec(),) * inputs),
            out_specs=PartitionSpec(),
            check_vma=False,
        ),
    )


@functools.lru_cache(maxsize=64)
def _jit_once(phase: Phase, config: StepConfig) -> StepFunction:
    """Engines of equal configuration share their programs."""
    return _jit(phase, functools.partial(_BODIES[phase][0], config=config))


# Matrix products of a few rows by cuBLAS, which reads a layer's weights where they stand in their stack, and
# not merged: for its own kernels, and to merge products, XLA first copies weights. No effect without a GPU.
_FEW_ROWS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}


def _jit(phase: Phase, body: StepFunction) -> StepFunction:
    def step(params: Params, state: PoolState, *rest: Array) -> tuple[PoolState, typing.Any]:
        return body(params, state, *rest)

    step.__name__ = f"{phase}_step"
    return jax.jit(step, donate_argnums=1, compiler_options=None if phase == "prefill" else _FEW_ROWS)
