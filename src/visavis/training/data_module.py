"""What a recipe's training is made of: data, what the model reads of it, and the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.data.experts import ExpertStore
from visavis.data.judged import JudgedPairs, JudgedSplit
from visavis.data.loader import Features, Joined, Loader, Plan, Rows, Source, Tokens
from visavis.data.standardization import Standardization
from visavis.errors import DataError, RecipeError, VisavisError, nearest
from visavis.evaluation import Evaluation
from visavis.evaluation.of_data import evaluate_data, read_by
from visavis.evaluation.protocols import Protocol, all_named
from visavis.models import CATALOG, Matcher
from visavis.models.base import evaluating, vectors
from visavis.models.encoding import batches_by_length, batches_of_about, encode
from visavis.models.pixel_source import CROPS, PixelSource
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.models.scoring import score_from_cpu
from visavis.models.tokenizing import PretrainedTokens
from visavis.models.towers import VisualTower
from visavis.progress import Progress, Silent
from visavis.spec import build
from visavis.training.inputs import as_trained_on, open_data, text_features, visual_features
from visavis.training.judgements import read_pairs, sentence_features
from visavis.training.recipe import Recipe
from visavis.training.starting import open_start, take_over
from visavis.types import Encoded

ENCODE_IMAGES, ENCODE_CLIPS, ENCODE_TEXTS = 256, 32, 512


@dataclass(frozen=True)
class DataModule:
    """A recipe's data and processors, ready to be cut into batches.

    data: the whole data set. processor: how new images and texts become what the model reads. visual, text: stores, or None
    for pixels and vocabularies. judged: what people said of training images, where a training learns of it; sentences: a store of what they asked.
    """

    recipe: Recipe
    data: Dataset
    processor: Processor
    visual: Features | None
    text: Features | None
    judged: JudgedPairs | None = None
    sentences: Features | None = None

    @property
    def train(self) -> Loader:
        """The batches of the training split, with what people judged of it."""
        split = self.data.split("train")
        return self.loader(split, None if self.judged is None else JudgedSplit.of(split, self.judged))

    def sources(self, split: Dataset, further: Sequence[str] = ()) -> tuple[Source, Source]:
        """What the model reads of a split's images and captions, and of judged sentences after these."""
        settings, vocabulary = self.recipe.visual, self.processor.vocabulary
        visual: Source
        if self.visual is None:
            of_crops = self.processor.preprocess_crops if settings.augment else None
            visual = PixelSource(split, self.processor.preprocess, of_crops, CROPS[settings.augment_crop])
        else:
            rows = self.visual.rows(image.name for image in split.images)
            visual = Rows(self.visual, rows, settings.crops, self.processor.standardization)
        if vocabulary is not None:
            return visual, Tokens([*split.captions, *further], vocabulary)
        if self.processor.tokens is not None:
            return visual, PretrainedTokens([*split.captions, *further], self.processor.tokens)
        assert self.text is not None
        captions = Rows(self.text, self.text.rows(split.captions))
        if self.sentences is None:
            return visual, captions
        return visual, Joined(captions, Rows(self.sentences, self.sentences.rows(further)), len(split.captions))

    def look_up(self, split: Dataset) -> None:
        """Raise DataError for an image or a caption of a split of which nothing is stored, where the model reads stored features."""
        if self.visual is not None:
            self.visual.rows(image.name for image in split.images)
        if self.text is not None:
            self.text.rows(split.captions)

    def loader(self, split: Dataset, judged: JudgedSplit | None = None) -> Loader:
        """The batches of a split by the recipe's plan; a split smaller than a batch comes as one. judged: the split with what people said."""
        training = self.recipe.training
        further: tuple[str, ...] = ()
        if judged is not None:
            further = (*judged.data.captions[len(split.captions) :], *judged.alone)
        sources = self.sources(split, further)
        split = split if judged is None else judged.data
        items = split.captions if training.captions_per_image is None else split.images
        plan = Plan(
            batch_size=training.batch_size,
            captions_per_image=training.captions_per_image,
            length_buckets=training.length_buckets,
            drop_last=len(items) > training.batch_size,
            batches_per_epoch=training.batches_per_epoch,
        )
        return Loader(split, *sources, plan, self.recipe.seed, judged)

    def encode(self, matcher: Matcher, split: Dataset) -> tuple[Encoded, Encoded]:
        """All images and all captions of a split, in order, encoded in evaluation mode."""
        visual, text = self.sources(split)
        at_once = ENCODE_CLIPS if self.recipe.visual.view in ("experts", "frames") else ENCODE_IMAGES
        return (
            encode(matcher, "visual", visual.read, batches_of_about(np.arange(len(split.images)), at_once)),
            encode(matcher, "text", text.read, batches_by_length(split.captions, ENCODE_TEXTS)),
        )

    @property
    def validation(self) -> Dataset:
        """What each validation ranks: the recipe's split, or its first images."""
        settings, splits = self.recipe.evaluation, self.data.splits
        if settings.validation not in splits:
            raise DataError(
                f"data set {self.data.name} has no split {settings.validation}, which validations rank: name another by "
                f"evaluation.validation=NAME; {nearest(settings.validation, splits)}"
            )
        return first_images(self.data.split(settings.validation), settings.validation_images)

    def evaluate(
        self,
        matcher: Matcher,
        split: str | Dataset,
        protocol: str | Protocol | Sequence[str | Protocol] = "plain",
        degrees: str = "",
        semantics: str = "reference",
    ) -> Evaluation:
        """The metrics of a matcher on a split, by its name or itself, encoded once; arguments as those of ``evaluate_data``.

        Raises DataError for an unknown split, SpecError if a protocol does not fit.
        """
        rules = all_named(protocol)
        data = read_by(self.data.split(split) if isinstance(split, str) else split, rules)
        visual, text = self.encode(matcher, data)
        with evaluating(matcher):
            return evaluate_data(
                visual,
                text,
                score_from_cpu(matcher),
                data,
                rules,
                degrees=degrees,
                semantics=semantics,
                memory=self.recipe.memory or None,
            )


