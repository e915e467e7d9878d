"""The callback of the benchmark, in real runs."""

import math
import threading
import time
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_fsdp.bench import measure, memory
from lightning_fsdp.bench.arms import Arm
from lightning_fsdp.bench.documents import load
from lightning_fsdp.bench.measure import Measure
from lightning_fsdp.bench.memory import mean_over_time
from lightning_fsdp.bench.records import RankMeasurement
from lightning_fsdp.bench.theory import demand, model_units, sent_bytes
from lightning_fsdp.bench.utilization import Utilization
from lightning_fsdp.callbacks.memory_picture import thinned
from lightning_fsdp.callbacks.throughput import tokens_in
from tests.support.bench_results import workload
from tests.support.models import lm_loss, tiny_gpt2, token_batch
from tests.support.trainer import SHARDED, on_trainer_ranks, with_options

STEPS = {"warmup_steps": 1, "timed_steps": 2, "profiled_steps": 1}
TOTAL = 5
CONTROL_BYTES = 512  # the ranks' agreements and norms


class Untied(nn.Module):
    """All sizes are powers of two, so that nobody pads."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Tanh()) for _ in range(3)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 128, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


class Task(L.LightningModule):
    def __init__(self, tied):
        super().__init__()
        self.tied = tied
        self.model = None

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(1)
            self.model = tiny_gpt2(vocabulary=128) if self.tied else Untied()

    def training_step(self, batch, batch_idx):
        return lm_loss(self.model, {"tokens": batch["input_ids"]})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit(
    rank, world_size, strategy, grad_accum, folder, tied=True, steps=STEPS, precision="32-true",
    num_batches=None, task=Task,
):  # fmt: skip
    numbers = range(num_batches or TOTAL * grad_accum)
    batches = [{"input_ids": token_batch(0, i, rank)["tokens"]} for i in numbers]
    out = folder / f"{strategy}_{grad_accum}_{tied}"
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=world_size, max_steps=TOTAL,
        precision=precision,
        accumulate_grad_batches=grad_accum, callbacks=[Measure(out, **steps)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(task(tied), DataLoader(batches, batch_size=None))
    return load(RankMeasurement, out / f"rank{rank}.json")


def _every_arm(rank, world_size, folder, grad_accum, tied, precision, sharded):
    return {
        strategy: _fit(rank, world_size, strategy, grad_accum, folder, tied, precision=precision)
        for strategy in ("ddp", *sharded)
    }


# Theory asks of ZeRO-2 neither how often a step accumulates nor whose weight is shared, so it is
# there where most could be gathered too often; of precision, nothing but the bytes of a weight.
@pytest.mark.parametrize(
    ("grad_accum", "tied", "precision", "sharded"),
    [
        (1, True, "32-true", SHARDED[::2]),
        (3, False, "32-true", SHARDED),
        (2, True, "bf16-mixed", ("scratch_fsdp_zero3", "fsdp1_zero2", "fsdp2_zero3")),
    ],
    ids=["32-true", "accumulated", "bf16-mixed"],
)
def test_every_arm_is_measured_and_communicates_what_theory_demands(
    tmp_path, grad_accum, tied, precision, sharded
):
    options = grad_accum, tied, precision, sharded
    found = on_trainer_ranks(_every_arm, 2, tmp_path, *options, timeout_s=280)
    units = found[0]["ddp"].units
    for of_rank in found:
        for strategy, measured in of_rank.items():
            _is_whole(measured, grad_accum)
            is_scratch = strategy.startswith("scratch")
            assert measured.comm in (("direct", "pairs") if is_scratch else ("gloo",))
            rounding = 1e-6 if precision == "32-true" else 1e-2
            assert measured.grad_norm == pytest.approx(of_rank["ddp"].grad_norm, rel=rounding)
            engine, _, stage = strategy.replace("_fsdp", "").partition("_zero")
            arm = Arm(
                engine=engine, zero_stage=int(stage) if stage else None, batch_size=2,
                grad_accum=grad_accum,
            )  # fmt: skip
            expected = demand(arm, replace(workload(), precision=precision), units)
            what = f"{strategy}: {measured.collectives} {measured.collective_bytes}"
            excess = measured.payload_bytes - expected.payload_bytes
            assert 0 <= excess <= CONTROL_BYTES, what
            excess = sent_bytes(measured.collective_bytes, 2) - expected.sent_bytes
            assert 0 <= excess <= CONTROL_BYTES, what
            if expected.collectives is None:
                continue
            calls = measured.data_collectives or measured.collectives
            for kind, number in expected.collectives.items():
                few = 0 if measured.data_collectives else 1  # the ranks agree once per step
                assert 0 <= calls[kind] - number <= few, what


def _over_replicas(rank, world_size, folder):
    return {
        name: _fit(rank, 4, with_options(name, shard_size=2), 2, folder / name)
        for name in ("scratch_fsdp_zero3", "fsdp2_zero2")
    }


def test_replicas_communicate_what_theory_demands(tmp_path):
    (found, *_), few = on_trainer_ranks(_over_replicas, 4, tmp_path, timeout_s=280), 3
    task = Task(tied=True)
    task.configure_model()
    units = model_units(task)
    for name, measured in found.items():
        engine, _, stage = name.replace("_fsdp", "").partition("_zero")
        arm = Arm(engine=engine, zero_stage=int(stage), batch_size=2, grad_accum=2)
        expected = demand(arm, replace(workload(), num_ranks=4, shard_size=2), units)
        sent = sent_bytes(measured.collective_bytes, 4, shard_size=2)
        assert 0 <= sent - expected.sent_bytes <= CONTROL_BYTES, name
        assert 0 <= measured.payload_bytes - expected.payload_bytes <= CONTROL_BYTES, name
        calls = measured.data_collectives or measured.collectives
        assert expected.collectives["all_reduce"] > 0
        for kind, number in expected.collectives.items():
            assert 0 <= calls[kind] - number <= few * (measured.data_collectives is None), name


def _is_whole(measured, grad_accum):
    """What every arm has, and what holds of it."""
    assert len(measured.losses) == TOTAL * grad_accum
    assert all(map(math.isfinite, measured.losses))
    assert len(measured.step_s) == len(measured.host_s) == STEPS["timed_steps"]
    tokens = token_batch(0, 0, 0)["tokens"].numel()
    assert measured.step_tokens == [tokens * grad_accum] * STEPS["timed_steps"]
    assert len(measured.parts) == STEPS["profiled_steps"]
    for parts in measured.parts:
        shares = [
            parts.data_s, parts.compute_s, parts.exposed_s, parts.optimizer_s, parts.other_s,
        ]  # fmt: skip
        assert sum(shares) == pytest.approx(parts.whole_s)
        assert all(0 <= share <= parts.whole_s for share in shares)
        assert parts.exposed_s > 0
        assert parts.overlapped_s >= 0
    assert max(nbytes for _, nbytes in measured.timeline) <= measured.peak_bytes
    assert sum(measured.peak_by_kind.values()) == measured.peak_bytes
    assert measured.resting_bytes < measured.mean_bytes < measured.peak_bytes
    assert measured.flops_per_token > 0
    assert measured.fit_s > sum(measured.step_s)
    assert measured.grad_norm > 0
    assert measured.peak_rss_bytes is None or measured.peak_rss_bytes > measured.peak_bytes
    assert measured.cuda_peak_allocated_bytes is None, "no device is null, not zero"
    assert measured.utilization_of == "cpu"


class Clock:
    """The machine's, put forward by more than a busy machine may take for a step."""

    forward_s = 0.0
    process_time = staticmethod(time.process_time)

    def perf_counter(self):
        return time.perf_counter() + self.forward_s


