"""ParamSpec: a weight is declared once; shape, sharding, init and checkpoint mapping all follow from it."""

from __future__ import annotations

import dataclasses
from typing import Literal

Transform = Literal["none", "kv_b_key", "kv_b_value"]
Storage = Literal["plain", "fp8_block", "int4_group"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a parameter stands in a Hugging Face checkpoint.

    Attributes:
      names: templates of tensor names without the ``.weight`` suffix's storage variants, holding ``{layer}``
        and ``{expert}`` where the parameter is stacked. Several names are concatenated along the output axis
        in the order given (gate, then up).
      layers: the checkpoint's layer index of each entry of the leading stack axis; empty if not stacked.
      transform: ``kv_b_key`` and ``kv_b_value`` take each head's first N or last V rows of ``kv_b_proj``.
      storage: how the checkpoint holds the tensor, which need not be how the device does: ``plain`` (one
        tensor), ``fp8_block`` (``weight`` and ``weight_scale_inv``) or ``int4_group`` (compressed-tensors
        ``weight_packed``, ``weight_scale``, ``weight_shape``).
    """

    names: tuple[str, ...]
    layers: tuple[int, ...] = ()
    transform: Transform = "none"
    storage: Storage = "plain"


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model as the device holds it.

    Attributes:
      shape: the full shape over all ranks, stack axes first. Matrices are ``[out, in]``, as in checkpoints.
      axes: a logical axis name for each dimension (see ``kvmem.sharding.rules``), or None if never split.
      source: where the checkpoint holds it.
      dtype: ``bf16`` or ``f32``: the dtype of a plain parameter, and of the result of dequantising others.
      storage: how the device holds it; anything but ``plain`` becomes a ``QTensor`` of data and scale.
      group: ``(rows, columns)`` that share one scale, as ``(1, 32)`` for int4_group or ``(128, 128)`` for
        fp8_block; None if plain.
      init: ``normal`` (fan-in scaled), ``ones``, ``zeros``, or ``bias`` (small normal), for random weights.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    source: Source
    dtype: Literal["bf16", "f32"] = "bf16"
    storage: Storage = "plain"
    group: tuple[int, int] | None = None
    init: Literal["normal", "ones", "zeros", "bias"] = "normal"
