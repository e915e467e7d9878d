"""What ranks agree on, on the host, before data moves.

On most backends a collective that ranks enter with different intentions silently mixes up tensors
or aborts the process. So ranks first tell each other what they are about to do, in a gloo group
that is separate from those that move data. It spans all ranks that train the model together,
replicas included.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.communicator import Flags, Pending, alive, collective
from lightning_fsdp.core.engine.watcher import Watcher

_HOST = torch.device("cpu")  # whatever the user's default device is

# Backends whose other ranks do not exist, by name. This one is torch's, for tests.
_without_others = {"fake"}


def expect_no_others(backend: str) -> None:
    """Skip all agreement in groups of a backend that only simulates the other ranks.

    Args:
        backend: Its name. To be called before it opens a group.
    """
    _without_others.add(backend)


_MAX_TRAILS = 20_000  # trails remembered; a model whose order never repeats starts over


class RecordedOrder(Watcher):
    """Makes ranks start the same collectives in the same order, of one model or of several.

    Every gather and reduction is an event; those of a pass, in order, are its trail. Ranks agree on
    an event, before data moves, unless it is what followed the same trail the last time; then it
    costs a look-up. A rank that does something else asks the others to agree, moves no data, and
    raises when the group's timeout is over.

    Args:
        control: The ranks that agree; it remembers trails of all their models.
        model: Name of the model, the same on all ranks.
    """

    def __init__(self, control: ControlGroup, model: str) -> None:
        self._control, self._model = control, model
        self._begins_trail = True  # the next event
        self._factors: Mapping[str, float] = {}

    def on_pass(self, *_: object, **__: object) -> None:
        """The next event begins a trail."""
        self._begins_trail = True

    on_failure = on_pass  # a forward may go on after a backward inside it has failed

    def before_collective(self, event: str, unit_name: str) -> None:
        """Agree on an event, unless it followed the same events the last time.

        Raises:
            RuntimeError: Ranks are about to do different things.
        """
        # Not in on_pass: one rank alone may have a pass that gathers nothing, which is no event.
        if self._begins_trail:
            self._begins_trail = False
            self._control.begin_trail(self._model)
        self._control.agree_unless_repeated("{} unit {!r} ({})", event, unit_name, self._model)

    def before_backward(self, factors: Mapping[str, float]) -> None:
        """Agree on the divide factors if one has changed since ranks last agreed on them.

        Raises:
            RuntimeError: Ranks are about to divide by different numbers.
        """
        if factors != self._factors:
            statement = f"divide the sum of gradients by {factors} ({self._model})"
            self._control.agree("set_gradient_divide_factor", statement)
            self._factors = factors


class ControlGroup:
    """The ranks that train one model together, and the group in which they agree.

    The group is referred to weakly: ``destroy_process_group`` ends it.

    Attributes:
        ranks: Their numbers in the default group, ascending.
        rank: This process among them.
        world_size: Number of ranks.
        has_others: Whether other ranks exist, which they do not in a simulated group.
    """

    def __init__(self, ranks: Sequence[int], data_group: dist.ProcessGroup) -> None:
        """Open the group. Collective over ``ranks``.

        Args:
            ranks: Numbers in the default group, this rank's included.
            data_group: A group that moves data; its timeout is taken over.
        """
        self.ranks = tuple(sorted(ranks))
        self.rank = self.ranks.index(dist.get_rank())
        self.world_size = len(self.ranks)
        self._numbers = itertools.count(1)  # of models
        self._trail, self._model = 0, ""  # hash of what was started in this pass; whose pass it is
        self._latest = 0  # the trail at the latest event; at first, that of the pass before
        self._continuations: dict[int, int] = {}  # by trail, the one that last continued it
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        data_backend = torch_internals.backend_of(data_group, "cpu")
        self.has_others = self.world_size > 1 and data_backend not in _without_others
        if self.has_others:
            timeout = torch_internals.group_timeout(data_group)
            group = dist.new_group(
                list(self.ranks), backend="gloo", timeout=timeout, use_local_synchronization=True
            )
            self._group = weakref.ref(group)

    def model_names(self) -> Iterator[str]:
        """Yield a name for a module that all ranks are about to shard, then for its copies."""
        name = f"sharded module {next(self._numbers)}"
        yield name
        yield from (f"{name}, copy {number}" for number in itertools.count(1))

    def begin_trail(self, model: str) -> None:
        """A pass of ``model`` begins: its first event follows the pass before."""
        # The model that ran before is a part of the hash, so that models that take turns follow
        # trails of their own.
        self._trail, self._model = hash(self._model), model

    def agree_unless_repeated(self, words: str, *event: object) -> None:
        """Agree on an event, unless it followed the same events the last time.

        Args:
            words: To be formatted with the event, for the message.
            event: What this rank is about to start.

        Raises:
            RuntimeError: As :meth:`agree`.
        """
        # A trail begins anew with each pass, or none would ever repeat. What the pass follows is
        # looked up all the same: another rank may still go on with the pass before.
        self._trail = hash((self._trail, words, event))
        before, self._latest = self._latest, self._trail
        # Only the event that followed last is remembered, which is the same on all ranks. If two
        # were, one rank could do the first and another rank the second, and neither would ask.
        if self._continuations.get(before) == self._trail:
            return
        self.agree("order of units", words.format(*event))
        if len(self._continuations) >= _MAX_TRAILS:
            self._continuations.clear()
        self._continuations[before] = self._trail

    def any_rank(self, is_set: Flags) -> Callable[[], Flags]:
        """Ask which flags are set on any rank. Collective, and asynchronous.

        Args:
            is_set: ``(n,)`` or ``(m, n)``; the same shape on every rank.

        Returns:
            A function that waits for the answer, of that shape. It need not be called.
        """
        if self._group is None:
            return lambda: is_set
        flags = torch.tensor(is_set, dtype=torch.uint8, device=_HOST)
        # A rank that has left out a reduction asks about fewer: gloo aborts where sizes differ.
        self.agree_unless_repeated("ask about {} parameters", flags.size(-1))
        most, group = dist.ReduceOp.MAX, alive(self._group)
        what = self._about_to("backward or optimizer's step", "ask what any rank has used or has")
        work = collective(what, "every rank", dist.all_reduce, flags, most, group, async_op=True)
        pending = Pending(what, [(work.wait, "every rank")], flags.bool)
        return lambda: pending.wait().tolist()

    def share(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor``, any shape, on the host, with that of the first rank. Collective."""
        if self._group is not None:
            group = alive(self._group)
            what = self._about_to("initial values", "take what rank 0 draws from")
            collective(what, "every rank", dist.broadcast, tensor, group=group, group_src=0)

    def collect(
        self, mine: Any, occasion: str = "optimizer state", intention: str = "tell which there is"
    ) -> list[Any]:
        """Gather ``mine``, any picklable object, of every rank, in order of ranks. Collective.

        Args:
            mine: This rank's.
            occasion: What ranks are doing, for the message if it fails.
            intention: What this is for, likewise.
        """
        every = [mine] * self.world_size
        if self._group is not None:
            group = alive(self._group)
            what = self._about_to(occasion, intention)
            collective(what, "every rank", dist.all_gather_object, every, mine, group=group)
        return every

    def agree(self, occasion: str, statement: object, reason: str = "") -> None:
        """Return once every rank has made the same statement; otherwise raise on every rank.

        Args:
            occasion: What ranks are about to do, for the message.
            statement: What this rank understands by it, in words.
            reason: More words, for the message, which may differ.

        Raises:
            RuntimeError: Ranks made different statements, or one made none within the group's
                timeout.
        """
        if self._group is None:
            return
        digest = hashlib.blake2b(f"{occasion}\n{statement}".encode(), digest_size=8).digest()
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=_HOST)
        digests = torch.empty(self.world_size, dtype=torch.int64, device=_HOST)
        what, gather = self._about_to(occasion, f"{statement}"), torch_internals.all_gather_single
        collective(what, "every rank", gather, digests, mine, group=alive(self._group))
        if bool((digests == digests[0]).all()):
            return
        statements = self.collect(f"{occasion}: {statement}{reason}", occasion, f"{statement}")
        by_statement = ranks_by_statement(dict(enumerate(statements)))
        lines = [f"  {ranks}: {each}" for each, ranks in by_statement.items()]
        raise RuntimeError(
            f"ranks disagree (this is rank {self.rank} of {self.world_size}): expected the same on "
            "every rank, got\n"
            + "\n".join(lines)
            + "\nNo data has moved. What one rank refuses, all "
            "do. Build the same modules with the same options on every rank, freeze the same "
            "parameters, and run them in the same order. What chooses by data which of its parts "
            "run (experts) is to be one unit, by units= or fully_shard."
        )

    def _about_to(self, occasion: str, intention: str) -> str:
        return f"{occasion} (rank {self.rank} of {self.world_size}), about to: {intention}"


def ranks_by_statement(statements: Mapping[int, str]) -> dict[str, str]:
    """By statement, the ranks that make it, in words: "rank 0", "ranks 1, 2".

    Args:
        statements: Statement by rank.
    """
    ranks_of: dict[str, list[str]] = {}
    for rank, statement in statements.items():
        ranks_of.setdefault(statement, []).append(str(rank))
    return {
        statement: f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        for statement, ranks in ranks_of.items()
    }
