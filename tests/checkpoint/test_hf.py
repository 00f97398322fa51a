import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.checkpoint import hf
from kvmem.checkpoint.directory import CheckpointDirectory
from kvmem.formats.qtensor import QTensor
from kvmem.models import get_config, params
from tests.checkpoint.conftest import CASES
from tests.parity import reference

LOADS = [
    ("kimi_int4", "int4_group"),
    ("kimi_int4", "bf16"),
    ("glm_fp8", "fp8_block"),
    ("glm_fp8", "int4_group"),
    ("glm_bf16", "bf16"),
]


@pytest.fixture(scope="module")
def load(checkpoints):
    """Loads once per (layout, weights)."""
    done = {}

    def load(layout, weights):
        if (layout, weights) not in done:
            config = get_config(CASES[layout])
            done[layout, weights] = hf.load(checkpoints[layout], weights, config=config)
        return done[layout, weights]

    return load


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The packed layout, read a nibble at a time."""
    nibbles = np.stack([(packed.view(np.uint32) >> np.uint32(4 * i)) & np.uint32(0xF) for i in range(8)], -1)
    q = nibbles.reshape(packed.shape[0], -1).astype(np.float32) - 8
    return q * np.repeat(scale.astype(np.float32), q.shape[1] // scale.shape[1], axis=1)


def unblock(values: np.ndarray, scale: np.ndarray, block: int) -> np.ndarray:
    rows, cols = values.shape
    spread = np.repeat(np.repeat(scale, block, 0)[:rows], block, 1)[:, :cols]
    return values.astype(np.float32) * spread


@pytest.mark.parametrize(("layout", "weights"), LOADS)
def test_load_gives_the_declared_tree_and_uses_every_text_tensor(load, checkpoints, layout, weights):
    config, loaded, report = load(layout, weights)
    declared = jax.eval_shape(lambda: params.init_params(config, weights, 0))
    assert jax.tree.structure(loaded) == jax.tree.structure(declared)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), loaded) == jax.tree.map(
        lambda a: (a.shape, a.dtype), declared
    )
    held = set(CheckpointDirectory(checkpoints[layout]).tensors)
    assert set(report.used) | set(report.vision) == held
    assert report.unused == ()
    assert bool(report.vision) == (layout == "kimi_int4")


def test_load_kimi_int4_experts_pass_through_bit_by_bit(load, checkpoints):
    _, loaded, _ = load("kimi_int4", "int4_group")
    files = CheckpointDirectory(checkpoints["kimi_int4"])
    gate_up, down = loaded["moe"]["gate_up"], loaded["moe"]["down"]
    # Stack entry 1 is checkpoint layer 2: layer 0 is dense.
    at = "language_model.model.layers.2.mlp.experts.7."
    for index, name in enumerate(("gate_proj", "up_proj")):
        expected = unpack(files.read(f"{at}{name}.weight_packed"), files.read(f"{at}{name}.weight_scale"))
        got = np.asarray(gate_up.dequantize(jnp.float32)[1, 7, index])
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(gate_up.scale[1, 7, index], files.read(f"{at}{name}.weight_scale"))
    expected = unpack(files.read(f"{at}down_proj.weight_packed"), files.read(f"{at}down_proj.weight_scale"))
    np.testing.assert_array_equal(down.dequantize(jnp.float32)[1, 7], expected)
    assert not np.array_equal(np.asarray(down.dequantize(jnp.float32)[1, 6]), expected)


def test_load_kimi_int4_as_bf16_is_the_dequantised_weight(load):
    _, stored, _ = load("kimi_int4", "int4_group")
    _, plain, _ = load("kimi_int4", "bf16")
    for name in ("gate_up", "down"):
        np.testing.assert_array_equal(
            np.asarray(plain["moe"][name]), stored["moe"][name].dequantize(jnp.bfloat16)
        )


def test_load_glm_fp8_blocks_pass_through_and_kv_b_is_split_after_dequantising(load, checkpoints):
    config, loaded, _ = load("glm_fp8", "fp8_block")
    files = CheckpointDirectory(checkpoints["glm_fp8"])
    block = config.fp8_block[0]
    at = "model.layers.4.self_attn."
    kv_a = loaded["attention"]["kv_a"].layer(4)
    np.testing.assert_array_equal(kv_a.data, files.read(at + "kv_a_proj_with_mqa.weight"))
    np.testing.assert_array_equal(kv_a.scale, files.read(at + "kv_a_proj_with_mqa.weight_scale_inv"))

    rows = config.qk_nope_head_dim + config.v_head_dim
    assert rows % block, "a block of scales must straddle heads, or this test sees nothing"
    values = files.read(at + "kv_b_proj.weight")
    scale = files.read(at + "kv_b_proj.weight_scale_inv")
    heads = unblock(values, scale, block).reshape(config.num_heads, rows, -1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(loaded["attention"]["w_uk"][4], heads[:, : config.qk_nope_head_dim])
    np.testing.assert_array_equal(loaded["attention"]["w_uv"][4], heads[:, config.qk_nope_head_dim :])


def test_load_glm_int4_from_fp8_is_within_half_a_step_of_the_fp8_weight(load):
    _, fp8, _ = load("glm_fp8", "fp8_block")
    _, int4, _ = load("glm_fp8", "int4_group")
    for name in ("gate_up", "down"):
        exact = np.asarray(fp8["moe"][name].dequantize(jnp.float32))
        stored = int4["moe"][name]
        assert stored.storage == "int4_group"
        step = np.repeat(np.asarray(stored.scale, np.float32), 32, axis=-1)
        # Half a step, and the bf16 scale's own rounding on at most 8 steps.
        assert (np.abs(np.asarray(stored.dequantize(jnp.float32)) - exact) <= step * (0.5 + 8 * 2**-8)).all()
    # Only routed experts are quantised.
    assert not isinstance(int4["moe"]["shared"]["down"], QTensor)
    np.testing.assert_array_equal(int4["attention"]["q_b"], fp8["attention"]["q_b"].dequantize(jnp.bfloat16))


def test_load_glm_mtp_layer_and_indexer_come_from_their_layers(load, checkpoints):
    config, loaded, _ = load("glm_bf16", "bf16")
    files = CheckpointDirectory(checkpoints["glm_bf16"])
    mtp = f"model.layers.{config.num_layers}."
    np.testing.assert_array_equal(loaded["mtp"]["eh_proj"][0], files.read(mtp + "eh_proj.weight"))
    np.testing.assert_array_equal(
        loaded["mtp"]["indexer"]["wk"][0], files.read(mtp + "self_attn.indexer.wk.weight")
    )
    layer = config.indexer.full_layers[3]
    assert layer != 3, "the stack index and the layer must differ, or this test sees nothing"
    np.testing.assert_array_equal(
        loaded["indexer"]["weights"][3],
        files.read(f"model.layers.{layer}.self_attn.indexer.weights_proj.weight"),
    )


def test_load_config_that_differs_names_the_field(checkpoints):
    other = get_config("kimi_tiny_parity")
    with pytest.raises(ValueError, match=r"vocab_size is 160, must be 97"):
        hf.load(checkpoints["kimi_int4"], "int4_group", config=other)


def test_load_report_lines_say_what_was_skipped(load):
    lines = load("kimi_int4", "int4_group")[2].lines()
    assert any("vision tensors recognised and skipped" in line for line in lines)
    assert len(lines) == 2


def test_load_unsupported_device_format_is_refused(checkpoints):
    with pytest.raises(ValueError, match="fp8_block"):
        hf.load(checkpoints["kimi_int4"], "fp8_block")


def test_fixture_total_size_is_the_declared_bytes(checkpoints):
    for layout, name in CASES.items():
        index = json.loads((checkpoints[layout] / "model.safetensors.index.json").read_text())
        tensors = params.checkpoint_tensors(get_config(name), layout)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors)
        assert set(index["weight_map"]) == {t.name for t in tensors}
        assert len(set(index["weight_map"].values())) > 2


@pytest.mark.parametrize("case", ["kimi", "glm"])
def test_load_transformers_directory_as_f32_widens_bf16_exactly(case):
    directory = reference.GOLDEN / case
    config, loaded, report = hf.load(directory, "f32")
    assert report.unused == ()
    files = CheckpointDirectory(directory)
    got = loaded["moe"]["gate_up"][1, 5, 1]
    layer = config.num_dense_layers + 1
    expected = files.read(f"model.layers.{layer}.mlp.experts.5.up_proj.weight")
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, expected.astype(np.float32))
