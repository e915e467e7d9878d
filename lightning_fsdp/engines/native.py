"""What the engines over torch's FSDP1 and FSDP2 share: everything but how torch shards.

Both keep a *piece* of each parameter on this rank, and can make the whole of a piece and cut a
piece from a whole. On these two, and on :class:`~lightning_fsdp.engines.module_form.ModuleForm`,
everything else is built: state in and out, norms, access.
"""

from __future__ import annotations

import functools
import sys
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_fsdp.config import MixedPrecisionPolicy
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.torch_internals import current_backward
from lightning_fsdp.core.optimizers import optimizer_guard
from lightning_fsdp.core.optimizers.optimizer_classes import parameters_of, steps_whole_tensors
from lightning_fsdp.core.optimizers.owned import Sharding
from lightning_fsdp.core.optimizers.owners import Cut
from lightning_fsdp.core.optimizers.whole_tensors import WholeTensors, whole_tensors_of
from lightning_fsdp.core.ranks.groups import communicator_of
from lightning_fsdp.core.safety import checks
from lightning_fsdp.core.tensors.norms import norm_dtype, norm_of_norms, partial_norm
from lightning_fsdp.engines import native_state, torch_internals
from lightning_fsdp.engines.autocast import keep_main_dtype
from lightning_fsdp.engines.base import (
    OWNER,
    Engine,
    agree_on_module,
    broadcast_from_rank0,
    owner_of,
)
from lightning_fsdp.engines.gradients import GradientUnavailable
from lightning_fsdp.engines.module_form import ModuleForm
from lightning_fsdp.engines.native_access import NativeGradients, NativeWeights
from lightning_fsdp.engines.on_host import one_per_host
from lightning_fsdp.engines.optimizers import hand_over, refuse_foreign, unmark
from lightning_fsdp.engines.owned_state import owned_by_number
from lightning_fsdp.units import UnitSelector

_WATCHED = "_lightning_fsdp_watched"  # on a weight whose gradient is looked at

LocalHook = Callable[[str, Tensor], None]


