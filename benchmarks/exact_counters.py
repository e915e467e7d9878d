"""Count what one step copies, sends and holds, beside torch's FSDP2. Exact: nothing runs.

    python -m benchmarks.exact_counters                      # 6.7B GPT, 8 and 64 ranks
    python -m benchmarks.exact_counters --layers 2 --ranks 64 --peaks

One forward and backward of rank 0 on fake tensors (shapes, dtypes and storages without data) and
torch's fake process group. A first, uncounted step teaches every engine its order of prefetching.
All arms run in this process under one dispatch mode, at the same dtypes.

    written   Bytes that the engine writes. Every operation counts that is called from engine code
              and writes memory: copies, casts, concatenations, zeros, divisions, sums. Engine code
              is where the innermost telling frame of the Python stack lies: in ``fsdp`` below
              ``torch/distributed`` or in ``lightning_fsdp/core``. If it is the model, ``torch.nn``
              or autograd's engine, the operation is the model's. Writing is what the schema says:
              arguments marked as written to, and outputs with a storage of their own. Bare
              allocations write nothing; collectives are payload.
    payload   Bytes of the whole buffer of each collective: of an all-gather's output, of a
              reduce-scatter's or all-to-all's input. What leaves a rank is (N - 1) / N of it.
    peak      Most bytes that live storages have at the end of any operation; a storage emptied by
              ``resize_(0)`` has none. Shards and their gradients are in it, optimizer state is not.
              FSDP2's is compared with that of torch's ``MemTracker``.
    padding   Share of all shards that is padding, at 1024 ranks. From the layout alone.

FSDP2 is used as documented (each block, then the root). *By hand* makes the same calls with this
core's ``fully_shard``, which keeps the root whole until the backward, as FSDP2 does; *scratch* is
``shard_model``, which keeps nothing. Under "of split" stands the ratio to FSDP2 with embedding and
head as units of their own.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.command import BenchmarkParser, write_record
from lightning_fsdp import ZERO3, fully_shard, shard_model
from lightning_fsdp.core.engine.layout import plan_layout
from lightning_fsdp.core.grouping import cut_flat_params, plan_units
from lightning_fsdp.harness.command_line import at_least
from lightning_fsdp.plan.torch_internals import fake_tensors, open_fake_group
from lightning_fsdp.units import find_units

GIB = 2**30
PADDING_WORLD_SIZE = 1024

# -- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of the batch."""

    layers: int = 32
    width: int = 4096
    vocabulary: int = 32_000
    batch: int = 1
    seq: int = 128
    head_width: int = 128


class Block(nn.Module):
    """Attention and MLP of a GPT, pre-norm: ``12 d^2 + 13 d`` parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.width
        self.num_heads = max(1, d // shape.head_width)
        self.norm_1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.attended = nn.Linear(d, d)
        self.norm_2 = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Embedding, blocks, norm and an untied head; no positions, which would change no figure."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# -- the arms --------------------------------------------------------------------------------------


Arm = Callable[[GPT, DeviceMesh, MixedPrecisionPolicy], nn.Module]


def _scratch(model: GPT, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    return shard_model(model, ZERO3, mesh=mesh, mp_policy=policy)


def _by_hand(
    shard: Callable[..., Any], model: GPT, mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> nn.Module:
    for block in model.blocks:
        shard(block, mesh=mesh, mp_policy=policy)
    return cast(nn.Module, shard(model, mesh=mesh, mp_policy=policy))


def _fsdp2_split(model: GPT, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    torch_fully_shard(model.embedding, mesh=mesh, mp_policy=policy)
    torch_fully_shard(model.head, mesh=mesh, mp_policy=policy)
    return _by_hand(torch_fully_shard, model, mesh, policy)


ARMS: dict[str, Arm] = {
    "scratch": _scratch,
    "scratch_by_hand": functools.partial(_by_hand, fully_shard),
    "fsdp2": functools.partial(_by_hand, torch_fully_shard),
    "fsdp2_split": _fsdp2_split,
}

# Name: dtype of the whole parameters, dtype of the reduction. Main weights are fp32 everywhere.
DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "bf16, fp32 reduce": (torch.bfloat16, torch.float32),
    "bf16, bf16 reduce": (torch.bfloat16, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
}


# -- the counters ----------------------------------------------------------------------------------

_ENGINE = ("/torch/distributed/fsdp/", "/lightning_fsdp/core/")
_MODEL = ("/torch/nn/", "/torch/autograd/", str(Path(__file__).resolve()))
_CALLS_HOOKS = "/torch/nn/modules/module.py"  # tells nothing: it calls models and engines alike
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def is_called_by_engine() -> bool:
    """Whether the innermost telling frame of the stack is an engine's."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if any(part in path for part in _ENGINE):
            return True
        # This file's dispatch mode is on every stack, and is nobody's code.
        tells_nothing = path.endswith(_CALLS_HOOKS) or name == "__torch_dispatch__"
        if not tells_nothing and any(part in path for part in _MODEL):
            return False
        frame = frame.f_back
    return False


