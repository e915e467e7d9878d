"""Ranks that are killed: torchrun starts them again, and the run goes on to the same end."""

from pathlib import Path

import pytest
import torch

from tests.support.jobs import Job

# The part between the lines is what docs/checkpoints.md tells.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
import lightning_fsdp
from tests.support.trainer import Regressor, make_data, make_trainer, weights_of

torch.set_num_threads(1)
folder, strategy, kills = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "kill"
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
KILLED = {0: (5, 1), 1: (9, 0)}  # attempt -> optimizer step, rank

class Model(Regressor):
    def __init__(self):
        super().__init__(lr=0.01)
        self.drop = nn.Dropout(0.3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(self.drop(x)), y)
        where = self.trainer.global_step, self.global_rank
        if kills and batch_idx % 2 and KILLED.get(attempt) == where:
            print(f"KILLED AT STEP {where[0]}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"ATTEMPT {attempt} STEP {where[0]}", flush=True)
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


def _trained(folder: Path, strategy: str, mode: str) -> tuple[dict[str, torch.Tensor], str]:
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = Job(folder, [*launcher, "--max-restarts", "2"], SCRIPT, strategy, mode)
    status, output = job.wait(timeout_s=110)
    assert status == 0, output
    return torch.load(folder / "weights.pt", weights_only=True), output


@pytest.mark.timeout(240)
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("strategy", ["scratch_fsdp_zero3", "fsdp2_zero3"])
def test_a_rank_killed_in_a_step_costs_the_steps_since_the_last_checkpoint(tmp_path, strategy):
    expected, _ = _trained(tmp_path / "whole", strategy, "run")
    found, output = _trained(tmp_path / "killed", strategy, "kill")
    assert "KILLED AT STEP 5" in output
    assert "KILLED AT STEP 9" in output
    first_steps = [
        min(int(line.split()[-1]) for line in output.splitlines() if f"ATTEMPT {i} STEP" in line)
        for i in range(3)
    ]
    assert first_steps == [0, 4, 8]
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
