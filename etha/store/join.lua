-- One rank joins a pair. KEYS: pair, own side, remote side.
-- Fences older launches, compares, takes the rank, detects completeness, bumps the epoch, publishes.
-- Answers ok = {epoch, state}, or an error; with "held" the joiner finds out which of these holders live,
-- and asks again naming the dead ones in req.dead ("host/pid/start" -> true).
local pair_key, own_key, far_key = KEYS[1], KEYS[2], KEYS[3]
local side, remote, rank = req.side, req.remote, string.format('%d', req.rank)
local me = req.member
-- Redis has lost its data and this agent has not noticed: nobody could link to it, and others would let it go.
if redis.call('EXISTS', PREFIX .. 'agent:' .. me.agent) == 0 then
  return refuse('unpublished', 'agent ' .. me.agent .. ' is not listed: Redis has lost its record')
end
local P = hash(pair_key)
local worlds, launches, formed = object(P.world_sizes), object(P.launches), object(P.formed_launches)
local retired, autos, sides = object(P.retired), object(P.autos), object(P.sides)
if not (worlds and launches and formed and retired and autos and sides) then
  return refuse('protocol', "Redis key '" .. pair_key .. "' does not hold JSON objects where it should")
end
local state, epoch = P.state or 'forming', math.max(number(P.epoch), req.known_epoch)
local reason, why = P.reason or '', P.error or ''

local function process(m) return m.host .. '/' .. string.format('%d', m.pid) .. '/' .. string.format('%d', m.start) end

local function read(key, field, text)
  if not text then return nil end
  local m = object(text)
  if not m or type(m.agent) ~= 'string' or type(m.host) ~= 'string' or type(m.pid) ~= 'number'
      or type(m.start) ~= 'number' or type(m.epoch) ~= 'number' then
    error("Redis key '" .. key .. "': field '" .. field .. "' is not a member")
  end
  return m
end

-- A holder's agent keeps a lease; without it the holder counts as dead, unless it is on the joiner's own host,
-- where the joiner can look (and then says so in req.dead).
local leases = {[me.agent] = true}
local function served(m)
  if leases[m.agent] == nil then leases[m.agent] = redis.call('EXISTS', PREFIX .. 'agent:' .. m.agent) == 1 end
  return leases[m.agent] and not req.dead[process(m)]
end
local function dead(m)
  if req.dead[process(m)] then return true end
  return m.host ~= me.host and not served(m)
end