def first_images(split: Dataset, number: int) -> Dataset:
    """The first images of a split with their captions; 0: all."""
    return split.take(np.arange(len(split.images))[: number or None])


def prepare(recipe: Recipe, progress: Progress | None = None) -> tuple[DataModule, Matcher]:
    """Open the data, compute or open the features, build the model. Raises RecipeError or DataError in one sentence."""
    kind = str(recipe.model.get("kind"))
    if kind not in CATALOG:
        raise RecipeError(f"model.kind is {kind!r}, which is no model: {nearest(kind, CATALOG)}")
    start = open_start(recipe)
    data_module = open_data_module(recipe, progress, start.processor if start else None, training=True)
    _check_splits(data_module)
    matcher = initial_matcher(data_module, start)
    matcher.widths = widths_of(recipe, data_module, matcher)
    return data_module, matcher


def initial_matcher(data_module: DataModule, start: Retriever | None) -> Matcher:
    """The model with the weights that a training begins with: those of ``start``, or by the seed of the recipe. Raises RecipeError."""
    recipe = data_module.recipe
    matcher = new_matcher(data_module, recipe.seed)
    if start is not None:
        take_over(start, matcher, data_module.processor, recipe)
    return matcher


def new_matcher(data_module: DataModule, seed: int) -> Matcher:
    """The model of a recipe, with the random weights of a seed. Raises RecipeError."""
    recipe, name = data_module.recipe, str(data_module.recipe.model["kind"])
    kind = CATALOG[name]
    torch.manual_seed(seed)
    try:
        return kind(build(kind.Config, _architecture(recipe, data_module, kind)))
    except VisavisError as error:
        raise RecipeError(f"model {name}: {str(error).removeprefix(f'{kind.__name__}: ')}") from None
    except (ValueError, RuntimeError) as error:
        raise RecipeError(f"model {name} cannot be built: {str(error).splitlines()[0]}.") from None


def widths_of(recipe: Recipe, data_module: DataModule, matcher: Matcher) -> tuple[int, ...]:
    """The widths that a matcher is trained for, that of its vectors the last; () where the recipe names none. Raises RecipeError."""
    named = ", ".join(map(str, recipe.widths))
    if not recipe.widths:
        return ()
    if not matcher.score_is_cosine:
        raise RecipeError(
            f"widths are {named}, but {matcher.name} scores by more than the cosine of two vectors, whose first numbers alone it cannot "
            "compare: leave widths out, or take a model of one vector an item, such as Heads."
        )
    if any(phase.supervision.startswith("BankSupervision(") for phase in recipe.phases):
        raise RecipeError(f"widths are {named}, but BankSupervision tells scores of whole vectors: leave out one of them.")
    _, text = data_module.sources(data_module.data.split("train"))
    whole = vectors(matcher.first_stage(encode(matcher, "text", text.read, [np.arange(1)]))).shape[1]
    if max(recipe.widths) > whole:
        raise RecipeError(f"widths are {named}, but the vectors of this model have {whole} numbers: expected none above {whole}.")
    return tuple(sorted({*recipe.widths, whole}))


