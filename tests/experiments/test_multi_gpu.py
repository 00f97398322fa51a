"""The parts on two fake CPU devices, the checks they rest on with mutations, and a part that is killed."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from configs import multi_gpu
from experiments import multi_gpu as launcher
from experiments.multi_gpu_parts import common, handover, midsize, reduce, tiny
from kvmem import record
from kvmem.cache import integrity
from kvmem.sharding.mesh import AXIS, make_mesh

CONFIG = json.loads(json.dumps(multi_gpu.get_config("quick").to_dict()))
RANKS = CONFIG["ranks"]


@pytest.fixture
def out(tmp_path):
    return common.Findings(tmp_path / "part.json")


def wrong_calls(reducing, calls=5):
    base_NTD = jax.random.randint(jax.random.key(3), (RANKS, 3, 7), 0, 17)
    run = common.mapped(
        make_mesh(RANKS),
        lambda base: reduce.count_wrong(reducing, base, calls)[None],
        (common.WHOLE,),
        common.SPLIT,
    )
    return int(run(base_NTD).max())


BROKEN = {
    "one_rank_twice": lambda x: 2 * lax.ppermute(x, AXIS, [(0, 0)]),
    "own_part_only": lambda x: x,
    "zeros": jnp.zeros_like,
    "rows_exchanged": lambda x: lax.psum(x, AXIS)[::-1],
    "one_rank_sees_less": lambda x: lax.psum(x, AXIS) - jnp.where(lax.axis_index(AXIS) == 1, x, 0 * x),
    "nan": lambda x: lax.psum(x, AXIS) * jnp.bfloat16(jnp.nan),
}


def test_count_wrong_of_psum_is_none():
    assert wrong_calls(lambda x: lax.psum(x, AXIS)) == 0


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_count_wrong_of_a_broken_sum_is_every_call(broken):
    assert wrong_calls(broken) == 5


def test_message_of_the_last_call_is_another_message():
    base_TD = jax.random.randint(jax.random.key(5), (3, 7), 0, 17)
    stale, fresh = (reduce.message(base_TD, call) for call in (4, 5))
    assert int(jnp.sum(stale != fresh)) == stale.size


def norm_steps(how="nccl"):
    base_NTD = jax.random.randint(jax.random.key(4), (RANKS, 3, 64), 0, 17)
    weight_D = (1 + 0.1 * jax.random.normal(jax.random.key(6), (64,))).astype(jnp.bfloat16)
    run = common.mapped(
        make_mesh(RANKS),
        lambda base, weight: reduce.norm_error(how, base, weight, 5)[None],
        (common.WHOLE, common.WHOLE),
        common.SPLIT,
    )
    return float(run(base_NTD, weight_D).max())


def test_norm_error_is_a_rounding_and_grows_with_a_wrong_norm(monkeypatch):
    # Two roundings to bf16 (8 bits) of at most half a step each, of the value and of its product.
    assert 0 < norm_steps() < 1.01
    real = reduce.layers.rmsnorm
    monkeypatch.setattr(reduce.layers, "rmsnorm", lambda x, weight, epsilon: real(x, weight, epsilon + 1))
    assert norm_steps() > 2
    monkeypatch.setattr(reduce.layers, "rmsnorm", lambda x, weight, epsilon: real(x + 1, weight, epsilon))
    assert norm_steps() > 100


def test_allreduce_part_checks_on_cpu_and_has_no_timings(out):
    reduce.allreduce(CONFIG, out, ("nccl",))
    assert out.metrics["allreduce.n2.6.nccl.wrong"] == 0
    assert out.metrics["allreduce.n2.6.nccl.calls"] == CONFIG["allreduce"]["check_calls"]
    assert set(out.absent) == {
        f"allreduce.n2.{kib}.nccl.{what}" for kib in CONFIG["allreduce"]["kib"] for what in ("us", "wall_us")
    }
    reduce.allreduce(CONFIG, out, ("mosaic",))
    assert out.absent["allreduce.n2.2.mosaic.us"] == common.ON_CPU


@pytest.mark.parametrize("calls", [1, 77, 450])
def test_chain_makes_the_calls_it_is_charged_for(calls):
    x_TD = jnp.ones((2, 3), jnp.float32)
    plus_TD = jax.jit(lambda x: reduce.chain(lambda y: y + 1, x, 64, calls))(x_TD.astype(jnp.bfloat16) * 0)
    between = reduce.calls_between_starts(64)  # each start sets the value back
    assert plus_TD[0, 0] == between == 16
    assert reduce.chained_calls(64, calls) % between == 0
    assert calls <= reduce.chained_calls(64, calls) < calls + between


def test_tiny_part_gives_equal_tokens_and_ranks_that_agree(out, monkeypatch):
    config = {**CONFIG, "tiny": {**CONFIG["tiny"], "models": ["kimi_tiny_tp8"]}}
    tiny.tiny(config, out)
    assert out.metrics["tp2.kimi_tiny_tp8.tokens_equal"] == 1
    assert out.metrics["tp2.kimi_tiny_tp8.tokens"] == 18
    assert out.metrics["rank_agreement.same_step"] == 1
    assert out.notes["rank_agreement.causes_by_rank"] == [[0, 1, 0]] * 2
    # Without the agreement the ranks part ways, which the part must say.
    monkeypatch.setattr(integrity, "agree", lambda report, axis: report)
    run = tiny.tiny_model("kimi_tiny_tp8", config["tiny"], 12, make_mesh(RANKS))
    same, seen = tiny.agreement(run, tiny.prompts("kimi_tiny_tp8", config["tiny"], 12), 2, row=1, rank=1)
    assert not same
    assert seen == [[0, 0, 0], [0, 1, 0]]


def test_step_part_counts_collectives_and_keeps_rows_alive(out):
    midsize.mid_step(CONFIG, out)
    layers = CONFIG["step"]["layers"]
    label = "step.n2.rows2"
    assert out.metrics[f"{label}.collectives.attention_sum.calls"] == layers
    assert out.metrics[f"{label}.collectives.mlp_sum.calls"] == layers
    assert out.metrics[f"{label}.collectives.mlp_sum.bytes"] == 2 * 64 * 4  # f32 [rows, D]
    assert out.metrics[f"{label}.collectives.integrity.calls"] == 1
    assert out.metrics[f"{label}.xla_nccl.alive"] == 2
    assert out.absent[f"{label}.xla_nccl.us"] == common.ON_CPU


def test_handover_part_moves_the_bytes_and_refuses_late_and_lost(out):
    handover.handover(CONFIG, out)
    for end in ("sender", "receiver"):
        for name in ("status_ok", "equals_one_device", "lost_refused", "late_refused"):
            assert out.metrics[f"handover.{end}.{name}"] == 1, (end, name)
    # FP8 crosses in half the bytes.
    ratio = out.metrics["handover.receiver.bytes_per_token"] / out.metrics["handover.sender.bytes_per_token"]
    assert ratio == 2
    assert "handover.us_per_token" in out.absent


def test_findings_are_on_disk_at_once_and_refuse_nan(out, tmp_path):
    out.metric("a", 3)
    out.missing("b", "why")
    assert json.loads((tmp_path / "part.json").read_text())["metrics"] == {"a": 3}
    with pytest.raises(ValueError, match="no NaN"):
        out.metric("c", float("nan"))


def test_compile_all_keeps_the_error_of_a_job_that_fails():
    good = jax.jit(lambda x: x + 1)
    bad = jax.jit(lambda x: x.reshape(5))
    done = common.compile_all({"good": (good, (jnp.ones(3),)), "bad": (bad, (jnp.ones(3),))})
    assert done["good"](jnp.ones(3)).tolist() == [2, 2, 2]
    assert isinstance(done["bad"], TypeError)


def test_main_part_past_its_limit_is_killed_and_recorded_absent(tmp_path):
    config = multi_gpu.get_config("quick")
    config.update({"parts": ("nccl",), "limit_s": 1})
    recording = functools.partial(record.recording, command="test", config=config.to_dict())
    with pytest.raises(RuntimeError, match="every part failed"), recording(tmp_path) as recorder:
        launcher.main(config, recorder)
    found = record.read(tmp_path / "record.json")
    assert found["status"] == "failed"
    assert found["env"]["absent"]["nccl"] == "killed after 1 s"
    assert found["metrics"] == {}


def test_get_config_unknown_argument_raises():
    with pytest.raises(ValueError, match=r"config argument 'big': one of '', 'eight', 'quick'"):
        multi_gpu.get_config("big")
