"""The cost of the check without a GPU: what is timed is a clean pool, and a damaged one is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from configs import check_cost as config_file
from experiments import bench_timing, check_cost
from kvmem import record
from kvmem.models import get_config

ROWS = 3


def _config(**changes):
    config = config_file.get_config()
    small = {
        "model": "kimi_tiny_tp8",
        "pages": 29,
        "columns": 9,
        "batches": (ROWS, 2),
        "contexts": (192, 128),
        "layers": 2,
        "implementation": "xla",
        "chain": 2,
        "digest_chain": 2,
        "rounds": 2,
    }
    for name, value in (small | changes).items():
        config[name] = value
    return config


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """A record; programs run once instead of being timed."""

    def once(program, repetitions, runs):
        program()
        return bench_timing.Timing(10.0, 0.0, 3.0, 11.0, {})

    monkeypatch.setattr(bench_timing, "measure", once)
    with record.recording(record.run_directory(tmp_path / "run"), command="test", config={}) as recorder:
        yield recorder


def test_rank_slice_holds_an_eighth_of_what_ranks_split():
    model = check_cost.rank_slice(get_config("kimi_k2.6"), 16)
    assert (model.num_layers, model.num_heads, model.expert_ffn_size) == (16, 8, 256)
    assert (model.kv_lora_rank, model.num_experts) == (512, 384)


def test_check_chain_passes_a_clean_pool_and_stops_a_row_that_any_table_fails():
    states, expectations = check_cost._tables(_config(), ROWS, 2)
    assert not np.array_equal(states[0].table_BM, states[1].table_BM)
    run = {"kv": None, "digests": None, "detector": "tags", "digest_pages": 1}
    every_B = jnp.ones(ROWS, bool)
    assert check_cost.check_chain(states, expectations, every_B, **run).tolist() == [True] * ROWS
    moved_BM = states[0].table_BM.at[1, 2].set(states[0].table_BM[0, 0])
    states[0] = dataclasses.replace(states[0], table_BM=moved_BM)
    assert check_cost.check_chain(states, expectations, every_B, **run).tolist() == [True, False, True]


@pytest.mark.slow
def test_checks_and_steps_record_every_figure_of_rows_that_ran(recorder):
    config = _config()
    check_cost.checks(config, recorder)
    check_cost.steps(config, recorder, float("inf"))
    for rows in config.batches:
        assert recorder.metrics[f"integrity.check.tags.b{rows}.us"] == 10.0
        for context in config.contexts:
            for detector in ("tags", "tags_digest"):
                at = f"{detector}.b{rows}.l{context}"
                assert recorder.metrics[f"integrity.overhead.{at}.percent"] == 0.0
    counts = [
        recorder.metrics[f"integrity.step.{d}.b2.device_operations"] for d in ("off", "tags", "tags_digest")
    ]
    assert counts == sorted(set(counts))


@pytest.mark.slow
def test_steps_of_a_pool_that_fails_its_check_are_refused(recorder, monkeypatch):
    """The mutation: rows are put back with their pages in the wrong order."""
    rewind = check_cost.Run.rewind

    def wrong_order(run, context):
        rewind(run, context)
        table_BM = run.state.pages.table_BM.at[:, :2].set(run.state.pages.table_BM[:, 1::-1])
        run.state = dataclasses.replace(
            run.state, pages=dataclasses.replace(run.state.pages, table_BM=table_BM)
        )

    monkeypatch.setattr(check_cost.Run, "rewind", wrong_order)
    with pytest.raises(RuntimeError, match="tags b3 l192: 0 rows of 3 ran"):
        check_cost.steps(_config(batches=(ROWS,), contexts=(192,)), recorder, float("inf"))


def test_body_without_gpu_or_with_an_unknown_argument_is_refused():
    with pytest.raises(NotImplementedError, match="backend cpu"):
        check_cost.body(_config(), None)
    with pytest.raises(ValueError, match="'fast' is not one of"):
        config_file.get_config("fast")
