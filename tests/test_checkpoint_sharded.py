"""``save_sharded`` and ``load_sharded``: what the matrix of engines and ranks does not show."""

import functools
import itertools
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import (
    ZERO2,
    ZERO3,
    MixedPrecisionPolicy,
    checkpoint,
    full_optimizer_state_dict,
    fully_shard,
    load_sharded,
    save_sharded,
    shard_model,
)
from lightning_fsdp.checkpoint import contents, folder
from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from lightning_fsdp.engines.fsdp2 import FSDP2Engine
from lightning_fsdp.engines.scratch import ScratchEngine
from tests.support.cases import each_on_ranks
from tests.support.checkpoints import verified_files
from tests.support.engine_runs import ENGINES, NUM_STEPS, Run, assert_equal, copied
from tests.support.memory import StorageTracker, bytes_of, optimizer_tensors
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

SHARDING = {"scratch": ScratchEngine, "fsdp1": FSDP1Engine, "fsdp2": FSDP2Engine}


# -- moved twice -----------------------------------------------------------------------------------


def _write(rank, world_size, kind, root, source):
    run = Run(kind, seed=2 if source else 1)
    if source:
        load_sharded(root / source, run.wrapped, run.optimizers)
    run.train(range(NUM_STEPS))
    save_sharded(root / ("first" if source is None else kind), run.wrapped, run.optimizers)
    return copied(run.whole())


def _read(rank, world_size, kind, root, written):
    run = Run(kind, seed=3)
    run.train([9])  # it has state of its own, which is written over
    load_sharded(root / kind, run.wrapped, run.optimizers)
    assert_equal(run.whole(), written[kind][0], kind)


def test_a_run_may_be_moved_again_and_into_optimizers_that_have_state(tmp_path):
    run_on_ranks(_write, 2, "scratch", tmp_path, None)
    written = each_on_ranks(_write, 4, ENGINES, tmp_path, "first")
    for kind, (expected, *_) in written.items():
        # Counts of steps are those of ranks that step: FSDP1 leaves out what has no element.
        states = expected["optimizers"][0]["state"].values()
        assert {float(values["step"]) for values in states} == {2 * NUM_STEPS}, kind
    each_on_ranks(_read, 3, ENGINES, tmp_path, written)


# -- into a module in use --------------------------------------------------------------------------


