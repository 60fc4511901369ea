"""Learning from relevance judgments: R@10 by their number, and by how the judged pairs are selected, on synthetic scenes.

    python studies/feedback.py [--seeds 5] [--counts 50 200 800] [--threads 1] [--out runs/feedback]

For each seed, scenes are generated, a model of the demo's recipe is trained with one caption per image, and its training images are
indexed. Simulated users search for one of the images, with fifty queries a round, in words that were not used in training. A judge who
knows the truth answers fifty questions a round about the first forty results of these queries. A result is relevant if everything that
the query states holds in the image. The questions are about

    doubt     the most doubtful results, as the web UI selects them if match probabilities are known
    edge      the same if they are not known
    first     the first result of each query
    random    any results

Training then continues with these judgments, or without any, for the same number of steps. Prints R@10 of text to image on test images,
and on the collection itself by new queries: mean and standard deviation over seeds, and differences by seed with their 95 % interval
(Student's t). With --out, a study that was stopped, or had fewer seeds, resumes.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from noise import with_interval

import visavis
from visavis import storage
from visavis.errors import VisavisError
from visavis.feedback.records import Judgment, QueryKey, open_feedback
from visavis.models.retriever import Retriever
from visavis.progress import NoProgress
from visavis.recipes.recipe import parse_override
from visavis.retrieval.index_folder import Index
from visavis.retrieval.index_search import SearchQuery, SearchResult, SearchResults, search_index
from visavis.runs.open_run import open_run, read_run_recipe
from visavis.server.query_selection import RESULTS_PER_QUERY, RecentQueries
from visavis.synthetic import CaptionFacts, Scene, SceneGraphs, fact_relevance, write_caption, write_synthetic_scenes

# The seed of the scenes is this number plus the seed of the study.
WORLD = 3000
NUM_SCENES: dict[str, Any] = {"num_train": 1000, "num_val": 500, "num_test": 1000, "captions_per_image": 1}
# Queries of a round, and questions of a round.
ROUND = 50
WAYS = ("doubt", "random", "first", "edge")
NEW_QUERIES = 1000
BEGUN = {"epochs": 24}
FURTHER = {"phases.0.epochs": 4, "phases.0.optimizer.lr": 3e-3, "training.batches_per_epoch": 7}


@dataclass(frozen=True)
class World:
    """Images of a collection by key, their scenes, and the run and index to search them with."""

    scenes: Path
    run: Path
    index: Index
    shown: dict[str, Scene]

    @classmethod
    def make(cls, folder: Path, seed: int, threads: int) -> World:
        """Generate, train and index. Existing folders are used again."""
        scenes, run, collection = folder / "scenes", folder / "run", folder / "collection"
        if not scenes.exists():
            write_synthetic_scenes(scenes, seed=WORLD + seed, **NUM_SCENES)
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

    def fits(self, key: str, facts: CaptionFacts) -> bool:
        """The answer of the judge."""
        return bool(fact_relevance([self.shown[key]], [facts])[0, 0] == 1)

    def queries(self, random: np.random.Generator, count: int) -> list[tuple[str, str, CaptionFacts]]:
        """Sample images to search for, with a query for each."""
        keys = random.choice(list(self.shown), count, replace=False).tolist()
        asked = [(key, write_caption(self.shown[key], random)) for key in keys]
        return [(key, written.text, written.facts) for key, written in asked]

    def found(self, texts: Sequence[str]) -> list[SearchResults]:
        return [search_index(self.index, SearchQuery.from_text(text), RESULTS_PER_QUERY) for text in texts]


def chosen(way: str, texts: Sequence[str], found: Sequence[SearchResults], random: np.random.Generator) -> list[tuple[str, SearchResult]]:
    """The questions of a round: pairs of a query and a result."""
    if way == "first":
        return [(text, results[0]) for text, results in zip(texts, found, strict=True)]
    if way == "random":
        every = [(text, result) for text, results in zip(texts, found, strict=True) for result in results]
        return [every[i] for i in random.choice(len(every), ROUND, replace=False)]
    recent = RecentQueries()
    for text, results in zip(texts, found, strict=True):
        hits = results.hits if way == "doubt" else tuple(replace(hit, match_probability=None) for hit in results)
        assert way == "edge" or hits[0].match_probability is not None
        recent.add(QueryKey(text), 0, SearchResults(hits))
    return [(pair.query.text, pair.result) for pair in recent.most_uncertain(ROUND, lambda *_: False)]


def judgments_of(world: World, way: str, seed: int, count: int) -> Iterator[Judgment]:
    """The answers to the first ``count`` questions. The queries do not depend on the selection."""
    asking, choosing = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    for _ in range(count // ROUND):
        queries = world.queries(asking, ROUND)
        facts = {text: stated for _, text, stated in queries}
        for text, result in chosen(way, list(facts), world.found(list(facts)), choosing):
            item = result.item
            yield Judgment("2026-05-01T09:30:00+00:00", "study", QueryKey(text), item.key, item.content, world.fits(item.key, facts[text]))


def collection_r10(world: World, run: Path, seed: int) -> float:
    """The share of new queries that find their image among the first ten, in percent. Ties count against the model."""
    queries = world.queries(np.random.default_rng([seed, 2]), NEW_QUERIES)
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    split = data_module.data.split("train")
    visual, _ = data_module.encode(matcher, split)
    model, place = Retriever(matcher, data_module.processor), {image.name: row for row, image in enumerate(split.images)}
    scores = (model.encode_texts([text for _, text, _ in queries]) @ model.to_unit_rows(visual).T).numpy()
    own = scores[np.arange(len(queries)), [place[key] for key, _, _ in queries]]
    return 100 * float(((scores >= own[:, None]).sum(1) <= 10).mean())


def further(world: World, folder: Path, way: str, seed: int, count: int, options: argparse.Namespace) -> dict[str, float]:
    """R@10 after continued training, and how many judgments are positive."""
    file, run = folder / f"{way}-{count}.jsonl", folder / f"{way}-{count}"
    if count and not file.exists():
        with open_feedback(file) as votes:
            for judgment in judgments_of(world, way, seed, count):
                votes.append(judgment)
    if not (run / "result.json").exists():
        storage.remove_folder(run)
        settings = {**FURTHER, **dict(options.further), "start_from": str(world.run), "seed": seed + 100}
        visavis.train(world.run / "run.toml", out=run, feedback=file if count else None, overrides=settings)
    result = storage.read_json(run / "result.json", dict[str, object])
    fit = sum('"relevant": true' in line for line in storage.read_text(file).splitlines()) if count else 0
    return {
        "test": float(str(result["t2i_r10"])),
        "rsum": float(str(result["rsum"])),
        "collection": collection_r10(world, run, seed),
        "fit": fit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="First seed.")
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 200, 800])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--further", nargs="+", default=[], type=parse_override, help="Overrides of the continued training, as key=value.")
    options = parser.parse_args()
    out = storage.create_numbered_folder("runs/feedback") if options.out is None else options.out
    rows: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in range(options.first, options.first + options.seeds):
        folder = out / f"seed-{seed}"
        world = World.make(folder, seed, options.threads)
        for way, count in [("none", 0), *((way, count) for way in options.ways for count in options.counts)]:
            rows.setdefault((way, count), []).append(further(world, folder, way, seed, count, options))
            sys.stderr.write(f"seed {seed}: {way} {count}: {rows[way, count][-1]}\n")
    for measure, title in (("test", "R@10 on test images"), ("collection", "R@10 on the collection, new queries")):
        sys.stdout.write(table(rows, measure, title))


def table(rows: dict[tuple[str, int], list[dict[str, float]]], measure: str, title: str) -> str:
    """A metric by number of judgments and by selection, compared with none and with random questions."""
    values = {key: [row[measure] for row in found] for key, found in rows.items()}
    lines = [f"| judgments | selection | relevant | {title} | above none | above random |", "|---|---|---|---|---|---|"]
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
        sys.exit(f"feedback: {error}")
