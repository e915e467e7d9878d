"""What happens to a step whose gradients are not finite, and where it began.

Before a step is clipped or taken, the norm of its gradients over all ranks is looked at: the one
that clipping takes anyway, or else one that is taken for this. Every rank sees the same number, so
all raise, or all skip the step, and nothing was written.

To say where it began, each local gradient leaves one number behind as it arrives, zero or NaN. They
are read when a norm was not finite, and only then. What comes first in this order was the cause:

=============  ==================================================================
weight         a trainable parameter was not finite before the step
local          a rank's own gradient, the first one in the order of the backward
reduction      all local ones were finite, and their mean over the ranks is not
norm           every gradient is finite, and their norm too large for fp32
=============  ==================================================================

What is infinite on purpose (a mask) is no cause. So a frozen parameter is named, but not blamed;
and a module whose output was not finite where the gradients were, in another micro-batch or in an
earlier step, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fsdp.core.engine.structures import tensors_in
from lightning_fsdp.core.engine.torch_internals import current_backward, not_compiled
from lightning_fsdp.core.tensors.norms import NonfiniteGradient
from lightning_fsdp.engines.access import Removable
from lightning_fsdp.engines.base import Engine
from lightning_fsdp.engines.rank_grid import all_gather_objects
from lightning_fsdp.units import UnitSelector, find_units

_NUM_NAMED = 4  # of what else was not finite


@dataclasses.dataclass
class _Found:
    """What was not finite on one rank: micro-batch and name, in the order in which it happened.

    Attributes:
        local: With the place of each among all gradients that arrived, in between.
    """

    losses: list[int]
    activations: list[tuple[int, str]]
    local: list[tuple[int, int, str]]
    reduced: list[str]
    weights: list[str]
    frozen: list[str]


class NonfiniteGuard:
    """Looks before each step of one fit.

    Args:
        engine: Has sharded the module.
        module: The LightningModule.
        unit_of: Names of units by that of a parameter; see :func:`units_by_parameter`.
        device: Where the process group communicates.
        raises: Raise; otherwise skip the step.
        log: Called with the number of skipped steps when one was skipped.

    Attributes:
        num_skipped: Steps that were not taken.
    """

    def __init__(
        self,
        engine: Engine,
        module: nn.Module,
        unit_of: Mapping[str, str],
        *,
        device: torch.device,
        raises: bool,
        log: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._module = module
        self._unit_of = unit_of
        self._device = device
        self._raises = raises
        self._log = log
        self.num_skipped = 0
        self._found_finite: dict[int, bool] = {}  # by the optimizer's id, what clipping found
        self._losses: list[Tensor] = []
        self._local: list[tuple[int, str, Tensor]] = []
        self._activations: list[tuple[int, str, Tensor]] = []
        self._is_step_over = False  # and what follows is of the next one
        self._is_looked_into = False
        # By module; NaN where its output was not finite in steps whose gradients were.
        self._usual: dict[str, Tensor] = {}
        self._handles: list[Removable] = []
        self._last_look = engine.gradients.on_local(self._note_local, edits=False)

    def close(self) -> None:
        """Look no more."""
        self._last_look.remove()
        while self._handles:
            self._handles.pop().remove()

    def watch_activations(self) -> None:
        """Also name the first module whose output is not finite, from the next forward on."""
        for name, module in self._module.named_modules():
            plain = name.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module")
            label = f"{plain!r} ({type(module).__name__})"
            self._handles.append(module.register_forward_hook(self._noting_output(label)))

    def note_loss(self, loss: Tensor) -> None:
        """A backward of this loss is about to begin."""
        self._begin()
        self._found_finite.clear()  # gradients change
        self._last_look.remove()  # after functions that others gave, which may edit gradients
        self._last_look = self._engine.gradients.on_local(self._note_local, edits=False)
        self._losses.append(_trace_of(loss.detach()))

    def allows(self, optimizer: Optimizer, norm: Tensor) -> bool:
        """Whether gradients with this norm may be scaled; it is kept for the step. Collective.

        Raises:
            NonfiniteGradient: They may not, and that is to raise; on every rank.
        """
        was_finite = self._found_finite.get(id(optimizer), True)
        is_finite = was_finite and self._is_finite_everywhere(norm)
        self._found_finite[id(optimizer)] = is_finite
        if was_finite and not is_finite:  # once, however often they are clipped
            got = "others in another replica" if norm.isfinite() else f"a norm of {norm.item()}"
            self._raise_or_skip(f"got {got}")
        return is_finite

    def _is_finite_everywhere(self, norm: Tensor) -> bool:
        """The norm is that of one replica, and a callback may have edited what one alone holds."""
        is_finite = norm.isfinite().int().to(self._device)  # an offloaded norm is on the host
        if self._engine.grid.num_replicas > 1:
            dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
        return bool(is_finite)

    def allows_clipping(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
        """Likewise, of the gradients of an optimizer's own parameters. Collective."""
        gradients = self._engine.reduced_gradients(parameters, "an optimizer step")
        return self.allows(optimizer, self._engine.norm_of(gradients, 2.0))

    def allows_step(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
        """Likewise, from the norm that clipping took, or from one that is taken now. Collective."""
        if id(optimizer) not in self._found_finite:
            self.allows_clipping(optimizer, parameters)
        self.end_step()
        return self._found_finite.pop(id(optimizer))

    def note_skipped(self, loss_scale: float) -> None:
        """A gradient scaler has skipped a step, as it does until its scale fits. Collective.

        Raises:
            NonfiniteGradient: No scale can help, and that is to raise; on every rank.
        """
        found = self._of_all_ranks()
        is_hopeless = loss_scale <= 1 or any(theirs.losses or theirs.weights for theirs in found)
        if is_hopeless or not self._raises:
            self._raise_or_skip(f"got others with a loss scale of {loss_scale}", found)

    def _raise_or_skip(self, got: str, found: Sequence[_Found] | None = None) -> None:
        found = found or self._of_all_ranks()
        message = (
            f"optimizer step: expected finite gradients, {got}. {_describe(found, self._unit_of)} "
            "No weight and no optimizer state was written."
        )
        if self._raises:
            self.end_step()
            raise NonfiniteGradient(message)
        self.num_skipped += 1
        rank_zero_warn(f"Skipped (skip {self.num_skipped} of this fit): {message}")
        self._log(self.num_skipped)

    def end_step(self) -> None:
        """A step was taken, or left out: what comes belongs to the next one."""
        self._is_step_over = True  # nothing is dropped yet: another optimizer may step as well

    def _begin(self) -> None:
        if self._is_step_over:
            if not self._is_looked_into:
                for _, name, trace in self._activations:
                    self._usual[name] = trace + self._usual.get(name, 0.0)
            self._is_step_over = self._is_looked_into = False
            self._losses.clear()
            self._local.clear()
            self._activations.clear()

    def _note_local(self, name: str, gradient: Tensor, micro_batch: int) -> None:
        self._local.append((micro_batch, name, _trace_of(gradient.detach())))

    def _noting_output(self, label: str) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or current_backward() >= 0:
                return
            self._begin()
            for value in tensors_in(output):
                if value.is_floating_point():
                    trace = _trace_of(value.detach())
                    self._activations.append((len(self._losses), label, trace))

        # Compiled, it would be compiled again with each number of outputs before it.
        return not_compiled(note)

    def _of_all_ranks(self) -> list[_Found]:
        self._is_looked_into = True
        trainable = set(self._engine.gradients.names())
        broken = [n for n, w in self._engine.weights.items() if not _is_finite(w.shard)]
        usual = {name for name, trace in self._usual.items() if trace.isnan()}
        mine = _Found(
            losses=[micro_batch for micro_batch, t in enumerate(self._losses) if t.isnan()],
            activations=[(i, n) for i, n, t in self._activations if n not in usual and t.isnan()],
            local=[
                (micro_batch, place, name)
                for place, (micro_batch, name, trace) in enumerate(self._local)
                if trace.isnan()
            ],
            reduced=[n for n, s in self._engine.gradients.shards().items() if not _is_finite(s)],
            weights=[name for name in broken if name in trainable],
            frozen=[name for name in broken if name not in trainable],
        )
        return all_gather_objects(mine)


def units_by_parameter(root: nn.Module, selector: UnitSelector) -> dict[str, str]:
    """The name of the unit that each parameter of a module belongs to, before it is sharded."""
    names = {parameter: name for name, parameter in root.named_parameters()}
    units: dict[str, str] = {}
    for unit, modules in find_units(root, selector):  # inner units first
        for module in modules:
            for parameter in module.parameters():
                units.setdefault(names[parameter], unit)
    return units


def _trace_of(values: Tensor) -> Tensor:
    """0-d: zero for finite values and NaN for others; nothing waits for it."""
    if values.numel() == 0:
        return values.new_zeros(())
    # Not their sum, which overflows where they are large and finite.
    least, largest = values.aminmax()
    return least * 0.0 + largest * 0.0


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _describe(found: Sequence[_Found], unit_of: Mapping[str, str]) -> str:
    """Where it began, and what else was not finite."""
    ranks = list(enumerate(found))
    weights = _ranks_by_name((name, rank) for rank, theirs in ranks for name in theirs.weights)
    reduced = _ranks_by_name((name, rank) for rank, theirs in ranks for name in theirs.reduced)
    local = [
        (micro_batch, place, rank, name)
        for rank, theirs in ranks
        for micro_batch, place, name in theirs.local
    ]
    others = dict.fromkeys(name for _, theirs in ranks for name in theirs.frozen)
    others.update(dict.fromkeys(name for _, _, _, name in sorted(local)))
    others.update(dict.fromkeys(reduced))
    if weights:
        first, holders = next(iter(weights.items()))
        began = f"weight of {_named(first, unit_of)}, in the slices of ranks {holders}"
        others.update(dict.fromkeys(weights))
    elif local:
        micro_batch, _, rank, first = min(local)
        began = (
            f"local gradient of {_named(first, unit_of)}, on rank {rank} in micro-batch "
            f"{micro_batch}, the first in the backward"
        )
    elif reduced:
        first, holders = next(reversed(reduced.items()))
        began = (
            f"reduction of {_named(first, unit_of)}, in the slices of ranks {holders}: the local "
            "gradients were finite on every rank"
        )
    else:
        return "Each gradient is finite; their norm is too large for fp32."
    others.pop(first, None)
    sentences = [f"It began in the {began}."]
    usual = {
        name
        for theirs in found
        for micro_batch, name in theirs.activations
        if micro_batch not in theirs.losses and all(i != micro_batch for i, _, _ in theirs.local)
    }
    for rank, theirs in ranks:
        if theirs.losses:
            sentences.append(f"The loss was not finite on rank {rank} in {_list(theirs.losses)}.")
        activations = [pair for pair in theirs.activations if pair[1] not in usual]
        if activations:
            micro_batch, name = activations[0]
            sentences.append(
                f"The first activation: the output of {name}, on rank {rank} in micro-batch "
                f"{micro_batch}."
            )
    if others:
        shown = ", ".join(map(repr, list(others)[:_NUM_NAMED]))
        more = len(others) - _NUM_NAMED
        sentences.append(f"Not finite either: {shown}{f' and {more} more' * (more > 0)}.")
    return " ".join(sentences)


def _ranks_by_name(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for name, rank in pairs:
        ranks.setdefault(name, []).append(rank)
    return ranks


def _named(name: str, unit_of: Mapping[str, str]) -> str:
    return f"{name!r} (unit {unit_of.get(name, '')!r})"


def _list(micro_batches: list[int]) -> str:
    return "micro-batches " + ", ".join(map(str, micro_batches))
