"""Validators in the coordinator and the registry, and the draw of the rounds that they judge."""

import pytest

from protocol.messages import AUTO_RANK, RefusalCode, Role, Status
from ps.coordination import course_state
from ps.coordination.attendance import MAX_LATE_ROUNDS
from ps.coordination.instructions import AskInitial, CloseRound, Drop, Reply
from ps.coordination.members import Contested, Denied, Granted, Registry
from ps.coordination.policy import Phase
from ps.coordination.validation import ValidatedRounds
from ps.monitoring import status
from tests.unit.course import NAN, Client, Run, replies, texts

SECRET = bytes(range(32))
NUMBER = 2  # the validator's, after ranks 0 and 1


def validator():
    client = Client(AUTO_RANK, Role.VALIDATOR)
    return client


def validated(every=1, **changes):
    """A run at round 0 with two workers, or more, and one validator, all of which have their values."""
    run = Run(validators=1, validator_slots=1, validated=ValidatedRounds(every, SECRET), **changes)
    zero, one, judge = Client(0), Client(1), validator()
    others = [Client(rank) for rank in range(2, run.policy.workers)]
    for client in (zero, one, judge, *others):
        run.join(client)
    for client in (zero, one, judge, *others):
        run.pull(client)
    run.give_initial(judge)
    assert run.coordinator.phase is Phase.RUNNING
    run.told.clear()
    return run, zero, one, judge


# ---- the draw ----------------------------------------------------------------------------------------------


def test_round_0_and_about_one_in_k_rounds_are_validated_and_the_same_ones_every_time():
    rounds = ValidatedRounds(10, SECRET)
    drawn = [step for step in range(10_000) if step in rounds]
    assert drawn[0] == 0
    assert 900 < len(drawn) < 1100
    assert drawn == [step for step in range(10_000) if step in ValidatedRounds(10, SECRET)]


def test_another_secret_draws_other_rounds_and_every_1_draws_all():
    drawn = {step for step in range(1000) if step in ValidatedRounds(10, SECRET)}
    others = {step for step in range(1000) if step in ValidatedRounds(10, bytes(32))}
    assert len(drawn & others) < len(drawn) / 2
    assert all(step in ValidatedRounds(1, SECRET) for step in range(100))


def test_an_alarm_adds_rounds_and_takes_none_away():
    usual, often = ValidatedRounds(10, SECRET), ValidatedRounds(10, SECRET).more_often()
    drawn, more = ({step for step in range(10_000) if step in rounds} for rounds in (usual, often))
    assert drawn < more
    assert 4800 < len(more) < 5200, "about every second round: certainty could be foreseen"
    assert ValidatedRounds(1, SECRET).more_often() == ValidatedRounds(1, SECRET)


# ---- who is a validator --------------------------------------------------------------------------------------


def test_a_validator_gets_the_number_after_the_workers_ranks():
    assert Registry(2, 1).claim(validator().identity) == Granted(NUMBER, f"site-{AUTO_RANK}")


def test_a_run_whose_rule_needs_no_validator_refuses_it():
    denied = Registry(2).claim(validator().identity)
    assert isinstance(denied, Denied) and denied.code is RefusalCode.FULL
    assert "validator" in denied.reason


def test_a_second_validator_contests_the_only_place_and_takes_it_when_it_is_free():
    registry = Registry(2, 1)
    first, second = validator(), validator()
    registry.bind(1, first.identity, registry.claim(first.identity), 1, 0.0)
    assert isinstance(registry.claim(second.identity), Contested)
    registry.release(1, "gone", 1.0)
    assert registry.claim(second.identity) == Granted(NUMBER, f"site-{AUTO_RANK}")


def test_two_validators_get_two_numbers():
    registry = Registry(2, 2)
    for session, client in enumerate((validator(), validator())):
        client.identity = type(client.identity)(
            f"judge-{session}", "host", AUTO_RANK, Role.VALIDATOR, client.identity.incarnation
        )
        granted = registry.claim(client.identity)
        assert granted == Granted(NUMBER + session, f"judge-{session}")
        registry.bind(session, client.identity, granted, 1, 0.0)
    assert [member.rank for member in registry.live_validators()] == [2, 3]
    assert registry.missing() == [0, 1]


