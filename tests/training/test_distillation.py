"""Distillation: a teacher of each kind, the added loss against a plain loop, and exact resumes."""

import numpy as np
import pytest
import torch
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core.errors import DataError, RecipeError, RunError
from visavis.core.progress import NoProgress
from visavis.objectives import VLC, Distillation, InfoNCE
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.teacher import open_teacher
from visavis.training.train_step import TrainStep, training_context
from visavis.training.training_run import prepare_training, resolve

from ..matching import mentions

DISTILLED = "phases.0.supervision"
LONG = {"epochs": 10, "phases.0.optimizer.name": "Adam", "phases.0.optimizer.lr": 0.01}


def supervised(teacher, **settings):
    options = "".join(f", {name}={value!r}" for name, value in settings.items())
    return {DISTILLED: f"DistillationSupervision(teacher={str(teacher)!r}{options})"}


def write_student(path):
    """Write the recipe of a student, with which the teacher is trained, too."""
    return write_recipe(
        path,
        {
            "epochs": 2,
            "objective": "VLC(gamma=10, reduction='mean')",
            "optimizer": {"name": "SGD", "lr": 0.1},
        },
        name="student",
        seed=3,
        model={"embedding_dim": 16, "word_dim": 8},
        training={"batch_size": 30, "checkpoint_s": 0, "clip_norm": 0},
    )


@pytest.fixture
def recipe(tmp_path):
    return write_student(tmp_path / "student.toml")


@pytest.fixture(scope="module")
def teacher(scenes, tmp_path_factory):
    """A run, and its embeddings and scores as arrays for the whole data set."""
    folder = tmp_path_factory.mktemp("teacher")
    write_student(folder / "recipe.toml")
    run = visavis.train(
        folder / "recipe.toml",
        data=scenes,
        out=folder / "run",
        overrides={"model.embedding_dim": 8, **LONG},
    ).run
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    encoded = data_module.encode(matcher, data_module.data)
    images, texts = (part.vectors.numpy() for part in encoded)
    (folder / "arrays").mkdir()
    np.save(folder / "arrays/images.npy", images)
    np.save(folder / "arrays/texts.npy", 3 * texts)  # cosines do not depend on the norm
    np.save(folder / "scores.npy", images @ texts.T)
    return folder


def objective_case():
    scores = 2 * torch.rand(4, 5, dtype=torch.float64) - 1
    relevance = torch.rand(4, 5, dtype=torch.float64)
    targets = visavis.Targets(
        query_ids=[0, 1, 1, 2], candidate_ids=[1, 0, 2, 1, 5], relevance=relevance
    )
    return scores, targets


def test_distillation_gradient_is_difference_of_softmax():
    scores, targets = objective_case()
    scores.requires_grad_()
    objective = Distillation(tau=0.2, teacher_tau=0.5)
    (ours,) = torch.autograd.grad(objective.one_way(scores, targets).sum(), scores)
    expected = (scores / 0.2).softmax(1) - (targets.relevance / 0.5).softmax(1)
    torch.testing.assert_close(ours, expected.detach() / 0.2)


def test_distillation_is_zero_for_scores_of_teacher():
    _, targets = objective_case()
    objective = Distillation(tau=0.1, teacher_tau=0.3)
    scores = (targets.relevance / 3 + 0.7).requires_grad_()
    value = objective(scores, targets)
    assert value.item() == pytest.approx(0, abs=1e-15)
    assert torch.autograd.grad(value, scores)[0].abs().max() < 1e-12
    assert objective(scores + torch.rand(4, 5), targets) > 0


