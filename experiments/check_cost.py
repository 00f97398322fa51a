"""What the page check costs on one H200 with tables of full size. See configs/check_cost.py.

``integrity.check.<detector>.b<rows>`` is the check alone: ``us`` (several in one program, each waiting for
the one before, on tables that together exceed the L2), ``launches`` as profiled, and ``device_operations`` of
the compiled program.

``integrity.step.<detector>.b<rows>.l<context>.us`` is the engine's own decode step of one of eight ranks of
Kimi K2.6: real widths, some of the layers, no collectives; the check sees the whole pool's table whatever the
batch. ``integrity.overhead.<detector>.b<rows>.l<context>.us`` and ``.percent`` are what the detector adds.
With tags, whose cost does not depend on the layers, ``.whole_percent`` sets the same time against all layers:
the measured step without the check, times all layers over those measured. ``busy_us`` is the time in kernels:
where the host's launches bound a step, ``us`` differs by more from run to run than the check takes.
"""

import dataclasses
import functools
import itertools
import os
import statistics
import time
import zlib
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool
from ml_collections import ConfigDict

from experiments import bench_timing, clean_pages, launch
from experiments.multi_gpu_parts.common import compile_all
from kvmem import record
from kvmem.cache import integrity, pages, store, tags
from kvmem.cache.pages import Expectation, PageState
from kvmem.engine import step
from kvmem.engine.step import PoolState, StepConfig
from kvmem.models import decoder, get_config, params, sharded
from kvmem.models.config import ModelConfig
from kvmem.sharding.specs import ParamSpec

PAGE, RANKS = 64, 8
CACHE, SCALE = "fp8_576", 0.05


def rank_slice(model: ModelConfig, layers: int) -> ModelConfig:
    """One of eight ranks: its heads, its part of every feed-forward width and of the vocabulary."""
    return dataclasses.replace(
        model,
        num_layers=layers,
        num_heads=model.num_heads // RANKS,
        dense_ffn_size=model.dense_ffn_size // RANKS,
        expert_ffn_size=model.expert_ffn_size // RANKS,
        vocab_size=model.vocab_size // RANKS,
        vision=None,
    )


