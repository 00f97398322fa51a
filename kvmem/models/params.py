"""Every weight of both models, declared once: device shape and sharding, checkpoint names, formats, init."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvmem.formats import qtensor
from kvmem.formats.qtensor import QTensor
from kvmem.models.config import CheckpointFormat, ModelConfig, VisionConfig
from kvmem.sharding.specs import Init, ParamSpec, Source, Storage, Transform

Weights = Literal["f32", "bf16", "fp8_block", "int4_group"]
Specs = dict[str, Any]  # nested: str -> ParamSpec | Specs
Params = dict[str, Any]  # the same tree with jax.Array or QTensor leaves

WEIGHTS: Final[Mapping[str, tuple[Weights, ...]]] = {
    "kimi": ("f32", "bf16", "int4_group"),
    "glm": ("f32", "bf16", "fp8_block", "int4_group"),
}
CHECKPOINTS: Final[Mapping[str, tuple[CheckpointFormat, ...]]] = {
    "kimi": ("f32", "bf16", "kimi_int4", "nvfp4"),
    "glm": ("f32", "bf16", "glm_bf16", "glm_fp8", "glm_int4", "nvfp4"),
}
# The checkpoint that each device format is normally made from: GLM's INT4 comes from its FP8 release.
NATIVE: Final[Mapping[tuple[str, Weights], CheckpointFormat]] = {
    ("kimi", "f32"): "f32",
    ("kimi", "bf16"): "bf16",
    ("kimi", "int4_group"): "kimi_int4",
    ("glm", "f32"): "f32",
    ("glm", "bf16"): "glm_bf16",
    ("glm", "fp8_block"): "glm_fp8",
    ("glm", "int4_group"): "glm_fp8",
}
ITEM_BYTES: Final = {"F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
NVFP4_GROUP: Final = 16

# What a weight is decides which formats apply: FP8 takes linears and experts, INT4 and NVFP4 experts only.
Role = Literal["plain", "linear", "kv_b", "expert"]


class CheckpointTensor(NamedTuple):
    """One tensor of a published checkpoint. ``kind`` is "vision" for what the text model does not use."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["BF16", "F32", "I32", "F8_E4M3", "U8"]
    kind: Literal["text", "mtp", "vision"] = "text"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class _Declare:
    """Declares parameters of one checkpoint layer stack (``layers``; empty for what is not stacked)."""

    config: ModelConfig
    weights: Weights
    checkpoint: CheckpointFormat
    layers: tuple[int, ...] = ()

    def __call__(
        self,
        names: str | tuple[str, ...],
        shape: tuple[int, ...],
        axes: tuple[str | None, ...] | None = None,
        role: Role = "plain",
        *,
        device_shape: tuple[int, ...] | None = None,
        experts: int | None = None,
        transform: Transform = "none",
        init: Init = "normal",
        f32: bool = False,
        alias: tuple[str, str] | None = None,
    ) -> ParamSpec:
        """``shape`` is that of one checkpoint tensor; ``axes`` name the device shape without stack axes."""
        names = (names,) if isinstance(names, str) else names
        prefix = "model.layers.{layer}." if self.layers else ""
        stack = (*([len(self.layers)] if self.layers else []), *([experts] if experts else []))
        own = device_shape or ((len(names), *shape) if len(names) > 1 else shape)
        storage = _device_storage(role, self.weights)
        return ParamSpec(
            shape=(*stack, *own),
            axes=(*(None,) * len(stack), *(axes or (None,) * len(own))),
            source=Source(
                names=tuple(self.config.tensor_prefix + prefix + name for name in names),
                shape=shape,
                layers=self.layers,
                transform=transform,
                storage=_checkpoint_storage(role, self.checkpoint),
                dtype="F32" if f32 or self.checkpoint == "f32" else "BF16",
                alias=alias,
            ),
            dtype="f32" if f32 or self.weights == "f32" else "bf16",
            storage=storage,
            group={"fp8_block": self.config.fp8_block, "int4_group": (1, self.config.int4_group)}.get(
                storage
            ),
            init=init,
        )


def _device_storage(role: Role, weights: Weights) -> Storage:
    if weights == "fp8_block" and role in ("linear", "expert"):
        return "fp8_block"
    return "int4_group" if weights == "int4_group" and role == "expert" else "plain"


def _checkpoint_storage(role: Role, checkpoint: CheckpointFormat) -> Storage:
    if checkpoint == "glm_fp8" and role != "plain":
        return "fp8_block"
    if role == "expert" and checkpoint in ("kimi_int4", "glm_int4"):
        return "int4_group"
    return "nvfp4" if role == "expert" and checkpoint == "nvfp4" else "plain"


