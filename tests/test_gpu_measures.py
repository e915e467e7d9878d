"""What is measured on a GPU, on one that is made up, and the tables of it."""

import json
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import jobs, measure, table
from benchmarks.gpu.cases import ARMS, Case, Setting, all_cases, network_of, small_cases
from benchmarks.gpu.recipes import NAMES
from benchmarks.gpu.record import DONE, FAILED, OUT_OF_MEMORY
from lightning_fsdp.plan.models import build, config_of
from tests.support.gpu_records import begun, measured
from tests.support.pages import ROOT


def test_every_arm_meets_every_setting_and_the_goals_come_first():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases) == 3 * 2 * 2 * (8 + 7 + 7)
    first = cases[:9]
    assert {case.arm for case in first} == {"unsharded", "scratch_zero3", "fsdp2_zero3"}
    assert {(case.setting.name, case.world_size) for case in first} == {
        ("qwen2.5-1.5b compiled", 1), ("gpt2-small eager", 1), ("gpt2-xl compiled", 1),
    }  # fmt: skip
    assert {case.arm for case in small_cases()} == set(ARMS)


def test_networks_are_as_asked_for():
    within, between = network_of(8), network_of(64)
    assert within.slowest_gb_s(8) == 400.0
    assert between.slowest_gb_s(64) == 50.0
    assert between.slowest_gb_s(8) == 400.0


def test_a_network_that_is_made_free_takes_no_time_and_sends_as_much():
    network = measure.SwitchedNetwork(**vars(network_of(64)))
    before = network.cost("all_gather", 10**9, 64)
    assert before == network_of(64).cost("all_gather", 10**9, 64)
    network.is_free.append(True)
    after = network.cost("all_gather", 10**9, 64)
    assert (after.duration_s, after.sent_bytes) == (0.0, before.sent_bytes)


@pytest.mark.parametrize("model", ["gpt2-nano", "gpt2-small"])
def test_operations_per_token_are_those_that_torch_counts(model):
    config = config_of(model)
    config.vocab_size, config._attn_implementation = 2048, "eager"
    built, seq_len = build(config), 64
    with FlopCounterMode(display=False) as counter:
        built(input_ids=torch.zeros(1, seq_len, dtype=torch.long)).logits.sum().backward()
    expected = counter.get_total_flops() / seq_len
    assert measure.flops_of(built, config, seq_len) == pytest.approx(expected, rel=0.01)


class Cuda:
    """What is used of ``torch.cuda``; time passes in optimizer steps, 3 ms in each."""

    def __init__(self):
        self.now_ms, self.num_captures, self.capture_fails = 0.0, 0, False

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at_ms = stream.now_ms

        def elapsed_time(self, other):
            return other.at_ms - self.at_ms

    def current_stream(self, device=None):
        return self

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: None)

    def wait_stream(self, other):
        pass

    def synchronize(self, device):
        pass

    def stream(self, stream):
        return nullcontext()

    def CUDAGraph(self):
        return SimpleNamespace(replay=self.work)

    @contextmanager
    def graph(self, graph, capture_error_mode):
        assert capture_error_mode == "thread_local"
        if self.capture_fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_captures += 1
        before = self.now_ms
        yield
        self.now_ms = before  # what is captured does not run

    def work(self):
        self.now_ms += 3.0


@pytest.fixture
def on_cuda(monkeypatch):
    cuda, model = Cuda(), build(measure.config_for(config_of("gpt2-nano"), is_small=True))
    monkeypatch.setattr(torch, "cuda", cuda)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    monkeypatch.setattr(optimizer, "step", lambda: cuda.work())
    clock = measure.Clock(SimpleNamespace(type="cuda"))
    return cuda, measure.Stepper(model, optimizer, torch.zeros(2, 8, dtype=torch.long), clock)


def test_time_is_that_of_the_device(on_cuda):
    _, stepper = on_cuda
    step_s, optimizer_s, losses = stepper.timed(10)
    assert step_s == optimizer_s == pytest.approx([0.003] * 10)
    assert losses[0] > 0


def test_an_optimizer_step_is_captured_once_and_replayed(on_cuda):
    cuda, stepper = on_cuda
    seconds, failure = measure._captured(stepper)
    assert failure is None
    assert seconds == pytest.approx([0.003] * measure.GRAPH_STEPS)
    assert cuda.num_captures == 1
    assert all(group["capturable"] for group in stepper.optimizer.param_groups)


