"""temporary"""
from __future__ import annotations
from dataclasses import dataclass
from typing import NamedTuple
class Logprob(NamedTuple):
    token_id: int
    logprob: float
@dataclass(frozen=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    top: tuple
@dataclass(frozen=True)
class Timings:
    queued: float|None
    first_token: float|None
    total: float
    num_tokens: int
@dataclass(frozen=True)
class Completion:
    index: int
    token_ids: tuple
    text: str|None
    finish_reason: str
    stop: object=None
    logprobs: object=None
    error: object=None
@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str|None
    prompt_token_ids: tuple
    outputs: list
    prompt_logprobs: object
    timings: Timings
    num_cached_tokens: int
    @property
    def token_ids(self): return self.outputs[0].token_ids
    @property
    def text(self): return self.outputs[0].text
    @property
    def finish_reason(self): return self.outputs[0].finish_reason
    @property
    def error(self): return self.outputs[0].error
@dataclass(frozen=True)
class StreamChunk:
    request_id: str
    index: int
    text: str|None
    token_ids: tuple
    finish_reason: str|None
    logprobs: object
