"""The worker extension of vLLM under verl: verl's weight updates and our records. Not yet run on a
GPU."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from alar.engines.vllm.worker import LatentWorker


class LatentColocateWorker(LatentWorker, vLLMColocateWorkerExtension):
    pass
