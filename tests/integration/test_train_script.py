"""`scripts/train.sh`, run as a person runs it: it trains, it says what it did, and it leaves nothing behind."""

import json
import os
import re
import signal
import socket
import time

import psutil
import pytest
from safetensors.numpy import load_file

from tests.integration.processes import ROOT

pytestmark = pytest.mark.timeout(180)
"""Each test starts TensorFlow several times, which takes a minute on a machine that is busy."""

AT_ONCE_S = 20.0
"""A signal ends all within 5 s; a busy machine is given more. The measured time is in the report."""

CONFIGURATION = 2


class Script:
    """A run of `train.sh` with a directory of its own, by which all its processes are known."""

    def __init__(self, processes, directory, *options, **environment):
        self.directory = directory
        words = (ROOT / "scripts/train.sh", "--run-dir", directory, *options)
        self.process = processes.command("train.sh", *words, env=environment)

    def members(self):
        """Return all processes of the run that live, the script included."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.directory) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    @property
    def port(self):
        return int((self.directory / "port").read_text())

    def has_left_nothing(self):
        with socket.socket() as probe:
            nobody_listens = probe.connect_ex(("127.0.0.1", self.port)) != 0
        return self.members() == [] and nobody_listens


@pytest.fixture
def train(processes, tmp_path):
    """Return a function that starts the script; whatever of it lives at the end is killed."""
    scripts = []

    def start(*options, **environment):
        scripts.append(Script(processes, tmp_path / f"run-{len(scripts)}", *options, **environment))
        return scripts[-1]

    yield start
    for script in scripts:
        for process in script.members():
            process.kill()


def test_it_trains_from_end_to_end(train):
    """Three workers and an evaluator, on digits; progress in plain lines, a summary, results, and nothing left.

    What the environment says to workers of other runs is not heard.
    """
    elsewhere = {"TF_CONFIG": "nonsense", "WEIGHMASTER_RANK": "7", "WEIGHMASTER_INSECURE": "1"}
    script = train("--steps", 100, "--learning-rate", 0.003, "--evaluate-every=25", **elsewhere)
    script.process.says("Training mlp on digits: 3 workers, 100 steps")
    script.process.says("load TensorFlow first")
    script.process.ends_with(0)
    assert script.has_left_nothing()
    log = script.process.log
    assert re.search(r"^step \d+/100  .*examples/s", log, re.MULTILINE)
    assert "\r" not in log  # a live line is for a terminal
    summary = json.loads((script.directory / "summary.json").read_text())
    assert summary["test_accuracy"] >= 0.93
    told = re.search(r"Trained: 100 steps in [\d.]+ s, loss [\d.]+, test accuracy ([\d.]+) \(at step 100\)", log)
    assert told is not None
    assert told[1] == f"{summary['test_accuracy']:.3f}"
    assert "What to try next:" in log
    assert len(summary["workers"]) == 3
    assert len(load_file(script.directory / "model.safetensors")) == 6
    assert "done at step 100" in (script.directory / "worker-2.log").read_text()
    for secret in (script.directory, *script.directory.glob("*token*")):
        assert secret.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_all(train, record_property, number):
    """Ctrl-C in the midst of training, SIGTERM while the workers are started: no child is left, the port is free.

    The server goes first, so nobody is lost to anybody; whoever was in the run is told why it ends.
    """
    script = train("--workers", 1, "--steps", 1_000_000)
    if number is signal.SIGINT:
        script.process.says("step [1-9]")
        assert len(script.members()) == 5  # the script, a server, a worker, a validator, an evaluator
    else:
        script.process.says("load TensorFlow first")
    began = time.monotonic()
    if number is signal.SIGINT:
        os.killpg(script.process.pid, number)  # as a terminal does
    else:
        script.process.send(number)
    script.process.ends_with(128 + number)
    took = time.monotonic() - began
    record_property("seconds", took)
    print(f"---- ended within {took:.2f} s")
    assert took < AT_ONCE_S
    assert script.has_left_nothing()
    script.process.says(rf"weighmaster-ps: the run ended at step \d+: the server was stopped by {number.name}$")
    assert script.process.errors[-1] == f"Stopped. Logs: {script.directory}"
    assert "lost" not in script.process.log
    assert "Terminated" not in script.process.log
    if number is signal.SIGINT:
        for name in ("worker-0", "evaluator"):
            log = (script.directory / f"{name}.log").read_text()
            assert "SIGTERM" not in script.process.log + log
            assert log.splitlines()[-1].endswith("ended the run: the server was stopped by SIGINT")


def test_a_signal_before_anything_has_started(train):
    """Ctrl-C while the server comes up: one sentence of each, and no trace of a run that never was."""
    script = train()
    while not script.directory.is_dir():  # made just before the first process starts
        assert script.process.log == ""
    os.killpg(script.process.pid, signal.SIGINT)
    script.process.ends_with(130)
    assert script.process.errors[-1] == "Stopped before anything was trained."
    assert not script.directory.exists()
    assert "Training" not in script.process.log


def test_a_worker_that_fails_ends_all(train, tmp_path):
    """What it said is shown, its exit code is the script's, and nobody waits for it."""
    script = train("--workers", 2, "--dataset", f"npz:{tmp_path}/none.npz")
    script.process.ends_with(CONFIGURATION)
    assert script.has_left_nothing()
    failed = script.process.says(r"(worker-\d|validator|evaluator) failed with exit code 2, which ends the run")[1]
    script.process.says(rf"The end of {script.directory}/{failed}\.log:")
    script.process.says(r"none\.npz is missing: check the path after npz:")


