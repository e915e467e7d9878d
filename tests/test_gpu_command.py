"""The command that runs on a GPU all that it has to tell, on a CPU and in small."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.gpu import __main__ as gpu_command
from benchmarks.gpu import jobs, measure, table
from benchmarks.gpu.cases import ARMS, Case, Setting, all_cases, network_of, small_cases
from benchmarks.gpu.jobs import end_of, run_job
from benchmarks.gpu.recipes import NAMES
from benchmarks.gpu.record import DONE, FAILED, OUT_OF_MEMORY, Record
from benchmarks.gpu.speed import run_speed
from benchmarks.gpu.suite import run_suite
from lightning_fsdp.plan.models import build, config_of
from tests.support.ranks import run_forked
from tests.support.warm import fork_always

ROOT = Path(__file__).parent.parent
SESSION = {
    "device": {"type": "cuda", "name": "NVIDIA H200", "driver": "580"},
    "versions": {"torch": "2.11.0"},
    "commit": "0123456789abcdef",
    "date": "2026-11-22T00:00:00+00:00",
    "peak_tflops": 989.0,
    "missing": [],
}
COMMAND = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu"]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*arguments):
    finished = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr[-3000:]
    return finished.stdout + finished.stderr


def run_warm(*arguments, code=0, lacking=None):
    """As ``run``, in a process that has torch already and forks those that it starts.

    Args:
        arguments: Of the command.
        code: That it ends with.
        lacking: A package that it does not find.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "printed.txt"
        given = list(map(str, arguments))
        found = run_forked(_command, given, lacking, log=log, timeout_s=190.0)
        assert found == code, log.read_text()
        return log.read_text()


def _command(arguments, lacking):
    fork_always()
    torch.set_num_threads(1)
    sys.argv = [*COMMAND[2:], *arguments]
    gpu_command.is_installed = lambda name: name != lacking
    gpu_command.small_cases = few_cases
    try:
        return gpu_command.main()
    except SystemExit as stopped:
        return stopped.code


def few_cases():
    """Every arm once: without those that take longest, of more ranks and of compiled blocks."""
    return small_cases()[: len(ARMS)]


def results_in(folder, part):
    return json.loads((folder / f"{part}.json").read_text())["results"]


def begun(path):
    record = Record(path)
    record.begin(SESSION)
    return record


def soon(seconds=200.0):
    return time.monotonic() + seconds


# -- the command -----------------------------------------------------------------------------------


def plain_losses(num_steps):
    """Of the model that stands for GPT-2 124M, in a loop of plain torch."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=512, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(num_steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """All parts; the suite is a test of its own here."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "suite").mkdir()
    (folder / "suite" / "conftest.py").write_text(CONFTEST)
    (folder / "suite" / "test_device.py").write_text(
        "def test_device(pytestconfig):\n    assert pytestconfig.getoption('device') == 'cpu'\n"
    )
    out = folder / "out"
    printed = run("--out", out, "--tests", folder / "suite")
    return out, printed


CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--device")
"""


@pytest.mark.timeout(500)
def test_every_part_runs_on_a_cpu_in_small(whole_run):
    out, printed = whole_run
    assert {path.name for path in out.iterdir()} == {
        *("tests.json", "speed.json", "recipes.json", "table.txt")
    }
    states = {part: results_in(out, part) for part in ("tests", "speed", "recipes")}
    assert len(states["tests"]) == 1
    assert set(states["speed"]) == {case.name for case in small_cases()}
    assert set(states["recipes"]) == set(NAMES)
    assert {r["state"] for results in states.values() for r in results.values()} == {DONE}
    text = (out / "table.txt").read_text()
    assert text in printed
    for case in small_cases():
        assert f"{case.setting.name} {case.arm} {case.world_size} " in text
    session = json.loads((out / "speed.json").read_text())["sessions"][0]
    assert session["versions"]["torch"] == torch.__version__
    assert session["device"]["name"] == "cpu"
    assert session["precision"].startswith("bf16-true")
    assert "50 GB/s per rank out of a host" in session["networks"]["64"][0]


@pytest.mark.timeout(500)
def test_every_arm_trains_as_plain_torch_does(whole_run):
    out, _ = whole_run
    num_before = 1 + measure.WARMUP_STEPS
    expected = plain_losses(num_before + measure.TIMED_STEPS["cpu"])[num_before:]
    assert expected[-1] < expected[0]
    for case in small_cases():
        result = results_in(out, "speed")[case.name]
        assert len(result["step_s"]) == len(result["optimizer_s"]) == 10
        pairs = zip(result["optimizer_s"], result["step_s"], strict=True)
        assert all(0 < part < whole for part, whole in pairs)
        assert len(result["host_s"]) >= 5
        if case.world_size == 1:
            assert result["losses"] == pytest.approx(expected, abs=1e-6), case.name
            assert result["exposed_s"] is None
        else:
            assert result["simulated"]["calls"]["all_gather"] > 0
            assert len(result["free_step_s"]) == 10
        num_graphs = 1 if case.setting.is_compiled else 0  # equal blocks share theirs
        assert result["num_graphs"] == num_graphs


@pytest.mark.timeout(500)
def test_a_resumed_recipe_goes_on_with_the_same_losses(whole_run):
    out, _ = whole_run
    for name, result in results_in(out, "recipes").items():
        assert len(result["fit"]["train/loss"]) == 20, name
        assert result["resumed"]["train/loss"] == result["fit"]["train/loss"][15:], name
        assert result["checkpoint_bytes"] > 1e6
        assert "import" in result["text"][0]


@pytest.mark.timeout(500)
def test_what_was_measured_stays_when_the_command_is_stopped_and_run_again(tmp_path):
    few = (
        "import benchmarks.gpu.__main__ as command\n"
        "from tests.test_gpu_command import few_cases\n"
        "command.small_cases = few_cases\n"
        "command.exit_with(command.main)\n"
    )
    arguments = ["--device", "cpu", "--part", "speed", "--out", str(tmp_path)]
    environment = {**os.environ, **ENVIRONMENT}
    process = subprocess.Popen(
        [sys.executable, "-c", few, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE
    )
    path, deadline = tmp_path / "speed.json", soon()
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and len(results_in(tmp_path, "speed")) >= 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, says = process.communicate(timeout=60)
    assert process.returncode == 130, says
    first = results_in(tmp_path, "speed")
    assert 3 <= len(first) < len(few_cases())
    run_warm("--part", "speed", "--out", tmp_path)
    second = results_in(tmp_path, "speed")
    assert {name: second[name] for name in first} == first
    assert {second[case.name]["session"] for case in few_cases()} == {0, 1}


def test_what_is_not_reached_in_time_is_said_and_no_failure(tmp_path):
    text = run_warm("--part", "speed", "--out", tmp_path, "--budget", 1)
    assert "speed: 11 not reached" in text
    assert results_in(tmp_path, "speed") == {}


@pytest.mark.parametrize(
    ("part", "package"),
    [("recipes", "jsonargparse"), ("tests", "pytest"), ("speed", "transformers")],
)
def test_a_missing_package_is_named_and_its_part_left_out(part, package, tmp_path):
    text = run_warm("--part", part, "--out", tmp_path, lacking=package)
    assert f"{part}: left out, as this is not installed: {package}" in text
    assert json.loads((tmp_path / f"{part}.json").read_text())["sessions"][0]["missing"] == [
        package
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_writes_nothing(tmp_path):
    text = run_warm("--device", "cuda", "--out", tmp_path / "out", code=2)
    assert "--device cuda: expected a device that computes, got" in text
    assert "Use --device cpu" in text
    assert not (tmp_path / "out").exists()


def test_results_of_another_device_are_refused_before_anything_runs(tmp_path):
    begun(tmp_path / "recipes.json")
    text = run_warm("--part", "speed", "--out", tmp_path, code=2)
    assert "recipes.json: expected results of cpu with torch" in text
    assert [path.name for path in tmp_path.iterdir()] == ["recipes.json"]


@pytest.mark.parametrize("option", ["--budget", "--peak-tflops"])
def test_an_option_of_nothing_is_refused(option, tmp_path):
    assert f"{option}: expected more than 0" in run_warm(option, 0, "--out", tmp_path, code=2)


# -- records ---------------------------------------------------------------------------------------


def test_a_record_is_of_one_device_and_one_torch(tmp_path):
    begun(tmp_path / "speed.json")
    other = {**SESSION, "versions": {"torch": "2.13.0"}}
    with pytest.raises(ValueError, match=r"of NVIDIA H200 with torch 2\.13\.0, got .* 2\.11\.0"):
        Record(tmp_path / "speed.json").require_kind(other)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"sessions": []}'])
def test_a_file_of_something_else_is_refused(text, tmp_path):
    (tmp_path / "speed.json").write_text(text)
    with pytest.raises(ValueError, match="expected results of this command"):
        Record(tmp_path / "speed.json")


def test_each_result_says_of_which_session_it_is(tmp_path):
    begun(tmp_path / "speed.json").put("one", state=DONE)
    begun(tmp_path / "speed.json").put("two", state=DONE)
    found = Record(tmp_path / "speed.json").results
    assert {name: result["session"] for name, result in found.items()} == {"one": 0, "two": 1}


# -- processes -------------------------------------------------------------------------------------


def abort():
    os.abort()


def sleep_in_a_child(path):
    child = subprocess.Popen(["sleep", "60"])
    path.write_text(str(child.pid))
    child.wait()


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def say(text):
    print(text)


def test_a_job_that_crashes_or_hangs_is_a_failure_with_a_reason(tmp_path):
    log = tmp_path / "log.txt"
    failure = run_job(abort, log=log, limit_s=60.0, method="forkserver")
    assert failure.says.startswith("killed by SIGABRT")
    assert end_of(log)[0] == "Fatal Python error: Aborted"
    path = tmp_path / "pid"
    failure = run_job(sleep_in_a_child, path, log=log, limit_s=5.0, method="forkserver")
    assert failure.kind == "timed out"
    deadline = soon(10.0)
    while is_alive(path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(path.read_text())
    assert run_job(say, "hello", log=log, limit_s=60.0, method="forkserver") is None
    assert end_of(log) == ["hello"]


def test_a_failed_case_is_recorded_and_the_rest_goes_on(tmp_path):
    good, *_ = small_cases()
    bad = replace(good, arm="nonsense")
    record = begun(tmp_path / "speed.json")
    run_speed(record, [bad, good], device="cpu", method="forkserver", deadline=soon())
    results = results_in(tmp_path, "speed")
    assert results[bad.name]["state"] == FAILED
    assert results[bad.name]["says"] == "KeyError: 'nonsense'"
    assert "KeyError: 'nonsense'" in results[bad.name]["log"]
    assert results[good.name]["state"] == DONE


def test_what_does_not_fit_is_a_result_of_its_own(tmp_path, monkeypatch):
    def measured(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "_measure", measured)
    out = tmp_path / "result.json"
    with pytest.raises(torch.OutOfMemoryError):
        measure.run_case(small_cases()[0], "cpu", str(out))
    assert json.loads(out.read_text())["state"] == OUT_OF_MEMORY


def test_what_did_not_fit_and_what_is_done_is_not_tried_again(tmp_path):
    record = begun(tmp_path / "speed.json")
    cases = small_cases()[:2]
    for case, state in zip(cases, (DONE, OUT_OF_MEMORY), strict=True):
        record.put(case.name, state=state)
    run_speed(record, cases, device="cpu", method="neither is started", deadline=soon())


# -- the suite -------------------------------------------------------------------------------------

SUITE = """
import os, time, pytest

