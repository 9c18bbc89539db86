"""Holds the figures of the robustness benchmark against what is claimed of the master. Pure."""

from dataclasses import dataclass

from benchmarks.robustness_cells import BAD, DATASETS, EVERY, FAULTS, HONEST_FAULTS, NEVER, Cell
from benchmarks.robustness_results import Results
from benchmarks.robustness_tables import (
    Points,
    decimal,
    differences,
    gaps,
    mean,
    mutings,
    name_of,
    rounds_of,
    sorted_by_points,
    standard,
)

OPEN_FAULTS = ("sleeper", "intermittent")


@dataclass(frozen=True)
class Claim:
    """A line of what is claimed.

    Attributes:
        what: is measured.
        wanted: in words.
        measured: in words; empty if nothing is known yet.
        met: by what is known so far; None if nothing is, or nothing is wanted.
    """

    what: str
    wanted: str
    measured: str = ""
    met: bool | None = None


def check_claims(results: Results) -> list[Claim]:
    """Return every claim with what is known of it."""
    known = standard(results)
    return [
        *(claim for bad in BAD for k in EVERY for claim in _close_to_clean(known, bad, k)),
        *(_above_cosine_trust(known, k, wanted) for k, wanted in zip(EVERY, (0.8, 4.0), strict=True)),
        *(_nobody_bad(known, k, limit) for k, limit in zip(EVERY, (0.5, 1.5), strict=True)),
        _honest_faults(known),
        *(_muted(known, bad, k, limit) for bad in BAD for k, limit in zip(EVERY, (6, 20), strict=True)),
        _worth_of_network(known),
    ]


def is_open(setup: Cell) -> bool:
    """Say whether a setup is known to fail: on Fashion-MNIST four sleepers, or four intermittent, at K = 10."""
    where = (setup.dataset, setup.validator_every, setup.bad)
    return where == ("fashion", 10, 4) and setup.fault in OPEN_FAULTS


def _close_to_clean(results: Results, bad: int, k: int) -> list[Claim]:
    cells = {s: p for s, p in gaps(results).items() if (s.rule, s.validator_every, s.bad) == ("master", k, bad)}
    closed = {setup: points for setup, points in cells.items() if not is_open(setup)}
    opened = {setup: points for setup, points in cells.items() if is_open(setup)}
    all_cells = [Cell(d, "master", fault, bad, k, True, 0) for d in DATASETS for fault in FAULTS]
    limit = 3.0 if (bad, k) == (4, 10) else 2.0
    what = f"master K={k}, {bad} of 5 bad: points below clean"
    first = _at_most(what, closed, sum(not is_open(cell) for cell in all_cells), limit, 1.0 if bad == 2 else None)
    text = "; ".join(f"{name_of(setup)} {decimal(points)}" for setup, points in sorted_by_points(opened))
    return [first, Claim(f"{what}, open cells", "reported", text)] if any(map(is_open, all_cells)) else [first]


def _above_cosine_trust(results: Results, k: int, mean_wanted: float) -> Claim:
    cells = {s: p for s, p in differences(results, "master", "cosine_trust").items() if s.validator_every == k}
    closed = {setup: points for setup, points in cells.items() if not is_open(setup)}
    what, wanted = f"master minus cosine trust, K={k}", f"each ≥ -0.5 but for open cells, mean ≥ {mean_wanted}"
    if not closed:
        return Claim(what, wanted)
    setup, lowest = sorted_by_points(closed)[0]
    average = mean(cells.values())
    of = len(DATASETS) * (2 + len(BAD) * len(FAULTS))
    text = f"lowest {decimal(lowest, sign=True)} ({name_of(setup)}), mean {decimal(average, sign=True)} over "
    return Claim(what, wanted, f"{text}{len(cells)} of {of} cells", lowest >= -0.5 and average >= mean_wanted)


def _nobody_bad(results: Results, k: int, limit: float) -> Claim:
    cells = {s: p for s, p in gaps(results).items() if (s.rule, s.validator_every, s.bad) == ("master", k, 0)}
    what = f"master K={k}, nobody bad, like and unlike shards: points below the mean"
    return _at_most(what, cells, 2 * len(DATASETS), limit)


def _honest_faults(results: Results) -> Claim:
    cells = {
        s: p
        for s, p in gaps(results).items()
        if (s.rule, s.validator_every, s.bad) == ("master", NEVER, 2) and s.fault in HONEST_FAULTS
    }
    what, wanted = (
        "master without validator, 2 of 5 honest faults: points below clean",
        "each ≤ 1.0, noisy inputs ≤ 1.5",
    )
    if not cells:
        return Claim(what, wanted)
    text = "; ".join(f"{name_of(setup)} {decimal(points)}" for setup, points in cells.items())
    met = all(points <= (1.5 if setup.fault == "noisy_inputs" else 1.0) for setup, points in cells.items())
    return Claim(what, wanted, text, met)


def _muted(results: Results, bad: int, k: int, limit: int) -> Claim:
    cells = {s: m for s, m in mutings(results).items() if (s.rule, s.validator_every, s.bad) == ("master", k, bad)}
    what, wanted = f"{bad} of 5 sleepers, master K={k}: rounds until muted, by seed", f"≤ {limit}"
    times = [first for muting in cells.values() for first in muting.first]
    text = "; ".join(f"{setup.dataset} {rounds_of(muting.first)}" for setup, muting in cells.items())
    if bad != 2:
        return Claim(what, "reported", text)
    met = all(first is not None and first <= limit for first in times) if times else None
    return Claim(what, wanted, text, met)


def _worth_of_network(results: Results) -> Claim:
    cells = differences(results, "master", "evidence")
    what = "the network's own worth: master minus evidence"
    if not cells:
        return Claim(what, "reported")
    (low, least), *_, (high, most) = [*sorted_by_points(cells), sorted_by_points(cells)[-1]]
    text = f"mean {decimal(mean(cells.values()), 2, sign=True)} over {len(cells)} cells, "
    text += (
        f"lowest {decimal(least, sign=True)} ({name_of(low)}), highest {decimal(most, sign=True)} ({name_of(high)})"
    )
    return Claim(what, "reported", text)


def _at_most(what: str, cells: Points, of: int, limit: float, mean_limit: float | None = None) -> Claim:
    wanted = f"each ≤ {limit}" + ("" if mean_limit is None else f", mean ≤ {mean_limit}")
    if not cells:
        return Claim(what, wanted)
    setup, worst = sorted_by_points(cells)[-1]
    average = mean(cells.values())
    text = f"worst {decimal(worst)} ({name_of(setup)}), mean {decimal(average)} over {len(cells)} of {of} cells"
    return Claim(what, wanted, text, worst <= limit and (mean_limit is None or average <= mean_limit))
