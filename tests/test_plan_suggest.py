"""What is suggested fits, has the memory of its plan, and the order of a simulation that is run."""

import json
import re
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import shard_model
from lightning_fsdp.config import plan_of_stage
from lightning_fsdp.plan import suggest as suggest_module
from lightning_fsdp.plan.__main__ import main
from lightning_fsdp.plan.dry_run import Run, dry_run
from lightning_fsdp.plan.models import build, config_of
from lightning_fsdp.plan.pace import Pace, Timing
from lightning_fsdp.plan.suggest import suggest, worth_trying
from lightning_fsdp.plan.suggest_report import format_suggestions
from lightning_fsdp.simulate.groups import simulated
from lightning_fsdp.simulate.network import Network
from tests.support.adapters import lora
from tests.support.planned import SEQ_LEN, folder_with
from tests.test_simulate_groups import MOST_TRIES, is_predicted

HOSTS = Network(
    world_size=16, bandwidth_gb_s=1.0, latency_us=10.0, num_hosts=4, host_bandwidth_gb_s=0.01
)
RUN = Run(world_size=16, precision="32-true", seq_len=SEQ_LEN, batch_size=4, grad_accum=2)


@pytest.fixture
def folder(tmp_path):
    return folder_with("gpt2", tmp_path)


@pytest.fixture
def shallow(tmp_path):
    """For what many settings are planned for."""
    return folder_with("gpt2", tmp_path, n_layer=1)


def _suggested(folder, device_bytes, network=HOSTS, run=RUN):
    config = config_of(str(folder))
    return suggest(config, run, network=network, flops_per_s=1e11, device_bytes=device_bytes)


def test_what_fits_has_the_memory_of_its_plan_and_trains_the_same(shallow):
    found = _suggested(shallow, 40_000_000).fitting
    runs = [each.plan.run for each in found]
    assert {(r.zero_stage, r.shard_size, r.state_over) for r in runs if r.units is None} == {
        (stage, *size)
        for stage in (2, 3)
        for size in ((4, "replica"), (4, "all"), (None, "replica"))
    }
    assert {r.units for r in runs} == {None, ("GPT2Attention", "GPT2MLP"), ("GPT2LMHeadModel",)}
    times = [each.timing.step_s for each in found]
    assert times == sorted(times)
    shown = worth_trying(found)
    assert shown[0] == found[0]
    assert len(shown) < len(found)
    for each in shown:
        assert dry_run(config_of(str(shallow)), each.plan.run).peak_bytes == each.plan.peak_bytes
    for each in found:
        run = each.plan.run
        assert each.plan.peak_bytes <= 40_000_000
        assert run.batch_size * run.grad_accum == 8
        assert each.tokens_per_s == pytest.approx(8 * SEQ_LEN / each.timing.step_s)
        assert each.share == pytest.approx(each.timing.compute_s / each.timing.step_s)
    assert found[0].plan.run.shard_size == 4, "the slow links are between hosts"
    for each in found:
        beaten_by = [
            s for s in shown
            if s.timing.step_s <= each.timing.step_s and s.plan.peak_bytes <= each.plan.peak_bytes
        ]  # fmt: skip
        assert (beaten_by == [each]) if each in shown else beaten_by


PARTS, WHOLE = ("Part",), ("Model",)


def _stub(config, run, pace):
    """Memory by a formula in place of a dry run; a gather is slower than anything."""
    size, sequences = run.shard_size or run.world_size, run.batch_size
    activations = sequences * (1 if run.activation_checkpointing else 4)
    state = 1600 // size if run.state_over == "replica" else 1600 // run.world_size + 400 // size
    nbytes = state + activations + (10 if run.grad_accum > 1 else 0)
    nbytes += {None: 0, PARTS: -2, WHOLE: 1000}[run.units]
    gathers = run.grad_accum if run.zero_stage == 3 else 1
    step_s = 1.0 + (run.activation_checkpointing and 0.3) + gathers * size
    step_s += {None: 0, PARTS: 0.1, WHOLE: -0.1}[run.units] + (run.state_over == "all") * 0.1
    return SimpleNamespace(run=run, peak_bytes=nbytes, timing=Timing(step_s, 1.0, 0.0, 0.0))


