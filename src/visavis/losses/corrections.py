"""Corrections for hubs: candidates that score high for most queries.

A correction lowers the scores of a candidate by a bias that comes from its scores for a bank of
other queries. The bias costs one number per candidate, so that a score matrix is corrected block by
block. A bank that is known before any test query makes a result "fixed-bank". A bank of the test
queries themselves makes it "transductive": no single query could be answered so.

Terms that are equal for all candidates of a query are left out. They change no ranking.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visavis.core.blocking import Score
from visavis.core.encoded import DIRECTIONS, Direction, Encoded
from visavis.core.errors import DataError, SpecError
from visavis.core.fields import PositiveFloat, PositiveInt, validate_fields
from visavis.core.memory_budget import MemoryLimit
from visavis.core.spec import parse
from visavis.losses.scoring import DirectedScore, TwoStageScore, score_query_rows

BankKind = Literal["fixed-bank", "transductive"]
"""Whether the queries of a bank are known before the test, or are the test queries."""
STATISTICS_BYTES_PER_PAIR = 48.0
"""Memory per pair of a bank query and a candidate: scores, their exponentials in float64, and
flags.
"""


@dataclass(frozen=True, eq=False)
class CandidateBias:
    """What a correction subtracts from the scores of each candidate.

    Attributes:
        bias: Bias of each candidate, float64, shape ``[C]``.
        is_hub: Candidates that a bank query ranks first, bool, shape ``[C]``. Only queries whose
            best candidate is one of them are corrected. None: all queries are.
    """

    bias: Tensor
    is_hub: Tensor | None = None

    def correct(self, scores: Tensor) -> Tensor:
        """Correct scores ``[R, C]`` of some queries with all candidates, in float64."""
        scores = scores.double()
        corrected = scores - self.bias
        if self.is_hub is None:
            return corrected
        # Equal scores: one of the best candidates is a hub.
        best_hub = scores.masked_fill(~self.is_hub, -torch.inf).amax(1, keepdim=True)
        return torch.where(best_hub >= scores.amax(1, keepdim=True), corrected, scores)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Base class of corrections."""

    def __post_init__(self) -> None:
        validate_fields(self)

    def fit(self, blocks: Iterable[Tensor]) -> CandidateBias:
        """Compute the bias of each candidate from the scores of a bank.

        Args:
            blocks: Scores of some bank queries each, with all candidates, shape ``[R, C]``.

        Returns:
            The bias. It does not depend on the order of the bank.

        Raises:
            DataError: If the bank is empty.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class InvertedSoftmax(Correction):
    """Softmax over queries instead of candidates.

    Attributes:
        temperature: Temperature of the softmax.

    Formula:
        $s_qc - tau log(1/B sum_b exp(s_bc / tau))$ over the B queries of the bank

    Source:
        Smith et al., ICLR 2017. Differs from: the paper learns the temperature. The default is that
        of query bank normalization.
    """

    temperature: PositiveFloat = 0.05

    def fit(self, blocks: Iterable[Tensor]) -> CandidateBias:
        """Compute the bias of each candidate, see `Correction.fit`."""
        return CandidateBias(_soft_maximum(blocks, self.temperature))


@dataclass(frozen=True, kw_only=True)
class DualSoftmax(Correction):
    """Product of the softmax over candidates and the softmax over queries.

    Attributes:
        temperature: Temperature of both.

    Formula:
        $s_qc - (tau / 2) log(1/B sum_b exp(s_bc / tau))$, which ranks as the product does

    Source:
        Cheng et al., CAMoE (2021), which uses the test queries as the bank. Differs from: its
        released code multiplies the score, not its softmax, by the softmax over queries.
    """

    temperature: PositiveFloat = 0.01

    def fit(self, blocks: Iterable[Tensor]) -> CandidateBias:
        """Compute the bias of each candidate, see `Correction.fit`."""
        return CandidateBias(_soft_maximum(blocks, self.temperature) / 2)


@dataclass(frozen=True, kw_only=True)
class QueryBankNorm(Correction):
    """Inverted softmax for the queries whose best candidate is a hub (dynamic inverted softmax).

    Attributes:
        temperature: Temperature of the softmax.
        k: Candidates are hubs if they are among the best k of a bank query.

    Formula:
        $s_qc - tau log(1/B sum_b exp(s_bc / tau))$ if the best candidate of q is a hub, else $s_qc$

    Source:
        Bogolin et al., QB-Norm (CVPR 2022), with an inverse temperature of 20.
    """

    temperature: PositiveFloat = 0.05
    k: PositiveInt = 1

    def fit(self, blocks: Iterable[Tensor]) -> CandidateBias:
        """Compute the bias of each candidate, see `Correction.fit`."""
        is_hub = torch.zeros((), dtype=torch.bool)

        def mark_hubs() -> Iterator[Tensor]:
            nonlocal is_hub
            for block in blocks:
                lowest = block.topk(min(self.k, block.shape[1]), 1).values[:, -1:]
                is_hub = is_hub | (block >= lowest).any(0)
                yield block

        bias = _soft_maximum(mark_hubs(), self.temperature)
        return CandidateBias(bias, is_hub)


@dataclass(frozen=True, kw_only=True)
class CSLS(Correction):
    """Cross-domain similarity local scaling: the mean score of the nearest bank queries.

    Attributes:
        k: Number of nearest bank queries.

    Formula:
        $s_qc - 1/(2k) sum_{b in N_k(c)} s_bc$ over the k bank queries with the highest scores

    Source:
        Conneau et al., ICLR 2018, section 2.3, divided by 2 and without the mean of the query.
    """

    k: PositiveInt = 10

    def fit(self, blocks: Iterable[Tensor]) -> CandidateBias:
        """Compute the bias of each candidate, see `Correction.fit`."""
        nearest: Tensor | None = None
        # The best k of the rows so far and of the next block, so that no bank is held as a whole.
        for block in blocks:
            nearest = block if nearest is None else torch.cat([nearest, block])
            nearest = nearest.topk(min(self.k, len(nearest)), 0).values  # [k, C]
        if nearest is None:
            raise _empty_bank()
        return CandidateBias(nearest.double().mean(0) / 2)


CATALOG: tuple[type[Correction], ...] = (InvertedSoftmax, DualSoftmax, QueryBankNorm, CSLS)


def parse_correction(text: str) -> Correction:
    """Parse a correction such as "QueryBankNorm" or "CSLS(k=5)"."""
    return parse(text, CATALOG)


@dataclass(frozen=True, eq=False)
class QueryBank:
    """Queries that a correction learns from.

    Attributes:
        description: Description, such as "10,000 captions of train".
        texts: Encoded texts, for text queries. None: text queries are not corrected.
        images: Encoded images, for image queries. None: they are not corrected.
    """

    description: str
    texts: Encoded | None = None
    images: Encoded | None = None


@dataclass(frozen=True, eq=False)
class CorrectedScore(DirectedScore):
    """A score whose rankings are corrected. Every ranking computes the biases of its own candidates
    first.

    Attributes:
        score: The uncorrected score.
        correction: The correction.
        bank: Fixed bank of queries. None: the queries of each ranking, transductive.

    Raises:
        SpecError: If the score has two stages, whose scores have different scales.
    """

    score: Score
    correction: Correction
    bank: QueryBank | None

    def __post_init__(self) -> None:
        if isinstance(self.score, TwoStageScore):
            raise SpecError(
                "correction: expected a model that scores all pairs in one stage, got one that "
                f"re-ranks the first {self.score.rerank_top_k} candidates. Evaluate it without a "
                "correction."
            )

    @property
    def kind(self) -> BankKind:
        """Whether the bank is known before the test queries."""
        return "transductive" if self.bank is None else "fixed-bank"

    def __str__(self) -> str:
        """Name the correction, its bank and its kind, as results do."""
        bank, only = "test queries", ""
        if self.bank is not None:
            bank = self.bank.description
            corrected = {"i2t": self.bank.images, "t2i": self.bank.texts}
            names = [DIRECTIONS[name] for name, items in corrected.items() if items is not None]
            only = f", {names[0]} only" if len(names) == 1 else ""
        return f"{self.correction!r} over {bank} ({self.kind}{only})"

    def __call__(self, visual: Encoded, text: Encoded) -> Tensor:
        """Compute uncorrected scores."""
        return self.score(visual, text)

    def query_rows(
        self,
        visual: Encoded,
        text: Encoded,
        direction: Direction,
        *,
        caller_bytes_per_pair: float,
        memory: MemoryLimit,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield corrected scores, see `visavis.losses.scoring.score_query_rows`.

        Args:
            visual: Visual items.
            text: Texts.
            direction: Which side holds the queries.
            caller_bytes_per_pair: Bytes per pair that the caller holds.
            memory: Memory of a block.

        Yields:
            The queries of a block, and their scores, shape ``[R, C]``.
        """
        # The bias belongs to these candidates. Without a bank of this side it stays None.
        bias = None
        bank = self.bank or QueryBank("", text, visual)
        bank_items = bank.images if direction == "i2t" else bank.texts
        if bank_items is not None:
            items = (bank_items, text) if direction == "i2t" else (visual, bank_items)
            rows = score_query_rows(
                self.score,
                *items,
                direction,
                caller_bytes_per_pair=STATISTICS_BYTES_PER_PAIR,
                memory=memory,
            )
            bias = self.correction.fit(block.cpu() for _, block in rows)
        for rows_of_block, block in score_query_rows(
            self.score,
            visual,
            text,
            direction,
            caller_bytes_per_pair=caller_bytes_per_pair,
            memory=memory,
        ):
            yield rows_of_block, block if bias is None else bias.correct(block.cpu())


def _soft_maximum(blocks: Iterable[Tensor], temperature: float) -> Tensor:
    """``tau log mean_b exp(s_bc / tau)`` of each candidate over all rows, ``[C]``."""
    total: Tensor | None = None
    count = 0
    for block in blocks:
        part = (block.double() / temperature).logsumexp(0)
        total = part if total is None else torch.logaddexp(total, part)
        count += len(block)
    if total is None:
        raise _empty_bank()
    return temperature * (total - math.log(count))


def _empty_bank() -> DataError:
    return DataError("bank: expected at least one query, got none. Pass a bank with queries.")
