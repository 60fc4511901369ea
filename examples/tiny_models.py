"""Models with random weights and a few made-up pairs, which the examples train offline in seconds."""

import tempfile

import torch

NUM_IMAGES, NUM_CAPTIONS = 8, 2
torch.manual_seed(0)  # each example trains the same weights on the same pairs
TOPICS = ("dog", "cat", "boat", "tree", "car", "house", "bird", "horse")


def tiny_clip():
    """Create a CLIP of two layers per encoder, for images of 16 x 16 pixels and captions of 4
    tokens.
    """
    from transformers import CLIPConfig, CLIPModel

    shared = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 16,
    }
    text = shared | {
        "vocab_size": 64,
        "max_position_embeddings": 4,
        "bos_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    visual = shared | {"image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=visual, projection_dim=16))


def captioned_images():
    """Pixels, token ids and image ids, one row per caption. Every image has two captions."""
    ids = torch.arange(NUM_IMAGES).repeat_interleave(NUM_CAPTIONS)
    tokens = torch.randint(2, 64, (len(ids), 4))
    tokens[:, 0], tokens[:, -1] = 0, 1
    return {
        "pixel_values": torch.randn(NUM_IMAGES, 3, 16, 16)[ids],
        "input_ids": tokens,
        "labels": ids,
    }


def rows(columns):
    """The columns as a list of rows, the simplest data set."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def sentences():
    """Questions, answers and the id of their topic: two rows per topic."""
    questions = [
        template.format(topic)
        for topic in TOPICS
        for template in ("where is the {}", "who saw a {}")
    ]
    answers = [
        template.format(topic)
        for topic in TOPICS
        for template in ("the {} is here", "we saw the {}")
    ]
    return {
        "anchor": questions,
        "positive": answers,
        "label": [number for number in range(len(TOPICS)) for _ in range(2)],
    }


def tiny_sentence_transformer():
    """Create a BERT of two layers with a vocabulary of the words above."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    columns = sentences()
    words = [
        "[PAD]",
        "[UNK]",
        *sorted(
            {word for text in columns["anchor"] + columns["positive"] for word in text.split()}
        ),
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
        ).save_pretrained(folder)
        BertModel(BertConfig(vocab_size=len(words), **size)).save_pretrained(folder)
        transformer = Transformer(folder)
    return SentenceTransformer(
        modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu"
    )
