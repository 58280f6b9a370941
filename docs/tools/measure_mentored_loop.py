"""How often Algorithm 1 of mentored decoding ends: python docs/tools/measure_mentored_loop.py

Of 200 random pairs of distributions over 50 ids, it counts those for which the paper's loop has not
ended after 5,000 turns. Once the loop is as printed: it overwrites α before it stores the old one
as the bracket's end. Once it has the two lines swapped. Both sum over i ≥ n, as its footnote says.
"""

from __future__ import annotations

import numpy as np

PAIRS, IDS, MOST_TURNS = 200, 50, 5000
BOUNDS = (0.05, 0.3)  # nats
TOLERANCE = 0.01  # the paper's γ


def turns(p: np.ndarray, q: np.ndarray, bound: float, swapped: bool) -> int | None:
    """The turns until Algorithm 1 ends; None if it does not.

    Args:
      p: the target's probabilities ``[V]``, which the paper calls q.
      q: the draft's, which the paper calls p.
      swapped: store the old α first.
    """
    order = np.argsort(p / q)
    p = p[order]
    q = q[order]
    low = 0.0
    alpha = 0.5
    high = 1.0
    for turn in range(1, MOST_TURNS + 1):
        divergence = kl_at(p, q, alpha)
        before = alpha
        if divergence < (1 - TOLERANCE) * bound:
            alpha = (low + alpha) / 2
            high = before if swapped else alpha
        elif divergence > (1 + TOLERANCE) * bound:
            alpha = (alpha + high) / 2
            low = before if swapped else alpha
        else:
            return turn
    return None


def kl_at(p: np.ndarray, q: np.ndarray, alpha: float) -> float:
    """δ of Algorithm 1: the divergence of p and the levels α and β. ``p / q`` ascends."""
    ratios = p / q
    scaled = ratios <= alpha
    rejected = q[scaled].sum() - p[scaled].sum() / alpha
    # The sums over i ≥ j, for all j.
    p_after = p[::-1].cumsum()[::-1]
    q_after = q[::-1].cumsum()[::-1]
    n = int(np.argmax(p_after / ratios - q_after <= rejected))
    beta = p_after[n] / (rejected + q_after[n])

    lifted = ratios >= beta
    kept = ~scaled & ~lifted
    within = np.sum(p[kept] * np.log(ratios[kept]))
    return np.log(alpha) * p[scaled].sum() + within + np.log(beta) * p[lifted].sum()


def main() -> None:
    """Prints, per bound and order of the two lines, how many loops did not end."""
    rng = np.random.default_rng(0)
    # Away from 0, so that every ratio is finite.
    pairs = (rng.dirichlet(np.ones(IDS), (PAIRS, 2)) + 1e-6) / (1 + IDS * 1e-6)
    for bound in BOUNDS:
        for swapped in (False, True):
            with np.errstate(all="ignore"):
                found = [turns(p, q, bound, swapped) for p, q in pairs]
            ended = [count for count in found if count is not None]
            order = "swapped" if swapped else "as printed"
            print(
                f"D = {bound}, {order}: {PAIRS - len(ended)} of {PAIRS} do not end; "
                f"median turns of the others: {np.median(ended):.0f}"
            )


if __name__ == "__main__":
    main()
