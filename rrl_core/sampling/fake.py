"""A sampler without a model, for tests of everything around it.

Completions are drawn uniformly from a small alphabet of tokens, or come from a script.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence

from rrl_core.policy.model import Policy
from rrl_core.sampling.protocol import (
    Completion,
    OnFinished,
    SampleRequest,
    SamplerError,
    SamplingParams,
    SyncMode,
)
from rrl_core.sampling.serve import GREEDY_REASON, serve
from rrl_core.seeds import derive_seed

ALPHABET = "0123456789 -#."  # enough to answer a sum now and then

Script = Callable[[SampleRequest, SamplingParams], Sequence[int]]


class FakeSampler:
    """Draws from `ALPHABET` and the end-of-sequence token; see `Sampler` for the contract.

    A draw depends on the policy's digest, the prompt and the seed (not when greedy). A `script`
    replaces the draw: it returns the token ids, which are cut after the first end of sequence and
    at `max_tokens`. Log-probs are those of the uniform draw in both cases.
    """

    engine = "fake"
    sync: SyncMode = "shared"

    def __init__(self, policy: Policy, context_tokens: int, script: Script | None = None):
        self.context_tokens = min(context_tokens, policy.context_tokens)
        self._policy = policy
        self._script = script or self._draw
        self._version = -1
        self._digest = ""
        ids = {i for letter in ALPHABET for i in policy.tokenizer.encode(letter)}
        self._alphabet = sorted((ids - policy.eos_token_ids) | {min(policy.eos_token_ids)})

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first `load_policy`."""
        return self._version

    def load_policy(self, policy: Policy, version: int) -> None:
        """Make later draws depend on `policy`'s present weights."""
        self._version, self._digest = version, policy.digest()

    def generate(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """Return one completion per request, in order."""
        if self._version < 0:
            raise SamplerError("expected a policy, none was loaded; call load_policy first")
        return serve(requests, params, self.context_tokens, self._sample, on_finished)

    def sleep(self) -> None:
        """Do nothing: there is nothing to free."""

    def wake(self) -> None:
        """Do nothing: there is nothing to undo."""

    def close(self) -> None:
        """Do nothing: there is no engine."""

    def _sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> Iterator[tuple[int, Completion]]:
        for place, request in enumerate(requests):
            yield place, self._complete(request, params)

    def _complete(self, request: SampleRequest, params: SamplingParams) -> Completion:
        ids = list(self._script(request, params))[: request.limit(params)]
        ends = [place for place, token in enumerate(ids) if token in self._policy.eos_token_ids]
        ids = ids[: ends[0] + 1] if ends else ids
        is_greedy = params.temperature == 0
        return Completion(
            completion_ids=tuple(ids),
            sampler_logprobs=None if is_greedy else (-math.log(len(self._alphabet)),) * len(ids),
            finish_reason="stop" if ends else "length",
            text=self._policy.decode(ids),
            logprobs_reason=GREEDY_REASON if is_greedy else None,
        )

    def _draw(self, request: SampleRequest, params: SamplingParams) -> list[int]:
        seed = 0 if params.temperature == 0 else request.seed
        source = random.Random(derive_seed(seed, self._digest, *request.prompt_ids))
        return source.choices(self._alphabet, k=params.max_tokens)
