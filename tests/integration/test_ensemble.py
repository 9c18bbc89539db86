"""Ensemble mode over real worker processes equals the same thing as one TensorFlow graph."""

import io
import itertools
import json
from dataclasses import dataclass

import numpy as np
import pytest

from ps.ensemble_mode import EnsembleMode
from ps.monitoring.console import Console
from ps.rules.ensemble import EnsembleMaster, Head, MasterConfig
from ps.server import ParameterServer
from ps.settings.config import ServerConfig
from tests.integration.processes import ROOT, Processes, as_options
from worker.batches import Shard, gather

pytestmark = pytest.mark.timeout(240)
"""Each test starts TensorFlow several times, which takes a minute on a machine that is busy."""

NETWORKS = ROOT / "tests/integration/models/ensemble_networks.py"
MEMBERS, BATCH, SEED, TRUSTED, RATE = 3, 16, 21, 10, 0.01

COMBINATIONS = [
    pytest.param(weighting, shared, id=f"{weighting}-{'shared layer' if shared else 'nothing shared'}")
    for weighting in ("batch", "sample")
    for shared in (False, True)
]


@dataclass
class State:
    """All that an update depends on and changes, by name: values, and Adam's moments."""

    values: dict
    moments: dict


def state_of(mode):
    """Copy the state of the server's side."""
    arrays = mode.store.optimizer_arrays()
    values = {name: value.copy() for name, value in mode.store.export().items()}
    moments = {name: (arrays["m"][name].copy(), arrays["v"][name].copy()) for name in values}
    network, adam = mode._master.network, mode._master.adam
    for name, first, second, value in zip(
        ("hidden_kernel", "hidden_bias", "output_kernel", "output_bias"),
        network._views(adam.first),
        network._views(adam.second),
        network._views(network.parameters),
        strict=True,
    ):
        values[f"master/{name}"] = value.copy()
        moments[f"master/{name}"] = (first.copy(), second.copy())
    return State(values, moments)


def initial_values(shapes, dtype):
    """Random values of all members by the server's names; every member has others."""
    random = np.random.default_rng(4)
    values = {}
    for rank in range(MEMBERS):
        for name, shape in shapes.items():
            full = name if name.startswith("shared/") else f"member_{rank}/{name}"
            values.setdefault(full, random.normal(size=shape).astype(dtype) * 0.5)
    return values


class Members:
    """Three worker processes that serve one run after another."""

    def __init__(self, processes):
        command = (ROOT / "tests/integration/repeated_worker.py",)
        self.started = [processes.python(f"worker {rank}", *command) for rank in range(MEMBERS)]
        self.runs = 0

    def join(self, address, **options):
        self.runs += 1
        for rank, process in enumerate(self.started):
            words = as_options({"ps": address, "rank": rank, "threads": 1} | options)
            process.tell(json.dumps(words))

    def end(self):
        for process in self.started:
            assert process.says(r"ended with (\d+)", self.runs)[1] == "0"


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    processes = Processes(tmp_path_factory.mktemp("members"))
    yield Members(processes)
    processes.close()


@pytest.fixture
def trained(members, tmp_path, monkeypatch):
    """Return a function that trains with real workers; it returns the states before each step and at the end."""

    def train(dtype, shared, steps, **options):
        from tests.integration.models import ensemble_networks as networks

        states = []

        def close(mode, closing, real=EnsembleMode.close):
            states.append(state_of(mode))
            return real(mode, closing)

        monkeypatch.setattr(EnsembleMode, "close", close)
        config = ServerConfig(
            workers=MEMBERS,
            steps=steps,
            port=0,
            mode="ensemble",
            aggregation="master",
            seed=SEED,
            learning_rate=RATE,
            run_dir=tmp_path,
            **options,
        )
        values = initial_values(networks.shapes(shared), dtype)
        server = ParameterServer(config, Console(steps, io.StringIO()), 5, (), values)
        listener = server.listen()
        model = f"{NETWORKS}:build_{'with' if shared else 'without'}_shared"
        data = {"dataset": f"{NETWORKS}:load_{dtype}", "batch_size": BATCH, "trusted_examples": TRUSTED}
        members.join(f"127.0.0.1:{listener.address.port}", model=model, **data)
        finish = server.run(listener)
        members.end()
        assert (finish.status, len(states)) == ("done", steps)
        return [*states, state_of(server._parts.ensemble)], server.ending.summary(finish)

    return train


