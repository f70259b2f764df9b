"""Header names that gateway and worker share, lower case as ASGI and HTTP/1.1 parsers give them."""

REQUEST_ID = "x-request-id"
SERVED_MODEL = "x-pagefleet-model"
SERVED_TARGET = "x-pagefleet-target"  # slot.generation
# In a refusal by a worker that has done no work yet, so another one may be asked: why, one of the next line.
REFUSED = "x-pagefleet-refused"
DRAINING, QUEUE_FULL, LOADING, LATE = "draining", "queue_full", "loading", "late"
# Seconds that a client will wait until its request is begun: at the gateway for a worker with room, then at
# the worker, which is told what is left of them.
PATIENCE = "x-request-timeout"
USER = "x-user-id"
# In a request to a worker: a name, made by the gateway and never by a client, under which it may ask for what
# the request used. In a whole answer to it: "PROMPT,COMPLETION,CACHED,FINISH_REASON", see UsageReport.
USAGE = "x-pagefleet-usage"
# In a request to a worker: the caller's class, one of PRIORITIES, most urgent first. Made by the gateway from
# the caller's key and never passed on from a client; workers take it from this machine only.
PRIORITY = "x-pagefleet-priority"
PRIORITIES = ("high", "normal", "low")
