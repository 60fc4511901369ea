"""Layers and pooling operators that several matchers share."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, batch_norm

from visavis.core.encoded import to_float64
from visavis.core.errors import ShapeError

# Value of masked positions in ``GeneralizedPooling``, as in the released code.
MASKED_VALUE = -1e4
# Lower bound of a norm, or a product of norms, in a denominator.
EPSILON = 1e-8


def build_mlp(
    input_dim: int,
    output_dim: int,
    *,
    hidden_layers: int,
    hidden_dim: int,
    dropout: float,
    input_dropout: float,
) -> nn.Sequential:
    """Build a multilayer perceptron with ReLU and a linear output."""
    layers: list[nn.Module] = [nn.Dropout(input_dropout)] if input_dropout else []
    for _ in range(hidden_layers):
        layers += [nn.Linear(input_dim, hidden_dim), nn.ReLU(), nn.Dropout(dropout)]
        input_dim = hidden_dim
    return nn.Sequential(*layers, nn.Linear(input_dim, output_dim))


class Whitening(nn.Module):
    """Affine map after which features have mean 0 and nearly the identity as covariance (ZCA).

    Formula: $W (x - mean)$ with $W = C^(-1/2)$, C the covariance plus ``shrinkage`` times its
    mean eigenvalue. The map has no parameters to learn. It is saved with the weights, and is the
    identity until ``fit``.

    Args:
        input_dim: Dimensions of the features.
        shrinkage: Part of the mean eigenvalue that is added, so that directions with little
            variance are not amplified.

    Source:
        A. Kessy, A. Lewin, K. Strimmer, "Optimal Whitening and Decorrelation" (2018).
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, input_dim: int, shrinkage: float = 0.05):
        super().__init__()
        self.shrinkage = shrinkage
        self.register_buffer("mean", torch.zeros(input_dim))
        self.register_buffer("matrix", torch.eye(input_dim))

    @torch.no_grad()
    def fit(self, features: Tensor) -> None:
        """Compute the map from features ``[N, D]``."""
        values = to_float64(features)
        mean = values.mean(0)
        # In float64: small eigenvalues would be noise in float32.
        eigenvalues, vectors = torch.linalg.eigh((values - mean).T @ (values - mean) / len(values))
        scales = (
            (eigenvalues.clamp(min=0) + self.shrinkage * eigenvalues.mean())
            .clamp(min=torch.finfo(torch.float32).tiny)
            .rsqrt()
        )
        self.mean.copy_(mean)
        self.matrix.copy_((vectors * scales) @ vectors.T)

    def forward(self, features: Tensor) -> Tensor:
        """Whiten features ``[..., D]``, in float32."""
        # In half precision, the subtraction of the mean would lose most digits.
        with torch.autocast(features.device.type, enabled=False):
            return (features.float() - self.mean) @ self.matrix


def xavier_linear(
    input_dim: int, output_dim: int, layer_type: type[nn.Linear] = nn.Linear
) -> nn.Linear:
    """Build a linear layer with the initialization of the VSE family: uniform within Glorot's
    bound, bias 0.
    """
    layer = layer_type(input_dim, output_dim)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def is_traced() -> bool:
    """Report whether an export traces the model, for which some layers compute in another way."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half precision to float32, because half precision changes ranks."""
    return values if values.dtype.itemsize >= 4 else values.float()


