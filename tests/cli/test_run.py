from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import read, said, spawn
from tests.hf.real_text import prompts as real_prompts
from transformers import (
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
)

from pageforge.cli import output, requests, run
from pageforge.cli.output import printable
from pageforge.engine.text import Detokenizer
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
    shown = invoke("run", "A", "-m", tiny, "-n", "5").stdout
    for word in ("requests", "bytes mapped", "prefix hits", "preemptions", "0 pages used"):
        assert word in shown


def test_several_answers_to_one_prompt_are_told_apart(invoke, tiny: str) -> None:
    shown = invoke("run", "that is the question", "-m", tiny, "-n", "5", "--completions", "2")
    assert "[1.1] that is" in shown.stdout
    assert "[1.2] that is" in shown.stdout
    cached, asked = re.search(r"^prefix hits +(\d+) of (\d+)", shown.stdout, re.M).groups()
    (prompt_tokens,) = re.search(r"^tokens +(\d+) \+", shown.stdout, re.M).groups()
    assert int(asked) == 2 * int(prompt_tokens)
    assert 0 < int(cached) < int(asked)


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
        (["a" * 100, "--max-pages", "2"], 1, "needed 11, available 2; raise --max-pages"),
        (["a", "--stop", ""], 2, "stop: expected strings that are not empty"),
        (["a", "--min-new-tokens", "9", "-n", "8"], 2, "min_tokens: expected at most max_tokens"),
        (["a", "--swap-memory", "lots"], 2, "swap_memory: expected"),
        (["a", "--file", "absent.txt"], 2, "absent.txt"),
        (["a", "--file", __file__], 2, "give one or the other"),
        (["a", "--resume"], 2, "give --out"),
        (["a", "--out", __file__], 2, "is there already: --resume goes on with it"),
        (["a", "--out", "absent/out.jsonl"], 2, "there is no folder absent"),
        (["a", "--out", "/proc/out.jsonl"], 2, "a folder that can be written to, got /proc ("),
        (["a", "--compare", "--stop", "b"], 2, "--max-new-tokens, --temperature and --seed alone"),
        (["a", "--compare", "--completions", "2"], 2, "--temperature and --seed alone"),
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
    assert json.loads(fits.stdout)["engine"]["cut_short"] == 0
    done = invoke("run", "a" * 9, "-m", str(tmp_path), "-n", "9", "--raw", "--no-stream")
    assert done.exit_code == 0
    assert re.search(r"cut short +1 by the model's positions", done.stdout)
    compared = invoke("run", "a" * 9, "-m", str(tmp_path), "-n", "9", "--raw", "--compare")
    assert compared.exit_code == 1
    assert "expected at most 17, for the model's 16 learned positions, got 9 + 9" in said(
        compared.stderr
    )


def test_cuda_where_there_is_none(invoke, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("run", "a", "-m", tiny, "--device", "cuda")
    assert done.exit_code == 1
    assert "use --device cpu" in done.stderr


# --- many prompts ---------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tokens_of(line: dict) -> list[list[int]]:
    return [each["token_ids"] for each in line["outputs"]]


def by_id(path: Path) -> dict[str, list[list[int]]]:
    lines = lines_of(path)
    found = {line["id"]: tokens_of(line) for line in lines}
    assert len(found) == len(lines)
    return found


def test_results_are_printed_in_order_whoever_ends_first(invoke, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "long", "id": "a", "max_tokens": 30}\n'
        '{"prompt": [33, 34]}\n'
        '{"prompt": "two", "n": 2, "max_tokens": 3}\n'
    )
    done = invoke("run", "--file", path, "-m", tiny, "-n", "4")
    assert done.exit_code == 0, done.stderr
    titles = re.findall(r"^\[(.+?)\] (.*)$", done.stdout, re.MULTILINE)
    assert titles == [("a", "long"), ("2", "2 token ids"), ("3.1", "two"), ("3.2", "two")]
    arguments = ("run", "--file", path, "-m", tiny, "-n", "4", "--ignore-eos", "--json")
    found = json.loads(invoke(*arguments).stdout)
    assert found["new_tokens"] == [30, 4, 3]
    assert found["prompts"] == ["long", [33, 34], "two"]
    assert [len(line["outputs"]) for line in found["results"]] == [1, 1, 2]


