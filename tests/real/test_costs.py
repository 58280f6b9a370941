"""What real models cost: memory by the peak that Linux counts (VmHWM), times by ratios in a run."""

import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import specjax as sj
from support import tools
from support.real_models import installed_file

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.usefixtures("optimized")]
reads_memory = pytest.mark.skipif(sys.platform != "linux", reason="VmHWM stands in /proc")
PASS = 64  # MiB that a pass computes, and that are freed but not yet given back
LONG, SHORT, SHORTS = 1500, 20, 7
PEAK = """
import sys, specjax as sj
model = sj.load(sys.argv[1], quantize=sys.argv[2])
sj.generate(model, ["What is a list?"], max_new_tokens=8)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def cpu_seconds(runs: dict) -> dict:
    """What each run takes, the least of three in turn, after one of each that compiles.

    It is processor time of this process: its ratios do not depend on what else the machine does.
    """
    for run in runs.values():
        run()
    times = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            began = time.process_time()
            run()
            times[name].append(time.process_time() - began)
    return {name: min(taken) for name, taken in times.items()}


def test_rows_beside_a_long_prompt_are_not_fed_to_its_length(smollm2):
    """Together they take at most 1.2 times what the long one and the short ones take apart."""
    generator = np.random.Generator(np.random.Philox(0))
    lengths = [LONG] + [SHORT] * SHORTS
    prompts = [generator.integers(1000, 40_000, n).tolist() for n in lengths]

    def decoding(rows):
        return lambda: sj.generate(smollm2, rows, max_new_tokens=16, batch_size=len(rows))

    times = cpu_seconds(
        {
            "together": decoding(prompts),
            "long": decoding(prompts[:1]),
            "short": decoding(prompts[1:]),
        }
    )
    assert times["together"] <= 1.2 * (times["long"] + times["short"]), times


@reads_memory
@pytest.mark.parametrize(("scheme", "most"), [("none", 1.15), ("int8", 1.2)])
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_loading_needs_little_more_memory_than_what_is_kept(name, scheme, most):
    """What is wide while it is quantized weighs more beside codes of 8 bits."""
    measure = tools.load("measure_load_memory")
    _, second = measure.child(installed_file(name), "float32", scheme)["ratios"]
    assert second <= most


@reads_memory
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_quantized_weights_take_less_memory_to_decode_with(name):
    """No program dequantizes all codes: the peak falls by at least half of what they save."""
    installed_file(name)

    def peak(scheme):
        command = [sys.executable, "-c", PEAK, name, scheme]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(done.stdout) / 1024

    params = sj.load(name, quantize="none").params
    kept = sum(x.nbytes for x in jax.tree.leaves(params)) / 2**20
    assert peak("int8") <= peak("none") - kept * 3 / 4 / 2


def test_a_benchmark_writes_its_first_result_long_before_its_end(tmp_path):
    """Results come as they are measured, and no curve of costs is measured before the first."""
    installed_file("smollm2")
    command = [sys.executable, "-m", "infer.bench", "--target", "smollm2", "--out", str(tmp_path)]
    command += ["--quantize", "none", "--methods", "lookup", "--greedy-only", "--repeats", "1"]
    command += ["--num-prompts", "6", "--max-new-tokens", "24"]
    began = time.perf_counter()
    first = None
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            results = tmp_path / "runs.jsonl"
            if first is None and results.exists() and results.stat().st_size:
                first = time.perf_counter() - began
            time.sleep(0.1)
    whole = time.perf_counter() - began
    assert process.returncode == 0
    assert first is not None, "no result stood in runs.jsonl before the end"
    assert first <= whole / 2


@reads_memory
@pytest.mark.sweep  # it compiles for all lengths, which takes minutes
def test_a_servers_memory_stays_within_its_bound():
    """64 clients come at once, to a server that has compiled its programs before."""
    installed_file("smollm2")
    mib = tools.load("measure_served_memory").measure("smollm2", 64)
    assert mib["after"] - mib["before"] <= mib["bound"]
    assert mib["most"] - mib["before"] <= mib["bound"] + PASS
