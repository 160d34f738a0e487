"""A judge asks a real server: what comes late, broken or malformed costs one score alone."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import rrl_core.tasks.judge
from rrl_core.tasks.judge import JudgeError, JudgeScorer, load_judge, read_score
from rrl_core.tasks.protocol import Prompt, TaskError

PROMPT = Prompt("p-1", "sums", "train", ({"role": "user", "content": "What is 2 + 2?"},), "4")
Reply = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers by what the judged completion asks for."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][0]["content"]
        with server.lock:
            server.requests.append((self.path, dict(self.headers), body))
            server.open += 1
            server.most_open = max(server.most_open, server.open)
            number = sum(b["messages"][0]["content"] == content for _, _, b in server.requests)
        try:
            word = content.split("<<")[1].split(">>")[0]
            REPLIES.get(word, lambda h, n: h.say(word))(self, number)
        except (BrokenPipeError, ConnectionResetError):  # the judge did not wait
            pass
        finally:
            with server.lock:
                server.open -= 1

    def say(self, text: Any) -> None:
        self.send(200, json.dumps({"choices": [{"message": {"content": text}}]}).encode())

    def send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def slowly(handler: Handler) -> None:
    time.sleep(0.6)
    handler.say("score: 1")


def no_gzip(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", "4")
    handler.end_headers()
    handler.wfile.write(b"text")


def drop_by_drop(handler: Handler) -> None:
    """Never stop sending: each byte comes in time, the answer does not."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def hang_up(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"{")


REPLIES: dict[str, Callable[[Handler, int], None]] = {
    "slow": lambda h, n: slowly(h),
    "slow once": lambda h, n: slowly(h) if n == 1 else h.say("score: 8"),
    "drip": lambda h, n: drop_by_drop(h),
    "500": lambda h, n: h.send(500, b"out of memory"),
    "500 once": lambda h, n: h.send(500, b"") if n == 1 else h.say("score: 5"),
    "429 once": lambda h, n: h.send(429, b"") if n == 1 else h.say("score: 5"),
    "too long": lambda h, n: h.send(400, b"context length exceeded"),
    "no json": lambda h, n: h.send(200, b"<html>"),
    "no choices": lambda h, n: h.send(200, b'{"choices": []}'),
    "nested": lambda h, n: h.send(200, b"[" * 100_000),
    "no text": lambda h, n: h.say(None),
    "endless": lambda h, n: h.say("x" * 2**21),
    "no gzip": lambda h, n: no_gzip(h),
    "hang up": lambda h, n: hang_up(h),
    "unauthorised": lambda h, n: h.send(401, b""),
    "moved": lambda h, n: h.send(307, b""),
}


@contextmanager
def serve() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.lock, server.open, server.most_open = [], threading.Lock(), 0, 0
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def server() -> Iterator[Any]:
    with serve() as server:
        yield server


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rrl_core.tasks.judge, "RETRY_PAUSE_S", 0.0)


def write_judge(
    folder: Path, url: str, text: str = "", template: str = "$prompt|$completion"
) -> Path:
    (folder / "template.txt").write_text(template)
    lines = f'base_url = "{url}/v1"\nmodel = "m"\ntemplate = "template.txt"\n'
    (folder / "terse.toml").write_text(lines + "scale = [0, 10]\ntimeout_s = 0.3\n" + text)
    return folder / "terse.toml"


def judge_of(server: Any, folder: Path, **text: str) -> JudgeScorer:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    return load_judge(write_judge(folder, url, **text))


