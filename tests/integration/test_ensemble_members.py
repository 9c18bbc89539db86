"""Members of an ensemble that are missing, die, disagree or cannot take part, over real processes."""

import json

import numpy as np
import pytest

from tests.integration.processes import ROOT

STEPS, MEMBERS = 12, 3
MEMBER = ROOT / "tests/integration/light_member.py"
BOTH = pytest.mark.parametrize("weighting", ["batch", "sample"])


@pytest.fixture
def ensemble(processes):
    """Return functions that start a server and one of its members."""

    def server(**options):
        defaults = {"workers": MEMBERS, "steps": STEPS, "mode": "ensemble", "aggregation": "master"}
        return processes.server(**(defaults | {"learning_rate": 0.05} | options))

    def member(started, rank, *options):
        return processes.python(f"member {rank}", MEMBER, started.address, rank, *options)

    return server, member


def ended(server, members):
    for started in (*members, server):
        started.ends_with(0)
    return server.summary()


def rounds(server):
    lines = (server.export.parent / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@BOTH
def test_a_member_that_dies_comes_back_with_its_own_variables_and_no_bit_differs(ensemble, weighting):
    """It is killed in the midst of a step: with weights of examples, between its logits and its gradient."""
    start, member = ensemble
    finals = []
    for is_killed in (False, True):
        server = start(weighting=weighting)
        members = [member(server, rank, "--shared") for rank in (0, 2)]
        one = member(server, 1, "--shared", *(("--die", "5") if is_killed else ()))
        if is_killed:
            assert one.ends() == -9
            server.says(r"rank 1 \(member-1\) is lost")
            one = member(server, 1, "--shared")
        summary = ended(server, [*members, one])
        assert [worker["pushes"] for worker in summary["workers"]] == [STEPS] * MEMBERS
        assert (summary["void_rounds"], summary["short_rounds"], summary["deterministic"]) == (0, 0, True)
        finals.append(server.export.read_bytes())
    assert finals[0] == finals[1]


@BOTH
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("--other-labels", "its labels are not those of rank 0"), ("--nan-logits", "its logits are not finite")],
)
def test_a_member_that_cannot_be_weighed_is_left_out_of_that_round_alone(ensemble, weighting, fault, reason):
    start, member = ensemble
    server = start(weighting=weighting)
    members = [member(server, rank, *((fault, "4") if rank == 1 else ())) for rank in range(MEMBERS)]
    summary = ended(server, members)
    server.says(rf"rank 1 \(member-1\): push of step 4 refused: {reason}")
    members[1].says(f"not applied: {reason}")
    assert [worker["rejected"] for worker in summary["workers"]] == [0, 1, 0]
    written = rounds(server)
    assert [line["refused"] for line in written] == [[1] if line["step"] == 4 else [] for line in written]
    weights = written[4]["weights"]
    assert weights.keys() == {"0", "2"}
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-5)


@BOTH
def test_a_member_that_leaves_keeps_its_variables_and_votes_no_more(ensemble, weighting):
    """The rounds and the votes go on without it, and what it had stays in the export, to the bit."""
    start, member = ensemble
    kept = []
    for steps in (STEPS, 6):
        server = start(weighting=weighting, steps=steps)
        leaves = ("--leave", "6") if steps == STEPS else ()
        members = [member(server, rank, *(leaves if rank == 1 else ())) for rank in range(MEMBERS)]
        ended(server, members)
        kept.append(server.values())
    np.testing.assert_array_equal(kept[0]["member_1/kernel"], kept[1]["member_1/kernel"])
    assert not np.array_equal(kept[0]["member_0/kernel"], kept[1]["member_0/kernel"])


def test_the_vote_of_the_end_is_without_a_member_that_has_left(ensemble):
    start, member = ensemble
    server = start()
    members = [member(server, rank, *(("--leave", "6") if rank == 1 else ())) for rank in range(MEMBERS)]
    votes = ended(server, members)["ensemble"]
    assert (votes["step"], votes["alone"][1]) == (STEPS, None)
    assert 0 <= votes["plain_vote"] <= 1 and 0 <= votes["alone"][0] <= 1
    server.says(rf"step {STEPS}: weighted vote .* alone \d\.\d+ missing \d\.\d+")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch", "9"), ("all members must answer alike", "[9, 3]", "[8, 3]", "--batch-size")),
        (("--no-answers",), ("trains an ensemble", "logits")),
        (("--shared",), ("'shared/bias'", "the other members", "this worker")),
    ],
)
def test_who_cannot_be_a_member_is_refused_with_the_reason(ensemble, options, words):
    start, member = ensemble
    server = start(start_timeout=120)
    first = member(server, 0)
    server.says(r"rank 0 \(member-0\) on \S+ has joined")
    member(server, 1, *options).fails(3, *words)
    others = [member(server, rank) for rank in (1, 2)]
    ended(server, [first, *others])


def test_an_evaluator_is_refused(processes, ensemble):
    start, _ = ensemble
    server = start()
    command = ("-m", "worker", "--ps", server.address, "--role", "evaluator", "--threads", 1)
    processes.python("evaluator", *command).fails(3, "takes no evaluator", "measure themselves")


MASTER = """
import tensorflow as tf

def doubting(features, num_workers):
    kernel = tf.Variable(tf.zeros([features.shape[1], num_workers]))
    return tf.sigmoid(tf.matmul(features, kernel)) * tf.constant([0.8, 0.2, 0.2])
"""


@BOTH
def test_a_master_of_the_users_own_weighs_the_members(ensemble, tmp_path, weighting):
    """Untrained it gives 0.4, 0.1 and 0.1; member 0 is right as often as the others."""
    start, member = ensemble
    (tmp_path / "mine.py").write_text(MASTER)
    server = start(weighting=weighting, master=f"{tmp_path / 'mine.py'}:doubting")
    ended(server, [member(server, rank) for rank in range(MEMBERS)])
    weights = [list(line["weights"].values()) for line in rounds(server)]
    np.testing.assert_allclose(weights[0], [0.4, 0.1, 0.1], atol=1e-6)
    assert not np.allclose(weights[0], weights[-1], atol=1e-3), "it has not learned"
