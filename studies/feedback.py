"""Learning from relevance judgments: R@10 by their number, and by how the judged pairs are
selected, on synthetic scenes.

    python studies/feedback.py [--seeds 5] [--counts 50 200 800] [--threads 1] [--out runs/feedback]

For each seed, scenes are generated, a model of the demo's recipe is trained with one caption per
image, and its training images are indexed. Simulated users search for one of the images, with fifty
queries a round, in words that were not used in training. A judge who knows the truth answers fifty
questions a round about the first forty results of these queries. A result is relevant if everything
that the query states holds in the image. The questions are about

    doubt     the most doubtful results, as the web UI selects them if match probabilities are known
    edge      the same if they are not known
    first     the first result of each query
    random    any results

Training then continues with these judgments, or without any, for the same number of steps. Prints
R@10 of text to image on test images, and on the collection itself by new queries: mean and standard
deviation over seeds, and differences by seed with their 95 % interval (Student's t). With --out, a
study that was stopped, or had fewer seeds, resumes.
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
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.data.feedback.records import Judgment, QueryKey
from visavis.data.feedback.sources import write_feedback
from visavis.data.synthetic import (
    CaptionFacts,
    Scene,
    SceneGraphs,
    fact_relevance,
    write_caption,
    write_synthetic_scenes,
)
from visavis.models.retriever import Retriever
from visavis.retrieval.index_folder import Index
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, SearchResult, SearchResults, search_collection
from visavis.retrieval.server.search_service import RESULTS_PER_QUERY, RecentQueries
from visavis.training.recipes.recipe import parse_override
from visavis.training.runs.open_run import open_run, read_run_recipe

# The seed of the scenes is this number plus the seed of the study.
SCENE_SEED = 3000
NUM_SCENES: dict[str, Any] = {
    "num_train": 1000,
    "num_val": 500,
    "num_test": 1000,
    "captions_per_image": 1,
}
# Queries of a round, and questions of a round.
ROUND = 50
SELECTIONS = ("doubt", "random", "first", "edge")
NEW_QUERIES = 1000
FIRST_TRAINING = {"epochs": 24}
CONTINUED_TRAINING = {
    "phases.0.epochs": 4,
    "phases.0.optimizer.lr": 3e-3,
    "training.batches_per_epoch": 7,
}


@dataclass(frozen=True)
class World:
    """Images of a collection by key, their scenes, and the run and index to search them with."""

    scenes: Path
    run: Path
    index: Index
    scene_by_key: dict[str, Scene]

    @classmethod
    def make(cls, folder: Path, seed: int, threads: int) -> World:
        """Generate, train and index. Existing folders are used again."""
        scenes = folder / "scenes"
        run = folder / "run"
        collection = folder / "collection"
        if not scenes.exists():
            write_synthetic_scenes(scenes, seed=SCENE_SEED + seed, **NUM_SCENES)
        if not (run / "result.json").exists():
            storage.remove_folder(run)
            visavis.train(
                "demo-unified",
                data=scenes,
                out=run,
                overrides={**FIRST_TRAINING, "seed": seed, "training.threads": threads},
            )
        truth = SceneGraphs.open(scenes)
        scene_by_key = {
            f"images/{number:06d}.png": truth.scenes[number]
            for number in range(NUM_SCENES["num_train"])
        }
        (collection / "images").mkdir(parents=True, exist_ok=True)
        for key in scene_by_key:
            shutil.copyfile(scenes / key, collection / key)
        visavis.index(run, collection, out=folder / "index")
        return cls(scenes, run, open_index(folder / "index"), scene_by_key)

    def is_relevant(self, key: str, facts: CaptionFacts) -> bool:
        """The answer of the judge."""
        return bool(fact_relevance([self.scene_by_key[key]], [facts])[0, 0] == 1)

    def queries(
        self, random: np.random.Generator, count: int
    ) -> list[tuple[str, str, CaptionFacts]]:
        """Sample images to search for, with a query for each."""
        keys = random.choice(list(self.scene_by_key), count, replace=False).tolist()
        captions = [(key, write_caption(self.scene_by_key[key], random)) for key in keys]
        return [(key, caption.text, caption.facts) for key, caption in captions]

    def found(self, texts: Sequence[str]) -> list[SearchResults]:
        return [
            search_collection(self.index, SearchQuery.from_text(text), RESULTS_PER_QUERY)
            for text in texts
        ]


def select_results(
    selection: str,
    texts: Sequence[str],
    results_of_texts: Sequence[SearchResults],
    random: np.random.Generator,
) -> list[tuple[str, SearchResult]]:
    """The questions of a round: pairs of a query and a result."""
    if selection == "first":
        return [(text, results[0]) for text, results in zip(texts, results_of_texts, strict=True)]
    if selection == "random":
        all_pairs = [
            (text, result)
            for text, results in zip(texts, results_of_texts, strict=True)
            for result in results
        ]
        return [all_pairs[i] for i in random.choice(len(all_pairs), ROUND, replace=False)]
    recent = RecentQueries()
    for text, results in zip(texts, results_of_texts, strict=True):
        hits = (
            results.hits
            if selection == "doubt"
            else tuple(replace(hit, match_probability=None) for hit in results)
        )
        assert selection == "edge" or hits[0].match_probability is not None
        recent.add(QueryKey(text), 0, SearchResults(hits))
    return [
        (pair.query.text, pair.result) for pair in recent.most_uncertain(ROUND, lambda *_: False)
    ]


def judgments_of(world: World, selection: str, seed: int, count: int) -> Iterator[Judgment]:
    """The answers to the first ``count`` questions. The queries do not depend on the selection."""
    query_rng = np.random.default_rng([seed, 0])
    selection_rng = np.random.default_rng([seed, 1])
    for _ in range(count // ROUND):
        queries = world.queries(query_rng, ROUND)
        facts_of_text = {text: facts for _, text, facts in queries}
        for text, result in select_results(
            selection, list(facts_of_text), world.found(list(facts_of_text)), selection_rng
        ):
            item = result.item
            yield Judgment(
                "2026-05-01T09:30:00+00:00",
                "study",
                QueryKey(text),
                item.key,
                item.content,
                world.is_relevant(item.key, facts_of_text[text]),
            )


def collection_r10(world: World, run: Path, seed: int) -> float:
    """The share of new queries that find their image among the first ten, in percent. Ties count
    against the model.
    """
    queries = world.queries(np.random.default_rng([seed, 2]), NEW_QUERIES)
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    split = data_module.data.split("train")
    visual, _ = data_module.encode(matcher, split)
    model = Retriever(matcher, data_module.processor)
    row_of_key = {image.name: row for row, image in enumerate(split.images)}
    scores = (
        model.encode_texts([text for _, text, _ in queries]) @ model.to_unit_rows(visual).T
    ).numpy()
    target_scores = scores[np.arange(len(queries)), [row_of_key[key] for key, _, _ in queries]]
    return 100 * float(((scores >= target_scores[:, None]).sum(1) <= 10).mean())


def further(
    world: World, folder: Path, selection: str, seed: int, count: int, options: argparse.Namespace
) -> dict[str, float]:
    """R@10 after continued training, and how many judgments are positive."""
    file = folder / f"{selection}-{count}.jsonl"
    run = folder / f"{selection}-{count}"
    if count and not file.exists():
        write_feedback(file, judgments_of(world, selection, seed, count))
    if not (run / "result.json").exists():
        storage.remove_folder(run)
        settings = {
            **CONTINUED_TRAINING,
            **dict(options.further),
            "start_from": str(world.run),
            "seed": seed + 100,
        }
        visavis.train(
            world.run / "run.toml", out=run, feedback=file if count else None, overrides=settings
        )
    result = storage.read_json(run / "result.json", dict[str, object])
    num_relevant = (
        sum('"relevant": true' in line for line in storage.read_text(file).splitlines())
        if count
        else 0
    )
    return {
        "test": float(str(result["t2i_r10"])),
        "rsum": float(str(result["rsum"])),
        "collection": collection_r10(world, run, seed),
        "fit": num_relevant,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="First seed.")
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 200, 800])
    parser.add_argument("--ways", nargs="+", default=list(SELECTIONS), choices=SELECTIONS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--further",
        nargs="+",
        default=[],
        type=parse_override,
        help="Overrides of the continued training, as key=value.",
    )
    options = parser.parse_args()
    out = storage.create_numbered_folder("runs/feedback") if options.out is None else options.out
    rows: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in range(options.first, options.first + options.seeds):
        folder = out / f"seed-{seed}"
        world = World.make(folder, seed, options.threads)
        for selection, count in [
            ("none", 0),
            *((selection, count) for selection in options.ways for count in options.counts),
        ]:
            rows.setdefault((selection, count), []).append(
                further(world, folder, selection, seed, count, options)
            )
            sys.stderr.write(f"seed {seed}: {selection} {count}: {rows[selection, count][-1]}\n")
    for measure, title in (
        ("test", "R@10 on test images"),
        ("collection", "R@10 on the collection, new queries"),
    ):
        sys.stdout.write(table(rows, measure, title))


def table(rows: dict[tuple[str, int], list[dict[str, float]]], measure: str, title: str) -> str:
    """A metric by number of judgments and by selection, compared with none and with random
    questions.
    """
    values = {key: [row[measure] for row in runs] for key, runs in rows.items()}
    lines = [
        f"| judgments | selection | relevant | {title} | above none | above random |",
        "|---|---|---|---|---|---|",
    ]
    for (selection, count), r10s in values.items():
        spread = f" ± {statistics.stdev(r10s):.1f}" if len(r10s) > 1 else ""
        above = [
            with_interval([a - b for a, b in zip(r10s, values[baseline], strict=True)])
            if baseline in values and baseline != (selection, count)
            else ""
            for baseline in (("none", 0), ("random", count))
        ]
        num_relevant = statistics.mean(row["fit"] for row in rows[selection, count])
        lines.append(
            f"| {count} | {selection} | {num_relevant:.0f} | {statistics.mean(r10s):.1f}{spread} | "
            f"{above[0]} | {above[1]} |"
        )
    return "\n".join([*lines, "", ""])


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"feedback: {error}")
