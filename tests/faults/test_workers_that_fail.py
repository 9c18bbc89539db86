"""Workers that die, stop, or come twice: the values are those of an undisturbed run, or the run ends by name."""

import signal

from tests.faults.light_worker import value_at
from tests.faults.runs import QUICK_BEATS, assert_done, assert_values, light, serve

TWO_BLOCKS = 600_000
"""Elements of a push of 2.4 MB: half of it is more than one block of the server's receiver."""


def test_killed_in_mid_push_and_started_again_gives_the_same_values(processes):
    server = serve(processes, workers=2, steps=5)
    size = ("--size", TWO_BLOCKS)
    zero = light(processes, server.address, 0, *size, workers=2)
    one = light(processes, server.address, 1, *size, "--die-in-push", 2, workers=2)
    assert one.ends() == -signal.SIGKILL
    one.says(r"dies after 1200\d+ of 2400\d+ bytes")
    server.says(r"rank 1 \(.*\) is lost: .* closed the connection; it may return within 120 s")
    again = light(processes, server.address, 1, *size, workers=2)
    for process in (zero, again):
        process.ends_with(0)
    rows = assert_done(server, workers=2, steps=5)
    assert rows[1]["pushes"] == 5 and rows[1]["duplicates"] == rows[1]["stale"] == 0
    server.says(r"rank 1 \(.*\) on .* has returned")
    assert server.summary()["deterministic"] is True


def test_killed_in_mid_push_and_not_started_again_ends_the_run_for_all(processes):
    server = serve(processes, workers=2, steps=5, rejoin_timeout=1)
    zero = light(processes, server.address, 0, workers=2)
    one = light(processes, server.address, 1, "--die-in-push", 2)
    assert one.ends() == -signal.SIGKILL
    zero.says(r"round 2 waits for rank 1 since \d+ s \(rank 1 lost, may return within \d s\)")
    zero.ends_with(7)
    server.ends_with(7)
    why = r"rank 1 \(\S+\) was lost at step 2 \(.*\) and has not returned within 1 s"
    assert len(server.errors) == len(zero.errors) == 1
    server.says(rf"weighmaster-ps: the run ended at step 2: {why}$")
    zero.says(rf"light worker: the server at {server.address} ended the run: {why}$")
    summary = server.summary()
    assert (summary["status"], summary["steps"]) == ("lost", 2)
    assert not server.export.exists()


def test_a_worker_that_computes_while_the_run_ends_hears_why_when_it_pushes(processes):
    server = serve(processes, workers=2, steps=5, rejoin_timeout=1)
    zero = light(processes, server.address, 0, "--size", TWO_BLOCKS, "--pause-at", 2)
    one = light(processes, server.address, 1, "--size", TWO_BLOCKS, "--die-in-push", 2)
    zero.says("paused at step 2")
    one.ends()
    server.ends_with(7)
    zero.tell()
    zero.ends_with(7)
    zero.says("ended the run: rank 1 .* was lost at step 2")


def test_a_push_whose_worker_dies_before_the_reply_counts_once(processes):
    server = serve(processes, workers=2, steps=5)
    zero = light(processes, server.address, 0, "--pause-at", 2, workers=2)
    one = light(processes, server.address, 1, "--die-after-push", 2, workers=2)
    assert one.ends() == -signal.SIGKILL
    server.says(r"rank 1 \(.*\) is lost")
    again = light(processes, server.address, 1, workers=2)
    again.says("round 2 waits for rank 0")
    zero.tell()
    again.says("answered with step 4")
    for process in (zero, again):
        process.ends_with(0)
    assert "answered with step 3" not in again.log, "the new process begins at values(3)"
    assert assert_done(server, workers=2, steps=5)[1]["pushes"] == 5


def test_who_joins_a_finished_run_gets_the_final_values_at_once(processes):
    server = serve(processes, workers=2, steps=3)
    zero = light(processes, server.address, 0, workers=2)
    one = light(processes, server.address, 1, "--die-after-push", 2, workers=2)
    one.ends()
    zero.ends_with(0)
    again = light(processes, server.address, 1, workers=2)
    again.says("done at step 3")
    again.ends_with(0)
    assert assert_done(server, workers=2, steps=3)[1]["pushes"] == 3


def test_the_end_of_the_run_names_who_did_not_say_goodbye(processes):
    server = serve(processes, workers=2, steps=3, drain_timeout=3)
    light(processes, server.address, 0, workers=2)
    one = light(processes, server.address, 1, "--die-after-push", 2, workers=2)
    one.ends()
    assert_done(server, workers=2, steps=3)
    server.says("rank 1 did not take leave after the last step")


