"""The wrong lines of docs/fsdp1-vs-fsdp2.md fail as it says.

The right ones give what plain torch gives in one process.
"""

import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.guide.subjects import ENGINES, FSDP2, Block, are_equal, batch_of, loss_of, net
from tests.support.guide import ENGINE_NAMES, PAGE, SNIPPET, STEPS, WRONG
from tests.support.ranks import run_on_ranks


def _scaled_loss(model: Any, batch: Any) -> Tensor:
    return 30.0 * loss_of(model, batch)  # so that clipping to 1 clips


EXCEPTIONS = ("TypeError", "ValueError", "AttributeError", "RuntimeError")


@dataclass(frozen=True)
class Correction:
    """A block of the page.

    Attributes:
        wrong: What its wrong lines are marked with.
        says: Part of the message, where that is an exception.
        shards: Whether the block shards the model itself, and is followed by a training step.
        micro_batches: What the right lines have trained on in the end.
        clips: Whether to a norm of 1.
    """

    wrong: str
    says: str = ""
    shards: bool = False
    micro_batches: tuple[int, ...] = (0,)
    clips: bool = False


# By a part of a block's text.
CORRECTIONS = {
    "mixed_precision=": Correction("TypeError", "'mixed_precision'", shards=True),
    "offload_params=": Correction("TypeError", "OffloadPolicy", shards=True),
    "auto_wrap_policy=": Correction("TypeError", "'auto_wrap_policy'", shards=True),
    "fully_shard(model.blocks)": Correction("ValueError", "ModuleList", shards=True),
    "trains nothing": Correction("trains nothing"),
    "no_sync()": Correction("AttributeError", "no_sync", micro_batches=(0, 1)),
    "the first one too": Correction("steps with the first one too", micro_batches=(1,)),
    "wrong: AttributeError\ntorch.nn": Correction("AttributeError", "clip_grad_norm_", clips=True),
    "each rank otherwise": Correction("scales each rank otherwise", clips=True),
    "set_model_state_dict(": Correction("RuntimeError", "loading state_dict"),
}


def _without(mark: str, block: str) -> str:
    """A block without the lines that have this mark."""
    return re.sub(rf"^.*# {mark}\b.*\n", "", block, flags=re.MULTILINE)


def _reference(correction: Correction, micro_batches: tuple[int, ...]) -> dict[str, Tensor]:
    model = net()
    for rank in range(2):
        for i in micro_batches:
            (_scaled_loss(model, batch_of(rank, i)) / 2).backward()
    if correction.clips:
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _names(rank: int, correction: Correction, path: str) -> dict[str, Any]:
    from torch.distributed import fsdp
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = net()
    names: dict[str, Any] = {**vars(fsdp), **vars(state_dict), "torch": torch, "path": path}
    names |= {"ModuleWrapPolicy": ModuleWrapPolicy, "Block": Block, "device": torch.device("cpu")}
    names |= {"loss_of": _scaled_loss, "first": batch_of(rank, 0), "second": batch_of(rank, 1)}
    names["model"] = model
    return names


def _train_if_needed(names: dict[str, Any], correction: Correction) -> None:
    if correction.shards:
        optimizer = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        names["loss_of"](names["model"], names["first"]).backward()
        optimizer.step()


def _run_correction(
    rank: int, world_size: int, code: str, correction: Correction, path: str
) -> dict[str, Tensor]:
    """Weights in the end."""
    warnings.simplefilter("ignore")
    names = _names(rank, correction, path)
    is_sharded_here = "fully_shard(" in code or "FullyShardedDataParallel(" in code
    if not is_sharded_here:
        FSDP2.shard(names["model"])
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    exec(code, names)
    _train_if_needed(names, correction)
    engine = ENGINES["fsdp1" if "FullyShardedDataParallel(" in code else "fsdp2"]
    return engine.whole_weights(names["model"])


def _expected(correction: Correction, code: str) -> dict[str, Tensor]:
    if "set_model_state_dict" in code:
        return {name: p.detach() + 1 for name, p in net().named_parameters()}
    return _reference(correction, correction.micro_batches)


def _correction_of(block: str) -> Correction:
    (found,) = [c for part, c in CORRECTIONS.items() if part in block]
    return found


def test_every_block_of_the_page_is_run():
    assert SNIPPET.findall(PAGE) == [*STEPS, *WRONG]
    assert len(STEPS) == 3 * len(ENGINE_NAMES) + 1


def test_every_correction_is_on_the_page():
    assert len({id(_correction_of(block)) for block in WRONG}) == len(WRONG) == len(CORRECTIONS)
    for block in WRONG:
        marks = re.findall(r"# wrong: (.*)", block)
        assert marks == [_correction_of(block).wrong]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "whole.pt"
    torch.save({name: value + 1 for name, value in net().state_dict().items()}, path)
    return str(path)


@pytest.mark.parametrize("block", WRONG, ids=[_correction_of(b).wrong for b in WRONG])
def test_the_right_lines_give_what_plain_torch_gives(block, saved):
    code, correction = _without("wrong", block), _correction_of(block)
    tolerance = 2e-2 if "bfloat16" in code else 1e-6
    for found in run_on_ranks(_run_correction, 2, code, correction, saved):
        assert are_equal(found, _expected(correction, code), tolerance)


def _fail(rank: int, world_size: int, code: str, correction: Correction, path: str) -> str:
    names = _names(rank, correction, path)
    if "fully_shard(" not in code:
        FSDP2.shard(names["model"])
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    with pytest.raises(Exception, match=correction.says) as caught:
        exec(code, names)
    return type(caught.value).__name__


_RAISING = [b for b in WRONG if _correction_of(b).wrong in EXCEPTIONS]

_SILENT = [b for b in WRONG if _correction_of(b).wrong not in EXCEPTIONS]


@pytest.mark.parametrize("block", _RAISING, ids=[_correction_of(b).says for b in _RAISING])
def test_the_wrong_lines_raise_what_they_are_marked_with(block, saved):
    code, correction = _without("right", block), _correction_of(block)
    assert run_on_ranks(_fail, 2, code, correction, saved) == [correction.wrong] * 2


@pytest.mark.parametrize("block", _SILENT, ids=[_correction_of(b).wrong for b in _SILENT])
def test_the_silently_wrong_lines_do_what_they_are_marked_with(block, saved):
    code, correction = _without("right", block), _correction_of(block)
    found, again = run_on_ranks(_run_correction, 2, code, correction, saved)
    right = _reference(correction, correction.micro_batches)
    assert not are_equal(found, right)
    if correction.wrong == "trains nothing":
        assert are_equal(found, {n: p.detach() for n, p in net().named_parameters()}, 0.0)
    elif correction.micro_batches == (1,):
        assert are_equal(found, _reference(correction, (0, 1)))
    else:
        assert are_equal(found, again, 0.0)  # each rank's pieces are in both, scaled by two factors
        initial = dict(net().named_parameters())
        ratios = [(found[n] - initial[n]) / (right[n] - initial[n]) for n in found]
        factors = torch.cat([ratio.flatten() for ratio in ratios]).detach()
        assert factors.max() > 1.05 * factors.min() > 0
