import numpy as np
import pytest

from protocol.errors import LocalProtocolError
from ps.rules.geometry import Geometry, from_products, from_projections

USABLE = (True, False, True, True)


def gradients(seed=0, elements=50):
    """Return gradients of four ranks, of which one is not usable, two validators' and a moment."""
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((4, elements)),
        random.standard_normal((2, elements)),
        random.standard_normal(elements),
    )


def products(g, references=(), moment=None, usable=USABLE):
    """Return what a store would measure."""
    rows = [*g[np.array(usable)], *references, *([moment] if moment is not None else [])]
    compared = np.array(rows).reshape(len(rows), -1)
    return compared @ compared.T


def projections(g, coefficients, references=(), moment=None, usable=USABLE):
    present = np.array(usable)
    total = np.array(coefficients)[present] @ g[present]
    few = [*references, *([moment] if moment is not None else []), total]
    return np.array([*g[present], *few]) @ np.array(few).T


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_norms_and_inner_products_lie_at_their_ranks_and_nothing_at_the_unusable():
    g, _, _ = gradients()
    geometry = from_products(products(g), USABLE)
    np.testing.assert_allclose(geometry.norms[[0, 2, 3]], np.linalg.norm(g[[0, 2, 3]], axis=1))
    assert geometry.norms[1] == np.inf
    assert geometry.usable.tolist() == list(USABLE)
    assert geometry.gram[0, 3] == pytest.approx(g[0] @ g[3])
    assert geometry.gram[2, 3] == pytest.approx(g[2] @ g[3])
    assert not geometry.gram[1].any() and not geometry.gram[:, 1].any()


def test_distances_are_those_of_the_vectors_and_infinite_to_the_unusable():
    g, _, _ = gradients()
    distances = from_products(products(g), USABLE).distances_squared()
    assert distances[0, 2] == distances[2, 0] == pytest.approx(((g[0] - g[2]) ** 2).sum())
    assert np.diagonal(distances).tolist() == [0, 0, 0, 0]
    assert np.isinf(distances[1, [0, 2, 3]]).all() and np.isinf(distances[[0, 2, 3], 1]).all()


def test_distances_of_equal_gradients_never_fall_below_0():
    g = np.tile(np.random.default_rng(1).standard_normal(50) * 1e8, (4, 1))
    slightly_off = products(g) * (1 + 1e-15 * np.arange(9).reshape(3, 3))
    distances = from_products(slightly_off, USABLE).distances_squared()
    assert distances[np.isfinite(distances)].min() == 0


@pytest.mark.parametrize("build", ["products", "projections"])
def test_several_validators_count_as_the_mean_of_their_gradients(build):
    g, v, m = gradients()
    if build == "products":
        geometry = from_products(products(g, v, m), USABLE, references=2, with_momentum=True, fresh=True)
    else:
        norms, c = np.linalg.norm(g, axis=1), [0.5, 7.0, 0.25, 0.25]
        measured = projections(g, c, v, m)
        geometry = from_projections(measured, norms, USABLE, c, references=2, with_momentum=True, fresh=True)
    mean = v.mean(axis=0)
    assert geometry.fresh
    assert geometry.reference_norm == pytest.approx(np.linalg.norm(mean))
    assert geometry.with_reference == pytest.approx([g[0] @ mean, 0, g[2] @ mean, g[3] @ mean])
    assert geometry.cosine_to_reference() == pytest.approx(
        [cosine(g[0], mean), 0, cosine(g[2], mean), cosine(g[3], mean)]
    )
    assert geometry.momentum_norm == pytest.approx(np.linalg.norm(m))
    assert geometry.with_momentum == pytest.approx([g[0] @ m, 0, g[2] @ m, g[3] @ m])


def test_projections_tell_of_the_total_that_they_were_taken_on():
    g, v, _ = gradients()
    c = [0.5, 7.0, 0.25, -0.25]
    geometry = from_projections(projections(g, c, v[:1]), np.linalg.norm(g, axis=1), USABLE, c, references=1)
    total = 0.5 * g[0] + 0.25 * g[2] - 0.25 * g[3]
    assert geometry.gram is None
    assert geometry.total_coefficients.tolist() == [0.5, 0.0, 0.25, -0.25]
    assert geometry.total_norm == pytest.approx(np.linalg.norm(total))
    assert geometry.with_total == pytest.approx([g[0] @ total, 0, g[2] @ total, g[3] @ total])
    with pytest.raises(LocalProtocolError, match="against their total"):
        geometry.distances_squared()


def test_without_a_reference_nothing_is_fresh_and_its_cosines_are_0():
    g, _, _ = gradients()
    geometry = from_products(products(g), USABLE, fresh=True)
    assert not geometry.fresh
    assert (geometry.reference_norm, geometry.momentum_norm, geometry.total_norm) == (None, None, None)
    assert geometry.cosine_to_reference().tolist() == [0, 0, 0, 0]


def test_a_gradient_or_reference_of_length_0_has_cosine_0():
    g, v, _ = gradients()
    g[0] = 0
    geometry = from_products(products(g, v[:1]), USABLE, references=1)
    assert geometry.norms[0] == 0
    assert geometry.cosine_to_reference()[0] == 0 != geometry.cosine_to_reference()[2]
    blind = from_products(products(g, v[:1] * 0), USABLE, references=1)
    assert blind.reference_norm == 0
    assert blind.cosine_to_reference().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("scale", [1e-150, 1e30, 1e150])
def test_cosines_do_not_depend_on_the_length(scale):
    g, v, _ = gradients()
    plain = from_products(products(g, v[:1]), USABLE, references=1)
    scaled = from_products(products(g * scale, v[:1] * scale), USABLE, references=1)
    np.testing.assert_allclose(scaled.cosine_to_reference(), plain.cosine_to_reference(), rtol=1e-12)


def test_validators_that_cancel_out_leave_a_reference_of_length_0_despite_rounding():
    g, v, _ = gradients()
    opposed = products(g, [v[0], -v[0]])
    opposed[3, 3] *= 1 - 1e-15
    assert from_products(opposed, USABLE, references=2).reference_norm == 0


def test_nobody_usable_is_no_mistake():
    geometry = from_products(np.zeros((0, 0)), (False, False))
    assert np.isinf(geometry.norms).all()
    assert not geometry.cosine_to_reference().any()
    assert np.isinf(geometry.distances_squared()[0, 1])


@pytest.mark.parametrize(
    ("usable", "references", "moment"), [((True,), 0, False), (USABLE, 1, False), (USABLE, 0, True)]
)
def test_inner_products_of_another_shape_are_our_own_mistake(usable, references, moment):
    with pytest.raises(LocalProtocolError, match="do not fit"):
        from_products(np.zeros((3, 3)), usable, references, moment)
    with pytest.raises(LocalProtocolError, match="do not fit"):
        from_projections(np.zeros((4, 1)), [1.0] * len(usable), usable, [1.0] * len(usable), references, moment)


def test_what_is_not_known_has_a_default():
    geometry = Geometry(np.ones(2))
    assert (geometry.gram, geometry.with_total, geometry.with_reference, geometry.fresh) == (
        None,
        None,
        None,
        False,
    )
