"""Training loop over the phases of a recipe, which can stop after any step and resume exactly.

Batches, dropout and all other random choices depend on (seed, step) alone. So a checkpoint holds no
random state, and a run that is stopped and resumed on the same kind of machine with the same number
of threads ends with bit-identical weights.
"""

from __future__ import annotations

import math
import time
from copy import copy
from dataclasses import replace
from functools import partial
from signal import Signals
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import RunError
from visavis.core.progress import TrainingStep
from visavis.data.loader import Batch, derive_seed
from visavis.evaluation import Evaluation
from visavis.models import Matcher
from visavis.models.device import choose_device, seed_device
from visavis.training.checkpoint import Checkpoint, TrainerState
from visavis.training.encoder_blocks import prepare_encoders
from visavis.training.monitoring.alerts import find_alerts, new_alerts
from visavis.training.monitoring.gradient_norms import is_recorded, mean_norms
from visavis.training.monitoring.tracking import Tracking, retrieved_images
from visavis.training.monitoring.validation_metrics import hubness, summarize, validation_metrics
from visavis.training.optimizer import (
    check_optimizer_state,
    loss_warmup_factor,
    lr_factor,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
)
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.learned_scale import describe_scale_and_bias, start_scale_and_bias
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped, StopRequest
from visavis.training.train_step import (
    StepControl,
    TeacherOpener,
    TrainStep,
    restore_scaler,
    training_context,
)


