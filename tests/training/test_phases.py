"""Phases: trainable parts, kept optimizers, initial weights, learning rate schedules, accumulated
batches.
"""

import json
import math
import signal

import numpy as np
import pytest
import torch
from torch import nn

import visavis
from visavis import evaluation
from visavis.core.blocking import ScoreCost
from visavis.core.errors import RecipeError
from visavis.core.progress import NoProgress
from visavis.core.spec import build_object
from visavis.evaluation.protocols import get_protocol
from visavis.models import CATALOG
from visavis.training.checkpoint import Checkpoint, TrainerState
from visavis.training.monitoring.validation_metrics import validation_metrics
from visavis.training.optimizer import (
    lr_factor,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_lr,
)
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.settings import Phase, ScheduleSettings
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped
from visavis.training.train_step import check_phase
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training


def phase(**given):
    return Phase(**{"epochs": 1, "objective": "VLC()", **given})


@pytest.fixture
def matcher():
    return CATALOG["Heads"](
        build_object(
            CATALOG["Heads"].Config,
            {
                "visual_input_dim": 3,
                "text_input_dim": 4,
                "embedding_dim": 2,
                "hidden_dim": 5,
                "dropout": 0.0,
            },
        )
    )


@pytest.fixture
def trainer(recipe, scenes, tmp_path):
    """Factory of trainers of the tiny recipe with overrides, prepared but not yet run."""
    number = iter(range(9))

    def make(**overrides):
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        files = RunFolder(tmp_path / f"run-{next(number)}")
        files.path.mkdir()
        begun = Trainer(
            *prepare_training(read_recipe(recipe, {"data.path": str(scenes), **keys})),
            files,
        )
        begun.start()
        return begun

    return make


def test_step_schedule_multiplies_after_each_milestone():
    schedule = ScheduleSettings(kind="step", milestones=(1, 3), factor=0.5)
    assert [lr_factor(schedule, step, 2, 4) for step in range(8)] == [
        1,
        1,
        0.5,
        0.5,
        0.5,
        0.5,
        0.25,
        0.25,
    ]


def test_warmup_rises_in_equal_steps_to_full_rate():
    schedule = ScheduleSettings(kind="constant", warmup=0.5)
    assert [lr_factor(schedule, step, 4, 2) for step in range(8)] == [
        0.25,
        0.5,
        0.75,
        1,
        1,
        1,
        1,
        1,
    ]


def test_cosine_schedule_falls_to_zero_after_warmup():
    schedule = ScheduleSettings(kind="cosine", warmup=0.2)
    values = [lr_factor(schedule, step, 5, 2) for step in range(10)]
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[6] == pytest.approx(0.5)
    assert values[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))


def test_every_part_has_separate_rate_at_every_step(matcher):
    optimizer = make_optimizer(
        matcher, phase(optimizer={"lr": 0.1, "lr_multipliers": {"visual": 0.5}})
    )
    set_lr(optimizer, 0.25)
    multipliers = {
        group["param_names"][0].split(".")[0]: group["lr"] for group in optimizer.param_groups
    }
    assert multipliers == {"visual": pytest.approx(0.0125), "text": pytest.approx(0.025)}


def test_frozen_part_has_no_optimizer_and_no_gradient(matcher):
    optimizer = make_optimizer(matcher, phase(trainable=["text"]))
    assert all(
        name.startswith("text") for group in optimizer.param_groups for name in group["param_names"]
    )
    assert {
        name.split(".")[0]
        for name, parameter in matcher.named_parameters()
        if parameter.requires_grad
    } == {"text"}
    make_optimizer(matcher, phase())
    assert all(parameter.requires_grad for parameter in matcher.parameters())


@pytest.mark.parametrize(
    "given", [{"trainable": ["txt"]}, {"optimizer": {"lr_multipliers": {"txt": 0.1}}}]
)
def test_unknown_part_is_reported(matcher, given):
    with pytest.raises(RecipeError, match=r"txt is not a part of Heads: did you mean text\?"):
        check_phase(matcher, phase(**given))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Ranger", "SGD"])
