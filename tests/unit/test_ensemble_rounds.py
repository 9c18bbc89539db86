"""The rounds of an ensemble in the coordinator: initial values of each, labels, and logits before gradients."""

from protocol.ensemble import Weighting
from protocol.messages import Logits, Push, Status
from ps.coordination.instructions import (
    AskInitial,
    CloseRound,
    Drop,
    Reply,
    SendWeights,
    SkipRound,
    Take,
    WeighAnswers,
)
from ps.coordination.policy import Phase
from tests.unit.course import EPOCH, Client, Run, replies, texts

ONE, OTHER = b"1" * 16, b"2" * 16


def ensemble(weighting=Weighting.BATCH, workers=3, **changes):
    """A run at round 0 and its members, all of which have their values."""
    run = Run(workers=workers, weighting=weighting, has_values=True, **changes)
    clients = [Client(rank) for rank in range(workers)]
    run.start(*clients)
    run.told.clear()
    return run, *clients


def push(run, client, labels=ONE, seq=None, problem="", step=None):
    """A whole push arrives; return what was told."""
    if seq is None:
        client.seq += 1
        seq = client.seq
    before = len(run.told)
    message = Push(EPOCH, run.coordinator.step if step is None else step, seq, 1.0, 0.5, 8, labels)
    decided = run.coordinator.push_begins(client.session, message)
    if isinstance(decided, Drop):
        run.drop(client, message, decided)
    else:
        arrived = run.coordinator.push_arrived(client.session, message, 1.0, None, run.now, problem)
        run.carry_out(arrived)
    return run.told[before:]


def show(run, client, labels=ONE, seq=None, problem=""):
    """A member's logits arrive whole, for the push that is to follow; return what was told."""
    before = len(run.told)
    message = Logits(EPOCH, run.coordinator.step, client.seq + 1 if seq is None else seq, labels)
    decided = run.coordinator.logits_begin(client.session, message)
    if isinstance(decided, Drop):
        run.drop(client, message, decided)
    else:
        run.carry_out(run.coordinator.logits_arrived(client.session, message, problem, run.now))
    return run.told[before:]


def closed(told):
    return next(instruction for instruction in told if isinstance(instruction, CloseRound))


def refused(closing):
    return {c.rank: c.refused for c in closing.contributions if c.refused}


# ---- initial values ----------------------------------------------------------------------------------------


def test_each_member_is_asked_for_its_own_values():
    run = Run(workers=3, weighting=Weighting.BATCH)
    clients = [Client(rank) for rank in range(3)]
    for client in clients:
        run.join(client)
        run.pull(client)
    for client in clients:
        assert run.of(AskInitial)[-1] == AskInitial(client.session)
        assert run.coordinator.phase is Phase.INITIALISING
        run.give_initial(client)
    assert run.coordinator.phase is Phase.RUNNING
    assert len(run.of(Reply)) == 3


def test_a_member_that_is_lost_before_it_gave_its_values_is_asked_again_when_it_is_back():
    run = Run(workers=2, weighting=Weighting.BATCH)
    zero, one = Client(0), Client(1)
    for client in (zero, one):
        run.join(client)
        run.pull(client)
    run.give_initial(zero)
    run.lose(one)
    assert run.coordinator.phase is Phase.INITIALISING
    run.join(one)
    run.pull(one)
    assert run.of(AskInitial)[-1] == AskInitial(one.session)
    run.give_initial(one)
    assert run.coordinator.phase is Phase.RUNNING


# ---- labels ------------------------------------------------------------------------------------------------


def test_equal_labels_close_the_round():
    run, zero, one, two = ensemble()
    push(run, two)
    push(run, zero)
    told = push(run, one)
    assert refused(closed(told)) == {}
    assert [reply.applied for reply in replies(told)] == [True] * 3


def test_other_labels_than_those_of_rank_0_are_refused_by_name_whatever_the_order():
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        run, *clients = ensemble()
        for rank in order:
            told = push(run, clients[rank], OTHER if rank == 1 else ONE)
        (reason,) = refused(closed(told)).values()
        assert "not those of rank 0" in reason
        assert {reply.session: reply.applied for reply in replies(told)} == {
            client.session: client.rank != 1 for client in clients
        }
        assert "rank 1 (site-1): push of step 0 refused: its labels are not those of rank 0" in texts(told)
        assert run.coordinator.rejected == {1: 1}


