"""A full checkpoint is made whole as it is written: what hooks see, and what the file holds."""

import copy
import re
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_fsdp import FSDP1Strategy, FSDP2Strategy, ScratchFSDPStrategy, ShardedEMA
from lightning_fsdp.checkpoint.deferred import DeferredTensor
from tests.support.ranks import errors_on_ranks
from tests.support.trainer import (
    SHARDED,
    AdamwRegressor,
    Regressor,
    as_torchrun,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
)

pytestmark = pytest.mark.usefixtures("kept_ranks")

ZERO3 = SHARDED[::2]
STRATEGIES = (ScratchFSDPStrategy, FSDP1Strategy, FSDP2Strategy)


class _Tied(AdamwRegressor):
    """Two names of one weight, and a buffer."""

    def __init__(self):
        super().__init__()
        self.again = self.head
        self.register_buffer("seen", torch.tensor(3))


class _SavesAtEnd(Callback):
    """Saves while the module is sharded; and what the file should be, as plain torch writes it."""

    def __init__(self, path):
        self.path, self.checkpoint = path, None

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.checkpoint = checkpoint

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)
        made = {}

        def whole(tensor):
            if id(tensor) not in made:
                made[id(tensor)] = tensor.full_tensor().clone()  # FSDP2's have room for more
            return made[id(tensor)]

        content = apply_to_collection(self.checkpoint, DeferredTensor, whole)
        if trainer.is_global_zero:
            with Path(f"{self.path}.expected").open("wb") as stream:  # its name would go into it
                torch.save(content, stream)


def _save(rank, world_size, folder, strategy, model=_Tied, **options):
    path = Path(folder) / strategy
    trainer = make_trainer(strategy, Path(folder), callbacks=[_SavesAtEnd(path)], **options)
    trainer.fit(seeded(model), make_loader())


