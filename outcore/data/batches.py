"""Batches: an endless or a counted row of them, in an order that seed and epoch decide.

Each batch is a pure function of its number. So the state of the iterator is that number, and what
was made ahead of time is never part of it.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from outcore.data.packing import Packed, one_each, pack
from outcore.data.pieces import TooLong, pieces_of
from outcore.data.sequences import packed_rows, padded_rows
from outcore.data.shuffle import shuffled
from outcore.data.split import Examples
from outcore.data.token_cache import TokenCache

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What decides, beside the tokens, which batches there are."""

    batch_size: int  # sequences; of pairs, pairs, so twice as many rows
    seq_len: int
    packing: bool | None = None  # None: yes, except for pairs
    too_long: TooLong | None = None  # None: split texts, cut others
    pads_to_seq_len: bool = True  # without packing; else to the longest of the batch
    shuffle: bool = True
    seed: int = 0
    num_epochs: float | None = None  # None: without end
    drop_last: bool = False  # the batch at the very end, if it is not full

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        if self.seq_len < 2:
            raise ValueError(f"seq_len must be at least 2, not {self.seq_len}")
        if self.num_epochs is not None and self.num_epochs <= 0:
            raise ValueError(f"num_epochs must be more than 0, not {self.num_epochs}")
        if self.too_long not in (None, "cut", "split"):
            raise ValueError(f"too_long must be 'cut' or 'split', not {self.too_long!r}")


_NO_WORKERS = (
    "batches are made by a thread of this process, and each worker of a DataLoader would give all "
    "of them: DataLoader(batches, batch_size=None, num_workers=0)"
)


