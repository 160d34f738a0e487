"""What an iteration's batch needs of earlier ones, read by a thread while the sampler generates.

It is the same whenever it is read: picks name rows by id, the buffer is that of the pin, and the
log never changes. So a resumed run and an audit read it when they need it, with the same result.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from flows import replaying
from flows.planned import OldRows, old_rows, picks_before_sampling
from flows.substituting import Past
from flows.wiring import Session


@dataclass(frozen=True)
class Fetch:
    """The past of an iteration, which a thread reads or has read."""

    iteration: int
    past: Future[Past]


def keep(session: Session, decided: replaying.Decision) -> None:
    """Keep what an iteration decided where its batch needs it again: it is not derived twice."""
    session.decided = decided if session.config.replay.replace_zero_variance else None


def begin(session: Session, iteration: int) -> None:
    """Start to read what the batch of `iteration` needs, unless that was started before."""
    if session.fetch is None or session.fetch.iteration != iteration:
        thread = ThreadPoolExecutor(1)
        session.fetch = Fetch(iteration, thread.submit(_read, session, iteration))
        thread.shutdown(wait=False)


def fetched(session: Session, iteration: int) -> Past:
    """Return what the batch of `iteration` needs, and wait for it while it is being read.

    Raises:
        DamagedError: a segment that holds some of it is missing or was changed.
    """
    begin(session, iteration)
    assert session.fetch is not None
    try:
        return session.fetch.past.result()
    except BaseException:
        session.fetch = None  # whoever tries once more reads once more
        raise


def taken(session: Session, iteration: int) -> OldRows | None:
    """Return the rows of earlier iterations that were read for `iteration`, and let go of them."""
    fetch, session.fetch = session.fetch, None
    return None if fetch is None or fetch.iteration != iteration else fetch.past.result().old


def _read(session: Session, iteration: int) -> Past:
    store, run_id, config = session.store, session.run_id, session.config
    scorer = (session.reward_scorer.name, session.reward_scorer.version)
    old = old_rows(store, picks_before_sampling(store, run_id, iteration), scorer)
    if not config.replay.replace_zero_variance:
        return Past(old, None)
    kept, session.decided = session.decided, None
    if kept is not None and kept.plan["iteration"] == iteration:
        return Past(old, kept)
    [pinned] = store.read("views_pinned", run_id=run_id, iteration=iteration)
    pin = replaying.Pin.of_row(pinned)
    return Past(old, replaying.decide(store, run_id, config, iteration, pin))
