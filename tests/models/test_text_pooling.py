"""Vectors of texts: different for different texts, and the same alone and in any batch."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import visavis
from visavis.core.errors import DataError
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models.clip.model import CLIP, export_to_transformers
from visavis.models.encoders.frozen_encoders import open_text_encoder
from visavis.models.encoders.text_backbone import TextBackbone

transformers = pytest.importorskip("transformers")

TEXTS = [
    "star",
    "a red circle and a large star",
    "a blue square",
    "a red circle and a large square",
]


@pytest.fixture
def copy(dual_encoders, towers, tmp_path):
    """A copy of a tiny model with other entries in its files."""

    def make(kind, files, name="copy"):
        folder = tmp_path / name
        shutil.copytree((towers if kind == "bert" else dual_encoders) / kind, folder)
        for file, entries in files.items():
            content = json.loads((folder / file).read_text())
            for key, value in entries.items():
                target = content[key] if isinstance(value, dict) and key in content else content
                target.update(value if target is not content else {key: value})
            (folder / file).write_text(json.dumps(content))
        return folder

    return make


def tokens(folder, **added):
    """Add tokens to the tokenizer of a folder and rows to the embeddings of its model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(added)
    tokenizer.save_pretrained(folder)
    model = transformers.CLIPModel.from_pretrained(folder)
    embedding = model.text_model.embeddings.token_embedding
    model.text_model.embeddings.token_embedding = torch.nn.Embedding.from_pretrained(
        torch.cat([embedding.weight, torch.ones(1, 16)])
    )
    model.config.text_config.vocab_size += 1
    model.save_pretrained(folder)


END_TOKENS = {
    "another token": (
        14,
        "token text_config.eos_token_id = 14, at which .* got the end token 3 of the tokenizer",
    ),
    "no token of the tokenizer": (
        49407,
        "token text_config.eos_token_id = 49407, at which .* got the end token 3",
    ),
    "the first token": (0, "token text_config.eos_token_id = 0, at which .* got the end token 3"),
    "none": (None, "token text_config.eos_token_id = None, at which .* got the end token 3"),
    "the highest token": (
        2,
        (
            r"token \d+ \(the highest id, because text_config.eos_token_id is 2\), at which .* got the "
            r"end token 3"
        ),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", END_TOKENS)
@pytest.mark.parametrize("load", [visavis.load, open_text_encoder], ids=["model", "encoder"])
def test_clip_that_pools_at_other_token_is_rejected(case, load, copy):
    end, message = END_TOKENS[case]
    with pytest.raises(
        DataError,
        match=f"copy: expected texts that end with the {message}.* Set text_config.eos_token_id in config.json, or",
    ):
        load(str(copy("clip", {"config.json": {"text_config": {"eos_token_id": end}}})))


def test_training_rejects_clip_that_pools_at_other_token(copy, tmp_path):
    folder = copy("clip", {"config.json": {"text_config": {"eos_token_id": 14}}})
    scenes = write_synthetic_scenes(
        tmp_path / "scenes", num_train=4, num_val=2, num_test=2, captions_per_image=1, size=32
    )
    with pytest.raises(DataError, match="eos_token_id = 14"):
        visavis.train(
            "clip/full",
            data=scenes,
            overrides={"visual.encoder": str(folder), "text.encoder": str(folder)},
            out=tmp_path / "run",
        )


def high_end_token(folder):
    """Make the end token the highest one, as in the first CLIP."""
    tokens(folder, eos_token="[LAST]")
    content = json.loads((folder / "tokenizer.json").read_text())
    template = content["post_processor"]
    template["single"][-1]["SpecialToken"]["id"] = "[LAST]"
    template["special_tokens"]["[LAST]"] = {"id": "[LAST]", "ids": [14], "tokens": ["[LAST]"]}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_old_config_of_clip_reads_highest_token(copy):
    folder = copy("clip", {})
    high_end_token(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    check_texts(visavis.load(folder).encode_texts)
    tokens(folder, pad_token="[HIGHER]")
    with pytest.raises(
        DataError,
        match=r"token 15 \(the highest id, because text_config.eos_token_id is 2\), .* got the end token 14",
    ):
        visavis.load(folder)


def test_equal_vectors_of_different_texts_are_rejected(copy):
    folder = copy("clip", {})
    weights = load_file(folder / "model.safetensors")
    weights["text_projection.weight"][:] = 0
    weights["text_model.final_layer_norm.weight"][:] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for load in (visavis.load, open_text_encoder):
        with pytest.raises(
            DataError,
            match=r"copy: expected different vectors of the texts '\w+' and '\w+', got equal ones",
        ):
            load(str(folder))


def check_texts(encode):
    """Different texts differ, and a text has the same vector alone and in a batch."""
    together, alone = encode(TEXTS), torch.cat([encode([text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert torch.pdist(together.flatten(1)).min() > 1e-4


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["clip", "siglip", "bert"])
@pytest.mark.slow
def test_vectors_do_not_depend_on_batch(kind, side, copy):
    folder = copy(kind, {"tokenizer_config.json": {"padding_side": side}})
    check_texts(lambda texts: open_text_encoder(str(folder)).encode(texts).vectors)
    if kind == "bert":
        backbone, tokenizer = TextBackbone(str(folder)).eval(), open_text_encoder(str(folder))
        with torch.no_grad():
            check_texts(lambda texts: backbone(tokenizer.preprocess(texts)).vectors[:, 0])
    else:
        check_texts(visavis.load(folder).encode_texts)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_frozen_text_encoder_equals_model(kind, dual_encoders):
    frozen = open_text_encoder(str(dual_encoders / kind)).encode(TEXTS).vectors
    trainable = visavis.load(dual_encoders / kind).encode_texts(TEXTS)
    torch.testing.assert_close(
        torch.nn.functional.normalize(frozen), trainable, rtol=1e-5, atol=1e-6
    )


def test_words_of_siglip_are_states_of_padded_text(dual_encoders):
    encoder = open_text_encoder(str(dual_encoders / "siglip"), "words")
    words = encoder.encode(["a red circle", "star"])
    assert words.mask.sum(1).tolist() == [5, 3]
    torch.testing.assert_close(words.vectors[1, :3], encoder.encode(["star"]).vectors[0, :3])


def test_exported_clip_pads_as_visavis(copy, tmp_path):
    folder = copy("clip", {"tokenizer_config.json": {"padding_side": "left"}})
    model = visavis.load(folder)
    assert isinstance(model.matcher, CLIP)
    exported = export_to_transformers(model.matcher, tmp_path / "exported")
    inputs = transformers.AutoTokenizer.from_pretrained(exported)(
        TEXTS, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        output = transformers.CLIPModel.from_pretrained(exported).get_text_features(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        )
    expected = torch.nn.functional.normalize(output.pooler_output)
    torch.testing.assert_close(model.encode_texts(TEXTS), expected, rtol=1e-5, atol=1e-6)
