"""Judgements as facts of training: hand values of a batch, laws, resume, and files of every kind."""

import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import visavis
from visavis import cli
from visavis.data import open_dataset
from visavis.data.dataset import Dataset, Image
from visavis.data.judged import MET, JudgedPairs, JudgedSplit
from visavis.data.judgements import Asked, Judgement, Preference, open_judgements
from visavis.data.loader import Joined, Loader, Plan
from visavis.data.scenes import write_scenes
from visavis.errors import DataError, RecipeError, RunError
from visavis.models import caching
from visavis.objectives import CATALOG
from visavis.supervision import JudgedSupervision, PairSupervision
from visavis.supervision.judged import unknown
from visavis.targets import Targets
from visavis.training.data_module import prepare
from visavis.training.judgements import with_judgements
from visavis.training.recipe_files import read_recipe
from visavis.types import Encoded

AT = "2026-05-01T09:30:00.000+00:00"


def said(text, item, fits, *, content="", at=AT, **asked):
    return Judgement(at, "photos", Asked(text, **asked), item, content, fits)


def write(path, lines):
    with open_judgements(path) as file:
        for line in lines:
            file.add(line)
    return path


def toy():
    """Four training images a, b, c, d with a caption each (that of d: "a dog"), then one of each other split."""
    images = [Image(name, "train") for name in "abcd"] + [Image("v", "val"), Image("t", "test")]
    return Dataset("toy", tuple(images), ("one", "two", "three", "a dog", "five", "six"), np.arange(6))


VOTES = [
    said("a dog", "a", True),
    said("a dog", "b", False),
    said("a  dog ", "c", True),
    said("a cat", "b", False),
    said("a cat", "c", False),
    said("a boat", "a", True),
]
LEFT_OUT = [
    said("a dog", "v", True),
    said("a dog", "t", False),
    said("a dog -cat", "a", True),
    said("", "a", True, like="b"),
    said("a dog", "elsewhere.png", True),
    said("a dog", "a.mp4#t=0,4", True),
    said("a dog", "d", False),
]


def split_of(votes):
    return JudgedSplit.of(toy().split("train"), JudgedPairs.of(votes, toy()))


def test_pairs_and_what_is_left_out():
    pairs = JudgedPairs.of(VOTES + LEFT_OUT + [Preference(AT, Asked("a dog"), "one", "two", None)], toy())
    assert pairs.sentences == ("a boat", "a cat", "a dog")
    assert pairs.fits.tolist() == [[0, 0], [2, 0], [2, 2]]
    assert pairs.wrong.tolist() == [[1, 1], [1, 2], [2, 1]]
    assert str(pairs) == (
        "3 sentences with 3 images of split train that fit and 3 that do not; 7 of 13 judgements are left out: 1 of pictures of split val, "
        "1 of pictures of split test, 2 of queries that are no sentence (pictures, items, words with a minus), 1 of pictures that are not in toy, "
        "or not as they were judged, 1 of moments of clips, 1 against captions of the data set."
    )


def test_a_sentence_is_a_further_caption_of_each_image_that_it_fits():
    split = split_of(VOTES)
    assert split.data.captions == ("one", "two", "three", "a dog", "a boat", "a dog", "a dog")
    assert split.data.image_of.tolist() == [0, 1, 2, 3, 0, 0, 2]
    assert split.alone == ("a cat",)
    assert split.sentence_of.tolist() == [-1, -1, -1, 2, 0, 2, 2, 1]
    assert split.image_of.tolist() == [0, 1, 2, 3, 0, 0, 2, -1]
    fits, wrong = split.facts(np.array([0, 1, 2, 3]), np.array([0, 4, 5, 3, 7]))
    assert fits.tolist() == [[False, one, dog, dog, False] for one, dog in ((True, True), (False, False), (False, True), (False, True))]
    assert wrong.tolist() == [[False, False, dog, dog, cat] for dog, cat in ((False, False), (True, True), (False, True), (False, False))]


def test_what_does_not_fit_is_brought_into_the_batch():
    split, random = split_of(VOTES), np.random.default_rng(0)
    images, texts = split.meet(np.array([0, 3]), np.array([5, 3]), random)  # "a dog" brings b with "two", which brings "a cat"
    assert (images.tolist(), texts.tolist()) == ([0, 3, 1], [5, 3, 1, 7])
    images, texts = split.meet(np.array([0]), np.array([4]), random)  # nothing is against "a boat", nor against a
    assert (images.tolist(), texts.tolist()) == ([0], [4])
    many = [said("a dog", "a", True), *(said("a dog", name, False) for name in "bc"), *(said(f"cat {i}", "b", False) for i in range(20))]
    assert len(split_of(many).meet(np.array([0]), np.array([4]), random)[1]) == 1 + 2 + MET


