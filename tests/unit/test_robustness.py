"""The pure parts of the robustness benchmark: its grid, data, model, and how figures become tables and verdicts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import numpy_mlp
from benchmarks.processes import BenchmarkError
from benchmarks.robustness_cells import (
    ABSENT,
    FAULTS,
    NEVER,
    NONE,
    RULES,
    TENSORFLOW,
    Cell,
    Choice,
    claims,
    grid,
    tensorflow_pairs,
)
from benchmarks.robustness_claims import check_claims
from benchmarks.robustness_data import holders, save, shard_of, trusted_examples
from benchmarks.robustness_lane import jobs, server_command
from benchmarks.robustness_report import columns_of, markdown, table
from benchmarks.robustness_results import Muting, Outcome, ResultFile, Results, line_of, muting_of, parse
from benchmarks.robustness_tables import (
    averages,
    decimal,
    differences,
    framework_differences,
    gaps,
    mutings,
    setup_of,
    standard,
)
from benchmarks.robustness_tensorflow import measured, worker_commands
from benchmarks.robustness_worker import VALIDATOR, Computer, Job
from worker.batches import Shard
from worker.definitions import Dataset
from worker.faults import FAULTS as KNOWN_FAULTS

CELL = Cell("digits", "master", "sign_flip", 2, 10, True, 11)


def outcome(accuracy: float, muting: Muting | None = None, done: bool = True) -> Outcome:
    return Outcome(accuracy=accuracy, final_accuracy=accuracy, done=done, seconds=1.0, muting=muting)


# ---- cells ---------------------------------------------------------------------------------------------


def test_every_fault_of_the_grid_exists_and_only_the_slow_one_is_left_out() -> None:
    assert set(KNOWN_FAULTS) - set(FAULTS) == {"slow"}
    assert set(FAULTS) <= set(KNOWN_FAULTS)


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_bad_ranks_depend_on_the_seed_alone(bad: int) -> None:
    ranks = replace(CELL, bad=bad).bad_ranks
    assert len(set(ranks)) == bad and set(ranks) <= set(range(5))
    assert ranks == replace(CELL, bad=bad, rule="mean", fault=ABSENT, dataset="fashion").bad_ranks
    drawn = {replace(CELL, bad=2, seed=seed).bad_ranks for seed in range(20)}
    assert len(drawn) > 3  # not always the same ones


def test_mixed_faults_are_handed_out_in_turn_to_bad_ranks_only() -> None:
    cell = replace(CELL, bad=4, fault="zero+liar")
    assert [cell.fault_of(rank) for rank in cell.bad_ranks] == ["zero", "liar", "zero", "liar"]
    (good,) = set(range(5)) - set(cell.bad_ranks)
    assert cell.fault_of(good) == NONE


def test_the_clean_run_is_the_mean_of_the_good_and_its_own_clean_run() -> None:
    clean = CELL.clean
    assert (clean.rule, clean.fault, clean.validator_every, clean.bad) == ("mean", ABSENT, NEVER, 2)
    assert clean.clean == clean
    assert replace(CELL, bad=0, fault=NONE).clean.fault == NONE
    assert replace(CELL, framework=TENSORFLOW).clean == clean


@pytest.mark.parametrize(
    ("rule", "bad", "told"),
    [("trimmed_mean", 2, 2), ("trimmed_mean", 4, 2), ("trimmed_mean", 0, 1), ("krum", 2, 1), ("multi_krum", 4, 1)],
)
def test_rules_are_told_as_many_bad_workers_as_they_allow(rule: str, bad: int, told: int) -> None:
    assert replace(CELL, rule=rule, bad=bad).told_faulty == told


def test_other_rules_are_not_told_how_many_are_bad() -> None:
    told = {rule for rule in RULES if replace(CELL, rule=rule).told_faulty is not None}
    assert told == {"trimmed_mean", "krum", "multi_krum"}


def test_the_grid_has_each_cell_once_and_the_clean_run_before_it() -> None:
    cells = grid(Choice())
    assert len(cells) == len(set(cells))
    for cell in cells:
        assert cells.index(cell.clean) <= cells.index(cell)
    assert {cell.rule for cell in cells} == set(RULES)
    assert not any(cell.validator_every for cell in cells if cell.rule == "median")
    assert {cell.validator_every for cell in cells if cell.rule == "cosine_trust"} == {1, 10}


def test_the_claimed_cells_cover_every_claim() -> None:
    known = {cell: outcome(0.9, Muting(3, 3, 0.0) if cell.fault == "sleeper" else None) for cell in claims()}
    found = check_claims(known)
    assert all(claim.measured for claim in found)
    counts = [claim.measured.rpartition(" over ")[2] for claim in found if " of " in claim.measured]
    assert counts == [
        "28 of 28 cells", "28 of 28 cells", "28 of 28 cells", "26 of 26 cells", "60 of 60 cells", "60 of 60 cells",
        "4 of 4 cells", "4 of 4 cells",
    ]  # fmt: skip


def test_a_tensorflow_cell_has_the_numpy_cell_beside_it() -> None:
    pairs = tensorflow_pairs((1,))
    assert len(pairs) == 16
    for numpy_cell, tensorflow_cell in zip(pairs[::2], pairs[1::2], strict=True):
        assert tensorflow_cell == replace(numpy_cell, framework=TENSORFLOW)


# ---- data ----------------------------------------------------------------------------------------------


def labels_of(count: int) -> NDArray[np.int32]:
    return np.random.default_rng(5).integers(0, 10, count).astype(np.int32)


@pytest.mark.parametrize("alike", [True, False])
def test_shards_are_disjoint_and_leave_the_trusted_examples_out(alike: bool) -> None:
    labels = labels_of(1000)
    shards = [shard_of(labels, rank, 5, 11, 100, alike) for rank in range(5)]
    ids = np.concatenate([shard.ids for shard in shards])
    dataset = Dataset(np.arange(1000)[:, None], labels, np.zeros((1, 1)), labels[:1])
    trusted, _ = trusted_examples(dataset, 100, 11)
    assert sorted([*ids, *trusted[:, 0]]) == list(range(1000))


def test_like_shards_are_those_of_the_product() -> None:
    labels = labels_of(1000)
    assert np.array_equal(shard_of(labels, 3, 5, 11, 100, True).ids, Shard.of(1000, 3, 5, 11, 100).ids)


def test_in_unlike_shards_each_rank_owns_two_classes_and_a_tenth_is_foreign() -> None:
    labels = labels_of(10_000)
    rank_of = holders(labels, 5, 11)
    owned = []
    for rank in range(5):
        counts = np.bincount(labels[rank_of == rank], minlength=10)
        owned += list(np.flatnonzero(counts > 500))
        share = np.sort(counts)[-2:].sum() / counts.sum()
        assert 0.87 < share < 0.93
        assert np.all(counts > 0)  # everyone has seen some of everything
    assert sorted(owned) == list(range(10))


# ---- the perceptron ------------------------------------------------------------------------------------


def test_gradients_are_the_slope_of_the_loss() -> None:
    generator = np.random.default_rng(3)
    values: dict[str, Any] = {name: value.astype(float) for name, value in numpy_mlp.initial_values(6, 1).items()}
    inputs: Any = generator.normal(size=(8, 6))  # float64, unlike the benchmark's, for the sake of differences
    labels = generator.integers(0, 10, 8).astype(np.int32)
    computed = numpy_mlp.compute(values, inputs, labels)
    for name, value in values.items():
        direction = generator.normal(size=value.shape)
        ahead = numpy_mlp.compute({**values, name: value + 1e-6 * direction}, inputs, labels)
        behind = numpy_mlp.compute({**values, name: value - 1e-6 * direction}, inputs, labels)
        slope = (ahead.loss - behind.loss) / 2e-6
        assert float(np.sum(computed.gradients[name] * direction)) == pytest.approx(slope, rel=1e-4)


def test_initial_values_are_float32_follow_the_seed_and_have_zero_biases() -> None:
    first, again, other = (numpy_mlp.initial_values(64, seed) for seed in (1, 1, 2))
    assert {name: value.dtype for name, value in first.items()} == dict.fromkeys(first, np.dtype(np.float32))
    for name in first:
        assert np.array_equal(first[name], again[name])
        assert np.array_equal(first[name], other[name]) == name.endswith("bias")
    assert first["hidden/kernel"].std() == pytest.approx((2 / 64) ** 0.5, rel=0.05)


def test_accuracy_counts_over_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_mlp, "EVALUATION_CHUNK", 7)
    values = numpy_mlp.initial_values(4, 1)
    features = np.random.default_rng(1).integers(0, 256, (20, 2, 2)).astype(np.uint8)
    hidden = np.maximum(numpy_mlp.as_inputs(features) @ values["hidden/kernel"], 0)
    labels = (hidden @ values["logits/kernel"]).argmax(axis=1).astype(np.int32)
    labels[[0, 8, 19]] += 1  # one wrong answer in each chunk
    assert numpy_mlp.accuracy(values, features, labels) == 17 / 20
    assert numpy_mlp.compute(values, numpy_mlp.as_inputs(features), labels % 10).accuracy == 17 / 20


def test_bytes_become_the_unit_interval_and_floats_stay() -> None:
    assert numpy_mlp.as_inputs(np.array([[[0, 255]]], np.uint8)).tolist() == [[0.0, 1.0]]
    assert numpy_mlp.as_inputs(np.array([[[0.5, 7.0]]], np.float32)).tolist() == [[0.5, 7.0]]


# ---- jobs ----------------------------------------------------------------------------------------------


def test_jobs_of_a_cell_give_faults_to_the_bad_and_the_measuring_to_rank_0(tmp_path: Path) -> None:
    given = jobs(CELL, 5014, tmp_path)
    assert [job.role for job in given] == ["worker"] * 5 + [VALIDATOR]
    assert [job.rank for job in given[:5]] == [job.shard for job in given[:5]] == list(range(5))
    assert {job.rank for job in given if job.fault == "sign_flip"} == set(CELL.bad_ranks)
    assert [job.rank for job in given if job.evaluated_steps] == [0]
    assert given[0].evaluated_steps == (360, 370, 380, 390, 400)
    assert all(Job(**json.loads(json.dumps(job.__dict__))).shard == job.shard for job in given)


def test_in_the_clean_run_the_good_keep_their_shards_and_the_server_counts_them_only(tmp_path: Path) -> None:
    clean = CELL.clean
    given = jobs(clean, 5014, tmp_path)
    assert [job.shard for job in given] == [rank for rank in range(5) if rank not in CELL.bad_ranks]
    assert [job.rank for job in given] == [0, 1, 2]
    assert {job.fault for job in given} == {NONE} and {job.shards for job in given} == {5}
    command = server_command(clean, tmp_path)
    assert "--workers=3" in command
    assert not any("validator" in part for part in command)


def test_the_server_is_told_rule_validation_and_what_to_assume(tmp_path: Path) -> None:
    command = server_command(CELL, tmp_path)
    assert {"--aggregation=master", "--validator-every=10", "--steps=400", "--seed=11"} <= set(command)
    assert "--faulty-workers=2" in server_command(replace(CELL, rule="trimmed_mean"), tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    generator = np.random.default_rng(9)
    features = generator.random((400, 2, 2)).astype(np.float32)
    labels = labels_of(400)
    save(Dataset(features, labels, features[:20], labels[:20]), tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_bad_worker_pushes_what_its_fault_makes_of_its_honest_gradient(saved: Path) -> None:
    cell = Cell("digits", "mean", "scale:-7", 5, NEVER, True, 11)
    values = numpy_mlp.initial_values(4, 11)
    for job in jobs(cell, 1, saved):
        bad = Computer(job).push_of(3, values)
        honest = Computer(replace(job, fault=NONE)).push_of(3, values)
        assert (bad.loss, bad.accuracy) == (honest.loss, honest.accuracy)
        for wrong, right in zip(bad.gradients, honest.gradients, strict=True):
            assert np.array_equal(wrong, -7 * right) and right.any()


def test_the_clean_run_trains_on_the_same_batches_as_the_good_workers_of_a_cell(saved: Path) -> None:
    values = numpy_mlp.initial_values(4, 11)
    in_cell = {job.shard: Computer(job).push_of(7, values) for job in jobs(CELL, 1, saved)[:5]}
    for job in jobs(CELL.clean, 1, saved):
        alone = Computer(job).push_of(7, values)
        for one, other in zip(alone.gradients, in_cell[job.shard].gradients, strict=True):
            assert np.array_equal(one, other)


def test_a_validator_takes_all_trusted_examples_at_every_step(saved: Path) -> None:
    values = numpy_mlp.initial_values(4, 11)
    computer = Computer(jobs(CELL, 1, saved)[-1])
    features, labels = trusted_examples(computer.dataset, 100, 11)
    expected = numpy_mlp.compute(values, numpy_mlp.as_inputs(features), labels)
    for step in (0, 5):
        pushed = computer.push_of(step, values)
        assert pushed.loss == expected.loss
        assert np.array_equal(pushed.gradients[0], expected.gradients["hidden/kernel"])


def test_tensorflow_workers_get_the_faults_and_what_they_cannot_do_is_refused(tmp_path: Path) -> None:
    commands = worker_commands(CELL, 5014, None)
    assert set(commands) == {*(f"worker{rank}" for rank in range(5)), "validator", "evaluator"}
    faulty = {who for who, command in commands.items() if "--fault" in command}
    assert faulty == {f"worker{rank}" for rank in CELL.bad_ranks}
    for cell in (CELL.clean, replace(CELL, bad=0, fault=NONE, alike=False)):
        with pytest.raises(BenchmarkError, match="TensorFlow workers cannot do this"):
            worker_commands(cell, 5014, None)


def test_an_evaluators_lines_give_the_mean_of_the_last_measurements() -> None:
    lines = [f"12:00:00 step {step}: test loss 0.1, test accuracy {share:.4f}" for step, share in
             ((340, 0.1), (360, 0.8), (381, 0.7), (400, 0.9))]  # fmt: skip
    mean, last = measured("\n".join(lines), CELL)
    assert mean == pytest.approx(0.8)
    assert last == 0.9
    with pytest.raises(BenchmarkError, match="did not measure the final values"):
        measured("\n".join(lines[:-1]), CELL)


# ---- results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.4, 0.4, 0.4, 0.04, 0.0], Muting(1, 1, 0.44 / 3)),
        ([0.0, 0.0, 0.01, 0.2, 0.02], Muting(0, 2, 0.23 / 3)),
        ([0.0, 0.0, 0.3, 0.01, 0.2], Muting(1, None, 0.51 / 3)),
        ([0.0, 0.0, 0.0, 0.0, 0.0], Muting(0, 0, 0.0)),
        ([0.0, 0.0, 0.5, 0.5, 0.5], Muting(None, None, 0.5)),
    ],
)
def test_muting_counts_from_the_turn(weights: list[float], expected: Muting) -> None:
    found = muting_of(dict(enumerate(weights)), turn=2)
    assert found is not None
    assert (found.first, found.lasting) == (expected.first, expected.lasting)
    assert found.mean_bad_weight == pytest.approx(expected.mean_bad_weight)


def test_a_run_that_ended_before_the_turn_says_nothing_of_muting() -> None:
    assert muting_of({0: 0.4, 1: 0.4}, turn=2) is None


def test_results_come_back_as_they_were_written() -> None:
    results = {CELL: outcome(0.9, Muting(3, None, 0.2)), CELL.clean: outcome(0.95)}
    assert parse("".join(line_of(cell, o) for cell, o in results.items())) == results


def test_half_a_line_at_the_end_is_dropped_and_the_file_goes_on_whole(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    whole = line_of(CELL, outcome(0.9))
    path.write_text(whole + line_of(CELL.clean, outcome(0.95))[:-20])
    file = ResultFile(path)
    assert set(file.results) == {CELL}
    file.add(CELL.clean, outcome(0.96))
    assert ResultFile(path).results == {CELL: outcome(0.9), CELL.clean: outcome(0.96)}


def test_a_file_of_something_else_is_refused_by_line() -> None:
    with pytest.raises(BenchmarkError, match="line 2, is not a result"):
        parse(line_of(CELL, outcome(0.9)) + '{"accuracy": 1}\n' + line_of(CELL, outcome(0.9)))


# ---- tables --------------------------------------------------------------------------------------------


def test_gaps_and_differences_are_taken_seed_by_seed_on_common_seeds() -> None:
    second = replace(CELL, seed=12)
    results = {
        CELL: outcome(0.90), CELL.clean: outcome(0.92),
        second: outcome(0.80), second.clean: outcome(0.86),
        replace(CELL, seed=13): outcome(0.10),  # its clean run is not known
        replace(CELL, rule="evidence"): outcome(0.93),
    }  # fmt: skip
    assert gaps(results)[setup_of(CELL)] == pytest.approx(4.0)
    assert differences(results, "master", "evidence") == {setup_of(CELL): pytest.approx(-3.0)}
    average = averages(results)[setup_of(CELL)]
    assert average.accuracy == pytest.approx(0.6)
    assert average.seeds == 3


def test_frameworks_are_compared_at_the_final_values() -> None:
    other = replace(CELL, framework=TENSORFLOW)
    results = {CELL: replace(outcome(0.2), final_accuracy=0.9), other: replace(outcome(0.8), final_accuracy=0.91)}
    assert framework_differences(results) == {other: pytest.approx(1.0)}
    assert "| digits, 2 sign flip | master K=10 | 11 | 90.0 | 91.0 | +1.0 |" in markdown(results)


def test_a_clean_run_has_no_gap_to_itself() -> None:
    assert gaps({CELL.clean: outcome(0.9)}) == {}


def test_claims_are_about_the_standard_situation_only() -> None:
    odd = (replace(CELL, workers=10), replace(CELL, trusted=50), replace(CELL, fault="zero+liar"),
           replace(CELL, framework=TENSORFLOW))  # fmt: skip
    assert set(standard(dict.fromkeys((CELL, *odd), outcome(0.9)))) == {CELL}


def verdict(results: Results, start: str) -> bool | None:
    return next(claim.met for claim in check_claims(results) if claim.what.startswith(start))


@pytest.mark.parametrize(("gap", "met"), [(0.0, True), (0.5, True), (1.5, False), (2.5, False)])
def test_a_gap_claim_looks_at_the_worst_cell_and_at_the_mean(gap: float, met: bool) -> None:
    results = {CELL.clean: outcome(0.95), CELL: outcome(0.95 - gap / 100)}
    assert verdict(results, "master K=10, 2 of 5 bad") is met


def test_one_cell_far_below_cosine_trust_breaks_the_claim_but_not_an_open_one() -> None:
    bad = replace(CELL, dataset="fashion", bad=4)
    cells = [replace(bad, fault=fault) for fault in ("zero", "sleeper", "nan")]
    results = {cell: outcome(0.9) for cell in cells}
    results |= {replace(cell, rule="cosine_trust"): outcome(0.7) for cell in cells}
    start = "master minus cosine trust, K=10"
    assert verdict(results, start) is True
    assert verdict({**results, cells[1]: outcome(0.6)}, start) is True  # four sleepers on Fashion-MNIST: open
    assert verdict({**results, cells[0]: outcome(0.69)}, start) is False


@pytest.mark.parametrize(("first", "met"), [(6, True), (7, False), (None, False)])
def test_sleepers_must_be_muted_in_time_in_every_seed(first: int | None, met: bool) -> None:
    sleeper = replace(CELL, fault="sleeper", validator_every=1)
    results = {
        sleeper: outcome(0.9, Muting(2, 2, 0.0)),
        replace(sleeper, seed=12): outcome(0.9, Muting(first, first, 0.1)),
    }
    assert mutings(results)[setup_of(sleeper)].first == (2, first)
    assert verdict(results, "2 of 5 sleepers, master K=1") is met


def test_nothing_is_claimed_of_what_was_not_measured() -> None:
    assert {claim.met for claim in check_claims({})} == {None}


def test_a_table_without_rows_is_left_out() -> None:
    assert table(["a"], []) == ""
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"


def test_columns_keep_the_order_of_rules_and_leave_out_runs_without_validator() -> None:
    cells = [replace(CELL, validator_every=k) for k in (10, 1, NEVER)]
    cells.append(replace(CELL, rule="mean", validator_every=NEVER))
    assert columns_of(cells) == [("mean", 0), ("master", 1), ("master", 10)]


def test_the_report_shows_accuracies_in_percent_and_marks_what_diverged() -> None:
    diverged = replace(CELL, rule="mean", validator_every=NEVER)
    text = markdown({CELL: outcome(0.912), CELL.clean: outcome(0.95), diverged: outcome(0.1, done=False)})
    assert "| fault | bad | clean | mean | master K=10 |" in text
    assert "| sign flip | 2 | 95.0 | 10.0† | 91.2 |" in text
    assert "| master K=10 | 2 | 3.8 | 3.8 | digits, 2 sign flip | 1 |" in text


def test_what_rounds_to_zero_has_no_minus() -> None:
    assert decimal(-0.01) == "0.0"
    assert decimal(-0.01, sign=True) == "+0.0"
    assert decimal(-0.06, sign=True) == "-0.1"
