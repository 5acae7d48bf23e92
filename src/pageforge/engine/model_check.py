"""Which models the engine serves: what shows at once, and what shows when two sequences are run."""

from __future__ import annotations

import inspect

import numpy as np
import torch
from transformers import PreTrainedModel

from pageforge.engine.params import SamplingParams
from pageforge.engine.runner import Runner
from pageforge.engine.sequence import Rows, Sequence
from pageforge.errors import OutOfPages, UnsupportedModel
from pageforge.geometry import pages_for
from pageforge.hf.decode_step import allowed_error, relative_errors
from pageforge.hf.fast_decode import MAX_TOKENS
from pageforge.pool import PagePool
from pageforge.probe import learned_positions, moving_rope

TRIED = (24, 9)
"""Tokens of the sequences that a model is tried on: more than a page, and less."""


def check_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a model of which it shows at once that it cannot be served."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"model: expected a transformers PreTrainedModel, got {type(model).__name__}; of a "
            f"PEFT model pass get_base_model(), whose adapters are in it"
        )
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name}: expected a decoder, got an encoder-decoder; use model.generate with "
            f"EncoderDecoderCache(PagedKVCache(...), DynamicCache())"
        )
    if model.config.get_text_config() is not model.config:
        raise UnsupportedModel(
            f"{name}: expected a model of text alone, got one of text and more; pass its language "
            f"model, or use model.generate with a PagedKVCache"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{name}: expected a model whose forward takes position_ids, got one that works them "
            f"out by itself; use model.generate with a PagedKVCache"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(
            f"{name}: expected a model that gives logits, got one without a language model head; "
            f"load it with AutoModelForCausalLM"
        )
    if (rope := moving_rope(model)) is not None:
        raise UnsupportedModel(
            f"{name}: expected rotary embeddings that stay, got {rope} ones, which change with the "
            f"longest sequence of a batch; use model.generate"
        )


def longest_sequence(model: PreTrainedModel) -> int:
    """Tokens that a sequence may have K/V of: as many as the model has positions."""
    positions = getattr(model.config, "max_position_embeddings", None)
    bounds = [MAX_TOKENS, positions, learned_positions(model)]
    return min(bound for bound in bounds if bound)


def try_model(model: PreTrainedModel, pool: PagePool, runner: Runner, max_tokens: int) -> int:
    """Run two sequences at once and each alone. Raises UnsupportedModel if that differs.

    So no model is served wrongly in which tokens meet by other ways than attention. `max_tokens`:
    that a row of `runner` may have; it has room for the rows and tokens of TRIED. Returns the size
    of the vocabulary, as logits have it.
    """
    name, size = type(model).__name__, pool.geometry.page_size
    vocabulary = model.config.get_text_config().vocab_size
    lengths = [min(length, pages_for(max_tokens, size) * size // 2) for length in TRIED]
    available = pool.num_available
    if sum(pages_for(length, size) for length in lengths) > available:  # a page each, or one
        lengths = [min(length, size) for length in lengths][:available]
    prompts = [[(7 * i + 1) % vocabulary for i in range(length)] for length in lengths]
    rows = Rows(len(prompts))
    tables = [pool.new_table() for _ in prompts]
    try:
        for row, (table, prompt) in enumerate(zip(tables, prompts, strict=True)):
            pool.append([table], len(prompt))
            sequence = Sequence(np.array(prompt, np.int32), SamplingParams(max_tokens=1), row)
            rows.put(sequence, row, len(prompt))
            for group in range(len(pool.geometry.groups)):
                runner.set_pages(group, row, 0, table.pages(group))
        prefill = rows.wanted - 1
        runner.launch(rows, prefill, None)
        rows.computed += prefill
        together = runner.launch(rows, rows.wanted, None).logits
        assert together is not None
        for row, prompt in enumerate(prompts):
            tokens = torch.tensor([prompt], device=runner.last_tokens.device)
            alone = model(input_ids=tokens, use_cache=False).logits[0, -1]
            error = float(relative_errors(together[row, None], alone[None], centred=True))
            allowed = allowed_error(alone.dtype, pool.geometry.num_layers)
            if not error <= allowed:
                raise UnsupportedModel(
                    f"the logits of a sequence alone and beside another differ by {error:.1%}; "
                    f"roundings explain {allowed:.1%}"
                )
    except (torch.OutOfMemoryError, OutOfPages):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{name}: sequences cannot be packed: {error}; use model.generate with a PagedKVCache"
        ) from error
    finally:
        pool.release(tables)
    return together.shape[1]
