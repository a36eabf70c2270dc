-- One rank of a side enters a publication. KEYS: publication. Answers ok = {serial, launch, complete, puts, held, seq,
-- version, description}; or an error, with "held" as join.lua's.
local side, rank, me = req.side, req.rank, req.member
if redis.call('EXISTS', PREFIX .. 'agent:' .. me.agent) == 0 then
  return refuse('unpublished', 'agent ' .. me.agent .. ' is not listed: Redis has lost its record')
end
leases[me.agent] = true
local where = 'publication ' .. req.publication .. ', ' .. req.role .. ' ' .. side
local at = table_key(req.digest)
if redis.call('EXISTS', at) == 0 then
  if next(req.tensors) == nil then return refuse('unknown_table', 'the table of ' .. where .. ' is not known') end
  for name, text in pairs(req.tensors) do redis.call('HSET', at, name, text) end
  for digest, text in pairs(req.sets) do redis.call('HSET', part('sets'), digest, text) end
end
keep(at)

local own_key = side_key(side)
local S = hash(own_key)
local ranks, count = ranks_of(S, own_key)
local function is_dead(m) return req.dead[process(m)] or (m.host ~= me.host and not served({m.agent})) end
local function living(found)
  local held = {}
  for _, m in pairs(found) do
    if process(m) ~= process(me) and not is_dead(m) and #held < 64 then held[#held + 1] = m end
  end
  return held
end

-- 1. Who else is here under this role or name.
if S.role and S.role ~= req.role then
  local held = living(ranks)
  if #held > 0 then
    return refuse('config', where .. ': ' .. side .. ' is a ' .. S.role .. ' of it already: give each side its own name',
      {held = held})
  end
  end_side(side, S, 'died', 'the ' .. S.role .. ' ' .. side .. ' has ended')
  S, ranks, count = {}, {}, 0
end
if req.role == 'publisher' and (P.publisher or '') ~= '' and P.publisher ~= side then
  local other = hash(side_key(P.publisher))
  if other.serial then
    local held = living((ranks_of(other, side_key(P.publisher))))
    if #held > 0 then
      return refuse('config', where .. ': ' .. P.publisher .. ' publishes it already, and is alive (' .. shown(held[1])
        .. '): a publication has one publisher', {held = held})
    end
    end_side(P.publisher, other, 'died', 'publisher ' .. P.publisher .. ' has ended')
  end
end

-- 2. The launch.
local text = req.launch and retired_text(side, req.launch)
-- An agent that puts its rank back may not have heard that another rank has left.
if req.serial > 0 then text = text or over_text(side, req.serial) end
if text then return refuse('group_lost', text) end
local mine = ranks[rank]
local opens = not S.launch
if S.launch then
  local over
  if req.launch and req.launch ~= S.launch then
    -- A restart of one run is what torchrun does to a job that has failed; another run may be another experiment.
    if req.serial == 0 and req.run ~= '' and string.match(S.launch, '^(.*)%.%d+$') ~= req.run and not req.takeover then
      local held = living(ranks)
      if #held > 0 then
        return refuse('config', where .. ': launch ' .. S.launch .. ' lives (' .. shown(held[1]) .. '), and this process '
          .. 'belongs to another torchrun run, ' .. req.run .. ': end that job first, take another name, or take over from '
          .. 'it with ETHA_TAKEOVER=1', {held = held})
      end
    end
    over = {'relaunched', 'launch ' .. S.launch .. ' of ' .. side .. ' was superseded by launch ' .. req.launch}
  elseif mine and process(mine) ~= process(me) then
    if not is_dead(mine) then
      return refuse('config', where .. ': rank ' .. int(rank) .. ' is held by ' .. shown(mine) .. ', which is alive: give '
        .. 'each worker its own rank, and each replica its own name, or end that process first', {held = {mine}})
    end
    over = {'died', 'rank ' .. int(rank) .. ' of ' .. side .. ' (' .. shown(mine) .. ') has ended'}
  elseif mine and mine.agent ~= me.agent then -- what it had set aside was in the memory of an agent that it has lost
    over = {'died', 'rank ' .. int(rank) .. ' of ' .. side .. ' (' .. shown(mine) .. ') has lost its agent'}
  elseif number(S.world) ~= req.world then
    local held = living(ranks)
    if #held > 0 then
      return refuse('config', where .. ': rank ' .. int(rank) .. ' says world_size ' .. int(req.world)
        .. ', this launch began with ' .. S.world .. ': all workers of one launch give the same', {held = held})
    end
    over = {'relaunched', side .. ' was launched again with ' .. int(req.world) .. ' ranks'}
  end
  if over then
    end_side(side, S, over[1], over[2])
    S, ranks, count, opens = {}, {}, 0, true
  end