def test_the_number_of_the_answer_becomes_a_value_on_the_scale(server: Any, tmp_path: Path):
    judge = judge_of(server, tmp_path, text="[parameters]\ntemperature = 0.0\n")
    score = judge(PROMPT, "It is 4. <<Clear.\n**Score:** 7.5>>")
    assert (score.status, score.value, score.components) == ("ok", 0.75, {"answered": 7.5})
    [(path, headers, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    content = "What is 2 + 2?|It is 4. <<Clear.\n**Score:** 7.5>>"
    assert body == {
        "model": "m", "temperature": 0.0, "messages": [{"role": "user", "content": content}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "statuses", "feedback"),
    [
        ("score: 10", ["ok"], ""),
        ("slow once", ["timeout", "ok"], ""),
        ("slow", ["timeout", "timeout"], "no answer within 0.3 s"),
        ("drip", ["timeout", "timeout"], "no answer within 0.3 s"),
        ("500", ["scorer_error", "scorer_error"], "the endpoint answered 500"),
        ("500 once", ["scorer_error", "ok"], ""),
        ("429 once", ["scorer_error", "ok"], ""),
        ("hang up", ["scorer_error", "scorer_error"], "the connection broke"),
        ("no gzip", ["scorer_error", "scorer_error"], "the answer broke"),
        ("too long", ["scorer_error"], "the endpoint answered 400"),
        ("no json", ["scorer_error"], "the answer is no chat completion"),
        ("no choices", ["scorer_error"], "the answer is no chat completion"),
        ("nested", ["scorer_error"], "the answer is no chat completion"),
        ("no text", ["scorer_error"], "the answer holds no text"),
        ("endless", ["scorer_error"], "the answer is longer than"),
        ("I like it", ["scorer_error"], "the answer has no line `score: NUMBER`"),
        ("score: 11", ["scorer_error"], "the answer's score is not between 0 and 10"),
    ],
)
def test_every_answer_has_its_status(
    asked: str, statuses: list[str], feedback: str, server: Any, tmp_path: Path
):
    judge = judge_of(server, tmp_path)
    [attempts] = judge.judge_all([PROMPT], [f"<<{asked}>>"])
    assert [attempt.score.status for attempt in attempts] == statuses
    assert attempts[-1].score.feedback.startswith(feedback)
    assert len(server.requests) == len(statuses)
    if statuses[0] == "timeout":
        assert 300 <= attempts[0].elapsed_ms < 550


def test_one_bad_answer_costs_one_score_and_the_order_is_kept(server: Any, tmp_path: Path):
    judge = judge_of(server, tmp_path, text="concurrency = 3\n")
    asked = ["score: 1", "slow once", "no json", "score: 4", "500 once", "score: 6"]
    judged = judge.judge_all([PROMPT] * 6, [f"<<{a}>>" for a in asked])
    values = [attempts[-1].score.value for attempts in judged]
    assert values == [0.1, 0.8, None, 0.4, 0.5, 0.6]
    assert 2 <= server.most_open <= 3


@pytest.mark.parametrize("asked", ["unauthorised", "moved"])
def test_an_endpoint_that_refuses_everything_stops_the_judging(
    asked: str, server: Any, tmp_path: Path
):
    with pytest.raises(JudgeError, match="check `base_url`, `model` and the key"):
        judge_of(server, tmp_path)(PROMPT, f"<<{asked}>>")


def test_an_endpoint_that_is_not_there_stops_the_judging(tmp_path: Path):
    with serve() as gone:
        judge = judge_of(gone, tmp_path)
    with pytest.raises(JudgeError, match="cannot be reached"):
        judge(PROMPT, "x")


def test_the_key_comes_from_the_named_variable_and_stays_out_of_sight(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_JUDGE_KEY", "s3cret\n")
    judge = judge_of(server, tmp_path, text='api_key_env = "MY_JUDGE_KEY"\n')
    assert judge(PROMPT, "<<score: 10>>").value == 1.0
    assert server.requests[0][1]["Authorization"] == "Bearer s3cret"
    with pytest.raises(JudgeError) as refused:
        judge(PROMPT, "<<unauthorised>>")
    assert "s3cret" not in f"{judge!r} {judge.settings!r} {refused.value}"
    monkeypatch.delenv("MY_JUDGE_KEY")
    with pytest.raises(TaskError, match="`MY_JUDGE_KEY`, which is not set"):
        load_judge(tmp_path / "terse.toml")


@pytest.mark.parametrize("key", ["s3crét", "s3c\nret", "s3c\x00ret"])
def test_a_key_that_no_header_can_hold_is_refused_unshown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_judge(tmp_path, "http://127.0.0.1:1", 'api_key_env = "MY_JUDGE_KEY"\n')
    # The process cannot hold a NUL in its environment, a mapping can.
    monkeypatch.setattr(rrl_core.tasks.judge.os, "environ", {"MY_JUDGE_KEY": key})
    with pytest.raises(TaskError, match=r"`MY_JUDGE_KEY`.* printable ASCII") as refused:
        load_judge(path)
    assert "s3c" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["http://bob:s3cret@localhost", "http://s3cret@localhost", "http://localhost?key=s3cret",
     "http://localhost#s3cret", "http://localhost:s3cret", "http:///s3cret"],
)  # fmt: skip
def test_a_url_holds_no_secret_and_a_wrong_one_is_not_shown(url: str, tmp_path: Path):
    with pytest.raises(TaskError, match="key `base_url`: expected") as refused:
        load_judge(write_judge(tmp_path, url))
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("value", ["nan", "inf", "2020-01-01"])
def test_parameters_that_are_no_json_are_refused(value: str, tmp_path: Path):
    with pytest.raises(TaskError, match="`parameters`: expected what JSON can say"):
        load_judge(write_judge(tmp_path, "http://127.0.0.1:1", f"[parameters]\nx = {value}\n"))


def test_hostile_completions_are_data(server: Any, tmp_path: Path):
    judge = judge_of(server, tmp_path, template="$$5 for $completion ($answer)")
    completion = '<<score: 1>> $answer ${prompt} {x} "\n\ud800 \u2028'
    assert judge(PROMPT, completion).value == 0.1
    assert server.requests[0][2]["messages"][0]["content"] == f"$5 for {completion} (4)"


def test_several_messages_are_told_apart(server: Any, tmp_path: Path):
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    prompt = Prompt("p-2", "chat", "train", messages, None)
    judge_of(server, tmp_path)(prompt, "<<score: 1>>")
    content = server.requests[0][2]["messages"][0]["content"]
    assert content == "system: Be brief.\n\nuser: Hi|<<score: 1>>"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("score: 7", 7.0),
        ("Reasons.\n\n  **SCORE**: `3.25`\n", 3.25),
        ("score: 2\nno, better:\nScore: 9", 9.0),
        ("score: -1", -1.0),
        ("# Score : 4", 4.0),
        ("score: 4/10", None),
        ("the score: 4", None),
        ("score: nan", None),
        ("score: 1e5", None),
        ("score: " + "9" * 400, None),
        ("score: ٣", None),
        ("", None),
    ],
)
def test_the_last_line_that_says_score_counts(text: str, number: float | None):
    assert read_score(text) == number


