"""Calls the schedule at the events of modules and of autograd.

    module call    ->  pre_forward          (forward pre-hook)
                       recompute            (likewise, inside a backward)
    inputs         ->  leave                (identity node: last in the call's backward)
    outputs        ->  pre_backward         (pre-hook of the nodes that made them)
    written ones   ->  pre_backward         (likewise; of lists and mappings that were passed)
    kept tensors   ->  pre_backward         (likewise; see safety/kept_losses.py)
    input's grads  ->  pre_backward         (likewise, if they have a graph)
    module return  ->  post_forward         (forward hook, called after exceptions too)

Note: outputs
The pre-hook is on ``output.grad_fn`` and, where the output is a view, on the node of its base. A
tensor hook would be lost when the caller writes into the output in place, as ``x += y`` does with
the 3-D output of ``nn.Linear``.

Note: threads
Autograd runs the nodes of each CUDA device, and their hooks, in a thread of that device, and all
others in the thread that called backward. Thread-local state can be read there all the same, since
autograd sets it for every node and every callback:

    current_backward    the running backward, whichever thread it is in
    queued callback     is the backward's, not the thread's; runs where the last node has run
    grad mode           on for create_graph alone; what must not be recorded is under no_grad
    current stream      of the node's forward; in the callback, the caller's, which has waited
    profiler, autocast, dispatch modes      those of the thread that called backward

Two more belong to the thread that runs the forward: the exception that a forward hook looks for,
and the current device. A new Python thread may have another current device and other current
streams; so the device is asked for only when a module is sharded, and a stream is always looked up
for a tensor's device.

A schedule locks nothing in a step: it relies on autograd running one node after the other. So calls
of one model must not overlap, and the outputs of a unit must not need gradients on host and device
at once, as their nodes would run in two threads. Only after a backward that failed is there a lock
(``schedule.recovering``): a thread of autograd's may clean up while the caller goes on. Models in
several threads share the hooks on optimizers, which find a model by the parameters that are
stepped. Shard such models in one thread: ranks have to open groups in the same order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.schedule import Schedule
from lightning_fsdp.core.engine.structures import map_tensors, replace_tensors, tensors_in
from lightning_fsdp.core.engine.torch_internals import current_backward
from lightning_fsdp.core.engine.unit import Unit

_HOLD_NONE = (Tensor, bool, int, float, str, type(None))  # arguments that hold no other tensor
_HOOKS, _UNIT = "_lightning_fsdp_hooks", "_lightning_fsdp_unit"  # attributes of modules


def hooks_of(module: nn.Module) -> ModuleHooks | None:
    """The hooks of a module that was sharded itself; ``None`` for others."""
    return cast("ModuleHooks | None", module.__dict__.get(_HOOKS))


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that the module's own parameters belong to, if any."""
    return cast("Unit | None", module.__dict__.get(_UNIT))


def enter_in_unit(module: nn.Module, unit: Unit) -> None:
    """Note that a module holds parameters of a unit; if of several units, the first one stays."""
    module.__dict__.setdefault(_UNIT, unit)


def remove_hooks(module: nn.Module) -> None:
    """Forget the unit of a module, and remove the module's hooks."""
    module.__dict__.pop(_UNIT, None)
    hooks = module.__dict__.pop(_HOOKS, None)
    for handle in () if hooks is None else hooks.handles:
        handle.remove()


Outputs = Callable[[], list[Tensor]]
Check = Callable[[nn.Module], None]


