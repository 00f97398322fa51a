import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import record

SHA = "a" * 40


@pytest.fixture
def checkout(tmp_path):
    """A checkout without .git whose provenance is written down."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "provenance.json").write_text(json.dumps({"sha": SHA, "dirty": False}))
    return root


@pytest.fixture
def recording(tmp_path, checkout):
    def start(config=None, resume=False):
        directory = record.run_directory(tmp_path / "run", resume)
        return record.recording(
            directory, command=["python", "-m", "x", "a b"], config=config or {}, resume=resume, root=checkout
        )

    return start


def test_recording_of_a_run_that_ends_well_has_the_keys_and_the_facts(recording, tmp_path):
    with recording({"sizes": (3, 4)}) as run:
        run.metric("a.us", np.float32(1.5))
        run.metric("b", jnp.int32(7))
        run.seeds["init"] = 11
        run.weights = "synthetic:11"
        run.absent("c", "needs an H200")
        run.claim("x", published=2, ours=2.0, unit="GiB", how="arithmetic", status="matches")
        run.claim("y", published=3, ours=None, unit="GiB", how="not yet", status="open", why="no device")
    found = record.read(tmp_path / "run" / "record.json")
    assert list(found) == record.KEYS
    assert found["status"] == "ok"
    assert found["git"] == {"sha": SHA, "dirty": False}
    assert found["command"] == "python -m x 'a b'"
    assert found["config"] == {"sizes": [3, 4]}
    assert found["metrics"] == {"a.us": 1.5, "b": 7}
    assert found["seeds"] == {"init": 11}
    assert found["devices"] == [{"platform": "cpu", "kind": "cpu", "count": 8}]
    assert found["env"]["absent"] == {"c": "needs an H200"}
    assert [list(claim) for claim in found["claims"]] == [record.CLAIM_KEYS] * 2
    assert [claim["record"] for claim in found["claims"]] == ["record.json", None]


def test_recording_of_a_run_that_has_begun_says_interrupted(recording, tmp_path):
    with recording():
        assert record.read(tmp_path / "run" / "record.json")["status"] == "interrupted"


def test_recording_of_a_run_that_raises_says_failed_and_keeps_the_traceback(recording, tmp_path):
    def fail():
        with recording() as run:
            run.metric("before", 1)
            raise ValueError("pages = -2: must be positive")

    with pytest.raises(ValueError, match="pages = -2"):
        fail()
    found = record.read(tmp_path / "run" / "record.json")
    assert (found["status"], found["metrics"]) == ("failed", {"before": 1})
    assert "pages = -2" in (tmp_path / "run" / "error.txt").read_text()


def test_recording_of_a_run_that_is_stopped_says_interrupted(recording, tmp_path):
    def stop():
        with recording() as run:
            run.metric("before", 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    found = record.read(tmp_path / "run" / "record.json")
    assert (found["status"], found["metrics"]) == ("interrupted", {"before": 1})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_recording_of_a_process_that_is_signalled_leaves_a_whole_record(tmp_path, checkout, number):
    program = f"""
        import time
        from kvmem import record
        with record.recording(record.run_directory({str(tmp_path / "run")!r}), command="x", config={{}},
                              root={str(checkout)!r}) as run:
            print("ready", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert record.read(tmp_path / "run" / "record.json")["status"] == "interrupted"
    assert not [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), np.float32("inf"), "3", None, True], ids=str)
def test_metric_that_is_no_finite_number_is_refused(recording, value):
    with pytest.raises(ValueError, match="x"), recording() as run:
        run.metric("x", value)


def test_metric_and_claim_given_twice_are_refused(recording):
    claim = {"published": 1, "ours": 1, "unit": "", "how": "arithmetic", "status": "matches"}
    with recording() as run:
        run.metric("x", 1)
        run.claim("x", **claim)
        with pytest.raises(ValueError, match="metric x is recorded twice"):
            run.metric("x", 1)
        with pytest.raises(ValueError, match="claim x is recorded twice"):
            run.claim("x", **claim)


def test_claim_without_a_number_or_a_reason_is_refused(recording):
    with recording() as run, pytest.raises(ValueError, match="needs a reason"):
        run.claim("x", published=1, ours=None, unit="", how="not yet", status="open")


def test_config_that_holds_a_nan_is_refused_and_leaves_no_record(recording, tmp_path):
    with pytest.raises(ValueError, match="JSON"), recording({"x": float("nan")}):
        pass
    assert not (tmp_path / "run" / "record.json").exists()


def test_run_directory_that_holds_something_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    record.run_directory(tmp_path / "run")
    (tmp_path / "run" / "record.json").write_text("kept")
    with pytest.raises(ValueError, match="never overwritten"):
        record.run_directory(tmp_path / "run")
    assert record.run_directory(tmp_path / "run", resume=True) == tmp_path / "run"
    assert (tmp_path / "run" / "record.json").read_text() == "kept"


def test_run_directory_to_resume_without_a_record_and_a_file_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"no record\.json"):
        record.run_directory(tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="this is a file"):
        record.run_directory(tmp_path / "file")


def test_stage_is_done_again_unless_the_run_is_resumed(recording):
    calls = []

    def work():
        calls.append(1)
        return {"n": len(calls)}

    with recording({"a": 1}) as run:
        assert run.stage("s", work) == {"n": 1}
        assert run.stage("s", work) == {"n": 2}
    with recording({"a": 1}, resume=True) as run:
        assert run.stage("s", work) == {"n": 2}
        assert run.stage("t", work) == {"n": 3}


def test_resume_with_another_config_is_refused_and_names_the_fields(recording, tmp_path):
    with recording({"a": 1, "b": 2}):
        pass
    with pytest.raises(ValueError, match="b: 2 then, 3 now"), recording({"a": 1, "b": 3}, resume=True):
        pass
    assert record.read(tmp_path / "run" / "record.json")["status"] == "ok"


@pytest.mark.parametrize("name", ["../out", "/out", "record.json"])
def test_file_outside_the_run_or_over_the_record_is_refused(recording, name):
    with recording() as run, pytest.raises(ValueError, match="own directory"):
        run.file(name, "x")


def test_write_atomic_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = record.write_atomic(tmp_path / "f", "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        record.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_git_facts_of_a_checkout_change_with_its_tree(tmp_path):
    def git(*arguments):
        name = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", tmp_path, *name, *arguments], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "x")
    clean = record.git_facts(tmp_path)
    assert len(clean["sha"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "new").write_text("")
    assert record.git_facts(tmp_path) == {"sha": clean["sha"], "dirty": True}


def test_git_facts_without_git_and_provenance_or_with_a_wrong_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="names its commit"):
        record.git_facts(tmp_path)
    (tmp_path / "provenance.json").write_text('{"sha": "x"}')
    with pytest.raises(ValueError, match="provenance is"):
        record.git_facts(tmp_path)


def test_read_of_something_else_is_refused(tmp_path):
    path = pathlib.Path(tmp_path / "r.json")
    for text, rule in [
        ("{", "a record is JSON"),
        ("{}", "has schema"),
        (f'{{"schema": "{record.SCHEMA}"}}', "keys"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=rule):
            record.read(path)