@dataclass
class Counts:
    """Figures of one arm.

    Attributes:
        written_bytes: By the engine.
        written_by_operation: The same, by name of the operation.
        payload_bytes: Of all collectives.
        collectives: Calls and payload by name of the collective.
        model_written_bytes: What the model's own copies wrote; equal in all arms, as a check.
        peak_bytes: Of live storages.
        peak_by_kind: What was alive at the peak.
        mem_tracker_peak_bytes: Of torch's tracker, where it can follow.
    """

    written_bytes: int = 0
    written_by_operation: dict[str, int] = field(default_factory=dict)
    payload_bytes: int = 0
    collectives: dict[str, list[int]] = field(default_factory=dict)
    model_written_bytes: int = 0
    peak_bytes: int = 0
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    mem_tracker_peak_bytes: int | None = None


class Meter(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        present: Tensors that are alive already and belong to the shards.
    """

    def __init__(self, present: Sequence[Tensor]) -> None:
        super().__init__()
        self.counts = Counts()
        self.is_backward = False
        self._kinds: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = (
            weakref.WeakKeyDictionary()
        )
        for tensor in present:
            self._kinds[tensor.untyped_storage()] = "shards"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_is_wrapper(cls) for cls in types):
            return NotImplemented  # it unpacks itself, then its plain tensors come by
        kwargs = kwargs or {}
        known = {t.untyped_storage() for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        is_engine = is_called_by_engine()
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args)
        elif func._schema.name.split("::")[1].rstrip("_") not in _ALLOCATIONS:
            self._count_written(func, args, kwargs, result, known, is_engine)
        self._note(func, (args, kwargs, result), is_engine)
        self._measure()
        return result

    def _count_collective(self, func: Any, args: Any) -> None:
        name = func._schema.name.split("::")[1].strip("_")
        sizes = [sum(t.nbytes for t in _tensors(arg)) for arg in args]
        calls = self.counts.collectives.setdefault(name, [0, 0])
        calls[0] += 1
        calls[1] += max(sizes)
        self.counts.payload_bytes += max(sizes)

    def _count_written(
        self, func: Any, args: Any, kwargs: Any, result: Any, known: set[Any], is_engine: bool
    ) -> None:
        if func._schema.name == "fsdp::all_gather_copy_in":  # its schema does not say so
            written = sum(t.nbytes for t in _tensors(args[0]))
        else:
            written = sum(t.nbytes for t in _targets(func, args, kwargs))
            if not written:
                new = [t for t in _tensors(result) if t.untyped_storage() not in known]
                written = sum(t.nbytes for t in new)
        name = func._schema.name.split("::")[1]
        if is_engine:
            self.counts.written_bytes += written
            operations = self.counts.written_by_operation
            operations[name] = operations.get(name, 0) + written
        elif "copy" in name or name in ("clone", "cat"):
            self.counts.model_written_bytes += written

    def _note(self, func: Any, seen: Any, is_engine: bool) -> None:
        name = func._schema.name
        for tensor in _tensors(seen):
            storage = tensor.untyped_storage()
            if storage not in self._kinds:
                model = "gradients, temporaries" if self.is_backward else "activations"
                self._kinds[storage] = "gradients collected" if is_engine else model
        roles: tuple[tuple[Any, str], ...] = ()
        args, kwargs, _ = seen
        if "allgather_base" in name:
            roles = ((args[0], "gathered parameters"),)
        elif "reduce_scatter_base" in name:
            roles = ((args[0], "reduced gradients"), (args[1], "gradients to reduce"))
        elif "alltoall_base" in name:
            roles = ((args[0], "gradients received"), (args[1], "gradients to reduce"))
        elif name == "fsdp::split_with_sizes_copy":
            roles = ((kwargs["out"], "parameters copied out"),)
        elif name == "fsdp::chunk_cat":
            roles = ((kwargs["out"], "gradients to reduce"),)
        for tensors, kind in roles:
            for tensor in _tensors(tensors):
                self._kinds[tensor.untyped_storage()] = kind

    def _measure(self) -> None:
        sizes = [(kind, storage.nbytes()) for storage, kind in self._kinds.items()]
        total = sum(size for _, size in sizes)
        if total > self.counts.peak_bytes:
            by_kind: Counter[str] = Counter()
            for kind, size in sizes:
                by_kind[kind] += size
            self.counts.peak_bytes = total
            self.counts.peak_by_kind = {k: n for k, n in by_kind.most_common() if n}


def _targets(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What an operation's schema says it writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.name in kwargs:
            yield from _tensors(kwargs[argument.name])
        elif position < len(args):
            yield from _tensors(args[position])


def _tensors(structure: Any) -> Iterator[Tensor]:
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, dict):
        yield from _tensors(list(structure.values()))
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            yield from _tensors(item)


def _is_wrapper(cls: type) -> bool:
    """DTensor or the core's own: shapes of a whole tensor without its memory."""
    return issubclass(cls, Tensor) and hasattr(cls, "to_local")


# -- running ---------------------------------------------------------------------------------------


def count(arm: str, dtypes: str, shape: Shape, world_size: int) -> Counts:
    """Figures of the second step of one arm."""
    param_dtype, reduce_dtype = DTYPES[dtypes]
    open_fake_group(world_size)
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        with fake_tensors() as forget:
            policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
            whole = GPT(shape)
            forget()
            model = ARMS[arm](whole, mesh, policy)
            tokens = torch.zeros(shape.batch, shape.seq, dtype=torch.long)
            _step(model, tokens)
            present = [*_locals(model), tokens]
            with Meter(present) as meter:
                _step(model, tokens, meter)
            if arm.startswith("fsdp2"):
                meter.counts.mem_tracker_peak_bytes = _mem_tracker_peak(model, tokens)
            return meter.counts
    finally:
        dist.destroy_process_group()


def _step(model: nn.Module, tokens: Tensor, meter: Meter | None = None) -> None:
    logits = model(tokens)
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), tokens.view(-1))
    del logits
    if meter is not None:
        meter.is_backward = True
    loss.backward()
    model.zero_grad()


