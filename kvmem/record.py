"""Run records: what ran, from which commit, where, and what came out. Written here and nowhere else.

A record is ``record.json`` in a run directory of its own. It exists from the first moment of the run, with
status ``interrupted``, and is replaced as a whole when the run ends; a process that is killed leaves a
complete file that says so. ``python -m kvmem.record > provenance.json`` writes the facts about git that a
copy of the checkout without ``.git`` needs.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

SCHEMA = "kvmem.record/1"
KEYS = ["schema", "created_utc", "status", "command", "config", "git", "env", "devices", "seeds", "weights"]
KEYS += ["metrics", "claims"]
CLAIM_KEYS = ["id", "published", "ours", "unit", "how", "status", "why", "record"]
Status = Literal["ok", "failed", "interrupted"]
STATUSES = ("ok", "failed", "interrupted")
Number = int | float

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PACKAGES = ("kvmem", "jax", "jaxlib", "numpy", "flax", "ml_dtypes")


def finite(name: str, value: Any) -> Number:
    """Returns a number as plain int or float. A NaN, an infinity or no number at all raises ValueError."""
    if hasattr(value, "item") and getattr(value, "shape", ()) == ():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} = {value!r}: a record holds int or float numbers")
    if not math.isfinite(value):
        raise ValueError(f"{name} = {value}: a record holds no NaN and no infinity")
    return value


def dumps(value: Any) -> str:
    """Returns indented JSON; NaN and infinities raise ValueError, as strict JSON has no such numbers."""
    return json.dumps(value, indent=1, allow_nan=False, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, pathlib.Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"{value!r} of type {type(value).__name__}: a record holds JSON values")


def write_atomic(path: pathlib.Path | str, content: str | bytes) -> pathlib.Path:
    """Writes a file so that readers see the old content or the new one and never a part of it."""
    path = pathlib.Path(path)
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return path


def run_directory(workdir: pathlib.Path | str, resume: bool = False) -> pathlib.Path:
    """Creates the directory of a run.

    A directory that holds anything raises ValueError unless ``resume`` is given, which in turn needs a record
    there to resume from.
    """
    path = pathlib.Path(workdir)
    if path.exists() and not path.is_dir():
        raise ValueError(f"workdir {path}: a run needs a directory, this is a file")
    if resume and not (path / "record.json").is_file():
        raise ValueError(f"workdir {path}: --resume needs a run to resume, there is no record.json")
    if not resume and path.is_dir() and any(path.iterdir()):
        raise ValueError(
            f"workdir {path} exists: a run is never overwritten; name a new one, or pass --resume"
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def git_facts(root: pathlib.Path | str = _ROOT) -> dict[str, Any]:
    """Returns ``{"sha", "dirty"}`` of the checkout at ``root``, from git or from its ``provenance.json``.

    A number that cannot be traced to a commit is worth nothing: neither of the two raises ValueError.
    """
    root = pathlib.Path(root)
    if (root / ".git").exists():
        sha = _git(root, "rev-parse", "HEAD").strip()
        return {"sha": sha, "dirty": bool(_git(root, "status", "--porcelain").strip())}
    file = root / "provenance.json"
    if not file.is_file():
        raise ValueError(
            f"{root} has neither .git nor provenance.json: a record names its commit; before copying a "
            "checkout elsewhere, run `python -m kvmem.record > provenance.json` in it"
        )
    facts = json.loads(file.read_text())
    if not isinstance(facts, dict) or set(facts) != {"sha", "dirty"} or not isinstance(facts["dirty"], bool):
        raise ValueError(f'{file}: provenance is {{"sha": text, "dirty": true or false}}, found {facts!r}')
    return facts


def _git(root: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        raise ValueError(f"{' '.join(command)} failed: {detail}".strip()) from error


def environment() -> dict[str, Any]:
    """Returns versions, platform and the variables that change what JAX does."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    names = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_ENABLE_X64", "CUDA_VISIBLE_DEVICES")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": versions,
        "variables": {name: os.environ[name] for name in names if name in os.environ},
    }


def devices() -> list[dict[str, Any]]:
    """Returns ``{"platform", "kind", "count"}`` of the devices JAX holds; empty if nothing imported JAX."""
    if "jax" not in sys.modules:
        return []
    import jax

    counts: dict[tuple[str, str], int] = {}
    for device in jax.devices():
        key = (device.platform, device.device_kind)
        counts[key] = counts.get(key, 0) + 1
    return [{"platform": p, "kind": k, "count": n} for (p, k), n in counts.items()]


