"""The pure parts of the benchmarks of recovery: which moments are taken, and what becomes of them."""

from pathlib import Path

import pytest

from benchmarks.checkpoint_cost import PERIOD, Pair, alternating_pairs, mean_ms
from benchmarks.checkpoint_place import mounted_at
from benchmarks.many_workers import shares_of
from benchmarks.recovery import losses_table, restarts_table
from benchmarks.recovery_trials import Loss, Restart, goes_on_ns, step_times

MS = 1_000_000


def test_a_worker_goes_on_when_the_round_ends_that_the_lost_one_was_missing_from():
    assert goes_on_ns([3040, 3060], 0) == 3040  # it had not pushed: the first wait is the long one
    assert goes_on_ns([5, 3040], 0) == 3040  # its last push had arrived, and one more round closed with it
    assert goes_on_ns([1005, 1025], 1000) == 1025  # nobody waited


def test_step_times_leave_out_the_first_ones():
    assert step_times([0, 50, 52, 55, 59], skipped=2) == [3, 4]


def returns(periods_ms):
    """Return when values(1), values(2), ... came, each step of a period taking so many ms."""
    times, now = [], 0
    for step in range(1, PERIOD * len(periods_ms)):
        now += round(periods_ms[step // PERIOD] * MS)
        times.append(now)
    return times


def test_means_are_over_whole_periods():
    times = returns([1, 2, 4])
    assert mean_ms(times, PERIOD - 1, 2 * PERIOD - 1) == pytest.approx(2.0)
    assert mean_ms(times, PERIOD - 1, 3 * PERIOD - 1) == pytest.approx(3.0)


def test_a_period_with_a_checkpoint_is_compared_with_the_one_that_follows():
    # Checkpoints at steps 0 and 40 and 80: periods 2 and 4 pay for the last two; periods 0 and 1 are the warm-up.
    times = returns([9, 9, 11, 10, 24, 20, 1])
    written = {40: times[40 + 5], 80: times[80 + PERIOD + 3]}
    first, second = alternating_pairs(times, written)
    assert (first.with_ms, first.without_ms, first.is_valid) == (pytest.approx(11), pytest.approx(10), True)
    assert second.ratio == pytest.approx(1.2)
    assert not second.is_valid


def test_a_checkpoint_that_was_never_seen_makes_a_pair_invalid():
    (pair,) = alternating_pairs(returns([9, 9, 11, 10]), {})
    assert not pair.is_valid


def test_a_pair_is_a_ratio():
    assert Pair(11.0, 10.0).ratio == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/run", "ext4 at /"),
        ("/tmp/run", "tmpfs at /tmp"),
        ("/tmpfile", "ext4 at /"),
        ("/mnt/my disk/run", "xfs at /mnt/my disk"),
        ("/over/run", "overlay at /over"),
    ],
)
def test_the_innermost_mount_counts_and_the_latest_of_equal_ones(path, expected):
    mounts = "\n".join(
        [
            "/dev/a / ext4 rw 0 0",
            "none /tmp tmpfs rw 0 0",
            "/dev/b /mnt/my\\040disk xfs rw 0 0",
            "/dev/c /over ext4 rw 0 0",
            "none /over overlay rw 0 0",
        ]
    )
    assert mounted_at(Path(path), mounts) == expected


def test_shares_name_the_slowest_and_how_far_answers_lie_apart():
    even = [[0, 10 * MS, 20 * MS, 30 * MS], [0, 12 * MS, 22 * MS, 32 * MS]]
    shares = shares_of(even, 21, 53, 1)
    assert shares.pushes == (3, 3)
    assert (shares.step_ms, shares.longest_ms, shares.apart_ms) == (10, 10, 2)
    assert shares.is_fair


def test_whoever_gets_half_of_what_others_get_starves():
    busy, starved = [step * 10 * MS for step in range(21)], [step * 25 * MS for step in range(9)]
    shares = shares_of([busy, busy, starved], 1, 1, 1)
    assert (shares.apart_ms, shares.slowest_ms, shares.step_ms) == (None, 25, 10)
    assert not shares.is_fair


def test_the_table_says_what_is_too_late():
    kept, missed = losses_table(
        {"shrink/kill -9": [Loss(1.01, 0.02)], "shrink/link cut": [Loss(5.1, 0.02)]}, 5.0
    ).splitlines()[-2:]
    assert kept.endswith("| 1.02 | 20.0 | yes |")
    assert missed.endswith("| 5.02 | 20.0 | NO |")


def test_a_restart_may_take_three_seconds_and_the_reading():
    trial = Restart(1.0, 3.2, 3.4, 0.5, 0.1, "ext4 at /")
    assert restarts_table([trial]).endswith("first new step within 3.50 s: yes")
    slow = Restart(1.0, 3.2, 3.6, 0.5, 0.1, "ext4 at /")
    assert restarts_table([slow, slow, trial]).endswith("first new step within 3.50 s: NO")
