"""Lightning's finetuning callbacks thaw a part of the model in the midst of training.

DDP does not reduce what was frozen when it wrapped the module; one process is the reference.
"""

import pickle

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import nn
from torch.testing import assert_close

from lightning_fsdp import ScratchFSDPStrategy
from lightning_fsdp.strategies import lightning_internals
from tests.support.trainer import (
    SHARDED,
    Regressor,
    fit,
    make_loader,
    on_trainer_ranks,
    seeded,
    weights_of,
)

THAWED_AT, STOPPED_AT = 1, 2  # epochs


class _Finetuned(Regressor):
    """Its optimizer begins with what is not frozen."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer
        self.backbone = self.blocks[0].up  # one that is a part of a unit
        self.last = nn.Linear(3, 14)  # its bias and that of the backbone have equal values
        nn.init.zeros_(self.last.bias)
        nn.init.zeros_(self.backbone.bias)

    def forward(self, x):
        return self.last(super().forward(x))[:, :3].clone()

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer != "muon":
            return torch.optim.AdamW(trained, lr=0.02)
        trained = [p for p in trained if p.ndim == 2]
        return torch.optim.Muon(trained, lr=0.02)


class _ThawsMatrix(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.backbone)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == THAWED_AT:
            module.backbone.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [module.backbone.weight], "lr": 0.01})


class _ThawsInStep(BaseFinetuning):
    """By Lightning's static method, elsewhere than in the hook for it."""

    def freeze_before_training(self, module):
        self.freeze(module.backbone)

    def finetune_function(self, module, epoch, optimizer):
        pass

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == THAWED_AT:
            self.unfreeze_and_add_param_group(module.backbone, trainer.optimizers[0], lr=0.01)


_CALLBACKS = {
    "adamw": lambda: BackboneFinetuning(THAWED_AT, backbone_initial_ratio_lr=0.5),
    "muon": _ThawsMatrix,
    "adamw in a step": _ThawsInStep,
}


def _train(strategy, folder, optimizer, ckpt_path=None, num_epochs=4, **options):
    trainer, module = fit(
        strategy,
        folder,
        seeded(lambda: _Finetuned(optimizer)),
        make_loader(8, batch_size=8 if strategy == "auto" else 4),
        ckpt_path,
        max_epochs=num_epochs,
        callbacks=[_CALLBACKS[optimizer]()],
        **options,
    )
    trainer.save_checkpoint(folder / f"{num_epochs}.ckpt")
    return {
        "in groups": [len(g["params"]) for g in trainer.optimizers[0].param_groups],
        **weights_of(module),
    }


def _in_other_ways(strategy, resumed_by, folder, **options):
    _train(strategy, folder, "adamw", num_epochs=STOPPED_AT, **options)
    stopped = folder / f"{STOPPED_AT}.ckpt"
    return {
        **{each: _train(strategy, folder, each, **options) for each in ("muon", "adamw in a step")},
        "resumed": _train(resumed_by, folder, "adamw", stopped, **options),
    }


def _on_ranks(rank, world_size, folder):
    found = {each: {"adamw": _train(each, folder / each, "adamw")} for each in SHARDED}
    engines = SHARDED[::2]
    for strategy, resumed_by in zip(engines, engines[1:] + engines[:1], strict=True):
        found[strategy] |= _in_other_ways(strategy, resumed_by, folder / strategy)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on toy runs
def test_what_is_thawed_trains_as_in_one_process_also_after_a_resume(tmp_path, monkeypatch):
    found = on_trainer_ranks(_on_ranks, 2, tmp_path, timeout_s=300.0)[0]
    # By values, Lightning would take one bias of zeros for the other.
    monkeypatch.setattr(BaseFinetuning, "filter_on_optimizer", staticmethod(lambda _, new: [*new]))
    expected = {"adamw": _train("auto", tmp_path, "adamw", devices=1)}
    expected |= _in_other_ways("auto", "auto", tmp_path, devices=1)
    assert expected["adamw"]["in groups"] == [16, 2]
    assert sum(map(len, found.values())) == 15
    for strategy, runs in found.items():
        for name, run in runs.items():
            where = f"{strategy}, {name}: "
            assert_close(run, expected[name], atol=1e-6, rtol=1e-5, msg=lambda m, w=where: w + m)


def test_a_run_inside_another_leaves_it_what_the_other_needs():
    by_values = vars(BaseFinetuning)["filter_on_optimizer"]
    outer, inner = ScratchFSDPStrategy(), ScratchFSDPStrategy()
    for strategy, is_on in ((outer, True), (inner, True), (inner, False)):
        lightning_internals.thaw_by_identity(strategy, is_on=is_on)
    assert vars(BaseFinetuning)["filter_on_optimizer"] is not by_values
    lightning_internals.thaw_by_identity(outer, is_on=False)
    assert vars(BaseFinetuning)["filter_on_optimizer"] is by_values


def test_a_callback_can_be_pickled_after_a_run():
    callback = BackboneFinetuning()
    lightning_internals.keep_original_names(callback)
    (group,) = pickle.loads(pickle.dumps(callback))._apply_mapping_to_param_groups(
        [{"params": ["layer.weight"]}], {"_fsdp_wrapped_module.layer.weight": 1}
    )
    assert group == {"params": [1]}
