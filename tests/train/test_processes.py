"""Training in several processes on one machine: the losses of one, and one set of files."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax._util.errors import InputError
from specjax._util.processes import (
    any_process,
    check_agreement,
    is_main_process,
    join,
    raise_everywhere,
)
from specjax.models.sharding import fsdp_axis
from support.training import (
    ROOT,
    TINY_LM,
    TINY_SDSAT,
    logged,
    overrides,
    save_checkpoint,
    small_tokenizer,
)
from train.config import SDSATConfig, from_toml

COUNT, DEVICES = 2, 2  # processes, simulated devices of each
SETTINGS = ("optim.batch_size=8", "optim.total_steps=6", "mesh.fsdp=2")
HEAD = str(ROOT / "configs" / "head_demo.toml")
LOSSES = ("loss", "grad_norm", "valid_loss")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A random model's Hugging Face directory."""
    os.chdir(ROOT)
    home = tmp_path_factory.mktemp("start")
    return save_checkpoint(home, small_tokenizer(home))


def command(start, run, *settings, program="train.sdsat", config=TINY_SDSAT):
    settings = (f"model.init_from={start}", f"run.dir={run}", *settings)
    return [sys.executable, "-m", program, config, *overrides(*settings)]


def launch(start, run, *settings, separate=((), ()), **which):
    """Starts the processes of one run; ``separate`` has the settings of each process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}"
    devices = os.environ | {"XLA_FLAGS": flags}
    return [
        subprocess.Popen(
            [
                *command(start, run, *settings, *separate[index], **which),
                "--distributed",
                f"localhost:{port},{COUNT},{index}",
            ],
            env=devices,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(COUNT)
    ]


def results(started):
    """(exit code, stdout, stderr) of each."""
    outputs = [process.communicate(timeout=900) for process in started]
    return [(p.returncode, *streams) for p, streams in zip(started, outputs, strict=True)]


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one_device(start, tmp_path):
    (first, second) = results(launch(start, tmp_path / "two", *SETTINGS))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "finished" in first[1] and "finished" not in second[1]
    assert "loss" in first[2] and "loss" not in second[2]
    one = command(start, tmp_path / "one", *SETTINGS[:2])
    subprocess.run(one, cwd=ROOT, check=True, capture_output=True)
    for two, single in zip(logged(tmp_path / "two"), logged(tmp_path / "one"), strict=True):
        for name in ("loss", "objective", "adaptive_loss", "grad_norm", "valid_loss"):
            if name in single:
                np.testing.assert_allclose(two[name], single[name], rtol=2e-4, err_msg=name)
    cards = [json.loads((tmp_path / r / "export/card.json").read_text()) for r in ("two", "one")]
    assert cards[0]["held_out_decode_acceptance"] == cards[1]["held_out_decode_acceptance"]
    # One process continues from the checkpoint of both.
    longer = command(start, tmp_path / "two", SETTINGS[0], "optim.total_steps=8")
    subprocess.run([*longer, "--resume"], cwd=ROOT, check=True, capture_output=True)
    assert [row["step"] for row in logged(tmp_path / "two") if "loss" in row] == list(range(1, 9))


# Settings of other programs, by name: {0} is the random model's directory, {1} the run's.
FAST = (
    *("run.log_every=1", "run.eval_every=3", "run.eval_batches=2"),
    *("data.corpora=[]", 'data.files=["specjax"]'),
)
OTHERS = {
    "train.lm": (
        *("model.init_from=''", "model.remat=true", "tokenizer.path={0}/tokenizer.json"),
        *("distill.teacher={0}", "distill.alpha=0.5", "data.shards={1}/tokens"),
    ),
    "train.lm, its own tokenizer": ("model.init_from=''", "tokenizer.vocab_size=300"),
    "train.head": (
        *("data.corpora=[]", "data.seq_len=48", "head.layers=[0]", "head.num_kv_heads=1"),
        *("head.intermediate_size=16", "head.draft_vocab=128", "head.steps=2"),
        *("head.decode_prompts=2", "head.decode_tokens=12", "optim.accumulate=1"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_programs_run_in_two_processes_too(start, tmp_path, name):
    program = name.partition(",")[0]
    config = TINY_LM if program == "train.lm" else HEAD
    runs = {run: tmp_path / run / "run" for run in ("two", "one")}

    def settings(run):
        return [setting.format(start, runs[run].parent) for setting in (*OTHERS[name], *FAST)]

    which = {"program": program, "config": config}
    ended = results(launch(start, runs["two"], *settings("two"), *SETTINGS, **which))
    assert [code for code, *_ in ended] == [0, 0], ended
    one = command(start, runs["one"], *settings("one"), *SETTINGS[:2], **which)
    subprocess.run(one, cwd=ROOT, check=True, capture_output=True)
    both = zip(logged(runs["two"]), logged(runs["one"]), strict=True)
    losses = [(two[key], single[key]) for two, single in both for key in LOSSES if key in single]
    assert len(losses) == 6 * 2 + 2  # of each step and of two evaluations
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=2e-4)
    tensors = [load_file(run / "export/model.safetensors") for run in runs.values()]
    for key, tensor in tensors[0].items():
        np.testing.assert_allclose(tensor, tensors[1][key], atol=2e-3, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_stops_both_at_one_checkpoint(start, tmp_path, number):
    run = tmp_path / "run"
    started = launch(start, run, SETTINGS[0], "optim.total_steps=100000")
    while not (run / "checkpoints/5").exists():
        assert [process.poll() for process in started] == [None, None]
        time.sleep(0.05)
    started[1].send_signal(number)
    ended = results(started)
    assert [code for code, *_ in ended] == [0, 0], ended
    saved = max(int(path.name) for path in (run / "checkpoints").iterdir())
    assert saved == logged(run)[-1]["step"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("separate", "says"),
    [
        (((), ("optim.learning_rate=1e-3",)), ("disagree on config: 1 against process 0",) * 2),
        (((), ("model.init_from=/no/model",)), ("process 1 failed: /no/model", "/no/model")),
    ],
)
def test_processes_that_disagree_all_end_with_one_line(start, tmp_path, separate, says):
    for (code, out, err), text in zip(
        results(launch(start, tmp_path / "run", *SETTINGS, separate=separate)), says, strict=True
    ):
        assert code == 2 and "finished" not in out
        assert text in err and "Traceback" not in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_single_process_leads_and_agrees():
    cfg = from_toml(SDSATConfig, TINY_SDSAT)
    check_agreement(config=cfg)
    assert is_main_process() and any_process(True) and not any_process(False)
    with pytest.raises(InputError, match="no such thing"):
        raise_everywhere(lambda: (_ for _ in ()).throw(InputError("no such thing")))


@pytest.mark.parametrize("where", ["localhost", "localhost:1,two,0", "localhost:1,2,2"])
def test_a_malformed_address_is_one_line(where):
    with pytest.raises(InputError, match=r"expected HOST:PORT,COUNT,INDEX"):
        join(where, "train", "start again")


def test_large_arrays_are_split_along_their_longest_axis_that_divides():
    assert fsdp_axis((4097, 512), 8) == 1
    assert fsdp_axis((4096, 512), 8) == 0
    assert fsdp_axis((4096, 512), 8, split=0) == 1
    assert fsdp_axis((512,), 8) is None
    assert fsdp_axis((4097, 3), 8) is None
    assert fsdp_axis((4096, 512), 1) is None
