"""Pages: who finds what, what is copied, what is evicted; and a long random run against a stand-in
for the device that holds what was written.
"""

import random

import pytest

from spade_jax.rollout.pages import PageTable, copies_in_parts


def filled(table: PageTable, *sequences: list[int]) -> None:
    """Open, compute and close sequences, one after the other."""
    for tokens in sequences:
        opened = table.open(tokens, 0)
        assert opened is not None
        table.compute(opened.held, len(tokens))
        table.close(opened.held)


def opened(table: PageTable, tokens: list[int], ahead: int = 0):
    found = table.open(tokens, ahead)
    assert found is not None
    return found


def test_the_next_turn_goes_on_in_its_own_pages():
    table = PageTable(8, 4)
    first = opened(table, [1, 2, 3, 4, 5, 6])
    table.compute(first.held, 6)
    assert table.grow(first.held, 9)
    table.write(first.held, [7, 8, 9])
    table.compute(first.held, 9)
    pages = list(first.held.pages)
    table.close(first.held)
    assert table.num_held == 0
    second = opened(table, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    assert (second.hit, second.copy) == (9, None)
    assert second.held.pages == pages and table.num_filled == 11


def test_equal_beginnings_share_full_pages_and_copy_the_partial_one():
    table = PageTable(8, 4)
    first = opened(table, [1, 2, 3, 4, 5, 6, 7])
    early = opened(table, [1, 2, 3, 4, 5, 6, 9])
    assert (early.hit, early.copy) == (4, None)  # the partial page is not computed yet
    table.compute(first.held, 7)
    second = opened(table, [1, 2, 3, 4, 5, 6, 8])
    assert second.hit == 6
    assert second.copy == (first.held.pages[1], second.held.pages[1])
    assert second.held.pages[0] == first.held.pages[0]
    assert table.num_held == 4  # one shared, three partial ones
    table.write(first.held, [10])  # its own page: the copy is not concerned
    third = opened(table, [1, 2, 3, 4, 5, 6, 8, 9])
    assert third.hit == 6


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_copies_in_parts_do_what_one_after_the_other_does(size):
    assert copies_in_parts([(0, 1), (1, 2), (2, 3)], 4) == [[(0, 1), (0, 2), (0, 3)]]
    for seed in range(300):
        rng = random.Random(seed)
        count = rng.randint(0, 12)
        copies = [tuple(rng.sample(range(7), 2)) for _ in range(count)]
        expected, found = list("abcdefg"), list("abcdefg")
        for source, target in copies:
            expected[target] = expected[source]
        for part in copies_in_parts(copies, size):
            assert 0 < len(part) <= size
            before = list(found)
            for source, target in part:
                found[target] = before[source]
        assert found == expected, copies


def test_the_last_token_is_left_to_compute():
    table = PageTable(8, 4)
    filled(table, [1, 2, 3, 4, 5, 6, 7, 8])
    again = opened(table, [1, 2, 3, 4, 5, 6, 7, 8])
    assert again.hit == 7
    assert again.copy is not None and again.copy[0] != again.held.pages[1]
    table.compute(again.held, 8)
    # What was there first stands for the copy, which is given back with its owner.
    assert again.held.nodes[1] != again.held.pages[1]
    table.close(again.held)
    assert table.num_held == 0 and table.num_available == 8


def test_followers_take_all_of_the_leader():
    table = PageTable(16, 4)
    prompt = [1, 2, 3, 4, 5, 6]
    leader = opened(table, prompt, 1)
    follower = table.follow(leader.held, prompt, 1)
    assert follower is not None and follower.hit == 6
    assert follower.copy == (leader.held.pages[1], follower.held.pages[1])
    even = opened(table, [1, 2, 3, 4, 7, 8, 9, 10], 1)
    same = table.follow(even.held, [1, 2, 3, 4, 7, 8, 9, 10], 1)
    assert same is not None and (same.hit, same.copy) == (8, None)
    assert same.held.pages[:2] == even.held.pages[:2]
    assert same.held.pages[2] != even.held.pages[2]


def test_what_was_not_computed_is_forgotten():
    table = PageTable(8, 4)
    first = opened(table, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    table.compute(first.held, 6)
    table.close(first.held)
    assert opened(table, [1, 2, 3, 4, 5, 6, 7, 8, 9]).hit == 4


def test_a_page_that_nobody_computed_is_not_found_through_another_sequence():
    """A waits for its prefill while B samples the tokens of A's prompt, and then A gives way."""
    table = PageTable(16, 2)
    b = opened(table, [1, 2])
    table.compute(b.held, 2)
    a = opened(table, [1, 2, 3, 4, 5, 6])
    table.grow(b.held, 8)
    table.write(b.held, [3, 4, 5, 6, 7], computed=True)
    early = opened(table, [1, 2, 3, 4, 5, 6, 7])
    assert early.hit == 7 - 1 and early.held.pages[1] == b.held.pages[1]  # not the one of A
    table.close(early.held)
    table.close(a.held)
    again = opened(table, [1, 2, 3, 4, 5, 6, 7, 8])
    assert again.held.pages[:3] == b.held.pages[:3] and again.hit == 7


def test_a_page_that_stands_for_another_and_is_not_computed_is_forgotten_with_its_owner():
    """Both wait: the page of A stands for that of B, whose owner would be computed behind it."""
    table = PageTable(16, 2)
    a = opened(table, [1, 2, 3, 4, 9])
    b = opened(table, [1])
    table.grow(b.held, 6)
    table.write(b.held, [2, 3, 4, 5, 6])
    assert b.held.nodes[:2] == a.held.pages[:2] != b.held.pages[:2]
    table.close(a.held)
    table.compute(b.held, 6)
    assert opened(table, [1, 2, 3, 4, 5, 6, 7]).hit == 0
    lost = b.held.nodes[0]
    table.close(b.held)
    # Who writes to that place now is not followed by what followed A.
    other = opened(table, [7, 8])
    assert other.held.pages == [lost]
    table.compute(other.held, 2)
    assert opened(table, [7, 8, 3, 4, 5]).hit == 2


def test_the_longest_unused_page_goes_first_and_never_before_its_continuation():
    table = PageTable(4, 2)
    filled(table, [1, 1, 2, 2], [5, 5, 6, 6])
    again = opened(table, [1, 1, 2, 2, 3])  # used again, so the other one is older
    table.close(again.held)
    opened(table, [9])
    assert table.open([5, 5, 6, 6, 7], 0).hit == 2  # type: ignore[union-attr]


def test_a_chain_is_evicted_from_its_end():
    table = PageTable(3, 2)
    filled(table, [1, 1, 2, 2, 3, 3])
    assert opened(table, [9]).held.pages
    found = table.open([1, 1, 2, 2, 3, 3], 0)
    assert found is None  # two of its pages are left, and no third is to be had
    assert opened(table, [1, 1, 2, 2]).hit == 3


def test_too_few_pages_change_nothing():
    table = PageTable(3, 4)
    first = opened(table, [1, 2, 3, 4, 5])
    before = (table.num_held, table.num_filled, table.num_available)
    assert table.open([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 4) is None
    assert table.follow(first.held, [1, 2, 3, 4, 5], 8) is None
    assert not table.grow(first.held, 17)
    assert (table.num_held, table.num_filled, table.num_available) == before


def test_spare_pages_are_taken_in_the_order_named():
    table = PageTable(6, 2)
    filled(table, [1, 1, 2, 2])
    first = opened(table, [7, 7])
    spare = table.spare(4)
    assert len(spare) == 4 and len(set(spare)) == 4
    assert table.spare(99) == [*spare, *table.spare(99)[4:]]
    table.extend(first.held, spare[0])
    assert first.held.pages[1] == spare[0]
    with pytest.raises(AssertionError, match="out of turn"):
        table.extend(first.held, spare[2])


class Device:
    """Holds what was written to each place of each page."""

    def __init__(self, num_pages: int, size: int) -> None:
        self.pages = [[-1] * size for _ in range(num_pages)]
        self.size = size

    def copy(self, pair: tuple[int, int] | None) -> None:
        if pair:
            self.pages[pair[1]] = list(self.pages[pair[0]])

    def write(self, pages: list[int], tokens: list[int], start: int) -> None:
        for place in range(start, len(tokens)):
            self.pages[pages[place // self.size]][place % self.size] = tokens[place]

    def read(self, pages: list[int], length: int) -> list[int]:
        return [self.pages[pages[place // self.size]][place % self.size] for place in range(length)]


@pytest.mark.parametrize("seed", range(30))
def test_no_sequence_reads_what_was_never_computed(seed):
    """Sequences wait in line to be computed, and the last in line may give up, while others go on
    writing the same letters.
    """
    rng = random.Random(seed)
    size = rng.choice((1, 2, 3))
    num_pages = rng.randrange(12, 40)
    table, device, live, line, hits = PageTable(num_pages, size), Device(num_pages, size), [], [], 0
    for _ in range(800):
        move = rng.random()
        if move < 0.35:
            known = rng.choice(live)[0] if live and rng.random() < 0.5 else []
            tokens = [*known[: rng.randrange(12)], *(rng.randrange(2) for _ in range(8))]
            tokens = tokens[: rng.randrange(1, 16)]
            found = table.open(tokens, 0)
            if found is not None:
                hits += found.hit
                device.copy(found.copy)
                line.append((tokens, found))
        elif move < 0.5 and line:
            tokens, found = line.pop(0)
            device.write(found.held.pages, tokens, found.hit)
            table.compute(found.held, len(tokens))
            live.append((tokens, found.held))
        elif move < 0.6 and line:
            table.close(line.pop()[1].held)
        elif move < 0.85 and live:
            tokens, held = rng.choice(live)
            new = [rng.randrange(2) for _ in range(rng.randrange(1, 2 * size + 1))]
            if table.grow(held, held.length + len(new)):
                tokens += new
                table.write(held, new, computed=True)
                device.write(held.pages, tokens, len(tokens) - len(new))
        elif live:
            table.close(live.pop(rng.randrange(len(live)))[1])
        for tokens, held in live:
            assert device.read(held.pages, len(tokens)) == tokens
    assert hits > 100
    for held in [*(found.held for _, found in reversed(line)), *(held for _, held in live)]:
        table.close(held)
    table.clear()
    assert table.num_available == num_pages


@pytest.mark.parametrize("seed", range(8))
def test_every_sequence_reads_its_own_tokens(seed):
    """Sequences over two letters, so that much is shared, in too few pages, so that much goes."""
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4))
    num_pages = rng.randrange(8, 40)
    table, device, live, hits = PageTable(num_pages, size), Device(num_pages, size), [], 0
    for _ in range(600):
        move = rng.random()
        if move < 0.4:
            known = rng.choice(live)[0] if live and rng.random() < 0.5 else []
            tokens = [*known[: rng.randrange(12)], *(rng.randrange(2) for _ in range(12))]
            tokens = tokens[: rng.randrange(1, 20)]
            found = table.open(tokens, 0)
            if found is None:
                continue
            hits += found.hit
            device.copy(found.copy)
            if rng.random() < 0.3:  # others with the same prompt come before it is computed
                for _ in range(2):
                    follower = table.follow(found.held, tokens, 0)
                    if follower is not None:
                        live.append((list(tokens), follower.held, follower.copy))
            device.write(found.held.pages, tokens, found.hit)
            table.compute(found.held, len(tokens))
            for index, (theirs, held, copy) in enumerate(live):
                if held.computed < len(theirs) == held.length and copy is not None:
                    device.copy(copy)
                    table.compute(held, held.length)
                    live[index] = (theirs, held, None)
            live.append((tokens, found.held, None))
        elif move < 0.7 and live:
            tokens, held, _ = rng.choice(live)
            if table.grow(held, held.length + 1):
                tokens.append(rng.randrange(2))
                table.write(held, tokens[-1:])
                table.compute(held, held.length)
                device.write(held.pages, tokens, len(tokens) - 1)
        elif live:
            tokens, held, _ = live.pop(rng.randrange(len(live)))
            table.close(held)
        for tokens, held, _ in live:
            assert device.read(held.pages, len(tokens)) == tokens
        used = {page for _, held, _ in live for page in (*held.pages, *held.nodes)}
        assert table.num_held == len(used)
        assert table.num_held + table.num_available == num_pages
    assert hits > 100
    for _, held, _ in live:
        table.close(held)
    table.clear()
    assert table.num_available == num_pages
