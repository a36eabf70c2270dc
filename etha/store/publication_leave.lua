-- The launch of a side ends because a rank has left or died, if the rank is still that member's. KEYS: publication.
local S = hash(side_key(req.side))
local text = S[int(req.rank)]
local m = text and object(text)
if not m or process(m) ~= process(req.member) or m.agent ~= req.member.agent then return ok(false) end
local why = req.reason == 'died' and 'died' or 'has left'
end_side(req.side, S, req.reason, 'rank ' .. int(req.rank) .. ' of ' .. req.side .. ' (' .. shown(m) .. ') ' .. why)
changed(key, 'left')
lapse()
match()
finish()
return ok(true)
