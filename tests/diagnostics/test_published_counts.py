"""Published counts: their laws, and their comparison with measured counts in a diagnosis."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.cli.console import print_result
from visavis.core.errors import RecipeError
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation.published_row import PublishedRow
from visavis.papers.diagnostics.contribution_analysis import ContributionAnalysis
from visavis.training.recipes.files import read_recipe, shipped_recipe_names
from visavis.training.recipes.published_tables import (
    contributing_sample_rows,
    published_results,
    row_objective,
)

ROW_ID = "cocos/2/vse++-flickr30k-triplet"
ROW_IDS = [
    f"cocos/2/{model}-{data}-triplet"
    for model in ("vse++", "vsrn")
    for data in ("flickr30k", "coco")
]


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory) -> ContributionAnalysis:
    folder = tmp_path_factory.mktemp("published")
    scenes = write_synthetic_scenes(
        folder / "scenes", num_train=70, num_val=4, num_test=4, captions_per_image=2, size=32
    )
    phase = {"objective": "Triplet(margin=0.2)", "optimizer": {"lr": 0.003}}
    recipe = write_recipe(
        folder / "tiny.toml",
        phase | {"supervision": "PairSupervision(by='position')"},
        published=ROW_ID,
        model={"embedding_dim": 16, "word_dim": 8},
        training={"batch_size": 32},
    )
    run = visavis.train(recipe, data=scenes, out=folder / "run").run
    return visavis.papers_diagnose(
        run, objective=["TripletHN(margin=0.2)", "SmoothAP(tau=0.01)", "VLC(gamma=40)"]
    )


def of_objective(diagnosis: ContributionAnalysis, name: str) -> ContributionAnalysis:
    """The same analysis, as of a run that was trained with another objective."""
    counts = tuple(count for count in diagnosis.counts if count.objective.startswith(f"{name}("))
    published = next((row.id for row in published_rows(ROW_ID, name)), ROW_ID)
    return replace(diagnosis, counts=counts, published=published)


def published_rows(row_id: str, objective: str) -> list[PublishedRow]:
    """The counts of an objective with the model and data of a row."""
    prefix = row_id.split("/")[2].removesuffix("triplet")
    counted = (
        row
        for row in published_results().values()
        if not row.protocol and row.row.startswith(prefix)
    )
    return [row for row in counted if row_objective(row.id).startswith(f"{objective}(")]


def published_row(row_id: str, objective: str) -> PublishedRow:
    (row,) = published_rows(row_id, objective)
    return row


def printed(diagnosis: ContributionAnalysis, capsys) -> list[list[str]]:
    """The cells of every printed line."""
    print_result(diagnosis)
    return [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("row_id", ROW_IDS)
def test_published_counts_obey_their_laws(row_id):
    """To rounding, and the smaller last batch that the released code keeps. Idle and moved queries
    are all queries. C^q (n - C^0) = C^B.
    """
    triplet, hardest, nt_xent = (
        published_row(row_id, kind).values for kind in ("Triplet", "TripletHN", "NTXent")
    )
    for way in ("i2t", "t2i"):
        assert hardest[f"{way}_in_batch"][0] + hardest[f"{way}_idle"][0] == pytest.approx(
            128, abs=0.05
        )
        moved = 128 - triplet[f"{way}_idle"][0]
        assert triplet[f"{way}_per_moved"][0] * moved == pytest.approx(
            triplet[f"{way}_in_batch"][0], rel=0.01
        )
        assert (
            nt_xent[f"{way}_push"][0] < nt_xent[f"{way}_pull"][0]
        )  # the pull balances also the weights below epsilon
        assert published_row(row_id, "SmoothAP").values[f"{way}_idle"][0] <= (
            128 if way == "i2t" else 640
        )
    assert (
        published_row(row_id, "SmoothAP").values["t2i_idle"][0] >= 640 - 26
    )  # as the published note states


def test_rows_of_one_experiment_are_counted_together():
    counted = [row for row in published_results().values() if not row.protocol]
    assert len(counted) == 16
    for row in counted:
        measured = published_results()[f"cocos/1/{row.row}"]
        assert contributing_sample_rows(measured.id) == contributing_sample_rows(row.id) == [row], (
            "a run of table 1 is compared with tables 2 to 4"
        )
        assert measured.experiment_id == row.experiment_id


@pytest.mark.parametrize(
    "name", [name for name in shipped_recipe_names() if name.startswith("cocos-")]
)
def test_cocos_recipes_have_published_counts(name):
    recipe = read_recipe(name)
    (row,) = contributing_sample_rows(recipe.published)
    assert row_objective(row.id) == repr(recipe.phases[0].objective)


def test_unknown_published_row_is_rejected():
    with pytest.raises(
        RecipeError,
        match=r"'cocos/2/vse\+-flickr30k-triplet' is not a row of a paper's table: did you mean cocos/2/vse\+\+-flickr30k-triplet\?",
    ):
        visavis.train("demo", overrides={"published": "cocos/2/vse+-flickr30k-triplet"})


def test_diagnosis_prints_published_and_measured_counts(diagnosis, capsys):
    own, released = diagnosis.counts[:2]
    released = replace(
        released, mean={key: mean + 0.5 for key, mean in released.mean.items()}
    )  # a run so small has no idle query
    lines = printed(replace(diagnosis, counts=(own, released)), capsys)
    rows = {
        (line[0], line[1]): line[2:] for line in lines if len(line) == 5 and line[0] != "published"
    }
    figures = {key: mean for key, (mean, _) in published_row(ROW_ID, "Triplet").values.items()}
    assert len(rows) == len(figures) == 6
    for way, title in (("i2t", "image to text"), ("t2i", "text to image")):
        for measure, sign in (("per_moved", "C^q"), ("in_batch", "C^B"), ("idle", "C^0")):
            expected = [values[f"{way}_{measure}"] for values in (figures, own.mean, released.mean)]
            assert [cell.split("±")[0] for cell in rows[title, sign]] == [
                f"{value:.2f}" for value in expected
            ]
    text = "\n".join(" ".join(line) for line in lines)
    assert "Published: cocos/2/vse++-flickr30k-triplet, number 1.1: Bleeker and de Rijke" in text
    assert "Reached: VSE++ on scenes, scenes." in text
    assert "counts C^q and C^0 by image, not by text" in text


def test_diagnosis_marks_equal_released_counts(diagnosis, capsys):
    lines = printed(of_objective(diagnosis, "TripletHN"), capsys)
    assert [line[-1] for line in lines if line[1:3] == ["C^q", "1.00±0.00"]] == ["the same"] * 2
    assert not any("The published figures" in cell for line in lines for cell in line)


def test_diagnosis_omits_impossible_released_counts(diagnosis, capsys):
    """Its SmoothAP takes five captions an image."""
    lines = printed(of_objective(diagnosis, "SmoothAP"), capsys)
    assert [line[-1] for line in lines if line[1:2] == ["C^0"]] == ["-", "-"]
    assert any("at least 614 are idle" in cell for line in lines for cell in line)


def test_diagnosis_reports_missing_published_counts(diagnosis, capsys):
    other = of_objective(diagnosis, "VLC")
    assert [f"{ROW_ID} has no counts for VLC(gamma=40.0, reduction='sum')."] in printed(
        other, capsys
    )
    assert other.to_json()["published"] is None
    print_result(replace(other, published=""))
    assert "counts" not in capsys.readouterr().out


def test_diagnosis_json_has_published_counts(diagnosis):
    found = diagnosis.to_json()["published"]
    assert (found["paper"], found["table"], found["experiment_id"]) == ("cocos", 2, "1.1")
    assert (found["published"]["i2t_in_batch"], found["published"]["i2t_in_batch_std"]) == (
        768.92,
        96.87,
    )
