import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as library

from kvmem.checkpoint import directory, safetensors_io
from kvmem.checkpoint.safetensors_io import SafetensorsFile
from kvmem.models.params import CheckpointTensor

ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16),
    "b": np.arange(5, dtype=np.int32),
    "c.scale": np.array(2.5, np.float32),
    "d": np.linspace(-3, 3, 14, dtype=np.float32).reshape(2, 7).astype(ml_dtypes.float8_e4m3fn),
}
LISTED = [CheckpointTensor(n, a.shape, safetensors_io.CODES[a.dtype]) for n, a in ARRAYS.items()]


def test_write_is_read_by_the_library(tmp_path):
    readable = [t for t in LISTED if t.dtype != "F8_E4M3"]  # the library reads no FP8 into numpy
    size = safetensors_io.write(tmp_path / "x", readable, ARRAYS.__getitem__, {"made": "here"})
    for name, value in library.load_file(tmp_path / "x").items():
        np.testing.assert_array_equal(value, ARRAYS[name])
    assert size == sum(ARRAYS[t.name].nbytes for t in readable)
    assert SafetensorsFile(tmp_path / "x").metadata["made"] == "here"


def test_read_gives_back_what_was_written_bit_by_bit(tmp_path):
    safetensors_io.write(tmp_path / "x", LISTED, ARRAYS.__getitem__)
    file = SafetensorsFile(tmp_path / "x")
    assert list(file.tensors) == list(ARRAYS)
    for name, value in ARRAYS.items():
        got = file.read(name)
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert got.tobytes() == value.tobytes()
        assert not got.flags.writeable


def test_read_what_the_library_wrote(tmp_path):
    library.save_file(ARRAYS, tmp_path / "x")
    file = SafetensorsFile(tmp_path / "x")
    for name, value in ARRAYS.items():
        assert file.read(name).tobytes() == value.tobytes()


def test_write_value_that_was_not_announced_leaves_no_file(tmp_path):
    wrong = ARRAYS | {"b": np.arange(6, dtype=np.int32)}
    with pytest.raises(ValueError, match=r"b: got int32 \(6,\), announced I32 \(5,\)"):
        safetensors_io.write(tmp_path / "x", LISTED, wrong.__getitem__)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["b"].update(data_offsets=[25, 45]), "b starts at byte 25"),
        (lambda h: h["b"].update(shape=[6]), r"b: I32 \[6\] does not take the 20 bytes"),
        (lambda h: h["b"].pop("dtype"), "broken safetensors header"),
        (lambda h: h.update(b=3), "broken safetensors header"),
    ],
    ids=["gap", "shape", "no-dtype", "no-entry"],
)
def test_open_contradicting_header_is_refused(tmp_path, change, message):
    safetensors_io.write(tmp_path / "x", LISTED, ARRAYS.__getitem__)
    raw = (tmp_path / "x").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with pytest.raises(ValueError, match=message):
        SafetensorsFile(tmp_path / "x")


def test_read_unknown_dtype_names_it(tmp_path):
    text = json.dumps({"z": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + b"ab")
    with pytest.raises(ValueError, match="z has dtype F4, known are"):
        SafetensorsFile(tmp_path / "x").read("z")


def test_plan_shards_keeps_order_and_bounds_the_size():
    listed = [CheckpointTensor(str(i), (size,), "U8") for i, size in enumerate((5, 6, 4, 30, 2, 9))]
    shards = directory.plan_shards(listed, 11)
    assert [[t.name for t in shard] for shard in shards] == [["0", "1"], ["2"], ["3"], ["4", "5"]]
