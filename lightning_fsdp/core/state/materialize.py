"""Meta device -> real values, one unit at a time, from the model's own initialisers.

A model built under ``torch.device("meta")`` has shapes and no values. Every rank computes all of
them in the same order from the same random numbers and keeps its slice of each, so that the values
do not depend on the number of ranks. Per unit, on the host:

    1. its parameters and the buffers beside them are put in place, filled with a mark
    2. initialisers run, children first: ``reset_parameters()`` of its modules and of those that
       enclose them; then ``_init_weights(module)`` of the nearest enclosing model that has one
       (transformers' models do, and call it after their constructor in this order, too); then
       what peft's layers have for LoRA, whose product is to be zero
    3. where the mark is still found nothing was computed: an error that names it, never noise
    4. each parameter is handed over whole, and freed

Everything else is shielded meanwhile: other units, what was real before, and all but the first
place of a tied parameter are on the meta device then, where writing has no effect. So an
initialiser that reaches below its module (GPT-2 scales the projections of its blocks) may run once
per unit, and tied weights are initialised once. When all is done, or failed, the model is exactly
what it was: whoever called puts the values in.

What a constructor does to its tensors outside of these methods cannot be repeated, and is not.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fsdp.core.engine.unit import Site
from lightning_fsdp.core.state.marks import is_marked, marked, sample

_OWN_INITIALISERS = ("reset_parameters", "_reset_parameters", "_init_weights")
# Packages whose modules leave their initial values to the model around them.
_INITIALISED_BY_THEIR_MODEL = ("transformers", "transformers_modules")


def meta_buffers(root: nn.Module) -> dict[Tensor, str]:
    """The buffers on the meta device, by their first name."""
    return {buffer: name for name, buffer in root.named_buffers() if buffer.is_meta}


def materialize(
    root: nn.Module,
    groups: Sequence[Mapping[Tensor, Sequence[Site]]],
    keep: Callable[[Tensor, Tensor], None],
) -> tuple[dict[Tensor, Tensor], str]:
    """Compute initial values of everything on the meta device; leaves ``root`` as it was.

    Args:
        root: The module that is being sharded.
        groups: Per unit, its parameters and where they are registered. Those on the meta device
            are real together; the rest is not touched.
        keep: Called once per parameter on the meta device, with the parameter and its whole value
            of the same shape and dtype on the host, which is freed after the call.

    Returns:
        The real buffer, by the meta one that it replaces; and a digest of samples of all values,
        equal on ranks that computed the same.

    Raises:
        ValueError: A parameter or buffer has no initialiser; the message names it.
    """
    tree = _Tree(root)
    digest = hashlib.blake2b(digest_size=8)
    buffers: dict[Tensor, Tensor] = {}

    def keep_and_digest(parameter: Tensor, whole: Tensor) -> None:
        digest.update(sample(whole))
        keep(parameter, whole)

    with torch.no_grad(), torch.device("cpu"), tree.shielded():
        for batch in tree.plan(groups):
            tree.compute(batch, keep_and_digest, buffers)
    for buffer in buffers.values():
        digest.update(sample(buffer))
    return buffers, digest.hexdigest()


@dataclass(eq=False)
class _Batch:
    """What is real at one time.

    Attributes:
        parameters: The one place of each parameter that is initialised, and the parameter.
        buffers: Likewise.
        owners: The modules that hold them.
    """

    parameters: list[tuple[Site, Tensor]] = field(default_factory=list)
    buffers: list[tuple[Site, Tensor]] = field(default_factory=list)
    owners: set[nn.Module] = field(default_factory=set)

    def add(self, tensors: list[tuple[Site, Tensor]], site: Site, tensor: Tensor) -> None:
        tensors.append((site, tensor))
        self.owners.add(site.module)


class _Tree:
    """A module tree whose tensors can be replaced for a while.

    Attributes:
        names: Of its modules.
        position: Of each module among all, children first.
        models: Per module, the nearest enclosing one with ``_init_weights(module)``.
    """

    def __init__(self, root: nn.Module) -> None:
        self.names = {module: name for name, module in root.named_modules()}
        self.position: dict[nn.Module, int] = {}
        self.models: dict[nn.Module, nn.Module | None] = {}
        self._parents: dict[nn.Module, list[nn.Module]] = {module: [] for module in self.names}
        self._visit(root, None)
        self._original = {m: (dict(m._parameters), dict(m._buffers)) for m in self.names}
        self._shields: dict[Tensor, Tensor] = {}

    def plan(self, groups: Sequence[Mapping[Tensor, Sequence[Site]]]) -> list[_Batch]:
        """Which tensors are real together; batches in the order of a constructor."""
        order = {module: index for index, module in enumerate(self.names)}
        batches = [_Batch() for _ in groups]
        first: dict[Tensor, tuple[int, _Batch, Site]] = {}
        for batch, group in zip(batches, groups, strict=True):
            for parameter, sites in group.items():
                for site in sites if parameter.is_meta else ():
                    place = (order[site.module], batch, site)
                    if parameter not in first or place[0] < first[parameter][0]:
                        first[parameter] = place
        batch_of: dict[nn.Module, _Batch] = {}
        for parameter, (_, batch, site) in first.items():
            batch.add(batch.parameters, site, parameter)
            batch_of[site.module] = batch
        seen: set[Tensor] = set()
        for module, (_, buffers) in self._original.items():
            for name, buffer in buffers.items():
                if buffer is not None and buffer.is_meta and buffer not in seen:
                    seen.add(buffer)
                    if module not in batch_of:
                        batch_of[module] = _Batch()
                        batches.append(batch_of[module])
                    batch_of[module].add(batch_of[module].buffers, Site(module, name), buffer)
        batches = [batch for batch in batches if batch.owners]
        return sorted(batches, key=lambda batch: max(self.position[m] for m in batch.owners))

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Whatever happens inside, parameters and buffers are in their places afterwards."""
        try:
            yield
        finally:
            for module, (parameters, buffers) in self._original.items():
                _put_parameters(module, parameters)
                _put_buffers(module, buffers)

    def compute(
        self, batch: _Batch, keep: Callable[[Tensor, Tensor], None], finished: dict[Tensor, Tensor]
    ) -> None:
        """Compute the tensors of one batch."""
        modules = self._with_enclosing(batch.owners)
        self._set(batch, modules, finished)
        self._initialise(batch, modules)
        for site, buffer in batch.buffers:
            real = self._result(site, buffer, site.module._buffers.get(site.name), "buffer")
            real.__dict__.update(buffer.__dict__)  # whether it is an nn.Buffer
            finished[buffer] = real
        for site, parameter in batch.parameters:
            value = site.module._parameters.get(site.name)
            whole = self._result(site, parameter, value, "parameter")
            keep(parameter, whole)
            del value, whole
            site.put(self._shield(parameter))  # frees it

    def _visit(self, module: nn.Module, model: nn.Module | None) -> None:
        if module in self.models:
            return
        if _num_required(getattr(module, "_init_weights", None)) == 1:
            model = module
        self.models[module] = model
        for child in module.children():
            self._parents[child].append(module)
            self._visit(child, model)
        self.position[module] = len(self.position)

    def _with_enclosing(self, owners: set[nn.Module]) -> list[nn.Module]:
        found: set[nn.Module] = set()
        todo = list(owners)
        while todo:
            module = todo.pop()
            if module not in found:
                found.add(module)
                todo.extend(self._parents[module])
        return sorted(found, key=self.position.__getitem__)

    def _set(
        self, batch: _Batch, modules: Sequence[nn.Module], finished: Mapping[Tensor, Tensor]
    ) -> None:
        initialising = set(modules)
        for module, (parameters, buffers) in self._original.items():
            _put_parameters(module, {n: self._shield(p) for n, p in parameters.items()})
            copies = {
                name: self._copy_or_shield(buffer, finished)
                if module in initialising
                else self._shield(buffer)
                for name, buffer in buffers.items()
            }
            _put_buffers(module, copies)
        for site, parameter in batch.parameters:
            fresh = nn.Parameter(marked(parameter), requires_grad=parameter.requires_grad)
            fresh.__dict__.update(parameter.__dict__)  # marks that an initialiser may look for
            site.put(fresh)
        for site, buffer in batch.buffers:
            site.module._buffers[site.name] = marked(buffer)

    def _initialise(self, batch: _Batch, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            for name in _OWN_INITIALISERS:
                initialiser = getattr(module, name, None)
                if _num_required(initialiser) == 0:
                    self._call(module, name, initialiser)
                    break
        for module in modules:
            model = self.models[module]
            if model is not None:
                self._call(model, "_init_weights", model._init_weights, module)
            elif (
                module in batch.owners
                and type(module).__module__.split(".")[0] in _INITIALISED_BY_THEIR_MODEL
            ):
                raise ValueError(
                    f"module {self._name(module)!r}: expected to be sharded with the model around "
                    f"it, got {type(module).__name__} alone, which is on the meta device and whose "
                    "initial values come from its model's _init_weights. Call shard_model on the "
                    "whole model, or build it on a real device."
                )
        for module in modules:
            reset: Any = getattr(module, "reset_lora_parameters", None)
            adapters: Any = () if reset is None else module.r
            for adapter in adapters:
                self._call(module, "reset_lora_parameters", functools.partial(reset, adapter, True))

    def _call(self, module: nn.Module, name: str, initialiser: Any, *arguments: nn.Module) -> None:
        try:
            initialiser(*arguments)
        except Exception as error:
            about = "".join(f" for {self._name(argument)!r}" for argument in arguments)
            raise ValueError(
                f"module {self._name(module)!r}: expected {type(module).__name__}.{name}{about} to "
                "compute initial values while one unit is real and all else on the meta device, "
                f"got {type(error).__name__}: {error}. Let it use only tensors of its own module, "
                "or build the model on a real device."
            ) from error

    def _result(self, site: Site, meta: Tensor, value: Tensor | None, kind: str) -> Tensor:
        """What the initialisers left at ``site``."""
        module, cls = site.module, type(site.module).__name__
        name = f"{self.names[module]}.{site.name}".lstrip(".")
        cure = (
            f"Define {cls}.reset_parameters() to compute it, or _init_weights(module) on an "
            "enclosing model; or build it on a real device"
        )
        if kind == "buffer":
            cure += ', e.g. under torch.device("cpu") around its register_buffer: it is then kept'
        if value is None or value.is_meta or is_marked(value):
            raise ValueError(
                f"{kind} {name!r}: expected an initialiser that computes all of it, as it is on "
                f"the meta device, got none in {cls} and the modules around it. {cure}."
            )
        if value.shape != meta.shape:
            raise ValueError(
                f"{kind} {name!r}: expected an initialiser that keeps its shape "
                f"{tuple(meta.shape)}, got {tuple(value.shape)}. {cure}."
            )
        return value.detach().to(device="cpu", dtype=meta.dtype)

    def _name(self, module: nn.Module) -> str:
        return self.names[module] or type(module).__name__

    def _shield(self, tensor: Tensor | None) -> Any:
        """A tensor on the meta device in the place of ``tensor``."""
        if tensor is None or nn.parameter.is_lazy(tensor):
            return tensor
        if tensor not in self._shields:
            shield = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                shield = nn.Parameter(shield, requires_grad=tensor.requires_grad)
            self._shields[tensor] = shield
        return self._shields[tensor]

    def _copy_or_shield(self, buffer: Tensor | None, finished: Mapping[Tensor, Tensor]) -> Any:
        if buffer is None:
            return None
        real = finished.get(buffer, buffer)
        return self._shield(real) if real.is_meta else real.clone()


def _put_parameters(module: nn.Module, parameters: Mapping[str, Any]) -> None:
    for name in [name for name in module._parameters if name not in parameters]:
        del module._parameters[name]
    for name, parameter in parameters.items():
        if name not in module._parameters or module._parameters[name] is not parameter:
            Site(module, name).put(parameter)


def _put_buffers(module: nn.Module, buffers: Mapping[str, Any]) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)


def _num_required(function: Any) -> int | None:
    """How many arguments a method needs; ``None`` for what is no method."""
    if not callable(function):
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(p.default is p.empty and p.kind not in variadic for p in parameters)
