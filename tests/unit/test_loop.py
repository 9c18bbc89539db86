"""What a worker says while it waits, with a made-up clock; and how its loops go on when the server starts anew."""

from types import SimpleNamespace

from worker.client import Update
from worker.loop import REPEAT_S, WaitLog, evaluate, train


def test_a_wait_is_repeated_rarely_and_another_kind_of_wait_is_told_at_once():
    said, now = [], [100.0]
    log = WaitLog(said.append, lambda: now[0])

    def hear(waiting, after_s):
        now[0] += after_s
        log(waiting)

    hear("the start waits for rank 0 since 1 s", 0)
    hear("the start waits for rank 0 since 2 s", 1)
    hear("round 4 waits for rank 1 since 1 s (rank 1 lost, may return within 119 s)", 1)
    hear("round 5 waits for rank 2 since 1 s", REPEAT_S - 1)
    assert [line.split(" since ")[0] for line in said] == [
        "waiting: the start waits for rank 0",
        "waiting: round 4 waits for rank 1",
    ]
    hear("round 6 waits for rank 2 since 1 s", 1)
    assert said[-1] == "waiting: round 6 waits for rank 2 since 1 s"


# ---- the loops over a restart of the server ------------------------------------------------------------


class ReplayingServer:
    """Answers with updates made beforehand, and takes note of what it was asked."""

    def __init__(self, *updates):
        self.updates = list(updates)
        self.asked = []
        self.reported = []

    def pull(self, min_step=0):
        self.asked.append(min_step)
        return self.updates.pop(0)

    def push_buffers(self, payload, *, loss, accuracy, examples):
        self.asked.append(payload)
        return self.updates.pop(0)

    def report(self, step, loss, accuracy, examples):
        self.reported.append(step)


def update(step, applied=True, restarted=False, done=False):
    return Update(step, SimpleNamespace(buffer=None), applied, "", restarted, done)


def test_a_worker_is_sent_back_and_says_so_once():
    said = []
    server = ReplayingServer(
        update(41), update(40, restarted=True, applied=False), update(41), update(42, done=True)
    )
    last = train(
        server, lambda values, step: SimpleNamespace(buffers=step, loss=0, accuracy=None, examples=1), said.append
    )
    assert last.step == 42
    assert server.asked == [0, 41, 40, 41], "what it pushes is of the step that it was sent back to"
    assert said == ["the server has started anew: going on from step 40"]


def test_an_evaluator_that_has_measured_a_later_step_measures_that_of_a_new_start():
    said = []
    server = ReplayingServer(update(60), update(40, restarted=True), update(60), update(80, done=True))
    evaluator = SimpleNamespace(evaluate=lambda *_: SimpleNamespace(loss=0.5, accuracy=None, examples=1))
    dataset = SimpleNamespace(test_features=None, test_labels=None)
    evaluate(server, evaluator, dataset, 20, said.append)
    assert server.asked == [0, 80, 60, 80]
    assert server.reported == [60, 40, 60, 80]
    assert said[1] == "the server has started anew: going on from step 40"
