"""Data module: data, features and model of a recipe, ready for batches. A training may start from
the model of another run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from visavis.core.encoded import Encoded, Modality, append_items
from visavis.core.errors import DataError, RecipeError, RunError, VisavisError, suggest_name
from visavis.core.process_group import ProcessGroup
from visavis.core.progress import ItemCounter, Progress
from visavis.core.run_context import RunContext
from visavis.core.spec import build_object
from visavis.data.dataset import Dataset
from visavis.data.features.expert_store import ExpertStore
from visavis.data.features.item_vectors import ItemVectors
from visavis.data.features.standardization import Standardization
from visavis.data.feedback.training_pairs import (
    FeedbackPairs,
    FeedbackSplit,
    read_feedback_pairs,
)
from visavis.data.item_sources import (
    ConcatSource,
    FeatureReader,
    ItemSource,
    StoredFeatures,
)
from visavis.data.loader import BatchSchedule, Loader, share_workers
from visavis.data.shard_stream import (
    ShardStream,
    StreamImages,
    StreamLoader,
    StreamSchedule,
)
from visavis.data.vocabulary import TokenizedCaptions
from visavis.data.workers import choose_workers
from visavis.evaluation import Evaluation
from visavis.evaluation.protocols import Protocol, get_protocols
from visavis.models import Matcher, find_model, suggest_model
from visavis.models.base import evaluation_mode, get_vectors
from visavis.models.device import choose_device
from visavis.models.encoders.frozen_encoders import (
    EmbeddingImageEncoder,
    VisualEncoder,
    open_encoder,
)
from visavis.models.encoders.text_backbone import EncoderTokens
from visavis.models.inference import (
    batches_by_length,
    device_of,
    device_score,
    encode_batches,
    encode_items,
    equal_batches,
    join_batches,
)
from visavis.models.layers import Whitening
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.models.text_side import text_side
from visavis.training.evaluation.evaluate_dataset import evaluate_dataset
from visavis.training.evaluation.ranked_split import first_images, select_captions
from visavis.training.evaluation.result_sections import ResultSection
from visavis.training.recipes.features import (
    caption_rows,
    feedback_query_features,
    image_rows,
    open_data,
    open_stream,
    report_cut_captions,
    sample_features,
    text_features,
    training_subset,
    visual_features,
)
from visavis.training.recipes.recipe import Recipe
from visavis.training.recipes.settings import TrainingSettings
from visavis.training.recipes.start_model import (
    copy_start_weights,
    load_start_model,
    start_scale_and_bias,
)
from visavis.training.supervision import OfflineNegativeSupervision

# Items that are encoded at once in an evaluation.
IMAGES_PER_BATCH = 256
CLIPS_PER_BATCH = 32
TEXTS_PER_BATCH = 512


@dataclass(frozen=True)
class DataModule:
    """Data and processors of a recipe.

    Attributes:
        recipe: Recipe.
        data: Whole data set.
        processor: Preprocessing of new images and texts.
        visual: Image features. None: the model reads pixels.
        text: Caption features. None: the model reads tokens.
        feedback: Judged pairs of training images. None: no feedback.
        query_features: Features of judged text queries. None: the model reads tokens, or the
            feedback has no queries.
        context: Progress, and the processes that share out batches and evaluations.
        stream: Shards of the training. None: the training split of ``data``.
    """

    recipe: Recipe
    data: Dataset
    processor: Processor
    visual: FeatureReader | None
    text: FeatureReader | None
    feedback: FeedbackPairs | None = None
    query_features: FeatureReader | None = None
    context: RunContext = field(default_factory=RunContext)
    stream: ShardStream | None = None

    @property
    def group(self) -> ProcessGroup:
        """Processes that train together."""
        return self.context.group

    @property
    def progress(self) -> Progress:
        """Receives progress and messages."""
        return self.context.progress

    @property
    def training_split(self) -> Dataset:
        """Training split of the data set, or the items of the stream."""
        if self.stream is None and self.recipe.data.stream:
            raise RecipeError(
                "data.stream: only visavis train reads shards. Set data.stream to an empty text, "
                "and data.path to a data set."
            )
        return self.data.split("train") if self.stream is None else self.stream.dataset

    @property
    def loaders(self) -> tuple[Loader, Loader]:
        """Batches of the training split, with its feedback, and of the validation split. Each
        process reads its part of a training batch.
        """
        split = self.training_split
        train = self.loader(
            split, None if self.feedback is None else FeedbackSplit.from_pairs(split, self.feedback)
        )
        train = replace(train, rank=self.group.rank, world_size=self.group.world_size)
        train, validation = self._share_workers([train, self.loader(self.validation)], split)
        return train, validation

    @property
    def validation(self) -> Dataset:
        """Split that each validation ranks, or its first images."""
        settings = self.recipe.evaluation
        splits = self.data.splits
        if settings.validation not in splits:
            raise DataError(
                f"evaluation.validation: {self.data.name} has no split {settings.validation}. Set "
                "evaluation.validation=NAME: "
                f"{suggest_name(settings.validation, splits)}"
            )
        split = first_images(self.data.split(settings.validation), settings.validation_images)
        # Results during a training are comparable with results on captioned images.
        return replace(split, unpaired=())

    def sources(
        self, split: Dataset, extra_captions: Sequence[str] = ()
    ) -> tuple[ItemSource, ItemSource]:
        """Return the inputs of the model for a split.

        Args:
            split: Split of the data set.
            extra_captions: Judged text queries, which follow the captions.

        Returns:
            The images and the captions.
        """
        settings = self.recipe.visual
        processor = self.processor
        texts = [*split.captions, *extra_captions] if extra_captions else split.captions
        visual: ItemSource
        if self.visual is None:
            visual = processor.open_images(
                split.images, settings.augment_crop if settings.augment else ""
            )
        else:
            visual = StoredFeatures(
                self.visual,
                image_rows(self.visual, split),
                settings.crops,
                processor.standardization,
            )
        if processor.vocabulary is not None:
            return visual, TokenizedCaptions(texts, processor.vocabulary)
        if processor.pretrained_tokenizer is not None:
            return visual, EncoderTokens(texts, processor.pretrained_tokenizer)
        assert self.text is not None
        captions = StoredFeatures(self.text, caption_rows(self.text, split))
        if self.query_features is None:
            return visual, captions
        queries = StoredFeatures(self.query_features, self.query_features.rows(extra_captions))
        return visual, ConcatSource(captions, queries, len(split.captions))

    def loader(self, split: Dataset, feedback: FeedbackSplit | None = None) -> Loader:
        """Build the batches of a split. A split that is smaller than a batch is one batch.

        Args:
            split: Split of the data set.
            feedback: The split with its feedback.

        Returns:
            The batches.
        """
        training = self.recipe.training
        data = split if feedback is None else feedback.data
        if isinstance(split.images, StreamImages):
            stream_schedule = StreamSchedule(
                batch_size=training.batch_size,
                batches_per_epoch=training.batches_per_epoch,
                interleave=self.recipe.data.interleave,
            )
            return self._share_workers(
                [StreamLoader(split, *self.sources(split), stream_schedule, self.recipe.seed)],
                split,
            )[0]
        queries = (
            ()
            if feedback is None
            else (*data.captions[len(split.captions) :], *feedback.unmatched_queries)
        )
        loader = Loader(
            data,
            *self.sources(split, queries),
            batch_schedule(training, data),
            self.recipe.seed,
            feedback,
        )
        return self._share_workers([loader], split)[0]

    def _share_workers(self, loaders: Sequence[Loader], split: Dataset) -> list[Loader]:
        """Let worker processes read the batches of a training. By default, stored features are read
        by this process.
        """
        training = self.recipe.training
        reads_files = self.visual is None or isinstance(split.images, StreamImages)
        has_gpu = choose_device(training.device, "training.device").type != "cpu"
        return share_workers(
            loaders,
            choose_workers(
                training.workers, len(split.images) if reads_files else 0, has_gpu=has_gpu
            ),
        )

    def encode(
        self, matcher: Matcher, split: Dataset, loader: Loader | None = None
    ) -> tuple[Encoded, Encoded]:
        """Encode all images and captions of a split in evaluation mode. Each process encodes its
        part of the batches.

        Args:
            matcher: Model.
            split: Split of the data set.
            loader: Batches of the split, whose idle worker processes read images. None: threads
                read them.

        Returns:
            The encoded images and captions, in the order of the split.
        """
        loader = loader or self.loader(split)
        images, captions = self._batches(split)
        return (
            self._encode(
                matcher, "visual", partial(loader.read_images, device=device_of(matcher)), images
            ),
            self._encode(matcher, "text", partial(map, loader.text.read), captions),
        )

    def encode_gallery(self, matcher: Matcher, split: Dataset) -> tuple[Encoded, Encoded]:
        """Encode a split, as `encode`, and its unpaired images and texts after its own.

        Args:
            matcher: Model.
            split: Split of the data set.

        Returns:
            The encoded images and captions.

        Raises:
            RunError: If the model reads stored features, which unpaired items of other data lack.
        """
        visual, text = self.encode(matcher, split)
        for part in split.unpaired:
            module = self._with_features_of(part)
            images, texts = self._batches(part)
            loader = Loader(part, *module.sources(part), BatchSchedule(), self.recipe.seed)
            if len(part.images):
                read = partial(loader.read_images, device=device_of(matcher))
                visual = append_items(visual, self._encode(matcher, "visual", read, images))
            if len(part.captions):
                read = partial(map, loader.text.read)
                text = append_items(text, self._encode(matcher, "text", read, texts))
        return visual, text

    def _with_features_of(self, part: Dataset) -> DataModule:
        """This module with features of unpaired items: the stored ones of the data set, or else
        computed ones.
        """
        visual = self.visual
        text = self.text
        is_stored = False
        if visual is not None and part.image_origin is not None:
            with suppress(DataError):  # the cached features lack images without captions
                image_rows(visual, part)
                is_stored = True
        if visual is not None and len(part.images) and not is_stored:
            if self.recipe.visual.features:
                raise RunError(
                    f"{part.name}: expected images with features in {self.recipe.visual.features}, "
                    "which the model reads, got others. Evaluate without these images."
                )
            visual, _ = visual_features(self.recipe, part, self.context)
        if text is not None and len(part.captions):
            if self.recipe.text.features:
                raise RunError(
                    f"{part.name}: expected captions with features in {self.recipe.text.features}, "
                    "which the model reads, got other texts. Evaluate without these texts."
                )
            text, _ = text_features(self.recipe, part, self.context, self.processor, None)
        return replace(self, data=part, visual=visual, text=text, query_features=None)

    def _batches(self, split: Dataset) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The batches in which images and captions are encoded."""
        is_large = self.recipe.visual.granularity in ("experts", "frames") or (
            self.visual is None and not self.processor.converts_single_images
        )
        images = np.arange(len(split.images))
        return (
            equal_batches(images, CLIPS_PER_BATCH if is_large else IMAGES_PER_BATCH),
            batches_by_length(split.captions, TEXTS_PER_BATCH),
        )

    def _encode(
        self,
        matcher: Matcher,
        side: Modality,
        read: Callable[[Sequence[np.ndarray]], Iterable[Encoded]],
        batches: list[np.ndarray],
    ) -> Encoded:
        """Encode the items of one side. A few batches are not worth sharing out."""
        if len(batches) < self.group.world_size:
            return join_batches(encode_batches(matcher, side, read(batches)), batches)
        part = self.group.part(batches)
        task = "encoding images" if side == "visual" else "encoding captions"
        count = ItemCounter(self.progress, task, sum(map(len, part)))
        local = encode_batches(matcher, side, read(part), on_items=count)
        return join_batches(self.group.all_gather_batches(local, len(batches)), batches)

    def evaluate(
        self,
        matcher: Matcher,
        split: str | Dataset,
        protocol: str | Protocol | Sequence[str | Protocol] = "plain",
        sections: Sequence[ResultSection] = (),
        encoded: tuple[Encoded, Encoded] | None = None,
    ) -> Evaluation:
        """Evaluate a model on a split, which is encoded once for all protocols.

        Args:
            matcher: Model.
            split: Split, or its name.
            protocol: Protocol or protocols.
            sections: Further parts of the result.
            encoded: Encoded images and captions of the split. None: they are encoded.

        Returns:
            The evaluation.

        Raises:
            DataError: If the split does not exist.
            SpecError: If a protocol does not fit the split.
        """
        protocols = get_protocols(protocol)
        data = self.data.split(split) if isinstance(split, str) else split
        if encoded is None:
            data = select_captions(data, protocols)
            encoded = self.encode_gallery(matcher, data)
        else:
            data = replace(data, unpaired=())
        score = device_score(matcher)
        memory = self.recipe.memory or None
        with evaluation_mode(matcher):
            return evaluate_dataset(
                *encoded,
                score,
                data,
                protocols,
                sections=sections,
                memory=memory,
                group=self.group,
            )


