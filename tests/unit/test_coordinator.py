"""The coordinator driven by made-up events at made-up times: no socket, no thread, no clock."""

import itertools

import pytest

from protocol.messages import Push, Role, Status
from ps.coordination.course import MAX_VOID_ROUNDS
from ps.coordination.instructions import Announce, AskInitial, CloseRound, Drop, Finish, Reply, SkipRound, Take
from ps.coordination.policy import Phase
from ps.coordination.rounds import may_close
from tests.unit.course import EPOCH, NAN, POLICY, Client, Run, replies, running, texts

NOBODY: frozenset[int] = frozenset()

# ---- the start -----------------------------------------------------------------------------------------


def test_the_start_waits_for_all_ranks_and_then_asks_the_lowest_for_initial_values():
    run, zero, one = Run(), Client(0), Client(1)
    run.join(one)
    run.pull(one)
    assert run.coordinator.phase is Phase.GATHERING and not run.of(AskInitial) and not run.of(Reply)
    run.join(zero)
    assert run.of(AskInitial) == [AskInitial(zero.session)]
    assert not run.coordinator.may_initialise(one.session)
    assert replies(run.give_initial(zero)) == [Reply(one.session, 0, False)]
    assert replies(run.pull(zero)) == [Reply(zero.session, 0, False)]


def test_when_the_rank_that_was_asked_is_lost_the_next_one_is_asked():
    run, zero, one = Run(), Client(0), Client(1)
    run.join(zero), run.join(one)
    asked_first = zero.session
    assert AskInitial(one.session) in run.lose(zero)
    assert not run.coordinator.may_initialise(asked_first)
    run.give_initial(one)
    assert run.coordinator.phase is Phase.RUNNING


def test_when_all_are_lost_before_there_are_values_the_first_to_return_is_asked():
    run, zero, one = Run(), Client(0), Client(1)
    run.join(zero), run.join(one)
    run.lose(zero), run.lose(one)
    run.join(one)
    assert run.pull(one) == [AskInitial(one.session)]


def test_with_values_from_a_file_nobody_is_asked():
    run = Run(has_values=True)
    run.start(Client(0), Client(1))
    assert not run.of(AskInitial) and len(run.of(Reply)) == 2


def test_initial_values_that_cannot_be_used_end_the_run_naming_who_sent_them():
    run, zero, one = Run(), Client(0), Client(1)
    run.join(zero), run.join(one)
    run.give_initial(zero, "variable 'w' has a value that is NaN or infinite")
    assert run.finish.status is Status.DIVERGED
    assert "rank 0 (site-0)" in run.finish.reason and "'w'" in run.finish.reason


def test_the_start_timeout_names_the_ranks_that_are_missing():
    run = Run(workers=4)
    run.join(Client(1))
    run.wait(POLICY.start_timeout_s - 1)
    assert run.finish is None
    run.wait(1)
    assert run.finish is not None
    assert run.finish.status is Status.NO_PROGRESS
    assert run.finish.reason.startswith("ranks 0, 2 and 3 did not come within 60 s; ")


def test_a_rank_that_leaves_before_the_start_is_waited_for_again():
    run, zero, one = Run(), Client(0), Client(1)
    run.join(zero)
    assert "waiting for it" in texts(run.bye(zero))
    run.join(one)
    assert run.coordinator.phase is Phase.GATHERING
    run.join(Client(0))
    assert run.coordinator.phase is Phase.INITIALISING


def test_nobody_who_sends_initial_values_is_named_when_time_is_over():
    run, zero, one = Run(), Client(0), Client(1)
    run.join(zero), run.join(one)
    run.wait(POLICY.round_timeout_s)
    assert run.finish == Finish(Status.NO_PROGRESS, "rank 0 (site-0) sent no initial values within 30 s")


