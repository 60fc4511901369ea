"""The objectives in the training code of other libraries, one module for each library.

None of them imports its library: each implements the interface the library calls, so nothing more has to be installed.

- ``sentence_transformers``: ``VisavisLoss``, a loss for SentenceTransformerTrainer.
- ``open_clip``: ``ClipLoss``, in place of the class of that name.
- ``metric_learning``: ``MetricLoss``, called as the losses of pytorch-metric-learning are.
- ``transformers``: ``TrainerLoss``, a ``compute_loss_func`` for Trainer.
- ``lightning``: ``PairLossSteps``, the steps of a LightningModule.
"""
