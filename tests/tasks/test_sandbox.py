"""The sandbox: nothing pays that was not computed, nothing stays, and correct programs are paid."""

import os
import re
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rrl_core.tasks.code_tests import CodeTests, Test, Tests
from rrl_core.tasks.protocol import Prompt
from rrl_core.tasks.sandbox.running import FIRST_UID, NUM_UIDS, Limits, isolation, run_candidate
from rrl_core.tasks.scorers import score_all

SECTION = re.compile(r"^=== ([^+\n]+?)(?: \+ (\w+))?\n", re.MULTILINE)
HELPERS = ("claim", "steal")


def read_attacks() -> dict[str, str]:
    """Return the programs of sandbox_attacks.txt by name, each after the helper that it names."""
    _, *parts = SECTION.split(Path(__file__).with_name("sandbox_attacks.txt").read_text())
    sources = dict(zip(parts[::3], parts[2::3], strict=True))
    helper_of = dict(zip(parts[::3], parts[1::3], strict=True))
    return {
        name: sources.get(helper_of[name], "") + source
        for name, source in sources.items()
        if name not in HELPERS
    }


def attack_on(place: dict[str, object], name: str) -> str:
    """Return an attack with the places it is after."""
    return re.sub(
        r"\{(port|parent|folder|secret)\}", lambda found: str(place[found[1]]), ATTACKS[name]
    )


ATTACKS = read_attacks()
SECRETS = [781236450918273641, 236450918273641781, 450918273641781236, 918273641781236450]
LIMITS = Limits(time_limit_s=1.5, memory_mb=200)
GRACE_S = 2.0
START_S = 2.0  # of an interpreter, where all CPUs are busy
MAX_GROWTH_MB = 50
QUICK = ["os._exit", "always equal", "frames", "memory of the parent", "the file of secrets",
         "many claims for one test", "a sleeping grandchild", "the network", "writes elsewhere",
         "signals to the parent", "closed files"]  # fmt: skip


def prompt_for(*tests: Test, entry: str = "f") -> Prompt:
    answer = Tests(entry, tests).to_answer()
    return Prompt("p-1", "code", "train", ({"role": "user", "content": "?"},), answer)


@pytest.fixture(scope="module")
def scorer() -> CodeTests:
    return CodeTests(LIMITS, allow_limits_only=True, num_children=2)