-- Up to 64 entries of a side that may live, apart from this process.
local function living(key)
  local found = {}
  for field, text in pairs(hash(key)) do
    local m = read(key, field, text)
    if process(m) ~= process(me) and not dead(m) and #found < 64 then
      m.rank = tonumber(field)
      found[#found + 1] = m
    end
  end
  return found
end

-- 1. The two sides.
if #sides == 2 and not ((sides[1] == side and sides[2] == remote) or (sides[1] == remote and sides[2] == side)) then
  for _, name in ipairs(sides) do
    local held = living(pair_key .. ':' .. name)
    if #held > 0 then
      return refuse('config', 'pair ' .. req.pair .. ' links ' .. sides[1] .. ' and ' .. sides[2] .. ', not ' .. side
        .. ' and ' .. remote .. ': use the same two names on both sides, or another pair name', {held = held})
    end
  end
  for _, name in ipairs(sides) do redis.call('DEL', pair_key .. ':' .. name) end
  worlds, launches, formed, retired, autos = {}, {}, {}, {}, {}
  if state == 'formed' then state = 'lost' end
end
sides = {side, remote}
table.sort(sides)

-- 2. The launch.
local mine = read(own_key, rank, redis.call('HGET', own_key, rank))
local same = mine ~= nil and process(mine) == process(me)
local current, opens = launches[side], nil

local function next_auto()
  autos[side] = (autos[side] or 0) + 1
  return 'auto-' .. string.format('%d', autos[side])
end

-- The launch has been in an epoch, and nobody of it waits for the next one yet.
local function over()
  if formed[side] ~= current then return false end
  for field, text in pairs(hash(own_key)) do
    if read(own_key, field, text).epoch > epoch then return false end
  end
  return true
end

-- Without a launch's id nothing tells a worker of the new job from one of the job that it displaces and that comes again.
local function how_to_take_over()
  if req.launch then return '' end
  local alone = req.takeover and ' (ETHA_TAKEOVER=1 and takeover=True have no effect without one)' or ''
  return '. This job has no launch id' .. alone .. ': to take over, start it with an ETHA_LAUNCH_ID of its own, the same '
    .. 'on all its workers; under torchrun, `torchrun --rdzv-id NAME` with ETHA_TAKEOVER=1 does, too'
end

local function held_by_other()
  return refuse('config', 'rank ' .. rank .. ' of side ' .. side .. ' on pair ' .. req.pair .. ' is held by pid '
    .. string.format('%d', mine.pid) .. ' on host ' .. ((mine.name or '') ~= '' and mine.name or mine.host) .. ', which is alive: give each worker its own rank, '
    .. 'or end that process first' .. how_to_take_over(), {held = {mine}})
end

if req.launch then
  for _, id in ipairs(retired[side] or {}) do
    if id == req.launch and id ~= current then
      return refuse('peer_lost', 'launch ' .. id .. ' of side ' .. side .. ' on pair ' .. req.pair
        .. ' was superseded by launch ' .. tostring(current), {reason = 'relaunched'})
    end
  end
  if current ~= req.launch then
    -- A restart of one run is what torchrun does to a job that has failed; another run may be another experiment.
    if current and req.run ~= '' and string.match(current, '^(.*)%.%d+$') ~= req.run and not req.takeover then
      local held = living(own_key)
      if #held > 0 then
        return refuse('config', 'pair ' .. req.pair .. ': launch ' .. current .. ' of side ' .. side .. ' lives ({living}), '
          .. 'and this process belongs to another torchrun run, ' .. req.run .. ': end that job first, use another pair '
          .. 'name, or take over from it with init_pair(takeover=True) or ETHA_TAKEOVER=1', {held = held})
      end
    end
    opens = req.launch
  elseif mine and not same and not dead(mine) then return held_by_other() end
elseif not current then
  opens = next_auto()
elseif mine and not same then
  if not dead(mine) then return held_by_other() end
  if over() or not string.match(current, '^auto%-%d+$') then opens = next_auto() end
elseif not mine and over() and (state ~= 'formed' or #living(own_key) == 0) then
  -- In a formed pair every rank is held: whoever comes for another one has another world size, and is
  -- refused below as long as anybody of this launch lives.
  opens = next_auto()
end

if not opens and worlds[side] and worlds[side] ~= req.world then
  local held = living(own_key)
  if #held > 0 then
    return refuse('config', 'world_size of side ' .. side .. ' on pair ' .. req.pair .. ': rank ' .. rank .. ' says '
      .. string.format('%d', req.world) .. ', launch ' .. current .. ' began with '
      .. string.format('%d', worlds[side]) .. ': all workers of one launch give the same'
      .. how_to_take_over(), {held = held})
  end
  redis.call('DEL', own_key)
  mine = nil
end

-- 3. Nothing new: the same worker at the formed epoch.
if not opens and same and mine and mine.agent == me.agent and state == 'formed' and mine.epoch == epoch then
  return ok({epoch = epoch, state = state})
end

if opens then
  if current then
    local list = retired[side] or {}
    list[#list + 1] = current
    if #list > 16 then table.remove(list, 1) end
    retired[side] = list
    event('relaunched', 'pair', req.pair, 'side', side, 'launch', opens, 'before', current)
  end
  redis.call('DEL', own_key)
  launches[side], mine = opens, nil
end
worlds[side] = req.world

-- 4. A formed pair into which somebody new comes is lost until everybody has come again.
if state == 'formed' then
  state = 'lost'
  if same and not opens then
    reason, why = 'died', 'the agent of ' .. side .. ' rank ' .. rank .. ' died'
  else
    reason, why = 'relaunched', side .. ' was launched again (' .. launches[side] .. ')'
  end
  event('lost', 'pair', req.pair, 'epoch', epoch, 'reason', reason, 'text', why)
end

if state == 'closed' then state = 'lost' end  -- in order, until somebody came again

-- 5. Take the rank.
local waits = mine and same and mine.agent == me.agent and mine.epoch == epoch + 1
me.launch, me.epoch = launches[side], epoch + 1
redis.call('HSET', own_key, rank, json(me))
if not waits then
  event('joined', 'pair', req.pair, 'side', side, 'rank', rank, 'launch', me.launch, 'pid', me.pid, 'host',
    (me.name or '') ~= '' and me.name or me.host)
end

-- 6. Complete? Waiting members whose agent has gone meanwhile are let go first.
local gone = false
local function complete(name, key)
  if not worlds[name] or redis.call('HLEN', key) ~= worlds[name] then return false end
  local all = true
  for field, text in pairs(hash(key)) do
    local m = read(key, field, text)
    if m.epoch ~= epoch + 1 then
      all = false
    elseif not served(m) then
      all, gone = false, true
      redis.call('HDEL', key, field)
      event('left', 'pair', req.pair, 'side', name, 'rank', field, 'reason', 'died', 'text', 'its agent is gone')
    end
  end
  return all
end
if complete(side, own_key) and complete(remote, far_key) then
  epoch, state, reason, why = epoch + 1, 'formed', '', ''
  formed = launches
  event('formed', 'pair', req.pair, 'epoch', epoch)
end

redis.call('HSET', pair_key, 'state', state, 'epoch', string.format('%d', epoch), 'sides', json(sides),
  'world_sizes', object_text(worlds), 'launches', object_text(launches), 'formed_launches', object_text(formed),
  'retired', object_text(retired), 'autos', object_text(autos), 'reason', reason, 'error', why)
if state == 'formed' then redis.call('HDEL', pair_key, 'culprits') end
redis.call('SADD', PREFIX .. 'pairs', req.pair)
keep(PREFIX .. 'pairs')
keep(pair_key)
keep(own_key)
keep(far_key)
if opens or gone or state ~= P.state or epoch ~= number(P.epoch) or req.world <= FEW
    or redis.call('HLEN', own_key) == 1 then
  changed(pair_key, state)
end
return ok({epoch = epoch, state = state})
