"""Checkpoints of replicas are those of a flat mesh: resumed exactly, and read by either, or by one.

Ranks 0, 1 hold one model and ranks 2, 3 another. Each writes what it alone has, once.
"""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

from lightning_fsdp import load_sharded
from tests.support.cases import each_on_trainer_ranks
from tests.support.models import tiny_gpt2
from tests.support.resumed import Dropping, keep_checkpoints, run_dropping
from tests.support.trainer import make_trainer, on_trainer_ranks, seeded, weights_of, with_options

pytestmark = pytest.mark.flat("chooses replicas itself")

STEPS = {"replica": 1, "all": 2}  # in the first of two epochs, and at its end
LATER = 3  # in the second
FORMS = {
    "sharded": {"checkpoint": "sharded"},
    "in the background": {"checkpoint": "sharded", "async_save": True},
    "full": {"checkpoint": "full"},
}


def _run(name, folder, form, shard_size, over, **options):
    strategy = with_options(name, shard_size=shard_size, **over, **FORMS[form])
    return run_dropping(strategy, folder, max_epochs=2, is_noisy=False, **options)


def _save_and_resume(rank, world_size, case, folder):
    """The same run with replicas and without, each saved, and each resumed as both."""
    name, form, state_over = case
    folder = folder / "-".join(case)
    wholes, options = {}, {2: {"state_over": state_over}, None: {}}
    for size in (2, None):
        mine = folder / str(size)
        callbacks = [keep_checkpoints(mine)]
        wholes[size] = _run(
            name, mine, form, size, options[size], callbacks=callbacks, enable_checkpointing=True
        )
    # A full file is one process's, and the same of both, as is asserted below.
    others = () if form == "full" else ((2, None), (None, 2))
    for saved, resumed in ((2, 2), *others):
        step = STEPS[state_over] if saved == resumed else LATER
        path = folder / str(saved) / "kept" / f"step={step}.ckpt"
        run = _run(name, folder, form, resumed, options[resumed], seed=1 + rank, ckpt_path=path)
        whole = wholes[saved]
        assert run.numbers == whole.numbers[2 * step :]
        tolerance = 0 if saved == resumed else 1e-6
        for found, expected in (
            (run.losses, whole.losses[2 * step :]),
            (weights_of(run), weights_of(whole)),
        ):
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=10 * tolerance)
    return weights_of(wholes[2]), weights_of(wholes[None])


CASES = [
    ("scratch_fsdp_zero3", "in the background", "replica"),
    ("scratch_fsdp_zero2", "full", "replica"),
    ("scratch_fsdp_zero3", "in the background", "all"),
    ("scratch_fsdp_zero2", "full", "all"),
    ("fsdp2_zero3", "sharded", "replica"),
    ("fsdp1_zero2", "sharded", "replica"),
    ("fsdp1_zero3", "full", "replica"),
]


@pytest.fixture(scope="module")
def saved_and_resumed(tmp_path_factory):
    """The folder, and by case what each rank ended with."""
    folder = tmp_path_factory.mktemp("cases")
    return folder, each_on_trainer_ranks(_save_and_resume, 4, CASES, folder, timeout_s=280)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_run_goes_on_from_a_checkpoint_with_replicas_and_without(saved_and_resumed, case):
    folder, found_by_case = saved_and_resumed
    by_rank = found_by_case[case]
    for with_replicas, flat in by_rank:
        torch.testing.assert_close(with_replicas, flat, atol=1e-6, rtol=1e-5)
    paths = [folder / "-".join(case) / size / "kept" / "step=4.ckpt" for size in ("2", "None")]
    if "full" not in case:  # replicas write nothing twice
        sizes = [_num_bytes(path) for path in paths]
        assert sizes[0] < 1.2 * sizes[1]
    last = [_read(path) for path in paths]
    for found, expected in zip(last, by_rank[0], strict=True):
        torch.testing.assert_close(found[0], expected, atol=0, rtol=0)
    torch.testing.assert_close(last[0][1], last[1][1], atol=1e-6, rtol=1e-4)


def _num_bytes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*.distcp"))


def _read(path):
    """Weights and optimizer state, in one process without a process group."""
    model = seeded(Dropping, 5)
    (optimizer,), _ = model.configure_optimizers()
    if path.is_dir():
        load_sharded(path, model, [optimizer])
    else:
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer_states"][0])
    return weights_of(model), optimizer.state_dict()["state"]


class _Gpt2(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_gpt2(num_blocks=1)

    def training_step(self, batch, batch_idx):
        return self.model(batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        self.trainer.strategy.save_pretrained(self.folder)


def _save_pretrained(rank, world_size, folder):
    weights = {}
    for name in ("scratch_fsdp_zero3", "fsdp2_zero2", "fsdp1_zero3"):
        model = _Gpt2()
        model.folder = folder / name
        tokens = torch.arange(64).view(8, 8)
        trainer = make_trainer(with_options(name, shard_size=2), folder)
        trainer.fit(model, DataLoader(tokens, batch_size=2))
        weights[name] = weights_of(model.model)
    return weights


def test_models_of_transformers_are_written_once(tmp_path):
    weights, *_ = on_trainer_ranks(_save_pretrained, 4, tmp_path)
    for name, expected in weights.items():
        found = GPT2LMHeadModel.from_pretrained(tmp_path / name).state_dict()
        torch.testing.assert_close(dict(found), expected, atol=0, rtol=0)
