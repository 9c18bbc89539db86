"""When checkpoints are taken, of what, and what a run goes on from."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from protocol.errors import CheckpointError, ConfigurationError
from protocol.injector import NONE
from protocol.tensors import Layout, Manifest
from ps import checkpointing
from ps.build import store_config
from ps.checkpointing import Checkpointing, Parts, changes_since, open_checkpoints, with_known_workers
from ps.checkpoints.directory import CheckpointDirectory, Snapshot, checkpoints_in, load
from ps.closing import RoundCloser
from ps.record import Record
from ps.rules.aggregation import Mean
from ps.settings.config import AUTO, ServerConfig
from ps.storage.schedules import Constant
from ps.storage.store import Store
from tests.unit.course import EPOCH, Client, Run

VARIABLES = {"w": np.arange(5, dtype=np.float32), "b": np.zeros((), np.float32)}
SECRET = b"s" * 32


class Server:
    """The parts of a server that are in a checkpoint, driven by a real coordinator and a real store."""

    def __init__(self, directory, restored=None, every=3, steps=20, **options):
        self.config = ServerConfig(
            workers=1,
            steps=steps,
            optimizer="adam",
            checkpoint_dir=directory,
            checkpoint_every=every,
            run_dir=directory.parent / "run",
            **options,
        )
        self.config.run_dir.mkdir(mode=0o700, exist_ok=True)
        self.run = Run(workers=1, steps=steps)
        self.worker = Client(0)
        manifest = Manifest.of(VARIABLES, ())
        self.agreement = SimpleNamespace(store=None, restore=self._make)
        record, closer = Record(self.config.run_dir), RoundCloser(Mean(), Constant(0.1))
        self.parts = Parts(self.run.coordinator, closer, record, self.agreement, None)
        if restored is None:
            self._make(manifest)
            values = np.zeros(self.agreement.store.layout.values_bytes, np.uint8)
            self.agreement.store.initialise(values)
        else:
            checkpointing.restore(self.parts, self.config, restored)
        self.directory = CheckpointDirectory.open(directory, keep=50)
        resumed_at = None if restored is None else restored.step
        self.checkpoints = Checkpointing(self.directory, self.config, EPOCH, SECRET, resumed_at)
        self.run.start(self.worker)

    def _make(self, manifest):
        layout = Layout.of(manifest)
        self.agreement.store = Store(layout, store_config(self.config))
        return self.agreement.store

    def step(self, gradient=1.0):
        """One round, with what the server does in it."""
        store = self.agreement.store
        receiver = store.receiver(0)
        row = np.frombuffer(receiver.buffer, np.float32)
        row.flags.writeable = True
        row[:] = gradient
        store.apply((0,), (1.0,), None, 0.1)
        self.run.push(self.worker)
        self.checkpoints.round_closed(self.run.coordinator)
        self.checkpoints.take_due(self.parts)

    def values(self):
        return {name: array.copy() for name, array in self.agreement.store.export().items()}

    def close(self):
        self.checkpoints.close()
        self.agreement.store.close()
        self.directory.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def steps_in(directory):
    return sorted(int(path.name.split("-")[1]) for path in checkpoints_in(directory))


def test_a_checkpoint_is_taken_at_every_multiple_and_before_the_first_round(tmp_path):
    with Server(tmp_path / "c") as server:
        server.checkpoints.begin(server.parts)
        for _ in range(7):
            server.step()
            server.checkpoints._writer.wait()
        assert steps_in(tmp_path / "c") == [0, 3, 6] and server.checkpoints.last_step == 6


def test_one_that_is_due_while_another_is_written_is_taken_as_soon_as_that_is_done(tmp_path):
    with Server(tmp_path / "c") as server:
        busy = True
        server.checkpoints._writer = SimpleNamespace(
            **{name: getattr(server.checkpoints._writer, name) for name in ("begin", "wait", "close")}, busy=busy
        )
        for _ in range(4):
            server.step()
        assert steps_in(tmp_path / "c") == []
        server.checkpoints._writer.busy = False
        server.step()
        server.checkpoints._writer.wait()
        assert steps_in(tmp_path / "c") == [5]


def test_every_step_is_written_where_every_step_is_asked_for(tmp_path):
    with Server(tmp_path / "c", every=1) as server:
        server.checkpoints.begin(server.parts)
        for _ in range(9):
            server.checkpoints._writer.wait()  # as the workers do, who get no values before
            server.step()
        server.checkpoints._writer.wait()
        assert steps_in(tmp_path / "c") == list(range(10))


def test_the_last_one_is_written_once(tmp_path):
    with Server(tmp_path / "c") as server:
        for _ in range(4):
            server.step()
        server.checkpoints.last(server.parts)
        assert steps_in(tmp_path / "c") == [3, 4]
        server.checkpoints.last(server.parts)
        assert steps_in(tmp_path / "c") == [3, 4]


def test_a_run_goes_on_with_the_same_bits(tmp_path):
    with Server(tmp_path / "a") as undisturbed:
        for number in range(8):
            undisturbed.step(number - 2.5)
        wanted = undisturbed.values()
    with Server(tmp_path / "b") as before:
        for number in range(5):
            before.step(number - 2.5)
    with CheckpointDirectoryOf(tmp_path / "b") as directory:
        restored = directory.newest()
    assert restored.step == 3
    with Server(tmp_path / "b", restored) as after:
        assert after.run.coordinator.step == 3 and after.agreement.store.updates == 3
        for number in range(3, 8):
            after.step(number - 2.5)
        for name, array in after.values().items():
            assert array.tobytes() == wanted[name].tobytes()


def test_a_server_that_has_done_nothing_since_its_resume_writes_nothing(tmp_path):
    with Server(tmp_path / "c") as server:
        for _ in range(3):
            server.step()
    with CheckpointDirectoryOf(tmp_path / "c") as directory:
        restored = directory.newest()
    with Server(tmp_path / "c", restored) as again:
        again.checkpoints.last(again.parts)
        assert steps_in(tmp_path / "c") == [3]


def test_checkpoints_of_later_steps_are_set_aside(tmp_path):
    with Server(tmp_path / "c") as server:
        for _ in range(6):
            server.step()
            server.checkpoints._writer.wait()
    with CheckpointDirectoryOf(tmp_path / "c") as directory:
        newest = directory.newest()
    early = next(path for path in checkpoints_in(tmp_path / "c") if "step-0000000003" in path.name)
    assert newest.step == 6
    with Server(tmp_path / "c", load(early)) as again:
        again.checkpoints.accept_history()
        assert steps_in(tmp_path / "c") == [3]
        assert [path.name for path in (tmp_path / "c").glob("*.abandoned")]


def test_a_failure_is_counted_and_training_goes_on(tmp_path, monkeypatch, caplog):
    def full(snapshot, copied=None):
        raise CheckpointError("checkpoint of step 3 cannot be written: No space left on device")

    with Server(tmp_path / "c") as server:
        monkeypatch.setattr(server.directory, "write", full)
        with caplog.at_level(logging.WARNING, "weighmaster.ps"):
            for _ in range(7):
                server.step()
                server.checkpoints._writer.wait()
        assert (server.checkpoints.failures, server.checkpoints.last_step) == (2, None)
        assert "No space left" in caplog.text
        with pytest.raises(CheckpointError, match="No space left"):
            server.checkpoints.last(server.parts)


# ---- what a run goes on from ---------------------------------------------------------------------------


class CheckpointDirectoryOf:
    def __init__(self, path):
        self._path = path

    def __enter__(self):
        self._directory = CheckpointDirectory.open(self._path, keep=50)
        return self._directory

    def __exit__(self, *_):
        self._directory.close()


def opened(config):
    with open_checkpoints(config, NONE) as (_, restored):
        return restored


def test_without_a_directory_there_is_nothing(tmp_path):
    assert opened(ServerConfig(workers=1, steps=5)) is None


def test_an_empty_directory_starts_afresh_and_says_so(tmp_path, caplog):
    config = ServerConfig(workers=1, steps=5, checkpoint_dir=tmp_path / "c", resume=True)
    with caplog.at_level(logging.INFO, "weighmaster.ps"):
        assert opened(config) is None
    assert "starts afresh" in caplog.text


def test_checkpoints_are_gone_on_from_only_if_that_was_asked_for(tmp_path):
    with Server(tmp_path / "c") as server:
        for _ in range(3):
            server.step()
        config = server.config
    with pytest.raises(ConfigurationError, match="go on from them with --resume"):
        opened(config)
    assert opened(replace(config, resume=True)).step == 3


def test_a_number_of_workers_that_is_left_open_is_that_of_the_checkpoint(tmp_path, caplog):
    """Another would have other values, and be told so."""
    with Server(tmp_path / "c") as server:
        for _ in range(3):
            server.step()
        known = server.config
    config = replace(known, workers=AUTO, resume=True)
    with caplog.at_level(logging.INFO, "weighmaster.ps"):
        restored = opened(config)
    assert "--workers" not in caplog.text
    assert f"the checkpoint is of a run for {known.workers} workers, and so is this one" in caplog.text
    assert with_known_workers(config, restored) == replace(known, resume=True)
    assert with_known_workers(replace(known, workers=9), restored).workers == 9, "it was said"
    assert with_known_workers(config, None) == config
    with pytest.raises(CheckpointError, match="does not say how many workers"):
        with_known_workers(config, Snapshot(4, 1, {}, {}))
    elastic = {"settings": {"workers": None}, "workers": 16}
    with pytest.raises(ConfigurationError, match="workers come and go: it has no number"):
        with_known_workers(config, Snapshot(4, 1, {}, elastic))


@pytest.mark.parametrize(
    ("change", "words"), [({"optimizer": "sgd"}, "--optimizer"), ({"seed": 5}, "--seed")], ids=str
)
def test_what_must_not_change_is_refused_and_the_checkpoint_stays(tmp_path, change, words):
    with Server(tmp_path / "c") as server:
        for _ in range(3):
            server.step()
        config = server.config
    with pytest.raises(ConfigurationError, match=words):
        opened(replace(config, resume=True, **change))
    assert steps_in(tmp_path / "c") == [3]


def test_a_checkpoint_that_says_nothing_of_its_run_is_no_good(tmp_path):
    with CheckpointDirectoryOf(tmp_path / "c") as directory:
        directory.write(Snapshot(4, 1, {}, {}))
    with pytest.raises(CheckpointError, match="does not say of which run"):
        opened(ServerConfig(workers=1, steps=5, checkpoint_dir=tmp_path / "c", resume=True))


def test_a_part_that_is_missing_is_named(tmp_path):
    with Server(tmp_path / "c") as server:
        for _ in range(3):
            server.step()
    with CheckpointDirectoryOf(tmp_path / "c") as directory:
        restored = directory.newest()
    del restored.state["closer"]
    with pytest.raises(CheckpointError, match=r"step 3 cannot be used: it says nothing of 'closer'"):
        Server(tmp_path / "c", restored)


def test_other_software_is_a_reason_to_expect_other_bits(tmp_path):
    with Server(tmp_path / "c") as server:
        for _ in range(3):
            server.step()
        config = server.config
    with CheckpointDirectoryOf(tmp_path / "c") as directory:
        restored = directory.newest()
    assert changes_since(config, restored) is None
    restored.state["software"]["numpy"] = "0.1"
    assert changes_since(config, restored) == "resumed with another numpy"
