"""Carries rollouts out: what `gateway.fleet.rollout` decides happens here, and what happens is told there.

rollouts ─► driver ─► hands ─► proof, measure, memory ─► workers' sockets, gateways' boards
   │           │
   │           └─► records (state on disk before anything is done; history)
   └─► routes (the admin socket), asked (what people ask for), survival (after a crash of the supervisor)
"""
