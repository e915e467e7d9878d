"""Ranks that are killed: torchrun starts them again, and the run goes on to the same end."""

import functools
import json
import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.support.ranks import ends_on_ranks, run_on_ranks
from tests.support.trainer import as_torchrun

# The part between the lines is what docs/checkpoints.md tells.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
import lightning_fsdp
from tests.support.trainer import Regressor, make_data, make_trainer, weights_of

torch.set_num_threads(1)
folder, strategy, kills = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
killed = kills[attempt] if attempt < len(kills) else None

class Model(Regressor):
    def __init__(self):
        super().__init__(lr=0.01)
        self.drop = nn.Dropout(0.3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(self.drop(x)), y)
        where = [self.trainer.global_step, self.global_rank]
        with open(folder / "steps", "a") as file:  # at once, whoever kills this process
            file.write(f"{attempt} {where[0]}\\n")
        if batch_idx % 2 and killed == where:
            (folder / f"killed-{attempt}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model()
    # ------------------------------------------------------------------------------------
    keep = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_last=True)
    trainer = make_trainer(
        strategy, folder, callbacks=[keep], enable_checkpointing=True,
        max_epochs=3, accumulate_grad_batches=2,
    )
    loader = lightning_fsdp.ResumableLoader(make_data(32), 2, seed=7)
    trainer.fit(model, loader, ckpt_path="last")
    # ------------------------------------------------------------------------------------
    if trainer.is_global_zero:
        torch.save(weights_of(model), folder / "weights.pt")
"""


def _run_script(rank: int, world_size: int, attempt: int, *arguments: str) -> None:
    as_torchrun(rank, world_size)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    warnings.filterwarnings("ignore", ".*there is no last checkpoint available")
    _run(*arguments)


def _run(*arguments: str) -> None:
    sys.argv = ["train.py", *arguments]
    runpy.run_path(str(Path(arguments[0]) / "train.py"), run_name="__main__")


def _trained(folder: Path, strategy: str, kills: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Weights in the end; ``kills`` has the optimizer step and the rank of each attempt's kill."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    for attempt in range(len(kills) + 1):
        arguments = (str(folder), strategy, json.dumps(kills))
        ends = ends_on_ranks(_run_script, 2, attempt, *arguments, timeout_s=40)
        if attempt < len(kills):
            assert ends[kills[attempt][1]] == "died", ends
        else:
            assert ends == ["done", "done"]
    return torch.load(folder / "weights.pt", weights_only=True)


def _assert_killed_and_gone_on(folder: Path, kills: list[tuple[int, int]]) -> None:
    """Each attempt began at the last checkpoint: one is written every second step."""
    steps = [line.split() for line in (folder / "steps").read_text().splitlines()]
    for attempt in range(len(kills) + 1):
        first = min(int(step) for number, step in steps if int(number) == attempt)
        assert first == (kills[attempt - 1][0] - 1 if attempt else 0)
        assert (folder / f"killed-{attempt}").exists() == (attempt < len(kills))


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    """By strategy, the weights in the end."""
    folder = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda strategy: _trained(folder / strategy, strategy, []))


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [("scratch_fsdp_zero3", [(5, 1), (9, 0)]), ("fsdp2_zero3", [(9, 0)])],
    ids=["scratch_fsdp_zero3", "fsdp2_zero3"],
)
def test_a_rank_killed_in_a_step_costs_the_steps_since_the_last_checkpoint(
    tmp_path, never_killed, strategy, kills
):
    expected = never_killed(strategy)
    found = _trained(tmp_path / "killed", strategy, kills)
    _assert_killed_and_gone_on(tmp_path / "killed", kills)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def _run_in_its_own_group(interface: str, *arguments: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    _run(*arguments)


def _launch(rank: int, world_size: int, *arguments: str) -> None:
    """``torchrun --standalone --max-restarts 1``, whose ranks have torch already."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        start_method="forkserver",
    )
    elastic_launch(config, _run_in_its_own_group)(os.environ["GLOO_SOCKET_IFNAME"], *arguments)


def test_torchrun_starts_a_killed_run_again_and_it_ends_in_the_same_bits(tmp_path, never_killed):
    expected = never_killed("scratch_fsdp_zero3")
    folder, kills = tmp_path / "killed", [(5, 0)]
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    arguments = (str(folder), "scratch_fsdp_zero3", json.dumps(kills))
    run_on_ranks(_launch, 1, *arguments, backend=None, timeout_s=280)
    _assert_killed_and_gone_on(folder, kills)
    found = torch.load(folder / "weights.pt", weights_only=True)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
