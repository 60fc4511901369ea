"""Graded relevance of a caption for a scene: the weighted share of its weights facts that hold, in [0, 1].

Each mention of a caption is matched with a different thing of the scene, in the way that makes most facts hold:

    relevance = max over matchings (sum of the weights of weights facts that hold) / (sum of the weights of weights facts)

A weights attribute holds if the matched thing has it. A relation holds if it is between the two matched things.
All facts of a mention fail if there are more mentions than things. So "two red stars" is true for three red stars, and a relevance of 1 means
that everything in the caption is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from visavis.synthetic.captions import CaptionFacts
from visavis.synthetic.scene import ATTRIBUTES, BACKGROUNDS, MAX_OBJECTS, RELATIONS, Scene

# Integers, so that a true caption has a relevance of exactly 1.
FACT_WEIGHTS = {"shape": 2, "color": 2, "pattern": 2, "size": 1, "relation": 2, "background": 2, "total": 1}

_COLUMN = {key: i for i, key in enumerate((name, value) for name, values in ATTRIBUTES.items() for value in values)}
_SLOTS = MAX_OBJECTS


def fact_relevance(scenes: Sequence[Scene], facts: Sequence[CaptionFacts], *, block_size: int = 64) -> np.ndarray:
    """Compute graded relevance with one matrix product of the scenes, with their things in each of 24 orders, and the captions.

    Args:
        scenes: The scenes.
        facts: Facts of the captions.
        block_size: Number of scenes that are scored at once.

    Returns:
        Float32 relevance in [0, 1], shape ``[scenes, facts]``. 1 if all facts are true.
    """
    weights = np.stack([_stated_weights(caption_facts) for caption_facts in facts])
    totals = weights.sum(1)
    relevance = np.empty((len(scenes), len(facts)), np.float32)
    for start in range(0, len(scenes), block_size):
        true_facts = np.concatenate([_true_facts(scene) for scene in scenes[start : start + block_size]])
        points = (true_facts @ weights.T).reshape(-1, len(_ORDERS), len(facts)).max(1)
        relevance[start : start + block_size] = points / totals
    return relevance


_ORDERS = list(permutations(range(_SLOTS)))


def _true_facts(scene: Scene) -> np.ndarray:
    """Return what is true for a scene ``[24, F]``: a row for each order of its things in the slots of a caption."""
    attributes = np.zeros((_SLOTS, len(_COLUMN)), np.float32)
    relations = np.zeros((len(RELATIONS), _SLOTS, _SLOTS), np.float32)
    for i, thing in enumerate(scene.things):
        for name in ATTRIBUTES:
            attributes[i, _COLUMN[name, getattr(thing, name)]] = 1
    for i, name, j in scene.relations:
        relations[RELATIONS.index(name), i, j] = 1
    orders = np.array(_ORDERS)
    related = relations[:, orders[:, :, None], orders[:, None, :]].swapaxes(0, 1)
    whole = np.concatenate([_one_hot(BACKGROUNDS, scene.background), _one_hot(range(1, _SLOTS + 1), len(scene.things))])
    rows = len(orders)
    return np.concatenate([attributes[orders].reshape(rows, -1), related.reshape(rows, -1), np.tile(whole, (rows, 1))], 1)


def _stated_weights(facts: CaptionFacts) -> np.ndarray:
    """Return the weights of the weights facts of a caption ``[F]``, in the layout of ``_true_facts``."""
    attributes = np.zeros((_SLOTS, len(_COLUMN)), np.float32)
    relations = np.zeros((len(RELATIONS), _SLOTS, _SLOTS), np.float32)
    for i, mention in enumerate(facts.mentions):
        for name, value in mention.items():
            attributes[i, _COLUMN[name, value]] = FACT_WEIGHTS[name]
    for i, relation, j in facts.relations:
        relations[RELATIONS.index(relation), i, j] = FACT_WEIGHTS["relation"]
    background = FACT_WEIGHTS["background"] * _one_hot(BACKGROUNDS, facts.background)
    total = FACT_WEIGHTS["total"] * _one_hot(range(1, _SLOTS + 1), facts.total)
    return np.concatenate([attributes.ravel(), relations.ravel(), background, total])


def _one_hot(values: Sequence[object], value: object) -> np.ndarray:
    return np.array([candidate == value for candidate in values], np.float32)
