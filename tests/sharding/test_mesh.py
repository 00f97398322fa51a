import os
import pathlib
import socket
import subprocess
import sys

import jax
import pytest

from kvmem.sharding import mesh

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("tp", [2, 8])
def test_make_mesh_spans_requested_devices(tp):
    made = mesh.make_mesh(tp)
    assert made.shape == {"tp": tp}
    assert list(made.devices) == jax.devices()[:tp]


def test_make_mesh_default_takes_every_device():
    assert mesh.make_mesh().shape["tp"] == len(jax.devices()) == 8


@pytest.mark.parametrize("tp", [0, 9])
def test_make_mesh_impossible_size_raises(tp):
    with pytest.raises(ValueError, match=rf"tp={tp}: there are 8 devices"):
        mesh.make_mesh(tp)


@pytest.mark.parametrize(
    ("address", "index", "message"),
    [("host:1234", 2, r"index 2 is not in \[0, 2\)"), ("host", 1, "'host' must be host:port")],
    ids=["index", "address"],
)
def test_start_process_bad_argument_raises(address, index, message):
    with pytest.raises(ValueError, match=message):
        mesh.start_process(address, processes=2, index=index)


@pytest.mark.slow
def test_make_mesh_two_processes_run_one_program():
    # Two processes of four fake devices each are one mesh of eight; both print the tokens of one process.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def start(processes, index, devices):
        flags = f"--xla_force_host_platform_device_count={devices}"
        command = [
            sys.executable,
            "-m",
            "tests.sharding.distributed_worker",
            f"127.0.0.1:{port}",
            str(processes),
            str(index),
        ]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(worker):
        out, err = worker.communicate(timeout=500)
        assert worker.returncode == 0, err
        return out.splitlines()[-1]

    alone = finish(start(1, 0, 8))
    together = [finish(worker) for worker in [start(2, 0, 4), start(2, 1, 4)]]
    assert together == [alone.replace("1 process", "2 process")] * 2
