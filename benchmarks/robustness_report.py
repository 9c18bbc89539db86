"""Writes the tables of the robustness benchmark as Markdown. Pure."""

from collections.abc import Iterable, Sequence

from benchmarks.robustness_cells import BAD, DATASETS, NEVER, RULES, TENSORFLOW, VALIDATED_RULES, Cell
from benchmarks.robustness_claims import check_claims
from benchmarks.robustness_results import Results
from benchmarks.robustness_tables import (
    Average,
    Points,
    averages,
    decimal,
    differences,
    fault_order,
    framework_differences,
    gaps,
    mean,
    mutings,
    name_of,
    rounds_of,
    sorted_by_points,
    standard,
    words,
)

TITLES = {"digits": "Digits", "fashion": "Fashion-MNIST, first 10,000 images"}

HEAD = """<!-- Written by `python -m benchmarks.robustness --report`; do not edit. -->

Five workers and a validator as real processes; accuracy on the test data in percent, mean over seeds and over the
last five evaluations. *Clean* is the mean over the good workers only. K is the mean distance of validated rounds.
Gaps and differences are in percentage points, taken seed by seed. † A run ended as diverged; its accuracy is that
of its last values. Trimmed mean, Krum and multi-Krum are told the true number of bad workers as far as they allow
it: of 5 workers 2, 1 and 1.
"""

EXTREMES = 3
"""Cells that are named at either end of a list of differences."""


def markdown(results: Results) -> str:
    """Return the whole fragment."""
    known = standard(results)
    sections = [
        HEAD,
        _section("What is claimed, and what was measured", _claims(known)),
        *(_accuracies(known, dataset) for dataset in DATASETS),
        _section("Gap to clean by rule", _gaps(known)),
        _section("Without a validator", _unvalidated(known)),
        _section("One rule against another", _differences(known)),
        _section("Sleepers: rounds from the turn until muted", _mutings(known)),
        _section("Other situations", _others(results)),
        _section("The same cells with TensorFlow workers", _tensorflow(results)),
    ]
    return "\n".join(section for section in sections if section)


def _section(title: str, body: str) -> str:
    return f"### {title}\n\n{body}" if body else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, or nothing if it has no rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) + "\n"


def _claims(results: Results) -> str:
    verdicts = {True: "yes", False: "**no**", None: ""}
    rows = [[c.what, c.wanted, c.measured or "not measured yet", verdicts[c.met]] for c in check_claims(results)]
    return table(["what", "wanted", "measured", "met"], rows)


# ---- accuracies ----------------------------------------------------------------------------------------

Column = tuple[str, int]
"""Rule and mean distance of validated rounds."""


def columns_of(setups: Iterable[Cell]) -> list[Column]:
    """Return rules in their order, each with its distances ascending; no validator is for tables of its own."""
    present = {(s.rule, s.validator_every) for s in setups if s.rule not in VALIDATED_RULES or s.validator_every}
    return sorted(present, key=lambda column: (RULES.index(column[0]), column[1]))


def _accuracies(results: Results, dataset: str) -> str:
    known = {setup: average for setup, average in averages(results).items() if setup.dataset == dataset}
    judged = [setup for setup in known if setup != setup.clean]
    columns = columns_of(judged)
    situations = sorted(
        {(s.bad, not s.alike, s.fault) for s in judged}, key=lambda key: (key[0], key[1], fault_order(key[2]))
    )
    rows = []
    for bad, unlike, fault in situations:
        cells = {
            (s.rule, s.validator_every): a
            for s, a in known.items()
            if (s.bad, not s.alike, s.fault) == (bad, unlike, fault)
        }
        clean = next((s.clean for s in judged if (s.bad, not s.alike, s.fault) == (bad, unlike, fault)), None)
        first = known.get(clean) if clean is not None else None
        kind = words(fault) if bad else "nobody bad" + (", unlike shards" if unlike else "")
        rows.append([kind, str(bad), _percent(first), *(_percent(cells.get(column)) for column in columns)])
    heads = [f"{words(rule)} K={k}" if k else words(rule) for rule, k in columns]
    if rows:
        rows.append(["*seeds*", "", _seeds(known, None), *(_seeds(known, column) for column in columns)])
    return _section(TITLES[dataset], table(["fault", "bad", "clean", *heads], rows))


def _percent(average: Average | None) -> str:
    if average is None:
        return ""
    return f"{100 * average.accuracy:.1f}" + ("†" if average.diverged else "")


