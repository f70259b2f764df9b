-- The books of all limits. ARGV[1] is a list in MessagePack: operations, each done in order.
--
--   acquire LEASE TTL N (rate KEY INCREMENT UNIT TOLERANCE | lease KEY LIMIT) * N
--       checks every rule, and only if all of them admit charges every one.
--       replies 1 or 0, then per rule its backlog in microseconds or its number of leases
--   adjust KEY DELTA UNIT TOLERANCE                                                 no reply
--   hold KEY TTL N LEASE * N                                                        replies their number
--   drop KEY N LEASE * N                                                            no reply
--
-- KEYS are the keys in it, each once. The answer is the list of all replies, in MessagePack too: one string
-- each way is far cheaper, on both sides, than many, or than words to be parsed.
--
-- Times are integer microseconds of this server's clock, exact in a double. A rate is stored as
-- "TAT UNIT TOLERANCE WRITTEN", see rules.py; WRITTEN is the time of that.
--
-- Commands are what takes the time here, and the operations of a list are mostly about the same user or model:
-- so each key is read once, and written once, at the end.

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local list = cmsgpack.unpack(ARGV[1])
local place, last = 0, #list
local replies, said = {}, 0

local function word()
  place = place + 1
  return list[place]
end

local function reply(value)
  said = said + 1
  replies[said] = value
end

local function integer(value)
  return string.format('%.0f', value)
end

-- A command on a key of ours. If that holds something else, it goes: one such key would fail every list of
-- operations that it is in, and so everybody's.
local function on(name, command, ...)
  local answer = redis.pcall(command, name, ...)
  if type(answer) == 'table' and answer.err then
    if string.find(answer.err, 'WRONGTYPE', 1, true) then
      redis.call('DEL', name)
    end
    answer = redis.call(command, name, ...)
  end
  return answer
end

local MOST_OWED = 60 -- as in rules.py

-- Rates by key: {backlog, unit, tolerance, changed}; no backlog where nothing is stored.
local rates = {}

-- What was written later than now was written by a clock that was ahead of this one: it went back, or another
-- server took over. The backlog of then counts from now on; else it would refuse for as long as that clock
-- was ahead.
local function read_rate(name)
  local stored = on(name, 'GET')
  local tat, unit, tolerance, written = string.match(stored or '', '^(%d+) (%d+) (%d+) ?(%d*)$')
  if not tat then
    return {}
  end
  tat, unit, tolerance, written = tonumber(tat), tonumber(unit), tonumber(tolerance), tonumber(written) or 0
  local backlog = tat - math.max(now, written)
  if backlog > MOST_OWED * tolerance then
    return {}
  end
  return { backlog = backlog, unit = unit, tolerance = tolerance, changed = written > now }
end

local function rate_of(name)
  local rate = rates[name]
  if not rate then
    rate = read_rate(name)
    rates[name] = rate
  end
  return rate
end

local function present_backlog(rate, unit, tolerance)
  local backlog = rate.backlog
  if not backlog or backlog <= 0 then
    return 0
  end
  if rate.unit ~= unit or rate.tolerance ~= tolerance then
    return math.min(math.ceil(backlog * unit / rate.unit), tolerance)
  end
  return backlog
end

local function change_rate(rate, backlog, unit, tolerance)
  rate.backlog = backlog > 0 and backlog or nil
  rate.unit, rate.tolerance, rate.changed = unit, tolerance, true
end

local function write_rate(name, rate)
  local backlog = rate.backlog or 0
  if backlog <= 0 then
    redis.call('DEL', name)
    return
  end
  local state = string.format('%.0f %.0f %.0f %.0f', now + backlog, rate.unit, rate.tolerance, now)
  -- A second longer than it counts, for a clock that is corrected a little.
  redis.call('SET', name, state, 'PX', integer(math.ceil(backlog / 1000) + 1000))
end

-- Leases by key: {count, exact, ttl, added, size}; no count while nobody has asked; the `size` words in `added`
-- are not written yet.
local leases = {}
local ends = {} -- by ttl, as they are written

