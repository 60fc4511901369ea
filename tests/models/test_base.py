"""Interface of matchers: granularities, model folders, and errors about what does not match."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from torch import nn

from visavis.core import spec, storage
from visavis.core.blocking import declared_cost, measure_score_cost
from visavis.core.encoded import Encoded
from visavis.core.errors import RunError, ShapeError, SpecError, VisavisError
from visavis.losses.pair_loss import PairLoss
from visavis.models import all_models, find_model
from visavis.models.base import load_matcher
from visavis.models.clip.model import CLIP
from visavis.models.embedding_model import EmbeddingModel
from visavis.models.image_text.cross_attention import BFAN, SCAN, MaxSim
from visavis.models.image_text.global_matchers import Heads, VSEInfinity, VSEPlusPlus
from visavis.objectives import Unified
from visavis.papers.models.expert_matchers import CE, MMT
from visavis.papers.models.sgraf import SGRAF
from visavis.papers.models.vsrn import VSRN
from visavis.papers.models.xvlm import XVLM

CONFIGS = {
    Heads: Heads.Config(visual_input_dim=6, text_input_dim=3, embedding_dim=4, hidden_dim=5),
    VSEPlusPlus: VSEPlusPlus.Config(
        visual_input_dim=6,
        text_granularity="tokens",
        text_input_dim=20,
        embedding_dim=4,
        word_dim=5,
    ),
    VSEInfinity: VSEInfinity.Config(
        visual_input_dim=6,
        text_granularity="tokens",
        text_input_dim=20,
        embedding_dim=4,
        word_dim=5,
    ),
    VSRN: VSRN.Config(
        visual_input_dim=6,
        text_granularity="tokens",
        text_input_dim=20,
        embedding_dim=4,
        word_dim=5,
        reasoning_steps=2,
    ),
    SCAN: SCAN.Config(
        visual_input_dim=6,
        text_granularity="tokens",
        text_input_dim=20,
        embedding_dim=4,
        word_dim=5,
    ),
    BFAN: BFAN.Config(
        visual_input_dim=6,
        text_granularity="tokens",
        text_input_dim=20,
        embedding_dim=4,
        word_dim=5,
    ),
    SGRAF: SGRAF.Config(
        visual_input_dim=6,
        text_granularity="tokens",
        text_input_dim=20,
        embedding_dim=4,
        word_dim=5,
        num_regions=3,
        similarity_dim=6,
    ),
    CE: CE.Config(
        visual_input_dim=6,
        experts={"face": 4, "audio": 2},
        text_granularity="words",
        text_input_dim=3,
        embedding_dim=4,
        netvlad_clusters={"audio": 3},
    ),
    MMT: MMT.Config(
        visual_input_dim=6,
        experts={"face": 4, "audio": 2},
        text_granularity="tokens",
        text_input_dim=20,
        embedding_dim=4,
        word_dim=5,
        hidden_dim=5,
    ),
    MaxSim: MaxSim.Config(
        visual_input_dim=6,
        text_granularity="tokens",
        text_input_dim=20,
        embedding_dim=4,
        word_dim=5,
    ),
}
every_matcher = pytest.mark.parametrize(
    "kind", all_models().values(), ids=lambda kind: kind.__name__
)
every_small_matcher = pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)


@pytest.fixture
def config(kind, dual_encoders, towers, request):
    if kind is EmbeddingModel:
        backbone = str(request.getfixturevalue("embedders") / "dense")
        return EmbeddingModel.Config(backbone=backbone, visual_input_dim=6, text_input_dim=14)
    if kind is XVLM:
        parts = {"backbone": str(towers / "vit"), "text_backbone": str(towers / "bert")}
        return XVLM.Config(
            **parts, visual_input_dim=8, text_input_dim=23, embedding_dim=6, fusion_layers=2
        )
    return (
        CLIP.Config(backbone=str(dual_encoders / "clip"), visual_input_dim=10, text_input_dim=14)
        if kind is CLIP
        else CONFIGS[kind]
    )


@every_matcher
def test_load_matcher_restores_config_and_weights(kind, config, tmp_path):
    matcher = kind(config)
    matcher.save_pretrained(tmp_path, vocabulary=["a", "b"])
    saved = json.loads((tmp_path / "config.json").read_text())
    assert find_model(saved["kind"]) is kind
    assert saved["vocabulary"] == ["a", "b"]
    again = load_matcher(kind, spec.build_object(kind.Config, saved["architecture"]), tmp_path)
    assert again.config == matcher.config
    assert matcher.state_dict().keys() == again.state_dict().keys()
    assert all(
        torch.equal(ours, again.state_dict()[name]) for name, ours in matcher.state_dict().items()
    )


@every_small_matcher
def test_load_matcher_names_weights_that_do_not_match(kind, tmp_path):
    matcher = kind(CONFIGS[kind])
    matcher.save_pretrained(tmp_path)
    wider = spec.build_object(kind.Config, vars(CONFIGS[kind]) | {"embedding_dim": 8})
    with pytest.raises(
        RunError,
        match=r"model\.safetensors: \S+ expected float32 of shape \[.*\], got float32 of shape \[.*\]",
    ):
        load_matcher(kind, wider, tmp_path)
    state = matcher.state_dict()
    name = min(state)
    storage.write_tensors(
        tmp_path / "less" / "model.safetensors", {key: state[key] for key in state if key != name}
    )
    with pytest.raises(
        RunError, match=rf"{re.escape(name)}: expected float32 of shape \[.*\], got no tensor"
    ):
        load_matcher(kind, CONFIGS[kind], tmp_path / "less")
    storage.write_tensors(
        tmp_path / "more" / "model.safetensors", state | {"a.stranger": torch.ones(2)}
    )
    with pytest.raises(
        RunError, match=r"a\.stranger: expected no tensor, got float32 of shape \[2\]"
    ):
        load_matcher(kind, CONFIGS[kind], tmp_path / "more")


def test_load_matcher_rejects_folder_without_weights(tmp_path):
    with pytest.raises(VisavisError, match=r"model\.safetensors"):
        load_matcher(Heads, CONFIGS[Heads], tmp_path)


UNSUPPORTED_GRANULARITIES = {
    "images": (
        Heads,
        {"visual_granularity": "regions"},
        "visual_granularity: expected pooled or pixels for Heads, got regions.",
    ),
    "texts": (
        VSEPlusPlus,
        {"text_granularity": "words"},
        "text_granularity: expected tokens for VSEPlusPlus, got words.",
    ),
    "pooled texts": (
        VSEInfinity,
        {"text_granularity": "pooled"},
        "text_granularity: expected words or tokens for VSEInfinity, got pooled.",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED_GRANULARITIES)
def test_matcher_rejects_unsupported_granularity(case):
    kind, changes, sentence = UNSUPPORTED_GRANULARITIES[case]
    with pytest.raises(
        ShapeError,
        match=rf"^{re.escape(sentence)} Set a supported granularity, or use another model\.$",
    ):
        kind(spec.build_object(kind.Config, vars(CONFIGS[kind]) | changes))


def test_config_rejects_invalid_field_values():
    with pytest.raises(SpecError, match=r"visual_granularity.*'regions'"):
        VSEInfinity.Config(visual_input_dim=6, text_input_dim=3, visual_granularity="pooled")
    with pytest.raises(SpecError, match=r"embedding_dim.*'wide'"):
        Heads.Config(visual_input_dim=6, text_input_dim=3, embedding_dim="wide")


def number_fields(kind):
    """List the fields of a config that hold numbers."""
    hints = get_type_hints(kind.Config).items()
    return [name for name, hint in hints if hint in (int, float, dict[str, int], tuple[float, ...])]


def changed(config, name, number):
    """Replace a number of a config, or all numbers of a dict or tuple. An empty tuple, such as
    bounds that follow from the model, becomes two numbers.
    """
    given = getattr(config, name)
    value = (
        dict.fromkeys(given, number)
        if isinstance(given, dict)
        else [number] * (len(given) or 2)
        if isinstance(given, tuple)
        else number
    )
    return replace(config, **{name: value})


def items(config, side) -> Encoded:
    """Sample three items of a side in the granularity of a config."""
    granularity, dim = getattr(config, f"{side}_granularity"), getattr(config, f"{side}_input_dim")
    mask = torch.ones(3, 4, dtype=torch.bool)
    if isinstance(config, EmbeddingModel.Config):
        lengths = torch.ones(3, dtype=torch.long)
        pixels = {"pixel_values": torch.randn(3, 1, 3, 32, 32), "pixel_values:length": lengths}
        tokens = {"input_ids": torch.randint(4, dim, (3, 4)), "attention_mask": mask.long()}
        return Encoded(pixels if side == "visual" else tokens)
    if granularity == "experts":
        parts = {name: torch.randn(3, 4, expert) for name, expert in config.experts.items()}
        return Encoded(parts, dict.fromkeys(parts, mask))
    if granularity == "tokens":
        return Encoded(torch.randint(4, dim, (3, 4)), mask)
    edge = 32 if isinstance(config, CLIP.Config) else 16
    shape = {"pixels": (3, edge, edge), "pooled": (dim,), "regions": (3, dim), "words": (4, dim)}[
        granularity
    ]
    return Encoded(torch.randn(3, *shape), mask if granularity == "words" else None)


@every_matcher
def test_config_error_names_model_and_key_of_invalid_number(kind, config):
    for name in number_fields(kind):
        for number in (-1, math.nan, math.inf):
            with pytest.raises(SpecError, match=rf"^{kind.__name__}.*{name}.*expected"):
                changed(config, name, number)


def accepts_zero(config, name):
    try:
        return bool(changed(config, name, 0))
    except SpecError:
        return False


@every_matcher
@pytest.mark.slow
def test_config_rejects_zero_or_model_trains_with_it(kind, config):
    for name in number_fields(kind):
        if not accepts_zero(config, name):
            continue
        zero = changed(config, name, 0)
        matcher, visual, text = kind(zero), items(zero, "visual"), items(zero, "text")
        PairLoss(Unified(), score=matcher.score)(
            matcher.encode_visual(visual), matcher.encode_text(text)
        ).backward()
        assert all(
            parameter.grad.isfinite().all()
            for parameter in matcher.parameters()
            if parameter.grad is not None
        ), name
        matcher.eval()
        assert (
            matcher.score(matcher.encode_visual(visual), matcher.encode_text(text)).isfinite().all()
        ), name


def test_residual_mlp_has_at_least_one_hidden_unit():
    config = VSEInfinity.Config(
        visual_input_dim=6, text_granularity="words", text_input_dim=3, embedding_dim=1
    )
    matcher = VSEInfinity(config)
    visual, text = (
        matcher.encode_visual(items(config, "visual")),
        matcher.encode_text(items(config, "text")),
    )
    assert matcher.score(visual, text).shape == (3, 3)


@every_matcher
def test_parameters_by_part_covers_each_parameter_once_in_order(kind, config):
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
    """The negative cosine, times a learned number."""

    def __init__(self, config):
        super().__init__(config)
        self.inverse_temperature = nn.Parameter(torch.tensor(-3.0))

    def score(self, visual, text):
        return self.inverse_temperature * super().score(visual, text)


class Whole(Tempered):
    def parts(self):
        return super().parts() | {"inverse_temperature": [self.inverse_temperature]}


class Twice(Whole):
    def parts(self):
        return super().parts() | {"all": [self.text]}


def test_parameters_by_part_rejects_missing_or_duplicate():
    assert [
        name for name, _ in Whole(CONFIGS[Heads]).parameters_by_part()["inverse_temperature"]
    ] == ["inverse_temperature"]
    with pytest.raises(
        VisavisError,
        match=r"^Tempered\.parts\(\): expected all parameters, got none of the parts with inverse_temperature",
    ):
        Tempered(CONFIGS[Heads]).parameters_by_part()
    with pytest.raises(
        VisavisError,
        match=r"^Twice\.parts\(\): expected each parameter in one part, got one in text and in all",
    ):
        Twice(CONFIGS[Heads]).parameters_by_part()


def test_score_is_cosine_only_if_inherited():
    visual, text = Encoded(torch.randn(5, 4)), Encoded(torch.randn(5, 4))
    plain, tempered = Heads(CONFIGS[Heads]), Whole(CONFIGS[Heads])
    assert plain.score_is_cosine
    assert not tempered.score_is_cosine
    torch.testing.assert_close(
        tempered.score_pairs(visual, text), tempered.score(visual, text).diagonal()
    )
    assert tempered.score_pairs(visual[:0], text[:0]).shape == (0,)
    assert declared_cost(tempered.score, visual, text) is None
    for training in (False, True):
        declared = plain.score_cost(visual, text).to_block_cost(training=training)
        assert (
            declared.pair_bytes
            == measure_score_cost(plain.score, visual, text, training=training).pair_bytes
        )
