"""Plans the sampler's rounds: who is admitted, what is prefilled, who decodes, who gives way.

A round grows the pages of the lanes that decode, admits what waits as far as lanes and pages go,
prefills at most `engine.prefill_calls` calls, and decodes for at most `engine.decode_steps` steps.
Requests wait in a heap, in the order of their coroutines, so that an episode that has begun comes
before one that has not, and finds its pages. Of requests with one and the same prompt the first is
computed, and the others take its pages. When pages run out, the lane admitted last gives its own
back and waits again with what it sampled; the lane admitted first always finds enough, so something
always moves. With the default `engine.kv_tokens` no lane that decodes is ever interrupted. Nothing
here touches the device: a plan is arrays, and results are arrays.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from spade_jax.engine_config import EngineConfig
from spade_jax.rollout.pages import Held, Opened, PageTable
from spade_jax.rollout.requests import Request
from spade_jax.rollout.stats import EngineStats
from spade_jax.types import Stop


@dataclass(eq=False)
class Lane:
    """A request that the device knows of."""

    index: int
    request: Request
    held: Held
    rank: int  # the lane admitted later gives way
    kept: int  # sampled tokens it came with
    next: int  # first token that no piece covers yet
    ready: bool = False  # prefilled, its next token drawn or under way
    position: int = -1  # of the last token drawn, when ready
    decoded: bool = False
    leader: "Lane | None" = None  # computes this one's prompt along with its own
    followers: list["Lane"] = field(default_factory=list)
    copy: tuple[int, int] | None = None  # due when the leader's work is under way


class Piece(NamedTuple):
    """Tokens `start..end` of a lane."""

    lane: Lane
    start: int
    end: int


class Call(NamedTuple):
    """One prefill call, and the lanes for which a token is drawn behind one of its pieces."""

    pieces: list[Piece]
    ends: list[tuple[int, Lane]]


class Plan(NamedTuple):
    """What the device does in a round, in this order."""

    placed: list[Lane]  # lanes whose sequence or pages are new
    copies: list[tuple[int, int]]
    calls: list[Call]
    late_copies: list[tuple[int, int]]
    slots: list[int]  # the lane in each slot; -1 none
    line: list[int]  # lanes that wait for a slot
    limits: dict[int, int]  # by lane, the position of the last token it may draw
    spare: list[int]  # pages for lanes that come to the end of theirs

    @property
    def decodes(self) -> bool:
        """Whether there is a token to decode."""
        return bool(self.line) or any(slot >= 0 for slot in self.slots)


class Results(NamedTuple):
    """What a round drew, on the host."""

    drawn: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # tokens and log-probs of each call
    decoded: tuple[np.ndarray, ...] | None  # the fields of `programs.Decoded`


class Rounds:
    """Requests that wait, and lanes with their pages."""

    def __init__(self, config: EngineConfig, stats: EngineStats) -> None:
        self._config = config
        self._stats = stats
        self._table = PageTable(config.num_pages, config.page_tokens)
        self._waiting: list[tuple[int, int, Request]] = []  # a heap
        self._ties = count()
        self._ranks = count()
        self._free = list(range(config.lanes - 1, -1, -1))
        self._lanes: dict[int, Lane] = {}  # by index
        self._jobs: deque[Lane] = deque()  # lanes to prefill, in the order of their ranks
        self._slots = [-1] * config.slots  # the lane in each slot
        self._leaders: dict[tuple[int, ...], Lane] = {}  # by prompt, while it is not computed

    # ---- requests

    @property
    def busy(self) -> bool:
        """Whether a request waits or is served."""
        return bool(self._waiting or self._lanes)

    @property
    def num_held(self) -> int:
        """Pages in use."""
        return self._table.num_held

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        heapq.heappush(self._waiting, (request.order, next(self._ties), request))

    def drop(self, stop: Stop) -> list[Request]:
        """End every request where it is, and hold no page any more."""
        dropped = [request for _, _, request in self._waiting if not request.ended]
        lanes = sorted(self._lanes.values(), key=lambda lane: -lane.rank)
        dropped += [lane.request for lane in lanes if not lane.request.ended]
        for lane in lanes:
            self._release(lane)
        for request in dropped:
            request.stop = stop
        self._waiting = []
        return dropped

    def clear(self) -> None:
        """Forget every page."""
        self._table.clear()

    # ---- planning

    def plan(self) -> Plan:
        """What the next round does."""
        self._sweep()
        placed = self._grow()
        admitted, copies = self._admit()
        calls, late_copies = self._prefill()
        limits, line = {}, []
        for lane in self._by_rank():
            if not lane.ready:
                continue
            limits[lane.index] = lane.request.limit()
            if lane.position >= min(limits[lane.index], self._table.room(lane.held)):
                self._leave(lane)
            elif lane.index not in self._slots:
                line.append(lane.index)
        self._stats.count_pages(self._table)
        order = sorted(placed | admitted, key=lambda lane: lane.index)
        spare = self._table.spare(self._config.spare_pages)
        return Plan(order, copies, calls, late_copies, list(self._slots), line, limits, spare)

    def _by_rank(self) -> list[Lane]:
        return sorted(self._lanes.values(), key=lambda lane: lane.rank)

    def _sweep(self) -> None:
        """Give back the lanes of what is out of time or not wanted; one whose prompt is under work
        goes after it, since others may be waiting for its pages.
        """
        for lane in list(self._lanes.values()):
            if lane.ready and lane.request.ended:
                self._release(lane)

    def _grow(self) -> set[Lane]:
        """Give the lanes that can decode, the first admitted first, the page of their next token;
        return those that got one here, and not from the spare ones of a run.
        """
        grown = set()
        for lane in [lane for lane in self._by_rank() if lane.ready]:
            if lane.index not in self._lanes:
                continue  # it gave way to one before it
            before = self._table.room(lane.held)
            while not self._table.grow(lane.held, lane.position + 1) and self._give_way(lane):
                pass
            if self._table.room(lane.held) > before:
                grown.add(lane)
        return {lane for lane in grown if lane.index in self._lanes}

    def _give_way(self, lane: Lane) -> bool:
        """Take back the pages of the lane admitted last, if that is after `lane`."""
        last = max(self._lanes.values(), key=lambda other: other.rank)
        if last.rank <= lane.rank:
            return False
        self._requeue(last)
        return True

    def _requeue(self, lane: Lane) -> None:
        """Let a lane's request wait again. One that has not decoded yet forgets what it drew, and
        draws it again: then its bits do not tell that it had to wait.
        """
        self._stats.preempted_count += 1
        if not lane.decoded:
            self._stats.sampled_tokens -= lane.request.num_sampled - lane.kept
            lane.request.rewind(lane.kept)
        self._release(lane)
        if not lane.request.ended:
            heapq.heappush(self._waiting, (lane.request.order, next(self._ties), lane.request))

    def _admit(self) -> tuple[set[Lane], list[tuple[int, int]]]:
        """Give lanes and pages to requests that wait, in order, until one finds none."""
        admitted, copies = set(), []
        while self._waiting and self._free:
            request = self._waiting[0][2]
            if request.ended:
                heapq.heappop(self._waiting)
                continue
            key = tuple(request.tokens)
            leader = self._leaders.get(key)
            if leader is not None and len(leader.followers) + 1 >= self._config.slots:
                break  # no more can be drawn behind one prompt; the next round finds its pages
            opened = self._open(request, leader)
            if opened is None:
                break
            heapq.heappop(self._waiting)
            rank = next(self._ranks)
            index = self._free.pop()
            lane = Lane(index, request, opened.held, rank, request.num_sampled, opened.hit)
            self._lanes[index] = lane
            admitted.add(lane)
            self._stats.prefix_hit_tokens += opened.hit
            self._stats.prefilled_tokens += len(request.tokens) - opened.hit
            if leader is not None:
                lane.leader, lane.copy = leader, opened.copy
                leader.followers.append(lane)
                continue
            self._leaders[key] = lane
            self._jobs.append(lane)
            if opened.copy is not None:
                copies.append(opened.copy)
        return admitted, copies

    def _open(self, request: Request, leader: Lane | None) -> Opened | None:
        # Each lane that is there may soon need a page: what is admitted must not take it at once.
        if self._lanes and self._table.num_available < len(self._lanes):
            return None
        ahead = 1 if len(request.tokens) < request.most - 1 else 0
        if leader is None:
            return self._table.open(request.tokens, ahead)
        return self._table.follow(leader.held, request.tokens, ahead)

    # ---- prefill

    def _prefill(self) -> tuple[list[Call], list[tuple[int, int]]]:
        """Cut the prompts that are due into calls, and note what they compute."""
        slots, largest = self._config.slots, self._config.prefill_pieces[-1]
        budget = self._config.prefill_calls * largest
        calls: list[Call] = []
        late_copies: list[tuple[int, int]] = []
        call = Call([], [])
        while self._jobs and budget:
            lane = self._jobs[0]
            end = len(lane.request.tokens)
            waiting = 1 + len(lane.followers)
            if len(call.pieces) == largest or len(call.ends) + waiting > slots:
                calls.append(call)
                call = Call([], [])
            stop = min(end, lane.next + self._config.piece_tokens)
            call.pieces.append(Piece(lane, lane.next, stop))
            budget -= 1
            lane.next = stop
            if stop < end:
                continue
            self._jobs.popleft()
            for other in (lane, *lane.followers):
                call.ends.append((len(call.pieces) - 1, other))
                if other.copy is not None:
                    late_copies.append(other.copy)
                self._started(other)
            lane.followers = []
        if self._jobs and self._jobs[0].next > self._jobs[0].held.computed:
            self._table.compute(self._jobs[0].held, self._jobs[0].next)
        calls.append(call)
        return [part for call in calls for part in self._fitted(call)], late_copies

    def _started(self, lane: Lane) -> None:
        """The lane's prompt is under work to its end, and so is its next token."""
        self._table.compute(lane.held, len(lane.request.tokens))
        if self._leaders.get(tuple(lane.request.tokens)) is lane:
            del self._leaders[tuple(lane.request.tokens)]
        lane.ready, lane.leader, lane.copy = True, None, None
        lane.position = len(lane.request.tokens)

    def _fitted(self, call: Call) -> Iterable[Call]:
        """Split a call into sizes that there are, with little padding."""
        sizes, start = self._config.prefill_pieces, 0
        while start < len(call.pieces):
            rest = len(call.pieces) - start
            cover = next(size for size in sizes if size >= rest)
            fill = max((size for size in sizes if size <= rest), default=cover)
            size = cover if cover - rest <= rest - fill or fill == cover else fill
            ends = [(at - start, lane) for at, lane in call.ends if start <= at < start + size]
            yield Call(call.pieces[start : start + size], ends)
            start += size

    # ---- results

    def absorb(self, plan: Plan, results: Results) -> list[Request]:
        """Take in what a round drew; return the requests that ended, their pages given back."""
        touched: dict[int, Lane] = {}
        for call, (tokens, logprobs, untruncated) in zip(plan.calls, results.drawn, strict=True):
            for row, (_, lane) in enumerate(call.ends):
                first = (x[row : row + 1].tolist() for x in (tokens, logprobs, untruncated))
                self._take(lane, *first)
                touched[lane.index] = lane
        if results.decoded is not None:
            for lane in self._take_decoded(*results.decoded):
                touched[lane.index] = lane
        finished = []
        for lane in touched.values():
            request = lane.request
            if request.ended:
                if not request.cancelled and request.stop is not Stop.DEADLINE:
                    finished.append(request)
                self._release(lane)
            elif request.close_thinking:
                self._close_thinking(lane)
                if request.ended:
                    finished.append(request)
        self._stats.count_pages(self._table)
        return finished

    def _take_decoded(
        self,
        lanes: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        untruncated: np.ndarray,
        taken: np.ndarray,
        slots: np.ndarray,
        num_steps: np.ndarray,
    ) -> Iterable[Lane]:
        steps = int(num_steps)
        self._stats.decode_steps += steps
        self._stats.occupied_slot_steps += int((lanes[:, :steps] >= 0).sum())
        for step, slot in np.argwhere(taken[:, :steps].T >= 0).tolist():
            self._table.extend(self._lanes[int(lanes[slot, step])].held, int(taken[slot, step]))
        begins = np.ones((len(slots), steps), bool)  # of what one lane drew in one slot
        begins[:, 1:] = np.diff(lanes[:, :steps]) != 0
        starts = np.flatnonzero(begins)
        ends = np.append(starts, begins.size)[1:]
        owners = lanes[:, :steps].ravel()[starts]
        drawn = [each[:, :steps].ravel().tolist() for each in (tokens, logprobs, untruncated)]
        for owner, start, end in zip(owners.tolist(), starts.tolist(), ends.tolist(), strict=True):
            if owner >= 0:
                lane = self._lanes[owner]
                lane.decoded = True
                self._take(lane, *(each[start:end] for each in drawn))
                yield lane
        self._slots = slots.tolist()

    def _take(
        self, lane: Lane, tokens: list[int], logprobs: list[float], untruncated: list[float]
    ) -> None:
        """Append what a lane drew, and what of it the cache holds now: all but the last."""
        request = lane.request
        if request.ended or request.close_thinking:
            return
        kept = request.absorb(tokens, logprobs, untruncated)
        self._stats.sampled_tokens += kept
        if request.error:
            self._stats.failed_count += 1
            return
        written = request.tokens[lane.held.length : len(request.tokens) - 1]
        self._table.write(lane.held, written, computed=True)
        lane.position = len(request.tokens) - 1

    def _close_thinking(self, lane: Lane) -> None:
        """Append the ids that close a thinking block, and prefill them."""
        request = lane.request
        request.force_closing()
        if request.stop is not None:
            self._release(lane)
            return
        lane.kept = request.num_sampled
        self._leave(lane)
        if not self._table.grow(lane.held, len(request.tokens) + 1):
            self._requeue(lane)
            return
        lane.ready, lane.decoded, lane.next = False, False, lane.held.length
        self._table.write(lane.held, request.tokens[lane.held.length :])
        self._jobs.append(lane)

    def _leave(self, lane: Lane) -> None:
        """Take a lane out of its slot."""
        self._slots = [-1 if slot == lane.index else slot for slot in self._slots]

    def _release(self, lane: Lane) -> None:
        """Give back a lane with its pages."""
        request = lane.request
        request.pages, request.num_known = tuple(lane.held.pages), lane.held.length
        if lane in self._jobs:
            self._jobs.remove(lane)
        if self._leaders.get(tuple(request.tokens)) is lane:
            del self._leaders[tuple(request.tokens)]
        if lane.leader is not None:
            lane.leader.followers.remove(lane)
        self._leave(lane)
        self._table.close(lane.held)
        del self._lanes[lane.index]
        self._free.append(lane.index)
