"""Ranks of one host that read each other's memory: the bits of the pairs, whatever each rank waits
for and whenever; every end of a rank is noticed by the others, and leaves nothing behind.
"""

import contextlib
import copy
import gc
import logging
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, shard_model
from lightning_fsdp.core.engine.communicator import LocalRegion, Pending
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.engine.layout import plan_layout
from lightning_fsdp.core.ranks import lines, neighbours, one_host, pairs, process_memory
from lightning_fsdp.core.ranks.groups import communicator_of, communicator_of_mesh, way_of
from tests.support import ranks
from tests.support.models import TASKS
from tests.support.one_exchange import train_on_rank
from tests.support.parity import OPTIMIZERS, PLANS, assert_traces_match
from tests.support.programs.drawing import draw_program
from tests.support.programs.running import NotAProgram, run_program
from tests.support.ranks import PLAIN, ends_on_ranks, errors_on_ranks, run_on_ranks
from tests.support.worst_case import poison
from tests.test_core_parity import batches_for

pytestmark = pytest.mark.skipif(
    ranks.active_transport == ranks.PAIRS, reason="what is tested is switched off"
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TIMEOUT_S = 4.0  # of a group whose peer does not come
AT_ONCE_S = 20.0  # what a busy machine may need for what takes milliseconds; no timeout
SHARD_NUMEL = 1000  # some of it padding


def new_mesh(*shape, timeout_s=120.0):
    """Over groups of its own, which no other test's communicator has."""
    ranks = torch.arange(dist.get_world_size()).view(*shape)
    timeout = timedelta(seconds=timeout_s)
    if ranks.ndim == 1:
        return DeviceMesh.from_group(dist.new_group(timeout=timeout), "cpu")
    lanes = [(ranks.t(), None), (ranks, None)]
    groups = []
    for every, _ in lanes:
        for members in every.tolist():
            group = dist.new_group(members, timeout=timeout)
            if dist.get_rank() in members:
                groups.append(group)
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))


def connected(group):
    communicator = communicator_of(group)
    communicator.connect()
    return communicator


@contextlib.contextmanager
def only_in_pairs():
    connect = one_host.connect
    one_host.connect = lambda group: "a test says so"
    yield
    one_host.connect = connect


# --- the same bits ---


def train(rank, world_size, shape, task_name, plan, build, options, accumulation):
    mesh, task = new_mesh(*shape), TASKS[task_name]
    torch.manual_seed(0)
    model = shard_model(build(task), PLANS[plan], mesh=mesh, **options)
    if build is copied_later:
        model = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    batches = batches_for(task_name, world_size)
    trace = train_on_rank(model, batches, task.loss, optimizer, rank, accumulation=accumulation)
    return communicator_of_mesh(mesh).reads_memory, trace


def built(task):
    return task.build()


def copied_later(task):
    return task.build()


def on_meta(task):
    with torch.device("meta"):
        return task.build()


def dtypes(param_dtype, reduce_dtype=None):
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=FP32
    )
    return {"mp_policy": policy}


OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
CASES = {  # task, plan, how it is built, options, accumulation
    "fp32": ("tied_lm", "zero3", built, {}, "sum"),
    "zero2": ("tied_lm", "zero2", built, {}, "local"),
    "bf16 summed in fp32": ("lm", "zero3", built, dtypes(BF16, FP32), "sum"),
    "bf16 added up": ("lm", "zero3", built, dtypes(BF16, FP32), "local"),
    "bf16": ("mlp", "zero2", built, dtypes(BF16), "sum"),
    "fp16": ("mlp", "zero3", built, dtypes(FP16, FP16), "sum"),
    "from the meta device": ("lm", "zero3", on_meta, {}, "sum"),
    "a deepcopy": ("tied_lm", "zero3", copied_later, {}, "local"),
    "offloaded": ("mlp", "zero3", built, OFFLOAD, "sum"),
}


