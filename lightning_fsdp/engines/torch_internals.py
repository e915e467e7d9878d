"""Every private name of torch's FSDP1 and FSDP2 that the engines use, one each, with the reason.

Checked against torch 2.13. A name that goes away is to be replaced here, and nowhere else.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._flat_param import HandleShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from lightning_fsdp.core.optimizers.optimizer_classes import parameters_of


def forget_sharding(root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Let torch shard these again: FSDP2 refuses a known module, FSDP1 a marked parameter."""
    for module in root.modules():
        _composable_state._module_state_mapping.pop(module, None)
    for parameter in parameters:
        for mark in ("_fsdp_flattened", "_fsdp_orig_uid"):
            parameter.__dict__.pop(mark, None)


def list_flat_weights(module: nn.Module) -> None:
    """Let ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` compute with the parameters that they have now.

    Their list follows attributes that are set, not what is put into ``_parameters``.
    """
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def estimates_spectral_norm(module: nn.Module) -> bool:
    """Whether each forward in training improves a spectral norm's estimate, in its buffers."""
    hooks = module._forward_pre_hooks.values()  # what torch did before there were parametrizations
    return isinstance(module, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called; torch offers no question."""
    return module._compiled_call_impl is not None


def forget_compiled(module: nn.Module) -> None:
    """Take ``module.compile()`` back, which torch cannot."""
    module.__dict__.pop("_compiled_call_impl", None)


_meshes: list[weakref.ref[DeviceMesh]] = []


def original_name(name: str) -> str:
    """A parameter's name without what torch's wrappers put into it."""
    return clean_tensor_name(name)


def flat_mesh(device: torch.device) -> DeviceMesh:
    """All ranks in a row."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    let_go_later(mesh)
    return mesh


def let_go_later(mesh: DeviceMesh) -> None:
    """Note a mesh for :func:`let_go_of_groups`."""
    _meshes.append(weakref.ref(mesh))


def let_go_of_groups() -> None:
    """Drop what meshes keep of process groups, once those are destroyed.

    A mesh lives on in caches of torch's, and with it would the groups and their threads.
    """
    for reference in _meshes:
        mesh = reference()
        if mesh is not None:
            mesh._pg_registry.clear()
    _meshes.clear()


def _groups_of(state: Any) -> list[Any]:
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13: one, or none
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return groups


def fsdp2_parameters(root: nn.Module) -> Iterator[tuple[nn.Parameter, Any, Any]]:
    """FSDP2's sharded parameters, its own object for each, and that of those reduced together."""
    seen = set()
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _groups_of(module._get_fsdp_state()):
            for fsdp_parameter in group.fsdp_params:
                if id(fsdp_parameter) not in seen:
                    seen.add(id(fsdp_parameter))
                    yield fsdp_parameter.sharded_param, fsdp_parameter, group


def is_idle(parameter: Tensor) -> bool:
    """Whether FSDP1 or FSDP2 has sharded a parameter, and no forward of its module runs now.

    The parameter may be whole all the same, under ZeRO-2; its gradient would not be reduced.
    """
    if getattr(parameter, "_fsdp_flattened", False):
        return True  # in a forward, FSDP1 has a view of the whole in its place, without the mark
    for reference in list(_composable_state._module_state_mapping.values()):
        state: Any = reference()
        if isinstance(state, FSDPState) and state._training_state is TrainingState.IDLE:
            for fsdp_parameter in (p for group in _groups_of(state) for p in group.fsdp_params):
                if parameter is fsdp_parameter.sharded_param:
                    return True
                if parameter is getattr(fsdp_parameter, "_unsharded_param", None):
                    return True
    return False


@contextmanager
def staying_whole(module: nn.Module) -> Iterator[None]:
    """Inside of its forward: calls of the module leave what it has whole, until the forward ends.

    Otherwise each frees it for what comes after, which would read pieces: FSDP1's without an error.

    Args:
        module: Of FSDP2, or a wrapper of FSDP1's or DDP's.
    """
    if isinstance(module, FSDPModule):  # whose hooks do nothing where a backward recomputes
        state: Any = module._get_fsdp_state()
        changed = with_attribute(state, "_training_state", TrainingState.PRE_BACKWARD)
    else:
        changed = with_attribute(module, "forward", module.module)
    with changed:
        yield


@contextmanager
def with_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an object has an attribute, which a module does not take for one of its children."""
    before = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
    owner.__dict__[name] = value
    try:
        yield
    finally:
        owner.__dict__.pop(name, None)
        owner.__dict__.update(before)


def fsdp2_let_flags_follow(fsdp_parameter: Any) -> None:
    """Let a parameter stay frozen, or thawed, by what happened to it while it was whole.

    Then a module shows another one, whose ``requires_grad`` torch forgets.
    """
    to_unsharded, to_sharded = fsdp_parameter.to_unsharded, fsdp_parameter.to_sharded
    shown: list[bool] = []  # what the whole one said when it was shown

    def show_whole() -> None:
        to_unsharded()
        shown[:] = [fsdp_parameter._unsharded_param.requires_grad]

    def show_sharded() -> None:
        trains = [fsdp_parameter._unsharded_param.requires_grad] if shown else []
        if trains != shown:  # else the sharded one may have been frozen meanwhile
            fsdp_parameter.sharded_param.requires_grad_(trains[0])
        shown.clear()
        to_sharded()

    fsdp_parameter.to_unsharded, fsdp_parameter.to_sharded = show_whole, show_sharded


def fsdp2_shown(fsdp_parameter: Any) -> Tensor:
    """What its module has now: the sharded parameter, or the whole one."""
    place = fsdp_parameter._module_info
    return cast(Tensor, getattr(place.module, place.param_name))


def fsdp2_unreduced(fsdp_parameter: Any) -> Tensor | None:
    """The gradient of backwards without communication: in one of two places, by dtype."""
    accumulated: Tensor | None = fsdp_parameter.unsharded_accumulated_grad
    if accumulated is not None:
        return accumulated
    unsharded = getattr(fsdp_parameter, "_unsharded_param", None)  # from the first gather on
    return None if unsharded is None else unsharded.grad


def fsdp2_clear_unreduced(fsdp_parameter: Any) -> None:
    """FSDP2 offers no way; left there, the gradient is added to the next step's."""
    if "unsharded_accumulated_grad" in vars(fsdp_parameter):  # later torches have one place
        fsdp_parameter.unsharded_accumulated_grad = None
    unsharded = getattr(fsdp_parameter, "_unsharded_param", None)
    if unsharded is not None:
        unsharded.grad = None


def fsdp2_partial(group: Any) -> Tensor | None:
    """What waits for the mean over replicas, of all parameters of a group."""
    partial: Tensor | None = group._partial_reduce_output
    return partial


def fsdp2_keep_partials_apart(group: Any) -> None:
    """Add what waits for the mean over replicas to gradients of the same parameters.

    torch keeps it in one buffer, to which it would add those of any others that come later.
    """
    post_backward = group.post_backward
    held: list[Any] = []  # the parameters whose gradients wait, in order

    def reduce(*unused: Any) -> None:
        partial = group._partial_reduce_output
        now = [p for p in group.fsdp_params if fsdp2_unreduced(p) is not None]
        is_due = group.reduce_grads and (now or group.all_reduce_grads)
        if partial is not None and is_due and now != held:
            sizes = [p.padded_sharded_param_size.numel() for p in held]
            parts = dict(zip(held, partial.split(sizes), strict=True))
            now = [p for p in group.fsdp_params if p in now or p in held]
            for p in now:
                if fsdp2_unreduced(p) is None:
                    whole = p._unsharded_param  # whose memory may be freed
                    whole.grad = torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)
            # In the stream that reads it: memory of another one may be handed out again before.
            with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
                for p in now:
                    if p not in parts:
                        parts[p] = partial.new_zeros(p.padded_sharded_param_size.numel())
                group._partial_reduce_output = torch.cat([parts[p] for p in now])
        post_backward(*unused)
        held[:] = now or held

    group.post_backward = reduce


