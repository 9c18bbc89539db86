"""Large messages, many workers, readers that do not read: nothing is lost, nobody holds up the others."""

from tests.faults.runs import assert_done, light, serve

MILLION = 1_000_000


def test_a_message_of_more_than_64_mb_arrives_whole(processes):
    server = serve(processes, workers=1, steps=2)
    worker = light(processes, server.address, 0, "--size", 18 * MILLION, workers=1)
    server.says(r"2 variables of 72\.0 MB")
    worker.ends_with(0)
    assert_done(server, workers=1, steps=2)


def test_sixteen_workers_give_the_mean_of_sixteen(processes):
    server = serve(processes, workers=16, steps=3)
    workers = [light(processes, server.address, None, workers=16) for _ in range(16)]
    for worker in workers:
        worker.ends_with(0)
    rows = assert_done(server, workers=16, steps=3)
    assert sorted(rows) == list(range(16))
    assert all((row["pushes"], row["weight"]) == (3, 0.0625) for row in rows.values())


def test_readers_that_do_not_read_are_cut_off_and_the_run_goes_on(processes):
    """Each of two evaluators pins a version; the third version is current, so the next update needs one back."""
    server = serve(processes, workers=1, steps=5, heartbeat_timeout=600)
    size = ("--size", 10 * MILLION)
    worker = light(processes, server.address, 0, *size, "--pause-at", 0, 1, workers=1)
    readers = []
    for step in (0, 1):
        worker.says(f"paused at step {step}")
        words = (*size, "--role", "evaluator", "--never-read", "--pull", step)
        readers.append(light(processes, server.address, None, *words))
        readers[-1].says("does not read")
        worker.tell()
    server.says("an evaluator is lost: it held up an update: it was too slow")
    worker.ends_with(0)
    for reader in readers:
        reader.tell()
        reader.ends()
    assert_done(server, workers=1, steps=5)
