"""The sampler: a token for each row of a batch, each row by its own params, on the device.

A step launches tensor operations on many rows at once and never waits for the device. What it needs
of the rows' params is worked out once for a batch (`_Part`) and used until the batch changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pageforge.batch import to_device
from pageforge.engine.draw import drawn, scaled, top_scores
from pageforge.engine.logprobs import Logprobs, row_slices, token_logprobs
from pageforge.engine.params import LogitsProcessor, SamplingParams
from pageforge.engine.penalties import Penalties, TokenCounts
from pageforge.errors import ParamsError, ShapeError, expected, listed

MAX_TOPK = 1024
"""Up to so many candidates are found by `topk`; beyond, sorting the whole row is as fast."""

Rows = npt.NDArray[np.int64]
Tokens = Sequence[int] | npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Index = Tensor | slice  # of rows: int64 on the device, or all of them

FLOAT32_TINY, FLOAT32_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

NO_SLOT = NO_LOGPROBS = -1

ROW = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int64),  # at most the vocabulary, which turns it off
        ("min_tokens", np.int64),
        ("logprobs", np.int64),  # or NO_LOGPROBS
        ("slot", np.int64),  # of the token counts, or NO_SLOT: the row has no penalties
        ("has_bias", np.bool_),
        ("has_processors", np.bool_),
    ]
)
"""A row's params, as a record: steps read whole columns of them."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step chose for R rows.

    tokens: `[R]` int64 on the device.
    bad: `[R]` bool on the device: rows whose token, some valid one, means nothing: the logits held
        NaN or left no token, or a logits processor failed.
    errors: Index in the batch -> what the row's logits processor raised.
    logprobs: Of the rows that ask for them, in the batch's order; k is the most that any asks for.
    logprob_indices: `[T]`: which of the batch's rows those are.
    """

    tokens: Tensor
    bad: Tensor
    errors: dict[int, Exception]
    logprobs: Logprobs | None
    logprob_indices: Rows


class Sampler:
    """Samples for sequences that each hold a row, 0 to `max_rows - 1`.

    Methods take `rows`, `[R]` int64 on the host: the rows that the logits of a step belong to.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.device = device
        self._rows = np.zeros(max_rows, ROW)
        self._rows["slot"] = NO_SLOT
        self._extras = [NO_EXTRAS] * max_rows
        self._counts = TokenCounts(vocab_size, device)
        self._plan: _Plan | None = None  # of the latest batch
        self._particular: set[int] = set()  # rows that ask for more than the best token

    # --- rows -------------------------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """Raise ParamsError where `set_row` would."""
        beyond = [token for token, _ in params.logit_bias_pairs if token >= self.vocab_size]
        if beyond:
            raise ParamsError(
                expected(
                    "logit_bias",
                    f"token ids below {self.vocab_size}",
                    listed(beyond),
                    "take the ids of this model's tokenizer",
                )
            )

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt_tokens: Tokens,
        output_tokens: Tokens = (),
        eos_ids: Sequence[int] = (),
    ) -> None:
        """A sequence takes `row`; one that was preempted comes back with its output so far.

        Raises ParamsError; nothing was changed then.
        """
        self.check(params)
        slot = NO_SLOT
        if params.has_penalties:
            prompt = np.array(prompt_tokens, np.int64)
            slot = self._counts.claim(prompt, np.array(output_tokens, np.int64))
        self.clear_row(row)
        self._extras[row] = _RowExtras.of(params, eos_ids, self.vocab_size)
        if not (params.is_greedy and _leaves_logits(params) and params.logprobs is None):
            self._particular.add(row)
        self._rows[row] = (
            0.0 if params.is_greedy else min(params.temperature, FLOAT32_MAX),
            params.top_p,
            params.min_p,
            min(max(params.repetition_penalty, FLOAT32_TINY), FLOAT32_MAX),
            params.presence_penalty,
            params.frequency_penalty,
            min(params.top_k or self.vocab_size, self.vocab_size),
            params.min_tokens,
            NO_LOGPROBS if params.logprobs is None else min(params.logprobs, self.vocab_size),
            slot,
            bool(params.logit_bias),
            params.needs_host,
        )

    def clear_row(self, row: int) -> None:
        """The row's sequence leaves it."""
        if self._rows["slot"][row] != NO_SLOT:
            self._counts.release(int(self._rows["slot"][row]))
        self._forget(row)

    def clear(self) -> None:
        """All sequences leave their rows."""
        for row in range(len(self._rows)):
            self._forget(row)
        self._counts.release_all()

    def move_row(self, source: int, target: int) -> None:
        """The sequence of row `source` takes row `target`, which must be free."""
        self._rows[target] = self._rows[source]
        self._extras[target] = self._extras[source]
        if source in self._particular:
            self._particular.add(target)
        self._forget(source)

    def _forget(self, row: int) -> None:
        self._rows[row] = np.zeros((), ROW)
        self._rows["slot"][row] = NO_SLOT
        self._extras[row] = NO_EXTRAS
        self._particular.discard(row)
        self._plan = None

    def takes_best(self, rows: Rows) -> bool:
        """Whether `sample` would take the best token of each of `rows`, and give nothing else."""
        return not self._particular or self._particular.isdisjoint(rows.tolist())

    def draws(self, rows: Rows) -> bool:
        """Whether `sample` reads `uniform`."""
        return bool(self._rows["temperature"][rows].any())

    # --- a step -----------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self,
        logits: Tensor,
        rows: Rows,
        uniform: Tensor,
        num_generated: Rows,
        generated: Callable[[int], list[int]],
    ) -> Sampled:
        """Choose a token for each of `rows`, all different.

        logits: `[R, V]`, any float dtype; left as they are.
        uniform: `[R]` float32 on the device, of `draw.uniforms`.
        num_generated: `[R]` int64 on the host, each row's tokens before this one.
        generated: Row -> its tokens before this one; called for rows with logits processors.

        Raises ShapeError for logits of another shape. What a logits processor raises is returned.
        """
        if logits.shape != (len(rows), self.vocab_size):
            want, got = [len(rows), self.vocab_size], list(logits.shape)
            raise ShapeError(expected("logits", want, got, "pass one line for each of rows"))
        plan = self._plan_for(rows, num_generated < self._rows["min_tokens"][rows])
        tokens, bad, logprobs = [], [], []
        errors: dict[int, Exception] = {}
        for part in plan.parts:
            given = logits[part.rows]
            changed = given
            if part.changes_logits:
                changed = given.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
                failed = self._change(changed, part, generated)
                errors |= {part.rows.start + index: error for index, error in failed.items()}
            top, chosen = changed.max(-1)  # of equal ones the first; NaN beats all
            for draw in part.draws:
                chosen[draw.rows] = draw.tokens(changed, top, chosen, uniform[part.rows])
            if part.penalties is not None:
                self._counts.add(part.penalties.slots, chosen[part.penalties.rows])
            if part.logprob_rows is not None:
                asked = part.logprob_rows
                logprobs.append(token_logprobs(given[asked], chosen[asked], plan.num_logprobs))
            tokens.append(chosen)
            bad.append(~(top > -torch.inf))
        sampled = Sampled(
            torch.cat(tokens),
            torch.cat(bad),
            errors,
            Logprobs.joined(logprobs) if logprobs else None,
            plan.logprob_indices,
        )
        for index in errors:
            sampled.bad[index] = True
        return sampled

    def _change(
        self, logits: Tensor, part: _Part, generated: Callable[[int], list[int]]
    ) -> dict[int, Exception]:
        """All that comes before the temperature, in place; what processors raised, by index."""
        if part.penalties is not None:
            part.penalties.apply_to(logits, self._counts)
        flat = logits.view(-1)
        if part.bias is not None:
            flat.index_add_(0, *part.bias)
        if part.banned is not None:
            flat.index_fill_(0, part.banned, -torch.inf)
        failed: dict[int, Exception] = {}
        for index, row, processors in part.processors:
            tokens = generated(row)
            try:
                logits[index] = _processed(logits[index], tokens, processors)
            except Exception as error:  # it is the user's code: the request fails, the rest go on
                failed[index] = error
        return failed

    # --- plans ------------------------------------------------------------------------------

    def _plan_for(self, rows: Rows, held: Mask) -> _Plan:
        """What to do for `rows`; `held`, `[R]`: those that must not end yet."""
        plan = self._plan
        if (
            plan is None
            or not np.array_equal(plan.rows, rows)
            or not np.array_equal(plan.held, held)
        ):
            plan = self._plan = self._new_plan(rows.copy(), held)
        return plan

    def _new_plan(self, rows: Rows, held: Mask) -> _Plan:
        values = self._rows[rows]
        asks = values["logprobs"] != NO_LOGPROBS
        takes_memory = held | asks | values["has_bias"] | values["has_processors"]
        takes_memory |= (values["temperature"] > 0) | (values["slot"] != NO_SLOT)
        if takes_memory.any():
            slices = row_slices(len(rows), self.vocab_size)
            parts = [self._new_part(part, rows[part], held[part]) for part in slices]
        else:  # the top tokens are all that is asked for
            parts = [_Part(slice(0, len(rows)))]
        return _Plan(
            rows,
            held,
            parts,
            num_logprobs=int(values["logprobs"].max(initial=0)),
            logprob_indices=np.flatnonzero(asks),
        )

    def _new_part(self, part: slice, rows: Rows, held: Mask) -> _Part:
        values = self._rows[rows]
        orders = (values["top_k"] < self.vocab_size) | (values["top_p"] < 1)
        is_short = orders & (values["top_k"] <= MAX_TOPK)
        is_drawn = values["temperature"] > 0
        kinds = (is_drawn & ~orders, is_drawn & is_short, is_drawn & orders & ~is_short)
        asks = values["logprobs"] != NO_LOGPROBS
        return _Part(
            rows=part,
            penalties=self._penalties(values),
            bias=self._bias(rows),
            banned=self._banned(rows, held),
            processors=[
                (int(index), int(rows[index]), self._extras[rows[index]].processors)
                for index in np.flatnonzero(values["has_processors"])
            ],
            draws=[self._draw(values, kind) for kind in kinds if kind.any()],
            logprob_rows=self._index(asks) if asks.any() else None,
        )

    def _draw(self, values: npt.NDArray[np.void], mask: Mask) -> _Draw:
        """The draw of the rows in `mask`, which are of one kind."""
        top_k, top_p, min_p = (values[name][mask] for name in ("top_k", "top_p", "min_p"))
        has_top_p = bool((top_p < 1).any())
        orders = has_top_p or bool((top_k < self.vocab_size).any())
        most = int(top_k.max())
        return _Draw(
            rows=self._index(mask),
            temperature=self._column(values["temperature"][mask]),
            num_candidates=most if most <= MAX_TOPK else self.vocab_size,
            top_k=self._column(top_k) if orders else None,
            top_p=self._column(top_p) if has_top_p else None,
            min_p=self._column(min_p) if min_p.any() else None,
        )

    def _penalties(self, values: npt.NDArray[np.void]) -> Penalties | None:
        mask = values["slot"] != NO_SLOT
        if not mask.any():
            return None
        return Penalties(
            self._index(mask),
            self._to_device(values["slot"][mask]),
            self._column(values["repetition"][mask]),
            self._column(values["presence"][mask]),
            self._column(values["frequency"][mask]),
        )

    def _bias(self, rows: Rows) -> tuple[Tensor, Tensor] | None:
        """Places in the flat logits of `rows`, int64, and what is added there, float32."""
        indices = np.flatnonzero(self._rows["has_bias"][rows])
        if not len(indices):
            return None
        extras = [self._extras[rows[index]] for index in indices]
        places = self._places(indices, [extra.bias_ids for extra in extras])
        return places, self._to_device(np.concatenate([extra.bias for extra in extras]))

    def _banned(self, rows: Rows, held: Mask) -> Tensor | None:
        """Places in the flat logits of `rows` of tokens that must not come."""
        has_bias = np.flatnonzero(self._rows["has_bias"][rows])
        is_held = np.flatnonzero(held)
        if not len(has_bias) and not len(is_held):
            return None
        return self._places(
            np.concatenate([has_bias, is_held]),
            [
                *(self._extras[rows[index]].banned_ids for index in has_bias),
                *(self._extras[rows[index]].ending_ids for index in is_held),
            ],
        )

    def _places(self, indices: Rows, token_ids: Sequence[Rows]) -> Tensor:
        """Where `token_ids[i]` of row `indices[i]` are in the flat logits."""
        lengths = [len(ids) for ids in token_ids]
        starts = np.repeat(indices * self.vocab_size, lengths)
        return self._to_device(starts + np.concatenate(token_ids))

    def _index(self, mask: Mask) -> Index:
        return slice(None) if mask.all() else self._to_device(np.flatnonzero(mask))

    def _column(self, values: npt.NDArray[np.generic]) -> Tensor:
        return self._to_device(values)[:, None]

    def _to_device(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(values, self.device)


def _leaves_logits(params: SamplingParams) -> bool:
    """Whether the logits stay as the model gave them."""
    changes = params.has_penalties or params.logit_bias or params.needs_host or params.min_tokens
    return not changes


@dataclass(frozen=True, slots=True)
class _RowExtras:
    """What few rows have, and is not one number."""

    bias_ids: Rows  # the tokens that have a finite bias
    bias: npt.NDArray[np.float32]  # theirs
    banned_ids: Rows
    ending_ids: Rows  # banned until min_tokens
    processors: tuple[LogitsProcessor, ...]

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Sequence[int], vocab_size: int) -> _RowExtras:
        biased = [(token, bias) for token, bias in params.logit_bias_pairs if bias != -np.inf]
        banned = [token for token, bias in params.logit_bias_pairs if bias == -np.inf]
        ending = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        return cls(
            np.array([token for token, _ in biased], np.int64),
            np.clip([bias for _, bias in biased], -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32),
            np.array(banned, np.int64),
            np.array(sorted(token for token in ending if token < vocab_size), np.int64),
            params.logits_processors,
        )


