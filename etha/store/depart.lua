-- A rank leaves a group, and its replica with it, because the other ranks lack its part. KEYS: group, own replica.
-- Only if the entry is still that member's, or if Redis has lost it: then req.launch is over, which the other ranks of it
-- hear when they enter again. The others may form the next epoch by that.
local replica, rank, me = req.replica, req.rank, req.member
local r = replicas[replica]
local m = r and r.ranks[rank]
local forgotten = not m and req.launch and (not r or r.launch == req.launch) and not retired_text(replica, req.launch)
if not forgotten and (not m or process(m) ~= process(me) or (req.agent and m.agent ~= req.agent)) then return ok(false) end
local why = req.reason == 'died' and 'died' or 'has left'
local text = 'rank ' .. int(rank) .. ' of replica ' .. replica .. ' (' .. shown(m or me) .. ') ' .. why
if r then retire(replica, req.reason, text) else refuse_launch(replica, req.launch, req.reason, text) end
req.loud = true
-- Whoever was in the last epoch has lost a member, and is to hear of it.
form()
save()
return ok(true)
