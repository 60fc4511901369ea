"""Errors, specs, Encoded and Dataset: laws, then single cases."""

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

from visavis.core import errors
from visavis.core.encoded import Encoded, concatenate, unit_rows
from visavis.core.errors import (
    DataError,
    MissingExtra,
    SpecError,
    VisavisError,
    suggest_name,
)
from visavis.core.fields import UnitFloat, require_field, validate_fields, validate_int
from visavis.core.spec import parse
from visavis.data.dataset import Dataset
from visavis.data.image_file import ByteRange, Image
from visavis.papers.relevance.base import CosineRelevance
from visavis.training.supervision.candidate_scores import _part_means

# errors


def test_errors_are_visavis_errors_in_the_class_tree():
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, VisavisError)
    ]
    assert len(kinds) == 13
    assert all(kind.__name__ in errors.__doc__ for kind in kinds)
    assert issubclass(VisavisError, ValueError)


def test_missing_extra_names_the_command_to_install():
    assert str(MissingExtra("pandas", "notebook", "A frame")) == (
        "A frame needs the package pandas, which is not installed: run pip install "
        "'visavis[notebook]'."
    )


def test_suggest_name_ignores_case():
    assert suggest_name("UNIFIED", ["Unified", "VLC"]) == "did you mean Unified?"
    assert suggest_name("zzz", ["b", "a"]) == "known: a, b."
    assert suggest_name("zzz", []) == "known: nothing."


# spec


@dataclass(frozen=True, kw_only=True)
class Sample:
    margin: float = 0.2
    count: int = 3
    name: str = "a"
    hard: bool = False
    share: UnitFloat = 0.5
    mode: Literal["paper", "reference"] = "paper"
    limit: float | None = None
    levels: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        validate_fields(self)
        require_field(self.count >= 0, self, "count", "at least 0")


finite = st.floats(allow_nan=False, allow_infinity=False)
samples = st.builds(
    Sample,
    margin=finite,
    count=st.integers(0, 2**32 - 1),
    name=st.text(),
    hard=st.booleans(),
    mode=st.sampled_from(["paper", "reference"]),
    limit=st.none() | finite,
    levels=st.lists(finite, max_size=4).map(tuple),
)


@given(samples)
def test_spec_round_trip(sample):
    assert parse(repr(sample), [Sample]) == sample


@given(st.text())
def test_parse_accepts_or_rejects_any_text(text):
    with contextlib.suppress(SpecError):
        assert isinstance(parse(text, [Sample]), Sample)


def test_equal_specs_parse_to_equal_values():
    assert parse("Sample", [Sample]) == parse(" Sample() ", [Sample]) == Sample()
    assert parse("Sample(margin=1, levels=[1, 2])", [Sample]) == Sample(
        margin=1.0, levels=(1.0, 2.0)
    )
    assert isinstance(Sample(margin=1).margin, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Sampel()", "'Sampel' in 'Sampel()' is not in the catalog: did you mean Sample?"),
        ("Sample(marjin=1)", "Sample has no field 'marjin': did you mean margin?"),
        ("Sample(0.3)", "'Sample(0.3)' has a value without a name. Write field=value."),
        ("Sample(margin=1", "'Sample(margin=1' is not of the form Name(field=value, ...)."),
        ("a.Sample()", "'a.Sample()' is not of the form Name(field=value, ...)."),
        ("Sample(**x)", "'Sample(**x)' uses **. Write field=value."),
        ("Sample(margin='x')", "Sample.margin: expected a finite number, got 'x'."),
        ("Sample(margin=1e999)", "Sample.margin: expected a finite number, got inf."),
        ("Sample(count=1.5)", "Sample.count: expected an integer, got 1.5."),
        (
            f"Sample(count={2**32})",
            "Sample.count: expected an integer up to 4,294,967,295, got 4294967296.",
        ),
        (f"Other{'(' * 80}", f"'Other{'(' * 72}...' is not of the form Name(field=value, ...)."),
        ("Sample(count=True)", "Sample.count: expected an integer, got True."),
        ("Sample(share='x')", "Sample.share: expected a finite number, got 'x'."),
        ("Sample(share=2)", "Sample.share: expected a number <= 1, got 2."),
        ("Sample(hard=1)", "Sample.hard: expected True or False, got 1."),
        ("Sample(name=1)", "Sample.name: expected a text in quotes, got 1."),
        ("Sample(mode='code')", "Sample.mode: expected 'paper' or 'reference', got 'code'."),
        ("Sample(levels=[1, 'x'])", "Sample.levels.1: expected a finite number, got 'x'."),
        ("Sample(limit='x')", "Sample.limit: expected a finite number, or None, got 'x'."),
        ("Sample(levels=1)", "Sample.levels: expected a list, got 1."),
        ("Sample(count=-1)", "Sample.count: expected at least 0, got -1. Change count."),
    ],
)
def test_parse_reports_invalid_specs(text, message):
    with pytest.raises(SpecError) as error:
        parse(text, [Sample])
    assert str(error.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "Sample(margin=1, margin=2)",
        f"Sample(margin={'9' * 400})",
        f"Sample(margin={'-' * 5000}1)",
        "Sample(name='\udcff')",
    ],
    ids=["a field twice", "a number too large", "nested too deeply", "not UTF-8"],
)
def test_parse_rejects_extreme_specs(text):
    with pytest.raises(SpecError):
        parse(text, [Sample])


