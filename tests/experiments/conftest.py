import json
import subprocess
import sys

import pytest

from experiments import aggregate

# One short run of the main job: one model, one load, one repeat. Compiling both models takes two minutes; the
# slow target does it.
SHORT = ["--config.count=4", "--config.repeats=1", "--config.concurrency=(2,)", "--config.rows=4"]
SHORT += ["--config.models=('kimi_tiny_tp8',)"]


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """Runs the main job as a user does; returns the finished process and its record's path.

    Tests that use it carry ``xdist_group("demo")``, so that one worker runs it once.
    """
    workdir = tmp_path_factory.mktemp("demo") / "run"
    command = [sys.executable, "-m", "experiments.reproduce", "--config=configs/reproduce.py:quick"]
    done = subprocess.run(
        [*command, f"--workdir={workdir}", *SHORT], cwd=aggregate.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done, json.loads(done.stdout.splitlines()[-1])["record"]


@pytest.fixture(scope="session")
def demo_record(demo):
    """The path of that run's record."""
    return demo[1]
