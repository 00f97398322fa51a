"""Loads a published checkpoint into parameters on devices, one layer of one stacked parameter at a time.

The host moves stored bytes (memory-mapped files, one layer's experts stacked); unpacking, dequantising, the
K/V split of ``kv_b_proj`` and quantising run on the devices, under the sharding of the result. Host memory is
bounded by one layer of the largest parameter as stored: gate_up, 6.3 GB of Kimi's INT4, 6.4 GB of GLM's FP8.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from kvmem.checkpoint import matching, stored
from kvmem.checkpoint.directory import CheckpointDirectory
from kvmem.formats import int4, qtensor
from kvmem.formats.qtensor import QTensor
from kvmem.models import hf_config, params
from kvmem.models.config import ModelConfig
from kvmem.models.params import Params, Weights
from kvmem.sharding import rules
from kvmem.sharding.specs import ParamSpec, Source, Storage


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Where every tensor of the directory went.

    Attributes:
      checkpoint: the format that config.json declares.
      used: tensors that became parameters.
      vision: recognised tensors of the vision tower and projector, skipped: only text is served.
      unused: everything else, and files that the index does not name. Nothing of it was needed, but a caller
        should say that it is there.
      cache_scale: a calibrated scale for an FP8 cache, if the checkpoint holds one. A BF16 cache has no scale
        and ignores it.
    """

    checkpoint: str
    used: tuple[str, ...]
    vision: tuple[str, ...]
    unused: tuple[str, ...]
    cache_scale: float | None = None

    def lines(self) -> list[str]:
        """What to tell the user, a line per fact."""
        lines = [f"{len(self.used)} tensors of a {self.checkpoint} checkpoint loaded"]
        if self.vision:
            lines.append(f"{len(self.vision)} vision tensors recognised and skipped: only text is served")
        if self.unused:
            lines.append(f"{len(self.unused)} tensors or files are not used: {matching.few(self.unused)}")
        if self.cache_scale is not None:
            lines.append(f"the checkpoint holds a calibrated FP8 cache scale, {self.cache_scale}")
        return lines