def fsdp2_clear_partial(group: Any) -> None:
    """FSDP2 offers no way; left there, it is added to the next step's."""
    group._partial_reduce_output = None


def let_go_of_tensors(held: Any) -> None:
    """Drop all tensors among an object's attributes; the object is not used again.

    What torch made for sharding lives as long as a graph that went through it, which a loss that
    somebody keeps holds, or until cycles are collected.
    """
    for name, value in list(vars(held).items()):
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(tensor, Tensor) for tensor in values):
            setattr(held, name, None)


def fsdp1_let_go(roots: Iterable[nn.Module]) -> None:
    """Drop shards, whole copies and gradients, where torch keeps its own objects alive."""
    for flat, _ in list(fsdp1_flat_parameters(roots)):
        flat.grad = None
        flat.data = flat.data.new_empty(0)
        let_go_of_tensors(flat)


def fsdp2_let_go(fsdp_parameters: Iterable[Any], groups: Iterable[Any]) -> None:
    """Drop shards, whole copies and gradients, where torch keeps its own objects alive."""
    for fsdp_parameter in fsdp_parameters:
        fsdp_parameter.sharded_param.grad = None
        let_go_of_tensors(fsdp_parameter)
    for group in groups:
        let_go_of_tensors(group)


def fsdp1_begin(roots: Iterable[nn.Module]) -> None:
    """Make them roots. FSDP1 waits for the first forward, which may be that of a part."""
    for root in roots:
        _lazy_init(root, root)


