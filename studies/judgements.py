"""What judgements of a search page teach a trained model: R@10 against their number, pairs asked about by doubt against others, on scenes.

    python studies/judgements.py [--seeds 5] [--counts 50 200 800] [--threads 1] [--out runs/judgements]

For each seed a world is drawn, a model of the demo's recipe is trained on one caption a picture, and its training pictures are indexed. People
look for one of them at a time, fifty queries a round, in words that were never trained on; a judge who knows the truth (everything that the query
states holds in the picture) answers fifty questions a round about the first forty results of these queries: the most doubtful ones, as the page
chooses them, where it is known how likely a result is a match ("doubt") and where it is not ("edge"); the first result of each query ("first"); or
any ("random"). The model then goes on learning, with these judgements or without any, for as many steps.
Printed: R@10 of text to image on test pictures, and on the collection itself by new queries; mean and standard deviation over seeds, and differences
by seed with their 95 % interval (Student's t). With --out, a study that was stopped, or had fewer seeds, goes on.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from noise import with_interval

import visavis
from visavis import storage
from visavis.data.judgements import Asked, Judgement, open_judgements
from visavis.data.scenes import Facts, Scene, SceneGraphs, caption, relevance, write_scenes
from visavis.errors import VisavisError
from visavis.models.retriever import Retriever
from visavis.progress import Silent
from visavis.retrieval.index import Index
from visavis.retrieval.searching import Query, Result, Results, search_many
from visavis.runs.folder import open_run, recipe_of
from visavis.serving.asking import DEPTH, RecentQueries
from visavis.training.overrides import parse_override

WORLD = 3000  # the seed of a world is this and the study's seed
NUM_SCENES = {"num_train": 1000, "num_val": 500, "num_test": 1000, "captions_per_image": 1}
ROUND = 50  # queries, and questions
WAYS = ("doubt", "random", "first", "edge")
NEW_QUERIES = 1000
BEGUN = {"epochs": 24}
FURTHER = {"phases.0.epochs": 4, "phases.0.optimizer.lr": 3e-3, "training.batches_per_epoch": 7}


@dataclass(frozen=True)
class World:
    """Pictures of a collection by their keys, what each shows, and the run and index that one searches them with."""

    scenes: Path
    run: Path
    index: Index
    shown: dict[str, Scene]

    @classmethod
    def make(cls, folder: Path, seed: int, threads: int) -> World:
        """Draw, train, index; what is there already is taken."""
        scenes, run, collection = folder / "scenes", folder / "run", folder / "collection"
        if not scenes.exists():
            write_scenes(scenes, seed=WORLD + seed, **NUM_SCENES)
        if not (run / "result.json").exists():
            storage.remove_folder(run)
            visavis.train("demo-unified", data=scenes, out=run, overrides={**BEGUN, "seed": seed, "training.threads": threads})
        truth = SceneGraphs.open(scenes)
        shown = {f"images/{number:06d}.png": truth.scenes[number] for number in range(NUM_SCENES["num_train"])}
        (collection / "images").mkdir(parents=True, exist_ok=True)
        for key in shown:
            shutil.copyfile(scenes / key, collection / key)
        visavis.index(run, collection, out=folder / "index")
        return cls(scenes, run, Index.open(folder / "index"), shown)

    def fits(self, key: str, facts: Facts) -> bool:
        """What the judge answers."""
        return bool(relevance([self.shown[key]], [facts])[0, 0] == 1)

    def queries(self, random: np.random.Generator, count: int) -> list[tuple[str, str, Facts]]:
        """Pictures that somebody looks for, in words for each."""
        keys = random.choice(list(self.shown), count, replace=False).tolist()
        asked = [(key, caption(self.shown[key], random)) for key in keys]
        return [(key, said.text, said.facts) for key, said in asked]

    def found(self, texts: Sequence[str]) -> list[Results]:
        return search_many(self.index, [Query.of(text) for text in texts], DEPTH)


def chosen(way: str, texts: Sequence[str], found: Sequence[Results], random: np.random.Generator) -> list[tuple[str, Result]]:
    """The questions of a round, a query and a result each."""
    if way == "first":
        return [(text, results[0]) for text, results in zip(texts, found, strict=True)]
    if way == "random":
        every = [(text, result) for text, results in zip(texts, found, strict=True) for result in results]
        return [every[i] for i in random.choice(len(every), ROUND, replace=False)]
    recent = RecentQueries()
    for text, results in zip(texts, found, strict=True):
        hits = results.hits if way == "doubt" else tuple(replace(hit, match=None) for hit in results)
        assert way == "edge" or hits[0].match is not None
        recent.add(Asked(text), 0, Results(hits))
    return [(pair.asked.text, pair.result) for pair in recent.doubtful(ROUND, lambda *_: False)]


def judged(world: World, way: str, seed: int, count: int) -> Iterator[Judgement]:
    """The answers to the first so many questions; the queries are the same whatever is asked about."""
    asking, choosing = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    for _ in range(count // ROUND):
        queries = world.queries(asking, ROUND)
        facts = {text: stated for _, text, stated in queries}
        for text, result in chosen(way, list(facts), world.found(list(facts)), choosing):
            item = result.item
            yield Judgement("2026-05-01T09:30:00+00:00", "study", Asked(text), item.key, item.content, world.fits(item.key, facts[text]))


def collection_r10(world: World, run: Path, seed: int) -> float:
    """How many of new queries find the picture that somebody looks for among the first ten, in percent; ties count against the model."""
    queries = world.queries(np.random.default_rng([seed, 2]), NEW_QUERIES)
    data_module, matcher = open_run(run, recipe_of(run), Silent())
    split = data_module.data.split("train")
    visual, _ = data_module.encode(matcher, split)
    model, place = Retriever(matcher, data_module.processor), {image.name: row for row, image in enumerate(split.images)}
    scores = (model.encode_texts([text for _, text, _ in queries]) @ model.unit_rows(visual).T).numpy()
    own = scores[np.arange(len(queries)), [place[key] for key, _, _ in queries]]
    return 100 * float(((scores >= own[:, None]).sum(1) <= 10).mean())


def further(world: World, folder: Path, way: str, seed: int, count: int, options: argparse.Namespace) -> dict[str, float]:
    """What the model reaches that goes on learning, and how many of its judgements say that something fits."""
    file, run = folder / f"{way}-{count}.jsonl", folder / f"{way}-{count}"
    if count and not file.exists():
        with open_judgements(file) as votes:
            for judgement in judged(world, way, seed, count):
                votes.add(judgement)
    if not (run / "result.json").exists():
        storage.remove_folder(run)
        settings = {**FURTHER, **dict(options.further), "start_from": str(world.run), "seed": seed + 100}
        visavis.train(world.run / "run.toml", out=run, judgements=file if count else None, overrides=settings)
    result = storage.read_json(run / "result.json", dict[str, object])
    fit = sum('"fits": true' in line for line in storage.read_text(file).splitlines()) if count else 0
    return {
        "test": float(str(result["t2i_r10"])),
        "rsum": float(str(result["rsum"])),
        "collection": collection_r10(world, run, seed),
        "fit": fit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 200, 800])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--further", nargs="+", default=[], type=parse_override, help="key=value, of the further training")
    options = parser.parse_args()
    out = storage.numbered_folder("runs/judgements") if options.out is None else options.out
    rows: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in range(options.first, options.first + options.seeds):
        folder = out / f"seed-{seed}"
        world = World.make(folder, seed, options.threads)
        for way, count in [("none", 0), *((way, count) for way in options.ways for count in options.counts)]:
            rows.setdefault((way, count), []).append(further(world, folder, way, seed, count, options))
            sys.stderr.write(f"seed {seed}: {way} {count}: {rows[way, count][-1]}\n")
    for measure, title in (("test", "R@10 on test pictures"), ("collection", "R@10 on the collection, new queries")):
        sys.stdout.write(table(rows, measure, title))


def table(rows: dict[tuple[str, int], list[dict[str, float]]], measure: str, title: str) -> str:
    """A measure by number of judgements and by what was asked about, beside none and beside random questions."""
    values = {key: [row[measure] for row in found] for key, found in rows.items()}
    lines = [f"| judgements | asked about | of them fit | {title} | above none | above random |", "|---|---|---|---|---|---|"]
    for (way, count), own in values.items():
        spread = f" ± {statistics.stdev(own):.1f}" if len(own) > 1 else ""
        above = [
            with_interval([a - b for a, b in zip(own, values[other], strict=True)]) if other in values and other != (way, count) else ""
            for other in (("none", 0), ("random", count))
        ]
        fit = statistics.mean(row["fit"] for row in rows[way, count])
        lines.append(f"| {count} | {way} | {fit:.0f} | {statistics.mean(own):.1f}{spread} | {above[0]} | {above[1]} |")
    return "\n".join([*lines, "", ""])


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"judgements: {error}")
