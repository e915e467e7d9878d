"""The strategy names, and how Lightning comes to know them.

``import lightning_fsdp`` makes the names known without importing Lightning, which takes longer than
all the rest together and which the core does not need:

    Lightning's registry is loaded already   register now
    it is loaded later                       register right after, from an import hook
    it is never loaded                       nothing happens

A registered name is a function that imports the strategy when a Trainer asks for it.

``pytorch_lightning`` is a package of its own, with a registry and classes of its own: its Trainer
takes no strategy that is derived from ``lightning.pytorch``. There the same names raise an error
that says what to import.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

REGISTRY_MODULE = "lightning.pytorch.strategies"
OTHER_REGISTRY_MODULE = "pytorch_lightning.strategies"

# name -> (class, description, constructor arguments). Lower case, as Lightning lowers what the user
# typed; without "ddp" or "deepspeed", which Lightning takes for those families on some machines.
NAMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "scratch_fsdp": ("ScratchFSDPStrategy", "From-scratch FSDP, ZeRO-3", {"zero_stage": 3}),
    "scratch_fsdp_zero3": ("ScratchFSDPStrategy", "From-scratch FSDP, ZeRO-3", {"zero_stage": 3}),
    "scratch_fsdp_zero2": ("ScratchFSDPStrategy", "From-scratch FSDP, ZeRO-2", {"zero_stage": 2}),
    "fsdp1_zero3": ("FSDP1Strategy", "torch's FSDP1, ZeRO-3", {"zero_stage": 3}),
    "fsdp1_zero2": ("FSDP1Strategy", "torch's FSDP1, ZeRO-2", {"zero_stage": 2}),
    "fsdp2_zero3": ("FSDP2Strategy", "torch's FSDP2, ZeRO-3", {"zero_stage": 3}),
    "fsdp2_zero2": ("FSDP2Strategy", "torch's FSDP2, ZeRO-2", {"zero_stage": 2}),
}


def register() -> None:
    """Make the names known to ``Trainer(strategy=...)``, now or when Lightning is imported.

    Safe to call again.
    """
    for name in (REGISTRY_MODULE, OTHER_REGISTRY_MODULE):
        waiting = [finder for finder in sys.meta_path if isinstance(finder, _AfterImport)]
        if name in sys.modules:
            _register_names(sys.modules[name])
        elif not any(finder.name == name for finder in waiting):
            sys.meta_path.insert(0, _AfterImport(name))


def _register_names(module: ModuleType) -> None:
    registry = getattr(module, "StrategyRegistry", None)
    if registry is None:  # the module is still being imported, by an import cycle of the user's
        return
    for name, (cls, description, arguments) in NAMES.items():
        if name not in registry:
            maker: Callable[..., Strategy] = functools.partial(_make, cls)
            if module.__name__ == OTHER_REGISTRY_MODULE:
                maker = functools.partial(_refuse, name)
            registry.register(name, maker, description=description, **arguments)


def _make(cls: str, **arguments: Any) -> Strategy:
    strategy: Strategy = getattr(importlib.import_module("lightning_fsdp"), cls)(**arguments)
    return strategy


def _refuse(name: str, **_: Any) -> Strategy:
    raise TypeError(
        f"Trainer(strategy={name!r}): expected the Trainer of lightning.pytorch, got that of "
        "pytorch_lightning, which takes strategies derived from its own classes only. Write "
        "`import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`, in all "
        "files of the run."
    )


class _AfterImport(MetaPathFinder):
    """Calls ``_register_names`` once a registry has been imported; then it is gone.

    Args:
        name: Of the module with the registry.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Python's hook: asked first for every import, answers for one."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _then_register(spec.loader)
        return spec


def _then_register(loader: Loader) -> None:
    """Let a loader register the names right after the next module that it loads."""
    exec_module = loader.exec_module

    def exec_and_register(module: ModuleType) -> None:
        del loader.__dict__["exec_module"]
        exec_module(module)
        _register_names(module)

    loader.__dict__["exec_module"] = exec_and_register
