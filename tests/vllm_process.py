"""Runs vLLM for the tests, in a process of its own: vLLM binds threads and keeps an engine's state for the process' life.

    python vllm_process.py ADDRESS       a Unix socket; answers pickled (method, args, kwargs) with (ok, result)

The methods are those of `Bench`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class Bench:
    """One engine at a time, what is done to it, and what is counted."""

    def __init__(self):
        self.engine, self.preempted = None, []

    def start(self, folder, **arguments):
        from alar.rollout.vllm import VLLMEngine

        self.stop()
        settings = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "block_size": 32}
        self.engine = VLLMEngine(folder, **{**settings, **arguments})
        self.preempted = []

    def start_plain(self, folder, **arguments):
        """vLLM itself on a checkpoint, with no part of ours but the plugin; must be refused for a latent one."""
        from vllm import LLM

        from alar.rollout.vllm.plugin import register

        self.stop()
        register(imported=True)
        LLM(folder, enforce_eager=True, dtype="float32", max_model_len=256, skip_tokenizer_init=True, **arguments)

    def stop(self):
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    @property
    def scheduler(self):
        return self.engine.llm.llm_engine.engine_core.engine_core.scheduler

    def generate(self, requests, sampling):
        return self.engine.generate(requests, sampling)

    def raw(self, prompts, params: list[dict]):
        """[(ids, finish reason, stop reason, log-prob of each id)] of vLLM's own generate."""
        from vllm import SamplingParams

        sampling = [SamplingParams(**{"detokenize": False, "logprobs": 0, **each}) for each in params]
        answers = self.engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        rows = []
        for answer in answers:
            best = answer.outputs[0]
            picked = [step[token].logprob for step, token in zip(best.logprobs, best.token_ids)]
            rows.append((list(best.token_ids), best.finish_reason, best.stop_reason, picked))
        return rows

    def busy(self):
        return self.engine.busy

    def call(self, name, *args, **kwargs):
        return getattr(self.engine, name)(*args, **kwargs)

    def cached_tokens(self, ids):
        """Tokens of a context that the prefix cache supplies."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, detokenize=False)
        return self.engine.llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0].num_cached_tokens

    def preempt_inside_blocks(self, every: int):
        """From now on, preempt each request once when it stands at its `every`-th latent position."""
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

    def count_preemptions(self):
        scheduler = self.scheduler
        preempt = scheduler._preempt_request

        def counted(request, *args, **kwargs):
            self.preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        scheduler._preempt_request = counted

    def preemptions(self):
        return len(self.preempted)

    def break_the_scheduler(self):
        """Prefill over known latent positions, as a scheduler without our part would."""
        self.scheduler._reserve_prefill_lookahead = lambda request, computed, new: new

    def break_the_rows(self):
        """Lose the position of every kept hidden state."""
        model = self.engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.get_model()
        remember = model._remember

        def forgetful(*args):
            remember(*args)
            model.rows.position.fill_(-7)

        model._remember = forgetful

    def overhead(self, base, folder, batch, tokens, extra, pairs):
        """Processor time of this engine over plain vLLM's on the same trunk, for interleaved pairs of greedy runs."""
        from vllm import LLM, SamplingParams

        settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": batch, "block_size": 32}
        settings |= {"enable_prefix_caching": False, "enforce_eager": True, "skip_tokenizer_init": True}
        self.stop()
        plain = LLM(str(base), **settings)
        self.start(folder, **settings)
        prompts = [{"prompt_token_ids": list(range(300 + row, 340 + row))} for row in range(batch)]

        def seconds(llm, extra_args):
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra_args)
            began = time.process_time()
            llm.generate(prompts, params, use_tqdm=False)
            return time.process_time() - began

        runs = [lambda: seconds(plain, None), lambda: seconds(self.engine.llm, extra)]
        for run in runs:
            run()
        ratios = []
        for pair in range(pairs):
            first = pair % 2  # each goes first in half of the pairs
            taken = {index: runs[index]() for index in (first, 1 - first)}
            ratios.append(taken[1] / taken[0])
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
