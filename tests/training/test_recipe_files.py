"""Recipes that extend others, and recipes with variants: resolved values and errors."""

import hashlib
import json
from dataclasses import replace

import pytest
from tests.docs import read_blocks

import visavis
from visavis.core.errors import RecipeError, VisavisError
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models import find_model
from visavis.papers.relevance.ranking_coherence import Coherence
from visavis.training.recipes.files import (
    read_recipe,
    read_recipe_file,
    shipped_files,
    shipped_recipe_names,
)
from visavis.training.recipes.published_tables import published_results
from visavis.training.recipes.recipe import build_recipe

BASE = """
name = "base"
about = "A base."
[visual]
encoder = "scenes"
[model]
kind = "VSE++"
embedding_dim = 8
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
    "cocos-triplet-flickr30k": "3d1b8b09",
    "cocos-triplet-hn-flickr30k": "e77673c9",
    "cocos-nt-xent-flickr30k": "b87aa649",
    "cocos-smooth-ap-flickr30k": "c7c1a0d5",
    "cocos-triplet-flickr8k": "290f8913",
    "cocos-triplet-hn-flickr8k": "a22fde75",
    "cocos-nt-xent-flickr8k": "5ce43b22",
    "cocos-smooth-ap-flickr8k": "9a16b7c5",
    "cvse++-flickr30k": "736ffaf7",
    "cvse++-coco": "d1670c10",
    "cvse++-two-step-flickr30k": "ccbe6ea9",
    "cvse++-two-step-coco": "dc113d45",
    "demo": "ee08a1ee",
    "demo-triplet-hn": "dafba719",
    "demo-unified": "ea34be2e",
    "demo-vlc": "0973f89c",
    "heads-flickr8k": "e0137cf4",
    "ladder-scenes": "4e906519",
    "aoq-heads-flickr8k": "43ce7685",
    "ladder-heads-flickr8k": "454bf15d",
    "learned-weights-heads-flickr8k": "d7a63658",
    "ncr-heads-flickr8k": "201c611e",
    "maxsim-minilm-flickr8k": "3fcb451a",
    "maxsim-words-flickr8k": "bbba9735",
    "maxsim-pair-flickr8k": "1deafbcc",
    "vse++-two-step-scenes": "e006f1b4",
    "vse-infinity-flickr8k": "5dbd2944",
    "vse-infinity-minilm-flickr8k": "02d54490",
    "words-flickr8k-pair": "ab2193a4",
}
"""Names that results were reported under, and a hash of the non-default values of each recipe."""


def digest(recipe):
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"published"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


@pytest.fixture
def resolved(tmp_path):
    """Read a recipe that extends BASE by some lines."""
    (tmp_path / "base.toml").write_text(BASE)

    def resolve(lines, row=None):
        (tmp_path / "child.toml").write_text('extends = "base.toml"\nname = "child"\n' + lines)
        return read_recipe(
            tmp_path / "child.toml" if row is None else f"{tmp_path}/child.toml/{row}"
        )

    return resolve


@pytest.fixture
def base(tmp_path, resolved):
    return read_recipe(tmp_path / "base.toml")


def test_reported_recipe_names_keep_their_meaning():
    assert {name: digest(read_recipe(name)) for name in SHIPPED} == SHIPPED


def test_included_recipes_are_complete_and_named():
    for name, (file, row) in shipped_recipe_names().items():
        recipe = read_recipe(name)
        assert recipe.name == name
        assert recipe.about, name
        assert find_model(recipe.model["kind"]), name
        assert build_recipe(recipe.to_dict(), {}, name) == recipe, (
            f"{name}: run.toml holds the whole recipe"
        )
        assert read_recipe(file if row is None else f"{file}/{row}") == recipe


def test_included_recipe_files_have_name_and_description():
    for name in shipped_files():
        content = read_recipe_file(name).content
        assert content["name"] == name
        assert content["about"], name


def test_extending_recipe_changes_only_given_keys(base, resolved):
    assert resolved("") == base.model_copy(update={"name": "child", "about": ""})
    assert resolved("[training]\nclip_norm = 1.0").training == base.training.model_copy(
        update={"clip_norm": 1.0}
    )
    assert resolved("seed = 7").seed == 7


def test_table_with_kind_replaces_whole_table(base, resolved):
    assert resolved("[model]\nword_dim = 4").model == {
        "kind": "VSE++",
        "embedding_dim": 8,
        "word_dim": 4,
    }
    assert resolved('[model]\nkind = "Heads"').model == {"kind": "Heads"}
    schedule = resolved('[phases.0]\nschedule = { kind = "cosine" }').phases[0].schedule
    assert (schedule.kind, schedule.milestones) == ("cosine", ())


def test_model_as_text_is_extended_as_table(tmp_path):
    (tmp_path / "parent.toml").write_text(
        BASE.replace('[model]\nkind = "VSE++"\nembedding_dim = 8\n', "").replace(
            'about = "A base."', 'model = "VSE++(embedding_dim=8)"'
        )
    )
    (tmp_path / "child.toml").write_text(
        'extends = "parent.toml"\nname = "child"\n[model]\nword_dim = 4\n[variants.heads]\nmodel = "Heads"\n[variants.same]\n'
    )
    assert {
        row: read_recipe(f"{tmp_path}/child.toml/{row}").model for row in ("heads", "same")
    } == {
        "heads": {"kind": "Heads"},
        "same": {"kind": "VSE++", "embedding_dim": 8, "word_dim": 4},
    }


def test_phases_are_replaced_or_changed_by_number(base, resolved):
    only = resolved('[[phases]]\nepochs = 1\nobjective = "VLC()"').phases
    assert [phase.epochs for phase in only] == [1]
    changed = resolved("[phases.1]\nepochs = 9\n[phases.0.optimizer]\nlr = 0.5").phases
    assert [phase.epochs for phase in changed] == [3, 9]
    assert changed[0].optimizer == base.phases[0].optimizer.model_copy(update={"lr": 0.5})
    assert changed[1].objective == base.phases[1].objective


def test_short_keys_reach_phases_as_in_overrides(tmp_path, resolved):
    assert resolved('objective = "VLC(gamma=3)"') == read_recipe(
        tmp_path / "base.toml", {"objective": "VLC(gamma=3)", "name": "child", "about": ""}
    )
    with pytest.raises(RecipeError, match="epochs: expected a recipe of one phase, got 2 phases"):
        resolved("epochs = 3")


def test_variant_is_recipe_with_overrides(base, resolved):
    lines = '[variants.small]\nmodel.embedding_dim = 4\nphases.1.epochs = 1\n[variants.other]\nname = "mine"\nabout = "Mine."\nobjective = "VLC()"\n'
    small, other = resolved(lines, "small"), resolved(lines, "other")
    overrides = {"model.embedding_dim": 4, "phases.1.epochs": 1, "name": "child-small", "about": ""}
    assert small == build_recipe(base.to_dict(), overrides, "base")
    assert (other.name, other.about, other.model) == ("mine", "Mine.", base.model)
    with pytest.raises(
        RecipeError,
        match=r"child\.toml: expected a variant, got a grid\. Name a variant, such as .*child\.toml/small\. Variants: small, other\.$",
    ):
        resolved(lines)
    with pytest.raises(
        RecipeError, match=r"child\.toml: smal is not a variant: did you mean small\?"
    ):
        resolved(lines, "smal")


def test_variants_are_inherited_without_names(tmp_path, resolved):
    resolved('[variants.a]\nname = "first"\nseed = 1\n[variants.b]\nseed = 2\n', "a")
    (tmp_path / "grandchild.toml").write_text(
        'extends = "child.toml"\nname = "g"\nseed = 5\n[variants.b]\nmodel.embedding_dim = 2\n[variants.c]\n'
    )
    recipes = {row: read_recipe(f"{tmp_path}/grandchild.toml/{row}") for row in "abc"}
    assert {
        row: (recipe.name, recipe.seed, recipe.model["embedding_dim"])
        for row, recipe in recipes.items()
    } == {
        "a": ("g-a", 1, 8),
        "b": ("g-b", 2, 2),
        "c": ("g-c", 5, 8),
    }
    (tmp_path / "one.toml").write_text('extends = "child.toml/b"\nname = "one"\n')
    assert read_recipe(tmp_path / "one.toml") == recipes["b"].model_copy(
        update={"name": "one", "model": {"kind": "VSE++", "embedding_dim": 8}}
    )


def test_recipes_of_page_are_valid(tmp_path):
    whole, grid, *_ = read_blocks("docs/guides/recipes.md", "toml")
    (tmp_path / "whole.toml").write_text(whole.text)
    (tmp_path / "grid.toml").write_text(grid.text)
    assert [phase.epochs for phase in read_recipe(tmp_path / "whole.toml").phases] == [15, 5]
    small, warm = (read_recipe(f"{tmp_path}/grid.toml/{row}") for row in ("small", "warm"))
    assert (small.name, small.model["embedding_dim"], small.phases[0].optimizer.lr) == (
        "my-heads-small",
        256,
        3e-4,
    )
    assert (warm.name, warm.phases[0].schedule.warmup, warm.training.batch_size) == (
        "my-warm-heads",
        0.2,
        128,
    )


@pytest.mark.parametrize("parent", ["demo", "ladder-heads-flickr8k", "cocos-flickr8k/nt-xent"])
def test_included_recipe_can_be_extended_by_every_name(tmp_path, parent):
    (tmp_path / "mine.toml").write_text(f'extends = "{parent}"\nname = "mine"\n')
    assert read_recipe(tmp_path / "mine.toml") == read_recipe(parent).model_copy(
        update={"name": "mine", "about": "", "published": ""}
    )


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            'extends = "demoo"',
            (
                r"mine\.toml: extends: demoo: expected a TOML file or the name of a shipped recipe, "
                r"found neither: did you mean demo\?"
            ),
        ),
        ('extends = "gone.toml"', r"gone\.toml cannot be read: No such file"),
        (
            'extends = "cocos-flickr8k/hn"',
            (
                r"cocos-flickr8k: hn is not a variant: known: nt-xent, smooth-ap, triplet, "
                r"triplet-hn\."
            ),
        ),
        ('extends = "demo/hn"', r"demo: hn is not a variant: it is one recipe\."),
        ('extends = "mine.toml"', r"mine\.toml: extends itself through mine\.toml"),
        ('extends = "other.toml"', r"mine\.toml: extends itself through other\.toml"),
        ("extends = 3", r"mine\.toml: extends: expected the name of a shipped recipe, .*, got 3"),
        (
            "variants = 3",
            r"mine\.toml: variants: expected tables of changes such as \[variants\.large\]",
        ),
        (
            "[phases.0]\nepochs = 2",
            (
                r"mine\.toml: \[phases\.0\] changes a phase, but there is none\. Begin one with "
                r"\[\[phases\]\]\."
            ),
        ),
        (
            'extends = "demo"\n[phases.1]\nepochs = 2',
            r"mine\.toml: phases\.1: expected a phase from 0 to 0, got 1",
        ),
        (
            'extends = "demo"\nphases.0 = 2',
            r"mine\.toml: phases\.0: expected a table of changes, got 2",
        ),
        (
            'extends = "demo"\n[trainig]\nx = 1',
            r"mine\.toml: trainig is not a key of recipes: did you mean training\?",
        ),
        ('extends = "demo"\n[variants.a]\nsed = 1', r"mine\.toml: expected a variant, got a grid"),
    ],
)
def test_unresolvable_recipe_is_rejected(tmp_path, lines, sentence):
    (tmp_path / "mine.toml").write_text(f'name = "mine"\n{lines}\n')
    (tmp_path / "other.toml").write_text('extends = "mine.toml"\nname = "other"\n')
    with pytest.raises(VisavisError, match=sentence) as error:
        read_recipe(tmp_path / "mine.toml")
    assert "\n" not in str(error.value)


def test_grid_without_variant_name_is_rejected(tmp_path):
    (tmp_path / "grid.toml").write_text('extends = "demo"\n[variants.a]\nseed = 1\n')
    with pytest.raises(
        RecipeError, match=r"grid\.toml: name: expected the name of the grid, got none\. Add"
    ):
        read_recipe(f"{tmp_path}/grid.toml/a")


def test_variant_is_trained_under_its_name(tmp_path, monkeypatch):
    scenes = write_synthetic_scenes(
        tmp_path / "scenes", num_train=12, num_val=4, num_test=4, captions_per_image=2, size=32
    )
    small = "phases.0.epochs = 1\nmodel.embedding_dim = 4\nmodel.word_dim = 4"
    (tmp_path / "mine.toml").write_text(
        f'extends = "demo"\nname = "mine"\n[variants.vlc]\nobjective = "VLC()"\n{small}\n'
    )
    monkeypatch.chdir(tmp_path)
    trained = visavis.train("mine.toml/vlc", data=scenes)
    assert trained.run.name == "mine-vlc-1"
    assert trained.objective.startswith("VLC(")
    run = (trained.run / "run.toml").read_text()
    assert "extends" not in run
    assert "variants" not in run
    assert build_recipe(read_recipe(trained.run / "run.toml").to_dict(), {}, "run") == read_recipe(
        trained.run / "run.toml"
    )


def test_model_accepts_table_or_text():
    as_text = read_recipe(
        "demo", {"model": "VSE++(embedding_dim=256, word_dim=64, word_pool='max')"}
    )
    assert as_text == read_recipe("demo")
    assert read_recipe("demo", {"model": "VSE++"}).model == {"kind": "VSE++"}
    with pytest.raises(RecipeError, match=r"'VSE\+\+\(width' is not of the form"):
        read_recipe("demo", {"model": "VSE++(width"})


def test_published_section_is_only_for_paper_tables(tmp_path):
    (tmp_path / "mine.toml").write_text(BASE + '[table]\nsource = "mine"\n')
    with pytest.raises(RecipeError, match="table is not a key of recipes"):
        read_recipe(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    "name",
    [name for name in shipped_recipe_names() if name.startswith("cvse++-bert")],
)
def test_bert_recipes_are_rows_with_their_relevance(name):
    """Each differs from the row whose figures it prints only in the relevance and the protocols."""
    recipe = read_recipe(name)
    row = read_recipe(recipe.published)
    relevance = "CoarseToFine(fine=\"CrossEncoder(model='sts-bert', output='identity')\")"
    assert recipe.evaluation.sections == (Coherence(relevance=relevance),)
    for phase, of_row in zip(recipe.phases, row.phases, strict=True):
        assert phase.supervision.relevance == relevance
        assert replace(phase.supervision, relevance="CoarseToFine()") == of_row.supervision
        changed = {"supervision": of_row.supervision}
        assert phase.model_copy(update=changed) == of_row
    assert published_results()[recipe.published].protocol in recipe.evaluation.protocols
    for part in ("visual", "text", "model", "training"):
        assert getattr(recipe, part) == getattr(row, part)
    assert recipe.data.path == row.data.path


@pytest.mark.parametrize(
    ("name", "row"),
    [("frozen", "goal/3/r152-con-sig-ms"), ("fine-tuned", "goal/3/r152-ft-con-sig-ms")],
)
def test_goal_on_flickr30k_trains_as_its_rows(name, row):
    """Only the data and the protocol differ, so a row on this base recipe is the row on Flickr30K."""
    recipe = read_recipe(f"goal-flickr30k-{name}")
    published = read_recipe(row)
    for part in ("visual", "text", "model", "training", "phases"):
        assert getattr(recipe, part) == getattr(published, part)
    assert (recipe.data.path, recipe.evaluation.protocols) == ("flickr30k", ("flickr30k",))
