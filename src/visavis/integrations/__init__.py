"""Adapters to other libraries: objectives for their training code, models for ``mteb``, retrievers
for LangChain and LlamaIndex. One module per library.

The modules of losses do not import their library. Each implements the interface that the library
calls, so nothing more has to be installed. The retrievers need their library when they are
imported, because it requires its own base classes.

- ``sentence_transformers``: ``VisavisLoss``, a loss for SentenceTransformerTrainer.
- ``open_clip``: ``ClipLoss``, in place of the class of that name.
- ``pytorch_metric_learning``: ``MetricLoss``, with the interface of the losses of
  pytorch-metric-learning.
- ``transformers``: ``TrainerLoss``, a ``compute_loss_func`` for Trainer.
- ``mteb``: ``MtebEncoder``, a model in the benchmarks of mteb.
- ``lightning``: ``PairLossSteps``, the steps of a LightningModule.
- ``langchain``: ``VisavisRetriever`` over an index, ``VisavisEmbeddings`` of a model.
- ``llama_index``: ``VisavisIndexRetriever`` over an index, ``VisavisEmbedding`` of a model.
"""
