"""The planner's figures against every number of the published memory arithmetic."""

import dataclasses

import pytest

from kvmem import planner
from kvmem.models import get_config
from kvmem.planner import GIB, Layout

KIMI, GLM = get_config("kimi_k2.6"), get_config("glm_5.2")
FRACTION = 116.7 / planner.H200_GIB


@pytest.mark.parametrize(
    ("config", "label", "nbytes"),
    [
        (KIMI, "int4_g32", 595_148_192_736),
        (GLM, "bf16", 1_506_659_919_872),
        (GLM, "fp8", 755_617_140_416),
        (GLM, "int4_g32", 450_903_738_368),
    ],
    ids=["kimi_int4", "glm_bf16", "glm_fp8", "glm_int4"],
)
def test_checkpoint_bytes_equal_published(config, label, nbytes):
    assert planner.checkpoint_bytes(config, label) == nbytes


@pytest.mark.parametrize(
    ("config", "label", "even", "real"),
    [(KIMI, "int4_g32", 69.28, 71.83), (GLM, "int4_g32", 52.49, 55.22), (GLM, "fp8", 87.97, 89.49)],
    ids=["kimi", "glm_int4", "glm_fp8"],
)
def test_checkpoint_rank_bytes_count_replicated_parts(config, label, even, real):
    # Published to two digits, some rounded down: 69.284, 52.492, 87.965; 71.832, 55.221, 89.49503.
    assert planner.checkpoint_bytes(config, label) / 8 / GIB == pytest.approx(even, abs=0.00501)
    assert planner.checkpoint_rank_bytes(config, label).total / GIB == pytest.approx(real, abs=0.00504)


@pytest.mark.parametrize(
    ("config", "cache", "mtp", "nbytes"),
    [
        (KIMI, "bf16", False, 70_272),
        (KIMI, "fp8_flat", False, 35_136),
        (KIMI, "fp8_656", False, 40_016),
        (GLM, "fp8_656", False, 53_940),
        (GLM, "fp8_656", True, 54_728),
        (GLM, "fp8_flat", False, 47_700),
        (GLM, "bf16", False, 92_628),
    ],
)
def test_kv_bytes_per_token_equal_published(config, cache, mtp, nbytes):
    assert planner.kv_bytes_per_token(config, cache, mtp=mtp) == nbytes


@pytest.mark.parametrize(
    ("config", "label", "cache", "millions"),
    [
        (KIMI, "int4_g32", "bf16", 0.686),
        (KIMI, "int4_g32", "fp8_flat", 1.37),
        (KIMI, "int4_g32", "fp8_656", 1.205),
        (GLM, "int4_g32", "fp8_656", 1.22),
    ],
    ids=["kimi_bf16", "kimi_fp8", "kimi_656", "glm"],
)
def test_tokens_per_gpu_at_derived_budget_match_published(config, label, cache, millions):
    tokens = planner.tokens_per_gpu(config, label, cache, memory_fraction=FRACTION)
    assert tokens / 1e6 == pytest.approx(millions, rel=0.004)  # published to three digits
    assert tokens % 64 == 0


def test_tokens_per_gpu_data_parallel_trades_weights_for_shards():
    replicated = planner.tokens_per_gpu(GLM, "int4_g32", "fp8_656", memory_fraction=FRACTION)
    sharded = planner.tokens_per_gpu(
        GLM, "int4_g32", "fp8_656", Layout(data_parallel_attention=True), memory_fraction=FRACTION
    )
    # Every rank then holds 8/8 of the head-split attention weights: q_b, kv_b, o of 79 layers in bf16.
    head_split = 2 * 79 * (16384 * 2048 + 28672 * 512 + 6144 * 16384)
    lost = head_split * 7 / 8 / planner.kv_bytes_per_token(GLM, "fp8_656")
    assert replicated - sharded == pytest.approx(lost, abs=128)
    assert 8 * sharded > 5 * replicated


def test_tokens_per_gpu_without_room_raises():
    with pytest.raises(ValueError, match=r"kimi_k2.6 bf16: weights of 241\.\d GiB a rank leave no room"):
        planner.tokens_per_gpu(KIMI, "bf16", "fp8_flat", memory_fraction=0.9)
    with pytest.raises(ValueError, match=r"memory_fraction=1\.2"):
        planner.tokens_per_gpu(KIMI, "int4_g32", "fp8_flat", memory_fraction=1.2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: planner.checkpoint_bytes(KIMI, "fp8"), r"weights='fp8': kimi_k2.6 has"),
        (lambda: planner.kv_bytes_per_token(KIMI, "int8"), r"cache='int8': known are"),
        (
            lambda: planner.checkpoint_rank_bytes(GLM, "int4_g128", Layout(ranks=32)),
            r"K=2048 over 32 shards is 64 a rank, which the int4_group group of 128 does not divide",
        ),
    ],
    ids=["weights", "cache", "group"],
)
def test_planner_unknown_or_impossible_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_device_rank_bytes_differ_from_checkpoint_by_named_parts():
    device = planner.device_rank_bytes(GLM, "fp8_block").total
    checkpoint = planner.checkpoint_rank_bytes(GLM, "fp8").total
    # kv_b_proj: bf16 on the device, e4m3 with an f32 scale per 128 x 128 in the file, split over 8 ranks.
    assert device - checkpoint == 79 * 28672 * 512 // 8 - 79 * 224 * 4 * 4 // 8


def test_decode_floor_counts_every_byte_once():
    one = planner.decode_floor(KIMI, "int4_group", "fp8_flat", 1, 8192)
    many = planner.decode_floor(KIMI, "int4_group", "fp8_flat", 64, 8192)
    assert one.cache_bytes == 8192 * 35_136
    assert many.cache_bytes == 64 * one.cache_bytes
    # One row reads 8 of 384 experts; 64 rows read 384 (1 - (1 - 8/384)^64) distinct ones on average.
    assert many.expert_bytes / one.expert_bytes == pytest.approx((1 - (1 - 8 / 384) ** 64) * 48, rel=1e-6)
    assert (
        many.seconds == (many.dense_bytes + many.expert_bytes + many.cache_bytes) / planner.H200_BYTES_PER_S
    )


def test_decode_floor_glm_reads_selected_tokens_and_all_index_keys():
    floor = planner.decode_floor(GLM, "int4_group", "fp8_656", 2, 10_000)
    assert floor.cache_bytes == 2 * (2048 * 656 * 78 + 10_000 * 132 * 21)


def test_decode_floor_data_parallel_crosses_at_break_even():
    # Above the break-even number of cached tokens the sharded cache reads less per rank, below it more.
    even = planner.sharded_cache_break_even(KIMI, "bf16")
    assert even == pytest.approx(149_000, rel=0.01)

    def read(rows, context, sharded):
        layout = Layout(data_parallel_attention=sharded)
        floor = planner.decode_floor(KIMI, "int4_group", "bf16", rows, context, layout)
        return floor.dense_bytes + floor.cache_bytes

    assert read(16, round(even * 1.02) // 16, True) < read(16, round(even * 1.02) // 16, False)
    assert read(16, round(even * 0.98) // 16, True) > read(16, round(even * 0.98) // 16, False)


def test_prefill_flops_without_context_are_two_per_active_weight():
    # Active parameters per token, embedding not counted: 31.7e9 for Kimi.
    assert planner.prefill_flops(KIMI, 0) / 2 == pytest.approx(31.7e9, rel=0.005)
    longer = dataclasses.replace(KIMI, indexer=None)
    assert planner.prefill_flops(longer, 8192) > planner.prefill_flops(KIMI, 4096)
