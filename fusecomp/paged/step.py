"""What one step of the model works on: tensors of fixed address, filled by the host with a single copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fusecomp.errors import SequenceError
from fusecomp.paged.tables import GONE

on_host = partial(torch.tensor, device="cpu")
"""Whatever torch.set_default_device says."""


@dataclass(frozen=True)
class Step:
    """One step, as views of the cache's own tensors: valid until the next is built.

    A step of rows has slots and positions [B, M], row b for sequence b; a packed one [T], sequence after sequence.
    """

    block_table: Tensor  # [B, T] int32; entries past the end, and before the window, name a page of zeros
    seq_lens: Tensor  # [B] int32, the new tokens included; 0 in an unused row
    cu_seqlens_q: Tensor  # [B + 1] int32: new tokens before each sequence
    slot_mapping: Tensor  # int32: where each new token is written; -1 where there is none
    positions: Tensor  # int32: its place in its sequence; 0 where there is none

    @property
    def packed(self) -> bool:
        return self.slot_mapping.dim() == 1


@dataclass(frozen=True)
class Part:
    """The new tokens of one sequence: those from `begin` to `length`."""

    table: Sequence[int]
    begin: int
    length: int

    @property
    def count(self) -> int:
        return self.length - self.begin

    def slots(self, size: int) -> list[int]:
        """table[n // size] * size + n % size of each new token."""
        return [self.table[n // size] * size + n % size for n in range(self.begin, self.length)]


@dataclass
class StepBuffers:
    """Room for `max_seqs` tables of `width` blocks and `max_tokens` new tokens: one buffer here, one on the device."""

    max_seqs: int
    width: int
    max_tokens: int
    null: int
    device: torch.device
    _copied: torch.cuda.Event | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        size = self.max_seqs * (self.width + 2) + 1 + 2 * self.max_tokens
        pinned = self.device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._ours, self._theirs = self._cut(self._host), self._cut(self._device)
        self._ours[0].fill_(self.null)
        self._rows: list[list[int]] = [[] for _ in range(self.max_seqs)]
        self._steps: dict[tuple[int, tuple[int, ...]], Step] = {}

    def _cut(self, buffer: Tensor) -> tuple[Tensor, ...]:
        b, t = self.max_seqs, self.max_tokens
        table, lens, starts, slots, positions = buffer.split([b * self.width, b, b + 1, t, t])
        return table.view(b, self.width), lens, starts, slots, positions

    def fill(self, parts: Sequence[Part], size: int, rows: int, columns: int | None, tokens: int) -> Step:
        """A step of these sequences, in `rows` rows; `columns` places a row, or packed in `tokens` places."""
        self._check(parts, rows, columns, tokens)
        if self._copied is not None:
            self._copied.synchronize()
        for row, part in enumerate(parts):
            self._table(row, part.table)
        for row in range(len(parts), rows):
            self._table(row, ())
        slots, positions = self._tokens(parts, size, rows, columns, tokens)
        counts = on_host([part.count for part in parts] + [0] * (rows - len(parts)))
        _, lens, starts, ours, places = self._ours
        lens[:rows] = on_host([part.length for part in parts] + [0] * (rows - len(parts)))
        starts[1 : rows + 1] = counts.cumsum(0)
        ours[: len(slots)] = on_host(slots)
        places[: len(slots)] = on_host(positions)
        self._send()
        return self._views(rows, (len(slots),) if columns is None else (rows, columns))

    def _views(self, rows: int, shape: tuple[int, ...]) -> Step:
        """The step tensors of one shape, the same objects every time."""
        if (rows, shape) not in self._steps:
            table, lens, starts, slots, positions = self._theirs
            n = math.prod(shape)
            views = table[:rows], lens[:rows], starts[: rows + 1], slots[:n].view(shape), positions[:n].view(shape)
            for view in views:
                torch._dynamo.mark_static_address(view)
            self._steps[rows, shape] = Step(*views)
        return self._steps[rows, shape]

    def _table(self, row: int, blocks: Sequence[int]) -> None:
        """Write what changed since this row was last filled."""
        held = self._rows[row]
        if list(blocks[: len(held)]) != held:
            self._ours[0][row].fill_(self.null)
            held = []
        if len(blocks) > len(held):
            new = [self.null if block == GONE else block for block in blocks[len(held) :]]
            self._ours[0][row, len(held) : len(blocks)] = on_host(new)
        self._rows[row] = list(blocks)

    @staticmethod
    def _tokens(
        parts: Sequence[Part], size: int, rows: int, columns: int | None, tokens: int
    ) -> tuple[list[int], list[int]]:
        """Slot and position of each place."""
        slots: list[int] = []
        positions: list[int] = []
        for part in parts:
            slots += part.slots(size)
            positions += range(part.begin, part.length)
            if columns is not None:
                slots += [-1] * (columns - part.count)
                positions += [0] * (columns - part.count)
        unused = (tokens if columns is None else rows * columns) - len(slots)
        return slots + [-1] * unused, positions + [0] * unused

    def _check(self, parts: Sequence[Part], rows: int, columns: int | None, tokens: int) -> None:
        new = [part.count for part in parts]
        total = tokens if columns is None else rows * columns
        if rows > self.max_seqs or len(parts) > rows:
            said = f"{len(parts)} sequences in {rows} rows, of at most {self.max_seqs}"
            raise SequenceError(f"step: {said}: split the step, or build the cache with a greater max_seqs")
        if columns is not None and max(new, default=0) > columns:
            raise SequenceError(f"step: {max(new)} new tokens in a row of {columns} places: give more columns")
        if total > self.max_tokens:
            said = f"{sum(new)} new tokens in {total} places, of at most {self.max_tokens}"
            raise SequenceError(f"step: {said}: split the step, or build the cache with a greater max_tokens")

    def _send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
        if self.device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.device))
