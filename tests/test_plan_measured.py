"""The plan against what is measured: two real ranks under the Trainer, and one real rank of many.

Widths are large for the vocabulary, so that what the engine holds weighs more than the logits.
"""

import functools
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import GPT2Config

from lightning_fsdp import ZERO2, ZERO3, MemoryProbe, shard_model
from lightning_fsdp.engines.autocast import keep_main_dtype
from lightning_fsdp.engines.owned_state import kept_by
from lightning_fsdp.losses import CHUNK_SIZE
from lightning_fsdp.plan.dry_run import PHASES
from lightning_fsdp.plan.models import block_classes, build, config_of
from lightning_fsdp.strategies.precision import POLICIES
from recipes.causal_lm import CausalLM
from recipes.optimizer import OptimizerConfig
from tests.support.cases import each_on_ranks, each_on_trainer_ranks
from tests.support.memory import StorageTracker, optimizer_tensors
from tests.support.planned import BATCH, SEQ_LEN, folder_with, planned
from tests.support.trainer import make_trainer, on_trainer_ranks, with_options

pytestmark = pytest.mark.usefixtures("kept_ranks")

STAGES = {2: ZERO2, 3: ZERO3}

TOLERANCE = 0.03


@pytest.fixture
def folder_of(tmp_path):
    return functools.partial(folder_with, folder=tmp_path)


@pytest.fixture
def folder(tmp_path):
    return folder_with("gpt2", tmp_path)


class _Tracks(pl.Callback):
    """The most bytes alive in the backward, by the tests' own tracker."""

    peak = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1 and batch_idx % trainer.accumulate_grad_batches == 0:
            self.tracker = StorageTracker(module, self.see)
            self.tracker.track(list(kept_by(trainer.optimizers[0])))
            self.tracker.__enter__()

    def see(self):
        self.peak = max(self.peak, self.tracker.live_bytes())

    def on_train_end(self, trainer, module):
        self.tracker.__exit__(None, None, None)


class _CausalLM(CausalLM):
    """A recipe of any config; the optimizer is the recipes'."""

    max_seq_len = SEQ_LEN

    def __init__(self, folder, optimizer):
        options = {"pretrained": None, "activation_checkpointing": False, "compile_blocks": False}
        super().__init__(config_of(folder), optimizer=OptimizerConfig(name=optimizer), **options)

    def build(self):
        return build(self.config)

    def blocks(self):
        return []


def _measured(rank, world_size, case, root, batch_size=BATCH, comm="auto"):
    name, stage, precision, grad_accum, checkpointing, optimizer = case
    module, folder = _CausalLM(f"{root}/{name}", optimizer), f"{root}/run"
    probe, tracks = MemoryProbe(steps=[1]), _Tracks()
    classes = block_classes(build(module.config)) if checkpointing else None
    options = {"activation_checkpointing": classes, "comm": comm}
    strategy = with_options(f"scratch_fsdp_zero{stage}", **options)
    trainer = make_trainer(
        strategy,
        Path(folder),
        callbacks=[tracks, probe],
        precision=precision,
        accumulate_grad_batches=grad_accum,
        gradient_clip_val=1.0,
        max_steps=2,
    )
    tokens = torch.zeros(SEQ_LEN, dtype=torch.long)
    rows = [{"input_ids": tokens, "labels": tokens}] * (2 * world_size * grad_accum * batch_size)
    trainer.fit(module, DataLoader(rows, batch_size=batch_size))
    (report,) = probe.reports
    return report.ranks[rank], tracks.peak


CASES = [
    ("gpt2", 2, "32-true", 1, False, "adamw"),
    ("gpt2", 3, "32-true", 1, False, "adamw"),
    ("gpt2", 3, "bf16-true", 1, True, "adamw"),
    ("qwen", 2, "bf16-mixed", 2, True, "adamw"),
    ("qwen", 3, "bf16-mixed", 2, True, "adamw"),
    ("gpt2", 2, "bf16-mixed", 2, False, "muon"),
    ("qwen", 3, "32-true", 1, False, "muon"),
]


@pytest.fixture(scope="module")
def measured_by_case(tmp_path_factory):
    root = tmp_path_factory.mktemp("measured")
    for name in ("gpt2", "qwen"):
        folder_with(name, root)
    return each_on_trainer_ranks(_measured, 2, CASES, str(root), timeout_s=240)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_ranks_take_what_was_planned(folder_of, measured_by_case, case):
    name, stage, precision, grad_accum, checkpointing, optimizer = case
    plan = planned(
        folder_of(name), world_size=2, zero_stage=stage, precision=precision,
        grad_accum=grad_accum, activation_checkpointing=checkpointing, optimizer=optimizer,
        backend="gloo",
    )  # fmt: skip
    # The plan is of the rank that has most.
    measured, tracked = max(measured_by_case[case], key=lambda of_rank: of_rank[1])
    for phase in PHASES:
        found, expected = plan.phases[phase], measured[phase]
        for moment in ("peak", "resting"):
            planned_bytes, bytes_ = getattr(found, moment), getattr(expected, moment)
            assert sum(planned_bytes.values()) == pytest.approx(
                sum(bytes_.values()), rel=TOLERANCE
            ), (phase, moment, planned_bytes, bytes_)
            for owner in ("parameters", "optimizer"):
                assert planned_bytes[owner] == pytest.approx(bytes_[owner], rel=TOLERANCE), phase
    assert plan.peak_bytes == pytest.approx(tracked, rel=TOLERANCE)
    gradients = measured["step"].resting["gradients"]
    assert plan.phases["step"].resting["gradients"] == pytest.approx(gradients, rel=TOLERANCE)


