"""A comparison from its settings to its result, begun anew or gone on with.

Its folder: ``plan.json`` (the recipe and the settings), ``judgements.jsonl`` (what people judged, where it is another test), ``runs/`` with a
folder for each run, and what came out: ``comparison.json``, ``table.md``, ``table.csv`` and ``table.tex``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.comparison.jobs import Job, Outcome, check_models, known_outcome, with_judged
from visavis.comparison.race import Clock, everything, rounds
from visavis.comparison.result import Comparison
from visavis.comparison.settings import Choices, Setting, settings_of
from visavis.comparison.workers import Work, Workers
from visavis.errors import RecipeError, RunError
from visavis.evaluation.judged import JudgedTest
from visavis.progress import Progress
from visavis.runs.folder import with_whole_paths
from visavis.runs.judged import read_judged_test
from visavis.spec import whole_number
from visavis.training.data_module import prepare
from visavis.training.recipe import Recipe, build_recipe
from visavis.training.stopping import Stopped


@dataclass(frozen=True)
class Plan:
    """What is compared. name: of the recipe. seeds: of each setting, 1, 2, ... race: whether settings drop out on the way."""

    name: str
    settings: tuple[Setting, ...]
    seeds: int
    race: bool = False

    def content(self, setting: Setting, seed: int) -> dict[str, Any]:
        """The recipe of one run."""
        threads = setting.content["training"]["threads"] or 1  # one each: numbers do not depend on how many runs go beside one another
        return build_recipe(setting.content, {"seed": seed, "training.threads": threads}, setting.name).to_dict()


def plan_of(recipe: Recipe, given: Choices, seeds: int, *, race: bool) -> Plan:
    """The plan of a comparison on one recipe. Raises RecipeError, SpecError."""
    if recipe.members:
        raise RecipeError(f"{recipe.name} is an ensemble of {', '.join(recipe.members)}: compare recipes of one model.")
    return Plan(recipe.name, settings_of(with_whole_paths(recipe), *given), whole_number(seeds, "seeds", 1), race)


def begin_comparison(
    plan: Plan, out: Path | None, workers: Workers, progress: Progress, *, judgements: Path | None, budget_s: float | None
) -> Comparison:
    """A comparison in a new folder, ``runs/compare-<n>`` without ``out``. judgements: a file of them, which the folder keeps a copy of."""
    judged = None if judgements is None else _judged_test(plan, judgements, progress)
    with begun(plan, out, "compare", progress) as folder:
        if judgements is not None:
            storage.write_bytes(_judgements(folder), storage.read_bytes(judgements))
        return _go_on(folder, plan, workers, progress, judged, budget_s)


@contextmanager
def begun(plan: Plan, out: Path | None, stem: str, progress: Progress) -> Iterator[Path]:
    """A new folder with a plan, whose data are there and whose features are computed."""
    cache_inputs(plan, progress)
    with storage.begun_folder(out, Path("runs") / stem) as folder:
        storage.write_json(_file(folder), asdict(plan))
        yield folder


def read_plan(folder: Path, seeds: int | None, *, race: bool, made_by: str) -> Plan:
    """The plan of a folder, now with so many seeds. Raises RunError if there is none, or for fewer seeds than it has."""
    if not _file(folder).exists():
        raise RunError(f"{folder} is no comparison: expected {_file(folder).name} in it, as visavis {made_by} writes it.")
    plan: Plan = storage.read_json(_file(folder), Plan, error=RunError)
    if seeds is not None and seeds < plan.seeds:
        raise RunError(f"{folder} has {plan.seeds} seeds, which cannot become {seeds}: give --seeds {plan.seeds} or more.")
    more = replace(plan, seeds=seeds or plan.seeds, race=plan.race or race)
    if more != plan:
        storage.write_json(_file(folder), asdict(more))
    return more


def continue_comparison(
    folder: Path, seeds: int | None, workers: Workers, progress: Progress, *, judgements: Path | None, budget_s: float | None
) -> Comparison:
    """Go on with a comparison, with more seeds if so many are asked for, and with other judgements than it has, if any are given.

    Raises RunError if the folder is none, and for finished runs that are to be asked what people judged and have no model any more.
    """
    plan = read_plan(folder, seeds, race=budget_s is not None, made_by="compare")
    cache_inputs(plan, progress)
    file, judged = judgements or _judgements(folder), None
    if file.exists() or judgements is not None:
        judged = _judged_test(plan, file, progress)
        known = [known_outcome(job) for job in _jobs(folder, plan).values()]
        check_models(outcome for outcome in known if outcome is not None and not outcome.answers(judged))
        _keep_judgements(folder, storage.read_bytes(file), progress)
    return _go_on(folder, plan, workers, progress, judged, budget_s)


def _keep_judgements(folder: Path, judgements: bytes, progress: Progress) -> None:
    """The folder's copy of a file of judgements; where it takes the place of other ones, that is said."""
    kept = _judgements(folder)
    if kept.exists() and (before := storage.read_bytes(kept)) != judgements:
        lines = f"{len(before.splitlines()):,} lines before, {len(judgements.splitlines()):,} now"
        progress.say(f"{kept} is replaced by the judgements given: {lines}.")
    storage.write_bytes(kept, judgements)


