"""Encoded items and a way to score them in, a table row and every query's rank out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.data.dataset import Dataset
from visavis.errors import ShapeError, SpecError
from visavis.evaluation.arguments import checked, fit
from visavis.evaluation.blocks import ranked_by_rows, ranked_by_tiles
from visavis.evaluation.coherence import Coherence
from visavis.evaluation.positives import listed_positives
from visavis.evaluation.protocols import Protocol, named
from visavis.evaluation.published import Published
from visavis.evaluation.ranks import QueryRanks
from visavis.memory import Memory
from visavis.metrics import ranking_metrics
from visavis.metrics.arguments import Ties
from visavis.metrics.ranking import best
from visavis.scoring import Score, pick
from visavis.targets import Ids, Targets
from visavis.types import Encoded


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a model reached, and under which rules.

    protocol: its name. num_images, num_texts: the candidates of a text and of an image (of one fold). captions_per_image:
    their ratio. ties: the rule. metrics: by the keys of ``metrics.CATALOG``, recalls in percent. image_ranks ``[V]``,
    text_ranks ``[T]``: the rank of each query's best right answer, from 1, in the order given, for paired tests; where a protocol
    lists its queries, of those, in its order. coherence: how well the whole order follows degrees of relevance, where those were given.
    others: the same items under further protocols. report: keys of metrics to print beside the usual ones. published: the row of a paper
    beside which this is to be set. base: the same of the pretrained model that the training began with. image_ids ``[V]``, text_ids ``[T]``:
    the image that each query belongs to, by a number. first_texts ``[V]``, first_images ``[T]``: the candidate that comes first for each query.
    scores: those of all positives ("positive") and of each query's hardest negative ("hardest_i2t", "hardest_t2i"), where it has one.
    """

    protocol: str
    num_images: int
    num_texts: int
    captions_per_image: float
    ties: str
    metrics: dict[str, float]
    image_ranks: np.ndarray
    text_ranks: np.ndarray
    coherence: Coherence | None = None
    others: tuple[Evaluation, ...] = ()
    report: tuple[str, ...] = ()
    published: Published | None = None
    base: Evaluation | None = None
    image_ids: np.ndarray | None = None
    text_ids: np.ndarray | None = None
    first_texts: np.ndarray | None = None
    first_images: np.ndarray | None = None
    scores: dict[str, Tensor] = field(default_factory=dict)

    @property
    def ranks(self) -> QueryRanks:
        """The rank of every query, for comparisons over images."""
        assert self.image_ids is not None
        assert self.text_ids is not None
        return QueryRanks(self.image_ranks, self.text_ranks, self.image_ids, self.text_ids)

    @property
    def ranks_by_protocol(self) -> dict[str, QueryRanks]:
        """Those of this and of the others, by the names of their protocols, as a file keeps them."""
        return {name: result.ranks for name, result in self.by_protocol.items()}

    @property
    def by_protocol(self) -> dict[str, Evaluation]:
        """This and the others, by the names of their protocols."""
        return {result.protocol: result for result in (self, *self.others)}

    @property
    def measured(self) -> dict[str, float | None]:
        """All metrics, those of coherence too."""
        return {**self.metrics, **(self.coherence.metrics if self.coherence else {})}

    @property
    def as_published(self) -> Evaluation:
        """The result under the protocol of the published row; this one where that was not asked for."""
        return self.by_protocol.get(self.published.protocol, self) if self.published else self

    def to_json(self) -> dict[str, Any]:
        """One flat object of numbers and names: the rules, then all metrics.

        Of several protocols it is that of the first, and ``protocols`` holds one for each, by name. ``published`` holds the figures of
        a paper with what was reached instead of them, by key; ``base`` the same object for the pretrained model.
        """
        result = self._flat()
        if self.others:
            result |= {"protocols": {name: evaluation._flat() for name, evaluation in self.by_protocol.items()}}
        if self.published is not None:
            figures = {found.key: found.to_json() for found in self.published.differences(self.as_published.measured)}
            result |= {"published": self.published.to_json() | {"published": figures, "reached_by": self.as_published.protocol}}
        if self.base is not None:
            result |= {"base": self.base.to_json()}
        return result

    def _flat(self) -> dict[str, Any]:
        rules = ("protocol", "num_images", "num_texts", "captions_per_image", "ties")
        queries = {"image_queries": len(self.image_ranks), "text_queries": len(self.text_ranks)}
        graded = self.coherence.to_json() if self.coherence else {}
        return {name: getattr(self, name) for name in rules} | queries | self.metrics | graded


