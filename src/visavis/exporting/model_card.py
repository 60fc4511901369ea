"""Model card of an exported folder: data, protocol, metrics, objective and code that loads the model without visavis."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.environment import installed_version
from visavis.experiments.statistics import t_interval
from visavis.models.clip.model import CLIP
from visavis.models.retriever import Retriever
from visavis.objectives import Objective, parse
from visavis.pair_loss.logits import LearnedScale
from visavis.runs.run_folder import RunFolder

FOLDER = "path/to/this/folder"
"""Place of the exported folder in the code of cards."""
METRIC_LABELS = {
    "rsum": "RSUM",
    "i2t_r1": "R@1, image to text",
    "i2t_r5": "R@5, image to text",
    "i2t_r10": "R@10, image to text",
    "t2i_r1": "R@1, text to image",
    "t2i_r5": "R@5, text to image",
    "t2i_r10": "R@10, text to image",
}
"""Metrics of a card by their key in ``result.json``."""


def write_model_card(
    model: Retriever,
    run: Path,
    format: str,  # noqa: A002 - the name of the option
    folder: Path,
    embedding_dim: int,
    formula: Callable[[Objective], str],
    license: str,  # noqa: A002 - the name of the option
) -> None:
    """Write ``README.md``.

    Args:
        model: The model.
        run: Folder or name of the run.
        format: Format of the folder.
        folder: Folder of the card.
        embedding_dim: Number of dimensions of a vector.
        formula: Returns the formula of an objective.
        license: License of the weights, as the hub names it. Empty: to be filled in.
    """
    files = RunFolder(run)
    result = storage.read_json(files.result, dict[str, Any]) if os.path.isfile(files.result) else {}
    recipe = storage.read_toml(files.recipe) if os.path.isfile(files.recipe) else {}
    is_clip = isinstance(model.matcher, CLIP)
    library = "sentence-transformers" if format == "sentence-transformers" else "transformers" if is_clip and format == "hub" else "onnx"
    front = {"license": license or "unknown", "library_name": library, "pipeline_tag": "feature-extraction"}
    tags = ["image-text-retrieval", "visavis", *(["sentence-transformers"] if format == "sentence-transformers" else [])]
    tag_lines = "".join(f"- {tag}\n" for tag in tags)
    introduction = (
        f"Image-text retrieval model {model.matcher.name}. Images and texts become unit vectors of {embedding_dim} dimensions, "
        f"whose dot product is the score. Exported with visavis {installed_version('visavis')}."
    )
    image_encoder = model.processor.visual.name if model.processor.visual else "none"
    licenses = [
        f"- Weights: {license or 'not stated. Set the field license above before you publish the model'}.",
        f"- Image encoder: {os.path.basename(image_encoder)}. Its own license applies.",
        f"- Text encoder: {os.path.basename(_text_encoder(model))}. Its own license applies.",
        "- Training data: the terms of the data set apply.",
    ]
    parts = [
        "---\n" + "".join(f"{key}: {value}\n" for key, value in front.items()) + f"tags:\n{tag_lines}---",
        f"# {Path(run).name or model.matcher.name}",
        introduction,
        f"## Load without visavis\n\n{_loading_code(format, is_clip)}",
        f"## Data and training\n\n{_training(model, recipe, result, formula)}",
        f"## Results\n\n{_results(run, result)}",
        f"## Scores\n\n{_scores(model)}",
        "## License\n\n" + "\n".join(licenses),
    ]
    storage.write_text(folder / "README.md", "\n\n".join(parts) + "\n")


def _text_encoder(model: Retriever) -> str:
    processor = model.processor
    return processor.text.name if processor.text else processor.tokenizer or "word embeddings trained with the model"


def _training(model: Retriever, recipe: dict[str, Any], result: dict[str, Any], formula: Callable[[Objective], str]) -> str:
    data = os.path.basename(str(recipe.get("data", {}).get("path", "")).rstrip("/"))
    lines = [f"- Data: {data}" if data else "- Data: none. The model was not trained by visavis."]
    if objective := result.get("objective"):
        text = formula(parse(objective))
        lines.append(f"- Objective: `{objective}`" + (f". Formula: {text}" if text else ""))
    if model.matcher.matryoshka_dims:
        lines.append(f"- Dimensions that were trained to be used alone: {', '.join(map(str, model.matcher.matryoshka_dims))}")
    lines.append(f"- Architecture: `{json.dumps(dict(vars(model.matcher.config)), default=str)}`")
    return "\n".join(lines)


def _results(run: Path, result: dict[str, Any]) -> str:
    """Test metrics with the interval over the seeds of a comparison, if the run belongs to one."""
    keys = [key for key in METRIC_LABELS if key in result]
    if not keys:
        return "No test result is stored with the model."
    intervals = _intervals(run)
    rows = [f"| {METRIC_LABELS[key]} | {result[key]:.1f} | {intervals.get(key, '-')} |" for key in keys]
    rules = (
        f"Protocol `{result['protocol']}`: {result['num_images']:,} images, {result['num_texts']:,} texts "
        f"({result['captions_per_image']:g} captions per image). Values are in percent."
    )
    return "\n".join([rules, "", "| metric | this model | mean over seeds, 95 % interval |", "|---|---|---|", *rows])


def _intervals(run: Path) -> dict[str, str]:
    """Mean and interval of each metric over the seeds of the run's setting in its comparison."""
    folder = os.path.realpath(run)
    files = (parent / "comparison.json" for parent in list(Path(folder).parents)[:3])
    file = next(filter(os.path.isfile, files), None)
    if file is None:
        return {}
    runs = [one for one in storage.read_json(file, dict[str, Any])["runs"] if one["metrics"]]
    setting = next((one["setting"] for one in runs if os.path.realpath(one["folder"]) == folder), None)
    values = [one["metrics"] for one in runs if one["setting"] == setting]
    texts = {}
    for key in METRIC_LABELS if len(values) > 1 else ():
        numbers = [metrics[key] for metrics in values if metrics.get(key) is not None]
        if numbers and (interval := t_interval(numbers)) is not None:
            texts[key] = f"{statistics.fmean(numbers):.1f} ({interval.low:.1f} to {interval.high:.1f}, {len(numbers)} seeds)"
    return texts


