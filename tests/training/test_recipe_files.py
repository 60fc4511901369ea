"""Recipes that extend others and grids of rows: what they resolve to, and sentences for what they cannot."""

import hashlib
import json
import re
from pathlib import Path

import pytest

import visavis
from visavis.data.scenes import write_scenes
from visavis.errors import RecipeError, VisavisError
from visavis.models import CATALOG
from visavis.training.recipe import build_recipe
from visavis.training.recipe_files import read_file, read_recipe, shipped, shipped_names

BASE = """
name = "base"
about = "A base."
[visual]
tower = "scenes"
[model]
kind = "VSE++"
width = 8
[training]
batch_size = 16
[[phases]]
epochs = 3
objective = "Unified()"
optimizer = { name = "SGD", lr = 0.1, lr_multipliers = { text = 2.0 } }
schedule = { kind = "step", milestones = [2] }
[[phases]]
epochs = 4
objective = "Triplet()"
"""

SHIPPED = {
    "cocos-triplet-flickr30k": "f79bab57",
    "cocos-triplet-hn-flickr30k": "3b511b27",
    "cocos-nt-xent-flickr30k": "49d12361",
    "cocos-smooth-ap-flickr30k": "2b1c0feb",
    "cocos-triplet-flickr8k": "c1c8a92e",
    "cocos-triplet-hn-flickr8k": "945317af",
    "cocos-nt-xent-flickr8k": "bde09cf6",
    "cocos-smooth-ap-flickr8k": "c4967874",
    "cvse++-flickr30k": "75b53fca",
    "cvse++-coco": "bd88efd3",
    "cvse++-two-step-flickr30k": "f373096f",
    "cvse++-two-step-coco": "70a0c590",
    "demo": "a457bdf5",
    "demo-triplet-hn": "d3fb3d54",
    "demo-unified": "6a588781",
    "demo-vlc": "0fecf9da",
    "heads-flickr8k": "e3dee650",
    "ladder-scenes": "7bb2e165",
    "aoq-heads-flickr8k": "8dee9a55",
    "ladder-heads-flickr8k": "5bad4dc3",
    "learned-weights-heads-flickr8k": "27241153",
    "ncr-heads-flickr8k": "e0ac448d",
    "vse++-two-step-scenes": "8142485c",
    "vse-infinity-flickr8k": "2ab8660c",
    "vse-infinity-minilm-flickr8k": "f832ba35",
}
"""Names that results were reported under, and a hash of what each recipe says of its training beyond the defaults."""


def digest(recipe):
    said = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"published"})
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]


@pytest.fixture
def resolved(tmp_path):
    """The recipe of a file that extends BASE by some lines."""
    (tmp_path / "base.toml").write_text(BASE)

    def resolve(lines, row=None):
        (tmp_path / "child.toml").write_text('extends = "base.toml"\nname = "child"\n' + lines)
        return read_recipe(tmp_path / "child.toml" if row is None else f"{tmp_path}/child.toml/{row}")

    return resolve


@pytest.fixture
def base(tmp_path, resolved):
    return read_recipe(tmp_path / "base.toml")


def test_a_name_that_results_were_reported_under_means_what_it_meant():
    assert {name: digest(read_recipe(name)) for name in SHIPPED} == SHIPPED


@pytest.mark.parametrize("name", shipped_names())
def test_a_recipe_that_ships_is_complete_and_bears_its_name(name):
    recipe = read_recipe(name)
    assert recipe.name == name
    assert recipe.about
    assert recipe.model["kind"] in CATALOG
    assert build_recipe(recipe.to_dict(), {}, name) == recipe, "what run.toml keeps is the whole recipe"
    file, row = shipped_names()[name]
    assert read_recipe(file if row is None else f"{file}/{row}") == recipe


@pytest.mark.parametrize("name", shipped())
def test_a_file_that_ships_bears_its_name_and_has_a_line_of_its_own(name):
    content = read_file(name).content
    assert content["name"] == name
    assert content["about"]


def test_a_recipe_that_extends_another_differs_in_what_it_says_alone(base, resolved):
    assert resolved("") == base.model_copy(update={"name": "child", "about": ""})
    assert resolved("[training]\nclip_norm = 1.0").training == base.training.model_copy(update={"clip_norm": 1.0})
    assert resolved("seed = 7").seed == 7


def test_a_table_with_a_kind_replaces_the_other_whole(base, resolved):
    assert resolved("[model]\nword_width = 4").model == {"kind": "VSE++", "width": 8, "word_width": 4}
    assert resolved('[model]\nkind = "Heads"').model == {"kind": "Heads"}
    schedule = resolved('[phases.0]\nschedule = { kind = "cosine" }').phases[0].schedule
    assert (schedule.kind, schedule.milestones) == ("cosine", ())


