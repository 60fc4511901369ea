"""Compressed vectors of items with several vectors each.

An item is the mean of its vectors with a byte per dimension, and the difference of each vector from
this rounded mean in a few bits per dimension. Differences are rotated to their principal axes, and axes with a larger variance
have more bits, so that the squared error is smallest. Queries are rotated as well, which keeps all
products. Before, similar vectors of an item can be averaged (token pooling).

Source:
    Clavie et al., Reducing the Footprint of Multi-Vector Retrieval with Minimal Performance Impact via Token Pooling (2024), for
    pooling. Santhanam et al., ColBERTv2 (2022), for residuals in few bits. Max, Quantizing for
    Minimum Distortion (1960), for steps and errors. Differs from ColBERTv2: a residual is that from
    the mean of the item, and not from a centroid of all items.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.core.memory_budget import chunk_slices
from visavis.core.ragged import offsets_from_counts
from visavis.retrieval.stores.base import MaxSimQuery, SetEncoding, VectorSets

WIDTHS = (0, 1, 2, 4, 8)
"""Bits of a dimension. Several dimensions fill a byte."""
# Of a normal variable with standard deviation 1, for each of WIDTHS.
STEPS = (0.0, 1.596, 0.9957, 0.3352, 0.0308)
SQUARED_ERRORS = (1.0, 0.3634, 0.1188, 0.01154, 0.0000877)
MEAN_MARGIN = 0.1
"""Share of the range of the means that is added on both sides, for means of later items."""
MAX_SAMPLES = 2**16
"""Vectors of which the principal axes are computed."""
CHUNK_ITEMS = 2**11


@dataclass(frozen=True, eq=False)
class SetCodec:
    """Encodes and decodes vectors. Codes of an item are rows of ``vector_bytes`` bytes, first those
    of its mean, then one for each vector.

    Attributes:
        encoding: Settings.
        basis: Principal axes of the differences as columns, largest variance first, float32, shape
            ``[D, D]``.
        deviations: Standard deviation along each axis, float32, shape ``[D]``.
        mean_range: Smallest mean along each axis, and the step of its codes, float32, shape
            ``[2, D]``.
    """

    encoding: SetEncoding
    basis: np.ndarray
    deviations: np.ndarray
    mean_range: np.ndarray

    @classmethod
    def fit(cls, sets: VectorSets, encoding: SetEncoding) -> SetCodec:
        """Compute the principal axes of the differences, and the range of the means, from a sample
        of items.
        """
        stride = max(len(sets.rows) // MAX_SAMPLES, 1)
        sample = pool_hierarchically(sets[np.arange(0, len(sets), stride)], encoding.num_vectors)
        means = _means(sample)
        differences = sample.rows.astype(np.float64) - np.repeat(means, sample.counts, axis=0)
        variances, axes = np.linalg.eigh(differences.T @ differences / len(differences))
        # eigh returns ascending variances, and rounding may make the smallest ones negative.
        deviations = np.sqrt(np.maximum(variances[::-1], 0))
        basis = np.ascontiguousarray(axes[:, ::-1], np.float32)
        rotated = means @ basis
        low = rotated.min(0)
        high = rotated.max(0)
        # The smallest float32 keeps the step above 0 where all means are equal.
        margin = MEAN_MARGIN * (high - low) + np.finfo(np.float32).tiny
        mean_range = np.stack([low - margin, (high - low + 2 * margin) / 255])
        return cls(encoding, basis, deviations.astype(np.float32), mean_range.astype(np.float32))

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return len(self.basis)

    @property
    def mean_rows(self) -> int:
        """Rows of codes that the mean of an item takes."""
        return -(-self.dim // self.encoding.vector_bytes)

    @cached_property
    def widths(self) -> np.ndarray:
        """Bits of each dimension, shape ``[D]``, in descending order."""
        return allocate_bits(
            self.deviations.astype(np.float64) ** 2, 8 * self.encoding.vector_bytes
        )

    @cached_property
    def _fields(self) -> list[tuple[int, int, int, np.ndarray]]:
        """Dimension, byte, shift and decoded values of each dimension with bits."""
        fields = list[tuple[int, int, int, np.ndarray]]()
        bit = 0
        for dim, width in enumerate(self.widths.tolist()):
            if width:
                step = STEPS[WIDTHS.index(width)] * self.deviations[dim]
                values = (np.arange(2**width) - 2 ** (width - 1) + 0.5) * step
                # A width divides 8 and is at most the one before, so that no field crosses bytes.
                fields.append((dim, bit // 8, bit % 8, values.astype(np.float32)))
                bit += width
        return fields

    @cached_property
    def _bytes(self) -> list[tuple[slice, np.ndarray]]:
        """Dimensions of each byte, and their values for each value of the byte, ``[n, 256]``."""
        decoded = list[tuple[slice, np.ndarray]]()
        for byte in range(self.encoding.vector_bytes):
            own = [field for field in self._fields if field[1] == byte]
            if own:
                columns = [
                    values[(np.arange(256) >> shift) % len(values)] for _, _, shift, values in own
                ]
                decoded.append((slice(own[0][0], own[-1][0] + 1), np.stack(columns)))
        return decoded

    def encode(self, sets: VectorSets) -> VectorSets:
        """Compress vectors to codes, uint8, ``[T, vector_bytes]``."""
        parts = [self._encode_chunk(sets[chunk]) for chunk in chunk_slices(len(sets), CHUNK_ITEMS)]
        rows = np.concatenate(
            [rows for rows, _ in parts] or [np.empty((0, self.encoding.vector_bytes), np.uint8)]
        )
        counts = np.concatenate([counts for _, counts in parts] or [np.empty(0, np.int64)])
        return VectorSets(rows, offsets_from_counts(counts), self)

    def _encode_chunk(self, sets: VectorSets) -> tuple[np.ndarray, np.ndarray]:
        sets = pool_hierarchically(sets, self.encoding.num_vectors)
        low, step = self.mean_range
        means = np.rint((_means(sets) @ self.basis - low) / step).clip(0, 255).astype(np.uint8)
        # From the rounded mean, so that the differences correct its error.
        differences = sets.rows @ self.basis - np.repeat(means * step + low, sets.counts, axis=0)
        codes = np.zeros((len(sets.rows), self.encoding.vector_bytes), np.uint8)
        for dim, byte, shift, values in self._fields:
            # Values are equidistant, and the outer ones represent all beyond.
            step = max(float(values[1] - values[0]), np.finfo(np.float32).tiny)
            code = np.rint((differences[:, dim] - values[0]) / step).clip(0, len(values) - 1)
            codes[:, byte] |= code.astype(np.uint8) << shift
        # The bytes of a mean fill whole rows of codes, before the vectors of the item.
        padded = np.zeros((len(sets), self.mean_rows * self.encoding.vector_bytes), np.uint8)
        padded[:, : self.dim] = means
        counts = sets.counts + self.mean_rows
        result = VectorSets(
            np.empty((counts.sum(), codes.shape[1]), np.uint8),
            offsets_from_counts(counts),
        )
        is_mean = np.ones(len(result.rows), bool)
        is_mean[
            np.repeat(result.offsets[1:] - sets.offsets[1:], sets.counts) + np.arange(len(codes))
        ] = False
        result.rows[is_mean] = padded.reshape(-1, codes.shape[1])
        result.rows[~is_mean] = codes
        return result.rows, counts

    def differences(self, codes: VectorSets) -> VectorSets:
        """Decode the differences of vectors from the means of their items: the first coordinates
        along the principal axes. Others are 0.
        """
        counts = codes.counts - self.mean_rows
        offsets = offsets_from_counts(counts)
        own = np.repeat(codes.offsets[1:] - offsets[1:], counts) + np.arange(offsets[-1])
        # One row per byte. Selecting along contiguous rows takes a quarter of the time.
        numbers = codes.rows[own].T.astype(np.intp)
        coordinates = np.empty((int(np.count_nonzero(self.widths)), len(own)), np.float32)
        for (dims, values), byte in zip(self._bytes, numbers, strict=False):
            np.take(values, byte, axis=1, out=coordinates[dims], mode="clip")
        return VectorSets(coordinates.T, offsets)

    def mean_codes(self, codes: VectorSets) -> np.ndarray:
        """Read the codes of the means of items, and a column of ones, uint8, ``[N, D + 1]``."""
        first = codes.offsets[:-1, None] + np.arange(self.mean_rows)
        packed = codes.rows[first].reshape(len(codes), -1)[:, : self.dim]
        # The ones add the products of the query with the lower limits, see ``rotate_to_codes``.
        return np.pad(packed, ((0, 0), (0, 1)), constant_values=1)

    def rotate_to_codes(self, query: MaxSimQuery) -> MaxSimQuery:
        """Rotate and scale a query, so that its products with ``mean_codes`` are its products with
        the means.
        """
        low, step = self.mean_range
        rotated = self.rotate(query)
        parts = (np.column_stack([part * step, part @ low]) for part in rotated.parts)
        return MaxSimQuery(query.weights, tuple(parts))

    def means(self, codes: VectorSets) -> np.ndarray:
        """Decode the means of items, in the coordinates of the principal axes."""
        low, step = self.mean_range
        means: np.ndarray = self.mean_codes(codes)[:, :-1] * step + low
        return means

    def decode(self, codes: VectorSets) -> VectorSets:
        """Decode vectors, which are close to the encoded ones, or to the means of similar ones."""
        differences = self.differences(codes)
        rows = np.repeat(self.means(codes), differences.counts, axis=0)
        rows[:, : differences.dim] += differences.rows
        return VectorSets(rows @ self.basis.T, differences.offsets)

    def rotate(self, query: MaxSimQuery) -> MaxSimQuery:
        """Rotate a query to the principal axes."""
        return MaxSimQuery(query.weights, tuple(part @ self.basis for part in query.parts))

    def write(self, path: Path) -> None:
        """Write the axes, the deviations and the range of the means."""
        storage.write_array(
            path, np.concatenate([self.basis, self.deviations[None], self.mean_range])
        )

    @classmethod
    def read(cls, path: Path, encoding: SetEncoding) -> SetCodec:
        """Read a codec."""
        array = storage.read_array(path, dimensions=2)
        if array.shape[0] != array.shape[1] + 3:
            raise DataError(
                f"{path}: expected the axes of an encoding, shape [D + 3, D], got "
                f"{list(array.shape)}. Delete the index and make it again."
            )
        return cls(encoding, array[:-3], array[-3], array[-2:])


def allocate_bits(variances: np.ndarray, num_bits: int) -> np.ndarray:
    """Divide bits among dimensions, so that the expected squared error is smallest. Variances and
    bits are in descending order, ``[D]``.
    """
    levels = np.zeros(len(variances), np.int64)
    errors = np.array(SQUARED_ERRORS)
    widths = np.array(WIDTHS)
    gains = (errors[:-1] - errors[1:]) / np.diff(widths)
    # Gain per bit of the next level of each dimension, which shrinks with each level.
    while True:
        costs = np.append(np.diff(widths), num_bits + 1)[levels]
        gain = np.where(costs <= num_bits, variances * np.append(gains, 0)[levels], -1)
        best = int(gain.argmax())
        if gain[best] < 0:
            return widths[levels]
        num_bits -= int(costs[best])
        levels[best] += 1


def pool_hierarchically(sets: VectorSets, count: int | None) -> VectorSets:
    """Replace similar vectors of each item by their mean: at most ``count`` clusters of Ward's
    method.
    """
    if count is None or not len(sets) or sets.counts.max() <= count:
        return sets
    from scipy.cluster.hierarchy import fcluster, linkage

    pooled = list[np.ndarray]()
    for vectors in sets:
        if len(vectors) > count:
            # Hierarchical pooling: Clavie et al. (2024), section 2.
            labels = fcluster(linkage(vectors, "ward"), count, "maxclust")
            sums = np.zeros((labels.max(), vectors.shape[1]), np.float32)
            np.add.at(sums, labels - 1, vectors)
            vectors = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
        pooled.append(vectors)
    return VectorSets.from_arrays(pooled)


def _means(sets: VectorSets) -> np.ndarray:
    """Means of the vectors of each item, which are not unit vectors, ``[N, D]``."""
    means: np.ndarray = np.add.reduceat(sets.rows, sets.offsets[:-1], axis=0) / sets.counts[:, None]
    return means
