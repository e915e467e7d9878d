"""What sharding or an engine cannot do is refused on every rank, before or in training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp import ZERO2, FSDP1Strategy, ScratchFSDPStrategy, fully_shard
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks
from tests.support.trainer import (
    SHARDED,
    Regressor,
    as_torchrun,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)

STRATEGY = SHARDED[0]


class _Graph(TensorBoardLogger):
    """Never gets as far as writing."""

    def __init__(self, folder):
        super().__init__(folder, log_graph=True)


def _refuse_at_setup(rank, world_size, folder):
    for kind, arguments in (
        (WeightAveraging, {}),
        (EMAWeightAveraging, {}),
        (StochasticWeightAveraging, {"swa_lrs": 1e-2}),
        (ModelPruning, {"pruning_fn": "l1_unstructured", "amount": 0.5}),
    ):
        for strategy in SHARDED:
            trainer = make_trainer(strategy, folder, callbacks=[kind(**arguments)])
            message = f"^{kind.__name__} does not work with a sharded"
            with pytest.raises(NotImplementedError, match=message):
                trainer.fit(seeded(Regressor), make_loader())
    with pytest.raises(
        NotImplementedError, match=r"_Graph\(log_graph=True\) runs the model on rank 0"
    ):
        make_trainer(STRATEGY, folder, logger=_Graph(folder)).fit(seeded(Regressor), make_loader())

    wrapped = seeded(Regressor)
    wrapped.head = DistributedDataParallel(wrapped.head)
    with pytest.raises(TypeError, match="head: expected a plain module, got one wrapped in Dist"):
        make_trainer(STRATEGY, folder).fit(wrapped, make_loader())

    with pytest.raises(
        TypeError, match=r"blocks\.1: expected a module that is not sharded.*units="
    ):
        make_trainer(STRATEGY, folder).fit(seeded(_ShardsItself), make_loader())

    lazy = seeded(Regressor)
    lazy.head = nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"parameter 'head.weight'.*lazy"):
        make_trainer(STRATEGY, folder).fit(lazy, make_loader())

    for strategy in (STRATEGY, "fsdp1_zero2"):
        with pytest.raises(ValueError, match=r"order.*Register it as a buffer"):
            make_trainer(strategy, folder).fit(seeded(_Integer), make_loader())

    for strategy in SHARDED:
        compiled = torch.compile(seeded(Regressor))
        with pytest.raises(RuntimeError, match="strategy"):
            make_trainer(strategy, folder).fit(compiled, make_loader())

    for kind, message in (
        (_Hooked, "expected no hook of its gradient"),
        (_Renormalizes, "with max_norm.*Renormalise after the optimizer's step"),
        (_Distributed, r"parameter 'head.weight'.*a DTensor.*Use plain parameters"),
        (_TiedByMemory, "own memory, got that of 'blocks.0.up.weight'.*Register one parameter"),
    ):
        for strategy in (STRATEGY, "fsdp1_zero3", "fsdp2_zero3"):
            with pytest.raises(ValueError, match=message):
                make_trainer(strategy, folder).fit(seeded(kind), make_loader())

    for kind, name in [(_Lbfgs, "LBFGS"), (_Prodigy, "Prodigy")]:
        for strategy in (STRATEGY, "fsdp1_zero3", "fsdp2_zero3"):
            with pytest.raises(NotImplementedError, match=f"{name}.*all of them at once"):
                make_trainer(strategy, folder).fit(seeded(kind), make_loader())

    with pytest.raises(ValueError, match=r"expected classes that occur.*got \['Nothing'\]"):
        make_trainer(ScratchFSDPStrategy(units=["Nothing"]), folder).fit(
            seeded(Regressor), make_loader()
        )
    with pytest.raises(ValueError, match=r"devices=3.*does not match the world size \(2\)"):
        make_trainer(STRATEGY, folder, devices=3).fit(seeded(Regressor), make_loader())

    # None of these has left anything behind.
    model = seeded(Regressor)
    make_trainer(STRATEGY, folder).fit(model, make_loader())
    assert len(weights_of(model)) == 16


class _ShardsItself(Regressor):
    def configure_model(self):
        fully_shard(self.blocks[1])


class _Distributed(Regressor):
    """As tensor parallelism leaves it."""

    def configure_model(self):
        mesh = init_device_mesh("cpu", (2,))
        self.head.weight = nn.Parameter(distribute_tensor(self.head.weight.detach(), mesh))


class _Hooked(Regressor):
    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda gradient: 2 * gradient)


class _Renormalizes(Regressor):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(11, 5, max_norm=1.0)


class _TiedByMemory(Regressor):
    """Trains one weight of two names in plain torch; shards of each would go their own way."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight.data = self.blocks[0].up.weight.data


class _Lbfgs(Regressor):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Prodigy(torch.optim.SGD):
    """Named as one of another package, which sums over all tensors."""


class _Prodigy(Regressor):
    def configure_optimizers(self):
        return Prodigy(self.parameters(), lr=0.1)


def test_what_sharding_cannot_do_is_refused_before_training(tmp_path):
    on_trainer_ranks(_refuse_at_setup, 2, tmp_path)


