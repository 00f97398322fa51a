import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from kvmem.sharding import rules
from kvmem.sharding.specs import ParamSpec, Source

PLAIN = ParamSpec((6, 48, 20), (None, "heads", None), Source(("a",), (48, 20)))
INT4 = dataclasses.replace(
    PLAIN, shape=(6, 24, 256), axes=(None, None, "ffn"), storage="int4_group", group=(1, 32)
)
FP8 = dataclasses.replace(PLAIN, shape=(6, 256, 40), storage="fp8_block", group=(32, 32))


def test_partition_logical_axes_become_mesh_axes():
    assert rules.partition(PLAIN, 8) == P(None, "tp", None)
    assert rules.partition(INT4, 8) == P(None, None, "tp")
    assert rules.partition(FP8, 4) == P(None, "tp", None)


def test_local_shape_divides_split_dimensions_only():
    assert rules.local_shape((6, 48, 20), P(None, "tp", None), 8) == (6, 6, 20)


@pytest.mark.parametrize(
    ("spec", "shards", "message"),
    [
        (PLAIN, 7, r"w: K=48 does not divide over 7 shards"),
        (INT4, 16, r"w: K=256 over 16 shards is 16 a rank, which the int4_group group of 32 does not divide"),
        (FP8, 16, r"w: K=256 over 16 shards is 16 a rank, which the fp8_block group of 32 does not divide"),
        (
            dataclasses.replace(INT4, group=(1, 128)),
            4,
            r"w: K=256 over 4 shards is 64 a rank, which the int4_group group of 128",
        ),
    ],
    ids=["size", "int4_columns", "fp8_rows", "g128"],
)
def test_partition_that_does_not_divide_raises_naming_sizes(spec, shards, message):
    with pytest.raises(ValueError, match=message):
        rules.partition(spec, shards, "w")


def test_partition_collision_raises():
    spec = dataclasses.replace(PLAIN, axes=("heads", "ffn", None), shape=(16, 24, 8))
    with pytest.raises(ValueError, match="put two dimensions on mesh axis 'tp'"):
        rules.partition(spec, 8)


def test_partition_axis_without_rule_raises():
    spec = dataclasses.replace(PLAIN, axes=("experts", None, None))
    with pytest.raises(ValueError, match="'experts' has no rule"):
        rules.partition(spec, 2)


def test_partition_partial_block_on_unsplit_axis_is_allowed():
    # kv_a has 576 rows, 4.5 blocks of 128: on every rank whole, so nothing is cut.
    spec = dataclasses.replace(FP8, shape=(6, 40, 256), axes=(None, None, "heads"))
    assert rules.partition(spec, 8) == P(None, None, "tp")
