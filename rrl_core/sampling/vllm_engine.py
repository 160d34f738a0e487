"""The vLLM sampler: one engine inside this process, on CPU or GPU. Only this file imports vLLM.

New weights reach the running engine merged into the base weights (CPU) or as a LoRA adapter of a
new name and id (GPU); either way the prefix cache, which holds old activations, is emptied.
Log-probs are asked for as `processed_logprobs`: after the temperature, before the draw.
"""

import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rrl_core.policy.model import DTYPES, Policy
from rrl_core.sampling.protocol import (
    Completion,
    OnFinished,
    SampleRequest,
    SamplerError,
    SamplingParams,
    SyncMode,
)
from rrl_core.sampling.serve import GREEDY_REASON, failed, serve
from rrl_core.sampling.settings import SamplerSettings
from rrl_core.seeds import derive_seed

TRUNCATED_REASON = "top_p or top_k: vLLM gives log-probs of the truncated distribution only"
_CPU_KV_CACHE_GIB = 1.0
_MIN_BATCHED_TOKENS = 2048
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # those vLLM accepts as a maximum


def set_vllm_environment() -> None:
    """Set what vLLM reads from the environment alone, before it is imported.

    Logging variables of the user are kept.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class VllmSampler:
    """Samples with a vLLM engine started for one base model; see `Sampler` for the contract."""

    engine = "vllm"
    sync: SyncMode

    def __init__(self, policy: Policy, settings: SamplerSettings):
        is_on_gpu = policy.device.type == "cuda"
        self.context_tokens = min(settings.context_tokens, policy.context_tokens)
        self.sync = _sync_mode(settings, is_on_gpu)
        self._policy = policy
        self._seed_mode = settings.seed_mode
        self._dtype = DTYPES[settings.dtype] if settings.dtype else policy.dtype
        self._can_sleep = is_on_gpu
        self._version = -1
        self._scratch = tempfile.TemporaryDirectory(prefix="rrl-vllm-")
        self._lora_request: Any = None
        try:
            self._llm: Any = self._start(settings, is_on_gpu)
        except Exception as error:
            self._scratch.cleanup()
            raise SamplerError(
                f"vLLM did not start with {settings}: {error}; set VLLM_LOGGING_LEVEL=INFO to see "
                "its log, or use the transformers sampler"
            ) from error

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first `load_policy`."""
        return self._version

    def load_policy(self, policy: Policy, version: int) -> None:
        """Copy `policy`'s present weights into the engine.

        Raises:
            SamplerError: the engine did not take them, or was started for another base model.
        """
        if policy.base_digest != self._policy.base_digest:
            raise SamplerError(
                f"expected a policy over base model {self._policy.base_digest[:12]}, got one over "
                f"{policy.base_digest[:12]}; make a new sampler for it"
            )
        self._version = -1  # until the new weights are in: half-loaded ones must not be used
        try:
            if self.sync == "merged":
                weights = policy.merged_weights(self._dtype)
                with _kept_random_state():
                    self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            else:
                self._lora_request = self._new_lora_request(policy, version)
            is_reset = self._llm.reset_prefix_cache()
        except Exception as error:
            raise SamplerError(f"vLLM did not load policy version {version}: {error}") from error
        if not is_reset:
            raise SamplerError(
                f"vLLM kept the prefix cache of older weights when it loaded version {version}; "
                "call load_policy while nothing is being generated"
            )
        self._version = version

    def generate(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """Return one completion per request, in order.

        Raises:
            SamplerError: no policy was loaded, or the engine failed.
        """
        if self._version < 0:
            raise SamplerError("expected a policy, none was loaded; call load_policy first")
        return serve(requests, params, self.context_tokens, self._sample, on_finished)

    def sleep(self) -> None:
        """Move the weights to host memory and drop the cache; on CPU, do nothing."""
        if self._can_sleep:
            self._llm.sleep(level=1)

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._can_sleep:
            self._llm.wake_up()

    def close(self) -> None:
        """Stop the engine and free its memory; a second call does nothing."""
        if self._llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        self._version = -1
        self._scratch.cleanup()
        cleanup_dist_env_and_memory()

    def _start(self, settings: SamplerSettings, is_on_gpu: bool) -> Any:
        set_vllm_environment()
        folder = self._policy.model_path
        if folder is None:
            folder = self._policy.save_base(Path(self._scratch.name) / "base")
        options = _engine_options(settings, self.context_tokens, is_on_gpu)
        if self.sync == "lora":
            rank = self._policy.lora.rank
            limit = next(size for size in _LORA_RANKS if size >= rank)
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": limit}
        with _kept_random_state(), _kept_set_num_threads(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM's own use of torch
            from vllm import LLM

            return LLM(model=str(folder), dtype=str(self._dtype).removeprefix("torch."), **options)

    def _new_lora_request(self, policy: Policy, version: int) -> Any:
        from vllm.lora.request import LoRARequest

        folder = policy.save_adapter(Path(self._scratch.name) / "adapter")
        number = self._lora_request.lora_int_id + 1 if self._lora_request else 1
        return LoRARequest(f"version-{version}-load-{number}", number, str(folder))

    def _sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> Iterator[tuple[int, Completion]]:
        from vllm import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=list(r.prompt_ids)) for r in requests]
        engine_params = [self._engine_params(request, params) for request in requests]
        engine = self._llm.llm_engine
        try:
            with _kept_random_state():
                # What the "batch" seed mode draws from.
                torch.manual_seed(derive_seed(0, *(request.seed for request in requests)))
                names = self._llm.enqueue(
                    prompts, engine_params, lora_request=self._lora_request, use_tqdm=False
                )
                # The engine adds to each name what makes it unique.
                places = {name.partition("-")[0]: place for place, name in enumerate(names)}
                while engine.has_unfinished_requests():
                    for answer in engine.step():
                        if answer.finished:
                            place = places.pop(answer.request_id)
                            yield place, self._completion(answer.outputs[0], params)
            if places:
                raise SamplerError(f"{len(places)} of them never ended")
        except Exception as error:
            raise SamplerError(f"vLLM failed on {len(requests)} requests: {error}") from error

    def _engine_params(self, request: SampleRequest, params: SamplingParams) -> Any:
        from vllm import SamplingParams as VllmSamplingParams

        is_drawn = params.temperature > 0
        return VllmSamplingParams(
            temperature=params.temperature,
            top_p=params.top_p if is_drawn else 1.0,
            top_k=params.top_k if is_drawn else 0,
            max_tokens=request.limit(params),
            seed=request.seed if self._seed_mode == "sample" and is_drawn else None,
            logprobs=0,  # of the sampled token alone
            stop_token_ids=sorted(self._policy.eos_token_ids),
            ignore_eos=True,  # only the ids above end a completion
            detokenize=False,
        )

    def _completion(self, output: Any, params: SamplingParams) -> Completion:
        if output.finish_reason not in ("stop", "length"):
            return failed(f"vLLM ended the request with {output.finish_reason!r}")
        ids = tuple(output.token_ids)
        logprobs, reason = engine_logprobs(ids, output.logprobs, params)
        return Completion(
            completion_ids=ids,
            sampler_logprobs=logprobs,
            finish_reason="stop" if ids[-1] in self._policy.eos_token_ids else "length",
            text=self._policy.decode(ids),
            logprobs_reason=reason,
        )


