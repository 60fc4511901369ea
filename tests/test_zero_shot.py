"""Pretrained CLIP and SigLIP folders in place of runs."""

from __future__ import annotations

import csv
import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from tests.fixtures.recipes import write_recipe
from typer.testing import CliRunner

import visavis
from visavis import cli, evaluation
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RecipeError, RunError, VisavisError
from visavis.data.dataset_reader import open_dataset
from visavis.evaluation.classification import class_vectors, zero_shot_accuracy
from visavis.losses.targets import Targets
from visavis.objectives import Unified
from visavis.papers.diagnostics.contributing_samples import contributing_by_epsilon
from visavis.papers.relevance import runs as agreement
from visavis.papers.relevance.human_agreement import FLICKR8K_FILES
from visavis.training.recipes.files import read_recipe

from .matching import mentions

pytest.importorskip("transformers")
kinds = pytest.mark.parametrize("kind", ["clip", "siglip"])


@pytest.fixture(scope="module")
def rated(few_scenes, tmp_path_factory):
    """The scenes with human ratings of some pairs of the test split."""
    folder = shutil.copytree(few_scenes, tmp_path_factory.mktemp("rated") / "scenes")
    split = open_dataset(few_scenes).split("test")
    random = np.random.default_rng(0)
    names = [image.name for image in split.images]
    pairs = [(image, caption) for image in names for caption in names]
    expert = (
        f"{image}\t{other}#0\t" + "\t".join(map(str, random.integers(1, 5, 3)))
        for image, other in pairs
    )
    (folder / FLICKR8K_FILES["expert"]).write_text("\n".join(expert))
    (folder / FLICKR8K_FILES["crowd"]).write_text(
        "\n".join(f"{image}\t{other}#1\t0.5\t{random.integers(1, 4)}\t2" for image, other in pairs)
    )
    return folder


@pytest.fixture(scope="module")
def coco(few_scenes, tmp_path_factory):
    """The scenes in the layout of MS-COCO: Karpathy's list, a folder of images, and ratings of
    Crisscrossed Captions.
    """
    folder = tmp_path_factory.mktemp("coco")
    (folder / "val2014").mkdir()
    listed, ratings, random = (
        [],
        ["caption,image,agg_score,sampling_method"],
        np.random.default_rng(0),
    )
    data = open_dataset(few_scenes)
    for number, (image, own) in enumerate(zip(data.images, data.captions_of, strict=True)):
        name = f"COCO_val2014_{number:012}.jpg"
        image.open().save(folder / "val2014" / name)
        sentences = [
            {"raw": data.captions[i], "imgid": number, "sentid": int(900 - i)} for i in own
        ]
        sentids = [sentence["sentid"] for sentence in sentences]
        listed.append(
            {
                "filepath": "val2014",
                "filename": name,
                "imgid": number,
                "cocoid": number,
                "split": image.split,
            }
        )
        listed[-1] |= {"sentids": sentids, "sentences": sentences}
        if image.split == "test":
            ratings += [
                f"COCO_val2014:sentid:{sentid},{name},{random.uniform(3, 5):.2f},c2i_original"
                for sentid in sentids
            ]
            if listed[-2]["split"] == "test":
                ratings.append(
                    f"COCO_val2014:sentid:{sentids[0]},{listed[-2]['filename']},{random.uniform(0, 4):.2f},c2i_intrasim"
                )
    (folder / "dataset_coco.json").write_text(json.dumps({"images": listed, "dataset": "coco"}))
    (folder / "cxc_sits_test.csv").write_text("\n".join(ratings) + "\n")
    return folder


def encoded(folder, split):
    model = visavis.load(folder)
    return model.encode_images([image.open() for image in split.images]), model.encode_texts(
        split.captions
    )


@kinds
def test_pretrained_folder_evaluates_as_its_vectors(dual_encoders, few_scenes, kind):
    split = open_dataset(few_scenes).split("test")
    images, texts = encoded(dual_encoders / kind, split)
    expected = evaluation.evaluate(
        Encoded(images),
        Encoded(texts),
        lambda visual, text: visual.vectors @ text.vectors.T,
        torch.arange(len(split.images)),
        torch.from_numpy(split.image_of),
    )
    result = visavis.evaluate(dual_encoders / kind, data=few_scenes)
    assert (result.num_images, result.num_texts, result.protocol) == (8, 16, "plain")
    assert result.metrics["rsum"] == pytest.approx(expected.metrics["rsum"], abs=1e-6)
    assert visavis.evaluate(dual_encoders / kind, data=few_scenes, split="val").num_images == 4