def test_distillation_of_certain_teacher_equals_info_nce():
    scores = torch.rand(5, 5, dtype=torch.float64)
    targets = visavis.Targets.paired(5, relevance=torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(
        Distillation(tau=0.1, teacher_tau=1e-3)(scores, targets), InfoNCE(tau=0.1)(scores, targets)
    )


def test_distillation_of_ignored_query_is_zero():
    scores, targets = objective_case()
    ignore = torch.zeros(4, 5)
    ignore[2] = 1
    some = visavis.Targets(
        query_ids=targets.query_ids,
        candidate_ids=targets.candidate_ids,
        relevance=targets.relevance,
        ignore=ignore,
    )
    terms = Distillation().one_way(scores.requires_grad_(), some)
    assert terms[2] == 0
    torch.testing.assert_close(terms[[0, 1, 3]], Distillation().one_way(scores, targets)[[0, 1, 3]])
    assert Distillation()(scores, some).isfinite()


@pytest.mark.parametrize("form", ["run", "arrays", "scores.npy"])
def test_added_loss_equals_plain_loop(form, teacher, recipe, scenes, tmp_path):
    settings = {"data.path": str(scenes), **supervised(teacher / form, weight=0.7, tau=0.1)}
    resolved = resolve(read_recipe(recipe, settings)).recipe
    data_module, ours = prepare_training(resolved)
    _, plain = prepare_training(resolved)
    phase, (train, validation) = resolved.phases[0], data_module.loaders
    step = TrainStep(ours, phase, resolved)
    supervision = phase.supervision
    supervision.begin_phase(
        training_context(
            resolved, phase, ours, step.optimizer, train, validation, open_teacher=open_teacher
        ),
        {},
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    all_scores, split = np.load(teacher / "scores.npy"), data_module.data.split("train")
    gamma, losses = 10, []
    batches = [batch for epoch in range(2) for batch in train.epoch(epoch, device="cpu")][:10]
    assert len(batches) == 10
    for batch in batches:
        step.backward(batch, supervision.targets)
        step.step(1.0)
        images, texts = plain.encode_visual(batch.visual), plain.encode_text(batch.text)
        scores = images.vectors @ texts.vectors.T
        targets = visavis.Targets(query_ids=batch.image_ids, candidate_ids=batch.text_ids)
        rows, columns = split.image_rows[batch.images], split.caption_rows[batch.captions]
        soft = torch.from_numpy(all_scores[rows][:, columns]) / 0.025
        divergence = [
            torch.nn.functional.kl_div(
                (part / 0.1).log_softmax(1), other.softmax(1), reduction="batchmean"
            )
            for part, other in ((scores, soft), (scores.T, soft.T))
        ]
        value = VLC(gamma=gamma, reduction="mean")(scores, targets) + 0.7 * sum(divergence)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(divergence[0].item())
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert min(losses) > 0.01  # the teacher matters


@pytest.mark.slow
def test_distilled_student_ranks_like_teacher(teacher, recipe, scenes, tmp_path):
    alone = {"phases.0.objective": "Distillation()", **supervised(teacher / "run")}
    student = visavis.train(
        recipe, data=scenes, out=tmp_path / "student", overrides={**alone, **LONG}
    )
    untrained = visavis.train(
        recipe, data=scenes, out=tmp_path / "untrained", overrides={"training.batches_per_epoch": 1}
    )

    def scores(run):
        data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
        images, texts = data_module.encode(matcher, data_module.data.split("train"))
        return images.vectors @ texts.vectors.T

    targets = visavis.Targets(
        query_ids=range(60), candidate_ids=range(180), relevance=scores(teacher / "run")
    )
    divergence = [
        Distillation()(scores(run), targets).item() for run in (student.run, untrained.run)
    ]
    assert divergence[0] < divergence[1] / 5, divergence


@pytest.mark.slow
def test_distilled_run_resumes_exactly(teacher, recipe, scenes, outcome, in_pieces, tmp_path):
    plan = supervised(teacher / "run")
    visavis.train(recipe, data=scenes, out=tmp_path / "whole", overrides=plan)
    assert in_pieces(recipe, tmp_path / "pieces", data=scenes, overrides=plan) > 2
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")


def test_teacher_of_other_data_is_rejected(teacher, recipe, few_scenes, tmp_path):
    for form, error, words in (
        ("arrays", DataError, ("images.npy", "24", "84")),
        ("scores.npy", DataError, ("scores.npy", "[24, 48]", "[84, 252]")),
        ("missing", RunError, ("teacher", "missing", "run")),
    ):
        with pytest.raises(error, match=mentions(*words)):
            visavis.train(
                recipe, data=few_scenes, out=tmp_path / "out", overrides=supervised(teacher / form)
            )


@pytest.mark.parametrize("kind", ["clip", "dense"])
def test_pretrained_model_is_a_teacher(
    kind, dual_encoders, embedders, few_scenes, recipe, tmp_path
):
    folder = {"clip": dual_encoders / "clip", "dense": embedders / "dense"}[kind]
    once = {"epochs": 1, "training.batch_size": 16, "training.batches_per_epoch": 1}
    trained = visavis.train(
        recipe, data=few_scenes, out=tmp_path / "run", overrides={**supervised(folder), **once}
    )
    assert str(folder) in trained.supervision


def test_missing_teacher_is_named(recipe, scenes, tmp_path):
    with pytest.raises(RecipeError, match=mentions("teacher='RUN'")):
        visavis.train(recipe, data=scenes, out=tmp_path / "out", overrides=supervised(""))
    assert not (tmp_path / "out").exists()


def test_changed_teacher_stops_resumed_run(teacher, recipe, scenes, tmp_path, in_pieces):
    scores = np.load(teacher / "scores.npy")
    np.save(tmp_path / "scores.npy", scores)
    plan = {**supervised(tmp_path / "scores.npy"), "training.batches_per_epoch": 1, "epochs": 1}
    run = visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=plan).run
    (run / "result.json").unlink()
    np.save(tmp_path / "scores.npy", scores + 1)
    with pytest.raises(RunError, match=mentions("phases.0.supervision")):
        visavis.train(resume=run)
