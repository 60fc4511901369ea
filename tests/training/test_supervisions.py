"""What objectives are told beyond pairs: banks, doubtful pairs, learned weights; each stopped and resumed exactly."""

import json
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import visavis
from visavis import parse, spec
from visavis.data import open_dataset
from visavis.data.loader import seed_of
from visavis.errors import MissingSupervision, RecipeError, RunError
from visavis.progress import Silent
from visavis.runs.begin import prepare
from visavis.runs.folder import recipe_of
from visavis.supervision import CATALOG, PairSupervision, Supervision, soft_margin
from visavis.supervision.learned import WeightNetwork
from visavis.supervision.noisy import clean_probability, prediction
from visavis.targets import Targets
from visavis.training.checkpoint import Checkpoint
from visavis.training.recipe_files import read_recipe
from visavis.training.run_files import RunFiles
from visavis.training.trainer import Trainer

HEAD = """
name = "tiny"
seed = 3
visual = { tower = "scenes", view = "grid" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 16, word_width = 8, dropout = 0.2 }
training = { batch_size = 30, checkpoint_s = 0, probe_batches = 1, threads = 1 }
"""
PHASES = {
    "AOQ": """
[[phases]]
epochs = 1
objective = "TripletHN()"
optimizer = { lr = 0.01 }
[[phases]]
epochs = 1
objective = "AOQ()"
supervision = "BankSupervision(size=20)"
optimizer = { lr = 0.005 }
start_from = "best"
""",
    "NCR": """
[[phases]]
epochs = 1
objective = "NCR(warmup=True)"
supervision = "NoisySupervision()"
optimizer = { lr = 0.01 }
[[phases]]
epochs = 2
objective = "NCR()"
supervision = "NoisySupervision()"
optimizer = { lr = 0.005 }
""",
    "graded": """
[[phases]]
epochs = 1
objective = "Ladder()"
supervision = "GradedSupervision(degrees='SceneDegrees()')"
optimizer = { lr = 0.01 }
""",
    "weights": """
[[phases]]
epochs = 1
objective = "Unified(gamma=20)"
supervision = "LearnedWeights(every=2, lr=0.1)"
optimizer = { lr = 0.01 }
""",
}


WORDS = ["dog", "cat", "boat", "tree", "kite", "car", "lamp", "moon", "frog", "hat", "sun", "cup"]


def write_codes(folder, **counts):
    """Images that are a noisy code of the one word that their caption has: easy to learn, and what is misplaced is plain."""
    random = np.random.default_rng(0)
    for split, count in counts.items():
        shown = np.arange(count) % len(WORDS)
        np.save(folder / f"{split}_ims.npy", (np.eye(len(WORDS))[shown] + 0.05 * random.standard_normal((count, 12))).astype(np.float32))
        (folder / f"{split}_caps.txt").write_text("".join(f"a {WORDS[word]}\n" for word in shown))


def misplaced(data):
    """Which captions are not of the image that they stand beside."""
    return torch.tensor([caption != f"a {WORDS[image % len(WORDS)]}" for caption, image in zip(data.captions, data.image_of, strict=True)])


@pytest.fixture
def recipes(tmp_path):
    for name, phases in PHASES.items():
        (tmp_path / f"{name}.toml").write_text(HEAD + phases)
    return tmp_path


def supervision_of(run):
    last = max((run / "checkpoint").glob("step-*"))
    return load_file(last / "supervision.safetensors")


@pytest.mark.parametrize("name", ["AOQ", "NCR", "weights"])
def test_stopped_anywhere_it_ends_as_the_uninterrupted_one(name, recipes, scenes, outcome, in_pieces, tmp_path):
    plan = {"training.batch_size": 16} if name == "weights" else {}
    visavis.train(recipes / f"{name}.toml", data=scenes, out=tmp_path / "whole", overrides=plan)
    assert in_pieces(recipes / f"{name}.toml", tmp_path / "pieces", data=scenes, overrides=plan) > 4
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    assert supervision_of(tmp_path / "whole")


