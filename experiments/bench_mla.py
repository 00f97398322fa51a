"""Paged MLA decode on a GPU: the contract on the real path, then microseconds beside rivals and floors."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import bench_timing
from kvmem import record
from pallas_kernels import mla_decode, mla_schedule, ref, xla

PAGE = mla_decode.PAGE
SOFTMAX_SCALE, FLAT_SCALE = 0.07, 0.05
CONTRACT_LENGTHS = (0, 1, 63, 64, 65, 97, 127, 129, 640, 3001)
CONTRACT_COLUMNS = ((1, 8), (2, 8), (1, 64), (3, 24))  # query tokens, heads
# Relative error of a row: weights rounded to bf16 by 2**-9 each, of latents that correlate by 512**-0.5; the
# f16 path rounds by 2**-12, and its target is 1e-3. The wide kernel of fp8_656 also rounds scaled latents, so
# that scores, sums of 512 products of up to 4 * SOFTMAX_SCALE, deviate by SCORE in the mean square, and by
# four times that in the worst of all rows. Two tokens of equal weight then move a row's output by half the
# difference of their deviations: 8**0.5 * SCORE. The contract's latents rounded so in NumPy: 2.6e-3 at worst.
TOLERANCE = {"bf16": 2.0**-9 * (1 + 512**-0.5), "fp8_flat": 1e-3, "fp8_656": 1e-3}
SCORE = 4 * SOFTMAX_SCALE * 512**0.5 * 2.0**-12 / 3**0.5
BYTES = {"bf16": 1152, "fp8_flat": 576, "fp8_656": 656}
# The best of FlashMLA, FlashAttention-3 and FlashInfer (BF16), and vLLM's e4m3 FlashMLA (FP8), graph-timed on
# an H200 with their scheduling metadata computed beforehand: microseconds by (heads, batch, context).
RIVAL_US = {
    "bf16": {
        (8, 1, 8192): 19.0, (8, 8, 8192): 30.5, (8, 16, 8192): 45.9, (8, 32, 8192): 78.4,
        (8, 64, 8192): 144.8, (8, 64, 16384): 278.2, (8, 1, 65536): 38.4, (64, 64, 8192): 165.0,
    },
    "fp8": {
        (8, 1, 8192): 14.7, (8, 8, 8192): 25.3, (8, 16, 8192): 37.9, (8, 32, 8192): 61.8,
        (8, 64, 8192): 110.5, (8, 64, 16384): 223.6, (8, 1, 65536): 29.2, (64, 64, 8192): 122.7,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """One shape of the table; ``tiles`` overrides the tuned ones and names a variant.

    ``ragged``: Zipf's lengths in random order, ``context`` in the mean.
    """

    layout: str
    heads: int
    batch: int
    context: int
    tiles: tuple[tuple[str, int], ...] = ()
    ragged: bool = False

    @property
    def name(self) -> str:
        variant = "".join(f".{key}{value}" for key, value in self.tiles)
        shape = "ragged" if self.ragged else f"l{self.context}"
        return f"mla_decode.{self.layout}.h{self.heads}.b{self.batch}.{shape}{variant}"

    def lengths(self, seed: int) -> np.ndarray:
        """Tokens of each row, i32; their sum is ``batch * context``."""
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        share = 1.0 / np.arange(1, self.batch + 1)
        length = np.floor(share / share.sum() * self.batch * self.context).astype(np.int32)
        length[0] += self.batch * self.context - length.sum()
        return np.random.default_rng(seed).permutation(length)

    @property
    def config(self) -> mla_decode.Config:
        columns = mla_decode.column_groups(1, self.heads)[1]
        return dataclasses.replace(
            mla_decode.tuned_config(self.layout, columns, self.batch), **dict(self.tiles)
        )

    @property
    def repetitions(self) -> int:
        return max(6, min(24, 2**18 // (self.batch * self.context // 8)))


def tolerance(layout: str, columns: int) -> tuple[float, float]:
    """Allowed errors of a row's output (relative) and of its log-sum-exp."""
    if layout == "fp8_656" and columns > mla_schedule.NARROW:
        return 2.0**-11 + 8**0.5 * SCORE, 4 * SCORE
    return TOLERANCE[layout], 1e-4


def attend(layout: str, q, pool, layer, table, length, num_new=None, **options):
    scale = FLAT_SCALE if layout == "fp8_flat" else None
    return mla_decode.mla_decode(
        q, pool, layer, table, length, num_new_B=num_new, softmax_scale=SOFTMAX_SCALE, layout=layout,
        scale=scale, **options,
    )  # fmt: skip


def worst_row_error(out, want) -> float:
    """Largest relative error of a row, absolute where the wanted row is zero; NaN counts as infinite."""
    out, want = np.asarray(out, np.float64), np.asarray(want, np.float64)
    norm = np.linalg.norm(want, axis=-1)
    error = np.linalg.norm(out - want, axis=-1) / np.where(norm > 0, norm, 1.0)
    return float(np.nan_to_num(error, nan=np.inf).max())


