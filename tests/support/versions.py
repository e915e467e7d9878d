"""Which torch this is, where what it does by itself has changed."""

import torch

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