class Batches(IterableDataset[Batch]):
    """An iterator of dicts of tensors: input_ids, labels, and position_ids or attention_mask.

    Sequences are packed once and shuffled anew in each epoch. An epoch that does not end with a
    batch goes on into the next one, so that every batch is full and every sequence comes once an
    epoch; only the very last batch may be smaller.
    """

    def __init__(
        self,
        cache: TokenCache,
        options: BatchOptions,
        *,
        examples: Examples | None = None,
        prefetch: int = 2,
    ) -> None:
        """Take all examples of ``cache`` or some; make ``prefetch`` batches ahead of time."""
        if prefetch < 0:
            raise ValueError(f"prefetch must not be negative: {prefetch}")
        self.options = options
        self._cache = cache
        is_pairs = cache.documents_per_example == 2
        self._is_packed = not is_pairs if options.packing is None else options.packing
        if is_pairs and self._is_packed:
            raise ValueError("pairs cannot be packed: leave packing out, or packing=False")
        if options.too_long == "split" and cache.row_format != "text":
            raise ValueError(f"only texts can be split, not rows of {cache.row_format!r}")
        too_long = options.too_long or ("split" if cache.row_format == "text" else "cut")
        if examples is None:
            examples = np.arange(cache.num_examples)
        if len(examples) and not 0 <= examples.min() <= examples.max() < cache.num_examples:
            raise ValueError(f"examples must be numbers from 0 to {cache.num_examples - 1}")
        self.pieces = pieces_of(cache, examples, options.seq_len, too_long)
        places = np.stack([self.pieces.starts, self.pieces.lengths]).astype("<i8")
        self._pieces_checksum = zlib.crc32(places.tobytes())
        self._sequences = self._arranged()
        if not self.num_sequences:
            raise ValueError(
                f"no sequences: {self.pieces.num_dropped} of {len(examples)} examples have nothing "
                f"to learn from in their first {options.seq_len} tokens. Raise seq_len"
            )
        self._next = 0  # the number of the next batch
        self._was_told_the_end = False  # and so ended somebody's loop
        self._orders: dict[int, NDArray[np.int64]] = {}  # of the last two epochs
        self._orders_lock = threading.Lock()  # for the thread that makes batches, and callers
        self._prefetch = prefetch
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()
        self._maker = ThreadPoolExecutor(1, "outcore-batches")
        self._stop = weakref.finalize(self, self._maker.shutdown, wait=False, cancel_futures=True)

    @property
    def num_sequences(self) -> int:
        """Of one epoch."""
        return self._sequences.num_sequences

    @property
    def num_batches(self) -> int | None:
        """Of all epochs; None without end."""
        total = self._num_places
        if total is None:
            return None
        size = self.options.batch_size
        return total // size if self.options.drop_last else -(-total // size)

    @property
    def epoch(self) -> float:
        """How many epochs lie behind, with the part of the current one."""
        done = self._next * self.options.batch_size
        if self._num_places is not None:
            done = min(done, self._num_places)  # the last batch may be smaller
        return done / self.num_sequences

    @property
    def fill(self) -> float:
        """Which part of the packed sequences is tokens; the rest is padding."""
        return int(self.pieces.lengths.sum()) / (self._sequences.num_sequences * self._row_tokens)

    def __len__(self) -> int:
        """Return the number of batches in all epochs, whatever was given out already."""
        if self.num_batches is None:
            raise TypeError("these batches have no end, so no length: give num_epochs")
        return self.num_batches

    def __iter__(self) -> Batches:
        """Go on behind the last batch that was given out: a loop that was left can be taken up."""
        if get_worker_info() is not None:
            raise ValueError(_NO_WORKERS)
        if self._was_told_the_end:  # a loop over nothing would pass for an epoch
            raise ValueError(
                f"all {self.num_batches} batches of num_epochs={self.options.num_epochs} were "
                "given out. For more, loop once over a larger num_epochs: each epoch has an order "
                "of its own"
            )
        return self

    def __next__(self) -> Batch:
        if self.num_batches is not None and self._next >= self.num_batches:
            self._was_told_the_end = True
            raise StopIteration
        number = self._next
        if self._prefetch == 0:
            batch = self.batch(number)
        else:
            self._ask_ahead()
            batch = self._ahead.popleft()[1].result()
        self._next = number + 1
        return batch

    def batch(self, number: int) -> Batch:
        """Return one batch, whichever came before."""
        rows = self._rows_of(number)
        if self._is_packed:
            arrays = packed_rows(self._cache, self.pieces, rows, self.options.seq_len)
        else:
            members = [int(piece) for row in rows for piece in row]
            width = self.options.seq_len
            if not self.options.pads_to_seq_len:
                width = int(self.pieces.lengths[members].max())
            arrays = padded_rows(self._cache, self.pieces, members, width)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def num_tokens(self, number: int) -> int:
        """Return how many tokens a batch has, padding not counted."""
        return sum(int(self.pieces.lengths[row].sum()) for row in self._rows_of(number))

    def state_dict(self) -> dict[str, int]:
        """Return where the iterator is: behind the last batch that it gave out."""
        return {"next_batch": self._next, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state`` was taken: the same batches follow."""
        identity = self._identity()
        changed = [name for name, value in identity.items() if state.get(name) != value]
        if changed:
            raise ValueError(
                "this state is of other batches: "
                + ", ".join(
                    f"{name} was {state.get(name)}, is {identity[name]}" for name in changed
                )
            )
        number = state.get("next_batch")
        if type(number) is not int or number < 0:
            raise ValueError(f"next_batch must be a number from 0 on, not {number!r}")
        self._next = number
        self._was_told_the_end = False

    def __reduce__(self) -> NoReturn:
        raise TypeError(_NO_WORKERS)  # to which a DataLoader may send what it was given

    def close(self) -> None:
        """End the thread that makes batches ahead of time."""
        self._maker.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _num_places(self) -> int | None:
        """How many sequences come in all epochs; None without end."""
        if self.options.num_epochs is None:
            return None
        return max(1, round(self.options.num_epochs * self.num_sequences))

    @property
    def _row_tokens(self) -> int:
        return self.options.seq_len * self._cache.documents_per_example

    def _rows_of(self, number: int) -> list[NDArray[np.int64]]:
        """Return the pieces in each sequence of a batch."""
        size = self.options.batch_size
        first, end = number * size, (number + 1) * size
        if self._num_places is not None:
            end = min(end, self._num_places)
        if not 0 <= first < end:
            raise IndexError(f"there is no batch {number}")
        return [self._sequences.pieces_in(self._sequence_at(place)) for place in range(first, end)]

    def _identity(self) -> dict[str, int]:
        """Numbers that differ where batches would."""
        return {
            "seed": self.options.seed,
            "batch_size": self.options.batch_size,
            "seq_len": self.options.seq_len,
            "shuffle": int(self.options.shuffle),
            "packing": int(self._is_packed),
            "num_sequences": self.num_sequences,
            "tokens_checksum": self._cache.checksum,
            "pieces_checksum": self._pieces_checksum,
        }

    def _arranged(self) -> Packed:
        """Return the sequences of every epoch; what is packed together is random too."""
        num_pieces = len(self.pieces.lengths)
        if not self._is_packed:
            return one_each(np.arange(num_pieces), self._cache.documents_per_example)
        if self.options.shuffle:
            order = shuffled(num_pieces, self.options.seed)
        else:
            order = np.arange(num_pieces)
        return pack(self.pieces.lengths, order, self.options.seq_len)

    def _sequence_at(self, place: int) -> int:
        """Return the sequence at a place in the row of all epochs."""
        epoch, index = divmod(place, self.num_sequences)
        if not self.options.shuffle:
            return index
        with self._orders_lock:
            if epoch not in self._orders:
                if len(self._orders) > 1:
                    del self._orders[max(self._orders, key=lambda known: abs(known - epoch))]
                self._orders[epoch] = shuffled(self.num_sequences, self.options.seed, epoch)
            return int(self._orders[epoch][index])

    def _ask_ahead(self) -> None:
        """Have the next batches made; forget those that a loaded state made useless."""
        while self._ahead and self._ahead[0][0] != self._next:
            self._ahead.popleft()[1].cancel()
        last = self._next + self._prefetch
        if self.num_batches is not None:
            last = min(last, self.num_batches - 1)
        known = self._ahead[-1][0] + 1 if self._ahead else self._next
        for number in range(known, last + 1):
            self._ahead.append((number, self._maker.submit(self.batch, number)))
