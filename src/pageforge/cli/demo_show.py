"""What the demo plays: sequences that share a pool, each with a paged cache of its own."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pageforge.cli.prompts import encode
from pageforge.errors import OutOfPages
from pageforge.geometry import pages_for
from pageforge.hf.cache import PagedKVCache
from pageforge.memory import PageTable
from pageforge.pool import PagePool
from pageforge.probe import cache_argument

PROMPTS = (
    "What would you pack for a week in the mountains in early spring, and why?",
    "Who was the first to sail around the world?",
    "Tell me a story that begins like this: On the last day of autumn the keeper of the old "
    "lighthouse found a letter that was addressed to nobody, and opened it by the window.",
    "It is 1850, and you have just seen a railway for the first time. Describe it to your sister.",
    "Explain in plain words why a heavy ship floats although a small stone sinks.",
    "How do I bake bread?",
    "Write a short poem about a blacksmith's forge at night.",
    "What is a lighthouse for?",
    "Write a letter from a pen to the paper it has just run out of. Be kind, and mention the desk, "
    "the lamp, and the unfinished sentence.",
    "Name three animals that sleep in winter.",
    "Why is the sea salty? Explain it to a child of eight who has just come back from the beach.",
    "Describe the smell of rain.",
    "A town by a river wants to build a bridge. Write what its oldest inhabitant says about it.",
    "Give me a good name for a cat.",
    "What do bees do in the evening?",
    "What is a page?",
)
LENGTHS = (1.0, 0.4, 0.8, 0.3, 0.65, 0.5, 0.9, 0.7)
"""Of the most tokens that a sequence may generate: they end at different times."""

FORKS = 2
"""Of each batch, so many sequences continue another one's prompt."""

ROUNDS_BETWEEN = 2
"""One sequence arrives after so many tokens of the one before."""

TEMPERATURE = 0.8
TOP_K = 40


class State(Enum):
    """Where a sequence is in its life."""

    LATER = "arrives later"
    WAITING = "waits for pages"
    RUNNING = "running"
    ENDED = "ended"


@dataclass
class Member:
    """One sequence of a batch."""

    label: str
    prompt: list[int]
    max_new_tokens: int
    arrives: int  # in rounds
    random: torch.Generator
    forks: list[Member] = field(default_factory=list)
    is_fork: bool = False
    state: State = State.LATER
    cache: PagedKVCache | None = None
    new: list[int] = field(default_factory=list)
    text: str = ""
    pages_held: int = 0  # at the end, when they are gone

    @property
    def table(self) -> PageTable | None:
        """Its live page table."""
        tables = [] if self.cache is None else self.cache.page_tables
        return tables[0] if tables else None

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return len(self.prompt) + len(self.new)

    @property
    def is_over(self) -> bool:
        """Whether it has its last token."""
        return len(self.new) >= self.max_new_tokens


def batches(
    tokenizer: PreTrainedTokenizerBase, num_sequences: int, max_new_tokens: int, seed: int
) -> list[list[Member]]:
    """Two batches of `num_sequences` each: other prompts, the same lengths."""
    prompts = itertools.cycle([encode(tokenizer, text) for text in PROMPTS])
    return [
        _batch(prompts, num_sequences, max_new_tokens, seed + number * num_sequences)
        for number in range(2)
    ]


def _batch(
    prompts: Iterator[list[int]], num_sequences: int, max_new_tokens: int, seed: int
) -> list[Member]:
    members: list[Member] = []
    num_forks = FORKS if num_sequences > FORKS else 0
    for number in range(num_sequences):
        label = string.ascii_uppercase[number % 26]
        length = max(1, round(max_new_tokens * LENGTHS[number % len(LENGTHS)]))
        random = torch.Generator().manual_seed(seed + number)
        is_fork = number >= num_sequences - num_forks
        parent = members[num_sequences - num_forks - 1] if is_fork else None
        prompt = next(prompts) if parent is None else parent.prompt
        arrives = ROUNDS_BETWEEN * number if parent is None else parent.arrives
        member = Member(label, prompt, length, arrives, random, is_fork=is_fork)
        if parent is not None:
            parent.forks.append(member)
        members.append(member)
    return members


