"""What several routes refuse or check the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from contracts.errors import ApiError, bad_request, not_found
from worker.server.schemas import StreamOptions

if TYPE_CHECKING:
    from worker.server.generation import Generation


def route_not_found() -> ApiError:
    return not_found("There is nothing at this path.", code="route_not_found")


class StreamUsage(NamedTuple):
    """Where a stream tells its usage: in a last chunk, and of each answer so far in every chunk before."""

    last: bool = False
    each: bool = False

    def of_chunk(self, generation: Generation, index: int) -> dict[str, object]:
        """The fields of a chunk that brings something of the answer `index`."""
        if not self.last:
            return {}
        return {"usage": generation.answer_usage(index).body() if self.each else None}


def check_stream_options(options: StreamOptions | None, stream: bool) -> StreamUsage:
    """ApiError 400 for stream options without a stream."""
    if options is None:
        return StreamUsage()
    if not stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    each = bool(options.continuous_usage_stats)
    last = each if options.include_usage is None else options.include_usage
    return StreamUsage(last, last and each)
