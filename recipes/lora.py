"""Qwen2.5 with LoRA of peft: the model is frozen, and two thin matrices beside some layers train.

The base may be in bf16, of which a rank holds its share and nothing else; adapters are in fp32.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from peft import LoraConfig, get_peft_model
from typing_extensions import override

from lightning_fsdp.harness.command_line import folder_argument
from recipes.errors import RecipeError
from recipes.monitor import GracefulStop
from recipes.qwen import Qwen

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class QwenLora(Qwen):
    """Qwen2.5 whose adapters train.

    Args:
        rank: Rank of the adapters' matrices.
        alpha: The adapters' outputs are multiplied by ``alpha / rank``.
        layers: Names of the linear layers that get adapters.
        base_dtype: Dtype of the frozen weights.
        options: Of :class:`~recipes.qwen.Qwen`, which builds the base.

    Raises:
        RecipeError: Neither or both of ``size`` and ``pretrained``, or a rank below 1.
    """

    blocks_name = "base_model.model.model.layers"

    def __init__(
        self,
        *,
        rank: int = 16,
        alpha: int = 32,
        layers: tuple[str, ...] = LAYERS,
        base_dtype: Literal["float32", "bfloat16"] = "bfloat16",
        **options: Any,
    ) -> None:
        if rank < 1:
            raise RecipeError(f"rank: expected 1 or more, got {rank}. Raise --model.rank.")
        super().__init__(**options)
        self.base_dtype: torch.dtype = getattr(torch, base_dtype)
        self.lora = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=list(layers), task_type="CAUSAL_LM"
        )

    @override
    def build(self) -> Any:
        """The base with adapters; peft keeps those in fp32."""
        base: Any = super().build()
        return get_peft_model(base.to(self.base_dtype), self.lora)


class SaveAdapters(L.Callback):
    """Writes the adapters at the end of training, for ``PeftModel.from_pretrained``.

    A run that was interrupted with steps left writes none: it is to go on, with the same options.

    Args:
        folder: Folder that does not exist yet, or is empty.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse at once what could not be saved after training, on all ranks.

        Raises:
            RecipeError: A strategy that does not save adapters, something in the folder, or a file
                in its place.
        """
        if stage != "fit":
            return
        if not hasattr(trainer.strategy, "save_adapters"):
            raise RecipeError(
                f"SaveAdapters: expected a strategy of lightning_fsdp, got "
                f"{type(trainer.strategy).__name__}. Set --trainer.strategy scratch_fsdp."
            )
        taken = trainer.strategy.broadcast(_taken(self.folder) if trainer.is_global_zero else None)
        if taken is not None:
            raise RecipeError(f"SaveAdapters.folder: {taken}")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, with all ranks."""
        stops = [each for each in trainer.callbacks if isinstance(each, GracefulStop)]  # type: ignore[attr-defined]
        if any(stop.has_stopped for stop in stops):
            rank_zero_info(f"Adapters: not written to {self.folder} before the run is complete")
            return
        strategy: Any = trainer.strategy
        strategy.save_adapters(self.folder)
        rank_zero_info(f"Adapters: {self.folder}")


def _taken(folder: Path) -> str | None:
    """Why nothing new could be written to a folder."""
    try:
        folder_argument(str(folder))
        if folder.is_dir() and any(folder.iterdir()):
            expected = "expected a folder that does not exist yet"
            return f"{expected}, got '{folder}' with something in it. Move it."
    except (ArgumentTypeError, OSError) as error:
        return str(error)
    return None
