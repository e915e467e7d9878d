"""What a sharded module can do beyond ``nn.Module``; the names and meanings of torch's FSDP2."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Self, cast

from torch import Tensor, nn

from lightning_fsdp.config import check_reshard_after_forward
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.hooks import ModuleHooks, hooks_of
from lightning_fsdp.core.engine.schedule import Schedule
from lightning_fsdp.core.engine.torch_internals import skip_in_compiling
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.ranks.groups import agree_on
from lightning_fsdp.core.tensors.norms import clip_grad_norm_
from lightning_fsdp.core.tensors.sharded_tensor import convert


def units_in(module: nn.Module) -> list[Unit]:
    """The units of a module and of all modules below it."""
    hooks = [hooks_of(inner) for inner in module.modules()]
    return list(dict.fromkeys(h.unit for h in hooks if h is not None and h.unit is not None))


def schedules_of(modules: Iterable[nn.Module]) -> list[Schedule]:
    """The schedules that run the units of some of these modules."""
    return list(dict.fromkeys(h.schedule for h in map(hooks_of, modules) if h is not None))


@contextlib.contextmanager
def shards_in_place(module: nn.Module) -> Iterator[None]:
    """Put the sharded parameters into the modules meanwhile, also inside a forward."""
    computing = [unit for unit in units_in(module) if unit.has_leaves_installed]
    for unit in computing:
        unit.install_shards()
    try:
        yield
    finally:
        for unit in computing:
            unit.install_leaves()


def _refuse_inside(unit: Unit, what: str) -> None:
    """Refuse what is asked for while a unit computes.

    Raises:
        RuntimeError: It does.
    """
    if unit.has_leaves_installed:
        raise RuntimeError(
            f"unit {unit.name!r} (rank {unit.communicator.mesh_rank}): expected {what} outside of "
            "its forward and backward, got it inside of one, which uses the whole parameters. "
            "Call it after the forward, or the backward."
        )


def _check_conversion(unit: Unit, flat_param: FlatParameter, like: Tensor, ours: set[int]) -> None:
    """Refuse to convert a flat parameter where that is not possible; see ``ShardedModule._apply``.

    Args:
        unit: A unit that uses it.
        flat_param: To be converted.
        like: Has the new dtype and device.
        ours: ``id`` of each parameter of the module that is converted.
    """
    where = f"unit {unit.name!r} (rank {unit.communicator.mesh_rank})"
    if like.device != flat_param.shard.device:
        raise NotImplementedError(
            f"{where}: expected a module that stays on {flat_param.shard.device}, got one that is "
            f"moved to {like.device}. Move it before it is sharded; full_state_dict(module) copies."
        )
    if not like.is_floating_point():
        raise TypeError(f"{where}: expected a floating-point dtype, got {like.dtype}.")
    _refuse_inside(unit, "another dtype")
    if flat_param.gradients != "none":
        raise RuntimeError(
            f"{where}: expected to change its dtype between steps, got gradients that wait to "
            "be reduced. Run the last backward outside no_sync() first, or zero_grad()."
        )
    for parameter in flat_param.parameters:
        if id(parameter) not in ours:
            raise RuntimeError(
                f"{where}: expected to change the dtype of a module with all of the unit's "
                f"parameters, got one without {parameter.spec.name!r}. Convert the unit's "
                "module, or one around it."
            )


class UnshardHandle:
    """The gather that ``unshard(async_op=True)`` started."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units

    def wait(self) -> None:
        """Make the current stream (on CPU: the caller) wait for the whole parameters."""
        for unit in self.units:
            unit.wait_for_unshard()


