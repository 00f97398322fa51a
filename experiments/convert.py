"""Converts a checkpoint to INT4 experts: streaming, resumable, verified. configs/convert.py says how."""

from __future__ import annotations

import functools

from ml_collections import ConfigDict

from experiments import launch
from kvmem import record
from kvmem.checkpoint import convert, hf, store


def body(config: ConfigDict, recorder: record.Recorder) -> None:
    """Writes ``checkpoint`` into the run directory; what it read back goes into the record."""
    if not config.source:
        raise ValueError("source='': name a checkpoint directory with --config.source=DIR")
    target = recorder.path.parent / "checkpoint"
    progress = functools.partial(launch.progress, label="converting")
    if config.target == "orbax":
        model, loaded, report = hf.load(config.source, config.weights, progress=progress)
        store.save(target, model, config.weights, loaded)
        recorder.metric("tensors_used", len(report.used))
        recorder.metric("tensors_unused", len(report.unused))
        for line in report.lines():
            print(line)
        return
    done = convert.convert(
        config.source,
        target,
        group=config.group,
        rule=config.rule,
        max_shard_bytes=config.max_shard_bytes,
        progress=progress,
    )
    recorder.metric("weights", done.weights)
    recorder.metric("weights_int4", done.quantised)
    recorder.metric("bytes", done.nbytes)
    recorder.metric("worst_error_steps", done.worst_steps)
    recorder.metric("relative_error", done.relative_error)
    print(
        f"{done.quantised} of {done.weights} weights are INT4 now, {done.nbytes / 1e9:.3f} GB; read back: "
        f"worst error {done.worst_steps:.3f} steps, relative error {done.relative_error:.4f}"
    )


if __name__ == "__main__":
    launch.run(body)
