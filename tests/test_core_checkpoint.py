"""``torch.distributed.checkpoint`` saves and loads sharded modules: whole names and shapes in the
folder, read at any other number of ranks, and by tensors that know nothing of this core.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import ZERO3, CPUOffloadPolicy, full_state_dict, shard_model
from lightning_fsdp.core.sharded_module import units_in
from lightning_fsdp.engines.flat_piece import FlatPiece
from tests.support.breaking import padding_in
from tests.support.memory import StorageTracker, bytes_of
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.parity import PLANS, assert_same_tensors, whole
from tests.support.ranks import assert_errors, errors_on_ranks, kept_ranks, run_on_ranks


class Oddities(nn.Module):
    """What is hard to cut: no dimension, no element, fewer than ranks, other strides, ties."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(()))
        self.single = nn.Parameter(torch.randn(1))
        self.three = nn.Parameter(torch.randn(3, 1))
        self.nothing = nn.Parameter(torch.randn(0, 5))
        self.transposed = nn.Parameter(torch.randn(7, 5).t())
        self.cube = nn.Parameter(torch.randn(3, 5, 7), requires_grad=False)
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(5, 4)
        self.second.weight = self.first.weight
        self.half = nn.Linear(9, 3, dtype=torch.bfloat16)
        self.register_buffer("counts", torch.arange(5))


def _save(rank, world_size, folder, plan, arguments=None):
    arguments = arguments or {}
    if "mesh" in arguments:
        arguments["mesh"] = init_device_mesh("cpu", arguments["mesh"], mesh_dim_names=("r", "s"))
    model = shard_model(Oddities(seed=1), plan, **arguments)
    dcp.save({"m": model.state_dict()}, checkpoint_id=folder)


