from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import said, spawn
from tests.hf.real_text import prompts as real_prompts
from transformers import AutoTokenizer, DynamicCache, GPT2Config, GPT2LMHeadModel

from pageforge.cli import run
from pageforge.cli.output import printable
from pageforge.errors import UseAfterFree
from pageforge.hf.pretrained import load_model
from pageforge.pool import PagePool
from pageforge.probe import cache_argument

PROMPTS = ("To be, or not to be", "A", "that is the question, whether it is nobler")


def greedy(folder: str, prompt: str, max_new_tokens: int) -> list[int]:
    """What transformers' own cache generates, alone and unpadded."""
    model, tokenizer = load_model(folder)
    output = model.generate(
        **tokenizer(prompt, return_tensors="pt"),
        **{cache_argument(model): DynamicCache(config=model.config)},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(tokenizer(prompt).input_ids) :].tolist()


def test_the_tokens_are_those_of_dynamic_cache(invoke, tiny: str) -> None:
    _, tokenizer = load_model(tiny)
    for prompts in (PROMPTS[:1], PROMPTS):
        done = invoke("run", *prompts, "--model", tiny, "-n", "40", "--json")
        assert done.exit_code == 0, done.stderr
        found = json.loads(done.stdout)
        expected = [greedy(tiny, prompt, 40) for prompt in prompts]
        assert found["new_tokens"] == [len(tokens) for tokens in expected]
        assert found["texts"] == [
            tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected
        ]