@kinds
def test_pretrained_folder_searches_images(dual_encoders, few_scenes, kind):
    data = open_dataset(few_scenes)
    images, texts = encoded(dual_encoders / kind, data)
    hits = visavis.search(dual_encoders / kind, data.captions[3], collection=few_scenes, top=5)
    best = (images @ texts[3]).topk(5)
    assert [hit.name for hit in hits] == [data.images[i].name for i in best.indices.tolist()]
    assert [hit.score for hit in hits] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_pretrained_folder_is_compared_with_runs(dual_encoders, few_scenes, tmp_path):
    models = [dual_encoders / "clip", dual_encoders / "siglip"]
    result = visavis.papers_coherence(
        models,
        relevance="SceneRelevance()",
        data=few_scenes,
        queries=1,
        top=3,
        out=tmp_path / "new",
    )
    assert [(ranker.name, ranker.objective) for ranker in result.rankers[:2]] == [
        ("clip", "zero-shot"),
        ("siglip", "zero-shot"),
    ]
    assert result.data.fingerprint == open_dataset(few_scenes).split("test").fingerprint
    assert "zero-shot" in (tmp_path / "new" / "report.html").read_text()


def test_agreement_with_human_ratings(dual_encoders, rated, monkeypatch):
    monkeypatch.setattr(
        agreement, "measure_agreement", partial(agreement.measure_agreement, resamples=3)
    )
    expert, *_ = visavis.papers_agreement(dual_encoders / "clip", data=rated)
    split = open_dataset(rated).split("test")
    images, texts = encoded(dual_encoders / "clip", split)
    first = torch.tensor([own[0] for own in split.captions_of])
    lines = [
        line.split("\t")[2:] for line in (rated / FLICKR8K_FILES["expert"]).read_text().splitlines()
    ]
    ratings = np.array(lines, dtype=float).mean(1)
    scores = (images @ texts[first].T).flatten().double().numpy()
    (run,) = expert.runs.values()
    assert expert.pairs == 64
    assert run["spearman"].value == pytest.approx(spearmanr(scores, ratings).statistic, abs=1e-6)


def test_agreement_with_crisscrossed_captions(dual_encoders, coco, monkeypatch):
    monkeypatch.setattr(
        agreement, "measure_agreement", partial(agreement.measure_agreement, resamples=20)
    )
    whole, others = visavis.papers_agreement(dual_encoders / "clip", data=coco)
    assert [
        (each.judgments, each.includes_own_captions, each.pairs, each.images, each.annotators)
        for each in (whole, others)
    ] == [
        ("cxc", True, 23, 8, {}),
        ("cxc", False, 7, 7, {}),
    ]
    split = open_dataset(coco).split("test")
    images, texts = encoded(dual_encoders / "clip", split)
    with open(coco / "cxc_sits_test.csv") as file:
        rows = list(csv.DictReader(file))
    captions = [
        900 - int(row["caption"].split(":")[2]) - int(split.caption_rows[0]) for row in rows
    ]
    names = [image.name for image in split.images]
    scores = [
        float(images[names.index(row["image"])] @ texts[caption])
        for row, caption in zip(rows, captions, strict=True)
    ]
    (found,) = whole.runs.values()
    assert found["spearman"].value == pytest.approx(
        spearmanr(scores, [float(row["agg_score"]) for row in rows]).statistic, abs=1e-6
    )
    printed = CliRunner().invoke(
        cli.app, ["papers", "agreement", str(dual_encoders / "clip"), "--data", str(coco)]
    )
    assert (
        f"{found['sampled_spearman'].value:.3f} ± {found['sampled_spearman'].std:.3f}"
        in printed.output
    )
    assert "people" not in printed.output


def test_agreement_rejects_captions_alone(dual_encoders, coco, tmp_path):
    for file in coco.glob("*.*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(
        DataError,
        match=r"COCO_val2014_\d+\.jpg has no pixels: this data set has only captions or features",
    ):
        visavis.papers_agreement(dual_encoders / "clip", data=tmp_path)


def test_diagnose_uses_given_objective(dual_encoders, few_scenes):
    found = visavis.papers_diagnose(
        dual_encoders / "clip", data=few_scenes, objective=["Unified()", "VLC()"]
    )
    assert found.counts[0].objective == repr(Unified())
    assert found.counts[1].objective.startswith("VLC(")
    assert (found.step, found.batches, found.texts) == (0, 1, 24)
    split = open_dataset(few_scenes).split("train")
    images, texts = encoded(dual_encoders / "clip", split)
    batch = torch.from_numpy(split.image_of)
    (ways,) = contributing_by_epsilon(
        Unified(),
        images[batch] @ texts.T,
        Targets(query_ids=batch, candidate_ids=batch),
        [0.01],
    )
    assert found.counts[0].mean["i2t_push"] == pytest.approx(
        ways["i2t"].push.mean().item(), rel=1e-3
    )


