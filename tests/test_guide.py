"""What docs/fsdp1-vs-fsdp2.md says is what was measured, and its code does what it says.

The wrong lines of the page fail as it says, the right ones give what plain torch gives in one
process.
"""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.guide.behaviours import run_one
from benchmarks.guide.counters import ARMS, run_arm
from benchmarks.guide.probes import BEHAVIOURS
from benchmarks.guide.subjects import ENGINES, FSDP2, Block, are_equal, batch_of, loss_of, net
from benchmarks.guide.tables import TABLES, read
from benchmarks.update_tables import GUIDE, split
from tests.support.cases import each_on_trainer_ranks
from tests.support.ranks import run_on_ranks
from tests.support.trainer import Regressor, make_loader, seeded, weights_of

PAGE = GUIDE.read_text()
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)
_before, _steps = PAGE.split("## Migrate in three steps")
_steps, _wrong = _steps.split("## Common mistakes")
STEPS = SNIPPET.findall(_steps)
WRONG = SNIPPET.findall(_wrong)
ENGINE_NAMES = ("FSDP1", "FSDP2", "here")

# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_was_measured(name):
    _, table, _ = split(PAGE, name)
    assert table == TABLES[name](), "run: make guide"


def test_every_table_of_the_page_is_a_measured_one():
    assert sorted(re.findall(r"<!-- ([\w-]+):begin -->", PAGE)) == sorted(TABLES)
    unmeasured = PAGE
    for name in TABLES:
        before, _, after = split(unmeasured, name)
        unmeasured = before + after
    assert "\n|" not in unmeasured


