"""The core of the engine: sequences in, tokens out, step by step. It knows no text.

`step` plans and launches the next step of the model before it looks at what the last one gave: the
device always has work while the host does its own. A sequence that turns out to have ended then was
computed once too often, which nobody sees.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.utils import logging

from pageforge.engine.flight import Flight, HostTokens, lines_at, sample
from pageforge.engine.forks import Forks
from pageforge.engine.listener import End, Listener
from pageforge.engine.outputs import FinishReason
from pageforge.engine.runner import Runner
from pageforge.engine.sampler import Sampler
from pageforge.engine.scheduler import Admission, Limits, plan
from pageforge.engine.sequence import NO_TOKEN, Rows, Sequence
from pageforge.engine.sequence_pages import MAPPED_AHEAD, SequencePages
from pageforge.engine.step import Step
from pageforge.engine.swap_space import SwapSpace
from pageforge.errors import OutOfPages, PageForgeError
from pageforge.geometry import ceil_div
from pageforge.graphs import bucket
from pageforge.pool import PagePool

logger = logging.get_logger(__name__)

Ending = tuple[Sequence, FinishReason, Any]
"""A sequence that is to end, why, and the cause (see End)."""

NO_SENSE = (
    "logits: expected a finite one at least, got NaN or -inf alone; look at the model's weights"
)


class Core:
    """Sequences, one pool, one model."""

    def __init__(
        self,
        runner: Runner,
        pool: PagePool,
        sampler: Sampler,
        limits: Limits,
        listener: Listener,
        *,
        swap_bytes: int,
    ):
        """`swap_bytes`: host memory for the pages of preempted sequences."""
        self.runner = runner
        self.pool = pool
        self.waiting: list[Sequence] = []  # by rank
        self.rows = Rows(limits.max_running)
        self.swap = SwapSpace(pool, swap_bytes)
        self.num_steps = 0
        self.num_computed = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self._unfinished: set[Sequence] = set()  # those that wait, and those that run
        self._sampler = sampler
        self._limits = limits
        self._most_running = limits.max_running  # fewer while the device has no memory for more
        self._listener = listener
        self._pages = SequencePages(pool, runner, self.rows)
        self._forks = Forks(pool)
        self._flights: deque[Flight] = deque()  # launched, the oldest first
        self._arrived: deque[tuple[Flight, int]] = deque()  # tokens that may mean something
        self._ending: deque[Ending] = deque()  # as those have said
        self._host_tokens = HostTokens(limits.max_running)
        self._kept: list[Any] = []  # swapped pages that copies may still read or write
        self._is_torn = False  # a call was interrupted, and no step has mended it yet
        self._may_compact = False  # a row has become free since it was last tried
        self._needs_host: set[int] = set()  # rows whose next token depends on the last one's value
        self._wants_prompt: set[int] = set()  # rows that compute logits of their whole prompt

    # --- coming and going -------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """It waits for its turn."""
        self._unfinished.add(sequence)
        if sequence.most_computed == 0 and sequence.limit == sequence.num_prompt:
            self.finish(sequence, "length")  # a prompt of one token, and no token wanted
            return
        self._forks.add(sequence)
        bisect.insort(self.waiting, sequence, key=_by_rank)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence with the tokens that have come so far."""
        with self._tearing():
            self._take_arrived()
            self.finish(sequence, "abort")

    def finish(self, sequence: Sequence, reason: FinishReason, cause: Any = None) -> None:
        """End a sequence in whatever state it is; its pages are free at once.

        Interrupted, it ends with the next call.
        """
        self._ending.append((sequence, reason, cause))
        self._take_arrived()

    def _end(self, sequence: Sequence, reason: FinishReason, cause: Any) -> None:
        """`finish`, as often as it takes: interrupted anywhere, it is begun again."""
        if sequence.is_finished:
            return
        if sequence.row >= 0:
            self.rows.refresh(sequence)
        self._listener.on_finish(sequence, reason, cause)
        self._forks.leave(sequence)
        if sequence.row >= 0:
            self._leave_row(sequence)
            self._most_running += 1  # there is memory for another, and perhaps by now for two
        self._leave_queue(sequence)
        self._release(sequence)
        self._unfinished.discard(sequence)
        sequence.is_finished = True

    def _leave_queue(self, sequence: Sequence) -> None:
        place = bisect.bisect_left(self.waiting, sequence.rank, key=_by_rank)
        if self.waiting[place : place + 1] == [sequence]:
            del self.waiting[place]

    # --- a step -----------------------------------------------------------------------------

    def step(self) -> None:
        """Launch the next step, then look at what the last one gave."""
        if self._is_torn:
            self._mend()
        with self._tearing():
            if self._needs_host:
                self._land()
            if self._may_compact:
                self._compact()
            launched = self._launch(self._next_plan())
            # On the CPU it is done already.
            self._land(in_flight=int(launched is not None and launched.done is not None))

    @contextlib.contextmanager
    def _tearing(self) -> Iterator[None]:
        """Whatever ends the block before its end, the next step mends what it has left."""
        was_torn, self._is_torn = self._is_torn, True
        yield
        self._is_torn = was_torn

    def _mend(self) -> None:
        """Go on after a call that was interrupted; all is worked out from the sequences anew.

        Who has no row waits, and gives up its pages, of which there may be too few or too many. A
        step may have been launched that will be made again: then the device has its tokens, and has
        counted them, so all that rows go on from must come from the host once more. It may not know
        of pages that they have, and pages that can be found may never have been computed.
        """
        self.pool.drop_prefix_cache()
        self._land()
        self.waiting = self._rowless()
        for sequence in self.waiting:
            self._drop(sequence, keep_swapped=True)
        self._needs_host.clear()
        self._wants_prompt.clear()
        self._sampler.clear()
        for sequence in [each for each in self.rows.sequences if each is not None]:
            if sequence.swapped is not None:  # it was to be preempted
                self._drop_swapped(sequence)
            self.rows.refresh(sequence)
            self.rows.room[sequence.row] = sequence.pages.length
            self._pages.show(sequence, 0)
            try:
                self._describe(sequence)
            except Exception as error:  # no memory for the sampler: the others go on
                self.finish(sequence, "error", error)
        self.swap.num_bytes = sum(
            each.swapped.num_bytes for each in self.waiting if each.swapped is not None
        )
        self._is_torn = False

    def _rowless(self) -> list[Sequence]:
        """Those that do not run, in their order."""
        return sorted((each for each in self._unfinished if each.row < 0), key=_by_rank)

    def settle(self) -> None:
        """Look at what the step in flight gives, if there is one; launch nothing."""
        with self._tearing():
            self._land()

    def _next_plan(self) -> npt.NDArray[np.int32]:
        """Who computes how many tokens, their pages being there: `[max_running]`."""
        while True:
            limits = self._limits
            if self._most_running < limits.max_running:
                limits = replace(limits, max_running=self._most_running)
            found = plan(self.rows, self.waiting, limits, self._pages, self.num_steps)
            for sequence in found.dropped:
                self._drop(sequence)
            for sequence in found.preempted:
                self._run_out(sequence)
            if found.stuck is not None:
                self.finish(found.stuck, "error", self._pages.shortage(found.stuck))
            elif not (found.dropped or found.preempted):
                counts = found.counts.copy()
                try:
                    self._admit_all(found.admitted, counts)
                    self._pages.grow(counts)
                    self._pages.publish_prompts(counts)
                    return counts
                except OutOfPages as error:  # the device itself has no memory left
                    self._yield_memory(error)

    def _admit_all(self, admitted: list[Admission], counts: npt.NDArray[np.int32]) -> None:
        """Admit sequences; set their `counts`. Raises OutOfPages where nobody else runs."""
        self.pool.map_ahead(sum(map(self._pages.lacking, admitted)))
        # Swapped ones last: they claim pages, for which known ones may go that others begin with.
        for admission in sorted(admitted, key=lambda each: each.sequence.swapped is not None):
            try:
                counts[admission.row] = self._admit(admission)
            except OutOfPages:  # the device has no memory for swapped pages: it waits on
                if not self.rows.num_running:
                    raise
                self._most_running = self.rows.num_running
                return
            except Exception as error:  # no memory for the sampler, say: the others go on
                self.finish(admission.sequence, "error", error)

    def _admit(self, admission: Admission) -> int:
        """Begin to run; how many tokens it computes in this step."""
        sequence, row = admission.sequence, admission.row
        size = self.pool.geometry.page_size
        if sequence.swapped is not None:
            sequence.table = self.swap.take(sequence.swapped)
            self._drop_swapped(sequence)
            # Its last page is its own, so it may as well fill it.
            self.pool.append([sequence.table], -sequence.num_computed % size)
        elif sequence.table is None:
            self._pages.begin(sequence, admission.prefix)
        self.rows.put(sequence, row, sequence.pages.length)
        self._leave_queue(sequence)
        self._describe(sequence)
        self._pages.show(sequence, 0)
        self._listener.on_scheduled(sequence)
        return admission.num_tokens

    def _describe(self, sequence: Sequence) -> None:
        """What the sampler must know of a row, and whoever plans its steps."""
        row, params = sequence.row, sequence.params
        if params.needs_host:
            self._needs_host.add(row)
        if params.prompt_logprobs is not None:
            self._wants_prompt.add(row)
        self._sampler.set_row(
            row,
            params,
            prompt_tokens=sequence.tokens[: sequence.num_prompt],
            output_tokens=sequence.tokens[sequence.num_prompt :],
            eos_ids=sequence.stop_ids,
        )

    def _launch(self, counts: npt.NDArray[np.int32]) -> Flight | None:
        """Run the step on the device, and account for it."""
        if not counts.any():
            return None
        rows = self.rows
        try:
            greedy = self._sampler.takes_best(np.flatnonzero(counts))
            step = self.runner.launch(rows, counts, self._asking(counts), greedy=greedy)
            flight = self._sample(step)
        except Exception as error:  # the model's, or the user's in it: the others go on
            everyone = [rows.at(row) for row in np.flatnonzero(counts).tolist()]
            logger.warning("engine: a step of %d sequences failed: %s", len(everyone), error)
            self._land()
            self.pool.drop_prefix_cache()  # what it should have written may not be there
            for sequence in everyone:
                self.finish(sequence, "error", error)
            return None
        # Only where no token is wanted is the prompt's last one not computed.
        ends = (counts > 0) & (rows.computed + counts == rows.most_computed)
        scores = ends & (rows.most_computed < rows.prompt)
        flight.scored += map(rows.at, np.flatnonzero(scores).tolist())
        rows.computed += counts
        rows.pending[flight.rows] += 1
        flight.kept, self._kept = self._kept, []
        self._flights.append(flight)  # at once: from here on an interrupt does not lose it
        self.num_steps += 1
        self.num_computed += int(counts.sum())
        self._forks.share(rows)
        self.pool.map_ahead(ceil_div(MAPPED_AHEAD * rows.num_running, self.pool.geometry.page_size))
        return flight

    def _asking(self, counts: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_] | None:
        """`[max_running]`: rows of whose prompt all logits are asked for; None without any."""
        asking = [
            row
            for row in self._wants_prompt
            if counts[row] and self.rows.computed[row] < self.rows.prompt[row]
        ]
        if not asking:
            return None
        mask = np.zeros(len(self.rows), np.bool_)
        mask[asking] = True
        return mask

    def _sample(self, step: Step) -> Flight:
        """Choose a token for each of the step's rows; the next step finds it on the device."""
        rows, chosen = self.rows, step.rows
        flight = Flight(rows.sequences.copy(), chosen, rows.epoch[chosen])
        if step.tokens is not None:
            tokens = lines_at(step.tokens, step.places)
        else:
            sampled = sample(step, rows, self._sampler, flight)
            self.runner.keep_tokens(chosen, sampled.tokens)
            tokens = sampled.tokens.masked_fill(sampled.bad, NO_TOKEN)
        self._host_tokens.fetch(tokens, flight)
        return flight

    # --- what a step gave -------------------------------------------------------------------

    def _land(self, in_flight: int = 0) -> None:
        """Wait for the steps in flight, all but the last `in_flight`, and take their tokens."""
        self._take_arrived()  # those that an interrupt has left
        while len(self._flights) > in_flight:
            flight = self._flights[0]
            self._wait_for(flight)
            self._note(flight)
            self._take_arrived()
            self._host_tokens.take_back(flight)
        self.let_go()

    def _wait_for(self, flight: Flight) -> None:
        """Have what a step gives on the host. An interrupt while it waits loses nothing."""
        if flight.done is not None:
            flight.done.synchronize()
        for sequence, first, logprobs in flight.prompts:
            if not sequence.is_finished:
                self._listener.on_prompt_logprobs(sequence, first, logprobs)

    def _note(self, flight: Flight) -> None:
        """Make the oldest step's tokens known; all rows at once, however many there are."""
        tokens = flight.tokens.numpy()[: len(flight.rows)]
        is_current = self.rows.epoch[flight.rows] == flight.epochs
        rows, found = flight.rows[is_current], tokens[is_current]
        lengths = self.rows.length[rows]
        stops = (found[:, None] == self.rows.stop_ids[rows]).any(1) | (found == NO_TOKEN)
        is_last = lengths == self.rows.most_computed[rows]  # all but this one
        is_first = lengths == self.rows.prompt[rows]
        matters = stops | is_first | is_last | self.rows.is_watched[rows]
        others = np.flatnonzero(~is_current).tolist()  # moved to another row, or lost their own
        arrived = [(flight, place) for place in np.flatnonzero(is_current)[matters].tolist()]
        ending: list[Ending] = [(sequence, "length", None) for sequence in flight.scored]
        for place in others:
            self._catch_up(flight, place)
        # Nothing is called from here on, so that Python lets no interrupt in between.
        self.rows.tokens[rows, lengths] = found
        self.rows.length[rows] += found != NO_TOKEN
        self.rows.pending[rows] -= 1
        self._arrived += arrived
        self._ending += ending
        del self._flights[0]

    def _catch_up(self, flight: Flight, place: int) -> None:
        """Make a token known of a sequence that is not where it was; again, nothing happens."""
        sequence, token = flight.at(place)
        if sequence.is_finished or place in flight.caught_up:
            return
        row, tokens = sequence.row, sequence.tokens
        if row < 0 and token != NO_TOKEN:
            tokens = np.append(tokens, np.int32(token))
        arrived = ((flight, place),)
        # An interrupt comes no sooner than behind the call of `add`.
        if row >= 0:
            self.rows.tokens[row, self.rows.length[row]] = token
            self.rows.length[row] += token != NO_TOKEN
            self.rows.pending[row] -= 1
        else:
            sequence.num_pending -= 1
            sequence.tokens = tokens
        self._arrived += arrived
        flight.caught_up.add(place)

    def _take_arrived(self) -> None:
        """See what tokens mean for their sequences. Interrupted there, the next call goes on."""
        while self._ending or self._arrived:
            if self._ending:
                self._end(*self._ending[0])
                self._ending.popleft()
                continue
            flight, place = self._arrived[0]
            sequence, token = flight.at(place)
            end = None if sequence.is_finished else self._look_at(sequence, token, flight, place)
            if end is not None:
                self._ending.append((sequence, *end))
            self._arrived.popleft()

    def _look_at(self, sequence: Sequence, token: int, flight: Flight, place: int) -> End | None:
        """Whether a sequence ends with a new token."""
        if token == NO_TOKEN:
            error = flight.errors.get(place)
            if error is None:
                self.pool.drop_prefix_cache()  # its K/V may make no sense either
            return "error", error or PageForgeError(NO_SENSE)
        num_tokens = len(self.rows.tokens_of(sequence))
        if num_tokens == sequence.num_prompt + 1:
            self._listener.on_first_token(sequence)
        if sequence.is_watched:
            end = self._listener.on_token(sequence, token, flight, place)
            if end is not None:
                return end
        if token in sequence.stop_ids:
            return "stop", token
        return ("length", None) if num_tokens == sequence.limit else None

    # --- giving up pages --------------------------------------------------------------------

    def _run_out(self, sequence: Sequence) -> None:
        """Preempt it because pages have run out, and say so."""
        num_tokens = int(self.rows.computed[sequence.row])
        self.preempt(sequence)
        logger.warning(
            "engine: out of pages; %r gives up its %d computed tokens (%s)",
            sequence.owner if sequence.owner is not None else sequence,
            num_tokens,
            "computes them again" if sequence.swapped is None else "swapped to the host",
        )

    def preempt(self, sequence: Sequence, *, swap: bool = True) -> None:
        """Take row and pages from a running sequence; it waits, and goes on later.

        Its pages go to the host if there is room and `swap`, else they are computed again.
        """
        num_tokens = int(self.rows.computed[sequence.row])
        if swap and num_tokens and sequence.swapped is None:
            sequence.swapped = self.swap.put(sequence.pages, num_tokens)
            self.num_swaps += sequence.swapped is not None
        self._leave_row(sequence)
        self._release(sequence, keep_swapped=True)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=_by_rank)

    def give_up_pages(self, *, swap: bool = True) -> None:
        """Every sequence gives its pages up, to go on later; without `swap` the host's as well."""
        with self._tearing():
            self._land()
            for sequence in sorted(filter(None, self.rows.sequences), key=_by_rank, reverse=True):
                self.preempt(sequence, swap=swap)
            for sequence in self._rowless():
                self._drop(sequence, keep_swapped=swap)
            self.let_go()

    def _compact(self) -> None:
        """Move the last rows to free ones before them, where steps get smaller by it."""
        rows, self._may_compact = self.rows, False
        while rows.num_running and bucket(rows.end) > bucket(rows.num_running):
            source, target = rows.end - 1, rows.free_row()
            assert target is not None
            self.runner.move_row(source, target)
            self._sampler.move_row(source, target)
            rows.move(source, target)
            for members in (self._needs_host, self._wants_prompt):
                if source in members:
                    members.remove(source)
                    members.add(target)

    def _leave_row(self, sequence: Sequence) -> None:
        row = sequence.row
        # Others may find the pages of all tokens that are known and computed.
        self._pages.publish(sequence, min(int(self.rows.computed[row]), int(self.rows.length[row])))
        self.rows.take(sequence)
        self._sampler.clear_row(row)
        self._may_compact = True
        self._needs_host.discard(row)
        self._wants_prompt.discard(row)

    def _release(self, sequence: Sequence, *, keep_swapped: bool = False) -> None:
        """Give its pages back; what it computed is lost, unless they lie on the host."""
        if sequence.table is not None:
            self.pool.release([sequence.table])
            sequence.table, sequence.cursors = None, []
        if sequence.swapped is not None and not keep_swapped:
            self._drop_swapped(sequence)
        if sequence.swapped is None:
            sequence.num_computed = 0

    def _drop(self, sequence: Sequence, *, keep_swapped: bool = False) -> None:
        """Have a waiting sequence give its pages up; what it lost is computed once it runs."""
        self._release(sequence, keep_swapped=keep_swapped)
        if not sequence.num_preemptions:  # they were another's prompt, and have saved it nothing
            sequence.num_cached = 0

    def _drop_swapped(self, sequence: Sequence) -> None:
        """Its pages on the host are needed no more, but by copies that are not done yet."""
        self._kept.append(sequence.swapped)
        self.swap.drop(sequence.swapped)
        sequence.swapped = None

    def let_go(self) -> None:
        """Free the swapped pages that no flight will take along; waits until they were copied."""
        if self._kept and not self._flights:
            self.swap.finish_copies()
            self._kept.clear()

    def _yield_memory(self, error: OutOfPages) -> None:
        """The device has less memory than the pool's budget: somebody gives up pages.

        Those that wait first, then the youngest that runs. Who is left alone cannot go on.
        """
        running = sorted(filter(None, self.rows.sequences), key=_by_rank)
        holders = [sequence for sequence in self.waiting if sequence.table is not None]
        if holders:
            for sequence in holders:
                self._drop(sequence)
        elif len(running) > 1:
            self._run_out(running[-1])
        else:
            self.finish((running or self.waiting)[0], "error", error)
        self._most_running = max(1, self.rows.num_running)  # else who gave way would begin again


def _by_rank(sequence: Sequence) -> int:
    return sequence.rank
