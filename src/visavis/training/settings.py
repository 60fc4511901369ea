"""The sections of a recipe: what each key means, which values it takes, and what it is where nobody says."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from visavis import degrees, metrics, objectives, spec, supervision
from visavis.errors import nearest
from visavis.models import small_cnn

Multiple = Annotated[float, Field(gt=0)]
"""What a learning rate is multiplied by."""


class Section(BaseModel):
    """Values are what they are written as: no True for a number, no 1000.0 for a whole one; only a list may be a tuple."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class DataSettings(Section):
    """The data set.

    path: a folder, a list in it, or a name under ``VISAVIS_DATA``. needs: which files in which layout a recipe expects there, in words, which
    are said where there is nothing of that name. skip_bad: leave out what is broken instead of stopping.
    training_images, training_captions: learn from at most so many images, and captions of each, drawn by the run's seed; 0: from all.
    misplaced: the share of training captions that are moved to wrong images, drawn by the run's seed, to study noise.
    judgements: the file in which the page of ``visavis serve`` keeps what people said, of which training images and sentences are learned.
    """

    path: str = ""
    needs: str = ""
    skip_bad: bool = False
    training_images: int = Field(0, ge=0)
    training_captions: int = Field(0, ge=0)
    misplaced: float = Field(0.0, ge=0, le=1)
    judgements: str = ""


class VisualSettings(Section):
    """The input of the visual side: features of a frozen image encoder, or pixels.

    tower: the image encoder, by name or folder; a model without one cannot read new images. view: of a frozen encoder one
    vector an image ("pooled") or one a region ("grid"); "pixels": the encoder is part of the model and may be trained; "experts":
    named features of unequal length, some missing. features: instead of computed ones, a stored array, row i of image i; "precomp":
    those that the data set brings (of experts, the folder ``experts`` beside its list);
    .tsv of bottom-up-attention, or a folder of ID.npy or ID.npz; the folder of a store of experts.
    experts: names of those that are read, all if empty. longest: vectors of each expert that are read, evenly spaced in a longer
    sequence; 0: all. frames_per_second: of clips, for "frames",
    one vector a frame, which models read as they read regions. size: pictures become squares of so many
    pixels an edge; 0: as the encoder's own preparation says. crops: 1, or 10 for features of ten crops: center, corners and mirror
    images, or with random_crops those that a picture's own pixels draw. standardize: features, or their square roots, at mean 0 and
    deviation 1 over the training images; "": as they are. augment: random crops and flips in training ("pixels" only). augment_crop: "area",
    8 to 100 % of the area, of another shape (VSE++); "sides", 60 to 100 % of both sides (VSE-infinity).
    """

    tower: str = ""
    view: Literal["pooled", "grid", "pixels", "experts", "frames"] = "pooled"
    features: str = ""
    experts: tuple[str, ...] = Field((), strict=False)
    longest: int = Field(0, ge=0)
    frames_per_second: float = Field(0.0, ge=0)
    size: int = Field(0, ge=0, le=10_000)
    crops: Literal[1, 10] = 1
    random_crops: bool = False
    standardize: Literal["", "values", "roots"] = ""
    augment: bool = False
    augment_crop: Literal["area", "sides"] = "area"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        pixels = self.view == "pixels"
        if pixels and (self.features or self.crops > 1 or self.standardize):
            raise ValueError(
                "visual.features, visual.crops and visual.standardize are for frozen features: "
                'visual.view is "pixels", where the model reads pictures.'
            )
        experts = self.view == "experts"
        if experts and (not self.features or self.tower or self.crops > 1 or self.standardize):
            raise ValueError(
                'visual.view = "experts" reads the store of experts that visual.features names: '
                "visual.tower, visual.crops and visual.standardize are for other views."
            )
        if len(set(self.experts)) < len(self.experts):
            raise ValueError(f"visual.experts is {list(self.experts)}, where one is named twice: name each expert once.")
        if not experts and (self.experts or self.longest):
            raise ValueError(f'visual.experts and visual.longest are for visual.view = "experts", found {self.view!r}.')
        if (self.view == "frames") != (self.frames_per_second > 0) or (self.view == "frames" and (self.features or self.crops > 1)):
            raise ValueError(
                f'visual.view is "{self.view}" with visual.frames_per_second = {self.frames_per_second:g}: expected a rate above 0, such as 1, '
                "for the view frames, without visual.features and visual.crops, and for no other view."
            )
        if self.random_crops and (self.crops == 1 or self.features):
            raise ValueError("visual.random_crops is for visual.crops = 10 of a tower whose features are computed.")
        if self.tower == small_cnn.NAME and not pixels:
            raise ValueError(f'visual.tower {self.tower} begins with random weights: train it with visual.view = "pixels".')
        if self.augment and not pixels:
            raise ValueError(f'visual.augment is for visual.view = "pixels"; features of the view {self.view} are computed once.')
        return self


