"""Sharded parameters of a module by original name, and their values streamed as whole tensors."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from lightning_fsdp.core.schedule import Schedule
from lightning_fsdp.core.segment import Segment
from lightning_fsdp.core.sharded_module import hooks_of
from lightning_fsdp.core.sharded_tensor import ShardedTensor


class ByName:
    """The sharded parameters of a module by name, and the segments that they belong to."""

    def __init__(self, module: nn.Module, what: str) -> None:
        self.module = module
        self._segment_of = {
            parameter: segment
            for schedule in schedules_in(module)
            for segment in schedule.segments
            for parameter in segment.parameters
        }
        self.parameters = self._find(what)

    def look_up(self, name: str) -> ShardedTensor:
        """A parameter by its original name.

        Raises:
            KeyError: There is none; the message says which are near.
        """
        if name not in self.parameters:
            raise unknown(name, self.parameters)
        return self.parameters[name]

    def segments(self) -> dict[Segment, list[str]]:
        """The names of each segment, in order."""
        segments: dict[Segment, list[str]] = {}
        for name, parameter in self.parameters.items():
            segments.setdefault(self._segment_of[parameter], []).append(name)
        return segments

    def stream(self, shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Gather slices one segment at a time, one collective each; of each, the smallest last.

        One segment is whole, beside what the caller still holds.
        """
        for segment, names in self.segments().items():
            present = [name for name in names if name in shards]
            if not present:
                continue
            layout, communicator = segment.layout, segment.communicator
            home = segment.home
            region = segment.shard.new_zeros(layout.numel, device=home.compute_device)
            start, _ = layout.shard_range(communicator.rank)
            for name in present:
                slot = self.parameters[name].spec.slot
                offset = start + layout.offset_in_shard(slot, communicator.rank)
                home.to_device(shards[name].detach(), region[offset:][: shards[name].numel()])
            region = home.to_host(
                communicator.gather(region, segment.name).wait(), may_pin=False
            ).wait()
            slots = {name: self.parameters[name].spec.slot for name in present}
            wholes = {
                name: region[slot.offset : slot.offset + slot.numel].view(slot.shape)
                for name, slot in slots.items()
            }
            del region
            *others, smallest = sorted(present, key=lambda name: -slots[name].numel)
            for name in others:
                yield name, wholes.pop(name)
            if others:  # the caller holds it while the next segment is gathered, and nothing more
                wholes[smallest] = wholes[smallest].clone()
            yield smallest, wholes.pop(smallest)

    def _find(self, what: str) -> dict[str, ShardedTensor]:
        """By name; also while their unit computes and leaves stand for them."""
        computing = {
            id(leaf): parameter
            for segment in set(self._segment_of.values())
            for leaf, parameter in zip(segment.leaves, segment.parameters, strict=True)
        }
        found = {}
        for name, parameter in self.module.named_parameters():
            sharded = computing.get(id(parameter), parameter)
            if isinstance(sharded, ShardedTensor):
                found[name] = sharded
        if not found:
            raise ValueError(
                f"{what}: expected a module with sharded parameters, got "
                f"{type(self.module).__name__} without any. Call fully_shard or shard_model first."
            )
        return found


def schedules_in(module: nn.Module) -> list[Schedule]:
    """The schedules that run the units of a module, or of modules inside it."""
    hooks = (hooks_of(inner) for inner in module.modules())
    return list(dict.fromkeys(h.schedule for h in hooks if h is not None))


def unknown(name: str, names: Collection[str]) -> KeyError:
    """What to raise for a name that no sharded parameter has."""
    near = difflib.get_close_matches(name, names, n=3)
    return KeyError(
        f"{name!r}: expected the original name of a sharded parameter, such as "
        f"{near or list(names)[:3]}."
    )
