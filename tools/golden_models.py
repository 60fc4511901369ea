"""Matching models of golden files: their scores of given regions and words, with the stored weights
where there are any.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visavis.core.encoded import Encoded
from visavis.models import Matcher
from visavis.models.image_text.cross_attention import BFAN, SCAN
from visavis.models.layers import GeneralizedPooling
from visavis.papers.models.sgraf import SGRAF, add_global_vectors
from visavis.papers.models.vsrn import GraphConvolution

Arrays = dict[str, np.ndarray]
State = dict[str, Tensor]
WEIGHTS = "weights of "
"""In front of the name of a parameter, among the inputs."""
SGRAF_NAMES = {
    r"([vt])_global_w\.embedding_(local|global)\.": r"\1_global.\2_projection.",
    r"([vt])_global_w\.embedding_common\.": r"\1_global.attention.",
    r"^v_global": "visual_global",
    r"^t_global": "text_global",
    r"\.(local|global)_projection\.1\.": r".\1_norm.",
    r"\.(local_projection|global_projection|attention)\.0\.": r".\1.",
    r"^sim_tranloc_w": "local_similarity",
    r"^sim_tranglo_w": "global_similarity",
    r"^sim_eval_w": "score_layer",
    r"^SAF_module\.attn_sim_w": "similarity_module.weight",
    r"^SGR_module\.(\d)\.graph_query_w": r"similarity_module.queries.\1",
    r"^SGR_module\.(\d)\.graph_key_w": r"similarity_module.keys.\1",
    r"^SGR_module\.(\d)\.sim_graph_w": r"similarity_module.outputs.\1",
}
"""Parameters of the released SGRAF by their names here."""


@torch.no_grad()
def replay(entry: dict[str, Any], inputs: Arrays) -> Arrays | None:
    """Compute the outputs of an entry. None if it does not belong to a model."""
    params = entry["params"]
    weights = {
        name.removeprefix(WEIGHTS): torch.as_tensor(value)
        for name, value in inputs.items()
        if name.startswith(WEIGHTS)
    }
    regions = torch.from_numpy(inputs["regions"])
    if "cross_attn" in params:
        pool = {"LogSumExp": "lse", "Mean": "mean"}[params["agg"]]
        fields = {
            "direction": params["cross_attn"],
            "pool": pool,
            "normalization": params["raw_feature_norm"],
        }
        sharpness = {
            "inverse_temperature": params["lambda_softmax"],
            "pool_inverse_temperature": params["lambda_lse"] or 1.0,
        }
        return {"sim": _scores(SCAN(SCAN.Config(**_SIZES, **fields, **sharpness)), inputs)}
    if "focal_type" in params:
        return {
            "sim": _scores(
                BFAN(
                    BFAN.Config(
                        **_SIZES,
                        focus=params["focal_type"],
                        inverse_temperature=params["lambda_softmax"],
                    )
                ),
                inputs,
            )
        }
    if "sim_dim" in params:
        return {"sim": _sgraf(params, inputs, weights)}
    if "d_pe" in params:
        pooling = (
            GeneralizedPooling(params["d_pe"], params["d_hidden"], params["softmax_temperature"])
            .double()
            .eval()
        )
        pooling.load_state_dict(weights)
        lengths = torch.as_tensor(inputs["region_lengths"])
        mask = torch.arange(regions.shape[1]) < lengths[:, None]
        return {
            "pooled": pooling(regions, mask).numpy(),
            "weights": pooling.weights(lengths, regions.shape[1]).numpy(),
        }
    if "theta.weight" in weights:
        return {"out": _graph_convolution(regions, weights)}
    return None


_SIZES: dict[str, Any] = {
    "visual_input_dim": 1,
    "text_granularity": "words",
    "text_input_dim": 1,
    "embedding_dim": 1,
}
"""Of encoders that are not used: the given regions and words are encoded."""


def _items(inputs: Arrays) -> tuple[Encoded, Encoded]:
    words = torch.from_numpy(inputs["words"])
    lengths = torch.as_tensor(inputs["lengths"])
    return Encoded(torch.from_numpy(inputs["regions"])), Encoded(
        words, torch.arange(words.shape[1]) < lengths[:, None]
    )


def _scores(matcher: Matcher, inputs: Arrays) -> np.ndarray:
    return matcher.eval().score(*_items(inputs)).numpy()


def _sgraf(params: dict[str, Any], inputs: Arrays, weights: State) -> np.ndarray:
    module = "SAF" if any(name.startswith("SAF") for name in weights) else "SGR"
    images, texts = _items(inputs)
    _, regions, width = inputs["regions"].shape
    sizes = {
        "embedding_dim": width,
        "num_regions": regions,
        "similarity_dim": params["sim_dim"],
        "reasoning_steps": params["sgr_step"],
    }
    matcher = SGRAF(SGRAF.Config(**_SIZES | sizes, similarity_module=module)).double().eval()
    state = matcher.state_dict()
    norm = {
        name.rpartition(".")[2]: weights.pop(name)
        for name in list(weights)
        if name.startswith("SAF_module.bn.")
    }
    if norm:  # a batch norm of one number after training is a scale and a shift
        state["similarity_module.scale"] = (
            norm["weight"] / (norm["running_var"] + nn.BatchNorm1d(1).eps).sqrt()
        )
        state["similarity_module.shift"] = (
            norm["bias"] - norm["running_mean"] * state["similarity_module.scale"]
        )
    for name, value in weights.items():
        for pattern, name_here in SGRAF_NAMES.items():
            name = re.sub(pattern, name_here, name)
        assert name in state, name
        state[name] = value
    matcher.load_state_dict(state)
    items = (
        add_global_vectors(images, matcher.visual_global),
        add_global_vectors(texts, matcher.text_global),
    )
    return matcher.score(*items).numpy()


def _graph_convolution(regions: Tensor, weights: State) -> np.ndarray:
    """As the released code lays it out, ``[N, D, R]``."""
    convolution = GraphConvolution(regions.shape[-1]).double().eval()
    names = {"W.0.": "W.", "W.1.": "norm."}
    state = {
        re.sub(r"^W\.\d\.", lambda match: names[match[0]], name): value
        for name, value in weights.items()
    }
    convolution.load_state_dict(
        {name: value.squeeze(-1) if value.dim() == 3 else value for name, value in state.items()}
    )
    return convolution(regions).transpose(1, 2).numpy()
