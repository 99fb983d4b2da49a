"""verl's worker, which holds actor, reference and the rollout's side of weight updates. Ours also
writes checkpoint folders."""

from __future__ import annotations

import os

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from alar.model import load, save


class LatentActorRolloutRefWorker(ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        if get_device_name() == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            # We do this before verl does. verl would name the backend twice, once for each device.
            if not torch.distributed.is_initialized():
                size = int(os.environ["WORLD_SIZE"])
                meeting = {"init_method": os.environ.get("DIST_INIT_METHOD")}
                if size == 1:
                    # A single process meets nobody and needs no port, which might be taken.
                    meeting = {"store": torch.distributed.HashStore()}
                torch.distributed.init_process_group(
                    "cpu:gloo", rank=int(os.environ["RANK"]), world_size=size, **meeting
                )
        return super().init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_checkpoint(self, folder: str) -> None:
        """Write the current policy as one checkpoint folder, adapters merged.

        The weights come by the same route as the rollout's. All ranks take part in gathering them.
        The first rank writes, in the dtype of the checkpoint that the job started from.
        """
        weights, _ = self.actor.engine.get_per_tensor_param(base_sync_done=True)
        first = torch.distributed.get_rank() == 0
        gathered = {}  # name → whole tensor, on the first rank only
        for name, tensor in weights:  # iterating gathers each over the ranks
            if first:
                gathered[name] = tensor.detach().cpu().clone()
        if first:
            # Its usual device may be a GPU that actor and vLLM fill.
            model, tokenizer = load(self.config.model.path, device="cpu")
            load_whole(model, gathered)
            save(model, tokenizer, folder)
        torch.distributed.barrier()  # no rank goes on before the folder is written


def load_whole(model, weights: dict[str, torch.Tensor]) -> None:
    """Replace all weights of a model and keep its dtypes.

    Raises RuntimeError if a tensor is missing or unknown.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    # Not strict, because weights without the tied ones are whole.
    result = model.load_state_dict(weights, strict=False)
    missing = [name for name in result.missing_keys if name not in tied]
    if missing or result.unexpected_keys:
        raise RuntimeError(
            f"the trainer's weights do not fit the rollout's model: missing {missing[:3]}, unknown"
            f" {result.unexpected_keys[:3]}"
        )
