"""The rows of the papers' tables: their figures are those of the papers, and each trains at toy size."""

from __future__ import annotations

import math
import os
import re
from functools import cache
from pathlib import Path

import pytest

import visavis
from visavis.cli.output import print_trained
from visavis.errors import RecipeError, VisavisError
from visavis.evaluation.published import Published, metric_of
from visavis.runs.published import published_rows
from visavis.training.members import member_recipes
from visavis.training.recipe_files import read_recipe, tables

from .toy import one_step, overrides, toy

ROWS = published_rows()
TRAINABLE = [address for address, row in ROWS.items() if not row.absent]
PAPERS = Path(os.environ.get("VISAVIS_DATA", "."), "..", "papers")
TEXTS = {
    "goal": ["goal.txt"],
    "cocos": ["cocos.txt"],
    "ladder": ["ladder_loss.txt"],
    "unified": ["unified_loss_html.txt", "unified_loss_pdf.txt"],
}
"""The text of each paper, where there is one beside the data."""


def kinds() -> dict[tuple[object, ...], str]:
    """One trainable row of each kind: of the same model, objectives and supervision."""
    found: dict[tuple[object, ...], str] = {}
    for address in TRAINABLE:
        recipe = read_recipe(address)
        phases = tuple((phase.objective.partition("(")[0], phase.supervision.partition("(")[0]) for phase in recipe.phases)
        found.setdefault((bool(recipe.members), recipe.model["kind"], recipe.visual.view, recipe.text.tower, phases), address)
    return found


KINDS = frozenset(kinds().values())


@pytest.mark.parametrize("address", [pytest.param(address, marks=() if address in KINDS else pytest.mark.long) for address in TRAINABLE])
def test_every_row_builds_and_takes_a_step_of_each_phase(address, toys):
    recipe = toy(address, toys)
    for member in member_recipes(recipe).values() or [recipe]:
        assert all(math.isfinite(loss) for loss in one_step(member))


@pytest.mark.long
@pytest.mark.parametrize("address", sorted(KINDS))
def test_a_row_of_each_kind_is_trained_and_evaluated_and_printed_beside_its_figures(address, toys, tmp_path, capsys):
    trained = visavis.train(address, out=tmp_path / "run", overrides=overrides(address, toys))
    print_trained(trained)
    assert not ROWS[address].protocol or re.search("published +reached +difference", capsys.readouterr().out)
    assert visavis.evaluate(trained.folder).metrics == trained.test.metrics


@cache
def lines(paper: str) -> list[list[str]]:
    """The numbers of each line of a paper, as printed."""
    texts = [PAPERS / name for name in TEXTS[paper]]
    if not all(text.exists() for text in texts):
        pytest.skip(f"the text of {paper} is not beside the data")
    return [re.findall(r"-?\d*\.\d+|\d+", line) for text in texts for line in text.read_text(encoding="utf-8").splitlines()]


def printed(row: Published) -> list[float]:
    return [number for figure in row.values.values() for number in figure if number is not None]


@pytest.mark.data
@pytest.mark.parametrize("paper", TEXTS)
def test_the_figures_of_a_row_stand_in_one_line_of_the_paper_in_their_order(paper):
    """But for those of the ladder paper, whose text has each column of a table on lines of its own."""
    known = [[float(number) for number in line] for line in lines(paper)]
    if paper == "ladder":
        known = [[number for line in known for number in line]]
    for address, row in ROWS.items():
        if row.paper == paper:
            found = set(printed(row)) <= set(known[0]) if paper == "ladder" else any(in_order(printed(row), line) for line in known)
            assert found, address


def in_order(few: list[float], many: list[float]) -> bool:
    rest = iter(many)
    return all(number in rest for number in few)


