"""Requests: jobs through the engine, a result of each as it ends, and what they took."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from pageforge.cli.jobs import Job, Result
from pageforge.engine.engine import Engine

Encode = Callable[[str | tuple[int, ...]], list[int]]
"""From a prompt to token ids."""


class Requests:
    """Jobs through an engine.

    Attributes:
        num_done: Jobs that have ended well.
        num_failed: Jobs that have not.
        failure: The first of those.
        num_cut: Completions that ended before max_tokens, by the model's positions.
        prompt_tokens, new_tokens: Of the jobs that have ended.
        asked_tokens: The prompt tokens, once for each completion.
        fullest: The pool after the step that left most pages in use.
    """

    def __init__(self, engine: Engine, encode: Encode, check: Callable[[], None], *, most: int):
        """`check` is called between steps. `most`: jobs that the engine has at a time."""
        self._engine = engine
        self._encode = encode
        self._check = check
        self._most = most
        self.num_done = 0
        self.num_failed = 0
        self.failure: Result | None = None
        self.num_cut = 0
        self.prompt_tokens = 0
        self.new_tokens = 0
        self.asked_tokens = 0
        self.fullest = engine.stats().pool

    def answer(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Results as they come. A job that fails has an error, and the others go on."""
        pending = deque(jobs)
        begun: dict[str, Job] = {}
        while pending or begun:
            while pending and len(begun) < self._most:
                job = pending.popleft()
                try:
                    prompt = self._encode(job.prompt)
                    self._engine.add_request(prompt, job.params, request_id=job.id)
                except Exception as error:  # the prompt's, or the tokenizer's with it
                    yield self._counted(Result(job, None, error))
                else:
                    begun[job.id] = job
            self._check()
            for output in self._engine.step():
                job = begun.pop(output.request_id)
                yield self._counted(Result(job, output, output.error))
            self._look_at_pool()

    def stream(self, job: Job) -> Iterator[str]:
        """The text of a job's one completion as it comes. Raises what makes it fail."""
        prompt = self._encode(job.prompt)
        num_tokens, finish_reason = 0, None
        for chunk in self._engine.stream(prompt, job.params):
            self._check()
            self._look_at_pool()
            num_tokens += len(chunk.token_ids)
            finish_reason = chunk.finish_reason
            yield chunk.text or ""
        self.num_done += 1
        self.prompt_tokens += len(prompt)
        self.asked_tokens += len(prompt)
        self._count_completion(job, num_tokens, finish_reason)

    def _counted(self, result: Result) -> Result:
        if result.error is None:
            self.num_done += 1
        else:
            self.num_failed += 1
            self.failure = self.failure or result
        if result.output is not None:
            num_tokens = len(result.output.prompt_token_ids)
            self.prompt_tokens += num_tokens
            self.asked_tokens += num_tokens * len(result.output.outputs)
            for each in result.output.outputs:
                self._count_completion(result.job, len(each.token_ids), each.finish_reason)
        return result

    def _count_completion(self, job: Job, num_tokens: int, finish_reason: str | None) -> None:
        self.new_tokens += num_tokens
        self.num_cut += finish_reason == "length" and num_tokens < job.params.max_tokens

    def _look_at_pool(self) -> None:
        pool = self._engine.stats().pool
        if pool.pages_used > self.fullest.pages_used:
            self.fullest = pool


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits until the function that this gives is called; a second one does not wait.

    So no step is left in its middle, and the engine can be closed.
    """
    is_asked = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        signal.signal(signal.SIGINT, before)

    def check() -> None:
        if is_asked:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as it is where a script runs this in the background
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
