"""How a role's token losses become one number, as each token's share of it. Host side, NumPy.

With w the role's weight, N its loss tokens, S its sequences that have any, G its groups that have
any, n the loss tokens of the token's sequence and g those of its group:

    token     w / N              every token weighs alike
    sequence  w / (S * n)        every sequence weighs alike (the reference; GSPO)
    group     w / (G * g)        every group weighs alike
    constant  w / (S * c)        Dr.GRPO: no length in the denominator
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

Reduction = Literal["token", "sequence", "group", "constant"]


def shares(
    kind: Reduction, counts: Sequence[int], groups: Sequence[str], weight: float, constant: int
) -> list[float]:
    """Return the share of each loss token of each sequence of one role.

    Args:
        counts: loss tokens of each sequence.
        groups: the group of each sequence.
        constant: what a sequence counts as by `constant`.
    """
    sequences = max(sum(count > 0 for count in counts), 1)
    of_group: Counter[str] = Counter()
    for count, group in zip(counts, groups, strict=True):
        of_group[group] += count
    num_groups = sum(count > 0 for count in of_group.values())

    def share(count: int, group: str) -> float:
        match kind:
            case "token":
                return weight / sum(counts)
            case "sequence":
                return weight / (sequences * count)
            case "group":
                return weight / (num_groups * of_group[group])
            case "constant":
                return weight / (sequences * constant)

    return [
        share(count, group) if count else 0.0 for count, group in zip(counts, groups, strict=True)
    ]
