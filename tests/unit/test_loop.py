"""What a worker says while it waits, with a made-up clock."""

from worker.loop import REPEAT_S, WaitLog


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
