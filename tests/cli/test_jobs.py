from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pageforge.cli.jobs import Job, JobError, Result, ResultsFile, make_job, missing, read_jobs
from pageforge.engine.outputs import Completion, RequestOutput, Timings
from pageforge.engine.params import SamplingParams
from pageforge.errors import OutOfPages

PARAMS = SamplingParams(max_tokens=9, temperature=0.5, seed=3)


def written(folder: Path, text: str, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def result_of(job: Job, error: Exception | None = None) -> Result:
    reason = "length" if error is None else "error"
    completion = Completion(0, [7, 8], "text\u2028 of\nit", reason, error=error)
    ids = [1, 2] if isinstance(job.prompt, str) else list(job.prompt)
    output = RequestOutput(job.id, None, ids, [completion], Timings(total=1.0))
    return Result(job, output, error)


def jobs_of(*prompts: object) -> list[Job]:
    return [make_job(number, prompt, PARAMS) for number, prompt in enumerate(prompts, 1)]


# --- reading jobs ---------------------------------------------------------------------------


def test_a_text_file_has_a_prompt_in_each_line(tmp_path: Path) -> None:
    # U+2028 and a form feed end no line.
    path = written(tmp_path, '\ufeffone\r\n\n  two \n \t\n{"three": 3}\u2028\x0cof it', "a.txt")
    jobs = read_jobs(path, PARAMS)
    assert [(job.id, job.number, job.prompt) for job in jobs] == [
        ("1", 1, "one"),
        ("3", 3, "  two "),
        ("5", 5, '{"three": 3}\u2028\x0cof it'),
    ]
    assert all(job.params.max_tokens == 9 and job.params.temperature == 0.5 for job in jobs)


def test_json_lines_have_ids_token_ids_and_params_of_their_own(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"prompt": "one", "id": "a"}\n'
        "\n"
        '{"prompt": [5, 0, 7], "max_tokens": 2, "stop": ["x", "y"], "seed": 11}\n'
        '{"id": 12, "prompt": "three\u2028", "logit_bias": {"4": -1, "5": 2.5}, "n": 2}\n',
    )
    first, second, third = read_jobs(path, PARAMS)
    assert (first.id, first.prompt, first.params.max_tokens) == ("a", "one", 9)
    assert (second.id, second.number, second.prompt) == ("3", 3, (5, 0, 7))
    assert (second.params.max_tokens, second.params.stop) == (2, ("x", "y"))
    assert (second.params.temperature, second.params.seed) == (0.5, 11)
    assert (third.id, third.prompt, third.params.n) == ("12", "three\u2028", 2)
    assert third.params.logit_bias_pairs == ((4, -1.0), (5, 2.5))