class NativeEngine(Engine):
    """Shards with one of torch's own implementations.

    Attributes:
        parameters: What optimizers hold, by original name: sharded ones, or whole ones after
            :meth:`make_whole`.
        shapes: Their original shapes.
        form: What the module looked like before, while it is sharded.
        device: Where this rank computes and communicates; offloaded pieces are elsewhere.
        micro_batch: Backwards since the optimizer's last step.
        keeps_apart: Keep the reduced gradients of each backward apart.
        syncs_gradients: Whether the next backward reduces.
        holds_whole: Whether every unit is whole until :meth:`release_whole`.
        separate: Those kept, by micro-batch and name.
    """

    parameters: dict[str, nn.Parameter]
    shapes: dict[str, torch.Size]
    device: torch.device
    keeps_apart = False

    def __init__(self, *, zero_stage: int, units: UnitSelector, cpu_offload: bool) -> None:
        super().__init__(zero_stage=zero_stage, units=units, cpu_offload=cpu_offload)
        self.parameters, self.shapes = {}, {}
        self.micro_batch, self.syncs_gradients = 0, True
        self.local_hooks: dict[int, LocalHook] = OrderedDict()
        self.reduced_hooks: dict[int, LocalHook] = OrderedDict()
        self._depths: Counter[nn.Module] = Counter()  # calls of each unit that have not returned
        self._seen_in: dict[str, int] = {}  # the backward in which hooks last saw each gradient
        self.holds_whole = False
        self.separate: dict[int, dict[str, Tensor]] = {}
        self.form: ModuleForm | None = None
        self._optimizers: list[Optimizer] = []
        self._hooks: list[RemovableHandle] = []  # of theirs
        self._names_in: dict[nn.Module, list[str]] = {}  # parameters at and below each module
        self._aside: dict[str, Tensor] = {}  # reduced gradients of earlier micro-batches
        self._is_aside = False

    # -- what torch does --------------------------------------------------------------------------

    @abstractmethod
    def _shard(
        self, module: nn.Module, device: torch.device, precision: MixedPrecisionPolicy
    ) -> dict[str, nn.Parameter]:
        """Shard the module in place; the parameters that optimizers get, by original name."""

    @abstractmethod
    def _free(self, module: nn.Module) -> None:
        """Free the whole copies of one unit, if there are any."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop what was kept about the sharded module."""

    def _settle(self) -> None:
        """Bring torch to rest, wherever an exception left it."""

    @abstractmethod
    def piece(self, tensor: Tensor) -> Tensor:
        """``(n,)``, this rank's elements of a parameter, of its gradient or of its state."""

    @abstractmethod
    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The original shape of a parameter, gradient or state, a fresh copy. Collective."""

    @abstractmethod
    def cut(self, name: str, whole: Tensor) -> Tensor:
        """What this rank keeps of a whole tensor of a parameter's shape. No communication."""

    @abstractmethod
    def is_cut(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor of an optimizer's state belongs to the elements of a parameter."""

    @abstractmethod
    def ranges(self, name: str) -> list[tuple[int, int]]:
        """Per rank, the first and the past-the-last element of a parameter that it has."""

    def range_here(self, name: str) -> tuple[int, int]:
        """Those of this rank."""
        return self.ranges(name)[self.grid.shard_rank]

    @abstractmethod
    def of_piece(self, name: str, piece: Tensor) -> Tensor:
        """State of a parameter of whose elements this rank has ``piece``, ``(n,)``."""

    @abstractmethod
    def unreduced(self, name: str) -> Tensor | None:
        """This rank's gradient that waits to be reduced, original shape."""

    def waits_in_replica(self, name: str) -> bool:
        """Whether a gradient was reduced within the replica only."""
        return False

    @abstractmethod
    def reduced(self, name: str) -> Tensor | None:
        """The reduced gradient, as the optimizer gets it."""

    @abstractmethod
    def clear_unreduced(self, names: Iterable[str]) -> None:
        """Drop what waits to be reduced of these parameters' gradients."""

    def clear_reduced(self, names: Iterable[str]) -> None:
        """Be told that the ``.grad`` of these becomes ``None``, on every rank."""

    # -- life -------------------------------------------------------------------------------------

    @override
    def shard(
        self, module: nn.Module, *, device: torch.device, precision: MixedPrecisionPolicy
    ) -> None:
        self.device = device
        agree_on_module(module)
        _refuse_what_is_lost(module)
        native_state.materialize_whole(module)
        broadcast_from_rank0(module, device)
        module.zero_grad(set_to_none=True)
        for parameter in module.parameters():
            if not parameter.is_contiguous():  # FSDP1 would cut it in the order of its memory
                parameter.data = parameter.data.contiguous()
        self.form = ModuleForm(module)
        self.shapes = {name: p.shape for name, p in self.form.parameters.items()}
        self.micro_batch, self.syncs_gradients, self._aside = 0, True, {}
        self._optimizers.clear()
        name_of = {p: name for name, p in self.form.parameters.items()}
        self._names_in = {m: [name_of[p] for p in m.parameters()] for m in module.modules()}
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)
        self.parameters = self._shard(module, device, precision) if self.shapes else {}
        self._watch_local_gradients()
        # After it, as what is watched are weights as they were gathered.
        keep_main_dtype(module, precision)
        module.__dict__[OWNER] = self
        for inner in self._names_in:
            # A bound method, so that a deep copy of the module clears itself.
            inner.__dict__["zero_grad"] = MethodType(self._zero_grad_of_module, inner)
        self.form.seal()
        self.module = module

    @override
    def make_whole(self, module: nn.Module) -> None:
        if owner_of(module) is not self:
            return
        assert self.form is not None
        self._settle()
        self.clear_unreduced(self.parameters)
        values = one_per_host((name, self.whole(name, p)) for name, p in self.parameters.items())
        form, self.form = self.form, None
        self._names_in.clear()
        self._depths.clear()
        torch_internals.forget_sharding(module, form.parameters.values())
        self._forget()
        for name, parameter in form.parameters.items():  # FSDP2 trains others in their places
            parameter.requires_grad_(self.parameters[name].requires_grad)
        form.restore(values)
        unmark(form.parameters.values())
        self._hand_optimizers(form.parameters)
        self.parameters = form.parameters
        self.module = None

    def _hand_optimizers(self, originals: Mapping[str, nn.Parameter]) -> None:
        """Let optimizers hold the module's own parameters, with the state of the sharded ones."""
        for optimizer in self._optimizers:
            _hand(optimizer, self.parameters, originals)
            optimizer.__dict__.pop("zero_grad", None)
        self._optimizers.clear()
        while self._hooks:
            self._hooks.pop().remove()

    # -- whole copies -----------------------------------------------------------------------------

    # Under ZeRO-2, and of roots, torch keeps those of a forward until a backward frees them. Where
    # none follows, a step or the user's own code would write to shards that no forward reads again
    # (FSDP1), or to copies that are dropped (FSDP2).

    def _free_after_forward(self, unit: nn.Module) -> None:
        # Of nn.Module: a wrapper passes on to what is in it.
        nn.Module.register_forward_pre_hook(unit, self._before_forward)
        nn.Module.register_forward_hook(unit, self._after_forward, always_call=True)

    def _before_forward(self, unit: nn.Module, args: Any) -> None:
        self._depths[unit] += 1

    def _after_forward(self, unit: nn.Module, args: Any, output: Any) -> None:
        self._depths[unit] -= 1  # a step, which runs as a root's forward, may call that
        failed = output is None and sys.exc_info()[0] is not None  # torch calls hooks then, too
        is_over = self._depths[unit] == 0 and not failed
        if is_over and not torch.is_grad_enabled() and not self.holds_whole:
            self._free(unit)

    # -- gradients --------------------------------------------------------------------------------

    def _watch_local_gradients(self) -> None:
        """See each whole gradient of this rank on its way, at the weight that a forward used.

        In a forward a module holds whole weights, which torch has put there before this hook runs.
        Under FSDP2 gradients of all uses are summed before they come to the weight. Under FSDP1
        those of frozen parameters ask for gradients as well where one beside them is trained.
        """
        assert self.form is not None
        for owner, places in self.form.places().items():
            hook = functools.partial(self._watch_weights, places)
            owner.register_forward_pre_hook(hook)

    def _watch_weights(self, places: Mapping[str, str], owner: nn.Module, args: Any) -> None:
        if not self.local_hooks or not torch.is_grad_enabled():
            return
        for attribute, name in places.items():
            weight = getattr(owner, attribute)
            is_trained = weight.requires_grad and self.trains(name)
            if is_trained and not hasattr(weight, _WATCHED):
                setattr(weight, _WATCHED, True)
                weight.register_hook(functools.partial(self._on_local, name))

    def trains(self, name: str) -> bool:
        """Whether a parameter is trained, by what its module shows of it now."""
        return self.parameters[name].requires_grad

    def _on_local(self, name: str, gradient: Tensor) -> Tensor:
        if not self.trains(name):  # frozen since the forward
            return gradient
        backward = current_backward()
        if self._seen_in.get(name) == backward:
            raise RuntimeError(
                f"on_local: expected one gradient of {name!r} in a backward, got another "
                f"({self.name}): FSDP1 makes the weight anew for each call of a module that is "
                "called several times in a forward, and shows the gradient of each call alone. Use "
                "scratch_fsdp or fsdp2_zero3."
            )
        self._seen_in[name] = backward
        gradient = gradient.clone()  # hooks may edit it; autograd's own may be shared
        for hook in list(self.local_hooks.values()):
            hook(name, gradient)
        return gradient

    @override
    def before_backward(self) -> None:
        self._is_aside = bool(self.reduced_hooks) or self.keeps_apart
        if self._is_aside and self.syncs_gradients:
            for name, parameter in self.parameters.items():
                gradient = self.reduced(name)
                if gradient is not None:
                    self._aside[name] = gradient
                    parameter.grad = None

    @override
    def after_backward(self) -> None:
        if self._is_aside and self.syncs_gradients:
            for name, parameter in self.parameters.items():
                self._add_to_earlier(name, parameter)
        self._aside.clear()
        self._is_aside = False
        self.micro_batch += 1
        if self.syncs_gradients:  # otherwise torch keeps whole copies until a backward that does
            self.read_shards_again()

    def _add_to_earlier(self, name: str, parameter: nn.Parameter) -> None:
        gradient, earlier = self.reduced(name), self._aside.pop(name, None)
        if gradient is None:
            parameter.grad = earlier
            return
        for hook in list(self.reduced_hooks.values()):
            hook(name, self.piece(gradient))
        if self.keeps_apart:
            kept = self.separate.setdefault(self.micro_batch, {})
            kept[name] = gradient.detach().clone()
        if earlier is not None:
            self.piece(gradient).add_(self.piece(earlier))

    @override
    def keep_optimizer(self, optimizer: Optimizer) -> None:
        assert self.form is not None, "the module was sharded"
        _hand(optimizer, self.form.parameters, self.parameters)
        self._optimizers.append(optimizer)

    @override
    def watch_optimizer(self, optimizer: Optimizer) -> None:
        self.keep_optimizer(optimizer)
        super().watch_optimizer(optimizer)
        names = self._of(optimizer)
        if names and steps_whole_tensors(optimizer, names[0]):
            WholeTensors(optimizer, _Sharding(self))
            optimizer_guard.watch()
        owned = owned_by_number(optimizer)
        for number, name in enumerate(names):  # state that was allocated before sharding
            if number in owned:
                continue
            values: dict[str, Any] = optimizer.state.get(self.parameters[name], {})
            for key, value in values.items():
                values[key] = native_state.cut_state(self, name, value)
        self._hooks += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        zero_grad = optimizer.zero_grad

        @functools.wraps(zero_grad)
        def clear_everything(set_to_none: bool = True) -> None:
            self._clear(self._of(optimizer), set_to_none)
            zero_grad(set_to_none)

        optimizer.__dict__["zero_grad"] = clear_everything

    def _zero_grad_of_module(self, module: nn.Module, set_to_none: bool = True) -> None:
        self._clear(self._names_in.get(module, []), set_to_none)
        type(module).zero_grad(module, set_to_none)

    def _clear(self, names: Sequence[str], set_to_none: bool) -> None:
        """Drop what ``zero_grad`` does not see: what waits to be reduced, or was kept apart."""
        self.clear_unreduced(names)
        if set_to_none:
            self.clear_reduced(names)
        for kept in self.separate.values():
            for name in names:
                kept.pop(name, None)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        names = self._of(optimizer)
        self.refuse_unreduced(names, "an optimizer step")
        if names:
            optimizer_guard.bring_scale(optimizer, self.parameters[names[0]].device)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.end_step()
        self.read_shards_again()

    @override
    def end_step(self) -> None:
        self.micro_batch = 0

    def refuse_unreduced(self, names: Iterable[str], what: str) -> None:
        """Raise where a gradient waits to be reduced.

        Raises:
            RuntimeError: Names the first one.
        """
        for name in names:
            if self.unreduced(name) is not None:
                raise RuntimeError(
                    f"{what}: expected reduced gradients, but that of {name!r} is this rank's own "
                    f"({self.name}): the last backward did not communicate. Run the last "
                    "micro-batch outside of no_sync()."
                )
            if self.waits_in_replica(name):
                raise RuntimeError(
                    f"{what}: expected reduced gradients, but that of {name!r} is one replica's "
                    f"({self.name}): the last backward took no mean over the replicas. Clear it "
                    "with zero_grad(), or step after the last micro-batch."
                )

    def _of(self, optimizer: Optimizer) -> list[str]:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [names[id(p)] for p in parameters_of(optimizer) if id(p) in names]

    @override
    def reduced_gradients(self, parameters: Iterable[Tensor], what: str) -> list[Tensor]:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        chosen = [names[id(parameter)] for parameter in parameters]
        self.refuse_unreduced(chosen, what)
        return [self.piece(g) for g in map(self.reduced, chosen) if g is not None]

    @override
    def _kept_apart(self) -> Iterator[Tensor]:
        for kept in self.separate.values():
            yield from map(self.piece, kept.values())

    @override
    def norm_of(self, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
        mine = partial_norm(gradients, norm_type, self.device)
        return norm_of_norms(self.of_replica(mine), norm_type).to(norm_dtype(gradients))

    def of_replica(self, number: Tensor) -> Tensor:
        """``(n,)``: a 0-d tensor of every rank of a replica, in rank order. Collective.

        Replicas hold the same pieces, so that each counts once.
        """
        every = [torch.empty_like(number) for _ in range(self.grid.shard_size)]
        dist.all_gather(every, number, group=self.grid.shard_group)
        return torch.stack(every)

    @property
    @override
    def gradients(self) -> NativeGradients:
        self.sharded_module("gradients", GradientUnavailable)
        return NativeGradients(self)

    @property
    @override
    def weights(self) -> NativeWeights:
        self.sharded_module("weights")
        return NativeWeights(self)

    # -- state ------------------------------------------------------------------------------------

    @override
    def gatherable_state_dict(self) -> dict[str, Any]:
        return native_state.gatherable_state_dict(self)

    @override
    def load_full_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        native_state.load_full_state_dict(self, state, strict)

    @override
    def gatherable_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        refuse_foreign(
            optimizer,
            self.parameters.values(),
            "the LightningModule",
            "A Trainer's checkpoint has the optimizers of its last fit: save before it evaluates "
            "another module, or evaluate that in a Trainer of its own.",
        )
        names = self._of(optimizer)
        return native_state.gatherable_optimizer_state_dict(self, optimizer, names)

    @override
    def load_full_optimizer_state_dict(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        names = self._of(optimizer)
        native_state.load_full_optimizer_state_dict(self, optimizer, names, state)


def _hand(
    optimizer: Optimizer, held: Mapping[str, nn.Parameter], successors: Mapping[str, nn.Parameter]
) -> None:
    """Let an optimizer hold ``successors`` in place of parameters of the same names."""
    by_id = {id(parameter): successors[name] for name, parameter in held.items()}
    whole_tensors = whole_tensors_of(optimizer)
    if whole_tensors is not None:
        whole_tensors.follow(by_id)
    hand_over(optimizer, by_id)


class _Sharding(Sharding):
    """How an engine shards parameters, for optimizers that step whole tensors."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._communicator = communicator_of(engine.grid.shard_group)
        self._names = {id(parameter): name for name, parameter in engine.parameters.items()}

    @override
    def is_sharded(self, parameter: Tensor) -> bool:
        return self._engine.form is not None and id(parameter) in self._names

    @override
    def cut(self, parameter: Tensor) -> tuple[str, Communicator, Cut]:
        name = self._names[id(parameter)]
        cut = Cut(tuple(self._engine.shapes[name]), tuple(self._engine.ranges(name)))
        return name, self._communicator, cut

    @override
    def local(self, tensor: Tensor) -> Tensor:
        return self._engine.piece(tensor)

    @override
    def gradient(self, parameter: Tensor) -> Tensor | None:
        reduced = self._engine.reduced(self._names[id(parameter)])
        return None if reduced is None else self.local(reduced)

    @override
    def sharded(self, parameter: Tensor, local: Tensor) -> Tensor:
        return self._engine.of_piece(self._names[id(parameter)], local)

    @override
    def unsharded(self, value: Any) -> Any:
        return self._engine.piece(value) if isinstance(value, DTensor) else value

    @override
    def check(self, parameters: Sequence[Tensor]) -> None:
        names = (self._names[id(parameter)] for parameter in parameters)
        self._engine.refuse_unreduced(names, "an optimizer step")


def steps_inside_forward(module: nn.Module) -> bool:
    """Whether backward and step run inside ``training_step``, which torch takes for a forward."""
    return not getattr(module, "automatic_optimization", True)


def refuse_own_parameters(module: nn.Module, engine: str) -> None:
    """Refuse parameters of the root itself where a backward inside its forward cuts them again.

    Raises:
        NotImplementedError: Names them.
    """
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    if own:
        raise NotImplementedError(
            f"{type(module).__name__}: expected no parameters of its own with manual optimization "
            f"under {engine}, which shards them at a backward inside training_step, got {own}. Put "
            "them into one child module, or use scratch_fsdp."
        )


def _refuse_what_is_lost(module: nn.Module) -> None:
    """Refuse what torch's engines would lose without a word, as their modules have other tensors.

    Raises:
        ValueError: A parameter is used so.
    """
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    found: dict[int, str] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            name = name_of[parameter]
            problem = checks.problem_with_use(parameter, name, [child], found)
            if problem is not None:
                expected, got, cure = problem
                raise ValueError(f"parameter {name!r}: expected {expected}, got {got}. {cure}")
