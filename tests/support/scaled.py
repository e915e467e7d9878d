"""Scalers of sharded gradients."""

import torch

from tests.support import ranks

INITIAL_SCALE = {"mlp": 2.0**21, "tied_lm": 2.0**19}


def new_scaler(task_name):
    """The first steps overflow fp16; later ones fit, until the scale has grown again."""
    return torch.amp.GradScaler(
        ranks.active_device, init_scale=INITIAL_SCALE[task_name], growth_interval=2
    )
