"""CLIP that goes on learning, each way that the grid ``clip`` has: resumed exactly, loaded, read by every verb."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import visavis
from visavis.data.scenes import write_scenes
from visavis.errors import DataError, RecipeError, SpecError
from visavis.models import CLIP
from visavis.objectives import InfoNCE
from visavis.training.recipe_files import read_file
from visavis.training.schedule import layers_below_top, make_optimizer
from visavis.training.settings import Phase
from visavis.types import Encoded

pytest.importorskip("transformers")

HAS_PEFT = importlib.util.find_spec("peft") is not None
adapters = pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
WAYS = [pytest.param(row, marks=adapters if row not in ("linear", "full") else ()) for row in read_file("clip").rows]


@pytest.fixture(scope="module")
def few_scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("world") / "scenes", num_train=20, num_val=8, num_test=8, captions_per_image=2, size=32)


@pytest.fixture(scope="module")
def small(dual_encoders, few_scenes):
    """What makes a row of the grid small: a tiny model, few pictures, few and long steps."""
    tower = str(dual_encoders / "clip")
    sizes = {"training.batch_size": 16, "epochs": 2, "training.checkpoint_s": 1e6, "training.threads": 1, "phases.0.optimizer.lr": 0.01}
    return {"data.path": str(few_scenes), "visual.tower": tower, "text.tower": tower, **sizes}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_resumes_exactly_loads_and_is_read_by_every_verb(way, small, few_scenes, in_pieces, outcome, tmp_path):
    whole = visavis.train(f"clip/{way}", overrides=small, out=tmp_path / "whole")
    assert in_pieces(f"clip/{way}", tmp_path / "pieces", overrides=small) >= 2
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    assert whole.best_step >= 0
    assert visavis.evaluate(tmp_path / "whole").metrics == whole.test.metrics
    assert len(visavis.search(tmp_path / "whole", "a red circle", inside=few_scenes, top=3)) == 3
    assert visavis.diagnose(tmp_path / "whole").counts[0].objective
    model = visavis.load(tmp_path / "whole")
    torch.testing.assert_close(model.encode_texts(["a red circle"]).norm(dim=1), torch.ones(1))


def matcher(dual_encoders, kind="clip", **fields):
    width = {"clip": 10, "siglip": 16}[kind]
    return CLIP(CLIP.Config(backbone=str(dual_encoders / kind), visual_width=width, text_width=14, **fields))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_early_layers_learn_at_lower_rates(dual_encoders, kind):
    phase = Phase(epochs=1, objective="InfoNCE()", optimizer={"lr": 1.0, "layer_decay": 0.5, "lr_multipliers": {"text": 3.0}})
    groups = make_optimizer(matcher(dual_encoders, kind), phase).param_groups
    rates = {name.removeprefix("model."): group["base_lr"] for group in groups for name in group["param_names"]}
    assert rates["vision_model.embeddings.patch_embedding.weight"] == 0.125
    assert rates["vision_model.encoder.layers.0.mlp.fc1.weight"] == 0.25
    assert rates["vision_model.encoder.layers.1.self_attn.q_proj.bias"] == 0.5
    assert rates["vision_model.post_layernorm.weight"] == 1
    assert rates["text_model.embeddings.token_embedding.weight"] == 0.375
    assert rates["text_model.encoder.layers.0.mlp.fc1.weight"] == 0.75


def test_what_lies_between_two_lists_of_layers_belongs_to_the_one_before():
    names = ["class", "trunk.layers.0.w", "trunk.layers.1.w", "trunk.norm", "head.0.w", "head.2.w", "projection"]
    assert layers_below_top(names) == [5, 4, 3, 3, 2, 1, 0]
    assert layers_below_top(["a", "b.weight"]) == [0, 0]


def test_a_scale_is_learned_from_that_of_the_model_on_and_kept_within_bounds(dual_encoders, small, tmp_path):
    start = matcher(dual_encoders, scale="learned").scale
    assert 1 <= start().item() < 100
    assert matcher(dual_encoders).scale is None
    bounded = small | {"model.scale_bounds": [2.0, 2.01], "phases.0.optimizer.lr_multipliers": {"scale": 50.0}}
    visavis.train("clip/full", overrides=bounded, out=tmp_path / "run")
    learned = visavis.load(tmp_path / "run").matcher.scale().item()
    assert learned == pytest.approx(2, abs=0.011)
    (own, *_) = visavis.diagnose(tmp_path / "run").counts
    assert own.objective == repr(InfoNCE(tau=round(1 / learned, 6)))


def test_a_scale_has_no_weight_decay(dual_encoders):
    phase = Phase(epochs=1, objective="InfoNCE()", optimizer={"weight_decay": 0.1})
    groups = make_optimizer(matcher(dual_encoders, scale="learned"), phase).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


def test_an_objective_of_fixed_margin_has_no_scale_to_learn(small, tmp_path):
    with pytest.raises(
        RecipeError, match=r"^Unified\(.*\) has a fixed gamma or margin, which the learned scale of CLIP would change: take"
    ):
        visavis.train("clip/full", overrides=small | {"objective": "Unified()"}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match=r"scale_bounds is \(3.0, 2.0\), expected two numbers above 0, the smaller one first"):
        visavis.train("clip/full", overrides=small | {"model.scale_bounds": [3, 2]}, out=tmp_path / "run")


@adapters
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_adapters_change_nothing_at_first_and_are_all_that_learns_and_is_saved(dual_encoders, kind, tmp_path):
    plain, adapted = matcher(dual_encoders, kind), matcher(dual_encoders, kind, lora_rank=2, lora_layers=["q_proj", "out_proj"])
    pixels, texts = Encoded(torch.randn(2, 3, 32, 32)), Encoded(torch.tensor([[2, 5, 3]]))
    assert torch.equal(adapted.encode_visual(pixels).vectors, plain.encode_visual(pixels).vectors)
    assert torch.equal(adapted.encode_text(texts).vectors, plain.encode_text(texts).vectors)
    by_part = adapted.parameters_by_part()
    names = {name for part in ("visual", "text") for name, _ in by_part[part]}
    assert names == set(adapted.state_dict()) == {name for name, _ in adapted.named_parameters()}
    assert len(names) == 2 * 2 * 2 * 2, "two matrices, of two kinds of layers, in two layers, of two sides"
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    adapted.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names


@adapters
def test_adapters_go_with_the_weights_that_they_were_trained_on(dual_encoders, small, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(dual_encoders / "clip", base)
    own = {"visual.tower": str(base), "text.tower": str(base)}
    visavis.train("clip/lora", overrides=small | own, out=tmp_path / "run")
    weights = load_file(base / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        DataError, match=r"^\S*base holds weights \w{16}, and these adapters belong to \w{16}: bring back the model that they were"
    ):
        visavis.load(tmp_path / "run")
    shutil.rmtree(base)
    with pytest.raises(DataError, match=r"^these adapters belong to \S*base, which is needed beside them: \S*base is no folder"):
        visavis.load(tmp_path / "run")


@adapters
def test_layers_that_are_not_there_are_named(dual_encoders):
    with pytest.raises(SpecError, match=r"lora_layers names 'q_prj', and no linear layer of CLIPModel ends so: did you mean q_proj\?"):
        matcher(dual_encoders, lora_rank=2, lora_layers=["v_proj", "q_prj"])