def contract(layout: str, tokens: int, heads: int) -> float:
    """Runs the kernel on ragged rows with NaN around them; returns the worst error or raises RuntimeError."""
    case = ref.mla_case(layout, tokens, heads, CONTRACT_LENGTHS, flat_scale=FLAT_SCALE)
    scale = FLAT_SCALE if layout == "fp8_flat" else 1.0
    want, want_lse = ref.mla_decode(
        case["q"], ref.mla_pool(*case["pool"], scale=scale), case["layer"], case["table"], case["length"],
        softmax_scale=SOFTMAX_SCALE, num_new_B=case["num_new"],
    )  # fmt: skip
    values, scales, rope = case["pool"]
    pool = jax.tree.map(jnp.asarray, mla_decode.Pool(values, scales, rope))
    rows = [jnp.asarray(case[name]) for name in ("table", "length", "num_new")]
    arguments = (jnp.asarray(case["q"]), pool, jnp.int32(case["layer"]), *rows)
    worst, (allowed, lse_allowed) = 0.0, tolerance(layout, tokens * heads)
    for batch_invariant in (False, True):
        kernel = jax.jit(functools.partial(attend, layout, batch_invariant=batch_invariant))
        out, lse = kernel(*arguments)
        again, _ = kernel(*arguments)
        error = worst_row_error(out, want)
        empty = np.isneginf(want_lse)
        lse_error = np.abs(np.asarray(lse)[~empty] - want_lse[~empty]).max()
        checks = {
            f"error {error:.1e}": error < allowed,
            f"log-sum-exp error {lse_error:.1e}": lse_error < lse_allowed,
            "empty rows": bool((np.isneginf(np.asarray(lse)) == empty).all()),
            "repeats bit for bit": bool((np.asarray(out) == np.asarray(again)).all()),
        }
        if failed := [what for what, good in checks.items() if not good]:
            raise RuntimeError(f"contract of mla_decode {layout} t{tokens} h{heads}: {failed}")
        worst = max(worst, error)
    return worst


def contract_beyond_32_bits() -> float:
    """A pool of 4.4e9 elements whose used pages are its last: the same output as from a small pool."""
    pages, used, length = 60_000, 9, 9 * PAGE - 5
    key = jax.random.key(11)
    small = (jax.random.normal(key, (1, used, PAGE, 576)) / FLAT_SCALE).astype(jnp.float8_e4m3fn)
    bits = lax.bitcast_convert_type(small, jnp.uint8)
    large = jax.jit(lambda b: jnp.zeros((2, pages, PAGE, 576), jnp.uint8).at[1, pages - used :].set(b[0]))(
        bits
    )
    q = jax.random.normal(jax.random.key(12), (2, 1, 8, 576)).astype(jnp.bfloat16)
    table = jnp.broadcast_to(jnp.arange(used, dtype=jnp.int32), (2, used))
    lengths = jnp.full((2,), length, jnp.int32)
    kernel = jax.jit(functools.partial(attend, "fp8_flat"))
    out, _ = kernel(q, mla_decode.Pool(large), jnp.int32(1), table + (pages - used), lengths)
    want, _ = kernel(q, mla_decode.Pool(bits), jnp.int32(0), table, lengths)
    if not (np.asarray(out) == np.asarray(want)).all():
        raise RuntimeError("contract of mla_decode: a pool beyond 2**32 elements gives another output")
    return float(worst_row_error(out, want))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pool(key, pages: int, layout: str) -> mla_decode.Pool:
    latent = jax.random.normal(key, (1, pages, PAGE, 576), jnp.bfloat16)
    as_bits = lax.bitcast_convert_type
    if layout == "bf16":
        return mla_decode.Pool(as_bits(latent, jnp.uint16))
    if layout == "fp8_flat":
        return mla_decode.Pool(as_bits((latent / FLAT_SCALE).astype(jnp.float8_e4m3fn), jnp.uint8))
    values = as_bits((latent[..., :512] / FLAT_SCALE).astype(jnp.float8_e4m3fn), jnp.uint8)
    scales = FLAT_SCALE * jax.random.uniform(jax.random.key(1), (1, pages, PAGE, 4), minval=0.5, maxval=2.0)
    return mla_decode.Pool(values, scales, as_bits(latent[..., 512:], jnp.uint16))