def _few():
    """Two units of fewer elements than a shard has, so that some ranks have none of them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))


def _load_in_use(rank, world_size, path, plan, options):
    if options:
        options = {"mesh": init_device_mesh("cpu", (2, 2)), **options}
    model, x = shard_model(_few(), plan, units=["Linear"], **options), torch.ones(1, 2)
    numels = [parameter.to_local().numel() for parameter in model.parameters()]
    save_sharded(path, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not model(x).any()  # with a graph: ZeRO-2 keeps the zeros
    load_sharded(path, model)
    torch.testing.assert_close(model(x), _few()(x), atol=0, rtol=0)
    return numels


@pytest.mark.parametrize(
    ("plan", "options"), [(ZERO2, {}), (ZERO3, {"state_over": "all"})], ids=["kept whole", "hosts"]
)
def test_a_module_in_use_gathers_what_was_read_on_all_ranks(tmp_path, plan, options):
    numels = run_on_ranks(_load_in_use, 4, tmp_path / "saved", plan, options)
    assert sorted(numels) == [[0, 0]] * 3 + [[4, 4]]


# -- memory ----------------------------------------------------------------------------------------


def _engine(kind, model, policy=None, **options):
    engine = SHARDING[kind](zero_stage=3, units=["Block"], **{"cpu_offload": False, **options})
    optimizer = torch.optim.AdamW(model.parameters()) if kind == "fsdp1" else None
    engine.shard(model, device=torch.device("cpu"), precision=policy or MixedPrecisionPolicy())
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    engine.watch_optimizer(optimizer)
    return engine, optimizer


def _step(engine, model, optimizer, rank):
    loss = engine.run(functools.partial(lm_loss, model), token_batch(0, 0, rank))
    engine.before_backward()
    loss.backward()
    engine.after_backward()
    optimizer.step()
    optimizer.zero_grad()


def _memory(rank, world_size, folder):
    for kind in SHARDING:
        model = causal_lm(width=64)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        engine, optimizer = _engine(kind, model)
        _step(engine, model, optimizer, rank)
        peak = 0

        def look():
            nonlocal peak
            peak = max(peak, tracker.live_bytes())  # noqa: B023

        tracker = StorageTracker(model, look)
        tracker.track(optimizer_tensors(optimizer))
        before = tracker.settled_bytes()
        with tracker:
            save_sharded(folder / kind, model, [optimizer])
        mine = bytes_of([*model.parameters(), *optimizer_tensors(optimizer)])
        assert mine < 3.5 * whole / world_size
        # At most one more copy of what is on this rank: torch's writer keeps what it has written.
        assert 0 < peak - before <= 1.1 * mine, (kind, peak, before, mine)

        fresh = causal_lm(width=64, seed=2)
        engine, optimizer = _engine(kind, fresh)
        tracker = StorageTracker(fresh, look)
        before, peak = tracker.settled_bytes(), 0
        with tracker:
            load_sharded(folder / kind, fresh, [optimizer])
        moments = bytes_of(optimizer_tensors(optimizer))
        assert peak - before >= moments
        assert peak - before <= moments + 0.75 * whole / world_size, (kind, peak, before, moments)


def test_no_tensor_is_whole_while_it_is_saved_or_loaded(tmp_path):
    run_on_ranks(_memory, 4, tmp_path, timeout_s=280)


# -- how much is read ------------------------------------------------------------------------------


class _TwoLayers(nn.Module):
    def __init__(self, is_tied):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        if is_tied:
            self.b.weight = self.a.weight


def _count_verified(rank, world_size, path):
    tied, model = (shard_model(_TwoLayers(is_tied)) for is_tied in (True, False))
    for each in (tied, model):  # two optimizers, and a tied tensor that is read into two
        each.optimizers = [torch.optim.AdamW(layer.parameters()) for layer in (each.a, each.b)]
    tied.optimizers[1] = torch.optim.AdamW([tied.b.bias])
    model.optimizers[1] = torch.optim.AdamW([model.b.bias])
    tied.a(torch.ones(1, 3)).sum().backward()
    for optimizer in tied.optimizers:
        optimizer.step()
    save_sharded(path, tied, tied.optimizers)
    with verified_files() as names:
        load_sharded(path, model, model.optimizers)
    return names


def test_a_checkpoint_is_verified_once_however_often_it_is_read(tmp_path):
    names = itertools.chain(*run_on_ranks(_count_verified, 2, tmp_path / "a"))
    files = [path.name for path in (tmp_path / "a" / "version-1").iterdir()]
    assert sorted(names) == sorted(set(files) - {"complete.json"})


# -- dtypes, offloading, other optimizers ----------------------------------------------------------


def _move(rank, world_size, kinds, folder, dtype, policy, options):
    writer, reader = kinds
    model = causal_lm(seed=1).to(dtype)
    engine, optimizer = _engine(writer, model, policy, **options)
    _step(engine, model, optimizer, rank)
    save_sharded(folder / writer, model, [optimizer])
    expected = engine.full_state_dict(), engine.full_optimizer_state_dict(optimizer)
    assert {value.dtype for value in expected[0].values()} == {dtype}

    fresh = causal_lm(seed=2).to(dtype)
    engine, optimizer = _engine(reader, fresh, policy, **options)
    load_sharded(folder / writer, fresh, [optimizer])
    found = engine.full_state_dict(), engine.full_optimizer_state_dict(optimizer)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs, f"{writer} -> {reader}")


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# Each engine writes or reads in each of the three ways.
@pytest.mark.parametrize(
    ("moves", "dtype", "policy", "options"),
    [
        ((("scratch", "fsdp1"), ("fsdp2", "scratch")), torch.float32, MIXED, {}),
        ((("fsdp1", "fsdp2"), ("scratch", "fsdp1")), torch.bfloat16, MixedPrecisionPolicy(), {}),
        ((("fsdp2", "scratch"), ("fsdp1", "fsdp2")), torch.float32, None, {"cpu_offload": True}),
    ],
    ids=["mixed", "bf16", "offloaded"],
)
def test_main_weights_of_any_dtype_move(tmp_path, moves, dtype, policy, options):
    each_on_ranks(_move, 2, moves, tmp_path, dtype, policy, options)


def _early_state(rank, world_size, folder):
    """Adagrad has state before its first step, and a number among it that is a tensor."""
    models = [shard_model(causal_lm(seed=seed)) for seed in (1, 2)]
    ours, theirs = (torch.optim.Adagrad(m.parameters(), lr=0.1) for m in models)
    lm_loss(models[0], token_batch(0, 0, rank)).backward()
    ours.step()
    save_sharded(folder, models[0], [ours])
    before = [values["sum"].to_local().data_ptr() for values in theirs.state.values()]
    load_sharded(folder, models[1], [theirs])
    for a, b in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert torch.equal(a["sum"].to_local(), b["sum"].to_local())
        assert a["step"] == b["step"] == 1
    # Read in place: nothing was allocated beside it.
    assert before == [values["sum"].to_local().data_ptr() for values in theirs.state.values()]


def test_state_from_before_the_first_step_is_read_in_place(tmp_path):
    run_on_ranks(_early_state, 2, tmp_path)


def _matrix_of_one_rank(rank, world_size, folder):
    ours, theirs = (shard_model(nn.Linear(4, 4, bias=False)) for _ in range(2))
    optimizers = [torch.optim.Muon(model.parameters()) for model in (ours, theirs)]
    ours(torch.ones(2, 4)).sum().backward()
    optimizers[0].step()
    save_sharded(folder, ours, optimizers[:1])
    load_sharded(folder, theirs, optimizers[1:])
    expected, found = map(full_optimizer_state_dict, optimizers)
    assert_equal(found, expected, "optimizer")


def test_a_rank_that_steps_no_tensor_takes_part_in_reading(tmp_path):
    run_on_ranks(_matrix_of_one_rank, 2, tmp_path)


def test_one_process_without_a_group_saves_and_loads(tmp_path):
    ours, theirs = causal_lm(seed=1), causal_lm(seed=2)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (ours, theirs)]
    lm_loss(ours, token_batch(0, 0, 0)).backward()
    optimizers[0].step()
    save_sharded(tmp_path, ours, optimizers[:1], {"note": [1, "two"]})
    assert load_sharded(tmp_path, theirs, optimizers[1:]) == {"note": [1, "two"]}
    assert_equal(theirs.state_dict(), ours.state_dict(), "model")
    assert_equal(optimizers[1].state_dict(), optimizers[0].state_dict(), "optimizer")


def test_what_was_tied_is_saved_once_and_read_into_both(tmp_path):
    tied, untied = _TwoLayers(is_tied=True), _TwoLayers(is_tied=False)
    save_sharded(tmp_path, tied)
    assert set(folder.read_shapes(tmp_path)) == {"model.a.weight", "model.a.bias", "model.b.bias"}
    load_sharded(tmp_path, untied)
    assert_equal(untied.state_dict(), tied.state_dict(), "model")


# -- refusals --------------------------------------------------------------------------------------


def _wrapped_by_hand(rank, world_size, folder):
    model = torch_fsdp.FullyShardedDataParallel(causal_lm(), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match=r"got FullyShardedDataParallel.*FSDP1Strategy"):
        save_sharded(folder, model)
    dist.barrier()


def test_a_module_wrapped_by_hand_is_refused(tmp_path):
    run_on_ranks(_wrapped_by_hand, 2, tmp_path)


def _save_a_part(rank, world_size, folder):
    model = fully_shard(nn.Linear(4, 4))
    for extra in (model.state_dict(), {"mean": torch.ones(3), "weight": model.weight.detach()}):
        with pytest.raises(TypeError, match=r"extra\['weight'\].*full_tensor\(\)"):
            save_sharded(folder / "saved", model, (), extra)
    save_sharded(folder / "saved", model, (), {"weight": model.weight.full_tensor()})
    assert load_sharded(folder / "saved", model)["weight"].equal(model.weight.full_tensor())


def test_a_sharded_tensor_beside_the_module_is_refused(tmp_path):
    run_on_ranks(_save_a_part, 2, tmp_path)


def test_other_optimizers_are_refused_by_name(tmp_path):
    model = nn.Linear(3, 2)
    adam, foreign = torch.optim.Adam(model.parameters()), nn.Parameter(torch.ones(5))
    with pytest.raises(ValueError, match=r"optimizer 1, group 0, parameter 0.*shape \(5,\)"):
        save_sharded(tmp_path, model, [adam, torch.optim.SGD([foreign])])
    save_sharded(tmp_path, model, [adam])
    with pytest.raises(ValueError, match=r"expected the state of 2 optimizer\(s\).*got 1"):
        load_sharded(tmp_path, model, [adam, adam])
    with pytest.raises(ValueError, match=r"group 0; only in the optimizer: \[\]; only in the chec"):
        load_sharded(tmp_path, model, [torch.optim.Adam([model.weight])])
    with pytest.raises(RuntimeError, match=r"missing: \['0.weight', '0.bias'\]; unexpected: \['we"):
        load_sharded(tmp_path, nn.Sequential(model))
    load_sharded(tmp_path, nn.Sequential(model), strict=False)


# -- where new tensors are somewhere else ----------------------------------------------------------


def _save_and_load_elsewhere(rank, world_size, path):
    run, other = Run("scratch", seed=1), Run("scratch", seed=2)
    run.train(range(NUM_STEPS))
    other.train([0])
    expected, whole = torch.arange(24.0).view(4, 6), torch.zeros(6, 4).t()  # read in a piece apart
    with torch.device("meta"):  # as torch.set_default_device("cuda"), with values that are missed
        save_sharded(path / "run", run.wrapped, run.optimizers)
        load_sharded(path / "run", other.wrapped, other.optimizers)
        checkpoint.save(path / "tensor", {"whole": expected}, {})
        checkpoint.load(path / "tensor", {"whole": whole})
        with ExitStack() as stack:
            opened = contents.open_checkpoint(path / "run", stack)
            devices = {tensor.device.type for tensor in opened.read(list(opened.outlines))}
    assert torch.equal(whole, expected)
    assert devices == {"cpu"}
    return copied(other.whole()), copied(run.whole())


def test_the_default_device_is_not_asked(tmp_path):
    loaded, expected = run_on_ranks(_save_and_load_elsewhere, 2, tmp_path)[0]
    assert_equal(loaded, expected, "loaded")
