import itertools
import re
import subprocess
import sys

import pytest

from configs import kernel_bench
from experiments import aggregate, claims, result_tables, tables
from kvmem import record

GPU = [{"platform": "gpu", "kind": "NVIDIA H200", "count": 1}]
CPU = [{"platform": "cpu", "kind": "cpu", "count": 1}]


@pytest.fixture
def results(tmp_path):
    """Writes records where committed ones would stand."""
    root = tmp_path / "results"

    def commit(kind, metrics, name="a", **changes):
        content = dict.fromkeys(record.KEYS, "") | {
            "schema": record.SCHEMA,
            "created_utc": "2026-11-01T10:00:00+00:00",
            "status": "ok",
            "command": f"python -m experiments.{kind} --config=x",
            "git": {"sha": "b" * 40, "dirty": False},
            "devices": CPU,
            "metrics": metrics,
            "claims": [],
            **changes,
        }
        (root / kind).mkdir(parents=True, exist_ok=True)
        path = root / kind / f"{name}.json"
        path.write_text(record.dumps(content))
        return path

    commit.root = root
    return commit


def test_measured_takes_the_newest_run_that_was_not_stopped(results):
    results("kernel_bench", {"copy.gbps": 4100.0, "only_old": 1.0}, "z", devices=GPU)
    results("kernel_bench", {"copy.gbps": 4200.0}, "b", devices=GPU, created_utc="2026-11-02T10:00:00+00:00")
    late = "2026-11-03T10:00:00+00:00"
    results("kernel_bench", {"copy.gbps": 1.0}, "c", status="interrupted", created_utc=late)
    results("kernel_bench", {"mla": 2.0}, "d", status="failed", created_utc=late, devices=GPU)
    found = aggregate.measured(results.root)
    assert found["copy.gbps"][:2] == (4200.0, "rank slice on one H200")
    assert found["copy.gbps"].record.endswith("kernel_bench/b.json")
    assert found["mla"].note == "the run failed in another part"
    assert found["only_old"].record.endswith("kernel_bench/z.json")


def test_measured_of_the_layer_benchmark_gives_rates_and_format_ratios(results):
    metrics = {"layer.kimi.bf16.b8.us": 120.0, "layer.kimi.fp8.b8.us": 100.0, "layer.glm.fp8.b16.us": 150.0}
    results("kernel_bench", metrics, devices=GPU)
    found = aggregate.measured(results.root)
    assert found["layer.kimi_k2.6.fp8_over_bf16.c8"].value == pytest.approx(1.2)
    # 61 layers of 100 us and 125 all-reduces of 22 us are 8.85 ms for 8 tokens.
    assert found["decode.kimi_k2.6.fp8.c8.tok_s"].value == pytest.approx(8 / 8.85e-3)
    assert found["decode.glm_5.2.w_int4.c16.tok_s"].value == pytest.approx(16 / (78 * 150e-6 + 159 * 22e-6))
    row = next(c for c in claims.load() if c.id == "kimi.decode.fp8.c8").settle(
        found["decode.kimi_k2.6.fp8.c8.tok_s"]
    )
    assert (row["status"], row["how"]) == ("estimated", "rank slice on one H200")
    assert "125 all-reduces of 22 us" in row["why"]


def test_measured_of_the_check_sets_its_time_against_a_whole_step(results):
    metrics = {"integrity.step.layers": 16, "integrity.check.tags.b64.us": 9.0}
    for rows, step_us in ((1, 1600.0), (8, 3200.0), (64, 800.0)):
        metrics[f"integrity.step.off.b{rows}.l8192.us"] = step_us
    results("check_cost", metrics, devices=GPU)
    found = aggregate.measured(results.root)
    # 61/16 x 1.6 ms and 125 all-reduces of 22 us are 8.85 ms; at 8 rows 14.95 ms, at 64 rows 5.8 ms.
    assert found["integrity.throughput_pct.min"].value == pytest.approx(-100 * 9e-3 / 8.85)
    assert found["integrity.latency_p95_pct.min"].value == pytest.approx(100 * 9e-3 / 14.95)
    assert found["integrity.upper_bound_pct"].value == pytest.approx(100 * 9e-3 / 5.8)
    row = next(c for c in claims.load() if c.id == "integrity.upper_bound").settle(
        found["integrity.upper_bound_pct"]
    )
    assert (row["status"], row["how"]) == ("estimated", "rank slice on one H200")


