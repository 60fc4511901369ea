"""Exported folders: loaded in a process that cannot import visavis, with the vectors of the model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

import visavis
from visavis.core.errors import RefusedOverwrite, VisavisError
from visavis.data.colors import profile_of_code_points
from visavis.data.vocabulary import Vocabulary
from visavis.models import CATALOG
from visavis.models.clip.model import CLIP, open_dual_encoder
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.image_text.global_matchers import Heads, VSEInfinity, VSEPlusPlus
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.training.export.graph_code import preprocessing_source
from visavis.training.export.model_card import write_model_card

pytest.importorskip("transformers")

TEXTS = [
    "a red circle",
    "a blue square and a small green star",
    "star",
    "a large circle and a star",
    "两只狗在海滩上，跑。",
    "犬が2匹、A dog!",
    "วิ่งเล่น",
    "두 마리 개",
    "كلبان على الشاطئ",
    "दो कुत्ते, समुद्र तट पर",
    "cafe\u0301 caf\u00e9 ΟΔΟΣ",
    "a 🐕\u200d🦺 dog\u00a0—“runs”…",
    "red 红 star。",
]
VOCABULARY = Vocabulary.from_captions(TEXTS, min_count=1)
BLOCKED = """
import glob, json, sys, warnings
warnings.simplefilter("ignore")


class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "visavis":
            raise ImportError("visavis is blocked")


sys.meta_path.insert(0, Blocked())
try:
    import visavis
except ImportError:
    pass
else:
    raise SystemExit("visavis can be imported")
import numpy as np
from PIL import Image
work = sys.argv[1]
paths = sorted(glob.glob(f"{work}/*.*g") + glob.glob(f"{work}/*.tif"))
lines = json.load(open(f"{work}/texts.json"))
"""
SENTENCE_TRANSFORMERS = """
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
images = model.encode([Image.open(path) for path in paths])
# The library takes the path of a TIFF for a text.
is_known = [not path.endswith("tif") for path in paths]
known = [path for path in paths if not path.endswith("tif")]
assert np.abs(model.encode(known) - images[is_known]).max() < 1e-6
np.savez(f"{folder}/vectors.npz", images=images, texts=model.encode(texts))
assert model.get_embedding_dimension() == images.shape[1], model.get_embedding_dimension()
"""
FROM_CARD = """
np.savez(f"{folder}/vectors.npz", images=images, texts=texts)
"""


def dual_encoder(folder: Path, **fields: object) -> Retriever:
    """A CLIP or SigLIP model whose weights are changed, as by a training."""
    matcher, processor = open_dual_encoder(str(folder))
    if fields:
        matcher = CLIP(
            CLIP.Config(backbone=str(folder), visual_input_dim=10, text_input_dim=14, **fields)
        )  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in matcher.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return Retriever(matcher, processor)


def build(kind: str, dual_encoders: Path) -> Retriever:
    """A tiny model of each kind."""
    words = {
        "text_granularity": "tokens",
        "text_input_dim": len(VOCABULARY),
        "embedding_dim": 8,
        "word_dim": 5,
    }
    if kind == "clip-lora":
        pytest.importorskip("peft")
        return dual_encoder(dual_encoders / "clip", lora_rank=2)
    if kind in ("clip", "siglip"):
        return dual_encoder(dual_encoders / kind)
    if kind == "heads":
        config = Heads.Config(
            visual_input_dim=192,
            text_input_dim=384,
            embedding_dim=8,
            hidden_dim=12,
            whiten_text=True,
        )
        return Retriever(
            Heads(config),
            Processor(EncoderSpec("visual", "scenes"), EncoderSpec("text", "minilm"), None),
        )
    if kind == "heads-words":
        heads = Heads.Config(visual_input_dim=192, num_filters=4, **words)  # type: ignore[arg-type]
        return Retriever(Heads(heads), Processor(EncoderSpec("visual", "scenes"), None, VOCABULARY))
    if kind == "vse++":
        pixels = {
            "visual_granularity": "pixels",
            "backbone": "small-cnn",
            "visual_input_dim": 256,
            "bidirectional": True,
        }
        vse = VSEPlusPlus.Config(**pixels, **words)  # type: ignore[arg-type]
        return Retriever(
            VSEPlusPlus(vse),
            Processor(EncoderSpec("visual", "small-cnn", "regions"), None, VOCABULARY),
        )
    infinity = VSEInfinity.Config(visual_input_dim=192, **words)  # type: ignore[arg-type]
    return Retriever(
        VSEInfinity(infinity),
        Processor(EncoderSpec("visual", "scenes", "regions"), None, VOCABULARY),
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of all sizes, modes, depths and orientations, and texts in many scripts."""
    folder, noise = tmp_path_factory.mktemp("inputs"), np.random.default_rng(0)
    photo = Image.fromarray(noise.integers(0, 255, (5, 6, 3), np.uint8)).resize((60, 44))
    for size in ((1, 1), (1, 5000), (5000, 1), (52, 40), (31, 30)):
        photo.resize(size).save(folder / f"{size[0]}x{size[1]}.png")
    for mode in ("1", "L", "LA", "P", "RGBA"):
        image = photo.convert("RGBA")
        image.putalpha(Image.linear_gradient("L").resize(photo.size))
        image.convert(mode).save(folder / f"{mode}.png")
    photo.quantize(8).save(folder / "palette.png", transparency=3)
    gray = np.asarray(photo.convert("L"))
    Image.fromarray(gray.astype(np.uint16) * 257).save(folder / "16.png")
    Image.fromarray(gray.astype(np.uint16) * 257).save(folder / "16.tif")
    Image.fromarray(gray.astype(np.float32) / 255).save(folder / "float.tif")
    photo.convert("CMYK").save(folder / "CMYK.jpg")
    photo.save(folder / "p3.jpg", icc_profile=profile_of_code_points(12, 13))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        photo.save(folder / f"orientation{orientation}.jpg", exif=exif)
        photo.save(folder / f"orientation{orientation}.tif", exif=exif)
    photo.resize((900, 700)).save(folder / "large.jpg", exif=exif)
    (folder / "texts.json").write_text(json.dumps(TEXTS))
    return folder


