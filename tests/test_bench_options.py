"""Options of the benchmarks: what is wrong, or would be ignored, is named; and Ctrl-C."""

import errno
import json
import os
from pathlib import Path

import pytest

from lightning_fsdp.bench import output
from lightning_fsdp.bench import run as bench_run
from lightning_fsdp.bench.__main__ import main
from lightning_fsdp.bench.limits import Limits
from lightning_fsdp.bench.options import parse
from lightning_fsdp.harness import processes
from lightning_fsdp.harness.command_line import exit_with
from lightning_fsdp.harness.processes import Failure
from lightning_fsdp.simulate.network import Network
from tests.test_bench_report import measured

SEARCH = ["largest-batch", "--max-batch-size", "8", "--device-memory", "1GB"]
SIMULATE = ["scaling", "--ranks", "8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "fsdp9"], "argument --engines: invalid choice: 'fsdp9' (choose from "),
        (["--out", "n" * 300], "--out: expected a folder, got 'nnn"),
        (["--stages", "1"], "argument --stages: invalid choice: 1 (choose from 2, 3)"),
        (["--batch-sizes", "0"], "argument --batch-sizes: expected 1 or more, got '0'"),
        (["--recipe", "nowhere"], "expected one of gpt2_xl_zero3, gpt2_zero2, "),
        (["--steps", "1"], "argument --steps: expected 2 or more, got '1'"),
        (["--precision", "fp8"], "invalid choice: 'fp8'"),
        (["--peak-flops", "0"], "--peak-flops: expected more than 0, got '0'"),
        (["--snapshot", "--warmup", "0"], "expected --device cuda and --warmup"),
        (["--precision", "16-mixed"], "--precision 16-mixed: expected --device cuda with it"),
        (["--device", "cuda"], "expected a CUDA device per rank, so 2, got 0"),
        ([*SIMULATE, "--device", "cuda"], "expected a CUDA device per rank, so 1, got 0"),
        (SEARCH[:3], "--device-memory: expected an amount of memory, or --device cuda"),
        ([*SEARCH, "--max-batch-size", "0"], "--max-batch-size: expected 1 or more, got '0'"),
        ([*SEARCH[:3], "--device-memory", "x"], "expected an amount of memory"),
        (["--simulate-world", "8", "--largest-batch", "8"], "unrecognized arguments: --largest-b"),
        (["--simulate-world", "8", "--nproc", "4"], "unrecognized arguments: --nproc 4"),
        ([*SEARCH, "--batch-sizes", "4"], "unrecognized arguments: --batch-sizes 4"),
        ([*SIMULATE, "--profile"], "unrecognized arguments: --profile"),
        (["--bandwidth", "1"], "unrecognized arguments: --bandwidth 1"),
        ([*SIMULATE, "--bandwidth", "0"], "argument --bandwidth: expected more than 0, got '0'"),
        ([*SIMULATE, "--hosts", "0"], "argument --hosts: expected 1 or more, got '0'"),
        ([*SIMULATE, "--host-bandwidth", "2"], "--host-bandwidth: expected --hosts of 2 or more"),
        (["scaling"], "the following arguments are required: --ranks"),
        (["--ranks", "0"], "argument --ranks: expected 1 or more, got '0'"),
        (["--ranks", "4", "--shard-size", "3"], "a divisor of --ranks 4, got 3"),
        ([*SIMULATE, "--shard-size", "3"], "expected a divisor of --ranks [8], got 3"),
        ([*SIMULATE, "--shared-line"], "--shared-line: expected --host-bandwidth with it"),
        (["--timeout", "0"], "--timeout: expected more than 0, got '0'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_not_given_has_its_default():
    _, args = parse([*SIMULATE, "--hosts", "2"])
    assert (args.bandwidth, args.latency, args.hosts, args.repeats) == (10.0, 10.0, 2, 2)
    assert args.batch_sizes == [4]
    assert args.config.read_text().startswith("# GPT-2 nano under ZeRO-3")


def test_the_network_is_the_one_that_was_given():
    links = {"--bandwidth": "25", "--latency": "3", "--hosts": "2", "--host-bandwidth": "1.5"}
    words = [word for pair in links.items() for word in pair]
    _, args = parse([*SIMULATE, *words, "--shared-line"])
    assert args.networks == [
        Network(
            world_size=8, bandwidth_gb_s=25.0, latency_us=3.0, num_hosts=2,
            host_bandwidth_gb_s=1.5, shares_line=True,
        )
    ]  # fmt: skip


def test_a_recipe_is_named_or_is_a_file(tmp_path):
    _, args = parse(["--recipe", "qwen_zero2"])
    assert args.config.parts[-2:] == ("recipes", "qwen_zero2.yaml")
    mine = tmp_path / "mine.yaml"
    mine.touch()
    _, args = parse(["--recipe", str(mine)])
    assert args.config == mine


@pytest.mark.parametrize("place", ["taken", "taken/below/it"])
@pytest.mark.parametrize(
    ("option", "mode"),
    [
        ("--out", []),
        ("--out", SIMULATE),
        ("--out", SEARCH),
        ("folder", ["plot"]),
    ],
)
def test_a_file_in_the_place_of_the_folder_is_named(option, mode, place, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.touch()
    given = [str(tmp_path / place)] if option == "folder" else [option, str(tmp_path / place)]
    with pytest.raises(SystemExit) as raised:
        main([*mode, *given])
    assert raised.value.code == 2
    expected = f"error: argument {option}: expected a folder, got the file {str(taken)!r}"
    assert expected in capsys.readouterr().err


def test_a_folder_that_may_not_be_written_to_is_named_first(capsys):
    for folder in ("/proc", "/proc/new/folder"):  # a mode does not hold root back
        with pytest.raises(SystemExit) as raised:
            main(["--out", folder])
        assert raised.value.code == 2
        said = capsys.readouterr().err
        assert f"--out: expected a folder, got '{folder}' (nothing can be made in '/proc': " in said


@pytest.fixture
def commands(monkeypatch):
    """Those that were run: each takes too long, and in the third somebody presses Ctrl-C."""
    commands = []

    def run_command(command, **kwargs):
        commands.append(command)
        if len(commands) == 3:
            raise KeyboardInterrupt
        return Failure("timed out", "took longer than 1 s")

    monkeypatch.setattr(processes, "run_command", run_command)
    return commands


def test_after_an_interrupt_what_was_measured_is_written(tmp_path, commands, monkeypatch, capsys):
    monkeypatch.setattr(output, "PICTURES", {"losses": output.PICTURES["losses"]})  # of eight
    options = ["--engines", "scratch", "--stages", "3", "--repeats", "1", "--out", str(tmp_path)]
    assert main(options) == 130
    says = "1 of 3 runs were not made; nothing of scratch_zero3_b4_a1"
    assert f"interrupted: {says}\n" in capsys.readouterr().err
    report = (tmp_path / "report.md").read_text()
    assert f"\nInterrupted: {says}.\n" in report
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    ran = ["single_b4_a1", "ddp_b4_a1"]
    assert [row["arm"] for row in rows] == ran, "what has not run has not failed"
    assert (report.count("| FAILED "), report.count(": took longer than 1 s (timed out)")) == (2, 2)
    lines = (tmp_path / "comparison.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["arm", *ran]
    assert {run.name for run in (tmp_path / "tensorboard").iterdir()} == {*ran, "pictures"}
    assert rows[0]["failure_kind"] == "timed out"
    commands[:] = [None, None]  # the very first run
    with pytest.raises(KeyboardInterrupt):
        main(options)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Runs ``bench run`` whose arms are made up, and whose limits are what is given."""

    def run(limits, *options):
        monkeypatch.setattr(output, "PICTURES", {})  # not to wait for them
        monkeypatch.setattr(bench_run, "run_arm", lambda arm, workload, **_: measured(arm))
        monkeypatch.setattr(bench_run, "measure_limits", limits)
        given = ["--engines", "scratch", "--stages", "3", "--repeats", "1", *options]
        code = main([*given, "--out", str(tmp_path)])
        return code, json.loads((tmp_path / "results.json").read_text())

    return run


def test_arms_are_written_if_their_limits_are_interrupted(measure, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    code, results = measure(interrupted)
    assert code == 130
    assert "interrupted: the limits were not measured" in capsys.readouterr().err
    assert results["limits"] is results["peak_flops_from"] is None
    assert [row["failure"] for row in results["rows"]] == [None] * 3
    assert "Interrupted: the limits were not measured." in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("options", "source"), [([], None), (["--peak-flops", "1e12"], "given")])
def test_limits_that_could_not_be_measured_are_told(measure, tmp_path, capsys, options, source):
    code, results = measure(lambda *_: None, *options)
    assert code == 0
    assert f"The limits were not measured; see {tmp_path}/limits/log.txt" in capsys.readouterr().out
    assert (results["limits"], results["peak_flops_from"]) == (None, source)


def test_limits_that_were_measured_give_the_peak(measure, tmp_path, capsys):
    speeds = dict.fromkeys(("gather_bytes_per_s", "reduce_bytes_per_s", "pair_bytes_per_s"), 1e9)
    _, results = measure(lambda *_: Limits(unit_bytes=1, flops_per_s=1e12, **speeds))
    assert results["peak_flops_from"] == "measured products"
    assert "limits were not" not in capsys.readouterr().out
    assert "Interrupted" not in (tmp_path / "report.md").read_text()


def test_a_scaling_study_and_a_search_are_written_after_an_interrupt(tmp_path, commands, capsys):
    arms = ["--engines", "scratch", "--stages", "3", "--out", str(tmp_path)]
    assert main([*SIMULATE, *arms, "--repeats", "1"]) == 130
    says = "1 of 3 runs were not made; nothing of scratch_zero3_b4_a1 among 8"
    assert f"interrupted: {says}\n" in capsys.readouterr().err
    assert f"Interrupted: {says}." in (tmp_path / "scaling.md").read_text()
    points = json.loads((tmp_path / "scaling.json").read_text())["points"]
    assert [point["arm"] for point in points] == ["single_b4_a1", "ddp_b4_a1"]
    commands[:] = [None]  # DDP's search ends with the smallest batch, the next arm's is interrupted
    assert main([*SEARCH, *arms]) == 130
    assert "interrupted: 1 of 2 arms were not searched" in capsys.readouterr().err
    told = (tmp_path / "largest_batch.md").read_text()
    assert (
        "Interrupted: 1 of 2 arms were not searched to the end; nothing of scratch_zero3_a1."
        in told
    )
    (ddp,) = json.loads((tmp_path / "largest_batch.json").read_text())["arms"]
    assert (ddp["arm"], ddp["largest"]) == ("ddp_a1", None)
    for options in (SIMULATE, SEARCH):
        commands[:] = [None, None]  # the very first run
        with pytest.raises(KeyboardInterrupt):
            main([*options, *arms])


def test_a_command_ends_with_its_code_or_with_that_of_an_interrupt(capsys):
    def interrupted():
        raise KeyboardInterrupt

    for command, code, says in ((lambda: 3, 3, ""), (interrupted, 130, "interrupted; nothing")):
        with pytest.raises(SystemExit) as raised:
            exit_with(command)
        assert raised.value.code == code
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("where", [None, "runs/a.json"])
def test_a_full_disk_is_one_line(where, capsys):
    def fill():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)

    with pytest.raises(SystemExit) as raised:
        exit_with(fill)
    assert raised.value.code == 1
    says = f"error: {where or 'the output'}: cannot be written (No space left on device). Make room"
    assert capsys.readouterr().err.startswith(says)
    with pytest.raises(FileNotFoundError):  # any other error is as it was
        exit_with(Path("nowhere").rmdir)
