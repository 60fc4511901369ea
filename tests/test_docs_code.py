"""README and docs: blocks that run alone or in a changed copy of the package. Commands, options,
recipes and names that are not run exist. tests/test_docs_commands.py runs whole pages.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import torch
import typer
from tests.docs import (
    PAGES,
    PROJECT,
    Block,
    patch_file,
    read_blocks,
    split_commands,
)
from torch.nn.functional import normalize

from visavis import cli
from visavis.core.errors import MissingExtra
from visavis.data.feedback.sources import read_feedback
from visavis.training.recipes import settings
from visavis.training.recipes.files import read_recipe

COMING_FROM = "docs/guides/coming-from.md"
EXTENSIONS = ("docs/guides/extend.md", "docs/tutorials/own-loss.md")
"""Pages whose blocks change the package."""
SECTIONS = {
    "data": settings.DataSettings,
    "visual": settings.VisualSettings,
    "text": settings.TextSettings,
    "optimizer": settings.OptimizerSettings,
}


# docs/guides/coming-from.md: each block runs alone, on tiny models and random data.

LIBRARIES = {
    "sentence-transformers": ("sentence_transformers", "accelerate", "datasets"),
    "open_clip": ("open_clip",),
    "pytorch-metric-learning": ("pytorch_metric_learning",),
}
"""Packages of each library. The tab of visavis needs none of the last two."""
EQUAL_VALUES = [
    ("sentence-transformers", "Get the same value"),
    ("sentence-transformers", "Train on batches larger than memory"),
    ("open_clip", "Swap the loss in the training step"),
    ("open_clip", "Train with the sigmoid loss"),
    ("pytorch-metric-learning", "Get the same value"),
]
TABS = read_blocks(COMING_FROM, "python")


def sentence_transformer_names(folder):
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
    return {
        "model": model,
        "args": args,
        "train_dataset": Dataset.from_dict(columns),
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


def run_tab(block: Block, folder):
    """Execute a block and return the names that it leaves."""
    torch.manual_seed(0)
    if block.tab != "visavis" or block.section == "sentence-transformers":
        for package in LIBRARIES[block.section]:
            pytest.importorskip(package)
    if block.section == "sentence-transformers":
        names = sentence_transformer_names(folder)
    else:
        names = clip_names() if block.section == "open_clip" else metric_learning_names()
    exec(compile(block.text, f"{block.section}, {block.subsection}, {block.tab}", "exec"), names)
    return names


def test_page_has_two_tabs_per_section():
    sections = dict[tuple[str, str], list[str]]()
    for block in TABS:
        sections.setdefault((block.section, block.subsection), []).append(block.tab)
    assert len(sections) >= 10
    assert {library for library, _ in sections} == set(LIBRARIES)
    assert all(tabs == [library, "visavis"] for (library, _), tabs in sections.items())
    assert set(EQUAL_VALUES) <= set(sections)


@pytest.mark.parametrize(
    "block", TABS, ids=lambda block: f"{block.subsection}-{block.tab}".replace(" ", "_")
)
@pytest.mark.slow
def test_tab_computes_a_finite_loss(block, tmp_path):
    names = run_tab(block, tmp_path)
    if "trainer" in names:
        value = names["trainer"].state.log_history[0]["loss"]
    else:
        value = names["value"].item()
    assert 0 < value < float("inf")


@pytest.mark.parametrize("section", EQUAL_VALUES)
def test_tabs_compute_equal_values(section, tmp_path):
    blocks = [block for block in TABS if (block.section, block.subsection) == section]
    theirs, ours = (run_tab(block, tmp_path)["value"].item() for block in blocks)
    assert ours == pytest.approx(theirs, rel=1e-5)


# Pages that extend the package: all their files in one copy, and all their uses in one process.

RUN_ALL = """
import contextlib, io, json, os, sys, traceback
import visavis
assert visavis.__file__.startswith(sys.argv[1])
results = {}
for title, use in json.load(sys.stdin).items():
    os.chdir(title)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(use, title, "exec"), {"__name__": "__main__"})
    except BaseException:
        results[title] = [False, traceback.format_exc()]
    else:
        results[title] = [True, printed.getvalue()]
    os.chdir("..")
