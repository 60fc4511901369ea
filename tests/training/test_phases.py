"""What phases do: parts that learn, optimizers that go on, weights to begin with, rates over time, accumulated batches."""

import json
import math
import signal

import numpy as np
import pytest
import torch
from torch import nn

import visavis
from visavis import evaluation
from visavis.errors import RecipeError
from visavis.evaluation.protocols import named
from visavis.memory import ScoreCost
from visavis.models import CATALOG
from visavis.progress import Silent
from visavis.runs.folder import open_run, recipe_of
from visavis.spec import build
from visavis.training.checkpoint import Checkpoint, TrainerState
from visavis.training.data_module import prepare
from visavis.training.optimizer_state import optimizer_tensors, restore_optimizer
from visavis.training.probing import probe
from visavis.training.recipe_files import read_recipe
from visavis.training.run_files import RunFiles
from visavis.training.schedule import factor, make_optimizer, set_lr
from visavis.training.settings import Phase, ScheduleSettings
from visavis.training.trainer import Trainer


def phase(**given):
    return Phase(**{"epochs": 1, "objective": "VLC()", **given})


@pytest.fixture
def matcher():
    return CATALOG["Heads"](build(CATALOG["Heads"].Config, {"visual_width": 3, "text_width": 4, "width": 2, "hidden": 5, "dropout": 0.0}))


@pytest.fixture
def trainer(recipe, scenes, tmp_path):
    """A trainer of the tiny recipe with some keys set; begun, not yet run."""
    number = iter(range(9))

    def make(**overrides):
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        files = RunFiles(tmp_path / f"run-{next(number)}")
        files.folder.mkdir()
        begun = Trainer(*prepare(read_recipe(recipe, {"data.path": str(scenes), **keys})), files, Silent())
        begun.begin()
        return begun

    return make


def test_a_step_schedule_multiplies_after_each_milestone():
    schedule = ScheduleSettings(kind="step", milestones=(1, 3), factor=0.5)
    assert [factor(schedule, step, 2, 4) for step in range(8)] == [1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_warmup_rises_in_equal_steps_to_the_whole_rate():
    schedule = ScheduleSettings(kind="constant", warmup=0.5)
    assert [factor(schedule, step, 4, 2) for step in range(8)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_a_cosine_falls_from_one_towards_zero_after_the_warmup():
    schedule = ScheduleSettings(kind="cosine", warmup=0.2)
    values = [factor(schedule, step, 5, 2) for step in range(10)]
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[6] == pytest.approx(0.5)
    assert values[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))


def test_every_part_has_its_own_rate_at_every_step(matcher):
    optimizer = make_optimizer(matcher, phase(optimizer={"lr": 0.1, "lr_multipliers": {"visual": 0.5}}))
    set_lr(optimizer, 0.25)
    multipliers = {group["param_names"][0].split(".")[0]: group["lr"] for group in optimizer.param_groups}
    assert multipliers == {"visual": pytest.approx(0.0125), "text": pytest.approx(0.025)}


def test_a_part_that_is_not_trained_is_in_no_optimizer_and_has_no_gradient(matcher):
    optimizer = make_optimizer(matcher, phase(trainable=["text"]))
    assert all(name.startswith("text") for group in optimizer.param_groups for name in group["param_names"])
    assert {name.split(".")[0] for name, parameter in matcher.named_parameters() if parameter.requires_grad} == {"text"}
    make_optimizer(matcher, phase())
    assert all(parameter.requires_grad for parameter in matcher.parameters())


@pytest.mark.parametrize("given", [{"trainable": ["txt"]}, {"optimizer": {"lr_multipliers": {"txt": 0.1}}}])
def test_an_unknown_part_is_named(matcher, given):
    with pytest.raises(RecipeError, match=r"txt is not a part of Heads: did you mean text\?"):
        make_optimizer(matcher, phase(**given))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_an_optimizer_kept_over_other_parts_goes_on_for_the_parameters_it_knew(matcher, name):
    """The trained parts stand at other places in the second phase: each parameter finds its own state."""
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


def test_accumulated_batches_are_one_step_with_their_mean_gradient(trainer):
    """Two batches of a mean loss in one step, by hand; and the last step of an epoch averages the batches it has."""
    run = trainer(training__accumulate=2, training__clip_norm=0.0, model__dropout=0.0, objective="VLC(reduction='mean')")
    batches = list(run.train.epoch(1))
    assert len(batches) % 2 == 1, "the last group of the epoch is not full"

    def gradient_of(group):
        run.matcher.zero_grad()
        for batch in group:
            visual, text = run.matcher.encode_visual(batch.visual), run.matcher.encode_text(batch.text)
            (run.loss(visual, text, targets=run.supervision.targets(visual, text, batch)) / len(group)).backward()
        found = {name: parameter.grad.clone() for name, parameter in run.matcher.named_parameters()}
        run.matcher.zero_grad()
        return found

    seen = []
    run.optimizer.step = lambda: seen.append({name: parameter.grad.clone() for name, parameter in run.matcher.named_parameters()})
    expected = [gradient_of(batches[start : start + 2]) for start in range(0, len(batches), 2)]
    for batch in batches:
        run._step(batch, len(batches))
    assert len(seen) == len(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name])