def batch_schedule(training: TrainingSettings, data: Dataset) -> BatchSchedule:
    """Make the schedule of the batches of a split. A split that is smaller than a batch is one
    batch.

    Args:
        training: Settings of a recipe.
        data: Split of a data set.

    Returns:
        The schedule.
    """
    items = data.captions if training.captions_per_image is None else data.images
    return BatchSchedule(
        batch_size=training.batch_size,
        captions_per_image=training.captions_per_image,
        length_buckets=training.length_buckets,
        drop_last=len(items) > training.batch_size,
        batches_per_epoch=training.batches_per_epoch,
    )


def prepare_training(
    recipe: Recipe, context: RunContext | None = None
) -> tuple[DataModule, Matcher]:
    """Open the data, compute or open the features, and build the model with its initial weights.

    Args:
        recipe: Recipe.
        context: Progress, and the processes that compute features together.

    Returns:
        The data and the model.

    Raises:
        RecipeError: If the model does not fit the data.
        DataError: If the data cannot be read.
    """
    context = context or RunContext()
    check_model_fields(recipe)
    with context.group.first_rank_first():
        start = load_start_model(recipe)
    data_module = open_data_module(
        recipe, context, start.processor if start else None, training=True
    )
    report_cut_captions(recipe, data_module.processor, data_module.data, context.progress)
    _check_splits(data_module)
    matcher = initial_matcher(data_module, start)
    matcher.matryoshka_dims = _resolve_matryoshka_dims(data_module, matcher)
    return data_module, matcher