def _mem_tracker_peak(model: nn.Module, tokens: Tensor) -> int:
    tracker = MemTracker()
    tracker.track_external(model, tokens)
    with tracker:
        _step(model, tokens)
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return int(snapshot["Total"])


def _locals(model: nn.Module) -> list[Tensor]:
    return [parameter.to_local() for parameter in model.parameters()]


def padding_shares(shape: Shape, world_size: int) -> dict[str, float]:
    """Percent of all shards that is padding, for this core's layout and for FSDP2's rows."""
    with torch.device("meta"):
        model = GPT(shape)
    numel = sum(p.numel() for p in model.parameters())
    scratch = 0
    for flat_param in cut_flat_params(plan_units(model, find_units(model, None), set(), set())):
        names = flat_param.users[0].names
        named_shapes = [(names[p], tuple(p.shape)) for p in flat_param.parameters]
        layout = plan_layout(named_shapes, world_size)
        scratch += layout.numel
    rows = [(p.shape[0], p.numel() // p.shape[0]) for p in model.parameters()]
    fsdp2 = sum(-(-length // world_size) * world_size * width for length, width in rows)
    return {
        "scratch": 100 * (scratch - numel) / scratch,
        "fsdp2": 100 * (fsdp2 - numel) / fsdp2,
    }


# -- reporting -------------------------------------------------------------------------------------

FIGURES = {
    "written_bytes": ("written GB", 1e9),
    "payload_bytes": ("payload GB", 1e9),
    "peak_bytes": ("peak GiB", GIB),
}


def rows_of(results: dict[tuple[int, str, str], Counts]) -> list[dict[str, Any]]:
    """One row per figure, with each arm's bytes and the ratios, and whether the target holds."""
    rows = []
    for world_size, dtypes in dict.fromkeys((n, d) for n, d, _ in results):
        arms = {arm: results[world_size, dtypes, arm] for arm in ARMS}
        for figure in FIGURES:
            values = {arm: getattr(counts, figure) for arm, counts in arms.items()}
            ratios = {
                "of_fsdp2": values["scratch"] / values["fsdp2"],
                "by_hand_of_fsdp2": values["scratch_by_hand"] / values["fsdp2"],
                "of_fsdp2_split": values["scratch"] / values["fsdp2_split"],
            }
            target = _target_of(figure, dtypes)
            rows.append({
                "world_size": world_size, "dtypes": dtypes, "figure": figure, **values, **ratios,
                "target": target["text"], "holds": target["test"](ratios[target["of"]]),
            })  # fmt: skip
    return rows


def _target_of(figure: str, dtypes: str) -> dict[str, Any]:
    if figure == "written_bytes":
        return {"of": "of_fsdp2", "test": lambda r: r <= 0.35, "text": "at most 0.35 of FSDP2"}
    if figure == "peak_bytes":
        return {"of": "of_fsdp2_split", "test": lambda r: r < 1, "text": "below split"}
    if dtypes == "bf16, fp32 reduce":
        return {"of": "of_fsdp2", "test": lambda r: r <= 0.76, "text": "at most 0.76 of FSDP2"}
    text = "at most FSDP2 by the same calls"
    return {"of": "by_hand_of_fsdp2", "test": lambda r: r <= 1, "text": text}


def show(rows: list[dict[str, Any]], padding: dict[str, float]) -> None:
    """Print the table."""
    print(
        f"{'ranks':>5}  {'dtypes':<17}  {'figure':<10} {'scratch':>8} {'by hand':>8} {'FSDP2':>8} "
        f"{'split':>8}  {'of FSDP2':>8} {'by hand':>8} {'of split':>8}  target"
    )
    for row in rows:
        name, unit = FIGURES[row["figure"]]
        values = " ".join(f"{row[arm] / unit:>8.3f}" for arm in ARMS)
        print(
            f"{row['world_size']:>5}  {row['dtypes']:<17}  {name:<10} {values}  "
            f"{row['of_fsdp2']:>8.3f} {row['by_hand_of_fsdp2']:>8.3f} "
            f"{row['of_fsdp2_split']:>8.3f}  {row['target']}: "
            f"{'holds' if row['holds'] else 'MISSED'}"
        )
    print(
        f"{PADDING_WORLD_SIZE:>5}  {'any':<17}  {'padding %':<10} {padding['scratch']:>8.4f} "
        f"{padding['scratch']:>8.4f} {padding['fsdp2']:>8.4f} {padding['fsdp2']:>8.4f}  {'':>26}  "
        f"below 1: "
        f"{'holds' if padding['scratch'] < 1 else 'MISSED'}"
    )


def show_peaks(results: dict[tuple[int, str, str], Counts]) -> None:
    """Print what was alive at each arm's peak, and what was written by which operation."""
    for (world_size, dtypes, arm), counts in results.items():
        kinds = ", ".join(f"{kind} {n / GIB:.3f}" for kind, n in counts.peak_by_kind.items())
        theirs = counts.mem_tracker_peak_bytes
        check = "" if theirs is None else f" (MemTracker: {theirs / GIB:.3f})"
        print(f"\n{world_size} ranks, {dtypes}, {arm}: {counts.peak_bytes / GIB:.3f} GiB{check}")
        print(f"  peak     {kinds}")
        names = Counter(counts.written_by_operation).most_common()
        print("  written ", ", ".join(f"{name} {n / 1e9:.3f}" for name, n in names if n))
        calls = counts.collectives.items()
        print("  payload ", ", ".join(f"{name} {n}x {b / 1e9:.3f}" for name, (n, b) in calls))


def main() -> None:
    """Parse the command line, count, print, write JSON."""
    args = make_parser().parse(None)
    shape = Shape(
        layers=args.layers, width=args.width, vocabulary=args.vocabulary,
        batch=args.batch_size, seq=args.seq_len,
    )  # fmt: skip
    results = {
        (world_size, dtypes, arm): count(arm, dtypes, shape, world_size)
        for world_size in args.ranks
        for dtypes in args.dtypes
        for arm in ARMS
    }
    rows, padding = rows_of(results), padding_shares(shape, PADDING_WORLD_SIZE)
    show(rows, padding)
    if args.peaks:
        show_peaks(results)
    arms = [
        {"world_size": n, "dtypes": dtypes, "arm": arm, **asdict(counts)}
        for (n, dtypes, arm), counts in results.items()
    ]
    document = {"shape": asdict(shape), "rows": rows, "padding_percent": padding, "arms": arms}
    write_record(args.out, "exact_counters", document)


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "exact_counters", __doc__, examples=["--layers 2 --ranks 64 --peaks", "--dtypes fp32"]
    )
    for option, default, says in (
        ("--layers", Shape.layers, "blocks of the GPT"),
        ("--width", Shape.width, "features of a position; a multiple of the heads"),
        ("--vocabulary", Shape.vocabulary, "tokens of the vocabulary"),
    ):
        parser.add_argument(option, type=at_least(1), default=default, metavar="N", help=says)
    parser.add_batch(Shape.batch, Shape.seq)
    parser.add_ranks(8, 64, help="numbers of ranks to count for")
    parser.add_some("--dtypes", DTYPES, "dtypes of parameters and reductions, each counted")
    parser.add_argument("--peaks", action="store_true", help="print what makes up each peak")
    parser.add_out(says="rows and all counts")
    return parser


if __name__ == "__main__":
    main()