def test_a_supervision_that_an_objective_never_reads_is_said(recipes, scenes, tmp_path):
    class Listener(Silent):
        said: ClassVar[list[str]] = []

        def say(self, sentence):
            self.said.append(sentence)

    def said(objective):
        Listener.said.clear()
        overrides = {"phases.1.objective": objective, "phases.1.start_from": "last"}
        visavis.train(recipes / "AOQ.toml", data=scenes, out=tmp_path / objective, overrides=overrides, progress=Listener())
        return [sentence for sentence in Listener.said if "reads nothing" in sentence]

    (remark,) = said("VLC()")
    facts = "query_offline_scores, candidate_offline_scores"
    assert remark == f"phase 1: VLC reads nothing of what BankSupervision tells it ({facts}): it learns as from pairs alone."
    assert said("AOQ()") == []


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("objective", "told", "needed"),
    [
        ("Ladder()", "PairSupervision()", "relevance for every pair"),
        ("GradedVLC()", "JudgedSupervision()", "relevance for every pair"),
        ("AOQ()", "GradedSupervision()", "query_offline_scores"),
        ("NCR()", "BankSupervision()", "query_margin and candidate_margin, or pair_margin"),
        ("NCR(semantics='reference')", "LearnedWeights()", "pair_margin for every pair"),
    ],
)
def test_an_objective_that_is_not_told_what_it_needs_is_refused_at_once(number, objective, told, needed, recipes, tmp_path):
    phase = {f"phases.{number}.objective": objective, f"phases.{number}.supervision": told}
    with pytest.raises(MissingSupervision, match=rf"^phase {number}: \w+ needs {needed}.* or train with \w+Supervision\.$"):
        visavis.train(recipes / "AOQ.toml", data="nowhere", out=tmp_path / "runs" / "run", overrides=phase)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        *(("Ladder(margins=(0.2,), thresholds=(), betas=(1.0,))", "PairSupervision()"), ("NCR(warmup=True)", "PairSupervision()")),
        *(("NCR()", "NoisySupervision()"), ("NCR(semantics='reference')", "NoisySupervision()"), ("AOQ()", "BankSupervision()")),
        *(("Ladder()", "GradedSupervision()"), ("Unified()", "LearnedWeights()"), ("TripletHN()", "BankSupervision()")),
    ],
)
def test_an_objective_that_has_what_it_needs_is_not_refused(objective, told):
    spec.parse(told, CATALOG).check_read_by(parse(objective))


def test_a_supervision_that_declares_nothing_may_supply_anything():
    class Margins(Supervision):
        def targets(self, visual, text, batch):
            return Targets.paired(len(text), query_margin=torch.ones(len(text)), candidate_margin=torch.ones(len(text)))

    Margins().check_read_by(parse("NCR()"))


@pytest.mark.parametrize(
    "before", [{}, {"phases.0.objective": "AOQ()", "phases.0.supervision": "BankSupervision(size=20)"}], ids=["none", "bank"]
)
def test_a_bank_lists_the_hardest_wrong_ones(before, recipes, scenes, tmp_path):
    """By the model as the phase begins, also after a round with a bank."""
    run = tmp_path / "run"
    visavis.train(recipes / "AOQ.toml", data=scenes, out=run, overrides={"phases.1.epochs": 1, "phases.1.optimizer.lr": 1e-12, **before})
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in log] == [0, 0, 1]
    model, data = visavis.load(run), open_dataset(scenes).split("train")
    lists = supervision_of(run)
    scores = model.encode_images([image.open() for image in data.images]) @ model.encode_texts(data.captions).T
    own = torch.arange(len(data.images))[:, None] == torch.from_numpy(data.image_of)
    hardest = scores.masked_fill(own, -2).topk(20).indices
    assert (lists["train.texts"].long() == hardest).float().mean() > 0.9  # as good as equal, up to rounding of near ties
    assert not own.gather(1, lists["train.texts"].long()).any()
    assert not own.T.gather(1, lists["train.images"].long()).any()
    assert {name: list(part.shape) for name, part in lists.items()} == {
        "train.texts": [60, 20],
        "train.images": [180, 20],
        "validation.texts": [12, 20],
        "validation.images": [36, 11],
    }


