"""Who is waited for under each policy, with made-up events at made-up times."""

import pytest

from protocol.messages import Role, Status
from ps.coordination import attendance, course_state, waits
from ps.coordination.instructions import CloseRound, Drop, Finish, SkipRound, Take
from ps.coordination.policy import Consistency, Phase
from ps.monitoring import status
from tests.unit.course import POLICY, Client, Run, replies, running, texts

SHRINK = {"shrink": True}
ASYNC = {"consistency": Consistency.ASYNC, "shrink": True}
SSP = {"consistency": Consistency.SSP, "shrink": True}


def ranks_of(told):
    return [[c.rank for c in closing.contributions] for closing in told if isinstance(closing, CloseRound)]


def clocks(run):
    return [run.coordinator.registry.members[rank].clock for rank in range(run.policy.workers)]


# ---- sync, shrink --------------------------------------------------------------------------------------


def test_shrink_closes_with_the_rest_as_soon_as_a_rank_is_lost():
    run, zero, one, two = running(workers=3, **SHRINK)
    run.push(zero), run.push(one)
    told = run.lose(two)
    assert ranks_of(told) == [[0, 1]] and len(replies(told)) == 2
    assert "rounds close without it until it returns" in texts(told)
    assert run.coordinator.short_rounds == run.coordinator.left_out_rounds == 1


def test_what_a_lost_rank_had_pushed_counts_in_its_round_under_shrink():
    run, zero, one = running(**SHRINK)
    run.push(zero)
    run.lose(zero)
    assert ranks_of(run.push(one)[1]) == [[0, 1]]
    assert ranks_of(run.push(one)[1]) == [[1]]


def test_a_newcomer_gets_values_of_the_round_that_counts_on_it():
    run, zero, one, two = running(workers=3, steps=9, **SHRINK)
    run.lose(two)
    run.push(zero)
    again = Client(2)
    run.join(again)
    assert not replies(run.pull(again)), "round 0 goes on without it"
    told = run.push(one)[1]
    assert ranks_of(told) == [[0, 1]] and {r.session for r in replies(told)} >= {again.session}
    run.push(zero), run.push(one)
    assert run.coordinator.step == 1, "round 1 waits for it"
    assert ranks_of(run.push(again)[1]) == [[0, 1, 2]]


def test_a_process_that_reconnects_in_its_round_still_counts_under_shrink():
    run, zero, one, two = running(workers=3, **SHRINK)
    run.push(zero)
    run.lose(one)
    run.join(one)
    assert isinstance(run.push(one)[0], Take)
    assert ranks_of(run.push(two)[1]) == [[0, 1, 2]]


def test_who_reconnects_when_its_round_has_closed_without_it_gets_the_newest_values():
    run, zero, one = running(**SHRINK)
    run.push(zero)
    run.lose(one)
    run.join(one)
    decided, told = run.push(one, step=0)
    assert isinstance(decided, Drop) and [r.applied for r in replies(told)] == [False]
    assert run.coordinator.late == {1: 1} and not run.coordinator.stale


def test_a_newcomer_to_a_round_without_a_push_takes_part_at_once():
    run, zero, one = running(steps=9, **SHRINK)
    run.lose(one)
    run.push(zero)
    again = Client(1)
    run.join(again)
    assert len(replies(run.pull(again))) == 1
    run.push(zero)
    assert run.coordinator.step == 1
    assert ranks_of(run.push(again)[1]) == [[0, 1]]


