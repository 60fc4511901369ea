"""What every matcher keeps: its views, its folder, and one sentence for what does not fit."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from torch import nn

from visavis import spec, storage
from visavis.engine import PairLoss
from visavis.errors import RunError, ShapeError, SpecError, VisavisError
from visavis.measured_cost import measure_cost
from visavis.memory import declared_cost
from visavis.models import BFAN, CATALOG, CE, CLIP, MMT, SCAN, SGRAF, VSRN, XVLM, Heads, MaxSim, VSEInfinity, VSEPlusPlus
from visavis.models.base import build_with_weights, vectors
from visavis.objectives import Unified
from visavis.types import Encoded

CONFIGS = {
    Heads: Heads.Config(visual_width=6, text_width=3, width=4, hidden=5),
    VSEPlusPlus: VSEPlusPlus.Config(visual_width=6, text_view="tokens", text_width=20, width=4, word_width=5),
    VSEInfinity: VSEInfinity.Config(visual_width=6, text_view="tokens", text_width=20, width=4, word_width=5),
    VSRN: VSRN.Config(visual_width=6, text_view="tokens", text_width=20, width=4, word_width=5, steps=2),
    SCAN: SCAN.Config(visual_width=6, text_view="tokens", text_width=20, width=4, word_width=5),
    BFAN: BFAN.Config(visual_width=6, text_view="tokens", text_width=20, width=4, word_width=5),
    SGRAF: SGRAF.Config(visual_width=6, text_view="tokens", text_width=20, width=4, word_width=5, regions=3, similarity_width=6),
    CE: CE.Config(visual_width=6, experts={"face": 4, "audio": 2}, text_view="words", text_width=3, width=4, clusters={"audio": 3}),
    MMT: MMT.Config(visual_width=6, experts={"face": 4, "audio": 2}, text_view="tokens", text_width=20, width=4, word_width=5, hidden=5),
    MaxSim: MaxSim.Config(visual_width=6, text_view="tokens", text_width=20, width=4, word_width=5),
}
every_matcher = pytest.mark.parametrize("kind", CATALOG.values(), ids=lambda kind: kind.__name__)
of_own_width = pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)


@pytest.fixture
def config(kind, dual_encoders, towers):
    if kind is XVLM:
        parts = {"backbone": str(towers / "vit"), "text_backbone": str(towers / "bert")}
        return XVLM.Config(**parts, visual_width=8, text_width=23, width=6, fusion_layers=2)
    return CLIP.Config(backbone=str(dual_encoders / "clip"), visual_width=10, text_width=14) if kind is CLIP else CONFIGS[kind]


@every_matcher
def test_a_folder_gives_the_same_matcher_back(kind, config, tmp_path):
    matcher = kind(config)
    matcher.save_pretrained(tmp_path, vocabulary=["a", "b"])
    saved = json.loads((tmp_path / "config.json").read_text())
    assert CATALOG[saved["kind"]] is kind
    assert saved["vocabulary"] == ["a", "b"]
    again = build_with_weights(kind, spec.build(kind.Config, saved["architecture"]), tmp_path)
    assert again.config == matcher.config
    assert matcher.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(ours, again.state_dict()[name]) for name, ours in matcher.state_dict().items())


@of_own_width
def test_weights_of_another_width_or_version_are_named(kind, tmp_path):
    matcher = kind(CONFIGS[kind])
    matcher.save_pretrained(tmp_path)
    wider = spec.build(kind.Config, vars(CONFIGS[kind]) | {"width": 8})
    with pytest.raises(
        RunError, match=r"model\.safetensors: .* is float32 of shape \[.*\], expected float32 of shape \[.*\]: the file is incomplete"
    ):
        build_with_weights(kind, wider, tmp_path)
    state = matcher.state_dict()
    name = min(state)
    storage.write_tensors(tmp_path / "less" / "model.safetensors", {key: state[key] for key in state if key != name})
    with pytest.raises(RunError, match=rf"{re.escape(name)} is missing, expected float32 of shape \["):
        build_with_weights(kind, CONFIGS[kind], tmp_path / "less")
    storage.write_tensors(tmp_path / "more" / "model.safetensors", state | {"a.stranger": torch.ones(2)})
    with pytest.raises(RunError, match=r"a\.stranger is float32 of shape \[2\], expected none of that name"):
        build_with_weights(kind, CONFIGS[kind], tmp_path / "more")


def test_a_folder_without_weights_is_one_sentence(tmp_path):
    with pytest.raises(VisavisError, match=r"model\.safetensors"):
        build_with_weights(Heads, CONFIGS[Heads], tmp_path)


WRONG_VIEWS = {
    "images": (Heads, {"visual_view": "grid"}, "Heads cannot read images as grid: expected pooled or pixels."),
    "texts": (VSEPlusPlus, {"text_view": "words"}, "VSEPlusPlus cannot read texts as words: expected tokens."),
    "pooled texts": (VSEInfinity, {"text_view": "pooled"}, "VSEInfinity cannot read texts as pooled: expected words or tokens."),
}


@pytest.mark.parametrize("case", WRONG_VIEWS)
def test_a_view_that_a_matcher_cannot_read(case):
    kind, changes, sentence = WRONG_VIEWS[case]
    with pytest.raises(ShapeError, match=f"^{re.escape(sentence)}$"):
        kind(spec.build(kind.Config, vars(CONFIGS[kind]) | changes))


def test_a_config_refuses_what_is_no_value_of_its_fields():
    with pytest.raises(SpecError, match=r"visual_view is 'pooled', expected 'grid'"):
        VSEInfinity.Config(visual_width=6, text_width=3, visual_view="pooled")
    with pytest.raises(SpecError, match="width is 'wide', expected a whole number"):
        Heads.Config(visual_width=6, text_width=3, width="wide")


NUMBERS = [
    (kind, name)
    for kind in CATALOG.values()
    for name, hint in get_type_hints(kind.Config).items()
    if hint in (int, float, dict[str, int], tuple[float, ...])
]
every_number = pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[f"{kind.__name__}.{name}" for kind, name in NUMBERS])


def changed(config, name, number):
    """A config with another number, or all those of a table or list."""
    given = getattr(config, name)
    value = dict.fromkeys(given, number) if isinstance(given, dict) else [number] * len(given) if isinstance(given, tuple) else number
    return replace(config, **{name: value})


def items(config, side) -> Encoded:
    """Three random ones of a side, as its view gives them."""
    view, width, mask = getattr(config, f"{side}_view"), getattr(config, f"{side}_width"), torch.ones(3, 4, dtype=torch.bool)
    if view == "experts":
        parts = {name: torch.randn(3, 4, expert) for name, expert in config.experts.items()}
        return Encoded(parts, dict.fromkeys(parts, mask))
    if view == "tokens":
        return Encoded(torch.randint(4, width, (3, 4)), mask)
    edge = 32 if isinstance(config, CLIP.Config) else 16
    shape = {"pixels": (3, edge, edge), "pooled": (width,), "grid": (3, width), "words": (4, width)}[view]
    return Encoded(torch.randn(3, *shape), mask if view == "words" else None)


@every_number
def test_what_cannot_be_a_number_of_a_model_is_refused_by_the_model_and_its_key(kind, name, config):
    for number in (-1, math.nan, math.inf):
        with pytest.raises(SpecError, match=rf"^{kind.__name__}: {name} is .+, expected .+\.$"):
            changed(config, name, number)


@every_number
def test_0_is_refused_or_makes_a_model_that_learns_and_scores(kind, name, config):
    try:
        config = changed(config, name, 0)
    except SpecError:
        return
    matcher, visual, text = kind(config), items(config, "visual"), items(config, "text")
    PairLoss(Unified(), score=matcher.score)(matcher.encode_visual(visual), matcher.encode_text(text)).backward()
    assert all(parameter.grad.isfinite().all() for parameter in matcher.parameters() if parameter.grad is not None)
    matcher.eval()
    assert matcher.score(matcher.encode_visual(visual), matcher.encode_text(text)).isfinite().all()


def test_the_narrowest_map_of_features_has_a_hidden_unit():
    config = VSEInfinity.Config(visual_width=6, text_view="words", text_width=3, width=1)
    matcher = VSEInfinity(config)
    visual, text = matcher.encode_visual(items(config, "visual")), matcher.encode_text(items(config, "text"))
    assert matcher.score(visual, text).shape == (3, 3)


def test_named_parts_are_no_single_vectors():
    with pytest.raises(ShapeError, match=r"^expected one tensor of vectors, found the named parts face, audio\.$"):
        vectors(Encoded({"face": torch.eye(2), "audio": torch.eye(2)}))


@every_matcher
def test_every_parameter_is_in_one_part_in_the_order_of_the_model(kind, config):
    matcher = kind(config)
    by_part = matcher.parameters_by_part()
    assert set(by_part) <= set(matcher.parts())
    names = [name for parameters in by_part.values() for name, _ in parameters]
    assert sorted(names) == sorted(name for name, _ in matcher.named_parameters())
    order = {name: place for place, (name, _) in enumerate(matcher.named_parameters())}
    for parameters in by_part.values():
        places = [order[name] for name, _ in parameters]
        assert places == sorted(places)


class Tempered(Heads):
    """The opposite of the cosine, times a learned number."""

    def __init__(self, config):
        super().__init__(config)
        self.sharpness = nn.Parameter(torch.tensor(-3.0))

    def score(self, visual, text):
        return self.sharpness * super().score(visual, text)


class Whole(Tempered):
    def parts(self):
        return super().parts() | {"sharpness": [self.sharpness]}


class Twice(Whole):
    def parts(self):
        return super().parts() | {"all": [self.text]}


def test_a_parameter_in_no_part_or_in_two_is_an_error_of_the_author():
    assert [name for name, _ in Whole(CONFIGS[Heads]).parameters_by_part()["sharpness"]] == ["sharpness"]
    with pytest.raises(VisavisError, match=r"^Tempered\.parts\(\) leaves out sharpness: name the module"):
        Tempered(CONFIGS[Heads]).parameters_by_part()
    with pytest.raises(VisavisError, match=r"^Twice\.parts\(\) names a parameter in text and in all: expected one part"):
        Twice(CONFIGS[Heads]).parameters_by_part()


def test_only_an_inherited_score_is_the_cosine_and_costs_what_a_cosine_does():
    visual, text = Encoded(torch.randn(5, 4)), Encoded(torch.randn(5, 4))
    plain, tempered = Heads(CONFIGS[Heads]), Whole(CONFIGS[Heads])
    assert plain.score_is_cosine
    assert not tempered.score_is_cosine
    torch.testing.assert_close(tempered.score_pairs(visual, text), tempered.score(visual, text).diagonal())
    assert tempered.score_pairs(visual[:0], text[:0]).shape == (0,)
    assert declared_cost(tempered.score, visual, text) is None
    for training in (False, True):
        said = plain.score_cost(visual, text).block(training=training)
        assert said.pair == measure_cost(plain.score, visual, text, training=training).pair
