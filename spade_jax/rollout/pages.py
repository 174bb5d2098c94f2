"""The host's record of the KV cache: which page holds which tokens, who uses it, what may go.

    A   [a shared prompt ....][its tail, A's answer ..]    pages 7 5
    B   [a shared prompt ....][its tail, B's answer ..]    pages 7 9, where 9 began as a copy of 5

A full page is known by its chain: the content before it and its own tokens. Two sequences with
equal beginnings therefore find the same pages, and a partial page, which its owner still writes to,
is copied for a second one. What a sequence was to compute and did not is found by nobody any more.
A page that nobody uses keeps its tokens until its place is needed; the one unused for longest goes
first, and a page never before those that continue it. Nothing here touches the device: the engine
computes, copies and writes what is decided here.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

ROOT = -1
"""The page, and the content, before the first."""

MAX_TAILS = 32
"""Pages that are looked at for one to copy, newest first: a bound on the cost of a request."""


@dataclass
class Held:
    """The pages of one sequence, in order. `nodes` are the pages that stand for them in the chain:
    others where a page with the same tokens was there first.
    """

    pages: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    length: int = 0  # tokens that the pages hold, or will when planned work is done
    computed: int = 0  # of these, those whose work is under way


class Opened(NamedTuple):
    """What a new sequence was given."""

    held: Held
    hit: int  # leading tokens that need not be computed
    copy: tuple[int, int] | None  # (source, target): pages to copy before the target is written to


def copies_in_parts(copies: Sequence[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    """Cut copies that are meant one after the other into parts of at most `size`, each of which may
    read all its sources before it writes a target.

    A copy of a copy, which is common among prompts with one beginning, is taken from the first page
    instead, so that it need not wait for another part.
    """
    parts: list[list[tuple[int, int]]] = [[]]
    origins: dict[int, int] = {}  # of what has been copied, where its content still is
    written: set[int] = set()  # by the parts before this one
    for source, target in copies:
        first = origins.get(source, source)
        lost = first != source and first in written
        if lost or len(parts[-1]) == size or any(target == other for _, other in parts[-1]):
            written |= {page for _, page in parts[-1]}
            parts.append([])
            first = source if first in written else first
        parts[-1].append((first, target))
        origins[target] = first
    return [part for part in parts if part]


class PageTable:
    """Pages, their tokens and their users."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.num_filled = 0  # tokens in the pages that are held
        self._num_pages = num_pages
        self._reset()

    def _reset(self) -> None:
        self._free = list(range(self._num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # full of tokens, held by nobody
        self._refs = [0] * self._num_pages
        self._tokens: list[list[int]] = [[] for _ in range(self._num_pages)]
        self._computed = [0] * self._num_pages  # of its tokens, those whose work is under way
        # A page is a place. What it holds has a number of its own, which is never given again: so
        # what continues it is not found behind what is written there later.
        self._contents = [ROOT] * self._num_pages
        self._numbers = count()
        self._parents = [ROOT] * self._num_pages  # the content before
        self._known = [False] * self._num_pages  # whether others can find it
        self._chain: dict[tuple[int, tuple[int, ...]], int] = {}
        self._below: dict[tuple[int, int], dict[int, None]] = {}  # by content before, first token

    @property
    def num_held(self) -> int:
        """Pages that sequences hold."""
        return self._num_pages - len(self._free) - len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and those that only remember."""
        return len(self._free) + len(self._idle)

    def clear(self) -> None:
        """Forget every token; no page may be held."""
        assert self.num_held == 0 and self.num_filled == 0
        self._reset()

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.page_tokens)

    # ---- a sequence

    def open(self, tokens: Sequence[int], ahead: int) -> Opened | None:
        """Give a new sequence its pages, with room for `ahead` more tokens; None if there are too
        few, and nothing changes. At least its last token is left to compute.
        """
        limit, size = len(tokens) - 1, self.page_tokens
        shared = self._match(tokens, limit)
        rest = tokens[len(shared) * size : min(limit, (len(shared) + 1) * size)]
        source, same = self._tail(self._contents[shared[-1]] if shared else ROOT, rest)
        held = self._share(shared, len(tokens) + ahead)
        if held is None:
            return None
        copy = None
        if same:
            alone = self._refs[source] == 0 and same == len(self._tokens[source]) < size
            if alone and source in self._idle:
                self._hold(source)  # its owner is gone: go on where that one ended
                held.pages.append(source)
                held.nodes.append(source)
                held.length += same
            else:
                copy = (source, self._begin(held, rest[:same]))
                self._computed[copy[1]] = same
        # What is shared may still be under work, which is then ahead of this sequence's own.
        hit = held.computed = held.length
        self.write(held, tokens[hit:])
        self.grow(held, len(tokens) + ahead)
        return Opened(held, hit, copy)

    def follow(self, leader: Held, tokens: Sequence[int], ahead: int) -> Opened | None:
        """Do as `open` for a sequence with the very tokens of `leader`, which is not computed yet:
        all is taken from that one, and the copy is due when its work is under way.
        """
        count, used = divmod(len(tokens), self.page_tokens)
        held = self._share(leader.nodes[:count], len(tokens) + ahead)
        if held is None:
            return None
        copy = None
        if used:
            copy = (leader.pages[count], self._begin(held, tokens[-used:]))
        self.grow(held, len(tokens) + ahead)
        return Opened(held, len(tokens), copy)

    def grow(self, held: Held, num_tokens: int) -> bool:
        """Give the sequence room for `num_tokens` in all; False if pages are lacking, and nothing
        changes.
        """
        missing = self.pages_for(num_tokens) - len(held.pages)
        if missing > self.num_available:
            return False
        held.pages += [self._take() for _ in range(missing)]
        return True

    def spare(self, most: int) -> list[int]:
        """The pages that would be taken next, in order: what `extend` is to be given."""
        free = self._free[: -most - 1 : -1]
        return free + list(islice(self._idle, most - len(free)))

    def extend(self, held: Held, page: int) -> None:
        """Give the sequence the next of the pages that `spare` named."""
        taken = self._take()
        assert taken == page, f"page {page} was taken out of turn; {taken} was next"
        held.pages.append(taken)

    def room(self, held: Held) -> int:
        """Tokens that the sequence's pages can hold."""
        return len(held.pages) * self.page_tokens

    def write(self, held: Held, tokens: Sequence[int], *, computed: bool = False) -> None:
        """Append tokens to what the pages hold, and let other sequences find them; `computed`, if
        the work for them is under way already.
        """
        done = 0
        while done < len(tokens):
            index, used = divmod(held.length, self.page_tokens)
            part = tokens[done : done + self.page_tokens - used]
            if used == 0:
                self._begin(held, part)
            else:
                page = held.pages[index]
                self._tokens[page] += part
                self.num_filled += len(part)
                held.length += len(part)
            done += len(part)
            if computed:
                self.compute(held, held.length)
            if held.length % self.page_tokens == 0:
                self._complete(held, index)

    def compute(self, held: Held, length: int) -> None:
        """Note that the work for the first `length` tokens is under way: whatever is asked of the
        device from now on finds them.
        """
        for index in range(held.computed // self.page_tokens, self.pages_for(length)):
            page, end = held.pages[index], length - index * self.page_tokens
            self._computed[page] = max(self._computed[page], min(end, self.page_tokens))
        held.computed = length

    def close(self, held: Held) -> None:
        """Take the pages back. What was computed is remembered, the rest is forgotten, even if it
        stands for a page of another sequence.
        """
        for index in range(len(held.pages) - 1, -1, -1):
            page = held.pages[index]
            if (index + 1) * self.page_tokens > held.computed and not self._is_computed(page):
                self._forget(page)
            if index < len(held.nodes) and held.nodes[index] != page:
                self._drop(page)
                page = held.nodes[index]
            self._drop(page)
        held.pages, held.nodes, held.length, held.computed = [], [], 0, 0

    # ---- pages

    def _match(self, tokens: Sequence[int], limit: int) -> list[int]:
        """The full pages that hold the beginning of `tokens`, at most `limit` of these."""
        found: list[int] = []
        content, size = ROOT, self.page_tokens
        for end in range(size, limit + 1, size):
            page = self._chain.get((content, tuple(tokens[end - size : end])))
            if page is None:
                break
            found.append(page)
            content = self._contents[page]
        return found

    def _share(self, pages: Sequence[int], num_tokens: int) -> Held | None:
        """Hold full pages for a new sequence, if there are enough others for `num_tokens`."""
        num_idle = sum(page in self._idle for page in pages)
        if self.pages_for(num_tokens) - len(pages) > self.num_available - num_idle:
            return None
        for page in pages:
            self._hold(page)
        length = len(pages) * self.page_tokens
        return Held(list(pages), list(pages), length, length)

    def _tail(self, parent: int, rest: Sequence[int]) -> tuple[int, int]:
        """The page behind a content that holds most of the beginning of `rest`, and how much."""
        best, most = ROOT, 0
        below = self._below.get((parent, rest[0]), {}) if rest else {}
        for page in islice(reversed(below), MAX_TAILS):
            own, end = self._tokens[page], min(len(rest), self._computed[page])
            same = next((i for i in range(end) if own[i] != rest[i]), end)
            if same > most:
                best, most = page, same
        return best, most

    def _begin(self, held: Held, tokens: Sequence[int]) -> int:
        """Start a page with the sequence's next tokens; it is the one grown ahead, if any."""
        index = held.length // self.page_tokens
        if index == len(held.pages):
            held.pages.append(self._take())
        page = held.pages[index]
        parent = self._contents[held.nodes[index - 1]] if index else ROOT
        self._tokens[page] = list(tokens)
        self._computed[page] = 0
        self._contents[page] = next(self._numbers)
        self._parents[page] = parent
        self._known[page] = True
        self._below.setdefault((parent, tokens[0]), {})[page] = None
        self.num_filled += len(tokens)
        held.nodes.append(page)
        held.length += len(tokens)
        return page

    def _complete(self, held: Held, index: int) -> None:
        """Enter a full page into the chain, or let one that is there already stand for it, unless
        that one is yet to be computed, which may never come about, and this one is not.
        """
        page = held.pages[index]
        key = (self._parents[page], tuple(self._tokens[page]))
        first = self._chain.setdefault(key, page)
        if first == page:
            return
        if self._is_computed(page) and not self._is_computed(first):
            self._chain[key] = page
            return
        self._hold(first)
        held.nodes[index] = first
        self._forget(page)

    def _is_computed(self, page: int) -> bool:
        return self._computed[page] == len(self._tokens[page])

    def _take(self) -> int:
        """An empty page: a free one, or the one that has been idle for longest."""
        if self._free:
            page = self._free.pop()
        else:
            page = self._idle.popitem(last=False)[0]
            self._forget(page)
        self._tokens[page] = []
        self._refs[page] = 1
        return page

    def _hold(self, page: int) -> None:
        if self._refs[page] == 0:
            del self._idle[page]
            self.num_filled += len(self._tokens[page])
        self._refs[page] += 1

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page]:
            return
        tokens = self._tokens[page]
        self.num_filled -= len(tokens)
        if self._known[page] and self._is_computed(page):
            # A sequence is closed from its end, so a page becomes idle after those behind it.
            self._idle[page] = None
        else:
            self._forget(page)
            self._free.append(page)

    def _forget(self, page: int) -> None:
        """Let no sequence find the page any more."""
        if not self._known[page]:
            return
        self._known[page] = False
        parent, tokens = self._parents[page], self._tokens[page]
        below = self._below[parent, tokens[0]]
        del below[page]
        if not below:
            del self._below[parent, tokens[0]]
        if self._chain.get((parent, tuple(tokens))) == page:
            del self._chain[parent, tuple(tokens)]