def _by_stub(monkeypatch, device_bytes):
    begun = []

    @contextmanager
    def stubs(config, run, pace):
        begun.append(replace(run, batch_size=1, grad_accum=1))
        yield lambda size, times: _stub(config, replace(run, batch_size=size, grad_accum=times), 0)

    monkeypatch.setattr(suggest_module, "dry_runs", stubs)
    monkeypatch.setattr(suggest_module, "units_to_try", lambda config: (PARTS, WHOLE))
    found = suggest(None, RUN, network=HOSTS, flops_per_s=1.0, device_bytes=device_bytes)
    times = [each.timing.step_s for each in found.fitting]
    assert times == sorted(times)
    assert len(begun) == len(set(begun)), "all micro-batches of a setting are tried on one model"
    return found


@pytest.mark.parametrize(
    ("device_bytes", "expected", "of_all"),
    [
        # What is in the way: nothing; activations; shards of a host's size; of two hosts'; more.
        (9999, [(4, 8, False), (None, 8, False)], [4]),
        (432, [(4, 8, False), (None, 8, False)], [4]),
        (431, [(4, 8, True), (4, 4, False), (None, 8, False)], [4]),
        (408, [(4, 8, True), (None, 8, False)], [4]),
        (407, [(None, 8, False)], [4]),
        (207, [(None, 8, False)], [8]),
        (110, [(None, 8, True)], []),
        (107, [], []),
    ],
)
def test_less_memory_takes_recomputation_smaller_batches_and_more_hosts(
    monkeypatch, device_bytes, expected, of_all
):
    runs = [each.plan.run for each in _by_stub(monkeypatch, device_bytes).fitting]
    runs = [run for run in runs if (run.zero_stage, run.units) == (3, None)]
    replicated = [run for run in runs if run.state_over == "replica"]
    settings = {(r.shard_size, r.batch_size, r.activation_checkpointing) for r in replicated}
    assert settings == set(expected)
    assert [run.shard_size for run in runs if run.state_over == "all"] == of_all


def test_other_units_are_tried_of_what_is_worth_trying_and_where_nothing_fits(monkeypatch):
    fitting = _by_stub(monkeypatch, 9999).fitting
    runs = [each.plan.run for each in fitting]
    for units in (PARTS, WHOLE):
        sizes = [(run.shard_size, run.state_over) for run in runs if run.units == units]
        assert sizes == [(4, "replica"), (4, "all"), (None, "replica")]
    shown = [each.plan.run for each in worth_trying(fitting)]
    assert [(run.shard_size, run.state_over, run.units) for run in shown] == [
        (4, "replica", WHOLE),
        (4, "replica", None),
        (4, "all", None),
        (4, "all", PARTS),
        (None, "replica", None),
        (None, "replica", PARTS),
    ]
    (only,) = _by_stub(monkeypatch, 106).fitting
    assert (only.plan.run.units, only.plan.peak_bytes) == (PARTS, 106)
    found = _by_stub(monkeypatch, 105)
    assert (found.fitting, found.nearest.plan.peak_bytes) == ([], 106)


def test_links_that_are_as_fast_between_hosts_leave_stage_2_first(shallow):
    fast = replace(HOSTS, host_bandwidth_gb_s=None, latency_us=0.0)
    first, *_ = _suggested(shallow, 10**9, network=fast).fitting
    assert first.plan.run.zero_stage == 2


# -- beside a simulation that runs the engine and takes the time ----------------------------------

SLOW = {"bandwidth_gb_s": 0.033, "latency_us": 600.0, "host_bandwidth_gb_s": 0.01}
SETTINGS = [(3, None), (3, 4), (2, 4)]


