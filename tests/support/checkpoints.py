"""States to save, in every form that a checkpoint takes, and the values that they must come back
with: those of plain tensors, made from a seed.
"""

import json
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

FORMS = ("plain", "dtensor")


class Net(nn.Module):
    """Sizes that no number of ranks divides, a parameter smaller than four ranks, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(7, 5)
        self.block = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("count", torch.randint(0, 100, ()))


def whole_state(seed: int) -> dict[str, torch.Tensor]:
    """Plain tensors; every rank makes the same."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Net()
        state = {f"model.{name}": value.detach() for name, value in net.state_dict().items()}
        momentum = {f"optimizer.0.{n}.exp_avg": torch.randn(p.shape) for n, p in state.items()}
    return state | momentum


def make_state(form: str, seed: int) -> dict[str, torch.Tensor]:
    """The state of ``whole_state(seed)``; as ``"dtensor"``, sharded by torch's ``fully_shard``."""
    whole = whole_state(seed)
    if form == "plain":
        return whole
    net = Net()
    net.load_state_dict({n.removeprefix("model."): v for n, v in whole.items() if n[0] == "m"})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net, mesh=mesh)
    state = {f"model.{name}": value for name, value in net.state_dict().items()}
    assert isinstance(state["model.inlet.weight"], DTensor)
    for name, value in whole.items():
        if name not in state:
            like = state[name.removeprefix("optimizer.0.").removesuffix(".exp_avg")]
            if isinstance(like, DTensor):
                value = _shard_like(value, like)
            state[name] = value
    return state


def values_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole plain tensors. Collective where tensors are sharded."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in state.items()
    }


def assert_is(state: dict[str, torch.Tensor], seed: int) -> None:
    """``state`` has the values of ``whole_state(seed)``, to the bit."""
    found, expected = values_of(state), whole_state(seed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def sign_again(folder: Path) -> None:
    """Make the marker say what the files hold now, as somebody would who forges a checkpoint."""
    marker = json.loads((folder / "complete.json").read_text())
    for name in marker["files"]:
        data = (folder / name).read_bytes()
        marker["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    (folder / "complete.json").write_text(json.dumps(marker))


def _shard_like(whole: torch.Tensor, like: DTensor) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements)
