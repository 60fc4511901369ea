"""Rows of paper tables: published values match the papers, and each row trains at toy size."""

from __future__ import annotations

import math
import os
import re
from functools import cache
from pathlib import Path

import pytest

import visavis
from visavis.cli.console import print_result
from visavis.core.errors import VisavisError
from visavis.evaluation.published_row import PublishedRow, find_metric
from visavis.training.recipes.files import paper_tables, read_recipe
from visavis.training.recipes.published_tables import published_results
from visavis.training.training_run import member_recipes

from .toy import one_step, overrides, toy

ROWS = published_results()
TRAINABLE = [address for address, row in ROWS.items() if not row.not_trainable]
PAPERS = Path(os.environ.get("VISAVIS_DATA", "."), "..", "papers")
TEXTS = {
    "goal": ["goal.txt"],
    "cocos": ["cocos.txt"],
    "ladder": ["ladder_loss.txt"],
    "unified": ["unified_loss_html.txt", "unified_loss_pdf.txt"],
}
"""Text files of each paper, read if they are next to the data."""


def kinds() -> frozenset[str]:
    """Return few trainable rows with each model with its encoders, and with each sequence of
    objectives with their supervision.
    """
    kinds_of: dict[str, set[tuple[object, ...]]] = {}
    for address in TRAINABLE:
        recipe = read_recipe(address)
        phases = tuple(
            (type(phase.objective).__name__, type(phase.supervision).__name__)
            for phase in recipe.phases
        )
        kinds_of[address] = {
            phases,
            (
                bool(recipe.members),
                recipe.model["kind"],
                recipe.visual.granularity,
                recipe.text.encoder,
            ),
        }
    missing, chosen = set().union(*kinds_of.values()), set[str]()
    while missing:
        best = max(kinds_of, key=lambda address: len(kinds_of[address] & missing))
        chosen.add(best)
        missing -= kinds_of[best]
    return frozenset(chosen)


KINDS = kinds()


@pytest.mark.parametrize(
    "address",
    [
        pytest.param(address, marks=() if address in KINDS else pytest.mark.long)
        for address in TRAINABLE
    ],
)
@pytest.mark.slow
def test_every_row_takes_step_in_each_phase(address, toys):
    recipe = toy(address, toys)
    for member in member_recipes(recipe).values() or [recipe]:
        assert all(math.isfinite(loss) for loss in one_step(member))


@pytest.mark.long
@pytest.mark.parametrize("address", sorted(KINDS))
def test_rows_are_trained_and_compared_with_published_values(address, toys, tmp_path, capsys):
    trained = visavis.train(address, out=tmp_path / "run", overrides=overrides(address, toys))
    print_result(trained)
    assert not ROWS[address].protocol or re.search(
        "published +reached +difference", capsys.readouterr().out
    )
    assert visavis.evaluate(trained.run).metrics == trained.test.metrics


@cache
def lines(paper: str) -> list[list[str]]:
    """Return the numbers of each line of a paper."""
    texts = [PAPERS / name for name in TEXTS[paper]]
    if not all(text.exists() for text in texts):
        pytest.skip(f"the text of {paper} is not next to the data")
    return [
        re.findall(r"-?\d*\.\d+|\d+", line)
        for text in texts
        for line in text.read_text(encoding="utf-8").splitlines()
    ]


def printed(row: PublishedRow) -> list[float]:
    return [number for figure in row.values.values() for number in figure if number is not None]


@pytest.mark.data
@pytest.mark.parametrize("paper", TEXTS)
def test_published_values_match_line_of_paper(paper):
    """Values of a row are in one line, except in the ladder paper, whose text has one column per
    line.
    """
    known = [[float(number) for number in line] for line in lines(paper)]
    if paper == "ladder":
        known = [[number for line in known for number in line]]
    for address, row in ROWS.items():
        if row.paper == paper:
            found = (
                set(printed(row)) <= set(known[0])
                if paper == "ladder"
                else any(in_order(printed(row), line) for line in known)
            )
            assert found, address


