"""The state of a run as Prometheus reads it. Needs `prometheus_client`, of the group `metrics`."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ps.coordination.policy import Phase
from ps.monitoring.status import Status, WorkerRow, WorkerState

CONTENT_TYPE = CONTENT_TYPE_LATEST

MOST_NAMES = 256
"""Different names of workers that become labels in a run; later ones are all called `OTHER`.

A worker that comes again and again under a new name must not fill the memory of who scrapes.
"""

OTHER = "(other)"

PRESENT = (WorkerState.HERE, WorkerState.LATE, WorkerState.PROBATION)

RUN_GAUGES: tuple[tuple[str, str, Callable[[Status], float | None]], ...] = (
    ("weighmaster_target_steps", "Steps of the whole run.", lambda s: s.run.steps),
    ("weighmaster_loss", "Loss of the last round, before its update.", lambda s: s.figures.loss),
    ("weighmaster_accuracy_ratio", "Accuracy of the last round, 0 to 1.", lambda s: s.figures.accuracy),
    ("weighmaster_test_loss", "Loss on the test data, as last reported.", lambda s: s.figures.test_loss),
    (
        "weighmaster_test_accuracy_ratio",
        "Accuracy on the test data, 0 to 1, as last reported.",
        lambda s: s.figures.test_accuracy,
    ),
    ("weighmaster_examples_per_second", "Throughput of the last seconds.", lambda s: s.figures.examples_per_s),
    (
        "weighmaster_remaining_seconds",
        "Time left at the present pace; missing when not known.",
        lambda s: s.run.seconds_left,
    ),
    ("weighmaster_waiting_seconds", "How long somebody is waited for; 0: nobody is.", lambda s: s.waiting.seconds),
    (
        "weighmaster_workers_connected",
        "Workers that are connected.",
        lambda s: sum(w.state in PRESENT for w in s.workers),
    ),
    (
        "weighmaster_workers_muted",
        "Workers to which the rule gives next to no weight.",
        lambda s: sum(w.muted for w in s.workers),
    ),
    ("weighmaster_evaluators_connected", "Evaluators that are connected.", lambda s: s.evaluators),
    (
        "weighmaster_validators_connected",
        "Validators that are connected.",
        lambda s: sum(v.connected for v in s.validators),
    ),
    (
        "weighmaster_checkpoint_step",
        "Step of the newest checkpoint of this start; missing before the first.",
        lambda s: s.checkpoints.last_step,
    ),
    ("weighmaster_status_timestamp_seconds", "When these figures were taken, since 1970.", lambda s: s.time),
)

RUN_COUNTERS: tuple[tuple[str, str, Callable[[Status], float]], ...] = (
    ("weighmaster_steps", "Closed rounds, or applied pushes, over all resumes.", lambda s: s.run.step),
    ("weighmaster_void_rounds", "Rounds with nothing to apply.", lambda s: s.run.void_rounds),
    (
        "weighmaster_short_rounds",
        "Rounds with fewer usable pushes than workers.",
        lambda s: s.run.short_rounds,
    ),
    (
        "weighmaster_predicted_rounds",
        "Rounds that closed without waiting longer for a validator.",
        lambda s: s.run.predicted_rounds,
    ),
    (
        "weighmaster_left_out_rounds",
        "Rounds that closed without a worker that had not left.",
        lambda s: s.run.left_out_rounds,
    ),
    (
        "weighmaster_checkpoint_failures",
        "Checkpoints that could not be written.",
        lambda s: s.checkpoints.failures,
    ),
)

WORKER_GAUGES: tuple[tuple[str, str, Callable[[WorkerRow], float | None]], ...] = (
    ("weighmaster_worker_up", "Whether the worker is connected.", lambda w: w.state in PRESENT),
    ("weighmaster_worker_weight_ratio", "Mean weight over the last 20 rounds.", lambda w: w.weight),
    ("weighmaster_worker_share_ratio", "Weight in its last round; 1: an equal part.", lambda w: w.share),
    ("weighmaster_worker_muted", "Whether the rule gives it next to nothing.", lambda w: w.muted),
    ("weighmaster_worker_staleness_steps", "Age of the values of its last push.", lambda w: w.staleness),
)

WORKER_COUNTERS: tuple[tuple[str, str, Callable[[WorkerRow], float]], ...] = (
    ("weighmaster_worker_pushes", "Pushes that arrived in their round.", lambda w: w.pushes),
    ("weighmaster_worker_rejected_pushes", "Pushes that could not be used.", lambda w: w.rejected),
    ("weighmaster_worker_stale_pushes", "Pushes of another step or epoch.", lambda w: w.stale),
    ("weighmaster_worker_late_pushes", "Pushes whose round had closed without them.", lambda w: w.late),
    ("weighmaster_worker_duplicate_pushes", "Pushes that were a repetition.", lambda w: w.duplicates),
    ("weighmaster_worker_muted_rounds", "Rounds in which it had next to no weight.", lambda w: w.muted_rounds),
)


class Exposition:
    """Writes states of a run in Prometheus' text format; remembers only which names it has used as labels."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def text(self, status: Status) -> bytes:
        """Return a state, and the figures of this process, as `CONTENT_TYPE`."""
        registry = CollectorRegistry()
        registry.register(_Collected(status, [self._labels(worker) for worker in status.workers]))
        ProcessCollector(registry=registry)
        return generate_latest(registry)

    def _labels(self, worker: WorkerRow) -> list[str]:
        """Return rank and name: a rank is held by one at a time, a name may be that of two who are gone."""
        if worker.name not in self._names and len(self._names) < MOST_NAMES:
            self._names.add(worker.name)
        return [str(worker.rank), worker.name if worker.name in self._names else OTHER]


class _Collected(Collector):
    def __init__(self, status: Status, labels: Sequence[Sequence[str]]) -> None:
        self._status = status
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        status, run = self._status, self._status.run
        facts = {
            "epoch": status.epoch,
            "mode": run.mode,
            "consistency": run.consistency,
            "aggregation": run.aggregation,
            "optimizer": run.optimizer,
        }
        yield InfoMetricFamily("weighmaster_run", "What the run is.", facts)
        phase = GaugeMetricFamily("weighmaster_phase", "1 for the phase in which the run is.", labels=["phase"])
        for each in Phase:
            phase.add_metric([each.value], float(each.value == run.phase))
        yield phase
        for name, text, of_run in RUN_GAUGES:
            gauge = GaugeMetricFamily(name, text)
            _add(gauge, [], of_run(status))
            yield gauge
        for name, text, count_of_run in RUN_COUNTERS:
            yield CounterMetricFamily(name, text, value=count_of_run(status))
        for name, text, of_worker in WORKER_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["rank", "worker"])
            for labels, worker in self._present():
                _add(gauge, labels, of_worker(worker))
            yield gauge
        for name, text, count_of_worker in WORKER_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["rank", "worker"])
            for labels, worker in self._present():
                counter.add_metric(labels, count_of_worker(worker))
            yield counter

    def _present(self) -> Iterator[tuple[Sequence[str], WorkerRow]]:
        pairs = zip(self._labels, self._status.workers, strict=True)
        return ((labels, worker) for labels, worker in pairs if worker.name)


def _add(gauge: GaugeMetricFamily, labels: Sequence[str], value: float | None) -> None:
    if value is not None:
        gauge.add_metric(labels, value)