class Recorder:
    """What a launcher's body reports to. Made by ``recording``.

    Attributes:
      directory: the run's directory; everything a run leaves is in it.
      command, git: as the record holds them.
      seeds: name -> seed, filled by whoever draws random numbers.
      weights: ``"synthetic:<seed>"`` or a hash, of one model or by model name.
      notes: further facts, kept under ``env``.
    """

    def __init__(self, directory: pathlib.Path, head: dict[str, Any], resume: bool):
        self.directory = directory
        self.path = directory / "record.json"
        self.command: str = head["command"]
        self.git: dict[str, Any] = head["git"]
        self.seeds: dict[str, int] = dict(head["seeds"])
        self.weights: Any = head["weights"]
        self.notes: dict[str, Any] = {}
        self.metrics: dict[str, Number] = {}
        self.claims: list[dict[str, Any]] = []
        self._head = head
        self._resume = resume

    def metric(self, name: str, value: Any) -> None:
        """Records one number under a name of its own; NaN, infinities and repeated names raise ValueError."""
        if name in self.metrics:
            raise ValueError(f"metric {name} is recorded twice: {self.metrics[name]}, then {value}")
        self.metrics[name] = finite(name, value)

    def absent(self, name: str, why: str) -> None:
        """Records that a metric could not be had, and why; it then stands in no table, and never as 0."""
        self.notes.setdefault("absent", {})[name] = why

    def claim(
        self,
        id: str,
        *,
        published: Any,
        ours: Any,
        unit: str,
        how: str,
        status: str,
        why: str = "",
        record: str | None = None,
    ) -> None:
        """Records one published number beside ours.

        ``published`` and ``ours`` are numbers or None; None for ours needs ``why``. ``record`` names the
        record ours was read from, this one if None.
        """
        if any(claim["id"] == id for claim in self.claims):
            raise ValueError(f"claim {id} is recorded twice")
        if ours is None and not why:
            raise ValueError(f"claim {id}: a number not measured needs a reason")
        numbers = {"published": published, "ours": ours}
        numbers = {k: None if v is None else finite(f"claim {id} {k}", v) for k, v in numbers.items()}
        record = record if record or ours is None else "record.json"
        row = {"id": id, **numbers, "unit": unit, "how": how, "status": status, "why": why, "record": record}
        self.claims.append(row)

    def file(self, name: str, content: str | bytes) -> pathlib.Path:
        """Writes a file beside the record, atomically. A name that leaves the directory raises ValueError."""
        path = self.directory / name
        if not path.resolve().is_relative_to(self.directory.resolve()) or path == self.path:
            raise ValueError(f"file {name}: a run writes into its own directory, beside record.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_atomic(path, content)

    def stage(self, name: str, work: Callable[[], Any]) -> Any:
        """Returns ``work()``, a JSON value, kept in ``stages/``; a resumed run reads it there instead."""
        kept = self.directory / "stages" / f"{name}.json"
        if not (self._resume and kept.is_file()):
            self.file(f"stages/{name}.json", dumps(work()))
        return json.loads(kept.read_text())

    def write(self, status: Status) -> None:
        """Replaces the record by what is known now."""
        found = {"status": status, "seeds": self.seeds, "weights": self.weights, "devices": devices()}
        found |= {"env": self._head["env"] | self.notes, "metrics": self.metrics, "claims": self.claims}
        write_atomic(self.path, dumps({key: (self._head | found)[key] for key in KEYS}))


@contextlib.contextmanager
def recording(
    workdir: pathlib.Path | str,
    *,
    command: str | Sequence[str],
    config: Mapping[str, Any],
    seeds: Mapping[str, int] | None = None,
    weights: Any = "none",
    resume: bool = False,
    root: pathlib.Path | str = _ROOT,
) -> Iterator[Recorder]:
    """Yields a Recorder whose ``record.json`` says ok, failed or interrupted when the block ends.

    An exception is passed on, its traceback kept as ``error.txt``. SIGTERM acts as Ctrl-C does. Resuming
    with another config raises ValueError naming the fields that differ.
    """
    directory = pathlib.Path(workdir)
    config = json.loads(dumps(config))
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "created_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command if isinstance(command, str) else shlex.join(command),
        "config": config,
        "git": git_facts(root),
        "env": environment(),
        "seeds": dict(seeds or {}),
        "weights": weights,
    }
    if resume:
        _same_config(read(directory / "record.json")["config"], config)
    recorder = Recorder(directory, head, resume)
    recorder.write("interrupted")
    status: Status = "failed"
    with _terminate_as_interrupt():
        try:
            yield recorder
            status = "ok"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except BaseException:
            recorder.file("error.txt", traceback.format_exc())
            raise
        finally:
            with _signals((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN):
                recorder.write(status)


def _same_config(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    fields = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
    if fields:
        changes = ", ".join(f"{k}: {before.get(k)!r} then, {now.get(k)!r} now" for k in fields)
        raise ValueError(f"--resume continues a run with its own config; differing: {changes}")


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(signum).name)


def _terminate_as_interrupt() -> contextlib.AbstractContextManager[None]:
    return _signals((signal.SIGTERM,), _interrupt)


@contextlib.contextmanager
def _signals(signals: tuple[signal.Signals, ...], handler: Any) -> Iterator[None]:
    """Sets a handler for some signals inside the block; signals reach the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def read(path: pathlib.Path | str) -> dict[str, Any]:
    """Returns a record; a file that is none raises ValueError naming what is wrong with it."""
    path = pathlib.Path(path)
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: a record is JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{path}: a record has schema {SCHEMA!r}")
    if list(found) != KEYS or found["status"] not in STATUSES:
        raise ValueError(f"{path}: a record has keys {KEYS} and a status of {STATUSES}, found {list(found)}")
    return found


if __name__ == "__main__":
    print(json.dumps(git_facts()))
