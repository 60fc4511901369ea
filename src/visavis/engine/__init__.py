"""Any objective on embeddings of any two towers; the only place that knows of memory and processes."""

from visavis.engine.chunks import in_chunks
from visavis.engine.pair_loss import PairLoss
from visavis.engine.plan import Plan, choose
from visavis.engine.scale import LearnedScale
from visavis.engine.scores import cosine

__all__ = ["LearnedScale", "PairLoss", "Plan", "choose", "cosine", "in_chunks"]
