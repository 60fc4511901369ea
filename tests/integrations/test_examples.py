"""Every example trains a model and reduces its loss."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {
    "lightning_module": ("lightning", "transformers"),
    "metric_learning_loss": ("transformers",),
    "open_clip_loss": ("transformers",),
    "sentence_transformers_loss": ("sentence_transformers", "accelerate", "datasets"),
    "transformers_trainer": ("transformers", "accelerate"),
}


def test_examples_are_all_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"tiny_models"} == set(NEEDED)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec")  # raised by lightning's use of torch
@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers"
)  # raised by lightning with more than two cores
@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.slow
def test_example_reduces_its_loss(name, capsys):
    for package in NEEDED[name]:
        pytest.importorskip(package)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    first, last = map(
        float, re.search(r"loss (\d+\.\d+) -> (\d+\.\d+)\n", capsys.readouterr().out).groups()
    )
    assert last < first / 2


@pytest.mark.slow
def test_integrations_do_not_import_their_library():
    modules = (
        "lightning",
        "pytorch_metric_learning",
        "open_clip",
        "sentence_transformers",
        "transformers",
    )
    program = f"""
import importlib, sys
import visavis.integrations
assert "torch" not in sys.modules
for name in {modules}: importlib.import_module(f"visavis.integrations.{{name}}")
assert not {{*{modules}, "pytorch_lightning"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