def train_all_on_both_roads(rank, world_size, shape):
    pairs._LARGE_NUMEL, one_host._BLOCK_NUMEL = 40, 100  # several pieces and blocks per shard
    for name, case in CASES.items():
        reads_memory, trace = train(rank, world_size, shape, *case)
        assert reads_memory
        with only_in_pairs():
            reads_memory, expected = train(rank, world_size, shape, *case)
        assert not reads_memory
        assert_traces_match(trace, expected, atol=0, what=name)


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
def test_training_gives_the_bits_of_the_pairs(shape):
    run_on_ranks(train_all_on_both_roads, torch.Size(shape).numel(), shape, timeout_s=200.0)


# --- what was posted stays until it was read ---


def sleep_at_random(rank, longest_s=0.004):
    """Put a pause of its own before every step of the exchange on this rank."""
    drawn = random.Random(rank)

    def paused(function):
        def after_a_pause(*args, **kwargs):
            time.sleep(drawn.choice((0.0, 0.0, drawn.random() * longest_s)))
            return function(*args, **kwargs)

        return after_a_pause

    for name in ("start", "wait_for", "_send", "_listen", "_receive", "_take", "_places"):
        setattr(lines.Lines, name, paused(getattr(lines.Lines, name)))
    process_memory.Place.read = paused(process_memory.Place.read)


def overwrite_as_soon_as_permitted(rank, world_size):
    """Memory that was waited for is poisoned at once, as a core that frees it would."""
    sleep_at_random(rank)
    one_host._BLOCK_NUMEL = 300
    communicator = connected(dist.group.WORLD)
    layout = plan_layout([("a", (7, 90)), ("b", (SHARD_NUMEL * world_size - 720,))], world_size)
    whole, before = torch.empty(layout.numel), None
    for number in range(30):
        poison(whole)
        start, stop = layout.shard_range(rank)
        whole[start:stop] = 10 * number + rank
        gather = communicator.gather(whole, "u")
        gradients = {
            index: torch.full(slot.shape, float(10 * number + rank))
            for index, slot in enumerate(layout.slots)
        }
        sent = list(gradients.values())
        reduction = communicator.reduce(LocalRegion(gradients, layout, "u", _empty, FP32, FP32))
        if before is not None:  # of the last round: it lands when the next one is under way
            _check_mean(before, number - 1, layout, rank)
        gathered = gather.wait().view(world_size, -1)
        assert [set(row.tolist()) for row in gathered] == [
            {10.0 * number + peer} for peer in range(world_size)
        ]
        poison(whole)
        before = reduction, sent
    _check_mean(before, number, layout, rank)


def _empty(numel, dtype):
    return torch.empty(numel, dtype=dtype)


def _check_mean(started, number, layout, rank):
    reduction, sent = started
    mean = reduction.wait()
    for gradient in sent:
        poison(gradient)
    expected = torch.zeros(layout.numel)
    for slot in layout.slots:
        expected[slot.offset : slot.offset + slot.numel] = (
            10 * number + (dist.get_world_size() - 1) / 2
        )
    assert torch.equal(mean, expected[slice(*layout.shard_range(rank))])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_was_posted_stays_until_every_peer_has_read_it(world_size):
    run_on_ranks(overwrite_as_soon_as_permitted, world_size)


def run_programs_with_pauses(rank, world_size, first):
    sleep_at_random(rank, longest_s=0.001)
    for seed in range(first, first + 5):
        with contextlib.suppress(NotAProgram):
            run_program(rank, world_size, draw_program(seed))


@pytest.mark.parametrize(("world_size", "first"), [(2, 0), (3, 5), (4, 10)])
def test_programs_train_as_in_plain_torch_wherever_ranks_pause(world_size, first):
    run_on_ranks(run_programs_with_pauses, world_size, first, timeout_s=200.0)


# --- ends of ranks ---


def gather_on(group, numel=SHARD_NUMEL, name="u"):
    communicator = connected(group)
    return communicator.gather(torch.zeros(communicator.world_size * numel), name)


