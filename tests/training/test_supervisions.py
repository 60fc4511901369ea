"""Supervision: offline negatives, noisy correspondence and learned weights, resumed exactly."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.fixtures.recipes import write_recipe

import visavis
from visavis import PairLoss, parse
from visavis.core import spec, storage
from visavis.core.errors import MissingSupervision, RecipeError, RunError
from visavis.core.own_code import loaded_classes
from visavis.data.dataset_reader import open_dataset
from visavis.data.loader import derive_seed
from visavis.data.noise import ShuffledCaptions, add_noise
from visavis.losses.targets import Targets
from visavis.objectives import NCR
from visavis.training.checkpoint import Checkpoint
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.open_data import open_data_module
from visavis.training.runs.open_run import read_run_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.supervision import CATALOG, PairSupervision, Supervision
from visavis.training.supervision.learned_weights import WeightNetwork
from visavis.training.supervision.noisy_correspondence import (
    NoisySupervision,
    clean_probability,
    predicted_correspondence,
    soft_margin,
)
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training, resolve, start_training

GRADED = "GradedSupervision(relevance='SceneRelevance()')"
FAST, SLOW = {"optimizer": {"lr": 0.01}}, {"optimizer": {"lr": 0.005}}
PHASES = {
    "AOQ": [
        {"objective": "TripletHN()", **FAST},
        {
            "objective": "AOQ()",
            "supervision": "OfflineNegativeSupervision(size=20)",
            "initial_weights": "best",
            **SLOW,
        },
    ],
    "NCR": [
        {"objective": "NCR(warmup=True)", "supervision": "NoisySupervision()", **FAST},
        {"epochs": 2, "objective": "NCR()", "supervision": "NoisySupervision()", **SLOW},
    ],
    "graded": [{"objective": "Ladder()", "supervision": GRADED, **FAST}],
    "weights": [
        {
            "objective": "Unified(gamma=20)",
            "supervision": "LearnedWeights(every=2, lr=0.1)",
            **FAST,
        }
    ],
}


WORDS = ["dog", "cat", "boat", "tree", "kite", "car", "lamp", "moon", "frog", "hat", "sun", "cup"]


def write_codes(folder, **counts):
    """Write images that are a noisy code of the only word of their caption, so that mismatched
    captions are easy to detect.
    """
    random = np.random.default_rng(0)
    for split, count in counts.items():
        shown = np.arange(count) % len(WORDS)
        np.save(
            folder / f"{split}_ims.npy",
            (np.eye(len(WORDS))[shown] + 0.05 * random.standard_normal((count, 12))).astype(
                np.float32
            ),
        )
        (folder / f"{split}_caps.txt").write_text("".join(f"a {WORDS[word]}\n" for word in shown))


def mismatched(data):
    """Return which captions do not match their image."""
    return torch.tensor(
        [
            caption != f"a {WORDS[image % len(WORDS)]}"
            for caption, image in zip(data.captions, data.image_of, strict=True)
        ]
    )


@pytest.fixture
def recipes(tmp_path):
    for name, phases in PHASES.items():
        write_recipe(
            tmp_path / f"{name}.toml",
            *phases,
            seed=3,
            visual={"granularity": "regions"},
            model={"embedding_dim": 16, "word_dim": 8, "dropout": 0.2},
            training={"batch_size": 30, "checkpoint_s": 0},
        )
    return tmp_path


def supervision_of(run):
    last = max((run / "checkpoint").glob("step-*"))
    return load_file(last / "supervision.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AOQ", "NCR", "weights"])
def test_supervised_run_resumes_exactly(name, recipes, scenes, outcome, in_pieces, tmp_path):
    plan = {
        "AOQ": {},
        "NCR": {"training.batches_per_epoch": 4},
        "weights": {"training.batch_size": 16},
    }[name]
    visavis.train(recipes / f"{name}.toml", data=scenes, out=tmp_path / "whole", overrides=plan)
    assert in_pieces(recipes / f"{name}.toml", tmp_path / "pieces", data=scenes, overrides=plan) > 2
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    assert supervision_of(tmp_path / "whole")


def test_train_rejects_unused_supervision(recipes, scenes, tmp_path):
    def train(objective):
        overrides = {
            "phases.1.objective": objective,
            "phases.1.initial_weights": "last",
            "training.batches_per_epoch": 1,
        }
        return visavis.train(
            recipes / "AOQ.toml", data=scenes, out=tmp_path / objective, overrides=overrides
        )

    annotations = r"\(query_offline_scores, candidate_offline_scores\)"
    expected = rf"^phases\.1: VLC does not use the annotations of OfflineNegativeSupervision {annotations}\. Set another objective, or"
    with pytest.raises(RecipeError, match=expected):
        train("VLC()")
    assert not (tmp_path / "VLC()").exists()
    assert train("AOQ()").run.exists()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("objective", "supervision_spec", "needed"),
    [
        ("Ladder()", "PairSupervision()", "relevance for every pair"),
        ("GradedVLC()", "FeedbackSupervision()", "relevance for every pair"),
        ("AOQ()", "GradedSupervision()", "query_offline_scores"),
        (
            "NCR()",
            "OfflineNegativeSupervision()",
            "query_margin and candidate_margin, or pair_margin",
        ),
        ("NCR(semantics='reference')", "LearnedWeights()", "pair_margin for every pair"),
    ],
)
def test_missing_annotations_are_rejected_before_training(
    number, objective, supervision_spec, needed, recipes, tmp_path
):
    phase = {
        f"phases.{number}.objective": objective,
        f"phases.{number}.supervision": supervision_spec,
    }
    with pytest.raises(
        MissingSupervision,
        match=rf"^phases\.{number}: \w+: expected {needed}.* or train with \w+Supervision( or RelevanceMargins)?\.$",
    ):
        visavis.train(
            recipes / "AOQ.toml", data="nowhere", out=tmp_path / "runs" / "run", overrides=phase
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("objective", "supervision_spec"),
    [
        *(
            ("Ladder(margins=(0.2,), thresholds=(), betas=(1.0,))", "PairSupervision()"),
            ("NCR(warmup=True)", "PairSupervision()"),
        ),
        *(
            ("NCR()", "NoisySupervision()"),
            ("NCR(semantics='reference')", "NoisySupervision()"),
            ("AOQ()", "OfflineNegativeSupervision()"),
        ),
        *(
            ("Ladder()", "GradedSupervision()"),
            ("Unified()", "LearnedWeights()"),
            ("Unified()", "RelevanceWeights()"),
            ("Unified()", "RelevanceMargins()"),
            ("NCR()", "RelevanceMargins()"),
            ("TripletHN()", "OfflineNegativeSupervision()"),
            ("Unified()", "DistillationSupervision(teacher='big')"),
            ("Distillation()", "DistillationSupervision(teacher='big')"),
        ),
    ],
)
def test_sufficient_annotations_are_accepted(objective, supervision_spec):
    spec.parse(supervision_spec, CATALOG, Supervision, "supervisions").check_objective(
        parse(objective)
    )


REPORTED = {
    "PairSupervision": ("(by='position')", "position", "(by='position')"),
    "FeedbackSupervision": (
        "(slack=0.25)",
        "ids and feedback",
        "(unlabeled='ignore', slack=0.25) of votes.jsonl",
    ),
    "GradedSupervision": (
        "(relevance='CBoW()', by='position')",
        "position",
        "(relevance='CBoW()', ",
    ),
    "RelevanceWeights": ("(strength=0.1)", "ids", "(relevance='CBoW()', "),
    "RelevanceMargins": ("(margin=0.3)", "ids", "(relevance='CBoW()', "),
    "OfflineNegativeSupervision": ("(size=20)", "ids", "(size=20, preselect=0)"),
    "MinedNegativeSupervision": (
        "(file='n.safetensors', per_query=3)",
        "ids",
        "(file='n.safetensors', per_query=3)",
    ),
    "EditedCaptionSupervision": ("(per_caption=2)", "ids", "(per_caption=2)"),
    "NoisySupervision": (
        "(threshold=0.6)",
        "ids",
        "(margin=0.2, growth='exponential', threshold=0.6, ",
    ),
    "DistillationSupervision": ("(teacher='runs/big')", "ids", "(teacher='runs/big', weight=1.0, "),
    "LearnedWeights": ("(every=2)", "ids", "(hidden_dim=32, lr=0.05, virtual_lr=0.01, every=2)"),
}


@pytest.mark.parametrize(
    "source",
    [*CATALOG, *loaded_classes(Supervision, "supervisions")],
    ids=lambda source: source.__name__,
)
def test_report_names_supervision_with_settings(source, recipes):
    settings, positives_by, reported = REPORTED[source.__name__]
    overrides = {"phases.1.supervision": source.__name__ + settings}
    if source.__name__ == "FeedbackSupervision":
        overrides |= {
            "data.feedback": "votes.jsonl",
            "phases.0.supervision": overrides["phases.1.supervision"],
        }
    else:
        overrides |= {"phases.0.supervision": "PairSupervision()"}
    recipe = read_recipe(recipes / "AOQ.toml", overrides)
    assert recipe.positives_by.split(" then ")[-1] == positives_by
    assert recipe.supervision.split(" then ")[-1].startswith(source.__name__ + reported)


def test_undeclared_supervision_may_supply_anything():
    class Margins(Supervision):
        def targets(self, visual, text, batch):
            return Targets.paired(
                len(text),
                query_margin=torch.ones(len(text)),
                candidate_margin=torch.ones(len(text)),
            )

    Margins().check_objective(parse("NCR()"))


@pytest.mark.parametrize(
    "before",
    [
        {},
        {
            "phases.0.objective": "AOQ()",
            "phases.0.supervision": "OfflineNegativeSupervision(size=20)",
        },
    ],
    ids=["none", "bank"],
)
@pytest.mark.slow
def test_offline_negatives_are_the_hardest(before, recipes, scenes, tmp_path):
    """Negatives are selected by the model at the start of the phase, also after a phase with a
    bank.
    """
    run = tmp_path / "run"
    visavis.train(
        recipes / "AOQ.toml",
        data=scenes,
        out=run,
        overrides={"phases.1.epochs": 1, "phases.1.optimizer.lr": 1e-12, **before},
    )
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in log] == [0, 0, 1]
    model, data = visavis.load(run), open_dataset(scenes).split("train")
    lists = supervision_of(run)
    scores = (
        model.encode_images([image.open() for image in data.images])
        @ model.encode_texts(data.captions).T
    )
    own = torch.arange(len(data.images))[:, None] == torch.from_numpy(data.image_of)
    hardest = scores.masked_fill(own, -2).topk(20).indices
    assert (
        lists["train.texts"].long() == hardest
    ).float().mean() > 0.9  # Equal up to rounding of near ties.
    assert not own.gather(1, lists["train.texts"].long()).any()
    assert not own.T.gather(1, lists["train.images"].long()).any()
    assert {name: list(part.shape) for name, part in lists.items()} == {
        "train.texts": [60, 20],
        "train.images": [180, 20],
        "validation.texts": [12, 20],
        "validation.images": [36, 11],
    }


@pytest.mark.parametrize("name", ["AOQ", "NCR", "weights", "graded"])
@pytest.mark.slow
def test_offline_negatives_with_validation_on_training_split(name, recipes, scenes, tmp_path):
    """The first images are in training and validation batches, and get the targets of each."""
    overrides = {
        "data.path": str(scenes),
        "evaluation.validation": "train",
        "evaluation.validation_images": 5,
        "training.batch_size": 45,
    }
    files = RunFolder(tmp_path / "run")
    files.path.mkdir()
    run = Trainer(*prepare_training(read_recipe(recipes / f"{name}.toml", overrides)), files)
    run.start()
    run.run()
    if name == "NCR":
        run.supervision._labels.fill_(0.5)
    for loader, count in ((run.train_loader, 4), (run.val_loader, 1)):
        for batch in loader.epoch(1):
            visual, text = (
                run.matcher.encode_visual(batch.visual),
                run.matcher.encode_text(batch.text),
            )
            targets = run.supervision.targets(visual, text, batch)
            if name == "NCR":
                trusted = (
                    torch.ones(len(batch.captions))
                    if loader is run.val_loader
                    else torch.full((len(batch.captions),), 0.5)
                )
                assert torch.equal(targets.query_margin, soft_margin(trusted, 0.2))
            elif name == "graded":
                rows, columns = torch.from_numpy(batch.captions), torch.from_numpy(batch.captions)
                assert (targets.relevance(rows, columns).diagonal() == 1).all()
        assert batch.index + 1 == count
    if name == "AOQ":
        assert [len(part) for part in run.supervision.state_dict().values()] == [60, 180, 5, 15]


def test_offline_negatives_reject_one_image(recipes, tmp_path):
    write_codes(tmp_path, train=24, val=1)
    with pytest.raises(
        RecipeError,
        match=r"^OfflineNegativeSupervision: expected at least 2 images with captions in the validation split, got 1",
    ):
        visavis.train(
            recipes / "AOQ.toml",
            data=tmp_path,
            out=tmp_path / "run",
            overrides={"visual": {"features": "precomp"}},
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_noisy_supervision_detects_mismatched_captions(recipes, tmp_path):
    write_codes(tmp_path, train=240, val=24)
    overrides = {
        "data.noise": "ShuffledCaptions(share=0.4)",
        "visual": {"features": "precomp"},
        "phases.0.epochs": 6,
        "phases.0.optimizer.lr": 0.02,
        "training.batch_size": 24,
    }
    visavis.train(recipes / "NCR.toml", data=tmp_path, out=tmp_path / "run", overrides=overrides)
    seed = read_run_recipe(tmp_path / "run").seed
    noisy = add_noise(open_dataset(tmp_path), ShuffledCaptions(share=0.4), seed)
    wrong = mismatched(noisy.split("train"))
    clean = supervision_of(tmp_path / "run")["clean"].mean(0)
    assert 0.3 < wrong.float().mean() < 0.4
    assert clean[~wrong].mean() > 0.7
    assert clean[wrong].mean() < 0.3


@pytest.mark.slow
def test_noisy_supervision_evaluates_mean_of_networks(recipes, scenes, tmp_path):
    run = tmp_path / "run"
    visavis.train(recipes / "NCR.toml", data=scenes, out=run)
    first, second = visavis.load(run), visavis.load(run / "peer")
    test = open_dataset(scenes).split("test")
    images = [image.open() for image in test.images]
    mean = (first.score(images, test.captions) + second.score(images, test.captions)) / 2
    both = visavis.papers_evaluate(run, average=True).metrics
    top = mean.topk(5, dim=0).indices == torch.from_numpy(test.image_of)
    assert both["t2i_r5"] == pytest.approx(100 * top.any(0).float().mean().item())
    assert both != visavis.evaluate(run).metrics
    assert (
        visavis.evaluate(run).metrics["rsum"]
        == json.loads((run / "result.json").read_text())["rsum"]
    )


def test_noisy_supervision_saves_peer_with_best_model(recipes, scenes, tmp_path):
    """A later and better phase without a peer removes it, and its average is then rejected."""
    later = {"phases.1.supervision": "PairSupervision()", "phases.1.objective": "VLC()"}
    overrides = {"phases.0.optimizer.lr": 1e-12, "evaluation.validation": "train"} | later
    visavis.train(recipes / "NCR.toml", data=scenes, out=tmp_path / "run", overrides=overrides)
    with pytest.raises(RunError, match=r"expected a second network in peer, found none"):
        visavis.papers_evaluate(tmp_path / "run", average=True)


CLIP = {
    "visual": {"encoder": "clip", "granularity": "pixels"},
    "text": {"encoder": "clip"},
    "model": {"kind": "CLIP", "scale": "learned"},
}
NORMED = {"kind": "VSEInfinity", "embedding_dim": 16, "word_dim": 8, "size_augmentation": 0.0}


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.dropout": 0.0},
        {"model.dropout": 0.0, "training.accumulation_steps": 3},
        {"model.dropout": 0.0, "phases.0.loss_warmup_epochs": 2.0, "training.clip_norm": 0.0},
        {"model": NORMED, "phases.0.trainable": ["text"]},
        {**CLIP, "phases.0.objective": "InfoNCE()", "phases.1.objective": "InfoNCE()"},
    ],
    ids=[
        "a step a batch",
        "accumulated",
        "loss_warmup_epochs",
        "frozen statistics",
        "learned scale",
    ],
)
@pytest.mark.slow
def test_noisy_supervision_trains_equal_networks_equally(
    overrides, recipes, scenes, dual_encoders, tmp_path, monkeypatch
):
    """Networks are equal while all pairs are trusted, without dropout."""
    monkeypatch.chdir(dual_encoders)
    files = RunFolder(tmp_path / "run")
    files.path.mkdir()
    run = Trainer(
        *prepare_training(
            read_recipe(recipes / "NCR.toml", {"data.path": str(scenes), **overrides})
        ),
        files,
    )
    run.start()
    first, second = run.matcher, run.supervision.peer
    second.load_state_dict(first.state_dict())
    before = {name: part.clone() for name, part in first.state_dict().items()}
    run._train_to_validation()
    if second.scale is not None:
        second.scale()  # A scale is clamped to its bounds when it is read, as the first one was in the probes.
    changed = [
        name for name, part in first.state_dict().items() if not torch.equal(part, before[name])
    ]
    assert changed
    assert not [
        name
        for name, part in first.state_dict().items()
        if not torch.equal(part, second.state_dict()[name])
    ]


@pytest.mark.slow
def test_noisy_supervision_supplies_image_margins(recipes, scenes, tmp_path):
    """``NCR(semantics="reference")`` trains, and equals the paper's form in the first epoch, where
    all labels are 1.
    """
    weights = []
    for semantics in ("paper", "reference"):
        overrides = {
            f"phases.{phase}.objective": f"NCR(semantics={semantics!r})" for phase in (0, 1)
        } | {"phases.1.epochs": 1}
        visavis.train(
            recipes / "NCR.toml", data=scenes, out=tmp_path / semantics, overrides=overrides
        )
        log = [
            json.loads(line)
            for line in (tmp_path / semantics / "metrics.jsonl").read_text().splitlines()
        ]
        weights.append([row["train"]["loss"] for row in log])
    (_, before, paper), (_, same, reference) = weights
    assert before == pytest.approx(same, rel=1e-5)
    assert paper != pytest.approx(reference, rel=1e-5)


def test_training_subsets_are_nested_and_only_for_training(scenes):
    data = open_dataset(scenes)

    def names(part, split):
        return {part.images[image].name: sorted(part.captions[i] for i in part.captions_of[image]) for image in range(len(part.images))
                if part.images[image].split == split}  # fmt: skip

    few, more = data.subsample(5, 2, seed=1), data.subsample(9, 2, seed=1)
    assert (
        len(names(few, "train")) == 5
        and names(few, "train").items() <= names(more, "train").items()
    )
    assert all(
        len(captions) == 2 and set(captions) <= set(names(data, "train")[name])
        for name, captions in names(more, "train").items()
    )
    assert names(few, "test") == names(data, "test")
    assert [data.images[row].name for row in few.image_rows] == [image.name for image in few.images]
    assert [data.captions[row] for row in few.caption_rows] == list(few.captions)
    assert names(data.subsample(5, 0, seed=2), "train").keys() != names(few, "train").keys()
    assert data.subsample(0, 0, seed=1) is data


def test_redrawn_splits_keep_their_sizes_and_the_test_split(scenes):
    data = open_dataset(scenes)
    first, same, second = (data.redraw(("train", "val"), seed) for seed in (1, 1, 2))

    def names(part, split):
        return {image.name for image in part.split(split).images}

    for drawn in (first, second):
        for split in data.splits:
            assert len(names(drawn, split)) == len(names(data, split))
        assert names(drawn, "test") == names(data, "test")
        assert names(drawn, "train").isdisjoint(names(drawn, "val"))
        assert list(drawn.captions) == list(data.captions)
        assert drawn.image_of is data.image_of
    assert names(first, "val") == names(same, "val")
    assert len({frozenset(names(part, "val")) for part in (data, first, second)}) == 3
    # Every image comes into validation equally often, within five standard deviations.
    images = len(names(data, "train") | names(data, "val"))
    share = len(names(data, "val")) / images
    counts = Counter(
        name for seed in range(300) for name in names(data.redraw(("train", "val"), seed), "val")
    )
    assert len(counts) == images
    assert all(abs(n - 300 * share) < 5 * (300 * share) ** 0.5 for n in counts.values())


def test_random_validation_is_that_of_the_seed(recipes, scenes, tmp_path):
    drawn = []
    for seed in (1, 1, 2):
        recipe = read_recipe(
            recipes / "AOQ.toml",
            {"data.path": str(scenes), "evaluation.random_validation": True, "seed": seed},
        )
        module = open_data_module(recipe, training=True)
        train, val = module.training_split, module.validation
        assert {one.name for one in train.images}.isdisjoint(one.name for one in val.images)
        drawn.append(sorted(one.name for one in val.images))
    assert drawn[0] == drawn[1] != drawn[2]


def test_seeds_that_draw_their_validation_share_features(scenes):
    def files():
        return {file for file in (storage.cache_folder() / "features").rglob("*") if file.is_file()}

    def open_seed(seed):
        overrides = {"evaluation.random_validation": True, "seed": seed}
        recipe = read_recipe("demo", {"data.path": str(scenes), **overrides})
        return open_data_module(recipe, training=True).validation

    first, known = open_seed(1), files()
    second = open_seed(2)
    assert [one.name for one in first.images] != [one.name for one in second.images]
    assert known and files() == known


def test_random_validation_is_that_of_later_evaluations(recipes, scenes, tmp_path):
    runs = []
    for seed in (1, 2):
        overrides = {"evaluation.random_validation": True, "seed": seed}
        out = tmp_path / f"{seed}"
        trained = visavis.train(recipes / "AOQ.toml", data=scenes, out=out, overrides=overrides)
        rsum = visavis.evaluate(out, split="val").metrics["rsum"]
        assert rsum == pytest.approx(trained.validation_rsum, abs=1e-4)
        runs.append(out)
    with pytest.raises(RunError, match="expected the same captions of train for all runs"):
        visavis.evaluate(runs, correction="QueryBankNorm()", bank="train")
    # Other data keeps its own splits.
    other = tmp_path / "other"
    shutil.copytree(scenes, other)
    assert read_run_recipe(runs[0], str(scenes)).evaluation.random_validation
    assert not read_run_recipe(runs[0], str(other)).evaluation.random_validation


@pytest.mark.parametrize(
    "overrides",
    [{"data.stream": "train-*.tar"}, {"evaluation.validation": "test"}],
)
def test_random_validation_is_refused_where_it_would_mix_splits(recipes, overrides):
    with pytest.raises(
        RecipeError, match=r"evaluation\.random_validation: expected no data\.stream"
    ):
        read_recipe(recipes / "AOQ.toml", {"evaluation.random_validation": True, **overrides})


def test_noisy_supervision_rejects_captions_per_image(recipes, scenes, tmp_path):
    with pytest.raises(
        RecipeError,
        match=r"training\.captions_per_image: expected no value with NoisySupervision, .* got 2",
    ):
        visavis.train(
            recipes / "NCR.toml",
            data=scenes,
            out=tmp_path / "run",
            overrides={"training.captions_per_image": 2},
        )


@pytest.mark.parametrize("growth", ["linear", "exponential", "sine"])
def test_soft_margin_grows_from_zero_to_margin(growth):
    labels = torch.linspace(0, 1, 11, dtype=torch.float64)
    margins = soft_margin(labels, 0.2, growth)
    assert margins[0].item() == pytest.approx(0, abs=1e-12)
    assert margins[-1].item() == pytest.approx(0.2)
    assert (margins.diff() > 0).all()
    halves = {"linear": 0.1, "exponential": 0.2 * (10**0.5 - 1) / 9, "sine": 0.1}
    assert margins[5].item() == pytest.approx(halves[growth])


def test_predicted_correspondence_matches_hand_values():
    assert predicted_correspondence(
        torch.tensor([0.0, 0.1, 0.2, 0.5]), 0.2
    ).tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert predicted_correspondence(torch.full((3,), 0.5), 0.2).tolist() == [0, 0, 0]


def test_noisy_pairs_are_left_out_before_their_epoch(generator):
    """The loss equals that of a batch without them, for either network."""
    images, texts = (torch.randn(6, 5, generator=generator) for _ in range(2))
    captions, ids = np.arange(6) + 3, torch.arange(6)
    data = object()
    batch = SimpleNamespace(
        captions=captions, image_ids=ids, text_ids=ids, loader=SimpleNamespace(data=data)
    )
    supervision = NoisySupervision(warmup_epochs=2, noisy_pairs_from_epoch=4)
    supervision._context = SimpleNamespace(
        is_training_batch=lambda batch: batch.loader.data is data
    )
    supervision._labels = torch.rand(2, 9, generator=generator)
    supervision._clean = torch.ones(2, 9)
    supervision._clean[1, [3, 6]] = 0.2
    supervision._clean[0, [8]] = 0.1
    for network, noisy in ((0, [0, 3]), (1, [5])):
        kept = [row for row in range(6) if row not in noisy]
        supervision._epochs = 3
        found = PairLoss(NCR())(images, texts, targets=supervision._margin_targets(batch, network))
        part = SimpleNamespace(
            captions=captions[kept], image_ids=ids[kept], text_ids=ids[kept], loader=batch.loader
        )
        supervision._epochs = 4
        expected = PairLoss(NCR())(
            images[kept], texts[kept], targets=supervision._margin_targets(part, network)
        )
        assert expected > 0
        torch.testing.assert_close(found, expected)
        whole = PairLoss(NCR())(images, texts, targets=supervision._margin_targets(batch, network))
        assert whole > found


def test_clean_probability_separates_two_groups():
    torch.manual_seed(0)
    losses = torch.cat([0.1 + 0.01 * torch.randn(200), 0.4 + 0.03 * torch.randn(100)])
    clean = clean_probability(losses)
    assert (clean[:200] > 0.9).all()
    assert (clean[200:] < 0.1).all()
    assert clean_probability(torch.full((10,), 0.3)).isfinite().all()


def test_learned_weights_start_at_one_and_move_by_lr(recipes, scenes, tmp_path):
    scores, positive = torch.randn(4, 6), torch.eye(4, 6).bool()
    assert torch.equal(WeightNetwork(8)(scores, positive), torch.ones(4, 6))
    run = tmp_path / "run"
    visavis.train(
        recipes / "weights.toml", data=scenes, out=run, overrides={"training.batch_size": 90}
    )
    torch.manual_seed(derive_seed(3, 0, 32))
    moved = [
        supervision_of(run)[name] - part for name, part in WeightNetwork(32).state_dict().items()
    ]
    assert torch.cat([part.flatten() for part in moved]).norm().item() == pytest.approx(
        0.1, rel=1e-5
    )  # Two batches, one step.


def test_learned_weights_train_attention_models(towers, scenes, tmp_path):
    """The look-ahead step needs second derivatives, which the fastest attention does not support."""
    recipe = write_recipe(
        tmp_path / "bert.toml",
        {"objective": "Unified()", "supervision": "LearnedWeights(every=1)"},
        name="bert",
        visual={"granularity": "regions"},
        text={"encoder": f"{towers}/bert", "granularity": "tokens", "min_count": None},
        model={"kind": "VSEInfinity", "hidden_dim": 0, "word_dim": None},
        training={"batch_size": 20, "batches_per_epoch": 2, "metric_batches": None},
    )
    visavis.train(recipe, data=scenes, out=tmp_path / "run")
    assert any(
        part.abs().sum() > 0
        for name, part in supervision_of(tmp_path / "run").items()
        if name == "layers.2.weight"
    )


def test_pair_targets_are_on_device_of_batch(monkeypatch):
    class Ids(list):
        device = "another device"

    monkeypatch.setattr(Targets, "to", lambda _, device: device)
    batch = SimpleNamespace(image_ids=Ids("abc"), text_ids=Ids("abc"))
    assert PairSupervision(by="position").targets(None, None, batch) == "another device"


@pytest.mark.slow
def test_learned_weights_detect_mismatched_captions(recipes, tmp_path):
    write_codes(tmp_path, train=240, val=12)
    overrides = {
        "data.noise": "ShuffledCaptions(share=0.4)",
        "visual": {"features": "precomp"},
        "epochs": 14,
        "training.batch_size": 24,
    }
    overrides["phases.0.supervision"] = "LearnedWeights(every=1, lr=0.1)"
    visavis.train(
        recipes / "weights.toml", data=tmp_path, out=tmp_path / "run", overrides=overrides
    )
    data_module, matcher = prepare_training(read_run_recipe(tmp_path / "run"))
    matcher.load_state_dict(Checkpoint.latest(tmp_path / "run" / "checkpoint").weights)
    network = WeightNetwork(32)
    network.load_state_dict(supervision_of(tmp_path / "run"))
    train = data_module.data.split("train")
    weights = torch.empty(len(train.captions))
    for batch in data_module.loader(train).epoch(0, training=False):
        scores = matcher.eval().score(
            matcher.encode_visual(batch.visual), matcher.encode_text(batch.text)
        )
        weights[batch.captions] = (
            network(scores, batch.image_ids[:, None] == batch.text_ids).diagonal().detach()
        )
    wrong = mismatched(train)
    assert 0.3 < wrong.float().mean() < 0.4
    assert (
        weights[~wrong, None] > weights[wrong]
    ).float().mean() > 0.7  # The area under the ROC curve.


def test_learned_weights_stay_if_unused(recipes, tmp_path):
    write_codes(tmp_path, train=24, val=12)
    overrides = {
        "visual": {"features": "precomp"},
        "epochs": 1,
        "training.batch_size": 12,
        "phases.0.objective": "Triplet()",
    }
    recipe = read_recipe(recipes / "weights.toml", overrides | {"data.path": str(tmp_path)})
    # visavis.train rejects it, a comparison does not.
    start_training(resolve(recipe), tmp_path / "run")
    assert not supervision_of(tmp_path / "run")["layers.2.weight"].any()
