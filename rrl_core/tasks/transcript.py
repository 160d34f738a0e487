"""An episode of several turns as one text, and the scorer that reads its last turn alone.

The text is the policy's first turn, then for each further message a line with its role and its
content: what a chat template leaves when its special tokens are skipped, and how imported
conversations are written too. It ends with a turn of the policy's: what an environment said last is
part of an episode only where the policy went on.
"""

from collections.abc import Sequence

from rrl_core.tasks.protocol import Messages, Prompt, Score, Scorer
from rrl_core.tasks.tool_calls import OPENING

ASSISTANT = "assistant"


def transcript(conversation: Messages) -> str:
    """Return what was said after the prompt as one text."""
    if not conversation:
        return ""
    first, *others = conversation
    opening = "" if first["role"] == ASSISTANT else f"{first['role']}\n"
    said = "".join(f"\n{message['role']}\n{message['content']}" for message in others)
    return opening + first["content"] + said


def last_turn(text: str) -> str:
    """Return the policy's last turn of a transcript.

    A policy that writes such a line itself shortens its own turn, nobody else's: it ends the text.
    """
    return text.rpartition(f"\n{ASSISTANT}\n")[2]


class LastTurn:
    """A scorer that sees the last turn alone: no answer is found in what a tool said.

    A last turn that calls a tool gives no answer: it earns 0.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.name = f"last_turn_{scorer.name}"
        self.version = f"1-{scorer.version}"
        self._scorer = scorer

    def __call__(self, prompt: Prompt, completion: str) -> Score:
        """Judge the last turn of `completion`."""
        turn = last_turn(completion)
        score = self._scorer(prompt, turn)
        if score.status == "ok" and OPENING in turn:
            return Score(0.0, "ok", score.components, "the last turn calls a tool, and answers not")
        return score


def last_turn_scorers(scorers: Sequence[Scorer]) -> tuple[Scorer, ...]:
    """Return scorers of the last turn in place of `scorers`, in their order."""
    return tuple(map(LastTurn, scorers))
