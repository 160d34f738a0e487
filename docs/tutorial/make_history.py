"""Write rollout files as two other frameworks leave them, for docs/tutorial.md.

    python docs/tutorial/make_history.py FOLDER

`FOLDER/verl/<step>.jsonl` holds text alone: made-up answers to small sums, judged by an exact
format. `FOLDER/verifiers/results.jsonl` holds token ids with log-probs: what the model `tiny`
(random weights, from no hub) answered, sampled here by transformers itself. An answer of a random
model is never right, so every reward in it is 0.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUMS = [(3, 4), (8, 5), (9, 9), (12, 7), (20, 15), (31, 6), (44, 8), (50, 25)]
NUM_SAMPLES, NUM_STEPS, MAX_TOKENS = 4, 2, 12
Line = dict[str, Any]


def question(left: int, right: int) -> str:
    return f"What is {left} + {right}?"


def verl_lines(step: int) -> Iterator[Line]:
    """Yield rollouts as verl dumps them: decoded text, with the words of the chat template."""
    chance = random.Random(step)
    for left, right in SUMS:
        total = left + right
        for _ in range(NUM_SAMPLES):
            guess = total if chance.random() < 0.3 + 0.2 * step else total + chance.choice([-1, 10])
            says_so = chance.random() < 0.5
            output = f"{left} plus {right} is {guess}." + (f"\n#### {guess}" if says_so else "")
            yield {
                "input": f"user\n{question(left, right)}\nassistant\n",
                "output": output,
                "gts": str(total),
                "score": float(says_so and guess == total),
                "step": step,
            }


def verifiers_lines() -> Iterator[Line]:
    """Yield rollouts as verifiers saves them with the state column `trajectory`."""
    import torch

    from rrl_core.policy.tiny import tiny_model, tiny_tokenizer

    torch.manual_seed(0)
    model, tokenizer = tiny_model(torch.float32), tiny_tokenizer()
    for number, (left, right) in enumerate(SUMS):
        asked = [{"role": "user", "content": question(left, right)}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        given = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        sampled = model.generate(
            **given, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_TOKENS,
            num_return_sequences=NUM_SAMPLES, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        logprobs = torch.stack(sampled.logits, dim=1).log_softmax(-1)
        prompt_ids = given["input_ids"][0].tolist()
        for row, sequence in enumerate(sampled.sequences):
            ids = sequence[len(prompt_ids) :].tolist()
            if tokenizer.eos_token_id in ids:
                ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
            said = tokenizer.decode(ids, skip_special_tokens=True)
            answer = [{"role": "assistant", "content": said}]
            tokens = {
                "prompt_ids": prompt_ids,
                "completion_ids": ids,
                "completion_logprobs": [float(logprobs[row, n, i]) for n, i in enumerate(ids)],
            }
            yield {
                "example_id": number,
                "prompt": asked,
                "completion": answer,
                "answer": str(left + right),
                "reward": float(f"#### {left + right}" in said),
                "trajectory": [{"prompt": asked, "completion": answer, "tokens": tokens}],
            }


def write(path: Path, lines: Iterator[Line]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1])
    for step in range(1, NUM_STEPS + 1):
        write(folder / "verl" / f"{step}.jsonl", verl_lines(step))
    write(folder / "verifiers" / "results.jsonl", verifiers_lines())
    print(f"wrote {folder}/verl/1.jsonl, {folder}/verl/2.jsonl, {folder}/verifiers/results.jsonl")


if __name__ == "__main__":
    main()