def fsdp1_wrappers(roots: Iterable[nn.Module]) -> list[FullyShardedDataParallel]:
    """FSDP1's wrappers, of all roots."""
    return [wrapper for root in roots for wrapper in FullyShardedDataParallel.fsdp_modules(root)]


def fsdp1_flat_parameters(roots: Iterable[nn.Module]) -> Iterator[tuple[Any, list[nn.Parameter]]]:
    """FSDP1's flat parameters, and the original ones that each is made of."""
    for module in fsdp1_wrappers(roots):
        if module._handle is not None:
            flat = module._handle.flat_param
            yield flat, list(flat._params or ())


def fsdp1_see_thawed(module: nn.Module) -> None:
    """Let one unit train what was thawed since the root's forward began; torch asks only there.

    Not the reverse: what is frozen in the forward alone has to have its gradient in the backward.
    """
    handle: Any = cast(FullyShardedDataParallel, module)._handle
    if handle is not None and any(p.requires_grad for p in handle.flat_param._params):
        handle.flat_param.requires_grad = True


def fsdp1_holds_unreduced(flat: Any) -> bool:
    """Whether a flat gradient is whole: that of a backward without communication."""
    if flat.grad is None or flat._unpadded_unsharded_size == flat._sharded_size:
        return False
    return bool(flat.grad.size() == flat._unpadded_unsharded_size)


def fsdp1_clear(flat: Any) -> None:
    """Drop a flat gradient, and the reduced one that the next is added to."""
    flat.grad = None
    flat.__dict__.pop("_saved_grad_shard", None)


def fsdp1_clear_parts(flat: Any) -> None:
    """Clear what ``zero_grad`` of some parameters left while the whole copy was there.

    torch writes such changes back when it gathers: under ZeRO-2 not between forward and backward.
    """
    held = flat.__dict__.get("_saved_grad_shard", flat.grad)
    if held is None or held.numel() != flat._local_shard.numel():
        return
    for original, info in zip(flat._params, flat._shard_param_infos, strict=True):
        if info.in_shard and original.grad is None:
            held.narrow(0, info.offset_in_shard, info.numel_in_shard).zero_()