def test_kept_optimizer_continues_for_known_parameters(matcher, name):
    """The trained parts have other positions in the second phase, and each parameter keeps its
    state.
    """
    first = make_optimizer(matcher, phase(trainable=["text"], optimizer={"name": name}))
    sum(parameter.sum() for parameter in matcher.parameters()).backward()
    first.step()
    second = make_optimizer(matcher, phase(optimizer={"name": name}))
    restore_optimizer(second, optimizer_tensors(first))
    assert optimizer_tensors(second).keys() == optimizer_tensors(first).keys()
    for parameter_name, parameter in matcher.named_parameters():
        state = second.state[parameter]
        assert bool(state) == (parameter_name.startswith("text") and name != "SGD")
        if state:
            assert state["exp_avg"].shape == parameter.shape
            assert torch.equal(state["exp_avg"], first.state[parameter]["exp_avg"])
    second.step()


def test_accumulated_batches_step_by_mean_gradient(trainer):
    """Two batches of a mean loss in one step, by hand. The last step of an epoch averages the
    remaining batches.
    """
    run = trainer(
        training__accumulation_steps=2,
        training__clip_norm=0.0,
        model__dropout=0.0,
        objective="VLC(reduction='mean')",
    )
    batches = list(run.train_loader.epoch(1))
    assert len(batches) % 2 == 1, "the last group of the epoch is not full"

    def gradient_of(group):
        run.matcher.zero_grad()
        for batch in group:
            visual, text = (
                run.matcher.encode_visual(batch.visual),
                run.matcher.encode_text(batch.text),
            )
            (
                run.train_step.loss(
                    visual, text, targets=run.supervision.targets(visual, text, batch)
                )
                / len(group)
            ).backward()
        found = {name: parameter.grad.clone() for name, parameter in run.matcher.named_parameters()}
        run.matcher.zero_grad()
        return found

    seen = []
    run.train_step.optimizer.step = lambda: seen.append(
        {name: parameter.grad.clone() for name, parameter in run.matcher.named_parameters()}
    )
    expected = [gradient_of(batches[start : start + 2]) for start in range(0, len(batches), 2)]
    for batch in batches:
        run._step(batch, len(batches))
    assert len(seen) == len(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name])


def test_phase_end_drops_partial_accumulation(trainer):
    """After an early stop within an accumulation group, the next phase starts as it would after a
    resume.
    """
    run = trainer(training__accumulation_steps=3)
    run._step(next(run.train_loader.epoch(1)), 10)
    assert any(parameter.grad is not None for parameter in run.matcher.parameters())
    run._begin_phase({}, run.train_step.optimizer)
    assert all(parameter.grad is None for parameter in run.matcher.parameters())


def test_phase_starts_with_best_or_last_weights(trainer):
    for start, expected in (("best", 0.25), ("last", 0.5)):
        run = trainer(phases__1__initial_weights=start)
        for parameter in run.matcher.parameters():
            nn.init.constant_(parameter, 0.5)
        run.best = {name: torch.full_like(tensor, 0.25) for name, tensor in run.best.items()}
        run._finish_phase()
        assert run.state.phase == 1
        assert all((parameter == expected).all() for parameter in run.matcher.parameters())


def test_other_optimizer_kind_takes_over_shared_state(recipe, scenes, in_pieces, outcome, tmp_path):
    """SGD takes over no state of AdamW, and a stop does not change this."""
    overrides = {"phases.1.optimizer.name": "SGD", "phases.1.epochs": 1}
    visavis.train(recipe, data=scenes, out=tmp_path / "whole", overrides=overrides)
    in_pieces(recipe, tmp_path / "run", data=scenes, overrides=overrides)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert not outcome(tmp_path / "run")["optimizer"]


def test_patience_ends_phase(recipe, scenes, tmp_path):
    """With a learning rate near 0, one validation sets the best and two more end each phase."""
    overrides = {
        "training.patience": 2,
        "phases.0.optimizer.lr": 1e-12,
        "phases.1.optimizer.lr": 1e-12,
        "phases.1.initial_weights": "last",
    }
    visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=overrides)
    log = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["phase"] for row in log] == [0, 0, 0, 1, 1]


