"""What is sent: how many collectives, how many bytes, and that nobody waits for them too early.

U units, P parameters, W ranks. Per micro-batch ZeRO-3 gathers each unit at most twice and reduces
it once; ZeRO-2 gathers each unit once per optimizer step. Counted below torch's public functions by
a dispatch mode of the tests' own.
"""

import functools
import time

import pytest
import torch

from lightning_fsdp import ZERO2, fully_shard, shard_model
from lightning_fsdp.core.sharded_module import units_in
from tests.support.counting import CollectiveCounter
from tests.support.models import causal_lm, lm_loss, shard_lm_by_hand, token_batch
from tests.support.parity import OPTIMIZERS, PLANS
from tests.support.ranks import PLAIN, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

SIZES = {"width": 24, "num_blocks": 3}
NUM_UNITS = 5  # of shard_model: the embeddings, three blocks, the final norm with the head
NUM_PARAMETERS = sum(p.numel() for p in causal_lm(**SIZES).parameters())


def _count_steps(rank, world_size, plan, num_micro_batches):
    """A counter for each of three optimizer steps, ``sum`` accumulation."""
    model = shard_model(causal_lm(**SIZES), PLANS[plan])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    summaries = []
    for step in range(3):
        with CollectiveCounter() as counter:
            for micro_batch in range(num_micro_batches):
                lm_loss(model, token_batch(step, micro_batch, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        summaries.append(_summary(counter, world_size))
    return summaries


def _summary(counter, world_size):
    return {
        "kinds": {call.kind for call in counter.data()},
        "gathers": counter.num_gathers(world_size),
        "reductions": counter.num_reductions(world_size),
        "gathered bytes": counter.gathered_bytes(world_size),
        "reduced bytes": counter.reduced_bytes(world_size),
        "control calls": len(counter.control()),
        "largest control": max((call.nbytes for call in counter.control()), default=0),
    }


def _bytes_of_one_pass(world_size, itemsize=4):
    """What a rank gets when every parameter moves once: without padding, and with."""
    exact = itemsize * NUM_PARAMETERS * (world_size - 1) / world_size
    return exact, 1.03 * exact + NUM_UNITS * 128 * world_size


# Every two of a backend, a number of ranks and one of micro-batches.
@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "backend"),
    [(2, 1, "gloo"), (2, 3, PLAIN), (3, 1, PLAIN), (3, 3, "gloo")],
)
def test_zero3_gathers_a_unit_twice_and_reduces_it_once(world_size, num_micro_batches, backend):
    by_rank = run_on_ranks(_count_steps, world_size, "zero3", num_micro_batches, backend=backend)
    least, most = _bytes_of_one_pass(world_size)
    for summaries in by_rank:
        for step, counts in enumerate(summaries):
            # Backward of the embeddings needs no weight; the head stays whole from forward to
            # backward as soon as one backward has shown that it is first there.
            expected = (2 * NUM_UNITS - 2) * num_micro_batches + (step == 0)
            assert counts["gathers"] == expected
            assert counts["reductions"] == NUM_UNITS * num_micro_batches
            assert least * num_micro_batches <= counts["reduced bytes"] <= most * num_micro_batches
            assert (
                least * num_micro_batches < counts["gathered bytes"] <= 2 * most * num_micro_batches
            )
    for summaries in zip(*by_rank, strict=True):
        # In pieces, the padding between parameters is not sent.
        bytes_reduced = [counts.pop("reduced bytes") for counts in summaries]
        assert max(bytes_reduced) - min(bytes_reduced) <= most - least
        assert all(counts == summaries[0] for counts in summaries), "ranks sent different amounts"


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "backend"),
    [(2, 1, PLAIN), (2, 2, "gloo"), (3, 1, "gloo"), (3, 2, PLAIN)],
)
def test_zero2_gathers_a_unit_once_per_optimizer_step(world_size, num_micro_batches, backend):
    least, most = _bytes_of_one_pass(world_size)
    for summaries in run_on_ranks(
        _count_steps, world_size, "zero2", num_micro_batches, backend=backend
    ):
        for counts in summaries:
            assert counts["gathers"] == NUM_UNITS
            assert least <= counts["gathered bytes"] <= most
            assert counts["reductions"] == NUM_UNITS * num_micro_batches
            assert least * num_micro_batches <= counts["reduced bytes"] <= most * num_micro_batches


def _count_reshard_choices(rank, world_size):
    """``fully_shard(reshard_after_forward=...)`` as in torch: False keeps to the end of backward,
    no further.
    """
    gathers = {}
    for choice in (True, False, None):
        model = shard_lm_by_hand(causal_lm(**SIZES), fully_shard, reshard_after_forward=choice)
        for step in range(2):
            with CollectiveCounter() as counter:
                lm_loss(model, token_batch(step, 0, rank)).backward()
                lm_loss(model, token_batch(step, 1, rank)).backward()
        gathers[choice] = counter.num_gathers(world_size)
    return gathers