def test_a_late_rank_is_left_behind_then_put_on_probation_and_comes_back_with_a_push_in_time():
    run, zero, one = running(steps=9, **SHRINK)
    for number in range(attendance.MAX_LATE_ROUNDS):
        run.push(zero)
        told = run.wait(POLICY.round_timeout_s)
        assert ranks_of(told) == [[0]] and "alive but late, and closes without it" in texts(told)
        assert ("on probation" in texts(told)) == (number == attendance.MAX_LATE_ROUNDS - 1)
    assert ranks_of(run.push(zero)[1]) == [[0]], "nobody waits for a rank on probation"
    decided, told = run.push(one, step=0)
    assert isinstance(decided, Drop) and len(replies(told)) == 1 and run.coordinator.late == {1: 1}
    decided, told = run.push(one)
    assert isinstance(decided, Take) and not ranks_of(told)
    assert ranks_of(run.push(zero)[1]) == [[0, 1]]
    assert not ranks_of(run.push(zero)[1]), "it is waited for again"


def test_late_rounds_count_in_a_row_only():
    run, zero, one = running(steps=20, **SHRINK)
    for _ in range(2 * attendance.MAX_LATE_ROUNDS):
        run.push(zero)
        run.wait(POLICY.round_timeout_s)
        run.push(one)
        run.push(zero)
    assert "on probation" not in texts(run.told)


def test_when_nobody_is_left_somebody_may_return_for_a_while_then_the_run_ends():
    run, zero, one = running(**SHRINK)
    run.lose(zero)
    told = run.lose(one)
    assert "no worker is left: one may return within 20 s" in texts(told)
    run.wait(POLICY.rejoin_timeout_s - 1)
    assert "waits for any worker to return" in run.coordinator.waiting_for(run.now) and run.finish is None
    run.wait(1)
    assert run.finish.status is Status.LOST and "no worker is left since rank 1 (site-1)" in run.finish.reason


def test_the_return_of_one_is_enough_under_shrink():
    run, zero, one = running(**SHRINK)
    run.lose(zero), run.lose(one)
    run.wait(POLICY.rejoin_timeout_s - 1)
    run.join(zero)
    run.wait(POLICY.rejoin_timeout_s)
    assert run.finish is None
    assert ranks_of(run.push(zero)[1]) == [[0]]


def test_the_end_does_not_wait_for_the_goodbye_of_the_lost_under_shrink():
    run, zero, one = running(steps=1, **SHRINK)
    run.lose(one)
    run.push(zero)
    assert run.coordinator.phase is Phase.DRAINING
    run.bye(zero)
    assert run.finish == Finish(Status.DONE, "")


def test_an_elastic_run_starts_with_the_first_and_grows_at_round_boundaries():
    run = Run(workers=4, elastic=True, has_values=True, steps=9, **SHRINK)
    three, zero = Client(3), Client(0)
    run.join(three)
    run.pull(three)
    assert run.coordinator.phase is Phase.RUNNING
    assert ranks_of(run.push(three)[1]) == [[3]] and run.coordinator.left_out_rounds == 0
    run.join(zero)
    run.pull(zero)
    assert not ranks_of(run.push(three)[1])
    assert ranks_of(run.push(zero)[1]) == [[0, 3]]


def test_the_start_of_an_elastic_run_waits_for_one_worker_whichever_it_is():
    run = Run(workers=8, elastic=True, has_values=True, **SHRINK)
    run.wait(5)
    assert run.coordinator.waiting_for(run.now) == "the start waits for a worker since 5 s"
    assert status.waiting(run.coordinator, run.now).ranks == ()
    run.wait(POLICY.start_timeout_s)
    assert run.finish.reason.startswith("a worker did not come within 60 s; ")


def test_the_start_of_an_elastic_run_that_has_a_worker_waits_for_the_validator_only():
    run = Run(workers=8, elastic=True, has_values=True, validators=1, validator_slots=1, **SHRINK)
    assert run.coordinator.waiting_for(run.now) == "the start waits for a worker and a validator"
    run.join(Client(3))
    assert run.coordinator.waiting_for(run.now) == "the start waits for a validator"