def test_a_repeated_push_hears_that_its_labels_were_refused():
    """The round closes after the connection of the refused one broke and came back."""
    run, zero, one, two = ensemble()
    push(run, one, OTHER)
    run.lose(one)
    run.join(one)
    push(run, one, OTHER, seq=one.seq)
    push(run, two)
    told = push(run, zero)
    assert {reply.session: reply.applied for reply in replies(told)}[one.session] is False


def test_rank_0s_labels_do_not_count_when_its_push_is_refused():
    run, zero, one, two = ensemble()
    push(run, zero, OTHER, problem="its logits are not finite")
    push(run, one)
    told = push(run, two)
    assert refused(closed(told)) == {0: "its logits are not finite"}


# ---- logits before gradients -------------------------------------------------------------------------------


def test_gradients_come_after_the_weights_of_all():
    run, zero, one, two = ensemble(Weighting.SAMPLE)
    assert show(run, zero) == []
    assert show(run, two) == []
    told = show(run, one)
    assert told == [
        WeighAnswers(0, (0, 1, 2)),
        *(SendWeights(client.session, client.rank, 1) for client in (zero, one, two)),
    ]
    push(run, zero)
    push(run, one)
    told = push(run, two)
    assert refused(closed(told)) == {}
    assert run.coordinator.step == 1


def test_a_gradient_without_logits_is_not_taken():
    run, zero, *_ = ensemble(Weighting.SAMPLE)
    told = push(run, zero)
    assert [(reply.applied, reply.reason) for reply in replies(told)] == [
        (False, "its logits must be weighed before its gradient")
    ]


def test_a_gradient_of_other_labels_than_its_logits_is_refused():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    show(run, zero)
    show(run, one)
    push(run, zero, OTHER)
    told = push(run, one)
    assert refused(closed(told)) == {0: "its labels are not those of its logits"}


def test_logits_that_cannot_be_used_leave_their_member_out_of_the_round():
    """It is told at the end of the round, and nobody waits for a gradient of it."""
    run, zero, one, two = ensemble(Weighting.SAMPLE)
    told = show(run, one, problem="its logits are not finite")
    assert replies(told) == []
    show(run, zero)
    told = show(run, two, labels=OTHER)
    assert WeighAnswers(0, (0,)) in told
    told = push(run, zero)
    assert refused(closed(told)).keys() == {1, 2}
    assert sorted((reply.session, reply.seq, reply.applied) for reply in replies(told)) == [
        (zero.session, 1, True),
        (one.session, 1, False),
        (two.session, 1, False),
    ]


def test_a_round_in_which_no_answer_can_be_used_is_void():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    show(run, zero, problem="its logits are not finite")
    told = show(run, one, problem="its logits are not finite")
    assert any(isinstance(instruction, SkipRound) for instruction in told)
    assert run.coordinator.step == 1


def test_a_member_that_starts_again_after_the_weighing_gets_the_same_weights():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    show(run, zero)
    show(run, one)
    push(run, zero)
    run.lose(one)
    again = Client(1)
    again.identity = again.identity.__class__("site-1", "host-1", 1, again.identity.role, 99)
    run.join(again)
    run.pull(again)
    assert show(run, again) == [SendWeights(again.session, 1, 1)]
    assert run.coordinator.step == 0
    push(run, again)
    assert run.coordinator.step == 1


def test_repeated_logits_before_the_weighing_count_once():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    show(run, zero)
    run.lose(zero)
    run.join(zero)
    show(run, zero)
    told = show(run, one)
    assert told == [
        WeighAnswers(0, (0, 1)),
        SendWeights(zero.session, 0, 1),
        SendWeights(one.session, 1, 1),
    ]


def test_a_member_that_leaves_between_logits_and_gradient_is_not_waited_for():
    """The second phase closes with a subset of the first."""
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    show(run, zero)
    show(run, one)
    push(run, zero)
    told = run.bye(one)
    assert [c.rank for c in closed(told).contributions] == [0]


