"""The fused kernel's way through packed attention gives what the reference gives, row by row.

On CUDA the kernel is compiled by Triton. Here flex attention is traced and differentiated as there
and then run on the CPU, in plain PyTorch; the tests marked `gpu` run the compiled one.
"""

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alar.model import latent, packed_attention
from alar.model.packed_attention import PackedCall, PackedPass, block_mask, fused_kernel
from alar.model.packing import pack, sequence_ids
from tests.test_latent_states import batch_of, gradients_of, inputs_of, make, same_gradients

# (length, starts of blocks): rows that share, fill and exceed blocks of 128 keys.
LONG = [(300, (5, 140, 260)), (129, (9,)), (40, ()), (261, (1, 20)), (2, ()), (128, (127 - 4,))]
ALONE = [(300, ()), (129, ()), (40, ())]  # one call, whose keys are its own


def fuse(monkeypatch, kernel) -> None:
    """Let text attend through this kernel on any device."""
    monkeypatch.setattr(latent, "takes_fused_kernel", lambda hidden: True)
    monkeypatch.setattr(packed_attention, "fused_kernel", lambda: kernel)
    # PyTorch refuses gradients on the CPU, because what inductor compiles for it has none.
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


def results(model, inputs, real, **options):
    """(hidden states of the real tokens, z, gradients of a loss on both)."""
    states = model.latent_states(**inputs, **options)
    hidden, z = states.hidden[real], states.latents
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5)).to(hidden)
    ((hidden * weights).sum() + z.square().sum()).backward()
    return hidden.detach(), z.detach(), gradients_of(model)


def close(one, other, tolerance: float) -> None:
    """To the tolerance, of the largest element if that exceeds 1; both may be empty."""
    largest = max([1.0, *other.abs().flatten().tolist()])
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance * largest)


def same_results(ours, theirs, tolerance: float) -> None:
    for one, other in zip(ours[:2], theirs[:2]):
        close(one, other, tolerance)
    same_gradients(ours[2], theirs[2], tolerance)


@pytest.mark.parametrize(
    ("mode", "family", "layout", "num_latent", "checkpointing", "lora"),
    [
        ("published", "qwen2", "packed", 4, True, False),
        ("full", "qwen3", "left", 4, False, True),
        ("projector_only", "llama", "right", 8, True, True),
        ("full", "qwen2", "long", 4, True, False),
        ("published", "qwen3", "long", 1, False, False),
        ("published", "qwen2", "alone", 4, False, False),
        ("published", "qwen3", "alone", 4, True, False),
    ],
)
def test_the_fused_path_gives_the_states_z_and_gradients_of_the_reference(
    random_model, monkeypatch, mode, family, layout, num_latent, checkpointing, lora
):
    model = make(random_model, family, num_latent, lora, checkpointing)
    if layout in ("long", "alone"):
        ids, mask, _ = batch_of(model, LONG if layout == "long" else ALONE, "right")
        inputs, real = {"input_ids": ids, "attention_mask": mask}, mask.bool()
    else:
        inputs, real, _ = inputs_of(model, layout)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model.to(dtype)
        reference = results(model, inputs, real, latent_gradient=mode)
        with monkeypatch.context() as patch:
            fuse(patch, fused_kernel("aot_eager"))
            fused = results(model, inputs, real, latent_gradient=mode)
        same_results(fused, reference, tolerance)


def test_a_filler_row_and_given_latents_go_the_fused_way_too(random_model, monkeypatch):
    model = make(random_model, checkpointing=True)
    ids, mask, _ = batch_of(model, LONG, "left")
    inputs, real = {"input_ids": ids, "attention_mask": mask}, mask.bool()
    hidden, z, gradients = results(model, inputs, real)
    fuse(monkeypatch, fused_kernel("aot_eager"))
    close(model.latent_states(**inputs, latents=z).hidden[real], hidden, 1e-5)
    # As if another rank's schedule had a block and a text more.
    monkeypatch.setattr(model, "_most_calls", lambda calls: calls + 5)
    same_results(results(model, inputs, real), (hidden, z, gradients), 1e-5)


