"""The sections of the page, in their order."""

from collections.abc import Callable

from flows.report.learning_sections import failures, importance, time, value
from flows.report.policy_sections import exploration, forgetting, reward
from flows.report.replay_sections import buffer, retries, review
from flows.report.section import Runs, Section

_SECTIONS: tuple[Callable[[Runs], Section], ...] = (
    reward,
    exploration,
    forgetting,
    buffer,
    retries,
    review,
    importance,
    value,
    time,
    failures,
)


def sections(runs: Runs) -> list[Section]:
    """Return the sections that have something to show."""
    made = (section(runs) for section in _SECTIONS)
    return [section for section in made if not section.is_empty]