def test_a_quorum_shrinks_until_somebody_comes_be_it_anew():
    run = Run(workers=8, elastic=True, has_values=True, quorum=2, steps=9)
    zero, one, two = Client(0), Client(1), Client(2)
    run.join(zero), run.join(one)
    assert "the quorum of 2 shrinks to 1 until another worker comes" in texts(run.bye(one))
    run.pull(zero)
    assert ranks_of(run.push(zero)[1]) == [[0]]
    run.join(two)
    assert not ranks_of(run.push(zero)[1]) and ranks_of(run.push(two)[1]) == [[0, 2]]


def test_one_worker_that_is_left_is_spoken_of_as_one():
    run, _zero, one = running(quorum=2)
    assert "1 worker is left, fewer than the 2 of --quorum: one may return" in texts(run.lose(one))


# ---- quorum --------------------------------------------------------------------------------------------


def test_a_quorum_closes_with_its_number_and_a_late_push_is_answered_with_the_newest_values():
    run, zero, one, two = running(workers=3, quorum=2)
    run.push(zero)
    push, decided = run.begin(two)
    assert isinstance(decided, Take)
    assert ranks_of(run.push(one)[1]) == [[0, 1]]
    told = run.complete(two, push)
    assert [(r.session, r.seq, r.applied) for r in replies(told)] == [(two.session, 1, False)]
    assert run.coordinator.late == {2: 1} and run.coordinator.pushes == {0: 1, 1: 1}
    decided, told = run.push(two, step=0)
    assert isinstance(decided, Drop) and len(replies(told)) == 1 and run.coordinator.late == {2: 2}


def test_a_quorum_needs_usable_pushes_and_closes_short_once_all_have_reported():
    run, zero, one, two = running(workers=3, quorum=2)
    run.push(zero, bad_variable="w"), run.push(one)
    assert run.coordinator.step == 0
    assert ranks_of(run.push(two)[1]) == [[0, 1, 2]]
    run.push(zero, bad_variable="w"), run.push(one, bad_variable="w")
    assert ranks_of(run.push(two)[1]) == [[0, 1, 2]] and run.coordinator.step == 2


def test_a_quorum_does_not_care_for_a_loss_while_enough_remain():
    run, zero, one, two = running(workers=3, steps=9, quorum=2)
    run.lose(two)
    run.wait(10 * POLICY.rejoin_timeout_s)
    assert run.finish is None
    run.push(zero)
    assert ranks_of(run.push(one)[1]) == [[0, 1]]


def test_below_a_quorum_the_run_waits_for_a_return_and_then_ends():
    run, zero, one, two = running(workers=3, steps=9, quorum=2)
    run.lose(two)
    run.wait(5)
    run.push(zero)
    assert "fewer than the 2 of --quorum" in texts(run.lose(one))
    assert run.coordinator.step == 0
    run.wait(POLICY.rejoin_timeout_s - 1)
    assert run.finish is None
    run.wait(1)
    assert run.finish.status is Status.LOST and "rank 1 (site-1)" in run.finish.reason


def test_below_a_quorum_shrink_goes_on_with_the_rest():
    run, zero, one, two = running(workers=3, steps=9, quorum=2, **SHRINK)
    run.lose(two)
    run.push(zero)
    assert ranks_of(run.lose(one)) == [[0]]


def test_a_quorum_shrinks_with_those_who_have_left_on_purpose():
    run, zero, one, two = running(workers=3, steps=9, quorum=3)
    assert "the quorum of 3 shrinks to 2" in texts(run.bye(two))
    run.push(zero)
    assert ranks_of(run.push(one)[1]) == [[0, 1]]


# ---- async ---------------------------------------------------------------------------------------------


def test_each_push_is_applied_at_once_and_answered_alone():
    run, zero, one = running(steps=9, **ASYNC)
    for step in range(3):
        told = run.push(zero)[1]
        assert ranks_of(told) == [[0]] and [r.session for r in replies(told)] == [zero.session]
        assert run.coordinator.step == step + 1
    told = run.push(one, step=0)[1]
    (closing,) = [t for t in told if isinstance(t, CloseRound)]
    assert closing.contributions[0].staleness == 3 and closing.step == 3


