"""The key-value cache of a batch whose rows come and go: preallocated, and right-aligned.

So a decode step writes every row's new key and value into the same column; what lies left of a row's start is masked.
A new row is copied in to end where the others end, a finished one is overwritten by the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

KeyValues = list[tuple[Tensor, Tensor]]
"""Per layer keys and values of one sequence, (kv heads, tokens, head size) each."""

_FIRST_ROWS, _FIRST_COLUMNS = 8, 64


class RowLayer(DynamicLayer):
    """One attention layer's buffers, (rows, kv heads, columns, head size); the extent is that of `Rows`."""

    def __init__(self, rows: Rows, like: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self._rows = rows
        self.key_buffer, self.value_buffer = (one.new_empty(0, one.shape[0], 0, one.shape[2]) for one in like)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one column, (rows, kv heads, 1, head size), and give all columns up to it."""
        size, low, end = self._rows.size, self._rows.low, self._rows.end
        self.key_buffer[:size, :, end : end + 1] = key_states
        self.value_buffer[:size, :, end : end + 1] = value_states
        return self.key_buffer[:size, :, low : end + 1], self.value_buffer[:size, :, low : end + 1]

    def get_seq_length(self) -> int:
        return self._rows.end - self._rows.low

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def resize(self, num_rows: int, num_columns: int, end: int) -> None:
        """Move the columns in use into new buffers, so that they end at column `end`."""
        size, low, old_end = self._rows.size, self._rows.low, self._rows.end
        for name in ("key_buffer", "value_buffer"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(num_rows, old.shape[1], num_columns, old.shape[3])
            new[:size, :, end - (old_end - low) : end] = old[:size, :, low:old_end]
            setattr(self, name, new)

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Put one sequence into a row, ending where all rows end."""
        columns = slice(self._rows.end - keys.shape[1], self._rows.end)
        self.key_buffer[row, :, columns] = keys
        self.value_buffer[row, :, columns] = values

    def copy_row(self, source: int, target: int, start: int) -> None:
        """Overwrite row `target` by row `source`, whose sequence begins at column `start`."""
        columns = slice(start, self._rows.end)
        self.key_buffer[target, :, columns] = self.key_buffer[source, :, columns]
        self.value_buffer[target, :, columns] = self.value_buffer[source, :, columns]


class Rows:
    """The rows in use are 0 to `size - 1`; row i holds columns `starts[i]` to `end - 1`."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.low = 0
        self.end = 0
        self.cache = Cache(layers=[])
        self._num_rows = 0
        self._num_columns = 0

    @property
    def size(self) -> int:
        return len(self.starts)

    def add(self, sequences: Sequence[KeyValues]) -> None:
        """Append a row for each sequence. Views that an earlier step was given are no longer good."""
        if not sequences:
            return
        if not self.cache.layers:
            self.cache.layers.extend(RowLayer(self, like) for like in sequences[0])
        lengths = [sequence[0][0].shape[1] for sequence in sequences]
        self._make_room(len(sequences), max(lengths))
        for sequence, length in zip(sequences, lengths, strict=True):
            for layer, (keys, values) in zip(self._layers(), sequence, strict=True):
                layer.write(self.size, keys, values)
            self.starts.append(self.end - length)
        self.low = min(self.starts)

    def remove(self, row: int) -> int:
        """Free a row; the last row moves into its place, and its old number is returned."""
        last = self.size - 1
        if row != last:
            for layer in self._layers():
                layer.copy_row(last, row, self.starts[last])
            self.starts[row] = self.starts[last]
        self.starts.pop()
        self.low = min(self.starts, default=self.end)
        return last

    def grow_column(self) -> None:
        """Make sure that the next step's column is there."""
        if self.end == self._num_columns:
            self._resize(self._num_rows, self.end - self.low)

    def step(self) -> None:
        """The model has written column `end`: it now belongs to every row."""
        self.end += 1

    def positions(self) -> Tensor:
        """Position of each row's next token, int64 (size, 1)."""
        return torch.tensor([[self.end - start] for start in self.starts])

    def visible(self) -> Tensor:
        """Which of the columns `low` to `end` each row's next token may attend to, bool (size, end - low + 1)."""
        return torch.arange(self.low, self.end + 1) >= torch.tensor(self.starts)[:, None]

    def _layers(self) -> list[RowLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, RowLayer)]

    def _make_room(self, num_new: int, length: int) -> None:
        """Have buffers for so many more rows, and `length` columns or more left of `end`."""
        if self.size == 0:
            self.low = self.end = length
        num_rows = max(_FIRST_ROWS, self._num_rows)
        while num_rows < self.size + num_new:
            num_rows *= 2
        if num_rows > self._num_rows or length > self.end or self.end > self._num_columns:
            self._resize(num_rows, max(length, self.end - self.low))

    def _resize(self, num_rows: int, extent: int) -> None:
        """New buffers for sequences of up to `extent` tokens, half of them free to the right."""
        num_columns = max(_FIRST_COLUMNS, self._num_columns)
        while num_columns < 2 * extent:
            num_columns *= 2
        for layer in self._layers():
            layer.resize(num_rows, num_columns, extent)
        shift = extent - self.end
        self.starts = [start + shift for start in self.starts]
        self.low, self.end = self.low + shift, extent
        self._num_rows, self._num_columns = num_rows, num_columns