def test_a_push_before_the_first_values_is_answered_when_they_are_there_and_not_before():
    run, zero, one = Run(), Client(0), Client(1)
    run.join(zero)
    decided, told = run.push(zero, step=0)
    assert isinstance(decided, Drop) and not replies(told)
    _, told = run.push(zero, step=5, epoch=EPOCH - 1)
    assert not replies(told)
    run.join(one)
    (reply,) = replies(run.give_initial(zero))
    assert (reply.session, reply.seq, reply.applied) == (zero.session, 2, False)
    assert run.coordinator.step == 0 and run.coordinator.stale == {0: 2}


# ---- rounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_round_closes_in_rank_order_whatever_the_order_of_arrival(order):
    run, *clients = running(workers=3)
    for rank in order[:-1]:
        _, told = run.push(clients[rank])
        assert told == []
    _, told = run.push(clients[order[-1]])
    closed = told[0]
    assert isinstance(closed, CloseRound) and closed.step == 0
    assert [c.rank for c in closed.contributions] == [0, 1, 2]
    assert {(r.session, r.seq, r.applied) for r in replies(told)} == {(c.session, 1, True) for c in clients}
    assert told.index(closed) < min(told.index(r) for r in replies(told))
    assert run.coordinator.step == 1


@pytest.mark.parametrize(
    ("present", "refused", "awaited", "judges", "quorum", "may"),
    [
        ({0, 1}, {}, {0, 1}, {}, None, True),
        ({0, 1}, {}, {1}, {}, None, True),  # who was lost after its push
        ({0}, {}, {0, 1}, {}, None, False),
        ({}, {}, {}, {}, None, False),
        ({0, 1}, {}, {0, 1}, {2}, None, False),
        ({0, 1}, {1}, {0, 1}, {}, None, True),
        ({0, 1}, {}, {0, 1, 2}, {}, 2, True),
        ({0, 1}, {1}, {0, 1, 2}, {}, 2, False),  # a quorum needs usable pushes
        ({0, 1, 2}, {1, 2}, {0, 1, 2}, {}, 2, True),  # all have reported: there will be no more
        ({0, 1}, {}, {0, 1, 2}, {5}, 2, False),
    ],
)
def test_when_a_round_may_close(present, refused, awaited, judges, quorum, may):
    sets = [frozenset(part) for part in (present, refused, awaited, judges)]
    assert may_close(*sets, quorum) is may


def test_the_whole_run_ends_with_the_last_step_and_both_goodbyes():
    run, zero, one = running(steps=2)
    for step in range(2):
        for client in (zero, one):
            run.push(client, step=step)
    assert run.coordinator.phase is Phase.DRAINING
    run.bye(zero)
    assert run.finish is None
    run.bye(one)
    assert run.finish == Finish(Status.DONE, "")
    assert [c.step for c in run.of(CloseRound)] == [0, 1]
    assert not run.coordinator.has_left_early


# ---- exactly once --------------------------------------------------------------------------------------


def test_a_repeated_push_in_the_open_round_counts_once_and_is_answered_on_the_new_connection():
    run, zero, one = running()
    run.push(zero)
    run.lose(zero)
    run.join(zero)
    decided, told = run.push(zero, seq=1)
    assert isinstance(decided, Drop) and not replies(told)
    _, told = run.push(one)
    assert [c.rank for c in run.of(CloseRound)[0].contributions] == [0, 1]
    assert Reply(zero.session, 1, True) in told
    assert run.coordinator.duplicates == {0: 1} and run.coordinator.pushes == {0: 1, 1: 1}


def test_a_repeated_push_after_its_round_has_closed_is_answered_from_memory():
    run, zero, one = running()
    run.push(zero), run.push(one)
    run.lose(zero)
    run.join(zero)
    decided, told = run.push(zero, step=0, seq=1)
    assert isinstance(decided, Drop) and told == [Reply(zero.session, 1, True)]
    assert len(run.of(CloseRound)) == 1 and run.coordinator.duplicates == {0: 1}


