import pathlib

import jupytext
import nbclient
import pytest

from experiments import aggregate

NOTEBOOKS = aggregate.ROOT / "experiments" / "notebooks"


@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.py")), ids=lambda p: p.stem)
def test_notebook_runs_from_top_to_bottom(path: pathlib.Path, demo_record, monkeypatch):
    monkeypatch.setenv("KVMEM_RECORD", str(demo_record))
    notebook = jupytext.read(path)
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": aggregate.ROOT}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = "".join(output["data"]["text/plain"] for output in outputs if "data" in output)
    assert not [output for output in outputs if output.output_type == "error"]
    assert "'status': 'ok'" in shown
    assert "memory.kimi.params" in shown
