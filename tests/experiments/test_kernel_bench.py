"""The kernel benchmark without a GPU: its contract catches a wrong kernel, and it refuses to time a CPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from configs import kernel_bench as kernel_bench_config
from experiments import bench_contract, bench_mla, kernel_bench
from pallas_kernels import int4_inline, int4_moe, mla_prologue, moe_route, router, skinny_matmul, xla


def _plain(layout, q, pool, layer, table, length, num_new=None, *, damage=lambda out: out, **_):
    scale = bench_mla.FLAT_SCALE if layout == "fp8_flat" else None
    options = {"softmax_scale": bench_mla.SOFTMAX_SCALE, "layout": layout, "scale": scale}
    out, lse = xla.mla_decode(q, pool, layer, table, length, num_new_B=num_new, **options)
    return damage(out), lse


@pytest.fixture(autouse=True)
def _short_rows(monkeypatch):
    monkeypatch.setattr(bench_mla, "CONTRACT_LENGTHS", (0, 1, 65, 130))


def test_contract_right_operation_passes(monkeypatch):
    monkeypatch.setattr(bench_mla, "attend", _plain)
    assert bench_mla.contract("fp8_656", 2, 3) < 1e-4


@pytest.mark.parametrize(
    "damage",
    [
        jnp.zeros_like,
        lambda out: out * 1.01,
        lambda out: jnp.roll(out, 1, axis=-1),
        lambda out: out + jnp.nan,
    ],
    ids=["zeros", "scaled", "shifted", "nan"],
)
def test_contract_wrong_operation_raises(monkeypatch, damage):
    monkeypatch.setattr(bench_mla, "attend", functools.partial(_plain, damage=damage))
    with pytest.raises(RuntimeError, match="contract of mla_decode bf16 t1 h3"):
        bench_mla.contract("bf16", 1, 3)


def test_worst_row_error_nan_is_infinite():
    want = np.ones((2, 3))
    assert bench_mla.worst_row_error(np.array([[1, 1, np.nan], [1, 1, 1]]), want) == np.inf
    assert bench_mla.worst_row_error(want, want) == 0.0


def test_job_variant_has_a_name_of_its_own():
    plain = bench_mla.Job("fp8_flat", 8, 64, 8192)
    variant = bench_mla.Job("fp8_flat", 8, 64, 8192, (("words", 4),))
    assert plain.name == "mla_decode.fp8_flat.h8.b64.l8192"
    assert variant.name == plain.name + ".words4"
    assert (plain.config.words, variant.config.words) == (1, 4)


def test_job_ragged_keeps_the_sum_and_gives_each_row_pages_of_its_own():
    job = bench_mla.Job("bf16", 8, 5, 600, ragged=True)
    assert job.name == "mla_decode.bf16.h8.b5.ragged"
    lengths = job.lengths(seed=2)
    assert lengths.sum() == 3000
    assert sorted(lengths)[0] * 4 < sorted(lengths)[-1]
    _, tables = bench_mla._inputs(job, pages=200, seed=2)
    used = [np.asarray(tables[1])[row, : -(-n // 64)] for row, n in enumerate(lengths)]
    pages = np.concatenate(used)
    assert len(set(pages)) == len(pages)
    assert min(pages) > 0


class _Recorder:
    def __init__(self):
        self.metrics, self.missing = {}, {}

    def metric(self, name, value):
        self.metrics[name] = value

    def absent(self, name, why):
        self.missing[name] = why


def test_contract_run_names_the_operation_that_breaks(monkeypatch):
    def wrong():
        raise RuntimeError("error 3e-1")

    cases = [("a", "x", lambda: 1e-4), ("b", "x", wrong), ("b", "y", lambda: 2e-4), ("c", "x", wrong)]
    monkeypatch.setattr(bench_contract, "cases", lambda: iter(cases))
    recorder = _Recorder()
    assert bench_contract.run(recorder, {"a", "b"}) == {"b"}
    passed = {"contract.a.passed": 1.0, "contract.b.passed": 0.0}
    assert recorder.metrics == passed | {"contract.a.x.err": 1e-4, "contract.b.y.err": 2e-4}
    assert recorder.missing == {"contract.b.x": "RuntimeError: error 3e-1"}


@pytest.mark.parametrize("damage", [1.0, 1.02, -1.0], ids=["right", "scaled", "negated"])
def test_contract_of_the_experts_catches_a_wrong_kernel(monkeypatch, damage):
    kernel = xla.int4_moe
    monkeypatch.setattr(int4_moe, "int4_moe", lambda *a, group: kernel(*a, group=group) * damage)
    if damage == 1.0:
        assert bench_contract.experts(3, "one") < 6e-3
        return
    with pytest.raises(RuntimeError, match="error"):
        bench_contract.experts(3, "one")


@pytest.mark.parametrize("damage", ["none", "weights", "experts", "order"])
def test_contract_of_the_router_catches_a_wrong_kernel(monkeypatch, damage):
    def choose(logit, bias, x, layer, *, choices, factor, tokens):
        expert, weight = xla.choose(logit, bias, choices=choices, factor=factor)
        routing = moe_route.route(expert, layer, num_experts=bias.size, tokens=tokens)
        if damage == "order":
            routing = routing._replace(position=jnp.roll(routing.position, 1, 0))
        weight, expert = weight * (1 + 1e-4 * (damage == "weights")), expert + int(damage == "experts")
        return expert, weight, router.Prepared(routing, int4_inline.permute_k(x))

    monkeypatch.setattr(router, "choose_and_route", choose)
    if damage == "none":
        assert bench_contract.router_of_tokens(21, "ties") < 1e-6
        return
    with pytest.raises(
        RuntimeError, match={"weights": "error", "experts": "chose", "order": "ordered"}[damage]
    ):
        bench_contract.router_of_tokens(21, "ties")


@pytest.mark.parametrize("damage", [None, "stored", "query", "lost"])
def test_contract_of_the_prologue_catches_a_wrong_kernel(monkeypatch, damage):
    def kernel(*arguments, **options):
        query, pool, lost = xla.mla_prologue(*arguments, **options)
        if damage == "stored":
            pool = pool._replace(values=jnp.roll(pool.values, 1, axis=-1))
        return query * (2.0 if damage == "query" else 1.0), pool, lost + int(damage == "lost")

    monkeypatch.setattr(mla_prologue, "mla_prologue", kernel)
    if damage is None:
        assert bench_contract.prologue("bf16", 5) <= bench_contract.MOVED
        return
    match = {"stored": "values differs by", "query": "the query is off by", "lost": "lost values"}[damage]
    with pytest.raises(RuntimeError, match=match):
        bench_contract.prologue("bf16", 5)


@pytest.mark.parametrize("right", [True, False])
def test_contract_of_few_token_products_catches_a_wrong_kernel(monkeypatch, right):
    def kernel(x, w, layer, add, *, epsilon, first, gated):
        assert (epsilon, gated) == (None, False)
        columns = slice(first, first + w.shape[2]) if right else slice(w.shape[2])
        x, w, add = (array.astype(jnp.float32) for array in (x[:, 0, columns], w[layer], add))
        return (x @ w.T + add).astype(jnp.bfloat16)

    monkeypatch.setattr(skinny_matmul, "skinny_matmul", kernel)
    case = (5, 1, 264, 8, 48, 256, None, False)
    if right:
        assert bench_contract.product(*case) < 2.0**-8
        return
    with pytest.raises(RuntimeError, match="error"):
        bench_contract.product(*case)


def test_contract_needed_by_parts_has_cases():
    needed = {operation for part in kernel_bench.PARTS.values() for operation in part.operations + part.also}
    assert needed == {operation for operation, *_ in bench_contract.cases()}


def test_get_config_unknown_part_is_refused():
    with pytest.raises(ValueError, match="argument 'mlp'"):
        kernel_bench_config.get_config("mlp")
    assert set(kernel_bench_config.get_config().parts) == set(kernel_bench.PARTS)
    assert kernel_bench_config.get_config("moe+layer").parts == ("moe", "layer")


def test_body_without_gpu_is_refused():
    with pytest.raises(NotImplementedError, match="backend cpu"):
        kernel_bench.body(kernel_bench_config.get_config("quick"), None)
