"""Models with random weights and a few made-up pairs: what the examples train in seconds, offline."""

import tempfile

import torch

NUM_IMAGES, NUM_CAPTIONS = 8, 2
THINGS = ("dog", "cat", "boat", "tree", "car", "house", "bird", "horse")


def tiny_clip():
    """A CLIP of two layers a tower, for images of 16 x 16 pixels and captions of 4 tokens."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 16}
    text = tower | {"vocab_size": 64, "max_position_embeddings": 4, "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    visual = tower | {"image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=visual, projection_dim=16))


def captioned_images():
    """Pixels, token ids and the id of the image, one row for each caption: every image has two."""
    ids = torch.arange(NUM_IMAGES).repeat_interleave(NUM_CAPTIONS)
    tokens = torch.randint(2, 64, (len(ids), 4))
    tokens[:, 0], tokens[:, -1] = 0, 1
    return {"pixel_values": torch.randn(NUM_IMAGES, 3, 16, 16)[ids], "input_ids": tokens, "labels": ids}


def rows(columns):
    """The columns as a list of rows, the plainest data set."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def sentences():
    """Questions, answers and the id of what they speak of: two rows for each thing."""
    ask = [template.format(thing) for thing in THINGS for template in ("where is the {}", "who saw a {}")]
    say = [template.format(thing) for thing in THINGS for template in ("the {} is here", "we saw the {}")]
    return {"anchor": ask, "positive": say, "label": [number for number in range(len(THINGS)) for _ in range(2)]}


def tiny_sentence_transformer():
    """A BERT of two layers with a vocabulary of the words above."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    columns = sentences()
    words = ["[PAD]", "[UNK]", *sorted({word for text in columns["anchor"] + columns["positive"] for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16).save_pretrained(
            folder
        )
        BertModel(BertConfig(vocab_size=len(words), **size)).save_pretrained(folder)
        transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu")
