"""Runs of Lightning's Trainer on ranks, for comparing a strategy with DDP on the same run."""

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fsdp
from lightning_fsdp.engines.rank_grid import GridChoice
from lightning_fsdp.strategies.registry import NAMES
from lightning_fsdp.strategies.sharded import ShardedStrategy
from tests.support import ranks
from tests.support.processes import told_by_torchrun
from tests.support.ranks import run_on_ranks

SHARDED = (
    "scratch_fsdp_zero3",
    "scratch_fsdp_zero2",
    "fsdp1_zero3",
    "fsdp1_zero2",
    "fsdp2_zero3",
    "fsdp2_zero2",
)
ORACLE = "ddp"
# Of each engine, where one of its stages is enough.
STRATEGIES = ["scratch_fsdp_zero2", "scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3", "ddp"]

# A run under a strategy; what it returns is compared. Arguments: strategy name, empty folder, rank.
Scenario = Callable[[str, Path, int], Mapping[str, Any]]


def not_under(*engines: str, reason: str) -> Callable[[Scenario], Scenario]:
    """Leave engines out of a scenario, for a limit of torch's that docs/limits.md tells."""
    assert reason

    def mark(scenario: Scenario) -> Scenario:
        scenario.__dict__["not_under"] = engines
        return scenario

    return mark


def at_both_stages(scenario: Scenario) -> Scenario:
    """Of the core: for what happens while units are whole at the one and not at the other."""
    scenario.__dict__["at_both_stages"] = True
    return scenario


def assert_like_ddp(scenario: Scenario, folder: Path, **options: Any) -> None:
    """``assert_each_like_ddp`` of one scenario."""
    assert_each_like_ddp([scenario], folder, **options)


def assert_each_like_ddp(
    scenarios: Sequence[Scenario],
    folder: Path,
    *,
    oracle: str = ORACLE,
    sharded: tuple[str, ...] | None = None,
    world_size: int = 2,
    atol: float = 1e-6,
    rtol: float = 1e-5,
    timeout_s: float | None = None,
) -> None:
    """Run each scenario under DDP and sharded strategies; on every rank all must be equal.

    By default under every engine at one stage each: which one depends on the scenario's name, so
    that scenarios together see all of them, and both where it is ``at_both_stages``. One runs after
    the other on the same ranks, in a folder of its own; a failure names its scenario.
    """
    run_on_ranks(
        _compare,
        world_size,
        [(scenario, _compared(scenario, sharded)) for scenario in scenarios],
        folder,
        oracle,
        atol,
        rtol,
        timeout_s=timeout_s or min(280.0, 120.0 * len(scenarios)),
    )


def _compared(scenario: Scenario, sharded: tuple[str, ...] | None) -> tuple[str, ...]:
    """The sharded strategies that a scenario is run under."""
    if sharded is None:
        number = zlib.crc32(repr(getattr(scenario, "__name__", "")).encode())
        stage, of_core = 2 + number % 2, 2 + number // 2 % 2
        has_both = getattr(scenario, "at_both_stages", False)
        core = SHARDED[:2] if has_both else (f"scratch_fsdp_zero{of_core}",)
        sharded = (*core, f"fsdp1_zero{stage}", f"fsdp2_zero{5 - stage}")
    left_out = getattr(scenario, "not_under", ())
    return tuple(name for name in sharded if not name.startswith(left_out))


def on_trainer_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """``run_on_ranks``, with an environment in which Lightning sees torchrun."""
    told = fn, args, ranks.active_replicas
    return run_on_ranks(_with_environment, world_size, *told, timeout_s=timeout_s)


def _with_environment(
    rank: int, world_size: int, fn: Callable[..., Any], args: Any, has_replicas: bool
) -> Any:
    as_torchrun(rank, world_size)
    with _in_replicas() if has_replicas else contextlib.nullcontext():
        return fn(rank, world_size, *args)


@contextlib.contextmanager
def _in_replicas() -> Iterator[None]:
    """Strategies that say nothing of replicas have two, as far as their engine can."""
    open_chosen = ShardedStrategy._open_grid

    def open_half(strategy: ShardedStrategy) -> None:
        half = dist.get_world_size() // 2
        is_possible = half >= (2 if isinstance(strategy, lightning_fsdp.FSDP1Strategy) else 1)
        if strategy._grid_choice == GridChoice() and is_possible:
            strategy._grid_choice = GridChoice(half)
        open_chosen(strategy)

    with mock.patch.object(ShardedStrategy, "_open_grid", open_half):
        yield


