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
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kvmem.cache import pages
from kvmem.cache.transfer import Order, Shipment
from kvmem.engine import fingerprint, handover, rows, step
from kvmem.engine.fingerprint import PoolFingerprint
from kvmem.engine.handover import Offer, Receipt
from kvmem.engine.request import EngineConfig, SamplingParams, bucket
from kvmem.engine.rows import RowStart
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


@dataclasses.dataclass
class Parcel:
    """A row on its way from the prefill to the decode pool.

    Attributes:
      first: the decode row and its first values.
      tokens: that its pages hold.
      order: what moves where, as the faults of a test left it; on the decode pool's devices.
      offered, receipt: what is pinned on either side; ``pinned`` says on which it still is.
      shipment: what has been sent between meshes, else None.
    """

    first: RowStart
    tokens: int
    order: Order
    offered: Offer
    receipt: Receipt
    pinned: set[Pool]
    shipment: Shipment | None = None

    @property
    def here(self) -> bool:
        """Whether what was shipped has arrived on the decode pool's devices."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves(self.shipment))


class DevicePools:
    """A prefill pool and a decode pool with their parameters; see Engine for the arguments."""

    def __init__(
        self,
        model: ModelConfig,
        params: Mapping[str, Any],
        config: EngineConfig,
        meshes: Mapping[str, Mesh | None] | None = None,
        param_specs: Mapping[str, Any] | None = None,
    ):
        self._meshes = dict.fromkeys(POOLS) if meshes is None else dict(meshes)
        if set(self._meshes) != set(POOLS):
            raise ValueError(f"meshes of {sorted(self._meshes)}: one each is needed for {list(POOLS)}")
        if param_specs is None and any(mesh is not None for mesh in self._meshes.values()):
            raise ValueError("a mesh needs param_specs by phase")
        self.apart = self._meshes["prefill"] != self._meshes["decode"]
        if self.apart and jax.process_count() > 1:
            raise NotImplementedError(
                f"a mesh for each phase in {jax.process_count()} processes: each would see a hand-over "
                "arrive at a step of its own, and their programs would part; give both phases one mesh"
            )
        self.model = model
        self.config = config
        self.params = dict(params)
        self._param_specs = param_specs
        self._formats = {"prefill": config.prefill, "decode": config.decode}
        self.fingerprints: dict[str, PoolFingerprint] = {pool: self.fingerprint(pool) for pool in POOLS}
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

    def fingerprint(self, pool: Pool) -> PoolFingerprint:
        """What the pool is made of now."""
        mesh = self._meshes[pool]
        ranks = 1 if mesh is None else mesh.size
        return fingerprint.of_pool(self.model, self.params[pool], self._formats[pool], self.config, ranks)

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
        return state if self._meshes[pool] is None else jax.device_put(state, self._place(pool))

    def _place(self, pool: Pool) -> Sharding:
        """Where a pool's state is: on every rank of its mesh, or on the first device."""
        mesh = self._meshes[pool]
        return (
            SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())
        )

    def _send(self, values: Any, pool: Pool) -> Any:
        """Launches the copy of arrays to a pool's devices, if they are not there."""
        return jax.device_put(values, self._place(pool)) if self.apart else values

    def step_config(self, pool: Pool, num_rows: int, columns: int) -> StepConfig:
        """What a step over the first ``num_rows`` rows and ``columns`` table columns is compiled for."""
        config, mesh = self.config, self._meshes[pool]
        reduction = config.reduction
        if reduction == "auto":
            # The kernel needs a mesh of all devices, in one process, and all rows in one pass.
            whole = mesh is not None and mesh.size == jax.device_count() == jax.local_device_count()
            ranks = jax.device_count() if whole and not config.batch_invariant else 1
            platform = jax.devices()[0].platform
            reduction = step.fastest_reduction(pool, platform, ranks, num_rows, self.model.hidden_size)
        return StepConfig(
            model=self.model,
            rows=num_rows,
            columns=columns,
            detector=config.integrity,
            digest_pages=config.digest_pages,
            batch_invariant=config.batch_invariant,
            attention=config.attention,
            implementation=config.implementation,
            reduction=reduction,
            axis=None if mesh is None else "tp",
        )

    @functools.cached_property
    def _check_config(self) -> StepConfig:
        """For checks between steps: all pages; every rank holds the same values and no axis is bound."""
        config = self.step_config("decode", self.config.max_rows, self.config.max_pages_per_row)
        return dataclasses.replace(config, axis=None, digest_pages=None)

    def _step(self, pool: Pool, num_rows: int, columns: int) -> step.StepFunction:
        key = (pool, num_rows, columns)
        if key not in self._steps:
            specs = None if self._param_specs is None else self._param_specs[pool]
            config = self.step_config(pool, num_rows, columns)
            self._steps[key] = step.compile_step(pool, config, self._meshes[pool], specs)
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

    def begin_transfer(
        self, source_row: int, row: int, tokens: int, token: int, sampling: SamplingParams
    ) -> Parcel:
        """Pins a prefilled row of ``tokens`` tokens, and pages for it in a decode row; writes the order."""
        self.states["prefill"], offered, _ = handover.offer(
            self.states["prefill"], np.int32(source_row), config=self._check_config
        )
        self.states["decode"], order, receipt = handover.receive(
            self.states["decode"], np.int32(row), self._send(offered, "decode")
        )
        return Parcel(rows.start(row, token, sampling), tokens, order, offered, receipt, set(POOLS))

    def deliver(self, parcel: Parcel) -> None:
        """Moves a parcel inside one mesh; what fails on the device leaves the decode row dead."""
        self.states["decode"] = handover.deliver(
            self.states["prefill"],
            self.states["decode"],
            parcel.order,
            parcel.first,
            parcel.offered.intact,
            np.uint32(self.origin["prefill"]),
        )
        self.unpin(parcel)

    def ship(self, parcel: Parcel) -> None:
        """Reads and converts a parcel's source pages, unpins them and launches the copy."""
        sent = handover.ship(
            self.states["prefill"],
            self._send(parcel.order, "prefill"),
            columns=self.columns(parcel.tokens),
            form=self.config.decode,
        )
        parcel.shipment = self._send(sent, "decode")
        self._unpin(parcel, "prefill")

    def land(self, parcel: Parcel) -> None:
        """Stores a shipment that has arrived; what fails on the device leaves the decode row dead."""
        self.states["decode"] = handover.land(
            self.states["decode"],
            parcel.order,
            parcel.shipment,
            parcel.first,
            self._send(parcel.offered.intact, "decode"),
            parcel.receipt.epoch,
            np.uint32(self.origin["prefill"]),
            columns=self.columns(parcel.tokens),
        )
        self.unpin(parcel)

    def unpin(self, parcel: Parcel) -> None:
        """Takes the pins that a parcel still has."""
        for pool in tuple(parcel.pinned):
            self._unpin(parcel, pool)

    def _unpin(self, parcel: Parcel, pool: Pool) -> None:
        parcel.pinned.remove(pool)
        held = parcel.offered if pool == "prefill" else parcel.receipt
        self.states[pool] = handover.unpin(self.states[pool], held.page_M, held.count)

    def widen(self, row: int, first: int, count: int) -> list[tuple[int, int]]:
        """Converts pages of a decode row into prefill pages, held by the spare prefill row.

        Waits for the device: the prefix tree needs the page ids.

        Returns:
          (page, generation) of each; empty if the row failed its check or the pool had no room.
        """
        read = handover.widen_out(
            self.states["decode"],
            np.int32(row),
            np.int32(first),
            columns=self.columns(count * self.config.page_size),
            config=self._check_config,
        )
        self.states["prefill"], held = handover.widen_in(
            self.states["prefill"],
            np.int32(self.config.prefill_rows),
            *self._send(read, "prefill"),
            np.int32(count),
            np.uint32(self.origin["decode"]),
            form=self.config.decode,
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
        if not self.apart:
            self.deliver(self.begin_transfer(0, 0, 1, 0, greedy))
        for columns in page_buckets:
            if self.apart:
                parcel = self.begin_transfer(0, 0, columns * config.page_size, 0, greedy)
                self.ship(parcel)
                self.land(parcel)
            if config.reuse == "widen":
                self.widen(0, 0, columns)
        self.move_in(0, 0, greedy, jax.device_get(self.move_out(0)))
        for pool in POOLS:
            self.release(pool, [0])
            self.counts(pool)
        self.reset()
        jax.block_until_ready(self.states)
