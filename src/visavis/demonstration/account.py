"""The results of a demo in words, tables and pictures: the contents of its report."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visavis import storage
from visavis.comparison.table import Table
from visavis.demonstration.figures import retrieval_picture
from visavis.demonstration.retrievals import Retrieval, RetrievedScene
from visavis.environment import program, versions
from visavis.report import page
from visavis.report.figures import DARK, LIGHT, Curve, curves_picture
from visavis.report.page import Section, Shades
from visavis.runs.begin import Trained
from visavis.training.run_files import RunFiles

ABOUT = {
    "TripletHN": "pushes away only the hardest wrong candidate of a batch",
    "VLC": "pushes away all wrong candidates, the harder the more: a softmax",
    "Unified": "a softmax over the wrong candidates, with the margin of a triplet",
}


@dataclass(frozen=True)
class Account:
    """A finished demo. runs: by name of their objective. best: the run with the highest validation RSUM, which retrieved
    ``captions`` (random test captions) and ``searches`` (free sentences). seconds: of the stages so far.
    """

    scenes: Path
    runs: Mapping[str, Sequence[Trained]]
    best: Trained
    table: Table
    captions: Sequence[Retrieval]
    searches: Sequence[Retrieval]
    seconds: Mapping[str, float]


def write_report(account: Account, folder: Path) -> None:
    """Write all files of a demo besides scenes and runs; ``report.html`` last."""
    storage.write_text(folder / "table.md", account.table.markdown())
    storage.write_json(folder / "table.json", account.table.to_json())
    storage.write_json(folder / "demo.json", _facts(account))
    curves = [Curve(name, RunFiles(run.folder).read_log()) for name, runs in account.runs.items() for run in runs]
    retrieval = Shades(*(retrieval_picture(account.captions, theme) for theme in (LIGHT, DARK)))
    curve = Shades(*(curves_picture(curves, theme) for theme in (LIGHT, DARK)))
    storage.write_bytes(folder / "retrieval.png", retrieval.light)
    storage.write_bytes(folder / "curves.png", curve.light)
    storage.write_text(folder / "report.html", _page(account, retrieval, curve))


def _page(account: Account, retrieval: Shades, curve: Shades) -> str:
    rules = account.table.rules
    sections = [
        Section("What was done", _what_was_done(account)),
        Section("Which objective retrieves best", _comparison(account)),
        Section("What it finds", page.picture(retrieval, _alt(account.captions), _selection(account))),
        Section("Three searches in free words", "\n".join(map(_search, account.searches)) + page.paragraph(_SEARCHED, "note")),
        Section("How they learned", page.picture(curve, _CURVES_ALT, _CURVES)),
        Section("What the numbers mean", page.glossary(_glossary(account))),
        Section("What to try next", page.commands(_next(account))),
    ]
    lead = (
        f"Sentences find pictures: {len(account.runs)} training objectives, compared on {rules.num_images:,} scenes that none of them saw."
    )
    return page.page("visavis: a first look", lead, sections, _made_by(account))


def _what_was_done(account: Account) -> str:
    row, rules = account.table.best("t2i_r1"), account.table.rules
    recall, chance = row.mean("t2i_r1"), rules.chance("t2i_r1")
    seeds = len(next(iter(account.runs.values())))
    text = (
        "The program drew a small world of shapes, colors and patterns, and wrote five captions for each picture. "
        f"A model with two sides, one for pictures and one for words, was trained on it with {len(account.runs)} objectives and "
        f"{seeds} {'seeds' if seeds > 1 else 'seed'} each, everything else but their learning rates being equal. "
        f"Then each of {rules.num_texts:,} new captions looked for its picture among {rules.num_images:,}, "
        "and each picture for its captions."
    )
    facts = [
        (f"{recall:.0f} %", f"of captions find their own picture first ({row.name})"),
        (f"{recall / chance:.0f} ×", f"as often as by chance, which is {chance:.1f} %"),
        (f"{account.table.best().mean('rsum'):.0f}", f"of 600: the best RSUM ({account.table.best().name})"),
        (f"{sum(account.seconds.values()):.0f} s", f"to draw, look and train, on {_threads()}"),
    ]
    return page.paragraph(text) + "\n" + page.numbers(facts)


def _comparison(account: Account) -> str:
    return page.comparison(account.table, ABOUT) + "\n" + page.paragraph(_reading(account.table))


def _reading(table: Table) -> str:
    """The order of the rows in a sentence, and how far it can be trusted."""
    rows = sorted(table.rows, key=lambda row: -row.mean("rsum"))
    order = ", then ".join(f"{row.name} {row.mean('rsum'):.1f}" for row in rows)
    spread = sorted((deviation, row.name) for row in rows if (deviation := row.deviation("rsum")) is not None)
    worth = "One seed says nothing about differences."
    if spread:
        (least, calm), (most, wild) = spread[0], spread[-1]
        worth = f"Seeds alone move it by ± {least:.1f} ({calm}) to ± {most:.1f} ({wild}); so few seeds show luck, they do not measure it."
    short = (
        "Each has a learning rate of its own, chosen with the same effort on another world, as the table says; a training as short as "
        "this one shows which objective learns fast, not how far each would come."
    )
    return f"By RSUM: {order}. {worth} {short}"


def _search(search: Retrieval) -> str:
    images = [(_jpeg(scene), scene.describe(), scene.score, scene.fits) for scene in search.scenes]
    return page.strip(search.query, f"{search.num_fitting} of {len(search.scenes)} fit", images)


def _jpeg(scene: RetrievedScene) -> bytes:
    raw = io.BytesIO()
    scene.picture.save(raw, "jpeg", quality=88)
    return raw.getvalue()


def _alt(retrievals: Sequence[Retrieval]) -> str:
    """The alternative text of the retrieval picture: where in each row the right scene is."""
    rows = []
    for retrieval in retrievals:
        own = next((place for place, scene in enumerate(retrieval.scenes, 1) if scene.own), None)
        rows.append(f"“{retrieval.query}”: its own picture {f'at place {own}' if own else 'is not among them'}")
    return f"Captions, each above the {len(retrievals[0].scenes)} pictures found first. {'; '.join(rows)}."


def _selection(account: Account) -> str:
    return (
        f"{len(account.captions)} test captions, drawn at random and not picked by their result, and the pictures that "
        f"{account.best.folder.name} (the run with the best validation RSUM) puts first. "
        "Shown at twice the resolution at which the model sees them."
    )


_SEARCHED = (
    "The sentences are fixed, short ones that this small model can answer; the same run answers them. A green frame means that everything "
    "said is true of the picture, by the program's own record of what it drew. The number is the cosine similarity."
)
_CURVES = (
    "On the validation scenes, after each half epoch: thin lines are single seeds, thick ones their mean. A good objective lifts the "
    "similarity of pictures with their own captions (solid) away from that with the most similar wrong caption of a batch (dashed)."
)
_CURVES_ALT = (
    "Three small charts over training steps: loss falling, RSUM rising, and positive and hardest negative similarities drawing apart."
)


def _glossary(account: Account) -> list[tuple[str, str]]:
    rules = account.table.rules
    who = (
        f"Who asks whom: {rules.captions_per_image:g} of {rules.num_texts:,} captions are right for a picture, one of {rules.num_images:,} "
        "pictures for a caption. Others of which it is true, too, count as wrong, so 100 % is out of reach."
    )
    how = (
        "All test pictures against all test captions; equal scores count against the model. "
        "Recalls can be compared only under the same protocol with as many candidates."
    )
    return [
        ("R@1, R@5, R@10", "The percentage of queries with a right answer among the first 1, 5 or 10. Higher is better."),
        ("image to text, text to image", who),
        ("RSUM", "The sum of the six recalls; 600 would be perfect."),
        ("±", "The standard deviation over seeds: how much of a difference is luck."),
        ("chance", "What a random order would reach."),
        (f"protocol {rules.protocol}, ties {rules.ties}", how),
        ("objective", "What training makes small: a formula of the similarities of a batch. The models are otherwise alike."),
    ]


def _next(account: Account) -> list[tuple[str, str]]:
    """Commands that can be copied as they are, to be run in the folder in which the demo was started."""
    run, scenes = shlex.quote(str(account.best.folder)), shlex.quote(str(account.scenes))
    visavis = program()
    return [
        ("Search the pictures in your own words:", f"{visavis} search {run} 'two stars in the snow'"),
        ("See all metrics of a run:", f"{visavis} evaluate {run}"),
        ("Train with another objective on the same scenes:", f"{visavis} train demo --data {scenes} objective='NTXent(tau=0.05)'"),
        ("See which objectives there are:", f"{visavis} catalog objectives"),
        (
            "Bring your own pictures: a folder with captions.csv (filename,caption) in it. What is wrong with it?",
            f"{visavis} data check your-folder",
        ),
    ]


def _facts(account: Account) -> dict[str, Any]:
    return {
        "best_run": account.best.folder.name,
        "runs": {name: [run.folder.name for run in runs] for name, runs in account.runs.items()},
        "searches": {search.query: search.num_fitting for search in account.searches},
        "seconds": dict(account.seconds),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def _threads() -> str:
    number = torch.get_num_threads()
    return f"{number} CPU thread{'s' if number > 1 else ''}"


def _made_by(account: Account) -> str:
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in account.seconds.items())
    runs = ", ".join(run.folder.name for runs in account.runs.values() for run in runs)
    packages = versions()
    return (
        f"Made by visavis {packages['visavis']} with torch {packages['torch']}: {stages}. "
        f"Beside this page: the scenes, table.md, table.json, and the runs {runs}."
    )
