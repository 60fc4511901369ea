"""Any objective as a loss for SentenceTransformerTrainer.

``SentenceTransformerTrainer(model, args, train_dataset=..., loss=VisavisLoss(model, Unified(reduction="half_mean")))``
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from visavis import storage
from visavis.engine import LearnedScale, PairLoss, in_chunks
from visavis.engine.items import vectors
from visavis.errors import RunError, ShapeError, SpecError, VisavisError, in_the_words_of, say
from visavis.integrations.metric_learning import check_one_each, compared_with_each_other
from visavis.objectives import Objective
from visavis.targets import as_ids

NOBODY = torch.iinfo(torch.int64).min  # the id of negatives, which belong to no anchor
LOSSES: WeakSet[VisavisLoss] = WeakSet()
"""All there are: made in the same order on every process, so that the numbers of a model's losses name them there too."""
MODELS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""A number for each model, which stays with its losses when the trainer has wrapped it."""
NUMBERS = count()


class VisavisLoss(nn.Module):
    """A loss for models of sentence-transformers, in both directions, of texts, images or any other inputs they encode.

    model: the SentenceTransformer. objective, scale, gather: as for PairLoss (scale = 1 / temperature); a ``LearnedScale`` is trained.
    mini_batch_size: so many inputs of a column are embedded at once, and again in the backward pass; value and gradient stay
    those of the whole batch, and memory is that of one mini batch.
    The columns of the dataset, in order: (anchor, positive), then any number of columns of negatives, which are candidates
    of every anchor and never queries; or one column alone with labels. A column ``label`` holds ids, whole numbers: rows of
    equal id belong together. Without it, each anchor belongs to its own positive. Scores are cosines.

    Several data sets: give each a VisavisLoss of its own, in a dict. Under several processes a step gathers where all of them hold the
    same one; where they hold several, or one loss serves more than one data set, it says so and each compares its own items alone.
    Raises ShapeError, SpecError.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        scale: float | Tensor | LearnedScale | None = None,
        gather: bool | None = None,
        mini_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if mini_batch_size is not None and (
            isinstance(mini_batch_size, bool) or not isinstance(mini_batch_size, int) or mini_batch_size < 1
        ):
            raise SpecError(
                f"VisavisLoss got mini_batch_size={mini_batch_size!r}, expected a whole number above 0, or None for all at once."
            )
        self.model = model
        self.objective = objective
        self.gather = gather
        self.mini_batch_size = mini_batch_size
        self.card = getattr(model, "model_card_data", None)  # the trainer notes its data sets there; what wraps the model later has none
        self.model_number = MODELS.setdefault(model, next(NUMBERS))
        self.number: int = 1 + max((loss.number for loss in LOSSES if loss.model_number == self.model_number), default=0)
        LOSSES.add(self)
        with in_the_words_of("VisavisLoss", "PairLoss"):
            self.loss = PairLoss(objective, scale=scale, gather=gather, data_set=f"VisavisLoss {self.number} of its model")

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        self.loss.train(self.model.training)  # the trainer switches the model alone
        self.loss.gather = self._gather()
        with in_the_words_of("VisavisLoss", "PairLoss"):
            anchors, *others = [self._embedded(features) for features in sentence_features]
            ids = None if labels is None else as_ids(labels, "labels")
            if not others:
                if ids is None:
                    raise ShapeError("VisavisLoss got one column without labels: add a column of positives, or a column label of ids.")
                return compared_with_each_other(self.loss, anchors, ids)
            if ids is not None:
                check_one_each(ids, anchors)
            positives, *negatives = others
            if not negatives:
                return self.loss(anchors, positives, ids)
            extra = torch.cat(negatives)
            return self.loss(anchors, positives, ids, extra_texts=extra, extra_text_ids=[NOBODY] * len(extra))

    def _gather(self) -> bool | None:
        """False where it cannot be known which data set the other processes hold: one loss is called for several."""
        data_sets = len(getattr(self.card, "train_datasets", ()))
        losses = sum(loss.model_number == self.model_number for loss in LOSSES)
        if self.gather is not None or data_sets <= max(losses, 1):
            return self.gather
        if self.loss.training and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            say(
                f"{data_sets} data sets share {losses} VisavisLoss, which cannot know what the other processes hold, so each "
                "compares its own items alone: give each data set a VisavisLoss of its own, in a dict, or gather=False."
            )
        return False

    def _embedded(self, features: dict[str, Any]) -> Tensor:
        if self.mini_batch_size is None:
            return self.model(features)["sentence_embedding"]
        parts = [Embedding(self.model, part) for part in in_mini_batches(features, self.mini_batch_size)]
        return vectors(in_chunks(lambda part: part(), parts))

    @property
    def uses_gradient_cache(self) -> bool:
        """As sentence-transformers' wrappers ask: whether inputs are embedded again in the backward pass."""
        return self.mini_batch_size is not None

    @property
    def calculate_loss(self) -> Callable[..., Tensor]:
        """What MatryoshkaLoss replaces in a loss of mini batches."""
        raise VisavisError(
            "VisavisLoss(mini_batch_size=) cannot stand inside MatryoshkaLoss, which cuts embeddings short in the forward pass alone: "
            "leave mini_batch_size out."
        )

    def get_config_dict(self) -> dict[str, Any]:
        """The loss as model cards describe it: the objective with the temperature that rules, and 1 / temperature as the scale.

        The trainer asks before the first step: a scale that is learned is there the one it starts from.
        """
        scale = self.loss.scale
        number = scale.start if isinstance(scale, LearnedScale) else scale.item() if isinstance(scale, Tensor) else scale
        objective: Any = self.objective
        if number is not None:
            objective = replace(objective, tau=float(f"{1 / number:.6g}"))
        return {
            "objective": repr(objective),
            "scale": f"learned, from {number:g}" if isinstance(scale, LearnedScale) else number,
            "similarity_fct": "cos_sim",
        }

    @property
    def citation(self) -> str:
        """A BibTeX entry for the source of the objective."""
        source = re.search(r"Source: (.*?)(?=\n[A-Z][a-z ]+:|\Z)", inspect.getdoc(type(self.objective)) or "", re.DOTALL)
        note = f"Objective {self.objective!r}" + (f"; source: {' '.join(source[1].split())}" if source else "")
        return f"\n@misc{{visavis,\n    title = {{visavis: vision-language retrieval}},\n    note = {{{in_latex(note)}}},\n}}\n"


