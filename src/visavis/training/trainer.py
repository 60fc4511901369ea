"""The loop: a recipe's phases, one batch after the other, watched, and stoppable anywhere.

Exactness: the batches, the dropout of every step and the order of everything else depend on (seed, step) alone, so a
checkpoint holds no random state, and a run that is stopped and resumed on the same kind of machine with the same number
of threads ends in the same weights, bit for bit.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from visavis import spec, storage, supervision
from visavis.data.loader import Batch, seed_of
from visavis.errors import RunError
from visavis.models import Matcher
from visavis.models.device import autocast, choose_device
from visavis.progress import Progress, TrainingStep
from visavis.training.alarms import alarms, news
from visavis.training.checkpoint import Checkpoint, TrainerState
from visavis.training.context import Pace, training_context
from visavis.training.curves import summarize
from visavis.training.data_module import DataModule
from visavis.training.health import first_found
from visavis.training.loss import phase_loss
from visavis.training.optimizer_state import check_optimizer, optimizer_tensors, restore_optimizer
from visavis.training.probing import probe
from visavis.training.run_files import RunFiles
from visavis.training.schedule import factor, make_optimizer, ramp, set_lr, take_step, train_mode
from visavis.training.stopping import Stopped, StopRequest


class Trainer:
    """Trains a matcher by a recipe into a run folder: ``begin`` or ``resume``, then ``run``."""

    def __init__(self, data_module: DataModule, matcher: Matcher, files: RunFiles, progress: Progress):
        recipe = data_module.recipe
        self.recipe, self.data_module, self.files, self.progress = recipe, data_module, files, progress
        self.device = choose_device(recipe.training.device, "training.device")
        self.matcher = matcher.to(self.device)
        self.train = data_module.train
        self.val = data_module.loader(data_module.validation)
        for phase in recipe.phases:
            spec.parse(phase.supervision, supervision.CATALOG).check(self.train, self.val)
        self.state, self.pace, self.log = TrainerState(), Pace(), list[dict[str, Any]]()
        self.best = self._weights()
        self.last_checkpoint, self.stop = time.monotonic(), StopRequest()

    def begin(self) -> None:
        """Start at the first phase, with an empty log."""
        self._begin_phase({})
        storage.write_json_lines(self.files.log, [])

    def resume(self) -> bool:
        """Start where the newest whole checkpoint was written; the log and the best model become what they were then.

        False if there is no checkpoint yet. Raises RunError if there are some and none of them can be used.
        """
        checkpoint = Checkpoint.latest(self.files.checkpoints, self.progress, self.matcher.state_dict(), self._check)
        if checkpoint is None:
            return False
        self.state, self.log, self.best = checkpoint.state, checkpoint.log, checkpoint.best
        storage.write_json_lines(self.files.log, self.log)
        self.matcher.load_state_dict(self.best)
        self.data_module.processor.save(self.matcher, self.files.model)
        self.matcher.load_state_dict(checkpoint.weights)
        self._begin_phase(checkpoint.supervision)
        restore_optimizer(self.optimizer, checkpoint.optimizer)
        checkpoint.remove_newer()
        return True

    def run(self) -> TrainerState:
        """Train to the end. Raises Stopped after Ctrl-C and the like (all is saved), RunError if the loss is no longer a number."""
        with self.stop.heard():
            if not self.log:
                self._validate()
                self._checkpoint()
            while not self.state.done:
                self._epoch()
        return self.state

    def _epoch(self) -> None:
        """The rest of the current epoch, then the next state in the run."""
        state, phase = self.state, self.phase
        steps = self.train.batches_in(self._epoch_number)
        if state.batch == 0:
            self.supervision.begin_epoch(self._epoch_number)
        started = time.perf_counter()  # waiting for a batch counts as training
        for batch in self.train.epoch(self._epoch_number, start=state.batch):
            self._step(batch.to(self.device), steps)
            state.batch, state.seconds = batch.number + 1, state.seconds + time.perf_counter() - started
            self._tell(steps)
            every = self.recipe.training.evaluate_every
            if every and state.step % every == 0 and state.batch < steps and self._validate():
                self._next_phase()
                return
            if self._between_steps(batch.number, steps):
                if self.stop.asked is not None:
                    self._checkpoint()
                    raise Stopped(str(self.files.folder), self.stop.asked)
                self._checkpoint_if_due()
            started = time.perf_counter()
        state.epoch, state.batch = state.epoch + 1, 0
        if self._validate() or state.epoch == phase.epochs:
            self._next_phase()
        else:
            self._checkpoint_if_due()

    def _step(self, batch: Batch, steps: int) -> None:
        """Forward, backward and, where enough batches are gathered, one step of the optimizer."""
        state, training = self.state, self.recipe.training
        torch.manual_seed(seed_of(self.recipe.seed, state.step))
        train_mode(self.matcher)
        with autocast(self.device, training.autocast):
            visual, text = self.matcher.encode_visual(batch.visual), self.matcher.encode_text(batch.text)
            targets = self.supervision.targets(visual, text, batch)
            loss = self.loss(self.matcher.first_stage(visual), self.matcher.first_stage(text), targets=targets)
            if (extra := self.matcher.extra_loss(visual, text, targets)) is not None:
                loss = loss + extra
        value = loss.item()
        if not math.isfinite(value):
            raise RunError(
                f"the loss is {value} at step {state.step}: lower the learning rate, or check the features for NaN; the last checkpoint is whole."
            )
        gathered = min(training.accumulate, steps - batch.number // training.accumulate * training.accumulate)
        self.pace.share, self.pace.steps = (
            ramp(self.phase.ramp, state.phase_step, steps) / gathered,
            self._between_steps(batch.number, steps),
        )
        (loss * self.pace.share).backward()
        if self.pace.steps:
            set_lr(self.optimizer, factor(self.phase.schedule, state.phase_step, steps, self.phase.epochs))
            take_step(self.optimizer, training.clip_norm)
        self.supervision.observe(batch, value)
        state.step, state.phase_step, state.pairs = state.step + 1, state.phase_step + 1, state.pairs + len(batch.captions)
        state.loss_sum, state.loss_steps = state.loss_sum + value, state.loss_steps + 1

    def _between_steps(self, batch: int, steps: int) -> bool:
        """Whether the optimizer steps after this batch; only then is nothing but the weights and its state to be kept."""
        return (batch + 1) % self.recipe.training.accumulate == 0 or batch + 1 == steps

    def _validate(self) -> bool:
        """One row of the log; keeps the best model. True if the phase should end early."""
        state, started = self.state, time.perf_counter()
        validation = self.data_module.validation
        result = self.data_module.evaluate(self.matcher, validation)
        (train, health), (val, _) = (
            probe(self.matcher, self.loss, self.supervision, loader, self.recipe) for loader in (self.train, self.val)
        )
        health |= first_found(result, validation)
        row: dict[str, Any] = {
            "phase": state.phase,
            "epoch": state.epoch,
            "step": state.step,
            "objective": self.phase.objective,
            "running_loss": state.loss_sum / state.loss_steps if state.loss_steps else None,
            "train": train,
            "val": val,
            **({} if self.matcher.rerank else {"similarity": summarize([result.scores])}),  # a second stage scores in another unit
            "health": health,
            **result.to_json(),
            "time": {
                "training_s": round(state.seconds, 3),
                "validation_s": round(time.perf_counter() - started, 3),
                "pairs_per_s": round(state.pairs / state.seconds, 1) if state.seconds else None,
            },
        }
        raised = alarms(row, self.log)
        for sentence in news(raised, self.log):
            self.progress.say(sentence)
        health["alarms"] = list(raised)
        self.log.append(row)
        storage.append_json_line(self.files.log, row)
        state.loss_sum, state.loss_steps = 0.0, 0
        if (rsum := result.metrics["rsum"]) > state.best_rsum:
            state.best_rsum, state.best_step, state.stale = rsum, state.step, 0
            self.best = self._weights()
            self.data_module.processor.save(self.matcher, self.files.model)
            if self.supervision.peer is not None:
                self.data_module.processor.save(self.supervision.peer, self.files.peer)
            else:
                storage.remove_folder(self.files.peer)  # of an earlier phase
        else:
            state.stale += 1
        return bool(self.recipe.training.patience) and state.stale >= self.recipe.training.patience

    def _begin_phase(self, state: dict[str, Tensor], before: Optimizer | None = None) -> None:
        """The objective, supervision (with its state) and optimizer of the current phase; ``before``: the optimizer to take over from."""
        self.phase = self.recipe.phases[self.state.phase]
        self.loss = phase_loss(self.matcher, self.phase, self.recipe.memory or None)
        self.supervision = spec.parse(self.phase.supervision, supervision.CATALOG)
        self.optimizer = make_optimizer(self.matcher, self.phase)
        self.matcher.zero_grad(set_to_none=True)
        if before is not None and self.phase.keep_optimizer:
            restore_optimizer(self.optimizer, optimizer_tensors(before))
        context = training_context(self.recipe, self.phase, self.matcher, self.optimizer, self.train, self.val, self.pace)
        self.supervision.begin_phase(context, state)

    def _next_phase(self) -> None:
        state = self.state
        if state.phase + 1 == len(self.recipe.phases):
            state.done = True
        else:
            self.state = replace(state, phase=state.phase + 1, epoch=0, batch=0, phase_step=0, stale=0)
            following = self.recipe.phases[self.state.phase]
            if following.start_from == "best":
                self.matcher.load_state_dict(self.best)
            self._begin_phase(self.supervision.handed_on() if following.supervision == self.phase.supervision else {}, self.optimizer)
        self._checkpoint()

    @property
    def _epoch_number(self) -> int:
        """The epoch of the run, over all phases; epoch 0 of the plan is kept for probes."""
        return self._first_epoch(self.state.phase) + self.state.epoch

    def _first_epoch(self, phase: int) -> int:
        return 1 + sum(earlier.epochs for earlier in self.recipe.phases[:phase])

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raise RunError for a checkpoint that no training by this recipe can have written."""
        state, phases = checkpoint.state, self.recipe.phases
        where = f"{checkpoint.folder}: the run would be"
        if state.phase >= len(phases):
            raise RunError(f"{where} in phase {state.phase} of {len(phases)}, the first of which is 0.")
        phase, steps = phases[state.phase], self.train.batches_in(self._first_epoch(state.phase))
        if state.epoch > phase.epochs or (state.epoch == phase.epochs and not state.done) or state.batch > steps:
            raise RunError(
                f"{where} in epoch {state.epoch} of {phase.epochs} and at batch {state.batch} of {steps}, the first of which are 0."
            )
        if state.phase_step != state.epoch * steps + state.batch or not checkpoint.matches_its_name:
            raise RunError(
                f"{where} at step {state.step}, step {state.phase_step} of its phase, which is not where its epoch and name are."
            )
        check_optimizer(
            make_optimizer(self.matcher, phase), checkpoint.optimizer, state.phase_step, f"{checkpoint.folder}/optimizer.safetensors"
        )

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.matcher.state_dict().items()}

    def _checkpoint_if_due(self) -> None:
        if time.monotonic() - self.last_checkpoint >= self.recipe.training.checkpoint_s:
            self._checkpoint()

    def _checkpoint(self) -> None:
        Checkpoint(
            self.state, self._weights(), self.best, optimizer_tensors(self.optimizer), self.supervision.state_dict(), self.log
        ).write(self.files.checkpoints)
        self.last_checkpoint = time.monotonic()

    def _tell(self, steps: int) -> None:
        state, phases = self.state, self.recipe.phases
        ahead = steps * (sum(phase.epochs for phase in phases[state.phase :]) - state.epoch) - state.batch
        seconds = max(state.seconds, 1e-9)
        self.progress.step(
            TrainingStep(
                phase=state.phase,
                phases=len(phases),
                epoch=state.epoch,
                epochs=self.phase.epochs,
                step=state.batch,
                steps=steps,
                loss=state.loss_sum / max(state.loss_steps, 1),
                rsum=self.log[-1]["rsum"] if self.log else None,
                pairs_per_s=state.pairs / seconds,
                seconds_left=ahead * seconds / state.step,
            )
        )