def _needs_the_torch_of(part):
    measured = read(part)["versions"]["torch"].split(".")[:2]
    if torch.__version__.split(".")[:2] != measured:
        pytest.skip(f"measured with torch {'.'.join(measured)}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("topic", dict.fromkeys(b.topic for b in BEHAVIOURS.values()))
def test_the_engines_still_behave_as_measured(topic, engine):
    _needs_the_torch_of("behaviours")
    measured = {row["name"]: row[engine]["said"] for row in read("behaviours")["rows"]}
    assert measured.keys() == BEHAVIOURS.keys()
    names = [name for name, behaviour in BEHAVIOURS.items() if behaviour.topic == topic]
    found = {name: run_one(name, engine).said for name in names}
    assert found == {name: measured[name] for name in names}


@pytest.mark.parametrize("index", range(len(ARMS)), ids=[f"{a.engine}{a.stage}" for a in ARMS])
def test_an_engine_still_holds_and_sends_what_was_counted(index):
    _needs_the_torch_of("counters")
    measured, found = read("counters")["rows"][index], run_arm(index)
    assert found.pop("memory") == pytest.approx(measured.pop("memory"), abs=0.02)
    assert found == measured


def test_the_suite_and_the_benchmark_ended_well():
    assert read("access")["exit_code"] == 0
    assert read("speed")["exit_code"] == 0


def test_every_place_that_the_page_links_to_exists():
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (GUIDE.parent / path).resolve() if path else GUIDE
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not anchor or anchor in anchors, link


# -- migration -------------------------------------------------------------------------------------

NUM_STEPS, NUM_MICRO_BATCHES = 3, 2


def _scaled_loss(model: Any, batch: Any) -> Tensor:
    return 30.0 * loss_of(model, batch)  # so that clipping to 1 clips


def _batch(rank: int, step: int, i: int) -> Any:
    """The last step's gradients are too small to be clipped, which would hide a wrong divisor."""
    return (*batch_of(rank, 10 * step + i), 0.3 if step == NUM_STEPS - 1 else 30.0)


def _weighted_loss(model: Any, batch: Any) -> Tensor:
    *batch, weight = batch
    return weight * loss_of(model, batch)


def _program(engine: str) -> str:
    """The three steps of one engine."""
    parts = [code for code in STEPS if re.match(rf"# {engine}\b", code)]
    assert len(parts) == 3
    return "\n".join(parts)


def _in_fp32(code: str) -> str:
    assert "torch.bfloat16" in code
    return code.replace("torch.bfloat16", "torch.float32")


def _run_program(rank: int, world_size: int, code: str, path: str) -> None:
    warnings.simplefilter("ignore")  # torch's own, about names that it will drop
    steps = [[_batch(rank, step, i) for i in range(NUM_MICRO_BATCHES)] for step in range(NUM_STEPS)]
    names = {"torch": torch, "dist": dist, "Block": Block, "device": torch.device("cpu")}
    names |= {"model": net(), "steps": steps, "loss_of": _weighted_loss, "path": path}
    exec(code, names)


def _plain_training() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and momentum after the same steps, in one process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        for rank in range(2):
            for i in range(NUM_MICRO_BATCHES):
                loss = _weighted_loss(model, _batch(rank, step, i))
                (loss / (2 * NUM_MICRO_BATCHES)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert (norm > 1) == (step < NUM_STEPS - 1)
        optimizer.step()
        optimizer.zero_grad()
    named = dict(model.named_parameters())
    momentum = {name: optimizer.state[p]["momentum_buffer"] for name, p in named.items()}
    return model.state_dict(), momentum


def _check_program(code: str, folder: Path, tolerance: float) -> None:
    path = folder / "saved.pt"
    run_on_ranks(_run_program, 2, code, str(path))
    saved = torch.load(path, weights_only=True)
    weights, momentum = _plain_training()
    assert are_equal(saved["model"], weights, tolerance)
    state = saved["optimizer"]["state"]
    names = dict(enumerate(momentum)) if 0 in state else {name: name for name in momentum}
    found = {names[key]: values["momentum_buffer"] for key, values in state.items()}
    assert are_equal(found, momentum, tolerance)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_the_three_steps_train_and_save_as_plain_torch(engine, tmp_path):
    _check_program(_in_fp32(_program(engine)), tmp_path, 1e-6)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_the_three_steps_do_so_in_bf16_as_printed(engine, tmp_path):
    _check_program(_program(engine), tmp_path, 2e-2)


def test_the_first_step_of_fsdp2_needs_one_changed_import(tmp_path):
    theirs, ours = _program("FSDP2"), _program("here")
    first = theirs[: theirs.index("# FSDP2", 1)].replace("torch.distributed.fsdp", "lightning_fsdp")
    assert "from lightning_fsdp import MixedPrecisionPolicy, fully_shard" in first
    rest = ours[ours.index("# here", 1) :]
    _check_program(_in_fp32(first + rest), tmp_path, 1e-6)


class _Clipped(Regressor):
    def loss(self, batch: Any) -> Tensor:
        return 30.0 * super().loss(batch)


def _run_trainer(rank: int, world_size: int, code: str) -> dict[str, Tensor]:
    module = seeded(_Clipped)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    names = {"module": module, "loader": make_loader(), "options": options}
    exec(code.replace("max_epochs=1", "max_epochs=1, **options"), names)
    assert isinstance(names["trainer"], pl.Trainer)
    return weights_of(module)


def test_under_lightning_the_word_alone_changes(tmp_path):
    (code,) = [code for code in STEPS if code.startswith("# under Lightning")]
    words = re.findall(r'"((?:fsdp|scratch)\w+)"', code)
    assert words == ["fsdp1_zero3", "fsdp2_zero3", "scratch_fsdp_zero3"]
    codes = {word: code.replace('"fsdp1_zero3",', f'"{word}",') for word in ("ddp", *words)}
    found = each_on_trainer_ranks(_run_trainer, 2, codes.values())
    trained = {word: found[code] for word, code in codes.items()}
    assert not are_equal(trained["ddp"][0], weights_of(seeded(_Clipped)), 1e-2)
    for word in words:
        for rank in range(2):
            assert are_equal(trained[word][rank], trained["ddp"][rank], 1e-5), word


# -- wrong and right -------------------------------------------------------------------------------

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


def test_every_piece_of_code_is_run_by_a_test():
    marked = [code for code in STEPS if code.startswith(("# FSDP1", "# FSDP2", "# here"))]
    assert len(marked) == 9
    assert len(STEPS) == 10
    assert len(SNIPPET.findall(PAGE)) == len(STEPS) + len(WRONG)
