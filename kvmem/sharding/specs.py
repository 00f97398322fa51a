"""ParamSpec: a weight is declared once; shape, sharding, init and checkpoint mapping all follow from it."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Transform = Literal["none", "kv_b_key", "kv_b_value"]
Storage = Literal["plain", "fp8_block", "int4_group", "nvfp4"]
Init = Literal["normal", "norm", "bias"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a parameter stands in a Hugging Face checkpoint.

    Attributes:
      names: templates of full tensor names (``...q_a_proj.weight``) as an unquantised checkpoint spells
        them, holding ``{layer}`` and ``{expert}`` where the parameter is stacked over them. Several names
        (gate, up) are stacked in the order given along the axis that follows the layer and expert axes.
      shape: the shape of each named tensor, ``[out, in]`` for matrices.
      layers: the checkpoint's layer index of each entry of the leading stack axis; empty if not stacked.
      transform: ``kv_b_key`` and ``kv_b_value`` take each head's first N or last V rows of ``kv_b_proj``.
      storage: how the checkpoint holds the tensor, which need not be how the device does: ``plain`` (``name``
        alone), ``fp8_block`` (``name`` and ``name + "_scale_inv"``), ``int4_group`` (compressed-tensors:
        ``name + "_packed"``, ``"_scale"``, ``"_shape"``) or ``nvfp4`` (``"_scale"``, ``"_scale_2"``).
      dtype: of the plain tensor in the checkpoint.
      alias: another spelling of a name, as ``(old, new)`` substrings, or None: GLM's FP8 files list the
        indexer's ``indexer.weights_proj`` as ``indexers_proj``.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    layers: tuple[int, ...] = ()
    transform: Transform = "none"
    storage: Storage = "plain"
    dtype: Literal["BF16", "F32"] = "BF16"
    alias: tuple[str, str] | None = None


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
      init: for random weights: ``normal`` (scaled by fan-in), ``norm`` (about 1), ``bias`` (small normal).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    source: Source
    dtype: Literal["bf16", "f32"] = "bf16"
    storage: Storage = "plain"
    group: tuple[int, int] | None = None
    init: Init = "normal"

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def stack_dims(self) -> int:
        """How many leading dimensions stack whole checkpoint tensors: layers, then experts."""
        return ("{layer}" in self.source.names[0]) + ("{expert}" in self.source.names[0])

    @property
    def copies(self) -> int:
        """How many checkpoint tensors each source name stands for."""
        return math.prod(self.shape[: self.stack_dims])

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales: the last two dimensions divided by the group, rounded up."""
        if self.group is None:
            raise ValueError(f"storage={self.storage!r}: a plain parameter has no scales")
        rows, columns = self.group
        return (*self.shape[:-2], -(-self.shape[-2] // rows), -(-self.shape[-1] // columns))
