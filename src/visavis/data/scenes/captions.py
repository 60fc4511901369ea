"""Sentences about a scene, each with the facts that it states.

A caption is planned first (which things it mentions, which of their attributes, which relations) and worded
afterwards, with synonyms and in one of several word orders. Idioms that name colors or shapes ("once in a blue
moon") state nothing and are there to distract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visavis.data.scenes import words
from visavis.data.scenes.style import PAPER, Style
from visavis.data.scenes.world import ATTRIBUTES, BACKGROUNDS, MOST_THINGS, RELATIONS, Scene, Thing
from visavis.errors import DataError


@dataclass(frozen=True)
class Facts:
    """What a caption states.

    mentions: for each thing mentioned, the attributes stated of it (``{"shape": "star", "color": "red"}``); "two
    red stars" are two mentions. relations: (index of a mention, relation, index of a mention). background and
    total (the number of things in the picture): None where not stated.
    """

    mentions: tuple[dict[str, str], ...] = ()
    relations: tuple[tuple[int, str, int], ...] = ()
    background: str | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        for mention in self.mentions:
            for name, value in mention.items():
                if value not in ATTRIBUTES.get(name, ()):
                    raise DataError(f"a caption states {name}={value!r}, which is no attribute of drawn things.")
        if self.background not in (None, *BACKGROUNDS) or self.total not in (None, *range(1, MOST_THINGS + 1)):
            raise DataError(
                f"a caption states {self.total!r} things on {self.background!r}, expected 1 to {MOST_THINGS} on a known background."
            )
        for i, name, j in self.relations:
            if name not in RELATIONS or not 0 <= min(i, j) <= max(i, j) < len(self.mentions) <= MOST_THINGS:
                raise DataError(
                    f"a caption states {name!r} of mentions {i} and {j}, expected {', '.join(RELATIONS)} of its {len(self.mentions)}."
                )

    def to_json(self) -> dict[str, Any]:
        return {
            "mentions": list(self.mentions),
            "relations": [list(r) for r in self.relations],
            "background": self.background,
            "total": self.total,
        }


@dataclass(frozen=True)
class Caption:
    """A sentence and the facts that it states."""

    text: str
    facts: Facts


def caption(scene: Scene, rng: np.random.Generator, style: Style = PAPER) -> Caption:
    """A random true caption of a scene, in the words of a style."""
    return _Writer(scene, rng, style).write()


def captions(scene: Scene, count: int, rng: np.random.Generator, style: Style = PAPER) -> list[Caption]:
    """``count`` true captions of a scene, all different as texts."""
    by_text: dict[str, Caption] = {}
    while len(by_text) < count:
        drawn = caption(scene, rng, style)
        by_text.setdefault(drawn.text, drawn)
    return list(by_text.values())


class _Writer:
    """One caption in the making: the scene, the randomness, and the facts stated so far."""

    def __init__(self, scene: Scene, rng: np.random.Generator, style: Style):
        self.scene, self.rng, self.style = scene, rng, style
        self.mentions: list[dict[str, str]] = []
        self.relations: list[tuple[int, str, int]] = []
        self.background: str | None = None
        self.total: int | None = None

    def write(self) -> Caption:
        several = len(self.scene.things) > 1
        kinds = (
            (self._plain, 0.2),
            (self._related, 0.7 * bool(self._evident())),
            (self._counted, 0.45 * bool(self._alike())),
            (self._totaled, 0.12 * several),
        )
        chances = np.array([chance for _, chance in kinds])
        kind, _ = kinds[int(self.rng.choice(len(kinds), p=chances / chances.sum()))]
        text = self._decorate(kind())
        return Caption(text, Facts(tuple(self.mentions), tuple(self.relations), self.background, self.total))

    # What to say

    def _plain(self) -> str:
        """One thing, or a list of up to three."""
        things = self._shuffled(range(len(self.scene.things)))[: 1 if self._chance(0.45) else 3]
        return words.join([self._mention(i) for i in things])

    def _related(self) -> str:
        """A relation of two things, sometimes with a third that is related to the second or merely named."""
        i, name, j = self._pick(self._evident())
        if self._chance(0.5):
            text = f"{self._mention(i)} {self._pick(words.RELATIONS[name])} {self._mention(j)}"
            self.relations.append((0, name, 1))
            last = j
        else:
            text = f"{self._mention(j)} {self._pick(words.CONVERSES[name])} {self._mention(i)}"
            self.relations.append((1, name, 0))
            last = i
        others = [k for k in range(len(self.scene.things)) if k not in (i, j)]
        if not others or self._chance(0.45):
            return text
        onward = [(name, k) for start, name, k in self._evident() if start == last and k in others]
        if onward and self._chance(0.6):
            name, k = self._pick(onward)
            self.relations.append((1, name, 2))
            return f"{text}, which is {self._pick(words.RELATIONS[name])} {self._mention(k)}"
        form = self._pick(("{text}, and {other}", "{text}, with {other} too", "{other}, and {text}"))
        return form.format(text=text, other=self._mention(self._pick(others)))

    def _counted(self) -> str:
        """Several things that share a shape, a color or both, said at once; sometimes another one."""
        shared, group = self._pick(self._alike())
        looks = {name: getattr(self.scene.things[group[0]], name) for name in shared}
        pattern = {self.scene.things[i].pattern for i in group}
        if len(pattern) == 1 and pattern != {"plain"} and self._chance(0.5):
            looks["pattern"] = pattern.pop()
        self.mentions += [looks] * len(group)
        text = f"{words.NUMBERS[len(group)]} {self._noun(looks, plural=True)}"
        others = [i for i in range(len(self.scene.things)) if i not in group]
        if others and self._chance(0.6):
            return words.join([text, self._mention(self._pick(others))])
        return text

    def _totaled(self) -> str:
        """How many things there are, and one or two of them."""
        self.total = len(self.scene.things)
        things = self._shuffled(range(self.total))[: 1 if self._chance(0.6) else 2]
        number = words.NUMBERS[self.total]
        named = words.join([self._mention(i) for i in things])
        if len(things) == self.total:
            return f"{number} things: {named}"
        if len(things) == 1:
            return self._pick((f"{number} things, one of them {named}", f"{number} shapes, and one is {named}"))
        return f"{number} things, among them {named}"

    # How to say it

    def _decorate(self, body: str) -> str:
        """The sentence around the body: an opening, the background before or after, perhaps an idiom."""
        place = ""
        if self._chance(0.55):
            self.background = self.scene.background
            place = self._pick(words.PLACES[self.background])
        if not place:
            text = self._pick(words.OPENINGS) + body
        elif self._chance(0.3):
            text = f"{place}, {body}" if self._chance(0.5) else f"{place} {'are' if self._plural(body) else 'is'} {body}"
        elif "," in body or self._chance(0.15):
            text = f"{self._pick(words.OPENINGS)}{body}, {'all' if len(self.mentions) > 2 else 'seen'} {place}"
        else:
            text = f"{self._pick(words.OPENINGS)}{body} {place}"
        if self._chance(0.12):
            text = f"{text}, {self._pick(words.IDIOMS)}"
        text = text[0].upper() + text[1:]
        return text + "." if self._chance(0.7) else text

    def _plural(self, body: str) -> bool:
        return body.split(maxsplit=1)[0] in words.NUMBERS.values() or (not self.relations and len(self.mentions) > 1)

    def _mention(self, index: int) -> str:
        """A noun phrase for one thing; which attributes it states is drawn anew each time."""
        thing = self.scene.things[index]
        stated = {"shape": thing.shape, "color": thing.color}
        drop = self.rng.random()
        if drop < 0.10:
            del stated["color"]
        elif drop < 0.18:
            del stated["shape"]
        if self._chance(0.55 if thing.pattern != "plain" else 0.08):
            stated["pattern"] = thing.pattern
        if self._chance(0.35):
            stated["size"] = thing.size
        self.mentions.append(stated)
        return self._noun(stated)

    def _noun(self, looks: dict[str, str], *, plural: bool = False) -> str:
        adjectives = [self._pick(words.SIZES[looks["size"]])] if "size" in looks else []
        tail = ""
        middle = [self._pick(self.style.colors[looks["color"]])] if "color" in looks else []
        if "pattern" in looks:
            if looks["pattern"] in words.TAILS and self._chance(0.3):
                tail = f" {self._pick(words.TAILS[looks['pattern']])}"
            else:
                middle.insert(len(middle) if self._chance(0.2) else 0, self._pick(words.PATTERNS[looks["pattern"]]))
        noun = self._pick(self.style.shapes[looks["shape"]]) if "shape" in looks else self._pick(words.ANYTHING)
        phrase = " ".join([*adjectives, *middle, words.plural(noun) if plural else noun]) + tail
        return phrase if plural else words.article(phrase)

    # What is there

    def _evident(self) -> list[tuple[int, str, int]]:
        """The relations that a person would name: of two directions the more evident one, and every touch."""

        def evident(i: int, name: str, j: int) -> bool:
            a, b = self.scene.things[i], self.scene.things[j]
            across, down = abs(a.x - b.x), abs(a.y - b.y)
            return name in ("front", "inside") or (across > down) == (name == "left")

        return sorted(relation for relation in self.scene.relations if evident(*relation))

    def _alike(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """(shared attributes, all the things that share them), where there are at least two."""
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
        for shared in (("shape", "color"), ("shape",), ("color",)):
            for i, thing in enumerate(self.scene.things):
                groups.setdefault((shared, _looks(thing, shared)), []).append(i)
        return [(shared, tuple(group)) for (shared, _), group in groups.items() if len(group) > 1]

    def _chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def _pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def _shuffled(self, indices: range) -> list[int]:
        return [int(i) for i in self.rng.permutation(indices)]


def _looks(thing: Thing, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(getattr(thing, name) for name in names)