def test_a_step_that_cannot_be_captured_says_why(on_cuda):
    cuda, stepper = on_cuda
    cuda.capture_fails = True
    assert measure._captured(stepper) == (
        None, "RuntimeError: operation not permitted when stream is capturing"
    )  # fmt: skip


def test_a_device_is_described_by_what_torch_and_the_driver_say(monkeypatch):
    found = SimpleNamespace(
        name="NVIDIA H200", total_memory=150 * 10**9, multi_processor_count=132, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(*size))
    described = jobs._cuda()
    assert described["name"] == "NVIDIA H200"
    assert described["capability"] == "9.0"
    assert described["nccl"] == "2.28.9"
    assert json.loads(json.dumps(described)) == described


def test_goals_stand_beside_what_was_found(tmp_path):
    setting = Setting(model="gpt2-xl", is_compiled=True, is_recomputed=False)
    arm_to_s = {"scratch_zero3": 0.16, "fsdp2_zero3": 0.2, "unsharded": 0.152}
    record = begun(tmp_path / "speed.json")
    for arm, step_s in arm_to_s.items():
        losses = [2.0, 1.0 + step_s]
        name = Case(setting=setting, arm=arm, world_size=1).name
        record.put(name, **measured(step_s, losses=losses))
    found = {goal.of.rpartition(": ")[2]: goal for goal in table.goals(record.results, 1000.0)}
    assert found["tokens/s of fsdp2_zero3's"].found == pytest.approx(1.25)
    assert found["tokens/s of unsharded's"].found == pytest.approx(0.95)
    assert found["MFU"].found == pytest.approx(8000 / 0.16 * 1e10 / 1e15)
    assert {goal.wanted for goal in found.values()} == {1.05, 0.98, 0.5}
    lines = table.write_table(tmp_path).splitlines()
    assert "goals: 2 of 3 met (assumed peak: 989 TFLOP/s in bfloat16)" in lines
    (missed,) = [line for line in lines if "MISSED" in line]
    assert "0.950 (goal 0.98): gpt2-xl compiled, scratch_zero3 of 1" in missed
    assert "speed: 3 done, 261 not reached" in lines
    (apart,) = [line for line in lines if line.startswith("losses at one rank: 0.048 from")]
    assert apart.endswith("(gpt2-xl compiled, fsdp2_zero3 of 1)")


def test_the_table_has_at_most_100_lines_and_fits_what_comes_back(tmp_path):
    speed = begun(tmp_path / "speed.json")
    for index, case in enumerate(all_cases()):
        speed.results[case.name] = measured(1.2345678, session=0)
        if index % 10 == 0:
            speed.results[case.name] = {"state": FAILED, "says": "a\n" + 500 * "x", "session": 0}
        if index % 10 == 1:
            speed.results[case.name] = {"state": OUT_OF_MEMORY, "session": 0}
    speed.put("last", state=FAILED, says="")
    tests, recipes = begun(tmp_path / "tests.json"), begun(tmp_path / "recipes.json")
    for number in range(100):
        tests.put(f"test_{number}", state=FAILED, says="assert 1 == 2")
    logged = {
        "train/loss": [2.0, 1.0],
        "throughput/tokens_per_s": [1.0],
        "memory/rank0_GiB": [100.0],
    }
    for name in NAMES:
        recipes.put(
            name, state=DONE, fit=logged, checkpoint_bytes=10**10, most_apart=0.0, text=["é" * 99]
        )
    text = table.write_table(tmp_path)
    assert 90 <= len(text.splitlines()) <= 100
    assert len(text) < 12_000
    assert text == (tmp_path / "table.txt").read_text().rstrip("\n")
    assert "tests: 100 failed" in text
    assert "and 88 more, in tests.json" in text
    assert "FAILED test_0: assert 1 == 2" in text
    assert "more, in speed.json" in text.splitlines()[-1]
    shown = " ".join(text.split())
    assert "qwen2.5-1.5b compiled fsdp2_zero3 1 6,480 6.6 1235 1235..1235 123 130 123.4" in shown
    assert table.count_failures(tmp_path) == 100 + 27 + 1


NOT_NEEDED = ("matplotlib", "peft", "pyarrow", "pydantic", "pydantic_core", "tensorboard")


def test_speed_is_measured_where_only_torch_and_transformers_are():
    program = f"""
import sys
sys.modules.update(dict.fromkeys({NOT_NEEDED}))
import benchmarks.gpu.measure
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