def test_owners_of_what_others_hold_take_what_was_planned(tmp_path):
    """Of four ranks, one owns most, and a rank owns matrices of which it holds no element."""
    folder_with("gpt2", tmp_path)
    options = {"zero_stage": 3, "precision": "32-true", "optimizer": "muon", "backend": "gloo"}
    plan = planned(tmp_path / "gpt2", world_size=4, **options)
    assert len({load.numel + load.copied for load in plan.owners}) > 1
    case = ("gpt2", 3, "32-true", 1, False, "muon")
    # Planned are pairs: of more than two ranks, those that read memory need less.
    of_ranks = on_trainer_ranks(_measured, 4, case, str(tmp_path), BATCH, "pairs")
    kept = [measured["step"].resting["optimizer"] for measured, _ in of_ranks]
    assert len(set(kept)) > 1
    assert plan.phases["step"].resting["optimizer"] == pytest.approx(max(kept), rel=TOLERANCE)
    fullest, _ = of_ranks[kept.index(max(kept))]
    for phase in PHASES:
        peak, planned_peak = (sum(of[phase].peak.values()) for of in (fullest, plan.phases))
        assert planned_peak == pytest.approx(peak, rel=TOLERANCE), phase


def test_several_chunks_of_the_loss_take_what_was_planned(tmp_path):
    """The head's loss is where most memory is needed: its sum in fp32, one chunk of four."""
    config = GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=4096, eos_token_id=0)
    config.save_pretrained(tmp_path / "wide")
    folder, batch_size = tmp_path / "wide", 4 * CHUNK_SIZE // SEQ_LEN
    options = {"world_size": 2, "zero_stage": 3, "precision": "bf16-mixed", "backend": "gloo"}
    plan = planned(folder, **options, batch_size=batch_size, activation_checkpointing=True)
    case = ("wide", 3, "bf16-mixed", 1, True, "adamw")
    _, tracked = on_trainer_ranks(_measured, 2, case, str(tmp_path), batch_size)[0]
    assert plan.peak_bytes == pytest.approx(tracked, rel=TOLERANCE)


def test_owners_are_those_of_a_run(folder):
    """Of 4 blocks of GPT-2 on 8 ranks: 16 matrices, and as many elements as they have."""
    plan = planned(folder, world_size=8, optimizer="muon")
    width = 128
    assert len(plan.owners) == 8
    assert sum(load.numel for load in plan.owners) == 4 * 12 * width**2
    assert max(load.work for load in plan.owners) <= 1.35 * 4 * 28 * width**3 / 8
    rest = plan.num_parameters - 4 * 12 * width**2
    resting = plan.phases["step"].resting["optimizer"]
    # A moment each, and a copy of those that are cut; of the rest, two moments of a slice.
    most = max(load.numel + load.copied for load in plan.owners)
    assert resting == pytest.approx(4 * most + 8 * rest / 8, rel=0.01)
    assert planned(folder, world_size=8).owners is None


def _one_of_many(rank, world_size, case, root):
    name, num_ranks, precision, stage = case
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=fake_pg.FakeStore())
    try:
        model = build(config_of(f"{root}/{name}"))
        mesh = init_device_mesh("cpu", (num_ranks,))
        shard_model(model, STAGES[stage], mesh=mesh, mp_policy=POLICIES[precision])
        keep_main_dtype(model, POLICIES[precision])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
        labels = tokens.clone()
        peak = 0

        def see():
            nonlocal peak
            peak = max(peak, tracker.live_bytes())

        for _ in range(2):
            tracker = StorageTracker(model, see)
            tracker.track([*optimizer_tensors(optimizer), tokens, labels])
            with tracker:
                peak = 0
                with torch.autocast("cpu", torch.bfloat16, precision == "bf16-mixed", False):
                    logits = model(input_ids=tokens, use_cache=False).logits
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
                    del logits
                optimizer.zero_grad()
                loss.backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
        return peak
    finally:
        dist.destroy_process_group()


ONES_OF_MANY = [
    (*case, stage)
    for stage in (2, 3)
    for case in (("gpt2", 8, "32-true"), ("gpt2", 64, "32-true"), ("qwen", 64, "bf16-mixed"))
]


@pytest.fixture(scope="module")
def measured_of_many(tmp_path_factory):
    root = tmp_path_factory.mktemp("of_many")
    for name in ("gpt2", "qwen"):
        folder_with(name, root)
    return each_on_ranks(_one_of_many, 1, ONES_OF_MANY, str(root), backend=None)


@pytest.mark.parametrize("case", ONES_OF_MANY, ids=lambda case: "-".join(map(str, case)))
def test_one_rank_of_many_takes_what_was_planned(folder_of, measured_of_many, case):
    name, num_ranks, precision, stage = case
    options = {"zero_stage": stage, "precision": precision, "loss": "plain"}
    plan = planned(folder_of(name), world_size=num_ranks, **options)
    (measured,) = measured_of_many[case]
    assert plan.peak_bytes == pytest.approx(measured, rel=TOLERANCE)
