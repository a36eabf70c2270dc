-- One rank of a replica enters a group. KEYS: group, own replica. With req.wants it asks for the next epoch, without it
-- only says that it is there (a new agent, or a Redis that has lost its data). Answers ok = {epoch, state, launch,
-- formed (whether this rank is in that epoch), wait (ms), missing, apart (agents of the replicas that this one could not
-- reach)}; or an error, with "held" as join.lua's.
local replica, rank, me = req.replica, req.rank, req.member
if redis.call('EXISTS', PREFIX .. 'agent:' .. me.agent) == 0 then
  return refuse('unpublished', 'agent ' .. me.agent .. ' is not listed: Redis has lost its record')
end
leases[me.agent] = true
G.timeout, G.grace = req.timeout, req.grace
local where = 'rank ' .. int(rank) .. ' of replica ' .. replica .. ' of group ' .. req.group
local live = next(replicas) ~= nil
if live and number(G.world) ~= req.world then
  for name, r in pairs(replicas) do
    if name ~= replica then
      return refuse('config', where .. ' says world_size ' .. int(req.world) .. ', replica ' .. name .. ' has '
        .. int(number(G.world)) .. ' ranks: all replicas of a group have as many')
    end
  end
end

-- 1. The launch of the replica.
local r = replicas[replica]
local mine = r and r.ranks[rank]
local same = mine and process(mine) == process(me)
local function open_launch(launch)
  serial = serial + 1
  -- A Redis that has lost its data counts from the beginning, so the number alone may be that of a launch that has ended.
  local own = string.format('auto-%d-%d-%d', serial, me.pid, me.start)
  r = {launch = launch or own, since = serial, not_before = 0, pause = 0, apart = {}, ranks = {}}
  replicas[replica], mine = r, nil
end
local text = req.launch and retired_text(replica, req.launch)
if text and req.epoch == 0 and not req.launch:match('^auto%-') then
  -- A process that was never in an epoch: a new one, under a name that has ended.
  text = text .. ': launch ' .. req.launch .. ' of this replica is over, and its name is not used again; start the replica '
    .. 'with another ETHA_LAUNCH_ID, under torchrun with another --rdzv-id or --standalone'
end
if text then return refuse('group_lost', text, {replica = replica}) end
local function held()
  return refuse('config', where .. ' is held by ' .. shown(mine) .. ', which is alive: give each worker its own replica '
    .. 'and rank, or end that process first', {held = {mine}})
end
local function dead(m) return req.dead[process(m)] or (m.host ~= me.host and not served(m)) end
if not r then
  open_launch(req.launch)
elseif req.launch and req.launch ~= r.launch then
  retire(replica, 'relaunched', 'launch ' .. r.launch .. ' of replica ' .. replica .. ' was superseded by launch ' .. req.launch)
  open_launch(req.launch)
elseif mine and not same then
  if not dead(mine) then return held() end
  retire(replica, 'died', where .. ' (' .. shown(mine) .. ') has ended, and its replica with it')
  open_launch(nil)
end
G.world = req.world

-- 2. Redis may have lost what this member knows. Whoever has formed an epoch meanwhile sees that the number has grown.
if req.epoch > epoch then
  epoch, G.members, seated = req.epoch, '[]', {}
  req.loud = true
elseif req.epoch == epoch and epoch > 0 then
  local others, mine_too = object(G.members) or {}, false
  for _, one in ipairs(others) do mine_too = mine_too or one.replica == replica end
  if #others > 0 and not mine_too then
    -- An empty Redis has given the number again: all who were ever in an epoch meet, and nobody goes on alone.
    epoch, G.members, seated = epoch + 1, '[]', {}
    G.base = int(epoch)
    req.loud, broken = true, true
  end
end

-- 3. Take the rank. The same question once more changes nothing if its answer was lost.
-- Its groups have stood since it has last entered, so it reaches everybody.
if same and mine and req.step > mine.step then r.pause, r.apart = 0, {} end
me.last, me.step, me.committed, me.least = req.last, req.step, req.committed, req.least
me.epoch = same and mine and math.max(mine.epoch, req.epoch) or req.epoch
local answered = same and mine and mine.asked == req.asked and not mine.wants and mine.epoch == epoch
  and mine.epoch > req.epoch
-- The agent asks the same question again after a while: what it reports of others counts once.
local again = same and mine and req.asked ~= '' and mine.asked == req.asked
me.wants = req.wants and not answered
-- A new agent first hears that the member is there, and then its question again, which may have been answered already.
me.asked = req.asked ~= '' and req.asked or (same and mine and mine.asked) or ''
r.ranks[rank] = me
suspects[replica] = nil
if req.wants and not again then
  for _, name in ipairs(req.suspects) do
    if replicas[name] and name ~= replica then suspects[name] = true end
  end
  -- Two that cannot reach each other: the one that was behind, else the one that came later, retries after a pause.
  for _, name in ipairs(req.unmet) do
    local other = replicas[name]
    if other and name ~= replica then
      local loser, winner = r, name
      local ours, theirs = counted(replica), counted(name)
      if (ours and not theirs) or (ours == theirs and number(other.since) > number(r.since)) then
        loser, winner = other, replica
      end
      if number(loser.not_before) <= now then
        loser.pause = math.min(60000, math.max(5000, 2 * number(loser.pause)))
        loser.not_before = now + loser.pause
      end
      local known = false
      for _, one in ipairs(loser.apart) do known = known or one == winner end
      if not known then loser.apart[#loser.apart + 1] = winner end
      if loser == other then write(name, other) end
      -- Nobody needs to wait any more until the last epoch's members have met.
      if epoch > 0 and me.epoch == epoch then broken = true end
    end
  end
end
write(replica, r)
local wait, missing = form()
-- A replica that form() has found torn is not there any more.
text = retired_text(replica, r.launch)
local state = save()
if text then return refuse('group_lost', text, {replica = replica}) end
local formed = r.ranks[rank].epoch == epoch and not r.ranks[rank].wants
-- If nobody else is waited for, this replica may wait for its own ranks.
if #missing == 0 and req.wants and not formed then add_lacking(missing, replica) end
local apart, told = {}, {}
for _, name in ipairs(r.apart) do
  for _, m in pairs(replicas[name] and replicas[name].ranks or {}) do
    if not told[m.agent] then apart[#apart + 1], told[m.agent] = m.agent, true end
  end
end
return cjson.encode({ok = {epoch = epoch, state = state, launch = r.launch, formed = formed, wait = wait,
  missing = missing, apart = apart, members = formed and (G.members or '[]') or '[]'}})
