"""The streaming conversion of a checkpoint directory to INT4 routed experts: resumable, and verified."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np

from kvmem.checkpoint import directory, matching, stored
from kvmem.checkpoint.directory import CheckpointDirectory
from kvmem.checkpoint.safetensors_io import SafetensorsFile
from kvmem.models import hf_config, params
from kvmem.models.config import CheckpointFormat, ModelConfig
from kvmem.models.params import CheckpointTensor
from kvmem.sharding.specs import ParamSpec

TARGETS: dict[str, CheckpointFormat] = {"glm": "glm_int4", "kimi": "kimi_int4"}
# Half a step, and a bf16 scale that is off by 2^-9 of itself on up to 8 steps; absmax / 8 clamps at one step.
WORST_STEPS = {"absmax/7.5": 0.5 + 8 * 2**-8, "absmax/7": 0.5 + 8 * 2**-8, "absmax/8": 1.0 + 8 * 2**-8}
TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer_config.json", "generation_config.json")


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was written, as read back and compared with its source.

    Attributes:
      weights: matrices and vectors compared.
      quantised: those of them that became INT4.
      nbytes: size of the data written.
      worst_steps: the largest error of an INT4 weight in scales; rounding to nearest gives 0.5 and a little.
      relative_error: root of the INT4 weights' summed squared error over their summed squares.
    """

    weights: int
    quantised: int
    nbytes: int
    worst_steps: float
    relative_error: float


def convert(
    source: str | pathlib.Path,
    target: str | pathlib.Path,
    *,
    group: int = 32,
    rule: str = "absmax/7.5",
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Conversion:
    """Writes a directory with INT4 routed experts and BF16 for the rest, from an FP8 or BF16 directory.

    Streams: one weight is in memory at a time. Resumes: files that an interrupted run completed are kept, and
    config.json comes last. Verifies: every weight is read back and compared with its source. Tokenizer files
    are copied.

    Raises:
      ValueError: as ``hf.load`` for the source; the target holds files of something else; or a weight read
        back is further from its source than rounding explains.
    """
    reader = _Reader(source, group)
    target = pathlib.Path(target)
    want = TARGETS[reader.config.family]
    after = _weights(reader.config, want)
    recipes = {
        base + s: (base, s) for base, spec in after.items() for s in stored.suffixes(spec.source.storage)
    }
    vision = set(reader.vision)
    tensors = [
        tensor
        for tensor in params.checkpoint_tensors(reader.config, want)
        if tensor.kind != "vision" or tensor.name in vision
    ]

    @functools.lru_cache(maxsize=1)  # the tensors of one weight follow one another
    def encoded(base: str) -> dict[str, np.ndarray]:
        return stored.encode(reader.real(base), after[base].source, reader.config, rule)

    def value(name: str) -> np.ndarray:
        if name in vision:
            return reader.files.read(name)
        base, suffix = recipes[name]
        return encoded(base)[suffix]

    shards = directory.plan_shards(tensors, max_shard_bytes)
    planned = {directory.shard_name(number, len(shards)) for number in range(1, len(shards) + 1)}
    if stray := sorted({path.name for path in target.glob("*.safetensors")} - planned):
        raise ValueError(f"{target}: holds {matching.few(stray)}, which this conversion does not write")
    config = hf_config.to_hf(reader.config, want)
    directory.write(target, config, shards, value, complete=_complete, progress=progress)
    for name in TOKENIZER_FILES:
        if (reader.files.path / name).exists():
            shutil.copy(reader.files.path / name, target / name)
    return _verify(reader, _Reader(target, group, converted=True), after, rule, progress)


class _Reader:
    """A directory's weights in f32, one at a time, checked as they are read."""

    def __init__(self, path: str | pathlib.Path, group: int, *, converted: bool = False):
        self.files = CheckpointDirectory(path)
        checkpoint = hf_config.checkpoint_format(self.files.config)
        if checkpoint == "nvfp4" or (checkpoint.endswith("_int4") and not converted):
            raise ValueError(
                f"{self.files.path}: a {checkpoint} checkpoint is not converted, only BF16 and FP8"
            )
        self.config = dataclasses.replace(hf_config.from_hf(self.files.config), int4_group=group)
        self.found, self.vision, _ = matching.match(self.files, self.config, checkpoint)
        self._specs = _weights(self.config, checkpoint)

    def real(self, base: str) -> np.ndarray:
        source = self._specs[base].source
        parts = {s: self.files.read(self.found[base + s]) for s in stored.suffixes(source.storage)}
        for suffix, part in parts.items():
            stored.check(self.found[base + suffix], suffix, part, source)
        return np.asarray(stored.decode(parts, source.storage, self.config.fp8_block))


def _weights(config: ModelConfig, checkpoint: CheckpointFormat) -> dict[str, ParamSpec]:
    specs = params.leaves(params.param_specs(config, "bf16", checkpoint))
    return {base: spec for _, spec in specs for base in params.source_names(spec)}


def _complete(path: pathlib.Path, shard: list[CheckpointTensor]) -> bool:
    """Whether the file is there already; ValueError if it holds something else."""
    if not path.exists():
        return False
    have = {name: (info.dtype, info.shape) for name, info in SafetensorsFile(path).tensors.items()}
    if have != {tensor.name: (tensor.dtype, tensor.shape) for tensor in shard}:
        raise ValueError(f"{path}: holds other tensors than this conversion writes")
    return True


def _verify(
    before: _Reader,
    after: _Reader,
    specs: dict[str, ParamSpec],
    rule: str,
    progress: Callable[[Iterable], Iterable],
) -> Conversion:
    quantised, worst, error, norm = 0, 0.0, 0.0, 0.0
    for base, spec in progress(list(specs.items())):
        real, got = before.real(base), after.real(base)
        if spec.source.storage == "plain":
            dtype = np.float32 if spec.source.dtype == "F32" else ml_dtypes.bfloat16
            if not np.array_equal(got, real.astype(dtype).astype(np.float32)):
                raise ValueError(
                    f"{after.files.path}: {base} is not its source rounded to {spec.source.dtype}"
                )
            continue
        scale = after.files.read(after.found[base + "_scale"]).astype(np.float32)
        steps = np.abs(got - real) / np.repeat(scale, real.shape[-1] // scale.shape[-1], axis=-1)
        quantised, worst = quantised + 1, max(worst, float(steps.max()))
        if worst > WORST_STEPS[rule]:
            raise ValueError(f"{after.files.path}: {base} is {worst:.3f} steps from its source")
        error += float(np.sum((got - real) ** 2, dtype=np.float64))
        norm += float(np.sum(real**2, dtype=np.float64))
    return Conversion(
        weights=len(specs),
        quantised=quantised,
        nbytes=sum(info.end - info.start for info in after.files.tensors.values()),
        worst_steps=worst,
        relative_error=(error / norm) ** 0.5 if norm else 0.0,
    )
