"""The strategy over any engine: the Trainer's hooks, in the order in which the Trainer calls them.

    Trainer(...)       precision_plugin=               (ranks and launcher: see processes.py)
    fit(), test() ...  setup_environment               process group
                       tensor_init_context             around LightningModule.configure_model
                       load_checkpoint                 a file: into the module while it is whole
                       setup                           shard; a folder: into the shards;
                                                       then configure_optimizers
                       load_optimizer_state_dict, on_train_start
      each batch       process_dataloader (once), training_step, backward, block_backward_sync
      each save        lightning_module_state_dict, optimizer_state, save_checkpoint
                       on_exception, teardown          the module is whole again; the last save
                                                       in the background is in place

Note: the optimizer is built after sharding. ``configure_optimizers`` then sees parameters in their
original shapes, because a sharded parameter shows the shape of the whole; and state that an
optimizer allocates when it is built (Adagrad) is sharded and on the right device from the start. An
optimizer built before sharding works as well, as parameters keep their identity.

Note: weights are loaded before sharding. Those of a sharded checkpoint are only named then, by
stand-ins without memory, and read by slices right after sharding.
``restore_checkpoint_after_setup`` stays false, so that ``on_load_checkpoint`` may still rebuild the
module, and so that the Trainer passes ``weights_only`` on, which it drops on the other path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelCheckpoint,
    ModelSummary,
    ThroughputMonitor,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.checkpoint import background
from lightning_fsdp.checkpoint.contents import NAMES
from lightning_fsdp.core.ranks.groups import StateOver
from lightning_fsdp.core.sharded_module import ShardedModule
from lightning_fsdp.engines.access import GradientAccess, WeightAccess
from lightning_fsdp.engines.base import Engine, owner_of
from lightning_fsdp.engines.rank_grid import GridChoice, open_grid, rows_of
from lightning_fsdp.engines.undo import give_back
from lightning_fsdp.strategies import (
    lightning_internals,
    random_states,
    training_position,
    unit_calls,
)
from lightning_fsdp.strategies.batches import Lockstep
from lightning_fsdp.strategies.checkpoint import Checkpoints, read_folder
from lightning_fsdp.strategies.checkpoint_io import FullCheckpointIO
from lightning_fsdp.strategies.guards import (
    refuse_num_tokens,
    refuse_other_options,
    refuse_unsupported,
    refuse_unsupported_options,
)
from lightning_fsdp.strategies.nonfinite import NonfiniteGuard, units_by_parameter
from lightning_fsdp.strategies.precision import ShardedPrecision
from lightning_fsdp.strategies.processes import ProcessStrategy
from lightning_fsdp.strategies.saves_at_exceptions import meet_if_interrupted
from lightning_fsdp.strategies.signals import end_together, requeue_together
from lightning_fsdp.strategies.token_mean import TokenMean

# Keys in a checkpoint; a hook of the user may have put "rng_states" there.
_RANDOM_STATES = "lightning_fsdp_rng_states"  # one entry per rank that saved
_MONITORED = "lightning_fsdp_metrics"  # by name


class ShardedStrategy(ProcessStrategy):
    """Trains a sharded LightningModule; how it is sharded is the engine's business.

    Args:
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Writes and reads checkpoint files.
        precision_plugin: Set by the Trainer from ``precision``: 32-true, bf16-true, bf16-mixed or
            16-mixed.
        zero_stage: 2 keeps parameters whole until the optimizer's step, 3 only while they compute.
        units: Which modules are gathered at a time: class names, a predicate on modules, or a
            minimum number of parameters. ``None``: repeated blocks, embeddings, head and what is
            left are found.
        accumulation: ``"local"``: micro-batches communicate no gradient before the last one, and
            hold whole gradients (4 bytes per parameter in fp32). ``"sum"``: every micro-batch is
            reduced into the shard; the mean over replicas is taken with the last one, under FSDP1
            with each.
        checkpoint: How to save. ``"full"``: one file of whole tensors. ``"sharded"``: a folder to
            which each rank writes its slices. Either can be loaded, whatever is chosen here.
        checkpoint_base: ``False``: checkpoints, of either kind, hold no frozen parameters; a run
            that loads one has to build its module with the same frozen values. What is or was
            trained, and all buffers, are saved; if nothing is frozen, that is everything.
        async_save: During a fit, sharded checkpoints are copied to the host and written while
            training goes on. A save waits for the one before, the end of the fit for the last one;
            a checkpoint that is replaced is removed once the next one is in place.
        activation_checkpointing: ``True``: every unit that encloses no other is recomputed in the
            backward, and only its inputs are kept; or the names of classes to do this for.
        shard_size: Number of ranks that hold one model together; each further group of that many
            holds a replica, and gradients are averaged over the replicas too (HSDP). ``"host"``:
            the ranks of a host. ``None``: all ranks.
        device_mesh: The same as ``(replicas, shards)``, or as a ``DeviceMesh`` of these dimensions.
        state_over: ``"all"``: shards and optimizer state are spread over the ranks of all replicas,
            and each rank keeps the part of the weights that its replica gathers from.
            ``"replica"``: over those of a replica. Only ``ScratchFSDPStrategy`` offers ``"all"``.
        cpu_offload: Shards of parameters, gradients and optimizer state live on the host, and the
            optimizer steps there; in pinned memory if there is an accelerator.
        compile: Compile every unit that encloses no other, as ``module.compile()`` does.
        on_nonfinite: What happens if gradients hold NaN or infinity, on all ranks together and
            before anything is clipped or written. ``"raise"``: an error that names where it began.
            ``"skip"``: the step is skipped. ``None``: gradients are not checked.
        weigh_by: Key of ``training_step``'s dictionary or of the batch with the number of tokens
            (or a tensor of numbers) that the loss is the mean of: the gradients are those of the
            mean over all tokens of the optimizer step. ``None``: ``num_tokens`` of the dictionary,
            if it is there.
        process_group_backend: ``None``: NCCL for CUDA, gloo for CPU.
        timeout: Time limit of the process group.
        others: Not accepted; options of other FSDP strategies are refused with the name to use.

    Raises:
        NotImplementedError: An option, or a combination of options, is not supported.
        ValueError: An option has a value that does not exist.
        TypeError: An option has the wrong type, or does not exist.
    """

    engine_class: ClassVar[type[Engine]]

    engine: Engine
    _checkpoints: Checkpoints
    _precision: ShardedPrecision
    _lockstep: Lockstep | None = None  # of the running fit, validate, test or predict
    _is_interrupted = False  # an exception was seen: other ranks may be anywhere
    _is_in_step = False  # of an evaluation
    _end_if_told: Callable[[], None]  # before the same batch on all ranks
    _world: Callable[[], dist.ProcessGroup | None]  # for which ranks were put into replicas
    _random_states: list[dict[str, Any]] | None = None  # of a checkpoint, until training starts
    _monitored: dict[str, Tensor] | None = None  # likewise

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        zero_stage: Literal[2, 3] = 3,
        units: list[str] | int | Callable[[nn.Module], bool] | None = None,
        accumulation: Literal["local", "sum"] = "local",
        checkpoint: Literal["full", "sharded"] = "full",
        checkpoint_base: bool = True,
        async_save: bool = False,
        activation_checkpointing: list[str] | bool | None = None,
        shard_size: int | Literal["host"] | None = None,
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        state_over: StateOver = "replica",
        cpu_offload: bool = False,
        compile: bool = False,  # noqa: A002 (a public name)
        on_nonfinite: Literal["raise", "skip"] | None = None,
        weigh_by: str | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **others: Any,
    ) -> None:
        refuse_other_options(type(self).__name__, others)
        refuse_unsupported_options(
            checkpoint=checkpoint,
            checkpoint_base=checkpoint_base,
            async_save=async_save,
            activation_checkpointing=activation_checkpointing,
            accumulation=accumulation,
            cpu_offload=cpu_offload,
            compiles=compile,
            on_nonfinite=on_nonfinite,
            weigh_by=weigh_by,
            timeout=timeout,
        )
        self._grid_choice = GridChoice(shard_size, device_mesh, state_over)
        if state_over == "all" and not self.engine_class.offers_state_over_all:
            raise NotImplementedError(
                f"{type(self).__name__}(state_over='all'): torch's engine keeps optimizer state "
                "with the shards of a replica. Use ScratchFSDPStrategy, or leave it at 'replica'."
            )
        self.engine = self.engine_class(zero_stage=zero_stage, units=units, cpu_offload=cpu_offload)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._activation_checkpointing = activation_checkpointing
        self._compiles = compile
        self._checkpoints = Checkpoints(
            self.engine,
            saves_sharded=checkpoint == "sharded",
            saves_in_background=async_save,
            saves_base=checkpoint_base,
        )
        self._communicates_every_micro_batch = accumulation == "sum"
        self._on_nonfinite = on_nonfinite
        self._weigh_by = weigh_by
        self._world = lambda: None

    def __repr__(self) -> str:
        # The Trainer of pytorch_lightning shows it where it refuses a strategy that is not its own.
        return f"<{type(self).__name__}, for the Trainer of lightning.pytorch>"

    # -- access ------------------------------------------------------------------------------------

    @property
    def gradients(self) -> GradientAccess:
        """Gradients by original name, while a module is sharded."""
        return self.engine.gradients

    @property
    def weights(self) -> WeightAccess:
        """Parameters by original name, while a module is sharded."""
        return self.engine.weights

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "during or after fit, test or predict"
        return self.lightning_module

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same shard; available once there are processes."""
        return self.engine.grid.num_copies

    @property
    def mean_loss(self) -> Tensor | None:
        """The mean over all tokens of the last optimizer step, 0-d fp32, equal on every rank.

        ``None`` unless ``training_step`` returns ``num_tokens``. Available from
        ``on_after_backward`` of the step's last micro-batch on.
        """
        token_mean = self.precision_plugin.token_mean
        return None if token_mean is None else token_mean.loss

    @property
    def num_skipped_steps(self) -> int:
        """Number of optimizer steps that ``on_nonfinite="skip"`` has skipped in the last fit."""
        guard = self.precision_plugin.nonfinite
        return 0 if guard is None else guard.num_skipped

    def trace_activations(self) -> None:
        """Let the error or warning of ``on_nonfinite`` also name an activation, in this fit."""
        if self.precision_plugin.nonfinite is not None:
            self.precision_plugin.nonfinite.watch_activations()

    def save_pretrained(
        self,
        directory: str | PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        tokenizer: Any = None,
        merge_adapters: bool = False,
    ) -> None:
        """Write the model of transformers that is trained, for ``from_pretrained``. Collective.

        See :func:`~lightning_fsdp.save_pretrained`.
        """
        from lightning_fsdp.checkpoint.pretrained import save_pretrained

        save_pretrained(
            self._module,
            directory,
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            merge_adapters=merge_adapters,
        )

    def save_adapters(
        self, directory: str | PathLike[str], *, adapter_name: str = "default"
    ) -> None:
        """Write the adapters of peft that are trained, in peft's own files. Collective.

        See :func:`~lightning_fsdp.save_adapters`.
        """
        from lightning_fsdp.checkpoint.adapters import save_adapters

        save_adapters(self._module, directory, adapter_name=adapter_name)

    # -- Trainer.__init__ ------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        # Made when it is asked for: a Trainer takes no plugin if the strategy has one.
        if self._checkpoint_io is None:
            self._checkpoint_io = FullCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    @override
    def precision_plugin(self) -> ShardedPrecision:
        return self._precision

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision = ShardedPrecision.of(plugin)
        self._precision.engine = self.engine
        if self._precision.scaler is not None:
            self._precision.scaler = self.engine.agreeing(self._precision.scaler)
        # Where the Trainer looks for a plugin that the user gave to the strategy.
        self._precision_plugin = None if plugin is None else self._precision

    @override
    def _configure_launcher(self) -> None:
        # The Trainer has set the number of processes; a mistake is found before they start.
        hosts = [host for host in range(self.num_nodes) for _ in range(self.num_processes)]
        rows_of(self._grid_choice, hosts)
        super()._configure_launcher()

    # -- fit, validate, test, predict: before the first batch --------------------------------------

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        trainer = model.trainer  # a rank may raise alone from here on
        lightning_internals.collect_checkpoints_inside(trainer, lambda: self._collecting(trainer))

    # setup, setup_environment and teardown make tensors that the next fit trains. A user may
    # evaluate inside torch.inference_mode(), whose tensors could not be trained.

    @override
    @torch.inference_mode(False)
    def setup_environment(self) -> None:
        super().setup_environment()
        self._is_interrupted = False
        self._random_states = None
        self._monitored = None
        self._checkpoints.forget_what_waits()
        # An exception may have left this module sharded, perhaps under another strategy, or left
        # another module sharded here.
        for module in dict.fromkeys((self.engine.module, self.lightning_module)):
            if module is not None:
                (owner_of(module) or self.engine).make_whole(module)
                if isinstance(module, ShardedModule):  # by the core, and this is another engine
                    give_back(module)
                unit_calls.undo(module)
        self._open_grid()

    def _open_grid(self) -> None:
        """Choose the ranks of each replica, once for as long as there is a process group."""
        world = dist.group.WORLD
        assert world is not None, "it was opened"
        if self._world() is not world:
            self.engine.grid = open_grid(
                self._grid_choice, device_type=self.root_device.type, host=self.node_rank
            )
            self._world = weakref.ref(world)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # With real values, also with empty_init: uninitialised memory is noise unless a checkpoint
        # covers every tensor. On the CPU: the whole module need not fit on the device.
        with self.precision_plugin.tensor_init_context():
            yield

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        background.join_last()  # it may be what is loaded, inside of a fit (LearningRateFinder)
        if Path(path).is_dir():
            return read_folder(path)
        return super().load_checkpoint(path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_checkpoint(self._module, checkpoint, strict=strict)

    @override
    @torch.inference_mode(False)
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module, is_fitting = self._module, trainer.state.fn == TrainerFn.FITTING
        refuse_unsupported(
            trainer,
            module,
            saves_in_background=self._checkpoints.saves_in_background,
            saves_base=not self._checkpoints.base.is_left_out,
            weigh_by=self._weigh_by,
        )
        if is_fitting and (refusal := self._checkpoints.refusal_to_replace(trainer)) is not None:
            raise ValueError(refusal)
        if is_fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.precision_plugin.device_type = self.root_device.type
        self.precision_plugin.convert_module(module)
        lightning_internals.move_metrics(module, self.root_device)
        unit_calls.apply(
            module,
            self.engine.units,
            checkpointing=self._activation_checkpointing,
            compiles=self._compiles,
        )
        self._checkpoints.base.note(module)
        self._lockstep = Lockstep(self.engine)  # configure_optimizers may load
        # If sharded parameters do not show whole shapes, optimizers are built before sharding, as
        # groups for weight decay are chosen by shape.
        if is_fitting and not self.engine.shows_whole_shapes:
            self.setup_optimizers(trainer)
        units = units_by_parameter(module, self.engine.units) if self._on_nonfinite else {}
        self.model_to_device()
        if is_fitting:
            self._watch_numbers(trainer, units)
        self._prepare_callbacks(trainer, module)
        requeue_together(trainer, self._checkpoints)
        self._end_if_told = end_together(trainer)
        # Inference tensors cannot be trained; Lightning knows this of its own FSDP only.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        if is_fitting and self.engine.shows_whole_shapes:
            self.setup_optimizers(trainer)
        take = self.engine.watch_optimizer if is_fitting else self.engine.keep_optimizer
        for optimizer in self.optimizers:
            take(optimizer)
        self.setup_precision_plugin()
        lightning_internals.share_zero_grad(self)

    def _watch_numbers(self, trainer: pl.Trainer, units: Mapping[str, str]) -> None:
        plugin = self.precision_plugin
        plugin.token_mean = TokenMean(self.engine, self.root_device, self._weigh_by)
        plugin.nonfinite = None
        if self._on_nonfinite is not None and units:
            plugin.nonfinite = NonfiniteGuard(
                self.engine,
                self._module,
                units,
                device=self.root_device,
                raises=self._on_nonfinite == "raise",
                log=lambda count: _log(trainer, {"skipped_steps": count}),
            )

    def _prepare_callbacks(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        lightning_internals.thaw_by_identity(self, is_on=True)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, ThroughputMonitor):  # Lightning's
                dtype = self.precision_plugin.compute_dtype
                lightning_internals.tell_of_dtype(callback, self.root_device, dtype)
            elif isinstance(callback, ModelSummary) and module.example_input_array is None:
                # With an example input it also runs the module, for which shapes are not enough.
                lightning_internals.summarize_within(callback, self.engine.with_whole_shapes())
            elif isinstance(callback, ModelCheckpoint) and self._checkpoints.saves_in_background:
                # Else the name of a file that is still being written is used twice, and a
                # checkpoint lost.
                lightning_internals.wait_before_naming(callback, background.join_last)
            elif isinstance(callback, BaseFinetuning):
                lightning_internals.keep_original_names(callback)

    @override
    def model_to_device(self) -> None:
        self.engine.shard(
            self._module,
            device=self.root_device,
            precision=self.precision_plugin.policy,
        )
        self._checkpoints.load_what_waits(self._module)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(
            self._module,
            self.optimizers,
            checkpoint["optimizer_states"],
            checkpoint.get(NAMES),
        )
        self._monitored = checkpoint.get(_MONITORED)
        self._random_states = checkpoint.get(_RANDOM_STATES)
        if self._random_states is not None:
            random_states.restore(self._random_states, self.root_device)

    @override
    def on_train_start(self) -> None:
        trainer = self._module.trainer
        states, self._random_states = self._random_states, None
        if states is not None and training_position.is_inside_epoch(trainer):
            # The Trainer has made the epoch's iterator once more, which may have drawn a number. At
            # the end of an epoch that number belongs to the next one.
            random_states.restore(states, self.root_device)
        training_position.accumulate_as_scheduled(trainer)
        training_position.count_in_own_batches(trainer)
        metrics, self._monitored = self._monitored, None
        if metrics is not None:
            training_position.restore_monitored(trainer, metrics, self.root_device)
            training_position.let_plateaus_step(trainer)
        training_position.leave_finished_epoch(trainer)

    @override
    def on_train_end(self) -> None:
        if self.precision_plugin.token_mean is not None:
            self.precision_plugin.token_mean.raise_problems()

    # -- each batch --------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.world_size == 1 or self._lockstep is None:
            return dataloader
        module = self._module
        data = getattr(module.trainer, "datamodule", None)
        return self._lockstep.wrap(
            dataloader,
            is_training=module.trainer.training,
            allows_empty=module.allow_zero_length_dataloader_with_multiple_devices
            or (data is not None and data.allow_zero_length_dataloader_with_multiple_devices),
        )

    # The module is not wrapped: its methods run as they are, inside the engine, which gathers the
    # parameters that the LightningModule holds itself.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        token_mean, module = self.precision_plugin.token_mean, self._module
        num_micro_batches = module.trainer.accumulate_grad_batches
        # Here, where Lightning clears gradients: the step before may have ended without its last
        # batch.
        if token_mean is not None and module.trainer.fit_loop.batch_idx % num_micro_batches == 0:
            token_mean.begin()
        self._checkpoints.watch_base(module)
        with self.precision_plugin.train_step_context():
            output: STEP_OUTPUT = self.engine.run(module.training_step, *args, **kwargs)
        if not module.automatic_optimization:
            refuse_num_tokens(output)
        elif token_mean is not None:
            batch = args[0] if args else None
            token_mean.note(output, batch, num_micro_batches=num_micro_batches)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate(self._module.validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate(self._module.test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate(self._module.predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_alone = self._module.trainer.state.fn != TrainerFn.FITTING
        if is_alone and self._lockstep is not None and not self._lockstep.is_apart:
            self._end_if_told()
        self._is_in_step = True
        try:
            return self.engine.run(step, *args, **kwargs)
        finally:
            self._is_in_step = False

    @override
    def _before_collective(self, what: str) -> None:
        if self._is_in_step and self._lockstep is not None:
            self._lockstep.check_collective(what)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        reduces_each = self._communicates_every_micro_batch
        if not reduces_each and self.engine.keeps_apart:
            raise RuntimeError(
                "micro_batches('separate'): expected a reduction in each micro-batch, got "
                "accumulation='local', with which there is one in a step. Give the strategy "
                "accumulation='sum'."
            )
        with self.engine.within_replica() if reduces_each else self.engine.no_sync():
            yield

    @override
    def on_validation_start(self) -> None:
        self.engine.broadcast_buffers()  # running statistics differ by rank; DDP evaluates rank 0's

    @override
    def on_validation_end(self) -> None:
        if self._lockstep is not None:
            self._lockstep.meet()

    on_test_end = on_predict_end = on_validation_end

    # -- each save ---------------------------------------------------------------------------------

    @contextmanager
    def _collecting(self, trainer: pl.Trainer) -> Iterator[None]:
        meet_if_interrupted(trainer)
        with self._checkpoints.deferred.collected():
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoints.module_state(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(
            self._module,
            self.optimizers,
            lightning_internals.unwrap_optimizer(optimizer),
        )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        filepath = self.broadcast(filepath)  # it may contain a metric, which may differ by rank
        # Otherwise only weights are saved: asked for, or because a notebook's ranks have ended.
        if "optimizer_states" in checkpoint and dist.is_initialized():
            checkpoint[_RANDOM_STATES] = random_states.collect(self.root_device)
            checkpoint[_MONITORED] = training_position.monitored(self._module.trainer)
        self._checkpoints.note_left_out(checkpoint)
        if self._checkpoints.saves_sharded:
            if storage_options is not None:
                raise TypeError(
                    "save_checkpoint(storage_options=...): expected None with "
                    f"checkpoint='sharded', got {storage_options!r}. Ranks write files to a local "
                    "or shared folder, without a CheckpointIO; use checkpoint='full' for one."
                )
            # Between two runs the module is whole, or still sharded after an exception.
            is_running = self.engine.module is not None and not self._is_interrupted
            self._checkpoints.write_folder(checkpoint, filepath, is_running=is_running)
            return
        optimizers = map(lightning_internals.unwrap_optimizer, self.optimizers)
        self._checkpoints.note_parameter_names(checkpoint, self._module, optimizers)
        io, save = self.checkpoint_io, super().save_checkpoint
        self._checkpoints.write_file(
            checkpoint,
            filepath,
            lambda content: save(content, str(filepath), storage_options),
            takes_stand_ins=type(io) is FullCheckpointIO and io.streams(filepath, storage_options),
        )

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        remove = super().remove_checkpoint
        background.after_saving(lambda: remove(filepath))  # of the one that replaces it

    # -- after the last batch ----------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._is_interrupted = True

    @override
    @torch.inference_mode(False)
    def teardown(self) -> None:
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self._lockstep = None
        lightning_internals.thaw_by_identity(self, is_on=False)
        if self.precision_plugin.nonfinite is not None:
            self.precision_plugin.nonfinite.close()
        if self.lightning_module is not None and not self._is_interrupted:
            background.join_last()  # first: its copy and whole modules may not fit into memory
            self.engine.broadcast_buffers()  # so that all ranks have the same running statistics
            self.engine.make_whole(self.lightning_module)
            unit_calls.undo(self.lightning_module)
            self.lightning_module.cpu()
            if self._layer_sync is not None:
                self._layer_sync.revert(self.lightning_module)
        # After an exception other ranks may be anywhere: nobody is waited for, and the module stays
        # sharded until the next run.
        lightning_internals.optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._is_interrupted:
            background.join_last()  # it has logged its error, which is not why the run ended
        else:
            background.wait_for_saving()


def _log(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
