"""The capacity experiment as a user runs it: exact metric names and published figures in its record."""

import json
import pathlib
import subprocess
import sys

import pytest

from kvmem import record

ROOT = pathlib.Path(record.__file__).parents[1]


def run(argument, workdir, *flags):
    command = [sys.executable, "-m", "experiments.capacity", f"--config=configs/capacity.py{argument}"]
    return subprocess.run(
        [*command, f"--workdir={workdir}", *flags], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    done = run("", tmp_path_factory.mktemp("capacity") / "run")
    assert done.returncode == 0, done.stderr
    closing = json.loads(done.stdout.splitlines()[-1])
    path = pathlib.Path(closing["record"])
    assert (path.parent / "capacity.png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())["metrics"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kimi_k2.6.params", 1_026_879_376_368),
        ("kimi_k2.6.checkpoint_bytes", 595_148_192_736),
        ("glm_5.2.params", 753_329_940_480),
        ("glm_5.2.bf16_bytes", 1_506_659_919_872),
        ("glm_5.2.fp8_bytes", 755_617_140_416),
        ("glm_5.2.int4_g32_bytes", 450_903_738_368),
        ("glm_5.2.int4_g64_bytes", 427_952_506_880),
        ("glm_5.2.int4_g128_bytes", 416_476_891_136),
        ("kimi_k2.6.kv_bytes_per_token.bf16", 70_272),
        ("kimi_k2.6.kv_bytes_per_token.fp8_flat", 35_136),
        ("kimi_k2.6.kv_bytes_per_token.fp8_656", 40_016),
        ("glm_5.2.kv_bytes_per_token.fp8_656", 53_940),
        ("glm_5.2_mtp.kv_bytes_per_token.fp8_656", 54_728),
    ],
)
def test_capacity_metric_is_exact(metrics, name, value):
    assert metrics[name] == value


def test_capacity_record_holds_every_named_family(metrics):
    for name in (
        "kimi_k2.6.nvfp4_bytes",
        "glm_5.2.nvfp4_bytes",
        "kimi_k2.6.int4_g32.bytes_per_rank",
        "glm_5.2.fp8.bytes_per_rank",
        "kimi_k2.6.int4_g32.fp8_flat.tokens_per_gpu",
        "glm_5.2.int4_g32.fp8_656.tokens_per_gpu",
        "glm_5.2.int4_g32.fp8_656.dp_attention.tokens_per_gpu",
        "kimi_k2.6.int4_group.fp8_flat.floor_tok_s.rows64",
    ):
        assert metrics[name] > 0
    assert "kimi_k2.6.bf16.bf16.tokens_per_gpu" not in metrics  # 241 GiB of weights a rank: absent, not 0


def test_capacity_bad_argument_ends_in_one_line(tmp_path):
    done = run(":gpt", tmp_path / "run")
    assert done.returncode != 0
    assert "argument 'gpt'" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_capacity_impossible_fraction_fails_and_records_it(tmp_path):
    done = run(":glm_5.2", tmp_path / "run", "--config.memory_fraction=1.5")
    assert done.returncode == 1
    assert "memory_fraction=1.5 must be in (0, 1]" in done.stderr
    assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] == "failed"
