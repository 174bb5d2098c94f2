"""Which trajectory lies in which row, and which row on which device. Lists of indices only.

Rows are filled by first-fit decreasing. Every row costs the same in products with weights; in
attention it costs the squares of its lengths. So rows of like attention cost share a microbatch,
where devices wait for one another, and within it the devices get turns from both ends.
"""

from collections.abc import Sequence

TAIL_PARTS = 2  # the last microbatch is rounded up to half of the others: two compiled shapes


def aligned(length: int, align_tokens: int) -> int:
    """Tokens of a row that a trajectory takes, so that the next begins at a multiple."""
    return -(-length // align_tokens) * align_tokens


def pack(lengths: Sequence[int], row_tokens: int, align_tokens: int = 1) -> list[list[int]]:
    """Assign indices to rows, longest first, each to the first row with room; ties keep order."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        row_index = next((row for row, space in enumerate(free) if space >= length), len(rows))
        if row_index == len(rows):
            rows.append([])
            free.append(row_tokens)
        rows[row_index].append(index)
        free[row_index] -= aligned(length, align_tokens)
    return rows


def cost(row: Sequence[int], lengths: Sequence[int]) -> int:
    """Attention of a row, in squared tokens."""
    return sum(lengths[index] ** 2 for index in row)


def arrange(
    rows: Sequence[list[int]], lengths: Sequence[int], shards: int, device_rows: int
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Order the rows for their devices, with empty ones where rows are short.

    Returns:
        The rows, and how many each microbatch has; a device has consecutive rows of it.
    """
    ordered = sorted(rows, key=lambda row: -cost(row, lengths))
    full = shards * device_rows
    tail_unit = shards * max(1, -(-device_rows // TAIL_PARTS))
    places: list[list[int]] = []
    sizes = []
    for start in range(0, len(ordered), full):
        part = ordered[start : start + full]
        size = min(full, -(-len(part) // tail_unit) * tail_unit)
        part += [[]] * (size - len(part))
        places += _deal(part, shards)
        sizes.append(size)
    return places, tuple(sizes)


def _deal(part: Sequence[list[int]], shards: int) -> list[list[int]]:
    """Deal rows, costliest first, to the devices and back again; all of a device's together."""
    hands: list[list[list[int]]] = [[] for _ in range(shards)]
    for index, row in enumerate(part):
        turn, place = divmod(index, shards)
        hands[place if turn % 2 == 0 else shards - 1 - place].append(row)
    return [row for hand in hands for row in hand]


def split(lengths: Sequence[int], kinds: Sequence[str], parts: int) -> list[list[int]]:
    """Cut indices into at most `parts` lists of nearly equal tokens, of each kind alike.

    No list is empty, and each keeps the order of the indices.
    """
    bins: list[list[int]] = [[] for _ in range(min(parts, len(lengths)))]
    tokens = [0] * len(bins)
    for kind in dict.fromkeys(kinds):
        of_kind = [0] * len(bins)
        indices = [index for index in range(len(lengths)) if kinds[index] == kind]
        for index in sorted(indices, key=lambda index: -lengths[index]):
            place = min(range(len(bins)), key=lambda place: (of_kind[place], tokens[place]))
            bins[place].append(index)
            of_kind[place] += lengths[index]
            tokens[place] += lengths[index]
    return [sorted(part) for part in bins if part]
