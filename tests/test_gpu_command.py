"""The command that runs on a GPU all that it has to tell, on a CPU and in small."""

import json
import signal
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.gpu import __main__ as gpu_command
from benchmarks.gpu import measure
from benchmarks.gpu.cases import ARMS, small_cases
from benchmarks.gpu.recipes import NAMES
from benchmarks.gpu.record import DONE, Record
from tests.support.gpu_records import CONFTEST, SESSION, begun, results_in
from tests.support.processes import run_forked
from tests.support.warm import fork_always

COMMAND = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu"]


def run_warm(*arguments, code=0, lacking=None, cases=None, stop_after=None):
    """Run the command in a process that has torch already and forks those that it starts.

    Args:
        arguments: Of the command.
        code: That it ends with.
        lacking: A package that it does not find.
        cases: Gives those of the speed, instead of ``few_cases``.
        stop_after: So many of the speed's results; where the next is begun, it is told to end.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "printed.txt"
        given = list(map(str, arguments))
        arguments = given, lacking, cases or few_cases, stop_after
        found = run_forked(_command, *arguments, log=log, timeout_s=400.0)
        assert found == code, log.read_text()
        return log.read_text()


def _command(arguments, lacking, cases, stop_after):
    fork_always()
    torch.set_num_threads(1)
    sys.argv = [*COMMAND[2:], *arguments]
    gpu_command.is_installed = lambda name: name != lacking
    gpu_command.small_cases = cases
    if stop_after is not None:
        out = Path(arguments[arguments.index("--out") + 1])
        _stop(out, stop_after)
    try:
        gpu_command.exit_with(gpu_command.main)
    except SystemExit as stopped:
        return stopped.code


def _stop(out, num_results):
    """Let this process be asked to end, as a scheduler does, where it starts another one."""
    start = BaseProcess.start

    def start_and_be_asked(process):
        start(process)
        if (out / "speed.json").exists() and len(results_in(out, "speed")) == num_results:
            signal.raise_signal(signal.SIGTERM)

    BaseProcess.start = start_and_be_asked


def few_cases():
    """Every arm once: without those that take longest, of more ranks and of compiled blocks."""
    return small_cases()[: len(ARMS)]


def fewer_cases():
    """More than the three of a run that is told to end."""
    return few_cases()[:8]


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
    printed = run_warm("--out", out, "--tests", folder / "suite", cases=small_cases)
    return out, printed


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
    # A wheel that was not built for the CPU alone does not always name its build.
    assert session["versions"]["torch"] in (torch.__version__, torch.__version__.split("+")[0])
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
    run_warm("--part", "speed", "--out", tmp_path, code=130, cases=fewer_cases, stop_after=3)
    first = results_in(tmp_path, "speed")
    assert len(first) == 3
    run_warm("--part", "speed", "--out", tmp_path, cases=fewer_cases)
    second = results_in(tmp_path, "speed")
    assert {name: second[name] for name in first} == first
    assert {second[case.name]["session"] for case in fewer_cases()} == {0, 1}


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