def test_the_memory_of_a_refused_push_says_why_it_was_refused():
    run, zero, one = running()
    run.push(zero, bad_variable="w"), run.push(one)
    run.lose(zero)
    run.join(zero)
    _, told = run.push(zero, step=0, seq=1)
    assert told == [Reply(zero.session, 1, False, "the gradient of 'w' is not finite")]


def test_a_push_doubled_on_one_connection_counts_once_whether_its_round_is_open_or_closed():
    run, zero, one = running()
    run.push(zero)
    run.push(zero, seq=1)
    _, told = run.push(one)
    assert len([r for r in replies(told) if r.session == zero.session]) == 1
    _, told = run.push(one, step=0, seq=1)
    assert told == [Reply(one.session, 1, True)]
    assert run.coordinator.duplicates == {0: 1, 1: 1} and len(run.of(CloseRound)) == 1


def test_another_incarnation_pushes_the_same_step_and_the_first_push_stands():
    run, zero, one = running()
    run.push(zero, loss=3.0)
    run.lose(zero)
    again = Client(0)
    run.join(again)
    decided, told = run.push(again, loss=4.0)
    assert isinstance(decided, Drop) and not replies(told)
    _, told = run.push(one)
    assert [c.loss for c in run.of(CloseRound)[0].contributions] == [3.0, 1.0]
    (reply,) = [r for r in replies(told) if r.session == again.session]
    assert not reply.applied and reply.reason == "an earlier push of rank 0 (site-0) is in round 0 already"


def test_a_new_incarnation_of_a_rank_in_the_open_round_gets_the_values_of_the_next_step():
    run, zero, one = running()
    run.push(zero)
    run.lose(zero)
    again = Client(0)
    run.join(again)
    assert run.pull(again) == []
    _, told = run.push(one)
    assert Reply(again.session, 0, False) in told and run.coordinator.step == 1
    assert len(run.of(CloseRound)[0].contributions) == 2


def test_a_connection_lost_in_mid_push_leaves_no_trace_and_the_retry_counts():
    run, zero, one = running()
    run.begin(zero)
    run.lose(zero)
    run.join(zero)
    decided, _ = run.push(zero, seq=1)
    assert isinstance(decided, Take)
    run.push(one)
    assert run.coordinator.step == 1 and run.coordinator.duplicates == {}


def test_the_payload_of_a_connection_that_was_replaced_does_not_count():
    run, zero, one = running()
    push, _ = run.begin(zero)
    replaced = zero.session
    run.lose(zero)
    again = Client(0)
    run.join(again)
    assert run.coordinator.push_arrived(replaced, push, 1.0, None, run.now) == []
    run.push(one)
    assert run.coordinator.step == 0
    run.push(again)
    assert [c.seq for c in run.of(CloseRound)[0].contributions] == [1, 1]


def test_a_payload_that_is_told_twice_counts_once():
    run, zero, one = running()
    push, _ = run.begin(zero)
    run.complete(zero, push)
    assert run.complete(zero, push) == []
    assert run.coordinator.pushes == {0: 1}
    run.push(one)
    assert run.complete(zero, push) == [], "not in the next round either"
    assert run.coordinator.pushes == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"epoch": EPOCH - 1}, "the push was computed before the server started anew"),
        ({"epoch": EPOCH - 1, "step": 9}, "the push was computed before the server started anew"),
        ({"step": 0}, "the push is of step 0, the round is 1"),
        ({"step": 2}, "the push is of step 2, the round is 1"),
    ],
)
def test_a_push_of_another_epoch_or_step_is_dropped_and_answered_with_current_values(header, reason):
    run, zero, one = running()
    run.push(zero), run.push(one)
    decided, told = run.push(zero, **header)
    assert isinstance(decided, Drop) and told == [Reply(zero.session, 2, False, reason)]
    assert run.coordinator.stale == {0: 1}
    run.push(one)
    assert run.coordinator.step == 1, "the dropped push is not in the round"
    assert isinstance(run.push(zero)[0], Take)
    assert run.coordinator.step == 2