def test_measured_of_the_layer_benchmark_takes_the_all_reduce_of_eight_gpus_not_of_two(results):
    results("kernel_bench", {"layer.kimi.fp8.b8.us": 100.0}, devices=GPU)
    two, eight = ([{"platform": "gpu", "kind": "NVIDIA H200", "count": count}] for count in (2, 8))
    results("multi_gpu", {"allreduce.n2.224.nccl.us": 5.0}, "two", devices=two)
    rate = aggregate.measured(results.root)["decode.kimi_k2.6.fp8.c8.tok_s"].value
    assert rate == pytest.approx(8 / 8.85e-3)
    # 8 rows of 7,168 f32 are 224 KiB.
    metrics = {
        "allreduce.n8.14.nccl.us": 11.0,
        "allreduce.n8.224.nccl.us": 12.0,
        "allreduce.n8.896.nccl.us": 9.0,
    }
    results("multi_gpu", metrics, "eight", devices=eight)
    found = aggregate.measured(results.root)["decode.kimi_k2.6.fp8.c8.tok_s"]
    assert found.value == pytest.approx(8 / (61 * 100e-6 + 125 * 12e-6))
    assert "125 all-reduces of 12 us (224 KiB over NCCL, as measured on eight)" in found.note


def test_measured_of_a_full_layer_run_answers_every_claim_of_a_rank_slice(results):
    config = kernel_bench.get_config()
    cells = itertools.product(config.layer_models, config.layer_formats, config.layer_batches)
    metrics = {f"layer.{model}.{cache}.b{rows}.us": 100.0 for model, cache, rows in cells}
    results("kernel_bench", metrics, devices=GPU)
    rows = claims.settle(claims.load(), aggregate.measured(results.root))
    asked = re.compile(r"kimi\.decode\.(bf16|fp8)\.c\d+|glm\.decode\.w_int4\.c\d+|kimi\.layer_ratio\.c\d+")
    states = {row["id"]: row["status"] for row in rows if asked.fullmatch(row["id"])}
    assert len(states) == 16
    assert set(states.values()) == {"estimated", "measured"}


def test_measured_of_a_layer_on_cpu_gives_no_rate(results):
    results("kernel_bench", {"layer.kimi.fp8.b8.us": 1e5, "layer.kimi.bf16.b8.us": 1e5})
    assert set(aggregate.measured(results.root)) == {"layer.kimi.fp8.b8.us", "layer.kimi.bf16.b8.us"}


def test_measured_of_clean_runs_bounds_the_false_positive_rate(results):
    results("detection_matrix", {"clean.tags.page_checks": 3_000_000_000, "clean.tags.false_positives": 0})
    bound = aggregate.measured(results.root)["integrity.false_positive_bound"]
    assert bound.value == pytest.approx(1e-9, rel=2e-3)
    assert "3,000,000,000 page checks" in bound.note


def test_fill_renders_the_newest_report_and_is_stable(results):
    rows = claims.settle(claims.load()[:5], {claims.load()[0].metric: claims.Found(140.5, "8 GPUs")})
    path = results("reproduce", {}, claims=rows)
    text = aggregate.fill("a\n<!-- table:claims -->\nold\n<!-- end -->\nb\n", results.root)
    assert "| kimi.decode.bf16.c1 | 137 | 140.5 | tokens/s | 8 GPUs | measured |" in text
    assert "kimi.decode.bf16.c32 (1,558)" in text
    assert path.name in text
    assert "old" not in text
    assert text.startswith("a\n")
    assert text.endswith("\nb\n")
    assert aggregate.fill(text, results.root) == text


def test_fill_of_kernels_adds_up_runs_and_names_only_those_that_count(results):
    results("kernel_bench", {"layer.kimi.fp8.b8.us": 150.0}, "old", devices=GPU)
    when = "2026-11-0{}T10:00:00+00:00"
    results("kernel_bench", {"layer.kimi.fp8.b8.us": 120.0}, "layer", devices=GPU, created_utc=when.format(2))
    moe = {"int4_moe.glm.g32.m64.us": 190.5}
    results("kernel_bench", moe, "moe", devices=GPU, created_utc=when.format(3))
    text = aggregate.fill("<!-- table:kernels -->\n<!-- end -->", results.root)
    assert "| kimi | 8 | – | – | – | 120.0 | – | – |" in text
    assert "| 32 | 64 | – | – | 190.5 | – |" in text
    assert [name in text for name in ("old.json", "layer.json", "moe.json")] == [False, True, True]