def contradictions(row: Published) -> list[str]:
    """Where figures of a row cannot all be right, each of them rounded to one digit."""
    wrong, means = [], {key: mean for key, (mean, _) in row.values.items()}
    for way in ("i2t", "t2i"):
        recalls = [means[key] for key in (f"{way}_r1", f"{way}_r5", f"{way}_r10") if key in means]
        if recalls != sorted(recalls) or max(recalls, default=0) > 100:
            wrong.append(f"{way} recalls {recalls}")
        if abs(means.get(f"{way}_average_recall", average := sum(recalls) / 3) - average) > 0.11:
            wrong.append(f"{way} average recall {average:.2f}")
    six = [means.get(f"{way}_r{k}", float("nan")) for way in ("i2t", "t2i") for k in (1, 5, 10)]
    if abs(sum(six) - means.get("rsum", float("nan"))) > 0.25:
        wrong.append(f"rsum {sum(six):.1f}")
    return wrong


@pytest.mark.parametrize("table", tables())
def test_rows_say_what_they_were_measured_by_and_obey_the_laws_of_their_metrics(table):
    for address, row in ROWS.items():
        if not address.startswith(f"{table}/"):
            continue
        for key, (mean, deviation) in row.values.items() if row.protocol else ():
            least = 0 if metric_of(key).unit in ("percent", "rank") else -1
            assert mean >= least and (deviation is None or deviation >= 0), (address, key)
        assert bool(contradictions(row)) == bool(row.misprint), (address, contradictions(row))
        if not row.absent:
            recipe = read_recipe(address)
            assert (recipe.published, bool(recipe.data.needs)) == (address, True)
            assert row.protocol in ("", *recipe.evaluation.protocols), address


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("goal/3/r152-con-con", r"MS-COCO .* dataset_coco\.json .*; there is no coco"),
        (
            "unified/7/bfan-ensemble-unified",
            r"the 36 BUTD regions .* f30k_precomp that holds train_ims\.npy \[29000, 36, 2048\].* no f30k_precomp",
        ),
        ("goal/6/x-vlm-coco-info-nce", r"MS-COCO .* dataset_coco\.json .* folder xvlm .*visavis convert.*; there is no coco"),
        (
            "goal/6/x-vlm-flickr30k-info-nce",
            r"Flickr30K .* dataset_flickr30k\.json .* folder xvlm .*visavis convert.*; there is no flickr30k",
        ),
        (
            "unified/4/ce-full-unified",
            r"MSR-VTT .* dataset_msrvtt-full\.json, experts/ and, for CE, texts/w2v/ .* no msrvtt/dataset_msrvtt-full\.json",
        ),
        ("unified/4/mmt-1ka-unified", r"MSR-VTT .* for MMT, the text encoder bert-base-cased .* no msrvtt/dataset_msrvtt-1ka-all\.json"),
    ],
)
def test_a_row_without_its_data_says_in_one_sentence_which_files_it_needs(address, sentence, monkeypatch, tmp_path):
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        VisavisError, match=f"^{address} needs {sentence}, neither here nor under VISAVIS_DATA .*: put it there, or .*--data\\.$"
    ):
        visavis.train(address)
    assert not list(tmp_path.iterdir())


def test_rows_of_ce_say_where_they_train_otherwise_than_its_code():
    for address in ("unified/4/ce-full-max-margin", "unified/4/ce-full-unified"):
        recipe = read_recipe(address)
        assert recipe.phases[0].optimizer.name == "Adam" and "clusters" not in recipe.model
        assert re.search(r"Adam .* Ranger at 0\.1.* NetVLAD .*model\.clusters", ROWS[address].unstated)


def test_a_row_that_is_not_there_is_named_by_its_nearest():
    with pytest.raises(RecipeError, match=r"goal/3 has no row r152-con-co: did you mean r152-con-con\?"):
        read_recipe("goal/3/r152-con-co")
    with pytest.raises(RecipeError, match=r"neither a TOML file nor a recipe that ships"):
        read_recipe("goal/9/r152-con-con")
