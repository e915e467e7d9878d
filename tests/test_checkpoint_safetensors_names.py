"""Names of tensors that the format uses for something else."""

import torch
from torch import nn

from lightning_fsdp import save_pretrained
from lightning_fsdp.checkpoint.convert import convert


def test_a_tensor_called_as_the_format_says_it_is_of_has_no_second_name(tmp_path):
    module = nn.ParameterDict({"pt": torch.ones(2)})  # files say {"format": "pt"}
    save_pretrained(module, tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "full", to="full")
    assert list(torch.load(tmp_path / "full", weights_only=True)["state_dict"]) == ["pt"]