def test_good(): pass

def test_bad(): assert 1 == 2

def test_crash(): os.abort()

def test_hang(): time.sleep(60)

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

def test_last(): pass
"""
# As this project's own, on a machine without the plugin that has the option.
INI = """
[tool.pytest.ini_options]
addopts = ["--strict-config", "--strict-markers"]
filterwarnings = ["error"]
timeout = 120
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:timeout")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "pyproject.toml").write_text(INI)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(SUITE)
    return tmp_path


def run_tests(suite, **options):
    record = begun(suite / "tests.json")
    deadline = options.pop("deadline", soon())
    record = run_suite(record, suite, device="cpu", deadline=deadline, **options)
    return {name.rpartition("::")[2]: result for name, result in record.results.items()}


def test_every_test_has_a_result_whatever_others_do(suite):
    found = run_tests(suite, limit_s=5.0)
    states = {name: result["state"] for name, result in found.items()}
    assert states == {
        "test_good": DONE, "test_bad": FAILED, "test_crash": FAILED, "test_hang": FAILED,
        "test_skipped": "skipped", "test_last": DONE,
    }  # fmt: skip
    assert "assert 1 == 2" in found["test_bad"]["says"]
    assert found["test_crash"]["says"] == "Fatal Python error: Aborted"
    assert found["test_hang"]["says"].startswith("Timeout (0:00:05)")
    assert any("test_hang" in line for line in found["test_hang"]["log"])
    assert found["test_skipped"]["says"] == "Skipped: not here"

    mended = SUITE.replace("os.abort()", "pass").replace("time.sleep(60)", "pass")
    (suite / "test_it.py").write_text(mended.replace("1 == 2", "1 == 1"))
    found = run_tests(suite)
    assert {name: result["state"] for name, result in found.items()} == {
        name: "skipped" if name == "test_skipped" else DONE for name in states
    }
    again = {name for name, result in found.items() if result["session"] == 1}
    assert again == {"test_bad", "test_crash", "test_hang", "test_skipped"}


def test_a_suite_that_cannot_start_is_a_failure_until_it_can(suite):
    (suite / "test_it.py").write_text("import nothing_like_this")
    found = run_tests(suite)
    assert found["test_it.py"]["state"] == FAILED
    assert "nothing_like_this" in found["test_it.py"]["says"]
    (suite / "conftest.py").unlink()
    as_whole = run_tests(suite)["as a whole"]
    assert as_whole["state"] == FAILED
    assert "--device" in "".join(as_whole["log"])
    (suite / "conftest.py").write_text(CONFTEST)
    (suite / "test_it.py").write_text("def test_good(): pass")
    for _ in range(2):  # the second time there is nothing left to run
        found = run_tests(suite)
        assert {name: result["state"] for name, result in found.items()} == {"test_good": DONE}


# -- cases and figures -----------------------------------------------------------------------------


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


# -- on a device that keeps only a clock -----------------------------------------------------------


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


# -- the table -------------------------------------------------------------------------------------


def measured(step_s, **more):
    return {
        "state": DONE, "step_s": [step_s] * 20, "optimizer_s": [step_s / 10] * 20,
        "host_s": [step_s / 2] * 5, "batch": 8, "seq_len": 1000, "flops_per_token": 1e10,
        "peak_allocated_bytes": 123 * 2**30, "peak_reserved_bytes": 130 * 2**30,
        "losses": [2.0, 1.0], "exposed_s": 0.1234, "captured_optimizer_s": [0.001] * 20, **more,
    }  # fmt: skip


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
    logged = {"train/loss": [2.0, 1.0], "tokens/s": [1.0], "memory/rank0_GiB": [100.0]}
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