@pytest.mark.timeout(300)
def test_what_is_killed_is_started_again_and_the_values_are_the_same(train):
    """A worker in mid-push, then the server before an update: bit for bit what an undisturbed run gives."""
    options = ("--workers", 2, "--steps", 100, "--aggregation", "mean", "--seed", 5)
    undisturbed = train(*options)
    undisturbed.process.ends_with(0)
    faults = ("--worker-inject", "kill@mid-push,rank=1,step=33", "--inject", "kill@before-apply,step=67")
    script = train(*options, "--supervise", "--checkpoint-every", 10, *faults)
    script.process.says(rf"What dies is started again; checkpoints: {script.directory}/checkpoints$")
    script.process.says(r"^worker-1 was killed by SIGKILL: started again( in 1 s)? \(1 of 10\)$")
    port, page = script.port, (script.directory / "status-port").read_text()
    script.process.says(r"^The parameter server was killed by SIGKILL: started again( in 1 s)? \(1 of 10\)$")
    # Checkpoints are written while training goes on: which one is on the disk at step 67 is up to the disk.
    step = int(script.process.says(r"going on from step (\d+) of 100")[1])
    assert step <= 67
    script.process.ends_with(0)
    assert script.port == port, "else no worker would find it"
    assert (script.directory / "status-port").read_text() == page, "else who looks at it would look in vain"
    assert script.has_left_nothing()
    log = script.process.log
    assert log.count("started again") == 3
    assert "Killed" not in log, "the shell's own words"
    worker = (script.directory / "worker-1.log").read_text()
    said = [line for line in worker.splitlines() if line.startswith("injected:")]
    assert said == ["injected: kill at mid-push, rank 1, step 33"], "what it said before it died is kept"
    assert f"going on from step {step}" in worker and "done at step 100" in worker
    before, after = (load_file(run.directory / "model.safetensors") for run in (undisturbed, script))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_a_signal_ends_a_supervised_run_whose_server_is_away(train):
    """Ctrl-C in the pause after a death: nothing is started again, and no child is left."""
    script = train("--workers", 1, "--steps", 1_000_000, "--aggregation", "mean", "--supervise")
    script.process.says("load TensorFlow first")
    for times in (1, 2, 3):
        kill_server(script)
        script.process.says(r"^The parameter server was killed by SIGKILL: started again.* \(\d of 10\)$", times)
    began = time.monotonic()
    os.killpg(script.process.pid, signal.SIGINT)
    script.process.ends_with(130)
    assert time.monotonic() - began < AT_ONCE_S
    assert script.has_left_nothing()
    assert script.process.errors[-1] == f"Stopped. Logs: {script.directory}"


def kill_server(script):
    """Kill the server of a run, as soon as it is there."""
    while not (servers := [process for process in script.members() if _is_server(process)]):
        assert script.process.log.count("given up") == 0
    servers[0].kill()


def _is_server(process):
    try:
        return "ps" in process.cmdline()
    except psutil.NoSuchProcess:  # one of those that the script starts for a moment only
        return False


STARTING = "The parameter server is starting; the first time it compiles its kernels."
"""What the script says when the server takes more than 3 s to listen, as it may on a busy machine."""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--workers", "none"), "train.sh: --workers must be a number from 1 to 1024, not 'none'"),
        (("--workers", 1025), "train.sh: --workers must be a number from 1 to 1024, not '1025'"),
        (("--port", 5014), "train.sh: --port is what this script sets by itself; .*scripts/launch_ps.sh"),
        (("--steps",), "train.sh: --steps needs a value"),
        (("--dry-run",), "train.sh: --dry-run is what this script sets by itself"),
        (
            ("--optimiser", "sgd"),
            "weighmaster-ps: No such option '--optimiser'.*See `.*scripts/launch_ps.sh --help`",
        ),
        (("--momentum", 0.9), "weighmaster-ps: --momentum works only with --optimizer sgd"),
        (("--init", "none.safetensors"), "weighmaster-ps: --init none.safetensors cannot be read"),
    ],
    ids=["not a number", "too many", "its own", "no value", "a worker's", "unknown", "does not go", "no file"],
)
def test_an_option_that_is_wrong(train, options, sentence):
    """One sentence, of the script or of the server that was to have the option; nothing announced, nothing left."""
    script = train(*options)
    script.process.ends_with(CONFIGURATION)
    script.process.says(f"^{sentence}")
    said = [line for line in script.process.log.splitlines() if line != STARTING]
    assert len(said) == 1
    assert script.members() == []
    assert not script.directory.exists()


def test_what_an_earlier_run_has_learned_stays_until_another_one_begins(train, tmp_path):
    directory = tmp_path / "run-0"
    directory.mkdir(mode=0o700)
    (directory / "summary.json").write_text("of the earlier run")
    script = train("--momentum", 0.9)
    script.process.ends_with(CONFIGURATION)
    assert [path.name for path in directory.iterdir()] == ["summary.json"]
    assert (directory / "summary.json").read_text() == "of the earlier run"


def test_the_launch_scripts_are_the_programs(processes, tmp_path):
    """Every option is passed through, and so are the exit code and a signal: the script becomes the program."""
    port_file = tmp_path / "port"
    options = ("--workers", 1, "--steps", 1, "--port", 0, "--port-file", port_file, "--run-dir", tmp_path)
    server = processes.command("launch_ps.sh", ROOT / "scripts/launch_ps.sh", *options)
    server.says("listening on")
    address = f"127.0.0.1:{port_file.read_text().strip()}"
    worker = processes.command(
        "launch_worker.sh", ROOT / "scripts/launch_worker.sh", "--ps", address, "--rank", 1, "--threads", 1
    )
    worker.fails(3, "rank 1 is not one of this run's ranks 0 to 0")
    server.send(signal.SIGTERM)
    server.fails(143, "the server was stopped by SIGTERM")
