"""No sampler at all: what a run that learns from history alone has in a sampler's place."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rrl_core.sampling.protocol import (
    Completion,
    OnFinished,
    SampleRequest,
    SamplerError,
    SamplingParams,
    SyncMode,
)

if TYPE_CHECKING:
    from rrl_core.policy.model import Policy


class NoSampler:
    """Knows which policy version is published and generates nothing; see `Sampler`."""

    engine = "none"
    sync: SyncMode = "shared"
    context_tokens = 0

    def __init__(self) -> None:
        self._version = -1

    @property
    def policy_version(self) -> int:
        """Version of the newest policy; -1 before the first `load_policy`."""
        return self._version

    def load_policy(self, policy: "Policy", version: int) -> None:
        """Remember the version."""
        del policy
        self._version = version

    def generate(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """Refuse.

        Raises:
            SamplerError: always.
        """
        del params, on_finished
        raise SamplerError(
            f"expected a run with a sampler, came {len(requests)} requests in one that learns from "
            'history alone; set `run.mode` to "hybrid" or "online" to sample'
        )

    def sleep(self) -> None:
        """Do nothing: there is nothing to free."""

    def wake(self) -> None:
        """Do nothing: there is nothing to undo."""

    def close(self) -> None:
        """Do nothing: there is no engine."""