def test_what_the_cache_took_is_counted(invoke, tiny: str) -> None:
    found = json.loads(
        invoke("run", PROMPTS[0], "-m", tiny, "-n", "9", "--page-size", "8", "--json").stdout
    )
    paged = found["paged"]
    stored = found["prompt_tokens"][0] + found["new_tokens"][0] - 1  # the last one is not stored
    assert paged["pages_used"] == -(-stored // 8)
    assert paged["bytes_in_use"] == paged["pages_used"] * 2 * 2 * 2 * 8 * 8 * 4
    assert paged["bytes_mapped"] > 0
    assert paged["pages_used_after"] == 0


def test_left_padding_costs_the_paged_cache_nothing(invoke, tiny: str) -> None:
    arguments = (*PROMPTS, "-m", tiny, "-n", "20", "--page-size", "8", "--compare", "--json")
    found = json.loads(invoke("run", *arguments).stdout)
    longest = max(found["prompt_tokens"])
    steps = max(found["new_tokens"]) - 1
    token = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, dim, bytes
    assert found["DynamicCache"]["bytes"] == 3 * (longest + steps) * token
    assert found["StaticCache"]["bytes"] >= 3 * (longest + 20) * token
    assert found["DynamicCache"]["same_tokens"]
    assert found["StaticCache"]["same_tokens"]
    # Pages that hold nothing but padding are not claimed.
    pages = [-(-(longest + steps) // 8) - (longest - p) // 8 for p in found["prompt_tokens"]]
    assert found["paged"]["pages_used"] == sum(pages)


def test_the_table(invoke, tiny: str) -> None:
    shown = invoke("run", *PROMPTS, "-m", tiny, "-n", "5", "--compare").stdout
    for word in ("tokens", "pages", "bytes in use", "bytes taken", "DynamicCache", "StaticCache"):
        assert word in shown
    assert "[3] that is the question" in shown
    assert "bytes mapped" in invoke("run", "A", "-m", tiny, "-n", "5").stdout


def test_seeds(invoke, tiny: str) -> None:
    def text(seed: int) -> str:
        arguments = ("-t", "1", "--seed", str(seed), "-n", "30", "-m", tiny, "--json", "--compare")
        found = json.loads(invoke("run", "A", *arguments).stdout)
        assert found["DynamicCache"]["same_tokens"]
        return found["texts"][0]

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_streamed_text_is_the_whole_text(invoke, tiny: str) -> None:
    streamed = invoke("run", "A", "-m", tiny, "-n", "60", "-q").stdout
    whole = invoke("run", "A", "-m", tiny, "-n", "60", "-q", "--no-stream").stdout
    assert streamed.strip()
    assert streamed.split() == whole.split()


def test_the_chat_form_is_used_unless_raw(invoke, tiny_chat: str) -> None:
    def num_tokens(*more: str) -> int:
        done = invoke("run", "abc", "-m", tiny_chat, "-n", "1", "--json", *more)
        return json.loads(done.stdout)["prompt_tokens"][0]

    assert num_tokens() == len("<user>abc<answer>")
    assert num_tokens("--raw") == len("abc")


@pytest.mark.parametrize("prompts", [[], ["-"]])
def test_a_prompt_from_stdin(invoke, tiny: str, prompts: list[str]) -> None:
    done = invoke("run", *prompts, "-m", tiny, "-n", "3", "--json", stdin="from stdin")
    assert json.loads(done.stdout)["prompts"] == ["from stdin"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "expected a prompt"),
        ([""], 2, "prompt 1 is empty"),
        (["a", " \n"], 2, "prompt 2 is empty"),
        (["-", "-"], 2, "stdin is read once"),
        (["a", "--page-size", "12"], 2, "page_size: expected one of"),
        (["a", "--max-pages", "0"], 2, "max_pages: expected at least 1"),
        (["a", "--max-memory", "lots"], 2, "max_memory: expected"),
        (["a", "--max-memory", "1"], 1, "max_memory: expected at least"),
        (["a", "--temperature", "-1"], 2, "--temperature"),
        (["a", "--device", "warp"], 2, "device: expected auto"),
        (["a", "--device", "mps"], 1, "use DynamicCache there"),
        (["a", "--dtype", "int4"], 2, "dtype: expected one of"),
        (["a", "--model", "./absent"], 1, "no model './absent'"),
        (["a" * 100, "--max-pages", "2"], 1, "out of pages: needed 7, available 2"),
        (["a", "--max-pages", "1", "-n", "40"], 1, "out of pages: needed 1, available 0"),
    ],
)
def test_bad_input(invoke, tiny: str, arguments: list[str], code: int, message: str) -> None:
    model = [] if "--model" in arguments else ["--model", tiny]
    done = invoke("run", *arguments, *model, "--raw")
    assert done.exit_code == code
    assert message in said(done.stderr)
    assert "Traceback" not in done.stderr


def test_past_a_learned_position_table(invoke, tiny: str, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    config = GPT2Config(
        vocab_size=257, n_embd=8, n_layer=1, n_head=1, n_positions=16, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    fits = invoke("run", "a" * 9, "-m", str(tmp_path), "-n", "8", "--raw", "--json")
    assert fits.exit_code == 0, fits.stderr  # the 17th token is never fed back
    done = invoke("run", "a" * 9, "-m", str(tmp_path), "-n", "9", "--raw")
    assert done.exit_code == 1
    assert "expected at most 17, for the model's 16 learned positions, got 9 + 9" in said(
        done.stderr
    )


def test_cuda_where_there_is_none(invoke, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("run", "a", "-m", tiny, "--device", "cuda")
    assert done.exit_code == 1
    assert "use --device cpu" in done.stderr


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert printable("a\x1b[2Jb\x07\tc\nd\x9b") == "a�[2Jb�\tc\nd�"


def test_an_interrupted_run_keeps_no_pages(invoke, tiny: str, monkeypatch) -> None:
    pools = []
    make = PagePool.for_model

    def for_model(*args, **kwargs):
        pools.append(make(*args, **kwargs))
        return pools[-1]

    def interrupt(*args):
        assert pools[0].stats().pages_used > 0
        raise KeyboardInterrupt

    monkeypatch.setattr(run.PagePool, "for_model", for_model)
    monkeypatch.setattr(run._Printer, "on_finalized_text", interrupt)
    done = invoke("run", "A", "-m", tiny, "-n", "60")
    assert done.exit_code == 130
    assert done.stderr == "stopped\n"
    with pytest.raises(UseAfterFree):
        pools[0].stats()


def test_ctrl_c_ends_a_real_process_tidily(tiny: str) -> None:
    process = spawn("run", "A", "-m", tiny, "-n", "60000", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode() == "stopped\n"


def test_a_closed_pipe_is_no_traceback(tiny: str) -> None:
    process = spawn("run", "A", "-m", tiny, "-n", "60000", stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr is not None
    assert process.stderr.read() == b""


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model(invoke) -> None:
    texts = [f"Sum this up: {text}" for text in real_prompts(2, characters=120)]
    done = invoke("run", *texts, "Say hello.", "-n", "16", "--compare", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == "smollm2"
    assert found["DynamicCache"]["same_tokens"]
    assert all(text.strip() for text in found["texts"])
    assert found["paged"]["bytes_in_use"] == found["paged"]["pages_used"] * 737280
    assert found["paged"]["bytes_in_use"] < found["DynamicCache"]["bytes"] * 1.2
    assert found["paged"]["pages_used_after"] == 0
