"""A demo in small: what it says, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

import visavis
from visavis.demonstration import running as demonstration
from visavis.demonstration.rates import RATES, WORLD
from visavis.demonstration.running import Plan, run_demo
from visavis.errors import RefusedOverwrite
from visavis.progress import Silent
from visavis.training.recipe_files import read_recipe

SMALL = Plan(
    num_train=50,
    num_val=10,
    num_test=30,
    recipes=("demo-triplet-hn", "demo-unified"),
    overrides={"epochs": 1, "training.batch_size": 32, "training.evaluate_every": 0, "model.width": 16, "model.word_width": 8},
)


class Listener(Silent):
    def __init__(self):
        self.said: list[str] = []
        self.worked: set[str] = set()

    def say(self, sentence):
        self.said.append(sentence)

    def work(self, what, done, total, per_s):
        self.worked.add(what)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    listener = Listener()
    return run_demo(tmp_path_factory.mktemp("demo") / "new", listener, SMALL), listener


def test_it_leaves_a_report_tables_pictures_a_data_set_and_runs(finished):
    folder, _ = finished
    left = {path.name for path in folder.iterdir()}
    files = {"report.html", "table.md", "table.json", "demo.json", "retrieval.png", "curves.png"}
    assert left == files | {"scenes", "triplethn-1", "triplethn-2", "unified-1", "unified-2"}
    table = json.loads((folder / "table.json").read_text())
    assert [row["name"] for row in table["rows"]] == ["TripletHN", "Unified"]
    assert table["rules"]["num_images"] == 30
    assert table["rows"][1]["runs"][0]["rsum"] == json.loads((folder / "unified-1" / "result.json").read_text())["rsum"]


def test_its_runs_are_runs_like_any_other(finished):
    folder, _ = finished
    best = folder / json.loads((folder / "demo.json").read_text())["best_run"]
    assert len(visavis.search(best, "a red star", inside=folder / "scenes", top=3)) == 3
    assert visavis.evaluate(best).metrics["rsum"] == json.loads((best / "result.json").read_text())["rsum"]


def test_it_says_what_it_does_and_shows_the_table(finished):
    folder, listener = finished
    said = "\n".join(listener.said)
    assert [n for n in range(1, 5) if f"{n} of 4  " in said] == [1, 2, 3, 4]
    assert listener.worked == {"scenes", "checking images", "pictures", "reading the pictures"}
    assert all(word in said for word in ("image to text", "chance", "30 images, 150 texts, 5 captions an image", "report.html"))
    assert max(len(line) for line in said.split("\n") if "±" in line and "RSUM" not in line and "seeds" not in line) <= 80
    assert str(folder) in said


def test_the_report_holds_everything_itself(finished):
    text = (finished[0] / "report.html").read_text()
    words = re.sub(r"data:image/[a-z]+;base64,[A-Za-z0-9+/=]+", "data:", text)
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(", words)
    assert {source.split(":")[0] for source in re.findall(r'(?:src|srcset)="([^"]*)"', text)} == {"data"}
    assert len(re.findall(r"<img [^>]*alt=\"[^\"]+\"", text)) == text.count("<img ") == 2 + 3 * 5
    assert all(query in text for query, _ in demonstration.SEARCHES)


def test_the_table_and_the_report_say_how_each_rate_was_chosen(finished):
    folder, listener = finished
    sentence = (
        "Learning rates: TripletHN 0.003, Unified 0.012; each the best of the same 8 from 0.000375 to 0.048 by the mean validation RSUM"
    )
    assert all(
        sentence in text for text in ("\n".join(listener.said), (folder / "table.md").read_text(), (folder / "report.html").read_text())
    )
    assert "one learning rate" not in (folder / "report.html").read_text()


def test_what_is_compared_differs_in_objective_and_rate_alone():
    recipes = [read_recipe(name) for name in Plan().recipes]
    alike = [recipe.model_dump(exclude={"name", "about", "phases"}) for recipe in (read_recipe("demo"), *recipes)]
    assert all(recipe == alike[0] for recipe in alike)
    phases = [recipe.phases[0].model_dump(exclude={"objective": True, "optimizer": {"lr"}}) for recipe in (read_recipe("demo"), *recipes)]
    assert all(phase == phases[0] for phase in phases)
    assert len({recipe.phases[0].objective for recipe in recipes}) == len(recipes) == 3
    assert {recipe.phases[0].optimizer.lr for recipe in recipes} <= set(RATES)
    assert Plan().world != WORLD


def test_it_never_writes_into_a_folder_that_holds_anything(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(RefusedOverwrite, match="nothing was changed"):
        run_demo(tmp_path, Silent(), SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_a_name_it_takes_the_next_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demonstration._Demo, "run", lambda self: None)
    assert [str(run_demo(None, Silent(), SMALL)) for _ in range(2)] == ["runs/demo-1", "runs/demo-2"]


def test_a_stop_says_what_is_kept(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    listener = Listener()
    monkeypatch.setattr(demonstration._Demo, "_cache", stop)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "new", listener, SMALL)
    assert listener.said[-1].startswith("Stopped before the report was written")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"scenes"}


def test_without_matplotlib_it_says_so_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(visavis.errors.MissingExtra, match=r"visavis\[report\]"):
        run_demo(tmp_path / "new", Silent(), SMALL)
    assert not (tmp_path / "new").exists()