@pytest.mark.parametrize("how", [(), ("--compare",)])
def test_quiet_prints_the_texts_and_nothing_else(invoke, tiny: str, how: tuple[str, ...]) -> None:
    asked = ("run", *PROMPTS, "-m", tiny, "-n", "5", *how)
    texts = json.loads(invoke(*asked, "--json").stdout)["texts"]
    done = invoke(*asked, "--quiet")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "\n\n".join(printable(text).strip() for text in texts) + "\n"


def test_quiet_says_on_stderr_what_failed(invoke, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [999], "id": "a"}\n\n{"prompt": "fine"}\n{"prompt": [257]}\n')
    done = invoke("run", "--file", path, "-m", tiny, "-n", "5", "--quiet")
    assert done.exit_code == 1
    (line,) = done.stdout.splitlines()
    assert "error" not in line
    told = said(done.stderr)
    assert "error: 'a': prompt: expected token ids from 0 to 256, got 999; use" in told
    assert "error: '4': prompt: expected token ids from 0 to 256, got 257; use" in told
    assert f"2 of 3 requests failed, first 'a' ({path}, line 1): prompt: expected" in told


def test_a_request_of_a_file_is_refused_with_its_line(invoke, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\n{"prompt": [999], "id": "a"}\n')
    done = invoke("run", "--file", path, "-m", tiny, "-n", "5")
    assert done.exit_code == 1
    assert f"first 'a' ({path}, line 2): prompt: expected token ids" in said(done.stderr)


def test_out_has_a_line_each_and_the_screen_the_numbers(invoke, tiny: str, tmp_path: Path) -> None:
    path, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    path.write_text("\n".join([*PROMPTS, ""]))
    done = invoke("run", "--file", path, "-m", tiny, "-n", "20", "--out", out)
    assert done.exit_code == 0, done.stderr
    assert re.search(r"^requests +3 *$", done.stdout, re.MULTILINE)
    assert PROMPTS[0] not in done.stdout
    assert by_id(out) == {
        str(number): [greedy(tiny, prompt, 20)] for number, prompt in enumerate(PROMPTS, 1)
    }
    again = invoke("run", "--file", path, "-m", tiny, "-n", "20", "--out", out)
    assert again.exit_code == 2
    before = out.read_bytes()
    resumed = invoke("run", "--file", path, "-m", tiny, "-n", "20", "--out", out, "--resume")
    assert resumed.exit_code == 0
    assert f"nothing is missing: {out} has all 3 results" in said(resumed.stderr)
    assert out.read_bytes() == before


def test_an_interrupted_job_is_resumed_to_the_same_results(
    invoke, tiny: str, tmp_path: Path
) -> None:
    """Ctrl-C in a real process, amid many requests that draw; then only the rest is done."""
    path, out, whole = (tmp_path / name for name in ("p.jsonl", "out.jsonl", "whole.jsonl"))
    lengths = [5, 7, 150, 9, 150, 150, 11, 150]
    arguments = ("run", "--file", str(path), "-m", tiny, "-t", "1", "--seed", "5", "--max-running")
    path.write_text(
        "".join(
            json.dumps({"prompt": f"once {i % 3}", "id": f"r{i}", "max_tokens": n, "n": 1 + i % 2})
            + "\n"
            for i, n in enumerate(lengths)
        )
    )
    process = spawn(*arguments, "4", "--ignore-eos", "--out", str(out), stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    first = lines_of(out)
    assert 2 <= len(first) < len(lengths)
    assert errors.decode() == (
        f"stopped: {len(first)} of 8 requests were done; the same command with --resume does the "
        f"rest and adds it to {out}\n"
    )
    resumed = invoke(*arguments, "2", "--ignore-eos", "--out", out, "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert re.search(rf"^done before +{len(first)} *$", resumed.stdout, re.MULTILINE)
    assert lines_of(out)[: len(first)] == first
    assert invoke(*arguments, "8", "--ignore-eos", "--out", whole).exit_code == 0
    assert by_id(out) == by_id(whole)


def test_a_failing_request_leaves_the_others_alone(invoke, tiny: str, tmp_path: Path) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_text(
        '{"prompt": "fine", "id": "a"}\n'
        f'{{"prompt": "{"long" * 20}", "id": "b"}}\n'
        '{"prompt": [999], "id": "c"}\n'
        '{"prompt": "fine too", "id": "d"}\n'
    )
    arguments = ("run", "--file", path, "-m", tiny, "-n", "5", "--max-pages", "4")
    done = invoke(*arguments, "--out", out)
    assert done.exit_code == 1
    failed = f"2 of 4 requests failed, first 'b' ({path}, line 2)"
    message = f"{failed}: out of pages: needed 6, available 4"
    assert message in said(done.stderr)
    lines = {line["id"]: line for line in lines_of(out)}
    assert lines["b"]["error"].startswith("OutOfPages: out of pages: needed 6, available 4")
    assert lines["c"]["error"].startswith("RequestError: prompt: expected token ids from 0 to 256")
    assert tokens_of(lines["a"]) == [greedy(tiny, "fine", 5)]
    assert tokens_of(lines["d"]) == [greedy(tiny, "fine too", 5)]
    shown = invoke(*arguments)
    assert shown.exit_code == 1
    assert "[b] longlong" in shown.stdout
    assert "error: out of pages: needed 6, available 4" in shown.stdout
    as_json = invoke(*arguments, "--json")
    assert as_json.exit_code == 1
    found = json.loads(as_json.stdout)
    assert [text is None for text in found["texts"]] == [False, True, True, False]
    # With a larger pool what failed is done, and nothing else.
    path.write_text(path.read_text().replace("[999]", "[99]"))
    larger = invoke(*arguments[:-1], "64", "--out", out, "--resume")
    assert larger.exit_code == 0, larger.stderr
    assert lines_of(out)[:2] == [lines["a"], lines["d"]]
    assert set(by_id(out)) == {"a", "b", "c", "d"}


def test_another_prompt_under_an_id_is_refused(invoke, tiny: str, tmp_path: Path) -> None:
    path, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    path.write_text("one\ntwo\n")
    assert invoke("run", "--file", path, "-m", tiny, "-n", "2", "--out", out).exit_code == 0
    path.write_text("one\nzwei\n")
    done = invoke("run", "--file", path, "-m", tiny, "-n", "2", "--out", out, "--resume")
    assert done.exit_code == 1
    assert "the prompt of '2' was another one" in said(done.stderr)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["-n", "3"], "expected max_tokens 3, got max_tokens 2"),
        (["-t", "0.5"], "expected seed 0, temperature 0.5, got seed None, temperature 0.0"),
        (["--raw"], "expected raw True, got raw False"),
    ],
)
def test_going_on_with_other_options_is_refused(
    invoke, tiny: str, tmp_path: Path, changed: list[str], message: str
) -> None:
    path, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    path.write_text("one\ntwo\n")
    arguments = ("run", "--file", path, "-m", tiny, "-n", "2", "--out", out)
    assert invoke(*arguments).exit_code == 0
    path.write_text("one\ntwo\nthree\n")
    before = out.read_bytes()
    done = invoke(*arguments, "--resume", *changed)
    assert done.exit_code == 1
    assert f"line 1: the result of '1': {message}; give the options again" in said(done.stderr)
    assert out.read_bytes() == before
    # What changes no answer may change.
    assert invoke(*arguments, "--resume", "--max-running", "1").exit_code == 0
    assert len(by_id(out)) == 3


