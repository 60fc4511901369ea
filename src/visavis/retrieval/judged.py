"""How well an index answers what people judged: their queries, and the items of which they said that they fit, or do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visavis.data.judgements import last_words, read_judgements
from visavis.errors import DataError
from visavis.evaluation.judged import JudgedAnswer, recalls, share_ordered
from visavis.retrieval.index import Index
from visavis.retrieval.searching import Query, query_vector


@dataclass(frozen=True)
class JudgedEvaluation:
    """Judged queries against a whole index.

    queries: with at least one item that fits. r: in percent, of those queries, with one that fits among the first 1, 5 and 10 of the items
    that were not judged to fit; ties count against the model. pairs: of an item that fits and one that does not, of the same query.
    ordered: in percent, of these pairs, with the fitting one above; None without any. left_out: judgements of pictures, of queries with a
    minus or of items that are no longer there.
    """

    queries: int
    candidates: int
    r: dict[int, float]
    pairs: int
    ordered: float | None
    left_out: int

    def to_json(self) -> dict[str, Any]:
        recalls = {f"t2i_r{k}": value for k, value in self.r.items()}
        return {key: value for key, value in asdict(self).items() if key != "r"} | recalls


def evaluate_judged(index: Index, file: Path) -> JudgedEvaluation:
    """Rank all items for each judged sentence. Raises DataError for a file without a sentence that something fits.

    What nobody judged counts as not fitting, so that recalls are lower than the truth where judgements are few; pairs are of judged
    items alone. Judgements of an item are found by its content where it was moved.
    """
    by_content = {item.content: item.key for item in index.items.values()}
    judged, left_out = defaultdict[str, dict[str, bool]](dict), 0
    for (asked, key), judgement in last_words(read_judgements(file)).items():
        place = key if key in index.items else by_content.get(judgement.content)
        if place is None or not asked.sentence:
            left_out += 1
        else:
            judged[asked.sentence][place] = bool(judgement.fits)
    fitting = {text: answers for text, answers in judged.items() if any(answers.values())}
    if not fitting:
        raise DataError(f"{file} holds no sentence that something in the index {index.folder} fits: judge some results on the page first.")
    answers = [_answer(index, text, said) for text, said in fitting.items()]
    return JudgedEvaluation(
        queries=len(fitting),
        candidates=len(index.items),
        r=recalls(answers),
        pairs=sum(answer.pairs for answer in answers),
        ordered=share_ordered(answers),
        left_out=left_out,
    )


def _answer(index: Index, text: str, said: Mapping[str, bool]) -> JudgedAnswer:
    near = index.store.search(query_vector(index, Query.of(text))[None], len(index.items))[0]
    judged = [said.get(key) for key, _ in near]
    fits, wrong = ([place for place, one in enumerate(judged) if one is what] for what in (True, False))
    return JudgedAnswer.of(np.array([score for _, score in near]), fits, wrong)
