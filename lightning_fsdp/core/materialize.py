"""Meta device -> real values, one unit at a time, from the model's own initialisers.

A model built under ``torch.device("meta")`` has shapes and no values. Every rank computes all
values in the same order from the same random numbers, and keeps its slice of each, so that they do
not depend on the number of ranks. Per unit, on the host:

    1. its parameters and the buffers beside them are put in place, filled with a mark
    2. initialisers run, children first: ``reset_parameters()`` of its modules and of those that
       enclose them; then ``_init_weights(module)`` of the nearest enclosing model that has one
       (transformers' models do, and call it in this order after their constructor, too); then
       that of peft's layers for LoRA, whose product is to be zero
    3. where the mark is still found, nothing was computed: an error names it, rather than letting
       noise pass for values
    4. each parameter is handed over whole, and freed

Everything else is shielded meanwhile: other units, what was real before, and all but the first
place of a tied parameter are on the meta device then, where writing has no effect. So an
initialiser that reaches below its module (GPT-2 scales the projections of its blocks) may run once
per unit, and tied weights are initialised once. When all is done, or has failed, the model is
exactly what it was: the caller puts the values in.

What a constructor does to its tensors outside these methods cannot be repeated, and is not.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fsdp.core.engine.unit import Site

_OWN_INITIALISERS = ("reset_parameters", "_reset_parameters", "_init_weights")
# Packages whose modules leave their initial values to the model around them.
_INITIALISED_BY_THEIR_MODEL = ("transformers", "transformers_modules")

# The mark: NaN in floating-point tensors; every byte of the others, which no bool has and no
# integer of 32 or 64 bits is likely to be.
MARK = 0xA5
_NUM_SAMPLES = 1024


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
            are real at the same time; the others are not touched.
        keep: Called once per parameter on the meta device, with the parameter and its whole value
            of the same shape and dtype on the host, which is freed after the call.

    Returns:
        The real buffer, by the meta one that it replaces; and a digest of samples of all values,
        equal on ranks that computed the same.

    Raises:
        ValueError: A parameter or buffer has no initialiser; the message names it.
    """
    tree = _Tree(root)
    with torch.no_grad(), torch.device("cpu"):
        try:
            for batch in tree.plan(groups):
                tree.compute(batch, keep)
        finally:
            tree.restore()
    return tree.buffers, tree.digest.hexdigest()


_Batch = list[tuple[Site, Tensor]]
"""What is real at one time: parameters and buffers, each with the first of its places."""