print(json.dumps(results), file=open("results.json", "w"))
"""
ADDITIONS = dict[str, list[Block]]()
for _page in EXTENSIONS:
    for _block in read_blocks(_page, "python", "diff"):
        # The tutorial is one addition with several headings.
        ADDITIONS.setdefault("Objective" if "own" in _page else _block.section, []).append(_block)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """The package with all additions."""
    root = tmp_path_factory.mktemp("extended")
    # Compiled modules save time. Python writes them under temporary names first.
    shutil.copytree(PROJECT / "src", root / "src", ignore=shutil.ignore_patterns("*.pyc.*"))
    for blocks in ADDITIONS.values():
        for block in blocks:
            file = root / block.file
            if block.language == "diff":
                content = patch_file(file.read_text(encoding="utf-8"), block.text)
                file.write_text(content, encoding="utf-8")
            elif block.file.startswith("src/"):
                assert not file.exists(), f"{block.file} already exists"
                file.write_text(block.text, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def results(extended, tmp_path_factory):
    """Whether each addition works, and what its use prints or why it fails."""
    uses = dict[str, str]()
    for title, blocks in ADDITIONS.items():
        (uses[title],) = [
            block.text for block in blocks if block.language == "python" and not block.file
        ]
    folder = tmp_path_factory.mktemp("used")
    # Other files are written where the user works.
    for title, blocks in ADDITIONS.items():
        (folder / title).mkdir()
        for block in blocks:
            if block.file and not block.file.startswith("src/"):
                (folder / title / block.file).write_text(block.text, encoding="utf-8")
    process = subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(extended)],
        input=json.dumps(uses),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(extended / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("title", ADDITIONS)
def test_addition_runs_as_written(title, results):
    works, text = results[title]
    assert works, text
    if title == "Objective":
        assert "About" in text


@pytest.mark.parametrize("title", ADDITIONS)
def test_addition_changes_at_most_three_files(title):
    limit = 3 if title == "Objective" else 2
    assert 1 <= len({block.file for block in ADDITIONS[title] if block.file}) <= limit


def test_every_addition_is_found():
    assert len(ADDITIONS) >= 5


# Blocks that do not run.


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page):
    root = typer.main.get_command(cli.app)
    text = (PROJECT / page).read_text(encoding="utf-8")
    spans = re.findall(r"(?<!`)`(visavis [^`]+)`", text)
    texts = [block.text for block in read_blocks(page, "sh", "console")]
    for words in split_commands("\n".join([*texts, *(span.replace("\n", " ") for span in spans)])):
        command = root
        while words[:1] == ["--code"]:  # options of visavis itself stand before the command
            words = words[2:]
        while hasattr(command, "commands") and words and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
        assert command.name is not None, words
        is_runnable = (
            not hasattr(command, "commands")
            or command.name == "relevance"
            or all(word.startswith("--") for word in words)
        )
        assert is_runnable, f"no such command: {words}"
        options = {"--help"} | {
            name
            for parameter in command.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= options, (command.name, words)
        for word in words:
            section, _, key = re.sub(r"^phases\.\d+\.", "", word.partition("=")[0]).partition(".")
            if "=" in word and section in SECTIONS:
                assert key in SECTIONS[section].model_fields, word


def test_recipes_are_valid(tmp_path):
    complete = 0
    for page in PAGES:
        for number, block in enumerate(read_blocks(page, "toml")):
            content = tomllib.loads(block.text)
            if "name" in content:
                path = tmp_path / f"{page.replace('/', '-')}-{number}.toml"
                path.write_text(block.text, encoding="utf-8")
                variants = [f"{path}/{variant}" for variant in content.get("variants", {})]
                for name in variants or [path]:
                    assert read_recipe(name).phases
                complete += 1
            for section in SECTIONS.keys() & content.keys():
                SECTIONS[section].model_validate(content[section])
    assert complete >= 3


def test_names_of_python_blocks_can_be_imported():
    for page in PAGES:
        if page in EXTENSIONS:
            continue
        for block in read_blocks(page, "python"):
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("visavis"):
                    try:
                        module = importlib.import_module(node.module)
                    except MissingExtra:  # LangChain and LlamaIndex
                        continue
                    missing = [name.name for name in node.names if not hasattr(module, name.name)]
                    assert missing == [], page


def test_feedback_record_is_read(tmp_path):
    (block,) = read_blocks("docs/guides/feedback.md", "json")
    path = tmp_path / "votes.jsonl"
    path.write_text(block.text, encoding="utf-8")
    (record,) = read_feedback(path)
    assert record.item == json.loads(block.text)["item"]
    assert record.relevant


def test_readme_links_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", (PROJECT / "README.md").read_text("utf-8")):
        if not target.startswith("http"):
            assert (PROJECT / target).exists(), target
