"""Runs of table rows: several protocols at once, and published values compared with measured
values.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import visavis
from visavis.cli.console import print_result
from visavis.evaluation.protocols import Protocol
from visavis.training.recipes.data_module import DataModule
from visavis.training.training_run import TrainingResult, prepare_training

from .toy import overrides, toy

ROW = "goal/3/r152-cir-sig-ms"
HALVES = Protocol(
    name="halves", description="two folds, two captions each", captions_per_image=2, folds=2
)
THREE = Protocol(name="three", description="three captions each", captions_per_image=3)


@pytest.fixture(scope="module")
def trained(toys, tmp_path_factory) -> TrainingResult:
    folder = tmp_path_factory.mktemp("run")
    return visavis.train(
        ROW,
        out=folder / "run",
        overrides=overrides(ROW, toys) | {"evaluation.extra_metrics": ["i2t_map_at_5_hits"]},
    )


def printed(result, printer, capsys) -> str:
    printer(result)
    return capsys.readouterr().out


def test_row_prints_published_and_measured_values(trained, capsys):
    text = printed(trained, print_result, capsys)
    reached = trained.test.metrics["i2t_r1"]
    cells = re.split(
        r" {2,}", next(line for line in text.splitlines() if line.startswith("image to text R@1"))
    )
    assert cells == ["image to text R@1", "35.3 ± 0.4", f"{reached:.1f}", f"{reached - 35.3:+.1f}"]
    assert "Published: goal/3/r152-cir-sig-ms: Xuan and Chen" in text
    assert "Protocols differ: published coco-5k, reached plain" in text
    assert f"image to text mAP@5 by hits {trained.test.metrics['i2t_map_at_5_hits']:.3f}" in text


def test_comparison_is_equal_in_json_and_later_evaluation(trained):
    found = trained.to_json()["published"]
    assert (found["paper"], found["table"], found["row"], found["reached_protocol"]) == (
        "goal",
        3,
        "r152-cir-sig-ms",
        "plain",
    )
    reached = trained.test.metrics["t2i_r1"]
    assert found["published"]["t2i_r1"] == {
        "published": 23.7,
        "std": 0.1,
        "reached": reached,
        "difference": reached - 23.7,
    }
    again = visavis.evaluate(trained.run)
    assert again.to_json() == trained.test.to_json()
    assert visavis.evaluate(trained.run, split="val").published is None, (
        "published values apply to the test split only"
    )


def test_published_values_are_matched_by_protocol(trained, capsys):
    others = replace(
        trained.test, protocol="coco-5k", metrics=trained.test.metrics | {"i2t_r1": 12.5}
    )
    result = replace(trained.test, other_protocols=(others,))
    assert result.to_json()["published"]["published"]["i2t_r1"]["reached"] == 12.5
    text = printed(result, print_result, capsys)
    assert "-22.8" in text and "other candidates" not in text


def test_several_protocols_share_encoded_items(toys, monkeypatch):
    data_module, matcher = prepare_training(toy(ROW, toys))
    alone = [data_module.evaluate(matcher, "test", rules) for rules in (HALVES, THREE)]
    encoded = []
    monkeypatch.setattr(
        DataModule,
        "encode",
        lambda self, *given, encode=DataModule.encode: (
            encoded.append(given) or encode(self, *given)
        ),
    )
    together = data_module.evaluate(matcher, "test", (HALVES, THREE))
    assert len(encoded) == 1
    assert list(together.by_protocol) == ["halves", "three"]
    assert [result.metrics for result in together.by_protocol.values()] == [
        result.metrics for result in alone
    ]
    flat = together.to_json()
    assert {key: value for key, value in flat.items() if key != "protocols"} == alone[0].to_json()
    assert flat["protocols"] == {result.protocol: result.to_json() for result in alone}


def test_missing_measurement_is_null(trained, capsys):
    result = visavis.papers_evaluate(trained.run, published="ladder/4/cvse++-res152-l3")
    figures = result.to_json()["published"]["published"]
    assert figures["i2t_cs_at_200"] == {"published": 0.274, "reached": None, "difference": None}
    line = next(
        line
        for line in printed(result, print_result, capsys).splitlines()
        if line.startswith("image to text CS@200")
    )
    assert line.split() == ["image", "to", "text", "CS@200", "0.274", "-", "-"]


def test_evaluate_compares_with_any_row(trained):
    assert (
        visavis.papers_evaluate(trained.run, published="unified/2/clip-coco").published.id
        == "unified/2/clip-coco"
    )
    with pytest.raises(
        visavis.core.errors.VisavisError,
        match=r"cocos/2/vse\+\+-coco-triplet': expected a row that measures a model, .* visavis papers diagnose",
    ):
        visavis.papers_evaluate(trained.run, published="cocos/2/vse++-coco-triplet")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"evaluation.protocol": []},
            r"evaluation.protocol: expected the name of a protocol in quotes, or a list",
        ),
        ({"evaluation.protocol": ["plain", 5]}, r"evaluation.protocol: expected the name"),
        (
            {"evaluation.protocol": ["plain", "plain"]},
            r"evaluation.protocol: expected different names",
        ),
        (
            {"evaluation.protocol": ["plain", "flickr8k"]},
            r"protocol flickr8k: expected 1000 images",
        ),
        (
            {"evaluation.extra_metrics": ["i2t_r2"]},
            r"evaluation.extra_metrics: 'i2t_r2' is not a metric: did you mean i2t_r",
        ),
        ({"published": "goal/3/r152"}, r"published: 'goal/3/r152' is not a row"),
        (
            {"evaluation.average_networks": True},
            r"evaluation\.average_networks: expected two networks in every phase",
        ),
    ],
)
def test_train_rejects_invalid_protocol_before_training(settings, sentence, toys, tmp_path):
    with pytest.raises(visavis.core.errors.VisavisError, match=sentence):
        visavis.train(ROW, out=tmp_path / "run", overrides=overrides(ROW, toys) | settings)


LISTED = "visavis papers list"


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("goal/3/r152-cir-sig-sm", r"did you mean (goal/3/)?r152-cir-sig-ms\?$"),
        ("gaol/3/r152-ft-cir-sig-ms", r"did you mean goal/3/r152-ft-cir-sig-ms\?$"),
        ("goal/3/x", rf"{LISTED} goal lists them\.$"),
        (
            "goal/3",
            (
                rf"such as goal/3/r152-con-con(\. {LISTED} goal lists the variants|; {LISTED} goal "
                r"lists them)?\.$"
            ),
        ),
        (
            "goal/9/x",
            (
                rf"the tables of goal are goal/2, goal/3, goal/4, goal/5, goal/6[.;] {LISTED} goal "
                r"lists their rows\.$"
            ),
        ),
        (
            "goal",
            (
                rf"the tables of goal are goal/2, goal/3, goal/4, goal/5, goal/6[.;] {LISTED} goal "
                r"lists their rows\.$"
            ),
        ),
    ],
)
def test_unknown_row_id_reports_nearest_row(named, sentence, trained):
    for call in (
        lambda: visavis.train(named),
        lambda: visavis.papers_evaluate(trained.run, published=named),
    ):
        with pytest.raises(visavis.core.errors.RecipeError, match=sentence) as raised:
            call()
        assert len(str(raised.value)) < 250


def test_unknown_name_reports_how_to_list_rows(tmp_path):
    with pytest.raises(
        visavis.core.errors.RecipeError,
        match=r"^x: expected a TOML file or the name of a shipped recipe, found neither: visavis catalog recipes lists them\.$",
    ):
        visavis.train("x")
    expected = rf"expected PAPER/TABLE/ROW, such as cocos/1/\S+\. {LISTED} cocos lists the rows of one of cocos, goal, ladder, unified\.$"
    with pytest.raises(
        visavis.core.errors.RecipeError,
        match=rf"^published: 'x' is not a row of a paper's table: {expected}",
    ):
        visavis.papers_evaluate(tmp_path / "no such run", published="x")