def in_latex(text: str) -> str:
    r"""The text with LaTeX's special characters escaped.

    >>> print(in_latex("Goal(pair='sig_ms'), 50%"))
    Goal(pair='sig\_ms'), 50\%
    """
    marks: dict[str, str | int | None] = {mark: f"\\{mark}" for mark in "{}&%$#_"}
    named = {"\\": "textbackslash", "~": "textasciitilde", "^": "textasciicircum", "<": "textless", ">": "textgreater", "|": "textbar"}
    return text.translate(str.maketrans(marks | {mark: f"\\{name}{{}}" for mark, name in named.items()}))


class Embedding:
    """A mini batch that is embedded when called: by what wraps the model at first, in the backward pass by the model itself,

    because DistributedDataParallel prepares for another backward pass whenever it is entered.
    """

    def __init__(self, model: nn.Module, features: dict[str, Any]) -> None:
        self.model, self.features = model, features

    def __call__(self) -> Tensor:
        model = self.model
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        return model(dict(self.features))["sentence_embedding"]  # a copy: modules write into it


def in_mini_batches(features: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """The features of so many inputs each. Raises ShapeError unless every tensor has one row for each input."""
    cut = {name: value for name, value in features.items() if isinstance(value, Tensor) and value.dim()}
    lengths = {len(value) for value in cut.values()}
    if len(lengths) != 1:
        found = ", ".join(f"{name} {list(value.shape)}" for name, value in cut.items()) or "no tensors"
        raise ShapeError(
            f"VisavisLoss(mini_batch_size=) got features that do not all have one row for each input, {found}: leave mini_batch_size out."
        )
    starts = range(0, max(lengths.pop(), 1), size)
    return [features | {name: value[start : start + size] for name, value in cut.items()} for start in starts]


class LossCheckpoints:
    """A callback that keeps the learned scales of losses in the trainer's checkpoints, since it saves and resumes the model alone.

    ``SentenceTransformerTrainer(..., loss=loss, callbacks=[LossCheckpoints(loss)])``. losses: a VisavisLoss, or a dict of them by data set.
    Resuming looks in ``output_dir``. Raises RunError where a checkpoint was made without it.
    """

    def __init__(self, losses: VisavisLoss | Mapping[str, VisavisLoss]) -> None:
        named = losses if isinstance(losses, Mapping) else {"loss": losses}
        self.scales = {
            f"{name}.scale": loss.loss for name, loss in named.items() if isinstance(loss.loss.scale, LearnedScale | nn.Parameter)
        }

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.is_world_process_zero:
            storage.write_tensors(self._file(args, state), {name: _learned(loss).detach().cpu() for name, loss in self.scales.items()})

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if not state.global_step:
            return
        file = self._file(args, state)
        if not file.is_file():
            raise RunError(f"{file} is missing, so the scale cannot be resumed: the checkpoint was made without LossCheckpoints.")
        saved = storage.read_tensors(file)
        if saved.keys() != self.scales.keys():
            raise RunError(
                f"{file} holds {', '.join(sorted(saved))}, expected {', '.join(sorted(self.scales))}: give the losses that were trained."
            )
        for name, loss in self.scales.items():
            _learned(loss).data.copy_(saved[name])

    def _file(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "visavis_loss.safetensors"

    def __getattr__(self, event: str) -> Callable[..., None]:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return lambda *_, **__: None


def _learned(loss: PairLoss) -> nn.Parameter:
    scale = loss.scale
    return scale.log if isinstance(scale, LearnedScale) else scale  # type: ignore[return-value]
