"""Snapshots for the tests of checkpoints, and what it takes for two of them to be the same."""

import threading

import numpy as np

from ps.checkpoints.directory import NoFaults, Snapshot

EPOCH = 0xFEDCBA9876543210

PATIENCE_S = 30.0


class HoldAt(NoFaults):
    """Stops the writer at a point until it may go on."""

    def __init__(self, point):
        self.point = point
        self.seen = []
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def at(self, point, step):
        self.seen.append((step, point))
        if point == self.point:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)


def snapshot(step=10, epoch=EPOCH, elements=40):
    """Make a snapshot whose numbers depend on its step."""
    values = np.arange(elements, dtype=np.float32).reshape(4, -1) + step
    return Snapshot(
        step,
        epoch,
        {
            "values": {"dense/kernel": values, "scale": np.array(step / 3, np.float64)},
            "optimizer": {"m/dense/kernel": values / 3, "average/dense/kernel": values * 2},
            "references": {},
        },
        {
            "settings": {"optimizer": "adam", "aggregation": "master"},
            "rule": {"network": np.full(5, step / 7), "names": ["a", None]},
            "ranks": {0: "x", 1: "y"},
        },
    )


def assert_same(left, right):
    assert (left.step, left.epoch) == (right.step, right.epoch)
    written = {stem: named for stem, named in left.tensors.items() if named}
    assert list(written) == list(right.tensors)
    for stem, named in written.items():
        assert list(named) == list(right.tensors[stem])
        for name, array in named.items():
            other = right.tensors[stem][name]
            assert (array.dtype, array.shape) == (other.dtype, other.shape)
            assert array.tobytes() == other.tobytes(), f"{stem} {name}"
    assert repr(left.state) == repr(right.state)