class _Tree:
    """A module tree whose tensors can be replaced for a while.

    Attributes:
        names: Name by module.
        position: By module, its position among all, children first.
        models: By module, the nearest enclosing one with ``_init_weights(module)``.
        buffers: The computed buffer, by the meta one that it replaces.
        digest: Hash of samples of everything computed.
    """

    def __init__(self, root: nn.Module) -> None:
        self.names = {module: name for name, module in root.named_modules()}
        self.position: dict[nn.Module, int] = {}
        self.models: dict[nn.Module, nn.Module | None] = {}
        self._visit(root, None)
        self._original = {m: (m._parameters, m._buffers) for m in self.names}
        self._shields: dict[Tensor, Tensor] = {}
        self.buffers: dict[Tensor, Tensor] = {}
        self.digest = hashlib.blake2b(digest_size=8)

    def plan(self, groups: Sequence[Mapping[Tensor, Sequence[Site]]]) -> list[_Batch]:
        """Which tensors are real at the same time; batches in the order of a constructor.

        A batch is a group's parameters, each in the first of its places, and the buffers beside
        them.
        """
        group_at: dict[tuple[nn.Module, str], int] = {}
        for number, group in enumerate(groups):
            group_at.update(((s.module, s.name), number) for sites in group.values() for s in sites)
        batches: defaultdict[object, _Batch] = defaultdict(list)  # by group, or by module
        seen: set[Tensor] = set()
        for module, (parameters, buffers) in self._original.items():
            # Of buffers that have no parameter on the meta device beside them; those that have go
            # with the last one.
            key: object = module
            for name, tensor in (*parameters.items(), *buffers.items()):
                if tensor is None or not tensor.is_meta or tensor in seen:
                    continue
                if name in parameters:
                    if (module, name) not in group_at:
                        continue
                    key = group_at[module, name]
                seen.add(tensor)
                batches[key].append((Site(module, name), tensor))

        def end(batch: _Batch) -> int:
            return max(self.position[site.module] for site, _ in batch)

        return sorted(batches.values(), key=end)

    def restore(self) -> None:
        """Put all parameters and buffers back into their places, whatever has happened."""
        for module, (parameters, buffers) in self._original.items():
            _install(module, parameters, buffers)

    def compute(self, batch: _Batch, keep: Callable[[Tensor, Tensor], None]) -> None:
        """Compute the tensors of one batch, and hand the parameters over."""
        owners = {site.module for site, _ in batch}
        modules: dict[nn.Module, None] = {}  # the owners and what encloses them, children first
        for module in self.position:
            if module in owners or not modules.keys().isdisjoint(module.children()):
                modules[module] = None
        self._set(batch, modules)
        self._initialise(owners, modules)
        for site, meta in batch:
            real = self._result(site, meta)
            first = real.reshape(-1)[:_NUM_SAMPLES].contiguous()
            self.digest.update(first.view(torch.uint8).numpy().tobytes())
            if self._is_parameter(site):
                keep(meta, real)
                del real
                self._table(site)[site.name] = self._shield(meta)  # frees it
            else:
                real.__dict__.update(meta.__dict__)  # whether it is an nn.Buffer
                self.buffers[meta] = real

    def _is_parameter(self, site: Site) -> bool:
        return site.name in self._original[site.module][0]

    def _table(self, site: Site) -> dict[str, Any]:
        """The dict of its module that a tensor is in."""
        module = site.module
        return module._parameters if self._is_parameter(site) else module._buffers

    def _visit(self, module: nn.Module, model: nn.Module | None) -> None:
        """Note position and model of a module, and of all below it first."""
        if module in self.models:
            return
        initialiser = getattr(module, "_init_weights", None)
        if _takes(initialiser, 1) and not _takes(initialiser, 0):
            model = module
        self.models[module] = model
        for child in module.children():
            self._visit(child, model)
        self.position[module] = len(self.position)

    def _set(self, batch: _Batch, initialising: Collection[nn.Module]) -> None:
        """Make a batch real and marked, and shield everything else.

        Modules that initialise see buffers that are real by now, in copies.
        """
        for module, (parameters, buffers) in self._original.items():
            stand_ins: dict[str, Any] = {}
            for name, buffer in buffers.items():
                real: Any = self.buffers.get(buffer, buffer) if module in initialising else None
                is_absent = real is None or real.is_meta
                stand_ins[name] = self._shield(buffer) if is_absent else real.clone()
            _install(module, {n: self._shield(p) for n, p in parameters.items()}, stand_ins)
        for site, meta in batch:
            fresh = marked(meta)
            if self._is_parameter(site):
                fresh = nn.Parameter(fresh, requires_grad=meta.requires_grad)
                fresh.__dict__.update(meta.__dict__)  # attributes that an initialiser may read
            self._table(site)[site.name] = fresh

    def _initialise(self, owners: Collection[nn.Module], modules: Collection[nn.Module]) -> None:
        """Run the initialisers of ``modules``; ``owners``: those that have tensors of the batch."""
        for module in modules:
            for name in _OWN_INITIALISERS:
                initialiser = getattr(module, name, None)
                if _takes(initialiser, 0):
                    self._call(module, name, initialiser)
                    break
        for module in modules:
            if (model := self.models[module]) is not None:
                self._call(model, "_init_weights", model._init_weights, module)
            elif (
                module in owners
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

    def _result(self, site: Site, meta: Tensor) -> Tensor:
        """What the initialisers left at ``site``."""
        cls = type(site.module).__name__
        name = f"{self.names[site.module]}.{site.name}".lstrip(".")
        is_parameter = self._is_parameter(site)
        kind = "parameter" if is_parameter else "buffer"
        value: Tensor | None = self._table(site).get(site.name)
        cure = (
            f"Define {cls}.reset_parameters() to compute it, or _init_weights(module) on an "
            "enclosing model; or build it on a real device"
        )
        if not is_parameter:
            cure += ', e.g. under torch.device("cpu") around its register_buffer: it is then kept'
        if value is None or value.is_meta or is_marked(value):
            does = "computes all of it, as it is on the meta device"
            got = f"none in {cls} and the modules around it"
        elif value.shape != meta.shape:
            does, got = f"keeps its shape {tuple(meta.shape)}", f"{tuple(value.shape)}"
        else:
            return value.detach().to(device="cpu", dtype=meta.dtype)
        raise ValueError(
            f"{kind} {name!r}: expected an initialiser that {does}, got {got}. {cure}."
        )

    def _name(self, module: nn.Module) -> str:
        return self.names[module] or type(module).__name__

    def _shield(self, tensor: Tensor | None) -> Any:
        """A tensor on the meta device to take the place of ``tensor``."""
        if tensor is None or nn.parameter.is_lazy(tensor):
            return tensor
        if tensor not in self._shields:
            shield = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                shield = nn.Parameter(shield, requires_grad=tensor.requires_grad)
            self._shields[tensor] = shield
        return self._shields[tensor]


def _install(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any]) -> None:
    """Give a module other dicts, so that what code registers or removes meanwhile is not kept."""
    vars(module).update(_parameters=parameters, _buffers=buffers)


def _takes(function: Any, num_arguments: int) -> bool:
    """Whether ``function`` can be called with that many arguments."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except (TypeError, ValueError):
        return False
    return True


def marked(meta: Tensor) -> Tensor:
    """A tensor of the shape and dtype of ``meta``, on the host, filled with marks."""
    if meta.is_floating_point() or meta.is_complex():
        return torch.full(meta.shape, float("nan"), dtype=meta.dtype, device="cpu")
    filled = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
    filled.view(-1).view(torch.uint8).fill_(MARK)
    return filled


def is_marked(value: Tensor) -> bool:
    """Whether a part of a tensor still has its mark."""
    if value.numel() == 0:
        return False
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.is_floating_point():
        if value.element_size() == 1:
            value = value.float()
        return bool(value.max().isnan())  # the maximum is NaN if any is; needs no mask in memory
    is_mark = value.contiguous().view(-1).view(torch.uint8) == MARK
    by_element = is_mark.view(-1, value.element_size()).all(dim=1)
    # For a short integer the mark is a value like any other, but not for a bool.
    is_ambiguous = value.dtype != torch.bool and value.element_size() < 4
    return bool(by_element.all() if is_ambiguous else by_element.any())
