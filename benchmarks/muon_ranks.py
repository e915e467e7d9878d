"""What Muon's step costs on 8 to 1024 ranks, beside what is done elsewhere.

    python -m benchmarks.muon_ranks --out benchmarks/results/muon_ranks.json

Arithmetic: which rank holds, steps and sends what is computed exactly, from this core's layout and
its owners and from the rows that FSDP2 deals out; times follow from a link and a rate that are
assumed. Matrices of the blocks alone, as fp32; nothing overlaps.

===========  =======================================================================================
owners       this core: pieces of a gradient to the rank that steps the matrix, slices back
full         ``full_tensor()`` of each gradient: an all-gather, and every rank steps everything
rows         rows of as many equal matrices as there are ranks, all-to-all there and back
===========  =======================================================================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.command import BenchmarkParser, write_record
from lightning_fsdp.core.engine.layout import plan_layout
from lightning_fsdp.core.optimizers.owners import Cut, assign
from lightning_fsdp.harness.command_line import positive
from lightning_fsdp.harness.tables import markdown_table

Shape = tuple[int, ...]

_ITEM_BYTES = 4
_BUCKET_BYTES = 2**25
_ITERATIONS = 5
"""Of Newton and Schulz, as in ``torch.optim.Muon``."""


@dataclass(frozen=True)
class Model:
    """Blocks of one kind.

    Attributes:
        shapes: Of a block's parameters.
        num_blocks: How often.
    """

    shapes: tuple[Shape, ...]
    num_blocks: int

    @property
    def matrices(self) -> list[Shape]:
        """Of all blocks."""
        return [shape for shape in self.shapes if len(shape) == 2] * self.num_blocks


def _gpt2(width: int, num_blocks: int) -> Model:
    matrices = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    vectors = ((width,),) * 6 + ((3 * width,), (4 * width,))
    return Model((*matrices, *vectors), num_blocks)


def _gated(width: int, keys: int, inner: int, num_blocks: int, *, has_biases: bool) -> Model:
    attention = ((width, width), (keys, width), (keys, width), (width, width))
    biases = ((width,), (keys,), (keys,)) if has_biases else ()
    gated = ((inner, width), (inner, width), (width, inner))
    return Model((*attention, *gated, *biases, (width,), (width,)), num_blocks)


MODELS = {
    "GPT-2 XL": _gpt2(1600, 48),
    "Qwen2.5-1.5B": _gated(1536, 256, 8960, 28, has_biases=True),
    "Llama 8B": _gated(4096, 1024, 14336, 32, has_biases=False),
}


@dataclass(frozen=True)
class Link:
    """What is assumed of a rank.

    Attributes:
        bandwidth_gb_s: Of its link in one direction, in 10^9 bytes per second.
        latency_us: Of a message.
        tflop_s: At which it multiplies matrices.
    """

    bandwidth_gb_s: float
    latency_us: float
    tflop_s: float

    def travel_ms(self, num_bytes: float, num_messages: int) -> float:
        """Of the rank that sends or receives most."""
        return num_messages * self.latency_us * 1e-3 + num_bytes / self.bandwidth_gb_s * 1e-6


@dataclass(frozen=True)
class Cost:
    """Of a step, beside what FSDP itself sends.

    Attributes:
        sent_bytes: By a rank, on average.
        most_bytes: Sent or received, by the rank with most.
        num_messages: One after another.
        work: Most operations of a rank.
        mean_work: If ranks had equal work.
    """

    sent_bytes: float
    most_bytes: float
    num_messages: int
    work: float
    mean_work: float


def flops(shape: Shape) -> float:
    """Of Newton and Schulz's iterations."""
    short, long = sorted(shape)
    return _ITERATIONS * (4 * short**2 * long + 2 * short**3)


def owners(model: Model, num_ranks: int) -> Cost:
    """Exactly as the core does it."""
    named = [(str(i), shape) for i, shape in enumerate(model.shapes)]
    # The core lays every second block out backwards.
    layouts = [plan_layout(order, num_ranks) for order in (named, named[::-1])]
    cuts = []
    for block in range(model.num_blocks):
        layout = layouts[block % 2]
        for slot in layout.slots:
            slices = [layout.slice_of(slot, rank) for rank in range(num_ranks)]
            if len(slot.shape) == 2:
                cuts.append(Cut(slot.shape, tuple((each.start, each.stop) for each in slices)))
    sent, received, work = ([0.0] * num_ranks for _ in range(3))
    for cut, owner in zip(cuts, assign(cuts, [0] * num_ranks), strict=True):
        work[owner] += flops(cut.shape)
        for rank in range(num_ranks):
            if rank != owner:
                sent[rank] += cut.num_held(rank) * _ITEM_BYTES
                received[owner] += cut.num_held(rank) * _ITEM_BYTES
    num_bytes = sum(cut.numel for cut in cuts) * _ITEM_BYTES
    buckets = math.ceil(num_bytes / _BUCKET_BYTES / num_ranks)
    # There and back: what was received is sent.
    most = 2 * max(*sent, *received)
    return Cost(
        2 * sum(sent) / num_ranks, most, 2 * buckets * (num_ranks - 1), max(work), _mean(work)
    )