class ResidualMLP(nn.Module):
    """``Linear(x) + MLP(x)`` on every region or word. The MLP has one hidden layer of half the
    dimensions, batch norm and ReLU.

    Args:
        input_dim: Dimensions of the input.
        output_dim: Dimensions of the output.
        dropout: Dropout after the hidden layer.

    Source:
        Chen et al. (2021), section 4, for features of frozen encoders.
    """

    def __init__(self, input_dim: int, output_dim: int, dropout: float):
        super().__init__()
        self.linear = xavier_linear(input_dim, output_dim)
        # At least one unit, also for one output dimension.
        hidden = max(1, output_dim // 2)
        self.mlp = nn.Sequential(
            nn.Linear(input_dim, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, output_dim),
        )

    def forward(self, items: Tensor) -> Tensor:
        """Map every vector of ``[N, L, input_dim]`` to ``output_dim`` dimensions."""
        # Batch norm of one dimension reads rows [N L, D].
        flat = items.flatten(0, 1)
        return (self.linear(flat) + self.mlp(flat)).unflatten(0, items.shape[:2])


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm over valid vectors.

    In training, mean and variance are those of the valid vectors. With fewer than two valid
    vectors, the running statistics are used.
    """

    def forward(self, items: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize the valid vectors of ``[..., D]``. Mask ``[...]``, None: all are valid."""
        rows = items.flatten(0, -2) if mask is None else items[mask]
        # The variance of a single row is 0.
        if not self.training or len(rows) < 2:
            normed = batch_norm(
                items.flatten(0, -2),
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                eps=self.eps,
            )
            return normed.view_as(items)
        normed = super().forward(rows)
        if mask is None:
            return normed.view_as(items)
        # Padding is 0.
        return torch.zeros_like(items, dtype=normed.dtype).masked_scatter(mask[..., None], normed)


def max_pool(items: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the maximum over the valid positions, ``[N, L, D]`` to ``[N, D]``. No mask: all."""
    return (
        items.max(1).values
        if mask is None
        else items.masked_fill(~mask[..., None], float("-inf")).max(1).values
    )


def mean_pool(items: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the mean over the valid positions, ``[N, L, D]`` to ``[N, D]``. No mask: all."""
    if mask is None:
        return items.mean(1)
    # Padding must be finite, because it is multiplied by 0.
    weight = mask[..., None].to(items.dtype)
    return (items * weight).sum(1) / weight.sum(1)


def pool_grid(regions: Tensor, size: int) -> Tensor:
    """Average regions ``[N, R, D]``, a square grid row by row, to ``[N, size * size, D]``."""
    side = math.isqrt(regions.shape[1])
    if side * side != regions.shape[1] or side < size:
        raise ShapeError(
            f"regions: expected a square grid of at least {size} x {size} regions, got "
            f"{regions.shape[1]} regions. Set model.region_grid=0."
        )
    # [N, D, side, side], as the pooling reads it.
    grid = regions.transpose(1, 2).unflatten(2, (side, side))
    return adaptive_avg_pool2d(grid, size).flatten(2).transpose(1, 2)


class GeneralizedPooling(nn.Module):
    """Generalized pooling operator: a learned mixture of the sorted values of each dimension.

    Args:
        position_dim: Dimensions of the sinusoidal positions.
        hidden_dim: Dimensions of the GRU.
        temperature: Temperature of the softmax.

    Formula:
        $v_d = sum_k w_k sort(x_d)_k$ with $w = softmax(f(1, ..., L) / temperature)$, where $x_d$ are
        the $L$ valid values of dimension d, in descending order. $f$ is a bidirectional GRU over sinusoidal positions, with averaged
        directions, and a linear layer. $w$ depends on $L$ alone.

    Special cases:
        $w = (1, 0, ...)$ is max pooling, $w_k = 1 / L$ is mean pooling.

    Source:
        Chen et al., Learning the Best Pooling Strategy for Visual Semantic Embedding (2021),
        section 3.
    """

    def __init__(self, position_dim: int = 32, hidden_dim: int = 32, temperature: float = 0.1):
        super().__init__()
        self.position_dim = position_dim
        self.temperature = temperature
        self.gru = nn.GRU(position_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(hidden_dim, 1, bias=False)
        self.weight_table: Tensor | None
        self.register_buffer("weight_table", None, persistent=False)

    def tabulate_weights(self, max_length: int) -> None:
        """Compute the weights of all sizes once. An exported graph reads them, because it cannot
        hold packed sequences.
        """
        with torch.no_grad():
            self.weight_table = self.weights(torch.arange(1, max_length + 1), max_length)

    def forward(self, items: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool the valid positions, ``[N, L, D]`` to ``[N, D]``. Mask ``[N, L]``, None: all."""
        # [N, D, L]: each dimension is sorted on its own, in adjacent memory.
        by_dimension = items.transpose(1, 2).contiguous()
        if self.weight_table is not None and is_traced():
            if mask is None:
                weights = self.weight_table[items.shape[1] - 1, : items.shape[1]]
                return torch.einsum("ndl,l->nd", by_dimension.sort(-1).values, weights.flip(-1))
            # The mask is an input of the graph, so that its length is not fixed by a trace.
            weights = self.weight_table[mask.sum(1) - 1, : mask.shape[1]]
            by_dimension = by_dimension.masked_fill(~mask[:, None, :], MASKED_VALUE)
            return torch.einsum("ndl,nl->nd", by_dimension.sort(-1).values, weights.flip(-1))
        if mask is None:
            lengths = torch.tensor([items.shape[1]], device=items.device)
            length_index = torch.zeros(len(items), dtype=torch.long, device=items.device)
        else:
            # Weights depend on the length alone, so that each length is computed once.
            lengths, length_index = mask.sum(1).unique(return_inverse=True)
            by_dimension = by_dimension.masked_fill(~mask[:, None, :], MASKED_VALUE)
        weights = self.weights(lengths, items.shape[1])[length_index].to(items.dtype)
        # The first weight belongs to the largest value, and masked values are the smallest.
        return torch.einsum("ndl,nl->nd", sort_ascending(by_dimension), weights.flip(-1))

    def contributions(self, items: Tensor) -> Tensor:
        """Compute the contribution of each position, ``[N, L, D]``, for items without padding. The
        sum over L is the pooled vector.
        """
        # The inverse permutation: the rank of each position in its dimension.
        ranks = items.argsort(dim=1, descending=True, stable=True).argsort(1)
        lengths = torch.full((len(items),), items.shape[1], device=items.device)
        weights = self.weights(lengths, items.shape[1]).to(items.dtype)
        return weights[..., None].expand_as(items).gather(1, ranks) * items

    def weights(self, lengths: Tensor, max_length: int) -> Tensor:
        """Compute the weights ``[K, max_length]`` of sets of K sizes, 0 beyond the size."""
        positions = sinusoidal_positions(max_length, self.position_dim, lengths.device).to(
            self.linear.weight.dtype
        )
        # The backward direction must start at the end of each set, not at the padding.
        packed = nn.utils.rnn.pack_padded_sequence(
            positions.expand(len(lengths), -1, -1),
            lengths.cpu(),
            batch_first=True,
            enforce_sorted=False,
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(
            self.gru(packed)[0], batch_first=True, total_length=max_length
        )
        # Shape [K, max_length, hidden_dim] for each direction.
        forward, backward = hidden.chunk(2, -1)
        logits = self.linear((forward + backward) / 2).squeeze(-1)
        valid = torch.arange(max_length, device=lengths.device) < lengths[:, None]
        # A softmax at temperature 0.1 needs float32.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (logits / self.temperature).masked_fill(~valid, float("-inf")).softmax(-1)


def sort_ascending(values: Tensor) -> Tensor:
    """Sort values ``[..., L]`` along the last axis."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    # On a CPU, numpy sorts short rows many times faster than torch.
    detached = at_least_float32(values.detach())
    if not values.requires_grad:
        return torch.from_numpy(np.sort(detached.numpy(), -1)).to(values.dtype)
    return values.gather(-1, torch.from_numpy(np.argsort(detached.numpy(), -1)))


def sinusoidal_positions(length: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Compute sinusoidal positions ``[length, dim]``: sine in even, cosine in odd dimensions."""
    position = torch.arange(length, device=device, dtype=torch.float32)[:, None]
    # 10000^(-2 i / dim), as in the Transformer.
    rate = torch.exp(
        torch.arange(0, dim, 2, device=device, dtype=torch.float32) * (-math.log(10000.0) / dim)
    )
    table = torch.zeros(length, dim, device=device)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)
    return table