@pytest.fixture
def place(monkeypatch) -> Iterator[dict[str, object]]:
    """What the attacks are after, where every user can get at it."""
    for number, value in enumerate(SECRETS, 1):
        monkeypatch.setenv(f"SECRET_{number}", str(value))
    with (
        tempfile.TemporaryDirectory(prefix="rrl-test-") as above,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        folder, secret = Path(above, "open"), Path(above, "secret.txt")
        folder.mkdir()
        secret.write_text(" ".join(map(str, [10**15, *SECRETS])))
        for path, mode in ((Path(above), 0o755), (folder, 0o777), (secret, 0o666)):
            path.chmod(mode)
        yield {
            "port": server.getsockname()[1],
            "parent": os.getpid(),
            "folder": folder,
            "secret": secret,
        }


def processes_of_candidates() -> list[str]:
    """Return the processes of users that only candidates have."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            uids = [line for line in (entry / "status").read_text().split("\n") if "Uid:" in line]
            if uids and 0 <= int(uids[0].split()[1]) - FIRST_UID < NUM_UIDS:
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def traces() -> list[Path]:
    places = ("/tmp", "/var/tmp", "/dev/shm", "/", "/root")
    return [trace for place in places for trace in Path(place).glob("rrl-attack*")]


def attack(name: str, scorer: CodeTests, place: dict[str, object]) -> None:
    tests = [Test((number,), value) for number, value in enumerate(SECRETS, 1)]
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    score = scorer(prompt_for(*tests), attack_on(place, name))
    took_s = time.monotonic() - started
    assert (score.value, score.status) == (0.0, "ok")
    assert score.components["passed_share"] == 0.0
    assert took_s < LIMITS.time_limit_s + GRACE_S + START_S
    assert not list(place["folder"].iterdir())
    assert not traces()
    assert place["secret"].exists()
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb / 1024 < MAX_GROWTH_MB


@pytest.mark.parametrize("name", QUICK)
def test_an_attack_earns_nothing_and_leaves_nothing(name, scorer, place):
    attack(name, scorer, place)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in QUICK])
def test_every_attack_earns_nothing_and_leaves_nothing(name, scorer, place):
    attack(name, scorer, place)


@pytest.mark.slow
def test_all_attacks_side_by_side_disturb_no_correct_solution(scorer, place):
    correct = "def f(x):\n    return x * x"
    tests = [Test((number,), number * number) for number in (1, 2, 3)]
    sources = [attack_on(place, name) for name in ATTACKS]
    completions = [text for source in sources for text in (source, correct)]
    scores = score_all(scorer, [prompt_for(*tests)] * len(completions), completions)
    assert {score.value for score in scores[1::2]} == {1.0}
    paid = [name for name, score in zip(ATTACKS, scores[::2], strict=True) if score.value]
    assert not paid
    time.sleep(GRACE_S)
    if os.geteuid() == 0:
        assert not processes_of_candidates()


def test_the_attacks_have_teeth(place):
    """Under limits only, the file of secrets is there to be read."""
    source = attack_on(place, "the file of secrets")
    outcome = run_candidate(source, "f", [([2], {})], LIMITS, "limits_only")
    assert outcome.lines == (["value", SECRETS[1]],)


def test_a_sleeping_grandchild_does_not_delay_the_verdict(scorer):
    source = (
        "import os, time\ndef f(x):\n    if os.fork() == 0:\n        time.sleep(600)\n    return x"
    )
    started = time.monotonic()
    assert scorer(prompt_for(Test((1,), 1)), source).value == 1.0
    assert time.monotonic() - started < START_S + 0.5
    if os.geteuid() == 0:
        assert not processes_of_candidates()


CORRECT = {
    "plain": "def f(x):\n    return x * x",
    "prints": "print('hello')\ndef f(x):\n    print('x', x, flush=True)\n    return x * x",
    "errors": "import sys\ndef f(x):\n    print('x', file=sys.stderr)\n    return x * x",
    "lambda": "f = lambda x: x ** 2",
    "class": "class Square:\n    def __call__(self, x):\n        return x * x\nf = Square()",
    "memory between calls": "seen = {}\ndef f(x):\n    seen[x] = x * x\n    return seen[x]",
    "main": "def f(x):\n    return x * x\nif __name__ == '__main__':\n    raise SystemExit(1)",
    "stops itself": "def f(x):\n    try:\n        raise SystemExit\n    except SystemExit:\n"
    "        return x * x",
    "modules": "import bisect, collections, copy, dataclasses, datetime, decimal, enum, fractions,"
    " functools, hashlib, heapq, itertools, json, math, operator, random, re, statistics, string,"
    " typing, zlib\nfrom typing import *\n@dataclasses.dataclass\nclass Box:\n    x: int\n"
    "@functools.lru_cache\ndef f(x):\n    hashlib.sha256(b'x')\n"
    "    return int(math.pow(Box(x).x, 2))",
    "deep recursion": "import sys\nsys.setrecursionlimit(20000)\n"
    "def g(n):\n    return n and 1 + g(n - 1)\n"
    "def f(x):\n    return x * x + g(9000) - 9000",
    "memory": "def f(x):\n    big = [0] * (5 << 20)\n    return x * x",
    "a file": "def f(x):\n    with open('note', 'w') as file:\n        file.write(str(x * x))\n"
    "    return int(open('note').read())",
    "temporary file": "import tempfile\ndef f(x):\n    with tempfile.TemporaryFile('w+') as file:\n"
    "        file.write(str(x * x))\n        file.seek(0)\n        return int(file.read())",
    "threads": "from concurrent.futures import ThreadPoolExecutor\ndef f(x):\n"
    "    with ThreadPoolExecutor(3) as pool:\n        return sum(pool.map(lambda _: x, range(x)))",
    "reads input": "import sys\ndef f(x):\n    return x * x + len(sys.stdin.read())",
    "float": "def f(x):\n    return x * float(x)",
    "asynchronous": "import asyncio\nasync def g(x):\n    return x * x\n"
    "def f(x):\n    return asyncio.run(g(x))",
}  # fmt: skip


def test_correct_programs_are_paid(scorer):
    tests = [Test((number,), number * number) for number in (0, 1, 7)]
    scores = score_all(scorer, [prompt_for(*tests)] * len(CORRECT), list(CORRECT.values()))
    unpaid = {n: s.feedback for n, s in zip(CORRECT, scores, strict=True) if s.value != 1.0}
    assert not unpaid


def test_arguments_are_fresh_for_each_test(scorer):
    source = "def f(x):\n    x.append(1)\n    return len(x)"
    assert scorer(prompt_for(Test(([],), 1), Test(([],), 1)), source).value == 1.0


def test_claims_for_guessed_answers_pay_no_more_than_a_guess(scorer):
    claim_both = ATTACKS["many claims for one test"].replace(
        "('[\"value\", %d]' % k for k in range(20000))",
        "(['[\"value\", true]', '[\"value\", false]'])",
    )
    assert "true" in claim_both
    answers = [True, True, False, True, False, False]
    tests = [Test((number,), answer) for number, answer in enumerate(answers)]
    score = scorer(prompt_for(*tests), claim_both)
    assert score.value == 0.0
    assert score.components["passed_share"] <= 0.5


def test_scores_do_not_depend_on_order_batch_mates_or_thread(scorer):
    tests = [Test((number,), number * number) for number in (1, 2)]
    completions = [CORRECT["plain"], "def f(x):\n    return 1", "def f(x):\n    1 / 0", "", "f = 3"]
    alone = [scorer(prompt_for(*tests), completion) for completion in completions]
    prompts = [prompt_for(*tests)] * len(completions)
    assert score_all(scorer, prompts, completions) == alone
    assert score_all(scorer, prompts, completions[::-1]) == alone[::-1]
    with ThreadPoolExecutor(1) as pool:
        assert list(pool.map(scorer, prompts, completions)) == alone


def test_hashes_are_the_same_in_every_child(scorer):
    source = "def f(x):\n    return hash(x)"
    kept = [run_candidate(source, "f", [(["a"], {})], LIMITS, isolation()) for _ in range(2)]
    assert kept[0].lines == kept[1].lines


def test_a_child_that_cannot_start_gives_no_verdict(scorer, monkeypatch):
    monkeypatch.setattr("rrl_core.tasks.sandbox.running.CHILD", Path("/nowhere/child.py"))
    score = scorer(prompt_for(Test((1,), 1)), CORRECT["plain"])
    assert (score.value, score.status) == (None, "scorer_error")
    assert score.feedback == "no child: it ended before it was ready"


def test_under_limits_only_nothing_stays_either(place):
    source = ATTACKS["a daemon"]
    outcome = run_candidate(source, "f", [([1], {})], LIMITS, "limits_only")
    assert outcome.lines == (["value", 1],)
    if os.geteuid() == 0:
        assert not processes_of_candidates()
    source = (
        "import os\ndef f(x):\n    open('a', 'w')\n    os.mkdir('d')\n    os.chmod('d', 0)\n"
        "    return os.getcwd()"
    )
    outcome = run_candidate(source, "f", [([1], {})], LIMITS, "limits_only")
    ((kind, folder),) = outcome.lines
    assert kind == "value"
    assert not Path(folder).exists()
