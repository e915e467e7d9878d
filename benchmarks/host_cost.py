"""What an engine costs the host, where there is nothing to compute and nothing to send.

    python -m benchmarks.host_cost --out benchmarks/results/host_cost.json

One process on torch's fake backend, as rank 0 of 8: collectives return at once, so what remains is
Python, dispatch and allocation. Reported beside torch's FSDP2, interleaved round by round: medians,
and of the ratios of all rounds median and quartiles:

* *units*, *blocks*: forward and backward of 100 units, each a linear layer of width 8, and of 20
  units of 12 such layers, as a block of GPT-2 has 12 parameters; over the time of the same model
  unsharded; microseconds per unit and step.
* *fused, foreach, loop, clipping*: a step of AdamW in its three implementations, and clipping, over
  300 parameters of 8 x 8; microseconds. *bare* is the same on plain tensors as large as a slice:
  what no engine that steps parameter by parameter can undercut.
"""

from __future__ import annotations

import gc
import operator
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.command import BenchmarkParser, write_record
from benchmarks.update_tables import host_table
from lightning_fsdp import fully_shard
from lightning_fsdp.plan.torch_internals import open_fake_group

UNITS = {"units": (100, 1), "blocks": (20, 12)}  # how many, and layers in each
NUM_PARAMETERS = 300
WIDTH = 8
WORLD_SIZE = 8

Work = Callable[[], Any]


def _tower(shard: Callable[..., Any] | None, num_units: int, num_layers: int) -> nn.Module:
    """Layers one after another, a few to a unit."""
    torch.manual_seed(0)

    def unit() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))

    model = nn.Sequential(*(unit() for _ in range(num_units)))
    if shard is not None:
        for each in model:
            shard(each)
        shard(model)
    return model


def _units(*shape: int) -> dict[str, Work]:
    inputs = torch.ones(2, WIDTH, requires_grad=True)

    def step(model: nn.Module) -> None:
        model(inputs).sum().backward()
        model.zero_grad()

    shards = {"scratch": fully_shard, "fsdp2": torch_fully_shard, "unsharded": None}
    models = {name: _tower(shard, *shape) for name, shard in shards.items()}
    return {name: lambda model=model: step(model) for name, model in models.items()}  # type: ignore[misc]


def _sharded_parameters(shard: Callable[..., Any]) -> nn.Module:
    model = nn.Module()
    for index in range(NUM_PARAMETERS):
        model.register_parameter(f"p{index}", nn.Parameter(torch.ones(WIDTH, WIDTH)))
    model.forward = lambda: sum(p.square().sum() for p in model.parameters())
    shard(model)
    model().backward()
    return model


def _optimizer(kind: str) -> dict[str, Work]:
    options = {} if kind == "clipping" else {"foreach": False} if kind == "loop" else {kind: True}
    arms: dict[str, Work] = {}
    bare = [nn.Parameter(torch.ones(WIDTH * WIDTH // WORLD_SIZE)) for _ in range(NUM_PARAMETERS)]
    for parameter in bare:
        parameter.grad = torch.ones_like(parameter)
    if kind == "clipping":
        arms["bare"] = lambda: nn.utils.clip_grad_norm_(bare, 1.0)
    else:
        arms["bare"] = torch.optim.AdamW(bare, lr=1e-3, **options).step
    for name, shard in (("scratch", fully_shard), ("fsdp2", torch_fully_shard)):
        model = _sharded_parameters(shard)
        if kind == "clipping":
            arms[name] = _clipping(name, model)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
            arms[name] = optimizer.step
    return arms


def _clipping(name: str, model: nn.Module) -> Work:
    if name == "scratch":
        return lambda: model.clip_grad_norm_(1.0)  # type: ignore[operator]

    def clip() -> Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return norm.full_tensor()  # type: ignore[attr-defined,no-any-return]

    return clip


def measure(arms: dict[str, Work], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per call of each arm, a round at a time in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_index in range(rounds + 2):
        for name, work in arms.items():
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            if round_index >= 2:
                seconds[name].append((time.perf_counter() - start) / repeats)
    return seconds


def main() -> None:
    """Measure, print a table, write JSON."""
    args = make_parser().parse(None)
    torch.set_num_threads(1)
    open_fake_group(WORLD_SIZE)
    cases = {name: _units(*shape) for name, shape in UNITS.items()}
    cases |= {kind: _optimizer(kind) for kind in ("fused", "foreach", "loop", "clipping")}
    gc.collect()
    gc.freeze()
    rows = []
    for case, arms in cases.items():
        seconds = measure(arms, args.rounds, 1 if case in UNITS else 10)
        if case in UNITS:
            base, num_units = statistics.median(seconds.pop("unsharded")), UNITS[case][0]
            seconds = {n: [(s - base) / num_units for s in of_arm] for n, of_arm in seconds.items()}
        ratios = map(operator.truediv, seconds["scratch"], seconds["fsdp2"])  # of each round
        row: dict[str, Any] = {
            "case": case,
            **{f"{name}_us": statistics.median(values) * 1e6 for name, values in seconds.items()},
            "ratio_quartiles": statistics.quantiles(ratios, n=4),
        }
        rows.append(row)
    print("\n".join(host_table({"rows": rows})))
    write_record(args.out, "host_cost", {"rows": rows})
    dist.destroy_process_group()


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "host_cost", __doc__, examples=["--rounds 5", "--out runs/host_cost.json"]
    )
    parser.add_rounds(60)
    parser.add_out(says="rows")
    return parser


if __name__ == "__main__":
    main()
