"""Context, pooled grids and whitening of matchers of regions and words."""

import pytest
import torch
from torch.nn.functional import normalize

from visavis.core.encoded import Encoded
from visavis.core.errors import ShapeError, SpecError
from visavis.models import CATALOG
from visavis.models.layers import pool_grid

MAXSIM = CATALOG["MaxSim"]
SIZES = {
    "visual_input_dim": 5,
    "text_input_dim": 4,
    "text_granularity": "words",
    "embedding_dim": 6,
}


def build(**fields):
    return MAXSIM(MAXSIM.Config(**SIZES, **fields)).eval()


def words(lengths, dim=4):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Encoded(torch.randn(len(lengths), max(lengths), dim), mask)


def test_pool_grid_averages_neighboring_regions():
    regions = torch.arange(16.0).view(1, 16, 1)
    assert pool_grid(regions, 2).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    torch.testing.assert_close(pool_grid(regions, 4), regions)
    torch.testing.assert_close(pool_grid(regions, 1)[:, 0], regions.mean(1))


@pytest.mark.parametrize(("count", "size"), [(12, 2), (9, 4)])
def test_pool_grid_rejects_other_layouts(count, size):
    with pytest.raises(
        ShapeError,
        match=f"expected a square grid of at least {size} x {size} regions, got {count} regions",
    ):
        pool_grid(torch.zeros(1, count, 3), size)


def test_context_is_a_unit_vector_added_to_unit_fragments():
    model, text, images = build(context_dim=7), words([3, 2]), Encoded(torch.randn(2, 9, 5))
    for encoded, items, linear, context in (
        (model.encode_visual(images), images, model.visual, model.visual_context),
        (model.encode_text(text), text, model.text, model.text_context),
    ):
        for number in range(2):
            kept = slice(None) if items.mask is None else items.mask[number]
            fragments = items.vectors[number][kept]
            local = normalize(
                torch.nn.functional.linear(fragments, linear.weight, linear.bias), dim=-1
            )
            whole = normalize(context(fragments.mean(0, keepdim=True)), dim=-1)
            torch.testing.assert_close(
                encoded.vectors[number][kept], normalize(local + whole, dim=-1)
            )


def test_context_ignores_padding():
    model, text = build(context_dim=7, whiten_text=True), words([3, 2])
    alone = model.encode_text(Encoded(text.vectors[1:, :2], text.mask[1:, :2]))
    torch.testing.assert_close(model.encode_text(text).vectors[1, :2], alone.vectors[0])


def test_region_grid_pools_before_the_projection():
    model, images = build(region_grid=2), torch.randn(3, 16, 5)
    torch.testing.assert_close(
        model.encode_visual(Encoded(images)).vectors,
        build_like(model).encode_visual(Encoded(pool_grid(images, 2))).vectors,
    )


def build_like(model):
    other = build()
    other.load_state_dict(model.state_dict())
    return other


def test_context_belongs_to_the_part_of_its_side():
    parts = build(context_dim=7, whiten_text=True).parameters_by_part()
    assert {name.split(".")[0] for name, _ in parts["visual"]} == {"visual", "visual_context"}
    assert {name.split(".")[0] for name, _ in parts["text"]} == {"text", "text_context"}


@pytest.mark.parametrize("fields", [{"context_dim": 7}, {"whiten_text": True}])
def test_context_and_whitening_need_word_vectors(fields):
    with pytest.raises(SpecError, match='unless texts are "words"'):
        MAXSIM.Config(**SIZES | {"text_granularity": "tokens"}, **fields)