def test_newest_checkpoint_of_one_step_is_used(tmp_path):
    """A kill may leave older checkpoints."""
    leftover = tmp_path / "step-00000003"
    for epoch in range(4):
        Checkpoint(TrainerState(step=3, epoch=epoch), {}, {}, {}, {}, []).write(tmp_path)
        assert Checkpoint.latest(tmp_path).state.epoch == epoch
        leftover.mkdir(exist_ok=True)
        if epoch == 2:
            leftover.rmdir()
    Checkpoint(TrainerState(step=4), {}, {}, {}, {}, []).write(tmp_path)
    assert Checkpoint.latest(tmp_path).state.step == 4
    assert len(list(tmp_path.iterdir())) == 2, "the last two are kept"


TWO_STEPS = [
    "phases.0.epochs=1", "phases.1.epochs=1", "phases.1.initial_weights='last'", "training.batch_size=8", "training.metric_batches=1",
    "model.embedding_dim=8", "model.word_dim=4", "training.threads=1", "training.checkpoint_s=0", "visual.augment=True",
]  # fmt: skip


@pytest.mark.slow
def test_two_phase_vsepp_resumes_in_either_phase(few_scenes, stop_at, outcome, tmp_path):
    """Stopped in both phases, the run ends as the uninterrupted one, augmentation included."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    weights = {}

    class Keep(NoProgress):
        def training_step(self, step):
            if step.step == step.steps - 1:
                weights[step.phase] = Checkpoint.latest(whole / "checkpoint").weights

    visavis.train(
        "vse++-two-step-scenes", data=few_scenes, out=whole, overrides=TWO_STEPS, progress=Keep()
    )
    from visavis.models.encoders.scene_encoder import SceneEncoder

    shipped_weights = {
        f"backbone.model.encoder.{name}": tensor
        for name, tensor in SceneEncoder.load().state_dict().items()
    }
    assert shipped_weights.keys() <= weights[0].keys()
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in shipped_weights.items()), (
        "statistics of batch norm included"
    )
    changed = [
        name
        for name, tensor in shipped_weights.items()
        if not torch.equal(weights[1][name], tensor)
    ]
    assert any("convolutions" in name for name in changed)
    assert any("attention" in name for name in changed)

    with pytest.raises(Stopped):
        visavis.train(
            "vse++-two-step-scenes",
            data=few_scenes,
            out=run,
            overrides=TWO_STEPS,
            progress=stop_at(2),
        )
    assert Checkpoint.latest(run / "checkpoint").state.phase == 0
    with pytest.raises(Stopped):
        visavis.train(resume=run, progress=stop_at(3))
    assert Checkpoint.latest(run / "checkpoint").state.phase == 1
    visavis.train(resume=run)
    assert outcome(run) == outcome(whole)


def test_first_ctrl_c_is_handled_only_in_main_thread(recipe, scenes, tmp_path):
    """Other threads receive no signals, and training runs without a handler."""
    from concurrent.futures import ThreadPoolExecutor

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        overrides = {
            "phases.0.epochs": 1,
            "phases.1.epochs": 1,
            "training.evaluate_every": 0,
            "training.checkpoint_s": 99,
        }
        trained = pool.submit(
            visavis.train, recipe, data=scenes, out=tmp_path / "run", overrides=overrides
        ).result()
    assert trained.test is not None
    assert signal.getsignal(signal.SIGINT) is before


class Opposite(CATALOG["VSE++"]):
    """Scores by the negative cosine, times a learned factor."""

    def __init__(self, config):
        super().__init__(config)
        self.inverse_temperature = nn.Parameter(torch.tensor(-2.0))

    def parts(self):
        return super().parts() | {"inverse_temperature": [self.inverse_temperature]}

    def score(self, visual, text):
        return self.inverse_temperature * super().score(visual, text)


def test_model_with_custom_score_uses_it_everywhere(recipe, scenes, tmp_path):
    data_module, inherited = prepare_training(read_recipe(recipe, {"data.path": str(scenes)}))
    matcher = Opposite(inherited.config)
    trainer = Trainer(data_module, matcher, RunFolder(tmp_path / "run"))
    trainer.start()
    batch = next(trainer.train_loader.epoch(1))
    trainer._step(batch, 1)
    assert matcher.inverse_temperature.item() != -2.0
    matcher.eval()
    visual, text = matcher.encode_visual(batch.visual), matcher.encode_text(batch.text)
    targets = trainer.supervision.targets(visual, text, batch)
    torch.testing.assert_close(
        trainer.train_step.loss(visual, text, targets=targets),
        trainer.train_step.loss.objective(matcher.score(visual, text), targets),
    )
    split = data_module.data.split("val")
    expected = evaluation.evaluate(
        *data_module.encode(matcher, split),
        lambda visual, text: -(visual.vectors @ text.vectors.T),
        torch.arange(len(split.images)),
        torch.from_numpy(split.image_of),
        protocol=get_protocol("plain"),
    )
    assert data_module.evaluate(matcher, "val").metrics == expected.metrics


class Costly(Opposite):
    """Reports a high memory cost per pair, and records the number of pairs per call."""

    def __init__(self, config):
        super().__init__(config)
        self.pairs = []

    def score_cost(self, visual, text):
        return ScoreCost(inference_bytes=10_000, training_bytes=20_000)

    def score(self, visual, text):
        self.pairs.append(len(visual) * len(text))
        return super().score(visual, text)


def test_memory_budget_holds_in_steps_and_evaluation(recipe, scenes, tmp_path):
    rows = {}
    for memory, gradients_every in (("", 0), ("400 KB", 0), ("400 KB", 1)):
        values = {"data.path": str(scenes), "memory": memory}
        data_module, inherited = prepare_training(
            read_recipe(recipe, values | {"training.gradients_every": gradients_every})
        )
        torch.manual_seed(0)
        matcher = Costly(inherited.config)
        trainer = Trainer(
            data_module, matcher, RunFolder(tmp_path / f"run{memory}{gradients_every}")
        )
        trainer.start()
        most = {}
        for name, work in (
            ("step", lambda trainer=trainer: trainer._step(next(trainer.train_loader.epoch(1)), 1)),
            (
                "probe",
                lambda trainer=trainer: rows.setdefault("probe", []).append(
                    validation_metrics(
                        trainer.matcher,
                        trainer.train_step.loss,
                        trainer.supervision,
                        trainer.val_loader,
                        trainer.recipe,
                    )[0]
                ),
            ),
            (
                "evaluation",
                lambda module=data_module, matcher=matcher: rows.setdefault("rsum", []).append(
                    module.evaluate(matcher, "val").metrics
                ),
            ),
        ):
            matcher.pairs.clear()
            work()
            most[name] = max(matcher.pairs)
        if memory:
            # Recorded gradients are computed from scores without a graph, which is half of the memory.
            assert 1 <= most["step"] <= (40 if gradients_every else 20)
            assert max(most["probe"], most["evaluation"]) <= 40
        else:
            assert min(most.values()) > 40
    assert rows["rsum"][0] == rows["rsum"][1]
    assert rows["probe"][0] == pytest.approx(rows["probe"][1], rel=1e-4)


@pytest.mark.parametrize(("memory", "kept"), [("2GiB", "2GiB"), (3_000_000, "3000000"), ("", "")])
def test_memory_setting_is_stored_as_written(recipe, memory, kept):
    assert read_recipe(recipe, {"memory": memory}).memory == kept


@pytest.mark.parametrize("memory", ["much", 0, True, 1.5])
def test_invalid_memory_setting_is_rejected(recipe, memory):
    with pytest.raises(
        RecipeError,
        match=rf"memory: expected bytes such as 2000000000, a text such as '2GiB'.*, got {memory!r}",
    ):
        read_recipe(recipe, {"memory": memory})


def test_epoch_batches_and_validation_images_are_limited(recipe, scenes, tmp_path):
    few = {
        "training.batches_per_epoch": 2,
        "evaluation.validation_images": 5,
        "phases.0.epochs": 2,
        "phases.1.epochs": 1,
    }
    trained = visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=few)
    log = [json.loads(line) for line in (trained.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [0, 2, 4, 6]
    assert {row["num_images"] for row in log} == {5} == {trained.validation_images}
    data_module, _ = open_run(trained.run, read_run_recipe(trained.run), NoProgress())
    plan = data_module.loader(data_module.data.split("train")).schedule
    first, second = (plan.batches(data_module.data.split("train"), 0, epoch) for epoch in (1, 2))
    assert len(first) == 2
    assert not np.array_equal(first[0][1], second[0][1])