# ---- the start -------------------------------------------------------------------------------------------------


def test_the_start_waits_for_the_validator_and_asks_it_for_the_initial_values():
    run, zero, one, judge = (
        Run(validators=1, validator_slots=1),
        Client(0),
        Client(1),
        validator(),
    )
    run.join(zero), run.join(one)
    assert run.coordinator.phase is Phase.GATHERING
    assert "the start waits for a validator" in run.coordinator.waiting_for(run.now)
    run.join(judge)
    assert run.of(AskInitial) == [AskInitial(judge.session)]


def test_a_validator_that_does_not_come_is_named_when_the_start_times_out():
    run = Run(validators=1, validator_slots=1)
    run.join(Client(0)), run.join(Client(1))
    run.wait(run.policy.start_timeout_s)
    assert run.finish.status is Status.NO_PROGRESS
    assert run.finish.reason.startswith("a validator did not come within 60 s")


# ---- a restart with another number of workers -----------------------------------------------------------------


def resumed_with(workers):
    """A run of two workers and a validator after three validated rounds, one of rank 1's pushes refused."""
    run, zero, one, judge = validated(steps=9)
    for loss in (1.0, 1.0, NAN):
        run.push(zero), run.push(one, loss=loss), run.push(judge)
    run.push(judge, step=0)
    again = Run(run.policy, workers=workers)
    course_state.restore(again.coordinator, course_state.state_of(run.coordinator), workers - 2)
    return again.coordinator


def test_counts_of_a_validator_move_with_its_number_to_more_workers():
    course = resumed_with(3)
    assert course.pushes == {0: 3, 1: 3, 3: 3} and course.rejected == {1: 1} and course.stale == {3: 1}
    assert status.validator_rows(course)[0].pushes == 3


def test_counts_of_ranks_that_have_no_place_any_more_are_forgotten():
    course = resumed_with(1)
    assert course.pushes == {0: 3, 1: 3} and course.rejected == {} and course.stale == {1: 1}
    assert [row.pushes for row in status.validator_rows(course)] == [3]
    course = resumed_with(2)
    assert course.pushes == {0: 3, 1: 3, 2: 3}


# ---- what nobody is told -----------------------------------------------------------------------------------------


def shown(run):
    """Return what a client hears and what the page shows of the open round."""
    course, now = run.coordinator, run.now
    page = status.waiting(course, now), status.validator_rows(course)
    return course.waiting_for(now), page


@pytest.mark.parametrize("policy", [{}, {"shrink": True}, {"workers": 3, "quorum": 2}])
def test_a_round_looks_the_same_whether_or_not_it_is_validated(policy):
    """Up to the push that would close it if it were not; what the log of the server says may differ."""
    seen = {}
    for every in (1, 10**6):
        run, zero, one, judge = validated(every, steps=9, **policy)
        run.push(zero), run.push(one), run.push(judge)
        assert run.coordinator.step == 1 and run.coordinator.open_round.validated == (every == 1)
        seen[every] = [shown(run)]
        run.wait(1)
        run.push(judge)
        run.wait(1)
        seen[every].append(shown(run))
        run.push(one)
        run.wait(4)
        seen[every].append(shown(run))
    assert seen[1] == seen[10**6]
    assert " since 4 s" in seen[1][-1][0]


def test_with_a_quorum_nothing_shows_that_a_round_has_it_and_is_still_open():
    run, zero, one, _judge = validated(workers=3, quorum=2, steps=9)
    run.push(zero)
    run.wait(4)
    before = shown(run)
    run.push(one)
    assert shown(run) == before
    assert run.coordinator.waiting_for(run.now).startswith("round 0 waits until a quorum of 2 lets it close")
    assert "validator" in run.coordinator.waiting_for(run.now, names_validators=True)


def test_a_round_that_only_a_validator_holds_names_it_in_the_log_alone():
    run, zero, one, _judge = validated()
    run.push(zero), run.push(one)
    run.wait(7)
    sentence = "round 0 has the pushes of all workers and closes soon since 7 s"
    assert run.coordinator.waiting_for(run.now) == sentence
    assert status.waiting(run.coordinator, run.now) == status.Waiting(sentence, (), 7.0)
    assert run.coordinator.waiting_for(run.now, names_validators=True) == (
        "round 0 waits for validator site--1 since 7 s"
    )


