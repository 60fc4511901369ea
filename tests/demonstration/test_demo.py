"""A small demo: its messages, files, report and errors."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest
from tests.processes import fork_workers

import visavis
from visavis.core.errors import RefusedOverwrite
from visavis.core.progress import NoProgress
from visavis.research import demo_run
from visavis.research.demo_run import (
    LEARNING_RATES,
    TUNING_SCENE_SEED,
    DemoSettings,
    run_demo,
)
from visavis.training.recipes.files import read_recipe

pytestmark = pytest.mark.slow

SMALL = DemoSettings(
    num_train=50,
    num_val=10,
    num_test=30,
    recipes=("demo-triplet-hn", "demo-unified"),
    overrides={
        "epochs": 1,
        "training.batch_size": 32,
        "training.evaluate_every": 0,
        "model.embedding_dim": 16,
        "model.word_dim": 8,
    },
)


class RecordedProgress(NoProgress):
    def __init__(self):
        self.messages: list[str] = []
        self.tasks: set[str] = set()

    def message(self, text):
        self.messages.append(text)

    def update(self, task, done, total, items_per_second):
        self.tasks.add(task)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    progress = RecordedProgress()
    with pytest.MonkeyPatch.context() as monkeypatch:
        fork_workers(monkeypatch)
        return run_demo(tmp_path_factory.mktemp("demo") / "new", progress, SMALL), progress


def test_demo_writes_report_tables_plots_data_and_runs(finished):
    folder, _ = finished
    names = {path.name for path in folder.iterdir()}
    files = {"report.html", "table.md", "table.json", "demo.json", "retrieval.png", "curves.png"}
    assert names == files | {"scenes", "triplethn-1", "triplethn-2", "unified-1", "unified-2"}
    table = json.loads((folder / "table.json").read_text())
    assert [row["name"] for row in table["rows"]] == ["TripletHN", "Unified"]
    assert table["conditions"]["num_images"] == 30
    assert (
        table["rows"][1]["runs"][0]["rsum"]
        == json.loads((folder / "unified-1" / "result.json").read_text())["rsum"]
    )


def test_demo_results_do_not_depend_on_the_number_of_processes(finished, tmp_path, monkeypatch):
    folder, _ = finished
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    written = []
    monkeypatch.setattr(demo_run, "write_demo_report", lambda results, _: written.append(results))
    alone = run_demo(tmp_path / "alone", NoProgress(), SMALL)
    for run in ("triplethn-1", "triplethn-2", "unified-1", "unified-2"):
        weights = [
            (each / run / "model" / "model.safetensors").read_bytes() for each in (folder, alone)
        ]
        assert weights[0] == weights[1]
    (results,) = written
    assert results.compared.to_json() == json.loads((folder / "table.json").read_text())
    searches = {search.query: search.num_relevant for search in results.searches}
    assert searches == json.loads((folder / "demo.json").read_text())["searches"]


def test_demo_runs_can_be_searched_and_evaluated(finished):
    folder, _ = finished
    best = folder / json.loads((folder / "demo.json").read_text())["best_run"]
    assert len(visavis.search(best, "a red star", collection=folder / "scenes", top=3)) == 3
    assert (
        visavis.evaluate(best).metrics["rsum"]
        == json.loads((best / "result.json").read_text())["rsum"]
    )


def test_demo_reports_its_stages_and_the_table(finished):
    folder, progress = finished
    output = "\n".join(progress.messages)
    assert [n for n in range(1, 5) if f"{n} of 4  " in output] == [1, 2, 3, 4]
    assert progress.tasks >= {"scenes", "images"}
    assert all(
        text in output
        for text in ("image to text", "chance", "30 images, 150 texts", "report.html")
    )
    assert (
        max(len(line) for line in output.split("\n") if "–" in line and "seeds" not in line) <= 80
    )
    assert str(folder) in output


def test_demo_report_is_a_single_offline_file(finished):
    text = (finished[0] / "report.html").read_text()
    markup = re.sub(r"data:image/[a-z]+;base64,[A-Za-z0-9+/=]+", "data:", text)
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(", markup)
    assert {source.split(":")[0] for source in re.findall(r'(?:src|srcset)="([^"]*)"', text)} == {
        "data"
    }
    assert len(re.findall(r"<img [^>]*alt=\"[^\"]+\"", text)) == text.count("<img ") == 2 + 3 * 5
    assert all(query in text for query, _ in demo_run.DEMO_QUERIES)


def test_demo_documents_its_learning_rates(finished):
    folder, progress = finished
    text = "Learning rates: TripletHN 0.003, Unified 0.012. Each is the best of the same 8 from 0.000375 to 0.048 by the mean validation RSUM"
    assert all(
        text in output
        for output in (
            "\n".join(progress.messages),
            (folder / "table.md").read_text(),
            (folder / "report.html").read_text(),
        )
    )


def test_demo_recipes_differ_in_objective_and_learning_rate():
    recipes = [read_recipe(name) for name in DemoSettings().recipes]
    contents = [
        recipe.model_dump(exclude={"name", "about", "phases"})
        for recipe in (read_recipe("demo"), *recipes)
    ]
    assert all(content == contents[0] for content in contents)
    phases = [
        recipe.phases[0].model_dump(exclude={"objective": True, "optimizer": {"lr"}})
        for recipe in (read_recipe("demo"), *recipes)
    ]
    assert all(phase == phases[0] for phase in phases)
    assert len({recipe.phases[0].objective for recipe in recipes}) == len(recipes) == 3
    assert {recipe.phases[0].optimizer.lr for recipe in recipes} <= set(LEARNING_RATES)
    assert DemoSettings().scene_seed != TUNING_SCENE_SEED


def test_demo_rejects_a_folder_with_files(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(RefusedOverwrite, match="empty"):
        run_demo(tmp_path, NoProgress(), SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_demo_numbers_its_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_run, "_run_stages", lambda *_: None)
    assert [str(run_demo(None, NoProgress(), SMALL)) for _ in range(2)] == [
        "runs/demo-1",
        "runs/demo-2",
    ]


def test_demo_reports_its_folder_when_stopped(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "cache_features", stop)
    sizes = replace(SMALL, num_train=2, num_val=2, num_test=2)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run_demo(tmp_path / "new", NoProgress(), sizes)
    assert stopped.value.__notes__[0].startswith(f"{tmp_path / 'new'} has the finished parts")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"scenes"}