@pytest.mark.parametrize(("name", "rule"), [("clams", "one of"), ("claims", "no record of reproduce")])
def test_fill_of_an_unknown_table_or_without_a_record_is_refused(tmp_path, name, rule):
    with pytest.raises(ValueError, match=rule):
        aggregate.fill(f"<!-- table:{name} -->\n<!-- end -->", tmp_path)


@pytest.mark.parametrize(
    "changes", [{"status": "interrupted"}, {"git": {"sha": "b" * 40, "dirty": True}}], ids=["status", "dirty"]
)
def test_adopt_of_a_run_that_proves_nothing_is_refused(results, tmp_path, changes):
    path = results("capacity", {}, **changes)
    with pytest.raises(ValueError, match="ended well on a clean commit"):
        aggregate.adopt(path, tmp_path / "committed")
    assert not (tmp_path / "committed").exists()


def test_adopt_names_the_record_by_date_and_commit(results, tmp_path):
    path = aggregate.adopt(results("capacity", {"x": 1}), tmp_path / "committed")
    assert path == tmp_path / "committed" / "capacity" / "20261101T100000-bbbbbbb.json"
    assert record.read(path)["metrics"] == {"x": 1}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1_026_879_376_368, "1,026,879,376,368"),
        (554.2712, "554.27"),
        (-0.79, "-0.79"),
        (None, "–"),
        (1e-9, "1e-09"),
    ],
)
def test_number_shows_what_a_reader_compares(value, text):
    assert tables.number(value) == text


def test_plain_pads_columns_and_markdown_escapes_bars():
    assert tables.plain(["a", "bb"], [["ccc", "d"]]) == "a    bb\n-------\nccc  d"
    assert tables.markdown(["a"], [["x|y"]]) == "| a |\n| --- |\n| x\\|y |"