def _different_modules(rank, world_size, folder, difference):
    as_torchrun(rank, world_size)
    model = seeded(Regressor)
    if difference == "shape":
        model.head = nn.Linear(7, 3 + rank)
    elif difference == "count" and rank == 1:
        model.extra = nn.Linear(2, 2)
    elif difference == "frozen" and rank == 1:
        model.inlet.weight.requires_grad_(False)
    make_trainer(STRATEGY, folder).fit(model, make_loader())


@pytest.mark.parametrize(
    ("difference", "name"), [("shape", "head.weight"), ("count", "extra"), ("frozen", "inlet")]
)
def test_ranks_with_different_modules_are_told_on_every_rank(tmp_path, difference, name):
    errors = errors_on_ranks(_different_modules, 2, tmp_path, difference)
    said = "expected the same parameters and buffers on every rank"
    assert_errors(errors, "ValueError", said, name, "rank 1")


class _UsesWeightsOutside(Regressor):
    def on_train_batch_end(self, *args):
        F.linear(torch.ones(1, 7), self.head.weight)


class _SavesItself(Regressor):
    def on_train_batch_end(self, *args):
        torch.save(self.state_dict(), "/dev/null")


def _refuse_in_training(rank, world_size, folder):
    for kind, error, message in (
        (_UsesWeightsOutside, RuntimeError, "'head.weight'.*a whole tensor.*around.*units="),
        (_SavesItself, TypeError, "full_state_dict"),
    ):
        model = seeded(kind)
        with pytest.raises(error, match=message):
            make_trainer(STRATEGY, folder).fit(model, make_loader())
        # The same module can be used at once: here with its first steps taken.
        make_trainer(STRATEGY, folder).validate(model, make_loader(), verbose=False)
        assert all(type(w) is torch.Tensor for w in weights_of(model).values())


def test_what_would_be_wrong_on_slices_is_refused_and_the_module_survives(tmp_path):
    on_trainer_ranks(_refuse_in_training, 2, tmp_path)


def test_flat_parameters_of_fsdp1_are_refused(tmp_path):
    with pytest.raises(NotImplementedError, match=r"use_orig_params=False.*flat.*Leave it at True"):
        FSDP1Strategy(zero_stage=2, use_orig_params=False)
    assert FSDP1Strategy(zero_stage=2, use_orig_params=True).engine.plan == ZERO2


def _flat(rank, world_size):
    def wrapped(model, use_orig_params):
        return FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )

    names, shapes = [], []
    for use_orig_params in (True, False):
        model = wrapped(
            seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))), use_orig_params
        )
        model(torch.ones(2, 5)).sum().backward()
        names.append([name for name, p in model.named_parameters()])
        shapes.append([p.dim() for p in model.parameters()])
        reads = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
        if use_orig_params:
            with reads:
                assert [p.grad.dim() for p in model.parameters()] == [2, 1, 2, 1]
        else:
            with pytest.raises(NotImplementedError, match="with_grads=True"), reads:
                pass
    assert len(names[0]) == 4
    assert [name.split(".")[-1] for name in names[1]] == ["_flat_param"], names
    assert shapes[1] == [1]

    frozen = nn.Linear(5, 4)
    frozen.bias.requires_grad_(False)
    wrapped(copy.deepcopy(frozen), True)
    with pytest.raises(ValueError, match="uniform `requires_grad`"):
        wrapped(frozen, False)


def test_flat_parameters_of_fsdp1_lack_what_their_refusal_says():
    """In torch itself; should it learn this one day, the refusal may go."""
    run_on_ranks(_flat, 2)


class _ByHand(Regressor):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class _OwnsByHand(_ByHand):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class _TwoByHand(_ByHand):
    def configure_optimizers(self):
        halves = self.blocks.parameters(), self.head.parameters()
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


class _Scalar(Regressor):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class _Empty(Regressor):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.ones(0, 3))


class _Integer(Regressor):
    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)


class _View(nn.Linear):
    """Gives a view, as ``nn.Linear`` does before torch 2.15 where the input has three dims."""

    def forward(self, x):
        return super().forward(x)[:]


class _WritesToOutputs(Regressor):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_View(7, 7) for _ in range(2))

    def forward(self, x):
        x = self.inlet(x[None])
        for block in self.blocks:
            x = block(x).relu_()
        return self.head(x)[0]


def _refuse_for_an_engine(rank, world_size, folder):
    for strategy, kind, error, message in (
        ("fsdp1_zero3", _OwnsByHand, NotImplementedError, "'scale'.*one child module"),
        ("fsdp2_zero3", _OwnsByHand, NotImplementedError, "'scale'.*one child module"),
        ("fsdp1_zero3", _TwoByHand, NotImplementedError, "expected one optimizer.*fsdp2"),
        ("fsdp2_zero3", _Scalar, ValueError, "'scale'.*takes no scalar.*shape .1,."),
        ("fsdp2_zero3", _Empty, ValueError, r"'nothing'.*none without elements.*\(0, 3\)"),
        ("fsdp1_zero2", _WritesToOutputs, (ValueError, RuntimeError), "in states|setStorage"),
    ):
        model = seeded(kind)
        with pytest.raises(error, match=message):
            make_trainer(strategy, folder).fit(model, make_loader())
        make_trainer(STRATEGY, folder).validate(model, make_loader(), verbose=False)


def test_what_one_engine_cannot_do_is_refused_with_another_that_can(tmp_path):
    on_trainer_ranks(_refuse_for_an_engine, 2, tmp_path)
