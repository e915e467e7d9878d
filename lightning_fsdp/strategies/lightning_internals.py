"""Every private name of Lightning that is used, one function each, with the reason.

Checked against Lightning 2.6. All of them have been there since 2.0; none has a public twin. A name
that goes away is to be replaced here, and nowhere else. (Members of ``Strategy`` with an underscore
are the interface for subclasses and are overridden where they belong.)
"""

from __future__ import annotations

import atexit
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _destroy_dist_connection,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelCheckpoint,
    ModelSummary,
    ThroughputMonitor,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fsdp.engines.torch_internals import let_go_of_groups, original_name


def collect_checkpoints_inside(
    trainer: pl.Trainer, context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Enter a context whenever the Trainer collects a checkpoint, which no hook tells of."""
    connector = trainer._checkpoint_connector
    collect = type(connector).dump_checkpoint

    def collect_inside(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with context():
            return collect(connector, *args, **kwargs)

    connector.dump_checkpoint = collect_inside  # type: ignore[method-assign]


def is_inside_step(trainer: pl.Trainer) -> bool:
    """Whether the batch that was read last is followed by another of the same optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def step_at_plateaus(trainer: pl.Trainer) -> None:
    """Step each ``ReduceLROnPlateau`` by the epoch that was completed last, if it was whole."""
    epoch_loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    if epoch_loop._num_ready_batches_reached():
        epochs.completed -= 1  # the scheduler's ``frequency`` goes by it, as it was then
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed += 1


def step_at_plateaus_from_now(trainer: pl.Trainer) -> None:
    """Let the fit loop do so at the end of a resumed epoch, too; call when it has begun.

    The public ``restarting`` would be set for the loops inside as well, which still need it.
    """
    trainer.fit_loop._restarting = False


def answer_requeue_by(trainer: pl.Trainer, note: Callable[[int], None]) -> Callable[[int], None]:
    """Give SLURM's signal to requeue to ``note`` instead of the Trainer; call before it is set up.

    Returns:
        What the Trainer does with the signal.
    """
    connector = trainer._signal_connector
    handle = type(connector)._slurm_sigusr_handler_fn
    connector.__dict__["_slurm_sigusr_handler_fn"] = lambda number, _frame: note(number)
    return lambda number: handle(connector, number, None)  # type: ignore[arg-type]


def end_by_agreement(
    trainer: pl.Trainer, of_any_rank: Callable[[bool, bool], Iterable[bool]]
) -> Callable[[], None]:
    """Note a SIGTERM, and end a run where ``of_any_rank`` says that one has heard it, or stops.

    It is asked of that and of ``trainer.should_stop`` after each batch, validation and epoch of a
    fit; what it says of the second becomes ``trainer.should_stop``. A SIGTERM ends a fit between
    two optimizer steps of an epoch, and at the epoch's end. (Before an epoch's first batch what the
    Trainer saves says that the epoch is over, and it would be left out.)

    Returns:
        What asks and ends a run, for other loops to call before a batch.
    """
    connector, fit_loop = trainer._signal_connector, trainer.fit_loop
    loop, is_heard, is_told = fit_loop.epoch_loop, False, False

    def note(number: int, _frame: object) -> None:
        nonlocal is_heard
        launcher = trainer.strategy.launcher
        if not is_heard and launcher is not None:
            launcher.kill(number)  # to the ranks that this one has started
        is_heard = True

    def agree() -> None:
        nonlocal is_told
        is_told, trainer.should_stop = of_any_rank(is_heard, trainer.should_stop)

    def end_if_told() -> None:
        if is_told:
            connector.received_sigterm = True
            raise SIGTERMException

    def agree_and_end() -> None:
        agree()
        end_if_told()

    def on_batch_end(fetcher: Any) -> None:
        agree()  # a batch after which to stop is one after which to validate
        type(loop).on_advance_end(loop, fetcher)
        if not is_inside_step(trainer) and not loop._is_training_done:
            end_if_told()

    def validate() -> Any:
        found = type(loop.val_loop).run(loop.val_loop)
        agree()
        return found

    def on_epoch_end() -> None:
        type(fit_loop).on_advance_end(fit_loop)
        agree_and_end()

    connector.__dict__["_sigterm_notifier_fn"] = note
    loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None
    loop.__dict__["on_advance_end"] = on_batch_end
    loop.val_loop.__dict__["run"] = validate
    fit_loop.__dict__["on_advance_end"] = on_epoch_end
    return agree_and_end


def validate_by_agreement(
    trainer: pl.Trainer, of_any_rank: Callable[[bool], Iterable[bool]]
) -> None:
    """Where a clock tells when to validate, and each rank has its own, go by ``of_any_rank``."""
    loop = trainer.fit_loop.epoch_loop
    if vars(trainer).get("_val_check_time_interval") is None:
        return

    def is_due(fetcher: Any) -> bool:
        return any(of_any_rank(type(loop)._should_check_val_fx(loop, fetcher)))

    loop.__dict__["_should_check_val_fx"] = is_due


def script_launcher(
    environment: ClusterEnvironment, num_processes: int, num_nodes: int
) -> _SubprocessScriptLauncher:
    """Runs the script once per device; where torchrun or SLURM did that, only checks the sizes."""
    return _SubprocessScriptLauncher(environment, num_processes, num_nodes)


def is_notebook() -> bool:
    """Whether this is a notebook or another interactive session, as the Trainer sees it."""
    return _IS_INTERACTIVE


def fork_launcher(strategy: ParallelStrategy) -> _MultiProcessingLauncher:
    """Forks this process once per device for each fit, and brings weights and metrics back."""
    return _MultiProcessingLauncher(strategy, start_method="fork")


def forks(launcher: object) -> bool:
    """Whether ranks are forked from a process that has computed, perhaps."""
    return isinstance(launcher, _MultiProcessingLauncher)


def default_backend(device: torch.device) -> str:
    """``"nccl"`` for CUDA, ``"gloo"`` for CPU, from torch's own table."""
    return _get_default_process_group_backend_for_device(device)


def init_process_group(
    environment: ClusterEnvironment, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Start the default process group, unless there is one; see to it that it is destroyed.

    A group that was there before belongs to whoever made it.
    """
    reset_seed()  # the launcher passes the seed on in the environment
    if dist.is_initialized():
        return
    device_id = None if device.type == "cpu" else device
    store = _store_after_restart(environment, timeout)
    options: dict[str, Any] = {} if store is None else {"store": store}
    _init_dist_connection(environment, backend, timeout=timeout, device_id=device_id, **options)
    atexit.unregister(_destroy_dist_connection)  # Lightning does so for NCCL alone
    atexit.unregister(_end_process_groups)
    atexit.register(_end_process_groups)


def _end_process_groups() -> None:
    """Destroy all groups, and let go of them, so that gloo's threads end.

    Those would touch Python's objects while the interpreter ends, which aborts it now and then:
    "terminate called without an active exception" (pytorch issue 190489).
    """
    _destroy_dist_connection()
    let_go_of_groups()
    gc.collect()


def _store_after_restart(
    environment: ClusterEnvironment, timeout: timedelta | None
) -> Store | None:
    """Where ranks meet that torchrun has started again: its store, without what the last ones left.

    torchrun's store outlives them (pytorch issue 135712), and in it the addresses at which they
    could be reached; who reads those tries them until its time is up. Only on one host: several do
    not agree on the number of restarts.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if attempt == "0" or not is_shared or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    store = TCPStore(
        environment.main_address,
        environment.main_port,
        environment.world_size(),
        is_master=False,
        timeout=timeout or default_pg_timeout,
    )
    return PrefixStore(f"attempt_{attempt}", store)


def set_rank_zero(rank: int) -> None:
    """Tell the two packages that print and log on one rank only which rank this is."""
    for decorator in (rank_zero_only, utilities_rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]


def reduce_tensor(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """All-reduce in place; knows that gloo has no mean."""
    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


def optimizers_to_device(optimizers: list[Optimizer], device: torch.device) -> None:
    """Move optimizer state, except the step counters, which an optimizer wants where they are."""
    _optimizers_to_device(optimizers, device)


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's own optimizer behind the object that ``LightningModule.optimizers()`` returns."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def share_zero_grad(strategy: Strategy) -> None:
    """Let what ``LightningModule.optimizers()`` returns clear gradients as the optimizer does.

    It copies the optimizer's attributes when it is made, which is before an engine adds its own.
    """
    for wrapper in strategy._lightning_optimizers:
        wrapper.__dict__["zero_grad"] = wrapper.optimizer.zero_grad


def move_metrics(module: nn.Module, device: torch.device) -> None:
    """Move torchmetrics, whose states are neither parameters nor buffers; sharding moves those."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.to(device)


def tell_of_dtype(callback: ThroughputMonitor, device: torch.device, dtype: torch.dtype) -> None:
    """Let Lightning's monitor know in which dtype is computed; it takes fp32 by default.

    It asks the precision plugin for its class, and knows Lightning's alone.
    """
    callback.available_flops = get_available_flops(device, dtype)
    for throughput in callback._throughputs.values():
        throughput.available_flops = callback.available_flops


def summarize_within(callback: ModelSummary, context: AbstractContextManager[Any]) -> None:
    """Let the summary of the next fit look at the module inside of a context."""

    def on_fit_start(trainer: Any, module: Any) -> None:
        del callback.__dict__["on_fit_start"]
        with context:
            callback.on_fit_start(trainer, module)

    callback.__dict__["on_fit_start"] = on_fit_start


_compares_values = vars(BaseFinetuning)["filter_on_optimizer"]  # a static method
_compare_identities: weakref.WeakSet[Strategy] = weakref.WeakSet()  # one may run inside another


def thaw_by_identity(strategy: Strategy, *, is_on: bool) -> None:
    """Let Lightning, while any asks for it, see by identity which parameters an optimizer has.

    It compares values, of which slices without elements have none: ranks would thaw different ones.
    """
    (_compare_identities.add if is_on else _compare_identities.discard)(strategy)
    found: Any = staticmethod(_not_in) if _compare_identities else _compares_values
    BaseFinetuning.filter_on_optimizer = found  # type: ignore[method-assign]


def _not_in(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in params if id(p) not in known]


def keep_original_names(callback: BaseFinetuning) -> None:
    """Let the callback find parameters after a resume; it has names as torch's wrappers do."""
    callback.__dict__["_apply_mapping_to_param_groups"] = _with_original_names


def _with_original_names(
    groups: list[dict[str, Any]], mapping: Mapping[Any, Any]
) -> list[dict[str, Any]]:
    named = {_original(key): _original(value) for key, value in mapping.items()}
    return BaseFinetuning._apply_mapping_to_param_groups(groups, named)


def _original(value: Any) -> Any:
    return original_name(value) if isinstance(value, str) else value


def wait_before_naming(callback: ModelCheckpoint, wait: Callable[[], None]) -> None:
    """Let the callback wait before it asks whether a file exists, to come to a new name."""

    def file_exists(path: Any, trainer: Any) -> bool:
        wait()
        return type(callback).file_exists(callback, path, trainer)

    callback.__dict__["file_exists"] = file_exists


def runs_the_model_on_one_rank(logger: Logger) -> bool:
    """Whether a logger will trace the model, which it does on rank 0 only. No public attribute."""
    return bool(vars(logger).get("_log_graph"))  # a DummyLogger has every attribute
