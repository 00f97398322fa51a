"""One step of a pool as one jitted program. State in, state out.

    grow the rows -> record what they were given -> check the tags -> mask rows -> forward -> sample -> report

The check reads the very arrays that attention then reads, and it precedes the cache write: a row that fails
has no new tokens, so its write goes to the padding page. ``cause_B`` carries each row's first failure on the
device, so a step that is already launched drops the row too, before the host has heard of it.
"""

import dataclasses
import enum
import functools
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
Phase = typing.Literal["prefill", "decode"]


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
    """

    pages: PageState
    kv: KVStore
    expectation: Expectation
    digests: DigestTable | None
    cause_B: Int[Array, "B"]
    token_B: Int[Array, "B"]
    sampler: SamplerRows
    step: Int[Array, ""]


@typing.no_type_check
@struct.dataclass
class StepReport:
    """What the host reads of a step: small arrays only.

    Attributes:
      outcome: one array, so that reading it is one copy; see ``Outcome``.
      check: what the check found, or None if it did not run, which fails every row.
      promised: of a prefill step, the pages of each row and their generations, for the prefix tree.
    """

    outcome: Int[Array, "5 B"]
    check: IntegrityReport | None
    promised: Expectation | None


class Outcome(typing.NamedTuple):
    """A step's outcome on the host.

    Attributes:
      ran: rows that were asked for, passed the check and produced a token. token, logprob: that token.
      cause: of each row after the step, a Cause.
      free: free pages of the pool after the step.
    """

    ran: list[bool]
    token: list[int]
    logprob: list[float]
    cause: list[int]
    free: int


def read(report: StepReport) -> Outcome:
    """Waits for a step and reads its outcome."""
    outcome = np.asarray(report.outcome)
    ran, token, logprob, cause, free = outcome
    return Outcome(
        ran.astype(bool).tolist(),
        token.tolist(),
        logprob.view(np.float32).tolist(),
        cause.tolist(),
        int(free[0]),
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
    )


def guard(config: StepConfig, state: PoolState, mask_B: Bool[Array, "B"]) -> IntegrityReport:
    """Runs the configured detector over the masked rows."""
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


def _step(
    params: Params,
    state: PoolState,
    tokens_BT: Int[Array, "B T"],
    num_new_B: Int[Array, "B"],
    *,
    config: StepConfig,
) -> tuple[PoolState, StepReport]:
    """Runs rows with ``num_new_B > 0``; the token after each row's last new one is sampled."""
    asked_B = (num_new_B > 0) & (state.cause_B == Cause.OK)
    start_B = state.pages.length_B
    page_state, room_B = pages.append(state.pages, jnp.where(asked_B, num_new_B, 0))
    expectation = tags.extend(state.expectation, page_state, asked_B & room_B)
    # Contents are checked as far as they are written: up to the length before this step.
    cached = dataclasses.replace(page_state, length_B=start_B)
    check = guard(config, dataclasses.replace(state, pages=cached, expectation=expectation), asked_B)
    state = dataclasses.replace(state, pages=page_state, expectation=expectation)
    intact_B = integrity.alive(check, asked_B)
    run_B = intact_B & room_B

    logits_BW, kv = _forward(params, state, tokens_BT, jnp.where(run_B, num_new_B, 0), start_B, config)
    sampled = sampling.sample(logits_BW, state.sampler, start_B + num_new_B)
    digests = state.digests
    if digests is not None:
        digests = tags.seal_rows(digests, kv, page_state, start_B, run_B, new_tokens=tokens_BT.shape[1])
    good_B = run_B & sampled.finite_B
    cause_B = jnp.select(
        [~asked_B, ~intact_B, ~room_B, ~sampled.finite_B],
        [state.cause_B, *(jnp.int32(c) for c in (Cause.INTEGRITY, Cause.NO_PAGES, Cause.NONFINITE))],
        state.cause_B,
    )
    token_B = jnp.where(good_B, sampled.token_B, state.token_B)
    outcome = jnp.stack(
        [
            good_B.astype(jnp.int32),
            token_B,
            jax.lax.bitcast_convert_type(sampled.logprob_B, jnp.int32),
            cause_B,
            jnp.full_like(cause_B, page_state.free_count),
        ]
    )
    report = StepReport(outcome=outcome, check=check, promised=None)
    state = dataclasses.replace(
        state, kv=kv, digests=digests, cause_B=cause_B, token_B=token_B, step=state.step + 1
    )
    return state, report


def _forward(
    params: Params,
    state: PoolState,
    tokens_BT: Int[Array, "B T"],
    num_new_B: Int[Array, "B"],
    length_B: Int[Array, "B"],
    config: StepConfig,
) -> tuple[Float[Array, "B W"], KVStore]:
    """The forward pass over the bucket's rows and columns; rows outside it get logits of 0."""
    table_BM = jnp.where((num_new_B > 0)[:, None], state.pages.table_BM, PADDING_PAGE)
    rows = slice(0, config.rows)
    batch = StepBatch(tokens_BT[rows], num_new_B[rows], length_B[rows], table_BM[rows, : config.columns])
    forward = functools.partial(
        decoder.forward,
        attention=config.attention,
        implementation=config.implementation,
        axis=config.axis,
        reduction=config.reduction,
    )
    if config.batch_invariant:

        def one_row(kv: KVStore, row: StepBatch) -> tuple[KVStore, Array]:
            logits_BW, kv = forward(params, config.model, kv, jax.tree.map(lambda leaf: leaf[None], row))
            return kv, logits_BW[0]

        kv, logits_BW = jax.lax.scan(one_row, state.kv, batch)
    else:
        logits_BW, kv = forward(params, config.model, state.kv, batch)
    missing = tokens_BT.shape[0] - config.rows
    return jnp.pad(logits_BW, ((0, missing), (0, 0))), kv


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


StepFunction = Callable[..., tuple[PoolState, StepReport]]


def compile_step(
    phase: Phase,
    config: StepConfig,
    mesh: Mesh | None = None,
    param_specs: typing.Any = None,
) -> StepFunction:
    """The jitted step of a phase.

    ``prefill(params, state, tokens_BT, num_new_B)`` and ``decode(params, state, run_B)`` return the state and
    a StepReport; the state passed in is donated. With a mesh the whole step is one SPMD program over the axis
    ``tp``: parameters as ``param_specs`` says, everything else on every rank.
    """
    if mesh is None:
        return _jit_once(phase, config)
    body = functools.partial(_prefill if phase == "prefill" else _decode, config=config)
    inputs = 3 if phase == "prefill" else 2
    return _jit(
        phase,
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(param_specs, *(PartitionSpec(),) * inputs),
            out_specs=PartitionSpec(),
            check_vma=False,
        ),
    )


@functools.lru_cache(maxsize=64)
def _jit_once(phase: Phase, config: StepConfig) -> StepFunction:
    """Engines of equal configuration share their programs."""
    return _jit(phase, functools.partial(_prefill if phase == "prefill" else _decode, config=config))


def _jit(phase: Phase, body: StepFunction) -> StepFunction:
    def step(params: Params, state: PoolState, *rest: Array) -> tuple[PoolState, StepReport]:
        return body(params, state, *rest)

    step.__name__ = f"{phase}_step"
    return jax.jit(step, donate_argnums=1)
