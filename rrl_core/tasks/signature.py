r"""Signature of a solution: its answer and the operations it used, as short text.

Solutions of a prompt with one signature count as one, so that replay does not fill up with copies
of the easiest way. The signature is the answer as an exact number (`answers.find_answer`) and the
operators that stand between two numbers, in order: "3 boxes: 3*24 = 72, 72-2 = 70. #### 70" has
the signature "70 *-".

Signs for one operation are one: ``*``, ``x``, ``\times``, ``\cdot`` and U+00D7 all multiply.
Currency, percent, brackets and spaces may stand between a number and its operator; a word may not,
since it can bring a hyphen of its own. Calculator notes (``<<3*24=72>>``) repeat what stands beside
them and are skipped.

Time is linear in the text: every quantifier is possessive.
"""

import hashlib
import re

from rrl_core.tasks.answers import find_answer

MAX_LENGTH = 100  # a longer signature is replaced by its hash

_NOTE = re.compile(r"<<[^<>\n]*+>>")
_FRACTION = re.compile(r"\\[dt]?+frac\{([0-9.,]++)\}\{([0-9.,]++)\}")
_SPACE = r"\s()\[\]{}$€£¥%"
_OPERATOR = r"\-+*/^\u2212\u00d7\u00b7\u00f7"
_TOKEN = re.compile(
    rf"""
      (?P<number>[0-9]++(?:[.,][0-9]++)*+|\.[0-9]++)
    | (?P<operator>\*\*|[{_OPERATOR}]|\\(?:times|cdot|div)(?![A-Za-z])|[xX](?![A-Za-z]))
    | (?P<space>(?:[{_SPACE}]|\\(?![A-Za-z]))++)  # the backslash of \$ and \%
    | [^0-9.\\{_OPERATOR}{_SPACE}][^0-9.\\{_OPERATOR}]*+
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
_SIGNS = {
    "**": "^", "\u2212": "-", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/",
    "\\times": "*", "\\cdot": "*", "\\div": "/", "x": "*", "X": "*",
}  # fmt: skip


def solution_signature(completion: str) -> str | None:
    """Return the signature of the solution in `completion`; None if it gives no answer."""
    answer = find_answer(completion)
    if answer is None:
        return None
    signature = f"{answer} {_operations(completion)}".rstrip()
    if len(signature) > MAX_LENGTH:
        return "sha256:" + hashlib.sha256(signature.encode()).hexdigest()[:32]
    return signature


def _operations(completion: str) -> str:
    """Return the operators between two numbers, in order, one character each."""
    operations: list[str] = []
    is_after_number, operator = False, ""
    for token in _TOKEN.finditer(_FRACTION.sub(r"\1/\2", _NOTE.sub("", completion))):
        if token["number"]:
            if operator:
                operations.append(operator)
            is_after_number, operator = True, ""
        elif token["operator"]:
            if is_after_number and not operator:  # what follows an operator is a sign
                operator = _SIGNS.get(token[0], token[0])
        elif not token["space"]:
            is_after_number, operator = False, ""
    return "".join(operations)