def _judged_test(plan: Plan, file: Path, progress: Progress) -> JudgedTest:
    """What a file of judgements says of the test split, said in a sentence. Raises DataError, RecipeError."""
    for setting in plan.settings:
        if setting.content["text"]["features"]:
            raise RecipeError(
                f"{setting.name} reads stored features of the captions of the data alone, and judgements bring sentences of their own: name "
                "text.tower, or compare without --judgements."
            )
    setting = plan.settings[0]
    judged = read_judged_test(file, build_recipe(plan.content(setting, 1), {}, setting.name), progress)
    progress.say(f"{file}: {judged}")
    return judged


def _go_on(folder: Path, plan: Plan, workers: Workers, progress: Progress, judged: JudgedTest | None, budget_s: float | None) -> Comparison:
    outcomes = make_runs(folder, plan, workers, progress, budget_s)
    if judged is not None:
        for number, outcome in enumerate(outcomes):
            progress.work("judged sentences", number, len(outcomes), 0)
            outcomes[number] = with_judged(outcome, judged)
    comparison = Comparison.of(folder, plan.name, plan.settings, outcomes, judged)
    storage.write_json(folder / "comparison.json", comparison.to_json())
    for name, text in (("table.md", comparison.markdown()), ("table.csv", comparison.csv()), ("table.tex", comparison.latex())):
        storage.write_text(folder / name, text)
    return comparison


def make_runs(folder: Path, plan: Plan, workers: Workers, progress: Progress, budget_s: float | None = None) -> list[Outcome]:
    """The outcomes of all runs of a plan, those that are missing made. Raises Stopped once all that ran is saved."""
    jobs = _jobs(folder, plan)
    done = {key: outcome for key, job in jobs.items() if (outcome := known_outcome(job)) is not None}
    clock = Clock(budget_s)
    threads = max(job.content["training"]["threads"] for job in jobs.values())
    order = rounds(plan.settings, plan.seeds, lambda: list(done.values())) if plan.race else [everything(plan.settings, plan.seeds)]
    with storage.alone(_file(folder), wait=False):
        try:
            with workers.at_work(threads, progress) as work:
                for runs in order:
                    wanted = [(setting, seed) for setting, seed in runs if (setting.name, seed) not in done]
                    now = clock.fitting(wanted)
                    _do(work, [jobs[setting.name, seed] for setting, seed in now], done, clock, len(jobs), progress)
                    if len(now) < len(wanted):
                        progress.say(
                            f"the time is over after {clock.elapsed:.0f} s: {len(wanted) - len(now)} runs of this round are left out."
                        )
                        break
        except Stopped as stopped:
            raise Stopped(str(folder), stopped.by) from None
    return list(done.values())


def _do(work: Work, jobs: Sequence[Job], done: dict[tuple[str, int], Outcome], clock: Clock, total: int, progress: Progress) -> None:
    """Do jobs and note their outcomes."""
    for outcome in work(jobs):
        done[outcome.setting, outcome.seed] = outcome
        clock.runs += 1
        told = outcome.failure or f"validation RSUM {outcome.validation_rsum:.1f}  ({outcome.seconds:.0f} s)"
        progress.say(f"{outcome.setting}, seed {outcome.seed}: {told}")
        progress.work("runs", len(done), total, clock.runs / clock.elapsed)


def _jobs(folder: Path, plan: Plan) -> dict[tuple[str, int], Job]:
    """Of all runs of a plan, by setting and seed."""
    return {
        (setting.name, seed): _job(folder, plan, place, seed)
        for seed in range(1, plan.seeds + 1)
        for place, setting in enumerate(plan.settings)
    }


def _job(folder: Path, plan: Plan, number: int, seed: int) -> Job:
    setting = plan.settings[number]
    name = f"{number + 1:02d}-{setting.short}-seed-{seed}"
    return Job(setting.name, seed, plan.content(setting, seed), (folder / "runs" / name).absolute())


def cache_inputs(plan: Plan, progress: Progress) -> None:
    """Open the data and compute the features of all settings, once, before any run. Raises RecipeError or DataError."""
    read = set[str]()
    for setting in plan.settings:
        content = plan.content(setting, 1)
        inputs = repr([content[section] for section in ("data", "visual", "text", "model", "evaluation")])
        if inputs not in read:
            read.add(inputs)
            data_module, _ = prepare(build_recipe(content, {}, setting.name), progress)
            if (name := data_module.recipe.evaluation.test) not in data_module.data.splits:
                raise RecipeError(
                    f"{data_module.data.name} has no split {name}: a comparison chooses by validation and tells what the test says; name another by "
                    "evaluation.test=NAME."
                )


def _file(folder: Path) -> Path:
    return folder / "plan.json"


def _judgements(folder: Path) -> Path:
    return folder / "judgements.jsonl"
