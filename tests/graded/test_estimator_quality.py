"""Quality of relevance estimators: human ratings, fine-tuning, and thresholds."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import visavis
from visavis import api as verbs
from visavis.cli import app, main
from visavis.core.errors import DataError, RefusedOverwrite, SpecError, VisavisError
from visavis.core.spec import parse
from visavis.models.encoders.frozen_encoders import open_text_encoder
from visavis.models.encoders.sentence_encoders import open_text_pair_encoder
from visavis.objectives import CATALOG as OBJECTIVES
from visavis.objectives import Ladder
from visavis.papers.relevance import FunctionRelevance
from visavis.papers.relevance.catalog import parse_estimator
from visavis.papers.relevance.estimator_quality import (
    random_pairs,
    rating_correlations,
    sample_relevance,
    summarize_relevance,
)
from visavis.papers.relevance.fine_tuning import (
    _Cosine,
    _LinearOutput,
    _Output,
    _parameter_groups,
    rating_pearson,
)
from visavis.papers.relevance.human_agreement import (
    RatedCaptionPairs,
    read_crisscrossed_captions,
    read_stsb,
)
from visavis.training.recipes.files import read_recipe

HEAD = "genre\tfile\tyear\tindex\tscore\tsentence1\tsentence2\n"
SENTENCES = ["a dog runs", "the cat sleeps", "two red dog", "a cat on the beach", 'the "beach']


def benchmark(folder, splits=("train", "dev", "test"), pairs=40):
    """A benchmark of the published layout: equal sentences are rated 5, others 1."""
    (folder / "stsb").mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for split in splits:
        lines = []
        for _ in range(pairs):
            one, other = (
                random.choice(SENTENCES, 2)
                if random.random() < 0.5
                else [random.choice(SENTENCES)] * 2
            )
            lines.append(f"g\tf\t2012\t1\t{5 if one == other else 1}.000\t{one}\t{other}\n")
        (folder / "stsb" / f"sts-{split}.tsv").write_text(HEAD + "".join(lines))


def crisscrossed(folder, rows):
    place = folder / "coco_5k_test_text"
    place.mkdir(exist_ok=True)
    sentences = [{"sentid": 10 + i, "raw": text} for i, text in enumerate(SENTENCES)]
    (place / "dataset_coco_5k_test.json").write_text(
        json.dumps({"images": [{"sentences": sentences}]})
    )
    (place / "cxc_sts_test.csv").write_text(
        "caption1,caption2,agg_score,sampling_method\n" + "".join(rows)
    )


@pytest.fixture
def people(tmp_path, monkeypatch):
    """Both collections of ratings, small, where VISAVIS_DATA points. Speed is measured for a
    moment.
    """
    monkeypatch.setattr("visavis.papers.relevance.estimator_quality.SPEED_TEST_SECONDS", 0.01)
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    benchmark(tmp_path)
    random = np.random.default_rng(1)
    pairs = [random.integers(10, 15, 2) for _ in range(30)]
    crisscrossed(
        tmp_path,
        [
            f"COCO_val2014:sentid:{a},COCO_val2014:sentid:{b},{random.random() * 5:.2f},x\n"
            for a, b in pairs
        ],
    )
    return tmp_path


def test_ratings_match_files(people):
    rated = read_stsb("dev")
    assert len(rated.first) == len(rated.second) == len(rated.ratings) == 40
    assert set(rated.ratings) == {1, 5}
    assert 'the "beach' in rated.first
    rated = read_crisscrossed_captions()
    assert set(rated.first) <= set(SENTENCES)
    assert len(rated.ratings) == 30


@pytest.mark.data
def test_ratings_have_published_sizes():
    assert [len(read_stsb(split).ratings) for split in ("train", "dev", "test")] == [
        5749,
        1500,
        1379,
    ]
    assert len(read_crisscrossed_captions().ratings) == 44_045


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *(
            (
                f"g\tf\t2012\t1\t{score}\ta\tb\n",
                ", line 2: expected sentence1, sentence2 and a score from 0 to 5",
            )
            for score in ("9.0", "x", "nan")
        ),
        ("g\tf\t2012\t1\t3\ta\n", ": line 2: expected 7 columns, got 6"),
    ],
)
def test_ratings_report_invalid_line(people, line, message):
    (people / "stsb" / "sts-dev.tsv").write_text(HEAD + line)
    with pytest.raises(DataError, match=f"sts-dev.tsv{message}"):
        read_stsb("dev")


def test_ratings_report_missing_and_invalid_files(people, monkeypatch):
    (people / "stsb" / "sts-dev.tsv").write_text(HEAD)
    with pytest.raises(DataError, match="expected rated pairs, got an empty table"):
        read_stsb("dev")
    (people / "stsb" / "sts-dev.tsv").unlink()
    with pytest.raises(
        DataError,
        match=r"^stsb/sts-dev.tsv: expected an existing path, here or under VISAVIS_DATA .*, got none\.",
    ):
        read_stsb("dev")
    crisscrossed(people, ["COCO_val2014:sentid:10,COCO_val2014:sentid:99,1.0,x\n"])
    with pytest.raises(
        DataError,
        match=r"cxc_sts_test.csv: expected captions of .*dataset_coco_5k_test.json, got the unknown caption 99",
    ):
        read_crisscrossed_captions()
    (people / "coco_5k_test_text" / "dataset_coco_5k_test.json").write_text("{}")
    with pytest.raises(DataError, match=r"dataset_coco_5k_test\.json: images is missing"):
        read_crisscrossed_captions()


def test_rating_correlations_match_hand_values():
    rated = RatedCaptionPairs("three", ["a", "b", "c"], ["a", "b", "c"], np.array([0.0, 1.0, 4.0]))
    relevance = {"a": 0.1, "b": 0.2, "c": 0.3}
    pearson, spearman, notes = rating_correlations(
        FunctionRelevance(
            lambda one, other: np.array([[relevance[x] for _ in other] for x in one])
        ),
        rated,
    )
    assert pearson == pytest.approx(np.corrcoef([0.1, 0.2, 0.3], [0, 1, 4])[0, 1])
    assert spearman == pytest.approx(1)
    assert notes == ()


def test_rating_correlations_of_constant_estimator():
    rated = RatedCaptionPairs("two", ["a", "b"], ["b", "a"], np.array([0.0, 1.0]))
    pearson, spearman, notes = rating_correlations(
        FunctionRelevance(lambda one, other: np.full((len(one), len(other)), 0.5)), rated
    )
    assert (pearson, spearman, notes) == (
        None,
        None,
        ("no correlation, because every pair has relevance 0.5.",),
    )


def test_random_pairs_have_different_items():
    first, second = random_pairs(5, 1000)
    assert (first != second).all()
    assert set(second.tolist()) == set(range(5))


def test_relevance_command_evaluates_estimators(people, vectors_file, tiny_models, monkeypatch):
    words = f"CBoW(vectors={str(vectors_file)!r})"
    specs = [
        words,
        f"SentenceModel(model={str(tiny_models / 'bert')!r})",
        f"CrossEncoder(model={str(tiny_models / 'cross')!r})",
    ]
    before = dict(os.environ)
    rows = visavis.papers_relevance(specs)
    assert dict(os.environ) == before
    assert [row.estimator for row in rows] == specs
    for row in rows:
        assert list(row.pearson) == ["STS-B dev", "STS-B test", "Crisscrossed Captions"]
        assert (
            row.pearson["STS-B dev"] > 0.3
        )  # equal sentences have the highest relevance and the highest rating
        assert 0 <= row.share_above_threshold <= 1
        assert row.captions_per_s > 0
        assert row.million_pairs_s > 0
    assert rows[0].million_pairs_s < 1000
    shown = CliRunner().invoke(
        app,
        [
            "papers",
            "relevance",
            *(part for spec in specs for part in ("--estimator", spec)),
            "--json",
        ],
        catch_exceptions=False,
    )
    content = json.loads(shown.stdout)["estimators"]
    assert [row["pearson"] for row in content] == [row.pearson for row in rows]
    shown = CliRunner().invoke(
        app, ["papers", "relevance", "--estimator", words], catch_exceptions=False
    )
    assert "0.79 on STS-B, split not stated" in shown.stdout
    assert f"{rows[0].pearson['STS-B test']:.3f}" in shown.stdout


@pytest.mark.parametrize("kind", ["bi", "cross", "regression"])
@pytest.mark.slow
def test_fine_tuned_model_is_reproducible_and_readable(people, tiny_models, tmp_path, kind):
    out = tmp_path / "fitted"
    options = {
        "kind": kind,
        "model": str(tiny_models / "bert"),
        "epochs": 3,
        "lr": 0.01 if kind == "bi" else 0.003,
        "batch_size": 8,
    }
    fitted = verbs.papers_relevance_fit(out, **options)
    assert len(fitted.dev) == 4
    assert (
        len(set(fitted.dev)) > 1
    )  # whether the best epoch is a later one depends on the processor
    opened = open_text_encoder(str(out)) if kind == "bi" else open_text_pair_encoder(str(out))
    kept = {"bi": _Cosine, "cross": _Output, "regression": _LinearOutput}[kind](opened)
    assert rating_pearson(kept, read_stsb("dev")) == pytest.approx(max(fitted.dev), abs=1e-5)
    assert rating_pearson(kept, read_stsb("test")) == pytest.approx(fitted.test, abs=1e-5)
    read = parse(fitted.estimator, visavis.papers.relevance.CATALOG)(
        ["a dog runs"], ["the cat sleeps"]
    )
    assert read.item() == pytest.approx(
        kept.relevance(["a dog runs"], ["the cat sleeps"]).clamp(0, 1).item(), abs=0.01
    )  # kept as float16
    again = verbs.papers_relevance_fit(tmp_path / "again", **options)
    assert again.dev == fitted.dev
    assert verbs.papers_relevance_fit(tmp_path / "other", **options, seed=1).dev != fitted.dev
    assert json.loads((out / "fit.json").read_text())["dev"] == list(fitted.dev)
    with pytest.raises(RefusedOverwrite):
        verbs.papers_relevance_fit(out, **options)


def test_regression_decays_matrices_only(tiny_models):
    encoder = open_text_pair_encoder(str(tiny_models / "cross"))
    for kind, decay_of_vectors in (("regression", 0.0), ("cross", 0.01)):
        matrices, vectors = _parameter_groups(encoder, kind)
        assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.01, decay_of_vectors)
        assert {parameter.dim() for parameter in vectors["params"]} == {1}
        assert len(matrices["params"]) + len(vectors["params"]) == len(list(encoder.parameters()))


class FixedOutputs:
    """A pair encoder of two given outputs."""

    def preprocess(self, first, second):
        return None

    def __call__(self, tokens):
        return torch.tensor([0.5, -0.25])


def test_regression_loss_by_hand():
    """Ratings of 0 to 1, and the output itself: (0.5 - 1)^2 and (-0.25 - 0)^2."""
    loss = _LinearOutput(FixedOutputs()).loss(["a", "b"], ["c", "d"], torch.tensor([1.0, 0.0]))
    assert loss.item() == pytest.approx((0.25 + 0.0625) / 2)


def test_recipe_of_ladder_paper_refines_by_fine_tuned_bert(
    people, tiny_models, vectors_file, tmp_path, monkeypatch
):
    """The documented steps with a BERT of two layers: fit to the folder sts-bert, then the
    relevance that the recipe names.
    """
    monkeypatch.chdir(tmp_path)
    fitted = verbs.papers_relevance_fit(
        "sts-bert",
        kind="regression",
        model=str(tiny_models / "bert"),
        epochs=1,
        lr=0.003,
        batch_size=8,
    )
    assert fitted.estimator == "CrossEncoder(model='sts-bert', output='identity')"
    recipe = read_recipe("cvse++-bert/flickr30k")
    supervision = recipe.phases[0].supervision
    words = f"CBoW(vectors={str(vectors_file)!r})"
    refined = parse(supervision.relevance, visavis.papers.relevance.CATALOG)
    assert refined == parse_estimator(recipe.evaluation.sections[0].relevance)
    found, coarse, fine = (
        one(SENTENCES, SENTENCES)
        for one in (
            replace(refined, coarse=words),
            *(parse(s, visavis.papers.relevance.CATALOG) for s in (words, refined.fine)),
        )
    )
    assert 0 < (coarse > 0.8).float().mean() < 1
    torch.testing.assert_close(found, torch.where(coarse > 0.8, fine, coarse))


def test_fine_tuned_model_keeps_pooling(people, tiny_models, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_models / "bert", base)
    types = "sentence_transformers.models."
    modules = [
        {"path": "", "type": types + "Transformer"},
        {"path": "1_Pooling", "type": types + "Pooling"},
    ]
    (base / "modules.json").write_text(json.dumps(modules))
    (base / "1_Pooling").mkdir()
    (base / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    verbs.papers_relevance_fit(tmp_path / "fitted", model=str(base), epochs=1)
    assert open_text_encoder(str(tmp_path / "fitted")).pooling.mode == "first"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"kind": "tri"}, "kind: expected 'bi' or 'cross' or 'regression', got 'tri'"),
        ({"epochs": 0}, "epochs, batch_size: expected integers >= 1, got 0 and 16"),
        ({"batch_size": 0}, "epochs, batch_size: expected integers >= 1, got 4 and 0"),
        ({"model": "no/such"}, "no/such: expected a folder with a config.json"),
    ],
)
def test_fine_tuning_rejects_invalid_arguments(people, tmp_path, wrong, sentence):
    with pytest.raises(VisavisError, match=f"^{sentence}"):
        verbs.papers_relevance_fit(tmp_path / "fitted", **wrong)
    assert not (tmp_path / "fitted").exists()


def test_thresholds_are_quantiles_of_training_pairs(few_scenes, tmp_path):
    plot = tmp_path / "relevance.png"
    (row,) = verbs.papers_relevance_thresholds(
        few_scenes, estimator="SceneRelevance()", num_pairs=250, out=plot
    )
    from visavis.data.dataset_reader import open_dataset
    from visavis.papers.relevance import SceneRelevance

    train = open_dataset(few_scenes).split("train")
    relevance = sample_relevance(SceneRelevance().for_dataset(train), train, 250)
    assert row.pairs == len(relevance) == 2 * 12 * 11
    assert row.mean == pytest.approx(relevance.mean())
    assert row.share_above_threshold == pytest.approx((relevance > 0.63).mean())
    assert sum(row.histogram) == row.pairs
    for share, value in zip((0.01, 0.03, 0.1, 0.3), row.quantiles, strict=True):
        assert (relevance > value + 0.001).mean() <= share + 1 / row.pairs
        assert share <= (relevance >= value - 0.001).mean() + 1 / row.pairs
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RefusedOverwrite, match=r"already exists\. Nothing was changed"):
        verbs.papers_relevance_thresholds(few_scenes, estimator="SceneRelevance()", out=plot)


def test_ladder_specs_are_objectives():
    row = summarize_relevance("x", np.linspace(0, 1, 1001), "data")
    ladders = [parse(text, OBJECTIVES) for text in row.ladder_specs]
    assert [len(ladder.margins) for ladder in ladders] == [2, 3, 4, 5]
    assert ladders[3] == Ladder(
        margins=(0.2, 0.01, 0.01, 0.01, 0.01),
        thresholds=(0.99, 0.97, 0.9, 0.7),
        betas=(1, 0.25, 0.125, 0.0625, 0.03125),
    )


def test_thresholds_require_different_values():
    row = summarize_relevance("x", np.array([0.0] * 95 + [0.5, 0.6, 0.7, 0.8, 0.9]), "data")
    assert len(row.ladder_specs) == 2
    with pytest.raises(
        DataError,
        match=r"x: expected different relevance values, got 0.5 for all sampled pairs of data",
    ):
        summarize_relevance("x", np.full(10, 0.5), "data")


def test_thresholds_reject_invalid_number_of_pairs(few_scenes):
    with pytest.raises(
        SpecError, match=r"num_pairs: expected an integer from 1 to 100,000,000, got 0"
    ):
        verbs.papers_relevance_thresholds(few_scenes, estimator="SceneRelevance()", num_pairs=0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--estimator", "SceneRelevance()"], "SceneRelevance: expected images with captions"),
        (["--estimator", "Bert()"], "'Bert' in 'Bert()' is not in the catalog"),
        (
            ["fit", "--out", "x", "--epochs", "0"],
            "epochs, batch_size: expected integers >= 1, got 0 and 16",
        ),
    ],
)
def test_relevance_command_reports_errors_in_one_line(
    people, monkeypatch, capsys, arguments, sentence
):
    monkeypatch.setattr("sys.argv", ["visavis", "papers", "relevance", *arguments])
    with pytest.raises(SystemExit, match="1"):
        main()
    error = capsys.readouterr().err
    assert error.startswith("visavis: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_sample_relevance_rejects_one_image(few_scenes):
    from visavis.data.dataset_reader import open_dataset

    with pytest.raises(DataError, match="expected at least 2 training images, got 1"):
        sample_relevance(lambda *_: None, open_dataset(few_scenes).take(np.array([0])), 10)


def test_thresholds_command_prints_ladders(few_scenes):
    command = [
        "papers",
        "relevance",
        "thresholds",
        str(few_scenes),
        "--estimator",
        "SceneRelevance()",
    ]
    text, content = (
        CliRunner().invoke(app, [*command, *more], catch_exceptions=False).stdout
        for more in (["--num-pairs", "100"], ["--num-pairs", "100", "--json"])
    )
    assert "L = 2: Ladder(margins=(0.2, 0.01)" in text
    assert len(json.loads(content)["estimators"][0]["ladder_specs"]) >= 1


@pytest.mark.long
@pytest.mark.data
def test_paper_threshold_does_not_suit_short_word_vectors(data_folder):
    word, without = verbs.papers_relevance_thresholds(
        "flickr8k", estimator=["CBoW()", "CBoW(removed_components=1)"], num_pairs=10_000
    )
    assert word.mean > 0.8
    assert word.share_above_threshold > 0.95
    assert without.share_above_threshold < 0.05