def test_a_late_copy_of_an_old_epochs_push_does_not_reopen_numbers_that_were_used():
    run, zero, one = running(steps=9)
    for _ in range(2):
        run.push(zero), run.push(one)
    run.push(zero, epoch=EPOCH - 1, seq=1)
    decided, told = run.push(zero, step=1, seq=2)
    assert isinstance(decided, Drop) and told == [Reply(zero.session, 2, True)]
    assert run.coordinator.duplicates == {0: 1}


def test_a_stale_push_of_a_rank_in_the_open_round_is_answered_when_it_has_closed():
    run, zero, one = running()
    run.push(zero)
    _, told = run.push(zero, epoch=EPOCH - 1)
    assert told == []
    _, told = run.push(one)
    (reply,) = [r for r in replies(told) if r.session == zero.session]
    assert (reply.seq, reply.applied) == (2, False)


def test_an_evaluators_push_and_one_of_an_unknown_connection_are_dropped():
    run, zero, _ = running()
    evaluator = Client(-1, Role.EVALUATOR)
    run.join(evaluator)
    decided, told = run.push(evaluator)
    assert isinstance(decided, Drop) and told == []
    push = Push(EPOCH, 0, 1, None, None, 1)
    verdict = run.coordinator.push_begins(999, push)
    assert isinstance(verdict, Drop) and run.coordinator.dropped(999, push, verdict, run.now) == []
    assert run.coordinator.stale == {}
    assert run.coordinator.pushes == {}
    run.push(zero)


# ---- refused pushes and void rounds ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("push", "reason"),
    [
        ({"bad_variable": "dense/kernel"}, "the gradient of 'dense/kernel' is not finite"),
        ({"loss": NAN}, "the loss is nan"),
        ({"loss": float("-inf")}, "the loss is -inf"),
        ({"examples": 0}, "its batch has no examples"),
    ],
)
def test_a_push_that_cannot_be_used_is_present_with_weight_0_and_named(push, reason):
    run, zero, one = running()
    _, told = run.push(one, **push)
    assert told == [Announce(f"rank 1 (site-1): push of step 0 refused: {reason}", warning=True)]
    _, told = run.push(zero)
    (closed,) = run.of(CloseRound)
    assert [(c.rank, c.refused) for c in closed.contributions] == [(0, ""), (1, reason)]
    assert Reply(one.session, 1, False, reason) in told and Reply(zero.session, 1, True) in told
    assert run.coordinator.rejected == {1: 1} and run.coordinator.short_rounds == 1
    assert run.coordinator.void_rounds == 0


def test_a_push_without_a_loss_counts():
    run, zero, one = running()
    run.push(zero, loss=None), run.push(one, loss=None)
    assert [c.refused for c in run.of(CloseRound)[0].contributions] == ["", ""]


def test_a_round_with_nothing_to_apply_is_void_and_the_step_goes_on():
    run, zero, one = running()
    run.push(zero, loss=NAN)
    _, told = run.push(one, bad_variable="w")
    assert isinstance(next(t for t in told if not isinstance(t, Announce)), SkipRound)
    assert not run.of(CloseRound) and run.coordinator.step == 1 and run.coordinator.void_rounds == 1
    assert len(replies(told)) == 2 and not any(r.applied for r in replies(told))
    assert run.coordinator.short_rounds == 0


def test_ten_void_rounds_in_a_row_end_the_run_as_diverged():
    run, zero, one = running(steps=100)
    for _ in range(MAX_VOID_ROUNDS - 1):
        run.push(zero, loss=NAN), run.push(one, bad_variable="w")
    run.push(zero), run.push(one, loss=NAN)  # one usable push begins the count anew
    for number in range(MAX_VOID_ROUNDS):
        assert run.finish is None, number
        run.push(zero, loss=NAN), run.push(one, bad_variable="w")
    assert run.finish.status is Status.DIVERGED
    assert run.finish.reason == (
        "10 rounds in a row had nothing to apply (rank 0: the loss is nan; "
        "rank 1: the gradient of 'w' is not finite)"
    )
    assert run.coordinator.void_rounds == 2 * MAX_VOID_ROUNDS - 1


