"""Fully sharded data parallelism, readable from end to end, for plain torch and for Lightning.

``import lightning_fsdp`` makes the strategy names known to Lightning's Trainer and loads nothing
heavy: every public name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_fsdp.strategies.registry import register

if TYPE_CHECKING:
    __version__: str
    from lightning_fsdp.callbacks.gradient_access import GradientAccessProbe as GradientAccessProbe
    from lightning_fsdp.callbacks.memory import MemoryProbe as MemoryProbe
    from lightning_fsdp.callbacks.microbatch_isolation import (
        MicrobatchIsolationProbe as MicrobatchIsolationProbe,
    )
    from lightning_fsdp.callbacks.noise_scale import GradientNoiseScale as GradientNoiseScale
    from lightning_fsdp.callbacks.throughput import ThroughputMonitor as ThroughputMonitor
    from lightning_fsdp.callbacks.weight_averaging import ShardedEMA as ShardedEMA
    from lightning_fsdp.checkpoint.adapters import load_adapters as load_adapters
    from lightning_fsdp.checkpoint.adapters import save_adapters as save_adapters
    from lightning_fsdp.checkpoint.pretrained import load_pretrained as load_pretrained
    from lightning_fsdp.checkpoint.pretrained import save_pretrained as save_pretrained
    from lightning_fsdp.checkpoint.sharded import async_save_sharded as async_save_sharded
    from lightning_fsdp.checkpoint.sharded import load_sharded as load_sharded
    from lightning_fsdp.checkpoint.sharded import save_sharded as save_sharded
    from lightning_fsdp.config import ZERO2 as ZERO2
    from lightning_fsdp.config import ZERO3 as ZERO3
    from lightning_fsdp.config import CPUOffloadPolicy as CPUOffloadPolicy
    from lightning_fsdp.config import MixedPrecisionPolicy as MixedPrecisionPolicy
    from lightning_fsdp.config import OffloadPolicy as OffloadPolicy
    from lightning_fsdp.config import ShardingPlan as ShardingPlan
    from lightning_fsdp.core.fully_shard import fully_shard as fully_shard
    from lightning_fsdp.core.fully_shard import shard_model as shard_model
    from lightning_fsdp.core.optimizers.optimizer_classes import (
        elementwise_optimizer as elementwise_optimizer,
    )
    from lightning_fsdp.core.sharded_module import ShardedModule as FSDPModule
    from lightning_fsdp.core.sharded_module import UnshardHandle as UnshardHandle
    from lightning_fsdp.core.tensors.norms import NonfiniteGradient as NonfiniteGradient
    from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor as ShardedTensor
    from lightning_fsdp.data import DealtSampler as DealtSampler
    from lightning_fsdp.data import ResumableLoader as ResumableLoader
    from lightning_fsdp.engines.by_name import weights as weights
    from lightning_fsdp.engines.calls import call_with as call_with
    from lightning_fsdp.engines.full_state import (
        full_optimizer_state_dict as full_optimizer_state_dict,
    )
    from lightning_fsdp.engines.full_state import full_state_dict as full_state_dict
    from lightning_fsdp.engines.full_state import (
        load_full_optimizer_state_dict as load_full_optimizer_state_dict,
    )
    from lightning_fsdp.engines.full_state import load_full_state_dict as load_full_state_dict
    from lightning_fsdp.engines.gradients import GradientUnavailable as GradientUnavailable
    from lightning_fsdp.engines.gradients import gradients as gradients
    from lightning_fsdp.engines.methods import register_forward_method as register_forward_method
    from lightning_fsdp.engines.methods import (
        register_forward_method as register_fsdp_forward_method,
    )
    from lightning_fsdp.engines.methods import share_comm_ctx as share_comm_ctx
    from lightning_fsdp.engines.optimizers import optimizers_follow as optimizers_follow
    from lightning_fsdp.libc import leave_host_memory_alone as leave_host_memory_alone
    from lightning_fsdp.losses import linear_cross_entropy as linear_cross_entropy
    from lightning_fsdp.strategies.fsdp1 import FSDP1Strategy as FSDP1Strategy
    from lightning_fsdp.strategies.fsdp2 import FSDP2Strategy as FSDP2Strategy
    from lightning_fsdp.strategies.scratch import ScratchFSDPStrategy as ScratchFSDPStrategy

# public name -> module that defines it
_HOME = {
    "CPUOffloadPolicy": "config",
    "DealtSampler": "data",
    "FSDP1Strategy": "strategies.fsdp1",
    "GradientAccessProbe": "callbacks.gradient_access",
    "GradientNoiseScale": "callbacks.noise_scale",
    "MemoryProbe": "callbacks.memory",
    "MicrobatchIsolationProbe": "callbacks.microbatch_isolation",
    "FSDP2Strategy": "strategies.fsdp2",
    "MixedPrecisionPolicy": "config",
    "OffloadPolicy": "config",
    "ThroughputMonitor": "callbacks.throughput",
    "ResumableLoader": "data",
    "ShardingPlan": "config",
    "ZERO2": "config",
    "ZERO3": "config",
    "GradientUnavailable": "engines.gradients",
    "NonfiniteGradient": "core.tensors.norms",
    "FSDPModule": "core.sharded_module",
    "UnshardHandle": "core.sharded_module",
    "ScratchFSDPStrategy": "strategies.scratch",
    "ShardedEMA": "callbacks.weight_averaging",
    "ShardedTensor": "core.tensors.sharded_tensor",
    "async_save_sharded": "checkpoint.sharded",
    "call_with": "engines.calls",
    "elementwise_optimizer": "core.optimizers.optimizer_classes",
    "full_optimizer_state_dict": "engines.full_state",
    "full_state_dict": "engines.full_state",
    "fully_shard": "core.fully_shard",
    "gradients": "engines.gradients",
    "leave_host_memory_alone": "libc",
    "linear_cross_entropy": "losses",
    "load_adapters": "checkpoint.adapters",
    "load_full_optimizer_state_dict": "engines.full_state",
    "load_full_state_dict": "engines.full_state",
    "load_pretrained": "checkpoint.pretrained",
    "load_sharded": "checkpoint.sharded",
    "optimizers_follow": "engines.optimizers",
    "register_forward_method": "engines.methods",
    "register_fsdp_forward_method": "engines.methods",
    "share_comm_ctx": "engines.methods",
    "save_adapters": "checkpoint.adapters",
    "save_pretrained": "checkpoint.pretrained",
    "save_sharded": "checkpoint.sharded",
    "shard_model": "core.fully_shard",
    "weights": "engines.by_name",
}

# names of torch's FSDP2 -> what they are called in the module that defines them here
_RENAMED = {
    "FSDPModule": "ShardedModule",
    "register_fsdp_forward_method": "register_forward_method",
}

__all__ = [
    "fully_shard",
    "shard_model",
    "ZERO2",
    "ZERO3",
    "ShardingPlan",
    "MixedPrecisionPolicy",
    "NonfiniteGradient",
    "CPUOffloadPolicy",
    "OffloadPolicy",
    "ShardedTensor",
    "FSDPModule",
    "UnshardHandle",
    "register_forward_method",
    "register_fsdp_forward_method",
    "call_with",
    "linear_cross_entropy",
    "share_comm_ctx",
    "leave_host_memory_alone",
    "optimizers_follow",
    "elementwise_optimizer",
    "full_state_dict",
    "load_full_state_dict",
    "full_optimizer_state_dict",
    "load_full_optimizer_state_dict",
    "save_sharded",
    "async_save_sharded",
    "load_sharded",
    "save_pretrained",
    "save_adapters",
    "load_pretrained",
    "load_adapters",
    "ResumableLoader",
    "DealtSampler",
    "gradients",
    "weights",
    "GradientUnavailable",
    "ScratchFSDPStrategy",
    "FSDP1Strategy",
    "FSDP2Strategy",
    "GradientAccessProbe",
    "GradientNoiseScale",
    "MemoryProbe",
    "MicrobatchIsolationProbe",
    "ThroughputMonitor",
    "ShardedEMA",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
        value = getattr(module, _RENAMED.get(name, name))
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, "__version__"})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("lightning-fsdp")
    except metadata.PackageNotFoundError:  # a checkout that nobody installed
        import tomllib
        from pathlib import Path

        text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
        version: str = tomllib.loads(text)["project"]["version"]
        return version


register()
