"""Who is who: ranks, names and incarnations, and who may have them."""

import pytest

from protocol.messages import AUTO_RANK, MAX_NAME_CHARACTERS, RefusalCode, Role
from ps.coordination.members import (
    MAX_RANKS_NAMED,
    Contested,
    Denied,
    Granted,
    Identity,
    Registry,
    labelled,
    name_ranks,
)


def who(rank=AUTO_RANK, name="", host="h", incarnation=1, role=Role.WORKER):
    return Identity(name, host, rank, role, incarnation)


class Cast:
    """A registry and the numbers of its connections."""

    def __init__(self, workers=3):
        self.registry = Registry(workers)
        self.session = 0

    def join(self, identity, now=0.0, threads=1):
        claim = self.registry.claim(identity)
        assert isinstance(claim, Granted), claim
        self.session += 1
        self.registry.bind(self.session, identity, claim, threads, now)
        return self.session, claim


# ---- ranks ---------------------------------------------------------------------------------------------


def test_auto_hands_out_the_lowest_rank_that_was_never_used():
    cast = Cast()
    assert [cast.join(who(incarnation=i))[1].rank for i in range(3)] == [0, 1, 2]


def test_auto_leaves_ranks_that_others_asked_for():
    cast = Cast()
    cast.join(who(0, incarnation=1))
    cast.join(who(2, incarnation=2))
    assert cast.join(who(incarnation=3))[1].rank == 1


def test_auto_gives_a_name_its_rank_again_wherever_it_comes_from():
    cast = Cast()
    cast.join(who(incarnation=1))
    session, _ = cast.join(who(name="site-b", host="one", incarnation=2))
    cast.registry.release(session, "lost", 5.0)
    assert cast.join(who(name="site-b", host="two", incarnation=3))[1] == Granted(1, "site-b")


def test_auto_prefers_a_free_rank_that_was_last_on_this_host_to_one_never_used():
    cast = Cast()
    cast.join(who(host="one", incarnation=1))
    session, _ = cast.join(who(host="two", incarnation=2))
    cast.registry.release(session, "lost", 5.0)
    assert cast.join(who(host="three", incarnation=3))[1].rank == 2
    assert cast.join(who(host="two", incarnation=4))[1].rank == 1


def test_auto_takes_a_lost_rank_of_another_host_when_no_other_is_left():
    cast = Cast(workers=2)
    session, _ = cast.join(who(host="one", incarnation=1))
    cast.join(who(host="two", incarnation=2))
    cast.registry.release(session, "lost", 5.0)
    assert cast.join(who(host="three", incarnation=3))[1].rank == 0


def test_auto_is_denied_when_all_ranks_are_held():
    cast = Cast(workers=1)
    cast.join(who(incarnation=1))
    denied = cast.registry.claim(who(incarnation=2))
    assert denied == Denied(RefusalCode.FULL, "all 1 ranks of this run are held by live workers")


@pytest.mark.parametrize("rank", [3, 65_535])
def test_a_rank_beyond_the_runs_is_denied_with_what_to_do(rank):
    denied = Cast(workers=3).registry.claim(who(rank))
    assert isinstance(denied, Denied) and denied.code is RefusalCode.RANK_RANGE
    assert f"rank {rank} is not one of this run's ranks 0 to 2" in denied.reason and "--workers" in denied.reason


# ---- names ---------------------------------------------------------------------------------------------


def test_without_a_name_host_and_rank_are_the_name_and_it_is_never_too_long():
    cast = Cast()
    assert cast.join(who(1, host="box", incarnation=1))[1].name == "box:1"
    long_host = "x" * MAX_NAME_CHARACTERS
    name = cast.join(who(2, host=long_host, incarnation=2))[1].name
    assert len(name) == MAX_NAME_CHARACTERS and name.endswith("x:2")


def test_a_name_that_a_live_worker_has_under_another_rank_is_denied_naming_it():
    cast = Cast()
    cast.join(who(0, name="site-a", incarnation=1))
    denied = cast.registry.claim(who(1, name="site-a", incarnation=2))
    assert isinstance(denied, Denied) and denied.code is RefusalCode.RANK_TAKEN
    assert "'site-a' belongs to rank 0 (site-a)" in denied.reason and "--name" in denied.reason


def test_a_name_whose_worker_is_lost_may_move_to_another_rank():
    cast = Cast()
    session, _ = cast.join(who(0, name="site-a", incarnation=1))
    cast.registry.release(session, "lost", 5.0)
    assert cast.join(who(1, name="site-a", incarnation=2))[1] == Granted(1, "site-a")


# ---- incarnations --------------------------------------------------------------------------------------


def test_the_same_incarnation_replaces_its_own_connection():
    cast = Cast()
    session, _ = cast.join(who(0, incarnation=7))
    assert cast.registry.claim(who(0, incarnation=7)) == Granted(0, "h:0", replaces=session)
    assert cast.registry.claim(who(AUTO_RANK, incarnation=7)) == Granted(0, "h:0", replaces=session)


