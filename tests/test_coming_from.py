"""Every Python block of docs/guides/coming-from.md runs, on tiny models and random data."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import normalize

PROJECT = Path(__file__).parents[1]
PAGE = PROJECT / "docs" / "guides" / "coming-from.md"
NEEDED = {
    "sentence-transformers": ("sentence_transformers", "accelerate", "datasets"),
    "open_clip": (),
    "pytorch-metric-learning": (),
}
EQUAL_VALUES = [
    ("sentence-transformers", "Get the same value"),
    ("sentence-transformers", "Train on batches larger than memory"),
    ("open_clip", "Swap the loss in the training step"),
    ("open_clip", "Train with the sigmoid loss"),
    ("pytorch-metric-learning", "Get the same value"),
]


class Block(NamedTuple):
    library: str
    section: str
    tab: str
    code: str


def read_blocks() -> list[Block]:
    """The Python blocks of the page with their headings and tabs."""
    blocks, library, section, tab = [], "", "", ""
    pattern = r"^## (?P<library>[^\n]+)$|^### (?P<section>[^\n]+)$|^=== \"(?P<tab>[^\"]+)\"$|^ *```python\n(?P<code>.*?)^ *```$"
    for match in re.finditer(pattern, PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        library, section, tab = (
            match["library"] or library,
            match["section"] or section,
            match["tab"] or tab,
        )
        if match["code"]:
            blocks.append(Block(library, section, tab, textwrap.dedent(match["code"])))
    return blocks


BLOCKS = read_blocks()


def sentence_transformer_names(folder):
    for package in NEEDED["sentence-transformers"]:
        pytest.importorskip(package)
    sys.path.append(str(PROJECT / "examples"))
    import tiny_models
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainingArguments

    columns = tiny_models.sentences()
    question_ids = columns.pop("label")
    model = tiny_models.tiny_sentence_transformer().eval()
    args = SentenceTransformerTrainingArguments(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=8,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
    )
    features = [model.preprocess(columns[name]) for name in ("anchor", "positive")]
    dataset = Dataset.from_dict(columns)
    return {
        "model": model,
        "args": args,
        "train_dataset": dataset,
        "question_ids": question_ids,
        "features": features,
    }


def clip_names():
    images, texts = (normalize(torch.randn(8, 16), dim=1) for _ in range(2))
    outputs = {"image_features": images, "text_features": texts, "logit_scale": torch.tensor(14.0)}
    return {
        "model_out": outputs,
        "logit_bias": torch.tensor(-10.0),
        "image_ids": torch.arange(4).repeat_interleave(2),
    }


def metric_learning_names():
    labels = torch.arange(4).repeat_interleave(2)
    names = {
        name: torch.randn(8, 16, requires_grad=True) for name in ("embeddings", "images", "texts")
    }
    ids = dict.fromkeys(("labels", "image_ids", "text_ids"), labels)
    return names | ids | {"queue": torch.randn(6, 16), "queue_ids": torch.arange(6)}


def run_block(block, folder):
    """Execute a block and return the names that it leaves."""
    torch.manual_seed(0)
    if block.tab == "open_clip":
        pytest.importorskip("open_clip")
    if block.tab == "pytorch-metric-learning":
        pytest.importorskip("pytorch_metric_learning")
    if block.library == "sentence-transformers":
        names = sentence_transformer_names(folder)
    else:
        names = clip_names() if block.library == "open_clip" else metric_learning_names()
    exec(compile(block.code, f"coming-from.md, {block.section}, {block.tab}", "exec"), names)
    return names


def test_page_has_two_tabs_per_section():
    sections = {}
    for block in BLOCKS:
        sections.setdefault((block.library, block.section), []).append(block.tab)
    assert len(sections) >= 10
    assert {library for library, _ in sections} == set(NEEDED)
    assert all(tabs == [library, "visavis"] for (library, _), tabs in sections.items())
    assert set(EQUAL_VALUES) <= set(sections)


@pytest.mark.parametrize(
    "block", BLOCKS, ids=lambda block: f"{block.section}-{block.tab}".replace(" ", "_")
)
def test_block_computes_a_finite_loss(block, tmp_path):
    names = run_block(block, tmp_path)
    value = (
        names["trainer"].state.log_history[0]["loss"]
        if "trainer" in names
        else names["value"].item()
    )
    assert 0 < value < float("inf")


@pytest.mark.parametrize(("library", "section"), EQUAL_VALUES)
def test_tabs_compute_equal_values(library, section, tmp_path):
    theirs, ours = (
        run_block(block, tmp_path)["value"].item()
        for block in BLOCKS
        if block[:2] == (library, section)
    )
    assert ours == pytest.approx(theirs, rel=1e-5)
