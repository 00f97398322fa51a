"""Parameters over a mesh, and the forward pass as one SPMD program under ``jax.shard_map``."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kvmem.formats import qtensor
from kvmem.formats.qtensor import QTensor
from kvmem.models import decoder, layers
from kvmem.models.attention import Form, Implementation
from kvmem.models.config import ModelConfig
from kvmem.models.params import Params, Specs, leaves
from kvmem.sharding import rules
from kvmem.sharding.mesh import AXIS
from kvmem.sharding.specs import ParamSpec


def map_named(function: Callable[[str, ParamSpec], Any], specs: Specs, path: str = "") -> Any:
    """A tree of ``function("attention.q_a", spec)`` for every parameter."""
    return {
        key: function(path + key, value)
        if isinstance(value, ParamSpec)
        else map_named(function, value, f"{path}{key}.")
        for key, value in specs.items()
    }


def partition_specs(specs: Specs, shards: int) -> Any:
    """A tree of PartitionSpec that fits the parameters: a QTensor of two where a parameter is quantised.

    Raises:
      ValueError: naming the parameter, its size, the shards and the group, where they do not divide.
    """

    def one(name: str, spec: ParamSpec) -> Any:
        entry: Any = rules.partition(spec, shards, name)
        return entry if spec.group is None else QTensor(entry, entry, spec.storage, spec.group)

    return map_named(one, specs)


def abstract_params(specs: Specs, mesh: Mesh | AbstractMesh | None = None) -> Any:
    """The parameters as ShapeDtypeStruct, with NamedSharding over ``mesh`` if given: nothing is allocated."""

    def one(name: str, spec: ParamSpec) -> Any:
        entry = rules.partition(spec, mesh.shape[AXIS], name) if mesh is not None else None

        def struct(shape: tuple[int, ...], dtype: Any) -> Any:
            sharding = NamedSharding(mesh, entry) if mesh is not None and entry is not None else None
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        if spec.group is None:
            return struct(spec.shape, jnp.float32 if spec.dtype == "f32" else jnp.bfloat16)
        return QTensor(
            struct(spec.shape, jnp.float8_e4m3fn if spec.storage == "fp8_block" else jnp.int4),
            struct(spec.scale_shape, qtensor.scale_dtype(spec.storage)),
            spec.storage,
            spec.group,
        )

    return map_named(one, specs)


def place_params(params: Params, specs: Specs, mesh: Mesh) -> Params:
    """The parameters laid out over the mesh, through host memory (a loader places them as it reads)."""
    entries = partition_specs(specs, mesh.shape[AXIS])
    shardings = jax.tree.map(
        lambda entry: NamedSharding(mesh, entry), entries, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return jax.device_put(jax.tree.map(np.asarray, params), shardings)


def rank_bytes(specs: Specs, shards: int) -> dict[str, dict[str, int]]:
    """Bytes of one rank: of each parameter split over the ranks, and of each that every rank holds whole.

    Raises:
      ValueError: as ``partition_specs``.
    """
    sizes: dict[str, dict[str, int]] = {"split": {}, "replicated": {}}
    for path, spec in leaves(specs):
        name = ".".join(path)
        entry = rules.partition(spec, shards, name)
        held = math.prod(rules.local_shape(spec.shape, entry, shards))
        if spec.group is None:
            nbytes = held * (4 if spec.dtype == "f32" else 2)
        elif spec.storage == "fp8_block":
            nbytes = held + 4 * math.prod(rules.local_shape(spec.scale_shape, entry, shards))
        else:
            nbytes = held // 2 + 2 * math.prod(rules.local_shape(spec.scale_shape, entry, shards))
        sizes["split" if any(entry) else "replicated"][name] = nbytes
    return sizes


def sharded_forward(
    config: ModelConfig,
    specs: Specs,
    mesh: Mesh,
    *,
    attention: Form = "absorbed",
    implementation: Implementation = "xla",
    reduction: layers.Reduction = "nccl",
    all_logits: bool = False,
) -> Callable[..., Any]:
    """``decoder.forward`` as one jitted SPMD program, ``(params, kv, batch) -> (logits, kv)``; kv is donated.

    Cache, batch and logits are whole on every rank. With the XLA implementation ``shard_map`` proves at trace
    time that no rank's cache can differ from another's.
    """
    body = functools.partial(
        decoder.forward,
        attention=attention,
        implementation=implementation,
        axis=AXIS,
        reduction=reduction,
        all_logits=all_logits,
    )
    whole = PartitionSpec()
    mapped = jax.shard_map(
        lambda params, kv, batch: body(params, config, kv, batch),
        mesh=mesh,
        in_specs=(partition_specs(specs, mesh.shape[AXIS]), whole, whole),
        out_specs=(whole, whole),
        check_vma=implementation == "xla" and reduction == "nccl",
    )
    return jax.jit(mapped, donate_argnums=1)
