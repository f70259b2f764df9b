-- The books of all limits. ARGV[1] is a list of operations, words with spaces between, each done in order:
--
--   acquire LEASE TTL N (rate INCREMENT UNIT TOLERANCE | lease LIMIT) * N        one key per rule
--       checks every rule, and only if all of them admit charges every one.
--       replies 1 or 0, then per rule its backlog in microseconds or its number of leases
--   adjust DELTA UNIT TOLERANCE                                                 one key, no reply
--   hold TTL N LEASE * N                                                         one key, replies its number
--   drop N LEASE * N                                                             one key, no reply
--
-- Times are integer microseconds of this server's clock, exact in a double. A rate is stored as
-- "TAT UNIT TOLERANCE WRITTEN", see rules.py; WRITTEN is the time of that. One string each way is far cheaper
-- for clients than lists.

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local word = string.gmatch(ARGV[1], '%S+')
local next_key = 0
local replies = {}

local function number()
  return tonumber(word())
end

local function key()
  next_key = next_key + 1
  return KEYS[next_key]
end

local function reply(value)
  replies[#replies + 1] = string.format('%.0f', value)
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

local function write_rate(name, backlog, unit, tolerance)
  if backlog <= 0 then
    redis.call('DEL', name)
    return
  end
  local state = string.format('%.0f %.0f %.0f %.0f', now + backlog, unit, tolerance, now)
  -- A second longer than it counts, for a clock that is corrected a little.
  redis.call('SET', name, state, 'PX', string.format('%.0f', math.ceil(backlog / 1000) + 1000))
end

-- (backlog, unit, tolerance) as stored, or nothing. What was written later than now was written by a clock
-- that was ahead of this one: it went back, or another server took over. The backlog of then counts from now
-- on; else it would refuse for as long as that clock was ahead.
local function read_rate(name)
  local stored = on(name, 'GET')
  local tat, unit, tolerance, written = string.match(stored or '', '^(%d+) (%d+) (%d+) ?(%d*)$')
  if not tat then
    return nil
  end
  tat, unit, tolerance, written = tonumber(tat), tonumber(unit), tonumber(tolerance), tonumber(written) or 0
  local backlog = tat - math.max(now, written)
  if backlog > 2 * tolerance then
    return nil
  end
  if written > now then
    write_rate(name, backlog, unit, tolerance)
  end
  return backlog, unit, tolerance
end

local function present_backlog(name, unit, tolerance)
  local backlog, old_unit, old_tolerance = read_rate(name)
  if not backlog or backlog <= 0 then
    return 0
  end
  if old_unit ~= unit or old_tolerance ~= tolerance then
    return math.min(math.ceil(backlog * unit / old_unit), tolerance)
  end
  return backlog
end

-- Leases that end later than any can were written by a clock that was ahead, too.
local function held(name, ttl)
  on(name, 'ZREMRANGEBYSCORE', '-inf', string.format('%.0f', now))
  redis.call('ZREMRANGEBYSCORE', name, string.format('%.0f', now + 2 * ttl), '+inf')
  return redis.call('ZCARD', name)
end

local function hold(name, lease, ttl)
  on(name, 'ZADD', string.format('%.0f', now + ttl), lease)
end

local function keep(name, ttl)
  redis.call('PEXPIRE', name, string.format('%.0f', math.ceil(ttl / 1000) + 1000))
end

local operations = {}

function operations.acquire()
  local lease, ttl, count = word(), number(), number()
  local rules, admitted = {}, true
  for i = 1, count do
    local rule = { key = key(), kind = word(), cost = number() }
    if rule.kind == 'rate' then
      rule.unit, rule.tolerance = number(), number()
      rule.value = present_backlog(rule.key, rule.unit, rule.tolerance)
      admitted = admitted and rule.value + rule.cost <= rule.tolerance
    else
      rule.value = held(rule.key, ttl)
      admitted = admitted and rule.value < rule.cost
    end
    rules[i] = rule
  end
  reply(admitted and 1 or 0)
  for _, rule in ipairs(rules) do
    if admitted and rule.kind == 'rate' then
      rule.value = rule.value + rule.cost
      write_rate(rule.key, rule.value, rule.unit, rule.tolerance)
    elseif admitted then
      rule.value = rule.value + 1
      hold(rule.key, lease, ttl)
      keep(rule.key, ttl)
    end
    reply(rule.value)
  end
end

function operations.adjust()
  local name, delta, unit, tolerance = key(), number(), number(), number()
  local backlog, old_unit, old_tolerance = read_rate(name)
  if backlog then
    delta = math.ceil(delta * old_unit / unit)
    unit, tolerance = old_unit, old_tolerance
  end
  backlog = backlog or 0
  if delta > 0 then
    backlog = math.max(backlog, 0)
  end
  write_rate(name, math.min(backlog + delta, 2 * tolerance), unit, tolerance)
end

function operations.hold()
  local name, ttl, count = key(), number(), number()
  for _ = 1, count do
    hold(name, word(), ttl)
  end
  keep(name, ttl)
  reply(held(name, ttl))
end

function operations.drop()
  local name, count = key(), number()
  for _ = 1, count do
    on(name, 'ZREM', word())
  end
end

for operation in word do
  operations[operation]()
end
return table.concat(replies, ' ')
