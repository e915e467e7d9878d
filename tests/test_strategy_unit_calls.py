"""Units that are computed again in the backward, and compiled ones, against DDP without either."""

import copy
import functools
import warnings
import weakref

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_fsdp import ScratchFSDPStrategy
from lightning_fsdp.strategies import unit_calls
from tests.support.access import separately, watched
from tests.support.cases import each_on_trainer_ranks
from tests.support.inductor import needs_inductor
from tests.support.trainer import (
    SHARDED,
    Regressor,
    assert_each_like_ddp,
    assert_like_ddp,
    at_both_stages,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)
from tests.support.versions import TORCH


class _Block(nn.Module):
    """Counts its runs, remembers what it kept for the backward, and draws at random."""

    def __init__(self, width, dropout):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = dropout
        self.num_runs = 0
        self.hidden = None

    def forward(self, x, *, scale):
        self.num_runs += 1
        hidden = F.gelu(self.up(x))
        self.hidden = weakref.ref(hidden)
        return x + scale * F.dropout(self.down(hidden), self.dropout, self.training)


class _Net(pl.LightningModule):
    """Tied embedding and head, so that units share a weight; and a norm of the root's own."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(_Block(6, dropout) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(6))
        self.losses, self.validated, self.num_kept = [], [], []

    def loss(self, batch):
        x = self.embedding(batch) * self.gain
        for block in self.blocks:
            x = block(x, scale=0.5)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.roll(-1, 1).flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.loss(batch).clone())

    def on_before_backward(self, loss):
        self.num_kept.append(sum(block.hidden() is not None for block in self.blocks))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _tokens(num_samples=32):
    tokens = torch.randint(0, 11, (num_samples, 5), generator=torch.Generator().manual_seed(3))
    return DataLoader(tokens, batch_size=4)


def _fit(strategy, folder, model=None, **options):
    model = model or seeded(_Net)
    torch.manual_seed(1)  # dropout
    trainer = make_trainer(strategy, folder, **options)
    trainer.fit(model, _tokens(), _tokens(8))
    return {"weights": weights_of(model), "losses": model.losses, "validated": model.validated}


# -- activation checkpointing ----------------------------------------------------------------------


def _recomputed(strategy, folder, rank):
    strategy = with_options(strategy, activation_checkpointing=True)
    return _fit(strategy, folder, gradient_clip_val=0.5, accumulate_grad_batches=2, max_epochs=2)


def _recomputed_by_class(strategy, folder, rank):
    return _fit(with_options(strategy, activation_checkpointing=["_Block"]), folder)


def _recomputed_offloaded(strategy, folder, rank):
    options = {"activation_checkpointing": True, "cpu_offload": True, "accumulation": "sum"}
    return _fit(with_options(strategy, **options), folder, accumulate_grad_batches=2)


@pytest.mark.quick
def test_recomputed_units_train_as_with_ddp(tmp_path):
    scenarios = [_recomputed, _recomputed_by_class, _recomputed_offloaded]
    assert_each_like_ddp(scenarios, tmp_path)


def _count_runs(rank, world_size, folder):
    for name in (*SHARDED[:2], "fsdp1_zero3", "fsdp2_zero2"):
        for checkpointing, runs, kept in ((None, 1, 3), (True, 2, 0), (["_Block"], 2, 0)):
            model = seeded(_Net)
            _fit(with_options(name, activation_checkpointing=checkpointing), folder, model)
            num_evaluated = len(model.validated)
            for block in model.blocks:
                assert block.num_runs - num_evaluated == runs * len(model.losses), name
            assert model.num_kept == [kept] * len(model.losses), name


def test_recomputed_units_run_twice_and_keep_nothing_inside(tmp_path):
    on_trainer_ranks(_count_runs, 2, tmp_path)


def test_gradients_of_recomputed_units_are_right_at_every_moment(tmp_path):
    names = (*SHARDED[:2], "fsdp1_zero2", "fsdp2_zero3")
    each_on_trainer_ranks(_recomputing, 2, names, watched, ("32-true", str(tmp_path)))


def test_micro_batches_of_recomputed_units_are_kept_apart(tmp_path):
    names = (*SHARDED[:2], "fsdp1_zero3", "fsdp2_zero2")
    each_on_trainer_ranks(_recomputing, 2, names, separately, (str(tmp_path),))


def _recomputing(rank, world_size, strategy, check, arguments):
    check(rank, world_size, with_options(strategy, activation_checkpointing=True), *arguments)


# -- compiled units --------------------------------------------------------------------------------


def _counting_compiler(backend):
    """``torch.compile`` with a backend that counts graphs."""
    import torch._dynamo.testing
    import torch._dynamo.utils

    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return counter, functools.partial(torch.compile, backend=counter)


HOOKS = ("ModuleHooks.on_call", "ModuleHooks._on_return", "skipping FSDP hooks")


def _compiled(strategy, folder, rank):
    return _fit_compiled(strategy, folder)


def _fit_compiled(strategy, folder, make=None, *, backend="aot_eager", engine=None, **options):
    counter, compiler = _counting_compiler(backend)
    before, torch.compile = torch.compile, compiler
    try:
        model = seeded(make or functools.partial(_CompiledNet, dropout=0.0))
        compiled = with_options(strategy, compile=True, **(engine or {}))
        outcome = _fit(compiled, folder, model, **options)
    finally:
        torch.compile = before
    breaks = set(torch._dynamo.utils.counters["graph_break"])
    if TORCH >= (2, 14):  # which count what they leave around a unit, whose forward is one graph
        breaks = {why for why in breaks if not any(hook in why for hook in HOOKS)}
    assert counter.frame_count == 0 if strategy == "ddp" else counter.frame_count > 0
    assert not breaks, (strategy, breaks)
    return outcome


class _CompiledNet(_Net):
    """Without what a compiled block may not do."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.blocks = nn.ModuleList(_Plain(6, dropout) for _ in range(3))

    def on_before_backward(self, loss):
        pass


