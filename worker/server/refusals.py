"""What several routes refuse or check the same way."""

from __future__ import annotations

from contracts.errors import ApiError, bad_request, not_found
from worker.server.schemas import StreamOptions


def route_not_found() -> ApiError:
    return not_found("There is nothing at this path.", code="route_not_found")


def check_stream_options(options: StreamOptions | None, stream: bool) -> bool:
    """Whether the usage chunk is wanted. ApiError 400 for stream options without a stream."""
    if options is None:
        return False
    if not stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    return bool(options.include_usage)
