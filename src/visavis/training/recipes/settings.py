"""Sections of a recipe: keys, their values and their defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from torch.utils._pytree import tree_flatten_with_path

from visavis.core import own_code, spec
from visavis.core.errors import format_value, suggest_name
from visavis.core.fields import MAX_INTEGER, PositiveFloat, require_dataclass
from visavis.data.noise import CATALOG, Noise
from visavis.evaluation import metrics
from visavis.evaluation.metrics.catalog import own_metric_keys, own_metrics
from visavis.losses import objectives
from visavis.losses.objectives import Objective
from visavis.models.encoders.cnn_backbones import SMALL_CNN
from visavis.training import supervision
from visavis.training.evaluation.result_sections import ResultSection
from visavis.training.supervision import PairSupervision, Supervision


def _object_of(
    kind: type, catalog: Sequence[type], group: str, *, optional: bool = False
) -> tuple[PlainValidator, PlainSerializer]:
    """How a key holds an object of a catalog: as text in TOML, which is parsed once, here. An
    optional one is None for an empty text.
    """

    def parse(value: Any, info: ValidationInfo) -> Any:
        if optional and value == "":
            return None
        if isinstance(value, kind):
            require_dataclass(own_code.name_part(type(value)))
            return value
        if isinstance(value, str):
            try:
                return spec.parse(value, catalog, kind, group)
            except own_code.CodeNotNamed as error:
                # A run of somebody else is evaluated and searched without its training code.
                return own_code.stand_in(kind, value, error)
        [example, *_] = [each.__name__ for each in catalog] or own_code.installed_names(group)
        raise ValueError(
            f"{info.field_name}: expected a text such as '{example}()', got {format_value(value)}."
        )

    return PlainValidator(parse), PlainSerializer(
        lambda value: "" if value is None else repr(value)
    )


ObjectiveKey = Annotated[Objective, *_object_of(Objective, objectives.CATALOG, "objectives")]
SupervisionKey = Annotated[
    Supervision, *_object_of(Supervision, supervision.CATALOG, "supervisions")
]
NoiseKey = Annotated[Noise | None, *_object_of(Noise, CATALOG, "noises", optional=True)]
SectionKey = Annotated[ResultSection, *_object_of(ResultSection, (), "sections")]


Share = Annotated[float, Field(ge=0, lt=1)]
"""Number from 0 to below 1."""


class RecipeSection(BaseModel):
    """Base class of the sections: immutable, strict about types (only a list may become a tuple),
    without unknown keys.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @field_validator("*")
    @classmethod
    def _check_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Check integers, and values in tables without a declared type, where NaN and None would be
        lost in the JSON of a recipe.
        """
        for path, leaf in tree_flatten_with_path(value)[0]:
            key = ".".join(
                [
                    str(info.field_name),
                    *(str(getattr(part, "idx", getattr(part, "key", ""))) for part in path),
                ]
            )
            if isinstance(leaf, int) and abs(leaf) > MAX_INTEGER:
                raise ValueError(
                    f"{key}: expected an integer up to {MAX_INTEGER:,}, got "
                    f"{format_value(leaf)}. Set a smaller number."
                )
            if isinstance(leaf, float) and not math.isfinite(leaf):
                raise ValueError(
                    f"{key}: expected a finite number, got {leaf}. Set one, or remove the key to "
                    "use its default."
                )
            if leaf is None and path:
                raise ValueError(
                    f"{key}: expected a value, got None. Set one, or remove the key to use its "
                    "default."
                )
        return value


class DataSettings(RecipeSection):
    """Data set.

    Attributes:
        path: Folder, a list file in it, or a name under ``VISAVIS_DATA``.
        stream: Shards to train on instead of the training split of ``path``: a pattern such as
            ``train-{000..039}.tar``, a folder, or an index file. Local, or at ``s3://``, ``gs://``
            or ``hf://``.
        interleave: Number of shards that a batch of a stream is read from.
        requires: Files and format that the recipe expects, as text. Shown if the data set does not
            exist.
        skip_bad: Whether to skip broken items instead of stopping.
        training_images: Number of training images, sampled by the seed. 0: all.
        training_captions: Number of captions of each training image, sampled by the seed. 0: all.
        noise: Training captions on wrong images (noisy correspondence), such as
            "ShuffledCaptions(share=0.4)". "": none. See ``visavis catalog noises``.
        feedback: Index whose votes are trained on, or file of ``visavis indexes export-votes``.
    """

    path: str = ""
    stream: str = ""
    interleave: int = Field(16, gt=0)
    requires: str = ""
    skip_bad: bool = False
    training_images: int = Field(0, ge=0)
    training_captions: int = Field(0, ge=0)
    noise: NoiseKey = None
    feedback: str = ""


class VisualSettings(RecipeSection):
    """Input of the visual side: features of a frozen image encoder, pixels, or stored features.

    Attributes:
        encoder: Image encoder, by name or folder. A model without an encoder cannot encode new
            images.
        granularity: "pooled": one vector per image. "regions": one vector per region. "frames": one
            vector per frame of a clip. "pixels": the encoder is part of the model and can be
            trained. "experts": named features of different lengths, some missing.
        features: Stored features instead of computed ones: an array with row i of image i,
            ``precomp`` for those of the data set, a ``.tsv`` file of bottom-up attention, a folder
            of ``ID.npy`` or ``ID.npz``, or a folder of experts. Or item vectors by the names of
            images: an index, a Parquet file, or ``NAME.npy`` with ids in ``NAME.ids.txt``.
        item_vectors: Train only the text side. The features are item vectors, which stay as they
            are: the score is their cosine with the vector of the text. Set automatically for
            vectors with ids.
        experts: Names of the experts to read. Empty: all.
        max_length: Maximum number of vectors of each expert, sampled evenly. 0: all.
        frames_per_second: Frame rate for granularity "frames".
        image_size: Edge of the square image, in pixels. 0: as the encoder is configured.
        max_num_patches: Number of patches of an encoder that keeps the aspect ratio of images, such
            as SigLIP 2 with NaFlex. 0: as the encoder is configured.
        full_decoding: Whether JPEG files are decoded in full, instead of at a reduced size with at
            least twice the pixels that the encoder reads. Slower for large files.
        crops: 1, or 10 for features of ten crops: center, corners and their mirror images.
        random_crops: Whether the ten crops have random positions, seeded by the pixels of the
            image.
        standardize: "zscore": features with mean 0 and standard deviation 1 over the training
            images. "sqrt_zscore": the same of their signed square roots. "": unchanged.
        augment: Whether to crop and flip training images at random. For "pixels" only.
        augment_crop: "random_area": 8 to 100 % of the area with another aspect ratio (VSE++).
            "random_sides": 60 to 100 % of both sides (VSE-infinity).
    """

    encoder: str = ""
    granularity: Literal["pooled", "regions", "pixels", "experts", "frames"] = "pooled"
    features: str = ""
    item_vectors: bool = False
    experts: tuple[str, ...] = Field((), strict=False)
    max_length: int = Field(0, ge=0)
    frames_per_second: float = Field(0.0, ge=0)
    image_size: int = Field(0, ge=0, le=10_000)
    max_num_patches: int = Field(0, ge=0, le=10_000)
    full_decoding: bool = False
    crops: Literal[1, 10] = 1
    random_crops: bool = False
    standardize: Literal["", "zscore", "sqrt_zscore"] = ""
    augment: bool = False
    augment_crop: Literal["random_area", "random_sides"] = "random_area"

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        pixels, experts, frames = (
            self.granularity == name for name in ("pixels", "experts", "frames")
        )
        if pixels and (self.features or self.crops > 1 or self.standardize):
            raise ValueError(
                'visual.features, visual.crops, visual.standardize: expected none with granularity "pixels", where the model reads images. '
                "Remove them."
            )
        if experts and (not self.features or self.encoder or self.crops > 1 or self.standardize):
            raise ValueError(
                'visual.granularity: "experts" needs visual.features, and neither visual.encoder, visual.crops nor visual.standardize. '
                "Set visual.features to a folder of experts, and remove the others."
            )
        if len(set(self.experts)) < len(self.experts):
            raise ValueError(
                f"visual.experts: expected different names, got {list(self.experts)}. Name each "
                "expert once."
            )
        if not experts and (self.experts or self.max_length):
            raise ValueError(
                f'visual.experts, visual.max_length: expected with granularity "experts" only, got "{self.granularity}". Remove them.'
            )
        if frames != (self.frames_per_second > 0) or (frames and (self.features or self.crops > 1)):
            raise ValueError(
                f'visual.frames_per_second: expected a rate > 0 with granularity "frames" only, without visual.features and visual.crops, got '
                f'{self.frames_per_second:g} with granularity "{self.granularity}". Set frames_per_second = 1.0, or another granularity.'
            )
        if self.random_crops and (self.crops == 1 or self.features):
            raise ValueError(
                "visual.random_crops: expected with visual.crops = 10 and without visual.features. "
                "Set crops = 10."
            )
        if self.encoder == SMALL_CNN and not pixels:
            raise ValueError(
                f'visual.encoder: {SMALL_CNN} has random weights and must be trained. Set visual.granularity = "pixels", or use another encoder.'
            )
        if self.item_vectors and (
            not self.features
            or self.granularity != "pooled"
            or self.encoder
            or self.standardize
            or self.crops > 1
        ):
            raise ValueError(
                'visual.item_vectors: expected visual.features with granularity "pooled", and no visual.encoder, visual.standardize or visual.crops, '
                "because item vectors are not changed. Remove the other keys of visual."
            )
        if self.augment and not pixels:
            raise ValueError(
                f'visual.augment: expected with granularity "pixels" only, got "{self.granularity}", whose features are computed once. Remove it.'
            )
        return self


class TextSettings(RecipeSection):
    """Input of the text side: token ids of words, or features of a frozen text encoder.

    Attributes:
        encoder: "vocabulary" for word embeddings trained from scratch, or a text encoder by name or
            folder.
        granularity: "tokens" of a vocabulary, or of a text encoder that is trained as part of the
            model. "pooled": one vector per text. "words": one vector per word piece. Both of a
            frozen encoder.
        features: Folder of stored caption features, as ``visavis data convert`` writes. A model of
            stored features cannot encode new texts.
        min_count: Minimum number of occurrences of a word in the training captions. The vocabulary
            has no punctuation.
    """

    encoder: str = "vocabulary"
    granularity: Literal["pooled", "words", "tokens"] = "tokens"
    features: str = ""
    min_count: int = Field(4, gt=0)


class OptimizerSettings(RecipeSection):
    """Optimizer and its learning rates.

    Attributes:
        name: Class of ``torch.optim``. "Ranger": RAdam with Lookahead.
        lr: Learning rate.
        betas: Decay rates of the mean gradient and of its square. Empty: defaults of the class,
            such as (0.9, 0.999) for AdamW.
        eps: Added to the root of the mean square. 0: default of the class, such as 1e-8 for
            AdamW.
        weight_decay: Weight decay of all parameters that ``no_decay`` does not name. The part
            "scale" has none.
        no_decay: Parameters without weight decay, each entry a rule or a pattern of names such as
            "*.token_embedding.*". "biases_and_norms": biases, and all parameters with fewer than
            two dimensions, such as the weights of norms. "positions": position embeddings, and
            class, mask and register tokens. Empty: all parameters have weight decay.
        lr_multipliers: Factor of the learning rate by part of the model, such as "visual", "text"
            or "backbone". Default 1.
        layer_decay: Further factor for each layer below the top of its part, such as 0.8, so that
            the early layers of a pretrained encoder change least.
    """

    name: Literal["Adam", "AdamW", "Ranger", "SGD"] = "Adam"
    lr: float = Field(5e-4, gt=0)
    betas: tuple[Share, ...] = Field((), strict=False)
    eps: float = Field(0.0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    no_decay: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        ("biases_and_norms", "positions"), strict=False
    )
    lr_multipliers: dict[str, PositiveFloat] = {}
    layer_decay: float = Field(1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _check_moments(self) -> Self:
        if len(self.betas) not in (0, 2):
            raise ValueError(
                f"optimizer.betas: expected two numbers, got {list(self.betas)}. Set both, such as "
                "[0.9, 0.95]."
            )
        if self.name == "SGD" and (self.betas or self.eps):
            raise ValueError(
                "optimizer.betas, optimizer.eps: expected none with SGD, which keeps no moments of "
                "the gradient. Remove them, or use AdamW."
            )
        return self


class ScheduleSettings(RecipeSection):
    """Learning rate schedule of a phase.

    Attributes:
        kind: "constant". "step": times ``factor`` after each epoch of ``milestones``.
            "exponential": times ``factor`` after every epoch. "cosine": to 0 at the end of the
            phase.
        milestones: Epochs of "step".
        factor: Factor of "step" and "exponential".
        warmup: Share of the steps of the phase in which the learning rate rises linearly from 0.
    """

    kind: Literal["constant", "step", "exponential", "cosine"] = "constant"
    milestones: tuple[Annotated[int, Field(gt=0)], ...] = Field((), strict=False)
    factor: PositiveFloat = 0.1
    warmup: float = Field(0.0, ge=0, lt=1)


class Phase(RecipeSection):
    """Epochs with one objective, supervision and optimizer.

    Attributes:
        epochs: Number of epochs.
        objective: Objective, such as "VLC(gamma=40)".
        learned_start: Which of a learned "scale" and "bias" of the scores start at the values of
            the objective instead of the model's. Default: those that the text of the objective
            names, such as "Sigmoid(scale=20, bias=-5)" or, as 1 / tau, "InfoNCE(tau=0.05)".
        supervision: Source of the targets, such as "PairSupervision(by='ids')".
        trainable: Parts of the model that are trained. Empty: all.
        frozen_layers: Number of lowest layers that are frozen by part of the model, such as
            { visual = 6, text = 4 }, with the embeddings below them. They stay in evaluation mode.
        optimizer: Optimizer.
        schedule: Learning rate schedule.
        initial_weights: "last": continue with the current weights. "best": continue with the
            weights of the best validation.
        keep_optimizer: Whether to keep the optimizer state of the phase before.
        loss_warmup_epochs: Epochs in which the loss is multiplied by a factor that rises from 0 to
            1, such as 1.0 for the first epoch of an encoder that was frozen before. 0: no warmup.
    """

    epochs: int = Field(gt=0)
    objective: ObjectiveKey
    learned_start: tuple[Literal["scale", "bias"], ...] = Field((), strict=False)
    supervision: SupervisionKey = PairSupervision()
    trainable: tuple[str, ...] = Field((), strict=False)
    frozen_layers: dict[str, Annotated[int, Field(ge=0)]] = {}
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    initial_weights: Literal["last", "best"] = "last"
    keep_optimizer: bool = False
    loss_warmup_epochs: float = Field(0.0, ge=0)


class TrainingSettings(RecipeSection):
    """Batches, steps, validations and checkpoints.

    Attributes:
        batch_size: Pairs per batch. Images per batch if ``captions_per_image`` is set.
        captions_per_image: Captions of each image in a batch. None: batches of pairs.
        length_buckets: Batches within which captions are sorted by length. 0: no sorting.
        clip_norm: Maximum norm of the gradient over all parameters. 0: no clipping.
        accumulation_steps: Batches whose gradients are averaged in one optimizer step.
        ema_decay: Decay of an exponential moving average of the weights, such as 0.999. The run
            keeps the averaged weights. Step t of a phase uses the smaller one of this decay and
            t / (t + 9), so that the first weights are soon forgotten. 0: no average.
        strategy: How several processes share a training. "ddp": each holds the whole model. "fsdp":
            each holds a part of the weights, gradients and optimizer state, and one copy of the
            weights for validations.
        chunk_size: Items that are encoded at once in a step, to save memory. The loss still
            compares all items of the batch. Activations are computed twice. 0: all items at once.
        activation_checkpointing: Whether to compute the activations of encoder blocks again in the
            backward pass, to save memory.
        compile: Whether to compile encoder blocks with ``torch.compile``. Needs a C++ compiler, or
            Triton on CUDA.
        autocast: Whether to multiply matrices in bfloat16. "auto": where the processor has
            instructions for it. Without them a step takes two to three times as long. "float16":
            float16 with scaled gradients, for older GPUs.
        patience: Validations without a better RSUM after which a phase ends. 0: never.
        evaluate_every: Steps between validations. 0: one validation per epoch.
        gradients_every: Steps between records of the norms of gradients. 0: none.
        checkpoint_s: Minimum time between checkpoints, in seconds.
        threads: CPU threads, at most 1,024. 0: the default of torch.
        workers: Processes that read and transform batches. 0: the training process. -1: one for
            each core of the process, at most 16. It is then 0 for fewer than 256 images of pixels,
            for two cores without a GPU, and below 1 GiB of shared memory. Batches do not depend on
            it.
        device: "auto" uses CUDA if available, else the GPU of an Apple computer ("mps").
        metric_batches: Batches of each split on which losses and similarities are logged.
        batches_per_epoch: Batches of an epoch, other ones in each. 0: all.
        track: Trackers that receive each validation, such as ["tensorboard"].
    """

    batch_size: int = Field(128, gt=1)
    captions_per_image: int | None = Field(None, gt=0)
    length_buckets: int = Field(0, ge=0)
    clip_norm: float = Field(2.0, ge=0)
    accumulation_steps: int = Field(1, gt=0)
    ema_decay: Share = 0.0
    strategy: Literal["ddp", "fsdp"] = "ddp"
    chunk_size: int = Field(0, ge=0)
    activation_checkpointing: bool = False
    compile: bool = False
    autocast: bool | Literal["auto", "float16"] = False
    patience: int = Field(0, ge=0)
    evaluate_every: int = Field(0, ge=0)
    gradients_every: int = Field(50, ge=0)
    checkpoint_s: float = Field(30.0, ge=0)
    threads: int = Field(0, ge=0, le=1024)
    workers: int = Field(-1, ge=-1, le=1024)
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    metric_batches: int = Field(2, gt=0)
    batches_per_epoch: int = Field(0, ge=0)
    track: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        (), strict=False
    )

    @field_validator("autocast", mode="before")
    @classmethod
    def _check_autocast(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value not in ("auto", "float16"):
            raise ValueError(
                f'training.autocast: expected true, false, "auto" or "float16", got {format_value(value)}. Set one of them.'
            )
        return value


class EvaluationSettings(RecipeSection):
    """Validation during the training and test at the end.

    Attributes:
        protocol: Name of a protocol, or a list of several, for the test split.
        validation: Name of the validation split.
        test: Name of the test split. "": no test.
        validation_images: A validation ranks the first images of its split with all their captions.
            0: all images.
        random_validation: Whether the seed draws the images of validation from these and the training
            images, as many as before. Then means over seeds do not depend on one small validation
            split (Bouthillier et al. 2021). Not set: only in a comparison within a time.
        sections: Further part of the result of the test, or a list of several, such as
            "Coherence(relevance='CBoW()')" for CS@K and nDCG@K. See ``visavis catalog sections``.
        extra_metrics: Keys of further metrics to print, such as ["i2t_map_at_5_hits"], or own
            metrics in a file, such as ["mrr.py:MRR"].
        average_networks: Whether to test the mean of the scores of both networks of
            ``NoisySupervision``.
        forgetting: Another data set, on whose test split the pretrained CLIP or SigLIP model is
            compared with the trained one.
    """

    protocol: str | tuple[str, ...] = "plain"
    validation: str = "val"
    test: str = "test"
    validation_images: int = Field(0, ge=0)
    random_validation: bool | None = None
    sections: tuple[SectionKey, ...] = Field((), strict=False)
    extra_metrics: tuple[str, ...] = Field((), strict=False)
    average_networks: bool = False
    forgetting: str = ""

    @property
    def protocols(self) -> tuple[str, ...]:
        """Names of all protocols. The metrics of the first are those of the run."""
        return (self.protocol,) if isinstance(self.protocol, str) else self.protocol

    @field_validator("protocol", mode="before")
    @classmethod
    def _check_protocol(cls, value: Any) -> str | tuple[str, ...]:
        names = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                "evaluation.protocol: expected the name of a protocol in quotes, or a list of "
                f"names, got {format_value(value)}."
            )
        if len(set(names)) < len(names):
            raise ValueError(
                f"evaluation.protocol: expected different names, got {format_value(value)}. Name "
                "each protocol once."
            )
        return value if isinstance(value, str) else names

    @field_validator("sections", mode="before")
    @classmethod
    def _list_sections(cls, value: Any) -> Any:
        """Take one text for a list of it, and an empty one for none."""
        return tuple(filter(None, [value])) if isinstance(value, str) else value

    @field_validator("extra_metrics")
    @classmethod
    def _check_extra_metrics(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        names = [metric.name for metric in metrics.CATALOG if metric.input != "relevance"]
        names += [metric.name for metric in own_metrics()]
        for key in keys:
            if ":" in key:
                own_metric_keys(key)
            elif key not in names:
                raise ValueError(
                    f"evaluation.extra_metrics: {key!r} is not a metric: {suggest_name(key, names)}"
                )
        return keys


class InterpolationSettings(RecipeSection):
    """Interpolation between the weights before and after the training (WiSE-FT), for fine-tuned
    models.

    Attributes:
        alphas: Shares of the trained weights to try. Empty: no interpolation.
        min_gain_ratio: The smallest alpha with this ratio of the best gain in validation RSUM is
            chosen, so that the model stays close to the pretrained one.

    Source:
        Wortsman et al., Robust fine-tuning of zero-shot models (2022).
    """

    alphas: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field((), strict=False)
    min_gain_ratio: float = Field(1.0, gt=0, le=1)
