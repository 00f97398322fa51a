"""A Hugging Face model directory: config.json and one or several safetensors files under one index."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvmem import record
from kvmem.checkpoint import safetensors_io
from kvmem.checkpoint.safetensors_io import SafetensorsFile, TensorInfo
from kvmem.models.params import CheckpointTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointDirectory:
    """The tensors of a directory by name, whichever file holds them.

    Attributes:
      config: the parsed config.json.
      tensors: what each header says, over all files.
      stray: safetensors files that the index does not name; they are not opened.
    """

    def __init__(self, path: str | pathlib.Path):
        """Opens every file. ValueError if a file is missing, truncated, or disagrees with the index."""
        self.path = pathlib.Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: no such checkpoint directory")
        self.config: dict[str, Any] = _read_json(self.path / "config.json")
        index = self.path / INDEX
        listed: dict[str, str] = _read_json(index).get("weight_map", {}) if index.exists() else {}
        names = sorted(set(listed.values())) or [SINGLE]
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.path}: {len(missing)} of {len(names)} files are missing: {', '.join(missing)}"
            )
        there = {file.name for file in self.path.glob("*.safetensors")} if listed else set()
        self.stray = tuple(sorted(there - set(names)))
        self._files: dict[str, SafetensorsFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name in names:
            file = SafetensorsFile(self.path / name)
            for tensor, info in file.tensors.items():
                if tensor in self._files:
                    raise ValueError(
                        f"{self.path}: {tensor} is in {self._files[tensor].path.name} and in {name}"
                    )
                self._files[tensor], self.tensors[tensor] = file, info
        for tensor, name in listed.items():
            if tensor not in self._files or self._files[tensor].path.name != name:
                raise ValueError(f"{self.path}: {INDEX} lists {tensor} in {name}, which does not hold it")

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the tensor, mapped from its file."""
        return self._files[name].read(name)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error


def plan_shards(tensors: Iterable[CheckpointTensor], max_bytes: int) -> list[list[CheckpointTensor]]:
    """Splits tensors in order into files of at most ``max_bytes`` (one tensor at least)."""
    shards: list[list[CheckpointTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def shard_name(number: int, count: int) -> str:
    """The published spelling, counted from 1: ``model-00003-of-00064.safetensors``."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write(
    path: pathlib.Path,
    config: dict[str, Any],
    shards: list[list[CheckpointTensor]],
    value: Callable[[str], np.ndarray],
    *,
    complete: Callable[[pathlib.Path, list[CheckpointTensor]], bool] = lambda path, shard: False,
    progress: Callable[[Iterable], Iterable] = iter,
) -> None:
    """Writes the files, then the index, then config.json: a directory with a config.json is complete.

    ``complete(file, shard)`` says whether a file of an interrupted run can stay; ``value(name)`` makes each
    tensor.
    """
    path.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(progress(shards), 1):
        name = shard_name(number, len(shards))
        if not complete(path / name, shard):
            safetensors_io.write(path / name, shard, value)
        weight_map |= {tensor.name: name for tensor in shard}
        total += sum(tensor.nbytes for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    record.write_atomic(path / INDEX, record.dumps(index))
    record.write_atomic(path / "config.json", record.dumps(config))