def test_a_model_written_as_a_text_is_extended_as_its_table(tmp_path):
    (tmp_path / "parent.toml").write_text(
        BASE.replace('[model]\nkind = "VSE++"\nwidth = 8\n', "").replace('about = "A base."', 'model = "VSE++(width=8)"')
    )
    (tmp_path / "child.toml").write_text(
        'extends = "parent.toml"\nname = "child"\n[model]\nword_width = 4\n[rows.heads]\nmodel = "Heads"\n[rows.same]\n'
    )
    assert {row: read_recipe(f"{tmp_path}/child.toml/{row}").model for row in ("heads", "same")} == {
        "heads": {"kind": "Heads"},
        "same": {"kind": "VSE++", "width": 8, "word_width": 4},
    }


def test_phases_are_replaced_or_changed_by_their_number(base, resolved):
    only = resolved('[[phases]]\nepochs = 1\nobjective = "VLC()"').phases
    assert [phase.epochs for phase in only] == [1]
    changed = resolved("[phases.1]\nepochs = 9\n[phases.0.optimizer]\nrate = 0.5").phases
    assert [phase.epochs for phase in changed] == [3, 9]
    assert changed[0].optimizer == base.phases[0].optimizer.model_copy(update={"lr": 0.5}), "old names of keys hold here too"
    assert changed[1].objective == base.phases[1].objective


def test_short_keys_reach_into_the_phases_as_in_overrides(tmp_path, resolved):
    assert resolved('objective = "VLC(gamma=3)"') == read_recipe(
        tmp_path / "base.toml", {"objective": "VLC(gamma=3)", "name": "child", "about": ""}
    )
    with pytest.raises(RecipeError, match=r"epochs= is for recipes of one phase, and this one has 2"):
        resolved("epochs = 3")


def test_a_row_is_the_recipe_with_its_overrides(base, resolved):
    lines = '[rows.small]\nmodel.width = 4\nphases.1.epochs = 1\n[rows.other]\nname = "mine"\nabout = "Mine."\nobjective = "VLC()"\n'
    small, other = resolved(lines, "small"), resolved(lines, "other")
    overrides = {"model.width": 4, "phases.1.epochs": 1, "name": "child-small", "about": ""}
    assert small == build_recipe(base.to_dict(), overrides, "base")
    assert (other.name, other.about, other.model) == ("mine", "Mine.", base.model)
    with pytest.raises(
        RecipeError, match=r"child\.toml is a grid: name the row to train, such as .*child\.toml/small; rows: small, other\.$"
    ):
        resolved(lines)
    with pytest.raises(RecipeError, match=r"child\.toml has no row smal: did you mean small\?"):
        resolved(lines, "smal")


def test_rows_are_taken_over_but_not_their_names(tmp_path, resolved):
    resolved('[rows.a]\nname = "first"\nseed = 1\n[rows.b]\nseed = 2\n', "a")
    (tmp_path / "grandchild.toml").write_text('extends = "child.toml"\nname = "g"\nseed = 5\n[rows.b]\nmodel.width = 2\n[rows.c]\n')
    recipes = {row: read_recipe(f"{tmp_path}/grandchild.toml/{row}") for row in "abc"}
    assert {row: (recipe.name, recipe.seed, recipe.model["width"]) for row, recipe in recipes.items()} == {
        "a": ("g-a", 1, 8),
        "b": ("g-b", 2, 2),
        "c": ("g-c", 5, 8),
    }
    (tmp_path / "one.toml").write_text('extends = "child.toml/b"\nname = "one"\n')
    assert read_recipe(tmp_path / "one.toml") == recipes["b"].model_copy(update={"name": "one", "model": {"kind": "VSE++", "width": 8}})


def test_the_recipes_of_the_page_are_read_as_they_stand_there(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text()
    whole, grid = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "whole.toml").write_text(whole)
    (tmp_path / "grid.toml").write_text(grid)
    assert [phase.epochs for phase in read_recipe(tmp_path / "whole.toml").phases] == [15, 5]
    small, warm = (read_recipe(f"{tmp_path}/grid.toml/{row}") for row in ("small", "warm"))
    assert (small.name, small.model["width"], small.phases[0].optimizer.lr) == ("my-heads-small", 256, 3e-4)
    assert (warm.name, warm.phases[0].schedule.warmup, warm.training.batch_size) == ("my-warm-heads", 0.2, 128)