class SlowAtTheEnds(Task):
    """Of the timed and of the observed steps."""

    def training_step(self, batch, batch_idx):
        measure.time.forward_s += {2: 1000.0, TOTAL - 1: 2000.0}.get(self.trainer.global_step, 0.0)
        return super().training_step(batch, batch_idx)


def _fit_slow_at_the_ends(rank, world_size, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "time", clock := Clock())
        start = clock.perf_counter()
        measured = _fit(rank, world_size, "auto", 1, folder, task=SlowAtTheEnds)
        return measured, clock.perf_counter() - start


def test_end_to_end_time_ends_with_the_last_timed_step(tmp_path):
    ((measured, whole_s),) = on_trainer_ranks(_fit_slow_at_the_ends, 1, tmp_path)
    assert measured.step_s[1] >= 1000.0
    assert measured.step_s[0] < 1000.0, "the other one alone is slow"
    assert sum(measured.step_s) < measured.fit_s < whole_s - 2000.0


class Compiled(Task):
    def configure_model(self):
        super().configure_model()
        self.model.compile(backend="eager")


def _fit_compiled(rank, world_size, folder):
    return _fit(rank, world_size, "auto", 1, folder, False, task=Compiled)


def test_tensors_of_a_compiled_model_are_not_those_of_its_watched_steps(tmp_path):
    (measured,) = on_trainer_ranks(_fit_compiled, 1, tmp_path)
    assert measured.peak_bytes is measured.mean_bytes is measured.peak_by_kind is None
    assert measured.timeline is None
    assert measured.resting_bytes > 0
    assert measured.flops_per_token > 0


