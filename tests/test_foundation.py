"""Errors, specs, storage, Encoded and Dataset: laws first, then the accidents they are there for."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis import errors
from visavis.data.dataset import Bytes, Dataset, Image
from visavis.errors import DataError, MissingExtra, SpecError, VisavisError, nearest
from visavis.spec import Share, check_fields, describe, parse, require
from visavis.types import Encoded, concatenate

# errors


def test_every_error_is_a_visavis_error_drawn_in_the_tree():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, VisavisError)]
    assert len(kinds) == 10
    assert all(kind.__name__ in errors.__doc__ for kind in kinds)
    assert issubclass(VisavisError, ValueError)


def test_missing_extra_says_what_to_install():
    assert str(MissingExtra("matplotlib", "report", "A report")) == (
        "A report needs the package matplotlib, which is not installed: run pip install 'visavis[report]'."
    )


def test_nearest_ignores_case_and_lists_what_is_known():
    assert nearest("UNIFIED", ["Unified", "VLC"]) == "did you mean Unified?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b."
    assert nearest("zzz", []) == "known: nothing."


# spec


@dataclass(frozen=True, kw_only=True)
class Sample:
    margin: float = 0.2
    count: int = 3
    name: str = "a"
    hard: bool = False
    share: Share = 0.5
    mode: Literal["paper", "reference"] = "paper"
    limit: float | None = None
    levels: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.count >= 0, self, "count", "at least 0")


finite = st.floats(allow_nan=False, allow_infinity=False)
samples = st.builds(
    Sample,
    margin=finite,
    count=st.integers(min_value=0),
    name=st.text(),
    hard=st.booleans(),
    mode=st.sampled_from(["paper", "reference"]),
    limit=st.none() | finite,
    levels=st.lists(finite, max_size=4).map(tuple),
)


@given(samples)
def test_a_spec_comes_back_as_the_same_value(sample):
    assert parse(describe(sample), [Sample]) == sample
    assert parse(repr(sample), [Sample]) == sample


@given(st.text())
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(SpecError):
        assert isinstance(parse(text, [Sample]), Sample)


def test_equal_specs_are_equal_values():
    assert parse("Sample", [Sample]) == parse(" Sample() ", [Sample]) == Sample()
    assert parse("Sample(margin=1, levels=[1, 2])", [Sample]) == Sample(margin=1.0, levels=(1.0, 2.0))
    assert isinstance(Sample(margin=1).margin, float)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Sampel()", "'Sampel' in 'Sampel()' is not in the catalog: did you mean Sample?"),
        ("Sample(marjin=1)", "Sample has no field 'marjin': did you mean margin?"),
        ("Sample(0.3)", "'Sample(0.3)' gives a value without its name: write field=value."),
        ("Sample(margin=1", "'Sample(margin=1' is not of the form Name(field=value, ...)."),
        ("a.Sample()", "'a.Sample()' is not of the form Name(field=value, ...)."),
        ("Sample(**x)", "'Sample(**x)': write field=value, not **."),
        ("Sample(margin='x')", "Sample: margin is 'x', expected a finite number."),
        ("Sample(margin=1e999)", "Sample: margin is inf, expected a finite number."),
        ("Sample(count=1.5)", "Sample: count is 1.5, expected a whole number."),
        ("Sample(count=True)", "Sample: count is True, expected a whole number."),
        ("Sample(share='x')", "Sample: share is 'x', expected a finite number."),
        ("Sample(share=2)", "Sample: share is 2, expected a share from 0 to 1."),
        ("Sample(hard=1)", "Sample: hard is 1, expected True or False."),
        ("Sample(name=1)", "Sample: name is 1, expected a text in quotes."),
        ("Sample(mode='code')", "Sample: mode is 'code', expected 'paper' or 'reference'."),
        ("Sample(levels=1)", "Sample: levels is 1, expected a list of values."),
        ("Sample(count=-1)", "Sample: count is -1, expected at least 0."),
    ],
)
def test_a_wrong_spec_is_refused_in_words(text, sentence):
    with pytest.raises(SpecError) as refused:
        parse(text, [Sample])
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "text",
    ["Sample(margin=1, margin=2)", f"Sample(margin={'9' * 400})", f"Sample(margin={'-' * 5000}1)", "Sample(name='\udcff')"],
    ids=["a field twice", "a number too large", "nested too deeply", "not UTF-8"],
)
def test_odd_specs_are_refused(text):
    with pytest.raises(SpecError):
        parse(text, [Sample])


def test_a_spec_is_never_evaluated():
    with pytest.raises(SpecError, match="is not a plain value"):
        parse("Sample(name=__import__('os').getcwd())", [Sample])


# types


def ragged(lengths: list[int]) -> list[Encoded]:
    """One block per length: two items of that many words, of which the second item's last is masked."""
    blocks = []
    for length in lengths:
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[1, -1] = False
        blocks.append(Encoded(torch.randn(2, length, 3), mask))
    return blocks


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_concatenate_pads_and_masks_ragged_blocks(lengths):
    blocks = ragged(lengths)
    whole = concatenate(blocks)
    assert whole.vectors.shape == (2 * len(lengths), max(lengths), 3)
    assert int(whole.mask.sum()) == sum(int(block.mask.sum()) for block in blocks)
    for i, (length, block) in enumerate(zip(lengths, blocks, strict=True)):
        piece = whole[2 * i : 2 * i + 2]
        assert torch.equal(piece.vectors[:, :length], block.vectors)
        assert not piece.vectors[:, length:].any()
        assert not piece.mask[:, length:].any()