def test_the_reason_of_a_diverged_run_stays_short_however_many_workers_there_are():
    run, *clients = running(workers=100, steps=100)
    for _ in range(MAX_VOID_ROUNDS):
        for rank, client in enumerate(clients):
            run.push(client, bad_variable=f"{rank:0500}")
    assert run.finish.status is Status.DIVERGED and len(run.finish.reason) < 3000


# ---- lost, late, returned ------------------------------------------------------------------------------


def test_a_rounds_lost_worker_is_waited_for_and_its_return_closes_the_round():
    run, zero, one = running()
    assert "may return within 20 s" in texts(run.lose(one))
    run.push(zero)
    run.wait(POLICY.rejoin_timeout_s - 1)
    assert run.finish is None and run.coordinator.step == 0
    again = Client(1)
    assert "has returned" in texts(run.join(again))
    run.pull(again)
    run.wait(2)
    run.push(again)
    assert run.coordinator.step == 1 and run.finish is None
    assert not run.coordinator.has_left_early and run.coordinator.short_rounds == 0


def test_a_worker_that_does_not_return_in_time_ends_the_run_and_is_named():
    run, _, one = running()
    run.lose(one, "nothing was heard of 10.0.0.2:4711 for 30 s")
    run.wait(POLICY.rejoin_timeout_s)
    assert run.finish.status is Status.LOST
    assert run.finish.reason == (
        "rank 1 (site-1) was lost at step 0 (nothing was heard of 10.0.0.2:4711 for 30 s) "
        "and has not returned within 20 s"
    )


def test_a_worker_lost_after_its_push_still_has_its_deadline():
    run, zero, one = running()
    run.push(one)
    run.lose(one)
    run.push(zero)
    assert run.coordinator.step == 1
    run.wait(POLICY.rejoin_timeout_s)
    assert run.finish.status is Status.LOST and "rank 1" in run.finish.reason


def test_a_late_worker_ends_the_run_a_round_timeout_after_the_rounds_first_push():
    run, zero, one, two = running(workers=3)
    run.wait(10 * POLICY.round_timeout_s)
    assert run.finish is None, "a round that nobody has pushed to may take as long as it likes"
    run.push(one)
    run.wait(POLICY.round_timeout_s - 1)
    run.push(zero)
    assert run.finish is None
    run.wait(1)
    assert run.finish == Finish(Status.NO_PROGRESS, "round 0 waited 30 s for rank 2, alive but late")
    assert two.session is not None


def test_every_round_has_its_own_timeout():
    run, zero, one = running(steps=9)
    for _ in range(3):
        run.push(zero)
        run.wait(POLICY.round_timeout_s - 1)
        run.push(one)
    assert run.finish is None and run.coordinator.step == 3


def test_a_lost_worker_is_not_called_late():
    run, zero, one = running(rejoin_timeout_s=100)
    run.push(zero)
    run.lose(one)
    run.wait(POLICY.round_timeout_s)
    assert run.finish is None, "it is lost, and may return within 100 s"
    run.join(one)
    run.wait(POLICY.round_timeout_s - 1)
    assert run.finish is None, "its time begins with its return"
    run.wait(1)
    assert run.finish.status is Status.NO_PROGRESS


def test_two_lost_workers_have_a_deadline_each():
    run, zero, one = running()
    run.lose(zero)
    run.wait(15)
    run.lose(one)
    run.wait(3)
    run.join(zero)
    run.wait(4)
    assert run.finish is None
    run.wait(13)
    assert run.finish.status is Status.LOST and run.finish.reason.startswith("rank 1 ")