def _seeds(known: dict[Cell, Average], column: Column | None) -> str:
    counts = {
        average.seeds
        for setup, average in known.items()
        if (column is None and setup == setup.clean) or column == (setup.rule, setup.validator_every)
    }
    return " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else ""


# ---- gaps and differences ------------------------------------------------------------------------------


def _gaps(results: Results) -> str:
    known = gaps(results)
    rows = []
    for rule, k in columns_of(known):
        for bad in (0, *BAD):
            cells = {s: p for s, p in known.items() if (s.rule, s.validator_every, s.bad) == (rule, k, bad)}
            if cells:
                setup, worst = sorted_by_points(cells)[-1]
                name = f"{words(rule)} K={k}" if k else words(rule)
                rows.append(
                    [name, str(bad), decimal(mean(cells.values())), decimal(worst), name_of(setup), str(len(cells))]
                )
    return table(["rule", "bad", "mean gap", "worst gap", "where", "cells"], rows)


def _unvalidated(results: Results) -> str:
    asked = [s for s in gaps(results) if s.rule in VALIDATED_RULES and s.validator_every == NEVER]
    known = averages(results)
    rows = []
    for setup in sorted(asked, key=lambda s: (s.dataset, s.bad, not s.alike, fault_order(s.fault), s.rule)):
        clean = known.get(setup.clean)
        rows.append([name_of(setup), setup.rule, _percent(clean), _percent(known[setup]), str(known[setup].seeds)])
    return table(["cell", "rule", "clean", "accuracy", "seeds"], rows)


def _differences(results: Results) -> str:
    rows = []
    for other in ("cosine_trust", "evidence", "mean"):
        points = differences(results, "master", other)
        for k in sorted({setup.validator_every for setup in points}):
            cells = {setup: value for setup, value in points.items() if setup.validator_every == k}
            name = f"master minus {words(other)}, " + (f"K={k}" if k else "no validator")
            rows.append(
                [
                    name,
                    decimal(mean(cells.values()), 2, sign=True),
                    _named(cells, lowest=True),
                    _named(cells, lowest=False),
                    str(len(cells)),
                ]
            )
    return table(["difference", "mean", "lowest", "highest", "cells"], rows)


def _named(cells: Points, lowest: bool) -> str:
    ordered = sorted_by_points(cells)
    chosen = ordered[:EXTREMES] if lowest else ordered[::-1][:EXTREMES]
    return "; ".join(f"{decimal(points, sign=True)} {name_of(setup)}" for setup, points in chosen)


def _mutings(results: Results) -> str:
    found = mutings(results)
    rows = [
        [
            setup.dataset,
            words(setup.rule),
            str(setup.validator_every),
            str(setup.bad),
            rounds_of(muting.first),
            rounds_of(muting.lasting),
            f"{muting.mean_bad_weight:.2f}",
        ]
        for setup, muting in sorted(
            found.items(), key=lambda item: (item[0].dataset, item[0].rule, item[0].validator_every, item[0].bad)
        )
    ]
    head = ["data", "rule", "K", "bad", "first muted", "muted for good", "mean weight of the bad afterwards"]
    return table(head, rows)


def _others(results: Results) -> str:
    usual = standard(results)
    rest = {
        cell: outcome for cell, outcome in results.items() if cell not in usual and cell.framework != TENSORFLOW
    }
    known, below = averages(rest), gaps(rest)
    rows = []
    for setup, points in sorted(
        below.items(), key=lambda item: (item[0].describe().partition(",")[0], name_of(item[0]))
    ):
        size = f"{setup.bad} of {setup.workers}, {setup.trusted} trusted"
        rule = f"{words(setup.rule)} K={setup.validator_every}" if setup.validator_every else words(setup.rule)
        rows.append([name_of(setup), size, rule, _percent(known[setup]), decimal(points), str(known[setup].seeds)])
    return table(["cell", "size", "rule", "accuracy", "below clean", "seeds"], rows)


def _tensorflow(results: Results) -> str:
    rows = []
    for cell, points in framework_differences(results).items():
        rule = f"{words(cell.rule)} K={cell.validator_every}" if cell.validator_every else words(cell.rule)
        final = 100 * results[cell].final_accuracy
        rows.append(
            [
                name_of(cell),
                rule,
                str(cell.seed),
                decimal(final - points),
                decimal(final),
                decimal(points, sign=True),
            ]
        )
    return table(["cell", "rule", "seed", "final accuracy, NumPy", "TensorFlow", "difference"], rows)