def test_concatenate_is_the_inverse_of_slicing():
    parts = {"words": torch.randn(5, 4, 2), "scene": torch.randn(5, 3)}
    masks = {"words": torch.rand(5, 4) > 0.5, "scene": torch.ones(5, 1, dtype=torch.bool)}
    items = Encoded(parts, masks, torch.rand(5, 2))
    again = concatenate([items[:2], items[torch.tensor([2, 3, 4])]])
    assert len(again) == len(items) == 5
    assert all(torch.equal(again.vectors[name], parts[name]) and torch.equal(again.mask[name], masks[name]) for name in parts)
    assert torch.equal(again.weights, items.weights)


def test_a_dtype_reaches_numbers_but_neither_masks_nor_token_ids():
    items = Encoded({"x": torch.ones(2, 3), "ids": torch.ones(2, 3, dtype=torch.long)}, {"x": torch.ones(2, 3, dtype=torch.bool)})
    half = items.to(torch.bfloat16)
    assert (half.vectors["x"].dtype, half.vectors["ids"].dtype, half.mask["x"].dtype) == (torch.bfloat16, torch.int64, torch.bool)


# data sets

relations = st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=12)))


def world(num_images: int, image_of: list[int]) -> Dataset:
    images = tuple(Image(f"{i}.jpg", "train" if i % 2 == 0 else "test") for i in range(num_images))
    return Dataset("world", images, tuple(f"caption {j}" for j in range(len(image_of))), np.array(image_of, dtype=np.int64))


@given(relations)
def test_captions_of_turns_image_of_round(relation):
    data = world(*relation)
    assert len(data.captions_of) == len(data.images)
    assert sorted((int(j), i) for i, captions in enumerate(data.captions_of) for j in captions) == list(enumerate(relation[1]))


@given(relations)
def test_splits_share_out_every_image_and_caption(relation):
    data = world(*relation)
    parts = [data.split(name) for name in data.splits]
    assert sorted(row for part in parts for row in part.image_rows) == list(range(len(data.images)))
    assert sorted(row for part in parts for row in part.caption_rows) == list(range(len(data.captions)))
    for part in parts:
        for caption, image, row in zip(part.captions, part.image_of, part.caption_rows, strict=True):
            assert part.images[image] == data.images[relation[1][row]]
            assert caption == data.captions[row]


def test_rows_of_a_part_of_a_part_point_into_the_whole():
    data = world(6, [0, 1, 2, 3, 4, 5]).split("train").take(np.array([2, 0]))
    assert data.image_rows.tolist() == data.caption_rows.tolist() == [4, 0]
    assert data.captions == ("caption 4", "caption 0")


def test_an_unknown_split_is_named():
    with pytest.raises(DataError, match="data set world has no split trian: did you mean train"):
        world(2, [0, 1]).split("trian")


def test_the_fingerprint_changes_with_any_fact():
    base = world(2, [0, 1])
    others = [world(3, [0, 1]), world(2, [1, 0]), world(2, [0, 1, 1]), Dataset("world", base.images, ("a", "b"), base.image_of)]
    assert base.fingerprint == world(2, [0, 1]).fingerprint
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_bytes_of_an_archive_are_read_in_place(tmp_path: Path):
    (tmp_path / "shard.tar").write_bytes(b"headPICTUREtail")
    assert Bytes(tmp_path / "shard.tar", offset=4, size=7).read() == b"PICTURE"
    assert Bytes(tmp_path / "shard.tar").read() == b"headPICTUREtail"


def test_an_image_without_pixels_says_so():
    with pytest.raises(DataError, match=r"image a\.jpg has no pixels in this data set"):
        Image("a.jpg", "train").open()