def test_a_member_that_leaves_before_the_weighing_is_not_weighed():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    show(run, one)
    run.bye(one)
    told = show(run, zero)
    assert WeighAnswers(0, (0,)) in told


def test_a_member_that_comes_back_in_the_midst_of_a_round_waits_for_the_next():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    run.bye(one)
    show(run, zero)
    run.join(one)
    run.pull(one)
    assert replies(show(run, one)) == []
    told = push(run, zero)
    assert [c.rank for c in closed(told).contributions] == [0]
    assert {reply.session: reply.applied for reply in replies(told)} == {zero.session: True, one.session: False}


def test_when_all_that_were_weighed_have_left_the_round_is_void_and_goes_on_with_the_newcomer():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    run.bye(one)
    show(run, zero)
    run.join(one)
    run.pull(one)
    show(run, one)
    told = run.bye(zero)
    assert any(isinstance(instruction, SkipRound) for instruction in told)
    assert [reply.session for reply in replies(told)] == [one.session]
    one.seq += 1  # the answer was that of a push
    assert any(isinstance(instruction, WeighAnswers) for instruction in show(run, one))


def test_each_phase_has_its_deadline_and_names_whom_it_waits_for():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    show(run, zero)
    run.wait(20)
    assert "round 0 waits for rank 1" in run.coordinator.waiting_for(run.now)
    show(run, one)
    push(run, one)
    run.wait(20)
    assert run.finish is None, "40 s since the first logits, 20 s since the weights"
    assert "round 0 waits for rank 0" in run.coordinator.waiting_for(run.now)
    run.wait(11)
    assert run.finish.status is Status.NO_PROGRESS


def left_behind():
    """A round of three whose last member's logits are on their way when the others go on; what it had begun."""
    run, zero, one, two = ensemble(Weighting.SAMPLE, shrink=True, steps=9)
    show(run, zero), show(run, one)
    message = Logits(EPOCH, 0, 1, ONE)
    assert isinstance(run.coordinator.logits_begin(two.session, message), Take)
    assert WeighAnswers(0, (0, 1)) in run.wait(run.policy.round_timeout_s)
    return run, zero, one, two, message


def test_logits_that_arrive_when_their_round_goes_on_without_them_are_answered_with_the_next_values():
    run, zero, one, two, message = left_behind()
    told = run.carry_out(run.coordinator.logits_arrived(two.session, message, "", run.now))
    assert told == [], "no weights: there are none for it"
    push(run, zero)
    told = push(run, one)
    assert two.session in {reply.session for reply in replies(told)}


def test_logits_that_arrive_when_their_round_has_closed_without_them_are_answered():
    run, zero, one, two, message = left_behind()
    push(run, zero), push(run, one)
    told = run.carry_out(run.coordinator.logits_arrived(two.session, message, "", run.now))
    assert [(reply.session, reply.applied) for reply in replies(told)] == [(two.session, False)]
    assert run.coordinator.late == {2: 1}


def test_weights_asked_for_again_are_no_answer_once_their_round_has_closed():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2, shrink=True, steps=9)
    show(run, zero), show(run, one)
    message = Logits(EPOCH, 0, 1, ONE)
    verdict = run.coordinator.logits_begin(one.session, message)
    push(run, zero)
    run.wait(run.policy.round_timeout_s)
    told = run.drop(one, message, verdict)
    assert run.coordinator.step == 1
    assert [(reply.session, reply.applied) for reply in replies(told)] == [(one.session, False)]


def test_stale_logits_are_answered_with_values():
    run, zero, one = ensemble(Weighting.SAMPLE, workers=2)
    message = Logits(EPOCH + 1, 0, 1, ONE)
    decided = run.coordinator.logits_begin(zero.session, message)
    assert isinstance(decided, Drop)
    assert [reply.applied for reply in replies(run.drop(zero, message, decided))] == [False]
    assert isinstance(run.coordinator.logits_begin(one.session, Logits(EPOCH, 0, 1, ONE)), Take)
