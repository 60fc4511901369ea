"""Replay a folder of golden files: known inputs and expected outputs of objectives, models and
metrics.

    python tools/golden.py GOLDEN [--out FILE.npz]

GOLDEN contains pairs of files, ``losses_manifest.json`` and ``losses.npz`` and so on. A pair may be
missing. An entry is dispatched by its objective, variant and parameters, never by its name or case.
All computed arrays go to FILE under the names the manifest gives its outputs. Entries that cannot
be replayed are listed with the reason. The last line is ``replayed N of M, K mismatches``, and the
exit code is 1 if K is not 0.

A new objective is one row of golden_losses.OBJECTIVES, a new metric one function in METRICS, a new
model one branch of golden_models.replay.
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

from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.evaluation import Evaluation, Protocol, rank_scores
from visavis.evaluation.metrics import (
    average_precision_at_r,
    best_ranks,
    coherent_scores,
    positive_ranks,
    r_precision,
    recall_at,
    recall_at_mean_ties,
)
from visavis.losses.targets import Targets

# Needed if this file is loaded by its path.
sys.path.insert(0, str(Path(__file__).resolve().parent))
import golden_analysis
import golden_losses
import golden_models
from golden_losses import ids

Arrays = dict[str, np.ndarray]
MANIFESTS = ("losses", "metrics", "analysis", "models")
# From this sharpness (gamma, 1 / tau, logit scale), results are less precise.
LOOSE_FROM = 1e3
# Suffix of analysis entries whose expected values were printed in float32.
FLOAT32_PRINTS = "_reference_code"


class NotReplayed(Exception):
    """The reason why an entry is left out."""


def replay_loss(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    if not (outputs := golden_losses.replay(entry, inputs)):
        raise NotReplayed("visavis has no such objective")
    return outputs


def similarity(inputs: Arrays) -> Tensor:
    return torch.tensor(inputs["sim"] if "sim" in inputs else inputs["img"] @ inputs["txt"].T)


def table(result: Evaluation, direction: str) -> list[float]:
    return [result.metrics[f"{direction}_{name}"] for name in ("r1", "r5", "r10", "medr", "meanr")]


def recall_and_ranks(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    scores = similarity(inputs)
    results = {
        ties: rank_scores(scores, *ids(*scores.shape), ties=ties)
        for ties in ("optimistic", "pessimistic")
    }
    outputs: Arrays = {}
    for ties, result in results.items():
        outputs |= {
            f"rank_i2t_{ties}": result.image_ranks - 1.0,
            f"rank_t2i_{ties}": result.text_ranks - 1.0,
        }
    if entry.get("ties"):  # the order of an argsort is not defined for ties
        return outputs
    result = results["pessimistic"]
    return outputs | {
        "ref_ranks_i2t": outputs["rank_i2t_pessimistic"],
        "ref_ranks_t2i": outputs["rank_t2i_pessimistic"],
        "ref_i2t_r1_r5_r10_medr_meanr": np.array(table(result, "i2t")),
        "ref_t2i_r1_r5_r10_medr_meanr": np.array(table(result, "t2i")),
        "rsum": np.array(result.metrics["rsum"]),
        "ref_map5_map10_hits_normalised": np.array(
            [result.metrics[f"i2t_map_at_{k}_hits"] for k in (5, 10)]
        ),
        "standard_map5_map10_min_R_K_normalised": np.array(
            [result.metrics[f"i2t_map_at_{k}"] for k in (5, 10)]
        ),
    }


def five_fold(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    scores = similarity(inputs)
    images, texts = ids(*scores.shape)
    number = entry["params"].get("folds", 5)
    folds = Protocol(name="folds", description="consecutive folds", folds=number)
    fold_results = [
        rank_scores(scores[i][:, t], images[i], texts[t])
        for i, t in folds.split_folds(images, texts)
    ]
    rows = [
        [*table(result, "i2t"), *table(result, "t2i"), result.metrics["rsum"]]
        for result in (*fold_results, rank_scores(scores, images, texts, protocol=folds))
    ]
    return {"per_fold": np.array(rows[:-1]), "mean": np.array(rows[-1])}


def video_text(_entry: dict[str, Any], inputs: Arrays) -> Arrays:
    """Ranks as the mean over tied positions. The rank of a video is the minimum over its captions,
    each ranked against all others.
    """
    by_text = torch.tensor(inputs["sim"])
    videos, texts = ids(by_text.shape[1], by_text.shape[0])
    caption_ranks = best_ranks(by_text.T[texts], Targets.paired(len(texts)), ties="mean")
    ranks = {
        "t2v": best_ranks(by_text, Targets(query_ids=texts, candidate_ids=videos), ties="mean"),
        "v2t": caption_ranks.view(len(videos), -1).amin(1),
    }
    outputs: dict[str, float] = {}
    for direction, rank in ranks.items():
        recalls = {k: 100 * recall_at_mean_ties(rank, k) for k in (1, 5, 10, 50)}
        outputs |= {f"{direction}_R{k}": recall for k, recall in recalls.items()}
        outputs |= {
            f"{direction}_MedR": rank.quantile(0.5).item(),
            f"{direction}_MeanR": rank.mean().item(),
        }
        outputs[f"{direction}_geometric_mean_R1-R5-R10"] = (
            recalls[1] * recalls[5] * recalls[10]
        ) ** (1 / 3)
    return {name: np.array(value) for name, value in outputs.items()}


def eccv_caption(_entry: dict[str, Any], inputs: Arrays) -> Arrays:
    scores = similarity(inputs)
    query, candidate = torch.tensor(inputs["positives"]).nonzero(as_tuple=True)
    ranks = positive_ranks(scores, Targets.from_pairs(query, candidate, *scores.shape))
    outputs = {
        "map_at_r": average_precision_at_r(ranks).mean().item(),
        "rprecision": r_precision(ranks).mean().item(),
    }
    return {name: np.array(value) for name, value in outputs.items()} | {
        f"r{k}": np.array(recall_at(ranks[:, 0], k)) for k in (1, 5, 10)
    }


def coherent_score(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    scores = similarity(inputs)
    relevance = torch.tensor(inputs["rel"])
    outputs: Arrays = {}
    for k in entry["params"]["K"]:
        for direction, score in (("i2t", scores), ("t2i", scores.T)):
            name = f"cs{k}_{direction}"
            per_query = coherent_scores(score, relevance, k=k, semantics="reference").numpy()
            outputs |= {f"{name}_per_query": per_query, f"{name}_mean": per_query.mean()}
            outputs[f"{name}_per_query_tau_a"] = coherent_scores(
                score, relevance, k=k, tau="a", semantics="reference"
            ).numpy()
    return outputs


METRICS = {
    function.__name__: function
    for function in (recall_and_ranks, five_fold, video_text, eccv_caption, coherent_score)
}


def replay_metric(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    if entry["metric"] not in METRICS:
        raise NotReplayed("visavis has no such metric")
    return METRICS[entry["metric"]](entry, inputs)


def replay_analysis(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    if not (outputs := golden_analysis.replay(entry, inputs)):
        raise NotReplayed("visavis has no such analysis")
    return outputs


def replay_model(entry: dict[str, Any], inputs: Arrays) -> Arrays:
    if not (outputs := golden_models.replay(entry, inputs)):
        raise NotReplayed("visavis has no such model")
    return outputs


REPLAYS = {
    "losses": replay_loss,
    "metrics": replay_metric,
    "analysis": replay_analysis,
    "models": replay_model,
}


def compute_outputs(
    manifest: str, entry: dict[str, Any], arrays: Mapping[str, np.ndarray]
) -> Arrays:
    """Compute the outputs of an entry. Raises NotReplayed if visavis has none of them."""
    array_names = entry["inputs"] | {
        f"{golden_models.WEIGHTS}{name}": key for name, key in entry.get("state", {}).items()
    }
    outputs = REPLAYS[manifest](entry, {name: arrays[key] for name, key in array_names.items()})
    if entry.get("outputs") and not entry["outputs"].keys() & outputs.keys():
        raise NotReplayed("visavis computes none of its outputs")
    return outputs


def sharpness(params: dict[str, Any]) -> float:
    """The largest of gamma, 1 / tau and logit scale."""
    direct = [params.get(name, 0) for name in ("gamma", "logit_scale")]
    return max(*direct, *(1 / params[name] for name in ("tau", "temp") if params.get(name)), 0)


def mismatches(entry: dict[str, Any], computed: Arrays, expected: Arrays) -> list[str]:
    """The outputs of an entry that differ from the expected ones."""
    if entry.get("reference_raises"):
        return [name for name, value in computed.items() if not np.isfinite(value).all()]
    if not entry.get("gradient_defined", True):
        computed = {name: value for name, value in computed.items() if not name.startswith("grad_")}
    rtol = 1e-7 if sharpness(entry.get("params", {})) >= LOOSE_FROM else 1e-9
    rtol = 1e-6 if str(entry.get("objective")).endswith(FLOAT32_PRINTS) else rtol
    return [
        name
        for name, value in computed.items()
        if name in expected
        and (
            np.shape(value) != expected[name].shape
            or not np.allclose(value, expected[name], rtol=rtol, atol=1e-11, equal_nan=True)
        )
    ]


def describe(manifest: str, entry: dict[str, Any]) -> str:
    subject = entry.get("objective") or entry.get("metric") or entry.get("name")
    return " ".join(
        str(word)
        for word in (manifest, entry.get("case", ""), subject, entry.get("variant", ""))
        if word
    )


def replay(folder: Path) -> tuple[Arrays, list[str], tuple[int, int, int]]:
    """Return all computed arrays, lines to print, and the numbers of replayed, existing and
    mismatching entries.
    """
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
                    outputs = compute_outputs(manifest, entry, arrays)
                except (NotReplayed, VisavisError, KeyError) as reason:
                    cause = f"it has no {reason}" if isinstance(reason, KeyError) else str(reason)
                    lines.append(f"not replayed: {describe(manifest, entry)}: {cause}")
                    continue
                output_keys = entry.get("outputs", {})
                mismatched = mismatches(
                    entry,
                    outputs,
                    {name: arrays[key] for name, key in output_keys.items() if key in arrays},
                )
                computed |= {
                    key: np.asarray(outputs[name])
                    for name, key in output_keys.items()
                    if name in outputs
                }
                lines += [
                    f"left out: {describe(manifest, entry)}: {name}"
                    for name in output_keys
                    if name not in outputs
                ]
                lines += (
                    [f"MISMATCH: {describe(manifest, entry)}: {', '.join(mismatched)}"]
                    if mismatched
                    else []
                )
                replayed += 1
                wrong += bool(mismatched)
    return computed, lines, (replayed, total, wrong)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("golden", type=Path, help="a folder of manifests and npz files")
    parser.add_argument("--out", type=Path, help="an npz file for every computed array")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if not any(options.golden.glob("*_manifest.json")):
        parser.error(
            f"{options.golden}: expected a folder with *_manifest.json, got none. Pass a folder of "
            "golden files."
        )
    computed, lines, (replayed, total, wrong) = replay(options.golden)
    if options.out:
        with storage.atomic_file(options.out) as part, open(part, "wb") as file:
            np.savez(file, **computed)  # type: ignore[arg-type]
    sys.stdout.write(
        "\n".join([*lines, f"replayed {replayed} of {total}, {wrong} mismatches"]) + "\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
