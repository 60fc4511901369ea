"""Models of installed packages: their place in lists, and errors about names that none has."""

import subprocess
import sys

import pytest

import visavis
from visavis.core import own_code
from visavis.core.errors import RecipeError
from visavis.models import all_models, find_model

PACKAGE = """
from visavis.models.image_text.cross_attention import SCAN

class Words(SCAN):
    "Words attend to regions."

    name = "Words"
    listed_after = "SCAN"
"""


def test_models_of_papers_stand_in_lists_next_to_related_ones():
    assert list(all_models()) == [
        *("Heads", "VSE++", "VSEInfinity", "VSRN", "SCAN", "BFAN", "SGRAF", "MaxSim"),
        *("CLIP", "EmbeddingModel", "XVLM", "CE", "MMT"),
    ]
    assert [entry["name"] for entry in visavis.catalog("models")["models"]] == list(all_models())


def test_model_of_another_package_is_found_and_listed(tmp_path, monkeypatch):
    (tmp_path / "lab.py").write_text(PACKAGE)
    metadata = tmp_path / "lab-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[visavis.models]\nWords = lab:Words\n")
    program = (
        "import visavis; from visavis.models import all_models, find_model; "
        "names = [entry['name'] for entry in visavis.catalog('models')['models']]; "
        "print(names == list(all_models()), names[4:6], find_model('Words'))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True ['SCAN', 'Words'] <class 'lab.Words'>"


def test_stale_installation_asks_to_install_visavis_again(monkeypatch):
    with pytest.raises(RecipeError, match=r"'XVLN' is not a model: did you mean XVLM\?$"):
        visavis.train("demo", overrides={"model.kind": "XVLN"})
    monkeypatch.setattr(own_code, "_installed", lambda group: {})
    assert find_model("XVLM") is None
    with pytest.raises(RecipeError, match=r"'XVLM' is not a model: .* install visavis again"):
        visavis.train("demo", overrides={"model.kind": "XVLM"})
