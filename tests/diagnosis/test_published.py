"""Published figures: they obey the laws of what they count, and a diagnosis prints them beside its own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import visavis
from visavis.cli.output import print_diagnosis
from visavis.data.scenes import write_scenes
from visavis.diagnosis.walk import Diagnosis
from visavis.errors import RecipeError
from visavis.evaluation.published import Published
from visavis.runs.published import counted_rows, objective_of, published_rows
from visavis.training.recipe_files import read_recipe, shipped_names

NAME = "COCOS/VSE++/Flickr30k"
"""As older runs have it: the rows of every objective."""
NAMES = [f"COCOS/{model}/{data}" for model in ("VSE++", "VSRN") for data in ("Flickr30k", "MS-COCO")]
RECIPE = f"""
name = "tiny"
published = "{NAME}"
visual = {{ tower = "scenes", view = "pooled" }}
text = {{ tower = "vocabulary", min_count = 1 }}
model = {{ kind = "VSE++", width = 16, word_width = 8 }}
training = {{ batch_size = 32, probe_batches = 1, threads = 1 }}

[[phases]]
epochs = 1
objective = "Triplet(margin=0.2)"
supervision = "PairSupervision(by='position')"
optimizer = {{ lr = 0.003 }}
"""


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory) -> Diagnosis:
    folder = tmp_path_factory.mktemp("published")
    scenes = write_scenes(folder / "scenes", num_train=70, num_val=4, num_test=4, captions_per_image=2, size=32)
    (folder / "tiny.toml").write_text(RECIPE)
    run = visavis.train(folder / "tiny.toml", data=scenes, out=folder / "run").folder
    return visavis.diagnose(run, objective=["TripletHN(margin=0.2)", "SmoothAP(tau=0.01)", "VLC(gamma=40)"])


def of_objective(diagnosis: Diagnosis, name: str) -> Diagnosis:
    """The same walk, as of a run that was trained with another objective."""
    return replace(diagnosis, counts=tuple(count for count in diagnosis.counts if count.objective.startswith(f"{name}(")))


def beside(name: str, objective: str) -> Published:
    (found,) = (row for row in counted_rows(name) if objective_of(row.address).startswith(f"{objective}("))
    return found


def printed(diagnosis: Diagnosis, capsys) -> list[list[str]]:
    """The cells of every printed line."""
    print_diagnosis(diagnosis)
    return [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_published_counts_obey_their_laws(name):
    """To rounding, and the smaller last batch that the released code keeps. Idle and moved queries are all; C^q (n - C^0) = C^B."""
    triplet, hardest, nt_xent = (beside(name, kind).values for kind in ("Triplet", "TripletHN", "NTXent"))
    for way in ("i2t", "t2i"):
        assert hardest[f"{way}_in_batch"][0] + hardest[f"{way}_idle"][0] == pytest.approx(128, abs=0.05)
        moved = 128 - triplet[f"{way}_idle"][0]
        assert triplet[f"{way}_per_moved"][0] * moved == pytest.approx(triplet[f"{way}_in_batch"][0], rel=0.01)
        assert nt_xent[f"{way}_push"][0] < nt_xent[f"{way}_pull"][0]  # the pull balances also the weights below epsilon
        assert beside(name, "SmoothAP").values[f"{way}_idle"][0] <= (128 if way == "i2t" else 640)
    assert beside(name, "SmoothAP").values["t2i_idle"][0] >= 640 - 26  # what the caution says


def test_the_rows_of_one_number_are_one_experiment():
    counted = [row for row in published_rows().values() if not row.protocol]
    assert sorted(row.address for name in NAMES for row in counted_rows(name)) == sorted(row.address for row in counted)
    for row in counted:
        measured = published_rows()[f"cocos/1/{row.row}"]
        assert counted_rows(measured.address) == counted_rows(row.address) == [row], "a run of table 1 is diagnosed beside tables 2 to 4"
        assert measured.number == row.number


@pytest.mark.parametrize("name", [name for name in shipped_names() if name.startswith("cocos-")])
def test_a_cocos_recipe_has_figures_beside_it(name):
    recipe = read_recipe(name)
    (row,) = counted_rows(recipe.published)
    assert objective_of(row.address) == recipe.phases[0].objective


def test_a_name_that_nobody_published_is_refused():
    with pytest.raises(
        RecipeError,
        match=r"published is 'cocos/2/vse\+-flickr30k-triplet', which names no row .* did you mean cocos/2/vse\+\+-flickr30k-triplet\?",
    ):
        visavis.train("demo", overrides={"published": "cocos/2/vse+-flickr30k-triplet"})


def test_published_and_reached_stand_side_by_side_in_both_semantics(diagnosis, capsys):
    own, released = diagnosis.counts[:2]
    released = replace(released, mean={key: mean + 0.5 for key, mean in released.mean.items()})  # a run so small has no idle query
    lines = printed(replace(diagnosis, counts=(own, released)), capsys)
    rows = {(line[0], line[1]): line[2:] for line in lines if len(line) == 5 and line[0] != "published"}
    figures = {key: mean for key, (mean, _) in beside(NAME, "Triplet").values.items()}
    assert len(rows) == len(figures) == 6
    for way, title in (("i2t", "image to text"), ("t2i", "text to image")):
        for measure, sign in (("per_moved", "C^q"), ("in_batch", "C^B"), ("idle", "C^0")):
            expected = [values[f"{way}_{measure}"] for values in (figures, own.mean, released.mean)]
            assert [cell.split("±")[0] for cell in rows[title, sign]] == [f"{value:.2f}" for value in expected]
    text = "\n".join(" ".join(line) for line in lines)
    assert "Published: cocos/2/vse++-flickr30k-triplet, number 1.1: Bleeker and de Rijke" in text
    assert "Reached: VSE++ on scenes, scenes." in text
    assert "counts C^q and C^0 by image, not by text" in text


def test_what_the_released_code_counts_as_defined_is_said_to_be_the_same(diagnosis, capsys):
    lines = printed(of_objective(diagnosis, "TripletHN"), capsys)
    assert [line[-1] for line in lines if line[1:3] == ["C^q", "1.00±0.00"]] == ["the same"] * 2
    assert not any("The published figures" in cell for line in lines for cell in line)


def test_a_batch_that_the_released_code_cannot_take_has_no_figure_of_it(diagnosis, capsys):
    """Its SmoothAP takes five captions an image."""
    lines = printed(of_objective(diagnosis, "SmoothAP"), capsys)
    assert [line[-1] for line in lines if line[1:2] == ["C^0"]] == ["-", "-"]
    assert any("at least 614 are idle" in cell for line in lines for cell in line)


def test_an_objective_without_figures_is_a_sentence_and_a_recipe_without_a_paper_is_silent(diagnosis, capsys):
    other = of_objective(diagnosis, "VLC")
    assert printed(other, capsys)[-1] == [f"{NAME} has no figures for VLC(gamma=40.0, reduction='sum')."]
    assert other.to_json()["published"] is None
    print_diagnosis(replace(other, published=""))
    assert "figures" not in capsys.readouterr().out


def test_the_figures_are_in_json(diagnosis):
    found = diagnosis.to_json()["published"]
    assert (found["paper"], found["table"], found["number"]) == ("cocos", 2, "1.1")
    assert (found["published"]["i2t_in_batch"], found["published"]["i2t_in_batch_std"]) == (768.92, 96.87)
