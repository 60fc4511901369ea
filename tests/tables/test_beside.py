"""A run of a table's row: several protocols at once, and the paper's figures beside what was reached."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import visavis
from visavis.cli.output import print_evaluation, print_trained
from visavis.evaluation.protocols import Protocol
from visavis.runs.begin import Trained
from visavis.training.data_module import DataModule, prepare

from .toy import overrides, toy

ROW = "goal/3/r152-cir-sig-ms"
HALVES = Protocol(name="halves", description="two folds, two captions each", captions_per_image=2, folds=2)
THREE = Protocol(name="three", description="three captions each", captions_per_image=3)


@pytest.fixture(scope="module")
def trained(toys, tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("run")
    return visavis.train(ROW, out=folder / "run", overrides=overrides(ROW, toys) | {"evaluation.report": ["i2t_map_at_5_hits"]})


def said(result, printer, capsys) -> str:
    printer(result)
    return capsys.readouterr().out


def test_a_run_of_a_row_prints_published_reached_and_difference(trained, capsys):
    text = said(trained, print_trained, capsys)
    reached = trained.test.metrics["i2t_r1"]
    cells = re.split(r" {2,}", next(line for line in text.splitlines() if line.startswith("image to text R@1")))
    assert cells == ["image to text R@1", "35.3 ± 0.4", f"{reached:.1f}", f"{reached - 35.3:+.1f}"]
    assert "Published: goal/3/r152-cir-sig-ms: Xuan and Chen" in text
    assert "of protocol coco-5k, those reached of plain: other candidates." in text
    assert f"image to text mAP@5 by hits {trained.test.metrics['i2t_map_at_5_hits']:.3f}" in text


def test_the_same_stands_in_json_and_in_a_later_evaluation(trained):
    found = trained.to_json()["published"]
    assert (found["paper"], found["table"], found["row"], found["reached_by"]) == ("goal", 3, "r152-cir-sig-ms", "plain")
    reached = trained.test.metrics["t2i_r1"]
    assert found["published"]["t2i_r1"] == {"published": 23.7, "std": 0.1, "reached": reached, "difference": reached - 23.7}
    again = visavis.evaluate(trained.folder)
    assert again.to_json() == trained.test.to_json()
    assert visavis.evaluate(trained.folder, split="val").published is None, "figures are of the test split alone"


def test_figures_are_set_beside_the_protocol_that_they_are_of(trained, capsys):
    others = replace(trained.test, protocol="coco-5k", metrics=trained.test.metrics | {"i2t_r1": 12.5})
    result = replace(trained.test, others=(others,))
    assert result.to_json()["published"]["published"]["i2t_r1"]["reached"] == 12.5
    text = said(result, print_evaluation, capsys)
    assert "-22.8" in text and "other candidates" not in text


def test_several_protocols_are_each_as_if_alone_and_the_items_are_encoded_once(toys, monkeypatch):
    data_module, matcher = prepare(toy(ROW, toys))
    alone = [data_module.evaluate(matcher, "test", rules) for rules in (HALVES, THREE)]
    encoded = []
    monkeypatch.setattr(DataModule, "encode", lambda self, *given, encode=DataModule.encode: encoded.append(given) or encode(self, *given))
    together = data_module.evaluate(matcher, "test", (HALVES, THREE))
    assert len(encoded) == 1
    assert list(together.by_protocol) == ["halves", "three"]
    assert [result.metrics for result in together.by_protocol.values()] == [result.metrics for result in alone]
    flat = together.to_json()
    assert {key: value for key, value in flat.items() if key != "protocols"} == alone[0].to_json()
    assert flat["protocols"] == {result.protocol: result.to_json() for result in alone}


def test_a_figure_that_was_not_measured_is_no_number(trained, capsys):
    result = visavis.evaluate(trained.folder, published="ladder/4/cvse++-res152-l3")
    figures = result.to_json()["published"]["published"]
    assert figures["i2t_cs_at_200"] == {"published": 0.274, "reached": None, "difference": None}
    line = next(line for line in said(result, print_evaluation, capsys).splitlines() if line.startswith("image to text CS@200"))
    assert line.split() == ["image", "to", "text", "CS@200", "0.274", "-", "-"]


def test_any_row_can_be_set_beside_a_result(trained):
    assert visavis.evaluate(trained.folder, published="unified/2/clip-coco").published.address == "unified/2/clip-coco"
    with pytest.raises(visavis.errors.VisavisError, match=r"cocos/2/vse\+\+-coco-triplet counts a training .* visavis diagnose"):
        visavis.evaluate(trained.folder, published="cocos/2/vse++-coco-triplet")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"evaluation.protocol": []}, r"evaluation.protocol is \[\]: expected the name of a protocol in quotes, or a list"),
        ({"evaluation.protocol": ["plain", 5]}, r"evaluation.protocol is \['plain', 5\]: expected the name"),
        ({"evaluation.protocol": ["plain", "plain"]}, r"evaluation.protocol is \['plain', 'plain'\], where one is named twice"),
        ({"evaluation.protocol": ["plain", "flickr8k"]}, r"protocol flickr8k is defined on 1000 images"),
        ({"evaluation.report": ["i2t_r2"]}, r"evaluation.report names 'i2t_r2', which is no metric: did you mean i2t_r"),
        ({"published": "goal/3/r152"}, r"published is 'goal/3/r152', which names no row"),
    ],
)
def test_what_cannot_be_evaluated_so_is_one_sentence_before_any_training(settings, sentence, toys, tmp_path):
    with pytest.raises(visavis.errors.VisavisError, match=sentence):
        visavis.train(ROW, out=tmp_path / "run", overrides=overrides(ROW, toys) | settings)


def test_a_mean_of_two_networks_is_asked_of_a_run_that_has_one(toys, tmp_path):
    with pytest.raises(visavis.errors.VisavisError, match=r"evaluation\.average is for runs of two networks"):
        visavis.train(ROW, out=tmp_path / "run", overrides=overrides(ROW, toys) | {"evaluation.average": True})


LISTED = "visavis catalog recipes --paper"


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("goal/3/r152-cir-sig-sm", r"did you mean (goal/3/)?r152-cir-sig-ms\?$"),
        ("gaol/3/r152-ft-cir-sig-ms", r"did you mean goal/3/r152-ft-cir-sig-ms\?$"),
        ("goal/3/x", rf"{LISTED} goal lists them\.$"),
        ("goal/3", rf"such as goal/3/r152-con-con(; {LISTED} goal lists them)?\.$"),
        ("goal/9/x", rf"the tables of goal are goal/2, goal/3, goal/4, goal/5, goal/6; {LISTED} goal lists their rows\.$"),
        ("goal", rf"the tables of goal are goal/2, goal/3, goal/4, goal/5, goal/6; {LISTED} goal lists their rows\.$"),
    ],
)
def test_an_address_of_no_row_is_told_the_nearest_one_or_how_they_are_listed(named, sentence, trained):
    for door in (lambda: visavis.train(named), lambda: visavis.evaluate(trained.folder, published=named)):
        with pytest.raises(visavis.errors.RecipeError, match=sentence) as raised:
            door()
        assert len(str(raised.value)) < 250


def test_a_name_like_no_other_is_told_what_lists_them_and_a_row_before_anything_is_read(tmp_path):
    with pytest.raises(
        visavis.errors.RecipeError, match=r"^x is neither a TOML file nor a recipe that ships: visavis catalog recipes lists them\.$"
    ):
        visavis.train("x")
    expected = rf"expected PAPER/TABLE/ROW, such as cocos/1/\S+; {LISTED} cocos lists those of one of cocos, goal, ladder, unified\.$"
    with pytest.raises(visavis.errors.RecipeError, match=rf"^published is 'x', which names no row of a paper's table: {expected}"):
        visavis.evaluate(tmp_path / "no such run", published="x")