def open_data_module(
    recipe: Recipe, progress: Progress | None = None, trained: Processor | None = None, *, training: bool = False
) -> DataModule:
    """The data and features of a recipe. trained: a model's processor, instead of one made from the training split. training: with what
    people judged.
    """
    progress = progress or Silent()
    data = open_data(recipe, progress, skip_bad=recipe.data.skip_bad)
    judged = read_pairs(recipe, data, progress) if training else None
    visual, visual_tower = visual_features(recipe, data, progress)
    text, processor = text_features(recipe, data, progress, trained, visual_tower, judged.sentences if judged else ())
    processor = replace(processor, tower_folder=trained.tower_folder) if trained else processor
    for sentence in data.skipped:
        progress.say(f"left out: {sentence}")
    data = as_trained_on(recipe, data)
    data_module = DataModule(recipe, data, processor, visual, text, judged, sentence_features(judged, data, processor))
    if not recipe.visual.standardize:
        return data_module
    standardization = trained.standardization if trained else _standardization(data_module)
    return replace(data_module, processor=replace(processor, standardization=standardization))


def _check_splits(data_module: DataModule) -> None:
    """Refuse splits that are not there or lack stored features, and a protocol that the test split does not fit, before anything is trained."""
    data, settings = data_module.data, data_module.recipe.evaluation
    protocols, name = all_named(settings.protocol), settings.test
    train = data.split("train")
    read = [train, data_module.validation]
    if len(train.images) < 2:
        raise RecipeError(f"the training split of {data.name} has one image: there is nothing to tell it from; expected at least 2.")
    for protocol in protocols if name in data.splits or name != "test" else ():
        test = read_by(data.split(name), [protocol])
        protocol.check(torch.arange(len(test.images)), torch.from_numpy(test.image_of))
        read.append(test)
    for split in read:
        data_module.look_up(split)


def _standardization(data_module: DataModule) -> Standardization:
    """That of the training images' features."""
    train = data_module.data.split("train")
    source, _ = data_module.sources(train)
    blocks = batches_of_about(np.arange(len(train.images)), ENCODE_IMAGES)
    return Standardization.of((_there(source.read(block)) for block in blocks), root=data_module.recipe.visual.standardize == "roots")


def _there(items: Encoded) -> Tensor:
    """The vectors of items that are there, without those that only fill up."""
    return vectors(items) if items.mask is None else vectors(items)[items.mask]  # type: ignore[index]


def _architecture(recipe: Recipe, data_module: DataModule, kind: type[Matcher]) -> dict[str, Any]:
    """The model's fields: the recipe's own, and the views and widths that the features have."""
    architecture = {key: value for key, value in recipe.model.items() if key != "kind"} | _text_backbone(recipe)
    words = data_module.processor.vocabulary or data_module.processor.tokens
    text_width = len(words) if words else data_module.text.width  # type: ignore[union-attr]
    visual_view = "grid" if recipe.visual.view == "frames" else recipe.visual.view
    architecture |= {"visual_view": visual_view, "text_view": recipe.text.view, "text_width": text_width}
    if isinstance(data_module.visual, ExpertStore) and "experts" in kind.visual_views:
        architecture |= {"experts": data_module.visual.widths}
    if data_module.visual is not None:
        return architecture | {"visual_width": data_module.visual.width}
    architecture |= {"backbone": recipe.visual.tower}
    view = build(kind.Config, architecture | {"visual_width": 1}).tower_view
    tower: VisualTower = replace(data_module.processor.visual_spec, view=view).open()  # type: ignore[assignment]
    return architecture | {"visual_width": tower.width}


def _text_backbone(recipe: Recipe) -> dict[str, str]:
    """The field of a matcher that trains its text encoder. Raises RecipeError for one that trains none."""
    kind, text = CATALOG[recipe.model["kind"]], recipe.text
    if "text_backbone" in recipe.model:
        raise RecipeError('model.text_backbone follows from text.tower: name the encoder there, with text.view = "tokens".')
    if text.tower == "vocabulary" or text.view != "tokens":
        return {}
    if "text_backbone" not in {field.name for field in fields(kind.Config)}:
        if text.tower == recipe.visual.tower:  # a dual encoder
            return {}
        raise RecipeError(f'{kind.name} trains no text encoder: with text.view = "pooled" or "words" it reads one as it is.')
    return {"text_backbone": text.tower}
