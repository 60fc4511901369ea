"""Word vectors for some words, and a small sentence model and cross-encoder for all of them."""

import numpy as np
import pytest
import torch

WORDS = ["a", "dog", "runs", "cat", "sleeps", "on", "the", "beach", "two", "red"]


@pytest.fixture(scope="session")
def vectors_file(tmp_path_factory):
    """Word vectors of all words but "red", eight numbers each."""
    rows = np.random.default_rng(0).normal(size=(len(WORDS) - 1, 8))
    path = tmp_path_factory.mktemp("words") / "vectors.txt"
    path.write_text(
        "".join(
            f"{word} {' '.join(f'{x:.4f}' for x in row)}\n"
            for word, row in zip(WORDS, rows, strict=False)
        )
    )
    return path


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Folders of an untrained BERT of two layers, ``bert``, and of one with an output for pairs,
    ``cross``.
    """
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("models")
    (root / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]))
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 14,
    }
    config = transformers.BertConfig(**size, max_position_embeddings=32, num_labels=1)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    for name, kind in (
        ("bert", transformers.BertModel),
        ("cross", transformers.BertForSequenceClassification),
    ):
        model = kind(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(root / name)
        transformers.BertTokenizer(str(root / "vocab.txt")).save_pretrained(root / name)
    transformers.utils.logging.enable_progress_bar()
    return root