@pytest.mark.parametrize("name", ["AOQ", "NCR", "weights", "graded"])
def test_a_part_of_the_training_split_may_be_validated_on(name, recipes, scenes, tmp_path):
    """The first images in the batches of training and in those of validation are told of as what they are there."""
    overrides = {"data.path": str(scenes), "evaluation.validation": "train", "evaluation.validation_images": 5, "training.batch_size": 45}
    files = RunFiles(tmp_path / "run")
    files.folder.mkdir()
    run = Trainer(*prepare(read_recipe(recipes / f"{name}.toml", overrides)), files, Silent())
    run.begin()
    run.run()
    if name == "NCR":
        run.supervision._labels.fill_(0.5)
    for loader, count in ((run.train, 4), (run.val, 1)):
        for batch in loader.epoch(1):
            visual, text = run.matcher.encode_visual(batch.visual), run.matcher.encode_text(batch.text)
            targets = run.supervision.targets(visual, text, batch)
            if name == "NCR":
                trusted = torch.ones(len(batch.captions)) if loader is run.val else torch.full((len(batch.captions),), 0.5)
                assert torch.equal(targets.query_margin, soft_margin(trusted, 0.2))
            elif name == "graded":
                rows, columns = torch.from_numpy(batch.captions), torch.from_numpy(batch.captions)
                assert (targets.relevance(rows, columns).diagonal() == 1).all()
        assert batch.number + 1 == count
    if name == "AOQ":
        assert [len(part) for part in run.supervision.state_dict().values()] == [60, 180, 5, 15]


def test_a_bank_of_one_image_is_refused_before_anything_is_trained(recipes, tmp_path):
    write_codes(tmp_path, train=24, val=1)
    with pytest.raises(RecipeError, match=r"^BankSupervision finds no wrong caption in the validation split, where one image alone"):
        visavis.train(recipes / "AOQ.toml", data=tmp_path, out=tmp_path / "run", overrides={"visual": {"features": "precomp"}})
    assert not (tmp_path / "run").exists()


def test_two_networks_doubt_the_misplaced_captions(recipes, tmp_path):
    write_codes(tmp_path, train=240, val=24)
    overrides = {
        "data.misplaced": 0.4,
        "visual": {"features": "precomp"},
        "phases.0.epochs": 6,
        "phases.0.optimizer.lr": 0.02,
        "training.batch_size": 24,
    }
    visavis.train(recipes / "NCR.toml", data=tmp_path, out=tmp_path / "run", overrides=overrides)
    wrong = misplaced(open_dataset(tmp_path).misplaced(0.4, 3).split("train"))
    clean = supervision_of(tmp_path / "run")["clean"].mean(0)
    assert 0.3 < wrong.float().mean() < 0.4
    assert clean[~wrong].mean() > 0.7
    assert clean[wrong].mean() < 0.3


def test_both_networks_of_a_run_are_evaluated_by_the_mean_of_their_scores(recipes, scenes, tmp_path):
    run = tmp_path / "run"
    visavis.train(recipes / "NCR.toml", data=scenes, out=run)
    first, second = visavis.load(run), visavis.load(run / "peer")
    test = open_dataset(scenes).split("test")
    images = [image.open() for image in test.images]
    mean = (first.score(images, test.captions) + second.score(images, test.captions)) / 2
    both = visavis.evaluate(run, average=True).metrics
    top = mean.topk(5, dim=0).indices == torch.from_numpy(test.image_of)
    assert both["t2i_r5"] == pytest.approx(100 * top.any(0).float().mean().item())
    assert both != visavis.evaluate(run).metrics
    assert visavis.evaluate(run).metrics["rsum"] == json.loads((run / "result.json").read_text())["rsum"]


def test_a_second_network_is_kept_with_the_best_of_the_first_alone(recipes, scenes, tmp_path):
    """A later phase without one, which is better, leaves none; and there is then no average."""
    overrides = {"phases.0.optimizer.lr": 1e-12, "phases.1.supervision": "PairSupervision()", "phases.1.objective": "VLC()"}
    visavis.train(recipes / "NCR.toml", data=scenes, out=tmp_path / "run", overrides=overrides)
    with pytest.raises(RunError, match=r"has no peer: it trained one network, and there is no second one to average its scores with"):
        visavis.evaluate(tmp_path / "run", average=True)


