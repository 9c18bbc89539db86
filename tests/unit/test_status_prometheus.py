"""What Prometheus reads: names follow the conventions, values are those of the run, labels are bounded."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ps.monitoring.prometheus import MOST_NAMES, OTHER, Exposition
from tests.unit.status_run import TIME, Watched

DOCS = Path(__file__).resolve().parents[2] / "docs"
UNITS = ("_total", "_seconds", "_ratio", "_steps", "_per_second", "_loss", "_connected", "_muted", "_up", "_info")


def samples(exposition, status):
    families = text_string_to_metric_families(exposition.text(status).decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        if family.name.startswith("weighmaster")
        for sample in family.samples
    }


@pytest.fixture
def status(tmp_path):
    watched = Watched(tmp_path, names=['a "quoted" \\ name', "b"]).start()
    watched.round([0.75, 0.25]).round([1.0, 0.0], [2.0, math.nan])
    return watched.publish().status


def test_values_are_those_of_the_run(status):
    found = samples(Exposition(), status)
    assert found["weighmaster_steps_total",] == 2 and found["weighmaster_target_steps",] == 1000
    assert found["weighmaster_loss",] == 2.0 and found["weighmaster_short_rounds_total",] == 1
    assert found["weighmaster_workers_connected",] == 2 and found["weighmaster_status_timestamp_seconds",] == TIME
    assert found["weighmaster_worker_rejected_pushes_total", "1", "b"] == 1
    assert found["weighmaster_worker_weight_ratio", "0", 'a "quoted" \\ name'] == 0.875
    assert found["weighmaster_phase", "running"] == 1 and found["weighmaster_phase", "draining"] == 0


def test_what_is_not_known_is_missing(status):
    found = samples(Exposition(), status)
    assert not {name for name, *_ in found} & {"weighmaster_test_loss", "weighmaster_checkpoint_step"}


def test_names_follow_the_conventions(status):
    for family in text_string_to_metric_families(Exposition().text(status).decode()):
        if family.name.startswith("weighmaster"):
            assert family.documentation.endswith(".")
            for sample in family.samples:
                assert (family.type == "counter") == sample.name.endswith("_total")
                named = ("weighmaster_loss", "weighmaster_phase", "weighmaster_checkpoint_step")
                assert sample.name in named or sample.name.endswith(UNITS), sample.name


def test_figures_of_the_process_are_there(status):
    assert b"process_resident_memory_bytes" in Exposition().text(status)


def test_labels_are_bounded_whatever_names_come(status):
    exposition = Exposition()
    labels = set()
    for number in range(MOST_NAMES + 50):
        workers = tuple(replace(worker, name=f"{worker.rank}-{number}") for worker in status.workers)
        labels |= {key[2] for key in samples(exposition, replace(status, workers=workers)) if len(key) == 3}
    assert len(labels) == MOST_NAMES + 1 and OTHER in labels


def test_a_rank_that_nobody_has_taken_is_not_there(tmp_path):
    status = Watched(tmp_path).publish().status
    assert not [key for key in samples(Exposition(), status) if len(key) == 3]


def test_the_document_and_the_dashboard_speak_of_metrics_that_exist(status):
    text = Exposition().text(status).decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE weighmaster")}
    documented = (DOCS / "STATUS.md").read_text()
    assert [name for name in names if f"`{name}`" not in documented] == []
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = {word for expr in asked for word in _words(expr) if word.startswith("weighmaster_")}
    assert used and used <= names, used - names


def _words(expression):
    return "".join(c if c.isalnum() or c in "_:" else " " for c in expression).split()
