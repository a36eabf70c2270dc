-- Stands in front of enter.lua and depart.lua. KEYS[1] is the group; a replica's key is KEYS[1]:REPLICA.
-- The rule by which epochs form is that of etha/groups/membership.py, line by line; a test plays both against each other.
local group_key = KEYS[1]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local G = hash(group_key)
local epoch, serial, opened = number(G.epoch), number(G.serial), number(G.opened)
local names, retired, suspects = object(G.replicas), object(G.retired), object(G.suspects)
if not (names and retired and suspects) then
  return refuse('protocol', "Redis key '" .. group_key .. "' does not hold JSON where it should")
end
local function int(value) return string.format('%d', value) end
local function list_text(value) if #value == 0 then return '[]' end return json(value) end
local function key_of(replica) return group_key .. ':' .. replica end

-- All replicas: launch, since (serial), not_before and pause (ms), apart (names), ranks (number -> entry).
local replicas = {}
local function load(name)
  local found, key = {ranks = {}, apart = {}}, key_of(name)
  for field, text in pairs(hash(key)) do
    if string.match(field, '^%d+$') then
      local m = object(text)
      if not m or type(m.agent) ~= 'string' or type(m.host) ~= 'string' or type(m.pid) ~= 'number'
          or type(m.start) ~= 'number' or type(m.last) ~= 'number' or type(m.epoch) ~= 'number' or type(m.step) ~= 'number' then
        error("Redis key '" .. key .. "': field '" .. field .. "' is not a member")
      end
      found.ranks[tonumber(field)] = m
    elseif field == 'launch' then found.launch = text
    elseif field == 'apart' then found.apart = object(text) or error("Redis key '" .. key .. "': field 'apart' is not a list")
    else found[field] = number(text) end
  end
  return found
end
for _, name in ipairs(names) do
  local found = load(name)
  if found.launch then replicas[name] = found end
end

local function process(m) return m.host .. '/' .. int(m.pid) .. '/' .. int(m.start) end
local leases = {}
local function served(m)
  if leases[m.agent] == nil then leases[m.agent] = redis.call('EXISTS', PREFIX .. 'agent:' .. m.agent) == 1 end
  return leases[m.agent]
end
local function all_served(r)
  for _, m in pairs(r.ranks) do if not served(m) then return false end end
  return true
end
-- All ranks are there and want the next epoch.
local function complete(r)
  for rank = 0, number(G.world) - 1 do
    if not r.ranks[rank] or not r.ranks[rank].wants then return false end
  end
  return true
end
local function any_wants(r)
  for _, m in pairs(r.ranks) do if m.wants then return true end end
  return false
end
-- It was in the last epoch.
local function previous(r)
  for _, m in pairs(r.ranks) do if epoch > 0 and m.epoch == epoch then return true end end
  return false
end
-- How far a replica is: the last epoch whose state all its ranks have, and the step.
local function progress(r)
  local last, step = nil, nil
  for _, m in pairs(r.ranks) do
    if not last or m.last < last then last = m.last end
    if not step or m.step < step then step = m.step end
  end
  return last, step
end
-- It was in the last epoch, and as far as the first.
local seated = {}
for _, one in ipairs(object(G.members) or {}) do
  if one.counts then seated[one.replica] = true end
end
local function counted(name) return seated[name] == true and previous(replicas[name]) end
-- It has what the last epoch has committed, but for a step.
local function heir(name) return counted(name) or (epoch > 0 and progress(replicas[name]) == epoch) end
-- It was ever in an epoch, and so may have a state.
local function admitted(r)
  for _, m in pairs(r.ranks) do if m.epoch > 0 then return true end end
  return false
end
local function shown(m) return 'pid ' .. int(m.pid) .. ' on host ' .. ((m.name or '') ~= '' and m.name or m.host) end

