"""What this rank writes of a module and its optimizers, and reads into: slices, never a copy.

    parameters and their optimizer state    slices: ShardedTensor, DTensor, FlatPiece; or whole
    buffers                                 whole
    everything else                         as it is

Names are the original ones. All but copies are live: who fills them in place fills the module or
optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fsdp.core.optimizers.optimizer_classes import SCALARS
from lightning_fsdp.core.sharded_module import shards_in_place
from lightning_fsdp.core.tensors.flat_chunks import FlatChunks
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.engines.flat_piece import FlatPiece


class ShardedState:
    """Of a module whose parameters say themselves what of them is here, or hold all.

    Args:
        module: Sharded by the core or by FSDP2; or plain.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        with shards_in_place(module):
            self._parameters = dict(module.named_parameters())

    def of_module(self) -> dict[str, Any]:
        """``state_dict()`` with slices; tied parameters are one object under several names."""
        return with_ties(self._module, self._module.state_dict())

    def take_copies(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Its state dict was filled. What a hook copied is not the module's own, and is taken here.

        Returns:
            Copies of what is not sharded (a metric's state), which ``load_state_dict`` takes.
        """
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        own = {_memory(tensor) for tensor in (*parameters.values(), *self._module.buffers())}
        copies = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor)
            and not isinstance(value, FlatPiece)
            and _memory(value) not in own
        }
        for name in parameters.keys() & copies.keys():
            if isinstance(parameters[name], ShardedTensor | DTensor):
                parameters[name].detach().copy_(copies.pop(name))
        return copies

    def parameters(self) -> dict[str, nn.Parameter]:
        """What optimizers hold, by original name; every parameter once."""
        return self._parameters

    def slice_of(self, name: str, key: str, value: Any) -> Tensor | None:
        """An entry of optimizer state, if it belongs to the elements of a parameter.

        Args:
            name: Of the parameter.
            key: Of the entry.
            value: The entry.

        Returns:
            ``value`` in a form that ``torch.distributed.checkpoint`` knows; ``None`` for counts,
            factors and what is no tensor.
        """
        if not isinstance(value, Tensor) or key in SCALARS:
            return None
        is_slice = isinstance(value, FlatChunks | DTensor)
        return value if is_slice or value.shape == self.parameters()[name].shape else None


def _memory(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, ShardedTensor | DTensor) else tensor
    return local.untyped_storage().data_ptr()


def names_in(state: ShardedState, optimizer: Optimizer, index: int) -> list[list[str]]:
    """Names of the parameters of each group.

    Args:
        state: Of the module.
        optimizer: Over parameters of the module.
        index: Of the optimizer, for the message.

    Raises:
        ValueError: A parameter is not in the module.
    """
    name_of = {id(parameter): name for name, parameter in state.parameters().items()}
    names = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in name_of:
                raise ValueError(
                    f"optimizer {index}, group {number}, parameter {place}: expected a parameter "
                    f"of the module, got another tensor of shape {tuple(parameter.shape)}. State "
                    "is saved by name: build the optimizer over module.parameters()."
                )
        names.append([name_of[id(parameter)] for parameter in group["params"]])
    return names


def split_own_state(state: Mapping[Any, Any]) -> tuple[dict[int, Any], dict[Any, Any]]:
    """State of parameters, by place, and the optimizer's own (``self.state["count"] = 1``)."""
    of_parameters = {place: values for place, values in state.items() if isinstance(place, int)}
    return of_parameters, {k: state[k] for k in state if k not in of_parameters}


def with_ties(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The same state, one object under all names of a tied parameter."""
    first_of: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_of.setdefault(id(parameter), name)
        if name in state and first in state:
            state[name] = state[first]
    return state