def killed_while_a_peer_waits(rank, world_size):
    group = dist.new_group(timeout=timedelta(seconds=120))
    gather_on(group).wait()
    if rank == 1:
        time.sleep(60)
    pid, killed = communicator_of(group)._lines._pids[1], []

    def kill():
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.3, kill).start()
    with pytest.raises(
        RuntimeError, match=r"gather of unit 'u' .*expected rank 1 to take"
    ) as failed:
        gather_on(group).wait()
    assert time.monotonic() - killed[0] < AT_ONCE_S
    why = str(failed.value.__cause__)
    assert f"line to rank 1 (process {pid}): expected its data, but " in why
    assert "it has ended" in why or (world_size == 3 and "waited for it in vain" in why)
    with pytest.raises(RuntimeError, match="expected rank 1 to take part"):
        gather_on(group).wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_peer_is_noticed_at_once_and_named(world_size):
    ends = ends_on_ranks(killed_while_a_peer_waits, world_size)
    assert ends == ["done", "died", *["done"] * (world_size - 2)]


def killed_with_a_child(rank, world_size):
    """The child has copies of all descriptors, and so keeps the lines open."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    gather_on(group).wait()
    if rank == 1:
        if os.fork() == 0:
            time.sleep(AT_ONCE_S + 5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="expected rank 1 to take part"):
        gather_on(group).wait()
    assert time.monotonic() - start < AT_ONCE_S


def test_a_killed_peer_is_noticed_though_its_child_lives_on():
    assert ends_on_ranks(killed_with_a_child, 2) == ["done", "died"]


def stopped_for_too_long(rank, world_size):
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    gather_on(group).wait()
    dist.barrier()
    if rank == 1:
        lines_of_it = communicator_of(group)._lines
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"gather .*expected rank 0 to take part"):
            gather_on(group).wait()
        assert "it waited for rank 1 in vain" in lines_of_it._lost[0]
        return
    pid, start = communicator_of(group)._lines._pids[1], time.monotonic()
    with pytest.raises(RuntimeError, match=r"gather .*expected rank 1 to take part"):
        gather_on(group).wait()
    assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + AT_ONCE_S
    os.kill(pid, signal.SIGCONT)


def test_a_stopped_peer_is_named_after_the_timeout_and_finds_out_when_it_wakes():
    run_on_ranks(stopped_for_too_long, 2)


def stopped_after_it_posted(rank, world_size):
    """What it posted is read; that it does not read is noticed."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    gather_on(group).wait()
    if rank == 1:
        lines.Lines._take = lambda self, exchange: os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(RuntimeError):
            gather_on(group).wait()
        return
    pid = communicator_of(group)._lines._pids[1]
    with pytest.raises(RuntimeError, match="expected rank 1 to take part") as failed:
        gather_on(group).wait()
    os.kill(pid, signal.SIGCONT)
    assert "expected it to read what is here" in str(failed.value.__cause__)


def test_a_peer_that_does_not_read_is_named():
    run_on_ranks(stopped_after_it_posted, 2)


def raise_on_one_rank(rank, world_size):
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    gather_on(group).wait()
    if rank == 1:
        raise ValueError("of the user")
    gather_on(group).wait()


def test_a_peer_that_raises_is_named_by_those_that_wait():
    first, second, third = errors_on_ranks(raise_on_one_rank, 3)
    assert (second.type_name, second.message) == ("ValueError", "of the user")
    for error in (first, third):
        assert error.type_name == "RuntimeError"
        assert "gather of unit 'u'" in error.message
        assert "expected rank 1 to take part" in error.message


