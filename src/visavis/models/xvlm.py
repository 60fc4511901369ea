"""X-VLM: two encoders for all, and a cross-modal encoder that ranks the first candidates of a query anew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from visavis import storage
from visavis.engine.scale import LearnedScale
from visavis.errors import DataError
from visavis.models import text_backbone
from visavis.models.attention import SMALLEST
from visavis.models.base import SCALE, GlobalMatcher, MatcherConfig, unit, vectors
from visavis.models.fusion import FusionEncoder
from visavis.models.pretrained import kept_folder
from visavis.models.text_backbone import TextBackbone
from visavis.models.towers import open_visual
from visavis.models.visual_states import grid_of
from visavis.spec import Count, CountOrZero, Positive
from visavis.targets import Targets
from visavis.types import Attention, Encoded

LEAST_CHANCE = 1e-5
"""What every wrong pair's chance to be drawn has beside the softmax of its score."""
PRETRAINED = ("visual.", "text.", "match.")
"""The names of what a converted checkpoint holds besides cross-attention."""
SCALE_BOUNDS = (2.0, 1000.0)
"""Of the learned scale: temperatures of 0.5 to 0.001."""


class XVLM(GlobalMatcher):
    """X-VLM: an image encoder and the lower layers of a BERT, whose first states are mapped to unit vectors; the score is their cosine.

    The upper layers of the BERT, which attend to all states of the image, tell of one pair whether it belongs together: ``second_stage``
    is the log-odds of that, by which the first ``rerank`` candidates of a query are ranked anew (0: none are). They learn as the
    matcher's own loss, beside any objective on the cosines: ITM, the cross-entropy of each pair that belongs together, and of each
    image with a wrong text and each text with a wrong image, drawn by ``softmax(cosine / temperature)`` over the batch, or by the learned scale.
    backbone: an image encoder of transformers (ViT, Swin), by folder or hub name. text_backbone: a BERT. fusion_layers: how many of its
    layers are the cross-modal encoder. width: of the unit vectors. scale: "learned" multiplies the cosines in training in place of
    the temperature of NTXent, InfoNCE or Sigmoid, from 1 / temperature on. pretrained: the file of cross-attention, maps and ITM with which
    training begins, as ``visavis convert`` writes it beside both encoders; "": at random.
    Parts: "backbone" and "text_backbone", "visual" and "text" (the maps to unit vectors), "fusion", "scale".
    Source: Zeng et al., Multi-Grained Vision Language Pre-Training (2022), sections 3.1 and 3.3; GOAL's table of the state of the art.
    Differs from: the released code, which ranks by the logit of belonging together alone, not by its odds, leaves candidates after
    the first ones tied, and draws ITM's wrong pairs by the learned temperature also where an objective of fixed scale takes the
    place of ITC; its pretraining (regions with boxes, masked words) is not here.
    """

    name = "XVLM"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        visual_view: Literal["pixels"] = "pixels"
        text_view: Literal["tokens"] = "tokens"
        backbone: str
        text_backbone: str
        fusion_layers: Count = 6
        width: Count = 256
        rerank: CountOrZero = 128
        temperature: Positive = 0.07
        pretrained: str = ""
        scale: Literal["fixed", "learned"] = "fixed"

    visual_views = ("pixels",)
    text_views = ("tokens",)
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.backbone = open_visual(config.backbone, "grid")
        self.text_backbone = TextBackbone(config.text_backbone)
        sizes, layers = self.text_backbone.model.config, self._layers()
        below = len(layers) - config.fusion_layers
        if below < 1:
            raise DataError(
                f"{config.text_backbone} has {len(layers)} layers, expected more than model.fusion_layers = {config.fusion_layers}."
            )
        self.fusion = FusionEncoder(sizes, config.visual_width, config.fusion_layers)
        self.fusion.take_over(layers[below:])
        self.text_backbone.model.encoder.layer = layers[:below]
        width = sizes.hidden_size
        self.visual, self.text = nn.Linear(config.visual_width, config.width), nn.Linear(width, config.width)
        self.match = nn.Sequential(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.GELU(), nn.Linear(2 * width, 2))
        smallest, largest = SCALE_BOUNDS
        if config.pretrained and kept_folder(text_backbone.FOLDER) is None:
            self._begin_with(Path(config.pretrained))
        start = min(max(1 / config.temperature, smallest), largest)
        self.learned_scale = LearnedScale(start, smallest=smallest, largest=largest) if config.scale == "learned" else None

    def _begin_with(self, file: Path) -> None:
        """Take over what a converted checkpoint holds besides its two encoders. Raises DataError for a file that does not fit."""
        own = {name: part for name, part in self.state_dict().items() if name.startswith(PRETRAINED) or ".crossattention." in name}
        self.load_state_dict(storage.read_tensors(file, own), strict=False)

    def _layers(self) -> nn.ModuleList:
        """Those of the text encoder. Raises DataError for one that is no BERT."""
        kind = self.text_backbone.model.config.model_type
        if kind != "bert":
            raise DataError(
                f"{self.config.text_backbone} is a model of kind {kind}, expected bert: its upper layers become the cross-modal encoder."
            )
        layers: nn.ModuleList = self.text_backbone.model.encoder.layer
        return layers

    @property
    def scale(self) -> LearnedScale | None:
        return self.learned_scale

    @property
    def rerank(self) -> int:
        return self.config.rerank

    def parts(self) -> dict[str, list[nn.Module]]:
        parts: dict[str, list[nn.Module]] = {
            "backbone": [self.backbone],
            "text_backbone": [self.text_backbone],
            "visual": [self.visual],
            "text": [self.text],
            "fusion": [self.fusion, self.match],
        }
        return parts if self.learned_scale is None else parts | {SCALE: [self.learned_scale]}

    def encode_visual(self, items: Encoded) -> Encoded:
        """The unit vector "embedding" ``[N, D]``, and the "states" ``[N, 1 + R, E]``: of the whole image, then of its regions."""
        pixels = vectors(items)
        states = self.backbone.model(pixel_values=pixels).last_hidden_state.float()
        regions = grid_of(states, pixels, self.backbone.model)
        whole = states[:, :1] if states.dim() == 3 and states.shape[1] > regions.shape[1] else regions.mean(1, keepdim=True)
        return Encoded({"embedding": vectors(unit(self.visual(whole[:, 0]))), "states": torch.cat([whole, regions], 1)})

    def encode_text(self, items: Encoded) -> Encoded:
        """The unit vector "embedding" ``[N, D]``, and the "states" of the words ``[N, W, E]`` with their mask."""
        words = self.text_backbone(items)
        states = vectors(words).float()
        assert isinstance(words.mask, Tensor)
        return Encoded({"embedding": vectors(unit(self.text(states[:, 0]))), "states": states}, {"states": words.mask})

    def second_stage(self, visual: Encoded, text: Encoded) -> Tensor:
        """The log-odds that image i and text i belong together: ``[N]``."""
        logits = self._logits(visual, text)
        return logits[:, 1] - logits[:, 0]

    def extra_loss(self, visual: Encoded, text: Encoded, targets: Targets) -> Tensor:
        """ITM: each text with an image of its own, with a wrong one, and that own image with a wrong text, as far as there are wrong ones.

        Which are wrong is drawn from torch's generator, which the trainer seeds by the step.
        """
        own = targets.positive.long().argmax(0)
        with torch.no_grad():
            scale = 1 / self.config.temperature if self.learned_scale is None else self.learned_scale()
            scores = scale * self.score(visual, text).float()
            wrong = targets.negative
            texts, drawn_images = _drawn(scores.T, wrong.T)
            known, drawn_texts = _drawn(scores[own], wrong[own])
        images = torch.cat([own, drawn_images, own[known]])
        captions = torch.cat([torch.arange(len(own), device=own.device), texts, drawn_texts])
        belongs = (torch.arange(len(captions), device=own.device) < len(own)).long()
        return cross_entropy(self._logits(visual[images], text[captions]).float(), belongs)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def attention(self, visual: Encoded, text: Encoded) -> Attention | None:
        """By the cross-attention of the layer in the middle, times the gradient of the log-odds, summed over heads; without a second stage, None.

        A word's score is how much of the log-odds hangs on what the word takes from the image there, to first order. Source: ALBEF (Li
        et al., 2021), whose figures are Grad-CAM of the third layer of six.
        """
        if not self.rerank:
            return None
        kept = list[Tensor]()
        visual, text = self.encode_visual(visual.map(torch.clone)), self.encode_text(text.map(torch.clone))  # of inference mode, perhaps
        logits = self._logits(visual.map(_differentiable), text.map(_differentiable), kept)
        weights = kept[(len(kept) - 1) // 2]
        [slope] = torch.autograd.grad(logits[0, 1] - logits[0, 0], weights)
        parts = (weights * slope)[0].sum(0).detach()
        adding = parts[:, 1:].clamp(min=0)  # the first state is that of the whole image
        return Attention(adding / adding.sum(1, keepdim=True).clamp(min=SMALLEST), parts.sum(1))

    def _logits(self, visual: Encoded, text: Encoded, kept: list[Tensor] | None = None) -> Tensor:
        assert isinstance(visual.vectors, dict) and isinstance(text.vectors, dict) and isinstance(text.mask, dict)
        fused = self.fusion(text.vectors["states"], text.mask["states"], visual.vectors["states"], kept)
        logits: Tensor = self.match(fused[:, 0])
        return logits


def _differentiable(part: Tensor) -> Tensor:
    """The same as the beginning of a graph."""
    return part.detach().requires_grad_(part.is_floating_point())


def _drawn(scores: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of scores that have a wrong candidate, and for each of them one that is drawn."""
    rows = wrong.any(1).nonzero()[:, 0]
    chances = (scores[rows].softmax(1) + LEAST_CHANCE) * wrong[rows]
    return rows, torch.multinomial(chances, 1)[:, 0]
