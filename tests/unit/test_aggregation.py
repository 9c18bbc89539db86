import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError
from ps.aggregation import Mean, MeanOver, RoundView, clip_factors


def view(usable, examples):
    ranks = tuple(range(len(usable)))
    return RoundView(7, ranks, tuple(usable), tuple(examples), (1.0,) * len(ranks), (0.5,) * len(ranks))


def test_mean_over_workers_counts_each_usable_worker_once():
    weights = Mean()(view([True, False, True, True, True], [1, 10, 100, 5, 5]))
    assert weights.dtype == np.float64
    assert weights.tolist() == [0.25, 0.0, 0.25, 0.25, 0.25]


def test_mean_over_examples_counts_each_usable_example_once():
    weights = Mean(MeanOver.EXAMPLES)(view([True, False, True], [30, 1000, 10]))
    assert weights.tolist() == [0.75, 0.0, 0.25]


@pytest.mark.parametrize("over", MeanOver)
def test_nothing_usable_gives_weights_of_zero(over):
    assert Mean(over)(view([False, False], [3, 4])).tolist() == [0.0, 0.0]


def test_no_examples_at_all_give_weights_of_zero():
    assert Mean(MeanOver.EXAMPLES)(view([True, True], [0, 0])).tolist() == [0.0, 0.0]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 10**6)), min_size=1, max_size=64), st.sampled_from(MeanOver)
)
def test_weights_are_a_share_each_and_none_for_the_refused(pushes, over):
    usable, examples = zip(*pushes, strict=True)
    weights = Mean(over)(view(usable, examples))
    assert all((weight > 0) == flag for weight, flag in zip(weights, usable, strict=True))
    assert weights.sum() == pytest.approx(float(any(usable)), abs=1e-12)


def test_a_view_with_columns_of_unequal_length_is_refused():
    with pytest.raises(LocalProtocolError, match="one entry per rank"):
        RoundView(0, (0, 1), (True, True), (1,), (1.0, 1.0), (0.0, 0.0))


def test_a_view_out_of_rank_order_is_refused():
    with pytest.raises(LocalProtocolError, match="ascend"):
        RoundView(0, (1, 0), (True, True), (1, 1), (1.0, 1.0), (0.0, 0.0))


def test_clip_factors_bring_long_gradients_down_and_leave_short_ones():
    assert clip_factors([0.0, 1.0, 2.0, 8.0], 2.0).tolist() == [1.0, 1.0, 1.0, 0.25]
