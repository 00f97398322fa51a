"""Hand-overs under way, each under a bounded lease: the host's side of prefill to decode.

On one mesh a hand-over is over once it is launched: the device does things in order. Between meshes, or where
a fault delays it, its bytes travel while decode goes on. ``poll`` lands what has arrived. When the lease ends
first, the pages are unpinned, once, the request fails, and what arrives later is ignored and counted.
The board names request, attempt, length and format; pages and generations are compared on the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kvmem.cache import transfer
from kvmem.cache.transfer import Board, Manifest, Order, Refusal
from kvmem.engine.pools import DevicePools, Fault, Parcel
from kvmem.engine.request import EngineConfig, Real
from kvmem.engine.scheduler import Sequence as Row


@dataclasses.dataclass(frozen=True)
class Late:
    """What a fault returns for an order whose bytes take ``after_s`` seconds more; infinite: lost."""

    order: Order
    after_s: Real = math.inf


@dataclasses.dataclass
class _Travel:
    sequence: Row
    manifest: Manifest
    parcel: Parcel
    due_s: Real


class Transfers:
    """The hand-overs between the two pools of one engine.

    Attributes:
      late: arrivals that were ignored since their lease was over.
    """

    def __init__(self, pools: DevicePools, config: EngineConfig):
        self.late = 0
        self._pools = pools
        self._lease_s = config.lease_s
        weights = pools.fingerprints["prefill"].parameters
        self._made_by = transfer.fingerprint(pools.states["prefill"].kv, weights)
        self._board = Board(self._made_by, lease_s=config.lease_s, most=config.max_rows)
        self._travels: dict[int, _Travel] = {}  # by lease, those included whose lease is over

    def __len__(self) -> int:
        """Leases that are open."""
        return len(self._board)

    def begin(self, sequence: Row, now: Real, faults: Sequence[Fault]) -> bool:
        """Launches a hand-over. True if it is done, False if it is under way.

        Raises:
          TransferFailed: if a fault does; both sides are unpinned.
        """
        request, pools = sequence.request, self._pools
        token = sequence.tokens[sequence.position - 1]
        parcel = pools.begin_transfer(
            sequence.prefill_row, sequence.decode_row, sequence.prompt_length, token, request.sampling
        )
        after_s: Real = 0.0
        try:
            for fault in faults:
                found: Order | Late = fault(parcel.order)
                late = found if isinstance(found, Late) else Late(found, after_s)
                parcel.order, after_s = late.order, late.after_s
        except BaseException:
            pools.unpin(parcel)
            raise
        manifest = Manifest(request.request_id, sequence.attempt, sequence.prompt_length, (), self._made_by)
        lease = self._board.begin(manifest, (), now)
        assert lease is not None  # whoever moves has a decode row, and the board has room for as many
        if pools.apart or after_s:
            pools.ship(parcel)
            self._travels[lease.number] = _Travel(sequence, manifest, parcel, now + after_s)
            return False
        pools.deliver(parcel)
        self._board.end(lease.number)
        return True

    def poll(self, now: Real) -> list[tuple[Row, str]]:
        """Each sequence whose hand-over has ended, with why it failed, or "" if it landed."""
        ended = []
        for lease in self._board.expire(now):
            travel = self._travels[lease.number]
            self._pools.unpin(travel.parcel)
            ended.append((travel.sequence, f"the transfer outlasted its lease of {self._lease_s} s"))
            if math.isinf(travel.due_s):
                del self._travels[lease.number]
        for number, travel in list(self._travels.items()):
            if now < travel.due_s or not travel.parcel.here:
                continue
            del self._travels[number]
            verdict = self._board.arrive(number, travel.manifest, now)
            if verdict is Refusal.LATE:
                self.late += 1
                continue
            if isinstance(verdict, Refusal):
                self._pools.unpin(travel.parcel)
                ended.append((travel.sequence, f"the transfer was refused: {verdict.value}"))
            else:
                self._pools.land(travel.parcel)
                ended.append((travel.sequence, ""))
            self._board.end(number)
        return ended

    def abandon(self, sequence: Row) -> None:
        """Ends the lease of a sequence that ends while it moves; what arrives for it will be late."""
        for number, travel in self._travels.items():
            if travel.sequence is sequence and self._board.end(number) is not None:
                self._pools.unpin(travel.parcel)
