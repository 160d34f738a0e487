"""A language model behind an OpenAI-compatible chat endpoint, as a judge of completions.

A judge is a TOML file beside a template:

    base_url = "http://localhost:8000/v1"     # /chat/completions is added
    model = "Qwen/Qwen3-4B"
    template = "judge.txt"                    # one user message: $prompt, $completion, $answer
    scale = [1, 10]                           # what the model is asked to answer; becomes 0 to 1
    api_key_env = "JUDGE_API_KEY"             # the variable that holds the key; never the key
    timeout_s = 60.0
    concurrency = 8
    [parameters]                              # sent as they are
    temperature = 0.0
    max_tokens = 512

The number is that of the last line of the answer that says `score: NUMBER`; capitals, and spaces
and `*`, `_`, `#`, `` ` `` around the words, do not matter. It must lie on the scale.

The version is a hash of model, template, scale and parameters: a judge that is asked something else
is another judge. What the endpoint serves under the model's name cannot be seen from here.
"""

import asyncio
import hashlib
import json
import math
import os
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rrl_core.tasks.protocol import Judgement, Prompt, Score, TaskError

MAX_ANSWER_BYTES = 2**20
MAX_CONNECT_S = 10.0
RETRY_PAUSE_S = 0.5
_PLACEHOLDERS = ("prompt", "completion", "answer")
_SCORE_LINE = re.compile(
    r"[ \t*_#`]*score[ \t*_`]*:[ \t*_`]*(-?\d{1,9}(?:\.\d{1,9})?)[ \t*_`]*", re.ASCII
)
_REFUSED = (401, 403, 404)
_UNREACHABLE = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.UnsupportedProtocol,
    httpx.InvalidURL,
)


class JudgeError(RuntimeError):
    """The endpoint serves no one who asks like this; the message says what to do."""


class JudgeSettings(BaseModel):
    """The keys of a judge's file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = Field(pattern="^https?://", description="URL that /chat/completions follows.")
    model: str = Field(min_length=1, description="Name the endpoint knows the model by.")
    template: Path = Field(description="Text file, relative to this one.")
    scale: tuple[float, float] = Field((0.0, 1.0), description="Worst and best number to answer.")
    api_key_env: str | None = Field(
        None, description="Variable with the key; None: no key is sent."
    )
    timeout_s: float = Field(60.0, gt=0, le=3600, description="Seconds an answer may take.")
    concurrency: int = Field(8, ge=1, le=256, description="Requests at a time.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Sent with every request.")


class JudgeScorer:
    """A `Scorer` that asks the model of `settings`; `name` is `judge:` and the file's name."""

    def __init__(
        self, name: str, settings: JudgeSettings, template: Template, api_key: str | None = None
    ) -> None:
        self.name = name
        self.settings = settings
        self._template = template
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        asked = [settings.model, template.template, settings.scale, settings.parameters]
        text = json.dumps(asked, sort_keys=True)
        self.version = hashlib.sha256(text.encode()).hexdigest()[:12]

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge `completion`; an answer that does not come in time is asked for once more.

        Raises:
            JudgeError: the endpoint cannot be reached, or refuses everything.
        """
        [attempts] = self.judge_all([prompt], [completion])
        return attempts[-1].score

    def judge_all(
        self, prompts: Sequence[Prompt], completions: Sequence[str]
    ) -> list[tuple[Judgement, ...]]:
        """Return the attempts, one or two, at each completion, `concurrency` of them at a time.

        A second attempt follows an answer that is late, cut off, or an error of the server (429 or
        5xx). An answer without a score is a `scorer_error` at once.

        Raises:
            JudgeError: the endpoint cannot be reached, or refuses everything.
        """
        return asyncio.run(self._judge_all(prompts, completions))

    async def _judge_all(
        self, prompts: Sequence[Prompt], completions: Sequence[str]
    ) -> list[tuple[Judgement, ...]]:
        limit = asyncio.Semaphore(self.settings.concurrency)
        seconds = self.settings.timeout_s
        # Nothing but the file says where requests go: no proxy of the environment, no redirect.
        async with httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(seconds, connect=min(seconds / 2, MAX_CONNECT_S)),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        ) as client:

            async def judge(prompt: Prompt, completion: str) -> tuple[Judgement, ...]:
                body = self._body(prompt, completion)
                async with limit:
                    first, is_final = await self._attempt(client, body)
                    if is_final:
                        return (first,)
                    await asyncio.sleep(RETRY_PAUSE_S)
                    return (first, (await self._attempt(client, body))[0])

            pairs = zip(prompts, completions, strict=True)
            return list(await asyncio.gather(*(judge(*pair) for pair in pairs)))

    async def _attempt(self, client: httpx.AsyncClient, body: bytes) -> tuple[Judgement, bool]:
        """Return an attempt, and whether another could not do better."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                score, is_final = await self._ask(client, body)
        except _UNREACHABLE as error:
            raise JudgeError(
                f"judge `{self.name}`: `{self.settings.base_url}` cannot be reached "
                f"({type(error).__name__} {error}); start the endpoint, or correct `base_url`"
            ) from error
        except (TimeoutError, httpx.TimeoutException):
            late = f"no answer within {self.settings.timeout_s:g} s"
            score, is_final = Score(None, "timeout", feedback=late), False
        except httpx.RequestError as error:
            what = "connection" if isinstance(error, httpx.TransportError) else "answer"
            score, is_final = _failed(f"the {what} broke ({type(error).__name__})"), False
        return Judgement(score, (time.perf_counter() - started) * 1e3), is_final

    async def _ask(self, client: httpx.AsyncClient, body: bytes) -> tuple[Score, bool]:
        url = f"{self.settings.base_url.rstrip('/')}/chat/completions"
        headers = {"Content-Type": "application/json"}
        async with client.stream("POST", url, content=body, headers=headers) as response:
            status = response.status_code
            if status in _REFUSED or response.is_redirect:
                raise JudgeError(
                    f"judge `{self.name}`: `{url}` answered {status}; check `base_url`, `model` "
                    "and the key that `api_key_env` names"
                )
            if status != httpx.codes.OK:
                is_final = status != httpx.codes.TOO_MANY_REQUESTS and status < 500
                return _failed(f"the endpoint answered {status}"), is_final
            answer = b""
            async for part in response.aiter_bytes():
                answer += part
                if len(answer) > MAX_ANSWER_BYTES:
                    return _failed(f"the answer is longer than {MAX_ANSWER_BYTES} bytes"), True
        return self._score(answer), True

    def _score(self, answer: bytes) -> Score:
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return _failed("the answer is no chat completion")
        if not isinstance(text, str):
            return _failed("the answer holds no text")
        number = read_score(text)
        low, high = self.settings.scale
        if number is None:
            return _failed("the answer has no line `score: NUMBER`")
        if not min(low, high) <= number <= max(low, high):
            return _failed(f"the answer's score is not between {low:g} and {high:g}")
        return Score((number - low) / (high - low), components={"answered": number})

    def _body(self, prompt: Prompt, completion: str) -> bytes:
        given = {
            "prompt": prompt_text(prompt.messages),
            "completion": completion,
            "answer": prompt.answer or "",
        }
        content = self._template.substitute(given)
        messages = [{"role": "user", "content": content}]
        body = {"model": self.settings.model, "messages": messages, **self.settings.parameters}
        return json.dumps(body).encode()  # ASCII: a lone surrogate stays one


