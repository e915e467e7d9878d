"""What an optimizer has in its state dict beside state and groups is saved, too."""

import torch
from torch import nn

from lightning_fsdp import load_sharded, save_sharded
from lightning_fsdp.checkpoint.convert import convert


def _optimizer(model, read):
    """As torch's hooks permit: an entry of its own in the state dict."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "skipped": 3})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: read.append(state.get("skipped")))
    return optimizer


def test_an_entry_of_its_own_comes_back(tmp_path):
    model, read = nn.Linear(3, 2), []
    optimizer = _optimizer(model, read)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_sharded(tmp_path / "saved", model, [optimizer])
    load_sharded(tmp_path / "saved", model, [optimizer])
    assert read == [3]
    assert set(optimizer.state_dict()) == {"state", "param_groups", "skipped"}


def test_an_entry_of_its_own_is_converted(tmp_path):
    model = nn.Linear(3, 2)
    save_sharded(tmp_path / "saved", model, [_optimizer(model, [])])
    convert(tmp_path / "saved", tmp_path / "full", to="full")
    (state,) = torch.load(tmp_path / "full", weights_only=True)["optimizer_states"]
    assert state["skipped"] == 3
    assert set(state) == {"state", "param_groups", "skipped"}
