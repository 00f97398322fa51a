import pytest

from kvmem.checkpoint import fixture
from kvmem.models import get_config

CASES = {
    "kimi_int4": "kimi_tiny_tp8",
    "glm_fp8": "glm_tiny_tp8",
    "glm_bf16": "glm_tiny_tp8",
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """One written directory per published layout; tests that damage one copy it first."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        layout: fixture.write(root / layout, get_config(name), 3, layout, max_shard_bytes=2**20)
        for layout, name in CASES.items()
    }
