"""The projector f: the hidden state at one position → the input embedding of the next.

    z₁ = f(h₀),  z_{k+1} = f(h_k)          (arXiv 2606.02871 and its released code)
    f  = Dropout → Linear(d→p) → GELU → Linear(p→d) → LayerNorm

Its weights and products are float32 whatever the dtype of the trunk, also after
`model.to(torch.bfloat16)`: in bfloat16 a LayerNorm gain of 1 cannot move at a learning rate of
1e-4.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class _Float32(nn.Module):
    """A module whose floating-point tensors never become narrower than float32."""

    def _apply(self, fn, recurse=True):
        def kept(tensor: Tensor) -> Tensor:
            moved = fn(tensor)  # to another device, another dtype, or both
            narrowed = tensor.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device, torch.float32) if narrowed else moved

        for child in self.children():
            child._apply(kept)
        return super()._apply(kept, recurse=False)


class LatentProjector(_Float32):
    """The projector of the paper.

    Options of the model config: `projector_size` is p (0 = the hidden size), `projector_dropout`,
    `projector_layer_norm`; `projector_residual` adds h before the norm; `projector_scale` is the
    size of z, "one" or "embedding_rms".
    """

    def __init__(self, config):
        super().__init__()
        hidden, width = config.hidden_size, config.projector_size or config.hidden_size
        self.dropout = nn.Dropout(config.projector_dropout)
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden) if config.projector_layer_norm else nn.Identity()
        self.residual = config.projector_residual
        self.register_buffer("scale", torch.ones(()))  # set once from the embeddings by `from_base`

    def forward(
        self, hidden: Float[Tensor, "rows hidden"], step: int
    ) -> Float[Tensor, "rows hidden"]:
        """f(h) in the dtype of `hidden`. This f is the same for every `step` (k, 0-based)."""
        x = hidden.to(self.up.weight.dtype)
        # verl trains under autocast, which would compute both products in bfloat16.
        with torch.autocast(hidden.device.type, enabled=False):
            y = self.down(nn.functional.gelu(self.up(self.dropout(x))))  # (rows, hidden)
        y = self.norm(x + y if self.residual else y)
        return (y * self.scale).to(hidden.dtype)


class ConstantThoughts(_Float32):
    """K learned vectors that ignore the hidden state: a control, as pause tokens are."""

    def __init__(self, config):
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(config.num_latent, config.hidden_size))
        nn.init.normal_(self.vectors, std=1.0)

    def forward(
        self, hidden: Float[Tensor, "rows hidden"], step: int
    ) -> Float[Tensor, "rows hidden"]:
        # `step` may also be a tensor with one k for each row. The result is a copy, because FSDP
        # frees the storage behind a view of its weights.
        return self.vectors[step].to(hidden.dtype).expand_as(hidden).clone()


PROJECTORS = {"mlp": LatentProjector, "constant": ConstantThoughts}
