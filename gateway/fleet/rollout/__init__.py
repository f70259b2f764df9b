"""Replaces a model's version while users are on it: an explicit state machine, without any I/O.

    command(rollout, Start(...) | Pause() | Resume() | Promote() | Abort() | Undo(...), now)
    fact(rollout, StandbyReady(...) | Applied(...) | Judged(...) | Tick(...) | ..., now)

Both give (rollout, actions); a command may give a Refusal instead. Whoever drives it is the only one to do so
for a model, puts the new state on disk *before* he carries out the actions, and reports what became of them
as facts. After a crash he decodes the state, reports `Restarted` and gets the actions again: each is safe to
repeat. An answer to a question of an earlier phase is ignored: facts name their rollout, and what depends on
weights names their `change`.

canary (both versions fit into memory):

    starting ─► checking ─► warming ─► proving ─► proven ─► shifting ─► judging ──last step──► clearing(old)
       │           │           │          │         │          ▲           │ next step            │
       │           │           │          │         │          └───────────┤                      ▼
       └───────────┴─────┬─────┴──────────┴─────────┘                      │       ═══ draining ─► stopping
                         │ failed, aborted                     failed,     │      no return          │
                         ▼                                     aborted     ▼                         ▼
                  stopping(new) ◄─ draining ◄─ clearing(new) ◄────────  reverting ◄─ clearing    completed
                         │
                         ▼
              rolled_back | aborted | failed        clearing, draining ──drain limit──► cutting ─► stopping

recreate (they don't fit: users wait in between, and the judge compares with the time before):

    holding ─► clearing(old) ─► draining ─► stopping ─► starting … proven ─► shifting ─► judging ─► completed
       │            │           └───────┬───────┘       └─────┬─────┘           └────┬─────┘
       │            │                   │               stopping(new)             holding
       │            │                   │                     │             clearing(new) … stopping
       ▼            ▼                   ▼                     ▼                      │
    reverting ◄─────┘◄───────────── restoring ◄───────────────┴──────────────────────┘
       │
       ▼
    rolled_back | aborted | failed (the old version didn't start again)

What holds in every order of events (tests/gateway/test_rollout_exploration.py goes through all of them):

- A version is stopped only when it has weight 0, every living gateway has said that it applied that, and
  neither they nor the worker have a request on it. Streams that outlive the drain limit are ended and
  counted. A version that never had weight, or whose process is gone, is stopped at once.
- One version has weight at any time; only recreate has a time with none, in which requests are held.
- A failing verdict, a failing golden prompt and a crash of the standby end the rollout for good.
- `abort` always ends with the old version, until that is fenced (draining): from there on it refuses
  requests, and going on is the shorter way. With recreate, which can start it again, it is never too late.
- While Redis is down nothing advances: no more users for the new version, no end of the old one. Going back,
  which gives users what they had, is allowed; so is what ends users' waiting (recreate): back to an old
  version that still runs, or on to the new one, proven, when the old one is gone.
- Every state has a way to an end. Only paused ones, and those whose verdict is *hold*, wait for a person.
"""

from gateway.fleet.rollout.commands import Refusal, command, no_rollout
from gateway.fleet.rollout.facts import fact
from gateway.fleet.rollout.model import Options, Record, Rollout, Version, decode, encode, record_of
from gateway.fleet.rollout.moves import actions_of

__all__ = [
    "Options",
    "Record",
    "Refusal",
    "Rollout",
    "Version",
    "actions_of",
    "command",
    "decode",
    "encode",
    "fact",
    "no_rollout",
    "record_of",
]