class ModuleHooks:
    """The hooks of one sharded module, which owns them.

    Attributes:
        unit: The unit that the module's forward needs; ``None`` for a module all of whose
            parameters belong to inner units.
        schedule: Runs the unit; another one when an outer module is sharded.
        kept_outputs: Finds tensors that a forward has kept instead of returning them.
        before_training: Checks the module, once, before its first forward with gradients.
        handles: Remove the hooks from the module.

    Note: what a forward writes into a list, mapping or dataclass that it was passed
    It is for the caller to read, so the module gets that object, and not a copy, with the tensors
    in it replaced meanwhile. What it puts there is an output, through which a backward may enter.
    """

    def __init__(self, module: nn.Module, unit: Unit | None) -> None:
        self.unit = unit
        # Of each call that runs: its arguments that may contain tensors, and by each tensor that it
        # was given in them, the caller's that this one replaces.
        self._nested: list[tuple[list[Any], dict[Tensor, Tensor]]] = []
        at_call = module.register_forward_pre_hook(self.on_call, prepend=True, with_kwargs=True)
        self.handles = at_call, module.register_forward_hook(self._on_return, always_call=True)
        module.__dict__[_HOOKS] = self

    def run_by(self, schedule: Schedule, kept_outputs: Outputs, before_training: Check) -> None:
        """Run the module by a schedule from now on: at its sharding, or that of an outer module."""
        self.schedule, self.kept_outputs = schedule, kept_outputs
        self.before_training: Check | None = before_training

    @torch_internals.beside_the_model
    def on_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin the module's forward, and return the arguments to call it with."""
        unit = self.unit
        if self.before_training is not None and torch.is_grad_enabled():
            self.before_training(module)
            self.before_training = None
        # Of nested calls of one unit only the outermost is marked: its backward ends last.
        is_outermost = unit and not self.schedule.is_inside(unit)
        # Empty already, but after a Ctrl-C, after which torch calls no hooks.
        self._nested = [] if is_outermost else self._nested
        if current_backward() >= 0:
            self.schedule.recompute(unit)
        else:
            self.schedule.pre_forward(unit, module)
        passed = {tensor: tensor for tensor in tensors_in(args, kwargs)}
        if unit and unit.policy.cast_forward_inputs and unit.policy.param_dtype is not None:
            passed = {tensor: _cast(tensor, unit.policy.param_dtype) for tensor in passed}
        if unit and is_outermost and torch.is_grad_enabled():
            self._announce_end_of_backward(unit, passed)
        args, kwargs = replace_tensors((args, kwargs), passed)
        nested = [arg for arg in (*args, *kwargs.values()) if not isinstance(arg, _HOLD_NONE)]
        self._nested.append((nested, {new: own for own, new in passed.items()} if nested else {}))
        return args, kwargs

    @torch_internals.beside_the_model
    def _on_return(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # torch calls hooks after an exception inside its handler, with None for the output.
        if output is None and sys.exc_info()[0] is not None:
            self.on_end(module, failed=True)
            return None
        return self.on_success(module, output)

    def on_success(self, module: nn.Module, output: Any) -> Any:
        """End the module's forward, and return the output for its caller."""
        unit = self.unit
        if unit is not None and unit.policy.output_dtype is not None:
            output = _cast(output, unit.policy.output_dtype)
        if torch.is_grad_enabled():  # in a recomputation too: it may have a backward of its own
            nested, originals = self._nested[-1] if self._nested else ([], {})
            new = [tensor for tensor in nested and tensors_in(nested) if tensor not in originals]
            self._announce_backward(output, new, self.kept_outputs())
        self.on_end(module, failed=False)
        return output

    def on_end(self, module: nn.Module, *, failed: bool) -> None:
        """The module's forward has ended, or an exception has, perhaps before it began."""
        nested, originals = self._nested.pop() if self._nested else ([], {})
        if nested:
            replace_tensors(nested, originals)
        # A recomputation ends with its backward, see ``recompute``.
        has_begun = not failed or (self.unit, module) in self.schedule.calls[-1:]
        if has_begun and current_backward() < 0:
            self.schedule.post_forward(self.unit, module, failed=failed)

    def _announce_end_of_backward(self, unit: Unit, passed: dict[Tensor, Tensor]) -> None:
        """Pass inputs that need gradients through a node whose backward tells of the call's end."""
        if marked := {own: new for own, new in passed.items() if new.requires_grad}:
            ends: Any = _EndOfBackward.apply(self, unit, *marked.values())  # type: ignore[no-untyped-call]
            passed.update(zip(marked, ends, strict=True))

    def _announce_backward(self, *outputs: Any) -> None:
        """Let the backward call the schedule before it runs the nodes that made these tensors."""
        tensors: list[Any] = [t for t in tensors_in(*outputs) if t.grad_fn is not None]
        # An input that is returned was made by this call's identity node, whose ``hooks`` are
        # these; its base was made elsewhere.
        made_here = [t for t in tensors if getattr(t.grad_fn, "hooks", None) is not self]
        bases = [t._base for t in made_here if t._base is not None]
        for node in {tensor.grad_fn for tensor in (*tensors, *bases)} - {None}:
            # An outer unit that returns an inner unit's output has the same node. It is entered
            # first, as on a rank on which it computes something with that output and so has a node
            # of its own: all ranks gather in the same order.
            metadata: Any = node.metadata  # a property, which torch types as a method
            ending: list[ModuleHooks] = metadata.setdefault(_ENDING_HERE, [])
            if self not in ending:  # a loss is kept over several calls
                ending.insert(0, self)
                if len(ending) == 1:
                    node.register_prehook(functools.partial(_enter_backward, ending))


_ENDING_HERE = object()  # key in a node's metadata: the hooks of calls whose outputs it made


@torch_internals.skip_all_in_compiling
def _enter_backward(ending: list[ModuleHooks], gradients: tuple[Tensor | None, ...]) -> None:
    for hooks in ending:
        hooks.schedule.pre_backward(hooks.unit)


class _EndOfBackward(torch.autograd.Function):
    """The identity. Its backward runs after that of everything computed from its outputs."""

    @staticmethod
    def forward(ctx: Any, hooks: ModuleHooks, unit: Unit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hooks, ctx.unit = hooks, unit
        hooks.schedule.input_nodes[unit].add(ctx)
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    @torch_internals.skip_all_in_compiling
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.hooks.schedule.leave(ctx.unit, ctx)
        if torch.is_grad_enabled():  # a graph of gradients, which enters the unit here
            ctx.hooks._announce_backward(gradients)
        return None, None, *gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:  # forward-mode differentiation
        return tuple(t if t is None else t.view_as(t) for t in tangents[2:])


def _cast(structure: Any, dtype: torch.dtype) -> Any:
    return map_tensors(structure, lambda t: t.to(dtype) if t.is_floating_point() else t)