def param_specs(config: ModelConfig, weights: Weights, checkpoint: CheckpointFormat | None = None) -> Specs:
    """The declaration of every parameter, as a nested dict of ParamSpec.

    ``weights`` is how the device holds them: "f32" and "bf16" plainly; "fp8_block" with every linear layer
    but the router, the indexer's head weights, embedding and head as e4m3 blocks; "int4_group" with only the
    routed experts quantised. Gate and up of a feed-forward are one array ``[..., 2, F, D]``, gate first, so
    that a split of F over ranks takes both. ``kv_b_proj`` is held as its key and value parts per head, plain.
    ``checkpoint`` is how the file holds them, by default the format ``weights`` is made from (``NATIVE``).

    Raises:
      ValueError: the model has no such device or checkpoint format.
    """
    c = config
    _choose("weights", weights, WEIGHTS, c)
    checkpoint = checkpoint or NATIVE[c.family, weights]
    _choose("checkpoint", checkpoint, CHECKPOINTS, c)
    declare = _Declare(c, weights, checkpoint)
    D = c.hidden_size
    dense, sparse = tuple(range(c.num_dense_layers)), tuple(range(c.num_dense_layers, c.num_layers))
    specs: Specs = {
        "embed": declare("model.embed_tokens.weight", (c.vocab_size, D), ("vocab", None)),
        "final_norm": declare("model.norm.weight", (D,), init="norm"),
        "lm_head": declare("lm_head.weight", (c.vocab_size, D), ("vocab", None)),
        "attention": _attention(dataclasses.replace(declare, layers=dense + sparse)),
        "moe": _moe(dataclasses.replace(declare, layers=sparse)),
    }
    if dense:
        specs["dense"] = _mlp(dataclasses.replace(declare, layers=dense), "mlp.", c.dense_ffn_size)
    if c.indexer:
        specs["indexer"] = _indexer(dataclasses.replace(declare, layers=c.indexer.full_layers))
    if c.mtp_layers:
        layers = tuple(range(c.num_layers, c.num_layers + c.mtp_layers))
        specs["mtp"] = _mtp(dataclasses.replace(declare, layers=layers))
    return specs


def _choose(what: str, value: str, table: Mapping[str, tuple[str, ...]], config: ModelConfig) -> None:
    if value not in table[config.family]:
        raise ValueError(f"{what}={value!r}: {config.name} supports {table[config.family]}")


def _attention(declare: _Declare) -> Specs:
    c = declare.config
    D, Q, L, H = c.hidden_size, c.q_lora_rank, c.kv_lora_rank, c.num_heads
    N, R, V = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    kv_b = functools.partial(
        declare, "self_attn.kv_b_proj.weight", (H * (N + V), L), ("heads", None, None), "kv_b"
    )
    return {
        "input_norm": declare("input_layernorm.weight", (D,), init="norm"),
        "q_a": declare("self_attn.q_a_proj.weight", (Q, D), role="linear"),
        "q_a_norm": declare("self_attn.q_a_layernorm.weight", (Q,), init="norm"),
        "q_b": declare("self_attn.q_b_proj.weight", (H * (N + R), Q), ("heads", None), "linear"),
        "kv_a": declare("self_attn.kv_a_proj_with_mqa.weight", (L + R, D), role="linear"),
        "kv_a_norm": declare("self_attn.kv_a_layernorm.weight", (L,), init="norm"),
        "w_uk": kv_b(device_shape=(H, N, L), transform="kv_b_key"),
        "w_uv": kv_b(device_shape=(H, V, L), transform="kv_b_value"),
        "o": declare("self_attn.o_proj.weight", (D, H * V), (None, "heads"), "linear"),
        "post_norm": declare("post_attention_layernorm.weight", (D,), init="norm"),
    }


def _indexer(declare: _Declare) -> Specs:
    c = declare.config
    assert c.indexer is not None
    J, I = c.indexer.num_heads, c.indexer.head_dim  # noqa: E741
    at = "self_attn.indexer."
    alias = ("indexer.weights_proj", "indexers_proj")
    return {
        "wq_b": declare(at + "wq_b.weight", (J * I, c.q_lora_rank), role="linear"),
        "wk": declare(at + "wk.weight", (I, c.hidden_size), role="linear"),
        "k_norm": declare(at + "k_norm.weight", (I,), init="norm"),
        "k_norm_bias": declare(at + "k_norm.bias", (I,), init="bias"),
        "weights": declare(at + "weights_proj.weight", (J, c.hidden_size), alias=alias),
    }


