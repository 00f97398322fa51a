"""Tiny models on one and on n ranks: the same tokens, and agreement when one rank's pages are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from experiments.multi_gpu_parts.common import WHOLE, Findings, compile_all
from kvmem.engine import step
from kvmem.engine.step import Cause, PoolState, StepConfig
from kvmem.models import decoder, get_config, sharded
from kvmem.models import params as model_params
from kvmem.sharding.mesh import AXIS, make_mesh

TOKEN, CAUSE = step.Outcome._fields.index("token"), step.Outcome._fields.index("cause")


@dataclasses.dataclass
class Tiny:
    """A tiny model ready to run: its parameters, its step and an empty pool, on one device or a mesh.

    One compiled shape serves prefill and decode: the step of a prompt's width, with one real token in decode.
    """

    mesh: Mesh | None
    params: Any
    state: PoolState
    step: Any
    width: int

    def put(self, x: Any) -> Any:
        """``x`` on the device, or whole on every rank."""
        x = jax.tree.map(jnp.asarray, x)
        return x if self.mesh is None else jax.device_put(x, NamedSharding(self.mesh, WHOLE))


def tiny_model(name: str, c: Mapping[str, Any], seed: int, mesh: Mesh | None) -> Tiny:
    """Builds it; activations and plain weights are f32, so that only the order of sums differs by rank."""
    config = get_config(name)
    weights = "int4_group" if config.family == "kimi" else "fp8_block"
    specs = model_params.param_specs(config, weights)  # type: ignore[arg-type]
    tree = model_params.map_specs(
        lambda spec, leaf: leaf if spec.group else leaf.astype(jnp.float32),
        specs,
        model_params.init_params(config, weights, seed),  # type: ignore[arg-type]
    )
    columns, page_size = 7, 4
    rows = c["rows"]
    state = step.init(
        decoder.cache_shape(config),
        cache="f32_576",
        index=None,
        scale=1.0,
        num_pages=rows * columns + 1,
        num_rows=rows,
        max_pages=columns,
        page_size=page_size,
        detector="tags",
    )
    state = dataclasses.replace(state, cause_B=jnp.zeros(rows, jnp.int32))
    plan = StepConfig(model=config, rows=rows, columns=columns, axis=None if mesh is None else AXIS)
    entries = None
    if mesh is not None:
        entries = sharded.partition_specs(specs, mesh.shape[AXIS])
        tree = sharded.place_params(tree, specs, mesh)
        state = jax.device_put(state, NamedSharding(mesh, WHOLE))
    return Tiny(mesh, tree, state, step.compile_step("prefill", plan, mesh, entries), c["prompt"])


def prompts(name: str, c: Mapping[str, Any], seed: int) -> np.ndarray:
    """Random prompts, [rows, prompt]."""
    vocabulary = get_config(name).vocab_size
    return np.random.default_rng(seed).integers(0, vocabulary, (c["rows"], c["prompt"])).astype(np.int32)


def advance(run: Tiny, state: PoolState, tokens_BT: np.ndarray) -> tuple[PoolState, Any]:
    """One step of every row with its first ``tokens_BT.shape[1]`` columns real."""
    wide_BT = np.zeros((tokens_BT.shape[0], run.width), np.int32)
    wide_BT[:, : tokens_BT.shape[1]] = tokens_BT
    return run.step(
        run.params, state, *run.put((wide_BT, np.full(len(wide_BT), tokens_BT.shape[1], np.int32)))
    )


def generate(run: Tiny, prompt_BT: np.ndarray, steps: int) -> tuple[np.ndarray, PoolState, list[Any]]:
    """Greedy tokens [steps, rows], the state after them, and the report of each step."""
    state, tokens_BT = jax.tree.map(jnp.copy, run.state), prompt_BT  # a step takes its state by donation
    tokens, reports = [], []
    for _ in range(steps):
        state, report = advance(run, state, tokens_BT)
        tokens.append(np.asarray(report.outcome)[TOKEN])
        tokens_BT = tokens[-1][:, None]
        reports.append(report)
    return np.stack(tokens), state, reports


def on_one_rank(mesh: Mesh, whole: jax.Array, changed: np.ndarray, rank: int) -> jax.Array:
    """An array that claims to be the same on every rank, and is not on one."""
    parts = [
        jax.device_put(changed if at == rank else np.asarray(whole), device)
        for at, device in enumerate(mesh.devices.flat)
    ]
    return jax.make_array_from_single_device_arrays(whole.shape, NamedSharding(mesh, WHOLE), parts)


def agreement(run: Tiny, prompt_BT: np.ndarray, steps: int, row: int, rank: int) -> tuple[bool, list]:
    """Corrupts a page tag of ``row`` on one rank only; whether all ranks drop that row alone, at once.

    Returns also what each rank saw: its causes after the step.
    """
    assert run.mesh is not None
    clean, _, _ = generate(run, prompt_BT, steps + 1)
    tokens, state, reports = generate(run, prompt_BT, steps)
    before = [np.asarray(report.outcome)[CAUSE] for report in reports]
    generation_P = np.array(state.pages.generation_P)
    generation_P[int(np.asarray(state.pages.table_BM)[row, 1])] += 1
    hurt = on_one_rank(run.mesh, state.pages.generation_P, generation_P, rank)
    state = dataclasses.replace(state, pages=dataclasses.replace(state.pages, generation_P=hurt))
    state, report = advance(run, state, tokens[-1][:, None])
    by_rank = [np.asarray(part.data) for part in report.outcome.addressable_shards]
    seen = [outcome[CAUSE].tolist() for outcome in by_rank]
    expected = [int(Cause.INTEGRITY if at == row else Cause.OK) for at in range(prompt_BT.shape[0])]
    others = [at for at in range(prompt_BT.shape[0]) if at != row]
    published = all(np.array_equal(outcome[TOKEN][others], clean[-1][others]) for outcome in by_rank)
    same = all(causes == expected for causes in seen) and published
    return same and not np.any(before) and np.array_equal(tokens, clean[:-1]), seen


def tiny(config: Mapping[str, Any], out: Findings) -> None:
    """Both tiny models on 1 and n ranks; then a page that is wrong on one rank only."""
    c, ranks, seed = config["tiny"], config["ranks"], config["seed"]
    mesh = make_mesh(ranks)
    runs = {
        (name, n): tiny_model(name, c, seed, mesh if n > 1 else None)
        for name in c["models"]
        for n in (1, ranks)
    }
    blank = (np.zeros((c["rows"], c["prompt"]), np.int32), np.zeros(c["rows"], np.int32))
    jobs = {key: (run.step, (run.params, run.state, *run.put(blank))) for key, run in runs.items()}
    for key, program in compile_all(jobs).items():
        runs[key].step = program
    with out.turn():
        for name in c["models"]:
            try:
                prompt_BT = prompts(name, c, seed)
                one, many = (generate(runs[name, n], prompt_BT, c["steps"])[0] for n in (1, ranks))
                out.metric(f"tp{ranks}.{name}.tokens_equal", int(np.array_equal(one, many)))
                out.metric(f"tp{ranks}.{name}.tokens", one.size)
            except Exception as error:
                out.missing(f"tp{ranks}.{name}.tokens_equal", f"{type(error).__name__}: {error}"[:300])
        name = c["models"][0]
        same, seen = agreement(
            runs[name, ranks], prompts(name, c, seed), c["steps"] - 2, row=1, rank=ranks - 1
        )
        out.metric("rank_agreement.same_step", int(same))
        out.note("rank_agreement.causes_by_rank", seen)