def test_a_tokenizer_that_cannot_decode(invoke, tiny: str, monkeypatch) -> None:
    def push(*args):
        raise RuntimeError("no such piece")

    monkeypatch.setattr(Detokenizer, "push", push)
    done = invoke("run", "a", "-m", tiny, "-n", "5")  # streamed
    assert done.exit_code == 1
    assert "RuntimeError: no such piece" in said(done.stderr)
    done = invoke("run", "a", "b", "-m", tiny, "-n", "5", "--stop", "\n\n")
    assert done.exit_code == 1
    assert "2 of 2 requests failed, first '1': RuntimeError: no such piece" in said(done.stderr)


def test_options_reach_the_sampler_and_the_engine(invoke, tiny: str) -> None:
    def found(*more: str) -> dict:
        done = invoke("run", "A" * 40, "A" * 41, "-m", tiny, "-n", "30", "--json", *more)
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    plain = found()
    assert found("-t", "1", "--top-k", "1")["texts"] == plain["texts"]
    assert found("-t", "1", "--top-p", "0")["texts"] == plain["texts"]
    assert found("-t", "1", "--min-p", "1")["texts"] == plain["texts"]
    assert found("-t", "1")["texts"] != plain["texts"]
    for penalty in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert found(penalty, "2")["texts"] != plain["texts"]
    stop = plain["texts"][0][5:7]
    assert found("--stop", stop)["texts"][0] == plain["texts"][0].partition(stop)[0]
    assert len(found("--completions", "2")["results"][0]["outputs"]) == 2

    one_by_one = found("--max-running", "1")
    assert one_by_one["texts"] == plain["texts"]
    assert one_by_one["engine"]["cached_tokens"] >= 32
    assert one_by_one["engine"]["steps"] > plain["engine"]["steps"]
    apart = found("--max-running", "1", "--no-prefix-cache")
    assert apart["engine"]["cached_tokens"] == 0
    least = invoke("run", "A", "-m", tiny, "-n", "30", "--json", "--max-pages", "1")
    assert "out of pages: needed 2, available 1" in said(least.stderr)
    assert found("--max-batch-tokens", "4")["engine"]["steps"] > plain["engine"]["steps"] + 10
    squeezed = ("--max-pages", "7", "--no-prefix-cache")
    assert found(*squeezed)["engine"]["preemptions"] > 0
    swapped = found(*squeezed, "--swap-memory", "1GiB")
    assert swapped["engine"]["swaps"] > 0
    assert swapped["texts"] == plain["texts"]
    assert swapped["paged"]["pages_used"] == 7
    assert swapped["paged"]["pages_used_after"] == 0