def test_unknown_pairs_by_hand():
    scores = torch.tensor([[0.9, 0.2, 0.3], [0.6, 0.8, 0.1], [0.5, 0.4, 0.2], [0.0, 0.6, 0.4]])
    fits = torch.tensor([[0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]).bool()
    wrong = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]).bool()
    found = unknown(scores, fits, wrong, slack=0.0)
    assert found.int().tolist() == [[1, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 1]]
    deviation = scores[:, 0].std(correction=0).item()
    assert unknown(scores, fits, wrong, slack=1.01 * 0.1 / deviation).int().tolist()[2][0] == 1
    assert unknown(scores, fits, wrong, slack=0.99 * 0.1 / deviation).int().tolist()[2][0] == 0


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

        def read(self, index, generator=None):
            return Encoded(self.rows[torch.from_numpy(index)])

    loader = Loader(split.data, Numbers(visual), Numbers(text), Plan(batch_size=2), 0, split)
    batch = loader._read(split.data.image_of[captions], np.array(captions), 1, 0, training=False)
    supervision._context = type("Context", (), {"matcher": Identity(), "memory": None})
    return batch, supervision.targets(batch.visual, batch.text, batch)


def test_targets_of_a_batch_by_hand():
    """Texts "a dog" (of a), "a dog" (of d) and, brought, "two" (of b) and "a cat": a and d fit both dogs, b does not; of c nobody is asked."""
    visual, text = [0.5, 0.9, 0.1, 0.7], [1.0] * 8
    batch, targets = batch_of(VOTES, JudgedSupervision(slack=0.0), visual, text, [5, 3])
    assert (batch.images.tolist(), batch.captions.tolist()) == ([0, 3, 1], [5, 3, 1, 7])
    assert targets.positive.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]
    assert targets.pairwise("ignore").int().tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert targets.negative.int().tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 1]]
    _, targets = batch_of(VOTES, JudgedSupervision(unknown="wrong"), visual, text, [5, 3])
    assert targets.negative.int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1]]
    votes = [said("a boat", "a", True)]  # d scores higher than a, and may show a boat, too; b scores lower
    visual = [0.5, 0.1, 0.1, 0.7]
    _, targets = batch_of(votes, JudgedSupervision(slack=0.0), visual, text, [4, 3, 1])
    assert targets.pairwise("ignore").int().tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert targets.negative.int().tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("objective", CATALOG, ids=lambda kind: kind.__name__)
def test_a_batch_without_judged_texts_is_told_by_ids_alone_and_every_objective_takes_one_with_them(objective):
    _, targets = batch_of(VOTES, JudgedSupervision(), [0.5, 0.9, 0.1, 0.7], [1.0] * 8, [0])
    assert targets.relation is None
    assert targets.ignore is None
    _, targets = batch_of(VOTES, JudgedSupervision(), [0.5, 0.9, 0.1, 0.7], [1.0] * 8, [5, 3])
    if not set(objective().reads) & {"relevance", "weight", "query_margin", "query_offline_scores"}:
        scores = torch.linspace(-1, 1, targets.shape.numel(), dtype=torch.double).view(targets.shape).requires_grad_()
        loss = objective()(scores, targets)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(scores.grad).all()


def test_two_sources_are_read_as_one():
    class Ragged:
        def __init__(self, start):
            self.start = start

        def read(self, index, generator=None):
            longest = int(index.max()) + 1
            mask = torch.arange(longest) <= torch.from_numpy(index)[:, None]
            return Encoded((mask * (self.start + torch.from_numpy(index)[:, None] + 1.0))[..., None], mask)

    both = Joined(Ragged(0), Ragged(10), 3)
    for index in ([3, 0, 4, 2], [0, 1], [5, 3]):
        items = both.read(np.array(index))
        assert items.mask.sum(1).tolist() == [1 + (i if i < 3 else i - 3) for i in index]
        assert items.vectors[:, 0, 0].tolist() == [float(i + 1 if i < 3 else i - 3 + 11) for i in index]


# Of a whole training