class _Plain(_Block):
    def forward(self, x, *, scale):
        return x + scale * self.down(F.gelu(self.up(x)))


class _OfFewGraphs(_CompiledNet):
    """Only its blocks are units, without biases: each graph and kernel takes seconds."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.table = nn.Parameter(self.embedding.weight.detach().clone())
        del self.embedding, self.head
        for block in self.blocks:
            block.up.bias = block.down.bias = None

    def loss(self, batch):
        x = F.embedding(batch, self.table) * self.gain
        for block in self.blocks:
            x = block(x, scale=0.5)
        return F.cross_entropy((x @ self.table.T).flatten(0, 1), batch.roll(-1, 1).flatten())


def _compiled_and_recomputed(strategy, folder, rank):
    engine = {"activation_checkpointing": ["_Plain"]}
    return _fit_compiled(strategy, folder, engine=engine, limit_val_batches=0)


@pytest.mark.parametrize(
    ("scenario", "sharded"),
    [
        (_compiled, ("scratch_fsdp_zero2", "fsdp1_zero3", "fsdp2_zero2")),
        (_compiled_and_recomputed, ("scratch_fsdp_zero3", "fsdp1_zero2", "fsdp2_zero3")),
    ],
)
def test_compiled_units_train_as_with_ddp(tmp_path, scenario, sharded):
    assert_like_ddp(scenario, tmp_path, sharded=sharded, timeout_s=280)


@needs_inductor
def test_units_compiled_to_machine_code_train_as_with_ddp(tmp_path):
    sharded = ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3")
    assert_like_ddp(_to_machine_code, tmp_path, sharded=sharded, timeout_s=280)


def _to_machine_code(strategy, folder, rank):
    return _fit_compiled(strategy, folder, _OfFewGraphs, backend="inductor", limit_val_batches=0)


# -- and back --------------------------------------------------------------------------------------


@torch.compiler.set_stance("force_eager")  # what is compiled is called as it is: tracing takes time
def _given_back(rank, world_size, folder):
    for strategy in (*SHARDED[:2], "fsdp1_zero3", "fsdp2_zero2"):
        model = seeded(functools.partial(_CompiledNet, dropout=0.0))
        own = model.blocks[0].forward
        model.blocks[0].forward = own
        model.blocks[1].compile()
        compiled = vars(model.blocks[1])["_compiled_call_impl"]
        options = {"activation_checkpointing": ["_Plain"], "compile": True}
        for _ in range(2):
            _fit(with_options(strategy, **options), folder, model, max_steps=1, limit_val_batches=0)
            assert vars(model.blocks[0])["forward"] is own
            assert vars(model.blocks[1])["_compiled_call_impl"] is compiled
            for name, module in model.named_modules():
                assert not {n for n in vars(module) if "lightning_fsdp" in n}, name
                assert name == "blocks.0" or "forward" not in vars(module), name
                assert name == "blocks.1" or "_compiled_call_impl" not in vars(module), name


def test_the_module_is_given_back_uncompiled_with_its_own_forward(tmp_path):
    on_trainer_ranks(_given_back, 2, tmp_path)


class _FailsOnce(_Net):
    fails = True

    def on_after_backward(self):
        if self.fails:
            self.fails = False
            raise ValueError("once")


@at_both_stages
def _goes_on(strategy, folder, rank):
    model = seeded(_FailsOnce)
    with pytest.raises(ValueError, match="once"):
        _fit(with_options(strategy, activation_checkpointing=True), folder, model)
    outcome = _fit(strategy, folder, model)  # without: every block runs once again
    for block in model.blocks:
        assert "forward" not in vars(block)
    return outcome


def test_after_an_exception_nothing_is_recomputed_that_was_not_asked_for(tmp_path):
    assert_like_ddp(_goes_on, tmp_path)


class _CountsBatches(Regressor):
    def __init__(self):
        super().__init__()
        self.blocks[1].norm = nn.BatchNorm1d(7)


def _refusals(rank, world_size, folder):
    for options, kind, message in (
        ({"activation_checkpointing": True}, _CountsBatches, r"'blocks.1.norm' \(BatchNorm1d\)"),
        (
            {"activation_checkpointing": ["Blok"]},
            Regressor,
            r"got \['Blok'\]. Choose from \['Block'",
        ),
    ):
        for name in SHARDED:
            trainer = make_trainer(with_options(name, **options), folder)
            with pytest.raises(ValueError, match=message):
                trainer.fit(seeded(kind), make_loader())


def test_what_cannot_be_recomputed_is_refused(tmp_path):
    on_trainer_ranks(_refusals, 2, tmp_path)


@pytest.mark.parametrize("wrong", ["Block", 3, [nn.Linear]])
def test_a_wrong_kind_of_option_is_refused(wrong):
    with pytest.raises(TypeError, match=r"expected True .* or a list of class names, got"):
        ScratchFSDPStrategy(activation_checkpointing=wrong)


def test_a_deep_copy_of_a_recomputed_unit_calls_itself():
    net = _Net()
    unit_calls.apply(net, None, checkpointing=True, compiles=False)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.head.weight.zero_()
    assert twin.head(torch.ones(1, 6)).abs().sum() == 0
    assert net.head(torch.ones(1, 6)).abs().sum() > 0
    unit_calls.undo(twin)
    assert "forward" not in vars(twin.head)
    assert "forward" in vars(net.head)
