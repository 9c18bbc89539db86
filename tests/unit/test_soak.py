"""The pure parts of the soak: sums that show a lost or doubled step, the faults to come, what counts as broken."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from benchmarks.soak import counting_of
from benchmarks.soak_faults import (
    BLACKHOLE,
    CUT,
    DELAY,
    DOUBLE,
    ON_CONNECTION,
    WEIGHTS,
    ArmedProxy,
    Coming,
    fault_on_connection,
    injection_for_start,
    schedule,
)
from benchmarks.soak_invariants import (
    GROWTH,
    Patience,
    Sample,
    growth,
    history_problem,
    read_rounds,
    values_problem,
)
from benchmarks.tally import PERIOD, Counting, Tally, factor, marks_at, tally_of_rounds
from benchmarks.tally_processes import Lines
from protocol.addresses import Address
from protocol.frame_faults import Action
from protocol.injection import Plan
from protocol.messages import Kind, Side

W = 4


def after(tally, rounds):
    """Return the values that plain SGD with learning rate 1 makes: `rounds` are (step of the push, its ranks)."""
    values = tally.initial_values()
    for step, ranks in rounds:
        for rank in ranks:
            gradients = tally.gradients(rank)
            tally.mark(gradients, step)
            for name, gradient in gradients.items():
                values[name] -= gradient / len(ranks)
    return values


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounds_of_all_are_right_and_a_lost_or_doubled_one_is_not(dtype):
    tally, everyone = Tally(W, 50, Counting.ALL, dtype), range(W)
    rounds = [(step, everyone) for step in range(30)]
    assert tally.problem(after(tally, rounds), 30) == ""
    assert "holds the pushes of 29 steps" in tally.problem(after(tally, rounds[:7] + rounds[8:]), 30)
    assert "holds the pushes of 31 steps" in tally.problem(after(tally, [*rounds, rounds[3]]), 30)


def test_a_step_in_the_place_of_another_shows_in_the_marks():
    tally, everyone = Tally(W, 5), range(W)
    rounds = [(step, everyone) for step in [0, 1, 1, 3]]
    assert tally.problem(after(tally, rounds), 4).startswith("the marks of step 4")


def test_a_rank_that_counts_twice_for_another_shows():
    tally = Tally(W, 5)
    assert "have not counted the same" in tally.problem(after(tally, [(0, [0, 1, 2, 2])]), 1)


def test_rounds_of_whoever_is_there_allow_for_rounding_and_for_nothing_else():
    tally = Tally(3, 5, Counting.ROUNDS)
    rounds = [(step, [[0, 1, 2], [0, 2], [1]][step % 3]) for step in range(200)]
    assert tally.problem(after(tally, rounds), 200) == ""
    assert tally.problem(after(tally, rounds[:-1]), 200) != ""
    assert tally.problem(after(tally, [*rounds[:-1], (3, [0, 1, 2])]), 200) != ""


def test_single_pushes_are_whole_numbers():
    tally = Tally(W, 5, Counting.PUSHES)
    pushes = [(0, [0]), (0, [1]), (1, [0]), (0, [3])]
    assert tally.problem(after(tally, pushes), 4) == ""
    assert "parts of pushes" in tally.problem(after(tally, [*pushes, (4, [1, 2])]), 5)


def test_torn_values_show():
    tally = Tally(W, 100)
    early, late = (after(tally, [(step, range(W)) for step in range(count)]) for count in (5, 6))
    torn = {**late, "bulk": np.concatenate([late["bulk"][:60], early["bulk"][60:]])}
    assert "40 of 100 values are wrong, the first at 60" in tally.problem(torn, 6)


def test_marks_differ_within_a_period_and_their_sums_are_right_beyond_it():
    assert len({marks_at(step) for step in range(PERIOD)}) == PERIOD
    for step in (0, 1, PERIOD - 1, PERIOD, 3 * PERIOD + 17):
        assert Tally(W, 5).marks_before(step) == sum(marks_at(s) for s in range(step))


def test_neighbours_push_different_gradients():
    assert [factor(rank) for rank in range(5)] == [1, 2, 3, 4, 1]


@pytest.mark.parametrize(
    ("counting", "after_", "applied", "is_right"),
    [
        (Counting.PUSHES, 6, True, True),
        (Counting.PUSHES, 7, True, False),
        (Counting.PUSHES, 5, True, False),
        (Counting.PUSHES, 5, False, True),
        (Counting.PUSHES, 6, False, True),  # it had counted, and the answer to its repetition does not say so
        (Counting.PUSHES, 7, False, False),
        (Counting.ROUNDS, 5.25, True, True),
        (Counting.ROUNDS, 5, True, False),
        (Counting.ROUNDS, 4.75, False, False),
        (Counting.NONE, 0, True, True),
    ],
)
def test_a_rank_sees_its_own_pushes_count_once(counting, after_, applied, is_right):
    assert (Tally(W, 5, counting).progress_problem(1, 5, after_, applied) == "") == is_right


def rounds_of(steps, ranks=(0, 1, 2, 3), refused=()):
    return [{"step": step, "ranks": list(ranks), "refused": list(refused)} for step in steps]


@pytest.mark.parametrize(
    ("rounds", "problem"),
    [
        (rounds_of(range(5)), ""),
        (rounds_of([0, 1, 3]), "line 2 of rounds.jsonl is of step 3"),
        (rounds_of([0, 1, 1, 2]), "line 2 of rounds.jsonl is of step 1"),
        (rounds_of([1, 2]), "line 0 of rounds.jsonl is of step 1"),
        (rounds_of([0], ranks=[0, 1, 3]), "step 0 has ranks [0, 1, 3] instead of all 4"),
        (rounds_of([0], refused=[2]), "step 0 has ranks [0, 1, 2, 3], of which [2] were refused"),
    ],
)
def test_history_has_each_step_once_and_in_order(rounds, problem):
    assert history_problem(rounds, W, all_take_part=True) == problem


def test_rounds_may_lack_ranks_only_where_that_is_allowed():
    assert history_problem(rounds_of([0], ranks=[1]), W, all_take_part=False) == ""
    assert history_problem(rounds_of([0], ranks=[]), W, all_take_part=False) != ""


def test_a_torn_last_line_is_left_out_and_a_torn_line_before_it_is_an_error():
    lines = [json.dumps(line) for line in rounds_of(range(3))]
    assert len(read_rounds("\n".join(lines))) == 2
    assert len(read_rounds("\n".join([*lines, ""]))) == 3
    with pytest.raises(ValueError, match=r"Expecting|delimiter|Unterminated"):
        read_rounds("\n".join([lines[0][:9], *lines, ""]))


def test_final_values_are_those_that_the_rounds_make():
    rounds = [*rounds_of(range(3)), *rounds_of([3], ranks=[0, 1, 2, 3], refused=[3]), *rounds_of([4], ranks=[2])]
    tally = np.array([0.75 + 1 / 3, 0.75 + 1 / 3, 1.75 + 1 / 3, 0.75])
    assert np.allclose(tally_of_rounds(rounds, W), tally)
    assert values_problem(rounds, tally) == ""
    assert values_problem(rounds[:-1], tally) != ""


def sample(at_s, megabytes=100.0, threads=9, descriptors=18):
    return Sample(at_s, 1, at_s, round(megabytes * 1e6), threads, descriptors)


def test_growth_compares_the_largest_before_with_the_largest_after():
    samples = [sample(1, 80), sample(100, 100), sample(130, 90), sample(500, 104, threads=12), sample(600, 95)]
    grown = growth(samples, 120)
    assert (grown.resident, grown.threads, grown.descriptors) == (pytest.approx(1.04), 3, 0)
    assert grown.problems(W) == []


@pytest.mark.parametrize(
    ("late", "word"),
    [
        (sample(200, 100 * GROWTH + 1), "memory"),
        (sample(200, threads=9 + 2 * W + 3), "threads"),
        (sample(200, descriptors=18 + 2 * W + 3), "descriptors"),
    ],
)
def test_what_grows_is_named(late, word):
    (problem,) = growth([sample(1), late], 120).problems(W)
    assert problem.startswith(f"the server's {word} grow")


def test_growth_needs_samples_of_both_times():
    assert growth([sample(1), sample(2)], 120) is None
    assert growth([sample(200)], 120) is None


def test_patience_ends_with_who_has_not_got_on():
    patience = Patience(60)
    patience.moved("worker 0", 0)
    patience.moved("worker 1", 0)
    patience.moved("worker 1", 50)
    assert patience.problem(60) == ""
    assert patience.problem(61) == "worker 0 has not got on for 61 s"
    patience.moved("worker 0", 61)
    assert patience.problem(100) == ""


def test_patience_with_who_is_stopped_does_not_end_before_he_goes_on():
    patience = Patience(60)
    patience.moved("worker 0", 8)  # stopped now, until second 8
    patience.moved("worker 0", 1)  # an answer that was on its way
    assert patience.problem(67) == ""


def test_the_schedule_is_drawn_by_the_seed_has_each_kind_soon_and_the_mean_that_was_asked_for():
    kinds = tuple(WEIGHTS)
    drawn = list(itertools.islice(schedule(7, 5.0, W, kinds), 4000))
    assert drawn[:50] == list(itertools.islice(schedule(7, 5.0, W, kinds), 50))
    assert drawn[:50] != list(itertools.islice(schedule(8, 5.0, W, kinds), 50))
    assert {coming.kind for coming in drawn[: len(kinds)]} == set(kinds)
    assert drawn[-1].at_s / len(drawn) == pytest.approx(5.0, rel=0.1)
    assert {coming.rank for coming in drawn} == set(range(W))
    counts = Counter(coming.kind for coming in drawn)
    assert counts["kill a worker"] / counts["kill the server"] == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "action"),
    [(CUT, Action.CUT), (DELAY, Action.DELAY), (DOUBLE, Action.DOUBLE), (BLACKHOLE, Action.BLACKHOLE)],
)
def test_every_fault_of_a_connection_is_one_that_the_proxy_knows(kind, action):
    faults = [fault_on_connection(Coming(0, kind, 0, number / 50), 4.0) for number in range(50)]
    assert {fault.action for fault in faults} == {action}
    assert kind in ON_CONNECTION
    lasting = [fault.seconds for fault in faults if fault.seconds is not None]
    assert all(0 < seconds <= (2.0 if action is Action.DELAY else 8.0) for seconds in lasting)


def test_every_fault_of_a_server_can_be_injected_and_comes_later_than_all_that_was():
    texts = [injection_for_start(number / 400, 1003, 50) for number in range(400)]
    given = [text for text in texts if text is not None]
    assert len(given) == 200
    plan = Plan.parse(given, Side.SERVER)
    assert len({(i.point, i.part) for i in plan.injections}) == 8
    assert all(i.step > 1003 and i.step % 50 == 0 for i in plan.injections)


def test_an_armed_fault_strikes_the_next_frame_of_its_kind_once():
    proxy = ArmedProxy(Address("127.0.0.1", 1))
    with proxy:
        fault = fault_on_connection(Coming(0, DOUBLE, 0, 0.5), 4.0)
        proxy.arm(DOUBLE, fault)
        assert proxy.strike(Kind.VALUES) is None
        assert proxy.strike(Kind.PUSH) is fault
        assert proxy.strike(Kind.PUSH) is None
        assert proxy.struck == {DOUBLE: 1}
        proxy.arm(DOUBLE, fault)
        proxy.disarm()
        assert proxy.strike(Kind.PUSH) is None


def test_lines_are_read_once_and_whole(tmp_path):
    path = tmp_path / "worker.out"
    path.write_text('{"step": 1}\n{"st')
    lines = Lines(path)
    assert lines.new() == [{"step": 1}]
    assert lines.new() == []
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert lines.new() == [{"step": 2}]


@pytest.mark.parametrize(
    ("consistency", "quorum", "loss", "counting"),
    [
        ("sync", None, "wait", Counting.ALL),
        ("sync", 3, "wait", Counting.ROUNDS),
        ("sync", None, "shrink", Counting.ROUNDS),
        ("async", None, "wait", Counting.PUSHES),
        ("ssp", None, "wait", Counting.PUSHES),
    ],
)
def test_what_is_checked_follows_from_the_mode(consistency, quorum, loss, counting):
    assert counting_of(consistency, quorum, loss) is counting
