"""Mined hard negatives: plain loops as a reference, laws of batches, the false-negative filter,
exact resume and errors.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.recipes import write_recipe
from torch.nn.functional import pad

import visavis
from visavis.cli.console import print_result
from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RecipeError, RefusedOverwrite, RunError, StorageError
from visavis.core.progress import NoProgress
from visavis.data.dataset import Dataset
from visavis.data.image_file import Image
from visavis.data.loader import BatchSchedule, Loader
from visavis.models.batch_encoding import evaluation_mode
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.stop_signals import Stopped
from visavis.training.supervision import MinedNegativeSupervision
from visavis.training.supervision.mined_negatives import MinedBatches, MinedNegatives

SHORT = {"phases.0.epochs": 1, "phases.1.epochs": 1}


@pytest.fixture(scope="module")
def run(scenes, recipe, tmp_path_factory):
    return visavis.train(
        recipe, data=scenes, out=tmp_path_factory.mktemp("mined") / "run", overrides=SHORT
    ).run


def train_split(folder, data=None):
    data_module, matcher = open_run(folder, read_run_recipe(folder, data), NoProgress())
    split = data_module.data.split("train")
    visual, text = data_module.encode(matcher, split)
    with evaluation_mode(matcher), torch.no_grad():
        return split, matcher.score(visual, text)


ROUNDING = 1e-5
"""Relative difference of a score that is computed in blocks, and of one in a matrix."""


def reference(scores, guide_scores, is_positive, size, max_ratio, rounding=0.0):
    """Negatives of each row by plain loops. ``rounding`` moves the bound of the false negatives."""
    rows = []
    for row, judge, positive in zip(
        scores.tolist(), guide_scores.tolist(), is_positive.tolist(), strict=True
    ):
        own = [value for value, is_own in zip(judge, positive, strict=True) if is_own]
        mean = sum(own) / len(own)
        bound = mean - (1 - max_ratio) * abs(mean) if max_ratio else float("inf")
        bound += rounding * abs(bound) if max_ratio else 0
        allowed = [i for i, is_own in enumerate(positive) if not is_own and judge[i] <= bound]
        best = sorted(allowed, key=lambda i: -row[i])[:size]
        rows.append(best + [-1] * (size - len(best)))
    # Lists are as wide as the longest, and at least 1 wide.
    return torch.tensor(rows)[:, : max(1, *(sum(index >= 0 for index in row) for row in rows))]


@pytest.mark.parametrize(
    ("max_ratio", "guided"), [(0.0, False), (0.95, False), (0.5, False), (0.9, True)]
)
def test_mined_negatives_match_plain_loops(run, scenes, stopped_run, tmp_path, max_ratio, guided):
    guide = stopped_run if guided else None
    report = visavis.data_mine(
        run,
        num_negatives=7,
        max_ratio=max_ratio,
        guide=guide,
        out=tmp_path / "n.safetensors",
        memory="4MiB",
    )
    split, scores = train_split(run)
    guide_scores = train_split(guide)[1] if guided else scores
    mined = MinedNegatives.read(report.file, split)
    own = torch.arange(len(split.images))[:, None] == torch.from_numpy(split.image_of)
    for found, kept, matrix, guide_matrix, is_own in (
        (mined.negative_captions, mined.caption_scores, scores, guide_scores, own),
        (mined.negative_images, mined.image_scores, scores.T, guide_scores.T, own.T),
    ):
        assert (kept > -torch.inf).equal(found >= 0)
        kept = pad(kept, (0, 7 - kept.shape[1]), value=-torch.inf)
        is_right = torch.zeros(len(found), dtype=torch.bool)
        # The rounding of a kernel decides about a candidate at the bound.
        for rounding in (-ROUNDING, 0.0, ROUNDING):
            expected = reference(matrix, guide_matrix, is_own, 7, max_ratio, rounding)
            values = torch.where(expected >= 0, matrix.gather(1, expected.clamp(min=0)), -torch.inf)
            values = pad(values, (0, 7 - values.shape[1]), value=-torch.inf)
            # Equal scores may be listed in another order.
            is_right |= torch.isclose(kept, values, rtol=ROUNDING, atol=1e-6).all(1)
        assert is_right.all(), is_right.logical_not().nonzero()
    counts = [
        (index >= 0).sum(1).double().mean().item()
        for index in (mined.negative_captions, mined.negative_images)
    ]
    assert [each.negatives for each in report.directions] == pytest.approx(counts)
    assert all((each.dropped == 0) == (max_ratio == 0) for each in report.directions)


def test_mining_prints_numbers_and_examples(run, command_line, tmp_path):
    code, out, err = command_line(
        "data", "mine", run, "--num-negatives", 3, "--out", tmp_path / "n.safetensors"
    )
    assert code == 0, err
    assert f"MinedNegativeSupervision(file='{tmp_path / 'n.safetensors'}')" in out.replace("\n", "")
    code, out, err = command_line("data", "mine", run, "--max-ratio", 0, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["file"] == str(run / "negatives-1.safetensors")
    assert {each["direction"]: each["queries"] for each in report["directions"]} == {
        "i2t": 60,
        "t2i": 180,
    }
    assert len(report["examples"]) == 5


@pytest.mark.slow
def test_preselection_of_all_candidates_is_exact(scenes, tmp_path):
    recipe = write_recipe(
        tmp_path / "scan.toml",
        {"objective": "Triplet()"},
        visual={"granularity": "regions"},
        model={"kind": "SCAN", "embedding_dim": 16, "word_dim": 8},
        training={"batch_size": None},
    )
    run = visavis.train(recipe, data=scenes, out=tmp_path / "run").run
    split = train_split(run)[0]
    files = {
        n: visavis.data_mine(
            run, num_negatives=4, preselect=n, out=tmp_path / f"{n}.safetensors"
        ).file
        for n in (0, 59, 20)
    }
    exact, nearly, some = (MinedNegatives.read(file, split) for file in files.values())
    torch.testing.assert_close(
        exact.image_scores, nearly.image_scores
    )  # 59 are all negative images
    assert (some.caption_scores <= exact.caption_scores + 1e-5).all()
    assert not torch.equal(some.negative_captions, exact.negative_captions)


@st.composite
def mined_batches(draw):
    images, size = draw(st.integers(2, 8)), draw(st.integers(1, 4))
    image_of = np.array(sorted(draw(st.lists(st.integers(0, images - 1), min_size=2, max_size=20))))
    data = Dataset(
        "toy",
        tuple(Image(str(i), "train") for i in range(images)),
        tuple(map(str, range(len(image_of)))),
        image_of,
    )

    def lists(queries, candidates, is_positive):
        index = torch.full((queries, size), -1, dtype=torch.int32)
        for query in range(queries):
            negatives = [c for c in range(candidates) if not is_positive(query, c)]
            chosen = (
                draw(st.lists(st.sampled_from(negatives), max_size=size, unique=True))
                if negatives
                else []
            )
            index[query, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        return index

    captions = lists(images, len(image_of), lambda image, caption: image_of[caption] == image)
    negative_images = lists(
        len(image_of), images, lambda caption, image: image_of[caption] == image
    )
    scores = [index.float() for index in (captions, negative_images)]
    return MinedBatches(
        data,
        MinedNegatives(captions, negative_images, *scores, data.fingerprint),
        draw(st.integers(1, 3)),
    )


@settings(max_examples=60, deadline=None)
@given(mined_batches(), st.integers(0, 2**32 - 1))
def test_added_pairs_are_negatives_of_the_batch(batches, seed):
    data, random = batches.data, np.random.default_rng(seed)
    captions = random.permutation(len(data.captions))[: random.integers(1, len(data.captions) + 1)]
    images, texts = batches.add_negatives(data.image_of[captions], captions, random)
    added = texts[len(captions) :]
    assert texts[: len(captions)].tolist() == captions.tolist()
    assert images.tolist() == data.image_of[texts].tolist()
    assert len(set(texts.tolist())) == len(texts)
    assert len(added) <= 2 * batches.per_query * len(captions)
    listed_images = set(batches.mined.negative_images[captions].flatten().tolist())
    listed_captions = set(
        batches.mined.negative_captions[images[: len(captions)]].flatten().tolist()
    )
    assert all(
        caption in listed_captions or data.image_of[caption] in listed_images
        for caption in added.tolist()
    )


def test_ranks_read_parts_of_the_extended_batch():
    data = Dataset(
        "toy", tuple(Image(str(i), "train") for i in range(6)), tuple("abcdef"), np.arange(6)
    )
    index = torch.tensor([[(i + 1) % 6] for i in range(6)], dtype=torch.int32)
    mined = MinedNegatives(index, index, index.float(), index.float(), data.fingerprint)

    class Numbers:
        def read(self, items, seeds=None):
            return Encoded(torch.from_numpy(items)[:, None].float())

    whole = Loader(
        data, Numbers(), Numbers(), BatchSchedule(batch_size=2), 0, MinedBatches(data, mined, 1)
    )
    parts = [replace(whole, rank=rank, world_size=2) for rank in (0, 1)]
    for batch, *ranks in zip(whole.epoch(1), *(part.epoch(1) for part in parts), strict=True):
        assert len(batch.captions) in (3, 4)
        assert np.concatenate([part.captions for part in ranks]).tolist() == batch.captions.tolist()


@pytest.mark.slow
def test_filter_drops_planted_copies(scenes, recipe, tmp_path):
    """Every image has a copy under another name: without the filter, the copy is among the
    negatives. All negatives are listed.
    """
    lines = [json.loads(line) for line in (scenes / "captions.jsonl").read_text().splitlines()]
    folder = tmp_path / "copies"
    folder.mkdir()
    copies = []
    for line in lines:
        name = line["filename"]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((scenes / name).read_bytes())
        if line["split"] == "train":
            copy = f"copy-{name.replace('/', '-')}"
            (folder / copy).write_bytes((scenes / name).read_bytes())
            copies.append(line | {"filename": copy})
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, lines + copies)))
    run = visavis.train(
        recipe,
        data=folder,
        out=tmp_path / "run",
        overrides={"phases.0.epochs": 4, "phases.1.epochs": 1},
    ).run
    split = train_split(run)[0]
    names = [image.name.removeprefix("copy-").replace("/", "-") for image in split.images]
    copy_of = torch.tensor(
        [
            next(i for i, name in enumerate(names) if name == names[k] and i != k)
            for k in range(len(names))
        ]
    )

    def share_of_copies(**options):
        out, num_negatives = tmp_path / f"{len(options)}.safetensors", len(split.images) - 1
        mined = MinedNegatives.read(
            visavis.data_mine(run, out=out, num_negatives=num_negatives, **options).file, split
        )
        return (
            (mined.negative_images == copy_of[torch.from_numpy(split.image_of)][:, None])
            .any(1)
            .double()
            .mean()
        )

    assert share_of_copies(max_ratio=0) == 1
    assert share_of_copies() == 0


@pytest.mark.slow
def test_mined_phase_trains_and_resumes_exactly(
    run, scenes, recipe, outcome, in_pieces, listener, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    visavis.data_mine(run, out="n.safetensors")
    changes = SHORT | {
        "phases.1.supervision": "MinedNegativeSupervision(file='n.safetensors', per_query=2)"
    }
    whole = visavis.train(recipe, data=scenes, out="whole", overrides=changes, progress=listener)
    assert whole.positives_by == "ids"
    mined = f"MinedNegativeSupervision(file='{tmp_path / 'n.safetensors'}', per_query=2)"
    assert whole.supervision == f"PairSupervision(by='ids') then {mined}"
    print_result(whole)
    assert (
        f"positives by ids, PairSupervision(by='ids') then {mined}: best validation RSUM"
        in capsys.readouterr().out.replace("\n", " ")
    )
    assert (
        json.loads((tmp_path / "whole" / "result.json").read_text())["supervision"]
        == whole.supervision
    )
    assert f"file='{tmp_path / 'n.safetensors'}'" in (tmp_path / "whole" / "run.toml").read_text()
    in_pieces(recipe, tmp_path / "pieces", data=scenes, overrides=changes)
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "pieces")
    plain = visavis.train(recipe, data=scenes, out="plain", overrides=SHORT)
    assert outcome(plain.run)["weights"] != outcome(whole.run)["weights"]


def test_changed_file_of_negatives_stops_a_resume(run, scenes, recipe, tmp_path, stop_at):
    file = visavis.data_mine(run, out=tmp_path / "n.safetensors").file
    changes = SHORT | {"phases.1.supervision": f"MinedNegativeSupervision(file='{file}')"}
    with pytest.raises(Stopped):
        visavis.train(
            recipe, data=scenes, out=tmp_path / "run", overrides=changes, progress=stop_at(5)
        )
    file.unlink()
    visavis.data_mine(run, num_negatives=2, out=file)
    with pytest.raises(RunError, match=r"phases\.1\.supervision"):
        visavis.train(resume=tmp_path / "run")


def test_mining_errors_name_the_remedy(run, scenes, few_scenes, recipe, tmp_path):
    def train(file, **options):
        changes = SHORT | {"phases.1.supervision": f"MinedNegativeSupervision(file='{file}')"}
        return visavis.train(recipe, out=tmp_path / "new", overrides=changes, **options)

    file = visavis.data_mine(run, out=tmp_path / "n.safetensors").file
    with pytest.raises(RefusedOverwrite, match="already exists"):
        visavis.data_mine(run, out=file)
    with pytest.raises(
        DataError,
        match=r"expected negatives of split train of .*, got negatives of other images or captions",
    ):
        train(file, data=few_scenes)
    with pytest.raises(DataError, match=r"missing.safetensors"):
        train(tmp_path / "missing.safetensors", data=scenes)
    with pytest.raises(RecipeError, match=r"expected file='FILE' of visavis data mine, got none"):
        train("", data=scenes)
    with pytest.raises(DataError, match=r"expected a file of visavis data mine, got tensors"):
        train(run / "model" / "model.safetensors", data=scenes)
    with pytest.raises(RunError, match=r"max_ratio: expected a number from 0 to 1, got 2"):
        visavis.data_mine(run, max_ratio=2)
    with pytest.raises(
        DataError, match=r"expected one of its splits \(.*\), got nowhere\. Use one of them\.$"
    ):
        visavis.data_mine(run, split="nowhere")
    for name, minimum in (("num_negatives", 1), ("preselect", 0)):
        with pytest.raises(
            visavis.SpecError,
            match=rf"^{name}: expected an integer >= {minimum}, got -1\. Set {name} to {minimum} or more\.$",
        ):
            visavis.data_mine(run, **{name: -1})
    with pytest.raises(visavis.SpecError, match="per_query: expected at least 1"):
        MinedNegativeSupervision(file="n", per_query=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"negative_captions": torch.zeros(4, 0, dtype=torch.int32)},
            "expected indices below .* got shape ",
        ),
        ({"negative_captions": torch.full((4, 3), 0.5)}, "expected a file of visavis data mine"),
        ({"fingerprint": torch.tensor(3.0)}, "expected a file of visavis data mine"),
        (
            {"negative_captions": torch.tensor(1, dtype=torch.int32)},
            "got negatives of other images or captions",
        ),
        (
            {
                "negative_captions": torch.full((4, 1), -1),
                "negative_images": torch.full((8, 1), -1),
            },
            "expected at least one negative, got none",
        ),
    ],
)
def test_damaged_negatives_are_refused(change, message, tmp_path):
    split = Dataset(
        "d",
        tuple(Image(str(i), "train") for i in range(4)),
        tuple(f"caption {i}" for i in range(8)),
        np.arange(8) // 2,
    )
    lists = [torch.zeros(4, 3).int(), torch.zeros(8, 3).int(), torch.zeros(4, 3), torch.zeros(8, 3)]
    mined = MinedNegatives(*lists, split.fingerprint)
    mined.save(tmp_path / "n.safetensors")
    MinedNegatives.read(tmp_path / "n.safetensors", split)
    tensors = storage.read_tensors(tmp_path / "n.safetensors")
    change = {
        name: value.int() if value.dtype == torch.int64 else value for name, value in change.items()
    }
    storage.write_tensors(tmp_path / "damaged.safetensors", tensors | change)
    with pytest.raises(DataError, match=message):
        MinedNegatives.read(tmp_path / "damaged.safetensors", split)


def test_mining_writes_no_padding(run, tmp_path):
    file = visavis.data_mine(run, num_negatives=1_000_000, out=tmp_path / "n.safetensors").file
    assert file.stat().st_size < 2**20
    mined = MinedNegatives.read(file, train_split(run)[0])
    for index in (mined.negative_captions, mined.negative_images):
        assert (index >= 0).any(0).all()


def test_mining_keeps_a_file_that_appears_meanwhile(run, tmp_path):
    out = tmp_path / "n.safetensors"

    class Writer(NoProgress):
        def update(self, *_):
            out.write_text("of another program")

    with pytest.raises(
        RefusedOverwrite, match=r"already exists.* The result is in .*n-1\.safetensors\.$"
    ):
        visavis.data_mine(run, out=out, progress=Writer())
    assert out.read_text() == "of another program"
    assert MinedNegatives.read(tmp_path / "n-1.safetensors", train_split(run)[0]).count
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n-1.safetensors", "n.safetensors"]


def test_failed_write_of_negatives_leaves_no_file(run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise StorageError("full")

    monkeypatch.setattr(MinedNegatives, "save", fail)
    with pytest.raises(StorageError):
        visavis.data_mine(run, out=tmp_path / "n.safetensors")
    assert not list(tmp_path.iterdir())


def test_mining_refuses_a_guide_without_filter(run, tmp_path):
    with pytest.raises(RunError, match="guide: expected none with max_ratio 0"):
        visavis.data_mine(run, guide=run, max_ratio=0, out=tmp_path / "n.safetensors")