def test_draws_depend_on_seed_and_number_alone(tmp_path: Path) -> None:
    lines = ["same"] * 40
    jobs = read_jobs(written(tmp_path, "\n".join(lines), "a.txt"), PARAMS)
    seeds = [job.params.seed for job in jobs]
    assert len(set(seeds)) == len(seeds)
    lines[4] = ""
    fewer = read_jobs(written(tmp_path, "\n".join(lines), "a.txt"), PARAMS)
    assert [job.params.seed for job in fewer] == seeds[:4] + seeds[5:]
    other = SamplingParams(max_tokens=9, temperature=0.5, seed=4)
    assert make_job(1, "same", other).params.seed != seeds[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("nonsense", "not valid JSON"),
        ('"text"', "line: expected an object"),
        ("[1, 2]", "line: expected an object"),
        ("{}", "prompt: expected text or a list of token ids, got None"),
        ('{"prompt": null}', "prompt: expected text or a list"),
        ('{"prompt": 5}', "prompt: expected text or a list"),
        ('{"prompt": []}', "prompt: expected text or a list"),
        ('{"prompt": [1, "2"]}', "prompt: expected text or a list"),
        ('{"prompt": [1, true]}', "prompt: expected text or a list"),
        ('{"prompt": [1, 2.0]}', "prompt: expected text or a list"),
        ('{"prompt": " \\n"}', "prompt 2 is empty"),
        ('{"prompt": "a", "id": ""}', "id: expected text or a whole number"),
        ('{"prompt": "a", "id": 1.5}', "id: expected text or a whole number"),
        ('{"prompt": "a", "id": true}', "id: expected text or a whole number"),
        ('{"prompt": "a", "id": []}', "id: expected text or a whole number"),
        ('{"prompt": "a", "temprature": 1}', "got 'temprature'; did you mean temperature?"),
        ('{"promt": "a"}', "got 'promt'; did you mean prompt?"),
        ('{"prompt": "a", "messages": []}', "got 'messages'; take it out"),
        ('{"prompt": "a", "logits_processors": []}', "got 'logits_processors'"),
        ('{"prompt": "a", "temperature": -1}', "temperature: expected"),
        ('{"prompt": "a", "temperature": NaN}', "temperature: expected"),
        ('{"prompt": "a", "n": "2"}', "n: expected an int"),
        ('{"prompt": "a", "stop": null}', "stop: expected a list"),
        ('{"prompt": "a", "min_tokens": 10}', "min_tokens: expected at most max_tokens (9)"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias: expected an int"),
        ('{"prompt": "a", "logit_bias": [1]}', "logit_bias: expected a mapping"),
        ('{"prompt": "a", "id": "first"}', "got 'first', which line 1 has"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, f'{{"prompt": "a", "id": "first"}}\n{line}\n{{"prompt": "b"}}\n')
    with pytest.raises(JobError) as refused:
        read_jobs(path, PARAMS)
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert message in str(refused.value)


def test_a_line_number_and_an_id_may_not_be_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a", "id": "2"}\n{"prompt": "b"}\n')
    with pytest.raises(JobError, match=r"line 2: id: .* which line 1 has"):
        read_jobs(path, PARAMS)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\n \n", "expected prompts, got none"), (b"a\xff\n", "expected UTF-8")],
)
def test_a_file_without_prompts(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(JobError, match=message):
        read_jobs(path, PARAMS)


# --- results --------------------------------------------------------------------------------


def test_a_line_holds_the_prompt_as_it_was_given_and_the_error(tmp_path: Path) -> None:
    jobs = jobs_of("text", [5, 6], "\ud800")
    path = tmp_path / "out.jsonl"
    with ResultsFile(path) as file:
        file.write(result_of(jobs[0]))
        first = json.loads(path.read_text())  # it is there at once
        file.write(result_of(jobs[1], ValueError("no")))
        file.write(Result(jobs[2], None, OutOfPages(3, 2, "a hint")))
    assert first["id"] == "1"
    assert (first["options"]["temperature"], first["options"]["seed"]) == (0.5, 3)
    assert first["prompt"] == "text"
    assert first["error"] is None
    assert first["outputs"][0]["text"] == "text\u2028 of\nit"
    _, second, third = map(json.loads, path.read_bytes().splitlines())
    assert (second["prompt"], second["prompt_token_ids"]) == (None, [5, 6])
    assert second["error"] == "ValueError: no"
    assert (third["prompt"], third["outputs"]) == ("\ud800", [])
    assert third["error"].startswith("OutOfPages: out of pages: needed 3")


def test_what_is_missing_after_any_tear(tmp_path: Path) -> None:
    """Cut anywhere, the file keeps its whole lines, and just the others' jobs are missing."""
    jobs = jobs_of("ä", "b\nc", [5, 6], "d")
    path = tmp_path / "out.jsonl"
    with ResultsFile(path) as file:
        for job in reversed(jobs):
            file.write(result_of(job))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    cuts = random.Random(0).sample(range(len(whole)), 40)
    for cut in [*cuts, 0, len(lines[0]) - 1, len(lines[0]), len(whole)]:
        path.write_bytes(whole[:cut])
        num_whole = whole[:cut].count(b"\n")
        assert missing(path, jobs) == jobs[: len(jobs) - num_whole]
        assert path.read_bytes() == b"".join(lines[:num_whole])
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


def test_failed_requests_are_missing_and_unknown_ones_stay(tmp_path: Path) -> None:
    jobs = jobs_of("a", "b", "c", "d")
    path = tmp_path / "out.jsonl"
    with ResultsFile(path) as file:
        for job in jobs:
            file.write(result_of(job, ValueError("no") if job.prompt == "b" else None))
    lines = path.read_bytes().splitlines(keepends=True)
    mended = make_job(2, "better", PARAMS)
    assert missing(path, [jobs[0], mended, jobs[2]]) == [mended]
    assert path.read_bytes() == lines[0] + lines[2] + lines[3]


@pytest.mark.parametrize(
    ("before", "after"), [("a", "b"), ("a", [1, 2]), ([1, 2], [1, 2, 3]), ([1, 2], "a")]
)
def test_another_prompt_under_an_id_is_refused_by_name(
    tmp_path: Path, before: object, after: object
) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile(path) as file:
        file.write(result_of(make_job(1, "same", PARAMS, job_id="x")))
        file.write(result_of(make_job(2, before, PARAMS, job_id="y")))
    path.write_bytes(path.read_bytes() + b"torn")
    content = path.read_bytes()
    jobs = [
        make_job(1, "same", PARAMS, job_id="x"),
        make_job(2, after, PARAMS, job_id="y"),
    ]
    with pytest.raises(JobError, match="line 2: the prompt of 'y' was another one"):
        missing(path, jobs)
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"temperature": 0.5}, {"temperature": 0.8}, "temperature 0.8, got temperature 0.5"),
        ({"seed": 3}, {"seed": 4}, "seed 4, got seed 3"),
        (
            {"stop": "a", "n": 2},
            {"stop": ["a", "b"]},
            "n 1, stop ['a', 'b'], got n 2, stop ['a']",
        ),
        ({"logit_bias": {"5": 1}}, {}, "logit_bias None, got logit_bias [[5, 1.0]]"),
        (
            {"temperature": 0},
            {"seed": 4},
            "seed 4, temperature 0.5, got seed None, temperature 0.0",
        ),
    ],
)
def test_results_of_other_options_are_refused_by_name(
    tmp_path: Path, before: dict, now: dict, message: str
) -> None:
    """Be they the command's or the line's own."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"

    def jobs(options: dict) -> list[Job]:
        lines = [{"prompt": "same", "id": "x"}, {"prompt": [1, 2], "id": "y", **options}]
        path.write_text("\n".join(map(json.dumps, lines)))
        return read_jobs(path, PARAMS)

    with ResultsFile(out) as file:
        for job in jobs(before):
            file.write(result_of(job))
    content = out.read_bytes()
    with pytest.raises(JobError) as refused:
        missing(out, jobs(now))
    assert f"out.jsonl, line 2: the result of 'y': expected {message}; " in str(refused.value)
    assert out.read_bytes() == content
    assert missing(out, jobs(before)) == []


def test_options_that_are_none_of_the_params_count_as_well(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with ResultsFile(out) as file:
        file.write(result_of(make_job(1, "a", PARAMS, others={"model": "one", "raw": False})))
    with pytest.raises(JobError, match="'1': expected model two, got model one; give the options"):
        missing(out, [make_job(1, "a", PARAMS, others={"model": "two", "raw": False})])


def test_options_of_other_jobs_and_of_failed_ones_do_not_matter(tmp_path: Path) -> None:
    jobs, out = jobs_of("a", "b"), tmp_path / "out.jsonl"
    with ResultsFile(out) as file:
        file.write(result_of(jobs[0]))
        file.write(result_of(jobs[1], ValueError("no")))
    hotter = [make_job(number, "b", replace(PARAMS, temperature=2.0)) for number in (2, 3)]
    assert missing(out, hotter) == hotter


def test_who_draws_nothing_may_move_and_have_another_seed(tmp_path: Path) -> None:
    greedy, out = replace(PARAMS, temperature=0.0), tmp_path / "out.jsonl"
    with ResultsFile(out) as file:
        file.write(result_of(make_job(1, "a", greedy, job_id="x")))
    assert missing(out, [make_job(7, "a", replace(greedy, seed=99), job_id="x")]) == []


@pytest.mark.parametrize("line", [b"x\n", b"[]\n", b'{"id": "1"}\n', b"\n", b"\xff\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "notes.txt"
    with ResultsFile(path) as file:
        file.write(result_of(jobs_of("a")[0]))
    path.write_bytes(content := path.read_bytes() + line)
    with pytest.raises(JobError, match="line 2: expected a result"):
        missing(path, jobs_of("a"))
    assert path.read_bytes() == content
