"""How much of the variance of an environment's wins lies within its instances: the learnable part.

The variance of a win splits over the seeds s, whose win rates are w_s:

    w (1 - w) = mean_s[w_s (1 - w_s)] + variance_s[w_s] = within + between

Only the first part leaves plays of one instance to compare with one another. Where half of the
instances are always won and half never, the win rate is 0.5 and there is nothing to learn from
any group; the same holds where a coin drawn from the seed decides. Plays of one instance are won or
lost by what the agent did, so the anchor is paid in proportion to

    share = min(1, within / total)
    within = sum_s n_s v_s / sum_s n_s,   v_s = wins_s (n_s - wins_s) / (n_s (n_s - 1))
    total  = W (N - W) / (N (N - 1)),     over all plays of these seeds together

v_s and total are the unbiased estimates of w_s (1 - w_s) and, without a difference between seeds,
of w (1 - w). Seeds with a single play say nothing of `within` and are left out. With few seeds
`total` holds (1 - 1 / seeds) of the variance between them, so the share errs to the high side.

This is ours: the reference has no such split.
"""

from collections import Counter
from collections.abc import Iterable


def within_share(plays: Iterable[tuple[int, bool]]) -> float | None:
    """Share in [0, 1] of the variance that is within seeds, by (seed, win) of each play.

    None when no seed was played twice; 1 when all plays were won, or all lost: no variance is
    between seeds then.
    """
    won: Counter[int] = Counter()
    count: Counter[int] = Counter()
    for seed, win in plays:
        won[seed] += win
        count[seed] += 1
    repeated = [seed for seed in count if count[seed] > 1]
    if not repeated:
        return None
    num_plays = sum(count[seed] for seed in repeated)
    within = (
        sum(won[seed] * (count[seed] - won[seed]) / (count[seed] - 1) for seed in repeated)
        / num_plays
    )
    wins = sum(won[seed] for seed in repeated)
    total = wins * (num_plays - wins) / (num_plays * (num_plays - 1))
    return min(1.0, within / total) if total else 1.0