@checked
def evaluate(
    visual: Encoded,
    text: Encoded,
    score: Score,
    image_ids: Ids,
    text_ids: Ids,
    *,
    protocol: str | Protocol = "plain",
    ties: Ties | None = None,
    memory: Memory = None,
) -> Evaluation:
    """Rank all texts for each image and all images for each text, by tiles of the score matrix.

    score: ``score(visual[rows], text[columns]) -> [rows, columns]``, as every matcher has it. image_ids ``[V]``, text_ids
    ``[T]``: equal = belong together. memory: what a tile may take, in bytes or as "2GiB" (None: a share of what is free); the tiles follow
    from what the score costs, and the result does not depend on them. ties: the rule; None: the protocol's.
    Raises SpecError where the data are not those of the protocol, ShapeError for an image or text that belongs to
    nothing, DataError for scores that are not numbers.
    """
    targets = Targets(query_ids=image_ids, candidate_ids=text_ids).to("cpu")  # type: ignore[arg-type]  # ids as any row of numbers
    ids = targets.query_ids, targets.candidate_ids
    protocol = named(protocol)
    ties = ties or protocol.ties
    if protocol.positives:
        raise SpecError(f"protocol {protocol.name} lists its right answers by name: use evaluate_listed, or visavis evaluate RUN.")
    protocol.check(*ids)
    image_ranks, text_ranks = (torch.empty(len(side), dtype=torch.double if ties == "mean" else torch.long) for side in ids)
    all_images, all_texts = (torch.arange(len(side)) for side in ids)
    first_texts, first_images = torch.empty_like(ids[0]), torch.empty_like(ids[1])
    rows, scores = [], []
    for images, texts in protocol.split(*ids) if protocol.folds > 1 else [(slice(None), slice(None))]:
        fold = pick(visual, images), pick(text, texts)
        of_images, of_texts = ranked_by_tiles(*fold, score, ids[0][images], ids[1][texts], ties=ties, memory=memory)
        image_ranks[images], text_ranks[texts] = best(of_images.places, ties), best(of_texts.places, ties)
        first_texts[images], first_images[texts] = all_texts[texts][of_images.first], all_images[images][of_texts.first]
        rows.append(ranking_metrics(of_images.places, of_texts.places))
        scores.append({"positive": of_images.positive.flatten(), "hardest_i2t": of_images.hardest, "hardest_t2i": of_texts.hardest})
    return Evaluation(
        protocol=protocol.name,
        num_images=len(fold[0]),
        num_texts=len(fold[1]),
        captions_per_image=len(ids[1]) / len(ids[0]),
        ties=ties,
        metrics={name: float(np.mean([row[name] for row in rows])) for name in rows[0]},
        image_ranks=image_ranks.numpy(),
        text_ranks=text_ranks.numpy(),
        image_ids=ids[0].numpy(),
        text_ids=ids[1].numpy(),
        first_texts=first_texts.numpy(),
        first_images=first_images.numpy(),
        scores={name: (values := torch.cat([fold[name] for fold in scores]))[values > -torch.inf] for name in scores[0]},
    )


@checked
def evaluate_listed(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    *,
    protocol: str | Protocol,
    ties: Ties | None = None,
    memory: Memory = None,
) -> Evaluation:
    """``evaluate`` by a protocol that lists right answers, of encoded images and captions, those of ``data`` in its order.

    Only what the protocol lists is a query; all images and captions are candidates. memory: as in ``evaluate``. Raises DataError for lists that are missing
    or damaged, and for data that they are not of.
    """
    protocol = named(protocol)
    ties = ties or protocol.ties
    if not protocol.positives:
        raise SpecError(f"protocol {protocol.name} lists no right answers: use evaluate, with the ids of images and texts.")
    fit(visual, text, data)
    protocol.check(torch.arange(len(visual)), torch.from_numpy(data.image_of))
    of_images, of_texts = listed_positives(protocol, data)
    asked_images, asked_texts = pick(visual, of_images.queries), pick(text, of_texts.queries)
    images = ranked_by_rows(asked_images, text, score, of_images.targets, "i2t", ties=ties, memory=memory)
    texts = ranked_by_rows(visual, asked_texts, score, of_texts.targets, "t2i", ties=ties, memory=memory)
    return Evaluation(
        protocol=protocol.name,
        num_images=len(visual),
        num_texts=len(text),
        captions_per_image=len(text) / len(visual),
        ties=ties,
        metrics=ranking_metrics(images.places, texts.places),
        image_ranks=best(images.places, ties).numpy(),
        text_ranks=best(texts.places, ties).numpy(),
        image_ids=of_images.queries.numpy(),
        text_ids=data.image_of[of_texts.queries.numpy()],
        first_texts=images.first.numpy(),
        first_images=texts.first.numpy(),
    )


@checked
def rank_scores(
    scores: Tensor, image_ids: Ids, text_ids: Ids, *, protocol: str | Protocol = "plain", ties: Ties | None = None
) -> Evaluation:
    """``evaluate`` for a full matrix ``[V, T]`` of scores, such as the mean of two models' matrices. Raises as it does."""
    if scores.shape != (len(image_ids), len(text_ids)):
        raise ShapeError(
            f"scores have shape {list(scores.shape)}, expected {[len(image_ids), len(text_ids)]}: images x texts, as image_ids and text_ids have."
        )

    def score(visual: Encoded, text: Encoded) -> Tensor:
        return scores[visual.vectors][:, text.vectors]  # type: ignore[index]

    visual, text = (Encoded(torch.arange(length)) for length in scores.shape)
    return evaluate(visual, text, score, image_ids, text_ids, protocol=protocol, ties=ties)
