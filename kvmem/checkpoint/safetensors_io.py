"""The safetensors file format: a u64 header length, a JSON header, then raw little-endian arrays.

The safetensors library reads no FP8 into numpy and writes only whole files held in memory; a converter of a
756 GB checkpoint needs both. A file read here is mapped, not loaded; a file written here is streamed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import struct
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from kvmem.models.params import CheckpointTensor

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
}
CODES: dict[np.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor; ``start`` and ``end`` are byte offsets into the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One file, mapped read-only. Opening it checks the header against the file's size."""

    def __init__(self, path: pathlib.Path):
        """Raises ValueError, naming the file, if it is truncated, too long, or no safetensors file."""
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - 8):
                raise ValueError(f"{path}: {size} bytes are no safetensors file, or its header is truncated")
            try:
                header = json.loads(file.read(length))
                self.metadata: dict[str, str] = header.pop("__metadata__", {})
                self.tensors = {name: _info(name, entry) for name, entry in header.items()}
            except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}: broken safetensors header: {error}") from error
        self._offset = 8 + length
        end = 0
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].start):
            if info.start != end:
                raise ValueError(
                    f"{path}: {name} starts at byte {info.start}, the tensor before ends at {end}"
                )
            end = info.end
        if self._offset + end != size:
            what = "truncated" if size < self._offset + end else "followed by other bytes"
            raise ValueError(
                f"{path}: {what}: the header describes {self._offset + end} bytes, the file has {size}"
            )
        self._map = np.memmap(path, np.uint8, "r") if end else np.zeros(self._offset, np.uint8)

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the tensor; bytes come from the disk when they are touched."""
        info = self.tensors[name]
        if info.dtype not in DTYPES:
            raise ValueError(f"{self.path}: {name} has dtype {info.dtype}, known are {sorted(DTYPES)}")
        raw = self._map[self._offset + info.start : self._offset + info.end]
        return raw.view(DTYPES[info.dtype]).reshape(info.shape)


def _info(name: str, entry: dict) -> TensorInfo:
    start, end = entry["data_offsets"]
    info = TensorInfo(entry["dtype"], tuple(entry["shape"]), start, end)
    if info.dtype in DTYPES and math.prod(info.shape) * DTYPES[info.dtype].itemsize != end - start:
        raise ValueError(
            f"{name}: {info.dtype} {list(info.shape)} does not take the {end - start} bytes it has"
        )
    return info


def write(
    path: pathlib.Path,
    tensors: Sequence[CheckpointTensor],
    value: Callable[[str], np.ndarray],
    metadata: dict[str, str] | None = None,
) -> int:
    """Writes one file, a tensor at a time, and puts it in place only when it is complete.

    ``tensors`` are announced in file order; ``value(name)`` computes each array when its turn comes. Returns
    the data's size in bytes. Raises ValueError if a value is not what was announced.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned, as the library writes it
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors:
                array = np.asarray(value(tensor.name))
                if (CODES.get(array.dtype), array.shape) != (tensor.dtype, tensor.shape):
                    announced = f"announced {tensor.dtype} {tensor.shape}"
                    raise ValueError(f"{tensor.name}: got {array.dtype} {array.shape}, {announced}")
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # nothing half-written stays, whatever happened
    return end
