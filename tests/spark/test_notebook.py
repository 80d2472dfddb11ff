"""The notebook of the examples does what its text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "vectors.ipynb"


@pytest.mark.timeout(300)
def test_the_notebook_brings_vectors_to_a_lake_and_an_index() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()

    shown = [result(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "{'lake': 2000, 'index': 1000, '_quarantine': 0}" in shown
    assert "1000" in shown
    assert any(text.startswith("[('article-123', 0.0), ") for text in shown)


def result(cell: Any) -> str:
    """What the last expression of a cell came to."""
    found = [o.data["text/plain"] for o in cell.outputs if o.output_type == "execute_result"]
    return found[0] if found else ""
