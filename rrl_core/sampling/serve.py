"""What every sampler does around its engine: refuse what cannot be served, keep the order."""

from collections.abc import Callable, Sequence

from rrl_core.sampling.protocol import Completion, SampleRequest, SamplingParams

GREEDY_REASON = "greedy: the tokens were not drawn from a distribution"

Sample = Callable[[Sequence[SampleRequest], SamplingParams], list[Completion]]


def serve(
    requests: Sequence[SampleRequest], params: SamplingParams, context_tokens: int, sample: Sample
) -> list[Completion]:
    """Return one completion per request, in order; those that don't fit become errors.

    `sample` gets the others, at least one, and answers in their order.

    Raises:
        ValueError: `params` are out of bounds.
    """
    _check(params)
    refusals = [_refusal(request, params, context_tokens) for request in requests]
    served = [r for r, refusal in zip(requests, refusals, strict=True) if refusal is None]
    completions = iter(sample(served, params) if served else [])
    return [next(completions) if refusal is None else failed(refusal) for refusal in refusals]


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
