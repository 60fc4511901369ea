"""Cross-modal encoder of X-VLM: equal to BERT with cross-attention in transformers, and independent
of padding.
"""

import pytest
import torch

from visavis.papers.models.xvlm import FusionEncoder

SIZES = {
    "hidden_size": 12,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "vocab_size": 9,
}


@pytest.fixture
def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_fusion_encoder_matches_bert_decoder_without_causal_mask(bert):
    fusion = FusionEncoder(bert.config, 12, 2).eval()
    fusion.load_state_dict(bert.encoder.state_dict())
    words, image = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    expected = words
    for layer in bert.encoder.layer:
        expected = layer(
            expected, (~mask)[:, None, None, :] * torch.finfo(torch.float32).min, image
        )
    torch.testing.assert_close(fusion(words, mask, image), expected)
    torch.testing.assert_close(
        fusion(words[1:, :3], mask[1:, :3], image[1:]), fusion(words, mask, image)[1:, :3]
    )


def test_load_bert_layers_keeps_cross_attention(bert):
    torch.manual_seed(3)
    fusion = FusionEncoder(bert.config, 5, 2)
    before = {name: part.clone() for name, part in fusion.state_dict().items()}
    fusion.load_bert_layers(bert.encoder.layer)
    for name, part in fusion.state_dict().items():
        assert torch.equal(
            part, before[name] if "crossattention" in name else bert.encoder.state_dict()[name]
        )
