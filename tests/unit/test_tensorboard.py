"""Files for TensorBoard, read back with its own reader."""

import errno
import logging
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from protocol.errors import ConfigurationError
from ps.coordination.instructions import CloseRound, Contribution, SkipRound
from ps.monitoring import tensorboard
from ps.monitoring.metrics import Metrics, TestResult
from ps.monitoring.tensorboard import (
    ALL_KEPT,
    MOST_NAMES,
    TensorBoard,
    is_kept,
    report_scalars,
    round_scalars,
    weights_by_name,
)
from ps.storage.schedules import Constant, ExponentialDecay

SCALARS = {"loss", "accuracy", "learning_rate", "examples_per_s"}


def _read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard would draw: (step, value) by tag."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def _round(metrics: Metrics, step: int, loss: float | None = 0.5) -> Metrics:
    contributions = [Contribution(rank, rank, 1, loss, 0.75, 32, 1.0) for rank in (0, 1)]
    metrics.round_closed(contributions, {0: 0.5, 1: 0.5}, float(step))
    return metrics


def _train(directory: Path, steps: range, loss: float) -> None:
    board, metrics = TensorBoard(directory, Constant(0.125), steps.start, 1000.0), Metrics()
    for step in steps:
        _round(metrics, step, loss)
        board.round_closed(step, metrics, {"a": 0.75, "b/c <i>": 0.25}, float(step), 1000.0 + step)
    board.close()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    _train(tmp_path / "deep" / "er", range(5), 0.5)
    read = _read(tmp_path / "deep" / "er")
    assert set(read) == SCALARS | {"weight/a", "weight/b/c <i>"}
    assert read["loss"] == [(step, 0.5) for step in range(5)]
    assert read["learning_rate"] == [(step, 0.125) for step in range(5)]
    assert read["weight/a"] == [(step, 0.75) for step in range(5)]
    assert read["examples_per_s"] == [(step, 64.0) for step in range(1, 5)], "one round tells of no throughput"


def test_a_resumed_run_takes_back_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    _train(tmp_path, range(10), 0.5)
    _train(tmp_path, range(6, 12), 0.25)
    assert _read(tmp_path)["loss"] == [(s, 0.5) for s in range(6)] + [(s, 0.25) for s in range(6, 12)]


def test_a_report_is_a_point_at_its_own_step_and_only_once(tmp_path: Path) -> None:
    board, metrics = TensorBoard(tmp_path, Constant(0.1), 0, 0.0), Metrics()
    for step in range(4):
        _round(metrics, step)
        if step == 2:
            metrics.tested(TestResult(1, 0.5, 0.875))
        board.round_closed(step, metrics, {}, float(step), 0.0)
    metrics.tested(TestResult(4, 0.25, None))
    board.tested(metrics, 0.0)
    board.close()
    read = _read(tmp_path)
    assert read["test_accuracy"] == [(1, 0.875)]
    assert read["test_loss"] == [(1, 0.5), (4, 0.25)]


def test_what_is_not_known_is_no_scalar() -> None:
    assert round_scalars(Metrics(), 0.5, {}, 0.0) == {"learning_rate": 0.5}
    assert report_scalars(TestResult(3, 0.5, None)) == {"test_loss": 0.5}


def test_weights_go_by_the_names_of_those_who_pushed() -> None:
    pushes = tuple(Contribution(rank, rank, 1, 0.5, 0.5, 32, 1.0) for rank in (0, 1, 2))
    weights = {0: 0.25, 2: 0.75}
    assert weights_by_name(CloseRound(3, pushes), weights, "abc") == {"a": 0.25, "b": 0.0, "c": 0.75}
    assert weights_by_name(SkipRound(3, pushes), {}, "abc") == {}


def test_the_learning_rate_is_that_of_the_round(tmp_path: Path) -> None:
    board, metrics = TensorBoard(tmp_path, ExponentialDecay(1.0, 1, 0.5), 0, 0.0), Metrics()
    for step in range(3):
        board.round_closed(step, _round(metrics, step), {}, float(step), 0.0)
    board.close()
    assert _read(tmp_path)["learning_rate"] == [(0, 1.0), (1, 0.5), (2, 0.25)]


def test_long_runs_have_fewer_points_the_longer_they_are() -> None:
    assert all(is_kept(step) for step in range(ALL_KEPT))
    assert [step for step in range(ALL_KEPT, ALL_KEPT + 6) if is_kept(step)] == [ALL_KEPT + k for k in (0, 2, 4)]
    assert sum(map(is_kept, range(1_000_000))) < 50_000


def test_workers_without_end_do_not_get_lines_without_end(tmp_path: Path) -> None:
    board, metrics = TensorBoard(tmp_path, Constant(0.1), 0, 0.0), Metrics()
    for number in range(MOST_NAMES + 10):
        board.round_closed(number, _round(metrics, number), {f"w{number}": 1.0, "w0": 1.0}, 0.0, 0.0)
    board.close()
    read = _read(tmp_path)
    assert sum(tag.startswith("weight/") for tag in read) == MOST_NAMES
    assert len(read["weight/w0"]) == MOST_NAMES + 10


class _Full:
    """A file on a disk that has no space left from the second point on."""

    def __init__(self) -> None:
        self.written = 0
        self.closed = False

    def write(self, point: object) -> None:
        self.written += 1
        if self.written > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_a_full_disk_is_one_warning_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = _Full()
    monkeypatch.setattr(tensorboard, "EventFile", lambda *_: full)
    board, metrics = TensorBoard(tmp_path, Constant(0.1), 0, 0.0), Metrics()
    with caplog.at_level(logging.WARNING, "weighmaster.ps"):
        for step in range(3 * tensorboard.MOST_WAITING):
            board.round_closed(step, _round(metrics, step), {}, float(step), 0.0)
        board.close()
        board.close()
    written = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert written == [
        f"TensorBoard's files in {tmp_path} cannot be written (No space left on device): "
        "the run goes on without them"
    ]
    assert (full.written, full.closed) == (2, True)


def test_a_directory_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"--tensorboard .* cannot be written: .*; name another directory"):
        TensorBoard(tmp_path / "file" / "x", Constant(0.1), 0, 0.0)


def test_without_the_package_the_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboardX", "tensorboardX.event_file_writer", "tensorboardX.proto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'weighmaster\[tensorboard\]'"):
        TensorBoard(tmp_path, Constant(0.1), 0, 0.0)
