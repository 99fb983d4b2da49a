"""A verl platform without accelerators, so that the real trainer runs on a laptop and in tests.

`alar.engines.verl.launch` chooses it if `Job.gpus` is 0, with `VERL_PLATFORM=cpu` and
`VERL_USE_EXTERNAL_MODULES=alar.engines.verl.cpu`. verl calls the functions of `torch.cuda` on its
platform's device module. Here they do nothing, or they answer for the main memory. Ray's logical
GPUs stand for processes.
"""

from __future__ import annotations

import types
from contextlib import contextmanager

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NOTHING = (  # functions of `torch.cuda` that have nothing to do on a CPU
    "empty_cache",
    "synchronize",
    "set_device",
    "reset_peak_memory_stats",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "set_per_process_memory_fraction",
    "set_rng_state",
)
ZERO = (  # functions of `torch.cuda` that return a count of bytes, or a device number
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
    "current_device",
)


def _device_module() -> types.ModuleType:
    module = types.ModuleType("alar_torch_cpu")
    memory = psutil.virtual_memory()
    for name in NOTHING:
        setattr(module, name, lambda *args, **kwargs: None)
    for name in ZERO:
        setattr(module, name, lambda *args, **kwargs: 0)
    # (free, total) bytes.
    module.mem_get_info = lambda *args, **kwargs: (memory.available, memory.total)
    module.get_device_properties = lambda *args, **kwargs: types.SimpleNamespace(
        name="cpu", total_memory=memory.total
    )
    module.get_device_name = lambda *args, **kwargs: "cpu"
    module.device_count = lambda: 1
    module.is_available = lambda: False  # no accelerator; the platform itself is available
    module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module.Stream, module.stream = torch.cpu.Stream, torch.cpu.stream
    module.current_stream = torch.cpu.current_stream
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None  # CUDA's (major, minor)

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"  # Ray sets it for its logical GPUs as well

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"  # Ray's logical resource, see `settings.hydra_values`

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False  # sharing device memory between processes

    def cudart(self):
        return None
