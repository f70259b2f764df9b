"""Header names that gateway and worker share, lower case as ASGI and HTTP/1.1 parsers give them."""

REQUEST_ID = "x-request-id"
SERVED_MODEL = "x-pagefleet-model"
SERVED_TARGET = "x-pagefleet-target"  # slot.generation
REFUSED = "x-pagefleet-refused"  # "draining": refused before admission, safe to retry elsewhere
DRAINING = "draining"
USER = "x-user-id"
# In a request to a worker: a name, made by the gateway and never by a client, under which it may ask for what
# the request used. In a whole answer to it: "PROMPT,COMPLETION,CACHED,FINISH_REASON", see UsageReport.
USAGE = "x-pagefleet-usage"