def _scores(model: Retriever) -> str:
    """What is known about the calibration of scores."""
    matcher = model.matcher
    scale = None
    if isinstance(matcher.scale, LearnedScale):
        scale = float(matcher.scale.log.detach().exp())
    elif isinstance(matcher, CLIP):
        scale = float(matcher.temperature["logit_scale"].exp())
    known = "" if scale is None else f" Training multiplied it by {scale:.4g} before the softmax or sigmoid."
    return f"The score is a cosine from -1 to 1.{known} It is not a probability. `visavis index` calibrates scores on a collection."


def _loading_code(format: str, is_clip: bool) -> str:  # noqa: A002
    if format == "sentence-transformers":
        trust = "" if is_clip else ", trust_remote_code=True"
        note = "" if is_clip else f"\n\n`trust_remote_code` runs `visavis_encoder.py` of this folder: {_CODE_NOTE}"
        return _block(_SENTENCE_TRANSFORMERS.format(folder=FOLDER, trust=trust), "sentence-transformers pillow") + note
    if format == "hub" and is_clip:
        return _block(_AUTO_MODEL.format(folder=FOLDER), "transformers pillow")
    if format == "torch-export":
        return _block(_TORCH_EXPORT.format(folder=FOLDER), "torch pillow tokenizers")
    return _block(_ONNX.format(folder=FOLDER), "onnxruntime pillow tokenizers")


def _block(code: str, packages: str) -> str:
    return f"```\npip install {packages}\n```\n\n```python\n{code.strip()}\n```"


_CODE_NOTE = "its preprocessing, and both encoders as functions of PyTorch. The weights are in `model.safetensors`."
_SENTENCE_TRANSFORMERS = """
from PIL import Image
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{folder}"{trust})
images = model.encode([Image.open("photo.jpg")])
texts = model.encode(["two dogs on a beach", "a red car"])
print(model.similarity(images, texts))
"""
_AUTO_MODEL = """
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

folder = "{folder}"
model = AutoModel.from_pretrained(folder).eval()
processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
tokenizer = AutoTokenizer.from_pretrained(folder)
siglip = model.config.model_type == "siglip"
length = model.config.text_config.max_position_embeddings
pixels = processor(images=[Image.open("photo.jpg").convert("RGB")], return_tensors="pt")
tokens = tokenizer(
    ["two dogs on a beach", "a red car"],
    padding="max_length" if siglip else True, truncation=True, max_length=length,
    return_attention_mask=not siglip, return_tensors="pt",
)
with torch.no_grad():
    images = model.get_image_features(pixel_values=pixels["pixel_values"]).pooler_output
    texts = model.get_text_features(**{{name: tokens[name] for name in tokens if name != "token_type_ids"}}).pooler_output
images, texts = (rows / rows.norm(dim=1, keepdim=True) for rows in (images, texts))
print(images @ texts.T)
"""
_ONNX = """
import sys

import onnxruntime

folder = "{folder}"
sys.path.insert(0, folder)
from preprocess import Preprocessor


def encode(side, arrays):
    session = onnxruntime.InferenceSession(f"{{folder}}/{{side}}_encoder.onnx")
    return session.run(None, dict(zip([one.name for one in session.get_inputs()], arrays)))[0]


preprocessor = Preprocessor(folder)
images = encode("image", [preprocessor.images(["photo.jpg"])])
texts = encode("text", preprocessor.texts(["two dogs on a beach", "a red car"]))
print(images @ texts.T)
"""
_TORCH_EXPORT = """
import sys

import torch

folder = "{folder}"
sys.path.insert(0, folder)
from preprocess import Preprocessor


def encode(side, arrays):
    program = torch.export.load(f"{{folder}}/{{side}}_encoder.pt2").module()
    return program(*map(torch.from_numpy, arrays)).detach()


preprocessor = Preprocessor(folder)
images = encode("image", [preprocessor.images(["photo.jpg"])])
texts = encode("text", preprocessor.texts(["two dogs on a beach", "a red car"]))
print(images @ texts.T)
"""
