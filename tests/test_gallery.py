"""Galleries with candidates that are not queries, and equal texts as positives."""

from __future__ import annotations

import json

import ir_measures
import numpy as np
import pytest
import torch
from ir_measures import Success
from PIL import Image
from typer.testing import CliRunner

import visavis
from visavis import cli
from visavis.core.encoded import Encoded, append_items, collect_batches
from visavis.core.errors import DataError, RecipeError, ShapeError, SpecError
from visavis.core.progress import NoProgress
from visavis.data.dataset_reader import open_dataset
from visavis.data.equal_texts import text_keys
from visavis.data.loader import Batch, BatchSchedule
from visavis.evaluation import Protocol, evaluate, rank_scores
from visavis.evaluation.protocols import get_protocol
from visavis.evaluation.tiled_ranking import rank_by_tiles
from visavis.losses.targets import Targets
from visavis.training.supervision import PairSupervision

from .fixtures.recipes import write_recipe
from .matching import mentions

SEEDS = pytest.mark.parametrize("seed", range(6))


def naive_ranks(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Rank of the best positive of each row that has one: ties count against it."""
    ranks = []
    for row, is_positive in zip(scores, positive, strict=True):
        if is_positive.any():
            best = row[is_positive].max()
            ranks.append(1 + int((row[~is_positive] >= best).sum()))
    return np.array(ranks)


def world(seed: int, unpaired: tuple[int, int] = (7, 5)):
    """Scores with many ties, ids with -1, and captions with repeated texts, in a random order."""
    random = np.random.default_rng(seed)
    images, per_image = int(random.integers(3, 12)), int(random.integers(1, 4))
    image_ids = np.concatenate([np.arange(images), np.full(unpaired[0], -1)])
    text_ids = np.concatenate([np.arange(images).repeat(per_image), np.full(unpaired[1], -1)])
    image_ids, text_ids = random.permutation(image_ids), random.permutation(text_ids)
    scores = random.integers(0, 9, (len(image_ids), len(text_ids))).astype(np.float32)
    texts = [f"Text {random.integers(6)}" for _ in text_ids]
    return scores, image_ids, text_ids, texts


def positives(image_ids, text_ids, texts=None) -> np.ndarray:
    own = (image_ids[:, None] == text_ids) & (image_ids[:, None] >= 0)
    if texts is None:
        return own
    equal = np.array(texts)[:, None] == np.array(texts)
    return (own.astype(int) @ equal.astype(int)) > 0


def check_ranks(result, scores, positive) -> None:
    image_ranks, text_ranks = naive_ranks(scores, positive), naive_ranks(scores.T, positive.T)
    assert result.image_ranks.tolist() == image_ranks.tolist()
    assert result.text_ranks.tolist() == text_ranks.tolist()
    rsum = sum(100 * (ranks <= k).mean() for ranks in (image_ranks, text_ranks) for k in (1, 5, 10))
    assert result.metrics["rsum"] == pytest.approx(rsum)


@SEEDS
def test_unpaired_items_are_candidates_only(seed):
    scores, image_ids, text_ids, _ = world(seed)
    result = rank_scores(torch.from_numpy(scores), image_ids, text_ids)
    check_ranks(result, scores, positives(image_ids, text_ids))
    assert result.protocol == "plain + 7 images without captions + 5 texts without images"
    assert (result.num_images, result.num_texts) == scores.shape
    assert result.image_ids.tolist() == image_ids[image_ids >= 0].tolist()
    assert result.text_ids.tolist() == text_ids[text_ids >= 0].tolist()
    assert result.captions_per_image == len(result.text_ranks) / len(result.image_ranks)
    rows = np.flatnonzero(image_ids >= 0)
    assert scores[rows, result.top_texts].tolist() == scores[rows].max(1).tolist()


@SEEDS
@pytest.mark.parametrize("tile", [(3, 5), (50, 50)])
def test_tiles_do_not_change_ranks_of_a_gallery(seed, tile):
    scores, image_ids, text_ids, texts = world(seed)
    relation = torch.from_numpy(np.argwhere(positives(image_ids, text_ids, texts)))
    targets = Targets.from_pairs(*relation.T, *scores.shape)
    items = [Encoded(torch.arange(length)) for length in scores.shape]
    by_images, by_texts = rank_by_tiles(
        *items,
        lambda visual, text: torch.from_numpy(scores)[visual.vectors][:, text.vectors],
        torch.from_numpy(image_ids),
        torch.from_numpy(text_ids),
        targets=targets,
        max_tile=tile,
    )
    positive = positives(image_ids, text_ids, texts)
    assert by_images.positive_ranks[:, 0].tolist() == naive_ranks(scores, positive).tolist()
    assert by_texts.positive_ranks[:, 0].tolist() == naive_ranks(scores.T, positive.T).tolist()
    assert by_images.queries.tolist() == np.flatnonzero(positive.any(1)).tolist()


@SEEDS
@pytest.mark.parametrize("unpaired", [(0, 0), (4, 3)])
def test_equal_texts_are_positives(seed, unpaired):
    scores, image_ids, text_ids, texts = world(seed, unpaired)
    result = rank_scores(
        torch.from_numpy(scores),
        image_ids,
        text_ids,
        keys=text_keys(texts),
        protocol="plain+equal-texts",
    )
    check_ranks(result, scores, positives(image_ids, text_ids, texts))
    assert result.protocol.startswith("plain+equal-texts")


@SEEDS
@pytest.mark.parametrize("protocol", ["plain", "plain+equal-texts"])
def test_order_of_items_does_not_change_a_gallery(seed, protocol):
    scores, image_ids, text_ids, texts = world(seed)
    random = np.random.default_rng(seed)
    rows, columns = (random.permutation(size) for size in scores.shape)

    def metrics(rows, columns):
        keys = text_keys([texts[i] for i in columns])
        matrix = torch.from_numpy(scores[rows][:, columns])
        result = rank_scores(
            matrix, image_ids[rows], text_ids[columns], keys=keys, protocol=protocol
        )
        return result.metrics

    straight = metrics(np.arange(len(rows)), np.arange(len(columns)))
    assert metrics(rows, columns) == pytest.approx(straight)


@SEEDS
def test_equal_texts_change_nothing_without_duplicates(seed):
    scores, image_ids, text_ids, _ = world(seed)
    both = [
        rank_scores(
            torch.from_numpy(scores),
            image_ids,
            text_ids,
            keys=torch.randperm(len(text_ids)),
            protocol=name,
        )
        for name in ("plain", "plain+equal-texts")
    ]
    assert both[0].metrics == both[1].metrics
    assert both[0].text_ranks.tolist() == both[1].text_ranks.tolist()


def test_text_keys_ignore_case_space_and_composition():
    texts = ["A  dog\n", "a dog", "caf\u00e9", "cafe\u0301 ", "a dog.", ""]
    assert text_keys(texts).tolist() == [0, 0, 1, 1, 2, 3]


def test_name_of_a_gallery_gives_its_protocol():
    for name in ("plain", "plain+equal-texts", "flickr8k+equal-texts"):
        protocol = get_protocol(name)
        assert protocol.name == name
        assert get_protocol(protocol.describe(7000, 3)) == protocol
    assert get_protocol("plain").takes_unpaired
    assert not any(get_protocol(name).takes_unpaired for name in ("flickr8k", "coco-1k-5fold"))
    with pytest.raises(SpecError, match=mentions("plane+equal-texts", "plain")):
        get_protocol("plane+equal-texts")
    with pytest.raises(SpecError, match=mentions("cxc+equal-texts", "lists its positives")):
        get_protocol("cxc+equal-texts")


def test_gallery_rejects_wrong_ids():
    scores = torch.eye(3)
    with pytest.raises(SpecError, match=mentions("folds", "without a partner", "plain")):
        rank_scores(
            scores,
            [0, 1, -1],
            [0, 1, 1],
            protocol=Protocol(name="folds", description="", folds=3),
        )
    with pytest.raises(ShapeError, match=mentions("image 2", "-1")):
        rank_scores(scores, [0, 1, 2], [0, 1, -1])
    with pytest.raises(ShapeError, match=mentions("nothing to rank")):
        rank_scores(scores, [-1] * 3, [-1] * 3)
    with pytest.raises(ShapeError, match=mentions("keys", "equal texts", "none for 3")):
        rank_scores(scores, range(3), range(3), protocol="plain+equal-texts")


def test_appended_items_keep_their_padding():
    def words(count, length):
        vectors = torch.rand(count, length, 2)
        return Encoded(vectors, torch.ones(count, length, dtype=torch.bool))

    parts = [words(2, 3), words(1, 5), words(2, 4)]
    joined = append_items(collect_batches(parts[:2]), parts[2])
    assert [joined[[item]].vectors.shape[1] for item in (0, 2, 3)] == [3, 5, 4]
    assert torch.equal(joined[4:].vectors[0], parts[2].vectors[1])
    assert type(append_items(parts[0], parts[0])) is not type(joined)


@pytest.fixture
def distractors(tmp_path, few_scenes):
    """Five new images, a copy of an image of the test split, and a list of two texts."""
    random, folder = np.random.default_rng(0), tmp_path / "others"
    folder.mkdir()
    for number in range(5):
        pixels = random.integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    copied = open_dataset(few_scenes).split("test").images[2]
    (folder / "copy.png").write_bytes(copied.read())
    (tmp_path / "texts.txt").write_text("a green star\n\n  two blue circles \n")
    return folder, tmp_path / "texts.txt"


def gallery_scores(model, split, images, texts) -> np.ndarray:
    visual = model.encode_images([image.open() for image in split.images] + images)
    return (visual @ model.encode_texts([*split.captions, *texts]).T).numpy()


def test_distractors_equal_a_handmade_matrix(dual_encoders, few_scenes, distractors, tmp_path):
    folder, texts = distractors
    result = visavis.evaluate(
        dual_encoders / "clip", data=few_scenes, distractors=[folder, texts], trec=tmp_path / "trec"
    )
    split = open_dataset(few_scenes).split("test")
    images = [Image.open(folder / f"{number}.png") for number in range(5)]
    scores = gallery_scores(
        visavis.load(dual_encoders / "clip"), split, images, ["a green star", "two blue circles"]
    )
    positive = np.zeros(scores.shape, bool)
    positive[split.image_of, np.arange(16)] = True
    check_ranks(result, scores, positive)
    assert result.protocol == "plain + 5 images without captions + 2 texts without images"
    for direction in ("i2t", "t2i"):
        qrels = ir_measures.read_trec_qrels(str(tmp_path / "trec" / f"{direction}.qrels"))
        run = ir_measures.read_trec_run(str(tmp_path / "trec" / f"clip.{direction}.run"))
        found = ir_measures.calc_aggregate([Success @ 1, Success @ 5], qrels, run)
        for k in (1, 5):
            expected = result.metrics[f"{direction}_r{k}"]
            assert 100 * found[Success @ k] == pytest.approx(expected)


def test_distractors_of_the_same_data_leave_the_split_out(dual_encoders, few_scenes):
    result = visavis.evaluate(dual_encoders / "clip", data=few_scenes, distractors=few_scenes)
    data = open_dataset(few_scenes)
    split, others = data.split("test"), [*data.split("train").images, *data.split("val").images]
    scores = gallery_scores(
        visavis.load(dual_encoders / "clip"), split, [image.open() for image in others], []
    )
    positive = np.zeros(scores.shape, bool)
    positive[split.image_of, np.arange(16)] = True
    check_ranks(result, scores, positive)
    assert result.protocol == "plain + 16 images without captions"


def test_distractors_leave_own_texts_out(dual_encoders, few_scenes, tmp_path, monkeypatch):
    captions = open_dataset(few_scenes).split("test").captions
    spellings = [text.upper().replace(" ", "  ") for text in captions]
    (tmp_path / "texts.txt").write_text("\n".join([*captions, *spellings, "un cafe\u0301"]))
    (tmp_path / "again.txt").write_text("Un caf\u00e9")
    messages = []
    monkeypatch.setattr(NoProgress, "message", lambda _, text: messages.append(text))
    result = visavis.evaluate(
        dual_encoders / "clip",
        data=few_scenes,
        distractors=[tmp_path / "texts.txt", tmp_path / "again.txt"],
    )
    assert result.protocol == "plain + 1 text without images"
    left_out = [message for message in messages if "left out" in message]
    assert left_out == [
        f"{tmp_path}/texts.txt: left out {2 * len(captions)} texts that the split has, too",
        f"{tmp_path}/again.txt: left out 1 texts that the split has, too",
    ]


def test_distractors_require_an_open_protocol(dual_encoders, few_scenes, distractors, tmp_path):
    with pytest.raises(SpecError, match=mentions("--distractors", "flickr8k", "plain")):
        visavis.evaluate(
            dual_encoders / "clip", data=few_scenes, protocol="flickr8k", distractors=distractors[0]
        )
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match=mentions("empty.txt", "one text per line")):
        visavis.evaluate(
            dual_encoders / "clip", data=few_scenes, distractors=tmp_path / "empty.txt"
        )


@pytest.fixture
def with_uncaptioned(few_scenes, tmp_path, distractors):
    """The scenes with five images of the test split that have no caption."""
    data = open_dataset(few_scenes)
    rows = []
    for image, captions in zip(data.images, data.captions_of, strict=True):
        image.open().save(tmp_path / "others" / f"{len(rows)}-scene.png")
        texts = [data.captions[i] for i in captions]
        rows.append(
            {"filename": f"others/{len(rows)}-scene.png", "split": image.split, "captions": texts}
        )
    rows[1]["captions"] = []
    assert rows[1]["split"] == "train"
    rows += [
        {"filename": f"others/{number}.png", "split": "test", "captions": []} for number in range(5)
    ]
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


BY_TEXTS = {"objective": "TripletHN()", "supervision": "PairSupervision(by='texts')"}


def test_training_tests_with_uncaptioned_images(with_uncaptioned, tmp_path):
    write_recipe(tmp_path / "tiny.toml", BY_TEXTS)
    arguments = ["train", str(tmp_path / "tiny.toml"), "--data", str(with_uncaptioned)]
    printed = CliRunner().invoke(cli.app, [*arguments, "--out", str(tmp_path / "run")])
    assert printed.exit_code == 0, printed.output
    assert "6 images without captions are not trained on" in " ".join(printed.stderr.split())
    protocol = "plain + 5 images without captions"
    assert "protocol plain + 5 images" in " ".join(printed.stdout.split())
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (stored["protocol"], stored["num_images"], stored["image_queries"]) == (protocol, 13, 8)
    again = visavis.evaluate(tmp_path / "run")
    assert again.metrics["rsum"] == pytest.approx(stored["rsum"])
    plain = visavis.evaluate(tmp_path / "run", data=with_uncaptioned, distractors=tmp_path)
    # Added: twelve images of train, one of which has no caption, four of val, and a file with the
    # pixels of a test image in other bytes.
    assert plain.protocol == "plain + 22 images without captions"
    assert (plain.text_ranks >= again.text_ranks).all()


class _Loader:
    def __init__(self, data):
        self.data = data


@SEEDS
def test_supervision_by_texts_equals_its_definition(seed, tmp_path):
    random = np.random.default_rng(seed)
    rows = [
        {
            "filename": f"{i}.png",
            "split": "train",
            "captions": [f"Text {n}" for n in random.integers(0, 12, 2)],
        }
        for i in range(10)
    ]
    for row in rows:
        Image.new("RGB", (8, 8)).save(tmp_path / row["filename"])
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_dataset(tmp_path).split("train")
    for images, captions in BatchSchedule(batch_size=6).batches(data, seed, 0):
        batch = Batch(
            images, captions, torch.from_numpy(images), torch.from_numpy(data.image_of[captions]),
            Encoded(torch.zeros(len(images), 1)), Encoded(torch.zeros(len(captions), 1)),
            0, 0, _Loader(data), images, captions,
        )  # fmt: skip
        targets = PairSupervision(by="texts").targets(batch.visual, batch.text, batch)
        expected = [
            [data.captions[c] in {data.captions[o] for o in data.captions_of[i]} for c in captions]
            for i in images
        ]
        assert targets.positive.tolist() == expected
        by_ids = PairSupervision().targets(batch.visual, batch.text, batch)
        assert bool((targets.positive >= by_ids.positive).all())


def test_supervision_by_texts_rejects_several_processes():
    assert PairSupervision(by="texts").one_process_only
    assert not PairSupervision().one_process_only
    assert repr(PairSupervision()) == "PairSupervision(by='ids')"
    with pytest.raises((SpecError, RecipeError)):
        PairSupervision(by="text")


def test_evaluate_accepts_a_gallery_of_vectors():
    visual, text = torch.eye(4), torch.eye(4)[:3]
    result = evaluate(
        Encoded(visual),
        Encoded(text),
        lambda one, other: one.vectors @ other.vectors.T,
        [0, 1, 2, -1],
        range(3),
    )
    assert result.metrics["rsum"] == 600
    assert result.protocol == "plain + 1 image without captions"


@pytest.mark.slow
def test_comparison_states_its_gallery(with_uncaptioned, tmp_path):
    write_recipe(tmp_path / "tiny.toml", BY_TEXTS)
    compared = visavis.compare(
        tmp_path / "tiny.toml",
        data=with_uncaptioned,
        objective=["TripletHN()", "VLC()"],
        seeds=2,
        out=tmp_path / "comparison",
    )
    protocol = "plain + 5 images without captions"
    assert compared.results.conditions.protocol == protocol
    assert compared.image_bootstrap.num_units == 8
    assert f"protocol {protocol}: 13 images" in (compared.folder / "report.html").read_text()
    for setting in compared.settings:
        visavis.evaluate(compared.runs(setting)[0].folder, trec=tmp_path / "trec")
    paths = list((tmp_path / "trec").glob("*.t2i.run"))
    assert len(paths) == 2
    for path in paths:
        [stored] = (compared.folder / "runs").rglob(f"{path.name.split('.')[0]}/result.json")
        found = ir_measures.calc_aggregate(
            [Success @ 1],
            ir_measures.read_trec_qrels(str(path.parent / "t2i.qrels")),
            ir_measures.read_trec_run(str(path)),
        )
        expected = json.loads(stored.read_text())["t2i_r1"]
        assert 100 * found[Success @ 1] == pytest.approx(expected)