@pytest.fixture(scope="module")
def votes(scenes, tmp_path_factory):
    """About training images: captions of others that fit, and do not; a sentence that nothing fits."""
    data = open_dataset(scenes).split("train")
    names = [image.name for image in data.images]
    lines = [said(f"{data.captions[3 * i]} again", names[i], True) for i in range(0, 20, 2)]
    lines += [said(f"{data.captions[3 * i]} again", names[i + 1], False) for i in range(0, 20, 2)]
    lines += [said(f"{data.captions[3 * i]} again", names[i + 21], True) for i in range(0, 20, 4)]
    lines += [said("nothing at all", name, False) for name in names[:5]]
    return lines


SHORT = {"phases.0.epochs": 1, "phases.1.epochs": 1}


def train(recipe, scenes, out, overrides=SHORT, **given):
    visavis.train(recipe, data=scenes, out=out, overrides=overrides, **given)
    return out


@pytest.fixture(scope="module")
def without(recipe, scenes, tmp_path_factory):
    """A run without judgements."""
    return train(recipe, scenes, tmp_path_factory.mktemp("runs") / "without")


def test_a_file_in_which_nothing_is_in_force_changes_no_bit(without, recipe, scenes, outcome, listener, tmp_path):
    file = write(tmp_path / "votes.jsonl", [said("a dog", "x.png", True), said("a dog", "x.png", None)])
    train(recipe, scenes, tmp_path / "run", judgements=file, progress=listener)
    found, expected = outcome(tmp_path / "run"), outcome(without)
    assert found["result"].pop("targets") == "ids and judgements"
    assert expected["result"].pop("targets") == "ids"
    assert found == expected
    assert f"{file}: no judgement is in force in it, and the training is as without it." in listener.said