def test_a_stopped_worker_is_lost_by_name_and_goes_on_when_it_continues(processes):
    server = serve(processes, workers=2, steps=5, **QUICK_BEATS)
    zero = light(processes, server.address, 0, workers=2)
    one = light(processes, server.address, 1, "--stop-at", 2, workers=2)
    one.says("stopped at step 2")
    server.says(r"rank 1 \(.*\) is lost: nothing was heard of 127\.0\.0\.1:\d+ for \d+ s")
    one.send(signal.SIGCONT)
    one.says("connected to the server")
    for process in (zero, one):
        process.ends_with(0)
    assert_done(server, workers=2, steps=5)
    server.says(r"rank 1 \(.*\) on .* has returned")


def test_a_second_process_of_a_rank_that_is_alive_is_refused_by_name(processes):
    server = serve(processes, workers=1, steps=3, heartbeat_interval=2)
    holder = light(processes, server.address, 0, "--pause-at", 1, "--name", "site-a", workers=1)
    holder.says("paused at step 1")
    newcomer = light(processes, server.address, 0)
    newcomer.says(r"rank 0 \(site-a\) on \S+ holds this rank; asking whether it is alive")
    newcomer.ends_with(3)
    assert len(newcomer.errors) == 1
    newcomer.says(r"refused: rank 0 \(site-a\) on \S+ is alive and holds this rank; give another --rank")
    holder.tell()
    holder.ends_with(0)
    assert "lost" not in holder.log
    assert_done(server, workers=1, steps=3)


def test_a_silent_process_is_replaced_by_a_new_one_of_its_rank(processes):
    server = serve(processes, workers=1, steps=4, heartbeat_interval=1, heartbeat_timeout=600)
    old = light(processes, server.address, 0, "--stop-at", 1, "--name", "site-a", workers=1)
    old.says("stopped at step 1")
    new = light(processes, server.address, 0, "--pause-at", 2, "--name", "site-a", workers=1)
    new.says("paused at step 2")
    server.says(r"rank 0 \(site-a\) is lost")
    old.send(signal.SIGCONT)
    old.ends_with(3)
    old.says("alive and holds this rank")
    new.tell()
    new.ends_with(0)
    assert assert_done(server, workers=1, steps=4)[0]["pushes"] == 4


# ---- gradients that are not finite ---------------------------------------------------------------------


def test_a_gradient_with_nan_is_refused_and_named_and_the_run_goes_on(processes):
    server = serve(processes, workers=2, steps=5)
    zero = light(processes, server.address, 0)
    one = light(processes, server.address, 1, "--nan-at", 2)
    for process in (zero, one):
        process.ends_with(0)
    server.ends_with(0)
    server.says(r"rank 1 \(.*\): push of step 2 refused: the gradient of '[wb]' is not finite")
    assert_values(server, value_at(5, 2, lambda step: [0] if step == 2 else [0, 1]))
    summary = server.summary()
    assert [row["rejected"] for row in summary["workers"]] == [0, 1]
    assert [row["pushes"] for row in summary["workers"]] == [5, 5]
    assert (summary["void_rounds"], summary["short_rounds"]) == (0, 1)


def test_ten_rounds_of_nothing_but_nan_end_server_and_workers_as_diverged(processes):
    server = serve(processes, workers=2, steps=100)
    workers = [light(processes, server.address, rank, "--nan-always") for rank in range(2)]
    for worker in workers:
        worker.ends_with(5)
        assert len(worker.errors) == 1
        worker.says(r"ended the run: 10 rounds in a row had nothing to apply \(ranks 0 and 1: the gradient of")
    server.ends_with(5)
    summary = server.summary()
    assert (summary["status"], summary["void_rounds"], summary["steps"]) == ("diverged", 10, 10)
    assert not server.export.exists()


# ---- the server dies -----------------------------------------------------------------------------------


def test_workers_of_a_killed_server_end_with_one_sentence(processes):
    server = serve(processes, workers=2, steps=5)
    waits = light(processes, server.address, 0, "--reconnect-timeout", 1)
    computes = light(processes, server.address, 1, "--reconnect-timeout", 1, "--pause-at", 1)
    waits.says("round 1 waits for rank 1")
    computes.says("paused at step 1")
    server.kill()
    computes.tell()
    for process in (waits, computes):
        process.ends_with(4)
        (sentence,) = process.errors
        assert sentence.startswith("light worker: the server at 127.0.0.1:")
        assert "could not be reached for 1 s" in sentence