def _mlp(declare: _Declare, at: str, width: int) -> Specs:
    D = declare.config.hidden_size
    names = (at + "gate_proj.weight", at + "up_proj.weight")
    return {
        "gate_up": declare(names, (width, D), (None, "ffn", None), "linear"),
        "down": declare(at + "down_proj.weight", (D, width), (None, "ffn"), "linear"),
    }


def _moe(declare: _Declare) -> Specs:
    c = declare.config
    D, E, F = c.hidden_size, c.num_experts, c.expert_ffn_size
    at = "mlp.experts.{expert}."
    names = (at + "gate_proj.weight", at + "up_proj.weight")
    return {
        "router": declare("mlp.gate.weight", (E, D)),
        "router_bias": declare("mlp.gate.e_score_correction_bias", (E,), init="bias", f32=True),
        "gate_up": declare(names, (F, D), (None, "ffn", None), "expert", experts=E),
        "down": declare(at + "down_proj.weight", (D, F), (None, "ffn"), "expert", experts=E),
        "shared": _mlp(declare, "mlp.shared_experts.", F * c.num_shared_experts),
    }


def _mtp(declare: _Declare) -> Specs:
    D = declare.config.hidden_size
    specs: Specs = {
        "embed_norm": declare("enorm.weight", (D,), init="norm"),
        "hidden_norm": declare("hnorm.weight", (D,), init="norm"),
        "eh_proj": declare("eh_proj.weight", (D, 2 * D)),
        "head_norm": declare("shared_head.norm.weight", (D,), init="norm"),
        "attention": _attention(declare),
        "moe": _moe(declare),
    }
    if declare.config.indexer:
        specs["indexer"] = _indexer(declare)
    return specs


def leaves(specs: Specs, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ParamSpec]]:
    """(path, spec) of every parameter, in declaration order."""
    for key, value in specs.items():
        if isinstance(value, ParamSpec):
            yield (*path, key), value
        else:
            yield from leaves(value, (*path, key))


def checkpoint_tensors(config: ModelConfig, checkpoint: CheckpointFormat) -> list[CheckpointTensor]:
    """Exactly the tensors of a published checkpoint, vision and MTP too, derived from ``param_specs``."""
    tensors: dict[str, CheckpointTensor] = {}
    for path, spec in leaves(param_specs(config, "bf16", checkpoint)):
        for name in source_names(spec):
            if name not in tensors:  # kv_b_proj is the source of two parameters
                for tensor in _stored(name, spec.source, config, "mtp" if path[0] == "mtp" else "text"):
                    tensors[tensor.name] = tensor
    return [*tensors.values(), *_vision_listing(config, checkpoint)]


class Totals(NamedTuple):
    """Counts over the tensors of a checkpoint."""

    tensors: int
    elements: int
    nbytes: int


def checkpoint_parts(
    config: ModelConfig, checkpoint: CheckpointFormat
) -> Iterator[tuple[str, ParamSpec | None, Totals]]:
    """(name template, parameter, totals over its copies) of a checkpoint, without listing every copy.

    The parameter is None for vision tensors. A tensor that is the source of two parameters comes once.
    """
    seen = set()
    for path, spec in leaves(param_specs(config, "bf16", checkpoint)):
        for name in spec.source.names:
            if (path[0], name) not in seen:
                seen.add((path[0], name))
                yield name, spec, _total(_stored(name, spec.source, config, "text"), spec.copies)
    for tensor in _vision_listing(config, checkpoint):
        yield tensor.name, None, _total([tensor], 1)


def _total(tensors: list[CheckpointTensor], copies: int) -> Totals:
    return Totals(
        copies * len(tensors), copies * sum(t.size for t in tensors), copies * sum(t.nbytes for t in tensors)
    )


def checkpoint_totals(config: ModelConfig, checkpoint: CheckpointFormat) -> Totals:
    """Totals of ``checkpoint_tensors``, without listing them."""
    return Totals(*map(sum, zip(*(totals for _, _, totals in checkpoint_parts(config, checkpoint)))))


def source_names(spec: ParamSpec) -> Iterator[str]:
    """Unquantised names of the checkpoint tensors of a parameter: by layer, then expert, then gate and up."""
    source = spec.source
    experts = range(spec.shape[1]) if spec.stack_dims == 2 else (0,)
    for layer, expert, name in itertools.product(source.layers or (0,), experts, source.names):
        yield name.format(layer=layer, expert=expert)