def _compare(
    rank: int,
    world_size: int,
    compared: list[tuple[Scenario, tuple[str, ...]]],
    folder: Path,
    oracle: str,
    atol: float,
    rtol: float,
) -> None:
    as_torchrun(rank, world_size)
    for number, (scenario, sharded) in enumerate(compared):
        own = folder / str(number)
        try:
            expected = scenario(oracle, _subfolder(own, oracle), rank)
            assert expected, "a scenario that returns nothing compares nothing"
            for strategy in sharded:
                found = scenario(strategy, _subfolder(own, strategy), rank)
                torch.testing.assert_close(
                    dict(found),
                    dict(expected),
                    atol=atol,
                    rtol=rtol,
                    msg=lambda text, s=strategy: f"rank {rank}, {s} against {oracle}: {text}",
                )
        except BaseException as error:
            error.add_note(f"scenario: {getattr(scenario, '__name__', scenario)}")
            raise


def with_options(strategy: str, **options: Any) -> Any:
    """A sharded strategy of that name with options; another name, such as ``ddp``, as it is."""
    if strategy not in NAMES:
        return strategy
    name, _description, arguments = NAMES[strategy]
    return getattr(lightning_fsdp, name)(**arguments, **options)


def _subfolder(folder: Path, strategy: str) -> Path:
    path = folder / strategy
    path.mkdir(parents=True, exist_ok=True)
    return path


def as_torchrun(rank: int, world_size: int) -> None:
    """What torchrun tells a process; and warnings are errors, as in all tests."""
    # The port is never used: the group exists already.
    os.environ.update(told_by_torchrun(rank, world_size, port=29500))
    strict_warnings()


def strict_warnings() -> None:
    """Warnings are errors, except Lightning's advice on the size and loaders of toy runs."""
    from lightning.fabric.utilities.rank_zero import LightningDeprecationWarning
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", PossibleUserWarning)
    for category, message in (
        (LightningDeprecationWarning, "`DDPStrategy.is_distributed` is deprecated"),
        (DeprecationWarning, "`isinstance\\(treespec, LeafSpec\\)`"),
        (FutureWarning, "`isinstance\\(treespec, LeafSpec\\)`"),
        (UserWarning, "Trying to infer the `batch_size`"),
        (UserWarning, "Your `IterableDataset` has `__len__` defined"),
        (UserWarning, "Checkpoint directory .* exists and is not empty"),
        (UserWarning, "Be aware that when using `ckpt_path`"),
        (UserWarning, ".*was called without a model"),  # with an OnExceptionCheckpoint, always
        (UserWarning, ".*there is no last checkpoint available"),  # likewise
        (UserWarning, "Using ModelCheckpoint with manual optimization"),
        (DeprecationWarning, "`torch.jit.script_method` is deprecated"),
        (RuntimeWarning, "Guards may run slower on Python 3.13.0"),
        (FutureWarning, "`is_gradient_checkpointing` is deprecated"),  # peft asks by this name
        (FutureWarning, "torch.distributed.nn.functional.all_gather is deprecated"),
    ):
        warnings.filterwarnings("ignore", message, category)


def make_trainer(strategy: Any, folder: Path, **options: Any) -> pl.Trainer:
    """A quiet Trainer on two CPU ranks (``devices`` to change)."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "2")),
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of everything in the state dict; it must be whole and plain, on the CPU."""
    state = {}
    for name, value in module.state_dict().items():
        assert type(value.data) is Tensor, (name, type(value))
        assert value.device.type == "cpu", (name, value.device)
        state[name] = value.detach().clone()
    return state


class Block(nn.Module):
    """A residual block; repeated, so that it is found as a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Regressor(pl.LightningModule):
    """Odd sizes, so that nothing divides by the number of ranks."""

    def __init__(self, width: int = 7, num_blocks: int = 2, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.inlet = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 3)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def make_data(num_samples: int = 32, seed: int = 0) -> TensorDataset:
    """Samples that differ, the same on every rank; the Trainer's sampler deals them out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 5, generator=generator)
    y = torch.randn(num_samples, 3, generator=generator)
    return TensorDataset(x, y)


def make_loader(num_samples: int = 32, batch_size: int = 4, seed: int = 0, **options: Any) -> Any:
    """A loader over :func:`make_data`."""
    return DataLoader(make_data(num_samples, seed), batch_size=batch_size, **options)


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """Build something from a fixed random state."""
    torch.manual_seed(seed)
    return make()


class AdamwRegressor(Regressor):
    fused = False

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, fused=self.fused)


def fit(
    strategy: Any,
    folder: Path,
    model: Any = None,
    loader: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[pl.Trainer, Any]:
    """Train a model, by default a ``Regressor``; gives the Trainer and the model."""
    model = model or seeded(Regressor)
    trainer = make_trainer(strategy, folder, **options)
    trainer.fit(model, loader or make_loader(), ckpt_path=ckpt_path)
    return trainer, model


def outcome_of(trainer: pl.Trainer, model: Any) -> dict[str, Any]:
    """Weights, losses of this rank, and what was logged: for a comparison with DDP."""
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    return {"weights": weights_of(model), "losses": list(model.losses), "metrics": metrics}