class TextSettings(Section):
    """The input of the text side: token ids of words, or features of a frozen text encoder.

    tower: "vocabulary" for words with learned embeddings, or an encoder by name or folder. view: "tokens" of a vocabulary, or of an
    encoder that is part of the model and trained with it, the part "text_backbone" (or the model itself on both sides, CLIP); of a
    frozen encoder one vector a text ("pooled") or one a word piece ("words").
    features: the folder of stored features of captions, as ``visavis data convert`` writes, instead of an encoder; a model of these reads
    no new sentences. min_count: how often a word must occur in the training captions to be in the vocabulary, which has no punctuation.
    """

    tower: str = "vocabulary"
    view: Literal["pooled", "words", "tokens"] = "tokens"
    features: str = ""
    min_count: int = Field(4, gt=0)


class OptimizerSettings(Section):
    """The optimizer and its learning rates.

    name: a class of torch.optim. lr: the learning rate. weight_decay: of all parts but "scale". lr_multipliers: its factors by part of
    the model ("visual", "text", "backbone"); 1 for parts that are not named. layer_decay: a further factor for each layer below the
    top of its part, such as 0.8, so that the early layers of a pretrained encoder change least.
    """

    name: Literal["Adam", "AdamW", "SGD"] = "Adam"
    lr: float = Field(5e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    lr_multipliers: dict[str, Multiple] = {}
    layer_decay: float = Field(1.0, gt=0, le=1)


class ScheduleSettings(Section):
    """How the learning rate changes over a phase.

    kind: "constant"; "step": times ``factor`` after each epoch of ``milestones``; "exponential": after every epoch; "cosine": falling
    to 0. warmup: the share of the phase's steps over which the learning rate first rises linearly from 0.
    """

    kind: Literal["constant", "step", "exponential", "cosine"] = "constant"
    milestones: tuple[Annotated[int, Field(gt=0)], ...] = Field((), strict=False)
    factor: Multiple = 0.1
    warmup: float = Field(0.0, ge=0, lt=1)


class Phase(Section):
    """Epochs with one objective, supervision and optimizer.

    objective, supervision: texts of the catalogs, such as "VLC(gamma=40)". trainable: the parts of the model that learn, all if
    empty. start_from: begin with the last weights or the best ones by validation RSUM. keep_optimizer: take over the state of
    the optimizer from the phase before. ramp: epochs over which the loss is multiplied by what rises from 0 to 1, step by step, such as 1.0 for
    the first epoch of an encoder that was frozen before; 0: it counts in full.
    """

    epochs: int = Field(gt=0)
    objective: str
    supervision: str = "PairSupervision(by='ids')"
    trainable: tuple[str, ...] = Field((), strict=False)
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    start_from: Literal["last", "best"] = "last"
    keep_optimizer: bool = False
    ramp: float = Field(0.0, ge=0)

    @field_validator("objective")
    @classmethod
    def _objective(cls, text: str) -> str:
        return repr(objectives.parse(text))

    @field_validator("supervision")
    @classmethod
    def _supervision(cls, text: str) -> str:
        return repr(spec.parse(text, supervision.CATALOG))


class TrainingSettings(Section):
    """Batches, steps and what is watched.

    batch_size: pairs; images where ``captions_per_image`` is given, each with so many of its captions. length_buckets: batches
    within which captions are sorted by length; 0: not. clip_norm: the largest norm of the gradient over all parameters; 0: any.
    accumulate: batches whose gradients are averaged in one step. autocast: matrix products in bfloat16; "auto": where the
    processor multiplies it faster than float32, for without such instructions a step takes two to three times as long. patience: a phase ends
    after so many validations without a better RSUM; 0: never. evaluate_every: steps between validations; 0: an epoch.
    checkpoint_s: seconds that pass at least between checkpoints. threads: of the CPU; 0: as torch finds. device: "auto" takes CUDA
    where there is one. probe_batches: batches of each split on which losses and similarities are logged. batches_per_epoch: an epoch ends
    after so many of its batches, other ones each time; 0: after all.
    """

    batch_size: int = Field(128, gt=1)
    captions_per_image: int | None = Field(None, gt=0)
    length_buckets: int = Field(0, ge=0)
    clip_norm: float = Field(2.0, ge=0)
    accumulate: int = Field(1, gt=0)
    autocast: bool | Literal["auto"] = False
    patience: int = Field(0, ge=0)
    evaluate_every: int = Field(0, ge=0)
    checkpoint_s: float = Field(30.0, ge=0)
    threads: int = Field(0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    probe_batches: int = Field(8, gt=0)
    batches_per_epoch: int = Field(0, ge=0)

    @field_validator("autocast", mode="before")
    @classmethod
    def _autocast(cls, given: Any) -> Any:
        if not isinstance(given, bool) and given != "auto":
            raise ValueError(f'training.autocast is {given!r}: expected true, false or "auto".')
        return given


class EvaluationSettings(Section):
    """The validation after each epoch and the test at the end.

    protocol: a named protocol, or a list of several, for the test split. validation, test: names of splits. validation_images: a
    validation ranks the first so many images of its split, with all of their captions; 0: all of them. degrees: a way to tell
    degrees of relevance, such as "CBoW()"; the test then also has CS@K and nDCG@K. report: keys of further metrics to print, such as
    ["i2t_map_at_5_hits"]. average: test the mean of the scores of both networks, where ``NoisySupervision`` trains two. forgetting: another
    data set, of whose test split it is told how much of what the pretrained CLIP or SigLIP model knew the trained one still knows.
    """

    protocol: str | tuple[str, ...] = "plain"
    validation: str = "val"
    test: str = "test"
    validation_images: int = Field(0, ge=0)
    degrees: str = ""
    report: tuple[str, ...] = Field((), strict=False)
    average: bool = False
    forgetting: str = ""

    @property
    def protocols(self) -> tuple[str, ...]:
        """The names of all protocols; the metrics of the first stand for the run."""
        return (self.protocol,) if isinstance(self.protocol, str) else self.protocol

    @field_validator("protocol", mode="before")
    @classmethod
    def _protocol(cls, named: Any) -> str | tuple[str, ...]:
        several = tuple(named) if isinstance(named, list | tuple) else (named,)
        if not several or not all(isinstance(name, str) for name in several):
            raise ValueError(f"evaluation.protocol is {named!r}: expected the name of a protocol in quotes, or a list of several.")
        if len(set(several)) < len(several):
            raise ValueError(f"evaluation.protocol is {named!r}, where one is named twice: name each protocol once.")
        return named if isinstance(named, str) else several

    @field_validator("report")
    @classmethod
    def _report(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        known = [metric.name for metric in metrics.CATALOG]
        for key in keys:
            if key not in known:
                raise ValueError(f"evaluation.report names {key!r}, which is no metric: {nearest(key, known)}")
        return keys

    @field_validator("degrees")
    @classmethod
    def _degrees(cls, text: str) -> str:
        return text and repr(spec.parse(text, degrees.CATALOG))


class InterpolationSettings(Section):
    """Weights between those before the training and the trained ones; of use where a pretrained model goes on learning.

    shares: of the trained weights, those of before are the rest; (): the trained ones as they are. gain: the smallest share whose
    validation RSUM has so much of the best gain becomes the model of the run, so that it stays near to what was known before.
    Source: Wortsman et al., WiSE-FT (2022).
    """

    shares: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field((), strict=False)
    gain: float = Field(1.0, gt=0, le=1)