def test_a_reference_is_counted_when_its_round_closes():
    run, zero, one, judge = validated()
    run.push(judge, loss=NAN), run.push(zero)
    assert status.validator_rows(run.coordinator)[0].pushes == 0
    run.push(one)
    assert status.validator_rows(run.coordinator)[0].pushes == 1


# ---- rounds ----------------------------------------------------------------------------------------------------


def test_a_validated_round_waits_for_the_validator_and_names_its_gradient():
    run, zero, one, judge = validated()
    run.push(zero), run.push(one)
    assert not run.of(CloseRound)
    assert run.coordinator.waiting_for(run.now, names_validators=True) == "round 0 waits for validator site--1"
    run.push(judge)
    (closed,) = run.of(CloseRound)
    assert closed.references == (NUMBER,)
    assert [c.rank for c in closed.contributions] == [0, 1]
    assert {reply.session for reply in run.of(Reply)} == {zero.session, one.session, judge.session}


def test_a_round_that_is_not_validated_closes_without_the_validator_which_hears_of_the_next_one_only():
    run, zero, one, judge = validated(every=10**6, steps=50)
    run.push(zero), run.push(one), run.push(judge)
    run.told.clear()
    for _ in range(5):
        run.push(zero), run.push(one)
    assert [closed.references for closed in run.of(CloseRound)] == [()] * 5
    assert judge.session not in {reply.session for reply in replies(run.told)}


def test_at_the_end_the_validator_gets_the_final_values_and_its_goodbye_is_awaited():
    run, zero, one, judge = validated(every=10**6, steps=2)
    for _ in range(2):
        run.push(zero), run.push(one)
        if run.coordinator.step == 0:
            run.push(judge)
    assert run.coordinator.phase is Phase.DRAINING
    assert run.of(Reply)[-1].session in (zero.session, one.session, judge.session)
    assert sum(reply.session == judge.session for reply in run.of(Reply)) == 1
    run.bye(zero), run.bye(one)
    assert run.finish is None and "validator" in run.coordinator.waiting_for(run.now)
    run.bye(judge)
    assert run.finish.status is Status.DONE


def test_a_push_for_a_round_that_is_not_validated_is_not_taken():
    run, zero, one, judge = validated(every=10**6, steps=50)
    run.push(zero), run.push(one), run.push(judge)
    decided, told = run.push(judge)
    assert isinstance(decided, Drop) and not replies(told)


def test_a_refused_reference_counts_as_present_and_is_not_used():
    run, zero, one, judge = validated()
    run.push(zero), run.push(one)
    run.push(judge, loss=NAN)
    (closed,) = run.of(CloseRound)
    assert closed.references == ()
    assert "push of step 0 refused" in texts(run.told)


def test_a_late_validator_is_left_behind_after_the_round_timeout_and_the_run_goes_on():
    run, zero, one, judge = validated(steps=10)
    run.push(zero), run.push(one)
    run.wait(run.policy.round_timeout_s)
    (closed,) = run.of(CloseRound)
    assert closed.references == () and run.coordinator.predicted_rounds == 1
    assert "closes without it" in texts(run.told)
    run.push(zero), run.push(one)
    assert len(run.of(CloseRound)) == 2, "a validator that was late once is not waited for"
    _, told = run.push(judge, step=0)
    assert [r.applied for r in replies(told)] == [False]
    run.push(judge), run.push(zero), run.push(one)
    assert run.of(CloseRound)[-1].references == (NUMBER,), "until it is in time again"


def test_a_validators_push_that_was_coming_in_when_its_round_closed_is_answered():
    run, zero, one, judge = validated(steps=10)
    push, _ = run.begin(judge)
    run.push(zero), run.push(one)
    run.wait(run.policy.round_timeout_s)
    (reply,) = replies(run.complete(judge, push))
    assert not reply.applied and "the push is of step 0" in reply.reason


def test_a_lost_validator_is_waited_for_until_it_returns():
    run, zero, one, judge = validated(steps=10)
    run.lose(judge)
    run.push(zero), run.push(one)
    run.wait(run.policy.round_timeout_s / 2)
    assert not run.of(CloseRound)
    run.join(judge), run.pull(judge), run.push(judge)
    assert run.of(CloseRound)[0].references == (NUMBER,)


