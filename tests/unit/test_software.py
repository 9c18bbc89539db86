"""On what a worker computes: recorded, and told when it changes, since bits depend on it."""

from dataclasses import replace

from protocol.messages import MAX_NAME_CHARACTERS, Role
from ps.coordination import course_state
from ps.coordination.members import Identity
from ps.monitoring.metrics import Metrics
from tests.unit.course import Client, Run, running, texts
from worker.job import cpu_kind


def on(client, software):
    client.identity = replace(client.identity, software=software)
    return client


def test_a_rank_that_returns_on_other_software_is_told_and_ends_determinism():
    run = Run(has_values=True, steps=9)
    zero, one = on(Client(0), "A 1.0"), on(Client(1), "A 1.0")
    run.start(zero, one)
    assert Metrics().determinism(run.coordinator) == (True, None)
    run.lose(one)
    told = run.join(on(Client(1), "A 2.0"))
    assert "rank 1 (site-1) computes on A 2.0, and before on A 1.0: the last bits may differ" in texts(told)
    assert Metrics().determinism(run.coordinator)[0] is False


def test_the_same_software_and_one_that_is_not_named_are_no_news():
    run = Run(has_values=True, steps=9)
    zero, one = on(Client(0), "A 1.0"), on(Client(1), "")
    run.start(zero, one)
    run.lose(zero), run.lose(one)
    told = run.join(on(Client(0), "A 1.0")) + run.join(on(Client(1), "A 1.0"))
    assert "last bits" not in texts(told) and Metrics().determinism(run.coordinator)[0]


def test_software_is_remembered_over_a_restart_of_the_server():
    run, *_ = running(steps=5)
    run.coordinator.registry.members[1].software = "A 1.0"
    again = Run(run.policy)
    course_state.restore(again.coordinator, course_state.state_of(run.coordinator))
    again.join(Client(0))
    assert "computes on B" in texts(again.join(on(Client(1), "B")))
    assert course_state.state_of(again.coordinator)["has_changed"].startswith("rank 1")


def test_the_kind_of_cpu_is_one_printable_line(tmp_path):
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: Fast One @ 2 GHz\nmodel name\t: Other\n")
    assert cpu_kind(listing) == "Fast One @ 2 GHz"
    kind = cpu_kind(tmp_path / "missing")
    assert kind and kind.isprintable() and len(kind) < MAX_NAME_CHARACTERS
    assert Identity("", "", 0, Role.WORKER, 1).software == ""