@pytest.mark.parametrize("strategy", ZERO3)
def test_the_file_is_byte_for_byte_what_torch_writes_of_whole_tensors(tmp_path, strategy):
    on_trainer_ranks(_save, 2, str(tmp_path), strategy)
    written = (tmp_path / strategy).read_bytes()
    assert written == Path(f"{tmp_path / strategy}.expected").read_bytes()
    state = torch.load(tmp_path / strategy, weights_only=True)["state_dict"]
    assert state["again.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert len(torch.load(tmp_path / strategy)["optimizer_states"][0]["state"]) == 16


class _Edits(Regressor):
    """Drops, renames and converts; computes with one whole tensor."""

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        assert all(isinstance(value, DeferredTensor) for value in state.values())
        del state["inlet.bias"]
        state["renamed"] = state.pop("inlet.weight")
        state["head.weight"] = state["head.weight"].detach().clone().to(torch.bfloat16)
        state["head.bias"] = copy.deepcopy(state["head.bias"]).cpu().half().double()
        state["doubled"] = 2 * state["renamed"].full_tensor()
        assert repr(state["renamed"]) == (
            "DeferredTensor('inlet.weight', shape=(7, 5), dtype=torch.float32)"
        )


@pytest.mark.parametrize("strategy", ZERO3)
def test_hooks_rename_drop_and_convert_what_is_made_later(tmp_path, strategy):
    on_trainer_ranks(_save, 2, str(tmp_path), strategy, _Edits)
    on_trainer_ranks(_save, 2, str(tmp_path / "plain"), strategy, Regressor)
    found = torch.load(tmp_path / strategy)["state_dict"]
    plain = torch.load(tmp_path / "plain" / strategy)["state_dict"]
    assert "inlet.bias" not in found
    assert torch.equal(found["renamed"], plain["inlet.weight"])
    assert torch.equal(found["doubled"], 2 * plain["inlet.weight"])
    assert torch.equal(found["head.weight"], plain["head.weight"].bfloat16())
    assert torch.equal(found["head.bias"], plain["head.bias"].half().double())


class _Computes(Regressor):
    compute = None

    def on_save_checkpoint(self, checkpoint):
        self.compute(checkpoint["state_dict"]["head.bias"])


def _numpy(tensor):
    tensor.numpy()


def _item(tensor):
    tensor[0].item()


def _add(tensor):
    torch.ones(3) + tensor


def _pickled(tensor):
    torch.save(tensor, "/dev/null")


def _compute(rank, world_size, folder, compute):
    as_torchrun(rank, world_size)
    model = seeded(_Computes)
    model.compute = compute
    path = Path(folder) / "file"
    trainer = make_trainer("scratch_fsdp", Path(folder), callbacks=[_SavesAtEnd(path)])
    trainer.fit(model, make_loader())


@pytest.mark.parametrize("compute", [_numpy, _item, _add, _pickled])
def test_a_hook_that_needs_values_is_told_how_to_get_them(tmp_path, compute):
    for error in errors_on_ranks(_compute, 2, str(tmp_path), compute):
        assert error is not None
        assert re.search(
            r"of 'head.bias' in a checkpoint: .*tensor.full_tensor\(\) on every rank", error.message
        )
    assert not (tmp_path / "file").exists()


class _KeepsOld(Regressor):
    old = None

    def on_save_checkpoint(self, checkpoint):
        if self.old is None:
            self.old = checkpoint["state_dict"]["head.bias"]
        checkpoint["state_dict"]["old"] = self.old

    def on_train_end(self):
        self.trainer.save_checkpoint(self.path)
        self.trainer.save_checkpoint(self.path)


def _keep_old(rank, world_size, folder):
    as_torchrun(rank, world_size)
    model = seeded(_KeepsOld)
    model.path = Path(folder) / "file"
    make_trainer("scratch_fsdp", Path(folder)).fit(model, make_loader())


def test_a_tensor_of_an_earlier_checkpoint_is_not_taken_for_another(tmp_path):
    for error in errors_on_ranks(_keep_old, 2, str(tmp_path)):
        assert error is not None
        assert re.search(r"'head.bias': .* got one of an earlier one", error.message), error


class _TakesMore(Regressor):
    def on_save_checkpoint(self, checkpoint):
        if self.global_rank == 0:
            self.trainer.strategy.lightning_module_state_dict()


def _take_more(rank, world_size, folder):
    as_torchrun(rank, world_size)
    _save(rank, world_size, folder, "scratch_fsdp", _TakesMore)


def test_a_state_dict_taken_on_some_ranks_is_an_error_and_no_hang(tmp_path):
    for error in errors_on_ranks(_take_more, 2, str(tmp_path)):
        assert error is not None
        assert re.search(r"put the same state dicts.*\[(\d+), (?!\1\])\d+\]", error.message), error


class _KeepsWhole(TorchCheckpointIO):
    """Another way to write a file, which is given what it knows."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        types = {type(value) for value in checkpoint["state_dict"].values()}
        assert types == {torch.Tensor}
        super().save_checkpoint(checkpoint, path, storage_options)


def _save_by_plugin(rank, world_size, folder):
    for strategy in STRATEGIES:
        for io, name in ((None, "ours"), (_KeepsWhole(), "theirs")):
            path = Path(folder) / f"{strategy.__name__}.{name}"
            trainer = make_trainer(
                strategy(checkpoint_io=io), Path(folder), callbacks=[_SavesAtEnd(path)]
            )
            trainer.fit(seeded(_Tied), make_loader())


def test_another_checkpoint_io_gets_whole_tensors(tmp_path):
    on_trainer_ranks(_save_by_plugin, 2, str(tmp_path), timeout_s=280)
    for strategy in STRATEGIES:
        ours, theirs = (
            torch.load(tmp_path / f"{strategy.__name__}.{name}") for name in ("ours", "theirs")
        )
        for part in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)


def _average(rank, world_size, folder, strategy):
    path = Path(folder) / strategy
    ema = ShardedEMA(decay=0.5)
    trainer = make_trainer(strategy, Path(folder), callbacks=[ema, _SavesAtMiddle(path)])
    model = seeded(Regressor)
    trainer.fit(model, make_loader())


class _SavesAtMiddle(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)
            self.now = {n: w.full() for n, w in trainer.strategy.weights.items()}
            if trainer.is_global_zero:
                torch.save(self.now, f"{self.path}.now")


@pytest.mark.parametrize("strategy", ZERO3)
def test_an_average_is_written_with_its_values_beside_the_weights(tmp_path, strategy):
    on_trainer_ranks(_average, 2, str(tmp_path), strategy)
    file = torch.load(tmp_path / strategy)
    now = torch.load(f"{tmp_path / strategy}.now")
    assert file["current_model_state"].keys() == file["state_dict"].keys()
    for name, value in file["current_model_state"].items():
        assert torch.equal(value, now[name])
        assert not torch.equal(value, file["state_dict"][name])