def engine_logprobs(
    ids: tuple[int, ...], given: Any, params: SamplingParams
) -> tuple[tuple[float, ...] | None, str | None]:
    """Return the log-probs of `ids` and no reason, or None and the reason.

    `given` is what vLLM returned: per token, a mapping from ids to objects with a `logprob`.
    """
    if params.temperature == 0:
        return None, GREEDY_REASON
    if params.top_p < 1 or params.top_k > 0:
        return None, TRUNCATED_REASON
    if given is None or len(given) != len(ids):
        return None, f"vLLM gave {None if given is None else len(given)} for {len(ids)} tokens"
    logprobs = tuple(float(step[token].logprob) for token, step in zip(ids, given, strict=True))
    if not np.isfinite(logprobs).all():
        return None, "vLLM gave a log-prob that is not finite"
    return logprobs, None


def _sync_mode(settings: SamplerSettings, is_on_gpu: bool) -> SyncMode:
    if settings.sync == "auto":
        return "lora" if is_on_gpu else "merged"
    return settings.sync


def _engine_options(
    settings: SamplerSettings, context_tokens: int, is_on_gpu: bool
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,  # ids in, ids out
        "generation_config": "vllm",  # the model's own sampling defaults stay out
        "logprobs_mode": "processed_logprobs",
        "max_model_len": context_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": (
            not is_on_gpu if settings.enforce_eager == "auto" else settings.enforce_eager
        ),
        "use_tqdm_on_load": False,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
    }
    kv_cache_gib = settings.kv_cache_gib
    if is_on_gpu:
        options["enable_sleep_mode"] = True
    else:
        kv_cache_gib = kv_cache_gib or _CPU_KV_CACHE_GIB
        # The smallest block the CPU kernels have: a group shares what whole blocks of its prompt
        # hold, and prompts are short (with the default of 128, half the tokens a second).
        options["block_size"] = 32
        # Seeded requests that are prefilled in pieces crash the engine on CPU.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(_MIN_BATCHED_TOKENS, context_tokens)
    if kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    return options


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Give the process back the random state it had: the engine seeds and draws from it."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  (it is vLLM that uses it)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


@contextmanager
def _kept_set_num_threads() -> Iterator[None]:
    """Give back `torch.set_num_threads`, which the CPU engine replaces by a warning."""
    original = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = original