def test_a_push_above_the_largest_staleness_is_refused_with_the_reason_and_counted():
    run, zero, one = running(steps=9, max_staleness=1, **ASYNC)
    run.push(zero), run.push(zero)
    decided, told = run.push(one, step=0)
    assert isinstance(decided, Drop)
    assert [r.reason for r in replies(told)] == ["its values are 2 steps old, above --max-staleness 1"]
    assert run.coordinator.stale == {1: 1} and run.coordinator.step == 2
    assert isinstance(run.push(one, step=1)[0], Take)


def test_a_push_that_grows_too_old_while_it_arrives_is_refused_too():
    run, zero, one = running(steps=9, max_staleness=1, **ASYNC)
    push, decided = run.begin(one)
    assert isinstance(decided, Take)
    run.push(zero), run.push(zero)
    told = run.complete(one, push)
    assert [r.applied for r in replies(told)] == [False] and run.coordinator.step == 2


def test_a_push_that_is_ahead_of_the_server_is_dropped():
    run, zero, _ = running(steps=9, **ASYNC)
    decided, told = run.push(zero, step=4)
    assert isinstance(decided, Drop) and "has not reached" in replies(told)[0].reason


def test_a_refused_push_takes_no_step_and_ten_in_a_row_end_the_run():
    run, zero, one = running(steps=30, **ASYNC)
    for _ in range(9):
        told = run.push(zero, bad_variable="w")[1]
        assert len(replies(told)) == 1 and run.coordinator.step == 0
    run.push(one)
    for _ in range(9):
        run.push(zero, bad_variable="w")
    assert run.finish is None and not run.of(SkipRound)
    run.push(zero, bad_variable="w")
    assert run.finish.status is Status.DIVERGED and "10 pushes in a row" in run.finish.reason


def test_nobody_waits_for_a_lost_rank_and_the_last_step_ends_the_run():
    run, zero, one = running(steps=2, **ASYNC)
    run.lose(one)
    run.push(zero)
    run.push(zero)
    assert run.coordinator.phase is Phase.DRAINING
    run.bye(zero)
    assert run.finish == Finish(Status.DONE, "")


def test_a_repeated_push_is_applied_once():
    run, zero, _ = running(steps=9, **ASYNC)
    run.push(zero)
    run.lose(zero)
    run.join(zero)
    decided, told = run.push(zero, step=0, seq=1)
    assert isinstance(decided, Drop) and [r.applied for r in replies(told)] == [True]
    assert run.coordinator.step == 1 and run.coordinator.duplicates == {0: 1}


# ---- ssp -----------------------------------------------------------------------------------------------


def test_who_returns_when_all_were_lost_begins_within_the_bound_of_the_fastest():
    run, zero, one = running(steps=99, ssp_bound=2, **SSP)
    run.lose(one)
    for _ in range(5):
        run.push(zero)
    run.lose(zero)
    members = run.coordinator.registry.members
    run.join(one)
    assert members[1].clock == 5 - 2
    run.join(zero)
    assert members[0].clock == 5


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_a_rank_is_never_further_ahead_than_the_bound(bound):
    run, zero, one = running(steps=99, ssp_bound=bound, **SSP)
    for number in range(bound):
        told = run.push(zero)[1]
        assert len(replies(told)) == (number < bound - 1)
    assert clocks(run) == [bound, 0]
    run.wait(3)
    assert "rank 1 may not fall further behind; the others wait since 3 s" in run.coordinator.waiting_for(run.now)
    told = run.push(one)[1]
    assert {r.session for r in replies(told)} == {zero.session, one.session} if bound > 1 else replies(told)
    assert clocks(run) == [bound, 1]


def test_a_lost_rank_leaves_the_minimum_and_returns_at_the_slowest_ones_count():
    run, zero, one, two = running(workers=3, steps=99, ssp_bound=2, **SSP)
    run.push(zero), run.push(one)
    assert not replies(run.push(zero)[1])
    told = run.lose(two)
    assert [r.session for r in replies(told)] == [zero.session]
    run.push(zero), run.push(one)
    run.join(two)
    assert clocks(run) == [3, 2, 2]