class Trainer:
    """Trains a model by a recipe into a run folder: call ``start`` or ``resume``, then ``run``.

    Each of several processes has a trainer of its own, on its part of every batch. Their weights
    stay equal.

    Args:
        data_module: Data of the run, with its progress and the processes that train together.
        matcher: Model to train.
        folder: Folder of the run, into which the first process writes.
        open_teacher: Opens the teacher of a supervision: ``runs.teacher.open_teacher``. None: no
            supervision has one.

    Attributes:
        recipe: Recipe of the run.
        folder: Folder of the run.
        matcher: Model in training.
        train_loader: Training batches of the current phase.
        recipe_batches: Training batches that all phases begin with.
        val_loader: Batches of the validation split.
        state: Position of the run.
        log: Rows of the log, one per validation.
        best: Weights of the best validation so far, by name, on the CPU. Averaged ones with
            ``training.ema_decay``.
    """

    def __init__(
        self,
        data_module: DataModule,
        matcher: Matcher,
        folder: RunFolder,
        open_teacher: TeacherOpener | None = None,
    ):
        self.recipe = recipe = data_module.recipe
        self.open_teacher = open_teacher
        self.data_module = data_module
        self.folder = folder
        self.progress = data_module.progress
        self.group = data_module.group
        self.device = choose_device(recipe.training.device, "training.device")
        self.matcher = matcher.to(self.device)
        prepare_encoders(self.matcher, recipe.training, self.group)
        self.train_loader, self.val_loader = data_module.loaders
        self.recipe_batches = self.train_loader
        for phase in recipe.phases:
            phase.supervision.check(self.train_loader, self.val_loader)
        self.state = TrainerState()
        self.step_control = StepControl()
        self.log = list[dict[str, Any]]()
        self.best = self._weights()
        self.last_checkpoint = time.monotonic()
        self.stop = StopRequest()
        self.data_wait_s = self.validated_at_s = 0.0
        self.tracking = Tracking(recipe, folder, self.progress)

    def start(self) -> None:
        """Start at the first phase, with an empty log."""
        self._begin_phase({})
        if self.group.is_first:
            storage.write_json_lines(self.folder.log, [])

    def resume(self) -> bool:
        """Resume from the newest usable checkpoint, and restore the log and the best model of that
        step.
        """
        checkpoint = Checkpoint.latest(
            self.folder.checkpoints, self.progress, self.matcher.state_dict(), self._check
        )
        if checkpoint is None:
            return False
        self.state = checkpoint.state
        self.log = checkpoint.log
        self.best = checkpoint.best_weights
        self.validated_at_s = self.state.seconds  # time from before the stop does not count
        self.group.barrier()  # until all processes have read the checkpoint
        if self.group.is_first:
            storage.write_json_lines(self.folder.log, self.log)
            self.matcher.load_state_dict(self.best)
            self.data_module.processor.save(self.matcher, self.folder.model)
            checkpoint.remove_newer()
        # The phase is built on the weights of the checkpoint, then its optimizer is restored.
        self.matcher.load_state_dict(checkpoint.weights)
        self._begin_phase(checkpoint.supervision)
        restore_optimizer(self.train_step.optimizer, checkpoint.optimizer)
        restore_scaler(self.train_step.scaler, self.state.scaler)
        if self.train_step.average is not None:
            self.train_step.average.restore(checkpoint.averaged_weights, self.state.average_updates)
        return True

    def run(self) -> TrainerState:
        """Validate the untrained model, then train to the end. A resumed run continues where it
        stopped.
        """
        tracked = self.recipe.training.track if self.group.is_first else ()
        with self.stop.install_signal_handlers(), self.tracking.open(tracked, self.log):
            # The run can be opened and resumed from its first validation on.
            if not self.log:
                self._validate()
                self._checkpoint()
            try:
                while not self.state.done:
                    self._train_to_validation()
            finally:
                self.train_loader.close()
        return self.state

    def _train_to_validation(self) -> None:
        """Train to the next validation, validate, and advance to the next epoch or phase."""
        state = self.state
        steps = self.train_loader.num_batches
        every = self.recipe.training.evaluate_every
        # Batches of the epoch before the next validation.
        stop = min(steps, state.batch + every - state.step % every) if every else steps
        if state.batch == 0:
            self.supervision.begin_epoch(self._epoch_number)
        # Before the loop: waiting for a batch counts as training time.
        started = time.perf_counter()
        # No batches after the validation are read ahead, so that idle workers read its images.
        for batch in self.train_loader.epoch(
            self._epoch_number, start=state.batch, stop=stop, device=self.device
        ):
            self.data_wait_s += time.perf_counter() - started
            self._step(batch, steps)
            state.batch = batch.index + 1
            state.seconds = state.seconds + time.perf_counter() - started
            self._report_step(steps)
            # A resumed run repeats the validation at the end of an epoch, but not one within it.
            if state.batch < stop or stop == steps:
                self._checkpoint_or_stop()
            started = time.perf_counter()
        if stop == steps:
            state.epoch += 1
            state.batch = 0
        if self._validate() or state.epoch == self.phase.epochs:
            self._finish_phase()
        elif stop == steps:
            self._checkpoint_if_due()
        else:
            self._checkpoint_or_stop()

    def _step(self, batch: Batch, steps: int) -> None:
        """Forward and backward of one batch, and an optimizer step at the end of an accumulation
        group.
        """
        state = self.state
        training = self.recipe.training
        # Batches of this accumulation group. The last group of an epoch may be smaller.
        group_start = batch.index // training.accumulation_steps * training.accumulation_steps
        group_end = min(group_start + training.accumulation_steps, steps)
        if batch.index == group_start and is_recorded(
            state.step, group_end - group_start, training.gradients_every
        ):
            self.train_step.record_gradients()
        # Accumulated gradients are a mean over the batches of the group.
        control = self.step_control
        control.loss_scale = loss_warmup_factor(
            self.phase.loss_warmup_epochs, state.phase_step, steps
        ) / (group_end - group_start)
        control.is_optimizer_step = batch.index + 1 == group_end
        control.lr_factor = lr_factor(
            self.phase.schedule, state.phase_step, steps, self.phase.epochs
        )
        # Dropout depends on seed and step alone, so that a resumed run repeats it.
        seed_device(
            self.device, derive_seed(self.recipe.seed, state.step, *self.group.seed_numbers)
        )
        # Processes differ by the auxiliary loss of the model, whose gradients are averaged, too.
        value = self.group.mean(
            self.train_step.backward(batch, self.supervision.targets, control.loss_scale)
        )
        if not math.isfinite(value):
            raise RunError(
                f"{self.folder.path}: expected a finite loss, got {value} at step {state.step}. "
                "Lower the learning rate, or check the "
                "features for NaN. The last checkpoint is intact."
            )
        if control.is_optimizer_step:
            norm = self.train_step.step(control.lr_factor)
            if math.isfinite(norm):  # float16 skips a step whose gradient overflows
                state.gradient_norm_sum += norm
                state.gradient_norm_max = max(state.gradient_norm_max, norm)
                state.gradient_norm_steps += 1
            if norms := self.train_step.recorded_gradients():
                first_step = state.step - (batch.index - group_start)
                state.gradients.append({"step": first_step, **norms})
        # A supervision may now train a second network on the same batch.
        self.supervision.observe(batch, value)
        state.step += 1
        state.phase_step += 1
        state.pairs += len(batch.global_captions)
        state.loss_sum = state.loss_sum + value
        state.loss_steps += 1

    def _validate(self) -> bool:
        """Append a row to the log and save the best model. Returns whether patience ends the phase."""
        self.train_step.copy_weights()
        started = time.perf_counter()
        raw = {}
        if self.train_step.average is not None:
            raw = {"raw_weights": self._evaluate_validation()[1].metrics}
        # With an average of the weights, the row describes the averaged weights, which the run
        # keeps.
        with self.train_step.averaged_weights():
            encoded, result = self._evaluate_validation()
            row = self._log_row(encoded, result, started) | raw
            if self.group.is_first:
                alerts = find_alerts(row, self.log)
                messages = new_alerts(alerts, self.log)
                for message in messages:
                    self.progress.message(message)
                row["health"]["alerts"] = list(alerts)
                storage.append_json_line(self.folder.log, row)
                examples = partial(
                    retrieved_images,
                    self.matcher,
                    *encoded,
                    self.val_loader.data,
                    self.recipe.memory or None,
                )
                self.tracking.log(row, messages, examples)
            # Sums start again after each validation.
            self.log.append(row)
            state = self.state
            state.loss_sum = 0.0
            state.loss_steps = 0
            state.gradient_norm_sum = 0.0
            state.gradient_norm_max = 0.0
            state.gradient_norm_steps = 0
            state.gradients = []
            self.data_wait_s = 0.0
            self.validated_at_s = state.seconds
            if row["rsum"] > state.best_rsum:
                state.best_rsum = row["rsum"]
                state.best_step = state.step
                state.validations_without_improvement = 0
                self._save_best()
            else:
                state.validations_without_improvement += 1
            return 0 < self.recipe.training.patience <= state.validations_without_improvement

    def _evaluate_validation(self) -> tuple[tuple[Encoded, Encoded], Evaluation]:
        """Encode and evaluate the validation split."""
        data = self.val_loader.data
        encoded = self.data_module.encode(self.matcher, data, self.val_loader)
        return encoded, self.data_module.evaluate(self.matcher, data, encoded=encoded)

    def _log_row(
        self, encoded: tuple[Encoded, Encoded], result: Evaluation, started: float
    ) -> dict[str, Any]:
        """Measure the model on the encoded validation split and on a few batches of both splits."""
        state = self.state
        # A process that waits for data stops the others, which then wait for its gradients.
        data_wait_s = self.group.all_gather_stack(torch.tensor([self.data_wait_s])).max().item()
        if not self.group.is_first:
            return {
                "rsum": result.metrics["rsum"],
                "time": {"validation_s": time.perf_counter() - started},
            }
        train, health = validation_metrics(
            self.matcher,
            self.train_step.loss,
            self.supervision,
            self.train_loader.for_all_ranks(),
            self.recipe,
        )
        val, _ = validation_metrics(
            self.matcher,
            self.train_step.loss,
            self.supervision,
            self.val_loader,
            self.recipe,
            encoded,
        )
        gradient_norms = (
            {
                "gradient_norm": state.gradient_norm_sum / state.gradient_norm_steps,
                "gradient_norm_max": state.gradient_norm_max,
            }
            if state.gradient_norm_steps
            else {}
        )
        learning_rates = {}
        if state.step:
            factor = lr_factor(
                self.phase.schedule,
                state.phase_step - 1,
                self.train_loader.num_batches,
                self.phase.epochs,
            )
            # Of each part in the last step. Of several rates of a part, the rate of its top layer,
            # the highest, is the last one in order.
            by_rate = sorted(
                self.train_step.optimizer.param_groups, key=lambda group: group["base_lr"]
            )
            learning_rates = {"lr": {group["part"]: group["base_lr"] * factor for group in by_rate}}
        # The second stage of a two-stage model scores in another unit, so its similarities are not
        # logged.
        similarity = (
            {} if self.matcher.rerank_top_k else {"similarity": summarize([result.score_samples])}
        )
        gradients = (
            {"gradients": mean_norms(state.gradients), "gradient_steps": state.gradients}
            if state.gradients
            else {}
        )
        return {
            "phase": state.phase,
            "epoch": state.epoch,
            "step": state.step,
            "objective": repr(self.phase.objective),
            "running_loss": state.loss_sum / state.loss_steps if state.loss_steps else None,
            "train": train,
            "val": val,
            **learning_rates,
            **similarity,
            **gradients,
            "health": health | gradient_norms | hubness(result, self.val_loader.data),
            **result.to_json(),
            "time": {
                "training_s": round(state.seconds, 3),
                "validation_s": round(time.perf_counter() - started, 3),
                "pairs_per_s": round(state.pairs / state.seconds, 1) if state.seconds else None,
                "data_wait_s": round(data_wait_s, 3),
                "data_wait_share": round(self._share_of_training(data_wait_s), 4),
            },
        }

    def _save_best(self) -> None:
        """Keep the current weights as the best ones, and write the model, with the second network
        if there is one.
        """
        self.best = self._weights()
        if not self.group.is_first:
            return
        self.data_module.processor.save(self.matcher, self.folder.model)
        if self.supervision.peer is not None:
            self.data_module.processor.save(self.supervision.peer, self.folder.peer)
        else:
            storage.remove_folder(self.folder.peer)  # an earlier phase may have written it

    def _begin_phase(self, state: dict[str, Tensor], previous: Optimizer | None = None) -> None:
        """Build loss, supervision and optimizer of the current phase. ``state`` belongs to the
        supervision.
        """
        self.phase = self.recipe.phases[self.state.phase]
        # A copy, because a supervision keeps the state of its phase, and the recipe must not.
        self.supervision = copy(self.phase.supervision)
        self.train_loader = self.supervision.extend_batches(self.recipe_batches)
        self.train_step = TrainStep(self.matcher, self.phase, self.recipe, self.group)
        self.matcher.zero_grad(set_to_none=True)
        if previous is not None and self.phase.keep_optimizer:
            restore_optimizer(self.train_step.optimizer, optimizer_tensors(previous))
        optimizer = self.train_step.optimizer
        context = training_context(
            self.recipe,
            self.phase,
            self.matcher,
            optimizer,
            self.train_loader,
            self.val_loader,
            self.step_control,
            self.group,
            self.progress,
            self.open_teacher,
        )
        self.supervision.begin_phase(context, state)

    def _finish_phase(self) -> None:
        """Begin the next phase, or end the training after the last one, and write a checkpoint."""
        state = self.state
        if state.phase + 1 == len(self.recipe.phases):
            state.done = True
        else:
            self.state = replace(
                state,
                phase=state.phase + 1,
                epoch=0,
                batch=0,
                phase_step=0,
                validations_without_improvement=0,
            )
            # The next phase continues from the last weights, or from the best ones so far.
            next_phase = self.recipe.phases[self.state.phase]
            if next_phase.initial_weights == "best":
                self.matcher.load_state_dict(self.best)
            start_scale_and_bias(self.matcher, next_phase, self.phase)
            if next_phase.learned_start:
                self.progress.message(
                    f"{next_phase.objective}{describe_scale_and_bias(self.matcher, next_phase)}"
                )
            carried_over = (
                self.supervision.carried_over()
                if next_phase.supervision == self.phase.supervision
                else {}
            )
            self._begin_phase(carried_over, self.train_step.optimizer)
        self._checkpoint()

    @property
    def _epoch_number(self) -> int:
        """Epoch of the run over all phases, from 1. Epoch 0 of the batch schedule is reserved for
        validation metrics.
        """
        return (
            1
            + sum(earlier.epochs for earlier in self.recipe.phases[: self.state.phase])
            + self.state.epoch
        )

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raise RunError for a checkpoint that no training by this recipe can have written."""
        state = checkpoint.state
        phases = self.recipe.phases
        folder = checkpoint.folder
        if state.phase >= len(phases):
            raise RunError(f"{folder}: phase: expected 0 to {len(phases) - 1}, got {state.phase}.")
        phase = phases[state.phase]
        steps = self.train_loader.num_batches
        if (
            state.epoch > phase.epochs
            or (state.epoch == phase.epochs and not state.done)
            or state.batch > steps
        ):
            raise RunError(
                f"{folder}: epoch, batch: expected below {phase.epochs} and at most {steps}, got "
                f"epoch {state.epoch} and batch {state.batch}."
            )
        if (
            state.phase_step != state.epoch * steps + state.batch
            or not checkpoint.name_matches_step
        ):
            raise RunError(
                f"{folder}: step {state.step}, phase step {state.phase_step}: expected the step of "
                f"the folder name, of epoch {state.epoch} "
                f"and of batch {state.batch}."
            )
        shapes, expected = (
            {name: tensor.shape for name, tensor in tensors.items()}
            for tensors in (checkpoint.averaged_weights, checkpoint.weights)
        )
        if shapes != (expected if self.recipe.training.ema_decay else {}):
            raise RunError(
                f"{folder}/averaged_weights.safetensors: expected the names and shapes of "
                "weights.safetensors, or nothing without training.ema_decay."
            )
        optimizer = make_optimizer(self.matcher, phase)
        check_optimizer_state(
            optimizer, checkpoint.optimizer, state.phase_step, f"{folder}/optimizer.safetensors"
        )

    def _weights(self) -> dict[str, Tensor]:
        return {
            name: tensor.detach().cpu().clone()
            for name, tensor in self.matcher.state_dict().items()
        }

    def _checkpoint_or_stop(self) -> None:
        """Save a checkpoint if it is due. After a signal, save one and stop."""
        # Between optimizer steps there are gradients, which a checkpoint does not hold.
        if not self.step_control.is_optimizer_step:
            return
        # The processes agree on a signal that any of them received. 0: none.
        received = torch.tensor([0 if self.stop.signal is None else self.stop.signal])
        if number := int(self.group.all_gather_stack(received).max()):
            self._checkpoint()
            self.group.barrier()  # torchrun ends all processes as soon as one of them has ended
            raise Stopped(str(self.folder.path), Signals(number))
        self._checkpoint_if_due()

    def _checkpoint_if_due(self) -> None:
        is_due = time.monotonic() - self.last_checkpoint >= self.recipe.training.checkpoint_s
        # The clock of the first process counts.
        if self.group.any_rank(self.group.is_first and is_due):
            self._checkpoint()

    def _checkpoint(self) -> None:
        self.train_step.copy_weights()
        self.state.scaler = self.train_step.scaler.state_dict()
        optimizer = optimizer_tensors(self.train_step.optimizer)
        supervision_state = self.supervision.state_dict()
        average = self.train_step.average
        averaged_weights = dict[str, Tensor]()
        if average is not None:
            averaged_weights = average.full_tensors()
            self.state.average_updates = average.updates
        checkpoint = Checkpoint(
            self.state,
            self._weights(),
            self.best,
            optimizer,
            supervision_state,
            self.log,
            averaged_weights,
        )
        if self.group.is_first:
            checkpoint.write(self.folder.checkpoints)
        self.last_checkpoint = time.monotonic()

    def _share_of_training(self, seconds: float) -> float:
        """Share of the training time since the last validation."""
        return min(seconds / max(self.state.seconds - self.validated_at_s, 1e-9), 1.0)

    def _report_step(self, steps: int) -> None:
        state = self.state
        phases = self.recipe.phases
        seconds = max(self.state.seconds, 1e-9)
        steps_left = (
            steps * (sum(phase.epochs for phase in phases[state.phase :]) - state.epoch)
            - state.batch
        )
        self.progress.training_step(
            TrainingStep(
                phase=state.phase,
                phases=len(phases),
                epoch=state.epoch,
                epochs=self.phase.epochs,
                step=state.batch,
                steps=steps,
                loss=state.loss_sum / max(state.loss_steps, 1),
                rsum=self.log[-1]["rsum"] if self.log else None,
                pairs_per_second=state.pairs / seconds,
                seconds_left=steps_left * seconds / state.step,
                data_wait_share=self._share_of_training(self.data_wait_s),
            )
        )
