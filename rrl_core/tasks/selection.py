"""What an iteration uses, of train prompts or of stored rollouts: the same in a resumed run."""

import functools
import random

from rrl_core.seeds import derive_seed
from rrl_core.tasks.protocol import TaskError


def select_prompts(
    num_prompts: int, iteration: int, per_iteration: int, seed_root: int
) -> list[int]:
    """Return the indices of the train prompts that `iteration` uses, all different.

    An epoch is a random order of all prompts, cut into whole iterations. The
    `num_prompts % per_iteration` prompts at its end, others in each epoch, are left out.

    Args:
        num_prompts: number of train prompts.
        iteration: 1 or more.
        per_iteration: prompts an iteration uses, at most `num_prompts`.
        seed_root: root of the run's seeds.

    Returns:
        `per_iteration` indices in [0, num_prompts).

    Raises:
        TaskError: a number is out of range.
    """
    if not (iteration >= 1 and 1 <= per_iteration <= num_prompts):
        raise TaskError(
            f"expected iteration >= 1 and 1 <= prompts per iteration <= number of train prompts; "
            f"came iteration {iteration}, {per_iteration} per iteration and {num_prompts} prompts; "
            f"use fewer prompts per iteration or give the task more"
        )
    return _cut(num_prompts, iteration, per_iteration, seed_root, "prompt order")


def select_rollouts(
    num_rollouts: int, iteration: int, per_iteration: int, seed_root: int
) -> list[int]:
    """Return the indices of the stored rollouts that `iteration` of an offline run learns from.

    Epochs and arguments are those of `select_prompts`.

    Raises:
        TaskError: there are fewer rollouts than an iteration takes.
    """
    if not (iteration >= 1 and 1 <= per_iteration <= num_rollouts):
        raise TaskError(
            f"expected at least `offline.samples` = {per_iteration} rollouts to learn from; came "
            f"{num_rollouts}; take fewer samples, or let `offline.query` name more"
        )
    return _cut(num_rollouts, iteration, per_iteration, seed_root, "rollout order")


def _cut(number: int, iteration: int, per_iteration: int, seed_root: int, what: str) -> list[int]:
    epoch, place = divmod(iteration - 1, number // per_iteration)
    order = _epoch_order(number, derive_seed(seed_root, what, epoch))
    return list(order[place * per_iteration : (place + 1) * per_iteration])


@functools.lru_cache(maxsize=4)
def _epoch_order(num_prompts: int, seed: int) -> tuple[int, ...]:
    order = list(range(num_prompts))
    random.Random(seed).shuffle(order)
    return tuple(order)
