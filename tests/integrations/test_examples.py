"""Every example trains a model and reduces its loss."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
def test_example_reduces_its_loss(name, capsys):
    for package in NEEDED[name]:
        pytest.importorskip(package)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    first, last = map(
        float, re.search(r"loss (\d+\.\d+) -> (\d+\.\d+)\n", capsys.readouterr().out).groups()
    )
    assert last < first / 2


def test_losses_only_guide_code_runs():
    names = {}
    for block in re.findall(
        r"```python\n(.*?)```",
        (EXAMPLES.parent / "docs" / "guides" / "losses-only.md").read_text(),
        re.DOTALL,
    ):
        exec(compile(block, "losses-only.md", "exec"), names)
    images, texts = torch.eye(2), torch.eye(2).repeat(3, 1)
    assert (
        names["loss"](images, texts, [0, 1], [0, 1] * 3)
        < 1e-6
        < names["loss"](images, texts, [0, 1], [1, 0] * 3)
    )


@pytest.mark.parametrize("page", ["integrations", "mteb"])
def test_integration_guide_code_runs(page, tmp_path, monkeypatch):
    if page == "mteb":
        pytest.importorskip("mteb")
    monkeypatch.setattr("visavis.load", lambda _: SimpleNamespace(
        processor=SimpleNamespace(visual_spec=SimpleNamespace(frames_per_second=0.0)), fingerprint="0", matcher=torch.nn.Linear(2, 2), embedding_dim=None
    ))  # fmt: skip
    names = {}
    blocks = re.findall(
        r"```python\n(.*?)```",
        (EXAMPLES.parent / "docs" / "guides" / f"{page}.md").read_text(),
        re.DOTALL,
    )
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert blocks
    if page == "integrations":
        items, labels = torch.randn(4, 128), torch.arange(4) // 2
        assert names["memory_loss"](items, labels) > 0 < names["views_loss"](items, items.flip(0))


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