def give_up_while_a_peer_is_to_read(rank, world_size, who_is_late):
    """Rank 0 posts, gives up and changes its data; rank 1 reads late and must not believe it."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    gather_on(group).wait()
    dist.barrier()
    if rank == 1 and who_is_late == "its thread":
        take = lines.Lines._take
        lines.Lines._take = lambda *args: (time.sleep(TIMEOUT_S + 2), take(*args))
    elif rank == 1:
        time.sleep(TIMEOUT_S + 2)
    whole = torch.full((2 * SHARD_NUMEL,), float(rank))
    gather = communicator_of(group).gather(whole, "u")
    if rank == 1 and who_is_late == "its thread":
        time.sleep(TIMEOUT_S + 3)
    with pytest.raises(RuntimeError, match="expected rank"):
        gather.wait()
    poison(whole)
    if rank == 0:
        time.sleep(4)  # until rank 1 has read


@pytest.mark.parametrize("who_is_late", ["the rank", "its thread"])
def test_data_of_a_rank_that_gave_up_is_not_taken(who_is_late):
    run_on_ranks(give_up_while_a_peer_is_to_read, 2, who_is_late)


def give_up_while_reading(rank, world_size):
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    gather_on(group).wait()
    dist.barrier()
    read = process_memory.Place.read
    if rank == 1:
        process_memory.Place.read = lambda *args: (time.sleep(TIMEOUT_S / 2 + 1), read(*args))
    whole = torch.full((2 * SHARD_NUMEL,), float(rank))
    with pytest.raises(RuntimeError, match="expected rank"):
        communicator_of(group).gather(whole, "u").wait()
    whole.fill_(7.0 + rank)
    time.sleep(TIMEOUT_S)
    assert set(whole.tolist()) == {7.0 + rank}, "written to after the wait"


def test_a_rank_that_gave_up_may_use_its_memory_again():
    run_on_ranks(give_up_while_reading, 2)


def interrupted(rank, world_size, when):
    """Rank 0 posts, is interrupted, frees and changes its data; rank 1 reads after that."""
    model = shard_model(TASKS["mlp"].build(), mesh=new_mesh(2))
    flat_param = next(iter(hooks_of(model).schedule.flat_params))
    flat_param.unshard("a test")
    flat_param.reshard("a test")
    dist.barrier()
    if rank == 1:
        take = lines.Lines._take
        lines.Lines._take = lambda *args: (time.sleep(2), take(*args))
        with pytest.raises(RuntimeError, match=r"gather of unit .* expected rank 0 to take part"):
            _unshard(flat_param)
        return
    if when == "in the wait":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        owner, name = {
            "after the post": (one_host.OneHostCommunicator, "_start"),
            "before the wait": (Pending, "wait"),
        }[when]
        setattr(owner, name, _interrupted(owner, name))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _unshard(flat_param)
    flat_param.reshard("a test")
    assert flat_param.buffer.flat.untyped_storage().nbytes() == 0
    assert time.monotonic() - start < AT_ONCE_S
    with pytest.raises(RuntimeError, match="expected rank 1 to take part") as failed:
        gather_on(hooks_of(model).schedule.communicator.group).wait()
    assert "this rank was interrupted" in str(failed.value.__cause__)


def _unshard(flat_param):
    flat_param.unshard("a test")
    flat_param.wait_for_unshard()


def _interrupted(owner, name):
    function = getattr(owner, name)

    def interrupted(*args):
        setattr(owner, name, function)  # once
        if owner is not Pending:
            function(*args)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("when", ["after the post", "before the wait", "in the wait"])
def test_data_of_a_rank_that_was_interrupted_is_not_taken(when):
    run_on_ranks(interrupted, 2, when)


def interrupted_in_a_post(rank, world_size):
    """What rank 0 starts next is not what rank 1 waits for."""
    communicator = connected(dist.new_group())
    layout = plan_layout([("a", (40,))], world_size)

    def reduce(number):
        gradients = {0: torch.full((40,), number)}
        return communicator.reduce(LocalRegion(gradients, layout, "u", _empty, FP32, FP32))

    if rank == 0:
        send, lines.Lines._send = lines.Lines._send, _raise_interrupt
        with pytest.raises(KeyboardInterrupt):
            reduce(1.0)
        lines.Lines._send = send
    with pytest.raises(RuntimeError, match=f"reduction of unit 'u' .* expected rank {1 - rank} to"):
        reduce(2.0).wait()


def _raise_interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_what_was_not_posted_is_not_mixed_up_with_what_comes_next():
    run_on_ranks(interrupted_in_a_post, 2)


def child_that_ends_lines(rank, world_size):
    communicator = connected(dist.group.WORLD)
    gather_on(dist.group.WORLD).wait()
    if (pid := os.fork()) == 0:
        communicator.break_off()
        communicator._lines.close()
        os._exit(0)
    os.waitpid(pid, 0)
    dist.barrier()
    gather_on(dist.group.WORLD).wait()


def test_a_forked_child_does_not_end_the_lines_of_its_parent():
    run_on_ranks(child_that_ends_lines, 2)


def gather_many_at_once(rank, world_size):
    communicator, listen = connected(dist.group.WORLD), lines.Lines._listen
    dist.barrier()
    if rank == 1:  # for a while it receives nothing
        pauses = iter([1.0])
        lines.Lines._listen = lambda *args: (time.sleep(next(pauses, 0)), listen(*args))
    wholes = [torch.full((2 * n,), 10.0 * n + rank) for n in range(400)]  # one without elements
    gathers = [communicator.gather(whole, f"u{n}") for n, whole in enumerate(wholes)]
    for n, gather in enumerate(gathers):
        assert gather.wait().view(2, -1).tolist() == [[10.0 * n] * n, [10.0 * n + 1] * n]


def test_more_is_posted_than_a_line_holds():
    run_on_ranks(gather_many_at_once, 2)


def ranks_that_post_different_sizes(rank, world_size):
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    gather_on(group, numel=8 * (1 + rank)).wait()


def test_sizes_that_differ_are_refused():
    for error in errors_on_ranks(ranks_that_post_different_sizes, 2):
        assert "to take part" in error.message


# --- where it is not permitted, and what is left behind ---


def refused_on_one_rank(rank, world_size, road):
    log = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger(one_host.__name__).addHandler(handler)
    logging.getLogger(one_host.__name__).setLevel(logging.INFO)
    if road == "refused" and rank == 1:

        def refuse(*args):
            raise PermissionError(1, "Operation not permitted")

        neighbours.read_memory = refuse
    if road == "another host":
        neighbours.host_of_this_process = lambda: (str(rank), "pid:[1]", "net:[1]")
    if road == "no /proc" and rank == 1:
        process_memory.Path.readlink = lambda path: (_ for _ in ()).throw(FileNotFoundError(path))
    one_host.connect, leaked = _noting_descriptors(one_host.connect)
    gather_on(dist.group.WORLD).wait()
    return communicator_of(dist.group.WORLD).reads_memory, log, leaked, len(_threads())


def _noting_descriptors(function):
    """The same, and a list to which a call adds what it leaves open."""
    leaked = []

    def noting(*args):
        before = _descriptors()
        result = function(*args)
        leaked.extend(_descriptors() - before)
        return result

    return noting, leaked


@pytest.mark.parametrize(
    ("road", "words"),
    [
        ("memory", "read each other's memory"),
        ("refused", "in pairs: rank 1: [Errno 1] Operation not permitted"),
        ("another host", "in pairs: they are on several hosts"),
        ("no /proc", "in pairs: rank 1:"),
    ],
)
def test_all_ranks_take_one_road_and_one_of_them_says_which(road, words):
    results = run_on_ranks(refused_on_one_rank, 3, road)
    assert {reads_memory for reads_memory, *_ in results} == {road == "memory"}
    (line,) = [line for _, log, *_ in results for line in log]
    assert line.startswith("ranks [0, 1, 2] of 3 ")
    assert words in line
    for *_, leaked, num_threads in results:
        assert num_threads == (road == "memory")
        assert road == "memory" or not leaked


# --- what the user chooses ---


def layer():
    return torch.nn.Linear(6, 5)


def way(model):
    return way_of(hooks_of(model).schedule.communicator)


def choose(rank, world_size):
    mesh, traces = new_mesh(2), []
    for comm in ("pairs", "direct", "auto"):
        task = TASKS["mlp"]
        torch.manual_seed(0)
        model = shard_model(task.build(), mesh=mesh, comm=comm)
        assert way(model) == ("pairs" if comm == "pairs" else "direct")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        traces.append(train_on_rank(model, batches_for("mlp", 2), task.loss, optimizer, rank))
    for trace in traces[1:]:
        assert_traces_match(trace, traces[0], atol=0, what="comm")
    model = torch.nn.Sequential(layer(), torch.nn.Linear(5, 4))
    fully_shard(model[0], mesh=mesh, comm="pairs")  # each call has its own
    fully_shard(model, mesh=mesh, comm="direct")
    model(torch.ones(2, 6)).sum().backward()
    untouched = layer()
    with pytest.raises(ValueError, match=r"expected one of \('auto', .* for comm, got 'memory'"):
        fully_shard(untouched, mesh=mesh, comm="memory")
    fully_shard(layer(), mesh=(mesh := new_mesh(2, timeout_s=AT_ONCE_S)))
    with pytest.raises(RuntimeError, match=r"ranks disagree .*(?s:.)*comm='pairs'"):
        fully_shard(untouched, mesh=mesh, comm=("pairs", "auto")[rank])
    assert type(untouched.weight) is torch.nn.Parameter


def test_the_user_chooses_how_data_moves():
    run_on_ranks(choose, 2)


def choose_where_there_is_no_choice(rank, world_size):
    for comm in ("pairs", "direct"):
        with pytest.raises(ValueError, match=f"expected gloo and at most 8 .*{comm}.*'auto'"):
            fully_shard(layer(), comm=comm)
    assert way(fully_shard(layer())) == PLAIN


def test_other_backends_have_their_own_collectives_alone():
    run_on_ranks(choose_where_there_is_no_choice, 2, backend=PLAIN)


def choose_what_one_rank_is_refused(rank, world_size, shape):
    if rank == 3:

        def refuse(*args):
            raise PermissionError(1, "Operation not permitted")

        neighbours.read_memory = refuse
    mesh, model = new_mesh(*shape), layer()
    with pytest.raises(
        RuntimeError, match=r"comm='direct'(?s:.)*rank \d: \[Errno 1\] Operation not"
    ):
        fully_shard(model, mesh=mesh, comm="direct")
    assert type(model.weight) is torch.nn.Parameter
    fully_shard(model, mesh=mesh)(torch.ones(2, 6)).sum().backward()
    return way(model)


@pytest.mark.parametrize(
    ("shape", "ways"), [((4,), ["pairs"] * 4), ((2, 2), ["direct"] * 2 + ["pairs"] * 2)]
)
def test_who_insists_on_memory_that_may_not_be_read_is_told_on_all_ranks(shape, ways):
    assert run_on_ranks(choose_what_one_rank_is_refused, 4, shape) == ways


def _descriptors():
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{path.name} {path.readlink()}")
    return found


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "lines"]


def make_and_destroy_groups(rank, world_size):
    gather_on(dist.group.WORLD).wait()  # it is there until the process ends
    one_host.connect, opened = _noting_descriptors(one_host.connect)
    groups = [dist.new_group() for _ in range(3)]
    for number, group in enumerate(groups, start=2):
        gather_on(group).wait()
        assert len(_threads()) == number
    num_lines = 2 * (world_size - 1) + 1  # a socket and a process for each peer, and one to wake
    assert len(opened) == 3 * num_lines
    assert set(opened) <= _descriptors()
    dist.barrier()
    while groups:
        group = groups.pop()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert len(_threads()) == 1 + len(groups)
    assert not set(opened) & _descriptors()


def test_nothing_is_left_of_a_group_that_was_destroyed():
    run_on_ranks(make_and_destroy_groups, 3)