def in_order(few: list[float], many: list[float]) -> bool:
    rest = iter(many)
    return all(number in rest for number in few)


def contradictions(row: PublishedRow) -> list[str]:
    """List contradictions between values of a row, each rounded to one digit."""
    wrong, means = [], {key: mean for key, (mean, _) in row.values.items()}
    for direction in ("i2t", "t2i"):
        recalls = [
            means[key]
            for key in (f"{direction}_r1", f"{direction}_r5", f"{direction}_r10")
            if key in means
        ]
        if recalls != sorted(recalls) or max(recalls, default=0) > 100:
            wrong.append(f"{direction} recalls {recalls}")
        if (
            abs(means.get(f"{direction}_average_recall", average := sum(recalls) / 3) - average)
            > 0.11
        ):
            wrong.append(f"{direction} average recall {average:.2f}")
    six = [
        means.get(f"{direction}_r{k}", float("nan"))
        for direction in ("i2t", "t2i")
        for k in (1, 5, 10)
    ]
    if abs(sum(six) - means.get("rsum", float("nan"))) > 0.25:
        wrong.append(f"rsum {sum(six):.1f}")
    return wrong


@pytest.mark.parametrize("table", paper_tables())
def test_published_values_follow_laws_of_metrics(table):
    for address, row in ROWS.items():
        if not address.startswith(f"{table}/"):
            continue
        for key, (mean, std) in row.values.items() if row.protocol else ():
            lower_bound = 0 if find_metric(key).unit in ("percent", "rank") else -1
            assert mean >= lower_bound and (std is None or std >= 0), (address, key)
        assert bool(contradictions(row)) == bool(row.misprint), (address, contradictions(row))
        if not row.not_trainable:
            recipe = read_recipe(address)
            assert (recipe.published, bool(recipe.data.requires)) == (address, True)
            assert row.protocol in ("", *recipe.evaluation.protocols), address


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("goal/3/r152-con-con", r"MS-COCO .* dataset_coco\.json .*got no coco"),
        (
            "unified/7/bfan-ensemble-unified",
            (
                r"36 BUTD regions .* f30k_precomp with train_ims\.npy \[29000, 36, 2048\].* no "
                r"f30k_precomp"
            ),
        ),
        (
            "goal/6/x-vlm-coco-info-nce",
            r"MS-COCO .* dataset_coco\.json .* folder xvlm .*visavis papers convert.*got no coco",
        ),
        (
            "goal/6/x-vlm-flickr30k-info-nce",
            (
                r"Flickr30K .* dataset_flickr30k\.json .* folder xvlm .*visavis papers convert.*got no "
                r"flickr30k"
            ),
        ),
        (
            "unified/4/ce-full-unified",
            (
                r"MSR-VTT .* dataset_msrvtt-full\.json, experts/ .* for CE, caption_features/w2v/ .* "
                r"no msrvtt/dataset_msrvtt-full\.json"
            ),
        ),
        (
            "unified/4/mmt-1ka-unified",
            (
                r"MSR-VTT .* for MMT, the text encoder bert-base-cased .* no "
                r"msrvtt/dataset_msrvtt-1ka-all\.json"
            ),
        ),
    ],
)
def test_row_without_data_reports_required_files(address, sentence, monkeypatch, tmp_path):
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        VisavisError,
        match=f"^{address}: expected {sentence} in the current folder or under VISAVIS_DATA .*Put it there, or .*--data\\.$",
    ):
        visavis.train(address)
    assert not list(tmp_path.iterdir())


def test_ce_rows_train_as_released_code():
    for address in ("unified/4/ce-full-max-margin", "unified/4/ce-full-unified"):
        recipe = read_recipe(address)
        optimizer = recipe.phases[0].optimizer
        assert (
            optimizer.name,
            optimizer.lr,
            optimizer.weight_decay,
            recipe.training.clip_norm,
        ) == ("Ranger", 0.1, 1e-3, 0)
        assert recipe.model["netvlad_clusters"] == {"audio": 8, "speech": 19, "ocr": 43}
        assert re.search(r"g and for h, .* Mish and batch norm", ROWS[address].substitutes)
