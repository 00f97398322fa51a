"""A conversion's memory does not grow with the checkpoint: measured in a process of its own."""

import pathlib
import subprocess
import sys

import pytest

PROGRAM = """
import dataclasses, pathlib, resource, sys
from kvmem.checkpoint import convert, fixture
from kvmem.models import get_config

def anonymous():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

root = pathlib.Path(sys.argv[1])
small = dataclasses.replace(get_config("glm_tiny_tp8"), hidden_size=256, expert_ffn_size=512, num_experts=8)
fixture.write(root / "warm", small, 0, "glm_bf16", max_shard_bytes=2**24)
convert.convert(root / "warm", root / "warm_int4", max_shard_bytes=2**24)
before, peak = anonymous(), 0
large = dataclasses.replace(small, num_experts=48)
fixture.write(root / "large", large, 0, "glm_bf16", max_shard_bytes=2**24)

def watch(items):
    global peak
    for item in items:
        yield item
        peak = max(peak, anonymous())

convert.convert(root / "large", root / "large_int4", max_shard_bytes=2**24, progress=watch)
size = sum(file.stat().st_size for file in (root / "large").iterdir())
print(size, peak - before)
"""


@pytest.mark.slow
def test_convert_memory_stays_far_below_the_checkpoint(tmp_path):
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("needs /proc for the anonymous memory of a process")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    size, growth = map(int, done.stdout.split())
    assert size > 200e6
    # One weight in f32 is 0.5 MB; names, plans and the allocator's slack take the rest.
    assert growth < size / 5
