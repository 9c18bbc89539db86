"""What is remembered by name."""

import json

import numpy as np
import pytest

from ps.rules import ledger as module
from ps.rules.ledger import Ledger


def test_a_name_keeps_its_row_and_numbers_wherever_it_stands():
    ledger = Ledger({"x": 0.5})
    first = ledger.rows(("a", "b", "c"))
    ledger["x"][first] = [1.0, 2.0, 3.0]
    again = ledger.rows(("c", "d", "a"))
    assert ledger["x"][again].tolist() == [3.0, 0.5, 1.0]
    assert ledger.row("b") == first[1]
    assert ledger.row("nobody") is None
    assert len(ledger) == 4


def test_it_grows_and_new_pairs_are_the_identity():
    ledger = Ledger({"x": 0.0})
    ledger.pairs[np.ix_(ledger.rows(("a", "b")), ledger.rows(("a", "b")))] = 7.0
    rows = ledger.rows(tuple(f"w{i}" for i in range(100)))
    assert ledger.pairs[np.ix_(rows, rows)].tolist() == np.eye(100).tolist()
    assert ledger.pairs[ledger.row("a"), ledger.row("b")] == 7.0


def test_whoever_was_away_longest_is_forgotten_and_new_when_it_comes_back(monkeypatch):
    monkeypatch.setattr(module, "MOST_ABSENT", 3)
    ledger = Ledger({"x": 0.0})
    for guest in range(10):
        rows = ledger.rows(("stays", f"guest {guest}"))
        ledger["x"][rows] += 1.0
        ledger.pairs[rows[0], rows[1]] = 5.0
    assert len(ledger) == 5
    assert ledger["x"][ledger.row("stays")] == 10.0
    assert ledger.row("guest 5") is None
    serials = ledger.serials[ledger.serials >= 0]
    back = ledger.rows(("guest 5",))
    assert ledger["x"][back].tolist() == [0.0]
    assert ledger.pairs[back[0]].sum() == ledger.pairs[back[0], back[0]] == 1.0
    assert ledger.serials[back[0]] not in serials


def test_all_who_are_present_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "MOST_ABSENT", 3)
    ledger = Ledger({"x": 0.0})
    names = tuple(f"w{i}" for i in range(50))
    rows = ledger.rows(names)
    ledger["x"][rows] = np.arange(50.0)
    assert ledger["x"][ledger.rows(names)].tolist() == list(range(50))


@pytest.mark.parametrize("guests", [3, 20])
def test_a_restored_ledger_is_the_same_to_the_row(guests, monkeypatch):
    monkeypatch.setattr(module, "MOST_ABSENT", 5)
    ledger = Ledger({"x": 0.0, "y": float("nan")})
    for guest in range(guests):
        rows = ledger.rows(("stays", f"guest {guest}"))
        ledger["x"][rows] += 1.0
    other = Ledger({"x": 0.0, "y": float("nan")})
    other.restore(json.loads(json.dumps(ledger.state(), default=lambda array: array.tolist())))
    for _ in range(8):
        for names in (("stays", "guest 1"), ("new", "stays")):
            assert other.rows(names).tolist() == ledger.rows(names).tolist()
            assert other.serials.tolist() == ledger.serials.tolist()
            assert other["x"].tolist() == ledger["x"].tolist()


def test_of_those_away_equally_long_a_restored_ledger_forgets_the_same(monkeypatch):
    """Rows are used again, so the order of rows is not that in which the names came."""
    monkeypatch.setattr(module, "MOST_ABSENT", 3)
    ledger = Ledger({"x": 0.0})
    for names in (("a", "b"), ("c", "d", "e"), ("f",), ("g", "h"), ("f", "g"), ("stays",)):
        ledger.rows(names)
    assert ledger.row("g") < ledger.row("f")
    other = Ledger({"x": 0.0})
    other.restore(ledger.state())
    for guest in range(5):
        for each in (ledger, other):
            each.rows(("stays", f"guest {guest}"))
        known = [[each.row(name) for name in "abcdefgh"] for each in (ledger, other)]
        assert known[0] == known[1]
