"""A step that was left before its last micro-batch is no part of the next one."""

import torch

import lightning_fsdp
from tests.support.trainer import Regressor, make_loader, make_trainer, on_trainer_ranks, seeded

LARGE = 1_000_000  # bytes, a hundred times those of a step


class _Leaves(Regressor):
    """Leaves its first epochs in the middle of a step, which takes more memory."""

    num_left = 0

    @property
    def _is_to_be_left(self):
        return self.current_epoch < self.num_left

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self._is_to_be_left and batch_idx == 1 else None

    def training_step(self, batch, batch_idx):
        if self._is_to_be_left:
            torch.zeros(LARGE, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


def _seen(strategy, folder, num_left):
    """What each callback tells of the one step that is taken."""
    noise = lightning_fsdp.GradientNoiseScale(smoothing=0.0)
    isolation = lightning_fsdp.MicrobatchIsolationProbe(steps=[0])
    access = lightning_fsdp.GradientAccessProbe(steps=[0])
    memory = lightning_fsdp.MemoryProbe(steps=[0])
    model = seeded(_Leaves)
    model.num_left = num_left
    make_trainer(
        strategy,
        folder,
        callbacks=[noise, isolation, access, memory],
        accumulate_grad_batches=3,
        max_epochs=num_left + 1,
        limit_train_batches=3,
        use_distributed_sampler=False,  # which shuffles by the epoch
    ).fit(model, make_loader())
    last = max(i for i, record in enumerate(access.records) if record.moment == "after_zero_grad")
    (of_memory,) = memory.reports
    return {
        "noise": noise.estimate(),
        "micro-batches": isolation.reports,
        "gradients": access.records[last:],
        # Rounded: a thread of gloo may hold what it has sent for a moment longer.
        "memory": [
            {name: sum(phase.peak.values()) * 10 // LARGE for name, phase in phases.items()}
            for phases in of_memory.ranks
        ],
    }


def _left(rank, world_size, folder):
    for strategy in ("scratch_fsdp_zero3", "fsdp2_zero3"):
        found, expected = _seen(strategy, folder, 2), _seen(strategy, folder, 0)
        for callback, told in expected.items():
            assert found[callback] == told, f"{callback}: {told}, got {found[callback]}"


def test_a_step_that_was_left_is_forgotten(tmp_path):
    on_trainer_ranks(_left, 2, tmp_path)
