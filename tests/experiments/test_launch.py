"""The launcher as a user meets it: a process with flags, exit status, standard output and error."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from kvmem import record

ROOT = pathlib.Path(record.__file__).parents[1]
PROGRAM = """
import sys, time
from experiments import launch

def body(config, run):
    print("working", flush=True)
    if config.fail == "user":
        raise ValueError(f"pages = {config.pages}: must be\\npositive")
    if config.fail == "bug":
        raise RuntimeError("impossible")
    while config.fail == "hang":
        time.sleep(0.05)
    run.metric("pages", config.pages)

launch.run(body)
"""
CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=""):
    if arg not in ("", "quick"):
        raise ValueError(f"config argument {arg!r}: one of '', 'quick'")
    return ConfigDict({"pages": 3, "fail": ""})
"""


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)

    def start(*flags, config="", **keywords):
        command = [sys.executable, "-c", PROGRAM, f"--config={tmp_path}/config.py{config}", *flags]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, **keywords)

    return start


def test_run_that_ends_well_prints_its_record_last(launch, tmp_path):
    out, err = (
        process := launch(f"--workdir={tmp_path}/run", "--config.pages=5", config=":quick")
    ).communicate()
    assert process.returncode == 0, err
    last = json.loads(out.splitlines()[-1])
    assert last == {"record": str(tmp_path / "run" / "record.json"), "status": "ok"}
    found = record.read(last["record"])
    assert found["metrics"] == {"pages": 5}
    assert found["env"]["integrity_coverage"] == "no pool was served"
    assert found["config"] == {"pages": 5, "fail": ""}


@pytest.mark.parametrize(
    ("flags", "config", "code", "message"),
    [
        (["--config.fail=user"], "", 1, "error: ValueError: pages = 3: must be positive"),
        (["--config.page=5"], "", 2, "page"),
        (["--config.pages=many"], "", 2, "many"),
        ([], ":slow", 2, "config argument 'slow'"),
        ([], "x", 2, "config.pyx"),
        (["extra"], "", 2, "takes flags only"),
    ],
    ids=["body", "unknown_field", "field_type", "config_argument", "config_file", "argument"],
)
def test_run_with_bad_input_says_so_in_one_line_and_fails(launch, tmp_path, flags, config, code, message):
    out, err = (process := launch(f"--workdir={tmp_path}/run", *flags, config=config)).communicate()
    assert process.returncode == code, err
    assert message in err
    assert "Traceback" not in err
    if code == 1:
        assert json.loads(out.splitlines()[-1])["status"] == "failed"
    else:
        assert not (tmp_path / "run").exists()


def test_run_with_a_bug_keeps_its_traceback(launch, tmp_path):
    out, err = (process := launch(f"--workdir={tmp_path}/run", "--config.fail=bug")).communicate()
    assert process.returncode not in (0, None)
    assert "Traceback" in err
    assert json.loads(out.splitlines()[-1])["status"] == "failed"


def test_run_into_a_directory_that_holds_a_run_fails_and_changes_nothing(launch, tmp_path):
    launch(f"--workdir={tmp_path}/run").communicate()
    before = (tmp_path / "run" / "record.json").read_bytes()
    out, err = (process := launch(f"--workdir={tmp_path}/run")).communicate()
    assert process.returncode == 1
    assert "never overwritten" in err
    assert out == ""
    assert (tmp_path / "run" / "record.json").read_bytes() == before
    _, err = (process := launch(f"--workdir={tmp_path}/run", "--resume")).communicate()
    assert process.returncode == 0, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_run_that_is_signalled_leaves_an_interrupted_record(launch, tmp_path, number):
    process = launch(f"--workdir={tmp_path}/run", "--config.fail=hang")
    assert process.stdout.readline() == "working\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out.splitlines()[-1])["status"] == "interrupted"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["record.json"]