def full(model: Model, num_ranks: int) -> Cost:
    """Everything on every rank."""
    away = (num_ranks - 1) / num_ranks
    num_bytes = sum(map(math.prod, model.matrices)) * _ITEM_BYTES * away
    work = sum(map(flops, model.matrices))
    num_messages = len(model.matrices) * (num_ranks - 1)
    return Cost(num_bytes, num_bytes, num_messages, work, work / num_ranks)


def rows(model: Model, num_ranks: int) -> Cost:
    """Batches of equal matrices; rows are dealt out as FSDP2 does."""
    most = sent = work = 0.0
    num_messages = 0
    for shape, count in Counter(model.matrices).items():
        each = -(-shape[0] // num_ranks) * shape[1] * _ITEM_BYTES
        whole = math.prod(shape) * _ITEM_BYTES
        for first in range(0, count, num_ranks):
            batch = min(num_ranks, count - first)
            most += 2 * max(whole - each, each * (batch - 1))
            sent += 2 * batch * whole * (num_ranks - 1) / num_ranks**2
            work += flops(shape)
            num_messages += 2 * (num_ranks - 1)
    return Cost(sent, most, num_messages, work, sum(map(flops, model.matrices)) / num_ranks)


WAYS: dict[str, Callable[[Model, int], Cost]] = {"owners": owners, "full": full, "rows": rows}


@dataclass(frozen=True)
class Row:
    """One way on one number of ranks; times in milliseconds."""

    model: str
    num_ranks: int
    way: str
    sent_bytes: float
    work_of_mean: float
    computes_ms: float
    travels_ms: float

    @property
    def together_ms(self) -> float:
        """Nothing overlaps."""
        return self.computes_ms + self.travels_ms


def study(world_sizes: Sequence[int], link: Link) -> list[Row]:
    """Every model, number of ranks and way."""
    found = []
    for name, model in MODELS.items():
        for num_ranks in world_sizes:
            for way, cost_of in WAYS.items():
                cost = cost_of(model, num_ranks)
                found.append(
                    Row(
                        name,
                        num_ranks,
                        way,
                        cost.sent_bytes,
                        cost.work / cost.mean_work,
                        cost.work / link.tflop_s * 1e-9,
                        link.travel_ms(cost.most_bytes, cost.num_messages),
                    )
                )
    return found


def table_of(found: Sequence[Row]) -> str:
    """As Markdown: a line per model and number of ranks."""
    head = ["model", "ranks"]
    head += [f"{way}: {what}" for what in ("MB sent per rank", "ms") for way in WAYS]
    head += [f"{way}: work, most / mean" for way in ("owners", "rows")]
    body = []
    for name, num_ranks in dict.fromkeys((row.model, row.num_ranks) for row in found):
        of = {r.way: r for r in found if (r.model, r.num_ranks) == (name, num_ranks)}
        sent = [f"{of[way].sent_bytes / 1e6:,.1f}" for way in WAYS]
        times = [f"{of[way].together_ms:,.1f}" for way in WAYS]
        balance = [f"{of[way].work_of_mean:.2f}" for way in ("owners", "rows")]
        body.append([name, str(num_ranks), *sent, *times, *balance])
    return markdown_table(head, body)


def draw(found: Sequence[Row], path: Path) -> None:
    """Milliseconds over the number of ranks, a panel per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    names = list(dict.fromkeys(row.model for row in found))
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        for way, style in zip(WAYS, ("o-", "s--", "^:"), strict=True):
            of = [row for row in found if (row.model, row.way) == (name, way)]
            axes.plot([r.num_ranks for r in of], [r.together_ms for r in of], style, label=way)
        world_sizes = sorted({row.num_ranks for row in found})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(world_sizes, [str(n) for n in world_sizes])
        axes.minorticks_off()
        axes.set(title=name, xlabel="ranks (computed)", ylabel="ms of Muon's step")
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=150)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def main() -> None:
    """Compute, print, write."""
    args = make_parser().parse(None)
    link = Link(args.bandwidth, args.latency, args.tflops)
    found = study(args.ranks, link)
    print(table_of(found))
    if args.out:
        rows = [asdict(row) for row in found]
        write_record(args.out, "muon_ranks", {"assumed": asdict(link), "rows": rows})
        draw(found, args.out.with_suffix(".png"))


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "muon_ranks",
        __doc__,
        examples=["--ranks 8 64 --bandwidth 25", "--out benchmarks/results/muon_ranks.json"],
    )
    parser.add_ranks(8, 16, 64, 256, 1024, help="numbers of ranks to compute for")
    for option, default, metavar, says in (
        ("--bandwidth", 50.0, "GB_S", "gigabytes per second of a rank's link"),
        ("--latency", 5.0, "US", "microseconds that a message takes besides"),
        ("--tflops", 400.0, "TFLOPS", "speed of a rank, in 10^12 operations per second"),
    ):
        parser.add_argument(option, type=positive, default=default, metavar=metavar, help=says)
    parser.add_out(says="rows; a picture is written beside it")
    return parser


if __name__ == "__main__":
    main()
