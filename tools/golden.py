"""Replay a folder of golden files: known inputs and expected outputs of objectives, models and metrics.

    python tools/golden.py GOLDEN [--out FILE.npz]

GOLDEN holds pairs of ``<what>_manifest.json`` and ``<what>.npz``. Each may be absent. An entry is dispatched by its
objective, variant and parameters, never by its name or case. All computed arrays go to FILE under the names the
manifest gives its outputs. Entries that are not replayed are listed with the reason. The last line is
``replayed N of M, K mismatches``, and the exit code is 1 if K is not 0.

A new objective is one row of golden_losses.OBJECTIVES, a new metric one function in METRICS, a new model one branch of
golden_models.replay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.errors import VisavisError
from visavis.evaluation import Evaluation, Protocol, rank_scores
from visavis.metrics import average_precision_at_r, best_ranks, coherent_scores, positive_ranks, r_precision, recall_at, recall_at_mean_ties
from visavis.targets import Targets

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for when this file is loaded by its path
import golden_analysis
import golden_losses
import golden_models
from golden_losses import ids

Arrays = dict[str, np.ndarray]
MANIFESTS = ("losses", "metrics", "analysis", "models")
LOOSE_FROM = 1e3  # a sharpness (gamma, 1 / tau, logit scale) that costs digits
FLOAT32_PRINTS = "_reference_code"  # the ending of analysis entries whose answers were printed in float32


class NotReplayed(Exception):
    """The reason why an entry is left out."""


def replay_loss(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    if not (found := golden_losses.replay(entry, inputs)):
        raise NotReplayed("no such objective here")
    return found


def similarity(inputs: Arrays) -> Tensor:
    return torch.tensor(inputs["sim"] if "sim" in inputs else inputs["img"] @ inputs["txt"].T)


def table(result: Evaluation, direction: str) -> list[float]:
    return [result.metrics[f"{direction}_{name}"] for name in ("r1", "r5", "r10", "medr", "meanr")]


def recall_and_ranks(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    scores = similarity(inputs)
    results = {ties: rank_scores(scores, *ids(*scores.shape), ties=ties) for ties in ("optimistic", "pessimistic")}
    found: Arrays = {}
    for ties, result in results.items():
        found |= {f"rank_i2t_{ties}": result.image_ranks - 1.0, f"rank_t2i_{ties}": result.text_ranks - 1.0}
    if entry.get("ties"):  # the order of an argsort is not defined for ties
        return found
    result = results["pessimistic"]
    return found | {
        "ref_ranks_i2t": found["rank_i2t_pessimistic"],
        "ref_ranks_t2i": found["rank_t2i_pessimistic"],
        "ref_i2t_r1_r5_r10_medr_meanr": np.array(table(result, "i2t")),
        "ref_t2i_r1_r5_r10_medr_meanr": np.array(table(result, "t2i")),
        "rsum": np.array(result.metrics["rsum"]),
        "ref_map5_map10_hits_normalised": np.array([result.metrics[f"i2t_map_at_{k}_hits"] for k in (5, 10)]),
        "standard_map5_map10_min_R_K_normalised": np.array([result.metrics[f"i2t_map_at_{k}"] for k in (5, 10)]),
    }


def five_fold(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    scores = similarity(inputs)
    images, texts = ids(*scores.shape)
    number = entry["params"].get("folds", 5)
    folds = Protocol(name="folds", description="consecutive folds", folds=number)
    one = [rank_scores(scores[i][:, t], images[i], texts[t]) for i, t in folds.split_folds(images, texts)]
    rows = [
        [*table(result, "i2t"), *table(result, "t2i"), result.metrics["rsum"]]
        for result in (*one, rank_scores(scores, images, texts, protocol=folds))
    ]
    return {"per_fold": np.array(rows[:-1]), "mean": np.array(rows[-1])}


def video_text(_entry: dict[str, Any], inputs: Arrays) -> Arrays:
    """Ranks as the mean over tied positions. The rank of a video is the minimum over its captions, each ranked against all others."""
    by_text = torch.tensor(inputs["sim"])
    videos, texts = ids(by_text.shape[1], by_text.shape[0])
    of_captions = best_ranks(by_text.T[texts], Targets.paired(len(texts)), ties="mean")
    found = {
        "t2v": best_ranks(by_text, Targets(query_ids=texts, candidate_ids=videos), ties="mean"),
        "v2t": of_captions.view(len(videos), -1).amin(1),
    }
    answers: dict[str, float] = {}
    for direction, rank in found.items():
        recalls = {k: 100 * recall_at_mean_ties(rank, k) for k in (1, 5, 10, 50)}
        answers |= {f"{direction}_R{k}": recall for k, recall in recalls.items()}
        answers |= {f"{direction}_MedR": rank.quantile(0.5).item(), f"{direction}_MeanR": rank.mean().item()}
        answers[f"{direction}_geometric_mean_R1-R5-R10"] = (recalls[1] * recalls[5] * recalls[10]) ** (1 / 3)
    return {name: np.array(value) for name, value in answers.items()}


def eccv_caption(_entry: dict[str, Any], inputs: Arrays) -> Arrays:
    scores = similarity(inputs)
    query, candidate = torch.tensor(inputs["positives"]).nonzero(as_tuple=True)
    found = positive_ranks(scores, Targets.from_pairs(query, candidate, *scores.shape))
    answers = {"map_at_r": average_precision_at_r(found).mean().item(), "rprecision": r_precision(found).mean().item()}
    return {name: np.array(value) for name, value in answers.items()} | {f"r{k}": np.array(recall_at(found[:, 0], k)) for k in (1, 5, 10)}


def coherent_score(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    scores, relevance = similarity(inputs), torch.tensor(inputs["rel"])
    answers: Arrays = {}
    for k in entry["params"]["K"]:
        for direction, score in (("i2t", scores), ("t2i", scores.T)):
            name = f"cs{k}_{direction}"
            per_query = coherent_scores(score, relevance, k=k, semantics="reference").numpy()
            answers |= {f"{name}_per_query": per_query, f"{name}_mean": per_query.mean()}
            answers[f"{name}_per_query_tau_a"] = coherent_scores(score, relevance, k=k, tau="a", semantics="reference").numpy()
    return answers


METRICS = {function.__name__: function for function in (recall_and_ranks, five_fold, video_text, eccv_caption, coherent_score)}


def replay_metric(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    if entry["metric"] not in METRICS:
        raise NotReplayed("no such metric here")
    return METRICS[entry["metric"]](entry, inputs)


def replay_analysis(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    if not (found := golden_analysis.replay(entry, inputs)):
        raise NotReplayed("no such analysis here")
    return found


def replay_model(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    if not (found := golden_models.replay(entry, inputs)):
        raise NotReplayed("no such model here")
    return found


REPLAYS = {"losses": replay_loss, "metrics": replay_metric, "analysis": replay_analysis, "models": replay_model}


def answers(manifest: str, entry: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Arrays:
    """What is computed here for an entry. Raises NotReplayed where that is nothing."""
    given = entry["inputs"] | {f"{golden_models.WEIGHTS}{name}": key for name, key in entry.get("state", {}).items()}
    found = REPLAYS[manifest](entry, {name: arrays[key] for name, key in given.items()})
    if entry.get("outputs") and not entry["outputs"].keys() & found.keys():
        raise NotReplayed("none of its outputs is computed here")
    return found


def sharpness(params: dict[str, Any]) -> float:
    """The largest of gamma, 1 / tau and logit scale."""
    direct = [params.get(name, 0) for name in ("gamma", "logit_scale")]
    return max(*direct, *(1 / params[name] for name in ("tau", "temp") if params.get(name)), 0)


def mismatches(entry: dict[str, Any], found: Arrays, expected: Arrays) -> list[str]:
    """The outputs of an entry that differ from the expected ones."""
    if entry.get("reference_raises"):
        return [name for name, value in found.items() if not np.isfinite(value).all()]
    if not entry.get("gradient_defined", True):
        found = {name: value for name, value in found.items() if not name.startswith("grad_")}
    rtol = 1e-7 if sharpness(entry.get("params", {})) >= LOOSE_FROM else 1e-9
    rtol = 1e-6 if str(entry.get("objective")).endswith(FLOAT32_PRINTS) else rtol
    return [
        name
        for name, value in found.items()
        if name in expected
        and (np.shape(value) != expected[name].shape or not np.allclose(value, expected[name], rtol=rtol, atol=1e-11, equal_nan=True))
    ]


def describe(manifest: str, entry: dict[str, Any]) -> str:
    what = entry.get("objective") or entry.get("metric") or entry.get("name")
    return " ".join(str(word) for word in (manifest, entry.get("case", ""), what, entry.get("variant", "")) if word)


def replay(folder: Path) -> tuple[Arrays, list[str], tuple[int, int, int]]:
    """Return all computed arrays, lines to print, and the numbers of replayed, existing and mismatching entries."""
    computed: Arrays = {}
    lines: list[str] = []
    replayed = total = wrong = 0
    for manifest in MANIFESTS:
        if not (folder / f"{manifest}_manifest.json").exists():
            continue
        entries = storage.read_json(folder / f"{manifest}_manifest.json")["entries"]
        total += len(entries)
        with np.load(folder / f"{manifest}.npz", allow_pickle=False) as arrays:
            for entry in entries:
                try:
                    found = answers(manifest, entry, arrays)
                except (NotReplayed, VisavisError, KeyError) as reason:
                    what = f"it has no {reason}" if isinstance(reason, KeyError) else str(reason)
                    lines.append(f"not replayed: {describe(manifest, entry)}: {what}")
                    continue
                outputs = entry.get("outputs", {})
                bad = mismatches(entry, found, {name: arrays[key] for name, key in outputs.items() if key in arrays})
                computed |= {key: np.asarray(found[name]) for name, key in outputs.items() if name in found}
                lines += [f"left out: {describe(manifest, entry)}: {name}" for name in outputs if name not in found]
                lines += [f"MISMATCH: {describe(manifest, entry)}: {', '.join(bad)}"] if bad else []
                replayed += 1
                wrong += bool(bad)
    return computed, lines, (replayed, total, wrong)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("golden", type=Path, help="a folder of manifests and npz files")
    parser.add_argument("--out", type=Path, help="an npz file for every computed array")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if not any(given.golden.glob("*_manifest.json")):
        parser.error(f"{given.golden} holds no *_manifest.json: name a folder of golden files.")
    computed, lines, (replayed, total, wrong) = replay(given.golden)
    if given.out:
        with storage.atomic_file(given.out) as part, open(part, "wb") as file:
            np.savez(file, **computed)  # type: ignore[arg-type]
    sys.stdout.write("\n".join([*lines, f"replayed {replayed} of {total}, {wrong} mismatches"]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