def test_validate_int_limits_numbers():
    assert [validate_int(number, "top") for number in (0, 7, np.int64(7))] == [0, 7, 7]
    assert [validate_int(number, "top", 1, 4) for number in (1, 4)] == [1, 4]
    # Larger integers are not exact in comparisons with floats.
    assert validate_int(10**30, "top") == 2**53
    for number, limits, message in [
        (-1, (), "top: expected an integer >= 0, got -1. Set top to 0 or more."),
        (0, (1,), "top: expected an integer >= 1, got 0. Set top to 1 or more."),
        (
            5,
            (1, 4),
            "top: expected an integer from 1 to 4, got 5. Set top to a number in this range.",
        ),
        (2.0, (), "top: expected an integer >= 0, got 2.0. Set top to 0 or more."),
        (True, (), "top: expected an integer >= 0, got True. Set top to 0 or more."),
    ]:
        with pytest.raises(SpecError) as error:
            validate_int(number, "top", *limits)
        assert str(error.value) == message


def test_parse_never_evaluates_code():
    with pytest.raises(SpecError, match="is not a plain value"):
        parse("Sample(name=__import__('os').getcwd())", [Sample])


# types


def ragged(lengths: list[int]) -> list[Encoded]:
    """One block per length: two items with that number of words. The last word of the second item
    is masked.
    """
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
    assert all(
        torch.equal(again.vectors[name], parts[name]) and torch.equal(again.mask[name], masks[name])
        for name in parts
    )
    assert torch.equal(again.weights, items.weights)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e19, 1e30])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unit_rows_are_those_of_smaller_vectors(scale, dim):
    rows = torch.randn(3, 4, 5)
    torch.testing.assert_close(
        unit_rows(rows * scale, dim), torch.nn.functional.normalize(rows, dim=dim)
    )


def test_vectors_of_large_norm_are_compared_exactly():
    vectors = torch.randn(4, 6)
    relevance, large = (
        CosineRelevance.from_vectors(vectors),
        CosineRelevance.from_vectors(vectors * 1e30),
    )
    index = torch.arange(4)
    torch.testing.assert_close(large(index, index), relevance(index, index))
    means, large_means = (
        _part_means(Encoded({"a": part, "b": part.flip(0)}), ["a", "b"])
        for part in (vectors, vectors * 1e30)
    )
    torch.testing.assert_close(large_means, means)
    assert relevance(index, index).diagonal().min() > 0.99


def test_encoded_to_dtype_keeps_masks_and_token_ids():
    items = Encoded(
        {"x": torch.ones(2, 3), "ids": torch.ones(2, 3, dtype=torch.long)},
        {"x": torch.ones(2, 3, dtype=torch.bool)},
    )
    half = items.to(torch.bfloat16)
    assert (half.vectors["x"].dtype, half.vectors["ids"].dtype, half.mask["x"].dtype) == (
        torch.bfloat16,
        torch.int64,
        torch.bool,
    )


# data sets

relations = st.integers(1, 6).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=12))
)


def world(num_images: int, image_of: list[int]) -> Dataset:
    images = tuple(Image(f"{i}.jpg", "train" if i % 2 == 0 else "test") for i in range(num_images))
    return Dataset(
        "world",
        images,
        tuple(f"caption {j}" for j in range(len(image_of))),
        np.array(image_of, dtype=np.int64),
    )


@given(relations)
def test_captions_of_inverts_image_of(relation):
    data = world(*relation)
    assert len(data.captions_of) == len(data.images)
    assert sorted(
        (int(j), i) for i, captions in enumerate(data.captions_of) for j in captions
    ) == list(enumerate(relation[1]))


@given(relations)
def test_splits_partition_images_and_captions(relation):
    data = world(*relation)
    parts = [data.split(name) for name in data.splits]
    assert sorted(row for part in parts for row in part.image_rows) == list(range(len(data.images)))
    assert sorted(row for part in parts for row in part.caption_rows) == list(
        range(len(data.captions))
    )
    for part in parts:
        for caption, image, row in zip(
            part.captions, part.image_of, part.caption_rows, strict=True
        ):
            assert part.images[image] == data.images[relation[1][row]]
            assert caption == data.captions[row]


def test_take_of_a_split_keeps_rows_of_the_data_set():
    data = world(6, [0, 1, 2, 3, 4, 5]).split("train").take(np.array([2, 0]))
    assert data.image_rows.tolist() == data.caption_rows.tolist() == [4, 0]
    assert data.captions == ("caption 4", "caption 0")


def test_split_suggests_the_nearest_name():
    with pytest.raises(
        DataError, match=r"expected one of its splits \(.*\), got trian\. Use train\.$"
    ):
        world(2, [0, 1]).split("trian")


def test_fingerprint_changes_with_the_content():
    base = world(2, [0, 1])
    others = [
        world(3, [0, 1]),
        world(2, [1, 0]),
        world(2, [0, 1, 1]),
        Dataset("world", base.images, ("a", "b"), base.image_of),
    ]
    assert base.fingerprint == world(2, [0, 1]).fingerprint
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_byte_range_reads_part_of_a_file(tmp_path: Path):
    (tmp_path / "shard.tar").write_bytes(b"headIMAGEtail")
    assert ByteRange(tmp_path / "shard.tar", offset=4, size=5).read() == b"IMAGE"
    assert ByteRange(tmp_path / "shard.tar").read() == b"headIMAGEtail"


def test_image_without_pixels_raises_data_error():
    with pytest.raises(DataError, match=r"image a\.jpg has no pixels"):
        Image("a.jpg", "train").open()
