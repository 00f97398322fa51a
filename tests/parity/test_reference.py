import ast
import json
import pathlib
import sys

import numpy as np
import pytest

from tests.parity import reference

WRITER = pathlib.Path(__file__).parent / "write_reference.py"


def test_write_reference_imports_only_torch_and_transformers():
    tree = ast.parse(WRITER.read_text())
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) == {"torch", "transformers"}


@pytest.mark.parametrize("case", reference.CASES)
def test_reference_case_is_complete_and_its_selections_have_margin(case):
    stored = reference.read(case)
    facts = json.loads((stored.directory / "reference.json").read_text())
    assert facts["smallest_margin"] >= 1e-4
    config = json.loads((stored.directory / "config.json").read_text())
    lengths = [len(tokens) for tokens in stored.tokens]
    assert len(set(lengths)) == len(lengths) >= 3
    assert max(lengths) >= 33
    for tokens, logits in zip(stored.tokens, stored.logits):
        assert logits.shape == (len(tokens), config["vocab_size"])
        assert np.isfinite(logits).all()
        assert tokens.min() >= 0
        assert tokens.max() < config["vocab_size"]
    if case.startswith("glm"):
        assert "".join(kind[0] for kind in config["indexer_types"]).upper() == "FFFSSSFS"
        assert config["index_n_heads"] >= 32
        assert config["index_topk"] == 8
        assert config["v_head_dim"] != config["qk_nope_head_dim"]
    else:
        assert (config["n_group"], config["topk_group"], config["routed_scaling_factor"]) == (2, 1, 2.827)
        assert config["rope_parameters"]["rope_type"] == "yarn"
