"""Jobs: prompts with what each asks for, from a file; and the file that their results go to."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from pageforge.engine.draw import completion_seed
from pageforge.engine.outputs import RequestOutput
from pageforge.engine.params import SamplingParams
from pageforge.errors import PageForgeError, ParamsError, expected

JSON_LINES = (".jsonl", ".ndjson")
"""File names that end so hold JSON lines; all others hold a prompt in each line."""

OVERRIDES = frozenset(field.name for field in fields(SamplingParams)) - {"logits_processors"}
"""What a JSON line may set for its request: what JSON can say of SamplingParams."""


RESULT_KEYS = frozenset({"id", "prompt", "prompt_token_ids", "options", "error"})
"""What a line of results has in any case."""


class JobError(PageForgeError, ValueError):
    """A prompt, or a line of a file of prompts or results, cannot be meant."""


@dataclass(frozen=True)
class Job:
    """One prompt, text or token ids. `number`: its line, or its place among others, from 1.

    `options`: what its answer depends on beside the prompt, by name, as JSON has it.
    """

    number: int
    id: str
    prompt: str | tuple[int, ...]
    params: SamplingParams
    options: dict[str, Any]

    @property
    def title(self) -> str:
        """The prompt for people: text as it is, token ids counted."""
        return self.prompt if isinstance(self.prompt, str) else f"{len(self.prompt)} token ids"


class Result(NamedTuple):
    """What became of a job. `output`: None if it was refused before it began."""

    job: Job
    output: RequestOutput | None
    error: Exception | None

    def to_dict(self) -> dict[str, Any]:
        """RequestOutput's dict with the prompt and options of the job, and the error as a text."""
        job, output, error = self
        ids = [] if isinstance(job.prompt, str) else list(job.prompt)
        done = {"prompt_token_ids": ids, "outputs": []} if output is None else output.to_dict()
        return {
            **done,
            "id": job.id,
            "prompt": job.prompt if isinstance(job.prompt, str) else None,
            "options": job.options,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }


def make_job(
    number: int,
    prompt: object,
    params: SamplingParams,
    *,
    job_id: object = None,
    overrides: dict[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
) -> Job:
    """A job with `params`, some of them its own. Its id is its number unless it is given one.

    Its draws depend on `params.seed` and its number, so that they are the same whichever other
    jobs run or have run before. `others`: options beside the params that its answer depends on.
    Raises JobError, ParamsError.
    """
    if isinstance(prompt, list):
        whole = all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
        prompt = tuple(prompt) if whole and prompt else None
    if isinstance(prompt, str) and not prompt.strip():
        raise JobError(f"prompt {number} is empty")
    if not isinstance(prompt, str | tuple):
        raise JobError(
            expected("prompt", "text or a list of token ids", repr(prompt), "give one of the two")
        )
    job_id = number if job_id is None else job_id
    if not isinstance(job_id, str | int) or isinstance(job_id, bool) or job_id == "":
        raise JobError(expected("id", "text or a whole number", repr(job_id), "or leave it out"))
    own = overrides or {}
    asked = replace(params, **own)
    seed = asked.seed if "seed" in own else completion_seed(asked.seed or 0, number)
    options = {**(others or {}), **_named(asked)}
    return Job(number, str(job_id), prompt, replace(asked, seed=seed), options)


def _named(params: SamplingParams) -> dict[str, Any]:
    """What JSON can say of SamplingParams. Where nothing is drawn, there is no seed."""
    named = {name: getattr(params, name) for name in sorted(OVERRIDES)}
    if params.is_greedy:
        del named["seed"]
    found: dict[str, Any] = json.loads(json.dumps(named))  # with lists for tuples
    return found


def read_jobs(
    path: Path, params: SamplingParams, others: Mapping[str, Any] | None = None
) -> list[Job]:
    """The jobs of a file: a prompt in each line, or JSON lines. Empty lines are no jobs.

    A JSON line has "prompt", text or token ids, and may have "id" and names of SamplingParams,
    which go before `params`. `others`: see make_job. Raises JobError, with the line's number.
    """
    read = _from_json if path.suffix in JSON_LINES else make_job
    jobs = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        jobs.append(read(number, line.rstrip("\n"), params, others=others))
                    except (JobError, ParamsError) as error:
                        raise JobError(f"{path}, line {number}: {error}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: expected UTF-8, got {error}; convert it") from error
    if not jobs:
        raise JobError(f"{path}: expected prompts, got none; write one a line")
    first: dict[str, int] = {}
    for job in jobs:
        if first.setdefault(job.id, job.number) != job.number:
            want = "one of its own (a line without one has its number)"
            got = f"{job.id!r}, which line {first[job.id]} has"
            raise JobError(f"{path}, line {job.number}: {expected('id', want, got, 'change one')}")
    return jobs


def _from_json(
    number: int, line: str, params: SamplingParams, *, others: Mapping[str, Any] | None
) -> Job:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise JobError(f"not valid JSON ({error}); mend it") from error
    if not isinstance(entry, dict):
        raise JobError(
            expected("line", 'an object, {"prompt": ...}', line[:40], "write one a line")
        )
    prompt, job_id = entry.pop("prompt", None), entry.pop("id", None)
    for name in entry:
        if name not in OVERRIDES:
            names = sorted(OVERRIDES)
            near = difflib.get_close_matches(name, ["prompt", "id", *names], 1)
            fix = f"did you mean {near[0]}?" if near else "take it out"
            want = f"id, prompt or one of {', '.join(names)}"
            raise JobError(expected("name", want, repr(name), fix))
    bias = entry.get("logit_bias")
    if isinstance(bias, dict):  # JSON has no keys but text
        entry["logit_bias"] = {int(key) if key.isdecimal() else key: bias[key] for key in bias}
    return make_job(number, prompt, params, job_id=job_id, overrides=entry, others=others)


def missing(path: Path, jobs: Sequence[Job]) -> list[Job]:
    """The jobs that `path` has no result of.

    Results of failed requests, and a last line that was torn when a run ended, are taken out of the
    file: those jobs are missing. Raises JobError, the file being as it was, for a line that is no
    result, and for a result of another prompt or of other options under a job's id.
    """
    by_id = {job.id: job for job in jobs}
    done = set()
    draft = path.with_name(f"{path.name}.new")
    try:
        with path.open("rb") as old, draft.open("wb") as new:
            for number, line in enumerate(old, 1):
                if not line.endswith(b"\n"):
                    break
                where = f"{path}, line {number}"
                result = _result_of(line, where)
                if result["error"] is not None:
                    continue
                job = by_id.get(result["id"])
                if job is not None:
                    _check_answers(result, job, where)
                new.write(line)
                done.add(result["id"])
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return [job for job in jobs if job.id not in done]


def _result_of(line: bytes, where: str) -> dict[str, Any]:
    try:
        result = json.loads(line)
    except ValueError:
        result = None
    if not isinstance(result, dict) or not result.keys() >= RESULT_KEYS:
        raise JobError(f"{where}: expected a result of `pageforge run`; is this the right file?")
    return result


def _check_answers(result: dict[str, Any], job: Job, where: str) -> None:
    """Raise JobError for a result that the job would not have."""
    text = result["prompt"]
    if job.prompt != (tuple(result["prompt_token_ids"]) if text is None else text):
        raise JobError(
            f"{where}: the prompt of {job.id!r} was another one; give the changed prompt an id of "
            f"its own, or write to another file"
        )
    before, now = result["options"], job.options
    other = [name for name in {**now, **before} if now.get(name) != before.get(name)]
    if other:
        want, got = (", ".join(f"{n} {each.get(n)}" for n in other) for each in (now, before))
        fix = "give the options again that it was made with, or write to another file"
        raise JobError(f"{where}: {expected(f'the result of {job.id!r}', want, got, fix)}")


class ResultsFile:
    """Takes a JSON line for each request as it ends; each is on its way to the disk at once."""

    def __init__(self, path: Path):
        """What is in `path` stays; lines are added."""
        # A lone surrogate, which UTF-8 cannot hold, is then written as JSON escapes it.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, result: Result) -> None:
        """One line more."""
        self._file.write(json.dumps(result.to_dict(), ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()
