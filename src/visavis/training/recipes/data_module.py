"""Data module: data, features and preprocessing of a recipe, ready for batches and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from visavis.core.encoded import Encoded, Modality, append_items
from visavis.core.errors import DataError, RecipeError, RunError, suggest_name
from visavis.core.process_group import ProcessGroup
from visavis.core.progress import ItemCounter, Progress
from visavis.core.run_context import RunContext
from visavis.data.dataset import Dataset
from visavis.data.feedback.training_pairs import (
    FeedbackPairs,
    FeedbackSplit,
)
from visavis.data.item_sources import (
    ConcatSource,
    FeatureReader,
    ItemSource,
    StoredFeatures,
)
from visavis.data.loader import BatchSchedule, Loader, share_workers
from visavis.data.random_transforms import RandomCrops
from visavis.data.shard_stream import (
    ShardStream,
    StreamImages,
    StreamLoader,
    StreamSchedule,
)
from visavis.data.tokenized_captions import TokenizedCaptions
from visavis.data.workers import choose_workers
from visavis.evaluation import Evaluation
from visavis.evaluation.protocols import Protocol, get_protocols
from visavis.models import Matcher
from visavis.models.batch_encoding import device_of, evaluation_mode
from visavis.models.device import choose_device
from visavis.models.encoders.text_backbone import EncoderTokens
from visavis.models.inference import batches_by_length, device_score, encode_items, equal_batches
from visavis.models.processor import Processor
from visavis.training.evaluation.evaluate_dataset import evaluate_dataset
from visavis.training.evaluation.ranked_split import first_images, select_captions
from visavis.training.evaluation.result_sections import ResultSection
from visavis.training.recipes.features import (
    caption_rows,
    image_rows,
    text_features,
    visual_features,
)
from visavis.training.recipes.recipe import Recipe
from visavis.training.recipes.settings import TrainingSettings

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
        query_features: Features of judged text queries, or of the extra texts. None: the model
            reads tokens, or it has neither.
        extra_texts: Texts of the supervision, which batches can hold besides the captions. Their
            numbers follow the captions of the training split.
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
    extra_texts: tuple[str, ...] = ()
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
        feedback = None if self.feedback is None else FeedbackSplit.from_pairs(split, self.feedback)
        train = self.loader(split, feedback, self.extra_texts)
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
        """Return the images and the captions of a split as inputs of the model. ``extra_captions``,
        the judged text queries, follow the captions.
        """
        settings = self.recipe.visual
        processor = self.processor
        texts = [*split.captions, *extra_captions] if extra_captions else split.captions
        visual: ItemSource
        if self.visual is None:
            visual = processor.open_images(
                split.images,
                RandomCrops(processor.preprocess_crops, settings.augment_crop)
                if settings.augment
                else None,
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

    def loader(
        self, split: Dataset, feedback: FeedbackSplit | None = None, extra_texts: Sequence[str] = ()
    ) -> Loader:
        """Build the batches of a split. A split that is smaller than a batch is one batch."""
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
            extra_texts
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
        """Encode all images and captions of a split in evaluation mode, in its order. Each process
        encodes its part of the batches.
        """
        # Idle worker processes of a given loader read the images. Else threads do.
        loader = loader or self.loader(split)
        images, captions = self._batches(split)
        return (
            self._encode(
                matcher, "visual", partial(loader.read_images, device=device_of(matcher)), images
            ),
            self._encode(matcher, "text", partial(map, loader.text.read), captions),
        )

    def encode_gallery(self, matcher: Matcher, split: Dataset) -> tuple[Encoded, Encoded]:
        """Encode a split, as `encode`, and its unpaired images and texts after its own."""
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
        return replace(
            self, data=part, visual=visual, text=text, query_features=None, extra_texts=()
        )

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
        group = self.group if len(batches) >= self.group.world_size else None
        part = batches if group is None else group.part(batches)
        task = "encoding images" if side == "visual" else "encoding captions"
        count = ItemCounter(self.progress, task, sum(map(len, part)))
        return encode_items(
            matcher,
            side,
            read(part),
            batches,
            group=group,
            on_batch=lambda done, _: count(done),
        )

    def evaluate(
        self,
        matcher: Matcher,
        split: str | Dataset,
        protocol: str | Protocol | Sequence[str | Protocol] = "plain",
        sections: Sequence[ResultSection] = (),
        encoded: tuple[Encoded, Encoded] | None = None,
    ) -> Evaluation:
        """Evaluate a model on a split, which is encoded once for all protocols, or given encoded."""
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
    """
    items = data.captions if training.captions_per_image is None else data.images
    return BatchSchedule(
        batch_size=training.batch_size,
        captions_per_image=training.captions_per_image,
        length_buckets=training.length_buckets,
        drop_last=len(items) > training.batch_size,
        batches_per_epoch=training.batches_per_epoch,
    )
