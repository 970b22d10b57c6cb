"""What the processes of a load tell each other: frames of marshalled plain values.

`marshal` is quick and knows no classes; both sides are of one Python.
"""

from __future__ import annotations

import asyncio
import marshal
from collections.abc import Sequence
from typing import Any, overload

from tuner.load.request import Request
from tuner.types import RequestRecord, RequestStatus

_LENGTH_BYTES = 8


def frame(message: Any) -> bytes:
    """A message, to be written."""
    data = marshal.dumps(message)
    return len(data).to_bytes(_LENGTH_BYTES) + data


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: there is none: the other side has ended.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    return marshal.loads(await reader.readexactly(length))


class PackedRequests(Sequence[Request]):
    """Requests that stay packed until they are asked for.

    A prompt of ids takes 5 bytes a token so, and 36 as the integers that Python makes of it.
    """

    def __init__(self, packed: Sequence[bytes]) -> None:
        self._packed = packed

    @staticmethod
    def pack(requests: Sequence[Request]) -> list[bytes]:
        """What to make them of, on the other side."""
        return [
            marshal.dumps(
                (r.index, r.prompt, r.prompt_tokens, r.output_tokens, r.ignore_eos, r.after)
            )
            for r in requests
        ]

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, place: int) -> Request: ...
    @overload
    def __getitem__(self, place: slice) -> PackedRequests: ...
    def __getitem__(self, place: int | slice) -> Request | PackedRequests:
        if isinstance(place, slice):
            return PackedRequests(self._packed[place])
        return Request(*marshal.loads(self._packed[place]))


def row_of(record: RequestRecord) -> tuple[Any, ...]:
    """A record as a tuple that can be marshalled."""
    return (
        record.index,
        str(record.status.value),
        record.send_s,
        record.end_s,
        record.prompt_tokens,
        record.output_tokens,
        record.token_times_s,
        record.error,
        record.token_counts,
        record.intended_s,
    )


def record_of(row: Sequence[Any]) -> RequestRecord:
    """The record of such a tuple."""
    index, status, *rest = row
    return RequestRecord(index, RequestStatus(status), *rest)
