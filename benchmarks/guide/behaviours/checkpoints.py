"""What a state dict holds, and what reads it."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import lightning_fsdp
from benchmarks.guide.probes import (
    behaviour,
    code,
    on_each_rank,
    seen,
)
from benchmarks.guide.subjects import (
    Engine,
    Outcome,
    Run,
    are_equal,
    mean_gradients,
    net,
    told,
    weights_after_step,
)
from tests.support.counting import CollectiveCounter


@seen("checkpoints", "a value of `model.state_dict()`")
def value_of_a_state_dict(run: Run) -> str:
    value = run.model.state_dict()["head.weight"]
    return f"{code(type(value).__name__)}, {tuple(value.shape)}"


@seen("checkpoints", "share of the model in one rank's `state_dict()`")
def share_in_a_state_dict(run: Run) -> str:
    state = run.model.state_dict()
    held = sum(
        (v.to_local() if hasattr(v, "to_local") else v).numel()
        for name, v in state.items()
        if "scale" not in name
    )
    total = sum(p.numel() for p in net().parameters())
    return on_each_rank(f"{100 * held / total:.0f}%")


@seen("checkpoints", "collectives in `state_dict()`")
def collectives_in_a_state_dict(run: Run) -> str:
    with CollectiveCounter() as counter:
        run.model.state_dict()
    return str(len(counter.calls))


@seen("checkpoints", "whole state on rank 0, to the host, with the model on the host")
def whole_state_on_rank0(run: Run) -> str:
    run.train()
    run.step()
    if run.engine.name == "here":
        state = lightning_fsdp.full_state_dict(run.model, rank0_only=True, cpu_offload=True)
    else:  # torch's one call for both of its engines
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(run.model, options=options)
    result = [True]
    if dist.get_rank() == 0:
        state = {name: value for name, value in state.items() if "scale" not in name}
        result = [are_equal(state, weights_after_step(net, mean_gradients(net)))]
    dist.broadcast_object_list(result)
    return "right" if result[0] else "**wrong values**"


@seen("checkpoints", "`load_state_dict(plain, whole tensors)`")
def loading_whole_tensors(run: Run) -> str:
    other = {name: value + 1 for name, value in net().state_dict().items()}
    run.at = "at once"
    run.model.load_state_dict(other)
    names = dict(net().named_parameters())
    right = {name: other[name] for name in names}
    return "right" if are_equal(run.engine.whole_weights(run.model), right) else "**wrong values**"


@seen("checkpoints", "`torch.save(model.state_dict())`, read by a plain `torch.load`")
def torch_save(run: Run) -> str:
    run.at = "when saved"
    stream = io.BytesIO()
    torch.save(run.model.state_dict(), stream)
    run.at = "when loaded"
    stream.seek(0)
    found = torch.load(stream, weights_only=True)
    if any(type(value) is not Tensor for value in found.values()):
        return f"gives {code(type(found['head.weight']).__name__)}, which needs the same ranks"
    right = net().state_dict()
    return "right" if are_equal(found, right) else "**wrong values**"


@seen("checkpoints", "`dcp.save` of sharded state, read without any rank")
def distributed_checkpoint(run: Run) -> str:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if run.engine.name == "fsdp1":
        FullyShardedDataParallel.set_state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT)
    run.at = "when saved"
    dcp.save(run.model.state_dict(), checkpoint_id=folder[0])
    run.at = "when loaded"
    result = [True]
    if dist.get_rank() == 0:
        whole = Path(folder[0]) / "whole.pt"
        dcp_to_torch_save(folder[0], whole)
        result = [are_equal(torch.load(whole, weights_only=True), net().state_dict())]
    dist.broadcast_object_list(result)
    return "right" if result[0] else "**wrong values**"


@behaviour("checkpoints", "`exp_avg` of a `(3, 7)` weight in `optimizer.state_dict()`")
def optimizer_state(engine: Engine) -> Outcome:
    run = Run(engine)

    def probe() -> str:
        run.shard()
        run.optimizer = torch.optim.Adam(run.model.parameters())
        run.train()
        run.step()
        index = [id(p) for p in run.model.parameters()].index(id(run.model.head.weight))
        state = run.optimizer.state_dict()["state"]
        if index not in state:
            mine = "none"
        else:
            value = state[index]["exp_avg"]
            mine = f"{code(type(value).__name__)}, {tuple(value.shape)}"
        return on_each_rank(mine)

    return told(run, probe)
