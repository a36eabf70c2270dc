-- A rank leaves a group, and its replica with it, because the other ranks lack its part. KEYS: group, own replica.
-- Only if the entry is still that member's. The others may form the next epoch by that.
local replica, rank, me = req.replica, req.rank, req.member
local r = replicas[replica]
local m = r and r.ranks[rank]
if not m or process(m) ~= process(me) or (req.agent and m.agent ~= req.agent) then return ok(false) end
local why = req.reason == 'died' and 'died' or 'has left'
retire(replica, req.reason, 'rank ' .. int(rank) .. ' of replica ' .. replica .. ' (' .. shown(m) .. ') ' .. why)
req.loud = true
-- Whoever was in the last epoch has lost a member, and is to hear of it.
form()
save()
return ok(true)