end
if not opens then
  if S.digest ~= req.digest then
    return refuse('config', where .. ': rank ' .. int(rank) .. ' registers other tensors than the ranks before it: all '
      .. 'ranks of a side register the same names, global shapes, dtypes and parts')
  end
  for _, name in ipairs({'slots', 'places'}) do
    local given = int(req[name])
    if S[name] ~= given then
      return refuse('config', where .. ': rank ' .. int(rank) .. ' gives ' .. name .. '=' .. given .. ', the ranks before it '
        .. S[name] .. ': all ranks of a side give the same')
    end
  end
end
if req.role == 'subscriber' and (P.description or '') ~= '' then
  local why = feeds(P.description, req.digest, P.description)
  if why ~= '' then return refuse('config', where .. ': ' .. why) end
end
if opens then
  -- Sides none of whose agents answers any more are forgotten, at most once a minute. An agent that comes back puts them
  -- back. If one answers, its ranks ask, and end_if_silent ends the side for all.
  if now - number(P.swept) > 60000 then
    P.swept = now
    for _, name in ipairs(redis.call('SMEMBERS', part('sides'))) do
      local other = hash(side_key(name))
      local answers = false
      for _, m in pairs((ranks_of(other, side_key(name)))) do answers = served({m.agent}) or answers end
      if not other.serial then
        redis.call('SREM', part('sides'), name)
      elseif not answers and other.role == 'subscriber' then
        end_side(name, other, 'died', 'an agent of ' .. name .. ' does not answer')
        remove(retired, retired[#retired])
      end
    end
  end
  local own = req.serial > 0 and req.serial or next_serial()
  serial = math.max(serial, own)
  S = {role = req.role, launch = req.launch or 'auto-' .. int(own), serial = int(own), world = int(req.world),
    digest = req.digest, zone = req.zone, slots = int(req.slots), places = int(req.places),
    passes = req.passes and '1' or '0', copies = int(req.copies or 0), held = '0', version = '', call = '0', over = '0', asked = '', claim = '0',
    protect = '0', refused = '0', source = '', seconds = '0', error = '', puts = '0', announced = '0', put = '', pending = '',
    silent = '0', unfit = ''}
  local fields = {}
  for field, value in pairs(S) do
    fields[#fields + 1] = field
    fields[#fields + 1] = value
  end
  redis.call('HSET', own_key, unpack(fields))
  redis.call('SADD', part('sides'), side)
end

-- 3. Take the rank.
redis.call('HSET', own_key, int(rank), json(me))
if not ranks[rank] then
  count = count + 1
  event('joined', 'publication', req.publication, 'side', side, 'rank', int(rank), 'launch', S.launch, 'pid', int(me.pid),
    'host', (me.name or '') ~= '' and me.name or me.host)
end
ranks[rank] = me
local complete = count >= req.world
if complete then
  add_holder(side, S, ranks)
  if req.role == 'publisher' then
    P.publisher, P.launch, P.state, P.description = side, S.launch, 'open', req.digest
    changed(key, 'open')
  end
  wake(side, 'complete')
end
keep(own_key)
lapse()
match()
finish()
return ok({serial = number(S.serial), launch = S.launch, complete = complete, puts = number(S.puts),
  held = number(S.held), seq = number(P.seq), version = P.version or '', description = P.description or ''})
