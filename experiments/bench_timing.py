"""Time on the GPU: what a program took from its first kernel to its last, and how many kernels that were."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import jax

PEAK_GBPS = 4300.0  # best stream seen on an H200; shares of the ceiling are against it


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one repetition.

    Attributes:
        us: median over runs of (end of the last kernel - start of the first) / repetitions, as profiled.
        spread: (largest - smallest) / median of the runs.
        launches: kernels and copies on the GPU a repetition.
        wall_us: median wall-clock time of a run / repetitions, the host's work included.
        kernels: mean microseconds a repetition of each kernel, by name.
    """

    us: float
    spread: float
    launches: float
    wall_us: float
    kernels: dict[str, float]


def measure(program: Callable[[], object], repetitions: int, runs: int = 5) -> Timing:
    """Time ``program``, which does ``repetitions`` repetitions on inputs that do not fit in the L2."""
    for _ in range(2):
        jax.block_until_ready(program())
    walls = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(program())
        walls.append((time.perf_counter() - start) / repetitions * 1e6)
    events = sorted(trace(program, runs), key=lambda event: event[1])
    if not events:
        raise RuntimeError("the profiler saw no kernel: is this a GPU?")
    each = split(events, runs)
    spans = [(max(e[2] for e in one) - one[0][1]) / repetitions / 1e3 for one in each]
    kernels: dict[str, float] = {}
    for name, start, end in events:
        kernels[name] = kernels.get(name, 0.0) + (end - start) / (repetitions * runs) / 1e3
    us = statistics.median(spans)
    launches = len(events) / (repetitions * runs)
    return Timing(us, (max(spans) - min(spans)) / us, launches, statistics.median(walls), kernels)


def split(events: list[tuple[str, float, float]], runs: int) -> list[list[tuple[str, float, float]]]:
    """Events in order of their start, cut into runs: at equal counts, or at the longest pauses."""
    if len(events) % runs == 0:
        size = len(events) // runs
        return [events[i : i + size] for i in range(0, len(events), size)]
    pauses = sorted(range(1, len(events)), key=lambda i: events[i - 1][2] - events[i][1])[: runs - 1]
    edges = [0, *sorted(pauses), len(events)]
    return [events[i:j] for i, j in itertools.pairwise(edges)]


def trace(program: Callable[[], object], runs: int = 1) -> list[tuple[str, float, float]]:
    """(name, start ns, end ns) of every kernel and copy that ``runs`` runs put on the GPUs' streams."""
    return [event for events in traces(program, runs).values() for event in events]


def traces(program: Callable[[], object], runs: int = 1) -> dict[str, list[tuple[str, float, float]]]:
    """``trace`` by GPU."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(runs):
                jax.block_until_ready(program())
        found: dict[str, list[tuple[str, float, float]]] = {}
        for path in pathlib.Path(directory).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                if "GPU" not in plane.name:
                    continue
                for line in plane.lines:
                    if "Stream" in (line.name or ""):
                        events = [(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
                        found.setdefault(plane.name, []).extend(events)
    return found