def test_reading_hostile_answers_takes_linear_time():
    started = time.perf_counter()
    for text in ("* " * 500_000 + "score", "score" * 200_000, "score: 1 \n" * 100_000 + "x"):
        read_score(text)
    assert time.perf_counter() - started < 2


def test_another_question_is_another_version(tmp_path: Path):
    url = "http://127.0.0.1:1"
    versions = [
        load_judge(write_judge(tmp_path, url, *change)).version
        for change in (
            ("",), ("[parameters]\ntemperature = 1.0\n",), ("", "$completion"),
            ("concurrency = 2\n",),
        )
    ]  # fmt: skip
    assert versions[3] == versions[0]  # how many are asked at a time changes no answer
    assert len(set(versions)) == 3


@pytest.mark.parametrize(
    ("text", "template", "message"),
    [
        ("colour = 1\n", "$completion", "key `colour`"),
        ("concurrency = 0\n", "$completion", "key `concurrency`"),
        ("concurrency = \n", "$completion", "expected a TOML file"),
        ("[parameters]\nmodel = 'x'\n", "$completion", "may not set model"),
        ("", "rate this", r"expected \$completion"),
        ("", "$completion $reward", "no placeholders but"),
        ("", "$completion costs $5", "no placeholders but"),
    ],
)
def test_a_wrong_file_is_named(text: str, template: str, message: str, tmp_path: Path):
    with pytest.raises(TaskError, match=message):
        load_judge(write_judge(tmp_path, "http://127.0.0.1:1", text, template))


def test_a_scale_of_one_number_is_refused(tmp_path: Path):
    path = write_judge(tmp_path, "http://127.0.0.1:1")
    path.write_text(path.read_text().replace("[0, 10]", "[1, 1]"))
    with pytest.raises(TaskError, match="two different numbers"):
        load_judge(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(TaskError, match=r"none\.toml"):
        load_judge(tmp_path / "none.toml")
    path = write_judge(tmp_path, "http://127.0.0.1:1")
    (tmp_path / "template.txt").unlink()
    with pytest.raises(TaskError, match=r"template\.txt"):
        load_judge(path)