def open_data_module(
    recipe: Recipe,
    context: RunContext | None = None,
    trained_processor: Processor | None = None,
    *,
    training: bool = False,
) -> DataModule:
    """Open the data and the features of a recipe.

    Args:
        recipe: Recipe.
        context: Progress, and the processes that compute features together.
        trained_processor: Processor of a trained model. None: it is built from the training split.
        training: Whether to read the feedback file.

    Returns:
        The data module.

    Raises:
        RecipeError: If the recipe does not fit the data.
        DataError: If the data cannot be read.
        RunError: If the features are other item vectors than those of the trained model.
    """
    context = context or RunContext()
    progress = context.progress
    with context.group.first_rank_first():  # the others find what it has checked and converted
        data = open_data(recipe, progress)
        feedback = read_feedback_pairs(recipe.data.feedback, data, progress) if training else None
        stream = open_stream(recipe, progress) if training else None
    visual, visual_encoder = visual_features(recipe, data, context)
    if isinstance(visual, ItemVectors) and recipe.data.skip_bad:
        data = visual.keep_items(data)
    queries = feedback.queries if feedback else ()
    text, processor = text_features(
        recipe,
        data,
        context,
        trained_processor,
        visual_encoder,
        queries,
        stream,
        new_words=training and recipe.visual.item_vectors,
    )
    if trained_processor:
        processor = replace(
            processor, visual_encoder_folder=trained_processor.visual_encoder_folder
        )
    if isinstance(visual, ItemVectors):
        visual.rows(image.name for image in data.images)
        trained = None if training else trained_processor
        if trained is not None and trained.items != visual.fingerprint:
            raise RunError(
                f"{visual.path}: expected the item vectors {trained.items}, for which the model was "
                f"trained, got {visual.fingerprint}. Restore them, or train again."
            )
        processor = replace(processor, items=visual.fingerprint)
    for skipped in data.skipped:
        progress.message(f"Skipped: {skipped}")
    if training and data.unpaired:
        progress.message(
            f"{data.name}: {len(data.unpaired_images):,} images without captions are not trained "
            "on. The test split ranks its own as candidates."
        )
    data = training_subset(recipe, data)
    query_features = feedback_query_features(feedback, data, processor, context.group)
    data_module = DataModule(
        recipe, data, processor, visual, text, feedback, query_features, context, stream
    )
    if not recipe.visual.standardize:
        return data_module
    standardization = (
        trained_processor.standardization
        if trained_processor
        else _fit_standardization(data_module)
    )
    return replace(data_module, processor=replace(processor, standardization=standardization))


