"""Degrees of relevance: laws that every way to tell them obeys, its own values, and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visavis.data.dataset import Dataset, Image
from visavis.degrees import CATALOG, CBoW, CoarseToFine, CrossEncoder, FunctionDegrees, GivenDegrees, SentenceModel
from visavis.degrees.words import read_vectors
from visavis.errors import DataError, ShapeError, SpecError, StorageError
from visavis.models.pair_tower import PairTower, open_pairs
from visavis.spec import parse

WORDS = ["a", "dog", "runs", "cat", "sleeps", "on", "the", "beach", "two"]
KINDS = ["plain", "idf", "common", "sentence", "cross", "paper", "reference"]
CAPTIONS = ("a dog runs", "the cat", "a red dog", "red", "", "two dog runs on the beach", "a dog runs")

captions = st.lists(st.lists(st.sampled_from([*WORDS, "red", "zebra", "!"]), max_size=5).map(" ".join), min_size=2, max_size=7)


@pytest.fixture(scope="session")
def estimators(vectors_file, tiny_models):
    words, cross = f"CBoW(vectors={str(vectors_file)!r})", f"CrossEncoder(model={str(tiny_models / 'cross')!r}, batch_size=3)"
    fine = {"coarse": words, "fine": cross, "above": 0.3}
    return {
        "plain": CBoW(vectors=str(vectors_file)),
        "idf": CBoW(vectors=str(vectors_file), weighting="idf"),
        "common": CBoW(vectors=str(vectors_file), common=1),
        "sentence": SentenceModel(model=str(tiny_models / "bert")),
        "cross": parse(cross, CATALOG),
        "paper": CoarseToFine(**fine),
        "reference": CoarseToFine(**fine, semantics="reference"),
    }


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def close(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@given(texts=captions)
@settings(max_examples=12)
def test_degrees_are_symmetric_between_0_and_1_and_1_for_what_says_the_same(estimators, kind, texts):
    estimator = estimators[kind]
    index = torch.arange(len(texts))
    degrees = estimator.of(texts)
    block = degrees(index, index)
    assert block.dtype == torch.float32
    assert block.min() >= 0
    assert block.max() <= 1
    close(block, block.T)
    known = set(WORDS)
    for i, one in enumerate(texts):
        for j, other in enumerate(texts):
            if one == other and kind not in ("idf", "common") and set(one.split()) & known:
                assert block[i, j] == pytest.approx(1, abs=1e-5)
            if kind != "reference" and not set(one.split()) - {"!"}:
                assert block[i, j] == 0


@pytest.mark.parametrize("kind", KINDS)
@given(texts=captions, cut=st.integers(0, 6), mixed=st.randoms(use_true_random=False))
@settings(max_examples=12)
def test_any_split_into_blocks_and_any_list_of_pairs_says_the_same(estimators, kind, texts, cut, mixed):
    degrees = estimators[kind].of(texts)
    rows, columns = (torch.tensor(mixed.choices(range(len(texts)), k=6)) for _ in range(2))
    block = degrees(rows, columns)
    close(torch.cat([degrees(rows[:cut], columns), degrees(rows[cut:], columns)]), block)
    close(torch.cat([degrees(rows, columns[:cut]), degrees(rows, columns[cut:])], 1), block)
    close(degrees.pairs(rows, columns), block.diagonal())
    mask = torch.tensor(mixed.choices([True, False], k=36)).view(6, 6)
    close(degrees.where(mask, rows, columns), block[mask])


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_from_the_cache_is_what_was_computed(estimators, kind, fresh_cache):
    first = estimators[kind](CAPTIONS, CAPTIONS)
    assert torch.equal(estimators[kind](CAPTIONS, CAPTIONS), first)


def test_a_sentence_model_and_a_cross_encoder_compute_once(estimators, fresh_cache, monkeypatch):
    index = torch.arange(len(CAPTIONS))
    first = {kind: estimators[kind].of(CAPTIONS)(index, index) for kind in ("sentence", "cross")}

    def never(*_):
        raise AssertionError

    monkeypatch.setattr("visavis.models.towers.TowerSpec.open", never)
    monkeypatch.setattr(PairTower, "encode", never)
    for kind, block in first.items():
        assert torch.equal(estimators[kind].of(CAPTIONS)(index, index), block)


def test_half_precision_is_kept_apart(tiny_models, fresh_cache):
    folder = str(tiny_models / "cross")
    index, degrees = torch.arange(len(CAPTIONS)), [CrossEncoder(model=folder, bfloat16=half).of(CAPTIONS) for half in (False, True)]
    exact, rough = (each(index, index) for each in degrees)
    assert len(list(fresh_cache.rglob("*.sqlite"))) == 2
    torch.testing.assert_close(rough, exact, rtol=0, atol=0.02)
    assert not torch.equal(rough, exact)


def test_a_cross_encoder_reads_only_the_pairs_that_are_mask_for(estimators, fresh_cache, monkeypatch):
    mask, encode = [], PairTower.encode
    monkeypatch.setattr(PairTower, "encode", lambda self, first, second: mask.extend(zip(first, second)) or encode(self, first, second))  # noqa: B905
    index = torch.arange(len(CAPTIONS))
    coarse = estimators["plain"].of(CAPTIONS)(index, index)
    estimators["paper"].of(CAPTIONS)(index, index)
    above = {tuple(sorted((CAPTIONS[i], CAPTIONS[j]))) for i, j in (coarse > 0.3).nonzero().tolist() if CAPTIONS[i] != CAPTIONS[j]}
    assert set(mask) == above
    assert len(mask) == len(above)


def test_a_retrained_cross_encoder_does_not_meet_degrees_of_the_old_one(tiny_models, tmp_path, fresh_cache):
    import os

    folder = tmp_path / "cross"
    tower = open_pairs(str(tiny_models / "cross"))
    tower.model.save_pretrained(folder)
    tower.tokenizer.save_pretrained(folder)
    before = CrossEncoder(model=str(folder))(["a dog"], ["the cat"])
    torch.nn.init.constant_(tower.model.classifier.weight, 0.1)
    tower.model.save_pretrained(folder)
    os.utime(folder / "model.safetensors", (0, 0))
    assert CrossEncoder(model=str(folder))(["a dog"], ["the cat"]) != before


def test_mean_word_vectors_by_hand(tmp_path):
    file = tmp_path / "v.txt"
    file.write_text("a 1 0\nb 0 1\nc 1 1\n")
    estimate = CBoW(vectors=str(file))
    close(estimate(["a b", "a"], ["C!", "b", "zebra"]), torch.tensor([[1, 0.5**0.5, 0], [0.5**0.5, 0, 0]]))
    # of two captions, "a" is in both and counts nothing
    close(CBoW(vectors=str(file), weighting="idf")(["a b"], ["a c"]), torch.tensor([[0.5**0.5]]))


def test_negative_cosines_count_as_0(tmp_path):
    file = tmp_path / "v.txt"
    file.write_text("a 1 0\nb -1 0.1\n")
    assert CBoW(vectors=str(file))(["a"], ["b"]).item() == 0


def test_coarse_to_fine_by_hand(vectors_file, tiny_models):
    words, model = f"CBoW(vectors={str(vectors_file)!r})", f"SentenceModel(model={str(tiny_models / 'bert')!r})"
    coarse, fine = parse(words, CATALOG)(CAPTIONS, CAPTIONS), parse(model, CATALOG)(CAPTIONS, CAPTIONS)
    above = float(coarse[coarse > 0].median())
    paper = CoarseToFine(coarse=words, fine=model, above=above)(CAPTIONS, CAPTIONS)
    close(paper, torch.where(coarse > above, fine, coarse))
    reference = CoarseToFine(coarse=words, fine=model, above=above, semantics="reference")(CAPTIONS, CAPTIONS)
    equal = torch.tensor([[one == other for other in CAPTIONS] for one in CAPTIONS])
    close(reference, torch.where(equal, 1.0, torch.where(coarse > above, fine, 0.0)))
    assert not torch.equal(paper, reference)


def test_captions_that_say_nothing_are_counted(estimators):
    assert estimators["plain"].of(CAPTIONS).notes == ("2 of 7 captions are without a known word: degree 0 with everything (first: 'red').",)
    for kind in ("sentence", "cross"):
        assert estimators[kind].of(CAPTIONS).notes == ("1 of 7 captions are without a word: degree 0 with everything (first: '').",)
    assert len(estimators["paper"].of(CAPTIONS).notes) == 2
    assert estimators["plain"].of(["a dog", "dog"]).notes == ()


def test_one_word_is_enough(estimators):
    for kind in ("plain", "sentence", "cross"):
        degrees = estimators[kind](["dog"], ["dog", "a dog"])
        assert degrees[0, 0] == pytest.approx(1, abs=1e-5)
        assert 0 < degrees[0, 1] < 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a 1 2\nb 1\n", "line 2: 1 numbers, expected 2 as on the first line"),
        ("a 1 2\nb 1 x\n", "line 2: could not convert string to float: 'x'; expected a word and its numbers, separated by blanks"),
        ("a 1 nan\n", "line 1: a number of the word's vector is nan, expected a finite one"),
        ("", "holds no word vectors"),
        ("a\n", "line 1: 0 numbers"),
    ],
)
def test_broken_word_vectors_are_named_by_line(tmp_path, text, sentence):
    file = tmp_path / "v.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=sentence):
        CBoW(vectors=str(file))(["a b"], ["a"])


def test_word_vectors_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "v.bin").write_bytes(b"a \xff\xfe\n")
    with pytest.raises(DataError, match="is not UTF-8: it holds 0xff"):
        CBoW(vectors=str(tmp_path / "v.bin")).of(["a"])


def test_a_word_may_hold_what_elsewhere_ends_a_line(tmp_path):
    (tmp_path / "v.txt").write_text("\x85 1 2\na 3 4\n", encoding="utf-8")
    assert read_vectors(tmp_path / "v.txt", {"a"})["a"].tolist() == [3, 4]


def test_a_line_of_counts_before_the_vectors_is_passed_over(tmp_path):
    file = tmp_path / "v.txt"
    file.write_text("2 3\na 1 2 3\nb 1 1 1\n")
    assert {word: vector.tolist() for word, vector in read_vectors(file, {"a"}).items()} == {"a": [1, 2, 3]}


def test_a_missing_file_of_word_vectors_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"^nowhere.txt does not exist, neither here nor under VISAVIS_DATA"):
        CBoW(vectors="nowhere.txt").of(["a"])


@pytest.fixture
def data():
    """Three images in two splits, with five captions in all."""
    images = (Image("0", "train"), Image("1", "val"), Image("2", "train"))
    return Dataset("tiny", images, tuple("abcde"), np.array([0, 0, 1, 2, 2]))


@pytest.fixture
def save(tmp_path):
    def save(matrix):
        np.save(tmp_path / "given.npy", matrix)
        return GivenDegrees(path=str(tmp_path / "given.npy"))

    return save


def test_a_matrix_of_captions_is_read_for_the_whole_and_for_a_split(data, save):
    matrix = np.random.default_rng(0).random((5, 5), np.float32)
    degrees, every = save(matrix), torch.arange(5)
    assert torch.equal(degrees.of(data.captions)(every, every), torch.from_numpy(matrix))
    assert torch.equal(degrees.between(data)(torch.arange(3), every), torch.from_numpy(matrix[[0, 2, 3]]))
    train = data.split("train")
    first, second = torch.tensor([0, 1]), torch.tensor([1, 2])
    assert torch.equal(degrees.between(train)(first, second), torch.from_numpy(matrix[np.ix_([0, 3], [1, 3])]))
    assert torch.equal(degrees.between(train)(first, second, own=torch.tensor([1, 3])), torch.from_numpy(matrix[np.ix_([1, 4], [1, 3])]))
    best = degrees.between(train, "best")(first, second)
    assert torch.equal(best, torch.from_numpy(np.stack([matrix[[0, 1]][:, [1, 3]].max(0), matrix[[3, 4]][:, [1, 3]].max(0)])))


def test_a_matrix_of_images_is_read_for_the_whole_and_for_a_split(data, save):
    matrix = np.random.default_rng(0).random((3, 5))
    degrees = save(matrix)
    assert torch.equal(degrees.between(data)(torch.arange(3), torch.arange(5)), torch.from_numpy(matrix.astype(np.float32)))
    chosen = degrees.between(data.split("train"))(torch.tensor([1]), torch.tensor([0, 2]), own=torch.tensor([1]))
    assert torch.equal(chosen, torch.from_numpy(matrix[[2]][:, [0, 3]].astype(np.float32)))


@pytest.mark.parametrize("shape", [(4, 4), (4, 5), (5, 4), (6, 6), (3, 6)])
def test_a_matrix_of_another_shape_is_refused(data, save, shape):
    with pytest.raises(
        ShapeError, match=r"given.npy is of shape .*, expected \((3|5|4|6), 5\): the (captions|images) and the captions of tiny"
    ):
        save(np.zeros(shape)).between(data)
    with pytest.raises(ShapeError, match=r"expected \(5, 5\): a row and a column for each caption"):
        save(np.zeros(shape)).of(data.captions)


def test_a_matrix_too_small_for_a_split_is_refused(data, save):
    with pytest.raises(ShapeError, match=r"expected at least \(3, 5\): the images and the captions of tiny"):
        save(np.zeros((2, 5))).between(data.split("train"))


@pytest.mark.parametrize("value", [np.nan, -0.1, 1.5, np.inf])
def test_a_degree_that_is_none_is_named_by_its_pair(data, save, value):
    matrix = np.full((5, 5), 0.5)
    matrix[3, 1] = value
    degrees = save(matrix)
    with pytest.raises(DataError, match=rf"given.npy: the degree of row 3 with column 1 is {value}, expected a number from 0 to 1\.$"):
        degrees.of(data.captions)(torch.arange(2, 5), torch.arange(5))
    with pytest.raises(DataError, match="row 3 with column 1"):
        degrees.between(data.split("train"))(torch.tensor([1]), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="row 3 with column 1"):
        degrees.of(data.captions).pairs(torch.tensor([2, 3]), torch.tensor([2, 1]))
    assert degrees.of(data.captions)(torch.tensor([0]), torch.tensor([1])).item() == 0.5


def test_a_file_that_is_no_matrix_is_refused(tmp_path, save):
    (tmp_path / "broken.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"broken.npy is not a readable .npy of numbers"):
        GivenDegrees(path=str(tmp_path / "broken.npy")).of(["a"])
    np.save(tmp_path / "objects.npy", np.array([[None]]), allow_pickle=True)
    with pytest.raises(DataError, match=r"objects.npy is not a readable .npy of numbers"):
        GivenDegrees(path=str(tmp_path / "objects.npy")).of(["a"])
    with pytest.raises(ShapeError, match=r"of shape \(3,\), expected a matrix of numbers"):
        save(np.zeros(3)).of(["a"])
    with pytest.raises(DataError, match="complex128 of shape"):
        save(np.zeros((1, 1), complex)).of(["a"])


def lengths(first, second):
    return np.array([[min(len(one), len(other)) / max(len(one), len(other)) for other in second] for one in first])


def test_a_function_tells_degrees(data):
    degrees = FunctionDegrees(lengths)
    close(degrees(["ab"], ["abcd", "xy"]), torch.tensor([[0.5, 1.0]]))
    close(degrees.of(["ab", "abcd"]).pairs(torch.tensor([0, 1]), torch.tensor([1, 1])), torch.tensor([0.5, 1.0]))
    assert degrees.between(data)(torch.arange(3), torch.arange(5)).shape == (3, 5)


def test_a_function_that_tells_none_is_refused():
    with pytest.raises(ShapeError, match=r"<lambda> gives degrees of shape \(2,\) for 1 and 2 captions, expected \(1, 2\)"):
        FunctionDegrees(lambda first, second: np.zeros(len(second)))(["a"], ["b", "c"])
    with pytest.raises(DataError, match="row 0 with column 2 is nan"):
        FunctionDegrees(lambda first, second: np.array([[0.5, np.nan]]))(["a"], ["b", "c"])


def test_a_model_that_is_no_cross_encoder_is_refused(tiny_models, tmp_path):
    with pytest.raises(
        DataError, match=r"lacks weights of its own config: classifier.* expected a cross-encoder with one output: visavis relevance fit"
    ):
        CrossEncoder(model=str(tiny_models / "bert"))(["a"], ["dog"])
    tower = open_pairs(str(tiny_models / "cross"))
    with torch.no_grad():
        tower.model.classifier.bias.fill_(float("nan"))
    tower.model.save_pretrained(tmp_path / "nan")
    tower.tokenizer.save_pretrained(tmp_path / "nan")
    with pytest.raises(DataError, match=r"its weights classifier\.bias hold values that are not finite"):
        CrossEncoder(model=str(tmp_path / "nan"))(["a"], ["dog"])


@pytest.mark.parametrize("damage", ["no database", "a byte of a degree", "another table"])
def test_a_damaged_cache_of_pairs_is_made_anew_and_said(estimators, fresh_cache, caplog, damage):
    first = estimators["cross"](["a", "cat"], ["dog"])
    (file,) = fresh_cache.rglob("*.sqlite")
    whole = file.read_bytes()
    assert estimators["cross"](["a", "cat"], ["dog"]).equal(first)
    assert not caplog.messages
    if damage == "no database":
        file.write_bytes(b"no database" * 1000)
    elif damage == "another table":
        file.write_bytes(whole.replace(b"degree BLOB", b"degrei BLOB").replace(b"pair BLOB", b"peir BLOB"))
    else:
        file.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    assert estimators["cross"](["a", "cat"], ["dog"]).equal(first)
    (line,) = caplog.messages
    assert line.startswith(f"{file} is damaged and is made anew: ")
    assert estimators["cross"](["a", "cat"], ["dog"]).equal(first)
    assert len(caplog.messages) == 1


def test_a_cache_of_pairs_that_cannot_be_written_is_a_sentence(estimators, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file in its place")
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(StorageError, match=r"sqlite cannot be written: (Not a directory|File exists)"):
        estimators["cross"](["a"], ["dog"])


@pytest.mark.parametrize(
    "spec",
    [
        "CoarseToFine(above=1.5)",
        "CoarseToFine(fine='CoarseToFine()')",
        "CoarseToFine(semantics='code')",
        "CBoW(weighting='nouns')",
        "CBoW(common=-1)",
        "CrossEncoder()",
        "CrossEncoder(model='x', batch_size=0)",
        "GivenDegrees()",
    ],
)
def test_impossible_settings_are_refused(spec):
    with pytest.raises(SpecError):
        parse(spec, CATALOG)