def test_a_model_that_the_engine_refuses(invoke, tiny: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "bloom")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    config = BloomConfig(
        vocab_size=257, hidden_size=32, n_layer=1, n_head=2, eos_token_id=0, initializer_range=0.2
    )
    BloomForCausalLM(config).save_pretrained(folder)
    done = invoke("run", *PROMPTS, "-m", folder, "-n", "10", "--json")
    assert done.exit_code == 0, done.stderr
    assert said(done.stderr).count("without the engine: BloomForCausalLM: expected") == 1
    _, tokenizer = load_model(folder)
    assert json.loads(done.stdout)["texts"] == [
        tokenizer.decode(greedy(folder, prompt, 10), skip_special_tokens=True) for prompt in PROMPTS
    ]
    assert "after free()" in invoke("run", "A", "-m", folder, "-n", "3").stdout
    refused = invoke("run", "A", "-m", folder, "-n", "3", "--top-k", "4")
    assert refused.exit_code == 1
    assert "BloomForCausalLM: expected" in said(refused.stderr)


def test_the_bar_and_the_answers_on_one_terminal(tiny: str) -> None:
    screen, terminal = pty.openpty()
    process = spawn(
        *("run", "first prompt", "second prompt", "-m", tiny, "-n", "40"),
        env={"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        drawn = read(screen, until=None).decode(errors="replace")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert "2/2" in drawn
    # Each answer begins where a line was wiped or ended, not behind the bar.
    titles = r"(?:\x1b\[2K|\n)(?:\x1b\[[0-9;]*m)*\[(1\] first|2\] second) prompt"
    assert re.findall(titles, drawn) == ["1] first", "2] second"]
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor is back


def test_answers_go_to_a_pipe_though_the_bar_goes_to_a_terminal(invoke, tiny: str) -> None:
    arguments = ("run", "first prompt", "second prompt", "-m", tiny, "-n", "40", "-q")
    screen, terminal = pty.openpty()
    process = spawn(
        *arguments, env={"TERM": "xterm"}, stdout=subprocess.PIPE, stdin=terminal, stderr=terminal
    )
    os.close(terminal)
    try:
        drawn = read(screen, until=None).decode(errors="replace")
        assert process.stdout is not None
        piped = process.stdout.read().decode()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert "2/2" in drawn
    assert "prompt" not in drawn
    assert piped == invoke(*arguments).stdout


def test_ctrl_c_waits_for_the_end_of_a_step_but_once() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with requests.interrupts_between_steps() as check:
            check()
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                check()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a script's job in the background
        with requests.interrupts_between_steps() as check:
            os.kill(os.getpid(), signal.SIGINT)
            check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# --- what a terminal shows, and Ctrl-C ------------------------------------------------------


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
    monkeypatch.setattr(output.RunningText, "write", interrupt)
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
