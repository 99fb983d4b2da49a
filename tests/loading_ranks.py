"""What tests/test_distributed.py starts with torchrun: tests/loading_ranks.py FOLDER

FOLDER/model and FOLDER/small are latent checkpoints. All processes load the first as
`alar.study.train_stage` does, shard it, and bring it back to the first process. Rank r writes
FOLDER/loading-r.json: by how many bytes the process grew at most, while it loaded and while it
collected. The small one goes the same way before that, so that libraries and their tables are there
already.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from alar.model import load
from alar.model.outline import outline
from alar.train.distributed import collect, leave, sharded_copy
from alar.train.supervised import mark_trainable


def resident(field: str) -> int:
    """Bytes of this process in memory: now ("VmRSS") or at most so far ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    raise ValueError(f"/proc/self/status has no {field}")


def peak_from_now() -> int:
    """Make the kernel forget the peak so far; returns what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def loaded(folder: Path):
    """The sharded model and the outline that it came from."""
    whole, _, weights = outline(folder)
    wrapped = mark_trainable(whole.train(), "lora", lora_rank=4, lora_alpha=8)
    sharded = sharded_copy(wrapped, "cpu", weights=weights)
    dist.barrier()
    return sharded, wrapped


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))  # the connections are made now
    rank = dist.get_rank()
    collect(*loaded(folder / "small"))
    begin = peak_from_now()
    sharded, wrapped = loaded(folder / "model")
    found = {"loading": resident("VmHWM") - begin}
    held = peak_from_now()
    collect(sharded, wrapped)
    found["collecting"] = resident("VmHWM") - held
    if rank == 0:
        stored = dict(load(folder / "model", device="cpu")[0].named_parameters())
        plain = wrapped.merge_and_unload()  # its adapters add nothing yet
        found["equal"] = all(torch.equal(p, stored[n]) for n, p in plain.named_parameters())
    (folder / f"loading-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