def most_pages(batch: Sequence[Member], page_size: int) -> int:
    """Pages that a batch fills in a group if all of its sequences live at once."""
    return sum(pages_for(len(m.prompt) + m.max_new_tokens, page_size) for m in batch)


class Show:
    """Plays batches in one pool: one token of one sequence at a time, in turn."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pool: PagePool):
        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool
        ends = model.generation_config.eos_token_id
        self._ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}

    def play(self, batch: list[Member]) -> Iterator[str]:
        """Play a batch to its end. Yields after each step: what happened, or "" for a token.

        Raises OutOfPages where a prompt does not fit although it has the pool to itself.
        """
        for round_ in itertools.count():
            refusal: OutOfPages | None = None
            went_on = False
            for member in batch:
                if member.state is State.LATER and member.arrives <= round_:
                    member.state = State.WAITING
                try:
                    if member.state is State.WAITING and not member.is_fork:
                        yield self._begin(member)
                    elif member.state is State.RUNNING:
                        yield self._step(member)
                    else:
                        continue
                    went_on = True
                except OutOfPages as error:
                    refusal = error
            if all(member.state is State.ENDED for member in batch):
                return
            if refusal and not went_on:
                yield self._give_up_one(batch, refusal)

    def end(self, batch: Sequence[Member]) -> None:
        """Give back whatever the batch still holds."""
        for member in batch:
            if member.cache is not None:
                member.cache.free()

    @torch.inference_mode()
    def _begin(self, member: Member) -> str:
        """Run the prompt; its forks share the pages."""
        cache = PagedKVCache(self.pool)
        try:
            logits = self._forward(cache, member.prompt)
        except OutOfPages:
            cache.free()
            raise
        family = [member, *member.forks]
        for one, held in zip(family, [cache, *_forks(cache, len(member.forks))], strict=True):
            one.cache, one.state = held, State.RUNNING
        table = member.table
        num_pages = 0 if table is None else table.num_pages
        for one in family:
            self._add(one, logits)
        told = f"{member.label} arrives: {len(member.prompt)} tokens in {num_pages} pages"
        if member.forks:
            names = " and ".join(fork.label for fork in member.forks)
            told += f", which its forks {names} share"
        return told

    @torch.inference_mode()
    def _step(self, member: Member) -> str:
        """One more token, or the end."""
        assert member.cache is not None
        if member.is_over:
            return self._end(member)
        self._add(member, self._forward(member.cache, member.new[-1:]))
        return ""

    def _end(self, member: Member) -> str:
        used = self.pool.stats().pages_used
        table = member.table
        held = 0 if table is None else table.num_pages
        if member.cache is not None:
            member.cache.free()
        member.state, member.pages_held = State.ENDED, held
        back = used - self.pool.stats().pages_used
        kept = f" ({held - back} stay with who shares them)" if held > back else ""
        return f"{member.label} ends after {member.num_tokens} tokens: {back} pages back{kept}"

    def _give_up_one(self, batch: list[Member], refusal: OutOfPages) -> str:
        """Nobody can go on: the last one to come ends early."""
        running = [member for member in batch if member.state is State.RUNNING]
        if not running:
            raise refusal
        return f"no page left: {self._end(running[-1])}"

    def _forward(self, cache: PagedKVCache, tokens: list[int]) -> torch.Tensor:
        """The next token's logits."""
        ids = torch.tensor([tokens], device=self.model.device)
        output = self.model(input_ids=ids, use_cache=True, **{cache_argument(self.model): cache})
        return output.logits[0, -1].float().cpu()

    def _add(self, member: Member, logits: torch.Tensor) -> None:
        """Draw a token."""
        best = (logits / TEMPERATURE).topk(min(TOP_K, logits.numel()))
        drawn = torch.multinomial(best.values.softmax(-1), 1, generator=member.random)
        token = int(best.indices[drawn])
        member.new.append(token)
        if token in self._ends:
            member.max_new_tokens = len(member.new)
        member.text = str(self.tokenizer.decode(member.new, skip_special_tokens=True))


def _forks(cache: PagedKVCache, count: int) -> list[PagedKVCache]:
    return cache.fork(count) if count else []
