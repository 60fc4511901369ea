"""Results as tables of notebooks, and the tutorial notebook."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

import visavis
from visavis import api
from visavis.core.data_uris import thumbnail_uri
from visavis.core.errors import MissingExtra
from visavis.core.result import MAX_HTML_ROWS, Result, flat_record, record_table
from visavis.evaluation.classification import ZeroShotResult

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorials" / "notebook.ipynb"
OTHER_RESULTS = {
    "None",
    "Path",  # data_scenes and demo return a folder
    "Retriever",
    "CheckpointConversion",
    "ConversionReport",
    "list[EnvironmentCheck]",
    "list[FeatureStore]",
    "list[tuple[str, float]]",
    "Basis",  # a word
    "str",  # the name of a model
    "dict[str, list[dict[str, Any]]]",
}


@dataclass
class Rows(Result):
    """Rows of a test."""

    content: list
    images: tuple = ()
    ROWS = "rows"

    def to_json(self):
        return {"rows": self.content}

    def tables(self):
        return [record_table(self.records(), self.images)]


def test_flat_record_joins_keys_and_leaves_out_lists_of_objects():
    row = flat_record(
        {"a": {"b": {1: 2}}, "empty": [], "names": ("x", "y"), "nested": [[1]], "none": None}
    )
    assert row == {"a.b.1": 2, "empty": "", "names": "x, y", "none": None}


def test_notebook_html_escapes_values_and_limits_rows():
    html = Rows(
        [{"<b>": "<script>", "number": 1234.5678}, {"<b>": None, "other": True}] * 40
    )._repr_html_()
    assert "<script>" not in html
    assert "<b>" not in html
    assert "&lt;script&gt;" in html
    assert "1,234.6" in html
    assert html.count("<tr>") == 1 + MAX_HTML_ROWS
    assert f"{80 - MAX_HTML_ROWS} more rows" in html
    assert "No entries." in Rows([])._repr_html_()


def test_notebook_html_shows_one_row_as_names_and_values():
    assert Rows([{"a": 1, "b": "x"}])._repr_html_().count("<tr>") == 2


def test_notebook_html_embeds_images():
    image = Image.new("RGBA", (400, 300), "red")
    html = Rows([{"a": 1}, {"a": 2}], (thumbnail_uri(image), ""))._repr_html_()
    assert html.count("data:image/jpeg;base64,") == 1
    assert image.size == (400, 300)


def test_to_pandas_without_pandas_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"visavis\[notebook\]"):
        Rows([]).to_pandas()


def test_api_results_are_results():
    # Imported here only by its command, so that the test also passes alone.
    assert issubclass(ZeroShotResult, Result)
    tables = {kind.__name__ for kind in all_subclasses(Result)}
    for name in api.__all__:
        returned = inspect.signature(getattr(visavis, name)).return_annotation
        for kind in returned.split(" | "):
            is_table = kind.removeprefix("list[").removesuffix("]") in tables
            assert is_table or kind in OTHER_RESULTS, name


def all_subclasses(kind):
    for module in (
        "research.attention_maps",
        "research.audit.run_audit",
        "data.dataset_reader",
        "papers.diagnostics.contribution_analysis",
        "papers.diagnostics.objective_profile",
        "research.experiments.comparison_result",
        "papers.reproduction.reproduction",
        "training.export.export_model",
        "evaluation.feedback_metrics",
        "papers.relevance.estimator_quality",
        "papers.relevance.fine_tuning",
        "integrations.mteb",
        "papers.relevance.human_agreement",
        "papers.relevance.ranked_lists",
        "retrieval.build.index_builder",
        "retrieval.build.index_queries",
        "retrieval.search",
        "papers.probes",
        "training.runs.mine_negatives",
        "training.training_run",
    ):
        __import__(f"visavis.{module}")
    return kind.__subclasses__()


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_tutorial_notebook_runs(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    tables = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", ())
    ]
    assert len(tables) == 7
    assert sum("data:image/jpeg" in table for table in tables) == 1
    assert any("Best on validation" in table for table in tables)


def test_tutorial_notebook_has_no_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert [
        cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")
    ] == []