def test_a_slow_rank_holds_the_others_for_the_round_timeout_and_is_waited_for_again_after_its_push():
    run, zero, one = running(steps=99, ssp_bound=1, **SSP)
    run.push(zero)
    assert run.wait(POLICY.round_timeout_s - 1) == []
    told = run.wait(1)
    assert "rank 1 (site-1) is alive and has held the others" in texts(told)
    assert [r.session for r in replies(told)] == [zero.session]
    for _ in range(3):
        assert len(replies(run.push(zero)[1])) == 1
    run.push(one, step=0)
    assert clocks(run) == [4, 5], "it came on from the slowest of the others"
    assert not run.coordinator.registry.members[1].on_probation


def test_a_push_that_is_dropped_and_breaks_off_changes_nothing_and_those_it_held_are_answered_at_its_loss():
    run, zero, one = running(steps=99, ssp_bound=1, max_staleness=0, **SSP)
    assert not replies(run.push(zero)[1]), "it waits for rank 1"
    _, verdict = run.begin(one, step=0)
    assert isinstance(verdict, Drop) and clocks(run) == [1, 0] and not run.coordinator.stale
    told = run.lose(one)
    assert [r.session for r in replies(told)] == [zero.session]


def test_a_dropped_push_lets_those_go_on_that_waited_for_it_once_it_has_been_read():
    run, zero, one = running(steps=99, ssp_bound=1, max_staleness=0, **SSP)
    run.push(zero)
    push, verdict = run.begin(one, step=0)
    told = run.drop(one, push, verdict)
    assert {r.session for r in replies(told)} == {zero.session, one.session}
    assert clocks(run) == [1, 1] and run.coordinator.stale == {1: 1} and run.coordinator.held_since is None


def test_a_refused_push_moves_its_clock():
    run, zero, one = running(steps=99, ssp_bound=1, **SSP)
    run.push(zero)
    told = run.push(one, bad_variable="w")[1]
    assert {r.session for r in replies(told)} == {zero.session, one.session} and clocks(run) == [1, 1]


# ---- every wait ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [{}, SHRINK, {"quorum": 1}, ASYNC, SSP])
def test_a_run_to_which_nobody_pushes_ends(policy):
    run, _, _ = running(idle_timeout_s=500, **policy)
    run.wait(499)
    assert run.finish is None
    run.wait(1)
    assert run.finish.status is Status.NO_PROGRESS and "no push has come for 500 s" in run.finish.reason


@pytest.mark.parametrize("policy", [{}, SHRINK, {"quorum": 1}, ASYNC, SSP])
def test_when_all_are_lost_the_time_to_return_counts_and_not_the_idle_one(policy):
    run, zero, one = running(idle_timeout_s=15, **policy)
    run.lose(zero), run.lose(one)
    run.wait(16)
    assert run.finish is None, "they may return within 20 s"
    run.join(zero), run.join(one)
    run.wait(14)
    assert run.finish is None, "who has just returned is not idle yet"
    run.wait(1)
    assert run.finish.status is Status.NO_PROGRESS and "ranks 0 and 1 are connected" in run.finish.reason


def test_a_rank_that_waits_for_one_that_is_lost_is_not_idle():
    run, zero, one = running(idle_timeout_s=15)
    run.push(zero)
    run.lose(one)
    run.wait(POLICY.rejoin_timeout_s - 1)
    assert run.finish is None
    run.wait(1)
    assert run.finish.status is Status.LOST and "rank 1" in run.finish.reason


def test_only_those_are_called_idle_that_have_not_pushed():
    run, zero, _one = running(idle_timeout_s=15)
    run.push(zero)
    run.wait(15)
    assert run.finish == Finish(
        Status.NO_PROGRESS,
        "no push has come for 15 s at step 0, though rank 1 is connected; look at what it does, "
        "or allow more with --idle-timeout",
    )