def test_a_worker_that_returns_and_is_lost_again_has_one_deadline_in_a_round():
    """One that crashes again and again cannot hold a round for ever."""
    run, zero, one = running()
    run.push(zero)
    assert "may return within 20 s" in texts(run.lose(one))
    for _ in range(2):
        run.wait(3)
        run.join(one)
        run.wait(6)
        run.lose(one, "it crashed")
    assert texts(run.told).endswith(
        "rank 1 (site-1) is lost for the third time in round 0: it crashed; it may return within 2 s"
    )
    run.wait(1)
    assert run.finish is None
    run.wait(1)
    assert run.finish.status is Status.LOST
    assert run.finish.reason == (
        "rank 1 (site-1) was lost 3 times in round 0 (at last: it crashed) and has not pushed within 20 s of the "
        "first; look at its log"
    )


def test_a_push_or_a_new_round_gives_a_rank_its_whole_time_again():
    run, zero, one = running(steps=9)
    run.lose(one)
    run.wait(15)
    run.join(one)
    run.push(one)
    run.wait(4)
    assert "may return within 20 s" in texts(run.lose(one)[-1:])
    run.wait(15)
    run.join(one)
    run.push(zero)
    assert run.coordinator.step == 1
    run.wait(4)
    assert "may return within 20 s" in texts(run.lose(one)[-1:])
    run.wait(POLICY.rejoin_timeout_s - 1)
    assert run.finish is None
    run.wait(1)
    assert run.finish.status is Status.LOST


# ---- leaving on purpose --------------------------------------------------------------------------------


def test_rounds_close_without_a_worker_that_has_left_on_purpose():
    run, zero, one = running(steps=9)
    run.push(zero)
    told = run.bye(one)
    assert "has left" in texts(told) and [c.step for c in run.of(CloseRound)] == [0]
    run.push(zero)
    assert [len(c.contributions) for c in run.of(CloseRound)] == [1, 1]
    assert run.coordinator.has_left_early and run.coordinator.short_rounds == 2
    run.wait(1000)
    assert run.finish is None, "it is neither lost nor late"


def test_a_push_counts_although_its_worker_has_left_since():
    run, zero, one = running()
    run.push(one)
    run.bye(one)
    run.push(zero)
    assert [c.rank for c in run.of(CloseRound)[0].contributions] == [0, 1]


def test_100_and_101_batches_do_not_lock_and_the_run_ends_when_all_have_left():
    run, zero, one = running(steps=1000)
    for _ in range(100):
        run.push(zero), run.push(one)
    run.bye(zero)
    run.push(one)
    assert run.coordinator.step == 101
    run.bye(one)
    assert run.finish == Finish(Status.NO_PROGRESS, "all workers have left at step 101 of 1000")


def test_a_worker_that_left_on_purpose_may_return_and_is_waited_for_again():
    run, zero, one = running()
    run.bye(one)
    again = Client(1)
    run.join(again)
    run.pull(again)
    run.push(zero)
    assert run.coordinator.step == 0
    run.push(again)
    assert run.coordinator.step == 1


def test_leaving_while_initial_values_are_awaited_hands_the_question_on():
    run, zero, one = Run(), Client(0), Client(1)
    run.join(zero), run.join(one)
    assert AskInitial(one.session) in run.bye(zero)
    run.give_initial(one)
    run.push(one)
    assert run.coordinator.step == 1
    run, zero = Run(workers=1), Client(0)
    run.join(zero)
    run.bye(zero)
    assert run.finish.status is Status.NO_PROGRESS


# ---- evaluators ----------------------------------------------------------------------------------------


def test_an_evaluator_is_never_waited_for_in_rounds_and_gets_the_step_it_asked_for():
    run, zero, one = running(steps=9)
    evaluator = Client(-1, Role.EVALUATOR)
    run.join(evaluator)
    assert run.pull(evaluator) == [Reply(evaluator.session, 0, False)]
    assert run.pull(evaluator, min_step=2) == []
    run.push(zero), run.push(one)
    run.push(zero)
    _, told = run.push(one)
    assert Reply(evaluator.session, 0, False) in told and run.coordinator.step == 2
    lost = run.lose(evaluator)
    assert texts(lost) == "an evaluator is lost: the connection broke"
    run.wait(1000)
    assert run.finish is None


