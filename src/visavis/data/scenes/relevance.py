"""The degree to which a caption is true of a picture: the weighted share of its stated facts that hold, in [0, 1].

Every mention of a caption is matched with another thing of the picture, in the way that makes most facts hold:

    relevance = max over matchings  (sum of the weights of stated facts that hold) / (sum of the weights of stated facts)

A stated attribute holds if the matched thing has it; a relation holds if it is between the two matched things;
a mention left without a thing (more mentions than things) makes all its facts fail. So "two red stars" is true
of three red stars, and wholly relevant means: everything that the caption states is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from visavis.data.scenes.captions import Facts
from visavis.data.scenes.world import ATTRIBUTES, BACKGROUNDS, MOST_THINGS, RELATIONS, Scene

WEIGHTS = {"shape": 2, "color": 2, "pattern": 2, "size": 1, "relation": 2, "background": 2, "total": 1}
"""How much each kind of fact counts; whole numbers, so that a true caption is worth exactly 1."""

_COLUMN = {key: i for i, key in enumerate((name, value) for name, values in ATTRIBUTES.items() for value in values)}
_SLOTS = MOST_THINGS


def relevance(scenes: Sequence[Scene], facts: Sequence[Facts], *, block: int = 64) -> np.ndarray:
    """Degrees ``[scenes, facts]``, float32 in [0, 1]: 1 where everything stated is true.

    One matrix product of the scenes, with their things in each of the 24 orders, and the captions; ``block``
    scenes are scored at once.
    """
    stated = np.stack([_stated(caption_facts) for caption_facts in facts])
    totals = stated.sum(1)
    degrees = np.empty((len(scenes), len(facts)), np.float32)
    for start in range(0, len(scenes), block):
        shown = np.concatenate([_shown(scene) for scene in scenes[start : start + block]])
        points = (shown @ stated.T).reshape(-1, len(_ORDERS), len(facts)).max(1)
        degrees[start : start + block] = points / totals
    return degrees


_ORDERS = list(permutations(range(_SLOTS)))


def _shown(scene: Scene) -> np.ndarray:
    """What is true of a scene ``[24, F]``: a row for each order of its things in the slots of a caption."""
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


def _stated(facts: Facts) -> np.ndarray:
    """The weights of what a caption states ``[F]``, in the layout of `_shown`."""
    attributes = np.zeros((_SLOTS, len(_COLUMN)), np.float32)
    relations = np.zeros((len(RELATIONS), _SLOTS, _SLOTS), np.float32)
    for i, mention in enumerate(facts.mentions):
        for name, value in mention.items():
            attributes[i, _COLUMN[name, value]] = WEIGHTS[name]
    for i, relation, j in facts.relations:
        relations[RELATIONS.index(relation), i, j] = WEIGHTS["relation"]
    background = WEIGHTS["background"] * _one_hot(BACKGROUNDS, facts.background)
    total = WEIGHTS["total"] * _one_hot(range(1, _SLOTS + 1), facts.total)
    return np.concatenate([attributes.ravel(), relations.ravel(), background, total])


def _one_hot(values: Sequence[object], value: object) -> np.ndarray:
    return np.array([candidate == value for candidate in values], np.float32)