def test_an_idle_run_without_anybody_has_a_sentence_too():
    run, zero, one = running()
    run.lose(zero), run.lose(one)
    assert "and nobody is connected who could; start workers" in waits.idle(run.coordinator)


def test_a_rank_on_probation_that_pushes_nothing_is_idle():
    run, zero, _one = running(steps=9, idle_timeout_s=100, **SHRINK)
    for _ in range(attendance.MAX_LATE_ROUNDS):
        run.push(zero)
        run.wait(POLICY.round_timeout_s)
    run.lose(zero)
    run.wait(100)
    assert "though rank 1 is connected" in run.finish.reason


# ---- a restart -----------------------------------------------------------------------------------------


def restarted(run, **changes):
    state = course_state.state_of(run.coordinator)
    again = Run(run.policy, **changes)
    course_state.restore(again.coordinator, state)
    return again


def test_a_run_goes_on_at_its_step_when_all_are_back():
    run, zero, one = running(steps=5)
    run.push(zero), run.push(one), run.push(zero, bad_variable="w"), run.push(one)
    again = restarted(run)
    zero, one = Client(0), Client(1)
    again.join(zero)
    again.pull(zero)
    assert again.coordinator.phase is Phase.GATHERING and "rank 1" in again.coordinator.waiting_for(again.now)
    again.join(one)
    assert (again.coordinator.phase, again.coordinator.step) == (Phase.RUNNING, 2)
    assert again.coordinator.pushes == {0: 2, 1: 2} and again.coordinator.rejected == {0: 1}
    again.push(zero)
    assert ranks_of(again.push(one)[1]) == [[0, 1]] and again.coordinator.step == 3


def test_a_push_of_the_old_server_is_dropped_and_answered():
    run, zero, one = running(steps=5)
    again = restarted(run)
    zero, one = Client(0), Client(1)
    again.join(zero), again.join(one)
    decided, told = again.push(zero, epoch=1)
    assert isinstance(decided, Drop) and len(replies(told)) == 1
    assert "before the server started anew" in replies(told)[0].reason


def test_who_has_left_is_not_waited_for_after_a_restart():
    run, _zero, one = running(steps=5)
    run.bye(one)
    again = restarted(run)
    again.join(Client(0))
    assert again.coordinator.phase is Phase.RUNNING


def test_after_a_restart_those_who_were_left_out_are_waited_for_but_not_for_ever():
    run, zero, _one = running(steps=5, **SHRINK)
    again = restarted(run)
    zero = Client(0)
    again.join(zero)
    again.wait(POLICY.rejoin_timeout_s - 1)
    assert again.coordinator.phase is Phase.GATHERING
    told = again.wait(1)
    assert again.coordinator.phase is Phase.RUNNING and "the run begins with rank 0" in texts(told)
    assert ranks_of(again.push(zero)[1]) == [[0]]


def resumed_with_a_rank_that_never_comes(**policy):
    """A run of two that goes on as one of three, of whom the first two come."""
    run, _zero, _one = running(steps=9, **policy)
    state = course_state.state_of(run.coordinator)
    again = Run(run.policy, workers=3)
    course_state.restore(again.coordinator, state, 1)
    zero, one = Client(0), Client(1)
    again.join(zero), again.join(one)
    assert again.coordinator.phase is Phase.GATHERING, "there may come three"
    again.wait(POLICY.rejoin_timeout_s)
    again.pull(zero), again.pull(one)
    assert again.coordinator.phase is Phase.RUNNING
    return again, zero, one


