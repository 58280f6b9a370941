"""Runs of several processes on this machine: the losses of one, one set of files, one voice."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.processes import agree, any_of, join, leads, together
from support.training import ROOT, TINY_SDSAT, logged, overrides, save_checkpoint, small_tokenizer
from train.config import SDSATConfig, from_toml
from train.engine.placement import shared_axis

COUNT, DEVICES = 2, 2  # processes, simulated devices of each
SETTINGS = ("optim.batch_size=8", "optim.total_steps=6", "mesh.fsdp=2")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A random model's Hugging Face directory."""
    os.chdir(ROOT)
    home = tmp_path_factory.mktemp("start")
    return save_checkpoint(home, small_tokenizer(home))


def command(start, run, *settings):
    settings = (f"model.init_from={start}", f"run.dir={run}", *settings)
    return [sys.executable, "-m", "train.sdsat", TINY_SDSAT, *overrides(*settings)]


def launch(start, run, *settings, own=((), ())):
    """The processes of one run; ``own`` are settings of each alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}"
    devices = os.environ | {"XLA_FLAGS": flags}
    return [
        subprocess.Popen(
            [
                *command(start, run, *settings, *own[index]),
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
    said = [process.communicate(timeout=300) for process in started]
    return [(p.returncode, *streams) for p, streams in zip(started, said, strict=True)]


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one_device(start, tmp_path):
    (first, second) = results(launch(start, tmp_path / "two", *SETTINGS))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "finished" in first[1] and "finished" not in second[1]
    assert "loss" in first[2] and "loss" not in second[2]
    one = command(start, tmp_path / "one", *SETTINGS[:2])
    subprocess.run(one, cwd=ROOT, check=True, capture_output=True)
    for two, single in zip(logged(tmp_path / "two"), logged(tmp_path / "one"), strict=True):
        for name in ("loss", "clean_loss", "adaptive_loss", "grad_norm", "valid_loss"):
            if name in single:
                np.testing.assert_allclose(two[name], single[name], rtol=2e-4, err_msg=name)
    cards = [json.loads((tmp_path / r / "export/card.json").read_text()) for r in ("two", "one")]
    assert cards[0]["held_out_decode_acceptance"] == cards[1]["held_out_decode_acceptance"]
    # What both processes saved, one goes on with.
    longer = command(start, tmp_path / "two", SETTINGS[0], "optim.total_steps=8")
    subprocess.run([*longer, "--resume"], cwd=ROOT, check=True, capture_output=True)
    assert [row["step"] for row in logged(tmp_path / "two") if "loss" in row] == list(range(1, 9))


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_at_one_checkpoint(start, tmp_path):
    run = tmp_path / "run"
    started = launch(start, run, SETTINGS[0], "optim.total_steps=100000")
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (run / "checkpoints/5").exists():
        assert [process.poll() for process in started] == [None, None]
        time.sleep(0.05)
    started[1].send_signal(signal.SIGTERM)
    ended = results(started)
    assert [code for code, *_ in ended] == [0, 0], ended
    saved = max(int(path.name) for path in (run / "checkpoints").iterdir())
    assert saved == logged(run)[-1]["step"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "says"),
    [
        (((), ("optim.learning_rate=1e-3",)), ("disagree on config: 1 against process 0",) * 2),
        (((), ("model.init_from=/no/model",)), ("process 1 failed: /no/model", "/no/model")),
    ],
)
def test_processes_that_do_not_fit_end_together_in_one_line(start, tmp_path, own, says):
    for (code, out, err), text in zip(
        results(launch(start, tmp_path / "run", *SETTINGS, own=own)), says, strict=True
    ):
        assert code == 2 and "finished" not in out
        assert text in err and "Traceback" not in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_one_process_leads_and_agrees_with_itself():
    cfg = from_toml(SDSATConfig, TINY_SDSAT)
    agree(config=cfg)
    assert leads() and any_of(True) and not any_of(False)
    with pytest.raises(InputError, match="no such thing"):
        together(lambda: (_ for _ in ()).throw(InputError("no such thing")))


@pytest.mark.parametrize("where", ["localhost", "localhost:1,two,0", "localhost:1,2,2"])
def test_a_meeting_point_of_another_form_is_one_line(where):
    with pytest.raises(InputError, match=r"expected HOST:PORT,COUNT,INDEX"):
        join(where)


def test_large_arrays_are_split_along_their_longest_axis_that_divides():
    spec = jax.sharding.PartitionSpec
    assert shared_axis((4097, 512), 8) == spec(None, "fsdp")
    assert shared_axis((4096, 512), 8) == spec("fsdp")
    assert shared_axis((512,), 8) == shared_axis((4097, 3), 8) == spec()
    assert shared_axis((4096, 512), 1) == spec()
