"""Any objective on embeddings of any two towers; the only place that knows of memory and processes."""

from visavis.engine.chunks import in_chunks
from visavis.engine.pair_loss import PairLoss, cosine

__all__ = ["PairLoss", "cosine", "in_chunks"]
