"""Every damaged checkpoint is one clear error that names the tensor or file and the rule."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvmem.checkpoint import fixture, hf, stored
from kvmem.checkpoint.directory import INDEX, SINGLE, CheckpointDirectory
from kvmem.models import get_config

EXPERT = "language_model.model.layers.2.mlp.experts.7.down_proj.weight"
FP8 = "model.layers.4.mlp.experts.6.gate_proj.weight"


@pytest.fixture
def changed(checkpoints, tmp_path):
    """changed(layout, edits): a copy in one file, tensors replaced, or removed where the edit is None."""

    def changed(layout, edits):
        source = CheckpointDirectory(checkpoints[layout])
        tensors = {name: source.read(name) for name in source.tensors} | edits
        tensors = {name: value for name, value in tensors.items() if value is not None}
        save_file(tensors, tmp_path / SINGLE)
        shutil.copy(checkpoints[layout] / "config.json", tmp_path)
        return tmp_path

    return changed


@pytest.fixture
def copied(checkpoints, tmp_path):
    """copied(layout): a copy whose files can be damaged."""
    return lambda layout: shutil.copytree(checkpoints[layout], tmp_path / layout)


def tensor(checkpoints, layout, name):
    return np.array(CheckpointDirectory(checkpoints[layout]).read(name))


def test_load_unchanged_copy_in_one_file_succeeds(changed):
    _, _, report = hf.load(changed("kimi_int4", {}), "int4_group")
    assert report.unused == ()


def test_load_missing_shard_names_the_file(copied):
    directory = copied("kimi_int4")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"1 of \d+ files are missing: {shard.name}"):
        hf.load(directory, "int4_group")


@pytest.mark.parametrize("keep", [4, 200, -1], ids=["prefix", "header", "data"])
def test_load_truncated_shard_names_the_file(copied, keep):
    directory = copied("kimi_int4")
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"{shard.name}: .*truncated"):
        hf.load(directory, "int4_group")


def test_load_shard_with_bytes_appended_is_refused(copied):
    directory = copied("kimi_int4")
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes() + b"xx")
    with pytest.raises(ValueError, match="followed by other bytes"):
        hf.load(directory, "int4_group")


def test_load_no_config_or_broken_config_is_refused(copied, tmp_path):
    directory = copied("kimi_int4")
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON"):
        hf.load(directory, "int4_group")
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json: no such file"):
        hf.load(directory, "int4_group")
    with pytest.raises(ValueError, match="nowhere: no such checkpoint directory"):
        hf.load(tmp_path / "nowhere", "int4_group")


def test_load_unknown_config_field_is_named(copied):
    directory = copied("glm_fp8")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_sink": 4}))
    with pytest.raises(ValueError, match="attention_sink"):
        hf.load(directory, "fp8_block")


def test_load_index_that_lists_a_tensor_elsewhere_is_refused(copied):
    directory = copied("glm_fp8")
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.norm.bias"] = "model-00001-of-" + index["weight_map"][FP8][-17:]
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lists model.norm.bias in model-00001"):
        CheckpointDirectory(directory)


@pytest.mark.parametrize("suffix", ["_packed", "_scale", "_shape"])
def test_D9_load_missing_expert_tensor_names_the_expert(changed, suffix):
    with pytest.raises(ValueError, match=rf"1 tensors .* missing: .*layers\.2\.mlp\.experts\.7\..*{suffix}"):
        hf.load(changed("kimi_int4", {EXPERT + suffix: None}), "int4_group")


def test_load_missing_fp8_scale_names_the_expert(changed):
    with pytest.raises(ValueError, match=r"missing: .*experts\.6\.gate_proj\.weight_scale_inv"):
        hf.load(changed("glm_fp8", {FP8 + "_scale_inv": None}), "int4_group")


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_D9_load_nonfinite_int4_scale_names_the_expert(changed, checkpoints, bad):
    scale = tensor(checkpoints, "kimi_int4", EXPERT + "_scale")
    scale[5, 3] = bad
    with pytest.raises(
        ValueError, match=r"layers\.2\.mlp\.experts\.7\.down_proj\.weight_scale: 1 of 512 scales"
    ):
        hf.load(changed("kimi_int4", {EXPERT + "_scale": scale}), "int4_group")


def test_load_nonfinite_fp8_scale_and_value_name_the_expert(changed, checkpoints):
    scale = tensor(checkpoints, "glm_fp8", FP8 + "_scale_inv")
    scale[2, 1] = np.nan
    with pytest.raises(ValueError, match=r"experts\.6\.gate_proj\.weight_scale_inv: 1 of 16 scales"):
        hf.load(changed("glm_fp8", {FP8 + "_scale_inv": scale}), "fp8_block")
    values = tensor(checkpoints, "glm_fp8", FP8)
    values.view(np.uint8)[3, 3] = 0xFF
    with pytest.raises(ValueError, match=r"experts\.6\.gate_proj\.weight: 1 of \d+ values are not finite"):
        hf.load(changed("glm_fp8", {FP8: values}), "fp8_block")


def test_load_nonfinite_plain_weight_is_named(changed, checkpoints):
    norm = tensor(checkpoints, "glm_bf16", "model.norm.weight")
    norm[7] = np.nan
    with pytest.raises(ValueError, match=r"model\.norm\.weight: 1 of 64 values"):
        hf.load(changed("glm_bf16", {"model.norm.weight": norm}), "bf16")


def test_D3_load_foreign_scale_dtype_is_refused(changed, checkpoints):
    scale = tensor(checkpoints, "kimi_int4", EXPERT + "_scale").astype(np.float16)
    with pytest.raises(ValueError, match=r"experts\.7\.down_proj\.weight_scale has dtype F16, must be BF16"):
        hf.load(changed("kimi_int4", {EXPERT + "_scale": scale}), "int4_group")
    scale = tensor(checkpoints, "glm_fp8", FP8 + "_scale_inv").astype(ml_dtypes.bfloat16)
    with pytest.raises(ValueError, match=r"weight_scale_inv has dtype BF16, must be F32"):
        hf.load(changed("glm_fp8", {FP8 + "_scale_inv": scale}), "fp8_block")


def test_load_wrong_shape_and_wrong_weight_shape_are_refused(changed, checkpoints):
    packed = tensor(checkpoints, "kimi_int4", EXPERT + "_packed")
    with pytest.raises(ValueError, match=r"weight_packed has shape \[32, 64\], must be \[64, 32\]"):
        hf.load(changed("kimi_int4", {EXPERT + "_packed": packed.T.copy()}), "int4_group")
    shape = np.array([64, 255], np.int32)
    with pytest.raises(ValueError, match=r"weight_shape: weight_shape \[64, 255\] contradicts \[64, 256\]"):
        hf.load(changed("kimi_int4", {EXPERT + "_shape": shape}), "int4_group")


@pytest.mark.parametrize(
    ("suffix", "scheme"),
    [("_g_idx", "act-order"), ("_zero_point", "asymmetric INT4")],
    ids=["g_idx", "zero_point"],
)
def test_D3_load_act_order_and_asymmetric_weights_are_refused(changed, suffix, scheme):
    with pytest.raises(ValueError, match=rf"experts\.7\.down_proj\.weight{suffix}: {scheme}"):
        hf.load(changed("kimi_int4", {EXPERT + suffix: np.zeros(256, np.int32)}), "int4_group")


def test_load_config_that_declares_act_order_is_refused(copied):
    directory = copied("kimi_int4")
    config = json.loads((directory / "config.json").read_text())
    scheme = config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]
    scheme["actorder"] = "group"
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"actorder='group' contradicts the supported INT4 scheme"):
        hf.load(directory, "int4_group")


def test_load_unknown_tensors_are_reported_by_name(changed):
    _, _, report = hf.load(
        changed("kimi_int4", {"language_model.extra.weight": np.ones(3, np.float32)}), "bf16"
    )
    assert report.unused == ("language_model.extra.weight",)
    assert "language_model.extra.weight" in report.lines()[-1]


def test_load_file_outside_the_index_is_reported(copied):
    directory = copied("kimi_int4")
    shutil.copy(next(directory.glob("*.safetensors")), directory / "extra.safetensors")
    _, _, report = hf.load(directory, "bf16")
    assert report.unused == ("extra.safetensors",)


def test_load_without_the_prefix_finds_the_same_tensors(changed, checkpoints):
    source = CheckpointDirectory(checkpoints["kimi_int4"])
    plain = {n: None for n in source.tensors if n.startswith("language_model.")}
    bare = {n.removeprefix("language_model."): source.read(n) for n in plain}
    _, loaded, report = hf.load(changed("kimi_int4", plain | bare), "int4_group")
    assert set(report.used) == set(bare)
    np.testing.assert_array_equal(loaded["final_norm"], source.read("language_model.model.norm.weight"))


def test_load_both_spellings_of_a_tensor_are_refused(changed):
    with pytest.raises(ValueError, match=r"both .*model\.norm\.weight and .*model\.norm\.weight"):
        hf.load(changed("kimi_int4", {"model.norm.weight": np.ones(64, ml_dtypes.bfloat16)}), "int4_group")


def test_load_indexers_proj_spelling_is_the_indexer_weight(changed, checkpoints):
    name = "model.layers.6.self_attn.indexer.weights_proj.weight"
    value = tensor(checkpoints, "glm_fp8", name)
    renamed = name.replace("indexer.weights_proj", "indexers_proj")
    _, loaded, report = hf.load(changed("glm_fp8", {name: None, renamed: value}), "fp8_block")
    assert report.unused == ()
    np.testing.assert_array_equal(loaded["indexer"]["weights"][3], value)


def cache_scales(values):
    return {
        f"model.layers.{layer}.self_attn.{kind}_scale": np.array(scale, np.float32)
        for (layer, kind), scale in values.items()
    }


def test_C2_load_calibrated_cache_scale_is_an_error_until_accepted_then_reported(changed):
    directory = changed("glm_fp8", cache_scales({(i, k): 0.25 for i in range(8) for k in "kv"}))
    with pytest.raises(ValueError, match=r"calibrated cache scale 0.25: pass accept_cache_scale=True"):
        hf.load(directory, "fp8_block")
    _, _, report = hf.load(directory, "fp8_block", accept_cache_scale=True)
    assert report.cache_scale == 0.25
    assert report.unused == ()


def test_C4_load_two_scales_for_one_latent_row_are_refused(changed):
    directory = changed("glm_fp8", cache_scales({(4, "k"): 0.25, (4, "v"): 0.5}))
    with pytest.raises(ValueError, match=r"cache scales differ .*k_scale = 0.25.*v_scale = 0.5"):
        hf.load(directory, "fp8_block", accept_cache_scale=True)


def test_load_cache_scale_that_is_not_positive_is_refused(changed):
    directory = changed("glm_fp8", cache_scales({(4, "k"): np.nan}))
    with pytest.raises(ValueError, match="must be one positive number"):
        hf.load(directory, "fp8_block", accept_cache_scale=True)


def test_load_nvfp4_is_counted_but_not_read(copied):
    directory = copied("glm_fp8")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match="nvfp4"):
        hf.load(directory, "fp8_block")


def test_fixture_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stored, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fixture.write(tmp_path / "x", get_config("kimi_tiny_tp8"), 0, "kimi_int4")
    assert list(tmp_path.iterdir()) == []


def test_fixture_into_an_existing_directory_is_refused(checkpoints):
    with pytest.raises(ValueError, match="exists already"):
        fixture.write(checkpoints["kimi_int4"], get_config("kimi_tiny_tp8"), 0, "kimi_int4")