def test_a_quorum_goes_on_without_a_rank_that_never_came_and_waits_for_others_by_name():
    run, zero, one = resumed_with_a_rank_that_never_comes(quorum=2)
    run.push(zero)
    run.lose(one)
    run.wait(1)
    assert "round 0 waits for rank 1 " in run.coordinator.waiting_for(run.now)
    run.wait(POLICY.rejoin_timeout_s - 2)
    assert run.finish is None
    run.join(one)
    assert ranks_of(run.push(one)[1]) == [[0, 1]] and run.coordinator.short_rounds == 1
    two = Client(2)
    run.join(two)
    run.push(zero)
    assert ranks_of(run.push(two)[1]) == [[0, 2]], "it may still come"


@pytest.mark.parametrize("policy", [SHRINK, {"quorum": 1}, ASYNC, SSP])
def test_a_run_whose_workers_are_all_lost_ends_although_one_never_came(policy):
    run, zero, one = resumed_with_a_rank_that_never_comes(**policy)
    run.lose(zero)
    run.wait(1)
    run.lose(one)
    run.wait(POLICY.rejoin_timeout_s - 1)
    assert run.finish is None
    run.wait(1)
    assert run.finish.status is Status.LOST
    assert run.finish.reason.startswith("no worker is left since rank 1 (site-1) was lost")


@pytest.mark.parametrize("policy", [SHRINK, {"quorum": 2}, ASYNC])
def test_a_run_ends_when_all_have_left_who_ever_came(policy):
    run, zero, one = resumed_with_a_rank_that_never_comes(**policy)
    run.bye(zero)
    run.bye(one)
    assert run.finish == Finish(Status.NO_PROGRESS, "all workers have left at step 0 of 9")


def test_a_run_restored_at_its_end_gives_the_final_values_to_all():
    run, zero, one = running(steps=1)
    run.push(zero), run.push(one)
    again = restarted(run)
    zero, one = Client(0), Client(1)
    again.join(zero)
    again.join(one)
    assert again.coordinator.phase is Phase.DRAINING
    assert len(replies(again.pull(zero))) == 1 and len(replies(again.pull(one))) == 1
    again.bye(zero), again.bye(one)
    assert again.finish == Finish(Status.DONE, "")


@pytest.mark.parametrize("policy", [{}, SHRINK, {"quorum": 2}, ASYNC])
def test_a_run_restored_at_its_end_waits_but_a_while_for_those_who_may_not_have_heard_of_it(policy):
    """Its server died when it had kept the last step: workers may have their values, and have gone."""
    run, zero, one = running(steps=1, **policy)
    run.push(zero), run.push(one)
    again = restarted(run)
    again.wait(0)
    assert again.coordinator.phase is Phase.DRAINING
    assert (
        again.coordinator.waiting_for(again.now + 5) == "the end waits for the goodbye of ranks 0 and 1 since 5 s"
    )
    zero = Client(0)
    again.join(zero)
    assert len(replies(again.pull(zero))) == 1
    again.bye(zero)
    again.wait(again.policy.rejoin_timeout_s - 0.1)
    assert again.finish is None
    again.wait(0.1)
    assert again.finish == Finish(Status.DONE, "")


def test_a_goodbye_after_the_last_step_is_no_reason_not_to_be_waited_for_when_the_run_goes_on():
    run, zero, one = running(steps=1)
    run.push(zero), run.push(one)
    run.bye(zero), run.bye(one)
    again = restarted(run)
    again.join(Client(1))
    assert again.coordinator.phase is Phase.GATHERING and again.coordinator.registry.missing() == [0]


def test_a_run_that_all_have_left_goes_on_with_the_first_who_comes():
    run, zero, one = running(steps=5)
    run.bye(zero), run.bye(one)
    again = restarted(run)
    again.wait(1)
    assert again.coordinator.phase is Phase.GATHERING
    again.join(Client(1))
    assert again.coordinator.phase is Phase.RUNNING


def test_threads_and_names_outlive_a_restart():
    run, _zero, _one = running(steps=5)
    run.coordinator.registry.members[1].threads = 3
    again = restarted(run)
    member = again.coordinator.registry.member(Role.WORKER, 1)
    assert (member.name, member.threads) == ("site-1", 3)