-- Whether the last epoch cannot go on, because a replica of it has ended or could not reach another.
local broken = G.broken == '1'
-- A launch is over: its ranks are refused from now on, with this text.
local function refuse_launch(name, launch, reason, text)
  retired[#retired + 1] = {name .. '/' .. launch, text}
  if #retired > 64 then table.remove(retired, 1) end
  event('left', 'group', req.group, 'replica', name, 'reason', reason, 'text', text)
end
-- A replica ends, and its launch with it.
local function retire(name, reason, text)
  local r = replicas[name]
  if not r then return end
  refuse_launch(name, r.launch, reason, text)
  if previous(r) then broken = true end
  replicas[name] = nil
  suspects[name] = nil
  redis.call('DEL', key_of(name))
end
local function retired_text(name, launch)
  for _, one in ipairs(retired) do if one[1] == name .. '/' .. launch then return one[2] end end
  return nil
end

local function write(name, r)
  local key, fields = key_of(name), {}
  for _, field in ipairs({'since', 'not_before', 'pause'}) do
    fields[#fields + 1] = field
    fields[#fields + 1] = int(number(r[field]))
  end
  for rank, m in pairs(r.ranks) do
    fields[#fields + 1] = int(rank)
    fields[#fields + 1] = json(m)
  end
  redis.call('HSET', key, 'launch', r.launch, 'apart', list_text(r.apart), unpack(fields))
  keep(key)
end

-- Ranks of one replica that stand at different steps. A replica in which some have loaded a state and others have not
-- can load again, if there are others to load from.
local function torn(r, others)
  local first = r.ranks[0]
  for rank, m in pairs(r.ranks) do
    if m.step ~= first.step and (m.last == first.last or not others) then
      return 'its rank 0 is at step ' .. int(first.step) .. ', its rank ' .. int(rank) .. ' at step ' .. int(m.step)
    end
  end
  return nil
end

local function ahead(a, b)
  local last, step = progress(replicas[a])
  local other_last, other_step = progress(replicas[b])
  if last ~= other_last then return last > other_last end
  if step ~= other_step then return step > other_step end
  return false
end

-- Add the ranks of a replica that do not want the next epoch yet, up to 64 in all.
local function add_lacking(missing, name)
  local r = replicas[name]
  for rank = 0, number(G.world) - 1 do
    local m = r.ranks[rank]
    if #missing < 64 and not (m and m.wants) then
      missing[#missing + 1] = m and {replica = name, rank = rank, agent = m.agent, host = m.host, name = m.name,
        pid = m.pid, start = m.start} or {replica = name, rank = rank}
    end
  end
end

-- Form the next epoch if the rule allows it. Answers how many ms later the time alone may allow it (0: never), and
-- the members that are waited for.
local function form()
  for name, r in pairs(replicas) do
    local text = complete(r) and torn(r, true)
    if text then retire(name, 'torn', 'replica ' .. name .. ' is torn: ' .. text .. ': start it again') end
  end
  local first_wish = false
  for _, r in pairs(replicas) do
    if (complete(r) and number(r.not_before) <= now) or (previous(r) and any_wants(r)) then first_wish = true end
  end
  local soonest = 0
  local function later(at) if at > now and (soonest == 0 or at < soonest) then soonest = at end end
  for _, r in pairs(replicas) do if complete(r) then later(number(r.not_before)) end end
  if not first_wish then
    opened = 0
    return soonest == 0 and 0 or soonest - now, {}
  end
  if opened == 0 then opened = now end
  local timeout_at, grace_at = opened + number(G.timeout), opened + number(G.grace)
  -- A Redis that was away knows of no agent until that has renewed its lease.
  local silent_at = grace_at + req.agent_lease
  local chosen, least, waits, inherits, newest, absent = {}, 1, {}, false, -1, {}
  for name, r in pairs(replicas) do
    if complete(r) and all_served(r) and number(r.not_before) <= now then
      chosen[#chosen + 1] = name
      least = math.max(least, number(r.ranks[0].least))
      inherits = inherits or heir(name)
      local last = progress(r)
      newest = math.max(newest, last)
    else
      local by = (previous(r) and all_served(r) and not suspects[name]) and timeout_at or grace_at
      if number(r.not_before) <= now and (previous(r) or any_wants(r)) and now < by then
        waits[#waits + 1] = name
        later(by)
      end
      if all_served(r) or now < silent_at then absent[#absent + 1] = name end
    end
  end
  local function left(fits)
    for _, name in ipairs(absent) do
      if fits(replicas[name]) then
        waits[#waits + 1] = name
        if not all_served(replicas[name]) then later(silent_at) end
      end
    end
  end
  if #waits == 0 and not inherits then left(previous) end
  if #waits == 0 and #chosen > 0 and newest < number(G.base) then left(admitted) end
  if #waits == 0 and #chosen >= least then
    table.sort(chosen, function(a, b)
      if ahead(a, b) then return true end
      if ahead(b, a) then return false end
      return number(replicas[a].since) < number(replicas[b].since)
    end)
    local first = chosen[1]
    local text = torn(replicas[first], false)
    if text then
      retire(first, 'torn', 'replica ' .. first .. ' is torn: ' .. text .. ': start it again')
      return form()
    end
    epoch, opened, suspects, broken = epoch + 1, 0, {}, false
    G.base, seated = int(progress(replicas[first])), {}
    local members = {}
    for index, name in ipairs(chosen) do
      local r, at = replicas[name], {}
      local last, step = progress(r)
      for rank = 0, number(G.world) - 1 do
        local m = r.ranks[rank]
        at[rank + 1] = {agent = m.agent, host = m.host, name = m.name, pid = m.pid, start = m.start}
      end
      members[index] = {replica = name, launch = r.launch, step = step, committed = r.ranks[0].committed,
        last = last, counts = not ahead(first, name), at = at}
      if members[index].counts then seated[name] = true end
    end
    for _, name in ipairs(chosen) do
      local r = replicas[name]
      for _, m in pairs(r.ranks) do m.epoch, m.wants = epoch, false end
      write(name, r)
    end
    G.members = list_text(members)
    event('formed', 'group', req.group, 'epoch', int(epoch), 'text', table.concat(chosen, ', '))
    return form()
  end
  local missing = {}
  for _, name in ipairs(waits) do add_lacking(missing, name) end
  return soonest == 0 and 0 or soonest - now, missing
end

-- Write the group back and wake everybody who watches it.
local function save()
  names = {}
  for name in pairs(replicas) do names[#names + 1] = name end
  table.sort(names)
  local state = opened > 0 and 'changing' or (epoch > 0 and 'formed' or 'forming')
  redis.call('HSET', group_key, 'state', state, 'epoch', int(epoch), 'serial', int(serial), 'opened', int(opened),
    'world', int(number(G.world)), 'timeout', int(number(G.timeout)), 'grace', int(number(G.grace)),
    'replicas', list_text(names), 'members', G.members or '[]', 'base', int(number(G.base)), 'retired', list_text(retired),
    'suspects', object_text(suspects), 'broken', broken and '1' or '0')
  redis.call('SADD', PREFIX .. 'groups', req.group)
  keep(PREFIX .. 'groups')
  keep(group_key)
  if state ~= G.state or int(epoch) ~= G.epoch or req.loud or (broken and G.broken ~= '1') then changed(group_key, state .. ' ' .. int(epoch)) end
  return state
end
