"""What a strategy saves and loads, in two kinds.

              a file (``"full"``)                               a folder (``"sharded"``)
    saving    every rank takes part; rank 0 gets one            every rank writes its slices
              whole tensor after the other and writes
    loading   every rank maps the file and reads its slices     every rank reads its slices
    read by   plain ``torch.load``, any strategy                strategies of this package

A file: what hooks find in ``checkpoint["state_dict"]`` before it is written are stand-ins for whole
tensors (``checkpoint/deferred.py``), the same on every rank. ``on_save_checkpoint`` runs on every
rank, and may rename, drop and convert them; ``full_tensor()`` of one gives its values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import Optimizer

from lightning_fsdp.checkpoint import mapped
from lightning_fsdp.checkpoint import state as folder_state
from lightning_fsdp.checkpoint.contents import LEFT_OUT, NAMES
from lightning_fsdp.checkpoint.deferred import DeferredCheckpoint, DeferredTensor
from lightning_fsdp.checkpoint.pieces import refuse_pieces
from lightning_fsdp.engines.base import Engine
from lightning_fsdp.engines.native import NativeEngine
from lightning_fsdp.engines.sharded_state import names_in
from lightning_fsdp.strategies.frozen_base import (
    FrozenBase,
    check_left_out,
    check_names,
)


class Checkpoints:
    """Saves and loads what an engine shards; while it does, all of this is collective.

    Attributes:
        deferred: Makes the stand-ins of a file.
        saves_sharded: Whether it saves folders. It loads either.
        saves_in_background: Whether folders are written while training goes on.
        base: What is left out.
    """

    _waiting: tuple[Mapping[str, Any], bool] | None  # for shards; and whether names must match

    def __init__(
        self,
        engine: Engine,
        *,
        saves_sharded: bool,
        saves_in_background: bool,
        saves_base: bool,
    ) -> None:
        """Nothing is loaded yet."""
        self._engine = engine
        self.deferred = DeferredCheckpoint()
        self.saves_sharded, self.saves_in_background = saves_sharded, saves_in_background
        self.base = FrozenBase(is_left_out=not saves_base)
        self._waiting = None

    @contextmanager
    def in_foreground(self) -> Iterator[None]:
        """What is saved in here is in place when the save returns."""
        before, self.saves_in_background = self.saves_in_background, False
        try:
            yield
        finally:
            self.saves_in_background = before

    # -- saving ----------------------------------------------------------------------------------

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """The state dict to save, with stand-ins for what is sharded."""
        self.watch_base(module)
        if self.saves_sharded:
            return self.base.without(self._engine.sharded_state(module).of_module())
        if self._engine.module is None:  # between two runs the module is whole
            return self.base.without(module.state_dict())
        return self.deferred.in_place_of(self.base.without(self._engine.gatherable_state_dict()))

    def watch_base(self, module: nn.Module) -> None:
        """Keep parameters that are trained now in later checkpoints."""
        if self.base.is_left_out:
            self.base.watch(self._engine.sharded_state(module).parameters())

    def note_left_out(self, checkpoint: dict[str, Any]) -> None:
        """Say in a checkpoint what it does not hold, if that is anything."""
        if left_out := self.base.shapes():
            checkpoint[LEFT_OUT] = left_out

    def optimizer_state(
        self, module: nn.Module, optimizers: Sequence[Optimizer], optimizer: Optimizer
    ) -> dict[str, Any]:
        """What the optimizer of an unsharded run would save, with stand-ins.

        Args:
            module: Whose parameters they have.
            optimizers: All of the run.
            optimizer: One of them.
        """
        if self.saves_sharded:
            state = self._engine.sharded_state(module)
            return folder_state.optimizer_state(state, optimizer, optimizers.index(optimizer))
        if not _has_state_of_parameters(optimizer.state_dict()):
            return optimizer.state_dict()
        return self.deferred.in_place_of(self._engine.gatherable_optimizer_state_dict(optimizer))

    def write_folder(
        self, checkpoint: dict[str, Any], path: str | Path, *, is_running: bool
    ) -> None:
        """Write a folder that has those states; in the background, if that is wanted.

        Args:
            checkpoint: The Trainer's, with those states.
            path: Of the folder.
            is_running: Whether a run goes on, which would have to wait and whose end waits.
        """
        in_background = self.saves_in_background and is_running
        write = folder_state.write_in_background if in_background else folder_state.write
        write(path, checkpoint)

    def write_file(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        save: Callable[[dict[str, Any]], None],
        *,
        takes_stand_ins: bool,
    ) -> None:
        """Write a file on rank 0, with all ranks.

        Args:
            checkpoint: The Trainer's, with those states.
            path: For messages.
            save: Writes it, on rank 0.
            takes_stand_ins: Whether it does so by ``torch.save`` into a file, tensor by tensor; if
                not, it is given whole tensors, all of them.
        """

        def write_with_all() -> None:
            refuse_pieces(checkpoint, "checkpoint")
            content = checkpoint
            if not takes_stand_ins:
                whole = functools.cache(DeferredTensor.when_written)  # tied ones are one stand-in
                content = apply_to_collection(checkpoint, DeferredTensor, whole)
            save(content)

        self.deferred.write(f"checkpoint {str(path)!r}", write_with_all)

    def note_parameter_names(
        self, checkpoint: dict[str, Any], module: nn.Module, optimizers: Iterable[Optimizer]
    ) -> None:
        """Add the names of each optimizer's parameters, group by group.

        Optimizer states go by numbers; with these, others can go by name. Parameters that are not
        the module's have the name ``""``.
        """
        if "optimizer_states" not in checkpoint:
            return
        named = dict(module.named_parameters())
        if isinstance(self._engine, NativeEngine) and self._engine.module is not None:
            named = self._engine.parameters
        name_of = {id(parameter): name for name, parameter in named.items()}
        checkpoint[NAMES] = [
            [[name_of.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]

    # -- loading ---------------------------------------------------------------------------------

    def load_checkpoint(
        self, module: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool
    ) -> None:
        """Take the state dict of a checkpoint, which may leave out what the module has.

        Raises:
            ValueError: The module has other parameters than were left out.
            RuntimeError: Other names.
        """
        state, left_out = checkpoint["state_dict"], checkpoint.get(LEFT_OUT)
        self.base.note_loaded(checkpoint)
        if left_out is not None:
            is_sharded = self._engine.module is not None
            with self._engine.with_whole_shapes() if is_sharded else nullcontext():
                named = module.named_parameters(remove_duplicate=False)
                check_left_out(left_out, {name: parameter.shape for name, parameter in named})
            if strict:
                check_names(left_out, state, self._engine.sharded_state(module).of_module())
        self.load_module(module, state, strict=strict and left_out is None)

    def load_module(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
        """Take a state dict: whole tensors, or stand-ins for those of a folder.

        Args:
            module: Sharded or not yet. What only a sharded one can take waits until it is.
            state: By name.
            strict: Whether names must match.
        """
        are_slices = any(map(folder_state.is_stand_in, state.values()))
        # Slices, and values for a module without memory, go into shards.
        needs_shards = are_slices or any(parameter.is_meta for parameter in module.parameters())
        if needs_shards and self._engine.module is None:
            self._waiting = state, strict
        elif are_slices:
            sharded = self._engine.sharded_state(module)
            others = folder_state.read_module(sharded, dict(state), strict)
            if others:  # extra state of modules, and what on_load_checkpoint has put in
                self._load_whole(module, others, strict=False)
        else:
            self._load_whole(module, state, strict=strict)

    def refusal_to_replace(self, trainer: pl.Trainer) -> str | None:
        """Why ``last.ckpt`` could not be saved again, as rank 0 sees it. Collective.

        The run that is resumed may have saved files, and this one folders, or the reverse.
        """
        refusal: str | None = None
        for callback in trainer.checkpoint_callbacks:
            path = Path(getattr(callback, "last_model_path", "") or "none")
            is_there = path.exists() and not path.is_symlink()
            if is_there and path.is_dir() != self.saves_sharded:
                here, there = ("folder", "file") if self.saves_sharded else ("file", "folder")
                refusal = (
                    f"{path}: expected a {here}, as this strategy saves, got a {there}, which "
                    "save_last=True is to replace. Give ModelCheckpoint another dirpath, or the "
                    f"strategy checkpoint={'full' if self.saves_sharded else 'sharded'!r}."
                )
        return trainer.strategy.broadcast(refusal)

    def load_what_waits(self, module: nn.Module) -> None:
        """The module is sharded now."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            state, strict = waiting
            self.load_module(module, state, strict=strict)

    def forget_what_waits(self) -> None:
        """An exception may have ended the run before."""
        self._waiting = None

    def load_optimizers(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        states: Sequence[Mapping[str, Any]],
        names: Sequence[Sequence[Sequence[str]]] | None,
    ) -> None:
        """Each optimizer keeps its slices of a state that is whole, or in a folder.

        Args:
            module: Whose parameters they have.
            optimizers: All of the run.
            states: Of each.
            names: Those of :meth:`note_parameter_names`; without, state goes by places.

        Raises:
            ValueError: Another number of optimizers was saved, another kind, or other groups.
        """
        if not states:  # on_load_checkpoint has taken them out, to begin anew
            return
        if any("saved_under" in state for state in states):
            folder_state.read_optimizers(self._engine.sharded_state(module), optimizers, states)
            return
        folder_state.check_kinds(optimizers, states)
        for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            if _has_state_of_parameters(state):
                folder_state.check_group_sizes(index, optimizer, state)
                if names is not None and not any("" in group for group in names[index]):
                    sharded = self._engine.sharded_state(module)
                    groups = names_in(sharded, optimizer, index)
                    state = folder_state.at_places_here(index, groups, names[index], state)
                read_once = {**state, "state": mapped.ReadOnce(state["state"])}
                self._engine.load_full_optimizer_state_dict(optimizer, read_once)
            else:
                optimizer.load_state_dict(dict(state))

    def _load_whole(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
        """Where the module is sharded every rank keeps its slices."""
        if self._engine.module is None:
            module.load_state_dict(state, strict=strict)
        else:
            self._engine.load_full_state_dict(state, strict=strict)
        mapped.give_back(mapped.tensors_of(state))


def read_folder(path: str | Path) -> dict[str, Any]:
    """A checkpoint as the Trainer wants it, with stand-ins for tensors.

    Raises:
        ValueError: No Trainer has written it.
    """
    checkpoint = folder_state.read_extra(path)
    if "pytorch-lightning_version" not in checkpoint:
        raise ValueError(
            f"{path}: expected a checkpoint of a Trainer, got one of save_sharded, which holds no "
            "loops and hyper-parameters. Read it with load_sharded(path, module, optimizers)."
        )
    return checkpoint


def _has_state_of_parameters(state: Mapping[str, Any]) -> bool:
    # Where configure_optimizers returns None, Lightning puts an optimizer with an empty state dict.
    return "state" in state