@pytest.mark.parametrize("parent", ["demo", "ladder-heads-flickr8k", "cocos-flickr8k/nt-xent"])
def test_what_ships_can_be_extended_by_every_name_it_has(tmp_path, parent):
    (tmp_path / "mine.toml").write_text(f'extends = "{parent}"\nname = "mine"\n')
    assert read_recipe(tmp_path / "mine.toml") == read_recipe(parent).model_copy(update={"name": "mine", "about": "", "published": ""})


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('extends = "demoo"', r"mine\.toml, extends: demoo is neither a TOML file nor a recipe that ships: did you mean demo\?"),
        ('extends = "gone.toml"', r"gone\.toml cannot be read: No such file"),
        ('extends = "cocos-flickr8k/hn"', r"cocos-flickr8k has no row hn: known: nt-xent, smooth-ap, triplet, triplet-hn\."),
        ('extends = "demo/hn"', r"demo has no row hn: it is one recipe without rows\."),
        ('extends = "mine.toml"', r"mine\.toml extends itself, by way of mine\.toml: a recipe cannot be its own beginning"),
        ('extends = "other.toml"', r"mine\.toml extends itself, by way of other\.toml"),
        ("extends = 3", r"mine\.toml: extends is 3, expected the name of a recipe that ships or the path of a file"),
        ("rows = 3", r"mine\.toml: rows is 3, expected tables such as \[rows\.large\]"),
        ("[phases.0]\nepochs = 2", r"mine\.toml: \[phases\.0\] changes a phase, and there is none yet: begin one with \[\[phases\]\]\."),
        ('extends = "demo"\n[phases.1]\nepochs = 2', r"mine\.toml: phases\.1 names no phase; there are 1, the first is 0"),
        ('extends = "demo"\nphases.0 = 2', r"mine\.toml: phases\.0 is 2, expected a table"),
        ('extends = "demo"\n[trainig]\nx = 1', r"mine\.toml: trainig is not a key of recipes: did you mean training\?"),
        ('extends = "demo"\n[rows.a]\nsed = 1', r"mine\.toml is a grid"),
    ],
)
def test_what_cannot_be_resolved_is_one_sentence(tmp_path, lines, sentence):
    (tmp_path / "mine.toml").write_text(f'name = "mine"\n{lines}\n')
    (tmp_path / "other.toml").write_text('extends = "mine.toml"\nname = "other"\n')
    with pytest.raises(VisavisError, match=sentence) as error:
        read_recipe(tmp_path / "mine.toml")
    assert "\n" not in str(error.value)


def test_a_grid_without_a_name_is_refused(tmp_path):
    (tmp_path / "grid.toml").write_text('extends = "demo"\n[rows.a]\nseed = 1\n')
    with pytest.raises(RecipeError, match=r"grid\.toml: name is missing"):
        read_recipe(f"{tmp_path}/grid.toml/a")


def test_a_row_is_trained_under_its_own_name_and_its_run_knows_nothing_of_files(tmp_path, monkeypatch):
    scenes = write_scenes(tmp_path / "scenes", num_train=12, num_val=4, num_test=4, captions_per_image=2, size=32)
    small = "phases.0.epochs = 1\nmodel.width = 4\nmodel.word_width = 4"
    (tmp_path / "mine.toml").write_text(f'extends = "demo"\nname = "mine"\n[rows.vlc]\nobjective = "VLC()"\n{small}\n')
    monkeypatch.chdir(tmp_path)
    trained = visavis.train("mine.toml/vlc", data=scenes)
    assert trained.folder.name == "mine-vlc-1"
    assert trained.objective.startswith("VLC(")
    run = (trained.folder / "run.toml").read_text()
    assert "extends" not in run
    assert "rows" not in run
    assert build_recipe(read_recipe(trained.folder / "run.toml").to_dict(), {}, "run") == read_recipe(trained.folder / "run.toml")


def test_a_model_may_be_written_as_a_table_or_as_a_text():
    as_text = read_recipe("demo", {"model": "VSE++(width=256, word_width=64, word_pool='max')"})
    assert as_text == read_recipe("demo")
    assert read_recipe("demo", {"model": "VSE++"}).model == {"kind": "VSE++"}
    with pytest.raises(RecipeError, match=r"'VSE\+\+\(width' is not of the form"):
        read_recipe("demo", {"model": "VSE++(width"})


def test_a_table_of_facts_is_for_the_papers_tables_alone(tmp_path):
    (tmp_path / "mine.toml").write_text(BASE + '[table]\nsource = "mine"\n')
    with pytest.raises(RecipeError, match="table is not a key of recipes"):
        read_recipe(tmp_path / "mine.toml")