def run_blocked(folders: dict[Path, str], work: Path) -> list[dict[str, np.ndarray]]:
    """Run the code of each folder in one process without visavis, and return the vectors that it
    saved for each.
    """
    code = "".join(
        f"folder, texts = {str(folder)!r}, list(lines)\n"
        f"for name in ('open_image', 'preprocess'):\n    sys.modules.pop(name, None)\n{code}"
        for folder, code in folders.items()
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", BLOCKED + code, work],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=work,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [dict(np.load(folder / "vectors.npz")) for folder in folders]


def card_code(folder: Path) -> str:
    """The code of the model card, for the folder and for all images and texts."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]  # type: ignore[index]
    code = code.replace('"path/to/this/folder"', "folder").replace("folder = folder\n", "")
    code = code.replace('[open_image("photo.jpg")]', "list(map(open_image, paths))")
    code = code.replace('[Image.open("photo.jpg")]', "[Image.open(path) for path in paths]")
    code = code.replace('["photo.jpg"]', "paths").replace(
        '["two dogs on a beach", "a red car"]', "texts"
    )
    return code + FROM_CARD


def check(model: Retriever, vectors: dict[str, np.ndarray], work: Path) -> None:
    paths = sorted(path for path in work.iterdir() if path.suffix != ".json")
    for name, expected, atol in (
        ("images", model.encode_images(paths), 1e-5),
        ("texts", model.encode_texts(TEXTS), 1e-6),
    ):
        torch.testing.assert_close(
            torch.from_numpy(np.asarray(vectors[name])), expected, rtol=0, atol=atol
        )
        assert len(vectors[name]) == len(expected)
        assert expected.std(0).mean() > 1e-3, "a constant model proves nothing"


CLIP_KINDS = ("clip", "siglip", "clip-lora")
TRACED_KINDS = ("heads", "heads-words", "vse++", "vse-infinity")
DAILY = [("clip-lora", "hub"), ("siglip", "sentence-transformers")]
"""Cases of the daily suite, which trace nothing and run in one process."""
CASES = [
    pytest.param([(kind, format_)], id=f"{kind}-{format_}", marks=pytest.mark.long)
    for kind in (*CLIP_KINDS, *TRACED_KINDS)
    for format_ in ("hub", "sentence-transformers", "onnx", "torch-export")
    if (kind, format_) not in DAILY
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [pytest.param(DAILY, id="daily"), *CASES])
def test_exported_folder_works_without_visavis(cases, dual_encoders, inputs, tmp_path):
    runs, folders = [], {}
    for kind, format_ in cases:
        runs.append(build(kind, dual_encoders).save(tmp_path / kind))
        exported = visavis.export(runs[-1], format=format_, out=tmp_path / f"exported-{kind}")
        assert not [
            file
            for file in exported.folder.rglob("*")
            if file.suffix in (".bin", ".pkl", ".pt", ".pth")
        ]
        assert "README.md" in exported.files
        folders[exported.folder] = (
            SENTENCE_TRANSFORMERS
            if format_ == "sentence-transformers" and kind in TRACED_KINDS
            else card_code(exported.folder)
        )
    for run, vectors in zip(runs, run_blocked(folders, inputs), strict=True):
        check(visavis.load(run), vectors, inputs)


@pytest.fixture(scope="module")
def exported_preprocessor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The exported preprocessing of a model with word embeddings, without images."""
    folder = tmp_path_factory.mktemp("exported")
    words = [*VOCABULARY.words, unicodedata.normalize("NFD", "é")]
    text = {"vocabulary": words, "mask": True, "max_tokens": None}
    (folder / "preprocessing.json").write_text(json.dumps({"image": None, "text": text}))
    module: dict[str, Any] = {"__name__": "preprocess"}
    exec(compile(preprocessing_source(), "preprocess.py", "exec"), module)
    return module["Preprocessor"](folder), Vocabulary(tuple(words))


LETTERS = st.sampled_from(
    [*"".join(TEXTS), *map(chr, range(9, 14)), *"\x1c\x85\u0300\u2028\u3000！ΣςİıßＡ"]
)


@given(
    st.lists(st.text(LETTERS | st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=4)
)
def test_exported_words_have_the_same_token_ids(exported_preprocessor, texts):
    preprocessor, vocabulary = exported_preprocessor
    ids, mask = preprocessor.texts([*TEXTS, *texts])
    expected = vocabulary.encode([*TEXTS, *texts])
    np.testing.assert_array_equal(ids, expected.vectors)
    np.testing.assert_array_equal(mask, expected.mask)


@pytest.mark.long
def test_zero_shot_model_is_exported_by_name(dual_encoders, inputs, tmp_path):
    exported = visavis.export(
        dual_encoders / "siglip", format="sentence-transformers", out=tmp_path / "exported"
    )
    [vectors] = run_blocked({exported.folder: card_code(exported.folder)}, inputs)
    check(visavis.load(dual_encoders / "siglip"), vectors, inputs)


def test_export_refuses_models_of_pairs(tmp_path):
    kind = CATALOG["SCAN"]
    config = kind.Config(
        visual_granularity="regions",
        visual_input_dim=192,
        text_granularity="tokens",
        text_input_dim=len(VOCABULARY),
    )
    model = Retriever(
        kind(config), Processor(EncoderSpec("visual", "scenes", "regions"), None, VOCABULARY)
    )
    run = model.save(tmp_path / "run")
    with pytest.raises(
        VisavisError,
        match=r"^run: expected a model with one vector per item to export \(Heads, VSE\+\+, .*\), got SCAN",
    ):
        visavis.export(run, format="onnx", out=tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_export_overwrites_nothing(dual_encoders, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    with pytest.raises(RefusedOverwrite, match=r"mine already exists"):
        visavis.export(dual_encoders / "clip", out=tmp_path / "mine")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.long
def test_card_describes_training_with_interval_over_seeds(few_scenes, tiny_recipe, tmp_path):
    comparison = visavis.compare(
        tiny_recipe, data=few_scenes, objective="VLC()", seeds=3, out=tmp_path / "comparison"
    )
    run = comparison.outcomes[0].folder
    write_model_card(
        visavis.load(run), run, "onnx", tmp_path / "card", 8, lambda _: "the formula", "mit"
    )
    card = (tmp_path / "card" / "README.md").read_text()
    rsum = [one.measured_metrics["rsum"] for one in comparison.outcomes]
    row = re.search(r"\| RSUM \| (.*?) \| (.*?) \((.*?) to (.*?), 3 seeds\) \|", card)
    assert row is not None, card
    assert float(row[1]) == pytest.approx(rsum[0], abs=0.051)
    assert float(row[2]) == pytest.approx(sum(rsum) / 3, abs=0.051)
    assert float(row[3]) < float(row[2]) < float(row[4])
    for part in (
        "license: mit",
        "- Data: scenes",
        "Objective: `VLC(",
        "Formula: the formula",
        "Protocol `",
        "4 images, 8 texts",
    ):
        assert part in card, part


@pytest.mark.parametrize(
    "name",
    [
        "mit",
        "apache-2.0",
        "mit: [",
        "mit # c",
        "no",
        "null",
        "1.0",
        "'",
        '"',
        "{a: b}",
        "a\\nb: c",
        "- a",
        "---",
        "Größe 🌸",
        " a ",
        "&a",
        "*a",
        "?",
        "%",
    ],
)
def test_card_quotes_license_in_yaml(tmp_path, name):
    yaml = pytest.importorskip("yaml")
    heads = Heads.Config(visual_input_dim=4, text_input_dim=4)
    model = Retriever(Heads(heads), Processor(None, None, VOCABULARY))
    write_model_card(model, tmp_path, "onnx", tmp_path, 8, lambda _: "", name)
    header = yaml.safe_load(
        (tmp_path / "README.md").read_text(encoding="utf-8").split("\n---\n")[0]
    )
    assert header["license"] == name
    assert set(header) == {"license", "library_name", "pipeline_tag", "tags"}


@pytest.mark.parametrize("name", ["mit\nlicense_link: x", "a\x7f", "a\u2028b", "a\x85b"])
def test_export_rejects_license_of_several_lines(tmp_path, name):
    with pytest.raises(VisavisError, match="license: expected one line of text, got '"):
        visavis.export(tmp_path, license=name, out=tmp_path / "out")