CLIP = {"visual": {"tower": "clip", "view": "pixels"}, "text": {"tower": "clip"}, "model": {"kind": "CLIP", "scale": "learned"}}
NORMED = {"kind": "VSEInfinity", "width": 16, "word_width": 8, "size_augmentation": 0.0}


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.dropout": 0.0},
        {"model.dropout": 0.0, "training.accumulate": 3},
        {"model.dropout": 0.0, "phases.0.ramp": 2.0, "training.clip_norm": 0.0},
        {"model": NORMED, "phases.0.trainable": ["text"]},
        {**CLIP, "phases.0.objective": "InfoNCE()", "phases.1.objective": "InfoNCE()"},
    ],
    ids=["a step a batch", "accumulated", "ramp", "frozen statistics", "learned scale"],
)
def test_two_networks_that_begin_alike_are_trained_alike(overrides, recipes, scenes, dual_encoders, tmp_path, monkeypatch):
    """As long as all pairs are trusted, and without dropout."""
    monkeypatch.chdir(dual_encoders)
    files = RunFiles(tmp_path / "run")
    files.folder.mkdir()
    run = Trainer(*prepare(read_recipe(recipes / "NCR.toml", {"data.path": str(scenes), **overrides})), files, Silent())
    run.begin()
    first, second = run.matcher, run.supervision.peer
    second.load_state_dict(first.state_dict())
    before = {name: part.clone() for name, part in first.state_dict().items()}
    run._epoch()
    if second.scale is not None:
        second.scale()  # a scale comes back within its bounds when it is read, as the first was in the probes
    changed = [name for name, part in first.state_dict().items() if not torch.equal(part, before[name])]
    assert changed
    assert not [name for name, part in first.state_dict().items() if not torch.equal(part, second.state_dict()[name])]


def test_the_code_s_margins_of_images_are_supplied(recipes, scenes, tmp_path):
    """``NCR(semantics="reference")`` trains, and differs from the paper's form only where labels differ from 1: not in the first epoch."""
    weights = []
    for semantics in ("paper", "reference"):
        overrides = {f"phases.{phase}.objective": f"NCR(semantics={semantics!r})" for phase in (0, 1)} | {"phases.1.epochs": 1}
        visavis.train(recipes / "NCR.toml", data=scenes, out=tmp_path / semantics, overrides=overrides)
        log = [json.loads(line) for line in (tmp_path / semantics / "metrics.jsonl").read_text().splitlines()]
        weights.append([row["train"]["loss"] for row in log])
    (_, before, paper), (_, same, reference) = weights
    assert before == pytest.approx(same, rel=1e-5)
    assert paper != pytest.approx(reference, rel=1e-5)


def test_misplaced_captions_exchange_their_images_in_training_alone(scenes):
    data = open_dataset(scenes)
    noisy = data.misplaced(0.5, seed=1)
    moved = noisy.image_of != data.image_of
    assert moved.sum() > 0.4 * len(data.split("train").captions)
    assert {data.images[i].split for i in data.image_of[moved]} == {"train"}
    assert sorted(noisy.image_of) == sorted(data.image_of)
    assert (data.misplaced(0.5, seed=1).image_of == noisy.image_of).all()
    assert (data.misplaced(0.0, seed=1).image_of == data.image_of).all()
    test = data.split("test")  # no training captions at all
    assert (test.misplaced(0.5, seed=1).image_of == test.image_of).all()


def test_fewer_images_and_captions_are_drawn_in_training_alone_a_part_of_more(scenes):
    data = open_dataset(scenes)

    def names(part, split):
        return {part.images[image].name: sorted(part.captions[i] for i in part.captions_of[image]) for image in range(len(part.images))
                if part.images[image].split == split}  # fmt: skip

    few, more = data.fewer(5, 2, seed=1), data.fewer(9, 2, seed=1)
    assert len(names(few, "train")) == 5 and names(few, "train").items() <= names(more, "train").items()
    assert all(len(captions) == 2 and set(captions) <= set(names(data, "train")[name]) for name, captions in names(more, "train").items())
    assert names(few, "test") == names(data, "test")
    assert [data.images[row].name for row in few.image_rows] == [image.name for image in few.images]
    assert [data.captions[row] for row in few.caption_rows] == list(few.captions)
    assert names(data.fewer(5, 0, seed=2), "train").keys() != names(few, "train").keys()
    assert data.fewer(0, 0, seed=1) is data


def test_doubtful_pairs_come_one_caption_a_row(recipes, scenes, tmp_path):
    with pytest.raises(RecipeError, match=r"needs one caption a row: leave training\.captions_per_image out"):
        visavis.train(recipes / "NCR.toml", data=scenes, out=tmp_path / "run", overrides={"training.captions_per_image": 2})


@pytest.mark.parametrize("growth", ["linear", "exponential", "sine"])
def test_a_margin_grows_with_trust_from_nothing_to_all(growth):
    labels = torch.linspace(0, 1, 11, dtype=torch.float64)
    margins = soft_margin(labels, 0.2, growth)
    assert margins[0].item() == pytest.approx(0, abs=1e-12)
    assert margins[-1].item() == pytest.approx(0.2)
    assert (margins.diff() > 0).all()
    halves = {"linear": 0.1, "exponential": 0.2 * (10**0.5 - 1) / 9, "sine": 0.1}
    assert margins[5].item() == pytest.approx(halves[growth])


