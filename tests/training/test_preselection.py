"""Preselection of offline negatives by a cheap score."""

import pytest
import torch

from visavis.core.encoded import Encoded
from visavis.core.errors import SpecError, VisavisError
from visavis.models.batch_encoding import evaluation_mode
from visavis.training.optimizer import make_optimizer
from visavis.training.recipes.recipe import build_recipe
from visavis.training.supervision import OfflineNegativeSupervision
from visavis.training.supervision.candidate_scores import mean_pooled
from visavis.training.train_step import training_context
from visavis.training.training_run import prepare_training

RECIPE = {
    "name": "tiny",
    "visual": {"encoder": "scenes", "granularity": "regions"},
    "text": {"encoder": "vocabulary", "min_count": 1},
    "model": {"kind": "SCAN", "embedding_dim": 16, "word_dim": 8},
    "phases": [
        {"epochs": 1, "objective": "AOQ()", "supervision": "OfflineNegativeSupervision(size=3)"}
    ],
}


@pytest.fixture(scope="module")
def trained(scenes):
    recipe = build_recipe(RECIPE | {"data": {"path": str(scenes)}}, {}, "recipe")
    return recipe, *prepare_training(recipe)


def lists(trained, supervision, memory=""):
    recipe, data_module, matcher = trained
    train, val = (data_module.loader(data_module.data.split(name)) for name in ("train", "val"))
    recipe = recipe.model_copy(update={"memory": memory})
    supervision.begin_phase(
        training_context(
            recipe, recipe.phases[0], matcher, make_optimizer(matcher, recipe.phases[0]), train, val
        ),
        {},
    )
    return supervision.state_dict()


def test_preselected_negatives_are_ranked_by_score(trained):
    """Plain loops select the five negatives of the highest mean cosine, then the three of the
    highest score among them.
    """
    _, data_module, matcher = trained
    train = data_module.data.split("train")
    with evaluation_mode(matcher), torch.no_grad():
        visual, text = data_module.encode(matcher, train)
        scores = matcher.score(visual, text)
        regions = torch.stack(
            [torch.nn.functional.normalize(rows.mean(0), dim=0) for rows in visual.vectors]
        )
        words = [rows[mask].mean(0) for rows, mask in zip(text.vectors, text.mask, strict=True)]
        cosines = (
            regions @ torch.stack([torch.nn.functional.normalize(word, dim=0) for word in words]).T
        )
    own = torch.arange(len(train.images))[:, None] == torch.from_numpy(train.image_of)
    found = lists(trained, OfflineNegativeSupervision(size=3, preselect=5))
    for name, cheap, exact, right in (
        ("texts", cosines, scores, own),
        ("images", cosines.T, scores.T, own.T),
    ):
        for query, listed in enumerate(found[f"train.{name}"].tolist()):
            near = cheap[query].masked_fill(right[query], -torch.inf).topk(5).indices
            assert listed == near[exact[query, near].topk(3).indices].tolist()


def test_preselection_of_all_is_exact_for_any_memory(trained):
    exact = lists(trained, OfflineNegativeSupervision(size=3))
    everything = lists(trained, OfflineNegativeSupervision(size=3, preselect=10**6))
    some = lists(trained, OfflineNegativeSupervision(size=3, preselect=9))
    little = lists(trained, OfflineNegativeSupervision(size=3, preselect=9), memory="300KiB")
    assert all(torch.equal(exact[name], everything[name]) for name in exact)
    assert all(torch.equal(some[name], little[name]) for name in exact)
    assert any(not torch.equal(exact[name], some[name]) for name in exact)
    with pytest.raises(VisavisError, match=r"memory: expected at least .* to score one pair"):
        lists(trained, OfflineNegativeSupervision(size=3, preselect=9), memory="2KiB")


def test_preselection_below_size_is_rejected():
    with pytest.raises(SpecError, match=r"preselect: expected 0 for all, or at least size, got 5"):
        OfflineNegativeSupervision(size=9, preselect=5)


def test_mean_pooled_compares_common_parts():
    both = Encoded(
        {"fragments": torch.rand(3, 4, 5), "whole": torch.rand(3, 5)},
        {"fragments": torch.ones(3, 4, dtype=torch.bool)},
    )
    visual, _ = mean_pooled(both, both[:2])
    parts = [both.vectors["fragments"].mean(1), both.vectors["whole"]]
    expected = (
        sum(torch.nn.functional.cosine_similarity(part[:, None], part, dim=-1) for part in parts)
        / 2
    )
    torch.testing.assert_close(visual @ visual.T, expected)
    with pytest.raises(
        VisavisError, match="expected regions and words with the same number of dimensions"
    ):
        mean_pooled(both, Encoded(torch.rand(2, 6)))
