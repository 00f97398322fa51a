"""Visits every reachable state of the page machine, and shows what each planted mistake would break.

    python -m experiments.explore_pages --config=configs/explore_pages.py[:quick] --workdir=DIR

The full run (5 pages in each of 2 pools, 3 requests, rows of 3 pages, one transfer, one launched step, one
freed page) takes minutes on one core; ``quick`` takes seconds. Metrics: ``explore.states``, ``.transitions``,
``.refusals``, ``.depth``, ``.broken`` (0, or the run fails) and ``mutation.<name>.steps``, the length of the
shortest sequence that breaks an invariant; the sequences are in ``explore_pages.md``.
"""

import time

from ml_collections import ConfigDict

from experiments import launch
from experiments.explore import Explored, explore
from experiments.page_model import BUGS, REDUNDANT
from kvmem.record import Recorder


def body(config: ConfigDict, recorder: Recorder) -> None:
    size = (config.pages, config.requests, config.pages_per_row)
    start = time.perf_counter()
    found = explore(*size)
    seconds = time.perf_counter() - start
    for name in ("states", "transitions", "refusals", "depth"):
        recorder.metric(f"explore.{name}", getattr(found, name))
    recorder.metric("explore.broken", len(found.broken))
    recorder.metric("explore.seconds", seconds)
    lines = [
        f"{config.pages} pages x {config.requests} requests x 2 pools x 1 transfer, rows of up to "
        f"{config.pages_per_row} pages: {found.states} states, {found.transitions} transitions "
        f"({found.refusals} of them refused), at most {found.depth} steps deep, {seconds:.0f} s, "
        f"{len(found.broken)} broken invariants.",
        "",
        "| planted mistake | shortest sequence that breaks an invariant | what breaks |",
        "|---|---|---|",
    ]
    survived = []
    for name in launch.progress(BUGS, "mutations"):
        mutant = explore(config.mutation_pages, config.requests, config.pages_per_row, name)
        if mutant.broken:
            recorder.metric(f"mutation.{name}.steps", len(mutant.counterexample))
        else:
            recorder.absent(f"mutation.{name}.steps", f"nothing breaks in {mutant.states} states")
        lines.append(_row(name, mutant))
        if bool(mutant.broken) == (name in REDUNDANT):
            survived.append(name)
    text = "\n".join(lines) + "\n"
    recorder.file("explore_pages.md", text)
    print(text)
    if found.broken or survived:
        raise RuntimeError(
            f"broken invariants {found.broken} by {found.counterexample}; "
            f"mutations of unexpected outcome: {survived}"
        )


def _row(name: str, mutant: Explored) -> str:
    if not mutant.broken:
        steps = f"none in {mutant.states} states: another line of defence holds"
        return f"| {name}: {BUGS[name]} | {steps} | nothing |"
    return f"| {name}: {BUGS[name]} | {', '.join(mutant.counterexample)} | {mutant.broken[0]} |"


if __name__ == "__main__":
    launch.run(body)