def _load(rank, world_size, folder, plan, arguments=None):
    model = shard_model(Oddities(seed=2), plan, **(arguments or {}))
    state = {"m": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    assert_same_tensors(full_state_dict(model), Oddities(seed=1).state_dict(), atol=0)
    for flat_param in {flat_param for unit in units_in(model) for flat_param in unit.flat_params}:
        for padding in padding_in(flat_param.shard, flat_param.layout, rank):
            assert not padding.any()

    # What was read elsewhere is taken by load_state_dict as well.
    other = shard_model(Oddities(seed=3), plan, **(arguments or {}))
    other.load_state_dict(state["m"])
    assert_same_tensors(full_state_dict(other), Oddities(seed=1).state_dict(), atol=0)


def _state_for_safetensors(seed):
    """Without what torch's own functions do not take: integers; in the background, no dimension."""
    state = shard_model(Oddities(seed), ZERO3).state_dict()
    return {name: value for name, value in state.items() if name not in ("counts", "scale")}


def _save_as_safetensors(rank, world_size, folder):
    state = _state_for_safetensors(seed=1)
    for name in ("many", "one", "in the background"):
        folder_of, is_one = str(folder / name), name == "one"
        writer = dcp.HuggingFaceStorageWriter(
            folder_of, save_distributed=True, enable_consolidation=is_one
        )
        if name == "in the background":
            dcp.async_save(state, storage_writer=writer).result()
        else:
            dcp.save(state, storage_writer=writer)
    dist.barrier()  # rank 0 makes whole tensors of the files
    for name in ("many", "one", "in the background"):
        read = _state_for_safetensors(seed=2)
        dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder / name)))
        for key, value in read.items():
            torch.testing.assert_close(value.to_local(), state[key].to_local(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # that the feature is new, by version
@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_safetensors_hold_all_of_a_slice(tmp_path, world_size):
    run_on_ranks(_save_as_safetensors, world_size, tmp_path)
    assert len([*(tmp_path / "many").glob("*.safetensors")]) > world_size  # several boxes of one
    (file,) = (tmp_path / "one").glob("*.safetensors")
    saved, plain = load_file(file), Oddities(seed=1).state_dict()
    assert plain.keys() - saved.keys() == {"counts", "scale"}
    for name, value in saved.items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=0)


def _save_slices_as_whole(rank, world_size, folder):
    writer = dcp.HuggingFaceStorageWriter(str(folder))
    dcp.save(_state_for_safetensors(seed=1), storage_writer=writer)


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_whole_tensors_takes_no_slices(tmp_path):
    errors = errors_on_ranks(_save_slices_as_whole, 2, tmp_path)
    assert_errors(errors, "CheckpointException", "expected save_distributed=True")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by no_dist, as was asked
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_one_number_of_ranks_saves_another_loads(tmp_path, plan):
    with kept_ranks():
        for writers in (1, 2, 3, 4):
            run_on_ranks(_save, writers, tmp_path / str(writers), plan)
            # Plain tensors in one process without any group read it too.
            state = {"m": Oddities(seed=2).state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / str(writers), no_dist=True)
            assert_same_tensors(state["m"], Oddities(seed=1).state_dict(), atol=0)
        for readers in (1, 2, 3, 4):
            run_on_ranks(_load_all, readers, tmp_path, plan)


def _load_all(rank, world_size, folder, plan):
    for writers in (1, 2, 3, 4):
        _load(rank, world_size, folder / str(writers), plan)


def test_replicas_and_offloaded_shards_are_saved_once_and_loaded(tmp_path):
    run_on_ranks(_save, 2, tmp_path / "plain", ZERO3)
    run_on_ranks(_save, 4, tmp_path / "replicas", ZERO3, {"mesh": (2, 2)})
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    run_on_ranks(_save, 2, tmp_path / "offloaded", ZERO3, offload)
    boxes = {}
    for kind in ("plain", "replicas", "offloaded"):
        metadata = dcp.FileSystemReader(tmp_path / kind).read_metadata()
        boxes[kind] = {(i.fqn, tuple(i.offset)) for i in metadata.storage_data}
        assert len(metadata.storage_data) == len(boxes[kind])
        written = sum(path.stat().st_size for path in (tmp_path / kind).glob("*.distcp"))
        lengths = sum(info.length for info in metadata.storage_data.values())
        assert written == lengths
        run_on_ranks(_load, 3, tmp_path / kind, ZERO3)
    assert boxes["plain"] == boxes["replicas"] == boxes["offloaded"]
    run_on_ranks(_load, 2, tmp_path / "plain", ZERO3, offload)


# -- torch's own sharded tensors -------------------------------------------------------------------


def _to_and_from_fsdp2(rank, world_size, folder):
    ours, theirs = shard_model(causal_lm(seed=1)), causal_lm(seed=2)
    torch_fsdp.fully_shard(theirs)
    dcp.save({"m": ours.state_dict()}, checkpoint_id=folder / "ours")
    dcp.load({"m": theirs.state_dict()}, checkpoint_id=folder / "ours")
    expected = dict(causal_lm(seed=1).named_parameters())
    found = {name: whole(parameter) for name, parameter in theirs.named_parameters()}
    assert_same_tensors(found, expected, atol=0)

    dcp.save({"m": theirs.state_dict()}, checkpoint_id=folder / "theirs")
    back = shard_model(causal_lm(seed=3))
    dcp.load({"m": back.state_dict()}, checkpoint_id=folder / "theirs")
    assert_same_tensors(full_state_dict(back), expected, atol=0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_fsdp2_reads_what_is_saved_here_and_the_other_way(tmp_path, world_size):
    run_on_ranks(_to_and_from_fsdp2, world_size, tmp_path)


# -- beside training -------------------------------------------------------------------------------


def _load_between_micro_batches(rank, world_size, folder, plan):
    """A whole copy that ZeRO-2 keeps must not outlive a load."""
    source, model = shard_model(causal_lm(seed=1), plan), shard_model(causal_lm(seed=2), plan)
    dcp.save({"m": source.state_dict()}, checkpoint_id=folder)
    batch = token_batch(0, 0, rank)
    with model.no_sync():
        lm_loss(model, batch).backward()
    dcp.load({"m": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        assert torch.equal(lm_loss(model, batch), lm_loss(causal_lm(seed=1), batch))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_load_between_micro_batches_is_seen_by_the_next_forward(tmp_path, plan):
    run_on_ranks(_load_between_micro_batches, 2, tmp_path, plan)


def _memory(rank, world_size, folder):
    model = shard_model(causal_lm(width=64))
    shards = bytes_of(model.parameters())
    peak = 0

    def look():
        nonlocal peak
        peak = max(peak, tracker.live_bytes())

    tracker = StorageTracker(model, look)
    before = tracker.live_bytes()
    assert before >= shards
    with tracker:
        dcp.save({"m": model.state_dict()}, checkpoint_id=folder)
    assert 0 < peak - before <= 1.1 * shards  # torch's writer keeps what it wrote until it is done
    peak = 0
    with tracker:
        dcp.load({"m": model.state_dict()}, checkpoint_id=folder)
    assert 0 < peak - before <= shards  # torch's reader reads what another rank wrote box by box
    assert sum(p.nbytes for p in model.parameters()) > 3.5 * shards


def test_saving_and_loading_hold_no_whole_copy(tmp_path):
    run_on_ranks(_memory, 4, tmp_path)


# -- slices by themselves -------------------------------------------------------------------------


def test_a_slice_is_copied_and_nothing_else_is_done_with_it():
    piece = FlatPiece(torch.arange(3.0), (2, 4), 2)
    assert piece.shape == (2, 4)
    for copied in (piece.clone(), piece.detach(), piece.double()):
        assert copied.flat_slice == piece.flat_slice
        assert copied.to_local().tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"expected a whole tensor, got FlatPiece\(.*to_local"):
        piece + 1
    chunks = piece.__create_chunk_list__()
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in chunks] == [
        ((0, 2), (1, 2)),
        ((1, 0), (1, 1)),
    ]
    with pytest.raises(ValueError, match=r"'w': expected the first element of a box.*got \(1, 1\)"):
        piece.__get_tensor_shard__(MetadataIndex("w", torch.Size((1, 1))))