def test_an_evaluator_does_not_start_a_run_and_is_not_asked_for_initial_values():
    run = Run(workers=1)
    evaluator = Client(-1, Role.EVALUATOR)
    run.join(evaluator)
    run.pull(evaluator)
    assert run.coordinator.phase is Phase.GATHERING
    zero = Client(0)
    run.join(zero)
    assert run.of(AskInitial) == [AskInitial(zero.session)]
    assert Reply(evaluator.session, 0, False) in run.give_initial(zero)


# ---- the drain -----------------------------------------------------------------------------------------


def drained(**changes):
    run, zero, one = running(steps=1, **changes)
    run.push(zero), run.push(one)
    assert run.coordinator.phase is Phase.DRAINING
    run.told.clear()
    return run, zero, one


def test_the_drain_names_who_did_not_say_goodbye_and_is_a_success_all_the_same():
    run, zero, one = drained()
    run.bye(zero)
    run.lose(one)
    run.wait(POLICY.drain_timeout_s - 1)
    assert run.finish is None
    told = run.wait(1)
    assert texts(told) == "rank 1 did not take leave after the last step"
    assert run.finish == Finish(Status.DONE, "")


def test_the_drain_waits_for_the_evaluators_last_report():
    run, zero, one = running(steps=1)
    evaluator = Client(-1, Role.EVALUATOR)
    run.join(evaluator)
    run.pull(evaluator, min_step=50)
    run.push(zero)
    _, told = run.push(one)
    assert Reply(evaluator.session, 0, False) in told, "the last values come before step 50"
    run.bye(zero), run.bye(one)
    assert run.finish is None
    run.bye(evaluator)
    assert run.finish.status is Status.DONE


def test_the_drain_names_an_evaluator_that_does_not_leave():
    run, zero, one = drained()
    run.join(Client(-1, Role.EVALUATOR))
    run.bye(zero), run.bye(one)
    assert texts(run.wait(POLICY.drain_timeout_s)) == "an evaluator did not take leave after the last step"
    assert run.finish.status is Status.DONE


def test_an_evaluator_lost_in_the_drain_is_waited_for_no_longer():
    run, zero, one = drained()
    evaluator = Client(-1, Role.EVALUATOR)
    run.join(evaluator)
    run.bye(zero), run.bye(one)
    run.lose(evaluator)
    assert run.finish.status is Status.DONE


def test_who_joins_a_finished_run_gets_the_last_values_at_once():
    run, zero, one = drained()
    run.lose(one)
    again = Client(1)
    run.join(again)
    assert run.pull(again, min_step=7) == [Reply(again.session, 0, False)]
    run.bye(zero), run.bye(again)
    assert run.finish.status is Status.DONE


def test_a_push_repeated_in_the_drain_is_answered():
    run, zero, _ = drained()
    run.lose(zero)
    run.join(zero)
    assert run.push(zero, step=0, seq=1)[1] == [Reply(zero.session, 1, True)]
    _, told = run.push(zero, step=1)
    assert told == [Reply(zero.session, 2, False, "the push is of step 1, the run has ended at 1")]


def test_a_worker_that_left_early_needs_no_second_goodbye():
    run, zero, one = running(steps=2)
    run.bye(one)
    run.push(zero), run.push(zero)
    run.bye(zero)
    assert run.finish.status is Status.DONE


def test_a_signal_in_the_drain_ends_the_wait_for_goodbyes_and_the_run_is_done():
    """All steps are made: what was asked for is there to be written."""
    run, zero, _ = drained(evaluators=1)
    run.bye(zero)
    told = run.carry_out(run.coordinator.stop(Status.INTERRUPTED, "the server was stopped by SIGTERM"))
    assert "rank 1 did not take leave after the last step | an evaluator did not come in time" in texts(told)
    assert run.finish == Finish(Status.DONE, "")


def test_a_fault_of_the_server_in_the_drain_is_no_success():
    run, _, _ = drained()
    run.carry_out(run.coordinator.stop(Status.FAILED, "the server itself has failed"))
    assert run.finish == Finish(Status.FAILED, "the server itself has failed")


