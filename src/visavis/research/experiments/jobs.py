"""Runs of an experiment: each is trained in its own folder, resumed where it was stopped, and never
trained twice.

The runs are made by this process, by several processes, or by a Ray cluster. The results are the
same, because each run uses the number of threads in its recipe.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import connection, get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeAlias

import torch

from visavis.core import storage
from visavis.core.child_processes import current_folder_excluded
from visavis.core.errors import RunError, StorageError, VisavisError
from visavis.core.fields import validate_int
from visavis.core.progress import NoProgress, Progress
from visavis.core.run_context import RunContext
from visavis.data.parallel import Engine, connect_to_ray, cpu_cores
from visavis.data.workers import STOP_SIGNALS, start_resource_tracker
from visavis.evaluation.feedback_metrics import JudgedQueryResult, feedback_metrics
from visavis.models.batch_encoding import device_of
from visavis.models.inference import ScoreEnsemble, score_all_pairs
from visavis.models.retriever import Retriever
from visavis.research.experiments.feedback_test import FeedbackTest
from visavis.research.experiments.setting_results import MeasurementConditions
from visavis.training.recipes.recipe import build_recipe
from visavis.training.runs.open_run import open_peer_network, open_run, read_run_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped, StopRequest
from visavis.training.training_run import TrainingResult, resolve, resume_training, start_subfolder

POLL_SECONDS = 0.3
MAX_RUNS = 1000
"""Maximum number of seeds of a setting, and of runs at the same time."""
OUTCOME_FILE = "outcome.json"
"""File of a finished run in its folder."""
LOST_WORKER = (
    "workers: a process was killed, perhaps because memory ran out. Resume with fewer workers."
)


_stopping = Event()  # set in a worker that was asked to end


@dataclass(frozen=True)
class Job:
    """Run to be made.

    Attributes:
        setting: Name of its setting.
        seed: Seed.
        recipe_values: Plain values of its recipe.
        folder: Folder of the run, two levels below the folder of the experiment.
        keeps_model: Whether the run is kept. Otherwise only its validation RSUM is, and its recipe
            has no test split.
    """

    setting: str
    seed: int
    recipe_values: dict[str, Any]
    folder: Path
    keeps_model: bool = True


@dataclass(frozen=True)
class FeedbackAnswers:
    """Results of a run on judged text queries.

    Attributes:
        test_fingerprint: Fingerprint of the judged pairs.
        answers: Result of each query, in their order.
    """

    test_fingerprint: str
    answers: tuple[JudgedQueryResult, ...]


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a job.

    Attributes:
        setting: Name of its setting.
        seed: Seed.
        folder: Folder of the run.
        validation_rsum: Validation RSUM of the best model, by which settings are selected.
        metrics: Test metrics of this model by key.
        conditions: Conditions of these metrics.
        seconds: Time of training steps and validations.
        job_seconds: Time of the whole job, with its start and the evaluation on the test split.
        failure: Error message of a failed run. "": the run succeeded.
        feedback: Results on judged text queries.
    """

    setting: str
    seed: int
    folder: Path
    validation_rsum: float = float("nan")
    metrics: dict[str, float | None] | None = None
    conditions: MeasurementConditions | None = None
    seconds: float = 0.0
    job_seconds: float = 0.0
    failure: str = ""
    feedback: FeedbackAnswers | None = None

    @classmethod
    def from_result(cls, job: Job, result: TrainingResult) -> RunOutcome:
        """Build the outcome of a successful run."""
        if not job.keeps_model:
            return cls(
                job.setting, job.seed, job.folder, result.validation_rsum, seconds=result.seconds
            )
        assert result.test is not None  # checked before the run
        test = result.test.under_published_protocol
        conditions = MeasurementConditions.from_evaluation(test, result.noise_index)
        return cls(
            job.setting,
            job.seed,
            job.folder,
            result.validation_rsum,
            test.all_metrics,
            conditions,
            result.seconds,
        )

    @property
    def measured_metrics(self) -> dict[str, float]:
        """Metrics that have a value, on captions and on judged text queries."""
        metrics = (self.metrics or {}) | (
            feedback_metrics(self.feedback.answers) if self.feedback else {}
        )
        return {key: value for key, value in metrics.items() if value is not None}

    def has_answers_for(self, test: FeedbackTest) -> bool:
        """Check whether the run was evaluated on the text queries of given judgments."""
        return (
            self.feedback is not None and self.feedback.test_fingerprint == test.pairs.fingerprint
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {**asdict(self), "folder": str(self.folder)}


def read_outcome(job: Job) -> RunOutcome | None:
    """Read the outcome of a job. None if it is not finished, or the file is corrupted."""
    outcome: RunOutcome | None = storage.read_checksummed_json(
        job.folder / OUTCOME_FILE, RunOutcome
    )
    # The folder may have moved.
    return outcome and replace(outcome, folder=job.folder)


def run_job(job: Job, progress: Progress) -> RunOutcome:
    """Return the outcome of a job, and train the run if it is not finished. An error of the
    training is its ``failure``, except for an error of the disk.
    """
    if (outcome := read_outcome(job)) is not None:
        return outcome
    started = time.monotonic()
    folder = RunFolder(job.folder)
    try:
        # After a full disk, the experiment is resumed, not the run.
        with storage.resumable(job.folder.parents[1]):
            if os.path.exists(folder.recipe) or os.path.exists(folder.ensemble):
                result = resume_training(job.folder, RunContext(progress))
            else:
                recipe = build_recipe(job.recipe_values, {}, job.setting)
                result = start_subfolder(resolve(recipe), job.folder, RunContext(progress))
    except StorageError:
        # A full disk is not a failure of the setting, which a comparison would leave out.
        raise
    except VisavisError as error:
        return RunOutcome(job.setting, job.seed, job.folder, failure=str(error))
    outcome = RunOutcome.from_result(job, result)
    # The seconds of an interrupted training are those of all processes.
    job_seconds = max(outcome.seconds, time.monotonic() - started)
    outcome = replace(outcome, job_seconds=job_seconds)
    storage.write_checksummed_json(job.folder / OUTCOME_FILE, outcome.to_json())
    if not job.keeps_model:
        folder.remove()
    return outcome


def check_models_exist(outcomes: Iterable[RunOutcome]) -> None:
    """Check that the best models of finished runs still exist. Failures are skipped."""
    for outcome in outcomes:
        if not outcome.failure and not os.path.exists(
            RunFolder(outcome.folder).model / "model.safetensors"
        ):
            raise RunError(
                f"{outcome.folder}: expected the model, got only its results. Restore the model, or "
                "remove the folder to train the run again."
            )


@torch.inference_mode()
def with_feedback_answers(outcome: RunOutcome, test: FeedbackTest) -> RunOutcome:
    """Evaluate a run on judged text queries, and save the results with its outcome. A failure is
    returned unchanged.
    """
    if outcome.failure or outcome.has_answers_for(test):
        return outcome
    check_models_exist([outcome])
    folder = outcome.folder
    recipe = read_run_recipe(folder)
    data_module, matcher = open_run(folder, recipe, NoProgress())
    split = data_module.data.split(recipe.evaluation.test).first_captions(1)
    names = tuple(image.name for image in split.images)
    if names != test.images:
        other = next((name for name in names if name not in test.images), "another order")
        raise RunError(
            f"{folder}: expected the {len(test.images):,} test images of the feedback, got "
            f"{len(names):,} with {other}. Compare on one data set."
        )
    if recipe.evaluation.average_networks:
        peers = [matcher, open_peer_network(folder, matcher)]
        matcher = ScoreEnsemble(peers).to(device_of(matcher))
    text = Retriever(matcher, data_module.processor).encode_text([*test.labeled_queries])
    visual, _ = data_module.encode(matcher, split)
    scores = score_all_pairs(matcher.eval(), visual, text, recipe.memory or None)
    answers = tuple(
        JudgedQueryResult.from_scores(row.numpy(), *judgments)
        for row, judgments in zip(scores.T, test.labeled_queries.values(), strict=True)
    )
    outcome = replace(outcome, feedback=FeedbackAnswers(test.pairs.fingerprint, answers))
    storage.write_checksummed_json(outcome.folder / OUTCOME_FILE, outcome.to_json())
    return outcome


JobRunner: TypeAlias = Callable[[Sequence[Job]], Iterator[RunOutcome]]
"""Runs jobs and yields their outcomes as they finish. Raises Stopped when everything is saved."""


@dataclass(frozen=True)
class Workers:
    """How runs are executed.

    Attributes:
        engine: "local" or "ray".
        num_workers: Runs at the same time. None: one for each core that the threads of a run leave.

    Raises:
        VisavisError: If a value is invalid.
    """

    engine: Engine = "local"
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            validate_int(self.num_workers, "workers", 1, MAX_RUNS)

    def count(self, threads: int) -> int:
        """Number of runs at the same time, each with a number of threads."""
        return self.num_workers or max(1, cpu_cores() // threads)

    @contextmanager
    def start(self, threads: int, progress: Progress) -> Iterator[JobRunner]:
        """Start the workers for this block."""
        count = self.count(threads)
        stop = StopRequest()
        with stop.install_signal_handlers():
            if self.engine == "ray":
                yield partial(_run_on_ray, count, stop)
            elif count == 1:
                yield partial(_run_in_this_process, stop, progress)
            else:
                with process_pool(count) as pool:
                    yield partial(_run_in_processes, pool, stop)


class _WorkerPool(ProcessPoolExecutor):
    """Pool whose processes do not import the script of the user, which would run it again in each
    of them.
    """

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        # A process is started by the call that submits its first job. It imports the script that
        # these attributes name.
        main = vars(sys.modules["__main__"])
        script: dict[str, Any] = {
            name: main.pop(name) for name in ("__file__", "__spec__") if name in main
        }
        main["__spec__"] = None
        try:
            with _blocked_in_new_processes("SIGINT", "SIGHUP"), current_folder_excluded():
                return super().submit(*args, **kwargs)
        finally:
            main.update(script)


@contextmanager
def _blocked_in_new_processes(*names: str) -> Iterator[None]:
    """Block signals in processes that this block starts, which inherit the mask: Ctrl-C would print
    a traceback while they import modules, before they ignore it. Other threads of this process
    still receive the signals.
    """
    numbers = {getattr(signal, name) for name in names if hasattr(signal, name)}
    if sys.platform == "win32":
        yield
        return
    if not hasattr(signal, "pthread_sigmask"):  # other systems without it
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def process_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes that end with this one, after their training is saved. A script needs no ``if
    __name__ == "__main__"``.
    """
    # The runs use the tracker, too.
    start_resource_tracker()
    context = get_context("spawn")
    # A worker gets the receiver and waits for the other end of the pipe to close, which also
    # happens if this process is killed.
    receiver, sender = context.Pipe(duplex=False)
    with receiver, sender:
        pool = _WorkerPool(num_processes, context, _start_worker, (receiver,))
        try:
            yield pool
        except BaseException:
            # The workers end when the pipe is closed.
            sender.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def exit_if_stopping() -> None:
    """End a worker whose training finished after the worker was asked to end."""
    if _stopping.is_set():
        os._exit(128 + signal.SIGTERM)


def _raise_if_stopped(stop: StopRequest) -> None:
    if stop.signal is not None:
        raise Stopped("", stop.signal)


def _run_in_this_process(
    stop: StopRequest, progress: Progress, jobs: Sequence[Job]
) -> Iterator[RunOutcome]:
    for job in jobs:
        _raise_if_stopped(stop)
        yield run_job(job, progress)


def _run_in_processes(
    pool: ProcessPoolExecutor, stop: StopRequest, jobs: Sequence[Job]
) -> Iterator[RunOutcome]:
    # All jobs are submitted. The pool runs as many as it has processes.
    running: set[Future[RunOutcome]] = {pool.submit(_run_in_worker, job) for job in jobs}
    while running:
        finished, running = wait(running, POLL_SECONDS, FIRST_COMPLETED)
        _raise_if_stopped(stop)
        for future in finished:
            try:
                yield future.result()
            except BrokenProcessPool:
                raise RunError(LOST_WORKER) from None


def _start_worker(receiver: Any) -> None:
    # A terminal sends these to all processes. The parent process handles them and closes the pipe.
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    Thread(target=_terminate_with_parent, args=(receiver,), daemon=True).start()


def _terminate_with_parent(receiver: Any) -> None:
    """Send SIGTERM to this process when the pipe is closed, so that a training saves everything and
    stops.
    """
    connection.wait([receiver])
    _stopping.set()
    if sys.platform == "win32":
        # On Windows, os.kill ends the process without its handler.
        signal.raise_signal(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def _run_in_worker(job: Job) -> RunOutcome:
    try:
        outcome = run_job(job, NoProgress())
    except Stopped as stopped:
        # An exception would be the result of the job, and the worker would wait for another one.
        os._exit(128 + stopped.signal)
    exit_if_stopping()
    return outcome


def _run_on_ray(count: int, stop: StopRequest, jobs: Sequence[Job]) -> Iterator[RunOutcome]:
    """Run each job as a Ray task. All machines of the cluster must share the folders."""
    ray = connect_to_ray("comparing")
    task = ray.remote(num_cpus=1, max_retries=2)(_run_unless_stopped)
    # Ray gets only as many as may run, so that a stop leaves few to cancel.
    waiting = list(reversed(jobs))
    running = list[Any]()
    while waiting or running:
        while waiting and len(running) < count:
            running.append(task.remote(waiting.pop()))
        finished, running = ray.wait(running, timeout=POLL_SECONDS)
        if stop.signal is not None:
            # Canceled runs save a checkpoint before they end.
            for reference in running:
                ray.cancel(reference)
            ray.wait(running, num_returns=len(running), timeout=60) if running else None
            _raise_if_stopped(stop)
        try:
            outcomes = ray.get(finished)
        except (
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.OutOfMemoryError,
            ray.exceptions.NodeDiedError,
        ):
            raise RunError(LOST_WORKER) from None
        yield from (outcome for outcome in outcomes if outcome is not None)


def _run_unless_stopped(job: Job) -> RunOutcome | None:
    """The outcome of a job. None if it was stopped and saved."""
    try:
        return run_job(job, NoProgress())
    except Stopped:
        return None
