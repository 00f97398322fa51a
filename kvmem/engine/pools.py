"""The device half of the engine: the two pools' states and the programs that advance them.

Everything here launches and returns; only ``counts``, ``free`` and ``generations`` wait for the device.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvmem.cache import pages
from kvmem.cache.integrity import IntegrityReport
from kvmem.engine import fingerprint, rows, step
from kvmem.engine.fingerprint import PoolFingerprint
from kvmem.engine.request import EngineConfig, SamplingParams, bucket
from kvmem.engine.step import PoolState, StepConfig, StepReport
from kvmem.models import decoder
from kvmem.models.config import ModelConfig

Pool = Literal["prefill", "decode"]
POOLS: tuple[Pool, ...] = ("prefill", "decode")
Fault = Callable[[Any], Any]


class CompileCounter:
    """Counts the programs that JAX has compiled in this process since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **rest: str | int) -> None:
        del duration_secs, rest
        self.count += event == "/jax/core/compile/backend_compile_duration"


class DevicePools:
    """A prefill pool and a decode pool with their parameters; see Engine for the arguments."""

    def __init__(
        self,
        model: ModelConfig,
        params: Mapping[str, Any],
        config: EngineConfig,
        mesh: Mesh | None,
        param_specs: Mapping[str, Any] | None,
    ):
        if mesh is not None and param_specs is None:
            raise ValueError("a mesh needs param_specs by phase")
        self.model = model
        self.config = config
        self.params = dict(params)
        self._mesh = mesh
        self._param_specs = param_specs
        self._formats = {"prefill": config.prefill, "decode": config.decode}
        self.fingerprints = {pool: self.fingerprint(pool) for pool in POOLS}
        fingerprint.require_equal(
            "engine start",
            self.fingerprints["prefill"],
            self.fingerprints["decode"],
            ignore=fingerprint.PHASE_FIELDS,
        )
        self.origin = {
            pool: zlib.crc32(f"{pool}:{self.fingerprints[pool]!r}".encode()) or 1 for pool in POOLS
        }
        self._steps: dict[tuple[Pool, int, int], step.StepFunction] = {}
        self.states: dict[Pool, PoolState] = {}
        self.reset()

    def fingerprint(self, pool: str) -> PoolFingerprint:
        """What the pool is made of now."""
        return fingerprint.of_pool(self.model, self.params[pool], self._formats[pool], self.config)

    def reset(self) -> None:
        """Empties both pools."""
        self.states = {pool: self._empty(pool) for pool in POOLS}

    def _empty(self, pool: Pool) -> PoolState:
        prefill, form, config = pool == "prefill", self._formats[pool], self.config
        state = step.init(
            decoder.cache_shape(self.model),
            cache=form.cache,
            index=form.index,
            scale=form.scale,
            num_pages=config.prefill_pages if prefill else config.decode_pages,
            num_rows=config.prefill_slots if prefill else config.max_rows,
            max_pages=config.max_pages_per_row,
            page_size=config.page_size,
            detector=config.integrity,
            origin=self.origin[pool],
        )
        if self._mesh is None:
            return state
        return jax.device_put(state, NamedSharding(self._mesh, PartitionSpec()))

    def step_config(self, num_rows: int, columns: int) -> StepConfig:
        """What a step over the first ``num_rows`` rows and ``columns`` table columns is compiled for."""
        config = self.config
        return StepConfig(
            model=self.model,
            rows=num_rows,
            columns=columns,
            detector=config.integrity,
            digest_pages=config.digest_pages,
            batch_invariant=config.batch_invariant,
            attention=config.attention,
            implementation=config.implementation,
            reduction=config.reduction,
            axis=None if self._mesh is None else "tp",
        )

    @functools.cached_property
    def _check_config(self) -> StepConfig:
        """For checks between steps: all pages; every rank holds the same values and no axis is bound."""
        config = self.step_config(self.config.max_rows, self.config.max_pages_per_row)
        return dataclasses.replace(config, axis=None, digest_pages=None)

    def _step(self, pool: Pool, num_rows: int, columns: int) -> step.StepFunction:
        key = (pool, num_rows, columns)
        if key not in self._steps:
            specs = None if self._param_specs is None else self._param_specs[pool]
            self._steps[key] = step.compile_step(pool, self.step_config(num_rows, columns), self._mesh, specs)
        return self._steps[key]

    def columns(self, tokens: int) -> int:
        """Table columns of the smallest bucket that holds rows of ``tokens`` tokens."""
        needed = -(-tokens // self.config.page_size)
        return bucket(needed, self.config.page_buckets, self.config.max_pages_per_row)

    def prefill(self, chunks: Iterable[tuple[int, Sequence[int]]], longest: int) -> StepReport:
        """Launches a prefill step of (row, its next prompt tokens); ``longest`` row in tokens after it."""
        config = self.config
        tokens_BT = np.zeros((config.prefill_slots, config.prefill_chunk), np.int32)
        num_new_B = np.zeros(config.prefill_slots, np.int32)
        for row, tokens in chunks:
            tokens_BT[row, : len(tokens)] = tokens
            num_new_B[row] = len(tokens)
        run = self._step("prefill", config.prefill_rows, self.columns(longest))
        self.states["prefill"], report = run(
            self.params["prefill"], self.states["prefill"], tokens_BT, num_new_B
        )
        return report

    def decode(self, decode_rows: list[int], longest: int) -> StepReport:
        """Launches a decode step of the given rows; ``longest`` row in tokens after it."""
        run_B = np.zeros(self.config.max_rows, np.bool_)
        run_B[decode_rows] = True
        num_rows = bucket(max(decode_rows) + 1, self.config.row_buckets, self.config.max_rows)
        run = self._step("decode", num_rows, self.columns(longest))
        self.states["decode"], report = run(self.params["decode"], self.states["decode"], run_B)
        return report

    def admit(
        self, row: int, sampling: SamplingParams, reused: Sequence[tuple[int, int]], total: int
    ) -> None:
        """Puts a request into a prefill row: ``reused`` (page, generation) pairs, then new pages up to
        ``total``.
        """
        width = self.config.max_pages_per_row
        page_M, generation_M = np.zeros(width, np.int32), np.zeros(width, np.uint32)
        if reused:
            page_M[: len(reused)], generation_M[: len(reused)] = zip(*reused, strict=True)
        self.states["prefill"] = rows.admit(
            self.states["prefill"],
            rows.start(row, 0, sampling),
            page_M,
            generation_M,
            np.int32(len(reused)),
            np.int32(total),
        )

    def transfer(
        self, source_row: int, row: int, token: int, sampling: SamplingParams, faults: Sequence[Fault] = ()
    ) -> IntegrityReport:
        """Moves a prefilled row into a decode row; what fails on the device leaves the decode row dead.

        Raises:
          TransferFailed: if a fault does; both sides are unpinned and the decode row holds its pages.
        """
        source, destination, order, check, intact = rows.transfer_begin(
            self.states["prefill"],
            self.states["decode"],
            np.int32(source_row),
            np.int32(row),
            config=self._check_config,
        )
        held = order
        try:
            for fault in faults:
                order = fault(order)
            first = rows.start(row, token, sampling)
            origin = np.uint32(self.origin["prefill"])
            destination = rows.transfer_deliver(source, destination, order, first, intact, origin)
        finally:
            source, destination = rows.transfer_end(source, destination, held)
            self.states = {"prefill": source, "decode": destination}
        return check

    def widen(self, row: int, first: int, count: int) -> list[tuple[int, int]]:
        """Converts pages of a decode row into prefill pages, held by the spare prefill row.

        Waits for the device: the prefix tree needs the page ids.

        Returns:
          (page, generation) of each; empty if the row failed its check or the pool had no room.
        """
        self.states["prefill"], held = rows.widen(
            self.states["prefill"],
            self.states["decode"],
            np.int32(row),
            np.int32(self.config.prefill_rows),
            np.int32(first),
            np.int32(count),
            np.uint32(self.origin["decode"]),
            config=self._check_config,
        )
        page_M, generation_M, ok = jax.device_get(held)
        return list(zip(page_M[:count].tolist(), generation_M[:count].tolist(), strict=True)) if ok else []

    def move_out(self, row: int) -> rows.RowBytes:
        """Takes a decode row's bytes out and frees its pages."""
        self.states["decode"], moved = rows.move_out(
            self.states["decode"], np.int32(row), config=self._check_config
        )
        return moved

    def move_in(self, row: int, token: int, sampling: SamplingParams, moved: rows.RowBytes) -> None:
        """Puts a moved-out row into an empty decode row, bit for bit."""
        self.states["decode"] = rows.move_in(self.states["decode"], rows.start(row, token, sampling), moved)

    def release(self, pool: Pool, released: Iterable[int]) -> None:
        """Empties rows; they give up only what is still theirs."""
        mask_B = np.zeros(self.states[pool].cause_B.shape[0], np.bool_)
        mask_B[list(released)] = True
        self.states[pool] = rows.release(self.states[pool], mask_B)

    def hold(self, operation: Literal["retain", "drop"], page_list: Sequence[int]) -> None:
        """Adds or takes the prefix tree's hold on prefill pages."""
        width = self.config.max_pages_per_row
        run = rows.retain if operation == "retain" else rows.drop
        for at in range(0, len(page_list), width):
            page_A = np.zeros(width, np.int32)
            part = page_list[at : at + width]
            page_A[: len(part)] = part
            self.states["prefill"] = run(self.states["prefill"], page_A)

    def generations(self, pool: Pool) -> np.ndarray:
        """Generation of every page, [P] u32."""
        return np.asarray(self.states[pool].pages.generation_P)

    def free(self, pool: Pool) -> int:
        """Free pages as the device counts them."""
        return int(self.states[pool].pages.free_count)

    def counts(self, pool: Pool) -> dict[str, int]:
        """Pages by state."""
        counts = jax.device_get(pages.counts(self.states[pool].pages))
        return {field.name: int(getattr(counts, field.name)) for field in dataclasses.fields(counts)}

    @property
    def nbytes(self) -> int:
        """Bytes of weights and pools; a leaf that both phases share counts once."""
        leaves = jax.tree.leaves((self.params, self.states))
        return sum({id(leaf): leaf.nbytes for leaf in leaves}.values())

    def warm_up(self) -> None:
        """Runs every program once, then empties the pools."""
        config, greedy = self.config, SamplingParams()
        page_buckets = (*config.page_buckets, config.max_pages_per_row)
        for columns in page_buckets:
            self.prefill([], columns * config.page_size)
        for num_rows in (*config.row_buckets, config.max_rows):
            for columns in page_buckets:
                self.decode([num_rows - 1], columns * config.page_size)
        self.hold("retain", [pages.PADDING_PAGE])
        self.hold("drop", [pages.PADDING_PAGE])
        self.admit(0, greedy, [], 1)
        self.prefill([(0, [1])], 1)
        self.transfer(0, 0, 0, greedy)
        if config.reuse == "widen":
            self.widen(0, 0, 1)
        self.move_in(0, 0, greedy, jax.device_get(self.move_out(0)))
        for pool in POOLS:
            self.release(pool, [0])
            self.counts(pool)
        self.reset()
        jax.block_until_ready(self.states)
