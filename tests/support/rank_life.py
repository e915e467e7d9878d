"""What a rank does from its start to its end; ``tests/support/ranks.py`` starts it and hears it."""

import faulthandler
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support import processes

PLAIN = (
    "plain_gloo"  # gloo under a name of its own: code that knows gloo by name takes its general way
)
PAIRS = "pairs"  # gloo whose ranks do not read each other's memory, whatever the kernel permits
LEAVE, STAY = b"leave", b"stay"


@dataclass(frozen=True)
class Limits:
    timeout_s: float
    group_timeout_s: float
    grace_s: float


@dataclass(frozen=True)
class Call:
    """What ranks run, in a process group of its own."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: str | None
    limits: Limits
    seed: int
    env: dict[str, str]


def rank_main(
    connection: Connection,
    folder: str,
    rank: int,
    fault: str | None,
    device: str,
    call: Call,
    rendezvous: str,
) -> None:
    """The life of one rank. Every way out but the ordered one is ``os._exit`` or a kill by the
    parent.
    """
    stacks = (Path(folder) / f"stacks-{rank}").open("w")  # open for life
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ.update(_interface(), **call.env)
    # Workers of a loader are forked from the server that this rank is from. Python knows its
    # address here, and would start another, without torch.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]
    told, before = b"", None
    while told != LEAVE:
        # The parent kills long before; this one is for a parent that was itself killed.
        faulthandler.dump_traceback_later(call.limits.timeout_s + 60.0, exit=True, file=stacks)
        try:
            if before is None:
                before = _begin_life(fault, device)
            else:
                before.restore()
                call, rendezvous = pickle.loads(told)
            report = ("done", pickle.dumps(_run_call(call, rank, rendezvous)))
        except BaseException as error:  # noqa: BLE001 (whatever it is, the parent must hear it)
            text = traceback.format_exc()
            connection.send_bytes(pickle.dumps(("error", (type(error).__name__, str(error)), text)))
            _wait_for_parent(connection)
            os._exit(1)
        connection.send_bytes(pickle.dumps(report))
        told = _wait_for_parent(connection)
        _end_group()
        faulthandler.cancel_dump_traceback_later()
        if told == STAY:
            told = _wait_for_parent(connection)


def _begin_life(fault: str | None, device: str) -> Any:
    """What all calls find; returns what can be put back."""
    import torch

    from tests.support.as_new import AsNew

    torch.set_num_threads(1)
    if processes.filters is not None:
        warnings.filters[:] = processes.filters  # type: ignore[index]
    warnings.filterwarnings("error", module=r"lightning_fsdp")
    if device != "cpu":
        _compute_on(device)
    if fault is not None:
        from tests.support import faults

        faults.inject(fault)
    return AsNew()


def _run_call(call: Call, rank: int, rendezvous: str) -> Any:
    import torch.distributed as dist

    backend, is_worst_case = call.backend, call.backend in ("late", "early", "mixed")
    if backend == PAIRS:
        _refuse_to_read_memory()
        backend = "gloo"
    if backend == PLAIN:
        if PLAIN not in dist.Backend.backend_list:
            dist.Backend.register_backend(PLAIN, dist.ProcessGroupGloo, devices=["cpu"])
    elif backend not in (None, "gloo", "nccl"):
        from tests.support.transports import TRANSPORTS
        from tests.support.worst_case import MixedGroup

        MixedGroup.seed = call.seed
        if backend not in dist.Backend.backend_list:
            TRANSPORTS[backend].register()
    if backend is not None:
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.limits.group_timeout_s),
        )
    result = call.fn(rank, call.world_size, *call.args)
    if is_worst_case:
        from tests.support.worst_case import assert_all_waited_for

        assert_all_waited_for()
    return result


def _end_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse_to_read_memory() -> None:
    from lightning_fsdp.core.ranks import lines, one_host

    def refuse(group):
        raise lines.Refused("pytest --transport pairs")

    one_host.Lines = refuse


def _compute_on(device: str) -> None:
    import torch

    from tests.support import ranks
    from tests.support.on_device import OnDevice

    ranks.active_device = device
    torch.cuda.set_device(0)
    torch.backends.cudnn.allow_tf32 = False
    OnDevice(device).__enter__()  # for the rank's life


def _wait_for_parent(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionError):
        os._exit(1)


def _interface() -> dict[str, str]:
    """Keep gloo on the loopback device: some machines cannot resolve their own host name."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", name)}
