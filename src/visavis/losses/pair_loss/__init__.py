"""PairLoss: any objective on embeddings of two encoders. The only package that handles memory and
ranks of a loss.
"""

from visavis.losses.logits import LearnedScale
from visavis.losses.pair_loss.batch_items import encode_in_chunks
from visavis.losses.pair_loss.pair_loss import PairLoss
from visavis.losses.pair_loss.plan import ExecutionPlan, choose_plan
from visavis.losses.pair_loss.scores import cosine

__all__ = ["ExecutionPlan", "LearnedScale", "PairLoss", "choose_plan", "cosine", "encode_in_chunks"]
