import jax
import numpy as np
import pytest

from kvmem.checkpoint import hf, store
from kvmem.models import get_config
from tests.checkpoint.conftest import CASES


@pytest.mark.parametrize(("layout", "weights"), [("kimi_int4", "int4_group"), ("glm_fp8", "fp8_block")])
def test_restore_gives_back_config_and_every_bit(checkpoints, tmp_path, layout, weights):
    config, loaded, _ = hf.load(checkpoints[layout], weights, config=get_config(CASES[layout]))
    store.save(tmp_path / "x", config, weights, loaded)
    got_config, got_weights, got = store.restore(tmp_path / "x")
    assert (got_config, got_weights) == (config, weights)
    assert jax.tree.structure(got) == jax.tree.structure(loaded)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(loaded)):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_save_over_something_is_refused(tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        store.save(tmp_path, get_config("kimi_tiny_tp8"), "bf16", {})


def test_save_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.record, "write_atomic", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(tmp_path / "x", get_config("kimi_tiny_tp8"), "bf16", {"embed": np.zeros((3, 4))})
    assert list(tmp_path.iterdir()) == []


def test_restore_incomplete_or_contradicting_directory_is_refused(checkpoints, tmp_path):
    with pytest.raises(ValueError, match="no saved parameters"):
        store.restore(tmp_path)
    config, loaded, _ = hf.load(checkpoints["kimi_int4"], "bf16")
    store.save(tmp_path / "x", config, "bf16", loaded)
    facts = tmp_path / "x" / "kvmem.json"
    original = facts.read_text()
    facts.write_text(original.replace("bf16", "bf17"))
    with pytest.raises(ValueError, match="weights='bf17'"):
        store.restore(tmp_path / "x")
    facts.write_text(original.replace("bf16", "int4_group"))
    with pytest.raises(ValueError, match="mismatch"):
        store.restore(tmp_path / "x")
