"""Meshes: one GPU, the eight of a host, eight fake CPU devices, or several hosts.

Every program here is one SPMD program over the mesh axis ``tp``. On one host nothing has to be started. On
several hosts each process calls ``start_process`` before anything else touches JAX, with the same coordinator
address and its own index, and ``make_mesh`` then spans the devices of all of them::

    mesh.start_process("10.0.0.1:1234", processes=2, index=int(os.environ["RANK"]))
    tp = mesh.make_mesh()          # 16 devices with two hosts of eight
"""

from collections.abc import Sequence
from typing import Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXIS: Final = "tp"


def start_process(coordinator: str, *, processes: int, index: int) -> None:
    """Joins this process to ``processes`` others through ``jax.distributed``; blocks until all have come.

    Args:
      coordinator: ``host:port`` of process 0, reachable from all.
      index: this process, 0 to ``processes`` - 1.

    Raises:
      ValueError: an index out of range, or an address without a port.
    """
    if not 0 <= index < processes:
        raise ValueError(f"process index {index} is not in [0, {processes})")
    if ":" not in coordinator:
        raise ValueError(f"coordinator {coordinator!r} must be host:port")
    if jax.config.jax_platforms == "cpu":  # the fake-device case: CPU collectives need a transport
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes=processes, process_id=index)


def make_mesh(tp: int | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of ``tp`` devices, axis "tp": by default all devices of all processes, in order of process.

    Raises:
      ValueError: fewer devices than asked for, or a ``tp`` that leaves out some process's devices.
    """
    chosen = list(devices if devices is not None else jax.devices())
    count = len(chosen) if tp is None else tp
    if not 1 <= count <= len(chosen):
        raise ValueError(f"tp={count}: there are {len(chosen)} devices")
    used = {device.process_index for device in chosen[:count]}
    if devices is None and len(used) < jax.process_count():
        raise ValueError(
            f"tp={count}: processes {sorted(set(range(jax.process_count())) - used)} have no device"
        )
    return Mesh(np.asarray(chosen[:count]), (AXIS,), axis_types=(AxisType.Auto,))
