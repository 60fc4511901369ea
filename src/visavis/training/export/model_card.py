"""Model card of an exported folder: data, protocol, metrics, objective and code that loads the
model without visavis.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from visavis.core import storage
from visavis.core.environment import installed_version
from visavis.core.own_code import CodeNotNamed
from visavis.core.spec import parse
from visavis.evaluation.statistics import spread_over_seeds
from visavis.losses.objectives import CATALOG, Objective
from visavis.models.clip.model import CLIP
from visavis.models.embedding_model import EmbeddingModel
from visavis.models.retriever import Retriever
from visavis.training.export.graph_code import template
from visavis.training.runs.run_folder import RunFolder

METRIC_LABELS = {
    "rsum": "RSUM",
    "i2t_r1": "R@1, image to text",
    "i2t_r5": "R@5, image to text",
    "i2t_r10": "R@10, image to text",
    "t2i_r1": "R@1, text to image",
    "t2i_r5": "R@5, text to image",
    "t2i_r10": "R@10, text to image",
}
"""Metrics of a card by their key in ``result.json``."""


def write_model_card(
    model: Retriever,
    run: Path,
    format: str,  # noqa: A002 - the name of the option
    folder: Path,
    embedding_dim: int,
    formula: Callable[[Objective], str],
    license: str,  # noqa: A002 - the name of the option
) -> None:
    """Write ``README.md``."""
    from jinja2 import Environment, StrictUndefined

    files = RunFolder(run)
    processor = model.processor
    matcher = model.matcher
    result = storage.read_json(files.result, dict[str, Any]) if os.path.isfile(files.result) else {}
    recipe = storage.read_toml(files.recipe) if os.path.isfile(files.recipe) else {}
    is_clip = isinstance(matcher, CLIP)
    objective = result.get("objective")
    intervals = _intervals(run)
    text_encoder = (
        processor.text.name
        if processor.text
        else processor.tokenizer or "word embeddings trained with the model"
    )
    # Of the scores in training: their factor, and the number added to them.
    logits = matcher.pretrained_logits
    if matcher.scale is not None:
        logits |= {"scale": float(matcher.scale.log.detach().exp())}
    if matcher.logit_bias is not None:
        logits |= {"bias": matcher.logit_bias.item()}
    # A name as on the hub stays. JSON is also YAML.
    yaml_license = license or "unknown"
    is_name = re.fullmatch("[a-z][a-z0-9.-]{2,}", yaml_license)
    if not is_name or yaml_license in ("yes", "off", "true", "false", "null"):
        yaml_license = json.dumps(yaml_license, ensure_ascii=False)
    environment = Environment(
        keep_trailing_newline=True, lstrip_blocks=True, trim_blocks=True, undefined=StrictUndefined
    )
    objective_formula = ""
    with suppress(CodeNotNamed):  # a stored text never runs own code
        if objective:
            objective_formula = formula(parse(objective, CATALOG, Objective, "objectives"))
    card = environment.from_string(template("model_card.md.j2")).render(
        title=Path(run).name or matcher.name,
        format=format,
        library="sentence-transformers"
        if format == "sentence-transformers"
        else "transformers"
        if is_clip and format == "hub"
        else "onnx",
        license=license,
        yaml_license=yaml_license,
        needs_code=not isinstance(matcher, CLIP | EmbeddingModel),
        has_instructions=isinstance(matcher, EmbeddingModel),
        matcher=matcher,
        tokenizer=processor.pretrained_tokenizer,
        embedding_dim=embedding_dim,
        version=installed_version("visavis"),
        data=os.path.basename(str(recipe.get("data", {}).get("path", "")).rstrip("/")),
        objective=objective,
        formula=objective_formula.replace("$", "`"),
        architecture=json.dumps(dict(vars(matcher.config)), default=str),
        result=result,
        metrics=[
            (label, result[key], intervals.get(key))
            for key, label in METRIC_LABELS.items()
            if key in result
        ],
        scale=logits.get("scale"),
        bias=logits.get("bias"),
        image_encoder=os.path.basename(processor.visual.name) if processor.visual else "none",
        text_encoder=os.path.basename(text_encoder),
    )
    storage.write_text(folder / "README.md", card)


def _intervals(run: Path) -> dict[str, str]:
    """Return mean and interval of each metric over the seeds of the run's setting in its
    comparison.
    """
    folder = os.path.realpath(run)
    candidates = (parent / "comparison.json" for parent in list(Path(folder).parents)[:3])
    file = next(filter(os.path.isfile, candidates), None)
    if file is None:
        return {}
    compared = [
        entry for entry in storage.read_json(file, dict[str, Any])["runs"] if entry["metrics"]
    ]
    setting = next(
        (entry["setting"] for entry in compared if os.path.realpath(entry["folder"]) == folder),
        None,
    )
    seeds = [entry["metrics"] for entry in compared if entry["setting"] == setting]
    intervals: dict[str, str] = {}
    if len(seeds) < 2:
        return intervals
    for key in METRIC_LABELS:
        values = [metrics[key] for metrics in seeds if metrics.get(key) is not None]
        if values and (interval := spread_over_seeds(values)) is not None:
            intervals[key] = (
                f"{statistics.fmean(values):.1f} ({interval.low:.1f} to {interval.high:.1f}, "
                f"{len(values)} seeds)"
            )
    return intervals