def test_gradients_of_a_group_that_a_phase_cuts_short_are_forgotten(trainer):
    """Early stop in the middle of a group: the next phase starts as it would after a resume."""
    run = trainer(training__accumulate=3)
    run._step(next(run.train.epoch(1)), 10)
    assert any(parameter.grad is not None for parameter in run.matcher.parameters())
    run._begin_phase({}, run.optimizer)
    assert all(parameter.grad is None for parameter in run.matcher.parameters())


def test_a_phase_begins_with_the_best_weights_or_the_last(trainer):
    for start, expected in (("best", 0.25), ("last", 0.5)):
        run = trainer(phases__1__start_from=start)
        for parameter in run.matcher.parameters():
            nn.init.constant_(parameter, 0.5)
        run.best = {name: torch.full_like(tensor, 0.25) for name, tensor in run.best.items()}
        run._next_phase()
        assert run.state.phase == 1
        assert all((parameter == expected).all() for parameter in run.matcher.parameters())


def test_an_optimizer_of_another_kind_takes_over_what_it_remembers(recipe, scenes, in_pieces, outcome, tmp_path):
    """SGD remembers nothing of AdamW, and a stop says so nowhere."""
    overrides = {"phases.1.optimizer.name": "SGD", "phases.1.epochs": 1}
    visavis.train(recipe, data=scenes, out=tmp_path / "whole", overrides=overrides)
    in_pieces(recipe, tmp_path / "run", data=scenes, overrides=overrides)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert not outcome(tmp_path / "run")["optimizer"]


def test_patience_ends_a_phase(recipe, scenes, tmp_path):
    """A rate too small to change anything: one validation sets the best, two more end each phase."""
    overrides = {"training.patience": 2, "phases.0.optimizer.lr": 1e-12, "phases.1.optimizer.lr": 1e-12, "phases.1.start_from": "last"}
    visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=overrides)
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in log] == [0, 0, 0, 1, 1]


def test_the_newest_of_several_checkpoints_of_one_step_is_taken(tmp_path):
    """Whatever a kill left of the older ones."""
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
    "phases.0.epochs=1", "phases.1.epochs=1", "phases.1.start_from='last'", "training.batch_size=8", "training.probe_batches=1",
    "model.width=8", "model.word_width=4", "training.threads=1", "training.checkpoint_s=0", "visual.augment=True",
]  # fmt: skip


