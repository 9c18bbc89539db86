"""Runs made up for the status page: a real coordinator and record, fed with events at made-up times."""

from ps.closing import Closed
from ps.coordination.instructions import CloseRound, SkipRound
from ps.monitoring.status_feed import StatusFeed
from ps.record import Record
from ps.settings.config import ServerConfig
from tests.unit.course import EPOCH, Client, Run

TIME = 1_700_000_000.0


class Watched:
    """A run whose rounds reach a record and a feed, as the server sees to it."""

    def __init__(self, run_dir, workers=2, steps=1000, names=None, **options):
        self.config = ServerConfig(steps=steps, workers=workers, run_dir=run_dir, **options)
        self.run = Run(workers=workers, steps=steps, has_values=True)
        self.record = Record(run_dir)
        self.feed = StatusFeed(self.config, EPOCH, self.run.now)
        self.clients = [Client(rank) for rank in range(workers)]
        for client, name in zip(self.clients, names or (), strict=False):
            object.__setattr__(client.identity, "name", name)
        self._seen = 0

    @property
    def course(self):
        return self.run.coordinator

    def start(self):
        self.run.start(*self.clients)
        return self

    def round(self, weights, losses=None, seconds=0.1, examples=10, accuracy=None):
        """Everyone pushes; those with a loss that is no number are refused, and the rest counts by `weights`."""
        self.run.now += seconds
        losses = losses or [1.0] * len(self.clients)
        for client, loss in zip(self.clients, losses, strict=True):
            self.run.push(client, loss=loss, examples=examples)
        self.closed(dict(enumerate(weights)), accuracy)
        return self

    def closed(self, weights, accuracy=None):
        """Hand on the rounds that have closed since the last time."""
        told, self._seen = self.run.told[self._seen :], len(self.run.told)
        for closing in (each for each in told if isinstance(each, CloseRound | SkipRound)):
            ranks = [c.rank for c in closing.contributions]
            names = [self.course.registry.members[rank].name for rank in ranks]
            refused = {c.rank for c in closing.contributions if c.refused}
            counted = {rank: weights[rank] for rank in ranks if rank not in refused and weights[rank] > 0}
            self.record.metrics.round_closed(closing.contributions, counted, self.run.now)
            if accuracy is not None:
                self.record.metrics.accuracy = accuracy
            counts = [counted.get(rank, 0.0) for rank in ranks]
            self.record.trust.observe(closing.step, names, counts, lambda name: "")
            self.feed.round_closed(closing, Closed(weights=counted), names, self.record, self.run.now)

    def publish(self, checkpoints=None, outcome=None, wait=1.0):
        """Let enough time pass that a state is published, and return it."""
        self.run.now += wait
        taken = self.feed.take(self.course, self.record, checkpoints, self.run.now, TIME, outcome)
        assert taken is not None
        self.feed.publish(taken)
        return self.feed.latest
