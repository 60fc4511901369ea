"""Export of a run to the formats of other libraries: a complete folder with preprocessing,
tokenizer, weights and model card.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.core.result import Result
from visavis.core.table import Table
from visavis.losses.objectives import Objective
from visavis.models.clip.model import CLIP, write_transformers_files
from visavis.models.embedding_model import EmbeddingModel, write_sentence_transformers_files
from visavis.models.encoders.preprocessing import (
    IMAGE_PROCESSOR,
    MAX_RESIZED_PIXELS,
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    TEN_CROP_MARGIN,
    PatchPreprocessing,
)
from visavis.models.retriever import Retriever
from visavis.models.text_tower_export import (
    MAX_POOLED_ITEMS,
    example_tokens,
    has_generalized_pooling,
    tokenizer_json,
)
from visavis.training.export.graph_code import (
    MODULE_FILE,
    OPEN_IMAGE_FILE,
    module_source,
    open_image_source,
    preprocessing_source,
)
from visavis.training.export.model_card import write_model_card
from visavis.training.export.traced_encoders import check_exportable, trace_encoders

Format = Literal["hub", "sentence-transformers", "onnx", "torch-export"]
"""Formats of exported folders."""


@dataclass(frozen=True)
class ExportedModel(Result):
    """An exported folder.

    Attributes:
        folder: The folder.
        format: Its format.
        model: Name of the exported model.
        embedding_dim: Number of dimensions of a vector.
        files: Names of the files.
        url: Address of the uploaded commit. Empty if nothing was uploaded.
    """

    folder: Path
    format: str
    model: str
    embedding_dim: int
    files: tuple[str, ...]
    url: str = ""

    def tables(self) -> list[Table]:
        """Return the files in sentences."""
        described = f"{self.model}, {self.embedding_dim} dimensions, format {self.format}"
        notes = [
            f"{described}: {', '.join(self.files)}",
            f"Folder: {self.folder}. README.md shows how to load it.",
        ]
        if self.url:
            notes.append(f"Uploaded: {self.url}")
        return [Table(notes=tuple(notes))]

    def to_json(self) -> dict[str, Any]:
        """Return the export as a JSON object."""
        return {**vars(self), "folder": str(self.folder), "files": list(self.files)}


def export_model(
    model: Retriever,
    run: Path,
    format: Format,  # noqa: A002 - the name of the option
    out: Path,
    *,
    formula: Callable[[Objective], str] = lambda _: "",
    license: str = "",  # noqa: A002 - the name of the option
) -> ExportedModel:
    """Write a model in a format that works without visavis."""
    check_exportable(model)
    is_embedding_model = isinstance(model.matcher, EmbeddingModel)
    if is_embedding_model and format != "sentence-transformers":
        raise VisavisError(
            f"format: expected sentence-transformers for {model.matcher.name}, whose processor "
            f"belongs to it, got {format}. Pass --format sentence-transformers."
        )
    if not (is_embedding_model or model.processor.converts_single_images):
        raise VisavisError(
            f"run: expected an image encoder of transformers to export, got "
            f"{model.processor.visual_spec.name}, which only sentence-transformers can run. Use "
            "another image encoder."
        )
    out = storage.prepare_empty_folder(out, will_be_replaced=True)
    embedding_dim = model.encode_texts([model.processor.known_text]).shape[1]
    with storage.atomic_folder(out) as part:
        if isinstance(model.matcher, CLIP) and format in ("hub", "sentence-transformers"):
            write_transformers_files(model.matcher, part, model.processor.visual_spec.image_size)
            _write_preprocessor_config(model, part)
            if format == "sentence-transformers":
                _write_clip_modules(model, part)
        elif isinstance(model.matcher, EmbeddingModel):
            write_sentence_transformers_files(model.matcher, part)
        else:
            _write_graphs(model, format, part, embedding_dim)
        if not os.path.exists(part / "preprocessing.json"):
            # Libraries convert images in their own way.
            source = open_image_source(model.processor.min_side)
            storage.write_text(part / OPEN_IMAGE_FILE, source)
        write_model_card(model, run, format, part, embedding_dim, formula, license)
        files = tuple(
            sorted(
                file.relative_to(part).as_posix()
                for file in part.rglob("*")
                if os.path.isfile(file)
            )
        )
    return ExportedModel(out, format, model.matcher.name, embedding_dim, files)


def _write_graphs(model: Retriever, format: Format, folder: Path, embedding_dim: int) -> None:  # noqa: A002
    """Write both encoders as graphs, with the preprocessing that they need."""
    if isinstance(model.processor.preprocess.preprocessing, PatchPreprocessing):
        raise VisavisError(
            "format: expected hub or sentence-transformers for a model that keeps the aspect ratio "
            f"of images, got {format}. Use one of them."
        )
    programs = trace_encoders(model)
    # The preprocessing, as `preprocess.py` reads it.
    processor = model.processor
    preprocessing = processor.preprocess.preprocessing
    image = {
        name: getattr(preprocessing, name)
        for name in ("resize", "crop", "resample", "scale", "mean", "std")
    }
    image |= {"crops": processor.visual_spec.crops, "min_side": processor.min_side}
    image |= {"max_pixels": MAX_RESIZED_PIXELS, "ten_crop_margin": TEN_CROP_MARGIN}
    max_tokens = MAX_POOLED_ITEMS if has_generalized_pooling(model.matcher) else None
    text = {
        "vocabulary": None if processor.vocabulary is None else list(processor.vocabulary.words),
        "mask": len(example_tokens(model)) == 2,
        "max_tokens": max_tokens,
        "embedding_dim": embedding_dim,
    }
    storage.write_json(folder / "preprocessing.json", {"image": image, "text": text})
    if processor.vocabulary is None:
        storage.write_text(folder / "tokenizer.json", tokenizer_json(processor, max_tokens))
    if format == "sentence-transformers":
        source, tensors = module_source(programs)
        storage.write_text(folder / MODULE_FILE, source)
        storage.write_tensors(folder / "model.safetensors", tensors, for_transformers=True)
        _write_modules(folder, [f"{MODULE_FILE.removesuffix('.py')}.ImageTextEncoder"])
        return
    storage.write_text(folder / "preprocess.py", preprocessing_source())
    for side, program in programs.items():
        if format == "torch-export":
            # Into a file of Python, because the library reports errors of the disk as its own.
            with storage.current_disk().open(folder / f"{side}_encoder.pt2", "wb") as file:
                torch.export.save(program.exported_program, file)
        else:
            program.save(folder / f"{side}_encoder.onnx")
    if format == "hub":
        processor.save(model.matcher, folder / "model")


def _write_preprocessor_config(model: Retriever, folder: Path) -> None:
    """Write every step of the preprocessing, because defaults of transformers differ between models
    and versions.
    """
    preprocessing = model.processor.preprocess.preprocessing
    if isinstance(preprocessing, PatchPreprocessing):
        _update_preprocessor_config(folder, {"max_num_patches": preprocessing.max_num_patches})
        return
    sizes: dict[str, Any] = {}
    for name, size in (("size", preprocessing.resize), ("crop_size", preprocessing.crop)):
        if size is not None:
            sizes[name] = (
                {"shortest_edge": size[0]}
                if len(size) == 1
                else {"height": size[0], "width": size[1]}
            )
    steps = {
        "do_resize": preprocessing.resize is not None,
        "do_center_crop": preprocessing.crop is not None,
        "resample": preprocessing.resample,
        "do_rescale": True,
        "rescale_factor": preprocessing.scale,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
        "do_convert_rgb": True,
    }
    _update_preprocessor_config(folder, sizes | steps)


def _update_preprocessor_config(folder: Path, values: dict[str, Any]) -> None:
    """Set values in each file of a folder that has the preprocessing."""
    file = folder / PREPROCESSOR_FILE
    if os.path.exists(file):
        storage.write_json(file, storage.read_json(file, dict[str, Any]) | values)
    file = folder / PROCESSOR_FILE
    if os.path.exists(file):
        content = storage.read_json(file, dict[str, Any])
        if IMAGE_PROCESSOR in content:
            settings = {IMAGE_PROCESSOR: content[IMAGE_PROCESSOR] | values}
            storage.write_json(file, content | settings)


def _write_clip_modules(model: Retriever, folder: Path) -> None:
    """Write the files by which sentence-transformers reads a CLIP or SigLIP folder with its own
    modules.
    """
    tokenizer = model.processor.pretrained_tokenizer
    assert tokenizer is not None
    padding = "max_length" if tokenizer.fixed_length else "longest"
    text = {"padding": padding, "truncation": True, "max_length": tokenizer.max_length}
    methods = {"text": "get_text_features", "image": "get_image_features"}
    settings: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        "modality_config": {
            side: {"method": method, "method_output_name": "pooler_output"}
            for side, method in methods.items()
        },
        "module_output_name": "sentence_embedding",
        # SigLIP was trained on padded texts without a mask.
        "processing_kwargs": {
            "text": text | ({"return_attention_mask": False} if tokenizer.fixed_length else {})
        },
    }
    preprocessing = model.processor.preprocess.preprocessing
    if isinstance(preprocessing, PatchPreprocessing):
        # The processor of transformers has defaults that win over preprocessor_config.json.
        patches = {name: getattr(preprocessing, name) for name in ("max_num_patches", "patch_size")}
        settings["processing_kwargs"]["image"] = patches
    storage.write_json(folder / "sentence_bert_config.json", settings)
    prefix = "sentence_transformers.sentence_transformer.modules"
    _write_modules(
        folder,
        ["sentence_transformers.base.modules.transformer.Transformer", f"{prefix}.Normalize"],
    )


def _write_modules(folder: Path, types: list[str]) -> None:
    """Write the list of modules of sentence-transformers. The first one is in the folder itself."""
    paths = [
        "",
        *(f"{number}_{kind.rpartition('.')[2]}" for number, kind in enumerate(types[1:], 1)),
    ]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(zip(paths, types, strict=True))
    ]
    storage.write_json(folder / "modules.json", modules)
    settings: dict[str, Any] = {
        "model_type": "SentenceTransformer",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    storage.write_json(folder / "config_sentence_transformers.json", settings)
    for path in paths[1:]:
        storage.write_json(folder / path / "config.json", {})