def test_pretrained_folder_reports_missing_parts(dual_encoders, few_scenes, tmp_path):
    clip = dual_encoders / "clip"
    brings_no_data = r"clip: expected a data set, but .* Name one with --data\.$"
    for call in (
        lambda: visavis.evaluate(clip),
        lambda: visavis.papers_agreement(clip),
        lambda: visavis.papers_coherence(clip, relevance="SceneRelevance()", out=tmp_path / "new"),
        lambda: visavis.papers_diagnose(clip, objective="Unified()"),
    ):
        with pytest.raises(RunError, match=brings_no_data):
            call()
    with pytest.raises(
        RunError,
        match=r"expected a run with data, got a pretrained model\. Pass images with --collection",
    ):
        visavis.search(clip, "a red circle")
    with pytest.raises(
        RunError,
        match=r"expected an objective, because a pretrained model has none\. Name one with --objective\.$",
    ):
        visavis.papers_diagnose(clip, data=few_scenes)
    with pytest.raises(
        RunError, match=r"expected a run folder with run\.toml, or a dual encoder such as CLIP"
    ):
        visavis.evaluate(tmp_path, data=few_scenes)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/model"}')
    for call in (
        lambda: visavis.evaluate(tmp_path, data=few_scenes),
        lambda: visavis.load(tmp_path),
    ):
        with pytest.raises(
            DataError,
            match=r"expected a model, got an adapter of another model \(adapter_config\.json\)\. Merge both",
        ):
            call()


def test_text_encoder_is_trained_only_by_recipe(tmp_path):
    recipe = (
        'name = "x"\nphases = [{ epochs = 1, objective = "VLC()" }]\nmodel = { kind = "VSE++" }\n'
    )
    (tmp_path / "x.toml").write_text(
        recipe + 'visual = { encoder = "scenes" }\ntext = { encoder = "minilm" }\n'
    )
    with pytest.raises(RecipeError, match=r"text\.granularity: expected \"pooled\" or"):
        read_recipe(tmp_path / "x.toml")


