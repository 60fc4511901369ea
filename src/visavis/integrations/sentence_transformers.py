"""VisavisLoss: any objective as a loss for SentenceTransformerTrainer.

``SentenceTransformerTrainer(model, args, train_dataset=..., loss=VisavisLoss(model,
Unified(reduction="half_mean")))``
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from visavis.core import storage
from visavis.core.errors import RunError, ShapeError, SpecError, VisavisError, format_value, warn
from visavis.integrations.pytorch_metric_learning import self_comparison_loss, validate_labels
from visavis.losses.objectives import Objective
from visavis.losses.pair_loss import LearnedScale, PairLoss, encode_in_chunks
from visavis.losses.pair_loss.batch_items import embedding_matrix
from visavis.losses.targets import to_id_tensor

# Id of negatives, which belong to no anchor.
_UNMATCHED_ID = torch.iinfo(torch.int64).min
# All live losses. They are made in the same order on every rank, so the numbers of a model's losses
# name them on other ranks too.
_LIVE_LOSSES: WeakSet[VisavisLoss] = WeakSet()
# A number for each model, which its losses keep when the trainer has wrapped the model.
_MODEL_NUMBERS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_NEXT_MODEL_NUMBER = count()


class VisavisLoss(nn.Module):
    """Loss for models of sentence-transformers, in both directions, for texts, images or other
    inputs. Scores are cosines.

    Columns of the dataset, in order: (anchor, positive), then any number of columns of negatives,
    which are candidates of every anchor and never queries. Or one column with labels. A column
    ``label`` holds integer ids: rows of equal id belong together. Without it, each anchor belongs
    to its own positive.

    Several data sets: pass a dict with one VisavisLoss per data set. Over several ranks a step
    gathers if all ranks hold the same data set. If they hold different ones, or one loss serves
    several data sets, it warns and compares the items of each rank only.

    Args:
        model: The SentenceTransformer.
        objective: An objective of the catalog.
        scale: 1 / temperature, see `PairLoss`. A `LearnedScale` is trained, and saved in the
            checkpoints of a trainer that is made after the loss.
        gather: See `PairLoss`.
        mini_batch_size: Number of inputs of a column that are embedded at once, and again in the
            backward pass. Value and gradient stay those of the whole batch, with the memory of one
            mini-batch.

    Raises:
        SpecError: If mini_batch_size is below 1.
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
        if mini_batch_size is not None and mini_batch_size < 1:
            raise SpecError(
                "mini_batch_size: expected an integer >= 1, or None for all inputs at once, got "
                f"{format_value(mini_batch_size)}. Set one of them."
            )
        self.model = model
        self.objective = objective
        self.gather = gather
        self.mini_batch_size = mini_batch_size
        # The trainer records its data sets here. A wrapper of the model does not have it.
        self.model_card_data = getattr(model, "model_card_data", None)
        self.model_number = _MODEL_NUMBERS.setdefault(model, next(_NEXT_MODEL_NUMBER))
        self.number: int = 1 + max(
            (loss.number for loss in _LIVE_LOSSES if loss.model_number == self.model_number),
            default=0,
        )
        _LIVE_LOSSES.add(self)
        self.loss = PairLoss(
            objective, scale=scale, gather=gather, dataset=f"VisavisLoss {self.number} of its model"
        )
        # Each Trainer that is made from now on saves the scale. A loss does not see its trainer.
        trainer = sys.modules.get("transformers.trainer")
        is_learned = isinstance(self.loss.scale, LearnedScale | nn.Parameter)
        if is_learned and trainer and _ScaleCheckpoints not in trainer.DEFAULT_CALLBACKS:
            trainer.DEFAULT_CALLBACKS.append(_ScaleCheckpoints)

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            sentence_features: Inputs of the model, one dict per column.
            labels: One id per row, if any.

        Returns:
            The loss, a scalar.

        Raises:
            ShapeError: If there is one column without labels, or lengths do not match.
        """
        # The trainer switches the mode of the model only.
        self.loss.train(self.model.training)
        self.loss.gather = self._gather()
        anchors, *others = [self._embed(features) for features in sentence_features]
        ids = None if labels is None else to_id_tensor(labels, "labels")
        if not others:
            if ids is None:
                raise ShapeError(
                    "labels: expected ids for a single column, got none. Add a column of "
                    "positives, or a column label of ids."
                )
            return self_comparison_loss(self.loss, anchors, ids)
        if ids is not None:
            validate_labels(ids, anchors)
        positives, *negatives = others
        if not negatives:
            return self.loss(anchors, positives, ids)
        # [negatives of all columns, D]
        extra = torch.cat(negatives)
        return self.loss(
            anchors, positives, ids, extra_texts=extra, extra_text_ids=[_UNMATCHED_ID] * len(extra)
        )

    def _gather(self) -> bool | None:
        """Return False where the data set of the other ranks is unknown, because one loss serves
        several.
        """
        num_datasets = len(getattr(self.model_card_data, "train_datasets", ()))
        num_losses = sum(loss.model_number == self.model_number for loss in _LIVE_LOSSES)
        if self.gather is not None or num_datasets <= max(num_losses, 1):
            return self.gather
        if (
            self.loss.training
            and distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        ):
            shared = (
                "one VisavisLoss serves" if num_losses == 1 else f"{num_losses} VisavisLoss serve"
            )
            warn(
                f"{shared} {num_datasets} data sets. The data sets of other ranks are unknown, so "
                "each rank compares its own items only. "
                "Pass a dict with one VisavisLoss per data set, or gather=False."
            )
        return False

    def _embed(self, features: dict[str, Any]) -> Tensor:
        if self.mini_batch_size is None:
            return self.model(features)["sentence_embedding"]
        tensors = {
            name: value
            for name, value in features.items()
            if isinstance(value, Tensor) and value.dim()
        }
        # Every tensor must have one row per input.
        lengths = {len(value) for value in tensors.values()}
        if len(lengths) != 1:
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
            raise ShapeError(
                "mini_batch_size: expected features with one row per input, got "
                f"{shapes or 'no tensors'}. Leave mini_batch_size out."
            )
        starts = range(0, max(lengths.pop(), 1), self.mini_batch_size)
        parts = [
            {name: value[start : start + self.mini_batch_size] for name, value in tensors.items()}
            for start in starts
        ]
        # Features that are not tensors go to every mini-batch.
        batches = [_MiniBatch(self.model, features | part) for part in parts]
        return embedding_matrix(encode_in_chunks(lambda batch: batch(), batches))

    @property
    def uses_gradient_cache(self) -> bool:
        """Whether inputs are embedded again in the backward pass. Wrappers of sentence-transformers
        read it.
        """
        return self.mini_batch_size is not None

    @property
    def calculate_loss(self) -> Callable[..., Tensor]:
        """The method that MatryoshkaLoss replaces in a loss of mini-batches. Not supported."""
        raise VisavisError(
            "mini_batch_size: expected None inside MatryoshkaLoss, which truncates embeddings in "
            "the forward pass only. Leave it out."
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Describe the loss for model cards, with the temperature in use. The trainer calls it
        before the first step.

        Returns:
            The objective, the scale (the initial one of a learned scale) and the similarity
            function.
        """
        scale = self.loss.scale
        value = scale.item() if isinstance(scale, Tensor) else scale
        if isinstance(value, LearnedScale):
            value = value.initial_scale
        objective: Any = self.objective
        if value is not None:
            objective = replace(objective, tau=float(f"{1 / value:.6g}"))
        return {
            "objective": repr(objective),
            "scale": f"learned, from {value:g}" if isinstance(scale, LearnedScale) else value,
            "similarity_fct": "cos_sim",
        }

    @property
    def citation(self) -> str:
        """A BibTeX entry for the source of the objective."""
        source = re.search(
            r"^Source:\s+(.*?)(?=\n\n|\Z)",
            inspect.getdoc(type(self.objective)) or "",
            re.DOTALL | re.MULTILINE,
        )
        note = f"Objective {self.objective!r}" + (
            f"; source: {' '.join(source[1].split())}" if source else ""
        )
        return f"\n@misc{{visavis,\n    title = {{visavis: vision-language retrieval}},\n    note = {{{escape_latex(note)}}},\n}}\n"


