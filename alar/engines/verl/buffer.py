"""verl's replay buffer for synchronous steps: batches in a fixed order, and failures that end the
job.

verl goes on training with the groups that succeeded. Here a failed rollout (a retrieval server that
is down, a lost process) ends the job with its reason, because a group that is silently smaller has
another advantage.
"""

from __future__ import annotations

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class LatentReplayBuffer(ReplayBuffer):
    """`watched` are the actors that write rollouts. If one dies, waiting for them is an error."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.poll_interval = 0.2  # seconds
        self.watched: list = []

    def _sync_metadata_from_transfer_queue(self):
        super()._sync_metadata_from_transfer_queue()
        for partition, failed in self.failure_keys.items():
            if failed:
                tags = tq.kv_list(partition)[partition]
                reason = tags[next(iter(failed))].get(
                    "error", "see the log of the agent loop worker"
                )
                raise RuntimeError(f"{len(failed)} groups of rollouts failed: {reason}")
        if any(self.pending_keys.values()) or any(self.running_keys.values()):
            # Raises RayActorError if one has died, which would otherwise be waited for without end.
            ray.get([worker.alive.remote() for worker in self.watched])

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        ordered = dict(sorted(partition_snapshot.items(), key=_place))
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)


def _place(item: tuple[str, dict]) -> tuple[str, int]:
    # Sessions compare as numbers: as text, 10 would stand before 2.
    uid, session, _ = item[0].split("_")
    return uid, int(session)