def _stored(
    name: str, source: Source, config: ModelConfig, kind: Literal["text", "mtp"]
) -> list[CheckpointTensor]:
    if source.storage == "plain":
        return [CheckpointTensor(name, source.shape, source.dtype, kind)]
    rows, columns = source.shape
    if source.storage == "fp8_block":
        r, c = config.fp8_block
        blocks = (-(-rows // r), -(-columns // c))
        return [
            CheckpointTensor(name, source.shape, "F8_E4M3", kind),
            CheckpointTensor(name + "_scale_inv", blocks, "F32", kind),
        ]
    group = config.int4_group if source.storage == "int4_group" else NVFP4_GROUP
    if columns % group or columns % 8:
        raise ValueError(f"{name}: K={columns} must be a multiple of 8 and of the group {group}")
    if source.storage == "int4_group":
        return [
            CheckpointTensor(name + "_packed", (rows, columns // 8), "I32", kind),
            CheckpointTensor(name + "_scale", (rows, columns // group), "BF16", kind),
            CheckpointTensor(name + "_shape", (2,), "I32", kind),
        ]
    return [
        CheckpointTensor(name, (rows, columns // 2), "U8", kind),
        CheckpointTensor(name + "_scale", (rows, columns // group), "F8_E4M3", kind),
        CheckpointTensor(name + "_scale_2", (), "F32", kind),
        CheckpointTensor(name.removesuffix("weight") + "input_scale", (), "F32", kind),
    ]


def _vision_listing(config: ModelConfig, checkpoint: CheckpointFormat) -> list[CheckpointTensor]:
    if config.vision is None:
        return []
    dtype: Literal["F32", "BF16"] = "F32" if checkpoint == "f32" else "BF16"
    shapes = _vision_tensors(config.vision, config.hidden_size)
    return [CheckpointTensor(name, shape, dtype, "vision") for name, shape in shapes]


def _vision_tensors(vision: VisionConfig, text_width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """MoonViT-3D and its projector, as Kimi K2.5's listing names them."""
    D, F, side = vision.hidden_size, vision.ffn_size, vision.patch_size
    merged = D * math.prod(vision.merge)

    def affine(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]

    yield from affine("mm_projector.pre_norm", D)
    yield from affine("mm_projector.proj.0", merged, merged)
    yield from affine("mm_projector.proj.2", text_width, merged)
    yield from affine("vision_tower.patch_embed.proj", D, 3, side, side)
    yield (
        "vision_tower.patch_embed.pos_emb.weight",
        (vision.position_height, vision.position_width, D),
    )
    for block in range(vision.num_layers):
        at = f"vision_tower.encoder.blocks.{block}."
        yield from affine(at + "norm0", D)
        yield from affine(at + "norm1", D)
        yield from affine(at + "wqkv", 3 * D, D)
        yield from affine(at + "wo", D, D)
        yield from affine(at + "mlp.fc0", F, D)
        yield from affine(at + "mlp.fc1", D, F)
    yield from affine("vision_tower.encoder.final_layernorm", D)


def unconverted_modules(config: ModelConfig) -> list[str]:
    """``modules_to_not_convert`` of GLM's FP8 config.json (541 names at full size), in its own spelling."""
    names = []
    for _, spec in leaves(param_specs(config, "bf16", "glm_fp8")):
        if spec.source.storage == "plain":
            old, new = spec.source.alias or ("", "")
            names += [name.replace(old, new).removesuffix(".weight") for name in source_names(spec)]
    return names


def map_specs(function: Any, specs: Specs, *trees: Any) -> Any:
    """A tree of ``function(spec, *leaves of trees)`` for every spec."""
    return jax.tree.map(function, specs, *trees, is_leaf=lambda x: isinstance(x, ParamSpec))


def init_params(config: ModelConfig, weights: Weights, seed: int) -> Params:
    """Random weights in the device format; a seed gives the same values before quantisation in every format.

    Norm weights are about 1 and biases small but not 0, so that each of them matters.
    """

    def build(tree: Specs, path: str) -> Params:
        return {
            name: _init(spec, np.random.default_rng([seed, zlib.crc32(f"{path}/{name}".encode())]))
            if isinstance(spec, ParamSpec)
            else build(spec, f"{path}/{name}")
            for name, spec in tree.items()
        }

    return build(param_specs(config, weights), "")


def _init(spec: ParamSpec, rng: np.random.Generator) -> jax.Array | QTensor:
    value = rng.standard_normal(spec.shape, np.float32)
    if spec.init == "normal":
        value *= np.float32(spec.shape[-1] ** -0.5)
    else:
        value = np.float32(0.1) * value + np.float32(spec.init == "norm")
    return store(jnp.asarray(value), spec)


def store(value: jax.Array, spec: ParamSpec) -> jax.Array | QTensor:
    """Round ``value`` to how ``spec`` says the device holds it."""
    dtype = jnp.float32 if spec.dtype == "f32" else jnp.bfloat16
    if spec.group is None:
        return value.astype(dtype)
    return qtensor.quantize(value, spec.storage, spec.group)