def packing_of(layouts, num_latent=4):
    width = max(length for length, _ in layouts)
    ids = torch.zeros(len(layouts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, (length, starts) in enumerate(layouts):
        mask[number, :length] = 1
        for start in starts:
            ids[number, start : start + num_latent] = 9
    return pack(ids, sequence_ids(ids, mask), 9, num_latent)


@pytest.mark.parametrize("layouts", [LONG, ALONE, [(513, (256,)), (1024, (3, 900))], [(5, (2,))]])
def test_the_blocks_of_the_mask_are_those_that_pytorch_finds_token_by_token(layouts):
    packing = packing_of(layouts, num_latent=2)
    for call in packing.calls:
        if call.is_latent:
            continue
        mask = block_mask(packing, call, torch.device("cpu"))
        theirs = flex.create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, "cpu")
        for kind in ("kv", "full_kv", "q", "full_q"):
            counts, lists = (getattr(mask, f"{kind}_{x}")[0, 0] for x in ("num_blocks", "indices"))
            wanted, ordered = (
                getattr(theirs, f"{kind}_{x}")[0, 0] for x in ("num_blocks", "indices")
            )
            assert counts[: len(wanted)].tolist() == wanted.tolist()
            assert not counts[len(wanted) :].any(), "blocks behind the end are empty"
            for ours, count, other in zip(lists, wanted, ordered):
                assert ours[:count].tolist() == other[:count].tolist()


def test_a_query_sees_its_own_row_up_to_itself_and_nothing_else():
    packing = packing_of([(300, (140,)), (200, (20,))], num_latent=2)
    call = packing.calls[-1]  # the text behind both blocks
    assert call.starts == (142, 22) and not call.is_latent
    sees = block_mask(packing, call, torch.device("cpu")).mask_mod
    queries, keys = torch.arange(call.tokens)[:, None], torch.arange(600)[None]
    found = sees(0, 0, queries, keys)  # (queries, keys): row 1 starts at key 300
    expected = [(0, position) for position in range(142, 300)]
    expected += [(300, 300 + position) for position in range(22, 200)]
    for seen, (first, last) in zip(found, expected, strict=True):
        assert seen.nonzero()[:, 0].tolist() == list(range(first, last + 1))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns, and the kernel's calls."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.elements, self.kernels = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if "flex_attention" in str(function):
            self.kernels.append(str(function))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().size() // 4)
        return found


def largest_tensor(layouts, heads=28, kv=4, width=128) -> tuple[int, list[str]]:
    """Elements of the largest tensor that a layer's attention writes in forward and backward, at
    the shapes of a 7B model, and the kernels that it runs."""
    packing, module = packing_of(layouts), SimpleNamespace(layer_idx=0)
    shared, outputs, leaves = PackedPass(packing, True, checkpointed=True), [], []
    with Largest() as seen:
        calls = [PackedCall(shared, call, torch.device("cpu")) for call in packing.calls]
        # Tensors with shapes and without memory.
        with FakeTensorMode(allow_non_fake_inputs=True):
            for packed in calls:
                tokens = packed.call.tokens
                query, key, value = (
                    torch.empty(1, count, tokens, width, requires_grad=True)
                    for count in (heads, kv, kv)
                )
                output, _ = packed_attention.packed_attention(
                    module, query, key, value, None, width**-0.5, packed=packed
                )
                outputs.append(output)
                leaves += [query, key, value]
            gradients = torch.autograd.grad([o.sum() for o in outputs], leaves)
            assert all(isinstance(gradient, FakeTensor) for gradient in gradients)
    return seen.elements, seen.kernels


@pytest.mark.parametrize("starts", [(), (3000,)])
def test_memory_of_the_fused_path_is_that_of_the_queries_and_keys(monkeypatch, starts):
    fuse(monkeypatch, flex.flex_attention)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # straight to the op
    tokens = 8192
    elements, kernels = largest_tensor([(tokens, starts), (tokens // 2, starts)])
    assert "flex_attention" in kernels and "flex_attention_backward" in kernels
    queries = 28 * 128 * (tokens + tokens // 2)
    assert elements <= queries, "scores of one head alone would be 12288²"
    assert queries < (tokens + tokens // 2) ** 2


def test_other_lengths_do_not_compile_the_kernel_again(random_model, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flex.flex_attention, dynamic=True, fullgraph=True, backend=counter)
    fuse(monkeypatch, compiled)
    model = make(random_model)
    counts = []
    for number in range(8):
        layouts = [(30 + 71 * number + 7 * row, (3, 17)[: row + 1]) for row in range(3)]
        ids, mask, _ = batch_of(model, layouts, "right", seed=number)
        model.latent_states(ids, mask).hidden.sum().backward()
        counts.append(counter.frame_count)
    assert counts[-1] == counts[3] <= 4


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
def test_a_compiled_kernel_that_reads_the_blocks_gives_the_reference(random_model, monkeypatch):
    model = make(random_model)
    cases = [(LONG, "right"), (ALONE, "right"), ([(700, (300,)), (500, (2,))], "left")]
    for layouts, side in cases:
        ids, mask, _ = batch_of(model, layouts, side)
        with torch.no_grad(), monkeypatch.context() as patch:
            reference = model.latent_states(ids, mask)
            fuse(patch, fused_kernel())
            fused = model.latent_states(ids, mask)
        close(fused.hidden, reference.hidden, 1e-5)
        close(fused.latents, reference.latents, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_on_a_gpu_the_compiled_kernel_gives_the_reference(
    random_model, monkeypatch, dtype, tolerance, checkpointing
):
    model = make(random_model, checkpointing=checkpointing).to("cuda", dtype)
    for layouts in (LONG, ALONE):
        ids, mask, _ = batch_of(model, layouts, "right")
        inputs = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
        fused = results(model, inputs, mask.bool().cuda())
        with monkeypatch.context() as patch:
            patch.setattr(latent, "takes_fused_kernel", lambda hidden: False)
            reference = results(model, inputs, mask.bool().cuda())
        same_results(fused, reference, tolerance)


@pytest.mark.gpu
def test_on_a_gpu_float64_goes_the_exact_way(random_model):
    model = make(random_model).to("cuda", torch.float64)
    ids, mask, _ = batch_of(model, LONG, "right")
    hidden = model.latent_states(ids.cuda(), mask.cuda()).hidden.cpu()
    close(hidden, model.cpu().latent_states(ids, mask).hidden, 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_a_long_row_needs_no_memory_for_scores(random_model, dtype):
    model = make(random_model, checkpointing=True).to("cuda", dtype)
    peaks = {}
    model.config.max_position_embeddings = 16384
    for length in (4096, 8192, 8192, 16384):  # the first ones also compile
        ids, _, _ = batch_of(model, [(length, (7,))], "right")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.latent_states(ids.cuda()).hidden.sum().backward()
        peaks[length] = torch.cuda.max_memory_allocated() - before
    assert peaks[16384] < 2.5 * peaks[8192]
