"""Rounds for rules to judge, built from gradients that a test chooses."""

from dataclasses import replace

import numpy as np

from ps.rules.geometry import Geometry
from ps.rules.rule import RoundView


def round_view(
    step,
    gradients,
    reference=None,
    *,
    fresh=True,
    momentum=None,
    names=None,
    usable=None,
    losses=None,
    accuracies=None,
    coefficients=None,
):
    """Return the view of a round with gradients [W, P]; `coefficients` measures against their total instead."""
    gradients = np.array(gradients, np.float64)
    count = len(gradients)
    usable = np.array([True] * count if usable is None else usable)
    gradients[~usable] = 0.0
    norms = np.where(usable, np.linalg.norm(gradients, axis=1), np.inf)
    measured = {}
    if coefficients is None:
        measured["gram"] = gradients @ gradients.T
    else:
        total = coefficients @ gradients
        measured |= {"with_total": gradients @ total, "total_norm": float(np.linalg.norm(total))}
        measured["total_coefficients"] = np.array(coefficients)
    if reference is not None:
        measured |= {"reference_norm": float(np.linalg.norm(reference)), "with_reference": gradients @ reference}
    if momentum is not None:
        measured |= {"momentum_norm": float(np.linalg.norm(momentum)), "with_momentum": gradients @ momentum}
    return RoundView(
        step=step,
        ranks=tuple(range(count)),
        names=tuple(f"w{rank}" for rank in range(count)) if names is None else tuple(names),
        usable=tuple(usable.tolist()),
        examples=(32,) * count,
        norms=tuple(norms.tolist()),
        losses=(1.0,) * count if losses is None else tuple(losses),
        accuracies=(0.5,) * count if accuracies is None else tuple(accuracies),
        geometry=Geometry(norms, fresh=fresh and reference is not None, **measured),
    )


def noisy_rounds(count, factors, *, noise=1.0, size=50, seed=3, every=1, names=None):
    """Yield rounds in which worker i pushes `factors[i]` times the truth (a unit vector) plus noise of that norm.

    `factors` may be a function of the step. Every `every`-th round is validated; references are noisy too.
    """
    generator = np.random.default_rng(seed)
    truth = np.ones(size) / np.sqrt(size)
    momentum = truth

    def noisy(factor):
        return factor * truth + noise * generator.normal(size=size) / np.sqrt(size)

    reference = noisy(1.0)
    for step in range(count):
        now = factors(step) if callable(factors) else factors
        if step % every == 0:
            reference = noisy(1.0)
        gradients = [noisy(factor) for factor in now]
        losses, accuracies = generator.random((2, len(now)))
        yield round_view(
            step,
            gradients,
            reference,
            fresh=step % every == 0,
            momentum=momentum,
            names=names,
            losses=losses,
            accuracies=accuracies,
        )


def alarms_of(rule, loss=1.0):
    """Return after which of 50 rounds a rule wants a validation: one worker of 4 pushes 3 times as much from 20 on.

    Only the first round is validated.
    """
    raised = []
    for view in noisy_rounds(50, lambda step: [1.0] * 3 + [1.0 if step < 20 else 3.0], noise=0.3, every=1000):
        rule.decide(replace(view, losses=(loss,) * 4))
        raised.append(rule.wants_validation)
    return raised