def test_another_incarnation_contests_a_rank_that_is_held_and_names_the_holder():
    cast = Cast()
    session, _ = cast.join(who(0, host="one", name="site-a", incarnation=7))
    contested = cast.registry.claim(who(0, host="two", name="site-a", incarnation=8))
    assert contested == Contested(session, "rank 0 (site-a) on one")
    assert cast.registry.claim(who(AUTO_RANK, name="site-a", incarnation=8)) == contested


def test_a_claim_changes_nothing():
    cast = Cast()
    cast.join(who(0, incarnation=1))
    for identity in (who(1, incarnation=2), who(0, incarnation=2), who(incarnation=3), who(9, incarnation=4)):
        cast.registry.claim(identity)
    assert list(cast.registry.members) == [0] and cast.registry.members[0].incarnation == 1


def test_a_new_incarnation_begins_its_numbers_anew_and_keeps_the_threads_of_the_rank():
    cast = Cast()
    session, _ = cast.join(who(0, incarnation=1), threads=4)
    member = cast.registry.members[0]
    member.last_seq, member.last_applied, member.last_reason = 9, True, "x"
    cast.registry.release(session, "lost", 5.0)
    cast.join(who(0, host="two", name="new", incarnation=2), now=8.0, threads=2)
    assert cast.registry.members[0] is member
    assert (member.last_seq, member.last_applied, member.last_reason) == (0, False, "")
    assert (member.host, member.name, member.incarnation, member.threads) == ("two", "new", 2, 4)
    assert (member.joined_at, member.lost_at, member.lost_reason) == (8.0, None, "")


def test_the_same_incarnation_keeps_its_numbers_over_a_lost_connection():
    cast = Cast()
    session, _ = cast.join(who(0, incarnation=1))
    member = cast.registry.members[0]
    member.last_seq, member.last_applied = 9, True
    cast.registry.release(session, "lost", 5.0)
    assert (member.lost_at, member.lost_reason) == (5.0, "lost")
    cast.join(who(0, incarnation=1))
    assert (member.last_seq, member.last_applied, member.lost_at) == (9, True, None)


# ---- who speaks for whom ---------------------------------------------------------------------------------


def test_a_released_connection_speaks_for_nobody_and_a_second_release_takes_nothing_from_its_successor():
    cast = Cast()
    old, _ = cast.join(who(0, incarnation=1))
    assert cast.registry.of(old) is cast.registry.members[0]
    assert cast.registry.release(old, "lost", 5.0) is cast.registry.members[0]
    assert cast.registry.of(old) is None
    new, _ = cast.join(who(0, incarnation=2))
    assert cast.registry.release(old, "lost again", 6.0) is None
    assert cast.registry.of(new) is cast.registry.members[0] and cast.registry.members[0].lost_at is None


def test_missing_and_active_ranks():
    cast = Cast()
    assert cast.registry.missing() == [0, 1, 2] == cast.registry.active()
    sessions = [cast.join(who(rank, incarnation=rank))[0] for rank in range(3)]
    assert cast.registry.missing() == [] and cast.registry.active() == [0, 1, 2]
    cast.registry.release(sessions[0], "lost", 5.0)
    cast.registry.release(sessions[1], "bye", 5.0, finished=True)
    assert cast.registry.missing() == [0], "who left on purpose is not missing"
    assert cast.registry.active() == [0, 2], "who is lost is still waited for"
    cast.join(who(1, incarnation=9))
    assert cast.registry.active() == [0, 1, 2]


def test_evaluators_have_no_rank_and_there_may_be_many():
    cast = Cast(workers=1)
    first, claim = cast.join(who(name="eval", role=Role.EVALUATOR, incarnation=1))
    assert claim == Granted(AUTO_RANK, "eval")
    cast.join(who(host="two", role=Role.EVALUATOR, incarnation=2))
    assert cast.registry.claim(who(0, host="z", role=Role.EVALUATOR, incarnation=3)) == Granted(
        AUTO_RANK, "z:evaluator"
    )
    assert cast.registry.members == {} and len(cast.registry.evaluators) == 2
    assert cast.registry.of(first) is None
    again = cast.registry.claim(who(name="eval", role=Role.EVALUATOR, incarnation=1))
    assert again == Granted(AUTO_RANK, "eval", replaces=first)
    assert cast.registry.release(first, "bye", 5.0) is None
    assert len(cast.registry.evaluators) == 1


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([1, 2], "ranks 1 and 2"),
        ([0, 1, 5], "ranks 0, 1 and 5"),
        (list(range(MAX_RANKS_NAMED)), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 15"),
        (list(range(1000)), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 985 more"),
    ],
)
def test_ranks_are_named_as_a_person_would(ranks, text):
    assert name_ranks(ranks) == text


@pytest.mark.parametrize(
    ("role", "name", "text"),
    [
        (Role.VALIDATOR, "hospital", "validator hospital"),
        (Role.VALIDATOR, "validator", "validator"),
        (Role.EVALUATOR, "evaluator-2", "evaluator-2"),
        (Role.EVALUATOR, "host:evaluator", "evaluator host:evaluator"),
    ],
)
def test_no_role_is_said_twice(role, name, text):
    assert labelled(role, name) == text