@pytest.fixture
def command_line(monkeypatch, capfd, tmp_path):
    """``visavis ARGUMENTS``: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["visavis", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capfd.readouterr()

    return call


def test_neither_the_order_of_lines_nor_answers_taken_back_count_and_a_run_goes_on_exactly(
    without, recipe, scenes, votes, outcome, in_pieces, command_line, tmp_path
):
    run, file = tmp_path / "run", write(tmp_path / "votes.jsonl", votes)
    changes = [f"{key}={value}" for key, value in SHORT.items()]
    code, out, err = command_line("train", recipe, *changes, "--data", scenes, "--judgements", file, "--out", run, "--json")
    assert code == 0, err
    assert json.loads(out)["targets"] == "ids and judgements"
    assert "11 sentences with 15 images of split train that fit and 15 that do not." in " ".join(err.split())
    other = [said("a dog", votes[0].item, True), *reversed(votes), said("a dog", votes[0].item, None)]
    in_pieces(recipe, tmp_path / "pieces", data=scenes, overrides=SHORT, judgements=write(tmp_path / "other.jsonl", other))
    assert outcome(run) == outcome(tmp_path / "pieces")
    resolved = (run / "run.toml").read_text()
    assert f'judgements = "{file}"' in resolved
    assert "JudgedSupervision(unknown='ignore', slack=0.5)" in resolved
    assert visavis.diagnose(run).to_json()
    assert outcome(run)["model"] != outcome(without)["model"]


def test_the_command_line_refuses_in_one_sentence(recipe, scenes, command_line, tmp_path):
    for arguments, sentence in (
        (["--judgements", "none.jsonl"], "none.jsonl cannot be read: No such file or directory."),
        (["--judgements", ""], " is a folder, expected a regular file."),
        (["--judgements", "a.jsonl", "data.judgements=b.jsonl"], "the judgements are named twice, by --judgements a.jsonl and by"),
    ):
        code, out, err = command_line("train", recipe, "--data", scenes, "--out", tmp_path / "run", *arguments)
        assert (code, out) == (1, "")
        assert sentence in " ".join(err.split())
        assert "Traceback" not in err
    code, _, err = command_line("train", "--resume", tmp_path, "--judgements", "a.jsonl")
    assert code == 1
    assert "a resumed run keeps its recipe" in err
    assert not (tmp_path / "run").exists()


def test_a_run_refuses_other_judgements_than_it_began_with(stop_at, recipe, scenes, votes, tmp_path):
    file = write(tmp_path / "votes.jsonl", votes)
    with pytest.raises(visavis.training.stopping.Stopped):
        visavis.train(recipe, data=scenes, out=tmp_path / "run", judgements=file, progress=stop_at(3))
    write(file, [said("one more", votes[0].item, True)])
    with pytest.raises(
        RunError, match=r"^the judgements changed since .*run began .*: start a new run, or bring back what was read then\.$"
    ):
        visavis.train(resume=tmp_path / "run")
    write(file, [said("one more", votes[0].item, None), Preference(AT, Asked("a"), "one", "two", None)])
    visavis.train(resume=tmp_path / "run")
    file.unlink()
    assert visavis.evaluate(tmp_path / "run").metrics["rsum"] > 0  # what was learned does not need the file


def test_features_of_sentences_are_computed_where_captions_have_them(scenes, votes, towers, tmp_path, monkeypatch):
    """Each sentence stands in the store that its number says, for captions and judged sentences in one batch."""
    monkeypatch.setattr(caching, "multiplies_bfloat16", lambda _: False)  # stores in full precision, whatever the processor has
    text = {"tower": str(towers / "bert"), "view": "pooled"}
    file = write(tmp_path / "votes.jsonl", votes)
    changes = {"data.path": str(scenes), "data.judgements": str(file), "text": text, "model": {"kind": "Heads", "width": 16}}
    module, _ = prepare(read_recipe("demo", changes))
    assert module.sentences is not None
    train = module.train
    assert train.judged is not None
    texts = [*train.judged.data.captions, *train.judged.alone]
    index = np.array([len(texts) - 1, 0, len(train.data.captions) - 1, 5])
    read, computed = train.text.read(index), module.processor.texts([texts[i] for i in index])
    assert torch.allclose(read.vectors, computed.vectors, atol=1e-3)
    assert torch.cdist(read.vectors, computed.vectors).argmin(1).tolist() == [0, 1, 2, 3]


def test_judged_pictures_are_found_by_content_and_held_out_ones_are_not_trained_on(scenes, tmp_path):
    data = open_dataset(scenes)
    train_image, test_image = (next(image for image in data.images if image.split == split) for split in ("train", "test"))
    lines = [
        said("a red star", "moved/away.png", True, content=train_image.bytes.content),
        said("a red star", "moved/too.png", True, content=test_image.bytes.content),
        said("a red star", train_image.name, True, content="0" * 32),
    ]
    pairs = JudgedPairs.of(lines, data)
    assert pairs.fits.tolist() == [[0, 0]]
    assert sorted(pairs.left_out.values()) == [1, 1]


def test_of_two_names_of_one_picture_the_later_answer_counts(scenes):
    data = open_dataset(scenes)
    image = data.images[0]
    old = said("a red star", "old.png", True, content=image.bytes.content, at="2026-01-01T00:00:00+00:00")
    new = said("a red star", image.name, False, content=image.bytes.content, at="2026-02-01T00:00:00+00:00")
    assert [len(part) for part in (JudgedPairs.of([old, new], data).fits, JudgedPairs.of([new, old], data).wrong)] == [0, 1]


def test_a_training_goes_on_from_the_model_of_a_run(without, recipe, scenes, votes, outcome, in_pieces, tmp_path):
    given = {"judgements": write(tmp_path / "votes.jsonl", votes), "overrides": {**SHORT, "start_from": str(without)}}
    run = train(recipe, scenes, tmp_path / "run", **given)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    best = max(json.loads(line)["rsum"] for line in (without / "metrics.jsonl").read_text().splitlines())
    assert first["rsum"] == pytest.approx(best)
    in_pieces(recipe, tmp_path / "pieces", data=scenes, **given)
    assert outcome(run) == outcome(tmp_path / "pieces")
    with pytest.raises(
        RecipeError, match=r"^start_from: the model of .* has .* of shape .*: train by the recipe of that run, its run\.toml\.$"
    ):
        train(recipe, scenes, tmp_path / "no", overrides={"start_from": str(without), "model.width": 8})
    with pytest.raises(RecipeError, match=r"^start_from is nowhere, expected a run folder"):
        train(recipe, scenes, tmp_path / "no", overrides={"start_from": "nowhere"})
    with pytest.raises(RecipeError, match=r"reads its visual otherwise"):
        train(recipe, scenes, tmp_path / "no", overrides={"start_from": str(without), "visual.view": "pooled"})
    assert not (tmp_path / "no").exists()


def test_files_that_teach_nothing_are_one_sentence(recipe, scenes, tmp_path):
    other = write_scenes(tmp_path / "scenes", num_train=3, num_val=0, num_test=0, captions_per_image=1, size=48, seed=7)
    of_others = [said("a red star", image.name, True, content=image.bytes.content) for image in open_dataset(other).images]
    held_out = [said("a red star", image.name, True) for image in open_dataset(scenes).split("test").images]
    for number, (lines, left_out) in enumerate(
        (
            (of_others, "3 of 3 judgements are left out: 3 of pictures that are not in scenes, or not as they were judged"),
            (held_out, "12 of 12 judgements are left out: 12 of pictures of split test"),
        )
    ):
        with pytest.raises(DataError, match=f"holds no judgement of a sentence and a training picture of scenes: {left_out}"):
            train(recipe, scenes, tmp_path / "run", judgements=write(tmp_path / f"{number}.jsonl", lines))
    with pytest.raises(DataError, match=r"votes\.jsonl"):
        train(recipe, scenes, tmp_path / "run", judgements=tmp_path / "votes.jsonl")
    with pytest.raises(RecipeError, match=r"^the judgements are named twice"):
        train(recipe, scenes, tmp_path / "run", judgements="a", overrides={"data.judgements": "b"})
    with pytest.raises(RecipeError, match=r"^JudgedSupervision has nothing to tell"):
        train(recipe, scenes, tmp_path / "run", overrides={"phases.0.supervision": "JudgedSupervision()"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content", [b"dear diary", b"dear\ndiary\n", b'{"at": 1}\n', b'{"at": "", "index": "i"}\n', b"[]", b"\x80\n", b"\0" * 9]
)
def test_a_file_of_another_kind_is_one_sentence(recipe, scenes, tmp_path, content):
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"^\S*mine\.txt[^\n]*\.$"):
        train(recipe, scenes, tmp_path / "run", judgements=tmp_path / "mine.txt")
    assert not (tmp_path / "run").exists()


def test_phases_that_are_told_otherwise_are_refused(recipe):
    told = read_recipe(recipe, {"data.judgements": "votes.jsonl", "phases.1.supervision": "JudgedSupervision(slack=2)"})
    assert [phase.supervision for phase in with_judgements(told).phases] == [repr(JudgedSupervision()), repr(JudgedSupervision(slack=2.0))]
    without = read_recipe(recipe, {})
    assert with_judgements(without) is without
    for other in ("PairSupervision(by='position')", "BankSupervision()"):
        with pytest.raises(RecipeError, match=r"^phase 1 is told who belongs together by .*: set phases\.1\.supervision="):
            with_judgements(read_recipe(recipe, {"data.judgements": "votes.jsonl", "phases.1.supervision": other}))


names = st.sampled_from(["a", "b", "c", "d", "v", "t", "x", "a#t=0,4"])
lines_of_any_kind = st.lists(
    st.builds(
        lambda text, like, item, content, fits, at: said(text, item, fits, content=content, at=at, like=like),
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
def test_whatever_was_said_every_batch_has_its_truth(lines, random, seed):
    pairs = JudgedPairs.of(lines, toy())
    last = {(line.query, line.item): line for line in lines}
    shuffled = list(last.values())
    random.shuffle(shuffled)
    again = JudgedPairs.of(shuffled, toy())
    assert (again.fits.tolist(), again.wrong.tolist(), again.fingerprint) == (pairs.fits.tolist(), pairs.wrong.tolist(), pairs.fingerprint)
    in_force = [line for line in last.values() if line.fits is not None]
    assert len(pairs) + sum(pairs.left_out.values()) == len(in_force)
    split = JudgedSplit.of(toy().split("train"), pairs)
    captions = np.random.default_rng(seed).permutation(len(split.data.captions))[:3]
    images, texts = split.meet(split.data.image_of[captions], captions, np.random.default_rng(seed))
    assert images[: len(captions)].tolist() == split.data.image_of[captions].tolist()
    fits, wrong = split.facts(images, texts)
    assert not (fits & wrong).any()
    names_, all_texts = [image.name for image in split.data.images], [*split.data.captions, *split.alone]
    yes, no = (
        {(" ".join(line.query.text.split()), line.item) for line in in_force if line.fits is wanted and not line.query.like}
        for wanted in (True, False)
    )
    captioned = set(zip(toy().captions, [image.name for image in toy().images], strict=True))
    for row, image in enumerate(images):
        for column, text in enumerate(texts):
            pair = (all_texts[text], names_[image])
            if fits[row, column]:
                assert pair in yes | captioned
            if wrong[row, column]:
                assert pair in no
            if split.image_of[text] == image and split.sentence_of[text] >= 0:
                assert fits[row, column]


def test_ids_and_relation_agree_where_both_can_say_it():
    ids = PairSupervision()
    batch, targets = batch_of([], JudgedSupervision(), [0.5, 0.9, 0.1, 0.7], [1.0] * 4, [0, 3])
    plain = ids.targets(batch.visual, batch.text, batch)
    assert torch.equal(targets.positive, plain.positive)
    rows, columns = plain.positive.nonzero().T
    assert torch.equal(Targets.from_pairs(rows, columns, 2, 2).positive, plain.positive)