def escape_latex(text: str) -> str:
    r"""Escape the special characters of LaTeX.

    Args:
        text: Plain text.

    Returns:
        LaTeX source.

    Example:
        >>> print(escape_latex("Goal(pair='sig_ms'), 50%"))
        Goal(pair='sig\_ms'), 50\%
    """
    escaped: dict[str, str | int | None] = {character: f"\\{character}" for character in "{}&%$#_"}
    commands = {
        "\\": "textbackslash",
        "~": "textasciitilde",
        "^": "textasciicircum",
        "<": "textless",
        ">": "textgreater",
        "|": "textbar",
    }
    escaped |= {character: f"\\{command}{{}}" for character, command in commands.items()}
    return text.translate(str.maketrans(escaped))


class _MiniBatch:
    """A mini-batch that is embedded when called: by the wrapped model first, by the model itself in
    the backward pass.

    DistributedDataParallel prepares for another backward pass at each call, so it must not be
    called again.
    """

    def __init__(self, model: nn.Module, features: dict[str, Any]) -> None:
        self.model = model
        self.features = features

    def __call__(self) -> Tensor:
        model = self.model
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        # A copy, because modules write into it.
        return model(dict(self.features))["sentence_embedding"]


class _ScaleCheckpoints:
    """Callback that saves learned scales in the checkpoints of the trainer, which saves only the
    model, and restores them.
    """

    def on_save(self, args: Any, state: Any, *_: Any, model: nn.Module, **__: Any) -> None:
        """Save the scales of the losses of a model."""
        if state.is_world_process_zero and (scales := _learned_scales(model)):
            storage.write_tensors(
                _scale_file(args, state),
                {name: scale.detach().cpu() for name, scale in scales.items()},
            )

    def on_train_begin(self, args: Any, state: Any, *_: Any, model: nn.Module, **__: Any) -> None:
        """Restore the scales when a training resumes."""
        if not state.global_step or not (scales := _learned_scales(model)):
            return
        file = _scale_file(args, state)
        if not os.path.isfile(file):
            raise RunError(
                f"{file}: expected the learned scale, got no file. Resume with the loss that made "
                "this checkpoint, which has no learned scale."
            )
        saved = storage.read_tensors(file)
        if saved.keys() != scales.keys():
            raise RunError(
                f"{file}: expected {len(scales)} learned scales, got {len(saved)}. Pass the losses "
                "that were trained."
            )
        for name, scale in scales.items():
            scale.data.copy_(saved[name])

    def __getattr__(self, event: str) -> Callable[..., None]:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return lambda *_, **__: None


def _learned_scales(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the learned scales of the losses of a model, in the order in which the losses were
    made.
    """
    number = _MODEL_NUMBERS.get(model)
    losses = sorted(
        (loss for loss in _LIVE_LOSSES if loss.model_number == number), key=lambda loss: loss.number
    )
    scales = [
        scale.log if isinstance(scale := loss.loss.scale, LearnedScale) else scale
        for loss in losses
    ]
    learned = [scale for scale in scales if isinstance(scale, nn.Parameter)]
    return {f"{index}.scale": scale for index, scale in enumerate(learned)}


def _scale_file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "visavis_loss.safetensors"
