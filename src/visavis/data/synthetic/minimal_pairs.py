"""Minimal pairs of synthetic scenes: a true and a false caption that are written from facts which
differ in one edit.

The edited caption is checked against the scene. If it happens to be true, another edit is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from visavis.data.synthetic import lexicon
from visavis.data.synthetic.captions import CaptionFacts, SceneCaption, fact_relevance
from visavis.data.synthetic.lexicon import DEFAULT_STYLE, Style
from visavis.data.synthetic.scene import (
    ATTRIBUTES,
    BACKGROUNDS,
    MAX_OBJECTS,
    Scene,
    SceneObject,
    T,
    pick,
)

# Edits of a kind that are sampled for a scene before the kind is skipped.
MAX_TRIES = 12


@dataclass(frozen=True)
class ScenePair:
    """A true caption and a false one.

    Attributes:
        kind: Kind of the edit.
        true: The true caption.
        edited: The false caption. A negation has no facts of its own and negates those of ``true``.
    """

    kind: str
    true: SceneCaption
    edited: SceneCaption


def make_scene_pairs(
    scene: Scene, rng: np.random.Generator, style: Style = DEFAULT_STYLE
) -> list[ScenePair]:
    """Make at most one pair of each kind.

    Args:
        scene: The scene.
        rng: Random generator.
        style: Words of the captions.

    Returns:
        The pairs.
    """
    pairs = []
    for kind, sample in EDIT_KINDS.items():
        for _ in range(MAX_TRIES):
            if (fact_pair := sample(scene, rng)) is None:
                break
            true, edited = fact_relevance([scene], fact_pair)[0]
            if true == 1 and edited < 1:
                pairs.append(
                    ScenePair(kind, *(_plain_caption(facts, style) for facts in fact_pair))
                )
                break
    mention = _mention(pick(rng, scene.things))
    negated = SceneCaption(f"There is no {_noun(mention, style, bare=True)}", CaptionFacts())
    pairs.append(
        ScenePair(
            "negated",
            SceneCaption(f"There is {_noun(mention, style)}", CaptionFacts((mention,))),
            negated,
        )
    )
    return pairs


FactPair = tuple[CaptionFacts, CaptionFacts]


def _replaced(name: str) -> Callable[[Scene, np.random.Generator], FactPair | None]:
    def sample(scene: Scene, rng: np.random.Generator) -> FactPair:
        thing = pick(rng, scene.things)
        stated = _mention(thing) | {name: getattr(thing, name)}
        return CaptionFacts((stated,)), CaptionFacts(
            (stated | {name: _pick_other(rng, ATTRIBUTES[name], stated[name])},)
        )

    return sample


def _swapped_colors(scene: Scene, rng: np.random.Generator) -> FactPair | None:
    if len(scene.things) < 2:
        return None
    a, b = (_mention(scene.things[i]) for i in rng.permutation(len(scene.things))[:2])
    return CaptionFacts((a, b)), CaptionFacts(
        (a | {"color": b["color"]}, b | {"color": a["color"]})
    )


def _related(scene: Scene, rng: np.random.Generator) -> CaptionFacts | None:
    if not scene.relations:
        return None
    i, name, j = pick(rng, sorted(scene.relations))
    return CaptionFacts((_mention(scene.things[i]), _mention(scene.things[j])), ((0, name, 1),))


def _swapped_roles(scene: Scene, rng: np.random.Generator) -> FactPair | None:
    true = _related(scene, rng)
    return (true, replace(true, mentions=true.mentions[::-1])) if true else None


def _replaced_relation(scene: Scene, rng: np.random.Generator) -> FactPair | None:
    true = _related(scene, rng)
    return (true, replace(true, relations=((1, true.relations[0][1], 0),))) if true else None


def _replaced_number(scene: Scene, rng: np.random.Generator) -> FactPair | None:
    mention = _mention(pick(rng, scene.things))
    number = sum(_mention(thing) == mention for thing in scene.things)
    return (
        (CaptionFacts((mention,) * number), CaptionFacts((mention,) * (number + 1)))
        if 1 < number < MAX_OBJECTS
        else None
    )


def _replaced_total(scene: Scene, rng: np.random.Generator) -> FactPair | None:
    total, mention = len(scene.things), _mention(pick(rng, scene.things))
    if total < 2:
        return None
    false_total = _pick_other(rng, tuple(lexicon.NUMBER_WORDS), total)
    return CaptionFacts((mention,), total=total), CaptionFacts((mention,), total=false_total)


def _replaced_background(scene: Scene, rng: np.random.Generator) -> FactPair:
    true = CaptionFacts((_mention(pick(rng, scene.things)),), background=scene.background)
    return true, replace(true, background=_pick_other(rng, BACKGROUNDS, scene.background))


# Samplers of the facts of a true and of a false caption, by what is edited.
EDIT_KINDS: dict[str, Callable[[Scene, np.random.Generator], FactPair | None]] = {
    **{f"{name} replaced": _replaced(name) for name in ("color", "shape", "pattern", "size")},
    "background replaced": _replaced_background,
    "colors swapped": _swapped_colors,
    "relation replaced": _replaced_relation,
    "roles swapped": _swapped_roles,
    "number replaced": _replaced_number,
    "total replaced": _replaced_total,
}


def _mention(thing: SceneObject) -> dict[str, str]:
    return {"shape": thing.shape, "color": thing.color}


def _pick_other(rng: np.random.Generator, values: Sequence[T], value: T) -> T:
    return pick(rng, [candidate for candidate in values if candidate != value])


def _plain_caption(facts: CaptionFacts, style: Style) -> SceneCaption:
    """Write facts in the plainest words."""
    if facts.relations:
        first, name, _ = facts.relations[0]
        relation = (lexicon.INVERSE_RELATIONS if first else lexicon.RELATIONS)[name][0]
        body = f" {relation} ".join(_noun(mention, style) for mention in facts.mentions)
    elif len(facts.mentions) > 1 and all(
        mention == facts.mentions[0] for mention in facts.mentions
    ):
        attributes = facts.mentions[0]
        body = f"{lexicon.NUMBER_WORDS[len(facts.mentions)]} {lexicon.pluralize(_noun(attributes, style, bare=True))}"
    else:
        body = lexicon.join_phrases([_noun(mention, style) for mention in facts.mentions])
    if facts.total is not None:
        body = f"{lexicon.NUMBER_WORDS[facts.total]} things, one of them {body}"
    if facts.background is not None:
        body = f"{body} {lexicon.BACKGROUND_PHRASES[facts.background][0]}"
    return SceneCaption(body[0].upper() + body[1:], facts)


def _noun(attributes: dict[str, str], style: Style, *, bare: bool = False) -> str:
    adjectives = [
        vocabulary[attributes[name]][0]
        for name, vocabulary in (("size", lexicon.SIZES), ("pattern", lexicon.PATTERNS))
        if name in attributes
    ]
    phrase = " ".join(
        [*adjectives, style.colors[attributes["color"]][0], style.shapes[attributes["shape"]][0]]
    )
    return phrase if bare else lexicon.with_article(phrase)