def _fit_in_few_points(rank, world_size, folder):
    most, memory._MOST_POINTS = memory._MOST_POINTS, 2
    try:
        return _fit(rank, world_size, "auto", 1, folder)
    finally:
        memory._MOST_POINTS = most


def test_a_time_line_is_as_long_as_its_step_and_has_its_peak(tmp_path):
    (measured,) = on_trainer_ranks(_fit_in_few_points, 1, tmp_path)
    (start_s, at_start), *inner, (_, at_end) = measured.timeline
    assert (start_s, len(inner)) == (0.0, 2)
    assert max(nbytes for _, nbytes in inner) == measured.peak_bytes
    assert at_start < measured.peak_bytes
    assert at_end == pytest.approx(measured.resting_bytes, rel=0.01)


def _fit_eight_batches(rank, world_size, folder):
    with pytest.raises(RuntimeError) as raised:
        _fit(rank, world_size, "auto", 3, folder, num_batches=8)
    return str(raised.value)


def test_a_step_of_what_is_left_of_the_data_is_refused(tmp_path):
    (message,) = on_trainer_ranks(_fit_eight_batches, 1, tmp_path)
    assert "optimizer step 2: expected 3 micro-batches, got 2 before" in message


class Stopping(Task):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = batch_idx == 1


def _fit_until_it_stops(rank, world_size, folder):
    with pytest.raises(RuntimeError) as raised:
        _fit(rank, world_size, "auto", 1, folder, task=Stopping)
    return str(raised.value), [path.name for path in folder.rglob("*.json")]


def test_a_run_that_something_ends_early_is_no_measurement(tmp_path):
    ((message, written),) = on_trainer_ranks(_fit_until_it_stops, 1, tmp_path)
    assert "expected 5 optimizer steps, got 2 before the run ended" in message
    assert written == ["failure0.json"]


def test_one_process_communicates_exactly_nothing(tmp_path):
    (measured,) = on_trainer_ranks(_fit, 1, "auto", 3, tmp_path)
    (parts,) = measured.parts
    assert (parts.exposed_s, parts.overlapped_s) == (0, 0)
    assert (measured.collectives, measured.payload_bytes) == ({}, 0)


def test_no_half_accumulated_gradient_reaches_the_first_timed_step(tmp_path):
    """Steps of 3 micro-batches: each begins without gradients and takes exactly 3."""
    steps = {"warmup_steps": 2, "timed_steps": 2, "profiled_steps": 0}
    (measured,) = on_trainer_ranks(_fit, 1, "auto", 3, tmp_path, True, steps)
    tokens = token_batch(0, 0, 0)["tokens"].numel()
    assert measured.step_tokens == [3 * tokens] * 2
    assert len(measured.losses) == 3 * TOTAL
    assert measured.parts == []


def test_padding_is_not_counted():
    batch = {"input_ids": torch.ones(2, 8), "attention_mask": torch.ones(2, 8)}
    batch["attention_mask"][:, 5:] = 0
    assert tokens_in(batch) == 10


def test_a_failed_sample_is_absent_and_utilization_is_sampled_through_the_whole_stretch():
    answers, all_given = [50.0, None, 70.0], threading.Event()

    def read():
        if not answers:
            all_given.set()
            raise RuntimeError("no more")
        answer = answers.pop(0)
        if answer is None:
            raise RuntimeError("no sensor")
        return answer

    sampler = Utilization(read, interval_s=0.01)
    sampler.start()
    assert all_given.wait(60)
    samples = sampler.stop()
    assert [percent for _, percent in samples] == [50.0, 70.0]
    cpu = Utilization.of(torch.device("cpu"))
    cpu.start()
    stop = time.perf_counter() + 60.0
    while len(cpu.samples) < 4 or not any(percent > 0 for _, percent in cpu.samples):
        torch.ones(200, 200) @ torch.ones(200, 200)
        assert time.perf_counter() < stop
    moments = [moment for moment, _ in cpu.stop()]
    assert all(moment > 0.09 * number for number, moment in enumerate(moments, start=1))


def test_a_mean_counts_bytes_for_as_long_as_they_are_alive():
    assert mean_over_time([(1.0, 100), (4.0, 10), (5.0, 10**9)]) == (3 * 100 + 1 * 10) / 4
    assert mean_over_time([(1.0, 100)]) == 100


def test_thinning_keeps_the_highest_point():
    line = [(i / 10, 1000 * (i == 1234) + i % 7) for i in range(5000)]
    thin = thinned(line, 500)
    assert len(thin) <= 500
    assert max(b for _, b in thin) == 1000 + 1234 % 7
    assert thinned(line[:3], 500) == line[:3]