def test_reshard_after_forward_means_what_it_means_in_torch():
    num_units = 7
    for gathers in run_on_ranks(_count_reshard_choices, 2):
        assert gathers[False] == 2 * num_units
        assert 2 * (2 * num_units - 3) <= gathers[True] <= 2 * 2 * num_units
        assert gathers[None] == gathers[True]  # the root has no parameters of its own here


def _count_kinds(rank, world_size):
    model = shard_model(causal_lm(**SIZES))
    for step in range(4):  # what follows a whole step is known after the third
        with CollectiveCounter() as counter:
            lm_loss(model, token_batch(step, 0, rank)).backward()
    return _summary(counter, world_size)


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [("gloo", {"send", "recv"}), (PLAIN, {"all_gather", "reduce_scatter"})],
)
def test_gloo_gathers_in_pairs_and_other_backends_in_one(backend, kinds):
    for counts in run_on_ranks(_count_kinds, 3, backend=backend):
        assert counts["kinds"] == kinds


def test_ranks_agree_on_little_beside_the_data():
    """A step in a known order has one small message about used parameters; nothing of the data's
    size hides there.
    """
    for counts in run_on_ranks(_count_kinds, 2):
        assert counts["control calls"] <= 1
        assert counts["largest control"] < 1024


def _count_without_gradients(rank, world_size, plan):
    model = shard_model(causal_lm(**SIZES), PLANS[plan])
    with torch.no_grad(), CollectiveCounter() as counter:
        for _ in range(3):
            lm_loss(model, token_batch(0, 0, rank))
    return counter.num_gathers(world_size), counter.num_reductions(world_size)


@pytest.mark.parametrize(("plan", "num_gathers"), [("zero3", 3), ("zero2", 1)])
def test_forwards_without_gradients_gather_once_each_or_under_zero2_once(plan, num_gathers):
    counts = run_on_ranks(_count_without_gradients, 2, plan)
    assert counts == [(num_gathers * NUM_UNITS, 0)] * 2


def _count_evaluation_before_backward(rank, world_size):
    model = shard_model(causal_lm(**SIZES), ZERO2)
    with CollectiveCounter() as counter:
        loss = lm_loss(model, token_batch(0, 0, rank))
        with torch.no_grad():
            lm_loss(model, token_batch(0, 1, rank))
        loss.backward()
    return counter.num_gathers(world_size)


def test_an_evaluation_leaves_what_zero2_keeps_for_the_backward():
    assert run_on_ranks(_count_evaluation_before_backward, 2) == [NUM_UNITS] * 2


def _count_tied(rank, world_size, plan):
    model = shard_model(causal_lm(width=64, tied=True), PLANS[plan])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with CollectiveCounter() as counter:
            lm_loss(model, token_batch(step, 0, rank)).backward()
        optimizer.step()
    return _summary(counter, world_size)


@pytest.mark.parametrize("plan", PLANS)
def test_a_tied_weight_is_reduced_once_and_gathered_only_while_nobody_holds_it(plan):
    """Two units use it. ZeRO-3 gathers it for each forward; the head keeps it for its backward."""
    model = causal_lm(width=64, tied=True)
    tied = 4 * model.head.weight.numel() / 2
    once = 4 * sum(p.numel() for p in model.parameters()) / 2
    embeddings = tied + 4 * model.positions.weight.numel() / 2  # no backward of theirs needs them
    norm = 4 * sum(p.numel() for p in model.norm.parameters()) / 2  # with the head, one unit
    gathered = once if plan == "zero2" else 2 * once - (embeddings - tied) - norm
    padding = (NUM_UNITS + 2) * 256
    assert 2 * padding < tied, "the test shows nothing"
    for counts in run_on_ranks(_count_tied, 2, plan):
        assert once <= counts["reduced bytes"] <= once + padding
        assert gathered <= counts["gathered bytes"] <= gathered + 2 * padding


def _loss_that_ends(tokens, model, ends):
    hidden = model.embedding(tokens[:, :-1]) + model.positions(torch.arange(9))
    for block in model.blocks[: 3 if ends == "early" else None]:
        hidden = block(hidden)
    loss = hidden.square().mean()
    if ends != "early":
        loss = loss + model.head(model.norm(hidden)).square().mean()
    return loss