TEMPLATES = ["a {}", "a large {}", "a red {} and a blue star"]


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Images of three classes, 4, 3 and 5 of them, one in a nested folder."""
    folder = tmp_path_factory.mktemp("classes")
    random = np.random.default_rng(2)
    for name, count in (("circle", 4), ("red_square", 3), ("star", 5)):
        (folder / name / "more").mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 255, (40, 36, 3), np.uint8)
            place = folder / name / ("more" if number == 0 else ".")
            Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


@pytest.mark.parametrize("prompts", [TEMPLATES, TEMPLATES[:1]])
@kinds
def test_zero_shot_accuracy_equals_published_rule(kind, prompts, classes, dual_encoders, tmp_path):
    (tmp_path / "templates.txt").write_bytes("\r\n\r\n".join(prompts).encode())
    result = visavis.classify(dual_encoders / kind, classes, templates=tmp_path / "templates.txt")
    model, names = visavis.load(dual_encoders / kind), ["circle", "red square", "star"]
    weights = []  # as CLIP's notebook builds its classifier, one class after the other
    for name in names:
        rows = np.asarray(model.encode_texts([prompt.format(name) for prompt in prompts]))
        mean = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(0)
        weights.append(mean / np.linalg.norm(mean))
    files = sorted(classes.rglob("*.png"))
    labels = np.array(
        [names.index(f.relative_to(classes).parts[0].replace("_", " ")) for f in files]
    )
    scores = np.asarray(model.encode_images(files)) @ np.stack(weights).T
    right = scores.argmax(1) == labels
    assert result.top1.value == pytest.approx(100 * right.mean())
    assert result.top5.value == 100
    recalls = [100 * right[labels == number].mean() for number in range(3)]
    assert [each.top1 for each in result.classes] == pytest.approx(recalls)
    assert result.mean_per_class.value == pytest.approx(np.mean(recalls))
    assert [(each.name, each.images) for each in result.classes] == [
        ("circle", 4),
        ("red square", 3),
        ("star", 5),
    ]
    for each, number in zip(result.classes, range(3), strict=True):
        wrong = scores.argmax(1)[(labels == number) & ~right]
        assert (each.confused_with is None) == (not len(wrong))
        if len(wrong):
            assert each.confused_images == np.bincount(wrong).max()


def test_zero_shot_intervals_cover_binomial_accuracy():
    random, covered = np.random.default_rng(0), 0
    labels = torch.arange(2).repeat_interleave(100)
    for trial in range(40):
        right = torch.from_numpy(random.random(200) < 0.7)
        scores = torch.nn.functional.one_hot(torch.where(right, labels, 1 - labels), 2).float()
        result = zero_shot_accuracy(scores, labels, ["a", "b"], "", seed=trial)
        assert result.top1.value == pytest.approx(100 * right.float().mean().item())
        covered += 70 in result.top1.interval
    assert covered >= 34


def test_tie_of_classes_counts_against_the_model():
    result = zero_shot_accuracy(torch.ones(4, 3), torch.tensor([0, 1, 2, 2]), ["a", "b", "c"], "")
    assert (result.top1.value, result.top5.value) == (0, 100)


def test_zero_shot_of_attention_model_averages_scores(classes, tmp_path, few_scenes):
    recipe = write_recipe(
        tmp_path / "scan.toml",
        {"objective": "Unified()"},
        visual={"granularity": "regions"},
        model={"kind": "SCAN"},
    )
    run = visavis.train(recipe, data=few_scenes, out=tmp_path / "run").run
    (tmp_path / "templates.txt").write_text("\n".join(TEMPLATES))
    result = visavis.classify(run, classes, templates=tmp_path / "templates.txt")
    files, names = sorted(classes.rglob("*.png")), ["circle", "red square", "star"]
    scores = [
        np.asarray(
            visavis.load(run).score(files, [prompt.format(name) for prompt in TEMPLATES])
        ).mean(1)
        for name in names
    ]
    labels = [names.index(f.relative_to(classes).parts[0].replace("_", " ")) for f in files]
    right = np.stack(scores, 1).argmax(1) == labels
    assert result.top1.value == pytest.approx(100 * right.mean())
    assert "mean of their scores" in result.protocol


@pytest.mark.parametrize(
    ("prompts", "words"),
    [("a photo", ("line 1", "{}")), ("{} and {}", ("line 1",)), ("", ("one prompt",))],
)
def test_wrong_templates_name_the_line(prompts, words, classes, dual_encoders, tmp_path):
    (tmp_path / "t.txt").write_text(prompts)
    with pytest.raises(DataError, match=mentions("t.txt", *words)):
        visavis.classify(dual_encoders / "clip", classes, templates=tmp_path / "t.txt")


def test_folder_without_classes_is_rejected(classes, dual_encoders, tmp_path):
    with pytest.raises(DataError, match=mentions("at least two folders", "got 1")):
        visavis.classify(
            dual_encoders / "clip",
            shutil.copytree(classes / "star", tmp_path / "x" / "star").parent,
        )
    shutil.copy(next((classes / "star").glob("*.png")), tmp_path / "x" / "lost.png")
    with pytest.raises(DataError, match=mentions("lost.png", "class")):
        visavis.classify(dual_encoders / "clip", tmp_path / "x")
    with pytest.raises(VisavisError, match=mentions("labels", "got 2 labels")):
        visavis.classify(dual_encoders / "clip", classes, ["circle", "star"])


def test_command_prints_zero_shot_accuracy(classes, dual_encoders):
    arguments = ["classify", str(dual_encoders / "clip"), str(classes)]
    printed = CliRunner().invoke(cli.app, arguments)
    assert printed.exit_code == 0, printed.output
    assert "top-1 accuracy" in printed.output and "3 classes, 12 images" in printed.output
    parsed = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).output)
    assert [row["images"] for row in parsed["classes"]] == [4, 3, 5]
    assert parsed["top1"]["value"] == pytest.approx(
        np.average([row["top1"] for row in parsed["classes"]], weights=[4, 3, 5])
    )


def test_class_vectors_classify_as_sentence_transformers():
    util = pytest.importorskip("sentence_transformers.util")
    images, prompts = torch.randn(200, 16), 3 * torch.randn(10, 7, 16)
    labels = torch.randint(10, (200,))
    labels[:10] = torch.arange(10)
    vectors = class_vectors(prompts)
    scores = torch.nn.functional.normalize(images, dim=1) @ vectors.T
    result = zero_shot_accuracy(scores, labels, list("abcdefghij"), "")
    means = util.normalize_embeddings(
        util.normalize_embeddings(prompts.flatten(0, 1)).view(10, 7, 16).mean(1)
    )
    found = util.semantic_search(images, means, top_k=5)
    top = torch.tensor([[hit["corpus_id"] for hit in hits] for hits in found])
    hits = top == labels[:, None]
    assert result.top1.value == pytest.approx(100 * hits[:, 0].float().mean().item())
    assert result.top5.value == pytest.approx(100 * hits.any(1).float().mean().item())


def test_class_names_follow_folders_or_a_file(classes, dual_encoders, tmp_path):
    folder = shutil.copytree(classes, tmp_path / "classes")
    (folder / "star").rename(folder / "blue-star_big")
    clip = dual_encoders / "clip"
    result = visavis.classify(clip, folder)
    assert [each.name for each in result.classes] == ["blue star big", "circle", "red square"]
    lines = "circle\ta round, flat shape\nblue-star_big star\nother\tunused\n\nred_square red box\n"
    (tmp_path / "names.txt").write_text(lines)
    named = visavis.classify(clip, folder, tmp_path / "names.txt")
    assert [each.name for each in named.classes] == ["star", "a round, flat shape", "red box"]
    for content, words in (
        ("circle a\nred_square b\n", ("blue-star_big",)),
        ("circle\n", ("line 1", "FOLDER NAME")),
        ("circle a\ncircle b\n", ("line 2",)),
        ("circle a\nred_square a\nblue-star_big b\n", ("'a'", "circle", "red_square")),
    ):
        (tmp_path / "wrong.txt").write_text(content)
        with pytest.raises(DataError, match=mentions(*words)):
            visavis.classify(clip, folder, tmp_path / "wrong.txt")


def test_classes_with_equal_prompts_are_named(classes, dual_encoders, tmp_path, recwarn):
    folder = shutil.copytree(classes, tmp_path / "classes")
    for name in ("train", "test"):
        shutil.copytree(folder / "star", folder / name)
    # The tokenizer lacks both words.
    visavis.classify(dual_encoders / "clip", folder)
    (warned,) = (str(each.message) for each in recwarn)
    assert warned.startswith(
        "classes: the model cannot distinguish 2 of 5, because their prompts have equal scores: "
        "'test' = 'train'. Give them other names"
    )


def test_class_without_images_is_rejected(classes, dual_encoders, tmp_path):
    folder = shutil.copytree(classes, tmp_path / "classes")
    (folder / "empty").mkdir()
    (folder / ".hidden").mkdir()
    with pytest.raises(DataError, match=mentions("got none in empty")):
        visavis.classify(dual_encoders / "clip", folder)


def test_score_that_is_nan_is_rejected():
    scores = torch.tensor([[0.1, 0.2], [torch.nan, torch.nan]])
    with pytest.raises(DataError, match=mentions("image 1", "NaN")):
        zero_shot_accuracy(scores, torch.tensor([0, 1]), ["a", "b"], "")


@kinds
@pytest.mark.slow
def test_classify_with_templates_as_evaluate(kind, classes, dual_encoders, tmp_path):
    (tmp_path / "t.txt").write_text("\n".join(TEMPLATES))
    (tmp_path / "labels.txt").write_text("circle\nred square\nstar\n")
    result = visavis.classify(dual_encoders / kind, classes, templates=tmp_path / "t.txt")
    folders = {"circle": "circle", "red square": "red_square", "star": "star"}
    for each in result.classes:
        best = [
            visavis.classify(
                dual_encoders / kind, file, tmp_path / "labels.txt", templates=tmp_path / "t.txt"
            )[0][0]
            for file in (classes / folders[each.name]).rglob("*.png")
        ]
        assert each.top1 == pytest.approx(100 * np.mean([name == each.name for name in best]))


def test_zero_shot_equals_sentence_transformers_of_a_model(classes, dual_encoders, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = shutil.copytree(dual_encoders / "clip", tmp_path / "clip")
    # By default, this class crops to 224 pixels, which this model cannot read.
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {"do_center_crop": False, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    names = ["circle", "red square", "star"]
    prompts = [f"a photo of a {name}." for name in names]
    files = sorted(classes.rglob("*.png"))
    labels = [names.index(f.relative_to(classes).parts[0].replace("_", " ")) for f in files]
    images = [Image.open(file).convert("RGB") for file in files]
    scores = model.similarity(model.encode(images), model.encode(prompts)).numpy()
    ours = visavis.load(folder)
    assert (
        np.abs(scores - (ours.encode_images(files) @ ours.encode_texts(prompts).T).numpy()).max()
        < 1e-5
    )
    result = visavis.classify(folder, classes)
    assert result.top1.value == pytest.approx(100 * (scores.argmax(1) == labels).mean())