# ---- after the end, and what is said ---------------------------------------------------------------------


def test_nothing_is_told_after_the_end():
    run, zero, one = running()
    run.push(zero)
    run.carry_out(run.coordinator.stop(Status.INTERRUPTED, "the server was stopped by SIGTERM"))
    assert run.finish == Finish(Status.INTERRUPTED, "the server was stopped by SIGTERM")
    run.told.clear()
    for epoch in (EPOCH, EPOCH - 1):
        decided, told = run.push(one, epoch=epoch)
        assert isinstance(decided, Drop) and told == []
    push = Push(EPOCH, 0, 9, None, None, 1)
    assert run.coordinator.push_arrived(one.session, push, 1.0, None, run.now) == []
    run.pull(zero)
    run.bye(zero)
    run.lose(one)
    run.join(Client(1))
    run.wait(10_000)
    run.carry_out(run.coordinator.stop(Status.FAILED, "again"))
    assert run.told == [] and run.coordinator.waiting_for(run.now) == ""


def test_who_asks_after_the_last_goodbye_still_gets_the_final_values():
    run, zero, one = drained()
    run.bye(zero), run.bye(one)
    assert run.finish.status is Status.DONE
    late = Client(1)
    run.join(late)
    assert run.pull(late, min_step=9) == [Reply(late.session, 0, False)]
    assert run.bye(late) == []


def test_it_says_for_whom_it_waits_and_since_when():
    run, zero, one = Run(), Client(0), Client(1)
    waiting = lambda: run.coordinator.waiting_for(run.now)  # noqa: E731
    run.wait(5)
    assert waiting() == "the start waits for ranks 0 and 1 since 5 s"
    run.join(zero)
    assert waiting() == "the start waits for rank 1 since 5 s"
    run.join(one)
    run.wait(3)
    assert waiting() == "the start waits for the initial values of rank 0 (site-0) since 3 s"
    run.give_initial(zero)
    assert waiting() == "", "nobody has pushed: the workers compute"
    run.wait(11)
    assert waiting() == "round 0 has no push yet, since 11 s"
    run.push(zero)
    run.wait(4)
    assert waiting() == "round 0 waits for rank 1 since 4 s"
    run.lose(one)
    run.wait(2)
    assert waiting() == "round 0 waits for rank 1 since 6 s (rank 1 lost, may return within 18 s)"
    run.join(one)
    run.push(one)
    run.lose(zero)
    run.wait(7)
    assert waiting() == "round 1 waits for rank 0 since 7 s (rank 0 lost, may return within 13 s)"
    run.join(zero)
    for _ in range(2):
        run.push(zero), run.push(one)
    run.join(Client(-1, Role.EVALUATOR))
    run.bye(zero)
    run.wait(1)
    assert waiting() == "the end waits for the goodbye of rank 1 and of an evaluator since 1 s"


def test_the_end_waits_for_evaluators_that_are_expected_as_long_as_the_drain_lasts():
    """One that comes when the last step is over still measures the final values; one that never comes is named."""
    for comes in (True, False):
        run, evaluator = Run(workers=1, steps=1, evaluators=1, has_values=True), Client(-1, Role.EVALUATOR)
        worker = Client(0)
        run.join(worker)
        run.push(worker)
        run.bye(worker)
        run.wait(9)
        assert run.finish is None
        assert run.coordinator.waiting_for(run.now) == "the end waits for the goodbye of an evaluator since 9 s"
        if comes:
            run.join(evaluator)
            run.bye(evaluator)
        else:
            run.wait(1)
        assert run.finish == Finish(Status.DONE, "")
        assert ("did not come in time" in str(run.told)) is not comes


def test_whom_it_waits_for_fits_into_a_message_however_many_they_are():
    run = Run(workers=1024)
    assert run.coordinator.waiting_for(run.now).endswith("14 and 1009 more")
