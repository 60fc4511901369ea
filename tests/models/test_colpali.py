"""ColPali models of transformers: tiny ones of the real class with random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.core.errors import DataError, VisavisError
from visavis.core.progress import NoProgress
from visavis.models.text_tower_export import write_text_tower
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.index_folder import read_manifest

WORDS = [
    "<pad>",
    "<unk>",
    "<bos>",
    "<eos>",
    "a",
    "red",
    "blue",
    "circle",
    "dog",
    "Question",
    ":",
    "Describe",
    "the",
    "image",
    ".",
    "\n",
]


@pytest.fixture(scope="module")
def colpali(tmp_path_factory):
    """A folder with the files of a published model."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    images = transformers.SiglipImageProcessor(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    processor = transformers.ColPaliProcessor(images, fast)
    layers = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    language = layers | {
        "model_type": "gemma",
        "vocab_size": len(fast),
        "head_dim": 8,
        "num_key_value_heads": 2,
    }
    vision = layers | {
        "model_type": "siglip_vision_model",
        "image_size": 28,
        "patch_size": 14,
        "projection_dim": 16,
    }
    vlm = transformers.PaliGemmaConfig(
        text_config=language,
        vision_config=vision,
        image_token_index=processor.image_token_id,
        projection_dim=16,
        hidden_size=16,
    )
    torch.manual_seed(0)
    model = transformers.ColPaliForRetrieval(
        transformers.ColPaliConfig(vlm_config=vlm, embedding_dim=8)
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("colpali")
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    return folder


@pytest.fixture
def pages(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (40 + number, 30, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_colpali_scores_equal_transformers(colpali, pages):
    import transformers

    model = transformers.ColPaliForRetrieval.from_pretrained(colpali).eval()
    processor = transformers.AutoProcessor.from_pretrained(colpali)
    files, texts = sorted(pages.iterdir()), ["a red circle", "dog"]
    with torch.inference_mode():
        images = model(
            **{
                k: v
                for k, v in processor.process_images([Image.open(file) for file in files]).items()
                if k != "labels"
            }
        ).embeddings
        queries = [model(**processor.process_queries([text])).embeddings[0] for text in texts]
    expected = processor.score_retrieval(queries, list(images))
    scores = visavis.load(colpali).score(files, texts)
    lengths = torch.tensor([len(query) for query in queries])
    assert torch.allclose(scores.T * lengths[:, None], expected, atol=1e-4)


def test_colpali_index_search_equals_score(colpali, pages, tmp_path):
    report = build_index(colpali, pages, tmp_path / "index", progress=NoProgress())
    assert report.num_items == 6
    assert read_manifest(tmp_path / "index").late_interaction == "t2i"
    files, text = sorted(pages.iterdir()), "a red circle"
    scores = visavis.load(colpali).score(files, [text])[:, 0]
    found = visavis.search(tmp_path / "index", text, top=6, filter={"duplicates": "show"})
    assert {hit.name: hit.score for hit in found} == pytest.approx(
        {file.name: score.item() for file, score in zip(files, scores, strict=True)}, abs=1e-5
    )
    assert visavis.search(tmp_path / "index", image=files[2], top=1)[0].name == files[2].name
    with pytest.raises(
        VisavisError, match="expected a model that was trained here, got a pretrained ColPali"
    ):
        visavis.load(colpali).save(tmp_path / "copy")


def test_colpali_rejects_damaged_folders(colpali, tmp_path):
    import shutil

    for name, content in (("processor_config.json", "{"), ("tokenizer.json", "{}")):
        folder = tmp_path / name
        shutil.copytree(colpali, folder)
        assert (folder / name).exists()
        (folder / name).write_text(content)
        with pytest.raises(DataError, match=str(folder)):
            visavis.load(folder)
    folder = tmp_path / "code"
    shutil.copytree(colpali, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "unknown", "auto_map": {"AutoModel": "evil.Model"}})
    )
    with pytest.raises(VisavisError):
        visavis.load(folder)


def test_colpali_has_no_text_tower(colpali, tmp_path):
    with pytest.raises(VisavisError, match=r"ColPali: expected a text encoder of its own, got .*"):
        write_text_tower(visavis.load(colpali, device="cpu"), tmp_path / "tower")
