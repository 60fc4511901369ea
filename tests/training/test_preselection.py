"""The bank of a costly score: preselected by a cheap one, exact on what is preselected, and exact altogether where that is everything."""

import pytest
import torch

from visavis.errors import SpecError, VisavisError
from visavis.models.base import evaluating
from visavis.progress import Silent
from visavis.supervision import BankSupervision
from visavis.supervision.preselection import pooled
from visavis.training.context import training_context
from visavis.training.data_module import prepare
from visavis.training.recipe import build_recipe
from visavis.training.schedule import make_optimizer
from visavis.types import Encoded

RECIPE = {
    "name": "tiny",
    "visual": {"tower": "scenes", "view": "grid"},
    "text": {"tower": "vocabulary", "min_count": 1},
    "model": {"kind": "SCAN", "width": 16, "word_width": 8},
    "phases": [{"epochs": 1, "objective": "AOQ()", "supervision": "BankSupervision(size=3)"}],
}


@pytest.fixture(scope="module")
def trained(scenes):
    recipe = build_recipe(RECIPE | {"data": {"path": str(scenes)}}, {}, "recipe")
    return recipe, *prepare(recipe, Silent())


def lists(trained, supervision, memory=""):
    recipe, data_module, matcher = trained
    train, val = (data_module.loader(data_module.data.split(name)) for name in ("train", "val"))
    recipe = recipe.model_copy(update={"memory": memory})
    supervision.begin_phase(training_context(recipe, recipe.phases[0], matcher, make_optimizer(matcher, recipe.phases[0]), train, val), {})
    return supervision.state_dict()


def test_what_is_preselected_is_listed_by_the_score_itself(trained):
    """By plain loops over all pairs: the five wrong ones of the highest cosine of means, the three of the highest score among these."""
    _, data_module, matcher = trained
    train = data_module.data.split("train")
    with evaluating(matcher), torch.no_grad():
        visual, text = data_module.encode(matcher, train)
        scores = matcher.score(visual, text)
        regions = torch.stack([torch.nn.functional.normalize(rows.mean(0), dim=0) for rows in visual.vectors])
        words = [rows[mask].mean(0) for rows, mask in zip(text.vectors, text.mask, strict=True)]
        cosines = regions @ torch.stack([torch.nn.functional.normalize(word, dim=0) for word in words]).T
    own = torch.arange(len(train.images))[:, None] == torch.from_numpy(train.image_of)
    found = lists(trained, BankSupervision(size=3, preselect=5))
    for name, cheap, exact, right in (("texts", cosines, scores, own), ("images", cosines.T, scores.T, own.T)):
        for query, listed in enumerate(found[f"train.{name}"].tolist()):
            near = cheap[query].masked_fill(right[query], -torch.inf).topk(5).indices
            assert listed == near[exact[query, near].topk(3).indices].tolist()


def test_all_preselected_is_exact_whatever_the_memory(trained):
    exact = lists(trained, BankSupervision(size=3))
    everything = lists(trained, BankSupervision(size=3, preselect=10**6))
    some = lists(trained, BankSupervision(size=3, preselect=9))
    little = lists(trained, BankSupervision(size=3, preselect=9), memory="300KiB")
    assert all(torch.equal(exact[name], everything[name]) for name in exact)
    assert all(torch.equal(some[name], little[name]) for name in exact)
    assert any(not torch.equal(exact[name], some[name]) for name in exact)
    with pytest.raises(VisavisError, match="scoring one pair takes"):
        lists(trained, BankSupervision(size=3, preselect=9), memory="2KiB")


def test_a_preselection_below_the_size_is_refused():
    with pytest.raises(SpecError, match=r"preselect is 5, expected 0 for all, or at least size"):
        BankSupervision(size=9, preselect=5)


def test_named_parts_are_compared_by_name_and_sides_without_any_are_refused():
    both = Encoded({"fragments": torch.rand(3, 4, 5), "whole": torch.rand(3, 5)}, {"fragments": torch.ones(3, 4, dtype=torch.bool)})
    visual, _ = pooled(both, both[:2])
    parts = [both.vectors["fragments"].mean(1), both.vectors["whole"]]
    expected = sum(torch.nn.functional.cosine_similarity(part[:, None], part, dim=-1) for part in parts) / 2
    torch.testing.assert_close(visual @ visual.T, expected)
    with pytest.raises(VisavisError, match="which have no common width here"):
        pooled(both, Encoded(torch.rand(2, 6)))