def fsdp1_show_frozen(flat: Any, given: Collection[nn.Parameter]) -> None:
    """Let parameters that are frozen by now have the gradients that they got before.

    torch hides them where it frees a whole copy, and then takes them for cleared.
    """
    if flat.grad is None or flat.grad.numel() != flat._local_shard.numel():
        return
    for original, info in zip(flat._params, flat._shard_param_infos, strict=True):
        is_hidden = info.in_shard and original.grad is None and not original.requires_grad
        if is_hidden and original in given:
            part = flat.grad.narrow(0, info.offset_in_shard, info.numel_in_shard)
            original.grad = part.view(original.shape)


@contextmanager
def fsdp1_kept_whole(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, every parameter is whole, and a forward keeps it; FSDP1 has no switch. Collective."""
    handles: dict[FullyShardedDataParallel, Any] = {m: m._handle for m in fsdp1_wrappers(roots)}
    sharded = {m: h for m, h in handles.items() if h is not None and h.uses_sharded_strategy}
    before = {handle: handle._sharding_strategy for handle in sharded.values()}
    for module, handle in sharded.items():
        handle._sharding_strategy = HandleShardingStrategy.SHARD_GRAD_OP
        module._unshard(async_op=False)
    try:
        yield
    finally:
        for handle, strategy in before.items():
            handle._sharding_strategy = strategy
            handle.reshard(True)
            handle._prefetched = False


def fsdp1_free(module: nn.Module) -> None:
    """Free the whole copies of one unit, where there are any; FSDP1 has no public name for it."""
    handle: Any = cast(FullyShardedDataParallel, module)._handle
    has_run = handle is not None and hasattr(handle.flat_param, "_local_shard")
    if has_run and handle.uses_sharded_strategy and not handle.needs_unshard():
        _reshard(module, handle, True)


def fsdp1_reshard(roots: Iterable[nn.Module]) -> None:
    """Bring every parameter back to this rank's piece, also after an exception in a forward."""
    for module in fsdp1_wrappers(roots):
        handle: Any = module._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        if hasattr(handle.flat_param, "_local_shard"):  # since the first forward
            if not handle._skipped_use_sharded_views:  # p.data was assigned since, perhaps
                handle._writeback_orig_params()
            handle.reshard(True)


class AgreeingGradScaler(torch.amp.GradScaler):
    """torch's scaler, where gradients are this rank's pieces: inf on any rank counts on all.

    torch's own ``ShardedGradScaler`` keeps what it found in a shape that fused optimizers refuse.
    """

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler, device: torch.device) -> AgreeingGradScaler:
        """With the settings of another one."""
        agreeing = cls(device.type, enabled=scaler.is_enabled())
        agreeing.load_state_dict(scaler.state_dict())
        return agreeing

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """As torch's, which would only queue copies of both to gradients on the host.

        It would also ask the others of each list of DTensors, where these are: NCCL takes none of
        the host.
        """
        pieces = [_piece_with_gradient(p) for p in parameters_of(optimizer) if p.grad is not None]
        home = next((piece.device for piece in pieces), found_inf.device)
        numbers = inv_scale.to(home), found_inf.to(home)
        of_pieces: Any = SimpleNamespace(param_groups=[{"params": pieces}])
        return super()._unscale_grads_(of_pieces, *numbers, allow_fp16)

    def unscale_(self, optimizer: Optimizer) -> None:
        """As torch's; a rank without any gradient takes part. Collective."""
        super().unscale_(optimizer)
        found: dict[torch.device, Tensor]
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if self._enabled:
            # One collective, where groups communicate, wherever gradients are and if there are any.
            largest = torch.zeros((), device=self._device)
            for found_inf in found.values():
                largest = torch.maximum(largest, found_inf.to(largest.device))
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            for found_inf in found.values():
                found_inf.copy_(largest)
            if not found:  # a fused optimizer adds them up, and takes 1 for inf
                found[largest.device] = largest


def _piece_with_gradient(parameter: Tensor) -> Tensor:
    """What this rank has of a DTensor, with what it has of the gradient; others as they are."""
    gradient: Any = parameter.grad
    if not isinstance(gradient, DTensor):
        return parameter
    piece = cast(DTensor, parameter.detach()).to_local()
    piece.grad = gradient.to_local()
    return piece
