"""Relevance estimators: laws, hand values, caches and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visavis.core.errors import DataError, ShapeError, SpecError, StorageError
from visavis.core.spec import parse
from visavis.data.dataset import Dataset
from visavis.data.image_file import Image
from visavis.models.encoders.sentence_encoders import TextPairEncoder, open_text_pair_encoder
from visavis.papers.relevance import (
    CATALOG,
    CBoW,
    CoarseToFine,
    CrossEncoder,
    FunctionRelevance,
    MatrixRelevance,
    SentenceModel,
)
from visavis.papers.relevance.caption_estimators import read_word_vectors

WORDS = ["a", "dog", "runs", "cat", "sleeps", "on", "the", "beach", "two"]
KINDS = ["plain", "idf", "common", "sentence", "cross", "paper", "reference"]
CAPTIONS = (
    "a dog runs",
    "the cat",
    "a red dog",
    "red",
    "",
    "two dog runs on the beach",
    "a dog runs",
)

captions = st.lists(
    st.lists(st.sampled_from([*WORDS, "red", "zebra", "!"]), max_size=5).map(" ".join),
    min_size=2,
    max_size=7,
)


@pytest.fixture(scope="session")
def estimators(vectors_file, tiny_models):
    words, cross = (
        f"CBoW(vectors={str(vectors_file)!r})",
        f"CrossEncoder(model={str(tiny_models / 'cross')!r}, batch_size=3)",
    )
    fine = {"coarse": words, "fine": cross, "threshold": 0.3}
    return {
        "plain": CBoW(vectors=str(vectors_file)),
        "idf": CBoW(vectors=str(vectors_file), weighting="idf"),
        "common": CBoW(vectors=str(vectors_file), removed_components=1),
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
@settings(max_examples=6)
def test_relevance_is_symmetric_and_one_for_equal_captions(estimators, kind, texts):
    estimator = estimators[kind]
    index = torch.arange(len(texts))
    relevance = estimator.for_captions(texts)
    block = relevance(index, index)
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
@settings(max_examples=6)
def test_relevance_is_equal_in_blocks_and_pairs(estimators, kind, texts, cut, mixed):
    relevance = estimators[kind].for_captions(texts)
    rows, columns = (torch.tensor(mixed.choices(range(len(texts)), k=6)) for _ in range(2))
    block = relevance(rows, columns)
    close(torch.cat([relevance(rows[:cut], columns), relevance(rows[cut:], columns)]), block)
    close(torch.cat([relevance(rows, columns[:cut]), relevance(rows, columns[cut:])], 1), block)
    close(relevance.pairs(rows, columns), block.diagonal())
    mask = torch.tensor(mixed.choices([True, False], k=36)).view(6, 6)
    close(relevance.masked(mask, rows, columns), block[mask])


def test_sentence_model_and_cross_encoder_compute_once(estimators, fresh_cache, monkeypatch):
    index = torch.arange(len(CAPTIONS))
    first = {
        kind: estimators[kind].for_captions(CAPTIONS)(index, index)
        for kind in ("sentence", "cross")
    }

    def never(*_):
        raise AssertionError

    monkeypatch.setattr("visavis.models.encoders.feature_extraction.open_encoder", never)
    monkeypatch.setattr(TextPairEncoder, "encode", never)
    for kind, block in first.items():
        assert torch.equal(estimators[kind].for_captions(CAPTIONS)(index, index), block)


def test_cross_encoder_caches_bfloat16_separately(tiny_models, fresh_cache):
    folder = str(tiny_models / "cross")
    index, relevance = (
        torch.arange(len(CAPTIONS)),
        [
            CrossEncoder(model=folder, bfloat16=half).for_captions(CAPTIONS)
            for half in (False, True)
        ],
    )
    exact, rough = (each(index, index) for each in relevance)
    assert len(list(fresh_cache.rglob("*.sqlite"))) == 2
    torch.testing.assert_close(rough, exact, rtol=0, atol=0.02)
    assert not torch.equal(rough, exact)


def test_cross_encoder_computes_only_masked_pairs(estimators, fresh_cache, monkeypatch):
    mask, encode = [], TextPairEncoder.encode
    monkeypatch.setattr(
        TextPairEncoder,
        "encode",
        lambda self, first, second: (
            mask.extend(zip(first, second, strict=True)) or encode(self, first, second)
        ),
    )
    index = torch.arange(len(CAPTIONS))
    coarse = estimators["plain"].for_captions(CAPTIONS)(index, index)
    estimators["paper"].for_captions(CAPTIONS)(index, index)
    above = {
        tuple(sorted((CAPTIONS[i], CAPTIONS[j])))
        for i, j in (coarse > 0.3).nonzero().tolist()
        if CAPTIONS[i] != CAPTIONS[j]
    }
    assert set(mask) == above
    assert len(mask) == len(above)


def test_cross_encoder_cache_depends_on_weights(tiny_models, tmp_path, fresh_cache):
    import os

    folder = tmp_path / "cross"
    encoder = open_text_pair_encoder(str(tiny_models / "cross"))
    encoder.model.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    before = CrossEncoder(model=str(folder))(["a dog"], ["the cat"])
    torch.nn.init.constant_(encoder.model.classifier.weight, 0.1)
    encoder.model.save_pretrained(folder)
    os.utime(folder / "model.safetensors", (0, 0))
    assert CrossEncoder(model=str(folder))(["a dog"], ["the cat"]) != before


def test_cbow_matches_hand_values(tmp_path):
    file = tmp_path / "v.txt"
    file.write_text("a 1 0\nb 0 1\nc 1 1\n")
    estimate = CBoW(vectors=str(file))
    close(
        estimate(["a b", "a"], ["C!", "b", "zebra"]),
        torch.tensor([[1, 0.5**0.5, 0], [0.5**0.5, 0, 0]]),
    )
    # of two captions, "a" is in both and counts nothing
    close(CBoW(vectors=str(file), weighting="idf")(["a b"], ["a c"]), torch.tensor([[0.5**0.5]]))


def test_cbow_clamps_negative_cosines(tmp_path):
    file = tmp_path / "v.txt"
    file.write_text("a 1 0\nb -1 0.1\n")
    assert CBoW(vectors=str(file))(["a"], ["b"]).item() == 0


def test_coarse_to_fine_matches_hand_values(vectors_file, tiny_models):
    words, model = (
        f"CBoW(vectors={str(vectors_file)!r})",
        f"SentenceModel(model={str(tiny_models / 'bert')!r})",
    )
    coarse, fine = (
        parse(words, CATALOG)(CAPTIONS, CAPTIONS),
        parse(model, CATALOG)(CAPTIONS, CAPTIONS),
    )
    above = float(coarse[coarse > 0].median())
    paper = CoarseToFine(coarse=words, fine=model, threshold=above)(CAPTIONS, CAPTIONS)
    close(paper, torch.where(coarse > above, fine, coarse))
    reference = CoarseToFine(coarse=words, fine=model, threshold=above, semantics="reference")(
        CAPTIONS, CAPTIONS
    )
    equal = torch.tensor([[one == other for other in CAPTIONS] for one in CAPTIONS])
    close(reference, torch.where(equal, 1.0, torch.where(coarse > above, fine, 0.0)))
    assert not torch.equal(paper, reference)


def test_notes_count_captions_without_words(estimators):
    assert estimators["plain"].for_captions(CAPTIONS).notes == (
        "2 of 7 captions are without a known word: relevance 0 to every caption (first: 'red').",
    )
    for kind in ("sentence", "cross"):
        assert estimators[kind].for_captions(CAPTIONS).notes == (
            "1 of 7 captions are without a word: relevance 0 to every caption (first: '').",
        )
    assert len(estimators["paper"].for_captions(CAPTIONS).notes) == 2
    assert estimators["plain"].for_captions(["a dog", "dog"]).notes == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a 1 2\nb 1\n", "line 2: expected 2 numbers, as on the first line, got 1"),
        (
            "a 1 2\nb 1 x\n",
            (
                "line 2: expected a word and its numbers, separated by blanks: could not convert "
                "string to float: 'x'"
            ),
        ),
        ("a 1 nan\n", "line 1: expected finite numbers, got nan"),
        ("", "expected word vectors, got an empty file"),
        ("a\n", "line 1: expected a word and its numbers, got 0"),
    ],
)
def test_word_vectors_reject_broken_lines(tmp_path, text, sentence):
    file = tmp_path / "v.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=sentence):
        CBoW(vectors=str(file))(["a b"], ["a"])


def test_word_vectors_reject_binary_files(tmp_path):
    (tmp_path / "v.bin").write_bytes(b"a \xff\xfe\n")
    with pytest.raises(DataError, match="expected UTF-8, got the byte 0xff"):
        CBoW(vectors=str(tmp_path / "v.bin")).for_captions(["a"])


def test_word_vectors_accept_unicode_line_separators(tmp_path):
    (tmp_path / "v.txt").write_text("\x85 1 2\na 3 4\n", encoding="utf-8")
    assert read_word_vectors(tmp_path / "v.txt", {"a"})["a"].tolist() == [3, 4]


def test_word_vectors_skip_count_line(tmp_path):
    file = tmp_path / "v.txt"
    file.write_text("2 3\na 1 2 3\nb 1 1 1\n")
    assert {word: vector.tolist() for word, vector in read_word_vectors(file, {"a"}).items()} == {
        "a": [1, 2, 3]
    }


@pytest.fixture
def data():
    """Three images in two splits, with five captions in all."""
    images = (Image("0", "train"), Image("1", "val"), Image("2", "train"))
    return Dataset("tiny", images, tuple("abcde"), np.array([0, 0, 1, 2, 2]))


@pytest.fixture
def save(tmp_path):
    def save(matrix):
        np.save(tmp_path / "given.npy", matrix)
        return MatrixRelevance(path=str(tmp_path / "given.npy"))

    return save


def test_caption_matrix_for_data_set_and_split(data, save):
    matrix = np.random.default_rng(0).random((5, 5), np.float32)
    relevance, every = save(matrix), torch.arange(5)
    assert torch.equal(
        relevance.for_captions(data.captions)(every, every), torch.from_numpy(matrix)
    )
    assert torch.equal(
        relevance.for_dataset(data)(torch.arange(3), every), torch.from_numpy(matrix[[0, 2, 3]])
    )
    train = data.split("train")
    first, second = torch.tensor([0, 1]), torch.tensor([1, 2])
    assert torch.equal(
        relevance.for_dataset(train)(first, second),
        torch.from_numpy(matrix[np.ix_([0, 3], [1, 3])]),
    )
    assert torch.equal(
        relevance.for_dataset(train)(first, second, paired_captions=torch.tensor([1, 3])),
        torch.from_numpy(matrix[np.ix_([1, 4], [1, 3])]),
    )
    best = relevance.for_dataset(train, "max")(first, second)
    assert torch.equal(
        best,
        torch.from_numpy(
            np.stack([matrix[[0, 1]][:, [1, 3]].max(0), matrix[[3, 4]][:, [1, 3]].max(0)])
        ),
    )


def test_image_matrix_for_data_set_and_split(data, save):
    matrix = np.random.default_rng(0).random((3, 5))
    relevance = save(matrix)
    assert torch.equal(
        relevance.for_dataset(data)(torch.arange(3), torch.arange(5)),
        torch.from_numpy(matrix.astype(np.float32)),
    )
    chosen = relevance.for_dataset(data.split("train"))(
        torch.tensor([1]), torch.tensor([0, 2]), paired_captions=torch.tensor([1])
    )
    assert torch.equal(chosen, torch.from_numpy(matrix[[2]][:, [0, 3]].astype(np.float32)))


@pytest.mark.parametrize("shape", [(4, 4), (4, 5), (5, 4), (6, 6), (3, 6)])
def test_matrix_rejects_other_shapes(data, save, shape):
    with pytest.raises(
        ShapeError,
        match=r"given.npy: expected shape \((3|5|4|6), 5\), the (captions|images) and the captions of tiny in its order, got",
    ):
        save(np.zeros(shape)).for_dataset(data)
    with pytest.raises(
        ShapeError, match=r"expected shape \(5, 5\), a row and a column for each caption"
    ):
        save(np.zeros(shape)).for_captions(data.captions)


def test_matrix_rejects_too_small_matrix_for_split(data, save):
    with pytest.raises(
        ShapeError, match=r"expected shape at least \(3, 5\), the images and the captions of tiny"
    ):
        save(np.zeros((2, 5))).for_dataset(data.split("train"))


@pytest.mark.parametrize("value", [np.nan, -0.1, 1.5, np.inf])
def test_matrix_reports_pair_of_invalid_value(data, save, value):
    matrix = np.full((5, 5), 0.5)
    matrix[3, 1] = value
    relevance = save(matrix)
    with pytest.raises(
        DataError,
        match=rf"given.npy: row 3, column 1: expected a relevance from 0 to 1, got {value}\.$",
    ):
        relevance.for_captions(data.captions)(torch.arange(2, 5), torch.arange(5))
    with pytest.raises(DataError, match="row 3, column 1"):
        relevance.for_dataset(data.split("train"))(torch.tensor([1]), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="row 3, column 1"):
        relevance.for_captions(data.captions).pairs(torch.tensor([2, 3]), torch.tensor([2, 1]))
    assert relevance.for_captions(data.captions)(torch.tensor([0]), torch.tensor([1])).item() == 0.5


def test_matrix_rejects_other_files(tmp_path, save):
    (tmp_path / "broken.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"broken.npy is not a readable .npy of numbers"):
        MatrixRelevance(path=str(tmp_path / "broken.npy")).for_captions(["a"])
    np.save(tmp_path / "objects.npy", np.array([[None]]), allow_pickle=True)
    with pytest.raises(DataError, match=r"objects.npy is not a readable .npy of numbers"):
        MatrixRelevance(path=str(tmp_path / "objects.npy")).for_captions(["a"])
    with pytest.raises(ShapeError, match=r"expected a matrix .*, got float64 of shape \(3,\)"):
        save(np.zeros(3)).for_captions(["a"])
    with pytest.raises(DataError, match="complex128 of shape"):
        save(np.zeros((1, 1), complex)).for_captions(["a"])


def lengths(first, second):
    return np.array(
        [
            [min(len(one), len(other)) / max(len(one), len(other)) for other in second]
            for one in first
        ]
    )


def test_function_relevance_matches_hand_values(data):
    relevance = FunctionRelevance(lengths)
    close(relevance(["ab"], ["abcd", "xy"]), torch.tensor([[0.5, 1.0]]))
    close(
        relevance.for_captions(["ab", "abcd"]).pairs(torch.tensor([0, 1]), torch.tensor([1, 1])),
        torch.tensor([0.5, 1.0]),
    )
    assert relevance.for_dataset(data)(torch.arange(3), torch.arange(5)).shape == (3, 5)


def test_function_relevance_rejects_invalid_results():
    with pytest.raises(
        ShapeError, match=r"<lambda>: expected relevance of shape \(1, 2\), .*, got \(2,\)"
    ):
        FunctionRelevance(lambda first, second: np.zeros(len(second)))(["a"], ["b", "c"])
    with pytest.raises(DataError, match=r"row 0, column 2: .* got nan"):
        FunctionRelevance(lambda first, second: np.array([[0.5, np.nan]]))(["a"], ["b", "c"])


def test_cross_encoder_rejects_other_models(tiny_models, tmp_path):
    with pytest.raises(
        DataError,
        match=r"got none for classifier.* Use a cross-encoder with one output, such as one of visavis papers relevance fit",
    ):
        CrossEncoder(model=str(tiny_models / "bert"))(["a"], ["dog"])
    encoder = open_text_pair_encoder(str(tiny_models / "cross"))
    with torch.no_grad():
        encoder.model.classifier.bias.fill_(float("nan"))
    encoder.model.save_pretrained(tmp_path / "nan")
    encoder.tokenizer.save_pretrained(tmp_path / "nan")
    with pytest.raises(
        DataError, match=r"expected finite weights, got NaN or infinity in classifier\.bias"
    ):
        CrossEncoder(model=str(tmp_path / "nan"))(["a"], ["dog"])


@pytest.mark.parametrize("damage", ["no database", "one byte", "another table"])
def test_pair_cache_replaces_damaged_database_and_warns(estimators, fresh_cache, caplog, damage):
    first = estimators["cross"](["a", "cat"], ["dog"])
    (file,) = fresh_cache.rglob("*.sqlite")
    whole = file.read_bytes()
    assert estimators["cross"](["a", "cat"], ["dog"]).equal(first)
    assert not caplog.messages
    if damage == "no database":
        file.write_bytes(b"no database" * 1000)
    elif damage == "another table":
        file.write_bytes(
            whole.replace(b"relevance BLOB", b"relevancf BLOB").replace(b"pair BLOB", b"peir BLOB")
        )
    else:
        file.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    assert estimators["cross"](["a", "cat"], ["dog"]).equal(first)
    (line,) = caplog.messages
    assert line.startswith(f"{file} is damaged and is computed again: ")
    assert estimators["cross"](["a", "cat"], ["dog"]).equal(first)
    assert len(caplog.messages) == 1


def test_pair_cache_reports_unwritable_folder(estimators, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file in its place")
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        StorageError, match=r"sqlite cannot be written: (Not a directory|File exists)"
    ):
        estimators["cross"](["a"], ["dog"])


@pytest.mark.parametrize(
    "spec",
    [
        "CoarseToFine(threshold=1.5)",
        "CoarseToFine(fine='CoarseToFine()')",
        "CoarseToFine(semantics='code')",
        "CBoW(weighting='nouns')",
        "CBoW(removed_components=-1)",
        "CrossEncoder()",
        "CrossEncoder(model='x', batch_size=0)",
        "MatrixRelevance()",
    ],
)
def test_estimators_reject_invalid_settings(spec):
    with pytest.raises(SpecError):
        parse(spec, CATALOG)
