"""A real run of an arm, where the recipe and the place that it runs in have other intentions."""

from pathlib import Path

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.runner import run_arm

RECIPE = """\
seed_everything: 1
model:
  class_path: recipes.gpt2.GPT2
  init_args: {size: nano}
data: {vocab_size: 300, seq_len: 32, standard_library_mb: 0.3}
trainer:
  {max_epochs: 1, max_time: 00:00:00:01, limit_train_batches: 1, fast_dev_run: true, num_nodes: 2}
"""
IN_A_SLURM_JOB = {
    "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip


def test_an_arm_makes_all_its_steps_on_all_its_ranks(tmp_path: Path, monkeypatch) -> None:
    """A recipe's own end would leave fewer steps, and SLURM's task one rank of two."""
    config = tmp_path / "mine.yaml"
    config.write_text(RECIPE)
    for name, value in IN_A_SLURM_JOB.items():
        monkeypatch.setenv(name, value)
    workload = Workload(
        config=config, num_ranks=2, accelerator="cpu", precision="32-true",
        warmup_steps=1, timed_steps=3, profiled_steps=1, observed_steps=1,
    )  # fmt: skip
    arm = Arm(engine="scratch", zero_stage=3, batch_size=1, grad_accum=2)
    run = run_arm(arm, workload, repeat=0, out=tmp_path, timeout_s=200)
    assert run.failure is None, run.log.read_text()
    assert [len(rank.step_s) for rank in run.ranks] == [3, 3]
    assert [len(rank.losses) for rank in run.ranks] == [12, 12]
    assert run.config is not None, "what the command wrote down"
    assert run.config["trainer"]["accumulate_grad_batches"] == 2
