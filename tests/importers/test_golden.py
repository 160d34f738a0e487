"""What a file becomes stays what it was, to the byte: the digests were taken when this was written.

A change of an id or a hash would make every store's imports strangers to the file they came from.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import storage
from tests.importers.imported import import_here, verl_line, write_lines

TABLES = ("prompts", "rollouts", "rollout_tokens", "scores")
LINES: list[Any] = [
    *(verl_line(n, gts=str(n)) for n in range(9)),
    "", " \t\r", "{", "null", "\xa0".encode("latin-1"), '{"a": 1, "a": 2}', '{"input": 1}',
    *(verl_line(n, uid=f"u{n % 2}", request_id=n, acc="True", note=["x"]) for n in range(4)),
    '{"input": "a\u2028\x7f \\ud800", "output": "\\"\\\\\\n\\u0000\u00e9", '
    '"score": NaN, "step": 3}',
    '{"input": "a", "output": "", "score": -40, "step": 3.0, "deep": {"x": 1}, "big": 1e999}',
    '  {"input" : "b",\t"output": "c\\/",'
    ' "score": 123456789012345678901234567890, "step": true} \r',
    verl_line(5, output="x" * 5000), verl_line(6, score=-0.0), verl_line(6, score=False),
]  # fmt: skip
TURN = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "completion_logprobs": [-0.5, -1, -0.25]}


def episode(n: int) -> dict[str, Any]:
    said = [{"role": "assistant", "content": f"{n}"}]
    asked = [{"role": "user", "content": f"What is {n // 2} + 1?"}]
    return {
        "example_id": n // 2, "prompt": asked, "completion": said, "answer": "2", "reward": n / 3,
        "metric": n, "trajectory": [{"prompt": asked, "completion": said, "tokens": TURN}],
    }  # fmt: skip


def digest(store: storage.Store) -> dict[str, tuple[int, str]]:
    """The number of rows of each table, and a hash of all their ids and contents."""
    found = {}
    for table in TABLES:
        pairs = sorted((row["event_id"], row["content_sha256"]) for row in store.read(table))
        text = json.dumps(pairs)
        found[table] = len(pairs), hashlib.sha256(text.encode()).hexdigest()[:16]
    parts = [(r["event_id"], r["sha256"], r["position"]) for r in store.read("imports")]
    left_out = [(r["event_id"], r["kind"]) for r in store.read("failures")]
    text = json.dumps([sorted(parts), sorted(left_out)])
    return found | {"parts": (len(parts), hashlib.sha256(text.encode()).hexdigest()[:16])}


def test_lines_of_verl(store: storage.Store, tmp_path: Path):
    path = write_lines(tmp_path / "7.jsonl", LINES)
    import_here(store, "verl", path, name="golden", temperature=1.0)
    assert digest(store) == {
        "prompts": (14, "d2d1bb059ccfc209"),
        "rollouts": (19, "8aa93cfdae5e18ee"),
        "rollout_tokens": (0, "4f53cda18c2baa0c"),
        "scores": (29, "fee101090d96e4f5"),
        "parts": (1, "434bff18c98e8098"),
    }


def test_episodes_with_tokens(store: storage.Store, tmp_path: Path):
    path = write_lines(tmp_path / "results.jsonl", [episode(n) for n in range(9)])
    import_here(store, "verifiers", path, name="golden", task="arithmetic")
    assert digest(store) == {
        "prompts": (5, "b0786c59ddb6e800"),
        "rollouts": (9, "25e5e19c920db467"),
        "rollout_tokens": (9, "61beaaa49179c0f0"),
        "scores": (18, "1ec4eb5287946ac3"),
        "parts": (1, "637109abff0d6d18"),
    }
