"""fast_decode: the one-token steps of `generate()` as replays of captured CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from pageforge.errors import GeometryError, PageForgeError, UnsupportedModel, UseAfterFree
from pageforge.graphs import GraphMemory
from pageforge.hf.attention import NAME
from pageforge.hf.cache import PagedKVCache
from pageforge.hf.decode_step import HOLES, Call, DecodeStep, agree
from pageforge.hf.fused import fused
from pageforge.hf.switch import pageforge_attention_on
from pageforge.model_state import PLAIN, ModelState, hooks_on
from pageforge.ops.launch import stream_handle
from pageforge.pool import PagePool
from pageforge.probe import cache_argument, moving_rope

logger = logging.get_logger(__name__)

MAX_WASTED = 8
"""Captures in a row that may be in vain, dropped early because the model changed or not made for
want of memory; then no more are tried."""

WORTHWHILE = 32
"""Replays that repay a capture, and eager steps until one that lacked memory is tried again."""

NO_MEMORY = "there is not enough memory to capture a step now"

MAX_TOKENS = 131072
"""Room for a row in a captured step's page tables, where neither model nor pool has fewer."""


@contextlib.contextmanager
def fast_decode(
    model: PreTrainedModel, *, compile: bool = False, allow_hooks: bool = False
) -> Iterator[FastDecode]:
    """Within this context, decode steps of `model` run as captured CUDA graphs.

        with pageforge.fast_decode(model):
            model.generate(**inputs, max_new_tokens=100)

    `generate` (greedy, sampling, beams) makes a PagedKVCache if none is passed. Forwards of one
    token a row with a PagedKVCache are replayed; all else runs as ever, under pageforge attention.
    A step is captured when it first comes, for its number of rows rounded up; with `compile` it
    goes through torch.compile before, which takes tens of seconds. The first replay of each capture
    is compared with the same step run eagerly. Where no torch.compile does more, RMSNorms and tanh
    GELUs are captured as one kernel each (`hf/fused.py`).

    What cannot be captured runs eagerly: the object that the context gives says how often and why.
    A capture is dropped when the model has changed since (hooks, adapters, settings, weights that
    moved). Python hooks on modules inside the model, or a `forward` put on one of them, would not
    run in a replay: with such there are none, unless `allow_hooks` says that they matter to longer
    forwards alone.

    While the context lives a cache may hold a page a row ahead. A capture frees cuBLAS'
    workspaces, as torch.compile's CUDA graphs do: graphs that you captured by hand, and that use
    one from before, are to be captured anew. The model is left as it was found. On the CPU nothing
    is done, and a warning says so.
    """
    decode = FastDecode(model, compile=compile, allow_hooks=allow_hooks)
    device = model.device.type
    if device != "cuda":
        logger.warning(
            "fast_decode: expected a model on a CUDA device, got one on %s; it does nothing", device
        )
        yield decode
        return
    with decode._installed():
        yield decode