def test_two_step_vsepp_first_keeps_its_backbone_then_trains_it_and_resumes_in_either_step(few_scenes, training, outcome, tmp_path):
    """Killed in both phases, the run ends as the uninterrupted one, augmentation included."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    weights = {}

    class Keep(Silent):
        def step(self, step):
            if step.step == step.steps - 1:
                weights[step.phase] = Checkpoint.latest(whole / "checkpoint").weights

    visavis.train("vse++-two-step-scenes", data=few_scenes, out=whole, overrides=TWO_STEPS, progress=Keep())
    from visavis.models.scene_encoder import SceneEncoder

    shipped_weights = {f"backbone.model.encoder.{name}": tensor for name, tensor in SceneEncoder.load().state_dict().items()}
    assert shipped_weights.keys() <= weights[0].keys()
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in shipped_weights.items()), "statistics of batch norm included"
    changed = [name for name, tensor in shipped_weights.items() if not torch.equal(weights[1][name], tensor)]
    assert any("convolutions" in name for name in changed)
    assert any("attention" in name for name in changed)

    process = training(run, "vse++-two-step-scenes", *TWO_STEPS, "--data", few_scenes, "--out", run)
    assert process.kill(lambda process: process.step >= 2)
    process = training(run, "--resume", run)
    assert process.kill(lambda process: process.step >= 5)
    assert Checkpoint.latest(run / "checkpoint").state.phase == 1
    visavis.train(resume=run)
    assert outcome(run) == outcome(whole)


def test_the_first_ctrl_c_is_only_heard_in_the_main_thread(recipe, scenes, tmp_path):
    """Elsewhere there is no signal to be heard, and training just runs."""
    from concurrent.futures import ThreadPoolExecutor

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        overrides = {"phases.0.epochs": 1, "phases.1.epochs": 1, "training.evaluate_every": 0, "training.checkpoint_s": 99}
        trained = pool.submit(visavis.train, recipe, data=scenes, out=tmp_path / "run", overrides=overrides).result()
    assert trained.test is not None
    assert signal.getsignal(signal.SIGINT) is before


class Opposite(CATALOG["VSE++"]):
    """Scores by the opposite of the cosine, times a learned number."""

    def __init__(self, config):
        super().__init__(config)
        self.sharpness = nn.Parameter(torch.tensor(-2.0))

    def parts(self):
        return super().parts() | {"sharpness": [self.sharpness]}

    def score(self, visual, text):
        return self.sharpness * super().score(visual, text)


def test_a_model_that_overrides_the_score_is_trained_and_evaluated_by_its_own(recipe, scenes, tmp_path):
    data_module, inherited = prepare(read_recipe(recipe, {"data.path": str(scenes)}))
    matcher = Opposite(inherited.config)
    trainer = Trainer(data_module, matcher, RunFiles(tmp_path / "run"), Silent())
    trainer.begin()
    batch = next(trainer.train.epoch(1))
    trainer._step(batch, 1)
    assert matcher.sharpness.item() != -2.0
    matcher.eval()
    visual, text = matcher.encode_visual(batch.visual), matcher.encode_text(batch.text)
    targets = trainer.supervision.targets(visual, text, batch)
    torch.testing.assert_close(trainer.loss(visual, text, targets=targets), trainer.loss.objective(matcher.score(visual, text), targets))
    split = data_module.data.split("val")
    expected = evaluation.evaluate(
        *data_module.encode(matcher, split),
        lambda visual, text: -(visual.vectors @ text.vectors.T),
        torch.arange(len(split.images)),
        torch.from_numpy(split.image_of),
        protocol=named("plain"),
    )
    assert data_module.evaluate(matcher, "val").metrics == expected.metrics


class Costly(Opposite):
    """Says that a pair costs much, and remembers how many were scored at once."""

    def __init__(self, config):
        super().__init__(config)
        self.pairs = []

    def score_cost(self, visual, text):
        return ScoreCost(scored=10_000, trained=20_000)

    def score(self, visual, text):
        self.pairs.append(len(visual) * len(text))
        return super().score(visual, text)


def test_a_recipe_s_memory_holds_in_steps_probes_and_evaluation(recipe, scenes, tmp_path):
    rows = {}
    for memory in ("", "400 KB"):
        data_module, inherited = prepare(read_recipe(recipe, {"data.path": str(scenes), "memory": memory}))
        torch.manual_seed(0)
        matcher = Costly(inherited.config)
        trainer = Trainer(data_module, matcher, RunFiles(tmp_path / f"run{memory}"), Silent())
        trainer.begin()
        most = {}
        for name, work in (
            ("step", lambda trainer=trainer: trainer._step(next(trainer.train.epoch(1)), 1)),
            (
                "probe",
                lambda trainer=trainer: rows.setdefault("probe", []).append(
                    probe(trainer.matcher, trainer.loss, trainer.supervision, trainer.val, trainer.recipe)[0]
                ),
            ),
            (
                "evaluation",
                lambda module=data_module, matcher=matcher: rows.setdefault("rsum", []).append(module.evaluate(matcher, "val").metrics),
            ),
        ):
            matcher.pairs.clear()
            work()
            most[name] = max(matcher.pairs)
        if memory:
            assert 1 <= most["step"] <= 20
            assert max(most["probe"], most["evaluation"]) <= 40
        else:
            assert min(most.values()) > 40
    assert rows["rsum"][0] == rows["rsum"][1]
    assert rows["probe"][0] == pytest.approx(rows["probe"][1], rel=1e-4)


@pytest.mark.parametrize(("memory", "kept"), [("2GiB", "2GiB"), (3_000_000, "3000000"), ("", "")])
def test_a_memory_setting_is_kept_as_it_was_written(recipe, memory, kept):
    assert read_recipe(recipe, {"memory": memory}).memory == kept


@pytest.mark.parametrize("memory", ["much", 0, True, 1.5])
def test_a_memory_setting_that_is_no_size_is_refused(recipe, memory):
    with pytest.raises(RecipeError, match=rf"memory is {memory!r}, expected bytes such as 2000000000, a text such as '2GiB'"):
        read_recipe(recipe, {"memory": memory})


def test_epochs_of_some_batches_and_validations_of_some_images(recipe, scenes, tmp_path):
    few = {"training.batches_per_epoch": 2, "evaluation.validation_images": 5, "phases.0.epochs": 2, "phases.1.epochs": 1}
    trained = visavis.train(recipe, data=scenes, out=tmp_path / "run", overrides=few)
    log = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [0, 2, 4, 6]
    assert {row["num_images"] for row in log} == {5} == {trained.validation_images}
    data_module, _ = open_run(trained.folder, recipe_of(trained.folder), Silent())
    plan = data_module.loader(data_module.data.split("train")).plan
    first, second = (plan.batches(data_module.data.split("train"), 0, epoch) for epoch in (1, 2))
    assert len(first) == 2
    assert not np.array_equal(first[0][1], second[0][1])
