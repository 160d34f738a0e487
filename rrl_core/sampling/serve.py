"""What every sampler does around its engine: refuse what cannot be served, keep the order."""

from collections.abc import Callable, Iterable, Sequence

from rrl_core.sampling.protocol import Completion, OnFinished, SampleRequest, SamplingParams

GREEDY_REASON = "greedy: the tokens were not drawn from a distribution"

Sample = Callable[
    [Sequence[SampleRequest], SamplingParams], Iterable[tuple[int, Completion]]
]  # yields each completion with the place of its request, as they finish


def serve(
    requests: Sequence[SampleRequest],
    params: SamplingParams,
    context_tokens: int,
    sample: Sample,
    on_finished: OnFinished | None,
) -> list[Completion]:
    """Return one completion per request, in order; those that don't fit become errors.

    `sample` gets the others, at least one. `on_finished` is told of each as it comes.

    Raises:
        ValueError: `params` are out of bounds.
    """
    _check(params)
    refusals = [_refusal(request, params, context_tokens) for request in requests]
    completions = {
        place: failed(refusal) for place, refusal in enumerate(refusals) if refusal is not None
    }
    tell = on_finished or (lambda place, completion: None)
    for place, completion in completions.items():
        tell(place, completion)
    places = [place for place, refusal in enumerate(refusals) if refusal is None]
    if places:
        for number, completion in sample([requests[place] for place in places], params):
            completions[places[number]] = completion
            tell(places[number], completion)
    return [completions[place] for place in range(len(requests))]


def failed(reason: str) -> Completion:
    """Return the completion of a request that could not be served."""
    return Completion((), None, "error", "", logprobs_reason=reason, error=reason)


def _refusal(request: SampleRequest, params: SamplingParams, context_tokens: int) -> str | None:
    num_prompt_tokens = len(request.prompt_ids)
    if num_prompt_tokens == 0:
        return "expected a prompt of at least one token, got an empty one"
    max_tokens = request.limit(params)
    if num_prompt_tokens + max_tokens > context_tokens:
        return (
            f"expected prompt + max_tokens <= {context_tokens} (the context), got "
            f"{num_prompt_tokens} + {max_tokens}; shorten the prompt or lower max_tokens"
        )
    return None


def _check(params: SamplingParams) -> None:
    # Between 0 and 0.01 vLLM would silently sample at 0.01.
    if not (params.temperature == 0 or params.temperature >= 0.01) or not 0 < params.top_p <= 1:
        raise ValueError(f"expected temperature 0 or >= 0.01 and 0 < top_p <= 1, got {params}")
    if params.top_k < 0 or params.max_tokens < 1:
        raise ValueError(f"expected top_k >= 0 and max_tokens >= 1, got {params}")