local function leases_of(name)
  local held = leases[name]
  if not held then
    held = { added = {}, size = 0 }
    leases[name] = held
  end
  return held
end

local function add(held, lease, ttl)
  local added, size = held.added, held.size
  ends[ttl] = ends[ttl] or integer(now + ttl)
  added[size + 1], added[size + 2] = ends[ttl], lease
  held.size, held.ttl = size + 2, ttl
end

local function write_leases(name, held)
  local size = held.size
  if size > 0 then
    for first = 1, size, 1000 do -- as many as fit on the stack
      on(name, 'ZADD', unpack(held.added, first, math.min(first + 999, size)))
    end
    redis.call('PEXPIRE', name, integer(math.ceil(held.ttl / 1000) + 1000))
    held.size = 0
  end
end

-- How many there are; exactly, where that is more than `enough`. Some may be of gateways that were killed, and
-- have ended: that is rare and costs two commands, so it is looked for where it matters. Those that end later
-- than any can were written by a clock that was ahead.
local function count(name, held, ttl, enough)
  if not held.count then
    held.count = on(name, 'ZCARD')
  end
  if held.count > enough and not held.exact then
    write_leases(name, held)
    redis.call('ZREMRANGEBYSCORE', name, '-inf', integer(now))
    redis.call('ZREMRANGEBYSCORE', name, integer(now + 2 * ttl), '+inf')
    held.count, held.exact = redis.call('ZCARD', name), true
  end
  return held.count
end

local operations = {}

-- The one that is in every list, for each request: without calls for words.
function operations.acquire()
  local lease, ttl, rules = list[place + 1], list[place + 2], list[place + 3]
  local first, values, admitted = place + 4, {}, true
  local at = first
  for rule = 1, rules do
    local name, value = list[at + 1]
    if list[at] == 'rate' then
      local unit, tolerance = list[at + 3], list[at + 4]
      value = present_backlog(rates[name] or rate_of(name), unit, tolerance)
      admitted = admitted and value + list[at + 2] <= tolerance
      at = at + 5
    else
      value = count(name, leases[name] or leases_of(name), ttl, list[at + 2] - 1)
      admitted = admitted and value < list[at + 2]
      at = at + 3
    end
    values[rule] = value
  end
  place = at - 1
  reply(admitted and 1 or 0)
  at = first
  for rule = 1, rules do
    local value = values[rule]
    if admitted then
      local name = list[at + 1]
      if list[at] == 'rate' then
        value = value + list[at + 2]
        change_rate(rates[name], value, list[at + 3], list[at + 4])
        at = at + 5
      else
        value = value + 1
        leases[name].count = value
        add(leases[name], lease, ttl)
        at = at + 3
      end
    end
    reply(value)
  end
end

function operations.adjust()
  local name, delta, unit, tolerance = word(), word(), word(), word()
  local rate = rate_of(name)
  local backlog = rate.backlog
  if backlog then
    delta = math.ceil(delta * rate.unit / unit)
    unit, tolerance = rate.unit, rate.tolerance
  end
  backlog = backlog or 0
  if delta > 0 then
    backlog = math.max(backlog, 0)
  end
  change_rate(rate, math.min(backlog + delta, MOST_OWED * tolerance), unit, tolerance)
end

function operations.hold()
  local name, ttl, number = word(), word(), word()
  local held = leases_of(name)
  for _ = 1, number do
    add(held, word(), ttl)
  end
  write_leases(name, held)
  held.count, held.exact = nil, false
  reply(count(name, held, ttl, -1))
end

function operations.drop()
  local name, number = word(), word()
  local held = leases_of(name)
  write_leases(name, held)
  for first = place + 1, place + number, 1000 do
    on(name, 'ZREM', unpack(list, first, math.min(first + 999, place + number)))
  end
  held.count = nil
  place = place + number
end

while place < last do
  operations[word()]()
end
for name, rate in pairs(rates) do
  if rate.changed then
    write_rate(name, rate)
  end
end
for name, held in pairs(leases) do
  write_leases(name, held)
end
return cmsgpack.pack(replies)
