"""What every launcher shares: flags, the run directory, the record, and how a run ends.

    python -m experiments.<name> --config=configs/<name>.py[:argument] --workdir=DIR [--resume]

A run that ends well prints, as the last line of standard output, one JSON object whose ``record`` is the path
of its record. Bad input ends with one line on standard error and exit status 1, Ctrl-C with 130; the record,
if the run got as far as having one, says which.
"""

from __future__ import annotations

import json
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from kvmem import record

ROOT = pathlib.Path(__file__).resolve().parents[1]
Body = Callable[[ConfigDict, record.Recorder], None]

# Raised for what a user gave and can change; anything else is a bug and keeps its traceback.
_USER_ERRORS = (ValueError, NotImplementedError, OSError)


def progress(items: Iterable[Any], label: str, total: int | None = None) -> Iterable[Any]:
    """Returns ``items`` behind a progress bar on standard error, or as they are if that is no terminal."""
    if not sys.stderr.isatty():
        return items
    import tqdm

    return tqdm.tqdm(items, desc=label, total=total, leave=False)


def run(body: Body) -> None:
    """Runs a launcher: ``body(config, recorder)`` inside a record. Does not return."""
    config_flag = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:ARGUMENT]")
    workdir = flags.DEFINE_string("workdir", None, "Directory of this run; made by it.")
    resume = flags.DEFINE_bool("resume", False, "Continue the run that workdir holds.")
    flags.mark_flags_as_required(["config", "workdir"])

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            _fail(f"{argv[1:]}: a launcher takes flags only", 2)
        _record(body, config_flag.value, pathlib.Path(str(workdir.value)).absolute(), resume.value)

    app.run(main, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    """Parses flags; a wrong flag, config file, argument or field is reported in one line."""
    try:
        rest = flags.FLAGS(argv)
        flags.FLAGS.config.to_dict()  # a file that could not be loaded raises only now
        return rest
    except (*_USER_ERRORS, flags.Error, AttributeError, KeyError, TypeError) as error:
        _fail(_line(error), 2)


def _record(body: Body, config: ConfigDict, workdir: pathlib.Path, resume: bool) -> None:
    path = None
    code = 0
    try:
        directory = record.run_directory(workdir, resume)
        with record.recording(
            directory, command=_command(), config=config.to_dict(), resume=resume, root=ROOT
        ) as recorder:
            path = recorder.path
            recorder.notes["integrity_coverage"] = (
                "no pool was served"  # a launcher that serves says what was
            )
            body(config, recorder)
    except KeyboardInterrupt as error:
        print(f"interrupted {error}".strip(), file=sys.stderr)
        code = 130
    except _USER_ERRORS as error:
        print(_line(error), file=sys.stderr)
        code = 1
    except BaseException:
        _closing_line(path)
        raise
    _closing_line(path)
    sys.exit(code)


def _closing_line(path: pathlib.Path | None) -> None:
    if path is not None:
        print(json.dumps({"record": str(path), "status": record.read(path)["status"]}), flush=True)


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec else ["python", pathlib.Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])


def _line(error: BaseException) -> str:
    """Returns an error as one line; config_flags puts whole tracebacks into its messages."""
    head, traceback, rest = str(error).partition("Traceback (most recent call last)")
    text = f"{head} {rest.strip().splitlines()[-1]}" if traceback else head
    return f"error: {type(error).__name__}: {' '.join(text.split())}"


def _fail(message: str, code: int) -> NoReturn:
    print(message if message.startswith("error") else f"error: {message}", file=sys.stderr)
    sys.exit(code)
