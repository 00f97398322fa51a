"""What the GPU benchmarks compute beside the kernels: router, oracle, the cut of a profile into runs."""

import dataclasses
import functools
import types

import jax.numpy as jnp
import pytest

from experiments import bench_layer, bench_moe, bench_timing
from kvmem.models import get_config
from pallas_kernels import ref


def test_oracle_of_random_experts_equals_the_slow_reference():
    model = dataclasses.replace(
        get_config("kimi_tiny_tp8"),
        hidden_size=192,
        expert_ffn_size=64 * 8,
        num_experts=5,
        experts_per_token=2,
    )
    stacks = bench_moe.weights(model, 32, 2, seed=3)
    assert stacks[0].shape == (2, 5, 128, 192)
    inputs = bench_moe.batch(model, 7, seed=4)
    got = bench_moe.oracle(*inputs, *stacks, group=32)
    assert bench_moe.worst_row_error(got, ref.int4_moe(*inputs, *stacks, 0, group=32)) < 1e-5
    assert bench_moe.worst_row_error(got, ref.int4_moe(*inputs, *stacks, 1, group=32)) > 0.1


@pytest.mark.parametrize("extra", [0, 1], ids=["equal counts", "one run has an event more"])
def test_split_cuts_a_profile_into_runs(extra):
    events = [("a", 0.0, 2.0), ("b", 3.0, 5.0), ("a", 90.0, 92.0), ("b", 93.0, 95.0)]
    events += [("c", 96.0, 97.0)] * extra
    runs = bench_timing.split(events, 2)
    assert [event[1] for event in runs[0]] == [0.0, 3.0]
    assert len(runs[1]) == 2 + extra


def test_layer_bytes_of_more_rows_grow_by_cache_and_experts():
    model = get_config("kimi_k2.6")
    few = bench_layer.layer_bytes(model, "fp8_flat", 1, 2048, 8.0)
    more = bench_layer.layer_bytes(model, "fp8_flat", 3, 2048, 24.0)
    expert = 3 * 256 * 7168 * (1 / 2 + 2 / 32)
    assert more - few == pytest.approx(2 * 2048 * 576 + 16 * expert)


def test_distinct_experts_of_tokens_that_agree_are_refused():
    model = dataclasses.replace(get_config("kimi_tiny_tp8"), num_experts=96, experts_per_token=4)
    spread = [jnp.arange(12, dtype=jnp.int32).reshape(3, 4) + 5 * y for y in range(2)]
    assert bench_layer.distinct_experts(spread, model) == 12.0
    with pytest.raises(RuntimeError, match=r"8\.0 distinct experts a layer; uniform routing has 11\.5"):
        bench_layer.distinct_experts([jnp.array([[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]])] * 2, model)


def test_weights_of_the_benchmark_push_tokens_nowhere():
    model = dataclasses.replace(
        get_config("kimi_tiny_tp8"), hidden_size=192, expert_ffn_size=512, num_experts=5
    )
    w_up = bench_moe.weights(model, 32, 2, seed=3)[0].astype(jnp.float32)
    assert abs(float(w_up.mean())) < 4 * 4.3 / w_up.size**0.5  # four standard errors of a mean of zero


def test_run_wrong_cell_is_absent_and_the_others_are_measured(monkeypatch):
    def prepare(model, group, tokens, load, stacks, seed):
        want = jnp.ones((tokens, 6))
        out = want * (1.02 if load == "one" else 1.0)
        expert = jnp.zeros((tokens, model.experts_per_token), jnp.int32)
        return bench_moe.Cell([(want, expert, want)], lambda inputs, stacks: [out], want)

    timing = bench_timing.Timing(us=5.0, spread=0.0, launches=1.0, wall_us=6.0, kernels={})
    monkeypatch.setattr(bench_moe, "prepare", prepare)
    monkeypatch.setattr(bench_moe, "weights", lambda *_: (0,))
    monkeypatch.setattr(bench_timing, "measure", lambda program, repetitions: timing)
    metrics, missing = {}, {}
    recorder = types.SimpleNamespace(metric=metrics.__setitem__, absent=missing.__setitem__)
    run = functools.partial(bench_moe.run, "glm", 32, (8, 9), recorder, loads=((9, "one"), (9, "zipf")))
    with pytest.raises(RuntimeError, match=r"m9\.one: RuntimeError: error 2\.00e-02"):
        run()
    assert list(missing) == ["int4_moe.glm.g32.m9.one.us"]
    assert {key for key in metrics if key.endswith(".us")} == {
        f"int4_moe.glm.g32.{cell}.us" for cell in ("m8", "m9", "m9.zipf")
    }
    assert metrics["int4_moe.glm.g32.m8.marlin_us"] == 86.5
    missing.clear()
    run(deadline=0.0)
    assert len(missing) == 4