def _simulated_step(network, config, stage, size):
    """Seconds and bytes of the second step; little of it is computation."""
    with simulated(network) as usage:
        world_size = network.world_size
        shape = (world_size // (size or world_size), size or world_size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = shard_model(build(config), plan_of_stage(stage), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(1, SEQ_LEN, dtype=torch.long)
        for _ in range(2):
            before, start = usage.copy(), time.perf_counter()
            model(input_ids=tokens).logits.float().logsumexp(-1).sum().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            seconds = time.perf_counter() - start
            optimizer.zero_grad()
        return seconds, usage.sent_bytes - before.sent_bytes


@pytest.mark.parametrize(("world_size", "num_hosts"), [(8, 2), (64, 16)])
def test_the_order_is_that_of_a_simulation_that_is_run(folder, world_size, num_hosts):
    config = config_of(str(folder))
    network = Network(world_size=world_size, num_hosts=num_hosts, **SLOW)
    free = Network(world_size=world_size, bandwidth_gb_s=1e6, latency_us=0.0)
    predicted, taken = {}, {}
    for stage, size in SETTINGS:
        run = replace(RUN, world_size=world_size, zero_stage=stage, shard_size=size)
        run = replace(run, batch_size=1, grad_accum=1)
        timing = dry_run(config, run, Pace(network, 1e12)).timing
        predicted[stage, size], taken[stage, size] = timing.step_s, float("inf")
        for _ in range(MOST_TRIES):  # a busy machine makes a step longer, never shorter
            host_s, _ = _simulated_step(free, config, stage, size)
            seconds, sent_bytes = _simulated_step(network, config, stage, size)
            assert sent_bytes == timing.sent_bytes
            taken[stage, size] = min(taken[stage, size], seconds)
            if is_predicted(taken[stage, size], timing.step_s, host_s):
                break
        else:
            pytest.fail(f"stage {stage}, size {size}, host {host_s}: {taken}, {predicted}")
    assert sorted(SETTINGS, key=taken.get) == sorted(SETTINGS, key=predicted.get)


# -- the command ---------------------------------------------------------------------------------


def test_each_setting_that_is_not_beaten_is_shown():
    """Of ten, the slower the less memory they take, and one that another one beats."""
    figures = [(1.0 + i, 10_000_000 - i) for i in range(10)] + [(3.0, 10_000_000)]
    found = [
        SimpleNamespace(
            plan=SimpleNamespace(run=RUN, peak_bytes=nbytes, num_parameters=1),
            timing=Timing(step_s, 1.0, 0.0, 0.0),
            tokens_per_s=1.0,
            share=1.0,
        )
        for step_s, nbytes in figures
    ]
    suggestions = SimpleNamespace(fitting=found, nearest=found[0])
    printed = format_suggestions("model", RUN, suggestions, 10_000_000, [])
    assert len(re.findall(r"^\| 3 ", printed, re.MULTILINE)) == 10
    assert "1 more fit, each beaten" in printed


OPTIONS = {
    "--ranks": "16", "--hosts": "4", "--seq-len": str(SEQ_LEN), "--precision": "32-true",
    "--device-memory": "40MB", "--tflops": "0.1", "--bandwidth": "1", "--host-bandwidth": "0.01",
}  # fmt: skip


def _words(folder, **changes):
    options = {"--model": str(folder), **OPTIONS, **changes}
    return ["--suggest", *(word for pair in options.items() for word in pair if word is not None)]


def test_the_command_prints_the_best_first_and_what_it_assumes(shallow, tmp_path, capsys):
    out = tmp_path / "suggested.json"
    assert main(_words(shallow, **{"--device-memory": "1GB", "--out": str(out)})) == 0
    printed, document = capsys.readouterr().out, json.loads(out.read_text())
    rows = re.findall(
        r"^\| (\d) +\| (\d+) +\| (\w+) +\| [^|]+\| (\d+ x \d+) .*\| ([\d.]+ MB) ",
        printed,
        re.MULTILINE,
    )
    first = document["suggestions"][0]
    run = first["run"]
    size = run["shard_size"] or 16
    batches = f"{run['batch_size']} x {run['grad_accum']}"
    memory = f"{first['peak_bytes'] / 1e6:.1f} MB"
    over = run["state_over"]
    assert rows[0] == (str(run["zero_stage"]), str(size), over, batches, memory)
    suggested = document["suggestions"]
    num_beaten = len(suggested) - len(rows)
    assert f"{num_beaten} more fit, each beaten by one of these" in printed
    assert {tuple(s["run"]["units"] or ()) for s in suggested} == {
        (), ("GPT2Attention", "GPT2MLP"), ("GPT2LMHeadModel",)
    }  # fmt: skip
    assert f"ScratchFSDPStrategy(zero_stage={run['zero_stage']}, shard_size=4" in printed
    assert "attention at 0.1 TFLOP/s" in printed
    assert "4 ranks per host, 0.01 GB/s per rank out of a host." in printed
    assert all(f"* {line}" in printed for line in document["assumptions"])


def test_with_adapters_the_whole_model_is_suggested_as_a_unit(shallow, tmp_path, capsys):
    adapters, out = str(tmp_path / "adapters"), tmp_path / "suggested.json"
    lora("c_attn", fan_in_fan_out=True).save_pretrained(adapters)
    assert main(_words(shallow, **{"--adapters": adapters, "--out": str(out)})) == 0
    suggested = json.loads(out.read_text())["suggestions"]
    assert ["GPT2LMHeadModel"] in [each["run"]["units"] for each in suggested]


def test_where_nothing_fits_the_command_says_how_much_is_missing(shallow, capsys):
    assert main(_words(shallow, **{"--device-memory": "1MB", "--hosts": "2"})) == 1
    printed = capsys.readouterr().out
    assert re.search(
        r"Nothing fits. The nearest setting takes ([\d.]+) MB, ([\d.]+) MB more", printed
    )
    setting = (
        r"ScratchFSDPStrategy\(zero_stage=3, units=.*\), batches of 1, accumulate_grad_batches=1"
    )
    assert re.search(setting, printed)
    assert "| stage" not in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--tflops": "0"}, "--tflops: expected more than 0, got '0'"),
        ({"--bandwidth": "-1"}, "--bandwidth: expected more than 0"),
        ({"--latency": "-1"}, "--latency: expected 0 or more, got '-1'"),
        ({"--hosts": "3"}, "--hosts: expected a divisor of the 16 ranks, got 3"),
        ({"--hosts": "1"}, "--host-bandwidth: expected --hosts of 2 or more"),
        ({"--stage": "3"}, "--stage: not with --suggest, which tries several"),
        ({"--shard-size": "4"}, "--shard-size: not with --suggest"),
        ({"--state-over": "all"}, "--state-over: not with --suggest"),
        ({"--units": "GPT2MLP"}, "--units: not with --suggest"),
        ({"--max-batch-size": "4"}, "--max-batch-size: not with --suggest"),
        ({"--batch-size": "0"}, "--batch-size: expected 1 or more, got '0'"),
    ],
)
def test_wrong_arguments_of_suggestions_are_named(folder, changes, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(_words(folder, **changes))
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--device-memory", "--tflops", "--bandwidth"])
def test_what_suggestions_need_is_named(folder, option, capsys):
    options = {"--model": str(folder), **OPTIONS}
    del options[option]
    with pytest.raises(SystemExit):
        main(["--suggest", *(word for pair in options.items() for word in pair)])
    assert f"--suggest: expected {option} with it" in capsys.readouterr().err


def test_all_that_suggestions_lack_is_named_at_once(folder, capsys):
    with pytest.raises(SystemExit):
        main(["--suggest", "--model", str(folder), "--ranks", "2", "--bandwidth", "1"])
    said = "error: --suggest: expected --device-memory and --tflops with it. Add them.\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "words", [["--tflops", "1"], ["--hosts", "2"], ["--latency", "3"], ["--shared-line"]]
)
def test_what_only_suggestions_need_is_refused_without_them(folder, words, capsys):
    with pytest.raises(SystemExit):
        main(["--model", str(folder), "--ranks", "2", *words])
    assert f"{words[0]}: expected --suggest with it" in capsys.readouterr().err


def test_a_line_that_no_host_has_is_refused(folder, capsys):
    words = _words(folder, **{"--hosts": "4"})
    place = words.index("--host-bandwidth")
    with pytest.raises(SystemExit):
        main([*words[:place], *words[place + 2 :], "--shared-line"])
    assert "--shared-line: expected --host-bandwidth with it" in capsys.readouterr().err