def _change_ends(rank, world_size):
    """Passes that end elsewhere, that have no backward, or two of them before one."""
    plain, model = causal_lm(**SIZES), shard_model(causal_lm(**SIZES))
    losses = functools.partial(_loss_that_ends, token_batch(0, 0, rank)["tokens"])
    model.forward, counts = functools.partial(losses, model), []
    for ends in ("late", "late", "early", "early", "late", "late"):
        with CollectiveCounter() as counter:
            with torch.no_grad():
                model("early")
            kept = model("late") if counts else 0.0  # of two, each has its backward
            (model(ends) + kept).backward()
        counts.append(counter.num_gathers(world_size))
        (losses(plain, ends) + (losses(plain, "late") if kept else 0.0)).backward()
        assert not any(unit.is_held for unit in units_in(model))
    for name, parameter in plain.named_parameters():
        mean = parameter.grad.clone()
        torch.distributed.all_reduce(mean)
        found = dict(model.named_parameters())[name].grad.full_tensor()
        torch.testing.assert_close(found, mean / world_size, atol=1e-5, rtol=1e-5)
    return counts


def test_a_unit_that_was_kept_for_a_backward_that_begins_elsewhere_is_freed():
    run_on_ranks(_change_ends, 2)


def _drop_losses(rank, world_size):
    model = shard_model(causal_lm(**SIZES))
    tokens = token_batch(0, 0, rank)["tokens"]
    model.forward = functools.partial(_loss_that_ends, tokens, model)
    found = []

    def drop_loss(ends):
        model(ends)
        found.append([unit.name for unit in units_in(model) if unit.is_held])

    for _ in range(2):
        model("late").backward()
    drop_loss("late")
    drop_loss("early")  # ends with a unit that no backward has begun with
    model("early").backward()
    drop_loss("early")  # a unit followed in the passes before, and was gathered ahead
    return found


def test_a_unit_is_kept_for_a_backward_that_began_with_it_until_another_one_is_entered():
    assert run_on_ranks(_drop_losses, 2) == [[["norm"], [], []]] * 2


def _count_traffic(rank, world_size):
    model = shard_model(causal_lm(**SIZES))
    with CollectiveCounter() as counter:
        for step in range(2):
            lm_loss(model, token_batch(step, 0, rank)).backward()
    traffic = next(iter(model.parameters())).spec.communicator.traffic
    return _summary(counter, world_size), traffic


def test_the_doors_own_counts_are_those_that_an_independent_counter_sees():
    for counts, traffic in run_on_ranks(_count_traffic, 3):
        gathers, reductions = traffic["all_gather"], traffic["reduce_scatter"]
        assert (gathers.calls, reductions.calls) == (counts["gathers"], counts["reductions"])
        assert gathers.sent_bytes == counts["gathered bytes"]
        assert reductions.sent_bytes == counts["reduced bytes"]


# --- asynchrony: the peer's part of a collective is held back, this rank goes on ---

WAIT_LIMIT_S = 10.0


def _forward_while_the_peer_holds_back(rank, world_size, folder):
    """Rank 1 stops inside block 0 until rank 0 has finished block 1. By then rank 0 has asked for
    block 2, of which rank 1 has sent nothing.
    """
    model = shard_lm_by_hand(causal_lm(**SIZES), fully_shard, reshard_after_forward=True)
    _train_two_steps(model, rank)
    flag, waited = folder / "finished", []
    if rank == 1:
        model.blocks[0].up.register_forward_pre_hook(lambda *_: waited.append(_wait_for(flag)))
    else:
        model.blocks[1].down.register_forward_hook(lambda *_: flag.touch())
    lm_loss(model, token_batch(2, 0, rank)).backward()
    return waited


def _backward_while_the_peer_holds_back(rank, world_size, folder):
    """Rank 1 stops inside block 2's backward until rank 0 is through most of block 1's. By then
    rank 0 has given its part of block 2's reduction and has asked for block 0; rank 1 has done
    neither.
    """
    model = shard_lm_by_hand(causal_lm(**SIZES), fully_shard, reshard_after_forward=True)
    _train_two_steps(model, rank)
    flag, waited = folder / "finished", []

    def when_gradient_arrives(action):
        def hook(module, args, output):
            output.register_hook(lambda gradient: action() and None)

        return hook

    if rank == 1:
        model.blocks[2].up.register_forward_hook(
            when_gradient_arrives(lambda: waited.append(_wait_for(flag)))
        )
    else:
        model.blocks[1].query_key_value.register_forward_hook(when_gradient_arrives(flag.touch))
    lm_loss(model, token_batch(2, 0, rank)).backward()
    return waited


def _train_two_steps(model, rank):
    """The order of units is known from then on."""
    for step in range(2):
        lm_loss(model, token_batch(step, 0, rank)).backward()
        model.zero_grad()


def _wait_for(flag):
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not flag.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
@pytest.mark.parametrize(
    "run", [_forward_while_the_peer_holds_back, _backward_while_the_peer_holds_back]
)
def test_a_unit_computes_while_the_peer_holds_back_the_next_collective(run, backend, tmp_path):
    by_rank = run_on_ranks(run, 2, tmp_path, backend=backend)
    assert by_rank == [[], [True]], "rank 0 waited for data that its computation did not need yet"
