"""Adapters to other libraries: objectives for their training code, models for ``mteb``. One module
per library.

No module imports its library before it is used. Each implements the interface that the library
calls, so nothing more has to be installed.

- ``sentence_transformers``: ``VisavisLoss``, a loss for SentenceTransformerTrainer.
- ``open_clip``: ``ClipLoss``, in place of the class of that name.
- ``pytorch_metric_learning``: ``MetricLoss``, with the interface of the losses of
  pytorch-metric-learning.
- ``transformers``: ``TrainerLoss``, a ``compute_loss_func`` for Trainer.
- ``mteb``: ``MtebEncoder``, a model in the benchmarks of mteb.
- ``lightning``: ``PairLossSteps``, the steps of a LightningModule.
"""