class FastDecode:
    """What `fast_decode` gives: counts of replays and captures, and of eager steps by reason."""

    def __init__(self, model: PreTrainedModel, *, compile: bool, allow_hooks: bool):
        self.num_replays = 0
        self.num_captures = 0
        self.eager_steps: Counter[str] = Counter()
        self._model = model
        self._compile = compile
        self._allow_hooks = allow_hooks
        self._cache_name = cache_argument(model)
        self._forward = model.forward
        self._generate: Any = getattr(model, "generate", None)  # none where there is no head
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._pool: PagePool | None = None
        self._has_pages = True  # until it shows that the model has no K/V that can be paged
        # For the pools that live, by variant: a step, or why there is none.
        self._steps: weakref.WeakKeyDictionary[PagePool, dict[Hashable, DecodeStep | str]] = (
            weakref.WeakKeyDictionary()
        )
        self._state: ModelState | None = None
        self._num_wasted = 0
        self._num_repaid = 0  # replays since the last capture
        self._pause = 0  # steps until a capture that lacked memory is tried again
        self._memory: GraphMemory | None = None
        self._side_stream = functools.cache(torch.cuda.Stream)  # of a device, for its captures
        self._stream: torch.cuda.Stream | None = None
        self._latest: tuple[Callable[[], PagedKVCache | None], DecodeStep] | None = None
        self._caches: weakref.WeakSet[PagedKVCache] = weakref.WeakSet()
        self._lock = threading.RLock()

    # --- coming and going -------------------------------------------------------------------

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        model = self._model
        if isinstance(getattr(model.forward, "__wrapped_by__", None), FastDecode):
            raise PageForgeError(
                "fast_decode: expected a model outside of it, got one inside; leave that context "
                "first"
            )
        own = {name: vars(model)[name] for name in ("forward", "generate") if name in vars(model)}
        with pageforge_attention_on(model):
            try:
                model.forward = self._wrap(self._forward, self._step_or_forward)
                if self._generate is not None:
                    model.generate = self._wrap(self._generate, self._generate_paged)
                yield
            finally:
                for name in ("forward", "generate"):
                    vars(model).pop(name, None)
                vars(model).update(own)
                self._steps.clear()
                self._state = self._pool = self._latest = None
                for cache in list(self._caches):
                    _settle(cache)

    def _wrap(self, original: Any, replacement: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **kwargs)

        wrapper.__wrapped_by__ = self  # type: ignore[attr-defined]
        return wrapper

    def _generate_paged(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` with a PagedKVCache, where it would make a cache of its own."""
        given = inspect.signature(self._generate).bind_partial(*args, **kwargs).arguments
        settings = given.get("generation_config") or self._model.generation_config
        makes_its_own = (
            kwargs.get(self._cache_name) is None
            and kwargs.get("past_key_values") is None
            and kwargs.get("use_cache", settings.use_cache) is not False
            and kwargs.get("cache_implementation", settings.cache_implementation) is None
            and not self._model.config.is_encoder_decoder
        )
        if makes_its_own and (cache := self._new_cache()) is not None:
            kwargs[self._cache_name] = cache
        try:
            return self._generate(*args, **kwargs)
        finally:
            _settle(kwargs.get(self._cache_name))

    def _new_cache(self) -> PagedKVCache | None:
        """A cache in the context's own pool; None for a model without K/V that can be paged."""
        with self._lock:
            if self._pool is None and self._has_pages:
                try:
                    self._pool = PagePool.for_model(self._model)
                except (GeometryError, UnsupportedModel) as error:
                    self._has_pages = False
                    logger.warning("fast_decode: generate makes no PagedKVCache: %s", error)
            return None if self._pool is None else PagedKVCache(self._pool)

    # --- forwards ---------------------------------------------------------------------------

    def _step_or_forward(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs if args else kwargs
        with self._lock:
            begun = self._begin(given)
            found = self._call(given)
            if isinstance(found, Call):
                # What is launched and waited for belongs to the tokens' device, current or not.
                # (A step on another device does not begin early.)
                with torch.cuda.device_of(found.tokens):
                    forward = functools.partial(self._forward, *args, **kwargs)
                    found = self._replay(found, forward, begun)
        if found is not None and not isinstance(found, str):
            return found
        if found is not None:
            self._note(found)
        return self._forward(*args, **kwargs)

    def _note(self, reason: str) -> None:
        """A step runs eagerly."""
        if not self.eager_steps[reason]:
            logger.warning("fast_decode: decode steps run eagerly: %s", reason)
        self.eager_steps[reason] += 1

    def _begin(self, given: dict[str, Any]) -> DecodeStep | None:
        """Launch what seems to be asked for: the step that was replayed last, once more.

        Whether it is, and whether the model is still what it was, is seen while the device works.
        """
        latest, self._latest = self._latest, None  # until it has shown to be right
        if latest is None:
            return None
        find_cache, step = latest
        cache = find_cache()
        is_same = given.get(self._cache_name) is cache or given.get("past_key_values") is cache
        if cache is None or not is_same:
            return None
        batch = cache._state.ready_batch
        tokens, positions = given.get("input_ids"), given.get("position_ids")
        if (
            batch is None
            or not isinstance(tokens, Tensor)
            or not (positions is None or isinstance(positions, Tensor))
            or tokens.get_device() != torch.cuda.current_device()
            or self._stream is None
            or self._stream.cuda_stream != stream_handle(tokens.device)
        ):
            return None
        batch.pool.use_stream(tokens.device)
        return step if step.begin(batch, tokens, positions) else None

    def _call(self, kwargs: dict[str, Any]) -> Call | str | None:
        """The decode step asked for; why it cannot be replayed; None where it is no such step."""
        options = dict(kwargs)
        tokens, mask, positions, *caches = (
            options.pop(name, None)
            for name in ("input_ids", "attention_mask", "position_ids", "past_key_values", "cache")
        )
        cache = next((cache for cache in caches if cache is not None), None)
        if tokens is None or tokens.dim() != 2 or tokens.shape[1] != 1 or cache is None:
            return None
        if not isinstance(cache, PagedKVCache):
            return f"the cache is a {type(cache).__name__}"
        if not cache.get_seq_length() or len(tokens) != cache._state.batch_size:
            return None  # a prompt of one token, or an error that the eager forward explains
        if torch.is_grad_enabled():
            return "gradients are enabled"
        if self._model.training:
            return "the model is in training mode"
        if mask is not None and (
            mask.dim() != 2
            or mask.shape != (len(tokens), cache.get_seq_length() + 1)
            or mask.device != tokens.device
        ):
            return "the attention mask is not [rows, tokens] on the model's device"
        if torch.is_autocast_enabled(tokens.device.type):
            return "autocast is enabled"
        if positions is not None and not _are_positions(positions, tokens):
            return "position_ids are not int64 [..., rows, 1] on the model's device"
        for name, option in options.items():
            if not isinstance(option, PLAIN):
                return f"{name} is passed"
        return Call(tokens, positions, mask, cache, tuple(sorted(options.items())))

    def _replay(self, call: Call, forward: Callable[[], Any], begun: DecodeStep | None) -> Any:
        """The step's output, or why it has to run eagerly, which is what `forward` does.

        `begun`: the step that runs already, if any.
        """
        state = call.cache._state
        steps = self._steps.setdefault(call.cache.pool, {})
        step = steps.get(call.variant)
        if step is None or (
            isinstance(step, DecodeStep) and not step.fits(call.cache.get_seq_length())
        ):
            obstacle = self._obstacle()
            if obstacle is not None:
                return obstacle
            if self._state is not None and (change := self._state.change()) is not None:
                return self._forget(change)  # other captures are stale; none are mixed with them
            try:
                step = steps[call.variant] = self._misfit(call) or self._capture(call)
            except torch.cuda.OutOfMemoryError:
                self._num_wasted += 1
                self._pause = WORTHWHILE
                return NO_MEMORY
        if isinstance(step, str):
            return step
        self._order_streams()
        length = state.begin_step()
        self._caches.add(call.cache)
        replayed = step.replay(call, length, begun=step is begun)
        if isinstance(replayed, str):
            return replayed
        output, mask_was_right = replayed
        # The device is busy with the step: time to see whether all was as the step assumes.
        assert self._state is not None
        change = self._state.change()
        if change is not None:
            return self._forget(change)
        if not mask_was_right():
            step.forget()
            return HOLES
        if step.is_trusted:
            self.num_replays += 1
            self._num_repaid += 1
            state.finish_step()
        else:
            replayed_output, output = output, forward()
            if not agree(replayed_output, output, call.cache.pool.geometry.num_layers):
                steps[call.variant] = reason = "a replay gave another result than the eager step"
                self._note(reason)
                return output
            step.is_trusted = True
        self._latest = weakref.ref(call.cache), step
        if step.fits(length + 1):
            state.reach_ahead()
            assert state.batch is not None
            step.follow(state.batch)
        return output

    def _capture(self, call: Call) -> DecodeStep | str:
        """A captured step, or why there can be none. Raises OutOfMemoryError."""
        if not self._captured():
            # Memory that graphs share goes with the last of them.
            stream = self._side_stream(call.tokens.device)
            self._memory = GraphMemory(torch.cuda.graph_pool_handle(), stream)
        assert self._memory is not None
        try:
            # What the model itself changes in a forward shows as a change at once.
            state = ModelState(self._model)
            with fused(self._model, compiled=self._compile):
                step = DecodeStep(
                    self._forward,
                    self._cache_name,
                    call,
                    self._max_tokens(call.cache),
                    self._memory,
                    compile=self._compile,
                )
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model does that a graph cannot repeat
            logger.debug("fast_decode: capture failed", exc_info=True)
            return f"a step cannot be captured: {error}"
        if (change := state.change()) is not None:
            return f"{change} in each forward"
        self._state = self._state or state
        self.num_captures += 1
        self._num_repaid = 0
        return step

    def _captured(self) -> list[DecodeStep]:
        """All steps that there are, of every pool that lives."""
        steps = [step for of_pool in self._steps.values() for step in of_pool.values()]
        return [step for step in steps if isinstance(step, DecodeStep)]

    def _obstacle(self) -> str | None:
        """Why the model cannot be captured as things are."""
        if self._num_wasted >= MAX_WASTED:
            return "too many captures were in vain"
        if self._pause:
            self._pause -= 1
            return NO_MEMORY
        if not self._allow_hooks and (reason := hooks_on(self._model)) is not None:
            return reason
        if self._model.config._attn_implementation != NAME:
            return "the model does not take pageforge attention"
        return None

    def _misfit(self, call: Call) -> str | None:
        """Why such calls can never be captured, as far as that shows beforehand."""
        if "position_ids" not in self._parameters:
            return "the model takes no position_ids"
        config = self._model.config
        if call.positions is None and config.get_text_config() is not config:
            return "no position_ids are passed, which a model of text and more works out itself"
        if call.positions is None and any(map(_counts_from_padding, self._model.modules())):
            return "no position_ids are passed, which the model works out of the tokens"
        if not _is_paged(call.cache):
            return "layers keep another state than K/V"
        tensors = [*self._model.parameters(), *self._model.buffers()]
        devices = {tensor.device for tensor in tensors} | {
            torch.device(group.shape.device) for group in call.cache.pool.geometry.groups
        }
        if len({(device.type, device.index or 0) for device in devices}) > 1:
            return f"model and pages lie on several devices: {sorted(map(str, devices))}"
        if (rope := moving_rope(self._model)) is not None:
            return f"{rope} rotary embeddings change with the length"
        return None

    def _max_tokens(self, cache: PagedKVCache) -> int:
        """How long rows may become. For those that outgrow it, a step is captured anew."""
        config = self._model.config.get_text_config()
        pool = cache.pool
        room = pool.stats().pages_total * pool.geometry.page_size
        most = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
        return max(2 * cache.get_seq_length(), min(most, room, MAX_TOKENS))

    def _forget(self, change: str) -> str:
        """The model is not what was captured."""
        self._steps.clear()
        self._state = None
        self._num_wasted = 0 if self._num_repaid >= WORTHWHILE else self._num_wasted + 1
        return f"{change}; steps are captured anew"

    def _order_streams(self) -> None:
        """The tensors that steps read are shared: whoever comes on another stream waits."""
        stream = torch.cuda.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
            for step in self._captured():
                step.record_stream(stream)
        self._stream = stream


def _is_paged(cache: PagedKVCache) -> bool:
    """Whether all layers' K/V lie in pages; the last layers may be without, and use others' K/V."""
    others = cache._other_layers()
    first = len(cache.layers) - len(others)
    return cache.layers[first:] == others and all(getattr(cache, "is_dummy", [not others])[first:])


def _are_positions(positions: object, tokens: Tensor) -> bool:
    """Whether a step can take them for `tokens [S, 1]`: one of each row, or one for all."""
    return (
        isinstance(positions, Tensor)
        and positions.shape[-2:] in (tokens.shape, (1, 1))
        and positions.dtype == torch.int64
        and positions.device == tokens.device
    )


def _counts_from_padding(part: torch.nn.Module) -> bool:
    """Whether positions count from that of the padding token on, as in RoBERTa and its kin."""
    table = getattr(part, "position_embeddings", None)
    return getattr(table, "padding_idx", None) is not None or hasattr(
        part, "create_position_ids_from_input_ids"
    )


def _settle(cache: object) -> None:
    """No page stays claimed ahead."""
    if isinstance(cache, PagedKVCache):
        with contextlib.suppress(UseAfterFree):  # of a pool that was closed
            cache._state.settle()
