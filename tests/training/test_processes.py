"""Trainings in several processes: equal to one process, resumed by another number of them, and
ended by one message.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.platforms import posix
from tests.processes import in_processes, run_visavis, start_ranks
from tests.training.process_cases import train_all, train_until, write_recipes
from torch import nn

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import RecipeError, ReportedByOtherProcess
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.data.dataset_reader import open_dataset
from visavis.evaluation.tiled_ranking import rank_by_tiles
from visavis.training import processes
from visavis.training.encoder_blocks import synchronize_batch_norm
from visavis.training.processes import check_processes
from visavis.training.recipes.files import read_recipe
from visavis.training.stop_signals import Stopped
from visavis.training.supervision import CATALOG

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, Path]:
    return write_recipes(tmp_path_factory.mktemp("recipes"))


def read_log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_equal(run: Path, reference: Path, tolerance: float) -> None:
    """Losses and validations of two runs are equal up to rounding errors."""
    rows, expected = read_log(run), read_log(reference)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    assert [row["running_loss"] for row in rows[1:]] == pytest.approx(
        [row["running_loss"] for row in expected[1:]], rel=tolerance
    )
    assert [row["rsum"] for row in rows] == [row["rsum"] for row in expected]
    result, expected_result = (
        json.loads((folder / "result.json").read_text()) for folder in (run, reference)
    )
    assert result["rsum"] == expected_result["rsum"]


def check_weights(run: Path, reference: Path) -> None:
    """Weights are equal up to rounding errors. Single weights may differ more: Adam moves one by a
    whole step where its gradient is almost 0.
    """
    weights, expected = (
        load_file(folder / "model" / "model.safetensors") for folder in (run, reference)
    )
    for name, tensor in expected.items():
        assert (weights[name].double() - tensor).norm() <= 1e-4 * tensor.double().norm() + 1e-5, (
            name
        )


def train_on(world_size: int, jobs: dict, folder: Path) -> Path:
    out = folder / f"processes-{world_size}"
    out.mkdir()
    if world_size == 1:
        for name, (recipe, overrides) in jobs.items():
            visavis.train(recipe, overrides=overrides, out=out / name)
        return out
    in_processes(
        train_all, (world_size, folder / f"rendezvous-{world_size}", jobs, out), nprocs=world_size
    )
    return out


def test_two_processes_train_the_same_model_as_one(recipes, scenes, tmp_path):
    jobs = {
        name: (str(recipes[name]), {"data.path": str(scenes)})
        for name in ("pixels", "NCR", "offline", "auto")
    }
    jobs["pixels"][1]["epochs"] = 1
    teacher = visavis.train(recipes["position"], data=scenes, out=tmp_path / "teacher").run
    supervision = f"DistillationSupervision(teacher={str(teacher)!r})"
    jobs["distilled"] = (
        str(recipes["position"]),
        {"data.path": str(scenes), "phases.0.supervision": supervision, "seed": 6},
    )
    one, two = (train_on(world_size, jobs, tmp_path) for world_size in (1, 2))
    for name in jobs:
        check_equal(two / name, one / name, 1e-5)
        check_weights(two / name, one / name)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_200_steps_are_equal_on_one_two_and_four_processes(
    recipes, scenes, dual_encoders, tmp_path
):
    sizes = {
        "training.batches_per_epoch": 0,
        "training.metric_batches": 1,
        "training.threads": 1,
        "training.checkpoint_s": 1e6,
    }
    jobs = {
        name: (str(path), {"data.path": str(scenes), "epochs": 30, **sizes})
        for name, path in recipes.items()
    }
    encoder = str(dual_encoders / "clip")
    clip = {
        "data.path": str(scenes),
        "visual.encoder": encoder,
        "text.encoder": encoder,
        "training.batch_size": 24,
        "epochs": 30,
        **sizes,
    }
    jobs["lora"] = ("clip/lora", clip | {"phases.0.optimizer.lr": 1e-4})
    jobs["heads"] = ("clip/linear", clip | {"training.batch_size": 24})
    one, *others = (train_on(world_size, jobs, tmp_path) for world_size in (1, 2, 4))
    # Rounding errors of attention and of batch norm grow, and exceed 1e-5 after about 50 steps.
    # Pooled features reach it after 190 steps.
    growing = {"SCAN": 42, "pixels": 42, "pooled": 140}
    for name in jobs:
        for out in others:
            if name not in growing:
                check_equal(out / name, one / name, 1e-5)
                continue
            rows, expected = (
                [row for row in read_log(each / name) if row["step"] <= growing[name]]
                for each in (out, one)
            )
            losses, expected_losses = (
                [row["running_loss"] for row in part[1:]] for part in (rows, expected)
            )
            assert len(losses) > 5 and losses == pytest.approx(expected_losses, rel=1e-5)


def fsdp_jobs(scenes, dual_encoders) -> dict:
    encoder = str(dual_encoders / "clip")
    values = {
        "data.path": str(scenes),
        "visual.encoder": encoder,
        "text.encoder": encoder,
        "epochs": 2,
        "training.strategy": "fsdp",
    }
    sizes = {
        "training.batch_size": 24,
        "training.threads": 1,
        "training.batches_per_epoch": 3,
        "phases.0.optimizer.lr": 1e-3,
    }
    return {"fsdp": ("clip/full", values | sizes)}


def test_sharded_parameters_train_the_same_model(few_scenes, dual_encoders, tmp_path):
    """FSDP2 of a tiny CLIP with a learned scale."""
    jobs = fsdp_jobs(few_scenes, dual_encoders)
    one, two = (train_on(world_size, jobs, tmp_path) for world_size in (1, 2))
    check_equal(two / "fsdp", one / "fsdp", 1e-5)
    check_weights(two / "fsdp", one / "fsdp")


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param([(2, 5, 0), (1, 9, 0), (2, 0, 0)], id="2-1-2"),
        pytest.param(
            [(2, 5, 1), (1, 9, 0), (2, 13, 0), (2, 0, 0)], id="2-1-2-2", marks=pytest.mark.long
        ),
        pytest.param(
            [(4, 5, 3), (2, 9, 0), (1, 13, 0), (4, 0, 0)], id="4-2-1-4", marks=pytest.mark.long
        ),
    ],
)
def test_a_run_resumes_with_another_number_of_processes(recipe, scenes, tmp_path, stops):
    """The recipe has dropout, which depends on the number of processes, so it is switched off."""
    start = {
        "recipe": str(recipe),
        "overrides": {"data.path": str(scenes), "model.dropout": 0.0},
        "out": tmp_path / "run",
    }
    check_resumed(start, stops, tmp_path)


@pytest.mark.long
def test_sharded_parameters_resume_on_other_numbers_of_ranks(few_scenes, dual_encoders, tmp_path):
    recipe, overrides = fsdp_jobs(few_scenes, dual_encoders)["fsdp"]
    start = {"recipe": recipe, "overrides": overrides | {"epochs": 6}, "out": tmp_path / "run"}
    check_resumed(start, [(4, 1, 3), (2, 2, 0), (1, 4, 0), (4, 0, 0)], tmp_path)


AVERAGED = {"training.ema_decay": 0.8, "phases.0.frozen_layers": {"visual": 1}}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_average_and_frozen_layers_on_two_processes(strategy, few_scenes, dual_encoders, tmp_path):
    """Equal to one process, also if the run resumes with another number of them."""
    recipe, overrides = fsdp_jobs(few_scenes, dual_encoders)["fsdp"]
    overrides |= AVERAGED | {"training.strategy": strategy}
    start = {"recipe": recipe, "overrides": overrides, "out": tmp_path / "run"}
    check_resumed(start, [(2, 1, 1), (1, 2, 0), (2, 0, 0)], tmp_path)
    check_weights(tmp_path / "run", tmp_path / "whole")
    rows, expected = (read_log(tmp_path / name) for name in ("run", "whole"))
    for row, other in zip(rows, expected, strict=True):
        assert row["raw_weights"] == pytest.approx(other["raw_weights"])
        norms = [each["health"].get("gradient_norm", 0.0) for each in (row, other)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    average, raw = (
        load_file(max((tmp_path / "run/checkpoint").glob("step-*")) / f"{name}weights.safetensors")
        for name in ("averaged_", "")
    )
    layer = "model.vision_model.encoder.layers.{}.mlp.fc1.weight"
    assert torch.equal(average[layer.format(0)], raw[layer.format(0)])
    assert not torch.equal(average[layer.format(1)], raw[layer.format(1)])


def check_resumed(start: dict, stops: list[tuple[int, int, int]], folder: Path) -> None:
    """A run that stops at steps, each time with another number of processes, is equal to one that
    was never stopped.
    """
    visavis.train(**start | {"out": folder / "whole"})
    for number, (world_size, step, rank) in enumerate(stops, 1):
        arguments = {"resume": folder / "run"} if number > 1 else start
        in_processes(
            train_until,
            (world_size, folder / f"r{number}", arguments, step, rank),
            nprocs=world_size,
        )
    check_equal(folder / "run", folder / "whole", 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("small_disk", ["32m"], indirect=True)
def test_a_full_disk_or_a_cut_shard_is_reported_once(recipes, scenes, small_disk, tmp_path):
    """Only rank 0 writes, and only one rank reads a shard. The run resumes when there is space
    again.
    """
    run, filler = small_disk / "run", small_disk / "filler"
    ranks = start_ranks(
        tmp_path / "full",
        2,
        "train",
        recipes["pooled"],
        "--data",
        scenes,
        "--out",
        run,
        "training.checkpoint_s=0",
    )
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(read_log(run)) > 1)
    free = os.statvfs(small_disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (free.f_bfree - 2) * free.f_frsize)
    assert [command.wait(60) for command in ranks] == [1, 1]
    assert sum(command.output_text.count("No space left on device") for command in ranks) == 1
    assert not any("Traceback" in command.output_text for command in ranks)
    filler.unlink()
    resumed = start_ranks(tmp_path / "resumed", 2, "train", "--resume", run)
    assert [command.wait(60) for command in resumed] == [0, 0]
    whole = start_ranks(
        tmp_path / "undisturbed",
        2,
        "train",
        recipes["pooled"],
        "--data",
        scenes,
        "--out",
        tmp_path / "whole",
    )
    assert [command.wait(60) for command in whole] == [0, 0]
    check_equal(run, tmp_path / "whole", 1e-9)

    shards = write_shards(tmp_path / "shards", scenes)
    values = [f"data.stream={shards}/train-*.tar", "training.workers=0", "epochs=1"]
    content = (shards / "train-001.tar").read_bytes()
    complete = start_ranks(
        tmp_path / "complete", 2, "train", recipes["pixels"], "--data", scenes, *values
    )
    assert [command.wait(60) for command in complete] == [0, 0], complete[0].output_text
    (shards / "train-001.tar").write_bytes(content[: len(content) // 2])
    cut = start_ranks(tmp_path / "cut", 2, "train", recipes["pixels"], "--data", scenes, *values)
    assert [command.wait(60) for command in cut] == [1, 1]
    assert sum(command.output_text.count("train-001.tar") for command in cut) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_two_processes_train_on_one_shard(recipes, scenes, tmp_path, workers):
    """Both processes read parts of the same shard, and train as one process does."""
    shards = write_shards(tmp_path / "shards", scenes, count=1)
    values = [f"data.stream={shards}/train-*.tar", f"training.workers={workers}", "epochs=1"]
    for world_size in (1, 2):
        ranks = start_ranks(
            tmp_path / f"r{world_size}",
            world_size,
            "train",
            recipes["pixels"],
            "--data",
            scenes,
            "--out",
            tmp_path / f"{world_size}",
            *values,
        )
        assert [command.wait(100) for command in ranks] == [0] * world_size, ranks[0].output_text
    check_equal(tmp_path / "2", tmp_path / "1", 1e-5)


def write_shards(folder: Path, scenes: Path, count: int = 4) -> Path:
    """Shards with the training images of scenes."""
    webdataset = pytest.importorskip(
        "webdataset", reason="webdataset is not installed: pip install -e '.[dev]'"
    )
    split = open_dataset(scenes).split("train")
    folder.mkdir()
    for shard in range(count):
        with webdataset.TarWriter(str(folder / f"train-{shard:03d}.tar")) as writer:
            for index in range(shard, len(split.images), count):
                image, caption = (
                    split.images[index],
                    split.captions[int(split.captions_of[index][0])],
                )
                writer.write({"__key__": f"{index:05d}", "png": image.read(), "txt": caption})
    return folder


@posix
def test_a_failure_of_one_process_is_reported_once(recipes, scenes, tmp_path):
    """An error that all processes find, and a process that is killed."""
    broken = start_ranks(
        tmp_path / "broken",
        2,
        "train",
        recipes["pooled"],
        "--data",
        scenes,
        "training.batch_size=1",
    )
    assert [command.wait(60) for command in broken] == [1, 1]
    assert sum(command.output_text.count("expected") for command in broken) == 1

    run = tmp_path / "run"
    arguments = ("train", recipes["pooled"], "--data", scenes, "--out", run, "epochs=500")
    killed = start_ranks(tmp_path / "killed", 2, *arguments, program=run_with_short_store_timeout)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(read_log(run)) > 1)
    killed[1].send(signal.SIGKILL)
    assert killed[0].wait(60) == 1
    assert killed[0].output_text.splitlines()[-1].startswith("visavis: A process was killed")
    assert "Traceback" not in killed[0].output_text
    logged = len(read_log(run))
    stopped = start_ranks(tmp_path / "stopped", 2, "train", "--resume", run)
    wait_for(lambda: len(read_log(run)) > logged)
    stopped[1].send(signal.SIGTERM)
    assert [command.wait(60) for command in stopped] == [128 + signal.SIGTERM] * 2
    assert sum(command.output_text.count("Everything is saved") for command in stopped) == 1
    assert stopped[1].output_text == ""


def test_a_restart_of_one_machine_resumes_on_all(recipes, scenes, tmp_path):
    """If a process of one machine was killed, torchrun counts no restart on the others, whose
    processes it starts again, too.
    """
    arguments = ("train", recipes["pooled"], "--data", scenes, "--out", tmp_path / "run")
    visavis.train(recipes["pooled"], data=scenes, out=tmp_path / "run")
    ranks = start_ranks(
        tmp_path / "restarted", 2, *arguments, program=run_as_restarted_on_second_machine
    )
    assert [command.wait(60) for command in ranks] == [0, 0], ranks[0].output_text


def test_commands_that_share_no_work_are_refused(scenes, tmp_path):
    """One process reports it."""
    ranks = start_ranks(tmp_path / "check", 2, "data", "check", scenes, program=run_under_torchrun)
    assert [command.wait(60) for command in ranks] == [1, 1]
    assert ranks[0].output_text == (
        "visavis: data check: expected one process, got 2. Start it without torchrun, which "
        "features and train support.\n"
    )
    assert ranks[1].output_text == ""


def run_under_torchrun() -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    run_visavis()


def test_tasks_of_srun_without_torchrun_give_a_warning(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with (
        pytest.warns(
            UserWarning, match=r"srun: expected one task of torchrun on each machine, got 4 tasks"
        ),
        processes.join_processes() as group,
    ):
        assert group.world_size == 1


def run_as_restarted_on_second_machine() -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    run_visavis()


@posix
def test_a_killed_process_ends_the_others_without_a_collective(tmp_path):
    """Gloo may miss that a process was killed. A process that works longer than the others, which
    were stopped, is not ended.
    """
    killed = start_ranks(tmp_path / "killed", 3, program=wait_for_a_killed_process)
    assert [command.wait(60) for command in killed] == [1, 1, -signal.SIGKILL]
    assert (
        killed[0].output_text.startswith("A process was killed: 3 processes were expected")
        and not killed[1].output_text
    )

    stopped = start_ranks(tmp_path / "stopped", 2, program=work_longer_than_the_others)
    assert [command.wait(60) for command in stopped] == [3, 3]


def wait_for_a_killed_process() -> None:
    processes.LOSS_GRACE_S = 0.2
    with processes.join_processes() as group:
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def work_longer_than_the_others() -> None:
    processes.LOSS_GRACE_S = 0.2
    with suppress(Stopped, ReportedByOtherProcess), processes.join_processes() as group:
        time.sleep(1 if group.is_first else 0)
        raise Stopped("", signal.SIGTERM)
    sys.exit(3)


def run_with_short_store_timeout() -> None:
    processes.STORE_TIMEOUT_S = 1.0
    run_visavis()


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_one_process_needs_alone_is_refused(recipe, scenes):
    group = ProcessGroup(torch.device("cpu"), distributed_group=False)
    group.world_size = 64
    values = {
        "data.path": str(scenes),
        "objective": "Unified()",
        "phases.0.supervision": "LearnedWeights()",
    }
    with pytest.raises(
        RecipeError,
        match=r"training\.batch_size: expected at least one item for each of 64 processes, got 16",
    ):
        check_processes(read_recipe(str(recipe), values), group)
    with pytest.raises(
        RecipeError,
        match=r"expected one process with LearnedWeights, because its virtual step .*, got 64",
    ):
        check_processes(read_recipe(str(recipe), values | {"training.batch_size": 64}), group)
    assert [kind.__name__ for kind in CATALOG if kind().one_process_only] == [
        "FeedbackSupervision",
        "LearnedWeights",
    ]


@posix
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_torchrun_restarts_after_random_kills(recipe, scenes, tmp_path):
    """20 kills of random processes in the training: torchrun starts all again, and the run ends
    like an undisturbed one.
    """
    overrides = {
        "phases.0.epochs": 40,
        "phases.1.epochs": 40,
        "training.patience": 0,
        "data.path": str(scenes),
    }
    arguments = {"recipe": str(recipe), "overrides": overrides, "out": tmp_path / "whole"}
    in_processes(train_until, (2, tmp_path / "rendezvous", arguments, 0, 0), nprocs=2)
    out, chance, kills = tmp_path / "run", random.Random(0), 0
    options = ["--out", str(out), *(f"{key}={value}" for key, value in overrides.items())]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=40",
        "--monitor-interval=0.2",
    ]
    with (tmp_path / "messages.txt").open("w") as messages:
        process = subprocess.Popen(
            [*launch, "-m", "visavis", "train", str(recipe), *options],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=messages,
        )
        while process.poll() is None and kills < 20:
            step, end = newest_step(out), time.monotonic() + 60
            while process.poll() is None and newest_step(out) == step and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(chance.uniform(0, 2))
            if (
                children := Path(f"/proc/{process.pid}/task/{process.pid}/children")
                .read_text()
                .split()
            ):
                os.kill(int(chance.choice(children)), signal.SIGKILL)
                kills += 1
        assert process.wait(900) == 0
    assert kills == 20
    text = (tmp_path / "messages.txt").read_text()
    assert "Traceback" not in text.replace("To enable traceback see", "")
    assert text.count("visavis: ") <= kills
    check_equal(out, tmp_path / "whole", 1e-9)


def newest_step(run: Path) -> int:
    return max(
        (int(path.name.split("-")[1]) for path in (run / "checkpoint").glob("step-*")), default=-1
    )


def rank_part(rank: int, rendezvous: Path, out: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2
    )
    torch.save(
        ranked(ProcessGroup(torch.device("cpu"), distributed_group=True)), out / f"{rank}.pt"
    )


def ranked(group: ProcessGroup) -> list[torch.Tensor]:
    """Ranks in both directions from many tiles. Rounded vectors give many equal scores."""
    generator = torch.Generator().manual_seed(0)
    images, texts = (
        Encoded((torch.randn(count, 3, generator=generator)).round()) for count in (23, 41)
    )
    ids = torch.arange(23), torch.arange(41) % 23
    queries = rank_by_tiles(
        images,
        texts,
        lambda image, text: image.vectors @ text.vectors.T,
        *ids,
        max_tile=(5, 7),
        group=group,
    )
    return [part for side in queries for part in vars(side).values()]


def test_processes_share_out_ranking_with_equal_results(tmp_path):
    in_processes(rank_part, (tmp_path / "rendezvous", tmp_path), nprocs=2)
    for rank in (0, 1):
        for part, expected in zip(
            torch.load(tmp_path / f"{rank}.pt"), ranked(ONE_PROCESS), strict=True
        ):
            assert torch.equal(part, expected)


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm1d(3, affine=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(images).mean((2, 3)))


def norm_of_part(rank: int, rendezvous: Path, out: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2
    )
    model = TwoNorms()
    synchronize_batch_norm(model, ProcessGroup(torch.device("cpu"), distributed_group=True))
    images = norm_input()[(slice(0, 2), slice(2, 5))[rank]].requires_grad_()
    result = model(images)
    (result * weights_of_loss()[(slice(0, 2), slice(2, 5))[rank]]).sum().backward()
    torch.save(
        [result.detach(), images.grad, model.first.weight.grad, *model.buffers()],
        out / f"{rank}.pt",
    )


def norm_input() -> torch.Tensor:
    return torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0)) * 3 + 1


def weights_of_loss() -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def test_batch_norm_has_the_statistics_of_all_processes(tmp_path):
    in_processes(norm_of_part, (tmp_path / "rendezvous", tmp_path), nprocs=2)
    model, images = TwoNorms(), norm_input().requires_grad_()
    result = model(images)
    (result * weights_of_loss()).sum().backward()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    torch.testing.assert_close(torch.cat([first[0], second[0]]), result)
    torch.testing.assert_close(torch.cat([first[1], second[1]]), images.grad)
    torch.testing.assert_close(first[2] + second[2], model.first.weight.grad)
    for ours, others, expected in zip(first[3:], second[3:], model.buffers(), strict=True):
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(others, expected)