def test_aggregate_check_of_a_stale_readme_fails_and_changes_nothing(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table:clams -->\n<!-- end -->\n")
    command = [sys.executable, "-m", "experiments.aggregate", "--check", f"--readme={readme}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=aggregate.ROOT)
    assert done.returncode == 1
    assert "table 'clams'" in done.stderr
    assert readme.read_text() == "<!-- table:clams -->\n<!-- end -->\n"


def test_kernels_table_has_a_row_a_shape_and_dashes_for_what_was_not_measured():
    metrics = {
        "mla_decode.bf16.h8.b64.l8192.us": 140.04,
        "mla_decode.fp8_flat.h8.b64.l8192.us": 94.96,
        "mla_decode.fp8_flat.h8.b64.l8192.rival_us": 110.5,
        "mla_decode.fp8_flat.h8.b8.l8192.us": 22.0,
        "mla_decode.fp8_656.h8.b64.ragged.us": 99.0,
        "mla_decode.fp8_flat.h8.b8.l8192.err": 9e-4,
        "int4_moe.glm.g32.m64.us": 190.5,
        "int4_moe.glm.g32.m64.marlin_us": 245.0,
        "layer.kimi.fp8.b1.us": 66.6,
        "layer.kimi.fp8.b1.launches": 9,
    }
    lines = result_tables.kernels(metrics).splitlines()
    assert "| 8 | 8 | 8192 | – | – | 22.0 | – | – |" in lines
    assert "| 8 | 64 | ragged | – | – | – | – | 99.0 |" in lines
    assert "| 8 | 64 | 8192 | 140.0 | – | 95.0 | 110.5 | – |" in lines
    assert "| 32 | 64 | – | – | 190.5 | 245.0 |" in lines
    assert "| kimi | 1 | – | – | – | 66.6 | 9.0 | – |" in lines


def test_faults_table_sums_trials_over_models_and_pages():
    metrics = {"clean.tags.operations": 1e5, "clean.tags.page_checks": 3e9, "clean.tags.false_positives": 0}
    metrics |= {"cost.tags.added_step_operations": 15, "cost.tags.check_us": 228.4}
    for model, page in (("kimi", 4), ("glm", 16)):
        for detector, seen in (("off", 0), ("tags", 5), ("tags_digest", 5)):
            at = f"A1_freed.{model}.p{page}.{detector}"
            metrics |= {f"{at}.detected": seen, f"{at}.missed": 5 - seen, f"{at}.wrong": 0 if seen else 4}
    text = result_tables.faults(metrics)
    assert "| A1_freed | 0/10, 8 wrong | 10/10 | 10/10 |" in text
    assert "tags: 0 false positives in 100,000 clean operations and 3,000,000,000 page checks." in text
    assert "tags adds 15 device operations to a compiled decode step. One check of the full pool" in text


def test_check_cost_table_has_the_step_with_and_without_each_detector():
    metrics = {"integrity.check.tags.b64.us": 9.25, "integrity.check.tags.b64.launches": 4}
    metrics |= {"integrity.step.layers": 16, "integrity.overhead.tags.b8.l8192.percent": 0.456}
    metrics |= {"integrity.step.off.b8.l8192.us": 2000.0, "integrity.step.tags.b8.l8192.us": 2009.1}
    text = result_tables.check_cost(metrics)
    assert "| tags | 64 | 9.2 | 4.0 | – |" in text
    assert "| 8 | 8192 | 2,000.00 | 2,009.10 | 0.46 | – | – |" in text
    assert "one rank, 16 layers" in text


def test_several_gpus_table_has_a_column_a_way_and_the_facts():
    metrics = {
        "allreduce.n2.14.nccl.us": 22.1,
        "allreduce.n2.14.mosaic.us": 5.25,
        "allreduce.n2.896.nccl.us": 29,
    }
    metrics |= {"tp2.kimi_tiny_tp8.tokens_equal": 1, "allreduce.n2.14.nccl.spread_us": 1}
    metrics |= {"allreduce.n2.14.nccl.wall_us": 23, "step.n2.rows16.mosaic_nccl_blas.us": 1500}
    metrics |= {
        "step.n2.rows16.mosaic_nccl_blas.busy_us": 900,
        "step.n2.rows16.mosaic_nccl_blas.launches": 181.4,
    }
    metrics |= {"step.n2.rows16.status_reduction.us": 15}
    text = result_tables.several_gpus(metrics)
    assert "| GPUs | KiB | mosaic | nccl |" in text
    assert "| 2 | 14 | 5.2 | 22.1 |" in text
    assert "| 2 | 14 | 23.0 |" in text
    assert "| 2 | 16 | mosaic_nccl_blas | 1,500 | 900 | 181 |" in text
    assert "`step.n2.rows16.status_reduction.us` 15." in text
    assert "| 2 | 896 | – | 29.0 |" in text
    assert "`tp2.kimi_tiny_tp8.tokens_equal` 1." in text


def test_serving_keeps_traces_policies_and_engines_apart():
    metrics = {"ttft_s.p50": 0.1, "throughput_tok_s": 62.5, "prefix_hit_rate": 0.0}
    metrics |= {"closed_loop.16.ttft_s.p50": 0.25, "sessions.agent.prefix_hit_rate": 0.86}
    metrics |= {"routing.azure_code.weighed.ttft_s.p95": 13.5, "routing.azure_code.random.ttft_s.p95": 35.1}
    metrics |= {"fleet.weighed.throughput_tok_s": 900.0, "prefix.azure_code.off.prefix_hit_rate": 0.0}
    metrics |= {"host_ms_per_step.rows64": 0.75, "batch_invariant.slowdown.p50": 1.2, "routing.x": 3.0}
    text = result_tables.serving(metrics)
    assert "| replay | 0.1 | – | – | – | 62.5 | 0 |" in text
    assert "| 16 in flight | 0.25 |" in text
    assert "| agent sessions | – | – | – | – | – | 0.86 |" in text
    assert text.index("| azure_code | weighed | 13.5 |") < text.index("| azure_code | random | 35.1 |")
    assert "| weighed | – | 900 | – | – |" in text
    assert "| azure_code | off | – | – | 0 |" in text
    assert "`host_ms_per_step.rows64` 0.75. `batch_invariant.slowdown.p50` 1.2." in text
    assert "four simulated replicas" in text
    assert result_tables.serving({"host_ms_per_step.rows64": 0.75}) == "`host_ms_per_step.rows64` 0.75."