def graph_of(dtype, shared, head="softmax", weighting="batch", weight_acts_on="gradient"):
    """The single graph, the batch of each step, and the test set."""
    from tests.integration.ensemble_graph import EnsembleGraph
    from tests.integration.models import ensemble_networks as networks

    member = networks.with_shared if shared else networks.without_shared
    graph = EnsembleGraph(
        member,
        MEMBERS,
        networks.FEATURES,
        networks.CLASSES,
        dtype=dtype,
        head=head,
        weighting=weighting,
        acts_on=weight_acts_on,
        learning_rate=RATE,
    )
    dataset = networks._load(dtype)
    shard = Shard.of(len(dataset.train_labels), 0, 1, SEED, TRUSTED)
    return graph, lambda step: gather(dataset, shard.batch_ids(step, BATCH)), dataset


def master_values(head="softmax"):
    network = EnsembleMaster(MasterConfig(MEMBERS, 3, Head(head), SEED)).network
    return {
        f"master/{name}": getattr(network, name)
        for name in ("hidden_kernel", "hidden_bias", "output_kernel", "output_bias")
    }


def free_steps(trained, shared, steps=50, **options):
    """Train both for some steps from the same start; everything must agree at every step, and have moved."""
    states, summary = trained("float64", shared, steps, **options)
    graph, batch, dataset = graph_of("float64", shared, **options)
    graph.load(states[0].values)
    for name, value in master_values(options.get("head", "softmax")).items():
        np.testing.assert_array_equal(states[0].values[name], value)
    for step in range(steps):
        graph.step(*batch(step))
        values = graph.values()
        for name, value in states[step + 1].values.items():
            np.testing.assert_allclose(value, values[name], rtol=0, atol=1e-9, err_msg=f"{name} at step {step}")
    for name, value in states[0].values.items():
        assert np.abs(value - states[-1].values[name]).max() > 1e-3, f"{name} has not moved"
    answers = graph.logits(dataset.test_features).argmax(2)
    graph.close()
    shares = (answers == dataset.test_labels[:, None]).mean(0)
    np.testing.assert_allclose(summary["ensemble"]["alone"], shares, atol=1e-12)
    assert summary["ensemble"]["step"] == steps
    assert min(summary["ensemble"]["weighted_vote"], summary["ensemble"]["plain_vote"]) >= min(shares)
    assert summary["test_accuracy"] == summary["ensemble"]["weighted_vote"]


@pytest.mark.parametrize(("weighting", "shared"), COMBINATIONS)
def test_fifty_free_steps_in_float64(trained, weighting, shared):
    free_steps(trained, shared, weighting=weighting)


def test_fifty_free_steps_whose_weights_act_on_the_step(trained):
    free_steps(trained, True, weight_acts_on="update")


def test_fifty_free_steps_with_a_sigmoid_for_each_member(trained):
    free_steps(trained, True, head="sigmoid", weighting="sample")


@pytest.mark.parametrize(("weighting", "shared"), COMBINATIONS)
def test_each_step_from_equal_state_in_float32(trained, weighting, shared):
    """Values, moments and master of the server go into the graph before each step."""
    states, _ = trained("float32", shared, 12, weighting=weighting)
    graph, batch, _ = graph_of("float32", shared, weighting=weighting)
    for step, (before, after) in enumerate(itertools.pairwise(states)):
        graph.load(before.values)
        graph.load_optimizer(before.moments, step)
        graph.step(*batch(step))
        for name, value in graph.values().items():
            moved = np.abs(after.values[name] - before.values[name]).max()
            np.testing.assert_allclose(
                after.values[name], value, rtol=0, atol=1e-6, err_msg=f"{name} at step {step}, which moved {moved}"
            )
            assert moved > 1e-4
    graph.close()