class ShardedModule(nn.Module):
    """Mixed into the class of every module that was sharded."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module where code calls a module's class (``model[:2]``)."""
        if args or kwargs:  # without any, it is a deepcopy, which gets its attributes later
            return cls.__mro__[cls.__mro__.index(ShardedModule) + 1](*args, **kwargs)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do not call ``__init_subclass__`` of the module's class: no user derives from it here."""

    @skip_in_compiling
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.__call__``; after a Ctrl-C the schedule recovers as after an error."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception:
            raise  # the schedule knows: torch calls the forward hook after an exception
        except BaseException:  # but not after a KeyboardInterrupt
            self._hooks().schedule.interrupt()
            raise

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit ahead of its forward.

        ``parameters()`` still returns the sharded ones; the next forward uses the gathered copy.

        Args:
            async_op: Return at once, with a handle to wait on.

        Returns:
            The handle; ``None`` without ``async_op``.
        """
        handle = UnshardHandle(self._units(recurse=False))
        for unit in handle.units:
            self._hooks().schedule.gathers.start(unit)
        if not async_op:
            handle.wait()
        return handle if async_op else None

    def reshard(self) -> None:
        """Free the whole copy of this module's own unit; the next gather reads every shard anew.

        Raises:
            RuntimeError: It is called inside the unit's forward or backward.
        """
        for unit in self._units(recurse=False):
            self._reshard(unit)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether a backward reduces gradients, or keeps this rank's own for later.

        Args:
            requires_gradient_sync: ``False``: no communication; each rank holds gradients of full
                size until a backward that reduces.
            recurse: Also for units of inner modules.
        """
        for unit in self._units(recurse):
            unit.syncs_gradients = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether a backward that reduces also takes the mean over replicas (HSDP).

        Without replicas it makes no difference.

        Args:
            requires_all_reduce: ``False``: gradients are reduced within the replica only, and add
                up in the shards until a backward that also takes the mean over replicas.
            recurse: Also for units of inner modules.
        """
        for unit in self._units(recurse):
            unit.averages_replicas = requires_all_reduce

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether the whole copy is freed after the backward.

        Args:
            reshard_after_backward: ``False`` keeps it until the optimizer's step.
            recurse: Also for units of inner modules.
        """
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether the whole copy is freed between forward and backward.

        Args:
            reshard_after_forward: ``False`` keeps it.
            recurse: Also for units of inner modules.

        Raises:
            NotImplementedError: It is a number of ranks, which torch's FSDP2 takes.
        """
        check_reshard_after_forward(reshard_after_forward)
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside accumulate this rank's own gradients, without communication."""
        before = {unit: unit.syncs_gradients for unit in units_in(self)}
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, syncs in before.items():
                unit.syncs_gradients = syncs

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's gradients over all ranks by ``factor``.

        This goes for the module's own unit only, as in torch's FSDP2. The default is the number of
        ranks. With 1.0 gradients are sums; dividing these by the number of tokens of all ranks
        gives the gradients of the mean over tokens.

        Args:
            factor: A positive number, the same on every rank: where it is not, the next backward
                is an error on all of them.

        Raises:
            ValueError: It is not a positive, finite number.
        """
        if not 0 < factor < math.inf:
            raise ValueError(
                f"set_gradient_divide_factor: expected a positive number, got {factor!r}."
            )
        for unit in self._units(recurse=False):
            for flat_param in unit.flat_params:
                flat_param.divide_factor = float(factor)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``.

        Collective.

        Args:
            max_norm: The largest norm allowed.
            norm_type: Any p above 0, ``inf`` included.
            error_if_nonfinite: Raise if the norm is NaN or infinite, before anything is scaled.

        Returns:
            The norm before clipping, 0-d, equal on every rank; fp32, or fp64 if a gradient is.

        Raises:
            NonfiniteGradient: ``error_if_nonfinite`` is set and the norm is not finite; raised on
                every rank, with the names of the gradients that are not.
            RuntimeError: A gradient was not reduced yet, or ranks pass different arguments; on
                every rank.
            ValueError: ``max_norm`` is negative, ``norm_type`` not positive, or one of them nan.
        """
        ranks = self._hooks().schedule.communicator
        with shards_in_place(self):
            return clip_grad_norm_(
                self.parameters(), max_norm, norm_type, ranks, error_if_nonfinite=error_if_nonfinite
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, also inside a forward."""
        with shards_in_place(self):
            super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.state_dict``, with sharded values, also inside a forward."""
        with shards_in_place(self):
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.load_state_dict``, from sharded values or whole plain tensors.

        Values are copied with ``assign=True`` as well: parameters stay the sharded ones.

        Raises:
            RuntimeError: It is called inside a forward or backward.
            TypeError: With ``assign=True``, a tensor has another dtype than its parameter.
        """
        # Passed on only if they were given: a class may have defaults of its own.
        options = dict(zip(("strict", "assign"), args, strict=False), **kwargs)
        if options.pop("assign", False):
            self._check_dtypes(state_dict)
        for unit in units_in(self):
            _refuse_inside(unit, "load_state_dict()")  # values in the whole copy would be lost
        return super().load_state_dict(state_dict, **options)

    def _check_dtypes(self, state_dict: Mapping[str, Any]) -> None:
        for name, parameter in self.named_parameters():
            value = state_dict.get(name)
            if isinstance(value, Tensor) and value.dtype != parameter.dtype:
                raise TypeError(
                    f"load_state_dict(assign=True): expected {parameter.dtype} for {name!r}, which "
                    f"the sharded parameter has, got {value.dtype}. Convert the module first "
                    "(.to(dtype)), or use assign=False, which casts."
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply what ``.to()``, ``.half()`` and the like do to each tensor: only dtypes may change.

        Raises:
            RuntimeError: The module computes, gradients wait to be reduced, a flat parameter also
                has parameters that are not in this module, or ranks want other dtypes.
            TypeError: The dtype is not a floating-point one.
            NotImplementedError: It would move to another device.
        """
        ours = {id(parameter) for parameter in self.parameters()}
        schedule, wanted = self._hooks().schedule, dict[FlatParameter, tuple[Unit, Tensor]]()
        for unit in units_in(self):
            for flat_param in unit.flat_params:
                shard, like = flat_param.shard, fn(flat_param.shard.new_empty(0))
                if (like.dtype, like.device) != (shard.dtype, shard.device):
                    wanted[flat_param] = unit, like

        def check() -> list[str]:
            for flat_param, (unit, like) in wanted.items():
                _check_conversion(unit, flat_param, like, ours)
            return [f"convert to {like.dtype} unit {f.name!r}" for f, (_, like) in wanted.items()]

        if wanted:  # ranks of two dtypes would mix up bytes
            agree_on(schedule.communicator, "conversion", check, str)
        for unit in schedule.units:
            if not wanted.keys().isdisjoint(unit.flat_params):
                self._reshard(unit)
        for flat_param, (_, like) in wanted.items():
            convert(flat_param, like.dtype)
        return cast(Self, super()._apply(fn, recurse))  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the module, at any time and without communication; the copy is sharded alike.

        It starts without gradients, as torch's copies do, and without the functions that were
        registered with ``gradients(module)``.

        Raises:
            NotImplementedError: The class has its own ``__deepcopy__``, which leaves something out.
        """
        inherited = getattr(super(), "__deepcopy__", None)
        with shards_in_place(self):
            if inherited is not None:
                copied = inherited(memo)
            else:
                copied = memo[id(self)] = type(self).__new__(type(self))
                state = copy.deepcopy(self.__getstate__(), memo)  # type: ignore[no-untyped-call]
                copied.__setstate__(state)
        if (hooks := hooks_of(copied)) is None:
            raise NotImplementedError(
                f"deepcopy: expected {type(self).__name__}.__deepcopy__ to copy all attributes, "
                "got a module that is not sharded. Build a second model, shard it, and load "
                "full_state_dict(module) into it."
            )
        # Copying one module of a unit copies the unit, and with it the unit's other modules, inside
        # of this call. So the copied unit has sites only when the call for the first module ends.
        unit, schedule = hooks.unit, hooks.schedule
        if unit is not None and unit.flat_params and unit not in schedule.units:
            schedule.add([unit])
        return cast(Self, copied)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is sharded: this rank holds a part of its parameters, and a "
            "process group, so it can be neither pickled (torch.save(module)) nor copied in part "
            "(copy.copy). Save full_state_dict(module), or take copy.deepcopy(module)."
        )

    def _reshard(self, unit: Unit) -> None:
        _refuse_inside(unit, "reshard()")
        unit.reshard(is_stale=True)  # there may have been writes that torch does not count

    def _hooks(self) -> ModuleHooks:
        hooks = hooks_of(self)
        assert hooks is not None, "the class is given together with the hooks"
        return hooks

    def _units(self, recurse: bool) -> list[Unit]:
        unit = self._hooks().unit
        return units_in(self) if recurse else [unit] if unit is not None else []


_REFUSED = {
    "set_modules_to_forward_prefetch": "The order is recorded in the first step.",
    "set_modules_to_backward_prefetch": "The order is recorded in the first step.",
    "set_is_last_backward": "Use set_requires_gradient_sync or no_sync().",
    "set_reduce_scatter_divide_factor": "Use set_gradient_divide_factor.",
    "set_force_sum_reduction_for_comms": "Use set_gradient_divide_factor(1.0) for sums.",
    "set_unshard_in_backward": "Units whose backward reads no weight are not gathered anyway.",
    "set_post_optim_event": "Gathers wait for everything queued on the current stream.",
    "set_allocate_memory_from_process_group_for_comm": "Buffers come from torch's allocator.",
    "set_all_reduce_hook": "The mean over the replicas takes no hook.",
    "set_reduce_scatter_unused_params": "Ranks that used different parameters are always right.",
    "set_reduce_scatter_max_input_buffers": "At most one reduction is in flight.",
    "set_separate_reduce_scatter_group": "One data group serves gathers and reductions.",
    "set_symm_mem_for_comm": "Buffers come from torch's allocator.",
    "reset_iter_state": "It recovers from an exception by itself.",
    "set_keep_unsharded_storage": "Whole copies are freed, and gathered into new memory.",
    "set_manual_backward_finalization": "A backward ends its reductions; use no_sync().",
    "finalize_backward": "A backward ends its reductions by itself.",
    "set_custom_all_gather": "The collectives are chosen by the backend.",
    "set_custom_reduce_scatter": "The collectives are chosen by the backend.",
}


def _refusing(name: str, cure: str) -> Any:
    def refuse(self: ShardedModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} of torch's FSDP2 is not offered here. {cure}")

    refuse.__name__ = name
    refuse.__doc__ = f"Refused. {cure}"
    return refuse


for _name, _cure in _REFUSED.items():
    setattr(ShardedModule, _name, _refusing(_name, _cure))
