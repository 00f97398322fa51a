import numpy as np
import pytest

from kvmem.checkpoint import convert as convert_module
from kvmem.checkpoint import fixture, hf, safetensors_io
from kvmem.checkpoint.convert import convert
from kvmem.checkpoint.directory import CheckpointDirectory
from kvmem.models import get_config

SHARD = 2**20


@pytest.fixture(scope="module")
def converted(checkpoints, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "int4"
    (checkpoints["glm_fp8"] / "tokenizer_config.json").write_text("{}")
    return target, convert(checkpoints["glm_fp8"], target, max_shard_bytes=SHARD)


def test_convert_report_says_what_rounding_cost(converted):
    target, report = converted
    # Routed experts of five MoE layers and the MTP layer, ten experts, three matrices.
    assert report.quantised == 6 * 10 * 3
    assert 0.4 < report.worst_steps <= convert_module.WORST_STEPS["absmax/7.5"]
    # An error uniform in +-half a step is 0.29 steps; the largest of 32 normal weights is 2.07 sigma.
    assert 0.05 < report.relative_error < 0.11
    files = CheckpointDirectory(target)
    assert report.nbytes == sum(info.end - info.start for info in files.tensors.values())


def test_convert_directory_loads_as_int4_made_at_load_does(converted, checkpoints):
    target, _ = converted
    config, stored, report = hf.load(target, "int4_group")
    assert report.checkpoint == "glm_int4"
    assert report.unused == ()
    _, made, _ = hf.load(checkpoints["glm_fp8"], "int4_group", config=None)
    for name in ("gate_up", "down"):
        np.testing.assert_array_equal(
            np.asarray(stored["moe"][name].data), np.asarray(made["moe"][name].data)
        )
        np.testing.assert_array_equal(stored["moe"][name].scale, made["moe"][name].scale)
    np.testing.assert_array_equal(stored["attention"]["w_uk"], made["attention"]["w_uk"])
    np.testing.assert_array_equal(stored["mtp"]["eh_proj"], made["mtp"]["eh_proj"])
    assert config.mtp_layers == 1
    assert (target / "tokenizer_config.json").exists()


def test_convert_interrupted_keeps_complete_files_and_writes_the_rest(
    converted, checkpoints, tmp_path, monkeypatch
):
    target = tmp_path / "int4"
    written = []
    original = safetensors_io.write

    def stop_at_third(path, *rest):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        return original(path, *rest)

    monkeypatch.setattr(safetensors_io, "write", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        convert(checkpoints["glm_fp8"], target, max_shard_bytes=SHARD)
    assert sorted(path.name for path in target.iterdir()) == sorted(written)
    with pytest.raises(ValueError, match=r"config.json: no such file"):
        hf.load(target, "int4_group")

    again = []
    monkeypatch.setattr(
        safetensors_io, "write", lambda path, *rest: again.append(path.name) or original(path, *rest)
    )
    report = convert(checkpoints["glm_fp8"], target, max_shard_bytes=SHARD)
    assert not set(again) & set(written)
    assert report == converted[1]


def test_convert_kimi_bf16_gives_the_published_layout_with_its_vision_tensors(tmp_path):
    source = fixture.write(tmp_path / "bf16", get_config("kimi_tiny_tp8"), 5, "bf16")
    report = convert(source, tmp_path / "int4", group=64, max_shard_bytes=SHARD)
    assert report.quantised == 3 * 12 * 3
    config, loaded, found = hf.load(tmp_path / "int4", "int4_group")
    assert (found.checkpoint, config.int4_group) == ("kimi_int4", 64)
    assert loaded["moe"]["down"].group == (1, 64)
    tower = [name for name in found.vision if name.startswith("vision_tower.")]
    kept = CheckpointDirectory(tmp_path / "int4")
    assert tower
    for name in tower:
        np.testing.assert_array_equal(kept.read(name), CheckpointDirectory(source).read(name))


def test_convert_into_other_files_is_refused(checkpoints, tmp_path):
    target = tmp_path / "int4"
    convert(checkpoints["glm_bf16"], target, max_shard_bytes=SHARD)
    with pytest.raises(ValueError, match="holds other tensors than this conversion writes"):
        convert(checkpoints["glm_bf16"], target, max_shard_bytes=SHARD, group=64)
    with pytest.raises(ValueError, match=r"holds model-00001-of-\d+.safetensors, .*does not write"):
        convert(checkpoints["glm_bf16"], target, max_shard_bytes=2 * SHARD)


def test_convert_int4_source_is_refused(checkpoints, tmp_path):
    with pytest.raises(ValueError, match="a kimi_int4 checkpoint is not converted"):
        convert(checkpoints["kimi_int4"], tmp_path / "x")


@pytest.mark.parametrize("suffix", ["_scale", ""], ids=["scale", "plain"])
def test_convert_verification_sees_a_changed_file(converted, checkpoints, tmp_path, monkeypatch, suffix):
    from kvmem.checkpoint import stored

    original = stored.encode

    def wrong(real, source, *rest):
        parts = original(real, source, *rest)
        if suffix in parts and source.shape == ((64, 256) if suffix else (160, 64)):
            parts[suffix] = parts[suffix] * parts[suffix].dtype.type(1.5)
        return parts

    monkeypatch.setattr(stored, "encode", wrong)
    with pytest.raises(ValueError, match=r"steps from its source|is not its source rounded"):
        convert(checkpoints["glm_fp8"], tmp_path / "x", max_shard_bytes=SHARD)