NO_EXTRAS = _RowExtras.of(SamplingParams(), (), 0)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to do for a batch, until its rows change."""

    rows: Rows
    held: Mask  # `[R]`: rows that must not end yet
    parts: list[_Part]
    num_logprobs: int
    logprob_indices: Rows


@dataclass(frozen=True, slots=True)
class _Part:
    """Of a plan: neighbouring rows, few enough for the temporaries. Indices count from the first.

    penalties, bias (places in the flat logits, and what is added there) and banned (places) are
    None where no row has any. `processors` has (index, row, the row's processors).
    """

    rows: slice
    penalties: Penalties | None = None
    bias: tuple[Tensor, Tensor] | None = None
    banned: Tensor | None = None
    processors: Sequence[tuple[int, int, tuple[LogitsProcessor, ...]]] = ()
    draws: Sequence[_Draw] = ()
    logprob_rows: Index | None = None

    @property
    def changes_logits(self) -> bool:
        changes = (self.penalties, self.bias, self.banned)
        return any(change is not None for change in changes) or bool(self.processors)


@dataclass(frozen=True, slots=True)
class _Draw:
    """Of a part: rows that draw in the same way. Columns are `[N, 1]`, None where all are off.

    num_candidates: how many tokens top_k and top_p need in order.
    """

    rows: Index
    temperature: Tensor
    num_candidates: int
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None

    def tokens(self, logits: Tensor, top: Tensor, best: Tensor, uniform: Tensor) -> Tensor:
        """`[N]` int64, given the part's logits `[R, V]`, the highest of each row and its token."""
        scores = scaled(logits[self.rows], top[self.rows], self.temperature)
        if self.top_k is not None:
            scores = top_scores(scores, self.num_candidates, self.top_k, self.top_p)
        return drawn(scores, best[self.rows], uniform[self.rows], self.min_p)


def _processed(logits: Tensor, tokens: list[int], processors: Sequence[LogitsProcessor]) -> Tensor:
    """`logits` `[V]` after `processors`. Raises what they raise, and ShapeError for a wrong one."""
    shape = logits.shape
    for processor in processors:
        logits = processor(tokens, logits)
        if not isinstance(logits, Tensor) or logits.shape != shape:
            got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ShapeError(
                expected("logits processor", f"a tensor {list(shape)}", got, "return the logits")
            )
    return logits