def initial_matcher(data_module: DataModule, start: Retriever | None) -> Matcher:
    """Build the model with the weights that a training starts with.

    Args:
        data_module: Data of the recipe.
        start: Model of ``start_from``. None: new weights by the seed of the recipe.

    Returns:
        The model.

    Raises:
        RecipeError: If the model cannot be built, or differs from that of ``start_from``.
    """
    recipe = data_module.recipe
    matcher = build_matcher(
        data_module,
        recipe.seed,
        keep_bias=start is not None and start.matcher.logit_bias is not None,
    )
    if start is not None:
        copy_start_weights(start, matcher, data_module.processor, recipe)
    for phase in recipe.phases[:1]:
        start_scale_and_bias(matcher, phase)
    return matcher


def build_matcher(data_module: DataModule, seed: int, *, keep_bias: bool = False) -> Matcher:
    """Build the model of a recipe.

    Args:
        data_module: Data of the recipe.
        seed: Seed of the new weights.
        keep_bias: Whether the model has a learned bias even if no objective uses it.

    Returns:
        The model.

    Raises:
        RecipeError: If the model does not fit the features.
    """
    kind = find_model(data_module.recipe.model["kind"])
    assert kind is not None  # check_model_fields has found it
    if data_module.recipe.visual.item_vectors:
        kind = text_side(kind)
    torch.manual_seed(seed)
    try:
        matcher = kind(
            build_object(kind.Config, _architecture(data_module, kind, keep_bias=keep_bias))
        )
    except VisavisError as error:
        raise RecipeError(
            f"model {kind.name}: {str(error).removeprefix(f'{kind.__name__}: ')}"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise RecipeError(
            f"model {kind.name}: cannot be built: {str(error).splitlines()[0]}."
        ) from None
    if isinstance(data_module.visual, ItemVectors):
        _check_text_dim(data_module, matcher)
    for whitening in (module for module in matcher.modules() if isinstance(module, Whitening)):
        train = data_module.training_split
        whitening.fit(sample_features(data_module.sources(train)[1], len(train.captions)))
    return matcher


def _encode_one_text(data_module: DataModule, matcher: Matcher) -> torch.Tensor:
    _, text = data_module.sources(data_module.training_split)
    encoded = encode_items(matcher, "text", text.read, [np.arange(1)])
    return get_vectors(matcher.first_stage_items(encoded))


def _check_text_dim(data_module: DataModule, matcher: Matcher) -> None:
    """Check that a text side has vectors of the dimension of its items."""
    assert data_module.visual is not None
    expected = data_module.visual.embedding_dim
    actual = _encode_one_text(data_module, matcher).shape[1]
    if actual != expected:
        raise RecipeError(
            f"model {matcher.name}: expected texts of dimension {expected}, as the item vectors in "
            f"{data_module.recipe.visual.features}, got {actual}. Use another text encoder, or a "
            "model such as Heads."
        )


def _resolve_matryoshka_dims(data_module: DataModule, matcher: Matcher) -> tuple[int, ...]:
    """The Matryoshka dimensions of a recipe, with the full one last. () if the recipe names none."""
    recipe = data_module.recipe
    if not recipe.matryoshka_dims:
        return ()
    if not matcher.score_is_cosine:
        raise RecipeError(
            "matryoshka_dims: expected a model that scores by the cosine of one vector per item, "
            f"got {matcher.name}. Remove matryoshka_dims, "
            "or use a model such as Heads."
        )
    if any(isinstance(phase.supervision, OfflineNegativeSupervision) for phase in recipe.phases):
        raise RecipeError(
            "matryoshka_dims: OfflineNegativeSupervision supplies scores of full vectors only. "
            "Remove one of them."
        )
    full = _encode_one_text(data_module, matcher).shape[1]
    if max(recipe.matryoshka_dims) > full:
        raise RecipeError(
            f"matryoshka_dims: expected at most {full}, the dimensions of this model, got "
            f"{max(recipe.matryoshka_dims)}."
        )
    return tuple(sorted({*recipe.matryoshka_dims, full}))


def _check_splits(data_module: DataModule) -> None:
    """Check before a training that all splits exist and have features, and that the protocols fit
    the test split.
    """
    data = data_module.data
    settings = data_module.recipe.evaluation
    used = [data_module.training_split, data_module.validation]
    if (num_images := len(used[0].images)) < 2:
        raise RecipeError(
            f"{data.name}: expected at least 2 training images, got {num_images}. Add images to "
            "the training split."
        )
    for protocol in (
        get_protocols(settings.protocol)
        if settings.test in data.splits or settings.test not in ("", "test")
        else ()
    ):
        test = select_captions(data.split(settings.test), [protocol])
        protocol.validate(torch.arange(len(test.images)), torch.from_numpy(test.image_of))
        used.append(test)
    for split in used:
        if data_module.visual is not None:
            image_rows(data_module.visual, split)
        if data_module.text is not None:
            caption_rows(data_module.text, split)


def _fit_standardization(data_module: DataModule) -> Standardization:
    """Fit the standardization to the features of the training images."""
    train = data_module.training_split
    batches = map(
        data_module.sources(train)[0].read,
        equal_batches(np.arange(len(train.images)), IMAGES_PER_BATCH),
    )
    # Without the padding of features of different lengths.
    vectors = (
        get_vectors(items) if items.mask is None else get_vectors(items)[items.mask]  # type: ignore[index]
        for items in batches
    )
    return Standardization.fit(
        vectors, signed_sqrt=data_module.recipe.visual.standardize == "sqrt_zscore"
    )


DERIVED_MODEL_KEYS = {
    "backbone": 'visual.encoder with visual.granularity = "pixels"',
    "text_backbone": 'text.encoder with text.granularity = "tokens"',
    "visual_granularity": "visual.granularity",
    "text_granularity": "text.granularity",
    "visual_input_dim": "the encoder or features of visual",
    "text_input_dim": "the encoder or features of text",
    "experts": "visual.experts",
    "logit_bias": "the objective of the phases",
}
"""Fields of a model that follow from other sections of a recipe, and would be replaced."""


def check_model_fields(recipe: Recipe) -> None:
    """Check the model of a recipe before its data are read, so that a wrong name costs no time.

    Args:
        recipe: Recipe of a training.

    Raises:
        RecipeError: If the model does not exist, or a field is unknown or follows from the data.
    """
    name = str(recipe.model.get("kind"))
    kind = find_model(name)
    if kind is None:
        raise RecipeError(f"model.kind: {name!r} is not a model: {suggest_model(name)}")
    if recipe.visual.item_vectors:
        text_side(kind)
    known = {field.name for field in fields(kind.Config)} - DERIVED_MODEL_KEYS.keys()
    for key in recipe.model.keys() - {"kind"}:
        if source := DERIVED_MODEL_KEYS.get(key):
            raise RecipeError(
                f"model.{key}: expected none, because it follows from {source}. Remove "
                f"model.{key}, and set {source}."
            )
        if key not in known:
            raise RecipeError(
                f"model {kind.name}: Config has no field {key!r}: {suggest_name(key, sorted(known))}"
            )


def _architecture(
    data_module: DataModule, kind: type[Matcher], *, keep_bias: bool
) -> dict[str, Any]:
    """The fields of the model config: the fields of the recipe, the granularity and dimensions of
    the features, and a learned bias.
    """
    recipe = data_module.recipe
    architecture = {
        key: value for key, value in recipe.model.items() if key != "kind"
    } | _text_backbone_field(recipe, kind)
    uses_bias = keep_bias or any(
        phase.objective.without_bias() is not None for phase in recipe.phases
    )
    if (
        uses_bias
        and recipe.model.get("scale") == "learned"
        and "logit_bias" in {field.name for field in fields(kind.Config)}
    ):
        architecture |= {"logit_bias": "learned"}
    tokens = data_module.processor.vocabulary or data_module.processor.pretrained_tokenizer
    architecture |= {
        "visual_granularity": "regions"
        if recipe.visual.granularity == "frames"
        else recipe.visual.granularity,
        "text_granularity": recipe.text.granularity,
        "text_input_dim": len(tokens) if tokens else data_module.text.embedding_dim,  # type: ignore[union-attr]
    }
    if isinstance(data_module.visual, ExpertStore) and "experts" in kind.visual_granularities:
        architecture |= {"experts": data_module.visual.embedding_dims}
    if isinstance(data_module.visual, ItemVectors):
        return architecture | _item_vector_fields(data_module, kind)
    if data_module.visual is not None:
        return architecture | {"visual_input_dim": data_module.visual.embedding_dim}
    architecture |= {"backbone": recipe.visual.encoder}
    # The granularity of the backbone depends on the other fields, and its dimensions on its
    # granularity.
    granularity = build_object(
        kind.Config, architecture | {"visual_input_dim": 1}
    ).backbone_granularity
    encoder: VisualEncoder | EmbeddingImageEncoder = open_encoder(
        replace(data_module.processor.visual_spec, granularity=granularity)
    )  # type: ignore[assignment]
    return architecture | {"visual_input_dim": encoder.embedding_dim}


def _item_vector_fields(data_module: DataModule, kind: type[Matcher]) -> dict[str, Any]:
    """The fields of the config of a text side: its vectors have the dimensions of the items."""
    assert data_module.visual is not None
    dim = data_module.visual.embedding_dim
    known = {field.name: field for field in fields(kind.Config)}
    values: dict[str, Any] = {"visual_input_dim": dim}
    # A matcher that reads no pooled features is built for its own kind, without its visual side.
    granularities = kind.visual_granularities
    values["visual_granularity"] = "pooled" if "pooled" in granularities else granularities[0]
    if "embedding_dim" in known:
        values["embedding_dim"] = dim
    if "backbone" in known and known["backbone"].default is MISSING:
        # A dual encoder, whose text encoder it is.
        values["backbone"] = data_module.recipe.text.encoder
    return values


def _text_backbone_field(recipe: Recipe, kind: type[Matcher]) -> dict[str, str]:
    """The config field ``text_backbone`` with its value, or {} if the recipe trains no separate
    text encoder.
    """
    text = recipe.text
    if text.encoder == "vocabulary" or text.granularity != "tokens":
        return {}
    if "text_backbone" in {field.name for field in fields(kind.Config)}:
        return {"text_backbone": text.encoder}
    if text.encoder == recipe.visual.encoder or recipe.visual.item_vectors:  # a dual encoder
        return {}
    raise RecipeError(
        f'text.granularity: expected a frozen text encoder for {kind.name}, got "tokens". Set text.granularity = "pooled" or "words".'
    )