@pytest.mark.parametrize("together", [True, False])
def test_a_validator_that_leaves_is_not_waited_for(together):
    run, zero, one, judge = validated(steps=10)
    if together:
        run.push(zero), run.push(one)
    run.bye(judge)
    if not together:
        run.push(zero), run.push(one)
    assert [closed.references for closed in run.of(CloseRound)] == [()]
    assert run.coordinator.has_left_early


def test_a_worker_that_is_late_ends_the_run_also_while_a_validator_is_late():
    run, zero, _, _ = validated()
    run.push(zero)
    run.wait(run.policy.round_timeout_s)
    assert run.finish.status is Status.NO_PROGRESS


def late_quorum(validators_too):
    """A round with its quorum; the third rank is alive but late, and the validator is lost or is late too."""
    run, zero, one, judge = validated(workers=3, quorum=2, steps=9)
    if not validators_too:
        run.lose(judge)
    run.push(zero), run.push(one)
    return run


@pytest.mark.parametrize("validators_too", [True, False])
def test_a_quorum_that_only_a_validator_holds_closes_by_prediction_whoever_else_is_late(validators_too):
    run = late_quorum(validators_too)
    assert run.wait(run.policy.round_timeout_s - 1) == []
    told = run.wait(1)
    assert run.finish is None and run.coordinator.predicted_rounds == 1
    (closed,) = [t for t in told if isinstance(t, CloseRound)]
    assert [c.rank for c in closed.contributions] == [0, 1]


def test_a_round_begins_with_the_first_push_of_a_worker():
    run, zero, _one, judge = validated(steps=9, shrink=True)
    run.push(judge)
    run.wait(10 * run.policy.round_timeout_s)
    assert run.finish is None and run.coordinator.open_round.began is None
    run.push(zero)
    assert run.wait(run.policy.round_timeout_s - 1) == []
    told = run.wait(1)
    assert [[c.rank for c in t.contributions] for t in told if isinstance(t, CloseRound)] == [[0]]
    assert run.coordinator.predicted_rounds == 0


def test_no_round_closes_by_prediction_where_only_a_rank_on_probation_is_left():
    run, zero, _one, judge = validated(steps=9, shrink=True)
    for _ in range(MAX_LATE_ROUNDS):
        run.push(zero), run.push(judge)
        run.wait(run.policy.round_timeout_s)
    assert run.coordinator.registry.members[1].on_probation
    run.push(judge)
    run.lose(zero)
    for _ in range(5):
        run.wait(run.policy.round_timeout_s)
    assert run.finish is None and run.coordinator.predicted_rounds == 0


def test_a_validator_that_holds_a_round_has_the_round_timeout_however_short_the_idle_one_is():
    run, zero, one, _judge = validated(steps=9, idle_timeout_s=5)
    run.push(zero), run.push(one)
    run.wait(run.policy.round_timeout_s - 1)
    assert run.finish is None
    run.wait(1)
    assert run.coordinator.predicted_rounds == 1 and run.finish is None
    run.wait(4)
    assert run.finish is None, "the next round is open for 4 s"
    run.wait(1)
    assert run.finish.status is Status.NO_PROGRESS


def test_rounds_that_open_during_an_alarm_are_drawn_more_often():
    """The round that is open when the alarm is raised stays as it was drawn."""
    run, zero, one, judge = validated(every=10**6, steps=200)
    run.push(zero), run.push(one), run.push(judge)
    usual, more = run.policy.validated, run.policy.validated.more_often()
    run.coordinator.alarmed = True
    assert not run.coordinator.open_round.validated
    drawn = []
    for _ in range(100):
        drawn.append(run.coordinator.open_round.validated)
        for client in (zero, one, *([judge] if drawn[-1] else [])):
            run.push(client)
    assert drawn == [1 in usual, *(step in more for step in range(2, 101))]
    run.coordinator.alarmed = False
    while run.coordinator.open_round.validated:
        run.push(zero), run.push(one), run.push(judge)
    run.push(zero), run.push(one)
    assert not run.coordinator.open_round.validated
