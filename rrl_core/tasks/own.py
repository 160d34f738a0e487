"""A user's own task, `module:name`: a function that is called with the parameters of `[task]`.

What it returns is looked through before anything is sampled, and so are its reference solutions
where it has them: a reward that refuses the right answer, or one that pays for nothing, is found
in seconds instead of after a night.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any

from rrl_core.tasks.loading import load_function
from rrl_core.tasks.protocol import (
    SUCCESS,
    Prompt,
    Scorer,
    SolvedTask,
    Split,
    Task,
    TaskError,
)
from rrl_core.tasks.scorers import score_all

NUM_CHECKED = 20  # prompts of a split whose solutions are judged


def load_task(spec: str, params: Mapping[str, Any], known: Collection[str]) -> Task:
    """Return the task that the function `spec` makes of `params`.

    Raises:
        TaskError: there is no such function, it refuses the parameters, or what it returns is no
            task; what it raises itself is wrapped.
    """
    function = load_function("task", spec, known).function
    try:
        task = function(**params)
    except TaskError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise TaskError(
            f"task `{spec}`, called with {dict(params)}: raised {type(error).__name__}: {error}"
        ) from error
    for problem in _problems(task):
        raise TaskError(f"task `{spec}`: expected a task (see docs/tasks.md); {problem}")
    checked: Task = task
    return checked


def check_solutions(task: Task) -> int:
    """Judge the reference solutions of a task's first prompts; return how many were judged.

    Raises:
        TaskError: a solution does not count as solved, is judged otherwise a second time, or an
            empty completion counts as solved too.
    """
    if not isinstance(task, SolvedTask):
        return 0
    splits: tuple[Split, ...] = ("train", "eval")
    prompts = [p for split in splits for p in islice(task.prompts(split), NUM_CHECKED)]
    solutions = [task.solution(prompt) for prompt in prompts]
    reward = task.scorers[0]
    first, again = (score_all(reward, prompts, solutions) for _ in range(2))
    empty = score_all(reward, prompts, [""] * len(prompts))
    for prompt, score, second, nothing in zip(prompts, first, again, empty, strict=True):
        what = None
        if score.value is None or score.value < SUCCESS:
            what = (
                f"the reference solution earned {score.value} ({score.status}) {score.feedback}; "
                f"expected {SUCCESS} or more, which counts as solved"
            )
        elif second != score:
            what = (
                f"the reference solution earned {score.value}, and {second.value} when asked again"
            )
        elif nothing.value is not None and nothing.value >= SUCCESS:
            what = f"an empty completion earned {nothing.value}, as much as the solution"
        if what is not None:
            asked = prompt.messages[-1]["content"][:80]
            raise TaskError(
                f"task `{task.name}`, reward `{reward.name}`, prompt {asked!r}: {what}; correct "
                f"the reward or the solution"
            )
    return len(prompts)


def _problems(task: Any) -> Iterator[str]:
    """Yield what a task lacks."""
    lacking = [name for name in ("name", "scorers", "prompts") if not hasattr(task, name)]
    if lacking:
        yield f"came {type(task).__name__} without {', '.join(lacking)}"
        return
    if not task.scorers or not all(map(_is_scorer, task.scorers)):
        yield "its `scorers` are not functions with a name and a version"
        return
    train = list(task.prompts("train"))
    if not train or not all(isinstance(p, Prompt) for p in [*train, *task.prompts("eval")]):
        yield "its prompts are no `Prompt`s, or there are none to train on"
    elif len({prompt.prompt_id for prompt in train}) < len(train):
        yield "two train prompts have the same `prompt_id`"


def _is_scorer(scorer: Scorer) -> bool:
    names = (getattr(scorer, "name", None), getattr(scorer, "version", None))
    return callable(scorer) and all(isinstance(name, str) and name for name in names)
