"""Several GPUs: the same tokens on any number, all-reduces timed, pages handed over, ranks that agree.

Each part runs in a process of its own under a time limit, so that a part that fails or hangs (a collective
whose peer died waits for ever) costs its own numbers only: they are recorded as absent, with the reason.
Parts compile at the same time and take turns on the devices; those in ``config.alone`` run after them, one by
one. They are in ``experiments.multi_gpu_parts``.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from ml_collections import ConfigDict

from experiments import launch
from kvmem import record


def main(config: ConfigDict, recorder: record.Recorder) -> None:
    """Runs the configured parts one after the other and records what each reported."""
    recorder.seeds["multi_gpu"] = config.seed
    recorder.weights = f"synthetic:{config.seed}"
    deadline = time.monotonic() + config.total_s
    together = [part for part in config.parts if part not in config.alone]
    with concurrent.futures.ThreadPoolExecutor(config.at_once) as pool:
        waiting = {
            part: pool.submit(run_part, part, config, recorder.directory, deadline) for part in together
        }
        ended = {part: future.result() for part, future in waiting.items()}
    for part in config.parts:
        if part in config.alone:
            ended[part] = run_part(part, config, recorder.directory, deadline)
    for part, (why, wall_s) in ended.items():
        found = _read(recorder.directory / f"{part}.json")
        for name, value in found["metrics"].items():
            recorder.metric(name, value)
        for name, reason in found["absent"].items():
            recorder.absent(name, reason)
        parts = recorder.notes.setdefault("parts", {})
        parts[part] = {**found["notes"], "ended": why or "ok", "wall_s": round(wall_s, 1)}
        if why:
            recorder.absent(part, why)
        print(f"{part}: {why or 'ok'}, {len(found['metrics'])} metrics, {wall_s:.1f} s", flush=True)
    for part in ("full_kimi", "full_glm"):
        if part not in config.parts:
            recorder.absent(part, "not asked for: 8 GPUs with --config=configs/multi_gpu.py:eight decode it")
    for name, value in recorder.metrics.items():
        print(f"{name} {value:.6g}")
    import jax  # only now: a parent that holds the devices' memory would leave the parts none

    from kvmem.cache import integrity

    recorder.notes["integrity_coverage"] = integrity.coverage("tags")
    print(f"devices: {jax.devices()}")
    if all(why for why, _ in ended.values()):
        raise RuntimeError(f"every part failed: {recorder.notes['parts']}")


def run_part(part: str, config: ConfigDict, directory: pathlib.Path, deadline: float) -> tuple[str, float]:
    """Runs one part in a process; returns why it failed, if it did, and the seconds it took.

    Its output goes to ``<part>.log``.
    """
    started = time.monotonic()
    limit_s = min(config.limit_s, deadline - started)
    if limit_s <= 0:
        return "no time was left for it", 0.0
    environment = dict(os.environ)
    environment.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # parts share the devices' memory
    flags = environment.get("XLA_FLAGS", "")
    if environment.get("JAX_PLATFORMS") == "cpu" and "device_count" not in flags:
        flags += " --xla_force_host_platform_device_count=8"
    if config.at_once > 1 and part not in config.alone:  # autotuning would run in another part's turn
        flags += " --xla_gpu_autotune_level=0"
    environment["XLA_FLAGS"] = flags.strip()
    command = [sys.executable, "-m", "experiments.multi_gpu_parts", part, str(directory / f"{part}.json")]
    with (directory / f"{part}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, json.dumps(config.to_dict())],
            cwd=launch.ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"killed after {limit_s:.0f} s", limit_s
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = (directory / f"{part}.log").read_text().strip().splitlines()
    why = "" if code == 0 else f"exit status {code}: {lines[-1] if lines else 'no output'}"
    return why, time.monotonic() - started


def _read(path: pathlib.Path) -> dict:
    if path.is_file():
        return json.loads(path.read_text())
    return {"metrics": {}, "absent": {}, "notes": {}}


if __name__ == "__main__":
    launch.run(main)