def _inputs(job: Job, pages: int, seed: int):
    """Per repetition a query and a table of its own pages, so that a repetition finds nothing in the L2."""
    rng = np.random.default_rng(seed)
    need = -(-job.lengths(seed) // PAGE)
    used = np.arange(need.max())[None] < need[:, None]
    sets = max(1, min(job.repetitions, (pages - 1) // need.sum()))
    order = rng.permutation(np.arange(1, pages))[: sets * need.sum()]
    tables = np.zeros((sets, *used.shape), np.int32)
    tables[:, used] = order.reshape(sets, -1)
    shape = (job.batch, 1, job.heads, 576)
    q = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(job.repetitions)]
    return q, [jnp.asarray(tables[i % sets]) for i in range(job.repetitions)]


def _compile(job: Job, pool: mla_decode.Pool, pages: int, seed: int):
    q, tables = _inputs(job, pages, seed)
    length = jnp.asarray(job.lengths(seed))
    groups, _ = mla_decode.column_groups(1, job.heads)
    schedule = mla_decode.make_schedule(
        length, max_pages=tables[0].shape[1], groups=groups, blocks=job.config.blocks
    )
    kernel = jax.jit(functools.partial(attend, job.layout, config=job.config))

    def program(q, pool, tables, length, schedule):
        each = [kernel(a, pool, jnp.int32(0), b, length, schedule=schedule) for a, b in zip(q, tables)]
        return [out for out, _ in each]

    arguments = (q, pool, tables, length, schedule)
    return jax.jit(program).lower(*arguments).compile(), arguments


@functools.partial(jax.jit, static_argnums=(0,))
def _oracle(layout: str, q, pool, table, length):
    """f32 attention of a few rows, on the same bytes."""
    scale = FLAT_SCALE if layout == "fp8_flat" else None
    return xla.mla_decode(
        q, pool, jnp.int32(0), table, length, softmax_scale=SOFTMAX_SCALE, layout=layout, scale=scale
    )[0]


def run(
    jobs: Iterable[Job],
    recorder: record.Recorder,
    *,
    pages: int,
    seed: int = 0,
    late: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Measures the jobs: ``<name>.us``, ``.err`` and what stands beside them.

    Jobs that come up when ``late()`` are absent from the record.
    """
    rows, failures = [], []
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for layout, own in itertools.groupby(jobs, key=lambda job: job.layout):
            pool = _pool(jax.random.key(seed), pages, layout)
            compiled = {job: threads.submit(_compile, job, pool, pages, seed) for job in own}
            concurrent.futures.wait(compiled.values())  # a busy compiler would hold up the launches
            for job, future in compiled.items():
                if late():
                    recorder.absent(job.name, "the run's deadline")
                    continue
                try:
                    program, arguments = future.result()
                    rows.append(_measure(job, program, arguments, recorder))
                    print(rows[-1], flush=True)
                except Exception as error:
                    failures.append(f"{job.name}: {error}"[:300])
                    recorder.absent(job.name, failures[-1])
                    print(failures[-1], flush=True)
            del pool, compiled
    if failures:
        raise RuntimeError("; ".join(failures))
    return rows


def _measure(job: Job, program, arguments: tuple, recorder: record.Recorder) -> str:
    q, pool, tables, length, _ = arguments
    some = np.argsort(np.asarray(length), kind="stable")[:4]  # the shortest: the oracle gathers whole rows
    width = -(-int(length[some].max()) // PAGE)
    out = program(*arguments)[0]
    want = _oracle(job.layout, q[0][some], pool, tables[0][some, :width], length[some])
    error = worst_row_error(out[some], want)
    allowed, _ = tolerance(job.layout, job.heads)
    if not error < allowed:
        raise RuntimeError(f"{job.name}: error {error:.1e}, tolerance {allowed:.1e}")
    timing = bench_timing.measure(lambda: program(*arguments), job.repetitions)
    moved = job.batch * job.context * BYTES[job.layout]
    flops = 2 * job.batch * job.context * job.heads * (576 + 512)
    gbps = moved / timing.us / 1e3
    recorder.metric(f"{job.name}.us", timing.us)
    recorder.metric(f"{job.name}.err", error)
    recorder.metric(f"{job.name}.spread", timing.spread)
    recorder.metric(f"{job.name}.launches", timing.launches)
    recorder.metric(f"{job.name}.wall_us", timing.wall_us)
    recorder.metric(f"{job.name}.gbps", gbps)
    recorder.metric(f"{job.name}.tflops", flops / timing.us / 1e6)
    recorder.metric(f"{job.name}.ceiling_share", gbps / bench_timing.PEAK_GBPS)
    recorder.metric(f"{job.name}.floor_us", moved / bench_timing.PEAK_GBPS / 1e3)
    kernels = sorted(timing.kernels.values(), reverse=True)
    recorder.metric(f"{job.name}.attention_us", kernels[0])
    row = (
        f"{job.name:44s} {timing.us:7.1f} us ({kernels[0]:.1f} attention)  {gbps:5.0f} GB/s  err {error:.1e}"
    )
    rival = RIVAL_US["bf16" if job.layout == "bf16" else "fp8"].get((job.heads, job.batch, job.context))
    if rival and not job.tiles and not job.ragged:
        recorder.metric(f"{job.name}.rival_us", rival)
        row += f"  rival {rival:.1f} ({rival / timing.us:.2f}x)"
    return row