def load(
    directory: str | pathlib.Path,
    weights: Weights,
    *,
    mesh: jax.sharding.Mesh | None = None,
    config: ModelConfig | None = None,
    accept_cache_scale: bool = False,
    progress: Callable[[Iterable], Iterable] = iter,
) -> tuple[ModelConfig, Params, LoadReport]:
    """Reads a Hugging Face directory into the device format ``weights``.

    Args:
      directory: config.json and safetensors; Kimi (packed INT4 or plain), GLM (BF16, FP8 or INT4).
      weights: as ``params.param_specs``; INT4 made from FP8 or BF16 is rounded to nearest, absmax / 7.5.
      mesh: parameters are laid out over its "tp" axis; None puts them on the default device.
      config: settles what config.json cannot say (name, lora_norm_eps, the block or group of a format
        that the checkpoint does not have); any other difference is an error.
      accept_cache_scale: a checkpoint with calibrated cache scales is refused unless the caller says that it
        passes ``report.cache_scale`` to the cache: read as 1, such a model is silently wrong.
      progress: wraps the list of parameters (a progress bar).

    Raises:
      ValueError: naming the tensor and the rule: missing, of another dtype or shape, not finite, two scales
        for one cached row, act-order, or an unreadable file.
      NotImplementedError: the checkpoint's format is known but not read (NVFP4).
    """
    files = CheckpointDirectory(directory)
    checkpoint = hf_config.checkpoint_format(files.config)
    if checkpoint == "nvfp4":
        raise NotImplementedError(f"{files.path}: nvfp4 checkpoints are counted by the planner, not read")
    config = matching.reconcile(hf_config.from_hf(files.config), config, checkpoint)
    specs = params.param_specs(config, weights, checkpoint)
    found, vision, unused = matching.match(files, config, checkpoint)
    cache_scale, calibrated = matching.cache_scale(files, unused)
    unused = (*(name for name in unused if name not in calibrated), *files.stray)
    if cache_scale not in (None, 1.0) and not accept_cache_scale:
        raise ValueError(
            f"{files.path}: calibrated cache scale {cache_scale}: pass accept_cache_scale=True and give "
            "report.cache_scale to the FP8 cache"
        )
    loaded = {
        path: _load(files, found, spec, config, _layout(spec, ".".join(path), mesh))
        for path, spec in progress(list(params.leaves(specs)))
    }
    report = LoadReport(checkpoint, (*found.values(), *calibrated), vision, unused, cache_scale)
    return config, _nest(loaded), report


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How one layer's stored parts become a parameter; static under jit.

    ``split`` is None, or (first, rows of the part, rows a head) of ``kv_b_proj``.
    """

    stored: Storage
    stored_block: tuple[int, int]
    storage: Storage
    group: tuple[int, int]
    dtype: str
    split: tuple[int, int, int] | None
    layout: NamedSharding | None


def _layout(spec: ParamSpec, name: str, mesh: jax.sharding.Mesh | None) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, rules.partition(spec, mesh.size, name))


def _plan(spec: ParamSpec, config: ModelConfig, layout: NamedSharding | None) -> _Plan:
    key, value = config.qk_nope_head_dim, config.v_head_dim
    return _Plan(
        stored=spec.source.storage,
        stored_block=config.fp8_block,
        storage=spec.storage,
        group=spec.group or (1, 1),
        dtype=spec.dtype,
        split={
            "none": None,
            "kv_b_key": (0, key, key + value),
            "kv_b_value": (key, value, key + value),
        }[spec.source.transform],
        layout=layout,
    )


def _convert(parts: Mapping[str, jax.Array], plan: _Plan) -> jax.Array | QTensor:
    """One entry of the parameter. Values stored as the device holds them pass through bit by bit."""
    if plan.stored == plan.storage == "fp8_block" and plan.stored_block == plan.group:
        return QTensor(parts[""], parts["_scale_inv"], plan.storage, plan.group)
    if plan.stored == plan.storage == "int4_group":
        return QTensor(int4.unpack_int32(parts["_packed"]), parts["_scale"], plan.storage, plan.group)
    real = stored.decode(parts, plan.stored, plan.stored_block)
    if plan.split:
        first, rows, head = plan.split
        real = real.reshape(-1, head, real.shape[-1])[:, first : first + rows]
    if plan.storage == "plain":
        return real.astype(jnp.float32 if plan.dtype == "f32" else jnp.bfloat16)
    return qtensor.quantize(real, plan.storage, plan.group)


@functools.partial(jax.jit, static_argnames="plan")
def _whole(parts: Mapping[str, jax.Array], plan: _Plan) -> jax.Array | QTensor:
    return _constrain(_convert(parts, plan), plan.layout)


@functools.partial(jax.jit, static_argnames=("count", "plan"))
def _empty(parts: Mapping[str, jax.Array], count: int, plan: _Plan) -> jax.Array | QTensor:
    entry = jax.eval_shape(functools.partial(_convert, plan=plan), parts)
    return _constrain(jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), entry), plan.layout)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="stack")
def _fill(stack: Any, index: jax.Array, parts: Mapping[str, jax.Array], plan: _Plan) -> jax.Array | QTensor:
    entry = _convert(parts, plan)
    filled = jax.tree.map(lambda s, x: lax.dynamic_update_index_in_dim(s, x, index, 0), stack, entry)
    return _constrain(filled, plan.layout)


def _constrain(value: Any, layout: NamedSharding | None) -> Any:
    """Data and scales of a QTensor are split alike."""
    return value if layout is None else jax.tree.map(lambda x: lax.with_sharding_constraint(x, layout), value)


def _put(part: np.ndarray, layout: NamedSharding | None, stacked: bool) -> np.ndarray | jax.Array:
    """Stored values, split as the result is where the stored shape allows it, else whole on every rank."""
    if layout is None:
        return part
    axes = tuple(layout.spec)[stacked:]
    if len(axes) != part.ndim:  # kv_b_proj, which only its split gives a heads axis
        axes = (None,) * part.ndim
    ranks = layout.mesh.size
    fitting = (axis if axis and size % ranks == 0 else None for axis, size in zip(axes, part.shape))
    return jax.device_put(part, NamedSharding(layout.mesh, PartitionSpec(*fitting)))


def _load(
    files: CheckpointDirectory,
    found: Mapping[str, str],
    spec: ParamSpec,
    config: ModelConfig,
    layout: NamedSharding | None,
) -> jax.Array | QTensor:
    """Reads one parameter, layer by layer into its stack if it has one."""
    source = spec.source
    plan = _plan(spec, config, layout)
    bases = list(params.source_names(spec))
    count = max(1, len(source.layers))
    # What a layer's tensors are stacked over: experts, then gate and up.
    lead: tuple[int, ...] = (spec.shape[1],) if "{expert}" in source.names[0] else ()
    lead += (len(source.names),) if len(source.names) > 1 else ()
    stack: Any = None
    for index, names in enumerate(itertools.batched(bases, len(bases) // count)):
        read = {s: _read(files, found, names, s, source, lead) for s in stored.suffixes(source.storage)}
        read.pop("_shape", None)
        parts = {suffix: _put(part, layout, bool(source.layers)) for suffix, part in read.items()}
        if not source.layers:
            return _whole(parts, plan)
        if stack is None:
            stack = _empty(parts, count, plan)
        stack = _fill(stack, jnp.int32(index), parts, plan)
    return stack


def _read(
    files: CheckpointDirectory,
    found: Mapping[str, str],
    bases: Sequence[str],
    suffix: str,
    source: Source,
    lead: tuple[int, ...],
) -> np.ndarray:
    """One suffix of a layer's tensors, checked and stacked: ``[*lead, *shape as stored]``."""
    arrays = []
    for base in bases:
        name = found[base + suffix]
        arrays.append(files.read(name))
        stored.check(name, suffix, arrays[-1], source)
    if not lead:
        return arrays[0]
    return np.stack(arrays).reshape(*lead, *arrays[0].shape)


def _nest(flat: Mapping[tuple[str, ...], Any]) -> Params:
    tree: Params = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