def load_judge(path: Path) -> JudgeScorer:
    """Read a judge's file, its template, and its key.

    Raises:
        TaskError: a file is missing, a key of it is not as expected, or the variable is not set.
    """
    try:
        settings = JudgeSettings.model_validate(tomllib.loads(_read(path)))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"judge `{path}`: expected a TOML file; {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise TaskError(
            f"judge `{path}`, key `{key}`: {first['msg']}; the keys are "
            f"{', '.join(JudgeSettings.model_fields)}"
        ) from error
    _check_url(path, settings.base_url)
    low, high = settings.scale
    if low == high or not (math.isfinite(low) and math.isfinite(high)):
        raise TaskError(f"judge `{path}`: expected two different numbers as `scale`")
    if taken := {"model", "messages", "stream"} & settings.parameters.keys():
        raise TaskError(f"judge `{path}`: `parameters` may not set {', '.join(sorted(taken))}")
    try:
        json.dumps(settings.parameters, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"judge `{path}`: `parameters`: expected what JSON can say; {error}"
        ) from error
    template = _template(path.parent / settings.template)
    return JudgeScorer(f"judge:{path.stem}", settings, template, _api_key(path, settings))


def read_score(text: str) -> float | None:
    """Return the number of the last line that says `score: NUMBER`; None without one."""
    for line in reversed(text.strip().split("\n")):
        if match := _SCORE_LINE.fullmatch(line.strip().lower()):
            return float(match[1])
    return None


def prompt_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Return a single message as it is, several each after its role."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _failed(feedback: str) -> Score:
    return Score(None, "scorer_error", feedback=feedback)


def _check_url(path: Path, base_url: str) -> None:
    """Refuse what cannot be asked, or may hold a secret: the URL stands in messages and events."""
    try:
        url = httpx.URL(base_url)
        is_good = bool(url.host) and not url.userinfo and not set("?#") & set(base_url)
    except httpx.InvalidURL:
        is_good = False
    if not is_good:
        raise TaskError(
            f"judge `{path}`, key `base_url`: expected http(s)://HOST[:PORT][/PATH] without user, "
            "password or query; name the variable that holds a key as `api_key_env`"
        )


def _template(path: Path) -> Template:
    template = Template(_read(path))
    if not template.is_valid() or not set(template.get_identifiers()) <= set(_PLACEHOLDERS):
        raise TaskError(
            f"judge template `{path}`: expected no placeholders but $prompt, $completion and "
            "$answer; write a dollar sign as $$"
        )
    if "completion" not in template.get_identifiers():
        raise TaskError(f"judge template `{path}`: expected $completion in it, found none")
    return template


def _api_key(path: Path, settings: JudgeSettings) -> str | None:
    if settings.api_key_env is None:
        return None
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key:
        raise TaskError(
            f"judge `{path}`: expected the key in the variable `{settings.api_key_env}`, which is "
            "not set; export it, or leave out `api_key_env`"
        )
    if not (key.isascii() and key.isprintable()):
        raise TaskError(
            f"judge `{path}`: the variable `{settings.api_key_env}`: expected one line of "
            "printable ASCII, came something else"
        )
    return key


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"judge: expected a text file at `{path}`; {error}") from error