def test_a_prediction_is_relative_to_the_best_of_the_batch():
    assert prediction(torch.tensor([0.0, 0.1, 0.2, 0.5]), 0.2).tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert prediction(torch.full((3,), 0.5), 0.2).tolist() == [0, 0, 0]


def test_losses_of_two_kinds_are_told_apart():
    torch.manual_seed(0)
    losses = torch.cat([0.1 + 0.01 * torch.randn(200), 0.4 + 0.03 * torch.randn(100)])
    clean = clean_probability(losses)
    assert (clean[:200] > 0.9).all()
    assert (clean[200:] < 0.1).all()
    assert clean_probability(torch.full((10,), 0.3)).isfinite().all()


def test_learned_weights_begin_at_one_and_move_by_their_rate(recipes, scenes, tmp_path):
    scores, positive = torch.randn(4, 6), torch.eye(4, 6).bool()
    assert torch.equal(WeightNetwork(8)(scores, positive), torch.ones(4, 6))
    run = tmp_path / "run"
    visavis.train(recipes / "weights.toml", data=scenes, out=run, overrides={"training.batch_size": 90})
    torch.manual_seed(seed_of(3, 0, 32))
    moved = [supervision_of(run)[name] - part for name, part in WeightNetwork(32).state_dict().items()]
    assert torch.cat([part.flatten() for part in moved]).norm().item() == pytest.approx(0.1, rel=1e-5)  # two batches, one step


def test_learned_weights_train_what_attends(towers, scenes, tmp_path):
    """The step ahead needs the gradient of a gradient, which the fastest attention has not."""
    (tmp_path / "bert.toml").write_text(f"""
name = "bert"
visual = {{ tower = "scenes", view = "grid" }}
text = {{ tower = "{towers}/bert", view = "tokens" }}
model = {{ kind = "VSEInfinity", width = 8, hidden = 0 }}
training = {{ batch_size = 20, batches_per_epoch = 2, threads = 1 }}
phases = [{{ epochs = 1, objective = "Unified()", supervision = "LearnedWeights(every=1)" }}]
""")
    visavis.train(tmp_path / "bert.toml", data=scenes, out=tmp_path / "run")
    assert any(part.abs().sum() > 0 for name, part in supervision_of(tmp_path / "run").items() if name == "layers.2.weight")


def test_pairs_by_position_lie_where_their_batch_lies():
    batch = SimpleNamespace(image_ids=torch.arange(3, device="meta"), text_ids=torch.arange(3, device="meta"))
    assert PairSupervision(by="position").targets(None, None, batch).query_ids.device.type == "meta"


def test_learned_weights_doubt_the_misplaced_captions(recipes, tmp_path):
    write_codes(tmp_path, train=240, val=12)
    overrides = {"data.misplaced": 0.4, "visual": {"features": "precomp"}, "epochs": 8, "training.batch_size": 24}
    overrides["phases.0.supervision"] = "LearnedWeights(every=1, lr=0.1)"
    visavis.train(recipes / "weights.toml", data=tmp_path, out=tmp_path / "run", overrides=overrides)
    data_module, matcher = prepare(recipe_of(tmp_path / "run"))
    matcher.load_state_dict(Checkpoint.latest(tmp_path / "run" / "checkpoint").weights)
    network = WeightNetwork(32)
    network.load_state_dict(supervision_of(tmp_path / "run"))
    train = data_module.data.split("train")
    weights = torch.empty(len(train.captions))
    for batch in data_module.loader(train).epoch(0, training=False):
        scores = matcher.eval().score(matcher.encode_visual(batch.visual), matcher.encode_text(batch.text))
        weights[batch.captions] = network(scores, batch.image_ids[:, None] == batch.text_ids).diagonal().detach()
    wrong = misplaced(train)
    assert 0.3 < wrong.float().mean() < 0.4
    assert (weights[~wrong, None] > weights[wrong]).float().mean() > 0.7  # the area under the ROC curve


def test_weights_that_no_objective_reads_stay_as_they_began(recipes, tmp_path):
    write_codes(tmp_path, train=24, val=12)
    overrides = {"visual": {"features": "precomp"}, "epochs": 1, "training.batch_size": 12, "phases.0.objective": "Triplet()"}
    visavis.train(recipes / "weights.toml", data=tmp_path, out=tmp_path / "run", overrides=overrides)
    assert not supervision_of(tmp_path / "run")["layers.2.weight"].any()
