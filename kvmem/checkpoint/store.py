"""Converted parameters on disk through orbax: no unpacking or rounding at the next start, any mesh."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any, get_args

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from kvmem import record
from kvmem.models import hf_config, params, sharded
from kvmem.models.config import ModelConfig
from kvmem.models.params import Params, Weights

# What config.json cannot say; it is kept beside it.
_EXTRA = ("name", "lora_norm_eps", "fp8_block", "int4_group")


def save(path: str | pathlib.Path, config: ModelConfig, weights: Weights, loaded: Params) -> None:
    """Writes ``loaded``, as ``params.param_specs(config, weights)`` declares it. The path must not exist."""
    path = pathlib.Path(path).absolute()
    if path.exists():
        raise ValueError(f"{path}: exists already")
    partial = path.with_name(path.name + ".partial")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / "params", loaded)
        extra = {name: getattr(config, name) for name in _EXTRA}
        record.write_atomic(partial / "config.json", record.dumps(hf_config.to_hf(config, "bf16")))
        record.write_atomic(partial / "kvmem.json", record.dumps({"weights": weights, **extra}))
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing half-written stays, whatever happened


def restore(
    path: str | pathlib.Path, *, mesh: jax.sharding.Mesh | None = None
) -> tuple[ModelConfig, Weights, Params]:
    """Reads what ``save`` wrote, onto ``mesh`` or the default device.

    Raises ValueError if the directory is incomplete or its arrays are not what its config declares.
    """
    path = pathlib.Path(path).absolute()
    if not (path / "kvmem.json").exists():
        raise ValueError(f"{path}: no saved parameters (kvmem.json is missing)")
    extra: dict[str, Any] = json.loads((path / "kvmem.json").read_text())
    weights = extra.pop("weights")
    if weights not in get_args(Weights) or set(extra) != set(_EXTRA):
        raise ValueError(
            f"{path}: kvmem.json: weights={weights!r}, fields {sorted(extra)} must be {sorted(_EXTRA)}"
        )
    extra["fp8_block"] = tuple(extra["fp8_block"])
    config = dataclasses.replace(hf_config.from_hf(json.loads((path / "config.json").read_text())), **extra)

    declared = sharded.abstract_params(params.param_specs(config, weights), mesh)
    if mesh is None:
        here = SingleDeviceSharding(jax.devices()[0])
        declared = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), declared)
    with ocp.StandardCheckpointer() as checkpointer:
        return config, weights, checkpointer.restore(path / "params", declared)
