"""Feedback as training data: hand values of a batch, laws, resume and errors."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RecipeError, RunError
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.feedback.records import Judgment, Preference, QueryKey
from visavis.data.feedback.sources import write_feedback
from visavis.data.feedback.training_pairs import (
    MAX_ADDED_NEGATIVES,
    FeedbackPairs,
    FeedbackSplit,
)
from visavis.data.image_file import Image
from visavis.data.item_sources import ConcatSource
from visavis.data.loader import BatchSchedule, Loader
from visavis.data.synthetic import write_synthetic_scenes
from visavis.losses.targets import Targets
from visavis.models.encoders import feature_extraction as caching
from visavis.objectives import CATALOG
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.recipe import with_feedback
from visavis.training.supervision import FeedbackSupervision, PairSupervision
from visavis.training.supervision.human_feedback import possible_positives
from visavis.training.training_run import prepare_training

AT = "2026-05-01T09:30:00.000+00:00"


def judgment(text, item, fits, *, content="", at=AT, similar_to=""):
    return Judgment(at, "photos", QueryKey(text, similar_to=similar_to), item, content, fits)


def write(path, lines):
    write_feedback(path, lines)
    return path


def toy():
    """Four training images a, b, c, d with a caption each (that of d: "a dog"), then one of each
    other split.
    """
    images = [Image(name, "train") for name in "abcd"] + [Image("v", "val"), Image("t", "test")]
    return Dataset(
        "toy", tuple(images), ("one", "two", "three", "a dog", "five", "six"), np.arange(6)
    )


VOTES = [
    judgment("a dog", "a", True),
    judgment("a dog", "b", False),
    judgment("a  dog ", "c", True),
    judgment("a cat", "b", False),
    judgment("a cat", "c", False),
    judgment("a boat", "a", True),
]
LEFT_OUT = [
    judgment("a dog", "v", True),
    judgment("a dog", "t", False),
    judgment("a dog -cat", "a", True),
    judgment("", "a", True, similar_to="b"),
    judgment("a dog", "elsewhere.png", True),
    judgment("a dog", "a.mp4#t=0,4", True),
    judgment("a dog", "d", False),
]


def split_of(votes):
    return FeedbackSplit.from_pairs(toy().split("train"), FeedbackPairs.from_records(votes, toy()))


def test_feedback_pairs_and_skipped_judgments():
    pairs = FeedbackPairs.from_records(
        VOTES + LEFT_OUT + [Preference(AT, QueryKey("a dog"), "one", "two", None)], toy()
    )
    assert pairs.queries == ("a boat", "a cat", "a dog")
    assert pairs.relevant.tolist() == [[0, 0], [2, 0], [2, 2]]
    assert pairs.not_relevant.tolist() == [[1, 1], [1, 2], [2, 1]]
    assert str(pairs) == (
        "3 text queries with 3 relevant and 3 not relevant images of split train. 7 of 13 "
        "judgments were skipped: 1 of images of split val, "
        "1 of images of split test, 2 with queries that are not plain text (images, items, "
        "excluded words), "
        "1 of images that are not in toy or have changed, 1 of moments of clips, 1 that contradict "
        "captions of the data set."
    )


def test_feedback_split_adds_queries_as_captions():
    split = split_of(VOTES)
    assert split.data.captions == ("one", "two", "three", "a dog", "a boat", "a dog", "a dog")
    assert split.data.image_of.tolist() == [0, 1, 2, 3, 0, 0, 2]
    assert split.unmatched_queries == ("a cat",)
    assert split.query_of.tolist() == [-1, -1, -1, 2, 0, 2, 2, 1]
    assert split.image_of.tolist() == [0, 1, 2, 3, 0, 0, 2, -1]
    fits, wrong = split.batch_labels(np.array([0, 1, 2, 3]), np.array([0, 4, 5, 3, 7]))
    assert fits.tolist() == [
        [False, one, dog, dog, False]
        for one, dog in ((True, True), (False, False), (False, True), (False, True))
    ]
    assert wrong.tolist() == [
        [False, False, dog, dog, cat]
        for dog, cat in ((False, False), (True, True), (False, True), (False, False))
    ]


def test_feedback_split_adds_known_negatives():
    split, random = split_of(VOTES), np.random.default_rng(0)
    images, texts = split.add_negatives(
        np.array([0, 3]), np.array([5, 3]), random
    )  # "a dog" brings b with "two", which brings "a cat"
    assert (images.tolist(), texts.tolist()) == ([0, 3, 1], [5, 3, 1, 7])
    images, texts = split.add_negatives(
        np.array([0]), np.array([4]), random
    )  # nothing is against "a boat", nor against a
    assert (images.tolist(), texts.tolist()) == ([0], [4])
    many = [
        judgment("a dog", "a", True),
        *(judgment("a dog", name, False) for name in "bc"),
        *(judgment(f"cat {i}", "b", False) for i in range(20)),
    ]
    assert (
        len(split_of(many).add_negatives(np.array([0]), np.array([4]), random)[1])
        == 1 + 2 + MAX_ADDED_NEGATIVES
    )


def test_possible_positives_match_hand_values():
    scores = torch.tensor([[0.9, 0.2, 0.3], [0.6, 0.8, 0.1], [0.5, 0.4, 0.2], [0.0, 0.6, 0.4]])
    fits = torch.tensor([[0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]).bool()
    wrong = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]).bool()
    found = possible_positives(scores, fits, wrong, slack=0.0)
    assert found.int().tolist() == [[1, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 1]]
    deviation = scores[:, 0].std(correction=0).item()
    assert (
        possible_positives(scores, fits, wrong, slack=1.01 * 0.1 / deviation).int().tolist()[2][0]
        == 1
    )
    assert (
        possible_positives(scores, fits, wrong, slack=0.99 * 0.1 / deviation).int().tolist()[2][0]
        == 0
    )


class Identity(torch.nn.Module):
    """Scores by the first number of an image and of a text: their product."""

    def score(self, visual, text):
        return visual.vectors @ text.vectors.T


def batch_of(votes, supervision, visual, text, captions):
    """The targets of the batch of these captions of the toy split, with what they bring."""
    split = split_of(votes)

    class Numbers:
        def __init__(self, rows):
            self.rows = torch.tensor(rows)[:, None]

        def read(self, index, seeds=None):
            return Encoded(self.rows[torch.from_numpy(index)])

    loader = Loader(
        split.data, Numbers(visual), Numbers(text), BatchSchedule(batch_size=2), 0, split
    )
    request = loader._request(
        split.data.image_of[captions], np.array(captions), 1, 0, training=False
    )
    batch = loader._batch(request, loader.batch_reader(request), 1, 0)
    supervision._context = type("Context", (), {"matcher": Identity(), "memory": None})
    return batch, supervision.targets(batch.visual, batch.text, batch)


def test_feedback_targets_match_hand_values():
    """Texts "a dog" (of a), "a dog" (of d) and the added "two" (of b) and "a cat": a and d are
    relevant to both dogs, b is not. c is unlabeled.
    """
    visual, text = [0.5, 0.9, 0.1, 0.7], [1.0] * 8
    batch, targets = batch_of(VOTES, FeedbackSupervision(slack=0.0), visual, text, [5, 3])
    assert (batch.images.tolist(), batch.captions.tolist()) == ([0, 3, 1], [5, 3, 1, 7])
    assert targets.positive.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]
    assert targets.pairwise("ignore").int().tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert targets.negative.int().tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 1]]
    _, targets = batch_of(VOTES, FeedbackSupervision(unlabeled="negative"), visual, text, [5, 3])
    assert targets.negative.int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1]]
    votes = [
        judgment("a boat", "a", True)
    ]  # d scores higher than a, and may show a boat, too. b scores lower
    visual = [0.5, 0.1, 0.1, 0.7]
    _, targets = batch_of(votes, FeedbackSupervision(slack=0.0), visual, text, [4, 3, 1])
    assert targets.pairwise("ignore").int().tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert targets.negative.int().tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("objective", CATALOG, ids=lambda kind: kind.__name__)
def test_feedback_targets_work_with_every_objective(objective):
    _, targets = batch_of(VOTES, FeedbackSupervision(), [0.5, 0.9, 0.1, 0.7], [1.0] * 8, [0])
    assert targets.relation is None
    assert targets.ignore is None
    _, targets = batch_of(VOTES, FeedbackSupervision(), [0.5, 0.9, 0.1, 0.7], [1.0] * 8, [5, 3])
    if not set(objective().used_annotations) & {
        "relevance",
        "weight",
        "query_margin",
        "query_offline_scores",
    }:
        scores = (
            torch.linspace(-1, 1, targets.shape.numel(), dtype=torch.double)
            .view(targets.shape)
            .requires_grad_()
        )
        loss = objective()(scores, targets)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(scores.grad).all()


def test_concatenated_sources_read_as_one():
    class Ragged:
        def __init__(self, start):
            self.start = start

        def read(self, index, seeds=None):
            longest = int(index.max()) + 1
            mask = torch.arange(longest) <= torch.from_numpy(index)[:, None]
            return Encoded(
                (mask * (self.start + torch.from_numpy(index)[:, None] + 1.0))[..., None], mask
            )

    both = ConcatSource(Ragged(0), Ragged(10), 3)
    for index in ([3, 0, 4, 2], [0, 1], [5, 3]):
        items = both.read(np.array(index))
        assert items.mask.sum(1).tolist() == [1 + (i if i < 3 else i - 3) for i in index]
        assert items.vectors[:, 0, 0].tolist() == [
            float(i + 1 if i < 3 else i - 3 + 11) for i in index
        ]


# Of a whole training


@pytest.fixture(scope="module")
def votes(scenes, tmp_path_factory):
    """Relevant and not relevant captions of other training images, and a query without a relevant
    image.
    """
    data = open_dataset(scenes).split("train")
    names = [image.name for image in data.images]
    lines = [judgment(f"{data.captions[3 * i]} again", names[i], True) for i in range(0, 20, 2)]
    lines += [
        judgment(f"{data.captions[3 * i]} again", names[i + 1], False) for i in range(0, 20, 2)
    ]
    lines += [
        judgment(f"{data.captions[3 * i]} again", names[i + 21], True) for i in range(0, 20, 4)
    ]
    lines += [judgment("nothing at all", name, False) for name in names[:5]]
    return lines


SHORT = {"phases.0.epochs": 1, "phases.1.epochs": 1}


def train(recipe, scenes, out, overrides=SHORT, **given):
    visavis.train(recipe, data=scenes, out=out, overrides=overrides, **given)
    return out


@pytest.fixture(scope="module")
def without(recipe, scenes, tmp_path_factory):
    """A run without feedback."""
    return train(recipe, scenes, tmp_path_factory.mktemp("runs") / "without")


@pytest.mark.parametrize(
    "records", [[], [judgment("a dog", "x.png", True), judgment("a dog", "x.png", None)]]
)
def test_feedback_without_judgments_is_rejected(records, recipe, scenes, tmp_path):
    file = write(tmp_path / "votes.jsonl", records)
    with pytest.raises(
        DataError,
        match=r"votes\.jsonl: expected relevance judgments, got none in force\. Collect .*, or train without --feedback\.$",
    ):
        train(recipe, scenes, tmp_path / "run", feedback=file)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_feedback_run_ignores_line_order_and_resumes_exactly(
    without, recipe, scenes, votes, outcome, in_pieces, command_line, tmp_path
):
    run, file = tmp_path / "run", write(tmp_path / "votes.jsonl", votes)
    changes = [f"{key}={value}" for key, value in SHORT.items()]
    code, out, err = command_line(
        "train", recipe, *changes, "--data", scenes, "--feedback", file, "--out", run, "--json"
    )
    assert code == 0, err
    assert json.loads(out)["positives_by"] == "ids and feedback"
    assert (
        json.loads(out)["supervision"]
        == f"FeedbackSupervision(unlabeled='ignore', slack=0.5) of {file}"
    )
    assert (
        "11 text queries with 15 relevant and 15 not relevant images of split train."
        in " ".join(err.split())
    )
    other = [
        judgment("a dog", votes[0].item, True),
        *reversed(votes),
        judgment("a dog", votes[0].item, None),
    ]
    in_pieces(
        recipe,
        tmp_path / "pieces",
        data=scenes,
        overrides=SHORT,
        feedback=write(tmp_path / "other.jsonl", other),
    )
    whole, pieces = outcome(run), outcome(tmp_path / "pieces")
    # It names the file, which differs.
    assert whole["result"].pop("supervision") != pieces["result"].pop("supervision")
    assert whole == pieces
    resolved = (run / "run.toml").read_text()
    assert f'feedback = "{file}"' in resolved
    assert "FeedbackSupervision(unlabeled='ignore', slack=0.5)" in resolved
    assert visavis.papers_diagnose(run).to_json()
    assert outcome(run)["model"] != outcome(without)["model"]


def test_train_command_reports_feedback_errors_in_one_line(recipe, scenes, command_line, tmp_path):
    for arguments, sentence in (
        (["--feedback", "none.jsonl"], "none.jsonl cannot be read: No such file or directory."),
        (["--feedback", ""], "--feedback: expected a path or name, got an empty text."),
        (
            ["--feedback", "a.jsonl", "data.feedback=b.jsonl"],
            "data.feedback is set twice: --feedback a.jsonl and data.feedback=b.jsonl",
        ),
    ):
        code, out, err = command_line(
            "train", recipe, "--data", scenes, "--out", tmp_path / "run", *arguments
        )
        assert (code, out) == (1, "")
        assert sentence in " ".join(err.split())
        assert "Traceback" not in err
    code, _, err = command_line("train", "--resume", tmp_path, "--feedback", "a.jsonl")
    assert code == 1
    assert "--resume: expected the run folder alone" in err
    assert not (tmp_path / "run").exists()


def test_resume_rejects_changed_feedback(stop_at, recipe, scenes, votes, tmp_path):
    file = write(tmp_path / "votes.jsonl", votes)
    with pytest.raises(visavis.training.stop_signals.Stopped):
        visavis.train(recipe, data=scenes, out=tmp_path / "run", feedback=file, progress=stop_at(3))
    more = [*votes, judgment("one more", votes[0].item, True)]
    write(file, more)
    with pytest.raises(
        RunError,
        match=r"run: feedback changed since the run began .*\. Restore it, or start a new run\.$",
    ):
        visavis.train(resume=tmp_path / "run")
    write(
        file,
        [
            *more,
            judgment("one more", votes[0].item, None),
            Preference(AT, QueryKey("a"), "one", "two", None),
        ],
    )
    visavis.train(resume=tmp_path / "run")
    file.unlink()
    assert (
        visavis.evaluate(tmp_path / "run").metrics["rsum"] > 0
    )  # what was learned does not need the file


@pytest.mark.slow
def test_feedback_query_features_are_computed(scenes, votes, tmp_path, monkeypatch):
    """Features of each text are read from the store of its number, for captions and judged
    sentences in one batch.
    """
    monkeypatch.setattr(
        caching, "has_native_bfloat16", lambda _: False
    )  # stores in full precision, whatever the processor has
    text = {"encoder": "minilm", "granularity": "pooled"}
    file = write(tmp_path / "votes.jsonl", votes)
    changes = {
        "data.path": str(scenes),
        "data.feedback": str(file),
        "text": text,
        "model": {"kind": "Heads", "embedding_dim": 16},
    }
    module, _ = prepare_training(read_recipe("demo", changes))
    assert module.query_features is not None
    train = module.loaders[0]
    assert train.extension is not None
    texts = [*train.extension.data.captions, *train.extension.unmatched_queries]
    index = np.array([len(texts) - 1, 0, len(train.data.captions) - 1, 5])
    read, computed = (
        train.text.read(index),
        module.processor.process_texts([texts[i] for i in index]),
    )
    assert torch.allclose(read.vectors, computed.vectors, atol=1e-3)
    assert torch.cdist(read.vectors, computed.vectors).argmin(1).tolist() == [0, 1, 2, 3]


def test_feedback_pairs_find_images_by_content(scenes, tmp_path):
    data = open_dataset(scenes)
    train_image, test_image = (
        next(image for image in data.images if image.split == split) for split in ("train", "test")
    )
    lines = [
        judgment("a red star", "moved/away.png", True, content=train_image.location.content_hash),
        judgment("a red star", "moved/too.png", True, content=test_image.location.content_hash),
        judgment("a red star", train_image.name, True, content="0" * 32),
    ]
    pairs = FeedbackPairs.from_records(lines, data)
    assert pairs.relevant.tolist() == [[0, 0]]
    assert sorted(pairs.skipped.values()) == [1, 1]


def test_feedback_pairs_use_later_judgment_of_one_image(scenes):
    data = open_dataset(scenes)
    image = data.images[0]
    old = judgment(
        "a red star",
        "old.png",
        True,
        content=image.location.content_hash,
        at="2026-01-01T00:00:00+00:00",
    )
    new = judgment(
        "a red star",
        image.name,
        False,
        content=image.location.content_hash,
        at="2026-02-01T00:00:00+00:00",
    )
    assert [
        len(part)
        for part in (
            FeedbackPairs.from_records([old, new], data).relevant,
            FeedbackPairs.from_records([new, old], data).not_relevant,
        )
    ] == [0, 1]


@pytest.mark.slow
def test_training_starts_from_model_of_run(
    without, recipe, scenes, votes, outcome, in_pieces, tmp_path
):
    given = {
        "feedback": write(tmp_path / "votes.jsonl", votes),
        "overrides": {**SHORT, "start_from": str(without)},
    }
    run = train(recipe, scenes, tmp_path / "run", **given)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    best = max(
        json.loads(line)["rsum"] for line in (without / "metrics.jsonl").read_text().splitlines()
    )
    assert first["rsum"] == pytest.approx(best)
    in_pieces(recipe, tmp_path / "pieces", data=scenes, **given)
    assert outcome(run) == outcome(tmp_path / "pieces")
    with pytest.raises(
        RecipeError,
        match=r"^start_from: .* expected shape .*, got shape .*\. Train with the recipe of that run, its run\.toml\.$",
    ):
        train(
            recipe,
            scenes,
            tmp_path / "no",
            overrides={"start_from": str(without), "model.embedding_dim": 8},
        )
    with pytest.raises(RecipeError, match=r"^start_from: expected a run folder.*, got nowhere"):
        train(recipe, scenes, tmp_path / "no", overrides={"start_from": "nowhere"})
    with pytest.raises(RecipeError, match=r"expected the same visual as in this recipe"):
        train(
            recipe,
            scenes,
            tmp_path / "no",
            overrides={"start_from": str(without), "visual.granularity": "pooled"},
        )
    assert not (tmp_path / "no").exists()


def test_training_rejects_feedback_without_pairs(recipe, scenes, tmp_path):
    other = write_synthetic_scenes(
        tmp_path / "scenes",
        num_train=3,
        num_val=0,
        num_test=0,
        captions_per_image=1,
        size=48,
        seed=7,
    )
    of_others = [
        judgment("a red star", image.name, True, content=image.location.content_hash)
        for image in open_dataset(other).images
    ]
    held_out = [
        judgment("a red star", image.name, True)
        for image in open_dataset(scenes).split("test").images
    ]
    for number, (lines, left_out) in enumerate(
        (
            (
                of_others,
                "3 of 3 judgments were skipped: 3 of images that are not in scenes or have changed",
            ),
            (held_out, "12 of 12 judgments were skipped: 12 of images of split test"),
        )
    ):
        with pytest.raises(
            DataError,
            match=f"expected judgments of text queries and training images of scenes, got none. {left_out}",
        ):
            train(
                recipe,
                scenes,
                tmp_path / "run",
                feedback=write(tmp_path / f"{number}.jsonl", lines),
            )
    with pytest.raises(DataError, match=r"votes\.jsonl"):
        train(recipe, scenes, tmp_path / "run", feedback=tmp_path / "votes.jsonl")
    with pytest.raises(RecipeError, match=r"^data\.feedback is set twice"):
        train(recipe, scenes, tmp_path / "run", feedback="a", overrides={"data.feedback": "b"})
    with pytest.raises(RecipeError, match=r"FeedbackSupervision: expected feedback, got none"):
        train(
            recipe,
            scenes,
            tmp_path / "run",
            overrides={"phases.0.supervision": "FeedbackSupervision()"},
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"dear diary",
        b"dear\ndiary\n",
        b'{"timestamp": 1}\n',
        b'{"timestamp": "", "index": "i"}\n',
        b"[]",
        b"\x80\n",
        b"\0" * 9,
    ],
)
def test_training_rejects_other_files_as_feedback(recipe, scenes, tmp_path, content):
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"^\S*mine\.txt[^\n]*\.$"):
        train(recipe, scenes, tmp_path / "run", feedback=tmp_path / "mine.txt")
    assert not (tmp_path / "run").exists()


def test_with_feedback_rejects_other_supervision(recipe):
    given = read_recipe(
        recipe,
        {"data.feedback": "votes.jsonl", "phases.1.supervision": "FeedbackSupervision(slack=2)"},
    )
    assert [phase.supervision for phase in with_feedback(given).phases] == [
        FeedbackSupervision(),
        FeedbackSupervision(slack=2.0),
    ]
    without = read_recipe(recipe, {})
    assert with_feedback(without) is without
    for other in ("PairSupervision(by='position')", "OfflineNegativeSupervision()"):
        with pytest.raises(
            RecipeError,
            match=r"^phases\.1\.supervision: .* does not support relevance judgments\. Set phases\.1\.supervision=",
        ):
            with_feedback(
                read_recipe(recipe, {"data.feedback": "votes.jsonl", "phases.1.supervision": other})
            )


names = st.sampled_from(["a", "b", "c", "d", "v", "t", "x", "a#t=0,4"])
lines_of_any_kind = st.lists(
    st.builds(
        lambda text, like, item, content, fits, at: judgment(
            text, item, fits, content=content, at=at, similar_to=like
        ),
        st.sampled_from(["a dog", "a cat", "", " ", "-a", "one", "a\u2028b", "x" * 30_000]),
        st.sampled_from(["", "", "", "b"]),
        names,
        st.sampled_from(["", "c0ffee"]),
        st.sampled_from([True, False, None]),
        st.sampled_from(["", "2026", "\x00"]),
    ),
    max_size=12,
)


@settings(max_examples=40)
@given(lines_of_any_kind, st.randoms(use_true_random=False), st.integers(0, 3))
def test_feedback_batches_match_judgments(lines, random, seed):
    pairs = FeedbackPairs.from_records(lines, toy())
    last = {(line.query, line.item): line for line in lines}
    shuffled = list(last.values())
    random.shuffle(shuffled)
    again = FeedbackPairs.from_records(shuffled, toy())
    assert (again.relevant.tolist(), again.not_relevant.tolist(), again.fingerprint) == (
        pairs.relevant.tolist(),
        pairs.not_relevant.tolist(),
        pairs.fingerprint,
    )
    in_force = [line for line in last.values() if line.relevant is not None]
    assert len(pairs) + sum(pairs.skipped.values()) == len(in_force)
    split = FeedbackSplit.from_pairs(toy().split("train"), pairs)
    captions = np.random.default_rng(seed).permutation(len(split.data.captions))[:3]
    images, texts = split.add_negatives(
        split.data.image_of[captions], captions, np.random.default_rng(seed)
    )
    assert images[: len(captions)].tolist() == split.data.image_of[captions].tolist()
    fits, wrong = split.batch_labels(images, texts)
    assert not (fits & wrong).any()
    names_, all_texts = (
        [image.name for image in split.data.images],
        [*split.data.captions, *split.unmatched_queries],
    )
    yes, no = (
        {
            (" ".join(line.query.text.split()), line.item)
            for line in in_force
            if line.relevant is relevant and not line.query.similar_to
        }
        for relevant in (True, False)
    )
    captioned = set(zip(toy().captions, [image.name for image in toy().images], strict=True))
    for row, image in enumerate(images):
        for column, text in enumerate(texts):
            pair = (all_texts[text], names_[image])
            if fits[row, column]:
                assert pair in yes | captioned
            if wrong[row, column]:
                assert pair in no
            if split.image_of[text] == image and split.query_of[text] >= 0:
                assert fits[row, column]


def test_targets_from_ids_and_pairs_agree():
    ids = PairSupervision()
    batch, targets = batch_of([], FeedbackSupervision(), [0.5, 0.9, 0.1, 0.7], [1.0] * 4, [0, 3])
    plain = ids.targets(batch.visual, batch.text, batch)
    assert torch.equal(targets.positive, plain.positive)
    rows, columns = plain.positive.nonzero().T
    assert torch.equal(Targets.from_pairs(rows, columns, 2, 2).positive, plain.positive)