def weights(model: ModelConfig, seed: int) -> params.Params:
    """Random INT4 parameters of plausible size and zero mean; the layers of a stack hold the same."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def drawn(key: Array, leaf: jax.ShapeDtypeStruct, stack_dims: int) -> Array:
        shape = leaf.shape[min(stack_dims, 1) :]
        if leaf.dtype == jnp.int4:
            value = jax.random.randint(key, shape, -7, 8, jnp.int8).astype(jnp.int4)
        else:
            value = (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(leaf.dtype)
        return jnp.broadcast_to(value, leaf.shape)

    def one(name: str, spec: ParamSpec) -> Any:
        shapes = sharded.abstract_params({name: spec})[name]
        if spec.init == "norm":
            return jnp.ones(shapes.shape, shapes.dtype)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        return jax.tree.map(lambda leaf: drawn(key, leaf, spec.stack_dims), shapes)

    return sharded.map_named(one, params.param_specs(model, "int4_group"))


def served(num_pages: int, rows: int, columns: int, tokens: int) -> tuple[PageState, Expectation]:
    """A pool whose rows hold ``tokens`` tokens each, and what they were promised."""
    state, ok_B = pages.append(pages.init(num_pages, rows, columns, PAGE), jnp.full(rows, tokens, jnp.int32))
    if not bool(jnp.all(ok_B)):
        raise ValueError(f"{rows} rows of {tokens} tokens do not fit {num_pages - 1} pages")
    return state, tags.extend(tags.empty(rows, columns), state, jnp.ones(rows, bool))


def zeros_sealed(kv: store.KVStore) -> tags.DigestTable:
    """The digests of whole pages of zeros."""
    digest_12 = tags.page_digest(kv, jnp.asarray([1], jnp.int32), jnp.asarray([PAGE], jnp.int32))
    return tags.DigestTable(
        digest_P2=jnp.broadcast_to(digest_12, (kv.num_pages, 2)) + jnp.uint32(0),
        tokens_P=jnp.full(kv.num_pages, PAGE, jnp.int32),
    )


def check_chain(
    states: list[PageState],
    expectations: list[Expectation],
    mask_B: Bool[Array, "B"],
    kv: store.KVStore | None,
    digests: tags.DigestTable | None,
    *,
    detector: str,
    digest_pages: int,
) -> Bool[Array, "B"]:
    """As many checks as there are states, each of which waits for the one before."""
    for turn, both in enumerate(zip(states, expectations, strict=True)):
        (state, expectation), mask_B = lax.optimization_barrier((both, mask_B))
        report = integrity.guard(
            detector,
            state,
            expectation,
            mask_B,
            kv=kv,
            digests=digests,
            pages_per_row=digest_pages,
            step=jnp.int32(turn),
        )
        mask_B = integrity.alive(report, mask_B)
    return mask_B


def _tables(config: ConfigDict, rows: int, count: int) -> tuple[list[PageState], list[Expectation]]:
    """``count`` pools that hold the same rows in other pages."""
    tokens = PAGE * min(config.columns, (config.pages - 1) // rows)
    state, _ = served(config.pages, rows, config.columns, tokens)
    states, expectations = [], []
    for seed in range(count):
        order = np.random.default_rng(config.seed + seed).permutation(np.arange(1, config.pages))
        page_P = jnp.asarray(np.concatenate([[0], order]), jnp.int32)
        moved = dataclasses.replace(
            state,
            table_BM=page_P[state.table_BM],
            generation_P=jnp.zeros_like(state.generation_P).at[page_P].set(state.generation_P),
        )
        states.append(moved)
        expectations.append(tags.extend(tags.empty(rows, config.columns), moved, jnp.ones(rows, bool)))
    return states, expectations


def checks(config: ConfigDict, recorder: record.Recorder) -> None:
    """Times the check alone."""
    model = get_config(config.model)
    kv = store.init(decoder.cache_shape(model), CACHE, num_pages=config.pages, page_size=PAGE, scale=SCALE)
    jobs: dict[Any, Any] = {}
    counts = {("tags", rows): config.chain for rows in config.batches}
    counts["tags_digest", max(config.batches)] = config.digest_chain
    for (detector, rows), count in counts.items():
        content = (kv, zeros_sealed(kv)) if detector == "tags_digest" else (None, None)
        arguments = (*_tables(config, rows, count), jnp.ones(rows, bool), *content)
        chain = functools.partial(check_chain, detector=detector, digest_pages=config.digest_pages)
        jobs[detector, rows] = (jax.jit(chain), arguments)
    for (detector, rows), program in compile_all(jobs).items():
        name, count = f"integrity.check.{detector}.b{rows}", counts[detector, rows]
        if isinstance(program, Exception):
            recorder.absent(f"{name}.us", f"{type(program).__name__}: {program}"[:300])
            continue
        arguments = jobs[detector, rows][1]
        if not bool(jnp.all(program(*arguments))):
            raise RuntimeError(f"{name}: a clean pool fails its check")
        timing = bench_timing.measure(functools.partial(program, *arguments), count, config.runs)
        operations = clean_pages.device_operations(program.as_text())
        recorder.metric(f"{name}.us", timing.us)
        recorder.metric(f"{name}.spread", timing.spread)
        recorder.metric(f"{name}.launches", timing.launches)
        recorder.metric(f"{name}.device_operations", operations / count)
        print(f"{name:32s} {timing.us:7.2f} us, {timing.launches:.1f} launches", flush=True)


@dataclasses.dataclass
class Run:
    """A compiled step with its own pool, which advances; every step feeds other, random tokens."""

    program: Any
    weights: params.Params
    state: PoolState
    run_B: Bool[Array, "B"]
    tokens: list[Array] = dataclasses.field(default_factory=list)

    def once(self) -> jax.Array:
        fed = dataclasses.replace(self.state, token_B=self.tokens.pop())
        self.state, report = self.program(self.weights, fed, self.run_B)
        return report.outcome

    def rewind(self, context: int) -> None:
        """Rows of ``context`` tokens, but for the last page, which the steps then fill."""
        drawn_ZB = jax.random.randint(
            jax.random.key(context), (PAGE, len(self.run_B)), 0, self.weights["embed"].shape[0]
        )
        self.tokens = list(drawn_ZB)
        rows, columns = self.state.pages.table_BM.shape
        batch = int(jnp.sum(self.run_B))
        tokens_B = jnp.where(self.run_B, context - PAGE, 0).astype(jnp.int32)
        state, _ = pages.append(pages.init(self.state.pages.num_pages, rows, columns, PAGE), tokens_B)
        kv, digests = self.state.kv, self.state.digests
        if digests is not None:  # what was written since is in other rows' pages now
            kv = dataclasses.replace(kv, values=jnp.zeros_like(kv.values))
            digests = zeros_sealed(kv)
        self.state = dataclasses.replace(
            self.state,
            pages=state,
            expectation=tags.extend(tags.empty(rows, columns), state, self.run_B),
            kv=kv,
            digests=digests,
            cause_B=jnp.zeros(rows, jnp.int32),
        )
        if int(jnp.sum(state.used_B)) != batch * (context // PAGE - 1):
            raise ValueError(f"{batch} rows of {context} tokens do not fit the pool")


def abstract_step(config: ConfigDict, model: ModelConfig, batch: int, detector: str) -> tuple[Any, tuple]:
    """The jitted step, and the shapes of its state and mask."""
    plan = StepConfig(
        model=model,
        rows=batch,
        columns=max(config.contexts) // PAGE,
        detector=detector,
        digest_pages=config.digest_pages,
        implementation=config.implementation,
    )
    rows = max(config.batches)
    state = jax.eval_shape(functools.partial(_pool, config, model, detector))
    return step.compile_step("decode", plan), (state, jax.ShapeDtypeStruct((rows,), bool))


def _pool(config: ConfigDict, model: ModelConfig, detector: str) -> PoolState:
    return step.init(
        decoder.cache_shape(model),
        cache=CACHE,
        index=None,
        scale=SCALE,
        num_pages=config.pages,
        num_rows=max(config.batches),
        max_pages=config.columns,
        page_size=PAGE,
        detector=detector,
    )


def steps(config: ConfigDict, recorder: record.Recorder, late_s: float) -> None:
    """Times the decode step with each detector."""
    full = get_config(config.model)
    model = rank_slice(full, config.layers)
    recorder.metric("integrity.step.layers", config.layers)
    tree = weights(model, config.seed)
    jobs: dict[Any, Any] = {}
    for batch in config.batches:
        for detector in integrity.DETECTORS:
            program, shapes = abstract_step(config, model, batch, detector)
            jobs[batch, detector] = (program, (tree, *shapes))
    compiled = compile_all(jobs)
    for (batch, detector), program in compiled.items():
        at = f"integrity.step.{detector}.b{batch}"
        if isinstance(program, Exception):
            recorder.absent(f"{at}.us", f"{type(program).__name__}: {program}"[:300])
        else:
            operations = clean_pages.device_operations(program.as_text())
            recorder.metric(f"{at}.device_operations", operations)
    for context, batch in itertools.product(config.contexts, config.batches):
        if time.monotonic() > late_s or isinstance(compiled[batch, "off"], Exception):
            recorder.absent(f"integrity.step.b{batch}.l{context}.us", "the run's deadline, or no step")
            continue
        run_B = jnp.arange(max(config.batches)) < batch
        runs = {
            detector: Run(program, tree, _pool(config, model, detector), run_B)
            for detector in integrity.DETECTORS
            if not isinstance(program := compiled[batch, detector], Exception)
        }
        _measure(config, recorder, runs, batch, context, full.num_layers)
        del runs  # before the next pools are made


def _measure(
    config: ConfigDict,
    recorder: record.Recorder,
    runs: dict[str, Run],
    batch: int,
    context: int,
    num_layers: int,
) -> None:
    us: dict[str, list[float]] = {detector: [] for detector in runs}
    busy: dict[str, list[float]] = {detector: [] for detector in runs}
    launches = {}
    for _ in range(config.rounds):  # in turn, so that a drift of the clock is no detector's
        for detector, run in runs.items():
            run.rewind(context)
            timing = bench_timing.measure(run.once, 1, config.runs)
            outcome = step.read(step.StepReport(outcome=run.once(), check=None, promised=None))
            if sum(outcome.ran) != batch:
                raise RuntimeError(f"{detector} b{batch} l{context}: {sum(outcome.ran)} rows of {batch} ran")
            us[detector].append(timing.us)
            busy[detector].append(sum(timing.kernels.values()))
            launches[detector] = timing.launches
    off = statistics.median(us["off"])
    whole = off * num_layers / config.layers
    for detector, taken in us.items():
        at = f"{detector}.b{batch}.l{context}"
        median = statistics.median(taken)
        recorder.metric(f"integrity.step.{at}.us", median)
        recorder.metric(f"integrity.step.{at}.spread_us", max(taken) - min(taken))
        recorder.metric(f"integrity.step.{at}.launches", launches[detector])
        recorder.metric(f"integrity.step.{at}.busy_us", statistics.median(busy[detector]))
        if detector != "off":
            recorder.metric(f"integrity.overhead.{at}.us", median - off)
            added = statistics.median(busy[detector]) - statistics.median(busy["off"])
            recorder.metric(f"integrity.overhead.{at}.busy_us", added)
            recorder.metric(f"integrity.overhead.{at}.percent", 100 * (median - off) / off)
        if detector == "tags":
            recorder.metric(f"integrity.overhead.{at}.whole_percent", 100 * (median - off) / whole)
        print(f"{at:28s} {median:9.1f} us, {launches[detector]:.0f} launches, {taken}", flush=True)


def body(config: ConfigDict, recorder: record.Recorder) -> None:
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"backend {jax.default_backend()}: check_cost times programs on an H200")
    started = time.monotonic()
    recorder.seeds["inputs"] = config.seed
    recorder.weights = f"synthetic:{config.seed}"
    recorder.notes["integrity_coverage"] = integrity.coverage()
    checks(config, recorder)
    recorder.write("interrupted")
    steps(config, recorder, started + config.deadline_s)
    if not any(name.startswith("integrity.overhead.") for name in recorder.metrics):
        raise RuntimeError("no step was measured; the record says why")


if __name__ == "__main__":
    launch.run(body)
